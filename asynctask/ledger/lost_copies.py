"""Copies that a broker lost: which rows should be there or in a process, and what becomes of those that are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.clock import micros
from asynctask.core.states import OPEN, Status
from asynctask.core.transitions import in_flight, redispatch
from asynctask.database.retrying import repeatable
from asynctask.database.tables import events, task_tallies, tasks
from asynctask.ledger import dispatchable
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger, chunks
from asynctask.ledger.events import Applied, Change, EventRecord, Note, apply, read_events
from asynctask.ledger.task_locks import try_lock

__all__ = ["advance_low", "flying_rows", "flying_tasks", "look_later", "lost_copies", "to_look_at"]

_t, _e, _n = tasks.c, events.c, task_tallies.c
_FLYING = sa.func.coalesce(sa.func.sum(_n.dispatched - _n.returned), 0)


def to_look_at(connection: Connection, now: int, limit: int = 1_000) -> list[EventRecord]:
    """Events without a Task whose copy has been out for so long that somebody should look whether the broker holds it."""
    return _read_some(connection, sa.select(_e.id).where(_e.look_at <= now).order_by(_e.look_at, _e.id).limit(limit))


def _read_some(connection: Connection, ids: Any) -> list[EventRecord]:
    """Events by a bounded look-up of their ids: what is left for another look is not read now."""
    found = connection.execute(ids).scalars().all()
    return [record for part in chunks(found, 1_000) for record in read_events(connection, _e.id.in_(part))]


@repeatable
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


@repeatable
def advance_low(ledger: Ledger, task_ids: Sequence[int]) -> None:
    """Moves each Task's low mark up to its first open row, so that later looks pass over what is over."""
    for task_id in task_ids:
        with ledger.database.write() as connection:
            task = try_lock(connection, ledger, task_id)
            # Rows that are terminal now may be opened by a turn, and would be passed over for ever.
            if task is None or task["turning"] is not None:
                continue
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
    applied = _lost_copies(ledger, lost)
    dispatchable.announce(ledger, applied)
    return applied


@repeatable
def _lost_copies(ledger: Ledger, lost: Sequence[tuple[int, int]]) -> list[Applied]:
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
