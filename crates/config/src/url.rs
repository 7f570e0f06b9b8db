// SPDX-License-Identifier: Apache-2.0
//! A server named the way libpq names it: `postgres://user:pw@host:port/db?sslmode=require`, or `host=... user=...`
//! (PostgreSQL manual, "Connection Strings").

use crate::connstr::nowhere;
use crate::database::Database;
use crate::error::ErrorKind;
use crate::host::HostList;
use crate::secret::Secret;
use crate::words::SslMode;

/// What a libpq connection string says about a server.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Upstream {
    /// Hosts, `None`: the default unix socket.
    pub host: Option<HostList>,
    /// Port, `None`: 5432. With several hosts one port serves all.
    pub port: Option<u16>,
    /// User to log in as.
    pub user: Option<String>,
    /// Its password.
    pub password: Option<Secret>,
    /// Database.
    pub dbname: Option<String>,
    /// `sslmode`.
    pub sslmode: Option<SslMode>,
    /// `application_name`.
    pub application_name: Option<String>,
    /// `client_encoding`.
    pub client_encoding: Option<String>,
}

fn fault(found: &str, expected: &'static str) -> ErrorKind {
    ErrorKind::Url { found: found.to_owned(), expected }
}

impl Upstream {
    /// Reads a URL (`postgres://` or `postgresql://`) or a keyword string.
    pub fn parse(text: &str) -> Result<Self, ErrorKind> {
        match text.strip_prefix("postgres://").or_else(|| text.strip_prefix("postgresql://")) {
            Some(rest) => Self::from_url(rest),
            None => Self::from_keywords(text),
        }
    }

    fn from_url(text: &str) -> Result<Self, ErrorKind> {
        let mut upstream = Self::default();
        let (text, query) = text.split_once('?').map_or((text, None), |(t, q)| (t, Some(q)));
        let (authority, dbname) = text.split_once('/').map_or((text, ""), |(a, d)| (a, d));
        // A password may hold an unescaped '@'; a host cannot.
        let (userinfo, hosts) = authority.rsplit_once('@').map_or((None, authority), |(u, h)| (Some(u), h));
        if let Some(userinfo) = userinfo {
            let (user, password) = userinfo.split_once(':').map_or((userinfo, None), |(u, p)| (u, Some(p)));
            upstream.set("user", decode("user", user)?)?;
            if let Some(password) = password {
                upstream.set("password", decode("password", password)?)?;
            }
        }
        upstream.set_hosts(hosts)?;
        upstream.set("dbname", decode("dbname", dbname)?)?;
        for pair in query.into_iter().flat_map(|q| q.split('&')).filter(|p| !p.is_empty()) {
            let (key, value) = pair.split_once('=').ok_or_else(|| fault(pair, "key=value after '?'"))?;
            upstream.set(&decode("a key", key)?, decode(key, value)?)?;
        }
        Ok(upstream)
    }

    /// `host:port,host:port` of a URL.
    fn set_hosts(&mut self, text: &str) -> Result<(), ErrorKind> {
        let mut hosts = Vec::new();
        for entry in text.split(',') {
            let (host, port) = if let Some(v6) = entry.strip_prefix('[') {
                let (host, after) =
                    v6.split_once(']').ok_or_else(|| fault("host", "']' after an IPv6 address"))?;
                match after.strip_prefix(':') {
                    None if !after.is_empty() => return Err(fault("host", "':' and a port after ']'")),
                    port => (host, port),
                }
            } else {
                entry.split_once(':').map_or((entry, None), |(h, p)| (h, Some(p)))
            };
            hosts.push(decode("host", host)?);
            if let Some(port) = port.filter(|p| !p.is_empty()) {
                let before = self.port;
                self.set("port", port.to_owned())?;
                if before.is_some() && before != self.port {
                    return Err(fault("port", "the same port for all hosts"));
                }
            }
        }
        // "postgres:///db" has one host, the empty one: the default unix socket.
        if hosts.len() > 1 || hosts.iter().any(|h| !h.is_empty()) {
            self.set("host", hosts.join(","))
        } else {
            Ok(())
        }
    }

    /// `key = value` pairs; backslash escapes, quotes in `'...'`, spaces around `=`.
    fn from_keywords(text: &str) -> Result<Self, ErrorKind> {
        let mut upstream = Self::default();
        let mut rest = text.trim_start();
        while !rest.is_empty() {
            let end = rest.find(|c: char| c == '=' || c.is_whitespace()).unwrap_or(rest.len());
            let (key, after) = rest.split_at(end);
            let after = after.trim_start().strip_prefix('=').ok_or_else(|| {
                // What stands without '=' may be a password with a space in it, so it is not shown.
                fault("a word without '='", "key=value pairs, or postgres://user:password@host:port/dbname")
            })?;
            let (value, after) = keyword_value(after.trim_start())
                .ok_or_else(|| fault(key, "a closing single quote and a character after each backslash"))?;
            upstream.set(key, value)?;
            rest = after.trim_start();
        }
        Ok(upstream)
    }

