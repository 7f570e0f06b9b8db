// SPDX-License-Identifier: Apache-2.0
//! Targets that differ, refuse, lack something or ask for a password: each is said plainly.

mod recorder;

use std::sync::Arc;
use std::time::Duration;

use recorder::Recorder;
use underpass_replay::compare::Kind;
use underpass_replay::plan::{self, Filter, Plan, Reason};
use underpass_replay::preflight::{self, Preflight};
use underpass_replay::report::Report;
use underpass_replay::run::{self, Options, Pace, Played, Progress, Stopper};
use underpass_replay::{Identities, Target};
use underpass_testkit::{AuthMethod, Authority, Batch, Client, Options as ClientOptions, Postgres};
use underpass_trace::{Level, Meta, Record};

const SETUP: &str = "create table t (id int primary key, v text); insert into t select g, 'v' from generate_series(1, 9) g; \
     create role joe login; grant all on t to joe";

fn server() -> Postgres {
    let server = Postgres::start().expect("PostgreSQL");
    server.sql(SETUP).expect("setup");
    server
}

/// Records what one client of user `joe` asks.
fn record(server: &Postgres, queries: &[&str]) -> (Meta, Vec<Record<'static>>) {
    let recorder = Recorder::start(server.port(), Level::Summary);
    let mut client =
        Client::connect(&ClientOptions::new(recorder.port(), "joe", "postgres")).expect("connect");
    for query in queries {
        client.exchange(&Batch::new().query(query)).expect("answer");
    }
    client.terminate().expect("terminate");
    (recorder::meta(server, Level::Summary), recorder.records())
}

fn asap() -> Options {
    Options { pace: Pace::Asap, ..Options::default() }
}

