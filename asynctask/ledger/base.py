"""What every function of the ledger works with."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, Final

import orjson
import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Connection

from asynctask.clock import Clock, Ids, SystemClock, SystemIds, rfc3339
from asynctask.database import batches
from asynctask.database.engine import Database, DatabaseTime
from asynctask.database.retrying import LOCKED, code_of, repeatable
from asynctask.database.tables import as_dict, tasks
from asynctask.messages import Catalogue

__all__ = [
    "MAX_ID",
    "MAX_SLOTS",
    "SLOTS_FROM",
    "Held",
    "Ledger",
    "dumps",
    "each_free",
    "in_range",
    "is_held",
    "loads",
    "stamp",
    "stamps",
    "try_lock",
]

# -- Locks on Tasks' rows for whoever works in the background: a row that somebody else holds is left, and come back to.
#
# A user's own call waits for the row of its Task (:func:`asynctask.ledger.tasks.lock`). The dispatcher, the recorder and
# the sweep must not: one row that is held for long (by a session at the database's prompt, by a process that was stopped
# inside a transaction) would keep every other Task waiting. They wait :data:`PATIENCE_S`, longer than transactions of
# this program take, and for a row that they waited for in vain only once in :data:`AGAIN_S`.
#
# Several rows are locked in the order of their ids, by one statement that passes over what is held.
#
# On SQLite one transaction writes at a time and nothing smaller than the file is locked.

PATIENCE_S: Final = 0.1
AGAIN_S: Final = 1.0

_t = tasks.c
_ONE: Final = sa.select(tasks).where(_t.id == sa.bindparam("task_id"))
_FREE: Final = _ONE.with_for_update(skip_locked=True)
# The limit holds for this one statement; innodb_lock_wait_timeout knows whole seconds only.
_PATIENT_MARIADB: Final = sa.text(
    "SET STATEMENT max_statement_time = :patience FOR SELECT tasks.* FROM tasks WHERE id = :task_id FOR UPDATE"
)
_NOT_HAD: Final = frozenset({"55P03", LOCKED, 1969})
"""PostgreSQL: lock timeout. MariaDB: lock wait timeout, statement interrupted by its time limit."""


class Held:
    """What one process knows of Tasks whose rows others hold, and what it has to come back to.

    Nothing of it is written down: when the process ends, the sweep finds the same (``ready.repair``, ``sessions.repair``).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_vain: set[int] = set()
        self._again_at = 0.0
        self._hints: dict[int, int | None] = {}
        self._sessions: set[str] = set()

    def worth_waiting(self, task_id: int, now: float) -> bool:
        """Whether somebody should wait for the row: not where that was in vain a moment before ``now`` (monotonic)."""
        with self._lock:
            return task_id not in self._in_vain or now >= self._again_at

    def waited(self, task_id: int, now: float, *, had: bool) -> None:
        """The row was locked (``had``), or waited for in vain, ``now`` (monotonic)."""
        with self._lock:
            if had:
                self._in_vain.discard(task_id)
            else:
                self._in_vain.add(task_id)
                self._again_at = now + AGAIN_S

    def keep_hint(self, task_id: int, due: int | None) -> None:
        """Something of this Task may be dispatched, now or when it is ``due``, and its row could not be told so."""
        with self._lock:
            known = self._hints.get(task_id)
            self._hints[task_id] = due if known is None else known if due is None else min(known, due)

    def keep_session(self, key: str) -> None:
        """The session of this key may pass on, but who is first in its line is held."""
        with self._lock:
            self._sessions.add(key)

    @property
    def keeps(self) -> bool:
        """Whether there is something to come back to."""
        return bool(self._hints or self._sessions)

    def take(self) -> tuple[dict[int, int | None], set[str]]:
        """All hints and sessions that were kept; they are the caller's now."""
        with self._lock:
            hints, self._hints = self._hints, {}
            keys, self._sessions = self._sessions, set()
        return hints, keys


def try_lock(connection: Connection, ledger: Ledger, task_id: int) -> dict[str, Any] | None:
    """The Task's columns, its row locked until the transaction ends; None where somebody else holds it."""
    if connection.dialect.name == "sqlite":
        row = connection.execute(_ONE, {"task_id": task_id}).first()
        return None if row is None else as_dict(row)
    row = connection.execute(_FREE, {"task_id": task_id}).first()
    if row is None:
        if not ledger.held.worth_waiting(task_id, ledger.clock.monotonic()):
            return None
        try:
            row = _wait(connection, task_id)
        except exc.DBAPIError as error:
            if code_of(error) not in _NOT_HAD:
                raise
            ledger.held.waited(task_id, ledger.clock.monotonic(), had=False)
            return None
    ledger.held.waited(task_id, ledger.clock.monotonic(), had=True)
    return None if row is None else as_dict(row)


def _wait(connection: Connection, task_id: int) -> Any:
    """Waits in the line for the lock, for a bounded time: polls would starve where one transaction follows the other."""
    if connection.dialect.name == "mariadb":
        return connection.execute(_PATIENT_MARIADB, {"task_id": task_id, "patience": PATIENCE_S}).first()
    with connection.begin_nested():
        before = connection.exec_driver_sql("SHOW lock_timeout").scalar()
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{PATIENCE_S * 1_000:.0f}ms'")
        row = connection.execute(_ONE.with_for_update(), {"task_id": task_id}).first()
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{before}'")
    return row


