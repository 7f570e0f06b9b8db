// SPDX-License-Identifier: Apache-2.0
mod lane;

use super::*;

const ADOPTED: LaneState = LaneState {
    outstanding: 1,
    status: Status::Idle,
    copy_in: false,
    extended: false,
    unnamed: false,
    open: false,
    request_left: 0,
    response_left: 0,
    response_head: 0,
};

#[derive(Default)]
pub(super) struct Seen {
    pub(super) ready: Vec<Status>,
    parameters: Vec<(String, String, bool)>,
    hidden_errors: usize,
}

impl BackendObserver for Seen {
    fn parameter_status(&mut self, name: &str, value: &str, hidden: bool) {
        self.parameters.push((name.into(), value.into(), hidden));
    }
    fn ready(&mut self, status: Status) {
        self.ready.push(status);
    }
    fn hidden_error(&mut self, _body: &[u8]) {
        self.hidden_errors += 1;
    }
}

/// A link with one client, fed with whole messages.
pub(super) struct Bench {
    pub(super) link: Link,
    client: ClientSide,
    statements: Statements,
    pub(super) seen: Seen,
}

pub(super) fn m(tag: u8, body: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    crate::prepared::message(&mut out, tag, &[body]);
    out
}

impl Bench {
    pub(super) fn new() -> Self {
        Self {
            link: Link::new(LinkOptions::default()),
            client: ClientSide::default(),
            statements: Statements::default(),
            seen: Seen::default(),
        }
    }

    /// What reaches the server, and what the pooler answers at once.
    pub(super) fn client_sends(&mut self, messages: &[Vec<u8>]) -> (Vec<u8>, Vec<u8>) {
        let (input, mut buffer, mut to_client) = (messages.concat(), Vec::new(), Vec::new());
        let mut out = Splice::new(&mut buffer);
        let mut context = FrontendContext {
            client: &mut self.client,
            statements: &self.statements,
            to_client: &mut to_client,
        };
        let (used, _) = self.link.frontend(&input, &mut context, &mut out).expect("accepted");
        assert_eq!(used, input.len());
        (out.bytes(&input).to_vec(), to_client)
    }

    pub(super) fn server_sends(&mut self, messages: &[Vec<u8>]) -> Vec<u8> {
        let (input, mut buffer) = (messages.concat(), Vec::new());
        let mut out = Splice::new(&mut buffer);
        let used =
            self.link.backend(&input, Some(&mut self.client), &mut self.seen, &mut out).expect("accepted");
        assert_eq!(used, input.len());
        out.bytes(&input).to_vec()
    }
}

pub(super) fn ready(status: u8) -> Vec<u8> {
    m(b'Z', &[status])
}

#[test]
fn a_simple_query_is_over_at_its_ready_for_query() {
    let mut b = Bench::new();
    let query = m(b'Q', b"select 1\0");
    assert_eq!(b.client_sends(std::slice::from_ref(&query)).0, query);
    assert!(!b.link.is_quiescent());
    let answer = [m(b'T', b"\0\0"), m(b'D', b"\0\0"), m(b'C', b"SELECT 1\0")];
    assert_eq!(b.server_sends(&answer), answer.concat());
    assert!(!b.link.is_quiescent());
    b.server_sends(&[ready(b'T')]);
    assert!(!b.link.is_quiescent() && b.link.is_settled());
    b.client_sends(&[m(b'Q', b"commit\0")]);
    b.server_sends(&[m(b'C', b"COMMIT\0"), ready(b'I')]);
    assert!(b.link.is_quiescent());
    assert_eq!(b.seen.ready, [Status::Transaction, Status::Idle]);
}

#[test]
fn pipelined_syncs_each_need_their_answer() {
    let mut b = Bench::new();
    let one =
        [m(b'P', b"\0select 1\0\0\0"), m(b'B', b"\0\0\0\0\0\0\0\0"), m(b'E', b"\0\0\0\0\0"), m(b'S', b"")];
    b.client_sends(&[one.concat(), one.concat()]);
    let answer = [m(b'1', b""), m(b'2', b""), m(b'C', b"SELECT 1\0"), ready(b'I')];
    b.server_sends(&answer);
    assert!(!b.link.is_quiescent());
    b.server_sends(&answer);
    assert!(b.link.is_quiescent());
}

#[test]
fn flush_without_sync_keeps_the_link() {
    let mut b = Bench::new();
    b.client_sends(&[m(b'P', b"\0select 1\0\0\0"), m(b'H', b"")]);
    b.server_sends(&[m(b'1', b"")]);
    assert!(!b.link.is_quiescent(), "an implicit transaction may be open until Sync");
    b.client_sends(&[m(b'S', b"")]);
    b.server_sends(&[ready(b'I')]);
    assert!(b.link.is_quiescent());
}

#[test]
fn a_named_statement_is_parsed_once_for_all_clients() {
    let mut b = Bench::new();
    let (to_server, _) = b.client_sends(&[m(b'P', b"abc\0select 1\0\0\0"), m(b'S', b"")]);
    assert_eq!(to_server, [m(b'P', b"~00\0select 1\0\0\0"), m(b'S', b"")].concat());
    b.server_sends(&[m(b'1', b""), ready(b'I')]);

    // Another client, another name of that length, same content: answered without the server.
    b.client = ClientSide::default();
    b.link.begin();
    let (to_server, answer) =
        b.client_sends(&[m(b'P', b"xyz\0select 1\0\0\0"), m(b'D', b"Sxyz\0"), m(b'S', b"")]);
    assert_eq!(to_server, [m(b'D', b"S~00\0"), m(b'S', b"")].concat());
    assert_eq!(answer, m(b'1', b""));
    b.server_sends(&[m(b't', b"\0\0"), m(b'n', b""), ready(b'I')]);

    // On a server that lacks it, the pooler parses first and swallows the answer.
    b.link = Link::new(LinkOptions::default());
    let (to_server, _) =
        b.client_sends(&[m(b'B', b"\0xyz\0\0\0\0\0\0\0"), m(b'E', b"\0\0\0\0\0"), m(b'S', b"")]);
    let expected = [
        m(b'P', b"~00\0select 1\0\0\0"),
        m(b'B', b"\0~00\0\0\0\0\0\0\0"),
        m(b'E', b"\0\0\0\0\0"),
        m(b'S', b""),
    ];
    assert_eq!(to_server, expected.concat());
    let to_client = b.server_sends(&[m(b'1', b""), m(b'2', b""), m(b'C', b"SELECT 1\0"), ready(b'I')]);
    assert_eq!(to_client, [m(b'2', b""), m(b'C', b"SELECT 1\0"), ready(b'I')].concat());
    assert!(b.link.is_quiescent());
}

