// SPDX-License-Identifier: Apache-2.0
//! What is otherwise with MariaDB and MySQL: the login, where an answer ends, and the numbers of prepared statements, which the server gives.

mod classify;
mod connection;
mod player;
mod preflight;

use foldhash::HashMap;
use underpass_mysql::command::COM_QUIT;
use underpass_mysql::{exchange, packet};

pub(crate) use classify::{administers, classify};
pub(crate) use player::resets_session;
pub(crate) use preflight::check;

/// Number of no statement: a statement that the target would not prepare is executed by it, so that it fails there.
const NO_STATEMENT: u32 = 0;

/// What a connection has to know.
#[derive(Debug)]
pub(crate) struct Session {
    /// What both ends use.
    pub exchange: exchange::Session,
    /// Numbers of prepared statements: at capture, here.
    pub statements: HashMap<u32, u32>,
}

impl Session {
    /// The number that a statement of the trace has here.
    pub fn statement(&self, captured: u32) -> u32 {
        self.statements.get(&captured).copied().unwrap_or(NO_STATEMENT)
    }
}

/// Appends COM_QUIT.
pub(crate) fn quit(out: &mut Vec<u8>) {
    packet::put_message(out, 0, &[COM_QUIT]);
}
