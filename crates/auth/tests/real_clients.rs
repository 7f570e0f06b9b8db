// SPDX-License-Identifier: Apache-2.0
//! Real clients, psql (libpq) and tokio-postgres, against `ClientAuth`.

mod support;

use std::process::Command;
use std::sync::Arc;

use support::certificates::Authority;
use support::fake_server::FakeServer;
use support::postgres::{PASSWORD, bin};
use underpass_auth::scram::ScramServerError;
use underpass_auth::{
    AuthContext, AuthOptions, Credential, Method, MockMethod, Password, Refusal, ScramKeys, Secret, md5,
};
use underpass_tls::{ClientSide, SslMode, TlsClientOptions};

fn context() -> Arc<AuthContext> {
    let options = AuthOptions { mock_method: MockMethod::Scram, ..AuthOptions::default() };
    Arc::new(AuthContext::new(&options).expect("randomness"))
}

fn secrets() -> [Credential; 3] {
    let password = PASSWORD.as_bytes();
    [
        Secret::Plain(Password::new(password)),
        Secret::Scram(ScramKeys::derive(password, b"0123456789abcdef", 4096).secret()),
        Secret::Md5(md5::hash(password, b"joe")),
    ]
    .map(Credential::Secret)
}

/// Whether psql got in, and what it said.
fn psql(port: u16, password: &str, parameters: &str) -> Option<(bool, String)> {
    let Some(bin) = bin() else {
        println!("skipped: no psql; install postgresql-client or set PG_BIN");
        return None;
    };
    let home = tempfile::tempdir().expect("directory");
    let output = Command::new(bin.join("psql"))
        .env_clear()
        .env("HOME", home.path())
        .env("PGPASSWORD", password)
        .args(["-X", "-w", "-c", "select 1"])
        .arg(format!("host=localhost hostaddr=127.0.0.1 port={port} user=joe dbname=postgres {parameters}"))
        .output()
        .expect("psql runs");
    Some((output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned()))
}

#[test]
fn psql_logs_in_by_every_method() {
    let context = context();
    let [plain, scram, md5] = secrets();
    for (method, credential) in [
        (Method::Trust, &Credential::NoPassword),
        (Method::Any, &Credential::UnknownUser),
        (Method::Plain, &plain),
        (Method::Plain, &scram),
        (Method::Plain, &md5),
        (Method::Md5, &plain),
        (Method::Md5, &scram),
        (Method::Md5, &md5),
        (Method::ScramSha256, &plain),
        (Method::ScramSha256, &scram),
    ] {
        let fake = FakeServer::start(context.clone(), method, credential.clone(), None);
        let Some((inside, said)) = psql(fake.port, PASSWORD, "sslmode=disable") else { return };
        assert!(inside, "{method:?} {credential:?}: {said}");
        assert!(fake.outcome().0.is_ok());
        if matches!(method, Method::Trust | Method::Any) {
            continue;
        }
        let fake = FakeServer::start(context.clone(), method, credential.clone(), None);
        let Some((inside, said)) = psql(fake.port, "wrong", "sslmode=disable") else { return };
        assert!(!inside);
        assert!(said.contains("password authentication failed for user \"joe\""), "{said}");
        assert_eq!(fake.outcome().0.unwrap_err(), Refusal::WrongPassword);
    }
}

#[test]
fn psql_sees_no_difference_between_wrong_and_unknown() {
    let context = context();
    for method in [Method::Plain, Method::Md5, Method::ScramSha256] {
        let said =
            [secrets()[1].clone(), Credential::UnknownUser, Credential::NoPassword].map(|credential| {
                let fake = FakeServer::start(context.clone(), method, credential, None);
                let said = psql(fake.port, "wrong", "sslmode=disable")?.1;
                Some(said.replace(&fake.port.to_string(), "PORT"))
            });
        assert!(said.windows(2).all(|pair| pair[0] == pair[1]), "{method:?}: {said:?}");
    }
}

fn side(authority: &Authority, change: impl FnOnce(&mut TlsClientOptions)) -> ClientSide {
    let (key, cert) = authority.issue("localhost", None);
    let mut options = TlsClientOptions {
        sslmode: SslMode::Prefer,
        key_file: Some(key),
        cert_file: Some(cert),
        ..TlsClientOptions::default()
    };
    change(&mut options);
    ClientSide::build(&options).expect("settings").expect("TLS is on")
}

