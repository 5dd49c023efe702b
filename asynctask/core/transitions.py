"""The transitions of Events: pure functions over values, without a clock, a database or a broker.

A :class:`Row` is the part of an Event on which they decide. Every change of a row is a :class:`Transition` made by a
function below. The change of the Task's counts is not stored but derived from the row before and after
(:func:`difference`), so counts equal rows as long as both are written in one transaction.

Four rules:

* **Fence.** ``attempt`` rises with every retry, requeue, recovery and give-back. An outcome of an older attempt loses the
  compare-and-set.
* **Loan.** A process borrows a range of a Task's rows without writing them, or claims single rows, which then name it.
  No other process may begin or write held rows (:func:`is_held`); only the recovery of a dead holder may, and it raises
  ``attempt`` first.
* **Once passed, never unmarked.** A row that the pointer has passed gets a ``due_at`` when it is reopened, given back or
  recovered; a claim sets ``process``. So a row in a loan's range without either belongs to the loan's holder.
* **Copy key.** A foreign queue holds at most one copy of each (job id, attempt) of ours: pushing it again does nothing.

`tests/unit/test_bookkeeping_model.py` drives these functions through interleavings and crashes at every step.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Final, NamedTuple

from asynctask.core.states import OPEN, PROBLEM, TERMINAL, Reason, State, Status, check_event

COUNTED: Final = tuple(str(s) for s in Status)
"""The counts of items, one per status; they sum to the total."""

CALLBACKS: Final = ("on_complete", "on_success", "on_failure")
"""The callbacks that a Task may have."""

MERGE: Final = "merge"
"""The step of an export between its close and its callbacks; stored among the callbacks."""

BLOCKED: Final = 253_402_300_799_000_000
"""``due_at`` of a job that waits for earlier jobs of its key: the end of the year 9999."""

OUTSIDE: Final = "queue/outside"
"""The holder of a row that an outside program performs and records by itself. Like a foreign queue, this holder is not a
process, and is never recovered as one."""

POISON_DEATHS: Final = 3
"""Deaths of processes after which a job that had begun ends in ``error`` (reason ``poison``); twice as many if other jobs
ran beside it, because one of those may be the cause."""


MARKS: Final[Mapping[str, str]] = {
    Status.FINISH: "f",
    Status.FAILED: "x",
    Status.ERROR: "e",
    Status.CANCELLED: "c",
}
"""Status -> its letter in :attr:`Row.marks`."""

OPEN_MARK: Final = "."
"""The mark of an item without an outcome."""

RAISED_MARK: Final = "r"
"""The mark of an item that raised in this attempt and has a retry: the next attempt of its job opens it again."""

_FINAL: Final = frozenset(MARKS.values())

_ENDS: Final = {
    Status.FINISH: Reason.RETURNED,
    Status.FAILED: Reason.REFUSED,
    Status.ERROR: Reason.RAISED,
    Status.CANCELLED: Reason.CANCELLED,
}
"""The reason for a slice that ends with another status than its last attempt."""


class Row(NamedTuple):
    """The columns of an Event on which transitions decide.

    ``due_at``: microseconds, None if it does not wait for a time; ``retries``: retries that the policy gave; ``deaths``:
    processes that died while it ran, since its last outcome; ``reserved``: the Task's pointer has passed the row (always
    true without a Task); ``watched``: a process that held it died, so ``working`` is recorded before it begins; ``items``:
    1, more for a slice, 0 for an untracked job (:func:`is_kept`); ``n_*``: outcomes of a slice's items so far;
    ``stopping``: a user requested its stop, and its process has not stopped it yet; ``marks``: of a slice, one letter per
    item, see :data:`MARKS`, None while all are open. The ``n_*`` of a slice count these letters.
    """

    status: Status
    attempt: int = 1
    due_at: int | None = None
    retries: int = 0
    deaths: int = 0
    reserved: bool = False
    items: int = 1
    n_finish: int = 0
    n_failed: int = 0
    n_error: int = 0
    n_cancelled: int = 0
    process: str | None = None
    watched: bool = False
    stopping: bool = False
    marks: str | None = None


@dataclass(slots=True)
class Delta:
    """A change of a Task's counters. ``jobs`` counts Events, the other fields count items."""

    enqueue: int = 0
    working: int = 0
    stopped: int = 0
    finish: int = 0
    failed: int = 0
    error: int = 0
    cancelled: int = 0
    retrying: int = 0
    jobs: int = 0

    def add(self, other: Delta, times: int = 1) -> None:
        """Adds another delta ``times`` times, in place."""
        self.enqueue += other.enqueue * times
        self.working += other.working * times
        self.stopped += other.stopped * times
        self.finish += other.finish * times
        self.failed += other.failed * times
        self.error += other.error * times
        self.cancelled += other.cancelled * times
        self.retrying += other.retrying * times
        self.jobs += other.jobs * times

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in Delta.__slots__)


