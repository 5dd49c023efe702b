"""Tracked no-op jobs, from just before the submit until the last one is recorded and its Task is done.

    python -m benchmarks.tracked [-n N] [-c THREADS] [--runs R] [--poll] [--commit | --work-ms MS [--compute]]
        [--keys K] [--callbacks] [--interval S] [--tasks T] [--chunk-size N]
        [--server KIND | --database-url URL] [--redis | --broker-url URL] [--json]

This process submits; one worker process, a real one, performs. ``--poll`` adds a web server and one client that asks for
the progress over HTTP every 200 ms; with ``--commit`` each job commits one row of its own, in a SQLite file. Runs of ours
and of the peer alternate; the figures are medians.

The peer is the least that keeps the same promise of a record per job: a loop of one thread over the raw driver, on a table
of the same database, that inserts the same jobs by the thousand and then commits two updates for each, ``working`` and
``finish``. It has no queue, no second process, no messages and no counts.

With ``--redis`` or ``--broker-url`` untracked jobs travel through Redis (tracked ones are borrowed from the ledger all the
same), and on PostgreSQL the peer is the original design: a Sidekiq process whose middleware commits two records of each
job, in Ruby; none where Ruby's parts are not installed. It makes its keys without a prefix: a Redis that is named has to be
empty for it.

With ``--work-ms`` each job waits so long, as for another service (``--compute``: it computes for so much processor time),
and the peer is the same worker process with the same jobs untracked: pushed a thousand at a time, until the last is
acknowledged.

With ``--keys`` the items have so many keys, in turn, and those of one key run one after the other; with ``--callbacks``
each Task has an ``on_complete``; with ``--interval`` a round of 10,000 jobs, the most that one may have, starts so many
seconds after the last start of the one before: they take no less than that and their own time. With any of them the peer is
the same worker process with the same items without it. ``--tasks`` splits the items over so many Tasks.

A quick look takes -n 10000, a figure -n 100000.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import sqlalchemy as sa

from asynctask import AsyncTask
from asynctask.clock import SystemClock
from asynctask.database.tables import events
from asynctask.ledger.gates import MOST_OF_ROUND
from benchmarks import common
from benchmarks.children import Job, RowOfItsOwn, await_address, await_worker, build, check_seen, child
from benchmarks.common import Place, Result, Unaccounted
from benchmarks.one_by_one import one_by_one
from benchmarks.original_design import PACKAGES, THREADS, installed, original_design
from benchmarks.raw import DRIVERS
from benchmarks.redis_servers import Broker

__all__ = ["main"]

POLL_S = 0.2
PEER_N = 5_000
"""The peer's rate does not depend on how many jobs it has; so many give it."""

ORIGINAL_N = 2_000
"""The same of the original design, which takes its time."""

MAX_WORK_MS = 60_000
_LIMIT_S = 3_600.0


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = common.arguments(__doc__, n=10_000)
    parser.add_argument("-c", dest="threads", type=int, default=5, help="threads of the worker process (default 5)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--poll", action="store_true", help="one client polls the progress over HTTP meanwhile")
    parser.add_argument("--commit", action="store_true", help="each job commits one row of its own")
    parser.add_argument(
        "--work-ms", type=float, default=0.0, metavar="MS", help="each job takes so long; the peer is untracked"
    )
    parser.add_argument("--keys", type=int, default=0, metavar="K", help="the items have so many keys; 0: none")
    parser.add_argument("--callbacks", action="store_true", help="each Task has an on_complete")
    parser.add_argument("--interval", type=float, default=0.0, metavar="S", help="seconds between rounds of 10,000 jobs")
    parser.add_argument("--tasks", type=int, default=1, metavar="T", help="Tasks of which the items are (default 1)")
    parser.add_argument("--chunk-size", default=1, metavar="N", help="items of a job, or auto (default 1)")
    parser.add_argument("--compute", action="store_true", help="with --work-ms: it computes instead of waiting")
    return common.run(parser, argv, measure)


