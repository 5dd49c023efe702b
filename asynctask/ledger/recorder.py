"""Group commit: the recorder writes the outcomes of all threads of a process together, one transaction per flush."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from threading import Thread
from typing import Final

from asynctask.core.states import OPEN, Reason, State, Status
from asynctask.core.transitions import (
    Row,
    Transition,
    cancel,
    ending,
    give_back,
    held_elsewhere,
    outcome,
    saved,
    stepped,
    take_over,
    working,
)
from asynctask.database.retrying import OutcomeUnknown, TransactionConflict, repeatable
from asynctask.errors import LedgerUnavailable, TooLarge, Unavailable
from asynctask.figures import Figures
from asynctask.ledger import history, lending
from asynctask.ledger.base import Ledger
from asynctask.ledger.events import EventRecord, Failure, Note, StaleRead, Write, apply
from asynctask.ledger.lending import Holding
from asynctask.ledger.tasks import candidates, close_small, try_close, try_finish
from asynctask.logs import get_logger

LINGER_S = 0.005
"""Seconds for which an outcome waits for those of other running jobs. A commit takes about a fifth of this."""

LONG_LINGER_S = 0.03
"""The same while jobs are ready: no thread waits for the consequences of an outcome. A flush costs some milliseconds of CPU
time, however few outcomes it has."""

_MAX_BATCH = 500
"""Largest number of outcomes of one flush."""

_READS = 100
"""Number of flushes after a :class:`StaleRead` that read every Event first: jobs that record something while they run come
in bursts."""

_RETRY_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
"""Seconds before each retry of a failed flush."""


class Kind(Enum):
    """The kind of an outcome: the edge of :data:`~asynctask.core.states.EVENT_EDGES` that the Event takes."""

    WORKING = Status.WORKING, Reason.STARTED  # it has begun, or saved a checkpoint
    FINISH = Status.FINISH, Reason.RETURNED
    FAILED = Status.FAILED, Reason.REFUSED
    RAISED = Status.ERROR, Reason.RAISED
    TIMEOUT = Status.ERROR, Reason.TIMEOUT
    DISCARDED = Status.ERROR, Reason.DISCARDED  # given up outside its code
    RETRY = Status.ENQUEUE, Reason.RETRY  # another attempt follows at ``retry_at``
    INTERRUPTED = Status.ENQUEUE, Reason.INTERRUPTED  # another attempt follows at once, and no retry is used
    GIVEN_BACK = Status.ENQUEUE, Reason.GIVEN_BACK  # it has not begun here
    CANCELLED = Status.CANCELLED, Reason.CANCELLED  # it has not begun here, and its Task is cancelled

    status: Status
    reason: Reason
    may_wait: bool
    figure: str

    def __init__(self, status: Status, reason: Reason) -> None:
        self.status = status
        self.reason = reason
        self.may_wait = status is Status.ENQUEUE  # the row waits again, unless its Task is cancelled
        self.figure = str(reason if self.may_wait else status)  # the name under which the figures count it


class Stage(IntEnum):
    """How far the record of an attempt has come; it only rises.

    ``UNREAD``: the flush compares the row with the Event as read before. ``READ``: it reads the Event first. ``DOUBTFUL``:
    the answer to a commit was lost, so the outcome may be written already, and is valid only for the attempt that it names.
    ``DONE``: committed or given up; never flushed again.
    """

    UNREAD = 0
    READ = 1
    DOUBTFUL = 2
    DONE = 3


@dataclass(slots=True)
class Outcome(Write):
    """The record of one attempt of one Event.

    ``kind``: how the attempt ended; ``retry_at`` (microseconds): when the next attempt may begin. ``then`` is called after
    the commit with whether the compare-and-set was won; only then may the job's copy be acknowledged. ``elsewhere``:
    another engine holds the job's copies. They carry no fence, so the outcome is for the open Event's current attempt, and
    a further attempt waits in that engine's queue, not in the ledger. ``stage``: in ``UNREAD``, ``record`` is the untouched
    Event as read at Begin. ``loan``: the loan or claim of the job, if this outcome ends it for this process. ``marks``: the
    outcomes of a slice's items. ``worker``, for the figures: the job's worker.
    """

    attempt: int
    kind: Kind
    retry_at: int | None = None
    then: Callable[[bool], None] | None = None
    elsewhere: bool = False
    stage: Stage = Stage.READ
    loan: Holding | None = None
    worker: str = ""
    marks: str | None = None

    def decided(self, ledger: Ledger, record: EventRecord) -> Transition | None:
        row = record.row
        is_fenced = not self.elsewhere or self.stage is Stage.DOUBTFUL
        if row.status not in (Status.ENQUEUE, Status.WORKING) or (is_fenced and row.attempt != self.attempt):
            return None
        after = row if self.marks is None else stepped(row, self.marks)
        if (transition := self._transition(ledger, after, record.task_state)) is None:
            return None
        transition = transition._replace(before=row)
        return held_elsewhere(transition) if self.elsewhere else transition

    def _transition(self, ledger: Ledger, row: Row, state: str | None) -> Transition | None:
        kind = self.kind
        if kind is Kind.WORKING:
            return self._working(ledger, row, state)
        if kind is Kind.CANCELLED or (kind.may_wait and state == State.CANCELLED):
            return cancel(row)  # no job of a cancelled Task starts again; the messages tell what happened
        if kind is Kind.GIVEN_BACK:
            return give_back(row, state, now=ledger.now())
        return outcome(row, kind.status, kind.reason, retry_at=self.retry_at, now=ledger.now())

    def _working(self, ledger: Ledger, row: Row, state: str | None) -> Transition | None:
        if self.elsewhere and row.status is Status.WORKING and row.process != ledger.holder:
            return take_over(row, ledger.holder)
        if row.status is Status.ENQUEUE:
            if row.watched and not self.elsewhere and state in (State.PAUSED, State.CANCELLED):
                # It was to begin with this commit, but its Task was paused or cancelled meanwhile.
                return give_back(row, state, now=ledger.now())
            return working(row, ledger.holder)
        if row.process is None and not self.elsewhere:  # an outside program has recorded ``working``
            return take_over(row, ledger.holder)
        if row.process != ledger.holder:
            return None
        if "checkpoint" in self.values or self.marks is not None:
            return saved(row)
        if "started_at" in self.values and self.stage is not Stage.DOUBTFUL and not self.elsewhere:
            return Transition(row, row, Reason.RECORDED)  # a suspect of a round: ``working`` was committed before it began
        return None


class Recorder:
    """The group commit of one process.

    :meth:`put` never blocks on the database. A thread flushes the outcomes that arrived during the previous flush and the
    next ``linger_s()`` seconds (0: no other job runs): a single outcome is written at once, a burst hundreds at a time.
    While the ledger does not answer, outcomes wait in memory, :attr:`healthy` is false, and the runtime begins no new jobs.
    The thread survives every exception, and flushes uncommitted outcomes again. ``on_due`` is called with the time
    (microseconds; if past, now) at which a job that the outcomes made due may begin. ``figures`` count committed outcomes.
    ``closes_at_once``: a Task that may have ended is closed as soon as no job runs, however recent the last check.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        linger_s: Callable[[], float] = lambda: 0.0,
        on_due: Callable[[int], None] = lambda at: None,
        figures: Figures | None = None,
        closes_at_once: bool = True,
    ) -> None:
        self._ledger = ledger
        self._closes_at_once = closes_at_once
        self._figures = figures or Figures()
        self._linger_s = linger_s
        self._on_due = on_due
        self._pending: list[Outcome] = []
        self._condition = threading.Condition()
        self._stopping = False
        self._flushing = False
        self._reads = 0
        self._closer = TaskCloser(ledger, on_due)
        self._thread: threading.Thread | None = None
        self._log = get_logger("asynctask.recorder")
        self._flushes = True  # no outcome is pending because of a failed flush
        self.recorded = 0

    def start(self) -> None:
        """Starts the flushing thread."""
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def put(self, outcomes: Sequence[Outcome]) -> None:
        """Accepts outcomes, which are committed soon; then calls the ``then`` of each."""
        with self._condition:
            self._pending.extend(outcomes)
            # Wake the thread for the first outcome and for a full batch; a wake-up for each costs more than the flush.
            if len(self._pending) == len(outcomes) or len(self._pending) >= _MAX_BATCH or _is_awaited(outcomes):
                self._condition.notify_all()

    @property
    def healthy(self) -> bool:
        """Whether outcomes can be recorded: the last flush succeeded, and the thread, if started, is alive."""
        return self._flushes and (self._thread is None or self._thread.is_alive())

    @property
    def waiting(self) -> int:
        """Number of outcomes that are not committed yet."""
        with self._condition:
            return len(self._pending) + int(self._flushing)

    def drain(self, timeout: float) -> bool:
        """Waits until every accepted outcome is committed; returns False on timeout."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._pending and not self._flushing, timeout)

    def stop(self, timeout: float) -> bool:
        """Commits all outcomes and ends the thread. Returns False if the ledger did not accept them in time."""
        drained = self.drain(timeout)
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)
        return drained

    def _run(self) -> None:
        tries = 0
        while True:
            batch: list[Outcome] | None = []
            try:
                batch = self._next_batch()
                if batch is None:
                    self._closer.check()
                    return
                if batch:
                    self.commit(batch)
                    tries, self._flushes = 0, True
                else:
                    self._closer.check_if_due()
            except Exception as error:
                left = self._requeue(batch or [])
                self._flushes = not self._pending
                if isinstance(error, Unavailable):
                    self._log.warning("ledger_away", error=str(error), outcomes=left, tried=tries + 1)
                else:
                    self._log.exception("recorder_failed", outcomes=left, tried=tries + 1)
                if self._pause(_RETRY_S[min(tries, len(_RETRY_S) - 1)]):
                    return
                tries += 1

    def commit(self, batch: Sequence[Outcome]) -> None:
        """Flushes a batch. If the ledger refuses it, halves it until each refused outcome is alone; a transaction that lost
        against others is halved, too, because one of fewer rows meets fewer of them. Raises LedgerUnavailable; outcomes
        that were committed before are ``DONE``."""
        try:
            self.flush(batch)
        except Exception as error:
            left = [each for each in batch if each.stage is not Stage.DONE]
            may_halve = not isinstance(error, Unavailable) or (type(error) is TransactionConflict and len(left) > 1)
            if not left or not may_halve:  # without any left, the error occurred after the commit
                raise
            if len(left) == 1:
                self._record_refused(left[0], error)
                return
            self._log.warning("flush_halved", outcomes=len(left), error=_brief(error))
            middle = len(left) // 2
            self.commit(left[:middle])
            self.commit(left[middle:])

    def _record_refused(self, each: Outcome, error: Exception) -> None:
        """Records as much as possible of an outcome that the ledger refuses."""
        self._log.exception("outcome_refused", event_id=each.event_id, attempt=each.attempt, error=_brief(error))
        if each.kind is Kind.WORKING:  # the ledger does not know that it began; the waiting thread must not hang
            self._notify(each, False)
        elif isinstance(error, TooLarge) and each.marks is None and "result" in each.values:
            note = Note("working", self._ledger.catalogue("not_kept", str(error)))
            notes = [*each.notes[:-1], note, *each.notes[-1:]]
            values = {name: value for name, value in each.values.items() if name != "result"}
            self.commit([replace(each, values=values, notes=notes, stage=max(each.stage, Stage.READ))])
        else:
            # The outcome cannot be written as it is; an end with an unknown result can.
            text = self._ledger.catalogue("discarded", f"its outcome could not be recorded ({type(error).__name__})")
            failure = Failure("unrecordable", text)
            last = replace(each, kind=Kind.DISCARDED, retry_at=None, stage=Stage.READ, failure=failure, failures={})
            self._flush_last_word(replace(last, notes=[Note("error", text)], values={}))
        each.stage = Stage.DONE

    def _flush_last_word(self, ended: Outcome) -> None:
        try:
            self.flush([ended])
        except Unavailable:
            raise
        except Exception:
            # The row accepts no write. Its copy stays unacknowledged, and the log names it; other outcomes are not
            # affected.
            self._log.exception("outcome_not_recorded", event_id=ended.event_id, attempt=ended.attempt)

    def _next_batch(self) -> list[Outcome] | None:
        """The next batch, with one outcome per Event; empty if a check for finished Tasks is due, None at the end."""
        with self._condition:
            self._flushing = False
            self._condition.notify_all()
            if not self._condition.wait_for(lambda: self._pending or self._stopping, self._closer.until_check()):
                return []
            if not self._pending:
                return None
            if seconds := self._linger_s():  # other jobs end soon: one transaction for all instead of one each
                self._condition.wait_for(lambda: self._is_enough() or _is_awaited(self._pending), seconds)
            batch, later = dict[int, Outcome](), list[Outcome]()
            for each in self._pending[:_MAX_BATCH]:
                if batch.setdefault(each.event_id, each) is not each:
                    later.append(each)
            self._pending[:_MAX_BATCH] = later
            self._flushing = True
            return list(batch.values())

    def _is_enough(self) -> bool:
        return len(self._pending) >= _MAX_BATCH or self._stopping

    def _requeue(self, batch: Sequence[Outcome]) -> int:
        """Puts the uncommitted outcomes of a batch back at the front of the queue; returns their number."""
        left = [each for each in batch if each.stage is not Stage.DONE]
        with self._condition:
            self._pending[:0] = left
            self._flushing = False
        return len(left)

    def _pause(self, seconds: float) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: self._stopping, seconds)

    def flush(self, batch: Sequence[Outcome]) -> None:
        """Commits outcomes of different Events, then calls the ``then`` of each. Checks for finished Tasks at once if no
        other job runs, else at most once per pause of :class:`TaskCloser`. Raises LedgerUnavailable."""
        ends = self._record(batch)
        for each in batch:  # first, because these are committed, whatever fails from here on
            each.stage = Stage.DONE
            if each.loan is not None:
                each.loan.ended()
        self.recorded += len(batch)
        self._figures.flushes.add(len(batch))
        history.count(self._ledger, batch)
        for each in batch:
            won = _is_won(each) or already_recorded(self._ledger, each)
            if won and each.kind not in _NO_END and (each.record is None or each.record.row.items):
                self._figures.ended(each.worker, each.kind.figure, each.seconds)
            self._notify(each, won)
        plain = {each.event_id for each in ends if _is_plain(each)}
        self.announce([each for each in batch if each.event_id not in plain])
        over = [record for each in batch if (record := each.record) and _is_over(record, each.transition)]
        self._closer.ended({record.task_id for record in over})
        self._closer.called({record.callback_of for record in over})
        if self._closes_at_once and not self._pending and not self._linger_s():
            self._closer.check()
        else:
            self._closer.check_if_due()

    def _record(self, batch: Sequence[Outcome]) -> list[Outcome]:
        """Writes a batch; returns those that were written without a read."""
        try:
            if self._reads == 0:
                try:
                    return write_once(self._ledger, batch)
                except StaleRead:
                    self._reads = _READS
                except TransactionConflict:
                    pass
            else:
                self._reads -= 1
                forget_read(batch)
            return write(self._ledger, batch)
        except OutcomeUnknown:
            for each in batch:
                each.stage = Stage.DOUBTFUL
            raise

    def _notify(self, each: Outcome, won: bool) -> None:
        if each.then is None:
            return
        try:
            each.then(won)
        except Exception:
            self._log.exception("outcome_not_told", event_id=each.event_id, attempt=each.attempt, won=won)

    def due(self, at: int) -> None:
        """Reports that a job may begin at this time (microseconds)."""
        self._on_due(at)

    def announce(self, applied: Sequence[Write]) -> None:
        """Settles the hints, lines and sessions after committed changes.

        A lost compare-and-set is announced with the row as it is now: an earlier attempt may have written that row, and its
        answer was lost. A superfluous hint is harmless.
        """
        if (at := lending.announce(self._ledger, [_as_it_stands(each) for each in applied])) is not None:
            self._on_due(at)


def _is_awaited(outcomes: Sequence[Outcome]) -> bool:
    """Whether a thread may wait for one of these outcomes: a watched job begins once its ``working`` is committed."""
    return any(each.kind is Kind.WORKING for each in outcomes)


def _is_won(each: Outcome) -> bool:
    """Whether the outcome was written; false for a ``working`` whose job was given back instead."""
    if each.transition is None:
        return False
    return each.kind is not Kind.WORKING or each.transition.after.status is Status.WORKING


_NO_END: Final = (Kind.WORKING, Kind.GIVEN_BACK)
"""Kinds that the figures do not count, because they end no attempt."""


def _is_plain(end: Outcome) -> bool:
    """Whether only the close of its Task can wait for this end: it is not a failure (a Task may tolerate a few), and its
    job belongs to no round and has no key."""
    record, transition = end.record, end.transition
    assert record is not None
    assert transition is not None
    return transition.after.status is Status.FINISH and record.round_at is None and record.line is None


def _is_over(record: EventRecord, transition: Transition | None) -> bool:
    return (record.row if transition is None else transition.after).status not in OPEN


def _as_it_stands(change: Write) -> Write:
    if change.transition is not None or change.record is None:
        return change
    row = change.record.row
    return replace(change, transition=Transition(row, row, Reason.RECORDED))


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


# -- writing outcomes


def write_once(ledger: Ledger, wave: Sequence[Outcome]) -> list[Outcome]:
    """Commits outcomes of different Events; returns those that were written without a read. Raises
    :class:`~asynctask.ledger.events.StaleRead` if an Event changed since Begin, and LedgerUnavailable."""
    ends = [each for each in wave if each.stage is Stage.UNREAD]
    changes = [each for each in wave if each.stage is not Stage.UNREAD] if len(ends) < len(wave) else []
    for each in ends:
        if (record := each.record) is not None:
            each.transition = ending(record.row, each.kind.status, each.kind.reason)
    forget_read(wave)  # a retry must read them: this transaction may be committed and its answer lost
    if len(wave) == len(ends) == 1 and (record := ends[0].record) is not None and record.is_lone:
        _write_lone(ledger, ends[0])
        return ends
    with ledger.database.write() as connection:
        apply(connection, ledger, changes, ends)
        lending.end_loans(connection, ledger, lending.ending(each.loan for each in wave))
    return ends


def _write_lone(ledger: Ledger, end: Outcome) -> None:
    """Commits the end of a lone job, which changes no counts: one statement, without the round trips of BEGIN and
    COMMIT."""
    try:
        with ledger.database.write_alone() as connection:
            apply(connection, ledger, [], [end])
    except StaleRead:
        raise
    except TransactionConflict:
        end.stage = Stage.DOUBTFUL  # it may be committed, and only the answer lost
        raise


write = repeatable(write_once)


def forget_read(wave: Sequence[Outcome]) -> None:
    """Makes the next flush read the Events of these outcomes first."""
    for each in wave:
        if each.stage is Stage.UNREAD:
            each.stage = Stage.READ


def already_recorded(ledger: Ledger, each: Outcome) -> bool:
    """Whether an outcome that lost its compare-and-set is in the ledger already, because the answer to its first commit was
    lost. Only ``working`` matters: every other outcome is the last of its attempt, and its copy is acknowledged anyway.
    """
    record = each.record
    if each.kind is not Kind.WORKING or record is None or record.row.status is not Status.WORKING:
        return False
    return record.row.process == ledger.holder and (each.elsewhere or record.row.attempt == each.attempt)


# -- closing Tasks after their last outcome

_MAX_PAUSE_S = 0.1  # the longest pause between two checks while other jobs run
_PAUSE_FACTOR = 30  # the pause in multiples of the last check's duration
_MAX_INLINE_JOBS = 20_000  # a larger Task is closed in a thread of its own: the query over its rows would delay outcomes


class TaskCloser:
    """Closes Tasks whose last job this process recorded; maintenance closes the others.

    ``on_due`` is called with 0 after a close, because jobs that waited for it may begin. Not thread-safe.
    """

    def __init__(self, ledger: Ledger, on_due: Callable[[int], None]) -> None:
        self._ledger = ledger
        self._on_due = on_due
        self._ended: set[int] = set()  # Tasks with ended jobs, not checked yet
        self._called: set[int] = set()  # Tasks with ended callbacks, not checked yet
        self._check_at = 0.0  # time of the next check while other jobs run (monotonic clock)
        self._log = get_logger("asynctask.recorder")

    def ended(self, task_ids: Iterable[int | None]) -> None:
        """Notes that jobs of these Tasks ended; None stands for jobs without a Task."""
        self._ended.update(task_id for task_id in task_ids if task_id is not None)

    def called(self, task_ids: Iterable[int | None]) -> None:
        """Notes that callbacks of these Tasks ended; None stands for other jobs."""
        self._called.update(task_id for task_id in task_ids if task_id is not None)

    def until_check(self) -> float | None:
        """Seconds until the next check is due; None if there is nothing to check."""
        waits = self._ended or self._called
        return max(0.0, self._check_at - self._ledger.clock.monotonic()) if waits else None

    def check_if_due(self) -> None:
        """Checks if a check is due."""
        if self.until_check() == 0.0:
            self.check()

    def check(self) -> None:
        """Checks now, and closes the Tasks that have ended."""
        begun = self._ledger.clock.monotonic()
        ended, self._ended = self._ended, set()
        if ended:
            self._close(ended)
        called, self._called = self._called, set()
        for task_id in sorted(called):
            self._try(try_finish, task_id)
        now = self._ledger.clock.monotonic()
        self._check_at = now + min(_MAX_PAUSE_S, _PAUSE_FACTOR * (now - begun))

    def _close(self, task_ids: set[int]) -> None:
        """Closes the small Tasks that have ended, many per transaction, and the others one by one."""
        try:
            with self._ledger.database.read() as connection:
                over = candidates(connection, task_ids)
            closed = self._close_together(sorted(over))
        except LedgerUnavailable as error:
            self._log.warning("close_put_off", error=str(error))
        except Exception:
            self._log.exception("close_failed", tasks=len(task_ids))
        else:
            for task_id in sorted(over.keys() - closed):
                if over[task_id] <= _MAX_INLINE_JOBS:
                    self._close_one(task_id)
                else:
                    self._close_in_thread(task_id)

    def _close_together(self, over: list[int]) -> list[int]:
        try:
            return close_small(self._ledger, over) if over else []
        except LedgerUnavailable:
            raise
        except Exception:  # one of them cannot be closed: close each alone
            self._log.exception("close_failed", tasks=len(over))
            return []

    def _close_in_thread(self, task_id: int) -> None:
        try:
            Thread(target=self._close_one, args=(task_id,), name=f"close-{task_id}", daemon=True).start()
        except RuntimeError as error:  # no further thread for this process; maintenance closes the Task
            self._log.warning("close_put_off", task_id=task_id, error=str(error))

    def _close_one(self, task_id: int) -> None:
        if self._try(try_close, task_id):
            self._on_due(0)  # its callbacks and the next Task of its session may start

    def _try(self, act: Callable[[Ledger, int], bool], task_id: int) -> bool:
        try:
            return act(self._ledger, task_id)
        except LedgerUnavailable as error:
            self._log.warning("close_put_off", task_id=task_id, error=str(error))
        except Exception:
            self._log.exception("close_failed", task_id=task_id)
        return False
