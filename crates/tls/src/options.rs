// SPDX-License-Identifier: Apache-2.0
//! The TLS keys of pgbouncer.ini as plain values.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// `client_tls_sslmode` and `server_tls_sslmode`, ordered by strictness.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum SslMode {
    /// No TLS.
    #[default]
    Disable,
    /// Towards clients: TLS if the client asks. Towards servers: treated as prefer, as PgBouncer does.
    Allow,
    /// TLS if the peer can.
    Prefer,
    /// TLS or no connection; the peer's certificate is not checked.
    Require,
    /// The peer's certificate must be signed by the CA.
    VerifyCa,
    /// And towards servers it must name the host. Towards clients the same as verify-ca.
    VerifyFull,
}

impl SslMode {
    /// Every mode with its name.
    pub const ALL: [(Self, &'static str); 6] = [
        (Self::Disable, "disable"),
        (Self::Allow, "allow"),
        (Self::Prefer, "prefer"),
        (Self::Require, "require"),
        (Self::VerifyCa, "verify-ca"),
        (Self::VerifyFull, "verify-full"),
    ];

    /// Whether a connection without TLS is refused.
    pub fn requires_tls(self) -> bool {
        self >= Self::Require
    }

    /// Whether the peer must show a certificate of the CA.
    pub fn verifies(self) -> bool {
        self >= Self::VerifyCa
    }
}

impl FromStr for SslMode {
    type Err = String;

    /// The error says which names exist.
    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.iter().find(|(_, name)| text.eq_ignore_ascii_case(name));
        found.map(|(mode, _)| *mode).ok_or_else(|| {
            format!("\"{text}\" is not one of disable, allow, prefer, require, verify-ca, verify-full")
        })
    }
}

impl fmt::Display for SslMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::ALL.iter().find(|(mode, _)| mode == self).map_or("", |(_, name)| name);
        f.write_str(name)
    }
}

/// The `client_tls_*` keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsClientOptions {
    /// `client_tls_sslmode`.
    pub sslmode: SslMode,
    /// `client_tls_key_file`, PEM; wanted unless sslmode is disable.
    pub key_file: Option<PathBuf>,
    /// `client_tls_cert_file`, PEM, own certificate first, then intermediates.
    pub cert_file: Option<PathBuf>,
    /// `client_tls_ca_file`, PEM; wanted by verify-ca and verify-full.
    pub ca_file: Option<PathBuf>,
    /// `client_tls_protocols`.
    pub protocols: String,
    /// `client_tls_ciphers`: TLS 1.2, OpenSSL syntax.
    pub ciphers: String,
    /// `client_tls13_ciphers`; empty means all.
    pub tls13_ciphers: String,
    /// `client_tls_ecdhcurve`.
    pub ecdhcurve: String,
    /// `client_tls_dheparams`; has no effect, finite-field Diffie-Hellman is never used.
    pub dheparams: String,
}

impl Default for TlsClientOptions {
    fn default() -> Self {
        Self {
            sslmode: SslMode::Disable,
            key_file: None,
            cert_file: None,
            ca_file: None,
            protocols: "secure".into(),
            ciphers: "default".into(),
            tls13_ciphers: String::new(),
            ecdhcurve: "auto".into(),
            dheparams: "auto".into(),
        }
    }
}

/// The `server_tls_*` keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsServerOptions {
    /// `server_tls_sslmode`.
    pub sslmode: SslMode,
    /// `server_tls_ca_file`, PEM. Unset, verify-ca and verify-full trust the system's bundle.
    pub ca_file: Option<PathBuf>,
    /// `server_tls_key_file`, PEM: our own key towards servers.
    pub key_file: Option<PathBuf>,
    /// `server_tls_cert_file`, PEM: our own certificate towards servers.
    pub cert_file: Option<PathBuf>,
    /// `server_tls_protocols`.
    pub protocols: String,
    /// `server_tls_ciphers`: TLS 1.2, OpenSSL syntax.
    pub ciphers: String,
    /// `server_tls13_ciphers`; empty means all.
    pub tls13_ciphers: String,
}

impl Default for TlsServerOptions {
    fn default() -> Self {
        Self {
            sslmode: SslMode::Prefer,
            ca_file: None,
            key_file: None,
            cert_file: None,
            protocols: "secure".into(),
            ciphers: "default".into(),
            tls13_ciphers: String::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sslmodes_have_their_names() {
        for (mode, name) in SslMode::ALL {
            assert_eq!(name.parse(), Ok(mode));
            assert_eq!(mode.to_string(), name);
        }
        assert!("verify_full".parse::<SslMode>().unwrap_err().contains("verify-full"));
        assert!(!SslMode::Prefer.requires_tls() && SslMode::Require.requires_tls());
        assert!(!SslMode::Require.verifies() && SslMode::VerifyCa.verifies());
    }
}
