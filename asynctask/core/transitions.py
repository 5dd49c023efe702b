"""The bookkeeping core: pure decisions over values, used by the code that talks to SQL and to brokers.

Nothing here reads a clock, a database or a broker. A :class:`Row` is what counting needs to know of one Event. Every
change of a row is a :class:`Turn`, made by one of the functions below; what the Task's counts move by is never written
down beside it but derived from the row before and the row after (:func:`measure`), so counts equal rows by construction
as long as both are written in one transaction.

Four rules carry the rest:

* **Fence.** ``attempt`` rises with every retry, requeue, recovery and give-back. A copy of a job carries the attempt it
  was dispatched for; a copy whose attempt is not its row's is acknowledged unrun, and its outcome would lose the
  compare-and-set.
* **Flight.** A row is in flight when it is open, the dispatcher has passed it (``reserved``), and it neither waits for
  ``due_at`` nor is lent. ``in_flight`` of a Task is ``dispatched - returned``, two counters that only rise.
* **Loan.** A row that is ``enqueue`` under the name of a process is lent to it: that process performs it in the place of
  another job of the same Task, once that one has ended. So a Task with a ``parallel`` never runs more than that.
* **Copy key.** A broker holds at most one copy of the same (job id, attempt): pushing it again does nothing.

`tests/unit/test_bookkeeping_model.py` drives exactly these functions through interleavings and crashes at every step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Final, NamedTuple

from asynctask.core.states import OPEN, PROBLEM, TERMINAL, Reason, State, Status, check_event

__all__ = [
    "COUNTED",
    "POISON_DEATHS",
    "Begin",
    "Delta",
    "Row",
    "Turn",
    "at_rest",
    "begin",
    "cancel",
    "difference",
    "ending",
    "explicit_retry",
    "give_back",
    "held_elsewhere",
    "hurry",
    "in_flight",
    "is_lent",
    "is_suspect",
    "lend",
    "may_close",
    "may_dispatch",
    "measure",
    "outcome",
    "recorded",
    "recover",
    "redispatch",
    "release_due",
    "room",
    "start",
    "stop",
    "take_over",
    "target",
    "working",
]

COUNTED: Final = tuple(str(s) for s in Status)
"""The counts of items, one per status; they always sum to the total."""

POISON_DEATHS: Final = 3
"""So many processes may die under a job that had begun before it ends in ``error`` (reason ``poison``); twice as many where
others were at work beside it, for one of those may have been the cause."""


class Row(NamedTuple):
    """What the bookkeeping needs of an Event.

    ``due_at`` is in microseconds, None when it does not wait; ``retries`` counts attempts that the retry policy gave;
    ``deaths`` counts processes that died under it since its last outcome; ``reserved`` is true once the dispatcher has
    passed the row (always for an Event without a Task). ``watched`` is set when a process died that held it, so that its
    next worker records ``working`` before it performs. ``n_*`` are what the items of a slice came to so far.
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


@dataclass(slots=True)
class Delta:
    """What a Task's counters move by. ``jobs`` counts Events, the rest of the first line counts items."""

    enqueue: int = 0
    working: int = 0
    stopped: int = 0
    finish: int = 0
    failed: int = 0
    error: int = 0
    cancelled: int = 0
    retrying: int = 0
    jobs: int = 0
    dispatched: int = 0
    returned: int = 0

    def add(self, other: Delta, times: int = 1) -> None:
        """Adds another delta to this one, in place, so many times."""
        self.enqueue += other.enqueue * times
        self.working += other.working * times
        self.stopped += other.stopped * times
        self.finish += other.finish * times
        self.failed += other.failed * times
        self.error += other.error * times
        self.cancelled += other.cancelled * times
        self.retrying += other.retrying * times
        self.jobs += other.jobs * times
        self.dispatched += other.dispatched * times
        self.returned += other.returned * times

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in Delta.__slots__)


class Turn(NamedTuple):
    """One step of one row: legal by the table of states, with what the counts move by."""

    before: Row | None
    after: Row
    reason: Reason

    @property
    def delta(self) -> Delta:
        """What the Task's counters move by when this turn is written."""
        return difference(self.before, self.after)


def in_flight(row: Row) -> bool:
    """Whether a copy of it is, or should be, in the broker or in a process, and it counts under its Task's ``parallel``."""
    if not row.reserved or row.due_at is not None:
        return False
    return row.status is Status.WORKING or (row.status is Status.ENQUEUE and row.process is None)


