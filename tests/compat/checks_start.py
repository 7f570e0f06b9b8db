# SPDX-License-Identifier: Apache-2.0
"""Start, command line, configuration file, databases, logs."""

import os
import re
import signal
import subprocess
import time

from case import backend_pid, check, fails, same
from upkit import host, pooler as poolers, postgres, wire


def start_fails(t, text, **kwargs):
    """The start must end with code 1 and a message that matches."""
    p = t.pooler(wait=False, **kwargs)
    try:
        code = p.exited()
    except subprocess.TimeoutExpired:
        raise AssertionError(f"started; expected /{text}/") from None
    assert code != 0, "exit code 0"
    output = p.log() + p.stderr()
    assert re.search(text, output, re.IGNORECASE), f"{output!r} does not match /{text}/"


def command_line(t, *args, **kwargs):
    """Runs the pooler with these arguments to its end."""
    return subprocess.run([*poolers.command(t.which), *args], capture_output=True, text=True, timeout=10, check=False,
                          **kwargs)


# --- command line


@check("cli/version-and-help")
def cli_version(t):
    for option in ("-V", "--version"):
        done = command_line(t, option)
        same(done.returncode, 0, option)
        assert re.search(r"\d+\.\d+", done.stdout.splitlines()[0]), done.stdout
    for option in ("-h", "--help"):
        done = command_line(t, option)
        same(done.returncode, 0, option)
        for word in ("--daemon", "--verbose", "--quiet", "--user", "--version"):
            assert word in done.stdout, f"{word} not in {option}"


@check("cli/no-file-and-unknown-option")
def cli_errors(t):
    for args in ((), ("--nonsense",), ("/nonexistent/pooler.ini",)):
        done = command_line(t, *args, **host.run_as(host.service_user()))
        assert done.returncode != 0 and done.stderr, f"{args}: {done.returncode} {done.stderr!r}"


@check("cli/refuses-root")
def cli_root(t):
    if os.geteuid() != 0:
        return  # only root can be refused
    p = t.pooler()
    other = p.write("root.ini", f"[databases]\n[pgbouncer]\nlisten_addr=127.0.0.1\nlisten_port={host.free_port()}\n"
                                "unix_socket_dir=\n")
    done = command_line(t, other)
    assert done.returncode != 0 and "root" in done.stderr + done.stdout, done


