# SPDX-License-Identifier: Apache-2.0
"""A private PostgreSQL server."""

import os
import shutil
import signal
import subprocess

from . import certs, host, wire

# The password of each user is its name. SCRAM and md5 secrets are stored accordingly.
HBA = """\
local   all  all                     trust
host    all  peer_only  all          reject
hostssl all  tls_user   all          scram-sha-256
host    all  tls_user   all          reject
hostssl all  cert_user  all          cert
host    all  scram_user all          scram-sha-256
host    all  scram_two  all          scram-sha-256
host    all  md5_user   all          md5
host    all  plain_user all          password
host    all  all        all          trust
local   replication all              trust
host    replication all all          trust
"""

USERS = """\
CREATE ROLE admin SUPERUSER LOGIN PASSWORD 'admin';
CREATE ROLE bob LOGIN PASSWORD 'bob';
CREATE ROLE alice LOGIN PASSWORD 'alice';
CREATE ROLE scram_user LOGIN PASSWORD 'scram_user';
CREATE ROLE scram_two LOGIN PASSWORD 'scram_two';
CREATE ROLE plain_user LOGIN PASSWORD 'plain_user';
CREATE ROLE tls_user LOGIN PASSWORD 'tls_user';
CREATE ROLE cert_user LOGIN PASSWORD 'cert_user';
CREATE ROLE replica REPLICATION LOGIN PASSWORD 'replica';
SET password_encryption = 'md5';
CREATE ROLE md5_user LOGIN PASSWORD 'md5_user';
"""

SETTINGS = {
    "fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "max_connections": "300",
    "shared_buffers": "64MB", "max_wal_senders": "4", "wal_level": "logical", "log_connections": "off",
    "max_prepared_transactions": "10", "lc_messages": "C", "timezone": "UTC", "logging_collector": "off",
    "password_encryption": "scram-sha-256",
}


class Postgres:
    """A cluster in a temporary directory, listening on 127.0.0.1 and a unix socket, with TLS offered.

    Databases: postgres, p0, p1. Users: see USERS. `directory` also holds the certificates (`certs`).
    """

    def __init__(self, bin_dir=None, settings=None, tls=True, databases=("p0", "p1"), env=None):
        self.bin_dir = bin_dir or host.pg_bin()
        self.env = {**os.environ, "LC_ALL": "C", **(env or {})}
        self.directory = host.temp_dir("pg")
        self.port = host.free_port()
        self.process = None
        try:
            self.certs = certs.Certificates(host.own(self._mkdir("certs"))) if tls else None
            self._init(settings or {})
            self.start()
            with self.connect(user=self.superuser, database="postgres") as conn:
                conn.query(USERS)
                for name in databases:
                    conn.query(f"CREATE DATABASE {name} OWNER bob")
                conn.query("GRANT pg_signal_backend TO bob")
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _mkdir(self, name):
        path = os.path.join(self.directory, name)
        os.mkdir(path)
        return host.own(path)

    def _init(self, settings):
        self.superuser = "postgres"
        data = os.path.join(self.directory, "data")
        self.run("initdb", "-D", data, "-U", self.superuser, "-A", "trust", "-N", "--locale=C", "-E", "UTF8")
        merged = {**SETTINGS, "port": str(self.port), "listen_addresses": "127.0.0.1",
                  "unix_socket_directories": self.directory}
        if self.certs:
            merged.update(ssl="on", ssl_cert_file=self.certs.server_cert, ssl_key_file=self.certs.server_key,
                          ssl_ca_file=self.certs.ca)
        merged.update(settings)
        with open(os.path.join(data, "postgresql.conf"), "a", encoding="utf-8") as conf:
            conf.writelines(f"{key} = '{value}'\n" for key, value in merged.items())
        hba = HBA if self.certs else "".join(line for line in HBA.splitlines(True) if "hostssl" not in line)
        with open(os.path.join(data, "pg_hba.conf"), "w", encoding="utf-8") as out:
            out.write(hba)

    def run(self, program, *args, **kwargs):
        """Runs one of this server's programs as the service user; returns its standard output."""
        done = subprocess.run([os.path.join(self.bin_dir, program), *args], env=self.env, capture_output=True,
                              text=True, cwd="/tmp", **host.run_as(host.service_user()), **kwargs)
        if done.returncode:
            raise host.SetupError(f"{program} {' '.join(args)}: {done.stdout}{done.stderr}")
        return done.stdout

    def start(self):
        """Starts the server and waits until it answers."""
        self.log_path = os.path.join(self.directory, "log")
        with open(self.log_path, "a", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [os.path.join(self.bin_dir, "postgres"), "-D", os.path.join(self.directory, "data")],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.env, cwd="/tmp",
                **host.run_as(host.service_user()))

        def answers():
            if self.process.poll() is not None:
                raise host.SetupError(f"PostgreSQL did not start:\n{self.log()[-2000:]}")
            try:
                self.connect(user=self.superuser, database="postgres").close()
                return True
            except (OSError, wire.PgError, wire.Closed):
                return False
        host.wait_until(answers, 60, 0.05, "PostgreSQL answers")

    def log(self):
        """The server's log so far."""
        with open(self.log_path, encoding="utf-8", errors="replace") as log:
            return log.read()

    def connect(self, user="bob", database="p0", **kwargs):
        """A connection over the unix socket (trust)."""
        return wire.Conn(self.directory, self.port, user, database, **kwargs)

    def stop(self, signal_number=signal.SIGINT):
        """Stops the server: SIGINT fast, SIGQUIT immediate, SIGKILL crash."""
        if self.process:
            host.stop(self.process, signal_number)
            self.process = None

    def close(self):
        """Stops the server and removes its directory."""
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.directory, ignore_errors=True)
