# For scripts/test, which sources it: finds or installs what the tests of the store on PostgreSQL
# start. They look in the same places; see `program` in tests/support/postgres.rs.

has_postgres_program() {
    local folder
    for folder in "${TEST_POSTGRES_BIN:-}" "$(pg_config --bindir 2>/dev/null || true)" \
        /usr/lib/postgresql/*/bin /opt/homebrew/bin /usr/local/pgsql/bin /usr/sbin; do
        if [ -n "$folder" ] && [ -x "$folder/$1" ]; then
            return
        fi
    done
    command -v "$1" >/dev/null
}

# Debian's package makes a cluster and starts it; the tests make their own.
apt_install_postgres() {
    local as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo -n)
    local settings=/etc/postgresql-common/createcluster.conf
    if [ ! -e "$settings" ]; then
        "${as_root[@]}" mkdir -p "${settings%/*}" &&
            "${as_root[@]}" sh -c "echo 'create_main_cluster = false' >$settings" || return
    fi
    "${as_root[@]}" apt-get update -qq &&
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
            -o Dpkg::Options::=--force-confold "$@" >/dev/null
}

need_postgres() {
    local missing=() program
    has_postgres_program initdb && has_postgres_program postgres || missing+=(postgresql)
    has_postgres_program pgbouncer || missing+=(pgbouncer)
    if [ "${#missing[@]}" = 0 ]; then
        return
    fi
    printf 'scripts/test: installing %s\n' "${missing[*]}"
    if command -v apt-get >/dev/null; then
        apt_install_postgres "${missing[@]}" ||
            fail "could not install it: run apt-get install ${missing[*]} as root"
    elif command -v brew >/dev/null; then
        brew install --quiet "${missing[@]}" || fail "could not install it: brew install ${missing[*]}"
    else
        fail "install ${missing[*]}, or name the folder of the programs in TEST_POSTGRES_BIN"
    fi
    for program in initdb postgres pgbouncer; do
        has_postgres_program "$program" || fail "$program is still not found after installing"
    done
}
