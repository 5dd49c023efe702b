"""One job that goes through many elements and saves its place: what saving costs, and what kills repeat.

    python -m benchmarks.iterable [-n N] [--work-ms MS] [--kills K] [--kill-n N] [--runs R] [--server KIND] [--json]

The figure is the rate of elements of ``--work-ms`` milliseconds in an iterable, and the peer the same loop in a plain job;
runs alternate, and the medians count. Then an iterable over ``--kill-n`` elements without any work runs while its worker
process is killed ``--kills`` times at random times: every element must have been performed, and ``repeated`` says how many
were performed twice, ``most_repeated_at_once`` how many one kill cost.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from asynctask import AsyncTask
from asynctask.clock import SystemClock
from asynctask.config import ENV_PREFIX
from asynctask.supervisor import LIFELINE
from benchmarks import common
from benchmarks.children import ROOT, await_worker
from benchmarks.common import Place, Result, Unaccounted
from benchmarks.iterable_app import BOOK
from benchmarks.processes import end_kindly, started

__all__ = ["main"]

_LIMIT_S = 600.0
_LEASE_S = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = common.arguments(__doc__, n=2_000)
    parser.add_argument("--work-ms", type=float, default=1.0, metavar="MS", help="each element takes so long (default 1)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--kills", type=int, default=3, help="kills (default 3)")
    parser.add_argument("--kill-n", type=int, default=100_000, help="elements while there are kills (default 100000)")
    return common.run(parser, argv, measure)


def measure(options: argparse.Namespace) -> Result:
    """Runs both kinds in turn, then the kills."""
    rates: dict[str, list[float]] = {"walk": [], "loop": []}
    for _ in range(options.runs):
        for worker in rates:
            with common.place(options) as place, closing(_app(place)) as app, _worker(place) as process:
                await_worker(app, process)
                seconds = _performed(app, worker, {"n": options.n, "wait_s": options.work_ms / 1e3})
            rates[worker].append(options.n / seconds)
    ours, peer = statistics.median(rates["walk"]), statistics.median(rates["loop"])
    settings: dict[str, Any] = {
        **common.setting(options),
        "runs": options.runs,
        "element": f"waits for {options.work_ms:g} ms",
        "peer": "the same loop in a plain job, which saves nothing",
        **_killed(options),
    }
    return Result("iterable", options.n, ours, peer, ours / peer, "elements/s", settings)


def _app(place: Place) -> AsyncTask:
    """The submitting side; the workers are known by their names there."""
    app = place.app(lease_s=_LEASE_S, heartbeat_s=_LEASE_S / 4)
    for name in ("walk", "loop"):
        app.worker(name=name, retry=0)(_elsewhere)
    return app


def _elsewhere(item: dict[str, Any]) -> None:
    """The worker process has the function."""


@contextmanager
def _worker(place: Place, book: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    given = {**place.settings(), "lease_s": str(_LEASE_S), "heartbeat_s": str(_LEASE_S / 4)}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    lifeline, hold = os.pipe()
    environ = {**inherited, **{ENV_PREFIX + name.upper(): value for name, value in given.items()}, "PYTHONPATH": str(ROOT)}
    environ[LIFELINE] = str(lifeline)  # the worker process itself, not a supervisor with one
    if book is not None:
        environ[BOOK] = str(book)
    argv = [sys.executable, "-m", "asynctask", "-A", "benchmarks.iterable_app:app", "worker", "-c", "1"]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "text": True}
    try:
        with started(argv, end_kindly, cwd=place.folder, env=environ, pass_fds=(lifeline,), **quiet) as process:
            yield process
    finally:
        os.close(lifeline)
        os.close(hold)


def _performed(app: AsyncTask, worker: str, item: dict[str, Any]) -> float:
    """Seconds from the begin of a job until its end."""
    task = app.submit(worker, [item], title="benchmark")
    task.wait(timeout=_LIMIT_S, poll_s=0.05)
    common.audit(app, task.id, finish=1)
    (event,) = task.events()
    began, ended = (datetime.fromisoformat(event[name]) for name in ("started_at", "finished_at"))
    return (ended - began).total_seconds()


def _killed(options: argparse.Namespace) -> dict[str, Any]:
    """What the kills came to."""
    chance = random.Random(options.kill_n)
    with common.place(options) as place, closing(_app(place)) as app:
        book = place.folder / "book.bin"
        task = app.submit("walk", [{"n": options.kill_n, "wait_s": 0.0}], title="killed")
        (event,) = task.events()
        for _ in range(options.kills):
            with _worker(place, book) as process:
                before = _saved(app, event["job_id"])
                if before >= options.kill_n:
                    raise Unaccounted("the job was over before it was killed so often: give a larger --kill-n")
                _await(lambda: _saved(app, event["job_id"]) > before, process)  # noqa: B023 - it is called at once
                at = _size(book) // 8
                until = at + chance.randrange(1, max(2, options.kill_n // (3 * options.kills)))
                _await(lambda: _size(book) // 8 >= until or _saved(app, event["job_id"]) == options.kill_n, process)  # noqa: B023
                process.kill()
                process.wait()
        with _worker(place, book):
            task.wait(timeout=_LIMIT_S, poll_s=0.05)
        common.audit(app, task.id, finish=1)
        attempts = app.event(event["job_id"])["attempt"]
        return _repeated(book, options) | {"kills": options.kills, "kill_n": options.kill_n, "attempts": attempts}


def _saved(app: AsyncTask, job_id: str) -> int:
    """How many elements the ledger knows of. One that died three times before it saved anything would be poison."""
    return int((app.event(job_id)["checkpoint"] or {}).get("items", 0))


def _await(fact: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    clock, pause = SystemClock(), threading.Event()
    limit = clock.monotonic() + _LIMIT_S
    while not fact():
        if clock.monotonic() > limit or process.poll() is not None:
            raise Unaccounted("the worker gets no further")
        pause.wait(0.001)


def _size(book: Path) -> int:
    return book.stat().st_size if book.exists() else 0


def _repeated(book: Path, options: argparse.Namespace) -> dict[str, int]:
    found = array("q")
    with book.open("rb") as file:
        data = file.read()
    found.frombytes(data[: len(data) // 8 * 8])
    if sys.byteorder == "big":
        found.byteswap()
    if set(found) != set(range(options.kill_n)):
        raise Unaccounted(f"{options.kill_n - len(set(found))} elements were never performed")
    steps_back = [before - after + 1 for before, after in pairwise(found) if after <= before]
    return {"repeated": len(found) - options.kill_n, "most_repeated_at_once": max(steps_back, default=0)}


if __name__ == "__main__":
    sys.exit(main())
