"""A library that an extra brings: where it is missing, one sentence says which distribution and extra to install."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from asynctask._version import DISTRIBUTION
from asynctask.errors import not_installed

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_name_in_messages_is_that_of_the_distribution() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert not_installed("yaml", "yaml") == "yaml is not installed: pip install 'asynctask-ledger[yaml]'"


def test_only_one_function_makes_the_sentence() -> None:
    said = [
        path
        for package in ("asynctask", "webapi")
        for path in (ROOT / package).rglob("*.py")
        if "pip install" in path.read_text()
    ]
    assert [path.relative_to(ROOT).as_posix() for path in said] == ["asynctask/errors.py"]


def test_no_page_and_no_extra_names_the_distribution_of_a_stranger() -> None:
    for page in PAGES:
        text = page.read_text()
        assert not re.search(r"(?<![\w-])asynctask\[", text), page
        assert not re.search(r"pip install (?:-\S+ )*'?asynctask(?![\w-])", text), page
    needed = [each for extra in PROJECT["optional-dependencies"].values() for each in extra]
    assert not [each for each in (*needed, *PROJECT["dependencies"]) if re.match(r"asynctask(?![\w-])", each)]


@pytest.mark.parametrize(("target", "how"), [("shop", "by a module"), ("shop.py", "by a file")])
def test_an_application_on_dramatiq_is_told_of_the_extra(tmp_path: Path, target: str, how: str) -> None:
    (tmp_path / "shop.py").write_text("import asynctask.integrations.dramatiq\n")
    code = (
        "import sys; sys.modules['dramatiq'] = None; from asynctask.cli.root import run;"
        f" sys.exit(run(['-A', '{target}:app', 'tasks']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, how
    assert not_installed("dramatiq", "dramatiq") in done.stderr


def test_the_oldest_engines_that_are_tested_are_those_that_the_extras_allow() -> None:
    tested = dict(re.findall(r"^(\w+)\|\1==([\d.]+)", (ROOT / "scripts/test-engines.sh").read_text(), re.MULTILINE))
    allowed = PROJECT["optional-dependencies"]
    for engine in ("celery", "dramatiq", "rq"):
        (lowest,) = (each.partition(">=")[2] for each in allowed[engine])
        assert tested[engine].removesuffix(".0") == lowest