fn look(meta: &Meta, records: &[Record<'static>], target: &Target) -> Preflight {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    let mut plan = recorder::plan(meta, records, &plan::Options::default());
    runtime.block_on(preflight::check(&mut plan, target)).expect("preflight")
}

#[test]
fn other_data_give_other_answers() {
    let (original, copy) = (server(), server());
    let queries = [
        "select v from t where id < 5",
        "begin",
        "insert into t values (50, 'x')",
        "update t set v = 'y' where id = 50",
        "select 1",
        "commit",
        "delete from t where id = 60",
        "select current_user",
    ];
    let (meta, records) = record(&original, &queries);
    copy.sql("delete from t where id = 1; insert into t values (50, 'taken'), (60, 'there')")
        .expect("other data");
    let plan = recorder::plan(&meta, &records, &plan::Options::default());
    let (_, _, report) = recorder::play(plan, recorder::target(copy.port(), Identities::default()), asap());
    let kinds: Vec<(Kind, u64)> = report.kinds.iter().map(|(kind, count)| (*kind, *count)).collect();
    assert_eq!(kinds, [(Kind::Error, 1), (Kind::Rows, 2)], "{}", report.text());
    // update, select and commit after the failed insert
    assert_eq!(report.cascades, 3, "{}", report.text());
    assert!(report.text().contains("23505"), "{}", report.text());
    // The session ran as the captured user.
    assert_eq!(report.counts.equal, 3, "{}", report.text());
    let page = page(&report);
    assert!(page.contains("where id &lt; $1") && !page.contains("id < $1"), "{page}");
    assert!(page.contains("23505") && page.contains("another number of rows"), "{page}");
}

#[test]
fn read_only_plays_what_reads() {
    let (original, copy) = (server(), server());
    copy.sql("create function f() returns int language sql as 'delete from t returning 1'")
        .expect("function");
    original
        .sql("create function f() returns int language sql as 'delete from t where false returning 1'")
        .expect("function");
    let queries = [
        "select 1",
        "begin read write",
        "update t set v = 'z'",
        "select count(*) from t",
        "commit",
        "select f()",
    ];
    let (meta, records) = record(&original, &queries);
    let plan_options = plan::Options { read_only: true, ..plan::Options::default() };
    let plan = recorder::plan(&meta, &records, &plan_options);
    assert_eq!(plan.omitted.units.get(&Reason::ReadOnly), Some(&1));
    let options = Options { read_only: true, ..asap() };
    let (_, _, report) = recorder::play(plan, recorder::target(copy.port(), Identities::default()), options);
    let kinds: Vec<_> = report.kinds.iter().map(|(kind, count)| (*kind, *count)).collect();
    assert_eq!(kinds, [(Kind::RefusedWrite, 1)], "{}", report.text());
    assert_eq!(copy.sql_value("select count(*) from t where v = 'v'").expect("count"), "9");
}

#[test]
fn what_read_only_takes_out_of_a_unit_is_neither_equal_nor_fast() {
    let (original, copy) = (server(), server());
    let recorder = Recorder::start(original.port(), Level::Summary);
    let mut client =
        Client::connect(&ClientOptions::new(recorder.port(), "joe", "postgres")).expect("connect");
    for batch in [
        Batch::new().extended("begin", &[]).extended("insert into t values (50, 'x')", &[]).sync(),
        Batch::new().extended("update t set v = 'y'", &[]).sync(),
        Batch::new().query("delete from t where id = 1; commit"),
        Batch::new().query("select 1"),
    ] {
        client.exchange(&batch).expect("answer");
    }
    client.terminate().expect("terminate");
    let meta = recorder::meta(&original, Level::Summary);
    let plan_options = plan::Options { read_only: true, ..plan::Options::default() };
    let plan = recorder::plan(&meta, &recorder.records(), &plan_options);
    let options = Options { read_only: true, ..asap() };
    let (plan, played, report) =
        recorder::play(plan, recorder::target(copy.port(), Identities::default()), options);
    assert_eq!(plan.omitted.units, [(Reason::ReadOnly, 3)].into());
    assert_eq!(recorder::answered(&played), 4);
    // BEGIN and SELECT; of the end of the transaction the trace does not have the answer.
    let counts = &report.counts;
    assert_eq!((counts.compared, counts.equal, counts.unknown), (2, 2, 1), "{}", report.text());
    assert!(report.kinds.is_empty(), "{}", report.text());
    let timed: Vec<&str> = report.groups.iter().map(|group| &*group.statement).collect();
    assert_eq!(timed, ["select $1"]);
    assert_eq!(copy.sql_value("select count(*) from t where v = 'v'").expect("count"), "9");
}

#[test]
fn the_captured_server_is_refused_and_so_is_one_that_lacks_something() {
    let original = server();
    let (meta, records) =
        record(&original, &["select v from t", "create temp table mine (a int)", "select a from mine"]);
    let target = |server: &Postgres| recorder::target(server.port(), Identities::default());
    let itself = look(&meta, &records, &target(&original));
    assert_eq!(itself.problems.len(), 1);
    assert!(itself.problems[0].contains("captured server itself"), "{:?}", itself.problems);

    let empty = Postgres::builder().setting("max_connections", "5").start().expect("PostgreSQL");
    let problems = look(&meta, &records, &target(&empty)).problems;
    assert!(problems.iter().any(|problem| problem.contains("no user joe")), "{problems:?}");
    empty.sql("create role joe login").expect("role");
    let looked = look(&meta, &records, &target(&empty));
    assert_eq!(looked.problems.len(), 1, "{:?}", looked.problems);
    // The table is named; the temporary one, which the trace makes itself, is not.
    assert!(looked.problems[0].contains("relation \"t\" does not exist"), "{:?}", looked.problems);
    assert!(!looked.problems[0].contains("mine"), "{:?}", looked.problems);

    empty.sql("create table t (id int, v text)").expect("setup");
    // Six sessions at once, and the target lets five in.
    let recorder = Recorder::start(original.port(), Level::Summary);
    let options = ClientOptions::new(recorder.port(), "joe", "postgres");
    let mut clients: Vec<Client> = (0..6).map(|_| Client::connect(&options).expect("connect")).collect();
    clients.iter_mut().for_each(|client| drop(client.query("select v from t").expect("query")));
    clients.into_iter().for_each(|client| client.terminate().expect("terminate"));
    let crowded = look(&meta, &recorder.records(), &target(&empty)).problems;
    assert!(crowded.iter().any(|problem| problem.contains("max_connections")), "{crowded:?}");
}

/// What the trace makes, or finds by what its sessions said when they began, is not missing.
#[test]
fn what_the_trace_makes_is_not_missed() {
    let (original, copy) = (server(), server());
    for server in [&original, &copy] {
        server
            .sql("create schema app authorization joe; create table app.own (a int); grant all on app.own to joe; \
                  create table owned (id int); alter table owned owner to joe; grant create on schema public to joe")
            .expect("setup");
    }
    let recorder = Recorder::start(original.port(), Level::Summary);
    let options = ClientOptions::new(recorder.port(), "joe", "postgres");
    let mut client =
        Client::connect(&options.clone().parameter("options", "-csearch_path=app")).expect("connect");
    client.query("select a from own").expect("answer");
    client.terminate().expect("terminate");
    let mut client = Client::connect(&options).expect("connect");
    for query in [
        "create temp table mine (a int)",
        "begin",
        "declare c cursor for select * from mine",
        "commit",
        "alter table owned add column late int",
        "select late from owned",
        "alter table owned rename to other",
        "select late from other",
    ] {
        client.query(query).expect("answer");
    }
    client.terminate().expect("terminate");
    let meta = recorder::meta(&original, Level::Summary);
    let target = recorder::target(copy.port(), Identities::default());
    let looked = look(&meta, &recorder.records(), &target);
    assert_eq!(looked.problems, Vec::<String>::new());

    // A function and a column that the trace makes do not excuse tables.
    original.sql("create table absent (a int); grant all on absent to joe").expect("a table");
    original.sql("alter table absent owner to joe").expect("an owner");
    let function = "create function excuse() returns int language sql as 'select 1'";
    let alter = "alter table absent add column b int";
    let (meta, records) = record(&original, &[function, alter, "select b from absent"]);
    let looked = look(&meta, &records, &target);
    assert!(
        looked.problems.len() == 1 && looked.problems[0].contains("relation \"absent\" does not exist"),
        "{looked:?}"
    );

    let function = "create function made() returns int language sql as 'select 1'";
    let (meta, records) = record(&original, &[function, "select made()"]);
    let looked = look(&meta, &records, &target);
    assert_eq!(looked.problems, Vec::<String>::new());
    assert!(
        looked.notes.iter().any(|note| note.contains("function made() does not exist")),
        "{:?}",
        looked.notes
    );
}

#[test]
fn filters_leave_the_rest_out() {
    let original = server();
    let (meta, records) = record(&original, &["select v from t", "begin", "select 1", "commit"]);
    let units = |filter: Filter| {
        let options = plan::Options { filter, ..plan::Options::default() };
        let plan = recorder::plan(&meta, &records, &options);
        (plan.sessions.len(), plan.units())
    };
    let name = |name: &str| [name.to_owned()].into();
    assert_eq!(units(Filter::default()), (1, 4));
    assert_eq!(units(Filter { users: name("joe"), ..Filter::default() }), (1, 4));
    assert_eq!(units(Filter { users: name("eve"), ..Filter::default() }), (0, 0));
    assert_eq!(units(Filter { databases: name("shop"), ..Filter::default() }), (0, 0));
    assert_eq!(units(Filter { sessions: [7].into(), ..Filter::default() }), (0, 0));
    let plan = recorder::plan(&meta, &records, &plan::Options::default());
    let fingerprint = &plan.classifier.get(plan.executes(&plan.sessions[0].units[0])[0]).fingerprint;
    assert_eq!(units(Filter { fingerprints: name(fingerprint), ..Filter::default() }), (1, 3));
    assert_eq!(units(Filter { from: Some(Duration::from_secs(100)), ..Filter::default() }), (0, 0));
    assert_eq!(units(Filter { to: Some(Duration::ZERO), ..Filter::default() }), (0, 0));
}

#[test]
fn passwords_and_tls() {
    let original = server();
    let (meta, records) = record(&original, &["select current_user, v from t where id = 1"]);
    let authority = Authority::new("test").expect("authority");
    let copy = Postgres::builder()
        .auth(AuthMethod::Scram)
        .tls(&authority)
        .user("joe", "p w")
        .user("admin", "secret")
        .start()
        .expect("PostgreSQL");
    copy.sql("create table t (id int, v text); insert into t values (1, 'v'); grant all on t to joe; alter role admin superuser")
        .expect("setup");
    let plan = || recorder::plan(&meta, &records, &plan::Options::default());
    let dsn = |password: &str| {
        format!(
            "host=127.0.0.1 port={} user=admin password={password} dbname=postgres sslmode=require",
            copy.port()
        )
    };
    // By the superuser, and by the user's own password.
    let mut own = Identities::default();
    own.passwords.insert("joe".into(), "p w".into());
    for identities in [Identities::default(), own] {
        let target = Target::new(&dsn("secret"), identities).expect("target");
        let (_, _, report) = recorder::play(plan(), target, asap());
        assert!(report.is_equal(), "{}", report.text());
        assert_eq!(report.counts.equal, 1);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    let wrong = Target::new(&dsn("wrong"), Identities::default()).expect("target");
    let error =
        runtime.block_on(preflight::check(&mut plan(), &wrong)).expect_err("a wrong password").to_string();
    assert!(error.contains("28P01") && !error.contains("wrong\""), "{error}");
}

#[test]
fn a_stored_md5_hash_logs_in() {
    let (meta, records) = record(&server(), &["select current_user, v from t where id = 1"]);
    let copy = Postgres::builder().auth(AuthMethod::Md5).user("joe", "p w").start().expect("PostgreSQL");
    copy.sql("create table t (id int, v text); insert into t values (1, 'v'); grant all on t to joe")
        .expect("setup");
    let hash = copy.sql_value("select rolpassword from pg_authid where rolname = 'joe'").expect("a hash");
    assert!(hash.starts_with("md5"), "{hash}");
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), format!("\"joe\" \"{hash}\"\n")).expect("a file");
    let mut identities = Identities::default();
    identities.load_passwords(file.path()).expect("credentials");
    let dsn = format!(
        "host=127.0.0.1 port={} user=joe password='p w' dbname=postgres sslmode=disable",
        copy.port()
    );
    let target = Target::new(&dsn, identities).expect("target");
    let plan = recorder::plan(&meta, &records, &plan::Options::default());
    let (_, _, report) = recorder::play(plan, target, asap());
    assert!(report.is_equal() && report.counts.equal == 1, "{}", report.text());
}

