"""Pushing single jobs, for an application's own workers and for workers that other programs run.

A tracked job is an Event in the ledger, and is borrowed or dispatched from there. Untracked jobs are written to Redis in
the format of Sidekiq's client, in slices of 1,000; without Redis they wait in the ledger, too
(:func:`asynctask.core.transitions.is_kept`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import orjson

from asynctask.arrivals import NextRun, send_itself
from asynctask.brokers.base import SCHEDULE, Broker, Copy, SetEntry, refuse_unstorable
from asynctask.clock import SECOND, Clock, Ids
from asynctask.config import Config
from asynctask.errors import ConfigError, IdInUse, InputError, Problem
from asynctask.job import CurrentJob, current_job
from asynctask.ledger import standalone
from asynctask.ledger.base import chunks, dumps
from asynctask.lists.items import ItemShape, Rejected
from asynctask.lists.readers import RawRow
from asynctask.lists.written_cells import item_text, plain_json
from asynctask.middleware.chain import Chain
from asynctask.middleware.tracker import ATTEMPT, Attempt
from asynctask.sidekiq.copies import build, encoded, passes, untracked_options
from asynctask.sidekiq.payload import When, check, due_at, dump, flat, normalise, write_time
from asynctask.wiring import Core
from asynctask.worker import Worker, is_model

if TYPE_CHECKING:
    from asynctask.sidekiq.client import RedisClient

BATCH: Final = 1_000
"""Untracked jobs per round trip, or per transaction."""

_Job = tuple[dict[str, Any], int | None]
"""An untracked job as it is stored, and its due time (microseconds; None: now)."""


class Pushing:
    """Pushes the single jobs of an application.

    Arguments: its ``config``, ``clock`` and ``ids``; the client middleware ``chain``; ``made`` returns the parts of this
    process.
    """

    def __init__(self, config: Config, clock: Clock, ids: Ids, chain: Chain, made: Callable[[], Core]) -> None:
        self._config = config
        self._clock = clock
        self._ids = ids
        self._chain = chain
        self._made = made
        self._client: RedisClient | None = None
        self._lock = threading.Lock()

    def push(
        self, worker: Worker, args: Iterable[Sequence[Any]], *, at: When | None, options: Mapping[str, Any]
    ) -> list[str | None]:
        """Pushes a job for each element of ``args``; returns the job ids, None for those that a client middleware stopped.

        ``at``: the due time; a past one means now. ``options`` take precedence over the worker's own. Raises
        :class:`ConfigError` for an option without effect, :class:`InputError` for invalid jobs, BrokerUnavailable.
        """
        worker.check_options(options)
        core = self._made()
        now = core.ledger.now()
        due = None if at is None else due_at(at, now)
        if worker.use_task_event:
            return self._push_tracked(core, worker, list(args), now, due, options)
        item = _item(worker, options)
        if due is not None and due > now:
            item["at"] = due / SECOND
        pushed: list[str | None] = []
        for part in chunks(args, BATCH):
            jobs = [self._untracked(worker, each, item, jid, now) for each, jid in self._with_ids(part)]
            _send(core, [job for job in jobs if job is not None], int(options.get("priority", worker.priority)), now)
            pushed += [None if job is None else str(job[0]["jid"]) for job in jobs]
        return pushed

    def _with_ids(self, part: Sequence[Sequence[Any]]) -> Iterator[tuple[Sequence[Any], str]]:
        return zip(part, self._ids.jids(len(part)), strict=True)

    # -- tracked jobs

    def _push_tracked(
        self,
        core: Core,
        worker: Worker,
        args: Sequence[Sequence[Any]],
        now: int,
        due: int | None,
        options: Mapping[str, Any],
    ) -> list[str | None]:
        own_id = options.get("job_id")
        if own_id is not None and len(args) > 1:
            raise InputError("many jobs cannot share one job_id: push them one by one, or leave it out", code="bad_job")
        args = [_arguments(worker, each) for each in args]
        with_ids = self._with_ids(args) if own_id is None else [(each, str(own_id)) for each in args]
        jobs = [self._tracked(worker, each, jid, now, options) for each, jid in with_ids]
        let_through = [job for job in jobs if passes(self._chain, worker, job)]
        for job in let_through:
            _check_text(worker, job)
        if own_id is not None and let_through and (running := _running(own_id)) is not None:
            args_of, delay_s = let_through[0].payload["args"], max(0, (due or now) - now) / SECOND
            send_itself(running, NextRun(worker.name, let_through[0].queue, args_of, delay_s=delay_s))
            return [str(own_id)]
        sent = standalone.send(
            core.ledger,
            [_arrival(worker, each) for each in let_through],
            due_at=due or now,
            options={
                "retry": options.get("retry", worker.max_retries),
                "priority": options.get("priority", worker.priority),
            },
        )
        for refused in sent.values():
            if isinstance(refused, IdInUse):
                raise refused
        passed = {job.job_id for job in let_through}
        return [job.job_id if job.job_id in passed else None for job in jobs]

    def _tracked(self, worker: Worker, args: Sequence[Any], jid: str, now: int, options: Mapping[str, Any]) -> CurrentJob:
        queue = str(options.get("queue", worker.queue))
        retry = options.get("retry", worker.retry)
        payload = build(worker.name, args, jid, queue, retry, now, use_task_event=True)
        _as_json(worker, payload)
        return CurrentJob(jid, queue=queue, payload=payload)

    # -- untracked jobs

    def _untracked(self, worker: Worker, args: Sequence[Any], item: Mapping[str, Any], jid: str, now: int) -> _Job | None:
        given = self._native(worker, _arguments(worker, args))
        # Arguments are validated after the middleware, which may convert them.
        frame, due = normalise({**item, "args": []}, jid=jid, now=now)
        if not len(self._chain):
            check(given)
            frame["args"] = given
            return frame, due
        offered = {**frame, "args": given}
        if due is not None:
            offered["at"] = due / SECOND
        return self._asked(worker, offered, now)

    def _asked(self, worker: Worker, offered: dict[str, Any], now: int) -> _Job | None:
        """The job after the client middleware; None if it was stopped."""
        job = CurrentJob(offered["jid"], queue=offered["queue"], payload=offered)
        if not passes(self._chain, worker, job):
            return None
        try:
            left: Any = job.payload
            if isinstance(left, Mapping) and isinstance(left.get("args"), list | tuple):
                left = {**left, "args": self._native(worker, list(left["args"]))}
            stored, due = normalise(left, jid=offered["jid"], now=now)
            dump(stored)
        except InputError as error:
            raise _spoilt(worker, error) from None
        return stored, due

    def _native(self, worker: Worker, args: list[Any]) -> list[Any]:
        """The arguments as the job will get them. For Redis only JSON types are valid, as in Ruby; for a database all
        values that can be serialized to JSON, for example a tuple or a date."""
        if self._config.uses_redis:
            return args
        native: list[Any] = orjson.loads(_as_json(worker, args))
        return native

    # -- jobs for workers of other programs

    def client(self) -> RedisClient:
        """The client that pushes jobs for workers of other programs. Raises :class:`ConfigError` without Redis."""
        if not self._config.uses_redis:
            raise ConfigError("a worker of another program is reached through Redis alone: set broker_url=redis://...")
        from asynctask.sidekiq.client import RedisClient

        with self._lock:
            if self._client is None:
                config = self._config
                self._client = RedisClient(
                    config.broker_url,
                    namespace=config.namespace,
                    connections=config.broker_connections,
                    clock=self._clock,
                    ids=self._ids,
                    outgoing=self._ask_for_remote,
                )
            return self._client

    def _ask_for_remote(self, offered: dict[str, Any]) -> Mapping[str, Any] | None:
        if not len(self._chain):
            return offered
        name = str(offered.get("wrapped") or offered["class"])
        elsewhere = Worker(name, _not_here, queue=offered["queue"], use_task_event=False)
        job = CurrentJob(offered["jid"], queue=offered["queue"], payload=offered)
        return job.payload if passes(self._chain, elsewhere, job) else None

    def close(self) -> None:
        """Closes the connections; later pushes open new ones."""
        with self._lock:
            if self._client is not None:
                self._client.close()


def _arrival(worker: Worker, job: CurrentJob) -> standalone.Arrival:
    args, shape = job.payload["args"], worker.shape
    found = shape.indexed(args[0]) if args and worker.search and shape is not None else ()
    return standalone.Arrival(job.job_id, 1, worker.name, job.queue, args, search=found)


def _running(job_id: str) -> Attempt | None:
    """The attempt of the current job, if it has this id."""
    try:
        job = current_job()
    except RuntimeError:
        return None
    if job.job_id != job_id:
        return None
    attempt: Attempt | None = job.local.get(ATTEMPT)
    if attempt is not None and not attempt.ticket.items:  # nobody tracks it
        return None
    if attempt is not None and (attempt.ticket.elsewhere or attempt.ticket.items > 1):
        why = "an attached engine keeps it" if attempt.ticket.elsewhere else "it is a slice of a list"
        raise IdInUse(f"job {job_id} cannot send itself again with perform_async: {why}; send with another id")
    return attempt


def _not_here(*_: Any) -> None:
    raise ConfigError("this worker is another program's: it can be pushed to and not be called")


def _item(worker: Worker, options: Mapping[str, Any]) -> dict[str, Any]:
    """The members that the jobs of one push share, as a caller of Sidekiq's client would write them."""
    members = {**worker.options.get("members", {}), **options.get("members", {})}
    said = {"retry": worker.retry, "queue": worker.queue, **worker.options, **options, "members": members}
    said.pop("priority", None)
    return {"class": worker.name, "args": [], **flat(said)}


