// SPDX-License-Identifier: Apache-2.0
//! The data path: requests to servers, responses to clients. One receive and one send for a message that fits the scratch buffer.

use std::io;
use std::sync::Arc;

use rustix::event::epoll::EventFlags;
use underpass_config::PoolMode;
use underpass_pool::link::{FrontendContext, FrontendEvent, LinkError, Splice, Status, judge_head};
use underpass_pool::params::{ParameterSet, SESSION_AUTHORIZATION};
use underpass_wire::SqlState;

use super::lifecycle::FLOODING;
use super::{Again, Entry, Farewell, GONE, READS_PER_TURN, SCRATCH_BYTES, Worker, stats};
use crate::client::Phase;
use crate::server::{PrepareStep, SettleStep, Work};
use crate::shared::Shared;
use crate::table::Key;
use crate::transport::ReadOutcome;
use crate::why::{Own, Why};

/// Bytes that a client has not taken above which it is not read. Answers of a server's are not read for it either, but what is made up has no
/// other bound.
const UNTAKEN_MAX: usize = 1 << 20;

/// Longest message, in bytes, that a client between transactions must have sent as a whole to be given a server.
const MESSAGE_HELD_MAX: u64 = 4096;

/// Capacity in bytes that a worker's buffer for composed requests keeps.
const COMPOSE_KEPT: usize = 256 * 1024;

/// Bytes of a message's type and length.
const HEAD: usize = 5;

/// ReadyForQuery in a transaction, and in one that failed.
const READY_IN_TRANSACTION: &[u8] = b"Z\0\0\0\x05T";
const READY_IN_FAILED: &[u8] = b"Z\0\0\0\x05E";

/// Whether a handler goes on reading.
#[derive(PartialEq, Eq)]
enum Flow {
    Continue,
    Stop,
}

/// Whether requests begin with one that the pooler may answer itself, if nothing is outstanding: Parse and Close of a statement with a name, or
/// what may stand behind Flush.
fn is_answered_here(requests: &[u8]) -> bool {
    match requests {
        [b'P', _, _, _, _, first, ..] => *first != 0,
        [b'C', _, _, _, _, kind, ..] => *kind == b'S',
        [b'H', ..] => true,
        _ => false,
    }
}

impl Worker {
    pub(super) fn client_readable(&mut self, key: Key, flags: EventFlags) {
        let gone = flags.intersects(GONE);
        let Some(client) = self.clients.get_mut(key) else { return };
        client.ended |= gone;
        match client.phase {
            Phase::Linked(server) => self.forward_requests(key, server),
            Phase::Idle => self.first_request(key),
            Phase::Lane if client.lane.as_ref().is_some_and(|lane| lane.fed) => self.fed_readable(key),
            // Only hang-ups of it are watched. Anything else was on its way before the lane had it, and has been read by then.
            Phase::Lane if gone => self.lane_client_up(key),
            Phase::Lane => self.mirror_lets_on(key),
            Phase::Login(_) => self.login_readable(key, gone),
            Phase::Console(_) => self.console_readable(key),
            Phase::Waiting { .. } => {
                client.readable = true;
                if gone {
                    self.close_client(key, Farewell::quiet("client unexpected eof"));
                }
            }
            Phase::Closing => {
                if gone {
                    self.drop_client(key);
                }
            }
        }
    }

