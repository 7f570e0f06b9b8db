// SPDX-License-Identifier: Apache-2.0
//! Standard output that may go away: `underpass-bench run | head` ends a run, it does not break it.

use std::fmt;
use std::io::{self, ErrorKind, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};

/// Its reader is gone.
static CLOSED: AtomicBool = AtomicBool::new(false);

/// Prints a line, as `println!`, but never panics.
macro_rules! say {
    ($($words:tt)*) => {
        $crate::terminal::write(format_args!("{}\n", format_args!($($words)*)))
    };
}
pub(crate) use say;

/// Writes at once: a log that is followed should not lag.
pub fn write(text: fmt::Arguments<'_>) {
    if closed() {
        return;
    }
    let mut output = io::stdout().lock();
    if let Err(error) = output.write_fmt(text).and_then(|()| output.flush()) {
        CLOSED.store(true, Ordering::Relaxed);
        if error.kind() != ErrorKind::BrokenPipe {
            eprintln!("underpass-bench: cannot write to standard output: {error}");
        }
    }
}

/// True once nobody reads what is written any more.
#[must_use]
pub fn closed() -> bool {
    CLOSED.load(Ordering::Relaxed)
}
