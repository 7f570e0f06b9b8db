// SPDX-License-Identifier: Apache-2.0
//! Entry points for fuzzing, which `cargo test` replays over the seeds in `fuzz/corpus`.
//!
//! An input of [`client_auth`] and [`server_auth`] is one byte of set-up and then messages, each after its length in two bytes, big-endian. Nonces
//! and salts are the same in every run, so a seed can hold a whole login that succeeds.

use std::sync::Arc;

use crate::intake::{Event, Intake, MESSAGE_MAX, Offence};
use crate::{
    AuthContext, AuthOptions, ClientAuth, ClientLogin, ClientStep, Credential, Identity, Method, ScramKeys,
    Secret, ServerAuth, ServerLogin, ServerStep,
};

/// The user of every fuzzed login.
pub const USER: &str = "joe";
/// Its password.
pub const PASSWORD: &str = "secret";

fn context(setup: u8) -> Arc<AuthContext> {
    // Two rounds: the parsers are under test, not PBKDF2.
    Arc::new(AuthContext::repeatable(&AuthOptions {
        scram_iterations: 2,
        derive_elsewhere: setup & 32 != 0,
        ..AuthOptions::default()
    }))
}

fn client_derived(auth: &mut ClientAuth, step: ClientStep) -> ClientStep {
    match step {
        ClientStep::Derive(derivation) => auth.derived(derivation.run()),
        step => step,
    }
}

fn secret(choice: u8) -> Option<Secret> {
    match choice & 3 {
        0 => Some(Secret::parse(PASSWORD)),
        1 => Some(Secret::Md5(crate::md5::hash(PASSWORD.as_bytes(), USER.as_bytes()))),
        2 => Some(Secret::Scram(ScramKeys::derive(PASSWORD.as_bytes(), b"salt", 2).secret())),
        _ => None,
    }
}

fn client_login(setup: u8) -> ClientLogin<'static> {
    let method = [Method::ScramSha256, Method::Md5, Method::Plain, Method::ScramSha256];
    ClientLogin {
        method: method[usize::from(setup >> 3 & 3)],
        user: USER.as_bytes(),
        credential: secret(setup).map_or(Credential::UnknownUser, Credential::Secret),
        channel_binding: (setup & 4 != 0).then(|| vec![7; 32]),
        identity: Identity::default(),
    }
}

fn server_login(setup: u8) -> ServerLogin {
    ServerLogin {
        user: USER.into(),
        secret: secret(setup),
        keys: (setup & 8 != 0).then(|| ScramKeys::derive(PASSWORD.as_bytes(), b"salt", 2)),
        channel_binding: (setup & 4 != 0).then(|| vec![7; 32]),
    }
}

/// Splits the messages off; a length beyond the end means the rest.
fn messages(mut data: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (length, rest) = data.split_first_chunk()?;
        let (message, rest) = rest.split_at(rest.len().min(usize::from(u16::from_be_bytes(*length))));
        data = rest;
        Some(message)
    })
}

/// A client with arbitrary messages: never panics, never answers after the end, and a user without a secret
/// is never let in. Set-up byte: bits 0-1 secret, bit 2 channel binding, bits 3-4 method, bit 5 PBKDF2 elsewhere.
///
/// Returns whether the client was let in.
pub fn client_auth(data: &[u8]) -> bool {
    let Some((&setup, data)) = data.split_first() else { return false };
    let login = client_login(setup);
    let hopeless = login.credential == Credential::UnknownUser;
    let (mut auth, step) = ClientAuth::start(context(setup), login);
    let step = client_derived(&mut auth, step);
    assert!(matches!(step, ClientStep::Send(_)), "a password method asks first");
    let mut inside = false;
    for message in messages(data) {
        let step = auth.message(message);
        match client_derived(&mut auth, step) {
            ClientStep::Send(body) => assert!(body.len() >= 4),
            ClientStep::Derive(_) => panic!("derived keys lead on"),
            ClientStep::Done { .. } => {
                assert!(!hopeless, "let in without a secret");
                inside = true;
                break;
            }
            ClientStep::Failed(refusal) => {
                assert!(!refusal.client_message(USER).is_empty());
                break;
            }
        }
    }
    assert!(matches!(auth.message(b""), ClientStep::Failed(_)), "the exchange went on after its end");
    inside
}

/// A server with arbitrary messages: never panics, and after a SCRAM request only a proven server is
/// accepted. Set-up byte: bits 0-1 secret, bit 2 channel binding, bit 3 pass-through keys, bit 5 PBKDF2 elsewhere.
///
/// Returns whether the server let us in.
pub fn server_auth(data: &[u8]) -> bool {
    let Some((&setup, data)) = data.split_first() else { return false };
    let mut auth = ServerAuth::new(context(setup), server_login(setup));
    let (mut scram, mut proven) = (false, false);
    for message in messages(data) {
        // PBKDF2 costs what the server asks, up to a bound that is far too slow for fuzzing.
        let asked = message.windows(3).position(|w| w == b",i=").map_or(0, |at| message.len() - at);
        if asked > 6 {
            return false;
        }
        let step = match auth.message(message) {
            ServerStep::Derive(derivation) => auth.derived(derivation.run()),
            step => step,
        };
        match step {
            ServerStep::Derive(_) => panic!("derived keys lead on"),
            ServerStep::Send(body) => scram |= body.starts_with(b"SCRAM-"),
            ServerStep::Wait => proven = true,
            ServerStep::Done => {
                assert!(!scram || proven, "accepted a server that did not prove itself");
                return true;
            }
            ServerStep::Failed(_) => return false,
        }
    }
    false
}

