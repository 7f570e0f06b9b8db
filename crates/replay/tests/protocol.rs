// SPDX-License-Identifier: Apache-2.0
//! A session that uses every part of the protocol is recorded on one server and played on another: the same answers, the same
//! data, and the recording of the replay is the recording that was played.

mod recorder;

use std::collections::BTreeMap;

use recorder::Recorder;
use underpass_replay::Identities;
use underpass_replay::compare::Kind;
use underpass_replay::plan::{self, Rows};
use underpass_replay::run::{Options, Pace};
use underpass_testkit::{Batch, Client, Options as ClientOptions, Postgres};
use underpass_trace::{Level, Outcome, Record, TransactionStatus};

const SETUP: &str = "create table t (id int primary key, v text); insert into t select g, 'v' || g from generate_series(1, 20) g";

fn server() -> Postgres {
    let server = Postgres::start().expect("PostgreSQL");
    server.sql(SETUP).expect("setup");
    server
}

/// Waits until the server wants COPY data, as drivers do.
fn until_copy_in(client: &mut Client) {
    while client.recv().expect("CopyInResponse").tag != b'G' {}
}

/// What a driver might do in a day.
fn session(client: &mut Client) {
    client.query("select count(*) from t").expect("simple").ok().expect("ok");
    client
        .query("insert into t values (100, 'a'); update t set v = 'b' where id = 100; select 1")
        .expect("several");
    client.query("").expect("empty");
    // A named statement, used twice, then closed.
    let batch = Batch::new()
        .parse("s1", "select id, v from t where id < $1 order by id")
        .describe_statement("s1")
        .sync();
    client.exchange(&batch).expect("prepare");
    for limit in ["5", "8"] {
        let batch = Batch::new().bind("", "s1", &[Some(limit)]).describe_portal("").execute("", 0).sync();
        client.exchange(&batch).expect("execute");
    }
    client.exchange(&Batch::new().close_statement("s1").sync()).expect("close");
    // A portal with a fetch size, in a transaction.
    client.query("begin").expect("begin");
    let batch =
        Batch::new().parse("", "select id from t order by id").bind("p", "", &[]).execute("p", 7).sync();
    client.exchange(&batch).expect("first rows");
    client.exchange(&Batch::new().execute("p", 7).sync()).expect("more rows");
    client.exchange(&Batch::new().close_portal("p").sync()).expect("close portal");
    client.query("commit").expect("commit");
    // A pipeline: three units before the first answer, the second fails.
    let pipeline = Batch::new()
        .extended("update t set v = 'p1' where id = 1", &[])
        .sync()
        .extended("select 1 / (id - id) from t", &[])
        .extended("update t set v = 'never' where id = 2", &[])
        .sync()
        .extended("update t set v = 'p3' where id = 3", &[])
        .sync();
    assert_eq!(client.exchange(&pipeline).expect("pipeline").len(), 3);
    // Flush in the middle of a unit.
    client.send(&Batch::new().parse("f", "select $1::int + 1").flush()).expect("send");
    assert_eq!(client.recv().expect("ParseComplete").tag, b'1');
    client.send(&Batch::new().bind("", "f", &[Some("41")]).execute("", 0).sync()).expect("send");
    client.response().expect("response");
    // COPY in, out, and given up.
    client.send(&Batch::new().query("copy t from stdin")).expect("copy");
    until_copy_in(client);
    client.send(&Batch::new().copy_data(b"200\tx\n").copy_data(b"201\ty\n").copy_done()).expect("data");
    client.response().expect("copied");
    // Longer than what a replay has in memory of it at once.
    client.send(&Batch::new().query("copy t from stdin")).expect("copy");
    until_copy_in(client);
    let rows = (500..506).map(|id| format!("{id}\t{}\n", "y".repeat(700_000)));
    let batch = rows.fold(Batch::new(), |batch, row| batch.copy_data(row.as_bytes()));
    client.send(&batch.copy_done()).expect("data");
    client.response().expect("copied");
    client.send(&Batch::new().query("copy t from stdin")).expect("copy");
    until_copy_in(client);
    client.send(&Batch::new().copy_data(b"300\tx\n").copy_fail("no more")).expect("data");
    client.response().expect("refused");
    client.send(&Batch::new().query("copy t from stdin")).expect("copy");
    until_copy_in(client);
    client.send(&Batch::new().copy_fail("nothing at all")).expect("no data");
    client.response().expect("refused");
    client.query("copy t to stdout").expect("copy out");
    // COPY by the extended protocol: the server ignores the first Sync.
    client.send(&Batch::new().extended("copy t from stdin", &[]).sync()).expect("copy");
    until_copy_in(client);
    client.send(&Batch::new().copy_data(b"400\tz\n").copy_done().sync()).expect("data");
    client.response().expect("copied");
    client.send(&Batch::new().extended("copy t from stdin", &[]).sync()).expect("copy");
    until_copy_in(client);
    client.send(&Batch::new().copy_data(b"401\tz\n").copy_fail("no more").sync()).expect("data");
    client.response().expect("refused");
    // An error in a transaction, and what follows from it.
    for query in ["begin", "insert into t values (1, 'twice')", "select 1", "commit"] {
        client.exchange(&Batch::new().query(query)).expect("answer");
    }
    // Settings and cursors by SQL.
    client.query("set work_mem = '5MB'").expect("set");
    client.query("begin; declare c cursor for select id from t order by id").expect("declare");
    client.query("fetch 3 from c").expect("fetch");
    client.query("commit").expect("commit");
    // Larger than any socket buffer, in both directions at once.
    let long = "x".repeat(3 << 20);
    client.query(&format!("select length('{long}'), '{long}'")).expect("long");
}

