// SPDX-License-Identifier: Apache-2.0
//! Looks at the pooler's console while the clients run (SHOW POOLS): a run without queueing proves little.

use std::time::Duration;

use tokio::time::{sleep, timeout};

use crate::batch::Batch;
use crate::config::Config;
use crate::connection::{Connection, Lost, Target};
use crate::report::Observed;
use crate::run::Shared;

const INTERVAL: Duration = Duration::from_millis(50);

/// One look: clients waiting, server connections of any state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Look {
    waiting: u64,
    servers: u64,
}

/// Observes until the run ends.
pub(crate) async fn observe(config: &Config, shared: &Shared) -> Result<Option<Observed>, Lost> {
    let Some(user) = config.console_user.clone() else { return Ok(None) };
    let target = Target {
        user,
        password: config.console_password.clone(),
        database: "pgbouncer".into(),
        ..config.target()
    };
    let limit = config.silence_limit();
    let silent = |_| Lost::Protocol(format!("console silent for {limit:?}"));
    let mut connection =
        timeout(limit, Connection::connect(&target, "soak-monitor")).await.map_err(silent)??;
    let mut observed = Observed::default();
    while !shared.is_over() {
        sleep(INTERVAL).await;
        // Clients are still logging in at the beginning, and leave at the end: neither says anything about the run.
        if !shared.is_busy(config) {
            continue;
        }
        let look = timeout(limit, look(&mut connection, config)).await.map_err(silent)??;
        observed.looks += 1;
        observed.looks_with_queue += u64::from(look.waiting > 0);
        observed.waiting_sum += look.waiting;
        observed.waiting_max = observed.waiting_max.max(look.waiting);
        observed.servers_max = observed.servers_max.max(look.servers);
    }
    connection.terminate().await;
    Ok(Some(observed))
}

async fn look(connection: &mut Connection, config: &Config) -> Result<Look, Lost> {
    connection.send(&Batch::new().query("show pools")).await?;
    let mut names = Vec::new();
    let mut look = Look { waiting: 0, servers: 0 };
    loop {
        match connection.next().await? {
            b'T' => names = column_names(connection.body()),
            b'D' => {
                let values = columns(connection.body());
                let text = |name: &str| {
                    let at = names.iter().position(|column| column == name)?;
                    values.get(at).cloned()
                };
                let number = |name: &str| text(name).and_then(|value| value.parse().ok()).unwrap_or(0u64);
                if text("database").is_some_and(|name| name == config.database) {
                    look.waiting += number("cl_waiting");
                    // Those being cancelled and those that log in are servers of the pool as well; `sv_active_cancel` are
                    // not: they are the short connections that carry a CancelRequest.
                    look.servers += names
                        .iter()
                        .filter(|name| name.starts_with("sv_") && *name != "sv_active_cancel")
                        .map(|name| number(name))
                        .sum::<u64>();
                }
            }
            b'E' => {
                return Err(Lost::Refused {
                    sqlstate: connection.field(b'C'),
                    message: connection.field(b'M'),
                });
            }
            b'Z' => return Ok(look),
            _ => {}
        }
    }
}

fn column_names(body: &[u8]) -> Vec<String> {
    let mut names = Vec::new();
    let mut rest = body.get(2..).unwrap_or_default();
    while let Some(end) = rest.iter().position(|byte| *byte == 0) {
        names.push(String::from_utf8_lossy(&rest[..end]).into_owned());
        // 18 bytes of type information follow the name's zero.
        rest = rest.get(end + 19..).unwrap_or_default();
    }
    names
}

fn columns(body: &[u8]) -> Vec<String> {
    let mut values = Vec::new();
    let mut rest = body.get(2..).unwrap_or_default();
    while let Some((length, tail)) = rest.split_first_chunk::<4>() {
        let value = usize::try_from(i32::from_be_bytes(*length)).ok().and_then(|length| tail.get(..length));
        values.push(value.map(|value| String::from_utf8_lossy(value).into_owned()).unwrap_or_default());
        rest = &tail[value.map_or(0, <[u8]>::len)..];
    }
    values
}
