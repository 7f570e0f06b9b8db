# SPDX-License-Identifier: Apache-2.0
"""Protocol 3 through the pooler: simple, extended, pipelines, prepared statements, COPY, cancel, bad input."""

import struct
import time

from case import backend_pid, check, dropped, fails, same
from upkit import host, wire

PIPELINE = 200


def kinds(messages):
    """Message types in a row, without ParameterStatus and notices."""
    return "".join(kind for kind, _ in messages if kind not in "SN")


# --- simple and extended


@check("protocol/simple-multi-statement")
def simple_multi(t):
    client = t.connect(t.tx())
    results = client.query("SELECT 1; SELECT 'a', 2; BEGIN; COMMIT")
    same([r.tag for r in results], ["SELECT 1", "SELECT 1", "BEGIN", "COMMIT"])
    same(client.query("")[-1].tag, "")
    same(client.query(";")[-1].tag, "")


@check("protocol/error-and-recovery")
def error_recovery(t):
    client = t.connect(t.tx())
    fails("division by zero", client.query, "SELECT 1/0", sqlstate="22012", severity="ERROR")
    client.query("BEGIN")
    fails("does not exist", client.query, "SELECT * FROM nowhere", sqlstate="42P01")
    fails("current transaction is aborted", client.query, "SELECT 1", sqlstate="25P02")
    client.query("ROLLBACK")
    same(client.one("SELECT 1"), "1")


@check("protocol/extended-unnamed")
def extended(t):
    client = t.connect(t.tx({"default_pool_size": 1}))
    for number in range(20):
        same(client.execute("SELECT $1::int + 1, $2::text", [number, None]), [[str(number + 1), None]])


@check("protocol/extended-error-skips-to-sync")
def extended_error(t):
    client = t.connect(t.tx())
    client.send_raw(wire.parse("", "SELECT 1/$1::int") + wire.bind("", "", [0]) + wire.execute()
                    + wire.parse("", "SELECT 2") + wire.bind("", "") + wire.execute() + wire.message("S"))
    same(kinds(client.recv_until_ready()), "1EZ")
    same(client.execute("SELECT 3"), [["3"]])


@check("protocol/portal-row-limit")
def row_limit(t):
    client = t.connect(t.tx({"default_pool_size": 1}))
    client.query("BEGIN")
    client.send_raw(wire.parse("", "SELECT generate_series(1, 5)") + wire.bind("p", "") + wire.execute("p", 2)
                    + wire.message("S"))
    same(kinds(client.recv_until_ready()), "12DDsZ")
    client.send_raw(wire.execute("p", 0) + wire.message("S"))
    same(kinds(client.recv_until_ready()), "DDDCZ")
    client.query("COMMIT")


@check("protocol/flush-without-sync")
def flush(t):
    client = t.connect(t.tx())
    client.send_raw(wire.parse("", "SELECT 7") + wire.bind("", "") + wire.execute() + wire.message("H"))
    got = [client.recv() for _ in range(4)]
    same(kinds(got), "12DC")
    client.send("S")
    same(kinds(client.recv_until_ready()), "Z")


@check("protocol/function-call")
def function_call(t):
    client = t.connect(t.tx())
    oid = int(client.one("SELECT 'int4abs'::regproc::oid"))
    client.send("F", struct.pack("!iHHHi", oid, 1, 1, 1, 4) + struct.pack("!i", -5) + struct.pack("!H", 1))
    got = client.recv_until_ready()
    same(kinds(got), "VZ")
    same(got[0][1], struct.pack("!ii", 4, 5))


@check("protocol/pipeline-many-syncs")
def pipeline_syncs(t):
    client = t.connect(t.tx({"default_pool_size": 1}))
    one = wire.bind("", "", [1]) + wire.execute() + wire.message("S")
    client.send_raw(b"".join(wire.parse("", f"SELECT $1::int + {n}") + one for n in range(PIPELINE)))
    for number in range(PIPELINE):
        got = client.recv_until_ready()
        same(kinds(got), "12DCZ")
        same(wire.data_row(got[2][1]), [str(number + 1)])


