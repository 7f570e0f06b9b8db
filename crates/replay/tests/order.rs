// SPDX-License-Identifier: Apache-2.0
//! Sessions that fight over the same rows, with an update whose order shows in the result: with order `commit` a replay gives
//! the same data, without it does not.

mod recorder;

use std::thread;

use recorder::Recorder;
use underpass_replay::Identities;
use underpass_replay::plan;
use underpass_replay::run::{Options, Pace};
use underpass_testkit::{Client, Options as ClientOptions, Postgres};
use underpass_trace::Level;

const SESSIONS: usize = 5;
const UPDATES: usize = 12;
const STATE: &str = "select string_agg(id || '=' || v, ',' order by id) from t";

fn server() -> Postgres {
    let server = Postgres::start().expect("PostgreSQL");
    server
        .sql("create table t (id int primary key, v text); insert into t values (1, ''), (2, '')")
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
                    let change = format!(
                        "update t set v = md5(v || '{session}.{update}') where id = {}; select pg_sleep(0.02)",
                        1 + (session + update) % 2
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

#[test]
fn the_order_of_commits_makes_the_same_data() {
    let original = server();
    let recorder = Recorder::start(original.port(), Level::Summary);
    fight(recorder.port());
    let records = recorder.records();
    let expected = original.sql_value(STATE).expect("state");
    let meta = recorder::meta(&original, Level::Summary);
    let play = |order_commit: bool| {
        let copy = server();
        let plan = recorder::plan(&meta, &records, &plan::Options::default());
        assert_eq!(plan.commits, SESSIONS * UPDATES);
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