#[test]
fn an_error_undoes_what_the_server_skipped() {
    let mut b = Bench::new();
    b.client_sends(&[m(b'P', b"bad\0selec\0\0\0"), m(b'P', b"abc\0select 1\0\0\0"), m(b'S', b"")]);
    b.server_sends(&[m(b'E', b"SERROR\0\0"), ready(b'I')]);
    assert!(b.link.is_quiescent());
    assert_eq!(b.client.statement_count(), 0);
    let (to_server, answer) = b.client_sends(&[m(b'P', b"abc\0select 1\0\0\0"), m(b'S', b"")]);
    assert_eq!(
        to_server,
        [m(b'P', b"~02\0select 1\0\0\0"), m(b'S', b"")].concat(),
        "it was skipped, so it is sent again"
    );
    assert!(answer.is_empty());
}

#[test]
fn an_error_ahead_of_the_sync_skips_until_the_sync() {
    let mut b = Bench::new();
    b.client_sends(&[m(b'P', b"\0selec\0\0\0"), m(b'H', b"")]);
    b.server_sends(&[m(b'E', b"SERROR\0\0")]);
    b.client_sends(&[m(b'B', b"\0\0\0\0\0\0\0\0"), m(b'Q', b"ignored\0")]);
    assert!(!b.link.is_quiescent());
    b.client_sends(&[m(b'S', b"")]);
    b.server_sends(&[ready(b'I')]);
    assert!(b.link.is_quiescent());
}

#[test]
fn a_sync_ahead_of_copy_data_has_no_answer() {
    let mut b = Bench::new();
    let batch = [
        m(b'P', b"\0copy t from stdin\0\0\0"),
        m(b'B', b"\0\0\0\0\0\0\0\0"),
        m(b'E', b"\0\0\0\0\0"),
        m(b'S', b""),
    ];
    b.client_sends(&batch);
    b.server_sends(&[m(b'1', b""), m(b'2', b""), m(b'G', b"\0\0\0")]);
    b.client_sends(&[m(b'd', b"1\n"), m(b'c', b""), m(b'S', b"")]);
    b.server_sends(&[m(b'C', b"COPY 1\0"), ready(b'I')]);
    assert!(b.link.is_quiescent());
}

/// `COPY view FROM STDIN`, or a cancel request: the server sends CopyInResponse, looks further, and fails before it has read the Sync.
#[test]
fn a_sync_ahead_of_a_copy_that_fails_at_once_may_have_an_answer() {
    let batch = [
        m(b'P', b"\0copy v from stdin\0\0\0"),
        m(b'B', b"\0\0\0\0\0\0\0\0"),
        m(b'E', b"\0\0\0\0\0"),
        m(b'S', b""),
    ];
    let begun = [m(b'1', b""), m(b'2', b""), m(b'G', b"\0\0\0")];
    let (failed, closed) = (m(b'E', b"SERROR\0\0"), m(b'3', b""));
    // It waits and hears of it.
    let mut b = Bench::new();
    b.client_sends(&batch);
    b.server_sends(&begun);
    b.server_sends(&[failed.clone(), ready(b'I')]);
    assert!(b.link.is_quiescent() && b.link.is_doubtful());
    assert_eq!(b.seen.ready, [Status::Idle]);
    // It has sent its data and another Sync: there may be one answer or two.
    for (strays, in_time) in [(0, false), (1, true), (1, false)] {
        let mut b = Bench::new();
        b.client_sends(&batch);
        b.client_sends(&[m(b'd', b"1\n"), m(b'c', b""), m(b'S', b"")]);
        b.server_sends(&begun);
        b.server_sends(&[failed.clone(), ready(b'I')]);
        assert!(b.link.is_quiescent() && b.link.is_doubtful());
        if in_time {
            assert_eq!(b.server_sends(&[ready(b'I')]), ready(b'I'), "as without a pooler");
        }
        let mut out = Vec::new();
        b.link.resync(&mut out);
        assert_eq!(out.iter().filter(|byte| **byte == b'S').count(), 3, "Sync, Close of a statement, Sync");
        let mut heard = Vec::new();
        if strays == 1 && !in_time {
            heard.extend(b.server_sends(&[ready(b'I')]));
        }
        heard.extend(b.server_sends(&[failed.clone(), ready(b'I')]));
        assert!(!b.link.is_quiescent() && b.link.is_holding() && b.link.is_doubtful());
        heard.extend(b.server_sends(&[closed.clone(), ready(b'I')]));
        assert!(b.link.is_quiescent() && !b.link.is_holding() && !b.link.is_doubtful());
        assert_eq!(heard, if strays == 1 && !in_time { ready(b'I') } else { Vec::new() });
    }
    // A cancel request meets the question.
    let mut b = Bench::new();
    b.client_sends(&batch);
    b.server_sends(&begun);
    b.server_sends(&[failed.clone(), ready(b'I')]);
    b.link.resync(&mut Vec::new());
    b.server_sends(&[failed.clone(), ready(b'I')]);
    let mut buffer = Vec::new();
    let told = b.link.backend(&failed, None, &mut b.seen, &mut Splice::new(&mut buffer));
    assert_eq!(told, Err(LinkError::OutOfOrder('E')));
    // It has left, and the COPY was ended in its place.
    let mut b = Bench::new();
    b.client_sends(&batch);
    b.server_sends(&begun);
    let mut out = Vec::new();
    assert!(b.link.abandon(&mut out));
    b.server_sends(&[failed.clone(), ready(b'I')]);
    assert!(b.link.is_quiescent() && b.link.is_doubtful());
    // The same of a lane's.
    let mut b = Bench::new();
    b.link.adopt(LaneState { extended: true, ..ADOPTED });
    b.server_sends(&begun);
    b.server_sends(&[failed.clone(), ready(b'I')]);
    assert!(b.link.is_quiescent() && b.link.is_doubtful());
    // Without a Sync ahead, and where COPY has ended well, all is certain.
    let mut b = Bench::new();
    b.client_sends(&batch[..3]);
    b.server_sends(&begun);
    b.client_sends(&[m(b'f', b"no\0"), m(b'S', b"")]);
    b.server_sends(&[failed.clone(), ready(b'I')]);
    assert!(b.link.is_quiescent() && !b.link.is_doubtful());
    b.client_sends(&batch);
    b.server_sends(&begun);
    b.client_sends(&[m(b'c', b""), m(b'P', b"\0nonsense\0\0\0"), m(b'S', b"")]);
    b.server_sends(&[m(b'C', b"COPY 0\0"), failed, ready(b'I')]);
    assert!(b.link.is_quiescent() && !b.link.is_doubtful());
}

