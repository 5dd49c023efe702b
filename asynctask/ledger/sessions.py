"""Sessions and keys: Tasks, and items, that run one after the other.

A session is a name within an owner. Its holder has the session's key in the unique column ``session_holder``, so if two
processes promote concurrently, one loses the compare-and-set. The other Tasks wait for it, in the order of
``session_waits`` (the priority) and ``session_position``. A Task whose remaining jobs all wait for a retry leaves the
session; when the first of them is due, it waits again, as the last.

A key is a value of one field of the items of a worker, across its Tasks. Each open Event with a key has a position in the
line of that key (``key_positions``) until it has ended; the first Event of a line may run. No Event is inserted before one
that may have been lent: Tasks with keys are committed in the order of their ids
(:func:`asynctask.ledger.events.lock_order`), an Event that runs again after its end gets the last position, and an Event
waits while a list is split whose items come before it (:func:`asynctask.core.readiness.has_turn`). So reading that an Event
is the first of its line needs no lock.

If a Task's pointer passes an Event before its turn, the Event waits with ``due_at``
:data:`~asynctask.core.transitions.BLOCKED`, until :func:`free` finds that its turn has come.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Connection

from asynctask.core.readiness import has_turn
from asynctask.core.states import GROWING, Reason, State, Status
from asynctask.core.transitions import BLOCKED
from asynctask.database import batches
from asynctask.database.retrying import repeatable
from asynctask.database.tables import events, key_positions, loans, task_tallies, tasks
from asynctask.ledger.base import Ledger, chunks, loads, try_lock
from asynctask.ledger.events import POSITIONS_EACH, total_counts
from asynctask.ledger.hints import in_session, settle

_t, _e, _n, _k, _l = tasks.c, events.c, task_tallies.c, key_positions.c, loans.c
_STARTS = (str(State.SPLITTING), str(State.RUNNING))
_OVER = (State.FINALIZING, State.FINISHED, State.REJECTED)


def key_of(owner: str, session: str | None) -> str | None:
    """The key of an owner's session, 32 hex digits; None without a session. It includes the owner, so that a common name
    such as ``import`` does not make different customers wait for each other.
    """
    if session is None:
        return None
    return hashlib.blake2b(f"{len(owner)}:{owner}{session}".encode(), digest_size=16).hexdigest()


def turning_to(task: Mapping[str, Any], target: State, reason: Reason, now: int) -> dict[str, Any]:
    """Further columns that a state change sets, for the Task's position among those that wait for the session."""
    if target in _OVER:
        return {"session_holder": None, "session_waits": None}
    if target in (State.PAUSED, State.CANCELLED):
        return {"session_waits": None}  # a holder keeps the session
    if reason not in (Reason.RESUMED, Reason.RETRIED) or in_session(task):
        return {}
    waits: dict[str, Any] = {"session_waits": task["priority"]}
    return {**waits, "session_position": now} if reason is Reason.RETRIED else waits


def after_turn(connection: Connection, ledger: Ledger, before: Mapping[str, Any], target: State) -> None:
    """Promotes the next Task of a session that the state change freed or joined, in the caller's transaction."""
    if before["session_key"] is not None and (target in _OVER or target in (State.SPLITTING, State.RUNNING)):
        promote(connection, ledger, before["session_key"])


def release(connection: Connection, ledger: Ledger, task: Mapping[str, Any]) -> None:
    """Releases the session of a Task that has ended and promotes the next one, in the caller's transaction."""
    if task["session_key"] is None:
        return
    connection.execute(tasks.update().where(_t.id == task["id"]).values(session_holder=None, session_waits=None))
    promote(connection, ledger, task["session_key"])


