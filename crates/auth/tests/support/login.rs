// SPDX-License-Identifier: Apache-2.0
//! A blocking login to a server by `ServerAuth`.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use underpass_auth::{AuthContext, ServerAuth, ServerLogin, ServerStep};
use underpass_tls::ServerSide;

use super::{Stream, read_message, write_message};

/// Logs in and waits for ReadyForQuery. Returns the first answer that was sent to the server (empty if it
/// asked nothing), or what went wrong: our own error, or the server's.
pub fn login(
    context: &Arc<AuthContext>,
    port: u16,
    tls: Option<&ServerSide>,
    mut login: ServerLogin,
) -> Result<Vec<u8>, String> {
    let mut socket = TcpStream::connect(("127.0.0.1", port)).map_err(|error| error.to_string())?;
    socket.set_read_timeout(Some(Duration::from_secs(30))).expect("timeout");
    let Some(side) = tls else {
        return authenticate(context, &mut socket, login);
    };
    socket.write_all(&[0, 0, 0, 8, 4, 210, 22, 47]).expect("SSLRequest");
    let mut answer = [0];
    socket.read_exact(&mut answer).expect("answer");
    assert_eq!(answer, *b"S", "the server has TLS");
    let name = ServerSide::server_name("localhost").expect("name");
    let mut connection = rustls::ClientConnection::new(side.config.clone(), name).expect("TLS");
    while connection.is_handshaking() {
        connection.complete_io(&mut socket).map_err(|error| format!("handshake: {error}"))?;
    }
    login.channel_binding = ServerSide::end_point_hash(&connection);
    authenticate(context, &mut rustls::StreamOwned::new(connection, socket), login)
}

fn authenticate(
    context: &Arc<AuthContext>,
    stream: &mut dyn Stream,
    login: ServerLogin,
) -> Result<Vec<u8>, String> {
    let startup = [&b"\0\x03\0\0user\0"[..], &login.user, b"\0database\0postgres\0\0"].concat();
    write_message(stream, None, &startup).map_err(|error| error.to_string())?;
    let mut auth = ServerAuth::new(context.clone(), login);
    let mut answers = Vec::new();
    loop {
        match read_message(stream).map_err(|error| error.to_string())? {
            (b'R', body) => {
                let step = match auth.message(&body) {
                    ServerStep::Derive(derivation) => auth.derived(derivation.run()),
                    step => step,
                };
                match step {
                    ServerStep::Send(answer) => {
                        write_message(stream, Some(b'p'), &answer).map_err(|error| error.to_string())?;
                        answers.push(answer);
                    }
                    ServerStep::Derive(_) => return Err("derived twice".to_owned()),
                    ServerStep::Wait => {}
                    ServerStep::Done => break,
                    ServerStep::Failed(error) => return Err(error.to_string()),
                }
            }
            (b'E', body) => return Err(String::from_utf8_lossy(&body).into_owned()),
            (kind, _) => return Err(format!("unexpected message {}", char::from(kind))),
        }
    }
    loop {
        match read_message(stream).map_err(|error| error.to_string())? {
            (b'Z', _) => break,
            (b'E', body) => return Err(String::from_utf8_lossy(&body).into_owned()),
            _ => {}
        }
    }
    let _ = write_message(stream, Some(b'X'), b"");
    Ok(answers.into_iter().next().unwrap_or_default())
}
