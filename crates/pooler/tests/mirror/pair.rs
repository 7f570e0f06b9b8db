// SPDX-License-Identifier: Apache-2.0
//! Two servers, and a pooler that mirrors the first to the second.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

use underpass_testkit::{Client, Ini, MockServer, Pooler, Postgres, Reply, Result, Step, Underpass};

/// How a mirror may be kept. What is asked of one of them alone asks for it by its place.
pub const MODES: [&str; 3] = [
    "mode = async",
    "mode = sync\nsync_timeout = 30",
    "mode = sync\nsync_each = transaction\nsync_timeout = 30",
];

/// Longest wait for anything, on a loaded machine.
pub const LIMIT: Duration = Duration::from_secs(60);

pub struct Pair {
    pub pooler: Underpass,
    pub here: Postgres,
    pub there: Postgres,
    settings: BTreeMap<String, String>,
    lanes: Option<Lanes>,
}

/// Kernel lanes, in force.
#[derive(Clone, Copy)]
pub struct Lanes {
    /// `same_host` of `[underpass]`: `server` for lane A, `off` for lane D, `both` for lane B.
    pub same_host: &'static str,
    /// Further lines of that section.
    pub lines: &'static str,
    /// `UNDERPASS_TEST_FLIP`.
    pub flip: Option<&'static str>,
}

