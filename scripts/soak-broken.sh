#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The leak checker proves itself: it must catch a pooler that gives a server away at the first ReadyForQuery. That pooler is built here
# (unoptimised) from a copy of the tree in which the tracker forgets at a client's ReadyForQuery what else is outstanding; at one of the pooler's own, which
# clients' requests follow at once, it would trip over itself before anybody sees a foreign row.
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
sed -i "s/$ready/& if show { self.pending.clear(); }/" "$tracker"
(cd "$copy" && CARGO_TARGET_DIR="$target/broken" cargo build --locked -p underpass -p underpass-soak)
log=$copy/soak.log
status=0
UNDERPASS_BIN=$target/broken/debug/underpass scripts/soak.sh "${1:-20000}" >"$log" 2>&1 || status=$?
sed -n '/^violations/,$p' "$log"
# 1 is the checker's status for violations; anything else is another failure.
[ "$status" -eq 1 ] && grep -q '^violations' "$log" || { tail -n 40 "$log"; die "the broken build was not caught (status $status)"; }
say "1 passed, 0 failed: the broken build was caught"
