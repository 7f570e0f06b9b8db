// SPDX-License-Identifier: Apache-2.0
//! Both sides against each other over memory: every sslmode, certificates good and bad.

mod support;

use support::{Authority, Files, Leaf, handshake};
use underpass_tls::{ClientSide, ServerSide, SslMode, TlsClientOptions, TlsServerOptions, describe};

fn accepting(files: &Files, change: impl FnOnce(&mut TlsClientOptions)) -> ClientSide {
    let mut options = TlsClientOptions {
        sslmode: SslMode::Require,
        key_file: Some(files.key.clone()),
        cert_file: Some(files.cert.clone()),
        ..TlsClientOptions::default()
    };
    change(&mut options);
    ClientSide::build(&options).expect("client side").expect("TLS is on")
}

fn connecting(sslmode: SslMode, change: impl FnOnce(&mut TlsServerOptions)) -> ServerSide {
    let mut options = TlsServerOptions { sslmode, ..TlsServerOptions::default() };
    change(&mut options);
    ServerSide::build(&options).expect("server side").expect("TLS is on")
}

#[test]
fn modes_check_as_much_as_they_promise() {
    let (ca, other) = (Authority::new("ca"), Authority::new("other"));
    let side = accepting(&ca.issue(&Leaf::dns("db.example.com")), |_| {});
    let trusts = |mode, authority: &Authority| connecting(mode, |o| o.ca_file = Some(authority.file()));
    for mode in [SslMode::Allow, SslMode::Prefer, SslMode::Require] {
        assert!(handshake(&side, &connecting(mode, |_| {}), "anything").is_ok(), "{mode}");
    }
    assert!(handshake(&side, &trusts(SslMode::VerifyCa, &ca), "elsewhere").is_ok());
    assert!(handshake(&side, &trusts(SslMode::VerifyCa, &other), "db.example.com").is_err());
    assert!(handshake(&side, &trusts(SslMode::VerifyFull, &ca), "db.example.com").is_ok());
    assert!(handshake(&side, &trusts(SslMode::VerifyFull, &ca), "db.example.com.").is_ok());
    assert!(handshake(&side, &trusts(SslMode::VerifyFull, &ca), "elsewhere").is_err());
    assert!(handshake(&side, &trusts(SslMode::VerifyFull, &ca), "127.0.0.1").is_err());
    assert!(handshake(&side, &trusts(SslMode::VerifyFull, &other), "db.example.com").is_err());
}

#[test]
fn certificates_postgresql_users_have_are_accepted() {
    let full = |ca| connecting(SslMode::VerifyFull, |o| o.ca_file = Some(ca));
    // Only a common name, no alternative names.
    let ca = Authority::new("ca");
    let side = accepting(&ca.issue(&Leaf::common_name("db.example.com")), |_| {});
    assert!(handshake(&side, &full(ca.file()), "db.example.com").is_ok());
    assert!(handshake(&side, &full(ca.file()), "db2.example.com").is_err());
    // A common name beside alternative names counts for nothing.
    let leaf = Leaf { common_name: Some("db2.example.com"), ..Leaf::dns("db.example.com") };
    assert!(handshake(&accepting(&ca.issue(&leaf), |_| {}), &full(ca.file()), "db2.example.com").is_err());
    // Self-signed, its own CA, marked as CA: what `openssl req -x509` makes.
    let own = Authority::new("db.example.com");
    let side = accepting(&own.files(), |_| {});
    assert!(handshake(&side, &full(own.file()), "db.example.com").is_ok());
    assert!(handshake(&side, &full(own.file()), "elsewhere").is_err());
    assert!(handshake(&side, &full(ca.file()), "db.example.com").is_err());
    // The same, expired.
    let old = Authority::expired("db.example.com");
    let side = accepting(&old.files(), |_| {});
    let error = handshake(&side, &full(old.file()), "db.example.com").err().expect("expired");
    assert!(format!("{error:?}").contains("Expired"), "{error:?}");
}

/// What `openssl x509 -req` makes without further words, before OpenSSL 3.2.
#[test]
fn certificates_of_version_1_serve_where_none_is_checked() {
    let ca = Authority::new("ca");
    let (first, other) = (ca.issue(&Leaf::common_name("db")), ca.issue(&Leaf::common_name("db")));
    for protocols in ["tlsv1.2", "tlsv1.3"] {
        let side = |key: &Files| {
            let mut side = accepting(&first, |o| o.protocols = protocols.into());
            side.config = support::showing(&side.config, support::version_1(&first.der), key);
            side
        };
        for mode in [SslMode::Allow, SslMode::Prefer, SslMode::Require] {
            handshake(&side(&first), &connecting(mode, |_| {}), "db")
                .expect("nothing is checked but the key");
            assert!(handshake(&side(&other), &connecting(mode, |_| {}), "db").is_err(), "it has another key");
        }
        let verifying = connecting(SslMode::VerifyCa, |o| o.ca_file = Some(ca.file()));
        assert!(handshake(&side(&first), &verifying, "db").is_err());
    }
}

