// SPDX-License-Identifier: Apache-2.0
//! A server that does nothing but authenticate by `ClientAuth`, for one connection that gets that far.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use underpass_auth::{
    AuthContext, ClientAuth, ClientLogin, ClientStep, Credential, Identity, Login, Method, Refusal,
};
use underpass_tls::ClientSide;

use super::{Stream, read_message, read_rest, write_message};

pub struct FakeServer {
    pub port: u16,
    thread: JoinHandle<(Result<Login, Refusal>, Vec<String>)>,
}

impl FakeServer {
    pub fn start(
        context: Arc<AuthContext>,
        method: Method,
        credential: Credential,
        tls: Option<ClientSide>,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("port");
        let port = listener.local_addr().expect("address").port();
        let thread = std::thread::spawn(move || {
            loop {
                let (socket, _) = listener.accept().expect("a client");
                socket.set_read_timeout(Some(Duration::from_secs(30))).expect("timeout");
                let mut mechanisms = Vec::new();
                // psql connects once without a password to find out whether it needs one, and libpq may try
                // again without TLS: only a login that came to an end counts.
                if let Some(outcome) =
                    serve(socket, &context, method, credential.clone(), tls.as_ref(), &mut mechanisms)
                {
                    return (outcome, mechanisms);
                }
            }
        });
        Self { port, thread }
    }

    /// The outcome, and the SASL mechanisms the client chose.
    pub fn outcome(self) -> (Result<Login, Refusal>, Vec<String>) {
        self.thread.join().expect("the fake server lives")
    }
}

fn serve(
    mut socket: TcpStream,
    context: &Arc<AuthContext>,
    method: Method,
    credential: Credential,
    tls: Option<&ClientSide>,
    mechanisms: &mut Vec<String>,
) -> Option<Result<Login, Refusal>> {
    loop {
        let mut length = [0; 4];
        socket.read_exact(&mut length).ok()?;
        let packet = read_rest(&mut socket, length).ok()?;
        match (packet.as_slice(), tls) {
            ([4, 210, 22, 47], Some(side)) => {
                socket.write_all(b"S").ok()?;
                let connection = rustls::ServerConnection::new(side.config.clone()).expect("TLS");
                let mut stream = rustls::StreamOwned::new(connection, socket);
                // Drives the handshake, which must be over before the certificate is looked at.
                stream.sock.set_nodelay(true).ok()?;
                let mut length = [0; 4];
                stream.read_exact(&mut length).ok()?;
                let packet = read_rest(&mut stream, length).ok()?;
                let name = side.peer_common_name(&stream.conn);
                let binding = side.end_point_hash.clone();
                return authenticate(
                    &mut stream,
                    &packet,
                    context,
                    method,
                    credential,
                    binding,
                    name,
                    mechanisms,
                );
            }
            // SSLRequest without TLS, GSSENCRequest.
            ([4, 210, 22, 47 | 48], _) => socket.write_all(b"N").ok()?,
            _ => {
                return authenticate(
                    &mut socket,
                    &packet,
                    context,
                    method,
                    credential,
                    None,
                    None,
                    mechanisms,
                );
            }
        }
    }
}

#[allow(clippy::too_many_arguments, reason = "one call from two places")]
fn authenticate(
    stream: &mut dyn Stream,
    startup: &[u8],
    context: &Arc<AuthContext>,
    method: Method,
    credential: Credential,
    channel_binding: Option<Vec<u8>>,
    name: Option<String>,
    mechanisms: &mut Vec<String>,
) -> Option<Result<Login, Refusal>> {
    let mut words = startup[4..].split(|&b| b == 0);
    let user = std::iter::from_fn(|| Some((words.next()?, words.next()?)))
        .find(|(key, _)| *key == b"user")
        .map(|(_, value)| value.to_vec())
        .expect("a user");
    let identity = Identity { name: name.as_deref(), map: None };
    let login = ClientLogin { method, user: &user, credential, channel_binding, identity };
    let (mut auth, mut step) = ClientAuth::start(context.clone(), login);
    loop {
        step = match step {
            ClientStep::Send(body) => {
                write_message(stream, Some(b'R'), &body).ok()?;
                let (kind, body) = read_message(stream).ok()?;
                assert_eq!(kind, b'p');
                if body.starts_with(b"SCRAM-") {
                    mechanisms.extend(
                        body.split(|&b| b == 0).next().map(|m| String::from_utf8_lossy(m).into_owned()),
                    );
                }
                auth.message(&body)
            }
            ClientStep::Derive(derivation) => auth.derived(derivation.run()),
            ClientStep::Done { send, login } => {
                if let Some(body) = send {
                    write_message(stream, Some(b'R'), &body).ok()?;
                }
                write_message(stream, Some(b'R'), &[0; 4]).ok()?;
                answer_queries(stream);
                return Some(Ok(login));
            }
            ClientStep::Failed(refusal) => {
                let user = String::from_utf8_lossy(&user);
                let (code, text) = (refusal.sqlstate(), refusal.client_message(&user));
                let fields = format!("SFATAL\0VFATAL\0C{code}\0M{text}\0\0");
                write_message(stream, Some(b'E'), fields.as_bytes()).ok()?;
                return Some(Err(refusal));
            }
        }
    }
}

/// Every query is an empty one.
fn answer_queries(stream: &mut dyn Stream) {
    for (name, value) in
        [("server_version", "15.0"), ("client_encoding", "UTF8"), ("standard_conforming_strings", "on")]
    {
        let _ = write_message(stream, Some(b'S'), format!("{name}\0{value}\0").as_bytes());
    }
    let _ = write_message(stream, Some(b'Z'), b"I");
    while let Ok((b'Q', _)) = read_message(stream) {
        let _ = write_message(stream, Some(b'I'), b"");
        let _ = write_message(stream, Some(b'Z'), b"I");
    }
}
