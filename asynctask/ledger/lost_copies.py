"""Copies lost by a foreign queue: jobs that it was handed, and does not hold, return to the ledger.

Maintenance queries the queue. The rows of Tasks are those of the queue's loans and claims, and count as lost after two
checks without a copy. An Event without a Task has ``look_at``, the time of its check.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.clock import micros
from asynctask.core.states import Status
from asynctask.core.transitions import Turn, redispatch, watch
from asynctask.database import batches
from asynctask.database.retrying import repeatable
from asynctask.database.tables import events, loans, tasks
from asynctask.ledger import lending
from asynctask.ledger.base import Ledger, chunks
from asynctask.ledger.events import Change, EventRecord, Note, apply, read_events

_e, _t, _l = events.c, tasks.c, loans.c


def events_to_check(connection: Connection, now: int, limit: int = 1_000) -> list[EventRecord]:
    """Events without a Task whose copy has been out for so long that its queue should be checked for it."""
    found = sa.select(_e.id).where(_e.look_at <= now).order_by(_e.look_at, _e.id).limit(limit)
    return _read(connection, connection.execute(found).scalars().all())


def _read(connection: Connection, event_ids: Sequence[int]) -> list[EventRecord]:
    return read_events(connection, batches.among(connection, _e.id, event_ids)) if event_ids else []


@repeatable
def check_later(ledger: Ledger, event_ids: Sequence[int], *, after_s: float) -> None:
    """Postpones the next check of Events whose copies their queues hold, by ``after_s`` seconds."""
    if not event_ids:
        return
    with ledger.database.write() as connection:
        connection.execute(
            events.update()
            .where(_e.id.in_(list(event_ids)), _e.look_at.is_not(None))
            .values(look_at=ledger.now() + micros(after_s))
        )


def rows_held(
    connection: Connection, holder: str, queues: Collection[str] | None = None, limit: int = 10_000
) -> list[EventRecord]:
    """Jobs of Tasks that a foreign queue (:func:`asynctask.ledger.lending.queue_holder`) was handed and that are not known
    to have begun, by id; of Tasks in these ``queues``, if given."""
    waits = (_e.status == str(Status.ENQUEUE)) & _e.due_at.is_(None)
    of_loans = sa.select(_e.id).join(loans, (_e.task_id == _l.task_id) & (_e.seq >= _l.low) & (_e.seq < _l.high))
    of_loans = of_loans.where(_l.process == holder, waits, _e.process.is_(None))
    claimed = sa.select(_e.id).where(_e.process == holder, waits, _e.task_id.is_not(None))
    if queues is not None:
        its = sa.select(_t.id).where(_t.queue.in_(sorted(queues)), _t.finished_at.is_(None))
        of_loans, claimed = of_loans.where(_l.task_id.in_(its)), claimed.where(_e.task_id.in_(its))
    found = {int(i) for each in (of_loans, claimed) for i in connection.execute(each.limit(limit)).scalars()}
    return [record for part in chunks(sorted(found)[:limit], 1_000) for record in _read(connection, part)]


def watch_held(ledger: Ledger, holder: str, queues: Collection[str]) -> None:
    """Marks the jobs that these queues of an engine were handed, of which a process died: it may have held any of them.

    An engine does not report which, and delivers them again by itself. Without the mark, a job that ends its process before
    its start is recorded would be delivered for ever; the start of a marked job is recorded first.
    """
    with ledger.database.read() as connection:
        ids = [record.id for record in rows_held(connection, holder, queues) if not record.row.watched]
    for part in chunks(ids, 1_000):
        _watch(ledger, part)


@repeatable
def _watch(ledger: Ledger, event_ids: Sequence[int]) -> None:
    with ledger.database.write() as connection:
        apply(connection, ledger, [Change(event_id, lambda record: watch(record.row)) for event_id in event_ids])


def redispatch_lost(ledger: Ledger, lost: Sequence[tuple[int, int]]) -> list[Change]:
    """Returns rows, (event id, attempt), to the ledger that the foreign queue did not hold in two checks."""
    applied = _redispatch_lost(ledger, lost)
    lending.announce(ledger, applied)
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
        return redispatch(record.row, record.task_state, now=now)

    return decide
