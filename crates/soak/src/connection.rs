// SPDX-License-Identifier: Apache-2.0
//! One connection of a soak client: login, sending, reading message by message without copying.

use std::io;
use std::ops::Range;
use std::time::Duration;

use postgres_protocol::authentication::md5_hash;
use postgres_protocol::authentication::sasl::{ChannelBinding, SCRAM_SHA_256, ScramSha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::batch::Batch;

/// Where and as whom to connect.
#[derive(Debug, Clone)]
pub struct Target {
    /// Host name or address.
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// User.
    pub user: String,
    /// Database.
    pub database: String,
    /// Password, if one is asked for.
    pub password: String,
    /// Longest wait for the peer to say something, or to take what is said.
    pub patience: Duration,
}

/// Why a connection is of no more use.
#[derive(Debug, thiserror::Error)]
pub enum Lost {
    /// End of stream.
    #[error("closed by peer")]
    Closed,
    /// It says nothing, or takes nothing.
    #[error("no answer within {0:?}")]
    Silent(Duration),
    /// The socket failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// An ErrorResponse during login.
    #[error("login refused: {sqlstate} {message}")]
    Refused {
        /// SQLSTATE.
        sqlstate: String,
        /// Primary message.
        message: String,
    },
    /// Something that is no message of the protocol, or not here.
    #[error("protocol: {0}")]
    Protocol(String),
}

/// A logged-in connection. The last message read stays in the buffer until the next is asked for.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
    /// Where the next message begins.
    begin: usize,
    body: Range<usize>,
    key: Vec<u8>,
    patience: Duration,
}

/// Longest message that a server may send us: more means that framing is lost.
const MESSAGE_MAX: usize = 64 << 20;
const READ_SIZE: usize = 16 * 1024;

impl Connection {
    /// Opens the socket only.
    pub async fn open(target: &Target) -> Result<Self, Lost> {
        let patience = target.patience;
        let connected = timeout(patience, TcpStream::connect((target.host.as_str(), target.port))).await;
        let stream = connected.map_err(|_| Lost::Silent(patience))??;
        stream.set_nodelay(true)?;
        Ok(Self { stream, buffer: Vec::new(), begin: 0, body: 0..0, key: Vec::new(), patience })
    }

    /// Opens and logs in.
    pub async fn connect(target: &Target, application_name: &str) -> Result<Self, Lost> {
        let mut connection = Self::open(target).await?;
        connection
            .send(&Batch::new().startup(&[
                ("user", &target.user),
                ("database", &target.database),
                ("application_name", application_name),
            ]))
            .await?;
        let mut scram = None;
        loop {
            match connection.next().await? {
                b'R' => connection.authenticate(target, &mut scram).await?,
                b'K' => connection.key = connection.body().to_vec(),
                b'Z' => return Ok(connection),
                b'S' | b'N' | b'v' => {}
                b'E' => {
                    let (sqlstate, message) = (connection.field(b'C'), connection.field(b'M'));
                    return Err(Lost::Refused { sqlstate, message });
                }
                tag => return Err(Lost::Protocol(format!("{:?} during login", char::from(tag)))),
            }
        }
    }

    async fn authenticate(&mut self, target: &Target, scram: &mut Option<ScramSha256>) -> Result<(), Lost> {
        let body = self.body().to_vec();
        let Some((kind, data)) = body.split_first_chunk::<4>() else {
            return Err(Lost::Protocol("short authentication request".into()));
        };
        let no_sasl = || Lost::Protocol("SASL out of order".into());
        let answer = match u32::from_be_bytes(*kind) {
            0 => return Ok(()),
            3 => format!("{}\0", target.password).into_bytes(),
            5 => {
                let salt = data.try_into().map_err(|_| Lost::Protocol("md5 salt".into()))?;
                let hash = md5_hash(target.user.as_bytes(), target.password.as_bytes(), salt);
                format!("{hash}\0").into_bytes()
            }
            10 => {
                let machine = ScramSha256::new(target.password.as_bytes(), ChannelBinding::unsupported());
                let mut answer = format!("{SCRAM_SHA_256}\0").into_bytes();
                answer.extend_from_slice(&(machine.message().len() as u32).to_be_bytes());
                answer.extend_from_slice(machine.message());
                *scram = Some(machine);
                answer
            }
            11 => {
                let machine = scram.as_mut().ok_or_else(no_sasl)?;
                machine.update(data)?;
                machine.message().to_vec()
            }
            12 => return Ok(scram.as_mut().ok_or_else(no_sasl)?.finish(data)?),
            other => return Err(Lost::Protocol(format!("authentication method {other}"))),
        };
        self.send(&Batch::new().message(b'p', &[&answer])).await
    }

