"""The contract between an engine and the ledger, and the parts that record beside an engine.

An engine (Celery, Dramatiq, RQ, Huey) keeps its own queues and runs its own workers. Its integration derives from
:class:`Engine`: through that the dispatcher reaches those queues, and its hooks are all that a new engine must give. Beside
the engine's workers, an :class:`EngineProcess` records jobs.

Two kinds of jobs arrive. A **job of a Task**, or a callback, was pushed by the dispatcher and carries its attempt. The
ledger keeps it: dispatches it again when its process died, for a retry, or after its Task was paused, and drops copies of
older attempts. The engine decides only whether and when it is retried. A **lone job** was sent by a program through the
engine. It carries no attempt, because the engine alone keeps, retries and delivers it.

A worker process in another language has no such object. It sends its records to a process of this application, where
:class:`~asynctask.integrations.remote.RemoteWorkers` writes them and keeps its lease.
"""

from __future__ import annotations

import functools
import itertools
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import orjson

from asynctask.arrivals import ArrivalTracker, NextRun, send_itself
from asynctask.brokers.base import Copy
from asynctask.clock import SECOND, Clock, micros
from asynctask.config import Config
from asynctask.core.transitions import Begin
from asynctask.dispatch.outbox import engine_queue, own_name
from asynctask.errors import BrokerUnavailable, ConfigError, IdInUse, InputError, Unavailable
from asynctask.exports.run import MERGER, Exporting, check_columns, merge, write_shard
from asynctask.job import CurrentJob, performed, reset_current_job, set_current_job
from asynctask.ledger import processes
from asynctask.ledger.base import MAX_ID, dumps
from asynctask.ledger.rates import declared as declared_rates
from asynctask.ledger.recorder import LINGER_S, Kind, Recorder
from asynctask.ledger.search import SearchValue
from asynctask.ledger.standalone import ENGINE, Arrival, end_elsewhere, reopen, send, send_from_ledger
from asynctask.ledger.tasks import CALLBACK_RETRIES
from asynctask.lists.items import ItemShape, Rejected, UnfitItem
from asynctask.lists.readers import RawRow
from asynctask.lists.written_cells import item_text, secret_json
from asynctask.logs import get_logger
from asynctask.messages import clean, revealed, traceback_of
from asynctask.middleware.chain import Chain
from asynctask.middleware.tracker import Attempt, TaskEventMiddleware, Ticket, Tracker
from asynctask.runtime.execution import backoff
from asynctask.runtime.process import AppProcess, Dispatching
from asynctask.sidekiq.copies import AGAIN, CALLBACK_OF, decode
from asynctask.worker import Worker, describe, is_model

EARLY_S: Final = 0.5
"""Seconds for which a ticket is valid that was requested before a thread was free."""

SENT: Final = "asynctask_event"
"""The header of the message of a lone job that has its Event already, where a message can carry one: the job's id, because
programs pass the headers of one message on to another, and the time of this run (:func:`sent_at`)."""

AT_ONCE: Final = 10
"""Jobs that the dispatcher pushes to an engine's Redis in one round trip; the first are there while it writes the next."""

AWAY_S: Final = 0.5
"""Seconds between two questions whether the ledger answers again."""

PUT_OFF_S: Final = 10.0
"""Seconds for which a job waits in the ledger whose engine gave it up before it began."""

BEGUN: Final = "a worker has begun it"
"""Why a job cannot be revoked any more."""

LONG_S: Final = 0.1
"""Duration of a job from which its ``working`` status is written separately."""

LOOK_EVERY: Final = 4
"""Ticks of :data:`LONG_S` between two queries for stopped jobs."""

_MOST_EARLY: Final = 1_000
_MOST_ACKS: Final = 50
_FLUSH_S: Final = 5.0

_BROKEN: Final = (
    "the message is dropped unrun: only AsyncTask writes an attempt into one, so find the program that has changed or made"
    " it; the job runs by another message, or the ledger sends it again"
)

_ERRORS: Final = (Kind.RAISED, Kind.TIMEOUT, Kind.DISCARDED)

T = TypeVar("T")


# -- what messages say

MAX_ATTEMPT: Final = 2**31 - 1
"""The largest attempt that every database stores."""

_SHOWN_CHARS: Final = 50
_SHOWN_BITS: Final = 128


class Fence(NamedTuple):
    """What a message says of the attempt of its job. ``attempt``: None in the message of a job that its engine keeps.
    ``broken``: what it says in the place of an attempt, for people: whoever reaches the engine's broker can write any
    value, and other programs may change one. Then ``attempt`` is None, too."""

    attempt: int | None = None
    broken: str = ""

    @classmethod
    def parse(cls, value: object) -> Fence:
        """From the member of a message that has one: a whole number from 1 to :data:`MAX_ATTEMPT`."""
        # True is an int, too
        return cls(value) if type(value) is int and 0 < value <= MAX_ATTEMPT else cls(None, _quoted(value))


