"""The statements of each database on the table ``jobs``: push and exchange.

``exchange`` limits the throughput, so it is hand-written for each:

==========  =========================================================================================================
SQLite      one immediate transaction, without other writers; claimed rows leave nothing behind in the index
PostgreSQL  one call of a function, which is a transaction of its own
MariaDB     a query without locks, then one compound statement
==========  =========================================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Protocol

import orjson
import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Connection

from asynctask.brokers.base import Copy
from asynctask.brokers.sql.copies import COLUMNS, COPY, FIRST, LAST, Range, Row, copy_of, parts
from asynctask.database.batches import among, fetch_small, has_statistics, json_each, json_rows, json_table, sendable, texts
from asynctask.database.engine import Database
from asynctask.database.retrying import TransactionConflict, repeatable
from asynctask.database.tables import jobs
from asynctask.errors import LedgerUnavailable

_j = jobs.c

_INSERT: Final = (
    f"INSERT INTO jobs ({', '.join(COLUMNS)}) SELECT * FROM {json_each(len(COLUMNS))} WHERE TRUE"  # noqa: S608
    " ON CONFLICT (jid, attempt) DO NOTHING"
)
# The given rows first, so each is one look-up by key.
_REMOVE: Final = (
    f"DELETE FROM jobs WHERE id IN (SELECT t.id FROM {json_each(3)} CROSS JOIN jobs AS t"  # noqa: S608
    " ON t.id = d.d0 AND t.jid = d.d1 AND t.attempt = d.d2 WHERE t.process = ?)"
)
_REMOVE_EACH: Final = "DELETE FROM jobs WHERE id = ? AND jid = ? AND attempt = ? AND process = ?"
_FIRST: Final = sa.select(
    *(
        sa.select(*(_j[name] for name in COPY), _j.waits)
        .where(_j.queue == sa.bindparam("of"), _j.waits < sa.bindparam("until"))
        .order_by(_j.waits, _j.id)
        .limit(sa.bindparam("count"))
        .subquery()
        .c
    )
)


@dataclass(slots=True)
class Taken:
    """The result of a claim: the copies in order, (queue, previous ``waits``, id) of each, and the spread that it needed
    (see :class:`~asynctask.brokers.sql.copies.Heads`)."""

    copies: list[Copy]
    places: list[tuple[str, int, int]]
    spread: int = 0


class JobsTable(Protocol):
    """The table ``jobs`` of one database."""

    def insert(self, connection: Connection, rows: Sequence[Row]) -> None:
        """Inserts rows in this order, in the caller's transaction; skips those whose key exists."""
        ...

    def exchange(self, process: str, done: Sequence[Copy], ranges: Sequence[Range], limit: int, spread: int) -> Taken:
        """Removes ``done`` from the process's list and claims up to ``limit`` waiting copies in ``ranges``.

        ``spread``: begins at a random one of that many first copies, if enough have the same priority.
        """
        ...

    def remove(self, connection: Connection, process: str, copies: Sequence[Copy]) -> None:
        """Removes copies from the process's list."""
        ...


