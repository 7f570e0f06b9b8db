// SPDX-License-Identifier: Apache-2.0
//! A snapshot of everything that a RELOAD can change: configuration, users, HBA rules, TLS. Made whole or not at all.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use underpass_auth::{AuthContext, AuthOptions, MockMethod, Secret};
use underpass_config::{
    AuthType, CheckQuery, Config, Database, Hba, IdentMaps, OsFiles, Parsed, PoolMode, SslMode, Userlist,
};
use underpass_pool::core::PoolLimits;
use underpass_pool::link::LinkOptions;
use underpass_tls::{ClientSide, ServerSide, TlsClientOptions, TlsServerOptions};

/// What a RELOAD replaces.
#[derive(Clone)]
pub(crate) struct Settings {
    pub config: Config,
    /// Contents of `auth_file`.
    pub users: HashMap<String, Secret>,
    pub hba: Option<Hba>,
    pub ident: IdentMaps,
    pub auth: Arc<AuthContext>,
    pub client_tls: Option<Arc<ClientSide>>,
    pub server_tls: Option<ServerSide>,
    /// Files the configuration was read from, for RELOAD.
    pub paths: Vec<PathBuf>,
}

fn auth_options(config: &Config, users: &HashMap<String, Secret>) -> AuthOptions {
    AuthOptions {
        scram_iterations: config.scram_iterations,
        derive_elsewhere: true,
        mock_method: mock_method(users),
        ..AuthOptions::default()
    }
}

/// What most users are asked for under method md5, so that names that nobody has are asked for the same.
fn mock_method(users: &HashMap<String, Secret>) -> MockMethod {
    let count = |is_such: fn(&Secret) -> bool| users.values().filter(|secret| is_such(secret)).count();
    let scram = count(|secret| matches!(secret, Secret::Scram(_)));
    // An empty password is none.
    let md5 = count(|secret| match secret {
        Secret::Plain(password) => !password.is_empty(),
        Secret::Md5(_) => true,
        Secret::Scram(_) => false,
    });
    if scram >= md5 { MockMethod::Scram } else { MockMethod::Md5 }
}

/// Whether there is no such file.
pub(crate) fn is_missing(path: &Path) -> bool {
    std::fs::File::open(path).is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
}

/// Where users and rules of a configuration come from.
#[derive(Clone, Copy)]
enum Files<'a> {
    /// Read now. A line that cannot be read is left out and told; a start judges that by itself.
    Lenient,
    /// Read now. A line that cannot be read is an error: it may be a `reject`, or the user that comes next. An `auth_file` that these
    /// settings read, or did without, may be missing: its users stay.
    Strict(&'a Settings),
    /// As they are in these settings.
    Kept(&'a Settings),
}

impl Files<'_> {
    /// The users that stay although there is no file at `path`.
    fn users_without(&self, path: &Path) -> Option<&HashMap<String, Secret>> {
        match self {
            Files::Strict(old) if old.config.auth_file.as_deref() == Some(path) => Some(&old.users),
            _ => None,
        }
    }
}

impl Settings {
    /// Reads the configuration and every file it names, for a RELOAD of these settings. Warnings are for the log.
    ///
    /// # Errors
    /// The first thing that cannot be used, with its file and what to do.
    pub fn reload(&self, paths: &[PathBuf]) -> anyhow::Result<(Self, Vec<String>)> {
        let as_paths: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
        let loaded = Config::load(&as_paths)?;
        let (settings, more) = Self::from_config(loaded.config, paths, Files::Strict(self), None)?;
        let warnings = loaded.warnings.iter().map(ToString::to_string).chain(more).collect();
        Ok((settings, warnings))
    }

    /// The same for a start, which goes on without an `auth_file` that is not there: PgBouncer does, and an `auth_query` or a later
    /// RELOAD may make up for it. One that is there and cannot be read is a mistake.
    ///
    /// # Errors
    /// As [`reload`](Self::reload).
    pub fn load_at_start(paths: &[PathBuf]) -> anyhow::Result<(Self, Vec<String>)> {
        let as_paths: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
        let mut loaded = Config::load(&as_paths)?;
        let auth_file = loaded.config.auth_file.take_if(|path| is_missing(path));
        let missing = auth_file.as_ref().and_then(|path| {
            let error = std::fs::File::open(path).err()?;
            Some(format!(
                "could not open auth_file {}: {error}; its users cannot log in before a RELOAD",
                path.display()
            ))
        });
        let (mut settings, more) = Self::from_config(loaded.config, paths, Files::Lenient, None)?;
        if auth_file.is_some() {
            settings.config.auth_file = auth_file;
        }
        let warnings = loaded.warnings.iter().map(ToString::to_string).chain(missing).chain(more).collect();
        Ok((settings, warnings))
    }

