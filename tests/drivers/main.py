# SPDX-License-Identifier: Apache-2.0
"""Real clients, unmodified, through the pooler in session and transaction mode; and recorded by `underpass trace`.

Mode `trace` runs the same clients, and some of MariaDB, against a server whose workload is recorded, through a proxy that keeps
every byte: the trace must have exactly the messages that were sent, and DuckDB must find the same in its Parquet. It needs root, and
underpass as the pooler.

Clients are installed on demand with pinned versions, into a cache directory (UNDERPASS_TEST_CACHE). An install that
fails is a failure. POOLER=direct runs them against PostgreSQL itself.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.realpath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "lib"))

from upkit import account, host, mariadb, pooler, postgres, report

import recorded
import said

PGJDBC = "42.7.14"
CLIENT_TIMEOUT_S = 300
BUILD_TIMEOUT_S = 900

# Clients with a check `repeated`: 10,000 executions of what they have prepared. So many of them at least in a lane, and less than this share not.
REPEATING = ("pgbench", "psycopg", "asyncpg", "pgjdbc", "node-postgres", "pgx", "tokio-postgres")
REPEATED_MIN, REPEATED_USER_MAX = 9000, 0.01


class InstallFailed(Exception):
    """A client could not be installed or built."""


def command(*args, cwd=None, env=None):
    """Runs an install step."""
    try:
        done = subprocess.run(args, cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True,
                              timeout=BUILD_TIMEOUT_S, check=False)
    except FileNotFoundError as error:
        raise InstallFailed(f"{args[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise InstallFailed(f"{' '.join(args)}: no end in {BUILD_TIMEOUT_S} s") from error
    if done.returncode:
        raise InstallFailed(f"{' '.join(args)}: {(done.stderr or done.stdout).strip()[-600:]}")
    return done.stdout


def install_cli():
    """PostgreSQL's programs need no install: they came with the server."""
    return [sys.executable, os.path.join(HERE, "python", "cli_client.py")]


def install_python():
    """A virtual environment per set of pinned versions."""
    requirements = os.path.join(HERE, "python", "requirements.txt")
    directory = host.cache_dir("venv")
    python = os.path.join(directory, "bin", "python3")
    if not os.path.exists(python):
        command(sys.executable, "-m", "venv", directory)
    command(python, "-m", "pip", "install", "-q", "-r", requirements)
    return python


def install_psycopg():
    return [install_python(), os.path.join(HERE, "python", "psycopg_client.py")]


def install_asyncpg():
    return [install_python(), os.path.join(HERE, "python", "asyncpg_client.py")]


def install_node(program="client.mjs"):
    """node_modules is looked for beside the program, so that is copied to the cache."""
    directory = host.cache_dir("node")
    for file in ("package.json", program):
        shutil.copy(os.path.join(HERE, "node", file), directory)
    command("npm", "install", "--no-audit", "--no-fund", "--silent", cwd=directory)
    return ["node", os.path.join(directory, program)]


def install_java():
    """The jar by Maven, the program compiled against it."""
    directory = host.cache_dir("java")
    jar = os.path.join(directory, f"postgresql-{PGJDBC}.jar")
    if not os.path.exists(jar):
        command("mvn", "-q", "dependency:copy", f"-Dartifact=org.postgresql:postgresql:{PGJDBC}",
                f"-DoutputDirectory={directory}", cwd=directory)
    classes = host.cache_dir("java", "classes")
    command("javac", "-encoding", "UTF-8", "-cp", jar, "-d", classes, os.path.join(HERE, "java", "Client.java"))
    return ["java", "-Dfile.encoding=UTF-8", "-cp", f"{jar}:{classes}", "Client"]


def install_go():
    """Built with the pinned go.mod and go.sum."""
    binary = os.path.join(host.cache_dir("go"), "client")
    command("go", "build", "-o", binary, ".", cwd=os.path.join(HERE, "go"))
    return [binary]


