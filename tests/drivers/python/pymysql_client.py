# SPDX-License-Identifier: Apache-2.0
"""PyMySQL: a text protocol driver that writes parameters into its statements."""

import tempfile

import pymysql

from harness import DATABASE, HOST, PASSWORD, PORT, USER, check, run


def connect(**options):
    """A connection in autocommit."""
    return pymysql.connect(host=HOST, port=PORT, user=USER, password=PASSWORD, database=DATABASE, local_infile=True,
                           **{"autocommit": True, "ssl_disabled": True, **options})


@check
def parameters():
    with connect() as c, c.cursor() as cursor:
        values = (41, None, "o'clock \\ \0 ä", b"\x00\xff", 1.5)
        cursor.execute("SELECT %s + 1, %s, %s, %s, %s", values)
        assert cursor.fetchone()[:2] == (42, None)


@check
def many_rows_and_transactions():
    with connect(autocommit=False) as c, c.cursor() as cursor:
        cursor.execute("CREATE OR REPLACE TABLE py (a int primary key, b text)")
        cursor.executemany("INSERT INTO py VALUES (%s, %s)", [(n, f"row {n}") for n in range(1000)])
        c.commit()
        cursor.execute("DELETE FROM py")
        c.rollback()
        cursor.execute("SELECT count(*) FROM py")
        assert cursor.fetchone() == (1000,)


@check
def errors_and_other_commands():
    with connect() as c, c.cursor() as cursor:
        try:
            cursor.execute("SELECT * FROM nowhere")
        except pymysql.ProgrammingError:
            pass
        c.select_db("mysql")
        c.ping()
        cursor.execute("SELECT database()")
        assert cursor.fetchone() == ("mysql",)


@check
def several_statements_at_once():
    with connect(client_flag=pymysql.constants.CLIENT.MULTI_STATEMENTS) as c, c.cursor() as cursor:
        cursor.execute("SELECT 1; SELECT 2")
        assert cursor.fetchone() == (1,) and cursor.nextset() and cursor.fetchone() == (2,)


@check
def a_local_file():
    with connect() as c, c.cursor() as cursor, tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(b"%d\trow\n" % n for n in range(50_000)))
        file.flush()
        cursor.execute("CREATE OR REPLACE TABLE pyfile (a int, b text)")
        cursor.execute(f"LOAD DATA LOCAL INFILE '{file.name}' INTO TABLE pyfile")
        cursor.execute("SELECT count(*) FROM pyfile")
        assert cursor.fetchone() == (50_000,)


@check
def a_long_statement():
    with connect() as c, c.cursor() as cursor:
        cursor.execute("SELECT length(%s)", ("x" * 10_000_000,))
        assert cursor.fetchone() == (10_000_000,)


run()
