// SPDX-License-Identifier: Apache-2.0
//! HBA files: which rule a client gets, and which lines are refused.

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use underpass_config::{Hba, HbaClient, HbaMethod, IdentMaps, MemFiles, Parsed};

fn parse_with(files: &MemFiles, text: &str) -> Parsed<Hba> {
    let ident = IdentMaps::parse(&Arc::from("ident"), "web www app\n").value;
    Hba::parse(files, Path::new("/etc/hba.conf"), text, &ident)
}

fn parse(text: &str) -> Hba {
    let parsed = parse_with(&MemFiles::default(), text);
    assert_eq!(parsed.errors, []);
    parsed.value
}

/// `"db user unix|address [tls] [replication]"` to the line of the rule that decides, 0 for none.
fn decides(hba: &Hba, client: &str) -> u32 {
    let words: Vec<&str> = client.split(' ').collect();
    let client = HbaClient {
        database: words[0],
        user: words[1],
        address: words[2].parse::<IpAddr>().ok(),
        tls: words[3..].contains(&"tls"),
        physical_replication: words[3..].contains(&"replication"),
    };
    hba.find(&client).map_or(0, |rule| rule.line)
}

#[test]
fn the_first_matching_rule_decides() {
    let hba = parse(
        "# type db user address method
local     peerdb  all                              peer
local     all     \"odd user\"                     trust   # comment
hostssl   all     all       10.0.0.0/8             cert map=web
hostnossl all     all       10.0.0.0/8             reject
host      a,\"b \"\"c\", d  u1 , u2  192.168.1.0 255.255.255.0 md5
host      sameuser all      172.16.0.0/12          scram-sha-256
host      replication rep   all                    password
host      all     v6        2001:db8::/32          md5
host      all     one       203.0.113.9/32         trust
host      \"all\" \"all\"   198.51.100.0/24        trust
",
    );
    for (client, line) in [
        ("peerdb x unix", 2),
        ("x odd unix", 0),
        ("x u 10.1.2.3 tls", 4),
        ("x u 10.1.2.3", 5),
        ("x u 11.1.2.3", 0),
        ("a u1 192.168.1.255", 6),
        ("d u2 192.168.1.1 tls", 6),
        ("a u3 192.168.1.1", 0),
        ("a u1 192.168.2.1", 0),
        ("bob bob 172.31.0.1", 7),
        ("bob eve 172.31.0.1", 0),
        ("x rep 9.9.9.9 replication", 8),
        ("replication rep 9.9.9.9", 0),
        ("x u 10.1.2.3 tls replication", 0),
        ("x v6 2001:db8:1::1", 9),
        ("x v6 2001:db9::1", 0),
        ("x one 203.0.113.9", 10),
        ("x one 203.0.113.8", 0),
        ("x one ::ffff:203.0.113.9", 10),
        ("all all 198.51.100.1", 11),
        ("x y 198.51.100.1", 0),
        ("peerdb x 127.0.0.1", 0),
    ] {
        assert_eq!(decides(&hba, client), line, "{client}");
    }
    assert_eq!(hba.rules[2].map.as_deref(), Some("web"));
    assert_eq!(hba.rules[2].method, HbaMethod::Cert);
    let odd =
        HbaClient { database: "d", user: "odd user", address: None, tls: false, physical_replication: false };
    assert_eq!(hba.find(&odd).map(|r| r.line), Some(3));
    let quoted = HbaClient {
        database: "b \"c",
        user: "u1",
        address: Some([192, 168, 1, 7].into()),
        tls: false,
        physical_replication: false,
    };
    assert_eq!(hba.find(&quoted).map(|r| r.line), Some(6));
}

#[test]
fn masks_of_every_length() {
    for bits in 0..=32u32 {
        let base = u32::MAX.checked_shl(32 - bits).unwrap_or(0);
        let hba = parse(&format!("host all all {}/{bits} trust\n", std::net::Ipv4Addr::from_bits(base)));
        let inside = std::net::Ipv4Addr::from_bits(u32::MAX);
        assert_eq!(decides(&hba, &format!("d u {inside}")), 1, "{bits}");
        if bits > 0 {
            let outside = std::net::Ipv4Addr::from_bits(base ^ (1 << (32 - bits)));
            assert_eq!(decides(&hba, &format!("d u {outside}")), 0, "{bits}");
        }
        assert_eq!(decides(&hba, "d u ffff::1"), 0, "the family counts");
    }
    let hba = parse("host all all ::/0 trust\n");
    assert_eq!((decides(&hba, "d u ffff::1"), decides(&hba, "d u 1.2.3.4")), (1, 0));
}

