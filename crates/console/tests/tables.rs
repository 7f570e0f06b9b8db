// SPDX-License-Identifier: Apache-2.0
//! Every SHOW: its columns against the list of PgBouncer 1.26, and a row of each kind written in full.

use underpass_console::rows::*;
use underpass_console::session::session_parameter;
use underpass_console::table::TableRow;
use underpass_console::{Averages, PoolStats, Show, Side, SocketId, Table, Timestamp, Zone};

/// Columns as RowDescription sends them: names, and types by a letter (s text, b bytea, i int4, q int8, N numeric).
const COLUMNS: &[(Show, &str, &str)] = &[
    (Show::Clients, SOCKET, "ssssssisissiiississii"),
    (Show::Servers, SOCKET, "ssssssisissiiississii"),
    (Show::Config, "key value default changeable", "ssss"),
    (
        Show::Databases,
        "name host port database force_user pool_size min_pool_size reserve_pool_size server_lifetime pool_mode \
         load_balance_hosts max_connections current_connections max_client_connections current_client_connections \
         paused disabled",
        "ssissiiiissiiiiii",
    ),
    (
        Show::Fds,
        "fd task user database addr port cancel link client_encoding std_strings datestyle timezone password \
         scram_client_key scram_server_key",
        "issssiqisssssbb",
    ),
    (Show::Help, "", ""),
    (Show::Lists, "list items", "si"),
    (Show::Peers, "peer_id host port pool_size", "isii"),
    (
        Show::PeerPools,
        "peer_id cl_active_cancel_req cl_waiting_cancel_req sv_active_cancel sv_login",
        "iiiii",
    ),
    (
        Show::Pools,
        "database user cl_active cl_waiting cl_active_cancel_req cl_waiting_cancel_req sv_active sv_active_cancel \
         sv_being_canceled sv_idle sv_used sv_tested sv_login maxwait maxwait_us pool_mode load_balance_hosts",
        "ssiiiiiiiiiiiiiss",
    ),
    (
        Show::Stats,
        "database total_server_assignment_count total_xact_count total_query_count total_received total_sent \
         total_xact_time total_query_time total_wait_time total_client_parse_count total_server_parse_count \
         total_bind_count total_client_login_count avg_server_assignment_count avg_xact_count avg_query_count \
         avg_recv avg_sent avg_xact_time avg_query_time avg_wait_time avg_client_parse_count \
         avg_server_parse_count avg_bind_count avg_client_login_count",
        "sNNNNNNNNNNNNNNNNNNNNNNNN",
    ),
    (
        Show::StatsTotals,
        "database server_assignment_count xact_count query_count bytes_received bytes_sent xact_time query_time \
         wait_time client_parse_count server_parse_count bind_count client_login_count",
        "sNNNNNNNNNNNN",
    ),
    (
        Show::StatsAverages,
        "database server_assignment_count xact_count query_count bytes_received bytes_sent xact_time query_time \
         wait_time avg_client_parse_count avg_server_parse_count avg_bind_count avg_client_login_count",
        "sNNNNNNNNNNNN",
    ),
    (
        Show::Users,
        "name pool_size reserve_pool_size pool_mode max_user_connections current_connections \
         max_user_client_connections current_client_connections",
        "ssssiiii",
    ),
    (Show::Version, "version", "s"),
    (Show::Totals, "name value", "sN"),
    (Show::Mem, "name size used free memtotal", "siiii"),
    (Show::DnsHosts, "hostname ttl addrs", "sqs"),
    (Show::DnsZones, "zonename serial count", "sqi"),
    (Show::State, "key value", "ss"),
    (Show::Kernel, "kind name item value unit", "sssNs"),
    (
        Show::Mirrors,
        "mirror database host port mode send state reason transactions executed queued queued_bytes filtered dropped \
         queue_full too_large not_ready disabled connection_lost session_lost session_state ring_full compared not_compared holds \
         held_us",
        "sssissssNNNNNNNNNNNNNNNNNN",
    ),
    (
        Show::MirrorDiff,
        "mirror database fingerprint query varies compared differing differences expected timed slower mean_here_us \
         mean_there_us ratio max_here_us max_there_us example",
        "sssssNNsNNNNNsNNs",
    ),
    (
        Show::Trace,
        "directory state reason level sessions missed records file_bytes queued_bytes seen_bytes lost_bytes",
        "ssssNNNNNNN",
    ),
];