def _quoted(value: object) -> str:
    """A value that anybody may have written; only what has a short text by itself is quoted."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:  # Python refuses to print one of thousands of digits
        return f"a number of {value.bit_length():,} bits"
    quoted = isinstance(value, str | int | float | None)
    return clean(repr(value[:_SHOWN_CHARS] if isinstance(value, str) else value)) if quoted else f"a {type(value).__name__}"


# -- the port


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """Capabilities of an engine, with the broker that it is attached to.

    ``late_ack``: a job is acknowledged after its outcome is committed. ``redelivers``: a lone job whose process died is
    delivered again by the engine. ``counts``: its queues can be counted; without it no Task can be submitted to it.
    ``asynchronous``: it runs ``async`` functions. ``hard_limit``: it ends a job that ignores its time limit. ``revokes``: a
    lone job can be taken back before it begins (:meth:`Engine.revoke`). ``slices``: a job may have several items.
    ``exports``: its workers export shards (:meth:`Engine.declared`, ``columns``) and perform the merge of their parts, the
    worker ``MERGER``.
    """

    late_ack: bool
    redelivers: bool
    counts: bool
    asynchronous: bool
    hard_limit: bool
    revokes: bool
    slices: bool = False
    exports: bool = False


class Attachable(Dispatching, Exporting, Protocol):
    """The parts of an application that an integration needs."""

    config: Config

    def attach(self, engine: Engine) -> None: ...

    def ensure_schema(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PushedJob:
    """A job as the dispatcher pushes it: the worker's ``name``, the engine's own name of the ``queue``, the arguments.

    ``attempt`` is its fence, which must travel with it; None for a lone job. ``retries``: the number of its retries.
    ``sent``: of a lone job, for the header :data:`SENT`. ``replaces``: it is what a job of a Task sent
    under its id, and not its item; ``signature``: to be sent in its place, see
    :class:`~asynctask.arrivals.NextRun`.
    """

    job_id: str
    name: str
    queue: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    attempt: int | None
    retries: int
    sent: Sequence[Any] | None
    replaces: bool = False
    signature: Any = None


def pushed_job(copy: Copy) -> PushedJob:
    """The job of a copy that the dispatcher pushes. Raises ValueError for an invalid one."""
    job = decode(copy.payload)
    args: Any = job["args"]
    kwargs: Mapping[str, Any] = {}
    is_lone = copy.task_id is None and CALLBACK_OF not in job
    if is_lone:  # see `_lone_arguments` of the outbox
        args, kwargs = args
        args, kwargs = [*map(revealed, args[:1]), *args[1:]], {name: revealed(each) for name, each in kwargs.items()}
    attempt = None if is_lone else copy.attempt
    queue = own_name(copy.queue)
    retries = int(job.get("retry_count", -1)) + 1
    if (again := job.get(AGAIN)) is not None:
        kwargs, retries, signature = again["kwargs"], max(0, retries - again["before"]), again["signature"]
        return PushedJob(copy.jid, str(job["class"]), queue, args, kwargs, attempt, retries, None, True, signature)
    sent = [copy.jid, round(job["created_at"] * SECOND)] if is_lone else None
    return PushedJob(copy.jid, str(job["class"]), queue, args, kwargs, attempt, retries, sent)


def sent_at(header: object, job_id: str) -> int | None:
    """When this run of a lone job was sent (microseconds, by the ledger), by the header :data:`SENT` of the job's message;
    None for anything else."""
    match header:
        case [of, int(at)] if of == job_id and 0 < at <= MAX_ID:
            return at
    return None


class EngineWorkers(ChainMap[str, Worker]):
    """The workers of an engine by name: ``listed``, and the merge of exports."""

    def __init__(self) -> None:
        self.listed: dict[str, Worker] = {}
        super().__init__(self.listed, {})

    def add(self, worker: Worker) -> None:
        """Adds one; the merge is not ``listed``."""
        self.maps[int(worker.name == MERGER)][worker.name] = worker


def _concealed(worker: Worker | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments with the secrets of an item marked."""
    args, kwargs = list(args), dict(kwargs)
    if worker is None or worker.shape is None:
        return args, kwargs
    conceal = worker.shape.conceal
    return [*map(conceal, args[:1]), *args[1:]], {name: conceal(each) for name, each in kwargs.items()}


def revived_arguments(worker: Worker, args: Sequence[Any]) -> Sequence[Any]:
    """The arguments of a job of a Task, as its function gets them: its item, the first, is converted to its model."""
    return args if worker.shape is None or not args else (worker.shape.revive(args[0]), *args[1:])


# -- what several threads ask the ledger at the same time, they ask together


@dataclass(slots=True)
class _Call:
    argument: Any
    result: Any = None
    error: Exception | None = None
    done: bool = False


class Together:
    """Batches calls of a function of many arguments from threads with one argument each.

    A thread that finds no call running makes one; those that come meanwhile wait for its end, and one of them makes the
    next call for all of them. So a lone caller waits for nobody, and many share a round trip and a commit. ``function``
    returns the results in the order of its arguments; if it raises for several, each is tried alone.
    """

    def __init__(self, function: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        self._function = function
        self._renew()

    def _renew(self) -> None:
        self._condition = threading.Condition()
        self._waiting: list[_Call] = []
        self._busy = False
        self._pid = os.getpid()

    def __call__(self, argument: Any) -> Any:
        if os.getpid() != self._pid:
            self._renew()  # a forked child: the calling threads are its parent's
        mine = _Call(argument)
        with self._condition:
            self._waiting.append(mine)
            while True:
                self._condition.wait_for(lambda: mine.done or not self._busy)
                if mine.done:
                    break
                self._lead()
        if mine.error is not None:
            raise mine.error
        return mine.result

    def _lead(self) -> None:
        """Makes the call for all that wait, with the condition's lock released meanwhile."""
        calls, self._waiting, self._busy = self._waiting, [], True
        self._condition.release()
        try:
            self._make(calls)
        finally:  # an engine may interrupt this thread: another thread makes the remaining call
            self._condition.acquire()
            self._waiting[:0] = [each for each in calls if not each.done]
            self._busy = False
            self._condition.notify_all()

    def _make(self, calls: Sequence[_Call]) -> None:
        try:
            for each, result in zip(calls, self._function([each.argument for each in calls]), strict=True):
                each.result, each.done = result, True
        except Exception as error:
            if len(calls) == 1 or isinstance(error, Unavailable):
                for each in calls:
                    each.error, each.done = error, True
            else:
                for each in calls:
                    self._make([each])


class EarlyTickets:
    """Requests the tickets of jobs that have arrived and wait for a free thread of their engine.

    One thread requests all that have arrived, once fewer than ``enough`` unused tickets are left, or a thread waits for
    one: a request costs about as much for ten jobs as for one. A ticket is valid for half a second, then its job requests a
    new one, so that changed knobs take effect. Where ``begin`` has no ticket of a job (None), that requests its own.
    """

    def __init__(
        self, begin: Callable[[Sequence[Arrival]], Sequence[Ticket | None]], clock: Clock, *, enough: int = 1
    ) -> None:
        self._begin = begin
        self._clock = clock
        self._enough = enough
        self._lock = threading.Lock()
        self._due = threading.Condition(self._lock)  # there is something to ask
        self._told = threading.Condition(self._lock)  # it was answered
        self._arrived: list[tuple[Arrival, _Early]] = []
        self._early: dict[tuple[str, int | None], _Early] = {}
        self._ready = 0  # of them, those that are answered
        self._wanted = False  # a thread waits for a ticket that was not asked for yet
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="tickets", daemon=True)
        self._thread.start()

    def expect(self, arrival: Arrival) -> None:
        """Notes that a job has arrived."""
        with self._lock:
            if self._ended:
                return
            if len(self._early) >= _MOST_EARLY:  # of jobs dropped by their engine
                self._early, self._ready = {key: each for key, each in self._early.items() if not each.done}, 0
            self._pop(arrival.job_id, arrival.attempt)
            early = self._early[arrival.job_id, arrival.attempt] = _Early()
            self._arrived.append((arrival, early))
            self._wake()

    def take(self, arrival: Arrival) -> Ticket | None:
        """The ticket of a copy that begins now, once; None without a fresh one."""
        with self._lock:
            early = self._pop(arrival.job_id, arrival.attempt)
            if early is None:
                return None
            self._wanted = self._wanted or not early.asked
            self._wake()
            self._told.wait_for(lambda: early.done)
        return early.ticket if self._clock.monotonic() - early.asked_at <= EARLY_S else None

    def forget(self, job_id: str, attempt: int | None) -> None:
        """Discards the ticket, because another copy of the job has ended."""
        with self._lock:
            self._pop(job_id, attempt)

    def stop(self) -> None:
        """Ends the thread; jobs whose ticket was not requested yet have none."""
        with self._lock:
            self._ended = True
            self._due.notify()
        self._thread.join(_FLUSH_S)

    def _pop(self, job_id: str, attempt: int | None) -> _Early | None:
        early = self._early.pop((job_id, attempt), None)
        self._ready -= int(early is not None and early.done)
        return early

    def _is_due(self) -> bool:
        return self._ended or bool(self._arrived and (self._wanted or self._ready < self._enough))

    def _wake(self) -> None:
        if self._is_due():
            self._due.notify()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._due.wait_for(self._is_due)
                batch, self._arrived, self._wanted = self._arrived, [], False
                for _, early in batch:
                    early.asked, early.asked_at = True, self._clock.monotonic()
                ended = self._ended
            tickets: Sequence[Ticket | None] = [None] * len(batch)
            if not ended:
                with suppress(Exception):  # each then requests its own, and waits or fails alone
                    tickets = self._begin([arrival for arrival, _ in batch])
            with self._lock:
                for (arrival, early), ticket in zip(batch, tickets, strict=True):
                    early.ticket, early.done = ticket, True
                    self._ready += int(self._early.get((arrival.job_id, arrival.attempt)) is early)
                self._told.notify_all()
            if ended:
                return


