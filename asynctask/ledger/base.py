"""The basis of the ledger's functions: the :class:`Ledger`, JSON text, messages, and locks on Tasks' rows.

Background work (dispatcher, recorder, maintenance) waits only briefly for the row of a Task (:func:`try_lock`): a row that
an interactive database session or a stopped process keeps locked must not delay other Tasks. Skipped updates are retried
later, from :class:`LockedTasks` or by maintenance. A user's call waits without limit (:func:`asynctask.ledger.tasks.lock`).
One statement locks several rows in the order of their ids and skips locked ones. SQLite has one writer at a time and no row
locks.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final, TypeVar

import orjson
import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Connection

from asynctask.clock import Clock, Ids, SystemClock, SystemIds, rfc3339
from asynctask.database import batches
from asynctask.database.engine import Database, DatabaseTime
from asynctask.database.retrying import LOCKED, code_of, repeatable
from asynctask.database.tables import as_dict, duties, tasks
from asynctask.figures import Minutes
from asynctask.messages import Catalogue

MAX_SLOTS = 32
"""Slots of ``task_tallies`` of a large Task: as many processes can count without contention."""

ERROR_SLOTS = 2
"""Slots of ``task_errors``: few, because few flushes contain failures and every poll sums all slots."""

SLOTS_FROM = 1_000
"""Number of items from which a Task has more than one slot."""

MAX_ID = 2**63 - 1
"""The largest integer that every database stores."""


PATIENCE_S: Final = 0.1
"""Seconds that :func:`try_lock` waits. Above the duration of this program's transactions."""

AGAIN_S: Final = 1.0
"""Seconds after a failed wait in which this process does not wait for that row again. Above :data:`PATIENCE_S`."""


class LockedTasks:
    """The Tasks whose rows this process found locked by other transactions, and the updates that it must retry.

    Kept in memory only: if the process ends, maintenance makes the updates (:func:`asynctask.ledger.doctor.mend`).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_vain: set[int] = set()
        self._again_at = 0.0
        self._hints: set[int] = set()
        self._sessions: set[str] = set()

    def worth_waiting(self, task_id: int, now: float) -> bool:
        """Whether to wait for the row: not if a wait failed less than :data:`AGAIN_S` before ``now`` (monotonic)."""
        with self._lock:
            return task_id not in self._in_vain or now >= self._again_at

    def waited(self, task_id: int, now: float, *, had: bool) -> None:
        """Notes at ``now`` (monotonic) whether this process got the row's lock (``had``) or the wait failed."""
        with self._lock:
            if had:
                self._in_vain.discard(task_id)
            else:
                self._in_vain.add(task_id)
                self._again_at = now + AGAIN_S

    def keep_hints(self, task_ids: Iterable[int]) -> None:
        """Keeps Tasks whose hints could not be settled."""
        with self._lock:
            self._hints.update(task_ids)

    def keep_session(self, key: str) -> None:
        """Keeps a session that may be free for its next Task, whose row is locked."""
        with self._lock:
            self._sessions.add(key)

    @property
    def keeps(self) -> bool:
        """Whether any hint or session is kept."""
        return bool(self._hints or self._sessions)

    def take(self) -> tuple[set[int], set[str]]:
        """Returns and clears all kept hints and sessions."""
        with self._lock:
            hints, self._hints = self._hints, set()
            keys, self._sessions = self._sessions, set()
        return hints, keys


