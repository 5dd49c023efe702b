"""Sessions: the Tasks of a session run one after the other.

A session is a name within an owner. Its holder has the session's key in the unique column ``session_holder``, so of two
processes that promote concurrently one loses the compare-and-set. The other Tasks wait in line, by ``session_waits`` (the
priority) and ``session_place``. A Task with nothing left but jobs waiting for a retry leaves the session, and joins the
line again, at its end, when the first of them is due.
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

    Includes the owner, so that a name such as ``import`` does not make customers wait for each other.
    """
    if session is None:
        return None
    return hashlib.blake2b(f"{len(owner)}:{owner}{session}".encode(), digest_size=16).hexdigest()


def may(task: Mapping[str, Any]) -> bool:
    """Whether the session of a Task (its columns) allows it to start jobs."""
    return task["session_key"] is None or task["session_holder"] is not None


def readiness(task: Mapping[str, Any]) -> int | None:
    """``tasks.ready`` of a Task (its columns) with something to dispatch: its priority; None if it may not dispatch."""
    return task["priority"] if task["state"] in _DISPATCHED and may(task) else None


def waiting_in_line(task: Mapping[str, Any]) -> bool:
    """Whether a Task (its columns) waits for its session, as shown to its user."""
    return task["session_waits"] is not None and task["state"] in _DISPATCHED


def turning_to(task: Mapping[str, Any], target: State, reason: Reason, now: int) -> dict[str, Any]:
    """Further columns that a state change sets: readiness, and the place in the session's line."""
    if target in _OVER:
        return {"ready": None, "due_next": None, "session_holder": None, "session_waits": None}
    if target in (State.PAUSED, State.CANCELLED):
        return {"ready": None, "session_waits": None}  # a holder keeps the session
    if reason not in (Reason.RESUMED, Reason.RETRIED):
        return {}
    if may(task):
        return {"ready": task["priority"]}
    line: dict[str, Any] = {"session_waits": task["priority"]}
    return {**line, "session_place": now} if reason is Reason.RETRIED else line


def after_turn(connection: Connection, ledger: Ledger, before: Mapping[str, Any], target: State) -> None:
    """Promotes the next Task of a session that the state change freed or joined, in the caller's transaction."""
    if before["session_key"] is not None and (target in _OVER or target in (State.SPLITTING, State.RUNNING)):
        promote(connection, ledger, before["session_key"])


def release(connection: Connection, ledger: Ledger, task: Mapping[str, Any]) -> None:
    """Releases the session of a Task that is over and promotes the next one, in the caller's transaction."""
    if task["session_key"] is None:
        return
    connection.execute(tasks.update().where(_t.id == task["id"]).values(session_holder=None, session_waits=None))
    promote(connection, ledger, task["session_key"])


def promote(connection: Connection, ledger: Ledger, key: str) -> int | None:
    """Gives a free session to the first Task in its line, in the caller's transaction. Returns that Task's id.

    Smaller priority first, then first come. None if the session is held or nobody waits. If another transaction
    has locked the first Task's row, a later ``dispatchable.catch_up`` promotes it: no Task overtakes it.
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
    promoted = (
        tasks.update()
        .where(_t.id == first, _t.session_waits.is_not(None), _t.session_holder.is_(None), _t.state.in_(_DISPATCHED))
        .values(session_holder=key, session_waits=None, ready=_t.priority, version=_t.version + 1)
    )
    try:
        with _one_statement(connection):
            return int(first) if connection.execute(promoted).rowcount == 1 else None
    except exc.IntegrityError:  # another process promoted a Task concurrently
        return None


@contextmanager
def _one_statement(connection: Connection) -> Iterator[None]:
    """Wraps a statement that may violate a unique key, so that only it is rolled back.

    PostgreSQL needs a savepoint for that. The others roll the statement back by themselves; on MariaDB a savepoint is gone
    after a deadlock, and the error about it would hide the deadlock, which must be retried.
    """
    if connection.dialect.name != "postgresql":
        yield
        return
    with connection.begin_nested():
        yield


@repeatable
def step_aside(ledger: Ledger, task_id: int) -> bool:
    """Takes a session from a Task with nothing left but jobs waiting for a retry, and promotes. Returns whether it did."""
    with ledger.database.write() as connection:
        row = try_lock(connection, ledger, task_id)
        if row is None:
            ledger.held.keep_hint(task_id, None)
            return False
        if not _waits_for_retries(connection, row, ledger.now()):
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


def _waits_for_retries(connection: Connection, task: Mapping[str, Any], now: int) -> bool:
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
    """Puts Tasks whose retry is due at the end of their session's line, and promotes.

    In the caller's transaction, which has locked their rows.
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
    """Promotes in free sessions, and has stalled holders step aside. Returns the number of repairs."""
    other = tasks.alias("other")
    free = (
        sa.select(_t.session_key)
        .where(_t.session_waits.is_not(None), ~sa.exists().where(other.c.session_holder == _t.session_key))
        .distinct()
        .limit(limit)
    )
    with ledger.database.read() as connection:
        keys = [str(key) for (key,) in connection.execute(free)]
        stalled = [int(i) for (i,) in connection.execute(_stalled_holders().limit(limit))]
    repaired = sum(promote_alone(ledger, key) for key in keys)
    return repaired + sum(step_aside(ledger, task_id) for task_id in stalled)


@repeatable
def promote_alone(ledger: Ledger, key: str) -> bool:
    """:func:`promote` in its own transaction. Returns whether a Task was promoted."""
    with ledger.database.write() as connection:
        return promote(connection, ledger, key) is not None


def _stalled_holders() -> sa.Select[Any]:
    """Holders that by their counts only wait for retries, while other Tasks wait for the session."""
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
