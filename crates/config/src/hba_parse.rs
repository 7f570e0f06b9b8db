// SPDX-License-Identifier: Apache-2.0
//! Reading `auth_hba_file`.
//!
//! A line that cannot be read is left out and reported. A pooler should not start with such a file: what is left out
//! may be a `reject`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::sync::Arc;

use crate::error::{Error, ErrorKind, Location, Warning};
use crate::files::{Files, read_text};
use crate::hba::{Hba, HbaAddress, HbaMethod, HbaNames, HbaRule, HbaType};
use crate::ident::IdentMaps;
use crate::tokens::{Cursor, Token, shown, tokens};
use crate::userlist::Parsed;

/// Depth of `@file` inside `@file`; PostgreSQL's limit for included files.
const MAX_NAME_FILES: u32 = 10;

impl Hba {
    /// Reads the file at `path`; `map=` must name a map of `ident`.
    pub fn load(files: &dyn Files, path: &Path, ident: &IdentMaps) -> Result<Parsed<Self>, Error> {
        let name: Arc<str> = path.to_string_lossy().into();
        let text = read_text(files, path, &name)?;
        Ok(Self::parse(files, path, &text, ident))
    }

    /// Reads the text of the file at `path`; `files` serves its `@file`s, relative to the directory of `path`.
    pub fn parse(files: &dyn Files, path: &Path, text: &str, ident: &IdentMaps) -> Parsed<Self> {
        let name: Arc<str> = path.to_string_lossy().into();
        let mut parsed = Parsed { value: Self::default(), errors: Vec::new(), warnings: Vec::new() };
        for (i, line) in text.lines().enumerate() {
            let at = Location::new(&name, i as u32 + 1);
            match rule(files, path, line, at.line, ident) {
                Ok(None) => {}
                Ok(Some(rule)) => {
                    if let Some(text) = doubt(&rule) {
                        parsed.warnings.push(Warning { at, text: text.into() });
                    }
                    parsed.value.rules.push(rule);
                }
                Err(kind) => parsed.errors.push(Error { at, kind }),
            }
        }
        parsed
    }
}

fn doubt(rule: &HbaRule) -> Option<&'static str> {
    if rule.address.is_mapped() {
        return Some(
            "an IPv4 address in IPv6 notation, which no client has, so the rule matches nobody; write a.b.c.d",
        );
    }
    if rule.address.is_void() {
        return Some("the address has bits outside its mask, so the rule matches nobody; clear them");
    }
    match (rule.rule_type, rule.method) {
        (HbaType::Local, HbaMethod::Cert) => Some("cert needs TLS, which unix sockets do not have; use peer"),
        (HbaType::Local, _) => None,
        (_, HbaMethod::Peer) => {
            Some("peer works on unix sockets only, so the rule refuses everybody; use cert")
        }
        (HbaType::HostNoSsl, HbaMethod::Cert) => {
            Some("cert needs TLS, which hostnossl excludes; use hostssl")
        }
        _ => None,
    }
}

fn fault(found: Option<Token>, expected: &'static str) -> ErrorKind {
    ErrorKind::Hba { found: shown(found), expected }
}

fn rule(
    files: &dyn Files,
    path: &Path,
    text: &str,
    line: u32,
    ident: &IdentMaps,
) -> Result<Option<HbaRule>, ErrorKind> {
    let unclosed = ErrorKind::Hba { found: "a quote".into(), expected: "a closing double quote" };
    let tokens = tokens(text).ok_or(unclosed)?;
    if tokens.is_empty() {
        return Ok(None);
    }
    let mut cursor = Cursor::new(tokens);
    let rule_type = match cursor.next() {
        Some(Token::Word(word)) if word == "local" => HbaType::Local,
        Some(Token::Word(word)) if word == "host" => HbaType::Host,
        Some(Token::Word(word)) if word == "hostssl" => HbaType::HostSsl,
        Some(Token::Word(word)) if word == "hostnossl" => HbaType::HostNoSsl,
        other => return Err(fault(other, "local, host, hostssl or hostnossl")),
    };
    let databases = names(files, path, &mut cursor, true)?;
    let users = names(files, path, &mut cursor, false)?;
    let address = if rule_type == HbaType::Local { HbaAddress::All } else { address(&mut cursor)? };
    let method = method(&mut cursor)?;
    let map = map(&mut cursor, ident)?;
    match cursor.next() {
        None => Ok(Some(HbaRule { line, rule_type, databases, users, address, method, map })),
        more => Err(fault(more, "end of line; of the options only map= is supported")),
    }
}

/// A list of names with keywords and `@file`s.
fn names(
    files: &dyn Files,
    path: &Path,
    cursor: &mut Cursor,
    databases: bool,
) -> Result<HbaNames, ErrorKind> {
    let mut names = HbaNames::default();
    add_names(files, path, cursor, databases, &mut names, 0)?;
    Ok(names)
}

