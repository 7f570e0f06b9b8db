// SPDX-License-Identifier: Apache-2.0
//! Servers on this machine that are not to be taken for local: in another network namespace, as a container's, and behind a relay, as a balancer's, or
//! addresses that are translated. And one that is, though its processes have other numbers for themselves.

use std::net::{Ipv4Addr, SocketAddrV4};

use underpass_testkit::{FaultProxy, Netns, Port, Veth, service_user};

use super::*;

/// Transactions of a database in lanes D and A.
fn lanes_of(pooler: &Underpass, database: &str) -> Result<(u64, u64)> {
    let counted =
        || Ok::<_, underpass_testkit::Error>((kernel(pooler, "D", "xacts")?, kernel(pooler, "A", "xacts")?));
    let before = counted()?;
    let mut client = Client::connect(&pooler.options("postgres", database))?;
    let long = "z".repeat(20_000);
    for i in 0..50 {
        assert_eq!(value(&mut client, &format!("select '{i}{long}'"))?, format!("{i}{long}"));
    }
    let now = counted()?;
    Ok((now.0 - before.0, now.1 - before.1))
}

/// `/proc/PID/fd` of another user's process is closed to the pooler.
#[test]
fn a_server_of_another_user_is_in_lane_a() -> Result<()> {
    if service_user().is_none_or(|user| user.name != "postgres") {
        eprintln!("skipped: needs root and a user postgres");
        return Ok(());
    }
    let server = Postgres::start()?;
    let base = Ini::for_server(&server).set("pool_mode", "transaction");
    let Some(ini) = base.lanes("server", 1) else { return Ok(()) };
    let pooler = Underpass::start(&ini.set("user", "nobody"))?;
    let (d, a) = lanes_of(&pooler, "postgres")?;
    assert!(d == 0 && a > 0, "{d} in lane D, {a} in lane A: {}", pooler.log());
    assert_eq!(kernel(&pooler, "A", "refused")?, 0);
    Ok(())
}

/// Lane B is for applications: another pooler's program reads the bytes at the socket, and would not see what goes straight into it.
#[test]
fn a_pooler_in_front_of_a_pooler_on_this_host() -> Result<()> {
    let server = Postgres::start()?;
    let Some(inner) = Ini::for_server(&server).set("pool_mode", "transaction").lanes("both", 1) else {
        return Ok(());
    };
    let inner = Underpass::start(&inner)?;
    let outer = Ini::new()
        .userlist("postgres", "")
        .database("postgres", &format!("host=127.0.0.1 port={} dbname=postgres", inner.port()))
        .set("pool_mode", "transaction");
    let outer = Underpass::start(&outer.lanes("server", 1).expect("lanes are to be had"))?;
    let mut client = client(&outer)?;
    client.set_read_timeout(Duration::from_secs(10))?;
    // Applications' sockets are found a moment after they have come.
    for i in 0..300 {
        assert_eq!(value(&mut client, &format!("select {i}"))?, i.to_string());
        std::thread::sleep(Duration::from_millis(4));
    }
    assert!(carried(&outer, "D")? > 250, "{}", outer.log());
    assert!(kernel(&inner, "A", "xacts")? > 250 && kernel(&inner, "B", "xacts")? == 0, "{}", inner.log());
    Ok(())
}

#[test]
fn servers_in_another_namespace_or_behind_a_relay_are_remote() -> Result<()> {
    if service_user().is_none() {
        eprintln!("skipped: network namespaces need root");
        return Ok(());
    }
    let (here, there) = (Netns::new()?, Netns::new()?);
    let veth = Veth::between(&here, &there)?;
    let open = || Postgres::builder().hba("host all all all trust").setting("listen_addresses", "*").start();
    let server_there = there.run(open)??;
    here.run(|| -> Result<()> {
        let server = open()?;
        let relay = FaultProxy::start(server.port())?;
        // Of the user that the pooler runs as, so that it may look into it.
        let other = Underpass::start(&Ini::for_server(&server).tail("[underpass]\nkernel_path = off"))?;
        let base = Ini::new()
            .userlist("postgres", "")
            .database("local", &format!("host=127.0.0.1 port={} dbname=postgres", server.port()))
            .database("relayed", &format!("host=127.0.0.1 port={} dbname=postgres", relay.port()))
            .database("pooled", &format!("host=127.0.0.1 port={} dbname=postgres", other.port()))
            .database(
                "contained",
                &format!("host={} port={} dbname=postgres", veth.second, server_there.port()),
            )
            .set("pool_mode", "transaction");
        let Some(ini) = base.lanes("server", 1) else { return Ok(()) };
        let pooler = Underpass::start(&ini)?;
        let local = lanes_of(&pooler, "local")?;
        assert!(local.0 == 0 && local.1 > 0, "{local:?}: {}", pooler.log());
        for database in ["relayed", "pooled", "contained"] {
            let (d, a) = lanes_of(&pooler, database)?;
            println!("{database}: {d} in lane D, {a} in lane A");
            assert!(d > 0 && a == 0, "{database}: {d} in lane D, {a} in lane A: {}", pooler.log());
        }
        Ok(())
    })?
}

