"""How each kind of database is talked to about the table ``jobs``: pushing, the exchange, withdrawing.

``exchange`` is the statement that everything else waits for, so it is written for each by hand:

==========  =========================================================================================================
SQLite      one immediate transaction; no other writer is there, and what was taken leaves nothing behind
PostgreSQL  :mod:`asynctask.brokers.sql.postgresql`: one call of a function, which is a transaction of its own
MariaDB     :mod:`asynctask.brokers.sql.mariadb`: a look, then a short transaction
==========  =========================================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.brokers.base import Copy, Key
from asynctask.brokers.sql.heads import Range
from asynctask.brokers.sql.rows import COLUMNS, COPY, Row, copy_of
from asynctask.database.batches import among, fetch_small, has_statistics, texts
from asynctask.database.engine import Database
from asynctask.database.statements import json_each
from asynctask.database.tables import jobs

__all__ = ["JobsTable", "SqliteJobs", "Taken"]

_j = jobs.c

_INSERT: Final = (
    f"INSERT INTO jobs ({', '.join(COLUMNS)}) SELECT * FROM {json_each(len(COLUMNS))} WHERE TRUE"  # noqa: S608
    " ON CONFLICT (jid, attempt) DO NOTHING"
)
# The rows that are given come first: each is one look at the key.
_REMOVE: Final = (
    f"DELETE FROM jobs WHERE id IN (SELECT t.id FROM {json_each(3)} CROSS JOIN jobs AS t"  # noqa: S608
    " ON t.id = d.d0 AND t.jid = d.d1 AND t.attempt = d.d2 WHERE t.process = ?)"
)
_REMOVE_EACH: Final = "DELETE FROM jobs WHERE id = ? AND jid = ? AND attempt = ? AND process = ?"
_FIRST: Final = sa.select(
    *(
        sa.select(*(_j[name] for name in COPY), _j.waits)
        .where(_j.queue == sa.bindparam("of"), _j.waits.is_not(None))
        .order_by(_j.waits, _j.id)
        .limit(sa.bindparam("count"))
        .subquery()
        .c
    )
)


@dataclass(slots=True)
class Taken:
    """What a claim gave: the copies in order, (queue, ``waits`` before, id) of each, and how far apart
    the claimers had to go (see :class:`~asynctask.brokers.sql.heads.Heads`)."""

    copies: list[Copy]
    places: list[tuple[str, int, int]]
    spread: int = 0


class JobsTable(Protocol):
    """The table ``jobs`` of one database."""

    def insert(self, connection: Connection, rows: Sequence[Row]) -> None:
        """New rows in this order, in the caller's transaction; those whose key is there already are left as they are."""
        ...

    def exchange(self, process: str, done: Sequence[Copy], ranges: Sequence[Range], limit: int, spread: int) -> Taken:
        """Removes ``done`` from the process's list and takes up to ``limit`` of what waits in ``ranges`` into it.

        ``spread``: it begins at any of so many of the first ones, if there are enough of the same priority.
        """
        ...

    def remove(self, connection: Connection, process: str, copies: Sequence[Copy]) -> None:
        """Removes copies from the process's list."""
        ...

    def withdraw(self, task_id: int, limit: int) -> list[Key]:
        """Removes up to ``limit`` waiting copies of a Task."""
        ...


class SqliteJobs:
    """SQLite: the write transaction keeps everybody else out."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def insert(self, connection: Connection, rows: Sequence[Row]) -> None:
        for text in texts([[row[name] for name in COLUMNS] for row in rows]):
            connection.exec_driver_sql(_INSERT, (text,))

    def exchange(self, process: str, done: Sequence[Copy], ranges: Sequence[Range], limit: int, spread: int) -> Taken:
        queues = [each.queue for each in ranges]
        if not done and (limit <= 0 or not self._anything_waits(queues)):
            return Taken([], [])  # a write transaction for nothing would make every idle process queue for the write lock
        found: list[Any] = []
        with self._database.write() as connection:
            self.remove(connection, process, done)
            for queue in queues:
                if len(found) >= limit:
                    break
                first_ones = fetch_small(connection, _FIRST, {"of": queue, "count": limit - len(found)})
                found += sorted(first_ones, key=lambda row: (row[-1], row[0]))
            if found:
                taken = among(connection, _j.id, [row[0] for row in found])
                connection.execute(jobs.update().where(taken).values(process=process, waits=None))
        return Taken([copy_of(row[:-1]) for row in found], [])

    def _anything_waits(self, queues: Sequence[str]) -> bool:
        with self._database.read() as connection:
            found = sa.select(sa.literal(1)).where(_j.queue.in_(queues), _j.waits.is_not(None)).limit(1)
            return connection.execute(found).first() is not None

    def remove(self, connection: Connection, process: str, copies: Sequence[Copy]) -> None:
        if copies:
            # By its key too: an id is given again once the last row of the table is gone.
            rows = [(c.handle, c.jid, c.attempt) for c in copies]
            if has_statistics(connection):
                connection.exec_driver_sql(_REMOVE_EACH, [(*row, process) for row in rows])
                return
            for text in texts(rows):
                connection.exec_driver_sql(_REMOVE, (text, process))

    def withdraw(self, task_id: int, limit: int) -> list[Key]:
        with self._database.write() as connection:
            waiting = sa.select(_j.id).where(_j.task_id == task_id, _j.waits.is_not(None)).limit(limit)
            gone = connection.execute(jobs.delete().where(_j.id.in_(waiting)).returning(_j.jid, _j.attempt))
            return [(jid, attempt) for jid, attempt in gone]
