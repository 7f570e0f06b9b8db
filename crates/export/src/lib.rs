// SPDX-License-Identifier: Apache-2.0
//! A trace for other programs: [`parquet`] for DuckDB, Spark and DataFusion, [`json_lines`] for scripts, [`sql`] for
//! psql; and a trace from what a server logged already: [`csv_log`].
#![forbid(unsafe_code)]

pub mod csv_log;
mod error;
pub mod json_lines;
mod mysql;
pub mod parquet;
mod shell;
pub mod sql;
mod value;

pub use error::Error;
pub use value::text_of;

use std::fs::{DirBuilder, File, OpenOptions};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;

use underpass_trace::Clock;

/// Monotonic times as UTC: by the last clock before them, or the first there is.
#[derive(Clone, Copy, Debug, Default)]
struct Utc {
    clock: Option<Clock>,
}

impl Utc {
    /// Nanoseconds since 1970; without a clock, the monotonic time itself.
    fn ns(self, time_ns: u64) -> i64 {
        let (monotonic, real) = self.clock.map_or((0, 0), |clock| (clock.monotonic_ns, clock.realtime_ns));
        let ns = i128::from(real) + i128::from(time_ns) - i128::from(monotonic);
        ns.clamp(i64::MIN.into(), i64::MAX.into()) as i64
    }

    fn timestamp(self, time_ns: u64) -> jiff::Timestamp {
        jiff::Timestamp::from_nanosecond(self.ns(time_ns).into()).unwrap_or(jiff::Timestamp::UNIX_EPOCH)
    }
}

/// For files that hold what a trace holds: nobody but their owner may read them, as the trace itself.
pub fn private() -> OpenOptions {
    let mut options = File::options();
    options.mode(0o600);
    options
}

/// Makes the directory of an export, which must not be there.
fn new_directory(path: &Path) -> Result<(), Error> {
    DirBuilder::new().mode(0o700).create(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => Error::Exists(path.to_owned()),
        _ => Error::io(path)(error),
    })
}

/// Text where it is text, `\x` and hexadecimal digits where it is not.
fn shown(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => value::hex(bytes),
    }
}