def install_rust():
    """Built with its own workspace and target directory."""
    target = host.cache_dir("rust")
    source = host.cache_dir("rust-src")
    # A copy, so that its lock file does not land in the repository.
    shutil.copytree(os.path.join(HERE, "rust"), source, dirs_exist_ok=True, ignore=shutil.ignore_patterns("target"))
    command("cargo", "build", "-q", cwd=source, env={"CARGO_TARGET_DIR": target})
    return [os.path.join(target, "debug", "underpass-driver-tokio-postgres")]


CLIENTS = {
    "psql": install_cli, "pgbench": install_cli, "pg_dump": install_cli, "psycopg": install_psycopg,
    "asyncpg": install_asyncpg, "pgjdbc": install_java, "node-postgres": install_node, "pgx": install_go,
    "tokio-postgres": install_rust,
}

# Of MariaDB; for the recorder only.
MYSQL_CLIENTS = {
    "mariadb": lambda: [sys.executable, os.path.join(HERE, "python", "mariadb_client.py")],
    "pymysql": lambda: [install_python(), os.path.join(HERE, "python", "pymysql_client.py")],
    "mysql2": lambda: install_node("mysql2_client.mjs"),
}


def run_client(name, argv, environment, results, mode, options):
    """Runs one client and records its lines."""
    start = time.monotonic()
    seen = 0
    if name in ("psql", "pgbench", "pg_dump"):
        argv = [*argv, name]
    try:
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S,
                              check=False)
        output, end = done.stdout, f"exit code {done.returncode}: {done.stderr.strip()[-600:]}"
        clean = done.returncode == 0
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode()
        end, clean = f"no end in {CLIENT_TIMEOUT_S} s", False
    for line in output.splitlines():
        check, outcome, message = (line.split("\t") + ["", ""])[:3]
        if outcome not in ("ok", "fail"):
            continue
        seen += 1
        if options.k and options.k not in check:
            continue
        results.add(f"{mode}/{name}/{check}", None if outcome == "ok" else message or "failed")
    if not clean or not seen:
        results.add(f"{mode}/{name}/ends", end, time.monotonic() - start)


def start_pooler(server, mode, which):
    """Few servers for many clients in transaction mode, TLS on offer, SCRAM on both sides."""
    settings = {"pool_mode": mode, "auth_type": "scram-sha-256", "default_pool_size": 3 if mode == "transaction" else 30,
                "client_tls_sslmode": "prefer", "client_tls_key_file": server.certs.server_key,
                "client_tls_cert_file": server.certs.server_cert, "ignore_startup_parameters": "extra_float_digits",
                "server_tls_sslmode": "disable"}
    # pg_dump empties search_path for its session. Before PostgreSQL 18 no pooler is told, so the dump has its own pool.
    target = f"host=127.0.0.1 port={server.port} dbname=p0"
    return pooler.Pooler({"p0": target, "dump": target}, settings, which=which)


def audited(audit, target):
    """What is wrong with the pooler's account, if anything."""
    try:
        audit.look(target)
    except AssertionError as error:
        return error
    return None


def run_repeated(name, argv, environment, target, results, options):
    """What prepares once and executes often is to stay in its lane, logins and the first execution on each server included."""
    before = account.of(target)
    run_client(name, argv, {**environment, "DRIVER_ONLY": "repeated"}, results, "transaction", options)
    after = account.of(target)
    lanes, user = after.lanes - before.lanes, after.user - before.user
    said = (f"{user.total()} of {(lanes + user).total()} transactions in user space "
            f"({', '.join(f'{why} {count}' for why, count in sorted(user.items()))})")
    print(f"{name}, prepared once: {said}")
    is_enough = lanes.total() >= REPEATED_MIN and user.total() < REPEATED_USER_MAX * (lanes + user).total()
    results.add(f"transaction/{name}/repeated-in-lane", None if is_enough else said)


def record_clients(commands, server_port, decode, environment, results, options):
    """Each client has a recording of its own."""
    for name, argv in commands.items():
        try:
            # Simple and extended queries, with values of many types.
            reader = [install_python(), os.path.join(HERE, "python", "duckdb_reader.py")] if name == "psycopg" else None
            with recorded.Recording(server_port, decode, reader) as recording:
                of_client = {**environment, "DRIVER_PORT": str(recording.port), "DRIVER_MODE": "direct",
                             "DRIVER_TABLE": f"t_{name.replace('-', '_')}_trace"}
                run_client(name, argv, of_client, results, "trace", options)
            error = recording.difference
        except (host.SetupError, AssertionError, subprocess.TimeoutExpired) as failure:
            error = failure
        results.add(f"trace/{name}/recorded", error)


