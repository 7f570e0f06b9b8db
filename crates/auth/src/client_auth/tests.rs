// SPDX-License-Identifier: Apache-2.0

use proptest::prelude::*;

use super::*;
use crate::context::AuthOptions;
use crate::server_auth::{ServerAuth, ServerLogin, ServerStep};

fn context(mock_method: MockMethod) -> Arc<AuthContext> {
    let options = AuthOptions { scram_iterations: 2, mock_method, ..AuthOptions::default() };
    Arc::new(AuthContext::new(&options).expect("randomness"))
}

fn login<'a>(method: Method, credential: Credential) -> ClientLogin<'a> {
    ClientLogin { method, user: b"joe", credential, channel_binding: None, identity: Identity::default() }
}

fn stored(kind: &str) -> Credential {
    Credential::Secret(match kind {
        "plain" => Secret::parse("pw"),
        "md5" => Secret::Md5(md5::hash(b"pw", b"joe")),
        _ => Secret::Scram(ScramKeys::derive(b"pw", b"salt", 2).secret()),
    })
}

/// Our own client role answers; the outcome and the codes of the requests sent, 1000 for keys that are derived elsewhere.
fn run(
    context: &Arc<AuthContext>,
    login: ClientLogin<'_>,
    password: &str,
) -> (Result<Login, Refusal>, Vec<i32>) {
    let mut server = ServerAuth::new(
        context.clone(),
        ServerLogin {
            user: login.user.to_vec(),
            secret: Some(Secret::Plain(Password::new(password))),
            keys: None,
            channel_binding: login.channel_binding.clone(),
        },
    );
    let (mut auth, mut step) = ClientAuth::start(context.clone(), login);
    let mut codes = Vec::new();
    loop {
        step = match step {
            ClientStep::Send(body) => {
                codes.push(i32::from_be_bytes(body[..4].try_into().unwrap()));
                let answer = match server.message(&body) {
                    ServerStep::Derive(derivation) => {
                        codes.push(1000);
                        server.derived(derivation.run())
                    }
                    step => step,
                };
                match answer {
                    ServerStep::Send(answer) => auth.message(&answer),
                    other => panic!("{other:?}"),
                }
            }
            ClientStep::Derive(derivation) => {
                codes.push(1000);
                auth.derived(derivation.run())
            }
            ClientStep::Done { send, login } => {
                if let Some(body) = send {
                    assert_eq!(server.message(&body), ServerStep::Wait);
                }
                assert_eq!(server.message(&code::OK.to_be_bytes()), ServerStep::Done);
                return (Ok(login), codes);
            }
            ClientStep::Failed(refusal) => return (Err(refusal), codes),
        }
    }
}

#[test]
fn every_method_with_every_secret() {
    use Method::{Md5, Plain, ScramSha256};
    const SCRAM: &[i32] = &[code::SASL, code::SASL_CONTINUE];
    let context = context(MockMethod::Scram);
    for (method, secret, codes) in [
        (Plain, "plain", &[code::CLEARTEXT_PASSWORD][..]),
        (Plain, "md5", &[code::CLEARTEXT_PASSWORD]),
        (Plain, "scram", &[code::CLEARTEXT_PASSWORD]),
        (Md5, "plain", &[code::MD5_PASSWORD]),
        (Md5, "md5", &[code::MD5_PASSWORD]),
        (Md5, "scram", SCRAM),
        (ScramSha256, "plain", SCRAM),
        (ScramSha256, "scram", SCRAM),
    ] {
        let (right, asked) = run(&context, login(method, stored(secret)), "pw");
        let right = right.unwrap_or_else(|refusal| panic!("{method:?} {secret}: {refusal}"));
        assert_eq!(asked, codes, "{method:?} {secret}");
        assert_eq!(right.keys.is_some(), codes == SCRAM || secret == "scram", "{method:?} {secret}");
        assert_eq!(right.password.is_some(), method == Plain);
        let (wrong, asked) = run(&context, login(method, stored(secret)), "wrong");
        assert_eq!(wrong.unwrap_err(), Refusal::WrongPassword);
        assert_eq!(asked, codes);
    }
    let (refused, asked) = run(&context, login(ScramSha256, stored("md5")), "pw");
    assert_eq!(refused.unwrap_err(), Refusal::Md5ForScram);
    assert_eq!(asked, SCRAM);
}

#[test]
fn channel_binding_is_used_when_there_is_tls() {
    let context = context(MockMethod::Scram);
    let login =
        ClientLogin { channel_binding: Some(vec![1; 32]), ..login(Method::ScramSha256, stored("scram")) };
    assert!(run(&context, login, "pw").0.is_ok());
}

