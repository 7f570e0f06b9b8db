# SPDX-License-Identifier: Apache-2.0
"""A small blocking client of PostgreSQL protocol 3 that hides nothing: what came is what a check can look at.

Authentication: trust, password, md5, SCRAM-SHA-256. TLS by SSLRequest or direct. Protocol 3.0 to 3.2.
Not a driver: no type conversion, values are str (or bytes when asked for) and None.
"""

import base64
import hashlib
import hmac
import os
import socket
import ssl
import struct
import time

SSL_REQUEST = 80877103
GSSENC_REQUEST = 80877104
CANCEL_REQUEST = 80877102

ERROR_FIELDS = {"S": "severity", "V": "severity_nonlocalized", "C": "sqlstate", "M": "message",
                "D": "detail", "H": "hint", "P": "position"}


class PgError(Exception):
    """An ErrorResponse; its fields are attributes (severity, sqlstate, message, ...)."""

    def __init__(self, payload):
        self.fields = parse_fields(payload)
        for name in ERROR_FIELDS.values():
            setattr(self, name, self.fields.get(name))
        super().__init__(f"{self.severity} {self.sqlstate}: {self.message}")


class Closed(Exception):
    """The peer closed the connection without (further) ErrorResponse."""


class Result:
    """What one statement returned."""

    def __init__(self):
        self.columns = []   # (name, type OID)
        self.rows = []
        self.tag = None

    def dicts(self):
        """Rows as dictionaries keyed by column name."""
        names = [name for name, _ in self.columns]
        return [dict(zip(names, row)) for row in self.rows]


def parse_fields(payload):
    """Fields of an ErrorResponse or NoticeResponse."""
    fields = {}
    for item in payload.split(b"\0"):
        if item:
            key = chr(item[0])
            fields[ERROR_FIELDS.get(key, key)] = item[1:].decode("utf-8", "replace")
    return fields


def cstr(text):
    """Text as the protocol's zero-terminated string."""
    return (text if isinstance(text, bytes) else text.encode()) + b"\0"