    /// These settings with `config`, of which SET has changed `key`. Files with users and rules are read again if it is about them, and those of
    /// TLS likewise: SET puts in force what it names, and nothing that was not asked for.
    pub fn with(&self, config: Config, key: &str) -> anyhow::Result<Self> {
        const ABOUT_FILES: [&str; 4] = ["auth_file", "auth_hba_file", "auth_ident_file", "auth_type"];
        let files = if ABOUT_FILES.contains(&key) { Files::Strict(self) } else { Files::Kept(self) };
        let kept_tls = (!key.contains("_tls")).then_some(self);
        Ok(Self::from_config(config, &self.paths, files, kept_tls)?.0)
    }

    /// The same from a configuration that was read (or changed by SET) already. Also returns warnings.
    fn from_config(
        config: Config,
        paths: &[PathBuf],
        files: Files<'_>,
        kept_tls: Option<&Self>,
    ) -> anyhow::Result<(Self, Vec<String>)> {
        let mut warnings = Vec::new();
        let users = match (files, &config.auth_file) {
            (Files::Kept(old), _) => old.users.clone(),
            (_, Some(path)) if is_missing(path) && files.users_without(path).is_some() => {
                warnings
                    .push(format!("auth_file {} is not there: its users stay as they were", path.display()));
                files.users_without(path).cloned().unwrap_or_default()
            }
            (_, Some(path)) => {
                let list = Userlist::load(&OsFiles, path).context("auth_file")?;
                whole(list, files, &mut warnings)
                    .context("auth_file")?
                    .iter()
                    .map(|(name, secret)| (name.to_owned(), Secret::parse(secret.expose())))
                    .collect()
            }
            (_, None) => HashMap::new(),
        };
        // As in PgBouncer only HBA rules use maps, and without them the file may be missing.
        let ident = match (files, &config.auth_ident_file) {
            (Files::Kept(old), _) => old.ident.clone(),
            (_, Some(path)) if config.auth_type == AuthType::Hba => {
                let maps = IdentMaps::load(&OsFiles, path).context("auth_ident_file")?;
                whole(maps, files, &mut warnings).context("auth_ident_file")?
            }
            _ => IdentMaps::default(),
        };
        let hba = match (files, &config.auth_hba_file, config.auth_type) {
            (Files::Kept(old), ..) => old.hba.clone(),
            (_, Some(path), AuthType::Hba) => {
                let rules = Hba::load(&OsFiles, path, &ident).context("auth_hba_file")?;
                let hba = whole(rules, files, &mut warnings).context("auth_hba_file")?;
                // A file that is just being written would lock everybody out, with whoever could RELOAD again.
                let is_void = hba.rules.is_empty() && matches!(files, Files::Strict(_));
                anyhow::ensure!(
                    !is_void,
                    "auth_hba_file {}: no rule, so nobody could log in",
                    path.display()
                );
                Some(hba)
            }
            (_, None, AuthType::Hba) => {
                anyhow::bail!("auth_type = hba needs auth_hba_file: name the file in [pgbouncer]")
            }
            _ => None,
        };
        let auth = AuthContext::new(&auth_options(&config, &users))?;
        let (client_tls, server_tls) = match kept_tls {
            Some(old) => (old.client_tls.clone(), old.server_tls.clone()),
            None => build_tls(&config, &mut warnings)?,
        };
        let settings = Self {
            config,
            users,
            hba,
            ident,
            auth: Arc::new(auth),
            client_tls,
            server_tls,
            paths: paths.to_vec(),
        };
        Ok((settings, warnings))
    }

    /// What a new authentication context is made with.
    pub fn auth_options(&self) -> AuthOptions {
        auth_options(&self.config, &self.users)
    }

