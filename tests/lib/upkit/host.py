# SPDX-License-Identifier: Apache-2.0
"""The machine under the fixtures: unprivileged user, free ports, directories, PostgreSQL's binaries."""

import contextlib
import fcntl
import glob
import os
import pwd
import random
import shutil
import socket
import subprocess
import tempfile
import time

# The repository's root: tests/lib/upkit/host.py is three folders below it.
ROOT = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", "..", ".."))

# Below the usual start of the ephemeral range (32768), so that no outgoing connection takes a port that a
# fixture has chosen but not bound yet.
PORT_RANGE = range(20000, 32000)


class SetupError(Exception):
    """Something that the machine lacks; the message says what to install or to set."""


def service_user():
    """The user that PostgreSQL and the poolers run as: both refuse root. None when we are not root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            pwd.getpwnam(name)
            return name
    raise SetupError("running as root, and there is no user postgres or nobody to drop to")


def service_user_name():
    """Name of the user that fixtures' processes run as, root or not."""
    return service_user() or pwd.getpwuid(os.geteuid()).pw_name


def run_as(user):
    """Keyword arguments for subprocess that make the child run as `user` (None: no change)."""
    if user is None:
        return {}
    entry = pwd.getpwnam(user)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def own(path, user=None):
    """Gives `path` to the service user, so that a child which dropped root can use it."""
    name = user or service_user()
    if name is not None:
        entry = pwd.getpwnam(name)
        os.chown(path, entry.pw_uid, entry.pw_gid)
    return path


def temp_dir(prefix):
    """A fresh directory of the service user. Short, because unix socket paths end at 107 bytes."""
    return own(tempfile.mkdtemp(prefix=f"up-{prefix}-", dir="/tmp"))


def cache_dir(*parts):
    """A directory that outlives runs: packages, source archives, server versions. UNDERPASS_TEST_CACHE moves it."""
    # Root's home is closed to the service user, which runs some of what is kept here.
    home = "/var/cache" if os.geteuid() == 0 else os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    base = os.environ.get("UNDERPASS_TEST_CACHE") or os.path.join(home, "underpass-tests")
    path = os.path.join(base, *parts)
    os.makedirs(path, exist_ok=True)
    return path


_ports_held = []  # lock files, open until the process ends


def free_port():
    """A TCP port that no fixture of any process on this machine uses, until this process ends."""
    locks = "/tmp/underpass-test-ports"
    os.makedirs(locks, mode=0o1777, exist_ok=True)
    with contextlib.suppress(PermissionError):
        os.chmod(locks, 0o1777)
    for _ in range(2000):
        port = random.choice(PORT_RANGE)
        try:
            lock = open(os.path.join(locks, str(port)), "a")
        except PermissionError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except OSError:
            lock.close()
            continue
        _ports_held.append(lock)
        return port
    raise SetupError("no free TCP port in 20000-31999")


def pg_bin(name=""):
    """Path of a PostgreSQL program: PG_BIN, else the newest Debian version, else PATH."""
    dirs = [os.environ["PG_BIN"]] if os.environ.get("PG_BIN") else []
    dirs += sorted(glob.glob("/usr/lib/postgresql/*/bin"), key=lambda d: int(d.split("/")[4]), reverse=True)
    for directory in dirs:
        if os.path.exists(os.path.join(directory, "initdb")):
            return os.path.join(directory, name)
    found = shutil.which("initdb")
    if found:
        return os.path.join(os.path.dirname(os.path.realpath(found)), name)
    raise SetupError("PostgreSQL's server programs not found: apt-get install postgresql, or set PG_BIN")


def wait_until(condition, timeout_s=60.0, step_s=0.01, what="condition"):
    """Polls until `condition()` is true and returns its value; AssertionError after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(step_s)


def stop(process, signal_number, timeout_s=10):
    """Ends a child of ours; SIGKILL when it does not follow."""
    if process.poll() is None:
        process.send_signal(signal_number)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
