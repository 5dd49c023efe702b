"""Corrected lists: rows of a Task that failed, were refused or cancelled, submitted again with ``resubmit_of``.

An accepted row takes the row that it corrects: no other list and no retry runs that row again, and its outcome is in the
new Task. To take or retry a row, a transaction locks the row of the Task in which it ended; a unique index enforces this.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.core.states import Status
from asynctask.database import batches
from asynctask.database.tables import as_dict, events, item_errors, resubmitted_rows, task_ancestors, task_rejects, tasks
from asynctask.errors import Conflict, InputError, NotFound
from asynctask.iterable import indexes_of, unpack
from asynctask.ledger.base import PURGING, NewItem, Reject, loads
from asynctask.ledger.events import read_events, rows_of, total_counts

MOST_CORRECTIONS: Final = 200
"""Largest number of lists that correct one Task, directly or indirectly, because its progress sums over them."""

_TAKEN: Final = "already_resubmitted"

_t, _e, _r, _a, _x = tasks.c, events.c, resubmitted_rows.c, task_ancestors.c, item_errors.c


def ancestors(connection: Connection, task_id: int) -> list[int]:
    """The ids of the Task that this one corrects, of the Task that the former corrects, and so on."""
    return [int(i) for (i,) in connection.execute(sa.select(_a.ancestor_id).where(_a.task_id == task_id))]


def lock_all(connection: Connection, task_ids: Sequence[int]) -> dict[int, dict[str, Any]]:
    """The columns of these Tasks by id, locked in the order of their ids; Tasks that do not exist are left out."""
    found = sa.select(tasks).where(_t.id.in_(task_ids)).order_by(_t.id).with_for_update()
    return {int(row.id): as_dict(row) for row in connection.execute(found)}


def may_be_corrected(connection: Connection, task_id: int) -> list[int]:
    """The ids of the Task and its ancestors, locked, for a list that corrects it. Raises :class:`NotFound`, and
    :class:`Conflict` if it cannot be corrected."""
    ids = [*ancestors(connection, task_id), task_id]
    if (task := lock_all(connection, ids).get(task_id)) is None or task["turning"] == PURGING:
        raise NotFound(f"there is no Task {task_id}")
    most = sa.select(sa.func.count()).where(_a.ancestor_id.in_(ids)).group_by(_a.ancestor_id)
    if max(connection.execute(most).scalars(), default=0) >= MOST_CORRECTIONS:
        raise Conflict(f"{MOST_CORRECTIONS} lists correct Task {task_id} already; submit the rest as a separate list")
    connection.execute(tasks.update().where(_t.id == task_id).values(version=_t.version + 1))
    return ids


def find_corrected(
    connection: Connection, parent: Mapping[str, Any], numbers: Collection[int]
) -> tuple[dict[int, tuple[int, int]], dict[int, dict[str, Any]]]:
    """The rows of a Task (its columns) that these numbers correct: for each number its (Task, row), or a problem.

    A number is the row in the list of the first Task, as in the reports of all Tasks that correct it.
    """
    parent_id, origins = int(parent["id"]), {number: (int(parent["id"]), number) for number in numbers}
    if parent["resubmit_of"] is not None:
        named = (_r.task_id == parent_id) & batches.among(connection, _r.number, list(numbers))
        own = connection.execute(sa.select(_r.number, _r.row, _r.of_task, _r.of_row, _r.taken).where(named))
        origins = {
            # A row that this Task refused still belongs to the other Task.
            number: (parent_id, row) if taken or of_task is None else (of_task, of_row)
            for number, row, of_task, of_row, taken in own
        }
    ended, taken_by = set[tuple[int, int]](), dict[tuple[int, int], int | None]()
    for task_id in {task_id for task_id, _ in origins.values()}:
        rows = [row for of_task, row in origins.values() if of_task == task_id]
        ended.update((task_id, row) for row in _ended_badly(connection, task_id, rows))
        taken = (_r.of_task == task_id) & batches.among(connection, _r.of_row, rows) & (_r.taken == 1)
        taken_by.update(
            ((task_id, row), by) for row, by in connection.execute(sa.select(_r.of_row, _r.task_id).where(taken))
        )
    problems = {}
    for number in numbers:
        origin = origins.get(number)
        if origin in taken_by:
            params = {"number": number, "by": str(taken_by[origin] or "?")}
            problems[number] = row_problem(_TAKEN, "resubmit.taken", params, number)
        elif origin not in ended:
            params = {"number": number, "task": parent_id}
            problems[number] = row_problem("not_failed", "resubmit.not_failed", params, number)
    return origins, problems


def row_problem(code: str, text: str, params: dict[str, Any], value: Any) -> dict[str, Any]:
    """A problem of a row as the ledger stores it, for translation."""
    return {"column": None, "code": code, "value": value, "text": text, "params": params}


def _ended_badly(connection: Connection, task_id: int, rows: Collection[int]) -> set[int]:
    """Those of these rows of a Task that failed, were refused, or were cancelled."""
    failed = (_x.task_id == task_id) & batches.among(connection, _x.row, list(rows))
    refused = (task_rejects.c.task_id == task_id) & batches.among(connection, task_rejects.c.row, list(rows))
    found = set(connection.execute(sa.select(_x.row).where(failed)).scalars())
    found.update(connection.execute(sa.select(task_rejects.c.row).where(refused)).scalars())
    left = set(rows) - found
    if left and total_counts(connection, task_id).cancelled:
        low, high = _seq_from(connection, task_id, min(left)), _seq_from(connection, task_id, max(left) + 1)
        between = (_e.task_id == task_id) & (_e.seq >= low) & (_e.seq < high) & (_e["items"] == 1)
        cancelled = between & (_e.status == Status.CANCELLED) & batches.among(connection, _e.first_row, list(left))
        found.update(connection.execute(sa.select(_e.first_row).where(cancelled)).scalars())
        # The first of these rows may be a later row of the previous slice.
        slices = (_e.task_id == task_id) & (_e.seq >= low - 1) & (_e.seq < high) & (_e["items"] > 1)
        for record in read_events(connection, slices & (_e.n_cancelled > 0)):
            rows_there = rows_of(connection, record)
            found.update(left.intersection(rows_there[i] or 0 for i in indexes_of(record.row, [Status.CANCELLED])))
    return found


def originals(connection: Connection, origins: Collection[tuple[int, int]]) -> dict[tuple[int, int], Any]:
    """The items as submitted of those of these rows, (Task, row), that failed, were refused, or were cancelled."""
    found: dict[tuple[int, int], Any] = {}
    for task_id in {task_id for task_id, _ in origins}:
        rows = [row for of_task, row in origins if of_task == task_id]
        refused = (task_rejects.c.task_id == task_id) & batches.among(connection, task_rejects.c.row, rows)
        for row, cells in connection.execute(sa.select(task_rejects.c.row, task_rejects.c.cells).where(refused)):
            found[task_id, int(row)] = loads(cells)
        failed = (_x.task_id == task_id) & batches.among(connection, _x.row, rows)
        ids = set(connection.execute(sa.select(_x.event_id).where(failed)).scalars())
        if left := [row for row in rows if (task_id, row) not in found]:
            low, high = _seq_from(connection, task_id, min(left)), _seq_from(connection, task_id, max(left) + 1)
            between = (_e.task_id == task_id) & (_e.seq >= low - 1) & (_e.seq < high) & (_e.n_cancelled > 0)
            ids.update(connection.execute(sa.select(_e.id).where(between)).scalars())
        items = sa.select(_e.first_row, _e["items"], _e.params).where(batches.among(connection, _e.id, list(ids)))
        for first_row, count, params in connection.execute(items):
            value = loads(params)
            pairs = [(first_row, value)] if count == 1 else zip(*unpack(value), strict=True)
            found |= {(task_id, int(row)): item for row, item in pairs}
    return {origin: item for origin, item in found.items() if origin in origins}


def _seq_from(connection: Connection, task_id: int, row: int) -> int:
    """The ``seq`` of the first job whose row is not before ``row``, by bisection: rows ascend with ``seq``, and no index
    covers rows."""
    low, high = 0, int(connection.execute(sa.select(_t.created_jobs).where(_t.id == task_id)).scalar() or 0)
    while low < high:
        middle = (low + high) // 2
        at = connection.execute(sa.select(_e.first_row).where(_e.task_id == task_id, _e.seq == middle)).scalar()
        low, high = (middle + 1, high) if at is not None and at < row else (low, middle)
    return low


def take_rows(
    connection: Connection,
    task: Mapping[str, Any],
    above: Mapping[int, Mapping[str, Any]],
    items: Sequence[NewItem],
    rejects: Sequence[Reject],
) -> tuple[list[NewItem], list[Reject]]:
    """Takes the rows that these items correct, and records the numbers of refused ones. Items that correct no row become
    rejects. ``above``: the ancestors of the Task, locked. Raises :class:`InputError` if a row of a strict list became
    refused since the check.
    """
    parent, task_id = above.get(task["resubmit_of"]), task["id"]
    if parent is None or parent["turning"] == PURGING:
        raise InputError(f"Task {task['resubmit_of']} was removed meanwhile", code="unknown_task")
    rows: list[NewItem | Reject] = [*items, *rejects]
    numbers = {each.number for each in rows if each.number is not None}
    origins, problems = find_corrected(connection, parent, numbers)
    earlier = (_r.task_id == task_id) & batches.among(connection, _r.number, list(numbers))
    first = {int(number): int(row) for number, row in connection.execute(sa.select(_r.number, _r.row).where(earlier))}
    is_strict = bool((loads(task["split_source"]) or {}).get("strict"))
    good: list[NewItem] = []
    bad = [each for each in rejects if each.number is None]
    new: list[tuple[Any, ...]] = []
    for each in sorted(rows, key=lambda each: each.row):
        if (number := each.number) is None:
            continue
        problem = problems.get(number)
        if number in first:
            params = {"number": number, "first": first[number]}
            problem = row_problem("duplicate_row", "resubmit.twice", params, number)
        first.setdefault(number, each.row)
        if problem is None or problem["code"] == _TAKEN:  # the report shows the number, also with the problem
            takes = problem is None and isinstance(each, NewItem)
            new.append((task_id, number, each.row, *origins[number], 1 if takes else None))
        if isinstance(each, Reject):
            bad.append(each if problem is None else replace(each, errors=[*each.errors, problem]))
        elif problem is None:
            good.append(each)
        elif is_strict:
            why = f"row {each.row} cannot be taken any more ({problem['code']}) since this strict list was checked"
            raise InputError(why, code=problem["code"])
        else:
            bad.append(Reject(each.row, [problem], each.values))
    batches.insert(connection, resubmitted_rows, ("task_id", "number", "row", "of_task", "of_row", "taken"), new)
    return good, sorted(bad, key=lambda each: each.row)


def any_taken(connection: Connection, task_id: int, event_id: int | None = None) -> bool:
    """Whether a list that corrects a Task has taken any row of it, or of the one Event, if given."""
    found = sa.select(_r.id).where(_r.of_task == task_id, _r.taken == 1).limit(1)
    if event_id is not None:
        found = found.where(sa.exists().where(_e.id == event_id, _r.of_row.between(_e.first_row, _e.last_row)))
    return connection.execute(found).first() is not None


def taken_between(connection: Connection, task_id: int, first_row: int, last_row: int) -> set[int]:
    """The rows of a Task from ``first_row`` to ``last_row`` that correcting lists have taken."""
    found = sa.select(_r.of_row).where(_r.of_task == task_id, _r.taken == 1, _r.of_row.between(first_row, last_row))
    return {int(row) for row in connection.execute(found).scalars()}


def count_taken(connection: Connection, task_id: int) -> int:
    """How many rows of a Task correcting lists have taken."""
    found = sa.select(sa.func.count()).where(_r.of_task == task_id, _r.taken == 1)
    return int(connection.execute(found).scalar_one())


def not_taken(task_id: int) -> Any:
    """The condition on ``events`` of a Task that no list has taken any row of the Event."""
    its_row = _r.of_row.between(_e.first_row, _e.last_row)
    return ~sa.exists().where(_r.of_task == task_id, its_row, _r.taken == 1)