class Transition(NamedTuple):
    """One transition of one row, along an edge of the table of states."""

    before: Row | None
    after: Row
    reason: Reason

    @property
    def delta(self) -> Delta:
        """The change of the Task's counters."""
        return difference(self.before, self.after)


def is_held(row: Row, on_loan: bool) -> bool:
    """Whether a holder may be performing the row, or about to: no other process begins or writes it.

    ``on_loan``: its ``seq`` lies in a loan that a process holds; a row that names a process is held by that process. Always
    true without a Task: an engine keeps its lone jobs, and all others wait with a ``due_at``.
    """
    if row.status not in (Status.ENQUEUE, Status.WORKING) or row.due_at is not None:
        return False
    return row.process is not None or on_loan


def at_rest(row: Row, on_loan: bool) -> bool:
    """Whether the row is open and its attempt cannot be running: the pointer has not reached it, it waits for ``due_at`` or
    in a free loan, or it is stopped. ``on_loan`` as in :func:`is_held`.

    In a cancelled Task such a row is cancelled whenever it is found, not in a single pass: an interrupted, retried,
    given-back or stopped job comes to rest only after that pass, and never starts again.
    """
    return row.status in OPEN and not is_held(row, on_loan)


def is_kept(row: Row) -> bool:
    """Whether the row is kept. The row of an untracked job (``items`` is 0) is deleted as soon as the job ends, except in
    ``error``, which a user may retry."""
    return row.items > 0 or row.status is Status.ERROR or row.status not in TERMINAL


def _count(delta: Delta, row: Row, sign: int) -> None:
    """Adds or subtracts the counts of one row: its items per status, and those that wait for a retry."""
    done = row.n_finish + row.n_failed + row.n_error + row.n_cancelled
    if done:
        delta.finish += sign * row.n_finish
        delta.failed += sign * row.n_failed
        delta.error += sign * row.n_error
        delta.cancelled += sign * row.n_cancelled
    left = sign * (row.items - done)
    if left:
        setattr(delta, row.status, getattr(delta, row.status) + left)
        if row.due_at is not None and row.retries > 0 and row.status in OPEN:
            delta.retrying += left


def difference(before: Row | None, after: Row) -> Delta:
    """The change of the counters when a row goes from ``before`` (None: new) to ``after``."""
    delta = Delta()
    if before is None:
        delta.jobs = 1
    else:
        _count(delta, before, -1)
    _count(delta, after, 1)
    return delta


def _transition(row: Row, target: Status, reason: Reason, **changes: Any) -> Transition:
    check_event(row.status, target, reason)
    return Transition(row, row._replace(status=target, **changes), reason)


def _wait_again(row: Row, reason: Reason, **changes: Any) -> Transition:
    """The row waits for another attempt; if a user requested its stop, it is stopped instead, because it runs nowhere."""
    if row.stopping:
        return stop(row)
    return _transition(row, Status.ENQUEUE, reason, attempt=row.attempt + 1, process=None, **changes)


