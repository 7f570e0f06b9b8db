// SPDX-License-Identifier: Apache-2.0
//! A blocking protocol 3 client that shows every message and sends whatever it is told, right or wrong.
//!
//! It reads only when asked to: a test that does not call [`Client::recv`] is a client that has stopped reading.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use postgres_protocol::authentication::md5_hash;
use postgres_protocol::authentication::sasl::{ChannelBinding, SCRAM_SHA_256, ScramSha256};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use crate::message::first_error;
use crate::stream::Stream;
use crate::{Authority, Batch, Error, Identity, Message, Result};

/// Where to connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Host {
    /// A host name or address; connected by TCP.
    Tcp(String),
    /// A directory that holds `.s.PGSQL.PORT`.
    Unix(PathBuf),
}

/// How a client uses TLS: the authority it trusts (server name verified, as `sslmode=verify-full`) and its own identity.
#[derive(Debug, Clone)]
pub struct Tls {
    config: Arc<ClientConfig>,
}

impl Tls {
    /// Trusts `authority`; shows `identity` if the server asks for a client certificate.
    pub fn new(authority: &Authority, identity: Option<&Identity>) -> Result<Self> {
        let fail = |error: &dyn std::fmt::Display| Error::Tls(error.to_string());
        let mut roots = RootCertStore::empty();
        let cert = CertificateDer::from_pem_slice(authority.cert_pem().as_bytes()).map_err(|e| fail(&e))?;
        roots.add(cert).map_err(|e| fail(&e))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|e| fail(&e))?
            .with_root_certificates(roots);
        let config = match identity {
            None => builder.with_no_client_auth(),
            Some(identity) => {
                let cert =
                    CertificateDer::from_pem_slice(identity.cert_pem.as_bytes()).map_err(|e| fail(&e))?;
                let key = PrivateKeyDer::from_pem_slice(identity.key_pem.as_bytes()).map_err(|e| fail(&e))?;
                builder.with_client_auth_cert(vec![cert], key).map_err(|e| fail(&e))?
            }
        };
        Ok(Self { config: Arc::new(config) })
    }
}

/// Everything that a connection attempt needs. Change it with the methods, each of which gives back a new value.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where.
    pub host: Host,
    /// TCP port, or the number in the unix socket's name.
    pub port: u16,
    /// Start-up parameter `user`.
    pub user: String,
    /// Start-up parameter `database`.
    pub database: String,
    /// Password for cleartext, md5 and SCRAM.
    pub password: Option<String>,
    /// Further start-up parameters.
    pub parameters: Vec<(String, String)>,
    /// Protocol version asked for; 0x0003_0000 is 3.0.
    pub protocol: u32,
    /// TLS, asked for by SSLRequest; plain if absent.
    pub tls: Option<Tls>,
    /// Longest wait for any single read. Default 10 s.
    pub read_timeout: Duration,
}

impl Options {
    /// TCP to 127.0.0.1, protocol 3.0, no password, no TLS.
    pub fn new(port: u16, user: &str, database: &str) -> Self {
        Self {
            host: Host::Tcp("127.0.0.1".into()),
            port,
            user: user.into(),
            database: database.into(),
            password: None,
            parameters: Vec::new(),
            protocol: 0x0003_0000,
            tls: None,
            read_timeout: Duration::from_secs(10),
        }
    }

    /// With a password.
    pub fn password(mut self, password: &str) -> Self {
        self.password = Some(password.into());
        self
    }

    /// With a further start-up parameter.
    pub fn parameter(mut self, name: &str, value: &str) -> Self {
        self.parameters.push((name.into(), value.into()));
        self
    }

    /// To another host name or address.
    pub fn host(mut self, host: &str) -> Self {
        self.host = Host::Tcp(host.into());
        self
    }

    /// By the unix socket in `directory`.
    pub fn unix(mut self, directory: impl Into<PathBuf>) -> Self {
        self.host = Host::Unix(directory.into());
        self
    }

    /// With TLS.
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// As another user.
    pub fn user(mut self, user: &str) -> Self {
        self.user = user.into();
        self
    }

    /// To another database.
    pub fn database(mut self, database: &str) -> Self {
        self.database = database.into();
        self
    }

    /// To another port.
    pub fn port(mut self, port: u16) -> Self {
        self.port = port;
        self
    }

    /// With another protocol version.
    pub fn protocol(mut self, version: u32) -> Self {
        self.protocol = version;
        self
    }

    /// With another longest wait for a read.
    pub fn read_timeout(mut self, limit: Duration) -> Self {
        self.read_timeout = limit;
        self
    }
}

