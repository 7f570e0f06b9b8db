# SPDX-License-Identifier: Apache-2.0
"""A pooler process: Underpass or PgBouncer, started with the same ini file."""

import os
import re
import shutil
import signal
import subprocess

from . import host, wire

KINDS = ("underpass", "pgbouncer", "direct")

AUTH_FILE = """\
"admin" "admin"
"stats" "stats"
"bob" "bob"
"alice" "alice"
"scram_user" "scram_user"
"scram_two" "scram_two"
"md5_user" "md5_user"
"plain_user" "plain_user"
"tls_user" "tls_user"
"cert_user" "cert_user"
"replica" "replica"
"""


def kind():
    """What the suite runs against: POOLER=underpass (default), pgbouncer, or direct where that makes sense."""
    value = os.environ.get("POOLER", "underpass")
    if value not in KINDS:
        raise host.SetupError(f"POOLER={value}: expected one of {', '.join(KINDS)}")
    return value


def command(which):
    """Command line before the ini file."""
    if which == "pgbouncer":
        path = os.environ.get("PGBOUNCER_BIN") or shutil.which("pgbouncer", path=os.environ["PATH"] + ":/usr/sbin")
        if not path:
            raise host.SetupError("pgbouncer not found: apt-get install pgbouncer, or set PGBOUNCER_BIN")
        return [path]
    path = os.environ.get("UNDERPASS_BIN")
    for profile in ("release", "debug"):
        path = path or next(filter(os.path.exists, [os.path.join(host.ROOT, "target", profile, "underpass")]), None)
    if not path:
        raise host.SetupError("target/release/underpass not found: make build, or set UNDERPASS_BIN")
    # The service user may not enter the directory that the build is in.
    return [_reachable(path), "pooler"]


def kernel_path():
    """KERNEL_PATH=off, auto or require: how Underpass is to use its kernel lanes; None leaves the default."""
    value = os.environ.get("KERNEL_PATH")
    if value not in (None, "off", "auto", "require"):
        raise host.SetupError(f"KERNEL_PATH={value}: expected off, auto or require")
    return value


_copies = {}


def _reachable(path):
    user = host.service_user()
    if user is None or subprocess.run(["test", "-x", path], check=False, **host.run_as(user)).returncode == 0:
        return path
    if path not in _copies:
        _copies[path] = shutil.copy(path, host.temp_dir("bin"))
    return _copies[path]


def version(which):
    """First line of --version, for reports."""
    if which == "direct":
        return "direct"
    argv = command(which)
    out = subprocess.run([argv[0], "--version"], capture_output=True, text=True, check=False)
    return (out.stdout or out.stderr).splitlines()[0] if (out.stdout or out.stderr) else which


def label(which):
    """Name for lists of differences: underpass, direct, pgbouncer-1.18."""
    if which != "pgbouncer":
        return which
    found = re.search(r"(\d+\.\d+)", version(which))
    return f"pgbouncer-{found[1]}" if found else which


class StartFailed(Exception):
    """The pooler ended before it answered; `output` is what it wrote."""

    def __init__(self, code, output):
        self.code, self.output = code, output
        super().__init__(f"exit code {code}: {output.strip()[-600:]}")