#[test]
fn client_certificates_are_asked_for_where_there_is_a_ca() {
    let ca = Authority::new("ca");
    let files = ca.issue(&Leaf::dns("pooler"));
    let joe = ca.issue(&Leaf::common_name("joe"));
    let other = Authority::new("other");
    let stranger = other.issue(&Leaf::common_name("joe"));
    let with = |files: &Files| {
        let (key, cert) = (files.key.clone(), files.cert.clone());
        connecting(SslMode::Require, |o| (o.key_file, o.cert_file) = (Some(key), Some(cert)))
    };
    for mode in [SslMode::VerifyCa, SslMode::VerifyFull] {
        let side = accepting(&files, |o| (o.sslmode, o.ca_file) = (mode, Some(ca.file())));
        let pair = handshake(&side, &with(&joe), "pooler").expect("joe is known to the CA");
        assert_eq!(side.peer_common_name(&pair.server).as_deref(), Some("joe"));
        assert!(handshake(&side, &with(&stranger), "pooler").is_err());
        assert!(handshake(&side, &connecting(SslMode::Require, |_| {}), "pooler").is_err());
    }
    // With a CA the other modes ask too, and take no for an answer.
    for mode in [SslMode::Allow, SslMode::Prefer, SslMode::Require] {
        let side = accepting(&files, |o| (o.sslmode, o.ca_file) = (mode, Some(ca.file())));
        let pair = handshake(&side, &with(&joe), "pooler").expect("joe is known to the CA");
        assert_eq!(side.peer_common_name(&pair.server).as_deref(), Some("joe"), "{mode}");
        assert!(handshake(&side, &with(&stranger), "pooler").is_err(), "{mode}");
        let pair = handshake(&side, &connecting(SslMode::Require, |_| {}), "pooler").expect("without one");
        assert_eq!(side.peer_common_name(&pair.server), None, "{mode}");
    }
    let side = accepting(&files, |_| {});
    let pair = handshake(&side, &with(&stranger), "pooler").expect("nobody looks");
    assert_eq!(side.peer_common_name(&pair.server), None);
}

#[test]
fn protocol_and_alpn_come_out_as_set() {
    let ca = Authority::new("ca");
    let files = ca.issue(&Leaf::dns("pooler"));
    for (protocols, ciphers, expected) in [
        ("tlsv1.2", "AES128", "TLSv1.2/ECDHE-ECDSA-AES128-GCM-SHA256"),
        ("tlsv1.3", "default", "TLSv1.3/TLS_CHACHA20_POLY1305_SHA256"),
    ] {
        let side = accepting(&files, |o| {
            (o.protocols, o.ciphers) = (protocols.into(), ciphers.into());
            o.tls13_ciphers = "TLS_CHACHA20_POLY1305_SHA256".into();
        });
        let pair = handshake(&side, &connecting(SslMode::Prefer, |_| {}), "pooler").expect("handshake");
        assert_eq!(describe(&pair.client).as_deref(), Some(expected));
        assert_eq!(describe(&pair.server).as_deref(), Some(expected));
        assert!(ClientSide::direct_tls_allowed(&pair.server));
        // Both ends compute the same channel binding.
        assert!(side.end_point_hash.is_some());
        assert_eq!(ServerSide::end_point_hash(&pair.client), side.end_point_hash);
    }
    let old = accepting(&files, |o| o.protocols = "tlsv1.2".into());
    let new = connecting(SslMode::Prefer, |o| o.protocols = "tlsv1.3".into());
    assert!(handshake(&old, &new, "pooler").is_err());
}

#[test]
fn a_client_without_our_alpn_has_no_direct_tls() {
    let ca = Authority::new("ca");
    let side = accepting(&ca.issue(&Leaf::dns("pooler")), |_| {});
    let mut client = connecting(SslMode::Prefer, |_| {});
    let mut config = (*client.config).clone();
    config.alpn_protocols.clear();
    client.config = config.into();
    let pair = handshake(&side, &client, "pooler").expect("fine after SSLRequest");
    assert!(!ClientSide::direct_tls_allowed(&pair.server));
    let mut config = (*client.config).clone();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    client.config = config.into();
    assert!(handshake(&side, &client, "pooler").is_err());
}

#[test]
fn sessions_are_resumed_by_ticket() {
    let ca = Authority::new("ca");
    let files = ca.issue(&Leaf::dns("pooler"));
    for protocols in ["tlsv1.2", "tlsv1.3"] {
        let side = accepting(&files, |o| o.protocols = protocols.into());
        let mut client = connecting(SslMode::Prefer, |_| {});
        let mut config = (*client.config).clone();
        config.resumption = rustls::client::Resumption::in_memory_sessions(4);
        client.config = config.into();
        let kinds = [(); 2].map(|()| {
            let pair = handshake(&side, &client, "pooler").expect("handshake");
            pair.server.handshake_kind().expect("done")
        });
        assert_eq!(kinds, [rustls::HandshakeKind::Full, rustls::HandshakeKind::Resumed], "{protocols}");
    }
}
