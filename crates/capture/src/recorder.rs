// SPDX-License-Identifier: Apache-2.0
//! From events to records: finds the connection of each event, puts its streams together, and lets the protocol's machine read them.
//!
//! * A connection over TCP is known by its ends, a probed one by its process or, where a process serves many, its number.
//! * A connection to MariaDB or MySQL that turns to TLS says first in plain text what its server is: the packets show the beginning, and
//!   the probes go on with it.
//! * What a closed socket is still sent was never received, and opens no session. It may stand behind the close: one CPU closes the
//!   socket while another has the packet in the hook. Or it comes to the socket that listens, and TCP answers with RST.
//! * Texts that PostgreSQL's backends report come through another ring than the messages they belong to. They are kept until every ring has
//!   been read once more, so that the message is known before its text. Those of MariaDB and MySQL come between the command and its answer.

use std::net::SocketAddr;

use foldhash::{HashMap, HashMapExt as _, HashSet};
use underpass_trace::assemble::{
    Assemble, Audit, Known, Order, Origin, Piece, Reassembly, Segment, Sink, machine,
};
use underpass_trace::{
    Cancel, Direction, EndReason, Level, LossReason, Protocol, Record, SessionEnd, SessionId, Source,
    Transport,
};

use crate::event::{Ends, Event, ProbedId, TcpFlags};

/// A connection of which nothing is recorded is forgotten after so long without a byte, nanoseconds.
const UNUSED_NS: u64 = 60_000_000_000;
/// The same while there are more connections than `CROWD`: a flood of SYNs, most likely.
const UNUSED_CROWDED_NS: u64 = 5_000_000_000;
const CROWD: usize = 50_000;
/// How long a cancel request still finds the session of a process that has ended, nanoseconds: it may be in another ring.
const ENDED_NS: u64 = 5_000_000_000;
/// How long it is remembered which socket was closed, nanoseconds: much longer than a packet is in a hook.
const CLOSED_NS: u64 = 5_000_000_000;

/// How long the first words of a connection that turned to encryption are waited for, nanoseconds: twice PostgreSQL's default of
/// `authentication_timeout`.
const TURNED_NS: u64 = 120_000_000_000;

/// Knows about sessions that began before the capture.
pub trait Lookup {
    /// Of a TCP connection.
    fn connection(&mut self, ends: &Ends) -> Known;
    /// Of a backend.
    fn process(&mut self, pid: u32) -> Known;
}

/// What the recorder has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Sessions in the trace.
    pub sessions: u64,
    /// Of them, joined while under way.
    pub midstream: u64,
    /// Sessions that ended.
    pub ended: u64,
    /// Of these, with byte accounts that agree with the kernel's in both directions.
    pub audited: u64,
    /// Of these, with accounts that do not add up.
    pub wrong: u64,
    /// Connections that turned to encryption: the packets do not show them.
    pub encrypted: u64,
    /// Connections that use what is not supported; the last reason is [`Recorder::refused`].
    pub refused: u64,
    /// Connections that were under way, said something, and were never understood: their boundary between messages did not show.
    pub not_understood: u64,
    /// Messages of clients.
    pub messages: u64,
    /// ReadyForQuery of servers.
    pub answered: u64,
    /// Bytes in loss records.
    pub lost_bytes: u64,
    /// Loss records.
    pub losses: u64,
}

/// A protocol's machine.
type Machine = Box<dyn Assemble + Send>;

struct Connection {
    /// Of its socket, once a packet has come to that; 0 before.
    cookie: u64,
    front: Reassembly,
    back: Reassembly,
    session: Machine,
    /// The handshake was seen: both streams are known from their first byte.
    whole: bool,
    front_fin: bool,
    back_fin: bool,
    reset: bool,
    encrypted: bool,
    last_ns: u64,
    /// Who said the first bytes, and the first two of them.
    said: Option<(Direction, [u8; 2])>,
}

struct Probed {
    session: Machine,
    /// Where its events are.
    ring: usize,
    /// Positions reached, since the probes saw it first.
    front: u64,
    back: u64,
    /// What went by packets before, before TLS began.
    before: (u64, u64),
    /// Neither the probes nor the packets had it before: if it turns out to have been under way, what it said next may be missing.
    is_first: bool,
}

