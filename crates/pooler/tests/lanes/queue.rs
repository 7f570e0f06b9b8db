// SPDX-License-Identifier: Apache-2.0
//! Clients that wait for a server in the kernel: everybody is answered, in turn, and what happens to those who wait happens to them.

use super::*;

/// Those whose backends fetch what waits.
const KEEPING: [(&str, &str); 2] = [("A", "server"), ("B", "both")];

/// Two servers, which is all that there will be.
fn two_servers(ini: Ini) -> Ini {
    ini.set("default_pool_size", "2")
}

/// Clients that have been in their lane, in a pool with all its servers.
fn settled(pooler: &Underpass, count: usize) -> Result<Vec<Client>> {
    let mut clients = (0..count).map(|_| client(pooler)).collect::<Result<Vec<_>>>()?;
    fill(&mut clients)?;
    for client in &mut clients {
        value(client, "select 1")?;
        value(client, "select 1")?;
    }
    Ok(clients)
}

/// Has the pool open its second server.
fn fill(clients: &mut [Client]) -> Result<()> {
    for client in &mut clients[..2] {
        client.query("begin")?.ok()?;
    }
    for client in &mut clients[..2] {
        client.query("commit")?.ok()?;
    }
    Ok(())
}

/// Two transactions that hold both servers.
fn hold(clients: &mut [Client]) -> Result<()> {
    for client in &mut clients[..2] {
        client.query("begin")?.ok()?;
    }
    Ok(())
}

fn let_go(clients: &mut [Client]) -> Result<()> {
    for client in &mut clients[..2] {
        client.query("commit")?.ok()?;
    }
    Ok(())
}

fn shown(pooler: &Underpass, what: &str, column: &str) -> Result<Vec<String>> {
    let table = pooler.console(what)?;
    let at = table.column_names().iter().position(|name| name == column).expect("a column of that name");
    Ok(table.rows().iter().map(|row| row[at].clone().unwrap_or_default()).collect())
}

