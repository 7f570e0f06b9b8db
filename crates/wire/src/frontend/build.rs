// SPDX-License-Identifier: Apache-2.0
//! Builders of client messages: what a pooler sends to servers. Each appends one message to `out`.
//!
//! Strings end at their first NUL. More than 65535 items or 2 GiB is a bug of the caller and panics.

use super::Target;
use crate::builder::{cstr, list, message, u16, u32, until_nul, value};
use crate::header::Header;
use crate::tag::frontend as tag;

/// Query.
pub fn query(out: &mut Vec<u8>, sql: &[u8]) {
    message(out, tag::QUERY, |out| cstr(out, sql));
}

/// Parse; a type of 0 leaves it to the server.
pub fn parse(out: &mut Vec<u8>, name: &[u8], sql: &[u8], param_types: impl IntoIterator<Item = u32>) {
    message(out, tag::PARSE, |out| {
        cstr(out, name);
        cstr(out, sql);
        list(out, param_types, u32);
    });
}

/// Header and statement name of a Parse whose other `rest_len` bytes the caller forwards.
pub fn parse_head(out: &mut Vec<u8>, name: &[u8], rest_len: usize) {
    let name = until_nul(name);
    out.extend_from_slice(&Header::new(tag::PARSE, name.len() + 1 + rest_len).to_bytes());
    cstr(out, name);
}

/// Bind.
pub fn bind<'a>(
    out: &mut Vec<u8>,
    portal: &[u8],
    statement: &[u8],
    param_formats: impl IntoIterator<Item = u16>,
    params: impl IntoIterator<Item = Option<&'a [u8]>>,
    result_formats: impl IntoIterator<Item = u16>,
) {
    message(out, tag::BIND, |out| {
        cstr(out, portal);
        cstr(out, statement);
        list(out, param_formats, u16);
        list(out, params, value);
        list(out, result_formats, u16);
    });
}

/// Header and names of a Bind whose other `rest_len` bytes the caller forwards: how a statement is renamed
/// without waiting for the parameters.
pub fn bind_head(out: &mut Vec<u8>, portal: &[u8], statement: &[u8], rest_len: usize) {
    let (portal, statement) = (until_nul(portal), until_nul(statement));
    let body_len = portal.len() + 1 + statement.len() + 1 + rest_len;
    out.extend_from_slice(&Header::new(tag::BIND, body_len).to_bytes());
    cstr(out, portal);
    cstr(out, statement);
}

/// Describe.
pub fn describe(out: &mut Vec<u8>, target: Target, name: &[u8]) {
    message(out, tag::DESCRIBE, |out| {
        out.push(target.to_byte());
        cstr(out, name);
    });
}

/// Close.
pub fn close(out: &mut Vec<u8>, target: Target, name: &[u8]) {
    message(out, tag::CLOSE, |out| {
        out.push(target.to_byte());
        cstr(out, name);
    });
}

/// Execute; `max_rows` 0 returns all rows.
pub fn execute(out: &mut Vec<u8>, portal: &[u8], max_rows: i32) {
    message(out, tag::EXECUTE, |out| {
        cstr(out, portal);
        out.extend_from_slice(&max_rows.to_be_bytes());
    });
}

/// FunctionCall; `result_format` is 0 (text) or 1 (binary).
pub fn function_call<'a>(
    out: &mut Vec<u8>,
    function: u32,
    arg_formats: impl IntoIterator<Item = u16>,
    args: impl IntoIterator<Item = Option<&'a [u8]>>,
    result_format: u16,
) {
    message(out, tag::FUNCTION_CALL, |out| {
        u32(out, function);
        list(out, arg_formats, u16);
        list(out, args, value);
        u16(out, result_format);
    });
}

/// Sync.
pub fn sync(out: &mut Vec<u8>) {
    message(out, tag::SYNC, |_| {});
}

/// Flush.
pub fn flush(out: &mut Vec<u8>) {
    message(out, tag::FLUSH, |_| {});
}

/// Terminate.
pub fn terminate(out: &mut Vec<u8>) {
    message(out, tag::TERMINATE, |_| {});
}

/// CopyData.
pub fn copy_data(out: &mut Vec<u8>, data: &[u8]) {
    message(out, tag::COPY_DATA, |out| out.extend_from_slice(data));
}

/// CopyDone.
pub fn copy_done(out: &mut Vec<u8>) {
    message(out, tag::COPY_DONE, |_| {});
}

/// CopyFail.
pub fn copy_fail(out: &mut Vec<u8>, reason: &[u8]) {
    message(out, tag::COPY_FAIL, |out| cstr(out, reason));
}

/// PasswordMessage: a password in clear, or `md5` and 32 hexadecimal digits.
pub fn password(out: &mut Vec<u8>, password: &[u8]) {
    message(out, tag::PASSWORD, |out| cstr(out, password));
}

/// SASLInitialResponse.
pub fn sasl_initial_response(out: &mut Vec<u8>, mechanism: &[u8], data: Option<&[u8]>) {
    message(out, tag::PASSWORD, |out| {
        cstr(out, mechanism);
        value(out, data);
    });
}

/// SASLResponse.
pub fn sasl_response(out: &mut Vec<u8>, data: &[u8]) {
    message(out, tag::PASSWORD, |out| out.extend_from_slice(data));
}
