"""The tracker: records the progress and outcome of a job, for the middleware of any engine.

An engine (the own runtime, Dramatiq, ...) takes these steps for a job:

1. :meth:`Tracker.borrowed` for jobs that the ledger lent, or :meth:`Tracker.begin` for jobs from a queue
(:class:`asynctask.arrivals.ArrivalTracker`); each returns :class:`Ticket` objects, which say whether to run the job.
2. :meth:`Tracker.start` with the job's :class:`Attempt`, when it is performed. 3. :meth:`Attempt.finish`,
:meth:`Attempt.fail` or :meth:`Attempt.raised` sets its :class:`Result`; nothing is written yet. 4. :meth:`Tracker.settle`,
once the engine has decided on a retry, passes the outcome to the group commit, which calls ``then`` after the commit. Only
then may the engine acknowledge the job.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, Generic, Protocol, TypeVar

import orjson

from asynctask.clock import SECOND, micros
from asynctask.core.states import TERMINAL, Status
from asynctask.core.transitions import Begin, Row, begin, is_foreign, is_suspect, pause_s
from asynctask.database.notify import notify
from asynctask.database.retrying import repeatable
from asynctask.errors import AsyncTaskError, FinalError, JobInterrupted, JobTimeout, NotPerformed
from asynctask.iterable import News, Slice
from asynctask.job import CurrentJob, JobTask, interrupted, refuse_work
from asynctask.ledger.base import Ledger
from asynctask.ledger.events import (
    Change,
    EventRecord,
    Failure,
    Note,
    Saved,
    apply,
    error_columns,
    read_jobs,
    read_saved,
    read_stops,
    untouched,
)
from asynctask.ledger.lending import Holding, Job
from asynctask.ledger.recorder import Kind, Outcome, Recorder, Stage
from asynctask.ledger.standalone import put_off
from asynctask.logs import get_logger
from asynctask.messages import clean, traceback_of
from asynctask.worker import Worker

SAVE_S: Final = 0.2
"""Shortest time, in seconds, between two saves of a running job's checkpoint. Each save is a commit; after a kill the job
repeats its work since the last one."""


class AttemptLost(AsyncTaskError):
    """The attempt of this thread is obsolete: it belonged to another process or had ended before it began; or the thread
    was given up while it performed the job, and the outcome was recorded without it.
    """

    code = "attempt_lost"


# -- tickets, results and attempts

_NOTHING_SAVED: Final = Saved(None, None, None)


@dataclass(frozen=True, slots=True)
class Ticket:
    """What the ledger contained about a job when it lent the job to this process, or when the job's copy arrived.

    ``record``: its Event, as far as it was read; ``verdict``: whether the attempt may be performed. ``elsewhere``: another
    engine keeps, delivers and retries the job, without a fence. ``watched``: a process that held it died, so ``working`` is
    committed before it begins. ``of_round``: its Task has an interval, which counts from its start. ``is_untouched``: the
    Event is as it was lent or dispatched, so its end may be compared with ``record``. ``loan``: the job's loan or claim.
    ``asked``: when the query was sent, on the monotonic clock. ``saved``: the state that earlier attempts saved.
    """

    record: EventRecord
    verdict: Begin = Begin.RUN
    elsewhere: bool = False
    watched: bool = False
    of_round: bool = False
    is_untouched: bool = False
    loan: Holding | None = None
    asked: float = 0.0
    saved: Saved = _NOTHING_SAVED

    @classmethod
    def made(
        cls,
        verdict: Begin,
        job_id: str,
        *,
        event_id: int = 0,
        task_id: int | None = None,
        attempt: int = 1,
        retries: int = 0,
        deaths: int = 0,
        elsewhere: bool = False,
        callback_of: int | None = None,
        checkpoint: str | None = None,
        row: int | None = None,
        task: JobTask | None = None,
    ) -> Ticket:
        """A ticket made from these values alone, without a read of the Event."""
        its = Row(Status.ENQUEUE, attempt, retries=retries, deaths=deaths, reserved=True)
        record = EventRecord(
            event_id, job_id, task_id, None, its, None, row, None, "", "", None, 1, callback_of=callback_of, task=task
        )
        return cls(record, verdict, elsewhere, saved=Saved(checkpoint, None, None))

    @property
    def job_id(self) -> str:
        return self.record.job_id

    @property
    def event_id(self) -> int:
        return self.record.id

    @property
    def task_id(self) -> int | None:
        return self.record.task_id

    @property
    def attempt(self) -> int:
        """The number of the attempt, which fences every record of it."""
        return self.record.row.attempt

    @property
    def retries(self) -> int:
        return self.record.row.retries

    @property
    def items(self) -> int:
        return self.record.row.items

    @property
    def is_lone(self) -> bool:
        """As :attr:`EventRecord.is_lone`."""
        return self.record.is_lone

    @property
    def is_suspect(self) -> bool:
        """Whether a process died while it held the job; it runs alone then."""
        return is_suspect(self.record.row)

    @property
    def has_ended(self) -> bool:
        """Whether the job had ended when it arrived."""
        return self.record.row.status in TERMINAL


NO_TICKET: Final = Ticket.made(Begin.RUN, "")
"""The ticket of a job that no Event records."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an attempt, before the decision on a retry.

    ``text``: the function's result as JSON; ``notes``: messages about it; ``is_final``: another attempt would end in the
    same error; ``traceback``: of the error.
    """

    kind: Kind
    failure: Failure | None = None
    text: str | None = None
    notes: Sequence[Note] = ()
    is_final: bool = False
    traceback: str | None = None


_RETURNED: Final = Result(Kind.FINISH)  # shared, because most jobs return nothing


class Phase(Enum):
    """How far an attempt has come in this process; it only advances, in this order."""

    LENT = "lent"  # it has not begun
    BEGUN = "begun"  # it is being performed
    NOTED = "noted"  # the recorder has its `working`
    LOST = "lost"  # the compare-and-set of `working` was lost: it is obsolete
    SETTLED = "settled"  # the recorder has its outcome, or it has none: nothing more is recorded


class SentRun(Protocol):
    """Another run of a job, which the job has sent under its own id: see :class:`asynctask.arrivals.NextRun`."""

    @property
    def delay_s(self) -> float:
        """Seconds before which the run does not start."""
        ...

    def columns(self, *, is_lone: bool, tries: int) -> dict[str, Any]:
        """The columns of the Event that the next run changes."""
        ...


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt of a job in this process: its ticket, its phase and its result.

    ``started_at`` is in microseconds; ``began`` and ``saved_at`` (of its checkpoint) are on the monotonic clock; ``slice``:
    its items, if it has several; ``next_run``: the job has sent itself again.

    Two threads may settle the attempt: the one that performs it, and another that gives that thread up; a third may record
    `working` meanwhile. So ``phase`` changes only under ``lock``, which is held until the recorder has the corresponding
    outcome: a second thread finds the attempt settled, and an outcome follows its `working` in the recorder. The performing
    thread sets the result without the lock; a thread that gives it up claims the attempt first.
    """

    ticket: Ticket
    job: CurrentJob | None = None
    phase: Phase = Phase.LENT
    result: Result | None = None
    slice: Slice | None = None
    started_at: int | None = None
    began: float = 0.0
    saved_at: float = 0.0
    next_run: SentRun | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def bind(self, job: CurrentJob) -> None:
        """Attaches ``job``: the middleware finds the attempt in it, and the job's code its Task and its checkpoint."""
        self.job = job
        job.local[ATTEMPT] = self
        job.belong(self.ticket.record.task, self.ticket.record.first_row if self.ticket.items == 1 else None)
        job.resume(self.ticket.saved.checkpoint)

    @property
    def is_lost(self) -> bool:
        """Whether the attempt is obsolete."""
        return self.phase is Phase.LOST

    @property
    def is_settled(self) -> bool:
        """Whether nothing more is recorded of the attempt."""
        return self.phase is Phase.SETTLED

    @property
    def is_refused(self) -> bool:
        """Whether the business refused the job."""
        return self.result is not None and self.result.kind is Kind.FAILED

    @property
    def has_failed(self) -> bool:
        """Whether the job refused or raised."""
        return self.result is not None and self.result.kind is not Kind.FINISH

    @property
    def is_final(self) -> bool:
        """Whether another attempt would end in the same error."""
        return self.result is not None and self.result.is_final

    # -- the result: the last one set counts

    def finish(self, result: Any, limit: int = 65_536) -> None:
        """The job returned; ``result`` is kept if it is JSON of at most ``limit`` bytes. Raises NotPerformed if the result
        contains work that was not performed, such as a coroutine."""
        if result is None:
            self.result = _RETURNED
            return
        kept, note = result_text(result, limit)
        self.result = Result(Kind.FINISH, None, kept, [Note("working", note)] if note else ())

    def fail(self, error: BaseException) -> None:
        """The job refused its item, for a business reason."""
        self.result = Result(Kind.FAILED, refusal_of(error))

    def raised(self, error: BaseException, cause: BaseException | None = None) -> None:
        """The job raised an error, a timeout or an interruption; ``cause``: the engine's own exception for that."""
        why = failure_of(error)
        if isinstance(error, JobInterrupted):
            self.result = Result(Kind.INTERRUPTED)
        elif self.result is None or self.result.failure != why or self.result.traceback is None:
            kind = Kind.TIMEOUT if isinstance(error, JobTimeout) else Kind.RAISED
            traced = self.traced(error, cause)
            self.result = Result(kind, why, is_final=isinstance(error, FinalError), traceback=traced)

    def traced(self, error: BaseException, cause: BaseException | None = None) -> str | None:
        """The traceback of an error as it is kept; arguments as those of :meth:`raised`."""
        return traceback_of(error if cause is None else cause, None if self.job is None else self.job.args)

    def add_lines(self, lines: Sequence[str]) -> None:
        """Appends lines of a backtrace to the message of the failure."""
        result = self.result
        if result is not None and result.failure is not None:
            text = "\n".join([result.failure.message, *lines])
            self.result = replace(result, failure=Failure(result.failure.code, text))

    def close(self) -> None:
        """Breaks the reference cycle with ``job``, so that both are freed without the garbage collector."""
        if self.job is not None:
            self.job.local.pop(ATTEMPT, None)


