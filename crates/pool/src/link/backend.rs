// SPDX-License-Identifier: Apache-2.0
//! The server's direction: what goes to the client.

use std::borrow::Cow;
use std::collections::HashMap;

use super::names::{Alias, in_clients_words, server_name};
use super::{
    Answer, BackendObserver, ClientSide, Link, LinkError, Op, OpKind, Resync, Side, Splice, Status, UNNAMED,
    Unnamed,
};
use crate::params;
use crate::prepared::message;

/// Bytes of type and length word.
const HEADER: usize = 5;
/// ParameterStatus and the answers to the pooler's own questions are held as a whole; a server that sends longer ones is not followed.
const HELD_MAX: usize = 1 << 20;
/// Longest CommandComplete that is looked at: the tags of interest are short.
const TAG_MAX: usize = 64;

impl Link {
    /// Feeds what the server sent. `out` collects what goes to the client. Returns the bytes used; what is not used is an incomplete
    /// message that must be offered again together with more.
    ///
    /// # Errors
    /// The server sent what cannot be followed; the connection must end.
    pub fn backend(
        &mut self,
        input: &[u8],
        mut client: Option<&mut ClientSide>,
        observer: &mut impl BackendObserver,
        out: &mut Splice<'_>,
    ) -> Result<usize, LinkError> {
        if self.copy_both {
            out.keep(input, 0..input.len());
            self.backend_head.follow(&mut self.backend_left, input);
            return Ok(input.len());
        }
        let mut at = 0;
        loop {
            if self.backend_left > 0 {
                let take = (input.len() - at).min(self.backend_left as usize);
                if !self.backend_left_hidden {
                    out.keep(input, at..at + take);
                }
                self.backend_left -= take as u32;
                at += take;
                if self.backend_left > 0 {
                    break;
                }
                self.make_up(input, out);
            }
            let Some(header) = input[at..].first_chunk::<HEADER>() else { break };
            let tag = header[0];
            let length = u32::from_be_bytes([header[1], header[2], header[3], header[4]]);
            if length < 4 || length > i32::MAX as u32 {
                return Err(LinkError::Length(tag as char, length));
            }
            let total = length as usize + 1;
            let there = total.min(input.len() - at);
            let complete = there == total;
            let body = &input[at + HEADER..at + there];

            if self.resync != Resync::None {
                if !complete && length as usize <= HELD_MAX {
                    break;
                }
                let show = self.resync_message(tag, body, complete, observer)?;
                if show {
                    out.keep(input, at..at + there);
                }
                self.backend_left = (total - there) as u32;
                self.backend_left_hidden = !show;
                at += there;
                continue;
            }
            if self.foreign > 0 {
                match self.foreign_message(tag, length, body, complete, client.as_deref_mut(), observer)? {
                    Some(()) => {}
                    None => break,
                }
                let gone = usize::from(std::mem::take(&mut self.forwarded_head));
                // A lane uses names that are as long as the client's: a length that it has forwarded already stays true.
                let told = (tag == b'E' && complete)
                    .then(|| in_clients_words(body, None, client.as_deref()))
                    .flatten()
                    .filter(|told| gone == 0 || told.len() == body.len());
                match told {
                    Some(told) => {
                        let mut whole = Vec::with_capacity(total);
                        message(&mut whole, b'E', &[&told]);
                        out.compose(input).extend_from_slice(&whole[gone..]);
                    }
                    None => out.keep(input, at + gone..at + there),
                }
                self.backend_left = (total - there) as u32;
                self.backend_left_hidden = false;
                at += there;
                if self.backend_left == 0 {
                    self.make_up(input, out);
                }
                continue;
            }
            let hidden = self.pending.front().is_some_and(|op| op.answer == Answer::Hidden);
            let (mut show, mut told) = (!hidden, None);
            match tag {
                // Rows and copy data: the bulk.
                b'D' | b'd' | b'T' | b't' | b'n' | b'c' | b'H' | b'V' => {
                    if self.pending.is_empty() {
                        return Err(LinkError::OutOfOrder(tag as char));
                    }
                }
                b'Z' => {
                    if !complete {
                        if length != 5 {
                            return Err(LinkError::Malformed("ReadyForQuery"));
                        }
                        break;
                    }
                    show = self.ready(body, observer)?;
                }
                b'1' => self.answered(OpKind::Parse, tag)?,
                b'2' => self.answered(OpKind::Bind, tag)?,
                b'3' => self.answered(OpKind::Close, tag)?,
                b'C' => {
                    if total <= TAG_MAX && !complete {
                        break;
                    }
                    self.command_complete(complete.then_some(body), client.as_deref_mut())?;
                }
                b'I' | b's' => self.executed(tag)?,
                b'G' => self.copy_in_begins()?,
                // Nobody is there whom the stream could go to.
                b'W' if hidden => return Err(LinkError::OutOfOrder('W')),
                b'W' => self.copy_both = true,
                b'E' => {
                    let names = self.pending.front().is_some_and(|op| op.kind.names_statement());
                    let unasked = self.pending.is_empty();
                    if (names || hidden || unasked) && !complete && total <= HELD_MAX {
                        break;
                    }
                    let statement = self.pending.front().map_or(0, |op| op.statement);
                    if statement != 0 && complete && is_plan_changed(body) && self.plan_changed(statement) {
                        at += there;
                        continue;
                    }
                    let alias = self.pending.front_mut().and_then(|op| op.effect.as_mut()?.alias.take());
                    if hidden {
                        observer.hidden_error(body);
                        // An injected Parse stands for the client's own: it must hear why its Bind fails.
                        show = self.pending.front().is_some_and(|op| op.kind != OpKind::Query)
                            && client.is_some();
                    }
                    // In one read with the end of a transaction. The client would take it for the answer to what it says next.
                    show &=
                        !self.options.serves_transactions || !self.is_quiescent() || self.forwarded_head > 0;
                    self.failed(body, client.as_deref_mut())?;
                    if show && names && complete {
                        // Once what the error undid is undone: the client's names are those that it had when the server met its message.
                        told = in_clients_words(body, alias.as_ref(), client.as_deref());
                    }
                }
                b'S' => {
                    if !complete {
                        if total > HELD_MAX {
                            return Err(LinkError::TooLarge('S', length));
                        }
                        break;
                    }
                    let (name, value) = parameter(body).ok_or(LinkError::Malformed("ParameterStatus"))?;
                    observer.parameter_status(name, &value, hidden);
                }
                b'N' | b'A' => {}
                other => return Err(LinkError::Unexpected(other as char, Side::Server)),
            }
            // DescribeComplete: RowDescription or NoData answers a Describe; within a query it answers nothing by itself.
            if matches!(tag, b'T' | b'n')
                && self.pending.front().is_some_and(|op| op.kind == OpKind::Describe)
            {
                self.pop();
            }
            let gone = usize::from(std::mem::take(&mut self.forwarded_head));
            if let Some(told) = &told {
                message(out.compose(input), b'E', &[told]);
            } else if show {
                out.keep(input, at + gone..at + there);
            }
            self.backend_left = (total - there) as u32;
            self.backend_left_hidden = !show;
            at += there;
            if self.copy_both {
                // From here on all passes, wherever this read ended.
                out.keep(input, at..input.len());
                self.backend_head.follow(&mut self.backend_left, &input[at..]);
                return Ok(input.len());
            }
            if self.backend_left == 0 {
                self.make_up(input, out);
            }
        }
        self.let_go();
        Ok(at)
    }

