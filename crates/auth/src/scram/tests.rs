// SPDX-License-Identifier: Apache-2.0

use std::sync::Arc;

use proptest::prelude::*;

use super::message::{ClientFinal, ClientFirst, ServerFirst};
use super::*;
use crate::context::{AuthContext, AuthOptions};
use crate::password::Password;

const BINDING: &[u8] = &[9; 32];

fn context() -> Arc<AuthContext> {
    Arc::new(AuthContext::repeatable(&AuthOptions::default()))
}

fn verifier(password: &[u8], salt: &[u8], iterations: u32) -> Verifier {
    Verifier { secret: ScramKeys::derive(password, salt, iterations).secret(), doomed: false }
}

fn server(verifier: Verifier, binding: Option<&[u8]>) -> ScramServer {
    ScramServer::new(verifier, binding.map(<[u8]>::to_vec), "servernonce".into())
}

fn client(secret: ClientSecret, offered: &[&str], binding: Option<&[u8]>) -> ScramClient {
    let offered = offered.iter().copied();
    ScramClient::new(context(), secret, offered, binding.map(<[u8]>::to_vec), "clientnonce".into())
        .expect("a mechanism fits")
}

fn password(text: &str) -> ClientSecret {
    ClientSecret::Password(Password::new(text))
}

/// A whole exchange; the keys the server learned.
fn exchange(mut client: ScramClient, mut server: ScramServer) -> Result<ScramKeys, String> {
    let first = server.client_first(client.mechanism(), &client.client_first()).map_err(|e| e.to_string())?;
    let last = ready(client.server_first(&first).map_err(|e| e.to_string())?);
    let verified = server.client_final(&last).map_err(|e| e.to_string())?;
    client.server_final(&verified.server_final).map_err(|e| e.to_string())?;
    Ok(verified.keys)
}

/// RFC 7677 section 3; the user name and nonces are the RFC's, which the machines do not choose, so the
/// messages are given to each role in turn.
fn ready(proof: Proof) -> Vec<u8> {
    match proof {
        Proof::Ready(message) => message,
        Proof::Derive(_) => panic!("not asked for"),
    }
}

