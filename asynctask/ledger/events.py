"""Every change of an Event: :func:`apply` writes compare-and-set, messages and counts in one transaction."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.clock import from_datetime
from asynctask.core.states import PROBLEM, TERMINAL, Reason, State, Status
from asynctask.core.transitions import MARKS, Delta, Row, Transition, is_kept, marks_of
from asynctask.database import batches
from asynctask.database.notify import notify
from asynctask.database.retrying import TransactionConflict
from asynctask.database.tables import events, item_errors, key_positions, loans, task_errors, task_tallies, tasks
from asynctask.iterable import ItemFailure, unpack
from asynctask.job import JobTask
from asynctask.ledger.base import Ledger, chunks, dumps, loads, lock_duty, stamp
from asynctask.messages import MAX_ERROR, append, template_of

MAX_GROUPS = 100
"""Largest number of groups of failure messages of one Task; further ones are counted under "other"."""

ITEMS: Final = "items"
"""``problem`` of an open slice with a failed item."""

POSITIONS_EACH: Final = 1 << 20
"""Distance between the positions of one Task's jobs and those of the next Task in the line of a key. Positions between are
for jobs that run again after their end; more than this in one line would overlap the next Task with keys."""

RESUMABLE: Final = "stopped"
"""``problem`` of a stopped Event, by which an index finds the Events that may be started again."""


_e, _t, _l, _of = events.c, tasks.c, loans.c, tasks.alias("of_job")

IN_LOAN: Final = (_l.task_id == _e.task_id, _l.low <= _e.seq, _l.high > _e.seq)
"""Whether an Event lies in a loan."""

IS_OPEN: Final = _e.status.in_([str(Status.ENQUEUE), str(Status.WORKING)])
"""Whether an Event waits or runs."""

UNHELD: Final = IS_OPEN & _e.due_at.is_(None) & _e.process.is_(None)
"""Whether an open Event waits for no time and names no process, so that only a loan can hold it. If it is ``working``, an
outside program has recorded that, and the loan's holder keeps it."""

_ROUND_AT = sa.case((_t.interval_s > 0, _t.round_at))
_READ = (
    sa.select(
        _e.id, _e.job_id, _e.task_id, _e.seq, _e.status, _e.attempt, _e.due_at, _e.retries, _e.deaths, _e.watched,
        _e["items"], _e.n_finish, _e.n_failed, _e.n_error, _e.n_cancelled, _e.process, _e.added_messages, _e.first_row,
        _e.started_at, sa.func.coalesce(_e.worker_name, _t.worker_name, ""),
        sa.func.coalesce(_e.queue, _t.queue, "default"), _t.state, _t.next_seq, _t.slots, _t.parallel, _ROUND_AT,
        _t.priority, _t.interval_s, _e.callback_of, _e.line, _e.stopping, _e.marks, _e.last_row, _e.created_at,
        _e.queue.is_not(None),
    )
    .select_from(events.outerjoin(tasks, _t.id == _e.task_id))
)  # fmt: skip

LAST_ERROR: Final = ("last_error", "traceback")  # of the last attempt that raised
_WRITTEN = (
    "status", "attempt", "due_at", "retries", "deaths", "watched", "stopping", "n_finish", "n_failed", "n_error",
    "n_cancelled", "process", "problem", "added_messages", "started_at", "finished_at",
)  # fmt: skip
_KEPT = ("result", "checkpoint", "marks", "params", "options", "worker_name", "queue", "created_at", "items", *LAST_ERROR)
"""Columns that are unchanged unless the change sets them."""

_GUARD = ("id", "attempt", "status")

