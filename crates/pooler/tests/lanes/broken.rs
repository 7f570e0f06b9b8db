// SPDX-License-Identifier: Apache-2.0
//! Servers whose connection breaks, or that fall silent, while a lane carries their link: in the middle of an answer and in the middle of a COPY.

use std::process::Command;

use underpass_testkit::Message;

use super::*;

/// How a server ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// Its socket sends RST, as that of a host that has forgotten the connection.
    Reset,
    /// Its process is stopped.
    Silence,
}

/// What it is doing then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// It has sent a whole message of its answer.
    BetweenMessages,
    /// PostgreSQL sends whenever it has 8 KiB, in the middle of a row.
    InRow,
    InCopyOut,
    InCopyIn,
}

const ROWS: &str = "select repeat('x', 3000), case when n = 10 then length(pg_sleep(600)::text) end \
                    from generate_series(1, 20) n";
/// Of nine rows, so many are whole in what comes.
const WHOLE_ROWS: usize = 8;

impl Place {
    const ALL: [Self; 4] = [Self::BetweenMessages, Self::InRow, Self::InCopyOut, Self::InCopyIn];

    fn sql(self) -> String {
        match self {
            Self::BetweenMessages => "do $$ begin raise notice 'first'; perform pg_sleep(600); end $$".into(),
            Self::InRow => ROWS.into(),
            Self::InCopyOut => format!("copy ({ROWS}) to stdout"),
            Self::InCopyIn => "copy broken from stdin".into(),
        }
    }

    /// Reads, and writes, up to where the server is to end.
    fn reach(self, client: &mut Client) -> Result<()> {
        let (tag, count) = match self {
            Self::BetweenMessages => (b'N', 1),
            Self::InRow => (b'D', WHOLE_ROWS),
            Self::InCopyOut => (b'd', WHOLE_ROWS),
            Self::InCopyIn => (b'G', 1),
        };
        for _ in 0..count {
            while client.recv()?.tag != tag {}
        }
        if self == Self::InCopyIn {
            for n in 0..20 {
                client.send(&Batch::new().copy_data(format!("{n}\n").as_bytes()))?;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}

/// A stopped process, which goes on with the end of the value, whatever the test does.
struct Stopped(String);

impl Stopped {
    fn new(pid: &str) -> Self {
        signal(pid, "-STOP");
        Self(pid.to_owned())
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        signal(&self.0, "-CONT");
    }
}

fn signal(pid: &str, signal: &str) {
    assert!(Command::new("kill").args([signal, pid]).status().is_ok_and(|status| status.success()));
}

/// Has the kernel end a backend's connection: the backend's own end is destroyed, and its peer gets RST.
fn reset(server: &Postgres, client_port: &str) {
    let ends = format!("src 127.0.0.1:{} dst 127.0.0.1:{client_port}", server.port());
    let told = Command::new("ss").args(["-K", "-tn", &ends]).output().expect("iproute2");
    let told = String::from_utf8_lossy(&told.stdout).into_owned();
    assert!(told.contains("ESTAB"), "the kernel destroys no sockets (CONFIG_INET_DIAG_DESTROY): {told}");
}

/// A backend that sleeps does not notice that its connection is gone.
fn end(server: &Postgres, pid: &str) -> Result<()> {
    let begun = Instant::now();
    let ended = format!("select pg_terminate_backend(pid) from pg_stat_activity where pid = {pid}");
    while !server.sql(&ended)?.is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(20), "backend {pid} goes on");
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Requests that a lane forwarded. What a client of lane B sends by TCP is among lane A's.
fn requests(pooler: &Underpass, lane: &str) -> Result<u64> {
    let beside = if lane == "B" { kernel(pooler, "A", "requests")? } else { 0 };
    Ok(kernel(pooler, lane, "requests")? + beside)
}

/// A client that its lane carries.
fn carried_client(pooler: &Underpass, lane: &str) -> Result<Client> {
    let mut client = client(pooler)?;
    let (begun, before) = (Instant::now(), kernel(pooler, lane, "xacts")?);
    while kernel(pooler, lane, "xacts")? == before {
        assert!(begun.elapsed() < Duration::from_secs(20), "lane {lane} carries nothing");
        value(&mut client, "select 1")?;
    }
    Ok(client)
}

#[test]
fn a_server_that_breaks_off_ends_its_client_only() -> Result<()> {
    each_lane(
        |ini| ini.set("query_timeout", "2"),
        |server, pooler, lane| {
            server.sql("create table broken (x int)")?;
            let mut beside = carried_client(pooler, lane)?;
            for how in [End::Reset, End::Silence] {
                for place in Place::ALL {
                    let what = format!("lane {lane}, {how:?}, {place:?}");
                    let mut inside = carried_client(pooler, lane)?;
                    inside.query("begin")?.ok()?;
                    let mut client = carried_client(pooler, lane)?;
                    let before = requests(pooler, lane)?;
                    client.send(&Batch::new().query(&place.sql()))?;
                    place.reach(&mut client)?;
                    assert!(requests(pooler, lane)? > before, "{what}: not in its lane");

                    let asked = "select pid, client_port from pg_stat_activity \
                                 where client_port >= 0 and state = 'active'";
                    let rows = server.sql(asked)?;
                    let [row] = rows.as_slice() else { panic!("{what}: {rows:?}") };
                    let (pid, port) = (row[0].as_deref().unwrap_or(""), row[1].as_deref().unwrap_or(""));
                    let stopped = match how {
                        End::Reset => {
                            reset(server, port);
                            None
                        }
                        End::Silence => Some(Stopped::new(pid)),
                    };
                    let begun = Instant::now();
                    let told = client.until_closed()?;
                    assert!(begun.elapsed() < Duration::from_secs(5), "{what}: after {:?}", begun.elapsed());
                    let error = told.last().and_then(|message| message.error()).map(|error| error.sqlstate);
                    let expected = match (place, how) {
                        // Behind half a message it would be a part of that.
                        (Place::InRow | Place::InCopyOut, _) => None,
                        (_, End::Reset) => Some("08006"),
                        (_, End::Silence) => Some("57014"),
                    };
                    assert_eq!(error.as_deref(), expected, "{what}: {told:?}");
                    // A backend whose socket is destroyed lives on, and in lanes A and B its own last words may come first.
                    let is_error = |message: &Message| message.error().is_some();
                    assert!(told.iter().all(is_error), "{what}: {told:?}");
                    assert!(
                        told.len() == usize::from(expected.is_some()) || how == End::Reset,
                        "{what}: {told:?}"
                    );

                    // Neither who is in a transaction nor who comes now notices, the server being still as it is.
                    assert_eq!(value(&mut inside, "select 2")?, "2", "{what}");
                    assert_eq!(inside.query("commit")?.status(), Some(b'I'), "{what}");
                    for n in 0..10 {
                        assert_eq!(value(&mut beside, &format!("select {n}"))?, n.to_string(), "{what}");
                    }
                    match stopped {
                        Some(stopped) => drop(stopped),
                        None => end(server, pid)?,
                    }
                    // All four can be had again, and what was copied in part is not there.
                    let mut all = (0..4).map(|_| self::client(pooler)).collect::<Result<Vec<_>>>()?;
                    for one in &mut all {
                        assert_eq!(one.query("begin")?.status(), Some(b'T'), "{what}");
                    }
                    for one in &mut all {
                        assert_eq!(value(one, "select count(*) from broken")?, "0", "{what}");
                        assert_eq!(one.query("commit")?.status(), Some(b'I'), "{what}");
                    }
                }
            }
            Ok(())
        },
    )
}