@check("protocol/pipeline-simple-queries")
def pipeline_simple(t):
    client = t.connect(t.tx({"default_pool_size": 1}))
    client.send_raw(b"".join(wire.message("Q", wire.cstr(f"SELECT {n}")) for n in range(PIPELINE)))
    for number in range(PIPELINE):
        same(client.finish()[-1].rows, [[str(number)]])


@check("protocol/pipeline-two-clients-one-server")
def pipeline_two(t):
    p = t.tx({"default_pool_size": 1})
    one, two = t.connect(p), t.connect(p)
    for client, base in ((one, 1000), (two, 2000)):
        client.send_raw(b"".join(wire.message("Q", wire.cstr(f"SELECT {base + n}")) for n in range(50)))
    for client, base in ((one, 1000), (two, 2000)):
        for number in range(50):
            same(client.finish()[-1].rows, [[str(base + number)]])


@check("protocol/pipeline-error-in-the-middle")
def pipeline_error(t):
    client = t.connect(t.tx())
    client.send_raw(b"".join(
        wire.parse("", f"SELECT 10/{n % 3}") + wire.bind("", "") + wire.execute() + wire.message("S")
        for n in range(9)))
    same([kinds(client.recv_until_ready()) for _ in range(9)], ["1EZ", "12DCZ", "12DCZ"] * 3)


@check("protocol/large-query-and-value")
def large(t):
    client = t.connect(t.tx())
    text = "v" * (16 << 20)
    same(client.execute("SELECT length($1), md5($1) = md5(repeat('v', 16777216)), $1", [text])[0],
         [str(16 << 20), "t", text])


@check("protocol/large-named-parse")
def large_parse(t):
    # The statement is renamed, so it is held until it is complete: in many reads, the first of which begins a transaction.
    client = t.connect(t.tx({"default_pool_size": 1}))
    for number in range(3):
        text = "n" * (400_000 + number)
        same(client.execute(f"SELECT length('{text}') + $1::int", [number], name=f"large{number}"),
             [[str(len(text) + number)]])


@check("protocol/many-columns-and-parameters")
def many(t):
    client = t.connect(t.tx())
    same(len(client.rows("SELECT " + ",".join(f"{n} AS c{n}" for n in range(1600)))[0]), 1600)
    same(client.execute("SELECT count(*) FROM (VALUES " + ",".join(f"(${n + 1}::text)" for n in range(2000)) + ") v",
                        [str(n) for n in range(2000)]), [["2000"]])


@check("protocol/notices")
def notices(t):
    client = t.connect(t.tx())
    client.query("DO $$BEGIN RAISE NOTICE 'hello %', 1; RAISE WARNING 'careful'; END$$")
    same([n["message"] for n in client.notices[-2:]], ["hello 1", "careful"])


@check("protocol/byte-by-byte")
def byte_by_byte(t):
    client = t.connect(t.tx())
    for byte in wire.parse("", "SELECT $1::int") + wire.bind("", "", [5]) + wire.execute() + wire.message("S"):
        client.send_raw(bytes([byte]))
    same(kinds(client.recv_until_ready()), "12DCZ")


# --- COPY


@check("copy/out")
def copy_out(t):
    client = t.connect(t.tx())
    client.send("Q", b"COPY (SELECT g, repeat('x', 100) FROM generate_series(1, 5000) g) TO STDOUT\0")
    got = kinds(client.recv_until_ready())
    same(got, "H" + "d" * 5000 + "cCZ")


@check("copy/in")
def copy_in(t):
    p = t.tx({"default_pool_size": 1})
    client = t.connect(p)
    client.query("BEGIN; CREATE TEMP TABLE c (a int, b text) ON COMMIT DROP")
    client.send("Q", b"COPY c FROM STDIN\0")
    same(client.recv()[0], "G")
    for start in range(0, 10000, 100):
        client.send("d", "".join(f"{n}\ttext {n}\n" for n in range(start, start + 100)).encode())
    client.send("c")
    client.finish()
    same(client.one("SELECT count(*) FROM c"), "10000")
    client.query("COMMIT")


