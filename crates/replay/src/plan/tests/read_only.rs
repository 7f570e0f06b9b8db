// SPDX-License-Identifier: Apache-2.0
//! What is sent in the place of statements that would lift read-only mode.

use super::*;

const BEGIN: &[u8] = b"BEGIN ISOLATION LEVEL REPEATABLE READ, READ WRITE";
const KEPT: &[u8] = b"begin isolation level repeatable read";

/// Drivers prepare BEGIN, too.
#[test]
fn a_begin_that_is_prepared_begins_a_transaction_that_only_reads() {
    let mut trace = Trace::default();
    trace.start(1, 0, true);
    let execute = |out: &mut Vec<u8>, name: &[u8]| {
        build::bind(out, b"", name, [], [], []);
        build::execute(out, b"", 0);
        build::sync(out);
    };
    let sync = trace.send(1, 1, |out| {
        build::parse(out, b"s", BEGIN, []);
        execute(out, b"s");
    });
    trace.ready(1, 2, sync, T);
    trace.query(1, 3, 4, "commit", I);
    let sync = trace.send(1, 5, |out| execute(out, b"before"));
    trace.ready(1, 6, sync, T);
    trace.records.push(Record::PreparedFill(PreparedFill {
        session: SessionId(1),
        time_ns: 5,
        name: b"before"[..].into(),
        query: BEGIN.into(),
        param_types: Vec::new(),
        redaction: Redaction::None,
    }));
    let plan = trace.plan(&Options { read_only: true, ..Options::default() });
    assert!(plan.omitted.units.is_empty(), "{:?}", plan.omitted.units);
    let mut bytes = Vec::new();
    build::parse(&mut bytes, b"s", KEPT, []);
    execute(&mut bytes, b"s");
    assert_eq!(sent(&plan, 0, 0).concat(), bytes);
    bytes.clear();
    build::parse(&mut bytes, b"before", KEPT, []);
    assert_eq!(plan.sessions[0].prepared, [bytes.clone()]);
    // Where writes are played, so is the BEGIN.
    bytes.clear();
    build::parse(&mut bytes, b"s", BEGIN, []);
    execute(&mut bytes, b"s");
    assert_eq!(sent(&trace.plan(&Options::default()), 0, 0).concat(), bytes);
}