_STATUSES = {str(status): status for status in Status}  # a dict lookup is cheaper than calling the enumeration


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an item ended ``failed`` or ``error``: a code for programs, a message for users."""

    code: str
    message: str


class Note(NamedTuple):
    """A message for ``added_messages``. ``at``: microseconds, None for the time of writing; ``row``: that of its item in a
    slice; ``process``: of the begin of an attempt, the process that performs it."""

    status: str
    message: str
    at: int | None = None
    row: int | None = None
    process: str | None = None


@dataclass(slots=True)
class EventRecord:
    """One Event as read: the row for the transition functions, and the other columns that decisions and records need.

    ``round_at``: when the jobs of the last round of a Task with an interval may start (microseconds). ``callback_of``: the
    Task whose callback it is. ``line``: of an Event with a key, see :mod:`asynctask.ledger.sessions`. ``knobs``: its Task's
    priority, ``parallel`` and interval. ``created_at``: when it was created, or sent again after its end (microseconds).
    ``is_resent``: a job of a Task that has sent itself again, see :func:`asynctask.arrivals.send_itself`. ``task``: its
    Task, or that whose callback it is; only of a job that is about to begin.
    """

    id: int
    job_id: str
    task_id: int | None
    seq: int | None
    row: Row
    messages: str | None
    first_row: int | None
    started_at: int | None
    worker_name: str
    queue: str
    task_state: str | None
    slots: int
    round_at: int | None = None
    callback_of: int | None = None
    line: int | None = None
    last_row: int | None = None
    knobs: tuple[float | None, ...] = ()
    created_at: int = 0
    is_resent: bool = False
    task: JobTask | None = None

    @property
    def is_lone(self) -> bool:
        """Whether it belongs to no Task, neither as a job nor as a callback. An attached engine keeps its own lone jobs;
        the ledger keeps all others."""
        return self.task_id is None and self.callback_of is None


def untouched(record: EventRecord) -> bool:
    """Whether nothing was written since the Event was lent or dispatched, and it has one item."""
    row = record.row
    return (
        row.status is Status.ENQUEUE
        and row.reserved
        and record.messages is None
        and row.due_at is None
        and row.process is None
        and not row.watched
        and not row.stopping
        and row.deaths == 0
        and row.items == 1
    )


def last_start(record: EventRecord) -> int | None:
    """Start of the last attempt that began (microseconds), as far as known; ``started_at`` is that of the first attempt.

    Messages have whole milliseconds: the result is rounded up, and at most one millisecond late.
    """
    began = [(each["attempt"], each["at"]) for each in loads(record.messages) or [] if each.get("status") == "working"]
    if not began:
        return record.started_at
    attempt = max(at for at, _ in began)
    first = min(text for of, text in began if of == attempt)
    at = from_datetime(datetime.fromisoformat(first)) + 1_000
    return at if attempt > 1 or record.started_at is None else record.started_at


def has_begun(record: EventRecord) -> bool:
    """Whether the current attempt is known to have begun, which writes its first message."""
    return any(each["attempt"] == record.row.attempt for each in loads(record.messages) or [])


def problem_of(transition: Transition, failure: Failure | None) -> str | None:
    """The ``problem`` column: the code of the failure, for a transition that ends ``failed`` or ``error``;
    :data:`RESUMABLE` for one that stops; :data:`ITEMS` for an open slice with a failed item; else None."""
    if transition.after.status is Status.STOPPED:
        return RESUMABLE
    if transition.after.status not in PROBLEM:
        return ITEMS if transition.after.items > 1 and transition.after.n_failed + transition.after.n_error else None
    return (failure.code if failure else str(transition.reason))[:64]


@dataclass(slots=True, kw_only=True)
class Write(ABC):
    """A write of one Event, and its result.

    If the compare-and-set is won, ``notes`` are added to ``added_messages``, with the message of a cancel or a stop.
    ``values``: further columns to set (:data:`_KEPT`; ``started_at`` only if the Event has none, or to None); ``failure``:
    for a transition that ends ``failed`` or ``error``; ``failures``: the same for a slice's items, by index. ``seconds``:
    how long the job ran.

    :func:`apply` sets the result: ``transition``, None if the compare-and-set was lost, and ``record``, the Event after it,
    None if the Event no longer exists.
    """

    event_id: int = field(kw_only=False)
    notes: Sequence[Note] = ()
    failure: Failure | None = None
    failures: Mapping[int, ItemFailure] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    record: EventRecord | None = None
    transition: Transition | None = None

    @abstractmethod
    def decided(self, ledger: Ledger, record: EventRecord) -> Transition | None:
        """The transition for the Event as read in the transaction; None leaves it as it is (the compare-and-set is
        lost)."""
        ...


W = TypeVar("W", bound=Write)


@dataclass(slots=True)
class Change(Write):
    """A change that the function ``decide`` decides. ``decide`` must not refer to the change: thousands of such reference
    cycles keep the garbage collector busy."""

    decide: Callable[[EventRecord], Transition | None]

    def decided(self, ledger: Ledger, record: EventRecord) -> Transition | None:
        return self.decide(record)


class StaleRead(TransactionConflict):
    """An Event changed after it was read. Nothing is written; the Event must be read again."""

    code = "seen_no_more"


def _record(found: Any) -> EventRecord:
    (
        id_, job_id, task_id, seq, status, attempt, due_at, retries, deaths, watched, items, n_finish, n_failed, n_error,
        n_cancelled, process, messages, first_row, started_at, worker_name, queue, state, next_seq, slots, parallel,
        round_at, priority, interval_s, callback_of, line, stopping, marks, last_row, created_at, has_queue, *its,
    ) = found  # fmt: skip
    reserved = task_id is None or (seq is not None and next_seq is not None and seq < next_seq)
    row = Row(
        _STATUSES[status], attempt, due_at, retries, deaths, reserved, items, n_finish, n_failed, n_error, n_cancelled,
        process, bool(watched), bool(stopping), marks,
    )  # fmt: skip
    return EventRecord(
        id_, job_id, task_id, seq, row, messages, first_row, started_at, worker_name, queue, state, slots or 1,
        round_at, callback_of, line, last_row, (priority, parallel, interval_s), created_at,
        task_id is not None and bool(has_queue), JobTask(*its) if its and its[0] is not None else None,
    )  # fmt: skip


def read_events(connection: Connection, condition: Any, *, lock: bool = False) -> list[EventRecord]:
    """The Events that match a condition on the table, in the order of ids; with ``lock``, locked until the transaction
    ends."""
    if lock and connection.dialect.name != "sqlite":
        condition = batches.among(connection, _e.id, lock_events(connection, condition))
    return [_record(found) for found in batches.fetch(connection, _READ.where(condition).order_by(_e.id))]


def read_jobs(connection: Connection, job_ids: Sequence[str]) -> dict[str, EventRecord]:
    """The Events of these jobs with their Tasks, by job id."""
    found = _OF_JOBS.fetch(connection, job_ids) if job_ids else ()
    return {record.job_id: record for record in map(_record, found)}


_WITH_TASK = _READ.add_columns(_of.c.id, _of.c.title, _of.c.owner, _of.c.worker_name, _of.c.context)
_JOINED = _WITH_TASK.outerjoin(_of, _of.c.id == sa.func.coalesce(_e.task_id, _e.callback_of))
_OF_JOBS: Final = batches.ByValues(_e.job_id, _JOINED.where)


class Saved(NamedTuple):
    """The state that earlier attempts of a job saved: the checkpoint (:class:`asynctask.job.Checkpoint`), and for a slice
    the marks and results."""

    checkpoint: str | None
    marks: str | None
    results: str | None


_IS_SLICE = _e["items"] > 1
_SAVED = (_e.id, _e.checkpoint, _e.marks, sa.case((_IS_SLICE, _e.result)))


def read_saved(connection: Connection, event_ids: Sequence[int]) -> dict[int, Saved]:
    """The saved state of these Events, by id; Events without any are left out."""
    chosen = batches.among(connection, _e.id, event_ids) & (_e.checkpoint.is_not(None) | _e.marks.is_not(None))
    return {int(i): Saved(*rest) for i, *rest in connection.execute(sa.select(*_SAVED).where(chosen))}


def rows_of(connection: Connection, record: EventRecord) -> Sequence[int | None]:
    """The rows of an Event's items in the list, by index."""
    first, last, items = record.first_row, record.last_row, record.row.items
    if items == 1 or first is None:
        return [first] * items
    if last is not None and last - first + 1 == items:
        return range(first, last + 1)
    return unpack(loads(connection.execute(sa.select(_e.params).where(_e.id == record.id)).scalar_one()))[0]