@check("copy/in-fail-and-error")
def copy_fail(t):
    p = t.tx({"default_pool_size": 1})
    client = t.connect(p)
    client.query(f"CREATE TABLE copy_{p.port} (a int)")
    client.send("Q", wire.cstr(f"COPY copy_{p.port} FROM STDIN"))
    client.recv()
    client.send("f", b"changed my mind\0")
    fails("changed my mind", client.finish, sqlstate="57014")
    client.send("Q", wire.cstr(f"COPY copy_{p.port} FROM STDIN"))
    client.recv()
    client.send_raw(wire.message("d", b"no number\n") + wire.message("d", b"5\n") * 100 + wire.message("c"))
    fails("invalid input syntax", client.finish, sqlstate="22P02")
    # Late CopyData of the failed COPY must not reach the next user of the server.
    same(t.connect(p).one(f"SELECT count(*) FROM copy_{p.port}"), "0")
    client.query(f"DROP TABLE copy_{p.port}")


@check("copy/client-gone-in-the-middle")
def copy_gone(t):
    p = t.tx({"default_pool_size": 1})
    client = p.connect()
    client.query(f"CREATE TABLE gone_{p.port} (a int)")
    client.send("Q", wire.cstr(f"COPY gone_{p.port} FROM STDIN"))
    client.recv()
    client.send("d", b"1\n")
    client.abort()
    other = t.connect(p)
    same(other.one(f"SELECT count(*) FROM gone_{p.port}"), "0")
    other.query(f"DROP TABLE gone_{p.port}")


# --- prepared statements in transaction pooling


@check("prepared/across-servers")
def prepared_servers(t):
    p = t.tx({"max_prepared_statements": 100})
    client, other = t.connect(p), t.connect(p)
    client.execute("SELECT $1::int + 1", [1], name="s1")
    first = backend_pid(client)
    other.query("BEGIN")
    same(backend_pid(other), first)
    # The only server that knows the statement is taken: another one must learn it.
    same(client.execute("", [41], name="s1", prepare=False), [["42"]])
    other.query("COMMIT")


@check("prepared/same-name-other-text")
def prepared_names(t):
    p = t.tx({"default_pool_size": 1, "max_prepared_statements": 100})
    one, two = t.connect(p), t.connect(p)
    one.execute("SELECT 'one' || $1", ["!"], name="s")
    two.execute("SELECT 'two' || $1", ["!"], name="s")
    for _ in range(5):
        same(one.execute("", ["!"], name="s", prepare=False), [["one!"]])
        same(two.execute("", ["!"], name="s", prepare=False), [["two!"]])


@check("prepared/shared-between-clients")
def prepared_shared(t):
    p = t.tx({"default_pool_size": 1, "max_prepared_statements": 100})
    for number in range(5):
        t.connect(p).execute("SELECT $1::int", [number], name=f"name{number}")
    same(t.connect(p).one("SELECT count(*) FROM pg_prepared_statements"), "1", "one statement on the server")


@check("prepared/describe-and-close")
def prepared_describe(t):
    client = t.connect(t.tx({"max_prepared_statements": 100}))
    client.send_raw(wire.parse("d", "SELECT $1::int AS n, 'x'::text AS t") + wire.describe("S", "d") + wire.message("S"))
    got = client.recv_until_ready()
    same(kinds(got), "1tTZ")
    same(wire.row_description(got[2][1]), [("n", 23), ("t", 25)])
    client.send_raw(wire.close_statement("d") + wire.message("S"))
    same(kinds(client.recv_until_ready()), "3Z")
    fails("does not exist|did not exist", client.execute, "", [1], name="d", prepare=False)


@check("prepared/parse-twice-is-an-error")
def prepared_twice(t):
    client = t.connect(t.tx({"max_prepared_statements": 100}))
    client.execute("SELECT 1", name="twice")
    fails("already (exists|in use)", client.execute, "SELECT 2", name="twice")


@check("prepared/unknown-statement")
def prepared_unknown(t):
    client = t.connect(t.tx({"max_prepared_statements": 100}))
    # PgBouncer also closes the client after this.
    fails("prepared statement.*(does not exist|did not exist)", client.execute, "", [], name="never", prepare=False)


