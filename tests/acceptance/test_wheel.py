"""The wheel, installed into a virtual environment of its own, works from an empty folder far from the checkout."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

from asynctask import __version__

ROOT = Path(__file__).resolve().parents[2]

SHOP = """
from asynctask import AsyncTask

app = AsyncTask()


@app.worker(retry=0)
def enrol(item: dict) -> None:
    pass
"""

TINY = """
import json
from pathlib import Path
import asynctask, webapi
from shop import app

task = app.submit("enrol", [{"sku": "A"}, {"sku": "B"}])
launcher = app.launcher(concurrency=1, shutdown_s=5.0)
launcher.start()
progress = task.wait(timeout=120)
launcher.stop()
print(json.dumps({
    "counts": progress["counts"], "done": progress["done"], "findings": len(app.doctor()),
    "from": [str(Path(module.__file__).parent) for module in (asynctask, webapi)],
}))
app.close()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    # With the build's own requirements at hand nothing has to be fetched for it.
    offline = ["--no-isolation"] if importlib.util.find_spec("hatchling") else []
    command = [sys.executable, "-m", "build", "--wheel", *offline, "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment that holds the wheel; the packages that it needs are this environment's."""
    folder = tmp_path_factory.mktemp("elsewhere") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    binary = folder / "bin" / "python"
    # pip of this environment installs into the other one: no network, no second pip.
    command = [sys.executable, "-m", "pip", "--python", str(binary), "install", "--no-deps", "--no-index", "-q", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # A plain path line, not addsitedir: the editable install of the checkout, which is a .pth there, stays out.
    (packages / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return binary


def run(python: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the environment's Python in ``folder`` with nothing of this process's settings."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("ASYNCTASK_", "PYTHON"))}
    return subprocess.run(
        [str(python), *words], cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False
    )


def asynctask(python: Path, folder: Path, *words: str) -> Any:
    """What a command of the installed program prints with ``--json``."""
    done = run(python.parent / "asynctask", folder, *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_wheel_holds_migrations_examples_types_templates_and_nothing_of_the_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for needed in (
        "asynctask/py.typed",
        "webapi/py.typed",
        "asynctask/_migrations/env.py",
        "asynctask/_examples/promotions.py",
        "asynctask/_examples/engines/celery_promotions.py",
        "asynctask/_examples/shop/shop/templates/task.html",
        "asynctask/_examples/frontend/index.html",
        "webapi/static/client/asynctask.js",
        "webapi/static/client/asynctask.d.ts",
        "webapi/static/client/package.json",
    ):
        assert needed in names, f"{needed} is not in the wheel"
    entries = (
        zipfile.ZipFile(wheel).read(next(name for name in names if name.endswith(".dist-info/entry_points.txt"))).decode()
    )
    assert "[pytest11]\nasynctask.testing.plugin = asynctask.testing.plugin" in entries
    scripts = {f"asynctask/sidekiq/{path.name}" for path in (ROOT / "asynctask" / "sidekiq").glob("*.lua")}
    assert scripts
    assert scripts <= set(names)
    migrations = {path.name for path in (ROOT / "migrations" / "versions").glob("*.py")}
    assert {name.rpartition("/")[2] for name in names if name.startswith("asynctask/_migrations/versions/")} >= migrations
    for folder in ("static", "templates"):
        there = {str(p.relative_to(ROOT)) for p in (ROOT / "webapi" / folder).rglob("*") if p.is_file()}
        assert there, f"webapi/{folder} is empty"
        assert there <= set(names)
    strangers = {name.partition("/")[0] for name in names} - {"asynctask", "webapi"}
    assert all(name.endswith(".dist-info") for name in strangers), strangers
    assert not [name for name in names if name.endswith((".pyc", ".db", ".lock"))]


def test_the_distribution_has_the_name_that_every_message_says(wheel: Path, python: Path, tmp_path: Path) -> None:
    assert wheel.name == f"asynctask_ledger-{__version__}-py3-none-any.whl"
    said = run(python, tmp_path, "-c", "import importlib.metadata as m; print(m.version('asynctask-ledger'))")
    assert said.stdout.strip() == __version__, said.stderr
    extras = Parser().parsestr(zipfile.ZipFile(wheel).read(metadata_of(wheel)).decode()).get_all("Provides-Extra")
    assert {"postgresql", "mysql", "dramatiq", "yaml"} <= set(extras or ())


def metadata_of(wheel: Path) -> str:
    return next(name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))


def test_from_an_empty_folder_the_schema_is_made_and_checked(python: Path, tmp_path: Path) -> None:
    before = run(python.parent / "asynctask", tmp_path, "db", "check")
    assert before.returncode == 3
    assert "asynctask db upgrade" in before.stderr
    assert asynctask(python, tmp_path, "db", "upgrade")["changed"] is True
    assert asynctask(python, tmp_path, "db", "check")["ok"] is True
    assert asynctask(python, tmp_path, "db", "upgrade")["changed"] is False
    assert (tmp_path / "asynctask.db").is_file()


def test_from_an_empty_folder_a_list_is_submitted_performed_and_audited(python: Path, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "tiny.py").write_text(TINY)
    done = run(python, tmp_path, "tiny.py")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["done"], found["findings"]) == (True, 0)
    assert (found["counts"]["total"], found["counts"]["finish"]) == (2, 2)
    assert all(Path(each).is_relative_to(python.parents[1]) for each in found["from"]), "it must be the installed one"


def test_a_file_is_submitted_with_the_installed_command(python: Path, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "list.csv").write_text("sku\nA\nB\nC\n")
    found = asynctask(python, tmp_path, "-A", "shop:app", "submit", "list.csv", "--worker", "enrol")
    assert found["counts"]["total"] == 3