@check("cli/user-option-drops-root")
def cli_user(t):
    if os.geteuid() != 0:
        return  # needs root to drop
    port = host.free_port()
    p = t.pooler()
    ini = p.write("root.ini", f"[databases]\n[pgbouncer]\nlisten_addr=127.0.0.1\nlisten_port={port}\n"
                              f"unix_socket_dir=\nauth_type=any\nadmin_users=admin\n")
    process = subprocess.Popen([*poolers.command(t.which), "-q", "-u", host.service_user(), ini],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        def uid():
            with open(f"/proc/{process.pid}/status", encoding="utf-8") as status:
                return re.search(r"Uid:\s+(\d+)", status.read())[1]
        host.wait_until(lambda: uid() != "0", what="user changed")
    finally:
        host.stop(process, signal.SIGQUIT)


@check("cli/daemon")
def cli_daemon(t):
    p = t.pooler(wait=False, args=["-d"])
    pidfile = p.path("pooler.pid")
    # It is made, then written.
    host.wait_until(lambda: os.path.exists(pidfile) and os.path.getsize(pidfile) > 0, what="pidfile")
    with open(pidfile, encoding="utf-8") as file:
        pid = int(file.read())
    try:
        same(p.process.wait(5), 0)
        host.wait_until(lambda: os.path.exists(p.path(f".s.PGSQL.{p.port}")), what="socket")
        t.connect(p).query("SELECT 1")
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            assert stat.read().rsplit(")", 1)[1].split()[1] == "1", "not a daemon"
    finally:
        os.kill(pid, signal.SIGQUIT)


@check("cli/quiet")
def cli_quiet(t):
    same(t.pooler(args=["-q"]).stderr(), "")


@check("cli/reboot-option-is-explained")
def cli_reboot(t):
    p = t.pooler()
    done = command_line(t, "-R", p.ini, **host.run_as(host.service_user())) if t.which == "underpass" else None
    if done:
        assert done.returncode != 0 and "reuseport" in (done.stderr + done.stdout).lower(), done


# --- start


@check("start/pidfile")
def pidfile(t):
    p = t.pooler()
    p.wait_log("process up")
    with open(p.path("pooler.pid"), encoding="utf-8") as file:
        same(int(file.read()), p.process.pid)


@check("start/stale-pidfile-is-removed")
def stale_pidfile(t):
    p = t.pooler(files={"pooler.pid": "999999\n"})
    p.wait_log("stale pidfile, removing")


@check("start/pidfile-of-a-running-process")
def running_pidfile(t):
    p = t.pooler()
    p.wait_log("process up")
    with open(p.path("pooler.pid"), encoding="utf-8") as file:
        text = file.read()
    start_fails(t, "pidfile .*another instance running", files={"pooler.pid": text})


@check("start/port-in-use")
def port_in_use(t):
    p = t.pooler()
    start_fails(t, "(bind|listen|in use)", settings={"listen_port": p.port, "unix_socket_dir": ""})


@check("start/unknown-key")
def unknown_key(t):
    start_fails(t, "unknown parameter: pgbouncer/no_such_key", settings={"no_such_key": 1})


@check("start/bad-values")
def bad_values(t):
    start_fails(t, "pool_mode", settings={"pool_mode": "sometimes"})
    start_fails(t, "default_pool_size", settings={"default_pool_size": "many"})
    start_fails(t, "p0", databases={"p0": "host=127.0.0.1 port=zero"})
    start_fails(t, "unrecognized connection parameter: nonsense", databases={"p0": "nonsense=1"})
    start_fails(t, "unrecognized user parameter: nonsense", users={"bob": "nonsense=1"})
    start_fails(t, "pgbouncer.*reserved", databases={"pgbouncer": "host=127.0.0.1"})


@check("start/syntax-error")
def syntax_error(t):
    start_fails(t, "(syntax|invalid|section|cannot load)", raw="[unfinished\nx")


@check("start/missing-auth-file-is-told")
def missing_auth_file(t):
    p = t.pooler({"auth_file": "/nonexistent/userlist.txt"})
    p.wait_log("could not open auth_file /nonexistent/userlist.txt: No such file")


@check("start/unix-socket-mode")
def unix_mode(t):
    p = t.pooler({"unix_socket_mode": "0700"})
    p.wait_log("process up")
    same(oct(os.stat(p.path(f".s.PGSQL.{p.port}")).st_mode & 0o777), "0o700")


@check("start/abstract-unix-socket")
def abstract(t):
    name = f"@underpass-test-{host.free_port()}"
    p = t.pooler({"unix_socket_dir": name})
    conn = t.keep(wire.Conn(name, p.port, "bob", "p0"))
    conn.query("SELECT 1")


@check("start/unix-socket-only")
def unix_only(t):
    p = t.pooler({"listen_addr": None})
    t.connect(p, unix=True).query("SELECT 1")
    try:
        p.connect()
    except OSError:
        return
    raise AssertionError("listens on TCP without listen_addr")


@check("start/listen_addr-names-an-address-twice")
def listen_twice(t):
    for addresses in ("127.0.0.1, 127.0.0.1", "127.0.0.1, *"):
        p = t.pooler({"listen_addr": addresses})
        t.connect(p).query("SELECT 1")


@check("start/several-addresses")
def addresses(t):
    p = t.pooler({"listen_addr": "127.0.0.1, 127.0.0.2"})
    for address in ("127.0.0.1", "127.0.0.2"):
        t.keep(wire.Conn(address, p.port, "bob", "p0")).query("SELECT 1")


@check("start/so_reuseport")
def reuseport(t):
    p = t.pooler({"so_reuseport": 1, "unix_socket_dir": ""})
    second = t.pooler({"so_reuseport": 1, "listen_port": p.port, "unix_socket_dir": ""}, wait=False)
    second.wait_log("process up")
    assert p.running() and second.running()


# --- configuration file


@check("config/include")
def include(t):
    p = t.pooler(raw="%include extra.ini", files={"extra.ini": "default_pool_size = 13\n"})
    same({r["key"]: r["value"] for r in p.admin("SHOW CONFIG")}["default_pool_size"], "13")


@check("config/include-absolute-and-nested")
def include_nested(t):
    p = t.pooler(raw="%include {dir}/a.ini",
                 files={"a.ini": "%include b.ini\nquery_timeout = 9\n", "b.ini": "default_pool_size = 14\n"})
    shown = {r["key"]: r["value"] for r in p.admin("SHOW CONFIG")}
    same((shown["default_pool_size"], shown["query_timeout"]), ("14", "9"))


@check("config/include-missing")
def include_missing(t):
    start_fails(t, "nowhere.ini", raw="%include nowhere.ini")


@check("config/roll-back-to-pgbouncer")
def roll_back(t):
    """One ini file, by turns for the pooler and for Debian's PgBouncer; keys of our own are in a file that the latter never sees."""
    p = t.pooler()
    port = host.free_port()
    ini = p.write("shared.ini", f"[databases]\np0 = {t.target()}\n[pgbouncer]\nlisten_addr=127.0.0.1\n"
                                f"listen_port={port}\nunix_socket_dir=\nauth_type=trust\nauth_file={p.path('userlist.txt')}\n"
                                f"logfile={p.path('shared.log')}\npool_mode=transaction\n")
    before = open(ini, encoding="utf-8").read()
    overlay = p.write("underpass.ini", f"[underpass]\nthreads=1\nkernel_path=off\nmetrics_listen=127.0.0.1:{host.free_port()}\n")
    new = [*poolers.command(t.which), *(["--overlay", overlay] if t.which == "underpass" else []), "-q", ini]
    old = [*poolers.command("pgbouncer"), "-q", ini]
    for start in (old, new, old):
        process = subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                   **host.run_as(host.service_user()))
        try:
            def answers():
                assert process.poll() is None, f"{start[0]} ended with {process.returncode}"
                try:
                    with wire.Conn("127.0.0.1", port, user="bob", database="p0") as client:
                        return client.one("SELECT 1") == "1"
                except (OSError, wire.Closed):
                    return False
            host.wait_until(answers, what=f"{start[0]} serves")
        finally:
            host.stop(process, signal.SIGQUIT)
    same(open(ini, encoding="utf-8").read(), before, "the ini file")


