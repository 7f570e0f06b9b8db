// SPDX-License-Identifier: Apache-2.0
//! Looks at the target before the first statement: is it another server than the captured one, has it room for the
//! sessions, has it the databases, users and relations that the statements name?

use std::collections::{BTreeMap, BTreeSet};

use underpass_trace::Protocol;
use underpass_wire::frontend::build;

use crate::classify::Statement;
use crate::connection::Connection;
use crate::error::ConnectError;
use crate::outcome::UnitOutcome;
use crate::plan::{End, Plan};
use crate::target::{Login, Target};
use crate::{Error, plan::Unit};

/// SQLSTATEs that say that something a statement names does not exist: table, column, function, other object, schema.
const UNDEFINED: [&str; 5] = ["42P01", "42703", "42883", "42704", "3F000"];
/// So many missing things are named.
const NAMED_MAX: usize = 10;

/// What was found out about a target.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Preflight {
    /// `PostgreSQL`, `MariaDB` or `MySQL`.
    pub product: &'static str,
    /// `server_version`.
    pub version: String,
    /// `system_identifier`, if we may see it.
    pub system_identifier: Option<String>,
    /// Connections that are free for us.
    pub connections_free: i64,
    /// Extensions of PostgreSQL's databases and their versions.
    pub extensions: BTreeMap<String, BTreeMap<String, String>>,
    /// Distinct statements that the target was asked to parse.
    pub statements_checked: usize,
    /// Why it does not fit.
    pub problems: Vec<String>,
    /// What is worth knowing all the same.
    pub notes: Vec<String>,
}

impl Preflight {
    /// Notes that the captured server was of another version, of which `major` tells the part that counts. [`version`](Self::version)
    /// is known.
    pub(crate) fn note_version(&mut self, plan: &Plan, major: impl Fn(&str) -> String) {
        let captured = &plan.meta.server.version;
        if !captured.is_empty() && major(captured) != major(&self.version) {
            self.notes.push(format!("captured on version {captured}, played on {}", self.version));
        }
    }

    /// Compares its extensions with those of another server, whose name is given.
    pub fn note_extensions(&mut self, other: &Self, name: &str) {
        for (database, wanted) in &other.extensions {
            let Some(own) = self.extensions.get(database) else { continue };
            for (extension, version) in wanted {
                match own.get(extension) {
                    None => self
                        .problems
                        .push(format!("database {database}: no extension {extension}, which {name} has")),
                    Some(here) if here != version => self.notes.push(format!(
                        "database {database}: extension {extension} is {here} here, {version} on {name}"
                    )),
                    Some(_) => {}
                }
            }
        }
    }

    /// Notes whether all sessions can be connected at once.
    pub(crate) fn note_connections(&mut self, plan: &Plan, free: i64) {
        self.connections_free = free;
        if (plan.sessions_peak as i64) > free {
            self.problems.push(format!(
                "{} sessions were open at once, and {free} connections are free here (max_connections)",
                plan.sessions_peak
            ));
        }
    }
}

/// Looks at the target. An error only if it cannot be reached. OIDs of types that the target does not have are cleared in the
/// plan, so that it infers them.
pub async fn check(plan: &mut Plan, target: &Target) -> Result<Preflight, Error> {
    match (plan.meta.protocol, target.protocol) {
        (Protocol::Postgres, Protocol::Postgres) => {}
        (Protocol::Mysql, Protocol::Mysql) => return crate::mysql::check(plan, target).await,
        (trace, _) => {
            let (trace, scheme) = match trace {
                Protocol::Postgres => ("PostgreSQL", "postgres"),
                Protocol::Mysql => ("MariaDB or MySQL", "mysql"),
            };
            return Err(Error::Protocol { trace, target: target.name(), scheme });
        }
    }
    let failed = |source| Error::Connect { target: target.name(), source };
    let mut found = Preflight { product: "PostgreSQL", ..Preflight::default() };
    let mut connection = Connection::open(target, &target.own_login(None), &[]).await.map_err(failed)?;
    server(plan, &mut connection, &mut found).await.map_err(failed)?;
    let logins = names(plan, target, &mut connection, &mut found).await.map_err(failed)?;
    connection.terminate().await;
    let mut typed_logins: Vec<Login> = Vec::new();
    for Place { login, parameters, statements } in logins {
        // Texts are looked at as UTF-8, whatever their sessions said.
        let parameters = parameters.iter().map(|(name, value)| (&name[..], &value[..]));
        let parameters: Vec<(&[u8], &[u8])> =
            parameters.chain([(&b"client_encoding"[..], &b"UTF8"[..])]).collect();
        match Connection::open(target, &login, &parameters).await {
            Ok(mut connection) => {
                let checked = statements_exist(plan, &statements, &mut connection, &login, &mut found).await;
                let typed = match typed_logins.contains(&login) {
                    true => Ok(()),
                    false => types_exist(plan, target, &login, &mut connection, &mut found).await,
                };
                typed_logins.push(login.clone());
                let extended = extensions(plan, &statements, &mut connection, &login, &mut found).await;
                if let Err(error) = checked.and(typed).and(extended) {
                    found.problems.push(format!("database {}: {error}", login.database));
                }
                connection.terminate().await;
            }
            Err(error) => {
                let user = login.become_user.as_ref().unwrap_or(&login.user);
                found.problems.push(format!("user {user}, database {}: {error}", login.database));
            }
        }
    }
    Ok(found)
}

