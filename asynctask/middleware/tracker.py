"""The tracker: records the life of a job, for the middleware of any engine.

An engine (the own runtime, Dramatiq, ...) takes these steps for a job:

1. :meth:`Tracker.begin` with the fetched batch: a :class:`Ticket` each, which says whether to run it. 2.
:meth:`Tracker.start` when the job is performed. 3. :meth:`Ticket.finish`, :meth:`Ticket.fail` or :meth:`Ticket.raised` with
its result. Nothing is written yet. 4. :meth:`Tracker.settle` once the engine has decided on a retry: hands the outcome to
the group commit, which calls ``then`` after the commit. Only then may the engine acknowledge the job.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson

from asynctask.core.states import Reason, State, Status
from asynctask.core.transitions import Begin, Row, Turn, begin, cancel, give_back, is_foreign, is_suspect
from asynctask.database.retrying import repeatable
from asynctask.errors import AsyncTaskError, JobInterrupted, JobTimeout
from asynctask.job import CurrentJob, interrupted
from asynctask.ledger.base import Ledger
from asynctask.ledger.events import (
    Applied,
    Change,
    EventRecord,
    Failure,
    Note,
    apply,
    read_jobs,
    untouched,
)
from asynctask.ledger.processes import engine_of
from asynctask.ledger.recorder import Follower, Outcome, Recorder
from asynctask.ledger.reservations import Ready
from asynctask.ledger.standalone import ENGINE, NewJob, enqueue
from asynctask.messages import clean
from asynctask.worker import Worker

__all__ = ["TICKET", "Arrival", "AttemptLost", "TaskEventMiddleware", "Ticket", "Tracker"]


class AttemptLost(AsyncTaskError):
    """The attempt of this thread counts no more.

    It belonged to another process or was over when it was to begin; or the thread was given up while it performed, and the
    outcome was recorded without it.
    """

    code = "attempt_lost"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A job that an engine fetched.

    ``attempt``: the fence in the copy; None if the engine has none. ``params`` and ``options`` (JSON text): for its Event,
    if it has none yet.
    """

    job_id: str
    attempt: int | None
    worker_name: str
    queue: str
    params: Any = None
    options: str | None = None


@dataclass(slots=True)
class Ticket:
    """The right to perform one attempt of a job, and its outcome."""

    verdict: Begin
    job_id: str
    event_id: int
    task_id: int | None
    attempt: int
    retries: int = 0
    watched: bool = False
    awaited: bool = False  # its Task has a ``parallel``
    started_at: int | None = None
    status: Status | None = None
    reason: Reason = Reason.RETURNED
    failure: Failure | None = None
    result: str | None = None
    said: bool = False  # an outcome already contains the working message
    lost: bool = False  # the compare-and-set of `working` was lost: this attempt does not count
    settled: bool = False
    exited: bool = False  # job code raised SystemExit or KeyboardInterrupt
    seen: EventRecord | None = None  # the Event at Begin, if untouched and not written by this process since
    job: CurrentJob | None = None
    _notes: list[Note] = field(default_factory=list)
    _free: list[None] = field(default_factory=lambda: [None])

    def acquire(self) -> bool:
        """Makes this thread the only one to record the ticket; False if another thread is, or it is settled.

        Atomic without a lock: threads would contend for a lock shared by all tickets.
        """
        try:
            self._free.pop()
        except IndexError:
            return False
        return True

    def free(self) -> None:
        """Releases an acquired ticket that was not settled."""
        self._free.append(None)

    def finish(self, result: Any, limit: int = 65_536) -> None:
        """The job returned; ``result`` is kept if it is JSON of at most ``limit`` bytes."""
        self.status, self.reason, self.failure = Status.FINISH, Reason.RETURNED, None
        self.result, note = _result(result, limit)
        if note:
            self._notes.append(Note("working", note))

    def fail(self, error: BaseException) -> None:
        """The job refused, for a business reason."""
        self._drop_result()
        self.status, self.reason = Status.FAILED, Reason.REFUSED
        self.failure = Failure(clean(str(getattr(error, "code", "failed")))[:64] or "failed", clean(str(error)))

    def raised(self, error: BaseException) -> None:
        """The job raised: a bug, a timeout, an interruption."""
        self._drop_result()
        if isinstance(error, JobTimeout):
            self.status, self.reason, self.failure = Status.ERROR, Reason.TIMEOUT, Failure("timeout", str(error))
            return
        if isinstance(error, JobInterrupted):
            self.status, self.reason, self.failure = Status.ERROR, Reason.INTERRUPTED, None
            return
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self.status, self.reason = Status.ERROR, Reason.RAISED
        # SystemExit and KeyboardInterrupt of job code: reported as an interruption, retried like an error.
        self.exited = isinstance(error, SystemExit | KeyboardInterrupt)
        self.failure = Failure("interrupted" if self.exited else "raised", clean(text))

    def _drop_result(self) -> None:
        """Drops the result: a middleware outside the recording one may raise after the job returned."""
        self.result, self._notes = None, []