/// Nothing a client sees may depend on whether the user exists.
#[test]
fn who_cannot_log_in_sees_what_others_see() {
    for (mock, kind) in [(MockMethod::Scram, "scram"), (MockMethod::Md5, "md5")] {
        for method in [Method::Plain, Method::Md5, Method::ScramSha256] {
            let context = context(mock);
            let secret = if method == Method::ScramSha256 { "scram" } else { kind };
            let (known, asked) = run(&context, login(method, stored(secret)), "wrong");
            let known = known.unwrap_err();
            for (credential, reason) in [
                (Credential::UnknownUser, Refusal::UnknownUser),
                (Credential::NoPassword, Refusal::NoPassword),
                (Credential::Secret(Secret::parse("")), Refusal::NoPassword),
            ] {
                // An empty stored password is the operator's own mistake and may look like plain.
                let comparable = credential != Credential::Secret(Secret::parse("")) || method != Method::Md5;
                let (refused, codes) = run(&context, login(method, credential), "wrong");
                let refused = refused.unwrap_err();
                assert_eq!(refused, reason);
                assert!(!comparable || codes == asked, "{method:?} {mock:?}");
                assert_eq!(refused.client_message("joe"), known.client_message("joe"));
                assert_eq!(refused.sqlstate(), "28P01");
            }
        }
    }
}