/// The messages of one answer, ReadyForQuery included.
#[derive(Debug, Clone, Default)]
pub struct Response {
    /// All messages in order.
    pub messages: Vec<Message>,
}

impl Response {
    /// The rows of all DataRow messages.
    pub fn rows(&self) -> Vec<Vec<Option<String>>> {
        self.messages.iter().filter(|message| message.tag == b'D').map(Message::columns).collect()
    }

    /// The first column of the first row.
    pub fn value(&self) -> Option<&str> {
        // Borrowed from the message, so that `assert_eq!(r.value(), Some("1"))` reads well.
        let row = self.messages.iter().find(|message| message.tag == b'D')?;
        let (length, rest) = row.body.get(2..)?.split_first_chunk::<4>()?;
        let length = usize::try_from(i32::from_be_bytes(*length)).ok()?;
        std::str::from_utf8(rest.get(..length)?).ok()
    }

    /// The names in the first RowDescription.
    pub fn column_names(&self) -> Vec<String> {
        let Some(description) = self.messages.iter().find(|message| message.tag == b'T') else {
            return Vec::new();
        };
        let mut names = Vec::new();
        let mut rest = description.body.get(2..).unwrap_or_default();
        while let Some(end) = rest.iter().position(|byte| *byte == 0) {
            names.push(String::from_utf8_lossy(&rest[..end]).into_owned());
            // Table OID, column number, type OID, size, modifier, format: 18 bytes.
            rest = rest.get(end + 19..).unwrap_or_default();
        }
        names
    }

    /// The type bytes in order, for comparisons such as `"TDCZ"`.
    pub fn tags(&self) -> String {
        self.messages.iter().map(|message| char::from(message.tag)).collect()
    }

    /// Transaction status of the last ReadyForQuery.
    pub fn status(&self) -> Option<u8> {
        self.messages.iter().rev().find_map(Message::status)
    }

    /// The command tags (`SELECT 1`) in order.
    pub fn commands(&self) -> Vec<String> {
        self.messages.iter().filter(|message| message.tag == b'C').flat_map(Message::strings).collect()
    }

    /// The first error as `Err`, else the response itself.
    pub fn ok(self) -> Result<Self> {
        first_error(&self.messages)?;
        Ok(self)
    }
}

/// A connection; see the module's head.
#[derive(Debug)]
pub struct Client {
    stream: Stream,
    options: Options,
    buffer: Vec<u8>,
    parameters: BTreeMap<String, String>,
    process_id: u32,
    secret_key: Vec<u8>,
}

impl Client {
    /// Connects and logs in, up to the first ReadyForQuery.
    pub fn connect(options: &Options) -> Result<Self> {
        let mut client = Self::open(options)?;
        client.startup()?;
        client.authenticate()?;
        client.finish_login()?;
        Ok(client)
    }

    /// Opens the socket (and TLS, if asked for), and sends nothing else.
    pub fn open(options: &Options) -> Result<Self> {
        let stream = match &options.host {
            Host::Tcp(host) => {
                let tcp = TcpStream::connect((host.as_str(), options.port))
                    .map_err(Error::io(format!("connect to {host}:{}", options.port)))?;
                tcp.set_nodelay(true).map_err(Error::io("TCP_NODELAY"))?;
                tcp.set_read_timeout(Some(options.read_timeout)).map_err(Error::io("read timeout"))?;
                match &options.tls {
                    None => Stream::Tcp(tcp),
                    Some(tls) => start_tls(tcp, host, tls)?,
                }
            }
            Host::Unix(directory) => {
                let path = directory.join(format!(".s.PGSQL.{}", options.port));
                Stream::Unix(
                    UnixStream::connect(&path)
                        .map_err(Error::io(format!("connect to {}", path.display())))?,
                )
            }
        };
        stream.set_read_timeout(Some(options.read_timeout)).map_err(Error::io("read timeout"))?;
        Ok(Self {
            stream,
            options: options.clone(),
            buffer: Vec::new(),
            parameters: BTreeMap::new(),
            process_id: 0,
            secret_key: Vec::new(),
        })
    }

    /// Sends the StartupMessage.
    pub fn startup(&mut self) -> Result<()> {
        let options = self.options.clone();
        let mut parameters = vec![("user", options.user.as_str()), ("database", options.database.as_str())];
        parameters.extend(options.parameters.iter().map(|(name, value)| (name.as_str(), value.as_str())));
        self.send(&Batch::new().startup(options.protocol, &parameters))
    }

