// SPDX-License-Identifier: Apache-2.0
//! What a lane may carry, written down once more: from the codec's view of the messages and the table of reasons, for one client and one server.
//!
//! Where the programs deliberately hand over more than they must, this says so: what they cannot see in the chunk at hand (`split`,
//! `unnamed_parse`, `batch`, a command tag that is cut), and what they do not look at closely enough (a tag as long as one that drops statements).

use std::fmt::Write as _;

use underpass_wire::frontend::len_max;
use underpass_wire::tag::{backend, frontend};
use underpass_wire::{Framer, MAX_MESSAGE_LEN, MAX_SMALL_MESSAGE_LEN, Piece};

use super::{LENGTH_MAX, what};

/// As in `lanes.h` and `lanes.bpf.h`.
const STATEMENT_NAME_MAX: usize = 63;
const STATEMENT_USES_MAX: usize = 8;
const PENDING_MAX: u32 = 4096;
const MESSAGES_MAX: usize = 16384;
const REQUEST_BUDGET_BYTES: usize = 256 << 10;

type Reason = &'static str;

/// A message's head, and as much of its body as is in the chunk.
struct Message<'a> {
    tag: u8,
    body_len: usize,
    /// Where the body begins in the chunk.
    at: usize,
    body: &'a [u8],
}

impl Message<'_> {
    fn is_whole(&self) -> bool {
        self.body.len() == self.body_len
    }
}

/// A direction between two chunks. The programs judge a ReadyForQuery when its status is there, the codec by its length alone.
struct Stream {
    framer: Framer,
    bad_ready: bool,
}

impl Stream {
    fn new() -> Self {
        Self { framer: Framer::new(LENGTH_MAX), bad_ready: false }
    }

    /// `need` and `hdr_len` of `struct wire_state`.
    fn state(&self) -> (u64, usize) {
        let ready = self.framer.header().is_some_and(|header| header.tag == backend::READY_FOR_QUERY);
        if self.bad_ready || ready {
            (0, 5)
        } else {
            (self.framer.need(), self.framer.pending_header().len())
        }
    }

    fn at_boundary(&self) -> bool {
        self.state() == (0, 0)
    }

    /// The messages whose heads end in this chunk, and whether the chunk is well formed. The caller forgets the stream if it is not.
    fn walk<'a>(&mut self, chunk: &'a [u8]) -> (Vec<Message<'a>>, bool) {
        let (mut rest, mut found) = (chunk, Vec::new());
        if self.bad_ready {
            return (found, chunk.is_empty());
        }
        loop {
            let pending = self.framer.pending_header();
            let (tag, seen) = (pending.first().or(rest.first()).copied(), pending.len() + rest.len());
            let at = |rest: &[u8]| chunk.len() - rest.len();
            match self.framer.next(&mut rest) {
                Ok(Some(Piece::Header(header))) if header.tag == backend::READY_FOR_QUERY => {
                    if header.len != 5 {
                        self.bad_ready = rest.is_empty();
                        return (found, self.bad_ready);
                    }
                }
                Ok(Some(Piece::Header(header))) => {
                    let body_len = header.body_len();
                    let body = &rest[..body_len.min(rest.len())];
                    found.push(Message { tag: header.tag, body_len, at: at(rest), body });
                }
                Ok(Some(Piece::Body(body))) => {
                    let header = self.framer.header().expect("a body has a header");
                    if header.tag == backend::READY_FOR_QUERY {
                        found.push(Message { tag: header.tag, body_len: 1, at: at(rest) - 1, body });
                    }
                }
                Ok(Some(Piece::End(_))) => {}
                Ok(None) => return (found, true),
                Err(_) => {
                    self.bad_ready = tag == Some(backend::READY_FOR_QUERY) && seen == 5;
                    return (found, self.bad_ready);
                }
            }
        }
    }
}

/// A client's link, as its link word has it.
#[derive(Clone, Copy, Default)]
struct Link {
    linked: bool,
    pending: u32,
    open: bool,
    status: u8,
    copy: bool,
    extended: bool,
}

struct Lane {
    pinned: bool,
    held: bool,
    retire: bool,
    link: Link,
    requests: Stream,
    responses: Stream,
    unnamed: bool,
    batch: bool,
    named: bool,
    cycle_bytes: usize,
}

