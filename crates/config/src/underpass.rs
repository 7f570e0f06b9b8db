// SPDX-License-Identifier: Apache-2.0
//! The keys of `[underpass]`, which PgBouncer does not have.
//!
//! PgBouncer refuses a file with this section. Put it into a file of its own and name that file second
//! (`--overlay`), so that the first still starts PgBouncer.

use std::net::SocketAddr;
use std::path::PathBuf;

use crate::config::Config;
use crate::key::keys;
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
        /// `require`: refuse to start where no lane works.
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
