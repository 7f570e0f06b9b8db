#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Every fuzz target, or those whose names are given after it, for $1 seconds, from the corpora that are checked in; what is found new is kept apart from them.
# The last line is `N passed, N failed, ...`.
set -uo pipefail
cd "$(dirname "$0")/../fuzz"
seconds=${1:-60}
# cargo-fuzz wants the sanitizers of a nightly compiler; a stable one takes them with this variable.
export RUSTC_BOOTSTRAP=1
command -v cargo-fuzz >/dev/null || cargo install cargo-fuzz --locked || { echo "0 passed, 1 failed"; exit 1; }
found=$(mktemp -d /tmp/underpass-fuzz.XXXXXX)
targets=${*:2}
[ -n "$targets" ] || targets=$(cargo fuzz list) || { echo "0 passed, 1 failed"; exit 1; }
passed=0 failed=0
for target in $targets; do
    mkdir "$found/$target"
    echo "=== $target"
    if cargo fuzz run "$target" "$found/$target" "corpus/$target" -- \
        -max_total_time="$seconds" -rss_limit_mb=2048 -print_final_stats=1; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
    fi
done
if [ "$failed" -eq 0 ]; then rm -rf "$found"; else echo "inputs found: $found, failing ones: fuzz/artifacts"; fi
echo "$passed passed, $failed failed, each for $seconds s"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
