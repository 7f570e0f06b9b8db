// SPDX-License-Identifier: Apache-2.0
//! What a client says before it is in: its bytes, in whatever pieces they come, become [`Event`]s.
//!
//! First packets (manual, 54.2.1 "Start-up", 54.2.10 and 54.2.11 on encryption), then authentication messages. No IO: the caller answers,
//! encrypts, looks the user up and runs [`ClientAuth`](crate::ClientAuth).
//!
//! Invariants:
//! * how the bytes are cut makes no difference, but for one rule: nothing may come together with a request for encryption, because what
//!   was said in the clear must never pass as said inside (CVE-2021-23214);
//! * each kind of encryption is asked for at most once, so nobody is kept answering without end;
//! * no message above [`MESSAGE_MAX`] bytes is waited for;
//! * after the end of a conversation nothing more is taken.

use underpass_wire::startup::{self, FirstPacket, ProtocolVersion, StartupMessage};
use underpass_wire::{Header, MessageError};

/// The longest authentication message, bytes with its header. PostgreSQL's `PG_MAX_AUTH_TOKEN_LENGTH` is 65535, for Kerberos; the longest
/// of the methods here is a password.
pub const MESSAGE_MAX: usize = 16 * 1024;

/// What the client wants next.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// Asks for encryption that is not to be had: answer `N`.
    NoEncryption,
    /// Answer `S`; what follows is TLS, and [`Intake::next`] gets what is inside.
    Tls,
    /// TLS begins at once, with these bytes.
    DirectTls(Vec<u8>),
    /// The connection's only purpose: cancel what this session does.
    Cancel {
        /// Process ID of its BackendKeyData.
        process_id: u32,
        /// The secret key, 4 to 256 bytes.
        secret_key: Vec<u8>,
    },
    /// Who wants to enter, and where. Authentication messages follow.
    Startup(Startup),
    /// The body of an authentication message (type `p`).
    Proof(Vec<u8>),
    /// Terminate, before it was in.
    Terminate,
    /// It cannot go on.
    Refused(Offence),
}

/// What the StartupMessage asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Startup {
    /// The database; the user's name if none was given.
    pub database: String,
    /// The user, never empty.
    pub user: String,
    /// All parameters in the client's order, user and database among them.
    pub parameters: Vec<(String, String)>,
    /// The minor version of protocol 3.
    pub minor: u16,
    /// The value of `replication`, if it means yes.
    pub replication: Option<String>,
    /// Names of `_pq_.` options, none of which is known here.
    pub unknown_options: Vec<String>,
}

/// Why a client is refused before anybody looked it up.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Offence {
    /// The first packet is none.
    #[error(transparent)]
    Malformed(#[from] MessageError),
    /// Bytes beside a request for encryption, a second one, or one inside TLS.
    #[error("unexpected data around a request for encryption")]
    AroundEncryption,
    /// TLS without asking, where there is none.
    #[error("TLS handshake, but client_tls_sslmode = disable")]
    NoTls,
    /// Neither 3.0 nor 3.2.
    #[error("unsupported frontend protocol {0}: server supports 3.0 to 3.2")]
    Protocol(ProtocolVersion),
    /// No user name, or an empty one.
    #[error("no user name")]
    NoUser,
    /// Names and values become part of log lines, tables and JSON.
    #[error("startup parameter that is not UTF-8")]
    NotUtf8,
    /// The length of an authentication message is impossible or above [`MESSAGE_MAX`].
    #[error("authentication message is too long or malformed")]
    AuthMessage,
    /// Another message where a proof is due.
    #[error("expected an authentication message, got {:?}", char::from(*.0))]
    NotAuthMessage(u8),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    FirstPacket,
    Proof,
    Over,
}

/// The first words of one connection.
#[derive(Debug)]
pub struct Intake {
    stage: Stage,
    asked_tls: bool,
    asked_gss: bool,
    is_tls: bool,
    is_direct: bool,
}

impl Default for Intake {
    fn default() -> Self {
        Self {
            stage: Stage::FirstPacket,
            asked_tls: false,
            asked_gss: false,
            is_tls: false,
            is_direct: false,
        }
    }
}

impl Intake {
    /// Whether TLS began without an SSLRequest: then ALPN must have named PostgreSQL.
    pub fn is_direct_tls(&self) -> bool {
        self.is_direct
    }

