# SPDX-License-Identifier: Apache-2.0
"""Who may enter: every auth_type, auth_file secrets, auth_query, HBA, certificates, peer; server-side logins."""

import hashlib
import subprocess

from case import check, fails, same
from upkit import host, wire

WRONG = "(password|SASL) authentication failed"


def secret_of(t, role):
    """The role's stored secret (md5... or SCRAM-SHA-256$...)."""
    with t.pg.connect("admin") as conn:
        return conn.one(f"SELECT rolpassword FROM pg_authid WHERE rolname = '{role}'")


def enters(t, p, user, method, **kwargs):
    """`user` gets in by `method` and can run a query."""
    client = t.connect(p, user, **kwargs)
    same(client.auth_method, method)
    same(client.one("SELECT current_user"), user)
    return client


# --- one method for all


@check("auth/trust")
def trust(t):
    p = t.pooler({"auth_type": "trust"})
    enters(t, p, "bob", "trust", password=None)
    fails('"trust" authentication failed', p.connect, "nobody_known")


@check("auth/any-needs-forced-user")
def auth_any(t):
    p = t.pooler({"auth_type": "any"}, databases={"p0": t.target(), "f": t.target(user="bob")})
    same(t.connect(p, "whoever", "f").one("SELECT current_user"), "bob")
    fails("bouncer config error", p.connect, "whoever", "p0")
    p.wait_log("auth_type=any requires forced user")


@check("auth/any-lets-everybody-look-into-the-console")
def auth_any_console(t):
    p = t.pooler({"auth_type": "any"})
    looker = t.connect(p, "whoever", "pgbouncer")
    looker.query("SHOW POOLS")
    for command in ("SHOW FDS", "RELOAD", "PAUSE", "SHUTDOWN"):
        fails("admin access needed", looker.query, command)
    t.connect(p, "admin", "pgbouncer").query("RELOAD")


@check("auth/no-such-database-is-told-after-the-login")
def no_such_database(t):
    p = t.pooler({"auth_type": "md5"})
    p.admin("DISABLE p1")
    for database, told in (("gone", "no such database: gone"), ("p1", 'database "p1" is disabled')):
        fails(WRONG, p.connect, "bob", database, password="no")
        fails(WRONG, p.connect, "stranger", database)
        fails(told, p.connect, "bob", database)
    p = t.pooler({"auth_type": "trust"})
    fails('"trust" authentication failed', p.connect, "stranger", "gone")
    fails("no such database: gone", p.connect, "bob", "gone")


@check("auth/plain")
def plain(t):
    p = t.pooler({"auth_type": "plain"})
    enters(t, p, "bob", "password")
    fails(WRONG, p.connect, "bob", password="no")
    fails(WRONG, p.connect, "stranger", password="no")


@check("auth/md5")
def md5(t):
    p = t.pooler({"auth_type": "md5"})
    enters(t, p, "bob", "md5")
    fails(WRONG, p.connect, "bob", password="no")
    fails(WRONG, p.connect, "stranger", password="no")


@check("auth/md5-secret-in-file")
def md5_secret(t):
    secret = "md5" + hashlib.md5(b"bobbob").hexdigest()
    p = t.pooler({"auth_type": "md5"}, auth_file=f'"bob" "{secret}"\n')
    enters(t, p, "bob", "md5")
    fails(WRONG, p.connect, "bob", password="no")


@check("auth/md5-type-with-scram-secret-uses-scram")
def md5_scram(t):
    p = t.pooler({"auth_type": "md5"}, auth_file=f'"bob" "{secret_of(t, "bob")}"\n')
    enters(t, p, "bob", "scram-sha-256")


@check("auth/md5-login-at-server")
def md5_server(t):
    secret = secret_of(t, "md5_user")
    p = t.pooler({"auth_type": "md5"}, auth_file=f'"md5_user" "{secret}"\n')
    enters(t, p, "md5_user", "md5")


