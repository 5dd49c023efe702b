"""The application of ``benchmarks.chaos``, for its processes.

From the environment: ``CHAOS_FOLDER``; ``CHAOS_AHEAD``, by how many seconds the wall clock of the process is ahead; and
``CHAOS_WORK_MS``, how long a job takes on average. ``python -m benchmarks.chaos_app`` polls the progress of every Task and
writes down what it was told.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import sqlalchemy as sa

from asynctask.clock import SystemClock, micros
from asynctask.database.tables import tasks
from asynctask.errors import Unavailable
from asynctask.ledger import progress
from asynctask.supervisor import watch_parent
from benchmarks.chaos_jobs import Book, build

__all__ = ["app"]

POLL_S = 0.1


class Ahead(SystemClock):
    """A wall clock that may be wrong."""

    def now(self) -> int:
        return super().now() + micros(float(os.environ.get("CHAOS_AHEAD", "0")))


folder = Path(os.environ["CHAOS_FOLDER"])
work_s = float(os.environ.get("CHAOS_WORK_MS", "1")) / 1e3
app = build(folder, work_s, Ahead(), app="benchmarks.chaos_app:app")
book = Book(folder)


def poll() -> None:
    """Writes each progress that differs from the one before, until it is ended."""
    before: dict[int, str] = {}
    open_tasks = sa.select(tasks.c.id).where(tasks.c.finished_at.is_(None)).order_by(tasks.c.id).limit(500)
    pause = threading.Event()
    watch_parent(os.environ, lambda: os.kill(os.getpid(), signal.SIGKILL))
    while not pause.wait(POLL_S):
        try:
            with app.ledger.database.read() as connection:
                ids = set(connection.execute(open_tasks).scalars()) | set(before)
                found = progress.progress(connection, sorted(ids), app.ledger.now()) if ids else []
        except Unavailable:
            continue
        for each in found:
            said = {"id": each["task_id"], "generation": each["generation"], "done": each["progress"]["done"],
                    "over": each["done"], "counts": each["counts"], "percent": each["progress"]["percent"]}  # fmt: skip
            line = json.dumps(said)
            if before.get(each["task_id"]) != line:
                book.note("P", line)
            if each["done"] and each["task_id"] in before:
                del before[each["task_id"]]
            elif not each["done"]:
                before[each["task_id"]] = line


if __name__ == "__main__":
    poll()
