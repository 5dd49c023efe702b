"""Reservations: which jobs of a Task go to the broker next. The pushing itself is the dispatcher's.

Reserve, commit, push, confirm: no lock is held while the broker is talked to. A reservation is held under a lease; when
the dispatcher dies between reserve and confirm, the next one pushes the same range again, which is harmless, for a
broker holds at most one copy of the same (job id, attempt).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.bookkeeping import Delta, Row, in_flight, may_dispatch, redispatch, release_due, room
from asynctask.clock import micros
from asynctask.ledger import tallies
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger, chunks, loads
from asynctask.ledger.models import events, task_tallies, tasks
from asynctask.ledger.transitions import Applied, Change, EventRecord, Note, apply, read_events
from asynctask.states import OPEN, State, Status

__all__ = [
    "Alone",
    "Ready",
    "Runnable",
    "advance_low",
    "alone_due",
    "confirm",
    "flying_rows",
    "flying_tasks",
    "look_later",
    "lost_copies",
    "reserve",
    "reserve_alone",
    "runnable",
    "take_again",
    "to_look_at",
    "unconfirmed",
]

_t, _e, _n = tasks.c, events.c, task_tallies.c


@dataclass(frozen=True, slots=True)
class Runnable:
    """A Task that may start jobs now: what the dispatcher needs to share out the room in a queue."""

    task_id: int
    queue: str
    priority: int
    parallel: int | None
    flying: int
    waiting: int  # rows behind no pointer yet
    due: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """A job reserved for the broker: ``params`` and ``options`` are JSON text as the ledger holds them."""

    event_id: int
    job_id: str
    task_id: int | None
    attempt: int
    retries: int
    worker_name: str
    queue: str
    priority: int | None
    params: str | None
    options: str | None
    created_at: int


@dataclass(frozen=True, slots=True)
class Alone:
    """A job without a Task that is due."""

    event_id: int
    queue: str
    priority: int


_FLYING = sa.func.coalesce(sa.func.sum(_n.dispatched - _n.returned), 0)


def runnable(connection: Connection, now: int) -> list[Runnable]:
    """Tasks with something to dispatch, in the order in which they may go: priority, then the order submitted."""
    due = sa.exists().where(_e.task_id == _t.id, _e.due_at <= now)
    flying = sa.select(_FLYING).where(_n.task_id == _t.id).scalar_subquery()
    statement = (
        sa.select(_t.id, _t.queue, _t.priority, _t.parallel, flying, _t.created_jobs - _t.next_seq, due)
        .where(
            _t.finished_at.is_(None),
            _t.state.in_([State.SPLITTING, State.RUNNING]),
            _t.turning.is_(None) | (_t.turning != "cancel"),
            sa.or_(_t.created_jobs > _t.next_seq, due),
        )
        .order_by(_t.priority, _t.id)
    )
    return [
        Runnable(i, q, p, par, int(fly), int(wait), bool(d)) for i, q, p, par, fly, wait, d in connection.execute(statement)
    ]


def reserve(ledger: Ledger, task_id: int, wanted: int, *, lease_s: float) -> list[Ready]:
    """Reserves up to ``wanted`` jobs of a Task under its ``parallel``, jobs that are due again first.

    Nothing while another dispatcher's reservation is unconfirmed under its lease.
    """
    with ledger.database.write() as connection:
        task = task_rows.lock(connection, task_id)
        now = ledger.now()
        if not may_dispatch(task["state"]) or _held_by_another(ledger, task, now):
            return []
        counts = tallies.total(connection, task_id)
        count = room(task["state"], task["parallel"], counts.dispatched - counts.returned, wanted)
        if count <= 0:
            return []
        ids = _release(connection, ledger, task_id, count, now)
        low, high = task["next_seq"], min(task["created_jobs"], task["next_seq"] + count - len(ids))
        ready = _read_ready(connection, _e.id.in_(ids)) if ids else []
        if high > low:
            fresh, flying = _at_pointer(connection, task_id, low, high)
            tallies.move(connection, {(task_id, ledger.slot(task["slots"])): Delta(dispatched=flying)}, now)
            ready += fresh
        if ready or high > low:
            _advance(connection, ledger, task, low, high, now + micros(lease_s))
    return ready


def _held_by_another(ledger: Ledger, task: Mapping[str, Any], now: int) -> bool:
    return task["dispatch_by"] not in (None, ledger.identity) and (task["dispatch_until"] or 0) > now


def _release(connection: Connection, ledger: Ledger, task_id: int, count: int, now: int) -> list[int]:
    found = connection.execute(
        sa.select(_e.id).where(_e.task_id == task_id, _e.due_at <= now).order_by(_e.due_at, _e.id).limit(count)
    )
    changes = [Change(int(event_id), _release_if_due(now)) for (event_id,) in found]
    return [each.change.event_id for each in apply(connection, ledger, changes) if each.turn is not None]


def _release_if_due(now: int) -> Any:
    def decide(record: EventRecord) -> Any:
        row = record.row
        return release_due(row) if row.status is Status.ENQUEUE and row.due_at is not None and row.due_at <= now else None

    return decide


def _at_pointer(connection: Connection, task_id: int, low: int, high: int) -> tuple[list[Ready], int]:
    """The jobs of a range that must be pushed, and how many rows of it are in flight once the pointer is past them.

    The latter may be more: a row that was recorded as ``working`` before needs no copy, but it runs.
    """
    condition = (_e.task_id == task_id) & (_e.seq >= low) & (_e.seq < high) & _e.due_at.is_(None)
    found = _select_ready(connection, condition, lock=True)
    flying = [each for each in found if in_flight(Row(Status(each.status), reserved=True))]
    return [Ready(*each[:-1]) for each in flying if each.status == Status.ENQUEUE], len(flying)


def _advance(connection: Connection, ledger: Ledger, task: Mapping[str, Any], low: int, high: int, until: int) -> None:
    reserved_from = task["reserved_from"]
    values: dict[str, Any] = {
        "next_seq": high,
        "reserved_from": low if reserved_from is None else min(low, reserved_from),
        "dispatch_by": ledger.identity,
        "dispatch_until": until,
    }
    if task["started_at"] is None:
        values["started_at"] = ledger.now()
    connection.execute(tasks.update().where(_t.id == task["id"]).values(values))


def _read_ready(connection: Connection, condition: Any) -> list[Ready]:
    return [Ready(*each[:-1]) for each in _select_ready(connection, condition)]


def _select_ready(connection: Connection, condition: Any, *, lock: bool = False) -> Sequence[Any]:
    """The columns of :class:`Ready`, and the status."""
    statement = (
        sa.select(
            _e.id, _e.job_id, _e.task_id, _e.attempt, _e.retries, sa.func.coalesce(_e.worker_name, _t.worker_name),
            sa.func.coalesce(_e.queue, _t.queue, "default"), _t.priority, _e.params,
            sa.func.coalesce(_e.options, _t.options), _e.created_at, _e.status,
        )
        .select_from(events.outerjoin(tasks, _t.id == _e.task_id))
        .where(condition)
        .order_by(_e.seq, _e.id)
    )  # fmt: skip
    if lock and connection.dialect.name != "sqlite":
        statement = statement.with_for_update(of=events)
    return connection.execute(statement).all()


def confirm(ledger: Ledger, task_ids: Sequence[int]) -> None:
    """What this process reserved of these Tasks is in the broker."""
    if not task_ids:
        return
    with ledger.database.write() as connection:
        connection.execute(
            tasks.update()
            .where(_t.id.in_(sorted(task_ids)), _t.dispatch_by == ledger.identity)
            .values(reserved_from=None, dispatch_by=None, dispatch_until=None)
        )


def unconfirmed(connection: Connection, now: int) -> list[int]:
    """Tasks whose dispatcher's lease ended between reserve and confirm."""
    return [
        int(i)
        for (i,) in connection.execute(
            sa.select(_t.id).where(_t.finished_at.is_(None), _t.dispatch_by.is_not(None), _t.dispatch_until <= now)
        )
    ]


