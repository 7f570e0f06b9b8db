// SPDX-License-Identifier: Apache-2.0
//! Looks at a MariaDB or MySQL before the first statement: see [`crate::preflight`].

use std::collections::BTreeSet;

use crate::Error;
use crate::connection::Connection;
use crate::error::ConnectError;
use crate::plan::Plan;
use crate::preflight::{Makes, Missing, Place, Preflight, first, logins, set, to_prepare};
use crate::target::{Login, Target};

/// SQLSTATEs that say that something a statement names does not exist: table, column, database. And numbers of errors whose SQLSTATE is
/// too general: routine, database.
const UNDEFINED: [&str; 2] = ["42S02", NO_COLUMN];
const UNDEFINED_NUMBERS: [&str; 2] = [NO_ROUTINE, "(error 1049)"];
/// What a statement that changes a table may make, and one that makes a routine.
const NO_COLUMN: &str = "42S22";
const NO_ROUTINE: &str = "(error 1305)";

/// Looks at the target. An error only if it cannot be reached.
pub(crate) async fn check(plan: &Plan, target: &Target) -> Result<Preflight, Error> {
    let failed = |source| Error::Connect { target: target.name(), source };
    let mut found = Preflight::default();
    let mut connection = Connection::open(target, &target.own_login(None), &[]).await.map_err(failed)?;
    server(plan, target, &mut connection, &mut found).await.map_err(failed)?;
    let databases = set(connection.run_sql("show databases").await.map_err(failed)?);
    connection.terminate().await;
    let mut missing = BTreeSet::new();
    for Place { login, statements, .. } in logins(plan, target, &mut found) {
        if !login.database.is_empty() && !databases.contains(&login.database) {
            missing.insert(format!("no database {} (--map-database renames)", login.database));
            continue;
        }
        if let Some(user) = &login.become_user {
            missing
                .insert(format!("sessions of user {user} need its password (--credentials), or --one-user"));
        }
        let checked = match Connection::open(target, &login, &[]).await {
            Ok(mut connection) => {
                let checked = statements_exist(plan, &statements, &mut connection, &login, &mut found).await;
                connection.terminate().await;
                checked
            }
            Err(error) => Err(error),
        };
        if let Err(error) = checked {
            found.problems.push(format!("user {}, database {}: {error}", login.user, login.database));
        }
    }
    found.problems.extend(missing);
    Ok(found)
}

/// The server as a whole.
async fn server(
    plan: &Plan,
    target: &Target,
    connection: &mut Connection,
    found: &mut Preflight,
) -> Result<(), ConnectError> {
    let text = |rows: Vec<Vec<Option<String>>>| first(rows).unwrap_or_default();
    found.version = text(connection.run_sql("select version()").await?);
    found.product = if found.version.contains("MariaDB") { "MariaDB" } else { "MySQL" };
    let captured = &plan.meta.server;
    found.note_version(plan, |version| version.split('.').take(2).collect::<Vec<_>>().join("."));
    // MariaDB has none.
    found.system_identifier = first(connection.run_sql("select @@server_uuid").await.unwrap_or_default());
    let host = text(connection.run_sql("select @@hostname").await?);
    let data = text(connection.run_sql("select @@datadir").await?);
    let same_place = captured.data_directory.as_ref().is_some_and(|captured| {
        host == plan.meta.host && captured.trim_end_matches('/') == data.trim_end_matches('/')
    });
    if same_place
        || captured.system_identifier.is_some() && captured.system_identifier == found.system_identifier
    {
        found.problems.push(format!("{} is the captured server itself ({host}, {data})", target.name()));
    }
    let number = |rows| text(rows).parse::<i64>().unwrap_or(0);
    let most = number(connection.run_sql("select @@max_connections").await?);
    let status = connection.run_sql("show global status like 'Threads_connected'").await?;
    let used: i64 =
        status.into_iter().flatten().flatten().next_back().and_then(|text| text.parse().ok()).unwrap_or(0);
    // Ours goes before the first session comes.
    found.note_connections(plan, most - used + 1);
    Ok(())
}

/// Has the target prepare each distinct statement, without running any.
async fn statements_exist(
    plan: &Plan,
    statements: &BTreeSet<u32>,
    connection: &mut Connection,
    login: &Login,
    found: &mut Preflight,
) -> Result<(), ConnectError> {
    // What is not found may be found then.
    let makes = Makes::of(plan, |one| one.label.starts_with("use "));
    let mut missing = Missing::default();
    for statement in to_prepare(plan, statements) {
        found.statements_checked += 1;
        match connection.try_prepare(&statement.sample).await {
            Err(ConnectError::Server { sqlstate, message })
                if UNDEFINED.contains(&sqlstate.as_str())
                    || UNDEFINED_NUMBERS.iter().any(|number| message.ends_with(number)) =>
            {
                let later = makes.anything
                    || makes.objects && message.ends_with(NO_ROUTINE)
                    || makes.in_tables_of(statement) && sqlstate == NO_COLUMN;
                missing.push(later, format!("{message}: {}", statement.label));
            }
            // Statements that cannot be prepared, several in one text: no evidence of anything.
            Ok(()) | Err(ConnectError::Server { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    missing.note(login, found);
    Ok(())
}