T = TypeVar("T")
Then = Callable[[bool], None]  # is called after the commit, with whether the compare-and-set was won
Lent = TypeVar("Lent", Ticket, Ticket | None)


class Running(Generic[T]):
    """The jobs that run in this process, each once, by its identity.

    These rules ensure that no reader misses a job or counts it twice:

    - **Add, then check.** A thread that performs a job first adds it, then checks whether it may begin. A thread that wants
      no job to begin (a stop, a suspect that is to run alone) first sets that state, then reads the set. So at least one of
      the two sees the other.
    - **Record, then remove.** The thread that ends a job removes it after the recorder has its outcome, or if it has none.
      A thread that must know that no job is left reads this set first, then the recorder: a job is always in one.
    - **Once.** Adding a job again changes nothing, and only the first removal counts, so the consequences of a job's end
      happen once.
    - **Copies are read.** A heartbeat, a check and a stop read a copy of the set: no thread waits here for another.

    Each operation is one atomic operation of a dict with integer keys. With a lock, the threads of short jobs waited for a
    holder that had lost the interpreter, at an eighth of the throughput.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._jobs: dict[int, T] = {}
        self._lock = threading.Lock()  # of the next two
        self._since: float | None = None  # when the set became non-empty
        self._busy_s = 0.0  # total before that

    def add(self, job: T) -> None:
        """Adds a job that begins to run."""
        self._jobs[id(job)] = job
        if self._since is None:
            self._count_time()

    def remove(self, job: T) -> bool:
        """Removes a job that no longer runs; False if it was not in the set."""
        if self._jobs.pop(id(job), None) is None:
            return False
        if not self._jobs:
            self._count_time()
        return True

    def _count_time(self) -> None:
        """Called when the set has become empty or non-empty."""
        with self._lock:
            now, since = self._clock(), self._since
            self._busy_s += 0.0 if since is None else now - since
            self._since = None  # before the set is read: a thread that adds a job meanwhile calls this, too
            if self._jobs:
                self._since = now

    def all(self) -> list[T]:
        """The jobs in the set, in the order in which they were added."""
        return list(self._jobs.copy().values())

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def busy_s(self) -> float:
        """Total seconds in which at least one job ran."""
        with self._lock:
            return self._busy_s + (0.0 if self._since is None else self._clock() - self._since)


class Tracker:
    """Records the progress and outcome of jobs in the ledger. :class:`asynctask.arrivals.ArrivalTracker` does so for jobs
    from foreign queues."""

    def __init__(self, ledger: Ledger, recorder: Recorder) -> None:
        self._ledger = ledger
        self._recorder = recorder
        self.running: Running[Attempt] = Running(ledger.clock.monotonic)
        self._finished = Note("finish", ledger.catalogue("finish"))
        self._working_text = ledger.catalogue("working")
        self._log = get_logger("asynctask.tracker")

    def now(self) -> int:
        """The ledger's time, in microseconds."""
        return self._ledger.now()

    # -- 1. begin

    def begin(self, keys: Sequence[tuple[str, int | None]]) -> list[Ticket | None]:
        """The tickets of jobs, in the order of ``keys``: each the job's id and the fence in its copy (None: its engine
        keeps and retries it). None for a job without an Event. Raises LedgerUnavailable."""
        asked = self._ledger.clock.monotonic()
        records = self.read([job_id for job_id, _ in keys])
        tickets = [self._ticket(fence, records[job_id], asked) if job_id in records else None for job_id, fence in keys]
        return self._resumed(tickets)

    def _resumed(self, tickets: list[Lent]) -> list[Lent]:
        """The tickets with the saved state of earlier attempts; untouched Events have none: most batches need no query."""
        chosen = [each for each in tickets if each and not each.is_untouched and each.verdict is Begin.RUN]
        if not chosen:
            return tickets
        with self._ledger.database.read() as connection:
            saved = read_saved(connection, [each.event_id for each in chosen])
        return [replace(each, saved=saved[each.event_id]) if each and each.event_id in saved else each for each in tickets]

    def borrowed(self, jobs: Sequence[Job], loan: Holding, asked: float, *, of_round: bool = False) -> list[Ticket]:
        """The tickets of jobs of a range that the ledger has just lent to this process; the loan replaces Begin. ``asked``:
        when the borrow was sent, on the monotonic clock. Raises LedgerUnavailable."""
        tickets = [
            Ticket(
                _as_lent(job),
                of_round=of_round,
                is_untouched=job.attempt == 1 and job.retries == 0 and job.items == 1 and not of_round,
                loan=loan,
                asked=asked,
            )
            for job in jobs
        ]
        return self._resumed(tickets)

    def read(self, job_ids: Sequence[str]) -> dict[str, EventRecord]:
        """The Events of these jobs, by job id. Raises LedgerUnavailable."""
        with self._ledger.database.read() as connection:
            return read_jobs(connection, job_ids)

    def _ticket(self, fence: int | None, record: EventRecord, asked: float) -> Ticket:
        row = record.row
        attempt = None if is_foreign(row, fence, record.task_id) else fence
        return Ticket(
            record,
            begin(row, attempt, record.task_state),
            elsewhere=fence is None,
            watched=row.watched or is_suspect(row),
            of_round=record.round_at is not None,
            is_untouched=untouched(record),
            asked=asked,
        )

    # -- 2. start

    def start(self, attempt: Attempt) -> None:
        """Marks the job as begun. For a watched job, ``working`` is in the ledger when this returns.

        If the attempt is lost afterwards, acknowledge the job without performing it: it belongs to another process, or has
        ended. Raises :class:`AttemptLost` if another thread has given this one up and settled the attempt.
        """
        ticket = attempt.ticket
        is_late = ticket.watched and ticket.of_round  # the next round counts from its start: see below
        if not attempt.began:
            attempt.began = self._ledger.clock.monotonic()
        with attempt.lock:
            if attempt.phase is Phase.SETTLED:
                raise AttemptLost(f"the thread of {ticket.job_id} was given up")
            if not is_late:
                attempt.started_at = self._ledger.now()
            if attempt.phase is Phase.LENT:
                attempt.phase = Phase.BEGUN
            self.running.add(attempt)
        if not ticket.watched:
            return
        done = threading.Event()
        self._note(attempt, done.set)
        done.wait()
        if is_late and not attempt.is_lost:
            # The interval to the next round counts from here: the commit may have taken longer than the interval.
            with attempt.lock:
                attempt.started_at = self._ledger.now()
            self._note(attempt)

    def save(self, attempt: Attempt) -> None:
        """Records that the job has begun, and the outcomes of a slice's items so far; committed when this returns."""
        done = threading.Event()
        if self._note(attempt, done.set):
            done.wait()

    def _note(self, attempt: Attempt, done: Callable[[], None] | None = None) -> bool:
        """Passes ``working`` to the recorder, with the job's new messages and checkpoint; False if it is settled."""
        with attempt.lock:
            if attempt.phase is Phase.SETTLED:
                return False
            self._recorder.put([self._working(attempt, done)])
            return True

    def note_long(self, older_than_s: float) -> None:
        """Records ``working`` of jobs that have run for longer than this, once each, and their unsaved checkpoints; called
        periodically."""
        now = self._ledger.clock.monotonic()
        for attempt in self.running.all():
            if attempt.began > now - older_than_s or attempt.result is not None or not _has_news(attempt, now):
                continue
            if attempt.lock.acquire(blocking=False):  # else another thread is settling it
                try:
                    if attempt.phase is not Phase.SETTLED:
                        self._recorder.put([self._working(attempt)])
                        attempt.saved_at = now
                finally:
                    attempt.lock.release()

    def ask_stops(self) -> None:
        """Makes ``should_stop()`` true in running jobs that a user stopped, or whose Task was paused or cancelled; called
        periodically. Queries the ledger only about jobs recorded as ``working``. Raises LedgerUnavailable."""
        noted = {each.ticket.event_id: each for each in self.running.all() if each.phase is Phase.NOTED}
        if noted:
            with self._ledger.database.read() as connection:
                asked = read_stops(connection, list(noted))
            for event_id in asked:
                if (job := noted[event_id].job) is not None:
                    job.ask_stop()

    def _working(self, attempt: Attempt, done: Callable[[], None] | None = None) -> Outcome:
        """The ``working`` outcome of an attempt. The caller holds the attempt's lock."""
        ticket, notes = attempt.ticket, self._opening(attempt)
        if attempt.started_at is not None and attempt.phase is Phase.BEGUN:
            attempt.phase = Phase.NOTED
        checkpoint = None if attempt.job is None else attempt.job.take_checkpoint()

        def then(won: bool) -> None:
            if not won:
                with attempt.lock:
                    attempt.phase = attempt.phase if attempt.phase is Phase.SETTLED else Phase.LOST
            if done is not None:
                done()

        news = _news_of(attempt)
        return Outcome(
            ticket.event_id, ticket.attempt, Kind.WORKING, notes=notes,
            values=_columns(news, started_at=attempt.started_at, checkpoint=checkpoint), then=then,
            elsewhere=ticket.elsewhere, marks=news.marks, failures=news.failures,
        )  # fmt: skip

    # -- 3. settle

    def settle(
        self,
        attempt: Attempt,
        *,
        retry_at: int | None = None,
        discarded: str | None = None,
        queue: str | None = None,
        then: Then | None = None,
    ) -> bool:
        """Passes the outcome to the group commit. ``then`` is called after the commit, with whether the compare-and-set was
        won. ``retry_at`` (microseconds): another attempt follows, in ``queue`` if that is given; ``discarded``: why the
        engine gave the job up outside its code. Idempotent: False if the attempt was settled before.
        """

        def make() -> Outcome:
            outcome = self.outcome(attempt, retry_at, discarded, then)
            outcome.values |= {} if queue is None else {"queue": queue}
            return outcome

        return self._end(attempt, make)

    def release(self, attempt: Attempt, then: Then | None = None, *, is_cancelled: bool = False) -> None:
        """Gives a job that has not run back to the ledger; cancels it if its Task is cancelled or ``is_cancelled``.
        Idempotent."""
        ticket = attempt.ticket
        kind = Kind.CANCELLED if is_cancelled or ticket.verdict is Begin.CANCEL else Kind.GIVEN_BACK
        outcome = Outcome(
            ticket.event_id, ticket.attempt, kind, then=then, elsewhere=ticket.elsewhere,
            worker=ticket.record.worker_name,
        )  # fmt: skip
        self._end(attempt, lambda: outcome)

    def forget(self, attempt: Attempt, *, is_held: bool = True) -> None:
        """Drops an attempt without a record; its copy may be acknowledged. ``is_held``: the job still counts for its loan,
        because it was not given back with the end of the loan. Idempotent."""
        if self._end(attempt, lambda: None) and is_held and attempt.ticket.loan is not None:
            attempt.ticket.loan.ended()

    def _end(self, attempt: Attempt, make: Callable[[], Outcome | None]) -> bool:
        """Settles an attempt; every attempt ends here. It is removed from ``running`` once the recorder has its outcome,
        see :class:`Running`. False if it was settled before."""
        with attempt.lock:
            if attempt.phase is Phase.SETTLED:
                return False
            if (outcome := make()) is not None:
                outcome.loan = attempt.ticket.loan
                self._recorder.put([outcome])
            attempt.phase = Phase.SETTLED
        self.running.remove(attempt)
        attempt.close()
        return True

    def put_off(self, attempts: Sequence[tuple[Attempt, str]], until: int) -> None:
        """Defers jobs that cannot be performed here: they wait in the ledger until ``until`` (microseconds), without using
        a retry. Adds the reason of each as a message, unless it is the Event's last one. Committed on return, so the copies
        may be acknowledged. Raises LedgerUnavailable.
        """
        applied = self._put_off([(each.ticket, why) for each, why in attempts], until)
        for attempt, _ in attempts:
            self.forget(attempt)
        self._recorder.announce(applied)

    @repeatable
    def _put_off(self, tickets: Sequence[tuple[Ticket, str]], until: int) -> list[Change]:
        with self._ledger.database.write() as connection:
            changes = [put_off(self._ledger, each.event_id, each.attempt, clean(why), until) for each, why in tickets]
            notify(connection)  # the hints do not change, and thus notify nobody, if other rows of the Task are due already
            return apply(connection, self._ledger, changes)

    def outcome(
        self, attempt: Attempt, retry_at: int | None, discarded: str | None = None, then: Then | None = None
    ) -> Outcome:
        """The outcome that :meth:`settle` passes to the group commit."""
        ticket, result, run = attempt.ticket, attempt.result, attempt.next_run
        record = ticket.record
        if discarded is not None:
            failure, run = Failure("discarded", self._ledger.catalogue("discarded", discarded)), None
            result = replace(result or _RETURNED, kind=Kind.DISCARDED, failure=failure)
        elif result is None and attempt.slice is not None:
            return self._outcome_of_slice(attempt, attempt.slice, retry_at, then)
        elif result is None:  # no middleware recorded a result
            result = _RETURNED
        if run is not None:
            retry_at = self._ledger.now() + micros(run.delay_s)
        kind = result.kind
        if retry_at is not None:
            retry_at = self._paused(ticket, retry_at)
            kind = kind if kind is Kind.INTERRUPTED else Kind.RETRY
        is_unread = ticket.is_untouched and attempt.phase in _NOT_NOTED
        # Nobody watches a short job, and no attempt continues from its checkpoint.
        is_short = is_unread and result.kind is Kind.FINISH
        checkpoint = None if attempt.job is None or is_short else attempt.job.take_checkpoint()
        is_named = result.kind is not Kind.FINISH or ticket.attempt > 1
        notes = self._opening(attempt, is_named=is_named) if attempt.started_at is not None else []
        notes += self._closing(result, retry_at, is_sent_again=attempt.next_run is not None)
        is_unread = is_unread and not kind.may_wait and checkpoint is None
        news = _news_of(attempt)
        values = _columns(news, result=None if run else result.text, started_at=attempt.started_at, checkpoint=checkpoint)
        if run is not None:
            values |= run.columns(is_lone=ticket.is_lone, tries=ticket.retries + 1)
        values |= error_columns(self._ledger, None if result.kind is Kind.FAILED else result.failure, result.traceback)
        return Outcome(
            record.id, record.row.attempt, kind, retry_at, then, ticket.elsewhere,
            Stage.UNREAD if is_unread else Stage.READ, worker=record.worker_name,
            notes=notes, failure=result.failure, values=values, seconds=self._seconds(attempt), marks=news.marks,
            failures=news.failures, record=record if is_unread else None,
        )  # fmt: skip

    def _paused(self, ticket: Ticket, retry_at: int) -> int:
        """When the next attempt may begin: at ``retry_at``, or later if the pause for its number of retries is longer."""
        asked_s = (retry_at - self._ledger.now()) / SECOND
        pause = pause_s(asked_s, ticket.retries)
        return self._ledger.now() + micros(pause) if pause > max(0.0, asked_s) else retry_at

    def _seconds(self, attempt: Attempt) -> float | None:
        has_run = attempt.began and attempt.started_at is not None
        return self._ledger.clock.monotonic() - attempt.began if has_run else None

    def _outcome_of_slice(self, attempt: Attempt, part: Slice, retry_at: int | None, then: Then | None) -> Outcome:
        """The outcome of an attempt at a slice, in which each item has its outcome or waits for the next attempt."""
        ticket, say, news = attempt.ticket, self._ledger.catalogue, part.take()
        status = Status.ERROR if retry_at is not None else part.status
        only = news.failures.get(0) if ticket.items == 1 else None  # the failure of a single item is that of the job
        notes = self._opening(attempt)
        if part.dropped:
            notes.append(
                Note("working", say("not_kept", f"{part.dropped} of {ticket.items}: no JSON, or over max_result_bytes"))
            )
        if retry_at is not None:
            said = only.message if only is not None else f"{part.waits}/{ticket.items}"
            notes += [Note("error", say("error", said)), Note("enqueue", say("retry"))]
        elif status is Status.FINISH:
            notes.append(self._finished)
        else:
            said = only.message if only is not None else f"{part.count(status)}/{ticket.items}"
            notes.append(Note(str(status), say(str(status), said)))
        return Outcome(
            ticket.event_id, ticket.attempt, _OF_SLICE[status] if retry_at is None else Kind.RETRY, retry_at, then,
            worker=ticket.record.worker_name,
            failure=None if only is None else Failure(only.code, only.message), seconds=self._seconds(attempt), notes=notes,
            values=_columns(news, started_at=attempt.started_at) | error_columns(self._ledger, *part.last_error),
            marks=news.marks, failures=news.failures,
        )  # fmt: skip

    def _opening(self, attempt: Attempt, *, is_named: bool = True) -> list[Note]:
        """The messages of an attempt that are not recorded yet: that it has begun, and the job's own. The begin names the
        process if ``is_named``: the millions of jobs that succeed at once take no room for it."""
        is_new = attempt.started_at is not None and attempt.phase in _NOT_NOTED
        process = self._ledger.holder if is_named else None
        notes = [Note("working", self._working_text, attempt.started_at, process=process)] if is_new else []
        if attempt.job is not None:
            notes += [Note("working", text, None, row) for text, row in attempt.job.take_messages()]
        return notes

    def _closing(self, result: Result, retry_at: int | None, *, is_sent_again: bool) -> list[Note]:
        say, text, kind = self._ledger.catalogue, result.failure.message if result.failure else "", result.kind
        if kind is Kind.FINISH:
            return [*result.notes, Note("enqueue", say("sent_again")) if is_sent_again else self._finished]
        if kind is Kind.FAILED:
            again = [] if retry_at is None else [Note("enqueue", say("sent_again"))]
            return [*result.notes, Note("failed", say("failed", text)), *again]
        key = {Kind.TIMEOUT: "timeout", Kind.INTERRUPTED: "interrupted"}.get(kind, "error")
        if result.failure is not None and result.failure.code == INTERRUPTED:
            key = "interrupted"
        notes = [*result.notes, Note("error", text if kind is Kind.DISCARDED else say(key, text))]
        if retry_at is not None or kind is Kind.INTERRUPTED:
            notes.append(Note("enqueue", say("retry")))
        return notes


