// SPDX-License-Identifier: Apache-2.0
//! Wrong settings: every message names the key and the file and says what to do.

mod support;

use std::path::PathBuf;
use std::process::Command;

use support::{Authority, Leaf};
use underpass_tls::{
    ClientSide, ServerSide, SslMode, TlsClientOptions, TlsServerOptions, common_name, server_end_point_hash,
};

fn client_error(options: &TlsClientOptions) -> String {
    ClientSide::build(options).expect_err("an error").to_string()
}

fn server_error(options: &TlsServerOptions) -> String {
    ServerSide::build(options).expect_err("an error").to_string()
}

#[test]
fn disable_reads_nothing() {
    let options = TlsClientOptions { key_file: Some("/nowhere".into()), ..TlsClientOptions::default() };
    assert!(ClientSide::build(&options).unwrap().is_none());
    let options = TlsServerOptions { sslmode: SslMode::Disable, ..TlsServerOptions::default() };
    assert!(ServerSide::build(&options).unwrap().is_none());
}

#[test]
fn client_side_says_what_is_missing_or_wrong() {
    let ca = Authority::new("ca");
    let (one, two) = (ca.issue(&Leaf::dns("one")), ca.issue(&Leaf::dns("two")));
    let mut options = TlsClientOptions { sslmode: SslMode::Allow, ..TlsClientOptions::default() };
    let error = client_error(&options);
    assert!(error.contains("client_tls_key_file must be set: client_tls_sslmode = allow"), "{error}");
    options.key_file = Some(one.key.clone());
    assert!(client_error(&options).contains("client_tls_cert_file must be set"));
    options.cert_file = Some(PathBuf::from("/nowhere/cert.pem"));
    let error = client_error(&options);
    assert!(error.contains("client_tls_cert_file: cannot read /nowhere/cert.pem"), "{error}");
    options.cert_file = Some(one.key.clone());
    assert!(client_error(&options).contains("holds no \"BEGIN CERTIFICATE\""));
    options.cert_file = Some(two.cert.clone());
    let error = client_error(&options);
    assert!(error.contains("is not the key of the certificate in"), "{error}");
    options.cert_file = Some(one.cert.clone());
    options.key_file = Some(one.cert.clone());
    assert!(client_error(&options).contains("holds no private key"));
    options.key_file = Some(one.key.clone());
    options.sslmode = SslMode::VerifyFull;
    assert!(client_error(&options).contains("client_tls_ca_file must be set"));
    options.sslmode = SslMode::VerifyCa;
    options.ca_file = Some(ca.file());
    options.ciphers = "AES256-SHA".into();
    assert!(client_error(&options).contains("client_tls_ciphers"));
    // With TLS 1.3 alone the list for TLS 1.2 does not matter.
    options.protocols = "tlsv1.3".into();
    options.dheparams = "legacy".into();
    let side = ClientSide::build(&options).unwrap().unwrap();
    assert!(
        side.warnings.iter().any(|warning| warning.contains("client_tls_dheparams")),
        "{:?}",
        side.warnings
    );
}

#[test]
fn encrypted_keys_get_a_hint() {
    let ca = Authority::new("ca");
    let files = ca.issue(&Leaf::dns("one"));
    std::fs::write(
        &files.key,
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n",
    )
    .unwrap();
    let options = TlsClientOptions {
        sslmode: SslMode::Require,
        key_file: Some(files.key),
        cert_file: Some(files.cert),
        ..TlsClientOptions::default()
    };
    assert!(client_error(&options).contains("passphrase"));
}

#[test]
fn server_side_says_what_is_missing_or_wrong() {
    let ca = Authority::new("ca");
    let files = ca.issue(&Leaf::common_name("pooler"));
    let set = |change: fn(&mut TlsServerOptions, PathBuf), path: &PathBuf| {
        let mut options =
            TlsServerOptions { sslmode: SslMode::VerifyFull, ca_file: Some(ca.file()), ..Default::default() };
        change(&mut options, path.clone());
        server_error(&options)
    };
    assert!(set(|o, p| o.key_file = Some(p), &files.key).contains("server_tls_cert_file must be set"));
    assert!(set(|o, p| o.cert_file = Some(p), &files.cert).contains("server_tls_key_file must be set"));
    assert!(
        set(|o, p| o.ca_file = Some(p), &"/nowhere".into())
            .contains("server_tls_ca_file: cannot read /nowhere")
    );
    assert!(set(|o, _| o.protocols = "tlsv9".into(), &files.key).contains("server_tls_protocols = tlsv9"));
    assert!(ServerSide::server_name("no such host!").is_err());
    for host in ["::1", "10.0.0.1", "db.example.com.", "my_db", "a.b_c.internal"] {
        assert!(ServerSide::server_name(host).is_ok(), "{host}");
    }
}

/// PostgreSQL computes its side of the channel binding with OpenSSL; so does this test, for every kind of
/// signature that OpenSSL makes.
#[test]
fn end_point_hash_agrees_with_openssl() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).into_os_string().into_string().unwrap();
    let openssl = |arguments: &[&str]| match Command::new("openssl").args(arguments).output() {
        Ok(output) => {
            assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
            Some(output.stdout)
        }
        Err(_) => None,
    };
    if openssl(&["version"]).is_none() {
        println!("skipped: no openssl command");
        return;
    }
    let pss = ["-sigopt", "rsa_padding_mode:pss"];
    type Case<'a> = (&'a [&'a str], &'a [&'a str], &'a str, Option<&'a str>);
    let cases: [Case<'_>; 8] = [
        (&["rsa:2048"], &[], "-sha1", Some("-sha256")),
        (&["rsa:2048"], &[], "-sha256", Some("-sha256")),
        (&["rsa:2048"], &[], "-sha384", Some("-sha384")),
        (&["rsa:2048"], &[], "-sha512", Some("-sha512")),
        (&["rsa:2048"], &pss, "-sha384", Some("-sha384")),
        (&["ec", "-pkeyopt", "ec_paramgen_curve:P-256"], &[], "-sha256", Some("-sha256")),
        (&["ec", "-pkeyopt", "ec_paramgen_curve:P-384"], &[], "-sha512", Some("-sha512")),
        (&["ed25519"], &[], "-sha256", None),
    ];
    for (key, options, digest, expected) in cases {
        let (key_out, der) = (path("key"), path("der"));
        let base =
            ["req", "-x509", "-nodes", "-days", "2", "-subj", "/O=x/CN=first/CN=joe", "-keyout", &key_out];
        let out = ["-outform", "DER", "-out", &der, digest, "-newkey"];
        openssl(&[&base[..], &out, key, options].concat());
        let cert = std::fs::read(&der).unwrap();
        let wanted = expected.map(|digest| openssl(&["dgst", "-binary", digest, &der]).unwrap());
        assert_eq!(server_end_point_hash(&cert), wanted, "{key:?} {digest}");
        assert_eq!(common_name(&cert).as_deref(), Some("joe"));
    }
    assert_eq!(server_end_point_hash(b"no certificate"), None);
    assert_eq!(common_name(b"no certificate"), None);
}
