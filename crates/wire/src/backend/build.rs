// SPDX-License-Identifier: Apache-2.0
//! Builders of server messages: what a pooler says to clients. Each appends one message to `out`.
//!
//! Strings end at their first NUL. More than 65535 items or 2 GiB is a bug of the caller and panics.

use super::{FieldDescription, Report, TransactionStatus, field};
use crate::builder::{cstr, list, message, u16, u32, until_nul, value};
use crate::startup::ProtocolVersion;
use crate::tag::backend as tag;

fn authentication(out: &mut Vec<u8>, code: u32, data: &[u8]) {
    message(out, tag::AUTHENTICATION, |out| {
        u32(out, code);
        out.extend_from_slice(data);
    });
}

/// AuthenticationOk.
pub fn authentication_ok(out: &mut Vec<u8>) {
    authentication(out, 0, b"");
}

/// AuthenticationCleartextPassword.
pub fn authentication_cleartext_password(out: &mut Vec<u8>) {
    authentication(out, 3, b"");
}

/// AuthenticationMD5Password; the salt must be fresh randomness.
pub fn authentication_md5_password(out: &mut Vec<u8>, salt: [u8; 4]) {
    authentication(out, 5, &salt);
}

/// AuthenticationSASL: mechanisms in order of preference. Empty names would end the list and are left out.
pub fn authentication_sasl<'a>(out: &mut Vec<u8>, mechanisms: impl IntoIterator<Item = &'a str>) {
    message(out, tag::AUTHENTICATION, |out| {
        u32(out, 10);
        for name in mechanisms.into_iter().filter(|name| !until_nul(name.as_bytes()).is_empty()) {
            cstr(out, name.as_bytes());
        }
        out.push(0);
    });
}

/// AuthenticationSASLContinue.
pub fn authentication_sasl_continue(out: &mut Vec<u8>, data: &[u8]) {
    authentication(out, 11, data);
}

/// AuthenticationSASLFinal.
pub fn authentication_sasl_final(out: &mut Vec<u8>, data: &[u8]) {
    authentication(out, 12, data);
}

/// ParameterStatus.
pub fn parameter_status(out: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    message(out, tag::PARAMETER_STATUS, |out| {
        cstr(out, name);
        cstr(out, value);
    });
}

/// BackendKeyData. The key must have 4 bytes for a client of protocol 3.0, 4..=256 with 3.2.
pub fn backend_key_data(out: &mut Vec<u8>, process_id: u32, secret_key: &[u8]) {
    message(out, tag::BACKEND_KEY_DATA, |out| {
        u32(out, process_id);
        out.extend_from_slice(secret_key);
    });
}

/// ReadyForQuery.
pub fn ready_for_query(out: &mut Vec<u8>, status: TransactionStatus) {
    message(out, tag::READY_FOR_QUERY, |out| out.push(status.to_byte()));
}

/// ErrorResponse.
pub fn error_response(out: &mut Vec<u8>, report: &Report<'_>) {
    message(out, tag::ERROR_RESPONSE, |out| fields(out, report));
}

/// NoticeResponse.
pub fn notice_response(out: &mut Vec<u8>, report: &Report<'_>) {
    message(out, tag::NOTICE_RESPONSE, |out| fields(out, report));
}

/// The fields in the order in which PostgreSQL sends them.
fn fields(out: &mut Vec<u8>, report: &Report<'_>) {
    let severity = report.severity.as_str();
    let all = [
        (field::SEVERITY_LOCAL, Some(severity)),
        (field::SEVERITY, Some(severity)),
        (field::CODE, Some(report.code.as_str())),
        (field::MESSAGE, Some(report.message)),
        (field::DETAIL, report.detail),
        (field::HINT, report.hint),
    ];
    for (code, text) in all {
        if let Some(text) = text {
            out.push(code);
            cstr(out, text.as_bytes());
        }
    }
    out.push(0);
}

/// NegotiateProtocolVersion: the newest version we speak (sent whole, as PostgreSQL does) and the `_pq_.`
/// options of the client that we do not know.
pub fn negotiate_protocol_version<'a>(
    out: &mut Vec<u8>,
    newest: ProtocolVersion,
    options: impl IntoIterator<Item = &'a [u8]>,
) {
    message(out, tag::NEGOTIATE_PROTOCOL_VERSION, |out| {
        u32(out, newest.to_word());
        let at = out.len();
        u32(out, 0);
        let mut count = 0u32;
        for option in options {
            cstr(out, option);
            count += 1; // each took a byte of a message below 2 GiB
        }
        out[at..at + 4].copy_from_slice(&count.to_be_bytes());
    });
}

