// SPDX-License-Identifier: Apache-2.0
//! OpenSSL's and libtls' words for protocols, ciphers and curves, mapped onto what rustls has.

use std::fmt::Write as _;
use std::sync::{Arc, LazyLock};

use rustls::crypto::{CryptoProvider, SupportedKxGroup, ring};
use rustls::version::{TLS12, TLS13};
use rustls::{
    CipherSuite, CipherSuiteCommon, CommonState, NamedGroup, ProtocolVersion, SupportedCipherSuite,
    SupportedProtocolVersion, Tls12CipherSuite,
};

use crate::error::TlsError;

/// The keys of one side, for messages.
pub(crate) struct Keys {
    pub protocols: &'static str,
    pub ciphers: &'static str,
    pub tls13_ciphers: &'static str,
    pub ecdhcurve: &'static str,
}

/// The values of one side.
pub(crate) struct Wanted<'a> {
    pub protocols: &'a str,
    pub ciphers: &'a str,
    pub tls13_ciphers: &'a str,
    pub ecdhcurve: &'a str,
}

/// What is left of the wishes.
pub(crate) struct Chosen {
    pub provider: Arc<CryptoProvider>,
    pub versions: Vec<&'static SupportedProtocolVersion>,
    pub warnings: Vec<String>,
}

pub(crate) fn choose(keys: &Keys, wanted: &Wanted<'_>) -> Result<Chosen, TlsError> {
    let mut warnings = Vec::new();
    let versions = protocols(keys.protocols, wanted.protocols, &mut warnings)?;
    let mut cipher_suites = Vec::new();
    if versions.contains(&&TLS13) {
        cipher_suites.extend(tls13_ciphers(keys.tls13_ciphers, wanted.tls13_ciphers, &mut warnings)?);
    }
    if versions.contains(&&TLS12) {
        cipher_suites.extend(tls12_ciphers(keys.ciphers, wanted.ciphers, &mut warnings)?);
    }
    let kx_groups = curves(keys.ecdhcurve, wanted.ecdhcurve, &mut warnings)?;
    let provider = Arc::new(CryptoProvider { cipher_suites, kx_groups, ..ring::default_provider() });
    Ok(Chosen { provider, versions, warnings })
}

fn tokens(list: &str) -> impl Iterator<Item = &str> {
    list.split([':', ',', ' ']).map(str::trim).filter(|token| !token.is_empty())
}

fn is_default(value: &str) -> bool {
    // PgBouncer's shortcuts; all of them mean what the library thinks best.
    value.trim().is_empty()
        || ["default", "secure", "fast", "normal", "all", "compat", "legacy", "insecure"]
            .iter()
            .any(|name| value.trim().eq_ignore_ascii_case(name))
}

/// libtls' protocol list: names, `!name` to take away, `secure` (1.2 and 1.3), `all` or `legacy`.
fn protocols(
    key: &'static str,
    value: &str,
    warnings: &mut Vec<String>,
) -> Result<Vec<&'static SupportedProtocolVersion>, TlsError> {
    let (mut old, mut tls12, mut tls13) = (false, false, false);
    let mut first = true;
    for token in tokens(value) {
        let (on, name) = match token.strip_prefix('!') {
            Some(name) => (false, name),
            None => (true, token),
        };
        // A list that begins by taking away begins with everything, as in libtls.
        if first && !on {
            (tls12, tls13) = (true, true);
        }
        first = false;
        match name.to_ascii_lowercase().as_str() {
            "all" | "legacy" | "tlsv1" => (old, tls12, tls13) = (on, on, on),
            "secure" | "default" => (tls12, tls13) = (on, on),
            "tlsv1.0" | "tlsv1.1" => old = on,
            "tlsv1.2" => tls12 = on,
            "tlsv1.3" => tls13 = on,
            _ => {
                let problem = format!("unknown protocol \"{name}\"; known: secure, all, tlsv1.2, tlsv1.3");
                return Err(TlsError::Value { key, value: value.into(), problem });
            }
        }
    }
    if value.trim().is_empty() {
        (tls12, tls13) = (true, true);
    }
    if old {
        warnings.push(format!("{key} = {value}: TLS 1.0 and 1.1 are not supported and stay off"));
    }
    let versions: Vec<_> =
        [(tls13, &TLS13), (tls12, &TLS12)].into_iter().filter(|v| v.0).map(|v| v.1).collect();
    if versions.is_empty() {
        let problem = "no protocol is left; use secure, tlsv1.2 or tlsv1.3".into();
        return Err(TlsError::Value { key, value: value.into(), problem });
    }
    Ok(versions)
}

