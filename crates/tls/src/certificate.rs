// SPDX-License-Identifier: Apache-2.0
//! What authentication wants to know of a certificate.

use sha2::{Digest, Sha224, Sha256, Sha384, Sha512};
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;
use x509_parser::signature_algorithm::SignatureAlgorithm;

pub(crate) fn parse(der: &[u8]) -> Option<X509Certificate<'_>> {
    X509Certificate::from_der(der).ok().map(|(_, certificate)| certificate)
}

/// The channel binding data tls-server-end-point (RFC 5929 section 4.1): the certificate hashed with the
/// hash of its signature algorithm, SHA-256 in place of MD5 and SHA-1.
///
/// `None` if there is no such hash (Ed25519, Ed448) or the certificate is malformed; then channel binding is
/// impossible, in PostgreSQL too.
pub fn server_end_point_hash(cert_der: &[u8]) -> Option<Vec<u8>> {
    let certificate = parse(cert_der)?;
    let oid = match SignatureAlgorithm::try_from(&certificate.signature_algorithm) {
        Ok(SignatureAlgorithm::RSASSA_PSS(parameters)) => parameters.hash_algorithm_oid().to_id_string(),
        _ => certificate.signature_algorithm.algorithm.to_id_string(),
    };
    match oid.as_str() {
        // Hashes themselves (RSASSA-PSS), PKCS #1 signatures, ECDSA, DSA: MD5 and SHA-1 count as SHA-256.
        "1.2.840.113549.2.5" | "1.3.14.3.2.26" | "2.16.840.1.101.3.4.2.1" => Some(hash::<Sha256>(cert_der)),
        "1.2.840.113549.1.1.4" | "1.2.840.113549.1.1.5" | "1.2.840.113549.1.1.11" => {
            Some(hash::<Sha256>(cert_der))
        }
        "1.2.840.10045.4.1" | "1.2.840.10045.4.3.2" => Some(hash::<Sha256>(cert_der)),
        "1.2.840.10040.4.3" | "2.16.840.1.101.3.4.3.2" => Some(hash::<Sha256>(cert_der)),
        "2.16.840.1.101.3.4.2.4"
        | "1.2.840.113549.1.1.14"
        | "1.2.840.10045.4.3.1"
        | "2.16.840.1.101.3.4.3.1" => Some(hash::<Sha224>(cert_der)),
        "2.16.840.1.101.3.4.2.2" | "1.2.840.113549.1.1.12" | "1.2.840.10045.4.3.3" => {
            Some(hash::<Sha384>(cert_der))
        }
        "2.16.840.1.101.3.4.2.3" | "1.2.840.113549.1.1.13" | "1.2.840.10045.4.3.4" => {
            Some(hash::<Sha512>(cert_der))
        }
        _ => None,
    }
}

fn hash<D: Digest>(data: &[u8]) -> Vec<u8> {
    D::digest(data).to_vec()
}

/// The common name of the certificate's subject, for method cert. With several, the last one, as libpq and
/// PostgreSQL take it. `None` without one, with one that is not text, or that holds a NUL byte: a name cut
/// at a NUL could pass for another.
pub fn common_name(cert_der: &[u8]) -> Option<String> {
    let certificate = parse(cert_der)?;
    let name = certificate.subject().iter_common_name().last()?.as_str().ok()?;
    (!name.is_empty() && !name.contains('\0')).then(|| name.to_owned())
}
