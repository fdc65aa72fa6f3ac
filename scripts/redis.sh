# For scripts/test, which sources it: finds or installs the servers that the tests of the Redis store
# start; see `program` in tests/support/redis.rs.

has_redis_program() {
    [ -x "${TEST_REDIS_BIN:-/nowhere}/redis-$1" ] || [ -x "${TEST_REDIS_BIN:-/nowhere}/valkey-$1" ] ||
        command -v "redis-$1" >/dev/null || command -v "valkey-$1" >/dev/null
}

need_redis() {
    has_redis_program server && has_redis_program cli && return
    printf 'scripts/test: installing redis\n'
    if command -v apt-get >/dev/null; then
        apt_install_redis || fail "could not install it: run apt-get install redis-server redis-tools as root"
    elif command -v brew >/dev/null; then
        brew install --quiet redis || fail "could not install it: brew install redis"
    else
        fail "install redis 7.0 or later, or name the folder of its programs in TEST_REDIS_BIN"
    fi
    has_redis_program server || fail "redis-server is still not found after installing"
}

# Debian's package starts a server; the tests start their own.
apt_install_redis() {
    local as_root=() policy=/usr/sbin/policy-rc.d made=no status=0
    [ "$(id -u)" = 0 ] || as_root=(sudo -n)
    if [ ! -e "$policy" ]; then
        "${as_root[@]}" sh -c "printf '#!/bin/sh\nexit 101\n' >$policy && chmod +x $policy" || return
        made=yes
    fi
    "${as_root[@]}" apt-get update -qq &&
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
            redis-server redis-tools >/dev/null || status=$?
    [ "$made" = no ] || "${as_root[@]}" rm -f "$policy"
    return "$status"
}
