# SPDX-License-Identifier: Apache-2.0
"""Control commands of the console: PAUSE, RESUME, KILL, RECONNECT, DISABLE, SET, RELOAD, SHUTDOWN and others."""

import contextlib
import os
import re
import time

from case import JANITOR_S, backend_pid, check, dropped, fails, same
from upkit import host, wire


@check("pause/waits-for-transaction")
def pause_waits(t):
    p = t.tx()
    client, admin = t.connect(p), t.keep(p.admin())
    client.query("BEGIN")
    call = t.background(admin.query, "PAUSE")
    assert call.blocked(), "PAUSE returned while a transaction was open"
    client.query("SELECT 1")
    client.query("COMMIT")
    same(call.result()[-1].tag, "PAUSE")


@check("pause/waits-for-session")
def pause_waits_session(t):
    p = t.pooler()
    client, admin = t.connect(p), t.keep(p.admin())
    client.query("SELECT 1")
    call = t.background(admin.query, "PAUSE")
    assert call.blocked(), "PAUSE returned while a session held its server"
    client.close()
    call.result()


@check("pause/blocks-queries-until-resume")
def pause_blocks(t):
    p = t.tx()
    client, admin = t.connect(p), t.keep(p.admin())
    pid = backend_pid(client)
    admin.query("PAUSE")
    call = t.background(client.one, "SELECT pg_backend_pid()")
    assert call.blocked(), "a query ran while paused"
    same(admin.query("RESUME")[-1].tag, "RESUME")
    assert call.result() != pid, "PAUSE did not close the server connection"


@check("pause/closes-servers")
def pause_closes(t):
    p = t.tx()
    t.connect(p).query("SELECT 1")
    p.admin("PAUSE")
    same(p.admin("SHOW SERVERS"), [])
    assert re.search("closing because: pause mode", p.log())


@check("pause/one-database")
def pause_one(t):
    p = t.tx()
    on_p0, on_p1, admin = t.connect(p), t.connect(p, database="p1"), t.keep(p.admin())
    on_p0.query("SELECT 1")
    admin.query("PAUSE p0")
    same({row["name"]: row["paused"] for row in p.admin("SHOW DATABASES")}, {"p0": "1", "p1": "0", "pgbouncer": "0"})
    call = t.background(on_p0.query, "SELECT 1")
    on_p1.query("SELECT 1")
    assert call.blocked(), "a query ran on the paused database"
    admin.query("RESUME p0")
    call.result()


@check("pause/login-while-paused-waits")
def pause_login(t):
    # PAUSE closes a server that is logging in, which counts as a failed attempt: the next one is after the retry time.
    p = t.tx({"server_login_retry": "0.3"})
    admin = t.keep(p.admin())
    admin.query("PAUSE p0")
    login = t.background(lambda: t.connect(p).one("SELECT 1"))
    assert login.blocked(), "query ran while paused"
    admin.query("RESUME p0")
    same(login.result(), "1")


@check("pause/errors")
def pause_errors(t):
    admin = t.keep(t.pooler().admin())
    fails("no such database: nope", admin.query, "PAUSE nope")
    fails("cannot pause admin db: pgbouncer", admin.query, "PAUSE pgbouncer")
    fails("pooler is not paused/suspended", admin.query, "RESUME")
    fails("no such database: nope", admin.query, "RESUME nope")
    fails("database p0 is not paused", admin.query, "RESUME p0")
    admin.query("PAUSE")
    fails("already suspended/paused", admin.query, "PAUSE")
    fails("already suspended/paused", admin.query, "SUSPEND")


@check("suspend/and-resume")
def suspend(t):
    p = t.tx()
    client, admin = t.connect(p), t.keep(p.admin())
    client.query("SELECT 1")
    same(admin.query("SUSPEND")[-1].tag, "SUSPEND")
    call = t.background(client.query, "SELECT 1")
    assert call.blocked(), "a query ran while suspended"
    admin.query("RESUME")
    call.result()


@check("suspend/admin-gone-resumes")
def suspend_admin_gone(t):
    p = t.tx()
    client, admin = t.connect(p), p.admin()
    client.query("SELECT 1")
    admin.query("SUSPEND")
    admin.close()
    client.query("SELECT 1")


@check("suspend/running-query-answers-after-resume")
def suspend_running(t):
    p = t.tx()
    client, admin = t.connect(p), t.keep(p.admin())
    running = t.background(client.one, "SELECT 1 FROM pg_sleep(0.2)")
    time.sleep(0.05)
    admin.query("SUSPEND")
    assert running.blocked(0.4), "an answer came through while suspended"
    admin.query("RESUME")
    same(running.result(), "1")