class SqliteJobs:
    """SQLite: the write transaction excludes other writers."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def insert(self, connection: Connection, rows: Sequence[Row]) -> None:
        for text in texts([[row[name] for name in COLUMNS] for row in rows]):
            connection.exec_driver_sql(_INSERT, (text,))

    def exchange(self, process: str, done: Sequence[Copy], ranges: Sequence[Range], limit: int, spread: int) -> Taken:
        if not done and (limit <= 0 or not self._anything_waits(ranges)):
            return Taken([], [])  # else every idle process would queue for the write lock
        found: list[Any] = []
        with self._database.write() as connection:
            self.remove(connection, process, done)
            for each in ranges:
                if len(found) >= limit:
                    break
                values = {"of": each.queue, "until": each.until, "count": limit - len(found)}
                first_ones = fetch_small(connection, _FIRST, values)
                found += sorted(first_ones, key=lambda row: (row[-1], row[0]))
            if found:
                taken = among(connection, _j.id, [row[0] for row in found])
                connection.execute(jobs.update().where(taken).values(process=process, waits=None))
        return Taken([copy_of(row[:-1]) for row in found], [])

    def _anything_waits(self, ranges: Sequence[Range]) -> bool:
        queues, until = [each.queue for each in ranges], max((each.until for each in ranges), default=LAST)
        with self._database.read() as connection:
            found = sa.select(sa.literal(1)).where(_j.queue.in_(queues), _j.waits < until).limit(1)
            return connection.execute(found).first() is not None

    def remove(self, connection: Connection, process: str, copies: Sequence[Copy]) -> None:
        if copies:
            # By key too: SQLite reuses an id once the table's last row is deleted.
            rows = [(c.handle, c.jid, c.attempt) for c in copies]
            if has_statistics(connection):
                connection.exec_driver_sql(_REMOVE_EACH, [(*row, process) for row in rows])
                return
            for text in texts(rows):
                connection.exec_driver_sql(_REMOVE, (text, process))


# -- MariaDB: an exchange is one compound statement
#
# * The first waiting copies are found at READ UNCOMMITTED without locks and then locked by id. A locking read of the index
#   would stop at, and lock, every entry that others claimed; with a hundred processes nothing else would happen.
#   Uncommitted reads see concurrent claims at once; the locking read decides. (SELECT ... INTO, because the right side of a
#   SET would lock what it reads.)
# * Rows are changed by key (``FORCE INDEX (PRIMARY)``): of a short table MariaDB would read every row, and wait for locks.
# * The claim's index is forced: with statistics of an empty queue MariaDB would choose another one, and sort.
# * ``ON DUPLICATE KEY UPDATE id = id`` rather than ``INSERT IGNORE``, which hides other errors and truncates values.
# * A claim is not marked (see :mod:`asynctask.database.engine`): if its answer is lost, the process reads its list.

_INSERT_MARIADB: Final = (
    f"INSERT INTO jobs ({', '.join(COLUMNS)}) SELECT {', '.join(f'd{n}' for n in range(len(COLUMNS)))}"  # noqa: S608
    f" FROM {json_table([jobs.c[name] for name in COLUMNS])} ON DUPLICATE KEY UPDATE jobs.id = jobs.id"
)
# By key: the index on process covers more rows.
_REMOVE_MARIADB: Final = "DELETE t FROM jobs AS t FORCE INDEX (PRIMARY) WHERE t.id IN %s AND CONCAT(t.process, '') = %s"

_BEGIN_MARIADB: Final = """BEGIN NOT ATOMIC
DECLARE missing, spread, tries, begin_at, seen, taken INT DEFAULT 0;
DECLARE top BIGINT;
DECLARE ids LONGTEXT;
DECLARE owner VARCHAR(64) DEFAULT %s;
DECLARE CONTINUE HANDLER FOR NOT FOUND BEGIN END;
DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
SET missing = %s, spread = %s;
SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED;
START TRANSACTION;
"""
_END_MARIADB: Final = """COMMIT;
SELECT spread, taken;
END"""
_PACKED_BYTES: Final = 750_000
"""Bytes of payloads, JSON-quoted, that are sent as one text: each row of an answer costs the driver microseconds. With the
other columns of 1,000 copies it stays below a megabyte; the server truncates what exceeds its packet size."""

# Claims from one queue, among the copies of the smallest priority, with a random offset below ``spread``. If too few are
# left behind the offset, the last try covers the whole queue from its head. ``ids`` are numbers read from the table.
_CLAIM_MARIADB: Final = """IF missing > 0 THEN
SET tries = 0, top = NULL;
SELECT waits INTO top FROM jobs FORCE INDEX (ix_jobs_waiting) WHERE {where} ORDER BY waits, id LIMIT 1;
WHILE missing > 0 AND top IS NOT NULL AND tries < 5 DO
SET tries = tries + 1, top = IF(tries < 5, top, {last}), begin_at = IF(tries < 5, FLOOR(RAND() * spread), 0);
SELECT GROUP_CONCAT(id), COUNT(*) INTO ids, seen FROM (
  SELECT id FROM jobs FORCE INDEX (ix_jobs_waiting) WHERE {where} AND waits <= top
  ORDER BY waits, id LIMIT missing OFFSET begin_at) AS first_ones;
SET @asynctask_ids = NULL, @asynctask_got = 0;
IF seen > 0 THEN
EXECUTE IMMEDIATE CONCAT('SELECT GROUP_CONCAT(id), COUNT(*) INTO @asynctask_ids, @asynctask_got FROM (',
  'SELECT id FROM jobs FORCE INDEX (PRIMARY) WHERE id IN (', ids, ') AND waits IS NOT NULL',
  ' FOR UPDATE SKIP LOCKED) AS locked');
