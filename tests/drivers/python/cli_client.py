# SPDX-License-Identifier: Apache-2.0
"""PostgreSQL's own programs: psql, pgbench, pg_dump and pg_restore."""

import os
import re
import subprocess
import sys
import tempfile

from harness import CA, DATABASE, HOST, PASSWORD, PORT, REPEATS, TABLE, USER, check, run

BIN = os.environ["DRIVER_PG_BIN"]
ENV = {**os.environ, "PGHOST": HOST, "PGPORT": str(PORT), "PGUSER": USER, "PGPASSWORD": PASSWORD,
       "PGDATABASE": DATABASE, "PGSSLMODE": "disable", "PGCONNECT_TIMEOUT": "20"}


def program(name, *args, env=None, stdin=None, ok=True, timeout=120):
    """Runs a program; its output, or AssertionError with what it said."""
    done = subprocess.run([os.path.join(BIN, name), *args], env={**ENV, **(env or {})}, input=stdin, text=True,
                          capture_output=True, timeout=timeout, check=False)
    if ok and done.returncode:
        raise AssertionError(f"{name}: {done.stderr.strip()[-400:]}")
    return done.stdout if ok else done.stdout + done.stderr


def psql(*args, **kwargs):
    """psql without start-up file, tuples only."""
    return program("psql", "-XAtq", "-v", "ON_ERROR_STOP=1", *args, **kwargs)


def psql_connect_scram():
    assert psql("-c", "SELECT current_user").strip() == USER


def psql_connect_tls_require():
    assert "SSL connection" in psql("-c", "\\conninfo", env={"PGSSLMODE": "require"})


def psql_connect_tls_verify_full():
    psql("-c", "SELECT 1", env={"PGSSLMODE": "verify-full", "PGSSLROOTCERT": CA})


def psql_script():
    out = psql(stdin="SELECT 1;\nBEGIN;\nSELECT 2 \\gset x_\nSELECT :'x_?column?';\nROLLBACK;\n"
                     "SELECT $1 + 1 \\bind 4 \\g\n" if psql_major() >= 16 else "SELECT 1;\nBEGIN;\nSELECT 2;\nROLLBACK;\n")
    assert out.split()[:2] == ["1", "2"], out


def psql_major():
    """Major version of psql."""
    return int(re.search(r"(\d+)", program("psql", "--version"))[1])


def psql_error_and_notice():
    out = psql("-c", "DO $$BEGIN RAISE NOTICE 'hello'; END$$", "-c", "SELECT 1/0", ok=False)
    assert "hello" in out and "division by zero" in out, out


def psql_copy():
    lines = "".join(f"{n}\trow {n}\n" for n in range(5000))
    table = f"{TABLE}_psql"
    psql("-c", f"CREATE TABLE {table} (a int, b text)")
    psql("-c", f"\\copy {table} FROM STDIN", stdin=lines)
    assert psql("-c", f"\\copy (SELECT * FROM {table} ORDER BY a) TO STDOUT") == lines
    psql("-c", f"DROP TABLE {table}")


def psql_describe():
    assert "pg_class" in psql("-c", "\\dt pg_catalog.*")


def psql_large_value():
    assert len(psql("-c", "SELECT repeat('x', 16777216)").strip()) == 16777216


def psql_cancel():
    out = psql("-c", "SET statement_timeout = 300", "-c", "SELECT pg_sleep(20)", ok=False) \
        if os.environ["DRIVER_MODE"] != "transaction" else psql("-c", "BEGIN; SET LOCAL statement_timeout = 300; "
                                                                "SELECT pg_sleep(20)", ok=False)
    assert "canceling statement" in out, out


