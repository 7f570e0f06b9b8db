// SPDX-License-Identifier: Apache-2.0
//! A workload from end to end: `underpass trace` records a server under pgbench, `underpass replay` plays it on a copy that was restored
//! from a snapshot, and a second `underpass trace` records the replay. Without encryption, by packets; with it, by probes.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use common::{binary, skipped, start_recorder, stop_recorder, wait};
use underpass_testkit::{Authority, Batch, Client, Postgres, assert_every_plot_is_drawn};
use underpass_trace::{Outcome, Reader, Record};

/// What shows whether two servers have the same data: TPC-B's tables without the times in them, and the fight's.
const STATES: [&str; 5] = [
    "select md5(string_agg(aid || ':' || bid || ':' || abalance, ',' order by aid)) from pgbench_accounts",
    "select string_agg(tid || ':' || tbalance, ',' order by tid) from pgbench_tellers",
    "select string_agg(bid || ':' || bbalance, ',' order by bid) from pgbench_branches",
    "select string_agg(h::text, ',' order by h) from (select tid, bid, aid, delta from pgbench_history) h",
    "select string_agg(id || ':' || v, ',' order by id) from t",
];
/// Sessions that fight, and what each of them does.
const FIGHTERS: usize = 5;
const UPDATES: usize = 8;

fn run(command: &mut Command) -> Output {
    let output = command.stdin(Stdio::null()).output().expect("a command");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {text}{}", String::from_utf8_lossy(&output.stdout));
    output
}

/// A client program of PostgreSQL, told to encrypt or not to.
fn client(program: &str, port: u16, tls: bool) -> Command {
    let mut command = Command::new(program);
    command.args(["-h", "127.0.0.1", "-p", &port.to_string(), "-U", "postgres"]);
    command.env("PGSSLMODE", if tls { "require" } else { "disable" });
    command
}

/// Dumps a server, unless it is newer than `pg_dump`, which refuses that then: `PG_BIN` may name one (tests/versions).
fn dump(server: &Postgres, to: &Path) {
    let told = run(Command::new("pg_dump").arg("--version"));
    let told = String::from_utf8_lossy(&told.stdout).into_owned();
    let major = |text: &str| {
        let number: String = text.chars().skip_while(|c| !c.is_ascii_digit()).collect();
        number.split(|c: char| !c.is_ascii_digit()).next().and_then(|major| major.parse::<u32>().ok())
    };
    if major(&server.sql_value("show server_version").expect("a version")) <= major(&told) {
        run(client("pg_dump", server.port(), false).arg("-f").arg(to).arg("postgres"));
    }
}

/// Servers of one kind.
struct Kind {
    authority: Option<Authority>,
}

impl Kind {
    fn tls(&self) -> bool {
        self.authority.is_some()
    }

    fn server(&self) -> Postgres {
        let builder = Postgres::builder();
        match &self.authority {
            Some(authority) => builder.tls(authority).start(),
            None => builder.start(),
        }
        .expect("a server")
    }

    fn original(&self) -> Postgres {
        let server = self.server();
        run(client("pgbench", server.port(), false).args(["-i", "-q", "-s", "1", "-I", "dtgp", "postgres"]));
        server
            .sql(
                "create table t (id int primary key, v text); insert into t values (1, ''), (2, ''); \
                  create table log (number serial, id int, tag text)",
            )
            .expect("tables");
        server
    }

    /// A server with the data of a snapshot; without one, made as the original was, which has the same data before the recording.
    fn copy(&self, snapshot: &Path) -> Postgres {
        if !snapshot.exists() {
            return self.original();
        }
        let server = self.server();
        run(client("psql", server.port(), false).args(["-q", "-v", "ON_ERROR_STOP=1", "-f"]).arg(snapshot));
        server
    }

    /// Records what `work` does with a server, until the last client has gone.
    fn record(&self, server: &Postgres, directory: &Path, work: impl FnOnce()) {
        let (port, path) = (server.port().to_string(), directory.display().to_string());
        let probes = if self.tls() { "always" } else { "never" };
        let recorder = start_recorder(&["-p", &port, "-o", &path, "--probes", probes, "--require-lossless"]);
        work();
        // Over a Unix socket, which is another session of a trace by probes; pgbench's are told by their name.
        let clients = "select count(*) from pg_stat_activity \
                       where backend_type = 'client backend' and pid <> pg_backend_pid()";
        wait("the last client to go", || {
            (server.sql_value(clients).expect("statistics") == "0").then_some(())
        });
        let (code, text) = stop_recorder(recorder);
        assert_eq!(code, Some(0), "{text}");
    }

