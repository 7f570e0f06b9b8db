// SPDX-License-Identifier: Apache-2.0
//! TLS towards PostgreSQL: the `server_tls_*` keys.

use std::net::IpAddr;
use std::sync::Arc;

use rustls::ClientConfig;
use rustls::client::{ClientConnection, Resumption};
use rustls_pki_types::ServerName;

use crate::certificate::server_end_point_hash;
use crate::client_side::key_pair_error;
use crate::error::TlsError;
use crate::options::{SslMode, TlsServerOptions};
use crate::verifier::ServerVerifier;
use crate::{ALPN, files, suites};

const KEYS: suites::Keys = suites::Keys {
    protocols: "server_tls_protocols",
    ciphers: "server_tls_ciphers",
    tls13_ciphers: "server_tls13_ciphers",
    ecdhcurve: "server_tls_ecdhcurve",
};

/// Ready to begin TLS with servers.
#[derive(Debug, Clone)]
pub struct ServerSide {
    /// For `rustls::ClientConnection::new`, with a name from [`server_name`](Self::server_name).
    pub config: Arc<ClientConfig>,
    /// The mode it was built for.
    pub sslmode: SslMode,
    /// What was asked and cannot be had; log each once.
    pub warnings: Vec<String>,
}

impl ServerSide {
    /// Reads the files and builds the configuration; `None` for sslmode disable.
    pub fn build(options: &TlsServerOptions) -> Result<Option<Self>, TlsError> {
        let sslmode = options.sslmode;
        if sslmode == SslMode::Disable {
            return Ok(None);
        }
        let mut chosen = suites::choose(
            &KEYS,
            &suites::Wanted {
                protocols: &options.protocols,
                ciphers: &options.ciphers,
                tls13_ciphers: &options.tls13_ciphers,
                ecdhcurve: "auto",
            },
        )?;
        let set =
            |path: &Option<std::path::PathBuf>| path.clone().filter(|path| !path.as_os_str().is_empty());
        let roots = if sslmode.verifies() {
            let path = set(&options.ca_file).or_else(files::system_bundle).ok_or(TlsError::Missing {
                key: "server_tls_ca_file",
                because: format!(
                    "server_tls_sslmode = {sslmode} checks certificates, and the system has no CA bundle"
                ),
            })?;
            let roots = files::roots("server_tls_ca_file", &path)?;
            chosen.warnings.extend(roots.warnings.iter().cloned());
            Some(roots)
        } else {
            None
        };
        let verifier = ServerVerifier::new(sslmode, roots, chosen.provider.signature_verification_algorithms);
        let builder = ClientConfig::builder_with_provider(chosen.provider)
            .with_protocol_versions(&chosen.versions)
            .map_err(|source| TlsError::Rustls { key: KEYS.ciphers, source })?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier));
        let mut config = match (set(&options.key_file), set(&options.cert_file)) {
            (None, None) => builder.with_no_client_auth(),
            (Some(key_path), Some(cert_path)) => {
                let certificates = files::certificates("server_tls_cert_file", &cert_path)?;
                let key = files::private_key("server_tls_key_file", &key_path)?;
                builder
                    .with_client_auth_cert(certificates, key)
                    .map_err(|source| key_pair_error("server_tls_key_file", &key_path, &cert_path, source))?
            }
            (Some(_), None) => {
                let because = "server_tls_key_file names the key to a certificate".into();
                return Err(TlsError::Missing { key: "server_tls_cert_file", because });
            }
            (None, Some(_)) => {
                let because = "server_tls_cert_file names a certificate that needs its key".into();
                return Err(TlsError::Missing { key: "server_tls_key_file", because });
            }
        };
        config.alpn_protocols = vec![ALPN.to_vec()];
        // PostgreSQL gives no tickets, and a resumed session would skip the check of the certificate.
        config.resumption = Resumption::disabled();
        Ok(Some(Self { config: Arc::new(config), sslmode, warnings: chosen.warnings }))
    }

    /// The name to check a certificate against and to send as SNI: a DNS name, or an IP address (no SNI).
    pub fn server_name(host: &str) -> Result<ServerName<'static>, TlsError> {
        if let Ok(address) = host.parse::<IpAddr>() {
            return Ok(ServerName::from(address));
        }
        // A final dot is DNS notation and never part of a certificate.
        let name = host.strip_suffix('.').unwrap_or(host);
        ServerName::try_from(name.to_owned()).map_err(|_| TlsError::Host(host.to_owned()))
    }

    /// tls-server-end-point hash of the server's certificate, for SCRAM-SHA-256-PLUS; after the handshake.
    pub fn end_point_hash(connection: &ClientConnection) -> Option<Vec<u8>> {
        server_end_point_hash(connection.peer_certificates()?.first()?)
    }
}
