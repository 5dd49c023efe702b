"""The plugin for pytest, in projects of its users: pytest runs in a folder of theirs, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SHOP = """
from asynctask import AsyncTask, NormalException

def add_workers(app):
    @app.worker
    def enroll(item: dict) -> dict:
        if item["sku"] == "refused":
            raise NormalException("not qualified")
        return item
    return enroll
"""

TESTS = """
import os, shop
from asynctask.testing import drain

def test_a_list(asynctask_app):
    task = asynctask_app.submit("enroll", [{"sku": "A-1"}, {"sku": "refused"}])
    assert drain(asynctask_app) == {"finish": 1, "failed": 1}

def test_the_next_one_has_an_empty_ledger(asynctask_app, asynctask_ledger):
    assert asynctask_app.tasks() == []
    assert asynctask_app.config.broker_url == ""
    assert os.environ["ASYNCTASK_DATABASE_URL"] == asynctask_ledger["database_url"] == asynctask_app.config.database_url

def test_a_worker_runs(asynctask_app, asynctask_running):
    assert asynctask_app.submit("enroll", [{"sku": "A-1"}]).wait(timeout=60)["counts"]["finish"] == 1
"""


def run_pytest(folder: Path, files: dict[str, str], *arguments: str) -> tuple[int, str]:
    """The exit code and the output of pytest on these files. The terminal names a ledger and a Redis that no test may
    reach."""
    for name, content in files.items():
        (folder / name).write_text(content)
    (folder / "tmp").mkdir()
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(folder / "tmp"),
        "ASYNCTASK_DATABASE_URL": "postgresql://localhost:1/real",
        "ASYNCTASK_BROKER_URL": "redis://localhost:1/0",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "asynctask.testing.plugin", "-p", "no:cacheprovider"]
    command += ["-p", "no:schemathesis", "-p", "no:anyio", "-p", "no:xdist", *arguments]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


def written(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}


def test_an_application_that_is_made_at_import_has_a_ledger_of_the_tests(tmp_path: Path) -> None:
    """The conftest.py imports it already."""
    files = {
        "shop.py": SHOP + "\napp = AsyncTask()\nadd_workers(app)\n",
        "conftest.py": "import shop\n",
        "test_shop.py": TESTS,
        "pytest.ini": "[pytest]\nasynctask_app = shop:app\n",
    }
    code, said = run_pytest(tmp_path, files)
    assert (code, "3 passed" in said) == (0, True), said
    assert written(tmp_path) == files.keys(), "neither the project nor the folder for temporary files keeps anything"


def test_an_application_that_a_function_makes_is_made_in_the_projects_own_fixture(tmp_path: Path) -> None:
    files = {
        "shop.py": SHOP
        + "\ndef make_app(**settings):\n    app = AsyncTask(**settings)\n    add_workers(app)\n    return app\n",
        "conftest.py": (
            "import pytest, shop\n\n@pytest.fixture\ndef asynctask_app(asynctask_ledger):\n"
            "    app = shop.make_app(**asynctask_ledger)\n    yield app\n    app.close()\n"
        ),
        "test_shop.py": TESTS,
    }
    code, said = run_pytest(tmp_path, files)
    assert (code, "3 passed" in said) == (0, True), said


def test_a_project_that_does_not_ask_for_it_notices_nothing(tmp_path: Path) -> None:
    test = """
import os, sys

def test_nothing_has_happened(request):
    assert os.environ["ASYNCTASK_DATABASE_URL"] == "postgresql://localhost:1/real"
    loaded = {name for name in sys.modules if name.startswith("asynctask")}
    assert loaded == {"asynctask", "asynctask._version", "asynctask.clock", "asynctask.testing", "asynctask.testing.plugin"}
    assert not {"sqlalchemy", "flask", "pydantic", "orjson", "structlog"} & sys.modules.keys()
    assert not [name for name in request.fixturenames if name.startswith("asynctask")]
"""
    code, said = run_pytest(tmp_path, {"test_other.py": test})
    assert (code, "1 passed" in said) == (0, True), said


def test_a_mistake_is_said_before_a_test_writes_anywhere(tmp_path: Path) -> None:
    own = SHOP + "\napp = AsyncTask(database_url='sqlite:////nowhere/own.db')\nadd_workers(app)\n"
    for number, (ini, said_of) in enumerate(
        (
            ("asynctask_app = shop:app", "shop:app has a database of its own, where the tests would write"),
            ("asynctask_app = shop:missing", "'missing' is not there; it has shop:app"),
            ("", "no application is named: set asynctask_app = module:attribute"),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        files = {"shop.py": own, "test_shop.py": TESTS, "pytest.ini": f"[pytest]\n{ini}\n"}
        code, said = run_pytest(folder, files, "-k", "test_a_list")
        assert (code, said_of in said) == (1, True), said