    /// Takes the next complete message out of `inbox`; `None` if there is none yet. `offers_tls`: whether this client may have TLS.
    pub fn next(&mut self, inbox: &mut Vec<u8>, offers_tls: bool) -> Option<Event> {
        let event = match self.stage {
            Stage::FirstPacket => self.first_packet(inbox, offers_tls),
            Stage::Proof => proof(inbox),
            Stage::Over => Ok(None),
        };
        let event = event.unwrap_or_else(|offence| Some(Event::Refused(offence)))?;
        match event {
            Event::Startup(_) => self.stage = Stage::Proof,
            Event::Cancel { .. } | Event::Terminate | Event::Refused(_) => self.stage = Stage::Over,
            Event::NoEncryption | Event::Tls | Event::DirectTls(_) | Event::Proof(_) => {}
        }
        Some(event)
    }

    fn first_packet(&mut self, inbox: &mut Vec<u8>, offers_tls: bool) -> Result<Option<Event>, Offence> {
        let Some((packet, used)) = startup::parse(inbox)? else { return Ok(None) };
        let event = match packet {
            FirstPacket::SslRequest | FirstPacket::GssencRequest => {
                let is_ssl = packet == FirstPacket::SslRequest;
                let asked = if is_ssl { &mut self.asked_tls } else { &mut self.asked_gss };
                let again = std::mem::replace(asked, true);
                if inbox.len() > used || self.is_tls || again {
                    return Err(Offence::AroundEncryption);
                }
                self.is_tls = is_ssl && offers_tls;
                if self.is_tls { Event::Tls } else { Event::NoEncryption }
            }
            FirstPacket::DirectTls if offers_tls && !self.is_tls => {
                (self.is_tls, self.is_direct, self.asked_tls) = (true, true, true);
                return Ok(Some(Event::DirectTls(std::mem::take(inbox))));
            }
            FirstPacket::DirectTls => return Err(Offence::NoTls),
            FirstPacket::Cancel(request) => {
                Event::Cancel { process_id: request.process_id, secret_key: request.secret_key.to_vec() }
            }
            FirstPacket::UnsupportedProtocol(version) => return Err(Offence::Protocol(version)),
            FirstPacket::Startup(message) => Event::Startup(Startup::new(&message)?),
        };
        inbox.drain(..used);
        Ok(Some(event))
    }
}

impl Startup {
    fn new(message: &StartupMessage<'_>) -> Result<Self, Offence> {
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).map_err(|_| Offence::NotUtf8);
        let user = message.user().filter(|user| !user.is_empty()).ok_or(Offence::NoUser)?;
        let parameters = message
            .parameters()
            .map(|(name, value)| Ok((text(name)?, text(value)?)))
            .collect::<Result<Vec<_>, Offence>>()?;
        let replication = parameters
            .iter()
            .find(|(name, value)| name == "replication" && (value == "database" || is_yes(value)));
        Ok(Self {
            database: text(message.database().unwrap_or(user))?,
            user: text(user)?,
            minor: message.version.minor,
            replication: replication.map(|(_, value)| value.clone()),
            unknown_options: message.protocol_options().filter_map(|(name, _)| text(name).ok()).collect(),
            parameters,
        })
    }
}

/// As PostgreSQL reads a Boolean (`parse_bool_with_len`): a word may be cut where it is clear which it is. Whatever else is said is no.
fn is_yes(value: &str) -> bool {
    let value = value.to_ascii_lowercase();
    let is_cut = |word: &str| !value.is_empty() && word.starts_with(&value);
    value == "1" || value == "on" || is_cut("true") || is_cut("yes")
}

fn proof(inbox: &mut Vec<u8>) -> Result<Option<Event>, Offence> {
    let header = match Header::parse(inbox) {
        Ok(Some(header)) if header.total() <= MESSAGE_MAX => header,
        Ok(None) => return Ok(None),
        _ => return Err(Offence::AuthMessage),
    };
    match header.tag {
        b'X' => Ok(Some(Event::Terminate)),
        b'p' if inbox.len() < header.total() => Ok(None),
        b'p' => Ok(Some(Event::Proof(inbox.drain(..header.total()).skip(5).collect()))),
        other => Err(Offence::NotAuthMessage(other)),
    }
}

