// SPDX-License-Identifier: Apache-2.0
//! Connections that wait for the address of their server: `server_connect_timeout` counts from here on, and whoever closes servers that log in
//! closes these too. A name server that answers after that is not listened to.

use std::time::Duration;

use underpass_wire::SqlState;

use super::server_login::Plan;
use super::{Farewell, Worker};
use crate::pool::Pool;
use crate::resolver::Answer;
use crate::shared::lock;
use crate::table::Key;

impl Worker {
    /// Asks for the addresses of the server's name, which are not known.
    pub(super) fn look_up(&mut self, plan: Plan, name: String) {
        let key = self.lookups.insert(|_| plan);
        let (shared, index) = (self.shared.clone(), self.index);
        self.shared.resolver.resolve(name, move |answer| {
            shared.mailboxes[index as usize].post(Box::new(move |worker| worker.looked_up(key, answer)));
        });
    }

    fn looked_up(&mut self, key: Key, answer: Answer) {
        if let Some(plan) = self.lookups.remove(key) {
            self.connect_to_any(plan, answer);
        }
    }

    /// `server_connect_timeout`
    pub(super) fn sweep_lookups(&mut self, limit: Duration) {
        if limit.is_zero() {
            return;
        }
        for key in self.lookups.keys() {
            let since = self.lookups.get(key).map(|plan| plan.since);
            if since.is_some_and(|since| self.now.saturating_duration_since(since) >= limit)
                && let Some(plan) = self.lookups.remove(key)
            {
                self.connect_failed(plan, "connect timeout".into());
            }
        }
    }

    /// Closes those of the pools that are meant, without blame: the next attempt need not wait for `server_login_retry`.
    pub(crate) fn give_up_lookups(&mut self, reason: &str, is_meant: impl Fn(&Worker, &Pool) -> bool) {
        let mut pools = Vec::new();
        for key in self.lookups.keys() {
            let Some(plan) = self.lookups.get(key).filter(|plan| is_meant(self, &plan.pool)) else {
                continue;
            };
            lock(&self.shared.core).closed(plan.id, false, self.now);
            let Some(plan) = self.lookups.remove(key) else { continue };
            pools.push(plan.pool.id);
            if let Some((client, _)) = plan.replication {
                self.close_client(client, Farewell::told(SqlState::CONNECTION_FAILURE, reason));
            }
        }
        // Whoever waits has another asked for, if that may be.
        pools.into_iter().for_each(|pool| self.launch(pool));
    }
}