@check("prepared/eviction")
def prepared_eviction(t):
    p = t.tx({"default_pool_size": 1, "max_prepared_statements": 3})
    client = t.connect(p)
    for number in range(10):
        client.execute(f"SELECT {number} + $1::int", [0], name=f"s{number}")
    for number in (0, 9, 4, 0, 7):
        same(client.execute("", [1], name=f"s{number}", prepare=False), [[str(number + 1)]])
    assert int(client.one("SELECT count(*) FROM pg_prepared_statements")) <= 3


@check("prepared/eviction-in-a-pipeline")
def prepared_eviction_pipeline(t):
    p = t.tx({"default_pool_size": 1, "max_prepared_statements": 2})
    client = t.connect(p)
    client.send_raw(b"".join(
        wire.parse(f"p{n}", f"SELECT {n}") + wire.bind("", f"p{n}") + wire.execute() + wire.message("S")
        for n in range(10)))
    same([wire.data_row(client.recv_until_ready()[2][1]) for _ in range(10)], [[str(n)] for n in range(10)])
    client.send_raw(b"".join(wire.bind("", f"p{n}") + wire.execute() + wire.message("S") for n in range(10)))
    for number in range(10):
        got = client.recv_until_ready()
        same((kinds(got), wire.data_row(got[1][1])), ("2DCZ", [str(number)]))


@check("prepared/deallocate-all-and-discard-all")
def prepared_deallocate(t):
    p = t.tx({"default_pool_size": 1, "max_prepared_statements": 10})
    for sql in ("DEALLOCATE ALL", "DISCARD ALL"):
        client = t.connect(p)
        client.execute("SELECT $1::int", [1], name="s")
        client.query(sql)
        # The server has forgotten; the client may prepare the same name again.
        same(client.execute("SELECT $1::int + 1", [1], name="s"), [["2"]], sql)


@check("prepared/off-when-zero")
def prepared_off(t):
    client = t.connect(t.pooler({"max_prepared_statements": 0}))
    client.execute("SELECT $1::int", [1], name="mine")
    same(client.one("SELECT name FROM pg_prepared_statements"), "mine", "name reaches the server unchanged")


@check("prepared/session-mode")
def prepared_session(t):
    client = t.connect(t.pooler())
    client.execute("SELECT $1::int", [1], name="s")
    same(client.execute("", [2], name="s", prepare=False), [["2"]])


# --- modes


@check("mode/statement-refuses-transactions")
def statement_mode(t):
    client = t.connect(t.pooler({"pool_mode": "statement"}))
    client.query("SELECT 1")
    fails("transaction blocks not allowed in statement pooling mode", client.query, "BEGIN")


@check("mode/transaction-keeps-one-server")
def transaction_mode(t):
    p = t.tx()
    one, two = t.connect(p), t.connect(p)
    one.query("BEGIN")
    pid = backend_pid(one)
    assert backend_pid(two) != pid
    same(backend_pid(one), pid)
    one.query("COMMIT")
    # More clients than servers were ever needed at a time. Each thread of a pooler may have its own favourite among those. Several
    # times: an answer may reach its client a moment before the server is free for the next one.
    clients = [one, two, *(t.connect(p) for _ in range(4))]
    shared = any(len({backend_pid(client) for client in clients}) < len(clients) for _ in range(20))
    assert shared, "servers are shared between transactions"


@check("mode/session-resets-between-clients")
def session_reset(t):
    p = t.pooler({"default_pool_size": 1})
    one = t.connect(p)
    pid = backend_pid(one)
    one.query("CREATE TEMP TABLE mine (a int); SET work_mem = '77MB'; LISTEN x; PREPARE q AS SELECT 1")
    one.close()
    two = t.connect(p)
    same(backend_pid(two), pid)
    assert two.one("SHOW work_mem") != "77MB"
    same(two.one("SELECT to_regclass('mine')"), None)
    same(two.one("SELECT count(*) FROM pg_prepared_statements"), "0")
    same(two.rows("SELECT pg_listening_channels()"), [])


@check("mode/transaction-has-no-reset-unless-always")
def reset_always(t):
    for always, expected in ((0, "77MB"), (1, "4MB")):
        p = t.tx({"default_pool_size": 1, "server_reset_query": "DISCARD ALL", "server_reset_query_always": always})
        t.connect(p).query("SET work_mem = '77MB'")
        same(t.connect(p).one("SHOW work_mem"), expected, f"server_reset_query_always={always}")


