"""Closing: a Task ends exactly once per generation, found out after the flush and again by the sweep.

The test runs in a transaction of its own after the outcomes were committed. Inside that one, racing processes would each
see the other's job still open and nobody would close.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.core.states import OPEN, Reason, State
from asynctask.core.transitions import may_close
from asynctask.database.retrying import repeatable
from asynctask.database.tables import events, task_tallies, tasks
from asynctask.ledger import counters, sessions
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger
from asynctask.ledger.task_locks import try_lock

__all__ = ["candidates", "try_close"]

_t, _n = tasks.c, task_tallies.c


def candidates(
    connection: Connection, task_ids: Iterable[int] | None = None, *, at_most_jobs: int | None = None
) -> list[int]:
    """Sealed, unclosed Tasks that have no open item by their counts; of ``task_ids``, or of all.

    ``at_most_jobs`` leaves out larger ones: asking their rows takes long enough to be somebody else's work.
    """
    given: dict[str, Any] = {}
    if task_ids is not None:
        given["ids"] = list(task_ids)
    if at_most_jobs is not None:
        given["at_most"] = at_most_jobs
    return [int(row[0]) for row in connection.execute(_candidates(frozenset(given)), given)]


@cache
def _candidates(given: frozenset[str]) -> Any:
    """Made once: it is asked after a flush."""
    # A Task that was cancelled before its first slice has no counts at all.
    open_items = sa.func.coalesce(sa.func.sum(_n.enqueue + _n.working + _n.stopped), 0)
    statement = (
        sa.select(_t.id)
        .outerjoin(task_tallies, _n.task_id == _t.id)
        .where(_t.finished_at.is_(None), _t.closed_at.is_(None), _t.generation_sealed == 1, _t.turning.is_(None))
        .group_by(_t.id)
        .having(open_items == 0)
    )
    if "ids" in given:
        statement = statement.where(_t.id.in_(sa.bindparam("ids", expanding=True)))
    if "at_most" in given:
        statement = statement.where(_t.created_jobs <= sa.bindparam("at_most"))
    return statement


@repeatable
def try_close(ledger: Ledger, task_id: int) -> bool:
    """Closes the Task's generation if counts and rows both say that nothing is open. Returns whether this caller did.

    While somebody holds the Task's row it is left to the sweep.
    """
    with ledger.database.read() as connection:
        task = task_rows.get(connection, task_id)
        if task["closed_at"] is not None or not _ready(connection, task) or _open_rows(connection, task_id):
            return False
    # Between the look and the compare-and-set nothing can open a row but an explicit retry, which raises the generation.
    with ledger.database.write() as connection:
        again = try_lock(connection, ledger, task_id)
        if again is None or again["generation"] != task["generation"] or again["closed_at"] is not None:
            return False
        if not _ready(connection, again):
            return False
        now = ledger.now()
        if again["state"] == State.CANCELLED:
            connection.execute(
                tasks.update()
                .where(_t.id == task_id)
                .values(closed_at=now, finished_at=now, updated_at=now, version=_t.version + 1)
            )
            sessions.release(connection, ledger, again)
        else:
            # No callback is queued with it, so the step through finalizing ends in the same transaction.
            task_rows.turn(connection, ledger, again, State.FINALIZING, Reason.CLOSED, closed_at=now)
            task_rows.turn(connection, ledger, again, State.FINISHED, Reason.CALLED_BACK, finished_at=now)
        task_rows.log(connection, ledger, task_id, "closed", {"generation": again["generation"]})
    return True


def _ready(connection: Connection, task: dict[str, object]) -> bool:
    counts = counters.total(connection, int(str(task["id"])))
    return may_close(str(task["state"]), bool(task["generation_sealed"]), task["turning"] is not None, counts)


def _open_rows(connection: Connection, task_id: int) -> bool:
    statuses = [str(status) for status in OPEN]
    found = sa.select(sa.literal(1)).where(events.c.task_id == task_id, events.c.status.in_(statuses)).limit(1)
    return connection.execute(found).first() is not None
