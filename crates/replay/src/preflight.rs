// SPDX-License-Identifier: Apache-2.0
//! Looks at the target before the first statement: is it another server than the captured one, has it room for the
//! sessions, has it the databases, users and relations that the statements name?

use std::collections::{BTreeMap, BTreeSet};

use underpass_trace::{Protocol, ServerIdentity};
use underpass_wire::frontend::build;

use crate::classify::Statement;
use crate::connection::Connection;
use crate::error::ConnectError;
use crate::outcome::UnitOutcome;
use crate::plan::{End, Messages, Plan, Session, type_oids};
use crate::report::quiet;
use crate::target::{Login, Target};
use crate::{Error, plan::Unit};

/// SQLSTATEs that say that something a statement names does not exist: table, column, function, other object, schema.
const UNDEFINED: [&str; 5] = ["42P01", "42703", "42883", "42704", "3F000"];
/// Of these, what a statement that makes functions, types or schemas may make: not tables and columns.
const DEFINED: [&str; 3] = ["42883", "42704", "3F000"];
/// Of these, what a statement that changes a table may make in it: columns, and constraints that ON CONFLICT names.
const ALTERED: [&str; 2] = ["42703", "42704"];
/// So many missing things are named.
const NAMED_MAX: usize = 10;
/// So many search paths of sessions are looked at, each by a connection.
const SEARCH_PATHS_MAX: usize = 100;

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
    /// Without what would command a terminal: names and errors are printed also where nothing is played.
    fn quiet(mut self) -> Self {
        let texts = [&mut self.problems, &mut self.notes].into_iter().flatten();
        for text in texts.chain([&mut self.version]) {
            *text = quiet(text);
        }
        self
    }

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

/// Looks at the target. An error only if it cannot be reached. OIDs of types that are not the target's are cleared in the plan, so that it infers
/// them.
pub async fn check(plan: &mut Plan, target: &Target) -> Result<Preflight, Error> {
    Ok(look(plan, target).await?.quiet())
}

