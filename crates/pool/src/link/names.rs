// SPDX-License-Identifier: Apache-2.0
//! Errors in the client's words: PostgreSQL names the statement that it was asked about, which is ours, where the client knows its own.
//!
//! Texts are in the server's language, so only the name is looked for: the mark that no client's name reaches a server with, and what may
//! follow it in a name. Notices are passed on as they are: those that name statements are lines of the server's log (`client_min_messages =
//! log`), and what is there is to be found there.

use memchr::memchr;

use super::ClientSide;
use crate::prepared::{NAME_MARK, is_name_byte};

/// SQLSTATEs of the errors that name a statement (PostgreSQL's prepare.c and postgres.c): it exists already, it does not exist, and Bind has
/// not as many parameters as it.
const NAMING: [&[u8]; 3] = [b"42P05", b"26000", b"08P01"];

/// A name that was sent in place of the client's, which no table can tell.
#[derive(Debug, Clone)]
pub(super) struct Alias {
    pub(super) server: Box<[u8]>,
    pub(super) client: Box<[u8]>,
}

/// The body of an ErrorResponse with the client's name in place of the server's: that of `alias`, else what `client` calls the statement. Of
/// two names that it has for one statement any will do. `None` if there is nothing to replace.
pub(super) fn in_clients_words(
    body: &[u8],
    alias: Option<&Alias>,
    client: Option<&ClientSide>,
) -> Option<Vec<u8>> {
    let range = server_name(body)?;
    let server = &body[range.clone()];
    let own = match alias.filter(|alias| *alias.server == *server) {
        Some(alias) => &*alias.client,
        None => client?.named_statements()?.iter().find(|(_, statement)| *statement.name == *server)?.0,
    };
    Some([&body[..range.start], own, &body[range.end..]].concat())
}

/// Where an ErrorResponse about a statement has the name that it has on the server, if that is one which the pooler gives.
pub(super) fn server_name(body: &[u8]) -> Option<std::ops::Range<usize>> {
    let (mut names, mut text) = (false, None);
    let mut at = 0;
    while let Some(length) = memchr(0, &body[at..]).filter(|&length| length > 0) {
        let field = at..at + length;
        match body[at] {
            b'C' => names = NAMING.contains(&&body[at + 1..field.end]),
            b'M' => text = Some(field.clone()),
            _ => {}
        }
        at = field.end + 1;
    }
    let text = text.filter(|_| names)?;
    let start = text.start + memchr(NAME_MARK, &body[text.clone()])?;
    let rest = &body[start + 1..text.end];
    let end = start + 1 + rest.iter().position(|&byte| !is_name_byte(byte)).unwrap_or(rest.len());
    Some(start..end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prepared::Statements;

    fn client(names: &[&str]) -> (ClientSide, String) {
        let (table, mut side) = (Statements::default(), ClientSide::default());
        let mut server = String::new();
        for name in names {
            let statement = table.intern(name.len(), b"select 1\0\0\0");
            server = String::from_utf8(statement.name.to_vec()).expect("ASCII");
            side.statements().set(name.as_bytes(), Some(statement));
        }
        (side, server)
    }

    #[test]
    fn the_clients_name_takes_the_place_of_the_servers() {
        for (own, sqlstate, text) in [
            ("plan", "42P05", "prepared statement \"NAME\" already exists"),
            ("s", "26000", "la instrucción preparada «NAME» no existe"),
            (
                "plan",
                "08P01",
                "bind message supplies 2 parameters, but prepared statement \"NAME\" requires 1",
            ),
        ] {
            let (side, server) = client(&[own]);
            let body = |name: &str| {
                let text = text.replace("NAME", name);
                format!("SERROR\0VERROR\0C{sqlstate}\0M{text}\0Fprepare.c\0\0").into_bytes()
            };
            let told = in_clients_words(&body(&server), None, Some(&side)).expect("replaced");
            assert_eq!(String::from_utf8_lossy(&told), String::from_utf8_lossy(&body(own)));
        }
    }

    #[test]
    fn the_name_that_was_sent_goes_before_those_of_the_table() {
        let (side, server) = client(&["one", "two"]);
        let alias = Alias { server: server.as_bytes().into(), client: b"two".as_slice().into() };
        let body = format!("C42P05\0Mprepared statement \"{server}\" already exists\0\0");
        let told = in_clients_words(body.as_bytes(), Some(&alias), Some(&side)).expect("replaced");
        assert_eq!(told, b"C42P05\0Mprepared statement \"two\" already exists\0\0");
    }

    #[test]
    fn everything_else_stays() {
        let (side, server) = client(&["plan"]);
        for body in [
            format!("C42601\0Msyntax error at or near \"{server}\"\0\0"),
            format!("C26000\0Mprepared statement \"{server}x\" does not exist\0\0"),
            format!("C26000\0Mprepared statement \"x\" does not exist\0D{server}\0\0"),
            format!("C26000\0D{server}\0\0"),
            "C26000\0Mno end".to_owned(),
            String::new(),
        ] {
            assert_eq!(in_clients_words(body.as_bytes(), None, Some(&side)), None, "{body}");
        }
        let body = format!("C26000\0Mprepared statement \"{server}\" does not exist\0\0");
        assert_eq!(in_clients_words(body.as_bytes(), None, None), None);
    }
}