END IF;
IF @asynctask_got > 0 THEN
SET taken = taken + @asynctask_got;
EXECUTE IMMEDIATE CONCAT('SELECT SUM(LENGTH(JSON_QUOTE(payload))) INTO @asynctask_size',
  ' FROM jobs WHERE id IN (', @asynctask_ids, ')');
IF @asynctask_size <= {together} THEN
EXECUTE IMMEDIATE CONCAT('SELECT JSON_ARRAYAGG(JSON_ARRAY({copy}, waits)) FROM jobs WHERE id IN (', @asynctask_ids, ')');
ELSE
EXECUTE IMMEDIATE CONCAT('SELECT JSON_ARRAY(JSON_ARRAY({copy}, waits)) FROM jobs WHERE id IN (', @asynctask_ids, ')');
END IF;
EXECUTE IMMEDIATE CONCAT('UPDATE jobs FORCE INDEX (PRIMARY) SET process = ?, waits = NULL',
  ' WHERE id IN (', @asynctask_ids, ')') USING owner;
END IF;
IF @asynctask_got < seen THEN
SET spread = LEAST(GREATEST(2 * spread, 4 * {limit}), 20000);
IF @asynctask_got > 0 THEN
SET missing = 0;
END IF;
ELSEIF seen = missing THEN
SET missing = 0;
ELSE
SET missing = missing - @asynctask_got;
IF seen = 0 AND spread > 0 THEN
SET spread = spread DIV 4;
ELSE
SET tries = GREATEST(tries, 4);
END IF;
END IF;
END WHILE;
END IF;
"""


def _where(ranges: Sequence[Range]) -> tuple[str, list[Any]]:
    """The condition of a queue's ranges; the optimizer makes one ordered pass over its index of it."""
    alternatives, values = [], []
    for each in ranges:
        if each.waits != FIRST:
            alternatives.append("(waits = %s AND id > %s)")
            values += [each.waits, each.id]
        alternatives.append("(waits > %s AND waits < %s)")
        values += [each.waits, each.until]
    return f"queue = %s AND ({' OR '.join(alternatives)})", [ranges[0].queue, *values]


def look_statement(ranges: Sequence[Range]) -> tuple[str, list[Any]]:
    """A statement that finds one of a queue's copies in ``ranges``, and its values."""
    where, values = _where(ranges)
    return (
        f"SELECT id FROM jobs FORCE INDEX (ix_jobs_waiting) WHERE {where} ORDER BY waits, id LIMIT 1"  # noqa: S608
    ), values


def exchange_statement(
    process: str, done: Sequence[Copy], queues: Sequence[Sequence[Range]], limit: int, spread: int
) -> tuple[str, list[Any]]:
    """The compound statement of an exchange, and its values. Its results: copies for each batch claimed, then one row with
    the spread that it needed and the number of copies."""
    text = [_BEGIN_MARIADB]
    values: list[Any] = [process, max(0, limit), spread]
    for part in parts([copy.handle for copy in done]):
        text.append(_REMOVE_MARIADB + ";\n")
        values += [list(part), process]
    for ranges in queues:
        where, these = _where(ranges)
        text.append(
            _CLAIM_MARIADB.format(where=where, copy=", ".join(COPY), limit=int(limit), last=LAST, together=_PACKED_BYTES)
        )
        values += [*these, *these]
    return "".join([*text, _END_MARIADB]), values


