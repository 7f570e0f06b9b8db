#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Installs with apt what a bare Debian 12 lacks, or says what to install when not root. Argument: `run` for what running
# needs, `ci` for all that the tests need as well.
set -euo pipefail

# command or file that shows it is there : package
needs="cc:build-essential pkg-config:pkg-config clang-19:clang-19 /usr/include/libelf.h:libelf-dev
/usr/include/zlib.h:zlib1g-dev /usr/lib/llvm-19/lib/libclang-19.so.1:libclang1-19 /usr/lib/postgresql/*/bin/initdb:postgresql psql:postgresql-client setpriv:util-linux"
if [ "${1:-run}" = ci ]; then
    needs="$needs pgbouncer:pgbouncer bpftool:bpftool ip:iproute2 nft:nftables python3:python3 python3-venv:python3-venv
openssl:openssl curl:curl git:git make:make mariadbd:mariadb-server mariadb:mariadb-client"
fi

# Rust comes by curl, if it has to.
command -v cargo >/dev/null || needs="$needs curl:curl /etc/ssl/certs/ca-certificates.crt:ca-certificates"

missing=()
for need in $needs; do
    probe=${need%%:*} package=${need##*:}
    case $probe in
        python3-venv) python3 -c 'import ensurepip' 2>/dev/null && continue ;;
        /*) compgen -G "$probe" >/dev/null && continue ;;
        *) PATH=$PATH:/usr/sbin:/sbin command -v "$probe" >/dev/null && continue ;;
    esac
    missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

if [ "$(id -u)" -ne 0 ]; then
    echo "missing: install it as root with" >&2
    echo "  apt-get install --no-install-recommends ${missing[*]}" >&2
    exit 1
fi
echo "installing ${missing[*]} ..." >&2
# Debian's package would start a cluster of its own, on the port that people look for first.
export DEBIAN_FRONTEND=noninteractive
if [ ! -e /etc/postgresql-common/createcluster.conf ]; then
    mkdir -p /etc/postgresql-common
    echo 'create_main_cluster = false' >/etc/postgresql-common/createcluster.conf
fi
apt-get update -qq
apt-get install -qq -y --no-install-recommends "${missing[@]}" >&2