    fn set(&mut self, key: &str, value: String) -> Result<(), ErrorKind> {
        let text = (!value.is_empty()).then(|| value.clone());
        match key {
            "host" | "hostaddr" => {
                let hosts = text.map(|t| {
                    HostList::parse(&t).ok_or_else(|| fault("host", "hosts without gaps in the list"))
                });
                self.host = hosts.transpose()?;
            }
            "port" => {
                let port = text.map(|t| {
                    t.parse().ok().filter(|p| *p != 0).ok_or_else(|| fault("port", "a port from 1 to 65535"))
                });
                self.port = port.transpose()?;
            }
            "user" => self.user = text,
            "password" => self.password = text.map(Secret::new),
            "dbname" => self.dbname = text,
            "sslmode" => {
                let mode = SslMode::from_word(&value);
                self.sslmode = Some(mode.ok_or_else(|| {
                    fault("sslmode", "disable, allow, prefer, require, verify-ca or verify-full")
                })?);
            }
            "application_name" => self.application_name = text,
            "client_encoding" => self.client_encoding = text,
            _ => {
                return Err(fault(
                    key,
                    "host, hostaddr, port, user, password, dbname, sslmode, application_name or client_encoding",
                ));
            }
        }
        Ok(())
    }

    /// An entry of `[databases]` called `name` that leads here, with `user` as the forced user.
    pub fn database(&self, name: &str) -> Database {
        let mut db = Database::new(name, nowhere("connection string"));
        db.dbname = self.dbname.clone();
        db.host = self.host.clone();
        db.port = self.port.unwrap_or(5432);
        db.user = self.user.clone();
        db.password = self.password.clone();
        db.application_name = self.application_name.clone();
        db.client_encoding = self.client_encoding.clone();
        db
    }
}

/// A value of a keyword string and what follows it.
fn keyword_value(text: &str) -> Option<(String, &str)> {
    let quoted = text.starts_with('\'');
    let mut value = String::new();
    let mut chars = text.char_indices();
    if quoted {
        chars.next();
    }
    while let Some((i, c)) = chars.next() {
        match c {
            '\\' => value.push(chars.next()?.1),
            '\'' if quoted => return Some((value, &text[i + 1..])),
            c if !quoted && c.is_whitespace() => return Some((value, &text[i..])),
            c => value.push(c),
        }
    }
    (!quoted).then_some((value, ""))
}

/// Percent-decoding; `what` names the part in errors, which never show it.
fn decode(what: &str, text: &str) -> Result<String, ErrorKind> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes().iter();
    while let Some(&byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || rest.next().and_then(|b| (*b as char).to_digit(16));
        match (digit(), digit()) {
            (Some(high), Some(low)) if (high, low) != (0, 0) => bytes.push((high * 16 + low) as u8),
            _ => return Err(fault(what, "two hexadecimal digits after '%', not 00")),
        }
    }
    String::from_utf8(bytes).map_err(|_| fault(what, "UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn show(text: &str) -> String {
        let u = Upstream::parse(text).expect(text);
        format!(
            "{}|{}|{}|{}|{}",
            u.host.as_ref().map_or("-", |h| h.as_str()),
            u.port.map_or("-".into(), |p| p.to_string()),
            u.user.as_deref().unwrap_or("-"),
            u.password.as_ref().map_or("-", Secret::expose),
            u.dbname.as_deref().unwrap_or("-")
        )
    }

    #[test]
    fn urls() {
        assert_eq!(show("postgres://bob:p%40ss@db.example:5433/shop"), "db.example|5433|bob|p@ss|shop");
        assert_eq!(show("postgresql://bob:p@ss@h/"), "h|-|bob|p@ss|-");
        assert_eq!(show("postgres://"), "-|-|-|-|-");
        assert_eq!(show("postgres:///shop?host=/run/pg&user=eve"), "/run/pg|-|eve|-|shop");
        assert_eq!(show("postgres://%2Frun%2Fpg/shop"), "/run/pg|-|-|-|shop");
        assert_eq!(show("postgres://[::1]:6000,[::2]/x?password=a%20b"), "::1,::2|6000|-|a b|x");
        assert_eq!(
            Upstream::parse("postgres://h/?sslmode=verify-full").map(|u| u.sslmode),
            Ok(Some(SslMode::VerifyFull))
        );
    }

    #[test]
    fn keywords() {
        assert_eq!(
            show("host=a port = 1 user='b ob' password='it\\'s \\\\' dbname=d\\ x"),
            "a|1|b ob|it's \\|d x"
        );
        assert_eq!(show("  "), "-|-|-|-|-");
    }

    #[test]
    fn faults_never_show_the_password() {
        for text in [
            "postgres://bob:secret%@h/db",
            "postgres://bob:secret@h:99999/db",
            "postgres://bob:secret@h:1,i:2/db",
            "postgres://bob:secret@[::1/db",
            "postgres://bob:secret@h/db?nokey",
            "postgres://bob:secret@h/db?sslmode=maybe",
            "host=h password=secret secret2",
            "host=h password='secret",
            "host=h password=secret foo=bar",
            "mysql://bob:secret@h/db",
        ] {
            let error = Upstream::parse(text).expect_err(text).to_string();
            assert!(!error.contains("secret"), "{text}: {error}");
        }
    }

    #[test]
    fn becomes_a_database() {
        let db = Upstream::parse("postgres://bob:pw@h/shop").expect("valid").database("s");
        assert_eq!((db.name.as_str(), db.server_dbname(), db.port), ("s", "shop", 5432));
        assert_eq!(db.user.as_deref(), Some("bob"));
    }
}