@check("mode/of-database-and-user")
def mode_override(t):
    p = t.pooler(databases={"p0": t.target(pool_mode="transaction"), "p1": t.target("p1")},
                 users={"alice": "pool_mode=statement"})
    same(p.admin("SHOW DATABASES")[0]["pool_mode"], "transaction")
    one = t.connect(p)
    one.query("SELECT 1")
    same(p.pool()["sv_idle"], "1")
    fails("statement pooling", t.connect(p, "alice", "p1").query, "BEGIN")


@check("mode/listen-in-session")
def listen(t):
    p = t.pooler()
    listener, sender = t.connect(p), t.connect(p)
    listener.query("LISTEN news")
    sender.query("NOTIFY news, 'extra'")
    listener.query("SELECT 1")
    same(listener.notifications, [("news", "extra")])
    sender.query("NOTIFY news, 'second'")
    # Arrives while the client is idle.
    same(listener.recv()[0], "A")


# --- parameters


@check("parameters/startup-values-reach-the-server")
def startup_values(t):
    client = t.connect(t.tx(), params={"client_encoding": "LATIN1", "DateStyle": "German", "TimeZone": "Europe/Paris",
                                       "application_name": "app 1"})
    same([client.one(f"SHOW {name}") for name in ("client_encoding", "DateStyle", "TimeZone", "application_name")],
         ["LATIN1", "German, DMY", "Europe/Paris", "app 1"])
    same(client.parameters["client_encoding"], "LATIN1")


@check("parameters/stay-with-their-client")
def parameters_follow(t):
    p = t.tx({"default_pool_size": 1})
    one, two = t.connect(p), t.connect(p)
    one.query("SET TimeZone = 'Asia/Tokyo'; SET application_name = 'one'; SET DateStyle = 'SQL, DMY'")
    two.query("SET application_name = 'two'")
    for _ in range(3):
        same([one.one(f"SHOW {n}") for n in ("TimeZone", "application_name", "DateStyle")],
             ["Asia/Tokyo", "one", "SQL, DMY"])
        same([two.one(f"SHOW {n}") for n in ("TimeZone", "application_name", "DateStyle")],
             ["UTC", "two", "ISO, MDY"])


@check("parameters/rolled-back-set")
def parameters_rollback(t):
    p = t.tx({"default_pool_size": 1})
    one, two = t.connect(p), t.connect(p)
    one.query("BEGIN; SET TimeZone = 'Asia/Tokyo'; ROLLBACK")
    two.query("SELECT 1")
    same(one.one("SHOW TimeZone"), "UTC")


@check("parameters/interval-style-tracked")
def interval_style(t):
    p = t.tx({"default_pool_size": 1})
    one, two = t.connect(p), t.connect(p)
    one.query("SET IntervalStyle = 'iso_8601'")
    same(two.one("SHOW IntervalStyle"), "postgres")
    same(one.one("SHOW IntervalStyle"), "iso_8601")


@check("parameters/unsupported-startup-parameter")
def unsupported(t):
    p = t.tx()
    fails("unsupported startup parameter: .*foo", p.connect, params={"foo": "1"}, severity="FATAL", sqlstate="08P01")


@check("parameters/ignore_startup_parameters")
def ignored(t):
    p = t.tx({"ignore_startup_parameters": "extra_float_digits, foo, options"})
    t.connect(p, params={"extra_float_digits": "3", "foo": "1", "options": "-c geqo=off"}).query("SELECT 1")


@check("parameters/options")
def options(t):
    p = t.tx()
    client = t.connect(p, params={"options": "-c TimeZone=Asia/Tokyo --application_name=opt"})
    same([client.one("SHOW TimeZone"), client.one("SHOW application_name")], ["Asia/Tokyo", "opt"])
    fails("unsupported startup parameter in options: geqo", p.connect, params={"options": "-c geqo=off"})


