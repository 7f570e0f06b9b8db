#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# `make run`: from a bare Debian to a pooler that serves. Ctrl-C stops and removes all that was started.
# UNDERPASS_BIN names a program to use instead of building one.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

if [ -n "${UNDERPASS_BIN:-}" ]; then
    binary=$(realpath "$UNDERPASS_BIN") && [ -x "$binary" ] || die "UNDERPASS_BIN is no program: $UNDERPASS_BIN"
else
    # --- what is needed
    # Both are looked at, so that one who is not root hears of all that is missing at once.
    is_ready=yes
    scripts/install.sh run || is_ready=no
    (need_rust) || is_ready=no
    [ "$is_ready" = yes ] || exit 1

    say "building ..."
    cargo build --release -p underpass
    target=${CARGO_TARGET_DIR:-target}
    binary=$(realpath "$target/release/underpass" 2>/dev/null) && [ -x "$binary" ] || die "the build made no underpass"
fi

# --- our own directory, readable by the user that serves
# Named before it is made, and made when the traps stand: whenever Ctrl-C comes, it goes.
directory=${TMPDIR:-/tmp}/underpass-run.$$-$RANDOM
POSTGRES_PID= POOLER_PID=
clean_up() {
    trap - EXIT INT TERM
    [ -z "$POOLER_PID" ] || end_process QUIT "$POOLER_PID"
    [ -z "$POSTGRES_PID" ] || end_process INT "$POSTGRES_PID"
    # What initdb started may live, and write, for a moment after it.
    for _ in $(seq 50); do
        rm -rf "$directory" 2>/dev/null || true
        [ -e "$directory" ] || pgrep -f -- "$directory" >/dev/null || break
        sleep 0.1
    done
    [ ! -e "$directory" ] || die "stopped, but $directory could not be removed"
    ! pgrep -f -- "$directory" >/dev/null || die "stopped, but some of it still runs: $(pgrep -f -- "$directory" | paste -sd ' ')"
    say "stopped, nothing left behind"
}
trap clean_up EXIT
trap 'exit 0' INT TERM
# Own process groups: Ctrl-C reaches this script, which stops the pooler before the server. And without them bash now and then loses
# the signal that comes while it waits for a $(command).
set -m
mkdir -m 755 "$directory" || { trap - EXIT; exit 1; }
[ "$(id -u)" -ne 0 ] || chown "$(service_user)" "$directory"

# --- the server
# An ini value in single quotes doubles them.
quote() { printf "'%s'" "${1//\'/\'\'}"; }
decode() { local text=${1//+/%2B}; printf '%b' "${text//%/\\x}"; }
# A port is looked for and then used: two runs at once would find the same.
exec 9</tmp
until flock -w 1 9; do :; done
tls=
if [ -n "${UPSTREAM:-}" ]; then
    url='^postgres(ql)?://(([^:@/]+)(:([^@/]*))?@)?([^:/?]+)(:([0-9]+))?(/([^?]*))?(\?(.*))?$'
    [[ $UPSTREAM =~ $url ]] || die "UPSTREAM is not postgres://user:password@host:port/database"
    user=$(decode "${BASH_REMATCH[3]:-postgres}")
    password=$(decode "${BASH_REMATCH[5]:-}")
    host=${BASH_REMATCH[6]} server_port=${BASH_REMATCH[8]:-5432}
    database=$(decode "${BASH_REMATCH[10]:-$user}")
    IFS='&' read -ra parameters <<<"${BASH_REMATCH[12]:-}"
    for parameter in "${parameters[@]}"; do
        value=$(decode "${parameter#*=}")
        case $parameter in
            sslmode=*) tls+="server_tls_sslmode = $(quote "$value")"$'\n' ;;
            sslrootcert=*) tls+="server_tls_ca_file = $(quote "$(realpath -m "$value")")"$'\n' ;;
            *) die "UPSTREAM: ${parameter%%=*} is not passed on: sslmode and sslrootcert are. Leave it out, or write a pgbouncer.ini" ;;
        esac
    done
    say "server: $host port $server_port, as given by UPSTREAM"
else
    user=postgres password='' host=127.0.0.1 database=postgres
    server_port=$(free_port 5433)
    start_postgres "$directory" "$server_port" max_connections=200 || die "PostgreSQL did not start"
fi

# --- the pooler
port=$(free_port 6432)
metrics_port=$(free_port 9127)
# auth_type = any logs every client in under the name in the connection string, so there is one.
login=" user=$(quote "$user")"
[ -z "$password" ] || login+=" password=$(quote "$password")"
umask 077
cat >"$directory/pgbouncer.ini" <<INI
[databases]
* = host=$(quote "$host") port=$server_port$login
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = $port
unix_socket_dir = $directory
auth_type = any
admin_users = admin
pool_mode = transaction
max_client_conn = 1000
$tls[underpass]
metrics_listen = 127.0.0.1:$metrics_port
INI
[ "$(id -u)" -ne 0 ] || chown "$(service_user)" "$directory/pgbouncer.ini"
# Started by root it changes user itself, and keeps what the kernel lanes need.
become=()
[ "$(id -u)" -ne 0 ] || become=(-u "$(service_user)")
(cd "$directory" && exec "$binary" pooler "${become[@]}" "$directory/pgbouncer.ini") >"$directory/pooler.log" 2>&1 &
POOLER_PID=$!
wait_port "$port" "$POOLER_PID" 30 || { cat "$directory/pooler.log" >&2; die "the pooler did not start"; }
flock -u 9

cat <<TEXT

underpass serves PostgreSQL on 127.0.0.1 port $port (transaction pooling)
  try      psql "host=127.0.0.1 port=$port user=$user dbname=$database"
  console  psql "host=127.0.0.1 port=$port user=admin dbname=pgbouncer" -c 'show pools'
  kernel   psql "host=127.0.0.1 port=$port user=admin dbname=pgbouncer" -c 'show kernel'
  metrics  curl http://127.0.0.1:$metrics_port/metrics
  config   $directory/pgbouncer.ini
  log      $directory/pooler.log
Ctrl-C stops it.
TEXT
wait "$POOLER_PID" || { tail -n 20 "$directory/pooler.log" >&2; die "the pooler ended"; }