    /// Answers authentication requests until AuthenticationOk: cleartext, md5, SCRAM-SHA-256.
    pub fn authenticate(&mut self) -> Result<()> {
        let password = self.options.password.clone().unwrap_or_default();
        let mut scram = None;
        loop {
            let message = self.recv()?;
            if let Some(error) = message.error() {
                return Err(error.into());
            }
            // NegotiateProtocolVersion may come before the first request.
            if message.tag == b'v' {
                continue;
            }
            let Some((kind, data)) = message.body.split_first_chunk::<4>().filter(|_| message.tag == b'R')
            else {
                return Err(unexpected("Authentication", &message));
            };
            match u32::from_be_bytes(*kind) {
                0 => return Ok(()),
                3 => self.send(&Batch::new().password(&password))?,
                5 => {
                    let salt = data.try_into().map_err(|_| unexpected("salt of 4 bytes", &message))?;
                    let hash = md5_hash(self.options.user.as_bytes(), password.as_bytes(), salt);
                    self.send(&Batch::new().password(&hash))?;
                }
                10 => {
                    let machine = ScramSha256::new(password.as_bytes(), ChannelBinding::unsupported());
                    let first = machine.message();
                    let mut body = SCRAM_SHA_256.as_bytes().to_vec();
                    body.push(0);
                    body.extend_from_slice(&(first.len() as u32).to_be_bytes());
                    body.extend_from_slice(first);
                    self.send(&Batch::new().message(b'p', &body))?;
                    scram = Some(machine);
                }
                11 => {
                    let machine = scram.as_mut().ok_or_else(|| unexpected("SASL", &message))?;
                    machine.update(data).map_err(Error::io("SCRAM"))?;
                    let body = machine.message().to_vec();
                    self.send(&Batch::new().message(b'p', &body))?;
                }
                12 => scram
                    .as_mut()
                    .ok_or_else(|| unexpected("SASL", &message))?
                    .finish(data)
                    .map_err(Error::io("SCRAM"))?,
                _ => return Err(unexpected("a known authentication method", &message)),
            }
        }
    }

    /// Reads ParameterStatus and BackendKeyData up to the first ReadyForQuery.
    pub fn finish_login(&mut self) -> Result<()> {
        loop {
            let message = self.recv()?;
            match message.tag {
                b'K' => {
                    let (id, key) =
                        message.body.split_first_chunk::<4>().ok_or_else(|| unexpected("key", &message))?;
                    self.process_id = u32::from_be_bytes(*id);
                    self.secret_key = key.to_vec();
                }
                b'Z' => return Ok(()),
                b'S' | b'N' | b'v' => {}
                _ => {
                    return Err(message
                        .error()
                        .map_or_else(|| unexpected("end of login", &message), Error::from));
                }
            }
        }
    }

    /// Sends a batch in one write.
    pub fn send(&mut self, batch: &Batch) -> Result<()> {
        self.send_bytes(batch.as_bytes())
    }

