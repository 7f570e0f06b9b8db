// SPDX-License-Identifier: Apache-2.0
//! Links that are taken over from a lane.

use super::*;

#[test]
fn a_link_taken_over_from_a_lane_goes_on_where_it_stood() {
    let mut b = Bench::new();
    // Two queries are answered by nobody yet; of the first answer's next message, a head of 3 bytes has been forwarded.
    b.link.adopt(LaneState {
        outstanding: 2,
        status: Status::Idle,
        copy_in: false,
        extended: false,
        unnamed: false,
        open: false,
        request_left: 0,
        response_left: 0,
        response_head: 3,
    });
    assert!(b.link.is_busy() && !b.link.is_quiescent());
    b.client_sends(&[m(b'Q', b"third\0")]);
    let first = [m(b'C', b"SELECT 1\0"), ready(b'T')].concat();
    let rest = [m(b'E', b"SERROR\0\0"), ready(b'I'), m(b'C', b"SELECT 1\0"), ready(b'I')].concat();
    let shown = b.server_sends(&[first.clone(), rest.clone()]);
    assert_eq!(shown, [&first[3..], &rest[..]].concat());
    assert!(b.link.is_quiescent());
    assert_eq!(b.seen.ready, [Status::Transaction, Status::Idle, Status::Idle]);
}

#[test]
fn a_link_taken_over_inside_messages() {
    let mut b = Bench::new();
    b.link.adopt(LaneState {
        outstanding: 1,
        status: Status::Idle,
        copy_in: false,
        extended: false,
        unnamed: false,
        open: false,
        request_left: 4,
        response_left: 2,
        response_head: 0,
    });
    let (to_server, _) = b.client_sends(&[b"1;\0\0".to_vec(), m(b'Q', b"next\0")]);
    assert_eq!(to_server, [b"1;\0\0".to_vec(), m(b'Q', b"next\0")].concat());
    b.server_sends(&[b"xx".to_vec(), ready(b'I')]);
    assert!(!b.link.is_quiescent());
    b.server_sends(&[m(b'I', b""), ready(b'I')]);
    assert!(b.link.is_quiescent());
}

#[test]
fn a_copy_that_a_lane_began_ends() {
    let copy_in_response = m(b'G', &[0, 0, 0]);
    // Handed over while the server reads data, and just before it says so.
    for begun in [true, false] {
        let mut b = Bench::new();
        b.link.adopt(LaneState { copy_in: begun, ..ADOPTED });
        if !begun {
            b.server_sends(std::slice::from_ref(&copy_in_response));
        }
        assert!(b.link.awaits_client());
        b.client_sends(&[m(b'd', b"row\n"), m(b'c', b"")]);
        b.server_sends(&[m(b'C', b"COPY 1\0"), ready(b'I')]);
        assert!(b.link.is_quiescent(), "begun: {begun}");
    }
    // The client had sent its data ahead.
    let mut b = Bench::new();
    b.link.adopt(ADOPTED);
    b.client_sends(&[m(b'd', b"row\n"), m(b'c', b"")]);
    b.server_sends(&[copy_in_response.clone(), m(b'C', b"COPY 1\0"), ready(b'I')]);
    assert!(b.link.is_quiescent());
    // There was no COPY at all: PostgreSQL ignores the data.
    let mut b = Bench::new();
    b.link.adopt(ADOPTED);
    b.client_sends(&[m(b'd', b"row\n"), m(b'c', b"")]);
    b.server_sends(&[m(b'E', b"SERROR\0\0"), ready(b'I')]);
    assert!(b.link.is_quiescent());
}

#[test]
fn a_copy_of_the_extended_protocol_that_a_lane_began_ends_with_its_second_sync() {
    let mut b = Bench::new();
    b.link.adopt(LaneState { extended: true, ..ADOPTED });
    b.server_sends(&[m(b'1', b""), m(b'2', b""), m(b'G', &[0, 0, 0])]);
    assert!(b.link.awaits_client());
    b.client_sends(&[m(b'd', b"row\n"), m(b'c', b""), m(b'S', b"")]);
    b.server_sends(&[m(b'C', b"COPY 1\0"), ready(b'I')]);
    assert!(b.link.is_quiescent());
}

#[test]
fn a_client_that_leaves_in_a_copy_of_a_lane_leaves_a_clean_server() {
    let mut b = Bench::new();
    b.link.adopt(LaneState { copy_in: true, ..ADOPTED });
    let mut out = Vec::new();
    assert!(b.link.abandon(&mut out));
    assert_eq!(out, m(b'f', b"client disconnected\0"));
    b.server_sends(&[m(b'E', b"SERROR\0\0"), ready(b'I')]);
    assert!(b.link.is_quiescent());
}