#[test]
fn copy_by_simple_query_and_its_failure() {
    let mut b = Bench::new();
    b.client_sends(&[m(b'Q', b"copy t from stdin\0")]);
    b.server_sends(&[m(b'G', b"\0\0\0")]);
    b.client_sends(&[m(b'd', b"x\n")]);
    b.server_sends(&[m(b'E', b"SERROR\0\0"), ready(b'I')]);
    // The client did not know and goes on; the server ignores it.
    b.client_sends(&[m(b'd', b"y\n"), m(b'c', b"")]);
    assert!(b.link.is_quiescent());
}

#[test]
fn a_second_copy_of_one_query_has_an_end_of_its_own() {
    let mut b = Bench::new();
    b.client_sends(&[m(b'Q', b"copy t from stdin; copy u from stdin\0")]);
    b.server_sends(&[m(b'G', b"\0\0\0")]);
    b.client_sends(&[m(b'd', b"x\n"), m(b'c', b"")]);
    b.server_sends(&[m(b'C', b"COPY 1\0"), m(b'G', b"\0\0\0")]);
    assert!(b.link.is_copy_in(), "it waits for the data of the second");
    let mut out = Vec::new();
    assert!(b.link.abandon(&mut out));
    assert_eq!(out, m(b'f', b"client disconnected\0"));
    b.server_sends(&[m(b'E', b"SERROR\0\0"), ready(b'I')]);
    assert!(b.link.is_quiescent());
}

#[test]
fn the_ends_of_both_copies_may_be_sent_ahead() {
    let mut b = Bench::new();
    b.client_sends(&[m(b'Q', b"copy t from stdin; copy u from stdin\0")]);
    b.client_sends(&[m(b'd', b"x\n"), m(b'c', b""), m(b'd', b"y\n"), m(b'c', b"")]);
    b.server_sends(&[m(b'G', b"\0\0\0"), m(b'C', b"COPY 1\0"), m(b'G', b"\0\0\0")]);
    assert!(!b.link.is_copy_in(), "its end is on its way");
    b.server_sends(&[m(b'C', b"COPY 1\0"), ready(b'I')]);
    assert!(b.link.is_quiescent());
}

#[test]
fn nothing_is_made_up_in_the_middle_of_an_answer() {
    for (more, made_up) in
        [(m(b'C', b"Sone\0"), m(b'3', b"")), (m(b'P', b"two\0select 1\0\0\0"), m(b'1', b""))]
    {
        let mut b = Bench::new();
        // The server has the second text under another name of the same length.
        b.client_sends(&[m(b'P', b"old\0select 1\0\0\0"), m(b'S', b"")]);
        b.server_sends(&[m(b'1', b""), ready(b'I')]);
        b.client_sends(&[m(b'P', b"one\0select 2\0\0\0"), m(b'D', b"Sone\0"), m(b'H', b"")]);
        let row = m(b'T', &[7; 40]);
        let (head, rest) = row.split_at(20);
        let said = b.server_sends(&[m(b'1', b""), m(b't', b"\0\0"), head.to_vec()]);
        assert!(said.ends_with(head));
        assert!(b.link.is_answer_cut());
        let (_, at_once) = b.client_sends(&[more]);
        assert_eq!(at_once, b"", "the client waits for the rest of a message");
        assert_eq!(b.server_sends(&[rest.to_vec()]), [rest, &made_up].concat());
        assert!(!b.link.is_answer_cut());
    }
}

#[test]
fn who_says_that_it_ends_is_known() {
    let mut b = Bench::new();
    b.server_sends(&[m(b'E', b"SFATAL\0C57P05\0\0")]);
    assert!(b.link.is_ending() && b.link.is_quiescent());
}

#[test]
fn what_a_server_says_of_its_end_goes_to_a_client_that_it_still_serves() {
    let end = m(b'E', b"SFATAL\0C57P05\0\0");
    for (serves_transactions, status, is_told) in
        [(false, b'I', true), (true, b'T', true), (true, b'I', false)]
    {
        let mut b = Bench::new();
        b.link.set_options(LinkOptions { serves_transactions, ..LinkOptions::default() });
        b.client_sends(&[m(b'Q', b"select 1\0")]);
        let answer = [m(b'C', b"SELECT 0\0"), ready(status)];
        let told = b.server_sends(&[&answer[..], std::slice::from_ref(&end)].concat());
        let expected = if is_told { [answer.concat(), end.clone()].concat() } else { answer.concat() };
        assert_eq!(told, expected, "{serves_transactions} {}", char::from(status));
        assert!(b.link.is_ending());
    }
}