@dataclass(slots=True)
class _Early:
    ticket: Ticket | None = None
    asked_at: float = 0.0  # on the monotonic clock
    asked: bool = False
    done: bool = False


class HeldAcks:
    """Acknowledgements that wait for a commit, so that the performing threads need not.

    A job's ``key`` is noted with :meth:`open` before its outcome is passed on, and :meth:`committed` after its commit. An
    acknowledgement that comes in between is held back, and sent by a separate thread, with those that are due at the same
    time: a broker's answer must not delay the next commit. ``make`` takes one or more of what was held.
    """

    def __init__(self, make: Callable[[Sequence[Any]], None]) -> None:
        self._make = make
        self._open: dict[str, _Open] = {}
        self._due: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._log = get_logger("asynctask.engine")

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._run, name="acknowledgements", daemon=True).start()

    def stop(self) -> None:
        """Ends the thread once it has acknowledged what is committed."""
        self._due.put(None)

    def open(self, key: str) -> None:
        """Notes that the outcome of this job is about to be passed on."""
        with self._lock:
            self._open.setdefault(key, _Open()).commits += 1

    def committed(self, key: str) -> None:
        """Notes that it is committed."""
        with self._lock:
            waiting = self._open[key]
            waiting.commits -= 1
            if waiting.commits:
                return
            del self._open[key]
        for ack in waiting.acks:
            self._due.put(ack)

    def hold(self, key: str, ack: Any) -> bool:
        """Whether the acknowledgement of this job has to wait; if so, it is made later."""
        with self._lock:
            waiting = self._open.get(key)
            if waiting is not None:
                waiting.acks.append(ack)
        return waiting is not None

    def when_committed(self, key: str, ack: Any) -> None:
        """Makes ``ack``, on the thread, once nothing of this job waits for its commit."""
        if not self.hold(key, ack):
            self._due.put(ack)

    def _run(self) -> None:
        while (ack := self._due.get()) is not None:
            acks = [ack]
            while not self._due.empty() and len(acks) < _MOST_ACKS and ack is not None:
                ack = self._due.get()
                acks += [] if ack is None else [ack]
            try:
                self._make(acks)
            except Exception as error:  # the jobs are delivered again, and have ended by then
                self._log.warning("not_acknowledged", jobs=len(acks), error=f"{type(error).__name__}: {error}")
            if ack is None:
                return


@dataclass(slots=True)
class _Open:
    commits: int = 0
    acks: list[Any] = field(default_factory=list)


class LoneEvents(Together):
    """Creates the Events of lone jobs before they are sent, or opens those that have ended again.

    Returns what the message says in its header :data:`SENT`; None for a job that the engine sends by itself and that is
    open. Raises :class:`~asynctask.errors.IdInUse`, InputError and LedgerUnavailable: the job must not be sent.
    """

    def __init__(self, app: Dispatching, engine: str) -> None:
        def make(calls: Sequence[tuple[Arrival, bool]]) -> Sequence[int | IdInUse | None]:
            results: list[int | IdInUse | None] = [None] * len(calls)
            left = list(enumerate(calls))
            while left:  # one call, unless an id occurs twice, or the engine sends some of them
                open_too, chosen = left[0][1][1], dict[str, int]()
                for place, (job, by_engine) in left:
                    if by_engine is open_too:
                        chosen.setdefault(job.job_id, place)
                jobs = [calls[place][0] for place in chosen.values()]
                sent = send(app.ledger, jobs, options={ENGINE: engine}, open_too=open_too)
                for job_id, place in chosen.items():
                    results[place] = sent.get(job_id)
                left = [each for each in left if each[0] not in chosen.values()]
            return results

        super().__init__(make)

    def announce(self, job: Arrival, *, by_engine: bool = False) -> list[Any] | None:
        """``by_engine``: the engine sends it by itself, as the next step of others."""
        found: int | IdInUse | None = self((job, by_engine))
        if isinstance(found, IdInUse):
            raise found
        return None if found is None else [job.job_id, found]


