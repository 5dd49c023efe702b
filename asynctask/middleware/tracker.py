"""The tracker: records the life of a job, for the middleware of any engine.

An engine (the own runtime, Dramatiq, ...) takes these steps for a job:

1. :meth:`Tracker.borrowed` for what the ledger has lent, or :meth:`Tracker.begin` for what a queue gave
(:class:`asynctask.arrivals.ArrivalTracker`): a :class:`Ticket` each, which says whether to run it. 2. :meth:`Tracker.start`
with its :class:`Attempt` when the job is performed. 3. :meth:`Attempt.finish`, :meth:`Attempt.fail` or
:meth:`Attempt.raised` with its :class:`Result`. Nothing is written yet. 4. :meth:`Tracker.settle` once the engine has
decided on a retry: hands the outcome to the group commit, which calls ``then`` after the commit. Only then may the engine
acknowledge the job.
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
from asynctask.job import CurrentJob, interrupted, refuse_work
from asynctask.ledger.base import Ledger
from asynctask.ledger.events import (
    Change,
    EventRecord,
    Failure,
    Note,
    Saved,
    apply,
    read_jobs,
    read_saved,
    read_stops,
    untouched,
)
from asynctask.ledger.lending import Holding, Job
from asynctask.ledger.recorder import Kind, Outcome, Recorder, Stage
from asynctask.ledger.standalone import put_off
from asynctask.logs import get_logger
from asynctask.messages import clean
from asynctask.worker import Worker

SAVE_S: Final = 0.2
"""Shortest time between two saves of a running job's checkpoint. Each is a commit; after a kill the job repeats what it did
since the last one."""


class AttemptLost(AsyncTaskError):
    """The attempt of this thread is obsolete.

    It belonged to another process or had ended when it was to begin; or the thread was abandoned while it performed, and
    the outcome was recorded without it.
    """

    code = "attempt_lost"


# -- what the ledger said of a job, and what came of it

_NOTHING_SAVED: Final = Saved(None, None, None)


@dataclass(frozen=True, slots=True)
class Ticket:
    """What the ledger said of a job when it lent it to this process, or when its copy arrived.

    ``record``: its Event, as far as it was read; ``verdict``: whether its attempt may be performed. ``elsewhere``: kept,
    delivered and retried by its engine, without a fence. ``watched``: a process that held it died, so ``working`` is
    committed before it begins. ``of_round``: its Task has an interval, which counts from its start. ``is_untouched``:
    nothing was written of the Event, so its end may be compared with ``record``. ``loan``: the loan or the claim that it
    was borrowed with. ``asked``: when the ledger was asked, on the monotonic clock. ``saved``: what earlier attempts saved.
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
    ) -> Ticket:
        """One of which no more than this is known here."""
        row = Row(Status.ENQUEUE, attempt, retries=retries, deaths=deaths, reserved=True)
        record = EventRecord(
            event_id, job_id, task_id, None, row, None, None, None, "", "", None, 1, callback_of=callback_of
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
        """The attempt that it is for: the fence of whatever is recorded of it."""
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
        """Whether a process died under it: it runs alone."""
        return is_suspect(self.record.row)

    @property
    def has_ended(self) -> bool:
        """Whether the job had ended when it arrived."""
        return self.record.row.status in TERMINAL


NO_TICKET: Final = Ticket.made(Begin.RUN, "")
"""That of a job which no Event records."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of an attempt, before anybody decided on a retry.

    ``text``: the function's result as JSON; ``notes``: messages about it; ``is_final``: another attempt would end in the
    same error.
    """

    kind: Kind
    failure: Failure | None = None
    text: str | None = None
    notes: Sequence[Note] = ()
    is_final: bool = False


_RETURNED: Final = Result(Kind.FINISH)  # shared, because most jobs return nothing


class Phase(Enum):
    """How far an attempt has come in this process. It only goes on, in this order."""

    LENT = "lent"  # it has not begun
    BEGUN = "begun"  # it is performed
    NOTED = "noted"  # the recorder has its `working`
    LOST = "lost"  # the compare-and-set of `working` was lost: it is obsolete
    SETTLED = "settled"  # the recorder has its outcome, or it has none: nothing more is recorded of it


class SentRun(Protocol):
    """Another run of a job, which the job has sent under its own id: see :class:`asynctask.arrivals.NextRun`."""

    @property
    def delay_s(self) -> float:
        """It starts no sooner."""
        ...

    def columns(self, *, is_lone: bool, tries: int) -> dict[str, Any]:
        """The columns of the Event that change with it."""
        ...


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt of a job in this process: what the ledger said of it, how far it has come, and what came of it.

    ``started_at`` is in microseconds, ``began`` and ``saved_at`` (its checkpoint) on the monotonic clock; ``slice``: its
    items, if it has several; ``next_run``: the job has sent itself again.

    Two threads may end it: the one that performs it, and another that gives that one up; a third notes meanwhile that it
    works. So ``phase`` changes under ``lock`` alone, which is held until the recorder has what the change says: of two that
    settle it, the second finds it settled, and an outcome follows its `working` in the recorder. The performing thread sets
    the result without the lock; whoever gives that thread up claims the attempt first.
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
        """``job`` is what its code sees: the middleware finds the attempt there, and the job its checkpoint."""
        self.job = job
        job.local[ATTEMPT] = self
        job.resume(self.ticket.saved.checkpoint)

    @property
    def is_lost(self) -> bool:
        """Whether it is obsolete."""
        return self.phase is Phase.LOST

    @property
    def is_settled(self) -> bool:
        """Whether nothing more is recorded of it."""
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

    # -- its result: the last one counts

    def finish(self, result: Any, limit: int = 65_536) -> None:
        """The job returned; ``result`` is kept if it is JSON of at most ``limit`` bytes. Raises NotPerformed for a result
        that contains work that nobody performs."""
        if result is None:
            self.result = _RETURNED
            return
        kept, note = result_text(result, limit)
        self.result = Result(Kind.FINISH, None, kept, [Note("working", note)] if note else ())

    def fail(self, error: BaseException) -> None:
        """The job refused, for a business reason."""
        self.result = Result(Kind.FAILED, refusal_of(error))

    def raised(self, error: BaseException) -> None:
        """The job raised: an error, a timeout, an interruption."""
        if isinstance(error, JobTimeout):
            self.result = Result(Kind.TIMEOUT, Failure("timeout", str(error)))
        elif isinstance(error, JobInterrupted):
            self.result = Result(Kind.INTERRUPTED)
        else:
            self.result = Result(Kind.RAISED, failure_of(error), is_final=isinstance(error, FinalError))

    def add_lines(self, lines: Sequence[str]) -> None:
        """Adds lines, of a backtrace, to the message of the failure."""
        result = self.result
        if result is not None and result.failure is not None:
            text = "\n".join([result.failure.message, *lines])
            self.result = replace(result, failure=Failure(result.failure.code, text))

    def close(self) -> None:
        """Breaks the reference cycle with its job, which would wait for the garbage collector: nothing more is said."""
        if self.job is not None:
            self.job.local.pop(ATTEMPT, None)


T = TypeVar("T")
Lent = TypeVar("Lent", Ticket, Ticket | None)


class Running(Generic[T]):
    """The jobs at work in this process, each once, by its identity.

    The rule, by which nobody who asks misses a job or counts it twice:

    - **Add, then ask.** Whoever performs a job adds it, and asks only then whether it may begin. Whoever wants nothing to
      begin (a stop, a suspect that is to run alone) says so, and reads the set only then. So one of the two sees the other.
    - **Record, then remove.** A job is removed by whoever ends it, after the recorder has its outcome, or because it has
      none. Whoever wants to know that nothing is left (a stop, a process that leaves) reads this set first, and what the
      recorder has afterwards: at any moment a job is in one of the two, or in both.
    - **Once.** A job that is added again is the same one, and the first removal is the only one that counts, so whatever
      follows the end of a job follows it once.
    - **Copies are read.** A heartbeat, a check and a stop read a copy, and ask the jobs in it: nobody waits here for what
      another thread does with a job.

    Each of these is one operation of a dict with numbers for keys, which no other thread can divide. A lock around it made
    the threads of short jobs queue behind one that had lost the interpreter while it held the lock: an eighth of the rate.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._jobs: dict[int, T] = {}
        self._lock = threading.Lock()  # of the two below
        self._since: float | None = None  # when the first of them was added
        self._busy_s = 0.0  # until then

    def add(self, job: T) -> None:
        """It is at work from now on."""
        self._jobs[id(job)] = job
        if self._since is None:
            self._count_time()

    def remove(self, job: T) -> bool:
        """It is at work no more; False if it was not."""
        if self._jobs.pop(id(job), None) is None:
            return False
        if not self._jobs:
            self._count_time()
        return True

    def _count_time(self) -> None:
        """The set has become empty, or is not any more."""
        with self._lock:
            now, since = self._clock(), self._since
            self._busy_s += 0.0 if since is None else now - since
            self._since = None  # before the look at the set: who adds meanwhile comes here, too
            if self._jobs:
                self._since = now

    def all(self) -> list[T]:
        """Those at work now, in the order in which they were added."""
        return list(self._jobs.copy().values())

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def busy_s(self) -> float:
        """Total seconds in which at least one job was at work."""
        with self._lock:
            return self._busy_s + (0.0 if self._since is None else self._clock() - self._since)


class Tracker:
    """Records the life of jobs in the ledger. For jobs that come through a foreign queue there is
    :class:`asynctask.arrivals.ArrivalTracker`."""

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
        """The tickets of jobs, by their ids and the fences in their copies (None: their engine keeps and retries them), in
        order; None for a job without an Event. Raises LedgerUnavailable."""
        asked = self._ledger.clock.monotonic()
        records = self.read([job_id for job_id, _ in keys])
        tickets = [self._ticket(fence, records[job_id], asked) if job_id in records else None for job_id, fence in keys]
        return self._resumed(tickets)

    def _resumed(self, tickets: list[Lent]) -> list[Lent]:
        """With what earlier attempts saved. An untouched Event has nothing, so most batches need no query."""
        chosen = [each for each in tickets if each and not each.is_untouched and each.verdict is Begin.RUN]
        if not chosen:
            return tickets
        with self._ledger.database.read() as connection:
            saved = read_saved(connection, [each.event_id for each in chosen])
        return [replace(each, saved=saved[each.event_id]) if each and each.event_id in saved else each for each in tickets]

    def borrowed(self, jobs: Sequence[Job], loan: Holding, asked: float, *, of_round: bool = False) -> list[Ticket]:
        """The tickets of jobs of a range that the ledger has just lent to this process; the loan replaces Begin. Raises
        LedgerUnavailable."""
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
        """Marks the job as performed now. For a watched job, ``working`` is in the ledger when this returns.

        If the attempt is lost afterwards, acknowledge the job and do not perform it: it belongs to another process, or has
        ended. Raises :class:`AttemptLost` if it was settled without the thread that is about to perform it.
        """
        ticket = attempt.ticket
        is_late = ticket.watched and ticket.of_round  # its start is that of its round: see below
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
            # The next round counts from here: the commit may have taken longer than the interval.
            with attempt.lock:
                attempt.started_at = self._ledger.now()
            self._note(attempt)

    def save(self, attempt: Attempt) -> None:
        """Records that the job has begun, and the current outcomes of a slice's items; in the ledger when this returns."""
        done = threading.Event()
        if self._note(attempt, done.set):
            done.wait()

    def _note(self, attempt: Attempt, done: Callable[[], None] | None = None) -> bool:
        """Hands ``working`` to the recorder, with what the job has said and saved; False if it is settled."""
        with attempt.lock:
            if attempt.phase is Phase.SETTLED:
                return False
            self._recorder.put([self._working(attempt, done)])
            return True

    def note_long(self, older_than_s: float) -> None:
        """Records ``working`` of jobs that run for longer than this, once each, and unsaved checkpoints; called
        periodically."""
        now = self._ledger.clock.monotonic()
        for attempt in self.running.all():
            if attempt.began > now - older_than_s or attempt.result is not None or not _has_news(attempt, now):
                continue
            if attempt.lock.acquire(blocking=False):  # else it is settled at this moment
                try:
                    if attempt.phase is not Phase.SETTLED:
                        self._recorder.put([self._working(attempt)])
                        attempt.saved_at = now
                finally:
                    attempt.lock.release()

    def ask_stops(self) -> None:
        """Makes ``should_stop()`` true in the running jobs that a user stopped, or whose Task was paused or cancelled;
        called periodically. Reads the ledger if a job runs that was recorded as ``working``. Raises LedgerUnavailable."""
        noted = {each.ticket.event_id: each for each in self.running.all() if each.phase is Phase.NOTED}
        if noted:
            with self._ledger.database.read() as connection:
                asked = read_stops(connection, list(noted))
            for event_id in asked:
                if (job := noted[event_id].job) is not None:
                    job.ask_stop()

    def _working(self, attempt: Attempt, done: Callable[[], None] | None = None) -> Outcome:
        """The outcome that says it works. The caller holds the lock."""
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
        then: Callable[[bool], None] | None = None,
    ) -> bool:
        """Passes the outcome to the group commit. ``then`` is called after the commit, with whether it was won.

        ``retry_at`` (microseconds): another attempt follows, in ``queue`` if that is given; ``discarded``: why the engine
        gave the job up outside its code. Idempotent: False if it was settled before.
        """

        def make() -> Outcome:
            outcome = self.outcome(attempt, retry_at, discarded, then)
            outcome.values |= {} if queue is None else {"queue": queue}
            return outcome

        return self._end(attempt, make)

    def release(self, attempt: Attempt, then: Callable[[bool], None] | None = None, *, is_cancelled: bool = False) -> None:
        """Returns a fetched job to the ledger unrun, or cancels it, with its Task or if ``is_cancelled``. Idempotent."""
        ticket = attempt.ticket
        kind = Kind.CANCELLED if is_cancelled or ticket.verdict is Begin.CANCEL else Kind.GIVEN_BACK
        outcome = Outcome(
            ticket.event_id, ticket.attempt, kind, then=then, elsewhere=ticket.elsewhere,
            worker=ticket.record.worker_name,
        )  # fmt: skip
        self._end(attempt, lambda: outcome)

    def forget(self, attempt: Attempt, *, is_held: bool = True) -> None:
        """Drops an attempt lost before it was performed: records nothing; its copy may be acknowledged. Idempotent.
        ``is_held``: it was not given back with others of its loan."""
        if self._end(attempt, lambda: None) and is_held and attempt.ticket.loan is not None:
            attempt.ticket.loan.ended()

    def _end(self, attempt: Attempt, make: Callable[[], Outcome | None]) -> bool:
        """The one way in which an attempt ends here: the first thread settles it. It leaves those that run when the
        recorder has its outcome, see :class:`Running`. False if it was settled before."""
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
        """Makes fetched jobs that cannot be performed here wait in the ledger until ``until`` (microseconds), spending no
        retry.

        Each has a message with the reason, which is not repeated while it is the Event's last one. Committed on return, so
        the copies may be acknowledged. Raises LedgerUnavailable.
        """
        applied = self._put_off([(each.ticket, why) for each, why in attempts], until)
        for attempt, _ in attempts:
            self.forget(attempt)
        self._recorder.announce(applied)

    @repeatable
    def _put_off(self, tickets: Sequence[tuple[Ticket, str]], until: int) -> list[Change]:
        with self._ledger.database.write() as connection:
            changes = [put_off(self._ledger, each.event_id, each.attempt, clean(why), until) for each, why in tickets]
            notify(connection)  # other rows of the Task may be due already, so its hints are no news
            return apply(connection, self._ledger, changes)

    def outcome(
        self,
        attempt: Attempt,
        retry_at: int | None,
        discarded: str | None = None,
        then: Callable[[bool], None] | None = None,
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
        is_unread = ticket.is_untouched and attempt.phase in _UNSAID
        # No user watched a short job, and no attempt continues from it.
        is_short = is_unread and result.kind is Kind.FINISH
        checkpoint = None if attempt.job is None or is_short else attempt.job.take_checkpoint()
        notes = self._opening(attempt) if attempt.started_at is not None else []
        notes += self._closing(result, retry_at, is_sent_again=attempt.next_run is not None)
        is_unread = is_unread and not kind.may_wait and checkpoint is None
        news = _news_of(attempt)
        text = result.text if run is None else None
        values = _columns(news, result=text, started_at=attempt.started_at, checkpoint=checkpoint)
        if run is not None:
            values |= run.columns(is_lone=ticket.is_lone, tries=ticket.retries + 1)
        return Outcome(
            record.id, record.row.attempt, kind, retry_at, then, ticket.elsewhere,
            Stage.UNREAD if is_unread else Stage.READ, worker=record.worker_name,
            notes=notes, failure=result.failure, values=values, seconds=self._seconds(attempt), marks=news.marks,
            failures=news.failures, record=record if is_unread else None,
        )  # fmt: skip

    def _paused(self, ticket: Ticket, retry_at: int) -> int:
        """When another attempt follows."""
        asked_s = (retry_at - self._ledger.now()) / SECOND
        pause = pause_s(asked_s, ticket.retries)
        return self._ledger.now() + micros(pause) if pause > max(0.0, asked_s) else retry_at

    def _seconds(self, attempt: Attempt) -> float | None:
        has_run = attempt.began and attempt.started_at is not None
        return self._ledger.clock.monotonic() - attempt.began if has_run else None

    def _outcome_of_slice(
        self, attempt: Attempt, part: Slice, retry_at: int | None, then: Callable[[bool], None] | None
    ) -> Outcome:
        """The end of an attempt in which each item got its outcome, or waits for the next attempt."""
        ticket, say, news = attempt.ticket, self._ledger.catalogue, part.take()
        status = Status.ERROR if retry_at is not None else part.status
        only = news.failures.get(0) if ticket.items == 1 else None  # of a batch of one item, its failure is that of the job
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
            values=_columns(news, started_at=attempt.started_at), marks=news.marks, failures=news.failures,
        )  # fmt: skip

    def _opening(self, attempt: Attempt) -> list[Note]:
        """What has not been said yet of an attempt that has begun: that, and its messages."""
        says = attempt.started_at is not None and attempt.phase in _UNSAID
        notes = [Note("working", self._working_text, attempt.started_at)] if says else []
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


