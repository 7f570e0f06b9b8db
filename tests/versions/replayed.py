# SPDX-License-Identifier: Apache-2.0
"""A workload of one server, recorded by `underpass trace` and played by `underpass replay` on another that began with the same data."""

import json
import os
import re
import signal
import subprocess
import tempfile
import time

from upkit import host, pooler, wire

READY_S = 30
END_S = 120
TEXTS_S = 2
# Exit status of --require-lossless where something is missing, and what is said of a session that waited when the probes came.
LOSSY = 3
JOINED = re.compile(r"^losses +1 probed sessions under way whose first request may be missing$", re.MULTILINE)
DATABASE = "p1"
SETUP = """
CREATE TABLE item (id int PRIMARY KEY, price numeric(9, 2), name text);
INSERT INTO item SELECT g, g * 1.5, 'item ' || g FROM generate_series(1, 500) g;
ALTER TABLE item OWNER TO bob;
GRANT ALL ON SCHEMA public TO bob;
"""
# What pgbench stamps with the time is left out.
DATA = (
    "SELECT id, price, name FROM item ORDER BY id",
    "SELECT aid, abalance FROM pgbench_accounts WHERE abalance <> 0 ORDER BY aid",
    "SELECT tid, bid, aid, delta FROM pgbench_history ORDER BY aid, tid, delta",
    "SELECT * FROM made ORDER BY a",
)
# Prepared before the recording begins, and used twice while it goes on.
PREPARED = {
    "by_id": ("SELECT name, price FROM item WHERE id = $1", [[7], [9999]]),
    "by_price": ("UPDATE item SET price = price + $1::numeric WHERE id BETWEEN $2::int AND $3::int RETURNING id, price",
                 [["0.5", 1, 20], ["1", 10, 30]]),
    "add": ("INSERT INTO item VALUES ($1, $2, $3)", [[1001, "9.99", "new"], [1002, None, "it's"]]),
}


def pgbench(server, *args):
    """pgbench as bob by TCP; with -i not."""
    done = subprocess.run([host.pg_bin("pgbench"), "-h", "127.0.0.1", "-p", str(server.port), "-U", "bob", *args, DATABASE],
                          capture_output=True, text=True, timeout=END_S, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout


def prepare_data(server):
    """The same in both servers."""
    with server.connect("postgres", DATABASE) as admin:
        admin.query(SETUP)
    pgbench(server, "-iq")


def data(server):
    """What both must have in the end."""
    with server.connect("postgres", DATABASE) as admin:
        return [admin.query(query)[-1].rows for query in DATA]


def work(server, sessions):
    """The workload: sessions from before, psql-like and extended queries, an error, COPY, DDL, TPC-B."""
    for turn in range(2):
        for session in sessions:
            for name, (_, values) in PREPARED.items():
                try:
                    session.execute("", values[turn], name=name, prepare=False)
                except wire.PgError as error:
                    # The second session adds what is there.
                    assert error.sqlstate == "23505", error
        # The first use makes the recorder look for the text at the next.
        time.sleep(TEXTS_S * (turn == 0))
    with server.connect("bob", DATABASE) as c:
        c.query("CREATE TABLE made (a int, b text); INSERT INTO made SELECT g, repeat('x', g) FROM generate_series(1, 200) g")
        c.query("BEGIN; UPDATE made SET b = 'one' WHERE a < 10; SAVEPOINT s; DELETE FROM made; ROLLBACK TO s; COMMIT")
        assert len(c.execute("SELECT * FROM made WHERE a > $1::int", [150])) == 50
    for mode in ("simple", "extended", "prepared"):
        assert "60/60" in pgbench(server, "-n", "-M", mode, "-c", "3", "-j", "3", "-t", "20"), mode


def record(server, program, trace):
    """Records the workload: all of it but what the first session, by a Unix socket, says first, which reads."""
    sessions = [server.connect("bob", DATABASE), wire.Conn("127.0.0.1", server.port, "bob", DATABASE)]
    for session in sessions:
        for name, (query, _) in PREPARED.items():
            session.send_raw(wire.parse(name, query) + wire.message("S"))
            session.finish()
    with open(trace + ".log", "w+", encoding="utf-8") as log:
        process = subprocess.Popen([program, "trace", "-p", str(server.port), "-o", trace, "--level", "full",
                                    "--require-lossless"], stdout=log, stderr=log, stdin=subprocess.DEVNULL)

        def told():
            log.seek(0)
            return log.read()

        def is_ready():
            assert process.poll() is None, told()
            return "recording" in told()
        try:
            host.wait_until(is_ready, READY_S, 0.05, "underpass trace records")
            work(server, sessions)
            for session in sessions:
                session.close()
            process.send_signal(signal.SIGINT)
            # The server waited for the first request of the session by the socket inside the probed function.
            assert process.wait(END_S) == LOSSY and JOINED.search(told()), told()[-1500:]
        finally:
            process.kill()
            process.wait()


def exported(program, trace):
    """The trace's records."""
    done = subprocess.run([program, "export", "-f", "jsonl", trace], capture_output=True, text=True, timeout=END_S, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(server, copy):
    """Records `server` and plays on `copy`: the texts that were prepared before are known, all is played, and comes out equal."""
    program = pooler.command("underpass")[0]
    for one in (server, copy):
        prepare_data(one)
    with tempfile.TemporaryDirectory(prefix="up-replay-", dir="/tmp") as directory:
        trace, report = os.path.join(directory, "trace"), os.path.join(directory, "report.json")
        record(server, program, trace)
        fills = sorted((one["name"], one["query"]) for one in exported(program, trace) if one["kind"] == "prepared_fill")
        # Of both sessions: by its socket and by TCP.
        assert fills == sorted([(name, query) for name, (query, _) in PREPARED.items()] * 2), fills
        done = subprocess.run([program, "replay", trace, "--to", f"host={copy.directory} port={copy.port} user=postgres",
                               "--pace", "asap", "--order", "commit", "--rows", "ordered", "--require-equal", "--json", report],
                              capture_output=True, text=True, timeout=END_S, check=False)
        assert done.returncode == 0, f"exit status {done.returncode}: {(done.stderr + done.stdout)[:4000]}"
        with open(report, encoding="utf-8") as file:
            told = json.load(file)
    counts = told["counts"]
    assert counts["midstream_sessions"] == 2 and counts["unknown"] == 0, counts
    assert counts["units"] == counts["answered"] == counts["equal"] >= 300, counts
    assert not any(told["omitted"].values()), told["omitted"]
    assert data(server) == data(copy), "other data"
