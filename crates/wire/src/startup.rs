// SPDX-License-Identifier: Apache-2.0
//! The untyped first packets of a connection: StartupMessage, CancelRequest, SSLRequest, GSSENCRequest, and
//! the ClientHello of a client that begins TLS directly (`sslnegotiation=direct`).

pub mod build;
pub mod options;

use crate::reader::Reader;
use crate::{FrameError, MessageError};

/// The largest first packet, bytes, length word included: PostgreSQL's `MAX_STARTUP_PACKET_LENGTH` (10000)
/// counts what follows the length word.
pub const MAX_LEN: usize = 10_000 + 4;
/// Bytes of an SSLRequest or GSSENCRequest: the least that a first packet can have.
pub const ENCRYPTION_REQUEST_LEN: usize = 8;
/// The code in a CancelRequest's version field: 1234.5678.
pub const CANCEL_REQUEST_CODE: u32 = 1234 << 16 | 5678;
/// The code in an SSLRequest's version field: 1234.5679.
pub const SSL_REQUEST_CODE: u32 = 1234 << 16 | 5679;
/// The code in a GSSENCRequest's version field: 1234.5680.
pub const GSSENC_REQUEST_CODE: u32 = 1234 << 16 | 5680;
/// The first byte of a TLS handshake record. A first packet's first byte is 0, as its length is below 2^24.
pub const TLS_HANDSHAKE: u8 = 0x16;
/// The ALPN protocol that direct TLS must offer and select.
pub const ALPN: &[u8] = b"postgresql";
/// Parameters with this prefix are protocol options, which a server may decline one by one.
pub const PROTOCOL_OPTION_PREFIX: &[u8] = b"_pq_.";
/// Bytes of a cancel key: 4 in protocol 3.0, up to 256 in 3.2.
pub const CANCEL_KEY_LEN: std::ops::RangeInclusive<usize> = 4..=256;

/// A protocol version as it stands in a StartupMessage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProtocolVersion {
    /// 3 for all servers since 7.4.
    pub major: u16,
    /// 0, or 2 since PostgreSQL 18. 3.1 is never used, 3.9999 is asked by clients to test negotiation.
    pub minor: u16,
}

impl ProtocolVersion {
    /// What all servers speak.
    pub const V3_0: Self = Self { major: 3, minor: 0 };
    /// PostgreSQL 18: cancel keys of variable length.
    pub const V3_2: Self = Self { major: 3, minor: 2 };

    /// From the word on the wire: major in the upper half.
    pub const fn from_word(word: u32) -> Self {
        Self { major: (word >> 16) as u16, minor: word as u16 }
    }

    /// The word on the wire.
    pub const fn to_word(self) -> u32 {
        (self.major as u32) << 16 | self.minor as u32
    }
}

impl std::fmt::Display for ProtocolVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// What a client may say first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirstPacket<'a> {
    /// A session of protocol 3.
    Startup(StartupMessage<'a>),
    /// A connection whose only purpose is to cancel. No answer is sent.
    Cancel(CancelRequest<'a>),
    /// Asks for TLS; answered with one byte, `S` or `N`.
    SslRequest,
    /// Asks for GSSAPI encryption; answered with one byte, `G` or `N`.
    GssencRequest,
    /// TLS begins at once, nothing of it is consumed.
    DirectTls,
    /// A version that is not ours: FATAL 0A000.
    UnsupportedProtocol(ProtocolVersion),
}

/// Parses the first packet at the start of `bytes`: what it is, and how many bytes it takes (0 for
/// [`FirstPacket::DirectTls`]). `None` when it is not complete.
///
/// A length out of range is reported from the first 4 bytes on, before anything is buffered for it.
pub fn parse(bytes: &[u8]) -> Result<Option<(FirstPacket<'_>, usize)>, MessageError> {
    if bytes.first() == Some(&TLS_HANDSHAKE) {
        return Ok(Some((FirstPacket::DirectTls, 0)));
    }
    let Some(total) = packet_len(bytes)? else { return Ok(None) };
    let Some(packet) = bytes.get(4..total) else { return Ok(None) };
    let mut body = Reader::new(packet);
    let first = match body.u32()? {
        CANCEL_REQUEST_CODE => FirstPacket::Cancel(CancelRequest::decode(body)?),
        SSL_REQUEST_CODE => encryption(body, FirstPacket::SslRequest)?,
        GSSENC_REQUEST_CODE => encryption(body, FirstPacket::GssencRequest)?,
        word => match ProtocolVersion::from_word(word) {
            version @ ProtocolVersion { major: 3, .. } => {
                FirstPacket::Startup(StartupMessage::decode(version, body.rest)?)
            }
            version => FirstPacket::UnsupportedProtocol(version),
        },
    };
    Ok(Some((first, total)))
}

/// Bytes of the first packet that begins here, length word included: 8..=[`MAX_LEN`]. `None` before 4 bytes.
pub fn packet_len(bytes: &[u8]) -> Result<Option<usize>, FrameError> {
    let Some(word) = bytes.first_chunk() else { return Ok(None) };
    match usize::try_from(u32::from_be_bytes(*word)) {
        Ok(len) if (ENCRYPTION_REQUEST_LEN..=MAX_LEN).contains(&len) => Ok(Some(len)),
        _ => Err(FrameError::StartupLength),
    }
}

/// These requests have nothing behind their code. Bytes after the packet are the caller's to refuse: whoever
/// sends them before the answer tries to slip plain text into the TLS session (CVE-2021-23214).
fn encryption<'a>(body: Reader<'_>, request: FirstPacket<'a>) -> Result<FirstPacket<'a>, MessageError> {
    body.end().map(|()| request).map_err(|_| MessageError::EncryptionRequest)
}

/// Names the session that shall be cancelled.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CancelRequest<'a> {
    /// The process ID of BackendKeyData.
    pub process_id: u32,
    /// Its secret key: 4..=256 bytes. Compare in constant time.
    pub secret_key: &'a [u8],
}