    /// Sends a batch in one write.
    pub async fn send(&mut self, batch: &Batch) -> Result<(), Lost> {
        self.send_bytes(batch.as_bytes()).await
    }

    /// Sends any bytes.
    pub async fn send_bytes(&mut self, bytes: &[u8]) -> Result<(), Lost> {
        let written = timeout(self.patience, self.stream.write_all(bytes)).await;
        Ok(written.map_err(|_| Lost::Silent(self.patience))??)
    }

    /// Reads the next message; its type is returned, its payload is [`Self::body`].
    pub async fn next(&mut self) -> Result<u8, Lost> {
        loop {
            let have = &self.buffer[self.begin..];
            if let Some(head) = have.first_chunk::<5>() {
                let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
                if !(4..=MESSAGE_MAX).contains(&length) {
                    return Err(Lost::Protocol(format!("message length {length}")));
                }
                if have.len() > length {
                    let tag = head[0];
                    self.body = self.begin + 5..self.begin + 1 + length;
                    self.begin += 1 + length;
                    return Ok(tag);
                }
            }
            self.fill().await?;
        }
    }

    async fn fill(&mut self) -> Result<(), Lost> {
        if self.begin > 0 {
            self.buffer.drain(..self.begin);
            self.begin = 0;
        }
        self.buffer.reserve(READ_SIZE);
        let read = timeout(self.patience, self.stream.read_buf(&mut self.buffer)).await;
        match read.map_err(|_| Lost::Silent(self.patience))?? {
            0 => Err(Lost::Closed),
            _ => Ok(()),
        }
    }

    /// Payload of the last message.
    pub fn body(&self) -> &[u8] {
        &self.buffer[self.body.clone()]
    }

    /// A field of the last message, an ErrorResponse or NoticeResponse.
    pub fn field(&self, code: u8) -> String {
        self.body()
            .split(|byte| *byte == 0)
            .find(|part| part.first() == Some(&code))
            .map(|part| String::from_utf8_lossy(&part[1..]).into_owned())
            .unwrap_or_default()
    }

    /// The only column of the last message, a DataRow; `None` if it has another shape.
    pub fn column(&self) -> Option<&[u8]> {
        let (head, value) = self.body().split_first_chunk::<6>()?;
        let length = u32::from_be_bytes([head[2], head[3], head[4], head[5]]) as usize;
        (head[..2] == [0, 1] && length == value.len()).then_some(value)
    }

    /// Process identifier and secret of BackendKeyData.
    pub fn key(&self) -> Vec<u8> {
        self.key.clone()
    }

    /// Sends FIN, keeps reading.
    pub async fn half_close(&mut self) -> Result<(), Lost> {
        Ok(self.stream.shutdown().await?)
    }

    /// Closes with RST (SO_LINGER of zero).
    pub fn reset(self) {
        let _ = rustix::net::sockopt::set_socket_linger(&self.stream, Some(Duration::ZERO));
    }

    /// Says Terminate and closes.
    pub async fn terminate(mut self) {
        let _ = self.send(&Batch::new().terminate()).await;
    }
}

/// Sends a CancelRequest and waits until the peer has closed: by then a server has sent the signal.
pub async fn cancel(target: &Target, key: &[u8]) -> Result<(), Lost> {
    let mut connection = Connection::open(target).await?;
    connection.send(&Batch::new().cancel_request(key)).await?;
    loop {
        match connection.next().await {
            Ok(_) => {}
            Err(Lost::Closed) => return Ok(()),
            Err(Lost::Io(error)) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(()),
            Err(lost) => return Err(lost),
        }
    }
}
