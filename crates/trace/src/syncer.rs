// SPDX-License-Identifier: Apache-2.0
//! Has whole segments put on the disk while the next one is being written.
//!
//! What a recorder reads from does not wait: while 256 MiB are on their way to a disk, the kernel's rings would overflow. What is
//! in a file survives the recorder's end whatever happens here; only a crash of the machine asks for what is on the disk.

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

/// So many segments are under way at most: a disk that is slower than the writer must not be told so by memory.
const UNDER_WAY_MAX: usize = 4;

/// Waits for disks on threads of its own.
#[derive(Debug, Default)]
pub(crate) struct Syncer {
    under_way: VecDeque<(PathBuf, JoinHandle<io::Result<()>>)>,
}

impl Syncer {
    /// Begins to sync a file. The result is that of an earlier one that failed meanwhile.
    pub(crate) fn begin(
        &mut self,
        path: PathBuf,
        sync: impl Fn() -> io::Result<()> + Send + Sync + 'static,
    ) -> Result<(), (PathBuf, io::Error)> {
        let sync = Arc::new(sync);
        let theirs = Arc::clone(&sync);
        match thread::Builder::new().name("trace-sync".into()).spawn(move || theirs()) {
            Ok(thread) => self.under_way.push_back((path, thread)),
            // Without threads it takes its time here.
            Err(_) => sync().map_err(|error| (path, error))?,
        }
        while self
            .under_way
            .front()
            .is_some_and(|(_, thread)| self.under_way.len() > UNDER_WAY_MAX || thread.is_finished())
        {
            self.oldest()?;
        }
        Ok(())
    }

    /// Waits for all of them; the result is the first failure.
    pub(crate) fn finish(&mut self) -> Result<(), (PathBuf, io::Error)> {
        while !self.under_way.is_empty() {
            self.oldest()?;
        }
        Ok(())
    }

    fn oldest(&mut self) -> Result<(), (PathBuf, io::Error)> {
        let Some((path, thread)) = self.under_way.pop_front() else { return Ok(()) };
        let done =
            thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread that synced it panicked")));
        done.map_err(|error| (path, error))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn nobody_waits_before_the_end() {
        let go = Arc::new(Barrier::new(2));
        let mut syncer = Syncer::default();
        let wait = Arc::clone(&go);
        syncer
            .begin("slow".into(), move || {
                wait.wait();
                Ok(())
            })
            .unwrap();
        syncer.begin("fast".into(), || Ok(())).unwrap();
        assert_eq!(syncer.under_way.len(), 2, "it is still under way");
        go.wait();
        syncer.finish().unwrap();
        assert!(syncer.under_way.is_empty());
    }

    #[test]
    fn a_failure_is_told_with_its_file() {
        let mut syncer = Syncer::default();
        let _ = syncer.begin("bad".into(), || Err(io::Error::other("gone")));
        let told = syncer.finish();
        // The first call may have told it already.
        if let Err((path, error)) = told {
            assert_eq!((path, error.to_string()), ("bad".into(), "gone".to_owned()));
        }
        for _ in 0..=UNDER_WAY_MAX {
            let _ = syncer.begin("bad".into(), || Err(io::Error::other("gone")));
        }
        assert!(syncer.under_way.len() <= UNDER_WAY_MAX);
        assert!(syncer.finish().is_err());
    }
}