@dataclass(frozen=True)
class Ledger:
    """The ledger of one process.

    ``identity`` names the process in leases and ``events.process``, and selects its slot of the sharded counters, so that
    processes do not contend for one hot row; empty for a caller that is not a process. ``time`` is the database's clock,
    the source of all times in the ledger. ``held``: rows locked by other transactions; ``minutes``: what has ended and is
    not in the history. ``closed`` is called with the id of a Task that this process has closed, after the commit; it must
    not block. ``keeps_tracebacks``: those of errors.
    """

    database: Database
    clock: Clock = field(default_factory=SystemClock)
    ids: Ids = field(default_factory=SystemIds)
    catalogue: Catalogue = field(default_factory=Catalogue)
    identity: str = "local"
    time: DatabaseTime = field(init=False)
    held: LockedTasks = field(default_factory=LockedTasks)
    minutes: Minutes = field(default_factory=Minutes)
    closed: Callable[[int], None] = lambda task_id: None
    keeps_tracebacks: bool = True
    _seed: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "time", DatabaseTime(self.clock))
        object.__setattr__(self, "_seed", zlib.crc32(self.identity.encode()))

    def under(self, identity: str) -> Ledger:
        """The same ledger with the identity of another process, on whose behalf this one writes."""
        other = replace(self, identity=identity)
        object.__setattr__(other, "time", self.time)
        return other

    @property
    def holder(self) -> str | None:
        """The value of ``events.process`` while this process performs the job."""
        return self.identity or None

    def slot(self, slots: int) -> int:
        """The slot in which this process counts, for a Task with ``slots`` slots."""
        return self._seed % max(1, slots)

    def error_slot(self, slots: int) -> int:
        """The slot in which this process groups a Task's failures."""
        return self.slot(slots) % ERROR_SLOTS

    def now(self) -> int:
        """The database's time, in microseconds since 1970-01-01 UTC."""
        return self.time.now()


def in_range(number: int) -> int:
    """The number, clamped to the range of a database integer."""
    return max(-MAX_ID, min(number, MAX_ID))


def dumps(value: Any) -> str:
    """Compact JSON text. Raises TypeError for values that JSON cannot represent."""
    return orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_SUBCLASS).decode()


def loads(text: str | bytes | None) -> Any:
    """The value of JSON text; None for None."""
    return None if text is None else orjson.loads(text)


def stamp(
    at: int, status: str, message: str, attempt: int, row: int | None = None, process: str | None = None
) -> dict[str, Any]:
    """One message of ``added_messages``."""
    entry: dict[str, Any] = {"at": rfc3339(at), "status": status, "message": message, "attempt": attempt}
    if row is not None:
        entry["row"] = row
    if process is not None:
        entry["process"] = process
    return entry


T = TypeVar("T")

BATCH: Final = 1_000
"""Most rows of one statement, or of one transaction that holds SQLite's only write lock."""


def chunks(values: Iterable[T], size: int = BATCH) -> Iterator[list[T]]:
    """The values in lists of at most ``size``, made as they are consumed."""
    rest = iter(values)
    while part := list(islice(rest, size)):
        yield part


PURGING: Final = "purge"
"""``turning`` of a Task that is being purged."""


# -- locks on Tasks' rows

_t = tasks.c
_ONE: Final = sa.select(tasks).where(_t.id == sa.bindparam("task_id"))
_FREE: Final = _ONE.with_for_update(skip_locked=True)
# A limit for this statement only; innodb_lock_wait_timeout has whole seconds.
_LOCK_MARIADB: Final = sa.text(
    "SET STATEMENT max_statement_time = :patience FOR SELECT tasks.* FROM tasks WHERE id = :task_id FOR UPDATE"
)
_DUTY: Final = sa.select(duties.c.name).where(duties.c.name == sa.bindparam("name"))
_LOCK_TIMEOUTS: Final = frozenset({"55P03", LOCKED, 1969})
"""PostgreSQL: lock timeout. MariaDB: lock wait timeout, statement interrupted by its time limit."""


def try_lock(connection: Connection, ledger: Ledger, task_id: int) -> dict[str, Any] | None:
    """Locks the Task's row until the transaction ends and returns its columns; None if another transaction holds it."""
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
            if code_of(error) not in _LOCK_TIMEOUTS:
                raise
            ledger.held.waited(task_id, ledger.clock.monotonic(), had=False)
            return None
    ledger.held.waited(task_id, ledger.clock.monotonic(), had=True)
    return None if row is None else as_dict(row)


def _wait(connection: Connection, task_id: int) -> Any:
    """Waits in the lock's queue for a bounded time; polling would starve while transactions follow each other."""
    if connection.dialect.name == "mariadb":
        return connection.execute(_LOCK_MARIADB, {"task_id": task_id, "patience": PATIENCE_S}).first()
    with connection.begin_nested():
        before = connection.exec_driver_sql("SHOW lock_timeout").scalar()
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{PATIENCE_S * 1_000:.0f}ms'")
        row = connection.execute(_ONE.with_for_update(), {"task_id": task_id}).first()
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{before}'")
    return row


