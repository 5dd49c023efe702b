"""Children: Tasks that the jobs of another Task submitted, its ``parent``. A parent closes after its children.

The tree below a Task has at most :data:`MOST_BELOW` Tasks on :data:`MOST_LEVELS` levels, because the progress of the Task
sums over it. ``tasks.children`` counts the Tasks below; where it is 0, no query looks for any.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.core.states import State, Status
from asynctask.core.transitions import Delta
from asynctask.database.tables import events, task_tallies, tasks
from asynctask.errors import Conflict, InputError, NotFound
from asynctask.ledger.base import PURGING, in_range

MOST_LEVELS: Final = 10
"""Most Tasks on the way from a Task without a parent down to any other, both included."""

MOST_BELOW: Final = 10_000
"""Most Tasks below one Task, on all levels."""

HELD: Final = "parent_paused"
"""``state_reason`` of a Task that was paused with its parent, and is resumed with it."""

_t, _n = tasks.c, task_tallies.c
_child = tasks.alias("child")
_COUNTS = tuple(str(status) for status in Status)


# -- a Task gets a parent


def is_of_task(connection: Connection, task_id: int, job_id: str) -> bool:
    """Whether the job of this id is in this ledger and of this Task. A callback is of no Task."""
    return connection.scalar(sa.select(events.c.task_id).where(events.c.job_id == job_id)) == task_id


def ancestors(connection: Connection, task_id: int) -> list[int]:
    """The ids of a Task, of its parent, of the parent of that, and so on."""
    found: list[int] = []
    at: int | None = in_range(task_id)
    while at is not None:
        found.append(at)
        at = connection.scalar(sa.select(_t.parent).where(_t.id == at))
    return found


def above(connection: Connection, task_ids: Collection[int]) -> list[tuple[int, int]]:
    """The Tasks above these Tasks, as pairs of a Task and one above it; purged ones are left out."""
    pairs = sa.select(_t.id, _t.parent).where(_t.id.in_(task_ids), _t.parent.is_not(None)).cte("above", recursive=True)
    next_level = sa.select(pairs.c.id, _child.c.parent).where(_child.c.id == pairs.c.parent, _child.c.parent.is_not(None))
    pairs = pairs.union_all(next_level)
    found = connection.execute(sa.select(pairs.c.id, _t.id).join_from(pairs, tasks, _t.id == pairs.c.parent))
    return [(int(task_id), int(other)) for task_id, other in found]


def adopt(connection: Connection, new: Sequence[tuple[int | None, str | None]]) -> set[int]:
    """Locks and counts the parents of new Tasks, each given as its parent and its session; returns the paused parents.

    The lock orders the new Task before or after every act on a Task above it: what is to go down finds the new Task, or the
    new Task finds what was done. Raises :class:`NotFound` for a parent that does not exist, :class:`Conflict` for one that
    takes no children any more, :class:`InputError` for a session that would wait for itself, and beyond the limits.
    """
    above = {parent: ancestors(connection, parent) for parent, _ in new if parent is not None}
    ids = sorted({task_id for known in above.values() for task_id in known})
    columns = (_t.id, _t.state, _t.closed_at, _t.turning, _t.children, _t.session_key)
    locked = connection.execute(sa.select(*columns).where(_t.id.in_(ids)).order_by(_t.id).with_for_update())
    rows, more = {int(row.id): row for row in locked}, dict[int, int]()
    for parent, session in new:
        if parent is None:
            continue
        _check_parent(parent, rows.get(parent))
        if len(above[parent]) >= MOST_LEVELS:
            raise InputError(
                f"Task {parent} is on level {MOST_LEVELS} of Tasks below Tasks, the last; {_ALONE}", code="invalid_option"
            )
        for task_id in above[parent]:
            row = rows.get(task_id)
            if row is not None and session is not None and row.session_key == session:
                raise InputError(
                    f"the session is that of Task {task_id}, which waits for its children: the new Task would wait for"
                    f" itself; give it another session, or none",
                    code="invalid_option",
                )
            more[task_id] = more.get(task_id, 0) + 1
            if row is not None and row.children + more[task_id] > MOST_BELOW:
                raise Conflict(f"there are {MOST_BELOW:,} Tasks below Task {task_id}, the most; {_ALONE}")
    for task_id, count in sorted(more.items()):
        grown = {"children": _t.children + count, "version": _t.version + 1}
        connection.execute(tasks.update().where(_t.id == task_id).values(grown))
    return {task_id for task_id in above if rows[task_id].state == State.PAUSED}


_ALONE: Final = "submit it without a parent (in a job: parent=0), for a Task of its own"


def _check_parent(task_id: int, row: Any) -> None:
    if row is None or row.turning == PURGING:
        raise NotFound(f"there is no Task {task_id} to be the parent")
    if row.state in (State.CANCELLED, State.REJECTED) or row.closed_at is not None:
        raise Conflict(f"Task {task_id} is {row.state}, and takes no children any more; {_ALONE}")


# -- a parent waits for its children


def open_of(parent: Any) -> Any:
    """The condition that a child of a Task (its id) is not done."""
    return sa.exists().where(_child.c.parent == parent, _child.c.finished_at.is_(None))


def any_open(connection: Connection, task_id: int) -> bool:
    """Whether a child of the Task is not done."""
    return bool(connection.scalar(sa.select(open_of(task_id))))


class Below(NamedTuple):
    """The Tasks below a Task: their number, how many are not done, how many were cancelled or rejected, the sum of their
    versions, and their items by status."""

    tasks: int
    open: int
    refused: int
    version: int
    counts: dict[str, int]


@cache
def _sums() -> Any:
    """One statement for several Tasks, whose cost grows with the Tasks below them, and not with their items."""
    chosen: sa.BindParameter[Any] = sa.bindparam("ids", expanding=True)
    columns = (_t.id, _t.state, _t.finished_at, _t.version)
    below = sa.select(_t.parent.label("above"), *columns).where(_t.parent.in_(chosen)).cte("below", recursive=True)
    next_level = sa.select(below.c.above, *(_child.c[each.name] for each in columns)).where(_child.c.parent == below.c.id)
    below = below.union_all(next_level)
    tallied = [sa.func.coalesce(sa.func.sum(_n[name]), 0).label(name) for name in (*_COUNTS, "version")]
    own = sa.select(below.c.above, below.c.id, below.c.state, below.c.finished_at, below.c.version.label("own_version"))
    each = own.add_columns(*tallied).select_from(below.outerjoin(task_tallies, _n.task_id == below.c.id))
    each_task = each.group_by(*own.selected_columns).subquery("each_task")
    c, total = each_task.c, sa.func.sum
    is_refused = c.state.in_((str(State.CANCELLED), str(State.REJECTED)))
    return sa.select(
        c.above,
        sa.func.count(),
        total(sa.case((c.finished_at.is_(None), 1), else_=0)),
        total(sa.case((is_refused, 1), else_=0)),
        total(c.own_version + c.version),
        *(total(c[name]) for name in _COUNTS),
    ).group_by(c.above)


def below(connection: Connection, task_ids: Collection[int]) -> dict[int, Below]:
    """The sums over the Tasks below these Tasks, by id; a Task without any is left out."""
    found: dict[int, Below] = {}
    for above, *sums in connection.execute(_sums(), {"ids": list(task_ids)}) if task_ids else ():
        count, is_open, refused, version, *items = map(int, sums)
        found[int(above)] = Below(count, is_open, refused, version, dict(zip(_COUNTS, items, strict=True)))
    return found


def ends(connection: Connection, task_id: int) -> Delta:
    """How the items of all Tasks below a Task ended; a Task that was cancelled or rejected counts as one item more."""
    known = below(connection, [task_id]).get(task_id)
    if known is None:
        return Delta()
    ended = {name: known.counts[name] for name in ("finish", "failed", "error", "cancelled")}
    return Delta(**{**ended, "cancelled": ended["cancelled"] + known.refused})