class Pooler:
    """One pooler process with its own directory, port and ini file.

    `databases`, `users`: name -> value of their section. `settings`: keys of [pgbouncer]; None removes a default.
    `raw` is appended as it is. Listens on 127.0.0.1 and on a unix socket in `directory`. With `own_hosts` its file "hosts"
    stands for /etc/hosts, for which we must be root.
    """

    def __init__(self, databases, settings=None, users=None, which=None, auth_file=AUTH_FILE, raw="", files=None,
                 wait=True, args=(), extra_sections=None, own_hosts=False):
        self.own_hosts = own_hosts
        self.which = which or kind()
        self.directory = host.temp_dir("pooler")
        self.port = host.free_port()
        self.process = None
        self.databases, self.users, self.raw = dict(databases), dict(users or {}), raw
        self.extra_sections = extra_sections or {}
        self.log_path = self.path("pooler.log")
        self.ini = self.path("pooler.ini")
        self.settings = {
            "listen_addr": "127.0.0.1", "listen_port": self.port, "unix_socket_dir": self.directory,
            "auth_type": "trust", "auth_file": self.write("userlist.txt", auth_file), "admin_users": "admin",
            "stats_users": "stats", "logfile": self.log_path, "pidfile": self.path("pooler.pid"),
        }
        if self._wants_lanes():
            # Lanes carry no TLS, which the default asks for.
            self.settings["server_tls_sslmode"] = "disable"
        self.settings.update(settings or {})
        for name, text in (files or {}).items():
            self.write(name, text)
        self.args = list(args)
        try:
            self.write_ini()
            self.start(wait)
        except BaseException:
            self.close()
            raise

    def _wants_lanes(self):
        return self.which == "underpass" and kernel_path() in ("auto", "require")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # --- files

    def path(self, name):
        """Path of a file in the pooler's directory."""
        return os.path.join(self.directory, name)

    def write(self, name, text, mode=0o600):
        """Writes a file that the pooler may read; returns its path."""
        path = self.path(name)
        with open(path, "w", encoding="utf-8") as out:
            out.write(text)
        os.chmod(path, mode)
        return host.own(path)

    def write_ini(self):
        """Writes the ini file from `databases`, `users`, `settings`, `raw`. {dir} stands for the directory."""
        lines = ["[databases]", *(f"{name} = {value}" for name, value in self.databases.items())]
        if self.users:
            lines += ["[users]", *(f"{name} = {value}" for name, value in self.users.items())]
        sections = dict(self.extra_sections)
        if self.which == "underpass" and kernel_path():
            sections["underpass"] = {"kernel_path": kernel_path(), **sections.get("underpass", {})}
        for section, entries in sections.items():
            lines += [f"[{section}]", *(f"{name} = {value}" for name, value in entries.items())]
        lines += ["[pgbouncer]", *(f"{key} = {value}" for key, value in self.settings.items() if value is not None)]
        lines += [self.raw, ""]
        self.write("pooler.ini", "\n".join(lines).replace("{dir}", self.directory))

    # --- process

    def start(self, wait=True):
        """Starts the process; with `wait`, until it accepts on its unix socket (TCP if it has none)."""
        self.output = open(self.path("output"), "w+", encoding="utf-8", errors="replace")
        user, args = host.service_user(), self.args
        if (self._wants_lanes() or self.own_hosts) and user is not None:
            # Lanes are made as root, mounts too; then the pooler becomes the user by itself.
            user, args = None, ["-u", user, *args]
        begin = command(self.which)
        if self.own_hosts:
            mount = 'mount --bind "$0" /etc/hosts && exec "$@"'
            begin = ["unshare", "--mount", "sh", "-c", mount, self.path("hosts"), *begin]
        # Relative %include is resolved against the working directory.
        self.process = subprocess.Popen([*begin, *args, self.ini], cwd=self.directory,
                                        stdin=subprocess.DEVNULL, stdout=self.output, stderr=self.output,
                                        **host.run_as(user))
        if wait:
            host.wait_until(self._accepts, 60, 0.005, "pooler accepts connections")

    def _accepts(self):
        if self.process.poll() is not None:
            raise StartFailed(self.process.returncode, self.log() or self.stderr())
        # The unix socket comes last in PgBouncer's start; where there is none, TCP must do.
        unix = self.settings["unix_socket_dir"]
        address = unix if unix else "127.0.0.1"
        port = self.port if unix else self.settings["listen_port"]
        try:
            wire.Conn(address, port, handshake=False).sock.close()
            return True
        except OSError:
            return False

    def stderr(self):
        """What the process wrote to standard output and error."""
        with open(self.path("output"), encoding="utf-8", errors="replace") as out:
            return out.read()

    def log(self):
        """The log file so far."""
        try:
            with open(self.log_path, encoding="utf-8", errors="replace") as log:
                return log.read()
        except FileNotFoundError:
            return ""

    def wait_log(self, pattern, timeout_s=60):
        """Waits for a line of the log that matches the regular expression."""
        return host.wait_until(lambda: re.search(pattern, self.log()), timeout_s, what=f"log line /{pattern}/")

    def signal(self, number):
        """Sends a signal."""
        self.process.send_signal(number)

    def exited(self, timeout_s=60):
        """Waits for the end of the process; returns its exit code."""
        return self.process.wait(timeout_s)

    def running(self):
        """True while the process lives."""
        return self.process.poll() is None

    def close(self):
        """Ends the process (SIGQUIT: at once) and removes the directory."""
        if self.process:
            host.stop(self.process, signal.SIGQUIT, 5)
            self.output.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    # --- connections

    def connect(self, user="bob", database="p0", unix=False, **kwargs):
        """A client of this pooler; the password is the user's name unless given."""
        kwargs.setdefault("password", user)
        return wire.Conn(self.directory if unix else "127.0.0.1", self.port, user, database, **kwargs)

    def admin(self, sql=None, user="admin"):
        """Without `sql` a console connection; with it, the dictionaries of the rows."""
        if sql is None:
            return self.connect(user, "pgbouncer")
        with self.connect(user, "pgbouncer") as conn:
            results = conn.query(sql)
            return results[-1].dicts() if results else []

    def pool(self, database="p0", user="bob"):
        """The row of SHOW POOLS."""
        for row in self.admin("SHOW POOLS"):
            if (row["database"], row["user"]) == (database, user):
                return row
        return None

    def reload(self):
        """Writes the ini file and RELOADs."""
        self.write_ini()
        self.admin("RELOAD")
