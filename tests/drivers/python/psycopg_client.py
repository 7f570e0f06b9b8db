# SPDX-License-Identifier: Apache-2.0
"""psycopg 3."""

import threading
import time

import psycopg
from psycopg import errors, sql

from harness import CA, DATABASE, HOST, LARGE, PASSWORD, PORT, REPEATS, TABLE, USER, check, run


def connect(**options):
    """A connection in autocommit, so that only `transaction()` opens transactions."""
    return psycopg.connect(host=HOST, port=PORT, user=USER, password=PASSWORD, dbname=DATABASE, connect_timeout=20,
                           **{"autocommit": True, "sslmode": "disable", **options})


@check
def connect_scram():
    with connect() as c:
        assert c.execute("SELECT current_user").fetchone()[0] == USER


@check
def connect_tls_require():
    with connect(sslmode="require") as c:
        assert c.pgconn.ssl_in_use


@check
def connect_tls_verify_full():
    with connect(sslmode="verify-full", sslrootcert=CA) as c:
        assert c.execute("SELECT 1").fetchone() == (1,)


@check
def wrong_password():
    try:
        psycopg.connect(host=HOST, port=PORT, user=USER, password="no", dbname=DATABASE)
    except psycopg.OperationalError as error:
        assert "authentication failed" in str(error), error
        return
    raise AssertionError("let in")


@check
def simple_and_extended():
    with connect() as c:
        assert c.execute("SELECT 1; SELECT 2").fetchone() == (1,)
        assert c.execute("SELECT %s::int + 1, %s::text", (41, None)).fetchone() == (42, None)


@check
def prepared():
    with connect() as one, connect() as two:
        for c in (one, two):
            c.prepare_threshold = 2
        for number in range(20):
            for c in (one, two):
                assert c.execute("SELECT %s::int * 2", (number,)).fetchone() == (number * 2,)
        assert one.execute("SELECT %s::int", (1,), prepare=True).fetchone() == (1,)


@check
def repeated():
    with connect() as one, connect() as two:
        for number in range(REPEATS):
            for c in (one, two):
                assert c.execute("SELECT %s::int * 2", (number,), prepare=True).fetchone() == (number * 2,)


@check
def prepared_eviction():
    with connect(prepare_threshold=0) as c:
        c.prepared_max = 3
        for number in range(12):
            assert c.execute(f"SELECT {number % 6} + %s::int", (1,)).fetchone() == (number % 6 + 1,)


@check
def pipeline():
    with connect() as c, c.pipeline() as p:
        cursors = [c.execute("SELECT %s::int", (n,)) for n in range(300)]
        p.sync()
        assert [cur.fetchone()[0] for cur in cursors] == list(range(300))


@check
def pipeline_error():
    with connect() as c:
        try:
            with c.pipeline():
                c.execute("SELECT 1")
                c.execute("SELECT 1 / %s::int", (0,))
                c.execute("SELECT 2")
        except errors.DivisionByZero:
            pass
        else:
            raise AssertionError("no error")
        assert c.execute("SELECT 3").fetchone() == (3,)


@check
def executemany():
    with connect() as c, c.transaction():
        c.execute(sql.SQL("CREATE TABLE {} (a int, b text)").format(sql.Identifier(TABLE + "_many")))
        with c.cursor() as cur:
            cur.executemany(f"INSERT INTO {TABLE}_many VALUES (%s, %s)", [(n, f"t{n}") for n in range(1000)])
        assert c.execute(f"SELECT count(*), max(b) FROM {TABLE}_many").fetchone() == (1000, "t999")
        c.execute(f"DROP TABLE {TABLE}_many")


@check
def copy_in_and_out():
    with connect() as c, c.transaction():
        c.execute(f"CREATE TABLE {TABLE}_copy (a int, b text)")
        with c.cursor() as cur:
            with cur.copy(f"COPY {TABLE}_copy FROM STDIN") as copy:
                for number in range(20000):
                    copy.write_row((number, f"row {number}"))
            with cur.copy(f"COPY (SELECT * FROM {TABLE}_copy ORDER BY a) TO STDOUT (FORMAT binary)") as copy:
                copy.set_types(["int4", "text"])
                assert list(copy.rows()) == [(n, f"row {n}") for n in range(20000)]
        c.execute(f"DROP TABLE {TABLE}_copy")


