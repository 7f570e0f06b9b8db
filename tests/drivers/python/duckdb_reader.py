# SPDX-License-Identifier: Apache-2.0
"""Reads the Parquet of a trace by DuckDB, as an analyst would, all its partitions at once: prints as JSON what is in it."""

import json
import sys

import duckdb

place = sys.argv[1]
duckdb.sql("set timezone = 'UTC'")
statements = f"read_parquet('{place}/statements/**/*.parquet', hive_partitioning = true)"
sessions = f"read_parquet('{place}/sessions/*.parquet')"


def number(query):
    """The only value."""
    (value,), = duckdb.sql(query).fetchall()
    return value


print(json.dumps({
    "simple": duckdb.sql(f"select session, text from {statements} where kind = 'simple' order by session, request").fetchall(),
    "extended": number(f"select count(*) from {statements} where kind = 'extended'"),
    # In another partition than that of their time.
    "misplaced": number(f"select count(*) from {statements} where date != time::date or hour::int != extract('hour' from time)"),
    "without_session": number(f"select count(*) from {statements} anti join {sessions} using (session)"),
    "sessions": number(f"select count(*) from {sessions}"),
}))
