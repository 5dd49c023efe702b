"""Hints which Tasks have something to dispatch, so that no query has to visit all of them.

``tasks.ready`` is the priority of a Task that may have something to dispatch, else NULL: its index lists the candidates of
a queue in their order. ``tasks.due_next`` is when to check a Task again. Superfluous hints do no harm: a reservation reads
the rows and corrects the hints under the Task's lock. :func:`repair` finds hints lost with their process.

Writers of Events do not lock Tasks. They write hints after their commit, in :func:`announce`: either a concurrent
reservation has read the committed rows, or the hint follows it. If another transaction holds the Task's row, the next round
of this process's dispatcher retries the hint (:func:`catch_up`), so that outcomes of other Tasks do not wait.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.clock import SECOND, micros
from asynctask.core.states import TERMINAL
from asynctask.core.transitions import BLOCKED, LEAD_S, MAX_INTERVAL_S, Turn, in_flight, interval_of, lead, next_round
from asynctask.database.tables import events, tasks
from asynctask.errors import LedgerUnavailable
from asynctask.ledger import sessions
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger, all_free, chunks, each_free
from asynctask.ledger.events import Write
from asynctask.logs import get_logger

RECHECK_S: Final = 0.8
"""The longest time between two checks of a Task that waits for its next round: a user may edit its row."""

_t, _e = tasks.c, events.c
_DISPATCHED = ("splitting", "running")
_ANNOUNCED = sa.select(
    _t.id,
    _t.parallel,
    _t.interval_s,
    _t.round_at,
    _t.due_next,
    _t.ready,
    _t.session_holder,
    _t.next_seq,
    _t.created_jobs,
    _t.generation_sealed,
    _t.tolerated_failures,
).where(_t.id.in_(sa.bindparam("ids", expanding=True)))
# Time between rounds, minus the lead.
_UNTIL_ROUND = sa.case(
    (_t.interval_s < 4 * LEAD_S, _t.interval_s * 0.75), (_t.interval_s < MAX_INTERVAL_S, _t.interval_s - LEAD_S),
    else_=float(MAX_INTERVAL_S),
)  # fmt: skip
_NEXT_ROUND = _t.round_at + sa.cast(_UNTIL_ROUND * SECOND, sa.BigInteger)  # at the earliest, because a job may start late
_RESTS = (_t.interval_s > 0) & _t.round_at.is_not(None) & (sa.bindparam("now", type_=sa.BigInteger) < _NEXT_ROUND)
_DUE = sa.select(_t.id).where(_t.due_next <= sa.bindparam("now")).order_by(_t.due_next).limit(sa.bindparam("count"))
_ALONE_DUE = sa.select(_e.id).where(_e.task_id.is_(None), _e.due_at <= sa.bindparam("now")).limit(1)
MAY = _t.state.in_(_DISPATCHED) & (_t.session_key.is_(None) | _t.session_holder.is_not(None))


def announce(ledger: Ledger, applied: Collection[Write], plain: Collection[Write] = ()) -> int | None:
    """Writes the hints for committed changes; call it after their transaction. ``plain``: ends for which nothing waits but
    others of their keys, or what :func:`announce_freed` announces.

    Returns when the first of them is due (microseconds; the past: now), None if there is none. Does not wait for locked
    rows of Tasks.
    """
    due: dict[int, int | None] = {}
    freed_places: dict[int, int] = {}
    lines = {
        each.record.line
        for each in chain(applied, plain)
        if each.record is not None and each.record.line is not None and each.turn and each.turn.after.status in TERMINAL
    }
    for each in applied:
        if each.turn is None or each.record is None or each.record.task_id is None:
            continue
        task_id, at = each.record.task_id, each.turn.after.due_at
        freed_places[task_id] = freed_places.get(task_id, 0) + _freed_places(each.turn)
        if at is not None and ((known := due.setdefault(task_id, None)) is None or at < known):
            due[task_id] = at
    for task_id, count in freed_places.items():
        if count > 0:  # else other jobs of the Task took the freed places
            due.setdefault(task_id, None)
    try:
        return _announce_all(ledger, due, sessions.free(ledger, lines) if lines else ())
    except LedgerUnavailable as error:
        _note_put_off(error)
        return None


def announce_freed(ledger: Ledger, task_ids: Collection[int]) -> int | None:
    """:func:`announce` for Tasks of which jobs have ended, each of which freed a place."""
    try:
        return _announce_all(ledger, dict.fromkeys(task_ids), ())
    except LedgerUnavailable as error:
        _note_put_off(error)
        return None


def _note_put_off(error: LedgerUnavailable) -> None:
    """The changes are committed; maintenance finds missing hints."""
    get_logger("asynctask.ready").warning("announce_put_off", error=str(error))


def wake(ledger: Ledger, woken: Collection[int]) -> int | None:
    """Writes the hints of Tasks that have jobs due now, because the lines of their keys advanced; as :func:`announce`."""
    return _announce_all(ledger, {}, woken)


def _announce_all(ledger: Ledger, due: Mapping[int, int | None], woken: Collection[int]) -> int | None:
    parts = chunks(sorted({**dict.fromkeys(woken), **due}.items()), 1_000)
    found = [_announce_batch(ledger, dict(part), woken) for part in parts]
    return min((at for at in found if at is not None), default=None)


def _freed_places(turn: Turn) -> int:
    """Places in flight that a transition frees; 1 if it changed nothing, because its first try may have freed one."""
    if turn.before is None or turn.before == turn.after:
        return 1
    return int(in_flight(turn.before)) - int(in_flight(turn.after))


def _announce_batch(ledger: Ledger, due: dict[int, int | None], woken: Collection[int] = ()) -> int | None:
    with ledger.database.read() as connection:
        found = connection.execute(_ANNOUNCED, {"ids": sorted(due)}).all()
    if tolerant := [int(row.id) for row in found if row.tolerated_failures is not None]:
        task_rows.pause_failing(ledger, tolerant)
    now = ledger.now()
    rounds = {int(row.id): at for row in found if (at := _next_round(row, now)) is not None}
    limited = [row for row in found if row.parallel is not None or row.interval_s > 0]
    freed = [int(row.id) for row in limited if row.ready is None and row.id not in rounds]
    waits = {task_id: at for task_id, at in due.items() if at is not None}
    # A ready Task became ready after its job was due: a reservation holds the keys until it has settled the hints.
    waits |= {
        int(row.id): now for row in found if row.id in woken and (row.ready is None or row.session_holder is not None)
    }
    if freed or waits:
        for task_id in _hint(ledger, freed, waits):
            ledger.held.keep_hint(task_id, waits.get(task_id))
    for row in found:
        over = row.ready is None and row.generation_sealed and row.next_seq >= row.created_jobs
        if row.session_holder is not None and over:
            sessions.step_aside(ledger, int(row.id))
    times = [*waits.values(), *rounds.values(), *([0] if freed or woken else [])]
    return min(times, default=None)


def _next_round(row: Any, now: int) -> int | None:
    """The earliest start of the next round of a Task with something left, if that is later than now and its hint says when
    to check."""
    interval = interval_of(row.interval_s)
    if not interval or row.round_at is None or row.due_next is None or row.next_seq >= row.created_jobs:
        return None
    at = next_round(int(row.round_at), None, 0, interval, now) - lead(interval)
    return at if at > now else None


def _hint(ledger: Ledger, freed: list[int], waits: dict[int, int]) -> list[int]:
    """Writes the hints; returns the Tasks whose rows another transaction holds."""

    def act(connection: Connection, free: list[int]) -> None:
        if batch := [task_id for task_id in free if task_id in freed]:
            connection.execute(tasks.update().where(_t.id.in_(batch), MAY).values(ready=_t.priority))
        for task_id in free:
            if (at := waits.get(task_id)) is not None:
                # The UPDATE compares after any concurrent reservation has ended, so that this hint counts.
                earlier = sa.case((_t.due_next <= at, _t.due_next), else_=at)
                connection.execute(tasks.update().where(_t.id == task_id).values(due_next=earlier))

    return each_free(ledger, {*freed, *waits}, act)


def catch_up(ledger: Ledger) -> None:
    """Retries the hints and promotions that this process kept because a Task's row was locked."""
    (hints, keys), lines = ledger.held.take(), ledger.held.take_lines()
    try:
        wake(ledger, sessions.free(ledger, lines))
        lines = set()
        for part in chunks(sorted(hints.items()), 1_000):
            _announce_batch(ledger, dict(part))
        for key in keys:
            sessions.promote_alone(ledger, key)
    except LedgerUnavailable:
        ledger.held.keep_lines(lines)
        for task_id, due in hints.items():
            ledger.held.keep_hint(task_id, due)
        for key in keys:
            ledger.held.keep_session(key)
        raise


