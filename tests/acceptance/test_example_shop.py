"""docs/tutorial/shop.md is true: its blocks are the files of examples/shop, whose tests pass, and its commands run it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import PATIENCE_MS, chromium

from asynctask.testing import wait_for
from asynctask.testing.servers import free_port

ROOT = Path(__file__).resolve().parents[2]
SHOP = ROOT / "examples/shop"
PAGE = (ROOT / "docs/tutorial/shop.md").read_text()
COMMANDS = {"asynctask": [sys.executable, "-m", "asynctask"], "flask": [sys.executable, "-m", "flask"]}


def files() -> dict[str, str]:
    """What the reader of the page has saved at its end, by name."""
    found: dict[str, str] = {}
    steps = r"(Save this as|Append this to)\s`(\S+)`:\n\n```\w+\n(.*?)^```$"
    for verb, name, content in re.findall(steps, PAGE, re.MULTILINE | re.DOTALL):
        assert (verb == "Append this to") == (name in found), f"{verb} {name}"
        found[name] = f"{found[name]}\n\n{content}" if name in found else content
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the reader has written; the rest of examples/shop stays where it is."""
    for name, content in files().items():
        path = tmp_path / "web-shop" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path / "web-shop"


@pytest.fixture
def environ() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ASYNCTASK_", "SHOP_", "FLASK_"))}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


def test_the_blocks_of_the_page_are_the_files_of_the_example() -> None:
    paths = [path for kind in ("*.py", "*.html", "*.ini", "sale.csv") for path in SHOP.rglob(kind)]
    assert files() == {str(path.relative_to(SHOP)): path.read_text() for path in paths}


def test_the_shop_passes_its_own_tests(folder: Path, environ: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", "-p", "no:anyio"]
    command += ["-p", "asynctask.testing.plugin"]  # as its installation does
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, " passed" in done.stdout) == (0, True), done.stdout + done.stderr
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == files().keys()


@pytest.fixture
def address(folder: Path, environ: dict[str, str]) -> Iterator[str]:
    """Of the shop that the commands of the page have started."""
    environ |= {"FLASK_RUN_PORT": str(free_port())}  # that of the page may be in use
    prepare, *staying = re.findall(r"^(?:flask|asynctask) .+$", PAGE, re.MULTILINE)
    words = [[*COMMANDS[command], *rest] for command, *rest in map(shlex.split, (f"{prepare} --password secret", *staying))]
    subprocess.run(words[0], cwd=folder, env=environ, timeout=120, check=True)
    logs = [folder / f"{number}.log" for number in range(len(staying))]
    started = []
    try:
        for argv, log in zip(words[1:], logs, strict=True):
            with log.open("wb") as output:
                started.append(subprocess.Popen(argv, cwd=folder, env=environ, stdout=output, stderr=output))
        wait_for(lambda: "Running on" in logs[-1].read_text(), "the shop answers")
        yield f"http://127.0.0.1:{environ['FLASK_RUN_PORT']}"
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(60)


def test_its_commands_run_the_shop(folder: Path, address: str) -> None:
    """As a user in a browser: login, upload, the Task followed to its end, the workbook of rows to correct, an export."""
    (shown,) = re.findall(r"^```text\n(.*)\n```$", PAGE, re.MULTILINE)
    with chromium() as browser:
        page: Any = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(address)
        page.fill("input[name=name]", "ann")
        page.fill("input[name=password]", "secret")
        page.click("text=Log in")
        page.set_input_files("input[name=sheet]", folder / "sale.csv")
        page.fill("input[name=until]", "2999-12-31")
        page.click("text=Enrol in the sale")
        page.wait_for_selector("#report")
        assert page.text_content("#state") == shown
        assert "1 × there is no such product" in page.locator("#errors li").all_text_contents()
        with page.expect_download() as report:
            page.click("#report")
        assert report.value.suggested_filename.endswith(".xlsx")
        page.click("h1 a")
        page.click("text=Export the price list")
        with page.expect_download() as exported:
            page.click("#file")
        assert exported.value.suggested_filename.endswith(".xlsx")
