# SPDX-License-Identifier: Apache-2.0
"""Records what a client sends to a server, by `underpass trace` and by a proxy, and compares the two, and what DuckDB reads of the
trace's Parquet with both. What differs is kept."""

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections import Counter

from upkit import host, pooler
from upkit.proxy import Proxy

import said

READY_S, END_S = 60, 120
# Bytes that are shown before and behind the first that differs; characters of other values.
NEAR, SHOWN = 16, 200


def possible():
    """Whether this user may record at all."""
    return os.geteuid() == 0


def bytes_of(field, value):
    """What a field that is text or base64 stands for; None for any other."""
    if isinstance(value, dict) and set(value) == {"base64"}:
        field, value = "base64", value["base64"]
    if not isinstance(value, str):
        return None
    return base64.b64decode(value) if field.endswith("base64") else value.encode()


def common(one, other):
    """How many bytes from the start are the same."""
    return len(os.path.commonprefix([one, other]))


def difference(field, sent, got):
    """Where two values of a field differ, in words; None if they do not."""
    if sent == got:
        return None
    if isinstance(sent, list) and isinstance(got, list) and len(sent) == len(got):
        inner = (difference(f"{field}[{at}]", one, other) for at, (one, other) in enumerate(zip(sent, got)))
        return "; ".join(filter(None, inner))
    one, other = bytes_of(field, sent), bytes_of(field, got)
    if one is None or other is None:
        return f"{field} {str(sent)[:SHOWN]} is {str(got)[:SHOWN]}"
    start = common(one, other)
    end = common(one[start:][::-1], other[start:][::-1])
    near = slice(max(start - NEAR, 0), start + NEAR)
    return (f"{field}: {len(one)} bytes were sent, {len(other)} are in the trace, from byte {start} on {len(one) - start - end} of them "
            f"are others: {one[near]} is {other[near]}")


def differences(sent, got):
    """Which fields of a message are not as they were sent, in words; None if all are. A redacted message never is."""
    redaction = got.get("redaction")
    fields = [difference(field, sent[field], got.get(field)) for field in sent]
    return "; ".join(filter(None, [*fields, redaction and f"it is redacted ({redaction})"])) or None


class Recording:
    """Between entering and leaving, clients of `port` are recorded; then `difference` tells what is not as it was sent, and `reader`, a
    program that prints what it finds in the trace's Parquet, is held against the messages as well."""

    def __init__(self, server_port, decode, reader=None):
        self.server_port, self.decode, self.reader = server_port, decode, reader
        self.directory = tempfile.mkdtemp(prefix="up-trace-", dir="/tmp")
        self.difference = None

    def __enter__(self):
        program = pooler.command("underpass")[0]
        self.command = [program, "trace", "-p", str(self.server_port), "-o", os.path.join(self.directory, "trace"),
                        "--probes", "always", "--ring-size", "256", "--require-lossless"]
        self.log = open(os.path.join(self.directory, "log"), "w+", encoding="utf-8")
        self.process = subprocess.Popen(self.command, stdout=self.log, stderr=self.log, stdin=subprocess.DEVNULL)
        host.wait_until(self._is_ready, READY_S, 0.05, "underpass trace records")
        self.proxy = Proxy(self.server_port)
        self.port = self.proxy.port
        return self

    def _text(self):
        self.log.seek(0)
        return self.log.read()

    def _is_ready(self):
        if self.process.poll() is not None:
            raise host.SetupError(f"underpass trace: {self._text()}")
        return "recording" in self._text()

    def __exit__(self, *_):
        try:
            self.proxy.close()
            self.process.send_signal(signal.SIGINT)
            status = self.process.wait(END_S)
            if status:
                self.difference = f"underpass trace ended with {status}: {self._text()[-1500:]}"
            else:
                self.difference = self._compare()
        finally:
            self.process.kill()
            self.process.wait()
            self.log.close()
            if self.difference:
                self.difference += f"; {self._keep()}"
            else:
                shutil.rmtree(self.directory, ignore_errors=True)

    def _keep(self):
        """The trace stays, and what the proxy has seen comes beside it."""
        for connection in self.proxy.connections:
            for name in ("to_server", "to_client"):
                with open(os.path.join(self.directory, f"{connection.port}.{name}"), "wb") as file:
                    file.write(getattr(connection, name))
        return f"trace and bytes of the proxy are in {self.directory}"

    def _sessions(self):
        """The trace's sessions by the client's port, and the messages of each."""
        program = self.command[0]
        export = subprocess.Popen([program, "export", "-f", "jsonl", os.path.join(self.directory, "trace")],
                                  stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        by_port, messages = {}, {}
        for line in export.stdout:
            record = json.loads(line)
            if record["kind"] == "session_start" and record["peer"]:
                by_port.setdefault(int(record["peer"].rpartition(":")[2]), []).append(record)
                messages[record["session"]] = []
            elif record["kind"] == "frontend":
                messages[record["session"]].append(record)
        if export.wait():
            raise host.SetupError("underpass export failed")
        return by_port, messages

    def _read(self, messages):
        """What the reader finds otherwise than it is in the trace, in words."""
        place = os.path.join(self.directory, "parquet")
        for command in ([self.command[0], "export", "-f", "parquet", "-o", place, os.path.join(self.directory, "trace")],
                        [*self.reader, place]):
            done = subprocess.run(command, capture_output=True, text=True, timeout=END_S, check=False)
            if done.returncode:
                return f"{os.path.basename(command[0])} ended with {done.returncode}: {done.stderr[-600:]}"
        found = json.loads(done.stdout)
        said = [[session, one["query"]] for session, of_session in sorted(messages.items())
                for one in of_session if one.get("type") == "Query" and "query" in one]
        if not said or found["simple"] != said:
            return f"Parquet: {len(said)} simple queries were sent, {len(found['simple'])} were found, or others"
        bound = sum(one.get("type") == "Execute" for of_session in messages.values() for one in of_session)
        if not 0 < found["extended"] <= bound:
            return f"Parquet: {found['extended']} of {bound} executions"
        if found["misplaced"] or found["without_session"] or found["sessions"] != len(messages):
            return f"Parquet: { {key: found[key] for key in ('misplaced', 'without_session', 'sessions')} }"
        return None

    def _compare(self):
        by_port, messages = self._sessions()
        if self.reader and (wrong := self._read(messages)):
            return wrong
        compared = 0
        decoded = [(connection.port, self.decode(connection)) for connection in self.proxy.connections]
        decoded = [(port, expected) for port, expected in decoded if expected not in ("cancel", "nothing")]
        # A client that connects again and again (pgbench -C) may get a port twice: its sessions are in the order of its connections.
        ports = Counter(port for port, _ in decoded)
        for port, expected in decoded:
            sessions = by_port.get(port, [])
            if len(sessions) != ports[port]:
                return f"{len(sessions)} sessions of port {port}, which sent {str(expected)[:200]}"
            start, by_port[port] = sessions[0], sessions[1:]
            ports[port] -= 1
            if start["midstream"] or start["transport"] != ("tls" if expected == "tls" else "tcp"):
                return f"not so: {start}"
            # The proxy cannot look into TLS, but it is there from its start, and lost nothing.
            if expected == "tls":
                continue
            got = messages[start["session"]]
            for number, (one, other) in enumerate(zip(expected, got)):
                wrong = differences(one, other)
                if wrong:
                    return f"message {number} of port {port}, {one.get('type', 'untyped')}: {wrong}"
            if len(expected) != len(got):
                return f"{len(expected)} messages were sent, {len(got)} are in the trace"
            compared += len(got)
        return None if compared else "nothing was compared"