/// RowDescription.
pub fn row_description<'a>(out: &mut Vec<u8>, fields: impl IntoIterator<Item = FieldDescription<'a>>) {
    message(out, tag::ROW_DESCRIPTION, |out| {
        list(out, fields, |out, field| {
            cstr(out, field.name);
            u32(out, field.table_oid);
            out.extend_from_slice(&field.attribute.to_be_bytes());
            u32(out, field.type_oid);
            out.extend_from_slice(&field.type_size.to_be_bytes());
            out.extend_from_slice(&field.type_modifier.to_be_bytes());
            u16(out, field.format);
        });
    });
}

/// DataRow: `None` is null; values may be `&str`, `&[u8]`, `String`, ...
pub fn data_row<V: AsRef<[u8]>>(out: &mut Vec<u8>, columns: impl IntoIterator<Item = Option<V>>) {
    message(out, tag::DATA_ROW, |out| {
        list(out, columns, |out, column| value(out, column.as_ref().map(V::as_ref)));
    });
}

/// ParameterDescription.
pub fn parameter_description(out: &mut Vec<u8>, types: impl IntoIterator<Item = u32>) {
    message(out, tag::PARAMETER_DESCRIPTION, |out| list(out, types, u32));
}

/// CommandComplete, with the whole tag (`SHOW`, `SELECT 1`).
pub fn command_complete(out: &mut Vec<u8>, command: &str) {
    message(out, tag::COMMAND_COMPLETE, |out| cstr(out, command.as_bytes()));
}

/// NotificationResponse.
pub fn notification_response(out: &mut Vec<u8>, process_id: u32, channel: &[u8], payload: &[u8]) {
    message(out, tag::NOTIFICATION_RESPONSE, |out| {
        u32(out, process_id);
        cstr(out, channel);
        cstr(out, payload);
    });
}

/// EmptyQueryResponse.
pub fn empty_query_response(out: &mut Vec<u8>) {
    message(out, tag::EMPTY_QUERY_RESPONSE, |_| {});
}

/// ParseComplete.
pub fn parse_complete(out: &mut Vec<u8>) {
    message(out, tag::PARSE_COMPLETE, |_| {});
}

/// BindComplete.
pub fn bind_complete(out: &mut Vec<u8>) {
    message(out, tag::BIND_COMPLETE, |_| {});
}

/// CloseComplete.
pub fn close_complete(out: &mut Vec<u8>) {
    message(out, tag::CLOSE_COMPLETE, |_| {});
}

/// NoData.
pub fn no_data(out: &mut Vec<u8>) {
    message(out, tag::NO_DATA, |_| {});
}

/// PortalSuspended.
pub fn portal_suspended(out: &mut Vec<u8>) {
    message(out, tag::PORTAL_SUSPENDED, |_| {});
}

/// CopyInResponse; formats: 0 text, 1 binary.
pub fn copy_in_response(out: &mut Vec<u8>, format: u8, column_formats: impl IntoIterator<Item = u16>) {
    copy_response(out, tag::COPY_IN_RESPONSE, format, column_formats);
}

/// CopyOutResponse; formats: 0 text, 1 binary.
pub fn copy_out_response(out: &mut Vec<u8>, format: u8, column_formats: impl IntoIterator<Item = u16>) {
    copy_response(out, tag::COPY_OUT_RESPONSE, format, column_formats);
}

/// CopyBothResponse; formats: 0 text, 1 binary.
pub fn copy_both_response(out: &mut Vec<u8>, format: u8, column_formats: impl IntoIterator<Item = u16>) {
    copy_response(out, tag::COPY_BOTH_RESPONSE, format, column_formats);
}

fn copy_response(out: &mut Vec<u8>, tag: u8, format: u8, column_formats: impl IntoIterator<Item = u16>) {
    message(out, tag, |out| {
        out.push(format);
        list(out, column_formats, u16);
    });
}

/// CopyData.
pub fn copy_data(out: &mut Vec<u8>, data: &[u8]) {
    message(out, tag::COPY_DATA, |out| out.extend_from_slice(data));
}

/// CopyDone.
pub fn copy_done(out: &mut Vec<u8>) {
    message(out, tag::COPY_DONE, |_| {});
}

/// FunctionCallResponse; `None` is null.
pub fn function_call_response(out: &mut Vec<u8>, result: Option<&[u8]>) {
    message(out, tag::FUNCTION_CALL_RESPONSE, |out| value(out, result));
}
