// SPDX-License-Identifier: Apache-2.0

use super::*;
use proptest::prelude::*;

fn names(suites: &[SupportedCipherSuite]) -> Vec<String> {
    suites.iter().map(|suite| openssl_name(suite.suite())).collect()
}

fn tls12(value: &str) -> (Vec<String>, usize) {
    let mut warnings = Vec::new();
    let suites = tls12_ciphers("client_tls_ciphers", value, &mut warnings).unwrap();
    (names(&suites), warnings.len())
}

fn versions(value: &str) -> Result<(usize, usize), String> {
    let mut warnings = Vec::new();
    let versions = protocols("client_tls_protocols", value, &mut warnings).map_err(|e| e.to_string())?;
    Ok((versions.len(), warnings.len()))
}

#[test]
fn names_are_those_of_openssl() {
    assert_eq!(
        names(ring::ALL_CIPHER_SUITES),
        [
            "TLS_AES_256_GCM_SHA384",
            "TLS_AES_128_GCM_SHA256",
            "TLS_CHACHA20_POLY1305_SHA256",
            "ECDHE-ECDSA-AES256-GCM-SHA384",
            "ECDHE-ECDSA-AES128-GCM-SHA256",
            "ECDHE-ECDSA-CHACHA20-POLY1305",
            "ECDHE-RSA-AES256-GCM-SHA384",
            "ECDHE-RSA-AES128-GCM-SHA256",
            "ECDHE-RSA-CHACHA20-POLY1305",
        ]
    );
}

#[test]
fn protocol_lists() {
    for value in
        ["secure", "default", "", "tlsv1.2,tlsv1.3", "tlsv1.2:TLSv1.3", "!tlsv1.0", "secure,!tlsv1.1"]
    {
        assert_eq!(versions(value), Ok((2, 0)), "{value}");
    }
    for value in ["all", "legacy", "tlsv1", "tlsv1.1,tlsv1.2,tlsv1.3"] {
        assert_eq!(versions(value), Ok((2, 1)), "{value}");
    }
    for value in ["tlsv1.3", "tlsv1.2", "secure,!tlsv1.2", "!tlsv1.3"] {
        assert_eq!(versions(value), Ok((1, 0)), "{value}");
    }
    assert_eq!(versions("tlsv1.0,tlsv1.2"), Ok((1, 1)));
    assert!(versions("tlsv1.0").unwrap_err().contains("no protocol is left"));
    assert!(versions("sslv3").unwrap_err().contains("\"sslv3\""));
    assert!(versions("secure,!all").unwrap_err().contains("client_tls_protocols = secure,!all"));
}

#[test]
fn cipher_lists_follow_openssl() {
    for value in [
        "default",
        "secure",
        "all",
        "HIGH:MEDIUM:+3DES:!aNULL",
        "DEFAULT@SECLEVEL=1",
        "ALL",
        "HIGH:!aNULL:!MD5",
    ] {
        let (names, warnings) = tls12(value);
        assert_eq!((names.len(), warnings), (6, 0), "{value}");
    }
    assert_eq!(tls12("ECDHE-RSA-AES128-GCM-SHA256"), (vec!["ECDHE-RSA-AES128-GCM-SHA256".into()], 0));
    assert_eq!(tls12("ECDHE+AES256:!aECDSA"), (vec!["ECDHE-RSA-AES256-GCM-SHA384".into()], 0));
    assert_eq!(tls12("CHACHA20:AES128+aRSA:-CHACHA20"), (vec!["ECDHE-RSA-AES128-GCM-SHA256".into()], 0));
    // A killed suite never comes back; a moved one goes to the end.
    assert_eq!(tls12("HIGH:!AES:HIGH").0.len(), 2);
    assert!(tls12("HIGH:+CHACHA20").0[5].contains("CHACHA20"));
    assert_eq!(tls12("AES256-SHA:HIGH").1, 1);
    let error = tls12_ciphers("client_tls_ciphers", "AES256-SHA", &mut Vec::new()).unwrap_err().to_string();
    assert!(
        error.contains("client_tls_ciphers = AES256-SHA") && error.contains("ECDHE-RSA-AES256"),
        "{error}"
    );
}

#[test]
fn tls12_sessions_have_no_last_record() {
    let suites = all_suites(&TLS12);
    assert_eq!(suites.len(), 6);
    for suite in suites {
        let SupportedCipherSuite::Tls12(suite) = suite else { panic!("of another version") };
        assert_eq!(suite.common.confidentiality_limit, u64::MAX, "{:?}", suite.common.suite);
    }
}

#[test]
fn tls13_cipher_lists() {
    let mut warnings = Vec::new();
    let list = "TLS_CHACHA20_POLY1305_SHA256:TLS_AES_128_CCM_SHA256:TLS_AES_128_GCM_SHA256";
    let suites = tls13_ciphers("client_tls13_ciphers", list, &mut warnings).unwrap();
    assert_eq!(names(&suites), ["TLS_CHACHA20_POLY1305_SHA256", "TLS_AES_128_GCM_SHA256"]);
    assert_eq!(warnings.len(), 1);
    assert!(tls13_ciphers("client_tls13_ciphers", "TLS_AES_128_CCM_SHA256", &mut warnings).is_err());
}

#[test]
fn curve_lists() {
    let mut warnings = Vec::new();
    assert_eq!(curves("client_tls_ecdhcurve", "auto", &mut warnings).unwrap().len(), 3);
    let groups =
        curves("client_tls_ecdhcurve", "secp384r1:prime256v1:P-256:secp521r1", &mut warnings).unwrap();
    assert_eq!(
        groups.iter().map(|g| g.name()).collect::<Vec<_>>(),
        [NamedGroup::secp384r1, NamedGroup::secp256r1]
    );
    assert_eq!(warnings.len(), 1);
    assert!(curves("client_tls_ecdhcurve", "brainpoolP256r1", &mut warnings).is_err());
}

proptest! {
    #[test]
    fn any_text_is_an_answer(text in "[ -~é]{0,60}") {
        let wanted = Wanted { protocols: "secure", ciphers: &text, tls13_ciphers: &text, ecdhcurve: &text };
        let keys = Keys { protocols: "p", ciphers: "c", tls13_ciphers: "t", ecdhcurve: "e" };
        let _ = choose(&keys, &wanted);
        let _ = choose(&keys, &Wanted { protocols: &text, ciphers: "", tls13_ciphers: "", ecdhcurve: "" });
    }

    #[test]
    fn whatever_is_left_of_a_cipher_list_exists_once(
        words in proptest::collection::vec("[!+-]?(HIGH|AES|AES128|CHACHA20|aRSA|ECDHE|ALL|RC4)(\\+aECDSA)?", 1..8)
    ) {
        if let Ok(suites) = tls12_ciphers("c", &words.join(":"), &mut Vec::new()) {
            let mut names = names(&suites);
            names.sort();
            names.dedup();
            prop_assert_eq!(names.len(), suites.len());
        }
    }
}