const SOCKET: &str = "type user database replication state addr port local_addr local_port connect_time \
    request_time wait wait_us close_needed ptr link remote_pid tls application_name prepared_statements id";
const BUFFERS: &str = "recv_pos pkt_pos pkt_remain send_pos send_remain pkt_avail send_avail";

#[test]
fn columns_are_those_of_the_newest_pgbouncer() {
    let sockets = format!("{SOCKET} {BUFFERS}");
    let all = COLUMNS.iter().copied().chain(
        [Show::Sockets, Show::ActiveSockets]
            .map(|show| (show, sockets.as_str(), "ssssssisissiiississiiiiiiiii")),
    );
    let mut seen = Vec::new();
    for (show, names, types) in all {
        let columns: Vec<_> = show.columns().iter().map(|column| column.name).collect();
        assert_eq!(columns, names.split_whitespace().collect::<Vec<_>>(), "{show:?}");
        let oids: Vec<_> = show.columns().iter().map(|column| column.column_type.oid()).collect();
        let expected = types.chars().map(|letter| match letter {
            's' => 25,
            'b' => 17,
            'i' => 23,
            'q' => 20,
            'N' => 1700,
            other => panic!("{other}"),
        });
        assert_eq!(oids, expected.collect::<Vec<u32>>(), "{show:?}");
        seen.push(show);
    }
    assert!(Show::ALL.iter().all(|show| seen.contains(show)), "every SHOW is compared");
}

/// Writes one row and joins its cells with `|`, NULL being `~`.
fn one(show: Show, row: &impl TableRow) -> String {
    let mut table = Table::new(show.columns());
    table.push(row);
    join(&table).pop().unwrap()
}

fn join(table: &Table) -> Vec<String> {
    table.rows().map(|row| row.map(|cell| cell.unwrap_or("~")).collect::<Vec<_>>().join("|")).collect()
}

const CLIENT: SocketRow<'static> = SocketRow {
    id: SocketId::FIRST,
    state: SocketState::Client(ClientState::Waiting),
    user: Some("u"),
    database: Some("d"),
    replication: Replication::None,
    addr: "127.0.0.1",
    port: 5000,
    local_addr: "127.0.0.2",
    local_port: 6432,
    connect_time: Timestamp(1_795_294_481_000_000),
    request_time: Timestamp(1_795_294_482_999_999),
    wait_us: 2_000_003,
    close_needed: false,
    link: None,
    remote_pid: 0,
    tls: "",
    application_name: "psql",
    prepared_statements: 4,
};

#[test]
fn socket_rows() {
    assert_eq!(
        one(Show::Clients, &CLIENT),
        "C|u|d|none|waiting|127.0.0.1|5000|127.0.0.2|6432|2026-11-21 20:54:41 UTC|2026-11-21 20:54:42 UTC|2|3|0|\
         0x550000000010||0||psql|4|1"
    );
    let server = SocketRow {
        state: SocketState::Server(ServerState::Login),
        user: None,
        database: None,
        replication: Replication::Physical,
        close_needed: true,
        link: SocketId::new(2),
        remote_pid: 99,
        tls: "TLSv1.3/X",
        ..CLIENT
    };
    let text = one(Show::Servers, &server);
    assert!(text.starts_with("S|(nouser)|(nodb)|physical|new|"), "{text}");
    assert!(text.ends_with("|1|0x550000000010|0x550000000020|99|TLSv1.3/X|psql|4|1"), "{text}");
    let buffer =
        BufferState { recv_pos: 1, pkt_pos: 2, pkt_remain: 3, send_pos: 4, pkt_avail: 5, send_avail: 6 };
    let text = one(Show::Sockets, &SocketBuffersRow { socket: server, buffer });
    assert!(text.contains("|sv_login|") && text.ends_with("|1|1|2|3|4|0|5|6"), "{text}");
    assert!(buffer.is_active() && !BufferState { recv_pos: 9, ..BufferState::default() }.is_active());
}

