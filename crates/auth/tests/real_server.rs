// SPDX-License-Identifier: Apache-2.0
//! `ServerAuth` against a real PostgreSQL: every method, TLS, channel binding, pass-through by key.

mod support;

use std::sync::Arc;

use support::certificates::Authority;
use support::fake_server::FakeServer;
use support::login::login;
use support::postgres::{PASSWORD, Postgres};
use underpass_auth::{
    AuthContext, AuthOptions, ClientAuth, ClientLogin, ClientStep, Credential, Identity, Method, Password,
    Secret, ServerLogin, auth_query_row,
};
use underpass_tls::{ServerSide, SslMode, TlsServerOptions};

fn context() -> Arc<AuthContext> {
    Arc::new(AuthContext::new(&AuthOptions::default()).expect("randomness"))
}

fn with(user: &str, secret: Option<Secret>) -> ServerLogin {
    ServerLogin { user: user.into(), secret, ..ServerLogin::default() }
}

fn plain(text: &str) -> Option<Secret> {
    Some(Secret::Plain(Password::new(text)))
}

/// What PgBouncer's default auth_query finds.
fn stored(server: &Postgres, user: &str) -> Secret {
    let text = server.sql(&format!("select rolpassword from pg_authid where rolname = '{user}'"));
    match auth_query_row(&[Some(user.as_bytes()), Some(text.as_bytes())]).expect("a row") {
        Credential::Secret(secret) => secret,
        other => panic!("{other:?}"),
    }
}

#[test]
fn all_methods_of_a_real_server() {
    let Some(server) = Postgres::start() else { return };
    let context = context();
    let try_login = |tls: Option<&ServerSide>, with| login(&context, server.port, tls, with);

    // Plain passwords serve every method, also one that SASLprep changes.
    for user in ["scram_user", "md5_user", "plain_user", "trust_user"] {
        for round in 0..2 {
            let result = try_login(None, with(user, plain(PASSWORD)));
            assert!(result.is_ok(), "{user} {round}: {result:?}");
        }
    }
    for user in ["scram_user", "md5_user", "plain_user"] {
        let error = try_login(None, with(user, plain("wrong"))).unwrap_err();
        assert!(error.contains("28P01"), "{user}: {error}");
    }
    assert_eq!(try_login(None, with("trust_user", None)), Ok(Vec::new()));
    assert!(try_login(None, with("reject_user", plain("x"))).unwrap_err().contains("28000"));

    // Stored secrets as auth_query returns them.
    let md5 = stored(&server, "md5_user");
    assert_eq!(md5.kind(), "md5");
    assert!(try_login(None, with("md5_user", Some(md5.clone()))).is_ok());
    assert!(
        try_login(None, with("scram_user", Some(md5))).unwrap_err().contains("only an md5 hash is stored")
    );
    let scram = stored(&server, "scram_user");
    assert_eq!(scram.kind(), "SCRAM-SHA-256");
    let error = try_login(None, with("scram_user", Some(scram.clone()))).unwrap_err();
    assert!(error.contains("only a SCRAM secret is stored"), "{error}");

    pass_through(&server, &context, &scram);
    tls(&server, &context);
}

/// A client that proves a SCRAM password to us opens the server with the keys it proved.
fn pass_through(server: &Postgres, context: &Arc<AuthContext>, secret: &Secret) {
    let fake =
        FakeServer::start(context.clone(), Method::ScramSha256, Credential::Secret(secret.clone()), None);
    login(context, fake.port, None, with("scram_user", plain(PASSWORD))).expect("the client is let in");
    let keys = fake.outcome().0.expect("proved").keys;
    let by_keys = |user| ServerLogin { keys: keys.clone(), ..with(user, Some(secret.clone())) };
    login(context, server.port, None, by_keys("scram_user")).expect("the server lets the keys in");
    // Another user's verifier has another salt: no attempt is made.
    let other = login(context, server.port, None, by_keys("plain_user")).unwrap_err();
    assert!(other.contains("clear-text password"), "{other}");
    server.sql(&format!(
        "set password_encryption = 'scram-sha-256'; alter role scram_user password '{PASSWORD}'"
    ));
    let stale = login(context, server.port, None, by_keys("scram_user")).unwrap_err();
    assert!(stale.contains("another salt"), "{stale}");

    // A clear-text password checked against the verifier yields the same keys.
    let now = stored(server, "scram_user");
    let (mut auth, _) = ClientAuth::start(
        context.clone(),
        ClientLogin {
            method: Method::Plain,
            user: b"scram_user",
            credential: Credential::Secret(now),
            channel_binding: None,
            identity: Identity::default(),
        },
    );
    let ClientStep::Done { login: proved, .. } = auth.message(format!("{PASSWORD}\0").as_bytes()) else {
        panic!("the password is right");
    };
    let by_keys = ServerLogin { keys: proved.keys, ..with("scram_user", None) };
    login(context, server.port, None, by_keys).expect("the server lets the keys in");
}

fn tls(server: &Postgres, context: &Arc<AuthContext>) {
    // The signature of the certificate decides the hash; Ed25519 has none, and then nobody binds.
    for (algorithm, mechanism) in [
        (&rcgen::PKCS_ED25519, &b"SCRAM-SHA-256\0"[..]),
        (&rcgen::PKCS_ECDSA_P384_SHA384, b"SCRAM-SHA-256-PLUS\0"),
        (&rcgen::PKCS_ECDSA_P256_SHA256, b"SCRAM-SHA-256-PLUS\0"),
    ] {
        let authority = Authority::new(algorithm);
        server.use_tls(&authority);
        let side = |sslmode, change: fn(&mut TlsServerOptions)| {
            let mut options =
                TlsServerOptions { sslmode, ca_file: Some(authority.ca()), ..Default::default() };
            change(&mut options);
            ServerSide::build(&options).expect("settings").expect("TLS is on")
        };
        for sslmode in [SslMode::Require, SslMode::VerifyCa, SslMode::VerifyFull] {
            let sent = login(
                context,
                server.port,
                Some(&side(sslmode, |_| {})),
                with("scram_user", plain(PASSWORD)),
            );
            assert!(
                sent.as_ref().is_ok_and(|sent| sent.starts_with(mechanism)),
                "{algorithm:?} {sslmode}: {sent:?}"
            );
        }
        let tls12 = side(SslMode::VerifyFull, |options| options.protocols = "tlsv1.2".into());
        login(context, server.port, Some(&tls12), with("md5_user", plain(PASSWORD))).expect("TLS 1.2");

        let (key, cert) = authority.issue("cert_user", None);
        let options = TlsServerOptions {
            sslmode: SslMode::VerifyFull,
            ca_file: Some(authority.ca()),
            key_file: Some(key),
            cert_file: Some(cert),
            ..TlsServerOptions::default()
        };
        let own = ServerSide::build(&options).expect("settings").expect("TLS is on");
        login(context, server.port, Some(&own), with("cert_user", None)).expect("our certificate logs in");
        let without = login(context, server.port, Some(&tls12), with("cert_user", None)).unwrap_err();
        assert!(without.contains("28000"), "{without}");
    }
}
