// SPDX-License-Identifier: Apache-2.0
//! tokio-postgres: extended protocol with named statements, pipelined by polling futures together.

use std::env;
use std::error::Error;
use std::future::Future;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{SinkExt, StreamExt, future, pin_mut, stream};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use tokio_postgres::{
    AsyncMessage, Client, Config, NoTls, SimpleQueryMessage, config::SslMode, error::SqlState,
};
use tokio_postgres_rustls::MakeRustlsConnect;

type Outcome = Result<(), Box<dyn Error>>;

const LARGE: usize = 16 << 20;

fn var(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("{name} is not set"))
}

fn config() -> Config {
    let mut config = Config::new();
    config
        .host(var("DRIVER_HOST"))
        .port(var("DRIVER_PORT").parse().expect("port"))
        .user(var("DRIVER_USER"))
        .password(var("DRIVER_PASSWORD"))
        .dbname(var("DRIVER_DB"))
        .connect_timeout(Duration::from_secs(20))
        .ssl_mode(SslMode::Disable);
    config
}

async fn connect(config: &Config) -> Result<Client, tokio_postgres::Error> {
    let (client, connection) = config.connect(NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

fn same<T: PartialEq + std::fmt::Debug>(actual: T, expected: T) -> Outcome {
    if actual == expected { Ok(()) } else { Err(format!("got {actual:?}, expected {expected:?}").into()) }
}

fn fails<T>(result: Result<T, tokio_postgres::Error>, state: &SqlState) -> Outcome {
    match result {
        Err(error) if error.code() == Some(state) => Ok(()),
        Err(error) => Err(error.into()),
        Ok(_) => Err(format!("no error, expected {}", state.code()).into()),
    }
}

async fn connect_scram() -> Outcome {
    let client = connect(&config()).await?;
    same(client.query_one("SELECT current_user::text", &[]).await?.get::<_, String>(0), var("DRIVER_USER"))
}

async fn connect_tls_verify_full() -> Outcome {
    let mut roots = rustls::RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(var("DRIVER_CA"))? {
        roots.add(certificate?)?;
    }
    let tls = rustls::ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    let (client, connection) =
        config().ssl_mode(SslMode::Require).connect(MakeRustlsConnect::new(tls)).await?;
    tokio::spawn(connection);
    same(client.query_one("SELECT 1", &[]).await?.get::<_, i32>(0), 1)
}

async fn wrong_password() -> Outcome {
    match connect(config().password("no")).await {
        Err(error) if format!("{error:?}").contains("authentication failed") => Ok(()),
        Err(error) => Err(error.into()),
        Ok(_) => Err("let in".into()),
    }
}

async fn simple() -> Outcome {
    let client = connect(&config()).await?;
    let messages = client.simple_query("SELECT 1; SELECT 2").await?;
    same(messages.iter().filter(|m| matches!(m, SimpleQueryMessage::Row(_))).count(), 2)
}

async fn prepared() -> Outcome {
    let (one, two) = (connect(&config()).await?, connect(&config()).await?);
    let statements = [one.prepare("SELECT $1::int * 2").await?, two.prepare("SELECT $1::int * 2").await?];
    for number in 0..20 {
        for (client, statement) in [&one, &two].into_iter().zip(&statements) {
            same(client.query_one(statement, &[&number]).await?.get::<_, i32>(0), number * 2)?;
        }
    }
    Ok(())
}

/// Runs only where it is asked for by name.
async fn repeated() -> Outcome {
    let (one, two) = (connect(&config()).await?, connect(&config()).await?);
    let statements = [one.prepare("SELECT $1::int * 2").await?, two.prepare("SELECT $1::int * 2").await?];
    for number in 0..5000 {
        for (client, statement) in [&one, &two].into_iter().zip(&statements) {
            same(client.query_one(statement, &[&number]).await?.get::<_, i32>(0), number * 2)?;
        }
    }
    Ok(())
}

async fn pipeline() -> Outcome {
    let client = connect(&config()).await?;
    let statement = client.prepare("SELECT $1::int").await?;
    let (client, statement) = (&client, &statement);
    let calls = (0..300i32).map(|number| async move {
        client.query_one(statement, &[&number]).await.map(|row| row.get::<_, i32>(0))
    });
    same(future::try_join_all(calls).await?, (0..300).collect())
}

async fn pipeline_error() -> Outcome {
    let client = connect(&config()).await?;
    let statement = client.prepare("SELECT 10 / $1::int").await?;
    let (client, statement) = (&client, &statement);
    let calls = (0..9i32).map(|n| async move { client.query_one(statement, &[&(n % 3)]).await });
    for (number, result) in future::join_all(calls).await.into_iter().enumerate() {
        if number % 3 == 0 {
            fails(result, &SqlState::DIVISION_BY_ZERO)?;
        } else {
            result?;
        }
    }
    Ok(())
}

async fn copy_in_and_out() -> Outcome {
    let mut client = connect(&config()).await?;
    let table = var("DRIVER_TABLE") + "_rust";
    let transaction = client.transaction().await?;
    transaction.batch_execute(&format!("CREATE TABLE {table} (a int, b text)")).await?;
    let sink = transaction.copy_in(&format!("COPY {table} FROM STDIN")).await?;
    pin_mut!(sink);
    let lines = (0..20000).map(|n| Ok(Bytes::from(format!("{n}\trow {n}\n"))));
    sink.send_all(&mut stream::iter(lines)).await?;
    same(sink.finish().await?, 20000)?;
    let out = transaction.copy_out(&format!("COPY (SELECT * FROM {table} ORDER BY a) TO STDOUT")).await?;
    pin_mut!(out);
    let mut text = Vec::new();
    while let Some(chunk) = out.next().await {
        text.extend_from_slice(&chunk?);
    }
    same(text.ends_with(b"19999\trow 19999\n"), true)?;
    transaction.batch_execute(&format!("DROP TABLE {table}")).await?;
    Ok(transaction.commit().await?)
}

async fn listen_notify() -> Outcome {
    let (listener, mut connection) = config().connect(NoTls).await?;
    let (send, mut receive) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        let mut messages = stream::poll_fn(move |cx| connection.poll_message(cx));
        while let Some(Ok(message)) = messages.next().await {
            if let AsyncMessage::Notification(note) = message {
                let _ = send.send(note.payload().to_owned());
            }
        }
    });
    listener.batch_execute("LISTEN news").await?;
    connect(&config()).await?.batch_execute("SELECT pg_notify('news', 'hello')").await?;
    same(tokio::time::timeout(Duration::from_secs(5), receive.recv()).await?, Some("hello".to_owned()))
}

