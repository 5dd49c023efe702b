"""The counts of a Task, sharded over slots so that processes do not contend for one hot row.

They move only in the transaction that changes the rows, by the deltas of :mod:`asynctask.core.transitions`. Lock order:
events first, then slots by (task_id, slot).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.core.transitions import Delta
from asynctask.database.tables import task_tallies

__all__ = ["FIELDS", "insert_new", "insert_or_add", "move", "total"]

FIELDS = tuple(Delta.__slots__)
_TOTAL = sa.select(*[sa.func.coalesce(sa.func.sum(task_tallies.c[f]), 0) for f in FIELDS]).where(
    task_tallies.c.task_id == sa.bindparam("task_id")
)


def insert_or_add(
    connection: Connection, table: sa.Table, keys: tuple[str, ...], added: tuple[str, ...], replaced: tuple[str, ...] = ()
) -> Any:
    """An INSERT that on a conflict of ``keys`` adds to ``added`` and sets ``replaced``."""
    return _insert_or_add(connection.dialect.name, table, keys, added, replaced)


def _insert_or_add(
    name: str, table: sa.Table, keys: tuple[str, ...], added: tuple[str, ...], replaced: tuple[str, ...]
) -> Any:
    into = _insert_of(name)(table)
    if name == "mariadb":
        sums: dict[str, Any] = {c: table.c[c] + into.inserted[c] for c in added}
        return into.on_duplicate_key_update({**sums, **{c: into.inserted[c] for c in replaced}})
    sums = {c: table.c[c] + into.excluded[c] for c in added}
    return into.on_conflict_do_update(index_elements=list(keys), set_={**sums, **{c: into.excluded[c] for c in replaced}})


def insert_new(dialect: str, table: sa.Table, keys: tuple[str, ...]) -> Any:
    """An INSERT that skips rows whose ``keys`` exist."""
    into = _insert_of(dialect)(table)
    if dialect == "mariadb":  # INSERT IGNORE would also hide other errors
        return into.on_duplicate_key_update({keys[0]: table.c[keys[0]]})
    return into.on_conflict_do_nothing(index_elements=list(keys))


def _insert_of(name: str) -> Any:
    """The INSERT of a dialect, imported only for the database in use."""
    if name == "mariadb":
        from sqlalchemy.dialects.mysql import insert
    elif name == "sqlite":
        from sqlalchemy.dialects.sqlite import insert  # type: ignore[assignment]
    else:
        from sqlalchemy.dialects.postgresql import insert  # type: ignore[assignment]
    return insert


def move(connection: Connection, deltas: Mapping[tuple[int, int], Delta], now: int) -> None:
    """Adds deltas to counts, by (task id, slot). Every move raises the Task's version."""
    rows = [
        {"task_id": task_id, "slot": slot, "version": 1, "updated_at": now, **{f: getattr(delta, f) for f in FIELDS}}
        for (task_id, slot), delta in sorted(deltas.items())
        if delta
    ]
    if rows:
        connection.execute(_move(connection.dialect.name), rows)


@cache
def _move(dialect: str) -> Any:
    """Cached: every flush runs it."""
    return _insert_or_add(dialect, task_tallies, ("task_id", "slot"), ("version", *FIELDS), ("updated_at",))


def total(connection: Connection, task_id: int) -> Delta:
    """The counts of one Task, summed over its slots."""
    row = connection.execute(_TOTAL, {"task_id": task_id}).one()
    return Delta(*(int(value) for value in row))