    /// A client between transactions has something to say: it needs a server.
    pub(super) fn first_request(&mut self, key: Key) {
        if self.is_held_by_mirror(key) {
            return;
        }
        let Some(client) = self.clients.get_mut(key) else { return };
        if client.inbox.is_empty() {
            let outcome = client.transport.read(&mut self.scratch);
            let count = match outcome {
                Ok(outcome) => {
                    client.readable = outcome.maybe_more;
                    client.count_read(outcome.count);
                    outcome.count
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    client.readable = false;
                    if !client.is_clear() {
                        return self.look_again(key);
                    }
                    if client.why == Own::Unread.into() {
                        // It had nothing more to say after all.
                        self.lane_offer(key);
                    }
                    return;
                }
                Err(error) => return self.client_io_failed(key, &error),
            };
            if count == 0 {
                return self.close_client(key, Farewell::quiet("client unexpected eof"));
            }
            if let Err(error) = judge_first(&self.scratch[..count], &self.shared) {
                return self.client_broke_protocol(key, error);
            }
            if self.scratch[0] == b'X' {
                return self.close_client(key, Farewell::quiet("client close request"));
            }
            if !needs_server(&self.scratch[..count]) {
                client.inbox.extend_from_slice(&self.scratch[..count]);
                return self.use_up(key);
            }
            let pool = client.pool.as_ref().map(|pool| pool.id);
            client.request_at = self.now;
            if self.is_fed_pool(key) {
                if let Some(client) = self.clients.get_mut(key) {
                    client.inbox.extend_from_slice(&self.scratch[..count]);
                }
                return self.request_held(key);
            }
            match pool.and_then(|pool| self.acquire(key, pool, None)) {
                // The usual case: straight from the scratch buffer to the server.
                Some(server) if self.is_forwarding(server) => {
                    if self.feed(key, server, Input::Scratch(count)) == Flow::Continue {
                        self.use_up(key);
                    }
                }
                Some(_) | None => {
                    if let Some(client) = self.clients.get_mut(key) {
                        client.inbox.extend_from_slice(&self.scratch[..count]);
                    }
                }
            }
            return;
        }
        // Bytes are left over from before.
        if !needs_server(&client.inbox) || client.inbox.len() < client.wants {
            match client.transport.read_more(&mut client.inbox, SCRATCH_BYTES) {
                Ok(outcome) if outcome.count == 0 => {
                    return self.close_client(key, Farewell::quiet("client unexpected eof"));
                }
                Ok(outcome) => {
                    client.readable = outcome.maybe_more;
                    client.count_read(outcome.count);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    client.readable = false;
                    if !client.is_clear() {
                        self.look_again(key);
                    }
                    return;
                }
                Err(error) => return self.client_io_failed(key, &error),
            }
        }
        if let Err(error) = judge_first(&client.inbox, &self.shared) {
            return self.client_broke_protocol(key, error);
        }
        if client.inbox[0] == b'X' {
            return self.close_client(key, Farewell::quiet("client close request"));
        }
        if !needs_server(&client.inbox) || client.inbox.len() < client.wants {
            if !needs_server(&client.inbox) {
                // Room was made for more than came, and thousands may wait so.
                client.inbox.shrink_to_fit();
            }
            return self.use_up(key);
        }
        client.wants = 0;
        client.request_at = client.kept_at.unwrap_or(self.now);
        self.request_held(key);
    }

    /// What a client between transactions says may stand behind answers that it does not take: nothing announces it, nor bounds it.
    fn look_again(&mut self, key: Key) {
        if self.clients.get(key).is_some_and(|client| client.is_flooding()) {
            return self.close_flooding(key);
        }
        self.again_soon.push(Again::Client(key));
    }

    /// A server for what the client has in its inbox.
    fn request_held(&mut self, key: Key) {
        let lane = self.place_to_feed(key);
        let Some(pool) = self.clients.get(key).and_then(|client| client.pool.as_ref()).map(|pool| pool.id)
        else {
            return;
        };
        if let Some(server) = self.acquire(key, pool, lane) {
            if self.is_forwarding(server) {
                self.start_forwarding(key, server);
            }
        }
    }

    fn is_forwarding(&mut self, server: Key) -> bool {
        self.server(server).is_some_and(|server| matches!(server.work, Work::Client(_)))
    }

    /// The link stands and the server is prepared: what the client said so far goes through.
    pub(super) fn start_forwarding(&mut self, key: Key, server: Key) {
        if !self.feed_granted(key, server) && self.feed_inbox(key, server) == Flow::Continue {
            self.use_up(key);
        }
    }

    fn feed_inbox(&mut self, key: Key, server: Key) -> Flow {
        let Some(client) = self.clients.get_mut(key) else { return Flow::Stop };
        if client.inbox.is_empty() {
            return Flow::Continue;
        }
        let inbox = std::mem::take(&mut client.inbox);
        self.feed(key, server, Input::Held(inbox))
    }

    /// Reads more if noted readiness says that there is.
    fn use_up(&mut self, key: Key) {
        let Some(client) = self.clients.get(key) else { return };
        if client.readable || client.ended {
            if let Phase::Linked(server) = client.phase {
                self.forward_requests(key, server);
            } else {
                self.again.push(Again::Client(key));
            }
        }
    }

