// SPDX-License-Identifier: Apache-2.0
//! The client's direction: what goes to the server.

use std::sync::Arc;

use memchr::memchr;

use super::names::Alias;
use super::{
    Answer, Effect, FrontendContext, FrontendEvent, Link, LinkError, OnServer, Op, OpKind, Side, Splice,
    Status, UNNAMED, Unnamed, judge_head,
};
use crate::prepared::{self, Statement};

/// Bytes of type and length word.
const HEADER: usize = 5;
/// Names in a Bind must end within this many bytes of the body, so that no more is held back. The same holds for a
/// message that is there as a whole: how it was cut on its way makes no difference.
const NAMES_MAX: usize = 64 * 1024;

/// Largest Parse of the unnamed statement, in bytes, that is remembered for a Bind on another server.
const UNNAMED_MAX: usize = 256 * 1024;

/// Bytes that are composed for one input, and then some for the message that passes the limit.
const COMPOSED_MAX: usize = 1 << 20;

/// A message at the head of the input.
struct Message<'a> {
    tag: u8,
    /// Bytes of the whole message, header included.
    total: usize,
    /// As much of the body as is there.
    body: &'a [u8],
    /// Whether that is all of it.
    complete: bool,
}

impl Link {
    /// Feeds what the client sent. `out` collects what goes to the server. Returns the bytes used, and the client's wish to leave; what is
    /// not used is an incomplete message that must be offered again together with more.
    ///
    /// # Errors
    /// The client broke the protocol or a limit; nothing of the offending message was passed on.
    pub fn frontend(
        &mut self,
        input: &[u8],
        context: &mut FrontendContext<'_>,
        out: &mut Splice<'_>,
    ) -> Result<(usize, FrontendEvent), LinkError> {
        if self.copy_both {
            out.keep(input, 0..input.len());
            self.frontend_head.follow(&mut self.frontend_left, input);
            return Ok((input.len(), FrontendEvent::Fed));
        }
        if self.holds {
            return Ok((0, FrontendEvent::Fed));
        }
        let mut at = 0;
        // A few bytes may ask for a statement of megabytes, again and again: the rest is taken when this has been sent.
        while out.composed() < COMPOSED_MAX {
            if self.frontend_left > 0 {
                let take = (input.len() - at).min(self.frontend_left as usize);
                out.keep(input, at..at + take);
                self.frontend_left -= take as u32;
                at += take;
            }
            if self.is_full() {
                if self.in_extended {
                    // The server may keep to itself the answer that all wait for, and the Sync is not read before that.
                    prepared::message(out.compose(input), b'H', &[]);
                }
                break;
            }
            let Some(message) = self.peek(&input[at..])? else { break };
            let passed = match message.tag {
                b'X' => return Ok((at, FrontendEvent::Terminate)),
                b'P' | b'B' | b'D' | b'C' if !self.skip_until_sync => {
                    match self.extended(&message, input, at, context, out)? {
                        Some(used) => used,
                        None => break,
                    }
                }
                _ => {
                    if matches!(message.tag, b'P' | b'C') && self.skip_until_sync {
                        // Discarded. Whether the client knew that or not, the unnamed statement is not what it was.
                        if !message.complete && message.body.len() < 2 {
                            break;
                        }
                        let is_unnamed = match message.tag {
                            b'P' => message.body.first() == Some(&0),
                            _ => message.body.starts_with(b"S\0"),
                        };
                        if is_unnamed {
                            context.client.unnamed = None;
                            self.unnamed = Unnamed::Stranger;
                        }
                    }
                    if message.tag == b'Q' && !self.skip_until_sync {
                        // A simple query ends the unnamed statement (manual, 55.2.3 "Extended Query").
                        context.client.unnamed = None;
                    }
                    self.note(&message)?;
                    self.pass(&message, input, at, out)
                }
            };
            at += passed;
        }
        self.kept(input, out);
        Ok((at, FrontendEvent::Fed))
    }