/// The server as a whole.
async fn server(plan: &Plan, connection: &mut Connection, found: &mut Preflight) -> Result<(), ConnectError> {
    let version = connection.query("show server_version").await?;
    found.version = first(version).unwrap_or_default();
    found.note_version(plan, |version| version.split(['.', ' ']).next().unwrap_or_default().to_owned());
    match connection.query("select system_identifier from pg_control_system()").await {
        Ok(rows) => found.system_identifier = first(rows),
        Err(error) => found.notes.push(format!("cannot see the target's system_identifier: {error}")),
    }
    note_captured(plan, found);
    let free = "select current_setting('max_connections')::int \
        - case when (select rolsuper from pg_roles where rolname = current_user) then 0 \
          else current_setting('superuser_reserved_connections')::int end \
        - count(*) + 1 from pg_stat_activity where backend_type = 'client backend'";
    let free = first(connection.query(free).await?).and_then(|text| text.parse().ok()).unwrap_or(0);
    found.note_connections(plan, free);
    Ok(())
}

/// Whether the target is the captured server, or one of those that a pooler led to.
fn note_captured(plan: &Plan, found: &mut Preflight) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let itself = found.system_identifier.as_deref();
    let behind_pooler = plan.servers.iter().find(|server| {
        server
            .system_identifier
            .as_deref()
            .is_some_and(|captured| itself.map(str::as_bytes) == Some(captured))
    });
    let which = match (&plan.meta.server.system_identifier, behind_pooler) {
        (Some(captured), _) if Some(captured.as_str()) == itself => Some(String::new()),
        (_, Some(server)) => {
            Some(format!(" of database {} at {}", text(&server.database), text(&server.address)))
        }
        _ => None,
    };
    if let (Some(which), Some(target)) = (which, itself) {
        found.problems.push(format!(
            "it is the captured server{which} itself, or a physical copy of it (system_identifier {target})"
        ));
        return;
    }
    if plan.meta.server.system_identifier.is_some() {
        return;
    }
    let known: BTreeSet<&[u8]> = plan
        .servers
        .iter()
        .filter(|server| server.system_identifier.is_some())
        .map(|server| &*server.database)
        .collect();
    let of_others = |database: &&[u8]| !known.contains(database);
    let databases = plan.sessions.iter().filter_map(|session| session.database.as_deref());
    let unknown: BTreeSet<&[u8]> = databases.filter(of_others).collect();
    if known.is_empty() {
        found.notes.push(
            "the trace does not say which server it is of, so nothing shows that the target is another"
                .into(),
        );
    } else if !unknown.is_empty() {
        let shown: Vec<String> = unknown.iter().take(NAMED_MAX).map(|database| text(database)).collect();
        found.notes.push(format!(
            "the trace does not say which server these databases were on, so the target may be theirs: {}",
            shown.join(", ")
        ));
    }
}

