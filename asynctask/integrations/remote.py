"""Workers in another language: their records of jobs, and the processes that send them.

Such a process takes copies from Redis by itself. It has no object of this library, so it sends the outcomes of its jobs to
a process of the application, which writes the records (:class:`RemoteTracker`) and keeps its lease
(:class:`RemoteWorkers`).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import orjson

from asynctask.clock import rfc3339
from asynctask.core.states import Reason, Status
from asynctask.core.transitions import Begin, begin
from asynctask.errors import ConfigError, Conflict, InputError, Unavailable
from asynctask.ledger import processes
from asynctask.ledger.base import Ledger, dumps
from asynctask.ledger.events import EventRecord, Failure, Note, untouched
from asynctask.ledger.processes import engine_of
from asynctask.ledger.recorder import Outcome, Recorder
from asynctask.ledger.standalone import ENGINE, MAX_JOB_ID, Arrival, enqueue, fitted, is_job_id, last_message_is
from asynctask.logs import get_logger
from asynctask.messages import clean
from asynctask.middleware.tracker import Ticket, Tracker
from asynctask.runtime.process import Dispatching

# -- records

RECORDS: Final = ("working", "finish", "failed", "error", "interrupted")
"""The statuses of a record: the job began, returned, was refused by the business, raised, or was interrupted by the
shutdown of its process."""

_UNKNOWN_ENGINE: Final = "remote"

_SEVERAL: Final = "workers in another language perform jobs of one item: submit its items without chunk_size"


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A record that a worker in another language sends about a job.

    ``status``: one of :data:`RECORDS`; ``attempt``: the fence that the job carries, None for a job that its own engine
    keeps; ``will_retry`` and ``retry_at`` (microseconds, default: at once): another attempt follows an ``error``;
    ``worker``, ``queue`` and ``args``: for a new Event; ``started_at`` (microseconds): the start of this attempt;
    ``result``: of one that returned.
    """

    job_id: str
    status: str
    message: str = ""
    attempt: int | None = None
    will_retry: bool = False
    retry_at: int | None = None
    worker: str | None = None
    queue: str = "default"
    args: Sequence[Any] | None = None
    started_at: int | None = None
    result: Any = None

    def check(self) -> None:
        """Raises :class:`InputError` for values that an Event cannot have."""
        if self.status not in RECORDS:
            raise InputError(f"no record: {self.status!r}; there are {', '.join(RECORDS)}", code="not_recordable")
        if not is_job_id(self.job_id):
            raise InputError(
                f"a job id has 1 to {MAX_JOB_ID} characters, and no NUL or half a character among them",
                code="not_recordable",
            )


@dataclass(frozen=True, slots=True)
class Recorded:
    """The result of a record. ``counted``: it changed the Event, or is the ``working`` that the Event has. ``status`` and
    ``attempt`` are the Event's now, None without one."""

    job_id: str
    counted: bool
    status: str | None
    attempt: int | None


