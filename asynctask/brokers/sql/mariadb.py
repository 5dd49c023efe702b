"""MariaDB: an exchange is one compound statement, sent at once and over at once.

What had to be forced, and why:

* the first copies that wait are looked up without a lock, at READ UNCOMMITTED, and then locked by their id. A locking read
  of the index would stop at every entry of what others have taken, and lock it: with a hundred processes nothing else would
  be done. Uncommitted reads see at once what others are taking; the lock is what decides, and is asked again. (The look is
  a SELECT ... INTO: as the right side of a SET it would lock what it reads.)
* rows are changed by their key (``FORCE INDEX (PRIMARY)``): a short table would be read as a whole, and others waited for;
* the index of the claim (``FORCE INDEX``): with statistics of an empty queue another one would be chosen, and sorted;
* ``ON DUPLICATE KEY UPDATE id = id`` rather than ``INSERT IGNORE``, which would hide every other error as well and cut off
  what is too long;
* a claim is not marked (see :mod:`asynctask.database.engine`): where its answer is lost, the process looks into its list.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Final

import orjson
from sqlalchemy import exc
from sqlalchemy.engine import Connection

from asynctask.brokers.base import Copy, Key
from asynctask.brokers.sql.heads import FIRST, LAST, Range
from asynctask.brokers.sql.rows import COLUMNS, COPY, Row, copy_of, parts
from asynctask.brokers.sql.tables import Taken
from asynctask.database.batches import json_rows, sendable
from asynctask.database.engine import Database
from asynctask.database.retrying import TransactionConflict, repeatable
from asynctask.database.statements import json_table
from asynctask.database.tables import jobs
from asynctask.errors import LedgerUnavailable

__all__ = ["MariadbJobs", "exchange_statement", "look_statement"]

_INSERT: Final = (
    f"INSERT INTO jobs ({', '.join(COLUMNS)}) SELECT {', '.join(f'd{n}' for n in range(len(COLUMNS)))}"  # noqa: S608
    f" FROM {json_table([jobs.c[name] for name in COLUMNS])} ON DUPLICATE KEY UPDATE jobs.id = jobs.id"
)
# By the key: the index on process is wider than the few rows that are meant.
_REMOVE: Final = "DELETE t FROM jobs AS t FORCE INDEX (PRIMARY) WHERE t.id IN %s AND CONCAT(t.process, '') = %s"
_FIND: Final = (
    "SELECT id, jid, attempt FROM jobs FORCE INDEX (ix_jobs_task) WHERE task_id = %s AND waits IS NOT NULL"
    " LIMIT %s FOR UPDATE SKIP LOCKED"
)
_WITHDRAW: Final = "DELETE t FROM jobs AS t FORCE INDEX (PRIMARY) WHERE t.id IN %s"

_BEGIN: Final = """BEGIN NOT ATOMIC
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
_END: Final = """COMMIT;
SELECT spread, taken;
END"""
_TOGETHER: Final = 750_000
"""Bytes of payloads, as they stand there, that come as one text: each row of an answer costs the driver microseconds. With
the other columns of 1,000 copies it is below a megabyte. What is longer than its packets the server would cut off."""

# One queue. The first copies are those of the smallest priority; where many claim at once, each begins at another of them.
# What is missing then, because there are too few of them, is sought once more from the head of the queue, in all of it.
# The ids in the inner statements are numbers that come from the table.
_QUEUE: Final = """IF missing > 0 THEN
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
    """What lies in a queue's ranges; the optimizer makes one pass over the index of it, in order."""
    alternatives, values = [], []
    for each in ranges:
        if each.waits != FIRST:
            alternatives.append("(waits = %s AND id > %s)")
            values += [each.waits, each.id]
        alternatives.append("(waits > %s AND waits < %s)")
        values += [each.waits, each.until]
    return f"queue = %s AND ({' OR '.join(alternatives)})", [ranges[0].queue, *values]


def look_statement(ranges: Sequence[Range]) -> tuple[str, list[Any]]:
    """The statement that finds one of a queue's copies in ``ranges``, and its values."""
    where, values = _where(ranges)
    return (
        f"SELECT id FROM jobs FORCE INDEX (ix_jobs_waiting) WHERE {where} ORDER BY waits, id LIMIT 1"  # noqa: S608
    ), values


def exchange_statement(
    process: str, done: Sequence[Copy], queues: Sequence[Sequence[Range]], limit: int, spread: int
) -> tuple[str, list[Any]]:
    """The compound statement of an exchange, and its values. It gives rows of copies as often as it takes any, then how far
    it had to go apart, and how many it took."""
    text = [_BEGIN]
    values: list[Any] = [process, max(0, limit), spread]
    for part in parts([copy.handle for copy in done]):
        text.append(_REMOVE + ";\n")
        values += [list(part), process]
    for ranges in queues:
        where, these = _where(ranges)
        text.append(_QUEUE.format(where=where, copy=", ".join(COPY), limit=int(limit), last=LAST, together=_TOGETHER))
        values += [*these, *these]
    return "".join([*text, _END]), values


class MariadbJobs:
    """The table ``jobs`` on MariaDB."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def insert(self, connection: Connection, rows: Sequence[Row]) -> None:
        for text in sendable(connection, [[row[name] for name in COLUMNS] for row in rows]):
            connection.exec_driver_sql(_INSERT, (text,))

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
            # Undone for the sake of another transaction: the same again. Where the answer was lost it may stand: what it
            # took is in this process's list, and is looked for there.
            cause = error.__cause__
            if isinstance(cause, exc.DBAPIError) and cause.orig is not None and cause.orig.args[:1] in ((1205,), (1213,)):
                raise TransactionConflict(str(error)) from cause
            raise

    def _anything_waits(self, queues: dict[str, list[Range]]) -> bool:
        """A transaction for nothing would cost an idle process more than a look."""
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
            connection.exec_driver_sql(_REMOVE, (list(part), process))

    @repeatable
    def withdraw(self, task_id: int, limit: int) -> list[Key]:
        with self._database.write() as connection:
            rows = connection.exec_driver_sql(_FIND, (task_id, limit)).all()
            for part in parts([row[0] for row in rows]):
                connection.exec_driver_sql(_WITHDRAW, (list(part),))
        return [(jid, attempt) for _, jid, attempt in rows]


def _rows(results: Sequence[Sequence[Any]], taken: int) -> list[Any]:
    """The copies that an exchange gave. One that the server cut off may look whole: it closes the list all the same."""
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
    """Every table that a statement gives; errors of the driver as SQLAlchemy would tell them."""
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