impl<'a> CancelRequest<'a> {
    fn decode(mut body: Reader<'a>) -> Result<Self, MessageError> {
        let process_id = body.u32()?;
        if !CANCEL_KEY_LEN.contains(&body.rest.len()) {
            return Err(MessageError::CancelKeyLength);
        }
        Ok(Self { process_id, secret_key: body.rest })
    }
}

/// The key is a secret: logs see its length only.
impl std::fmt::Debug for CancelRequest<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let key_len = self.secret_key.len();
        f.debug_struct("CancelRequest")
            .field("process_id", &self.process_id)
            .field("key_len", &key_len)
            .finish()
    }
}

/// The parameters of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartupMessage<'a> {
    /// Major is 3; any minor.
    pub version: ProtocolVersion,
    pairs: &'a [u8],
}

impl<'a> StartupMessage<'a> {
    fn decode(version: ProtocolVersion, body: &'a [u8]) -> Result<Self, MessageError> {
        let mut pairs = Reader::new(body);
        loop {
            let name = pairs.cstr().map_err(|_| MessageError::StartupLayout)?;
            if name.is_empty() {
                pairs.end().map_err(|_| MessageError::StartupLayout)?;
                return Ok(Self { version, pairs: body });
            }
            pairs.cstr().map_err(|_| MessageError::StartupLayout)?;
        }
    }

    /// Names and values in the client's order, without the `_pq_.` options.
    pub fn parameters(&self) -> impl Iterator<Item = (&'a [u8], &'a [u8])> + Clone + use<'a> {
        self.pairs().filter(|(name, _)| !name.starts_with(PROTOCOL_OPTION_PREFIX))
    }

    /// The `_pq_.` options, whole names and values. What is not known goes into NegotiateProtocolVersion.
    pub fn protocol_options(&self) -> impl Iterator<Item = (&'a [u8], &'a [u8])> + Clone + use<'a> {
        self.pairs().filter(|(name, _)| name.starts_with(PROTOCOL_OPTION_PREFIX))
    }

    /// All pairs in the client's order.
    pub(crate) fn pairs(&self) -> Pairs<'a> {
        Pairs { rest: Reader::new(self.pairs) }
    }

    /// The value of a parameter; of several the last, which is what PostgreSQL uses.
    pub fn get(&self, name: &str) -> Option<&'a [u8]> {
        self.pairs().filter(|(n, _)| *n == name.as_bytes()).last().map(|(_, value)| value)
    }

    /// The user name. PostgreSQL refuses a missing or empty one with 28000.
    pub fn user(&self) -> Option<&'a [u8]> {
        self.get("user")
    }

    /// The database name; PostgreSQL takes the user's when this is missing or empty.
    pub fn database(&self) -> Option<&'a [u8]> {
        self.get("database").filter(|name| !name.is_empty()).or_else(|| self.user())
    }
}

#[derive(Clone)]
pub(crate) struct Pairs<'a> {
    rest: Reader<'a>,
}

impl<'a> Iterator for Pairs<'a> {
    type Item = (&'a [u8], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let name = self.rest.cstr().ok().filter(|name| !name.is_empty())?;
        Some((name, self.rest.cstr().ok()?))
    }
}