def with_rows(rows: Collection[int]) -> Any:
    """The condition that an Event has an item of these numbers."""
    within = [(_e.first_row <= row) & (_e.last_row >= row) for row in rows]
    return _e.first_row.in_(rows) | ((_e["items"] > 1) & sa.or_(sa.false(), *within))


def with_ended_rows(rows: Collection[int], statuses: Collection[str]) -> Any:
    """The condition that a job of several items has one of these numbers that ended with one of these statuses; of a job of
    one item, that it has one of these numbers."""
    c = item_errors.c
    named = sa.exists().where(c.event_id == _e.id, c.row.in_(rows), c.status.in_(statuses))
    if Status.CANCELLED in statuses:  # such an item has no entry of its own
        named |= (_e.n_cancelled > 0) & with_rows(rows)
    return sa.case((_e["items"] > 1, named), else_=_e.first_row.in_(rows))


def read_stops(connection: Connection, event_ids: Sequence[int]) -> list[int]:
    """Those of these running Events that should stop: a user stopped them, or paused or cancelled their Task."""
    held_back = (_e.stopping > 0) | _t.state.in_([str(State.PAUSED), str(State.CANCELLED)])
    found = sa.select(_e.id).select_from(events.outerjoin(tasks, _t.id == _e.task_id))
    return [int(i) for (i,) in connection.execute(found.where(batches.among(connection, _e.id, event_ids), held_back))]


