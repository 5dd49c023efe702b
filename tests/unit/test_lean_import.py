"""A program that only pushes loads neither database nor web: what a process has imported when it has pushed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

HEAVY = {
    "sqlalchemy", "flask", "apiflask", "alembic", "pydantic", "click", "structlog", "uvicorn", "prometheus_client",
    "python_calamine", "xlsxwriter", "rich", "yaml", "itsdangerous",
}  # fmt: skip

PUSHES = """
from asynctask.client import RedisClient
from asynctask.errors import BrokerUnavailable

client = RedisClient("redis://127.0.0.1:1/0")
hard = client.remote_worker("HardWorker", queue="low", retry=False, tags=["a"])
mail = client.remote_worker("MailJob", active_job=True)
told = 0
for push in (
    lambda: hard.perform_async(1), lambda: hard.perform_in(60, 1), lambda: hard.set(wait=5).perform_at(2_000_000_000, 1),
    lambda: hard.perform_bulk([[1], [2]]), lambda: mail.perform_async(1, to="b"),
):
    try:
        push()
    except BrokerUnavailable:
        told += 1
assert told == 5
"""


def imported(script: str) -> set[str]:
    """The top names of what a process has imported that ran ``script``."""
    script += '\nimport json, sys; print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))'
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("script", [PUSHES, "import asynctask.client", "from asynctask.client import *"])
def test_whoever_only_pushes_loads_no_database_and_no_web(script: str) -> None:
    assert imported(script) & HEAVY == set()


def test_two_libraries_are_enough_for_it() -> None:
    others = imported(PUSHES) - imported("pass") - sys.stdlib_module_names - {"asynctask"}
    # redis-py loads the first where it is there, the next three, which a tool for development may have brought, and the
    # last before Python 3.11.3.
    assert others - {"hiredis", "cryptography", "opentelemetry", "typing_extensions", "async_timeout"} == {
        "redis",
        "orjson",
    }


WORKS = """
import contextlib, tempfile
from asynctask import AsyncTask
from asynctask.cli.root import run

with tempfile.TemporaryDirectory() as folder, contextlib.suppress(SystemExit):
    app = AsyncTask(database_url=f"sqlite:///{folder}/a.db", data_dir=folder, environ={})
    app.ensure_schema()

    @app.worker
    def note(item: dict) -> None:
        pass

    run(["worker", "--help"])
    launcher = app.launcher(concurrency=1)
    launcher.start()
    try:
        note.perform_async({"n": 1})
    finally:
        launcher.stop()
        app.close()
"""


def test_a_worker_of_plain_items_holds_neither_pydantic_nor_what_reads_and_writes_workbooks() -> None:
    """It stays for months, and there may be sixty of them: 16 MB each. Taken out: any of the imports inside functions of
    `handle`, `submission`, `bulk.readers`, `bulk.items` and `cli.root`."""
    loaded = imported(WORKS)
    assert {"sqlalchemy", "structlog", "click"} <= loaded
    others = {"pydantic", "xlsxwriter", "python_calamine", "xml", "flask", "apiflask", "prometheus_client"}
    assert loaded & others == set()


def test_the_process_that_reads_a_workbook_loads_no_database() -> None:
    """It starts for each workbook. Taken out: `jsonable` in a module that does not import the ledger, and it took 0.4 s of
    processor time to start; it takes 0.1 s."""
    assert imported("import asynctask.lists.workbook_child") & HEAVY <= {"python_calamine"}


def test_what_is_looked_for_would_be_found() -> None:
    assert {"sqlalchemy", "structlog"} <= imported("from asynctask import AsyncTask")
    assert {"pydantic"} <= imported("import asynctask.lists.options")


def test_every_runtime_dependency_is_used() -> None:
    root = Path(__file__).parents[2]
    known = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    sources = [path for folder in ("asynctask", "webapi", "migrations") for path in (root / folder).rglob("*.py")]
    imported = set(re.findall(r"^\s*(?:from|import) (\w+)", "\n".join(path.read_text() for path in sources), re.MULTILINE))
    names = {re.split(r"[<>=\[]", each)[0].replace("-", "_") for each in known}
    assert names - imported == {"hiredis"}, "redis-py loads that one by itself"
