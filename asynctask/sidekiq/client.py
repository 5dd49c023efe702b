"""A client that only pushes jobs, for workers of Sidekiq's format in Ruby or Python: no database, no web server.

.. code-block:: python

    from asynctask.client import RedisClient

    with RedisClient("redis://127.0.0.1:6379/0") as client:
        hard = client.remote_worker("HardWorker", queue="low", retry=5)
        hard.perform_async(1, "two")
        hard.perform_in(60, 1, "two")
        hard.set(queue="critical").perform_bulk([n] for n in range(100_000))

Such a job is untracked, unless the process that runs it tracks its worker. No client middleware runs except ``outgoing``,
with which an application runs its own. If the connection breaks during a push, the push raises but may have succeeded;
pushed again, the job may run twice. ``GlobalId``, ``ModuleName``, ``RubyRange`` and ``Symbol`` are for arguments of
ActiveJob's (``active_job=True``) that have no form of their own in Python.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, repeat
from typing import Any, Final, Self, TypeVar

from asynctask.brokers.base import MAX_PAYLOAD_BYTES, SCHEDULE
from asynctask.clock import SECOND, Clock, Ids, SystemClock, SystemIds, micros, rfc3339
from asynctask.errors import ConfigError, InputError, TooLarge
from asynctask.sidekiq.activejob import OLD_WRAPPER, GlobalId, ModuleName, RubyRange, Symbol, wrap
from asynctask.sidekiq.payload import (
    REMOTE,
    When,
    check,
    check_names,
    check_values,
    due_at,
    dump,
    flat,
    normalise,
    write_time,
)
from asynctask.sidekiq.server import Command, Server

__all__ = [
    "BATCH", "GlobalId", "ModuleName", "Outgoing", "RedisClient", "RemoteWorker", "RubyRange", "Symbol", "When",
]  # fmt: skip

BATCH: Final = 1_000
"""Jobs per round trip of :meth:`RedisClient.push_bulk`."""

_NO_LIST: Final = "each job's arguments must be a list: [[1], [2]], not [1, 2]"
_Due = tuple[str, dict[str, Any], int | None]

T = TypeVar("T")
Outgoing = Callable[[dict[str, Any]], Mapping[str, Any] | None]
"""Called for each job before it is pushed; returns the job to push, or None to stop it."""


class RedisClient:
    """Pushes jobs.

    Arguments: the server's ``url``; the ``namespace`` of every key; ``connections``; ``timeout_s`` of a connect or an
    answer; ``clock`` and ``ids``; ``outgoing``, called for each job. Connects on first use. Raises ConfigError for an
    invalid URL.
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
        outgoing: Outgoing | None = None,
    ) -> None:
        self._server = Server(url, namespace, connections=connections, timeout_s=timeout_s)
        self._clock = clock or SystemClock()
        self._ids = ids or SystemIds(self._clock)
        self._outgoing = outgoing

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

    def remote_worker(
        self, name: str, *, queue: str = "default", retry: bool | int = True, active_job: bool = False, **options: Any
    ) -> RemoteWorker:
        """A worker run by another process; arguments as of :class:`RemoteWorker`."""
        return RemoteWorker(name, self, queue=queue, retry=retry, active_job=active_job, **options)

    # -- jobs in the form of Sidekiq's client

    def push(self, item: Mapping[str, Any]) -> str | None:
        """Pushes one job; returns its jid, or None if ``outgoing`` stopped it.

        ``item`` has ``class`` and ``args``, and optionally ``queue``, ``retry``, ``at`` (seconds since 1970: it waits in
        the schedule), ``tags``, any other member. Raises :class:`InputError` for an invalid job, and writes nothing then;
        BrokerUnavailable.
        """
        due = self._job(item, self._ids.jid())
        if due is None:
            return None
        self._send([due])
        return str(due[1]["jid"])

    def push_bulk(
        self, item: Mapping[str, Any], args: Iterable[Sequence[Any]], at: float | Sequence[float] | None = None
    ) -> list[str | None]:
        """Pushes many jobs that differ in their arguments, 1,000 per round trip; returns their jids.

        ``item``: as of :meth:`push`, without ``args`` and ``jid``; ``args``: any iterable of lists, consumed during the
        push; ``at``: one time for all or a list of one for each, in seconds since 1970. Raises as :meth:`push`; earlier
        slices are pushed then.
        """
        if "jid" in item:
            raise InputError("many jobs cannot share one jid: leave 'jid' out", code="bad_job")
        if isinstance(at, list | tuple) and isinstance(args, list | tuple) and len(at) != len(args):
            raise InputError(f"'at' has {len(at)} times for {len(args)} jobs: give one for each", code="bad_job")
        times = iter(at) if isinstance(at, list | tuple) else repeat(at)
        jids: list[str | None] = []
        for part in _slices(args, BATCH):
            ids = self._ids.jids(len(part))
            jobs: Sequence[_Due | None]
            if at is None and "at" not in item and self._outgoing is None:
                jobs = self._bulk_jobs(item, part, ids)
            else:
                jobs = [self._job(self._item_of(item, each, times), jid) for each, jid in zip(part, ids, strict=True)]
            self._send([due for due in jobs if due is not None])
            jids += [None if due is None else str(due[1]["jid"]) for due in jobs]
        return jids

    def _bulk_jobs(self, item: Mapping[str, Any], part: Sequence[Any], ids: Sequence[str]) -> list[_Due]:
        """Jobs to run now that differ in arguments and jid only: validates the common members once."""
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
    def _item_of(item: Mapping[str, Any], args: Any, times: Iterator[Any]) -> dict[str, Any]:
        if not isinstance(args, list | tuple):
            raise InputError(_NO_LIST, code="bad_job")
        try:
            at = next(times)
            return {**item, "args": args} if at is None else {**item, "args": args, "at": at}
        except StopIteration:
            raise InputError("'at' has fewer times than there are jobs: give one for each", code="bad_job") from None

    def _job(self, item: Mapping[str, Any], jid: str) -> _Due | None:
        now = self._clock.now()
        job, at = normalise(item, jid=jid, now=now)
        if self._outgoing is not None:
            filtered = self._outgoing(job if at is None else {**job, "at": at / SECOND})
            if filtered is None:
                return None
            try:
                job, at = normalise(filtered, jid=job["jid"], now=now)
                dump(job)
            except InputError as error:
                raise InputError(
                    f"a client middleware left a job that cannot be pushed: {error}", code=error.code
                ) from None
        if at is None:
            job["enqueued_at"] = write_time(now)
        else:
            job.pop("enqueued_at", None)
        return _text_of(job), job, at

    def _send(self, jobs: Sequence[_Due]) -> None:
        """Sends one pipeline: pushes jobs to run now to their queues, adds the others to the schedule."""
        if not jobs:
            return
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
        self._server.ask(*commands, repeat=not queues)  # adding to a set is idempotent, a push is not

    # -- Sidekiq's verbs by the worker's name

    def perform_async(self, worker: str, *args: Any) -> str | None:
        """Pushes a job of this worker; returns its jid."""
        return self.push({"class": worker, "args": args})

    def perform_in(self, when: When, worker: str, *args: Any) -> str | None:
        """Pushes a job due after that many seconds or at that time; returns its jid."""
        return RemoteWorker(worker, self).perform_in(when, *args)

    def perform_at(self, when: When, worker: str, *args: Any) -> str | None:
        """Pushes a job due at that time; returns its jid."""
        return RemoteWorker(worker, self).perform_at(when, *args)

    def perform_bulk(self, worker: str, args: Iterable[Sequence[Any]]) -> list[str | None]:
        """Pushes a job for each list of arguments; returns their jids."""
        return self.push_bulk({"class": worker}, args)

    def due(self, when: When) -> float | None:
        """A time, or a span from now, in seconds since 1970; None if it is past. Raises :class:`InputError`."""
        now = self._clock.now()
        at = due_at(when, now)
        return None if at <= now else at / SECOND

    def active_job(
        self, name: str, args: Sequence[Any], keywords: Mapping[str, Any], *, queue: str, at: float | None = None
    ) -> dict[str, Any]:
        """The members of a job of Rails' ActiveJob class ``name``, for :meth:`push`.

        ``args`` and ``keywords`` may have the types that :mod:`asynctask.sidekiq.activejob` supports; ``at``: seconds since
        1970. Raises :class:`InputError`.
        """
        now = rfc3339(self._clock.now()) or ""
        due: dict[str, Any] = {} if at is None else {"scheduled_at": rfc3339(micros(at))}
        return wrap(name, args, keywords, job_id=_uuid(self._ids), enqueued_at=now, queue=queue, **due)