fn waits(pooler: &Underpass, client: &mut Client, sql: &str) -> Result<()> {
    let before = kernel(pooler, "all", "kept")?;
    client.send(&Batch::new().query(sql))?;
    let start = Instant::now();
    while kernel(pooler, "all", "kept")? == before {
        assert!(start.elapsed() < Duration::from_secs(20), "not kept: {}", pooler.log());
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Sixteen clients on two servers: each has its own answers, nearly all in the kernel, and statements are their own.
#[test]
fn many_share_few_servers_in_the_kernel() -> Result<()> {
    in_lanes(&KEEPING, two_servers, |_, pooler, lane| {
        let options = pooler.options("postgres", "postgres");
        let threads: Vec<_> = (0..16)
            .map(|number| {
                let options = options.clone();
                std::thread::spawn(move || -> Result<()> {
                    let mut client = Client::connect(&options)?;
                    let name = format!("S_{}", number % 3);
                    prepare(&mut client, &name, &format!("select '{} ' || $1::text", number % 2))?;
                    for i in 0..400 {
                        let said = format!("{number} {i}");
                        assert_eq!(value(&mut client, &format!("select '{said}'"))?, said);
                        let sum = client.extended("select $1::int + 1", &[Some(&i.to_string())])?.ok()?;
                        assert_eq!(sum.value(), Some(&*(i + 1).to_string()));
                        let mine = execute(&mut client, &name, &[Some(&said)])?;
                        assert_eq!(mine, format!("{} {said}", number % 2));
                        if i % 50 == 0 {
                            client.query("begin")?.ok()?;
                            assert_eq!(value(&mut client, "select 5")?, "5");
                            client.query("commit")?.ok()?;
                            assert!(client.query("select 1/0").is_err());
                        }
                    }
                    Ok(())
                })
            })
            .collect();
        for thread in threads {
            thread.join().expect("no client fails")?;
        }
        let (carried, user) = (carried(pooler, lane)?, kernel(pooler, "user", "xacts")?);
        let (kept, handed_on) = (kernel(pooler, "all", "kept")?, kernel(pooler, "all", "handed_on")?);
        println!("lane {lane}: {carried} of {}, {kept} kept, {handed_on} handed on", carried + user);
        assert!(carried * 100 >= (carried + user) * 95, "lane {lane}: {carried}, {user} in user space");
        assert!(kept > 1000 && handed_on * 10 > kept * 9, "lane {lane}: {kept} kept, {handed_on} handed on");
        assert_eq!(kernel(pooler, "kept", "queued")?, 0);
        Ok(())
    })
}

#[test]
fn the_console_shows_who_waits_in_the_kernel() -> Result<()> {
    in_lanes(&KEEPING, two_servers, |_, pooler, lane| {
        let mut clients = settled(pooler, 4)?;
        hold(&mut clients)?;
        waits(pooler, &mut clients[2], "select 'two'")?;
        waits(pooler, &mut clients[3], "select 'three'")?;
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(
            shown(pooler, "show pools", "cl_waiting")?.iter().filter(|n| *n == "2").count(),
            1,
            "{lane}"
        );
        let longest = shown(pooler, "show pools", "maxwait_us")?;
        assert!(longest.iter().any(|us| us.parse().is_ok_and(|us: u64| us >= 20_000)), "{longest:?}");
        let states = shown(pooler, "show clients", "state")?;
        assert_eq!(states.iter().filter(|state| *state == "waiting").count(), 2, "{states:?}");
        assert!(kernel(pooler, "kept", "queued")? > 0);
        let_go(&mut clients)?;
        assert_eq!(clients[2].response()?.ok()?.value(), Some("two"));
        assert_eq!(clients[3].response()?.ok()?.value(), Some("three"));
        let waited = || -> Result<u64> {
            let table = pooler.console("show stats_totals")?;
            let at = table.column_names().iter().position(|name| name == "wait_time").expect("wait_time");
            Ok(table.rows().iter().filter_map(|row| row[at].as_deref()?.parse::<u64>().ok()).sum())
        };
        assert!(waited()? >= 40_000, "lane {lane}: {} us", waited()?);
        Ok(())
    })
}

#[test]
fn who_waits_in_the_kernel_for_too_long_is_told() -> Result<()> {
    in_lanes(
        &KEEPING,
        |ini| two_servers(ini).set("query_wait_timeout", "1"),
        |_, pooler, lane| {
            let mut clients = settled(pooler, 3)?;
            hold(&mut clients)?;
            waits(pooler, &mut clients[2], "select 'late'")?;
            let start = Instant::now();
            let told = clients[2].response().and_then(|reply| reply.ok()).expect_err("it waits too long");
            assert!(told.to_string().contains("query_wait_timeout"), "lane {lane}: {told}");
            assert!(start.elapsed() < Duration::from_secs(5));
            let_go(&mut clients)?;
            assert_eq!(value(&mut clients[0], "select 1")?, "1");
            Ok(())
        },
    )
}

/// PAUSE lets those go on who have a server; RESUME, and who waited goes on.
#[test]
fn a_pause_finds_those_who_wait() -> Result<()> {
    in_lanes(&KEEPING, two_servers, |_, pooler, _| {
        let mut clients = settled(pooler, 4)?;
        hold(&mut clients)?;
        waits(pooler, &mut clients[2], "select 'a'")?;
        waits(pooler, &mut clients[3], "select 'b'")?;
        let mut admin = pooler.admin()?;
        let pause = std::thread::spawn(move || -> Result<()> {
            admin.query("pause")?.ok()?;
            Ok(())
        });
        std::thread::sleep(Duration::from_millis(300));
        let_go(&mut clients)?;
        pause.join().expect("PAUSE returns")?;
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(shown(pooler, "show pools", "cl_waiting")?.iter().filter(|n| *n == "2").count(), 1);
        pooler.console("resume")?;
        assert_eq!(clients[2].response()?.ok()?.value(), Some("a"));
        assert_eq!(clients[3].response()?.ok()?.value(), Some("b"));
        Ok(())
    })
}

/// The pool is short of a server, so those who wait come up, and one is opened for them.
#[test]
fn a_server_that_dies_is_replaced_for_those_who_wait() -> Result<()> {
    in_lanes(&KEEPING, two_servers, |server, pooler, lane| {
        let mut clients = settled(pooler, 5)?;
        let mut doomed = Vec::new();
        for client in &mut clients[..2] {
            client.query("begin")?.ok()?;
            doomed.push(value(client, "select pg_backend_pid()")?);
        }
        for (number, client) in clients.iter_mut().enumerate().skip(2) {
            waits(pooler, client, &format!("select '{number}'"))?;
        }
        for pid in doomed {
            server.sql(&format!("select pg_terminate_backend({pid})"))?;
        }
        for (number, client) in clients.iter_mut().enumerate().skip(2) {
            assert_eq!(client.response()?.ok()?.value(), Some(&*number.to_string()), "lane {lane}");
        }
        Ok(())
    })
}

#[test]
fn who_leaves_or_cancels_while_it_waits_is_gone() -> Result<()> {
    in_lanes(&KEEPING, two_servers, |_, pooler, lane| {
        let mut clients = settled(pooler, 5)?;
        hold(&mut clients)?;
        waits(pooler, &mut clients[2], "select 'leaves'")?;
        waits(pooler, &mut clients[3], "select 'cancels'")?;
        waits(pooler, &mut clients[4], "select 'stays'")?;
        let mut stays = clients.pop().expect("five");
        let mut cancels = clients.pop().expect("four");
        drop(clients.pop());
        cancels.cancel()?;
        assert!(cancels.response().and_then(|reply| reply.ok()).is_err(), "lane {lane}");
        let_go(&mut clients)?;
        assert_eq!(stays.response()?.ok()?.value(), Some("stays"), "lane {lane}");
        Ok(())
    })
}

/// A long request waits in user space, short ones and a pipeline in the kernel or there; everybody is served.
#[test]
fn those_who_wait_here_and_there_are_all_served() -> Result<()> {
    in_lanes(&KEEPING, two_servers, |_, pooler, lane| {
        let mut clients = settled(pooler, 6)?;
        for round in 0..20 {
            hold(&mut clients)?;
            let long = "z".repeat(3000);
            waits(pooler, &mut clients[2], "select 'short'")?;
            clients[3].send(&Batch::new().query(&format!("select '{long}'")))?;
            clients[4].send(&Batch::new().query("select 'four'"))?;
            clients[5].send(&Batch::new().query("select 'a'").query("select 'b'"))?;
            let_go(&mut clients)?;
            assert_eq!(clients[2].response()?.ok()?.value(), Some("short"), "lane {lane}, round {round}");
            assert_eq!(clients[3].response()?.ok()?.value(), Some(&*long), "lane {lane}, round {round}");
            assert_eq!(clients[4].response()?.ok()?.value(), Some("four"), "lane {lane}, round {round}");
            for wanted in ["a", "b"] {
                assert_eq!(clients[5].response()?.ok()?.value(), Some(wanted), "lane {lane}, round {round}");
            }
        }
        Ok(())
    })
}

#[test]
fn without_bytes_for_it_nothing_is_kept() -> Result<()> {
    let server = Postgres::start()?;
    for (lane, same_host) in KEEPING {
        let base = two_servers(Ini::for_server(&server).set("pool_mode", "transaction"));
        let Some(ini) = base.lanes(same_host, 1) else { return Ok(()) };
        let pooler = Underpass::start(&ini.tail("lane_kept_bytes = 0"))?;
        let mut clients = settled(&pooler, 3)?;
        hold(&mut clients)?;
        clients[2].send(&Batch::new().query("select 'waits'"))?;
        std::thread::sleep(Duration::from_millis(50));
        let_go(&mut clients)?;
        assert_eq!(clients[2].response()?.ok()?.value(), Some("waits"), "lane {lane}");
        assert_eq!(kernel(&pooler, "all", "kept")?, 0, "lane {lane}");
    }
    Ok(())
}
