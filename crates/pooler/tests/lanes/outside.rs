// SPDX-License-Identifier: Apache-2.0
//! What stays in user space whatever the kernel can, beside clients of the same pooler that a lane carries: unix sockets on either side, TLS.

use underpass_testkit::Authority;

use super::*;

/// Asks for some answers and tells how many transactions a lane has carried, and how often a client was given to one.
fn carried(pooler: &Underpass, at_socket: bool, database: &str) -> Result<(u64, u64)> {
    let mut options = pooler.options("postgres", database);
    if at_socket {
        options = options.unix(pooler.directory());
    }
    let counted = || {
        Ok::<_, underpass_testkit::Error>((kernel(pooler, "A", "xacts")?, kernel(pooler, "all", "given")?))
    };
    let before = counted()?;
    let mut client = Client::connect(&options)?;
    for i in 0..50 {
        assert_eq!(value(&mut client, &format!("select {i}"))?, i.to_string());
    }
    let now = counted()?;
    Ok((now.0 - before.0, now.1 - before.1))
}

#[test]
fn unix_sockets_stay_in_user_space_and_the_log_names_the_databases() -> Result<()> {
    for mode in ["transaction", "session"] {
        let server = Postgres::start()?;
        let by_socket =
            format!("host={} port={} dbname=postgres", server.socket_dir().display(), server.port());
        let base = Ini::for_server(&server).database("local", &by_socket).set("pool_mode", mode);
        let Some(ini) = base.lanes("server", 1) else { return Ok(()) };
        let pooler = Underpass::start(&ini)?;
        for (at_socket, database) in [(true, "postgres"), (false, "local"), (true, "local")] {
            // Not even offered: a lane without servers would send each request up again.
            let outcome = carried(&pooler, at_socket, database)?;
            assert_eq!(outcome, (0, 0), "{mode}, client at a socket: {at_socket}, database {database}");
        }
        assert!(carried(&pooler, false, "postgres")?.0 > 0, "{}", pooler.log());
        let log = pooler.log();
        assert!(log.contains("their servers are at a unix socket: local; at host = 127.0.0.1"), "{log}");
    }
    Ok(())
}

#[test]
fn clients_of_servers_with_tls_are_not_offered() -> Result<()> {
    let authority = Authority::new("authority")?;
    let server = Postgres::builder().tls(&authority).start()?;
    let base = Ini::for_server(&server).set("pool_mode", "transaction").set("server_tls_sslmode", "require");
    let Some(ini) = base.lanes("server", 1) else { return Ok(()) };
    let pooler = Underpass::start(&ini)?;
    assert_eq!(carried(&pooler, false, "postgres")?, (0, 0), "{}", pooler.log());
    Ok(())
}
