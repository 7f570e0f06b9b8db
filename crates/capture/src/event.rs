// SPDX-License-Identifier: Apache-2.0
//! Events as the programs send them, decoded.
#![allow(unsafe_code)]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use underpass_trace::Direction;

use crate::skel::types;

/// Size of the head of every event.
const HEAD_BYTES: usize = size_of::<types::event_head>();

/// The ends of a TCP connection, seen from the server. IPv4 addresses are IPv4 even on sockets of both families.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ends {
    /// The client.
    pub remote: SocketAddr,
    /// The server.
    pub local: SocketAddr,
}

/// FIN, SYN and RST of a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpFlags {
    /// The sender is done.
    pub fin: bool,
    /// The sender begins; the byte at the sequence number is not data.
    pub syn: bool,
    /// The connection is gone.
    pub rst: bool,
}

/// What a program saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// A TCP segment, or a part of one.
    Packet {
        /// CLOCK_MONOTONIC, nanoseconds.
        time_ns: u64,
        /// The socket's cookie, which no other socket has.
        cookie: u64,
        /// Of which connection.
        ends: Ends,
        /// Which way.
        direction: Direction,
        /// Sequence number of the first payload byte.
        seq: u32,
        /// The acknowledgement in the same packet: the next byte its sender expects from the other end.
        ack: u32,
        /// Flags.
        flags: TcpFlags,
        /// Bytes before the payload that were left out by the response level.
        skipped: u32,
        /// It came to the socket that listens, and the cookie is that one's. TCP refuses what it says, unless its handshake is under way.
        listens: bool,
        /// The payload.
        payload: &'a [u8],
    },
    /// A connection turned to encryption: its packets no longer come.
    Encrypted {
        /// CLOCK_MONOTONIC, nanoseconds.
        time_ns: u64,
        /// Of which connection.
        ends: Ends,
    },
    /// A socket was closed; these are the kernel's own accounts of it.
    Close {
        /// CLOCK_MONOTONIC, nanoseconds.
        time_ns: u64,
        /// The socket's cookie; 0 when it was never asked for, and no packet of it was seen.
        cookie: u64,
        /// Of which connection.
        ends: Ends,
        /// Sequence number behind the last byte (and FIN) that was received.
        rcv_nxt: u32,
        /// Sequence number behind the last byte (and FIN) that was sent.
        snd_nxt: u32,
        /// Whether a FIN was received: it counts as a byte in `rcv_nxt`, and in `bytes_received`.
        fin_received: bool,
        /// Whether a FIN was sent: it counts as a byte in `snd_nxt`.
        fin_sent: bool,
        /// Data bytes received, `tcp_info.tcpi_bytes_received`.
        bytes_received: u64,
    },
    /// Bytes that a function of the server read from a client or wrote to it.
    Call {
        /// CLOCK_MONOTONIC, nanoseconds.
        time_ns: u64,
        /// Of which session.
        session: ProbedId,
        /// Whether they travel by TLS for certain: MariaDB and MySQL have functions of their own for that.
        decrypted: bool,
        /// The ends of its connection; `None` for a Unix socket.
        ends: Option<Ends>,
        /// Which way.
        direction: Direction,
        /// Position of the first payload byte since the probes saw the session first.
        offset: u64,
        /// Bytes before the payload that were left out by the response level.
        skipped: u32,
        /// The bytes.
        payload: &'a [u8],
    },
    /// A probed session ended.
    Exit {
        /// CLOCK_MONOTONIC, nanoseconds.
        time_ns: u64,
        /// Which.
        session: ProbedId,
        /// Bytes it read while it was probed.
        bytes_read: u64,
        /// Bytes it wrote while it was probed.
        bytes_written: u64,
    },
    /// A probed process ended, and with it all its sessions of which the events are in the same ring. Comes in each ring, at least once.
    ProcessExit {
        /// CLOCK_MONOTONIC, nanoseconds.
        time_ns: u64,
        /// The process.
        pid: u32,
    },
    /// A session runs something, of which this is the text. PostgreSQL: said by its backend.
    Activity {
        /// CLOCK_MONOTONIC, nanoseconds.
        time_ns: u64,
        /// Which session, if the probes have it; PostgreSQL: of which backend.
        session: ProbedId,
        /// MariaDB, MySQL: the ends of its connection; `None` for a Unix socket.
        ends: Option<Ends>,
        /// Position of this piece in the text. Pieces come one after the other, all with the same time.
        offset: u64,
        /// Bytes of the whole text: one of 1,966,080 or more is not told.
        whole: u64,
        /// The piece.
        text: &'a [u8],
    },
}

