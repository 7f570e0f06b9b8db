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
echo "@@end"
poweroff -f