@check("auth/scram")
def scram(t):
    p = t.pooler({"auth_type": "scram-sha-256"})
    client = enters(t, p, "bob", "scram-sha-256")
    assert "SCRAM-SHA-256" in client.mechanisms
    fails("SASL authentication failed|password authentication failed", p.connect, "bob", password="no")
    fails("SASL authentication failed|password authentication failed", p.connect, "stranger", password="no")


@check("auth/scram-secret-in-file")
def scram_secret(t):
    p = t.pooler({"auth_type": "scram-sha-256"}, auth_file=f'"bob" "{secret_of(t, "bob")}"\n')
    enters(t, p, "bob", "scram-sha-256")
    fails(WRONG, p.connect, "bob", password="no")


@check("auth/scram-pass-through")
def scram_pass_through(t):
    # Only the stored secret is known: the pooler logs in at the server with the key that the client's login reveals.
    p = t.pooler({"auth_type": "scram-sha-256"}, auth_file=f'"scram_user" "{secret_of(t, "scram_user")}"\n')
    enters(t, p, "scram_user", "scram-sha-256")


@check("auth/scram-type-with-md5-secret-fails")
def scram_md5_secret(t):
    p = t.pooler({"auth_type": "scram-sha-256"}, auth_file=f'"md5_user" "{secret_of(t, "md5_user")}"\n')
    fails(WRONG, p.connect, "md5_user")


@check("auth/scram_iterations")
def scram_iterations(t):
    p = t.pooler({"auth_type": "scram-sha-256", "scram_iterations": 1024})
    client = t.keep(wire.Conn("127.0.0.1", p.port, handshake=False))
    client.send_startup("bob", "p0")
    client.recv()
    first = b"n,,n=,r=abcdefgh"
    client.send("p", wire.cstr("SCRAM-SHA-256") + len(first).to_bytes(4, "big") + first)
    assert b",i=1024" in client.recv()[1], "iterations announced"


@check("auth/empty-password-refused")
def empty_password(t):
    p = t.pooler({"auth_type": "plain"}, auth_file='"bob" ""\n')
    fails("empty password|authentication failed", p.connect, "bob", password="")


@check("auth/quotes-and-comments-in-file")
def auth_file_syntax(t):
    p = t.pooler({"auth_type": "plain"},
                 auth_file='; comment\n\n"bo""b" "se""cret" ignored rest\n"bob" "bob"\n',
                 databases={"p0": t.target(user="bob")})
    t.connect(p, 'bo"b', password='se"cret').query("SELECT 1")


@check("auth/unknown-user-in-log")
def unknown_user(t):
    p = t.pooler({"auth_type": "md5"})
    fails(WRONG, p.connect, "stranger", password="x")
    p.wait_log("no such user: stranger|login failed: db=p0 user=stranger")


@check("auth/wrong-password-in-log")
def wrong_password(t):
    p = t.pooler({"auth_type": "md5"})
    fails(WRONG, p.connect, "bob", password="x")
    p.wait_log("password authentication failed")


@check("auth/no-user-given")
def no_user(t):
    p = t.pooler()
    fails("no username supplied", p.connect, None)


@check("auth/ldap-or-pam-gives-a-clear-answer")
def ldap(t):
    # Built without them, a start with one names the key or the method; built with them, it starts.
    from upkit.pooler import StartFailed
    for method in ("ldap", "pam"):
        try:
            t.pooler({"auth_type": method})
        except StartFailed as error:
            assert "auth_type" in error.output or method in error.output.lower(), error.output


# --- auth_query


def query_pooler(t, settings=None, **target):
    """Users come from the server by the default auth_query; only the asking user is in the file."""
    return t.pooler({"auth_type": "md5", "auth_user": "admin", **(settings or {})},
                    databases={"p0": t.target(**target)}, auth_file='"admin" "admin"\n')


@check("auth_query/default-query")
def auth_query(t):
    p = query_pooler(t)
    enters(t, p, "scram_user", "scram-sha-256")
    enters(t, p, "md5_user", "md5")
    fails(WRONG, p.connect, "scram_user", password="no")
    fails("no such user|authentication failed", p.connect, "stranger", password="no")