    /// Limits of the pool of `user` on `database`.
    pub fn pool_limits(&self, database: &Database, user: &str) -> PoolLimits {
        let config = &self.config;
        let checks = config.server_check_query != CheckQuery::Off;
        PoolLimits {
            size: match config.pool_size(database, user) {
                0 => PoolLimits::UNLIMITED,
                size => size,
            },
            size_min: config.min_pool_size(database),
            // Without a time after which it is used it is not used, as in PgBouncer (objects.c, `find_server` and `launch_new_connection`).
            reserve: if config.reserve_pool_timeout.is_zero() {
                0
            } else {
                config.reserve_pool_size(database, user)
            },
            reserve_timeout: config.reserve_pool_timeout,
            database_max: config.max_db_connections(database),
            user_max: config.max_user_connections(user),
            lifetime: config.server_lifetime(database),
            idle_timeout: config.server_idle_timeout,
            check_delay: checks.then_some(config.server_check_delay),
            round_robin: config.server_round_robin,
            login_retry: config.server_login_retry,
        }
    }

    /// What the tracker of a link is told.
    pub fn link_options(&self, mode: PoolMode) -> LinkOptions {
        LinkOptions {
            rename_statements: mode != PoolMode::Session && self.config.max_prepared_statements > 0,
            serves_transactions: mode != PoolMode::Session,
            statements_max: self.config.max_prepared_statements,
            message_max: self.config.max_packet_size,
            statement_bytes_max: match self.config.underpass.max_prepared_statement_bytes {
                0 => u32::MAX,
                bytes => bytes.try_into().unwrap_or(u32::MAX),
            },
            client_statement_bytes_max: match self.config.underpass.max_client_statement_bytes {
                0 => usize::MAX,
                bytes => bytes.try_into().unwrap_or(usize::MAX),
            },
            refuse_simple_query: self.config.disable_pqexec,
        }
    }
}

/// Both sides of TLS as `config` has them.
fn build_tls(
    config: &Config,
    warnings: &mut Vec<String>,
) -> anyhow::Result<(Option<Arc<ClientSide>>, Option<ServerSide>)> {
    let client_tls = ClientSide::build(&TlsClientOptions {
        sslmode: tls_mode(config.client_tls_sslmode),
        key_file: config.client_tls_key_file.clone(),
        cert_file: config.client_tls_cert_file.clone(),
        ca_file: config.client_tls_ca_file.clone(),
        protocols: shown(config, "client_tls_protocols"),
        ciphers: config.client_tls_ciphers.clone(),
        tls13_ciphers: config.client_tls13_ciphers.clone().unwrap_or_default(),
        ecdhcurve: config.client_tls_ecdhcurve.clone(),
        dheparams: config.client_tls_dheparams.clone(),
    })?;
    let server_tls = ServerSide::build(&TlsServerOptions {
        sslmode: tls_mode(config.server_tls_sslmode),
        ca_file: config.server_tls_ca_file.clone(),
        key_file: config.server_tls_key_file.clone(),
        cert_file: config.server_tls_cert_file.clone(),
        protocols: shown(config, "server_tls_protocols"),
        ciphers: config.server_tls_ciphers.clone(),
        tls13_ciphers: config.server_tls13_ciphers.clone().unwrap_or_default(),
    })?;
    warnings.extend(client_tls.iter().flat_map(|tls| tls.warnings.iter().cloned()));
    warnings.extend(server_tls.iter().flat_map(|tls| tls.warnings.iter().cloned()));
    Ok((client_tls.map(Arc::new), server_tls))
}

fn tls_mode(mode: SslMode) -> underpass_tls::SslMode {
    match mode {
        SslMode::Disable => underpass_tls::SslMode::Disable,
        SslMode::Allow => underpass_tls::SslMode::Allow,
        SslMode::Prefer => underpass_tls::SslMode::Prefer,
        SslMode::Require => underpass_tls::SslMode::Require,
        SslMode::VerifyCa => underpass_tls::SslMode::VerifyCa,
        SslMode::VerifyFull => underpass_tls::SslMode::VerifyFull,
    }
}

/// What could be read of a file. What could not goes to the log, as PgBouncer does it, or is an error.
fn whole<T>(parsed: Parsed<T>, files: Files<'_>, warnings: &mut Vec<String>) -> anyhow::Result<T> {
    if let (Files::Strict(_), Some(error)) = (files, parsed.errors.first()) {
        anyhow::bail!("{error}");
    }
    warnings.extend(parsed.errors.iter().map(ToString::to_string));
    warnings.extend(parsed.warnings.iter().map(ToString::to_string));
    Ok(parsed.value)
}

fn shown(config: &Config, key: &str) -> String {
    config.get(key).flatten().unwrap_or_default()
}