    /// `underpass replay` at once, with an order; what differs makes it fail, and so do sessions that waited for each other. Returns its
    /// counts.
    fn replay(&self, trace: &Path, to: &Postgres, order: &str) -> serde_json::Value {
        let mode = if self.tls() { "require" } else { "disable" };
        let target =
            format!("host=127.0.0.1 port={} user=postgres dbname=postgres sslmode={mode}", to.port());
        let mut command = Command::new(binary());
        command.args(["replay", "--pace", "asap", "--application-name", "pgbench", "--require-equal"]);
        let page = trace.with_extension("html");
        command.args(["--order", order, "--json", "-", "--to", &target]).arg("--page").arg(&page);
        let output = run(command.arg(trace));
        assert_every_plot_is_drawn(&page);
        let page = fs::read_to_string(&page).expect("a page");
        assert!(
            page.contains("Replay: latency there and here") && page.contains("What this trace does not know")
        );
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(report["counts"]["released"], 0, "nobody waited for what could not come");
        report["counts"].clone()
    }
}

/// TPC-B by two protocols, then a fight over two rows in which the order of updates shows.
fn workload(port: u16, tls: bool, directory: &Path) {
    for protocol in ["simple", "prepared"] {
        let tpcb = ["-n", "-c", "4", "-j", "2", "-t", "20", "--random-seed", "7", "-M", protocol, "postgres"];
        run(client("pgbench", port, tls).args(tpcb));
    }
    // Every client begins later than the one before, which a replay without order and pauses does not know. The row is held for a while
    // after it has changed, so that what is answered first has also happened first, however late a process wakes up.
    let mut script = String::from("\\set delay 100 * :client_id\n\\sleep :delay ms\n");
    for update in 0..UPDATES {
        let row = 1 + update % 2;
        let tag = format!(":client_id || '.{update}'");
        script += &format!(
            "update t set v = md5(v || {tag}) where id = {row} \\; \
             insert into log (id, tag) values ({row}, {tag}) \\; select pg_sleep(0.02);\n"
        );
    }
    let path = directory.join("fight.sql");
    fs::write(&path, script).expect("a script");
    run(client("pgbench", port, tls)
        .args(["-n", "-c", &FIGHTERS.to_string(), "-t", "1", "-f"])
        .arg(&path)
        .arg("postgres"));
}

/// One session: how it began, what it sent, what it was answered. No times, no addresses, no process IDs, no keys.
type Session = (String, Vec<Vec<u8>>, Vec<String>);

/// The sessions of pgbench in a trace, in no order.
fn sessions(trace: &Path) -> Vec<Session> {
    let mut reader = Reader::open(trace).expect("a trace");
    let mut sessions: BTreeMap<u64, Session> = BTreeMap::new();
    while let Some(record) = reader.next().expect("a record") {
        if let Record::SessionStart(start) = &record
            && start.application_name.as_deref() == Some(b"pgbench")
        {
            let begin = format!("{:?} {:?} {:?}", start.user, start.database, start.parameters);
            sessions.insert(start.session.0, (begin, Vec::new(), Vec::new()));
        }
        let Some(session) = record.session().and_then(|session| sessions.get_mut(&session.0)) else {
            continue;
        };
        match record {
            Record::Frontend(message) => session.1.push(message.message.into_owned()),
            Record::Response(response) => session.2.push(match &response.outcome {
                Outcome::Error(error) => String::from_utf8_lossy(&error.sqlstate).into_owned(),
                outcome => format!("{outcome:?} {}", response.rows),
            }),
            Record::Ready(ready) => session.2.push(format!("{:?}", ready.status)),
            _ => {}
        }
    }
    assert!(reader.damage().none());
    let mut sessions: Vec<Session> = sessions.into_values().collect();
    sessions.sort();
    sessions
}