    /// What comes behind [`Link::resync`]. True for what goes to the client.
    fn resync_message(
        &mut self,
        tag: u8,
        body: &[u8],
        complete: bool,
        observer: &mut impl BackendObserver,
    ) -> Result<bool, LinkError> {
        let mut show = false;
        match (tag, self.resync) {
            (b'Z', Resync::Asked { ready, failed }) => {
                self.status = status(body)?;
                self.resync = Resync::Asked { ready: true, failed };
                show = ready;
            }
            (b'Z', _) => {
                self.status = status(body)?;
                self.resync = Resync::None;
                self.doubt = false;
            }
            (b'3', Resync::Asked { ready: true, failed: true }) => self.resync = Resync::Answered,
            (b'S', _) if complete => {
                let (name, value) = parameter(body).ok_or(LinkError::Malformed("ParameterStatus"))?;
                observer.parameter_status(name, &value, true);
            }
            // Another one would say that the question was not answered (a cancel request hit it), and nobody would wait for the end of that.
            (b'E', Resync::Asked { ready, failed: false }) => {
                self.resync = Resync::Asked { ready, failed: true };
            }
            (b'N' | b'A', _) => show = true,
            _ => return Err(LinkError::OutOfOrder(tag as char)),
        }
        Ok(show)
    }

