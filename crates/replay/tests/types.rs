// SPDX-License-Identifier: Apache-2.0
//! Types of parameters are told by numbers, which another server may have given to something else.

mod recorder;

use recorder::Recorder;
use underpass_replay::plan::{self, Plan};
use underpass_replay::run::{Options, Pace};
use underpass_replay::{Identities, preflight};
use underpass_testkit::{Batch, Client, Options as ClientOptions, Postgres};
use underpass_trace::Level;
use underpass_wire::frontend::build;

const MOOD: &str = "create type mood as enum ('sad', 'ok')";

#[test]
fn a_number_that_is_a_tables_row_here_is_no_type_of_a_parameter() {
    let (original, copy) = (Postgres::start().expect("PostgreSQL"), Postgres::start().expect("PostgreSQL"));
    for number in 0..50 {
        copy.sql(&format!("create table filler{number} (a int)")).expect("a table");
    }
    let is_row = |oid: &str| {
        let typed =
            format!("select relkind from pg_type t join pg_class c on c.oid = typrelid where t.oid = {oid}");
        copy.sql_value(&typed).expect("a look") == "r"
    };
    let oid = (0..50)
        .find_map(|number| {
            // A schema takes one number, which makes the steps of the two servers differ.
            let next = format!("drop type if exists mood; create schema next{number}");
            original.sql(&next).expect("a new number");
            let oid = original.sql_value(&format!("{MOOD}; select 'mood'::regtype::oid")).expect("a type");
            is_row(&oid).then_some(oid)
        })
        .expect("a number that is a row there");
    copy.sql(MOOD).expect("the type");

    let recorder = Recorder::start(original.port(), Level::Full);
    let mut client =
        Client::connect(&ClientOptions::new(recorder.port(), "postgres", "postgres")).expect("connect");
    let batch = Batch::new()
        .parse_typed("", "select $1::text", &[oid.parse().expect("a number")])
        .bind("", "", &[Some("ok")])
        .execute("", 0)
        .sync();
    assert_eq!(client.exchange(&batch).expect("an answer")[0].value(), Some("ok"));
    client.terminate().expect("terminate");

    let meta = recorder::meta(&original, Level::Full);
    let plan = recorder::plan(&meta, &recorder.records(), &plan::Options::default());
    let target = recorder::target(copy.port(), Identities::default());
    let options = Options { pace: Pace::Asap, ..Options::default() };
    let (_, _, report) = recorder::play(plan, target, options);
    assert!(report.is_equal(), "{}", report.text());
    assert_eq!(report.counts.equal, 1);

    // Nor is it where the target has the captured server's identifier.
    let meta = recorder::meta(&copy, Level::Full);
    let mut plan = recorder::plan(&meta, &recorder.records(), &plan::Options::default());
    look(&mut plan, copy.port());
    let mut parse = Vec::new();
    build::parse(&mut parse, b"", b"select $1::text", [0]);
    assert!(first_sent(&plan).starts_with(&parse));
}

fn look(plan: &mut Plan, port: u16) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let target = recorder::target(port, Identities::default());
    runtime.block_on(preflight::check(plan, &target)).expect("a look");
}

fn first_sent(plan: &Plan) -> Vec<u8> {
    let session = &plan.sessions[0];
    recorder::messages(plan, session, &session.units[0])
}

/// A server whose `mood` has the number of a `colour` elsewhere, and that other.
fn servers_with_a_number_for_two_types() -> (Postgres, Postgres, u32) {
    let (original, copy) = (Postgres::start().expect("PostgreSQL"), Postgres::start().expect("PostgreSQL"));
    let number = |server: &Postgres, name: &str| {
        server.sql_value(&format!("select '{name}'::regtype::oid")).expect("a number").parse::<u32>()
    };
    original.sql(MOOD).expect("the type");
    copy.sql("create type colour as enum ('red')").expect("the other type");
    copy.sql(MOOD).expect("the type");
    let oid = number(&original, "mood").expect("a number");
    assert_eq!(number(&copy, "colour"), Ok(oid));
    (original, copy, oid)
}

fn parse_of(name: &str, oid: u32) -> Vec<u8> {
    let mut parse = Vec::new();
    build::parse(&mut parse, name.as_bytes(), b"select ($1 = 'ok'::mood)::text", [oid]);
    parse
}

#[test]
fn a_number_that_is_another_type_here_is_left_to_the_server() {
    let (original, copy, oid) = servers_with_a_number_for_two_types();
    let recorder = Recorder::start(original.port(), Level::Full);
    let mut client =
        Client::connect(&ClientOptions::new(recorder.port(), "postgres", "postgres")).expect("connect");
    let batch = Batch::new()
        .parse_typed("", "select ($1 = 'ok'::mood)::text", &[oid])
        .bind("", "", &[Some("ok")])
        .execute("", 0)
        .sync();
    assert_eq!(client.exchange(&batch).expect("an answer")[0].value(), Some("true"));
    client.terminate().expect("terminate");

    let meta = recorder::meta(&original, Level::Full);
    let plan = || {
        let mut plan = recorder::plan(&meta, &recorder.records(), &plan::Options::default());
        // As if it had been prepared before recording.
        plan.sessions[0].prepared.push(parse_of("before", oid));
        plan
    };
    let options = Options { pace: Pace::Asap, ..Options::default() };
    let target = recorder::target(copy.port(), Identities::default());
    let (played, outcome, report) = recorder::play(plan(), target, options);
    assert!(report.is_equal() && report.counts.equal == 1, "{}", report.text());
    assert_eq!(played.sessions[0].prepared, [parse_of("before", 0)]);
    assert!(outcome.sessions[0].prepare_errors.is_empty());

    // On the captured server it is what it was.
    let mut plan = plan();
    look(&mut plan, original.port());
    assert_eq!(plan.sessions[0].prepared, [parse_of("before", oid)]);
    assert!(first_sent(&plan).starts_with(&parse_of("", oid)));
}
