"""A real application on a SQLite file of its own, with Flask's client in front of it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flask.testing import FlaskClient
from pydantic import BaseModel, Field
from support.databases import migrated_file

from asynctask import AsyncTask, NormalException, __version__
from webapi import User, create_app
from webapi.context import Slots


class Product(BaseModel):
    sku: str = Field(max_length=20)
    quantity: int = Field(1, ge=1, le=100, title="Quantity")
    note: str | None = None


def build_app(folder: Path, **settings: Any) -> AsyncTask:
    """An answer waits until its list is validated, however slow the machine, unless ``settings`` say otherwise."""
    settings = {"submit_wait_s": 60.0, **settings}
    if not (folder / "ledger.db").exists():
        migrated_file(folder / "ledger.db")
    app = AsyncTask(environ={}, database_url=f"sqlite:///{folder / 'ledger.db'}", data_dir=str(folder / "data"), **settings)

    @app.worker(retry=0)
    def enroll(item: Product) -> dict[str, str]:
        """Enrol a product in the promotion."""
        if item.sku.startswith("NO"):
            raise NormalException(item.note or f"{item.sku} is not qualified")
        if item.sku.startswith("BUG"):
            raise RuntimeError(item.note or f"{item.sku} broke")
        return {"enrolled": item.sku}

    @app.worker(retry=0)
    def anything(item: dict[str, Any]) -> None:
        """Take any row."""

    app.ensure_schema()
    return app


class Client(FlaskClient):
    """Reads every answer to its end and closes it, as every server does. An answer is ``Any``: a test knows its JSON."""

    get: Callable[..., Any]
    head: Callable[..., Any]
    post: Callable[..., Any]
    patch: Callable[..., Any]
    put: Callable[..., Any]
    delete: Callable[..., Any]
    options: Callable[..., Any]

    def open(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("buffered", True)
        return super().open(*args, **kwargs)


def client_of(app: AsyncTask, threads: int | None = None, **more: Any) -> Client:
    """``more``: of :func:`create_app`."""
    flask_app = create_app(app, slots=None if threads is None else Slots.of_threads(threads), **more)
    flask_app.test_client_class = Client
    client = flask_app.test_client()
    assert isinstance(client, Client)
    return client


def form_of(content: bytes | str, filename: str = "list.csv", worker: str = "enroll", **fields: Any) -> dict[str, Any]:
    """The arguments of a POST that uploads a file."""
    body = content.encode() if isinstance(content, str) else content
    return {"data": {"worker": worker, "file": (io.BytesIO(body), filename), **fields}}


def as_user(app: AsyncTask, user: User | None) -> Client:
    """A client of ``app`` whose requests are all those of ``user``."""
    return client_of(app, authorize=lambda _: user)


def calls(app: AsyncTask, **in_path: Any) -> Iterator[tuple[str, str, str]]:
    """Every route: its endpoint, a method, and a path with these values in it."""
    flask_app = create_app(app)
    adapter = flask_app.url_map.bind("localhost")
    for rule in flask_app.url_map.iter_rules():
        named = {"name": "default", "filename": "task.js", "version": __version__, **in_path}
        named = {"fingerprint": "0" * 12, "template": "0" * 32, **named}
        for method in sorted((rule.methods or set()) - {"OPTIONS", "HEAD"}):
            yield rule.endpoint, method, adapter.build(rule.endpoint, {each: named[each] for each in rule.arguments})


def said(answer: Any) -> tuple[int, str]:
    """The status of an answer, and the code of its problem."""
    return answer.status_code, (answer.get_json(silent=True) or {}).get("code", "")
