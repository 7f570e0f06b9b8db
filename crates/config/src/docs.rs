// SPDX-License-Identifier: Apache-2.0
//! docs/config.md, made from the table of keys.

use std::fmt::Write;

use crate::database::DATABASE_KEYS;
use crate::key::{self, Change, Key, Section, Support};
use crate::mirror::MIRROR_KEYS;
use crate::peer::PEER_KEYS;
use crate::user::USER_KEYS;

const HEAD: &str = "\
<!-- Generated from the table of keys in crates/config/src by `cargo run -p underpass-config --example config_md`. -->
# Configuration

Underpass reads PgBouncer's `pgbouncer.ini`. Names, defaults, units and meanings are PgBouncer's; this page lists all
keys and says where something differs. Times are in seconds and may have fractions. Numbers are decimal, or octal with
a leading `0`, or hexadecimal with `0x`. Switches are `0` or `1`. A key given twice has the value of the later line.

`underpass pooler --check FILE` reads a configuration, names every mistake with file and line, and looks for
contradictions between keys.

A *restart* key keeps its running value at RELOAD, with a warning in the log; SET of it does nothing, as in PgBouncer.

## Syntax

- Sections: `[pgbouncer]`, `[databases]`, `[users]`, `[peers]`, `[underpass]`, `[underpass:mirror:NAME]`. Unknown sections and keys are errors.
- Lines that start with `;` or `#` are comments. Both are ordinary characters later in a line.
- `%include FILE` reads another file, relative to the working directory, at most 10 deep.
- Database and user names of other characters than letters, digits and `_.-*` stand in double quotes, `\"\"` for one.
- A second `[pgbouncer]` section sets all keys back to their defaults, as in PgBouncer. Underpass warns about it.
- `[underpass]` may stand in a file of its own, so that the ini still starts PgBouncer:
  `underpass pooler --overlay underpass.ini pgbouncer.ini`. Overlay files add to the ini and override single keys.
";

/// The whole page.
pub fn config_md() -> String {
    let mut page = String::from(HEAD);
    differences(&mut page);
    let mut group = "";
    for section in [Section::Pgbouncer, Section::Underpass] {
        // Rows of a section stand in the order of the table, which is by theme; `key::all` is alphabetical.
        let rows = match section {
            Section::Pgbouncer => crate::config::PGBOUNCER_KEYS,
            Section::Underpass => crate::underpass::UNDERPASS_KEYS,
        };
        for key in rows {
            if key.group != group {
                group = key.group;
                let _ = write!(page, "\n## {group}\n");
                if section == Section::Underpass {
                    page.push_str("\nSHOW CONFIG and SET call these keys `underpass.name`.\n");
                }
                page.push_str("\n| key | type | default | change | meaning |\n|---|---|---|---|---|\n");
            }
            row(&mut page, key);
        }
    }
    mirrors(&mut page);
    entries(&mut page);
    page
}

fn mirrors(page: &mut String) {
    page.push_str(
        "\n## Section [underpass:mirror:NAME]\n\nA further server that gets what the clients of some databases say: see mirroring.md. All keys change with RELOAD; SET and\nSHOW CONFIG do not know them.\n\n| key | type | default | meaning |\n|---|---|---|---|\n",
    );
    for key in MIRROR_KEYS {
        let _ = writeln!(page, "| `{}` | {} | {} | {} |", key.name, key.value_type, key.default, key.doc);
    }
}

fn plain(doc: &str) -> String {
    let text = doc.lines().map(str::trim).collect::<Vec<_>>().join(" ");
    text.trim().replace("\\[", "[").replace("\\]", "]").replace('|', "\\|")
}

fn default(key: &Key) -> String {
    match key.default {
        None => "unset".to_owned(),
        Some("") => "empty".to_owned(),
        Some(text) => format!("`{text}`"),
    }
}

fn row(page: &mut String, key: &Key) {
    let change = match key.change {
        Change::Reload => "reload",
        Change::Restart => "restart",
    };
    let note = match key.support {
        Support::Same => "",
        _ => " *Differs, see above.*",
    };
    let _ = writeln!(
        page,
        "| `{}` | {} | {} | {change} | {}{note} |",
        key.name,
        key.value_type,
        default(key),
        plain(key.doc)
    );
}

fn differences(page: &mut String) {
    page.push_str("\n## What differs from PgBouncer\n\n| key | what happens |\n|---|---|\n");
    for key in key::all() {
        let text = match key.support {
            Support::Same => continue,
            Support::Differs(note) => note.to_owned(),
            Support::NoEffect(note) => {
                format!("accepted without effect, one warning when it is not at its default: {note}")
            }
            Support::Unsupported(note) => format!("an error when set: {note}"),
        };
        let _ = writeln!(page, "| `{}` | {text} |", key.name);
    }
}

