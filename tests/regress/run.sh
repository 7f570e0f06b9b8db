#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# PostgreSQL's own regression suite, directly and through session pooling.
# POOLER=underpass (default) or pgbouncer chooses the pooler; --help lists the options.
exec env PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 python3 "$(dirname "$0")/main.py" "$@"