class Tracker:
    """Records the life of jobs in the ledger, for any engine.

    ``elsewhere``: the engine itself keeps, delivers and retries its jobs, without a fence (``attempt`` of every
    :class:`Arrival` is None). Then the outcome of any copy counts while the Event is open, the engine alone decides on
    another attempt, and no job waits in the ledger for our dispatcher.
    """

    def __init__(self, ledger: Ledger, recorder: Recorder, *, elsewhere: bool = False) -> None:
        self._ledger = ledger
        self._recorder = recorder
        self._elsewhere = elsewhere
        self._running: dict[int, tuple[float, Ticket]] = {}
        self._lock = threading.Lock()
        self._finished = Note("finish", ledger.catalogue("finish"))
        self._working_text = ledger.catalogue("working")

    def now(self) -> int:
        """The ledger's time, in microseconds."""
        return self._ledger.now()

    # -- 1. begin

    def begin(self, arrivals: Sequence[Arrival]) -> list[Ticket]:
        """Tickets for a batch of jobs, in order. Raises LedgerUnavailable.

        A job without an Event (pushed by hand, or by another program) gets a stand-alone one.
        """
        records = self._read([arrival.job_id for arrival in arrivals])
        missing = [arrival for arrival in arrivals if arrival.job_id not in records]
        if missing:
            self.enqueue(missing)
            records |= self._read([arrival.job_id for arrival in missing])
        return [self._ticket(arrival, records[arrival.job_id]) for arrival in arrivals]

    def known(self, job_id: str) -> Ticket | None:
        """The ticket of a job without a fence; None if it has no Event. Raises LedgerUnavailable."""
        record = self._read([job_id]).get(job_id)
        return None if record is None else self._ticket(Arrival(job_id, None, record.worker_name, record.queue), record)

    def lent(self, job: Ready) -> Ticket:
        """The ticket of a job that the ledger has just lent to this process; the loan replaces Begin."""
        seen = None
        if job.attempt == 1 and job.retries == 0:  # nothing but the loan can have been written
            row = Row(Status.ENQUEUE, reserved=True, process=self._ledger.identity)
            seen = EventRecord(
                job.event_id, job.job_id, job.task_id, None, row, None, job.row, None, None, job.worker_name, job.queue,
                None, job.slots,
            )  # fmt: skip
        return Ticket(Begin.RUN, job.job_id, job.event_id, job.task_id, job.attempt, job.retries, awaited=True, seen=seen)

    def _read(self, job_ids: Sequence[str]) -> dict[str, EventRecord]:
        with self._ledger.database.read() as connection:
            return read_jobs(connection, job_ids)

    def _ticket(self, arrival: Arrival, record: EventRecord) -> Ticket:
        row = record.row
        attempt = None if is_foreign(row, arrival.attempt, record.task_id) else arrival.attempt
        return Ticket(
            begin(row, attempt, record.task_state), record.job_id, record.id, record.task_id, row.attempt, row.retries,
            is_suspect(row), awaited=record.parallel is not None,
            seen=record if not self._elsewhere and untouched(record) else None,
        )  # fmt: skip

    def enqueue(self, arrivals: Sequence[Arrival]) -> None:
        """Creates stand-alone Events for jobs that are in their engine's queue already; skips known ids.

        A copy that outlived its Event gets one at its own attempt; otherwise its fence would drop it, and the Event would
        wait for ever. Raises :class:`~asynctask.errors.InputError` for values that the database cannot store.
        """
        jobs = [NewJob(a.job_id, a.worker_name, a.queue, a.params, a.attempt or 1, a.options) for a in arrivals]
        engine = engine_of(self._ledger.identity)
        enqueue(self._ledger, jobs, options=None if engine is None else {ENGINE: engine})

    # -- 2. start

    def start(self, ticket: Ticket) -> None:
        """Marks the job as performed now. For a watched job, ``working`` is in the ledger when this returns.

        If the ticket is ``lost`` then, acknowledge the job and do not perform it: the attempt is another's, or over.
        """
        ticket.started_at = self._ledger.now()
        self._running[id(ticket)] = (self._ledger.clock.monotonic(), ticket)
        if ticket.watched:
            done = threading.Event()
            self._recorder.put([self._working(ticket, done.set)])
            done.wait()

    def note_long(self, older_than_s: float) -> None:
        """Records ``working`` of jobs that run for longer than this, once each; called periodically."""
        limit = self._ledger.clock.monotonic() - older_than_s
        with self._lock:
            long = [t for begun, t in self._started() if begun <= limit and not t.said and t.status is None]
            # Held until handed over, so that a later outcome follows it: not every engine has a fence.
            acquired = [ticket for ticket in long if ticket.acquire()]
            self._recorder.put([self._working(ticket) for ticket in acquired])
            for ticket in acquired:
                ticket.free()

    def running(self) -> list[Ticket]:
        """Tickets started and not settled."""
        return [ticket for _, ticket in self._started()]

    def _started(self) -> list[tuple[float, Ticket]]:
        return list(self._running.copy().values())

    def _acquire(self, ticket: Ticket) -> bool:
        if ticket.acquire():
            return True
        with self._lock:  # held by `note_long` while it holds tickets
            return ticket.acquire()

    def _mark_settled(self, ticket: Ticket) -> None:
        ticket.settled = True
        self._running.pop(id(ticket), None)
        ticket.job = None  # breaks the reference cycle, which would wait for the garbage collector

    def _working(self, ticket: Ticket, done: Callable[[], None] | None = None) -> Outcome:
        notes = self._opening(ticket)
        ticket.seen = None

        def then(won: bool) -> None:
            ticket.lost = not won
            if done is not None:
                done()

        return Outcome(
            ticket.event_id,
            ticket.attempt,
            Status.WORKING,
            Reason.STARTED,
            notes,
            started_at=ticket.started_at,
            then=then,
            elsewhere=self._elsewhere,
            awaited=done is not None,
        )

    def _working_of_follower(self, ticket: Ticket) -> Outcome:
        """``working`` of a lent job that has begun. Its messages are left out if another outcome has them, which is flushed
        later and must read what this one writes."""
        with self._lock:
            if not ticket.settled and not ticket.said and ticket.started_at is not None:
                return self._working(ticket)
            ticket.seen = None

        def then(won: bool) -> None:
            ticket.lost = not won

        return Outcome(
            ticket.event_id, ticket.attempt, Status.WORKING, Reason.STARTED, then=then, elsewhere=self._elsewhere
        )

    # -- 3. settle

    def settle(
        self,
        ticket: Ticket,
        *,
        retry_at: int | None = None,
        discarded: str | None = None,
        then: Callable[[bool], None] | None = None,
        follower: Ticket | None = None,
    ) -> None:
        """Hands the outcome to the group commit. ``then`` is called after the commit, with whether it was won.

        ``retry_at`` (microseconds): another attempt follows; ``discarded``: why the engine gave the job up outside its
        code; ``follower``: a lent job that begins now in this one's place. Settling twice does nothing.
        """
        if not ticket.awaited:
            if self._acquire(ticket):
                self._hand_over(ticket, retry_at, discarded, then, None)
            return
        with self._lock:  # a settled ticket's outcome is handed over under this lock, see `_working_of_follower`
            if ticket.acquire():
                self._hand_over(ticket, retry_at, discarded, then, follower)

    def _hand_over(
        self,
        ticket: Ticket,
        retry_at: int | None,
        discarded: str | None,
        then: Callable[[bool], None] | None,
        follower: Ticket | None,
    ) -> None:
        outcome = self._outcome(ticket, retry_at, discarded, then)
        if follower is not None:
            outcome.follower = Follower(follower.event_id, partial(self._working_of_follower, follower))
            outcome.awaited = False  # the follower has its place, so nothing waits for it
        self._mark_settled(ticket)
        self._recorder.put([outcome])

    def release(self, ticket: Ticket, then: Callable[[bool], None] | None = None) -> None:
        """Returns a fetched job to the ledger unrun, or cancels it with its Task."""
        if not self._acquire(ticket):
            return
        self._mark_settled(ticket)
        cancelled = ticket.verdict is Begin.CANCEL
        status, reason = (Status.CANCELLED, Reason.CANCELLED) if cancelled else (Status.ENQUEUE, Reason.GIVEN_BACK)
        outcome = Outcome(
            ticket.event_id, ticket.attempt, status, reason, then=then, elsewhere=self._elsewhere, awaited=ticket.awaited
        )
        self._recorder.put([outcome])

    def forget(self, ticket: Ticket) -> None:
        """Drops an attempt lost before it was performed: records nothing; its copy may be acknowledged."""
        self._acquire(ticket)
        self._mark_settled(ticket)

    def put_off(self, tickets: Sequence[tuple[Ticket, str]], until: int) -> None:
        """Makes fetched jobs that cannot be performed here wait in the ledger until ``until`` (microseconds), spending no
        retry.

        Each has a message with the reason, which is not repeated while it is the Event's last one. Committed on return, so
        the copies may be acknowledged. Raises LedgerUnavailable.
        """
        applied = self._put_off(tickets, until)
        for ticket, _ in tickets:
            self.forget(ticket)
        self._recorder.announce(applied)

    @repeatable
    def _put_off(self, tickets: Sequence[tuple[Ticket, str]], until: int) -> list[Applied]:
        with self._ledger.database.write() as connection:
            return apply(connection, self._ledger, [self._waiting(ticket, clean(why), until) for ticket, why in tickets])

    def _waiting(self, ticket: Ticket, why: str, until: int) -> Change:
        change = Change(ticket.event_id, lambda record: None)

        def decide(record: EventRecord) -> Turn | None:
            if record.row.status is not Status.ENQUEUE or record.row.attempt != ticket.attempt:
                return None
            if record.task_state == State.CANCELLED:
                change.notes = [Note("cancelled", self._ledger.catalogue("cancelled"))]
                return cancel(record.row)
            if not _last_message_is(record.messages, why):
                change.notes = [Note("enqueue", why)]
            return give_back(record.row, now=until)

        change.decide = decide
        return change

    def _outcome(
        self, ticket: Ticket, retry_at: int | None, discarded: str | None, then: Callable[[bool], None] | None
    ) -> Outcome:
        if discarded is not None:
            ticket.status, ticket.reason = Status.ERROR, Reason.DISCARDED
            ticket.failure = Failure("discarded", self._ledger.catalogue("discarded", discarded))
        elif ticket.status is None:  # no middleware recorded a result
            ticket.status, ticket.reason = Status.FINISH, Reason.RETURNED
        elif self._elsewhere and ticket.reason is Reason.INTERRUPTED and retry_at is None:
            # Our runtime always repeats what it interrupted; another engine may have given it up.
            ticket.reason, ticket.exited = Reason.RAISED, True
            ticket.failure = Failure("interrupted", self._ledger.catalogue("interrupted"))
        notes = self._opening(ticket) if ticket.started_at is not None else []
        notes += self._closing(ticket, retry_at)
        return Outcome(
            ticket.event_id, ticket.attempt, ticket.status, ticket.reason, notes, retry_at, ticket.failure, ticket.result,
            ticket.started_at, then, self._elsewhere,
            ticket.seen if retry_at is None and ticket.reason is not Reason.INTERRUPTED else None, ticket.awaited,
        )  # fmt: skip

    def _opening(self, ticket: Ticket) -> list[Note]:
        notes = [] if ticket.said else [Note("working", self._working_text, ticket.started_at)]
        ticket.said = True
        if ticket.job is not None:
            notes += [Note("working", text) for text in ticket.job.take_messages()]
        return notes

    def _closing(self, ticket: Ticket, retry_at: int | None) -> list[Note]:
        say, text = self._ledger.catalogue, ticket.failure.message if ticket.failure else ""
        notes, ticket._notes = ticket._notes, []
        if ticket.status is Status.FINISH:
            return [*notes, self._finished]
        if ticket.status is Status.FAILED:
            return [*notes, Note("failed", say("failed", text))]
        key = {Reason.TIMEOUT: "timeout", Reason.INTERRUPTED: "interrupted"}.get(ticket.reason, "error")
        if ticket.exited:
            key = "interrupted"
        if ticket.reason is Reason.DISCARDED:
            return [*notes, Note("error", text)]
        notes = [*notes, Note("error", say(key, text))]
        if retry_at is not None or ticket.reason is Reason.INTERRUPTED:
            notes.append(Note("enqueue", say("retry")))
        return notes


