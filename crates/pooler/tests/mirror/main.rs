// SPDX-License-Identifier: Apache-2.0
//! Mirroring with two real PostgreSQL: what reaches the mirror, what is counted, what is found, and what a bad mirror does to clients.

mod bad;
mod changes;
mod copy;
mod differences;
mod lanes;
mod moves;
mod pair;
mod same;
mod soak;
mod standby;
mod sync;