#[cfg(test)]
mod tests {
    use underpass_wire::startup::build;

    use super::*;

    fn startup(parameters: &[(&str, &str)]) -> Vec<u8> {
        let mut out = Vec::new();
        let pairs = parameters.iter().map(|(name, value)| (name.as_bytes(), value.as_bytes()));
        build::startup_message(&mut out, ProtocolVersion::V3_0, pairs);
        out
    }

    fn first(bytes: &[u8], offers_tls: bool) -> Event {
        Intake::default().next(&mut bytes.to_vec(), offers_tls).expect("a complete packet")
    }

    #[test]
    fn encryption_is_asked_for_once_of_each_kind() {
        let (mut ssl, mut gss) = (Vec::new(), Vec::new());
        build::ssl_request(&mut ssl);
        build::gssenc_request(&mut gss);
        let mut intake = Intake::default();
        let mut say = |bytes: &[u8]| intake.next(&mut bytes.to_vec(), false);
        assert_eq!(say(&gss), Some(Event::NoEncryption));
        assert_eq!(say(&ssl), Some(Event::NoEncryption));
        assert_eq!(say(&gss), Some(Event::Refused(Offence::AroundEncryption)));
        assert_eq!(say(&ssl), None, "it is over");
    }

    #[test]
    fn nothing_comes_along_with_a_request_for_encryption() {
        let mut bytes = Vec::new();
        build::ssl_request(&mut bytes);
        bytes.extend(startup(&[("user", "joe")]));
        assert_eq!(first(&bytes, true), Event::Refused(Offence::AroundEncryption));
        assert_eq!(first(&bytes[..8], true), Event::Tls);
    }

    #[test]
    fn tls_at_once_only_where_there_is_tls() {
        assert_eq!(first(b"\x16\x03\x01", true), Event::DirectTls(b"\x16\x03\x01".to_vec()));
        assert_eq!(first(b"\x16\x03\x01", false), Event::Refused(Offence::NoTls));
    }

    #[test]
    fn a_startup_message_needs_a_user_and_names_in_utf8() {
        let Event::Startup(asked) = first(&startup(&[("user", "joe"), ("replication", "on")]), false) else {
            panic!("a startup")
        };
        assert_eq!((asked.database.as_str(), asked.replication.as_deref()), ("joe", Some("on")));
        assert_eq!(first(&startup(&[("database", "x")]), false), Event::Refused(Offence::NoUser));
        assert_eq!(first(&startup(&[("user", "")]), false), Event::Refused(Offence::NoUser));
        let mut broken = startup(&[("user", "joe"), ("a", "xx")]);
        let at = broken.len() - 3;
        broken[at] = 0xff;
        assert_eq!(first(&broken, false), Event::Refused(Offence::NotUtf8));
    }

    #[test]
    fn replication_is_asked_for_by_a_boolean_or_by_name() {
        let asks = |value| match first(&startup(&[("user", "joe"), ("replication", value)]), false) {
            Event::Startup(asked) => asked.replication.is_some(),
            other => panic!("{other:?}"),
        };
        assert!(["database", "1", "on", "ON", "t", "tru", "true", "y", "Yes"].into_iter().all(asks));
        assert!(
            !["", "0", "o", "of", "off", "f", "no", "2", "foo", "Database", "trues"].into_iter().any(asks)
        );
    }

    #[test]
    fn only_authentication_messages_follow_and_no_long_ones() {
        let next = |bytes: &[u8]| {
            let mut inbox = [&startup(&[("user", "joe")]), bytes].concat();
            let mut intake = Intake::default();
            assert!(matches!(intake.next(&mut inbox, false), Some(Event::Startup(_))));
            intake.next(&mut inbox, false)
        };
        assert_eq!(next(b"p\0\0\0\x06a\0"), Some(Event::Proof(b"a\0".to_vec())));
        assert_eq!(next(b"p\0\0\0\x06a"), None);
        assert_eq!(next(b"p\0\x01\0\0"), Some(Event::Refused(Offence::AuthMessage)));
        assert_eq!(next(b"Q\0\0\0\x08"), Some(Event::Refused(Offence::NotAuthMessage(b'Q'))));
        assert_eq!(next(b"X\0\0\0\x04"), Some(Event::Terminate));
    }
}