def lock_events(connection: Connection, condition: Any) -> Sequence[int]:
    """Locks the Events that match a condition, in the order of their ids, and returns the ids.

    A later statement must read the rows: a locking read that waited does not re-read joined columns, such as the Task's
    pointer, which may have moved meanwhile. The Task's row is not locked.
    """
    return batches.locked(connection, sa.select(_e.id).where(condition).order_by(_e.id))


def apply(connection: Connection, ledger: Ledger, changes: Sequence[W], ends: Sequence[Write] = ()) -> list[W]:
    """Writes every change whose decision still holds, and every end, in the caller's write transaction.

    Events, their messages, the Task's counts and its grouped errors change together. For ``changes``, it reads the rows
    under lock, calls :meth:`Write.decided`, and compares status and attempt again in the UPDATE; rows that are not to be
    kept are deleted. ``ends`` are of Events that were :func:`untouched` when they were read before, without a lock. Each
    has its ``record`` and ``transition``, and is only compared: all are written, or :class:`StaleRead` is raised. Ends set
    at most ``result``, ``started_at`` and an error. Returns the changes, each with its result. An Event may occur once.
    """
    moved: dict[tuple[int, int], Delta] = {}
    now = ledger.now()
    for batch in chunks(changes):
        _apply_batch(connection, ledger, batch, moved, now)
    if ends:
        write_unread(connection, ledger, ends, moved, now)
    _move_in_lines(connection, [*changes, *ends])
    # Lock order of every transaction: all Events first, then their counters.
    _write_failures(connection, ledger, [*changes, *ends])
    move_counts(connection, moved, now)
    if any(_is_lone_and_due(each, now) for each in changes):
        notify(connection)  # jobs of Tasks are announced by their hints
    return list(changes)


def _is_lone_and_due(change: Write, now: int) -> bool:
    due = None if change.transition is None else change.transition.after.due_at
    return due is not None and due <= now and change.record is not None and change.record.task_id is None


def _move_in_lines(connection: Connection, changes: Sequence[Write]) -> None:
    """Removes Events that end from the lines of their keys; :func:`sessions.free` finds the next ones after the commit.
    Events that run again after their end get the last positions."""
    ended, again = list[int](), list[int]()
    for change in changes:
        if change.record is None or change.record.line is None or (transition := change.transition) is None:
            continue
        if transition.after.status in TERMINAL:
            ended.append(change.event_id)
        elif transition.before is not None and transition.before.status in TERMINAL:
            again.append(change.event_id)
    if ended:
        _LEAVE.execute(connection, ended)
    if again:
        lock_order(connection)
        _ENTER.execute(connection, again)


_LEAVE: Final = batches.ByValues(key_positions.c.event_id, key_positions.delete().where)