async fn look(plan: &mut Plan, target: &Target) -> Result<Preflight, Error> {
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
    connections(plan, target, &mut connection, &mut found).await.map_err(failed)?;
    forget_types(plan, &mut found).map_err(|error| failed(error.into()))?;
    let logins = names(plan, target, &mut connection, &mut found).await.map_err(failed)?;
    connection.terminate().await;
    let mut typed_logins: Vec<Login> = Vec::new();
    for Place { login, search_path, statements } in logins {
        // Texts are looked at as UTF-8, whatever their sessions said.
        let mut parameters = vec![(&b"client_encoding"[..], &b"UTF8"[..])];
        parameters.extend(search_path.as_deref().map(|path| (&b"search_path"[..], path)));
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
    // The same is missing by each search path.
    for texts in [&mut found.problems, &mut found.notes] {
        let mut seen = BTreeSet::new();
        texts.retain(|text| seen.insert(text.clone()));
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
    Ok(())
}

/// Connections that are free for those as whom the sessions log in: some are kept for superusers, and from PostgreSQL 16 on others for members of a role.
async fn connections(
    plan: &Plan,
    target: &Target,
    connection: &mut Connection,
    found: &mut Preflight,
) -> Result<(), ConnectError> {
    // Of which kind a connection is, not everybody is told; an autovacuum worker has no user.
    let free = "select current_setting('max_connections')::int - count(*) + 1 from pg_stat_activity \
        where coalesce(backend_type = 'client backend', datid is not null and usesysid is not null)";
    let free = first(connection.query(free).await?).and_then(|text| text.parse().ok()).unwrap_or(0);
    let kept = "select r.rolname, case when r.rolsuper then 0 \
          else current_setting('superuser_reserved_connections')::int \
            + case when m.oid is not null and pg_has_role(r.oid, m.oid, 'usage') then 0 \
              else coalesce(current_setting('reserved_connections', true)::int, 0) end end \
        from pg_roles r left join pg_roles m on m.rolname = 'pg_use_reserved_connections'";
    let kept: BTreeMap<String, i64> = pairs(connection.query(kept).await?)
        .filter_map(|(user, kept)| Some((user, kept.parse().ok()?)))
        .collect();
    let login = |session: &Session| target.login(session.user.as_deref(), session.database.as_deref()).user;
    let users: BTreeSet<String> = plan.sessions.iter().map(login).collect();
    // The last to come may be the one for whom most are kept away.
    let kept = users.iter().filter_map(|user| kept.get(user)).max();
    found.note_connections(plan, free - kept.unwrap_or(&0));
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
    let mut logins = logins(plan, target, found);
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
    /// Where the StartupMessage says that names are looked for.
    pub search_path: Option<Vec<u8>>,
    pub statements: BTreeSet<u32>,
}

/// The logins of all sessions, with the statements that each of them runs. Notes how many search paths are left out.
pub(crate) fn logins(plan: &Plan, target: &Target, found: &mut Preflight) -> Vec<Place> {
    let mut logins: Vec<Place> = Vec::new();
    let mut paths = BTreeSet::new();
    let mut left_out = BTreeSet::new();
    for session in &plan.sessions {
        let login = target.login(session.user.as_deref(), session.database.as_deref());
        let worth = session
            .units
            .iter()
            .filter(|unit| worth_checking(plan, unit))
            .flat_map(|unit| plan.executes(unit));
        let search_path = match target.protocol {
            Protocol::Postgres => search_path(&session.parameters),
            Protocol::Mysql => None,
        };
        if let Some(path) = &search_path
            && !paths.contains(path)
        {
            if paths.len() == SEARCH_PATHS_MAX {
                left_out.insert(path.clone());
                continue;
            }
            paths.insert(path.clone());
        }
        // Few, however many sessions there are.
        match logins.iter_mut().find(|known| known.login == login && known.search_path == search_path) {
            Some(known) => known.statements.extend(worth),
            None => logins.push(Place { login, search_path, statements: worth.copied().collect() }),
        }
    }
    if !left_out.is_empty() {
        found.notes.push(format!(
            "what sessions of {} search paths name is not looked for, beyond the first {SEARCH_PATHS_MAX} search paths",
            left_out.len()
        ));
    }
    logins
}

/// The `search_path` of a StartupMessage: a parameter of its own, which wins, or one of the `options`.
fn search_path(parameters: &[(Vec<u8>, Vec<u8>)]) -> Option<Vec<u8>> {
    let of = |wanted: &[u8]| parameters.iter().find(|(name, _)| name.eq_ignore_ascii_case(wanted));
    match of(b"search_path") {
        Some((_, path)) => Some(path.clone()),
        None => of(b"options").and_then(|(_, options)| search_path_option(options)),
    }
}

/// The last of `-c search_path=...`, `-csearch_path=...` and `--search_path=...`, in which a backslash takes a blank into the value.
fn search_path_option(options: &[u8]) -> Option<Vec<u8>> {
    let mut arguments: Vec<Vec<u8>> = vec![Vec::new()];
    let mut escaped = false;
    for &byte in options {
        if byte == b'\\' && !escaped {
            escaped = true;
            continue;
        }
        if byte.is_ascii_whitespace() && !escaped {
            arguments.push(Vec::new());
        } else if let Some(argument) = arguments.last_mut() {
            argument.push(byte);
        }
        escaped = false;
    }
    let mut arguments = arguments.iter().map(Vec::as_slice).filter(|argument| !argument.is_empty());
    let mut path = None;
    while let Some(argument) = arguments.next() {
        let setting = match argument.strip_prefix(b"-c").or_else(|| argument.strip_prefix(b"--")) {
            Some(b"") => arguments.next().unwrap_or_default(),
            Some(setting) => setting,
            None => continue,
        };
        let Some(at) = setting.iter().position(|&byte| byte == b'=') else { continue };
        let name = setting[..at].to_ascii_lowercase();
        // A minus sign stands for the underscore.
        if [&b"search_path"[..], b"search-path"].contains(&name.as_slice()) {
            path = Some(setting[at + 1..].to_vec());
        }
    }
    path
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
    let names_path = |text: &str| text.to_ascii_lowercase().contains("search_path");
    let makes = Makes::of(plan, |one| names_path(&one.label) || names_path(&one.sample));
    let mut missing = Missing::default();
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
                let later = makes.anything
                    || makes.objects && DEFINED.contains(&sqlstate.as_str())
                    || makes.in_tables_of(statement) && ALTERED.contains(&sqlstate.as_str());
                missing.push(later, format!("{message}: {}", statement.label));
            }
            // Parameters whose type only the client knew, several statements in one text: no evidence of anything.
            Ok(_) | Err(ConnectError::Server { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    missing.note(login, found);
    Ok(())
}

/// What the trace itself makes besides relations, so that what is not found now may be found then.
pub(crate) struct Makes<'p> {
    /// It may make anything, or changes the place in which names are looked for.
    pub anything: bool,
    /// Functions, types, schemas.
    pub objects: bool,
    /// Something in these relations.
    altered: BTreeSet<&'p str>,
}

impl<'p> Makes<'p> {
    /// `moves` tells the statements after which names are looked for elsewhere.
    pub(crate) fn of(plan: &'p Plan, moves: impl Fn(&Statement) -> bool) -> Self {
        let all = plan.classifier.statements();
        Self {
            anything: all.iter().any(|one| one.summary.makes_anything || moves(one)),
            objects: all.iter().any(|one| one.summary.defines),
            altered: all.iter().flat_map(|one| &one.summary.alters).map(String::as_str).collect(),
        }
    }

    /// Whether the trace changes a relation that the statement names.
    pub(crate) fn in_tables_of(&self, statement: &Statement) -> bool {
        statement.summary.relations.iter().any(|name| self.altered.contains(name.as_str()))
    }
}

/// Relations that the trace makes itself.
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

/// What the target does not have.
#[derive(Debug, Default)]
pub(crate) struct Missing {
    now: Vec<String>,
    /// The trace may make it.
    later: Vec<String>,
}

impl Missing {
    pub(crate) fn push(&mut self, later: bool, text: String) {
        if later { self.later.push(text) } else { self.now.push(text) }
    }

    /// Says it: what the trace may make is no problem.
    pub(crate) fn note(self, login: &Login, found: &mut Preflight) {
        let text = |missing: Vec<String>| {
            let more = missing.len().saturating_sub(NAMED_MAX);
            let list: Vec<String> = missing.into_iter().take(NAMED_MAX).collect();
            let more = if more > 0 { format!("; and {more} more") } else { String::new() };
            format!("database {}: {}{more}", login.database, list.join("; "))
        };
        if !self.now.is_empty() {
            found.problems.push(text(self.now));
        }
        if !self.later.is_empty() {
            let text = text(self.later);
            found.notes.push(format!("not there before the trace is played, which may make it: {text}"));
        }
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
    let installed = pairs(rows).collect();
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

/// Clears OIDs of types that extensions, enums, domains and tables have: on another cluster they are other types, or none.
fn forget_types(plan: &mut Plan, found: &mut Preflight) -> std::io::Result<()> {
    let others: Vec<bool> = plan.sessions.iter().map(|session| !is_captured(plan, session, found)).collect();
    let mut cleared = BTreeSet::new();
    for (session, _) in plan.sessions.iter_mut().zip(others).filter(|(_, is_other)| *is_other) {
        clear_types(session, &plan.messages, |_| false, &mut cleared)?;
    }
    if !cleared.is_empty() {
        found.notes.push(format!(
            "{} types of parameters are told by OIDs of the captured server; the server infers them here",
            cleared.len()
        ));
    }
    Ok(())
}

/// The same on the captured cluster, or a copy of it: OIDs of types that the database does not have, or of which it makes something that no parameter is.
async fn types_exist(
    plan: &mut Plan,
    target: &Target,
    login: &Login,
    connection: &mut Connection,
    found: &mut Preflight,
) -> Result<(), ConnectError> {
    let is_its = |session: &Session| {
        target.login(session.user.as_deref(), session.database.as_deref()) == *login
            && is_captured(plan, session, found)
    };
    let its: Vec<bool> = plan.sessions.iter().map(is_its).collect();
    if !its.contains(&true) {
        return Ok(());
    }
    // Not the rows of tables, of which there are most, and no parameter is one: here they may have the number of an enum there.
    let query = "select t.oid from pg_type t left join pg_type e on e.oid = t.typelem \
        left join pg_class c on c.oid in (t.typrelid, e.typrelid) \
        where t.oid >= 16384 and coalesce(c.relkind, 'c') = 'c'";
    let rows = connection.query(query).await?;
    let known: BTreeSet<u32> =
        rows.into_iter().flatten().flatten().filter_map(|oid| oid.parse().ok()).collect();
    let mut cleared = BTreeSet::new();
    for (session, _) in plan.sessions.iter_mut().zip(its).filter(|(_, is_its)| *is_its) {
        clear_types(session, &plan.messages, |oid| known.contains(&oid), &mut cleared)?;
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

/// Clears the OIDs of types in a session's Parse messages that are none to `is_type`.
fn clear_types(
    session: &mut Session,
    messages: &Messages,
    is_type: impl Fn(u32) -> bool,
    cleared: &mut BTreeSet<u32>,
) -> std::io::Result<()> {
    for &(at, oid) in session.type_oids.iter().filter(|(_, oid)| !is_type(*oid)) {
        messages.replace(at, &[0; 4])?;
        cleared.insert(oid);
    }
    for parse in &mut session.prepared {
        for (at, oid) in type_oids(parse).filter(|(_, oid)| !is_type(*oid)).collect::<Vec<_>>() {
            parse[at..at + 4].fill(0);
            cleared.insert(oid);
        }
    }
    Ok(())
}

/// Whether the target is the server where a session was captured, or a copy of it.
fn is_captured(plan: &Plan, session: &Session, found: &Preflight) -> bool {
    let Some(identifier) = found.system_identifier.as_deref() else { return false };
    if let Some(captured) = &plan.meta.server.system_identifier {
        return captured == identifier;
    }
    let of_session = |server: &&ServerIdentity<'_>| Some(&*server.database) == session.database.as_deref();
    let mut servers = plan.servers.iter().filter(of_session).peekable();
    let is_it =
        |server: &ServerIdentity<'_>| server.system_identifier.as_deref() == Some(identifier.as_bytes());
    servers.peek().is_some() && servers.all(is_it)
}

pub(crate) fn set(rows: Vec<Vec<Option<String>>>) -> BTreeSet<String> {
    rows.into_iter().flatten().flatten().collect()
}

/// Rows of two columns.
fn pairs(rows: Vec<Vec<Option<String>>>) -> impl Iterator<Item = (String, String)> {
    let pair = |row: Vec<Option<String>>| <[Option<String>; 2]>::try_from(row).ok();
    rows.into_iter().filter_map(pair).map(|row| row.map(Option::unwrap_or_default).into())
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

#[cfg(test)]
mod tests {
    use underpass_trace::{Meta, Record, SessionId, SessionStart, Source, Transport};

    use super::*;
    use crate::plan::{Options, from_records};
    use crate::target::Identities;

    #[test]
    fn what_is_found_does_not_command_the_terminal() {
        let text = || "no user a\x1b[2J".to_owned();
        let found = Preflight {
            problems: vec![text()],
            notes: vec![text()],
            version: text(),
            ..Preflight::default()
        };
        let found = found.quiet();
        assert!(
            [&found.problems[0], &found.notes[0], &found.version].iter().all(|text| *text == "no user a [2J")
        );
    }

    #[test]
    fn options_say_where_names_are_looked_for() {
        for (options, path) in [
            ("-csearch_path=app", Some("app")),
            ("-c search_path=app -c work_mem=4MB", Some("app")),
            ("-e --search-path=a --Search_Path=app,\\ public", Some("app, public")),
            ("-c work_mem=4MB", None),
            ("-c", None),
            ("", None),
        ] {
            let found = search_path_option(options.as_bytes());
            assert_eq!(found.as_deref(), path.map(str::as_bytes), "{options}");
        }
        let parameters = [("options", "-csearch_path=one"), ("search_path", "two")]
            .map(|(name, value)| (name.as_bytes().to_vec(), value.as_bytes().to_vec()));
        assert_eq!(search_path(&parameters), Some(b"two".to_vec()));
    }

    /// A connection and a check for each would never end.
    #[test]
    fn other_options_make_no_other_place_and_search_paths_are_bounded() {
        let places = |options: &dyn Fn(u64) -> String| {
            let records = (0..200).map(|session| {
                let options = options(session).into_bytes();
                Record::SessionStart(SessionStart {
                    session: SessionId(session),
                    time_ns: session,
                    ready_ns: Some(session),
                    source: Source::Synthetic,
                    transport: Transport::Tcp,
                    peer: None,
                    backend_pid: None,
                    midstream: false,
                    protocol_version: 3 << 16,
                    database: Some(b"db"[..].into()),
                    user: Some(b"joe"[..].into()),
                    application_name: None,
                    parameters: vec![(b"options"[..].into(), options.into())],
                    frontend_offset: 0,
                    backend_offset: 0,
                })
            });
            let plan = from_records(Meta::default(), records, &Options::default()).unwrap();
            assert_eq!(plan.sessions.len(), 200);
            let target = Target::new("postgres://admin@h/db", Identities::default()).unwrap();
            let mut found = Preflight::default();
            (logins(&plan, &target, &mut found).len(), found.notes)
        };
        assert_eq!(places(&|session| format!("-c work_mem={session}MB")), (1, Vec::new()));
        let (count, notes) = places(&|session| format!("-c search_path=tenant_{session}"));
        assert_eq!(count, SEARCH_PATHS_MAX);
        assert!(notes.len() == 1 && notes[0].contains("100 search paths"), "{notes:?}");
    }
}