class RemoteTracker:
    """Writes records of workers in another language, many in one transaction.

    The ledger keeps jobs with an attempt, or of a Task: their retries wait there, and a record of an older attempt does not
    count. Other jobs are kept by their own engine. A record that arrives twice counts once: by its attempt, or by the start
    of its attempt.

    ``ledger`` has the identity of the process that performs the jobs, or none; ``limit``: bytes of a result.
    """

    def __init__(self, ledger: Ledger, *, on_due: Callable[[int], None] = lambda at: None, limit: int = 65_536) -> None:
        self._ledger = ledger
        self._limit = limit
        self._recorder = Recorder(ledger, on_due=on_due)
        self._tracker = Tracker(ledger, self._recorder)

    def record(self, records: Sequence[JobRecord]) -> list[Recorded]:
        """Writes them in order, and returns the result of each. Raises :class:`InputError`, LedgerUnavailable: some may be
        recorded then, and all may be sent again."""
        for record in records:
            record.check()
        answers: dict[int, Recorded] = {}
        left = list(enumerate(records))
        while left:  # one transaction, unless a job occurs twice
            wave: dict[str, tuple[int, JobRecord]] = {}
            later = [each for each in left if wave.setdefault(each[1].job_id, each) is not each]
            for (place, _), answer in zip(wave.values(), self._record([r for _, r in wave.values()]), strict=True):
                answers[place] = answer
            left = later
        return [answers[place] for place in range(len(records))]

    def _record(self, records: Sequence[JobRecord]) -> list[Recorded]:
        known = self._events(records)
        counted: dict[str, bool] = {}
        outcomes = []
        for record in records:
            event = known.get(record.job_id)
            if event is not None and _is_current(record, event):
                outcomes += self._outcomes(record, event, partial(counted.__setitem__, record.job_id))
        if outcomes:
            self._recorder.commit(outcomes)
        # The result of a counted record is known, unless the job waits again: its Task may be cancelled.
        ended = {r.job_id: r for r in records if counted.get(r.job_id) and not (r.will_retry or r.status == "interrupted")}
        now = self._tracker.read([record.job_id for record in records if record.job_id not in ended])
        return [
            Recorded(record.job_id, True, record.status, known[record.job_id].row.attempt)
            if record.job_id in ended
            else _recorded(record.job_id, counted.get(record.job_id, False), now.get(record.job_id))
            for record in records
        ]

    def _events(self, records: Sequence[JobRecord]) -> dict[str, EventRecord]:
        """The Events of these jobs; unknown ones are created if their worker is named."""
        known = self._tracker.read([record.job_id for record in records])
        new = [record for record in records if record.job_id not in known and record.worker]
        for is_kept, options in ((False, {ENGINE: engine_of(self._ledger.identity) or _UNKNOWN_ENGINE}), (True, None)):
            jobs = [_new_job(record) for record in new if (record.attempt is not None) is is_kept]
            if jobs:
                enqueue(self._ledger, jobs, options=options)
        return known | self._tracker.read([record.job_id for record in new]) if new else known

    def _outcomes(self, record: JobRecord, event: EventRecord, count: Callable[[bool], None]) -> list[Outcome]:
        """The outcomes to write for a record of the current attempt. ``count`` is called with whether the record counts."""
        if event.row.items > 1 and record.status != "interrupted":
            return [self._refused_slice(event)]
        if record.status == "working":
            return self._begin(record, event, count)
        text, retry_at = clean(record.message), None
        ticket = Ticket(
            Begin.RUN, event.job_id, event.id, event.task_id, event.row.attempt, event.row.retries,
            elsewhere=_is_elsewhere(record, event), started_at=self._started_at(record),
            said=event.row.status is Status.WORKING,
            seen=event if untouched(event) and not _is_elsewhere(record, event) else None,
        )  # fmt: skip
        if record.status == "finish":
            ticket.finish(record.result, self._limit)
        elif record.status == "failed":
            ticket.status, ticket.reason, ticket.failure = Status.FAILED, Reason.REFUSED, Failure("failed", text)
        elif record.status == "interrupted":
            ticket.status, ticket.reason = Status.ERROR, Reason.INTERRUPTED
            retry_at = self._ledger.now() if ticket.elsewhere else None  # its own engine delivers it again
        else:
            ticket.status, ticket.reason, ticket.failure = Status.ERROR, Reason.RAISED, Failure("raised", text)
            retry_at = max(record.retry_at or 0, self._ledger.now()) if record.will_retry else None
        is_told = ticket.failure is not None or not text
        opening = 0 if ticket.said else 1
        outcome = self._tracker.outcome(ticket, retry_at, then=count)
        outcome.doubtful = True  # bound to the attempt that was read, so that one sent twice concurrently is written once
        if not is_told:
            outcome.notes = [*outcome.notes[:opening], Note("working", text), *outcome.notes[opening:]]
        return [outcome]

    def _refused_slice(self, event: EventRecord) -> Outcome:
        """The end of a job of several items: a worker that knows jobs of one item only cannot report on each, so its
        records do not count. Told so when it begins, it performs none of them."""
        ticket = Ticket(Begin.RUN, event.job_id, event.id, event.task_id, event.row.attempt, event.row.retries)
        outcome = self._tracker.outcome(ticket, None, discarded=_SEVERAL)
        outcome.doubtful = True
        return outcome

    def _begin(self, record: JobRecord, event: EventRecord, count: Callable[[bool], None]) -> list[Outcome]:
        row, text = event.row, [Note("working", clean(record.message))] if record.message else []
        if row.status is Status.WORKING and row.process == self._ledger.holder:
            count(True)
            if not text or last_message_is(event.messages, text[0].message):
                return []
            return [Outcome(event.id, row.attempt, Status.WORKING, Reason.STARTED, notes=text)]
        elsewhere = _is_elsewhere(record, event)
        verdict = begin(row, None if elsewhere else row.attempt, event.task_state)
        if verdict is Begin.CANCEL:
            return [Outcome(event.id, row.attempt, Status.CANCELLED, Reason.CANCELLED)]
        if verdict is Begin.GIVE_BACK:
            return [Outcome(event.id, row.attempt, Status.ENQUEUE, Reason.GIVEN_BACK)]
        if verdict is Begin.DROP:
            return []
        started_at = self._started_at(record)
        notes = [Note("working", self._ledger.catalogue("working"), started_at), *text]
        return [
            Outcome(
                event.id,
                row.attempt,
                Status.WORKING,
                Reason.STARTED,
                notes=notes,
                values={"started_at": started_at},
                then=count,
                elsewhere=elsewhere,
                doubtful=True,
            )
        ]

    def _started_at(self, record: JobRecord) -> int:
        return self._ledger.now() if record.started_at is None else record.started_at