def is_lent(row: Row) -> bool:
    """Whether it waits in a process behind another job of its Task."""
    return row.status is Status.ENQUEUE and row.process is not None


def at_rest(row: Row) -> bool:
    """Whether it is open and nobody can be running its attempt: not dispatched yet, waiting for ``due_at``, or stopped.
    One that is lent may be running, though nothing says so yet.

    In a cancelled Task such a row is cancelled whenever it is found, not in one pass: an interrupted, retried, given-back
    or stopped job comes to rest after the pass went by, and no dispatcher starts it any more.
    """
    return row.status in OPEN and not in_flight(row) and not is_lent(row)


def measure(row: Row) -> Mapping[str, int]:
    """How one row stands in its Task's counts: its items per status, and its items that wait for a retry."""
    done = row.n_finish + row.n_failed + row.n_error + row.n_cancelled
    counts = {
        "finish": row.n_finish,
        "failed": row.n_failed,
        "error": row.n_error,
        "cancelled": row.n_cancelled,
    }
    counts[row.status] = counts.get(row.status, 0) + row.items - done
    if row.status in OPEN and row.due_at is not None and row.retries > 0:
        counts["retrying"] = row.items - done
    return counts


def _count(delta: Delta, row: Row, sign: int) -> None:
    """Adds what :func:`measure` says of a row; written out, for it runs twice for each outcome."""
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
    """What the counters move by when a row goes from ``before`` (None: it is new) to ``after``."""
    delta = Delta()
    if before is None:
        delta.jobs = 1
    else:
        _count(delta, before, -1)
    _count(delta, after, 1)
    was = before is not None and in_flight(before)
    now = in_flight(after)
    # A requeue that stays in flight (one copy lost, the next dispatched) returns one and dispatches one.
    if was and (not now or (before is not None and after.attempt != before.attempt)):
        delta.returned = 1
    if now and (not was or (before is not None and after.attempt != before.attempt)):
        delta.dispatched = 1
    return delta


def _turn(row: Row, target: Status, reason: Reason, **changes: Any) -> Turn:
    check_event(row.status, target, reason)
    return Turn(row, row._replace(status=target, **changes), reason)


# -- Dispatch -----------------------------------------------------------------------------------------------------------


def may_dispatch(state: str) -> bool:
    """Whether a Task in this state may start jobs."""
    return state in (State.SPLITTING, State.RUNNING)


def room(state: str, parallel: int | None, flying: int, wanted: int) -> int:
    """How many jobs of a Task may be reserved now: what is wanted, under its ``parallel`` less what is in flight."""
    if not may_dispatch(state):
        return 0
    limit = wanted if parallel is None else min(wanted, parallel - flying)
    return max(0, limit)


def target(free_threads: int, consumed_per_s: float, ahead_s: float = 0.25) -> int:
    """How many jobs should wait in a queue: one for each free thread and ``ahead_s`` seconds of consumption."""
    return max(0, free_threads) + int(max(0.0, consumed_per_s) * ahead_s)


def release_due(row: Row) -> Turn:
    """A row whose ``due_at`` has come is reserved: it stops waiting and its next copy is dispatched."""
    if row.status is not Status.ENQUEUE or row.due_at is None:
        raise ValueError(f"only a waiting row can be released, not {row}")
    return Turn(row, row._replace(due_at=None, reserved=True), Reason.RETRY)


def lend(row: Row, process: str) -> Turn:
    """A row that may be dispatched, at the pointer or due, waits in a process behind another job of its Task."""
    if row.status is not Status.ENQUEUE or row.process is not None or in_flight(row):
        raise ValueError(f"only a row that may be dispatched can be lent, not {row}")
    return _turn(row, Status.ENQUEUE, Reason.LENT, process=process, reserved=True, due_at=None)


def hurry(row: Row, *, now: int) -> Turn:
    """A row that waits for ``due_at`` is due now, because a person says so; it keeps its attempt, for none was lost."""
    if row.status is not Status.ENQUEUE or row.due_at is None:
        raise ValueError(f"only a waiting row can be hurried, not {row}")
    return Turn(row, row._replace(due_at=now), Reason.RETRY)