def _entered(its: Any) -> Any:
    w = key_positions.alias("w")
    least = sa.select(sa.func.max(_t.id) * POSITIONS_EACH).scalar_subquery()
    last = sa.select(sa.func.max(w.c.position)).where(w.c.line == _e.line).correlate(events).scalar_subquery()
    position = sa.case((last > least, last), else_=least) + 1
    return key_positions.insert().from_select(
        ["event_id", "line", "position"], sa.select(_e.id, _e.line, position).where(its)
    )


_ENTER: Final = batches.ByValues(_e.id, _entered)


def lock_order(connection: Connection) -> None:
    """Keeps other transactions from creating a Task with keys, or appending to a line, until this one ends; call it before
    a new Task has its id. So a reader that sees a Task with keys sees all with smaller ids, and positions only grow."""
    lock_duty(connection, "key order")


def _apply_batch(
    connection: Connection, ledger: Ledger, changes: Sequence[Write], moved: dict[tuple[int, int], Delta], now: int
) -> None:
    condition = batches.among(connection, _e.id, [change.event_id for change in changes])
    records = {record.id: record for record in read_events(connection, condition, lock=True)}
    won: list[Write] = []
    for change in changes:
        record = records.get(change.event_id)
        change.record = record
        transition = change.transition = change.decided(ledger, record) if record is not None else None
        if transition is None or record is None:
            continue
        won.append(change)
        record.row = transition.after
        if record.task_id is not None:
            moved.setdefault((record.task_id, ledger.slot(record.slots)), Delta()).add(transition.delta)
    _write(connection, ledger, won, now)


def _write(connection: Connection, ledger: Ledger, won: Sequence[Write], now: int) -> None:
    alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for each in _kept(connection, won):
        values = _values(ledger, each, now)
        alike.setdefault(tuple(name for name in _KEPT if f"v_{name}" in values), []).append(values)
    for kept, rows in alike.items():
        written = (*_WRITTEN, *kept)
        if batches.update(connection, events, _GUARD, written, rows) != len(rows):
            raise TransactionConflict(_CHANGED)


_CHANGED: Final = "rows changed under their lock; the transaction is rolled back and tried again"


def _kept(connection: Connection, won: Sequence[Write]) -> Sequence[Write]:
    """The changes of the rows that are kept; deletes the other rows. All were read under the lock of this transaction, so
    their status and attempt are still those of the decision."""
    gone = [each.event_id for each in won if each.transition is not None and not is_kept(each.transition.after)]
    if not gone:
        return won
    if _DELETE.execute(connection, gone).rowcount != len(gone):
        raise TransactionConflict(_CHANGED)
    return [each for each in won if each.transition is not None and is_kept(each.transition.after)]


_DELETE: Final = batches.ByValues(_e.id, events.delete().where)


def _values(ledger: Ledger, change: Write, now: int) -> dict[str, Any]:
    record, transition = change.record, change.transition
    assert record is not None
    assert transition is not None
    assert transition.before is not None
    before, after = transition.before, transition.after
    notes = change.notes
    # An attempt that ran to its end (a slice with cancelled items) or was recorded from outside has a message already.
    if transition.reason is Reason.CANCELLED and after.attempt > before.attempt:
        notes = [*notes, Note("cancelled", ledger.catalogue("cancelled"))]
    if after.status is Status.STOPPED:
        notes = _stopped_notes(ledger, notes)
    if notes:
        record.messages = _added(record.messages, notes, before.attempt, now)
    over = after.status in TERMINAL
    values = {
        "b_id": record.id,
        "b_attempt": before.attempt,
        "b_status": str(before.status),
        "v_status": str(after.status),
        "v_attempt": after.attempt,
        "v_due_at": after.due_at,
        "v_retries": after.retries,
        "v_deaths": after.deaths,
        "v_watched": int(after.watched),
        "v_stopping": int(after.stopping),
        "v_n_finish": after.n_finish,
        "v_n_failed": after.n_failed,
        "v_n_error": after.n_error,
        "v_n_cancelled": after.n_cancelled,
        "v_process": after.process,
        "v_problem": problem_of(transition, change.failure),
        "v_added_messages": record.messages,
        "v_started_at": record.started_at,
        "v_finished_at": now if over else None,
    }
    if after.marks is not None:
        values["v_marks"] = after.marks
    if record.is_resent and transition.reason is Reason.RETRIED:
        values |= {"v_options": None, "v_queue": None}  # the item itself runs again
    for name, value in change.values.items():
        if name != "started_at" or record.started_at is None or value is None:
            values[f"v_{name}"] = value
    return values


