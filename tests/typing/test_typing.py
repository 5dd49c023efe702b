"""Type checkers see what an application may write and what not: mypy and pyright agree, line by line."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RIGHT, WRONG = "right.py", "wrong.py"
# What the public types do not name is not read, which takes a third of the time.
QUICK = """[mypy]
[mypy-sqlalchemy.*,redis.*,alembic.*,flask.*,werkzeug.*,apiflask.*,xlsxwriter.*]
follow_imports = skip
"""
EXPECTED = {
    RIGHT: set[int](),
    WRONG: {n for n, line in enumerate((HERE / WRONG).read_text().splitlines(), 1) if line.endswith("# wrong")},
}


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """The application in a folder of its own: the types come with the package, by its ``py.typed``."""
    for name in EXPECTED:
        shutil.copy(HERE / name, tmp_path / name)
    return tmp_path


def test_mypy_reports_what_is_wrong_and_nothing_else(elsewhere: Path) -> None:
    (elsewhere / "mypy.ini").write_text(QUICK)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--hide-error-context",
        "--python-executable",
        sys.executable,
        "--cache-dir",
        str(ROOT / ".mypy_cache/applications"),
        *EXPECTED,
    ]
    done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    found: dict[str, set[int]] = {name: set() for name in EXPECTED}
    for name, line in re.findall(r"^(\S+\.py):(\d+): error: ", done.stdout, re.MULTILINE):
        found.setdefault(name, set()).add(int(line))
    assert found == EXPECTED, done.stdout


@pytest.mark.full(reason="a second opinion; mypy's is asked in every run")
def test_pyright_reports_what_is_wrong_and_nothing_else(elsewhere: Path) -> None:
    (elsewhere / "pyrightconfig.json").write_text(json.dumps({"include": ["."], "typeCheckingMode": "strict"}))
    # basedpyright is pyright with the node that it needs: pyright's own package fetches both when it is first run.
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    found: dict[str, set[int]] = {name: set() for name in EXPECTED}
    for each in json.loads(done.stdout)["generalDiagnostics"]:
        found.setdefault(Path(each["file"]).name, set()).add(each["range"]["start"]["line"] + 1)
    assert found == EXPECTED, done.stdout


def test_what_is_right_runs(tmp_path: Path) -> None:
    """What type checkers let pass is taken by the package, too: on SQLite, without a worker."""
    done = subprocess.run([sys.executable, str(HERE / RIGHT)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
