// SPDX-License-Identifier: Apache-2.0
//! Types of parameters are told by numbers, which another server may have given to something else.

mod recorder;

use recorder::Recorder;
use underpass_replay::Identities;
use underpass_replay::plan;
use underpass_replay::run::{Options, Pace};
use underpass_testkit::{Batch, Client, Options as ClientOptions, Postgres};
use underpass_trace::Level;

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
}
