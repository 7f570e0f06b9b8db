// SPDX-License-Identifier: Apache-2.0
//! Recognising message boundaries in bytes of unknown position, strictly enough that chance does not pass.

use underpass_wire::backend::{Fields, TransactionStatus};
use underpass_wire::{Header, MAX_MESSAGE_LEN, tag};

/// A whole ReadyForQuery.
const READY_LEN: usize = 6;
/// Where the message before the last ReadyForQuery is looked for, bytes from the end.
const TAIL_BYTES_MAX: usize = 16 << 10;

/// How the last response in a chunk ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Closing<'a> {
    /// CommandComplete with this tag.
    Complete(&'a [u8]),
    /// EmptyQueryResponse.
    Empty,
    /// PortalSuspended.
    Suspended,
    /// ErrorResponse with this body.
    Error(&'a [u8]),
    /// Another message, or nothing that is recognised.
    Other,
}

/// The end of a chunk that ends in ReadyForQuery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tail<'a> {
    pub closing: Closing<'a>,
    pub status: TransactionStatus,
    /// Where the ReadyForQuery begins.
    pub ready_at: usize,
}

/// Whether the chunk is whole messages of a client, the last of which it waits for, or leaves with.
pub(super) fn frontend_chain(mut bytes: &[u8]) -> bool {
    let mut last = 0;
    while !bytes.is_empty() {
        let Ok(Some(header)) = Header::parse_max(bytes, MAX_MESSAGE_LEN) else { return false };
        if !tag::frontend::ALL.contains(&header.tag) || header.total() > bytes.len() {
            return false;
        }
        if !plausible(header, &bytes[Header::SIZE..header.total()]) {
            return false;
        }
        last = header.tag;
        bytes = &bytes[header.total()..];
    }
    matches!(last, b'Q' | b'S' | b'F' | b'H' | b'X')
}

/// Whether the chunk may begin with a client's message: only good where a boundary is likely anyway.
pub(super) fn frontend_begin(bytes: &[u8]) -> bool {
    match Header::parse_max(bytes, MAX_MESSAGE_LEN) {
        Ok(Some(header)) => {
            tag::frontend::ALL.contains(&header.tag)
                && header.tag != tag::frontend::PASSWORD
                && bytes.get(Header::SIZE..header.total()).is_none_or(|body| plausible(header, body))
        }
        Ok(None) => bytes.first().is_some_and(|tag| tag::frontend::ALL.contains(tag)),
        Err(_) => false,
    }
}

/// Whether the whole body fits the type.
fn plausible(header: Header, body: &[u8]) -> bool {
    match header.tag {
        tag::frontend::SYNC | tag::frontend::FLUSH | tag::frontend::TERMINATE | tag::frontend::COPY_DONE => {
            body.is_empty()
        }
        tag::frontend::COPY_DATA | tag::frontend::PASSWORD => true,
        _ => underpass_wire::frontend::Message::decode(header.tag, body).is_ok(),
    }
}

/// The end of a response, if the chunk ends in ReadyForQuery behind a message that can stand before one.
pub(super) fn backend_tail(bytes: &[u8]) -> Option<Tail<'_>> {
    let ready_at = bytes.len().checked_sub(READY_LEN)?;
    let ready = &bytes[ready_at..];
    if ready[..Header::SIZE] != [b'Z', 0, 0, 0, 5] {
        return None;
    }
    let status = TransactionStatus::from_byte(ready[Header::SIZE])?;
    let from = ready_at.saturating_sub(TAIL_BYTES_MAX);
    for at in (from..ready_at.saturating_sub(Header::SIZE - 1)).rev() {
        let Ok(Some(header)) = Header::parse(&bytes[at..]) else { continue };
        if at + header.total() != ready_at {
            continue;
        }
        if let Some(closing) = closing(header.tag, &bytes[at + Header::SIZE..ready_at]) {
            return Some(Tail { closing, status, ready_at });
        }
    }
    // Alone, it answers a Sync without statements, or follows a message that is not recognised here.
    (ready_at == 0 || backend_chain(bytes)).then_some(Tail { closing: Closing::Other, status, ready_at })
}

/// Whether the chunk is whole messages of a server, the last a ReadyForQuery.
pub(super) fn backend_chain(mut bytes: &[u8]) -> bool {
    let mut last = 0;
    while !bytes.is_empty() {
        let Ok(Some(header)) = Header::parse(bytes) else { return false };
        if !tag::backend::ALL.contains(&header.tag) || header.total() > bytes.len() {
            return false;
        }
        last = header.tag;
        bytes = &bytes[header.total()..];
    }
    last == tag::backend::READY_FOR_QUERY
}

fn closing(tag: u8, body: &[u8]) -> Option<Closing<'_>> {
    match tag {
        b'C' => {
            let text = body.strip_suffix(b"\0")?;
            let is_tag = text.first().is_some_and(u8::is_ascii_uppercase)
                && text.iter().all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || *b == b' ');
            is_tag.then_some(Closing::Complete(text))
        }
        b'I' => body.is_empty().then_some(Closing::Empty),
        b's' => body.is_empty().then_some(Closing::Suspended),
        b'E' => {
            let fields = Fields::decode(body).ok()?;
            (fields.sqlstate().is_some() && fields.severity().is_some()).then_some(Closing::Error(body))
        }
        _ => None,
    }
}