fn all_suites(version: &'static SupportedProtocolVersion) -> Vec<SupportedCipherSuite> {
    let all = ring::ALL_CIPHER_SUITES.iter().map(|&suite| match suite {
        SupportedCipherSuite::Tls12(suite) => SupportedCipherSuite::Tls12(unlimited(suite)),
        suite => suite,
    });
    all.filter(|suite| suite.version() == version).collect()
}

/// The suite without a limit of records. TLS 1.3 changes its keys when a limit comes near; TLS 1.2 cannot, and rustls then drops what is
/// written as if it had been sent. A session of pooled connections comes to 2^24 records in hours, and OpenSSL knows no such limit.
fn unlimited(suite: &'static Tls12CipherSuite) -> &'static Tls12CipherSuite {
    static UNLIMITED: LazyLock<Vec<Tls12CipherSuite>> = LazyLock::new(|| {
        let tls12 = ring::ALL_CIPHER_SUITES.iter().filter_map(|suite| match suite {
            SupportedCipherSuite::Tls12(suite) => Some(suite),
            _ => None,
        });
        let unlimited = tls12.map(|suite| Tls12CipherSuite {
            common: CipherSuiteCommon { confidentiality_limit: u64::MAX, ..suite.common },
            ..**suite
        });
        unlimited.collect()
    });
    UNLIMITED.iter().find(|copy| copy.common.suite == suite.common.suite).unwrap_or(suite)
}

fn tls13_ciphers(
    key: &'static str,
    value: &str,
    warnings: &mut Vec<String>,
) -> Result<Vec<SupportedCipherSuite>, TlsError> {
    let all = all_suites(&TLS13);
    if is_default(value) {
        return Ok(all);
    }
    let mut chosen = Vec::new();
    for token in tokens(value) {
        match all.iter().find(|suite| openssl_name(suite.suite()).eq_ignore_ascii_case(token)) {
            Some(suite) if !chosen.contains(suite) => chosen.push(*suite),
            Some(_) => {}
            None => warnings.push(format!("{key}: \"{token}\" is not available and left out")),
        }
    }
    some_suite(key, value, chosen, &all)
}

fn some_suite(
    key: &'static str,
    value: &str,
    chosen: Vec<SupportedCipherSuite>,
    all: &[SupportedCipherSuite],
) -> Result<Vec<SupportedCipherSuite>, TlsError> {
    if chosen.is_empty() {
        let mut problem = String::from("no cipher is left; available are");
        for suite in all {
            let _ = write!(problem, " {}", openssl_name(suite.suite()));
        }
        return Err(TlsError::Value { key, value: value.into(), problem });
    }
    Ok(chosen)
}

/// OpenSSL's cipher list (`man openssl-ciphers`) evaluated over the six suites that exist here.
fn tls12_ciphers(
    key: &'static str,
    value: &str,
    warnings: &mut Vec<String>,
) -> Result<Vec<SupportedCipherSuite>, TlsError> {
    let all = all_suites(&TLS12);
    if is_default(value) {
        return Ok(all);
    }
    let mut chosen: Vec<SupportedCipherSuite> = Vec::new();
    let mut killed: Vec<SupportedCipherSuite> = Vec::new();
    for token in tokens(value) {
        // @STRENGTH, @SECLEVEL=n, alone or behind a name: every suite here has at least 128 bits.
        let token = token.split('@').next().unwrap_or_default();
        if token.is_empty() {
            continue;
        }
        let (operator, name) = match token.as_bytes()[0] {
            operator @ (b'!' | b'-' | b'+') => (operator, &token[1..]),
            _ => (b' ', token),
        };
        let mut matching = all.clone();
        for alias in name.split('+') {
            match suites_of_alias(alias, &all) {
                Some(suites) => matching.retain(|suite| suites.contains(suite)),
                None => {
                    matching.clear();
                    if operator == b' ' {
                        warnings.push(format!("{key}: \"{token}\" is not available and left out"));
                    }
                    break;
                }
            }
        }
        match operator {
            b' ' => {
                for suite in matching {
                    if !chosen.contains(&suite) && !killed.contains(&suite) {
                        chosen.push(suite);
                    }
                }
            }
            b'+' => {
                let (back, front) = chosen.iter().partition::<Vec<_>, _>(|suite| matching.contains(suite));
                chosen = [front, back].concat();
            }
            operator => {
                chosen.retain(|suite| !matching.contains(suite));
                if operator == b'!' {
                    killed.extend(matching);
                }
            }
        }
    }
    some_suite(key, value, chosen, &all)
}

/// OpenSSL's aliases that match none of our suites, so that they are no reason to warn.
const EMPTY_ALIASES: &str = " MEDIUM LOW EXP EXPORT EXPORT40 EXPORT56 aNULL eNULL NULL ADH AECDH DH DHE EDH kDHE \
    kEDH kDH kDHr kDHd kRSA RSA aDSS DSS aDH PSK kPSK kRSAPSK kDHEPSK kECDHEPSK aPSK SRP kSRP aSRP MD5 SHA SHA1 \
    SHA256 SHA384 3DES DES RC4 RC2 IDEA SEED CAMELLIA CAMELLIA128 CAMELLIA256 ARIA ARIA128 ARIA256 ARIAGCM \
    AESCCM AESCCM8 GOST GOST89MAC GOST94 kGOST aGOST aGOST01 TLSv1 TLSv1.0 SSLv3 SSLv2 COMPLEMENTOFALL \
    COMPLEMENTOFDEFAULT CBC kECDHr kECDHe aECDH ";

/// `None` for a word that is neither an alias nor one of our suites.
fn suites_of_alias(alias: &str, all: &[SupportedCipherSuite]) -> Option<Vec<SupportedCipherSuite>> {
    let part = match alias {
        "ALL" | "DEFAULT" | "HIGH" | "TLSv1.2" | "AEAD" => "",
        "ECDH" | "ECDHE" | "EECDH" | "kECDHE" | "kEECDH" => "ECDHE-",
        "aRSA" => "-RSA-",
        "ECDSA" | "aECDSA" => "-ECDSA-",
        "AES" | "AESGCM" | "FIPS" => "-AES",
        "AES128" => "-AES128-",
        "AES256" => "-AES256-",
        "CHACHA20" => "-CHACHA20-",
        _ => {
            let named: Vec<_> =
                all.iter().copied().filter(|suite| openssl_name(suite.suite()) == alias).collect();
            let known = !named.is_empty() || EMPTY_ALIASES.split_ascii_whitespace().any(|name| name == alias);
            return known.then_some(named);
        }
    };
    Some(all.iter().copied().filter(|suite| openssl_name(suite.suite()).contains(part)).collect())
}

/// `auto`, or OpenSSL's and NIST's names of curves in the order of preference.
fn curves(
    key: &'static str,
    value: &str,
    warnings: &mut Vec<String>,
) -> Result<Vec<&'static dyn SupportedKxGroup>, TlsError> {
    let all = ring::ALL_KX_GROUPS;
    if is_default(value) || value.trim().eq_ignore_ascii_case("auto") {
        return Ok(all.to_vec());
    }
    let mut chosen: Vec<&'static dyn SupportedKxGroup> = Vec::new();
    for token in tokens(value) {
        let group = match token.to_ascii_lowercase().as_str() {
            "x25519" => Some(NamedGroup::X25519),
            "prime256v1" | "secp256r1" | "p-256" => Some(NamedGroup::secp256r1),
            "secp384r1" | "p-384" => Some(NamedGroup::secp384r1),
            _ => None,
        };
        match all.iter().find(|candidate| Some(candidate.name()) == group) {
            Some(candidate) if chosen.iter().all(|other| other.name() != candidate.name()) => {
                chosen.push(*candidate);
            }
            Some(_) => {}
            None => warnings.push(format!("{key}: curve \"{token}\" is not available and left out")),
        }
    }
    if chosen.is_empty() {
        let problem = "no curve is left; available are auto, X25519, prime256v1, secp384r1".into();
        return Err(TlsError::Value { key, value: value.into(), problem });
    }
    Ok(chosen)
}