@check("disable/refuses-new-clients")
def disable(t):
    p = t.tx()
    old, admin = t.connect(p), t.keep(p.admin())
    same(admin.query("DISABLE p0")[-1].tag, "DISABLE")
    fails("database .*p0.* (is disabled|does not allow connections)", p.connect)
    old.query("SELECT 1")
    t.connect(p, database="p1").query("SELECT 1")
    same(admin.dicts("SHOW DATABASES")[0]["disabled"], "1")
    same(admin.query("ENABLE p0")[-1].tag, "ENABLE")
    t.connect(p).query("SELECT 1")


@check("disable/errors")
def disable_errors(t):
    admin = t.keep(t.pooler().admin())
    for command in ("DISABLE", "ENABLE"):
        fails("a database is required", admin.query, command)
        fails("no such database: nope", admin.query, f"{command} nope")
        fails(f"cannot {command.lower()} admin db: pgbouncer", admin.query, f"{command} pgbouncer")


@check("kill/database")
def kill_database(t):
    p = t.tx()
    on_p0, on_p1, admin = t.connect(p), t.connect(p, database="p1"), t.keep(p.admin())
    on_p0.query("SELECT 1")
    on_p1.query("SELECT 1")
    same(admin.query("KILL p0")[-1].tag, "KILL")
    dropped(None, on_p0)
    on_p1.query("SELECT 1")
    same(admin.dicts("SHOW DATABASES")[0]["paused"], "1")
    admin.query("RESUME p0")
    t.connect(p).query("SELECT 1")


@check("kill/active-transaction")
def kill_active(t):
    p = t.tx()
    client, admin = t.connect(p), t.keep(p.admin())
    pid = backend_pid(client)
    client.query("BEGIN")
    admin.query("KILL p0")
    dropped(None, client)
    host.wait_until(lambda: server_gone(t, pid), what="server connection closed")


def server_gone(t, pid):
    """True when the server process has ended."""
    with t.pg.connect("admin") as conn:
        return conn.rows(f"SELECT 1 FROM pg_stat_activity WHERE pid = {pid}") == []


@check("kill/all")
def kill_all(t):
    p = t.tx()
    on_p0, on_p1, admin = t.connect(p), t.connect(p, database="p1"), t.keep(p.admin())
    same(admin.query("KILL")[-1].tag, "KILL")
    dropped(None, on_p0)
    dropped(None, on_p1)


@check("kill/errors")
def kill_errors(t):
    admin = t.keep(t.pooler().admin())
    fails("no such database: nope", admin.query, "KILL nope")
    fails("cannot kill admin db: pgbouncer", admin.query, "KILL pgbouncer")
    admin.query("PAUSE")
    fails("already suspended/paused", admin.query, "KILL p0")


@check("kill-client/by-id")
def kill_client(t):
    p = t.tx()
    one, two, admin = t.connect(p), t.connect(p), t.keep(p.admin())
    port = one.sock.getsockname()[1]
    ident, = [row["id"] for row in admin.dicts("SHOW CLIENTS") if row["port"] == str(port)]
    same(admin.query(f"KILL_CLIENT {ident}")[-1].tag, "KILL_CLIENT")
    dropped(None, one)
    two.query("SELECT 1")
    fails("client not found", admin.query, "KILL_CLIENT 999999")


@check("reconnect/idle-server-replaced")
def reconnect(t):
    p = t.tx()
    client, admin = t.connect(p), t.keep(p.admin())
    pid = backend_pid(client)
    same(backend_pid(client), pid, "LIFO reuse")
    same(admin.query("RECONNECT")[-1].tag, "RECONNECT")
    assert backend_pid(client) != pid, "server was not replaced"


@check("reconnect/transaction-keeps-its-server")
def reconnect_transaction(t):
    p = t.tx()
    client, admin = t.connect(p), t.keep(p.admin())
    client.query("BEGIN")
    pid = backend_pid(client)
    admin.query("RECONNECT p0")
    same(admin.dicts("SHOW SERVERS")[0]["close_needed"], "1")
    same(backend_pid(client), pid)
    client.query("COMMIT")
    assert backend_pid(client) != pid, "server was not replaced after the transaction"


@check("reconnect/one-database")
def reconnect_one(t):
    p = t.tx()
    on_p0, on_p1 = t.connect(p), t.connect(p, database="p1")
    before = backend_pid(on_p0), backend_pid(on_p1)
    p.admin("RECONNECT p1")
    same(backend_pid(on_p0), before[0])
    assert backend_pid(on_p1) != before[1]


