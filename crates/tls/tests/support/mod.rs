// SPDX-License-Identifier: Apache-2.0
//! A certificate authority in a temporary directory, and handshakes over memory.

#![allow(dead_code, missing_docs, reason = "each test file uses a part of it")]

use std::path::PathBuf;
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, IsCa, KeyPair, SanType,
};
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConnection, ServerConfig, ServerConnection};
use tempfile::TempDir;
use underpass_tls::{ClientSide, ServerSide};
use x509_parser::asn1_rs::{Any, FromDer};

/// A key and certificate on disk, in PEM.
#[derive(Clone)]
pub struct Files {
    pub key: PathBuf,
    pub cert: PathBuf,
    pub der: Vec<u8>,
}

/// What a certificate says.
#[derive(Default)]
pub struct Leaf<'a> {
    pub dns: Vec<&'a str>,
    pub common_name: Option<&'a str>,
}

impl<'a> Leaf<'a> {
    pub fn dns(name: &'a str) -> Self {
        Self { dns: vec![name], common_name: None }
    }

    pub fn common_name(name: &'a str) -> Self {
        Self { dns: Vec::new(), common_name: Some(name) }
    }
}

pub struct Authority {
    dir: TempDir,
    issuer: CertifiedIssuer<'static, KeyPair>,
    count: std::cell::Cell<u32>,
}

impl Authority {
    pub fn new(name: &str) -> Self {
        Self::with(name, |_| {})
    }

    pub fn expired(name: &str) -> Self {
        Self::with(name, |params| {
            params.not_before = rcgen::date_time_ymd(2001, 1, 1);
            params.not_after = rcgen::date_time_ymd(2002, 1, 1);
        })
    }

    fn with(name: &str, change: impl FnOnce(&mut CertificateParams)) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name = distinguished_name(Some(name));
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        change(&mut params);
        let key = KeyPair::generate().expect("key");
        let issuer = CertifiedIssuer::self_signed(params, key).expect("CA");
        let dir = tempfile::tempdir().expect("temporary directory");
        std::fs::write(dir.path().join("ca.crt"), issuer.pem()).expect("write");
        std::fs::write(dir.path().join("ca.key"), issuer.key().serialize_pem()).expect("write");
        Self { dir, issuer, count: 0.into() }
    }

    /// The CA certificate.
    pub fn file(&self) -> PathBuf {
        self.dir.path().join("ca.crt")
    }

    /// The CA's own key and certificate, for self-signed servers.
    pub fn files(&self) -> Files {
        let der = self.issuer.der().to_vec();
        Files { key: self.dir.path().join("ca.key"), cert: self.file(), der }
    }

    /// Makes a certificate of this CA.
    pub fn issue(&self, leaf: &Leaf<'_>) -> Files {
        let mut params = CertificateParams::default();
        params.distinguished_name = distinguished_name(leaf.common_name);
        params.subject_alt_names =
            leaf.dns.iter().map(|name| SanType::DnsName((*name).try_into().expect("DNS name"))).collect();
        let key = KeyPair::generate().expect("key");
        let cert = params.signed_by(&key, &self.issuer).expect("certificate");
        let number = self.count.replace(self.count.get() + 1);
        let path = |suffix| self.dir.path().join(format!("{number}.{suffix}"));
        let files = Files { key: path("key"), cert: path("crt"), der: cert.der().to_vec() };
        std::fs::write(&files.key, key.serialize_pem()).expect("write");
        std::fs::write(&files.cert, cert.pem()).expect("write");
        files
    }
}

fn distinguished_name(common_name: Option<&str>) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    if let Some(text) = common_name {
        name.push(DnType::CommonName, text);
    }
    name
}

/// Both ends after a handshake.
pub struct Pair {
    pub client: ClientConnection,
    pub server: ServerConnection,
}

/// Runs a handshake between our two sides; the error is the first one either side has.
pub fn handshake(server: &ClientSide, client: &ServerSide, host: &str) -> Result<Pair, rustls::Error> {
    let name = ServerSide::server_name(host).expect("a host name");
    let mut client = ClientConnection::new(client.config.clone(), name)?;
    let mut server = ServerConnection::new(server.config.clone())?;
    while client.is_handshaking() || server.is_handshaking() || client.wants_write() || server.wants_write() {
        let mut wire = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut wire).expect("memory");
        }
        let mut wire = wire.as_slice();
        while !wire.is_empty() {
            server.read_tls(&mut wire).expect("memory");
            server.process_new_packets()?;
        }
        let mut wire = Vec::new();
        while server.wants_write() {
            server.write_tls(&mut wire).expect("memory");
        }
        let mut wire = wire.as_slice();
        while !wire.is_empty() {
            client.read_tls(&mut wire).expect("memory");
            client.process_new_packets()?;
        }
    }
    Ok(Pair { client, server })
}

/// The certificate as of version 1: without version and extensions. Its signature does not hold any more.
pub fn version_1(der: &[u8]) -> Vec<u8> {
    let parts = elements(content(der));
    let fields = elements(content(parts[0]));
    // Both are context-specific, and nothing else is.
    let old: Vec<_> = fields.into_iter().filter(|field| field[0] & 0xc0 == 0).collect();
    sequence(&[&[&sequence(&old)[..]], &parts[1..]].concat())
}

fn content(der: &[u8]) -> &[u8] {
    Any::from_der(der).expect("DER").1.data
}

fn elements(mut der: &[u8]) -> Vec<&[u8]> {
    let mut elements = Vec::new();
    while !der.is_empty() {
        let (rest, _) = Any::from_der(der).expect("DER");
        elements.push(&der[..der.len() - rest.len()]);
        der = rest;
    }
    elements
}

fn sequence(parts: &[&[u8]]) -> Vec<u8> {
    let content = parts.concat();
    let length = u16::try_from(content.len()).expect("short").to_be_bytes();
    [&[0x30, 0x82], &length[..], &content].concat()
}

/// The configuration with this certificate and the key of `files`, whether they belong together or not.
pub fn showing(config: &ServerConfig, certificate: Vec<u8>, files: &Files) -> Arc<ServerConfig> {
    let key = PrivateKeyDer::from_pem_file(&files.key).expect("a key");
    let key = rustls::crypto::ring::sign::any_supported_type(&key).expect("a key that is supported");
    let mut config = config.clone();
    config.cert_resolver = Arc::new(SingleCertAndKey::from(CertifiedKey::new(vec![certificate.into()], key)));
    Arc::new(config)
}
