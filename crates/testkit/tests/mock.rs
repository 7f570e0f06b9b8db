// SPDX-License-Identifier: Apache-2.0
//! The mock server follows its script and notices when the peer does not.

use std::time::Duration;

use underpass_testkit::{Batch, Client, MockServer, Options, Reply, Result, Step};

#[test]
fn a_script_is_followed_step_by_step() -> Result<()> {
    let mock = MockServer::start(|_| {
        vec![
            Step::Login,
            Step::Expect(b'Q'),
            Step::SendSplit(Reply::new().row_description(&["x"]).data_row(&[Some("split")])),
            Step::Delay(Duration::from_millis(10)),
            Step::Send(Reply::new().command_complete("SELECT 1").ready_for_query(b'I')),
            Step::Until(b'S'),
            Step::Call(Box::new(|last| {
                assert_eq!(last.map(|message| message.tag), Some(b'S'));
                Reply::new().notice("NOTICE", "00000", "called").ready_for_query(b'I')
            })),
            Step::WaitClose,
        ]
    })?;
    let mut client = Client::connect(&Options::new(mock.port(), "bob", "db"))?;
    assert_eq!(client.query("select 'split'")?.value(), Some("split"));
    assert_eq!(client.exchange(&Batch::new().parse("", "x").sync())?[0].tags(), "NZ");
    assert_eq!(client.backend_key().0, 1);
    drop(client);
    mock.wait_finished(1)?;
    assert_eq!(mock.queries(), ["select 'split'"]);
    Ok(())
}

#[test]
fn a_step_that_fails_is_reported() -> Result<()> {
    let mock = MockServer::start(|_| vec![Step::Login, Step::Expect(b'P')])?;
    let mut client = Client::connect(&Options::new(mock.port(), "bob", "db"))?;
    let _ = client.query("select 1");
    assert!(mock.wait_finished(1).unwrap_err().to_string().contains("step 1 Expect(P)"));
    Ok(())
}

#[test]
fn reset_and_close_are_told_apart() -> Result<()> {
    let mock = MockServer::start(|index| {
        vec![Step::Login, Step::Expect(b'Q'), if index == 0 { Step::Reset } else { Step::Close }]
    })?;
    let options = Options::new(mock.port(), "bob", "db");
    let reset = Client::connect(&options)?.query("select 1").unwrap_err();
    assert!(reset.to_string().contains("reset"), "{reset}");
    let closed = Client::connect(&options)?.query("select 1").unwrap_err();
    assert_eq!(closed.to_string(), "connection closed by peer");
    Ok(())
}