@check("auth_query/own-query")
def auth_query_own(t):
    p = query_pooler(t, {"auth_query": "SELECT 'bob'::name, 'hello'::text WHERE $1 = 'bob'"})
    t.connect(p, "bob", password="hello").query("SELECT 1")


@check("auth_query/auth_user-of-database")
def auth_user_database(t):
    p = t.pooler({"auth_type": "scram-sha-256"}, databases={"p0": t.target(auth_user="admin"), "p1": t.target("p1")},
                 auth_file='"admin" "admin"\n')
    enters(t, p, "scram_user", "scram-sha-256")
    fails(WRONG, p.connect, "scram_user", "p1")


@check("auth_query/auth_query-of-database")
def auth_query_database(t):
    p = t.pooler({"auth_type": "md5"}, auth_file='"admin" "admin"\n', databases={
        "p0": t.target(auth_user="admin", auth_query="'SELECT $1::text, ''zip''::text'")})
    t.connect(p, "bob", password="zip").query("SELECT 1")


@check("auth_query/auth_dbname")
def auth_dbname(t):
    p = t.pooler({"auth_type": "md5", "auth_user": "admin", "auth_dbname": "authdb",
                  "auth_query": "SELECT $1::text, current_database()::text"},
                 databases={"p0": t.target(), "authdb": t.target("postgres")}, auth_file='"admin" "admin"\n')
    t.connect(p, "bob", password="postgres").query("SELECT 1")


@check("auth_query/fails-clearly")
def auth_query_fails(t):
    p = query_pooler(t, {"auth_query": "SELECT nonsense"})
    fails("bouncer config error|auth_query|authentication|column", p.connect, "scram_user")
    assert p.running()


# --- HBA


def hba_pooler(t, rules, **kwargs):
    """auth_type=hba with these lines."""
    return t.pooler({"auth_type": "hba", "auth_hba_file": "{dir}/hba.conf", **kwargs.pop("settings", {})},
                    files={"hba.conf": rules}, **kwargs)


@check("hba/method-by-user")
def hba_user(t):
    p = hba_pooler(t, "# rules\nhost all bob 127.0.0.1/32 trust\nhost all alice 127.0.0.1/32 md5\n"
                      "host all scram_user 0.0.0.0/0 scram-sha-256\nhost all plain_user 0.0.0.0/0 password\n")
    enters(t, p, "bob", "trust")
    enters(t, p, "alice", "md5")
    enters(t, p, "scram_user", "scram-sha-256")
    enters(t, p, "plain_user", "password")
    fails("login rejected|no authentication method", p.connect, "scram_two")


@check("hba/reject")
def hba_reject(t):
    p = hba_pooler(t, "host all bob 0.0.0.0/0 reject\nhost all all 0.0.0.0/0 trust\n")
    fails("login rejected", p.connect, "bob")
    enters(t, p, "alice", "trust")


@check("hba/database-lists-and-sameuser")
def hba_database(t):
    p = hba_pooler(t, "host p0,other bob 0.0.0.0/0 trust\nhost sameuser alice 0.0.0.0/0 trust\nhost p1 all 0.0.0.0/0 md5\n",
                   databases={"p0": t.target(), "p1": t.target("p1"), "alice": t.target()})
    enters(t, p, "bob", "trust", database="p0")
    enters(t, p, "bob", "md5", database="p1")
    enters(t, p, "alice", "trust", database="alice")
    fails("", p.connect, "alice", "p0")


@check("hba/file-lists")
def hba_files(t):
    p = t.pooler({"auth_type": "hba", "auth_hba_file": "{dir}/hba.conf"},
                 files={"users": "alice\nbob\n", "hba.conf": "host all @users 0.0.0.0/0 trust\n"})
    enters(t, p, "bob", "trust")
    fails("", p.connect, "scram_user")


@check("hba/address")
def hba_address(t):
    p = hba_pooler(t, "host all bob 10.0.0.0/8 trust\nhost all bob 127.0.0.0 255.0.0.0 md5\n")
    enters(t, p, "bob", "md5")


