// SPDX-License-Identifier: Apache-2.0
//! PgBouncer between our two machines: `ServerAuth` logs in to PgBouncer, PgBouncer logs in to `ClientAuth`.
//! Both of its SCRAM roles, and its pass-through by client key, meet ours.

mod support;

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use support::fake_server::FakeServer;
use support::login::login;
use support::postgres::{PASSWORD, account};
use tempfile::TempDir;
use underpass_auth::{
    AuthContext, AuthOptions, Credential, Method, Password, ScramKeys, Secret, ServerLogin, md5,
};

struct PgBouncer {
    _dir: TempDir,
    child: Child,
    port: u16,
}

impl PgBouncer {
    /// `None`, with a line that says why, where PgBouncer is not installed.
    fn start(auth_type: &str, secret: &Secret, server_port: u16) -> Option<Self> {
        let dir = tempfile::tempdir().expect("temporary directory");
        let port = TcpListener::bind("127.0.0.1:0").expect("port").local_addr().expect("address").port();
        let path = |name: &str| dir.path().join(name);
        let ini = format!(
            "[databases]\npostgres = host=127.0.0.1 port={server_port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
             listen_port = {port}\nunix_socket_dir =\nauth_type = {auth_type}\nauth_file = {}\n\
             server_tls_sslmode = disable\n",
            path("users").display()
        );
        fs::write(path("ini"), ini).expect("write");
        fs::write(path("users"), format!("\"joe\" \"{secret}\"\n")).expect("write");
        let mut command = Command::new("pgbouncer");
        command.arg(path("ini")).stdout(Stdio::null()).stderr(Stdio::null());
        if let Some((uid, gid)) = account() {
            chown(dir.path(), Some(uid), Some(gid)).expect("chown");
            command.uid(uid).gid(gid);
        }
        let Ok(child) = command.spawn() else {
            println!("skipped: no pgbouncer program");
            return None;
        };
        let server = Self { _dir: dir, child, port };
        let deadline = Instant::now() + Duration::from_secs(30);
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(Instant::now() < deadline, "PgBouncer does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        Some(server)
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn pgbouncer_speaks_with_both_roles() {
    let context = Arc::new(AuthContext::new(&AuthOptions::default()).expect("randomness"));
    let plain = Secret::Plain(Password::new(PASSWORD));
    let verifier = Secret::Scram(ScramKeys::derive(PASSWORD.as_bytes(), b"0123456789abcdef", 4096).secret());
    let hash = Secret::Md5(md5::hash(PASSWORD.as_bytes(), b"joe"));
    for (auth_type, stored, method, behind) in [
        ("plain", &plain, Method::Plain, &plain),
        ("plain", &plain, Method::ScramSha256, &verifier),
        ("md5", &plain, Method::Md5, &hash),
        ("md5", &hash, Method::Md5, &plain),
        ("scram-sha-256", &plain, Method::ScramSha256, &plain),
        // PgBouncer holds only the verifier: it passes on the client key that our ServerAuth proved.
        ("scram-sha-256", &verifier, Method::ScramSha256, &verifier),
        ("md5", &verifier, Method::Md5, &verifier),
    ] {
        let fake = FakeServer::start(context.clone(), method, Credential::Secret(behind.clone()), None);
        let Some(pgbouncer) = PgBouncer::start(auth_type, stored, fake.port) else { return };
        let us =
            |secret| ServerLogin { user: b"joe".to_vec(), secret: Some(secret), ..ServerLogin::default() };
        let wrong =
            login(&context, pgbouncer.port, None, us(Secret::parse("wrong"))).expect_err("wrong password");
        assert!(wrong.contains("failed"), "{auth_type}: {wrong}");
        let right = login(&context, pgbouncer.port, None, us(plain.clone()));
        assert!(right.is_ok(), "{auth_type} {stored:?}, {method:?} {behind:?}: {right:?}");
        drop(pgbouncer);
        assert!(fake.outcome().0.is_ok());
    }
}
