#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# `make ci-full`: everything, one suite after the other, and docs/ci-full.md with what came out.
#
#   scripts/ci-full.sh             all parts that have no result for the present code, then the summary
#   scripts/ci-full.sh PART...     these parts, again if need be, then the summary
#   scripts/ci-full.sh --list      the parts, about how long each takes, and its result if there is one
#
# A part's result is kept, with its log, under target/ci-full/REVISION: a run that was interrupted goes on where it was, and
# parts can be run one by one. REVISION is the last commit that changed what the part is about: for most anything but documents and measurements, for
# those of the pooler alone neither what it is not built from (below), and never the tests of another part: those of crates, with crate testkit and what runs them, are of `lint`, `test`, `test-lanes` and `versions`. A part that cannot run here is in the summary as skipped with its reason, never left out.
# UNDERPASS_BIN names a program to use instead of building one; SOAK_TRANSACTIONS, SOAK_MIRROR_TRANSACTIONS and FUZZ_SECONDS make a run shorter.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
summary=docs/ci-full.md
code=(. ':!docs' ':!bench/results' ':!*.md')
# Crates that are in the program, but that the pooler, the leak checker and the fixtures do not use; checked by other_crates().
others=(bench capture charts export replay report stats)
# The files of those commands of the program that are for these crates alone.
commands=(export.rs replay.rs report.rs trace.rs)
# This script, and that of `make run`, which only `lint` and `test` look at.
apart=(':!scripts/ci-full.sh' ':!scripts/run.sh')
pooler=("${code[@]}" "${others[@]/#/:!crates/}" "${commands[@]/#/:!crates/cli/src/}" ':!bench' ':!fuzz' ':!etc' ':!packaging' "${apart[@]}")
target=${CARGO_TARGET_DIR:-target}

other_crates() {
    local used
    used=$(cargo tree --locked --prefix none -e normal,build,dev -p underpass-pooler -p underpass-soak -p underpass-testkit) || die "cargo tree failed"
    for crate in "${others[@]}"; do
        ! grep -q "^underpass-$crate " <<<"$used" || die "the pooler uses crate $crate now: take it out of \`others\` in $0"
    done
}

# revision_of PART: the last commit that changed what it is about.
revision_of() {
    local about=("${code[@]}") revision suite
    case $1 in
        # No program of ours is in it.
        compat-pgbouncer) about=(tests/compat tests/lib) ;;
        test-lanes | compat* | regress* | soak*) about=("${pooler[@]}") ;;
        # Formats and state machines, which none of these is under either.
        fuzz) about+=("${others[@]/#/:!crates/}" "${commands[@]/#/:!crates/cli/src/}" "${apart[@]}") ;;
        lint) ;;
        test) about+=(':!scripts/ci-full.sh') ;;
        *) about+=("${apart[@]}") ;;
    esac
    # It runs the tests of other packages.
    [ "$1" != test-lanes ] || about+=(':!crates/cli/tests')
    case $1 in
        lint | test | test-lanes | versions | all) ;;
        *) about+=(':!crates/*/tests/*' ':!crates/testkit' ':!scripts/test.sh') ;;
    esac
    # The leak checker is in none of these.
    case $1 in
        compat* | regress* | drivers* | kernels | fuzz) about+=(':!crates/soak') ;;
    esac
    # The suites in Python have it, and nothing else.
    case $1 in test-lanes | soak* | fuzz) about+=(':!tests/lib') ;; esac
    # Each of these is one part's own, with and without lanes.
    for suite in compat drivers kernels regress versions; do
        [[ $1 == "$suite"* || $1 == lint ]] || about+=(":!tests/$suite")
    done
    revision=$(git log -1 --format=%h --abbrev=12 -- "${about[@]}")
    git diff --quiet HEAD -- "${about[@]}" || revision="$revision-with-local-changes"
    echo "$revision"
}

state_of() { echo "$target/ci-full/$(revision_of "$1")"; }

