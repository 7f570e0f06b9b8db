// SPDX-License-Identifier: Apache-2.0
//! Records as bytes, and back: `kind`, length, fields. docs/trace-format.md is the specification.
//!
//! Times and offsets are differences to what came before in the same *chain* of blocks, so a chain can be read
//! without any other. Encoder and decoder keep the same [`State`], and reset it together.

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};

use crate::model::*;
use crate::varint::{Fields, put, put_bytes, put_delta};

/// The byte that begins a record.
pub(crate) mod kind {
    pub(crate) const SESSION_START: u8 = 1;
    pub(crate) const FRONTEND: u8 = 2;
    pub(crate) const RESPONSE: u8 = 3;
    pub(crate) const READY: u8 = 4;
    pub(crate) const BACKEND: u8 = 5;
    pub(crate) const PARAMETER_STATUS: u8 = 6;
    pub(crate) const PREPARED_FILL: u8 = 7;
    pub(crate) const CANCEL: u8 = 8;
    pub(crate) const WITHHELD: u8 = 9;
    pub(crate) const LOSS: u8 = 10;
    pub(crate) const SESSION_END: u8 = 11;
    pub(crate) const CLOCK: u8 = 12;
    pub(crate) const COUNTERS: u8 = 13;
    /// Since 1.1.
    pub(crate) const SERVER: u8 = 14;
    /// Since 1.2.
    pub(crate) const NOTE: u8 = 15;

    /// Whether this version knows the kind. Readers pass over others, which a later minor version added.
    pub(crate) const fn is_known(kind: u8) -> bool {
        matches!(kind, SESSION_START..=NOTE)
    }
}

/// What differences refer to.
#[derive(Clone, Debug, Default)]
pub(crate) struct State {
    time_ns: u64,
    expected: foldhash::HashMap<u64, Expected>,
}

/// Where the next message of a session should begin.
#[derive(Clone, Copy, Debug, Default)]
struct Expected {
    frontend: u64,
    backend: u64,
}

impl State {
    pub(crate) fn reset(&mut self) {
        self.time_ns = 0;
        self.expected.clear();
    }

    #[inline]
    fn session(&mut self, session: SessionId) -> &mut Expected {
        self.expected.entry(session.0).or_default()
    }
}

/// The kind of a record.
pub(crate) fn kind_of(record: &Record<'_>) -> u8 {
    match record {
        Record::SessionStart(_) => kind::SESSION_START,
        Record::Frontend(_) => kind::FRONTEND,
        Record::Response(_) => kind::RESPONSE,
        Record::Ready(_) => kind::READY,
        Record::Backend(_) => kind::BACKEND,
        Record::ParameterStatus(_) => kind::PARAMETER_STATUS,
        Record::PreparedFill(_) => kind::PREPARED_FILL,
        Record::Cancel(_) => kind::CANCEL,
        Record::Withheld(_) => kind::WITHHELD,
        Record::Loss(_) => kind::LOSS,
        Record::SessionEnd(_) => kind::SESSION_END,
        Record::Clock(_) => kind::CLOCK,
        Record::Counters(_) => kind::COUNTERS,
        Record::Server(_) => kind::SERVER,
        Record::Note(_) => kind::NOTE,
    }
}

