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
    /// The first failure that nobody has been told of.
    failed: Option<(PathBuf, io::Error)>,
}

impl Syncer {
    /// Begins to sync a file. What becomes of it is told by [`Self::failure`] and [`Self::finish`].
    pub(crate) fn begin(&mut self, path: PathBuf, sync: impl Fn() -> io::Result<()> + Send + Sync + 'static) {
        let sync = Arc::new(sync);
        let theirs = Arc::clone(&sync);
        match thread::Builder::new().name("trace-sync".into()).spawn(move || theirs()) {
            Ok(thread) => self.under_way.push_back((path, thread)),
            // Without threads it takes its time here.
            Err(_) => self.note(path, sync()),
        }
        while self.under_way.len() > UNDER_WAY_MAX {
            self.end_oldest();
        }
    }

    /// The first failure of those that are over, told once.
    pub(crate) fn failure(&mut self) -> Result<(), (PathBuf, io::Error)> {
        while self.under_way.front().is_some_and(|(_, thread)| thread.is_finished()) {
            self.end_oldest();
        }
        self.failed.take().map_or(Ok(()), Err)
    }

    /// Waits for all of them; the result is the first failure.
    pub(crate) fn finish(&mut self) -> Result<(), (PathBuf, io::Error)> {
        while !self.under_way.is_empty() {
            self.end_oldest();
        }
        self.failed.take().map_or(Ok(()), Err)
    }

    fn end_oldest(&mut self) {
        let Some((path, thread)) = self.under_way.pop_front() else { return };
        let done =
            thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread that synced it panicked")));
        self.note(path, done);
    }

    fn note(&mut self, path: PathBuf, done: io::Result<()>) {
        if let Err(error) = done {
            self.failed.get_or_insert((path, error));
        }
    }
}

/// Where a trace ends by an error, what it has is put on the disk all the same.
impl Drop for Syncer {
    fn drop(&mut self) {
        let _ = self.finish();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn nobody_waits_before_the_end() {
        let go = Arc::new(Barrier::new(2));
        let mut syncer = Syncer::default();
        let wait = Arc::clone(&go);
        syncer.begin("slow".into(), move || {
            wait.wait();
            Ok(())
        });
        syncer.begin("fast".into(), || Ok(()));
        assert_eq!(syncer.under_way.len(), 2, "it is still under way");
        syncer.failure().unwrap();
        go.wait();
        syncer.finish().unwrap();
        assert!(syncer.under_way.is_empty());
    }

    #[test]
    fn the_first_failure_is_told_once_with_its_file() {
        let mut syncer = Syncer::default();
        syncer.begin("good".into(), || Ok(()));
        syncer.begin("bad".into(), || Err(io::Error::other("gone")));
        syncer.begin("worse".into(), || Err(io::Error::other("gone too")));
        let (path, error) = syncer.finish().unwrap_err();
        assert_eq!((path, error.to_string()), ("bad".into(), "gone".to_owned()));
        syncer.finish().unwrap();
    }

    #[test]
    fn only_so_many_are_under_way_and_none_is_forgotten() {
        let mut syncer = Syncer::default();
        syncer.begin("bad".into(), || Err(io::Error::other("gone")));
        for _ in 0..2 * UNDER_WAY_MAX {
            syncer.begin("good".into(), || Ok(()));
            assert!(syncer.under_way.len() <= UNDER_WAY_MAX);
        }
        assert_eq!(syncer.failure().unwrap_err().0, PathBuf::from("bad"));
    }

    #[test]
    fn who_gives_up_waits_too() {
        let done = Arc::new(AtomicBool::new(false));
        let mut syncer = Syncer::default();
        let theirs = Arc::clone(&done);
        syncer.begin("slow".into(), move || {
            thread::sleep(std::time::Duration::from_millis(20));
            theirs.store(true, Ordering::Release);
            Ok(())
        });
        drop(syncer);
        assert!(done.load(Ordering::Acquire));
    }
}
