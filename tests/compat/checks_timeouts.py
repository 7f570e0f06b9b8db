# SPDX-License-Identifier: Apache-2.0
"""Every timeout key, with its text to the client and its log line."""

import contextlib
import socket
import threading
import time

from case import backend_pid, check, dropped, fails, same
from upkit import host, wire


@check("timeout/query_timeout", slow=True)
def query_timeout(t):
    p = t.tx({"query_timeout": "0.5"})
    client = t.connect(p)
    client.query("SELECT 1")
    fails("query timeout", client.query, "SELECT pg_sleep(10)")
    p.wait_log("closing because: query timeout")


@check("timeout/query_timeout-counts-the-wait", slow=True)
def query_timeout_queued(t):
    p = t.tx({"default_pool_size": 1, "query_timeout": "0.5"})
    holder, waiter = t.connect(p), t.connect(p)
    holder.query("BEGIN")
    call = t.background(waiter.query, "SELECT 1")
    fails("query_timeout", call.result, severity="FATAL")
    p.wait_log("closing because: query_timeout")


@check("timeout/query_timeout-spares-copy-in", slow=True)
def query_timeout_copy(t):
    p = t.tx({"query_timeout": "1"})
    client = t.connect(p)
    client.query("BEGIN; CREATE TEMP TABLE c (a int) ON COMMIT DROP")
    client.send("Q", b"COPY c FROM STDIN\0")
    same(client.recv()[0], "G")
    for number in range(8):
        time.sleep(0.25)
        client.send("d", f"{number}\n".encode())
    client.send("c")
    same(client.finish()[-1].tag, "COPY 8")


# Times of a user are whole seconds: PgBouncer reads them as integers.
@check("timeout/query_timeout-of-user", slow=True)
def query_timeout_user(t):
    p = t.tx(users={"bob": "query_timeout=1"})
    fails("query timeout", t.connect(p).query, "SELECT pg_sleep(10)")
    t.connect(p, "alice").query("SELECT pg_sleep(1.5)")


@check("timeout/query_wait_timeout", slow=True)
def query_wait_timeout(t):
    p = t.tx({"default_pool_size": 1, "query_wait_timeout": "0.5"})
    holder, waiter = t.connect(p), t.connect(p)
    holder.query("BEGIN")
    fails("query_wait_timeout", waiter.query, "SELECT 1", severity="FATAL")
    p.wait_log("closing because: query_wait_timeout")
    holder.query("COMMIT")


@check("timeout/query_wait_timeout-sqlstate", slow=True)
def query_wait_timeout_sqlstate(t):
    p = t.tx({"default_pool_size": 1, "query_wait_timeout": "0.3"})
    t.connect(p).query("BEGIN")
    fails("", t.connect(p).query, "SELECT 1", sqlstate="08P01")


@check("timeout/query_wait_timeout-of-user", slow=True)
def query_wait_timeout_user(t):
    p = t.tx({"default_pool_size": 1}, users={"bob": "query_wait_timeout=1"})
    holder, waiter = t.connect(p), t.connect(p)
    holder.query("BEGIN")
    fails("query_wait_timeout", waiter.query, "SELECT 1")


@check("timeout/query_wait_timeout-while-paused", slow=True)
def query_wait_timeout_paused(t):
    p = t.tx({"query_wait_timeout": "0.5"})
    client = t.connect(p)
    p.admin("PAUSE")
    fails("query_wait_timeout", client.query, "SELECT 1")


@check("timeout/query_wait_timeout-at-login", slow=True)
def query_wait_timeout_login(t):
    p = t.tx({"query_wait_timeout": "0.5", "max_db_connections": "1"})
    t.connect(p).query("BEGIN")
    # Of a pool that has no server yet nothing is known that this client could be told.
    fails("query_wait_timeout", t.connect, p, "alice", severity="FATAL")
    p.wait_log("closing because: query_wait_timeout")


@check("timeout/query_wait_notify", slow=True)
def query_wait_notify(t):
    p = t.tx({"default_pool_size": 1, "query_wait_notify": 1})
    holder, waiter = t.connect(p), t.connect(p)
    holder.query("BEGIN")
    call = t.background(waiter.query, "SELECT 1")
    time.sleep(2)
    holder.query("COMMIT")
    call.result()
    same(len(waiter.notices), 1, "notices to the waiting client")


@check("timeout/idle_transaction_timeout", slow=True)
def idle_transaction(t):
    p = t.tx({"idle_transaction_timeout": "0.5"})
    client = t.connect(p)
    client.query("BEGIN")
    dropped("idle transaction timeout", client)
    p.wait_log("closing because: idle transaction timeout")
    with t.connect(p) as other:
        other.query("SELECT 1")
        time.sleep(1)
        other.query("SELECT 1")


@check("timeout/idle_transaction_timeout-of-user", slow=True)
def idle_transaction_user(t):
    p = t.tx(users={"bob": "idle_transaction_timeout=1"})
    client = t.connect(p)
    client.query("BEGIN")
    dropped("idle transaction timeout", client)


