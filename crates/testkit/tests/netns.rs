// SPDX-License-Identifier: Apache-2.0
//! Namespaces joined by a veth pair carry TCP. Needs root; without it the test says so and passes.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

use underpass_testkit::{Netns, Result, Veth, service_user};

#[test]
fn two_namespaces_talk_over_veth() -> Result<()> {
    if service_user().is_none() {
        println!("skipped: needs root");
        return Ok(());
    }
    let (first, second) = (Netns::new()?, Netns::new()?);
    let veth = Veth::between(&first, &second)?;
    let listener = first.run(|| TcpListener::bind((veth.first, 5432)).unwrap())?;
    let server = thread::spawn(move || {
        let (mut stream, peer) = listener.accept().unwrap();
        stream.write_all(peer.ip().to_string().as_bytes()).unwrap();
    });
    let seen = second.run(|| {
        let mut text = String::new();
        TcpStream::connect((veth.first, 5432)).unwrap().read_to_string(&mut text).unwrap();
        text
    })?;
    server.join().unwrap();
    assert_eq!(seen, veth.second);
    let inside = second.command("ip").args(["-o", "link"]).output().unwrap();
    assert!(String::from_utf8_lossy(&inside.stdout).contains("veth0"));
    Ok(())
}
