// SPDX-License-Identifier: Apache-2.0
//! Prepared statements that the programs rename: what each client's names stand for, and what each server has.
//!
//! Invariant: a statement's name on servers is as long as the client's, because a program must not change a segment's length.

use std::io;

use libbpf_rs::MapCore;

use crate::datapath::{ClientSlot, Datapath, ServerSlot, insert};
use crate::error::Error;
use crate::skel::types;

/// Longest name that a program can rename, in bytes without its NUL (`STATEMENT_NAME_MAX` in `lanes.h`).
pub const STATEMENT_NAME_MAX: usize = 63;

const CLIENT_KEY: usize = size_of::<types::client_statement>();
const SERVER_KEY: usize = size_of::<types::server_statement>();
const NAME: usize = size_of::<types::statement_name>();

fn client_key(client: u32, name: &[u8]) -> Option<[u8; CLIENT_KEY]> {
    // struct client_statement: name and zeroes, client, pad.
    let mut key = [0; CLIENT_KEY];
    let fits = (1..=STATEMENT_NAME_MAX).contains(&name.len()) && !name.contains(&0);
    key.get_mut(..name.len()).filter(|_| fits)?.copy_from_slice(name);
    key[STATEMENT_NAME_MAX + 1..STATEMENT_NAME_MAX + 5].copy_from_slice(&client.to_ne_bytes());
    Some(key)
}

fn server_key(server: u32, statement: u32) -> [u8; SERVER_KEY] {
    let mut key = [0; SERVER_KEY];
    key[..4].copy_from_slice(&server.to_ne_bytes());
    key[4..].copy_from_slice(&statement.to_ne_bytes());
    key
}

impl Datapath {
    /// Tells the programs what a held client's `name` stands for: a number other than 0, the same for all who mean the same content
    /// under a name of this length. Replaces an earlier meaning.
    ///
    /// # Errors
    /// [`Error::Stale`]; [`Error::State`] for a name that no program can rename (empty, above [`STATEMENT_NAME_MAX`] bytes, with NUL);
    /// [`Error::System`] when [`crate::Config::statements_max`] is reached: the name then goes to user space.
    pub fn set_client_statement(&self, client: ClientSlot, name: &[u8], statement: u32) -> Result<(), Error> {
        let key = client_key(self.check_client(client)?, name).filter(|_| statement != 0);
        let key = key.ok_or(Error::State("set_client_statement: not a name that can be renamed"))?;
        insert(&self.skel.maps.client_statements, &key, &statement.to_ne_bytes())
            .map_err(Error::system("noting a client's statement"))
    }

    /// A held client's `name` stands for nothing any more.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn forget_client_statement(&self, client: ClientSlot, name: &[u8]) -> Result<(), Error> {
        if let Some(key) = client_key(self.check_client(client)?, name) {
            let _ = self.skel.maps.client_statements.delete(&key);
        }
        Ok(())
    }

    /// Tells the programs that a server which user space owns has a statement, under a name as long as its clients'.
    ///
    /// # Errors
    /// As [`Self::set_client_statement`].
    pub fn set_server_statement(&self, server: ServerSlot, statement: u32, name: &[u8]) -> Result<(), Error> {
        let s = self.check_server(server)?;
        if !(1..=STATEMENT_NAME_MAX).contains(&name.len()) {
            return Err(Error::State("set_server_statement: not a name that can be written"));
        }
        // struct statement_name: length, name.
        let mut value = [0; NAME];
        value[..4].copy_from_slice(&(name.len() as u32).to_ne_bytes());
        value[4..4 + name.len()].copy_from_slice(name);
        insert(&self.skel.maps.server_statements, &server_key(s, statement), &value)
            .map_err(|e: io::Error| Error::System { what: "noting a server's statement", source: e })
    }

    /// A server which user space owns does not have this statement any more.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn forget_server_statement(&self, server: ServerSlot, statement: u32) -> Result<(), Error> {
        let key = server_key(self.check_server(server)?, statement);
        let _ = self.skel.maps.server_statements.delete(&key);
        Ok(())
    }

    /// Under which name a server has a statement, if it has it.
    pub(crate) fn statement_name(&self, server: u32, statement: u32) -> Option<Vec<u8>> {
        let key = server_key(server, statement);
        let value = self.skel.maps.server_statements.lookup(&key, libbpf_rs::MapFlags::ANY).ok()??;
        let length = u32::from_ne_bytes(value.get(..4)?.try_into().ok()?) as usize;
        value.get(4..4 + length).map(<[u8]>::to_vec)
    }
}
