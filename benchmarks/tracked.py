"""Tracked no-op jobs, from just before the submit until the last one is recorded and its Task is done.

    python -m benchmarks.tracked [-n N] [-c THREADS] [--runs R] [--poll] [--commit] [--json]

This process submits; one worker process, a real one, performs. ``--poll`` adds a web server and one client that asks for
the progress over HTTP every 200 ms; with ``--commit`` each job commits one row of its own. Runs of ours and of the peer
alternate; the figures are medians. The peer is the least that keeps the same promise of a record per job: a loop of one
thread over raw sqlite3 that inserts the same jobs by the thousand and then commits two updates for each, ``working`` and
``finish``. It has no queue, no second process, no messages and no counts.

A quick look takes -n 10000, a figure -n 100000.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sqlite3
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from asynctask import AsyncTask
from asynctask.clock import SystemClock, SystemIds
from benchmarks import common
from benchmarks.children import RowOfItsOwn, build, child, no_op
from benchmarks.common import Place, Result, Unaccounted

__all__ = ["main"]

POLL_S = 0.2
PEER_N = 5_000
"""The peer's rate does not depend on how many jobs it has; so many give it."""

_LIMIT_S = 3_600.0
_START_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = common.arguments(__doc__, n=10_000)
    parser.add_argument("-c", dest="threads", type=int, default=5, help="threads of the worker process (default 5)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--poll", action="store_true", help="one client polls the progress over HTTP meanwhile")
    parser.add_argument("--commit", action="store_true", help="each job commits one row of its own")
    return common.run(parser, argv, measure)


def measure(options: argparse.Namespace) -> Result:
    """Runs both sides ``--runs`` times in turn."""
    if options.runs < 1 or options.threads < 1:
        raise common.Refused("--runs and -c must be at least 1")
    ours, peer, polls = [], [], Polls()
    peer_n = min(options.n, PEER_N)
    for _ in range(options.runs):
        with common.place(options) as place:
            ours.append(options.n / _ours(place, options, polls))
        with common.place(options) as place:
            peer.append(peer_n / _peer(place.folder, peer_n, options.commit))
    settings: dict[str, Any] = {
        **common.setting(),
        "processes": 1,
        "threads": options.threads,
        "runs": options.runs,
        "job": "commits one row of its own" if options.commit else "nothing",
        "poll": f"one HTTP client, every {POLL_S:g} s" if options.poll else "the submitter alone",
        "clock": "from just before submit until the Task is done",
        **common.spread("ours", ours),
        **polls.summary(),
        "peer": f"one thread, raw sqlite3: {peer_n:,} jobs inserted by the thousand, two commits for each"
        + (", and its own row" if options.commit else ""),
        **common.spread("peer", peer),
    }
    middle, beside = statistics.median(ours), statistics.median(peer)
    return Result("tracked", options.n, middle, beside, middle / beside, "items/s", settings)


# -- ours


def _ours(place: Place, options: argparse.Namespace, polls: Polls) -> float:
    commit_to = place.folder / "own.db" if options.commit else None
    more = ("-c", str(options.threads), *(("--commit-to", str(commit_to)) if commit_to else ()))
    clock = SystemClock()
    with closing(build(place, commit_to)) as app, ExitStack() as stack:
        worker = stack.enter_context(child("worker", place, *more))
        _await_worker(app, worker)
        address = _address(stack.enter_context(child("web", place))) if options.poll else None
        begun = clock.monotonic()
        with polls.every(address):
            task = app.submit("job", ({"n": i} for i in range(options.n)), title="benchmark")
            polls.task_id = task.id
            progress = task.wait(timeout=_LIMIT_S, poll_s=0.05)
        seconds = clock.monotonic() - begun
        if not progress["done"]:
            raise Unaccounted(f"the Task is not done after {_LIMIT_S:g} s")
        common.audit(app, task.id, finish=options.n)
        if commit_to and RowOfItsOwn(commit_to).rows() != (options.n, options.n):
            raise Unaccounted("the rows of the jobs' own are not one for each item")
    return seconds


def _await_worker(app: AsyncTask, process: subprocess.Popen[str]) -> None:
    clock, pause = SystemClock(), threading.Event()
    until = clock.monotonic() + _START_S
    while not any(each["kind"] == "worker" for each in app.processes()):
        if process.poll() is not None or clock.monotonic() > until:
            raise Unaccounted("the worker process did not come up")
        pause.wait(0.02)


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise Unaccounted("the web server did not come up")
    return line


@dataclass
class Polls:
    """One client that asks how far the Task is, as a page in a browser does."""

    task_id: int | None = None
    seconds: list[float] = field(default_factory=list)
    failure: str = ""

    @contextmanager
    def every(self, address: str | None) -> Iterator[None]:
        """Polls over HTTP while the block runs; does nothing without an address."""
        if address is None:
            yield
            return
        stop = threading.Event()
        self.task_id = None
        thread = threading.Thread(target=self._run, args=(urlsplit(address), stop), name="poll-client")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        if self.failure:
            raise Unaccounted(f"a poll failed: {self.failure}")

    def _run(self, address: Any, stop: threading.Event) -> None:
        clock = SystemClock()
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
        try:
            while not stop.wait(POLL_S):
                # The id is known when the submit returns; until then any other client would ask for the newest Task.
                path = f"/api/tasks/{self.task_id}" if self.task_id else "/api/tasks?limit=1"
                begun = clock.monotonic()
                connection.request("GET", path)
                answer = connection.getresponse()
                body = json.loads(answer.read())
                self.seconds.append(clock.monotonic() - begun)
                if answer.status != 200:
                    self.failure = f"{answer.status} {body.get('detail')}"
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.failure = repr(error)
        finally:
            connection.close()

    def summary(self) -> dict[str, Any]:
        """For ``settings``."""
        if not self.seconds:
            return {}
        median, slow = statistics.median(self.seconds), common.p95(self.seconds)
        return {"polls": len(self.seconds), "poll_median_ms": round(median * 1e3, 2), "poll_p95_ms": round(slow * 1e3, 2)}


# -- the peer


def _peer(folder: Path, n: int, commit: bool) -> float:
    body = RowOfItsOwn(folder / "peer-own.db") if commit else no_op
    connection = sqlite3.connect(folder / "peer.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("CREATE TABLE jobs (job_id TEXT PRIMARY KEY, params TEXT, status TEXT, message TEXT, at INTEGER)")
    clock, jids = SystemClock(), SystemIds().jids(n)
    try:
        begun = clock.monotonic()
        for start in range(0, n, 1_000):
            rows = [(jid, json.dumps({"n": i})) for i, jid in enumerate(jids[start : start + 1_000], start)]
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("INSERT INTO jobs (job_id, params, status) VALUES (?, ?, 'enqueue')", rows)
            connection.execute("COMMIT")
        update = "UPDATE jobs SET status = ?, message = ?, at = ? WHERE job_id = ?"
        for i, jid in enumerate(jids):
            connection.execute(update, ("working", "In progress", clock.now(), jid))
            body({"n": i})
            connection.execute(update, ("finish", "Done", clock.now(), jid))
        seconds = clock.monotonic() - begun
        if connection.execute("SELECT count(*) FROM jobs WHERE status = 'finish'").fetchone() != (n,):
            raise Unaccounted("the peer did not finish every job")
    finally:
        connection.close()
        if isinstance(body, RowOfItsOwn):
            body.close()
    return seconds


if __name__ == "__main__":
    sys.exit(main())
