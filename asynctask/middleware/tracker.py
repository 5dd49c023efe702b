"""The tracker: records the life of a job, for the middleware of any engine.

An engine (the own runtime, Dramatiq, ...) takes these steps for a job:

1. :meth:`Tracker.begin` with the fetched batch, or :meth:`Tracker.arrive` for jobs that the ledger may not know: a
:class:`Ticket` each, which says whether to run it. 2. :meth:`Tracker.start` when the job is performed. 3.
:meth:`Ticket.finish`, :meth:`Ticket.fail` or :meth:`Ticket.raised` with its result. Nothing is written yet. 4.
:meth:`Tracker.settle` once the engine has decided on a retry: hands the outcome to the group commit, which calls ``then``
after the commit. Only then may the engine acknowledge the job.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from asynctask.clock import SECOND, micros
from asynctask.core.states import TERMINAL, Reason, Status
from asynctask.core.transitions import Begin, Row, begin, is_foreign, is_suspect, pause_s
from asynctask.database.retrying import repeatable
from asynctask.errors import AsyncTaskError, FinalError, IdInUse, InputError, JobInterrupted, JobTimeout, NotPerformed
from asynctask.iterable import News, Slice
from asynctask.job import CurrentJob, interrupted, refuse_work
from asynctask.ledger import foreign
from asynctask.ledger.base import Ledger, dumps
from asynctask.ledger.events import (
    Change,
    EventRecord,
    Failure,
    Note,
    apply,
    read_jobs,
    read_saved,
    read_stops,
    untouched,
)
from asynctask.ledger.lending import Job, OwnClaim, OwnLoan
from asynctask.ledger.processes import engine_of
from asynctask.ledger.recorder import Outcome, Recorder
from asynctask.ledger.standalone import ENGINE, MAX_OPTIONS, Arrival, NextRun, enqueue, put_off, reopen
from asynctask.logs import get_logger
from asynctask.messages import clean
from asynctask.worker import Worker

SAVE_S: Final = 0.2
"""Shortest time between two saves of a running job's checkpoint. Each is a commit; after a kill the job repeats what it did
since the last one."""

LOOK_EVERY: Final = 3
"""Ticks of a tenth of a second between two queries for stopped jobs."""


_NO_EVENT: Final = (
    "it is dropped unrun: another ledger dispatched it, or this one was restored or purged since; give all programs of a"
    " queue one database_url, or other ledgers other queues"
)


class AttemptLost(AsyncTaskError):
    """The attempt of this thread is obsolete.

    It belonged to another process or had ended when it was to begin; or the thread was abandoned while it performed, and
    the outcome was recorded without it.
    """

    code = "attempt_lost"


@dataclass(slots=True)
class Ticket:
    """The right to perform one attempt of a job, and its outcome."""

    verdict: Begin
    job_id: str
    event_id: int
    task_id: int | None
    attempt: int
    retries: int = 0
    watched: bool = False  # a process that held it died: `working` is committed before it begins
    is_suspect: bool = False  # a process died under it: it runs alone
    elsewhere: bool = False  # kept, delivered and retried by its engine, without a fence
    holder: str | None = None  # the process that performed it when it arrived
    awaited: bool = False  # something waits for the commit of its end: a round, a key, a thread
    of_round: bool = False  # its Task has an interval, which counts from its start
    started_at: int | None = None
    status: Status | None = None
    reason: Reason = Reason.RETURNED
    failure: Failure | None = None
    result: str | None = None
    said: bool = False  # an outcome already contains the working message
    lost: bool = False  # the compare-and-set of `working` was lost: this attempt is obsolete
    settled: bool = False
    is_final: bool = False  # another attempt would end in the same error
    seen: EventRecord | None = None  # the Event at Begin, if untouched and not written by this process since
    job: CurrentJob | None = None
    callback_of: int | None = None  # the Task whose callback it is
    checkpoint: str | None = None  # the checkpoint of an earlier attempt
    items: int = 1  # 0: of an untracked job, whose row goes when it has ended
    row: int | None = None  # in the list, or that of the first item
    marks: str | None = None  # of a slice: outcomes of its items in earlier attempts
    results: str | None = None  # and their results
    slice: Slice | None = None  # this attempt of it
    worker: str = ""
    knobs: tuple[float | None, ...] = ()  # of its Task at Begin
    began: float = 0.0  # on the monotonic clock
    saved_at: float = 0.0  # its place, on the same
    sent_at: int = 0  # when its present run was sent, as far as it was read
    next_run: NextRun | None = None  # the job has sent itself again
    ended_before: bool = False  # it had ended when it arrived
    loan: OwnLoan | OwnClaim | None = None  # the loan, or the claim, that it was borrowed with
    _notes: list[Note] = field(default_factory=list)
    _free: list[None] = field(default_factory=lambda: [None])

    @property
    def is_lone(self) -> bool:
        """As :attr:`EventRecord.is_lone`."""
        return self.task_id is None and self.callback_of is None

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
        """The job returned; ``result`` is kept if it is JSON of at most ``limit`` bytes. Raises NotPerformed for a result
        that contains work that nobody performs."""
        kept, note = result_text(result, limit)
        self.status, self.reason, self.failure, self.result = Status.FINISH, Reason.RETURNED, None, kept
        if note:
            self._notes.append(Note("working", note))

    def fail(self, error: BaseException) -> None:
        """The job refused, for a business reason."""
        self._drop_result()
        self.status, self.reason = Status.FAILED, Reason.REFUSED
        self.failure = refusal_of(error)

    def ignore(self, why: str) -> None:
        """The job ended, and asks that its engine records no outcome; ``why`` is the message."""
        self._drop_result()
        self.status, self.reason, self.failure = Status.FINISH, Reason.RETURNED, None
        self._notes = [Note("working", why)]

    def raised(self, error: BaseException) -> None:
        """The job raised: an error, a timeout, an interruption."""
        self._drop_result()
        if isinstance(error, JobTimeout):
            self.status, self.reason, self.failure = Status.ERROR, Reason.TIMEOUT, Failure("timeout", str(error))
            return
        if isinstance(error, JobInterrupted):
            self.status, self.reason, self.failure = Status.ERROR, Reason.INTERRUPTED, None
            return
        self.status, self.reason = Status.ERROR, Reason.RAISED
        self.failure, self.is_final = failure_of(error), isinstance(error, FinalError)

    def add_lines(self, lines: Sequence[str]) -> None:
        """Adds lines, of a backtrace, to the message of the failure."""
        if self.failure is not None:
            self.failure = Failure(self.failure.code, "\n".join([self.failure.message, *lines]))

    def lost_performer(self, text: str) -> None:
        """The process that performed the job died, while the recording one lives; ``text`` is the message."""
        self._drop_result()
        self.status, self.reason, self.failure = Status.ERROR, Reason.DISCARDED, Failure("worker_lost", text)

    def report(self) -> dict[str, Any]:
        """The outcome and the job's messages as JSON values, for another process that records them."""
        return {
            "status": self.status,
            "reason": self.reason,
            "failure": None if self.failure is None else [self.failure.code, self.failure.message],
            "result": self.result,
            "is_final": self.is_final,
            "next_run": None if self.next_run is None else list(self.next_run),
            "notes": [list(note) for note in self._notes],
            "messages": [] if self.job is None else self.job.take_messages(),
            "place": None if self.job is None else self.job.take_place(),
        }

    def adopt(self, report: Mapping[str, Any]) -> None:
        """Sets the outcome of another process's :meth:`report`."""
        self.status = None if report["status"] is None else Status(report["status"])
        self.reason, self.is_final = Reason(report["reason"]), bool(report["is_final"])
        self.failure = None if report["failure"] is None else Failure(*report["failure"])
        self.next_run = None if report["next_run"] is None else NextRun(*report["next_run"])
        self.result, self._notes = report["result"], [Note(*note) for note in report["notes"]]
        if self.job is not None:
            for text, _ in report["messages"]:
                self.job.message(text)
            self.job.adopt_place(report["place"])

    def _drop_result(self) -> None:
        """Drops the result, because a middleware outside the recording one may raise after the job returned."""
        self.result, self._notes = None, []


