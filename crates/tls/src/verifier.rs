// SPDX-License-Identifier: Apache-2.0
//! Checks a PostgreSQL server's certificate as far as `server_tls_sslmode` asks.
//!
//! Whatever the mode, the handshake's signature is checked: the server holds the key of the certificate it
//! shows, which is what channel binding rests on. Where nothing else is checked, the key is all that is needed
//! of the certificate: webpki refuses those of version 1, which is what `openssl x509 -req` of the PostgreSQL
//! manual makes before OpenSSL 3.2, and OpenSSL's peers take them.

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{
    WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature,
    verify_tls13_signature_with_raw_key,
};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, DigitallySignedStruct, Error, SignatureScheme};
use rustls_pki_types::{CertificateDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use x509_parser::asn1_rs::{Any, FromDer};
use x509_parser::prelude::GeneralName;
use x509_parser::time::ASN1Time;
use x509_parser::x509::SubjectPublicKeyInfo;

use crate::certificate;
use crate::files::Roots;
use crate::options::SslMode;

#[derive(Debug)]
pub(crate) struct ServerVerifier {
    sslmode: SslMode,
    /// Trust anchors, and the certificates of the CA file as they are.
    roots: Option<(rustls::RootCertStore, Vec<CertificateDer<'static>>)>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerVerifier {
    pub(crate) fn new(sslmode: SslMode, roots: Option<Roots>, algorithms: WebPkiSupportedAlgorithms) -> Self {
        Self { sslmode, roots: roots.map(|roots| (roots.store, roots.certificates)), algorithms }
    }

    fn verify_chain(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), Error> {
        let Some((store, certificates)) = &self.roots else {
            return Ok(());
        };
        // A self-signed server certificate that is its own CA file is common with PostgreSQL (the manual's
        // own example) and fine with OpenSSL; webpki refuses a CA as end entity, so it is compared here.
        if certificates.iter().any(|trusted| trusted == end_entity) {
            return check_dates(end_entity, now);
        }
        let parsed = ParsedCertificate::try_from(end_entity)?;
        verify_server_cert_signed_by_trust_anchor(&parsed, store, intermediates, now, self.algorithms.all)
    }

    /// What webpki refuses may be due to the certificate: without a check of that, `by_key` decides.
    fn or_by_key(
        &self,
        verified: Result<HandshakeSignatureValid, Error>,
        certificate: &CertificateDer<'_>,
        by_key: impl FnOnce(&SubjectPublicKeyInfo<'_>) -> Result<HandshakeSignatureValid, Error>,
    ) -> Result<HandshakeSignatureValid, Error> {
        match (verified, certificate::parse(certificate)) {
            (Err(_), Some(parsed)) if !self.sslmode.verifies() => by_key(parsed.public_key()),
            (verified, _) => verified,
        }
    }

    /// As webpki does it: of the algorithms of the scheme, the one whose keys are of this kind.
    fn verify_tls12_signature_with_raw_key(
        &self,
        message: &[u8],
        key: &SubjectPublicKeyInfo<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let kind = key_algorithm(key.raw).ok_or(CertificateError::BadEncoding)?;
        let scheme = self.algorithms.mapping.iter().find(|(scheme, _)| *scheme == signature.scheme);
        let algorithm = scheme
            .and_then(|(_, algorithms)| {
                algorithms.iter().find(|one| one.public_key_alg_id().as_ref() == kind)
            })
            .ok_or(CertificateError::BadSignature)?;
        algorithm
            .verify_signature(&key.subject_public_key.data, message, signature.signature())
            .map_err(|_| CertificateError::BadSignature)?;
        Ok(HandshakeSignatureValid::assertion())
    }
}

/// The content of the AlgorithmIdentifier of a SubjectPublicKeyInfo.
fn key_algorithm(spki: &[u8]) -> Option<&[u8]> {
    let (_, spki) = Any::from_der(spki).ok()?;
    let (_, algorithm) = Any::from_der(spki.data).ok()?;
    Some(algorithm.data)
}

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if self.sslmode.verifies() {
            self.verify_chain(end_entity, intermediates, now)?;
        }
        if self.sslmode == SslMode::VerifyFull {
            verify_name(end_entity, server_name)?;
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let verified = verify_tls12_signature(message, certificate, signature, &self.algorithms);
        self.or_by_key(verified, certificate, |key| {
            self.verify_tls12_signature_with_raw_key(message, key, signature)
        })
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let verified = verify_tls13_signature(message, certificate, signature, &self.algorithms);
        self.or_by_key(verified, certificate, |key| {
            let key = SubjectPublicKeyInfoDer::from(key.raw);
            verify_tls13_signature_with_raw_key(message, &key, signature, &self.algorithms)
        })
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

fn check_dates(der: &CertificateDer<'_>, now: UnixTime) -> Result<(), Error> {
    let encoding = || Error::from(CertificateError::BadEncoding);
    let certificate = certificate::parse(der).ok_or_else(encoding)?;
    let seconds = i64::try_from(now.as_secs()).map_err(|_| encoding())?;
    let now = ASN1Time::from_timestamp(seconds).map_err(|_| encoding())?;
    let validity = certificate.validity();
    if now < validity.not_before {
        return Err(CertificateError::NotValidYet.into());
    }
    if now > validity.not_after {
        return Err(CertificateError::Expired.into());
    }
    Ok(())
}

/// Subject alternative names decide; a certificate without any is matched by its common name, which webpki
/// no longer does but OpenSSL, libpq and PgBouncer do.
fn verify_name(der: &CertificateDer<'_>, server_name: &ServerName<'_>) -> Result<(), Error> {
    let result = verify_server_name(&ParsedCertificate::try_from(der)?, server_name);
    if result.is_ok() || has_alternative_names(der) {
        return result;
    }
    match certificate::common_name(der) {
        Some(name) if name_matches(&name, &server_name.to_str()) => Ok(()),
        _ => result,
    }
}

fn has_alternative_names(der: &[u8]) -> bool {
    // What cannot be read counts as present: then the strict answer stands.
    let Some(certificate) = certificate::parse(der) else { return true };
    match certificate.subject_alternative_name() {
        Ok(Some(names)) => names.value.general_names.iter().any(|name| {
            matches!(name, GeneralName::DNSName(_) | GeneralName::IPAddress(_) | GeneralName::Invalid(..))
        }),
        Ok(None) => false,
        Err(_) => true,
    }
}

/// Without regard to case; `*` stands for the whole first label, as in RFC 6125, and never for an address.
fn name_matches(pattern: &str, host: &str) -> bool {
    if pattern.eq_ignore_ascii_case(host) {
        return true;
    }
    let Some(domain) = pattern.strip_prefix("*.") else { return false };
    if !domain.contains('.') || host.parse::<std::net::IpAddr>().is_ok() {
        return false;
    }
    host.split_once('.').is_some_and(|(label, rest)| !label.is_empty() && rest.eq_ignore_ascii_case(domain))
}

#[cfg(test)]
mod tests {
    use super::name_matches;

    #[test]
    fn common_names_match_like_openssl() {
        assert!(name_matches("db.example.com", "DB.example.com"));
        assert!(name_matches("*.example.com", "db.example.com"));
        assert!(name_matches("192.0.2.1", "192.0.2.1"));
        assert!(!name_matches("*.example.com", "example.com"));
        assert!(!name_matches("*.example.com", "a.b.example.com"));
        assert!(!name_matches("*.com", "example.com"));
        assert!(!name_matches("*.0.2.1", "192.0.2.1"));
        assert!(!name_matches("*", "db"));
    }
}