def redispatch(row: Row, state: str | None, *, held: bool, missed_before: bool, now: int) -> Turn | None:
    """An open row in flight that the broker does not hold on two looks: it waits again, or is cancelled with its Task.

    A row that a live process is ``working`` on is left alone: that the broker forgot it does not stop the work.
    """
    if held or not missed_before or row.status is not Status.ENQUEUE or not in_flight(row):
        return None
    if state == State.CANCELLED:
        return cancel(row)
    return _turn(row, Status.ENQUEUE, Reason.REDISPATCHED, attempt=row.attempt + 1, due_at=now)


# -- Begin --------------------------------------------------------------------------------------------------------------


class Begin(Enum):
    """What to do with a fetched copy."""

    RUN = "run"
    DROP = "drop"  # acknowledge unrun: terminal, another attempt's copy, not dispatched, or at work in a process
    GIVE_BACK = "give_back"  # the Task is paused: back to the ledger
    CANCEL = "cancel"  # the Task is cancelled


def is_foreign(row: Row, attempt: int | None, task_id: int | None) -> bool:
    """Whether a copy of ``attempt`` is the one that another program pushed (0), and the row is what Begin made of it.

    It carries no fence, and is the row's own copy as long as the row has had no other attempt.
    """
    return attempt == 0 and task_id is None and row.attempt == 1


def begin(row: Row, attempt: int | None, state: str | None) -> Begin:
    """Decides for a fetched copy of ``attempt`` (None: the engine knows none) by its Task's ``state`` (None: no Task)."""
    if row.status in TERMINAL or row.status is Status.STOPPED:
        return Begin.DROP
    if attempt is not None and attempt != row.attempt:
        return Begin.DROP
    if row.due_at is not None and attempt is not None:
        return Begin.DROP  # it waits in the ledger: whoever dispatches it next pushes its own copy
    if row.status is Status.WORKING and row.process is not None and attempt is not None:
        return Begin.DROP  # a process is on this attempt; the broker forgot its copy and was given another
    if state == State.CANCELLED:
        return Begin.CANCEL
    if state == State.PAUSED:
        return Begin.GIVE_BACK
    return Begin.RUN


# -- Record -------------------------------------------------------------------------------------------------------------


def working(row: Row, process: str, reason: Reason = Reason.STARTED) -> Turn:
    """The job began and outlasts a flush (or is watched closely because a process died under it)."""
    return _turn(row, Status.WORKING, reason, process=process)


def take_over(row: Row, process: str) -> Turn:
    """An engine that carries no fence of ours gave a running job to another process: the row is that one's now."""
    return Turn(row, row._replace(process=process), Reason.STARTED)


def held_elsewhere(turn: Turn) -> Turn:
    """The same turn for a job whose copies another engine keeps: its next attempt waits in that engine's own queue.

    So the row stays in flight instead of waiting in the ledger: whoever dispatched it would push it to a broker that is
    not its own.
    """
    return turn._replace(after=turn.after._replace(due_at=None))


def outcome(row: Row, status: Status, reason: Reason, *, retry_at: int | None = None, now: int = 0) -> Turn:
    """What one attempt came to.

    Arguments: the terminal ``status`` (``finish``, ``failed``, ``error``) with its reason; ``retry_at`` when the retry
    policy gives another attempt (then the row waits as ``enqueue`` until that time); with ``Reason.INTERRUPTED`` the row
    waits again from ``now``.
    """
    if reason is Reason.INTERRUPTED:
        return _turn(row, Status.ENQUEUE, reason, attempt=row.attempt + 1, due_at=now, process=None)
    if retry_at is not None:
        return _turn(
            row,
            Status.ENQUEUE,
            Reason.RETRY,
            attempt=row.attempt + 1,
            due_at=retry_at,
            retries=row.retries + 1,
            deaths=0,
            watched=False,
            process=None,
        )
    return _turn(row, status, reason, process=None, deaths=0, watched=False, due_at=None, **_items_to(row, status))


@lru_cache(maxsize=256)
def ending(row: Row, status: Status, reason: Reason) -> Turn:
    """The :func:`outcome` of an attempt that no other follows. In a storm nearly all rows are alike: it is found once."""
    return outcome(row, status, reason)


def give_back(row: Row, *, now: int) -> Turn:
    """A copy that was fetched or waits in the broker goes back to the ledger unrun, and may be dispatched at once."""
    return _turn(row, Status.ENQUEUE, Reason.GIVEN_BACK, attempt=row.attempt + 1, due_at=now, process=None)


def is_suspect(row: Row) -> bool:
    """Whether a process died that held it: it may be the job that kills."""
    return row.watched or row.deaths > 0