class Tracker:
    """Records the life of jobs in the ledger, for any engine.

    A job that arrives without a fence is kept, delivered and retried by its engine: the outcome of any copy counts while
    the Event is open, the engine alone decides on another attempt, and the job never waits in the ledger for the
    dispatcher.
    """

    def __init__(self, ledger: Ledger, recorder: Recorder) -> None:
        self._ledger = ledger
        self._recorder = recorder
        self._running: dict[int, tuple[float, Ticket]] = {}
        self._lock = threading.Lock()
        self._finished = Note("finish", ledger.catalogue("finish"))
        self._working_text = ledger.catalogue("working")
        self._log = get_logger("asynctask.tracker")

    def now(self) -> int:
        """The ledger's time, in microseconds."""
        return self._ledger.now()

    # -- 1. begin

    def begin(self, keys: Sequence[tuple[str, int | None]], *, fetched: bool = False) -> list[Ticket | None]:
        """The tickets of jobs, by their ids and the fences in their copies (None: their engine keeps and retries them), in
        order; None for a job without an Event. ``fetched``: from a queue that is no engine's; a copy of what a process
        holds by now, or nobody, is dropped. Raises LedgerUnavailable."""
        records = self.read([job_id for job_id, _ in keys])
        tickets = [self._ticket(attempt, records[job_id]) if job_id in records else None for job_id, attempt in keys]
        if fetched and (strays := self._strays(list(records.values()))):
            for ticket in tickets:
                if ticket is not None and ticket.event_id in strays:
                    ticket.verdict = Begin.DROP
        self._read_places([each for each in tickets if each and each.seen is None and each.verdict is Begin.RUN])
        return tickets

    def _strays(self, records: Sequence[EventRecord]) -> set[int]:
        """Those of these Events that wait, and that no foreign queue holds."""
        waiting = [each for each in records if each.row.status is Status.ENQUEUE and each.row.due_at is None]
        claimed = {each.id: each.row.process for each in waiting if each.row.process is not None}
        in_loans = [each for each in waiting if each.id not in claimed and each.task_id is not None]
        lenders: Mapping[int, str] = {}
        if in_loans:
            with self._ledger.database.read() as connection:
                lenders = foreign.holders(connection, in_loans)
        held = {**claimed, **{each.id: lenders.get(each.id) for each in in_loans}}
        return {i for i, holder in held.items() if holder is None or not foreign.is_queue(holder)}

    def arrive(self, arrivals: Sequence[Arrival]) -> list[Ticket]:
        """Tickets for jobs of which the ledger may not know, in order: one without an Event (pushed by hand, or by another
        program) gets a stand-alone one. Raises LedgerUnavailable, and InputError as :meth:`enqueue`.

        A copy with an attempt was dispatched by a ledger that has its Event. If this one has not, the copy is another
        ledger's, or older than a restored backup or a purge: it is dropped. Its own ledger, if there is one, finds it lost.
        """
        keys = [(arrival.job_id, arrival.attempt) for arrival in arrivals]
        tickets = self.begin(keys)
        if None in tickets:
            self.enqueue(
                [each for each, ticket in zip(arrivals, tickets, strict=True) if ticket is None and not each.attempt]
            )
            tickets = self.begin(keys)
        for arrival, ticket in zip(arrivals, tickets, strict=True):
            if (
                ticket is not None
                and ticket.attempt > 1
                and arrival.sent_at is not None
                and arrival.sent_at < ticket.sent_at
            ):
                ticket.verdict = Begin.DROP  # a late copy of an earlier run under this id
        return [ticket or self._dropped(each) for each, ticket in zip(arrivals, tickets, strict=True)]

    def _dropped(self, arrival: Arrival) -> Ticket:
        self._log.error(
            "copy_of_no_event", job_id=arrival.job_id, attempt=arrival.attempt, worker=arrival.worker_name,
            queue=arrival.queue, hint=_NO_EVENT,
        )  # fmt: skip
        return Ticket(Begin.DROP, arrival.job_id, 0, None, arrival.attempt or 1)

    def reopen(self, arrival: Arrival, is_new: Callable[[str | None], bool]) -> bool:
        """Opens the ended Event of a lone job for another job under its id, if ``is_new`` says so of the Event's options;
        the ledger dispatches it now. Returns whether it did. Raises LedgerUnavailable."""
        now = self._ledger.now()
        reopened = reopen(self._ledger, arrival, due_at=now, is_new=is_new)
        if reopened:
            self._recorder.due(now)
        return reopened

    def _read_places(self, tickets: Sequence[Ticket]) -> None:
        """Reads the checkpoints of earlier attempts. An untouched Event has none, so most batches need no query."""
        if tickets:
            with self._ledger.database.read() as connection:
                saved = read_saved(connection, [ticket.event_id for ticket in tickets])
            for ticket in tickets:
                if (found := saved.get(ticket.event_id)) is not None:
                    ticket.checkpoint, ticket.marks, ticket.results = found

    def borrowed(self, jobs: Sequence[Job], *, awaited: bool = False, of_round: bool = False) -> list[Ticket]:
        """The tickets of jobs of a range that the ledger has just lent to this process; the loan replaces Begin.

        ``awaited``: something waits for the commit of each end. Raises LedgerUnavailable.
        """
        tickets = [
            Ticket(
                Begin.RUN,
                job.job_id,
                job.event_id,
                job.task_id,
                job.attempt,
                job.retries,
                awaited=awaited,
                of_round=of_round,
                seen=_as_lent(job) if job.attempt == 1 and job.retries == 0 and job.items == 1 and not of_round else None,
                items=job.items,
                row=job.row,
                worker=job.worker_name,
            )
            for job in jobs
        ]
        self._read_places([ticket for ticket in tickets if ticket.seen is None])
        return tickets

    def read(self, job_ids: Sequence[str]) -> dict[str, EventRecord]:
        """The Events of these jobs, by job id. Raises LedgerUnavailable."""
        with self._ledger.database.read() as connection:
            return read_jobs(connection, job_ids)

    def _ticket(self, fence: int | None, record: EventRecord) -> Ticket:
        row = record.row
        attempt = None if is_foreign(row, fence, record.task_id) else fence
        return Ticket(
            begin(row, attempt, record.task_state), record.job_id, record.id, record.task_id, row.attempt, row.retries,
            row.watched or is_suspect(row), is_suspect(row), fence is None, row.process,
            awaited=record.round_at is not None or record.line is not None or record.callback_of is not None,
            of_round=record.round_at is not None,
            seen=record if untouched(record) else None, callback_of=record.callback_of, items=row.items,
            row=record.first_row, worker=record.worker_name, knobs=record.knobs,
            sent_at=record.created_at if record.is_lone else 0, ended_before=row.status in TERMINAL,
        )  # fmt: skip

    def enqueue(self, arrivals: Sequence[Arrival]) -> None:
        """Creates stand-alone Events for jobs that are in their engine's queue already; skips known ids. Raises
        :class:`~asynctask.errors.InputError` for values that the database cannot store."""
        engine = engine_of(self._ledger.identity)
        enqueue(self._ledger, arrivals, options=None if engine is None else {ENGINE: engine})

    # -- 2. start

    def start(self, ticket: Ticket) -> None:
        """Marks the job as performed now. For a watched job, ``working`` is in the ledger when this returns.

        If the ticket is ``lost`` afterwards, acknowledge the job and do not perform it: the attempt belongs to another
        process, or has ended.
        """
        if not ticket.watched or not ticket.of_round:
            ticket.started_at = self._ledger.now()
        ticket.began = self._ledger.clock.monotonic()
        self._running[id(ticket)] = (ticket.began, ticket)
        if not ticket.watched:
            return
        done = threading.Event()
        self._recorder.put([self._working(ticket, done.set)])
        done.wait()
        if ticket.of_round and not ticket.lost:
            # The next round counts from here: the commit may have taken longer than the interval.
            with self._lock:  # `note_long` may be about to say that it works, too
                ticket.started_at = self._ledger.now()
                self._recorder.put([self._working(ticket)])

    def save(self, ticket: Ticket) -> None:
        """Records that the job has begun, and the current outcomes of a slice's items; in the ledger when this returns."""
        done = threading.Event()
        if self._acquire(ticket):
            outcome = self._working(ticket, done.set)
            ticket.free()
            self._recorder.put([outcome])
            done.wait()

    def note_long(self, older_than_s: float) -> None:
        """Records ``working`` of jobs that run for longer than this, once each, and unsaved checkpoints; called
        periodically."""
        now = self._ledger.clock.monotonic()
        with self._lock:
            long = [t for begun, t in self._started() if begun <= now - older_than_s and t.status is None]
            # Held until passed on, so that a later outcome follows it, because not every engine has a fence.
            acquired = [ticket for ticket in long if _has_news(ticket, now) and ticket.acquire()]
            self._recorder.put([self._working(ticket) for ticket in acquired])
            for ticket in acquired:
                ticket.saved_at = now
                ticket.free()

    def ask_stops(self) -> None:
        """Makes ``should_stop()`` true in the running jobs that a user stopped, or whose Task was paused or cancelled;
        called periodically. Reads the ledger if a job runs that was recorded as ``working``. Raises LedgerUnavailable."""
        running = {ticket.event_id: ticket for _, ticket in self._started() if ticket.said}
        if running:
            with self._ledger.database.read() as connection:
                asked = read_stops(connection, list(running))
            for event_id in asked:
                if (job := running[event_id].job) is not None:
                    job.ask_stop()

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
        place = None if ticket.job is None else ticket.job.take_place()

        def then(won: bool) -> None:
            ticket.lost = not won
            if done is not None:
                done()

        news = _news_of(ticket)
        return Outcome(
            ticket.event_id, ticket.attempt, Status.WORKING, Reason.STARTED, notes=notes,
            values=_columns(news, started_at=ticket.started_at, checkpoint=place), then=then, elsewhere=ticket.elsewhere,
            awaited=done is not None, marks=news.marks, failures=news.failures,
        )  # fmt: skip

    # -- 3. settle

    def settle(
        self,
        ticket: Ticket,
        *,
        retry_at: int | None = None,
        discarded: str | None = None,
        queue: str | None = None,
        then: Callable[[bool], None] | None = None,
    ) -> None:
        """Passes the outcome to the group commit. ``then`` is called after the commit, with whether it was won.

        ``retry_at`` (microseconds): another attempt follows, in ``queue`` if that is given; ``discarded``: why the engine
        gave the job up outside its code. Idempotent.
        """
        if self._acquire(ticket):
            outcome = self.outcome(ticket, retry_at, discarded, then)
            outcome.loan = ticket.loan
            outcome.values |= {} if queue is None else {"queue": queue}
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
            ticket.event_id,
            ticket.attempt,
            status,
            reason,
            then=then,
            elsewhere=ticket.elsewhere,
            awaited=ticket.awaited,
            worker=ticket.worker,
            loan=ticket.loan,
        )
        self._recorder.put([outcome])

    def forget(self, ticket: Ticket) -> None:
        """Drops an attempt lost before it was performed: records nothing; its copy may be acknowledged."""
        if self._acquire(ticket):
            self._mark_settled(ticket)
            if ticket.loan is not None:
                ticket.loan.ended()

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
    def _put_off(self, tickets: Sequence[tuple[Ticket, str]], until: int) -> list[Change]:
        with self._ledger.database.write() as connection:
            changes = [put_off(self._ledger, each.event_id, each.attempt, clean(why), until) for each, why in tickets]
            return apply(connection, self._ledger, changes)

    def outcome(
        self,
        ticket: Ticket,
        retry_at: int | None,
        discarded: str | None = None,
        then: Callable[[bool], None] | None = None,
    ) -> Outcome:
        """The outcome that :meth:`settle` passes to the group commit."""
        if discarded is not None:
            ticket.status, ticket.reason = Status.ERROR, Reason.DISCARDED
            ticket.failure = Failure("discarded", self._ledger.catalogue("discarded", discarded))
        elif ticket.status is None and ticket.slice is not None:
            return self._outcome_of_slice(ticket, ticket.slice, retry_at, then)
        elif ticket.status is None:  # no middleware recorded a result
            ticket.status, ticket.reason = Status.FINISH, Reason.RETURNED
        elif ticket.elsewhere and ticket.reason is Reason.INTERRUPTED and retry_at is None:
            # Our runtime always repeats interrupted jobs; another engine may give them up.
            ticket.reason, ticket.failure = Reason.RAISED, Failure(_INTERRUPTED, self._ledger.catalogue("interrupted"))
        run, columns = ticket.next_run if discarded is None else None, dict[str, Any]()
        if run is not None:
            retry_at = self._ledger.now() + micros(run.delay_s)
            columns = run.columns(is_lone=ticket.is_lone, tries=ticket.retries + 1)
            ticket.result = None
        if retry_at is not None and not ticket.elsewhere:  # an engine delays its own jobs
            asked_s = (retry_at - self._ledger.now()) / SECOND
            if (pause := pause_s(asked_s, ticket.retries)) > max(0.0, asked_s):
                retry_at = self._ledger.now() + micros(pause)
        notes = self._opening(ticket) if ticket.started_at is not None else []
        notes += self._closing(ticket, retry_at)
        is_short = (
            ticket.status is Status.FINISH and ticket.seen is not None
        )  # no user watched it, and no attempt continues from it
        place = None if ticket.job is None or is_short else ticket.job.take_place()
        news = _news_of(ticket)
        return Outcome(
            ticket.event_id, ticket.attempt, ticket.status, ticket.reason, retry_at, then, ticket.elsewhere,
            ticket.seen if retry_at is None and ticket.reason is not Reason.INTERRUPTED and place is None else None,
            ticket.awaited, worker=ticket.worker, notes=notes, failure=ticket.failure,
            values=_columns(news, result=ticket.result, started_at=ticket.started_at, checkpoint=place) | columns,
            seconds=self._ledger.clock.monotonic() - ticket.began if ticket.began else None,
            marks=news.marks, failures=news.failures,
        )  # fmt: skip

    def _outcome_of_slice(
        self, ticket: Ticket, part: Slice, retry_at: int | None, then: Callable[[bool], None] | None
    ) -> Outcome:
        """The end of an attempt in which each item got its outcome, or waits for the next attempt."""
        say, news = self._ledger.catalogue, part.take()
        status, reason = (Status.ERROR, Reason.RAISED) if retry_at is not None else (part.status, Reason.RETURNED)
        only = news.failures.get(0) if ticket.items == 1 else None  # of a batch of one item, its failure is that of the job
        notes = self._opening(ticket)
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
            reason = Reason.RAISED if status is Status.ERROR else Reason.REFUSED
            said = only.message if only is not None else f"{part.count(status)}/{ticket.items}"
            notes.append(Note(str(status), say(str(status), said)))
        return Outcome(
            ticket.event_id, ticket.attempt, status, reason, retry_at, then, awaited=ticket.awaited, worker=ticket.worker,
            failure=None if only is None else Failure(only.code, only.message),
            seconds=self._ledger.clock.monotonic() - ticket.began, notes=notes,
            values=_columns(news, started_at=ticket.started_at), marks=news.marks, failures=news.failures,
        )  # fmt: skip

    def _opening(self, ticket: Ticket) -> list[Note]:
        begins = not ticket.said and ticket.started_at is not None
        notes = [Note("working", self._working_text, ticket.started_at)] if begins else []
        ticket.said |= begins
        if ticket.job is not None:
            notes += [Note("working", text, None, row) for text, row in ticket.job.take_messages()]
        return notes

    def _closing(self, ticket: Ticket, retry_at: int | None) -> list[Note]:
        say, text = self._ledger.catalogue, ticket.failure.message if ticket.failure else ""
        notes, ticket._notes = ticket._notes, []
        if ticket.next_run is not None and ticket.status is Status.FINISH:
            return [*notes, Note("enqueue", say("sent_again"))]
        if ticket.status is Status.FINISH:
            return [*notes, self._finished]
        if ticket.status is Status.FAILED:
            again = [] if retry_at is None else [Note("enqueue", say("sent_again"))]
            return [*notes, Note("failed", say("failed", text)), *again]
        key = {Reason.TIMEOUT: "timeout", Reason.INTERRUPTED: "interrupted"}.get(ticket.reason, "error")
        if ticket.failure is not None and ticket.failure.code == _INTERRUPTED:
            key = "interrupted"
        notes = [*notes, Note("error", text if ticket.reason is Reason.DISCARDED else say(key, text))]
        if retry_at is not None or ticket.reason is Reason.INTERRUPTED:
            notes.append(Note("enqueue", say("retry")))
        return notes