@check("reconnect/replication-ends")
def reconnect_replication(t):
    p = t.tx()
    stream = t.connect(p, "replica", params={"replication": "database"})
    stream.query("IDENTIFY_SYSTEM")
    p.admin("RECONNECT p0")
    dropped("database configuration changed", stream)


@check("reconnect/errors")
def reconnect_errors(t):
    admin = t.keep(t.pooler().admin())
    fails("no such database: nope", admin.query, "RECONNECT nope")
    fails("cannot reconnect admin db: pgbouncer", admin.query, "RECONNECT pgbouncer")


@check("wait-close/after-reconnect")
def wait_close(t):
    p = t.tx()
    client, admin = t.connect(p), t.keep(p.admin())
    client.query("BEGIN")
    p.admin("RECONNECT p0")
    call = t.background(admin.query, "WAIT_CLOSE p0")
    assert call.blocked(), "WAIT_CLOSE returned while an old server was in use"
    client.query("COMMIT")
    same(call.result()[-1].tag, "WAIT_CLOSE")


@check("wait-close/nothing-to-wait-for")
def wait_close_none(t):
    admin = t.keep(t.pooler().admin())
    same(admin.query("WAIT_CLOSE")[-1].tag, "WAIT_CLOSE")
    same(admin.query("WAIT_CLOSE p0")[-1].tag, "WAIT_CLOSE")
    fails("no such database: nope", admin.query, "WAIT_CLOSE nope")
    fails("cannot wait in admin db: pgbouncer", admin.query, "WAIT_CLOSE pgbouncer")


# --- SET, RELOAD


@check("set/number-and-text")
def set_values(t):
    p = t.pooler()
    admin = t.keep(p.admin())
    for sql, key, value in (("SET default_pool_size = 5", "default_pool_size", "5"),
                            ("set query_timeout=3", "query_timeout", "3"),
                            ("SET query_timeout = '1.5'", "query_timeout", "1.5"),
                            ("SET server_reset_query = 'DISCARD TEMP'", "server_reset_query", "DISCARD TEMP"),
                            ("SET server_check_query = 'select ''x'''", "server_check_query", "select 'x'")):
        assert admin.query(sql)[-1].tag.startswith("SET"), sql
        same({row["key"]: row["value"] for row in admin.dicts("SHOW CONFIG")}[key], value, sql)


@check("set/takes-effect")
def set_effect(t):
    p = t.tx({"default_pool_size": 1})
    one, two, admin = t.connect(p), t.connect(p), t.keep(p.admin())
    one.query("BEGIN")
    call = t.background(two.query, "SELECT 1")
    assert call.blocked()
    admin.query("SET default_pool_size = 2")
    call.result()


@check("set/errors")
def set_errors(t):
    admin = t.keep(t.pooler().admin())
    fails("SET failed", admin.query, "SET no_such_key = 1")
    fails("SET failed", admin.query, "SET pool_mode = 'nonsense'")


@check("reload/pool-size")
def reload_pool_size(t):
    p = t.tx({"default_pool_size": 1})
    one, two = t.connect(p), t.connect(p)
    one.query("BEGIN")
    call = t.background(two.query, "SELECT 1")
    assert call.blocked()
    p.settings["default_pool_size"] = 2
    p.reload()
    call.result()


@check("reload/new-and-removed-database")
def reload_databases(t):
    p = t.tx()
    p.forgets_pools = True
    on_p1 = t.connect(p, database="p1")
    on_p1.query("SELECT 1")
    fails("no such database: new", p.connect, database="new")
    del p.databases["p1"]
    p.databases["new"] = t.target("p1")
    p.reload()
    same(t.connect(p, database="new").one("SELECT current_database()"), "p1")
    fails("no such database: p1", p.connect, database="p1")


@check("reload/connection-string-change")
def reload_connstr(t):
    p = t.tx()
    client = t.connect(p)
    same(client.one("SELECT current_database()"), "p0")
    p.databases["p0"] = t.target("p1")
    p.reload()
    host.wait_until(lambda: client.one("SELECT current_database()") == "p1", what="new target is used")
    p.wait_log("closing because: (database configuration changed|connect string changed|obsolete connection)")


@check("reload/transaction-survives-change")
def reload_in_transaction(t):
    p = t.tx()
    client = t.connect(p)
    client.query("BEGIN")
    p.databases["p0"] = t.target("p1")
    p.reload()
    same(client.one("SELECT current_database()"), "p0")
    client.query("COMMIT")
    same(client.one("SELECT current_database()"), "p1")


