#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# `make ci-full`: everything, one suite after the other, and docs/ci-full.md with what came out. A suite that is not there
# or cannot run on this machine is listed as skipped with its reason, never left out.
set -uo pipefail
cd "$(dirname "$0")/.."
logs=$(mktemp -d /tmp/underpass-ci-full.XXXXXX)
summary=docs/ci-full.md
rows=() failures=0

# suite NAME COMMAND...: runs it, keeps the log, adds a row.
suite() {
    local name=$1 begin=$SECONDS result counts skips
    shift
    echo "=== $name" >&2
    if "$@" >"$logs/$name.log" 2>&1; then
        result=passed
    else
        result=FAILED failures=$((failures + 1))
        tail -n 40 "$logs/$name.log" >&2
    fi
    counts=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$logs/$name.log" | tail -n 1)
    [ -n "$counts" ] || counts=$(grep -E '^[0-9]+ transactions in ' "$logs/$name.log" | tail -n 1)
    skips=$(grep -hE '^skipped: ' "$logs/$name.log" | sed 's/^skipped: //' | sort -u | paste -sd ';' | sed 's/;/; /g')
    rows+=("| $name | $result | ${counts:--} | ${skips:-none} | $((SECONDS - begin)) s |")
}

skip() { echo "=== $1: skipped, $2" >&2; rows+=("| $1 | skipped | - | $2 | - |"); }

suite lint make lint
suite test make test
suite soak make test-soak
suite soak-pgbouncer env POOLER=pgbouncer scripts/soak.sh 200000
suite soak-direct env POOLER=direct scripts/soak.sh 200000
for name in compat drivers regress versions kernels; do
    if [ -x "tests/$name/run.sh" ]; then suite "$name" make "test-$name"; else skip "$name" "tests/$name/run.sh is not there"; fi
done
if [ -d fuzz ]; then suite fuzz make fuzz-smoke; else skip fuzz "no fuzz targets"; fi

revision=$(git rev-parse --short=12 HEAD)
git diff --quiet HEAD -- . ":!$summary" || revision="$revision, with local changes"
{
    echo "# Last full run of all suites"
    echo
    echo "Written by \`make ci-full\`. Revision $revision, $(date -u +%F), Linux $(uname -r), $(nproc) processors, $(rustc --version)."
    echo
    echo "| suite | result | count | skipped, and why | time |"
    echo "|---|---|---|---|---|"
    printf '%s\n' "${rows[@]}"
} >"$summary"
cat "$summary"
if [ "$failures" -eq 0 ]; then rm -rf "$logs"; else echo "logs of the failed suites: $logs" >&2; fi
[ "$failures" -eq 0 ]