/// Appends the fields of `record` to `out`. The caller writes kind and length before them.
pub(crate) fn encode(state: &mut State, record: &Record<'_>, out: &mut Vec<u8>) {
    match record {
        Record::SessionStart(r) => session_start(state, r, out),
        Record::Frontend(r) => {
            put(out, r.session.0);
            time(state, r.time_ns, out);
            let expected = state.session(r.session);
            put_delta(out, expected.frontend, r.offset);
            expected.frontend = r.offset.wrapping_add(r.wire_len);
            put(out, redaction(r.redaction));
            put_delta(out, r.message.len() as u64, r.wire_len);
            out.extend_from_slice(&r.message);
        }
        Record::Response(r) => {
            put(out, r.session.0);
            time(state, r.last_ns, out);
            put_delta(out, r.last_ns, r.first_ns);
            let expected = state.session(r.session);
            put_delta(out, expected.frontend, r.request);
            put_delta(out, expected.backend, r.offset);
            expected.backend = r.offset.wrapping_add(r.len);
            put(out, r.len);
            put(out, r.rows);
            outcome(&r.outcome, out);
        }
        Record::Ready(r) => {
            put(out, r.session.0);
            time(state, r.time_ns, out);
            let expected = state.session(r.session);
            put_delta(out, expected.frontend, r.request);
            put_delta(out, expected.backend, r.offset);
            expected.backend = r.offset.wrapping_add(READY_FOR_QUERY_LEN);
            out.push(r.status.to_byte());
        }
        Record::Backend(r) => {
            put(out, r.session.0);
            time(state, r.time_ns, out);
            let expected = state.session(r.session);
            put_delta(out, expected.backend, r.offset);
            expected.backend = r.offset.wrapping_add(r.message.len() as u64);
            out.extend_from_slice(&r.message);
        }
        Record::ParameterStatus(r) => {
            put(out, r.session.0);
            time(state, r.time_ns, out);
            put_bytes(out, &r.name);
            put_bytes(out, &r.value);
        }
        Record::PreparedFill(r) => {
            put(out, r.session.0);
            time(state, r.time_ns, out);
            put_bytes(out, &r.name);
            put_bytes(out, &r.query);
            put(out, r.param_types.len() as u64);
            r.param_types.iter().for_each(|&oid| put(out, oid.into()));
            put(out, redaction(r.redaction));
        }
        Record::Cancel(r) => {
            time(state, r.time_ns, out);
            optional(r.session.map(|session| session.0), out);
            put(out, r.backend_pid.into());
        }
        Record::Withheld(r) => {
            put(out, r.session.0);
            time(state, r.time_ns, out);
            out.push(direction(r.direction));
            put(out, r.offset);
            put(out, r.len);
            skip(state.session(r.session), r.direction, r.offset, r.len);
            out.push(withheld_reason(r.reason));
        }
        Record::Loss(r) => {
            optional(r.session.map(|session| session.0), out);
            time(state, r.time_ns, out);
            out.push(direction(r.direction));
            put(out, r.offset);
            put(out, r.len);
            if let Some(session) = r.session {
                skip(state.session(session), r.direction, r.offset, r.len);
            }
            out.push(loss_reason(r.reason));
        }
        Record::SessionEnd(r) => {
            put(out, r.session.0);
            time(state, r.time_ns, out);
            out.push(end_reason(r.reason));
            totals(&r.frontend, out);
            totals(&r.backend, out);
            state.expected.remove(&r.session.0);
        }
        Record::Clock(r) => {
            time(state, r.monotonic_ns, out);
            put_delta(out, 0, r.realtime_ns as u64);
        }
        Record::Counters(r) => {
            time(state, r.time_ns, out);
            for count in [r.seen, r.recorded, r.lost, r.filtered] {
                put(out, count.events);
                put(out, count.bytes);
            }
        }
        Record::Server(r) => {
            time(state, r.time_ns, out);
            for text in [&r.database, &r.address, &r.version] {
                put_bytes(out, text);
            }
            optional_bytes(r.system_identifier.as_deref(), out);
        }
        Record::Note(r) => {
            // No difference: a reader that does not know this kind and passes over it keeps its time.
            put(out, r.time_ns);
            put_bytes(out, &r.text);
        }
    }
}

/// Reads the fields of a record of a known kind.
/// Bytes behind the last known field are ignored: a later version may have added some.
pub(crate) fn decode<'a>(state: &mut State, kind: u8, fields: &'a [u8]) -> Result<Record<'a>, Malformed> {
    decode_fields(state, kind, Fields { rest: fields }).ok_or(Malformed)
}

/// A record whose fields do not fit its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Malformed;