@check("config/later-key-wins")
def later_wins(t):
    p = t.pooler({"default_pool_size": 3}, raw="default_pool_size = 4\n[databases]\np0 = host=/nowhere\np0 = "
                 + t.target("p1"))
    same({r["key"]: r["value"] for r in p.admin("SHOW CONFIG")}["default_pool_size"], "4")
    same(t.connect(p).one("SELECT current_database()"), "p1")


@check("config/comments-and-spaces")
def comments(t):
    p = t.pooler(raw="; a comment\n# another\n  default_pool_size   =   15   \n\n")
    same({r["key"]: r["value"] for r in p.admin("SHOW CONFIG")}["default_pool_size"], "15")


@check("config/quoted-values-in-connection-string")
def quoted(t):
    p = t.pooler(databases={"p0": t.target("p0", application_name="'it''s quoted'")})
    p2 = t.pooler(databases={"p0": t.target("p0", connect_query="'SET work_mem = ''55MB'''")})
    t.connect(p).query("SELECT 1")
    same(t.connect(p2).one("SHOW work_mem"), "55MB")


@check("config/quoted-database-name")
def quoted_database(t):
    p = t.pooler(databases={'"my db"': t.target("p1"), '"a""b"': t.target("p0")})
    same(t.connect(p, database="my db").one("SELECT current_database()"), "p1")
    same(t.connect(p, database='a"b').one("SELECT current_database()"), "p0")


# --- databases


@check("database/fallback")
def fallback(t):
    p = t.tx(databases={"p0": t.target(), "*": f"host=127.0.0.1 port={t.pg.port}"})
    same(t.connect(p, database="p1").one("SELECT current_database()"), "p1")
    p.wait_log("registered new auto-database")


