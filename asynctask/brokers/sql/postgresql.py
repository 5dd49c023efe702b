"""PostgreSQL: an exchange is one statement, and a statement alone is a transaction: one round trip, and locks for as long
as it runs.

What it does is in the function ``asynctask_exchange`` of the schema (``migrations/versions/0002_wider.py``). In a function,
plans can be kept *and* kept to the indexes. A plan that a session kept from the time when the table was empty, which is how
a queue spends its life, would read the whole table and sort it until the next ANALYZE; to plan anew each time would double
what a small exchange costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy.engine import Connection

from asynctask.brokers.base import Copy, Key
from asynctask.brokers.sql.heads import Range
from asynctask.brokers.sql.rows import Row, copy_of
from asynctask.brokers.sql.tables import Taken
from asynctask.database.batches import texts
from asynctask.database.engine import Database

__all__ = ["EXCHANGE", "WITHDRAW", "PostgresqlJobs", "exchange_values"]

# Locks in the order of the key, whoever pushes: two pushes of the same copies cannot wait for each other. The ids follow
# the order of the copies, for they are the order of the queue.
_INSERT: Final = """
INSERT INTO jobs (id, jid, attempt, queue, priority, task_id, held_in, run_at, deaths, payload, waits)
SELECT id, jid, attempt, queue, priority, task_id, held_in, run_at, deaths, payload, waits FROM (
  SELECT nextval('jobs_id_seq') AS id, d.* FROM (
    SELECT * FROM ROWS FROM (json_to_recordset(%s::json) AS (jid text, attempt int, queue text, priority int,
      task_id bigint, held_in text, run_at bigint, deaths int, payload text, waits bigint)) WITH ORDINALITY
      AS u (jid, attempt, queue, priority, task_id, held_in, run_at, deaths, payload, waits, n) ORDER BY n
  ) AS d OFFSET 0
) AS numbered ORDER BY jid, attempt, n
ON CONFLICT (jid, attempt) DO NOTHING
"""

EXCHANGE: Final = (
    "SELECT * FROM asynctask_exchange(%(process)s, %(done)s::bigint[], %(queues)s::text[], %(waits)s::bigint[],"
    " %(ids)s::bigint[], %(until)s::bigint[], %(limit)s::integer, %(spread)s::integer)"
)

_REMOVE: Final = "DELETE FROM jobs WHERE id = ANY(%(done)s::bigint[]) AND coalesce(process, '') = %(process)s"

WITHDRAW: Final = """
WITH picked AS MATERIALIZED (
  SELECT id FROM jobs WHERE task_id = %(task_id)s AND waits IS NOT NULL LIMIT %(limit)s FOR UPDATE SKIP LOCKED
)
DELETE FROM jobs WHERE id = ANY(ARRAY(SELECT id FROM picked)) RETURNING jid, attempt
"""


def exchange_values(process: str, done: Sequence[Copy], ranges: Sequence[Range], limit: int, spread: int) -> dict[str, Any]:
    """The values of :data:`EXCHANGE`."""
    return {
        "process": process, "done": [copy.handle for copy in done], "limit": max(0, limit), "spread": spread,
        "queues": [each.queue for each in ranges], "waits": [each.waits for each in ranges],
        "ids": [each.id for each in ranges], "until": [each.until for each in ranges],
    }  # fmt: skip


class PostgresqlJobs:
    """The table ``jobs`` on PostgreSQL."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def insert(self, connection: Connection, rows: Sequence[Row]) -> None:
        for text in texts(rows):  # not as arrays: the driver writes those in Python, one value after the other
            connection.exec_driver_sql(_INSERT, (text,))

    def exchange(self, process: str, done: Sequence[Copy], ranges: Sequence[Range], limit: int, spread: int) -> Taken:
        if not done and limit <= 0:
            return Taken([], [])
        values = exchange_values(process, done, ranges, limit, spread)
        with self._database.read() as connection:
            found = connection.exec_driver_sql(EXCHANGE, values).all()
        rows = sorted(found, key=lambda row: (row[9], row[8], row[0]))
        places = [(row[3], row[8], row[0]) for row in rows]
        return Taken([copy_of(row[:8]) for row in rows], places, max((row[10] for row in rows), default=spread))

    def remove(self, connection: Connection, process: str, copies: Sequence[Copy]) -> None:
        if copies:
            connection.exec_driver_sql(_REMOVE, {"done": [copy.handle for copy in copies], "process": process})

    def withdraw(self, task_id: int, limit: int) -> list[Key]:
        with self._database.read() as connection:
            gone = connection.exec_driver_sql(WITHDRAW, {"task_id": task_id, "limit": limit}).all()
        return [(jid, attempt) for jid, attempt in gone]
