// SPDX-License-Identifier: Apache-2.0
//! The kernel lanes: BPF programs that forward linked clients and servers, and [`Datapath`], the handle on them.
//!
//! After login, a client and a server connection can be *linked* in the kernel: the programs frame both streams, count
//! ReadyForQuery, take an idle server when a transaction begins and give it back when it ends. User space stays a
//! complete pooler and owns every direction that a program does not. This page is the contract between the two;
//! `docs/lanes.md` explains why.
//!
//! # Words
//!
//! - A *direction* is the requests of one client or the responses of one server. It is owned by the kernel or by user
//!   space. A program that meets something odd gives its direction to user space with a [`Reason`], passes the whole
//!   chunk at hand and posts an [`Event`]. Only user space gives a direction back.
//! - A *held* client is one that no program may link, extend or release. [`Datapath::take`] holds,
//!   [`Datapath::give_client`] ends it. A fresh client is held.
//! - `read_total` is the number of bytes that user space has ever read from that socket since registration.
//! - The *fingerprint* stands for the values of all tracked parameters. Programs link a client only to a server of
//!   its pool with an equal fingerprint; user space may link any two, after it has made them equal.
//!
//! # What the event loop must do
//!
//! **epoll.** A socket whose direction the kernel owns is registered with `EPOLLRDHUP` only (HUP and ERR come
//! unasked). With `EPOLLIN` every forwarded segment would wake the process for nothing, which costs more than the lane
//! saves. Change the interest to `EPOLLIN | EPOLLRDHUP` *after* `take`, and back to `EPOLLRDHUP` *before* `give_*`;
//! `EPOLL_CTL_MOD` looks at the present state, so no edge is lost. [`Datapath::event_fd`] is registered with `EPOLLIN`.
//!
//! **Start.** [`selftest::open`] loads the lanes, tells what works and hands them over if all does; else [`Datapath::open`]. [`Datapath::add_pool`] per pool.
//!
//! **A server logs in.** Read all it sent, then [`Datapath::register_server`] (with the process of BackendKeyData for
//! lane A), then [`Datapath::push_idle`] with `read_total` 0. From here on both sides draw from the one idle set:
//! never keep a second list of idle servers.
//!
//! **A client logs in.** Write the whole login, then [`Datapath::register_client`], then, with no unhandled bytes,
//! [`Datapath::give_client`]`(slot, 0)`. [`Give::Unread`] means that requests came already: read them.
//!
//! **`Event::ClientUp`.**
//! 1. [`Datapath::take`]; on `None` try again in the next turn of the loop (a program is running: microseconds).
//! 2. Set `EPOLLIN`, read the client. [`Taken`] tells where both streams stand: start the link tracker from it.
//! 3. If [`Taken::server`] is set, user space runs both directions of that link. Before the first write to the server
//!    wait for [`Datapath::server_drained`], before the first write to the client for [`Datapath::client_drained`]:
//!    bytes that a program redirected earlier may still be on their way. (Poll it with a short timer; a client that
//!    does not read can keep it false for ever, which then must block only this link.)
//! 4. At the end of the transaction (nothing pending, `I`, both streams at a boundary, everything read is written):
//!    [`Datapath::unlink`], clean the server if need be, [`Datapath::push_idle`] or
//!    [`Datapath::link`] to the longest waiting client, and [`Datapath::give_client`]. Or give the link back in the
//!    middle of a transaction: [`Datapath::set_link_state`], [`Datapath::give_server`], [`Datapath::give_client`].
//! 5. If no server is set, the client wants one ([`Reason::NoServer`], [`Reason::Waiters`], ...) or is leaving
//!    ([`Reason::Terminate`]), or sent what a lane does not forward; the bytes say which.
//!
//! **A client waits.** Queue it, [`Datapath::set_waiters`] to the new length, *then* look once more with
//! [`Datapath::pop_idle`]: the order matters. While there are waiters, programs take no server and every server that
//! becomes idle is announced by `Event::PoolIdle`: pop it and grant it to the head of the queue. [`Datapath::set_waiters`]
//! again when the queue shrinks.
//!
//! **A grant, with responses by the kernel at once.** [`Datapath::link`] with `pending` counted from the requests that
//! were read; [`Datapath::give_server`]`(server, its read_total, &StreamState::BOUNDARY)`; write the requests to the
//! server's socket; [`Datapath::give_client`]. `give_client` may answer [`Give::Ended`] (the answer was faster): take, unlink,
//! go on. If the requests end inside a message, or the write is short, do not give: run the link in user space. In lane A a
//! request that follows goes up ([`Reason::Behind`]) as long as the backend has not read what was written.
//!
//! **A grant without giving the client.** Where requests are going to queue in any case, user space keeps them, and the kernel the answers:
//! when the client [is clear](Datapath::is_clear_to_feed), [`Datapath::take_to_feed`], [`Datapath::feed`], [`Datapath::write_fed`]. The server was idle, its
//! responses never left the kernel, and the client's socket keeps its epoll interest: no further call is needed. The next request is for the same link
//! ([`Datapath::feed_more`]) or, when that has ended, for a new one ([`Datapath::hold_fed`] first). A server that user space owns joins by [`Datapath::link`],
//! [`Datapath::give_server`], [`Datapath::feed_linked`]. [`Datapath::take`] ends the feeding.
//!
//! **`Event::ServerUp`.** [`Datapath::claim_server`]. [`Claim::Owned`]: it is out of the idle set and yours: read what it
//! says (a notice, a parameter, FATAL), then `push_idle` or close. [`Claim::Linked`]: `take` that client and run the
//! link. [`Claim::Busy`]: next turn. [`Reason::Retire`] and [`Reason::Held`] come with the last
//! response already forwarded: the link is idle and waits for `take`, `unlink`.
//!
//! **`EPOLLRDHUP` of a client.** `take`, read to the end; [`Taken::server`] tells what to cancel and roll back; `unlink`;
//! [`Datapath::free_client`]; close, and close the server that it returns, if it does. **Of a server:** `claim_server`, read to the end (its last words may be a FATAL
//! for the client); `unlink`; [`Datapath::free_server`]; close. Never close a socket before its slot is freed, and
//! never take a live socket out of a map (there is no call for it): unread bytes would be lost.
//!
//! **PAUSE, KILL, timeouts, cancel.** [`Datapath::set_pool_closed`]; links that stand end by themselves and are
//! announced by `Event::PoolIdle`. To interrupt one, `take` it. [`Datapath::client_info`] has the times and the state. A
//! cancel takes the link before it sends the request, so that the server cannot go to another client under it.
//! **Server limits.** [`Datapath::set_server_retire`] for the linked, [`Datapath::take_idle`] for the idle.
//!
//! **Session pooling.** [`Datapath::set_client_pinned`] before `give_client`, or link with [`LinkState::pinned`]: the kernel then never
//! releases the link, names of statements are the server's own, batches may lack their Sync ([`LinkState::batch`]), and what the server says
//! unasked is forwarded. When user space has a link at rest, both directions go back in an order in which a client that asks at once finds its lane
//! open: [`Datapath::set_link_state`], [`Datapath::give_client`], write the rest of the response, [`Datapath::give_server`].
//!
//! **Named prepared statements.** A program renames uses of statements (Bind, Describe) whose names it knows: a client's by
//! [`Datapath::set_client_statement`], told while user space holds the client; a server's by [`Datapath::set_server_statement`],
//! told while user space owns the server. Parse and Close go to user space, and so does the use of a statement that the linked server
//! does not have ([`Reason::Unprepared`]). Before a slot is freed, or its names change their meaning, the old ones are forgotten.
//!
//! **Mirrors.** What programs forward for a client that [`Datapath::set_client_tap`] marked, while it was held and unlinked, is told in a
//! ring of its own, if [`Config::tap_ring_bytes`] made one. [`Datapath::tap_fd`] is registered with `EPOLLIN`; [`Datapath::drain_taps`]
//! and [`Datapath::take_taps`] give each reader the records of its clients, and a [`TapStream`] for each client makes transactions of them.
//! Whoever takes a tapped client calls [`Datapath::sort_taps`] next, until it says true, takes its queue, and tells [`TapStream::taken`] the
//! [`Datapath::tap_mark_of`] the client: only then is its stream known up to the byte that user space reads next.
//!
//! # Memory
//!
//! Per client at most [`Config::request_budget_bytes`] of requests and [`Config::response_queue_bytes_max`] of responses
//! plus one chunk (64 KiB; on loopback, where the kernel merges what waits, up to 512 KiB were seen) are outside of TCP's own accounting; lane A adds nothing to the send buffer's limit. Past that
//! the direction goes to user space, and the sender is held back by its TCP window.

mod application;
mod attach;
mod datapath;
mod error;
mod events;
mod feed;
mod forward;
mod handover;
mod holder;
mod holders;
mod kept;
mod names;
mod queue;
pub mod selftest;
mod shared;
mod skel;
mod socket;
mod statements;
mod tap_stream;
mod taps;
mod view;
mod words;

pub use attach::measure_programs;
pub use datapath::{ClientSlot, Config, Datapath, Lane, LaneChoice, PoolSlot, ServerSlot, ServerSpec};
pub use error::Error;
pub use events::Event;
pub use feed::Fed;
pub use forward::{Forwarder, Local};
pub use handover::{Claim, Give, Kept, LinkState, Taken, TransactionStatus};
pub use holder::Connection;
pub use holders::Holders;
pub use kept::Keeper;
pub use names::{Counter, Reason};
pub use shared::StreamState;
pub use statements::STATEMENT_NAME_MAX;
pub use tap_stream::{TapMark, TapRecord, TapStream, TapTaken, Tapped};
pub use taps::{TapBatch, TapWaits};
pub use view::{ClientInfo, ClientStats, ProgramCost};
