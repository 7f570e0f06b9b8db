// SPDX-License-Identifier: Apache-2.0
//! One connection to the target: TLS, login, messages in both directions at once.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use underpass_auth::{ServerAuth, ServerLogin, ServerStep};
use underpass_config::Host;
use underpass_tls::ServerSide;
use underpass_trace::Protocol;
use underpass_wire::Header;
use underpass_wire::backend::{Fields, Message};
use underpass_wire::frontend::build;
use underpass_wire::startup::{self, ProtocolVersion};
use underpass_wire::tag::{backend as tag, frontend as frontend_tag};

use crate::error::ConnectError;
use crate::target::{Login, Target};

/// How much is read at once, bytes.
const READ_LEN: usize = 16 * 1024;
/// A buffer that grew beyond this for a large message is given back.
const BUFFER_KEPT: usize = 1024 * 1024;

/// The bytes below the protocol.
#[derive(Debug)]
pub(crate) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
    Tls(Box<TlsStream<TcpStream>>),
}

macro_rules! each {
    ($self:ident, $stream:ident => $call:expr) => {
        match $self.get_mut() {
            Stream::Tcp($stream) => $call,
            Stream::Unix($stream) => $call,
            Stream::Tls($stream) => $call,
        }
    };
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        each!(self, stream => Pin::new(stream).poll_read(cx, buf))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        each!(self, stream => Pin::new(stream).poll_write(cx, buf))
    }
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self, stream => Pin::new(stream).poll_flush(cx))
    }
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self, stream => Pin::new(stream).poll_shutdown(cx))
    }
}

/// A connection that is logged in.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: Stream,
    inbox: Vec<u8>,
    /// Bytes of `inbox` that are used up.
    used: usize,
    /// Where a CancelRequest for it goes, and what it carries.
    pub cancel: CancelKey,
    /// What the protocol of MySQL has to know.
    pub mysql: Option<crate::mysql::Session>,
}

/// What a CancelRequest carries.
#[derive(Clone, Debug, Default)]
pub(crate) struct CancelKey {
    pub process_id: u32,
    pub secret_key: Vec<u8>,
}

impl Connection {
    /// Connects and logs in. `parameters` go into the StartupMessage behind user and database.
    pub async fn open(
        target: &Target,
        login: &Login,
        parameters: &[(&[u8], &[u8])],
    ) -> Result<Self, ConnectError> {
        if target.protocol == Protocol::Mysql {
            return Self::open_mysql(target, login, parameters).await;
        }
        let (stream, channel_binding) = connect(target).await?;
        let mut connection = Self::over(stream);
        let mut out = Vec::new();
        let names: [(&[u8], &[u8]); 2] =
            [(b"user", login.user.as_bytes()), (b"database", login.database.as_bytes())];
        startup::build::startup_message(
            &mut out,
            ProtocolVersion::V3_0,
            names.into_iter().chain(parameters.iter().copied()),
        );
        connection.stream.write_all(&out).await?;
        connection.log_in(target, login, channel_binding).await?;
        if let Some(user) = &login.become_user {
            connection.query(&set_session_authorization(user)).await?;
        }
        Ok(connection)
    }

    /// Nothing has been said yet.
    pub(crate) fn over(stream: Stream) -> Self {
        Self { stream, inbox: Vec::new(), used: 0, cancel: CancelKey::default(), mysql: None }
    }

    async fn log_in(
        &mut self,
        target: &Target,
        login: &Login,
        channel_binding: Option<Vec<u8>>,
    ) -> Result<(), ConnectError> {
        let mut auth = ServerAuth::new(
            Arc::clone(&target.context),
            ServerLogin {
                user: login.user.clone().into_bytes(),
                secret: login.secret.clone(),
                keys: None,
                channel_binding,
            },
        );
        loop {
            let (kind, body) = self.receive().await?;
            match kind {
                tag::AUTHENTICATION => {
                    let mut step = auth.message(body);
                    // Only asked for with `derive_elsewhere`; here nobody else waits for this thread.
                    if let ServerStep::Derive(derivation) = &step {
                        step = auth.derived(derivation.run());
                    }
                    match step {
                        ServerStep::Send(answer) => {
                            let header = Header::new(frontend_tag::PASSWORD, answer.len());
                            let message = [&header.to_bytes()[..], &answer].concat();
                            self.stream.write_all(&message).await?;
                        }
                        ServerStep::Failed(error) => return Err(error.into()),
                        ServerStep::Wait | ServerStep::Done | ServerStep::Derive(_) => {}
                    }
                }
                tag::BACKEND_KEY_DATA => {
                    if let Ok(Message::BackendKeyData(key)) = Message::decode(kind, body) {
                        self.cancel =
                            CancelKey { process_id: key.process_id, secret_key: key.secret_key.to_vec() };
                    }
                }
                tag::ERROR_RESPONSE => return Err(server_error(body)),
                tag::READY_FOR_QUERY => return Ok(()),
                _ => {}
            }
        }
    }

