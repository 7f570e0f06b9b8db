# SPDX-License-Identifier: Apache-2.0
"""Console: every SHOW with its columns and types, who may do what, the grammar, the error texts."""

import os
import re
import subprocess

from case import check, dropped, fails, same
from upkit import host, pooler as poolers, wire

HERE = os.path.dirname(os.path.realpath(__file__))
TYPE_OIDS = {"text": 25, "int4": 23, "int8": 20, "numeric": 1700, "bytea": 17}


def read_tsv(name):
    """Rows of a data file beside this one."""
    with open(os.path.join(HERE, name), encoding="utf-8") as lines:
        return [line.rstrip("\n").split("\t") for line in lines if line.strip() and not line.startswith("#")]


def columns_of(command):
    """Expected (column, type OID) of a SHOW."""
    return [(column, TYPE_OIDS[kind]) for name, column, kind in read_tsv("show_columns.tsv") if name == command]


def register_show(command):
    @check(f"show/{command.lower()}/columns")
    def columns(t):
        p = t.pooler()
        with t.connect(p) as client:
            client.query("SELECT 1")
            # FDS hands over descriptors and is for the same user on the unix socket only.
            admin = t.keep(unix_admin(p)) if command == "FDS" else t.keep(p.admin())
            if command == "FDS":
                admin = admin.columns("SHOW FDS")
                same(admin, [name for name, _ in columns_of("FDS")], "columns of SHOW FDS")
                return
            same(admin.query(f"SHOW {command}")[-1].columns, columns_of(command), f"columns of SHOW {command}")


@check("show/fds/rows")
def fds_rows(t):
    # Listening sockets first; neither the console's own connection, nor one that logs in, nor TLS is listed.
    p = t.tx({"server_tls_sslmode": "disable"})
    with t.connect(p) as client, t.connect(p, handshake=False):
        client.query("BEGIN")
        rows = [line.split("\t") for line in unix_admin(p).run("SHOW FDS", "-A", "-t", "-F", "\t").splitlines()]
    shown = [(task, user, database) for _, task, user, database, *_ in rows]
    same(shown, [("pooler", "", ""), ("pooler", "", ""), ("client", "bob", "p0"), ("server", "bob", "p0")], "rows")
    same(sorted(row[4:6] for row in rows[:2]), [["127.0.0.1", str(p.port)], ["unix", str(p.port)]], "listening")
    same(len({row[0] for row in rows}), 4, "different descriptors")


@check("console/errors-in-log")
def errors_in_log(t):
    # Two lines each, of which log_pooler_errors switches the second.
    p = t.pooler()
    admin, stats = t.keep(p.admin()), t.keep(p.admin(user="stats"))
    for text, conn, sql in ((r"invalid command 'SHOW NOSUCH', use SHOW HELP;", admin, "SHOW NOSUCH"),
                            ("no such database: nosuch", admin, "PAUSE nosuch"), ("SET failed", admin, "SET nosuch=1"),
                            ("pooler is not paused/suspended", admin, "RESUME"), ("admin access needed", stats, "PAUSE")):
        fails(re.escape(text), conn.query, sql)
        user = "admin" if conn is admin else "stats"
        p.wait_log(f" ERROR {re.escape(text)}\n.* WARNING C-\\S+ pgbouncer/{user}@\\S+ pooler error: {re.escape(text)}\n")
    admin.query("SET log_pooler_errors = 0")
    fails("a database is required", admin.query, "DISABLE")
    p.wait_log(" ERROR a database is required\n")
    assert "pooler error: a database" not in p.log(), p.log()[-500:]


class PsqlAdmin:
    """psql as the pooler's own user: the login by peer UID."""

    def __init__(self, p):
        self.p = p

    def run(self, sql, *options):
        """Standard output of psql; AssertionError when it fails."""
        done = subprocess.run([host.pg_bin("psql"), "-X", "-h", self.p.directory, "-p", str(self.p.port),
                               "-U", "pgbouncer", "-d", "pgbouncer", *options, "-c", sql], check=False,
                              capture_output=True, text=True, cwd="/tmp", **host.run_as(host.service_user()))
        if done.returncode:
            raise AssertionError(done.stderr)
        return done.stdout

    def columns(self, sql):
        """Column names of a command."""
        return self.run(sql, "-A", "-F", "\t").splitlines()[0].split("\t")

    def close(self):
        """Nothing is kept open."""


def unix_admin(p):
    """Console as user pgbouncer with the pooler's UID."""
    return PsqlAdmin(p)


for _command in dict.fromkeys(row[0] for row in read_tsv("show_columns.tsv")):
    register_show(_command)