# -- start


MAX_INTERVAL_S: Final = 604_800
"""The longest interval between two rounds, in seconds: a week."""

CLOCKS_DIFFER: Final = 1_000_000
"""Microseconds by which the clocks of processes may differ."""

_LEAST_PAUSE, _MOST_PAUSE = 50_000, 1_000_000
"""Bounds, in microseconds, of the pause between two checks of a round, which is a twentieth of the interval."""


def interval_of(interval_s: float) -> int:
    """Microseconds from round to round; 0: the Task has no rounds. An invalid interval counts as the longest."""
    if interval_s <= 0:
        return 0
    return round((interval_s if interval_s < MAX_INTERVAL_S else MAX_INTERVAL_S) * 1_000_000)


def at_once(parallel: int | None, interval: int) -> int | None:
    """The most jobs in flight, and in one round; None: no limit. With an interval and no ``parallel`` it is 1."""
    return 1 if interval and parallel is None else parallel


def next_round(began: int | None, started: int | None, unbegun: int, interval: int, now: int) -> int:
    """When the jobs of a Task's next round may start (microseconds, as all times here); if not after ``now``, now.

    ``began``: when the last round might start; ``started``: the latest known start of one of its jobs; ``unbegun``: how
    many of its jobs are in flight and not known to have begun. The interval counts from the latest start, so jobs of two
    rounds are never closer than the interval, however long a job waited for a thread; while one waits, the result is the
    time of the next check. A time more than a second after ``now`` is ignored: the clock was set back since.
    """
    known = [at for at in (began, started) if at is not None and at <= now + CLOCKS_DIFFER]
    first = max(known) + interval if known else now
    pause = min(max(interval // 20, _LEAST_PAUSE), _MOST_PAUSE)
    return max(first, now + pause) if unbegun else first


def claim(row: Row, process: str) -> Transition:
    """A process takes a single row that waits, due or at the pointer; the row names the process until its outcome."""
    if row.status is not Status.ENQUEUE or row.process is not None:
        raise ValueError(f"only a waiting row can be claimed, not {row}")
    return _transition(row, Status.ENQUEUE, Reason.LENT, process=process, reserved=True, due_at=None)


def hurry(row: Row, *, now: int) -> Transition:
    """Makes a row that waits for ``due_at`` due now, at a user's request; keeps its attempt, because no copy was lost."""
    if row.status is not Status.ENQUEUE or row.due_at is None:
        raise ValueError(f"only a waiting row can be hurried, not {row}")
    return Transition(row, row._replace(due_at=now), Reason.RETRY)


def redispatch(row: Row, state: str | None, *, now: int) -> Transition | None:
    """Makes a row wait again that the foreign queue holding it has lost, or cancels it with its Task.

    None for a row in ``working``, whose process continues without the queue's copy.
    """
    if row.status is not Status.ENQUEUE or row.due_at is not None:
        return None
    if state == State.CANCELLED:
        return cancel(row)
    return _wait_again(row, Reason.REDISPATCHED, due_at=now)


_TOLERANCE: Final = re.compile(r"(?:(failed|error):)?(?:([0-9]{1,7})|([0-9]{1,3})(?:\.([0-9]{1,2}))?%)", re.ASCII)


class Tolerance(NamedTuple):
    """How many items of a Task may fail before it pauses itself.

    ``limit``: a number of items, or hundredths of a percent of all items (``is_share``); ``status``: ``failed`` or
    ``error``, None if both count.
    """

    limit: int
    is_share: bool = False
    status: str | None = None

    @classmethod
    def parse(cls, value: object) -> Tolerance:
        """Parses ``10``, ``"10"``, ``"5%"``, ``"failed:10"`` or ``"error:2.5%"``. Raises ValueError for other values."""
        text = str(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
        found = _TOLERANCE.fullmatch(text.replace(" ", ""))
        if found is not None:
            status, count, percent, rest = found.groups()
            if count is not None:
                return cls(int(count), status=status)
            share = int(percent) * 100 + int((rest or "0").ljust(2, "0"))
            if share <= 10_000:
                return cls(share, True, status)
        raise ValueError(
            "must be a count of items such as 10, or a share of all such as 5%, for one status as in failed:10 or error:5%"
        )

    def __str__(self) -> str:
        share = f"{self.limit / 100:g}%"
        return f"{self.status}:" * (self.status is not None) + (share if self.is_share else str(self.limit))

    def left(self, failed: int, error: int, total: int | None) -> int | None:
        """How many more items may fail; negative: the Task is over its limit; None: the limit is a share of ``total``, the
        number of all items, and that is not known (None)."""
        if self.is_share and total is None:
            return None
        most = (total or 0) * self.limit // 10_000 if self.is_share else self.limit
        return most - (failed if self.status != "error" else 0) - (error if self.status != "failed" else 0)


# -- begin


class Begin(Enum):
    """The decision on a fetched copy."""

    RUN = "run"
    DROP = "drop"  # acknowledge without running: terminal, another attempt, not dispatched, or running in a process
    GIVE_BACK = "give_back"  # the Task is paused, or the job must stop: return it to the ledger
    CANCEL = "cancel"  # the Task is cancelled


def is_foreign(row: Row, attempt: int | None, task_id: int | None) -> bool:
    """Whether another program pushed a copy of ``attempt`` (0), and the row is the Event that Begin created for it. Such a
    copy has no fence; it counts as the row's copy until the row gets another attempt.
    """
    return attempt == 0 and task_id is None and row.attempt == 1


def begin(row: Row, attempt: int | None, state: str | None) -> Begin:
    """Decides on a copy of ``attempt`` (None: its engine has no fence) by its Task's ``state`` (None: no Task)."""
    if row.status in TERMINAL or row.status is Status.STOPPED:
        return Begin.DROP
    if attempt is not None and attempt != row.attempt:
        return Begin.DROP
    if row.due_at is not None and attempt is not None:
        return Begin.DROP  # the row waits in the ledger; the next dispatch pushes a new copy
    if row.status is Status.WORKING and row.process is not None and attempt is not None:
        return Begin.DROP  # a process runs this attempt; the broker lost its copy and got another
    if state == State.CANCELLED:
        return Begin.CANCEL
    if state == State.PAUSED or row.stopping:
        return Begin.GIVE_BACK
    return Begin.RUN


# -- record


def working(row: Row, process: str | None) -> Transition:
    """The job has begun, and runs long or is watched."""
    return _transition(row, Status.WORKING, Reason.STARTED, process=process)


def take_over(row: Row, process: str | None) -> Transition:
    """An engine without our fence delivered a running job to another process, which now holds the row."""
    return Transition(row, row._replace(process=process), Reason.STARTED)


def held_elsewhere(transition: Transition) -> Transition:
    """The same transition for a job whose copies another engine holds: its next attempt waits in that engine's queue.

    The row stays in flight: if it waited in the ledger, the dispatcher would push it to the wrong broker.
    """
    return transition._replace(after=transition.after._replace(due_at=None))


def outcome(row: Row, status: Status, reason: Reason, *, retry_at: int | None = None, now: int = 0) -> Transition:
    """The outcome of one attempt.

    ``status`` (``finish``, ``failed``, ``error``) with its reason; ``retry_at``: the retry policy gives another attempt,
    and the row waits in ``enqueue`` until then; with ``Reason.INTERRUPTED`` the row waits from ``now``.
    """
    if reason is Reason.INTERRUPTED:
        return _wait_again(row, reason, due_at=now)
    if retry_at is not None:
        again = {} if row.marks is None else {"marks": row.marks.replace(RAISED_MARK, OPEN_MARK)}
        return _wait_again(row, Reason.RETRY, due_at=retry_at, retries=row.retries + 1, deaths=0, watched=False, **again)
    ended = _end_items(row, status)
    status, reason = _overall(row, ended, status, reason)
    return _transition(row, status, reason, process=None, deaths=0, watched=False, stopping=False, due_at=None, **ended)


@lru_cache(maxsize=256)
def ending(row: Row, status: Status, reason: Reason) -> Transition:
    """The :func:`outcome` of a last attempt; cached, because under load most rows are equal."""
    return outcome(row, status, reason)


def give_back(row: Row, state: str | None, *, now: int) -> Transition:
    """Gives a job back that has not begun: it waits in the ledger from ``now``, or is cancelled with its Task."""
    if state == State.CANCELLED:
        return cancel(row)
    return _wait_again(row, Reason.GIVEN_BACK, due_at=now)


def is_suspect(row: Row) -> bool:
    """Whether a process died while the job ran, so that the job may be the cause, and runs alone. A row that is only
    ``watched`` was one of many that a dead process held, and is not known to have begun."""
    return row.deaths > 0


def recover(row: Row, state: str | None, *, now: int, beside: Collection[Row] = ()) -> Transition | None:
    """The recovery of a row whose process is dead. None if there is nothing to recover.

    ``beside``: the other rows that were ``working`` in that process. A row in ``working`` counts the death, unless it would
    be its first and a suspect ran beside it: then only the suspect counts it. The third death ends the row as poison, or
    the sixth if others ran beside it at the last one. A row in ``enqueue`` has begun within the last flush or not at all,
    and counts no death. Rows that wait again are watched. Rows of a cancelled Task are cancelled.
    """
    if row.status not in (Status.ENQUEUE, Status.WORKING) or row.due_at is not None:
        return None
    had_begun = row.status is Status.WORKING
    counts = had_begun and (is_suspect(row) or not any(map(is_suspect, beside)))
    deaths = row.deaths + counts
    if had_begun and deaths >= (2 * POISON_DEATHS if beside else POISON_DEATHS):
        if (rest := _without_poison(row)) is not None and state != State.CANCELLED:
            transition = _wait_again(rest, Reason.WORKER_LOST, due_at=now, deaths=0, watched=True)
            return transition._replace(before=row)
        ended = _end_items(row, Status.ERROR)
        status, reason = _overall(row, ended, Status.ERROR, Reason.POISON)
        return _transition(
            row, status, reason, attempt=row.attempt + 1, deaths=deaths, process=None, stopping=False, **ended
        )  # fmt: skip
    if state == State.CANCELLED:
        return cancel(row)
    return _wait_again(row, Reason.WORKER_LOST, due_at=now, deaths=deaths, watched=True)


def watch(row: Row) -> Transition | None:
    """Marks a row in a foreign queue that a dead process may have held: ``working`` is recorded before it begins.

    None for a row that is already watched or known to have begun.
    """
    if row.watched or row.status is not Status.ENQUEUE or row.due_at is not None:
        return None
    return Transition(row, row._replace(watched=True), Reason.WORKER_LOST)


def recorded(row: Row, status: Status, *, on_loan: bool, now: int) -> Transition:
    """A status that a caller outside the runtimes records for an open job; an unchanged status only adds a message.

    :data:`OUTSIDE` holds a job without a holder while it is ``working``; back in ``enqueue``, it waits from ``now``. A held
    job stays with its holder. ``on_loan`` as in :func:`is_held`. Raises :class:`~asynctask.errors.TransitionRefused` if the
    table has no such edge.
    """
    if status is row.status and status in OPEN:
        return Transition(row, row, Reason.RECORDED)
    if status is Status.ENQUEUE and row.process == OUTSIDE:
        return _wait_again(row, Reason.RECORDED, due_at=now if row.reserved else None)
    changes: dict[str, Any] = {}
    if status is not Status.ENQUEUE:
        changes["due_at"] = None  # it waits for no time
    if status is Status.WORKING and at_rest(row, on_loan):
        changes["process"] = OUTSIDE
    if status in TERMINAL:
        changes |= {"process": None, **_end_items(row, status)}
        status = worst(changes) if row.items > 1 else status
    return _transition(row, status, Reason.CANCELLED if status is Status.CANCELLED else Reason.RECORDED, **changes)


# -- control


def cancel(row: Row) -> Transition:
    """Cancels an open row that is not running; ``attempt`` rises, so that a remaining copy is dropped.

    In a slice the open items are cancelled, and it ends as its worst item; none is open if its process died after the last.
    """
    ended = _end_items(row, Status.CANCELLED)
    return _transition(
        row,
        worst(ended) if row.items > 1 else Status.CANCELLED,
        Reason.CANCELLED,
        attempt=row.attempt + 1,
        due_at=None,
        process=None,
        stopping=False,
        **ended,
    )


def stop(row: Row) -> Transition:
    """Stops a row that runs nowhere, at a user's request, until a user starts it again."""
    return _transition(
        row, Status.STOPPED, Reason.STOPPED, attempt=row.attempt + 1, due_at=None, process=None, stopping=False
    )  # fmt: skip


def ask_stop(row: Row, on_loan: bool) -> Transition | None:
    """Stops a row at a user's request: at once if it is at rest, else when its process stops it. ``on_loan`` as in
    :func:`is_held`. None if the row is stopped, has ended, or has this request already.
    """
    if row.status not in (Status.ENQUEUE, Status.WORKING) or row.stopping:
        return None
    return stop(row) if at_rest(row, on_loan) else Transition(row, row._replace(stopping=True), Reason.STOPPED)


def start(row: Row, *, now: int) -> Transition:
    """Starts a stopped job again: it waits from ``now``, or for the pointer if the pointer has not passed it."""
    return _transition(
        row,
        Status.ENQUEUE,
        Reason.RESUMED,
        attempt=row.attempt + 1,
        due_at=now if row.reserved else None,
        deaths=0,
        watched=False,
    )


def saved(row: Row) -> Transition:
    """A running job saved a checkpoint; the count of deaths restarts, because it made progress."""
    return Transition(row, row._replace(deaths=0), Reason.RECORDED)


_ANEW: Final[Mapping[str, Any]] = {"retries": 0, "deaths": 0, "watched": False, "stopping": False, "process": None}


def explicit_retry(row: Row, *, now: int, chosen: Collection[int] | None = None) -> Transition:
    """A user's retry of a terminal row: it waits from ``now``, with its retries and deaths reset.

    A row that the pointer has not passed needs no ``due_at``: the pointer will reach it. ``chosen``: the indexes of a
    slice's items to reopen, of those that did not finish; None: all of these.
    """
    open_again: dict[str, Any] = {"n_failed": 0, "n_error": 0, "n_cancelled": 0}
    if row.items > 1:
        done = MARKS[Status.FINISH]
        opened = (
            OPEN_MARK if mark != done and (chosen is None or index in chosen) else mark
            for index, mark in enumerate(marks_of(row))
        )
        open_again = marked("".join(opened))
    return _transition(
        row,
        Status.ENQUEUE,
        Reason.RETRIED,
        attempt=row.attempt + 1,
        due_at=now if row.reserved else None,
        **_ANEW,
        **open_again,
    )


def send_again(row: Row, *, due_at: int | None) -> Transition:
    """A program sends another job under the id of this one, which has ended and belongs to no Task: a new run.

    ``due_at``: when it may begin (microseconds); None: its engine holds it.
    """
    return _transition(
        row,
        Status.ENQUEUE,
        Reason.SENT_AGAIN,
        attempt=row.attempt + 1,
        due_at=due_at,
        **_ANEW,
        n_finish=0,
        n_failed=0,
        n_error=0,
        n_cancelled=0,
    )


AT_ONCE: Final = 10
"""Number of further attempts that a job may get without a delay."""

LEAST_S: Final = 0.1
"""Delays shorter than this many seconds count as none."""

_LONGEST_PAUSE_S: Final = 5.0
"""Longest pause in seconds. Above :data:`LEAST_S`, the first pause, which doubles."""


def pause_s(asked_s: float, tries: int) -> float:
    """The delay of another attempt, in seconds, if ``asked_s`` is requested and ``tries`` further attempts were given
    before.

    A job that always requests another attempt without a delay would keep a CPU busy for ever: after :data:`AT_ONCE` of them
    it pauses, twice as long each time, up to 5 seconds.
    """
    if asked_s >= LEAST_S or tries < AT_ONCE:
        return max(0.0, asked_s)
    return min(_LONGEST_PAUSE_S, LEAST_S * 2.0 ** min(tries - AT_ONCE, 10))


def may_close(state: str, sealed: bool, turning: bool, counts: Delta) -> bool:
    """Whether a Task's generation may close: sealed, no rows left to update, no open item by its counts.

    The caller must then check the rows, which are the truth; counts are a cache.
    """
    if not sealed or turning or state not in (State.RUNNING, State.PAUSED, State.CANCELLED):
        return False
    return counts.enqueue == 0 and counts.working == 0 and counts.stopped == 0


def due_callbacks(state: str, counts: Delta) -> tuple[str, ...]:
    """The names of the callbacks of a closed generation, by the state in which it closed and its counts."""
    bad = state == State.CANCELLED or counts.failed or counts.error or counts.cancelled
    return ("on_complete", "on_failure" if bad else "on_success")


# -- slices: jobs of several items


def marks_of(row: Row) -> str:
    """The marks of a slice's items."""
    return OPEN_MARK * row.items if row.marks is None else row.marks


def marked(marks: str) -> dict[str, Any]:
    """The columns of a slice whose items have these marks."""
    return {"marks": marks, **{f"n_{status}": marks.count(letter) for status, letter in MARKS.items()}}


def stepped(row: Row, marks: str) -> Row:
    """The row of a running slice whose attempt has reached these marks; an item's outcome is never replaced.

    Marks are states, not changes, so writing them twice is harmless. Progress resets the count of deaths.
    """
    if len(marks) != row.items:
        raise ValueError(f"a slice of {row.items} items has as many marks, not {len(marks)}")
    if row.marks is not None:
        marks = "".join(old if old in _FINAL else new for old, new in zip(row.marks, marks, strict=True))
    return row if marks == marks_of(row) else row._replace(deaths=0, **marked(marks))


def worst(counts: Mapping[str, Any]) -> Status:
    """The status of an ended slice, by its ``n_*``: error before failed before cancelled before finish."""
    order = (Status.ERROR, Status.FAILED, Status.CANCELLED)
    return next((status for status in order if counts[f"n_{status}"]), Status.FINISH)


def _overall(row: Row, ended: Mapping[str, Any], status: Status, reason: Reason) -> tuple[Status, Reason]:
    """The end of a job: that of its last attempt; for a slice, that of its worst item, with the usual reason."""
    if row.items > 1 and (overall := worst(ended)) is not status:
        return overall, _ENDS[overall]
    return status, reason


def _without_poison(row: Row) -> Row | None:
    """The row with its first open item in ``error``; None if no other item is open.

    A watched slice records each item before it begins the next, so the first open item ran when the processes died.
    """
    if row.items == 1 or (marks := marks_of(row)).count(OPEN_MARK) < 2:
        return None
    return row._replace(**marked(marks.replace(OPEN_MARK, MARKS[Status.ERROR], 1)))


def _end_items(row: Row, status: Status) -> dict[str, Any]:
    """The columns for ending all open items with ``status``; items of a slice with an outcome keep it."""
    if row.items > 1:
        return marked(marks_of(row).replace(OPEN_MARK, MARKS[status]).replace(RAISED_MARK, MARKS[status]))
    open_items = row.items - row.n_finish - row.n_failed - row.n_error - row.n_cancelled
    name = f"n_{status}"
    return {name: getattr(row, name) + open_items}


assert PROBLEM < TERMINAL