/// Databases and users. Returns the logins with the statements that each of them runs.
async fn names(
    plan: &Plan,
    target: &Target,
    connection: &mut Connection,
    found: &mut Preflight,
) -> Result<Vec<Place>, ConnectError> {
    let databases = set(connection.query("select datname from pg_database where datallowconn").await?);
    let users = set(connection.query("select rolname from pg_roles where rolcanlogin").await?);
    let superuser = "select rolsuper from pg_roles where rolname = current_user";
    let superuser = first(connection.query(superuser).await?).as_deref() == Some("t");
    let mut logins = logins(plan, target);
    let mut missing = BTreeSet::new();
    for Place { login, .. } in &logins {
        if !databases.contains(&login.database) {
            missing.insert(format!("no database {} (--map-database renames)", login.database));
        }
        let user = login.become_user.as_ref().unwrap_or(&login.user);
        if !users.contains(user) {
            missing.insert(format!("no user {user} (--map-user renames, --one-user makes all one)"));
        }
        if login.become_user.is_some() && !superuser {
            missing.insert(format!(
                "sessions of user {user} need its password (--credentials), or a superuser in --to, or --one-user"
            ));
        }
    }
    found.problems.extend(missing);
    logins.retain(|place| databases.contains(&place.login.database));
    Ok(logins)
}

/// Where statements are run.
#[derive(Debug)]
pub(crate) struct Place {
    pub login: Login,
    /// Those of the StartupMessage that say where names are looked for.
    pub parameters: Vec<(Vec<u8>, Vec<u8>)>,
    pub statements: BTreeSet<u32>,
}

/// The logins of all sessions, with the statements that each of them runs.
pub(crate) fn logins(plan: &Plan, target: &Target) -> Vec<Place> {
    let mut logins: Vec<Place> = Vec::new();
    for session in &plan.sessions {
        let login = target.login(session.user.as_deref(), session.database.as_deref());
        let worth = session
            .units
            .iter()
            .filter(|unit| worth_checking(plan, unit))
            .flat_map(|unit| plan.executes(unit));
        let looks = |name: &[u8]| {
            target.protocol == Protocol::Postgres && [&b"options"[..], b"search_path"].contains(&name)
        };
        let parameters: Vec<_> = session.parameters.iter().filter(|(name, _)| looks(name)).cloned().collect();
        // Few, however many sessions there are.
        match logins.iter_mut().find(|known| known.login == login && known.parameters == parameters) {
            Some(known) => known.statements.extend(worth),
            None => logins.push(Place { login, parameters, statements: worth.copied().collect() }),
        }
    }
    logins
}

/// Whether a unit's statements should exist on the target: those that worked at capture.
fn worth_checking(plan: &Plan, unit: &Unit) -> bool {
    let failed = plan.expected(unit).iter().any(|one| matches!(one.end, Some(End::Error(..))));
    unit.omitted.is_none() && !failed
}