#[test]
fn times_are_shown_in_the_zone_of_the_process() {
    let mut table = Table::in_zone(Show::Clients.columns(), Zone::new("CET", 3600));
    table.push(&CLIENT);
    assert!(join(&table)[0].contains("|2026-11-21 21:54:41 CET|"));
}

#[test]
fn pool_database_and_user_rows() {
    let counts = PoolCounts {
        cl_active: 1,
        cl_waiting: 2,
        cl_active_cancel_req: 3,
        cl_waiting_cancel_req: 4,
        sv_active: 5,
        sv_active_cancel: 6,
        sv_being_canceled: 7,
        sv_idle: 8,
        sv_used: 9,
        sv_tested: 10,
        sv_login: 11,
        maxwait_us: 12_000_013,
    };
    let pool = PoolRow {
        database: "d",
        user: "u",
        counts,
        pool_mode: "session",
        load_balance_hosts: Some("disable"),
    };
    assert_eq!(one(Show::Pools, &pool), "d|u|1|2|3|4|5|6|7|8|9|10|11|12|13|session|disable");
    let database = DatabaseRow {
        name: "n",
        port: 5432,
        database: Some("d"),
        pool_size: 1,
        min_pool_size: 2,
        reserve_pool_size: 3,
        server_lifetime: 4,
        max_connections: 5,
        current_connections: 6,
        max_client_connections: 7,
        current_client_connections: 8,
        disabled: true,
        ..DatabaseRow::default()
    };
    assert_eq!(one(Show::Databases, &database), "n|~|5432|d|~|1|2|3|4|~|~|5|6|7|8|0|1");
    let user = UserRow {
        name: "u",
        pool_size: Some(4),
        max_user_connections: 1,
        current_connections: 2,
        max_user_client_connections: 3,
        current_client_connections: 4,
        ..UserRow::default()
    };
    assert_eq!(one(Show::Users, &user), "u|4||~|1|2|3|4");
    let peer_pool = PeerPoolRow {
        peer_id: 1,
        cl_active_cancel_req: 2,
        cl_waiting_cancel_req: 3,
        sv_active_cancel: 4,
        sv_login: 5,
    };
    assert_eq!(one(Show::PeerPools, &peer_pool), "1|2|3|4|5");
}

#[test]
fn statistics_rows() {
    let totals = PoolStats {
        server_assignment_count: 1,
        xact_count: 2,
        query_count: 3,
        received: 4,
        sent: 5,
        xact_time: 6,
        query_time: 7,
        wait_time: 8,
        client_parse_count: 9,
        server_parse_count: 10,
        bind_count: 11,
        client_login_count: u64::MAX,
    };
    let row = StatsRow { database: "d", totals, averages: Averages::default() };
    let counted = "1|2|3|4|5|6|7|8|9|10|11|18446744073709551615";
    let zeros = "0|0|0|0|0|0|0|0|0|0|0|0";
    assert_eq!(one(Show::Stats, &row), format!("d|{counted}|{zeros}"));
    assert_eq!(one(Show::StatsTotals, &StatsTotalsRow(row)), format!("d|{counted}"));
    assert_eq!(one(Show::StatsAverages, &StatsAveragesRow(row)), format!("d|{zeros}"));
}

