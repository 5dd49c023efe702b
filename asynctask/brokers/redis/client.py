"""A client that only pushes: jobs for whoever works Sidekiq's format, in Ruby or in Python. It needs no database.

.. code-block:: python

    from asynctask.brokers.redis.client import RedisClient, RemoteWorker

    client = RedisClient("redis://127.0.0.1:6379/0")
    hard = RemoteWorker("HardWorker", client, queue="low", retry=5)
    hard.perform_async(1, "two")
    hard.perform_in(60, 1, "two")
    hard.set(queue="critical").perform_bulk([[1], [2], [3]])

Such a job is tracked by nobody, unless whoever runs it tracks its worker. Client middleware does not run here. If the
connection breaks while a push is on its way, the push raises, and may have been done: push again, and the job may run
twice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import islice, repeat
from typing import Any, Final, Self, TypeVar

from asynctask.brokers.base import SCHEDULE
from asynctask.brokers.redis.server import Command, Server
from asynctask.clock import SECOND, Clock, Ids, SystemClock, SystemIds, from_datetime, micros
from asynctask.errors import InputError, TooLarge
from asynctask.wire.payload import check, dump, normalise, write_time

__all__ = ["BATCH", "RedisClient", "RemoteWorker"]

BATCH: Final = 1_000
"""Jobs of one round trip of :meth:`RedisClient.push_bulk`."""

MAX_PAYLOAD_BYTES: Final = 4_194_304
_NO_LIST: Final = "each job's arguments must be a list: [[1], [2]], not [1, 2]"
_EPOCH_FROM_S: Final = 1_000_000_000  # a smaller number is a span of time, as in Sidekiq
_Due = tuple[str, dict[str, Any], int | None]

T = TypeVar("T")
When = float | timedelta | datetime


class RedisClient:
    """Pushes jobs.

    Arguments: the server's ``url``; the ``namespace`` of every key; ``connections``; ``timeout_s`` of a connect or an
    answer; ``clock`` and ``ids``. Connects when it is first needed. Raises ConfigError for a URL that cannot be.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str = "",
        connections: int = 10,
        timeout_s: float = 5.0,
        clock: Clock | None = None,
        ids: Ids | None = None,
    ) -> None:
        self._server = Server(url, namespace, connections=connections, timeout_s=timeout_s)
        self._clock = clock or SystemClock()
        self._ids = ids or SystemIds(self._clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes every connection."""
        self._server.close()

    def health_check(self) -> Mapping[str, Any]:
        """Facts about the server, and ``problems``, a list of texts. Raises BrokerUnavailable."""
        return self._server.health_check()

    # -- jobs as Sidekiq's client takes them

    def push(self, item: Mapping[str, Any]) -> str:
        """Pushes one job; returns its jid.

        Arguments: ``item`` with ``class`` and ``args``, and what else it needs: ``queue``, ``retry``, ``at`` (seconds since
        1970: it waits in the schedule), ``tags``, any member of its own. Raises :class:`InputError` for what is no job,
        nothing is written then; BrokerUnavailable.
        """
        due = self._job(item, self._ids.jid())
        self._send([due])
        return str(due[1]["jid"])

    def push_bulk(
        self, item: Mapping[str, Any], args: Iterable[Sequence[Any]], at: float | Sequence[float] | None = None
    ) -> list[str]:
        """Pushes many jobs that differ in their arguments, 1,000 in a round trip; returns their jids.

        Arguments: ``item`` as of :meth:`push`, without ``args`` and ``jid``; ``args``, an iterable of lists; ``at``: one
        time for all or a list of one for each, in seconds since 1970. Raises as :meth:`push`; slices before the one that
        failed are pushed then.
        """
        if "jid" in item:
            raise InputError("many jobs cannot share one jid: leave 'jid' out", code="bad_job")
        if isinstance(at, list | tuple) and isinstance(args, list | tuple) and len(at) != len(args):
            raise InputError(f"'at' has {len(at)} times for {len(args)} jobs: give one for each", code="bad_job")
        times = iter(at) if isinstance(at, list | tuple) else repeat(at)
        jids: list[str] = []
        for part in _slices(args, BATCH):
            ids = self._ids.jids(len(part))
            if at is None and "at" not in item:
                self._send(self._alike(item, part, ids))
            else:
                self._send([self._job(self._one_of(item, each, times), jid) for each, jid in zip(part, ids, strict=True)])
            jids += ids
        return jids

    def _alike(self, item: Mapping[str, Any], part: Sequence[Any], ids: Sequence[str]) -> list[_Due]:
        """Jobs that are to run now and differ in arguments and jid alone: what they share is checked once."""
        frame, _ = normalise({**item, "args": ()}, jid=ids[0], now=self._clock.now())
        frame["enqueued_at"] = write_time(self._clock.now())
        jobs: list[_Due] = []
        for args, jid in zip(part, ids, strict=True):
            if not isinstance(args, list | tuple):
                raise InputError(_NO_LIST, code="bad_job")
            args = list(args)
            check(args)
            job = {**frame, "args": args, "jid": jid}
            jobs.append((_text_of(job), job, None))
        return jobs

    @staticmethod
    def _one_of(item: Mapping[str, Any], args: Any, times: Iterator[Any]) -> dict[str, Any]:
        if not isinstance(args, list | tuple):
            raise InputError(_NO_LIST, code="bad_job")
        try:
            return {**item, "args": args, "at": next(times)}
        except StopIteration:
            raise InputError("'at' has fewer times than there are jobs: give one for each", code="bad_job") from None

    def _job(self, item: Mapping[str, Any], jid: str) -> _Due:
        now = self._clock.now()
        job, at = normalise(item, jid=jid, now=now)
        if at is None:
            job["enqueued_at"] = write_time(now)
        else:
            job.pop("enqueued_at", None)
        return _text_of(job), job, at

    def _send(self, jobs: Sequence[_Due]) -> None:
        """One pipeline: what is to run now by queue, what is to wait into the schedule."""
        keys, commands = self._server.keys, list[Command]()
        queues: dict[str, list[str]] = defaultdict(list)
        waiting: list[str | float] = []
        for text, job, at in jobs:
            if at is None:
                queues[job["queue"]].append(text)
            else:
                waiting += (repr(at / SECOND), text)
        for queue, texts in queues.items():
            commands += [("SADD", keys.queues, queue), ("LPUSH", keys.queue(queue), *texts)]
        if waiting:
            commands.append(("ZADD", keys(SCHEDULE), *map(str, waiting)))
        self._server.ask(*commands, repeat=not queues)  # a member of a set is there once, however often it is put there

    # -- Sidekiq's verbs, by the worker's name

    def perform_async(self, worker: str, *args: Any) -> str:
        """Pushes a job of this worker; returns its jid."""
        return self.push({"class": worker, "args": args})

    def perform_in(self, when: When, worker: str, *args: Any) -> str:
        """Pushes a job that is due after so many seconds or that time; returns its jid."""
        return RemoteWorker(worker, self).perform_in(when, *args)

    def perform_at(self, when: When, worker: str, *args: Any) -> str:
        """Pushes a job that is due at that time; returns its jid."""
        return RemoteWorker(worker, self).perform_at(when, *args)

    def perform_bulk(self, worker: str, args: Iterable[Sequence[Any]]) -> list[str]:
        """Pushes a job for each list of arguments; returns their jids."""
        return self.push_bulk({"class": worker}, args)

    def due(self, when: When) -> float | None:
        """Seconds since 1970 of a time, or of a span from now; None if that is over. Raises :class:`InputError`."""
        now = self._clock.now()
        at = _due(when, now)
        return None if at <= now else at / SECOND


class RemoteWorker:
    """A worker that another process runs, by its name: for Ruby a constant, such as ``Shop::HardWorker``.

    Arguments: its ``name``; the ``client`` that pushes; ``queue``; ``retry`` (true: 25 times, false: never, a number);
    further ``options``, members of each job. The verbs raise as :meth:`RedisClient.push`.
    """

    def __init__(
        self, name: str, client: RedisClient, *, queue: str = "default", retry: bool | int = True, **options: Any
    ) -> None:
        self.name = name
        self._client = client
        self._options = {"retry": retry, "queue": queue, **options}

    def __repr__(self) -> str:
        return f"<RemoteWorker {self.name} on {self._options['queue']}>"

    def set(self, **options: Any) -> RemoteWorker:
        """The same worker with other options; ``wait`` and ``wait_until`` are those of :meth:`perform_in`."""
        for name in ("wait", "wait_until"):
            if name in options:
                options["at"] = self._client.due(options.pop(name))
        return RemoteWorker(self.name, self._client, **{**self._options, **options})

    def perform_async(self, *args: Any) -> str:
        """Pushes a job; returns its jid."""
        return self._client.push(self._item(args))

    def perform_in(self, when: When, *args: Any) -> str:
        """Pushes a job that is due after so many seconds (from 1,000,000,000 on: at that second since 1970), or now if that
        is over; returns its jid. A timedelta and an aware datetime mean themselves."""
        return self._client.push({**self._item(args), "at": self._client.due(when)})

    def perform_at(self, when: When, *args: Any) -> str:
        """The same as :meth:`perform_in`; returns its jid."""
        return self.perform_in(when, *args)

    def perform_bulk(self, args: Iterable[Sequence[Any]], at: float | Sequence[float] | None = None) -> list[str]:
        """Pushes a job for each list of arguments, 1,000 in a round trip; returns their jids."""
        item = {name: value for name, value in self._item(()).items() if name != "args"}
        return self._client.push_bulk(item, args, item.pop("at", None) if at is None else at)

    delay = perform_async

    def _item(self, args: Sequence[Any]) -> dict[str, Any]:
        return {"class": self.name, "args": args, **self._options}


def _text_of(job: Mapping[str, Any]) -> str:
    text = dump(job)
    if len(text) * 4 > MAX_PAYLOAD_BYTES and len(text.encode()) > MAX_PAYLOAD_BYTES:
        raise TooLarge(
            f"the job has {len(text.encode()):,} bytes, the most is {MAX_PAYLOAD_BYTES:,}: put the data somewhere and"
            " hand over where it is"
        )
    return text


def _due(when: When, now: int) -> int:
    if isinstance(when, timedelta):
        return now + when // timedelta(microseconds=1)
    if isinstance(when, datetime):
        try:
            return from_datetime(when)
        except ValueError as error:
            raise InputError(str(error), code="bad_time") from None
    if isinstance(when, bool) or not isinstance(when, int | float) or not math.isfinite(when):
        raise InputError(f"{when!r} is no time: give seconds, a timedelta or an aware datetime", code="bad_time")
    return micros(when) + (now if when < _EPOCH_FROM_S else 0)


def _slices(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while part := list(islice(iterator, size)):
        yield part