def sent_values(
    worker: Worker | None, args: Sequence[Any], kwargs: Mapping[str, Any], *, own: Sequence[Any], is_lone: bool
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments that a running job sends under its own id, for its next run of ``worker``; ``own``: those that it got.

    Of a job of a Task, its item in its model is kept as it was given, and another one as that of a list is; other models by
    the values of their fields. People see the arguments of a lone job, so its secrets are marked. Raises
    :class:`InputError` for a model that JSON cannot represent.
    """
    sent = [_by_fields(arg) for arg in args], {name: _by_fields(arg) for name, arg in kwargs.items()}
    if is_lone:
        return _concealed(worker, *sent)
    if args and worker is not None and worker.model is not None and type(args[0]) is worker.model:
        sent[0][0] = _kept_item(worker, args[0], own)
    return sent


def _kept_item(worker: Worker, item: Any, own: Sequence[Any]) -> Any:
    assert isinstance(worker.shape, ItemShape)
    with suppress(UnfitItem):  # what it got is none of this worker
        if own and isinstance(own[0], Mapping) and worker.shape.revive(dict(own[0])) == item:
            return own[0]
    found = worker.shape.validate(RawRow(1, item), None)
    if isinstance(found, Rejected):
        raise found.error("the job cannot send this item under its own id")
    return found.values


def _by_fields(value: Any) -> Any:
    if not is_model(type(value)):
        return value
    try:
        return orjson.loads(item_text(value, secret_json))
    except TypeError as error:
        why = f"the ledger cannot keep what the job sends under its own id ({error}): send JSON values"
        raise InputError(why, code="not_json") from None


# -- the process


def recording_chain(app: Dispatching, tracker: Tracker) -> Chain:
    """The application's server middleware, as it is now, with the recording middleware innermost."""
    chain = copy(app.server_middleware)
    chain.add(TaskEventMiddleware(tracker, app.config.max_result_bytes))
    return chain


class EngineProcess(AppProcess):
    """The parts that run beside an engine in one of its worker processes: recorder, heartbeat, maintenance, dispatcher.

    Create it in the performing process, after any fork.

    Arguments: ``engine``, its name; ``concurrency``, how many jobs run at once; ``queues``, the engine's own names of those
    that the process works. Raises :class:`~asynctask.errors.SchemaOutdated` and LedgerUnavailable.
    """

    def __init__(self, app: Dispatching, engine: str, *, concurrency: int, queues: Sequence[str] = ()) -> None:
        identity = processes.engine_identity(engine, app.host.name, os.getpid(), app.ids.nonce())
        ledger = replace(app.ledger, identity=identity)
        named = [engine_queue(engine, queue) for queue in queues]
        super().__init__(app, kind=engine, concurrency=concurrency, queues=named, ledger=ledger)
        self._app = app
        self._engine = engine
        self._awaited: dict[threading.Event, None] = {}  # of outcomes whose threads wait for the commit
        self.recorder = Recorder(
            self.ledger,
            linger_s=self._linger_s,
            on_due=self.dispatcher.expect,
            figures=self.figures,
            closes_at_once=False,
        )
        self.tracker = ArrivalTracker(self.ledger, self.recorder)
        self._begin = Together(self.tracker.arrive)
        self._early: EarlyTickets | None = None
        self.chain = recording_chain(app, self.tracker)
        self._clock = app.clock
        self._ids = app.ids
        self._ended_at: float | None = None  # the last job of which the dispatcher was not told, on the monotonic clock
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self.pid = os.getpid()
        self._ticker = threading.Thread(target=self._tick, name="ticker", daemon=True)
        self._log = get_logger("asynctask.engine")

    # -- lifecycle

    def start(self) -> None:
        """Registers the process and starts its parts. Raises LedgerUnavailable."""
        self.register()
        self.recorder.start()
        self.heartbeat.start()
        self.dispatcher.attach(self.ledger)
        self.dispatcher.start()
        self.maintenance.start()
        self._ticker.start()
        self.dispatcher.nudge()

    def quiet(self) -> None:
        """Makes ``should_stop()`` true in running jobs: the engine is shutting down."""
        if not self._stopping.is_set():
            self._stopping.set()
            self.heartbeat.soon()  # the dispatchers give it no more jobs

    def stop(self) -> None:
        """Commits pending records, stops the parts and removes the process."""
        self.quiet()
        self.recorder.stop(_FLUSH_S)
        if self._early is not None:
            self._early.stop()
        self._ended.set()
        self._ticker.join(_FLUSH_S)
        self.dispatcher.stop()
        self.maintenance.stop()
        self.heartbeat.stop()
        self.leave(empty=not self.tracker.running and not self.recorder.waiting)  # in this order: see Running

    # -- steps of a job

    def expect(self, arrival: Arrival) -> None:
        """Notes that a job has arrived and waits for a free thread: its ticket is requested meanwhile, with those of
        others. Without the name of its worker, no Event is made for it."""
        if self._early is None:
            # With half of the threads about to begin, there is time to ask for the others before one of them waits.
            self._early = EarlyTickets(self._arrive_early, self._clock, enough=max(1, self._concurrency // 2))
        if not arrival.broken:
            self._early.expect(arrival)

    def _arrive_early(self, arrivals: Sequence[Arrival]) -> Sequence[Ticket | None]:
        if all(each.worker_name for each in arrivals):
            return self.tracker.arrive(arrivals)
        return self.tracker.begin([(each.job_id, each.attempt) for each in arrivals])

    def job(self, ticket: Ticket, **own: Any) -> CurrentJob:
        """What the code of a job sees."""
        return CurrentJob(
            ticket.job_id, task_id=ticket.task_id, attempt=ticket.attempt, should_stop=lambda: self.should_stop, **own
        )

    def begin(self, arrival: Arrival, *, redelivered: bool = False) -> Ticket:
        """The ticket of a job that arrived. Blocks while the ledger is unavailable: no job begins unrecorded.

        ``redelivered``: the engine has given the same copy to a worker before. If that worker died at once, its start is
        not recorded; so this start is recorded before the job is performed, and the next death counts.

        If its verdict is not ``RUN``, acknowledge the job unrun: it has ended, the ledger has taken it back, or its message
        has no valid attempt.
        """
        if arrival.broken:
            return self.refuse(arrival)
        early = None if self._early is None else self._early.take(arrival)
        ticket: Ticket = early or self._retry_while_away(lambda: self._begin(arrival))
        if ticket.elsewhere and ticket.record.row.process not in (None, self.ledger.identity):
            # Its engine may deliver it again before the death of its process is noticed.
            self._retry_while_away(self.maintenance.recover_dead)
            ticket = self._retry_while_away(lambda: self._begin(arrival))
        if arrival.attempt is not None and ticket.event_id and ticket.is_lone:
            return self.refuse(replace(arrival, broken=f"{arrival.attempt}, that of another job"))
        if ticket.has_ended and arrival.anew and ticket.is_lone:
            options = {ENGINE: self._engine}
            if self._retry_while_away(lambda: reopen(self.ledger, arrival, options=options)):
                ticket = self._retry_while_away(lambda: self._begin(arrival))
        if ticket.verdict in (Begin.GIVE_BACK, Begin.CANCEL) and not ticket.elsewhere:
            done = threading.Event()
            self.tracker.release(Attempt(ticket), lambda won: done.set())
            done.wait()
            self._ended_one(ticket)
        if redelivered and ticket.task_id is not None:
            return replace(ticket, watched=True, is_untouched=False)
        return ticket

    def refuse(self, arrival: Arrival) -> Ticket:
        """Drops a message without a valid attempt. Blocks while the ledger is unavailable.

        The message may be the only one of its job. A job of a Task is left alone, because it may run by another one: if it
        has none, the search for lost copies finds it. That does not search for lone jobs, so the ledger sends them again.
        """
        self._log.error(
            "broken_attempt", job_id=arrival.job_id, found=arrival.broken, worker=clean(arrival.worker_name),
            queue=clean(arrival.queue), hint=_BROKEN,
        )  # fmt: skip
        why, until = f"Its message had no valid attempt: {arrival.broken}", self.ledger.now() + micros(PUT_OFF_S)
        self._retry_while_away(lambda: send_from_ledger(self.ledger, arrival.job_id, why, until))
        return Ticket.made(Begin.DROP, arrival.job_id)

    def put_off(self, arrival: Arrival, why: str, seconds: float) -> None:
        """Makes a job that the ledger keeps and that cannot be performed here wait there for this long. Blocks while the
        ledger is unavailable."""
        ticket: Ticket = self._retry_while_away(lambda: self._begin(arrival))
        if ticket.verdict is Begin.RUN:
            until = self.ledger.now() + micros(seconds)
            self._retry_while_away(lambda: self.tracker.put_off([(Attempt(ticket), why)], until))

    def known(self, job_id: str, attempt: int | None = None) -> Ticket | None:
        """The ticket of a job that has an Event, None for others. Blocks while the ledger is unavailable.

        ``attempt``: its fence, None for a lone job.
        """
        return self._retry_while_away(lambda: self.tracker.begin([(job_id, attempt)])[0])

    def _retry_while_away(self, operation: Callable[[], T]) -> T:
        pause = threading.Event()
        while True:
            try:
                return operation()
            except Unavailable as error:
                self._log.retrying("ledger_away", error=str(error))
                pause.wait(AWAY_S)

    def settle(self, attempt: Attempt, *, delay_s: float | None = None, discarded: str | None = None) -> None:
        """Records the outcome and blocks until it is committed; all threads of the process share one commit. ``delay_s``:
        another try follows in this many seconds.

        A callback is tried five times, however often its engine retries.
        """
        if attempt.is_settled:
            return
        if attempt.ticket.record.callback_of is not None and discarded is None:
            delay_s = self._callback_delay(attempt, delay_s)
        retry_at = None if delay_s is None else self.ledger.now() + micros(delay_s)
        done = threading.Event()
        self._awaited[done] = None
        try:
            if self._settle(attempt, done.set, retry_at, discarded):
                done.wait()
        finally:
            del self._awaited[done]

    def _callback_delay(self, attempt: Attempt, delay_s: float | None) -> float | None:
        if attempt.result is None or attempt.result.kind not in _ERRORS:
            return delay_s
        retries = attempt.ticket.retries
        if retries >= CALLBACK_RETRIES or attempt.is_final:
            return None
        return backoff(retries, self._ids.random()) if delay_s is None else delay_s

    def settle_later(self, attempt: Attempt, then: Callable[[], None] = lambda: None) -> None:
        """Passes on the outcome of a last attempt; ``then`` is called once it is committed. Acknowledge the job there."""
        self._settle(attempt, then)

    def _settle(
        self, attempt: Attempt, then: Callable[[], None], retry_at: int | None = None, discarded: str | None = None
    ) -> bool:
        ticket = attempt.ticket
        call_hooks(self._app, attempt, is_retried=retry_at is not None)

        def committed(won: bool) -> None:
            if self._early is not None:  # tickets for other copies of this attempt are void
                self._early.forget(ticket.job_id, None if ticket.elsewhere else ticket.attempt)
            then()

        is_first = self.tracker.settle(attempt, retry_at=retry_at, discarded=discarded, then=committed)
        if is_first:
            self._ended_one(ticket)
        return is_first

    def recover(self, attempt: Attempt) -> None:
        """Records that the process that performed a job died, while this one, which records it, lives: the ledger or its
        engine delivers the job again, or it ends as poison. Blocks until that is committed."""
        self.tracker.save(attempt)  # only a job that is known to have begun counts the death
        self._retry_while_away(lambda: processes.recover_job(self.ledger, attempt.ticket.event_id))
        self.tracker.forget(attempt)
        self.dispatcher.nudge()

    @property
    def should_stop(self) -> bool:
        """Whether the process is shutting down."""
        return self._stopping.is_set()

    # -- parts

    def _linger_s(self) -> float:
        """An outcome that a thread waits for is written at once, others with those that follow."""
        return LINGER_S if self.tracker.running and not self._awaited else 0.0

    def facts(self) -> dict[str, Any]:
        return {
            "busy": len(self.tracker.running),
            "quiet": int(self.should_stop),
        }

    def worked(self) -> tuple[int, float]:
        return self.recorder.recorded, self.tracker.running.busy_s

    def obey(self, name: str) -> None:
        if name == processes.LOST:
            super().obey(name)  # its jobs continue: outcomes of those given to others do not count
        else:
            self._log.warning("signal_not_for_engines", signal=name, hint=f"quiet or stop {self._engine} by its own means")

    def _ended_one(self, ticket: Ticket) -> None:
        """A job has ended, or went back unrun: its thread may be idle, and its loan over. A lone one has no loan."""
        if not ticket.is_lone:
            self._ended_at = self._clock.monotonic()
        if not self.tracker.running and not self.should_stop:
            self.dispatcher.ended()

    def _tell_dispatcher(self) -> None:
        """Runs a pass a moment after a job has ended, if a thread is idle: only passes end the loans of a queue. While
        another process leads, its passes do."""
        ended_at = self._ended_at
        if ended_at is None or len(self.tracker.running) >= self._concurrency:
            return
        if self._clock.monotonic() - ended_at >= LONG_S / 2 and not self.dispatcher.is_led_elsewhere(self._engine):
            self._ended_at = None
            self.dispatcher.nudge()

    def _tick(self) -> None:
        ticks = itertools.count(1)
        while not self._ended.wait(LONG_S):
            self.tracker.note_long(LONG_S)
            self._tell_dispatcher()
            if next(ticks) % LOOK_EVERY:
                continue
            try:
                self.tracker.ask_stops()  # a query only while a job runs that was recorded as ``working``
            except Exception as error:  # the next one follows; the request to stop is in the ledger
                self._log.warning("stops_not_read", error=f"{type(error).__name__}: {error}"[:500])


# -- the engine


class RecordingGone(Exception):
    """The recording process is dead, so nothing can be recorded: leave the job to its recovery."""


class Unwanted(Exception):
    """A job that has arrived must not be performed: acknowledge it."""


class IdTaken(ValueError):
    """A lone job has the id of a job of a Task: fail it, and leave that one alone."""


class Performer(Protocol):
    """Through what a process that performs jobs has them recorded: its own :class:`EngineProcess`, or its connection to one
    (:class:`~asynctask.integrations.recording.ChildPerformer`)."""

    pid: int
    chain: Chain

    def job(self, ticket: Ticket, **own: Any) -> CurrentJob: ...

    def begin(self, arrival: Arrival, *, redelivered: bool = False) -> Ticket: ...

    def settle(self, attempt: Attempt, *, delay_s: float | None = None) -> None: ...

    def settle_later(self, attempt: Attempt, then: Callable[[], None] = lambda: None) -> None: ...

    @property
    def should_stop(self) -> bool: ...

    def stop(self) -> None: ...


@dataclass(slots=True, kw_only=True, eq=False)
class Performed(Attempt):
    """The job that this thread performs.

    ``message``: the engine's own object of it; ``is_called``: its function was called; ``is_performing``: it has not
    returned yet; ``error``: the last that it, or a middleware around it, raised.
    """

    job: CurrentJob
    worker: Worker
    performer: Any
    message: Any
    is_called: bool = False
    is_performing: bool = False
    error: BaseException | None = None

    def raised(self, error: BaseException, cause: BaseException | None = None) -> None:
        self.error = self.error if cause is None else cause
        Attempt.raised(self, error, cause)

    def traced(self, error: BaseException, cause: BaseException | None = None) -> str | None:
        """None before the engine has named the cause: until then the exception may ask for another run, which is on its way
        and must not overtake the record of this one."""
        if cause is None:
            return None
        payload = self.job.payload
        try:
            args = _concealed(self.worker, payload.get("args") or (), payload.get("kwargs") or {})
        except (TypeError, ValueError):  # no JSON
            args = [], {}
        return traceback_of(cause, args)


def call_hooks(app: Dispatching, attempt: Attempt, *, is_retried: bool) -> None:
    """Calls the application's hooks for an attempt that raised, in the process that performed it."""
    result = attempt.result
    if not isinstance(attempt, Performed) or attempt.error is None or attempt.is_settled:
        return
    if result is None or result.kind not in _ERRORS:
        return
    job, follow = attempt.job, "retry" if is_retried else "dead"
    context = {"job_id": job.job_id, "worker": attempt.worker.name, "follow": follow}
    app.fire("error", attempt.error, {**context, "task_id": job.task_id, "attempt": job.attempt, "args": job.args})
    if not is_retried:
        app.fire("death", job, attempt.error)


class Engine(ABC):
    """An attached engine: what all of them do alike.

    The module of an engine derives its own from it. It gives the hooks below, and calls the rest from whatever that engine
    calls for a job: :meth:`announce` and :meth:`send_itself` where one is sent, :meth:`start` and :meth:`stop` in a worker
    process, :meth:`begin`, :meth:`call` and the ``settle`` of the job's :class:`Performer` for one that has arrived.

    Attributes: ``title``, what people call it; ``name``, 1 to 8 small letters; ``capabilities``; ``concurrency`` and
    ``queue_names`` (its own), of the worker process; ``tracked``, the workers by name, also that of the merge; ``thread``,
    what one thread does: ``current``, its job, and ``is_pushing``; ``acks``, of an engine whose threads acknowledge.
    """

    title: str
    attempts: type[Performed] = Performed
    acks: HeldAcks

    # -- hooks: what this engine's API forces

    @abstractmethod
    def name_of(self, target: object) -> str | None:
        """The worker's name of a task or an actor of this engine; None for anything else."""

    @abstractmethod
    def put(self, jobs: Sequence[PushedJob]) -> None:
        """Puts jobs on their queues under their ids; each carries its ``attempt``, which :meth:`begin` gets back in the
        :class:`Arrival`."""

    @abstractmethod
    def count(self, queues: Sequence[str]) -> Sequence[int]:
        """How many jobs wait in each of these queues, by the engine's own names."""

    @abstractmethod
    def away(self) -> tuple[type[BaseException], ...]:
        """The exceptions of a broker that does not answer."""

    def may_hold(self, queue: str, worker: str) -> bool:
        """Whether idle workers of this queue may hold jobs of this worker that they have not begun."""
        return False

    def revoke(self, job_id: str, queue: str) -> str | None:
        """Prevents a lone job of this queue (by the ledger's name) from beginning.

        Returns None if it has not begun and none of its copies will, else the reason. Raises
        :class:`~asynctask.errors.BrokerUnavailable`. Called only with the capability ``revokes``.
        """
        raise NotImplementedError

    def ends_process(self, error: SystemExit) -> bool:
        """Whether the engine, and not the job, raised this, to end its process."""
        return False

    def understood(self, current: Any, error: BaseException) -> BaseException:
        """What an exception of the engine's own says: a :class:`~asynctask.errors.JobTimeout` or
        :class:`~asynctask.errors.JobInterrupted`."""
        return error

    def made(self) -> Performer:
        """What records in this process, started. Raises LedgerUnavailable."""
        process = self.process()
        process.start()
        return process

    # -- what they do alike

    def __init__(self, app: Attachable, name: str, capabilities: EngineCapabilities) -> None:
        self.app = app
        self.name = name
        self.capabilities = capabilities
        self.concurrency = 1
        self.queue_names: Sequence[str] = ()
        self.tracked = EngineWorkers()
        self.thread: Any = threading.local()
        self.performer: Performer | None = None
        self.log = get_logger(f"asynctask.{self.title.lower()}")
        self._lone_events = LoneEvents(app, name)
        self._starting = threading.Lock()
        self._is_stopped = False

    @property
    def workers(self) -> Mapping[str, Worker]:
        """What it can perform as this process knows it, by name: a live mapping."""
        return self.tracked.listed

    @property
    def current(self) -> Any:
        """The job that this thread performs."""
        return getattr(self.thread, "current", None)

    def performs(self, job_id: str | None) -> Any:
        """The job that this thread performs, if it has this id."""
        current = self.current
        return current if current is not None and current.ticket.job_id == job_id else None

    @property
    def is_pushing(self) -> bool:
        """Whether this thread is in :meth:`push`."""
        return getattr(self.thread, "is_pushing", False)

    def push(self, copies: Sequence[Copy]) -> None:
        """Pushes jobs to their queues under their ids. Raises BrokerUnavailable."""
        self.thread.is_pushing = True
        try:
            with self.reached():
                self.put([pushed_job(copy) for copy in copies])
        finally:
            self.thread.is_pushing = False

    def waiting(self, queues: Collection[str]) -> Mapping[str, int]:
        """How many jobs wait in each of these queues. Raises BrokerUnavailable."""
        with self.reached():
            return dict(zip(queues, self.count([*map(own_name, queues)]), strict=True))

    @contextmanager
    def reached(self) -> Iterator[None]:
        """Raises BrokerUnavailable in place of the broker's own exceptions."""
        try:
            yield
        except self.away() as error:  # RabbitMQ's client has some without a text
            text = f"the broker of {self.title} does not answer: {error or type(error).__name__}"
            raise BrokerUnavailable(text) from error

    # -- workers

    def declared(
        self,
        name: str,
        function: Callable[..., Any],
        queue: str,
        *,
        failed_on: Collection[type[BaseException]] | type[BaseException] = (),
        columns: Sequence[str] | None = None,
        rate: str | None = None,
        limit: str | None = None,
        search: Sequence[str] | str | None = None,
    ) -> Worker:
        """The worker of a function; its first parameter gives the form of an item.

        ``queue``: the engine's own name of its queue. ``columns``: the function yields the rows of a shard, which is any
        JSON; wrap it with :meth:`writing`. ``rate``, ``limit``, ``search``: as of :meth:`asynctask.AsyncTask.worker`.
        Raises :class:`ConfigError`.
        """
        _, _, is_async, model = describe(function)
        names = () if columns is None else check_columns(columns, function)
        if names:
            model = None
        fields = (search,) if isinstance(search, str) else tuple(search or ())
        shape = ItemShape(model, max_item_bytes=self.app.config.max_item_bytes, search=fields)
        try:
            shape.check_search()
        except InputError as error:
            raise ConfigError(f"{name}: {error}") from None
        worker = Worker(
            name,
            function,
            queue=engine_queue(self.name, queue),
            retry=0,
            failed_on=(failed_on,) if isinstance(failed_on, type) else tuple(failed_on),
            is_async=is_async,
            model=model,
            shape=shape,
            search=shape.search,
            engine=self.name,
            columns=names,
            rate=rate,
            limit=limit,
        )
        declared_rates({**self.app.workers, name: worker})
        return worker

    def writing(self, worker: Worker, function: Callable[..., Any]) -> Callable[..., Any]:
        """The callable for jobs of a function: for one that yields the rows of a shard, it writes their part; else the
        function itself."""
        if not worker.columns:
            return function

        @functools.wraps(function)
        def write(*args: Any, **kwargs: Any) -> Any:
            return write_shard(self.app, worker.columns, lambda: function(*args, **kwargs))

        return write

    def merging(self) -> Callable[..., Any]:
        """The function that the engine registers under the name ``MERGER`` with its first export."""

        def merge_parts(said: Mapping[str, Any], progress: Mapping[str, Any]) -> dict[str, Any]:
            """Merges the parts of an export."""
            return merge(self.app, progress)

        return merge_parts

    # -- sending

    def params(self, worker: Worker | None, job_id: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The arguments of a lone job as its Event stores them, with secrets of an item marked; None if they are not JSON,
        too large, or no arguments, as a message may hold."""
        params: Any = None
        try:
            args, kwargs = _concealed(worker, args, kwargs)
            params = {"args": args, "kwargs": kwargs} if kwargs else args
            kept = len(dumps(params)) <= self.app.config.max_item_bytes
        except (TypeError, ValueError):  # the engine has another serializer
            kept = False
        if not kept:
            self.log.info("params_not_kept", job_id=job_id)
        return params if kept else None

    def indexed(self, worker: Worker, args: Any) -> Sequence[SearchValue]:
        """What a search finds a lone job by: its first argument."""
        is_item = worker.search and isinstance(args, list | tuple) and args
        return worker.shape.indexed(args[0]) if is_item and worker.shape is not None else ()

    def announce(
        self, job_id: str, worker: Worker, queue: str, args: Any, kwargs: Any, *, by_engine: bool = False
    ) -> list[Any] | None:
        """Makes the Event of a lone job that is about to be sent to ``queue``, see :class:`LoneEvents`."""
        params = self.params(worker, job_id, args, kwargs)
        where, search = engine_queue(self.name, queue), self.indexed(worker, args)
        arrival = Arrival(job_id, None, worker.name, where, params, search=search)
        return self._lone_events.announce(arrival, by_engine=by_engine)

    def send_itself(
        self,
        current: Performed,
        name: str,
        queue: str,
        args: Any,
        kwargs: Any,
        own: Any,
        *,
        delay_s: float = 0.0,
        retries: int = 0,
    ) -> None:
        """Notes that a job sends another run under its own id, see :func:`~asynctask.arrivals.send_itself`. ``own``: the
        arguments that it got."""
        values = sent_values(self.tracked.get(name), args, kwargs, own=own, is_lone=current.ticket.elsewhere)
        send_itself(current, NextRun(name, engine_queue(self.name, queue), *values, delay_s, retries))

    def end(self, job_id: str, why: str = "", *, timeout_s: float | None = None, lone_only: bool = False) -> None:
        """Ends a job that no :class:`Performer` ends: it was never sent, or the engine gave it up outside of them."""
        try:
            end_elsewhere(self.app.ledger, job_id, why, timeout_s=timeout_s, lone_only=lone_only)
        except Unavailable as error:
            self.log.error("end_not_recorded", job_id=job_id, error=str(error))

    # -- the worker process

    def check_schema(self) -> None:
        """Raises SchemaOutdated and ConfigError in a worker that could record nothing; before it forks."""
        try:
            self.app.ensure_schema()
        except Unavailable as error:
            self.log.retrying("ledger_away", error=str(error))
        finally:
            self.app.close()  # a process that is forked opens its own connections

    def process(self) -> EngineProcess:
        """What records beside this engine, in the process that does; not started."""
        return EngineProcess(self.app, self.name, concurrency=self.concurrency, queues=self.queue_names)

    def start(self) -> None:
        """Starts what records in this process. Without the ledger, a thread goes on trying: lists are dispatched to
        registered workers only, so no job would come that could."""
        self._is_stopped = False
        try:
            self._renew()
        except Unavailable as error:
            self.log.retrying("ledger_away", error=str(error))
            threading.Thread(target=self._try_on, args=(lambda: self._is_stopped,), name="start", daemon=True).start()

    def started(self) -> Performer:
        """What records in this process. Blocks until it has started, also while the schema is outdated: an operator mends
        that, and no job begins unrecorded. Raises RecordingGone."""
        while (performer := self.performer) is None or performer.pid != os.getpid():
            self._try_on(lambda: False)
        return performer

    def _try_on(self, is_over: Callable[[], bool]) -> None:
        pause = threading.Event()
        while not is_over():
            try:
                self._renew()
                return
            except Unavailable as error:
                self.log.retrying("ledger_away", error=str(error))
            except RecordingGone:
                raise
            except Exception:
                self.log.exception("not_started")
            pause.wait(AWAY_S)

    def _renew(self) -> None:
        with self._starting:
            if self.performer is None or self.performer.pid != os.getpid():
                self.performer = self.made()

    def stop(self) -> None:
        """Stops what records in this process."""
        self._is_stopped = True
        performer, self.performer = self.performer, None
        if performer is not None and performer.pid == os.getpid():
            performer.stop()

    # -- a job that has arrived

    def arrival(
        self,
        worker: Worker,
        job_id: str,
        fence: Fence,
        queue: str,
        args: Any,
        kwargs: Any,
        *,
        sent: Any = None,
        anew: bool = False,
    ) -> Arrival:
        """A job that has arrived through ``queue``, by the engine's own name. ``sent``: the header :data:`SENT` of its
        message. Only an Event of a lone job can be made of its arguments."""
        is_lone = fence.attempt is None and not fence.broken
        params, search = (self.params(worker, job_id, args, kwargs), self.indexed(worker, args)) if is_lone else (None, ())
        at, anew = sent_at(sent, job_id), anew and fence.attempt is None
        where = engine_queue(self.name, queue)
        return Arrival(
            job_id, fence.attempt, worker.name, where, params, sent_at=at, anew=anew, broken=fence.broken, search=search
        )

    def begin(
        self, arrival: Arrival, worker: Worker, message: Any, payload: dict[str, Any], *, redelivered: bool = False
    ) -> Any:
        """The job of an arrival. Blocks while the ledger is unavailable. Raises :class:`Unwanted`, :class:`IdTaken` and
        :class:`RecordingGone`."""
        performer = self.started()
        ticket = performer.begin(arrival, redelivered=redelivered)
        if ticket.verdict is not Begin.RUN:
            raise Unwanted(
                f"job {arrival.job_id} has ended, the ledger has taken it back, or its message has no valid attempt"
            )
        if not ticket.is_lone and arrival.attempt is None:
            raise IdTaken(f"{arrival.job_id} is the id of another job, which the ledger keeps")
        job = performer.job(ticket, queue=own_name(arrival.queue), payload=payload)
        current = self.attempts(ticket, job=job, worker=worker, performer=performer, message=message)
        current.bind(job)
        return current

    def call(self, current: Performed, function: Callable[[], Any]) -> Any:
        """Calls the function of a job through the middleware. What the whole chain raises has the last word on the outcome,
        and is raised."""
        calls = functools.partial(performed, is_engines=self.ends_process)

        def inner() -> Any:
            try:
                return calls(function)
            except BaseException as error:
                current.error = error
                raise

        token = set_current_job(current.job)
        current.is_performing = True
        try:
            return calls(current.performer.chain.invoke, current.worker, current.job, current.job.queue, inner)
        except BaseException as error:
            current.error = error
            self.conclude(current, error)
            raise
        finally:
            current.is_performing = False
            reset_current_job(token)

    def settle_later(self, current: Performed, then: Callable[[], None] = lambda: None) -> None:
        """Passes on the outcome of a last attempt, for an engine that uses it no more: the acknowledgement waits in
        ``acks`` for the commit, and this thread does not. ``then`` is called after that."""
        job_id = current.ticket.job_id
        self.acks.open(job_id)

        def committed() -> None:
            self.acks.committed(job_id)
            then()

        current.performer.settle_later(current, committed)

    def conclude(self, current: Any, error: BaseException) -> None:
        """Sets the outcome of a job from what was raised."""
        if current.worker.refuses(error):
            current.fail(error)
        else:
            current.raised(self.understood(current, error), error)