#[test]
fn rows_about_the_process() {
    let config = ConfigRow { key: "k", value: Some("v"), default: None, changeable: true };
    assert_eq!(one(Show::Config, &config), "k|v|~|yes");
    let peer = PeerRow { peer_id: 1, host: "h", port: 2, pool_size: 3 };
    assert_eq!(one(Show::Peers, &peer), "1|h|2|3");
    assert_eq!(one(Show::Version, &VersionRow("Underpass 1")), "Underpass 1");
    let mem = MemRow { name: mem_names::CLIENT, size: 608, used: 1, free: 49 };
    assert_eq!(one(Show::Mem, &mem), "client_cache|608|1|49|30400");
    let huge = MemRow { name: "x", size: u64::MAX, used: u64::MAX, free: 1 };
    assert_eq!(one(Show::Mem, &huge), "x|2147483647|2147483647|1|2147483647");
    assert_eq!(one(Show::DnsHosts, &DnsHostRow { hostname: "h", ttl_s: 9, addrs: "a,b" }), "h|9|a,b");
    assert_eq!(
        one(Show::DnsZones, &DnsZoneRow { zonename: "z", serial: u32::MAX, count: 2 }),
        "z|4294967295|2"
    );
    let mirror =
        MirrorRow { mirror: "m", port: 5433, dropped: [1, 2, 3, 0, 0, 0, 4, 0], ..MirrorRow::default() };
    assert_eq!(one(Show::Mirrors, &mirror), "m|||5433||||~|0|0|0|0|0|10|1|2|3|0|0|0|4|0|0|0|0|0");
    let diff = MirrorDiffRow { query: "select $1", ratio: 2.345, ..MirrorDiffRow::default() };
    assert_eq!(one(Show::MirrorDiff, &diff), "|||select $1||0|0||0|0|0|0|0|2.35|0|0|~");
    let lane = KernelRow { kind: KernelKind::Lane, name: "D", item: "xacts", value: 7, unit: "count" };
    assert_eq!(one(Show::Kernel, &lane), "lane|D|xacts|7|count");
    assert_eq!(join(&PauseState::Paused.table()), ["active|no", "paused|yes", "suspended|no"]);
    let lists = join(&Lists { databases: 1, dns_pending: 14, ..Lists::default() }.table());
    assert_eq!((lists.len(), lists[0].as_str(), lists[13].as_str()), (14, "databases|1", "dns_pending|14"));
}

#[test]
fn parameters_are_tables_of_one_cell() {
    let table = session_parameter("TimeZone").unwrap().table();
    assert_eq!((table.columns()[0].name, join(&table)), ("timezone", vec!["GMT".to_owned()]));
}

#[test]
fn rows_of_file_descriptors_keep_their_secrets_out_of_logs() {
    let row = FdRow {
        fd: 7,
        side: Some(Side::Client),
        addr: "unix",
        port: 6432,
        cancel: u64::MAX,
        password: Some("secret"),
        scram_client_key: Some(&[0, 255]),
        ..FdRow::default()
    };
    assert_eq!(one(Show::Fds, &row), "7|client|~|~|unix|6432|-1|0|~|~|~|~|secret|\\x00ff|~");
    assert_eq!(one(Show::Fds, &FdRow::default()), "0|pooler|~|~||0|0|0|~|~|~|~|~|~|~");
    assert!(!format!("{row:?}").contains("secret"));
}

#[test]
fn every_state_has_its_words() {
    use ClientState as C;
    use ServerState as S;
    let cases = [
        (SocketState::Client(C::Login), "login", "cl_login"),
        (SocketState::Client(C::Active), "active", "cl_active"),
        (SocketState::Client(C::Idle), "idle", "cl_active"),
        (SocketState::Client(C::Waiting), "waiting", "cl_waiting"),
        (SocketState::Client(C::ActiveCancelReq), "active_cancel_req", "cl_active_cancel_req"),
        (SocketState::Client(C::WaitingCancelReq), "waiting_cancel_req", "cl_waiting_cancel_req"),
        (SocketState::Server(S::Login), "new", "sv_login"),
        (SocketState::Server(S::Active), "active", "sv_active"),
        (SocketState::Server(S::Idle), "idle", "sv_idle"),
        (SocketState::Server(S::Used), "used", "sv_used"),
        (SocketState::Server(S::Tested), "tested", "sv_tested"),
        (SocketState::Server(S::ActiveCancel), "active_cancel", "sv_active_cancel"),
        (SocketState::Server(S::BeingCanceled), "being_canceled", "sv_being_canceled"),
    ];
    for (state, name, socket_name) in cases {
        assert_eq!((state.name(), state.socket_name()), (name, socket_name));
        let letter = if socket_name.starts_with("cl_") { 'C' } else { 'S' };
        assert_eq!(state.side().letter(), letter);
    }
}