fn entries(page: &mut String) {
    let list = |keys: &[&str]| keys.iter().map(|k| format!("`{k}`")).collect::<Vec<_>>().join(", ");
    let _ = write!(
        page,
        "
## Section [databases]

`name = key=value key=value ...`; values with spaces stand in single quotes, `''` for one. `*` is the entry for every
name without its own. Keys: {}. `reserve_pool` is the old name of `reserve_pool_size`.

`host` is a name, an address, `/directory` or `@name` of a unix socket, or a list of them separated by commas; without
it the server is asked at a unix socket in `unix_socket_dir`. `load_balance_hosts` is `round-robin` (each new connection goes to the next host)
or `disable` (all go to one host until a connection to it fails). A host that cannot be reached, or is starting up, is passed over at
once for the next one; `server_login_retry` begins when all have failed. A host that refuses the user is not passed over;
if it was asked because another could not be reached, the attempt after `server_login_retry` goes to the one after it.

## Section [users]

`name = key=value ...`. Keys: {}.

## Section [peers]

`id = key=value ...`. Keys: {}. `host` is needed; `port` is 6432 unless given. At most `pool_size` cancel requests (default:
`default_pool_size`; 0 is one at a time) are under way to a peer at the same time; others wait for their turn, at most `cancel_wait_timeout`.

## Which setting wins

| setting | order | not an override |
|---|---|---|
| `pool_mode` | user, database, global | |
| `pool_size` | user, database, `default_pool_size` | negative |
| `reserve_pool_size` | user, database, global | negative |
| `query_wait_timeout` | user, database, global | negative |
| `min_pool_size` | database, global | negative |
| `server_lifetime` | database, global | 0, negative |
| `max_db_connections`, `max_db_client_connections` | database, global | 0, negative |
| `max_user_connections`, `max_user_client_connections` | user, global | 0, negative |
| `query_timeout`, `idle_transaction_timeout`, `transaction_timeout`, `client_idle_timeout` | user, global | 0, negative |
| `auth_user`, `auth_query`, `auth_dbname` | database, global | |

The user is the pool's: the forced user (`user=`) of the database if it has one, else the client's. `query_wait_timeout`, `client_idle_timeout` and
`max_user_client_connections` go by the user that the client has logged in as. Replication
connections are always in session mode.
",
        list(DATABASE_KEYS),
        list(USER_KEYS),
        list(PEER_KEYS),
    );
}

const INI_HEAD: &str = "\
; Every key with its default and meaning. Generated from the table of keys in crates/config/src by
; `cargo run -p underpass-config --example full_ini`. docs/config.md has the same and more.
; Remove the ';' before a key to change it.

[databases]
; foodb over a unix socket
;foodb =
; another name at the server, a pool of its own size
;shop = host=10.0.0.5 port=5432 dbname=shop_production pool_size=50
; one server user for all clients
;forced = host=10.0.0.5 user=app password='it''s secret' connect_query='select 1'
; two hosts in turn
;both = host=10.0.0.5,10.0.0.6
; names with other characters
;\"my shop\" = host=10.0.0.5
; every other name
;* = host=10.0.0.5

[users]
;batch = pool_mode=session max_user_connections=10 query_timeout=600

[peers]
;1 = host=/run/pooler1
;2 = host=10.0.0.8 port=6432

[pgbouncer]
";

/// etc/underpass.ini: a file with every key, commented out, at its default.
pub fn full_ini() -> String {
    let mut file = String::from(INI_HEAD);
    let mut group = "";
    for key in crate::config::PGBOUNCER_KEYS.iter().filter(|k| k.shown) {
        if key.group != group {
            group = key.group;
            let _ = write!(file, "\n;;; {group}\n");
        }
        ini_key(&mut file, key);
    }
    file.push_str(
        "\n; PgBouncer refuses this section; --overlay reads it from a file of its own.\n;[underpass]\n",
    );
    for key in crate::underpass::UNDERPASS_KEYS {
        ini_key(&mut file, key);
    }
    file.push_str(INI_MIRROR);
    file
}

const INI_MIRROR: &str = "
; A mirror named shadow: see docs/mirroring.md and docs/config.md.
;[underpass:mirror:shadow]
;databases = shop
;host = 10.0.0.9
;port = 5432
;mode = async
;queue_bytes = 67108864
;compare_rows = unordered
";

fn ini_key(file: &mut String, key: &Key) {
    let restart = if key.change == Change::Restart { " Restart." } else { "" };
    let text = plain(key.doc).replace('`', "");
    let mut line = String::from(";;");
    for word in format!("{text}{restart}").split(' ') {
        if line.len() + 1 + word.len() > 110 {
            let _ = writeln!(file, "{line}");
            line = String::from(";;");
        }
        line.push(' ');
        line.push_str(word);
    }
    if let Support::Differs(note) | Support::NoEffect(note) | Support::Unsupported(note) = key.support {
        let _ = write!(line, "\n;; Differs from PgBouncer: {note}.");
    }
    let setting = format!(";{} = {}", key.name, key.default.unwrap_or_default());
    let _ = writeln!(file, "{line}\n{}", setting.trim_end());
}
