// SPDX-License-Identifier: Apache-2.0
//! What libbpf prints, kept for errors: the verifier's verdict is at its end.

use std::cell::RefCell;

use libbpf_rs::PrintLevel;

use crate::error::Error;
use crate::lacks;

/// How much of libbpf's output an error carries.
const LOG_TAIL_BYTES: usize = 4096;

thread_local! {
    static LOG: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Collects what libbpf prints on this thread until it is dropped.
pub(crate) struct Log;

pub(crate) fn capture_log() -> Log {
    LOG.set(Some(String::new()));
    libbpf_rs::set_print(Some((PrintLevel::Info, print)));
    Log
}

fn print(_: PrintLevel, text: String) {
    LOG.with_borrow_mut(|log| {
        if let Some(log) = log {
            log.push_str(&text);
        }
    });
}

impl Log {
    /// Everything so far.
    pub(crate) fn text(&self) -> String {
        LOG.with_borrow(|log| log.clone().unwrap_or_default())
    }

    /// The error with the tail of the log.
    pub(crate) fn error(&self, cause: &libbpf_rs::Error) -> Error {
        let log = self.text();
        let mut start = log.len().saturating_sub(LOG_TAIL_BYTES);
        while !log.is_char_boundary(start) {
            start += 1;
        }
        Error::Load { lacks: lacks::of_load(cause, &log), message: format!("{cause:#}\n{}", &log[start..]) }
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        LOG.set(None);
    }
}