def psql_interrupt():
    """What Ctrl-C does: psql sends a CancelRequest on its own connection."""
    import signal
    import time
    process = subprocess.Popen([os.path.join(BIN, "psql"), "-XAtq", "-c", "SELECT pg_sleep(20)"], env=ENV, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(0.7)
    process.send_signal(signal.SIGINT)
    assert "canceling statement due to user request" in process.communicate(timeout=15)[1]


def session_psql_listen():
    out = psql("-c", "LISTEN news", "-c", "NOTIFY news, 'hello'", "-c", "SELECT 1")
    assert "hello" in out, out


def psql_parameters():
    env = {"PGAPPNAME": "cli", "PGTZ": "Asia/Tokyo"}
    sql = "SELECT current_setting('TimeZone'), current_setting('application_name')"
    assert psql("-c", sql, env=env).strip() == "Asia/Tokyo|cli"
    assert psql("-c", sql, env={"PGAPPNAME": "other"}).strip() == "UTC|other"


def pgbench_init():
    program("pgbench", "-i", "-q", "-s", "1")


def pgbench_mode(mode):
    """TPC-B like load in one protocol mode; no failed transaction, and the books balance."""
    def body():
        # A thread per client: pgbench prepares with a blocking call, so two clients of one thread can wait for each
        # other when there are fewer servers than clients.
        out = program("pgbench", "-n", "-M", mode, "-c", "8", "-j", "8", "-t", "100")
        assert "number of transactions actually processed: 800/800" in out, out
        assert psql("-c", "SELECT (SELECT sum(bbalance) FROM pgbench_branches) "
                          "= (SELECT sum(abalance) FROM pgbench_accounts)").strip() == "t"
    body.__name__ = f"pgbench_{mode}"
    return body


def pgbench_connect_each():
    out = program("pgbench", "-n", "-C", "-S", "-c", "4", "-t", "25")
    assert "100/100" in out, out


def pgbench_pipeline():
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
        script.write("\\set a random(1, 1000)\n\\startpipeline\n"
                     + "SELECT abalance FROM pgbench_accounts WHERE aid = :a;\n" * 20 + "\\endpipeline\n")
        script.flush()
        for mode in ("extended", "prepared"):
            out = program("pgbench", "-n", "-M", mode, "-f", script.name, "-c", "4", "-j", "4", "-t", "50")
            assert "200/200" in out, out


def repeated():
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
        script.write("\\set n random(1, 100)\nSELECT :n * 2;\n")
        script.flush()
        out = program("pgbench", "-n", "-M", "prepared", "-f", script.name, "-c", "2", "-j", "2", "-t", str(REPEATS))
        assert f"{2 * REPEATS}/{2 * REPEATS}" in out, out


def dump_and_restore():
    table = f"public.{TABLE}_dump"
    psql("-c", f"CREATE TABLE {table} AS SELECT g AS a, md5(g::text) AS b FROM generate_series(1, 20000) g",
         "-c", f"CREATE INDEX ON {table} (b)")
    sums = psql("-c", f"SELECT count(*), md5(string_agg(b, '' ORDER BY a)) FROM {table}")
    with tempfile.TemporaryDirectory() as directory:
        file = os.path.join(directory, "dump")
        program("pg_dump", "-Fc", "-t", table, "-f", file)
        psql("-c", f"DROP TABLE {table}")
        program("pg_restore", "-d", DATABASE, "--no-owner", file)
    assert psql("-c", f"SELECT count(*), md5(string_agg(b, '' ORDER BY a)) FROM {table}") == sums
    psql("-c", f"DROP TABLE {table}")


def dump_parallel():
    with tempfile.TemporaryDirectory() as directory:
        program("pg_dump", "-Fd", "-j", "2", "-t", "pgbench_*", "-f", os.path.join(directory, "d"))


def session_dump_leaves_search_path_alone():
    # pg_dump empties search_path for its session; the next user of the server must not inherit that.
    program("pg_dump", "-s", "-t", "pgbench_branches")
    assert psql("-c", "SHOW search_path").strip() == '"$user", public'


PROGRAMS = {
    "psql": [psql_connect_scram, psql_connect_tls_require, psql_connect_tls_verify_full, psql_script,
             psql_error_and_notice, psql_copy, psql_describe, psql_large_value, psql_cancel, psql_interrupt,
             session_psql_listen, psql_parameters],
    "pgbench": [pgbench_init, pgbench_mode("simple"), pgbench_mode("extended"), pgbench_mode("prepared"),
                pgbench_connect_each, pgbench_pipeline, repeated],
    "pg_dump": [pgbench_init, dump_and_restore, dump_parallel, session_dump_leaves_search_path_alone],
}
for function in PROGRAMS[sys.argv[1]]:
    check(function)
run()
