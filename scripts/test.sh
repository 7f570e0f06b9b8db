#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# `make test`: every cargo test. At the end stand the failed tests, what was skipped and why, and `N passed, N failed`.
# `make test-lanes`: those that start a pooler, with UNDERPASS_TEST_KERNEL_PATH=require, and those that hand links over at random. Each pooler
# tells in the end in which kernel lane its transactions were, and why not; a test fails for one that nobody explained
# (crates/testkit/src/account.rs). The sum of all is printed.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
log=$(mktemp /tmp/underpass-test.XXXXXX)
trap 'rm -f "$log"' EXIT

# One build of everything: `cargo build --bins` alone would choose other features and compile half of it a second time.
# The programs are built here, because cargo builds them only for tests of their own package.
cargo build ${CI:+--locked} --workspace --lib --bins --tests --examples || { echo "0 passed, 1 failed"; exit 1; }
# What the fixtures start.
UNDERPASS_BIN=${UNDERPASS_BIN:-$(realpath "${CARGO_TARGET_DIR:-target}/debug/underpass")}
export UNDERPASS_BIN
# Tests of the lanes themselves have them in any case.
export UNDERPASS_TEST_KERNEL_PATH=${UNDERPASS_TEST_KERNEL_PATH:-off}
packages=(--workspace)
if [ "$UNDERPASS_TEST_KERNEL_PATH" = require ]; then
    [ "$(id -u)" -eq 0 ] || { echo "skipped: kernel lanes need root"; exit 77; }
    packages=(-p underpass-pooler -p underpass-soak -p underpass-testkit)
fi

# One more than there are processors, for most tests wait now and then, and not many more, for the fixtures start servers. Output is
# shown because the reasons of skipped tests are in it.
run() {
    "${heed_signals[@]}" cargo test ${CI:+--locked} "$@" --no-fail-fast -- --test-threads "${TEST_THREADS:-$(($(nproc) + 1))}" --show-output \
        </dev/null 2>&1 | tee -a "$log"
    return "${PIPESTATUS[0]}"
}
run "${packages[@]}"
status=$?
# With ten times as many hand-overs as in `make test`.
if [ "$UNDERPASS_TEST_KERNEL_PATH" = require ]; then run --workspace --test chaos || status=1; fi

echo
grep -hE '^test .* FAILED$' "$log"
if grep -q '^skipped: ' "$log"; then
    echo "skipped:"
    grep -h '^skipped: ' "$log" | sort | uniq -c
fi
if [ "$UNDERPASS_TEST_KERNEL_PATH" = require ]; then
    awk '
        /^account: [0-9]/ { asked++; total += $2; for (i = 4; i < NF; i++) if ($i ~ /^([A-Z]|user)$/) of[$i] += $(i + 1) }
        /^account: n/ { untold++ }
        END {
            printf "account: %d poolers, %d that have no lanes or no console: %d transactions", asked, untold, total
            for (lane in of) printf ", %s %d", lane, of[lane]
            print ""
            exit asked == 0
        }' "$log" || status=1
fi
read -r passed failed < <(awk '
    /^test result:/ { for (i = 1; i < NF; i++) { if ($(i + 1) == "passed;") p += $i; if ($(i + 1) == "failed;") f += $i } }
    END { print p + 0, f + 0 }' "$log")
# A run that failed without counting a failure (it did not compile, it crashed) is one.
[ "$status" -eq 0 ] || [ "$failed" -gt 0 ] || failed=1
echo "$passed passed, $failed failed"
[ "$status" -eq 0 ] && [ "$failed" -eq 0 ]
