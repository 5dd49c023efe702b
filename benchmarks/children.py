"""The real processes of a benchmark: one worker, one web server; they end with whoever started them."""

from __future__ import annotations

import argparse
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from asynctask import AsyncTask
from asynctask.cli.output import log_to_stderr
from asynctask.runtime.supervisor import LIFELINE, watch_parent
from benchmarks.common import Place, Unaccounted

__all__ = ["RowOfItsOwn", "build", "child", "no_op"]

ROOT = Path(__file__).resolve().parents[1]
_END_S = 40.0


def no_op(item: dict[str, object]) -> None:
    """A job that does nothing."""


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


def build(place: Place, commit_to: Path | None = None) -> AsyncTask:
    """The application that is measured: one worker, ``job``."""
    app = place.app()
    body: Callable[[dict[str, object]], None] = no_op if commit_to is None else RowOfItsOwn(commit_to)

    def job(item: dict[str, object]) -> None:
        body(item)

    app.worker(job, retry=0)
    return app


@contextmanager
def child(role: str, place: Place, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A process of this module in the ``role`` of ``worker`` or ``web``; it has ended when the block has."""
    lifeline, hold = os.pipe()
    argv = [sys.executable, "-m", "benchmarks.children", role, str(place.folder), place.database_url, *more]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), LIFELINE: str(lifeline)}
    log = (place.folder / f"{role}.log").open("w+")
    process = subprocess.Popen(
        argv, cwd=place.folder, env=environ, pass_fds=(lifeline,), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=log, text=True, start_new_session=True,
    )  # fmt: skip
    os.close(lifeline)
    try:
        yield process
        if process.poll() is not None:
            log.seek(0)
            raise Unaccounted(f"the {role} process ended with {process.returncode}: {log.read()[-2_000:]}")
    finally:
        _end(process)
        os.close(hold)
        log.close()


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=_END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its own session: nobody else's processes are in it
        process.communicate()


def _announce(url: str) -> None:
    print(url, flush=True)


def main(argv: list[str] | None = None) -> int:
    """What the started process does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("worker", "web"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("database_url")
    parser.add_argument("-c", dest="concurrency", type=int, default=5)
    parser.add_argument("--commit-to", type=Path)
    options = parser.parse_args(argv)
    log_to_stderr()
    app = build(Place(options.folder, options.database_url), options.commit_to)
    watch_parent(os.environ, lambda: os.kill(os.getpid(), signal.SIGTERM))
    if options.role == "worker":
        return app.run_worker(concurrency=options.concurrency, shutdown_s=5.0)
    from webapi.server import serve

    serve(app, host="127.0.0.1", port=0, threads=4, ready=_announce)
    return 0


if __name__ == "__main__":
    sys.exit(main())
