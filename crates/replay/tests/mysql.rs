// SPDX-License-Identifier: Apache-2.0
//! MariaDB, and MySQL 5.6 in its place (`tests/versions`): what was recorded of its clients is played on another one, prepared statements and
//! local files included, and with order `commit` it makes the same data. Skipped where MariaDB is not installed.

mod recorder;

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use recorder::Recorder;
use underpass_mysql::auth::native_password;
use underpass_mysql::capability::{self, Capabilities};
use underpass_mysql::command::{
    COM_CHANGE_USER, COM_INIT_DB, COM_QUERY, COM_QUIT, COM_RESET_CONNECTION, COM_STMT_CLOSE,
    COM_STMT_EXECUTE, COM_STMT_PREPARE, COM_STMT_SEND_LONG_DATA, statement_number,
};
use underpass_mysql::exchange::{End, Exchange, Session, Step};
use underpass_mysql::handshake::{AUTH_SWITCH, Greeting, Login, NATIVE_PASSWORD};
use underpass_mysql::packet;
use underpass_replay::compare::Kind;
use underpass_replay::plan::{self, Filter, Plan, Reason, Rows};
use underpass_replay::preflight::Preflight;
use underpass_replay::run::{Options, Pace};
use underpass_replay::{Error, Identities, Target, preflight};
use underpass_testkit::{Authority, Mariadb};
use underpass_trace::{Level, Meta, Outcome, PreparedFill, Protocol, Record, Redaction, SessionStart};

const FIGHTERS: usize = 4;
const UPDATES: usize = 10;
const STATE: &str = "select group_concat(id, '=', v order by id) from shop.t";
/// What shows whether two banks have the same money: no times.
const BANK: [&str; 4] = [
    "select md5(group_concat(aid, ':', balance order by aid)) from shop.accounts",
    "select group_concat(tid, ':', balance order by tid) from shop.tellers",
    "select group_concat(bid, ':', balance order by bid) from shop.branches",
    "select md5(group_concat(tid, ':', aid, ':', delta order by tid, aid, delta)) from shop.history",
];

fn missing() -> bool {
    if Mariadb::is_missing() {
        eprintln!("skipped: mariadbd is not installed");
    }
    Mariadb::is_missing()
}

/// Makes a bank without money.
fn make_bank(server: &Mariadb) {
    let zeros = |count: u32| (1..=count).map(|id| format!("({id}, 0)")).collect::<Vec<_>>().join(", ");
    let script = format!(
        "use shop; set global group_concat_max_len = 1000000; \
         create table accounts (aid int primary key, balance int not null); \
         create table tellers (tid int primary key, balance int not null); \
         create table branches (bid int primary key, balance int not null); \
         create table history (tid int, aid int, delta int, mtime datetime); \
         insert into accounts values {}; insert into tellers values {}; insert into branches values {}",
        zeros(100),
        zeros(10),
        zeros(1)
    );
    server.sql(&script).expect("setup");
}

/// A server with a bank, and a table to fight over, which notes in which order its rows were changed.
fn server() -> Mariadb {
    let server = Mariadb::start().expect("MariaDB");
    make_bank(&server);
    server
        .sql(
            "use shop; create table t (id int primary key, v varchar(64), tag varchar(20), held int); \
             insert into t values (1, '', '', 0), (2, '', '', 0); \
             create table log (number int auto_increment primary key, id int, tag varchar(20)); \
             create trigger noted after update on t for each row insert into log (id, tag) values (new.id, new.tag)",
        )
        .expect("setup");
    server
}

/// A client of the binary protocol.
struct Client {
    stream: TcpStream,
    session: Session,
}

/// A bound value.
enum Value<'a> {
    Int(i64),
    Text(&'a str),
    Null,
}