@check("show/config/keys")
def show_config_keys(t):
    shown = [row["key"] for row in t.pooler().admin("SHOW CONFIG")]
    missing = [row[0] for row in read_tsv("config_keys.tsv") if row[0] not in shown]
    same(missing, [], "keys that SHOW CONFIG lacks")


@check("show/config/defaults")
def show_config_defaults(t):
    expected = {row[0]: (None if row[1] == "NULL" else row[1]) for row in read_tsv("config_keys.tsv")}
    shown = {row["key"]: row["default"] for row in t.pooler().admin("SHOW CONFIG")}
    wrong = {key: (shown[key], expected[key]) for key in shown.keys() & expected.keys() if shown[key] != expected[key]}
    same(wrong, {}, "defaults as (shown, expected)")


@check("show/config/changeable")
def show_config_changeable(t):
    expected = {row[0]: row[2] for row in read_tsv("config_keys.tsv")}
    shown = {row["key"]: row["changeable"] for row in t.pooler().admin("SHOW CONFIG")}
    same({k: shown[k] for k in shown.keys() & expected.keys() if shown[k] != expected[k]}, {}, "changeable differs")


@check("show/config/values")
def show_config_values(t):
    p = t.pooler({"default_pool_size": 7, "query_timeout": "2.5", "server_reset_query": "DISCARD TEMP"})
    shown = {row["key"]: row["value"] for row in p.admin("SHOW CONFIG")}
    same((shown["default_pool_size"], shown["query_timeout"], shown["server_reset_query"], shown["auth_type"]),
         ("7", "2.5", "DISCARD TEMP", "trust"))


