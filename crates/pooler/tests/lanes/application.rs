// SPDX-License-Identifier: Apache-2.0
//! Lane B: responses straight into the sockets of applications on this host, found by the pooler itself.

use std::process::{Command, Stdio};

use super::*;

/// A test about lane B alone: two workers, eight servers.
fn lane_b(test: impl Fn(&Postgres, &mut Underpass) -> Result<()>) -> Result<()> {
    let server = Postgres::start()?;
    let ini = Ini::for_server(&server).set("pool_mode", "transaction").set("default_pool_size", "8");
    let Some(ini) = ini.lanes("both", 2) else { return Ok(()) };
    let mut pooler = Underpass::start(&ini)?;
    test(&server, &mut pooler)?;
    assert!(pooler.is_running(), "{}", pooler.log());
    Ok(())
}

/// Waits until a client's transactions end in lane B.
fn settle(pooler: &Underpass, client: &mut Client) -> Result<()> {
    let (begun, before) = (Instant::now(), kernel(pooler, "B", "xacts")?);
    while kernel(pooler, "B", "xacts")? < before + 10 {
        assert!(begun.elapsed() < Duration::from_secs(20), "its socket is not found");
        value(client, "select 1")?;
    }
    Ok(())
}

/// Transactions in lane B, in others, in user space, and chunks of requests straight into a backend's socket and by TCP.
fn counts(pooler: &Underpass) -> Result<[u64; 5]> {
    let others = |item| -> Result<u64> { Ok(kernel(pooler, "A", item)? + kernel(pooler, "D", item)?) };
    Ok([
        kernel(pooler, "B", "xacts")?,
        others("xacts")?,
        kernel(pooler, "user", "xacts")?,
        kernel(pooler, "B", "requests")?,
        others("requests")?,
    ])
}

/// What came back went the lane's way, and so did what was asked: each connection is one thread's, which sends when it has its answer.
fn assert_share(pooler: &Underpass, before: [u64; 5]) -> Result<()> {
    let now = counts(pooler)?;
    let [own, others, user, straight, by_tcp] = [0, 1, 2, 3, 4].map(|i| now[i] - before[i]);
    // Each transaction in user space is at least one request that no program forwarded.
    let asked = straight + by_tcp + user;
    println!("{own} in lane B, {others} in others, {user} in user space");
    println!("{straight} of {asked} requests straight, {:.4}", straight as f64 / asked.max(1) as f64);
    let exits: Vec<_> = pooler
        .console("show kernel")?
        .rows()
        .into_iter()
        .filter(|row| row[0].as_deref() == Some("exit"))
        .collect();
    assert!(own > 100 && own * 100 >= (own + others + user) * 95, "{own}, {others}, {user}: {exits:?}");
    assert!(straight > 100 && straight * 100 >= asked * 95, "{straight} of {asked} requests: {exits:?}");
    Ok(())
}

#[test]
fn a_client_on_this_host_is_served_straight() -> Result<()> {
    lane_b(|_, pooler| {
        let mut a = client(pooler)?;
        settle(pooler, &mut a)?;
        let before = counts(pooler)?;
        for i in 0..300 {
            assert_eq!(value(&mut a, &format!("select {i}"))?, i.to_string());
            assert_eq!(
                a.extended("select $1::int + 1", &[Some(&i.to_string())])?.ok()?.value(),
                Some(&*(i + 1).to_string())
            );
            let replies = a.exchange(&Batch::new().query("begin").query("select 2").query("commit"))?;
            assert_eq!(replies.len(), 3);
        }
        assert_share(pooler, before)
    })
}

