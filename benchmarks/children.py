"""The real processes of a benchmark: one worker, one web server; they end with whoever started them."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from asynctask import AsyncTask
from asynctask.clock import SystemClock
from asynctask.config import ENV_PREFIX
from asynctask.logs import log_to_stderr
from asynctask.supervisor import LIFELINE, watch_parent
from benchmarks.common import Place, Unaccounted
from benchmarks.processes import started
from benchmarks.redis_servers import RedisPlace

__all__ = ["Job", "RowOfItsOwn", "await_address", "await_worker", "build", "check_seen", "child", "no_op"]

ROOT = Path(__file__).resolve().parents[1]
_START_S = 60.0
_END_S = 40.0


def no_op(item: dict[str, object]) -> None:
    """A job that does nothing."""


def called(progress: dict[str, object]) -> None:
    """A callback that does nothing."""


class RowOfItsOwn:
    """A job that commits one row of its own, in its own SQLite file: what the least useful job would do.

    The threads of a process share one connection and take turns, for SQLite's own way of waiting for a writer, pauses
    that grow, would be measured otherwise.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._turn = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    def __call__(self, item: dict[str, object]) -> None:
        with self._turn:
            if self._connection is None:
                self._connection = self._connect()
            self._connection.execute("INSERT INTO done (n) VALUES (?)", (item["n"],))

    def _connect(self) -> sqlite3.Connection:
        # Without the driver's own transactions each statement commits by itself.
        connection = sqlite3.connect(self._path, timeout=60, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("CREATE TABLE IF NOT EXISTS done (n INTEGER NOT NULL)")
        return connection

    def close(self) -> None:
        """Closes its connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def rows(self) -> tuple[int, int]:
        """How many rows there are, and how many items they are of."""
        connection = self._connect()
        try:
            found = connection.execute("SELECT count(*), count(DISTINCT n) FROM done").fetchone()
            return int(found[0]), int(found[1])
        finally:
            connection.close()


@dataclass(frozen=True)
class Job:
    """What the measured job does.

    ``commit_to``: a SQLite file in which it commits a row of its own. ``work_ms``: so long it waits, as for another
    service; with ``compute`` it computes instead, for so much of its own processor time. ``seen``: a file into which the
    worker process writes at its end which items it performed; ``tracked`` False leaves its jobs without Events.
    """

    commit_to: Path | None = None
    work_ms: float = 0.0
    compute: bool = False
    seen: Path | None = None
    tracked: bool = True

    def words(self) -> list[str]:
        """For the command line of :func:`child`."""
        words = ["--work-ms", str(self.work_ms)]
        words += ["--commit-to", str(self.commit_to)] if self.commit_to else []
        words += ["--seen", str(self.seen)] if self.seen else []
        return words + ["--compute"] * self.compute + ["--untracked"] * (not self.tracked)

    def body(self) -> Callable[[dict[str, object]], None]:
        """The function that performs it."""
        if self.commit_to is not None:
            return RowOfItsOwn(self.commit_to)
        if not self.work_ms:
            return no_op
        return partial(_compute if self.compute else _wait, self.work_ms / 1e3)


def _wait(seconds: float, item: dict[str, object]) -> None:
    time.sleep(seconds)  # the job itself: nothing waits for it here


def _compute(seconds: float, item: dict[str, object]) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def build(place: Place, job: Job) -> AsyncTask:
    """The application that is measured: one worker, ``job``."""
    app = place.app()
    body = job.body()
    performed: list[Any] = []

    def plain(item: dict[str, object]) -> None:
        body(item)

    def noted(item: dict[str, object]) -> None:
        body(item)
        performed.append(item["n"])

    app.worker(noted if job.seen else plain, name="job", retry=0, use_task_event=job.tracked)
    app.worker(called, name="called")
    if job.seen:
        seen = job.seen
        app.on("shutdown")(lambda: seen.write_text(json.dumps([len(performed), len(set(performed))])))
    return app


def check_seen(job: Job, n: int) -> None:
    """Raises :class:`Unaccounted` unless the worker process, which has ended, performed each of ``n`` items once."""
    if job.seen is None:
        return
    found = json.loads(job.seen.read_text()) if job.seen.exists() else None
    if found != [n, n]:
        raise Unaccounted(f"the worker performed {found} (jobs, different items), expected {[n, n]}")


@contextmanager
def child(role: str, place: Place, *more: str, may_die: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A process of this module in the ``role`` of ``worker`` or ``web``; it has ended when the block has.

    Raises :class:`Unaccounted` if it ended before, unless it ``may_die``.
    """
    lifeline, hold = os.pipe()
    argv = [sys.executable, "-m", "benchmarks.children", role, str(place.folder), *more]
    # Not among the words, which every user of the machine can read: a URL may hold a password.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    settings = {ENV_PREFIX + name.upper(): value for name, value in place.settings().items()}
    environ = {**inherited, **settings, "PYTHONPATH": str(ROOT), LIFELINE: str(lifeline)}
    log = (place.folder / f"{role}.log").open("a+")
    how = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": log, "text": True, "start_new_session": True}
    try:
        with started(argv, _end, cwd=place.folder, env=environ, pass_fds=(lifeline,), **how) as process:
            os.close(lifeline)
            yield process
            if process.poll() is not None and not may_die:
                log.seek(0)
                raise Unaccounted(f"the {role} process ended with {process.returncode}: {log.read()[-2_000:]}")
    finally:
        os.close(hold)
        log.close()


def await_worker(app: AsyncTask, process: subprocess.Popen[str], count: int = 1) -> None:
    """Waits until a worker process has registered, the last of ``count``."""
    clock, pause = SystemClock(), threading.Event()
    until = clock.monotonic() + _START_S
    while sum(each["kind"] == "worker" for each in app.processes()) < count:
        if process.poll() is not None or clock.monotonic() > until:
            raise Unaccounted("the worker process did not come up")
        pause.wait(0.02)


def await_address(process: subprocess.Popen[str]) -> str:
    """The address of a web server, once it takes connections."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise Unaccounted("the web server did not come up")
    return line


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=_END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its own session: nobody else's processes are in it
        process.communicate()


def _announce(url: str) -> None:
    print(url, flush=True)


def _application(options: argparse.Namespace) -> AsyncTask:
    if options.sheet:
        from benchmarks.sheet_app import app

        return app
    url = os.environ.get(ENV_PREFIX + "BROKER_URL")
    redis = RedisPlace(url, os.environ[ENV_PREFIX + "NAMESPACE"]) if url else None
    place = Place(options.folder, os.environ[ENV_PREFIX + "DATABASE_URL"], redis=redis)
    if options.knobs:
        from benchmarks import knobs

        return knobs.build(place)
    return build(place, Job(options.commit_to, options.work_ms, options.compute, options.seen, not options.untracked))


def main(argv: list[str] | None = None) -> int:
    """What the started process does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("worker", "web"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("-c", dest="concurrency", type=int, default=5)
    parser.add_argument("--commit-to", type=Path)
    parser.add_argument("--work-ms", type=float, default=0.0)
    parser.add_argument("--compute", action="store_true")
    parser.add_argument("--seen", type=Path)
    parser.add_argument("--untracked", action="store_true")
    parser.add_argument("--sheet", action="store_true")
    parser.add_argument("--knobs", action="store_true")
    options = parser.parse_args(argv)
    log_to_stderr()
    app = _application(options)
    watch_parent(os.environ, lambda: os.kill(os.getpid(), signal.SIGTERM))
    if options.role == "worker":
        return app.run_worker(concurrency=options.concurrency, shutdown_s=5.0)
    from webapi.server import serve

    serve(app, host="127.0.0.1", port=0, threads=4, ready=_announce)
    return 0


if __name__ == "__main__":
    sys.exit(main())
