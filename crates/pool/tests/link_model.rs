// SPDX-License-Identifier: Apache-2.0
//! The link tracker against a model of PostgreSQL: whatever clients say, in whatever pieces, over one shared server, each of them hears
//! what a server of its own would have said, and the server is given on exactly when it is at rest.

mod backend;

use backend::{Backend, message};
use proptest::prelude::*;
use underpass_pool::link::{
    BackendObserver, ClientSide, FrontendContext, Link, LinkError, LinkOptions, Splice, Status,
};
use underpass_pool::prepared::Statements;

/// Names of statements: too short for a table of their own, ordinary, and one that only the pooler may give.
const NAMES: [&str; 4] = ["s", "stmt_1", "stmt_2", "~00"];
/// Texts, few enough that clients share them.
const TEXTS: [&str; 5] = ["row 1", "row 2", "begin", "fail", "syntax"];

/// One thing a client does.
#[derive(Debug, Clone)]
enum Action {
    Simple(Vec<&'static str>),
    /// Messages of a batch, and whether a Sync ends it (a Flush does otherwise, and the next batch goes on).
    Batch(Vec<Step>, bool),
    Call,
    /// COPY FROM STDIN by simple query or by Execute; Sync ahead of the data; how it ends.
    CopyIn {
        extended: bool,
        sync_ahead: bool,
        end: CopyEnd,
    },
    /// COPY messages outside COPY.
    Stray,
}

#[derive(Debug, Clone, Copy)]
enum CopyEnd {
    Done,
    Fail,
    BadData,
    /// Refused before the server has read any of it: a Sync ahead counts.
    Refused,
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Parse(&'static str, &'static str),
    Bind(&'static str),
    DescribeStatement(&'static str),
    DescribePortal,
    Execute,
    CloseStatement(&'static str),
    ClosePortal,
}

fn text() -> impl Strategy<Value = &'static str> {
    prop_oneof![
        4 => prop::sample::select(TEXTS.to_vec()),
        1 => Just("commit"),
        1 => Just("rollback"),
        1 => Just("deallocate all"),
        1 => Just("set"),
        1 => Just("copy out"),
        1 => Just(""),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let name = || prop_oneof![2 => prop::sample::select(NAMES.to_vec()), 1 => Just("")];
    prop_oneof![
        4 => (name(), text()).prop_map(|(name, text)| Step::Parse(name, text)),
        4 => name().prop_map(Step::Bind),
        2 => name().prop_map(Step::DescribeStatement),
        1 => Just(Step::DescribePortal),
        4 => Just(Step::Execute),
        2 => name().prop_map(Step::CloseStatement),
        1 => Just(Step::ClosePortal),
    ]
}

fn action() -> impl Strategy<Value = Action> {
    let end = prop_oneof![2 => Just(CopyEnd::Done), 1 => Just(CopyEnd::Fail), 1 => Just(CopyEnd::BadData),
        1 => Just(CopyEnd::Refused)];
    prop_oneof![
        4 => prop::collection::vec(text(), 1..3).prop_map(Action::Simple),
        8 => (prop::collection::vec(step(), 0..7), prop::bool::weighted(0.85)).prop_map(|(s, sync)| Action::Batch(s, sync)),
        1 => Just(Action::Call),
        2 => (any::<bool>(), any::<bool>(), end)
            .prop_map(|(extended, sync_ahead, end)| Action::CopyIn { extended, sync_ahead, end }),
        1 => Just(Action::Stray),
    ]
}

/// Rows that name the client that asked for them, where `own` does.
fn owned(text: &str, own: &str) -> String {
    if text.starts_with("row") { format!("{text}{own}") } else { text.to_owned() }
}

fn encode_step(step: Step, own: &str, out: &mut Vec<u8>) {
    let z = |text: &str| [text.as_bytes(), b"\0"].concat();
    match step {
        Step::Parse(name, text) => message(out, b'P', &[&z(name), &z(&owned(text, own)), b"\0\0"]),
        Step::Bind(name) => message(out, b'B', &[b"\0", &z(name), b"\0\0\0\0\0\0"]),
        Step::DescribeStatement(name) => message(out, b'D', &[b"S", &z(name)]),
        Step::DescribePortal => message(out, b'D', &[b"P\0"]),
        Step::Execute => message(out, b'E', &[b"\0\0\0\0\0"]),
        Step::CloseStatement(name) => message(out, b'C', &[b"S", &z(name)]),
        Step::ClosePortal => message(out, b'C', &[b"P\0"]),
    }
}

fn encode(action: &Action, own: &str) -> Vec<u8> {
    let mut out = Vec::new();
    match action {
        Action::Simple(texts) => {
            let texts: Vec<String> = texts.iter().map(|text| owned(text, own)).collect();
            message(&mut out, b'Q', &[texts.join(";").as_bytes(), b"\0"]);
        }
        Action::Batch(steps, sync) => {
            steps.iter().for_each(|&step| encode_step(step, own, &mut out));
            message(&mut out, if *sync { b'S' } else { b'H' }, &[]);
        }
        Action::Call => message(&mut out, b'F', &[b"\0\0\0\x01\0\0\0\0\0\0"]),
        Action::CopyIn { extended, sync_ahead, end } => {
            let sql = if let CopyEnd::Refused = end { "copy refused" } else { "copy in" };
            if *extended {
                for step in [Step::Parse("", sql), Step::Bind(""), Step::Execute] {
                    encode_step(step, own, &mut out);
                }
                if *sync_ahead {
                    message(&mut out, b'S', &[]);
                }
            } else {
                message(&mut out, b'Q', &[sql.as_bytes(), b"\0"]);
            }
            message(&mut out, b'd', &[b"data"]);
            if let CopyEnd::BadData = end {
                message(&mut out, b'd', &[b"bad"]);
            }
            match end {
                CopyEnd::Done | CopyEnd::BadData | CopyEnd::Refused => message(&mut out, b'c', &[]),
                CopyEnd::Fail => message(&mut out, b'f', &[b"no\0"]),
            }
            if *extended {
                message(&mut out, b'S', &[]);
            }
        }
        Action::Stray => {
            message(&mut out, b'd', &[b"nobody asked"]);
            message(&mut out, b'c', &[]);
        }
    }
    out
}

#[derive(Default)]
struct Quiet;

impl BackendObserver for Quiet {
    fn parameter_status(&mut self, _name: &str, _value: &str, _hidden: bool) {}
    fn ready(&mut self, _status: Status) {}
    fn hidden_error(&mut self, _body: &[u8]) {}
}

/// A client, and the server of its own that it is compared with.
struct Session {
    side: ClientSide,
    direct: Backend,
    expected: Vec<u8>,
    heard: Vec<u8>,
}

impl Session {
    fn new() -> Self {
        let mut direct = Backend::default();
        direct.forgets_skipped_unnamed = true;
        Self { side: ClientSide::default(), direct, expected: Vec::new(), heard: Vec::new() }
    }

    /// In a failed transaction a server that lacks a statement cannot be given it: the client hears 25P02 even where it could have
    /// described or bound the statement (one that returns nothing, or ends the transaction). From there on the two differ.
    fn lacked_a_statement(&self) -> bool {
        let (heard, expected) = (readable(&self.heard), readable(&self.expected));
        let differs = heard.iter().zip(&expected).find(|(heard, expected)| heard != expected);
        differs.is_some_and(|(heard, _)| heard.contains("25P02"))
    }

    /// Who goes on before it knows of an error may find a statement that the error should have kept from being made, or miss one that was closed to
    /// make room for those behind the error. Where that decides whether a batch fails, the two differ from there on. To be asked when
    /// all is answered.
    fn went_on_over_an_error(&self) -> bool {
        let errors = |bytes| {
            let of_names =
                |told: &&String| told.starts_with('E') && (told.contains("26000") || told.contains("42P05"));
            readable(bytes).iter().filter(of_names).count()
        };
        errors(&self.heard) != errors(&self.expected)
    }
}

/// One link, one server, and bytes under way in both directions.
struct World {
    link: Link,
    server: Backend,
    statements: Statements,
    to_server: Vec<u8>,
    /// What the server has said and the link has not been given.
    under_way: Vec<u8>,
    /// What the link was given and did not use.
    from_server: Vec<u8>,
    inbox: Vec<u8>,
    /// The inbox begins with a message that the link held back.
    holds: bool,
}

impl World {
    fn new(statements_max: u32) -> Self {
        Self {
            link: Link::new(LinkOptions { statements_max, ..LinkOptions::default() }),
            server: Backend::default(),
            statements: Statements::default(),
            to_server: Vec::new(),
            under_way: Vec::new(),
            from_server: Vec::new(),
            inbox: Vec::new(),
            holds: false,
        }
    }

    fn client_says(&mut self, session: &mut Session, bytes: &[u8]) -> Result<(), LinkError> {
        self.inbox.extend_from_slice(bytes);
        let input = std::mem::take(&mut self.inbox);
        let (mut buffer, mut to_client) = (Vec::new(), Vec::new());
        let mut out = Splice::new(&mut buffer);
        let mut context = FrontendContext {
            client: &mut session.side,
            statements: &self.statements,
            to_client: &mut to_client,
        };
        let (used, _) = self.link.frontend(&input, &mut context, &mut out)?;
        self.to_server.extend_from_slice(out.bytes(&input));
        session.heard.extend_from_slice(&to_client);
        self.inbox = input[used..].to_vec();
        self.holds = self.link.is_holding();
        Ok(())
    }

    /// Lets the server read all there is, and the link all that comes back, in pieces of `piece` bytes.
    fn server_works(&mut self, session: Option<&mut Session>, piece: usize) -> Result<(), LinkError> {
        self.server_works_for(session, usize::MAX, piece, usize::MAX)
    }

    /// Lets the server read `count` bytes, and the link `come` bytes of its answers, in pieces of `piece` bytes.
    fn server_works_for(
        &mut self,
        mut session: Option<&mut Session>,
        count: usize,
        piece: usize,
        come: usize,
    ) -> Result<(), LinkError> {
        let (mut left, mut to_come) = (count, come);
        loop {
            let count = left.min(self.to_server.len());
            left -= count;
            let bytes: Vec<u8> = self.to_server.drain(..count).collect();
            self.server.read(&bytes, &mut self.under_way);
            let come = to_come.min(self.under_way.len());
            to_come -= come;
            let answer: Vec<u8> = self.under_way.drain(..come).collect();
            for part in answer.chunks(piece) {
                self.from_server.extend_from_slice(part);
                let mut buffer = Vec::new();
                let mut out = Splice::new(&mut buffer);
                let side = session.as_deref_mut().map(|session| &mut session.side);
                let used = self.link.backend(&self.from_server, side, &mut Quiet, &mut out)?;
                if let Some(session) = session.as_deref_mut() {
                    session.heard.extend_from_slice(out.bytes(&self.from_server));
                }
                self.from_server.drain(..used);
            }
            // What was held back for these answers.
            match session.as_deref_mut() {
                Some(session) if self.holds && !self.link.is_holding() => self.client_says(session, &[])?,
                _ => return Ok(()),
            }
        }
    }

    /// As the pooler: before a server that is at rest goes to somebody else.
    fn ends_doubt(&mut self) {
        if self.link.is_quiescent() && self.link.is_doubtful() {
            self.link.resync(&mut self.to_server);
        }
    }

    /// All that is under way, and what that brings about.
    fn all_works(&mut self, session: &mut Session) -> Result<(), LinkError> {
        self.server_works(Some(session), 7)?;
        self.ends_doubt();
        self.server_works(Some(session), 7)
    }
}

type Cut = (u8, u8, u8, u8);

/// Programs of clients, and how their bytes are cut and delayed.
#[derive(Debug, Clone)]
struct Run {
    turns: Vec<(usize, Vec<Action>)>,
    statements_max: u32,
    /// Bytes the client sends, bytes the server reads then, bytes of each piece of the answers, and how many of these come before the client
    /// goes on.
    cuts: Vec<Cut>,
    reset_between: bool,
    /// Clients wait for the answer of an action before the next one.
    waits: bool,
}

fn run() -> impl Strategy<Value = Run> {
    (
        prop::collection::vec((0..3usize, prop::collection::vec(action(), 1..4)), 1..10),
        1..4u32,
        prop::collection::vec((1..60u8, 0..60u8, 1..30u8, prop_oneof![0..60u8, Just(u8::MAX)]), 1..40),
        prop::bool::weighted(0.2),
        any::<bool>(),
    )
        .prop_map(|(turns, statements_max, cuts, reset_between, waits)| Run {
            turns,
            statements_max,
            cuts,
            reset_between,
            waits,
        })
}

/// One client's turn, up to where it lets the server go.
fn turn(
    world: &mut World,
    session: &mut Session,
    actions: &[Vec<u8>],
    waits: bool,
    cuts: &mut impl Iterator<Item = Cut>,
) -> Result<Result<(), LinkError>, TestCaseError> {
    world.link.begin();
    for action in actions {
        let mut left = &action[..];
        while !left.is_empty() {
            let (take, work, piece, come) = cuts.next().unwrap_or((1, 1, 1, 1));
            let (now, later) = left.split_at(left.len().min(take.into()));
            left = later;
            let mut said = Vec::new();
            session.direct.read(now, &mut said);
            session.expected.extend_from_slice(&said);
            let worked = world
                .client_says(session, now)
                .and_then(|()| world.server_works_for(Some(session), work.into(), piece.into(), come.into()));
            if worked.is_err() || session.direct.violated {
                return Ok(worked);
            }
            world.ends_doubt();
            if world.link.is_quiescent() && world.inbox.is_empty() {
                let is_right = session.direct.is_at_rest() || (!waits && session.went_on_over_an_error());
                prop_assert!(is_right, "released too early: {:?}", session.direct);
            }
        }
        if waits {
            let worked = world.all_works(session);
            if worked.is_err() {
                return Ok(worked);
            }
            if session.lacked_a_statement() {
                return Ok(Ok(()));
            }
            let at_rest = session.direct.is_at_rest();
            prop_assert_eq!(world.link.is_quiescent(), at_rest, "{:?} {:?}", &world.link, &session.direct);
        }
    }
    Ok(world.all_works(session))
}

/// Whatever a client is in the middle of, this ends it: COPY, a batch, a transaction.
fn ending() -> Vec<u8> {
    let mut bytes = Vec::new();
    message(&mut bytes, b'f', &[b"enough\0"]);
    message(&mut bytes, b'S', &[]);
    message(&mut bytes, b'Q', &[b"rollback\0"]);
    bytes
}

fn check(run: &Run) -> Result<(), TestCaseError> {
    let mut world = World::new(run.statements_max);
    let mut sessions: Vec<Session> = (0..3).map(|_| Session::new()).collect();
    let mut cuts = run.cuts.iter().copied().cycle();
    for (who, actions) in &run.turns {
        let session = &mut sessions[*who];
        let own = if run.waits { String::new() } else { format!(" of {who}") };
        let mut said: Vec<Vec<u8>> = actions.iter().map(|action| encode(action, &own)).collect();
        said.push(ending());
        match turn(&mut world, session, &said, run.waits, &mut cuts)? {
            // What follows a message that breaks COPY cannot be told from one side: how much of it the server ignores is a matter of time.
            _ if session.direct.violated => return Ok(()),
            Ok(()) => {}
            // The one thing that the protocol lets nobody follow; the link ends with a reason.
            Err(LinkError::SyncInCopy) => return Ok(()),
            // Who goes on behind a refused COPY before it knows is answered by more ReadyForQuery than anybody can place.
            Err(LinkError::OutOfOrder(_)) if !run.waits && actions.iter().any(is_refused_copy) => {
                return Ok(());
            }
            Err(error) => return Err(TestCaseError::fail(format!("{error}: {error:?}"))),
        }
        let (mut heard, mut expected) = (readable(&session.heard), readable(&session.expected));
        if run.waits {
            // Of two names for one text, the one that is told is not always the one that was used.
            for error in heard.iter_mut().chain(&mut expected).filter(|message| message.contains("26000")) {
                *error = error.replace("stmt_2", "stmt_1");
            }
            if session.lacked_a_statement() {
                return Ok(());
            }
            prop_assert_eq!(heard, expected, "client {}", who);
        } else {
            // What is another's is never heard.
            let ready = |all: &[String]| all.iter().filter(|message| message.starts_with('Z')).count();
            if !session.went_on_over_an_error() {
                prop_assert_eq!(ready(&heard), ready(&expected));
            }
            let foreign = heard.iter().find(|row| row.starts_with('D') && !row.contains(&own));
            prop_assert!(foreign.is_none(), "client {} got {:?}", who, foreign);
        }
        prop_assert!(session.direct.is_at_rest());
        prop_assert!(world.link.is_quiescent(), "never released: {:?}", world.link);
        if world.link.is_doubtful() {
            world.link.resync(&mut world.to_server);
            let went = world.server_works(None, 3);
            prop_assert!(
                went.is_ok() && world.link.is_quiescent() && !world.link.is_doubtful(),
                "{:?}",
                went
            );
        }
        if run.reset_between {
            world.link.inject_query("deallocate all", &mut world.to_server);
            let went = world.server_works(None, 3);
            prop_assert!(went.is_ok() && world.link.is_quiescent(), "{:?}", went);
        }
    }
    Ok(())
}

/// One that a Sync may go ahead of: its own, or that of a batch which binds the statement again.
fn is_refused_copy(action: &Action) -> bool {
    matches!(action, Action::CopyIn { extended: true, end: CopyEnd::Refused, .. })
}

/// Type and body of each message, for reading.
fn readable(mut bytes: &[u8]) -> Vec<String> {
    let mut all = Vec::new();
    while let Some(header) = bytes.first_chunk::<5>() {
        let length = u32::from_be_bytes([header[1], header[2], header[3], header[4]]) as usize + 1;
        let Some(body) = bytes.get(5..length) else { break };
        all.push(format!("{}{:?}", header[0] as char, String::from_utf8_lossy(body)));
        bytes = &bytes[length..];
    }
    if !bytes.is_empty() {
        all.push(format!("cut: {bytes:?}"));
    }
    all
}

/// A few for every day; `PROPTEST_CASES=1000000 cargo test --release -p underpass-pool --test link_model` looks for rare ones.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(3000)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]

    #[test]
    fn clients_of_one_link_hear_what_they_would_directly(run in run()) {
        check(&run)?;
    }

    /// A client that vanishes anywhere leaves a server that comes to rest, or one that is known not to.
    #[test]
    fn an_abandoned_server_comes_to_rest(
        actions in prop::collection::vec(action(), 1..4),
        cut in any::<prop::sample::Index>(),
        work in 0..200usize,
        come in 0..200usize,
    ) {
        let mut world = World::new(3);
        let mut session = Session::new();
        let bytes: Vec<u8> = actions.iter().flat_map(|action| encode(action, "")).collect();
        let said = &bytes[..cut.index(bytes.len() + 1)];
        let went = world.client_says(&mut session, said).and_then(|()| world.server_works_for(Some(&mut session), work, 5, come));
        prop_assume!(went.is_ok());
        drop(session);
        // What was said before a COPY was known to have begun may be answered in more ways than one: then the server is closed.
        let is_blind = !world.under_way.is_empty();
        for _ in 0..5 {
            if world.link.is_settled() && world.to_server.is_empty() {
                if !world.link.is_doubtful() {
                    break;
                }
                world.link.resync(&mut world.to_server);
                let went = world.server_works(None, 9);
                if went.is_err() && is_blind {
                    return Ok(());
                }
                prop_assert!(went.is_ok(), "{:?}", went);
                continue;
            }
            if !world.link.abandon(&mut world.to_server) || world.server_works(None, 9).is_err() {
                return Ok(());
            }
        }
        prop_assert!(world.link.is_settled() && !world.link.is_doubtful(), "{:?} {:?}", world.link, world.server);
        prop_assert!(world.server.is_settled(), "{:?}", world.server);
    }
}