#[test]
fn connections_that_are_kept_for_superusers_are_free_for_them_only() {
    let (meta, records) = record(&server(), &["select 1"]);
    let copy = Postgres::builder()
        .auth(AuthMethod::Scram)
        .user("joe", "p w")
        .user("admin", "secret")
        .setting("max_connections", "20")
        .setting("superuser_reserved_connections", "5")
        .start()
        .expect("PostgreSQL");
    copy.sql(SETUP.split(';').next().expect("a table")).expect("setup");
    copy.sql("alter role admin superuser").expect("setup");
    let mut other = Client::connect(&copy.superuser()).expect("connect");
    let count =
        Batch::new().query("select count(*) from pg_stat_activity where backend_type = 'client backend'");
    let mut free = |user: &str, password: &str, by_password: bool| {
        // Those who have left are gone.
        while other.exchange(&count).expect("answer")[0].value() != Some("1") {
            std::thread::sleep(Duration::from_millis(10));
        }
        let dsn = format!(
            "host=127.0.0.1 port={} user={user} password={password} dbname=postgres sslmode=disable",
            copy.port()
        );
        let mut identities = Identities::default();
        if by_password {
            identities.passwords.insert("joe".into(), "p w".into());
        }
        look(&meta, &records, &Target::new(&dsn, identities).expect("target")).connections_free
    };
    // By SET SESSION AUTHORIZATION the superuser logs in.
    assert_eq!(free("admin", "secret", false), 19);
    assert_eq!(free("admin", "secret", true), 14);
    // Who is no superuser sees the others, too.
    assert_eq!(free("joe", "'p w'", true), 14);
}