# Name, minutes on two quiet processors with everything built and fetched, what it is.
parts="lint|1|formatting, clippy, documentation, rules of the tree
test|17|every cargo test, with real servers
test-lanes|12|the tests that start a pooler, with kernel lanes required: each transaction in user space has a reason
compat|1|console and behaviour as PgBouncer's
compat-lanes|3|the same with kernel lanes required
compat-pgbouncer|17|the same checks against Debian's PgBouncer
drivers|1|nine client libraries and programs, session and transaction pooling; recorded, and three of MariaDB
drivers-lanes|1|the same with kernel lanes required
regress|1|PostgreSQL's regression suite, directly and through session pooling
regress-lanes|1|the same with kernel lanes required
versions|5|PostgreSQL 14 to 18, MySQL 5.6
kernels|1|Debian's 6.1 kernel in an emulated machine
soak|2|the leak checker, ${SOAK_TRANSACTIONS:-2000000} transactions
soak-lane-d|2|the leak checker through kernel lane D, with hand-overs at random, 2500000 transactions
soak-lane-a|2|the same through lane A
soak-lane-b|2|the same through lane B
soak-queue-d|2|the leak checker's 220 clients on 20 servers, lane D, where the kernel forwards their answers, 1000000 transactions
soak-queue-a|2|the same in lane A, where the kernel keeps the queue, too
soak-queue-b|2|the same in lane B
soak-mirror|6|the leak checker with a mirror, ${SOAK_MIRROR_TRANSACTIONS:-1000000} transactions, TPC-B and others: equal data, an account that balances
soak-mirror-d|4|the same with the clients in kernel lane D, ${SOAK_MIRROR_TRANSACTIONS:-300000} transactions
soak-mirror-a|4|the same in lane A
soak-broken|8|the checker itself: a pooler that is broken on purpose, built for it
soak-pgbouncer|2|the checker itself: PgBouncer, 200000 transactions
soak-direct|1|the checker itself: no pooler, 200000 transactions
fuzz|15|every fuzz target, from the corpora that are checked in"

names() { cut -d '|' -f 1 <<<"$parts"; }

# The programs, built once for all parts; cargo finds nothing to do when a part builds them again.
program() {
    [ -z "${UNDERPASS_BIN:-}" ] || return 0
    make --no-print-directory build || return 1
    UNDERPASS_BIN=$(realpath "$target/release/underpass")
    export UNDERPASS_BIN
}

# One part; its last word is its exit status. 77 means skipped, for the reason in its last line.
part() {
    case $1 in
        lint) make --no-print-directory lint ;;
        # The tests take the program that was built with them.
        test) env -u UNDERPASS_BIN scripts/test.sh ;;
        test-lanes) env -u UNDERPASS_BIN UNDERPASS_TEST_KERNEL_PATH=require scripts/test.sh ;;
        compat | drivers | regress) program && KERNEL_PATH=off "tests/$1/run.sh" ;;
        versions) program && tests/versions/run.sh ;;
        compat-lanes | drivers-lanes | regress-lanes)
            [ "$(id -u)" -eq 0 ] || { echo "skipped: kernel lanes need root"; return 77; }
            program && KERNEL_PATH=require "tests/${1%-lanes}/run.sh" ;;
        compat-pgbouncer) POOLER=pgbouncer tests/compat/run.sh ;;
        kernels)
            command -v qemu-system-x86_64 >/dev/null || { echo "skipped: qemu-system-x86_64 is not installed"; return 77; }
            program && tests/kernels/run.sh ;;
        soak-lane-d | soak-lane-a | soak-lane-b)
            [ "$(id -u)" -eq 0 ] || { echo "skipped: kernel lanes need root"; return 77; }
            POOLER=${1#soak-} scripts/soak.sh 2500000 ;;
        soak-queue-d | soak-queue-a | soak-queue-b)
            [ "$(id -u)" -eq 0 ] || { echo "skipped: kernel lanes need root"; return 77; }
            POOLER=${1#soak-} scripts/soak.sh 1000000 ;;
        soak-mirror) scripts/soak-mirror.sh "${SOAK_MIRROR_TRANSACTIONS:-1000000}" ;;
        soak-mirror-d | soak-mirror-a)
            [ "$(id -u)" -eq 0 ] || { echo "skipped: kernel lanes need root"; return 77; }
            POOLER=lane-${1#soak-mirror-} scripts/soak-mirror.sh "${SOAK_MIRROR_TRANSACTIONS:-300000}" ;;
        soak) scripts/soak.sh "${SOAK_TRANSACTIONS:-2000000}" ;;
        soak-broken) scripts/soak-broken.sh ;;
        soak-pgbouncer) POOLER=pgbouncer scripts/soak.sh 200000 ;;
        soak-direct) POOLER=direct scripts/soak.sh 200000 ;;
        fuzz) scripts/fuzz.sh "${FUZZ_SECONDS:-60}" ;;
        *) die "no such part: $1 (scripts/ci-full.sh --list)" ;;
    esac
}