def _last_message_is(messages: str | None, text: str) -> bool:
    said = orjson.loads(messages) if messages else []
    return bool(said) and said[-1].get("message") == text


def _result(value: Any, limit: int) -> tuple[str | None, str | None]:
    if value is None:
        return None, None
    try:
        text = orjson.dumps(value, default=_plain).decode()
    except TypeError as error:
        return None, clean(f"The result was not kept: {error}")
    if len(text) > limit:
        return None, f"The result was not kept: {len(text)} bytes are over max_result_bytes ({limit})"
    return text, None


def _plain(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump(mode="json")
    if isinstance(value, set | frozenset | bytes):
        raise TypeError(f"{type(value).__name__} is no JSON")
    return str(value)


# -- the middleware that records a tracked job; docs/middleware.md has the table of what it records

TICKET = "asynctask.ticket"
"""Key of a tracked job's ticket in the job's ``state``."""


class TaskEventMiddleware:
    """Records the start and the result of the job; stops a business refusal, re-raises everything else.

    Writes nothing itself: the runtime around it first decides on a retry, then settles the ticket.
    """

    def __init__(self, tracker: Tracker, max_result_bytes: int = 65_536) -> None:
        self._tracker = tracker
        self._limit = max_result_bytes

    def __call__(self, worker: Worker, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
        ticket: Ticket | None = job.state.get(TICKET)
        if ticket is None:  # not tracked
            return call_next()
        self._tracker.start(ticket)
        try:
            result = call_next()
        except AttemptLost:  # the ticket does not belong to this thread any more
            raise
        except BaseException as error:
            if worker.refuses(error) and not interrupted(job, error):
                ticket.fail(error)
                return None
            ticket.raised(error)
            raise
        ticket.finish(result, self._limit)
        return result
