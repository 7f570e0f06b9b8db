// SPDX-License-Identifier: Apache-2.0
//! Sessions that fight over the same rows, with an update whose order shows in the result: with order `commit` a replay gives
//! the same data, without it does not.

mod recorder;

use std::thread;

use recorder::Recorder;
use underpass_replay::Identities;
use underpass_replay::plan::{self, Plan};
use underpass_replay::run::{Options, Pace};
use underpass_testkit::{Client, Options as ClientOptions, Postgres};
use underpass_trace::{Level, Meta, Record};

const SESSIONS: usize = 5;
const UPDATES: usize = 12;
const STATE: &str = "select string_agg(id || '=' || v, ',' order by id) from t";

fn server() -> Postgres {
    let server = Postgres::start().expect("PostgreSQL");
    server
        .sql(
            "create table t (id int primary key, v text); insert into t values (1, ''), (2, ''); \
             create table log (number serial, id int, tag text)",
        )
        .expect("setup");
    server
}

/// Each unit holds its row for a while *after* it has got it, so that what is answered first has also happened first, however
/// late the recorder's threads wake up.
fn fight(port: u16) {
    let clients: Vec<_> = (0..SESSIONS)
        .map(|session| {
            thread::spawn(move || {
                let mut client = Client::connect(&ClientOptions::new(port, "postgres", "postgres")).expect("connect");
                for update in 0..UPDATES {
                    let row = 1 + (session + update) % 2;
                    let change = format!(
                        "update t set v = md5(v || '{session}.{update}') where id = {row}; \
                         insert into log (id, tag) values ({row}, '{session}.{update}'); select pg_sleep(0.02)"
                    );
                    if update % 3 == 0 {
                        client.query("begin").expect("begin").ok().expect("ok");
                        client.query(&change).expect("update").ok().expect("ok");
                        client.query("commit").expect("commit").ok().expect("ok");
                    } else {
                        client.query(&change).expect("update").ok().expect("ok");
                    }
                }
                client.terminate().expect("terminate");
            })
        })
        .collect();
    clients.into_iter().for_each(|client| client.join().expect("client"));
}

/// Tags of the updates of a row in the order in which the trace has their commits.
fn order_in_trace(plan: &Plan, row: usize) -> Vec<String> {
    let mut order = Vec::new();
    for session in &plan.sessions {
        let mut updated = None;
        for unit in &session.units {
            let bytes = recorder::messages(plan, session, unit);
            let text = String::from_utf8_lossy(&bytes).into_owned();
            if let Some((_, values)) = text.split_once("values (") {
                let (id, rest) = values.split_once(", '").expect("id and tag");
                let tag = rest.split('\'').next().expect("tag").to_owned();
                updated = Some((id.parse::<usize>().expect("id"), tag));
            }
            if let (Some(commit), Some((id, tag))) = (unit.commit(), updated.clone()) {
                order.push((commit, id, tag));
            }
        }
    }
    order.sort();
    order.into_iter().filter(|(_, id, _)| *id == row).map(|(_, _, tag)| tag).collect()
}

/// A recording whose order is what happened. The recorder is a process like any other: on a machine that leaves it waiting for longer
/// than the rows are held it sees answers in another order than they were sent, and then its trace is of something else.
fn record() -> (Meta, Vec<Record<'static>>, String) {
    for _ in 0..5 {
        let original = server();
        let recorder = Recorder::start(original.port(), Level::Summary);
        fight(recorder.port());
        let records = recorder.records();
        let meta = recorder::meta(&original, Level::Summary);
        let plan = recorder::plan(&meta, &records, &plan::Options::default());
        assert_eq!(plan.commits, SESSIONS * UPDATES);
        let happened = |row| {
            let log = format!("select tag from log where id = {row} order by number");
            original.sql(&log).expect("log").into_iter().flatten().flatten().collect::<Vec<String>>()
        };
        if (1..=2).all(|row| order_in_trace(&plan, row) == happened(row)) {
            return (meta, records, original.sql_value(STATE).expect("state"));
        }
    }
    panic!("the machine is too busy to record anything in its order");
}

#[test]
fn the_order_of_commits_makes_the_same_data() {
    let (meta, records, expected) = record();
    let play = |order_commit: bool| {
        let copy = server();
        let plan = recorder::plan(&meta, &records, &plan::Options::default());
        let options = Options { pace: Pace::Asap, order_commit, ..Options::default() };
        let (_, _, report) =
            recorder::play(plan, recorder::target(copy.port(), Identities::default()), options);
        assert!(report.is_equal(), "{}", report.text());
        assert_eq!(report.counts.released, 0);
        copy.sql_value(STATE).expect("state")
    };
    assert_eq!(play(true), expected);
    // Without it each session begins with its first update at once, which the capture did not.
    assert_ne!(play(false), expected);
}