impl Client {
    fn connect(port: u16, user: &str, password: &str) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", port)).expect("connect");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        let flags = capability::PROTOCOL_41
            | capability::TRANSACTIONS
            | capability::DEPRECATE_EOF
            | capability::MULTI_STATEMENTS
            | capability::MULTI_RESULTS;
        // Nothing is known of the server before its greeting.
        let mut client = Self { stream, session: Session::new(Capabilities(0)) };
        let first = client.read();
        let greeting = Greeting::decode(&first).expect("a greeting");
        // MySQL 5.6 ends rows the old way.
        let capabilities = Capabilities(flags & greeting.capabilities.0);
        client.session = Session::new(capabilities);
        let mut message = Vec::new();
        let login = Login {
            capabilities,
            collation: 45,
            user: user.as_bytes(),
            database: Some(b"shop"),
            plugin: Some(NATIVE_PASSWORD),
            attributes: vec![(b"program_name", b"tester")],
        };
        login.put(&mut message, 1, &native_password(password.as_bytes(), &greeting.nonce));
        client.stream.write_all(&message).expect("a login");
        assert_eq!(client.read().first(), Some(&0));
        client
    }

    fn read(&mut self) -> Vec<u8> {
        let mut head = [0; packet::HEADER_BYTES];
        self.stream.read_exact(&mut head).expect("a packet");
        let mut payload = vec![0; packet::Header::parse(&head).expect("a header").len];
        self.stream.read_exact(&mut payload).expect("a packet");
        payload
    }

    /// Sends a command and takes its answer: the number of a prepared statement, or the error's.
    fn command(&mut self, payload: &[u8]) -> Result<u32, u16> {
        self.send(&[payload]);
        self.answer(payload[0])
    }

    /// Sends commands in one go.
    fn send(&mut self, payloads: &[&[u8]]) {
        let mut messages = Vec::new();
        for payload in payloads {
            packet::put_message(&mut messages, 0, payload);
        }
        self.stream.write_all(&messages).expect("a command");
    }

    /// Takes the answer to a command.
    fn answer(&mut self, command: u8) -> Result<u32, u16> {
        let mut exchange = Exchange::new(command);
        let mut result = Ok(0);
        while !exchange.is_done() {
            let answer = self.read();
            if command == COM_CHANGE_USER && answer.first() == Some(&AUTH_SWITCH) {
                // No password, by whichever plugin.
                self.stream.write_all(&[0, 0, 0, 2]).expect("a proof");
            }
            match exchange.message(&answer, answer.len(), &mut self.session).expect("an answer") {
                Step::End { end: End::Prepared(prepared), .. } => result = Ok(prepared.statement),
                Step::End { end: End::Err(error), .. } => result = Err(error.code),
                _ => {}
            }
        }
        result
    }

    fn query(&mut self, sql: &str) -> Result<u32, u16> {
        self.command(&[&[COM_QUERY], sql.as_bytes()].concat())
    }

    fn prepare(&mut self, sql: &str) -> u32 {
        self.command(&[&[COM_STMT_PREPARE], sql.as_bytes()].concat()).expect("a statement")
    }

    fn execute(&mut self, statement: u32, values: &[Value<'_>]) -> Result<u32, u16> {
        let mut payload = vec![COM_STMT_EXECUTE];
        payload.extend_from_slice(&statement.to_le_bytes());
        payload.extend_from_slice(&[0, 1, 0, 0, 0]);
        let mut nulls = vec![0_u8; values.len().div_ceil(8)];
        let (mut types, mut bytes) = (Vec::new(), Vec::new());
        for (at, value) in values.iter().enumerate() {
            match value {
                Value::Int(value) => {
                    types.extend_from_slice(&[0x08, 0]);
                    bytes.extend_from_slice(&value.to_le_bytes());
                }
                Value::Text(text) => {
                    types.extend_from_slice(&[0xfd, 0]);
                    bytes.push(u8::try_from(text.len()).expect("a short text"));
                    bytes.extend_from_slice(text.as_bytes());
                }
                Value::Null => {
                    types.extend_from_slice(&[0x06, 0]);
                    nulls[at / 8] |= 1 << (at % 8);
                }
            }
        }
        payload.extend_from_slice(&nulls);
        payload.push(1);
        self.command(&[payload, types, bytes].concat())
    }

    fn quit(mut self) {
        let mut message = Vec::new();
        packet::put_message(&mut message, 0, &[COM_QUIT]);
        self.stream.write_all(&message).expect("a command");
        let _ = self.stream.read(&mut [0; 1]);
    }
}