fn decode_fields<'a>(state: &mut State, kind: u8, mut f: Fields<'a>) -> Option<Record<'a>> {
    Some(match kind {
        kind::SESSION_START => Record::SessionStart(decode_session_start(state, f)?),
        kind::FRONTEND => {
            let session = SessionId(f.u64()?);
            let time_ns = decode_time(state, &mut f)?;
            let expected = state.session(session);
            let offset = f.delta(expected.frontend)?;
            let redaction = decode_redaction(f.u64()?)?;
            let difference = f.delta(0)?;
            let message = f.all();
            let wire_len = (message.len() as u64).wrapping_add(difference);
            expected.frontend = offset.wrapping_add(wire_len);
            let message = Cow::Borrowed(message);
            Record::Frontend(Frontend { session, time_ns, offset, wire_len, redaction, message })
        }
        kind::RESPONSE => {
            let session = SessionId(f.u64()?);
            let last_ns = decode_time(state, &mut f)?;
            let first_ns = f.delta(last_ns)?;
            let expected = state.session(session);
            let request = f.delta(expected.frontend)?;
            let offset = f.delta(expected.backend)?;
            let len = f.u64()?;
            expected.backend = offset.wrapping_add(len);
            let rows = f.u64()?;
            let outcome = decode_outcome(&mut f)?;
            Record::Response(Response { session, request, offset, len, first_ns, last_ns, rows, outcome })
        }
        kind::READY => {
            let session = SessionId(f.u64()?);
            let time_ns = decode_time(state, &mut f)?;
            let expected = state.session(session);
            let request = f.delta(expected.frontend)?;
            let offset = f.delta(expected.backend)?;
            expected.backend = offset.wrapping_add(READY_FOR_QUERY_LEN);
            let status = TransactionStatus::decode(&[f.byte()?]).ok()?;
            Record::Ready(Ready { session, time_ns, request, offset, status })
        }
        kind::BACKEND => {
            let session = SessionId(f.u64()?);
            let time_ns = decode_time(state, &mut f)?;
            let expected = state.session(session);
            let offset = f.delta(expected.backend)?;
            let message = f.all();
            expected.backend = offset.wrapping_add(message.len() as u64);
            Record::Backend(Backend { session, time_ns, offset, message: Cow::Borrowed(message) })
        }
        kind::PARAMETER_STATUS => {
            let session = SessionId(f.u64()?);
            let time_ns = decode_time(state, &mut f)?;
            let (name, value) = (Cow::Borrowed(f.bytes()?), Cow::Borrowed(f.bytes()?));
            Record::ParameterStatus(ParameterStatus { session, time_ns, name, value })
        }
        kind::PREPARED_FILL => {
            let session = SessionId(f.u64()?);
            let time_ns = decode_time(state, &mut f)?;
            let (name, query) = (Cow::Borrowed(f.bytes()?), Cow::Borrowed(f.bytes()?));
            let count = f.u64()?;
            // Every type takes a byte at least: a count that lies costs no memory.
            if count > f.rest.len() as u64 {
                return None;
            }
            let param_types = (0..count).map(|_| f.u32()).collect::<Option<_>>()?;
            let redaction = decode_redaction(f.u64()?)?;
            Record::PreparedFill(PreparedFill { session, time_ns, name, query, param_types, redaction })
        }
        kind::CANCEL => {
            let time_ns = decode_time(state, &mut f)?;
            let session = decode_optional(&mut f)?.map(SessionId);
            Record::Cancel(Cancel { time_ns, session, backend_pid: f.u32()? })
        }
        kind::WITHHELD => {
            let session = SessionId(f.u64()?);
            let time_ns = decode_time(state, &mut f)?;
            let direction = decode_direction(f.byte()?)?;
            let (offset, len) = (f.u64()?, f.u64()?);
            skip(state.session(session), direction, offset, len);
            let reason = decode_withheld_reason(f.byte()?)?;
            Record::Withheld(Withheld { session, time_ns, direction, offset, len, reason })
        }
        kind::LOSS => {
            let session = decode_optional(&mut f)?.map(SessionId);
            let time_ns = decode_time(state, &mut f)?;
            let direction = decode_direction(f.byte()?)?;
            let (offset, len) = (f.u64()?, f.u64()?);
            if let Some(session) = session {
                skip(state.session(session), direction, offset, len);
            }
            let reason = decode_loss_reason(f.byte()?)?;
            Record::Loss(Loss { session, time_ns, direction, offset, len, reason })
        }
        kind::SESSION_END => {
            let session = SessionId(f.u64()?);
            let time_ns = decode_time(state, &mut f)?;
            let reason = decode_end_reason(f.byte()?);
            let (frontend, backend) = (decode_totals(&mut f)?, decode_totals(&mut f)?);
            state.expected.remove(&session.0);
            Record::SessionEnd(SessionEnd { session, time_ns, reason, frontend, backend })
        }
        kind::CLOCK => {
            let monotonic_ns = decode_time(state, &mut f)?;
            Record::Clock(Clock { monotonic_ns, realtime_ns: f.delta(0)? as i64 })
        }
        kind::COUNTERS => {
            let time_ns = decode_time(state, &mut f)?;
            let mut count = || Some(Count { events: f.u64()?, bytes: f.u64()? });
            let (seen, recorded, lost, filtered) = (count()?, count()?, count()?, count()?);
            Record::Counters(Counters { time_ns, seen, recorded, lost, filtered })
        }
        kind::SERVER => {
            let time_ns = decode_time(state, &mut f)?;
            let mut text = || f.bytes().map(Cow::Borrowed);
            let (database, address, version) = (text()?, text()?, text()?);
            let system_identifier = decode_optional_bytes(&mut f)?;
            Record::Server(ServerIdentity { time_ns, database, address, version, system_identifier })
        }
        kind::NOTE => {
            let time_ns = f.u64()?;
            Record::Note(Note { time_ns, text: Cow::Borrowed(f.bytes()?) })
        }
        _ => return None,
    })
}