    pub(super) fn forward_requests(&mut self, key: Key, server_key: Key) {
        for _ in 0..READS_PER_TURN {
            if self.is_held_by_mirror(key) {
                return;
            }
            let Some(client) = self.clients.get_mut(key) else { return };
            if client.phase_server() != Some(server_key) {
                return self.use_up(key);
            }
            let Some(Entry::Here(server)) = self.servers.get_mut(server_key) else { return };
            if server.ending {
                // `lane_unclear` goes on.
                client.readable = true;
                return;
            }
            if !server.is_clear() {
                if server.is_flooding() {
                    return self.close_server(server_key, FLOODING);
                }
                client.readable = true;
                self.again_soon.push(Again::Client(key));
                return;
            }
            if !server.outbox.is_unhindered()
                || server.link.is_full()
                || client.outbox.held() > UNTAKEN_MAX
                || server.link.is_holding()
                || !matches!(server.work, Work::Client(_))
            {
                client.readable = true;
                return;
            }
            // What the link held back until now goes ahead of what comes.
            if holds_message(&client.inbox) {
                if self.feed_inbox(key, server_key) == Flow::Stop {
                    return;
                }
                continue;
            }
            let outcome = if client.inbox.is_empty() {
                client.transport.read(&mut self.scratch)
            } else {
                client.transport.read_more(&mut client.inbox, SCRATCH_BYTES)
            };
            let outcome = match outcome {
                Ok(outcome) => outcome,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    client.readable = false;
                    if client.why == Own::Unread.into() {
                        self.lane_offer_session(key, server_key);
                    }
                    return;
                }
                Err(error) => return self.client_io_failed(key, &error),
            };
            if outcome.count == 0 {
                return self.close_client(key, Farewell::quiet("client unexpected eof"));
            }
            client.readable = outcome.maybe_more;
            client.count_read(outcome.count);
            client.request_at = self.now;
            let input = if client.inbox.is_empty() {
                Input::Scratch(outcome.count)
            } else {
                Input::Held(std::mem::take(&mut client.inbox))
            };
            if self.feed(key, server_key, input) == Flow::Stop {
                return;
            }
            match self.clients.get(key) {
                Some(client) if client.readable || client.ended => {}
                _ => return,
            }
        }
        self.again.push(Again::Client(key));
    }

    /// Passes what a linked client said to its server.
    fn feed(&mut self, key: Key, server_key: Key, input: Input) -> Flow {
        let Self { clients, servers, scratch, compose, to_client, meters, shared, now, .. } = self;
        let (Some(client), Some(Entry::Here(server))) = (clients.get_mut(key), servers.get_mut(server_key))
        else {
            return Flow::Stop;
        };
        let bytes: &[u8] = match &input {
            Input::Scratch(count) => &scratch[..*count],
            Input::Held(held) => held,
        };
        if !server.link.is_busy() && is_answered_here(bytes) && !client.ended && !client.is_clear() {
            // What a lane forwarded is still on its way to the client: nothing that is made up may overtake it.
            match input {
                Input::Scratch(count) => client.inbox.extend_from_slice(&scratch[..count]),
                Input::Held(held) => client.inbox = held,
            }
            client.readable = true;
            self.look_again(key);
            return Flow::Stop;
        }
        to_client.clear();
        let was_busy = server.link.is_busy();
        if let Some(mirror) = &mut client.mirror {
            mirror.before_request(&client.side, &client.parameters, true);
        }
        let mut out = Splice::new(compose);
        let mut context =
            FrontendContext { client: &mut client.side, statements: &shared.statements, to_client };
        let result = server.link.frontend(bytes, &mut context, &mut out);
        let passed = out.bytes(bytes);
        let sent =
            if passed.is_empty() { Ok(true) } else { server.outbox.send(&mut server.transport, passed) };
        if client.query_at.is_none() && server.link.is_busy() {
            client.query_at = Some(*now);
            client.transaction_at.get_or_insert(*now);
        }
        server.request_at = *now;
        let meter = stats::meter(meters, server.pool.id);
        let counts = std::mem::take(&mut server.link.counts);
        meter.stats.client_parse_count += counts.client_parse;
        meter.stats.server_parse_count += counts.server_parse;
        meter.stats.bind_count += counts.bind;
        let is_full = matches!(sent, Ok(false));
        compose.clear();
        compose.shrink_to(COMPOSE_KEPT);
        if let Err(error) = sent {
            let reason = format!("server write failed: {error}");
            self.close_server(server_key, &reason);
            return Flow::Stop;
        }
        let (used, event) = match result {
            Ok(result) => result,
            Err(error) => {
                self.client_broke_protocol(key, error);
                return Flow::Stop;
            }
        };
        meter.stats.received += used as u64;
        let is_mirrored = client.mirror.is_some();
        if let Some(mirror) = &mut client.mirror {
            mirror.request(&bytes[..used], was_busy, *now);
            mirror.response(to_client, *now);
        }
        if !to_client.is_empty() {
            if let Err(error) = client.outbox.send(&mut client.transport, to_client) {
                self.client_io_failed(key, &error);
                return Flow::Stop;
            }
        }
        // What is left is an incomplete message.
        match input {
            Input::Scratch(count) if used < count => client.inbox.extend_from_slice(&scratch[used..count]),
            Input::Held(mut held) if used < held.len() => {
                held.drain(..used);
                client.inbox = held;
            }
            _ => {}
        }
        client.wants = match client.inbox.first() {
            None => 0,
            Some(_) if holds_message(&client.inbox) => 0,
            // Kept as a whole, as soon as its head says that it is not too long for that.
            Some(b'P') if client.inbox.len() > HEAD => {
                message_length(&client.inbox).and_then(|length| usize::try_from(length).ok()).unwrap_or(0)
            }
            Some(_) => client.inbox.len() + 1,
        };
        if server.link.is_holding() || holds_message(&client.inbox) {
            // The answers that it waits for, or the room that there is when this is sent, bring it up again.
            client.readable = true;
        }
        let is_quiescent = server.link.is_quiescent();
        let is_session = server.dedicated || server.pool_mode() == PoolMode::Session;
        let is_cut = client.wants > 0;
        if is_mirrored {
            self.mirror_stream(key);
        }
        if event == FrontendEvent::Terminate {
            self.close_client(key, Farewell::quiet("client close request"));
            return Flow::Stop;
        }
        if is_quiescent && (!is_cut || !is_session) {
            // Nothing that was said needs an answer (a lone Flush, say, or a Parse without its end, which keeps no server waiting).
            self.transaction_over(server_key);
        }
        if is_full { Flow::Stop } else { Flow::Continue }
    }

    fn client_broke_protocol(&mut self, key: Key, error: LinkError) {
        let mut farewell = Farewell::told(error.sqlstate(), error.told());
        farewell.reason = error.to_string();
        self.close_client(key, farewell);
    }

    pub(super) fn client_io_failed(&mut self, key: Key, error: &io::Error) {
        let farewell = if error.kind() == io::ErrorKind::InvalidData {
            Farewell::untold(format!("TLS error: {error}"))
        } else {
            Farewell::quiet(&format!("client read or write failed: {error}"))
        };
        self.close_client(key, farewell);
    }

    pub(super) fn client_writable(&mut self, key: Key) {
        let Some(client) = self.clients.get_mut(key) else { return };
        if client.outbox.is_empty() {
            if client.transport.tls().is_some_and(|tls| tls.wants_write()) {
                let _ = client.transport.flush();
            }
            return;
        }
        match client.outbox.drain(&mut client.transport) {
            Ok(false) => {}
            Ok(true) => match client.phase {
                Phase::Closing if client.farewell.is_some() => {}
                Phase::Closing => self.drop_client(key),
                Phase::Console(_) => self.console_readable(key),
                Phase::Linked(server) => {
                    if client.readable {
                        self.again.push(Again::Client(key));
                    }
                    if self.server(server).is_some_and(|server| server.readable) {
                        self.forward_responses(server);
                    }
                }
                _ => {}
            },
            Err(error) => self.client_io_failed(key, &error),
        }
    }

    /// Before the worker waits: nothing stays with it that a socket would take.
    pub(super) fn send_all_held_back(&mut self) {
        while let Some(key) = self.holding_back.pop() {
            if self.server(key).is_some_and(|server| server.outbox.is_held_back()) {
                self.server_writable(key);
            }
        }
    }

    pub(super) fn server_writable(&mut self, key: Key) {
        let Some(Entry::Here(server)) = self.servers.get_mut(key) else { return };
        if matches!(server.work, Work::Login(_)) {
            // What its full socket did not take of the startup packet or a proof: the server says nothing before it has that.
            if !server.outbox.is_empty() {
                if let Err(error) = server.outbox.drain(&mut server.transport) {
                    return self.login_broke(key, &format!("server write failed: {error}"));
                }
            }
            return self.server_login_event(key);
        }
        if server.outbox.is_empty() {
            if server.transport.tls().is_some_and(|tls| tls.wants_write()) {
                let _ = server.transport.flush();
            }
            return;
        }
        match server.outbox.drain(&mut server.transport) {
            Ok(false) => {}
            Ok(true) => {
                if let Some(client) = server.client() {
                    if self.clients.get(client).is_some_and(|client| client.readable || client.ended) {
                        self.again.push(Again::Client(client));
                    }
                }
            }
            Err(error) => self.close_server(key, &format!("server write failed: {error}")),
        }
    }

    pub(super) fn server_readable(&mut self, key: Key, gone: bool) {
        if let (true, Some(Entry::Here(server))) = (gone, self.servers.get_mut(key)) {
            server.ended = true;
        }
        match self.servers.get(key) {
            Some(Entry::Here(server)) if matches!(server.work, Work::Login(_)) => {
                self.server_login_event(key)
            }
            Some(Entry::Here(_)) => {
                self.forward_responses(key);
                self.rest_again(key);
            }
            Some(&Entry::Parked(id)) => {
                // An idle server speaks: it died, or has something to report. One that has moved to another worker since is not ours to
                // read, whatever this event says: its new registration reports the same. Of one that a lane has linked the programs tell
                // what they do not forward; this may be an old event, and only its end is news.
                let home = self.index;
                let Some(mut server) = crate::shared::lock(&self.shared.core)
                    .unpark(id, |server| server.home == home && server.key == key)
                else {
                    if gone {
                        self.lane_server_gone(id);
                    }
                    return;
                };
                crate::lanes::watch_server(&server);
                server.ended |= gone;
                // The sweep waits so long for what it has begun to say, and no longer.
                server.request_at = self.now;
                if let Some(entry) = self.servers.get_mut(key) {
                    *entry = Entry::Here(server);
                    self.forward_responses(key);
                    self.rest_again(key);
                }
            }
            None => {}
        }
    }

    pub(super) fn forward_responses(&mut self, key: Key) {
        for _ in 0..READS_PER_TURN {
            let Self { clients, servers, scratch, compose, observed, meters, shared, now, index, .. } = self;
            let Some(Entry::Here(server)) = servers.get_mut(key) else { return };
            let mut client = match server.work {
                Work::Client(client) | Work::Preparing { client, .. } => clients.get_mut(client),
                _ => None,
            };
            if client.as_mut().is_some_and(|client| !client.is_clear()) {
                // What a lane forwarded is still on its way to the client: nothing may overtake it.
                if client.as_ref().is_some_and(|client| client.is_flooding())
                    && let Some(client) = server.client()
                {
                    return self.close_flooding(client);
                }
                server.readable = true;
                self.again_soon.push(Again::Server(key));
                return;
            }
            if client.as_ref().is_some_and(|client| !client.outbox.is_empty()) {
                server.readable = true;
                return;
            }
            let outcome = if server.inbox.is_empty() {
                server.transport.read(scratch)
            } else {
                server.transport.read_more(&mut server.inbox, SCRATCH_BYTES)
            };
            let outcome = match outcome {
                Ok(outcome) if outcome.count == 0 => {
                    return self.close_server(key, "server conn crashed?");
                }
                Ok(outcome) => outcome,
                // It was read together with the end of the login.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && holds_message(&server.inbox) => {
                    ReadOutcome { count: 0, maybe_more: false }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    server.readable = false;
                    return;
                }
                Err(error) => return self.close_server(key, &format!("server conn crashed? ({error})")),
            };
            server.readable = outcome.maybe_more || server.ended;
            if let Some(lane) = &mut server.lane {
                lane.read_total += outcome.count as u64;
            }
            let held = std::mem::take(&mut server.inbox);
            let bytes: &[u8] = if held.is_empty() { &scratch[..outcome.count] } else { &held };

            observed.clear();
            let mut out = Splice::new(compose);
            let side = client.as_deref_mut().map(|client| &mut client.side);
            let result = server.link.backend(bytes, side, observed, &mut out);
            let mut passed = out.bytes(bytes);
            if server.pool_mode() == PoolMode::Statement
                && server.link.status() != Status::Idle
                && server.link.is_settled()
            {
                // A ReadyForQuery inside a transaction is the last that this client would hear: it gets an error in its place.
                passed = passed
                    .strip_suffix(READY_IN_TRANSACTION)
                    .or(passed.strip_suffix(READY_IN_FAILED))
                    .unwrap_or(passed);
            }
            let again =
                server.link.take_replay().map(|again| server.outbox.send(&mut server.transport, &again));
            let meter = stats::meter(meters, server.pool.id);
            let mut client_failed = None;
            match (&mut client, &mut server.work) {
                (Some(client), Work::Client(_) | Work::Preparing { .. }) => {
                    meter.stats.sent += passed.len() as u64;
                    if let Some(mirror) = &mut client.mirror {
                        mirror.response(passed, *now);
                    }
                    if server.link.is_quiescent() && Self::is_for_lane(client, *now) {
                        client.outbox.hold_back(passed);
                    } else if !passed.is_empty() {
                        client_failed = client.outbox.send(&mut client.transport, passed).err();
                    }
                }
                (_, Work::AuthQuery { answer, .. } | Work::Identifying { answer }) => {
                    answer.extend_from_slice(passed)
                }
                _ => {}
            }
            if let Some(body) = observed.hidden_error.take() {
                // While a client is served nobody waits for the pooler's own answers (a name that went ahead, or a Parse, whose error the
                // client hears itself): a cancel request of the client's may have hit them.
                if !matches!(server.work, Work::Client(_)) {
                    server.refusal = Some(body);
                }
            }
            let used = match result {
                Ok(used) => used,
                Err(error) => return self.close_server(key, &format!("bad packet from server: {error}")),
            };
            if let Some(Err(error)) = again {
                return self.close_server(key, &format!("server write failed: {error}"));
            }
            if used < bytes.len() {
                server.inbox = bytes[used..].to_vec();
            }
            if let (Some(client), true) = (&mut client, observed.ready > 0) {
                meter.stats.query_count += u64::from(observed.ready);
                meter.stats.xact_count += u64::from(observed.transactions);
                if shared.lanes.is_some() && !server.pool.database.is_mirror {
                    // A client that is in its lane meets no server that is not.
                    let refused = server.lane_refused.filter(|_| server.pool.lane().is_some());
                    let own = if client.is_silent { Some(Own::Probe) } else { refused };
                    shared.user_xacts[usize::from(*index)]
                        .add(own.map_or(client.why, Why::Own), observed.transactions);
                }
                if let Some(since) = client.query_at.take() {
                    let took = now.duration_since(since).as_micros() as u64;
                    meter.stats.query_time += took;
                    meter.latency.query.record(took);
                }
                if server.link.status() == Status::Idle {
                    if let Some(since) = client.transaction_at.take() {
                        let took = now.duration_since(since).as_micros() as u64;
                        meter.stats.xact_time += took;
                        meter.latency.xact.record(took);
                    }
                }
                // More of a pipeline is under way.
                if server.link.is_busy() {
                    client.query_at = Some(*now);
                    client.transaction_at.get_or_insert(*now);
                }
                client.request_at = *now;
            }
            let client_key = server.client();
            let is_silent = client.is_some_and(|client| client.is_silent);
            if !observed.parameters.is_empty() {
                self.parameters_changed(key);
            }
            if let (Some(error), Some(client)) = (client_failed, client_key) {
                self.client_io_failed(client, &error);
                return;
            }
            let is_linked = self.after_responses(key);
            if let Some(client) = client_key.filter(|_| is_silent) {
                self.shadow_answered(client);
            }
            if let Some(client) = client_key {
                self.send_held_back(client);
            }
            if !is_linked {
                return;
            }
            match self.servers.get(key) {
                Some(Entry::Here(server)) if server.readable => {}
                _ => return,
            }
        }
        self.again.push(Again::Server(key));
    }

    /// Looks what a chunk of responses means for the server's work. False if the server has left this worker's hands.
    fn after_responses(&mut self, key: Key) -> bool {
        let Some(server) = self.server(key) else { return false };
        match server.work {
            Work::Client(client) => {
                if server.link.is_quiescent() {
                    // Only a name that went ahead was answered, and the client's request waited for it all the same.
                    let inbox = self.clients.get(client).map(|client| &client.inbox);
                    if self.observed.ready == 0 && inbox.is_some_and(|inbox| holds_message(inbox)) {
                        self.again.push(Again::Client(client));
                        return true;
                    }
                    self.transaction_over(key);
                    return self.server(key).is_some_and(|server| server.client() == Some(client));
                }
                if server.pool_mode() == PoolMode::Statement
                    && server.link.status() != Status::Idle
                    && server.link.is_settled()
                {
                    let why = "transaction blocks not allowed in statement pooling mode";
                    self.shadow_refused(client, why);
                    self.close_client(client, Farewell::told(SqlState::PROTOCOL_VIOLATION, why));
                    return false;
                }
                // Room in the pipeline again.
                if self.clients.get(client).is_some_and(|client| client.readable || client.ended) {
                    self.again.push(Again::Client(client));
                }
                true
            }
            Work::Preparing { client, step } => {
                if !server.link.is_settled() {
                    return true;
                }
                let failed = server.refusal.take();
                self.prepared(key, client, step, failed);
                self.begin_if_prepared(client, key);
                false
            }
            Work::AuthQuery { .. } => self.auth_query_answered(key),
            Work::Identifying { .. } => self.identify_answered(key),
            // Its answers are kept count of; `lane_unclear` goes on.
            Work::Settling { step: SettleStep::Leaving, .. } => true,
            Work::Settling { .. } => {
                if server.link.is_settled() {
                    self.settled(key);
                    return false;
                }
                if server.link.awaits_client() {
                    // A COPY began or an error came after the client had left: nobody else can end it.
                    let mut out = Vec::new();
                    if !server.link.abandon(&mut out)
                        || server.outbox.send(&mut server.transport, &out).is_err()
                    {
                        self.close_server(key, "what a client left behind could not be ended");
                        return false;
                    }
                }
                true
            }
            Work::Resting | Work::Login(_) => true,
        }
    }

    /// The server reported parameters: it has them now, and so has its client.
    fn parameters_changed(&mut self, key: Key) {
        let changes = std::mem::take(&mut self.observed.parameters);
        let Some(Entry::Here(server)) = self.servers.get_mut(key) else { return };
        let own = server.authorization.clone();
        let is_own = |name: &str, value: &str| {
            name.eq_ignore_ascii_case(SESSION_AUTHORIZATION) && own.as_deref() == Some(value)
        };
        let note = |set: &mut ParameterSet| {
            for (name, value, _) in &changes {
                set.set(name, if is_own(name, value) { "" } else { value });
            }
        };
        let mut set = (*server.parameters).clone();
        note(&mut set);
        server.parameters = self.shared.intern_parameters(set);
        if let Some(client) = server.client().and_then(|client| self.clients.get_mut(client)) {
            if changes.iter().any(|(.., hidden)| !hidden)
                || matches!(server.work, Work::Preparing { step: PrepareStep::Restore, .. } | Work::Client(_))
            {
                let mut set = (*client.parameters).clone();
                note(&mut set);
                client.parameters = if set == *server.parameters {
                    Arc::clone(&server.parameters)
                } else {
                    self.shared.intern_parameters(set)
                };
            }
        }
        self.observed.parameters = changes;
    }
}

