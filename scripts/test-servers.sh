#!/bin/sh
# Installs the servers that some tests start, from Debian's packages, where that is possible: as root, with apt-get.
# Elsewhere a missing one is only told about: its tests are skipped at home, and fail where CI is set.
set -u

missing=""
command -v redis-server >/dev/null 2>&1 || missing="$missing redis-server"
command -v chromium >/dev/null 2>&1 || missing="$missing chromium"
[ -z "$missing" ] && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing for the tests:$missing"
    export DEBIAN_FRONTEND=noninteractive
    # The lists may be old or, in a fresh image, not there at all. One package after the other: one may be unknown here.
    apt-get update -qq >/dev/null 2>&1
    for package in $missing; do
        apt-get install -qq -y --no-install-recommends "$package" >/dev/null 2>&1 || echo "could not install $package"
    done
fi
for program in redis-server chromium; do
    command -v "$program" >/dev/null 2>&1 || echo "notice: $program is not installed; tests that need it are skipped"
done
exit 0
