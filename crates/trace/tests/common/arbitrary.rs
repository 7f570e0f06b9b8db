// SPDX-License-Identifier: Apache-2.0
//! Records with any contents.

use std::borrow::Cow;
use std::net::SocketAddr;

use proptest::prelude::*;
use underpass_trace::*;

fn bytes() -> impl Strategy<Value = Bytes<'static>> {
    prop_oneof![
        8 => prop::collection::vec(any::<u8>(), 0..40),
        1 => prop::collection::vec(Just(b'x'), 1000..3000),
    ]
    .prop_map(Cow::Owned)
}

/// A message of this type: CopyData and DataRow are nothing that must be hidden.
fn message(tag: u8) -> impl Strategy<Value = Bytes<'static>> {
    bytes().prop_map(move |body| Cow::Owned([&[tag], &body[..]].concat()))
}

/// Numbers near the edges, small ones, and all others.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![0..300u64, any::<u64>(), Just(u64::MAX), (0..64u32).prop_map(|bit| 1 << bit)]
}

fn session() -> impl Strategy<Value = SessionId> {
    prop_oneof![9 => 0..4u64, 1 => any::<u64>()].prop_map(SessionId)
}

fn peer() -> impl Strategy<Value = Option<SocketAddr>> {
    let v4 = (any::<[u8; 4]>(), any::<u16>()).prop_map(|(ip, port)| SocketAddr::from((ip, port)));
    let v6 = (any::<[u8; 16]>(), any::<u16>()).prop_map(|(ip, port)| SocketAddr::from((ip, port)));
    prop::option::of(prop_oneof![v4, v6])
}

fn start() -> impl Strategy<Value = Record<'static>> {
    let source = prop::sample::select(&[
        Source::CgroupSkb,
        Source::Uprobe,
        Source::Pooler,
        Source::Import,
        Source::Synthetic,
    ]);
    let transport = prop::sample::select(&[
        Transport::Tcp,
        Transport::Tls,
        Transport::Gss,
        Transport::Unix,
        Transport::Unknown,
    ]);
    (
        (session(), number(), prop::option::of(number()), source, transport, peer()),
        (prop::option::of(any::<u32>()), any::<bool>(), any::<u32>()),
        prop::array::uniform3(prop::option::of(bytes())),
        prop::collection::vec((bytes(), bytes()), 0..4),
        (number(), number()),
    )
        .prop_map(|(first, second, [database, user, application_name], parameters, offsets)| {
            let (session, time_ns, ready_ns, source, transport, peer) = first;
            let (backend_pid, midstream, protocol_version) = second;
            let (frontend_offset, backend_offset) = offsets;
            Record::SessionStart(SessionStart {
                session,
                time_ns,
                ready_ns,
                source,
                transport,
                peer,
                backend_pid,
                midstream,
                protocol_version,
                database,
                user,
                application_name,
                parameters,
                frontend_offset,
                backend_offset,
            })
        })
}

fn redaction() -> impl Strategy<Value = Redaction> {
    prop::sample::select(&[Redaction::None, Redaction::Password, Redaction::Masked])
}

fn outcome() -> impl Strategy<Value = Outcome<'static>> {
    prop_oneof![
        bytes().prop_map(|tag| Outcome::Complete { tag }),
        Just(Outcome::Empty),
        Just(Outcome::Suspended),
        Just(Outcome::Unknown),
        (any::<[u8; 5]>(), any::<bool>(), bytes())
            .prop_map(|(sqlstate, fatal, message)| Outcome::Error(ErrorOutcome { sqlstate, fatal, message })),
    ]
}

fn direction() -> impl Strategy<Value = Direction> {
    prop::sample::select(&[Direction::Frontend, Direction::Backend])
}

fn status() -> impl Strategy<Value = TransactionStatus> {
    prop::sample::select(&[
        TransactionStatus::Idle,
        TransactionStatus::Transaction,
        TransactionStatus::Failed,
    ])
}

fn totals() -> impl Strategy<Value = ByteTotals> {
    (number(), number(), number(), number(), prop::option::of(number())).prop_map(
        |(seen, recorded, lost, withheld, audited)| ByteTotals { seen, recorded, lost, withheld, audited },
    )
}

