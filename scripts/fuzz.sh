#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Every fuzz target for $1 seconds, from the corpora that are checked in. The last line is `N passed, N failed`.
set -uo pipefail
cd "$(dirname "$0")/../fuzz"
seconds=${1:-60}
# cargo-fuzz wants the sanitizers of a nightly compiler; a stable one takes them with this variable.
export RUSTC_BOOTSTRAP=1
command -v cargo-fuzz >/dev/null || cargo install cargo-fuzz --locked || exit 1
passed=0 failed=0
for target in $(cargo fuzz list); do
    if cargo fuzz run "$target" -- -max_total_time="$seconds" -rss_limit_mb=2048; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
    fi
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