/// Counts, and sessions by the process that serves them, for cancel requests.
#[derive(Debug, Default)]
struct Ledger {
    totals: Totals,
    by_pid: HashMap<u32, SessionId>,
    /// Of them, those that have ended, and when.
    ended: Vec<(u64, SessionId)>,
    /// Cancel requests whose session may begin in a ring that is yet to be read: those of this round, and of the one before.
    early: [Vec<Cancel>; 2],
    /// Why a connection could not be read.
    refused: Option<&'static str>,
    /// The first connection that was not understood: its client, and what it began with.
    not_understood: Option<(SocketAddr, String)>,
    /// The programs have counted losses in their rings: holes are explained.
    ring_was_full: bool,
    /// Connections that turned to encryption: until the probes are known to have been there, or to have its session from the first byte.
    turned: Vec<Turned>,
    /// Of those that neither was known of in time, how many.
    unseen: u64,
    /// Probed sessions that were under way, and whose first words were not seen.
    waited: u64,
}

/// A connection that turned to encryption.
#[derive(Clone, Copy, Debug)]
struct Turned {
    client: SocketAddr,
    time_ns: u64,
    /// It was seen from its handshake on. Another one may have turned long before, and it was noticed only by what its bytes look like.
    whole: bool,
}

impl Ledger {
    /// Forgets the sessions that have ended a while ago.
    fn forget(&mut self, now_ns: u64) {
        let is_old = |&mut (ended_ns, _): &mut (u64, SessionId)| now_ns.saturating_sub(ended_ns) >= ENDED_NS;
        let old: HashSet<SessionId> = self.ended.extract_if(.., is_old).map(|(_, session)| session).collect();
        if !old.is_empty() {
            self.by_pid.retain(|_, session| !old.contains(session));
        }
    }

    /// `under_way`: what a probed session has said so far, or all it will have said, does not begin it.
    fn hear(&mut self, probed: &mut Probed, under_way: bool) {
        if probed.is_first && under_way {
            probed.is_first = false;
            self.waited += 1;
        }
    }

    /// A session by the probes has its first byte, or all that is part of the recording: so has what its connection says behind the turn to
    /// encryption.
    fn seen_from_its_start(&mut self, client: SocketAddr) {
        // Another one may have had this port before.
        if let Some(at) = self.turned.iter().rposition(|turned| turned.client == client) {
            self.turned.remove(at);
        }
    }

    /// A connection ends, or its recording does.
    fn note(&mut self, client: SocketAddr, connection: &Connection) {
        if let Some(why) = connection.session.refused() {
            self.totals.refused += 1;
            self.refused = Some(why);
        } else if connection.is_not_understood() {
            self.totals.not_understood += 1;
            self.not_understood.get_or_insert_with(|| (client, connection.beginning()));
        }
    }
}

/// Passes records on and counts them.
struct Counting<'a> {
    sink: &'a mut dyn Sink,
    ledger: &'a mut Ledger,
}

impl Sink for Counting<'_> {
    fn record(&mut self, record: Record<'_>) {
        let totals = &mut self.ledger.totals;
        match record {
            Record::SessionStart(ref start) => {
                totals.sessions += 1;
                totals.midstream += u64::from(start.midstream);
                if let Some(pid) = start.backend_pid {
                    self.ledger.by_pid.insert(pid, start.session);
                }
                if let (Source::Uprobe, false, Some(client)) = (start.source, start.midstream, start.peer) {
                    self.ledger.seen_from_its_start(client);
                }
            }
            Record::Frontend(_) => totals.messages += 1,
            Record::Ready(_) => totals.answered += 1,
            Record::Loss(mut loss) => {
                totals.losses += 1;
                totals.lost_bytes += loss.len;
                if loss.reason == LossReason::Gap && self.ledger.ring_was_full {
                    loss.reason = LossReason::RingFull;
                }
                return self.sink.record(Record::Loss(loss));
            }
            Record::SessionEnd(SessionEnd { session, time_ns, frontend, backend, .. }) => {
                totals.ended += 1;
                self.ledger.ended.push((time_ns, session));
                let agrees = frontend.add_up() && backend.add_up();
                totals.wrong += u64::from(!agrees);
                let audited = frontend.audited.is_some() && backend.audited.is_some();
                totals.audited += u64::from(agrees && audited);
            }
            Record::Cancel(cancel) => {
                let Some(&session) = self.ledger.by_pid.get(&cancel.backend_pid) else {
                    return self.ledger.early[0].push(cancel);
                };
                return self.sink.record(Record::Cancel(Cancel { session: Some(session), ..cancel }));
            }
            _ => {}
        }
        self.sink.record(record);
    }
}