    /// Runs SQL by the simple protocol; the rows of all statements as text.
    pub async fn query(&mut self, sql: &str) -> Result<Vec<Vec<Option<String>>>, ConnectError> {
        let mut out = Vec::new();
        build::query(&mut out, sql.as_bytes());
        self.exchange(&out).await
    }

    /// Sends messages that end with Query or Sync and takes all answers.
    pub async fn exchange(&mut self, messages: &[u8]) -> Result<Vec<Vec<Option<String>>>, ConnectError> {
        self.stream.write_all(messages).await?;
        self.stream.flush().await?;
        let mut rows = Vec::new();
        let mut failed = None;
        loop {
            let (kind, body) = self.receive().await?;
            match Message::decode(kind, body) {
                Ok(Message::DataRow(row)) => {
                    let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
                    rows.push(row.columns.map(|value| value.map(text)).collect());
                }
                Ok(Message::ErrorResponse(_)) => failed = failed.or_else(|| Some(server_error(body))),
                Ok(Message::ReadyForQuery(_)) => return failed.map_or(Ok(rows), Err),
                _ => {}
            }
        }
    }

    /// The next message, waiting for it.
    async fn receive(&mut self) -> Result<(u8, &[u8]), ConnectError> {
        loop {
            // Looked for twice, because a borrow that is returned cannot be given up in between.
            if self.whole_message()?.is_some() {
                return Ok(self.next_message()?.unwrap_or_default());
            }
            if self.read().await? == 0 {
                return Err(ConnectError::Closed);
            }
        }
    }

    fn whole_message(&self) -> Result<Option<Header>, ConnectError> {
        let bytes = &self.inbox[self.used..];
        let header = Header::parse(bytes).map_err(|error| ConnectError::Protocol(error.to_string()))?;
        Ok(header.filter(|header| bytes.len() >= header.total()))
    }

    /// The next message that has been read whole: type and body.
    pub fn next_message(&mut self) -> Result<Option<(u8, &[u8])>, ConnectError> {
        let Some(header) = self.whole_message()? else {
            self.give_back();
            return Ok(None);
        };
        let from = self.used;
        self.used += header.total();
        Ok(Some((header.tag, &self.inbox[from + Header::SIZE..self.used])))
    }

    /// Forgets what is used up, if that is all.
    pub(crate) fn give_back(&mut self) {
        if self.used == self.inbox.len() {
            self.inbox.clear();
            self.used = 0;
            if self.inbox.capacity() > BUFFER_KEPT {
                self.inbox = Vec::new();
            }
        }
    }

    /// Bytes that were read and are not used up.
    pub(crate) fn unused(&self) -> &[u8] {
        &self.inbox[self.used..]
    }

    /// So many bytes more are used up; returns them.
    pub(crate) fn use_up(&mut self, len: usize) -> &[u8] {
        self.used += len;
        &self.inbox[self.used - len..self.used]
    }

    /// Writes all of it.
    pub(crate) async fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes).await?;
        self.stream.flush().await
    }

    /// Goes over to TLS on the same socket.
    pub(crate) async fn encrypt(self, target: &Target, tls: &ServerSide) -> Result<Self, ConnectError> {
        let Stream::Tcp(tcp) = self.stream else { return Ok(self) };
        let name = ServerSide::server_name(&target.host.to_string())?;
        let stream = TlsConnector::from(Arc::clone(&tls.config)).connect(name, tcp).await?;
        Ok(Self { stream: Stream::Tls(Box::new(stream)), ..self })
    }

    /// Whether nobody else can read what is said.
    pub(crate) fn is_private(&self) -> bool {
        !matches!(self.stream, Stream::Tcp(_))
    }

    /// Reads what has come, or waits for it; 0 at the end of the stream. Safe to give up at any time.
    pub async fn read(&mut self) -> io::Result<usize> {
        self.make_room();
        self.stream.read_buf(&mut self.inbox).await
    }

    fn make_room(&mut self) {
        if self.used > 0 && self.inbox.capacity() - self.inbox.len() < READ_LEN {
            self.inbox.drain(..self.used);
            self.used = 0;
        }
        self.inbox.reserve(READ_LEN);
    }

    /// Writes some of `bytes`; while that is not possible, reads: a server that cannot get rid of its answers takes
    /// nothing either.
    pub async fn write_or_read(&mut self, bytes: &[u8]) -> io::Result<Transferred> {
        self.make_room();
        let Self { stream, inbox, .. } = self;
        std::future::poll_fn(|cx| {
            if let Poll::Ready(written) = Pin::new(&mut *stream).poll_write(cx, bytes) {
                return Poll::Ready(Ok(Transferred { written: written?, ended: false }));
            }
            let mut room = [0; READ_LEN];
            let mut buffer = ReadBuf::new(&mut room);
            std::task::ready!(Pin::new(&mut *stream).poll_read(cx, &mut buffer))?;
            inbox.extend_from_slice(buffer.filled());
            Poll::Ready(Ok(Transferred { written: 0, ended: buffer.filled().is_empty() }))
        })
        .await
    }

    /// Passes on what TLS holds back.
    pub async fn flush(&mut self) -> io::Result<()> {
        self.stream.flush().await
    }

    /// Says Terminate and closes.
    pub async fn terminate(mut self) {
        let mut out = Vec::new();
        match self.mysql {
            Some(_) => crate::mysql::quit(&mut out),
            None => build::terminate(&mut out),
        }
        // Who does not listen any more need not hear it.
        let _ = self.stream.write_all(&out).await;
        let _ = self.stream.shutdown().await;
    }
}