def _added(messages: str | None, notes: Sequence[Note], attempt: int, now: int) -> str:
    """``added_messages`` with these messages of an attempt appended."""
    new = [stamp(at or now, status, message, attempt, row, process) for status, message, at, row, process in notes]
    return dumps(append(loads(messages) or (), new))


def _stopped_notes(ledger: Ledger, notes: Sequence[Note]) -> list[Note]:
    """The messages of a job that a user stopped, without those about a next attempt."""
    wrong = (Note("error", ledger.catalogue("interrupted")), Note("enqueue", ledger.catalogue("retry")))
    return [*(note for note in notes if note not in wrong), Note("stopped", ledger.catalogue("stopped"))]


BY_MESSAGE: Final = ("failed", "raised")  # the generic codes


def error_columns(ledger: Ledger, why: Failure | ItemFailure | None, traceback: str | None) -> dict[str, Any]:
    """The columns of an Event whose attempt raised an error in this process."""
    if why is None:
        return {}
    said = {"code": why.code, "message": why.message[:MAX_ERROR], "process": ledger.holder}
    return {"last_error": dumps(said), "traceback": traceback if ledger.keeps_tracebacks else None}


def group_of(failure: Failure, status: str) -> str:
    """Digest of a failure's group: by code, because messages vary; for generic codes, by the template of the message."""
    text = f"{failure.code}\0{template_of(failure.message)}" if failure.code in BY_MESSAGE else failure.code
    return hashlib.blake2b(f"{status}\0{text}".encode(), digest_size=16).hexdigest()


def _write_failures(connection: Connection, ledger: Ledger, changes: Sequence[Write]) -> None:
    ended: list[_Failed] = []
    reopened: list[tuple[EventRecord, Sequence[int | None] | None]] = []
    for change in changes:
        record, transition = change.record, change.transition
        if record is None or transition is None or record.task_id is None:
            continue
        if transition.after.items > 1:
            ended += _failed_items(connection, record, transition, change)
            if transition.reason is Reason.RETRIED:
                reopened.append((record, _reopened_rows(connection, record, transition)))
        elif transition.after.status in PROBLEM:
            ended.append(_Failed(record, transition, change.failure or _unexplained(transition), record.first_row))
        elif transition.reason is Reason.RETRIED:
            reopened.append((record, None))
    if ended:
        _count_failures(connection, ledger, ended)
    if reopened:
        _forget_failures(connection, ledger, reopened)


class _Failed(NamedTuple):
    """An item that a transition ends as ``failed`` or ``error``. ``status``: the item's own, None for its job's."""

    record: EventRecord
    transition: Transition
    failure: Failure
    row: int | None
    status: Status | None = None


def _unexplained(transition: Transition) -> Failure:
    return Failure(str(transition.reason), str(transition.reason))


def _failed_items(connection: Connection, record: EventRecord, transition: Transition, change: Write) -> list[_Failed]:
    """The items of a slice that this transition ends as ``failed`` or ``error``."""
    assert transition.before is not None
    found: list[_Failed] = []
    before, after = marks_of(transition.before), marks_of(transition.after)
    rows: Sequence[int | None] = ()
    for status in (Status.FAILED, Status.ERROR):
        letter = MARKS[status]
        if letter not in after:
            continue
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            if new != letter or old == letter:
                continue
            if (why := change.failures.get(index)) is not None:
                found.append(_Failed(record, transition, Failure(why.code, why.message), why.row, status))
                continue
            rows = rows or rows_of(connection, record)
            found.append(_Failed(record, transition, change.failure or _unexplained(transition), rows[index], status))
    return found


def _reopened_rows(connection: Connection, record: EventRecord, transition: Transition) -> list[int | None]:
    assert transition.before is not None
    rows = rows_of(connection, record)
    pairs = zip(rows, marks_of(transition.before), marks_of(transition.after), strict=True)
    return [row for row, old, new in pairs if old != new]


