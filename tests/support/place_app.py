"""The application of a world, with workers that go through many elements; for worker processes of their own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.world import MARK, Shop, make_app

from asynctask import AsyncTask, NormalException

app = make_app(Path(os.environ[MARK])) if MARK in os.environ else None


def add_workers(app: AsyncTask, shop: Shop) -> None:
    """``walk``: an iterable over as many numbers as its item says; ``sliced``: performs one item of a slice."""

    @app.worker(retry=2, retry_in=lambda count, error, job: 0.02)
    def sliced(item: dict[str, Any]) -> None:
        shop.note("did", item["n"])
        if item.get("refuse"):
            raise NormalException("refused")
        if item.get("gate"):
            while not (shop.folder / "gate").exists():
                threading.Event().wait(0.01)

    @app.worker(name="walk", retry=2, retry_in=lambda count, error, job: 0.02)
    class Walk(app.Iterable):  # type: ignore[misc, name-defined]
        def items(self, cursor: int | None, item: dict[str, Any]) -> Iterator[tuple[int, int]]:
            self.item = item
            shop.note("from", 0 if cursor is None else cursor)
            for number in range(cursor or 0, item["count"]):
                yield number, number + 1

        def each(self, number: int) -> None:
            shop.note("did", number)
            if number == self.item.get("bug") and shop.performed()[number] == 1:
                raise ValueError("stumbles once")
            if number == self.item.get("gate"):
                while not (shop.folder / "gate").exists():
                    threading.Event().wait(0.01)
            threading.Event().wait(self.item.get("pause", 0.0))

        def total(self, item: dict[str, Any]) -> int:
            return int(item["count"])

        def on_start(self) -> None:
            shop.note("hook", "start")

        def on_resume(self) -> None:
            shop.note("hook", "resume")

        def on_stop(self) -> None:
            shop.note("hook", "stop")

        def on_complete(self) -> None:
            shop.note("hook", "complete")


if app is not None:
    add_workers(app, Shop(Path(os.environ[MARK])))