@check("timeout/transaction_timeout", slow=True)
def transaction_timeout(t):
    p = t.tx({"transaction_timeout": "0.7"})
    client = t.connect(p)
    client.query("BEGIN")
    with contextlib.suppress(Exception):
        for _ in range(12):
            client.query("SELECT pg_sleep(0.1)")
        raise SystemExit
    p.wait_log("closing because: transaction timeout")


@check("timeout/client_idle_timeout", slow=True)
def client_idle(t):
    p = t.tx({"client_idle_timeout": "0.5"})
    client = t.connect(p)
    client.query("SELECT 1")
    dropped("client_idle_timeout", client)
    p.wait_log("closing because: client_idle_timeout")


@check("timeout/client_idle_timeout-spares-sessions", slow=True)
def client_idle_session(t):
    p = t.pooler({"client_idle_timeout": "0.5"})
    session, fresh = t.connect(p), t.connect(p)
    pid = backend_pid(session)
    dropped("client_idle_timeout", fresh)
    time.sleep(1)
    same(backend_pid(session), pid, "who has a server keeps it")


@check("timeout/client_idle_timeout-of-user", slow=True)
def client_idle_user(t):
    p = t.tx(users={"bob": "client_idle_timeout=1"})
    client, other = t.connect(p), t.connect(p, "alice")
    client.query("SELECT 1")
    other.query("SELECT 1")
    dropped("client_idle_timeout", client)
    other.query("SELECT 1")


@check("timeout/client_login_timeout", slow=True)
def client_login(t):
    p = t.tx({"client_login_timeout": "0.5"})
    silent = t.keep(wire.Conn("127.0.0.1", p.port, handshake=False))
    # A connection that sends something but never logs in; tcp_defer_accept hides one that sends nothing.
    silent.send_raw(b"\0\0\0\x20\0\3")
    dropped("client_login_timeout", silent)
    p.wait_log("closing because: client_login_timeout")


@check("timeout/client_login_timeout-at-password", slow=True)
def client_login_password(t):
    p = t.tx({"client_login_timeout": "0.5", "auth_type": "scram-sha-256"})
    silent = t.keep(wire.Conn("127.0.0.1", p.port, handshake=False))
    silent.send_startup("bob", "p0")
    dropped("client_login_timeout", silent)


@check("timeout/server_idle_timeout", slow=True)
def server_idle(t):
    p = t.tx({"server_idle_timeout": "0.5"})
    client = t.connect(p)
    pid = backend_pid(client)
    p.wait_log("closing because: server idle timeout", 4)
    assert backend_pid(client) != pid


@check("timeout/server_lifetime", slow=True)
def server_lifetime(t):
    p = t.tx({"server_lifetime": "0.5"})
    client = t.connect(p)
    pid = backend_pid(client)
    time.sleep(1)
    assert backend_pid(client) != pid
    assert "closing because: server lifetime over" in p.log()


@check("timeout/server_lifetime-of-database", slow=True)
def server_lifetime_database(t):
    p = t.tx(databases={"p0": t.target(server_lifetime="1")})
    client = t.connect(p)
    pid = backend_pid(client)
    time.sleep(1.6)
    assert backend_pid(client) != pid


@check("timeout/server_lifetime-zero-uses-once")
def server_lifetime_zero(t):
    p = t.tx({"server_lifetime": 0})
    client = t.connect(p)
    same(len({backend_pid(client) for _ in range(3)}), 3, "servers used for three transactions")


class SilentServer:
    """Accepts connections and never answers: a server that hangs in its login.

    The first `forward` connections are relayed to port `to` instead.
    """

    def __init__(self, forward=0, to=None):
        self.forward, self.to = forward, to
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(16)
        self.port = self.listener.getsockname()[1]
        self.accepted = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                self.accepted.append(self.listener.accept()[0])
                if len(self.accepted) <= self.forward:
                    server = socket.create_connection(("127.0.0.1", self.to))
                    for pair in ((self.accepted[-1], server), (server, self.accepted[-1])):
                        threading.Thread(target=self._copy, args=pair, daemon=True).start()

    @staticmethod
    def _copy(source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self):
        """Closes the listener and all connections."""
        self.listener.close()
        for conn in self.accepted:
            conn.close()


@check("timeout/server_connect_timeout", slow=True)
def server_connect(t):
    silent = t.keep(SilentServer())
    # PgBouncer divides this one to whole seconds: below 1 it would fail at once.
    p = t.tx({"server_connect_timeout": "1", "query_wait_timeout": "3"},
             databases={"p0": f"host=127.0.0.1 port={silent.port}"})
    call = t.background(lambda: t.connect(p).query("SELECT 1"))
    p.wait_log("closing because: connect timeout", 4)
    fails("", call.result, 10)