/// What was found in a chunk of requests.
struct Scan {
    syncs: u32,
    open: bool,
    /// The unnamed statement is the client's own up to the Sync; beyond it too, because its Parse came first in its cycle.
    unnamed: bool,
    unnamed_kept: bool,
    extended: bool,
    /// An unnamed statement was parsed and not bound since.
    unbound: bool,
    /// Place and length of each name.
    uses: Vec<(usize, usize)>,
}

/// The text for these pieces; ends where the programs hand over.
pub fn expected(pinned: bool, pieces: &[(u8, Vec<u8>)]) -> String {
    let mut lane = Lane {
        pinned,
        held: false,
        retire: false,
        link: Link::default(),
        requests: Stream::new(),
        responses: Stream::new(),
        unnamed: false,
        batch: false,
        named: false,
        cycle_bytes: 0,
    };
    let mut out = String::new();
    for (what, chunk) in pieces {
        lane.retire |= what & what::RETIRE != 0;
        lane.held |= what & what::HOLD != 0;
        if chunk.is_empty() {
            continue;
        }
        let (who, outcome) = if what & what::SERVER != 0 {
            ("response", lane.response(chunk, &mut out))
        } else {
            ("request", lane.request(chunk, &mut out).map(|()| None))
        };
        match outcome {
            Ok(None) => {}
            Ok(Some(hold)) => {
                let _ = writeln!(out, "hold {hold}");
                break;
            }
            Err(reason) => {
                let _ = writeln!(out, "{who} up {reason}");
                break;
            }
        }
    }
    out
}

impl Lane {
    fn say_link(&self, who: &str, out: &mut String) {
        let Link { linked, pending, open, status, copy, extended } = self.link;
        let [linked, open, copy, extended] = [linked, open, copy, extended].map(u8::from);
        let _ = write!(
            out,
            "{who} linked {linked} pending {pending} open {open} status {status} copy {copy} extended {extended}"
        );
    }

    fn request(&mut self, chunk: &[u8], out: &mut String) -> Result<(), Reason> {
        let was_at_boundary = self.requests.at_boundary();
        let (messages, is_good) = self.requests.walk(chunk);
        let mut scan = Scan {
            syncs: 0,
            open: self.batch,
            unnamed: self.link.linked && self.unnamed,
            unnamed_kept: self.link.linked && self.unnamed,
            extended: self.batch,
            unbound: false,
            uses: Vec::new(),
        };
        for message in messages.iter().take(MESSAGES_MAX) {
            self.judge(&mut scan, message)?;
        }
        let (need, head) = self.requests.state();
        if messages.len() >= MESSAGES_MAX {
            return Err("messages"); // to see that there is nothing behind them takes one look more
        } else if !is_good {
            return Err("length");
        } else if head != 0 {
            return Err("split");
        } else if scan.unbound {
            return Err("unnamed_parse");
        } else if scan.open && !self.pinned {
            return Err("batch");
        } else if scan.syncs > PENDING_MAX {
            return Err("depth");
        }
        let is_busy = self.link.pending != 0 || self.link.open;
        let cycle_bytes = if is_busy { self.cycle_bytes } else { 0 } + chunk.len();
        if cycle_bytes > REQUEST_BUDGET_BYTES {
            return Err("request_budget");
        }
        let open = scan.open || need != 0;
        let is_prepared = scan.uses.iter().all(|(_, length)| length % 2 == 1);
        if self.link.linked {
            if !is_prepared {
                return Err("unprepared");
            }
            self.extend(&scan, open)?;
        } else {
            if !was_at_boundary || self.held {
                return Err("held");
            }
            if self.retire {
                return Err("unfit"); // the only one
            }
            if !is_prepared {
                return Err("unprepared");
            }
            self.named = false;
            let extended = scan.extended;
            self.link = Link { linked: true, pending: scan.syncs, open, extended, ..Link::default() };
        }
        self.named |= !scan.uses.is_empty();
        self.unnamed = scan.unnamed_kept;
        self.batch = scan.open;
        self.cycle_bytes = cycle_bytes;

        let mut renamed = chunk.to_vec();
        for (at, length) in scan.uses {
            renamed[at..at + length].fill(b'u');
        }
        self.say_link("request", out);
        let [unnamed, batch, named] = [self.unnamed, self.batch, self.named].map(u8::from);
        let hash =
            renamed.iter().fold(2_166_136_261, |h: u32, b| (h ^ u32::from(*b)).wrapping_mul(16_777_619));
        let _ = writeln!(
            out,
            " unnamed {unnamed} batch {batch} named {named} need {need} head {head} hash {hash:08x}"
        );
        Ok(())
    }