def recover(row: Row, state: str | None, *, now: int, beside: Collection[Row] = ()) -> Turn | None:
    """The process that held this row's copy is dead. None where the row has nothing to recover.

    ``beside``: the other rows that were ``working`` in that process. A row that had begun (``working``) counts the death,
    unless it is its first and there was a suspect beside it, which counts it then. The third death ends it as poison, or
    the sixth if the last one came while others were beside it. One that is still ``enqueue`` may have begun within the last
    flush or not at all: it counts no death. Whatever waits again is watched from now on. A row of a cancelled Task is
    cancelled, for nobody can be running it any more.
    """
    if row.status not in (Status.ENQUEUE, Status.WORKING) or row.due_at is not None:
        return None
    had_begun = row.status is Status.WORKING
    counts = had_begun and (is_suspect(row) or not any(map(is_suspect, beside)))
    deaths = row.deaths + counts
    if had_begun and deaths >= (2 * POISON_DEATHS if beside else POISON_DEATHS):
        return _turn(
            row, Status.ERROR, Reason.POISON, attempt=row.attempt + 1, deaths=deaths, process=None,
            **_items_to(row, Status.ERROR),
        )  # fmt: skip
    if state == State.CANCELLED:
        return cancel(row)
    return _turn(
        row, Status.ENQUEUE, Reason.WORKER_LOST, attempt=row.attempt + 1, due_at=now, deaths=deaths, process=None,
        watched=True,
    )  # fmt: skip


def recorded(row: Row, status: Status, process: str | None = None) -> Turn:
    """What somebody outside the runtimes says of an open job; the same status again only adds a message.

    Raises :class:`~asynctask.errors.TransitionRefused` where the table has no such edge.
    """
    if status is row.status and status in OPEN:
        return Turn(row, row, Reason.RECORDED)
    changes: dict[str, Any] = {"process": process if status is Status.WORKING else None}
    if status is not Status.ENQUEUE:
        changes["due_at"] = None  # what runs or is over waits for nothing
    if status in TERMINAL:
        changes |= _items_to(row, status)
    return _turn(row, status, Reason.RECORDED, **changes)


# -- Control ------------------------------------------------------------------------------------------------------------


def cancel(row: Row) -> Turn:
    """An open row that nobody is running is cancelled; ``attempt`` rises, so that a copy still somewhere is dropped."""
    return _turn(
        row, Status.CANCELLED, Reason.CANCELLED, attempt=row.attempt + 1, due_at=None, process=None,
        **_items_to(row, Status.CANCELLED),
    )  # fmt: skip


def stop(row: Row) -> Turn:
    """A person stopped it: it waits, shown, until a person starts it again."""
    return _turn(row, Status.STOPPED, Reason.STOPPED, attempt=row.attempt + 1, due_at=None, process=None)


def start(row: Row, *, now: int) -> Turn:
    """A person starts a stopped job again: it waits from ``now``, or for the pointer if it was never reached."""
    return _turn(row, Status.ENQUEUE, Reason.RESUMED, attempt=row.attempt + 1, due_at=now if row.reserved else None)


def explicit_retry(row: Row, *, now: int) -> Turn:
    """A person's retry of a terminal row: it waits from ``now``, with its retries and deaths forgotten.

    A row that the dispatcher has not reached yet needs no ``due_at``: the pointer will come by.
    """
    open_again: dict[str, Any] = {"n_failed": 0, "n_error": 0, "n_cancelled": 0}
    return _turn(
        row, Status.ENQUEUE, Reason.RETRIED, attempt=row.attempt + 1, due_at=now if row.reserved else None,
        retries=0, deaths=0, watched=False, process=None, **open_again,
    )  # fmt: skip


def may_close(state: str, sealed: bool, turning: bool, counts: Delta) -> bool:
    """Whether a Task's generation may close: sealed, nothing being turned, and no open item by its counts.

    The caller then asks the rows themselves before it closes: counts are a cache, rows are the truth.
    """
    if not sealed or turning or state not in (State.RUNNING, State.PAUSED, State.CANCELLED):
        return False
    return counts.enqueue == 0 and counts.working == 0 and counts.stopped == 0


def _items_to(row: Row, status: Status) -> dict[str, Any]:
    """A job of one item ends whole: its items' column is the status; a slice keeps what its items came to."""
    open_items = row.items - row.n_finish - row.n_failed - row.n_error - row.n_cancelled
    name = f"n_{status}"
    return {name: getattr(row, name) + open_items}


assert PROBLEM < TERMINAL
