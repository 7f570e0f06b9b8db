// SPDX-License-Identifier: Apache-2.0
//! The server to replay on: where it is, how to be let in, as whom each session runs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use underpass_auth::{AuthContext, AuthOptions, Password, Secret};
use underpass_config::{Host, OsFiles, Upstream, Userlist};
use underpass_tls::{ServerSide, SslMode, TlsServerOptions};
use underpass_trace::Protocol;

use crate::Error;

/// PostgreSQL's port.
const PORT: u16 = 5432;
/// That of MariaDB and MySQL.
const MYSQL_PORT: u16 = 3306;
/// How the connection string of a MariaDB or MySQL begins.
const MYSQL_SCHEMES: [&str; 2] = ["mysql://", "mariadb://"];
/// Where Debian's and most other servers have their socket; tried in this order when no host is given.
const SOCKET_DIRECTORIES: [&str; 2] = ["/var/run/postgresql", "/tmp"];

/// A server to replay on.
#[derive(Clone, Debug)]
pub struct Target {
    pub(crate) protocol: Protocol,
    pub(crate) host: Host,
    pub(crate) port: u16,
    pub(crate) tls: Option<ServerSide>,
    pub(crate) context: Arc<AuthContext>,
    user: String,
    database: String,
    secret: Option<Secret>,
    identities: Identities,
}

/// As whom the captured users log in.
#[derive(Clone, Debug, Default)]
pub struct Identities {
    /// Captured user to user of the target; who is not in it keeps the name.
    pub users: BTreeMap<String, String>,
    /// Captured database to database of the target; what is not in it keeps the name.
    pub databases: BTreeMap<String, String>,
    /// Passwords of users of the target, or PostgreSQL's md5 hashes of them. Who is not in it is reached through the connection string's user and
    /// SET SESSION AUTHORIZATION.
    pub passwords: BTreeMap<String, String>,
    /// All sessions run as the connection string's user.
    pub one_user: bool,
}

impl Identities {
    /// Reads passwords from a file of PgBouncer's `auth_file` form: `"user" "password"`.
    ///
    /// # Errors
    /// The file cannot be read, or a secret in it is of a kind by which nobody can log in.
    pub fn load_passwords(&mut self, path: &Path) -> Result<(), Error> {
        let fault =
            |error: &dyn std::fmt::Display| Error::Credentials(format!("{}: {error}", path.display()));
        let list = Userlist::load(&OsFiles, path).map_err(|error| fault(&error))?;
        if let Some(error) = list.errors.first() {
            return Err(fault(error));
        }
        for (user, secret) in list.value.iter() {
            if matches!(Secret::parse(secret.expose()), Secret::Scram(_)) {
                return Err(fault(&format_args!(
                    "user {user}: by a SCRAM verifier nobody can log in; give the password, or leave the user out"
                )));
            }
            self.passwords.insert(user.to_owned(), secret.expose().to_owned());
        }
        Ok(())
    }
}

/// How one session logs in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Login {
    pub user: String,
    pub database: String,
    pub secret: Option<Secret>,
    /// What to become by SET SESSION AUTHORIZATION after the login.
    pub become_user: Option<String>,
}

impl Target {
    /// From a libpq connection string, or a URL of the same form that begins with `mysql://` or `mariadb://`. What the first leaves out comes from `PGHOST`, `PGPORT`, `PGUSER`, `PGPASSWORD`, `PGDATABASE`, `PGSSLMODE`, `PGSSLROOTCERT`,
    /// `PGSSLCERT` and `PGSSLKEY`, as with libpq; the password of the second from `MYSQL_PWD`. It is better there than in the string, which
    /// others can see.
    pub fn new(dsn: &str, identities: Identities) -> Result<Self, Error> {
        Self::with_environment(dsn, identities, |name| {
            std::env::var(name).ok().filter(|value| !value.is_empty())
        })
    }

