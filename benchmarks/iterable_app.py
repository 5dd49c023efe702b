"""The application of the benchmark of iterables, by the settings of its environment."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asynctask import AsyncTask
from asynctask.job import Iterable

__all__ = ["BOOK", "app"]

BOOK = "BENCHMARK_BOOK"
"""The file in which each performed element is noted: 8 bytes each, one write."""

app = AsyncTask()
_pause = threading.Event()
_books: dict[str, int] = {}


def _perform(number: int, wait_s: float) -> None:
    if (path := os.environ.get(BOOK)) is not None:
        if path not in _books:
            _books[path] = os.open(Path(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(_books[path], struct.pack("<q", number))
    if wait_s:
        _pause.wait(wait_s)


@app.worker(name="walk", retry=0)
class Walk(Iterable):
    """Goes through ``n`` elements, each of ``wait_s`` seconds, and saves its place."""

    def items(self, cursor: int | None, item: dict[str, Any]) -> Iterator[tuple[int, int]]:
        self.wait_s = float(item["wait_s"])
        return ((number, number + 1) for number in range(cursor or 0, item["n"]))

    def each(self, number: int) -> None:
        _perform(number, self.wait_s)


@app.worker(name="loop", retry=0)
def loop(item: dict[str, Any]) -> None:
    """The same without a place."""
    for number in range(item["n"]):
        _perform(number, item["wait_s"])
