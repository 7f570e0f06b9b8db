// SPDX-License-Identifier: Apache-2.0
//! What PostgreSQL discards of a pipeline.

use super::*;

/// The SQLSTATE of a reply's error, or its value.
fn outcome(reply: underpass_testkit::Response) -> String {
    let error = reply.messages.iter().find_map(|message| message.error());
    error.map_or_else(|| reply.value().unwrap_or_default().to_owned(), |error| error.sqlstate)
}

/// Behind an error PostgreSQL discards a Parse, and its unnamed statement stays what another client left.
#[test]
fn a_parse_that_is_discarded_lends_nobody_the_statement_of_another() -> Result<()> {
    each_lane(
        |ini| ini.set("default_pool_size", "1"),
        |_, pooler, lane| {
            let (mut a, mut b) = (client(pooler)?, client(pooler)?);
            prepare(&mut a, "S_1", "select pg_sleep(0.2)")?;
            let slow = Batch::new().bind("", "S_1", &[]).execute("", 0).sync();
            let failing = Batch::new().execute("nowhere", 0).parse("", "select 'a'").bind("", "", &[]);
            let failing = failing.execute("", 0).sync();
            let again = Batch::new().bind("", "", &[]).execute("", 0).sync();
            for is_apart in [false, false, true, true] {
                // Both in their lanes, and the last statement is that of b.
                for _ in 0..3 {
                    execute(&mut a, "S_1", &[])?;
                    assert_eq!(b.extended("select 'b'", &[])?.ok()?.value(), Some("b"));
                }
                a.send_bytes(&[slow.as_bytes(), failing.as_bytes()].concat())?;
                if is_apart {
                    std::thread::sleep(Duration::from_millis(50));
                }
                a.send(&again)?;
                let replies = (0..3).map(|_| a.response()).collect::<Result<Vec<_>>>()?;
                let told: Vec<_> = replies.into_iter().map(outcome).collect();
                assert_eq!(told, ["", "34000", "26000"], "lane {lane}, apart: {is_apart}");
                // In one segment.
                b.extended("select 'b'", &[])?.ok()?;
                a.send_bytes(&[failing.as_bytes(), again.as_bytes()].concat())?;
                let replies = (0..2).map(|_| a.response()).collect::<Result<Vec<_>>>()?;
                let told: Vec<_> = replies.into_iter().map(outcome).collect();
                assert_eq!(told, ["34000", "26000"], "lane {lane}");
            }
            Ok(())
        },
    )
}

/// It also discards a Query, for which no ReadyForQuery comes then.
#[test]
fn a_query_that_is_discarded_keeps_no_server() -> Result<()> {
    each_lane(
        |ini| ini.set("default_pool_size", "1"),
        |_, pooler, lane| {
            let (mut a, mut b) = (client(pooler)?, client(pooler)?);
            for _ in 0..3 {
                value(&mut a, "select 1")?;
                value(&mut b, "select 1")?;
            }
            let failing = Batch::new().parse("", "select 1/0").bind("", "", &[]).execute("", 0);
            a.send(&failing.query("select 2").sync())?;
            assert_eq!(outcome(a.response()?), "22012");
            b.set_read_timeout(Duration::from_secs(10))?;
            let answer = value(&mut b, "select 1");
            assert!(answer.as_ref().is_ok_and(|one| one == "1"), "lane {lane}: {answer:?}");
            assert_eq!(value(&mut a, "select 3")?, "3");
            Ok(())
        },
    )
}
