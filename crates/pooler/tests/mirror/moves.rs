// SPDX-License-Identifier: Apache-2.0
//! Names that come to lead to another server while nobody changes a file: nothing is done twice.

use underpass_testkit::{Client, FaultProxy, Ini, Pooler, Postgres, Result, Underpass};

use crate::pair::{MODES, Pair, eventually, server, table};

fn insert(client: &mut Client, id: u32) -> Result<()> {
    client.query(&format!("insert into t values ({id})")).map(drop)
}

fn state(pooler: &Underpass) -> Result<String> {
    Ok(table(pooler, "SHOW MIRRORS")?.remove(0).remove("state").expect("a column"))
}

/// The primary's name leads to the mirror from RECONNECT on, or when the connections to the old primary have broken.
#[test]
fn a_primary_that_fails_over_to_its_mirror() -> Result<()> {
    for (mode, reconnects) in [(MODES[0], true), (MODES[0], false), (MODES[1], true), (MODES[2], true)] {
        let (here, there) = (server()?, server()?);
        for server in [&here, &there] {
            server.sql("create table t (id int)")?;
        }
        let relay = FaultProxy::start(here.port())?;
        let ini = Ini::for_server(&here)
            .set("pool_mode", "transaction")
            .database("postgres", &format!("host=127.0.0.1 port={}", relay.port()))
            .tail(&format!(
                "[underpass:mirror:m]\ndatabases = *\nhost = 127.0.0.1\nport = {}\n{mode}",
                there.port()
            ));
        let pooler = Underpass::start(&ini)?;
        let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
        eventually("it is on", || Ok(state(&pooler)? == "on"))?;
        insert(&mut client, 1)?;
        eventually("it is there", || Ok(there.sql_value("select count(*) from t")? == "1"))?;
        relay.lead_to(there.port());
        if reconnects {
            pooler.console("RECONNECT")?.ok()?;
        } else {
            relay.close_all();
            drop(client);
            eventually("a client finds the other server", || {
                let client = Client::connect(&pooler.options("postgres", "postgres"));
                Ok(client.and_then(|mut client| client.query("select 1")).is_ok())
            })?;
            client = Client::connect(&pooler.options("postgres", "postgres"))?;
        }
        for id in 2..30 {
            insert(&mut client, id)?;
        }
        eventually("it is refused", || Ok(state(&pooler)? == "same_server"))?;
        std::thread::sleep(std::time::Duration::from_millis(300));
        assert_eq!(here.sql_value("select count(*) from t")?, "1", "{mode}");
        assert_eq!(there.sql_value("select count(*) from t")?, "29", "{mode}: twice\n{}", pooler.log());
        // Back at the old one: an operator says so.
        relay.lead_to(here.port());
        pooler.console("RECONNECT")?.ok()?;
        insert(&mut client, 30)?;
        pooler.console("ENABLE MIRROR m")?.ok()?;
        drop(Client::connect(&pooler.options("postgres", "postgres"))?);
        eventually("it is on again", || Ok(state(&pooler)? == "on"))?;
    }
    Ok(())
}

/// Of the servers behind the primary's name one is the mirror: no connection breaks, and nobody says RECONNECT.
#[test]
fn a_primary_of_several_servers_is_asked_at_each() -> Result<()> {
    let (here, there) = (server()?, server()?);
    for server in [&here, &there] {
        server.sql("create table t (id int)")?;
    }
    let relay = FaultProxy::start(here.port())?;
    let ini = Ini::for_server(&here)
        .set("pool_mode", "transaction")
        .database("postgres", &format!("host=127.0.0.1 port={}", relay.port()))
        .tail(&format!("[underpass:mirror:m]\ndatabases = *\nhost = 127.0.0.1\nport = {}", there.port()));
    let pooler = Underpass::start(&ini)?;
    let mut clients = (0..3)
        .map(|_| Client::connect(&pooler.options("postgres", "postgres")))
        .collect::<Result<Vec<_>>>()?;
    eventually("it is on", || Ok(state(&pooler)? == "on"))?;
    // All at once, so that each has a server of its own.
    for client in &mut clients {
        client.query("begin")?.ok()?;
        relay.lead_to(there.port());
    }
    for (id, client) in (0..).zip(&mut clients) {
        insert(client, id)?;
        client.query("commit")?.ok()?;
    }
    eventually("it is refused", || Ok(state(&pooler)? == "same_server"))?;
    std::thread::sleep(std::time::Duration::from_millis(300));
    let count = |server: &Postgres| -> Result<u32> {
        Ok(server.sql_value("select count(*) from t")?.parse::<u32>().expect("a number"))
    };
    let all = count(&here)? + count(&there)?;
    assert_eq!(all, 3, "twice\n{}", pooler.log());
    Ok(())
}

/// Anybody can name a database of `*`: what its mirror has counted, and the pools there, go when it is forgotten.
#[test]
fn databases_that_come_and_go_leave_no_mirror_behind() -> Result<()> {
    for mode in MODES {
        let mut pair = Pair::start_with(
            &[("pool_mode", "transaction"), ("autodb_idle_timeout", "0.3"), ("server_idle_timeout", "0.2")],
            mode,
        )?;
        pair.both("create table t (id int)")?;
        for round in 0..3 {
            for name in ["one", "two", "three"] {
                if round == 0 {
                    pair.both(&format!("create database {name}"))?;
                }
                let mut client = Client::connect(&pair.pooler.options("postgres", name))?;
                client.query("select 1")?.ok()?;
            }
            eventually("they have been seen", || Ok(!pair.mirrors()?.is_empty()))?;
            let pools = || table(&pair.pooler, "SHOW POOLS");
            eventually("they are forgotten", || Ok(pair.mirrors()?.is_empty() && pools()?.len() == 1))?;
        }
        // One that comes back is mirrored.
        let mut client = pair.client()?;
        pair.wait_state("on")?;
        insert(&mut client, 1)?;
        eventually("it is there", || Ok(pair.there.sql_value("select count(*) from t")? == "1"))?;
        // And so it is if RELOAD takes the mirror away and back.
        pair.reload(None)?;
        eventually("the mirror's pools have gone", || {
            let pools = table(&pair.pooler, "SHOW POOLS")?;
            Ok(pools.iter().all(|pool| !pool["database"].contains('@')))
        })?;
        pair.reload(Some(mode))?;
        let inserted = || -> Result<bool> {
            insert(&mut client, 2)?;
            Ok(pair.there.sql_value("select count(*) from t where id = 2")? != "0")
        };
        eventually("the mirror is back", inserted)?;
    }
    Ok(())
}
