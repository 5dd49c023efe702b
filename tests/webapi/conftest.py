"""A real application on a SQLite file of its own, and Flask's client in front of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.webshop import Client, build_app, client_of, form_of

from asynctask import AsyncTask


@pytest.fixture
def make_app(tmp_path: Path) -> Iterator[Callable[..., AsyncTask]]:
    apps: list[AsyncTask] = []

    def make(**settings: Any) -> AsyncTask:
        folder = tmp_path / str(len(apps))
        folder.mkdir()
        apps.append(build_app(folder, **settings))
        return apps[-1]

    yield make
    for each in apps:
        each.close()


@pytest.fixture
def app(make_app: Callable[..., AsyncTask]) -> AsyncTask:
    return make_app()


@pytest.fixture
def client(app: AsyncTask) -> Client:
    return client_of(app)


@pytest.fixture
def working(app: AsyncTask) -> Callable[[], AbstractContextManager[None]]:
    """A worker process within this one: ``with working(): ...``."""

    @contextmanager
    def run() -> Iterator[None]:
        launcher = app.launcher(concurrency=2, shutdown_s=5)
        launcher.start()
        try:
            yield
        finally:
            launcher.stop()

    return run


@pytest.fixture
def ended(app: AsyncTask, working: Callable[[], AbstractContextManager[None]]) -> Callable[..., int]:
    """Submits items, has them all performed, returns the Task's id."""

    def submit(*skus: str, note: str | None = None, **options: Any) -> int:
        task = app.submit("enroll", [{"sku": sku, "note": note} for sku in skus], **options)
        with working():
            assert task.wait(timeout=120)["done"]
        return int(task.id)

    return submit


@pytest.fixture(name="form")
def form_fixture() -> Callable[..., dict[str, Any]]:
    return form_of
