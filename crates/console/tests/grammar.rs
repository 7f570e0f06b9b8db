// SPDX-License-Identifier: Apache-2.0
//! The grammar of the console, as tables of what is accepted and refused.

use proptest::prelude::*;
use underpass_console::Access::{Admin, Stats};
use underpass_console::error::MESSAGE_BYTES_MAX;
use underpass_console::session::session_parameter;
use underpass_console::{Access, Command, ConsoleError, Show, ShutdownMode, parse};

fn ok(query: &str) -> Command {
    parse(query.as_bytes(), Admin).unwrap_or_else(|error| panic!("{query:?}: {error}"))
}

fn refused(query: &str, access: Access) -> String {
    parse(query.as_bytes(), access).expect_err(query).to_string()
}

fn invalid(query: &str) -> String {
    format!("invalid command '{query}', use SHOW HELP;")
}

#[test]
fn every_show_in_every_spelling() {
    for show in Show::ALL {
        let name = show.name();
        for query in [
            format!("SHOW {name}"),
            format!("show {};", name.to_lowercase()),
            format!("\n\tSeLeCt\r\n{name} ; "),
            format!("\"show\" \"{name}\""),
        ] {
            assert_eq!(ok(&query), Command::Show(show), "{query}");
        }
    }
}

#[test]
fn control_commands() {
    let db = || Some("db".to_owned());
    let cases = [
        ("RELOAD", Command::Reload),
        ("pause", Command::Pause(None)),
        ("PAUSE db;", Command::Pause(db())),
        ("resume", Command::Resume(None)),
        ("RESUME db", Command::Resume(db())),
        ("suspend ;", Command::Suspend),
        ("DISABLE db", Command::Disable("db".to_owned())),
        ("enable \"db\"", Command::Enable("db".to_owned())),
        ("RECONNECT", Command::Reconnect(None)),
        ("reconnect db", Command::Reconnect(db())),
        ("KILL", Command::Kill(None)),
        ("kill db", Command::Kill(db())),
        ("KILL_CLIENT 17", Command::KillClient(17)),
        ("kill_client \"17\"", Command::KillClient(17)),
        ("WAIT_CLOSE", Command::WaitClose(None)),
        ("wait_close db", Command::WaitClose(db())),
        ("SHUTDOWN", Command::Shutdown(ShutdownMode::Immediate)),
        ("shutdown wait_for_servers;", Command::Shutdown(ShutdownMode::WaitForServers)),
        ("SHUTDOWN WAIT_FOR_CLIENTS", Command::Shutdown(ShutdownMode::WaitForClients)),
        ("", Command::Empty),
        (" \t\r\n", Command::Empty),
        (";", Command::Empty),
    ];
    for (query, command) in cases {
        assert_eq!(ok(query), command, "{query}");
    }
}

#[test]
fn mirrors_are_switched_by_three_words() {
    assert_eq!(ok("ENABLE MIRROR next"), Command::EnableMirror("next".to_owned()));
    assert_eq!(ok("disable mirror \"my next\";"), Command::DisableMirror("my next".to_owned()));
    assert_eq!(ok("DISABLE MIRROR next").tag().unwrap(), "DISABLE");
    // A database may have this name.
    assert_eq!(ok("DISABLE mirror"), Command::Disable("mirror".to_owned()));
    assert_eq!(refused("ENABLE MIRROR next", Stats), "admin access needed");
    for query in ["PAUSE MIRROR next", "ENABLE mirror next more", "ENABLE \"mirror\" next", "ENABLE x next"] {
        assert!(refused(query, Admin).starts_with("invalid command"), "{query}");
    }
}

#[test]
fn names_keep_case_and_quotes() {
    for (query, name) in [
        ("PAUSE MixedCase", "MixedCase"),
        ("PAUSE \"my-db\"", "my-db"),
        ("PAUSE \"a\"\"b\"", "a\"b"),
        ("PAUSE \"a b;c\";", "a b;c"),
        ("PAUSE \"å\"", "å"),
        // Not the same as PAUSE of everything: nobody asked for that.
        ("PAUSE \"\"", ""),
    ] {
        assert_eq!(ok(query), Command::Pause(Some(name.to_owned())), "{query}");
    }
}

