// SPDX-License-Identifier: Apache-2.0
//! Certificates for tests: an authority that signs server and client certificates, valid for the length of a test run.

use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};

use crate::process::write_service_file;
use crate::{Error, Result};

/// A certificate authority.
#[derive(Debug)]
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// A certificate and its key, as PEM.
#[derive(Debug, Clone)]
pub struct Identity {
    /// The certificate.
    pub cert_pem: String,
    /// Its private key (PKCS#8).
    pub key_pem: String,
}

impl Authority {
    /// A fresh authority with this common name.
    pub fn new(common_name: &str) -> Result<Self> {
        let mut params = params(common_name, &[])?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().map_err(tls)?;
        Ok(Self { issuer: CertifiedIssuer::self_signed(params, key).map_err(tls)? })
    }

    /// The authority's own certificate, for `sslrootcert`, `server_tls_ca_file`, `client_tls_ca_file`, `ssl_ca_file`.
    pub fn cert_pem(&self) -> String {
        self.issuer.pem()
    }

    /// A server certificate for these host names and addresses; the first is also the common name.
    pub fn server(&self, names: &[&str]) -> Result<Identity> {
        let mut params = params(names.first().copied().unwrap_or("localhost"), names)?;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.sign(params)
    }

    /// A client certificate whose common name is the user (PostgreSQL manual, "Certificate Authentication").
    pub fn client(&self, user: &str) -> Result<Identity> {
        let mut params = params(user, &[])?;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(params)
    }

    fn sign(&self, params: CertificateParams) -> Result<Identity> {
        let key = KeyPair::generate().map_err(tls)?;
        let cert = params.signed_by(&key, &self.issuer).map_err(tls)?;
        Ok(Identity { cert_pem: cert.pem(), key_pem: key.serialize_pem() })
    }

    /// Writes the authority's certificate as `NAME.crt` into `directory`; returns the path.
    pub fn write(&self, directory: &Path, name: &str) -> Result<PathBuf> {
        let path = directory.join(format!("{name}.crt"));
        write_service_file(&path, &self.cert_pem(), 0o644)?;
        Ok(path)
    }
}

impl Identity {
    /// Writes `NAME.crt` and `NAME.key` (mode 0600, owned by the service user) into `directory`; returns both paths.
    pub fn write(&self, directory: &Path, name: &str) -> Result<(PathBuf, PathBuf)> {
        let (cert, key) = (directory.join(format!("{name}.crt")), directory.join(format!("{name}.key")));
        write_service_file(&cert, &self.cert_pem, 0o644)?;
        write_service_file(&key, &self.key_pem, 0o600)?;
        Ok((cert, key))
    }
}

fn params(common_name: &str, names: &[&str]) -> Result<CertificateParams> {
    let names: Vec<String> = names.iter().map(|name| (*name).into()).collect();
    let mut params = CertificateParams::new(names).map_err(tls)?;
    params.distinguished_name.push(DnType::CommonName, common_name);
    Ok(params)
}

fn tls(error: rcgen::Error) -> Error {
    Error::Tls(error.to_string())
}