@check("show/version/equals-command-line")
def show_version(t):
    p = t.pooler()
    argv = poolers.command(t.which)
    line = subprocess.run([*argv, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    same(p.admin("SHOW VERSION")[0]["version"], line)


@check("show/select-is-an-alias")
def select_alias(t):
    with t.pooler().admin() as admin:
        same(admin.rows("SELECT version"), admin.rows("SHOW VERSION"))
        same(admin.query("SELECT version")[-1].tag, "SHOW")


@check("show/lists/rows")
def show_lists(t):
    rows = [row["list"] for row in t.pooler().admin("SHOW LISTS")]
    same(rows, ["databases", "users", "peers", "pools", "peer_pools", "free_clients", "used_clients",
                "login_clients", "free_servers", "used_servers", "dns_names", "dns_zones", "dns_queries",
                "dns_pending"])


@check("show/lists/counts")
def show_lists_counts(t):
    p = t.pooler()
    with t.connect(p) as client:
        client.query("SELECT 1")
        lists = {row["list"]: int(row["items"]) for row in p.admin("SHOW LISTS")}
        # p0, p1 and the console's own database
        same((lists["databases"], lists["used_servers"], lists["used_clients"] >= 2), (3, 1, True))


@check("show/state/rows")
def show_state(t):
    with t.pooler().admin() as admin:
        same(admin.rows("SHOW STATE"), [["active", "yes"], ["paused", "no"], ["suspended", "no"]])
        admin.query("PAUSE")
        same(admin.rows("SHOW STATE"), [["active", "no"], ["paused", "yes"], ["suspended", "no"]])


@check("show/totals/rows")
def show_totals(t):
    rows = [row["name"] for row in t.pooler().admin("SHOW TOTALS")]
    names = ["server_assignment_count", "xact_count", "query_count", "client_bytes", "server_bytes", "xact_time",
             "query_time", "wait_time"]
    for prefix in ("total_", "avg_"):
        missing = [prefix + name for name in names if prefix + name not in rows]
        same(missing, [], "rows that SHOW TOTALS lacks")


@check("show/mem/rows")
def show_mem(t):
    rows = {row["name"] for row in t.pooler().admin("SHOW MEM")}
    assert {"user_cache", "db_cache", "pool_cache", "client_cache", "server_cache"} <= rows, rows


@check("show/help/notice")
def show_help(t):
    with t.pooler().admin() as admin:
        admin.query("SHOW HELP")
        notice = admin.notices[-1]
        same((notice["severity"], notice["sqlstate"], notice["message"]), ("NOTICE", "00000", "Console usage"))
        for word in ("SHOW HELP|CONFIG|DATABASES", "RELOAD", "PAUSE [<db>]", "RESUME [<db>]", "DISABLE <db>",
                     "ENABLE <db>", "RECONNECT [<db>]", "KILL", "SUSPEND", "SHUTDOWN", "SET key = arg"):
            assert word in notice["detail"], f"{word} not in {notice['detail']}"


@check("show/databases/row")
def show_databases(t):
    p = t.pooler({"default_pool_size": 9},
                 databases={"p0": t.target("p1", pool_size=3, pool_mode="statement"), "f": t.target(user="bob")})
    rows = {row["name"]: row for row in p.admin("SHOW DATABASES")}
    p0 = rows["p0"]
    same((p0["host"], p0["port"], p0["database"], p0["force_user"], p0["pool_size"], p0["pool_mode"], p0["paused"],
          p0["disabled"], p0["current_connections"]),
         ("127.0.0.1", str(t.pg.port), "p1", None, "3", "statement", "0", "0", "0"))
    same((rows["f"]["force_user"], rows["f"]["pool_size"], rows["f"]["pool_mode"]), ("bob", "9", None))
    same((rows["pgbouncer"]["force_user"], rows["pgbouncer"]["pool_mode"]), ("pgbouncer", "statement"))


@check("show/pools/counts")
def show_pools(t):
    p = t.tx()
    idle, busy = t.connect(p), t.connect(p)
    idle.query("SELECT 1")
    # An answer may reach its client a moment before the server is free.
    host.wait_until(lambda: p.pool()["sv_idle"] == "1", what="the server is idle")
    busy.query("BEGIN")
    row = p.pool()
    same({k: row[k] for k in ("cl_active", "cl_waiting", "sv_active", "sv_idle", "sv_used", "sv_login", "pool_mode")},
         {"cl_active": "2", "cl_waiting": "0", "sv_active": "1", "sv_idle": "0", "sv_used": "0", "sv_login": "0",
          "pool_mode": "transaction"})
    busy.query("COMMIT")
    host.wait_until(lambda: (p.pool()["sv_active"], p.pool()["sv_idle"]) == ("0", "1"), what="the server is idle again")


@check("show/clients/row")
def show_clients(t):
    p = t.pooler()
    client = t.connect(p, params={"application_name": "my app"})
    client.query("SELECT 1")
    row, = [row for row in p.admin("SHOW CLIENTS") if row["database"] == "p0"]
    same((row["type"], row["user"], row["state"], row["addr"], row["local_addr"], row["local_port"], row["wait"],
          row["application_name"], row["tls"]),
         ("C", "bob", "active", "127.0.0.1", "127.0.0.1", str(p.port), "0", "my app", ""))
    same(int(row["port"]), client.sock.getsockname()[1])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S+", row["connect_time"]), row["connect_time"]
    server, = p.admin("SHOW SERVERS")
    same((row["link"], server["link"]), (server["ptr"], row["ptr"]), "link columns")


@check("show/servers/row")
def show_servers(t):
    p = t.pooler()
    client = t.connect(p)
    pid = client.one("SELECT pg_backend_pid()")
    row, = p.admin("SHOW SERVERS")
    same((row["type"], row["user"], row["database"], row["state"], row["addr"], row["port"], row["remote_pid"],
          row["close_needed"]), ("S", "bob", "p0", "active", "127.0.0.1", str(t.pg.port), pid, "0"))
    client.close()
    host.wait_until(lambda: p.admin("SHOW SERVERS")[0]["state"] == "idle", what="server idle")


@check("show/clients/waiting")
def show_clients_waiting(t):
    p = t.tx({"default_pool_size": 1})
    holder, waiter = t.connect(p), t.connect(p)
    holder.query("BEGIN")
    call = t.background(waiter.query, "SELECT 1")
    assert call.blocked()
    states = sorted(row["state"] for row in p.admin("SHOW CLIENTS") if row["database"] == "p0")
    same((states, p.pool()["cl_waiting"]), (["active", "waiting"], "1"))
    holder.query("COMMIT")
    call.result()


@check("show/stats/counts")
def show_stats(t):
    p = t.tx()
    with t.connect(p) as client:
        for _ in range(3):
            client.query("SELECT 1")
        client.query("BEGIN")
        client.query("SELECT 1")
        client.query("COMMIT")
    totals, = [row for row in p.admin("SHOW STATS_TOTALS") if row["database"] == "p0"]
    same((totals["xact_count"], totals["query_count"]), ("4", "6"))
    assert int(totals["bytes_received"]) > 0 and int(totals["bytes_sent"]) > 0, totals
    row, = [row for row in p.admin("SHOW STATS") if row["database"] == "p0"]
    same((row["total_xact_count"], row["total_query_count"]), ("4", "6"))


@check("show/users/row")
def show_users(t):
    p = t.pooler(users={"bob": "pool_mode=transaction max_user_connections=7"})
    rows = {row["name"]: row for row in p.admin("SHOW USERS")}
    same(rows["bob"]["pool_mode"], "transaction")
    same(rows["bob"]["max_user_connections"], "7")
    same(rows["alice"]["pool_mode"], None)


@check("show/peers/row")
def show_peers(t):
    p = t.pooler({"peer_id": 1}, extra_sections={"peers": {"2": "host=127.0.0.1 port=6433 pool_size=3"}})
    same(p.admin("SHOW PEERS"), [{"peer_id": "2", "host": "127.0.0.1", "port": "6433", "pool_size": "3"}])


# --- grammar and texts


@check("console/case-and-semicolon")
def console_case(t):
    with t.pooler().admin() as admin:
        for sql in ("show version", "SHOW VERSION;", "  Show   Version  ; ", "SHOW\nVERSION"):
            same(len(admin.rows(sql)), 1, sql)


@check("console/unknown-command")
def console_unknown(t):
    with t.pooler().admin() as admin:
        for sql in ("HELLO", "SHOW NOTHING", "SHOW", "INSERT INTO x VALUES (1)"):
            fails("invalid command '.*', use SHOW HELP;", admin.query, sql)
        same(len(admin.rows("SHOW VERSION")), 1, "console goes on after an error")


@check("console/extended-protocol-refused")
def console_extended(t):
    with t.pooler().admin() as admin:
        admin.send_raw(wire.parse("", "SHOW VERSION") + wire.message("S"))
        # Either an error per message or the end of the connection, but in both cases this text.
        seen = []
        try:
            while not seen or seen[-1][0] != "E":
                seen.append(admin.recv())
        except wire.Closed as error:
            raise AssertionError("closed without an error") from error
        assert "extended query protocol not supported by admin console" in wire.parse_fields(seen[-1][1])["message"]


@check("console/fake-set-and-show")
def console_fake(t):
    # Drivers set these when they connect, whatever they connect to.
    with t.pooler().admin() as admin:
        same(admin.query("SET client_encoding = 'UTF8'")[-1].tag, "SET")
        same(admin.notices[-1]["message"], "SET ignored")
        for name in ("client_encoding", "standard_conforming_strings", "datestyle", "timezone",
                     "default_transaction_isolation"):
            same(len(admin.rows(f"SHOW {name}")), 1, name)


@check("console/server-version")
def console_server_version(t):
    with t.pooler().admin() as admin:
        assert re.fullmatch(r"[\d.]+\S*/bouncer", admin.parameters["server_version"]), admin.parameters
        same(admin.parameters["client_encoding"], "UTF8")


@check("console/stats-user")
def console_stats_user(t):
    with t.pooler().admin(user="stats") as stats:
        for command in ("STATS", "POOLS", "CLIENTS", "SERVERS", "CONFIG", "DATABASES", "LISTS", "VERSION"):
            stats.query(f"SHOW {command}")
        for sql in ("RELOAD", "PAUSE", "RESUME", "SUSPEND", "SHUTDOWN", "SET verbose=1", "KILL p0", "DISABLE p0",
                    "ENABLE p0", "RECONNECT", "SHOW FDS", "WAIT_CLOSE"):
            fails("admin access needed", stats.query, sql)


@check("console/other-user-refused")
def console_other_user(t):
    p = t.pooler()
    fails("not allowed", p.connect, "bob", "pgbouncer")


@check("console/peer-uid-login")
def console_peer_uid(t):
    p = t.pooler({"auth_type": "scram-sha-256", "admin_users": None, "stats_users": None})
    assert "bob" in PsqlAdmin(p).run("SHOW USERS", "-At")
    p.wait_log("pgbouncer access from unix socket")


@check("console/peer-uid-mismatch")
def console_peer_uid_mismatch(t):
    if host.service_user() is None:
        # Without root the checks run as the pooler's own user: the login must then work.
        assert "bob" in PsqlAdmin(t.pooler()).run("SHOW USERS", "-At")
        return
    p = t.pooler({"auth_type": "scram-sha-256"})
    fails("", p.connect, "pgbouncer", "pgbouncer", unix=True, password="x")


@check("console/console-user-in-auth-type-any")
def console_any(t):
    p = t.pooler({"auth_type": "any"}, databases={"p0": t.target(user="bob")})
    with p.connect("admin", "pgbouncer") as admin:
        admin.query("RELOAD")


@check("console/terminate")
def console_terminate(t):
    admin = t.keep(t.pooler().admin())
    admin.send("X")
    dropped(None, admin)


@check("console/many-commands-on-one-connection")
def console_many(t):
    with t.pooler().admin() as admin:
        for _ in range(200):
            admin.query("SHOW POOLS")