def promote(connection: Connection, ledger: Ledger, key: str) -> int | None:
    """Gives a free session to the first Task that waits for it, in the caller's transaction. Returns that Task's id.

    None if the session is held or no Task waits. If another transaction has locked the first Task's row, a later
    ``lending.catch_up`` promotes that Task: no other Task overtakes it.
    """
    if connection.execute(sa.select(_t.id).where(_t.session_holder == key)).first() is not None:
        return None
    waiting = sa.select(_t.id).where(_t.session_key == key, _t.session_waits.is_not(None))
    first = connection.execute(waiting.order_by(_t.session_waits, _t.session_position, _t.id).limit(1)).scalar()
    if first is None:
        return None
    task = try_lock(connection, ledger, int(first))
    if task is None:
        ledger.held.keep_session(key)
        return None
    promoted = (
        tasks.update()
        .where(_t.id == first, _t.session_waits.is_not(None), _t.session_holder.is_(None), _t.state.in_(_STARTS))
        .values(session_holder=key, session_waits=None, version=_t.version + 1)
    )
    try:
        with _one_statement(connection):
            if connection.execute(promoted).rowcount != 1:
                return None
    except exc.IntegrityError:  # another process promoted a Task concurrently
        return None
    settle(connection, ledger, {**task, "session_holder": key, "session_waits": None})
    return int(first)


@contextmanager
def _one_statement(connection: Connection) -> Iterator[None]:
    """Wraps a statement that may violate a unique key, so that only this statement is rolled back.

    PostgreSQL needs a savepoint for that; other databases roll the statement back by themselves. On MariaDB a deadlock
    removes savepoints, and the error about a missing one would hide the deadlock, which must be retried.
    """
    if connection.dialect.name != "postgresql":
        yield
        return
    with connection.begin_nested():
        yield


@repeatable
def step_aside(ledger: Ledger, task_id: int) -> bool:
    """Takes the session from a Task whose remaining jobs all wait for a retry, and promotes the next Task. Returns whether
    it did."""
    with ledger.database.write() as connection:
        row = try_lock(connection, ledger, task_id)
        if row is None:
            ledger.held.keep_hints([task_id])
            return False
        if not _waits_for_retries(connection, row, ledger.now()):
            return False
        left: dict[str, Any] = {"session_holder": None, "session_position": ledger.now()}
        settle(connection, ledger, {**row, **left}, **left, version=_t.version + 1)
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
    counts = total_counts(connection, task["id"])
    if counts.working or counts.stopped or not counts.enqueue or connection.scalar(_IS_LENT, {"task_id": task["id"]}):
        return False
    due, waiting = connection.execute(_WAITING, {"task_id": task["id"]}).one()
    return int(waiting or 0) == counts.enqueue and int(due) > now  # otherwise jobs are ready, or wait for their keys


_IS_LENT: Final = sa.select(sa.exists().where(_l.task_id == sa.bindparam("task_id")))
_WAITING: Final = sa.select(
    sa.func.min(_e.due_at), sa.func.sum(_e["items"] - _e.n_finish - _e.n_failed - _e.n_error - _e.n_cancelled)
).where(_e.task_id == sa.bindparam("task_id"), _e.due_at.is_not(None))
"""When the first of a Task's rows with a ``due_at`` is due, and the number of items of these rows."""


_IS_FREE: Final = sa.exists().where(_l.task_id == _t.id, _l.process.is_(None))
ASIDE: Final = sa.select(_t.id).where(
    _t.finished_at.is_(None),
    _t.state.in_(_STARTS),
    _t.session_key.is_not(None),
    _t.session_holder.is_(None),
    _t.session_waits.is_(None),
    sa.or_(_t.due_next <= sa.bindparam("now"), _t.created_jobs > _t.next_seq, _IS_FREE),
)
"""Tasks with jobs to start that neither hold their session nor wait for it."""


def join_again(connection: Connection, ledger: Ledger, task_ids: list[int], now: int) -> None:
    """Makes those of these Tasks that are :data:`ASIDE` wait for their session, as the last, and promotes; in the caller's
    transaction, which has locked their rows."""
    aside = ASIDE.add_columns(_t.session_key).where(_t.id.in_(task_ids)).order_by(_t.id)
    for task_id, key in connection.execute(aside, {"now": now}).all():
        joins = tasks.update().where(_t.id == task_id)
        connection.execute(joins.values(session_waits=_t.priority, session_position=now))
        promote(connection, ledger, key)


