// SPDX-License-Identifier: Apache-2.0
//! Makes the seeds, checks that the files hold them, and replays every file of the corpora.

use std::collections::BTreeMap;
use std::path::PathBuf;

use proptest::prelude::*;

use underpass_wire::startup::{ProtocolVersion, build};

use super::*;
use crate::Password;

fn corpus(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "../../fuzz/corpus", name].iter().collect()
}

fn input(setup: u8, messages: &[Vec<u8>]) -> Vec<u8> {
    let mut data = vec![setup];
    for message in messages {
        data.extend_from_slice(&(message.len() as u16).to_be_bytes());
        data.extend_from_slice(message);
    }
    data
}

/// What `password` sends to the client machine of `setup`, with the nonces that fuzzing uses.
fn client_seed(setup: u8, password: &str) -> Vec<u8> {
    let (mut auth, mut step) = ClientAuth::start(context(setup), client_login(setup));
    let mut peer = ServerAuth::new(
        context(setup),
        ServerLogin {
            user: USER.into(),
            secret: Some(Secret::Plain(Password::new(password))),
            keys: None,
            channel_binding: client_login(setup).channel_binding,
        },
    );
    let mut messages = Vec::new();
    while let ClientStep::Send(body) = step {
        let ServerStep::Send(answer) = peer.message(&body) else { panic!("a request is answered") };
        step = auth.message(&answer);
        messages.push(answer);
    }
    input(setup, &messages)
}

/// What a server that asks by `method` sends to the server machine of `setup`.
fn server_seed(setup: u8, method: Method) -> Vec<u8> {
    let mut auth = ServerAuth::new(context(setup), server_login(setup));
    let (mut peer, mut step) = ClientAuth::start(
        context(setup),
        ClientLogin {
            method,
            user: USER.as_bytes(),
            credential: Credential::Secret(
                secret(2 * u8::from(method == Method::ScramSha256)).expect("a secret"),
            ),
            channel_binding: server_login(setup).channel_binding,
            identity: Identity::default(),
        },
    );
    let mut messages = Vec::new();
    loop {
        match step {
            ClientStep::Send(body) => {
                let ServerStep::Send(answer) = auth.message(&body) else { panic!("a request is answered") };
                step = peer.message(&answer);
                messages.push(body);
            }
            ClientStep::Done { send, .. } => {
                messages.extend(send);
                messages.push(vec![0; 4]);
                return input(setup, &messages);
            }
            ClientStep::Derive(_) => panic!("not asked for"),
            ClientStep::Failed(refusal) => panic!("{refusal}"),
        }
    }
}

fn client_seeds() -> BTreeMap<&'static str, Vec<u8>> {
    let (scram, md5, plain) = (0, 8, 16);
    BTreeMap::from([
        ("ok-scram-from-plain", client_seed(scram, PASSWORD)),
        ("ok-scram-from-verifier", client_seed(scram | 2, PASSWORD)),
        ("ok-scram-plus", client_seed(scram | 2 | 4, PASSWORD)),
        ("ok-md5", client_seed(md5 | 1, PASSWORD)),
        ("ok-md5-turned-scram", client_seed(md5 | 2, PASSWORD)),
        ("ok-plain", client_seed(plain, PASSWORD)),
        ("ok-plain-against-verifier", client_seed(plain | 2, PASSWORD)),
        ("scram-wrong", client_seed(scram | 2, "wrong")),
        ("scram-unknown-user", client_seed(scram | 3, PASSWORD)),
        (
            "scram-without-initial",
            input(2, &[b"SCRAM-SHA-256\0\xff\xff\xff\xff".to_vec(), b"n,,n=,r=x".to_vec()]),
        ),
    ])
}

fn server_seeds() -> BTreeMap<&'static str, Vec<u8>> {
    BTreeMap::from([
        ("ok-trust", input(3, &[vec![0; 4]])),
        ("ok-plain", server_seed(0, Method::Plain)),
        ("ok-md5", server_seed(1, Method::Md5)),
        ("ok-scram", server_seed(0, Method::ScramSha256)),
        ("ok-scram-plus", server_seed(4, Method::ScramSha256)),
        ("ok-scram-by-keys", server_seed(2 | 8, Method::ScramSha256)),
        ("gss", input(0, &[vec![0, 0, 0, 7]])),
        ("no-mechanism", input(0, &[b"\0\0\0\x0aOAUTHBEARER\0\0".to_vec()])),
    ])
}

/// The bytes that begin a connection whose login has the messages of `proof`, an input of [`client_auth`].
fn stream(cut: u8, before: &[&[u8]], proof: &[u8]) -> Vec<u8> {
    let mut data = vec![proof[0], cut];
    before.iter().for_each(|bytes| data.extend_from_slice(bytes));
    for message in messages(&proof[1..]) {
        data.push(b'p');
        data.extend_from_slice(&(message.len() as u32 + 4).to_be_bytes());
        data.extend_from_slice(message);
    }
    data
}