def _count_failures(connection: Connection, ledger: Ledger, ended: Sequence[_Failed]) -> None:
    known = _known_groups(connection, {each.record.task_id for each in ended if each.record.task_id is not None})
    rows: list[dict[str, Any]] = []
    groups: dict[tuple[int, int, str], dict[str, Any]] = {}
    for record, transition, failure, item_row, own in ended:
        assert record.task_id is not None
        status = str(own or transition.after.status)
        digest = group_of(failure, status)
        groups_of_task = known.setdefault(record.task_id, set())
        if digest not in groups_of_task and len(groups_of_task) >= MAX_GROUPS:
            digest, shown = f"other-{status}", "other"
        else:
            shown = failure.message
        groups_of_task.add(digest)
        rows.append(
            {
                "task_id": record.task_id,
                "event_id": record.id,
                "row": item_row,
                "status": status,
                "code": failure.code[:64],
                "message": failure.message,
                "digest": digest,
                "attempt": transition.after.attempt
                if own is None or transition.before is None
                else transition.before.attempt,
            }
        )
        key = (record.task_id, ledger.error_slot(record.slots), digest)
        group = groups.setdefault(
            key,
            {
                "task_id": key[0],
                "slot": key[1],
                "digest": digest,
                "status": status,
                "message": shown,
                "count": 0,
                "sample_job_id": record.job_id,
                "sample_row": item_row,
            },
        )
        group["count"] += 1
    connection.execute(item_errors.insert(), rows)
    _move_groups(connection, [groups[key] for key in sorted(groups)])