@repeatable
def promote_alone(ledger: Ledger, key: str) -> bool:
    """:func:`promote` in its own transaction. Returns whether a Task was promoted."""
    with ledger.database.write() as connection:
        return promote(connection, ledger, key) is not None


# -- keys: items with equal values of a field run one after the other

_BY_LINE: Final = "FORCE INDEX (ix_key_positions_line)"
"""For MariaDB, which overestimates a line's share of a new table, and would read the whole table for each line."""

_FREED: Final = 500
"""Largest number of lines that one transaction advances."""

_MIXED: Final = "*"
"""The worker's name of a Task of mixed jobs."""

GROWING_FIRST: Final = (
    sa.select(sa.func.min(_t.id))
    .where(_t.split_until.is_not(None), _t.split_state.in_(GROWING), _t.key_field.is_not(None))
    .where(sa.or_(_t.worker_name.in_([sa.bindparam("worker"), _MIXED]), sa.bindparam("worker") == _MIXED))
)


def _asking(e: Any) -> tuple[Any, Any]:
    """Columns for an Event: its position, and the first Event of its line; see :class:`Asking`."""
    o, w = key_positions.alias("o"), key_positions.alias("w")
    own = sa.select(o.c.position).where(o.c.event_id == e.c.id)
    first = sa.select(w.c.event_id).where(w.c.line == e.c.line).order_by(w.c.line, w.c.position, w.c.event_id).limit(1)
    first = first.with_hint(w, _BY_LINE, "mariadb")
    return own.correlate(e).scalar_subquery(), first.correlate(e).scalar_subquery()


def _at_pointer() -> Any:
    """A query: 0 if the Event at the pointer of a Task waits for another one of its line."""
    p = events.alias("p")
    _, first = _asking(p)
    turn = sa.case((sa.func.coalesce(first, p.c.id) == p.c.id, 1), else_=0)
    pointer = sa.select(_t.next_seq).where(_t.id == sa.bindparam("task_id")).scalar_subquery()
    return sa.select(turn).where(p.c.task_id == sa.bindparam("task_id"), p.c.seq == pointer)


# One statement, because among busy threads each statement takes as long as many rows.
_GATE: Final = sa.select(GROWING_FIRST.scalar_subquery(), _at_pointer().scalar_subquery())


def line_of(worker_name: str, key: str) -> int:
    """The line of a worker's key: a digest of 64 bits. Two keys with the same digest wait for each other, which is
    harmless.

    The first 40 bits digest all but the last two characters, so serial numbers are adjacent in the index: a hundred of them
    fit a page or two.
    """
    group = hashlib.blake2b(f"{len(worker_name)}:{worker_name}{key[:-2]}".encode(), digest_size=5).digest()
    return int.from_bytes(group + hashlib.blake2b(key[-2:].encode(), digest_size=3).digest(), "big", signed=True)


def add_positions(connection: Connection, task_ids: Collection[int], *, low: int = 0) -> None:
    """Inserts the positions of new Events with a key, from ``seq`` ``low`` on: by Task, then by ``seq``."""
    if task_ids:
        _ADD_POSITIONS.execute(connection, sorted(task_ids), low=low)


_ADD_POSITIONS: Final = batches.ByValues(
    _e.task_id,
    lambda its: key_positions.insert().from_select(
        ["event_id", "line", "position"],
        sa.select(_e.id, _e.line, _e.task_id * POSITIONS_EACH).where(
            its, _e.seq >= sa.bindparam("low"), _e.line.is_not(None)
        ),
    ),
)


class KeysGate(NamedTuple):
    """Whether a Task with keys may lend jobs now.

    ``waits``: an earlier Task is still being split, or open, and its next items come before those of this one; ``goes``:
    the Event at the pointer may have its turn; ``before``: as in :func:`asynctask.core.readiness.has_turn`.
    """

    waits: bool
    goes: bool
    before: int | None


