#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# scripts/soak-mirror.sh [TRANSACTIONS]: mirroring under load. Two private PostgreSQL, our pooler in front of the first, the second its mirror:
#
#   1. the leak checker with all its faults (a million transactions), asynchronous mirror, a queue that holds;
#   2. pgbench TPC-B, a tenth of that in each of three protocols, compared without pgbench_history.mtime;
#   3. a queue that does not hold: what is there and what was dropped are what was sent, and nothing is there in part;
#   4. `set v = md5(v || n)` in sync mode, a tenth, one writer for each row;
#   5. the leak checker in sync mode, a tenth;
#   both with `sync_each = statement` and `transaction`, and with the second
#   6. pgbench TPC-B, a tenth.
#
# After each step both servers must hold the same data (3: the same transactions but for the dropped ones), and the account of SHOW MIRRORS
# must agree with the servers' own pg_stat_statements.
# POOLER=lane-d or lane-a (as root) does that in that kernel lane, but for `sync_each = statement`, whose clients a load without pauses keeps out of it.
# UNDERPASS_BIN names a program to use instead of building it; the checker is the one beside it.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
transactions=${1:-1000000}
kind=${POOLER:-underpass}
tenth=$((transactions / 10))

target=$(checker_programs)
directory=$(mktemp -d /tmp/underpass-soak.XXXXXX)
mkdir "$directory/here" "$directory/there"
chmod 755 "$directory"
[ "$(id -u)" -ne 0 ] || chown -R "$(service_user)" "$directory"
pids=()
clean_up() {
    status=$?
    trap - EXIT INT TERM
    if [ "$status" -ne 0 ]; then tail -n 20 "$directory"/pooler.log >&2 || true; fi
    for ((i = ${#pids[@]} - 1; i >= 0; i--)); do end_process INT "${pids[i]}"; done
    rm -rf "$directory"
    exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

settings=(max_connections=300 log_min_messages=fatal autovacuum=off shared_preload_libraries=pg_stat_statements pg_stat_statements.track=top)
here=$(free_port 21432)
start_postgres "$directory/here" "$here" "${settings[@]}"
pids+=("$POSTGRES_PID")
there=$(free_port $((here + 1)))
start_postgres "$directory/there" "$there" "${settings[@]}"
pids+=("$POSTGRES_PID")
port=$(free_port 22432)

case $kind in
    underpass) clients=220 servers=20 lanes='' ;;
    lane-d | lane-a)
        [ "$(id -u)" -eq 0 ] || die "kernel lanes need root"
        # A server for each client, as in scripts/soak.sh: clients that queue are user space's more often.
        clients=60 servers=64
        same_host=off
        [ "$kind" = lane-d ] || same_host=server
        lanes="kernel_path = require
same_host = $same_host
mirror_ring_bytes = 67108864" ;;
    *) die "POOLER is underpass, lane-d or lane-a" ;;
esac

# The pooler's configuration; arguments are lines of the mirror's section.
configure() {
    cat >"$directory/pgbouncer.ini" <<INI
[databases]
* = host=127.0.0.1 port=$here
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = $port
unix_socket_dir = $directory
auth_type = trust
auth_file = $directory/userlist.txt
admin_users = admin
pool_mode = transaction
default_pool_size = $servers
max_client_conn = 1000
log_connections = 0
log_disconnections = 0
[underpass]
$lanes
[underpass:mirror:next]
databases = *
host = 127.0.0.1
port = $there
$(printf '%s\n' "$@")
INI
}
query() { psql -XAtq -h 127.0.0.1 -p "$1" -U postgres postgres -c "$2"; }
both() { query "$here" "$1" >/dev/null && query "$there" "$1" >/dev/null; }
console() { psql -XAq -P footer=off -F $'\t' -h 127.0.0.1 -p "$port" -U admin pgbouncer -c "$1"; }
# A column of the mirror of database postgres.
account() {
    console 'SHOW MIRRORS' | awk -F '\t' -v wanted="$1" \
        'NR == 1 { for (i = 1; i <= NF; i++) column[$i] = i; next } $column["database"] == "postgres" { print $column[wanted] }'
}
# What differs so far and should not: how many results, as what, of which statement.
differences() {
    console 'SHOW MIRROR_DIFF' | awk -F '\t' 'NR == 1 { for (i = 1; i <= NF; i++) column[$i] = i; next }
        $column["differing"] > 0 { print $column["differing"], $column["differences"], $column["query"], $column["example"] }'
}
# Of what differs so far: how many errors only there, which are cancels' (57014) where the one example of a statement is of such an error,
# and how many results otherwise.
differing() {
    console 'SHOW MIRROR_DIFF' | awk -F '\t' 'NR == 1 { for (i = 1; i <= NF; i++) column[$i] = i; next }
        { all += $column["differing"] }
        match($column["differences"], /error_there=[0-9]+/) && $column["example"] !~ /; there: ERROR ([^5]|5[^7]|57[^0]|570[^1]|5701[^4])/ {
            cancelled += substr($column["differences"], RSTART + 12, RLENGTH - 12)
        }
        END { print cancelled + 0, all - cancelled }'
}
# Waits until the mirror is on: a client must have come.
wait_on() {
    for _ in $(seq 600); do
        query "$port" 'select 1' >/dev/null
        [ "$(account state)" != on ] || return 0
        sleep 0.1
    done
    die "the mirror is $(account state): $(account reason)"
}
# Waits until nothing is queued, and checks that every transaction is accounted for.
settle() {
    say "$1: $(account queued) transactions in $(account queued_bytes) bytes wait for the mirror"
    local before=-1 now
    for _ in $(seq 1200); do
        # Of what a lane carries the pooler hears a moment later.
        now=$(account transactions)
        [ "$now" != "$before" ] || [ "$(account queued)" != 0 ] || [ "$(account queued_bytes)" != 0 ] || break
        before=$now
        sleep 0.5
    done
    [ "$(account state)" = on ] || die "the mirror is $(account state): $(account reason)"
    [ "$(account queued)" = 0 ] || die "the queue does not empty"
    [ "$(account transactions)" -eq $(($(account executed) + $(account dropped))) ] || die "the account does not balance: $(console 'SHOW MIRRORS')"
}
same() {
    local one other
    one=$(query "$here" "$1" | md5sum) other=$(query "$there" "$1" | md5sum)
    [ "$one" = "$other" ] || die "primary and mirror differ: $1"
}
same_tpcb() {
    local table
    for table in 'select aid, bid, abalance from pgbench_accounts order by aid' 'select tid, bid, tbalance from pgbench_tellers order by tid' \
        'select bid, bbalance from pgbench_branches order by bid' 'select tid, bid, aid, delta from pgbench_history order by 1, 2, 3, 4'; do
        same "$table"
    done
}
# How often statements like $2 were executed at $1 since `begin_count`.
calls() { query "$1" "select coalesce(sum(calls), 0) from pg_stat_statements where query ilike '$2'"; }
begin_count() { both 'select pg_stat_statements_reset()'; }
bench() {
    local count=$1
    shift
    pgbench -h 127.0.0.1 -p "$port" -U postgres -n -c 20 -j 2 -t $(((count + 19) / 20)) "$@" postgres >"$directory/pgbench.log" 2>&1 ||
        die "pgbench $*: $(cat "$directory/pgbench.log")"
}
# Nothing more than what came before the mirror was on, or in step 3.
no_drops() { [ "$(account dropped)" = "$early" ] || die "$1: dropped: $(console 'SHOW MIRRORS')"; }

# The leak checker, $2 transactions, table $1.
check_leaks() {
    local table=$1 late fired uncertain like one other cancelled differ cancelled_before differ_before
    read -r cancelled_before differ_before < <(differing)
    both "create table $table (client int, sequence bigint, token text); create index on $table (client, sequence)"
    begin_count
    "$target/underpass-soak" --port "$port" --transactions "$2" --clients "$clients" --prepared --progress 10 \
        --require-faults $(($2 / 2200)) --table "$table" | tee "$directory/checker.log"
    settle checker
    no_drops checker
    # Where a client vanished while its commit ran, the servers may have decided it differently.
    same "select * from $table where token not like '% uncertain' order by client, sequence, token"
    uncertain="select count(*) from $table where token like '% uncertain'"
    # A late cancel may strike a statement on the primary that was over on the mirror before its time came; the client left then.
    late=$(sed -n 's/^ *own late cancels *//p' "$directory/checker.log")
    for like in "insert into $table values%" "insert into $table select%" "copy $table from%"; do
        one=$(calls "$here" "$like") other=$(calls "$there" "$like")
        say "$like: $one executed on the primary, $other on the mirror"
        [ "$one" -gt 0 ] && [ "$other" -ge "$one" ] && [ $((other - one)) -le "${late:-0}" ] || die "not the same"
    done
    # A cancel strikes the mirror only where the primary answered that it was struck, in either mode, and the server that it is sent to serves
    # nobody else until it is over: what the checker cancels stands alone, so no statement is cancelled on the mirror only, however late the
    # request comes.
    fired=$(sed -n 's/^ *late cancel  *//p' "$directory/checker.log")
    read -r cancelled differ < <(differing)
    cancelled=$((cancelled - cancelled_before)) differ=$((differ - differ_before))
    [ "$cancelled" -eq 0 ] || die "$cancelled cancelled on the mirror only, of ${fired:-0} late cancels: $(differences)"
    # The audit at the end may read before others' last transactions have arrived; it is one statement.
    [ "$differ" -le $((${late:-0} + 1)) ] || die "SHOW MIRROR_DIFF: $(differences)"
    say "no result was cancelled on the mirror only, with ${fired:-0} late cancels, ${late:-0} of which struck; $differ differ otherwise"
    say "$(query "$there" "select count(*) from $table") rows, $(query "$there" "$uncertain") of uncertain commits, $(query "$here" "$uncertain") on the primary"
}

printf '"postgres" ""\n"admin" ""\n' >"$directory/userlist.txt"
holds=$'queue_bytes = 4000000000\ncompare_rows = ordered'
configure "$holds"
if [ "$kind" = underpass ]; then
    binary=$(reachable "$target/underpass" "$directory")
    (cd "$directory" && as_service "$binary" pooler "$directory/pgbouncer.ini") >"$directory/pooler.log" 2>&1 &
else
    (cd "$directory" && exec "${heed_signals[@]}" "$target/underpass" pooler -u "$(service_user)" "$directory/pgbouncer.ini") \
        >"$directory/pooler.log" 2>&1 &
fi
pids+=($!)
wait_port "$port" $! 30 || die "the pooler did not start"
both 'create extension pg_stat_statements'
wait_on
settle start
early=$(account dropped)

say "=== 1. leak checker, $transactions transactions"
check_leaks soak "$transactions"

say "=== 2. TPC-B, 3 x $tenth transactions"
for server in "$here" "$there"; do
    pgbench -h 127.0.0.1 -p "$server" -U postgres -i -s 10 -I dtgp -q postgres >"$directory/pgbench.log" 2>&1
done
begin_count
for protocol in simple extended prepared; do bench "$tenth" -M "$protocol"; done
settle TPC-B
no_drops TPC-B
same_tpcb
done_there=$(query "$there" 'select count(*) from pgbench_history')
[ "$done_there" = "$(calls "$there" 'insert into pgbench_history%')" ] || die "pg_stat_statements of the mirror tells otherwise"
say "$done_there transactions on both"

say "=== 3. a queue that is too small, $tenth transactions"
configure 'queue_bytes = 20000'
console RELOAD >/dev/null
both 'create table parts (client int, n bigint, part int)'
query "$there" "create function slow() returns trigger language plpgsql as 'begin perform pg_sleep(0.001); return new; end';
    create trigger slow before insert on parts for each row when (new.n % 50 = 0) execute function slow()"
wait_on
settle 'before it'
begin_count
before=$(account transactions) executed=$(account executed) dropped=$(account dropped)
cat >"$directory/parts.sql" <<'SQL'
\set n random(1, 1000000000000)
begin;
insert into parts values (:client_id, :n, 1);
insert into parts values (:client_id, :n, 2);
commit;
SQL
bench "$tenth" -f "$directory/parts.sql"
settle parts
sent=$(($(account transactions) - before)) executed=$(($(account executed) - executed)) dropped=$(($(account dropped) - dropped))
say "$sent sent, $executed executed, $dropped dropped"
[ "$dropped" -gt 0 ] && [ "$sent" -eq $((executed + dropped)) ] || die "the account does not balance"
[ "$sent" -eq "$(calls "$here" 'commit%')" ] || die "$(calls "$here" 'commit%') commits on the primary, by its own count"
[ "$executed" -eq "$(calls "$there" 'commit%')" ] || die "$(calls "$there" 'commit%') commits on the mirror, by its own count"
[ "$(query "$there" 'select count(*) from (select from parts group by client, n having count(*) <> 2) x')" = 0 ] || die "a transaction is there in part"
[ $((executed * 2)) -eq "$(query "$there" 'select count(*) from parts')" ] || die "rows are missing"

if [ "$kind" != underpass ]; then
    lane=${kind#lane-}
    kernel=$(console 'SHOW KERNEL')
    value() { sed -n "s/^lane\t$1\t$2\t\([0-9]*\)\t.*/\1/p" <<<"$kernel"; }
    carried=$(value "${lane^^}" xacts)
    say "lane ${lane^^}: $carried transactions carried, $(value user xacts) in user space, $(value mirrors chunks_told) pieces told," \
        "$(value mirrors chunks_lost) lost"
    # Of the checker's transactions a lane carries a twentieth at least (scripts/soak.sh), of pgbench's nearly all.
    [ "$carried" -ge $((transactions / 4)) ] || die "too little of it went through the lane"
fi

# `mode = sync` with this `sync_each`.
in_sync() {
    local each=$1 dropped one other protocol
    say "=== 4. one writer for each row, sync, each $each, $tenth transactions"
    configure "$holds" 'mode = sync' "sync_each = $each" 'sync_timeout = 60'
    console RELOAD >/dev/null
    both "set client_min_messages = warning; drop table if exists chain; create table chain (id int primary key, v text); insert into chain select i, '' from generate_series(0, 19) i"
    wait_on
    settle 'before it'
    begin_count
    dropped=$(account dropped)
    for protocol in simple prepared; do bench $((tenth / 2)) -M "$protocol" -f "$directory/chain.sql"; done
    settle chains
    [ "$(account dropped)" = "$dropped" ] || die "dropped: $(console 'SHOW MIRRORS')"
    same 'select id, v from chain order by id'
    one=$(calls "$here" 'update chain%') other=$(calls "$there" 'update chain%')
    say "$one updates on the primary, $other on the mirror; clients were held $(account holds) times"
    [ "$one" = "$other" ] && [ "$one" -ge "$tenth" ] || die "not the same"
    early=$dropped
}
cat >"$directory/chain.sql" <<'SQL'
\set n random(1, 1000000)
\set fate random(1, 10)
\if :fate <= 7
update chain set v = md5(v || :n) where id = :client_id;
\else
begin;
update chain set v = md5(v || :n) where id = :client_id;
update chain set v = md5(v || :fate) where id = :client_id;
\if :fate = 8
rollback;
\else
commit;
\endif
\endif
SQL
if [ "$kind" = underpass ]; then
    in_sync statement
    say "=== 5. leak checker, sync, each statement, $tenth transactions"
    check_leaks soak_statement "$tenth"
fi
in_sync transaction
say "=== 5. leak checker, sync, each transaction, $tenth transactions"
check_leaks soak_transaction "$tenth"
# They wait for each other's rows all the time: where statements wait, two clients soon wait for each other over both servers.
say "=== 6. TPC-B, sync, each transaction, $tenth transactions"
begin_count
bench "$tenth"
settle TPC-B
no_drops TPC-B
same_tpcb
echo "$(account transactions) transactions in $SECONDS s: $(account executed) executed, $(account dropped) dropped in step 3 and before step 1, the same data on both"
