// SPDX-License-Identifier: Apache-2.0
//! What the pooler's own sockets hold for somebody who has stopped.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;

use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size};

use super::leaving::{answer, ask, ask_beyond_buffers};
use super::*;

/// A client whose own send buffer is small and always the same; user and database are postgres.
pub(super) fn login(port: u16) -> std::io::Result<TcpStream> {
    let mut socket = TcpStream::connect(("127.0.0.1", port))?;
    set_socket_send_buffer_size(&socket, 128 << 10)?;
    let parameters = b"\0\x03\0\0user\0postgres\0database\0postgres\0\0";
    socket.write_all(&(parameters.len() as u32 + 4).to_be_bytes())?;
    socket.write_all(parameters)?;
    loop {
        let mut head = [0; 5];
        socket.read_exact(&mut head)?;
        let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize - 4;
        socket.read_exact(&mut vec![0; length])?;
        match head[0] {
            b'E' => return Err(std::io::Error::other("refused")),
            b'Z' => return Ok(socket),
            _ => {}
        }
    }
}

/// Sends a query that is longer than any buffer behind one that does not end; returns how much went in.
fn pour(mut socket: TcpStream) -> std::io::Result<usize> {
    let sleep = b"select pg_sleep(600)\0";
    socket.write_all(&[b"Q", &(sleep.len() as u32 + 4).to_be_bytes()[..], sleep].concat())?;
    socket.write_all(&[b"Q", &(64u32 << 20).to_be_bytes()[..]].concat())?;
    match flood(socket)? {
        (sent, None) => Ok(sent),
        (_, Some(error)) => Err(error),
    }
}

/// Sends on until nothing goes any more: how much went in, and how the connection broke if it did.
fn flood(mut socket: TcpStream) -> std::io::Result<(usize, Option<std::io::Error>)> {
    socket.set_nonblocking(true)?;
    let (mut sent, mut moved) = (0, Instant::now());
    while moved.elapsed() < Duration::from_millis(500) && sent < 64 << 20 {
        match socket.write(&[b' '; 8192]) {
            Ok(n) => (sent, moved) = (sent + n, Instant::now()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Ok((sent, Some(error))),
        }
    }
    Ok((sent, None))
}

/// The kernel's own buffers would take 4 MiB more of each connection (`net.ipv4.tcp_wmem`).
#[test]
fn a_server_that_stops_costs_two_small_buffers() -> Result<()> {
    each_lane(
        |ini| ini,
        |server, pooler, lane| {
            let direct = pour(login(server.port()).unwrap()).unwrap();
            let pooled = pour(login(pooler.port()).unwrap()).unwrap();
            println!("lane {lane}: {} KiB, {} KiB directly", pooled >> 10, direct >> 10);
            assert!(direct < 2 << 20, "{direct} bytes directly");
            assert!(pooled < direct + (2 << 20), "lane {lane}: {pooled} bytes, {direct} directly");
            Ok(())
        },
    )
}

/// What stands behind answers that nobody takes is charged to no socket in lane D: whoever goes on all the same is let go.
#[test]
fn a_client_that_speaks_and_does_not_listen_costs_bounded_memory() -> Result<()> {
    each_lane(
        |ini| ini,
        |_, pooler, lane| {
            // In the middle of an answer, and behind one that the lane has carried whole.
            for is_over in [false, true] {
                if is_over && lane != "D" {
                    continue;
                }
                let mut socket = login(pooler.port()).unwrap();
                if is_over {
                    set_socket_recv_buffer_size(&socket, 8 << 10).unwrap();
                    ask_beyond_buffers(&mut socket, pooler)?;
                } else {
                    // The first are not for the lane.
                    for _ in 0..3 {
                        ask(&mut socket, "select 1").unwrap();
                        answer(&mut socket, false).unwrap();
                    }
                    ask(&mut socket, "select repeat('x', 8000) from generate_series(1, 20000)").unwrap();
                    std::thread::sleep(Duration::from_secs(1));
                }
                socket.write_all(&[b"Q", &(64u32 << 20).to_be_bytes()[..]].concat()).unwrap();
                let (sent, end) = flood(socket).unwrap();
                println!("lane {lane}, over: {is_over}: {} KiB, {end:?}", sent >> 10);
                assert!(sent < 24 << 20, "lane {lane}, over: {is_over}: {sent} bytes");
                assert_eq!(value(&mut client(pooler)?, "select 1")?, "1");
            }
            Ok(())
        },
    )
}
