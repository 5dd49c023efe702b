"""Jobs on an engine, tracked against untracked: lone ones, sent one by one, and a list.

    python -m benchmarks.engines [-n N] [--engine celery] [--pool threads] [-c N] [--work-ms MS] [--runs R] [--queued]

The engine's own worker command runs first, and waits. Then a program sends N jobs through the engine; the clock runs from
the first send until all are performed and, tracked, recorded. The same without the tracker is the peer. Last, a list of N
items goes the same way as one Task. Tracked and untracked run in turn; the figures are medians. The ``middle`` rates are
those between a tenth of the jobs and nine tenths: without the start, when a list is written and its first jobs are asked
for, and the end.

With ``--queued`` all jobs are sent, or the list is submitted, before the worker starts: a sender that is slower than the
worker would limit it. The figures are then the ``middle`` rates.

Every job writes a byte; a run in which one is missing, or performed twice, or has no finished Event, gives no figure.

A quick look takes -n 1000, a figure -n 5000.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from asynctask import AsyncTask
from asynctask.clock import SystemClock
from benchmarks import common, engines_app
from benchmarks.children import ROOT
from benchmarks.common import Place, Result, Unaccounted
from benchmarks.processes import end_kindly, started
from benchmarks.redis_servers import redis_server

__all__ = ["main"]

ENGINES = ("celery", "dramatiq", "rq")
_LIMIT_S = 600.0
_START_S = 60.0
_QUEUED_CLOCK = "all wait in the queue; from a tenth of them performed to nine tenths"
_WARM = 50
"""Jobs before the clock runs: every thread and child of the worker has performed then."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = common.arguments(__doc__, n=1_000)
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0], help=f"(default {ENGINES[0]})")
    pools = "of Celery: threads (default) or prefork; simple: RQ's worker that does not fork"
    parser.add_argument("--pool", choices=("threads", "prefork", "simple"), default="threads", help=pools)
    parser.add_argument("-c", dest="concurrency", type=int, default=4, help="threads or children (default 4)")
    parser.add_argument("--work-ms", type=float, default=10.0, metavar="MS", help="how long a job waits (default 10)")
    parser.add_argument("--queued", action="store_true", help="send all jobs before the worker starts")
    parser.add_argument("--runs", type=int, default=3, help="runs of each (default 3)")
    return common.run(parser, argv, measure)


@dataclass(frozen=True)
class Run:
    """One run: seconds until all was sent, until all was done, and for the middle 80 %."""

    sent_s: float
    done_s: float
    middle_s: float


def measure(options: argparse.Namespace) -> Result:
    """Runs each side ``--runs`` times in turn."""
    if min(options.runs, options.concurrency) < 1:
        raise common.Refused("--runs and -c must be at least 1")
    if (options.pool == "simple") > (options.engine == "rq"):
        raise common.Refused("--pool simple is a worker of RQ")
    sides: dict[str, tuple[bool, bool]] = {"untracked": (False, False), "lone": (True, False), "list": (True, True)}
    found: dict[str, list[Run]] = {name: [] for name in sides}
    for _ in range(options.runs):
        for name, (tracked, as_list) in sides.items():
            with common.place(options) as place, redis_server(place.folder) as url:
                found[name].append(_run(options, place, url, tracked=tracked, as_list=as_list))
    return _result(options, found)


def _result(options: argparse.Namespace, found: dict[str, list[Run]]) -> Result:
    has_pool = options.engine == "celery" or options.pool == "simple"
    settings: dict[str, Any] = {
        **common.setting(options),
        "engine": f"{options.engine}, {options.pool}" if has_pool else options.engine,
        "broker": "Redis",
        "concurrency": options.concurrency,
        "runs": options.runs,
        "work_ms": options.work_ms,
        "peer": f"the same jobs on {options.engine}, untracked",
        "clock": _QUEUED_CLOCK if options.queued else "from the first send until all are performed and recorded",
    }
    middle = {}
    for name, runs in found.items():
        rates = [0.8 * options.n / run.middle_s if options.queued else options.n / run.done_s for run in runs]
        middle[name] = statistics.median(rates)
        settings[name] = round(middle[name], 1)
        settings |= common.spread(name, rates)
        settings[f"{name}_middle"] = round(statistics.median(0.8 * options.n / run.middle_s for run in runs), 1)
        settings[f"{name}_sent"] = round(statistics.median(options.n / run.sent_s for run in runs))
    ours, peer = middle["lone"], middle["untracked"]
    settings["list_ratio"] = round(middle["list"] / peer, 2)
    settings |= {
        f"{name}_middle_ratio": round(settings[f"{name}_middle"] / settings["untracked_middle"], 2)
        for name in ("lone", "list")
    }
    return Result("engines", options.n, ours, peer, ours / peer, "jobs/s", settings)


def _run(options: argparse.Namespace, place: Place, url: str, *, tracked: bool, as_list: bool) -> Run:
    book = place.folder / "book"
    book.touch()
    words = engines_app.environ(options.engine, url, place.database_url, book, tracked=tracked, work_ms=options.work_ms)
    environ = {**os.environ, **words, "PYTHONPATH": str(ROOT)}
    run = _run_queued if options.queued else _run_sent
    found = run(options, place, environ, as_list=as_list)
    total = options.n if options.queued else _WARM + options.n
    if book.stat().st_size != total:
        raise Unaccounted(f"{book.stat().st_size:,} jobs were performed, {total:,} were sent")
    return found