    /// Sends any bytes.
    pub fn send_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream.write_all(bytes).and_then(|()| self.stream.flush()).map_err(Error::io("send to server"))
    }

    /// Sends bytes past TLS, if there is any: what a peer that breaks off leaves of a record.
    pub fn send_beneath(&mut self, bytes: &[u8]) -> Result<()> {
        match &mut self.stream {
            Stream::Tls(stream) => stream.sock.write_all(bytes).map_err(Error::io("send beneath TLS")),
            _ => self.send_bytes(bytes),
        }
    }

    /// The next message. [`Error::Closed`] at the end of the stream, [`Error::Timeout`] after the read timeout.
    pub fn recv(&mut self) -> Result<Message> {
        let mut chunk = [0u8; 16 * 1024];
        loop {
            if let Some(message) = Message::take(&mut self.buffer) {
                if let (b'S', [name, value, ..]) = (message.tag, message.strings().as_slice()) {
                    self.parameters.insert(name.clone(), value.clone());
                } else if let (b'S', [name]) = (message.tag, message.strings().as_slice()) {
                    self.parameters.insert(name.clone(), String::new());
                }
                return Ok(message);
            }
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(Error::Closed),
                Ok(length) => self.buffer.extend_from_slice(&chunk[..length]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    return Err(Error::Timeout {
                        what: "message".into(),
                        limit: self.options.read_timeout,
                        log: String::new(),
                    });
                }
                Err(source) if source.kind() == io::ErrorKind::UnexpectedEof => return Err(Error::Closed),
                Err(source) => return Err(Error::Io { what: "read".into(), source }),
            }
        }
    }

    /// All messages up to and with the next ReadyForQuery; errors of the server are among them.
    pub fn response(&mut self) -> Result<Response> {
        let mut response = Response::default();
        loop {
            let message = self.recv()?;
            // A FATAL error is the last message: no ReadyForQuery follows.
            if let Some(error) = message.error().filter(|error| error.severity != "ERROR") {
                return Err(error.into());
            }
            let done = message.tag == b'Z';
            response.messages.push(message);
            if done {
                return Ok(response);
            }
        }
    }

    /// Sends a batch and reads as many responses as it asks for with Sync, Query and FunctionCall.
    pub fn exchange(&mut self, batch: &Batch) -> Result<Vec<Response>> {
        self.send(batch)?;
        let expected =
            Message::all(batch.as_bytes()).iter().filter(|m| matches!(m.tag, b'S' | b'Q' | b'F')).count();
        (0..expected).map(|_| self.response()).collect()
    }

    /// Simple query; the first error of the server is `Err`, with the stream at the next ReadyForQuery.
    pub fn query(&mut self, sql: &str) -> Result<Response> {
        self.send(&Batch::new().query(sql))?;
        self.response()?.ok()
    }

    /// Extended query with text parameters, unnamed statement.
    pub fn extended(&mut self, sql: &str, parameters: &[Option<&str>]) -> Result<Response> {
        self.send(&Batch::new().extended(sql, parameters).sync())?;
        self.response()?.ok()
    }

    /// Reads until the peer closes; returns what came before.
    pub fn until_closed(&mut self) -> Result<Vec<Message>> {
        let mut messages = Vec::new();
        loop {
            match self.recv() {
                Ok(message) => messages.push(message),
                Err(error) if error.is_closed() => return Ok(messages),
                Err(error) => return Err(error),
            }
        }
    }

    /// The last reported value of a parameter (ParameterStatus).
    pub fn parameter(&self, name: &str) -> Option<&str> {
        self.parameters.get(name).map(String::as_str)
    }

    /// All reported parameters.
    pub fn parameters(&self) -> &BTreeMap<String, String> {
        &self.parameters
    }

    /// Process identifier and secret key of BackendKeyData.
    pub fn backend_key(&self) -> (u32, &[u8]) {
        (self.process_id, &self.secret_key)
    }

    /// Sends a CancelRequest for this session over a connection of its own, and waits until that is closed.
    pub fn cancel(&self) -> Result<()> {
        let mut other = Self::open(&self.options)?;
        other.send(&Batch::new().cancel_request(self.process_id, &self.secret_key))?;
        other.until_closed().map(drop)
    }

    /// Changes the longest wait for a read.
    pub fn set_read_timeout(&mut self, limit: Duration) -> Result<()> {
        self.options.read_timeout = limit;
        self.stream.set_read_timeout(Some(limit)).map_err(Error::io("read timeout"))
    }

    /// Sends FIN and goes on reading.
    pub fn half_close(&self) -> Result<()> {
        self.stream.shutdown(Shutdown::Write).map_err(Error::io("shutdown"))
    }

    /// Closes with RST.
    pub fn reset(self) -> Result<()> {
        self.stream.reset_on_close().map_err(Error::io("SO_LINGER"))
    }

    /// Says Terminate and closes. A plain drop closes without a word.
    pub fn terminate(mut self) -> Result<()> {
        self.send(&Batch::new().terminate())
    }
}

fn start_tls(mut tcp: TcpStream, host: &str, tls: &Tls) -> Result<Stream> {
    tcp.write_all(Batch::new().ssl_request().as_bytes()).map_err(Error::io("SSLRequest"))?;
    let mut answer = [0u8];
    tcp.read_exact(&mut answer).map_err(Error::io("answer to SSLRequest"))?;
    if answer != *b"S" {
        return Err(Error::Tls(format!("refused with {:?}", char::from(answer[0]))));
    }
    let name = ServerName::try_from(host.to_owned()).map_err(|error| Error::Tls(error.to_string()))?;
    let connection =
        ClientConnection::new(tls.config.clone(), name).map_err(|error| Error::Tls(error.to_string()))?;
    let mut stream = StreamOwned::new(connection, tcp);
    // The handshake now, so that its failure is told apart from one of the login.
    while stream.conn.is_handshaking() {
        stream.conn.complete_io(&mut stream.sock).map_err(|error| Error::Tls(error.to_string()))?;
    }
    Ok(Stream::Tls(Box::new(stream)))
}

fn unexpected(wanted: &str, message: &Message) -> Error {
    Error::Unexpected {
        wanted: wanted.into(),
        got: format!("{:?} {:?}", char::from(message.tag), message.body.escape_ascii().to_string()),
    }
}
