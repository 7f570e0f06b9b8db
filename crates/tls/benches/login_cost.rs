// SPDX-License-Identifier: Apache-2.0
//! What a TLS handshake costs, both ends on one core: `cargo bench -p underpass-tls`.

#[path = "../tests/support/mod.rs"]
mod support;

use std::time::Instant;

use rustls::client::Resumption;
use support::{Authority, Leaf, handshake};
use underpass_tls::{ClientSide, ServerSide, SslMode, TlsClientOptions, TlsServerOptions};

fn main() {
    // `cargo test --all-targets` runs benches too, to see that they work: once is enough then.
    let rounds = if std::env::args().any(|argument| argument == "--bench") { 1000 } else { 1 };
    let authority = Authority::new("ca");
    let files = authority.issue(&Leaf::dns("pooler"));
    for protocols in ["tlsv1.2", "tlsv1.3"] {
        let options = TlsClientOptions {
            sslmode: SslMode::Require,
            key_file: Some(files.key.clone()),
            cert_file: Some(files.cert.clone()),
            protocols: protocols.into(),
            ..TlsClientOptions::default()
        };
        let side = ClientSide::build(&options).expect("settings").expect("TLS is on");
        for (name, tickets, resumed) in
            [("full, no ticket", 0, false), ("full, one ticket", 1, false), ("resumed", 1, true)]
        {
            let mut config = (*side.config).clone();
            config.send_tls13_tickets = tickets;
            let server = ClientSide { config: config.into(), ..side.clone() };
            let mut client =
                ServerSide::build(&TlsServerOptions::default()).expect("settings").expect("TLS is on");
            if resumed {
                let mut config = (*client.config).clone();
                config.resumption = Resumption::in_memory_sessions(8);
                client.config = config.into();
            }
            handshake(&server, &client, "pooler").expect("handshake");
            let begin = Instant::now();
            for _ in 0..rounds {
                handshake(&server, &client, "pooler").expect("handshake");
            }
            println!("{protocols} {name}: {:?}", begin.elapsed() / rounds);
        }
    }
}