/// Turns events into records.
pub struct Recorder {
    protocol: Protocol,
    level: Level,
    next: u64,
    connections: HashMap<Ends, Connection>,
    /// Sockets that were closed of late, by cookie, and when.
    closed: HashMap<u64, u64>,
    probed: HashMap<ProbedId, Probed>,
    ledger: Ledger,
    texts: Vec<Text>,
    /// Of texts that have not come whole yet, by session.
    pieces: HashMap<(ProbedId, Option<Ends>), Vec<u8>>,
    /// Those that came in this round.
    later: Vec<Text>,
    lookup: Box<dyn Lookup>,
    wants_texts: bool,
    /// How a probed connection over TCP travels: by TLS, when what is not encrypted is left to the packets.
    probed_tcp: Transport,
    /// The client's end of a connection that is no part of the workload.
    ignored: Option<SocketAddr>,
    /// When the recording begins.
    begins_ns: u64,
}

/// What a backend said it runs.
struct Text {
    time_ns: u64,
    pid: u32,
    text: Vec<u8>,
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recorder").field("ledger", &self.ledger).finish_non_exhaustive()
    }
}

impl Recorder {
    /// Nothing seen yet.
    pub fn new(protocol: Protocol, level: Level, lookup: Box<dyn Lookup>) -> Self {
        Self {
            protocol,
            level,
            next: 1,
            connections: HashMap::new(),
            closed: HashMap::new(),
            probed: HashMap::new(),
            ledger: Ledger::default(),
            texts: Vec::new(),
            pieces: HashMap::new(),
            later: Vec::new(),
            lookup,
            wants_texts: false,
            ignored: None,
            begins_ns: 0,
            probed_tcp: Transport::Tls,
        }
    }

    /// No packets are recorded: a connection over TCP comes from the probes, encrypted or not.
    pub fn without_packets(&mut self) {
        self.probed_tcp = Transport::Unknown;
    }

    /// The recording begins at this time: what the programs saw before is no part of it, be it in the rings still. `u64::MAX`: not yet.
    pub fn begins(&mut self, at_ns: u64) {
        self.begins_ns = at_ns;
    }

    /// The connection of this client, which is open or has just been, is our own.
    pub fn ignore(&mut self, client: SocketAddr) {
        self.ignored = Some(client);
    }

    /// Whether an event is of the ignored connection. Its port may be given to others once it is closed.
    fn is_ignored(&mut self, event: &Event<'_>) -> bool {
        let ends = match event {
            Event::Packet { ends, .. } | Event::Encrypted { ends, .. } | Event::Close { ends, .. } => ends,
            _ => return false,
        };
        let ignored = self.ignored == Some(ends.remote);
        if ignored && matches!(event, Event::Close { .. }) {
            self.ignored = None;
        }
        ignored
    }

    /// What was counted so far.
    pub fn totals(&self) -> Totals {
        self.ledger.totals
    }