/// A published port of a container, and one of this host that leads to another: the table of sockets has no such connection.
#[test]
fn servers_behind_translated_addresses_are_remote() -> Result<()> {
    if service_user().is_none() {
        eprintln!("skipped: network namespaces need root");
        return Ok(());
    }
    let (here, there) = (Netns::new()?, Netns::new()?);
    let veth = Veth::between(&here, &there)?;
    let open = || Postgres::builder().hba("host all all all trust").setting("listen_addresses", "*").start();
    let (server_here, server_there) = (here.run(open)??, there.run(open)??);
    let (redirected, published) = (Port::reserve()?, Port::reserve()?);
    let address = |text: &str| text.parse::<Ipv4Addr>().expect("an address");
    let (local, first, second) = (Ipv4Addr::LOCALHOST, address(veth.first), address(veth.second));
    let rules = [
        (SocketAddrV4::new(local, redirected.number()), SocketAddrV4::new(local, server_here.port())),
        (SocketAddrV4::new(first, published.number()), SocketAddrV4::new(second, server_there.port())),
    ];
    for (from, to) in rules {
        if let Err(error) = here.translate(from, to) {
            eprintln!("skipped: no NAT: {error}");
            return Ok(());
        }
    }
    let base = Ini::new()
        .userlist("postgres", "")
        .database("local", &format!("host=127.0.0.1 port={} dbname=postgres", server_here.port()))
        .database("redirected", &format!("host=127.0.0.1 port={} dbname=postgres", redirected.number()))
        .database("published", &format!("host={first} port={} dbname=postgres", published.number()));
    for pool_mode in ["transaction", "session"] {
        let Some(ini) = base.clone().set("pool_mode", pool_mode).lanes("server", 1) else { return Ok(()) };
        here.run(|| -> Result<()> {
            let pooler = Underpass::start(&ini)?;
            let local = lanes_of(&pooler, "local")?;
            assert!(local.0 == 0 && local.1 > 0, "{local:?}: {}", pooler.log());
            for (database, server) in [("redirected", &server_here), ("published", &server_there)] {
                let (d, a) = lanes_of(&pooler, database)?;
                println!("{pool_mode} pooling, {database}: {d} in lane D, {a} in lane A");
                assert!(d > 0 && a == 0, "{database}: {d} in lane D, {a} in lane A: {}", pooler.log());
                let mut client = Client::connect(&pooler.options("postgres", database))?;
                assert_eq!(value(&mut client, "show port")?, server.port().to_string());
            }
            assert_eq!(kernel(&pooler, "A", "refused")?, 0);
            Ok(())
        })??;
    }
    Ok(())
}

/// BackendKeyData has the backend's number of its own namespace. Another process has that for us, and holds no such socket.
#[test]
fn a_server_in_another_process_namespace_is_in_lane_a() -> Result<()> {
    if service_user().is_none_or(|user| user.name != "postgres") {
        eprintln!("skipped: needs root and a user postgres");
        return Ok(());
    }
    let server = Postgres::builder().own_processes().start()?;
    let numbers = |pid: u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the server runs");
        let line = status.lines().find_map(|line| line.strip_prefix("NSpid:")).expect("NSpid").to_owned();
        line.split_whitespace().map(|number| number.parse().expect("a number")).collect::<Vec<u32>>()
    };
    let of_postmaster = numbers(server.pid());
    assert_eq!(of_postmaster[of_postmaster.len() - 2..], [server.pid(), 1], "a namespace of its own");
    let base = Ini::for_server(&server).set("pool_mode", "transaction");
    let Some(ini) = base.lanes("server", 1) else { return Ok(()) };
    // Its own user may look into /proc/PID/fd, another is told by the kernel.
    for user in ["postgres", "nobody"] {
        let pooler = Underpass::start(&ini.clone().set("user", user))?;
        let (d, a) = lanes_of(&pooler, "postgres")?;
        println!("pooler of {user}: {d} in lane D, {a} in lane A");
        assert!(d == 0 && a > 0, "{user}: {d} in lane D, {a} in lane A: {}", pooler.log());
        assert_eq!(kernel(&pooler, "A", "refused")?, 0);
    }
    Ok(())
}