/// Bytes of a ReadyForQuery on the wire.
const READY_FOR_QUERY_LEN: u64 = 6;

#[inline]
fn time(state: &mut State, time_ns: u64, out: &mut Vec<u8>) {
    put_delta(out, state.time_ns, time_ns);
    state.time_ns = time_ns;
}

#[inline]
fn decode_time(state: &mut State, fields: &mut Fields<'_>) -> Option<u64> {
    state.time_ns = fields.delta(state.time_ns)?;
    Some(state.time_ns)
}

/// Bytes that are not in the trace move the expected offset, if they were the next ones.
fn skip(expected: &mut Expected, direction: Direction, offset: u64, len: u64) {
    let next = match direction {
        Direction::Frontend => &mut expected.frontend,
        Direction::Backend => &mut expected.backend,
    };
    if *next == offset {
        *next = offset.wrapping_add(len);
    }
}

/// 0 for nothing, otherwise one more than the value, in 65 bits if need be: the flag is a field of its own.
fn optional(value: Option<u64>, out: &mut Vec<u8>) {
    out.push(value.is_some().into());
    if let Some(value) = value {
        put(out, value);
    }
}

fn decode_optional(fields: &mut Fields<'_>) -> Option<Option<u64>> {
    match fields.byte()? {
        0 => Some(None),
        1 => fields.u64().map(Some),
        _ => None,
    }
}

fn optional_bytes(value: Option<&[u8]>, out: &mut Vec<u8>) {
    out.push(value.is_some().into());
    if let Some(value) = value {
        put_bytes(out, value);
    }
}

fn decode_optional_bytes<'a>(fields: &mut Fields<'a>) -> Option<Option<Bytes<'a>>> {
    match fields.byte()? {
        0 => Some(None),
        1 => fields.bytes().map(|bytes| Some(Cow::Borrowed(bytes))),
        _ => None,
    }
}

fn session_start(state: &mut State, r: &SessionStart<'_>, out: &mut Vec<u8>) {
    put(out, r.session.0);
    time(state, r.time_ns, out);
    optional(r.ready_ns.map(|ready_ns| ready_ns.wrapping_sub(r.time_ns)), out);
    out.push(source(r.source));
    out.push(transport(r.transport));
    peer(r.peer, out);
    optional(r.backend_pid.map(u64::from), out);
    out.push(r.midstream.into());
    put(out, r.protocol_version.into());
    optional_bytes(r.database.as_deref(), out);
    optional_bytes(r.user.as_deref(), out);
    optional_bytes(r.application_name.as_deref(), out);
    put(out, r.parameters.len() as u64);
    for (name, value) in &r.parameters {
        put_bytes(out, name);
        put_bytes(out, value);
    }
    put(out, r.frontend_offset);
    put(out, r.backend_offset);
    *state.session(r.session) = Expected { frontend: r.frontend_offset, backend: r.backend_offset };
}

fn decode_session_start<'a>(state: &mut State, mut f: Fields<'a>) -> Option<SessionStart<'a>> {
    let session = SessionId(f.u64()?);
    let time_ns = decode_time(state, &mut f)?;
    let start = SessionStart {
        session,
        time_ns,
        ready_ns: decode_optional(&mut f)?.map(|after| time_ns.wrapping_add(after)),
        source: decode_source(f.byte()?)?,
        transport: decode_transport(f.byte()?)?,
        peer: decode_peer(&mut f)?,
        backend_pid: match decode_optional(&mut f)? {
            Some(pid) => Some(pid.try_into().ok()?),
            None => None,
        },
        midstream: f.byte()? != 0,
        protocol_version: f.u32()?,
        database: decode_optional_bytes(&mut f)?,
        user: decode_optional_bytes(&mut f)?,
        application_name: decode_optional_bytes(&mut f)?,
        parameters: {
            let count = f.u64()?;
            if count > f.rest.len() as u64 / 2 {
                return None;
            }
            let mut pair = || Some((Cow::Borrowed(f.bytes()?), Cow::Borrowed(f.bytes()?)));
            (0..count).map(|_| pair()).collect::<Option<_>>()?
        },
        frontend_offset: f.u64()?,
        backend_offset: f.u64()?,
    };
    *state.session(session) = Expected { frontend: start.frontend_offset, backend: start.backend_offset };
    Some(start)
}