@check("timeout/server_login_retry", slow=True)
def server_login_retry(t):
    port = host.free_port()
    p = t.tx({"server_login_retry": "0.5", "query_wait_timeout": "2"},
             databases={"p0": f"host=127.0.0.1 port={port}"})
    fails("", lambda: t.connect(p).query("SELECT 1"))
    p.wait_log("closing because: connect failed")
    attempts = p.log().count("connect failed")
    assert attempts >= 2, f"{attempts} attempts"


@check("timeout/server-down-client-is-told", slow=True)
def server_down(t):
    p = t.tx({"query_wait_timeout": "1"}, databases={"p0": f"host=127.0.0.1 port={host.free_port()}"})
    fails("query_wait_timeout|server login has been failing", lambda: t.connect(p).query("SELECT 1"))
    p.wait_log("closing because: connect failed")


@check("timeout/server-login-failure-is-passed-on")
def server_login_fails(t):
    p = t.tx(databases={"p0": t.target(user="plain_user", password="wrong")})
    fails("password authentication failed", lambda: t.connect(p).query("SELECT 1"), sqlstate="28P01")


@check("timeout/server-login-fails-fast")
def server_login_fails_fast(t):
    role = f"fails_{host.free_port()}"
    with t.pg.connect("admin") as admin:
        admin.query(f"CREATE ROLE {role} LOGIN")
        p = t.tx({"query_wait_timeout": "3"}, databases={"p0": t.target(user=role)})
        clients = [t.connect(p) for _ in range(2)]
        clients[0].query("SELECT 1")
        admin.query(f"ALTER ROLE {role} NOLOGIN")
        p.admin("RECONNECT")
        first = t.background(clients[0].query, "SELECT 1")
        p.wait_log("server login failed: FATAL role .* is not permitted to log in")
        start = time.monotonic()
        fails("server login has been failing, (try again later|cached error: )", clients[1].query, "SELECT 1")
        took = time.monotonic() - start
        assert took < 0.5, f"told after {took:.1f} s"
        fails("", first.result)
        admin.query(f"DROP ROLE {role}")


@check("timeout/full-server-keeps-clients-waiting")
def full_server(t):
    role = f"full_{host.free_port()}"
    with t.pg.connect("admin") as admin:
        admin.query(f"CREATE ROLE {role} LOGIN CONNECTION LIMIT 1")
        p = t.tx({"server_login_retry": "0.2"}, databases={"p0": t.target(user=role)})
        holder, early, late = (t.connect(p) for _ in range(3))
        holder.query("BEGIN")
        waits = [t.background(early.query, "SELECT 1")]
        p.wait_log("too many connections for role")
        # Who asks after the failure waits too, because a server stands.
        waits.append(t.background(late.query, "SELECT 1"))
        same(holder.one("SELECT 7"), "7", "the one that has a server")
        holder.query("COMMIT")
        for call in waits:
            call.result()
        admin.query(f"DROP ROLE {role}")


@check("timeout/cancel_wait_timeout", slow=True)
def cancel_wait(t):
    # Cancel requests may use as many connections again as the pool has; when those hang, the next must wait.
    gate = t.keep(SilentServer(forward=1, to=t.pg.port))
    p = t.tx({"cancel_wait_timeout": "0.5", "default_pool_size": 1, "server_tls_sslmode": "disable"},
             databases={"p0": f"host=127.0.0.1 port={gate.port} dbname=p0"})
    client = t.connect(p)
    call = t.background(client.query, "SELECT pg_sleep(2)")
    assert call.blocked()
    cancels = [t.background(client.cancel) for _ in range(3)]
    p.wait_log("cancel_wait_timeout", 4)
    del cancels


@check("timeout/autodb_idle_timeout", slow=True)
def autodb_idle(t):
    p = t.tx({"autodb_idle_timeout": "0.5", "server_idle_timeout": "0.5"},
             databases={"*": t.target(None).replace("dbname=None", "").strip()})
    p.forgets_pools = True
    with t.connect(p, database="p1") as client:
        client.query("SELECT 1")
        p.wait_log("registered new auto-database")
    host.wait_until(lambda: "p1" not in {row["name"] for row in p.admin("SHOW DATABASES")}, step_s=0.2,
                    what="auto-database is dropped")


@check("timeout/server_check_query", slow=True)
def server_check(t):
    p = t.tx({"server_check_delay": "0.5", "server_check_query": "SELECT set_config('up.checked', '1', false)"})
    client = t.connect(p)
    same(client.one("SELECT current_setting('up.checked', true)"), None)
    time.sleep(1.2)
    same(client.one("SELECT current_setting('up.checked', true)"), "1", "check query ran on the idle server")


@check("timeout/fractional-seconds")
def fractional(t):
    p = t.pooler({"query_timeout": "0.25", "server_idle_timeout": "1.5"})
    shown = {row["key"]: row["value"] for row in p.admin("SHOW CONFIG")}
    same((shown["query_timeout"], shown["server_idle_timeout"]), ("0.25", "1.5"))