/// Whether `bytes` begin with a whole message.
pub(super) fn holds_message(bytes: &[u8]) -> bool {
    message_length(bytes).is_some_and(|length| bytes.len() as u64 >= length)
}

/// Whether `bytes`, of a client that has no server, are worth one: half a message is not, unless it is long, and then its header will do,
/// as it does for PgBouncer. Whoever stops in the middle of a short message keeps nobody waiting.
fn needs_server(bytes: &[u8]) -> bool {
    message_length(bytes).is_some_and(|length| bytes.len() as u64 >= length || length > MESSAGE_HELD_MAX)
}

/// Judges the message at the head of what a client says that has no server: neither its body nor a server is waited for in vain.
fn judge_first(bytes: &[u8], shared: &Shared) -> Result<(), LinkError> {
    let Some(head) = bytes.first_chunk() else { return Ok(()) };
    if u64::from(judge_head(head, u32::MAX)?) > MESSAGE_HELD_MAX {
        judge_head(head, shared.settings.load().config.max_packet_size)?;
    }
    Ok(())
}

/// Bytes of the message at the head of `bytes`, type included; `None` = its header has not come yet.
fn message_length(bytes: &[u8]) -> Option<u64> {
    let &[_, a, b, c, d] = bytes.first_chunk()?;
    Some(u64::from(u32::from_be_bytes([a, b, c, d])) + 1)
}

/// Where bytes of a client lie.
enum Input {
    /// At the head of the scratch buffer.
    Scratch(usize),
    /// Taken from the client's inbox.
    Held(Vec<u8>),
}
