"""docs/tutorial/first-list.md is true: its files are written and its commands run in order, in an empty folder. The files
that docs/how-to/test-your-workers.md shows, with its blocks one below the other, pass on its shop."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from asynctask.testing import wait_for

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "tutorial/first-list.md"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """That of a terminal in which the command `asynctask` is this checkout's."""
    programs = tmp_path / "programs"
    programs.mkdir()
    command = programs / "asynctask"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m asynctask "$@"\n')
    command.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ASYNCTASK_")}
    return {
        **kept,
        "PATH": f"{programs}:{kept['PATH']}",
        "PYTHONPATH": str(DOCS.parent),
        "ASYNCTASK_PORT": "0",  # that of the page may be in use
    }


def blocks(page: Path = PAGE) -> list[tuple[str, str]]:
    """(language, content) of a page's fenced blocks, in order."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def names() -> list[str]:
    """The files that the page has its reader save, in order."""
    return re.findall(r"Save this as `(\S+)`:", PAGE.read_text())


def test_the_tutorial_brings_every_row_to_a_good_end(tmp_path: Path, environ: dict[str, str]) -> None:
    folder = tmp_path / "shop"
    folder.mkdir()
    saved, said, started = iter(names()), "", []
    codes: list[int] = []
    try:
        for language, content in blocks():
            if language in ("python", "csv"):
                (folder / next(saved)).write_text(content)
            elif language == "text":
                lost = [line for line in content.splitlines() if line not in said.splitlines()]
                assert not lost, f"the page shows what was not said: {lost}\n{said}"
            elif content.rstrip().endswith(" up"):
                started.append(subprocess.Popen(shlex.split(content), cwd=folder, env=environ, stdout=subprocess.DEVNULL))
                wait_for((folder / "asynctask.db").exists, "the processes have made the database")
            else:
                done = subprocess.run(
                    ["sh", "-c", content], cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False
                )
                said = (done.stdout + done.stderr).replace("\ufeff", "")
                codes.append(done.returncode)
    finally:
        for process in started:
            process.terminate()
    assert [process.wait(60) for process in started] == [0]
    assert (list(saved), said.strip()) == ([], "Nothing is wrong: every count equals its rows.")
    assert codes == [0, 1, 1, 0, 0, 0, 0, 0, 0], "the dry run and the first list have rows to correct, nothing else has"


def test_the_tests_of_workers_pass_on_the_shop_of_the_tutorial(tmp_path: Path, environ: dict[str, str]) -> None:
    """As a reader would paste them. The terminal names a ledger and a Redis that no test may reach."""
    files = {"shop.py": next(content for language, content in blocks() if language == "python")}
    for _, content in blocks(DOCS / "how-to/test-your-workers.md"):
        name = content.split()[1].rstrip(",")
        files[name] = files.get(name, "") + content
    assert sorted(files) == ["pytest.ini", "shop.py", "test_shop.py"]
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    environ |= {"ASYNCTASK_DATABASE_URL": "postgresql://localhost:1/real", "ASYNCTASK_BROKER_URL": "redis://localhost:1/0"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", "-p", "no:anyio"]
    command += ["-p", "asynctask.testing.plugin"]  # as its installation does
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False)
    count = files["test_shop.py"].count("\ndef test_")
    assert (done.returncode, f"{count} passed" in done.stdout) == (0, True), done.stdout
    written = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert written == files.keys(), "the tests write nothing into the project"
