# SPDX-License-Identifier: Apache-2.0
# Shell functions that the other scripts share; sourced, not run.

# A shell that was open when rustup came does not know where that puts programs.
command -v cargo >/dev/null || PATH=$PATH:${CARGO_HOME:-${HOME:-}/.cargo}/bin

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# Ends with what to do if there is no Rust compiler, or one older than Cargo.toml asks for.
need_rust() {
    local wanted have help
    wanted=$(awk -F '"' '/^rust-version/ { print $2 }' Cargo.toml)
    help="Rust $wanted or newer is needed and Debian's own is older: install it with rustup, https://rustup.rs
  curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- --default-toolchain stable"
    command -v cargo >/dev/null || die "cargo not found. $help"
    have=$(rustc --version | awk '{ print $2 }')
    [ "$(printf '%s\n%s\n' "$wanted" "$have" | sort -V | head -n 1)" = "$wanted" ] || die "rustc is $have. $help"
}

# Directory with the pooler and the leak checker: where UNDERPASS_BIN is, or where they are built.
checker_programs() {
    local target
    if [ -n "${UNDERPASS_BIN:-}" ]; then
        target=$(dirname "$(realpath "$UNDERPASS_BIN")")
        [ -x "$target/underpass-soak" ] || die "no underpass-soak beside $UNDERPASS_BIN: build the workspace, or unset UNDERPASS_BIN"
    else
        # As `make build` does: another selection of packages would choose other features and build half of it again.
        cargo build --release --workspace --bins >&2
        target=$(realpath "${CARGO_TARGET_DIR:-target}")/release
    fi
    printf '%s\n' "$target"
}

# Directory of PostgreSQL's programs: PG_BIN, else the newest that Debian has installed.
pg_bin() {
    if [ -n "${PG_BIN:-}" ]; then
        printf '%s\n' "$PG_BIN"
    else
        find /usr/lib/postgresql -mindepth 2 -maxdepth 2 -name bin 2>/dev/null | sort -V | tail -n 1
    fi
}

# The user that PostgreSQL and the pooler run as: both refuse root.
service_user() {
    if [ "$(id -u)" -ne 0 ]; then id -un
    elif id postgres >/dev/null 2>&1; then echo postgres
    else echo nobody; fi
}

# Undoes that a shell without job control starts background commands with these ignored, which their children inherit:
# PgBouncer would never end.
heed_signals=(env --default-signal=INT,QUIT)

# Runs a command as that user; replaces the shell when called as `( as_service ... ) &`.
as_service() {
    if [ "$(id -u)" -ne 0 ]; then exec "${heed_signals[@]}" "$@"; fi
    exec "${heed_signals[@]}" setpriv --reuid "$(service_user)" --regid "$(id -g "$(service_user)")" --clear-groups "$@"
}

# Whether somebody listens on a TCP port of 127.0.0.1.
port_busy() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# The first free port from $1 on.
free_port() {
    local port=$1
    while port_busy "$port"; do port=$((port + 1)); done
    printf '%s\n' "$port"
}

# Waits until a TCP port answers or process $2 ends; $3 seconds at most.
wait_port() {
    local left=$(($3 * 20))
    until port_busy "$1"; do
        kill -0 "$2" 2>/dev/null || return 1
        left=$((left - 1))
        [ "$left" -gt 0 ] || return 1
        sleep 0.05
    done
}

# A private PostgreSQL in directory $1 on port $2; further arguments are settings. Sets POSTGRES_PID.
start_postgres() {
    local directory=$1 port=$2 bin settings=()
    shift 2
    bin=$(pg_bin)
    [ -x "$bin/initdb" ] || die "PostgreSQL's initdb not found: install postgresql, or set PG_BIN"
    for setting in "$@"; do settings+=(-c "$setting"); done
    (cd "$directory" && as_service "$bin/initdb" -D "$directory/data" -U postgres --auth=trust --no-sync \
        --encoding=UTF8 --locale=C) >"$directory/initdb.log" 2>&1 || { cat "$directory/initdb.log" >&2; return 1; }
    (cd "$directory" && as_service "$bin/postgres" -D "$directory/data" -p "$port" -k "$directory" \
        -c listen_addresses=127.0.0.1 -c fsync=off -c synchronous_commit=off "${settings[@]}") \
        >"$directory/postgres.log" 2>&1 &
    POSTGRES_PID=$!
    wait_port "$port" "$POSTGRES_PID" 60 || { cat "$directory/postgres.log" >&2; return 1; }
}

# Ends a process that we started: signal $1, process $2.
end_process() {
    kill -s "$1" "$2" 2>/dev/null || return 0
    wait "$2" 2>/dev/null || true
}

# A copy of program $1 in directory $2 if the service user cannot reach it; prints the path to use.
reachable() {
    if [ "$(id -u)" -eq 0 ] && ! (as_service test -x "$1") 2>/dev/null; then
        install -m 755 "$1" "$2/$(basename "$1")"
        printf '%s\n' "$2/$(basename "$1")"
    else
        printf '%s\n' "$1"
    fi
}