async fn cancel() -> Outcome {
    let client = connect(&config()).await?;
    let token = client.cancel_token();
    let later = tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(300)).await;
        token.cancel_query(NoTls).await
    });
    fails(client.batch_execute("SELECT pg_sleep(20)").await, &SqlState::QUERY_CANCELED)?;
    later.await??;
    same(client.query_one("SELECT 1", &[]).await?.get::<_, i32>(0), 1)
}

async fn error_in_transaction() -> Outcome {
    let mut client = connect(&config()).await?;
    let transaction = client.transaction().await?;
    fails(transaction.batch_execute("SELECT nonsense").await, &SqlState::UNDEFINED_COLUMN)?;
    fails(transaction.batch_execute("SELECT 1").await, &SqlState::IN_FAILED_SQL_TRANSACTION)?;
    transaction.rollback().await?;
    let mut transaction = client.transaction().await?;
    let savepoint = transaction.transaction().await?;
    fails(savepoint.query("SELECT 1 / $1::int", &[&0]).await, &SqlState::DIVISION_BY_ZERO)?;
    savepoint.rollback().await?;
    same(transaction.query_one("SELECT 5", &[]).await?.get::<_, i32>(0), 5)?;
    Ok(transaction.commit().await?)
}

async fn large_values() -> Outcome {
    let client = connect(&config()).await?;
    let blob: Vec<u8> = (0..LARGE).map(|n| (n % 251) as u8).collect();
    same(client.query_one("SELECT $1::bytea", &[&blob]).await?.get::<_, Vec<u8>>(0) == blob, true)?;
    let text = "é".repeat(LARGE / 2);
    same(client.query_one("SELECT $1::text", &[&text]).await?.get::<_, String>(0) == text, true)
}

