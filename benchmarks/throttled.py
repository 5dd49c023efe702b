"""Tasks with a ``parallel``: how much of the rate that the limit allows is reached.

    python -m benchmarks.throttled [-n N] [--parallel P,...] [--workers W,...] [--work-ms MS] [--runs R]
        [--server KIND | --database-url URL] [--redis | --broker-url URL] [--json]

For each number of worker processes and each ``parallel`` one Task is performed, of jobs that wait ``--work-ms``
milliseconds (0: they do nothing), from just before the submit until the Task is done. Every process has as many threads
as the largest ``parallel``, so the limit is what holds the jobs back. With ``--work-ms`` the peer is one process with
just ``parallel`` threads and a Task without a limit: what the machine can do with that many jobs at a time. Runs of ours
and of the peer alternate; the figures are medians, and the first one is of the first ``--workers`` and ``--parallel``.

``-n`` is for a ``parallel`` of 1: a Task with another has that many times as many items, at least 200 and at most 40,000.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any

from asynctask.clock import SystemClock
from benchmarks import common
from benchmarks.children import Job, await_worker, build, child
from benchmarks.common import Place, Result

__all__ = ["main"]

_LIMIT_S = 600.0


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = common.arguments(__doc__, n=200)
    parser.add_argument("--parallel", type=_numbers(1_000), default=(1, 5), help="limits (default 1,5)")
    parser.add_argument("--workers", type=_numbers(16), default=(1, 3), help="worker processes (default 1,3)")
    parser.add_argument("--work-ms", type=float, default=0.0, metavar="MS", help="each job waits so long (default 0)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each (default 3)")
    return common.run(parser, argv, measure)


def _numbers(most: int) -> Callable[[str], tuple[int, ...]]:
    def parse(text: str) -> tuple[int, ...]:
        try:
            numbers = tuple(int(word) for word in text.split(","))
        except ValueError:
            numbers = ()
        if not numbers or not all(1 <= number <= most for number in numbers):
            raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers from 1 to {most:,}, separated by commas")
        return numbers

    return parse


def measure(options: argparse.Namespace) -> Result:
    """Runs each limit with each number of processes, and the peer, ``--runs`` times in turn."""
    if options.runs < 1:
        raise common.Refused("--runs must be at least 1")
    if not 0 <= options.work_ms <= 60_000:
        raise common.Refused("--work-ms must be from 0 to 60,000")
    job = Job(None, options.work_ms)
    rates: dict[tuple[int, int], list[float]] = {}
    for _ in range(options.runs):
        for parallel in options.parallel:
            for workers in (*options.workers, *((0,) if options.work_ms else ())):
                rates.setdefault((workers, parallel), []).append(_rate(options, job, workers, parallel))
    middle = {key: statistics.median(found) for key, found in rates.items()}
    settings: dict[str, Any] = {
        **common.setting(options),
        "runs": options.runs,
        "threads": max(options.parallel),
        "job": f"waits for {options.work_ms:g} ms" if options.work_ms else "nothing",
        "clock": "from just before submit until the Task is done",
    }
    if options.work_ms:
        settings["peer"] = "one process with `parallel` threads, the same jobs in a Task without a limit"
    for (workers, parallel), rate in middle.items():
        name = f"of_{parallel}_with_{workers}" if workers else f"possible_{parallel}"
        settings[name] = round(rate, 1)
        if workers and options.work_ms:
            settings[f"part_of_{parallel}_with_{workers}"] = round(rate / middle[0, parallel], 3)
    first = options.parallel[0]
    ours, peer = middle[options.workers[0], first], middle.get((0, first))
    return Result("throttled", options.n, ours, peer, ours / peer if peer else None, "items/s", settings)


def _rate(options: argparse.Namespace, job: Job, workers: int, parallel: int) -> float:
    """Items a second of one Task; with 0 ``workers`` those of the peer."""
    n = min(max(200, options.n * parallel), 40_000)
    threads = max(options.parallel) if workers else parallel
    with common.place(options) as place:
        return float(n / _seconds(place, job, n, workers, threads, parallel))


def _seconds(place: Place, job: Job, n: int, workers: int, threads: int, parallel: int) -> float:
    clock = SystemClock()
    with closing(build(place, job)) as app, ExitStack() as stack:
        for number in range(workers or 1):
            process = stack.enter_context(child("worker", place, "-c", str(threads), *job.words()))
            await_worker(app, process, number + 1)
        limit: dict[str, Any] = {"parallel": parallel} if workers else {}
        begun = clock.monotonic()
        task = app.submit("job", ({"n": i} for i in range(n)), title="benchmark", **limit)
        task.wait(timeout=_LIMIT_S, poll_s=0.05)
        seconds = clock.monotonic() - begun
        common.audit(app, task.id, finish=n)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
