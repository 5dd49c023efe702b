"""Many clients that follow Tasks: what they cost the others, and whether each hears of the end.

    python -m benchmarks.followers [-n STREAMS] [--polls P] [--tasks T] [--seconds S] [--server KIND | --database-url URL]
        [--redis | --broker-url URL] [--json]

One web server and one worker process, both real ones. T Tasks run for S seconds, a job of half a second after the other in
each, so that each changes four times a second. ``-n`` clients hold a stream each, and P a long poll that they ask for again
after each answer. Eight clients poll the same Tasks, each poll on a connection of its own. ``ours`` is the 99th percentile
of these polls; the peer is the same without followers, while as many other Tasks run. ``ratio`` is ours to peer: less is
better. There is a figure only if every stream and every long poll has the last version of its Task, and every stream was
ended by the server.

A quick look takes -n 100 --polls 50 --tasks 5 --seconds 5.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
from collections.abc import Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from asynctask import AsyncTask
from asynctask.clock import SystemClock
from benchmarks import common
from benchmarks.children import Job, await_address, await_worker, build, child
from benchmarks.common import Place, Result, Unaccounted
from benchmarks.memory import server_peak_mb
from benchmarks.polling import AT_ONCE, MOST_CLIENTS, ask, figures, many_connections, polled

__all__ = ["main"]

WORK_S = 0.5
MOST_TASKS = 200
_WAIT_S = 20
_LIMIT_S = 600.0


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = common.arguments(__doc__, n=1_000)
    parser.add_argument("--polls", type=int, default=500, metavar="P", help="long polls (default 500)")
    parser.add_argument("--tasks", type=int, default=50, metavar="T", help="Tasks (default 50)")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="for which they run (default 20)")
    return common.run(parser, argv, measure)


def measure(options: argparse.Namespace) -> Result:
    """Runs the Tasks without followers, then as many with them."""
    if options.polls < 0 or options.n + options.polls > MOST_CLIENTS:
        raise common.Refused(f"-n and --polls must be at most {MOST_CLIENTS:,} together")
    if not 1 <= options.tasks <= MOST_TASKS or options.seconds < WORK_S:
        raise common.Refused(f"--tasks must be from 1 to {MOST_TASKS}, and --seconds at least {WORK_S:g}")
    with common.place(options) as place, closing(build(place, Job())) as app:
        app.ensure_schema()
        with child("web", place) as web:
            address = await_address(web)
            alone = _run(place, app, address, options)
            before = server_peak_mb(web.pid)
            with _Followers(address, options) as followers:
                beside = _run(place, app, address, options, followers)
            seen = followers.result()
            peak = server_peak_mb(web.pid)
    settings: dict[str, Any] = {
        **common.setting(options),
        "streams": options.n,
        "long_polls": options.polls,
        "tasks": options.tasks,
        "seconds": options.seconds,
        "events": seen.events,
        "long_poll_answers": seen.answers,
        "delivered_per_s": round((seen.events + seen.answers) / seen.seconds, 1),
        **figures("alone", alone),
        **figures("beside", beside),
        "web_peak_mb_alone": before,
        "web_peak_mb": peak,
        "ours_is": "the 99th percentile of a poll beside the followers",
        "peer": "the same polls without followers",
        "ratio_is": "ours to peer: less is better",
    }
    ours, peer = settings["beside_p99_ms"], settings["alone_p99_ms"]
    return Result("followers", options.n, ours, peer, ours / peer, "ms", settings)


def _run(
    place: Place, app: AsyncTask, address: str, options: argparse.Namespace, followers: _Followers | None = None
) -> list[float]:
    """Runs the Tasks to their end, perhaps followed; returns the milliseconds of the polls meanwhile."""
    items = [{"n": number} for number in range(round(options.seconds / WORK_S))]
    made = [app.submit("job", items, parallel=1) for _ in range(options.tasks)]
    if followers is not None:
        followers.begin([task.id for task in made])
    job = Job(work_ms=WORK_S * 1e3)
    with child("worker", place, "-c", str(options.tasks), *job.words()) as worker:
        await_worker(app, worker)
        with polled(address, [f"/api/tasks/{task.id}" for task in made]) as waited:
            for task in made:
                task.wait(timeout=_LIMIT_S)
            if followers is not None:
                followers.end({task.id: task.progress()["version"] for task in made})
    for task in made:
        common.audit(app, task.id, finish=len(items))
    return waited


# -- the followers, in a process of their own: they would hold up the clients that are measured


class Seen(NamedTuple):
    """What the followers got: events of streams, answers to long polls, in so many seconds."""

    events: int
    answers: int
    seconds: float


class _Followers:
    """The process of the followers; it has ended when the block has."""

    def __init__(self, address: str, options: argparse.Namespace) -> None:
        self._ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=follow, args=(address, options.n, options.polls, theirs), daemon=True)
        self._seen: Seen | None = None

    def __enter__(self) -> _Followers:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._ours.close()

    def begin(self, task_ids: list[int]) -> None:
        """Has them follow these Tasks; returns when each has the first object of its Task."""
        self._ours.send(task_ids)
        self._answer()

    def end(self, versions: dict[int, int]) -> None:
        """Waits until every follower has ended, and compares what it saw with the last ``versions``."""
        self._ours.send(versions)
        self._seen = Seen(*self._answer())

    def result(self) -> Seen:
        """What they saw, after :meth:`end`."""
        assert self._seen is not None
        return self._seen

    def _answer(self) -> Any:
        if not self._ours.poll(_LIMIT_S):
            raise Unaccounted(f"the followers say nothing for {_LIMIT_S:g} s")
        try:
            answer = self._ours.recv()
        except EOFError:
            raise Unaccounted("the process of the followers died") from None
        if isinstance(answer, str):
            raise Unaccounted(answer)
        return answer


def follow(address: str, streams: int, polls: int, pipe: Connection) -> None:
    """The process: sends None when every follower has its first object, then the values of
    :class:`Seen`, or what was wrong."""
    many_connections(streams + polls)
    try:
        pipe.send(tuple(asyncio.run(_follow(address, streams, polls, pipe))))
    except Unaccounted as error:
        pipe.send(str(error))


async def _follow(address: str, streams: int, polls: int, pipe: Connection) -> Seen:
    loop = asyncio.get_running_loop()
    task_ids = await loop.run_in_executor(None, pipe.recv)
    making = asyncio.Semaphore(AT_ONCE)
    kinds = [_Stream] * streams + [_LongPoll] * polls
    followers = [kind(address, task_ids[number % len(task_ids)], making) for number, kind in enumerate(kinds)]
    running = asyncio.gather(*(each.run() for each in followers))
    ready = asyncio.gather(*(each.ready.wait() for each in followers))
    # The first of them that fails ends it all.
    await asyncio.wait((running, ready), return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    begun = SystemClock().monotonic()
    pipe.send(None)
    await running
    seconds = SystemClock().monotonic() - begun
    versions = await loop.run_in_executor(None, pipe.recv)
    for each in followers:
        if each.last is None or not each.last["done"] or each.last["version"] != versions[each.task_id]:
            version = each.last and each.last["version"]
            raise Unaccounted(f"{each.path} ends with version {version}, expected {versions[each.task_id]}")
    return Seen(
        sum(each.count for each in followers if isinstance(each, _Stream)),
        sum(each.count for each in followers if isinstance(each, _LongPoll)),
        seconds,
    )


class _Follower:
    """A client on a connection of its own. ``last``: the newest object that it has; ``count``: how many it got."""

    def __init__(self, address: str, task_id: int, making: asyncio.Semaphore) -> None:
        self.task_id = task_id
        self.path = f"/api/tasks/{task_id}"
        self.last: dict[str, Any] | None = None
        self.count = 0
        self.ready = asyncio.Event()
        place = urlsplit(address)
        self._host, self._port = str(place.hostname), place.port
        self._making = making

    async def run(self) -> None:
        """Follows to the end. Raises :class:`Unaccounted`."""
        async with self._making:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            await self._follow(reader, writer)
        except (OSError, EOFError) as error:
            raise Unaccounted(f"{self.path} was cut off after {self.count} objects: {error!r}") from error
        finally:
            writer.close()

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError


class _Stream(_Follower):
    """A client that holds a stream."""

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ask(reader, writer, f"{self.path}/stream")
        data = b""
        while (line := await reader.readline()) != b"0\r\n":  # the last chunk
            if not line:
                raise EOFError("the stream has no end")
            if line.startswith(b"data: "):
                data = line
                self.count += 1
                self.ready.set()
        self.last = json.loads(data.removeprefix(b"data: "))


class _LongPoll(_Follower):
    """A client that asks again after each answer."""

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        query = ""
        while self.last is None or not self.last["done"]:
            _, headers = await ask(reader, writer, self.path + query)
            self.last = json.loads(await reader.readexactly(int(headers[b"content-length"])))
            self.count += 1
            self.ready.set()
            query = f"?wait={_WAIT_S}&version={self.last['version']}"


if __name__ == "__main__":
    sys.exit(main())
