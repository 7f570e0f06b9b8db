#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The leak checker proves itself: it must catch a pooler that gives a server away at the first ReadyForQuery. That pooler is built here
# (unoptimised) from a copy of the tree in which the tracker forgets at a ReadyForQuery what else is outstanding.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
copy=$(mktemp -d /tmp/underpass-broken.XXXXXX)
trap 'rm -rf "$copy"' EXIT
git ls-files -z --cached --others --exclude-standard | tar -c --null -T - | tar -x -C "$copy"
tracker=$copy/crates/pool/src/link/backend.rs
ready='show = self.ready(body, observer)?;'
[ "$(grep -cF "$ready" "$tracker")" -eq 1 ] || die "the tracker handles ReadyForQuery otherwise now: change $0"
sed -i "s/$ready/& self.pending.clear();/" "$tracker"
(cd "$copy" && CARGO_TARGET_DIR="$target/broken" cargo build --locked -p underpass -p underpass-soak)
log=$copy/soak.log
status=0
UNDERPASS_BIN=$target/broken/debug/underpass scripts/soak.sh "${1:-20000}" >"$log" 2>&1 || status=$?
sed -n '/^violations/,$p' "$log"
# 1 is the checker's status for violations; anything else is another failure.
[ "$status" -eq 1 ] && grep -q '^violations' "$log" || { tail -n 40 "$log"; die "the broken build was not caught (status $status)"; }
say "1 passed, 0 failed: the broken build was caught"