/// TPC-B by prepared statements: four sessions with the same numbers each time.
fn bank(port: u16) {
    let clients = (0..4_i64).map(|session| {
        thread::spawn(move || {
            let mut client = Client::connect(port, "bob", "");
            let accounts = client.prepare("update accounts set balance = balance + ? where aid = ?");
            let look = client.prepare("select balance from accounts where aid = ?");
            let tellers = client.prepare("update tellers set balance = balance + ? where tid = ?");
            let branches = client.prepare("update branches set balance = balance + ? where bid = 1");
            let history = client.prepare("insert into history values (?, ?, ?, now())");
            for round in 0..15 {
                let number = session * 100 + round;
                let (delta, aid, tid) = (
                    Value::Int(number - 200),
                    Value::Int(1 + number * 37 % 100),
                    Value::Int(1 + number % 10),
                );
                client.query("begin").expect("begin");
                client.execute(accounts, &[delta, aid]).expect("an update");
                client.execute(look, &[Value::Int(1 + number * 37 % 100)]).expect("a row");
                client.execute(tellers, &[Value::Int(number - 200), tid]).expect("an update");
                client.execute(branches, &[Value::Int(number - 200)]).expect("an update");
                let row = [
                    Value::Int(1 + number % 10),
                    Value::Int(1 + number * 37 % 100),
                    Value::Int(number - 200),
                ];
                client.execute(history, &row).expect("a row");
                client.query("commit").expect("commit");
            }
            client.quit();
        })
    });
    clients.collect::<Vec<_>>().into_iter().for_each(|client| client.join().expect("a client"));
}

/// Sessions that fight over two rows. Each holds its row for a while after it has got it, so that what is answered first has also happened
/// first, however late the recorder's threads wake up.
fn fight(port: u16) {
    let clients = (0..FIGHTERS).map(|session| {
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(30 * session as u64));
            let mut client = Client::connect(port, "bob", "");
            let update = "update t set v = md5(concat(v, ?)), tag = ?, held = sleep(0.02) where id = ?";
            let update = client.prepare(update);
            for round in 0..UPDATES {
                let tag = format!("{session}.{round}");
                let row = 1 + (session + round) % 2;
                let values = [Value::Text(&tag), Value::Text(&tag), Value::Int(row as i64)];
                if round % 3 == 0 {
                    client.query("start transaction").expect("begin");
                    client.execute(update, &values).expect("an update");
                    client.query("commit").expect("commit");
                } else {
                    client.execute(update, &values).expect("an update");
                }
            }
            client.quit();
        })
    });
    clients.collect::<Vec<_>>().into_iter().for_each(|client| client.join().expect("a client"));
}

fn meta(level: Level) -> Meta {
    Meta { protocol: Protocol::Mysql, level, ..Meta::default() }
}

fn target(port: u16, identities: Identities) -> Target {
    Target::new(&format!("mysql://bob@127.0.0.1:{port}/?sslmode=disable"), identities).expect("a target")
}

fn plan_of(records: &[Record<'static>], options: &plan::Options) -> Plan {
    recorder::plan(&meta(Level::Summary), records, options)
}

fn asap() -> Options {
    Options { pace: Pace::Asap, ..Options::default() }
}

fn record(server: &Mariadb, level: Level, work: impl FnOnce(u16)) -> Vec<Record<'static>> {
    let recorder = Recorder::of(Protocol::Mysql, server.port(), level);
    work(recorder.port());
    recorder.records()
}

fn look(plan: &mut Plan, target: &Target) -> Result<Preflight, Error> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(preflight::check(plan, target))
}

/// The tags of a row's updates in the order of their commits in the trace: a tag is the first bound value of its update.
fn order_in_trace(plan: &Plan, row: usize) -> Vec<String> {
    let mut order = Vec::new();
    for (number, session) in plan.sessions.iter().enumerate() {
        let mut updated = None;
        for unit in &session.units {
            let bytes = recorder::messages(plan, session, unit);
            let text = String::from_utf8_lossy(&bytes);
            for round in (0..UPDATES).rev() {
                let tag = (0..FIGHTERS)
                    .map(|fighter| format!("{fighter}.{round}"))
                    .find(|tag| text.contains(tag.as_str()));
                if let Some(tag) = tag {
                    updated = Some(tag);
                    break;
                }
            }
            if let (Some(commit), Some(tag)) = (unit.commit(), updated.clone()) {
                let (fighter, round) = tag.split_once('.').expect("a tag");
                let of_row = 1
                    + (fighter.parse::<usize>().expect("a number")
                        + round.parse::<usize>().expect("a number"))
                        % 2;
                order.push((commit, of_row, tag, number));
            }
        }
    }
    order.sort();
    order.into_iter().filter(|one| one.1 == row).map(|one| one.2).collect()
}