    /// Adds requests to a link that stands.
    fn extend(&mut self, scan: &Scan, open: bool) -> Result<(), Reason> {
        let link = &mut self.link;
        if self.held {
            return Err("held");
        }
        if link.pending == 0 && scan.syncs == 0 && !open && link.status == 0 && !self.pinned {
            return Err("idle_link");
        }
        if link.pending + scan.syncs > PENDING_MAX {
            return Err("depth");
        }
        // Of what was asked for last, which is also a batch that has no Sync yet.
        link.extended = scan.extended || link.extended && scan.syncs == 0 && link.pending != 0;
        link.pending += scan.syncs;
        link.open = open;
        Ok(())
    }

    fn judge(&self, scan: &mut Scan, message: &Message<'_>) -> Result<(), Reason> {
        use frontend::*;
        let tag = message.tag;
        if !is_large(tag) && message.body_len + 4 > MAX_SMALL_MESSAGE_LEN as usize {
            return Err("length");
        }
        let is_copy = matches!(tag, COPY_DATA | COPY_DONE | COPY_FAIL);
        scan.extended = !is_copy && !matches!(tag, QUERY | FUNCTION_CALL);
        if tag == TERMINATE {
            return Err("terminate");
        }
        if self.link.copy != is_copy {
            return Err("copy_stray");
        }
        match tag {
            QUERY | FUNCTION_CALL if scan.open => return Err("batch"),
            QUERY | FUNCTION_CALL | SYNC => {
                scan.syncs += 1;
                scan.open = false;
                scan.unnamed = scan.unnamed_kept;
            }
            PARSE | BIND | DESCRIBE | CLOSE => {
                if message.body_len < 2 {
                    return Err("length");
                }
                if !self.pinned {
                    judge_names(scan, message)?;
                }
                scan.open = true;
            }
            EXECUTE | FLUSH => scan.open = true,
            COPY_DATA => {}
            COPY_DONE | COPY_FAIL => return Err("copy_end"),
            _ => return Err("type"),
        }
        Ok(())
    }

    /// Forwards a chunk of responses; `Some` is why the server goes up behind it.
    fn response(&mut self, chunk: &[u8], out: &mut String) -> Result<Option<Reason>, Reason> {
        use backend::*;
        if !self.link.linked {
            return Err("no_client");
        }
        let (messages, is_good) = self.responses.walk(chunk);
        let (mut ready, mut idles, mut status) = (0, 0, 0);
        let (mut trailing, mut copy_in, mut error) = (false, false, false);
        for message in messages.iter().take(MESSAGES_MAX) {
            trailing = true;
            match message.tag {
                READY_FOR_QUERY => {
                    status = message.body[0];
                    ready += 1;
                    idles += u64::from(status == b'I');
                    (trailing, copy_in) = (false, false);
                }
                COMMAND_COMPLETE if !self.pinned && drops_statements(message) => return Err("dirty"),
                PARAMETER_STATUS => return Err("dirty"),
                ERROR_RESPONSE => error = true,
                COPY_IN_RESPONSE => copy_in = true,
                AUTHENTICATION | BACKEND_KEY_DATA | COPY_BOTH_RESPONSE | NEGOTIATE_PROTOCOL_VERSION => {
                    return Err("type");
                }
                tag if ALL.contains(&tag) => {}
                _ => return Err("type"),
            }
        }
        if messages.len() >= MESSAGES_MAX {
            return Err("messages");
        } else if !is_good {
            return Err("length");
        }
        if error && self.named {
            return Err("error");
        }
        let code = match status {
            _ if ready == 0 => 0,
            b'I' => 0,
            b'T' => 1,
            b'E' => 2,
            _ => return Err("rfq_unexpected"),
        };
        if ready > self.link.pending {
            return Err("rfq_unexpected");
        }
        let before = self.link;
        let pending = before.pending - ready;
        if copy_in && (pending != 1 || before.extended || before.open) {
            return Err("copy_pipeline");
        }
        let ends = ready != 0 && pending == 0 && code == 0 && !before.open;
        let mut hold = None;
        let mut released = false;
        if ends && !self.pinned {
            if trailing || !self.responses.at_boundary() {
                return Err("after_rfq");
            }
            if self.held {
                hold = Some("held");
            } else if self.retire {
                hold = Some("retire");
            } else if before.copy {
                hold = Some("copy_end");
            } else {
                released = true;
            }
        }
        let link = &mut self.link;
        link.pending = pending;
        if ready != 0 {
            (link.status, link.copy) = (code, false);
        }
        link.copy |= copy_in;
        if released {
            (link.linked, link.extended) = (false, false);
        }
        self.say_link("response", out);
        let (need, head) = self.responses.state();
        let _ = writeln!(out, " need {need} head {head} queries {ready} xacts {idles}");
        Ok(hold)
    }
}