def _move_groups(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    statement = batches.insert_or_add(connection.dialect.name, task_errors, ("task_id", "slot", "digest"), ("count",))
    connection.execute(statement, rows)


def _known_groups(connection: Connection, task_ids: set[int]) -> dict[int, set[str]]:
    known: dict[int, set[str]] = {}
    select = sa.select(task_errors.c.task_id, task_errors.c.digest).where(task_errors.c.task_id.in_(task_ids)).distinct()
    for task_id, digest in connection.execute(select):
        known.setdefault(task_id, set()).add(digest)
    return known


def _forget_failures(
    connection: Connection, ledger: Ledger, reopened: Sequence[tuple[EventRecord, Sequence[int | None] | None]]
) -> None:
    """Removes the failures of reopened Events: those of the given rows of a slice; all of another job (rows None)."""
    c = item_errors.c
    if ids := [record.id for record, rows in reopened if rows is None]:
        _forget(connection, ledger, [record for record, _ in reopened], c.event_id.in_(ids))
    for record, rows in reopened:
        if rows:
            _forget(connection, ledger, [record], (c.event_id == record.id) & batches.among(connection, c.row, rows))


def _forget(connection: Connection, ledger: Ledger, reopened: Sequence[EventRecord], chosen: Any) -> None:
    slots = {record.task_id: ledger.error_slot(record.slots) for record in reopened}
    c = item_errors.c
    found = connection.execute(
        sa.select(c.task_id, c.digest, sa.func.min(c.status), sa.func.count()).where(chosen).group_by(c.task_id, c.digest)
    ).all()
    if not found:
        return
    connection.execute(item_errors.delete().where(chosen))
    _move_groups(
        connection,
        [
            {
                "task_id": task_id,
                "slot": slots[task_id],
                "digest": digest,
                "status": status,
                "message": "",
                "count": -count,
                "sample_job_id": None,
                "sample_row": None,
            }
            for task_id, digest, status, count in sorted(found)
        ],
    )


# -- fast path: ends of untouched Events
#
# Under load, most outcomes end Events that are untouched since they were lent, and set equal values. The UPDATE compares
# the row with the earlier read, so the row is not read again; equal values are sent once per batch.

# untouched() as SQL. While it holds, no other column changes on which a decision depends.
# A CASE, because PostgreSQL may estimate plain conditions as selective and start from a scan of all rows that match them.
_UNTOUCHED = (
    "CASE WHEN status = 'enqueue' AND added_messages IS NULL AND due_at IS NULL AND process IS NULL AND watched = 0"
    " THEN TRUE ELSE FALSE END"
)

_READ_GUARD: Final = ("id", "attempt")


@dataclass(slots=True)
class _EndBatch:
    """Ends that set equal values: the common transition, and for each Event a row of the columns that differ."""

    transition: Transition
    problem: str | None
    names: tuple[str, ...]
    rows: list[dict[str, Any]] = field(default_factory=list)


def write_unread(
    connection: Connection, ledger: Ledger, ends: Sequence[Write], moved: dict[tuple[int, int], Delta], now: int
) -> None:
    """Writes the ends of untouched Events, with one UPDATE for each set of equal values.

    Adds the changes of the counts to ``moved``. Raises :class:`StaleRead` if an Event has changed since it was read.
    """
    alike: dict[tuple[Any, ...], _EndBatch] = {}
    counted: dict[tuple[int | None, int, int], list[Any]] = {}
    for end in sorted(ends, key=attrgetter("event_id")):  # the lock order of every transaction
        record, transition = end.record, end.transition
        assert record is not None
        assert transition is not None
        problem = problem_of(transition, end.failure)
        key = (id(transition), problem, *end.values)
        group = alike.get(key)
        if group is None:
            group = alike[key] = _EndBatch(transition, problem, tuple(end.values))
        attempt = transition.after.attempt
        row: dict[str, Any] = {"b_id": record.id, "b_attempt": attempt}
        row["v_added_messages"] = _added(None, end.notes, attempt, now)
        for name, value in end.values.items():
            row[f"v_{name}"] = value
        group.rows.append(row)
        count = counted.get(count_key := (record.task_id, record.slots, id(transition)))
        if count is None:
            count = counted[count_key] = [transition, 0]
        count[1] += 1
    for group in alike.values():
        _write_end_batch(connection, group, now)
    for (task_id, slots, _), (transition, times) in counted.items():
        if task_id is not None:
            moved.setdefault((task_id, ledger.slot(slots)), Delta()).add(transition.delta, times)


def _write_end_batch(connection: Connection, group: _EndBatch, now: int) -> None:
    before, after = group.transition.before, group.transition.after
    if before is None or after.status not in TERMINAL or before[1:7] != after[1:7] or before[12:] != after[12:]:
        raise StaleRead(f"from {before} to {after}: only what ends an untouched Event may be written unread")
    same = {
        "status": str(after.status), "problem": group.problem, "n_finish": after.n_finish, "n_failed": after.n_failed,
        "n_error": after.n_error, "n_cancelled": after.n_cancelled, "finished_at": now,
    }  # fmt: skip
    written = ("added_messages", *group.names)
    found = batches.update(connection, events, _READ_GUARD, written, group.rows, same=same, where=_UNTOUCHED)
    if found != len(group.rows):
        raise StaleRead("something else was written of an Event meanwhile; it is read and decided again")


# -- the counts of a Task, sharded over slots so that processes do not contend for one hot row
#
# Counts change only in the transaction that changes the rows, by the deltas of asynctask.core.transitions. Lock order:
# Events first, then slots by (task_id, slot).

COUNTS: Final = tuple(Delta.__slots__)
_TOTAL = sa.select(*[sa.func.coalesce(sa.func.sum(task_tallies.c[f]), 0) for f in COUNTS]).where(
    task_tallies.c.task_id == sa.bindparam("task_id")
)


def move_counts(connection: Connection, deltas: Mapping[tuple[int, int], Delta], now: int) -> None:
    """Adds deltas to counts, by (task id, slot). Each addition raises the Task's version."""
    rows = [
        {"task_id": task_id, "slot": slot, "version": 1, "updated_at": now, **{f: getattr(delta, f) for f in COUNTS}}
        for (task_id, slot), delta in sorted(deltas.items())
        if delta
    ]
    if rows:
        connection.execute(_move_counts(connection.dialect.name), rows)


@cache
def _move_counts(dialect: str) -> Any:
    """Cached: every flush runs it."""
    return batches.insert_or_add(dialect, task_tallies, ("task_id", "slot"), ("version", *COUNTS), ("updated_at",))


def total_counts(connection: Connection, task_id: int) -> Delta:
    """The counts of one Task, summed over its slots."""
    row = connection.execute(_TOTAL, {"task_id": task_id}).one()
    return Delta(*(int(value) for value in row))
