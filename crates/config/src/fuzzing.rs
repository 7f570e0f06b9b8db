// SPDX-License-Identifier: Apache-2.0
//! Entry points for fuzzers: any bytes in, no panic, and what was read must hold what the types promise.

use std::path::Path;
use std::sync::Arc;

use crate::check::check;
use crate::config::Config;
use crate::files::MemFiles;
use crate::hba::{Hba, HbaClient};
use crate::ident::IdentMaps;
use crate::reload::kept_warning;
use crate::url::Upstream;
use crate::userlist::Userlist;

/// An ini file that may include itself as `a` and an auth_file `b` of the same bytes.
pub fn ini(data: &[u8]) {
    let mut files = MemFiles::default();
    files.0.insert("a".into(), data.to_vec());
    files.0.insert("b".into(), data.to_vec());
    let Ok(loaded) = Config::load_with(&files, &[Path::new("a")]) else { return };
    let config = loaded.config;
    check(&config, &files);
    // What SHOW CONFIG prints must be accepted again and mean the same, up to %g's six digits of times.
    let mut again = Config::default();
    for row in config.show() {
        let value = row.value.unwrap_or_default();
        assert!(again.set(&row.key, &value).is_ok(), "{} = {value}", row.key);
    }
    let diff = Config::diff_for_reload(&Config::default(), &config);
    diff.kept.iter().for_each(|k| drop(kept_warning(k)));
    let nothing = Config::diff_for_reload(&config, &config);
    assert!(nothing.changed.is_empty() && nothing.kept.is_empty() && nothing.reconnect.is_empty());
    for name in config.databases.named.keys().map(String::as_str).chain(["other", "pgbouncer"]) {
        if let Some((db, _)) = config.database(name) {
            assert!(name != crate::CONSOLE_DATABASE && db.port != 0);
            let user = db.user.as_deref().unwrap_or("u");
            let _ = (
                config.pool_mode(&db, user),
                config.pool_size(&db, user),
                config.query_wait_timeout(&db, user),
            );
        }
    }
}

/// An auth_file; the bytes are also tried as a connection string.
pub fn userlist(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let parsed = Userlist::parse(&Arc::from("userlist"), text);
    parsed.value.iter().for_each(|(_, secret)| _ = secret.kind());
    // Reading ends at the first fault.
    assert!(parsed.errors.len() <= 1);
    if let Ok(upstream) = Upstream::parse(text) {
        upstream.database("db");
    }
}

/// An HBA file that may name itself as `@h`; the bytes are also tried as an ident map.
pub fn hba(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let mut files = MemFiles::default();
    // One level of @h is enough to see recursion end; a self-reference at full size would only be slow.
    files.0.insert("h".into(), data[..data.len().min(256)].to_vec());
    let ident = IdentMaps::parse(&Arc::from("i"), text).value;
    let parsed = Hba::parse(&files, Path::new("h"), text, &ident);
    assert!(parsed.value.rules.len() + parsed.errors.len() <= text.lines().count());
    for address in [None, Some([127, 0, 0, 1].into()), Some([0u16; 8].into())] {
        let client = HbaClient {
            database: "d",
            user: "u",
            address,
            tls: address.is_some(),
            physical_replication: false,
        };
        if let Some(rule) = parsed.value.find(&client) {
            assert!(rule.matches(&client));
        }
    }
}
