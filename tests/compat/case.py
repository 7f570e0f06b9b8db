# SPDX-License-Identifier: Apache-2.0
"""What a check is given: the shared PostgreSQL, poolers of its own, helpers, clean-up."""

import contextlib
import re
import threading
from dataclasses import dataclass
from typing import Callable

from upkit import pooler, wire

CHECKS = []

# PgBouncer looks at its timers three times a second; a limit that passed is acted on within this.
JANITOR_S = 0.34


@dataclass
class Check:
    """One registered check; `slow` marks those of more than about a second."""
    name: str
    function: Callable
    slow: bool


def check(name, slow=False):
    """Registers a check under `group/name`."""
    def register(function):
        assert all(c.name != name for c in CHECKS), f"two checks named {name}"
        CHECKS.append(Check(name, function, slow))
        return function
    return register


class Case:
    """Everything a check starts is ended when it ends."""

    def __init__(self, server, which):
        self.pg, self.which = server, which
        self.poolers = []
        self._stack = contextlib.ExitStack()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stack.close()

    def keep(self, thing):
        """Closes `thing` when the check ends."""
        self._stack.callback(thing.close)
        return thing

    def target(self, dbname="p0", host="127.0.0.1", **extra):
        """Connection string of the shared PostgreSQL for [databases]."""
        items = {"host": host, "port": self.pg.port, "dbname": dbname, **extra}
        return " ".join(f"{key}={value}" for key, value in items.items() if value is not None)

    def pooler(self, settings=None, databases=None, **kwargs):
        """A pooler with databases p0 and p1 (unless given), trust authentication, session pooling."""
        if databases is None:
            databases = {"p0": self.target("p0"), "p1": self.target("p1")}
        started = self.keep(pooler.Pooler(databases, settings, which=self.which, **kwargs))
        self.poolers.append(started)
        return started

    def tx(self, settings=None, **kwargs):
        """As `pooler`, with transaction pooling."""
        return self.pooler({"pool_mode": "transaction", **(settings or {})}, **kwargs)

    def connect(self, to, *args, **kwargs):
        """A client of pooler `to`, closed when the check ends."""
        return self.keep(to.connect(*args, **kwargs))

    def background(self, function, *args):
        """Runs a call in a thread; see Background."""
        return Background(function, *args)

    def logs(self):
        """The ends of the logs of this check's poolers."""
        return "".join(f"\n--- log\n{p.log()[-3000:] or p.stderr()[-1000:]}" for p in self.poolers)


class Background:
    """A call in its own thread: `done()` tells, `result()` waits and returns or raises."""

    def __init__(self, function, *args):
        self._value, self._error = None, None

        def run():
            try:
                self._value = function(*args)
            except Exception as error:
                self._error = error
        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def done(self):
        """True when the call has ended."""
        return not self._thread.is_alive()

    def blocked(self, seconds=0.15):
        """True when the call is still running after `seconds`."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def result(self, timeout_s=5):
        """Waits for the end; the value, or raises the call's exception."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise AssertionError(f"still running after {timeout_s} s")
        if self._error:
            raise self._error
        return self._value


def same(actual, expected, what=""):
    """Fails with both values."""
    if actual != expected:
        raise AssertionError(f"{what}: got {actual!r}, expected {expected!r}")


def fails(text, function, *args, sqlstate=None, severity=None, **kwargs):
    """The call must raise PgError whose message contains `text` (a regular expression); returns the error."""
    try:
        function(*args, **kwargs)
    except wire.PgError as error:
        if not re.search(text, error.message or ""):
            raise AssertionError(f"error {error.message!r} does not match /{text}/") from error
        if sqlstate:
            same(error.sqlstate, sqlstate, f"SQLSTATE of {error.message!r}")
        if severity:
            same(error.severity, severity, f"severity of {error.message!r}")
        return error
    except (wire.Closed, OSError) as error:
        raise AssertionError(f"closed without an error that matches /{text}/: {error}") from error
    raise AssertionError(f"no error; expected /{text}/")


def dropped(text, conn, timeout_s=5):
    """The peer must close `conn`; with `text`, after an error that matches."""
    if not conn.closed_by_peer(timeout_s):
        raise AssertionError(f"not closed within {timeout_s} s")
    if text is not None:
        if conn.last_error is None:
            raise AssertionError(f"closed without an error; expected /{text}/")
        if not re.search(text, conn.last_error.message):
            raise AssertionError(f"error {conn.last_error.message!r} does not match /{text}/")
    return conn.last_error


def backend_pid(conn):
    """Process id of the server connection that the client is linked to."""
    return conn.one("SELECT pg_backend_pid()")
