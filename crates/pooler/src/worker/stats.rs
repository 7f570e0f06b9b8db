// SPDX-License-Identifier: Apache-2.0
//! Counters of a worker, by pool; what a chunk of server bytes told.

use underpass_console::PoolStats;
use underpass_console::stats::PoolLatency;
use underpass_pool::PoolId;
use underpass_pool::link::{BackendObserver, Status};

use super::Worker;

/// Counters and latencies of one pool at one worker.
#[derive(Debug, Default, Clone)]
pub(crate) struct PoolMeter {
    pub stats: PoolStats,
    pub latency: PoolLatency,
}

/// The meters of a worker by the places of their pools, and whose each is.
pub(crate) type Meters = Vec<(Option<PoolId>, PoolMeter)>;

/// Collects what the tracker saw in a chunk.
#[derive(Debug, Default)]
pub(crate) struct Observed {
    /// ReadyForQuery for the client, and how many of them ended a transaction.
    pub ready: u32,
    pub transactions: u32,
    /// Name, value, and whether the pooler's own query caused it.
    pub parameters: Vec<(String, String, bool)>,
    /// Body of an ErrorResponse to the pooler's own query.
    pub hidden_error: Option<Vec<u8>>,
}

impl Observed {
    pub fn clear(&mut self) {
        self.ready = 0;
        self.transactions = 0;
        self.parameters.clear();
        self.hidden_error = None;
    }
}

impl BackendObserver for Observed {
    fn parameter_status(&mut self, name: &str, value: &str, hidden: bool) {
        self.parameters.push((name.to_owned(), value.to_owned(), hidden));
    }

    fn ready(&mut self, status: Status) {
        self.ready += 1;
        self.transactions += u32::from(status == Status::Idle);
    }

    fn hidden_error(&mut self, body: &[u8]) {
        self.hidden_error = Some(body.to_vec());
    }
}

impl Worker {
    /// The meter of a pool, made when first needed.
    pub(crate) fn meter(&mut self, pool: PoolId) -> &mut PoolMeter {
        meter(&mut self.meters, pool)
    }
}

/// The same for callers that hold other parts of the worker.
pub(super) fn meter(meters: &mut Meters, pool: PoolId) -> &mut PoolMeter {
    let index = pool.index();
    if index >= meters.len() {
        meters.resize_with(index + 1, || (None, PoolMeter::default()));
    }
    let (of, meter) = &mut meters[index];
    // Another pool was here before. Who counts has a client or a server of the pool, so it is the one that exists.
    if *of != Some(pool) {
        (*of, *meter) = (Some(pool), PoolMeter::default());
    }
    meter
}