#[test]
fn set_with_and_without_quotes() {
    for (query, key, value) in [
        ("SET pool_mode = transaction", "pool_mode", "transaction"),
        ("set pool_mode=transaction;", "pool_mode", "transaction"),
        ("SET pool_mode TO 'transaction'", "pool_mode", "transaction"),
        ("SET \"pool_mode\" to\n'session' ;", "pool_mode", "session"),
        ("SET server_idle_timeout='0.5'", "server_idle_timeout", "0.5"),
        ("SET server_check_query = 'select ''x'''", "server_check_query", "select 'x'"),
        ("SET logfile = \"a\"\"b\"", "logfile", "a\"b"),
        ("SET ignore_startup_parameters = ''", "ignore_startup_parameters", ""),
    ] {
        let expected = Command::Set { key: key.to_owned(), value: value.to_owned() };
        assert_eq!(ok(query), expected, "{query}");
        assert_eq!(expected.tag().unwrap(), format!("SET {key}={value}"));
        assert_eq!(refused(query, Stats), "admin access needed");
    }
}

#[test]
fn what_drivers_send() {
    for access in [Admin, Stats] {
        let parse = |query: &str| parse(query.as_bytes(), access).unwrap();
        let parameter = |name| session_parameter(name).unwrap();
        assert_eq!(parse("SET DateStyle TO 'ISO'"), Command::SetIgnored(parameter("datestyle")));
        assert_eq!(
            parse("set client_encoding to 'UNICODE'"),
            Command::SetIgnored(parameter("client_encoding"))
        );
        assert_eq!(parse("SET extra_float_digits = 3"), Command::SetIgnored(parameter("extra_float_digits")));
        let show = parse("SHOW transaction_read_only");
        assert_eq!(show, Command::ShowParameter(parameter("transaction_read_only")));
        assert_eq!(show.tag().unwrap(), "SHOW");
    }
}

#[test]
fn not_in_the_grammar() {
    for query in [
        "SHOW",
        "SHOW nothing",
        "SHOW STATS;;",
        "SHOW STATS; SHOW POOLS",
        "SHOW STATS POOLS",
        "SHOW-STATS",
        "show\"stats\"",
        "SHOW \"stats",
        "SHOW 'stats'",
        "SHOW \"\"",
        "-- ping",
        "select 1+1",
        "select pg_catalog.version()",
        "BEGIN",
        "RELOAD db",
        "SUSPEND db",
        "SHUTDOWN now",
        "PAUSE my-db",
        "SET",
        "SET x",
        "SET x =",
        "SET x = y z",
        "SET x 'y'",
        "SET x = = y",
        "SET x = 'y",
        "SET x = 0.5",
        "\"SET\" x = y",
        "SET x \"to\" y",
        "SET 'x' = y",
        "SET LOCAL x = y",
    ] {
        assert_eq!(refused(query, Admin), invalid(query));
    }
}

#[test]
fn lengths_are_bounded() {
    let word = |length| "x".repeat(length);
    assert_eq!(refused(&word(15), Admin), invalid(&word(15)));
    assert_eq!(refused(&word(16), Admin), "bad arguments");
    assert_eq!(ok(&format!("PAUSE {}", word(63))), Command::Pause(Some(word(63))));
    assert_eq!(refused(&format!("PAUSE {}", word(64)), Admin), "bad arguments");
    assert!(matches!(ok(&format!("SET k = '{}'", word(255))), Command::Set { .. }));
    assert_eq!(refused(&format!("SET k = '{}'", word(256)), Admin), "bad arguments");
    assert_eq!(refused(&format!("SET {} = v", word(64)), Admin), "bad arguments");
    assert_eq!(refused("SET \"\" = v", Admin), "bad arguments");
    let padded = |blanks| format!("RELOAD{}", " ".repeat(blanks));
    assert_eq!(ok(&padded(4090)), Command::Reload);
    assert!(parse(padded(4091).as_bytes(), Admin).is_err());
}