def _is_elsewhere(record: JobRecord, event: EventRecord) -> bool:
    """Whether the job's own engine keeps it."""
    return record.attempt is None and event.is_lone


def _is_current(record: JobRecord, event: EventRecord) -> bool:
    """Whether a record concerns the Event's current attempt, and that may be running."""
    row = event.row
    if row.status not in (Status.ENQUEUE, Status.WORKING) or row.due_at is not None or not row.reserved:
        return False
    if record.attempt is not None:
        return record.attempt == row.attempt
    return record.started_at is None or not _has_ended(event, record.started_at)


def _new_job(record: JobRecord) -> Arrival:
    """The arrival of a new job; its engine keeps the arguments, which are only shown here, so those that do not fit are
    left out."""
    job = Arrival(record.job_id, record.attempt, record.worker or "", record.queue, record.args)
    return fitted(job)[0]


def _has_ended(event: EventRecord, started_at: int) -> bool:
    """Whether the attempt that began at ``started_at`` has its outcome, by its messages."""
    at = rfc3339(started_at)
    said: list[Mapping[str, Any]] = orjson.loads(event.messages) if event.messages else []
    return any(each.get("at") == at and each.get("attempt", 0) < event.row.attempt for each in said)


def _recorded(job_id: str, counted: bool, event: EventRecord | None) -> Recorded:
    if event is None:
        return Recorded(job_id, False, None, None)
    return Recorded(job_id, counted, str(event.row.status), event.row.attempt)


# -- the processes

_ENGINE: Final = re.compile(r"[a-z]{1,8}")
_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,55}")
_SIGNALS: Final = {"TSTP": "quiet", "TERM": "stop"}
_RENEW_S: Final = 1.0
"""Shortest time between two writes of a process that sends records continuously."""


class ProcessLost(Conflict):
    """The process was silent for longer than its lease, and its jobs were given to others."""

    code = "process_lost"


@dataclass(frozen=True, slots=True)
class Reporter:
    """A worker process in another language.

    ``engine``: its runtime, 1 to 8 small letters; ``name``: its own, unique in its life, such as HOST:PID:NONCE.
    ``concurrency``, ``busy`` and ``quiet`` determine what its ``queues``, of this application's broker, can use. ``ended``:
    it performs nothing any more.
    """

    engine: str
    name: str
    concurrency: int = 0
    queues: Sequence[str] = ()
    busy: int = 0
    quiet: bool = False
    ended: bool = False

    @property
    def identity(self) -> str:
        """Its name in the ledger."""
        return f"{self.engine}@{self.name}"


