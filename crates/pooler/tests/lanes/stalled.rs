// SPDX-License-Identifier: Apache-2.0
//! Programs that stop between their steps, where others see one without the other: what takes months of service to happen there happens in seconds.

use std::thread;
use std::time::Instant;

use underpass_testkit::{Account, Batch, Client, Ini, Pooler, Result, Underpass};

use super::{LANES, client, each_lane, in_lanes};

/// As many as the pool has servers: nobody queues in user space.
const CLIENTS: u64 = 4;

/// The clients' threads, all at once; each is called with its number.
fn together(work: impl Fn(u64) -> Result<()> + Sync) -> Result<()> {
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = (0..CLIENTS).map(|number| scope.spawn(move || work(number))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("a client's thread"))
    })
}

fn stalled(ini: Ini) -> Ini {
    ini.environment("UNDERPASS_TEST_STALL", "100000").environment("UNDERPASS_TEST_FLIP", "8")
}

/// A transaction in pieces that do not wait for answers.
fn begin(client: &mut Client, mark: &str) -> Result<()> {
    client.send(&Batch::new().query("begin"))?;
    client.send(&Batch::new().query(&format!("select {mark}")))?;
    client.send(&Batch::new().query("commit"))
}

/// Its answers.
fn finish(client: &mut Client, mark: &str) -> Result<()> {
    assert_eq!(client.response()?.ok()?.status(), Some(b'T'));
    assert_eq!(client.response()?.ok()?.value(), Some(mark));
    assert_eq!(client.response()?.ok()?.status(), Some(b'I'));
    Ok(())
}

fn total(pooler: &Underpass, name: &str) -> Result<u64> {
    let rows = pooler.console("show totals")?.rows();
    let row = rows.iter().find(|row| row[0].as_deref() == Some(name)).expect("a total");
    Ok(row[1].as_deref().and_then(|number| number.parse().ok()).expect("a number"))
}

/// A request can begin while the answer to the one before ends the link, and user space takes the client. The numbers must be right all
/// the same, and no time longer than what has passed.
#[test]
fn transactions_in_pieces_are_counted_right() -> Result<()> {
    const TRANSACTIONS: u64 = 1000;
    each_lane(stalled, |_, pooler, lane| {
        let begun = Instant::now();
        together(|number| {
            let mut client = client(pooler)?;
            (0..TRANSACTIONS).try_for_each(|round| {
                let mark = (number * TRANSACTIONS + round).to_string();
                begin(&mut client, &mark)?;
                finish(&mut client, &mark)
            })
        })?;
        let limit = begun.elapsed().as_micros() as u64 * CLIENTS;
        assert_eq!(total(pooler, "total_xact_count")?, CLIENTS * TRANSACTIONS, "lane {lane}");
        assert_eq!(total(pooler, "total_query_count")?, CLIENTS * TRANSACTIONS * 3, "lane {lane}");
        for name in ["total_xact_time", "total_query_time"] {
            let time = total(pooler, name)?;
            assert!((1..=limit).contains(&time), "lane {lane}: {name} is {time} of {limit}");
        }
        Ok(())
    })
}

/// A client that closes its connection is let go at once, also while a program counts its last transaction. Not in lanes A and B: there a reset
/// may end the backend while its `send()` goes on behind the program, and these stops make of that rare moment (docs/lanes.md, "A client that is gone") a common one.
#[test]
fn the_last_transaction_of_a_client_that_leaves_is_counted() -> Result<()> {
    const CONNECTIONS: u64 = 200;
    in_lanes(&LANES[..1], stalled, |_, pooler, lane| {
        together(|number| {
            (0..CONNECTIONS).try_for_each(|round| {
                let mut client = client(pooler)?;
                let mark = (number * CONNECTIONS + round).to_string();
                for _ in 0..5 {
                    begin(&mut client, &mark)?;
                    finish(&mut client, &mark)?;
                }
                begin(&mut client, &mark)?;
                client.reset()
            })
        })?;
        let account = Account::of(pooler)?.expect("lanes are on");
        println!("lane {lane}: {account}");
        assert!(account.mistakes(true).is_empty(), "lane {lane}: {:?}", account.mistakes(true));
        assert!(
            (5 * CLIENTS * CONNECTIONS..=6 * CLIENTS * CONNECTIONS).contains(&account.total),
            "{account}"
        );
        Ok(())
    })
}
