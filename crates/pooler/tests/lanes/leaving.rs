// SPDX-License-Identifier: Apache-2.0
//! Clients that are told to leave while answers of their lane are on their way.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use rustix::net::sockopt::set_socket_recv_buffer_size;

use super::memory::login;
use super::*;

pub(super) fn ask(socket: &mut TcpStream, sql: &str) -> std::io::Result<()> {
    let length = sql.len() as u32 + 5;
    socket.write_all(&[b"Q", &length.to_be_bytes()[..], sql.as_bytes(), b"\0"].concat())
}

/// The types of the messages up to ReadyForQuery, or up to the end of the stream; and the last one.
pub(super) fn answer(socket: &mut TcpStream, to_end: bool) -> std::io::Result<(Vec<u8>, Vec<u8>)> {
    let (mut tags, mut body) = (Vec::new(), Vec::new());
    let mut head = [0; 5];
    while to_end || tags.last() != Some(&b'Z') {
        match socket.read(&mut head[..1])? {
            0 => break,
            _ => socket.read_exact(&mut head[1..])?,
        }
        tags.push(head[0]);
        body.resize(u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize - 4, 0);
        socket.read_exact(&mut body)?;
    }
    Ok((tags, body))
}

/// Asks for more and more, row by row, until what the client does not take is more than the sockets hold: the lane has carried it whole, and
/// released the server. Returns the number of rows.
pub(super) fn ask_beyond_buffers(socket: &mut TcpStream, pooler: &Underpass) -> Result<usize> {
    // The first are not for the lane.
    for _ in 0..3 {
        ask(socket, "select 1").unwrap();
        answer(socket, false).unwrap();
    }
    for rows in (200..2000).step_by(50) {
        let before = kernel(pooler, "D", "xacts")?;
        ask(socket, &format!("select repeat('x', 1000), pg_sleep(0.0005) from generate_series(1, {rows})"))
            .unwrap();
        let begun = Instant::now();
        while kernel(pooler, "D", "xacts")? == before {
            assert!(begun.elapsed() < Duration::from_secs(10), "{rows} rows are not carried whole");
            std::thread::sleep(Duration::from_millis(20));
        }
        if kernel(pooler, "responses", "queued")? > 20 << 10 {
            return Ok(rows);
        }
        answer(socket, false).unwrap();
    }
    unreachable!("a socket holds only so much")
}

#[test]
fn a_client_that_is_told_to_leave_gets_its_answer_first() -> Result<()> {
    let server = Postgres::start()?;
    let ini = Ini::for_server(&server).set("pool_mode", "transaction").set("default_pool_size", "4");
    let Some(ini) = ini.lanes("off", 1) else { return Ok(()) };
    let pooler = Underpass::start(&ini)?;
    let mut socket = login(pooler.port()).unwrap();
    set_socket_recv_buffer_size(&socket, 8 << 10).unwrap();
    let rows = ask_beyond_buffers(&mut socket, &pooler)?;
    pooler.console("shutdown wait_for_servers")?.ok()?;
    std::thread::sleep(Duration::from_millis(300));
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let (tags, last) = answer(&mut socket, true).unwrap();
    assert_eq!(tags.iter().filter(|&&tag| tag == b'D').count(), rows);
    assert_eq!(String::from_utf8_lossy(&tags[tags.len() - 3..]), "CZE", "{rows} rows");
    assert!(String::from_utf8_lossy(&last).contains("57P01"));
    Ok(())
}
