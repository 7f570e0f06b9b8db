// SPDX-License-Identifier: Apache-2.0
//! One CA and certificates of it, in PEM files.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, SignatureAlgorithm,
};
use tempfile::TempDir;

pub struct Authority {
    dir: TempDir,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    /// The CA signs with `algorithm`, which decides the hash of tls-server-end-point.
    pub fn new(algorithm: &'static SignatureAlgorithm) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "ca");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate_for(algorithm).expect("key"));
        let authority = Self { dir: tempfile::tempdir().expect("directory"), issuer: issuer.expect("CA") };
        fs::write(authority.ca(), authority.issuer.pem()).expect("write");
        authority
    }

    pub fn ca(&self) -> PathBuf {
        self.dir.path().join("ca.crt")
    }

    /// Writes `name.key` (mode 0600) and `name.crt` into `to`: for localhost, with `name` as common name.
    pub fn issue(&self, name: &str, to: Option<&Path>) -> (PathBuf, PathBuf) {
        let mut params = CertificateParams::new(["localhost".to_owned()]).expect("names");
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("key");
        let certificate = params.signed_by(&key, &self.issuer).expect("certificate");
        let to = to.unwrap_or(self.dir.path());
        let paths = (to.join(format!("{name}.key")), to.join(format!("{name}.crt")));
        fs::write(&paths.0, key.serialize_pem()).expect("write");
        fs::set_permissions(&paths.0, fs::Permissions::from_mode(0o600)).expect("mode");
        fs::write(&paths.1, certificate.pem()).expect("write");
        paths
    }
}