def _send(core: Core, jobs: Sequence[_Job], priority: int, now: int) -> None:
    """Writes one slice: to Redis, or without it into the ledger."""
    if core.broker is not None:
        _send_to_broker(core.broker, jobs, priority, now)
        return
    by_time: dict[int, list[standalone.Arrival]] = {}
    for job, due in jobs:
        by_time.setdefault(now if due is None else due, []).append(_row_of(job, priority))
    for due, arrivals in by_time.items():
        standalone.enqueue(core.ledger, arrivals, due_at=due)


_COLUMNS: Final = ("class", "args", "jid", "queue", "created_at", "enqueued_at")
"""Members of a payload that are columns in the row of an untracked job."""

_JID: Final = f"jid must have 1 to {standalone.MAX_JOB_ID} characters, and no NUL or half a character among them"


def _row_of(job: Mapping[str, Any], priority: int) -> standalone.Arrival:
    jid = job["jid"]
    problems = [] if standalone.is_job_id(jid) else [Problem(None, "jid", "bad_length", _JID, jid[:64])]
    refuse_unstorable(Copy(jid, 0, job["queue"], dump(job), priority), problems)
    members = {name: value for name, value in job.items() if name not in _COLUMNS}
    options = untracked_options(members, priority)
    return standalone.Arrival(jid, 1, job["class"], job["queue"], job["args"], options, is_tracked=False)


