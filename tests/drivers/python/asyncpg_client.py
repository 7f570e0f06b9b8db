# SPDX-License-Identifier: Apache-2.0
"""asyncpg: always extended protocol, binary format and named statements."""

import asyncio
import datetime
import decimal
import io
import ssl
import uuid

import asyncpg

from harness import CA, DATABASE, HOST, LARGE, PASSWORD, PORT, REPEATS, TABLE, USER, check, run


async def connect(**options):
    """A connection; TLS only when asked for."""
    return await asyncpg.connect(**{"host": HOST, "port": PORT, "user": USER, "password": PASSWORD,
                                    "database": DATABASE, "ssl": False, "timeout": 20, **options})


@check
async def connect_scram():
    c = await connect()
    assert await c.fetchval("SELECT current_user") == USER
    await c.close()


@check
async def connect_tls_require():
    c = await connect(ssl="require")
    assert await c.fetchval("SELECT 1") == 1
    await c.close()


@check
async def connect_tls_verify_full():
    c = await connect(ssl=ssl.create_default_context(cafile=CA))
    assert await c.fetchval("SELECT 1") == 1
    await c.close()


@check
async def wrong_password():
    try:
        await connect(password="no")
    except (asyncpg.InvalidPasswordError, asyncpg.PostgresError) as error:
        assert "authentication failed" in str(error), error
        return
    raise AssertionError("let in")


@check
async def simple():
    c = await connect()
    assert await c.execute("SELECT 1; SELECT 2") == "SELECT 1"
    await c.close()


@check
async def prepared():
    one, two = await connect(), await connect()
    statements = [await c.prepare("SELECT $1::int * 2") for c in (one, two)]
    for number in range(20):
        for statement in statements:
            assert await statement.fetchval(number) == number * 2
    await one.close()
    await two.close()


@check
async def repeated():
    one, two = await connect(), await connect()
    statements = [await c.prepare("SELECT $1::int * 2") for c in (one, two)]
    for number in range(REPEATS):
        for statement in statements:
            assert await statement.fetchval(number) == number * 2
    await one.close()
    await two.close()


@check
async def statement_cache():
    c = await connect(statement_cache_size=3)
    for number in range(30):
        assert await c.fetchval(f"SELECT {number % 7} + $1::int", 1) == number % 7 + 1
    await c.close()


@check
async def pool_of_clients():
    async with asyncpg.create_pool(host=HOST, port=PORT, user=USER, password=PASSWORD, database=DATABASE, ssl=False,
                                   min_size=4, max_size=8) as pool:
        async def one(number):
            async with pool.acquire() as c, c.transaction():
                return await c.fetchval("SELECT $1::int", number)
        assert await asyncio.gather(*[one(n) for n in range(100)]) == list(range(100))


@check
async def batch():
    c = await connect()
    async with c.transaction():
        await c.execute(f"CREATE TABLE {TABLE}_batch (a int, b text)")
        await c.executemany(f"INSERT INTO {TABLE}_batch VALUES ($1, $2)", [(n, f"t{n}") for n in range(2000)])
        assert await c.fetchval(f"SELECT count(*) FROM {TABLE}_batch") == 2000
        await c.execute(f"DROP TABLE {TABLE}_batch")
    await c.close()


@check
async def copy_in_and_out():
    c = await connect()
    async with c.transaction():
        await c.execute(f"CREATE TABLE {TABLE}_acopy (a int, b text)")
        rows = [(n, f"row {n}") for n in range(20000)]
        assert await c.copy_records_to_table(f"{TABLE}_acopy", records=rows) == "COPY 20000"
        out = io.BytesIO()
        await c.copy_from_query(f"SELECT * FROM {TABLE}_acopy ORDER BY a", output=out, format="csv")
        assert out.getvalue().splitlines()[-1] == b"19999,row 19999"
        await c.execute(f"DROP TABLE {TABLE}_acopy")
    await c.close()


@check
async def session_listen_notify():
    listener, sender = await connect(), await connect()
    got = asyncio.get_running_loop().create_future()
    await listener.add_listener("news", lambda _c, _p, channel, payload: got.set_result((channel, payload)))
    await sender.execute("SELECT pg_notify('news', 'hello')")
    assert await asyncio.wait_for(got, 5) == ("news", "hello")
    await listener.close()
    await sender.close()


@check
async def cancel():
    c = await connect()
    try:
        await c.execute("SELECT pg_sleep(20)", timeout=0.3)
    except (asyncio.TimeoutError, asyncpg.QueryCanceledError):
        pass
    else:
        raise AssertionError("not cancelled")
    assert await c.fetchval("SELECT 1") == 1
    await c.close()


@check
async def error_in_transaction():
    c = await connect()
    try:
        async with c.transaction():
            await c.execute("SELECT nonsense")
    except asyncpg.UndefinedColumnError:
        pass
    async with c.transaction():
        try:
            async with c.transaction():
                await c.fetchval("SELECT 1 / $1::int", 0)
        except asyncpg.DivisionByZeroError:
            pass
        assert await c.fetchval("SELECT 5") == 5
    await c.close()


@check
async def large_values():
    c = await connect()
    blob = bytes(range(256)) * (LARGE // 256)
    assert await c.fetchval("SELECT $1::bytea", blob) == blob
    text = "é" * (LARGE // 2)
    assert await c.fetchval("SELECT $1::text", text) == text
    await c.close()


@check
async def many_parameters():
    c = await connect()
    count = 30000
    sql = "SELECT count(*) FROM (VALUES " + ",".join(f"(${n + 1}::int)" for n in range(count)) + ") v"
    assert await c.fetchval(sql, *range(count)) == count
    await c.close()


@check
async def binary_types():
    values = [1, 2 ** 40, 1.5, decimal.Decimal("123.456"), "text", b"\0\xff", True, None,
              datetime.date(2024, 2, 29), datetime.datetime(2024, 1, 1, 12, 30, tzinfo=datetime.timezone.utc),
              uuid.UUID(int=7), [1, 2, 3]]
    kinds = "int4 int8 float8 numeric text bytea bool text date timestamptz uuid int4[]".split()
    c = await connect()
    row = await c.fetchrow("SELECT " + ",".join(f"${n + 1}::{kind}" for n, kind in enumerate(kinds)), *values)
    assert list(row) == values, row
    await c.close()


@check
async def cursor():
    c = await connect()
    async with c.transaction():
        total = 0
        async for row in c.cursor("SELECT generate_series(1, 5000)", prefetch=50):
            total += row[0]
    assert total == 12502500
    await c.close()


@check
async def notices():
    c = await connect()
    seen = []
    c.add_log_listener(lambda _c, message: seen.append(message.message))
    await c.execute("DO $$BEGIN RAISE NOTICE 'one'; RAISE WARNING 'two'; END$$")
    await asyncio.sleep(0.1)
    assert seen == ["one", "two"], seen
    await c.close()


@check
async def session_parameters():
    one = await connect(server_settings={"application_name": "one", "TimeZone": "Asia/Tokyo"})
    two = await connect(server_settings={"application_name": "two"})
    for _ in range(5):
        for c, expected in ((one, ("Asia/Tokyo", "one")), (two, ("UTC", "two"))):
            row = await c.fetchrow("SELECT current_setting('TimeZone'), current_setting('application_name')")
            assert tuple(row) == expected, row
    await one.close()
    await two.close()


run()
