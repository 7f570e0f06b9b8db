// SPDX-License-Identifier: Apache-2.0
//! Many logged-in clients that do nothing.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::{memory_mib, resident_mib};
use crate::client::Client;
use crate::pgbench::{self, Load, Measured, Protocol};
use crate::sample::metric;
use crate::systems::{Instance, Place};

/// Clients of the load beside idle clients.
const ACTIVE_CLIENTS: u32 = 16;

/// Opens the idle clients, measures memory, then the latency of others beside them.
pub(super) fn run(
    clients: u32,
    rate: f64,
    seconds: f64,
    instance: &Instance,
    place: Place<'_>,
    stop: &AtomicBool,
) -> Result<Measured> {
    let before = memory_mib(instance)?;
    let mut open = Vec::with_capacity(clients as usize);
    for number in 0..clients {
        if stop.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        open.push(
            Client::connect(&instance.endpoint)
                .with_context(|| format!("client {} of {clients}", number + 1))?,
        );
    }
    // Servers that were opened for logins settle, and so does the allocator.
    thread::sleep(Duration::from_secs(1));
    let after = memory_mib(instance)?;
    let load = Load { rate: Some(rate), ..Load::new(ACTIVE_CLIENTS, Protocol::Simple, "select 1;\n") };
    let (mut metrics, latency) = pgbench::measure(&load, seconds, instance, place, stop, || Ok(()), || {})?;
    metrics.insert(metric::MEMORY.to_owned(), resident_mib(instance)?);
    metrics.insert(metric::MEMORY_GROWTH.to_owned(), after - before);
    Ok((metrics, latency))
}
