// SPDX-License-Identifier: Apache-2.0
//! The notice of SHOW HELP.

/// Message (field `M`) of the notice.
pub const HELP_MESSAGE: &str = "Console usage";

/// Detail (field `D`) of the notice: severity NOTICE, SQLSTATE 00000.
pub const HELP_DETAIL: &str = "
\tSHOW HELP|CONFIG|DATABASES|POOLS|CLIENTS|SERVERS|USERS|VERSION
\tSHOW PEERS|PEER_POOLS
\tSHOW FDS|SOCKETS|ACTIVE_SOCKETS|LISTS|MEM|STATE
\tSHOW DNS_HOSTS|DNS_ZONES
\tSHOW STATS|STATS_TOTALS|STATS_AVERAGES|TOTALS
\tSHOW KERNEL|MIRRORS|MIRROR_DIFF|TRACE
\tSET key = arg
\tRELOAD
\tPAUSE [<db>]
\tRESUME [<db>]
\tDISABLE <db>
\tENABLE <db>
\tDISABLE MIRROR <mirror>
\tENABLE MIRROR <mirror>
\tRECONNECT [<db>]
\tKILL [<db>]
\tKILL_CLIENT <client_id>
\tSUSPEND
\tSHUTDOWN
\tSHUTDOWN WAIT_FOR_SERVERS|WAIT_FOR_CLIENTS
\tWAIT_CLOSE [<db>]";

/// The commands that act, for the manual: how they are written, and what they do.
pub const CONTROL_COMMANDS: &[(&str, &str)] = &[
    (
        "PAUSE [<db>]",
        "Lets running transactions (in session pooling: sessions) end, closes the server connections and answers when \
         that is done. Clients wait meanwhile. Of one database or of all.",
    ),
    ("RESUME [<db>]", "Ends PAUSE, KILL or SUSPEND."),
    ("DISABLE <db>", "Refuses new clients of the database. Those that are connected go on."),
    ("ENABLE <db>", "Ends DISABLE."),
    (
        "DISABLE MIRROR <mirror>",
        "Sends nothing more to the mirror, and drops what waits for it. Of all databases.",
    ),
    (
        "ENABLE MIRROR <mirror>",
        "Ends DISABLE MIRROR, with SHOW MIRROR_DIFF empty then, and takes a mirror back that was switched off.",
    ),
    (
        "RECONNECT [<db>]",
        "Closes every server connection when it is released, so that new ones are made: after a failover or a \
         change of DNS.",
    ),
    (
        "KILL [<db>]",
        "Drops all clients and servers of the database at once, or of all databases, and leaves it paused.",
    ),
    ("KILL_CLIENT <client_id>", "Drops one client, by the `id` of `SHOW CLIENTS`."),
    ("SUSPEND", "Flushes all buffers and stops reading. Answers when nothing is left in them."),
    ("SHUTDOWN", "Ends the process at once, without an answer. As SIGQUIT."),
    (
        "SHUTDOWN WAIT_FOR_SERVERS",
        "Takes no new clients, releases servers at the end of their transactions (in session pooling and replication: when \
         their clients leave), then ends. As SIGINT.",
    ),
    (
        "SHUTDOWN WAIT_FOR_CLIENTS",
        "Takes no new clients and ends when the last has left. What is paused stays so. As SIGTERM.",
    ),
    ("WAIT_CLOSE [<db>]", "Answers when the server connections that RECONNECT or RELOAD gave up are closed."),
    (
        "RELOAD",
        "Reads the configuration files again. With an error in them the old configuration stays. As SIGHUP.",
    ),
    (
        "SET key = arg",
        "Changes a key until the next RELOAD. A value that is not a plain word goes in single quotes, a key with a dot in double ones.",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::{Access, parse};
    use crate::show::Show;

    #[test]
    fn every_show_is_listed() {
        let listed: Vec<_> = HELP_DETAIL
            .lines()
            .filter_map(|line| line.trim().strip_prefix("SHOW "))
            .flat_map(|names| names.split('|'))
            .collect();
        for show in Show::ALL {
            assert_eq!(listed.iter().filter(|name| **name == show.name()).count(), 1, "{show:?}");
        }
        assert_eq!(listed.len(), Show::ALL.len());
    }

    #[test]
    fn the_notice_and_the_manual_list_the_same_commands() {
        let notice =
            HELP_DETAIL.replace("SHUTDOWN WAIT_FOR_SERVERS|", "SHUTDOWN WAIT_FOR_SERVERS\n\tSHUTDOWN ");
        let mut acting: Vec<_> = notice
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty() && !line.starts_with("SHOW "))
            .collect();
        let mut manual: Vec<_> = CONTROL_COMMANDS.iter().map(|(usage, _)| *usage).collect();
        acting.sort_unstable();
        manual.sort_unstable();
        assert_eq!(acting, manual);
    }

    #[test]
    fn every_line_is_a_command() {
        for line in HELP_DETAIL.lines().filter(|line| !line.is_empty()) {
            let line = line
                .trim()
                .replace("[<db>]", "x")
                .replace("<db>", "x")
                .replace("<client_id>", "7")
                .replace("<mirror>", "m");
            let alternative = line.split('|').next().unwrap();
            parse(alternative.as_bytes(), Access::Admin).unwrap();
        }
    }
}
