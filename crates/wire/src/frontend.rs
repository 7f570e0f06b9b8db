// SPDX-License-Identifier: Apache-2.0
//! Messages that a client sends: views over their bodies, and [`build`] for those that a pooler sends itself.
//!
//! Every `decode` takes a whole body (without the 5 header bytes) and checks it to the end.
//! [`bind_names`] and [`first_name`] need only the beginning of a body.

mod auth;
pub mod build;
mod extended;
mod simple;

pub use auth::{PasswordMessage, SaslInitialResponse, SaslResponse};
pub use extended::{
    Bind, BindArguments, BindNames, Close, Describe, Execute, Parse, Target, bind_names, first_name,
};
pub use simple::{CopyData, CopyFail, FunctionCall, Query};

use crate::reader::Reader;
use crate::tag::frontend as tag;
use crate::{MAX_MESSAGE_LEN, MAX_SMALL_MESSAGE_LEN, MessageError};

/// The largest length word (bytes, body plus 4) of a message of type `tag` after the login, as PostgreSQL 14 and later have it
/// (`SocketBackend` in postgres.c). `None`: no such type. So a header alone tells whether its body is worth waiting for.
#[inline]
pub const fn len_max(tag: u8) -> Option<u32> {
    match tag {
        tag::BIND | tag::COPY_DATA | tag::FUNCTION_CALL | tag::PARSE | tag::QUERY => Some(MAX_MESSAGE_LEN),
        tag::CLOSE
        | tag::COPY_DONE
        | tag::COPY_FAIL
        | tag::DESCRIBE
        | tag::EXECUTE
        | tag::FLUSH
        | tag::SYNC
        | tag::TERMINATE => Some(MAX_SMALL_MESSAGE_LEN),
        _ => None,
    }
}

/// Any message of a client after the first packets.
#[derive(Clone, Copy, Debug)]
pub enum Message<'a> {
    /// Bind
    Bind(Bind<'a>),
    /// Close
    Close(Close<'a>),
    /// CopyData
    CopyData(CopyData<'a>),
    /// CopyDone
    CopyDone,
    /// CopyFail
    CopyFail(CopyFail<'a>),
    /// Describe
    Describe(Describe<'a>),
    /// Execute
    Execute(Execute<'a>),
    /// Flush
    Flush,
    /// FunctionCall
    FunctionCall(FunctionCall<'a>),
    /// Parse
    Parse(Parse<'a>),
    /// The body of type `p`, not decoded: the phase of the login says which of the four messages it is.
    Password(&'a [u8]),
    /// Query
    Query(Query<'a>),
    /// Sync
    Sync,
    /// Terminate
    Terminate,
}

impl<'a> Message<'a> {
    /// Decodes the body of a message of type `tag`.
    pub fn decode(tag: u8, body: &'a [u8]) -> Result<Self, MessageError> {
        let empty = |message| Reader::new(body).end().map(|()| message);
        match tag {
            tag::BIND => Bind::decode(body).map(Self::Bind),
            tag::CLOSE => Close::decode(body).map(Self::Close),
            tag::COPY_DATA => Ok(Self::CopyData(CopyData::decode(body))),
            tag::COPY_DONE => empty(Self::CopyDone),
            tag::COPY_FAIL => CopyFail::decode(body).map(Self::CopyFail),
            tag::DESCRIBE => Describe::decode(body).map(Self::Describe),
            tag::EXECUTE => Execute::decode(body).map(Self::Execute),
            tag::FLUSH => empty(Self::Flush),
            tag::FUNCTION_CALL => FunctionCall::decode(body).map(Self::FunctionCall),
            tag::PARSE => Parse::decode(body).map(Self::Parse),
            tag::PASSWORD => Ok(Self::Password(body)),
            tag::QUERY => Query::decode(body).map(Self::Query),
            tag::SYNC => empty(Self::Sync),
            tag::TERMINATE => empty(Self::Terminate),
            _ => Err(MessageError::UnknownType),
        }
    }
}
