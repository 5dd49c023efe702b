#!/bin/sh
# Runs the conformance tests of the engines on the oldest release of each that pyproject.toml allows, each in a virtual
# environment of its own in .venv/engines, which sees the packages of .venv behind its own. Arguments go to pytest.
# With --install it only makes the environments.
set -u

# engine|what it needs that .venv has in other releases|its tests
oldest="
celery|celery==5.6.0 kombu==5.6.0 redis==6.4.0 exceptiongroup==1.3.0|Celery
dramatiq|dramatiq==1.18.0 redis==6.4.0 prometheus-client==0.21.1|Dramatiq
rq|rq==2.6.0|Rq
"
only_install=""
[ "${1:-}" = --install ] && { only_install=1; shift; }
root=$(pwd)
failed="" passed=""

make_environment() {
    folder=".venv/engines/$1"
    [ -e "$folder/.made" ] && [ "$(cat "$folder/.made")" = "$2" ] && return
    echo "installing for the tests: $2"
    rm -rf "$folder"
    .venv/bin/python -m venv --without-pip "$folder" || return 1
    packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # Behind its own packages, with what is installed there as editable.
    behind=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "import site; site.addsitedir('$behind')" >"$packages/behind.pth"
    # shellcheck disable=SC2086
    .venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --target "$packages" $2 && echo "$2" >"$folder/.made"
}

for line in $(echo "$oldest" | tr ' ' ','); do
    line=$(echo "$line" | tr ',' ' ')
    engine=${line%%|*} rest=${line#*|}
    wanted=${rest%%|*} tests=${rest#*|}
    if ! make_environment "$engine" "$wanted"; then
        echo "notice: $wanted is not installed; tests that need it are skipped"
        failed="$failed $engine"
        continue
    fi
    [ -n "$only_install" ] && continue
    echo "== $wanted"
    if "$root/.venv/engines/$engine/bin/python" -m pytest -q -p no:cacheprovider --every-database -n 2 \
        tests/conformance/test_engines.py -k "$tests" "$@"; then
        passed="$passed $engine"
    else
        failed="$failed $engine"
    fi
done

[ -n "$only_install" ] && exit 0
echo "passed:${passed:- none}"
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