def each_free(ledger: Ledger, task_ids: Collection[int], act: Callable[[Connection, list[int]], object]) -> list[int]:
    """Has ``act`` change the rows of these Tasks, locked: all that are free in one transaction, the others one by one.

    Arguments: ``act`` is given the connection and the ids whose rows are locked; it may be called again for the same ids,
    where a transaction was undone. Returns the Tasks whose rows somebody holds: nothing was done for them.
    """
    if not task_ids:
        return []
    free = _all_free(ledger, sorted(task_ids), act)
    return [task_id for task_id in sorted(set(task_ids).difference(free)) if not _one_free(ledger, task_id, act)]


@repeatable
def _all_free(ledger: Ledger, task_ids: list[int], act: Callable[[Connection, list[int]], object]) -> list[int]:
    with ledger.database.write() as connection:
        free = _lock_free(connection, task_ids)
        if free:
            act(connection, free)
    return free


@repeatable
def _one_free(ledger: Ledger, task_id: int, act: Callable[[Connection, list[int]], object]) -> bool:
    if not ledger.held.worth_waiting(task_id, ledger.clock.monotonic()):
        return False
    with ledger.database.write() as connection:
        if try_lock(connection, ledger, task_id) is None:
            return False
        act(connection, [task_id])
    return True


def _lock_free(connection: Connection, task_ids: list[int]) -> list[int]:
    dialect = connection.dialect.name
    if dialect == "sqlite":
        return task_ids
    given = {"ids": batches.given(dialect, task_ids)}
    return [int(i) for (i,) in connection.execute(_free_ids(dialect), given)]


@cache
def _free_ids(dialect: str) -> Any:
    found = sa.select(_t.id).where(batches.among_given(dialect, _t.id, "ids"))
    return found.order_by(_t.id).with_for_update(skip_locked=True)


def is_held(ledger: Ledger, task_id: int) -> bool:
    """Whether somebody holds the Task's row at this moment."""
    if ledger.database.is_sqlite:
        return False
    with ledger.database.read() as connection:
        return not _lock_free(connection, [task_id])  # a statement that stands alone: it lets go at once


# -- What every function of the ledger works with.

MAX_SLOTS = 32
"""Slots of ``task_tallies`` that a large Task has: so many processes can count at once without meeting."""

ERROR_SLOTS = 2
"""Slots of ``task_errors``: failures come in few flushes, and a poll sums them all."""

SLOTS_FROM = 1_000
"""Items from which a Task has more than one slot."""


MAX_ID = 2**63 - 1
"""The largest whole number that every database has."""


@dataclass(frozen=True)
class Ledger:
    """The ledger as one process sees it.

    ``identity`` names the process in leases and in ``events.process``; it also chooses the slot of the tallies that this
    process counts in, so that no two processes wait for each other's row. ``time`` is the database's clock, by which
    everything in the ledger is written and judged. ``held`` is what this process knows of Tasks' rows that others hold.
    """

    database: Database
    clock: Clock = field(default_factory=SystemClock)
    ids: Ids = field(default_factory=SystemIds)
    catalogue: Catalogue = field(default_factory=Catalogue)
    identity: str = "local"
    time: DatabaseTime = field(init=False)
    held: Held = field(default_factory=Held)
    _seed: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "time", DatabaseTime(self.clock))
        object.__setattr__(self, "_seed", zlib.crc32(self.identity.encode()))

    def slot(self, slots: int) -> int:
        """The slot of a Task with so many slots that this process counts in."""
        return self._seed % max(1, slots)

    def error_slot(self, slots: int) -> int:
        """The slot in which this process groups the failures of a Task."""
        return self.slot(slots) % ERROR_SLOTS

    def now(self) -> int:
        """The database's clock, in microseconds since 1970-01-01 UTC."""
        return self.time.now()


def in_range(number: int) -> int:
    """The number, or the nearest one that a column of the database can hold: no id lies beyond."""
    return max(-MAX_ID, min(number, MAX_ID))


def dumps(value: Any) -> str:
    """Compact JSON text. Raises TypeError for what JSON cannot say."""
    return orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_SUBCLASS).decode()


def loads(text: str | bytes | None) -> Any:
    """The value of JSON text; None stays None."""
    return None if text is None else orjson.loads(text)


def stamp(at: int, status: str, message: str, attempt: int, row: int | None = None) -> dict[str, Any]:
    """One message as it stands in ``added_messages``."""
    entry: dict[str, Any] = {"at": rfc3339(at), "status": status, "message": message, "attempt": attempt}
    if row is not None:
        entry["row"] = row
    return entry


def stamps(at: str, notes: Iterable[tuple[str, str, int | None]], attempt: int) -> list[str]:
    """Messages as :func:`stamp` makes them, each as JSON text.

    Arguments: ``at``, the time of writing in RFC 3339; ``notes``, each a status, a message, and the microseconds of its own
    time, or None for that of writing.
    """
    return [f'{{"at":"{rfc3339(own) if own else at}",{_rest(status, message, attempt)}' for status, message, own in notes]


@lru_cache(maxsize=256)
def _rest(status: str, message: str, attempt: int) -> str:
    # Messages come in storms of the same text.
    return dumps({"status": status, "message": message, "attempt": attempt})[1:]


def chunks(values: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    """Slices of at most ``size``."""
    return (values[i : i + size] for i in range(0, len(values), size))