#[test]
fn psql_binds_the_channel() {
    let context = context();
    for algorithm in [&rcgen::PKCS_ECDSA_P256_SHA256, &rcgen::PKCS_ECDSA_P384_SHA384] {
        let authority = Authority::new(algorithm);
        for protocols in ["tlsv1.2", "tlsv1.3"] {
            let side = side(&authority, |options| options.protocols = protocols.into());
            let ca = authority.ca();
            let parameters =
                format!("sslmode=verify-full sslrootcert={} channel_binding=require", ca.display());
            let [plain, scram, _] = secrets();
            for credential in [plain, scram] {
                let start = || {
                    FakeServer::start(
                        context.clone(),
                        Method::ScramSha256,
                        credential.clone(),
                        Some(side.clone()),
                    )
                };
                let fake = start();
                let Some((inside, said)) = psql(fake.port, PASSWORD, &parameters) else { return };
                assert!(inside, "{protocols}: {said}");
                assert_eq!(fake.outcome().1, ["SCRAM-SHA-256-PLUS"]);
                // A client that does not bind is served as well.
                let fake = start();
                let Some((inside, said)) =
                    psql(fake.port, PASSWORD, "sslmode=require channel_binding=disable")
                else {
                    return;
                };
                assert!(inside, "{said}");
                assert_eq!(fake.outcome().1, ["SCRAM-SHA-256"]);
            }
        }
    }
}

/// psql is connected to one certificate while the exchange is bound to another.
#[test]
fn psql_behind_another_certificate_is_refused() {
    let authority = Authority::new(&rcgen::PKCS_ECDSA_P256_SHA256);
    let mut between = side(&Authority::new(&rcgen::PKCS_ECDSA_P256_SHA256), |_| {});
    between.end_point_hash = side(&authority, |_| {}).end_point_hash;
    let fake = FakeServer::start(context(), Method::ScramSha256, secrets()[0].clone(), Some(between));
    let Some((inside, said)) = psql(fake.port, PASSWORD, "sslmode=require channel_binding=require") else {
        return;
    };
    assert!(!inside);
    assert!(said.contains("channel binding check failed"), "{said}");
    assert_eq!(fake.outcome().0.unwrap_err(), Refusal::Scram(ScramServerError::Binding));
}

/// No hash is defined for Ed25519, so binding is not offered and libpq does without.
#[test]
fn psql_logs_in_to_a_certificate_that_cannot_be_bound() {
    let side = side(&Authority::new(&rcgen::PKCS_ED25519), |_| {});
    assert_eq!(side.end_point_hash, None);
    let fake = FakeServer::start(context(), Method::ScramSha256, secrets()[0].clone(), Some(side));
    let Some((inside, said)) = psql(fake.port, PASSWORD, "sslmode=require") else { return };
    assert!(inside, "{said}");
    assert_eq!(fake.outcome().1, ["SCRAM-SHA-256"]);
}

#[test]
fn psql_logs_in_by_certificate() {
    let authority = Authority::new(&rcgen::PKCS_ECDSA_P256_SHA256);
    let side = side(&authority, |options| {
        (options.sslmode, options.ca_file) = (SslMode::VerifyFull, Some(authority.ca()))
    });
    for (name, allowed) in [("joe", true), ("jim", false)] {
        let (key, cert) = authority.issue(name, None);
        let parameters = format!("sslmode=require sslkey={} sslcert={}", key.display(), cert.display());
        let fake = FakeServer::start(context(), Method::Cert, Credential::NoPassword, Some(side.clone()));
        let Some((inside, said)) = psql(fake.port, "", &parameters) else { return };
        assert_eq!(inside, allowed, "{said}");
        assert_eq!(fake.outcome().0.is_ok(), allowed);
        assert!(allowed || said.contains("certificate authentication failed for user \"joe\""), "{said}");
    }
}

/// An implementation of SCRAM that is independent of libpq and of ours.
#[tokio::test]
async fn tokio_postgres_logs_in() {
    let context = context();
    let [plain, scram, md5] = secrets();
    for (method, credential) in [
        (Method::Plain, &plain),
        (Method::Md5, &md5),
        (Method::Md5, &plain),
        (Method::ScramSha256, &plain),
        (Method::ScramSha256, &scram),
    ] {
        for (password, right) in [(PASSWORD, true), ("wrong", false)] {
            let fake = FakeServer::start(context.clone(), method, credential.clone(), None);
            let mut config = tokio_postgres::Config::new();
            config.host("127.0.0.1").port(fake.port).user("joe").password(password);
            let result = config.connect(tokio_postgres::NoTls).await;
            match result {
                Ok((client, connection)) => {
                    assert!(right);
                    let task = tokio::spawn(connection);
                    client.simple_query("select 1").await.expect("an answer");
                    drop(client);
                    task.await.expect("task").expect("a clean end");
                }
                Err(error) => {
                    assert!(!right, "{method:?}: {error}");
                    let code = error.code().map(|code| code.code().to_owned());
                    assert_eq!(code.as_deref(), Some("28P01"), "{error:?}");
                }
            }
            assert_eq!(fake.outcome().0.is_ok(), right);
        }
    }
}
