"""Computes and writes the hints of Tasks (:mod:`asynctask.core.readiness`): :func:`settle` for one, :func:`all_lent` for
many.

A new Task gets its hints in its insert; a Task that has ended has none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.core import readiness
from asynctask.core.readiness import Gate, Hints
from asynctask.core.states import State, Status
from asynctask.core.transitions import BLOCKED, interval_of, next_round
from asynctask.database import batches
from asynctask.database.notify import notify
from asynctask.database.tables import events, loans, tasks
from asynctask.ledger.base import Ledger, chunks, each_free, loads
from asynctask.ledger.events import IN_LOAN, has_begun, last_start, read_events

_t, _e, _l = tasks.c, events.c, loans.c
_FACTS: Final = sa.select(
    sa.exists().where(_l.task_id == sa.bindparam("of"), _l.process.is_(None)),
    sa.select(_e.due_at)
    .where(_e.task_id == sa.bindparam("of"), _e.due_at.is_not(None))
    .order_by(_e.due_at)
    .limit(1)
    .scalar_subquery(),
)


def in_session(task: Mapping[str, Any]) -> bool:
    """Whether the session of a Task (its columns) allows it to start jobs."""
    return task["session_key"] is None or task["session_holder"] is not None


def settle(connection: Connection, ledger: Ledger, task: dict[str, Any], *, not_before: int = 0, **values: Any) -> Hints:
    """Computes the hints of a Task whose row the caller has locked, writes them together with ``values``, and sets them in
    ``task``, its current columns. ``not_before``: when a gate opens (microseconds), if that is to come."""
    is_free, due = False, None
    if task["state"] in (State.SPLITTING, State.RUNNING, State.PAUSED):
        is_free, due = connection.execute(_FACTS, {"of": task["id"]}).one()
    now, opens = ledger.now(), task["start_at"]
    if readiness.may_start(task["state"], in_session(task)):
        opens = opens_at(connection, task, now)
    if not_before > now:
        opens = max(opens or 0, not_before)
    gate = Gate(
        task["state"],
        task["priority"],
        in_session(task),
        bool(is_free) or task["next_seq"] < task["created_jobs"],
        None if due is None or due == BLOCKED else int(due),
        opens,
    )
    hints = readiness.hints(gate, now)
    write(connection, task, hints, now, **values)
    return hints


def write(connection: Connection, task: dict[str, Any], hints: Hints, now: int, **values: Any) -> None:
    """Writes these hints of a locked Task, if they differ from those in ``task``, together with ``values``; notifies the
    processes if the Task may start jobs that it could not start before."""
    if values or (task["ready"], task["due_next"]) != hints:
        kept = {"ready": hints.ready, "due_next": hints.due_next}
        connection.execute(tasks.update().where(_t.id == task["id"]).values(**kept, **values))
        if _is_news(task, hints, now):
            notify(connection)
        task |= kept


def _is_news(task: Mapping[str, Any], hints: Hints, now: int) -> bool:
    """Whether the Task may start jobs that it could not start before."""
    if hints.ready is not None and (task["ready"] is None or hints.ready < task["ready"]):
        return True
    was = task["due_next"]
    return hints.due_next is not None and hints.due_next <= now and (was is None or was > now)


def all_lent(connection: Connection, task_ids: Collection[int], now: int) -> None:
    """Moves the pointer of locked Tasks without a limit, a session or a due row behind their last job, and clears their
    hints: they have no more jobs to start."""
    _ALL_LENT.execute(connection, task_ids, now=now)


_ALL_LENT: Final = batches.ByValues(
    _t.id,
    lambda its: (
        tasks.update()
        .where(its)
        .values(next_seq=_t.created_jobs, started_at=sa.func.coalesce(_t.started_at, sa.bindparam("now")), ready=None)
    ),
)


def settle_free(ledger: Ledger, task_ids: Collection[int]) -> None:
    """Settles the hints of these Tasks; postpones those of locked rows to :func:`asynctask.ledger.lending.catch_up`."""

    def act(connection: Connection, free: list[int]) -> None:
        chosen = sa.select(tasks).where(batches.among(connection, _t.id, free)).order_by(_t.id)
        for row in connection.execute(chosen).all():
            settle(connection, ledger, dict(row._mapping))

    for part in chunks(sorted(task_ids), 500):
        ledger.held.keep_hints(each_free(ledger, part, act))


# -- rounds of a Task with an interval

_IS_LENT: Final = sa.exists().where(*IN_LOAN, _l.process.is_not(None))
_ROUND: Final = sa.select(
    sa.func.max(_e.started_at),
    sa.func.count(
        sa.case(
            (
                sa.and_(_e.status == str(Status.ENQUEUE), _e.due_at.is_(None), sa.or_(_e.process.is_not(None), _IS_LENT)),
                1,
            ),
            (sa.and_(_e.status == str(Status.WORKING), _e.started_at.is_(None)), 1),  # a watched one, about to begin
        )
    ),
).where(_e.task_id == sa.bindparam("of"), _e.seq >= sa.bindparam("low"), _e.seq < sa.bindparam("high"))


def round_of(task: Mapping[str, Any]) -> dict[str, Any]:
    """The last round of a Task: the ranges and the ids of its jobs, and how many more may start in it, because several
    processes may share a round."""
    return loads(task["round_jobs"]) or {"ranges": [], "again": [], "left": 0}


def opens_at(connection: Connection, task: Mapping[str, Any], now: int) -> int | None:
    """When a locked Task may start something: the later of its start time and the opening of its next round (microseconds).
    None: it has neither."""
    interval, start = interval_of(task["interval_s"]), task["start_at"]
    if not interval or (start is not None and start > now):
        return None if start is None else int(start)
    return round_opens(connection, task, interval, now)


def round_opens(connection: Connection, task: Mapping[str, Any], interval: int, now: int) -> int:
    """When the next round of a locked Task may begin (microseconds); reads the jobs of the last round only once its
    interval is over."""
    began = task["round_at"]
    jobs = round_of(task)
    if jobs["left"]:
        return now
    first = next_round(began, None, 0, interval, now)
    if began is None or first > now:
        return first
    starts, unbegun = list[int](), 0
    for low, high in jobs["ranges"]:
        started, waits = connection.execute(_ROUND, {"of": task["id"], "low": low, "high": high}).one()
        starts += [] if started is None else [int(started)]
        unbegun += int(waits)
    if jobs["again"]:
        for record in read_events(connection, batches.among(connection, _e.id, jobs["again"])):
            unbegun += record.row.status is Status.ENQUEUE and record.row.due_at is None
            unbegun += record.row.status is Status.WORKING and not has_begun(record)
            if (start := last_start(record)) is not None:
                starts.append(start)
    return next_round(began, max(starts, default=None), unbegun, interval, now)
