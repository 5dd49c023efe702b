#!/bin/sh
# Runs the unit tests on each supported release of Python that is installed, each in a virtual environment of its own in .venv;
# says which releases are missing. Arguments go to pytest. Looks for python3.X on the PATH and for pyenv's versions.
set -u

releases="${PYTHONS:-3.11 3.12 3.13 3.14}"
pyenv_versions="${PYENV_ROOT:-$HOME/.pyenv}/versions"
missing="" failed="" passed=""

# The Python of a release: one that runs and can make environments. (A shim of pyenv's is on the PATH and may run nothing.)
find_python() {
    for python in "python$1" "$pyenv_versions/$1".*/bin/python; do
        found=$("$python" -c 'import ensurepip, sys, venv; print("%d.%d" % sys.version_info[:2], sys.executable)' 2>/dev/null) || continue
        [ "${found%% *}" = "$1" ] && { echo "${found#* }"; return; }
    done
    return 1
}

for release in $releases; do
    python=$(find_python "$release") || { missing="$missing $release"; continue; }
    folder=".venv/pythons/$release"
    [ "$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')" = "$release" ] && folder=.venv
    echo "== Python $release: $python"
    if [ ! -e "$folder/.dev" ] || [ pyproject.toml -nt "$folder/.dev" ] || [ constraints.txt -nt "$folder/.dev" ]; then
        echo "installing into $folder ..."
        rm -rf "$folder"
        if ! { "$python" -m venv "$folder" && "$folder/bin/python" -m pip install -q -c constraints.txt -e '.[dev]'; }; then
            failed="$failed $release"
            continue
        fi
        touch "$folder/.dev"
    fi
    # Two releases of Python do not share what they keep of a run.
    if "$folder/bin/python" -m pytest -q -n 3 -p no:cacheprovider tests/unit "$@"; then
        passed="$passed $release"
    else
        failed="$failed $release"
    fi
done

echo "passed:${passed:- none}"
[ -z "$missing" ] || echo "not installed:$missing"
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
[ -n "$passed" ]