# Runs a part and keeps `result|count|skipped|seconds|date`.
run() {
    local state log begin=$SECONDS status result counts carried skips
    state=$(state_of "$1")
    log=$state/$1.log
    mkdir -p "$state"
    say "=== $1"
    (part "$1") >"$log" 2>&1 </dev/null
    status=$?
    case $status in
        0) result=passed ;;
        77) result=skipped ;;
        130 | 143) say "$1 was interrupted"; exit "$status" ;;
        *) result=FAILED && tail -n 40 "$log" >&2 ;;
    esac
    counts=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$log" | tail -n 1)
    [ -n "$counts" ] || counts=$(grep -E '^[0-9]+ transactions in ' "$log" | tail -n 1)
    # What soak.sh says of a lane.
    carried=$(grep -oE 'lane [ABD]: [0-9]+ transactions carried, [0-9]+ in user space' "$log" | tail -n 1)
    [ -z "$carried" ] || counts+="; $carried"
    skips=$(grep -hE '^skipped: ' "$log" | sed 's/^skipped: //; s/|/,/g' | sort -u | paste -sd ';' | sed 's/;/; /g')
    echo "$result|${counts:--}|${skips:-none}|$((SECONDS - begin)) s|$(date -u '+%F %H:%M')" >"$state/$1.row"
    say "$result ${counts:-} in $((SECONDS - begin)) s"
}

# newest_of PART: where its last result is, of whatever revision.
newest_of() {
    local row
    row=$(ls -t "$target"/ci-full/*/"$1.row" 2>/dev/null | head -n 1)
    [ -z "$row" ] || dirname "$row"
}

write_summary() {
    local name minutes what missing=0 revision state row before
    before=$(git show "HEAD:$summary" 2>/dev/null)
    {
        echo "# Last full run of all suites"
        echo
        echo "Written by \`make ci-full\`; \`scripts/ci-full.sh --list\` shows the parts. Revision $(revision_of all), Linux $(uname -r)," \
            "$(nproc) processors, $(rustc --version | cut -d ' ' -f 1-2). A part of the pooler alone has the revision that last changed anything that the pooler," \
            "the leak checker and the fixtures are built from; crates ${others[*]} and their commands are not among it."
        echo
        echo "| part | what | revision | result | count | skipped, and why | time | finished (UTC) |"
        echo "|---|---|---|---|---|---|---|---|"
        while IFS='|' read -r name minutes what; do
            revision=$(revision_of "$name")
            state=$target/ci-full/$revision
            if [ -f "$state/$name.row" ]; then
                IFS='|' read -r result counts skips seconds at <"$state/$name.row"
                echo "| $name | $what | $revision | $result | $counts | $skips | $seconds | $at |"
            elif state=$(newest_of "$name"); [ -n "$state" ]; then
                # Of older code, and it says so.
                IFS='|' read -r result counts skips seconds at <"$state/$name.row"
                echo "| $name | $what | older: $(basename "$state") | $result | $counts | $skips | $seconds | $at |"
            elif row=$(grep "^| $name |" <<<"$before" | grep -v '| not run |'); [ -n "$row" ]; then
                # Of another machine's run, checked in.
                IFS='|' read -r _ _ _ revision row <<<"$row"
                revision=${revision# } && revision=${revision#older: } && revision=${revision% }
                [ "$revision" = "$(revision_of "$name")" ] || revision="older: $revision"
                echo "| $name | $what | $revision |$row"
            else
                echo "| $name | $what | $revision | not run | - | takes about $minutes min | - | - |"
            fi
        done <<<"$parts"
    } >"$summary"
    cat "$summary"
    while read -r name; do
        grep -qE '^(passed|skipped)\|' "$(state_of "$name")/$name.row" 2>/dev/null || missing=$((missing + 1))
    done < <(names)
    [ "$missing" -eq 0 ] || say "$missing parts failed or have not run; logs: $target/ci-full"
    [ "$missing" -eq 0 ]
}

if [ "${1:-}" = --list ]; then
    while IFS='|' read -r name minutes what; do
        printf '%-17s %3s min  %-66s %s\n' "$name" "$minutes" "$what" "$(cut -d '|' -f 1,2 "$(state_of "$name")/$name.row" 2>/dev/null)"
    done <<<"$parts"
    exit 0
fi
other_crates
if [ $# -gt 0 ]; then
    for name in "$@"; do
        names | grep -qx -- "$name" || die "no such part: $name (scripts/ci-full.sh --list)"
    done
    for name in "$@"; do run "$name"; done
else
    while read -r name; do
        grep -qE '^(passed|skipped)\|' "$(state_of "$name")/$name.row" 2>/dev/null || run "$name"
    done < <(names)
fi
write_summary