fn add_names(
    files: &dyn Files,
    path: &Path,
    cursor: &mut Cursor,
    databases: bool,
    into: &mut HbaNames,
    depth: u32,
) -> Result<(), ErrorKind> {
    loop {
        match cursor.next() {
            Some(Token::Quoted(name)) => drop(into.names.insert(name)),
            Some(Token::Word(word)) => match word.as_str() {
                "all" => into.all = true,
                "sameuser" if databases => into.same_user = true,
                "replication" if databases => into.replication = true,
                "samerole" | "samegroup" if databases => {
                    return Err(fault(
                        Some(Token::Word(word)),
                        "names; roles are not supported, list the databases",
                    ));
                }
                _ if word.starts_with('+') => {
                    return Err(fault(
                        Some(Token::Word(word)),
                        "names; groups are not supported, list the users",
                    ));
                }
                _ => match word.strip_prefix('@') {
                    Some(file) => name_file(files, path, file, databases, into, depth)?,
                    None => drop(into.names.insert(word)),
                },
            },
            other => {
                let expected = if databases {
                    "a database, all, sameuser, replication or @file"
                } else {
                    "a user, all or @file"
                };
                return Err(fault(other, expected));
            }
        }
        if !cursor.eat_comma() {
            return Ok(());
        }
    }
}

/// `@file`: lists of names, one or more a line, relative to the file that names it.
fn name_file(
    files: &dyn Files,
    parent: &Path,
    file: &str,
    databases: bool,
    into: &mut HbaNames,
    depth: u32,
) -> Result<(), ErrorKind> {
    let expected = |text| fault(Some(Token::Word(format!("@{file}"))), text);
    if depth >= MAX_NAME_FILES {
        return Err(expected("at most 10 files inside each other; look for files that name each other"));
    }
    let path = parent.parent().map_or_else(|| file.into(), |dir| dir.join(file));
    let name: Arc<str> = path.to_string_lossy().into();
    let text = read_text(files, &path, &name)
        .map_err(|_| expected("a readable file, relative to the directory of the file that names it"))?;
    for line in text.lines() {
        let tokens = tokens(line).ok_or_else(|| expected("a file with closed quotes"))?;
        if tokens.is_empty() {
            continue;
        }
        let mut cursor = Cursor::new(tokens);
        // Names separated by spaces are names too, as in PostgreSQL; PgBouncer reads only the first of a line.
        while !cursor.is_empty() {
            add_names(files, &path, &mut cursor, databases, into, depth + 1)?;
        }
    }
    Ok(())
}

fn address(cursor: &mut Cursor) -> Result<HbaAddress, ErrorKind> {
    const EXPECTED: &str =
        "all, address/bits, or address and mask; host names, samehost and samenet are not supported";
    let word = match cursor.next() {
        Some(Token::Word(word)) if word == "all" => return Ok(HbaAddress::All),
        Some(Token::Word(word)) => word,
        other => return Err(fault(other, EXPECTED)),
    };
    let (text, bits) = word.split_once('/').map_or((word.as_str(), None), |(a, b)| (a, Some(b)));
    let base: IpAddr = text.parse().map_err(|_| fault(Some(Token::Word(word.clone())), EXPECTED))?;
    let mask = match bits {
        Some(bits) => prefix_mask(base, bits).ok_or_else(|| {
            fault(Some(Token::Word(word.clone())), "at most 32 bits for IPv4, 128 for IPv6")
        })?,
        None => match cursor.next() {
            Some(Token::Word(mask)) => match mask.parse::<IpAddr>() {
                Ok(parsed) if parsed.is_ipv4() == base.is_ipv4() => parsed,
                _ => {
                    return Err(fault(
                        Some(Token::Word(mask)),
                        "a mask of the address' family, or address/bits",
                    ));
                }
            },
            other => return Err(fault(other, "a mask, or address/bits")),
        },
    };
    Ok(HbaAddress::Net { base, mask })
}

fn prefix_mask(base: IpAddr, bits: &str) -> Option<IpAddr> {
    if !bits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let bits: u32 = bits.parse().ok()?;
    Some(match base {
        IpAddr::V4(_) if bits <= 32 => {
            Ipv4Addr::from_bits(u32::MAX.checked_shl(32 - bits).unwrap_or(0)).into()
        }
        IpAddr::V6(_) if bits <= 128 => {
            Ipv6Addr::from_bits(u128::MAX.checked_shl(128 - bits).unwrap_or(0)).into()
        }
        _ => return None,
    })
}

fn method(cursor: &mut Cursor) -> Result<HbaMethod, ErrorKind> {
    let token = cursor.next();
    let Some(Token::Word(word)) = &token else {
        return Err(fault(token, "an authentication method"));
    };
    Ok(match word.as_str() {
        "trust" => HbaMethod::Trust,
        "reject" => HbaMethod::Reject,
        "md5" => HbaMethod::Md5,
        "password" => HbaMethod::Plain,
        "scram-sha-256" => HbaMethod::ScramSha256,
        "cert" => HbaMethod::Cert,
        "peer" => HbaMethod::Peer,
        "ldap" | "pam" => {
            let next = "use scram-sha-256 (with auth_file or auth_query) or cert in this rule";
            return Err(ErrorKind::Unsupported { what: format!("hba method {word}"), next });
        }
        _ => return Err(fault(token, "trust, reject, md5, scram-sha-256, password, cert or peer")),
    })
}

fn map(cursor: &mut Cursor, ident: &IdentMaps) -> Result<Option<String>, ErrorKind> {
    let token = cursor.next();
    let Some(Token::Word(word)) = &token else {
        return if token.is_none() { Ok(None) } else { Err(fault(token, "map=name or end of line")) };
    };
    let Some(name) = word.strip_prefix("map=") else {
        return Err(fault(token, "map=name or end of line; other options are not supported"));
    };
    if ident.get(name).is_none() {
        return Err(fault(token, "a map of auth_ident_file"));
    }
    Ok(Some(name.to_owned()))
}
