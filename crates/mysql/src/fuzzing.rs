// SPDX-License-Identifier: Apache-2.0
//! Entry point of the fuzz target `mysql_messages`: takes any bytes, and panics when an invariant breaks.

use crate::capability::Capabilities;
use crate::exchange::{Exchange, Session, Step};
use crate::handshake::{AuthSwitch, First, Greeting};
use crate::value::Parameter;
use crate::{command, packet, response};

/// The first byte is a command, the next four capabilities (the last of them also whether they are known); the rest is a stream of
/// packets, read as everything that it may be.
pub fn messages(data: &[u8]) {
    let Some((head, mut stream)) = data.split_first_chunk::<5>() else { return };
    let capabilities = Capabilities(u64::from(u32::from_le_bytes([head[1], head[2], head[3], head[4]])));
    let mut session = if head[4] & 1 == 0 { Session::joined() } else { Session::new(capabilities) };
    let mut exchange = Exchange::new(head[0]);
    let mut types = Vec::new();
    while let Ok(Some(len)) = packet::message_len(stream) {
        let (message, rest) = stream.split_at(len);
        stream = rest;
        let payload = packet::payload(message);
        let mut again = Vec::new();
        packet::put_message(&mut again, message[3], &payload);
        assert_eq!(again, message, "framing is its own inverse");
        request(&payload, capabilities, &mut types);
        let was_done = exchange.is_done();
        match exchange.message(&payload, payload.len(), &mut session) {
            Ok(Step::End { last, .. }) => assert_eq!(last, exchange.is_done()),
            Ok(Step::WantsFile { .. }) => assert!(exchange.wants_file()),
            Ok(_) => assert!(!was_done && !exchange.is_done()),
            Err(_) => {}
        }
        exchange.end_if_complete(&mut session);
    }
}

fn request(payload: &[u8], capabilities: Capabilities, types: &mut Vec<u16>) {
    let _ = Greeting::decode(payload);
    let _ = AuthSwitch::decode(payload);
    let _ = command::change_user(payload);
    let _ = command::LongData::decode(payload);
    let _ = command::statement_number(payload);
    if let Ok(row) = response::text_row(payload) {
        assert!(row.len() <= payload.len());
    }
    if let Ok(First::Login(login)) = First::decode(payload) {
        assert!(login.attributes.len() <= payload.len());
    }
    if let Ok(text) = command::query_text(payload) {
        assert!(payload.ends_with(text));
    }
    for count in [0, 1, 9] {
        let is_long = |at| at == 3;
        if let Ok(execute) = command::Execute::decode(payload, count, capabilities, types, is_long) {
            let bytes: usize =
                execute.parameters.iter().filter_map(Parameter::text).map(|text| text.len()).sum();
            // No value has a text longer than 330 bytes but those that are as long on the wire: f64::MAX has 309 digits.
            assert!(bytes <= payload.len() * 350);
        }
        assert!(types.len() <= payload.len());
        types.clear();
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn corpus_of_messages() {
        underpass_wire::fuzzing::over_corpus("mysql_messages", 2, 800, super::messages);
    }
}
