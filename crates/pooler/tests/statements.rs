// SPDX-License-Identifier: Apache-2.0
//! What goes wrong with prepared statements, said to PostgreSQL directly and through the pooler: a client hears the same, with its own names,
//! and finds its transaction in the same state.

use underpass_testkit::{Batch, Client, Ini, Pooler, Postgres, Result, Underpass};

/// Types and bodies of what is answered; of errors only what users read.
fn said(client: &mut Client, batch: &Batch) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for response in client.exchange(batch)? {
        for message in response.messages {
            all.push(match message.error() {
                Some(error) => format!("{error}"),
                None => format!("{}{:?}", message.tag as char, message.strings()),
            });
        }
    }
    Ok(all)
}

/// Batches for one session, one after the other.
fn scenes() -> Vec<(&'static str, Batch)> {
    let batch = Batch::new;
    let run = |name: &str| batch().bind("", name, &[Some("1")]).execute("", 0).sync();
    let one = "select $1::int";
    vec![
        ("prepares", batch().parse("plan", one).parse("s", one).parse("twin", one).sync()),
        ("same name, same text", batch().parse("plan", one).sync()),
        ("same name, other text", batch().parse("plan", "select 2").sync()),
        ("a short name", batch().parse("s", "select 2").sync()),
        ("a text as another name's", batch().parse("twin", one).sync()),
        ("a text that does not parse", batch().parse("plan", "selec").sync()),
        ("the first is the one that stays", run("plan")),
        ("the unnamed one may be prepared again", batch().parse("", one).parse("", one).sync()),
        (
            "what is behind it is discarded up to the Sync",
            batch()
                .parse("new", one)
                .parse("plan", "select 2")
                .parse("lost", one)
                .bind("", "plan", &[Some("1")])
                .execute("", 0)
                .sync()
                .bind("", "new", &[Some("1")])
                .execute("", 0)
                .sync(),
        ),
        ("such as this", run("lost")),
        ("twice in one batch", batch().parse("two", one).parse("two", one).sync().parse("two", one).sync()),
        (
            "closed and prepared again",
            batch().close_statement("plan").parse("plan", "select $1::text").sync(),
        ),
        ("and once more", batch().parse("plan", one).sync()),
        ("begin", batch().query("begin")),
        ("in a transaction", batch().parse("plan", one).sync()),
        ("which has failed", batch().parse("plan", one).sync()),
        ("also for others", batch().parse("late", one).sync()),
        ("rollback", batch().query("rollback")),
        ("does not exist", batch().bind("", "nobody", &[]).sync()),
        (
            "looks like one of the pooler's",
            batch().bind("", "~00", &[]).sync().describe_statement("~").sync(),
        ),
        ("is closed without being there", batch().close_statement("nobody").close_statement("~000").sync()),
        ("described without being there", batch().describe_statement("nobody").sync()),
        ("too many values", batch().bind("", "plan", &[Some("1"), Some("2")]).sync()),
        ("too few", batch().bind("", "s", &[]).sync()),
        ("and it is there", run("plan")),
        ("forgotten", batch().query("deallocate all")),
        ("and gone", run("plan")),
    ]
}

/// `ini` may change what pooling does to statements. Servers without names of their own are found under those of clients, so one session it is.
fn compare(server: &Postgres, ini: &Ini) -> Result<()> {
    let pooler = Underpass::start(ini)?;
    let mut direct = Client::connect(&server.superuser())?;
    let mut pooled = Client::connect(&pooler.options("postgres", "postgres"))?;
    for (scene, batch) in scenes() {
        let (expected, heard) = (said(&mut direct, &batch)?, said(&mut pooled, &batch)?);
        assert_eq!(heard, expected, "{scene}");
    }
    Ok(())
}

#[test]
fn errors_are_postgresqls_with_the_clients_names() -> Result<()> {
    let server = Postgres::start()?;
    let ini = Ini::for_server(&server).set("pool_mode", "transaction").set("default_pool_size", "1");
    compare(&server, &ini)?;
    // Eviction and preparing again between and within the batches.
    compare(&server, &ini.clone().set("max_prepared_statements", "1"))?;
    compare(&server, &ini.set("max_prepared_statements", "0"))?;
    compare(&server, &Ini::for_server(&server).set("pool_mode", "session"))
}

/// A server that has lost what the pooler prepared on it, in a way that no CommandComplete tells.
#[test]
fn a_statement_that_the_server_lost_has_the_clients_name() -> Result<()> {
    let server = Postgres::start()?;
    let pooler = Underpass::start(
        &Ini::for_server(&server).set("pool_mode", "transaction").set("default_pool_size", "1"),
    )?;
    let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
    said(&mut client, &Batch::new().parse("plan", "select 1").sync())?;
    client.query("do $$ begin execute 'deallocate all'; end $$")?.ok()?;
    let heard = said(&mut client, &Batch::new().bind("", "plan", &[]).sync())?;
    assert_eq!(heard[0], "ERROR 26000: prepared statement \"plan\" does not exist");
    Ok(())
}