#[test]
fn a_stranger_never_meets_anothers_unnamed_statement() {
    let mut b = Bench::new();
    b.client_sends(&[m(b'P', b"\0select 'secret'\0\0\0"), m(b'S', b"")]);
    b.server_sends(&[m(b'1', b""), ready(b'I')]);
    b.link.begin();
    let mut owner = std::mem::take(&mut b.client);
    let bind = m(b'B', b"\0\0\0\0\0\0\0\0");
    let (to_server, _) = b.client_sends(&[bind.clone(), m(b'S', b"")]);
    assert_eq!(to_server, [m(b'C', b"S\0"), bind.clone(), m(b'S', b"")].concat());
    assert_eq!(b.server_sends(&[m(b'3', b""), m(b'E', b"SERROR\0\0"), ready(b'I')])[0], b'E');
    // The owner gets its own back, wherever it comes.
    b.link.begin();
    std::mem::swap(&mut b.client, &mut owner);
    let (to_server, _) = b.client_sends(&[bind.clone(), m(b'S', b"")]);
    assert_eq!(to_server, [m(b'P', b"\0select 'secret'\0\0\0"), bind, m(b'S', b"")].concat());
}

#[test]
fn reserved_names_of_a_client_reach_nothing() {
    let mut b = Bench::new();
    let (to_server, _) = b.client_sends(&[m(b'B', b"\0~00\0\0\0\0\0\0\0"), m(b'S', b"")]);
    assert_eq!(to_server, [m(b'B', b"\0~!!\0\0\0\0\0\0\0"), m(b'S', b"")].concat());
    let error = |name: &str| m(b'E', format!("C26000\0M\"{name}\" does not exist\0\0").as_bytes());
    assert_eq!(b.server_sends(&[error("~!!"), ready(b'I')]), [error("~00"), ready(b'I')].concat());
}

#[test]
fn errors_name_the_clients_statement() {
    let mut b = Bench::new();
    b.client_sends(&[m(b'P', b"plan\0select $1\0\0\0"), m(b'S', b"")]);
    b.server_sends(&[m(b'1', b""), ready(b'I')]);
    let taken = |name: &str| m(b'E', format!("C42P05\0M\"{name}\" already exists\0\0").as_bytes());
    b.client_sends(&[m(b'P', b"plan\0select 2\0\0\0"), m(b'C', b"Splan\0"), m(b'S', b"")]);
    let prepared_again = [m(b'3', b""), m(b'1', b"")].concat();
    assert_eq!(
        b.server_sends(&[prepared_again, taken("~000"), ready(b'I')]),
        [taken("plan"), ready(b'I')].concat()
    );
    // Told by the client's table, with the Close behind the failure undone.
    let few = |name: &str| m(b'E', format!("C08P01\0M\"{name}\" requires 1\0\0").as_bytes());
    b.client_sends(&[m(b'B', b"\0plan\0\0\0\0\0\0\0"), m(b'C', b"Splan\0"), m(b'S', b"")]);
    assert_eq!(b.server_sends(&[few("~000"), ready(b'I')]), [few("plan"), ready(b'I')].concat());
    // In the middle of what a lane forwarded, even of the message's head.
    let lane = LaneState {
        outstanding: 1,
        status: Status::Idle,
        copy_in: false,
        extended: true,
        unnamed: false,
        open: false,
        request_left: 0,
        response_left: 0,
        response_head: 3,
    };
    b.link.adopt(lane);
    let shown = b.server_sends(&[few("~000"), ready(b'I')]);
    assert_eq!(shown, [&few("plan")[3..], &ready(b'I')].concat());
    // Forgotten by a DEALLOCATE ALL ahead of it, and closed behind it.
    b.client_sends(&[
        m(b'E', b"\0\0\0\0\0"),
        m(b'B', b"\0plan\0\0\0\0\0\0\0"),
        m(b'C', b"Splan\0"),
        m(b'S', b""),
    ]);
    let dropped = m(b'C', b"DEALLOCATE ALL\0");
    let gone = |name: &str| m(b'E', format!("C26000\0M\"{name}\" does not exist\0\0").as_bytes());
    let shown = b.server_sends(&[dropped.clone(), gone("~000"), ready(b'I')]);
    assert_eq!(shown, [dropped, gone("plan"), ready(b'I')].concat());
    assert!(b.link.is_quiescent());
}

#[test]
fn deallocate_all_forgets_but_keeps_what_follows() {
    let mut b = Bench::new();
    b.client_sends(&[m(b'P', b"abc\0select 1\0\0\0"), m(b'S', b"")]);
    b.server_sends(&[m(b'1', b""), ready(b'I')]);
    b.client_sends(&[m(b'Q', b"deallocate all\0"), m(b'P', b"new\0select 2\0\0\0"), m(b'S', b"")]);
    b.server_sends(&[m(b'C', b"DEALLOCATE ALL\0"), ready(b'I'), m(b'1', b""), ready(b'I')]);
    assert_eq!((b.client.statement_count(), b.link.statements.len()), (1, 1));
}

#[test]
fn eviction_is_undone_when_the_server_skipped_it() {
    let mut b = Bench::new();
    b.link.set_options(LinkOptions { statements_max: 1, ..LinkOptions::default() });
    b.client_sends(&[m(b'P', b"one\0select 1\0\0\0"), m(b'S', b"")]);
    b.server_sends(&[m(b'1', b""), ready(b'I')]);
    let (to_server, _) =
        b.client_sends(&[m(b'P', b"\0selec\0\0\0"), m(b'P', b"two\0select 2\0\0\0"), m(b'S', b"")]);
    assert!(to_server.windows(9).any(|w| w == &m(b'C', b"S~00\0")[..9]), "closes one to make room for two");
    b.server_sends(&[m(b'E', b"SERROR\0\0"), ready(b'I')]);
    let (to_server, _) = b.client_sends(&[m(b'B', b"\0one\0\0\0\0\0\0\0"), m(b'S', b"")]);
    assert_eq!(to_server[0], b'B', "the server still has it");
}