/// What became of a client that was listened to from its first byte on.
#[derive(Debug, PartialEq, Eq)]
struct Conversation {
    /// What it wanted, in order.
    events: Vec<Event>,
    /// Bytes that were taken.
    used: usize,
    is_inside: bool,
}

/// A client from its first byte on, through its login: however the stream is cut, it goes the same way, with the one exception that
/// [`crate::intake`] names; nothing is taken after the end, and nobody is let in who did not ask and prove. Set-up: the byte of
/// [`client_auth`], then one whose bit 0 offers TLS and whose others seed the chunk sizes.
///
/// Returns whether the client was let in when its bytes came one by one.
pub fn startup(data: &[u8]) -> bool {
    let Some((&[setup, cut], stream)) = data.split_first_chunk() else { return false };
    let offers_tls = cut & 1 != 0;
    let singly = converse(setup, offers_tls, stream, || 1);
    let mut state = u32::from(cut) | 1;
    let random = || {
        state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
        1 + (state >> 24) as usize % 40
    };
    for other in
        [converse(setup, offers_tls, stream, || usize::MAX), converse(setup, offers_tls, stream, random)]
    {
        match other.events.split_last() {
            Some((Event::Refused(Offence::AroundEncryption), before)) => {
                assert!(singly.events.starts_with(before));
                assert!(!other.is_inside);
            }
            _ => assert_eq!(other, singly),
        }
    }
    singly.is_inside
}

/// Listens until the end of the stream or of the conversation. TLS is not spoken: its inside stands in the clear behind the request, or
/// behind the first byte of a handshake.
fn converse(setup: u8, offers_tls: bool, mut stream: &[u8], mut size: impl FnMut() -> usize) -> Conversation {
    let (mut intake, mut inbox, mut auth) = (Intake::default(), Vec::new(), None);
    let mut all = Conversation { events: Vec::new(), used: 0, is_inside: false };
    let mut over = false;
    while !stream.is_empty() && !over {
        let (chunk, rest) = stream.split_at(stream.len().min(size()));
        stream = rest;
        inbox.extend_from_slice(chunk);
        loop {
            let before = inbox.len();
            let Some(event) = intake.next(&mut inbox, offers_tls) else {
                assert_eq!(inbox.len(), before, "what is incomplete stays");
                assert!(before <= MESSAGE_MAX, "more is kept than any message has");
                break;
            };
            all.used += before - inbox.len();
            let (event, ends) = obey(event, setup, &mut auth, &mut all, &mut inbox);
            all.events.push(event);
            over |= ends;
            if over {
                break;
            }
        }
    }
    let encrypted = |event: &&Event| matches!(event, Event::Tls | Event::DirectTls(_) | Event::NoEncryption);
    assert!(all.events.iter().filter(encrypted).count() <= 2, "encryption is asked for once of each kind");
    all
}

/// Does what the event wants; tells whether it was the last one.
fn obey(
    event: Event,
    setup: u8,
    auth: &mut Option<ClientAuth>,
    all: &mut Conversation,
    inbox: &mut Vec<u8>,
) -> (Event, bool) {
    match event {
        Event::DirectTls(hello) => {
            all.used -= hello.len() - 1;
            inbox.extend_from_slice(&hello[1..]);
            (Event::DirectTls(vec![hello[0]]), false)
        }
        Event::Startup(startup) => {
            assert!(auth.is_none() && !startup.user.is_empty() && !startup.database.is_empty());
            let (mut machine, step) = ClientAuth::start(context(setup), client_login(setup));
            let step = client_derived(&mut machine, step);
            assert!(matches!(step, ClientStep::Send(_)), "a password method asks first");
            *auth = Some(machine);
            (Event::Startup(startup), false)
        }
        Event::Proof(body) => {
            let machine = auth.as_mut().expect("a proof of somebody");
            let step = machine.message(&body);
            let step = client_derived(machine, step);
            all.is_inside = matches!(step, ClientStep::Done { .. });
            assert!(!all.is_inside || setup & 3 != 3, "let in without a secret");
            (Event::Proof(body), !matches!(step, ClientStep::Send(_)))
        }
        Event::Cancel { .. } | Event::Terminate | Event::Refused(_) => (event, true),
        Event::NoEncryption | Event::Tls => (event, false),
    }
}

#[cfg(test)]
mod tests;