def take_again(ledger: Ledger, task_id: int, *, lease_s: float, limit: int = 10_000) -> list[Ready]:
    """Takes over an unconfirmed reservation whose lease ended: the jobs of its range that must be pushed again."""
    with ledger.database.write() as connection:
        task = task_rows.lock(connection, task_id)
        now = ledger.now()
        if task["dispatch_by"] is None or _held_by_another(ledger, task, now):
            return []
        connection.execute(
            tasks.update().where(_t.id == task_id).values(dispatch_by=ledger.identity, dispatch_until=now + micros(lease_s))
        )
        if task["reserved_from"] is None:
            return []
        high = min(task["next_seq"], task["reserved_from"] + limit)
        return _at_pointer(connection, task_id, task["reserved_from"], high)[0]


def alone_due(connection: Connection, now: int, queues: Collection[str], limit: int = 1_000) -> list[Alone]:
    """Jobs without a Task that are due in these queues, in the order in which they came due.

    Where there are more than ``limit``, the first so many and the last so many: an urgent job that came just now is seen
    behind any number of others, and no look reads them all.
    """
    if not queues:
        return []
    queue = sa.func.coalesce(_e.queue, "default")
    due = sa.select(_e.id, queue, _e.options).where(_e.due_at <= now, _e.task_id.is_(None), queue.in_(sorted(queues)))
    found = connection.execute(due.order_by(_e.due_at, _e.id).limit(limit)).all()
    if len(found) == limit:
        last = connection.execute(due.order_by(_e.due_at.desc(), _e.id.desc()).limit(limit)).all()
        found = list(dict.fromkeys([*found, *reversed(last)]))
    return [Alone(int(i), name, _priority(options)) for i, name, options in found]


