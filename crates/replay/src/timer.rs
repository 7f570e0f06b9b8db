// SPDX-License-Identifier: Apache-2.0
//! A timer of microseconds. tokio's wheel turns once per millisecond, and a client that thinks for 200 us would think for
//! a millisecond: a fifth of its load.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

/// tokio sleeps until so long before the moment; the thread here does the rest.
const FINE: Duration = Duration::from_millis(4);

/// Wakes tasks at given moments, some tens of microseconds late.
#[derive(Debug)]
pub(crate) struct Timer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    moments: BinaryHeap<Reverse<Entry>>,
    number: u64,
    ended: bool,
}

#[derive(Debug)]
struct Entry {
    at: Instant,
    number: u64,
    wake: oneshot::Sender<()>,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}
impl Eq for Entry {}
impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Timer {
    /// Starts the thread.
    pub fn start() -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("timer".into()).spawn(move || run(&theirs))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Waits until a moment; at once if it is past.
    pub async fn until(&self, at: Instant) {
        if let Some(coarse) = at.checked_sub(FINE).filter(|coarse| *coarse > Instant::now()) {
            tokio::time::sleep_until(coarse.into()).await;
        }
        if at <= Instant::now() {
            return;
        }
        // An error means that the timer ended, and then nobody waits any more.
        let _ = self.wake(at).await;
    }

    /// What is woken at `at`.
    fn wake(&self, at: Instant) -> oneshot::Receiver<()> {
        let (wake, woken) = oneshot::channel();
        let mut state = self.shared.lock();
        state.number += 1;
        let number = state.number;
        let first = state.moments.peek().is_none_or(|Reverse(entry)| at < entry.at);
        state.moments.push(Reverse(Entry { at, number, wake }));
        if first {
            self.shared.changed.notify_one();
        }
        woken
    }
}

fn run(shared: &Shared) {
    let mut state = shared.lock();
    while !state.ended {
        let now = Instant::now();
        let wait = match state.moments.peek() {
            Some(Reverse(entry)) if entry.at <= now => {
                if let Some(Reverse(entry)) = state.moments.pop() {
                    // A task that was stopped does not listen any more.
                    let _ = entry.wake.send(());
                }
                continue;
            }
            Some(Reverse(entry)) => entry.at - now,
            None => Duration::from_secs(3600),
        };
        state =
            shared.changed.wait_timeout(state, wait).map_or_else(|error| error.into_inner().0, |pair| pair.0);
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleeps_less_than_a_millisecond_when_asked_to() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let timer = Timer::start().unwrap();
        let mut took: Vec<Duration> = runtime.block_on(async {
            let mut took = Vec::new();
            for _ in 0..50 {
                let begin = Instant::now();
                timer.until(begin + Duration::from_micros(200)).await;
                took.push(begin.elapsed());
            }
            took
        });
        took.sort();
        assert!(took[0] >= Duration::from_micros(200));
        // The median, because the machine may be busy.
        assert!(took[25] < Duration::from_millis(1), "{took:?}");
    }

    #[test]
    fn wakes_in_the_order_of_the_moments() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let timer = Timer::start().unwrap();
        let mut ahead = Duration::from_millis(100);
        // Until all of them wait before the first moment, which a busy machine may delay. They run in the order in which they are woken.
        loop {
            let first = Instant::now() + ahead;
            let woken = Arc::new(Mutex::new(Vec::new()));
            let waited_in_time = runtime.block_on(async {
                let mut waiting = tokio::task::JoinSet::new();
                for ms in [12, 3, 7, 0] {
                    let (woken, wake) = (Arc::clone(&woken), timer.wake(first + Duration::from_millis(ms)));
                    waiting.spawn(async move {
                        wake.await.unwrap();
                        woken.lock().unwrap().push(ms);
                    });
                }
                tokio::task::yield_now().await;
                let waited_in_time = Instant::now() < first;
                while waiting.join_next().await.is_some() {}
                waited_in_time
            });
            if waited_in_time {
                assert_eq!(*woken.lock().unwrap(), [0, 3, 7, 12]);
                break;
            }
            ahead *= 2;
        }
    }
}
