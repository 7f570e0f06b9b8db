# SPDX-License-Identifier: Apache-2.0
"""What no PgBouncer does and we promise: the complaints about today's poolers that have an answer here."""

import base64
import contextlib
import hashlib
import hmac
import socket
import ssl
import struct
import threading
import time

from case import backend_pid, check, fails, same
from checks_tls import tls_pooler, verify
from upkit import host, wire


@check("beyond/cancel-of-a-queued-client")
def cancel_queued(t):
    p = t.tx({"default_pool_size": 1})
    holder, queued = t.connect(p), t.connect(p)
    holder.query("BEGIN")
    queued.send("Q", b"SELECT 1\0")
    host.wait_until(lambda: p.pool()["cl_waiting"] == "1", what="queued")
    queued.cancel()
    # PgBouncer closes a client that is cancelled in the queue; an error and going on would be as good.
    queued.sock.settimeout(3)
    try:
        queued.finish()
    except (wire.PgError, wire.Closed):
        pass
    else:
        raise AssertionError("the query ran")
    holder.query("COMMIT")


@check("beyond/failed-parse-is-forgotten")
def prepared_error(t):
    p = t.tx({"default_pool_size": 1, "max_prepared_statements": 10})
    client = t.connect(p)
    fails("does not exist", client.execute, "SELECT nonsense", name="bad")
    # The failed Parse must not be remembered as prepared.
    same(client.execute("SELECT 1", name="bad"), [["1"]])
    same(t.connect(p).execute("SELECT 1", name="x"), [["1"]])


@check("beyond/direct-tls")
def client_direct(t):
    p = tls_pooler(t)
    client = t.connect(p, tls=verify(t, direct=True))
    same(client.sock.selected_alpn_protocol(), "postgresql")
    client.query("SELECT 1")


@check("beyond/channel-binding-offered")
def client_channel_binding(t):
    p = tls_pooler(t, "require", {"auth_type": "scram-sha-256"})
    assert "SCRAM-SHA-256-PLUS" in t.connect(p, tls=verify(t)).mechanisms


class BindingServer:
    """A server with TLS that lets one connection in by SCRAM with or without channel binding, and keeps what it said.

    `mechanism` and `binding` are the client's; every query is answered with a tag only.
    """

    ENDPOINT = b"p=tls-server-end-point,,"

    def __init__(self, cert, key, password):
        self.password, self.mechanism, self.binding = password, None, None
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(cert, key)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with contextlib.suppress(OSError):
            plain, _ = self.listener.accept()
            plain.recv(8, socket.MSG_WAITALL)  # SSLRequest
            plain.sendall(b"S")
            with self.context.wrap_socket(plain, server_side=True) as conn, conn.makefile("rb") as stream:
                stream.read(struct.unpack("!i", stream.read(4))[0] - 4)  # StartupMessage
                self._login(conn, stream)
                while kind := stream.read(1):
                    stream.read(struct.unpack("!i", stream.read(4))[0] - 4)
                    if kind == b"Q":
                        conn.sendall(wire.message("C", b"SELECT 0\0") + wire.message("Z", b"I"))

    def _login(self, conn, stream):
        def receive():
            return stream.read(struct.unpack("!xi", stream.read(5))[0] - 4)

        def send(code, text):
            conn.sendall(wire.message("R", struct.pack("!i", code) + text))

        send(10, b"SCRAM-SHA-256-PLUS\0SCRAM-SHA-256\0\0")
        mechanism, _, initial = receive().partition(b"\0")
        self.mechanism = mechanism.decode()
        first = initial[4:].split(b",", 2)[2].decode()
        salt = b"0123456789abcdef"
        nonce = first.split("r=", 1)[1] + "server"
        server_first = f"r={nonce},s={base64.b64encode(salt).decode()},i=4096"
        send(11, server_first.encode())
        without_proof = receive().decode().rsplit(",p=", 1)[0]
        self.binding = base64.b64decode(without_proof.split(",")[0].removeprefix("c="))
        salted = hashlib.pbkdf2_hmac("sha256", self.password.encode(), salt, 4096)
        message = f"{first},{server_first},{without_proof}".encode()
        signature = hmac.digest(hmac.digest(salted, b"Server Key", "sha256"), message, "sha256")
        send(12, b"v=" + base64.b64encode(signature))
        send(0, b"")
        conn.sendall(wire.message("S", b"server_version\x0015.0\0") + wire.message("K", struct.pack("!ii", 1, 1))
                     + wire.message("Z", b"I"))

    def close(self):
        """Closes the listener; the connection ends with the pooler's."""
        self.listener.close()


@check("beyond/channel-binding-to-servers")
def server_channel_binding(t):
    cert, key = t.pg.certs.server_cert, t.pg.certs.server_key
    server = t.keep(BindingServer(cert, key, "sesame"))
    p = t.tx({"server_tls_sslmode": "require"},
             databases={"p0": f"host=127.0.0.1 port={server.port} user=alibaba password=sesame"})
    t.connect(p).query("SELECT 1")
    same(server.mechanism, "SCRAM-SHA-256-PLUS")
    with open(cert, encoding="ascii") as pem:
        digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.read())).digest()
    same(server.binding, BindingServer.ENDPOINT + digest)


@check("beyond/cached-plan-is-prepared-again")
def cached_plan(t):
    p = t.tx({"default_pool_size": 1, "max_prepared_statements": 10})
    client, table = t.connect(p), f"plan_{p.port}"
    client.query(f"CREATE TABLE {table} (a int); INSERT INTO {table} VALUES (1)")
    same(client.execute(f"SELECT * FROM {table}", name="s"), [["1"]])
    t.connect(p).query(f"ALTER TABLE {table} ADD b int DEFAULT 2")
    try:
        same(client.execute("", name="s", prepare=False), [["1", "2"]])
    finally:
        client.query(f"DROP TABLE {table}")


@check("beyond/vanished-client-keeps-the-server")
def vanished(t):
    # The statement is cancelled and the transaction rolled back, and the server connection serves the next client.
    p = t.tx({"default_pool_size": 1})
    client = p.connect()
    pid = backend_pid(client)
    client.query("BEGIN")
    client.send("Q", b"SELECT pg_sleep(20)\0")
    host.wait_until(lambda: p.pool()["sv_active"] == "1", what="linked")
    client.abort()
    same(backend_pid(t.connect(p)), pid)


@check("beyond/shutdown-tells-clients")
def shutdown_told(t):
    p = t.tx()
    client, admin = t.connect(p), t.keep(p.admin())
    client.query("SELECT 1")
    admin.send("Q", b"SHUTDOWN\0")
    assert client.closed_by_peer(), "not closed"
    assert client.last_error, "closed without an error"
    same(client.last_error.sqlstate, "57P01")


@check("beyond/user-timeout-leaves-other-users-alone")
def user_timeout(t):
    p = t.tx(users={"bob": "client_idle_timeout=60"})
    other = t.connect(p, "alice")
    other.query("SELECT 1")
    time.sleep(0.8)
    other.query("SELECT 1")


@check("beyond/failing-server-login-is-told-at-once")
def failing_login(t):
    p = t.tx(databases={"p0": t.target(user="plain_user", password="wrong")})
    fails("password authentication failed", lambda: t.connect(p).query("SELECT 1"))
    # server_login_retry (15 s) has not passed: PgBouncer lets this login hang until then.
    fails("password authentication failed|server login has been failing",
          lambda: t.connect(p, timeout_s=2).query("SELECT 1"))