class RemoteWorker:
    """A worker run by another process, by its name: for Ruby a constant, such as ``Shop::HardWorker``.

    Arguments: its ``name``; the ``client`` that pushes; ``queue``; ``retry`` (true: 25 times, false: never, a number);
    ``active_job``: a job of Rails' ActiveJob, whose arguments may have all types that :mod:`asynctask.sidekiq.activejob`
    supports, and keywords. ``options``: ``retry_for``, ``retry_queue``, ``dead``, ``backtrace``, ``tags``, ``log_level``,
    ``display_class``, and ``members``, a dict of further members of the payload (:mod:`asynctask.sidekiq.payload`). Raises
    ConfigError for an unknown option, :class:`InputError` for an invalid value. The verbs raise as
    :meth:`RedisClient.push`.
    """

    def __init__(
        self,
        name: str,
        client: RedisClient,
        *,
        queue: str = "default",
        retry: bool | int = True,
        active_job: bool = False,
        **options: Any,
    ) -> None:
        self.name = name
        self._client = client
        self._active_job = active_job
        self._options = {"retry": retry, "queue": queue, **options}
        self._wait: When | None = None
        check_names(self._options, REMOTE)
        check_values(self._options)

    def __repr__(self) -> str:
        return f"<RemoteWorker {self.name} on {self._options['queue']}>"

    def set(self, **options: Any) -> RemoteWorker:
        """The worker with other options; ``wait`` and ``wait_until`` take the first argument of :meth:`perform_in`."""
        given = sorted({"wait", "wait_until"} & options.keys())
        if len(given) > 1:
            raise ConfigError("wait and wait_until say the same: give one of them")
        wait = options.pop(given[0]) if given else self._wait
        if wait is not None:
            self._client.due(wait)  # refuses an invalid time here, not at the push
        worker = RemoteWorker(self.name, self._client, active_job=self._active_job, **{**self._options, **options})
        worker._wait = wait
        return worker

    def perform_async(self, *args: Any, **keywords: Any) -> str | None:
        """Pushes a job; returns its jid. Only jobs of ActiveJob have ``keywords``."""
        return self._push(self._wait, args, keywords)

    def perform_in(self, when: When, *args: Any, **keywords: Any) -> str | None:
        """Pushes a job due after that many seconds (from 1,000,000,000 on: at that second since 1970), at once if that is
        past; returns its jid. Also takes a timedelta or an aware datetime."""
        return self._push(when, args, keywords)

    perform_at = perform_in

    def perform_bulk(self, args: Iterable[Sequence[Any]], at: float | Sequence[float] | None = None) -> list[str | None]:
        """Pushes a job for each list of arguments, 1,000 per round trip; returns their jids.

        ``args``: any iterable, consumed during the push; ``at``: as of :meth:`RedisClient.push_bulk`.
        """
        if at is None and self._wait is not None:
            at = self._client.due(self._wait)
        item: dict[str, Any] = {"class": self.name, **flat(self._options)}
        if self._active_job:
            item |= {"class": OLD_WRAPPER, "wrapped": self.name}
            one = at if isinstance(at, int | float) else None
            args = (self._wrapped(each, {}, one)["args"] for each in args)
        return self._client.push_bulk(item, args, at)

    delay = perform_async

    def _push(self, when: When | None, args: Sequence[Any], keywords: Mapping[str, Any]) -> str | None:
        at = None if when is None else self._client.due(when)
        if self._active_job:
            job = self._wrapped(args, keywords, at)
        elif keywords:
            names = ", ".join(keywords)
            raise InputError(
                f"{self.name} cannot be given {names} by name: a job has a list of arguments; send them in their places or"
                " in a dict (a job of ActiveJob has names: active_job=True)",
                code="bad_job",
            )
        else:
            job = {"class": self.name, "args": args}
        item = {**job, **flat(self._options)}
        return self._client.push(item if at is None else {**item, "at": at})

    def _wrapped(self, args: Any, keywords: Mapping[str, Any], at: float | None) -> dict[str, Any]:
        if not isinstance(args, list | tuple):
            raise InputError(_NO_LIST, code="bad_job")
        return self._client.active_job(self.name, args, keywords, queue=str(self._options["queue"]), at=at)


def _uuid(ids: Ids) -> str:
    """A random id in the form of Rails' job ids."""
    digits = f"{ids.jid():0>24}{ids.nonce():0>12}"[:32]
    digits = f"{digits[:12]}4{digits[13:16]}{'89ab'[int(digits[16], 16) & 3]}{digits[17:]}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _text_of(job: Mapping[str, Any]) -> str:
    text = dump(job)
    if len(text) * 4 > MAX_PAYLOAD_BYTES and len(text.encode()) > MAX_PAYLOAD_BYTES:
        raise TooLarge(
            f"the job has {len(text.encode()):,} bytes, the most is {MAX_PAYLOAD_BYTES:,}: put the data somewhere and"
            " hand over where it is"
        )
    return text


def _slices(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while part := list(islice(iterator, size)):
        yield part
