#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# `make test`: every cargo test and the checks that are not cargo's. The last line is `N passed, N failed`, over all.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
log=$(mktemp /tmp/underpass-test.XXXXXX)
trap 'rm -f "$log"' EXIT
failed_commands=0

# The fixtures start the pooler from the target directory; cargo builds it only for tests of its own package.
cargo build --workspace --bins || exit 1

# Two at a time: the fixtures start servers, and more of them only wait for each other.
cargo test --workspace --no-fail-fast -- --test-threads "${TEST_THREADS:-2}" 2>&1 | tee -a "$log"
[ "${PIPESTATUS[0]}" -eq 0 ] || failed_commands=$((failed_commands + 1))

# Checks in Python stand beside what they check; each prints `N passed, N failed` last.
for script in tests/*/check.py; do
    [ -e "$script" ] || continue
    python3 "$script" 2>&1 | tee -a "$log"
    [ "${PIPESTATUS[0]}" -eq 0 ] || failed_commands=$((failed_commands + 1))
done

echo "skipped:"
grep -h '^skipped: ' "$log" | sort | uniq -c || true
read -r passed failed < <(awk '
    /^test result:/ { for (i = 1; i < NF; i++) { if ($(i + 1) == "passed;") p += $i; if ($(i + 1) == "failed;") f += $i } }
    /^[0-9]+ passed, [0-9]+ failed$/ { p += $1; f += $3 }
    END { print p + 0, f + 0 }' "$log")
# A command that failed without counting a failure (it did not compile, it crashed) is one.
[ "$failed_commands" -eq 0 ] || [ "$failed" -gt 0 ] || failed=$failed_commands
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