def main():
    parser = argparse.ArgumentParser(prog="tests/drivers/run.sh", description=__doc__)
    parser.add_argument("-c", metavar="CLIENT", action="append", choices=[*CLIENTS, *MYSQL_CLIENTS],
                        help="only this client")
    parser.add_argument("-m", metavar="MODE", action="append", choices=["session", "transaction", "trace"],
                        help="only this mode")
    parser.add_argument("-k", metavar="TEXT", help="only checks whose name contains TEXT")
    parser.add_argument("-o", metavar="FILE", help="results as JSON lines")
    parser.add_argument("-v", action="store_true", help="print every check")
    options = parser.parse_args()

    which = pooler.kind()
    if which != "direct":
        pooler.command(which)
    label = pooler.label(which)
    differences = report.Differences(os.path.join(HERE, "differences.tsv"), label)
    results = report.Report("drivers", label, differences, options.o, options.v)
    audit = account.Audit()
    modes = ["direct"] if which == "direct" else options.m or ["session", "transaction"]
    if which == "underpass" and not options.m and recorded.possible():
        modes.append("trace")
    wanted = {**CLIENTS, **(MYSQL_CLIENTS if "trace" in modes else {})}
    commands = {}
    for name in options.c or wanted:
        try:
            commands[name] = wanted[name]()
        except InstallFailed as error:
            results.add(f"install/{name}", error)
    of_mysql = {name: commands.pop(name) for name in list(commands) if name in MYSQL_CLIENTS}
    with postgres.Postgres() as server:
        with server.connect("admin") as admin:
            # Who runs pgbench and creates tables.
            admin.query("ALTER DATABASE p0 OWNER TO scram_user; ALTER SCHEMA public OWNER TO scram_user")
        for mode in modes:
            target = server if mode in ("direct", "trace") else start_pooler(server, mode, which)
            try:
                environment = {
                    **os.environ, "PYTHONPATH": os.path.join(HERE, "python"), "DRIVER_HOST": "localhost",
                    "DRIVER_PORT": str(target.port), "DRIVER_USER": "scram_user", "DRIVER_PASSWORD": "scram_user",
                    "DRIVER_DB": "p0", "DRIVER_CA": server.certs.ca, "DRIVER_MODE": mode,
                    "DRIVER_PG_BIN": host.pg_bin().rstrip("/")}
                if mode == "trace":
                    record_clients(commands, server.port, said.postgres, environment, results, options)
                    continue
                for name, argv in commands.items():
                    environment["DRIVER_DB"] = "dump" if name == "pg_dump" and target is not server else "p0"
                    environment["DRIVER_TABLE"] = f"t_{name.replace('-', '_')}_{mode}"
                    run_client(name, argv, environment, results, mode, options)
                    if audit.wanted and mode == "transaction" and name in REPEATING:
                        run_repeated(name, argv, environment, target, results, options)
                if audit.wanted and target is not server:
                    results.add(f"{mode}/account/explained", audited(audit, target))
            finally:
                if target is not server:
                    target.close()
    if audit.wanted:
        results.add("all/account/share", audit.close())
    if of_mysql:
        with mariadb.Mariadb() as server:
            environment = {**os.environ, "PYTHONPATH": os.path.join(HERE, "python"), "DRIVER_HOST": "127.0.0.1",
                           "DRIVER_USER": "ann", "DRIVER_PASSWORD": "ann", "DRIVER_DB": "shop", "DRIVER_CA": ""}
            record_clients(of_mysql, server.port, said.mysql, environment, results, options)
    return results.finish(lambda check: "/".join(check.split("/")[:2]))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except host.SetupError as error:
        print(error, file=sys.stderr)
        print("0 passed, 1 failed")
        sys.exit(1)