_UNSAID: Final = (Phase.LENT, Phase.BEGUN)
"""Before the recorder has a ``working`` with the time of the start."""

_OF_SLICE: Final = {
    Status.FINISH: Kind.FINISH,
    Status.FAILED: Kind.FAILED,
    Status.ERROR: Kind.RAISED,
    Status.CANCELLED: Kind.CANCELLED,
}


def _as_lent(job: Job) -> EventRecord:
    """The Event of a job that was borrowed, as far as the borrow read it."""
    is_first = job.attempt == 1 and job.retries == 0 and job.items == 1
    row = _FIRST if is_first else Row(Status.ENQUEUE, job.attempt, retries=job.retries, reserved=True, items=job.items)
    return EventRecord(
        job.event_id, job.job_id, job.task_id, job.seq, row, None, job.row, None, job.worker_name, job.queue, None,
        job.slots, line=job.line,
    )  # fmt: skip


_FIRST: Final = Row(Status.ENQUEUE, reserved=True)


def _has_news(attempt: Attempt, now: float) -> bool:
    """Whether a long job has something to be written while it runs."""
    if attempt.phase in _UNSAID:
        return True
    if now - attempt.saved_at < SAVE_S:
        return False
    if attempt.slice is not None:
        return attempt.slice.has_news
    return attempt.job is not None and attempt.job.has_news