#[test]
fn extensions_that_the_target_lacks_are_named() {
    let (original, copy) = (server(), server());
    original.sql("alter role joe superuser").expect("a superuser");
    copy.sql("drop extension plpgsql").expect("no extension");
    let (meta, mut records) = record(&original, &["create extension if not exists plpgsql"]);
    let target = |server: &Postgres| recorder::target(server.port(), Identities::default());
    let (there, mut here) =
        (look(&meta, &records, &target(&original)), look(&meta, &records, &target(&copy)));
    // It is not there yet, and the trace makes it.
    assert!(there.problems.len() == 1 && there.problems[0].contains("captured server itself"), "{there:?}");
    assert_eq!(here.problems, Vec::<String>::new());
    here.note_extensions(&there, "the other");
    assert_eq!(here.problems, ["database postgres: no extension plpgsql, which the other has"]);

    for record in &mut records {
        if let Record::Frontend(message) = record {
            let text = String::from_utf8_lossy(&message.message).replace("plpgsql", "plnoone");
            message.message = text.into_bytes().into();
        }
    }
    let found = look(&meta, &records, &target(&copy));
    assert!(found.problems.len() == 1 && found.problems[0].contains("the extension plnoone"), "{found:?}");
}

#[test]
fn a_stopped_replay_reports_what_it_did() {
    let (original, copy) = (server(), server());
    let (meta, records) = record(&original, &["select 1", "select pg_sleep(0.3)", "select 2"]);
    copy.sql("select 1").expect("ready");
    let plan = Arc::new(recorder::plan(&meta, &records, &plan::Options::default()));
    let target = recorder::target(copy.port(), Identities::default());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("runtime");
    let stopper = Stopper::default();
    let progress = Arc::new(Progress::default());
    let played = runtime.block_on(async {
        let stop = async {
            while progress.units.load(std::sync::atomic::Ordering::Relaxed) < 1 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
            stopper.stop();
        };
        let play = run::play(Arc::clone(&plan), target, asap(), Arc::clone(&progress), &stopper);
        tokio::join!(play, stop).0.expect("play")
    });
    assert!(played.stopped);
    // The sleep was waited for, what comes after it was not sent.
    assert_eq!(recorder::answered(&played), 2);

    // What was compared is equal, and not all was compared: on the target, or on a baseline.
    let target = recorder::target(copy.port(), Identities::default());
    let whole = play_whole(&plan, &target);
    for (played, baseline, why) in [
        (&played, None, "the replay was stopped; 1 units were not sent"),
        (&whole, Some(("the other", &played)), "the replay on the other was stopped; 1 units were not sent"),
    ] {
        let looked = look(&meta, &records, &target);
        let report = Report::new(&plan, target.name(), &asap(), looked, played, baseline);
        assert!(report.kinds.is_empty() && !report.is_equal(), "{}", report.text());
        assert_eq!(report.counts.equal, 2);
        assert!(report.text().contains(why) && page(&report).contains(why), "{}", report.text());
        assert!(!page(&report).contains("Nothing"), "{}", page(&report));
    }
}