def next_due(connection: Connection, now: int) -> int | None:
    """The due time after ``now`` of the next job that waits in the ledger, of a Task or without one."""
    of_tasks = sa.select(_t.due_next).where(_t.due_next > now).order_by(_t.due_next).limit(1)
    alone = sa.select(_e.due_at).where(_e.task_id.is_(None), _e.due_at > now).order_by(_e.due_at).limit(1)
    times = connection.execute(sa.select(of_tasks.scalar_subquery(), alone.scalar_subquery())).one()
    return min((int(at) for at in times if at is not None), default=None)


def is_alone_due(connection: Connection, now: int) -> bool:
    """Whether a job without a Task is due now."""
    return connection.scalar(_ALONE_DUE, {"now": now}) is not None


def due_tasks(connection: Connection, now: int, limit: int = 1_000) -> list[int]:
    """Tasks to check now for something to dispatch."""
    return [int(i) for (i,) in connection.execute(_DUE, {"now": now, "count": limit})]


class Woken(NamedTuple):
    """What :func:`wake_due` came to. ``due``: how many Tasks were still due; ``held``: Tasks whose rows another transaction
    holds, which remain due."""

    due: int
    held: list[int]


def wake_due(ledger: Ledger, task_ids: list[int]) -> Woken:
    """Makes these Tasks ready if they may dispatch; those that left their session rejoin its line.

    A Task whose next round may not start yet is checked again when it may, and within :data:`RECHECK_S`. One whose round
    may start keeps a hint, because the process that reserves it may die first. All processes come at once: of each Task the
    first wakes it, and no other waits for its row.
    """
    count = 0

    def act(connection: Connection, free: list[int]) -> None:
        now = ledger.now()
        due, given = _t.id.in_(free) & (_t.due_next <= now), {"now": now}
        connection.execute(tasks.update().where(due, MAY, sa.not_(_RESTS)).values(ready=_t.priority), given)
        sessions.join_again(connection, ledger, free, now)
        soon = now + micros(RECHECK_S)
        again = sa.case((_RESTS & (soon > _NEXT_ROUND), _NEXT_ROUND), else_=soon)
        has_rounds = (_t.interval_s > 0) & _t.state.in_(_DISPATCHED)
        later = tasks.update().where(due).values(due_next=sa.case((has_rounds, again), else_=None))
        nonlocal count
        count = connection.execute(later, given).rowcount

    free = all_free(ledger, task_ids, act)
    return Woken(count, sorted(set(task_ids).difference(free)))