/// Session pooling: a lane also carries batches whose Sync has not come.
#[test]
fn a_batch_that_a_lane_began_ends_with_its_sync() {
    let session = LinkOptions { rename_statements: false, ..LinkOptions::default() };
    let open = LaneState { outstanding: 1, extended: true, open: true, ..ADOPTED };
    let batch = [m(b'B', b"\0name\0\0\0\0\0\0\0"), m(b'E', b"\0\0\0\0\0"), m(b'S', b"")];
    let mut b = Bench::new();
    b.link.set_options(session);
    b.link.adopt(open);
    assert_eq!(b.client_sends(&batch).0, batch.concat());
    // The answer to what was complete, then those to the batch, which a Parse in the lane began.
    b.server_sends(&[m(b'C', b"SELECT 1\0"), ready(b'I'), m(b'1', b"")]);
    assert!(!b.link.is_quiescent());
    b.server_sends(&[m(b'2', b""), m(b'C', b"SELECT 1\0"), ready(b'I')]);
    assert!(b.link.is_quiescent());
    assert_eq!(b.seen.ready.len(), 2);
    b.client_sends(&batch);
    b.server_sends(&[m(b'2', b""), m(b'C', b"SELECT 1\0"), ready(b'I')]);
    assert!(b.link.is_quiescent(), "the next one is followed as always");

    // COPY in it: the data end in user space, before or after the server says that it reads them.
    for ahead in [true, false] {
        b.link.adopt(LaneState { outstanding: 0, ..open });
        let begins = m(b'G', &[0, 0, 0]);
        if ahead {
            b.client_sends(&[m(b'd', b"row\n"), m(b'c', b"")]);
            b.server_sends(std::slice::from_ref(&begins));
        } else {
            b.server_sends(std::slice::from_ref(&begins));
            b.client_sends(&[m(b'd', b"row\n"), m(b'c', b"")]);
        }
        b.client_sends(&[m(b'S', b"")]);
        b.server_sends(&[m(b'C', b"COPY 1\0"), ready(b'I')]);
        assert!(b.link.is_quiescent(), "ahead: {ahead}");
    }

    // The client leaves: an error goes ahead of the Sync, or half a batch would be committed.
    b.link.adopt(LaneState { outstanding: 0, ..open });
    let mut out = Vec::new();
    assert!(b.link.abandon(&mut out));
    assert!(out.starts_with(b"B") && out.ends_with(&m(b'S', b"")));
    assert!(!b.link.is_quiescent());
    b.server_sends(&[m(b'E', b"SERROR\0\0"), ready(b'I')]);
    assert!(b.link.is_quiescent());
}

#[test]
fn made_up_answers_wait_for_those_of_a_lane() {
    let mut b = Bench::new();
    b.client_sends(&[m(b'P', b"s\0select 1\0\0\0"), m(b'S', b"")]);
    b.server_sends(&[m(b'1', b""), ready(b'I')]);
    b.link.adopt(ADOPTED);
    let (_, told) = b.client_sends(&[m(b'C', b"Ss\0"), m(b'S', b"")]);
    assert!(told.is_empty(), "CloseComplete must not overtake");
    let first = [m(b'C', b"SELECT 1\0"), ready(b'I')].concat();
    let shown = b.server_sends(&[first.clone(), ready(b'I')]);
    assert_eq!(shown, [first, m(b'3', b""), ready(b'I')].concat());
    assert!(b.link.is_quiescent());
}

#[test]
fn deallocate_all_in_a_lane_spares_what_follows() {
    let mut b = Bench::new();
    b.link.adopt(LaneState { outstanding: 1, ..ADOPTED });
    b.client_sends(&[m(b'P', b"abc\0select 1\0\0\0"), m(b'S', b"")]);
    b.server_sends(&[m(b'C', b"DEALLOCATE ALL\0"), ready(b'I'), m(b'1', b""), ready(b'I')]);
    assert_eq!((b.client.statement_count(), b.link.statements.len()), (1, 1));
}

#[test]
fn the_unnamed_statement_of_a_lane_is_the_clients_own() {
    for ours in [true, false] {
        let mut b = Bench::new();
        b.link.adopt(LaneState { outstanding: 0, status: Status::Transaction, unnamed: ours, ..ADOPTED });
        let bind = m(b'B', &[0; 8]);
        let (to_server, _) = b.client_sends(std::slice::from_ref(&bind));
        assert_eq!(to_server == bind, ours);
    }
}