def measure(options: argparse.Namespace) -> Result:
    """Runs both sides ``--runs`` times in turn."""
    _check(options)
    ours, polls = [], Polls()
    peer = _peer_of(options)
    for _ in range(options.runs):
        with common.place(options) as place:
            ours.append(options.n / _ours(place, options, polls))
        with common.place(options) as place:
            peer.run(place)
    settings: dict[str, Any] = {
        **common.setting(options),
        "processes": 1,
        "threads": options.threads,
        "runs": options.runs,
        "job": _said(options),
        **{name: value for name in ("keys", "callbacks", "interval") if (value := getattr(options, name))},
        **{name: value for name in ("tasks", "chunk_size") if (value := getattr(options, name)) != 1},
        "poll": f"one HTTP client, every {POLL_S:g} s" if options.poll else "the submitter alone",
        "clock": "from just before submit until the Task is done",
        **common.spread("ours", ours),
        **polls.summary(),
        **peer.facts(),
    }
    middle = statistics.median(ours)
    beside = statistics.median(peer.rates) if peer.rates else None
    return Result("tracked", options.n, middle, beside, middle / beside if beside else None, "items/s", settings)


def _check(options: argparse.Namespace) -> None:
    if options.keys < 0:
        raise common.Refused("--keys must be 0, for none, or how many")
    if options.runs < 1 or options.threads < 1:
        raise common.Refused("--runs and -c must be at least 1")
    if options.interval < 0 or not 1 <= options.tasks <= options.n:
        raise common.Refused("--interval must be 0, for none, or seconds; --tasks from 1 to as many as there are items")
    if _has_knobs(options) and options.work_ms:
        raise common.Refused("--work-ms has another peer than --keys, --callbacks and --interval: give one of them")
    if not 0 <= options.work_ms <= MAX_WORK_MS:
        raise common.Refused(f"--work-ms must be from 0 to {MAX_WORK_MS:,}")
    if options.compute and not options.work_ms:
        raise common.Refused("--compute needs --work-ms: it says how long to compute")
    if options.commit and options.work_ms:
        raise common.Refused("--commit and --work-ms are two different jobs: give one of them")


def _has_knobs(options: argparse.Namespace) -> bool:
    return bool(options.keys or options.callbacks or options.interval)


def _said(options: argparse.Namespace) -> str:
    if options.commit:
        return "commits one row of its own"
    return f"{'computes' if options.compute else 'waits'} for {options.work_ms:g} ms" if options.work_ms else "nothing"


# -- beside it


@dataclass
class Peer:
    """What runs beside ours, in turn with it. ``once``: jobs a second of one run of ``n``, and more for ``settings``."""

    said: str
    kind: str
    n: int
    once: Callable[[Place], tuple[float, dict[str, float]]] | None
    rates: list[float] = field(default_factory=list)
    more: dict[str, float] = field(default_factory=dict)

    def run(self, place: Place) -> None:
        """One run; nothing where there is none."""
        if self.once is not None:
            rate, self.more = self.once(place)
            self.rates.append(rate)

    def facts(self) -> dict[str, Any]:
        """For ``settings``."""
        found = {"peer": self.said, "peer_kind": self.kind, "peer_n": self.n, **self.more}
        return {**found, **common.spread("peer", self.rates)} if self.rates else found


def _peer_of(options: argparse.Namespace) -> Peer:
    if _has_knobs(options):
        alone = argparse.Namespace(**{**vars(options), "poll": False})
        said = "the same worker process, the same items without keys, callbacks and interval"
        return Peer(said, "without", options.n, lambda place: (options.n / _ours(place, alone, Polls(), plain=True), {}))
    if options.work_ms:
        said = "the same worker process, the same jobs untracked: from the first push until the last is acknowledged"
        return Peer(said, "untracked", options.n, lambda place: (options.n / _untracked(place, options), {}))
    if options.broker.redis and options.source.kind == "postgresql" and not options.commit:
        return _original(min(options.n, ORIGINAL_N), options.broker)
    n = min(options.n, PEER_N)
    own = ", and its own row" if options.commit else ""
    driver = DRIVERS[options.source.kind]
    said = f"one thread, raw {driver}: {n:,} jobs inserted by the thousand, two commits for each{own}"
    return Peer(said, "raw", n, lambda place: (n / one_by_one(place, n, options.commit), {}))


def _original(n: int, broker: Broker) -> Peer:
    if not installed():
        return Peer(f"none: the original design needs {PACKAGES}", "none", 0, None)
    if not broker.empty():
        return Peer("none: the original design makes keys without a prefix, and this Redis is not empty", "none", 0, None)

    def once(place: Place) -> tuple[float, dict[str, float]]:
        rate, submitted = original_design(place, n)
        return rate, {"peer_submitted_per_s": round(submitted, 1)}

    said = f"the original design: one Sidekiq process, {THREADS} threads, {n:,} jobs, from the first record to the last"
    return Peer(said, "original", n, once)