@check("parameters/application_name_add_host")
def add_host(t):
    client = t.connect(t.tx({"application_name_add_host": 1}), params={"application_name": "app"})
    port = client.sock.getsockname()[1]
    same(client.one("SHOW application_name"), f"app - 127.0.0.1:{port}")


@check("parameters/of-database")
def of_database(t):
    p = t.tx(databases={"p0": t.target(timezone="Asia/Tokyo", datestyle="German", application_name="dbapp",
                                       client_encoding="LATIN1")})
    client = t.connect(p)
    same([client.one(f"SHOW {n}") for n in ("TimeZone", "DateStyle", "client_encoding")],
         ["Asia/Tokyo", "German, DMY", "LATIN1"])


@check("parameters/server-version-is-reported")
def server_version(t):
    client = t.connect(t.tx())
    same(client.parameters["server_version"], client.one("SHOW server_version"))


# --- cancel


@check("cancel/running-query")
def cancel(t):
    p = t.tx()
    client = t.connect(p)
    call = t.background(client.query, "SELECT pg_sleep(10)")
    assert call.blocked()
    client.cancel()
    fails("canceling statement due to user request", call.result, sqlstate="57014")
    client.query("SELECT 1")


@check("cancel/over-unix-socket")
def cancel_unix(t):
    client = t.connect(t.tx(), unix=True)
    call = t.background(client.query, "SELECT pg_sleep(10)")
    assert call.blocked()
    client.cancel()
    fails("canceling statement", call.result)


@check("cancel/idle-client-harms-nobody")
def cancel_idle(t):
    p = t.tx({"default_pool_size": 1})
    idle, busy = t.connect(p), t.connect(p)
    idle.query("SELECT 1")
    call = t.background(busy.one, "SELECT 1 FROM pg_sleep(0.4)")
    assert call.blocked(0.1)
    idle.cancel()
    same(call.result(), "1")


@check("cancel/wrong-key")
def cancel_wrong(t):
    p = t.tx()
    client = t.connect(p)
    call = t.background(client.one, "SELECT 1 FROM pg_sleep(0.5)")
    assert call.blocked(0.1)
    right, client.key = client.key, bytes(reversed(client.key))
    client.cancel()
    client.key, client.pid = right, client.pid ^ 0x5A5A
    client.cancel()
    same(call.result(), "1")


@check("cancel/key-is-not-the-servers")
def cancel_key(t):
    client = t.connect(t.tx())
    same(len(client.key), 4)
    assert (str(client.pid) != backend_pid(client)) or client.key != b"\0\0\0\0"


@check("cancel/flood")
def cancel_flood(t):
    p = t.tx()
    client = t.connect(p)
    for _ in range(50):
        client.cancel()
    client.query("SELECT 1")


# --- disconnects and bad input


@check("disconnect/in-transaction-rolls-back")
def disconnect(t):
    p = t.tx({"default_pool_size": 1})
    table = f"gone_{p.port}"
    client = p.connect()
    client.query(f"CREATE TABLE {table} (a int)")
    client.query("BEGIN")
    client.query(f"INSERT INTO {table} VALUES (1)")
    client.abort()
    other = t.connect(p)
    same(other.one(f"SELECT count(*) FROM {table}"), "0")
    other.query(f"DROP TABLE {table}")


@check("disconnect/mid-query")
def disconnect_query(t):
    p = t.tx({"default_pool_size": 1})
    client = p.connect()
    client.send("Q", b"SELECT pg_sleep(0.3)\0")
    time.sleep(0.05)
    client.abort()
    same(t.connect(p).one("SELECT 1"), "1")


@check("disconnect/server-killed-idle")
def server_killed_idle(t):
    p = t.tx()
    client = t.connect(p)
    pid = backend_pid(client)
    with t.pg.connect("admin") as admin:
        admin.query(f"SELECT pg_terminate_backend({pid})")
    p.wait_log("closing because: (server conn crashed\\?|terminating connection)")
    assert backend_pid(client) != pid, "the client goes on with another server"


@check("disconnect/server-killed-active")
def server_killed_active(t):
    p = t.tx()
    client = t.connect(p)
    pid = backend_pid(client)
    call = t.background(client.query, "SELECT pg_sleep(10)")
    assert call.blocked()
    with t.pg.connect("admin") as admin:
        admin.query(f"SELECT pg_terminate_backend({pid})")
    fails("terminating connection|server conn crashed|server closed", call.result)