def gate(connection: Connection, task_id: int, worker_name: str) -> KeysGate:
    """The gate of a Task with keys. Once it does not wait, it never waits again."""
    splitting, turn = connection.execute(_GATE, {"task_id": task_id, "worker": worker_name}).one()
    if splitting is None:
        return KeysGate(False, turn != 0, None)
    return KeysGate(splitting < task_id, turn != 0, int(splitting) * POSITIONS_EACH)


ASKING: Final = (_e.line, *_asking(events))
"""The columns of :class:`Asking` after the id."""


_ASKS: Final = sa.case((_e.due_at.is_(None) & (_e.status == str(Status.ENQUEUE)), 1))
_PASSED: Final = (
    sa.select(_e.id, _e.seq, _ASKS, *ASKING)
    .where(_e.task_id == sa.bindparam("of"), _e.seq >= sa.bindparam("low"), _e.seq < sa.bindparam("high"))
    .order_by(_e.seq)
)


class Asking(NamedTuple):
    """An Event to lend; if it has a key, its ``line``, its ``position`` there, and the ``first`` Event of that line."""

    id: int
    line: int | None
    position: int | None
    first: int | None


class Turns(NamedTuple):
    """Events to lend, by their turns. ``go``: those that may be lent; ``wait``: those that wait for others, with their
    lines; ``early``: those that are first in their lines, while a list is split whose items come before them."""

    go: set[int]
    wait: dict[int, int]
    early: set[int]


def turns(asking: Collection[Asking], before: int | None) -> Turns:
    """The turns of these Events. In its transaction, the caller lends those that go, and calls :func:`postpone` for the
    others; afterwards it calls :func:`free` for the lines of those that wait. An Event without a key always goes."""
    found = Turns(set(), {}, set())
    for each in asking:
        if each.line is None or has_turn(each.id, each.position or 0, each.first or each.id, before):
            found.go.add(each.id)
        elif each.first == each.id:
            found.early.add(each.id)
        else:
            found.wait[each.id] = each.line
    return found


def goes(ledger: Ledger, task_id: int, worker_name: str) -> bool:
    """Whether the Event at the pointer of a Task with keys may have its turn now."""
    with ledger.database.read() as connection:
        found = gate(connection, task_id, worker_name)
    return found.goes and not found.waits


def read_turns(
    connection: Connection, task_id: int, low: int, high: int, *, lock: bool = False
) -> tuple[list[tuple[int, int]], Turns]:
    """The Events of a Task with ``low <= seq < high`` as (seq, id), in order, and the turns of those that do not wait yet;
    for a Task whose gate does not wait. ``lock``: locks them, so that none is started before the transaction ends."""
    rows = batches.fetch_small(connection, _PASSED, {"of": task_id, "low": low, "high": high}, lock=lock)
    asked = [Asking(int(i), *rest) for i, _, asks, *rest in rows if asks]
    return sorted((int(seq), int(i)) for i, seq, *_ in rows), turns(asked, None)


@repeatable
def block_lent(ledger: Ledger, ranges: Sequence[tuple[int, int, int]]) -> set[int]:
    """Makes jobs wait whose turn has not come, in ranges (Task, low, high) that this process holds; returns their lines."""
    blocked: set[int] = set()
    with ledger.database.write() as connection:
        for task_id, low, high in ranges:
            _, found = read_turns(connection, task_id, low, high)
            postpone(connection, found.wait, BLOCKED)
            blocked |= set(found.wait.values())
    return blocked


def asking(connection: Connection, event_ids: Collection[int]) -> list[Asking]:
    """Those of these Events that are due, for :func:`turns`."""
    found = _DUE.fetch(connection, event_ids) if event_ids else ()
    return [Asking(int(i), *rest) for i, *rest in found]


_DUE: Final = batches.ByValues(
    _e.id,
    lambda its: (
        sa.select(_e.id, *ASKING).where(its, _e.status == str(Status.ENQUEUE), _e.due_at.is_not(None)).order_by(_e.id)
    ),
)