@check("reload/auth-file")
def reload_auth_file(t):
    p = t.pooler({"auth_type": "scram-sha-256"})
    fails("authentication failed", p.connect, "carol", password="c")
    with t.pg.connect("admin") as conn:
        conn.query("DROP ROLE IF EXISTS carol; CREATE ROLE carol LOGIN")
    with open(p.path("userlist.txt"), "a", encoding="utf-8") as users:
        users.write('"carol" "c"\n')
    p.admin("RELOAD")
    t.connect(p, "carol", password="c").query("SELECT 1")


@check("reload/error-keeps-old")
def reload_error(t):
    p = t.pooler({"default_pool_size": 3})
    p.settings["default_pool_size"] = "4"
    p.raw = "pool_mode = nonsense"
    p.write_ini()
    fails("RELOAD failed, see logs", p.admin, "RELOAD")
    t.connect(p).query("SELECT 1")


@check("reload/auth-file-gone-keeps-the-users")
def reload_auth_file_gone(t):
    p = t.pooler({"auth_type": "md5"})
    os.unlink(p.path("userlist.txt"))
    p.databases["later"] = t.target()
    p.admin("SET query_timeout = 100")
    p.reload()
    t.connect(p, "bob", "later").query("SELECT 1")


@check("reload/auth-file-broken-keeps-running")
def reload_broken_auth_file(t):
    p = t.pooler({"auth_type": "scram-sha-256"})
    p.write("userlist.txt", '"bob "bob"\nbroken\n')
    with contextlib.suppress(wire.PgError):
        p.admin("RELOAD")
    assert p.running()


@check("reload/log-phrases")
def reload_log(t):
    p = t.pooler()
    p.admin("RELOAD")
    p.wait_log("RELOAD command issued")


@check("set/restart-only-key-is-unchanged")
def set_restart_only(t):
    p = t.pooler()
    admin = t.keep(p.admin())
    with contextlib.suppress(wire.PgError):
        admin.query("SET listen_port = 1")
    same({row["key"]: row["value"] for row in admin.dicts("SHOW CONFIG")}["listen_port"], str(p.port))


# --- SHUTDOWN


@check("shutdown/immediate")
def shutdown(t):
    p = t.tx()
    client, admin = t.connect(p), t.keep(p.admin())
    client.query("BEGIN")
    admin.send("Q", b"SHUTDOWN\0")
    same(p.exited(), 0)
    p.wait_log("SHUTDOWN command issued")
    dropped(None, client)


@check("shutdown/wait-for-servers")
def shutdown_servers(t):
    p = t.tx()
    client, admin = t.connect(p), t.keep(p.admin())
    client.query("BEGIN")
    same(admin.query("SHUTDOWN WAIT_FOR_SERVERS")[-1].tag, "SHUTDOWN")
    client.query("SELECT 1")
    assert p.running(), "ended with a transaction open"
    client.query("COMMIT")
    same(p.exited(), 0)


@check("shutdown/wait-for-clients")
def shutdown_clients(t):
    p = t.tx()
    client, admin = t.connect(p), p.admin()
    client.query("SELECT 1")
    same(admin.query("SHUTDOWN WAIT_FOR_CLIENTS")[-1].tag, "SHUTDOWN")
    admin.close()
    time.sleep(JANITOR_S)
    client.query("SELECT 1")
    assert p.running(), "ended with a client connected"
    client.close()
    same(p.exited(), 0)


@check("shutdown/refuses-new-connections")
def shutdown_refuses(t):
    p = t.tx()
    client, admin = t.connect(p), t.keep(p.admin())
    client.query("BEGIN")
    admin.query("SHUTDOWN WAIT_FOR_CLIENTS")
    # Whom the kernel has let in until each worker has closed its listening sockets is served.
    until = time.monotonic() + 2
    while time.monotonic() < until:
        try:
            p.connect().close()
        except (OSError, wire.Closed):
            # Refused, or accepted by the kernel and then reset: the listener went meanwhile.
            return
        except Exception as error:
            assert "pooler is shutting down" in str(error), error
            return
        time.sleep(0.05)
    raise AssertionError("new clients are let in")


@check("shutdown/resume-refused")
def shutdown_resume(t):
    p = t.tx()
    client, admin = t.connect(p), t.keep(p.admin())
    client.query("BEGIN")
    admin.query("SHUTDOWN WAIT_FOR_SERVERS")
    fails("pooler is shutting down", admin.query, "RESUME")


@check("shutdown/removes-socket-and-pidfile")
def shutdown_files(t):
    p = t.pooler()
    admin = t.keep(p.admin())
    admin.send("Q", b"SHUTDOWN\0")
    p.exited()
    assert not os.path.exists(p.path("pooler.pid")), "pidfile left"
    assert not os.path.exists(p.path(f".s.PGSQL.{p.port}")), "unix socket left"
