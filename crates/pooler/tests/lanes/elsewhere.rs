// SPDX-License-Identifier: Apache-2.0
//! Servers on this machine that are not to be taken for local: in another network namespace, as a container's, and behind a relay, as a balancer's.

use underpass_testkit::{FaultProxy, Netns, Veth, service_user};

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