/// A probed session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProbedId {
    /// The process that serves it.
    pub pid: u32,
    /// Tells it from others of this process, now and later. PostgreSQL: when the process started, CLOCK_BOOTTIME nanoseconds, so
    /// that one with the same number later is another. MariaDB and MySQL: a number.
    pub number: u64,
}

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
/// Flags of an event's head; `EVENT_*` of `capture.h`.
const DECRYPTED: u8 = 1;
const WHOLE_PROCESS: u8 = 2;
const FIN_RECEIVED: u8 = 4;
const FIN_SENT: u8 = 8;
const LISTENS: u8 = 32;

impl<'a> Event<'a> {
    /// Decodes an event; `None` for what no program of this version sends.
    pub(crate) fn decode(bytes: &'a [u8]) -> Option<Self> {
        let (head, rest) = bytes.split_at_checked(HEAD_BYTES)?;
        // SAFETY: as many bytes as the structure has, of any alignment; it has only integers, for which all bits are valid.
        let head: types::event_head = unsafe { std::ptr::read_unaligned(head.as_ptr().cast()) };
        let payload = rest.get(..head.len as usize)?;
        let time_ns = head.ts_ns;
        let session = ProbedId { pid: head.pid, number: head.cookie };
        let direction =
            if types::event_direction(head.direction.into()) == types::event_direction::DIRECTION_BACKEND {
                Direction::Backend
            } else {
                Direction::Frontend
            };
        Some(match types::event_kind(u32::from(head.kind)) {
            types::event_kind::EVENT_PACKET => Self::Packet {
                time_ns,
                cookie: head.cookie,
                ends: ends(&head)?,
                direction,
                seq: head.seq,
                ack: head.ack,
                flags: TcpFlags {
                    fin: head.tcp_flags & FIN != 0,
                    syn: head.tcp_flags & SYN != 0,
                    rst: head.tcp_flags & RST != 0,
                },
                skipped: head.skipped,
                listens: head.flags & LISTENS != 0,
                payload,
            },
            types::event_kind::EVENT_TLS => Self::Encrypted { time_ns, ends: ends(&head)? },
            types::event_kind::EVENT_CLOSE => Self::Close {
                time_ns,
                cookie: head.cookie,
                ends: ends(&head)?,
                rcv_nxt: head.seq,
                snd_nxt: head.ack,
                fin_received: head.flags & FIN_RECEIVED != 0,
                fin_sent: head.flags & FIN_SENT != 0,
                bytes_received: head.offset,
            },
            types::event_kind::EVENT_CALL => Self::Call {
                time_ns,
                session,
                decrypted: head.flags & DECRYPTED != 0,
                ends: ends(&head),
                direction,
                offset: head.offset,
                skipped: head.skipped,
                payload,
            },
            types::event_kind::EVENT_EXIT if head.flags & WHOLE_PROCESS != 0 => {
                Self::ProcessExit { time_ns, pid: head.pid }
            }
            types::event_kind::EVENT_EXIT => {
                Self::Exit { time_ns, session, bytes_read: head.offset, bytes_written: head.more }
            }
            types::event_kind::EVENT_ACTIVITY => Self::Activity {
                time_ns,
                session,
                ends: ends(&head),
                offset: head.offset,
                whole: head.more,
                text: payload,
            },
            _ => return None,
        })
    }
}

fn ends(head: &types::event_head) -> Option<Ends> {
    let address = |bytes: [u8; 16]| {
        let [a, b, c, d, ..] = bytes;
        match head.family {
            AF_INET => Some(IpAddr::V4(Ipv4Addr::new(a, b, c, d))),
            AF_INET6 => Some(Ipv6Addr::from(bytes).to_canonical()),
            _ => None,
        }
    };
    Some(Ends {
        remote: SocketAddr::new(address(head.remote)?, head.remote_port),
        local: SocketAddr::new(address(head.local)?, head.local_port),
    })
}