_NOT_NOTED: Final = (Phase.LENT, Phase.BEGUN)
"""Phases before the recorder has a ``working`` with the time of the start."""

_OF_SLICE: Final = {
    Status.FINISH: Kind.FINISH,
    Status.FAILED: Kind.FAILED,
    Status.ERROR: Kind.RAISED,
    Status.CANCELLED: Kind.CANCELLED,
}


def _as_lent(job: Job) -> EventRecord:
    """The Event of a borrowed job, as far as the borrow read it."""
    is_first = job.attempt == 1 and job.retries == 0 and job.items == 1
    row = _FIRST if is_first else Row(Status.ENQUEUE, job.attempt, retries=job.retries, reserved=True, items=job.items)
    return EventRecord(
        job.event_id, job.job_id, job.task_id, job.seq, row, None, job.row, None, job.worker_name, job.queue, None,
        job.slots, line=job.line, task=job.task,
    )  # fmt: skip


_FIRST: Final = Row(Status.ENQUEUE, reserved=True)


def _has_news(attempt: Attempt, now: float) -> bool:
    """Whether a long job has something to record while it runs."""
    if attempt.phase in _NOT_NOTED:
        return True
    if now - attempt.saved_at < SAVE_S:
        return False
    if attempt.slice is not None:
        return attempt.slice.has_news
    return attempt.job is not None and attempt.job.has_news


