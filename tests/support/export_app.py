"""The application of a world, with an export whose shards and merge wait for gates; for worker processes of their own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from support.world import MARK, make_app

from asynctask import AsyncTask
from asynctask.exports.rows import FORMATS, Part

ROWS = 2_500


def add_export(app: AsyncTask, folder: Path) -> None:
    """``numbers``: a shard yields so many rows, and waits in the middle for the file ``shard-gate``."""

    @app.export(columns=["n"], name="numbers", retry=2)
    def numbers(shard: int) -> Iterator[Sequence[int]]:
        for n in range(shard * ROWS, (shard + 1) * ROWS):
            if n == ROWS + ROWS // 2:
                (folder / "in-shard").touch()
                wait_for_file(folder / "shard-gate")
            yield [n]


def wait_for_file(path: Path) -> None:
    while not path.exists():
        threading.Event().wait(0.01)


def slow_merge(folder: Path) -> None:
    """The merge to csv waits, half done, for the file ``merge-gate``."""
    whole = type(FORMATS["csv"]).merge

    def merge(self: Any, out: IO[bytes], parts: Sequence[Part], columns: Sequence[str]) -> None:
        whole(self, out, parts[:1], columns)
        out.flush()
        (folder / "in-merge").touch()
        wait_for_file(folder / "merge-gate")
        out.seek(0)
        out.truncate()
        whole(self, out, parts, columns)

    type(FORMATS["csv"]).merge = merge  # type: ignore[method-assign]


if MARK in os.environ:
    app = make_app(Path(os.environ[MARK]), results_url=os.environ.get("ASYNCTASK_RESULTS_URL"))
    add_export(app, Path(os.environ[MARK]))
    slow_merge(Path(os.environ[MARK]))
