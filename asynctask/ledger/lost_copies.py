"""Copies lost by a broker: jobs in flight that it does not hold return to the ledger.

Maintenance queries the broker. A Task's rows are covered by its pointer, and count as lost after two checks without a copy.
An Event without a Task has ``look_at``, the time of its check.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.clock import micros
from asynctask.core.states import OPEN, Status
from asynctask.core.transitions import Turn, in_flight, redispatch, watch
from asynctask.database.retrying import repeatable
from asynctask.database.tables import events, task_tallies, tasks
from asynctask.ledger import dispatchable
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger, chunks, try_lock
from asynctask.ledger.events import Change, EventRecord, Note, apply, read_events

_e, _t, _n = events.c, tasks.c, task_tallies.c

_IN_FLIGHT = sa.func.coalesce(sa.func.sum(_n.dispatched - _n.returned), 0)


def events_to_check(connection: Connection, now: int, limit: int = 1_000) -> list[EventRecord]:
    """Events without a Task whose copy has been out for so long that the broker should be checked for it."""
    return _read_by_ids(connection, sa.select(_e.id).where(_e.look_at <= now).order_by(_e.look_at, _e.id).limit(limit))


def _read_by_ids(connection: Connection, ids: Any) -> list[EventRecord]:
    found = connection.execute(ids).scalars().all()
    return [record for part in chunks(found, 1_000) for record in read_events(connection, _e.id.in_(part))]


@repeatable
def check_later(ledger: Ledger, event_ids: Sequence[int], *, after_s: float) -> None:
    """Postpones the next check of Events whose copies the broker holds, by ``after_s`` seconds."""
    if not event_ids:
        return
    with ledger.database.write() as connection:
        connection.execute(
            events.update()
            .where(_e.id.in_(list(event_ids)), _e.look_at.is_not(None))
            .values(look_at=ledger.now() + micros(after_s))
        )


def tasks_in_flight(connection: Connection, queues: Collection[str] | None = None) -> list[int]:
    """Tasks with jobs in flight; of these queues, if given."""
    statement = (
        sa.select(_t.id)
        .join(task_tallies, _n.task_id == _t.id)
        .where(_t.finished_at.is_(None))
        .group_by(_t.id)
        .having(_IN_FLIGHT > 0)
    )
    if queues is not None:
        statement = statement.where(_t.queue.in_(queues))
    return [int(i) for (i,) in connection.execute(statement)]


@repeatable
def advance_low_mark(ledger: Ledger, task_ids: Sequence[int]) -> None:
    """Moves each Task's low mark up to its first open row, so that later checks skip the terminal rows before it."""
    for task_id in task_ids:
        with ledger.database.write() as connection:
            task = try_lock(connection, ledger, task_id)
            # A retry in progress may reopen terminal rows, which would be skipped for ever.
            if task is None or task["turning"] is not None:
                continue
            behind = (_e.task_id == task_id) & (_e.seq >= task["low_seq"]) & (_e.seq < task["next_seq"])
            still_open = sa.select(_e.seq).where(behind, _e.status.in_([str(s) for s in OPEN])).order_by(_e.seq).limit(1)
            first = connection.execute(still_open).scalar()
            low = task["next_seq"] if first is None else first
            if low > task["low_seq"]:
                connection.execute(tasks.update().where(_t.id == task_id).values(low_seq=low))


def rows_in_flight(connection: Connection, task_id: int, limit: int = 10_000) -> list[EventRecord]:
    """Rows of a Task that should be in the broker or in a process and are not known to have begun."""
    task = task_rows.get(connection, task_id)
    condition = (
        (_e.task_id == task_id)
        & (_e.seq >= task["low_seq"])
        & (_e.seq < task["next_seq"])
        & (_e.status == Status.ENQUEUE)
        & _e.due_at.is_(None)
    )
    records = _read_by_ids(connection, sa.select(_e.id).where(condition).order_by(_e.seq).limit(limit))
    return [record for record in records if in_flight(record.row)]


def watch_in_flight(ledger: Ledger, queues: Collection[str]) -> None:
    """Marks the jobs in flight in these queues of an engine of which a process died: it may have held any of them.

    An engine does not report which, and delivers them again by itself. Without the mark, a job that ends its process before
    its start is recorded would be delivered for ever; the start of a marked job is recorded first.
    """
    with ledger.database.read() as connection:
        found = [rows_in_flight(connection, task_id) for task_id in tasks_in_flight(connection, queues)]
    ids = [record.id for records in found for record in records if not record.row.watched]
    for part in chunks(ids, 1_000):
        _watch(ledger, part)


@repeatable
def _watch(ledger: Ledger, event_ids: Sequence[int]) -> None:
    with ledger.database.write() as connection:
        apply(connection, ledger, [Change(event_id, lambda record: watch(record.row)) for event_id in event_ids])


def redispatch_lost(ledger: Ledger, lost: Sequence[tuple[int, int]]) -> list[Change]:
    """Returns rows, (event id, attempt), to the ledger that the broker did not hold in two checks."""
    applied = _redispatch_lost(ledger, lost)
    dispatchable.announce(ledger, applied)
    return applied


@repeatable
def _redispatch_lost(ledger: Ledger, lost: Sequence[tuple[int, int]]) -> list[Change]:
    with ledger.database.write() as connection:
        now = ledger.now()
        changes = [
            Change(event_id, _redispatch_if(attempt, now), notes=[Note("enqueue", ledger.catalogue("redispatched"))])
            for event_id, attempt in lost
        ]
        return apply(connection, ledger, changes)


def _redispatch_if(attempt: int, now: int) -> Callable[[EventRecord], Turn | None]:
    def decide(record: EventRecord) -> Turn | None:
        if record.row.attempt != attempt:
            return None
        return redispatch(record.row, record.task_state or "", held=False, missed_before=True, now=now)

    return decide