# -- ours


def _ours(place: Place, options: argparse.Namespace, polls: Polls, *, plain: bool = False) -> float:
    job = _job(place, options, tracked=True)
    clock = SystemClock()
    with closing(build(place, job)) as app, ExitStack() as stack:
        worker = stack.enter_context(child("worker", place, "-c", str(options.threads), *job.words()))
        await_worker(app, worker)
        address = await_address(stack.enter_context(child("web", place))) if options.poll else None
        begun = clock.monotonic()
        with polls.every(address):
            tasks = [app.submit("job", items, title="benchmark", **more) for items, more in _lists(options, plain)]
            polls.task_id = tasks[0].id
            done = [task.wait(timeout=_LIMIT_S, poll_s=0.05) for task in tasks]
        seconds = clock.monotonic() - begun
        for progress, size in zip(done, _sizes(options), strict=True):
            if progress["counts"]["finish"] != size or progress["state_reason"] == "callback_failed":
                raise Unaccounted(
                    f"a Task is not done after {_LIMIT_S:g} s, lacks items, or its callback failed: {progress}"
                )
        common.audit(app, tasks[0].id, finish=_sizes(options)[0])
        if job.commit_to and RowOfItsOwn(job.commit_to).rows() != (options.n, options.n):
            raise Unaccounted("the rows of the jobs' own are not one for each item")
    check_seen(job, options.n)
    return seconds


def _sizes(options: argparse.Namespace) -> list[int]:
    """How many items each Task has."""
    least, more = divmod(options.n, options.tasks)
    return [least + (i < more) for i in range(options.tasks)]


def _lists(options: argparse.Namespace, plain: bool) -> Iterator[tuple[Iterator[dict[str, int]], dict[str, Any]]]:
    """The items of each Task, and what it is submitted with. Keys come in turn, so that two of one key are as far from each
    other as there are keys."""
    more: dict[str, Any] = {} if options.keys else {"chunk_size": options.chunk_size}
    if not plain:
        more |= {"key": "key"} if options.keys else {}
        more |= {"on_complete": "called"} if options.callbacks else {}
        more |= {"interval": options.interval, "parallel": MOST_OF_ROUND} if options.interval else {}
    start = 0
    for size in _sizes(options):
        of = range(start, start + size)
        yield ({"n": i, "key": i % options.keys} if options.keys else {"n": i} for i in of), more
        start += size


def _job(place: Place, options: argparse.Namespace, *, tracked: bool) -> Job:
    commit_to = place.folder / "own.db" if options.commit else None
    seen = place.folder / "seen.json" if options.work_ms else None
    return Job(commit_to, options.work_ms, options.compute, seen, tracked)


# -- the same jobs, untracked


def _untracked(place: Place, options: argparse.Namespace) -> float:
    job = _job(place, options, tracked=False)
    clock, pause = SystemClock(), threading.Event()
    with closing(build(place, job)) as app, ExitStack() as stack:
        process = stack.enter_context(child("worker", place, "-c", str(options.threads), *job.words()))
        await_worker(app, process)
        worker = app.workers["job"]
        begun = clock.monotonic()
        for start in range(0, options.n, 1_000):
            worker.perform_bulk([{"n": i} for i in range(start, min(options.n, start + 1_000))])
        while _anything_left(app, place):
            if process.poll() is not None or clock.monotonic() - begun > _LIMIT_S:
                raise Unaccounted("the worker process did not perform every untracked job")
            pause.wait(0.05)
        seconds = clock.monotonic() - begun
    check_seen(job, options.n)
    return seconds


def _anything_left(app: AsyncTask, place: Place) -> bool:
    if place.redis is not None:
        return any(place.redis.keys(pattern) for pattern in ("queue:*", "asynctask:fetched:*"))
    with app.ledger.database.read() as connection:
        waiting = sa.select(events.c.id).where(events.c["items"] == 0, events.c.status != "error")
        return connection.execute(waiting.limit(1)).first() is not None


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


if __name__ == "__main__":
    sys.exit(main())
