// SPDX-License-Identifier: Apache-2.0

use super::*;
use crate::context::AuthOptions;

fn auth(secret: Option<&str>, keys: Option<ScramKeys>) -> ServerAuth {
    let context = Arc::new(AuthContext::repeatable(&AuthOptions::default()));
    let secret = secret.map(Secret::parse);
    ServerAuth::new(context, ServerLogin { user: b"joe".to_vec(), secret, keys, channel_binding: None })
}

fn request(code: i32, data: &[u8]) -> Vec<u8> {
    [&code.to_be_bytes()[..], data].concat()
}

fn failed(step: ServerStep) -> String {
    match step {
        ServerStep::Failed(error) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

const OK: [u8; 4] = [0; 4];
const OFFER: &[u8] = b"\0\0\0\x0aSCRAM-SHA-256-PLUS\0SCRAM-SHA-256\0\0";

fn md5_secret() -> String {
    Secret::Md5(md5::hash(b"pw", b"joe")).to_string()
}

fn scram_secret() -> String {
    ScramKeys::derive(b"pw", b"salt", 2).secret().to_string()
}

#[test]
fn answers_what_it_can() {
    assert_eq!(auth(None, None).message(&OK), ServerStep::Done);
    let mut plain = auth(Some("pw"), None);
    assert_eq!(plain.message(&request(code::CLEARTEXT_PASSWORD, b"")), ServerStep::Send(b"pw\0".to_vec()));
    assert_eq!(plain.message(&OK), ServerStep::Done);
    let salted = request(code::MD5_PASSWORD, &[1, 2, 3, 4]);
    let answer =
        ServerStep::Send([&md5::response(&md5::hash(b"pw", b"joe"), [1, 2, 3, 4])[..], b"\0"].concat());
    assert_eq!(auth(Some("pw"), None).message(&salted), answer);
    assert_eq!(auth(Some(&md5_secret()), None).message(&salted), answer);
    let keys = ScramKeys::derive(b"pw", b"salt", 2);
    for mut auth in
        [auth(Some("pw"), None), auth(Some(&scram_secret()), Some(keys.clone())), auth(None, Some(keys))]
    {
        match auth.message(OFFER) {
            // Without TLS the mechanism without channel binding is chosen.
            ServerStep::Send(body) => assert!(body.starts_with(b"SCRAM-SHA-256\0\0\0\0 n,,n=,r=")),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn says_which_secret_is_missing() {
    let keys = || Some(ScramKeys::derive(b"pw", b"salt", 2));
    let error = failed(auth(Some(&md5_secret()), None).message(OFFER));
    assert!(
        error.starts_with("server asks for SCRAM-SHA-256, but only an md5 hash is stored; store the plain"),
        "{error}"
    );
    assert!(
        failed(auth(Some(&scram_secret()), None).message(OFFER)).contains("only a SCRAM secret is stored")
    );
    assert!(failed(auth(None, None).message(OFFER)).contains("no password is stored"));
    assert!(failed(auth(Some(""), None).message(OFFER)).contains("the stored password is empty"));
    let cleartext = request(code::CLEARTEXT_PASSWORD, b"");
    assert!(failed(auth(Some(&md5_secret()), None).message(&cleartext)).contains("a clear-text password"));
    assert!(failed(auth(None, keys()).message(&cleartext)).contains("only the client's SCRAM keys"));
    let salted = request(code::MD5_PASSWORD, &[1, 2, 3, 4]);
    assert!(failed(auth(Some(&scram_secret()), keys()).message(&salted)).contains("or its md5 hash"));
}

#[test]
fn refuses_what_it_does_not_know() {
    for (code, name) in [(2, "Kerberos V5"), (6, "SCM"), (7, "GSSAPI"), (8, "GSSAPI"), (9, "SSPI")] {
        assert!(failed(auth(Some("pw"), None).message(&request(code, b""))).contains(name));
    }
    assert!(failed(auth(Some("pw"), None).message(&request(99, b""))).contains("code 99"));
    assert!(failed(auth(Some("pw"), None).message(&request(-1, b""))).contains("code -1"));
    assert!(failed(auth(Some("pw"), None).message(b"\0\0")).contains("no code"));
    assert!(failed(auth(Some("pw"), None).message(&request(code::MD5_PASSWORD, b"123"))).contains("4 bytes"));
    let offer = |list: &[u8]| failed(auth(Some("pw"), None).message(&request(code::SASL, list)));
    assert!(offer(b"OAUTHBEARER\0\0").contains("offered: OAUTHBEARER"));
    assert!(offer(b"SCRAM-SHA-256-PLUS\0\0").contains("offered: SCRAM-SHA-256-PLUS"));
    assert!(offer(b"SCRAM-SHA-256").contains("malformed"));
    assert!(offer(b"").contains("malformed"));
}

#[test]
fn order_matters() {
    let mut auth_scram = auth(Some("pw"), None);
    auth_scram.message(OFFER);
    assert!(failed(auth_scram.message(&OK)).contains("before it proved itself"));
    assert!(failed(auth_scram.message(&OK)).contains("out of order"));
    let mut twice = auth(Some("pw"), None);
    let cleartext = request(code::CLEARTEXT_PASSWORD, b"");
    twice.message(&cleartext);
    assert!(failed(twice.message(&cleartext)).contains("out of order"));
    for code in [code::SASL_CONTINUE, code::SASL_FINAL] {
        assert!(failed(auth(Some("pw"), None).message(&request(code, b""))).contains("out of order"));
    }
    assert!(failed(auth(Some("pw"), None).message(&request(code::OK, b"x"))).contains("out of order"));
}
