"""Workers in another language: their records of jobs, and the processes that send them.

Such a process takes copies from Redis by itself. It has no object of this library, so it sends the outcomes of its jobs to
a process of the application, which writes the records (:class:`RemoteTracker`) and keeps its lease
(:class:`RemoteWorkers`).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal, NamedTuple

import orjson

from asynctask.arrivals import ArrivalTracker, fitted
from asynctask.brokers.base import Key
from asynctask.clock import rfc3339
from asynctask.config import QUEUE_NAME
from asynctask.core.states import Status
from asynctask.core.transitions import Begin, begin
from asynctask.errors import ConfigError, Conflict, InputError, Unavailable
from asynctask.exports.run import MERGER
from asynctask.ledger import foreign, processes, queries
from asynctask.ledger.base import Ledger, dumps
from asynctask.ledger.events import EventRecord, Failure, Note, untouched
from asynctask.ledger.processes import engine_of
from asynctask.ledger.recorder import Kind, Outcome, Recorder, Stage
from asynctask.ledger.standalone import ENGINE, MAX_JOB_ID, Arrival, enqueue, is_job_id, last_message_is
from asynctask.lists.items import MIXED
from asynctask.logs import get_logger
from asynctask.messages import clean
from asynctask.middleware.tracker import Attempt, Phase, Result, Ticket
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
        if not QUEUE_NAME.fullmatch(self.queue):
            raise InputError(
                f"a queue's name has 1 to 255 letters, digits and _ : . -, not {self.queue[:80]!r}", code="not_recordable"
            )


NO_ATTEMPT: Final = "no_attempt"
OTHER_ATTEMPT: Final = "other_attempt"
HELD_ELSEWHERE: Final = "held_elsewhere"


class _Bar(NamedTuple):
    """Why a record does not count, whatever it says of its job: one of the three codes, and a text that tells how to mend
    it."""

    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class Recorded:
    """The result of a record. ``code`` and ``detail`` are of one that cannot be of this job's current attempt."""

    job_id: str
    counted: Annotated[bool, "It changed the Event, or is the `working` that the Event has."]
    status: Annotated[Status | None, "Of the Event, now; null: the job is unknown and names no worker."]
    attempt: int | None
    code: Annotated[
        Literal["no_attempt", "other_attempt", "held_elsewhere"] | None,
        "Why it cannot count; null for any other reason, such as that it was sent before.",
    ] = None
    detail: Annotated[str | None, "The same for people, with what to do."] = None

    def refusal(self) -> InputError | Conflict | None:
        """The error of a record with a ``code``."""
        if self.code is None or self.detail is None:
            return None
        if self.code == NO_ATTEMPT:
            return InputError(self.detail, code=self.code)
        return NotRecorded(self.code, self.detail)