@check("hba/address-all")
def hba_address_all(t):
    p = hba_pooler(t, "host all bob all trust\n")
    enters(t, p, "bob", "trust")


@check("hba/local-only")
def hba_local(t):
    p = hba_pooler(t, "local all all trust\n")
    enters(t, p, "bob", "trust", unix=True)
    fails("login rejected|no authentication method", p.connect, "bob")


@check("hba/peer")
def hba_peer(t):
    p = hba_pooler(t, "local all all peer\n", auth_file='"bob" "bob"\n"' + host.service_user_name() + '" ""\n',
                   databases={"p0": t.target(user="bob")})
    run = subprocess.run([host.pg_bin("psql"), "-XAt", "-h", p.directory, "-p", str(p.port), "-d", "p0", "-U",
                          host.service_user_name(), "-c", "SELECT 1"], capture_output=True, text=True, check=False,
                         cwd="/tmp", **host.run_as(host.service_user()))
    same(run.stdout.strip(), "1", run.stderr)
    fails("unix socket login rejected", p.connect, "bob", unix=True)


@check("hba/reload")
def hba_reload(t):
    p = hba_pooler(t, "host all bob 0.0.0.0/0 reject\nhost all admin 0.0.0.0/0 trust\n")
    fails("login rejected", p.connect, "bob")
    p.write("hba.conf", "host all all 0.0.0.0/0 trust\n")
    p.admin("RELOAD")
    enters(t, p, "bob", "trust")


@check("hba/replication-keyword")
def hba_replication(t):
    p = hba_pooler(t, "host replication replica 0.0.0.0/0 trust\nhost all all 0.0.0.0/0 reject\n")
    fails("login rejected", p.connect, "replica")
    client = t.connect(p, "replica", params={"replication": "true"})
    same(len(client.rows("IDENTIFY_SYSTEM")), 1)


@check("hba/ident-map")
def hba_ident(t):
    name = host.service_user_name()
    p = t.pooler({"auth_type": "hba", "auth_hba_file": "{dir}/hba.conf", "auth_ident_file": "{dir}/ident.conf"},
                 files={"hba.conf": "local all all peer map=m\n", "ident.conf": f"m {name} bob\n"})
    run = subprocess.run([host.pg_bin("psql"), "-XAt", "-h", p.directory, "-p", str(p.port), "-d", "p0", "-U", "bob",
                          "-c", "SELECT current_user"], capture_output=True, text=True, check=False, cwd="/tmp",
                         **host.run_as(host.service_user()))
    same(run.stdout.strip(), "bob", run.stderr)


# --- towards the server


@check("server-auth/each-method")
def server_auth(t):
    p = t.pooler()
    for user in ("scram_user", "md5_user", "plain_user"):
        same(t.connect(p, user).one("SELECT current_user"), user)


@check("server-auth/user-and-password-of-database")
def server_auth_forced(t):
    p = t.pooler({"auth_type": "scram-sha-256"},
                 databases={"p0": t.target(user="scram_two", password="scram_two")}, auth_file='"bob" "bob"\n')
    same(t.connect(p).one("SELECT current_user"), "scram_two")


@check("server-auth/password-of-database-is-of-its-user-alone")
def server_auth_password(t):
    p = t.pooler({"auth_type": "md5", "auth_query": "SELECT $1::text, 'word'::text"}, databases={
        "forced": t.target(user="scram_two", password="scram_two", auth_user="scram_user"),
        "p0": t.target(password="no", auth_user="scram_user")}, auth_file='"scram_user" "scram_user"\n')
    same(t.connect(p, "bob", "forced", password="word").one("SELECT current_user"), "scram_two")
    same(t.connect(p, "bob", "p0", password="word").one("SELECT current_user"), "bob")
    same(t.connect(p, "scram_user", "p0").one("SELECT current_user"), "scram_user")


@check("server-auth/wrong-password-is-told")
def server_auth_wrong(t):
    p = t.pooler(databases={"p0": t.target(user="scram_user", password="no")})
    fails("password authentication failed", lambda: t.connect(p).query("SELECT 1"))
    p.wait_log("server login failed: FATAL password authentication failed")