def _columns(news: News, **columns: Any) -> dict[str, Any]:
    """The columns that an outcome sets besides those of its transition."""
    if news.results is not None:
        columns["result"] = news.results
    return {name: value for name, value in columns.items() if value is not None}


def _news_of(attempt: Attempt) -> News:
    return _NO_NEWS if attempt.slice is None or not attempt.slice.begun else attempt.slice.take()


_NO_NEWS: Final = News()
INTERRUPTED: Final = "interrupted"


def failure_of(error: BaseException) -> Failure:
    """The failure of an item that raised ``error``. A SystemExit is from an engine that ends its process; one from job code
    arrives as :class:`~asynctask.errors.JobExit`."""
    if isinstance(error, JobTimeout):
        return Failure("timeout", str(error))
    if isinstance(error, FinalError):
        return Failure(error.code, clean(str(error)))
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Failure(INTERRUPTED if isinstance(error, SystemExit) else "raised", clean(text))


def refusal_of(error: BaseException) -> Failure:
    """The failure of an item that the business refused with ``error``."""
    return Failure(clean(str(getattr(error, "code", "failed")))[:64] or "failed", clean(str(error)))


def result_text(value: Any, limit: int) -> tuple[str | None, str | None]:
    """A function's result as JSON text of at most ``limit`` bytes, and a message if it is not kept. Raises NotPerformed
    like :func:`~asynctask.job.refuse_work`, also for work nested in the result."""
    if value is None:
        return None, None
    try:
        text = orjson.dumps(value, default=_plain).decode()
    except TypeError as error:
        if isinstance(error.__cause__, NotPerformed):
            raise error.__cause__ from None
        return None, clean(f"The result was not kept: {error}")
    if len(text) > limit:
        return None, f"The result was not kept: {len(text)} bytes are over max_result_bytes ({limit})"
    return text, None