class Conn:
    """One connection. `host` starting with / or @ is a unix socket directory."""

    def __init__(self, host, port, user=None, database=None, password=None, *, params=None, protocol=(3, 0),
                 tls=None, timeout_s=10.0, handshake=True):
        self.address = (host, port)
        self.password = password
        self.parameters = {}
        self.notices = []
        self.notifications = []
        self.auth_method = None
        self.pid = None
        self.key = b""
        self.status = None
        self.negotiated = None
        self._buffer = bytearray()
        if host.startswith(("/", "@")):
            path = f"{host}/.s.PGSQL.{port}"
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(timeout_s)
            self.sock.connect("\0" + path[1:] if host.startswith("@") else path)
        else:
            self.sock = socket.create_connection((host, port), timeout_s)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.settimeout(timeout_s)
        try:
            if tls:
                self._start_tls(tls)
            if handshake:
                self.startup(user, database, params or {}, protocol)
        except BaseException:
            self.sock.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # --- start

    def _start_tls(self, tls):
        """`tls`: dict with mode (require, verify-full), ca, cert, key, direct, version ("TLSv1.2")."""
        if not tls.get("direct"):
            self.sock.sendall(struct.pack("!ii", 8, SSL_REQUEST))
            answer = self.sock.recv(1)
            if answer != b"S":
                raise Closed(f"SSLRequest answered by {answer!r}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = tls.get("mode") == "verify-full"
        context.verify_mode = ssl.CERT_REQUIRED if tls.get("mode", "").startswith("verify") else ssl.CERT_NONE
        if tls.get("ca"):
            context.load_verify_locations(tls["ca"])
        if tls.get("cert"):
            context.load_cert_chain(tls["cert"], tls["key"])
        if tls.get("version") == "TLSv1.2":
            context.maximum_version = ssl.TLSVersion.TLSv1_2
        if tls.get("ciphers"):
            context.set_ciphers(tls["ciphers"])
        if tls.get("direct"):
            context.set_alpn_protocols(["postgresql"])
        self.sock = context.wrap_socket(self.sock, server_hostname=tls.get("hostname", "localhost"))

    def send_startup(self, user, database=None, params=None, protocol=(3, 0)):
        """Sends only the StartupMessage."""
        fields = {"user": user} if user is not None else {}
        if database is not None:
            fields["database"] = database
        fields.update(params or {})
        body = b"".join(cstr(k) + cstr(v) for k, v in fields.items()) + b"\0"
        self.sock.sendall(struct.pack("!iHH", len(body) + 8, *protocol) + body)

    def startup(self, user, database, params, protocol):
        """StartupMessage, authentication, everything up to the first ReadyForQuery."""
        self.send_startup(user, database, params, protocol)
        while True:
            kind, payload = self.recv()
            if kind == "R":
                self._authenticate(user, payload)
            elif kind == "v":
                self.negotiated = struct.unpack_from("!i", payload)[0]
            elif kind == "K":
                self.pid = struct.unpack_from("!i", payload)[0]
                self.key = bytes(payload[4:])
            elif kind == "Z":
                return
            elif kind == "E":
                raise PgError(payload)

    def _authenticate(self, user, payload):
        code = struct.unpack_from("!i", payload)[0]
        if code == 0:
            self.auth_method = self.auth_method or "trust"
            return
        password = (self.password or "").encode()
        if code == 3:
            self.auth_method = "password"
            self.send("p", cstr(password))
        elif code == 5:
            self.auth_method = "md5"
            inner = hashlib.md5(password + user.encode()).hexdigest().encode()
            self.send("p", cstr("md5" + hashlib.md5(inner + payload[4:8]).hexdigest()))
        elif code == 10:
            self.auth_method = "scram-sha-256"
            self.mechanisms = [m.decode() for m in payload[4:].split(b"\0") if m]
            self._scram(password)
        else:
            raise Closed(f"unknown authentication request {code}")

    def _scram(self, password):
        """RFC 5802 without channel binding ("n,,"); the server's signature is verified."""
        nonce = base64.b64encode(os.urandom(18)).decode()
        first = f"n=,r={nonce}"
        initial = ("n,," + first).encode()
        self.send("p", cstr("SCRAM-SHA-256") + struct.pack("!i", len(initial)) + initial)
        server_first = self._sasl(11).decode()
        fields = dict(part.split("=", 1) for part in server_first.split(","))
        if not fields["r"].startswith(nonce):
            raise Closed("SCRAM nonce of the server does not continue ours")
        salted = hashlib.pbkdf2_hmac("sha256", password, base64.b64decode(fields["s"]), int(fields["i"]))
        client_key = hmac.digest(salted, b"Client Key", "sha256")
        without_proof = f"c=biws,r={fields['r']}"
        message = f"{first},{server_first},{without_proof}".encode()
        signature = hmac.digest(hashlib.sha256(client_key).digest(), message, "sha256")
        proof = bytes(a ^ b for a, b in zip(client_key, signature))
        self.send("p", f"{without_proof},p={base64.b64encode(proof).decode()}".encode())
        final = self._sasl(12).decode()
        expected = hmac.digest(hmac.digest(salted, b"Server Key", "sha256"), message, "sha256")
        if final != "v=" + base64.b64encode(expected).decode():
            raise Closed("SCRAM signature of the server is wrong")

    def _sasl(self, code):
        kind, payload = self.recv()
        if kind == "E":
            raise PgError(payload)
        if kind != "R" or struct.unpack_from("!i", payload)[0] != code:
            raise Closed(f"expected SASL step {code}, got {kind}")
        return bytes(payload[4:])

    # --- messages

    def send(self, kind, payload=b""):
        """Sends one message."""
        self.sock.sendall(message(kind, payload))

    def send_raw(self, data):
        """Sends bytes as they are."""
        self.sock.sendall(data)

    def recv(self):
        """Next message as (type, payload); ParameterStatus, notices and notifications are also recorded."""
        self._fill(5)
        kind = chr(self._buffer[0])
        length = struct.unpack_from("!i", self._buffer, 1)[0]
        self._fill(length + 1)
        payload = bytes(self._buffer[5:length + 1])
        del self._buffer[:length + 1]
        if kind == "S":
            key, value, _ = payload.split(b"\0")
            self.parameters[key.decode()] = value.decode()
        elif kind == "N":
            self.notices.append(parse_fields(payload))
        elif kind == "A":
            channel, extra, _ = payload[4:].split(b"\0")
            self.notifications.append((channel.decode(), extra.decode()))
        elif kind == "Z":
            self.status = chr(payload[0])
        return kind, payload

    def _fill(self, size):
        while len(self._buffer) < size:
            try:
                data = self.sock.recv(max(65536, size - len(self._buffer)))
            except (ConnectionResetError, BrokenPipeError) as error:
                raise Closed(str(error)) from error
            if not data:
                raise Closed("connection closed by the server")
            self._buffer += data

    def recv_until_ready(self):
        """All messages up to and with the next ReadyForQuery."""
        out = []
        while True:
            out.append(self.recv())
            if out[-1][0] == "Z":
                return out

    # --- simple and extended query

    def query(self, sql):
        """Simple query; results of all statements. Raises PgError after ReadyForQuery (or at once if FATAL)."""
        self.send("Q", cstr(sql))
        return self.finish()

    def finish(self):
        """Reads the answer up to ReadyForQuery."""
        results, current, error = [], Result(), None
        while True:
            try:
                kind, payload = self.recv()
            except Closed:
                if error is not None:
                    raise error from None
                raise
            if kind == "T":
                current.columns = row_description(payload)
            elif kind == "D":
                current.rows.append(data_row(payload))
            elif kind in "CIs":
                current.tag = payload[:-1].decode() if kind == "C" else ""
                results.append(current)
                current = Result()
            elif kind == "E":
                error = error or PgError(payload)
            elif kind == "Z":
                if error is not None:
                    raise error
                return results

    def rows(self, sql):
        """Rows of the last statement."""
        return self.query(sql)[-1].rows

    def one(self, sql):
        """The single value of a single row."""
        return self.rows(sql)[0][0]

    def dicts(self, sql):
        """Rows of the last statement as dictionaries."""
        return self.query(sql)[-1].dicts()

    def execute(self, sql, values=(), name="", prepare=True):
        """Extended query with text values: [Parse], Bind, Describe, Execute, Sync in one flight."""
        data = parse(name, sql) if prepare else b""
        self.send_raw(data + bind("", name, values) + message("D", b"P\0") + execute() + message("S"))
        results = self.finish()
        return results[-1].rows if results else []

    # --- cancel, end

    def cancel(self, tls=None):
        """CancelRequest on a connection of its own; returns when the peer has closed it."""
        with Conn(*self.address, handshake=False, tls=tls) as other:
            other.send_raw(struct.pack("!iii", 12 + len(self.key), CANCEL_REQUEST, self.pid) + self.key)
            try:
                other.recv()
            except (Closed, OSError):
                pass

    def closed_by_peer(self, timeout_s=5.0):
        """True when the peer closes within the time; what comes before is read (errors: `last_error`)."""
        end = time.monotonic() + timeout_s
        self.last_error = None
        try:
            while time.monotonic() < end:
                self.sock.settimeout(max(0.01, end - time.monotonic()))
                kind, payload = self.recv()
                if kind == "E":
                    self.last_error = PgError(payload)
        except (Closed, ConnectionError):
            return True
        except (TimeoutError, OSError):
            pass
        return False

    def close(self):
        """Terminate, then close. Never raises."""
        try:
            self.sock.settimeout(1)
            self.send("X")
        except OSError:
            pass
        self.sock.close()

    def abort(self):
        """Closes with a reset, as a crashed client does."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


def message(kind, payload=b""):
    """Bytes of one message."""
    return kind.encode() + struct.pack("!i", len(payload) + 4) + payload


def parse(name, sql, types=()):
    """Parse message."""
    return message("P", cstr(name) + cstr(sql) + struct.pack(f"!H{len(types)}i", len(types), *types))


def bind(portal, name, values=(), result_format=0):
    """Bind message, parameters as text (bytes: as binary)."""
    formats = struct.pack(f"!H{len(values)}H", len(values), *[int(isinstance(v, bytes)) for v in values])
    body = b""
    for value in values:
        if value is None:
            body += struct.pack("!i", -1)
        else:
            data = value if isinstance(value, bytes) else str(value).encode()
            body += struct.pack("!i", len(data)) + data
    return message("B", cstr(portal) + cstr(name) + formats + struct.pack("!H", len(values)) + body
                   + struct.pack("!HH", 1, result_format))


def describe(kind, name):
    """Describe message: kind "S" (statement) or "P" (portal)."""
    return message("D", kind.encode() + cstr(name))


def close_statement(name):
    """Close message for a prepared statement."""
    return message("C", b"S" + cstr(name))


def execute(portal="", limit=0):
    """Execute message; `limit` 0 is all rows."""
    return message("E", cstr(portal) + struct.pack("!i", limit))


def row_description(payload):
    """Columns of a RowDescription: (name, type OID)."""
    count, = struct.unpack_from("!H", payload)
    at, columns = 2, []
    for _ in range(count):
        end = payload.index(b"\0", at)
        name = payload[at:end].decode()
        oid = struct.unpack_from("!ihi", payload, end + 1)[2]
        columns.append((name, oid))
        at = end + 1 + 18
    return columns


def data_row(payload):
    """Values of a DataRow as text; None is NULL; bytes when they are not UTF-8."""
    count, = struct.unpack_from("!H", payload)
    at, values = 2, []
    for _ in range(count):
        size, = struct.unpack_from("!i", payload, at)
        at += 4
        if size < 0:
            values.append(None)
            continue
        raw = payload[at:at + size]
        at += size
        try:
            values.append(raw.decode())
        except UnicodeDecodeError:
            values.append(raw)
    return values
