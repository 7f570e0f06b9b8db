// SPDX-License-Identifier: Apache-2.0
//! Numbered events, and tasks that wait until all events below a number are over.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

/// See the head of this module.
#[derive(Debug)]
pub(crate) struct Watermark {
    /// All events below are over. Written under the lock only.
    mark: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    over: Vec<bool>,
    moved: Instant,
    waiting: BTreeMap<usize, Vec<oneshot::Sender<()>>>,
}

impl Watermark {
    /// For events numbered 0 to `events - 1`.
    pub fn new(events: usize) -> Self {
        let state = State { over: vec![false; events], moved: Instant::now(), waiting: BTreeMap::new() };
        Self { mark: AtomicUsize::new(0), state: Mutex::new(state) }
    }

    /// An event is over; again is no error. Panics on a number that is none.
    pub fn over(&self, event: usize) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.over[event] = true;
        let mut mark = self.mark.load(Ordering::Relaxed);
        if event != mark {
            return;
        }
        while state.over.get(mark) == Some(&true) {
            mark += 1;
        }
        self.mark.store(mark, Ordering::Release);
        state.moved = Instant::now();
        let later = state.waiting.split_off(&(mark + 1));
        for wake in std::mem::replace(&mut state.waiting, later).into_values().flatten() {
            // One that gave up does not listen any more.
            let _ = wake.send(());
        }
    }

    /// Waits until all events below `below` are over. Gives up (`false`) when nothing has moved for `stuck`: then
    /// somebody waits for what can only happen after it.
    pub async fn wait(&self, below: usize, stuck: Duration) -> bool {
        let begin = Instant::now();
        loop {
            let (woken, moved) = {
                if self.mark.load(Ordering::Acquire) >= below {
                    return true;
                }
                let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
                if self.mark.load(Ordering::Relaxed) >= below {
                    return true;
                }
                let (wake, woken) = oneshot::channel();
                state.waiting.entry(below).or_default().push(wake);
                (woken, state.moved.max(begin))
            };
            let limit = tokio::time::Instant::from_std(moved + stuck);
            if tokio::time::timeout_at(limit, woken).await.is_err() {
                let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
                if state.moved <= moved && self.mark.load(Ordering::Relaxed) < below {
                    return false;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(future)
    }

    #[test]
    fn waits_for_all_below() {
        let mark = Watermark::new(3);
        let order = Mutex::new(Vec::new());
        block_on(async {
            let wait = async |below| {
                assert!(mark.wait(below, Duration::from_secs(10)).await);
                order.lock().unwrap().push(below);
            };
            let events = async {
                for event in [2, 0, 1] {
                    tokio::task::yield_now().await;
                    order.lock().unwrap().push(100 + event);
                    mark.over(event);
                }
            };
            tokio::join!(wait(3), wait(1), wait(0), events);
        });
        let order = order.into_inner().unwrap();
        let at = |what| order.iter().position(|one| *one == what).unwrap();
        assert_eq!(at(0), 0);
        assert!(at(100) < at(1) && at(1) < at(3) && at(101) < at(3), "{order:?}");
    }

    #[test]
    fn gives_up_when_nothing_moves() {
        let mark = Watermark::new(2);
        mark.over(1);
        assert!(!block_on(mark.wait(2, Duration::from_millis(20))));
    }

    #[test]
    fn a_long_queue_that_moves_is_not_stuck() {
        let mark = Watermark::new(10);
        let moved = block_on(async {
            let events = async {
                for event in 0..10 {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    mark.over(event);
                }
            };
            tokio::join!(mark.wait(10, Duration::from_millis(120)), events).0
        });
        assert!(moved);
    }
}