class RemoteWorkers:
    """Accepts the records of worker processes in other languages, and renews the lease of each with them."""

    def __init__(self, app: Dispatching) -> None:
        self._app = app
        self._renewed: dict[str, tuple[float, Reporter]] = {}
        self._lock = threading.Lock()
        self._log = get_logger("asynctask.remote")

    def record(self, records: Sequence[JobRecord], reporter: Reporter | None = None) -> tuple[list[Recorded], str | None]:
        """Records what a process sends; returns the results, and the request to it: ``quiet``, ``stop`` or None.

        Without a reporter nobody notices when a worker dies. Raises :class:`InputError`, LedgerUnavailable; and
        :class:`ProcessLost`, with nothing recorded: the process takes another name and sends the records again.
        """
        ledger = self._app.ledger.under("" if reporter is None else reporter.identity)
        signal = None if reporter is None else self._renew(ledger, reporter)
        tracker = RemoteTracker(ledger, on_due=self._app.dispatcher.expect, limit=self._app.config.max_result_bytes)
        recorded = tracker.record(records)
        self._forget_copies(records)
        if reporter is not None and reporter.ended:
            processes.leave(ledger)
        return recorded, signal

    def _renew(self, ledger: Ledger, reporter: Reporter) -> str | None:
        config, now = self._app.config, self._app.clock.monotonic()
        every_s = min(_RENEW_S, config.heartbeat_s, config.lease_s / 3)
        at, known = self._renewed.get(reporter.identity, (0.0, None))
        if known is not None and now - at < every_s and _constant(known) == _constant(reporter):
            return None
        if known is None:
            self._register(ledger, reporter)
        queues = dumps(list(reporter.queues))
        left = processes.beat(
            ledger, lease_s=config.lease_s, concurrency=reporter.concurrency, queues=queues,
            busy=min(reporter.busy, reporter.concurrency), quiet=int(reporter.quiet),
        )  # fmt: skip
        with self._lock:
            oldest = now - config.lease_s
            self._renewed = {name: each for name, each in self._renewed.items() if each[0] > oldest}
            self._renewed[reporter.identity] = now, reporter
            if left == processes.LOST or reporter.ended:
                del self._renewed[reporter.identity]
        if left == processes.LOST:
            raise ProcessLost(
                f"{reporter.identity} was silent for longer than lease_s ({config.lease_s:g} s), so its jobs were given to"
                " others; go on under another name"
            )
        return None if left is None else _SIGNALS.get(left)

    def _register(self, ledger: Ledger, reporter: Reporter) -> None:
        if not _ENGINE.fullmatch(reporter.engine) or reporter.engine in self._app.engines:
            raise InputError(
                f"a process's engine has 1 to 8 small letters, and is none that is attached: {reporter.engine[:80]!r}",
                code="bad_process",
            )
        if not _NAME.fullmatch(reporter.name):
            raise InputError(
                f"a process's name has 1 to 55 letters, digits and _ . : -, not {reporter.name[:80]!r}", code="bad_process"
            )
        parts = reporter.name.split(":")
        pid = int(parts[1]) if len(parts) > 1 and parts[1].isdecimal() and len(parts[1]) < 10 else 0
        try:
            # Without a boot id only its lease counts, because its pid may belong to another machine.
            processes.register(
                ledger, processes.Host(parts[0], ""), kind=reporter.engine, pid=pid, lease_s=self._app.config.lease_s,
                concurrency=reporter.concurrency, queues=reporter.queues,
            )  # fmt: skip
        except ConfigError:
            return  # through another web process, or before this one started
        self._app.dispatcher.nudge()

    def _forget_copies(self, records: Sequence[JobRecord]) -> None:
        """The broker does not see that another program takes a job from its queue."""
        keys = {(record.job_id, record.attempt) for record in records if record.attempt is not None}
        try:
            self._app.broker.forget(sorted(keys))
        except Unavailable as error:  # it holds an outdated entry, which a query for that copy removes
            self._log.warning("copies_not_forgotten", count=len(keys), error=str(error))


def _constant(reporter: Reporter) -> tuple[object, ...]:
    """The columns that are written at once when they change."""
    return reporter.concurrency, tuple(reporter.queues), reporter.quiet, reporter.ended