class Stops:
    """Queries which running jobs should stop, in its own thread, because the thread of the heartbeat must not wait for a
    database."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._due = threading.Event()
        self._ended = False
        self._left = 0
        self._thread = threading.Thread(target=self._run, name="stops", daemon=True)
        self._log = get_logger("asynctask.stops")

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def look(self) -> None:
        """Triggers the query, every :data:`LOOK_EVERY` calls, while a job runs that was recorded as ``working``; never
        blocks."""
        self._left -= 1
        if self._left < 0 and any(ticket.said for ticket in self._tracker.running()):
            self._left = LOOK_EVERY
            self._due.set()

    def stop(self) -> None:
        """Ends the thread."""
        self._ended = True
        self._due.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            self._due.wait()
            self._due.clear()
            if self._ended:
                return
            try:
                self._tracker.ask_stops()
            except Exception as error:  # the next query follows; the request to stop is in the ledger
                self._log.warning("stops_not_read", error=f"{type(error).__name__}: {error}"[:500])


def _as_lent(job: Job) -> EventRecord:
    """The Event of a job that was borrowed and has had no attempt: nobody has written it."""
    return EventRecord(
        job.event_id, job.job_id, job.task_id, None, Row(Status.ENQUEUE, reserved=True), None, job.row, None, None,
        job.worker_name, job.queue, None, job.slots, line=job.line,
    )  # fmt: skip


def _has_news(ticket: Ticket, now: float) -> bool:
    """Whether a long job has something to be written while it runs."""
    if ticket.slice is not None and ticket.said:
        return ticket.slice.has_news and now - ticket.saved_at >= SAVE_S
    return not ticket.said or (now - ticket.saved_at >= SAVE_S and ticket.job is not None and ticket.job.has_news)


def _columns(news: News, **columns: Any) -> dict[str, Any]:
    """The columns that an outcome sets beside those of its transition."""
    if news.results is not None:
        columns["result"] = news.results
    return {name: value for name, value in columns.items() if value is not None}


def _news_of(ticket: Ticket) -> News:
    return News() if ticket.slice is None or not ticket.slice.begun else ticket.slice.take()


_INTERRUPTED: Final = "interrupted"


def failure_of(error: BaseException) -> Failure:
    """The failure of an item that raised this. A SystemExit is that of an engine that ends its process: one of job code is
    a :class:`~asynctask.errors.JobExit`."""
    if isinstance(error, JobTimeout):
        return Failure("timeout", str(error))
    if isinstance(error, FinalError):
        return Failure(error.code, clean(str(error)))
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Failure(_INTERRUPTED if isinstance(error, SystemExit) else "raised", clean(text))


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


def send_itself(ticket: Ticket, run: NextRun) -> None:
    """Notes that a running job sends another run under its own id: its Event then waits for that run instead of ending.

    The ledger keeps a job of a Task, and dispatches the next run; the engine must send none. A lone job is sent by its
    engine, which has no bound for those that do so without a delay: this one waits here, see
    :func:`~asynctask.core.transitions.pause_s`. Raises :class:`~asynctask.errors.IdInUse` for a callback, and InputError
    for arguments that the ledger cannot keep.
    """
    if ticket.callback_of is not None:
        raise IdInUse(
            f"{ticket.job_id} is a callback, which ends with its Task: send with another id, or raise to be retried"
        )
    if not ticket.is_lone:
        try:
            size = len(run.columns(is_lone=False, tries=0)["options"].encode())
        except TypeError as error:
            why = f"the ledger cannot keep what {ticket.job_id} sends under its own id ({error}): send JSON values"
            raise InputError(why, code="not_json") from None
        if size > MAX_OPTIONS:
            why = f"what {ticket.job_id} sends under its own id has {size:,} bytes, the most is {MAX_OPTIONS:,}"
            raise InputError(f"{why}: store the data elsewhere and send its location", code="too_large")
    else:
        try:
            dumps([run.args, run.kwargs])
        except TypeError:  # the engine has another serializer
            run = run._replace(args=(), kwargs={}, signature=[])
        if ticket.elsewhere and (pause := pause_s(run.delay_s, ticket.retries)) > run.delay_s:
            threading.Event().wait(pause)
    ticket.next_run = run


# -- the middleware that records a tracked job; docs/middleware.md has the table of what it records

TICKET = "asynctask.ticket"
"""Key of a tracked job's ticket in the job's ``local``."""


class TaskEventMiddleware:
    """Records the start and the result of the job; stops a business refusal, re-raises everything else.

    Writes nothing itself: the runtime around it first decides on a retry, then settles the ticket.
    """

    def __init__(self, tracker: Tracker, max_result_bytes: int = 65_536) -> None:
        self._tracker = tracker
        self._limit = max_result_bytes

    def __call__(self, worker: Worker, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
        ticket: Ticket | None = job.local.get(TICKET)
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