    /// Why connections were not recorded, if some could not be read.
    pub fn refused(&self) -> Option<&'static str> {
        self.ledger.refused
    }

    /// The client of the first connection that was not understood, and what the connection began with.
    pub fn not_understood(&self) -> Option<&(SocketAddr, String)> {
        self.ledger.not_understood.as_ref()
    }

    /// Whether sessions use statements that were prepared before the capture: their texts can be had from
    /// [`Kernel::attach_activity`](crate::Kernel::attach_activity). Known since the last [`Self::tick`].
    pub fn wants_texts(&self) -> bool {
        self.wants_texts
    }

    /// Who knows about sessions has changed: the server was started again.
    pub fn set_lookup(&mut self, lookup: Box<dyn Lookup>) {
        self.lookup = lookup;
    }

    /// The programs lost events because a ring was full: holes from now on are called so.
    pub fn ring_was_full(&mut self) {
        self.ledger.ring_was_full = true;
    }

    /// The probes were attached, and knew the server, between these times: of connections that turned to encryption meanwhile they have all
    /// that is part of the recording.
    pub fn probed(&mut self, from_ns: u64, to_ns: u64) {
        let begins_ns = self.begins_ns;
        self.ledger.turned.retain(|turned| {
            let is_certain = turned.whole || turned.time_ns < begins_ns;
            !(is_certain && (from_ns..=to_ns).contains(&turned.time_ns))
        });
    }

    /// Probed sessions that were under way when the probes came, and of which they have not had the beginning of what was said next: a server
    /// that waits for its client waits inside the probed function, and what ends a call tells nothing without what began it.
    pub fn waited(&self) -> u64 {
        self.ledger.waited
    }

    /// Connections that turned to encryption when the probes may not have been there, and of which no session has the first byte: their
    /// beginning is missing, or all.
    pub fn unseen(&self) -> u64 {
        self.ledger.unseen + self.ledger.turned.len() as u64
    }

    /// Takes one event, of the ring with this number.
    pub fn event(&mut self, ring: usize, event: Event<'_>, sink: &mut dyn Sink) {
        if self.ignored.is_some() && self.is_ignored(&event) {
            return;
        }
        match event {
            Event::Packet {
                time_ns,
                cookie,
                ends,
                direction,
                seq,
                ack,
                flags,
                skipped,
                listens,
                payload,
            } => {
                let segment = Segment { seq, skipped, bytes: payload, time_ns };
                if !self.closed.contains_key(&cookie) {
                    let own_cookie = if listens { 0 } else { cookie };
                    self.packet(ends, own_cookie, direction, ack, flags, segment, sink);
                }
            }
            Event::Encrypted { time_ns, ends } => {
                self.ledger.totals.encrypted += 1;
                let whole = self.connections.get(&ends).is_some_and(|connection| connection.whole);
                self.ledger.turned.push(Turned { client: ends.remote, time_ns, whole });
                // One that was under way is not known before it says something, and this comes before what it says.
                if !self.connections.contains_key(&ends) {
                    self.connect(ends, false).last_ns = time_ns;
                }
                if let Some(connection) = self.connections.get_mut(&ends) {
                    connection.encrypted = true;
                }
            }
            Event::Close {
                time_ns,
                cookie,
                ends,
                rcv_nxt,
                snd_nxt,
                fin_received,
                fin_sent,
                bytes_received,
                ..
            } => {
                if cookie != 0 {
                    self.closed.insert(cookie, time_ns);
                } else if self.connections.get(&ends).is_some_and(|connection| connection.cookie != 0) {
                    // Another socket, which has lost the race for the connection: this one has been asked for its cookie.
                    return;
                }
                if time_ns < self.begins_ns {
                    self.ledger.seen_from_its_start(ends.remote);
                }
                self.pieces.retain(|(_, of), _| *of != Some(ends));
                if let Some(mut connection) = self.connections.remove(&ends) {
                    // The packets that said so may have been lost.
                    (connection.front_fin, connection.back_fin) = (fin_received, fin_sent);
                    self.ledger.note(ends.remote, &connection);
                    let mut counting = Counting { sink, ledger: &mut self.ledger };
                    connection.close(time_ns, rcv_nxt, snd_nxt, bytes_received, &mut counting);
                }
            }
            Event::Call { time_ns, session, decrypted, ends, direction, offset, skipped, payload } => {
                let at = offset.saturating_sub(skipped.into());
                if !self.probed.contains_key(&session) {
                    let is_first = at == 0 && time_ns >= self.begins_ns && !self.greets(direction, payload);
                    self.join_probed(session, ring, ends, decrypted, is_first);
                }
                let Some(known) = self.probed.get_mut(&session) else { return };
                let joined = self.ledger.totals.midstream;
                let mut counting = Counting { sink, ledger: &mut self.ledger };
                known.call(time_ns, direction, at, skipped.into(), payload, &mut counting);
                let is_joined = self.ledger.totals.midstream > joined;
                self.ledger.hear(known, is_joined);
            }
            Event::Exit { time_ns, session, bytes_read, bytes_written } => {
                self.pieces.retain(|(teller, _), _| *teller != session);
                if let Some(mut ended) = self.probed.remove(&session) {
                    let is_joining = ended.session.is_joining();
                    self.ledger.hear(&mut ended, is_joining);
                    let mut counting = Counting { sink, ledger: &mut self.ledger };
                    ended.end(
                        time_ns,
                        EndReason::ServerClosed,
                        Some((bytes_read, bytes_written)),
                        &mut counting,
                    );
                }
            }
            Event::ProcessExit { time_ns, pid } => {
                // What its other sessions still said may wait in their rings, behind which the same event stands.
                let ended =
                    |session: &ProbedId, probed: &mut Probed| session.pid == pid && probed.ring == ring;
                for (_, mut ended) in self.probed.extract_if(ended) {
                    let is_joining = ended.session.is_joining();
                    self.ledger.hear(&mut ended, is_joining);
                    let mut counting = Counting { sink, ledger: &mut self.ledger };
                    ended.end(time_ns, EndReason::ServerClosed, None, &mut counting);
                }
            }
            Event::Activity { time_ns, session, ends, offset, whole, text } => {
                let teller = (session, ends);
                let mut said = self.pieces.remove(&teller).filter(|_| offset > 0).unwrap_or_default();
                if said.len() as u64 != offset {
                    // The ring was full in between.
                    return;
                }
                said.extend_from_slice(text);
                if (said.len() as u64) < whole {
                    self.pieces.insert(teller, said);
                } else if self.protocol == Protocol::Postgres {
                    self.later.push(Text { time_ns, pid: session.pid, text: said });
                } else {
                    self.text(time_ns, session, ends, &said, sink);
                }
            }
        }
    }

    /// A session of MariaDB's or MySQL's begins to run this, a statement that it has prepared.
    fn text(&mut self, time_ns: u64, id: ProbedId, ends: Option<Ends>, text: &[u8], sink: &mut dyn Sink) {
        let session = match (self.probed.get_mut(&id), ends) {
            (Some(probed), _) => Some(&mut probed.session),
            (None, Some(ends)) => self.connections.get_mut(&ends).map(|connection| &mut connection.session),
            (None, None) => None,
        };
        if let Some(session) = session.filter(|session| session.wants_texts(time_ns)) {
            session.text(time_ns, text, &mut Counting { sink, ledger: &mut self.ledger });
        }
    }

    /// All rings have been read once since the last call.
    pub fn round(&mut self, sink: &mut dyn Sink) {
        let [now, before] = &mut self.ledger.early;
        for cancel in std::mem::replace(before, std::mem::take(now)) {
            let session = self.ledger.by_pid.get(&cancel.backend_pid).copied();
            sink.record(Record::Cancel(Cancel { session, ..cancel }));
        }
        let texts = std::mem::replace(&mut self.texts, std::mem::take(&mut self.later));
        let mut counting = Counting { sink, ledger: &mut self.ledger };
        for Text { time_ns, pid, text } in texts {
            let connections = self.connections.values_mut().map(|c| &mut c.session);
            let processes = self.probed.values_mut().map(|p| &mut p.session);
            for session in connections.chain(processes) {
                if session.wants_texts(time_ns) && session.backend_pid() == Some(pid) {
                    session.text(time_ns, &text, &mut counting);
                }
            }
        }
    }

    /// To be called a few times a second: gives up holes that nobody fills, forgets what is not used.
    pub fn tick(&mut self, now_ns: u64, sink: &mut dyn Sink) {
        let mut counting = Counting { sink, ledger: &mut self.ledger };
        for connection in self.connections.values_mut() {
            let session = &mut connection.session;
            connection.front.tick(now_ns, &mut |time_ns, piece| {
                session.piece(Direction::Frontend, time_ns, piece, &mut counting);
            });
        }
        self.wants_texts = self.connections.values().any(|c| c.session.wants_texts(now_ns))
            || self.probed.values().any(|p| p.session.wants_texts(now_ns));
        if !self.wants_texts {
            self.pieces.clear();
        }
        self.closed.retain(|_, &mut closed_ns| now_ns.saturating_sub(closed_ns) < CLOSED_NS);
        self.ledger.forget(now_ns);
        let turned = self.ledger.turned.len();
        self.ledger.turned.retain(|turned| now_ns.saturating_sub(turned.time_ns) < TURNED_NS);
        self.ledger.unseen += (turned - self.ledger.turned.len()) as u64;
        let unused_ns = if self.connections.len() > CROWD { UNUSED_CROWDED_NS } else { UNUSED_NS };
        let ledger = &mut self.ledger;
        self.connections.retain(|ends, connection| {
            let is_kept =
                connection.session.has_records() || now_ns.saturating_sub(connection.last_ns) < unused_ns;
            if !is_kept {
                ledger.note(ends.remote, connection);
            }
            is_kept
        });
    }

    /// The capture ends; sessions go on.
    pub fn finish(&mut self, now_ns: u64, sink: &mut dyn Sink) {
        self.round(sink);
        self.round(sink);
        let mut counting = Counting { sink, ledger: &mut self.ledger };
        for (ends, mut connection) in self.connections.drain() {
            counting.ledger.note(ends.remote, &connection);
            connection.settle(now_ns, &mut counting);
            connection.session.end(now_ns, EndReason::RecordingEnded, Audit::default(), &mut counting);
        }
        for (_, mut probed) in self.probed.drain() {
            let is_joining = probed.session.is_joining();
            counting.ledger.hear(&mut probed, is_joining);
            probed.end(now_ns, EndReason::RecordingEnded, None, &mut counting);
        }
    }

    fn origin(&mut self, source: Source, transport: Transport, peer: Option<SocketAddr>) -> Origin {
        let session = SessionId(self.next);
        self.next += 1;
        Origin { session, source, transport, peer, level: self.level }
    }

    /// A connection that was not known; `whole`: from its first byte.
    fn connect(&mut self, ends: Ends, whole: bool) -> &mut Connection {
        let origin = self.origin(Source::CgroupSkb, Transport::Tcp, Some(ends.remote));
        let mut session = machine(self.protocol, origin);
        if !whole {
            session.joined(self.lookup.connection(&ends));
        }
        self.connections.entry(ends).insert_entry(Connection::new(session, whole)).into_mut()
    }

    /// `cookie`: of the connection's own socket; 0 when the segment came to the one that listens.
    #[expect(clippy::too_many_arguments, reason = "a segment has so many parts")]
    fn packet(
        &mut self,
        ends: Ends,
        cookie: u64,
        direction: Direction,
        ack: u32,
        flags: TcpFlags,
        segment: Segment<'_>,
        sink: &mut dyn Sink,
    ) {
        let begins = flags.syn && direction == Direction::Frontend;
        if begins && let Some(mut old) = self.connections.remove(&ends) {
            // Its end was not seen.
            let mut counting = Counting { sink, ledger: &mut self.ledger };
            old.settle(segment.time_ns, &mut counting);
            old.session.end(segment.time_ns, EndReason::Unknown, Audit::default(), &mut counting);
        }
        if !self.connections.contains_key(&ends) {
            // Without a handshake TCP has refused what came to the socket that listens: it is late, of before a restart, or forged.
            // With one it may have overtaken the handshake's last packet.
            if !begins && (segment.bytes.is_empty() || cookie == 0) {
                return;
            }
            self.connect(ends, begins);
        }
        let Some(connection) = self.connections.get_mut(&ends) else { return };
        if connection.cookie == 0 {
            connection.cookie = cookie;
        }
        let mut counting = Counting { sink, ledger: &mut self.ledger };
        connection.packet(direction, ack, flags, segment, &mut counting);
    }

    /// Whether a server says this to a client that has just come: MariaDB and MySQL speak first, and whom they refuse never speaks.
    fn greets(&self, direction: Direction, payload: &[u8]) -> bool {
        // The number of the packet, which counts from the client's command on.
        self.protocol == Protocol::Mysql && direction == Direction::Backend && payload.get(3) == Some(&0)
    }

    /// Whether a probed session that is not known from its first byte is one of those that turned to encryption, and counts as such.
    fn is_turned(&self, client: SocketAddr) -> bool {
        let is_left_to_packets = self.probed_tcp == Transport::Tls;
        // PostgreSQL's are probed because the packets have told of them.
        let is_told = self.protocol == Protocol::Postgres
            || self.ledger.turned.iter().any(|turned| turned.client == client);
        is_left_to_packets && is_told
    }

    /// `is_first`: the probes may have had nothing of it before.
    fn join_probed(
        &mut self,
        id: ProbedId,
        ring: usize,
        ends: Option<Ends>,
        decrypted: bool,
        is_first: bool,
    ) {
        let transport = match ends {
            _ if decrypted => Transport::Tls,
            Some(_) => self.probed_tcp,
            None => Transport::Unix,
        };
        let begun = ends.filter(|_| decrypted).and_then(|ends| {
            let connection = self.connections.get_mut(&ends)?;
            connection.session.decrypted(Source::Uprobe, transport).then(|| self.connections.remove(&ends))?
        });
        let probed = match begun {
            Some(Connection { front, back, session, .. }) => {
                let before = (front.position(), back.position());
                Probed { session, ring, front: 0, back: 0, before, is_first: false }
            }
            None => {
                let origin = self.origin(Source::Uprobe, transport, ends.map(|ends| ends.remote));
                let mut session = machine(self.protocol, origin);
                session.joined(self.lookup.process(id.pid));
                let client = ends.map(|ends| ends.remote);
                if let Some(client) = client.filter(|_| !is_first) {
                    // It spoke before the recording began, through probes that were there: they have all that is part of it.
                    self.ledger.seen_from_its_start(client);
                }
                let is_first = is_first && !client.is_some_and(|client| self.is_turned(client));
                Probed { session, ring, front: 0, back: 0, before: (0, 0), is_first }
            }
        };
        self.probed.insert(id, probed);
    }
}

