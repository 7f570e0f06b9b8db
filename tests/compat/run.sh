#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# PgBouncer conformance: the same checks against PgBouncer and against us.
# POOLER=underpass (default) or pgbouncer chooses the pooler; --help lists the options.
exec env PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 python3 "$(dirname "$0")/main.py" "$@"