@check("database/fallback-unknown-at-server")
def fallback_unknown(t):
    p = t.tx(databases={"*": f"host=127.0.0.1 port={t.pg.port}"})
    fails('database "never" does not exist', lambda: t.connect(p, database="never").query("SELECT 1"))


@check("database/mapped-name")
def mapped(t):
    p = t.tx(databases={"short": t.target("p1")})
    same(t.connect(p, database="short").one("SELECT current_database()"), "p1")


@check("database/forced-user")
def forced(t):
    p = t.tx(databases={"p0": t.target(user="alice")})
    same(t.connect(p, "bob").one("SELECT current_user"), "alice")
    same(p.pool(user="alice")["database"], "p0")


@check("database/connect_query-that-fails")
def connect_query_fails(t):
    p = t.tx(databases={"p0": t.target(connect_query="'SELECT 1/0'")})
    client = t.connect(p)
    pid = backend_pid(client)
    p.wait_log("division by zero")
    same(backend_pid(client), pid, "the connection is used in spite of it")


@check("database/connect_query")
def connect_query(t):
    p = t.tx(databases={"p0": t.target(connect_query="'SELECT set_config(''up.q'', ''1'', false)'")})
    same(t.connect(p).one("SHOW up.q"), "1")


@check("database/unix-socket-to-server")
def unix_target(t):
    p = t.tx(databases={"p0": t.target(host=t.pg.directory)})
    same(t.connect(p).one("SELECT inet_server_addr()"), None)


@check("database/abstract-socket-to-server")
def abstract_target(t):
    # Who listens there is a pooler of the same kind, which start/abstract-unix-socket checks.
    name = f"@underpass-test-{host.free_port()}"
    near = t.pooler({"unix_socket_dir": name})
    p = t.tx(databases={"p0": f"host={name} port={near.port} dbname=p0 user=bob"})
    same(t.connect(p).one("SELECT 40 + 2"), "42")


@check("database/host-name")
def host_name(t):
    p = t.tx(databases={"p0": t.target(host="localhost")})
    same(t.connect(p).one("SELECT 1"), "1")


@check("database/host-name-moves", slow=True)
def host_name_moves(t):
    if os.geteuid() != 0:
        return  # needs a mount of its own
    p = t.tx({"dns_max_ttl": 0, "server_login_retry": "0.2", "default_pool_size": 2},
             databases={"p0": t.target(host="moves.test")}, own_hosts=True, files={"hosts": "127.0.0.1 moves.test\n"})
    first, second = t.connect(p), t.connect(p)
    pid = backend_pid(first)
    first.query("BEGIN")
    p.write("hosts", "127.0.0.9 moves.test\n")
    # A further connection asks for the name again, and finds nobody at the new address.
    t.background(second.query, "SELECT 1")
    p.wait_log("connect failed")
    same(backend_pid(first), pid, "the transaction keeps its server")
    first.query("COMMIT")
    p.wait_log("obsolete connection|close_needed")
    p.write("hosts", "127.0.0.1 moves.test\n")

    def served():
        try:
            with t.connect(p) as client:
                return backend_pid(client)
        except (wire.PgError, wire.Closed):
            return None  # the failure to connect is remembered for server_login_retry

    host.wait_until(lambda: served() not in (None, pid), what="served by a new connection")


@check("database/host-name-moves-after-its-ttl", slow=True)
def host_name_moves_ttl(t):
    if os.geteuid() != 0:
        return  # needs a mount of its own
    p = t.tx({"dns_max_ttl": 1, "server_login_retry": "0.2", "default_pool_size": 3},
             databases={"p0": t.target(host="moves.test")}, own_hosts=True, files={"hosts": "127.0.0.1 moves.test\n"})
    clients = [t.connect(p) for _ in range(3)]
    asked = time.monotonic()
    pid = backend_pid(clients[0])
    clients[0].query("BEGIN")
    p.write("hosts", "127.0.0.9 moves.test\n")
    # Within its time the old answer serves a further connection, if this machine is quick enough to ask.
    other = clients[1].one("SELECT pg_backend_pid()") if time.monotonic() < asked + 0.5 else None
    assert other is None or "connect failed" not in p.log(), "asked again too early"
    if other is not None:
        assert other != pid, "a connection of its own"
        clients[1].query("BEGIN")
    time.sleep(max(0, asked + 1.3 - time.monotonic()))
    # Nobody says RELOAD: the next connection asks again, and finds nobody at the new address.
    t.background(clients[2].query, "SELECT 1")
    p.wait_log("connect failed")
    same(backend_pid(clients[0]), pid, "the transaction keeps its server")
    clients[0].query("COMMIT")
    p.wait_log("obsolete connection|close_needed")
    assert "RELOAD" not in p.log(), "nobody did"


