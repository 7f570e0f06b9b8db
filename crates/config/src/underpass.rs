// SPDX-License-Identifier: Apache-2.0
//! The keys of `[underpass]`, which PgBouncer does not have.
//!
//! PgBouncer refuses a file with this section. Put it into a file of its own and name that file second
//! (`--overlay`), so that the first still starts PgBouncer.

use std::net::SocketAddr;
use std::path::PathBuf;

use crate::config::Config;
use crate::key::keys;
use crate::value::{KeptBytes, LaneBytes, LanePlaces};
use crate::words::{KernelPath, LogFormat, SameHost, TraceLevel};

keys! {
    /// `[underpass]`.
    struct UnderpassConfig, rows UNDERPASS_KEYS, section Underpass, access (part, part_mut);
    also {}
    group "Section [underpass]" {
        /// Worker threads. 0 (or `auto`): one per core this process may run on. All limits and statistics are
        /// shared by all threads.
        threads: Option<u32> = Some("0"), Restart;
        /// Where the OpenMetrics endpoint listens. Empty: no endpoint.
        metrics_listen: Option<SocketAddr> = Some(""), Restart;
        /// `text` writes PgBouncer's log lines, `json` one object a line with the same facts.
        log_format: LogFormat = Some("text"), Reload;
        /// Forwarding of established links inside the kernel. `auto`: where the self-test passes; `off`: never;
        /// `require`: refuse to start where one of the lanes that `same_host` asks for does not work.
        kernel_path: KernelPath = Some("auto"), Restart;
        /// Which processes of this host take part in kernel lanes by their own sockets: `off`, `server` (PostgreSQL's
        /// backends) or `both` (applications, too: what they send and are answered goes straight from socket to socket, and they must read by plain
        /// `recv()` or `read()`; docs/lanes.md, lane B).
        same_host: SameHost = Some("server"), Restart;
        /// SO_SNDBUF and SO_RCVBUF of connections whose other end is on this host, where the kernel's own buffers would grow to several MiB
        /// for one who stops reading. `tcp_socket_buffer` goes before. 0: the kernel's own. \[bytes\]
        local_socket_buffer: u32 = Some("262144"), Reload;
        /// Ring in which kernel lanes tell what they forward for mirrored databases, made if a mirror is configured at start.
        /// Transactions that find no room are dropped as a whole, and counted. Rounded up to a power of two. 0: mirrored databases
        /// stay in user space. \[bytes\]
        mirror_ring_bytes: u64 = Some("4194304"), Restart;
        /// Clients that can be in kernel lanes at once, for about 0.6 KiB of memory each (the first 4096: 1.7 KiB). Others are in user space (`client_refused` in SHOW KERNEL).
        lane_clients_max: LanePlaces = Some("16384"), Restart;
        /// Server connections, likewise (`server_refused`).
        lane_servers_max: LanePlaces = Some("4096"), Restart;
        /// Pools, likewise, for 8.2 KiB each (`no_place`). A pair of database and user keeps its place until it is forgotten.
        lane_pools_max: LanePlaces = Some("256"), Restart;
        /// Names of clients' prepared statements that kernel lanes know at once, and statements of servers, likewise. Uses of others are
        /// in user space (`named_statement`, `unprepared`).
        lane_statements_max: LanePlaces = Some("65536"), Restart;
        /// Requests that a client may send through a kernel lane before all that it asked for is answered. Beyond that they go through
        /// user space, and a server that does not read stops the client (`request_budget`). \[bytes\]
        lane_request_bytes: LaneBytes = Some("262144"), Restart;
        /// Responses that may wait for a slow client outside of its TCP queue (lane D), or in an application's own socket (lane B). Beyond
        /// that they go through user space, and the client stops the server (`response_queue`, `room`). \[bytes\]
        lane_response_bytes: LaneBytes = Some("262144"), Restart;
        /// Requests of up to so many bytes wait in the kernel while all servers of their pool are busy, if those are on this host (lanes A and B) and no more are
        /// to be opened: the server that is free first fetches the next one itself. Longer ones wait in user space, and so do those of clients beyond the first
        /// 4096 in lanes. 0: all wait in user space. \[bytes\]
        lane_kept_bytes: KeptBytes = Some("1024"), Restart;
        /// Ring in which kernel lanes tell what is user space's to do, 32 bytes each time. One that is full costs a look at all
        /// clients (`events_lost`). Rounded up to a power of two. \[bytes\]
        lane_ring_bytes: LaneBytes = Some("262144"), Restart;
        /// 1: the kernel measures the run time of BPF programs while the pooler runs, of all on this machine, for some 20 ns a run, and SHOW KERNEL and the metrics
        /// tell what those of the lanes cost. Needs a start as root (CAP_SYS_ADMIN, which the pooler does not keep); without, `sysctl
        /// -w kernel.bpf_stats_enabled=1` does the same at any time.
        lane_statistics: bool = Some("0"), Restart;
        /// Largest Parse message of a named statement in transaction and statement pooling, which is held in memory as a
        /// whole. A larger one ends the client with SQLSTATE 54000. 0: as large as `max_packet_size`. \[bytes\]
        max_prepared_statement_bytes: u64 = Some("16777216"), Reload;
        /// Most memory for the named statements of one client in transaction and statement pooling: their names, texts and 160 bytes for
        /// each. A client that prepares more, and deallocates none, is ended with SQLSTATE 54000. 0: no limit. \[bytes\]
        max_client_statement_bytes: u64 = Some("67108864"), Reload;
        /// Where what clients say and are answered is recorded, for `underpass report`, `export` and `replay`. Each recording makes a
        /// directory of its own in this one, named by the time. Clients stay out of kernel lanes meanwhile. Empty: no recording.
        trace_dir: Option<PathBuf> = Some(""), Reload;
        /// How much of the responses a recording has: `none` (when the server was ready), `summary` (tags, rows, SQLSTATE, latencies) or
        /// `full`.
        trace_level: TraceLevel = Some("summary"), Reload;
        /// Literals and bind values are recorded as others of the same length and look, by a key that nobody knows: equal values are
        /// equal within a recording. `trace_mask_key` does that with a key of one's own.
        trace_mask: bool = Some("0"), Reload;
        /// Literals and bind values are masked with the key in this file, of 16 bytes or more: equal values are equal in all recordings
        /// (and traces of `underpass trace --mask-key`) that were masked with it. Read when a recording begins. Empty: see `trace_mask`.
        trace_mask_key: Option<PathBuf> = Some(""), Reload;
        /// Most memory for what is recorded and not written yet. What has no room is left out, and counted. \[bytes\]
        trace_queue_bytes: u64 = Some("67108864"), Reload;
        /// A recording ends at this size of its files. 0: at no size. \[bytes\]
        trace_max_bytes: u64 = Some("0"), Reload;
    }
}

fn part(config: &Config) -> &UnderpassConfig {
    &config.underpass
}

fn part_mut(config: &mut Config) -> &mut UnderpassConfig {
    &mut config.underpass
}
