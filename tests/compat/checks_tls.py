# SPDX-License-Identifier: Apache-2.0
"""TLS on both sides: sslmodes, certificates, protocols, reload."""

import ssl

from case import check, dropped, fails, same
from upkit import certs, host, wire


def tls_pooler(t, mode="require", settings=None, **kwargs):
    """A pooler whose client side has the shared server certificate."""
    c = t.pg.certs
    return t.pooler({"client_tls_sslmode": mode, "client_tls_key_file": c.server_key,
                     "client_tls_cert_file": c.server_cert, "client_tls_ca_file": c.ca, **(settings or {})}, **kwargs)


def verify(t, **extra):
    """Client options for verify-full."""
    return {"mode": "verify-full", "ca": t.pg.certs.ca, "hostname": "localhost", **extra}


def refused(function):
    """The handshake or the login must fail, in whatever way."""
    try:
        function()
    except (wire.PgError, wire.Closed, OSError, ssl.SSLError):
        return
    raise AssertionError("was let in")


@check("tls-client/disable")
def client_disable(t):
    p = t.pooler()
    t.connect(p).query("SELECT 1")
    conn = t.keep(wire.Conn("127.0.0.1", p.port, handshake=False))
    conn.send_raw(b"\0\0\0\x08\x04\xd2\x16\x2f")
    same(conn.sock.recv(1), b"N", "answer to SSLRequest")
    # The same connection goes on in clear text.
    conn.startup("bob", "p0", {}, (3, 0))
    conn.query("SELECT 1")


@check("tls-client/allow-and-prefer")
def client_allow(t):
    for mode in ("allow", "prefer"):
        p = tls_pooler(t, mode)
        t.connect(p).query("SELECT 1")
        t.connect(p, tls=verify(t)).query("SELECT 1")


@check("tls-client/require")
def client_require(t):
    p = tls_pooler(t)
    t.connect(p, tls=verify(t)).query("SELECT 1")
    fails("SSL required", p.connect)


@check("tls-client/unix-socket-needs-none")
def client_unix(t):
    t.connect(tls_pooler(t), unix=True).query("SELECT 1")


@check("tls-client/shown")
def client_shown(t):
    p = tls_pooler(t)
    t.connect(p, tls=verify(t)).query("SELECT 1")
    with p.connect("admin", "pgbouncer", tls=verify(t)) as admin:
        row = next(row for row in admin.dicts("SHOW CLIENTS") if row["database"] == "p0")
    assert row["tls"].startswith("TLSv1.3/"), row["tls"]
    p.wait_log(r"login attempt: db=p0 user=bob tls=TLSv1.3/\S+")


@check("tls-client/verify-ca-asks-for-a-certificate")
def client_verify_ca(t):
    p = tls_pooler(t, "verify-ca")
    cert, key = t.pg.certs.issue(f"any-{p.port}", "whoever")
    t.connect(p, tls=verify(t, cert=cert, key=key)).query("SELECT 1")
    refused(lambda: p.connect(tls=verify(t)))


@check("tls-client/verify-full-refuses-another-ca")
def client_other_ca(t):
    p = tls_pooler(t, "verify-full")
    other = t.keep(certs.Certificates(host.temp_dir("ca")))
    cert, key = other.issue("bob", "bob")
    refused(lambda: p.connect(tls=verify(t, cert=cert, key=key)))


@check("tls-client/cert-authentication")
def client_cert(t):
    p = tls_pooler(t, "verify-full", {"auth_type": "cert"})
    cert, key = t.pg.certs.issue(f"bob-{p.port}", "bob")
    same(t.connect(p, tls=verify(t, cert=cert, key=key)).one("SELECT current_user"), "bob")
    fails("certificate authentication failed", p.connect, "alice", tls=verify(t, cert=cert, key=key))


@check("tls-client/cert-by-hba")
def client_cert_hba(t):
    p = tls_pooler(t, "verify-ca", {"auth_type": "hba", "auth_hba_file": "{dir}/hba.conf"},
                   files={"hba.conf": "hostssl all bob 0.0.0.0/0 cert\nhostnossl all alice 0.0.0.0/0 trust\n"})
    cert, key = t.pg.certs.issue(f"bob-{p.port}", "bob")
    t.connect(p, tls=verify(t, cert=cert, key=key)).query("SELECT 1")
    fails("", p.connect, "alice", tls=verify(t, cert=cert, key=key))


@check("tls-client/scram-inside")
def client_scram(t):
    p = tls_pooler(t, "require", {"auth_type": "scram-sha-256"})
    client = t.connect(p, tls=verify(t))
    same(client.auth_method, "scram-sha-256")
    client.query("SELECT 1")


@check("tls-client/protocols")
def client_protocols(t):
    p = tls_pooler(t, "require", {"client_tls_protocols": "tlsv1.2"})
    client = t.connect(p, tls=verify(t))
    same(client.sock.version(), "TLSv1.2")
    p = tls_pooler(t, "require", {"client_tls_protocols": "tlsv1.3"})
    same(t.connect(p, tls=verify(t)).sock.version(), "TLSv1.3")
    refused(lambda: p.connect(tls=verify(t, version="TLSv1.2")))


@check("tls-client/default-is-secure")
def client_secure(t):
    p = tls_pooler(t)
    same(t.connect(p, tls=verify(t, version="TLSv1.2")).sock.version(), "TLSv1.2")
    same(t.connect(p, tls=verify(t)).sock.version(), "TLSv1.3")


