// SPDX-License-Identifier: Apache-2.0
//! What the parts of a login cost: `cargo bench -p underpass-auth`.

use std::sync::Arc;
use std::time::Instant;

use underpass_auth::{
    AuthContext, AuthOptions, ClientAuth, ClientLogin, ClientStep, Credential, Identity, Method, Password,
    ScramKeys, Secret, ServerAuth, ServerLogin, ServerStep,
};

fn time(name: &str, rounds: u32, mut work: impl FnMut()) {
    // `cargo test --all-targets` runs benches too, to see that they work: once is enough then.
    let rounds = if std::env::args().any(|argument| argument == "--bench") { rounds } else { 1 };
    work();
    let begin = Instant::now();
    for _ in 0..rounds {
        work();
    }
    println!("{name}: {:?}", begin.elapsed() / rounds);
}

/// Our two roles against each other.
fn login(context: &Arc<AuthContext>, method: Method, secret: &Secret) {
    let secret = secret.clone();
    let server = ServerLogin {
        user: b"joe".to_vec(),
        secret: Some(Secret::parse("password")),
        ..ServerLogin::default()
    };
    let mut server = ServerAuth::new(context.clone(), server);
    let client = ClientLogin {
        method,
        user: b"joe",
        credential: Credential::Secret(secret),
        channel_binding: None,
        identity: Identity::default(),
    };
    let (mut auth, mut step) = ClientAuth::start(context.clone(), client);
    loop {
        step = match step {
            ClientStep::Send(body) => {
                let ServerStep::Send(answer) = server.message(&body) else { panic!("a request is answered") };
                auth.message(&answer)
            }
            ClientStep::Derive(_) => panic!("not asked for"),
            ClientStep::Done { send, .. } => {
                if let Some(body) = send {
                    server.message(&body);
                }
                return;
            }
            ClientStep::Failed(refusal) => panic!("{refusal}"),
        }
    }
}

fn main() {
    let context = Arc::new(AuthContext::new(&AuthOptions::default()).expect("randomness"));
    let cold = AuthOptions { cache_capacity: 0, ..AuthOptions::default() };
    let cold = Arc::new(AuthContext::new(&cold).expect("randomness"));
    let plain = Secret::Plain(Password::new("password"));
    let verifier = Secret::Scram(ScramKeys::derive(b"password", b"0123456789abcdef", 4096).secret());
    time("PBKDF2, 4096 iterations", 100, || {
        std::hint::black_box(ScramKeys::derive(b"password", b"0123456789abcdef", 4096));
    });
    time("SCRAM login, both roles, cached", 10_000, || login(&context, Method::ScramSha256, &verifier));
    time("SCRAM login, both roles, plain password stored, cached", 10_000, || {
        login(&context, Method::ScramSha256, &plain);
    });
    time("SCRAM login, both roles, no cache (PBKDF2 by the client role)", 100, || {
        login(&cold, Method::ScramSha256, &verifier);
    });
    time("md5 login, both roles", 10_000, || login(&context, Method::Md5, &plain));
}