impl Connection {
    fn new(session: Machine, whole: bool) -> Self {
        Self {
            cookie: 0,
            front: Reassembly::new(Order::Received),
            back: Reassembly::new(Order::Sent),
            session,
            whole,
            front_fin: false,
            back_fin: false,
            reset: false,
            encrypted: false,
            last_ns: 0,
            said: None,
        }
    }

    fn packet(
        &mut self,
        direction: Direction,
        ack: u32,
        flags: TcpFlags,
        segment: Segment<'_>,
        sink: &mut dyn Sink,
    ) {
        let time_ns = segment.time_ns;
        self.last_ns = time_ns;
        self.reset |= flags.rst;
        if let (None, [first, rest @ ..]) = (self.said, segment.bytes) {
            self.said = Some((direction, [*first, rest.first().copied().unwrap_or(0)]));
        }
        let session = &mut self.session;
        match direction {
            Direction::Frontend => {
                self.front_fin |= flags.fin;
                if flags.syn {
                    self.front.start(segment.seq.wrapping_add(1));
                }
                if segment.bytes.is_empty() {
                    return;
                }
                if self.whole && !self.back.started() {
                    // The client has had nothing from the server before its first packet.
                    self.back.start(ack);
                }
                // A FIN counts as one byte in an acknowledgement.
                if !self.back_fin {
                    self.back.acknowledged(ack, time_ns, &mut |time_ns, piece| {
                        session.piece(Direction::Backend, time_ns, piece, sink);
                    });
                }
                self.front.segment(segment, &mut |time_ns, piece| {
                    session.piece(Direction::Frontend, time_ns, piece, sink);
                });
            }
            Direction::Backend => {
                self.back_fin |= flags.fin;
                if segment.bytes.is_empty() {
                    return;
                }
                if !self.front_fin {
                    self.front.acknowledged(ack, time_ns, &mut |time_ns, piece| {
                        session.piece(Direction::Frontend, time_ns, piece, sink);
                    });
                }
                self.back.segment(segment, &mut |time_ns, piece| {
                    session.piece(Direction::Backend, time_ns, piece, sink);
                });
            }
        }
    }