#[test]
#[expect(clippy::zombie_processes, reason = "only a test that fails leaves it")]
fn pgbench_is_served_straight() -> Result<()> {
    lane_b(|_, pooler| {
        for protocol in ["simple", "extended", "prepared"] {
            let directory = tempfile::tempdir().unwrap();
            let script = directory.path().join("select.sql");
            std::fs::write(&script, "select 1\n").unwrap();
            let mut bench = Command::new("pgbench")
                .args(["-h", "127.0.0.1", "-p", &pooler.port().to_string(), "-U", "postgres", "-n", "-f"])
                .arg(&script)
                .args(["-M", protocol, "-c", "4", "-j", "2", "-T", "4", "postgres"])
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            // Until the sockets of all of them are found.
            let begun = Instant::now();
            let before = loop {
                let before = counts(pooler)?;
                std::thread::sleep(Duration::from_millis(50));
                let now = counts(pooler)?;
                if now[0] > before[0] + 100 && now[1] == before[1] {
                    break now;
                }
                let runs = bench.try_wait().unwrap().is_none();
                assert!(runs && begun.elapsed() < Duration::from_secs(20), "{protocol}: {before:?}, {now:?}");
            };
            let output = bench.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            assert_share(pooler, before)?;
        }
        Ok(())
    })
}

/// psql, by libpq: results longer than what may wait in an application's socket, errors, notices.
#[test]
fn psql_gets_every_row_in_order() -> Result<()> {
    lane_b(|_, pooler| {
        let script = "select count(*) from (select pg_sleep(0.4)) s;\n".to_owned()
            + &"select string_agg(i::text, ',') from generate_series(1, 20000) i;\nselect i, repeat('x', 100) from generate_series(1, 5000) i;\nselect 1/0;\n"
                .repeat(5);
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("script.sql");
        std::fs::write(&file, script).unwrap();
        let run = |port: u16| -> Result<Vec<u8>> {
            let output = Command::new("psql")
                .args(["-XAtq", "-h", "127.0.0.1", "-p", &port.to_string(), "-U", "postgres", "-f"])
                .arg(&file)
                .arg("postgres")
                .output()
                .unwrap();
            Ok([output.stdout, output.stderr].concat())
        };
        let before = kernel(pooler, "B", "responses")?;
        let by_lane = run(pooler.port())?;
        assert_eq!(by_lane.len(), run(pooler.port())?.len());
        let text = String::from_utf8_lossy(&by_lane);
        assert_eq!(text.matches("4999|x").count(), 5);
        assert_eq!(text.matches("19999,20000").count(), 5);
        assert_eq!(text.matches("division by zero").count(), 5);
        let numbers: Vec<u32> =
            text.lines().filter_map(|line| line.split_once('|')?.0.parse().ok()).collect();
        assert!(numbers.chunks(5000).all(|chunk| chunk.iter().copied().eq(1..=5000)), "rows out of order");
        assert!(kernel(pooler, "B", "responses")? > before, "its socket was not found");
        Ok(())
    })
}

/// Polls until `done`.
fn until(what: &str, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
    let begun = Instant::now();
    while !done()? {
        assert!(begun.elapsed() < Duration::from_secs(30), "never came true: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

#[test]
fn what_an_application_has_not_read_is_told() -> Result<()> {
    lane_b(|_, pooler| {
        let mut a = client(pooler)?;
        settle(pooler, &mut a)?;
        assert_eq!(kernel(pooler, "applications", "queued")?, 0);
        a.send(&Batch::new().query("select repeat('x', 5000)"))?;
        until("the answer waits", || Ok(kernel(pooler, "applications", "queued")? >= 5000))?;
        assert_eq!(a.response()?.ok()?.value().map(str::len), Some(5000));
        assert_eq!(kernel(pooler, "applications", "queued")?, 0);
        Ok(())
    })
}

/// Nobody can tell whether the last answer reached an application that vanishes behind it, or whether its backend is ending.
#[test]
fn the_server_of_an_application_that_vanishes_is_replaced() -> Result<()> {
    lane_b(|_, pooler| {
        until("a server is closed", || {
            let mut a = client(pooler)?;
            settle(pooler, &mut a)?;
            value(&mut a, "select 1")?;
            a.reset()?;
            // Not if this took more than a second since the answer.
            let begun = Instant::now();
            let said = || pooler.log().contains("its client left without its last answer");
            while !said() && begun.elapsed() < Duration::from_secs(1) {
                std::thread::sleep(Duration::from_millis(5));
            }
            Ok(said())
        })?;
        let mut others = (0..8).map(|_| client(pooler)).collect::<Result<Vec<_>>>()?;
        for other in &mut others {
            value(other, "begin")?;
        }
        Ok(())
    })
}