    /// A message that answers what a lane forwarded: ReadyForQuery is counted; parameters and what happens to statements are noted.
    /// `None` = more bytes are needed.
    fn foreign_message(
        &mut self,
        tag: u8,
        length: u32,
        body: &[u8],
        complete: bool,
        client: Option<&mut ClientSide>,
        observer: &mut impl BackendObserver,
    ) -> Result<Option<()>, LinkError> {
        match tag {
            b'E' if !complete && length as usize <= HELD_MAX => return Ok(None),
            b'C' if !complete && length as usize <= TAG_MAX => return Ok(None),
            b'Z' | b'S' if !complete => {
                return if length as usize > HELD_MAX {
                    Err(LinkError::TooLarge(tag as char, length))
                } else {
                    Ok(None)
                };
            }
            b'Z' => {
                self.status = status(body)?;
                self.foreign -= 1;
                observer.ready(self.status);
            }
            b'S' => {
                let (name, value) = parameter(body).ok_or(LinkError::Malformed("ParameterStatus"))?;
                observer.parameter_status(name, &value, false);
            }
            b'C' if is_deallocate_all(body) => self.forget_statements(client),
            // Which statement it was is not known: each is prepared again before its next use.
            b'E' if is_plan_changed(body) => self.statements.outdate_all(),
            b'E' if has_field(body, b"C26000") => {
                if let Some(name) = server_name(body) {
                    self.statements.outdate_named(&body[name]);
                }
            }
            // The request is known now: from here on it is followed as if it had passed here.
            b'G' if self.foreign == 1 => {
                self.foreign = 0;
                let is_open = std::mem::take(&mut self.foreign_open);
                let kind = if self.foreign_extended { OpKind::Execute } else { OpKind::Query };
                // Its Sync was in the same chunk.
                self.copy_ahead = u32::from(self.foreign_extended && !is_open);
                self.push_front_op(Op { kind, answer: Answer::Forward, effect: None, statement: 0 });
                self.copy_in_begins()?;
            }
            b'G' => return Err(LinkError::SyncInCopy),
            b'D' | b'd' | b'T' | b't' | b'n' | b'c' | b'H' | b'V' | b'1' | b'2' | b'3' | b'C' | b'I'
            | b's' | b'E' | b'N' | b'A' => {}
            other => return Err(LinkError::Unexpected(other as char, Side::Server)),
        }
        Ok(Some(()))
    }

    /// Made-up answers whose turn has come, and marks that need none.
    fn make_up(&mut self, input: &[u8], out: &mut Splice<'_>) {
        if self.foreign > 0 {
            return;
        }
        while let Some(op) = self.pending.front() {
            match (op.kind, op.answer) {
                (OpKind::CopyEnd, _) => {}
                (kind, Answer::Fake) => {
                    let tag = if kind == OpKind::Parse { b'1' } else { b'3' };
                    out.compose(input).extend_from_slice(&[tag, 0, 0, 0, 4]);
                }
                _ => break,
            }
            self.pop();
        }
    }

    fn ready(&mut self, body: &[u8], observer: &mut impl BackendObserver) -> Result<bool, LinkError> {
        let status = status(body)?;
        while self.pending.front().is_some_and(|op| op.kind == OpKind::CopyEnd) {
            self.pop();
        }
        match self.pop() {
            Some(op) if op.kind.ends_in_ready() => {
                self.status = status;
                (self.copy_in, self.copy_begun) = (false, false);
                if op.answer == Answer::Forward {
                    observer.ready(status);
                }
                Ok(op.answer == Answer::Forward)
            }
            // The server has read a Sync after all that went ahead of COPY data.
            None if self.doubt => {
                self.status = status;
                (self.skip_until_sync, self.in_extended) = (false, false);
                observer.ready(status);
                Ok(true)
            }
            _ => Err(LinkError::OutOfOrder('Z')),
        }
    }