fn count() -> impl Strategy<Value = Count> {
    (number(), number()).prop_map(|(events, bytes)| Count { events, bytes })
}

/// Any record.
pub fn record() -> impl Strategy<Value = Record<'static>> {
    prop_oneof![
        start(),
        (session(), number(), number(), number(), redaction(), message(b'd')).prop_map(
            |(session, time_ns, offset, wire_len, redaction, message)| Record::Frontend(Frontend {
                session,
                time_ns,
                offset,
                wire_len,
                redaction,
                message
            })
        ),
        ((session(), number(), number(), number()), (number(), number(), number(), outcome())).prop_map(
            |((session, request, offset, len), (first_ns, last_ns, rows, outcome))| {
                Record::Response(Response { session, request, offset, len, first_ns, last_ns, rows, outcome })
            }
        ),
        (session(), number(), number(), number(), status()).prop_map(
            |(session, time_ns, request, offset, status)| Record::Ready(Ready {
                session,
                time_ns,
                request,
                offset,
                status
            })
        ),
        (session(), number(), number(), message(b'D')).prop_map(|(session, time_ns, offset, message)| {
            Record::Backend(Backend { session, time_ns, offset, message })
        }),
        (session(), number(), bytes(), bytes()).prop_map(|(session, time_ns, name, value)| {
            Record::ParameterStatus(ParameterStatus { session, time_ns, name, value })
        }),
        (session(), number(), bytes(), bytes(), prop::collection::vec(any::<u32>(), 0..5), redaction())
            .prop_map(|(session, time_ns, name, query, param_types, redaction)| {
                Record::PreparedFill(PreparedFill { session, time_ns, name, query, param_types, redaction })
            }),
        (number(), prop::option::of(session()), any::<u32>()).prop_map(|(time_ns, session, backend_pid)| {
            Record::Cancel(Cancel { time_ns, session, backend_pid })
        }),
        (
            session(),
            number(),
            direction(),
            number(),
            number(),
            prop::sample::select(&[
                WithheldReason::Authentication,
                WithheldReason::Filter,
                WithheldReason::Replication,
                WithheldReason::Masking,
                WithheldReason::Incomplete
            ])
        )
            .prop_map(|(session, time_ns, direction, offset, len, reason)| {
                Record::Withheld(Withheld { session, time_ns, direction, offset, len, reason })
            }),
        (
            prop::option::of(session()),
            number(),
            direction(),
            number(),
            number(),
            prop::sample::select(&[
                LossReason::RingFull,
                LossReason::Fault,
                LossReason::Gap,
                LossReason::WriterQueue,
                LossReason::Resync,
                LossReason::Protocol,
                LossReason::Audit
            ])
        )
            .prop_map(|(session, time_ns, direction, offset, len, reason)| {
                Record::Loss(Loss { session, time_ns, direction, offset, len, reason })
            }),
        (
            session(),
            number(),
            prop::sample::select(&[
                EndReason::Terminate,
                EndReason::ClientClosed,
                EndReason::ServerClosed,
                EndReason::Reset,
                EndReason::RecordingEnded,
                EndReason::Unknown
            ]),
            totals(),
            totals()
        )
            .prop_map(|(session, time_ns, reason, frontend, backend)| {
                Record::SessionEnd(SessionEnd { session, time_ns, reason, frontend, backend })
            }),
        (number(), any::<i64>())
            .prop_map(|(monotonic_ns, realtime_ns)| Record::Clock(Clock { monotonic_ns, realtime_ns })),
        (number(), count(), count(), count(), count()).prop_map(
            |(time_ns, seen, recorded, lost, filtered)| {
                Record::Counters(Counters { time_ns, seen, recorded, lost, filtered })
            }
        ),
        (number(), bytes(), bytes(), bytes(), prop::option::of(bytes())).prop_map(
            |(time_ns, database, address, version, system_identifier)| {
                Record::Server(ServerIdentity { time_ns, database, address, version, system_identifier })
            }
        ),
        (number(), bytes()).prop_map(|(time_ns, text)| Record::Note(Note { time_ns, text })),
    ]
}