#[test]
fn an_eviction_behind_deallocate_all_stays_one() {
    let mut b = Bench::new();
    b.link.set_options(LinkOptions { statements_max: 1, ..LinkOptions::default() });
    let parse = m(b'P', b"abc\0select 1\0\0\0");
    b.client_sends(&[
        m(b'P', b"\0deallocate all\0\0\0"),
        m(b'B', b"\0\0\0\0\0\0\0\0"),
        m(b'E', b"\0\0\0\0\0"),
        parse.clone(),
        m(b'P', b"xyz\0select 2\0\0\0"),
    ]);
    b.server_sends(&[m(b'1', b""), m(b'2', b""), m(b'C', b"DEALLOCATE ALL\0")]);
    assert_eq!(b.link.statements.len(), 1, "the other one was closed for want of room");
    b.server_sends(&[m(b'1', b""), m(b'3', b""), m(b'1', b"")]);
    let (to_server, _) = b.client_sends(&[m(b'B', b"\0abc\0\0\0\0\0\0\0"), m(b'S', b"")]);
    let again = m(b'P', b"~00\0select 1\0\0\0");
    assert!(to_server.windows(again.len()).any(|part| part == again), "{to_server:?}");
}

/// All of it sent before the first answer: what the second batch did, it did to tables that were not to be.
#[test]
fn batches_that_fail_one_after_the_other_leave_nothing() {
    let fails = m(b'P', b"\0no sql\0\0\0");
    let sync = m(b'S', b"");
    let parse = |name: &[u8]| m(b'P', &[name, b"\0select 1\0\0\0"].concat());
    for second in [parse(b"xyz"), m(b'C', b"Sabc\0")] {
        let mut b = Bench::new();
        b.client_sends(&[fails.clone(), parse(b"abc"), sync.clone(), fails.clone(), second, sync.clone()]);
        let error = m(b'E', b"SERROR\0C42601\0\0");
        b.server_sends(&[error.clone(), ready(b'I'), error, ready(b'I')]);
        assert_eq!((b.client.statement_count(), b.link.statements.len()), (0, 0));
        let (to_server, answer) = b.client_sends(&[parse(b"abc"), sync.clone()]);
        assert!(to_server.starts_with(b"P") && answer.is_empty(), "a ParseComplete was made up");
    }
}

#[test]
fn a_batch_that_is_carried_out_behind_one_that_fails_counts() {
    let mut b = Bench::new();
    let parse = |name: &[u8]| m(b'P', &[name, b"\0select 1\0\0\0"].concat());
    let sync = m(b'S', b"");
    b.client_sends(&[m(b'P', b"\0no sql\0\0\0"), parse(b"abc"), sync.clone(), parse(b"xyz"), sync.clone()]);
    b.server_sends(&[m(b'E', b"SERROR\0C42601\0\0"), ready(b'I'), m(b'3', b""), m(b'1', b""), ready(b'I')]);
    assert_eq!((b.client.statement_count(), b.link.statements.len()), (1, 1));
    let (to_server, _) = b.client_sends(&[m(b'D', b"Sxyz\0"), sync]);
    assert!(to_server.starts_with(b"D"), "the server has it");
}

#[test]
fn what_the_pooler_asks_itself_is_swallowed() {
    let mut b = Bench::new();
    let mut out = Vec::new();
    b.link.inject_query("SET a = 'b';", &mut out);
    assert_eq!(out, m(b'Q', b"SET a = 'b';\0"));
    let shown = b.server_sends(&[m(b'C', b"SET\0"), m(b'S', b"TimeZone\0UTC\0"), ready(b'I')]);
    assert!(shown.is_empty());
    assert_eq!(b.seen.parameters, [("TimeZone".to_owned(), "UTC".to_owned(), true)]);
    assert!(b.seen.ready.is_empty() && b.link.is_quiescent());
}

#[test]
fn abandoning_brings_the_server_to_rest() {
    let mut b = Bench::new();
    b.client_sends(&[
        m(b'P', b"\0copy t from stdin\0\0\0"),
        m(b'B', b"\0\0\0\0\0\0\0\0"),
        m(b'E', b"\0\0\0\0\0"),
        m(b'H', b""),
    ]);
    b.server_sends(&[m(b'1', b""), m(b'2', b""), m(b'G', b"\0\0\0")]);
    let mut out = Vec::new();
    assert!(b.link.abandon(&mut out));
    assert_eq!(out, [m(b'f', b"client disconnected\0"), m(b'S', b"")].concat());
    let mut buffer = Vec::new();
    let mut splice = Splice::new(&mut buffer);
    let input = [m(b'E', b"SERROR\0\0"), ready(b'I')].concat();
    b.link.backend(&input, None, &mut b.seen, &mut splice).expect("accepted");
    assert!(splice.bytes(&input).is_empty() && b.link.is_quiescent());
}

#[test]
fn any_split_gives_the_same_bytes() {
    let whole = [
        m(b'P', b"name1\0select $1\0\0\x01\0\0\0\x17"),
        m(b'B', b"\0name1\0\0\0\0\x01\0\0\0\x011\0\0"),
        m(b'D', b"P\0"),
        m(b'E', b"\0\0\0\0\0"),
        m(b'S', b""),
        m(b'Q', b"select 1\0"),
    ]
    .concat();
    let feed = |pieces: &mut dyn Iterator<Item = &[u8]>| {
        let mut b = Bench::new();
        let (mut held, mut sent, mut to_client) = (Vec::new(), Vec::new(), Vec::new());
        for piece in pieces {
            held.extend_from_slice(piece);
            let mut buffer = Vec::new();
            let mut out = Splice::new(&mut buffer);
            let mut context = FrontendContext {
                client: &mut b.client,
                statements: &b.statements,
                to_client: &mut to_client,
            };
            let (used, _) = b.link.frontend(&held, &mut context, &mut out).expect("accepted");
            sent.extend_from_slice(out.bytes(&held));
            held.drain(..used);
        }
        (sent, b.link.pending.len())
    };
    let expected = feed(&mut std::iter::once(&whole[..]));
    for size in 1..whole.len() {
        assert_eq!(feed(&mut whole.chunks(size)), expected, "pieces of {size}");
    }
}