def repair(ledger: Ledger, limit: int = 1_000) -> int:
    """Writes missing or late hints of Tasks with something to dispatch. Returns the number written; finds Tasks with locked
    rows again."""
    now = ledger.now()
    due = sa.exists().where(_e.task_id == _t.id, _e.due_at < sa.func.coalesce(_t.due_next, BLOCKED))
    lost = (
        sa.select(_t.id)
        .where(
            _t.finished_at.is_(None),
            _t.state.in_(_DISPATCHED),
            _t.ready.is_(None),
            _t.session_waits.is_(None),
            sa.or_(_t.due_next.is_(None) & (_t.created_jobs > _t.next_seq), due),
        )
        .limit(limit)
    )
    with ledger.database.read() as connection:
        found = [int(i) for (i,) in connection.execute(lost)]

    def act(connection: Connection, free: list[int]) -> None:
        later = _t.due_next.is_(None) | (_t.due_next > now)
        connection.execute(tasks.update().where(_t.id.in_(free), later).values(due_next=now))

    return len(found) - len(each_free(ledger, found, act))


def settled(
    task: dict[str, Any], *, left: bool, full: bool, due: int | None, now: int, opens: int | None = None
) -> dict[str, Any]:
    """The hints of a Task (its columns) after a reservation. ``left``: rows behind its pointer; ``due``: when its next
    waiting job is due; ``full``: ``parallel`` is used up; ``opens``: when its next round may start, if that is later."""
    batch = left or (due is not None and due <= now)
    if opens is not None:
        at = opens if batch else None if due is None else max(due, opens)
        return {"ready": None, "due_next": None if at is None else min(at, now + micros(RECHECK_S))}
    return {
        "ready": sessions.readiness(task) if batch and not full else None,
        "due_next": due if due is not None and due > now else None,
    }