@check("tls-client/reload-certificate")
def client_reload(t):
    p = tls_pooler(t)
    old = t.connect(p, tls=verify(t))
    first = old.sock.getpeercert()["serialNumber"]
    cert, key = t.pg.certs.issue(f"second-{p.port}", "localhost", "subjectAltName=DNS:localhost")
    p.settings.update(client_tls_cert_file=cert, client_tls_key_file=key)
    p.write_ini()
    with p.connect("admin", "pgbouncer", tls=verify(t)) as admin:
        admin.query("RELOAD")
    assert t.connect(p, tls=verify(t)).sock.getpeercert()["serialNumber"] != first, "old certificate is still used"
    old.query("SELECT 1")


@check("tls-client/missing-key-file")
def client_missing(t):
    from upkit.pooler import StartFailed
    try:
        t.pooler({"client_tls_sslmode": "require"})
    except StartFailed as error:
        assert error.code == 1, error.code
        assert "tls" in error.output.lower(), error.output
    else:
        raise AssertionError("started without a certificate")


@check("tls-client/plain-text-after-request-is-refused")
def client_injection(t):
    # CVE-2021-3935: what comes in clear text with the SSLRequest must not be taken for part of the session.
    p = tls_pooler(t)
    conn = t.keep(wire.Conn("127.0.0.1", p.port, handshake=False))
    conn.send_raw(b"\0\0\0\x08\x04\xd2\x16\x2f" + wire.message("Q", b"SELECT 1\0"))
    dropped(None, conn)


@check("tls-client/garbage-handshake")
def client_garbage(t):
    p = tls_pooler(t)
    conn = t.keep(wire.Conn("127.0.0.1", p.port, handshake=False))
    conn.send_raw(b"\0\0\0\x08\x04\xd2\x16\x2f")
    same(conn.sock.recv(1), b"S")
    conn.send_raw(b"this is no ClientHello, not at all" * 20)
    dropped(None, conn)
    t.connect(p, tls=verify(t)).query("SELECT 1")


@check("tls-client/large-values")
def client_large(t):
    p = tls_pooler(t)
    client = t.connect(p, tls=verify(t))
    text = "x" * (4 << 20)
    same(len(client.execute("SELECT $1 || 'y'", [text])[0][0]), len(text) + 1)


@check("tls-client/cancel-over-tls")
def client_cancel(t):
    p = tls_pooler(t)
    client = t.connect(p, tls=verify(t))
    call = t.background(client.query, "SELECT pg_sleep(10)")
    assert call.blocked()
    client.cancel(tls=verify(t))
    fails("canceling statement due to user request", call.result)


# --- towards the server


def in_tls(client):
    """Whether the server connection of this client is encrypted."""
    return client.one("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()") == "t"


@check("tls-server/modes")
def server_modes(t):
    for mode, expected in (("disable", False), ("prefer", True), ("require", True)):
        p = t.pooler({"server_tls_sslmode": mode})
        same(in_tls(t.connect(p)), expected, mode)


@check("tls-server/default-is-prefer")
def server_default(t):
    same(in_tls(t.connect(t.pooler({"server_tls_sslmode": None}))), True)


@check("tls-server/verify-ca")
def server_verify_ca(t):
    p = t.pooler({"server_tls_sslmode": "verify-ca", "server_tls_ca_file": t.pg.certs.ca})
    same(in_tls(t.connect(p)), True)


@check("tls-server/verify-full")
def server_verify_full(t):
    settings = {"server_tls_sslmode": "verify-full", "server_tls_ca_file": t.pg.certs.ca}
    same(in_tls(t.connect(t.pooler(settings, databases={"p0": t.target(host="localhost")}))), True)


@check("tls-server/verify-refuses-another-ca", slow=True)
def server_other_ca(t):
    other = t.keep(certs.Certificates(host.temp_dir("ca")))
    p = t.pooler({"server_tls_sslmode": "verify-ca", "server_tls_ca_file": other.ca, "query_wait_timeout": "1"})
    fails("", lambda: t.connect(p).query("SELECT 1"))


@check("tls-server/client-certificate")
def server_client_cert(t):
    cert, key = t.pg.certs.issue(f"cert_user-{host.free_port()}", "cert_user")
    p = t.pooler({"server_tls_sslmode": "require", "server_tls_cert_file": cert, "server_tls_key_file": key})
    same(t.connect(p, "cert_user").one("SELECT current_user"), "cert_user")


@check("tls-server/hostssl-only-user")
def server_hostssl(t):
    p = t.pooler({"server_tls_sslmode": "require"})
    same(in_tls(t.connect(p, "tls_user")), True)


@check("tls-server/shown")
def server_shown(t):
    p = t.pooler({"server_tls_sslmode": "require"})
    client = t.connect(p)
    client.query("SELECT 1")
    assert p.admin("SHOW SERVERS")[0]["tls"].startswith("TLSv1.3/")
    p.wait_log("SSL established: TLSv1.3/")


@check("tls-server/unix-socket-has-none")
def server_unix(t):
    p = t.pooler({"server_tls_sslmode": "prefer"}, databases={"p0": t.target(host=t.pg.directory)})
    t.connect(p).query("SELECT 1")
    same(p.admin("SHOW SERVERS")[0]["tls"], "")


@check("tls-both/transaction-pooling")
def both(t):
    p = tls_pooler(t, "require", {"server_tls_sslmode": "require", "pool_mode": "transaction",
                                  "default_pool_size": 1})
    clients = [t.connect(p, tls=verify(t)) for _ in range(4)]
    for number in range(20):
        client = clients[number % 4]
        same(client.execute("SELECT $1::int * 2", [number]), [[str(number * 2)]])
