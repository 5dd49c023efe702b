"""Many people before many Tasks: how long a poll takes while a worker performs them, and beside open streams.

    python -m benchmarks.audience [-n TASKS] [--items I] [--polls P] [--streams S] [--seconds S] [--work-ms MS] [-c THREADS]
        [--server KIND | --database-url URL] [--redis | --broker-url URL] [--json]

One web server and one worker process, both real ones. The worker performs ``-n`` Tasks of I items; each job waits
``--work-ms``, or does nothing, which leaves the least of the processors to the others. P clients, each on a connection
that it keeps, poll one Task each, once a second, with the ETag of their last answer, as ``asynctask.js`` does. A client
that waits for an answer sends no second request. The first 3 s of a round do not count. ``ours`` is the 99th percentile
of these polls, and the peer the same beside S streams. ``ratio`` is ours to peer; 0.5 or more says that streams do not
double it. There is a figure only if no stream was cut, if the polls were as many as they should be (within 5 %), and if
the counts of each Task add up to its items.

A quick look takes -n 50 --items 200 --polls 50 --streams 50 --seconds 5.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from asynctask.clock import SystemClock
from benchmarks import common
from benchmarks.children import Job, await_address, await_worker, build, child
from benchmarks.common import Result, Unaccounted
from benchmarks.polling import AT_ONCE, MOST_CLIENTS, ask, figures, many_connections

__all__ = ["main"]

EVERY_S = 1.0
WARM_UP_S = 3.0
_LIMIT_S = 600.0
_ENOUGH = 0.95


class Seen(NamedTuple):
    """What the clients of one round saw: milliseconds of each poll, polls that had news, events of streams."""

    waited: list[float]
    news: int
    events: int


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = common.arguments(__doc__, n=1_000)
    parser.add_argument("--items", type=int, default=1_000, metavar="I", help="items of each Task (default 1000)")
    parser.add_argument("--polls", type=int, default=500, metavar="P", help="polls a second (default 500)")
    parser.add_argument("--streams", type=int, default=1_000, metavar="S", help="streams (default 1000)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of the two rounds (default 20)")
    parser.add_argument("--work-ms", type=float, default=0.0, metavar="MS", help="for which a job waits (default 0)")
    parser.add_argument("-c", dest="threads", type=int, default=10, metavar="THREADS", help="of the worker (default 10)")
    return common.run(parser, argv, measure)


def measure(options: argparse.Namespace) -> Result:
    """Polls the Tasks while they run, first without streams, then beside them."""
    if not 1 <= options.polls <= MOST_CLIENTS - options.streams or options.streams < 0:
        raise common.Refused(f"--polls must be at least 1, and --polls and --streams at most {MOST_CLIENTS:,} together")
    if options.seconds < EVERY_S or options.items < 1:
        raise common.Refused(f"--seconds must be at least {EVERY_S:g}, and --items at least 1")
    job = Job(work_ms=options.work_ms)
    with common.place(options) as place, closing(build(place, job)) as app:
        app.ensure_schema()
        items = [{"n": number} for number in range(options.items)]
        made = [app.submit("job", items) for _ in range(options.n)]
        with child("web", place) as web, child("worker", place, "-c", str(options.threads), *job.words()) as worker:
            address = await_address(web)
            await_worker(app, worker)
            rounds = [_round(address, [task.id for task in made], options, streams) for streams in (0, options.streams)]
        counts = [task.progress()["counts"] for task in made]
    ended = sum(each["finish"] for each in counts)
    if any(each["total"] != options.items or sum(each.values()) != 2 * options.items for each in counts):
        raise Unaccounted("the counts of a Task do not add up to its items")
    if not 0 < ended < options.n * options.items:
        raise Unaccounted(f"the worker was not at work all the time: {ended:,} items are done")
    alone, beside = rounds
    settings: dict[str, Any] = {
        **common.setting(options),
        **{name: getattr(options, name) for name in ("items", "polls", "streams", "seconds", "work_ms", "threads")},
        **figures("alone", alone.waited),
        **figures("beside", beside.waited),
        "polled_per_s": round(len(alone.waited) / options.seconds, 1),
        "polled_per_s_beside": round(len(beside.waited) / options.seconds, 1),
        "with_news": alone.news,
        "events_per_s": round(beside.events / options.seconds, 1),
        "performed": ended,
        "ours_is": "the 99th percentile of a poll beside the worker",
        "peer": "the same beside the streams",
        "ratio_is": "ours to peer",
    }
    ours, peer = settings["alone_p99_ms"], settings["beside_p99_ms"]
    return Result("audience", options.n, ours, peer, ours / peer, "ms", settings)


def _round(address: str, task_ids: list[int], options: argparse.Namespace, streams: int) -> Seen:
    """One round, by a process of its own: the clients are not to wait for what else this one does."""
    ours, theirs = multiprocessing.Pipe()
    words = (address, task_ids, options.polls, streams, options.seconds, theirs)
    process = multiprocessing.get_context("spawn").Process(target=watch, args=words, daemon=True)
    process.start()
    theirs.close()
    try:
        answer = ours.recv() if ours.poll(_LIMIT_S) else "the clients say nothing"
    except EOFError:
        answer = "the process of the clients died"
    finally:
        process.kill()
        process.join()
    if isinstance(answer, str):
        raise Unaccounted(answer)
    seen = Seen(*answer)
    if len(seen.waited) < _ENOUGH * options.polls * options.seconds / EVERY_S:
        raise Unaccounted(f"only {len(seen.waited):,} polls were answered in {options.seconds:g} s")
    return seen


def watch(address: str, task_ids: list[int], polls: int, streams: int, seconds: float, pipe: Connection) -> None:
    """The process of the clients: sends the values of :class:`Seen`, or what was wrong."""
    many_connections(polls + streams)
    try:
        pipe.send(tuple(asyncio.run(_watch(_Clients(address), task_ids, polls, streams, seconds))))
    except (OSError, EOFError, Unaccounted) as error:
        pipe.send(str(error) or repr(error))


async def _watch(clients: _Clients, task_ids: list[int], polls: int, streams: int, seconds: float) -> Seen:
    opened = [asyncio.Event() for _ in range(streams)]
    held = [asyncio.create_task(clients.stream(task_ids[i % len(task_ids)], each)) for i, each in enumerate(opened)]
    for each in opened:
        await each.wait()
        _raise_ended(held)
    clients.events = 0
    begun = asyncio.get_running_loop().time() + EVERY_S
    counted = begun + WARM_UP_S
    turns = ((task_ids[i * len(task_ids) // polls], begun + i * EVERY_S / polls) for i in range(polls))
    await asyncio.gather(*(clients.poll(task_id, first, counted, counted + seconds) for task_id, first in turns))
    _raise_ended(held)
    for stream in held:
        stream.cancel()
    return Seen(clients.waited, clients.news, clients.events)


def _raise_ended(streams: list[asyncio.Task[None]]) -> None:
    for each in streams:
        if each.done():
            each.result()


class _Clients:
    """All clients of a round, and what they have seen."""

    def __init__(self, address: str) -> None:
        place = urlsplit(address)
        self._host, self._port = str(place.hostname), place.port
        self._making = asyncio.Semaphore(AT_ONCE)
        self.waited: list[float] = []
        self.news = 0
        self.events = 0

    async def poll(self, task_id: int, due: float, counted: float, until: float) -> None:
        """Polls once in :data:`EVERY_S`; the times are those of the event loop."""
        clock, reader, writer = SystemClock(), *await self._connect()
        etag = b""
        while due < until:
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            begun = clock.monotonic()
            status, headers = await ask(reader, writer, f"/api/tasks/{task_id}", etag)
            await reader.readexactly(int(headers.get(b"content-length", 0)) if status == b"200" else 0)
            if due >= counted:
                self.waited.append((clock.monotonic() - begun) * 1e3)
                self.news += status == b"200"
            etag = headers[b"etag"]
            due = max(due + EVERY_S, asyncio.get_running_loop().time())
        writer.close()

    async def stream(self, task_id: int, opened: asyncio.Event) -> None:
        """Holds a stream until its Task has ended. Raises :class:`Unaccounted` if it is cut before."""
        try:
            reader, writer = await self._connect()
            await ask(reader, writer, f"/api/tasks/{task_id}/stream")
            last = b""
            while (line := await reader.readline()) != b"0\r\n":  # the last chunk
                if not line:
                    raise Unaccounted(f"the stream of Task {task_id} was cut")
                if line.startswith(b"data: "):
                    last = line
                    self.events += 1
                    opened.set()
            if b'"done":true' not in last.replace(b" ", b""):
                raise Unaccounted(f"the stream of Task {task_id} ended before its Task")
            with suppress(OSError):
                writer.close()
        finally:
            opened.set()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with self._making:
            return await asyncio.open_connection(self._host, self._port)


if __name__ == "__main__":
    sys.exit(main())
