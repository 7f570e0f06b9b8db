#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Every supported PostgreSQL major version, and MySQL: pooler, recorder and replayer.
# POOLER=underpass (default) or pgbouncer chooses the pooler; --help lists the options.
exec env PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 python3 "$(dirname "$0")/main.py" "$@"