    /// ParseComplete, BindComplete, CloseComplete.
    fn answered(&mut self, kind: OpKind, tag: u8) -> Result<(), LinkError> {
        match self.pop() {
            Some(op) if op.kind == kind => {
                if op.statement == UNNAMED {
                    self.unnamed = Unnamed::Ours;
                }
                Ok(())
            }
            _ => Err(LinkError::OutOfOrder(tag as char)),
        }
    }

    /// CommandComplete, EmptyQueryResponse, PortalSuspended: the end of an Execute, or of one statement of a Query.
    fn executed(&mut self, tag: u8) -> Result<(), LinkError> {
        match self.pending.front().map(|op| op.kind) {
            Some(OpKind::Execute) => {
                self.pop();
                Ok(())
            }
            Some(OpKind::Query) if tag != b's' => Ok(()),
            _ => Err(LinkError::OutOfOrder(tag as char)),
        }
    }

    fn command_complete(
        &mut self,
        body: Option<&[u8]>,
        client: Option<&mut ClientSide>,
    ) -> Result<(), LinkError> {
        self.executed(b'C')?;
        self.copy_syncs = 0;
        self.copy_ahead = 0;
        // An Execute takes the mark along; behind a Query, which may have a further COPY, it would be taken for the end of that one.
        if std::mem::take(&mut self.copy_begun)
            && self.pending.front().is_some_and(|op| op.kind == OpKind::Query)
            && self.pending.get(1).is_some_and(|op| op.kind == OpKind::CopyEnd)
        {
            self.pending.remove(1);
        }
        if body.is_some_and(is_deallocate_all) {
            self.unnamed = Unnamed::Stranger;
            self.forget_statements(client);
        }
        Ok(())
    }

    /// The server has no prepared statements any more. What was sent behind that still comes to be.
    fn forget_statements(&mut self, mut client: Option<&mut ClientSide>) {
        self.statements.clear();
        if let Some(client) = client.as_deref_mut() {
            self.keep_names(client);
            client.forget_statements();
        }
        self.redo_pending(client);
    }

    fn redo_pending(&mut self, mut client: Option<&mut ClientSide>) {
        for effect in self.pending.iter_mut().filter_map(|op| op.effect.as_deref_mut()) {
            effect.redo(client.as_deref_mut(), &mut self.statements);
        }
    }

    /// Errors to come about statements that are about to be forgotten still name them.
    fn keep_names(&mut self, client: &ClientSide) {
        if !self.pending.iter().any(|op| op.statement != 0 && op.statement != UNNAMED) {
            return;
        }
        let mut aliases = HashMap::new();
        let closed = self.pending.iter().filter_map(|op| op.effect.as_ref()?.client.as_ref());
        let closed = closed.filter_map(|(name, _, before)| Some((&**name, before.as_ref()?)));
        for (name, statement) in closed.chain(client.named_statements().iter().flat_map(|names| names.iter()))
        {
            let alias = Alias { server: statement.name.clone(), client: name.into() };
            aliases.insert(statement.id, alias);
        }
        for op in &mut self.pending {
            if let Some(alias) = aliases.get(&op.statement) {
                op.effect.get_or_insert_default().alias.get_or_insert_with(|| alias.clone());
            }
        }
    }

    /// CopyInResponse: Syncs that the client sent ahead of the end of its data will be ignored by the server.
    fn copy_in_begins(&mut self) -> Result<(), LinkError> {
        if !matches!(self.pending.front().map(|op| op.kind), Some(OpKind::Execute | OpKind::Query)) {
            return Err(LinkError::OutOfOrder('G'));
        }
        let end = self.pending.iter().position(|op| op.kind == OpKind::CopyEnd);
        let before_end = end.unwrap_or(self.pending.len());
        let mut index = 0;
        let (uncertain, ahead) = (&mut self.uncertain, &mut self.copy_ahead);
        self.pending.retain(|op| {
            index += 1;
            let ignored = op.kind == OpKind::Sync && index <= before_end;
            *uncertain -= u32::from(ignored);
            *ahead += u32::from(ignored);
            !ignored
        });
        // A Sync that went ahead of the data closes nothing any more: one must follow.
        if self.pending.front().is_some_and(|op| op.kind == OpKind::Execute)
            && !self.pending.iter().any(|op| op.kind.ends_in_ready())
        {
            self.in_extended = true;
        }
        self.copy_in = end.is_none();
        self.copy_begun = true;
        Ok(())
    }