def _priority(options: str | None) -> int:
    """What orders a job among others; a value that cannot be is found and told when its copy is made."""
    try:
        return int((loads(options) or {}).get("priority") or 0)
    except (AttributeError, TypeError, ValueError, OverflowError):
        return 0


def reserve_alone(ledger: Ledger, event_ids: Sequence[int], *, look_again_s: float) -> list[Ready]:
    """Reserves these jobs without a Task, as far as they are still due.

    An Event without a Task has no pointer to be behind: ``look_at`` is what finds it again if its copy is lost before it
    begins. Every turn it takes clears it.
    """
    with ledger.database.write() as connection:
        now = ledger.now()
        look_at = {"look_at": now + micros(look_again_s)}
        changes = [Change(event_id, _release_if_due(now), values=dict(look_at)) for event_id in event_ids]
        ids = [each.change.event_id for each in apply(connection, ledger, changes) if each.turn is not None]
        return _read_ready(connection, _e.id.in_(ids)) if ids else []


def to_look_at(connection: Connection, now: int, limit: int = 1_000) -> list[EventRecord]:
    """Events without a Task whose copy has been out for so long that somebody should look whether the broker holds it."""
    return _read_some(connection, sa.select(_e.id).where(_e.look_at <= now).order_by(_e.look_at, _e.id).limit(limit))


def _read_some(connection: Connection, ids: Any) -> list[EventRecord]:
    """Events by a bounded look-up of their ids: what is left for another look is not read now."""
    found = connection.execute(ids).scalars().all()
    return [record for part in chunks(found, 1_000) for record in read_events(connection, _e.id.in_(part))]


def look_later(ledger: Ledger, event_ids: Sequence[int], *, look_again_s: float) -> None:
    """The broker holds them: look again later."""
    if not event_ids:
        return
    with ledger.database.write() as connection:
        connection.execute(
            events.update()
            .where(_e.id.in_(list(event_ids)), _e.look_at.is_not(None))
            .values(look_at=ledger.now() + micros(look_again_s))
        )


def flying_tasks(connection: Connection) -> list[int]:
    """Tasks that have anything in flight."""
    statement = (
        sa.select(_t.id)
        .join(task_tallies, _n.task_id == _t.id)
        .where(_t.finished_at.is_(None))
        .group_by(_t.id)
        .having(_FLYING > 0)
    )
    return [int(i) for (i,) in connection.execute(statement)]


def advance_low(ledger: Ledger, task_ids: Sequence[int]) -> None:
    """Moves each Task's low mark up to its first open row, so that later looks pass over what is over."""
    for task_id in task_ids:
        with ledger.database.write() as connection:
            task = task_rows.lock(connection, task_id)
            behind = (_e.task_id == task_id) & (_e.seq >= task["low_seq"]) & (_e.seq < task["next_seq"])
            still_open = sa.select(_e.seq).where(behind, _e.status.in_([str(s) for s in OPEN])).order_by(_e.seq).limit(1)
            first = connection.execute(still_open).scalar()
            low = task["next_seq"] if first is None else first
            if low > task["low_seq"]:
                connection.execute(tasks.update().where(_t.id == task_id).values(low_seq=low))


def flying_rows(connection: Connection, task_id: int, limit: int = 10_000) -> list[EventRecord]:
    """Rows of a Task that should be in the broker or in a process, not known to have begun."""
    task = task_rows.get(connection, task_id)
    condition = (
        (_e.task_id == task_id)
        & (_e.seq >= task["low_seq"])
        & (_e.seq < task["next_seq"])
        & (_e.status == Status.ENQUEUE)
        & _e.due_at.is_(None)
    )
    records = _read_some(connection, sa.select(_e.id).where(condition).order_by(_e.seq).limit(limit))
    return [record for record in records if in_flight(record.row)]


def lost_copies(ledger: Ledger, lost: Sequence[tuple[int, int]]) -> list[Applied]:
    """(event id, attempt) of rows that the broker did not hold on two looks: each waits in the ledger again."""
    with ledger.database.write() as connection:
        now = ledger.now()
        changes = [
            Change(event_id, _redispatch_if(attempt, now), notes=[Note("enqueue", ledger.catalogue("redispatched"))])
            for event_id, attempt in lost
        ]
        return apply(connection, ledger, changes)


def _redispatch_if(attempt: int, now: int) -> Any:
    def decide(record: EventRecord) -> Any:
        if record.row.attempt != attempt:
            return None
        return redispatch(record.row, record.task_state or "", held=False, missed_before=True, now=now)

    return decide
