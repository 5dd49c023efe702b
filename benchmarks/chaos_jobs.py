"""The jobs of ``benchmarks.chaos``: they write down in a book of their own when they are performed."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from asynctask import AsyncTask, NormalException, current_job
from asynctask.clock import Clock, SystemClock

__all__ = ["Book", "build"]

FORKED_S = 1.0
"""How long a process lives that a job forks: longer than its parent, if that is killed."""

_clock = SystemClock()


class Book:
    """Append-only files in ``folder/book``, one of each process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "book"
        self._descriptors: dict[int, int] = {}

    def note(self, *words: Any) -> None:
        """Appends a line to the file of this process, in one write: a kill neither tears nor loses it."""
        pid = os.getpid()
        if pid not in self._descriptors:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._descriptors[pid] = os.open(self._folder / str(pid), flags, 0o644)
        line = " ".join(str(word) for word in words) + "\n"
        os.write(self._descriptors[pid], line.encode())


class Row(BaseModel):
    """A row of an upload."""

    n: int
    kind: str
    pad: str = ""


class Jobs:
    """What a job does: ``B`` in the book, its time, ``E`` in the book, and an end as its kind says."""

    def __init__(self, folder: Path, work_s: float) -> None:
        self._book = Book(folder)
        self._work_s = work_s

    def perform(self, n: int, kind: str) -> dict[str, int]:
        """One job."""
        job = current_job()
        said = (job.task_id, n, job.job_id, job.attempt)
        self._book.note("B", _clock.monotonic(), *said)
        outcome = "error"
        try:
            if kind == "fork":
                self._fork()
            time.sleep(random.uniform(0.2, 1.8) * self._work_s)  # the job itself: nothing waits for it here
            if kind == "refuse":
                outcome = "failed"
                raise NormalException("refused")
            if kind == "bug" or (kind == "shaky" and job.payload.get("retry_count", -1) < 0):
                raise ValueError("a bug")
            outcome = "finish"
            return {"n": n}
        finally:
            self._book.note("E", _clock.monotonic(), *said, outcome)

    def _fork(self) -> None:
        """Leaves a process behind that has every descriptor of this one, and outlives it if it is killed."""
        pid = os.fork()
        if pid == 0:
            time.sleep(FORKED_S)
            os._exit(0)
        self._book.note("F", _clock.monotonic(), pid)
        threading.Thread(target=os.waitpid, args=(pid, 0), daemon=True).start()

    def told(self, name: str, found: dict[str, Any]) -> None:
        """A callback."""
        self._book.note("C", _clock.monotonic(), found["task_id"], found["generation"], name)


def build(folder: Path, work_s: float, clock: Clock | None = None, **settings: Any) -> AsyncTask:
    """The application. ``work_s``: how long a job takes on average."""
    app = AsyncTask(clock=clock, **settings)
    jobs = Jobs(folder, work_s)

    def soon(count: int, error: BaseException, job: Any) -> float:
        return 0.05

    @app.worker(retry=2, retry_in=soon)
    def work(item: dict[str, Any]) -> dict[str, int]:
        return jobs.perform(item["n"], item.get("kind", "ok"))

    @app.worker(retry=0, key="key")
    def keyed(item: dict[str, Any]) -> dict[str, int]:
        return jobs.perform(item["n"], "ok")

    @app.worker(retry=0)
    def once(item: dict[str, Any]) -> dict[str, int]:
        return jobs.perform(item["n"], item.get("kind", "ok"))

    @app.worker(retry=2, retry_in=soon)
    def row(item: Row) -> dict[str, int]:
        return jobs.perform(item.n, item.kind)

    @app.worker(retry_in=soon)
    def told(name: str, found: dict[str, Any]) -> None:
        jobs.told(name, found)

    return app