/// OpenSSL's name of a suite: `TLS_AES_128_GCM_SHA256`, `ECDHE-RSA-AES128-GCM-SHA256`.
fn openssl_name(suite: CipherSuite) -> String {
    let name = suite.as_str().unwrap_or("unknown");
    if let Some(name) = name.strip_prefix("TLS13_") {
        return format!("TLS_{name}");
    }
    let name = name.strip_prefix("TLS_").unwrap_or(name);
    // OpenSSL leaves out the hash of ChaCha20 and writes the key size beside the cipher.
    let name = name.replace("_WITH_", "_").replace("AES_", "AES").replace("POLY1305_SHA256", "POLY1305");
    name.replace('_', "-")
}

/// The TLS state of a connection as PgBouncer logs and shows it, `TLSv1.3/TLS_AES_256_GCM_SHA384`.
/// `None` before the handshake is done.
pub fn describe(connection: &CommonState) -> Option<String> {
    let version = match connection.protocol_version()? {
        ProtocolVersion::TLSv1_2 => "TLSv1.2",
        ProtocolVersion::TLSv1_3 => "TLSv1.3",
        _ => "TLS",
    };
    Some(format!("{version}/{}", openssl_name(connection.negotiated_cipher_suite()?.suite())))
}

#[cfg(test)]
mod tests;