def lock_now(connection: Connection, task_id: int) -> dict[str, Any] | None:
    """As :func:`try_lock`, without a wait: a borrower tries another Task instead."""
    row = connection.execute(_ONE if connection.dialect.name == "sqlite" else _FREE, {"task_id": task_id}).first()
    return None if row is None else as_dict(row)


def lock_duty(connection: Connection, name: str) -> None:
    """Locks a row of ``duties`` until the transaction ends; waits for another transaction that holds it."""
    if connection.dialect.name == "sqlite":  # the write transaction excludes others
        return
    lock = _DUTY.with_for_update()
    if connection.execute(lock, {"name": name}).first() is None:
        _make_duty(connection, name)
        connection.execute(lock, {"name": name})


def _make_duty(connection: Connection, name: str) -> None:
    ignore = "IGNORE " if connection.dialect.name == "mariadb" else ""
    rest = "" if ignore else " ON CONFLICT DO NOTHING"
    connection.execute(sa.text(f"INSERT {ignore}INTO duties (name) VALUES (:name){rest}"), {"name": name})  # noqa: S608


@repeatable
def all_free(ledger: Ledger, task_ids: Collection[int], act: Callable[[Connection, list[int]], object]) -> list[int]:
    """As :func:`each_free`, without a wait: calls ``act`` on the rows that are free now; returns the Tasks of these."""
    if not task_ids:
        return []
    with ledger.database.write() as connection:
        free = _lock_free(connection, sorted(task_ids))
        if free:
            act(connection, free)
    return free


def each_free(ledger: Ledger, task_ids: Collection[int], act: Callable[[Connection, list[int]], object]) -> list[int]:
    """Locks these Tasks' rows and calls ``act`` on them: all that are free in one transaction, the others one by one.

    ``act`` gets the connection and the ids of the locked rows, and the same ids again if the transaction is retried.
    Returns the Tasks whose rows another transaction holds, for which ``act`` was not called.
    """
    free = all_free(ledger, task_ids, act)
    return [task_id for task_id in sorted(set(task_ids).difference(free)) if not _one_free(ledger, task_id, act)]


@repeatable
def _one_free(ledger: Ledger, task_id: int, act: Callable[[Connection, list[int]], object]) -> bool:
    if not ledger.held.worth_waiting(task_id, ledger.clock.monotonic()):
        return False
    with ledger.database.write() as connection:
        if try_lock(connection, ledger, task_id) is None:
            return False
        act(connection, [task_id])
    return True


_FREE_IDS: Final = batches.ByValues(_t.id, lambda its: sa.select(_t.id).where(its).order_by(_t.id), skip_locked=True)


def _lock_free(connection: Connection, task_ids: list[int]) -> list[int]:
    if connection.dialect.name == "sqlite":
        return task_ids
    return [int(i) for i in _FREE_IDS.execute(connection, task_ids).scalars()]


def is_held(ledger: Ledger, task_id: int) -> bool:
    """Whether another transaction holds the Task's row now."""
    if ledger.database.is_sqlite:
        return False
    with ledger.database.read() as connection:
        return not _lock_free(connection, [task_id])  # outside a transaction: the lock ends with the statement


# -- rows of a list, as a split produces them


@dataclass(frozen=True, slots=True)
class NewItem:
    """An accepted item, or a slice of several ``items``: its params as JSON text, and its row in the list, or the first and
    the last row.

    ``worker_name`` and ``options`` (JSON text): set if the item is for another worker than the Task's. ``key``: its key
    field and value. ``number``: that of the row that it corrects, see :mod:`asynctask.ledger.corrections`. ``compared``:
    the values of the fields that its list compares, JSON-ready. ``search``: see :mod:`asynctask.ledger.search`.
    """

    params: str
    row: int
    worker_name: str | None = None
    options: str | None = None
    key: str | None = None
    items: int = 1
    last_row: int | None = None
    number: int | None = None
    compared: Mapping[str, Any] | None = None
    search: Sequence[tuple[str, str, int | None]] = ()

    @property
    def values(self) -> Any:
        """The item as a value."""
        return orjson.loads(self.params)


@dataclass(frozen=True, slots=True)
class Reject:
    """One rejected row: its problems (``{column, code, message, value}``) and its cells, JSON-ready; ``number`` as in
    :class:`NewItem`."""

    row: int
    errors: Sequence[dict[str, Any]]
    cells: Any
    number: int | None = None