class NotRecorded(Conflict):
    """A record is of another attempt of its job, or somebody else has the job; ``code``: which of the two."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class RemoteTracker:
    """Writes records of workers in another language, many in one transaction.

    The ledger keeps jobs with an attempt, or of a Task: their retries wait there, and only a record of the current attempt
    counts. Other jobs are kept by their own engine. A record that arrives twice counts once: by its attempt, or by the
    start of its attempt.

    ``ledger`` has the identity of the process that performs the jobs, or none; ``queues``: those that it works, so a job
    in one of them may be with it; ``holds``: which copies the broker has, as :meth:`Broker.holds`; ``limit``: bytes of a
    result.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        holds: Callable[[Collection[Key]], Collection[Key]],
        queues: Collection[str] = (),
        on_due: Callable[[int], None] = lambda at: None,
        limit: int = 65_536,
    ) -> None:
        self._ledger = ledger
        self._holds = holds
        self._queues = frozenset(queues)
        self._limit = limit
        self._recorder = Recorder(ledger, on_due=on_due)
        self._tracker = ArrivalTracker(ledger, self._recorder)

    def record(self, records: Sequence[JobRecord]) -> list[Recorded]:
        """Writes them in order, and returns the result of each. Raises :class:`Unavailable`: some may be recorded then, and
        all may be sent again."""
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
        apart, barred = self._judged(records, known)
        counted: dict[str, bool] = {}
        outcomes = []
        for record in records:
            event = known.get(record.job_id)
            if event is not None and record.job_id not in barred and _is_current(record, event):
                count = partial(counted.__setitem__, record.job_id)
                outcomes += self._outcomes(record, event, event.id in apart, count)
        if outcomes:
            self._recorder.commit(outcomes)
        # The result of a counted record is known, unless the job waits again: its Task may be cancelled.
        ended = {r.job_id: r for r in records if counted.get(r.job_id) and not (r.will_retry or r.status == "interrupted")}
        now = self._tracker.read([record.job_id for record in records if record.job_id not in ended])
        return [
            Recorded(record.job_id, True, Status(record.status), known[record.job_id].row.attempt)
            if record.job_id in ended
            else _recorded(
                record.job_id, counted.get(record.job_id, False), now.get(record.job_id), barred.get(record.job_id)
            )
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

    def _judged(
        self, records: Sequence[JobRecord], known: Mapping[str, EventRecord]
    ) -> tuple[Collection[int], dict[str, _Bar]]:
        """The Events of jobs that an engine of their own keeps; and which jobs' records do not count, with the reason."""
        lone = [event.id for event in known.values() if event.is_lone]
        with self._ledger.database.read() as connection:
            apart = queries.engines(connection, lone) if lone else {}
            shared = queries.own_queues(connection, self._ledger.now())
            lent = queries.lenders(connection, known.values())
        barred: dict[str, _Bar] = {}
        doubtful: dict[Key, EventRecord] = {}
        for record in records:
            if (event := known.get(record.job_id)) is None:
                continue
            if bar := _fenced_off(record, event, event.id in apart) or self._held(event, lent.get(event.id)):
                barred[record.job_id] = bar
            elif _waits(event) and event.id not in apart and (event.queue in shared or event.queue not in self._queues):
                doubtful[record.job_id, event.row.attempt] = event
        for job_id, attempt in self._holds(doubtful) if doubtful else ():
            queue = doubtful[job_id, attempt].queue
            barred[job_id] = _held(f"it is on the queue {queue!r}, or with a process of the application that works it")
        return apart, barred

    def _held(self, event: EventRecord, lent: str | None) -> _Bar | None:
        """Why no worker in another language can have this job. ``lent``: who holds the loan that it lies in."""
        row, engine, holder = event.row, foreign.engine_of(event.queue), event.row.process or lent
        if engine is not None:
            return _held(f"it is one of {engine}, whose workers record it by themselves")
        if _waits(event) and event.task_id is not None and holder is None:
            return _held("it waits in the ledger, and was given to nobody")
        if row.status is Status.ENQUEUE and row.due_at is not None:
            return _held("it waits in the ledger, and was given to nobody")
        if holder in (None, self._ledger.holder) or processes.is_engine(holder) or queries.is_queue(holder):
            return None
        return _held(f"the process {holder} of the application has it")

    def _outcomes(
        self, record: JobRecord, event: EventRecord, elsewhere: bool, count: Callable[[bool], None]
    ) -> list[Outcome]:
        """The outcomes to write for a record of the current attempt; ``elsewhere``: the job's own engine keeps it.
        ``count`` is called with whether the record counts."""
        if event.row.items > 1 and record.status != "interrupted":
            return [self._refused_slice(event)]
        if record.status == "working":
            return self._begin(record, event, elsewhere, count)
        text, retry_at = clean(record.message), None
        ticket = Ticket(event, elsewhere=elsewhere, is_untouched=untouched(event) and not elsewhere)
        is_said = event.row.status is Status.WORKING
        attempt = Attempt(ticket, None, Phase.NOTED if is_said else Phase.BEGUN, started_at=self._started_at(record))
        if record.status == "finish":
            attempt.finish(record.result, self._limit)
        elif record.status == "failed":
            attempt.result = Result(Kind.FAILED, Failure("failed", text))
        elif record.status == "interrupted":
            attempt.result = Result(Kind.INTERRUPTED)
            retry_at = self._ledger.now() if elsewhere else None  # its own engine delivers it again
        else:
            attempt.result = Result(Kind.RAISED, Failure("raised", text))
            retry_at = max(record.retry_at or 0, self._ledger.now()) if record.will_retry else None
        outcome = self._tracker.outcome(attempt, retry_at, then=count)
        is_told, opening = outcome.failure is not None or not text, 0 if is_said else 1
        if elsewhere:  # bound to the attempt that was read, so that one sent twice concurrently is written once
            outcome.stage = Stage.DOUBTFUL
        if not is_told:
            outcome.notes = [*outcome.notes[:opening], Note("working", text), *outcome.notes[opening:]]
        return [outcome]

    def _refused_slice(self, event: EventRecord) -> Outcome:
        """The end of a job of several items: a worker that knows jobs of one item only cannot report on each, so its
        records do not count. Told so when it begins, it performs none of them."""
        return self._tracker.outcome(Attempt(Ticket(event)), None, discarded=_SEVERAL)

    def _begin(
        self, record: JobRecord, event: EventRecord, elsewhere: bool, count: Callable[[bool], None]
    ) -> list[Outcome]:
        row, text = event.row, [Note("working", clean(record.message))] if record.message else []
        if row.status is Status.WORKING and row.process == self._ledger.holder:
            count(True)
            if not text or last_message_is(event.messages, text[0].message):
                return []
            return [Outcome(event.id, row.attempt, Kind.WORKING, notes=text)]
        verdict = begin(row, None if elsewhere else row.attempt, event.task_state)
        if verdict is Begin.CANCEL:
            return [Outcome(event.id, row.attempt, Kind.CANCELLED)]
        if verdict is Begin.GIVE_BACK:
            return [Outcome(event.id, row.attempt, Kind.GIVEN_BACK)]
        if verdict is Begin.DROP:
            return []
        started_at = self._started_at(record)
        notes = [Note("working", self._ledger.catalogue("working"), started_at, process=self._ledger.holder), *text]
        return [
            Outcome(
                event.id,
                row.attempt,
                Kind.WORKING,
                notes=notes,
                values={"started_at": started_at},
                then=count,
                elsewhere=elsewhere,
                stage=Stage.DOUBTFUL,
            )
        ]

    def _started_at(self, record: JobRecord) -> int:
        return self._ledger.now() if record.started_at is None else record.started_at


def _fenced_off(record: JobRecord, event: EventRecord, elsewhere: bool) -> _Bar | None:
    """Why a record is not known to be of the Event's current attempt; the copy of a job that its own engine keeps
    (``elsewhere``) carries none."""
    current = event.row.attempt
    if record.attempt is None and not elsewhere:
        said = f"the ledger keeps the job {event.job_id}, so its records name the attempt that they are of"
        return _Bar(
            NO_ATTEMPT, f"{said}: send `attempt` from the member `asynctask` of the job (the current one: {current})"
        )
    if record.attempt is not None and record.attempt != current:
        said = f"the record is of attempt {record.attempt} of the job {event.job_id}, and its attempt is {current} now"
        return _Bar(OTHER_ATTEMPT, f"{said}: what became of another attempt does not count any more")
    return None


def _held(where: str) -> _Bar:
    return _Bar(HELD_ELSEWHERE, f"no worker in another language has this job: {where}")


def _waits(event: EventRecord) -> bool:
    """Whether it has not begun, as far as the ledger knows, and has no time to wait for."""
    return event.row.status is Status.ENQUEUE and event.row.due_at is None


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


def _recorded(job_id: str, counted: bool, event: EventRecord | None, bar: _Bar | None) -> Recorded:
    if event is None:
        return Recorded(job_id, False, None, None)
    return Recorded(job_id, counted, event.row.status, event.row.attempt, *(bar or (None, None)))


# -- the processes

_ENGINE: Final = re.compile(r"[a-z]{1,8}")
_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,55}")
_SIGNALS: Final = {"TSTP": "quiet", "TERM": "stop"}
_KINDS: Final = ("web", "worker")
"""What the application calls its own processes."""

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

        Without a reporter nobody notices when a worker dies. Raises :class:`Unavailable`; and, with nothing recorded,
        :class:`InputError`, and :class:`ProcessLost`: the process takes another name and sends the records again.
        """
        for record in records:
            record.check()
            self._check_worker(record, reporter)
        ledger = self._app.ledger.under("" if reporter is None else reporter.identity)
        signal = None if reporter is None else self._renew(ledger, reporter)
        broker = self._app.broker
        tracker = RemoteTracker(
            ledger,
            holds=_hold_none if broker is None else broker.holds,
            queues=() if reporter is None else reporter.queues,
            on_due=self._app.dispatcher.expect,
            limit=self._app.config.max_result_bytes,
        )
        recorded = tracker.record(records)
        self._forget_copies(records, recorded)
        if reporter is not None and reporter.ended:
            processes.leave(ledger)
        return recorded, signal

    def _check_worker(self, record: JobRecord, reporter: Reporter | None) -> None:
        """Raises :class:`InputError` for a worker whose jobs no worker in another language performs. A process that names
        itself may have workers that nobody registered here."""
        name = record.worker
        if name is None:
            return
        found = self._app.workers.get(name)
        if name in (MIXED, MERGER):
            raise InputError(f"{name!r} is a name of AsyncTask's own: no other program performs it", code="invalid_worker")
        if found is None and reporter is None:
            raise InputError(
                f"no worker is registered as {name[:200]!r}: declare it in the application, or send the record with the"
                " `process` that performs it (POST /api/records)",
                code="unknown_worker",
            )
        if found is not None and not found.use_task_event:
            raise InputError(
                f"worker {name!r} has use_task_event=False: its jobs are not tracked, so nothing is recorded of them",
                code="invalid_worker",
            )
        if found is not None and found.engine is not None:
            raise InputError(
                f"{found.engine} performs the jobs of worker {name!r}, and records them by itself", code="invalid_worker"
            )

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
        if not _ENGINE.fullmatch(reporter.engine) or reporter.engine in (*_KINDS, *self._app.engines):
            raise InputError(
                f"a process's engine has 1 to 8 small letters, and is none that is attached, nor {' or '.join(_KINDS)}:"
                f" {reporter.engine[:80]!r}",
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

    def _forget_copies(self, records: Sequence[JobRecord], recorded: Sequence[Recorded]) -> None:
        """The broker does not see that another program takes a job from its queue."""
        if self._app.broker is None:
            return
        taken = [record for record, its in zip(records, recorded, strict=True) if its.code != HELD_ELSEWHERE]
        keys = {(record.job_id, record.attempt) for record in taken if record.attempt is not None}
        try:
            self._app.broker.forget(sorted(keys))
        except Unavailable as error:  # it holds an outdated entry, which a query for that copy removes
            self._log.warning("copies_not_forgotten", count=len(keys), error=str(error))


def _hold_none(keys: Collection[Key]) -> set[Key]:
    """Without a broker, no queue has copies."""
    return set()


def _constant(reporter: Reporter) -> tuple[object, ...]:
    """The columns that are written at once when they change."""
    return reporter.concurrency, tuple(reporter.queues), reporter.quiet, reporter.ended
