"""Sessions: Tasks of one session run one after the other.

A session is a name within an owner. The Task that holds it has the session's key in ``session_holder``, which is unique: so
of two processes that pass it on at once, one loses the compare-and-set. The others stand in line, by ``session_waits`` (the
priority) and ``session_place``. A Task that has nothing left but jobs that wait for a retry stands aside, in no line; when
the first of them is due it joins again, at the end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Connection

from asynctask.core.states import Reason, State
from asynctask.database.retrying import repeatable
from asynctask.database.tables import events, task_tallies, tasks
from asynctask.ledger import counters
from asynctask.ledger.base import Ledger, try_lock

__all__ = [
    "key_of",
    "may",
    "promote",
    "promote_alone",
    "readiness",
    "release",
    "repair",
    "step_aside",
    "turning_to",
    "waiting_in_line",
]

_t, _e, _n = tasks.c, events.c, task_tallies.c
_DISPATCHED = (str(State.SPLITTING), str(State.RUNNING))
_OVER = (State.FINALIZING, State.FINISHED, State.REJECTED)


def key_of(owner: str, session: str | None) -> str | None:
    """The key of an owner's session, 32 hex digits; None without one.

    The owner is part of it: a name like ``import`` must not have one customer's Tasks wait for another's.
    """
    if session is None:
        return None
    return hashlib.blake2b(f"{len(owner)}:{owner}{session}".encode(), digest_size=16).hexdigest()


def may(task: Mapping[str, Any]) -> bool:
    """Whether a Task (its columns) may start jobs as far as its session goes."""
    return task["session_key"] is None or task["session_holder"] is not None


def readiness(task: Mapping[str, Any]) -> int | None:
    """``tasks.ready`` of a Task (its columns) that has something to dispatch: its priority, None where it may not."""
    return task["priority"] if task["state"] in _DISPATCHED and may(task) else None


def waiting_in_line(task: Mapping[str, Any]) -> bool:
    """Whether a Task (its columns) waits for its session, as its user is told."""
    return task["session_waits"] is not None and task["state"] in _DISPATCHED


def turning_to(task: Mapping[str, Any], target: State, reason: Reason, now: int) -> dict[str, Any]:
    """What else changes with a Task's state: whether it may dispatch, and its place in the line."""
    if target in _OVER:
        return {"ready": None, "due_next": None, "session_holder": None, "session_waits": None}
    if target in (State.PAUSED, State.CANCELLED):
        return {"ready": None, "session_waits": None}  # who holds a session goes on holding it
    if reason not in (Reason.RESUMED, Reason.RETRIED):
        return {}
    if may(task):
        return {"ready": task["priority"]}
    line: dict[str, Any] = {"session_waits": task["priority"]}
    return {**line, "session_place": now} if reason is Reason.RETRIED else line


def after_turn(connection: Connection, ledger: Ledger, before: Mapping[str, Any], target: State) -> None:
    """Passes a session on, or takes a free one, in the transaction that changed the Task's state."""
    if before["session_key"] is not None and (target in _OVER or target in (State.SPLITTING, State.RUNNING)):
        promote(connection, ledger, before["session_key"])


def release(connection: Connection, ledger: Ledger, task: Mapping[str, Any]) -> None:
    """The Task is over: its session passes on, in the caller's transaction."""
    if task["session_key"] is None:
        return
    connection.execute(tasks.update().where(_t.id == task["id"]).values(session_holder=None, session_waits=None))
    promote(connection, ledger, task["session_key"])


def promote(connection: Connection, ledger: Ledger, key: str) -> int | None:
    """Gives a session that nobody holds to the first in its line, in the caller's transaction. Returns that Task's id.

    The smaller priority goes first, then who came first. None where some Task holds it, or none waits. Where the row of the
    first is locked by somebody else the session is passed on later (``ready.catch_up``): nobody overtakes it.
    """
    if connection.execute(sa.select(_t.id).where(_t.session_holder == key)).first() is not None:
        return None
    line = sa.select(_t.id).where(_t.session_key == key, _t.session_waits.is_not(None))
    first = connection.execute(line.order_by(_t.session_waits, _t.session_place, _t.id).limit(1)).scalar()
    if first is None:
        return None
    if try_lock(connection, ledger, int(first)) is None:
        ledger.held.keep_session(key)
        return None
    took = (
        tasks.update()
        .where(_t.id == first, _t.session_waits.is_not(None), _t.session_holder.is_(None), _t.state.in_(_DISPATCHED))
        .values(session_holder=key, session_waits=None, ready=_t.priority, version=_t.version + 1)
    )
    try:
        with _one_statement(connection):
            return int(first) if connection.execute(took).rowcount == 1 else None
    except exc.IntegrityError:  # another process gave it away in the same moment
        return None