    /// What its first bytes were, in words: a kind, and nothing of what they say.
    fn beginning(&self) -> String {
        let Some((direction, bytes)) = self.said else { return "nothing".into() };
        let who = match direction {
            Direction::Frontend => "client",
            Direction::Backend => "server",
        };
        match bytes {
            [0x14..=0x17, 3] => format!("a TLS record of the {who}'s"),
            [tag, _] if tag.is_ascii_alphabetic() => {
                format!("the letter {} of the {who}'s", char::from(tag))
            }
            [byte, _] => format!("the byte {byte:#04x} of the {who}'s"),
        }
    }

    /// Whether bytes of it went by that are in no session. One that was seen from its first packet is what it is: no client of this protocol.
    fn is_not_understood(&self) -> bool {
        let has_said = self.front.position() > 0 || self.back.position() > 0;
        has_said && !self.whole && !self.encrypted && self.session.is_joining()
    }

    /// What is held back will not be completed any more.
    fn settle(&mut self, time_ns: u64, sink: &mut dyn Sink) {
        let session = &mut self.session;
        self.front.finish(time_ns, &mut |time_ns, piece| {
            session.piece(Direction::Frontend, time_ns, piece, sink);
        });
    }

    fn close(mut self, time_ns: u64, rcv_nxt: u32, snd_nxt: u32, bytes_received: u64, sink: &mut dyn Sink) {
        self.settle(time_ns, sink);
        // A FIN counts as one byte in sequence numbers, and in bytes_received, which grows by what rcv_nxt grows.
        let without = |fin: bool, position: u64| position.saturating_sub(fin.into());
        let received = if self.whole { Some(bytes_received) } else { self.front.position_of(rcv_nxt) };
        let received = received.map(|position| without(self.front_fin, position));
        let sent = self.back.position_of(snd_nxt).map(|position| without(self.back_fin, position));
        let audit = if self.encrypted {
            Audit::default()
        } else {
            Audit {
                // TCP refuses what comes after the server has closed: that was seen, and never received.
                frontend: received.filter(|&received| received >= self.front.position()),
                backend: sent,
                is_own: false,
            }
        };
        let reason = match (self.reset, self.front_fin) {
            (true, _) => EndReason::Reset,
            (_, true) => EndReason::ClientClosed,
            _ => EndReason::ServerClosed,
        };
        self.session.end(time_ns, reason, audit, sink);
    }
}