fn play_whole(plan: &Arc<Plan>, target: &Target) -> Played {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("runtime");
    let stopper = Stopper::default();
    let play = run::play(Arc::clone(plan), target.clone(), asap(), Arc::default(), &stopper);
    runtime.block_on(play).expect("play")
}

fn page(report: &Report) -> String {
    underpass_replay::page::sections(report).into_iter().map(|section| section.html).collect()
}

#[test]
fn a_baseline_that_goes_away_is_told() {
    let (original, baseline, copy) = (server(), server(), server());
    for (server, body) in [
        (&original, "select true"),
        (&baseline, "select pg_terminate_backend(pg_backend_pid())"),
        (&copy, "select true"),
    ] {
        let function =
            format!("create function f() returns boolean language sql security definer as '{body}'");
        server.sql(&function).expect("a function");
    }
    let (meta, records) = record(&original, &["select 1", "select f()", "select 2"]);
    let plan = recorder::plan(&meta, &records, &plan::Options::default());
    let target = |server: &Postgres| recorder::target(server.port(), Identities::default());
    let report = recorder::play_both(plan, &target(&baseline), &target(&copy), &asap());
    assert_eq!((report.counts.equal, report.counts.unknown), (1, 2), "{}", report.text());
    assert!(report.kinds.is_empty() && report.broken_sessions.is_empty(), "{}", report.text());
    assert!(!report.is_equal(), "{}", report.text());
    let session = format!("session 1 from some point on, on {}: the server closed", target(&baseline).name());
    for text in [report.text(), page(&report)] {
        assert!(text.contains("2 units have no answer") && text.contains(&session), "{text}");
        assert!(!text.contains("Nothing"), "{text}");
    }
}