class MariadbJobs:
    """The table ``jobs`` on MariaDB."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def insert(self, connection: Connection, rows: Sequence[Row]) -> None:
        for text in sendable(connection, [[row[name] for name in COLUMNS] for row in rows]):
            connection.exec_driver_sql(_INSERT_MARIADB, (text,))

    def exchange(self, process: str, done: Sequence[Copy], ranges: Sequence[Range], limit: int, spread: int) -> Taken:
        queues: dict[str, list[Range]] = {}
        for each in ranges if limit > 0 else ():
            queues.setdefault(each.queue, []).append(each)
        if not done and not self._anything_waits(queues):
            return Taken([], [])
        statement, values = exchange_statement(process, done, list(queues.values()), limit, spread)
        results = self._exchange(statement, values)
        order = {queue: number for number, queue in enumerate(queues)}
        (apart, taken), *_ = results[-1]
        rows = sorted(_rows(results[:-1], int(taken)), key=lambda row: (order[row[3]], row[-1], row[0]))
        places = [(row[3], row[-1], row[0]) for row in rows]
        return Taken([copy_of(row[:-1]) for row in rows], places, int(apart))

    @repeatable
    def _exchange(self, statement: str, values: Sequence[Any]) -> list[list[Any]]:
        try:
            with self._database.read() as connection:
                return _results(connection, statement, values)
        except LedgerUnavailable as error:
            # A deadlock or lock timeout rolled it back: repeat. If only the answer was lost, the claimed copies are in this
            # process's list and are found there.
            cause = error.__cause__
            if isinstance(cause, exc.DBAPIError) and cause.orig is not None and cause.orig.args[:1] in ((1205,), (1213,)):
                raise TransactionConflict(str(error)) from cause
            raise

    def _anything_waits(self, queues: dict[str, list[Range]]) -> bool:
        """A query is cheaper for an idle process than an empty transaction."""
        if not queues:
            return False
        with self._database.read() as connection:
            for ranges in queues.values():
                statement, values = look_statement(ranges)
                if connection.exec_driver_sql(statement, tuple(values)).first() is not None:
                    return True
        return False

    def remove(self, connection: Connection, process: str, copies: Sequence[Copy]) -> None:
        for part in parts([copy.handle for copy in copies]):
            connection.exec_driver_sql(_REMOVE_MARIADB, (list(part), process))


def _rows(results: Sequence[Sequence[Any]], taken: int) -> list[Any]:
    """The copies in the results. A truncated JSON text may still parse, so the count is compared, too."""
    found: list[Any] = []
    with suppress(orjson.JSONDecodeError):
        found = list(chain.from_iterable(json_rows(text for rows in results for (text,) in rows)))
    if len(found) != taken:
        raise LedgerUnavailable(
            f"the server gave {len(found)} whole copies of {taken} that it had taken; set its max_allowed_packet to"
            " 4M at least (they stay in this process's list, and are looked for there)"
        )
    return found


def _results(connection: Connection, statement: str, values: Sequence[Any]) -> list[list[Any]]:
    """Every result set of a statement; raises the driver's errors as SQLAlchemy does."""
    driver: Any = connection.connection.driver_connection
    error_class: Any = connection.dialect.loaded_dbapi.Error
    found = []
    try:
        with driver.cursor() as cursor:
            cursor.execute(statement, tuple(values))
            while True:
                if cursor.description is not None:
                    found.append(list(cursor.fetchall()))
                if not cursor.nextset():
                    return found
    except error_class as error:
        lost = connection.dialect.is_disconnect(error, driver, None)
        if lost:
            connection.invalidate(error)
        raise exc.OperationalError(statement, None, error, connection_invalidated=lost) from error


# -- PostgreSQL: an exchange is one statement, so one transaction and one round trip
#
# The work is in the function ``asynctask_exchange`` of the schema (``migrations/versions/0002_wider.py``). A function can
# keep its plans and force them to use indexes. A plan that a session made while the table was empty, which is the usual
# state of a queue, would scan and sort the whole table until the next ANALYZE; planning each time would double the cost of
# a small exchange.

# Locks in the order of the key, so that concurrent pushes of the same copies cannot deadlock. Ids ascend in the order of
# the copies, because they order the queue.
_INSERT_POSTGRESQL: Final = """
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

_REMOVE_POSTGRESQL: Final = "DELETE FROM jobs WHERE id = ANY(%(done)s::bigint[]) AND coalesce(process, '') = %(process)s"


def exchange_values(process: str, done: Sequence[Copy], ranges: Sequence[Range], limit: int, spread: int) -> dict[str, Any]:
    """The values of :data:`EXCHANGE`."""
    return {
        "process": process,
        "done": [copy.handle for copy in done],
        "limit": max(0, limit),
        "spread": spread,
        "queues": [each.queue for each in ranges],
        "waits": [each.waits for each in ranges],
        "ids": [each.id for each in ranges],
        "until": [each.until for each in ranges],
    }


class PostgresqlJobs:
    """The table ``jobs`` on PostgreSQL."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def insert(self, connection: Connection, rows: Sequence[Row]) -> None:
        for text in texts(rows):  # not arrays, which the driver formats in Python, value by value
            connection.exec_driver_sql(_INSERT_POSTGRESQL, (text,))

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
            connection.exec_driver_sql(_REMOVE_POSTGRESQL, {"done": [copy.handle for copy in copies], "process": process})
