"""Untracked jobs of a program without Redis: rows of ``events`` without an item, which go when their jobs have ended.

Such a row belongs to no Task, and its ``items`` is 0 (:func:`asynctask.core.transitions.is_kept`). It is claimed,
recovered, retried and recorded as a single tracked job is. It is no Event for users: nobody finds it by its id. What is
left in ``error`` is the entry of the dead list, until somebody retries or deletes it, or a purge does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.core.states import Status
from asynctask.core.transitions import hurry
from asynctask.database.batches import among, fetch_wide
from asynctask.database.engine import Database
from asynctask.database.retrying import repeatable
from asynctask.database.tables import events
from asynctask.ledger.base import Ledger, chunks, dumps
from asynctask.ledger.events import Change, apply
from asynctask.ledger.lending import announce, options_priority

MEMBERS: Final = "members"
"""The option with the further members of an untracked job's payload."""

LISTED: Final = 100_000
"""Jobs of a queue that are put in their order for a page, the oldest ones."""

_AHEAD: Final = 1_000
"""The oldest jobs of a queue, among which the next one is looked for, as a borrow does."""

_BATCH: Final = 500

_e = events.c
_QUEUE: Final[Any] = sa.func.coalesce(_e.queue, "default")
_IS_UNTRACKED: Final = _e.task_id.is_(None) & (_e["items"] == 0)
_WAITS: Final = _IS_UNTRACKED & (_e.status == str(Status.ENQUEUE)) & (_e.due_at <= sa.bindparam("now"))
_HEAD: Final = sa.func.substr(_e.options, 1, 64)  # the priority comes first


def options_of(members: Mapping[str, Any], priority: int) -> str:
    """The options of the row of an untracked job, JSON text. ``members``: those of its payload that no column has. The
    priority comes first, see :func:`asynctask.ledger.lending.options_priority`."""
    return dumps({"priority": priority, MEMBERS: members})


# -- what waits in the queues


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue in which untracked jobs wait: how many of each worker, since when the oldest (microseconds), and the worker
    of the next."""

    name: str
    workers: Mapping[str, int]
    oldest_at: int
    next_worker: str | None


def queues(connection: Connection, now: int) -> list[Queue]:
    """The queues in which untracked jobs wait, by name."""
    worker = sa.func.coalesce(_e.worker_name, "")
    counted = sa.select(_QUEUE, worker, sa.func.count(), sa.func.min(_e.due_at)).where(_WAITS).group_by(_QUEUE, worker)
    found: dict[str, list[tuple[str, int, int]]] = {}
    for queue, name, count, at in connection.execute(counted, {"now": now}):
        found.setdefault(str(queue), []).append((str(name), int(count), int(at)))
    return [
        Queue(
            queue,
            {name: count for name, count, _ in found[queue]},
            min(at for *_, at in found[queue]),
            _next_worker(connection, queue, now),
        )
        for queue in sorted(found)
    ]


def _next_worker(connection: Connection, queue: str, now: int) -> str | None:
    first = sa.select(_e.due_at, _e.id, _HEAD, _e.worker_name).where(_WAITS, queue == _QUEUE)
    found = connection.execute(first.order_by(_e.due_at, _e.id).limit(_AHEAD), {"now": now}).all()
    return min(((options_priority(said), at, i, name) for at, i, said, name in found), default=(None,))[-1]


def length(connection: Connection, queue: str, now: int) -> int:
    """How many untracked jobs wait in a queue."""
    counted = sa.select(sa.func.count()).select_from(events).where(_WAITS, queue == _QUEUE)
    return int(connection.execute(counted, {"now": now}).scalar_one())


def in_order(
    connection: Connection, queue: str, now: int, *, offset: int, limit: int, newest: bool = False
) -> list[tuple[int, int]]:
    """(id, priority) of a page of the untracked jobs that wait in a queue, the next to run first; ``newest``: the last one
    first. Of more than :data:`LISTED` jobs, only the oldest are in order."""
    waiting = sa.select(_e.due_at, _e.id, _HEAD).where(_WAITS, queue == _QUEUE).order_by(_e.due_at, _e.id).limit(LISTED)
    found = connection.execute(waiting, {"now": now}).all()
    ordered = sorted(((options_priority(said), at, i) for at, i, said in found), reverse=newest)
    return [(int(i), priority) for priority, _, i in ordered[offset : offset + limit]]


_SHOWN: Final = sa.select(_e.id, _e.job_id, _e.worker_name, _e.params, _e.due_at)


def rows(database: Database, event_ids: Sequence[int]) -> Iterator[dict[str, Any]]:
    """What is shown of these jobs, in this order, read as it is consumed."""
    return fetch_wide(database, _SHOWN, _e.id, (_e.params,), event_ids)


def waiting(connection: Connection, queue: str, now: int, job_ids: Collection[str]) -> dict[str, int]:
    """job id -> id of the row, of those of these jobs that wait in a queue."""
    named = sa.select(_e.job_id, _e.id).where(_WAITS, queue == _QUEUE, among(connection, _e.job_id, list(job_ids)))
    return {str(job_id): int(i) for job_id, i in connection.execute(named, {"now": now})}


def page_of_ids(connection: Connection, queue: str, now: int, *, after: int, limit: int) -> list[int]:
    """Ids of the jobs that wait in a queue, after ``after``: to visit all of them once."""
    found = sa.select(_e.id).where(_WAITS, queue == _QUEUE, _e.id > after).order_by(_e.id).limit(limit)
    return [int(i) for (i,) in connection.execute(found, {"now": now})]


# -- what users do


def reschedule(ledger: Ledger, event_id: int, at: int) -> bool:
    """Moves a job that waits for a time to another one (microseconds). False if it waits no more, or is tracked."""
    applied = _reschedule(ledger, event_id, at)
    announce(ledger, applied)
    return any(each.turn is not None for each in applied)


@repeatable
def _reschedule(ledger: Ledger, event_id: int, at: int) -> list[Change]:
    change = Change(
        event_id,
        lambda seen: (
            hurry(seen.row, now=at)
            if not seen.row.items and seen.row.status is Status.ENQUEUE and seen.row.due_at is not None
            else None
        ),
    )
    with ledger.database.write() as connection:
        return apply(connection, ledger, [change])


def delete_dead(ledger: Ledger, event_ids: Collection[int]) -> int:
    """Deletes dead untracked jobs; returns how many. Leaves those that were retried meanwhile, and tracked ones."""
    return sum(_delete_dead(ledger, part) for part in chunks(sorted(event_ids), _BATCH))


@repeatable
def _delete_dead(ledger: Ledger, event_ids: Sequence[int]) -> int:
    with ledger.database.write() as connection:
        dead = _IS_UNTRACKED & (_e.status == str(Status.ERROR))
        return connection.execute(events.delete().where(among(connection, _e.id, event_ids), dead)).rowcount


def dead(connection: Connection, *, after: int, limit: int) -> list[int]:
    """Ids of the dead untracked jobs, after ``after``: to visit all of them once."""
    is_dead = _IS_UNTRACKED & _e.problem.is_not(None) & (_e.status == str(Status.ERROR))
    found = sa.select(_e.id).where(is_dead, _e.id > after).order_by(_e.id).limit(limit)
    return [int(i) for (i,) in connection.execute(found)]