    fn with_environment(
        dsn: &str,
        identities: Identities,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, Error> {
        if let Some(rest) = MYSQL_SCHEMES.iter().find_map(|scheme| dsn.strip_prefix(scheme)) {
            return Self::mysql(&format!("postgres://{rest}"), identities, &environment);
        }
        let upstream = Upstream::parse(dsn)?;
        let port = upstream.port.or_else(|| environment("PGPORT")?.parse().ok()).unwrap_or(PORT);
        let host = match upstream.host.as_ref().and_then(|hosts| hosts.hosts().first()) {
            Some(host) => host.clone(),
            None => environment("PGHOST").map_or_else(|| default_host(port), |host| Host::parse(&host)),
        };
        let user = upstream
            .user
            .or_else(|| environment("PGUSER"))
            .or_else(|| environment("USER"))
            .unwrap_or_else(|| "postgres".into());
        let database = upstream.dbname.or_else(|| environment("PGDATABASE")).unwrap_or_else(|| user.clone());
        let password = upstream
            .password
            .map(|password| password.expose().to_owned())
            .or_else(|| environment("PGPASSWORD"));
        let sslmode = match upstream.sslmode {
            Some(mode) => mode.as_str().parse().unwrap_or(SslMode::Prefer),
            None => environment("PGSSLMODE").and_then(|mode| mode.parse().ok()).unwrap_or(SslMode::Prefer),
        };
        let tls = tls(&host, sslmode, &environment)?;
        let context = Arc::new(AuthContext::new(&AuthOptions::default())?);
        let secret = password.map(plain);
        Ok(Self {
            protocol: Protocol::Postgres,
            host,
            port,
            tls,
            context,
            user,
            database,
            secret,
            identities,
        })
    }

    /// `url` is one that libpq could have.
    fn mysql(
        url: &str,
        identities: Identities,
        environment: &impl Fn(&str) -> Option<String>,
    ) -> Result<Self, Error> {
        let is_hash = |password: &String| !matches!(Secret::parse(password), Secret::Plain(_));
        if let Some((user, _)) = identities.passwords.iter().find(|(_, password)| is_hash(password)) {
            return Err(Error::Credentials(format!(
                "user {user}: MariaDB and MySQL have no use for hashes that PostgreSQL stores; give the password in --credentials, or leave the user out"
            )));
        }
        let upstream = Upstream::parse(url)?;
        let host = upstream.host.as_ref().and_then(|hosts| hosts.hosts().first()).cloned();
        let host = host.unwrap_or_else(|| Host::parse("127.0.0.1"));
        let password = upstream.password.map(|password| password.expose().to_owned());
        let sslmode = upstream.sslmode.and_then(|mode| mode.as_str().parse().ok()).unwrap_or(SslMode::Prefer);
        Ok(Self {
            protocol: Protocol::Mysql,
            port: upstream.port.unwrap_or(MYSQL_PORT),
            tls: tls(&host, sslmode, environment)?,
            host,
            context: Arc::new(AuthContext::new(&AuthOptions::default())?),
            user: upstream.user.or_else(|| environment("USER")).unwrap_or_else(|| "root".into()),
            database: upstream.dbname.unwrap_or_default(),
            secret: password.or_else(|| environment("MYSQL_PWD")).map(plain),
            identities,
        })
    }

    /// Where its Unix socket is, if that is how it is reached: PostgreSQL's is named by a directory, MySQL's by the file.
    pub(crate) fn socket(&self) -> Option<PathBuf> {
        match (&self.host, self.protocol) {
            (Host::Unix(file), Protocol::Mysql) => Some(file.clone()),
            (host, _) => host.socket_path(self.port),
        }
    }

    /// `host:port`, without user and password.
    pub fn name(&self) -> String {
        match self.socket() {
            Some(path) => path.display().to_string(),
            None => format!("{}:{}", self.host, self.port),
        }
    }

    /// The connection string's own login, to a database.
    pub(crate) fn own_login(&self, database: Option<&str>) -> Login {
        Login {
            user: self.user.clone(),
            database: database.unwrap_or(&self.database).to_owned(),
            secret: self.secret.clone(),
            become_user: None,
        }
    }

    /// How a captured session logs in. What the trace does not know comes from the connection string.
    pub(crate) fn login(&self, user: Option<&[u8]>, database: Option<&[u8]>) -> Login {
        let text = |bytes: Option<&[u8]>| bytes.map(|bytes| String::from_utf8_lossy(bytes).into_owned());
        let mapped = |map: &BTreeMap<String, String>, name: String| map.get(&name).cloned().unwrap_or(name);
        let database = text(database)
            .map_or_else(|| self.database.clone(), |name| mapped(&self.identities.databases, name));
        let own = self.own_login(Some(&database));
        let Some(user) = text(user).filter(|_| !self.identities.one_user) else { return own };
        let user = mapped(&self.identities.users, user);
        match self.identities.passwords.get(&user) {
            Some(password) => {
                Login { user, database, secret: Some(Secret::parse(password)), become_user: None }
            }
            None if user == self.user => own,
            None => Login { become_user: Some(user), ..own },
        }
    }
}

/// How a host is encrypted to.
fn tls(
    host: &Host,
    sslmode: SslMode,
    environment: &impl Fn(&str) -> Option<String>,
) -> Result<Option<ServerSide>, Error> {
    if host.is_unix() {
        return Ok(None);
    }
    Ok(ServerSide::build(&TlsServerOptions {
        sslmode,
        ca_file: environment("PGSSLROOTCERT").map(PathBuf::from),
        cert_file: environment("PGSSLCERT").map(PathBuf::from),
        key_file: environment("PGSSLKEY").map(PathBuf::from),
        ..TlsServerOptions::default()
    })?)
}

fn plain(password: String) -> Secret {
    Secret::Plain(Password::new(password.into_bytes()))
}

fn default_host(port: u16) -> Host {
    let hosts = SOCKET_DIRECTORIES.map(|directory| Host::Unix(directory.into()));
    let exists = |host: &&Host| host.socket_path(port).is_some_and(|path| path.exists());
    hosts.iter().find(exists).cloned().unwrap_or_else(|| Host::parse("127.0.0.1"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(dsn: &str, identities: Identities) -> Target {
        let environment = |name: &str| (name == "PGPASSWORD").then(|| "from the environment".to_owned());
        Target::with_environment(dsn, identities, environment).unwrap()
    }

    #[test]
    fn a_session_keeps_its_user_and_database() {
        let target = target("postgres://admin@h:6000/x", Identities::default());
        assert_eq!(target.name(), "h:6000");
        let login = target.login(Some(b"joe"), Some(b"shop"));
        assert_eq!((login.user.as_str(), login.database.as_str()), ("admin", "shop"));
        assert_eq!(login.become_user.as_deref(), Some("joe"));
        assert_eq!(login.secret, Some(plain("from the environment".into())));
        assert_eq!(target.login(Some(b"admin"), Some(b"shop")).become_user, None);
        assert_eq!(target.login(None, None).database, "x");
    }

    #[test]
    fn a_password_makes_a_login_of_its_own() {
        let mut identities = Identities::default();
        identities.users.insert("joe".into(), "joe_test".into());
        identities.databases.insert("shop".into(), "shop_copy".into());
        identities.passwords.insert("joe_test".into(), "pw".into());
        let login = target("host=h user=admin", identities).login(Some(b"joe"), Some(b"shop"));
        assert_eq!((login.user.as_str(), login.database.as_str()), ("joe_test", "shop_copy"));
        assert_eq!((login.become_user, login.secret), (None, Some(plain("pw".into()))));
    }

    #[test]
    fn hashes_by_which_nobody_can_log_in_are_refused() {
        let loaded = |secret: &str| {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), format!("\"admin\" \"pw\"\n\"joe\" \"{secret}\"\n")).unwrap();
            let mut identities = Identities::default();
            identities.load_passwords(file.path()).map(|()| identities)
        };
        let key = "A".repeat(43) + "=";
        let error = loaded(&format!("SCRAM-SHA-256$4096:c2FsdA==${key}:{key}")).unwrap_err().to_string();
        assert!(error.contains("user joe") && error.contains("SCRAM") && !error.contains("4096"), "{error}");
        let identities = loaded(&format!("md5{}", "0".repeat(32))).unwrap();
        let error = Target::new("mysql://h", identities.clone()).unwrap_err().to_string();
        assert!(error.contains("user joe"), "{error}");
        let secret =
            |user: &[u8]| target("host=h user=root", identities.clone()).login(Some(user), None).secret;
        assert_eq!(
            (secret(b"joe"), secret(b"admin")),
            (Some(Secret::Md5([0; 16])), Some(plain("pw".into())))
        );
    }

    #[test]
    fn a_mysql_is_named_by_its_scheme() {
        let target = target("mysql://joe:pw@h:3307/shop", Identities::default());
        assert_eq!((target.protocol, target.name().as_str()), (Protocol::Mysql, "h:3307"));
        let login = target.login(Some(b"joe"), Some(b"shop"));
        assert_eq!((login.user.as_str(), login.secret), ("joe", Some(plain("pw".into()))));
        let target = Target::new("mariadb://%2Frun%2Fmysqld%2Fmysqld.sock/", Identities::default()).unwrap();
        assert_eq!(target.name(), "/run/mysqld/mysqld.sock");
        assert_eq!(Target::new("mysql://h", Identities::default()).unwrap().name(), "h:3306");
    }

    #[test]
    fn one_user_is_one_user() {
        let identities = Identities { one_user: true, ..Identities::default() };
        let login = target("host=h user=admin", identities).login(Some(b"joe"), Some(b"shop"));
        assert_eq!((login.user.as_str(), login.become_user), ("admin", None));
    }
}