@check
def copy_error():
    with connect() as c:
        c.execute(f"CREATE TABLE {TABLE}_bad (a int)")
        try:
            with c.cursor() as cur, cur.copy(f"COPY {TABLE}_bad FROM STDIN") as copy:
                copy.write("no number\n" * 1000)
        except errors.InvalidTextRepresentation:
            pass
        else:
            raise AssertionError("no error")
        c.execute(f"DROP TABLE {TABLE}_bad")


@check
def session_listen_notify():
    with connect() as listener, connect() as sender:
        listener.execute("LISTEN news")
        sender.execute("SELECT pg_notify('news', 'hello')")
        note = next(listener.notifies(timeout=5))
        assert (note.channel, note.payload) == ("news", "hello")


@check
def cancel():
    with connect() as c:
        threading.Timer(0.3, c.cancel).start()
        start = time.monotonic()
        try:
            c.execute("SELECT pg_sleep(20)")
        except errors.QueryCanceled:
            assert time.monotonic() - start < 10
        else:
            raise AssertionError("not cancelled")
        assert c.execute("SELECT 1").fetchone() == (1,)


@check
def error_in_transaction():
    with connect() as c:
        try:
            with c.transaction():
                c.execute("SELECT nonsense")
        except errors.UndefinedColumn:
            pass
        with c.transaction():
            try:
                with c.transaction():  # a savepoint
                    c.execute("SELECT 1/0")
            except errors.DivisionByZero:
                pass
            assert c.execute("SELECT 5").fetchone() == (5,)
        try:
            c.execute("SELECT 1 FROM nowhere")
        except errors.UndefinedTable as error:
            assert error.sqlstate == "42P01"


@check
def large_values():
    with connect() as c:
        blob = bytes(range(256)) * (LARGE // 256)
        for binary in (False, True):
            back = c.execute("SELECT %b", (blob,), binary=binary).fetchone()[0]
            assert bytes(back) == blob
        text = "é" * (LARGE // 2)
        assert c.execute("SELECT %s::text", (text,)).fetchone()[0] == text


@check
def many_parameters():
    with connect() as c:
        values = list(range(30000))
        row = c.execute("SELECT count(*) FROM (VALUES " + ",".join(["(%s::int)"] * len(values)) + ") v", values)
        assert row.fetchone() == (30000,)


@check
def text_and_binary():
    import datetime
    import decimal
    import uuid
    values = (1, 2 ** 40, 1.5, decimal.Decimal("123.456"), "text", b"\0\xff", True, None,
              datetime.date(2024, 2, 29), datetime.datetime(2024, 1, 1, 12, 30, tzinfo=datetime.timezone.utc),
              uuid.UUID(int=7), [1, 2, 3])
    with connect() as c:
        for binary in (False, True):
            row = c.execute("SELECT " + ",".join(["%s"] * len(values)), values, binary=binary).fetchone()
            assert tuple(row) == values, row


@check
def notices():
    with connect() as c:
        seen = []
        c.add_notice_handler(lambda diag: seen.append((diag.severity, diag.message_primary)))
        c.execute("DO $$BEGIN RAISE NOTICE 'one'; RAISE WARNING 'two'; END$$")
        assert seen == [("NOTICE", "one"), ("WARNING", "two")], seen


@check
def server_side_cursor():
    with connect() as c, c.transaction(), c.cursor(name="cur") as cur:
        cur.execute("SELECT generate_series(1, 5000)")
        cur.itersize = 100
        assert sum(row[0] for row in cur) == 12502500


@check
def session_parameters():
    with connect(application_name="one") as one, connect(application_name="two") as two:
        one.execute("SET TimeZone = 'Asia/Tokyo'")
        for _ in range(5):
            assert two.execute("SELECT current_setting('TimeZone'), current_setting('application_name')").fetchone() \
                == ("UTC", "two")
            assert one.execute("SELECT current_setting('TimeZone'), current_setting('application_name')").fetchone() \
                == ("Asia/Tokyo", "one")


run()
