// SPDX-License-Identifier: Apache-2.0
//! Sizes and limits that the configuration gives the lanes, and what the programs cost.

use super::*;

#[test]
fn what_has_no_room_is_in_user_space_for_a_reason() -> Result<()> {
    let server = Postgres::start()?;
    for (lane, same_host) in LANES {
        let base = Ini::for_server(&server).set("pool_mode", "transaction").set("default_pool_size", "2");
        let Some(ini) = base.lanes(same_host, 1) else { return Ok(()) };
        let pooler = Underpass::start(&ini.tail(
            "lane_clients_max = 2\nlane_servers_max = 1\nlane_pools_max = 1\nlane_statements_max = 1\n\
             lane_request_bytes = 65536\nlane_response_bytes = 65536\nlane_ring_bytes = 65536",
        ))?;
        let mut clients = (0..4).map(|_| client(&pooler)).collect::<Result<Vec<_>>>()?;
        // More than the limits, both ways.
        let long = "y".repeat(200_000);
        for client in &mut clients {
            for _ in 0..5 {
                value(client, "select 1")?;
            }
            assert_eq!(value(client, &format!("select '{long}'"))?, long);
        }
        for (n, client) in clients.iter_mut().enumerate() {
            for name in ["S_1", "S_2"] {
                prepare(client, name, &format!("select '{name} {n} ' || $1::text"))?;
            }
        }
        for i in 0..40 {
            for (n, client) in clients.iter_mut().enumerate() {
                assert_eq!(value(client, &format!("select {i}"))?, i.to_string());
                for name in ["S_1", "S_2"] {
                    assert_eq!(execute(client, name, &[Some("x")])?, format!("{name} {n} x"));
                }
            }
        }
        // Two transactions at once need the server that has no place.
        for client in &mut clients[..2] {
            client.query("begin")?.ok()?;
        }
        for client in &mut clients[..2] {
            assert_eq!(value(client, "select 7")?, "7");
            client.query("commit")?.ok()?;
        }
        let mut other = Client::connect(&pooler.options("postgres", "template1"))?;
        assert_eq!(value(&mut other, "select 8")?, "8");
        let carried = carried(&pooler, lane)?;
        println!("lane {lane}: {carried} transactions in it, {} not", kernel(&pooler, "user", "xacts")?);
        assert!(carried > 0, "lane {lane}: {}", pooler.log());
        for reason in ["client_refused", "no_place", "named_statement"] {
            assert!(kernel(&pooler, reason, "xacts")? > 0, "lane {lane}: nothing for {reason}");
        }
        assert!(kernel(&pooler, "request_budget", "count")? > 0, "lane {lane}");
    }
    Ok(())
}

#[test]
fn the_cost_of_programs_and_the_share_of_lanes_are_told() -> Result<()> {
    let server = Postgres::start()?;
    let base = Ini::for_server(&server).set("pool_mode", "transaction").set("stats_period", "1");
    let Some(ini) = base.lanes("server", 1) else { return Ok(()) };
    let pooler = Underpass::start(&ini.tail("lane_statistics = 1"))?;
    let mut a = client(&pooler)?;
    let begun = Instant::now();
    while !pooler.log().contains("kernel lanes: xacts D 0, A ") {
        value(&mut a, "select 1")?;
        assert!(begun.elapsed() < Duration::from_secs(20), "{}", pooler.log());
    }
    assert!(kernel(&pooler, "request_skb", "runs")? > 0 && kernel(&pooler, "request_skb", "time")? > 0);
    Ok(())
}

/// Two places, and one name after the other, each forgotten when it is unused.
#[test]
fn the_place_of_a_forgotten_pool_is_used_again() -> Result<()> {
    const ROUNDS: usize = 5;
    let server = Postgres::start()?;
    for (lane, same_host) in &LANES[..2] {
        let base = Ini::for_server(&server)
            .set("pool_mode", "transaction")
            .set("autodb_idle_timeout", "0.3")
            .set("server_idle_timeout", "0.2")
            .database("*", &format!("host=127.0.0.1 port={} dbname=postgres", server.port()));
        let Some(ini) = base.lanes(same_host, 1) else { return Ok(()) };
        let mut pooler = Underpass::start(&ini.tail("lane_pools_max = 2"))?;
        let begun = Instant::now();
        let (mut used, mut refused) = (0, 0);
        while used < ROUNDS {
            assert!(begun.elapsed() < Duration::from_secs(60), "lane {lane}: {used} names\n{}", pooler.log());
            let name = format!("name_{used}_{refused}");
            let mut client = Client::connect(&pooler.options("postgres", &name))?;
            let before = carried(&pooler, lane)?;
            for i in 0..20 {
                assert_eq!(value(&mut client, &format!("select {i}"))?, i.to_string());
            }
            if carried(&pooler, lane)? > before {
                used += 1
            } else {
                refused += 1
            }
            client.terminate()?;
            std::thread::sleep(Duration::from_millis(300));
        }
        println!("lane {lane}: {used} names had a place, {refused} came while there was none");
        // Statistics go with their pools, so there is no account of its transactions.
        pooler.signal(Signal::SIGKILL)?;
        while pooler.is_running() {
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(!pooler.log().contains("free_pool"), "{}", pooler.log());
    }
    Ok(())
}