/// A recording whose order is what happened: on a busy machine the recorder may see answers in another one.
fn fight_in_order() -> (Vec<Record<'static>>, String) {
    for _ in 0..5 {
        let original = server();
        let records = record(&original, Level::Summary, fight);
        let plan = plan_of(&records, &plan::Options::default());
        assert_eq!(plan.commits, FIGHTERS * UPDATES, "{:?}", plan.omitted);
        let happened = |row: usize| {
            let log = original
                .sql(&format!("select tag from shop.log where id = {row} order by number"))
                .expect("a log");
            log.lines().map(str::to_owned).collect::<Vec<_>>()
        };
        if (1..=2).all(|row| order_in_trace(&plan, row) == happened(row)) {
            return (records, original.sql(STATE).expect("a state"));
        }
    }
    panic!("the machine is too busy to record anything in its order");
}

#[test]
fn the_order_of_commits_makes_the_same_data() {
    if missing() {
        return;
    }
    let (records, expected) = fight_in_order();
    let play = |order_commit: bool| {
        let copy = server();
        let options = Options { order_commit, ..asap() };
        let plan = plan_of(&records, &plan::Options::default());
        let (_, _, report) = recorder::play(plan, target(copy.port(), Identities::default()), options);
        assert!(report.is_equal(), "{}", report.text());
        assert_eq!((report.counts.released, report.counts.answered), (0, report.counts.units as u64));
        copy.sql(STATE).expect("a state")
    };
    assert_eq!(play(true), expected);
    // Without it each session begins at once, which the capture did not.
    assert_ne!(play(false), expected);
}

#[test]
fn a_bank_by_prepared_statements_is_the_same_on_a_copy_also_by_tls() {
    if missing() {
        return;
    }
    let original = server();
    let records = record(&original, Level::Summary, bank);
    let state = |server: &Mariadb| BANK.map(|query| server.sql(query).expect("a state"));
    let mut copies = vec![(server(), "disable")];
    // The TLS of MySQL 5.6 is older than any that the replayer speaks.
    if !Mariadb::is_mysql() {
        let authority = Authority::new("test").expect("an authority");
        copies.push((Mariadb::start_tls(&authority).expect("MariaDB"), "require"));
    }
    for (copy, sslmode) in copies {
        if sslmode == "require" {
            make_bank(&copy);
        }
        let to = format!("mysql://bob@127.0.0.1:{}/?sslmode={sslmode}", copy.port());
        let to = Target::new(&to, Identities::default()).expect("a target");
        let plan = plan_of(&records, &plan::Options::default());
        let options = Options { order_commit: true, ..asap() };
        // The copy gives its statements other numbers: this one has been prepared before.
        let again = record(&copy, Level::Summary, |port| {
            let through = format!("mysql://bob@127.0.0.1:{port}/?sslmode=disable");
            let to = if sslmode == "require" {
                to
            } else {
                Target::new(&through, Identities::default()).expect("a target")
            };
            let (_, _, report) = recorder::play(plan, to, options);
            assert!(report.is_equal(), "{}", report.text());
            assert!(report.volatile.contains_key("now"), "{:?}", report.volatile);
        });
        assert_eq!(state(&copy), state(&original), "{sslmode}");
        if sslmode == "disable" {
            let (here, there) = (said(&again), said(&records));
            assert_eq!(here.len(), there.len());
            for (here, there) in here.iter().zip(&there) {
                let differs = here.iter().zip(there).find(|(here, there)| here != there);
                assert_eq!(differs, None, "the recording of the replay is the recording");
                assert_eq!(here.len(), there.len());
            }
        }
    }
}