impl Probed {
    fn call(
        &mut self,
        time_ns: u64,
        direction: Direction,
        at: u64,
        skipped: u64,
        payload: &[u8],
        sink: &mut dyn Sink,
    ) {
        let next = match direction {
            Direction::Frontend => &mut self.front,
            Direction::Backend => &mut self.back,
        };
        let lost = at.saturating_sub(*next);
        *next = at + skipped + payload.len() as u64;
        for piece in [Piece::Lost(lost, LossReason::Gap), Piece::Skipped(skipped), Piece::Bytes(payload)] {
            self.session.piece(direction, time_ns, piece, sink);
        }
    }

    /// It is over, or its recording is; the totals are what the probes counted.
    fn end(mut self, time_ns: u64, reason: EndReason, totals: Option<(u64, u64)>, sink: &mut dyn Sink) {
        let audit = Audit {
            frontend: totals.map(|(read, _)| self.before.0 + read),
            backend: totals.map(|(_, written)| self.before.1 + written),
            is_own: true,
        };
        self.session.end(time_ns, reason, audit, sink);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Cancels(Vec<Option<SessionId>>);

    impl Sink for Cancels {
        fn record(&mut self, record: Record<'_>) {
            if let Record::Cancel(cancel) = record {
                self.0.push(cancel.session);
            }
        }
    }

    struct Nobody;

    impl Lookup for Nobody {
        fn connection(&mut self, _: &Ends) -> Known {
            Known::default()
        }
        fn process(&mut self, _: u32) -> Known {
            Known::default()
        }
    }

    /// While the recorder did not run, a session began, in a ring that is read last, and was cancelled, in one that is read first.
    #[test]
    fn a_cancel_request_may_be_seen_before_its_session() {
        let mut recorder = Recorder::new(Protocol::Postgres, Level::Full, Box::new(Nobody));
        let mut seen = Cancels::default();
        for backend_pid in [7, 8] {
            let cancel = Cancel { time_ns: 1, session: None, backend_pid };
            Counting { sink: &mut seen, ledger: &mut recorder.ledger }.record(Record::Cancel(cancel));
        }
        recorder.round(&mut seen);
        assert!(seen.0.is_empty(), "the other ring is read in the next round");
        recorder.ledger.by_pid.insert(7, SessionId(1));
        recorder.round(&mut seen);
        assert_eq!(seen.0, [Some(SessionId(1)), None]);
        recorder.finish(2, &mut seen);
        assert_eq!(seen.0.len(), 2);
    }

    #[test]
    fn sessions_of_processes_that_ended_are_forgotten_after_a_while() {
        let mut ledger = Ledger::default();
        ledger.by_pid.extend([(1, SessionId(1)), (2, SessionId(2)), (3, SessionId(3))]);
        ledger.ended.extend([(10, SessionId(1)), (10, SessionId(3))]);
        // Its number went to another process at once.
        ledger.by_pid.insert(3, SessionId(4));
        ledger.forget(9 + ENDED_NS);
        assert_eq!(ledger.by_pid.len(), 3, "a cancel request may be late");
        ledger.forget(10 + ENDED_NS);
        let mut left: Vec<_> = ledger.by_pid.into_iter().collect();
        left.sort_unstable_by_key(|&(pid, _)| pid);
        assert_eq!((left, ledger.ended), (vec![(2, SessionId(2)), (3, SessionId(4))], vec![]));
    }
}