#[test]
fn hostile_messages_are_refused() {
    for (bytes, why) in [
        (vec![b'Q', 0, 0, 0, 3], "length below 4"),
        (vec![b'Q', 0xff, 0xff, 0xff, 0xff], "length beyond all bounds"),
        (m(b'p', b"x\0"), "password outside a login"),
        (m(b'!', b""), "unknown type"),
        (b"!\x7f\xff\xff\xff".to_vec(), "unknown type, whose body never comes"),
        (b"S\0\0\x27\x11".to_vec(), "length 10001 of a Sync"),
        (b"d\x3f\xff\xff\xff".to_vec(), "length beyond PostgreSQL's of a CopyData"),
        (m(b'B', b"no end of names"), "names without end"),
        (m(b'D', b""), "empty Describe"),
        (m(b'P', b"abc"), "Parse without end"),
    ] {
        let mut b = Bench::new();
        let mut buffer = Vec::new();
        let mut out = Splice::new(&mut buffer);
        let mut context =
            FrontendContext { client: &mut b.client, statements: &b.statements, to_client: &mut Vec::new() };
        assert!(b.link.frontend(&bytes, &mut context, &mut out).is_err(), "{why}");
        assert!(out.bytes(&bytes).is_empty(), "{why}: nothing is passed on");
    }
}

#[test]
fn a_name_that_an_answer_to_come_may_free_waits_for_it() {
    let mut b = Bench::new();
    b.client_sends(&[m(b'P', b"abc\0select 1\0\0\0"), m(b'S', b"")]);
    b.server_sends(&[m(b'1', b""), ready(b'I')]);
    let deallocate =
        [m(b'P', b"\0deallocate all\0\0\0"), m(b'B', b"\0\0\0\0\0\0\0\0"), m(b'E', b"\0\0\0\0\0")].concat();
    let parse = m(b'P', b"abc\0select 2\0\0\0");
    let input = [&deallocate[..], &parse].concat();
    let (mut buffer, mut to_client) = (Vec::new(), Vec::new());
    let mut out = Splice::new(&mut buffer);
    let mut context =
        FrontendContext { client: &mut b.client, statements: &b.statements, to_client: &mut to_client };
    let (used, _) = b.link.frontend(&input, &mut context, &mut out).expect("accepted");
    assert_eq!(
        out.bytes(&input),
        [&deallocate[..], &m(b'H', b"")].concat(),
        "a Flush makes the server answer"
    );
    assert!(b.link.is_holding() && used == deallocate.len());
    b.server_sends(&[m(b'1', b""), m(b'2', b""), m(b'C', b"DEALLOCATE ALL\0")]);
    assert!(!b.link.is_holding());
    let (to_server, _) = b.client_sends(&[parse, m(b'S', b"")]);
    assert_eq!(to_server, [m(b'P', b"~01\0select 2\0\0\0"), m(b'S', b"")].concat());
    b.server_sends(&[m(b'1', b""), ready(b'I')]);
    assert_eq!((b.client.statement_count(), b.link.statements.len()), (1, 1));
}

#[test]
fn a_long_unnamed_parse_may_be_cut_behind_its_header() {
    let mut b = Bench::new();
    b.link.set_options(LinkOptions { statement_bytes_max: 100, ..LinkOptions::default() });
    let parse = m(b'P', &[b"\0".as_slice(), &[b' '; 200], b"\0\0\0"].concat());
    let mut context =
        FrontendContext { client: &mut b.client, statements: &b.statements, to_client: &mut Vec::new() };
    let mut buffer = Vec::new();
    let fed = b.link.frontend(&parse[..5], &mut context, &mut Splice::new(&mut buffer));
    assert_eq!(fed, Ok((0, FrontendEvent::Fed)), "the limit is for named ones");
    assert_eq!(b.client_sends(std::slice::from_ref(&parse)).0, parse);
}

#[test]
fn statements_of_a_client_have_a_limit_and_room_comes_back() {
    let mut b = Bench::new();
    b.link.set_options(LinkOptions { client_statement_bytes_max: 1_000, ..LinkOptions::default() });
    let prepare = |b: &mut Bench, name: &str| {
        let parse = m(b'P', format!("{name}\0select 1\0\0\0").as_bytes());
        let mut context =
            FrontendContext { client: &mut b.client, statements: &b.statements, to_client: &mut Vec::new() };
        b.link.frontend(&parse, &mut context, &mut Splice::new(&mut Vec::new())).map(drop)
    };
    for name in ["a", "b", "c", "d", "e"] {
        assert_eq!(prepare(&mut b, name), Ok(()));
    }
    for name in [&b"a"[..], b"b"] {
        b.client.statements().set(name, None);
    }
    assert_eq!((prepare(&mut b, "f"), prepare(&mut b, "g")), (Ok(()), Ok(())));
    assert_eq!(prepare(&mut b, "h").and(prepare(&mut b, "i")), Err(LinkError::TooManyStatements(1_032)));
    b.client.statements().clear();
    assert_eq!(b.client.statements().bytes(), 0);
}

/// What becomes of `message`: accepted or not, and why not. `first`: how many bytes come first; the rest is offered with what was not used.
fn fate(message: &[u8], first: usize) -> Result<Vec<u8>, LinkError> {
    let mut b = Bench::new();
    let mut to_server = Vec::new();
    let mut at = 0;
    for end in [first, message.len()] {
        let (mut buffer, mut to_client) = (Vec::new(), Vec::new());
        let mut out = Splice::new(&mut buffer);
        let mut context =
            FrontendContext { client: &mut b.client, statements: &b.statements, to_client: &mut to_client };
        let (used, _) = b.link.frontend(&message[at..end], &mut context, &mut out)?;
        to_server.extend_from_slice(out.bytes(&message[at..end]));
        at += used;
    }
    assert_eq!(at, message.len());
    Ok(to_server)
}