#[test]
fn mock_salt_is_the_users_own_and_does_not_change() {
    let context = context(MockMethod::Scram);
    let server_first = |user: &'static [u8]| {
        let login = ClientLogin { user, ..login(Method::ScramSha256, Credential::UnknownUser) };
        let (mut auth, _) = ClientAuth::start(context.clone(), login);
        match auth.message(b"SCRAM-SHA-256\0\0\0\0\x09n,,n=,r=x") {
            ClientStep::Send(body) => String::from_utf8_lossy(&body).split_once(",s=").unwrap().1.to_owned(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(server_first(b"joe"), server_first(b"joe"));
    assert_ne!(server_first(b"joe"), server_first(b"jim"));
    assert!(server_first(b"joe").ends_with(",i=2"));
}

#[test]
fn methods_without_a_password() {
    let context = context(MockMethod::Scram);
    let start = |login| ClientAuth::start(context.clone(), login).1;
    let inside = |login| matches!(start(login), ClientStep::Done { send: None, .. });
    let refused = |login| match start(login) {
        ClientStep::Failed(refusal) => {
            assert_eq!(refusal.sqlstate(), "28000");
            refusal
        }
        other => panic!("{other:?}"),
    };
    assert!(inside(login(Method::Any, Credential::UnknownUser)));
    assert!(inside(login(Method::Trust, Credential::NoPassword)));
    assert_eq!(refused(login(Method::Trust, Credential::UnknownUser)), Refusal::NotPermitted(Method::Trust));
    assert_eq!(refused(login(Method::Reject, stored("plain"))), Refusal::Rejected);
    let only_jim = |name: &str| name == "jim";
    for method in [Method::Cert, Method::Peer] {
        let by = |name, map| ClientLogin {
            identity: Identity { name, map },
            ..login(method, Credential::NoPassword)
        };
        assert!(inside(by(Some("joe"), None)));
        assert!(inside(by(Some("jim"), Some(&only_jim))));
        assert_eq!(refused(by(None, None)), Refusal::NoIdentity(method));
        let other = |name: &str| Refusal::OtherIdentity { method, name: name.into() };
        assert_eq!(refused(by(Some("jim"), None)), other("jim"));
        assert_eq!(refused(by(Some("joe"), Some(&only_jim))), other("joe"));
        assert!(!other("secret-cn").client_message("joe").contains("secret-cn"));
        let unknown = ClientLogin { credential: Credential::UnknownUser, ..by(Some("joe"), None) };
        assert_eq!(refused(unknown), Refusal::NotPermitted(method));
    }
}

#[test]
fn bad_messages_are_refused_as_protocol_violations() {
    let context = context(MockMethod::Scram);
    let answer = |method, kind, body: &[u8]| {
        let (mut auth, _) = ClientAuth::start(context.clone(), login(method, stored(kind)));
        let refusal = match auth.message(body) {
            ClientStep::Failed(refusal) => refusal,
            other => panic!("{other:?}"),
        };
        assert!(matches!(auth.message(body), ClientStep::Failed(Refusal::UnexpectedMessage)));
        refusal
    };
    for method in [Method::Plain, Method::Md5] {
        for body in [&b""[..], b"pw", b"pw\0pw\0", b"\0\0"] {
            assert_eq!(answer(method, "plain", body).sqlstate(), "08P01", "{body:?}");
        }
    }
    assert_eq!(answer(Method::Plain, "plain", b"\0"), Refusal::EmptyPassword);
    for body in [
        &b""[..],
        b"SCRAM-SHA-256",
        b"SCRAM-SHA-256\0",
        b"SCRAM-SHA-256\0\0\0\0",
        b"SCRAM-SHA-256\0\0\0\0\x05n,,",
        b"SCRAM-SHA-256\0\0\0\0\x01n,,",
        b"SCRAM-SHA-256\0\xff\xff\xff\xffx",
        b"SCRAM-SHA-256\0\xff\xff\xff\xfe",
        b"\xff\0\0\0\0\0",
        b"SCRAM-SHA-1\0\0\0\0\x09n,,n=,r=x",
    ] {
        assert_eq!(answer(Method::ScramSha256, "scram", body).sqlstate(), "08P01", "{body:?}");
    }
    let mut long = b"SCRAM-SHA-256\0\0\0\x10\x00".to_vec();
    long.resize(long.len() + 4096, b'x');
    assert_eq!(answer(Method::ScramSha256, "scram", &long), Refusal::Malformed("SASL message is too long"));
}

/// PostgreSQL lets a client name the mechanism first and send its message when asked.
#[test]
fn initial_response_may_be_absent() {
    let context = context(MockMethod::Scram);
    let (mut auth, _) = ClientAuth::start(context, login(Method::ScramSha256, stored("scram")));
    match auth.message(b"SCRAM-SHA-256\0\xff\xff\xff\xff") {
        ClientStep::Send(body) => assert_eq!(body, code::SASL_CONTINUE.to_be_bytes()),
        other => panic!("{other:?}"),
    }
    assert!(matches!(auth.message(b"n,,n=,r=x"), ClientStep::Send(_)));
}

/// The caller derives, once for each password: then the keys are in the cache. A wrong password fills nothing.
#[test]
fn keys_may_be_derived_elsewhere() {
    const ELSEWHERE: i32 = 1000;
    let fresh = || {
        let options = AuthOptions { scram_iterations: 2, derive_elsewhere: true, ..AuthOptions::default() };
        Arc::new(AuthContext::new(&options).expect("randomness"))
    };
    for (method, secret, asked) in [
        (Method::Plain, "scram", vec![code::CLEARTEXT_PASSWORD, ELSEWHERE]),
        // The verifier of the stored password; then our client role has the same keys in the same cache.
        (Method::ScramSha256, "plain", vec![ELSEWHERE, code::SASL, code::SASL_CONTINUE]),
        // Here only the client role derives.
        (Method::ScramSha256, "scram", vec![code::SASL, code::SASL_CONTINUE, ELSEWHERE]),
    ] {
        let context = fresh();
        let (wrong, _) = run(&context, login(method, stored(secret)), "wrong");
        assert_eq!(wrong.unwrap_err(), Refusal::WrongPassword, "{method:?} {secret}");
        let context = fresh();
        let (first, codes) = run(&context, login(method, stored(secret)), "pw");
        assert!(first.is_ok() && codes == asked, "{method:?} {secret}: {codes:?}");
        let (again, codes) = run(&context, login(method, stored(secret)), "pw");
        assert!(again.is_ok() && !codes.contains(&ELSEWHERE), "{method:?} {secret}: {codes:?}");
    }
    let (mut auth, _) = ClientAuth::start(fresh(), login(Method::Plain, stored("scram")));
    assert!(matches!(auth.message(b"pw\0"), ClientStep::Derive(_)));
    assert!(matches!(auth.message(b"pw\0"), ClientStep::Failed(Refusal::UnexpectedMessage)));
}

#[test]
fn stored_secrets_with_endless_iterations_do_not_stop_us() {
    let mut secret = ScramKeys::derive(b"pw", b"salt", 2).secret();
    secret.iterations = u32::MAX;
    let context = context(MockMethod::Scram);
    let login = login(Method::Plain, Credential::Secret(Secret::Scram(secret)));
    assert_eq!(run(&context, login, "pw").0.unwrap_err(), Refusal::Iterations(u32::MAX));
}

proptest! {
    #[test]
    fn any_password_in_any_form(password in "[^\\x00]{1,20}", other in "[^\\x00]{1,20}") {
        let context = context(MockMethod::Scram);
        let keys = ScramKeys::derive(password.as_bytes(), b"s", 1).secret();
        for (method, secret) in [
            (Method::Plain, Secret::Plain(Password::new(password.as_str()))),
            (Method::Plain, Secret::Scram(keys.clone())),
            (Method::Md5, Secret::Md5(md5::hash(password.as_bytes(), b"joe"))),
            (Method::ScramSha256, Secret::Scram(keys.clone())),
        ] {
            let credential = Credential::Secret(secret);
            prop_assert!(run(&context, login(method, credential.clone()), &password).0.is_ok());
            if crate::saslprep(password.as_bytes()) != crate::saslprep(other.as_bytes()) {
                prop_assert!(run(&context, login(method, credential), &other).0.is_err());
            }
        }
    }
}