/// Has the target parse each distinct statement, without running any.
async fn statements_exist(
    plan: &Plan,
    statements: &BTreeSet<u32>,
    connection: &mut Connection,
    login: &Login,
    found: &mut Preflight,
) -> Result<(), ConnectError> {
    let all = plan.classifier.statements();
    let moves = |one: &Statement| one.label.to_ascii_lowercase().contains("search_path");
    let moves = all.iter().any(|one| one.summary.defines || moves(one));
    let mut missing = Vec::new();
    let created = created(plan);
    for statement in to_prepare(plan, statements) {
        let mut messages = Vec::new();
        build::parse(&mut messages, b"", statement.sample.as_bytes(), []);
        build::sync(&mut messages);
        found.statements_checked += 1;
        match connection.exchange(&messages).await {
            // Not all relations of a statement are told by its summary: those of DECLARE are not.
            Err(ConnectError::Server { message, .. })
                if quoted(&message).is_some_and(|name| created.contains(name)) => {}
            Err(ConnectError::Server { sqlstate, message }) if UNDEFINED.contains(&sqlstate.as_str()) => {
                missing.push(format!("{message}: {}", statement.label));
            }
            // Parameters whose type only the client knew, several statements in one text: no evidence of anything.
            Ok(_) | Err(ConnectError::Server { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    note_missing(missing, moves, login, found);
    Ok(())
}

/// Relations that the trace makes or changes itself.
fn created(plan: &Plan) -> BTreeSet<&str> {
    let all = plan.classifier.statements().iter();
    all.flat_map(|one| &one.summary.creates).map(String::as_str).collect()
}

/// The name in a server's message, without its schema.
fn quoted(message: &str) -> Option<&str> {
    let name = message.split('"').nth(1)?;
    name.rsplit('.').next()
}

/// Those of the statements that can be prepared before anything is played: their text is known whole, and the trace itself makes
/// none of the relations in it.
pub(crate) fn to_prepare<'p>(plan: &'p Plan, statements: &BTreeSet<u32>) -> Vec<&'p Statement> {
    let created = created(plan);
    let is_made = |one: &Statement| one.summary.relations.iter().any(|name| created.contains(name.as_str()));
    let statements = statements.iter().map(|&index| plan.classifier.get(index));
    statements.filter(|one| !one.sample.is_empty() && !is_made(one)).collect()
}

/// Says what the target does not have. Where the trace itself makes functions and types, or changes the place in which names are looked
/// for (`moves`), what is not found now may be found then.
pub(crate) fn note_missing(missing: Vec<String>, moves: bool, login: &Login, found: &mut Preflight) {
    if missing.is_empty() {
        return;
    }
    let count = missing.len();
    let list: Vec<String> = missing.into_iter().take(NAMED_MAX).collect();
    let more = if count > list.len() { format!("; and {} more", count - list.len()) } else { String::new() };
    let text = format!("database {}: {}{more}", login.database, list.join("; "));
    if moves {
        found.notes.push(format!("not there before the trace is played, which may make it: {text}"));
    } else {
        found.problems.push(text);
    }
}

/// Extensions: which the database has, and whether those that the trace makes can be had. Which the captured server had, a trace does
/// not tell: what they provide is missed where a statement names it.
async fn extensions(
    plan: &Plan,
    statements: &BTreeSet<u32>,
    connection: &mut Connection,
    login: &Login,
    found: &mut Preflight,
) -> Result<(), ConnectError> {
    let rows = connection.query("select extname, extversion from pg_extension").await?;
    let pair = |row: Vec<Option<String>>| {
        <[Option<String>; 2]>::try_from(row).ok().map(|row| row.map(Option::unwrap_or_default))
    };
    let installed = rows.into_iter().filter_map(pair).map(|[name, version]| (name, version)).collect();
    found.extensions.insert(login.database.clone(), installed);
    let created = statements.iter().flat_map(|&index| &plan.classifier.get(index).summary.extensions);
    let wanted: BTreeSet<String> = created.cloned().collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let available = set(connection.query("select name from pg_available_extensions").await?);
    for name in wanted.difference(&available) {
        let text = format!(
            "database {}: the trace creates the extension {name}, which is not installed here",
            login.database
        );
        found.problems.push(text);
    }
    Ok(())
}

/// Clears OIDs of types that the database does not have.
async fn types_exist(
    plan: &mut Plan,
    target: &Target,
    login: &Login,
    connection: &mut Connection,
    found: &mut Preflight,
) -> Result<(), ConnectError> {
    let mut known = None;
    let mut cleared = BTreeSet::new();
    for session in plan.sessions.iter_mut().filter(|session| !session.type_oids.is_empty()) {
        if target.login(session.user.as_deref(), session.database.as_deref()) != *login {
            continue;
        }
        if known.is_none() {
            let rows = connection.query("select oid from pg_type where oid >= 16384").await?;
            known = Some(
                rows.into_iter()
                    .flatten()
                    .flatten()
                    .filter_map(|oid| oid.parse().ok())
                    .collect::<BTreeSet<u32>>(),
            );
        }
        for &(at, oid) in &session.type_oids {
            if known.as_ref().is_some_and(|known| !known.contains(&oid)) {
                plan.messages.replace(at, &[0; 4])?;
                cleared.insert(oid);
            }
        }
    }
    if !cleared.is_empty() {
        found.notes.push(format!(
            "database {}: {} types of parameters have other OIDs here; the server infers them",
            login.database,
            cleared.len()
        ));
    }
    Ok(())
}

pub(crate) fn set(rows: Vec<Vec<Option<String>>>) -> BTreeSet<String> {
    rows.into_iter().flatten().flatten().collect()
}

pub(crate) fn first(rows: Vec<Vec<Option<String>>>) -> Option<String> {
    rows.into_iter().flatten().flatten().next()
}

/// Functions of the played statements whose result changes from run to run, with the number of units that call them.
pub fn volatile(plan: &Plan, played: &crate::run::Played) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for (session, outcome) in plan.sessions.iter().zip(&played.sessions) {
        let sent = session
            .units
            .iter()
            .zip(&outcome.units)
            .filter(|(_, outcome)| !matches!(outcome, UnitOutcome::NotSent));
        for (unit, _) in sent {
            let names: BTreeSet<&String> = plan
                .executes(unit)
                .iter()
                .flat_map(|&index| &plan.classifier.get(index).summary.volatile)
                .collect();
            for name in names {
                *counts.entry(name.clone()).or_default() += 1;
            }
        }
    }
    counts
}