def postpone(connection: Connection, event_ids: Collection[int], until: int) -> None:
    """Makes these Events, which were to be lent, due at ``until`` (microseconds), or with :data:`BLOCKED` when their turn
    comes. Neither status nor counts change."""
    if event_ids:
        _POSTPONE.execute(connection, sorted(event_ids), until=until)


_POSTPONE: Final = batches.ByValues(
    _e.id,
    lambda its: (
        events.update()
        .where(its, _e.status == str(Status.ENQUEUE), _e.process.is_(None))
        .values(due_at=sa.bindparam("until"))
    ),
)


def free(ledger: Ledger, lines: Collection[int]) -> set[int]:
    """Advances lines in which Events have ended or were blocked, after the commit of that: makes the next ones due.

    Returns the Tasks of these. A process that ends an Event removes it from its line and then reads the next one; a process
    that blocks an Event reads the line afterwards, too. So one of the two sees the changes of both.
    """
    woken: set[int] = set()
    for part in chunks(sorted(lines), _FREED):
        with ledger.database.read() as connection:
            blocked = _blocked_first(connection, part)
        if blocked:
            woken |= _unblock(ledger, blocked)
    return woken


@repeatable
def _unblock(ledger: Ledger, event_ids: Sequence[int]) -> set[int]:
    """Makes the blocked ones of these Events due. Returns their Tasks."""
    with ledger.database.write() as connection:
        woken = {int(i) for i in _LOCK_BLOCKED.execute(connection, sorted(event_ids)).scalars()}
        if woken:
            _UNBLOCK.execute(connection, sorted(event_ids), now=ledger.now())
    return woken


_IS_BLOCKED: Final = _e.due_at == BLOCKED
_BLOCKED: Final = batches.ByValues(_e.id, lambda its: sa.select(_e.id).where(its, _IS_BLOCKED))
_LOCK_BLOCKED: Final = batches.ByValues(
    _e.id, lambda its: sa.select(_e.task_id).where(its, _IS_BLOCKED).order_by(_e.id), skip_locked=False
)
_UNBLOCK: Final = batches.ByValues(
    _e.id, lambda its: events.update().where(its, _IS_BLOCKED).values(due_at=sa.bindparam("now"))
)


def _blocked_first(connection: Connection, lines: Collection[int]) -> list[int]:
    """The Events that are blocked in these lines although they are the first."""
    heads = _heads_of(connection, lines)
    return [int(i) for (i,) in _BLOCKED.fetch(connection, sorted(heads))] if heads else []


_LINES: Final = {
    "sqlite": "(SELECT value AS line FROM json_each(:lines)) AS d",
    "postgresql": "(SELECT unnest(CAST(:lines AS bigint[])) AS line) AS d",
    "mariadb": "JSON_TABLE(:lines, '$[*]' COLUMNS (line BIGINT PATH '$')) AS d",
}


def _hint(dialect: str) -> str:
    return f" {_BY_LINE}" if dialect == "mariadb" else ""


@cache
def _heads(dialect: str) -> Any:
    head = (
        f"SELECT w.event_id FROM key_positions w{_hint(dialect)} WHERE w.line = d.line"  # noqa: S608
        " ORDER BY w.line, w.position, w.event_id LIMIT 1"
    )
    # One text, because among several threads fetching a row costs more than its content.
    columns = f"json_group_array(({head}))" if dialect == "sqlite" else f"({head})"
    return sa.text(f"SELECT {columns} FROM {_LINES[dialect]}")  # noqa: S608


def _heads_of(connection: Connection, lines: Collection[int]) -> list[int]:
    """The first Event of each line that has one, by one index lookup per line."""
    if not lines:
        return []
    dialect = connection.dialect.name
    given = batches.given("postgresql" if dialect == "postgresql" else "sqlite", list(lines))
    found = connection.execute(_heads(dialect), {"lines": given})
    heads = loads(found.scalar_one()) if dialect == "sqlite" else found.scalars()
    return [int(head) for head in heads if head is not None]