def _run_sent(options: argparse.Namespace, place: Place, environ: dict[str, str], *, as_list: bool) -> Run:
    """The worker waits for what is sent."""
    book, total, clock = place.folder / "book", _WARM + options.n, SystemClock()
    with ThreadPoolExecutor(1) as beside, _worker(options, place, environ) as worker, _sender(environ, place) as sender:
        sender.ask("send", _WARM)
        _await(lambda: book.stat().st_size >= _WARM, worker, place, _START_S)
        sender.ask("settle", _WARM)
        begun = clock.monotonic()
        middle = beside.submit(_middle, book, options.n, _WARM, worker, place)
        sender.ask("list" if as_list else "send", options.n)
        sent_s = clock.monotonic() - begun
        _await(lambda: book.stat().st_size >= total, worker, place, _LIMIT_S)
        sender.ask("settle", total)
        done_s = clock.monotonic() - begun
        return Run(sent_s, done_s, middle.result())


def _run_queued(options: argparse.Namespace, place: Place, environ: dict[str, str], *, as_list: bool) -> Run:
    """What is sent waits for the worker."""
    book, clock = place.folder / "book", SystemClock()
    with _sender(environ, place) as sender:
        begun = clock.monotonic()
        sender.ask("list" if as_list else "send", options.n)
        sent_s = clock.monotonic() - begun
        with _worker(options, place, environ) as worker:
            middle_s = _middle(book, options.n, 0, worker, place)
            _await(lambda: book.stat().st_size >= options.n, worker, place, _LIMIT_S)
            sender.ask("settle", options.n)
            return Run(sent_s, clock.monotonic() - begun, middle_s)


def _middle(book: Path, n: int, before: int, worker: subprocess.Popen[bytes], place: Place) -> float:
    """Seconds between the end of the first tenth of ``n`` jobs after ``before`` others and that of the ninth."""
    ends = []
    for tenths in (1, 9):
        size = before + n * tenths // 10
        _await(lambda size=size: book.stat().st_size >= size, worker, place, _LIMIT_S)  # type: ignore[misc]
        ends.append(SystemClock().monotonic())
    return ends[1] - ends[0]


# -- processes


@contextmanager
def _worker(options: argparse.Namespace, place: Place, environ: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """The engine's own worker command."""
    count = str(options.concurrency)
    if options.engine == "celery":
        quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat", "-l", "WARNING")
        words = ["-m", "celery", "-A", "benchmarks.engines_app:target", "worker", "-P", options.pool, "-c", count, *quiet]
    elif options.engine == "rq":
        kind = "SimpleWorker" if options.pool == "simple" else "Worker"
        kind = f"asynctask.integrations.rq.Tracked{kind}" if engines_app.TRACKED in environ else f"rq.{kind}"
        words = ["-m", "rq.cli", "worker-pool", "-n", count, "-c", "benchmarks.engines_app", "-S", "json", "-w", kind, "-q"]
    else:
        words = ["-m", "dramatiq", "benchmarks.engines_app:target", "-p", "1", "-t", count]
    with (place.folder / "worker.log").open("w+b") as log:
        how = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
        with started([sys.executable, *words], end_kindly, cwd=place.folder, env=environ, **how) as process:
            yield process


class _Sender:
    """The program that sends: a process of its own, as a web process is beside a worker."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, *words: object) -> None:
        """Returns when it has done so. Raises :class:`Unaccounted` where it could not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(*words, file=self._process.stdin, flush=True)
        if self._process.stdout.readline().strip() != "done":
            raise Unaccounted(f"the sender could not {words[0]}")


@contextmanager
def _sender(environ: dict[str, str], place: Place) -> Iterator[_Sender]:
    how: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with started(
        [sys.executable, "-m", "benchmarks.engines", "sender"], end_kindly, cwd=place.folder, env=environ, **how
    ) as process:
        yield _Sender(process)


def _send_as_asked() -> int:
    """The process of :class:`_Sender`: a line says what to do."""
    _, app, send = engines_app.build()
    if app is not None:
        app.start_services()
    for line in sys.stdin:
        verb, n = line.split()
        if verb == "send":
            send(range(int(n)))
        elif verb == "list" and app is not None:
            app.submit(engines_app.NAME, list(range(int(n))))
        elif app is not None:
            _settled(app, int(n))
        print("done", flush=True)
    if app is not None:
        app.close()
    return 0


def _settled(app: AsyncTask, total: int) -> None:
    """Waits until so many Events are finished, and none is anything else."""
    clock, pause = SystemClock(), threading.Event()
    until = clock.monotonic() + _LIMIT_S
    statement = sa.text("SELECT COUNT(*) FROM events WHERE status = 'finish'")
    while True:
        with app.ledger.database.read() as connection:
            if connection.execute(statement).scalar_one() == total:
                return
        if clock.monotonic() > until:
            raise Unaccounted(f"fewer than {total:,} Events are finished")
        pause.wait(0.01)


def _await(holds: Callable[[], bool], worker: subprocess.Popen[bytes], place: Place, seconds: float) -> None:
    clock, pause = SystemClock(), threading.Event()
    until = clock.monotonic() + seconds
    while not holds():
        if worker.poll() is not None or clock.monotonic() > until:
            last = (place.folder / "worker.log").read_text("utf-8", "replace").splitlines()[-5:]
            raise Unaccounted(f"the worker did not perform everything; its log ends with: {' / '.join(last)}")
        pause.wait(0.005)


if __name__ == "__main__":
    sys.exit(_send_as_asked() if sys.argv[1:] == ["sender"] else main())