#[test]
fn error_texts_fit_a_message_whatever_comes() {
    for query in
        [vec![b'-'; 100_000], vec![0xff; 100_000], "-å".repeat(5_000).into_bytes(), b"SHOW \xff".to_vec()]
    {
        let error = parse(&query, Admin).unwrap_err();
        assert!(matches!(error, ConsoleError::InvalidCommand(_)));
        let text = error.to_string();
        assert!(text.len() <= MESSAGE_BYTES_MAX && text.ends_with("', use SHOW HELP;"), "{}", text.len());
    }
}

#[test]
fn a_stats_user_may_look_and_not_act() {
    for show in Show::ALL {
        let query = format!("SHOW {}", show.name());
        let answer = parse(query.as_bytes(), Stats);
        match show {
            Show::Fds => assert_eq!(answer, Err(ConsoleError::AdminAccessNeeded)),
            _ => assert_eq!(answer, Ok(Command::Show(show))),
        }
    }
    for query in [
        "RELOAD",
        "PAUSE",
        "PAUSE db",
        "RESUME",
        "SUSPEND",
        "DISABLE",
        "DISABLE db",
        "ENABLE db",
        "RECONNECT",
        "KILL",
        "KILL_CLIENT x",
        "WAIT_CLOSE",
        "SHUTDOWN",
        "SHUTDOWN WAIT_FOR_CLIENTS",
    ] {
        assert_eq!(refused(query, Stats), "admin access needed", "{query}");
    }
    // As in PgBouncer, a wrong argument is told before the missing permission.
    assert_eq!(refused("RELOAD db", Stats), invalid("RELOAD db"));
}

#[test]
fn arguments_that_are_missing_or_wrong() {
    assert_eq!(refused("DISABLE", Admin), "a database is required");
    assert_eq!(refused("ENABLE;", Admin), "a database is required");
    for id in ["", "abc", "12abc", "18446744073709551616"] {
        assert_eq!(refused(&format!("KILL_CLIENT {id}"), Admin), "invalid client pointer supplied");
    }
}

#[test]
fn tags_are_the_command_words() {
    for (query, tag) in [
        ("SHOW STATS", "SHOW"),
        ("SELECT STATS", "SHOW"),
        ("SET timezone = x", "SET"),
        ("RELOAD", "RELOAD"),
        ("PAUSE", "PAUSE"),
        ("RESUME", "RESUME"),
        ("SUSPEND", "SUSPEND"),
        ("DISABLE x", "DISABLE"),
        ("ENABLE x", "ENABLE"),
        ("RECONNECT", "RECONNECT"),
        ("KILL", "KILL"),
        ("KILL_CLIENT 1", "KILL_CLIENT"),
        ("WAIT_CLOSE", "WAIT_CLOSE"),
        ("SHUTDOWN", "SHUTDOWN"),
    ] {
        assert_eq!(ok(query).tag().unwrap(), tag);
    }
    assert_eq!(ok(";").tag(), None);
}

proptest! {
    #[test]
    fn any_bytes_get_an_answer(query in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse(&query, Admin);
    }

    #[test]
    fn any_words_of_the_grammar_get_an_answer(query in "(show|set|pause|kill|=|to|'x'|\"y\"|;| |;|x|''|\"\"){0,8}") {
        let _ = parse(query.as_bytes(), Admin);
    }

    #[test]
    fn a_quoted_name_comes_back(name in "\\PC{0,15}") {
        let query = format!("PAUSE \"{}\";", name.replace('"', "\"\""));
        prop_assert_eq!(parse(query.as_bytes(), Admin), Ok(Command::Pause(Some(name))));
    }
}
