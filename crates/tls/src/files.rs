// SPDX-License-Identifier: Apache-2.0
//! PEM files: certificates, keys, trusted roots.

use std::path::{Path, PathBuf};

use rustls::RootCertStore;
use rustls_pki_types::pem::{self, PemObject};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use zeroize::Zeroizing;

use crate::error::TlsError;

fn read(key: &'static str, path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|source| TlsError::Read { key, path: path.to_owned(), source })
}

fn file_error(key: &'static str, path: &Path, problem: impl Into<String>) -> TlsError {
    TlsError::File { key, path: path.to_owned(), problem: problem.into() }
}

/// All certificates of a file, in its order; at least one.
pub(crate) fn certificates(key: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let text = read(key, path)?;
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(&text)
        .collect::<Result<_, _>>()
        .map_err(|error| file_error(key, path, format!("is not valid PEM: {error}")))?;
    if certificates.is_empty() {
        return Err(file_error(key, path, "holds no \"BEGIN CERTIFICATE\" block; give a PEM file"));
    }
    Ok(certificates)
}

/// The first private key of a file.
pub(crate) fn private_key(key: &'static str, path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let text = Zeroizing::new(read(key, path)?);
    if contains(&text, b"BEGIN ENCRYPTED PRIVATE KEY") || contains(&text, b"Proc-Type: 4,ENCRYPTED") {
        let problem = "is encrypted with a passphrase; store it without one (openssl pkey -in KEY -out NEW)";
        return Err(file_error(key, path, problem));
    }
    PrivateKeyDer::from_pem_slice(&text).map_err(|error| match error {
        pem::Error::NoItemsFound => {
            file_error(key, path, "holds no private key; give a PEM file with PKCS#8, PKCS#1 or SEC1 key")
        }
        error => file_error(key, path, format!("is not valid PEM: {error}")),
    })
}

/// Trusted roots with the certificates they were made from.
pub(crate) struct Roots {
    pub store: RootCertStore,
    pub certificates: Vec<CertificateDer<'static>>,
    pub warnings: Vec<String>,
}

/// Every certificate of a CA file becomes a trust anchor; those rustls cannot read are skipped with a
/// warning, as long as one is left.
pub(crate) fn roots(key: &'static str, path: &Path) -> Result<Roots, TlsError> {
    let certificates = certificates(key, path)?;
    let mut store = RootCertStore::empty();
    let (added, ignored) = store.add_parsable_certificates(certificates.iter().cloned());
    if added == 0 {
        return Err(file_error(key, path, "holds no usable CA certificate; X.509 version 3 is needed"));
    }
    let mut warnings = Vec::new();
    if ignored > 0 {
        warnings.push(format!("{key}: {} of the certificates in {} cannot be used", ignored, path.display()));
    }
    Ok(Roots { store, certificates, warnings })
}

/// Where systems keep the bundle that OpenSSL would use when no CA file is named.
const SYSTEM_BUNDLES: [&str; 3] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"];

/// The first bundle of the system that exists.
pub(crate) fn system_bundle() -> Option<PathBuf> {
    SYSTEM_BUNDLES.iter().map(PathBuf::from).find(|path| path.exists())
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}