@contextmanager
def _one_statement(connection: Connection) -> Iterator[None]:
    """Around a statement that may meet a unique key, so that it alone is undone.

    PostgreSQL gives up the whole transaction without a savepoint. The others undo the statement by themselves; a savepoint
    on MariaDB is gone after a deadlock, and to say so would hide the deadlock, after which the same again is right.
    """
    if connection.dialect.name != "postgresql":
        yield
        return
    with connection.begin_nested():
        yield


@repeatable
def step_aside(ledger: Ledger, task_id: int) -> bool:
    """Passes a session on whose Task has nothing left but jobs that wait for a retry. Returns whether it did."""
    with ledger.database.write() as connection:
        row = try_lock(connection, ledger, task_id)
        if row is None:
            ledger.held.keep_hint(task_id, None)
            return False
        if not _rests(connection, row, ledger.now()):
            return False
        now = ledger.now()
        due = next_due(connection, task_id)
        connection.execute(
            tasks.update()
            .where(_t.id == task_id)
            .values(session_holder=None, session_place=now, ready=None, due_next=due, version=_t.version + 1)
        )
        promote(connection, ledger, row["session_key"])
    return True


def _rests(connection: Connection, task: Mapping[str, Any], now: int) -> bool:
    if (
        task["session_holder"] is None
        or task["state"] != State.RUNNING
        or task["turning"] is not None
        or not task["generation_sealed"]
        or task["next_seq"] < task["created_jobs"]
    ):
        return False
    counts = counters.total(connection, task["id"])
    if counts.working or counts.stopped or not counts.enqueue or counts.dispatched != counts.returned:
        return False
    due = next_due(connection, task["id"])
    return due is not None and int(due) > now


_NEXT_DUE = (
    sa.select(_e.due_at).where(_e.task_id == sa.bindparam("task_id"), _e.due_at.is_not(None)).order_by(_e.due_at).limit(1)
)


def next_due(connection: Connection, task_id: int) -> int | None:
    """When the first of a Task's jobs that wait in the ledger is due."""
    return connection.execute(_NEXT_DUE, {"task_id": task_id}).scalar()


def join_again(connection: Connection, ledger: Ledger, task_ids: list[int], now: int) -> None:
    """Tasks that stood aside, and whose retry is due, join the line at its end.

    In the caller's transaction, which has locked the rows of all of them.
    """
    aside = (
        _t.id.in_(task_ids)
        & _t.state.in_(_DISPATCHED)
        & _t.session_key.is_not(None)
        & _t.session_holder.is_(None)
        & (_t.due_next <= now)
    )
    found = connection.execute(sa.select(_t.id, _t.session_key, _t.session_waits).where(aside).order_by(_t.id)).all()
    for task_id, key, waits in found:
        if waits is None:
            joins = tasks.update().where(_t.id == task_id)
            connection.execute(joins.values(session_waits=_t.priority, session_place=now))
        promote(connection, ledger, key)


def repair(ledger: Ledger, limit: int = 1_000) -> int:
    """Gives sessions that nobody holds to their lines, and has those step aside who should have. Returns how many."""
    other = tasks.alias("other")
    free = (
        sa.select(_t.session_key)
        .where(_t.session_waits.is_not(None), ~sa.exists().where(other.c.session_holder == _t.session_key))
        .distinct()
        .limit(limit)
    )
    with ledger.database.read() as connection:
        keys = [str(key) for (key,) in connection.execute(free)]
        resting = [int(i) for (i,) in connection.execute(_resting().limit(limit))]
    mended = sum(promote_alone(ledger, key) for key in keys)
    return mended + sum(step_aside(ledger, task_id) for task_id in resting)


@repeatable
def promote_alone(ledger: Ledger, key: str) -> bool:
    """As :func:`promote`, in a transaction of its own. Returns whether the session passed on."""
    with ledger.database.write() as connection:
        return promote(connection, ledger, key) is not None


def _resting() -> sa.Select[Any]:
    """Holders that by their counts wait for retries only, while others wait for them."""
    other = tasks.alias("other")
    open_items = sa.func.sum(_n.enqueue)
    return (
        sa.select(_t.id)
        .join(task_tallies, _n.task_id == _t.id)
        .where(
            _t.session_holder.is_not(None),
            _t.state == State.RUNNING,
            _t.created_jobs <= _t.next_seq,
            sa.exists().where(other.c.session_key == _t.session_holder, other.c.session_waits.is_not(None)),
        )
        .group_by(_t.id)
        .having(open_items == sa.func.sum(_n.retrying), open_items > 0, sa.func.sum(_n.working + _n.stopped) == 0)
    )