/// Whether the updates of each row were answered in the order in which they happened, as a trace has it. A server that gets no processor
/// between letting go of a lock and answering, for longer than the next one holds the row, is answered late; nobody outside can know.
fn is_in_order(trace: &Path, server: &Postgres) -> bool {
    let mut reader = Reader::open(trace).expect("a trace");
    let (mut asked, mut answered) = (BTreeMap::new(), Vec::new());
    while let Some(record) = reader.next().expect("a record") {
        match record {
            Record::Frontend(message) => {
                let text = String::from_utf8_lossy(&message.message).into_owned();
                if let Some((_, values)) = text.split_once("into log (id, tag) values (") {
                    let (id, rest) = values.split_once(", ").expect("row and tag");
                    let tag = rest.split(')').next().expect("tag").replace([' ', '\'', '|'], "");
                    asked.insert((message.session, message.offset), (id.to_owned(), tag));
                }
            }
            Record::Ready(ready) => {
                if let Some(update) = asked.remove(&(ready.session, ready.request)) {
                    answered.push((ready.time_ns, update));
                }
            }
            _ => {}
        }
    }
    answered.sort();
    assert_eq!(answered.len(), FIGHTERS * UPDATES);
    ["1", "2"].into_iter().all(|row| {
        let log = format!("select tag from log where id = {row} order by number");
        let happened: Vec<String> = server.sql(&log).expect("log").into_iter().flatten().flatten().collect();
        answered.iter().filter(|(_, (id, _))| id == row).map(|(_, (_, tag))| tag).eq(happened.iter())
    })
}

fn state(server: &Postgres) -> Vec<String> {
    STATES.iter().map(|query| server.sql_value(query).expect("state")).collect()
}

/// A recording in whose order things happened, its server, and the snapshot from before.
fn recording(kind: &Kind, parent: &Path) -> (PathBuf, Postgres, PathBuf) {
    for attempt in 0..5 {
        let directory = parent.join(attempt.to_string());
        fs::create_dir(&directory).expect("a directory");
        let (trace, snapshot) = (directory.join("trace"), directory.join("snapshot.sql"));
        let original = kind.original();
        dump(&original, &snapshot);
        kind.record(&original, &trace, || workload(original.port(), kind.tls(), &directory));
        if is_in_order(&trace, &original) {
            return (trace, original, snapshot);
        }
    }
    panic!("the machine is too busy to record anything in its order");
}

/// Returns the sessions of the recording.
fn end_to_end(kind: &Kind) -> Vec<Session> {
    let parent = tempfile::tempdir().expect("a directory");
    let (trace, original, snapshot) = recording(kind, parent.path());
    let (expected, recorded) = (state(&original), sessions(&trace));
    drop(original);

    let copy = kind.copy(&snapshot);
    let again = parent.path().join("again");
    kind.record(&copy, &again, || {
        kind.replay(&trace, &copy, "commit");
    });
    assert_eq!(state(&copy), expected, "the order of commits makes the same data");
    let replayed = sessions(&again);
    assert_eq!(recorded.len(), replayed.len());
    for (there, here) in recorded.iter().zip(&replayed) {
        assert_eq!(there, here, "the recording of the replay is the recording");
    }

    let other = kind.copy(&snapshot);
    kind.replay(&trace, &other, "none");
    let unordered = state(&other);
    assert_eq!(unordered[..4], expected[..4], "sums do not depend on the order");
    assert_ne!(unordered[4], expected[4], "a fight does");
    recorded
}

#[test]
fn a_statement_that_was_cancelled_is_cancelled_again() {
    if skipped() {
        return;
    }
    let kind = Kind { authority: None };
    let parent = tempfile::tempdir().expect("a directory");
    let (original, trace) = (kind.server(), parent.path().join("trace"));
    let options = original.options("postgres", "postgres").parameter("application_name", "pgbench");
    kind.record(&original, &trace, || {
        let mut client = Client::connect(&options).expect("connect");
        client.send(&Batch::new().query("select pg_sleep(600)")).expect("send");
        wait("the statement", || {
            let sleeping = "select count(*) from pg_stat_activity where wait_event = 'PgSleep'";
            (original.sql_value(sleeping).expect("statistics") == "1").then_some(())
        });
        client.cancel().expect("cancel");
        assert!(client.response().expect("an answer").ok().is_err());
        client.query("select 1").expect("an answer").ok().expect("a row");
        client.terminate().expect("terminate");
    });
    let copy = kind.server();
    let counts = kind.replay(&trace, &copy, "none");
    assert_eq!((&counts["cancels"], &counts["equal"]), (&1.into(), &2.into()), "{counts}");
}

#[test]
fn a_recorded_workload_makes_the_same_data_on_a_copy() {
    if skipped() {
        return;
    }
    let plain = end_to_end(&Kind { authority: None });
    let tls = end_to_end(&Kind { authority: Some(Authority::new("underpass test").expect("an authority")) });
    // One workload, recorded in two ways.
    assert_eq!(plain.len(), tls.len());
    for (one, other) in plain.iter().zip(&tls) {
        assert_eq!(one, other, "without encryption and with it");
    }
}
