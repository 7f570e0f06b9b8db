// SPDX-License-Identifier: Apache-2.0
//! What exports say of messages and statements of MariaDB and MySQL.

use std::fmt::Write as _;

use underpass_mysql::command::{self, COM_QUERY, COM_STMT_PREPARE};
use underpass_mysql::packet::{self, HEADER_BYTES};
use underpass_trace::statements::{Request, Statement};

use crate::shell;

/// A client's message, as far as it can be told without its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Told<'a> {
    /// A command that is a text.
    Text { name: &'static str, text: &'a [u8] },
    /// A command about a prepared statement, or of another kind.
    Command { name: &'static str, statement: Option<u32> },
}

/// What a message is that is no part of a local file; `None` when it is none, and of a text in several packets.
pub(crate) fn told(message: &[u8]) -> Option<Told<'_>> {
    if packet::message_len(message) != Ok(Some(message.len())) {
        return None;
    }
    let payload = &message[HEADER_BYTES..];
    let (&byte, text) = payload.split_first()?;
    let name = command::name(byte)?;
    match byte {
        COM_QUERY | COM_STMT_PREPARE if payload.len() < packet::PAYLOAD_BYTES_MAX => {
            Some(Told::Text { name, text })
        }
        COM_QUERY | COM_STMT_PREPARE => None,
        _ => Some(Told::Command { name, statement: command::statement_number(payload) }),
    }
}

/// The statement for the server's shell, or why there is none.
pub(crate) fn script(statement: &Statement, text: &str) -> Result<String, String> {
    if text.get(..9).is_some_and(|verb| verb.eq_ignore_ascii_case("load data")) {
        return Err("LOAD DATA: its data is not in the script".into());
    }
    if statement.max_rows > 0 {
        return Err("rows of a cursor: the script has what opened it".into());
    }
    let values = &statement.parameters.values;
    if values.is_empty() {
        if statement.kind == Request::Extended && text.contains('?') {
            return Err("a prepared statement with ? whose parameters are not known".into());
        }
        let text = shell::mysql(text)?;
        // A text with a semicolon in it may be one statement, or be sent as several.
        let (before, end, after) = match text.contains(';') {
            true if text.contains("//") => {
                return Err("a text with ; and //, which no delimiter keeps whole".into());
            }
            true => ("delimiter //\n", "//", "delimiter ;\n"),
            false => ("", ";", ""),
        };
        return Ok(format!("{before}{text}\n{end}\n{after}"));
    }
    let mut script = format!("PREPARE underpass FROM {};\n", literal(text.as_bytes()));
    let names: Vec<String> = (1..=values.len()).map(|number| format!("@underpass_{number}")).collect();
    for (name, value) in names.iter().zip(values) {
        let value = value.as_deref().map_or_else(|| "NULL".to_owned(), literal);
        let _ = writeln!(script, "SET {name} = {value};");
    }
    let _ = writeln!(script, "EXECUTE underpass USING {};\nDEALLOCATE PREPARE underpass;", names.join(", "));
    Ok(script)
}

/// A literal: a string without NO_BACKSLASH_ESCAPES, in hexadecimal where it is no text.
fn literal(value: &[u8]) -> String {
    match std::str::from_utf8(value) {
        Ok(text) if !text.contains('\0') => format!("'{}'", text.replace('\\', "\\\\").replace('\'', "''")),
        _ => format!("X'{}'", &crate::value::hex(value)[2..]),
    }
}