@check("database/unknown-host-name", slow=True)
def unknown_host(t):
    p = t.tx({"query_wait_timeout": "1"}, databases={"p0": t.target(host="no-such-host.invalid")})
    fails("", lambda: t.connect(p).query("SELECT 1"))
    p.wait_log("server DNS lookup failed|DNS lookup failed")


@check("database/host-list-round-robin")
def host_list(t):
    p = t.tx(databases={"p0": t.target(host=f"127.0.0.1,{t.pg.directory}")})
    clients = [t.connect(p) for _ in range(2)]
    for client in clients:
        client.query("BEGIN")
    same(sorted(str(c.one("SELECT inet_server_addr()")) for c in clients), ["127.0.0.1", "None"])


@check("database/load_balance_hosts-disable")
def load_balance_disable(t):
    p = t.tx(databases={"p0": t.target(host=f"127.0.0.1,{t.pg.directory}", load_balance_hosts="disable")})
    clients = [t.connect(p) for _ in range(3)]
    for client in clients:
        client.query("BEGIN")
    same({c.one("SELECT inet_server_addr()") for c in clients}, {"127.0.0.1"})


@check("database/server-restart")
def server_restart(t):
    server = t.keep(postgres.Postgres(tls=False))
    p = t.tx({"server_login_retry": "0.2"}, databases={"p0": f"host=127.0.0.1 port={server.port}"})
    client = t.connect(p)
    client.query("SELECT 1")
    server.stop()
    server.start()
    host.wait_until(lambda: p.pool()["sv_idle"] == "0", what="dead server seen")
    same(client.one("SELECT 1"), "1")


# --- logs


@check("log/connections")
def log_connections(t):
    p = t.pooler()
    client = p.connect(params={"application_name": "x"})
    client.query("SELECT 1")
    client.close()
    p.wait_log("login attempt: db=p0 user=bob tls=no")
    p.wait_log(r"S-\S+: p0/bob@127.0.0.1:\d+ new connection to server \(from 127.0.0.1")
    p.wait_log(r"C-\S+: p0/bob@127.0.0.1:\d+ closing because: client close request \(age=\d+s\)")


@check("log/connections-off")
def log_off(t):
    p = t.pooler({"log_connections": 0, "log_disconnections": 0})
    with t.connect(p) as client:
        client.query("SELECT 1")
    time.sleep(0.2)
    for text in ("login attempt", "closing because", "new connection to server"):
        assert text not in p.log(), text


@check("log/line-format")
def log_format(t):
    p = t.pooler()
    line = p.wait_log("(?m)^.*process up.*$")[0]
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} \S+ \[\d+\] LOG process up: ", line), line


@check("log/pooler-errors")
def log_errors(t):
    p = t.pooler()
    fails("no such database", p.connect, database="nope")
    p.wait_log("WARNING C-.*pooler error: no such database: nope")


@check("log/stats", slow=True)
def log_stats(t):
    p = t.tx({"stats_period": 1})
    t.connect(p).query("SELECT 1")
    p.wait_log(r"LOG stats: \d+ xacts/s, .*\d+ queries/s, .*in \d+ B/s, out \d+ B/s, xact \d+ us, query \d+ us, "
               r"wait \d+ us")


@check("log/reopen-on-hup")
def log_reopen(t):
    p = t.pooler()
    os.rename(p.log_path, p.path("old.log"))
    p.signal(signal.SIGHUP)
    # The new file begins with the next line.
    host.wait_until(lambda: backend_pid(t.connect(p)) and os.path.exists(p.log_path), step_s=0.1, what="new log file")