#[test]
fn long_names_are_judged_alike_whole_and_cut() {
    const KIB_64: usize = 64 * 1024;
    // Portal and statement with their ends take `names` bytes.
    let bind = |names: usize| {
        let portal = vec![b'p'; names / 2];
        let statement = vec![b's'; names - portal.len() - 2];
        m(b'B', &[&portal[..], b"\0", &statement, b"\0\0\0\0\0\0\0"].concat())
    };
    // Its name with its end takes `name` bytes.
    let parse = |name: usize| m(b'P', &[&vec![b's'; name - 1][..], b"\0select 1\0\0\0"].concat());
    let named = |tag, size: usize| m(tag, &[&b"S"[..], &vec![b's'; size - 2], b"\0"].concat());
    for (message, fits) in [
        (bind(KIB_64), true),
        (bind(KIB_64 + 1), false),
        (bind(10 << 20), false),
        (parse(KIB_64), true),
        (parse(KIB_64 + 1), false),
        (parse(10 << 20), false),
        (named(b'D', 9996), true),
        (named(b'D', 9997), false),
        (named(b'C', 9996), true),
        (named(b'C', 10 << 20), false),
        (m(b'B', b"no end"), false),
    ] {
        let whole = fate(&message, message.len());
        assert_eq!(whole.is_ok(), fits, "{:?}", whole.err());
        for first in [0, 5, 6, 100, KIB_64 - 1, KIB_64, KIB_64 + 4, KIB_64 + 5, KIB_64 + 6, message.len() - 1]
        {
            assert_eq!(
                fate(&message, first.min(message.len())),
                whole,
                "the first {first} of {}",
                message.len()
            );
        }
    }
}

#[test]
fn a_replication_stream_for_nobody_ends_the_link() {
    let mut b = Bench::new();
    b.client_sends(&[m(b'Q', b"start_replication\0")]);
    assert!(b.link.abandon(&mut Vec::new()));
    let (input, mut buffer) = (m(b'W', b"\0\0\0"), Vec::new());
    let fed = b.link.backend(&input, None, &mut b.seen, &mut Splice::new(&mut buffer));
    assert_eq!(fed, Err(LinkError::OutOfOrder('W')));
}

/// Some bytes of Describes may ask for megabytes of Parse messages.
#[test]
fn what_is_composed_at_a_time_is_bounded() {
    let mut b = Bench::new();
    b.link.set_options(LinkOptions { statements_max: 2, ..LinkOptions::default() });
    let text = "x".repeat(300_000);
    let parse = |name: &str| m(b'P', format!("{name}\0select '{text}{name}'\0\0\0").as_bytes());
    for name in ["a", "b", "c"] {
        b.client_sends(&[parse(name), m(b'S', b"")]);
        let closed = if name == "c" { vec![m(b'3', b"")] } else { vec![] };
        b.server_sends(&[closed, vec![m(b'1', b""), ready(b'I')]].concat());
    }
    let describes: Vec<u8> = ["a", "b", "c"]
        .iter()
        .cycle()
        .take(300)
        .flat_map(|name| m(b'D', format!("S{name}\0").as_bytes()))
        .collect();
    let (mut at, mut rounds) = (0, 0);
    while at < describes.len() {
        let (mut buffer, mut to_client) = (Vec::new(), Vec::new());
        let mut out = Splice::new(&mut buffer);
        let mut context =
            FrontendContext { client: &mut b.client, statements: &b.statements, to_client: &mut to_client };
        let (used, _) = b.link.frontend(&describes[at..], &mut context, &mut out).expect("accepted");
        assert!(out.composed() < 2 << 20, "{} bytes at a time", out.composed());
        assert!(used > 0);
        at += used;
        rounds += 1;
    }
    assert!(rounds > 10, "{rounds}");
}

/// A replication stream: what is said into half a message, the other side takes for its rest.
#[test]
fn a_stream_of_copy_both_is_cut_where_its_messages_are() {
    let mut b = Bench::new();
    b.client_sends(&[m(b'Q', b"START_REPLICATION\0")]);
    let (data, status) = (m(b'd', &[b'w'; 40]), m(b'd', &[b'r'; 34]));
    for cut in [1, 4, 5, 20] {
        let begun = if b.link.is_copy_both() { Vec::new() } else { m(b'W', b"\0\0\0") };
        let passed = b.server_sends(&[begun.clone(), data.clone(), data[..cut].to_vec()]);
        assert_eq!(passed, [&begun, &data, &data[..cut]].concat());
        assert!(b.link.is_answer_cut() && !b.link.is_cut(), "{cut} bytes of the server's");
        b.server_sends(&[data[cut..].to_vec()]);
        assert!(!b.link.is_answer_cut());
        b.client_sends(&[status.clone(), status[..cut].to_vec()]);
        assert!(b.link.is_cut() && !b.link.is_answer_cut(), "{cut} bytes of the client's");
        b.client_sends(&[status[cut..].to_vec()]);
        assert!(!b.link.is_cut());
    }
}

