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
\tSHOW KERNEL
\tSET key = arg
\tRELOAD
\tPAUSE [<db>]
\tRESUME [<db>]
\tDISABLE <db>
\tENABLE <db>
\tRECONNECT [<db>]
\tKILL [<db>]
\tKILL_CLIENT <client_id>
\tSUSPEND
\tSHUTDOWN
\tSHUTDOWN WAIT_FOR_SERVERS|WAIT_FOR_CLIENTS
\tWAIT_CLOSE [<db>]";

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
    fn every_line_is_a_command() {
        for line in HELP_DETAIL.lines().filter(|line| !line.is_empty()) {
            let line = line.trim().replace("[<db>]", "x").replace("<db>", "x").replace("<client_id>", "7");
            let alternative = line.split('|').next().unwrap();
            parse(alternative.as_bytes(), Access::Admin).unwrap();
        }
    }
}
