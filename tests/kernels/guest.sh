#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# init of the guest: starts PostgreSQL and the pooler, prints @@CHECK ok|fail, powers off.
# @PG_BIN@, @POOLER@ and @KIND@ are filled in by main.py.
/bin/busybox --install -s /bin
export PATH=/bin:@PG_BIN@ LC_ALL=C PGHOST=127.0.0.1 PGUSER=postgres
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev 2>/dev/null
mkdir -p /dev/shm
mount -t tmpfs shm /dev/shm
mount -t bpf bpf /sys/fs/bpf 2>/dev/null
ip link set lo up
chmod 1777 /tmp
chown -R postgres /srv

check() {
	name=$1
	shift
	if out=$("$@" 2>&1); then echo "@@$name ok"; else echo "@@$name fail $(echo "$out" | tail -n 3 | tr '\n' ' ')"; fi
}
as_postgres() { su postgres -s /bin/sh -c "$*"; }
through() { psql -XAtq -h 127.0.0.1 -p 6432 bench "$@"; }
same() { [ "$1" = "$2" ] || { echo "got $1, expected $2"; return 1; }; }

echo "@@note kernel $(uname -r)"
check initdb as_postgres initdb -D /srv/data -U postgres -A trust -N --locale=C
check server as_postgres pg_ctl -D /srv/data -w -t 120 -o "'-c fsync=off -c max_connections=30 -c shared_buffers=16MB -k /tmp'" -l /tmp/pg.log start
if [ @KIND@ = underpass ]; then
	check underpass-check /bin/pooler check
	/bin/pooler check 2>&1 | while read -r line; do echo "@@note $line"; done
fi
as_postgres "@POOLER@ -q /srv/pooler.ini" &
tries=0
until psql -XAtq -h 127.0.0.1 -p 6432 pgbouncer -c 'SHOW VERSION' >/dev/null 2>&1 || [ $tries -ge 60 ]; do
	tries=$((tries + 1))
	sleep 0.5
done
check pooler-answers psql -XAtq -p 6432 pgbouncer -c 'SHOW VERSION'
check simple sh -c '[ "$(psql -XAtq -p 6432 bench -c "SELECT 40 + 2")" = 42 ]'
check transaction through -c 'BEGIN; CREATE TABLE t AS SELECT generate_series(1, 1000) a; COMMIT; DROP TABLE t'
check copy sh -c '[ "$(psql -XAtq -p 6432 bench -c "COPY (SELECT generate_series(1, 5000)) TO STDOUT" | wc -l)" = 5000 ]'
check large sh -c '[ "$(psql -XAtq -p 6432 bench -c "SELECT repeat(chr(120), 1000000)" | wc -c)" = 1000001 ]'
check pgbench-init pgbench -iq -p 6432 bench
for mode in simple extended; do
	check pgbench-$mode pgbench -n -M $mode -c 4 -j 4 -t 20 -p 6432 bench
done
if [ @KIND@ = underpass ]; then
	check pgbench-prepared pgbench -n -M prepared -c 4 -j 4 -t 20 -p 6432 bench
fi
check console psql -XAtq -p 6432 pgbouncer -c 'SHOW POOLS'
# Started as root it keeps what the lanes need: on this kernel that is lane D.
if [ @KIND@ = underpass ]; then
	/bin/pooler pooler -q -u postgres /srv/lanes.ini &
	tries=0
	until psql -XAtq -h 127.0.0.1 -p 6433 pgbouncer -c 'SHOW VERSION' >/dev/null 2>&1 || [ $tries -ge 60 ]; do
		tries=$((tries + 1))
		sleep 0.5
	done
	refused() {
		told=$(timeout 60 /bin/pooler pooler -u postgres /srv/local.ini 2>&1)
		echo "$told"
		echo "$told" | grep -q 'lane A does not work; same_host = off'
	}
	check lane-a-required-is-refused refused
	for mode in simple extended prepared; do
		check lane-$mode pgbench -n -S -M $mode -c 3 -j 3 -t 40 -p 6433 bench
	done
	carried=$(psql -XAtq -p 6433 pgbouncer -c 'SHOW KERNEL' | sed -n 's/^lane|D|xacts|\([0-9]*\)|.*/\1/p')
	check lane-carries [ "${carried:-0}" -ge 300 ]
	echo "@@note lane D carried ${carried:-no} of 360 transactions"
