"""Copies lost by a foreign queue: jobs that it was handed, and does not hold, return to the ledger.

Maintenance queries the queue for what its loans and claims are. A job counts as lost after two checks without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.core.states import Status
from asynctask.core.transitions import Turn, redispatch, watch
from asynctask.database import batches
from asynctask.database.retrying import repeatable
from asynctask.database.tables import events, loans, tasks
from asynctask.ledger import lending
from asynctask.ledger.base import Ledger, chunks
from asynctask.ledger.events import Change, EventRecord, Note, apply, read_events

_e, _t, _l = events.c, tasks.c, loans.c


def held_in_queues(connection: Connection, holder: str, limit: int = 10_000) -> list[EventRecord]:
    """Jobs that a foreign queue (:func:`asynctask.ledger.lending.queue_holder`) was handed and that are not known to have
    begun, by id; of Tasks, and without one."""
    return _held(connection, holder, None, limit)


def _held(connection: Connection, holder: str, queues: Collection[str] | None, limit: int) -> list[EventRecord]:
    waits = (_e.status == str(Status.ENQUEUE)) & _e.due_at.is_(None)
    of_loans = sa.select(_e.id).join(loans, (_e.task_id == _l.task_id) & (_e.seq >= _l.low) & (_e.seq < _l.high))
    of_loans = of_loans.where(_l.process == holder, waits, _e.process.is_(None))
    claimed = sa.select(_e.id).where(_e.process == holder, waits)
    if queues is not None:
        its = sa.select(_t.id).where(_t.queue.in_(sorted(queues)), _t.finished_at.is_(None))
        of_loans, claimed = of_loans.where(_l.task_id.in_(its)), claimed.where(_e.task_id.in_(its))
    found = {int(i) for each in (of_loans, claimed) for i in connection.execute(each.limit(limit)).scalars()}
    return [
        record
        for part in chunks(sorted(found)[:limit], 1_000)
        for record in read_events(connection, batches.among(connection, _e.id, part))
    ]


def watch_in_flight(ledger: Ledger, queues: Collection[str]) -> None:
    """Marks the jobs of Tasks that these queues of an engine were handed, of which a process died: it may have held any of
    them.

    An engine does not report which, and delivers them again by itself. Without the mark, a job that ends its process before
    its start is recorded would be delivered for ever; the start of a marked job is recorded first.
    """
    holders = {lending.queue_holder(_engine_of(queue)) for queue in queues}
    with ledger.database.read() as connection:
        found = [record for holder in sorted(holders) for record in _held(connection, holder, queues, 10_000)]
    for part in chunks([record.id for record in found if not record.row.watched], 1_000):
        _watch(ledger, part)


def _engine_of(queue: str) -> str | None:
    """The engine in the name of a queue (``celery/emails``); None for one of the own broker."""
    engine, slash, _ = queue.partition("/")
    return engine if slash else None


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