def _columns(news: News, **columns: Any) -> dict[str, Any]:
    """The columns that an outcome sets beside those of its transition."""
    if news.results is not None:
        columns["result"] = news.results
    return {name: value for name, value in columns.items() if value is not None}


def _news_of(attempt: Attempt) -> News:
    return _NO_NEWS if attempt.slice is None or not attempt.slice.begun else attempt.slice.take()


_NO_NEWS: Final = News()


INTERRUPTED: Final = "interrupted"


def failure_of(error: BaseException) -> Failure:
    """The failure of an item that raised this. A SystemExit is that of an engine that ends its process: one of job code is
    a :class:`~asynctask.errors.JobExit`."""
    if isinstance(error, JobTimeout):
        return Failure("timeout", str(error))
    if isinstance(error, FinalError):
        return Failure(error.code, clean(str(error)))
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Failure(INTERRUPTED if isinstance(error, SystemExit) else "raised", clean(text))


def refusal_of(error: BaseException) -> Failure:
    """The failure of an item that the business refused with this."""
    return Failure(clean(str(getattr(error, "code", "failed")))[:64] or "failed", clean(str(error)))


def result_text(value: Any, limit: int) -> tuple[str | None, str | None]:
    """A function's result as JSON text of at most ``limit`` bytes, and a message if it is not kept. Raises NotPerformed as
    :func:`~asynctask.job.refuse_work` does, also for work inside the result."""
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
    says_nothing = kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__
    if says_nothing or isinstance(value, set | frozenset | bytes):
        raise TypeError(f"{kind.__name__} is no JSON")
    return str(value)


# -- the middleware that records a tracked job; docs/reference/middleware.md has the table of what it records

ATTEMPT: Final = "asynctask.attempt"
"""Key of a tracked job's :class:`Attempt` in the job's ``local``."""


class TaskEventMiddleware:
    """Records the start and the result of the job; stops a business refusal, re-raises everything else.

    Writes nothing itself: the runtime around it first decides on a retry, then settles the attempt.
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
        except AttemptLost:  # it does not belong to this thread any more
            raise
        except BaseException as error:
            if worker.refuses(error) and not interrupted(job, error):
                attempt.fail(error)
                return None
            attempt.raised(error)
            raise
        attempt.finish(result, self._limit)
        return result