#[test]
fn a_baseline_that_lost_a_session_is_not_equal_whatever_was_in_it() {
    let (original, copy) = (server(), server());
    let (meta, records) = record(&original, &["select 1"]);
    let plan = Arc::new(recorder::plan(&meta, &records, &plan::Options::default()));
    let target = recorder::target(copy.port(), Identities::default());
    let here = play_whole(&plan, &target);
    let mut there = play_whole(&plan, &target);
    there.sessions[0].broken = Some("the server closed the connection".into());
    let looked = look(&meta, &records, &target);
    let report = Report::new(&plan, target.name(), &asap(), looked, &here, Some(("the other", &there)));
    assert_eq!(report.shortcomings, ["1 sessions were lost on the other; 0 units have no answer there"]);
    assert!(report.kinds.is_empty() && !report.is_equal(), "{}", report.text());
}

#[test]
fn what_is_not_known_is_no_difference_unless_nothing_is_known() {
    let (original, copy) = (server(), server());
    let target = || recorder::target(copy.port(), Identities::default());
    let (meta, mut records) = record(&original, &["select 1", "select 2"]);
    let last = records.iter().rposition(|record| matches!(record, Record::Ready(_))).expect("an answer");
    records.remove(last);
    let play = |meta: &Meta, records: &[Record<'static>]| {
        let plan = recorder::plan(meta, records, &plan::Options::default());
        recorder::play(plan, target(), asap()).2
    };
    let report = play(&meta, &records);
    assert!(report.is_equal(), "{}", report.text());
    assert_eq!((report.counts.equal, report.counts.unknown), (1, 1), "{}", report.text());
    assert!(report.text().contains("1 with an outcome that is not known there"), "{}", report.text());
    assert!(page(&report).contains("1 units have an outcome that is not known there"), "{}", page(&report));

    let meta = Meta { level: Level::None, ..meta };
    records.retain(|record| !matches!(record, Record::Response(_)));
    let report = play(&meta, &records);
    assert_eq!((report.counts.answered, report.counts.compared), (2, 0), "{}", report.text());
    assert!(!report.is_equal(), "{}", report.text());
    for text in [report.text(), page(&report)] {
        assert!(text.contains("nothing was compared") && !text.contains("Nothing"), "{text}");
    }
}