#[test]
fn rfc_7677_server_role() {
    let salt = base64::Engine::decode(&base64::engine::general_purpose::STANDARD, "W22ZaJ0SNY7soEsUEjb6gQ==");
    let verifier = verifier(b"pencil", &salt.unwrap(), 4096);
    let secret = "SCRAM-SHA-256$4096:W22ZaJ0SNY7soEsUEjb6gQ==$\
        WG5d8oPm3OtcPnkdi4Uo7BkeZkBFzpcXkuLmtbsT4qY=:wfPLwcE6nTWhTAmQ7tl2KeoiWGPlZqQxSrmfPwDl2dU=";
    assert_eq!(verifier.secret.to_string(), secret);
    let mut server = ScramServer::new(verifier, None, "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0".into());
    let first = server.client_first(MECHANISM, b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO").unwrap();
    assert_eq!(
        String::from_utf8(first).unwrap(),
        "r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
    );
    let verified = server
        .client_final(
            b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,\
              p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=",
        )
        .unwrap();
    assert_eq!(verified.server_final, b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=");
    let keys = ScramKeys::derive(b"pencil", &verified.keys.salt, 4096);
    assert_eq!(verified.keys.client_key, keys.client_key);
}

#[test]
fn roles_agree_with_and_without_channel_binding() {
    let both = [MECHANISM_PLUS, MECHANISM];
    for (offered, theirs, ours, mechanism) in [
        (&both[..], Some(BINDING), Some(BINDING), MECHANISM_PLUS),
        (&both[1..], None, None, MECHANISM),
        (&both[1..], Some(BINDING), None, MECHANISM),
        (&both[..], None, Some(BINDING), MECHANISM),
    ] {
        let client = client(password("pw"), offered, theirs);
        assert_eq!(client.mechanism(), mechanism);
        let keys = exchange(client, server(verifier(b"pw", b"salt", 2), ours)).expect("same password");
        // Pass-through: the keys log in where the same verifier is stored, and are refused elsewhere.
        let pass = |salt| {
            let client = self::client(ClientSecret::Keys(keys.clone()), &[MECHANISM], None);
            exchange(client, server(verifier(b"pw", salt, 2), None))
        };
        assert!(pass(b"salt").is_ok());
        assert!(pass(b"pepper").unwrap_err().contains("another salt"));
    }
}

#[test]
fn doomed_and_wrong_end_alike() {
    let wrong =
        exchange(client(password("no"), &[MECHANISM], None), server(verifier(b"pw", b"salt", 2), None));
    let mut mock = verifier(b"pw", b"salt", 2);
    mock.doomed = true;
    let doomed = exchange(client(password("pw"), &[MECHANISM], None), server(mock, None));
    assert_eq!(wrong.unwrap_err(), doomed.unwrap_err());
}

#[test]
fn someone_in_between_is_noticed() {
    let plus = || server(verifier(b"pw", b"salt", 2), Some(BINDING));
    // Another certificate on the way.
    let client = client(password("pw"), &[MECHANISM_PLUS], Some(&[8; 32]));
    assert_eq!(exchange(client, plus()).unwrap_err(), ScramServerError::Binding.to_string());
    // The offer was removed on the way: the client says `y`.
    let stripped = self::client(password("pw"), &[MECHANISM], Some(BINDING));
    assert_eq!(exchange(stripped, plus()).unwrap_err(), ScramServerError::Downgrade.to_string());
    let first = |mechanism, message: &[u8]| plus().client_first(mechanism, message).unwrap_err();
    assert_eq!(first(MECHANISM_PLUS, b"n,,n=,r=x"), ScramServerError::BindingFlag);
    assert_eq!(first(MECHANISM_PLUS, b"y,,n=,r=x"), ScramServerError::BindingFlag);
    assert_eq!(first(MECHANISM, b"p=tls-server-end-point,,n=,r=x"), ScramServerError::BindingFlag);
    assert_eq!(first(MECHANISM_PLUS, b"p=tls-unique,,n=,r=x"), ScramServerError::BindingType);
    assert_eq!(first(MECHANISM, b"n,a=joe,n=,r=x"), ScramServerError::AuthorizationIdentity);
    assert_eq!(first("SCRAM-SHA-1", b"n,,n=,r=x"), ScramServerError::Mechanism);
    let mut plain = server(verifier(b"pw", b"salt", 2), None);
    assert_eq!(
        plain.client_first(MECHANISM_PLUS, b"p=tls-server-end-point,,n=,r=x"),
        Err(ScramServerError::Mechanism)
    );
}

#[test]
fn a_false_server_is_noticed() {
    let first =
        |message: &[u8]| client(password("pw"), &[MECHANISM], None).server_first(message).unwrap_err();
    use ScramClientError as E;
    assert_eq!(first(b"r=other,s=c2FsdA==,i=2"), E::Nonce);
    assert_eq!(first(b"r=clientnonce,s=c2FsdA==,i=2"), E::Nonce);
    assert_eq!(first(b"r=clientnoncex,s=c2FsdA==,i=2000000000"), E::Iterations(2_000_000_000));
    for message in [
        &b"r=clientnoncex,s=c2FsdA==,i=0"[..],
        b"r=clientnoncex,s=c2FsdA==,i=-1",
        b"r=clientnoncex,s=c2FsdA==,i=99999999999",
        b"r=clientnoncex,s=!,i=2",
        b"r=clientnoncex,i=2,s=c2FsdA==",
        b"m=x,r=clientnoncex,s=c2FsdA==,i=2",
        b"r=clientnonce\x01,s=c2FsdA==,i=2",
        b"r=clientnoncex,s=c2FsdA==,i=2,",
        b"\xff",
        b"",
    ] {
        assert!(matches!(first(message), E::Malformed(_)), "{message:?}");
    }
    let last = |message: &[u8]| {
        let mut client = client(password("pw"), &[MECHANISM], None);
        ready(client.server_first(b"r=clientnoncex,s=c2FsdA==,i=2").unwrap());
        client.server_final(message).unwrap_err()
    };
    assert_eq!(last(b"v=AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="), E::Signature);
    assert_eq!(last(b"e=other-error"), E::Server("other-error".into()));
    assert!(matches!(last(b"v=AAAA"), E::Malformed(_)));
    assert!(matches!(last(b"x=AAAA"), E::Malformed(_)));
    let mut early = client(password("pw"), &[MECHANISM], None);
    assert_eq!(early.server_final(b"v="), Err(E::OutOfOrder));
}

#[test]
fn malformed_client_messages_are_named() {
    for message in [
        &b""[..],
        b"n",
        b"n,",
        b"n,,",
        b"x,,n=,r=x",
        b"n,b=,n=,r=x",
        b"n,,r=x",
        b"n,,n=",
        b"n,,n=,r=",
        b"n,,n=,r=\x7f",
        b"n,,m=must,n=,r=x",
        b"n,,n=,r=x,!",
        b"n,,n=,r=x\0",
    ] {
        assert!(ClientFirst::parse(message).is_err(), "{message:?}");
    }
    assert!(ClientFirst::parse(b"n,,n=joe,r=x,z=extension").is_ok());
    for message in
        [&b"c=biws,r=x"[..], b"c=biws,r=x,p=", b"c=biws,r=x,p=AAAA", b"r=x,c=biws,p=AAAA", b",p=", b"p=x"]
    {
        assert!(ClientFinal::parse(message).is_err(), "{message:?}");
    }
    let mut server = server(verifier(b"pw", b"salt", 2), None);
    assert_eq!(server.client_final(b"").unwrap_err(), ScramServerError::OutOfOrder);
    assert_eq!(server.client_first(MECHANISM, b"n,,n=,r=x"), Err(ScramServerError::OutOfOrder));
}

#[test]
fn another_nonce_is_refused_even_with_a_right_proof() {
    let mut server = server(verifier(b"pw", b"salt", 2), None);
    let mut client = client(password("pw"), &[MECHANISM], None);
    server.client_first(client.mechanism(), &client.client_first()).unwrap();
    let last = ready(client.server_first(b"r=clientnonceforged,s=c2FsdA==,i=2").unwrap());
    assert_eq!(server.client_final(&last).unwrap_err(), ScramServerError::Nonce);
}

#[test]
fn derived_keys_are_remembered_only_after_proof() {
    let context = context();
    let count = |secret: &str, right: &[u8]| {
        let client =
            ScramClient::new(context.clone(), password(secret), [MECHANISM], None, "n".into()).unwrap();
        let result = exchange(client, server(verifier(right, b"salt", 3), None));
        (result.is_ok(), context.is_remembered(&Password::new(secret), b"salt", 3))
    };
    assert_eq!(count("guess", b"pw"), (false, false));
    assert_eq!(count("pw", b"pw"), (true, true));
}

proptest! {
    #[test]
    fn every_password_works_with_itself_only(
        one in proptest::collection::vec(any::<u8>(), 1..30), two in "\\PC{1,12}",
        salt in proptest::collection::vec(any::<u8>(), 0..30), iterations in 1u32..5,
    ) {
        let same = client(ClientSecret::Password(Password::new(one.clone())), &[MECHANISM], None);
        prop_assert!(exchange(same, server(verifier(&one, &salt, iterations), None)).is_ok());
        if saslprep(&one) != saslprep(two.as_bytes()) {
            let other = client(password(&two), &[MECHANISM], None);
            prop_assert!(exchange(other, server(verifier(&one, &salt, iterations), None)).is_err());
        }
    }

    #[test]
    fn one_changed_byte_never_logs_in(at in 0usize..200, to: u8) {
        let mut server = server(verifier(b"pw", b"salt", 2), None);
        let mut client = client(password("pw"), &[MECHANISM], None);
        let first = server.client_first(client.mechanism(), &client.client_first()).unwrap();
        let mut last = ready(client.server_first(&first).unwrap());
        let at = at % last.len();
        prop_assume!(last[at] != to);
        last[at] = to;
        prop_assert!(server.client_final(&last).is_err());
    }

    #[test]
    fn parsers_take_anything(data in proptest::collection::vec(any::<u8>(), 0..80), text in "[cprnsimvea=,yA+/1 -]{0,60}") {
        let _ = ClientFirst::parse(&data);
        let _ = ClientFirst::parse(text.as_bytes());
        let _ = ClientFinal::parse(text.as_bytes());
        let _ = ServerFirst::parse(&text);
        let _ = message::server_final(text.as_bytes());
    }
}
