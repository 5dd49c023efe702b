"""The plugin for pytest: an empty ledger for each test, the application on it, and a running worker.

pytest imports this module in every environment in which AsyncTask is installed, so it imports nothing of it by itself, and
does nothing unless a project sets ``asynctask_app`` in its configuration of pytest, or a test asks for a fixture.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from asynctask.app import AsyncTask
    from asynctask.runtime.launcher import Launcher

_APP = "asynctask_app"
_FOLDER = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option ``asynctask_app`` of the configuration file."""
    parser.addini(_APP, "the application under test, as module:attribute; its ledger is a private one", default="")


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """If the project names its application, sets the environment before the first conftest.py can import it: an application
    reads its settings when it is made."""
    if early_config.getini(_APP):
        folder = Path(tempfile.mkdtemp(prefix="asynctask-test-"))
        patch = pytest.MonkeyPatch()
        _point_to(folder, patch)
        early_config.stash[_FOLDER] = folder
        early_config.add_cleanup(patch.undo)
        early_config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.fixture
def asynctask_ledger(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    """An empty SQLite ledger for this test: its settings, which the environment has, too.

    If the configuration names the application, that has this ledger. Otherwise the test makes the application after this
    fixture: ``make_app(**asynctask_ledger)``.
    """
    folder = request.config.stash.get(_FOLDER, None)
    if folder is None:
        folder = tmp_path / "asynctask"
        folder.mkdir()
        yield _point_to(folder, monkeypatch)
        return
    app, settings = _load(request.config), _settings(folder)
    if app.config.database_url != settings["database_url"]:
        pytest.fail(
            f"{request.config.getini(_APP)} has a database of its own, where the tests would write: leave database_url to"
            " the environment, or make the application in a fixture asynctask_app"
        )
    folder.mkdir(exist_ok=True)
    yield settings
    app.close()
    shutil.rmtree(folder)


@pytest.fixture
def asynctask_app(request: pytest.FixtureRequest, asynctask_ledger: dict[str, str]) -> AsyncTask:
    """The application that the configuration names, on an empty ledger. Override it where a function makes yours."""
    if not request.config.getini(_APP):
        raise pytest.UsageError(
            "no application is named: set asynctask_app = module:attribute in the configuration of pytest, or define a"
            " fixture asynctask_app(asynctask_ledger) that makes yours"
        )
    return _load(request.config)


@pytest.fixture
def asynctask_running(asynctask_app: AsyncTask) -> Iterator[Launcher]:
    """A worker in threads of the test's own process, on ``asynctask_app``."""
    from asynctask.testing import running

    with running(asynctask_app) as launcher:
        yield launcher


def _load(config: pytest.Config) -> AsyncTask:
    from asynctask.cli.options import BadTarget, load_app

    try:
        return load_app(config.getini(_APP))
    except BadTarget as error:
        raise pytest.UsageError(f"asynctask_app: {error}") from None


def _settings(folder: Path) -> dict[str, str]:
    return {"database_url": f"sqlite:///{folder}/ledger.db", "data_dir": f"{folder}/data"}


def _point_to(folder: Path, patch: pytest.MonkeyPatch) -> dict[str, str]:
    """Sets the environment to the ledger in ``folder``, without any other setting that the terminal has."""
    for name in [name for name in os.environ if name.startswith("ASYNCTASK_")]:
        patch.delenv(name)
    settings = _settings(folder)
    for name, value in settings.items():
        patch.setenv(f"ASYNCTASK_{name.upper()}", value)
    return settings