fn startup_seeds() -> BTreeMap<&'static str, Vec<u8>> {
    let (mut ssl, mut gss, mut cancel) = (Vec::new(), Vec::new(), Vec::new());
    build::ssl_request(&mut ssl);
    build::gssenc_request(&mut gss);
    build::cancel_request(&mut cancel, 7, &[9; 32]);
    let message = |version, pairs: &[(&str, &str)]| {
        let mut out = Vec::new();
        let pairs = pairs.iter().map(|(name, value)| (name.as_bytes(), value.as_bytes()));
        build::startup_message(&mut out, version, pairs);
        out
    };
    let plainly = message(ProtocolVersion::V3_0, &[("user", USER)]);
    let fully = message(
        ProtocolVersion { major: 3, minor: 9999 },
        &[
            ("user", USER),
            ("database", "db"),
            ("options", "-c a=b"),
            ("_pq_.x", "1"),
            ("replication", "database"),
        ],
    );
    let (scram, md5, plain) =
        (client_seed(2, PASSWORD), client_seed(8 | 1, PASSWORD), client_seed(16, PASSWORD));
    BTreeMap::from([
        ("ok-plain", stream(0, &[&plainly], &plain)),
        ("ok-md5-after-gss", stream(2, &[&gss, &plainly], &md5)),
        ("ok-scram-after-both", stream(4, &[&gss, &ssl, &fully], &scram)),
        ("ok-scram-in-tls", stream(1, &[&ssl, &fully], &scram)),
        ("ok-scram-direct-tls", stream(9, &[&[0x16], &fully], &scram)),
        ("wrong-password", stream(6, &[&plainly], &client_seed(2, "wrong"))),
        ("cancel", stream(8, &[&ssl, &cancel], &[0])),
        ("cancel-in-tls", stream(1, &[&ssl, &cancel], &[0])),
        ("ssl-twice", stream(0, &[&ssl, &ssl, &plainly], &plain)),
        ("ssl-in-tls", stream(3, &[&[0x16], &ssl, &plainly], &plain)),
        ("no-user", stream(0, &[&message(ProtocolVersion::V3_2, &[("database", "x")])], &[0])),
        (
            "protocol-2",
            stream(0, &[&message(ProtocolVersion { major: 2, minor: 0 }, &[("user", USER)])], &[0]),
        ),
        ("terminate", stream(0, &[&plainly, b"X\0\0\0\x04"], &[0])),
        ("query-too-early", stream(0, &[&plainly, b"Q\0\0\0\x0dSELECT 1\0"], &[0])),
        ("long-password", stream(0, &[&plainly, b"p\0\0\xff\xff"], &[16])),
    ])
}

/// `UPDATE_SEEDS=1` writes the files anew.
fn replay(name: &str, seeds: &BTreeMap<&'static str, Vec<u8>>, target: fn(&[u8]) -> bool) {
    for (seed, data) in seeds {
        let path = corpus(name).join(seed);
        if std::env::var_os("UPDATE_SEEDS").is_some() {
            std::fs::create_dir_all(corpus(name)).expect("a directory");
            std::fs::write(&path, data).expect("write");
        }
        assert!(
            std::fs::read(&path).is_ok_and(|file| file == *data),
            "{seed} is stale: run with UPDATE_SEEDS=1"
        );
    }
    for entry in std::fs::read_dir(corpus(name)).expect("the corpus").flatten() {
        let inside = target(&std::fs::read(entry.path()).expect("a seed"));
        // What a fuzzer found may end either way; what was made here must end as its name says.
        let file = entry.file_name().to_string_lossy().into_owned();
        assert!(!seeds.contains_key(file.as_str()) || inside == file.starts_with("ok-"), "{file}");
    }
}

#[test]
fn corpus_of_clients() {
    replay("auth_client", &client_seeds(), client_auth);
}

#[test]
fn corpus_of_servers() {
    replay("auth_server", &server_seeds(), server_auth);
}

#[test]
fn corpus_of_startups() {
    replay("auth_startup", &startup_seeds(), startup);
}

#[test]
fn a_startup_that_breaks_off_or_goes_on_does_no_harm() {
    for data in startup_seeds().values() {
        for end in 0..data.len() {
            startup(&data[..end]);
        }
        startup(&[&data[..], &data[2..]].concat());
    }
}

proptest! {
    #[test]
    fn changed_seeds_do_no_harm(
        which in any::<prop::sample::Index>(), target in 0..3,
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    ) {
        let seeds = [client_seeds, server_seeds, startup_seeds][target as usize]();
        let mut data = seeds.values().nth(which.index(seeds.len())).unwrap().clone();
        for (at, to) in changes {
            let at = at.index(data.len());
            data[at] = to;
        }
        [client_auth, server_auth, startup][target as usize](&data);
    }

    #[test]
    fn noise_does_no_harm(data in proptest::collection::vec(any::<u8>(), 0..300)) {
        server_auth(&data);
        client_auth(&data);
        startup(&data);
    }
}
