// SPDX-License-Identifier: Apache-2.0
//! The pooler: PgBouncer's place between applications and PostgreSQL, on every core.
//!
//! Start reading at `worker/mod.rs`: the event loop that every thread runs. `worker/forward.rs` is the data path, `worker/lifecycle.rs` how
//! links come and go, `worker/login.rs` and `worker/server_login.rs` the two handshakes. The decisions are the pool crate's.

mod acceptors;
mod applications;
mod balance;
mod client;
mod control;
mod deriver;
mod descriptors;
mod gather;
mod hosts;
mod kernel_rows;
mod lane_idle;
mod lanes;
mod listeners;
mod logging;
mod metrics;
mod mirror_rows;
mod mirrors;
mod net;
mod peers;
mod pool;
mod pressure;
mod process;
mod recording;
mod resolver;
mod run;
mod server;
mod settings;
mod shared;
mod table;
mod transport;
mod why;
mod worker;

pub use run::{Checked, Options, check, run};

/// Our version and the one of PgBouncer whose configuration, console and behaviour it has.
pub const VERSION_NUMBER: &str = concat!(env!("CARGO_PKG_VERSION"), " (compatible with PgBouncer 1.26)");

/// What SHOW VERSION and the first line of `--version` say. Exporters look for PgBouncer's version in it.
pub const VERSION: &str =
    concat!("Underpass ", env!("CARGO_PKG_VERSION"), " (compatible with PgBouncer 1.26)");

/// Appends a message of type `tag`.
fn message(out: &mut Vec<u8>, tag: u8, body: &[u8]) {
    out.push(tag);
    out.extend_from_slice(&(body.len() as u32 + 4).to_be_bytes());
    out.extend_from_slice(body);
}

/// A field of an ErrorResponse's body, empty if it has none (PostgreSQL manual, 55.8 "Error and Notice Message Fields").
fn error_field(body: &[u8], wanted: u8) -> String {
    body.split(|&byte| byte == 0)
        .find(|field| field.first() == Some(&wanted))
        .map(|field| String::from_utf8_lossy(&field[1..]).into_owned())
        .unwrap_or_default()
}

/// `SEVERITY: message (SQLSTATE)` of an ErrorResponse's body, for log lines.
fn error_message(body: &[u8]) -> String {
    format!("{}: {} ({})", error_field(body, b'S'), error_field(body, b'M'), error_field(body, b'C'))
}