    fn peek<'a>(&self, input: &'a [u8]) -> Result<Option<Message<'a>>, LinkError> {
        let Some(header) = input.first_chunk::<HEADER>() else { return Ok(None) };
        let total = judge_head(header, self.options.message_max)? as usize + 1;
        let end = total.min(input.len());
        Ok(Some(Message { tag: header[0], total, body: &input[HEADER..end], complete: end == total }))
    }

    /// Passes the message on as it is, as far as it is there; the rest follows unseen.
    fn pass(&mut self, message: &Message<'_>, input: &[u8], at: usize, out: &mut Splice<'_>) -> usize {
        let there = HEADER + message.body.len();
        out.keep(input, at..at + there);
        self.frontend_left = (message.total - there) as u32;
        there
    }

    /// Notes a message that is passed on unchanged.
    fn note(&mut self, message: &Message<'_>) -> Result<(), LinkError> {
        if self.foreign_open {
            return self.note_in_foreign_batch(message.tag);
        }
        if self.skip_until_sync && message.tag != b'S' {
            // The server discards it; only its type is checked.
            return match message.tag {
                b'Q' | b'P' | b'B' | b'D' | b'C' | b'E' | b'H' | b'F' | b'd' | b'c' | b'f' => Ok(()),
                other => Err(LinkError::Unexpected(other as char, Side::Client)),
            };
        }
        match message.tag {
            b'Q' if self.options.refuse_simple_query => return Err(LinkError::SimpleQueryDisabled),
            b'Q' | b'F' => {
                // It also ends the implicit transaction that extended messages before it may have opened.
                self.in_extended = false;
                let kind = if message.tag == b'Q' { OpKind::Query } else { OpKind::FunctionCall };
                self.push(kind, Answer::Forward, None);
            }
            b'E' => self.push_extended(OpKind::Execute, Answer::Forward, None),
            b'S' if self.copy_in => self.copy_syncs += 1,
            b'S' => {
                self.in_extended = false;
                self.skip_until_sync = false;
                if self.unnamed == Unnamed::InBatch {
                    // An error may have discarded it, which is known when its answer comes.
                    self.unnamed = Unnamed::Stranger;
                }
                self.push(OpKind::Sync, Answer::Forward, None);
            }
            b'd' | b'H' => {}
            b'c' | b'f' => {
                // Counted even when COPY has not begun for all we know: the client may have sent it ahead.
                if self.copy_in || self.is_busy() {
                    self.push(OpKind::CopyEnd, Answer::Forward, None);
                }
                self.copy_in = false;
            }
            other => return Err(LinkError::Unexpected(other as char, Side::Client)),
        }
        Ok(())
    }

    /// A message of a batch that began in a lane: the ReadyForQuery that ends it is counted already.
    fn note_in_foreign_batch(&mut self, tag: u8) -> Result<(), LinkError> {
        match tag {
            b'Q' if self.options.refuse_simple_query => return Err(LinkError::SimpleQueryDisabled),
            b'Q' | b'F' | b'S' => (self.foreign_open, self.in_extended) = (false, false),
            // In case COPY begins: this is where the data ends.
            b'c' | b'f' => self.push(OpKind::CopyEnd, Answer::Forward, None),
            b'E' | b'H' | b'd' => {}
            other => return Err(LinkError::Unexpected(other as char, Side::Client)),
        }
        Ok(())
    }

    fn push_extended(&mut self, kind: OpKind, answer: Answer, effect: Option<Box<Effect>>) {
        self.in_extended = true;
        self.push(kind, answer, effect);
    }

    fn push_unnamed(&mut self, kind: OpKind, answer: Answer) {
        self.in_extended = true;
        self.push_op(Op { kind, answer, effect: None, statement: UNNAMED });
    }

    /// Parse, Bind, Describe, Close: the messages that name statements. `None` = more bytes are needed.
    fn extended(
        &mut self,
        message: &Message<'_>,
        input: &[u8],
        at: usize,
        context: &mut FrontendContext<'_>,
        out: &mut Splice<'_>,
    ) -> Result<Option<usize>, LinkError> {
        if !self.options.rename_statements {
            if !self.foreign_open {
                self.push_extended(kind_of(message.tag), Answer::Forward, None);
            }
            return Ok(Some(self.pass(message, input, at, out)));
        }
        match message.tag {
            b'P' => self.parse(message, input, at, context, out),
            b'B' => self.bind(message, input, at, context, out),
            _ => self.describe_or_close(message, input, at, context, out),
        }
    }

    fn parse(
        &mut self,
        message: &Message<'_>,
        input: &[u8],
        at: usize,
        context: &mut FrontendContext<'_>,
        out: &mut Splice<'_>,
    ) -> Result<Option<usize>, LinkError> {
        if message.body.is_empty() && !message.complete {
            // Whether it has a name, and with that which limit holds, is not known yet.
            return Ok(None);
        }
        if message.body.first() == Some(&0) {
            // Unnamed: remembered, if it is not too large for that.
            if !message.complete && message.total <= UNNAMED_MAX {
                return Ok(None);
            }
            self.unnamed = Unnamed::InBatch;
            context.client.unnamed = message.complete.then(|| message.body[1..].into());
            self.push_unnamed(OpKind::Parse, Answer::Forward);
            return Ok(Some(self.pass(message, input, at, out)));
        }
        if message.total > self.options.statement_bytes_max as usize {
            return Err(LinkError::StatementTooLarge(message.total as u32));
        }
        let head = &message.body[..message.body.len().min(NAMES_MAX)];
        let Some(name_end) = memchr(0, head) else {
            return match message {
                _ if head.len() == NAMES_MAX => Err(LinkError::NamesTooLong("Parse")),
                Message { complete: true, .. } => Err(LinkError::Malformed("Parse")),
                _ => Ok(None),
            };
        };
        if !message.complete {
            return Ok(None);
        }
        let (name, body) = (&message.body[..name_end], &message.body[name_end + 1..]);
        memchr(0, body).ok_or(LinkError::Malformed("Parse"))?;
        if let Some(existing) = context.client.statements().get(name).cloned() {
            if self.depends() {
                self.hold(input, out);
                return Ok(None);
            }
            self.counts.client_parse += 1;
            // The name is taken. The server says so itself when it is asked to parse under a name that it has. It must have it for certain:
            // one that has lost it unnoticed would take this text for all who use the name. In a failed transaction it takes none.
            if self.status != Status::Failed {
                self.statements.outdate(existing.id);
            }
            self.ensure(&existing, input, out);
            prepared::message(out.compose(input), b'P', &[&existing.name, b"\0", body]);
            let effect = aliased(&existing.name, name);
            self.push_extended(OpKind::Parse, Answer::Forward, Some(effect));
            return Ok(Some(message.total));
        }
        self.counts.client_parse += 1;
        let statement = context.statements.intern(name.len(), body);
        let statements = context.client.statements();
        let before = statements.set(name, Some(statement.clone()));
        if statements.bytes() > self.options.client_statement_bytes_max {
            return Err(LinkError::TooManyStatements(statements.bytes()));
        }
        let mut effect =
            Effect { client: Some((name.into(), Some(statement.clone()), before)), ..Effect::default() };
        let held = self.statements.touch(statement.id);
        let certain = self.is_certain();
        if held && !certain {
            // The transaction may have failed, or DEALLOCATE ALL be under way: only the server can answer. Close works even then.
            self.statements.outdate(statement.id);
        }
        if held && certain {
            if self.may_make_up() {
                context.to_client.extend_from_slice(b"1\0\0\0\x04");
                self.in_extended = true;
            } else {
                self.push_extended(OpKind::Parse, Answer::Fake, Some(Box::new(effect)));
            }
        } else {
            self.make_room(&statement, input, out);
            self.close_outdated(&statement, input, out);
            statement.parse_message(out.compose(input));
            self.statements.insert(statement.clone());
            self.counts.server_parse += 1;
            effect.server = Some((statement, OnServer::Added));
            self.push_extended(OpKind::Parse, Answer::Forward, Some(Box::new(effect)));
        }
        Ok(Some(message.total))
    }

    /// Whether what a name stands for depends on answers that are still to come.
    fn depends(&self) -> bool {
        (self.uncertain > 0 || self.foreign > 0) && !self.copy_in
    }

    /// Makes sure that the server has `statement`: injects a Parse ahead if not.
    fn ensure(&mut self, statement: &Arc<Statement>, input: &[u8], out: &mut Splice<'_>) {
        if self.statements.touch(statement.id) {
            return;
        }
        self.make_room(statement, input, out);
        self.close_outdated(statement, input, out);
        statement.parse_message(out.compose(input));
        self.statements.insert(statement.clone());
        self.counts.server_parse += 1;
        let effect = Effect { server: Some((statement.clone(), OnServer::Added)), ..Effect::default() };
        self.push_extended(OpKind::Parse, Answer::Hidden, Some(Box::new(effect)));
    }

    /// Closes the least recently used statements of the server if it holds as many as it may with `more`. A Bind of one that is already on
    /// its way is not disturbed: the server works in order, and a portal keeps its plan.
    fn make_room(&mut self, more: &Statement, input: &[u8], out: &mut Splice<'_>) {
        let (max, bytes_max) =
            (self.options.statements_max as usize, self.options.client_statement_bytes_max);
        while let Some(evicted) = self.statements.evict(more, max, bytes_max) {
            evicted.close_message(out.compose(input));
            let effect = Effect { server: Some((evicted, OnServer::Removed)), ..Effect::default() };
            self.push_extended(OpKind::Close, Answer::Hidden, Some(Box::new(effect)));
        }
    }

    /// Closes `statement` if the server has it with a plan that is of no use any more.
    fn close_outdated(&mut self, statement: &Arc<Statement>, input: &[u8], out: &mut Splice<'_>) {
        if self.statements.take_outdated(statement.id) {
            statement.close_message(out.compose(input));
            let effect = Effect { server: Some((statement.clone(), OnServer::Removed)), ..Effect::default() };
            self.push_extended(OpKind::Close, Answer::Hidden, Some(Box::new(effect)));
        }
    }

    fn bind(
        &mut self,
        message: &Message<'_>,
        input: &[u8],
        at: usize,
        context: &mut FrontendContext<'_>,
        out: &mut Splice<'_>,
    ) -> Result<Option<usize>, LinkError> {
        let head = &message.body[..message.body.len().min(NAMES_MAX)];
        let names = memchr(0, head).and_then(|portal_end| {
            memchr(0, &head[portal_end + 1..]).map(|length| (portal_end + 1, portal_end + 1 + length))
        });
        let Some((start, end)) = names else {
            return match message {
                _ if head.len() == NAMES_MAX => Err(LinkError::NamesTooLong("Bind")),
                Message { complete: true, .. } => Err(LinkError::Malformed("Bind")),
                _ => Ok(None),
            };
        };
        if start == end {
            if !self.bind_unnamed(input, context, out) {
                return Ok(None);
            }
            self.push_extended(OpKind::Bind, Answer::Forward, None);
            return Ok(Some(self.pass(message, input, at, out)));
        }
        let used = self.rename(message, start..end, input, at, context, out);
        self.counts.bind += u64::from(used.is_some());
        Ok(used)
    }

    /// A Bind of the unnamed statement must not meet one that another client left on this server. False if it has to wait.
    fn bind_unnamed(
        &mut self,
        input: &[u8],
        context: &mut FrontendContext<'_>,
        out: &mut Splice<'_>,
    ) -> bool {
        if self.unnamed == Unnamed::Stranger {
            if self.depends() && self.pending.iter().any(|op| op.statement == UNNAMED) {
                // The client's own Parse is under way, in a batch that may have failed ahead of it.
                self.hold(input, out);
                return false;
            }
            // Without a text to give again, an unnamed statement that does not parse takes the stranger's place: the server then
            // answers this Bind with "unnamed prepared statement does not exist", as it would directly.
            match &context.client.unnamed {
                Some(body) => {
                    prepared::message(out.compose(input), b'P', &[b"\0", body]);
                    self.push_unnamed(OpKind::Parse, Answer::Hidden);
                }
                None => {
                    prepared::message(out.compose(input), b'C', &[b"S\0"]);
                    self.push_unnamed(OpKind::Close, Answer::Hidden);
                }
            }
            self.unnamed = Unnamed::InBatch;
        }
        true
    }

    fn describe_or_close(
        &mut self,
        message: &Message<'_>,
        input: &[u8],
        at: usize,
        context: &mut FrontendContext<'_>,
        out: &mut Splice<'_>,
    ) -> Result<Option<usize>, LinkError> {
        let is_close = message.tag == b'C';
        let kind = kind_of(message.tag);
        let malformed = LinkError::Malformed(if is_close { "Close" } else { "Describe" });
        if message.complete && message.body.len() < 2 {
            return Err(malformed);
        }
        if !message.complete {
            return Ok(None);
        }
        let end = memchr(0, message.body).filter(|&end| end >= 1).ok_or(malformed)?;
        let name = &message.body[1..end];
        if message.body[0] == b'S' && name.is_empty() && is_close {
            context.client.unnamed = None;
            self.unnamed = Unnamed::InBatch;
            self.push_unnamed(kind, Answer::Forward);
            return Ok(Some(self.pass(message, input, at, out)));
        }
        if message.body[0] != b'S' {
            self.push_extended(kind, Answer::Forward, None);
            return Ok(Some(self.pass(message, input, at, out)));
        }
        if name.is_empty() {
            if !self.bind_unnamed(input, context, out) {
                return Ok(None);
            }
            self.push_extended(kind, Answer::Forward, None);
            return Ok(Some(self.pass(message, input, at, out)));
        }
        if is_close {
            if let Some(before) = context.client.statements().set(name, None) {
                let effect = Effect { client: Some((name.into(), None, Some(before))), ..Effect::default() };
                if self.may_make_up() {
                    context.to_client.extend_from_slice(b"3\0\0\0\x04");
                    self.in_extended = true;
                } else {
                    self.push_extended(kind, Answer::Fake, Some(Box::new(effect)));
                }
                return Ok(Some(message.total));
            }
        }
        Ok(self.rename(message, 1..end, input, at, context, out))
    }

    /// Passes a message on with the statement name at `name` of its body replaced by the server's. Returns the bytes used; `None` if the
    /// message has to wait.
    fn rename(
        &mut self,
        message: &Message<'_>,
        name: std::ops::Range<usize>,
        input: &[u8],
        at: usize,
        context: &mut FrontendContext<'_>,
        out: &mut Splice<'_>,
    ) -> Option<usize> {
        self.keep_batch(input, out);
        let client_name = &message.body[name.clone()];
        let known = context.client.statements.as_ref().and_then(|table| table.get(client_name)).cloned();
        let substitute;
        let mut effect = None;
        let server_name: &[u8] = match &known {
            Some(statement) => {
                // A server that lacks it is given it only where it would have it for sure, had it been this client's alone.
                if !self.statements.has(statement.id) && self.depends() {
                    self.hold(input, out);
                    return None;
                }
                self.ensure(statement, input, out);
                &statement.name
            }
            // Unknown to us: perhaps made by SQL PREPARE. The server decides, except for names that only the pooler gives.
            None if prepared::is_reserved(client_name) => {
                substitute = prepared::nonexistent(client_name);
                effect = Some(aliased(&substitute, client_name));
                &substitute
            }
            None => {
                self.push_extended(kind_of(message.tag), Answer::Forward, None);
                return Some(self.pass(message, input, at, out));
            }
        };
        let length = (message.total - 1 - client_name.len() + server_name.len()) as u32;
        let composed = out.compose(input);
        composed.push(message.tag);
        composed.extend_from_slice(&length.to_be_bytes());
        composed.extend_from_slice(&message.body[..name.start]);
        composed.extend_from_slice(server_name);
        composed.extend_from_slice(&message.body[name.end..]);
        let there = HEADER + message.body.len();
        self.frontend_left = (message.total - there) as u32;
        self.in_extended = true;
        let statement = known.map_or(0, |statement| statement.id);
        self.push_op(Op { kind: kind_of(message.tag), answer: Answer::Forward, effect, statement });
        Some(there)
    }
}

/// Of the messages that name statements.
fn kind_of(tag: u8) -> OpKind {
    match tag {
        b'P' => OpKind::Parse,
        b'B' => OpKind::Bind,
        b'D' => OpKind::Describe,
        _ => OpKind::Close,
    }
}

/// Of a message that was sent with `server` in place of the client's own name, which is in no table.
fn aliased(server: &[u8], client: &[u8]) -> Box<Effect> {
    let alias = Alias { server: server.into(), client: client.into() };
    Box::new(Effect { alias: Some(alias), ..Effect::default() })
}
