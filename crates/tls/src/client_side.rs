// SPDX-License-Identifier: Apache-2.0
//! TLS towards clients: the `client_tls_*` keys.

use std::path::Path;
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::server::{NoClientAuth, NoServerSessionStorage, ServerConnection, WebPkiClientVerifier};

use crate::certificate::{common_name, server_end_point_hash};
use crate::error::TlsError;
use crate::options::{SslMode, TlsClientOptions};
use crate::{ALPN, files, suites};

const KEYS: suites::Keys = suites::Keys {
    protocols: "client_tls_protocols",
    ciphers: "client_tls_ciphers",
    tls13_ciphers: "client_tls13_ciphers",
    ecdhcurve: "client_tls_ecdhcurve",
};

/// Ready to accept TLS from clients.
#[derive(Debug, Clone)]
pub struct ClientSide {
    /// For `rustls::ServerConnection::new`.
    pub config: Arc<ServerConfig>,
    /// The mode it was built for.
    pub sslmode: SslMode,
    /// tls-server-end-point hash of our own certificate, for SCRAM-SHA-256-PLUS towards clients; `None` if
    /// its signature algorithm has none.
    pub end_point_hash: Option<Vec<u8>>,
    /// What was asked and cannot be had; log each once.
    pub warnings: Vec<String>,
}

impl ClientSide {
    /// Reads the files and builds the configuration; `None` for sslmode disable.
    pub fn build(options: &TlsClientOptions) -> Result<Option<Self>, TlsError> {
        let sslmode = options.sslmode;
        if sslmode == SslMode::Disable {
            return Ok(None);
        }
        let key_path = wanted(&options.key_file, ("client_tls_key_file", "a private key"), sslmode)?;
        let cert_path = wanted(&options.cert_file, ("client_tls_cert_file", "a certificate"), sslmode)?;
        let mut chosen = suites::choose(
            &KEYS,
            &suites::Wanted {
                protocols: &options.protocols,
                ciphers: &options.ciphers,
                tls13_ciphers: &options.tls13_ciphers,
                ecdhcurve: &options.ecdhcurve,
            },
        )?;
        if !["", "auto", "none"].contains(&options.dheparams.trim()) {
            chosen.warnings.push(format!(
                "client_tls_dheparams = {}: has no effect, finite-field Diffie-Hellman is not used",
                options.dheparams
            ));
        }
        let certificates = files::certificates("client_tls_cert_file", cert_path)?;
        let key = files::private_key("client_tls_key_file", key_path)?;
        let end_point_hash = server_end_point_hash(&certificates[0]);

        let named = wanted(&options.ca_file, ("client_tls_ca_file", "a CA"), sslmode);
        let verifier = if sslmode.verifies() || named.is_ok() {
            // PgBouncer refuses to start with verify-full and no file, and takes the authorities that the system trusts for verify-ca.
            let system = || files::system_bundle().filter(|_| sslmode == SslMode::VerifyCa);
            let ca_path = &named.map(Path::to_owned).or_else(|missing| system().ok_or(missing))?;
            let roots = files::roots("client_tls_ca_file", ca_path)?;
            chosen.warnings.extend(roots.warnings);
            let mut builder =
                WebPkiClientVerifier::builder_with_provider(Arc::new(roots.store), chosen.provider.clone());
            if !sslmode.verifies() {
                // As in PgBouncer, who has none may come without: rules of the HBA file with method cert are for those who have one.
                builder = builder.allow_unauthenticated();
            }
            builder.build().map_err(|error| TlsError::File {
                key: "client_tls_ca_file",
                path: ca_path.to_owned(),
                problem: format!("cannot be used: {error}"),
            })?
        } else {
            // Nobody to vouch for a certificate, so none is asked for.
            Arc::new(NoClientAuth)
        };
        let mut config = ServerConfig::builder_with_provider(chosen.provider)
            .with_protocol_versions(&chosen.versions)
            .map_err(|source| TlsError::Rustls { key: KEYS.ciphers, source })?
            .with_client_cert_verifier(verifier)
            .with_single_cert(certificates, key)
            .map_err(|source| key_pair_error("client_tls_key_file", key_path, cert_path, source))?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        // Our order of ciphers counts, as with PgBouncer.
        config.ignore_client_order = true;
        // Resumption by tickets: state lives with the client, and a RELOAD, which makes new ticket keys,
        // ends it. One ticket per login: libpq opens one connection at a time.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.ticketer =
            ring::Ticketer::new().map_err(|source| TlsError::Rustls { key: "client_tls_sslmode", source })?;
        config.send_tls13_tickets = 1;
        Ok(Some(Self { config: Arc::new(config), sslmode, end_point_hash, warnings: chosen.warnings }))
    }

    /// The common name of the client's certificate, for method cert. Only certificates that the CA vouched
    /// for get through the handshake, and without a CA none is taken.
    pub fn peer_common_name(&self, connection: &ServerConnection) -> Option<String> {
        common_name(connection.peer_certificates()?.first()?)
    }

    /// Whether a client that began with TLS at once (without SSLRequest) may go on: it must have agreed on
    /// PostgreSQL's ALPN protocol, or another protocol's bytes could be taken for ours.
    pub fn direct_tls_allowed(connection: &ServerConnection) -> bool {
        connection.alpn_protocol() == Some(ALPN)
    }
}

fn wanted<'a>(
    file: &'a Option<std::path::PathBuf>,
    (key, what): (&'static str, &str),
    sslmode: SslMode,
) -> Result<&'a Path, TlsError> {
    let because = format!("client_tls_sslmode = {sslmode} needs {what} in PEM form");
    file.as_deref().filter(|path| !path.as_os_str().is_empty()).ok_or(TlsError::Missing { key, because })
}

/// rustls does not say which of the two files it dislikes.
pub(crate) fn key_pair_error(
    key: &'static str,
    key_path: &Path,
    cert_path: &Path,
    source: rustls::Error,
) -> TlsError {
    let problem = match source {
        rustls::Error::InconsistentKeys(_) => {
            format!(
                "is not the key of the certificate in {}; give the pair that was made together",
                cert_path.display()
            )
        }
        source => format!("cannot be used with {}: {source}", cert_path.display()),
    };
    TlsError::File { key, path: key_path.to_owned(), problem }
}
