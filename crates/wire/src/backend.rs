// SPDX-License-Identifier: Apache-2.0
//! Messages that a server sends: views over their bodies, and [`build`] for those that a pooler sends as a
//! server. Every `decode` takes a whole body (without the 5 header bytes) and checks it to the end.

mod authentication;
pub mod build;
mod fields;
mod rows;
mod status;

pub use authentication::{Authentication, Mechanisms};
pub use fields::{Fields, Report, Severity, field};
pub use rows::{
    CopyResponse, DataRow, FieldDescription, FunctionCallResponse, ParameterDescription, RowDescription,
};
pub use status::{
    BackendKeyData, CommandComplete, NegotiateProtocolVersion, NotificationResponse, ParameterStatus,
    TransactionStatus,
};

use crate::MessageError;
use crate::reader::Reader;
use crate::tag::backend as tag;

/// Any message of a server.
#[derive(Clone, Copy, Debug)]
pub enum Message<'a> {
    /// AuthenticationXXX
    Authentication(Authentication<'a>),
    /// BackendKeyData
    BackendKeyData(BackendKeyData<'a>),
    /// BindComplete
    BindComplete,
    /// CloseComplete
    CloseComplete,
    /// CommandComplete
    CommandComplete(CommandComplete<'a>),
    /// CopyData: the whole body
    CopyData(&'a [u8]),
    /// CopyDone
    CopyDone,
    /// CopyInResponse
    CopyInResponse(CopyResponse<'a>),
    /// CopyOutResponse
    CopyOutResponse(CopyResponse<'a>),
    /// CopyBothResponse
    CopyBothResponse(CopyResponse<'a>),
    /// DataRow
    DataRow(DataRow<'a>),
    /// EmptyQueryResponse
    EmptyQueryResponse,
    /// ErrorResponse
    ErrorResponse(Fields<'a>),
    /// FunctionCallResponse
    FunctionCallResponse(FunctionCallResponse<'a>),
    /// NegotiateProtocolVersion
    NegotiateProtocolVersion(NegotiateProtocolVersion<'a>),
    /// NoData
    NoData,
    /// NoticeResponse
    NoticeResponse(Fields<'a>),
    /// NotificationResponse
    NotificationResponse(NotificationResponse<'a>),
    /// ParameterDescription
    ParameterDescription(ParameterDescription<'a>),
    /// ParameterStatus
    ParameterStatus(ParameterStatus<'a>),
    /// ParseComplete
    ParseComplete,
    /// PortalSuspended
    PortalSuspended,
    /// ReadyForQuery
    ReadyForQuery(TransactionStatus),
    /// RowDescription
    RowDescription(RowDescription<'a>),
}

impl<'a> Message<'a> {
    /// Decodes the body of a message of type `tag`.
    pub fn decode(tag: u8, body: &'a [u8]) -> Result<Self, MessageError> {
        let empty = |message| Reader::new(body).end().map(|()| message);
        match tag {
            tag::AUTHENTICATION => Authentication::decode(body).map(Self::Authentication),
            tag::BACKEND_KEY_DATA => BackendKeyData::decode(body).map(Self::BackendKeyData),
            tag::BIND_COMPLETE => empty(Self::BindComplete),
            tag::CLOSE_COMPLETE => empty(Self::CloseComplete),
            tag::COMMAND_COMPLETE => CommandComplete::decode(body).map(Self::CommandComplete),
            tag::COPY_DATA => Ok(Self::CopyData(body)),
            tag::COPY_DONE => empty(Self::CopyDone),
            tag::COPY_IN_RESPONSE => CopyResponse::decode(body).map(Self::CopyInResponse),
            tag::COPY_OUT_RESPONSE => CopyResponse::decode(body).map(Self::CopyOutResponse),
            tag::COPY_BOTH_RESPONSE => CopyResponse::decode(body).map(Self::CopyBothResponse),
            tag::DATA_ROW => DataRow::decode(body).map(Self::DataRow),
            tag::EMPTY_QUERY_RESPONSE => empty(Self::EmptyQueryResponse),
            tag::ERROR_RESPONSE => Fields::decode(body).map(Self::ErrorResponse),
            tag::FUNCTION_CALL_RESPONSE => FunctionCallResponse::decode(body).map(Self::FunctionCallResponse),
            tag::NEGOTIATE_PROTOCOL_VERSION => {
                NegotiateProtocolVersion::decode(body).map(Self::NegotiateProtocolVersion)
            }
            tag::NO_DATA => empty(Self::NoData),
            tag::NOTICE_RESPONSE => Fields::decode(body).map(Self::NoticeResponse),
            tag::NOTIFICATION_RESPONSE => NotificationResponse::decode(body).map(Self::NotificationResponse),
            tag::PARAMETER_DESCRIPTION => ParameterDescription::decode(body).map(Self::ParameterDescription),
            tag::PARAMETER_STATUS => ParameterStatus::decode(body).map(Self::ParameterStatus),
            tag::PARSE_COMPLETE => empty(Self::ParseComplete),
            tag::PORTAL_SUSPENDED => empty(Self::PortalSuspended),
            tag::READY_FOR_QUERY => TransactionStatus::decode(body).map(Self::ReadyForQuery),
            tag::ROW_DESCRIPTION => RowDescription::decode(body).map(Self::RowDescription),
            _ => Err(MessageError::UnknownType),
        }
    }
}
