// SPDX-License-Identifier: Apache-2.0
//! Entry points for fuzzing, which `cargo test` replays over the seeds in `fuzz/corpus`.
//!
//! An input is one byte of set-up and then messages, each after its length in two bytes, big-endian. Nonces
//! and salts are the same in every run, so a seed can hold a whole login that succeeds.

use std::sync::Arc;

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

#[cfg(test)]
mod tests;
