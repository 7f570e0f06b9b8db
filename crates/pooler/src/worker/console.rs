// SPDX-License-Identifier: Apache-2.0
//! The admin console.

use underpass_console::Access;

use super::Worker;
use crate::table::Key;

/// A console client that waits for something to happen.
pub(crate) struct Wait {
    pub client: Key,
}

impl Worker {
    pub(super) fn console_open(&mut self, _key: Key, _access: Access) {}
    pub(super) fn console_readable(&mut self, _key: Key) {}
    pub(super) fn console_waits_check(&mut self) {}
}