/// Of what carries user's data the length is limited by the stream's limit only.
fn is_large(tag: u8) -> bool {
    len_max(tag) == Some(MAX_MESSAGE_LEN)
}

/// Which statement Parse, Bind, Describe and Close are about. By the first bytes, because no more of them may be there.
fn judge_names(scan: &mut Scan, message: &Message<'_>) -> Result<(), Reason> {
    use frontend::*;
    let (tag, body) = (message.tag, message.body);
    if tag == PARSE {
        match body.first() {
            None => return Err("split"),
            Some(0) => {
                scan.unnamed_kept |= !scan.open;
                (scan.unnamed, scan.unbound) = (true, true);
            }
            Some(_) => return Err("named_statement"),
        }
    } else {
        let &[first, second, ..] = body else { return Err("split") };
        match (tag, first, second) {
            (BIND, 1.., _) => return Err("named_portal"),
            (DESCRIBE | CLOSE, b'P', _) => {}
            (CLOSE, _, 1..) => return Err("named_statement"),
            (CLOSE, _, 0) => (scan.unnamed, scan.unnamed_kept) = (false, false),
            (_, _, 1..) => {
                let name = statement_name(message)?;
                if scan.uses.len() == STATEMENT_USES_MAX {
                    return Err("statements");
                }
                scan.uses.push((message.at + 1, name));
            }
            _ => {
                scan.unbound &= tag != BIND;
                if !scan.unnamed {
                    return Err("unnamed_bind");
                }
            }
        }
    }
    assert_meaning(message);
    Ok(())
}

/// The length of the name behind the first byte, if the client has prepared it and it is all there.
fn statement_name(message: &Message<'_>) -> Result<usize, Reason> {
    let name = &message.body[1..];
    let known = |length: usize| length <= STATEMENT_NAME_MAX && name[0] == b's';
    match name.iter().position(|byte| *byte == 0) {
        Some(length) if known(length) => Ok(length),
        Some(_) => Err("named_statement"),
        None if name.len() <= STATEMENT_NAME_MAX && !message.is_whole() => Err("split"),
        None => Err("named_statement"),
    }
}

/// What the first bytes were taken for is what the codec reads, when it can read the message.
fn assert_meaning(message: &Message<'_>) {
    use underpass_wire::frontend::{Message as Decoded, Target, bind_names};
    let (tag, body) = (message.tag, message.body);
    if tag == frontend::BIND
        && let Some(names) = bind_names(body)
    {
        assert!(names.portal.is_empty());
        assert!(names.statement.is_empty() || names.statement[0] == b's');
    }
    if !message.is_whole() {
        return;
    }
    match Decoded::decode(tag, body) {
        Ok(Decoded::Parse(parse)) => assert!(parse.name.is_empty()),
        Ok(Decoded::Bind(bind)) => assert!(bind.portal.is_empty()),
        Ok(Decoded::Describe(describe)) if describe.target == Target::Statement => {
            assert!(describe.name.is_empty() || describe.name[0] == b's');
        }
        Ok(Decoded::Close(close)) => assert!(close.target == Target::Portal || close.name.is_empty()),
        _ => {}
    }
}

/// Whether user space has to hear of a CommandComplete. All that drop statements, and some that look alike or cannot be seen.
fn drops_statements(message: &Message<'_>) -> bool {
    use underpass_wire::backend::Message as Decoded;
    let body = message.body;
    let is_long = message.body_len == b"DISCARD ALL\0".len() || message.body_len == b"DEALLOCATE ALL\0".len();
    let drops = is_long && (body.len() < 5 || body[0] == b'D' && (body[1] == b'I' || body[2] == b'A'));
    if message.is_whole()
        && let Ok(Decoded::CommandComplete(complete)) = Decoded::decode(message.tag, body)
        && [&b"DISCARD ALL"[..], b"DEALLOCATE ALL"].contains(&complete.tag)
    {
        assert!(drops, "a tag that drops statements");
    }
    drops
}