@check("input/ssl-and-gss-requests")
def requests(t):
    p = t.tx()
    conn = t.keep(wire.Conn("127.0.0.1", p.port, handshake=False))
    for code in (wire.GSSENC_REQUEST, wire.SSL_REQUEST):
        conn.send_raw(struct.pack("!ii", 8, code))
        same(conn.sock.recv(1), b"N")
    conn.startup("bob", "p0", {}, (3, 0))
    conn.query("SELECT 1")


@check("input/protocol-2")
def protocol_2(t):
    p = t.tx()
    conn = t.keep(wire.Conn("127.0.0.1", p.port, handshake=False))
    conn.send_raw(struct.pack("!iHH", 296, 2, 0) + b"\0" * 288)
    dropped("old V2 protocol not supported", conn)


@check("input/protocol-3.2-is-negotiated")
def protocol_32(t):
    p = t.tx()
    client = t.connect(p, protocol=(3, 2))
    client.query("SELECT 1")
    call = t.background(client.query, "SELECT pg_sleep(10)")
    assert call.blocked()
    client.cancel()
    fails("canceling statement", call.result)


@check("input/protocol-3.99-and-options")
def protocol_999(t):
    client = t.connect(t.tx(), protocol=(3, 9999), params={"_pq_.test_protocol_negotiation": "1"})
    assert client.negotiated in (196608, 196610), client.negotiated
    client.query("SELECT 1")


@check("input/garbage")
def garbage(t):
    p = t.tx()
    good = t.connect(p)
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, b"\xff" * 64, struct.pack("!ii", 8, 196608),
                 struct.pack("!iHH", 4, 3, 0), struct.pack("!iHH", 1 << 30, 3, 0),
                 b"\0\0\0\x0c\0\3\0\0use"):
        conn = t.keep(wire.Conn("127.0.0.1", p.port, handshake=False))
        conn.send_raw(data)
        if not conn.closed_by_peer(0.3):
            # What looks like a beginning may be waited for; the login timeout ends it.
            conn.sock.close()
    good.query("SELECT 1")
    assert p.running()


@check("input/unknown-message")
def unknown_message(t):
    p = t.tx()
    client, other = t.connect(p), t.connect(p)
    client.query("SELECT 1")
    client.send("~", b"what")
    dropped("unknown pkt|unknown message|invalid frontend message", client)
    other.query("SELECT 1")


@check("input/wrong-length")
def wrong_length(t):
    p = t.tx()
    client, other = t.connect(p), t.connect(p)
    client.send_raw(b"Q" + struct.pack("!i", 3) + b"xxxx")
    dropped(None, client)
    other.query("SELECT 1")


@check("input/max_packet_size")
def max_packet_size(t):
    p = t.tx({"max_packet_size": 100000})
    client = t.connect(p)
    client.send("Q", b"SELECT '" + b"x" * 200000 + b"'\0")
    dropped(None, client)


@check("input/disable_pqexec")
def disable_pqexec(t):
    client = t.connect(t.tx({"disable_pqexec": 1}))
    same(client.execute("SELECT 1"), [["1"]])
    fails("PQexec disallowed", client.query, "SELECT 1")


@check("input/no-such-database")
def no_database(t):
    p = t.tx()
    fails("no such database: nope", p.connect, database="nope", severity="FATAL")
    # As PgBouncer: with a password method an unknown database asks for the password first.
    p.wait_log("no such database: nope")


@check("input/no-such-database-sqlstate")
def no_database_sqlstate(t):
    fails("no such database", t.tx().connect, database="nope", sqlstate="08P01")


@check("input/database-defaults-to-user")
def default_database(t):
    p = t.tx(databases={"bob": t.target("p1")})
    same(t.connect(p, "bob", None).one("SELECT current_database()"), "p1")


@check("input/replication")
def replication(t):
    client = t.connect(t.tx(), "replica", params={"replication": "database"})
    row, = client.query("IDENTIFY_SYSTEM")[-1].dicts()
    assert row["systemid"], row