/// A DO block that deallocates, say: no CommandComplete tells.
#[test]
fn a_statement_that_the_server_lost_is_prepared_again() {
    let mut b = Bench::new();
    b.client_sends(&[m(b'P', b"abc\0select 1\0\0\0"), m(b'S', b"")]);
    b.server_sends(&[m(b'1', b""), ready(b'I')]);
    let lost = m(b'E', b"SERROR\0C26000\0Mprepared statement \"~00\" does not exist\0\0");
    let bind = m(b'B', b"\0abc\0\0\0\0\0\0\0");
    let again = [m(b'C', b"S~00\0"), m(b'P', b"~00\0select 1\0\0\0")].concat();
    for ask in [&bind, &m(b'D', b"Sabc\0")] {
        b.client_sends(&[ask.clone(), m(b'S', b"")]);
        b.server_sends(&[lost.clone(), ready(b'I')]);
        let (sent, _) = b.client_sends(&[bind.clone(), m(b'S', b"")]);
        assert_eq!(sent, [again.clone(), m(b'B', b"\0~00\0\0\0\0\0\0\0"), m(b'S', b"")].concat());
        b.server_sends(&[m(b'3', b""), m(b'1', b""), m(b'2', b""), ready(b'I')]);
        assert!(b.link.is_quiescent());
        let (sent, _) = b.client_sends(&[bind.clone(), m(b'S', b"")]);
        assert_eq!(sent, [m(b'B', b"\0~00\0\0\0\0\0\0\0"), m(b'S', b"")].concat(), "it has it now");
        b.server_sends(&[m(b'2', b""), ready(b'I')]);
    }
    // What was closed behind it in the same batch was not closed, and is not there either.
    b.link.options.statements_max = 1;
    b.client_sends(&[bind.clone(), m(b'P', b"new\0select 2\0\0\0"), m(b'S', b"")]);
    b.server_sends(&[lost.clone(), ready(b'I')]);
    assert!(b.link.statements.is_empty());
    // Another error of the kind says nothing of the server's tables.
    let (sent, _) = b.client_sends(&[bind.clone(), m(b'S', b"")]);
    assert!(sent.starts_with(&again));
    b.server_sends(&[m(b'3', b""), m(b'1', b""), m(b'2', b""), ready(b'I')]);
    b.client_sends(&[m(b'B', b"\0nobody\0\0\0\0\0\0\0"), m(b'S', b"")]);
    b.server_sends(&[lost.clone(), ready(b'I')]);
    assert_eq!(b.link.statements.len(), 1);
    // The same in what a lane forwarded, which is told by the name alone.
    let mut lane = Link::new(LinkOptions::default());
    lane.adopt(ADOPTED);
    std::mem::swap(&mut lane.statements, &mut b.link.statements);
    b.link = lane;
    b.server_sends(&[lost, ready(b'I')]);
    assert!(b.link.statements.is_empty());
}

/// The server would take another text under that name, and give it to all who use it.
#[test]
fn no_other_text_comes_under_a_name_that_the_server_may_have_lost() {
    let mut b = Bench::new();
    b.client_sends(&[m(b'P', b"abc\0select 1\0\0\0"), m(b'S', b"")]);
    b.server_sends(&[m(b'1', b""), ready(b'I')]);
    let (sent, _) = b.client_sends(&[m(b'P', b"abc\0select 2\0\0\0"), m(b'S', b"")]);
    let own = [m(b'C', b"S~00\0"), m(b'P', b"~00\0select 1\0\0\0")].concat();
    assert_eq!(sent, [own, m(b'P', b"~00\0select 2\0\0\0"), m(b'S', b"")].concat());
    let taken = m(b'E', b"SERROR\0C42P05\0Mprepared statement \"~00\" already exists\0\0");
    let heard = b.server_sends(&[m(b'3', b""), m(b'1', b""), taken, ready(b'I')]);
    let told = m(b'E', b"SERROR\0C42P05\0Mprepared statement \"abc\" already exists\0\0");
    assert_eq!(heard, [told, ready(b'I')].concat());
    assert_eq!((b.link.statements.len(), b.client.statement_count()), (1, 1));
}

/// statement_timeout at a Flush, when all is answered: the server skips to the Sync and goes on.
#[test]
fn an_error_between_the_messages_of_a_batch_is_not_the_servers_end() {
    for (error, is_ending) in [
        ("SERROR\0VERROR\0C57014\0", false),
        ("SFEHLER\0VERROR\0C57014\0", false),
        ("SFATAL\0VFATAL\0C57P01\0", true),
        ("SFATAL\0C57P01\0", true),
    ] {
        let mut b = Bench::new();
        b.client_sends(&[m(b'P', b"\0select 1\0\0\0"), m(b'H', b"")]);
        b.server_sends(&[m(b'1', b"")]);
        b.client_sends(&[m(b'H', b"")]);
        let error = m(b'E', &[error.as_bytes(), b"\0"].concat());
        assert_eq!(b.server_sends(std::slice::from_ref(&error)), error);
        assert_eq!(b.link.is_ending(), is_ending, "{error:?}");
        if !is_ending {
            assert!(b.link.awaits_client() && !b.link.is_quiescent());
            b.client_sends(&[m(b'B', b"\0\0\0\0\0\0\0\0"), m(b'S', b"")]);
            b.server_sends(&[ready(b'I')]);
            assert!(b.link.is_quiescent());
        }
    }
}

/// The server keeps its answer until a Sync or Flush: without that nobody would ever read the Sync.
#[test]
fn a_pipeline_that_is_full_is_flushed() {
    let mut b = Bench::new();
    b.client_sends(&[m(b'P', b"abc\0select 1\0\0\0"), m(b'S', b"")]);
    b.server_sends(&[m(b'1', b""), ready(b'I')]);
    let pair = [m(b'C', b"Sabc\0"), m(b'P', b"abc\0select 1\0\0\0")].concat();
    let input = [m(b'D', b"P\0"), pair.repeat(PIPELINE_MAX), m(b'S', b"")].concat();
    let (mut at, mut answers) = (0, 0);
    while at < input.len() {
        let (mut buffer, mut to_client) = (Vec::new(), Vec::new());
        let mut out = Splice::new(&mut buffer);
        let mut context =
            FrontendContext { client: &mut b.client, statements: &b.statements, to_client: &mut to_client };
        let (used, _) = b.link.frontend(&input[at..], &mut context, &mut out).expect("accepted");
        let sent = out.bytes(&input[at..]).to_vec();
        at += used;
        if at < input.len() {
            assert!(b.link.is_full() && b.link.outstanding() == PIPELINE_MAX + 1);
            assert!(sent.ends_with(&m(b'H', b"")), "after {at} bytes");
            answers += b.server_sends(&[m(b'n', b"")]).len() / 5;
            assert!(!b.link.is_full());
        }
        answers += to_client.len() / 5;
    }
    b.server_sends(&[ready(b'I')]);
    assert_eq!(answers, 1 + 2 * PIPELINE_MAX);
    assert!(b.link.is_quiescent());
}