    /// ErrorResponse: in the extended protocol, all up to the next Sync is void.
    fn failed(&mut self, body: &[u8], mut client: Option<&mut ClientSide>) -> Result<(), LinkError> {
        if self.copy_syncs > 0 {
            return Err(LinkError::SyncInCopy);
        }
        (self.copy_in, self.copy_begun) = (false, false);
        // Between CopyInResponse and the first data a server checks much (a view, a cancel request), and reads nothing.
        self.doubt |= std::mem::take(&mut self.copy_ahead) > 0;
        match self.pending.front().map(|op| op.kind) {
            // A timeout, or a cancel request, that met the server while it read on in an open batch (at a Flush).
            None if self.in_extended && !is_fatal(body) => {
                self.skip_until_sync = true;
                return Ok(());
            }
            // Reported outside any command: the server is about to end the connection.
            None => {
                self.is_ending = true;
                return Ok(());
            }
            Some(OpKind::Query | OpKind::FunctionCall) => return Ok(()),
            Some(OpKind::Sync) => return Ok(()),
            Some(_) => {}
        }
        // Something took it away that no CommandComplete tells, such as a DEALLOCATE inside DO.
        let lost = self.pending.front().map(|op| op.statement);
        let lost = lost.filter(|&id| id != 0 && id != UNNAMED && has_field(body, b"C26000"));
        let (mut void, mut unnamed, mut forgotten) = (Vec::new(), false, false);
        while self.pending.front().is_some_and(|op| op.kind != OpKind::Sync) {
            let Some(op) = self.pop() else { break };
            unnamed |= op.statement == UNNAMED;
            forgotten |= op.statement == UNNAMED && op.answer == Answer::Forward;
            void.extend(op.effect);
        }
        // The server's unnamed statement is not what was sent: it may be a stranger's, and must not be bound. Unless another one is under
        // way behind the Sync, whose own answer decides.
        if unnamed && !self.pending.iter().any(|op| op.statement == UNNAMED) {
            self.unnamed = Unnamed::Stranger;
            if let (Some(client), true) = (client.as_deref_mut(), forgotten) {
                client.unnamed = None;
            }
        }
        // What was sent behind the Sync was done to tables in which this had happened.
        let pending = self.pending.iter().filter_map(|op| op.effect.as_ref());
        for effect in void.iter().chain(pending).rev() {
            effect.undo(client.as_deref_mut(), &mut self.statements);
        }
        if let Some(id) = lost {
            // The code may be that of a function which was called for it: closing it first is right in either case.
            self.statements.outdate(id);
        }
        self.redo_pending(client);
        self.skip_until_sync = self.pending.is_empty();
        Ok(())
    }
}

fn status(body: &[u8]) -> Result<Status, LinkError> {
    match body {
        b"I" => Ok(Status::Idle),
        b"T" => Ok(Status::Transaction),
        b"E" => Ok(Status::Failed),
        _ => Err(LinkError::Malformed("ReadyForQuery")),
    }
}

/// Tag of a command that drops all prepared statements.
fn is_deallocate_all(tag: &[u8]) -> bool {
    matches!(tag, b"DEALLOCATE ALL\0" | b"DISCARD ALL\0")
}

/// "cached plan must not change result type" (plancache.c): the statement must be parsed again to be of use. Told by SQLSTATE and routine,
/// for the text is in the server's language.
fn is_plan_changed(body: &[u8]) -> bool {
    has_field(body, b"C0A000") && has_field(body, b"RRevalidateCachedQuery")
}

/// Whether an ErrorResponse has this field: type and value.
fn has_field(body: &[u8], field: &[u8]) -> bool {
    body.split(|&byte| byte == 0).any(|part| part == field)
}

/// Whether the server ends the connection behind this error. Servers before 9.6 tell the severity in their language only.
fn is_fatal(body: &[u8]) -> bool {
    [b"VFATAL".as_slice(), b"VPANIC", b"SFATAL", b"SPANIC"].iter().any(|field| has_field(body, field))
}

fn parameter(body: &[u8]) -> Option<(&str, Cow<'_, str>)> {
    let (name, rest) = body.split_at_checked(memchr::memchr(0, body)?)?;
    let value = rest[1..].strip_suffix(b"\0")?;
    Some((std::str::from_utf8(name).ok()?, params::from_wire(value)))
}
