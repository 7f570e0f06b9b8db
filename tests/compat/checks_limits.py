# SPDX-License-Identifier: Apache-2.0
"""Limits of connections, on both sides, per pool, database, user and in all; the queue; reuse of servers."""

import time

from case import JANITOR_S, backend_pid, check, fails, same
from upkit import host, wire


def held(t, p, count, **kwargs):
    """`count` clients, each with a transaction open."""
    clients = [t.connect(p, **kwargs) for _ in range(count)]
    for client in clients:
        client.query("BEGIN")
    return clients


def second_waits(t, p, first, second):
    """`second` must wait until `first` has committed."""
    first.query("BEGIN")
    call = t.background(second.one, "SELECT 1")
    assert call.blocked(), "the limit did not hold"
    first.query("COMMIT")
    same(call.result(), "1")


@check("limit/default_pool_size")
def default_pool_size(t):
    p = t.tx({"default_pool_size": 3})
    clients = held(t, p, 3)
    last = t.connect(p)
    call = t.background(last.query, "SELECT 1")
    assert call.blocked()
    same((p.pool()["sv_active"], p.pool()["cl_waiting"]), ("3", "1"))
    clients[1].query("COMMIT")
    call.result()


@check("limit/pool_size-of-database")
def pool_size(t):
    p = t.tx(databases={"p0": t.target(pool_size=1), "p1": t.target("p1")})
    second_waits(t, p, t.connect(p), t.connect(p))
    held(t, p, 2, database="p1")


@check("limit/pool_size-of-user")
def pool_size_user(t):
    p = t.tx(users={"bob": "pool_size=1"})
    second_waits(t, p, t.connect(p), t.connect(p))
    held(t, p, 2, user="alice")


@check("limit/session-mode-holds-until-disconnect")
def session_holds(t):
    p = t.pooler({"default_pool_size": 1})
    first = t.connect(p)
    first.query("SELECT 1")
    login = t.background(lambda: t.connect(p).one("SELECT 1"))
    assert login.blocked()
    first.close()
    same(login.result(), "1")


@check("limit/pools-are-per-user-and-database")
def pools_apart(t):
    p = t.tx({"default_pool_size": 1})
    held(t, p, 1)
    held(t, p, 1, user="alice")
    held(t, p, 1, database="p1")


@check("limit/queue-is-first-in-first-out")
def fifo(t):
    p = t.tx({"default_pool_size": 1})
    holder, = held(t, p, 1)
    calls = []
    for number in range(5):
        calls.append(t.background(t.connect(p).one, "SELECT clock_timestamp()"))
        host.wait_until(lambda: p.pool()["cl_waiting"] == str(number + 1), what="client queued")
    holder.query("COMMIT")
    times = [call.result() for call in calls]
    same(times, sorted(times), "order of service")


@check("limit/reserve_pool", slow=True)
def reserve_pool(t):
    p = t.tx({"default_pool_size": 1, "reserve_pool_size": 1, "reserve_pool_timeout": "0.3"})
    held(t, p, 1)
    start = time.monotonic()
    second = t.connect(p)
    second.query("BEGIN")
    waited = time.monotonic() - start
    assert waited > 0.2, f"reserve used after {waited:.2f} s"
    p.wait_log("taking connection from reserve_pool")
    third = t.background(t.connect(p).query, "SELECT 1")
    assert third.blocked(0.8), "more than pool plus reserve"
    second.query("COMMIT")
    third.result()


@check("limit/reserve_pool-stays-open", slow=True)
def reserve_stays(t):
    p = t.tx({"default_pool_size": 1, "reserve_pool_size": 1, "reserve_pool_timeout": "0.3"})
    clients = held(t, p, 2)
    for client in clients:
        client.query("COMMIT")
    time.sleep(3 * JANITOR_S)
    # The next burst need not wait for it again.
    same(len(p.admin("SHOW SERVERS")), 2, "servers after the burst")


@check("limit/min_pool_size", slow=True)
def min_pool_size(t):
    p = t.tx({"min_pool_size": 3})
    client = t.connect(p)
    client.query("SELECT 1")
    host.wait_until(lambda: len(p.admin("SHOW SERVERS")) == 3, what="three servers")


@check("limit/min_pool_size-with-forced-user", slow=True)
def min_pool_size_forced(t):
    p = t.tx(databases={"p0": t.target(min_pool_size=2, user="bob")})
    t.connect(p).query("SELECT 1")
    host.wait_until(lambda: len(p.admin("SHOW SERVERS")) == 2, what="two servers")