/// Messages of each session, and what was answered, without times and addresses.
fn normalised(records: &[Record<'_>]) -> BTreeMap<u64, Vec<String>> {
    let mut sessions: BTreeMap<u64, Vec<String>> = BTreeMap::new();
    for record in records {
        let line = match record {
            Record::SessionStart(start) => format!(
                "{:?} {:?} {:?} {:?}",
                start.user, start.database, start.application_name, start.parameters
            ),
            Record::Frontend(frontend) => format!("{:?}", frontend.message),
            Record::Response(response) => match &response.outcome {
                Outcome::Error(error) => format!("{:?}", error.sqlstate),
                outcome => format!("{outcome:?} {}", response.rows),
            },
            Record::Ready(ready) => format!("{:?}", ready.status),
            _ => continue,
        };
        sessions.entry(record.session().expect("session").0).or_default().push(line);
    }
    // Answers and later requests of a pipeline may be seen in any order.
    sessions.values_mut().for_each(|lines| lines.sort());
    sessions
}

#[test]
fn a_replay_is_what_was_recorded() {
    let (original, copy) = (server(), server());
    let recorder = Recorder::start(original.port(), Level::Full);
    let options = ClientOptions::new(recorder.port(), "postgres", "postgres")
        .parameter("application_name", "all of it")
        .parameter("DateStyle", "German");
    let mut client = Client::connect(&options).expect("connect");
    session(&mut client);
    client.terminate().expect("terminate");
    let records = recorder.records();
    let meta = recorder::meta(&original, Level::Full);

    let plan_options = plan::Options { rows: Rows::Ordered, ..plan::Options::default() };
    let plan = recorder::plan(&meta, &records, &plan_options);
    assert_eq!(plan.omitted, plan::Omitted::default());
    let again = Recorder::start(copy.port(), Level::Full);
    let target = recorder::target(again.port(), Identities::default());
    let options = Options { pace: Pace::Asap, rows: Rows::Ordered, ..Options::default() };
    let (plan, played, report) = recorder::play(plan, target, options);

    assert_eq!(recorder::answered(&played), plan.units());
    assert!(report.is_equal(), "{}", report.text());
    assert_eq!(report.counts.equal as usize, plan.units(), "{}", report.text());
    assert_eq!(report.counts.unknown, 0);
    let dump = "select string_agg(t::text, ';' order by id) from t";
    assert_eq!(original.sql_value(dump).expect("dump"), copy.sql_value(dump).expect("dump"));

    // Our own look at the target is a session of its own, and comes first.
    let of_replay = normalised(&again.records());
    let played_again = of_replay.values().max_by_key(|lines| lines.len()).expect("a session");
    let recorded = normalised(&records);
    assert_eq!(recorded[&1], *played_again);
}

#[test]
fn pipelines_stay_pipelines_and_queries_stay_alone() {
    let original = server();
    let recorder = Recorder::start(original.port(), Level::Summary);
    let mut client =
        Client::connect(&ClientOptions::new(recorder.port(), "postgres", "postgres")).expect("connect");
    session(&mut client);
    client.terminate().expect("terminate");
    let plan = recorder::plan(
        &recorder::meta(&original, Level::Summary),
        &recorder.records(),
        &plan::Options::default(),
    );
    let units = &plan.sessions[0].units;
    let ahead: Vec<usize> = units
        .iter()
        .enumerate()
        .filter(|(index, unit)| (unit.after as usize) < *index)
        .map(|(index, _)| index)
        .collect();
    // The second and third unit of the pipeline, and nothing else, were sent before an answer.
    assert_eq!(ahead.len(), 2, "{ahead:?}");
    assert_eq!(ahead[1], ahead[0] + 1);
    assert!(units.iter().all(|unit| unit.ready_ns().is_some()));
    let failed = units.iter().filter(|unit| unit.status == Some(TransactionStatus::Failed)).count();
    assert_eq!(failed, 2);
}

/// At capture the table was missing, and no data were sent; here the server wants them.
#[test]
fn a_copy_that_failed_at_capture_and_begins_here_is_given_up() {
    let (original, copy) = (server(), server());
    copy.sql("create table missing (a int)").expect("a table");
    let recorder = Recorder::start(original.port(), Level::Full);
    let mut client =
        Client::connect(&ClientOptions::new(recorder.port(), "postgres", "postgres")).expect("connect");
    let begins = [
        Batch::new().query("copy missing from stdin"),
        // The server ignores the Sync.
        Batch::new().extended("copy missing from stdin", &[]).sync(),
    ];
    for batch in &begins {
        client.exchange(batch).expect("an error");
        client.query("select 1").expect("a row");
    }
    client.terminate().expect("terminate");

    let meta = recorder::meta(&original, Level::Full);
    let plan = recorder::plan(&meta, &recorder.records(), &plan::Options::default());
    let target = recorder::target(copy.port(), Identities::default());
    let options = Options { pace: Pace::Asap, ..Options::default() };
    let (plan, played, report) = recorder::play(plan, target, options);
    assert_eq!(recorder::answered(&played), plan.units(), "{}", report.text());
    assert_eq!(report.kinds.get(&Kind::NoError), Some(&2), "{}", report.text());
    assert_eq!(report.counts.equal, 2, "{}", report.text());
    assert_eq!(copy.sql_value("select count(*) from missing").expect("count"), "0");
}

/// At capture the COPY failed, and the client had sent more behind it; here it begins.
#[test]
fn a_copy_that_swallows_what_was_sent_behind_it_ends_its_session() {
    let (original, copy) = (server(), server());
    copy.sql("create table missing (a int)").expect("a table");
    let recorder = Recorder::start(original.port(), Level::Full);
    let mut client =
        Client::connect(&ClientOptions::new(recorder.port(), "postgres", "postgres")).expect("connect");
    let pipeline = Batch::new().extended("copy missing from stdin", &[]).sync().query("select 1");
    assert_eq!(client.exchange(&pipeline).expect("pipeline").len(), 2);
    client.terminate().expect("terminate");
    let meta = recorder::meta(&original, Level::Full);
    let plan = recorder::plan(&meta, &recorder.records(), &plan::Options::default());
    let target = recorder::target(copy.port(), Identities::default());
    let (_, _, report) = recorder::play(plan, target, Options { pace: Pace::Asap, ..Options::default() });
    assert!(!report.is_equal(), "{}", report.text());
    assert!(report.broken_sessions[0].1.contains("COPY"), "{}", report.text());
}

/// A trigger for each statement fails before the COPY has read anything: the Sync ahead of the data is answered, and the one behind
/// them, too. One that fails by its data has read the first, and answers only the second.
#[test]
fn a_copy_that_fails_before_it_reads_is_ready_twice() {
    let (original, copy) = (server(), server());
    let fails = "create function fails() returns trigger language plpgsql as $$ begin raise 'no'; end $$";
    original.sql("create table once (a int)").expect("a table");
    copy.sql(&format!(
        "create table once (a int primary key); {fails}; \
         create trigger before_all before insert on t execute function fails()"
    ))
    .expect("a trigger");
    let recorder = Recorder::start(original.port(), Level::Full);
    let mut client =
        Client::connect(&ClientOptions::new(recorder.port(), "postgres", "postgres")).expect("connect");
    let copies = 40;
    for number in 0..copies {
        // Every second one reads its data, and has one row twice.
        let (table, data) = match number % 2 {
            0 => ("t", format!("{}\tx\n", 1000 + number)),
            _ => ("once", "1\n1\n".to_owned()),
        };
        let begin = format!("copy {table} from stdin");
        client.send(&Batch::new().parse("", &begin).bind("", "", &[]).execute("", 0).sync()).expect("copy");
        until_copy_in(&mut client);
        client.send(&Batch::new().copy_data(data.as_bytes()).copy_done().sync()).expect("data");
        client.response().expect("copied");
        match number % 4 {
            0 | 1 => client.exchange(&Batch::new().extended("select 7", &[]).sync()).expect("a row"),
            _ => client.exchange(&Batch::new().sync().sync().query("select 7")).expect("a row"),
        };
    }
    client.terminate().expect("terminate");

    let meta = recorder::meta(&original, Level::Full);
    let plan = recorder::plan(&meta, &recorder.records(), &plan::Options::default());
    let target = recorder::target(copy.port(), Identities::default());
    let options = Options { pace: Pace::Asap, ..Options::default() };
    let (plan, played, report) = recorder::play(plan, target, options);
    assert_eq!(recorder::answered(&played), plan.units(), "{}", report.text());
    assert_eq!(report.kinds.get(&Kind::Error), Some(&copies), "{}", report.text());
    assert_eq!(report.counts.equal, 2 * copies, "{}", report.text());
    assert!(report.broken_sessions.is_empty(), "{}", report.text());
}

/// A Parse fails here, in a transaction that failed, and no Sync follows: the server skips the Query, the COPY and the data behind it.
#[test]
fn a_query_behind_a_request_that_fails_is_not_waited_for() {
    let (original, copy) = (server(), server());
    copy.sql("insert into t values (100, 'taken')").expect("a row");
    let recorder = Recorder::start(original.port(), Level::Full);
    let mut client =
        Client::connect(&ClientOptions::new(recorder.port(), "postgres", "postgres")).expect("connect");
    let without_sync = |query: &str| Batch::new().parse("", "select 1").query(query);
    for query in ["begin", "insert into t values (100, 'x')"] {
        client.query(query).expect("answer");
    }
    client.exchange(&without_sync("select 2")).expect("a row");
    client.send(&without_sync("copy t from stdin")).expect("copy");
    until_copy_in(&mut client);
    client.send(&Batch::new().copy_data(b"200\tx\n").copy_done()).expect("data");
    client.response().expect("copied");
    client.query("rollback").expect("the end");
    client.query("select 3").expect("a row");
    client.terminate().expect("terminate");

    let meta = recorder::meta(&original, Level::Full);
    let plan = recorder::plan(&meta, &recorder.records(), &plan::Options::default());
    let target = recorder::target(copy.port(), Identities::default());
    let options = Options { pace: Pace::Asap, ..Options::default() };
    let (plan, played, report) = recorder::play(plan, target, options);
    assert_eq!(recorder::answered(&played), plan.units(), "{}", report.text());
    assert!(report.broken_sessions.is_empty(), "{}", report.text());
    // What follows from the insert that failed is not counted on its own.
    assert_eq!(report.kinds.get(&Kind::Error), Some(&1), "{}", report.text());
    assert_eq!((report.cascades, report.counts.equal), (2, 3), "{}", report.text());
}

/// The same with more behind it: whether the server skipped that, too, cannot always be told, and nothing is waited for that will not come.
#[test]
fn what_was_sent_behind_a_query_that_is_skipped_is_answered_or_lost() {
    let (original, copy) = (server(), server());
    copy.sql("insert into t values (100, 'taken')").expect("a row");
    let recorder = Recorder::start(original.port(), Level::Full);
    let mut client =
        Client::connect(&ClientOptions::new(recorder.port(), "postgres", "postgres")).expect("connect");
    for query in ["begin", "insert into t values (100, 'x')"] {
        client.query(query).expect("answer");
    }
    let pipeline = Batch::new().parse("", "select 1").query("select 2").query("select 3").sync();
    assert_eq!(client.exchange(&pipeline).expect("pipeline").len(), 3);
    client.terminate().expect("terminate");
    let meta = recorder::meta(&original, Level::Full);
    let plan = recorder::plan(&meta, &recorder.records(), &plan::Options::default());
    let target = recorder::target(copy.port(), Identities::default());
    let (plan, played, report) =
        recorder::play(plan, target, Options { pace: Pace::Asap, ..Options::default() });
    match report.broken_sessions.first() {
        Some((_, why)) => assert!(why.contains("without Sync"), "{}", report.text()),
        None => assert_eq!(recorder::answered(&played), plan.units(), "{}", report.text()),
    }
}

/// A session that runs as its user by SET SESSION AUTHORIZATION is nobody else's, whatever undoes that.
#[test]
fn a_session_does_not_go_on_as_the_superuser() {
    let (original, copy) = (server(), server());
    for server in [&original, &copy] {
        server
            .sql("create role joe login; create table who (step text, name text default session_user); grant all on who to joe")
            .expect("setup");
    }
    let recorder = Recorder::start(original.port(), Level::Summary);
    let mut client =
        Client::connect(&ClientOptions::new(recorder.port(), "joe", "postgres")).expect("connect");
    let insert = |step: &str| Batch::new().query(&format!("insert into who values ('{step}')"));
    client.exchange(&insert("first")).expect("a row");
    // As Npgsql does, in front of the next command.
    let both = Batch::new().query("discard all").query("insert into who values ('behind discard')");
    assert_eq!(client.exchange(&both).expect("answers").len(), 2);
    for query in ["set session authorization default", "begin"] {
        client.exchange(&Batch::new().query(query)).expect("answer");
    }
    client.exchange(&insert("in the transaction")).expect("a row");
    for query in ["commit", "begin", "reset session authorization; select 1/0", "select 1", "rollback"] {
        client.exchange(&Batch::new().query(query)).expect("answer");
    }
    client.exchange(&insert("last")).expect("a row");
    client.terminate().expect("terminate");

    let meta = recorder::meta(&original, Level::Summary);
    let plan = recorder::plan(&meta, &recorder.records(), &plan::Options::default());
    assert_eq!(plan.sessions[0].resets.iter().copied().collect::<Vec<_>>(), [1, 3, 8]);
    let target = recorder::target(copy.port(), Identities::default());
    let options = Options { pace: Pace::Asap, ..Options::default() };
    let (plan, played, report) = recorder::play(plan, target, options);
    assert_eq!(recorder::answered(&played), plan.units(), "{}", report.text());
    assert!(report.is_equal(), "{}", report.text());
    let names = "select string_agg(distinct name, ',') || count(*) from who";
    assert_eq!(original.sql_value(names).expect("names"), "joe4");
    assert_eq!(copy.sql_value(names).expect("names"), "joe4");
}

/// What the server tells of the session's user counts, not the words: RESET leaves a role, and a function may make the session the login user's.
#[test]
fn a_reset_of_a_setting_leaves_the_role_and_a_hidden_one_of_the_user_is_seen() {
    let (original, copy) = (server(), server());
    for server in [&original, &copy] {
        server
            .sql(
                "create role joe login; create role worker; grant worker to joe; \
                 create table who (step text, name text default session_user, role text default current_user); \
                 grant all on who to joe, worker",
            )
            .expect("setup");
    }
    let recorder = Recorder::start(original.port(), Level::Summary);
    let mut client =
        Client::connect(&ClientOptions::new(recorder.port(), "joe", "postgres")).expect("connect");
    for query in [
        "set role worker",
        "reset work_mem",
        "insert into who values ('1 reset')",
        "reset all",
        "insert into who values ('2 reset all')",
        "reset role",
        "insert into who values ('3 reset role')",
        "select set_config('session_authorization', null, false)",
        "insert into who values ('4 hidden')",
        // Refused to joe; here a superuser has logged in.
        "set session authorization postgres",
        "insert into who values ('5 refused')",
    ] {
        client.exchange(&Batch::new().query(query)).expect("answer");
    }
    client.terminate().expect("terminate");

    let meta = recorder::meta(&original, Level::Summary);
    let plan = recorder::plan(&meta, &recorder.records(), &plan::Options::default());
    assert!(plan.sessions[0].resets.is_empty());
    let target = recorder::target(copy.port(), Identities::default());
    let options = Options { pace: Pace::Asap, ..Options::default() };
    let (plan, played, report) = recorder::play(plan, target, options);
    assert_eq!(recorder::answered(&played), plan.units(), "{}", report.text());
    assert_eq!(report.kinds, [(Kind::NoError, 1)].into(), "{}", report.text());
    let steps = "select string_agg(concat_ws(' ', step, name, role), ', ' order by step) from who";
    let there = original.sql_value(steps).expect("steps");
    assert!(there.starts_with("1 reset joe worker, 2 reset all joe worker, 3 reset role joe joe"), "{there}");
    assert_eq!(copy.sql_value(steps).expect("steps"), there);
}
