"""Tasks of one item each, sent over HTTP by several clients at once, until the last of them is finished.

    python -m benchmarks.small [-n N] [--clients C] [-c THREADS] [--server KIND | --database-url URL]
        [--redis | --broker-url URL] [--json]

One web server and one worker process, both real ones. Each client keeps one connection and sends one ``POST /api/tasks``
after the other, as fast as it is answered. ``ours`` is N over the seconds from the first request until every Task is
finished; ``posted_per_s`` of ``settings`` counts until the last answer. ``web_ms`` and ``worker_ms`` are the processor time
of these processes for each Task; ``submit_ms`` is that of one ``app.submit`` of one item, in a program that does nothing
else, beside the same worker. ``uploads_left`` are files in the folder of uploads at the end. No peer is run: nothing else
that stands beside us records a list of one item as a Task.

A quick look takes -n 1000, a figure -n 20000.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import sqlalchemy as sa

from asynctask import AsyncTask
from asynctask.clock import SystemClock
from asynctask.database.tables import events, tasks
from benchmarks import common
from benchmarks.children import Job, await_address, await_worker, build, check_seen, child
from benchmarks.common import Result, Unaccounted

__all__ = ["main"]

MOST_CLIENTS = 100
SUBMITS = 200
"""Calls of ``app.submit`` whose processor time is taken, at most."""

_LIMIT_S = 3_600.0
_TICK_MS = 1_000 / os.sysconf("SC_CLK_TCK")


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = common.arguments(__doc__, n=1_000)
    parser.add_argument("--clients", type=int, default=8, help="clients that send at once (default 8)")
    parser.add_argument("-c", dest="threads", type=int, default=5, help="threads of the worker process (default 5)")
    return common.run(parser, argv, measure)


def measure(options: argparse.Namespace) -> Result:
    """Sends the Tasks and waits for the last."""
    if not 1 <= options.clients <= MOST_CLIENTS or options.threads < 1:
        raise common.Refused(f"--clients must be from 1 to {MOST_CLIENTS}, and -c at least 1")
    with common.place(options) as place:
        job = Job(seen=place.folder / "seen.json")
        with closing(build(place, job)) as app, ExitStack() as stack:
            app.ensure_schema()
            worker = stack.enter_context(child("worker", place, "-c", str(options.threads), *job.words()))
            web = stack.enter_context(child("web", place))
            address = await_address(web)
            await_worker(app, worker)
            before = _processor_ms(web.pid), _processor_ms(worker.pid)
            clients = Clients(address, options.clients)
            begun = app.clock.monotonic()
            posted_s = clients.send(options.n)
            _await_finished(app, options.n)
            seconds = app.clock.monotonic() - begun
            after = _processor_ms(web.pid), _processor_ms(worker.pid)
            left = _files(place.data_dir / "uploads")
            submits = min(options.n, SUBMITS)
            submit_ms = _submit_ms(app, options.n, submits)
            _await_finished(app, options.n + submits)
            _audit(app, options.n + submits)
        check_seen(job, options.n + submits)
    settings: dict[str, Any] = {
        **common.setting(options),
        "clients": options.clients,
        "processes": 1,
        "threads": options.threads,
        "posted_per_s": round(options.n / posted_s, 1),
        "answer_median_ms": round(sorted(clients.seconds)[options.n // 2] * 1e3, 2),
        "answer_p95_ms": round(common.p95(clients.seconds) * 1e3, 2),
        "web_ms": round((after[0] - before[0]) / options.n, 3),
        "worker_ms": round((after[1] - before[1]) / options.n, 3),
        "submit_ms": round(submit_ms, 3),
        "uploads_left": left,
        "clock": "from the first POST until the last Task is finished",
    }
    return Result("small", options.n, options.n / seconds, None, None, "Tasks/s", settings)


class Clients:
    """Clients that send one Task after the other, each over a connection of its own that it keeps."""

    def __init__(self, address: str, count: int) -> None:
        self._address = urlsplit(address)
        self._count = count
        self._lock = threading.Lock()
        self.seconds: list[float] = []
        self._failure = ""

    def send(self, n: int) -> float:
        """Sends ``n`` Tasks. Returns the seconds until the last answer. Raises :class:`Unaccounted`."""
        clock, numbers = SystemClock(), iter(range(n))
        threads = [threading.Thread(target=self._run, args=(numbers,)) for _ in range(self._count)]
        begun = clock.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure:
            raise Unaccounted(f"a POST failed: {self._failure}")
        return clock.monotonic() - begun

    def _run(self, numbers: Iterator[int]) -> None:
        clock, seconds = SystemClock(), []
        connection = http.client.HTTPConnection(str(self._address.hostname), self._address.port, timeout=60)
        try:
            while not self._failure and (number := self._next(numbers)) is not None:
                body = json.dumps({"worker": "job", "items": [{"n": number}]})
                begun = clock.monotonic()
                connection.request("POST", "/api/tasks", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                said = answer.read()
                seconds.append(clock.monotonic() - begun)
                if answer.status != http.client.ACCEPTED:
                    self._failure = f"{answer.status} {said[:300]!r}"
        except (OSError, http.client.HTTPException) as error:
            self._failure = repr(error)
        finally:
            connection.close()
            with self._lock:
                self.seconds += seconds

    def _next(self, numbers: Iterator[int]) -> int | None:
        with self._lock:
            return next(numbers, None)


def _await_finished(app: AsyncTask, n: int) -> None:
    clock, pause = SystemClock(), threading.Event()
    until = clock.monotonic() + _LIMIT_S
    finished = sa.select(sa.func.count()).where(tasks.c.state == "finished")
    while True:
        with app.ledger.database.read() as connection:
            if int(connection.execute(finished).scalar_one()) >= n:
                return
        if clock.monotonic() > until:
            raise Unaccounted(f"not every Task is finished after {_LIMIT_S:g} s")
        pause.wait(0.1)


def _audit(app: AsyncTask, n: int) -> None:
    """Raises :class:`Unaccounted` unless there are ``n`` Tasks, each with one Event, which is finished."""
    ended = sa.func.count(sa.case((events.c.status == "finish", 1)))
    by_rows = sa.select(sa.func.count(), sa.func.count(events.c.task_id.distinct()), ended)
    with app.ledger.database.read() as connection:
        count = connection.execute(sa.select(sa.func.count()).select_from(tasks)).scalar_one()
        found = (int(count), *map(int, connection.execute(by_rows).one()))
    if found != (n, n, n, n):
        raise Unaccounted(f"Tasks, Events, Tasks that have one, finished Events: {found}, expected {n} of each")
    if findings := app.doctor():
        raise Unaccounted("; ".join(f"{each.code}: {each.message}" for each in findings))


def _submit_ms(app: AsyncTask, first: int, count: int) -> float:
    """The processor time of one ``app.submit`` of one item, in this process."""
    app.submit("job", [{"n": first}])
    begun = time.process_time()
    for number in range(first + 1, first + count):
        app.submit("job", [{"n": number}])
    return (time.process_time() - begun) / max(1, count - 1) * 1e3


def _processor_ms(leader: int) -> float:
    """What the processes of one session have used of processors."""
    spent = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader:
            spent += (int(fields[11]) + int(fields[12])) * _TICK_MS
    return spent


def _files(folder: Path) -> int:
    return sum(1 for each in folder.iterdir() if each.is_file()) if folder.is_dir() else 0


if __name__ == "__main__":
    sys.exit(main())