@check("limit/max_client_conn")
def max_client_conn(t):
    p = t.tx({"max_client_conn": 2})
    clients = [host.wait_until(lambda: enters(t, p), what="a client gets in") for _ in range(2)]
    fails(r"no more connections allowed \(max_client_conn\)", p.connect, severity="FATAL")
    # The console must stay reachable, or nobody could find out.
    t.keep(p.admin()).query("SHOW CLIENTS")
    for client in clients:
        client.close()
    # Console clients count too.
    assert host.wait_until(lambda: enters(t, p), what="a client gets in again").one("SELECT 1")


def enters(t, p):
    """A client, if one gets in: those that have left count for a moment, the one that looked whether the pooler is up among them."""
    try:
        return t.connect(p)
    except wire.PgError:
        return None


@check("limit/max_client_conn-sqlstate")
def max_client_conn_sqlstate(t):
    p = t.tx({"max_client_conn": 1})
    host.wait_until(lambda: enters(t, p), what="the first client gets in")
    fails("max_client_conn", p.connect, sqlstate="08P01")


@check("limit/max_db_connections")
def max_db_connections(t):
    p = t.tx({"max_db_connections": 1})
    bob, alice = t.connect(p), t.connect(p, "alice")
    second_waits(t, p, bob, alice)
    # alice's server came by closing bob's idle one.
    p.wait_log("closing because: evicted")


@check("limit/max_db_connections-of-database")
def max_db_connections_one(t):
    p = t.tx(databases={"p0": t.target(max_db_connections=1), "p1": t.target("p1")})
    second_waits(t, p, t.connect(p), t.connect(p, "alice"))
    held(t, p, 2, database="p1")
    same(p.admin("SHOW DATABASES")[0]["max_connections"], "1")


@check("limit/max_user_connections")
def max_user_connections(t):
    p = t.tx({"max_user_connections": 1})
    second_waits(t, p, t.connect(p), t.connect(p, database="p1"))
    p.wait_log("closing because: evicted")


@check("limit/max_user_connections-of-user")
def max_user_connections_one(t):
    p = t.tx(users={"bob": "max_user_connections=1"})
    second_waits(t, p, t.connect(p), t.connect(p, database="p1"))
    held(t, p, 1, user="alice")
    held(t, p, 1, user="alice", database="p1")


@check("limit/max_db_client_connections")
def max_db_client_connections(t):
    p = t.tx({"max_db_client_connections": 1})
    t.connect(p)
    fails(r"client connections exceeded \(max_db_client_connections\)", p.connect)
    t.connect(p, database="p1")


@check("limit/max_user_client_connections")
def max_user_client_connections(t):
    p = t.tx({"max_user_client_connections": 1})
    t.connect(p)
    fails(r"client connections exceeded \(max_user_client_connections\)", p.connect, database="p1")
    t.connect(p, "alice")


@check("limit/max_user_client_connections-of-user")
def max_user_client_connections_one(t):
    p = t.tx(users={"bob": "max_user_client_connections=1"})
    t.connect(p)
    fails("max_user_client_connections", p.connect)
    t.connect(p, "alice")
    t.connect(p, "alice")


@check("reuse/last-in-first-out")
def lifo(t):
    p = t.tx()
    one, two = held(t, p, 2)
    pids = [backend_pid(one), backend_pid(two)]
    one.query("COMMIT")
    two.query("COMMIT")
    same([backend_pid(one) for _ in range(5)], [pids[1]] * 5, "the server released last is used first")


@check("reuse/server_round_robin")
def round_robin(t):
    p = t.tx({"server_round_robin": 1})
    one, two = held(t, p, 2)
    one.query("COMMIT")
    two.query("COMMIT")
    pids = [backend_pid(one) for _ in range(6)]
    same(len(set(pids)), 2, "both servers in turn")
    assert pids[0] != pids[1] and pids[:2] == pids[2:4], pids


@check("limit/lowered-pool-size-closes-servers", slow=True)
def lowered(t):
    p = t.tx({"default_pool_size": 3})
    for client in held(t, p, 3):
        client.query("COMMIT")
    same(len(p.admin("SHOW SERVERS")), 3)
    p.admin("SET default_pool_size = 1")
    host.wait_until(lambda: len(p.admin("SHOW SERVERS")) == 1, what="servers closed")
    p.wait_log("closing because: too many servers in the pool")


@check("limit/hundred-clients-two-servers")
def many_clients(t):
    p = t.tx({"default_pool_size": 2, "max_client_conn": 200})
    clients = [t.connect(p) for _ in range(100)]
    for client in clients:
        client.send("Q", b"SELECT pg_backend_pid(), pg_sleep(0.005)\0")
    pids = {client.finish()[-1].rows[0][0] for client in clients}
    same(len(pids), 2, "servers used")