def _plain(value: Any) -> Any:
    refuse_work(value)
    if isinstance(value, set | frozenset):
        for each in value:
            refuse_work(each)
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump(mode="json")
    kind: Any = type(value)
    has_no_text = kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__
    if has_no_text or isinstance(value, set | frozenset | bytes):
        raise TypeError(f"{kind.__name__} is no JSON")
    return str(value)


# -- the middleware that records a tracked job; docs/reference/middleware.md has the table of what it records

ATTEMPT: Final = "asynctask.attempt"
"""Key of a tracked job's :class:`Attempt` in the job's ``local``."""


class TaskEventMiddleware:
    """Sets the start and the result of a tracked job; catches a business refusal, re-raises every other exception.

    Writes nothing to the ledger: the runtime around it first decides on a retry, then settles the attempt.
    """

    def __init__(self, tracker: Tracker, max_result_bytes: int = 65_536) -> None:
        self._tracker = tracker
        self._limit = max_result_bytes

    def __call__(self, worker: Worker, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
        attempt: Attempt | None = job.local.get(ATTEMPT)
        if attempt is None:  # not tracked
            return call_next()
        self._tracker.start(attempt)
        try:
            result = call_next()
        except AttemptLost:  # the attempt does not belong to this thread any more
            raise
        except BaseException as error:
            if worker.refuses(error) and not interrupted(job, error):
                attempt.fail(error)
                return None
            attempt.raised(error)
            raise
        attempt.finish(result, self._limit)
        return result