async fn many_parameters() -> Outcome {
    let client = connect(&config()).await?;
    let values: Vec<i32> = (0..30000).collect();
    let rows: Vec<String> = (1..=values.len()).map(|n| format!("(${n}::int)")).collect();
    let sql = format!("SELECT count(*) FROM (VALUES {}) v", rows.join(","));
    let rows: Vec<_> = client.query_raw(&sql, &values).await?.collect().await;
    let first = rows.into_iter().next().ok_or("no row")??;
    same(first.get::<_, i64>(0), 30000)
}

async fn portal_rows() -> Outcome {
    let mut client = connect(&config()).await?;
    let transaction = client.transaction().await?;
    let portal = transaction.bind("SELECT generate_series(1, 5000)", &[]).await?;
    let mut total = 0;
    loop {
        let rows = transaction.query_portal(&portal, 100).await?;
        if rows.is_empty() {
            break;
        }
        total += rows.iter().map(|row| row.get::<_, i32>(0)).sum::<i32>();
    }
    same(total, 12_502_500)?;
    Ok(transaction.commit().await?)
}

async fn session_parameters() -> Outcome {
    let one = connect(config().application_name("one")).await?;
    let two = connect(config().application_name("two")).await?;
    one.batch_execute("SET TimeZone = 'Asia/Tokyo'").await?;
    two.batch_execute("SET TimeZone = 'UTC'").await?;
    let sql = "SELECT current_setting('TimeZone') || ' ' || current_setting('application_name')";
    for _ in 0..5 {
        same(two.query_one(sql, &[]).await?.get::<_, String>(0), "UTC two".to_owned())?;
        same(one.query_one(sql, &[]).await?.get::<_, String>(0), "Asia/Tokyo one".to_owned())?;
    }
    Ok(())
}

async fn check(name: &str, body: impl Future<Output = Outcome>) {
    let is_wanted = match env::var("DRIVER_ONLY") {
        Ok(only) => name == only,
        Err(_) => name != "repeated",
    };
    if !is_wanted {
        return;
    }
    match tokio::time::timeout(Duration::from_secs(60), body).await {
        Ok(Ok(())) => println!("{name}\tok\t"),
        Ok(Err(error)) => {
            println!(
                "{name}\tfail\t{}",
                format!("{error:?}").split_whitespace().collect::<Vec<_>>().join(" ")
            );
        }
        Err(_) => println!("{name}\tfail\ttimed out"),
    }
}

#[tokio::main(worker_threads = 2)]
async fn main() {
    rustls::crypto::ring::default_provider().install_default().expect("one provider");
    check("connect-scram", connect_scram()).await;
    check("connect-tls-verify-full", connect_tls_verify_full()).await;
    check("wrong-password", wrong_password()).await;
    check("simple", simple()).await;
    check("prepared", prepared()).await;
    check("repeated", repeated()).await;
    check("pipeline", pipeline()).await;
    check("pipeline-error", pipeline_error()).await;
    check("copy-in-and-out", copy_in_and_out()).await;
    if var("DRIVER_MODE") != "transaction" {
        check("listen-notify", listen_notify()).await;
    }
    check("cancel", cancel()).await;
    check("error-in-transaction", error_in_transaction()).await;
    check("large-values", large_values()).await;
    check("many-parameters", many_parameters()).await;
    check("portal-rows", portal_rows()).await;
    check("session-parameters", session_parameters()).await;
}