fi
# The recorder: cgroup_skb for TCP, uprobes for Unix sockets (by perf events, because links of the kind "multi" are 6.6's).
if [ @KIND@ = underpass ]; then
	# told WORDS COMMAND...: the command fails, and says WORDS.
	told() {
		words=$1
		shift
		if out=$("$@" 2>&1); then echo "it went well: $out"; return 1; fi
		echo "$out"
		echo "$out" | grep -q "$words"
	}
	# recording NAME OPTION...: begins one of the server into /srv/NAME.
	recording() {
		recording=$1
		shift
		/bin/pooler trace -p 5432 -o /srv/$recording "$@" >/tmp/$recording.log 2>&1 &
		recorder=$!
		tries=0
		until grep -q '^recording' /tmp/$recording.log || [ $tries -ge 120 ] || ! kill -0 $recorder; do
			tries=$((tries + 1))
			sleep 0.5
		done
	}
	# ended CHECK [JUDGE]: ends it, and checks that it has all.
	ended() {
		kill -TERM $recorder
		wait $recorder
		status=$?
		check "$1" "${2:-lossless}" $status "/tmp/$recording.log"
	}
	lossless() { [ "$1" = 0 ] || { echo "exit status $1: $(tail -n 12 "$2" | tr '\n' ' ')"; return 1; }; }
	# The same, but for what a session was waited for with when the probes came.
	joined() { [ "$1" = 3 ] && grep -q '^losses  *1 probed sessions under way whose first request may be missing$' "$2" || lossless "$@"; }
	# texts NAME KIND: what the lines of this kind (Query, Parse, prepared_fill) have for a query.
	texts() { /bin/pooler export /srv/$1 -f jsonl 2>/dev/null | sed -n "/\"\(type\|kind\)\":\"$2\"/s/.*\"query\":\"\([^\"]*\)\".*/\1/p"; }
	held() { same "$(texts "$1" "$2" | sort | tr '\n' '/')" "$3"; }
	three() { psql -XAtq postgres -h "$1" -c "SELECT '$2 one'" -c "SELECT '$2 two', repeat('x', 100000)" -c "SELECT '$2 three'" >/dev/null; }

	check trace-list-names-what-is-missing sh -c "/bin/pooler trace --list | grep 'packets need a mounted cgroup version 2'"
	check trace-without-cgroup2-is-refused told 'cgroup version 2' /bin/pooler trace -p 5432 -o /srv/none -d 1
	mount -t cgroup2 cgroup2 /sys/fs/cgroup
	listed() {
		list=$(/bin/pooler trace --list 2>&1)
		echo "$list"
		for words in '^PostgreSQL [0-9]' 'TCP  *by packets' 'Unix sockets  *by probes of secure_read' /tmp/.s.PGSQL.5432; do
			echo "$list" | grep -q "$words" || return 1
		done
		! echo "$list" | grep -q -e 'packets need' -e 'not p'
	}
	check trace-list listed
	printf 'SELECT 1 + 1;\nSELECT pg_backend_pid();\n' >/srv/script.sql
	recording both --require-lossless
	three 127.0.0.1 tcp
	three /tmp unix
	pgbench -n -M prepared -c 2 -j 2 -t 10 -f /srv/script.sql -h 127.0.0.1 postgres >/dev/null 2>&1
	ended trace-is-lossless
	three_of() { echo "SELECT '$1 one'/SELECT '$1 three'/SELECT '$1 two', repeat('x', 100000)/"; }
	check trace-has-all-queries held both Query "$(three_of tcp)$(three_of unix)"
	check trace-has-all-statements held both Parse 'SELECT 1 + 1;/SELECT 1 + 1;/SELECT pg_backend_pid();/SELECT pg_backend_pid();/'
	check trace-has-all-executions same "$(/bin/pooler export /srv/both -f jsonl 2>/dev/null | grep -c '"type":"Execute"')" 40

	# A session that has prepared its statements before the recording begins.
	long="SELECT length('$(head -c 70000 /dev/zero | tr '\0' x)');"
	printf 'SELECT 4711;\n%s\n\\sleep 100 ms\n' "$long" >/srv/slow.sql
	pgbench -n -M prepared -c 1 -T 120 -f /srv/slow.sql -h /tmp postgres >/dev/null 2>&1 &
	client=$!
	sleep 2
	recording calls --no-packets --require-lossless
	three 127.0.0.1 calls
	sleep 2
	ended trace-by-calls-is-lossless joined
	kill $client
	check trace-by-calls-has-all-queries held calls Query "$(three_of calls)"
	check trace-knows-what-was-prepared held calls prepared_fill "SELECT 4711;/$long/"
	echo "@@note trace $(grep '^bytes' /tmp/both.log | tr -s ' ' | tr '\n' ';')"
fi
echo "@@end"
poweroff -f