#[test]
fn refused_lines_say_what_was_expected() {
    for (line, expected) in [
        ("hostgssenc all all all trust", "local, host, hostssl or hostnossl"),
        ("host samerole all all trust", "roles are not supported"),
        ("host all +staff all trust", "groups are not supported"),
        ("host all all samenet trust", "samenet are not supported"),
        ("host all all db.example.com trust", "host names"),
        ("host all all 10.0.0.0/33 trust", "at most 32 bits"),
        ("host all all 10.0.0.0/ trust", "at most 32 bits"),
        ("host all all 10.0.0.0/+8 trust", "at most 32 bits"),
        ("host all all ::/129 trust", "at most 32 bits"),
        ("host all all 10.0.0.0 trust", "a mask of the address' family"),
        ("host all all 10.0.0.0 ffff:: trust", "a mask of the address' family"),
        ("host all all 10.0.0.0", "a mask, or address/bits"),
        ("host all all all ldap ldapserver=x", "hba method ldap is not supported by Underpass; use scram"),
        ("host all all all pam", "hba method pam is not supported by Underpass; use scram"),
        ("host all all all gss", "trust, reject, md5"),
        ("host all all all", "an authentication method"),
        ("host all all all cert map=none", "a map of auth_ident_file"),
        ("host all all all cert clientcert=1", "map=name or end of line"),
        ("host all all all md5 map=web x", "end of line"),
        ("host all", "a user, all or @file"),
        ("host all, all all trust", "all, address/bits"),
        ("host \"all all", "a closing double quote"),
        ("host @gone all all trust", "a readable file"),
    ] {
        let parsed = parse_with(&MemFiles::default(), &format!("\n{line}\nlocal all all trust\n"));
        assert_eq!(parsed.errors.len(), 1, "{line}");
        let error = parsed.errors[0].to_string();
        assert!(error.starts_with("/etc/hba.conf:2: ") && error.contains(expected), "{line}: {error}");
        assert_eq!(parsed.value.rules.len(), 1, "the other lines are read");
    }
}

#[test]
fn doubtful_rules_warn() {
    for (line, expected) in [
        ("host all all 10.0.0.1/8 reject", "matches nobody"),
        ("host all all ::ffff:10.0.0.1/128 reject", "IPv6 notation"),
        ("host all all all peer", "unix sockets only"),
        ("local all all cert", "needs TLS"),
        ("hostnossl all all all cert", "hostnossl excludes"),
    ] {
        let parsed = parse_with(&MemFiles::default(), line);
        assert!(parsed.warnings[0].text.contains(expected), "{line}: {:?}", parsed.warnings);
    }
    assert_eq!(decides(&parse("host all all 10.0.0.1/8 trust"), "d u 10.0.0.1"), 0, "as in PgBouncer");
}

#[test]
fn names_from_files() {
    let files = MemFiles::new([
        ("/etc/dbs", "a, b # two\n\n\"c d\"\n@more/dbs\n"),
        ("/etc/more/dbs", "e\n@deep\n"),
        ("/etc/more/deep", "f g\n"),
        ("/abs", "u\n"),
        ("/etc/loop", "@loop\n"),
    ]);
    let parsed = parse_with(&files, "host @dbs,x @/abs all trust\n");
    assert_eq!(parsed.errors, []);
    let names: Vec<_> = parsed.value.rules[0].databases.names.iter().map(String::as_str).collect();
    assert_eq!(names, ["a", "b", "c d", "e", "f", "g", "x"]);
    assert!(parsed.value.rules[0].users.names.contains("u"));
    let looped = parse_with(&files, "host @loop all all trust\n");
    assert!(looped.errors[0].to_string().contains("at most 10 files"), "{:?}", looped.errors);
}