/// What each session of a trace said, and how it was answered; without times, and with its statements numbered from 0: the server numbers
/// those of all sessions in one go.
fn said(records: &[Record<'static>]) -> Vec<Vec<String>> {
    let mut sessions = BTreeMap::<u64, (Vec<u32>, Vec<String>)>::new();
    for record in records {
        let Some(session) = record.session() else { continue };
        let (numbers, said) = sessions.entry(session.0).or_default();
        said.push(match record {
            Record::Frontend(message) => {
                let mut bytes = message.message.to_vec();
                if let Some(number) = statement_number(&bytes[packet::HEADER_BYTES..]) {
                    let ordinal = numbers.iter().position(|known| *known == number).expect("a statement");
                    bytes[packet::HEADER_BYTES + 1..][..4].copy_from_slice(&(ordinal as u32).to_le_bytes());
                }
                format!("{bytes:?}")
            }
            Record::Response(response) => {
                let tag = match &response.outcome {
                    Outcome::Complete { tag } => String::from_utf8_lossy(tag).into_owned(),
                    other => format!("{other:?}"),
                };
                match tag.strip_prefix("PREPARE ").and_then(|prepared| prepared.split_once(' ')) {
                    Some((number, parameters)) => {
                        numbers.push(number.parse().expect("a number"));
                        format!("prepared with {parameters}")
                    }
                    None => format!("{tag} {}", response.rows),
                }
            }
            Record::Ready(ready) => format!("{:?}", ready.status),
            _ => continue,
        });
    }
    // What looked at the target first, and prepared each statement, is not what was played.
    let mut sessions: Vec<_> =
        sessions.into_values().map(|(_, said)| said).filter(|said| said.len() > 100).collect();
    sessions.sort();
    sessions
}

#[test]
fn what_differs_is_told_and_what_is_not_played_is_named() {
    if missing() {
        return;
    }
    let original = server();
    let file = tempfile::NamedTempFile::new().expect("a file");
    fs_write(file.path(), "1,one\n2,two\n");
    let load = format!(
        "load data local infile '{}' into table shop.loaded fields terminated by ','",
        file.path().display()
    );
    let records = record(&original, Level::Full, |port| {
        let mut client = Client::connect(port, "ann", "S3cret");
        client.query("create table loaded (a int, b text)").expect("a table");
        assert_eq!(client.query("select * from nothing"), Err(1146));
        client
            .query("insert into t values (3, 'x', '', 0); select 1; update t set held = 1 where id = 3")
            .expect("results");
        client.query("kill 999999").expect_err("nobody");
        client.query("set password for bob@'%' = password('secret-of-bob')").expect("a password");
        let statement = client.prepare("select ?, ?");
        client.execute(statement, &[Value::Null, Value::Text("x")]).expect("a row");
        client.query("set password for bob@'%' = ''").expect("no password");
        // MySQL 5.6.14 refuses it to clients that have connection attributes.
        if !Mariadb::is_mysql() {
            client
                .command(&[&[COM_CHANGE_USER][..], b"bob\0\0shop\0\x2d\0mysql_native_password\0\0"].concat())
                .expect("bob");
            client.query("select 'as bob'").expect("a row");
        }
        client.quit();
        // The shell sends files.
        let mut shell = original.shell().expect("the shell");
        shell.args(["--local-infile=1", "-e", &load]).arg(format!("--port={port}"));
        let status = shell.stdout(Stdio::null()).status().expect("the shell");
        assert!(status.success());
    });
    assert_eq!(original.sql("select count(*) from shop.loaded").expect("a number"), "2");

    // The writer overwrites passwords.
    let parent = tempfile::tempdir().expect("a directory");
    let trace = parent.path().join("trace");
    recorder::write(&trace, &meta(Level::Full), &records);
    let read = |options: &plan::Options| plan::read(&trace, options).expect("a plan");

    let copy = server();
    copy.sql("insert into shop.t values (4, 'more', '', 0)").expect("a row");
    let mut identities = Identities::default();
    identities.passwords.insert("ann".into(), "S3cret".into());
    let to = target(copy.port(), identities.clone());
    let plan = read(&plan::Options::default());
    let omitted = plan.omitted.units.clone();
    assert_eq!(omitted.get(&Reason::Administration), Some(&1), "{omitted:?}");
    assert_eq!(omitted.get(&Reason::Password), Some(&2), "{omitted:?}");
    let changed = (!Mariadb::is_mysql()).then_some(&1);
    assert_eq!(omitted.get(&Reason::ChangedUser), changed, "{omitted:?}");
    let (_, _, report) = recorder::play(plan, to.clone(), asap());
    assert!(report.is_equal(), "{}", report.text());
    assert_eq!(copy.sql("select group_concat(a, b order by a) from shop.loaded").expect("rows"), "1one,2two");

    // Again: now the table is there, and so is the row.
    let (_, _, report) = recorder::play(read(&plan::Options::default()), to.clone(), asap());
    let text = report.text();
    assert!(!report.is_equal() && text.contains("42S01") && text.contains("23000"), "{text}");

    // Read-only.
    let options = plan::Options { read_only: true, ..plan::Options::default() };
    let plan = read(&options);
    assert!(plan.omitted.units[&Reason::ReadOnly] >= 3, "{:?}", plan.omitted);
    let before = copy.sql("select count(*) from shop.loaded").expect("a number");
    let (_, _, report) = recorder::play(plan, to.clone(), Options { read_only: true, ..asap() });
    assert!(report.is_equal(), "{}", report.text());
    assert_eq!(copy.sql("select count(*) from shop.loaded").expect("a number"), before);

    // Rows are compared between two servers.
    let options =
        plan::Options { rows: Rows::Ordered, filter: Filter::default(), ..plan::Options::default() };
    let plan = read(&options);
    assert!(
        plan.sessions
            .iter()
            .flat_map(|one| &one.units)
            .flat_map(|one| plan.expected(one))
            .all(|one| one.hash.is_none())
    );
}

#[test]
fn rows_of_two_servers_are_compared_whether_as_text_or_binary() {
    if missing() {
        return;
    }
    let records = record(&server(), Level::Summary, |port| {
        let mut client = Client::connect(port, "bob", "");
        client.query("select aid, balance from accounts where aid < 4 order by aid").expect("rows");
        let look = client.prepare("select balance from accounts where aid = ?");
        client.execute(look, &[Value::Int(2)]).expect("a row");
        client.execute(look, &[Value::Int(3)]).expect("a row");
        client.quit();
    });
    let (one, other) = (server(), server());
    let compare = |rows: Rows| {
        let plan = plan_of(&records, &plan::Options { rows, ..plan::Options::default() });
        let [one, other] = [&one, &other].map(|server| target(server.port(), Identities::default()));
        recorder::play_both(plan, &one, &other, &Options { rows, ..asap() })
    };
    let report = compare(Rows::Ordered);
    assert!(report.is_equal() && report.counts.equal == 4, "{}", report.text());
    other.sql("update shop.accounts set balance = 5 where aid = 2").expect("another value");
    for rows in [Rows::Ordered, Rows::Unordered] {
        let report = compare(rows);
        assert_eq!(report.kinds, [(Kind::RowContents, 2)].into(), "{}", report.text());
        assert_eq!(report.counts.equal, 2, "{}", report.text());
    }
    assert!(compare(Rows::Count).is_equal());
}

#[test]
fn read_only_outlives_a_reset_of_the_session() {
    // MySQL has had COM_RESET_CONNECTION since 5.7.
    if missing() || Mariadb::is_mysql() {
        return;
    }
    let with_function = || {
        let server = server();
        let function =
            "create function f() returns int begin update t set tag = 'f' where id = 1; return 1; end";
        Client::connect(server.port(), "bob", "").query(function).expect("a function");
        server
    };
    let (original, copy) = (with_function(), with_function());
    let records = record(&original, Level::Summary, |port| {
        let mut client = Client::connect(port, "bob", "");
        client.command(&[COM_RESET_CONNECTION]).expect("a reset");
        client.query("select f()").expect("a row");
        // The second behind another reset, before its answer.
        client.send(&[&[COM_RESET_CONNECTION], &[&[COM_QUERY][..], b"select f()"].concat()]);
        client.answer(COM_RESET_CONNECTION).expect("a reset");
        client.answer(COM_QUERY).expect("a row");
        client.quit();
    });
    let tag = "select tag from shop.t where id = 1";
    assert_eq!(original.sql(tag).expect("a tag"), "f");
    let plan = plan_of(&records, &plan::Options { read_only: true, ..plan::Options::default() });
    assert_eq!((plan.units(), plan.sessions[0].units[3].after), (4, 2));
    let options = Options { read_only: true, ..asap() };
    let (_, _, report) = recorder::play(plan, target(copy.port(), Identities::default()), options);
    assert_eq!(report.kinds.get(&Kind::RefusedWrite), Some(&2), "{}", report.text());
    assert_eq!(copy.sql(tag).expect("a tag"), "");
}

/// As a session is recorded that was joined behind its PREPAREs: the second execution of a statement tells its text.
#[test]
fn statements_of_before_the_recording_are_played() {
    if missing() {
        return;
    }
    let (original, copy) = (server(), server());
    let text = "update t set tag = concat(tag, ?) where id = ?";
    let whole = record(&original, Level::Summary, |port| {
        let mut client = Client::connect(port, "bob", "");
        let number = client.prepare(text);
        for at in 1..=4 {
            client
                .execute(number, &[Value::Text(&at.to_string()), Value::Int(1 + at % 2)])
                .expect("an update");
        }
        client.quit();
    });
    let mut executed = 0;
    let mut records = Vec::new();
    for record in whole {
        match record {
            Record::SessionStart(start) => {
                records.push(Record::SessionStart(SessionStart { midstream: true, ..start }));
            }
            Record::Frontend(r) => {
                let payload = packet::payload(&r.message).into_owned();
                let (session, time_ns) = (r.session, r.time_ns);
                let is_execution = payload.first() == Some(&COM_STMT_EXECUTE);
                executed += u32::from(is_execution);
                if executed > 0 {
                    records.push(Record::Frontend(r));
                }
                if is_execution && executed == 2 {
                    records.push(Record::PreparedFill(PreparedFill {
                        session,
                        time_ns,
                        name: statement_number(&payload).expect("a number").to_string().into_bytes().into(),
                        query: text.as_bytes().into(),
                        param_types: Vec::new(),
                        redaction: Redaction::None,
                    }));
                }
            }
            Record::Response(_) | Record::Ready(_) | Record::Withheld(_) if executed == 0 => {}
            record => records.push(record),
        }
    }
    let plan = plan_of(&records, &plan::Options::default());
    assert_eq!(plan.units(), 4);
    assert!(plan.sessions[0].units.iter().all(|unit| unit.omitted.is_none()));
    let (_, _, report) = recorder::play(plan, target(copy.port(), Identities::default()), asap());
    assert!(report.is_equal(), "{}", report.text());
    let tags = "select group_concat(tag order by id) from shop.t";
    assert_eq!(copy.sql(tags).expect("tags"), original.sql(tags).expect("tags"));
    assert_eq!(copy.sql(tags).expect("tags"), "24,13");
}

/// COM_STMT_CLOSE and COM_STMT_SEND_LONG_DATA have no answer, and are sent with another command.
#[test]
fn what_has_no_answer_is_played_where_the_next_command_is_not() {
    if missing() {
        return;
    }
    let (original, copy) = (server(), server());
    let records = record(&original, Level::Summary, |port| {
        let mut client = Client::connect(port, "bob", "");
        let delete = [&[COM_QUERY][..], b"delete from log where number = 0"].concat();
        for _ in 0..5 {
            let number = client.prepare("select id from t where id = ?").to_le_bytes();
            client.send(&[&[&[COM_STMT_SEND_LONG_DATA][..], &number, &[0, 0], b"1"].concat(), &delete]);
            client.answer(COM_QUERY).expect("a deletion");
            // One parameter, a BLOB, which has been sent.
            client
                .command(&[&[COM_STMT_EXECUTE][..], &number, &[0, 1, 0, 0, 0, 0, 1, 0xfc, 0]].concat())
                .expect("a row");
            client.send(&[&[&[COM_STMT_CLOSE][..], &number].concat(), &delete]);
            client.answer(COM_QUERY).expect("a deletion");
        }
        client.quit();
    });
    // One of the look before, which may not be gone yet, and one of the session.
    copy.sql("set global max_prepared_stmt_count = 2").expect("a setting");
    let plan = plan_of(&records, &plan::Options { read_only: true, ..plan::Options::default() });
    assert_eq!(plan.omitted.units, [(Reason::ReadOnly, 10)].into());
    let options = Options { read_only: true, ..asap() };
    let (_, _, report) = recorder::play(plan, target(copy.port(), Identities::default()), options);
    assert!(report.is_equal() && report.counts.equal == 10, "{}", report.text());
}

#[test]
fn a_database_has_another_name_also_for_sessions_that_go_to_it_later() {
    if missing() {
        return;
    }
    let (original, copy) = (server(), server());
    original.sql("create table shop.named (a int); create database other").expect("tables");
    copy.sql(
        "create database shop_copy; create database other; create table shop.named (a int); create table shop_copy.named (a int)",
    )
    .expect("tables");
    let records = record(&original, Level::Summary, |port| {
        let mut client = Client::connect(port, "bob", "");
        client.query("insert into named values (1)").expect("a row");
        for (value, database) in [(2, "use `shop`"), (3, "shop")] {
            client.query("use other").expect("a database");
            let command = if value == 2 { COM_QUERY } else { COM_INIT_DB };
            client.command(&[&[command][..], database.as_bytes()].concat()).expect("a database");
            client.query(&format!("insert into named values ({value})")).expect("a row");
        }
        client.quit();
    });
    let databases: BTreeMap<_, _> = [("shop".to_owned(), "shop_copy".to_owned())].into();
    let plan = plan_of(&records, &plan::Options { databases: databases.clone(), ..Default::default() });
    let identities = Identities { databases, ..Identities::default() };
    let (_, _, report) = recorder::play(plan, target(copy.port(), identities), asap());
    assert!(report.is_equal(), "{}", report.text());
    let rows = |table: &str| {
        copy.sql(&format!("select ifnull(group_concat(a order by a), '') from {table}")).expect("rows")
    };
    assert_eq!((rows("shop_copy.named"), rows("shop.named")), ("1,2,3".to_owned(), String::new()));
}

fn fs_write(path: &std::path::Path, text: &str) {
    std::fs::write(path, text).expect("a file");
}

#[test]
fn users_of_the_plugin_ed25519_log_in() {
    if missing() || Mariadb::is_mysql() {
        return;
    }
    let original = server();
    let records = record(&original, Level::Summary, |port| {
        let mut client = Client::connect(port, "ann", "S3cret");
        client.query("select current_user()").expect("a row");
        client.quit();
    });
    let copy = server();
    if let Err(error) = copy.sql("install soname 'auth_ed25519'") {
        eprintln!("skipped: MariaDB has no plugin ed25519 here: {error}");
        return;
    }
    copy.sql(
        "create user eve@'%' identified via ed25519 using password('S3cret'); grant all on *.* to eve@'%'",
    )
    .expect("users");
    let eve = |password: &str| Identities {
        users: [("ann".to_owned(), "eve".to_owned())].into(),
        passwords: [("eve".to_owned(), password.to_owned())].into(),
        ..Identities::default()
    };
    let mut plan = plan_of(&records, &plan::Options::default());
    let wrong = look(&mut plan, &target(copy.port(), eve("s3cret"))).expect("a look");
    assert!(wrong.problems.join("\n").contains("error 1045"), "{wrong:?}");
    let to = target(copy.port(), eve("S3cret"));
    assert_eq!(look(&mut plan, &to).expect("a look").problems, Vec::<String>::new());
    let (_, _, report) = recorder::play(plan, to, asap());
    assert!(report.is_equal(), "{}", report.text());
}

#[test]
fn the_target_is_looked_at_before_the_first_statement() {
    if missing() {
        return;
    }
    let original = server();
    let records = record(&original, Level::Summary, |port| {
        let mut client = Client::connect(port, "ann", "S3cret");
        client.query("select * from accounts where aid = 7").expect("rows");
        client.query("create temporary table tmp_1 (a int)").expect("a table");
        client.query("select * from tmp_1").expect("rows");
        client.quit();
    });
    let mut plan = plan_of(&records, &plan::Options::default());

    // Nothing is there.
    let empty = Mariadb::start().expect("MariaDB");
    let found = look(&mut plan, &target(empty.port(), Identities::default())).expect("a look");
    let problems = found.problems.join("\n");
    assert!(problems.contains("accounts") && problems.contains("user ann need its password"), "{problems}");
    assert!(!problems.contains("tmp_1"), "the trace makes it: {problems}");
    let product = if Mariadb::is_mysql() { "MySQL" } else { "MariaDB" };
    assert_eq!((found.product, found.statements_checked), (product, 2));

    // No such database.
    let mut identities = Identities { one_user: true, ..Identities::default() };
    identities.databases.insert("shop".into(), "elsewhere".into());
    let found = look(&mut plan, &target(empty.port(), identities)).expect("a look");
    assert!(found.problems.join("\n").contains("no database elsewhere"), "{found:?}");

    // A wrong password, and another kind of server.
    let mut identities = Identities::default();
    identities.passwords.insert("ann".into(), "wrong".into());
    let found = look(&mut plan, &target(original.port(), identities)).expect("a look");
    assert!(found.problems.join("\n").contains("error 1045"), "{found:?}");
    let postgres = Target::new("postgres://nobody@127.0.0.1:1/", Identities::default()).expect("a target");
    let refusal = look(&mut plan, &postgres).expect_err("another protocol").to_string();
    assert!(
        refusal.contains("the trace is of MariaDB or MySQL") && refusal.contains("mysql://"),
        "{refusal}"
    );

    // The captured server itself.
    plan.meta.host = original.sql("select @@hostname").expect("a name");
    plan.meta.server.data_directory = Some(original.sql("select @@datadir").expect("a place"));
    let one_user = || Identities { one_user: true, ..Identities::default() };
    let found = look(&mut plan, &target(original.port(), one_user())).expect("a look");
    assert!(found.problems.join("\n").contains("is the captured server itself"), "{found:?}");
    let found = look(&mut plan, &target(server().port(), one_user())).expect("a look");
    assert_eq!(found.problems, Vec::<String>::new());
}