/// What [`Connection::write_or_read`] did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Transferred {
    /// Bytes written.
    pub written: usize,
    /// The server closed its side.
    pub ended: bool,
}

/// Asks a server to cancel what a connection does.
pub(crate) async fn cancel(target: &Target, key: &CancelKey) -> Result<(), ConnectError> {
    let (mut stream, _) = connect(target).await?;
    let mut out = Vec::new();
    startup::build::cancel_request(&mut out, key.process_id, &key.secret_key);
    stream.write_all(&out).await?;
    stream.flush().await?;
    // The server closes when it has passed the signal on.
    let _ = stream.read(&mut [0; 1]).await;
    Ok(())
}

/// The statement that makes a superuser's session one of another user.
pub(crate) fn set_session_authorization(user: &str) -> String {
    format!("set session authorization \"{}\"", user.replace('"', "\"\""))
}

/// A stream over which the StartupMessage can go, and the channel binding data of its certificate.
async fn connect(target: &Target) -> Result<(Stream, Option<Vec<u8>>), ConnectError> {
    let mut tcp = match connect_plain(target).await? {
        Stream::Tcp(tcp) => tcp,
        stream => return Ok((stream, None)),
    };
    let Some(tls) = &target.tls else { return Ok((Stream::Tcp(tcp), None)) };
    let mut out = Vec::new();
    startup::build::ssl_request(&mut out);
    tcp.write_all(&out).await?;
    match tcp.read_u8().await? {
        b'S' => {
            let name = ServerSide::server_name(&target.host.to_string())?;
            let stream = TlsConnector::from(Arc::clone(&tls.config)).connect(name, tcp).await?;
            let binding = ServerSide::end_point_hash(stream.get_ref().1);
            Ok((Stream::Tls(Box::new(stream)), binding))
        }
        b'N' if tls.sslmode.requires_tls() => Err(ConnectError::NoTls),
        b'N' => Ok((Stream::Tcp(tcp), None)),
        b'E' => Err(ConnectError::Protocol("an error in answer to SSLRequest".into())),
        other => Err(ConnectError::Protocol(format!("byte {other:#04x} in answer to SSLRequest"))),
    }
}

/// A connection over which nothing has been said.
pub(crate) async fn connect_plain(target: &Target) -> Result<Stream, ConnectError> {
    if let Some(path) = target.socket() {
        // An abstract name begins with NUL where people write '@'.
        let path = match path.to_str().and_then(|path| path.strip_prefix('@')) {
            Some(name) => format!("\0{name}").into(),
            None => path,
        };
        return Ok(Stream::Unix(UnixStream::connect(path).await?));
    }
    let tcp = connect_tcp(&target.host, target.port).await?;
    tcp.set_nodelay(true)?;
    Ok(Stream::Tcp(tcp))
}

async fn connect_tcp(host: &Host, port: u16) -> Result<TcpStream, ConnectError> {
    let addresses: Vec<SocketAddr> = match host {
        Host::Ip(ip) => vec![SocketAddr::new(*ip, port)],
        Host::Name(name) => tokio::net::lookup_host((name.as_str(), port)).await?.collect(),
        Host::Unix(_) | Host::Abstract(_) => vec![SocketAddr::new(IpAddr::from([127, 0, 0, 1]), port)],
    };
    let mut last = ConnectError::Resolve(host.to_string());
    for address in addresses {
        match TcpStream::connect(address).await {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error.into(),
        }
    }
    Err(last)
}

fn server_error(body: &[u8]) -> ConnectError {
    match Fields::decode(body) {
        Ok(fields) => {
            let text = |bytes: Option<&[u8]>| String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned();
            ConnectError::Server {
                sqlstate: fields.sqlstate().map(|state| state.as_str().to_owned()).unwrap_or_default(),
                message: text(fields.message()),
            }
        }
        Err(error) => ConnectError::Protocol(error.to_string()),
    }
}
