"""Rounds of a Task with an interval, while the processes that begin them are killed: never too soon, and how late.

    python -m benchmarks.rounds [-n N] [--interval S] [--parallel P] [--processes W] [--deaths D]
        [--server KIND | --database-url URL] [--redis | --broker-url URL] [--json]

One Task of jobs that do nothing, ``--parallel`` at a time, every ``--interval`` seconds, over ``--processes`` worker
processes. ``--deaths`` of them are killed -9 on the way, spread over the rounds: each time one that has borrowed jobs of
the Task, or if none has, any. The starts are those of the Events, by the time of the database. A round is too soon where a
job starts less than the interval after the ``--parallel``-th start before it; the figure is by how much the rounds come
later than the interval on average, in percent, and the peer is what is allowed.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from itertools import pairwise
from typing import Any, Final

import sqlalchemy as sa

from asynctask import AsyncTask
from asynctask.clock import SECOND, SystemClock
from asynctask.database.tables import events, loans
from benchmarks import common
from benchmarks.children import Job, await_worker, build, child
from benchmarks.common import Place, Result, Unaccounted

ALLOWED_PERCENT: Final = 5.0
_LIMIT_S = 600.0


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = common.arguments(__doc__, n=200)
    parser.add_argument("--interval", type=float, default=0.5, metavar="S", help="seconds between rounds (default 0.5)")
    parser.add_argument("--parallel", type=int, default=3, help="jobs of a round (default 3)")
    parser.add_argument("--processes", type=int, default=10, help="worker processes of one thread (default 10)")
    parser.add_argument("--deaths", type=int, default=3, help="of them are killed (default 3)")
    return common.run(parser, argv, measure)


def measure(options: argparse.Namespace) -> Result:
    """One Task, and what its starts say."""
    if not 0.05 <= options.interval <= 60 or options.parallel < 1 or not 0 <= options.deaths < options.processes <= 50:
        raise common.Refused("--interval must be from 0.05 to 60, --parallel at least 1, --deaths fewer than --processes")
    with common.place(options) as place:
        starts = _starts(place, options)
    soon, late = judge(starts, options.interval, options.parallel)
    if soon:
        raise Unaccounted(f"{len(soon)} starts too soon, by {max(soon):.4f} s at most")
    settings: dict[str, Any] = {
        **common.setting(options),
        "processes": options.processes,
        "deaths": options.deaths,
        "interval_s": options.interval,
        "parallel": options.parallel,
        "too_soon": 0,
        "latest_round_s": round(max(late), 3),
        "median_round_s": round(statistics.median(late), 4),
    }
    average = 100 * statistics.fmean(late) / options.interval
    return Result("rounds", options.n, average, ALLOWED_PERCENT, average / ALLOWED_PERCENT, "% late", settings)


def judge(starts: Sequence[float], interval: float, parallel: int) -> tuple[list[float], list[float]]:
    """By how many seconds each start is too soon, of those that are; and by how many each round is late."""
    gaps = [later - sooner for sooner, later in zip(starts, starts[parallel:], strict=False)]
    soon = [interval - gap for gap in gaps if gap < interval - 1 / SECOND]
    rounds = starts[::parallel]
    return soon, [max(0.0, later - sooner - interval) for sooner, later in pairwise(rounds)]


def _starts(place: Place, options: argparse.Namespace) -> list[float]:
    """When each job started, in seconds, in order."""
    with closing(build(place, Job())) as app, ExitStack() as stack:
        workers = {}
        for number in range(options.processes):
            process = stack.enter_context(child("worker", place, "-c", "1", may_die=True))
            await_worker(app, process, number + 1)
            workers[process.pid] = process
        task = app.submit("job", ({"n": i} for i in range(options.n)), interval=options.interval, parallel=options.parallel)
        for death in range(options.deaths):
            _await(lambda at=options.n * (death + 1) // (options.deaths + 1): task.progress()["counts"]["finish"] >= at)
            _kill(app, task.id, workers)
        task.wait(timeout=_LIMIT_S, poll_s=0.2)
        common.audit(app, task.id, finish=options.n)
        with app.ledger.database.read() as connection:
            found = connection.scalars(sa.select(events.c.started_at).where(events.c.task_id == task.id))
            return sorted(int(at) / SECOND for at in found)


def _kill(app: AsyncTask, task_id: int, workers: dict[int, subprocess.Popen[str]]) -> None:
    """Kills a process that has borrowed jobs of the Task, or any."""
    with app.ledger.database.read() as connection:
        held = sa.select(loans.c.process).where(loans.c.task_id == task_id, loans.c.process.is_not(None))
        holders = [str(identity) for identity in connection.scalars(held)]
    pids = {each["identity"]: each["pid"] for each in app.processes()}
    for identity in (*holders, *pids):
        if (process := workers.pop(pids.get(identity, 0), None)) is not None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            return


def _await(holds: Any) -> None:
    clock, pause = SystemClock(), threading.Event()
    until = clock.monotonic() + _LIMIT_S
    while not holds():
        if clock.monotonic() > until:
            raise Unaccounted(f"not there after {_LIMIT_S:g} s")
        pause.wait(0.05)


if __name__ == "__main__":
    sys.exit(main())
