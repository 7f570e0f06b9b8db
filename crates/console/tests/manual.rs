// SPDX-License-Identifier: Apache-2.0
//! `docs/console.md` has a part that is made from the tables: this test compares it, and writes it when the
//! environment variable `UPDATE_DOCS` is set.

use std::fmt::Write;
use std::path::PathBuf;

use underpass_console::help::CONTROL_COMMANDS;
use underpass_console::{Access, Show};

const BEGIN: &str = "<!-- From here on made from the tables: `UPDATE_DOCS=1 cargo test -p underpass-console --test manual` -->\n";

fn generated() -> String {
    let mut page = String::from(BEGIN);
    page.push_str("\n## Commands that act\n\nAll of them are for admin users.\n\n| command | what it does |\n|---|---|\n");
    for (usage, help) in CONTROL_COMMANDS {
        writeln!(page, "| `{usage}` | {help} |").unwrap();
    }
    page.push_str("\n## Commands that show\n\n`SELECT x` is the same as `SHOW x`.\n");
    for show in Show::ALL {
        write!(page, "\n### SHOW {}\n\n{}\n", show.name(), show.help()).unwrap();
        if show.access() == Access::Admin && !show.help().contains("admin") {
            page.push_str("For admin users only.\n");
        }
        match show {
            Show::Servers => page.push_str("The columns are those of `SHOW CLIENTS`.\n"),
            Show::ActiveSockets => page.push_str("The columns are those of `SHOW SOCKETS`.\n"),
            _ if show.columns().is_empty() => {}
            _ => {
                page.push_str("\n| column | type | what it says |\n|---|---|---|\n");
                for column in show.columns() {
                    writeln!(page, "| `{}` | {} | {} |", column.name, column.column_type.name(), column.help)
                        .unwrap();
                }
            }
        }
    }
    page
}

#[test]
fn the_manual_is_fresh() {
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/console.md");
    let page = std::fs::read_to_string(&file).expect("docs/console.md");
    let (written, _) =
        page.split_once(BEGIN).expect("docs/console.md has the line that begins the generated part");
    let fresh = format!("{written}{}", generated());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&file, fresh).unwrap();
    } else {
        assert!(page == fresh, "docs/console.md is stale: see its comment for the command that writes it");
    }
}

/// What says the same in two places must say it in the same words.
#[test]
fn shared_columns_are_shared() {
    assert_eq!(Show::Clients.columns(), Show::Servers.columns());
    assert_eq!(Show::Sockets.columns(), Show::ActiveSockets.columns());
    assert_eq!(&Show::Sockets.columns()[..Show::Clients.columns().len()], Show::Clients.columns());
    for column in Show::ALL.iter().flat_map(|show| show.columns()) {
        assert!(column.help.ends_with('.') && !column.help.contains('|'), "{}: {}", column.name, column.help);
    }
}