/// The length of the address (0, 4, 16), the address, the port.
fn peer(peer: Option<SocketAddr>, out: &mut Vec<u8>) {
    match peer.map(|peer| peer.ip()) {
        None => return out.push(0),
        Some(IpAddr::V4(ip)) => put_bytes(out, &ip.octets()),
        Some(IpAddr::V6(ip)) => put_bytes(out, &ip.octets()),
    }
    put(out, peer.map_or(0, |peer| peer.port().into()));
}

fn decode_peer(fields: &mut Fields<'_>) -> Option<Option<SocketAddr>> {
    let address = fields.bytes()?;
    let ip = match address.len() {
        0 => return Some(None),
        4 => IpAddr::from(<[u8; 4]>::try_from(address).ok()?),
        16 => IpAddr::from(<[u8; 16]>::try_from(address).ok()?),
        _ => return None,
    };
    Some(Some(SocketAddr::new(ip, fields.u64()?.try_into().ok()?)))
}

fn outcome(outcome: &Outcome<'_>, out: &mut Vec<u8>) {
    match outcome {
        Outcome::Unknown => out.push(0),
        Outcome::Complete { tag } => {
            out.push(1);
            put_bytes(out, tag);
        }
        Outcome::Empty => out.push(2),
        Outcome::Suspended => out.push(3),
        Outcome::Error(error) => {
            out.push(4);
            out.extend_from_slice(&error.sqlstate);
            out.push(error.fatal.into());
            put_bytes(out, &error.message);
        }
    }
}

fn decode_outcome<'a>(fields: &mut Fields<'a>) -> Option<Outcome<'a>> {
    Some(match fields.byte()? {
        0 => Outcome::Unknown,
        1 => Outcome::Complete { tag: Cow::Borrowed(fields.bytes()?) },
        2 => Outcome::Empty,
        3 => Outcome::Suspended,
        4 => Outcome::Error(ErrorOutcome {
            sqlstate: fields.take(5)?.try_into().ok()?,
            fatal: fields.byte()? != 0,
            message: Cow::Borrowed(fields.bytes()?),
        }),
        _ => return None,
    })
}

fn totals(totals: &ByteTotals, out: &mut Vec<u8>) {
    for bytes in [totals.seen, totals.recorded, totals.lost, totals.withheld] {
        put(out, bytes);
    }
    optional(totals.audited, out);
}

fn decode_totals(f: &mut Fields<'_>) -> Option<ByteTotals> {
    let (seen, recorded, lost, withheld) = (f.u64()?, f.u64()?, f.u64()?, f.u64()?);
    Some(ByteTotals { seen, recorded, lost, withheld, audited: decode_optional(f)? })
}

/// The numbers of an enumeration: once for both ways.
macro_rules! numbered {
    ($encode:ident, $decode:ident, $type:ident, $out:ty, $($variant:ident = $number:literal),*) => {
        const fn $encode(value: $type) -> $out {
            match value { $($type::$variant => $number,)* }
        }
        const fn $decode(number: $out) -> Option<$type> {
            match number { $($number => Some($type::$variant),)* _ => None }
        }
    };
}

numbered!(direction, decode_direction, Direction, u8, Frontend = 0, Backend = 1);
numbered!(redaction, decode_redaction, Redaction, u64, None = 0, Password = 1, Masked = 2);
numbered!(
    source,
    decode_source,
    Source,
    u8,
    CgroupSkb = 0,
    Uprobe = 1,
    Pooler = 2,
    Import = 3,
    Synthetic = 4
);
numbered!(transport, decode_transport, Transport, u8, Tcp = 0, Tls = 1, Gss = 2, Unix = 3, Unknown = 4);
numbered!(
    withheld_reason,
    decode_withheld_reason,
    WithheldReason,
    u8,
    Authentication = 0,
    Filter = 1,
    Replication = 2,
    Incomplete = 3,
    Masking = 4
);
numbered!(
    loss_reason,
    decode_loss_reason,
    LossReason,
    u8,
    RingFull = 0,
    Fault = 1,
    Gap = 2,
    WriterQueue = 3,
    Resync = 4,
    Protocol = 5,
    Audit = 6
);
numbered!(
    end_reason,
    known_end_reason,
    EndReason,
    u8,
    Terminate = 0,
    ClientClosed = 1,
    ServerClosed = 2,
    Reset = 3,
    RecordingEnded = 4,
    Unknown = 255
);

/// A later version may know more reasons.
const fn decode_end_reason(number: u8) -> EndReason {
    match known_end_reason(number) {
        Some(reason) => reason,
        None => EndReason::Unknown,
    }
}