def _send_to_broker(broker: Broker, jobs: Sequence[_Job], priority: int, now: int) -> None:
    """Writes one slice to Redis: jobs due later into the schedule, the others into their queue."""
    later: list[SetEntry] = []
    copies: list[Copy] = []
    for job, due in jobs:
        if due is None:
            job["enqueued_at"] = write_time(now)
        else:
            job.pop("enqueued_at", None)
        copy = Copy(job["jid"], 0, job["queue"], dump(job), priority)
        if due is None:
            copies.append(copy)
        else:
            later.append(SetEntry(copy, due))
    if later:
        broker.hold(SCHEDULE, later)
    if copies:
        broker.push(copies)


def _arguments(worker: Worker, args: Sequence[Any]) -> list[Any]:
    """The arguments of a job as they are stored: the first one like an item of a list, others as JSON. Raises
    :class:`InputError` with every problem of the item."""
    kept = [_as_fields(worker, each) for each in args]
    if not args or worker.model is None or not isinstance(worker.shape, ItemShape):
        return kept
    found = worker.shape.validate(RawRow(1, args[0]), None)
    if isinstance(found, Rejected):
        raise found.error(f"worker {worker.name!r} does not take the item")
    return [found.values, *kept[1:]]


def _as_fields(worker: Worker, value: Any) -> Any:
    """The fields of a model's instance; any other value unchanged. Raises :class:`InputError`."""
    if not is_model(type(value)) or worker.model is type(value):
        return value
    try:
        return orjson.loads(item_text(value, plain_json))
    except TypeError as error:
        raise InputError(f"the arguments of {worker.name} cannot be kept as JSON: {error}", code="not_json") from None


def _as_json(worker: Worker, value: Any) -> str:
    try:
        return dumps(value)
    except TypeError as error:
        raise InputError(f"the arguments of {worker.name} cannot be kept as JSON: {error}", code="not_json") from None


def _check_text(worker: Worker, job: CurrentJob) -> None:
    """Validates the payload that the client middleware returned, before any job is stored."""
    try:
        encoded(job.payload)
    except (TypeError, ValueError) as error:
        raise _spoilt(worker, error) from None


def _spoilt(worker: Worker, error: Exception) -> InputError:
    text = f"a client middleware left a job of {worker.name} that cannot be pushed: {error}"
    return InputError(text, code="not_json", errors=getattr(error, "errors", ()))
