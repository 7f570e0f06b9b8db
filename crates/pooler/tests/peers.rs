// SPDX-License-Identifier: Apache-2.0
//! Poolers that share clients (`peer_id`, `[peers]`): a cancel request reaches its statement whichever of them gets it.

use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use underpass_testkit::{Batch, Client, Error, Ini, Pooler, Postgres, Result, Underpass};

const LIMIT: Duration = Duration::from_secs(20);

/// Asks `holds` again and again until it is true.
fn eventually(what: &str, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + LIMIT;
    while !holds()? {
        assert!(Instant::now() < end, "{what}: not within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn instance(server: &Postgres, id: u32, peers: &str) -> Ini {
    Ini::for_server(server)
        .set("pool_mode", "transaction")
        .set("peer_id", &id.to_string())
        .tail(&format!("[peers]\n{peers}"))
}

/// Sends the cancel request of `client` to the pooler at `to` and waits until it is answered.
fn cancel_at(to: &Underpass, client: &Client) -> Result<()> {
    let mut asker = asked_at(to, client)?;
    asker.until_closed()?;
    Ok(())
}

/// The same without waiting.
fn asked_at(to: &Underpass, client: &Client) -> Result<Client> {
    let (process_id, secret) = client.backend_key();
    let mut asker = Client::open(&to.options("postgres", "postgres"))?;
    asker.send(&Batch::new().cancel_request(process_id, secret))?;
    Ok(asker)
}

fn statements_running(server: &Postgres) -> Result<String> {
    server.sql_value(
        "select count(*) from pg_stat_activity where query like 'select pg_sleep%' and state = 'active'",
    )
}

fn is_cancelled(client: &mut Client) -> Result<bool> {
    Ok(matches!(client.response()?.ok(), Err(Error::Server(error)) if error.sqlstate == "57014"))
}

#[test]
fn a_cancel_request_finds_its_statement_through_any_instance() -> Result<()> {
    let server = Postgres::start()?;
    // Each knows the others: the first by RELOAD, because ports are known only then. The third listens nowhere, and the second not at the
    // first address of its name.
    let mut first = Underpass::start(
        &instance(&server, 1, "").environment("UNDERPASS_TEST_HOSTS", "two.test 127.0.0.9 127.0.0.1"),
    )?;
    let to_first = format!("1 = host=127.0.0.1 port={}\n", first.port());
    let second = Underpass::start(&instance(&server, 2, &format!("{to_first}3 = host=/nonexistent")))?;
    first.rewrite(&instance(&server, 1, &format!("2 = host=two.test port={}", second.port())))?;
    first.console("RELOAD")?.ok()?;

    // Short keys of protocol 3.0 and long ones of 3.2, in both directions.
    for (home, other) in [(&first, &second), (&second, &first)] {
        for version in [0x0003_0000, 0x0003_0002] {
            let mut client = Client::connect(&home.options("postgres", "postgres").protocol(version))?;
            let mut bystander = Client::connect(&home.options("postgres", "postgres"))?;
            for sleeper in [&mut client, &mut bystander] {
                sleeper.send(&Batch::new().query("select pg_sleep(600)"))?;
            }
            eventually("both statements run", || Ok(statements_running(&server)? == "2"))?;
            cancel_at(other, &client)?;
            assert!(is_cancelled(&mut client)?);
            assert_eq!(statements_running(&server)?, "1", "the other client's goes on");
            cancel_at(other, &bystander)?;
            assert!(is_cancelled(&mut bystander)?);
            // The session lives, and a late request does no harm.
            cancel_at(other, &client)?;
            assert_eq!(client.query("select 7")?.ok()?.value(), Some("7"));
        }
    }

    // A key with the third's number, and one of a number that nobody knows: answered, and nothing else happens.
    for id in [3u32, 9] {
        let mut asker = Client::open(&second.options("postgres", "postgres"))?;
        asker.send(&Batch::new().cancel_request(id << 16, b"\0\0\0\xff"))?;
        asker.until_closed()?;
    }
    Ok(())
}

/// PgBouncer writes its id into the second and third byte of a key, the low one first, and passes requests on to whom it finds there.
#[test]
fn a_pgbouncer_may_be_among_the_peers() -> Result<()> {
    let server = Postgres::start()?;
    let pgbouncer = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = pgbouncer.local_addr().expect("bound").port();
    let pooler = Underpass::start(&instance(&server, 1, &format!("2 = host=127.0.0.1 port={port}")))?;

    let client = Client::connect(&pooler.options("postgres", "postgres"))?;
    let (process_id, secret) = client.backend_key();
    assert_eq!((&process_id.to_be_bytes()[1..3], secret[3] & 3), (&[1, 0][..], 3));

    let mut asker = Client::open(&pooler.options("postgres", "postgres"))?;
    asker.send(&Batch::new().cancel_request(0x5502_0066, b"\x11\x22\x33\x47"))?;
    let mut request = [0; 16];
    let (mut connection, _) = pgbouncer.accept().expect("a connection");
    connection.read_exact(&mut request).expect("a CancelRequest");
    assert_eq!(&request, b"\0\0\0\x10\x04\xd2\x16\x2e\x55\x02\x00\x66\x11\x22\x33\x46", "one hop less");
    drop(connection);
    asker.until_closed()?;
    // An address is no name.
    assert!(pooler.console("SHOW DNS_HOSTS")?.ok()?.rows().is_empty());
    Ok(())
}

#[test]
fn at_most_pool_size_requests_are_under_way_to_a_peer() -> Result<()> {
    let server = Postgres::start()?;
    // A peer that takes connections and does not answer.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = silent.local_addr().expect("bound").port();
    let home = Underpass::start(&instance(&server, 2, ""))?;
    let client = Client::connect(&home.options("postgres", "postgres"))?;
    let peers = format!("2 = host=127.0.0.1 port={port} pool_size=2");
    let ini = instance(&server, 1, &peers).set("cancel_wait_timeout", "600").set("client_login_timeout", "1");
    let pooler = Underpass::start(&ini)?;

    let mut askers = (0..5).map(|_| asked_at(&pooler, &client)).collect::<Result<Vec<_>>>()?;
    let mut taken: Vec<TcpStream> = (0..2).map(|_| silent.accept().expect("a request").0).collect();
    let counts = |sent: &str, waiting: &str| {
        let row = pooler.console("SHOW PEER_POOLS")?.ok()?.rows().swap_remove(0);
        Ok(row[1].as_deref() == Some(sent) && row[2].as_deref() == Some(waiting))
    };
    eventually("two are sent, three wait", || counts("2", "3"))?;
    // Nobody here is late with a login.
    std::thread::sleep(Duration::from_millis(1500));
    eventually("they still wait", || counts("2", "3"))?;
    silent.set_nonblocking(true).expect("nonblocking");
    assert!(silent.accept().is_err(), "a third connection");
    // Each that ends makes room for one.
    silent.set_nonblocking(false).expect("blocking");
    for waiting in ["2", "1", "0"] {
        let mut request = [0; 16];
        let mut done = taken.remove(0);
        done.read_exact(&mut request).expect("a CancelRequest");
        assert_eq!(&request[..8], b"\0\0\0\x10\x04\xd2\x16\x2e");
        drop(done);
        taken.push(silent.accept().expect("the next request").0);
        eventually("one more is sent", || counts("2", waiting))?;
    }
    drop((taken, silent));
    for asker in &mut askers {
        assert_eq!(asker.until_closed()?, []);
    }
    eventually("none is left", || counts("0", "0"))?;
    Ok(())
}