impl Lanes {
    /// Lane D and lane A.
    pub const EACH: [(&'static str, Self); 2] = [("D", Self::new("off")), ("A", Self::new("server"))];

    /// Lane B, opted in.
    pub const B: Self = Self::new("both");

    const fn new(same_host: &'static str) -> Self {
        Self { same_host, lines: "", flip: None }
    }
}

/// A row of SHOW MIRRORS or SHOW MIRROR_DIFF, by column.
pub type Row = BTreeMap<String, String>;

pub fn server() -> Result<Postgres> {
    let server = Postgres::builder()
        .setting("shared_preload_libraries", "pg_stat_statements")
        .setting("pg_stat_statements.track", "top")
        .start()?;
    server.sql("create extension pg_stat_statements")?;
    Ok(server)
}

impl Pair {
    /// Transaction pooling; `mirror` holds further lines of the mirror's section.
    pub fn start(mirror: &str) -> Result<Self> {
        Self::start_with(&[("pool_mode", "transaction")], mirror)
    }

    pub fn start_with(settings: &[(&str, &str)], mirror: &str) -> Result<Self> {
        let pair = Self::start_in(None, settings, mirror)?;
        Ok(pair.expect("only lanes need root"))
    }

    /// With kernel lanes. `None` where we are not root.
    pub fn start_in(lanes: Option<Lanes>, settings: &[(&str, &str)], mirror: &str) -> Result<Option<Self>> {
        let (here, there) = (server()?, server()?);
        let settings: BTreeMap<String, String> =
            settings.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
        let port = there.port();
        let Some(ini) = ini(lanes, &settings, &here, Some(("*", port, mirror))) else { return Ok(None) };
        let pooler = Underpass::start(&ini)?;
        Ok(Some(Self { pooler, here, there, settings, lanes }))
    }

    /// A setting of `[pgbouncer]`, from the next RELOAD on.
    pub fn set(&mut self, key: &str, value: &str) {
        self.settings.insert(key.into(), value.into());
    }

    /// Other lines in the mirror's section, or no mirror; RELOAD.
    pub fn reload(&mut self, mirror: Option<&str>) -> Result<()> {
        self.reload_at(self.there.port(), mirror)
    }

    /// The same, with the mirror at this port.
    pub fn reload_at(&mut self, port: u16, mirror: Option<&str>) -> Result<()> {
        self.reload_to(mirror.map(|mirror| ("*", port, mirror)))
    }

    /// The same, with the mirror for these databases.
    pub fn reload_for(&mut self, databases: &str, mirror: &str) -> Result<()> {
        self.reload_to(Some((databases, self.there.port(), mirror)))
    }

    fn reload_to(&mut self, mirror: Option<(&str, u16, &str)>) -> Result<()> {
        let text = ini(self.lanes, &self.settings, &self.here, mirror);
        let text = text.expect("we were root");
        self.pooler.rewrite(&text)?;
        self.pooler.console("RELOAD")?.ok().map(drop)
    }

    /// The same SQL on both servers, past the pooler.
    pub fn both(&self, sql: &str) -> Result<()> {
        self.here.sql(sql)?;
        self.there.sql(sql).map(drop)
    }

    pub fn client(&self) -> Result<Client> {
        Client::connect(&self.pooler.options("postgres", "postgres"))
    }

    /// Waits until the mirror has been checked; a client must have come.
    pub fn wait_on(&self) -> Result<()> {
        drop(self.client()?);
        self.wait_state("on")
    }

    pub fn wait_state(&self, state: &str) -> Result<()> {
        eventually(&format!("the mirror is {state}\n{}", self.pooler.log()), || {
            Ok(self.mirrors()?.first().is_some_and(|row| row["state"] == state))
        })
    }

    pub fn mirrors(&self) -> Result<Vec<Row>> {
        table(&self.pooler, "SHOW MIRRORS")
    }

    pub fn account(&self) -> Result<Account> {
        Ok(Account(self.mirrors()?.into_iter().next().expect("a mirror")))
    }

    /// Waits until nothing is queued, and nothing more comes: what a lane forwarded is told a moment later.
    pub fn settled(&self) -> Result<Account> {
        let (mut seen, mut looks) = (0, 0);
        eventually(&format!("the queue empties\n{}", self.pooler.log()), || {
            let account = self.account()?;
            account.check();
            // A client may have its answer before the pooler has done its bookkeeping; memory is taken from the first request on.
            let is_empty = account.get("queued") == 0 && account.get("queued_bytes") == 0;
            let total = account.get("transactions") + account.get("filtered");
            looks = if is_empty && total == seen { looks + 1 } else { 0 };
            seen = total;
            Ok(looks >= 3)
        })?;
        self.account()
    }

    /// Waits until what was executed has been compared, and returns SHOW MIRROR_DIFF.
    pub fn differences(&self) -> Result<Vec<Row>> {
        self.settled()?;
        // Workers pass on what they collected ten times a second.
        std::thread::sleep(Duration::from_millis(400));
        table(&self.pooler, "SHOW MIRROR_DIFF")
    }

    /// How many transactions ended in a lane (`A`, `D`), or in user space (`user`).
    pub fn xacts(&self, lane: &str) -> Result<u64> {
        let rows = table(&self.pooler, "SHOW KERNEL")?;
        let row = rows.iter().find(|row| row["name"] == lane && row["item"] == "xacts");
        Ok(row.map_or(0, |row| row["value"].parse().expect("a number")))
    }

    /// The same query gives the same on both servers.
    pub fn assert_same(&self, sql: &str) -> Result<()> {
        let (here, there) = (self.here.sql(sql)?, self.there.sql(sql)?);
        assert!(!here.is_empty(), "{sql} gives nothing");
        assert_eq!(here, there, "{sql}\n{}", self.pooler.log());
        Ok(())
    }

    /// Whether a session with the mirror waits for a lock there.
    pub fn waits_there(&self) -> Result<bool> {
        let waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'";
        Ok(self.there.sql_value(waiting)? != "0")
    }

    /// How often statements like this were executed, by the server's own count.
    pub fn calls(server: &Postgres, like: &str) -> Result<u64> {
        let sql = format!(
            "select coalesce(sum(calls), 0)::bigint from pg_stat_statements where query ilike '{like}'"
        );
        Ok(server.sql_value(&sql)?.parse().expect("a number"))
    }
}

/// Runs pgbench as superuser on database `postgres`.
pub fn pgbench(port: u16, arguments: &[&str]) {
    let output = Command::new("pgbench")
        .args(["-h", "127.0.0.1", "-p", &port.to_string(), "-U", "postgres"])
        .args(arguments)
        .arg("postgres")
        .output()
        .expect("pgbench");
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn ini(
    lanes: Option<Lanes>,
    settings: &BTreeMap<String, String>,
    here: &Postgres,
    mirror: Option<(&str, u16, &str)>,
) -> Option<Ini> {
    let mut ini = Ini::for_server(here).set("server_login_retry", "1");
    for (key, value) in settings {
        ini = ini.set(key, value);
    }
    if let Some(lanes) = lanes {
        ini = ini.lanes(lanes.same_host, 2)?.tail(lanes.lines);
        if let Some(flip) = lanes.flip {
            ini = ini.environment("UNDERPASS_TEST_FLIP", flip);
        }
    }
    Some(match mirror {
        Some((databases, port, lines)) => ini.tail(&format!(
            "[underpass:mirror:next]\ndatabases = {databases}\nhost = 127.0.0.1\nport = {port}\n{lines}"
        )),
        None => ini,
    })
}

/// A row of SHOW MIRRORS whose sums are checked.
#[derive(Debug)]
pub struct Account(pub Row);

impl Account {
    pub fn get(&self, column: &str) -> u64 {
        self.0[column].parse().unwrap_or_else(|_| panic!("{column}: {:?}", self.0))
    }

    /// Sent = executed + queued + dropped, and dropped is the sum of its reasons.
    pub fn check(&self) {
        let reasons = [
            "queue_full",
            "too_large",
            "not_ready",
            "disabled",
            "connection_lost",
            "session_lost",
            "session_state",
            "ring_full",
        ];
        assert_eq!(
            self.get("dropped"),
            reasons.iter().map(|reason| self.get(reason)).sum::<u64>(),
            "{self:?}"
        );
        // The counters are read one after the other while transactions end; at rest they are exact.
        if self.get("queued") == 0 {
            assert_eq!(self.get("transactions"), self.get("executed") + self.get("dropped"), "{self:?}");
        }
    }
}

pub fn table(pooler: &Underpass, show: &str) -> Result<Vec<Row>> {
    let answer = pooler.console(show)?.ok()?;
    let names = answer.column_names();
    let row = |cells: Vec<Option<String>>| {
        names.iter().cloned().zip(cells.into_iter().map(Option::unwrap_or_default)).collect()
    };
    Ok(answer.rows().into_iter().map(row).collect())
}

pub fn eventually(what: &str, holds: impl FnMut() -> Result<bool>) -> Result<()> {
    assert!(eventually_or_not(holds)?, "{what}");
    Ok(())
}

/// Whether it held in time.
pub fn eventually_or_not(mut holds: impl FnMut() -> Result<bool>) -> Result<bool> {
    let begun = Instant::now();
    while !holds()? {
        if begun.elapsed() >= LIMIT {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(30));
    }
    Ok(true)
}

/// Nothing that PostgreSQL says.
const GARBAGE: &[u8] = b"\xff\xff\xff\xff\xffgarbage";

/// A mirror that answers a login so, and one that does when it is asked who it is.
pub fn garbage_at_first() -> Result<[MockServer; 2]> {
    let send = || Step::Send(Reply::new().raw(GARBAGE));
    Ok([
        MockServer::start(move |_| vec![Step::Startup, send(), Step::WaitClose])?,
        MockServer::start(move |_| vec![Step::Login, Step::Expect(b'Q'), send(), Step::WaitClose])?,
    ])
}

/// A mirror that answers well at first, when it is asked who it is: as each connection is, and before the first. Then it does not.
pub fn garbage() -> Result<MockServer> {
    MockServer::start(|_| {
        vec![
            Step::Login,
            Step::Expect(b'Q'),
            Step::Send(Reply::new().single_row("identity", "1 1")),
            Step::Expect(b'Q'),
            Step::Send(Reply::new().single_row("identity", "1 1")),
            Step::Until(b'Q'),
            Step::Send(Reply::new().raw(GARBAGE)),
            Step::WaitClose,
        ]
    })
}
