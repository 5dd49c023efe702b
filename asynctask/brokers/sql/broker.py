"""The broker in a table of the ledger's database, ``jobs``: no other server needed.

====================  ==================================================================================================
row                   meaning
====================  ==================================================================================================
waits set             it waits in its ``queue``; the index (queue, waits, id) is the queue, and ``ASIDE`` its end, of jobs
                      that are left to others
process set           it is in that process's list
held_in set           it is in the set ``schedule``, ``retry`` or ``dead``; ``run_at`` is when it is due (or died)
====================  ==================================================================================================

The statements of each database are in :mod:`asynctask.brokers.sql.dialects`. A call uses one connection of the process's
:class:`~asynctask.database.engine.Database`; :class:`~asynctask.database.notify.Signals` listen on one more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.brokers.admin import Operations, peeked
from asynctask.brokers.base import About, Capabilities, Copy, Held, Key, why_left
from asynctask.brokers.sql.admin import SqlOperations
from asynctask.brokers.sql.copies import ASIDE, COPY, LAST, Heads, Row, copy_of, parts, put_back, row_of
from asynctask.brokers.sql.dialects import JobsTable, MariadbJobs, PostgresqlJobs, SqliteJobs
from asynctask.clock import Clock, SystemClock
from asynctask.database.batches import among, fetch
from asynctask.database.engine import Database
from asynctask.database.notify import JOBS, Signals, notify
from asynctask.database.retrying import repeatable
from asynctask.database.tables import jobs
from asynctask.errors import BrokerUnavailable, LedgerUnavailable

_j = jobs.c
_COPY: Final = tuple(_j[name] for name in COPY)
_TABLES: Final[Mapping[str, Callable[[Database], JobsTable]]] = {
    "sqlite": SqliteJobs,
    "postgresql": PostgresqlJobs,
    "mariadb": MariadbJobs,
}

COUNTED: Final = 100_000
"""The most that :meth:`SqlBroker.waiting` counts per queue, smallest priorities first, to bound its cost."""

LOOK_ASIDE_S: Final = 1.0
"""Seconds between two looks at the jobs that processes left to others, among which this one may know some."""

_ASIDE_AT_ONCE: Final = 100
_SET_ASIDE_AT_ONCE: Final = 1_000
_PUSHED_AT_ONCE: Final = 1_000
_BACKOFF_S: Final = 0.01
_MAX_BACKOFF_S: Final = 0.15

_FIRST_ONES: Final = (
    sa.select(_j.waits)
    .where(_j.queue == sa.bindparam("of"), _j.waits < ASIDE)
    .order_by(_j.waits)
    .limit(sa.bindparam("most"))
    .subquery()
)
_WAITING: Final = sa.select(_FIRST_ONES.c.waits, sa.func.count()).group_by(_FIRST_ONES.c.waits)


class SqlBroker:
    """Jobs in a table.

    Arguments: the ``database`` that holds it; ``signals`` of the process, if shared (the caller then closes them);
    ``clock``.
    """

    capabilities = Capabilities(priority=True, survives_restart=True, in_ledger=True)

    def __init__(self, database: Database, *, signals: Signals | None = None, clock: Clock | None = None) -> None:
        self._database = database
        self._clock = clock or SystemClock()
        self._table = _TABLES[database.dialect](database)
        self._heads = Heads(self._clock.monotonic)
        self._known: Collection[str] = ()  # the workers whose untracked jobs this process performs, once it left one
        self._aside: dict[str, int] = {}  # queue -> id of the job left to others that was looked at last
        self._look_aside_at = 0.0
        self._operations = SqlOperations(database, self._clock, self._add)
        self._own_signals = Signals(database) if signals is None else None
        source = signals or self._own_signals
        assert source is not None
        self._waker = source.waker(JOBS)
        self._woken = threading.Event()
        self._notified = False
        self._more = False
        self._misses = 0
        self._quiet_until = 0.0

    # -- jobs in transit

    def push(self, copies: Sequence[Copy]) -> None:
        rows = [row_of(copy) for copy in copies]
        if rows:
            with self._translated():
                self._insert(rows)

    @repeatable
    def _insert(self, rows: Sequence[Row]) -> None:
        with self._database.write() as connection:
            self._add(connection, rows)

    def _add(self, connection: Connection, rows: Sequence[Row]) -> None:
        for part in parts(rows, _PUSHED_AT_ONCE):
            self._table.insert(connection, part)
        if any(row["waits"] is not None for row in rows):
            notify(connection, JOBS)

    def exchange(self, process: str, done: Sequence[Copy], queues: Sequence[str], limit: int) -> list[Copy]:
        if limit > 0 and not queues:
            limit = 0
        began = self._clock.monotonic()
        if limit > 0 and self._heads.until == ASIDE and began >= self._look_aside_at:
            self._look_aside_at = began + LOOK_ASIDE_S
            self._look_aside(queues)
        ranges, whole = self._heads.ranges(queues)
        with self._translated():
            spread = self._heads.spread
            taken = self._table.exchange(process, done, ranges, limit, spread)
        if limit > 0:
            self._heads.record_spread(taken.spread, limit)
            dry = queues if len(taken.copies) < limit else ()
            self._heads.record_claim(whole, taken.places, dry=dry, cost_s=self._clock.monotonic() - began)
            self._back_off(bool(taken.copies))
            self._more = bool(taken.copies) and taken.spread > spread
        return taken.copies

    def put_back(self, process: str, copies: Sequence[Copy]) -> None:
        if copies:
            with self._translated():
                self._put_back(process, copies)

    @repeatable
    def _put_back(self, process: str, copies: Sequence[Copy], aside: bool = False) -> None:
        groups: dict[tuple[int, int], list[Copy]] = {}
        for copy in copies:
            groups.setdefault((copy.deaths, copy.priority), []).append(copy)
        with self._database.write() as connection:
            for (deaths, priority), group in groups.items():
                waits = ASIDE if aside else put_back(priority)
                for part in parts([copy.handle for copy in group]):
                    held = jobs.update().where(_j.id.in_(part), _j.process == process)
                    connection.execute(held.values(process=None, deaths=deaths, waits=waits))
            notify(connection, JOBS)

    def defer(self, process: str, copies: Sequence[Copy], known: Collection[str]) -> None:
        """Puts them behind all others of their queue, with those that follow and would be deferred, too. A process that has
        left none finds them there, and this one at times those that it knows."""
        if copies:
            with self._translated():
                self._put_back(process, copies, aside=True)
                self._known, self._heads.until = known, ASIDE
                for queue in {copy.queue for copy in copies}:
                    self._set_aside(queue)

    @repeatable
    def _set_aside(self, queue: str) -> None:
        next_ones = sa.select(_j.id, _j.payload).where(_j.queue == queue, _j.waits < ASIDE, _j.attempt == 0)
        with self._database.write() as connection:
            found = connection.execute(next_ones.order_by(_j.waits, _j.id).limit(_SET_ASIDE_AT_ONCE))
            theirs = [row_id for row_id, payload in found if self._is_left(payload)]
            if theirs:  # a claim that was faster has cleared ``waits``
                still = jobs.update().where(_j.id.in_(theirs), _j.waits < ASIDE)
                connection.execute(still.values(waits=ASIDE))

    def _is_left(self, payload: str) -> bool:
        job = peeked(payload)
        is_job = isinstance(job.get("class"), str) and isinstance(job.get("args"), list)
        return is_job and why_left(job, self._known) is not None

    def _look_aside(self, queues: Sequence[str]) -> None:
        """Returns to their queues those of the next few jobs left to others that this process performs."""
        is_any = False
        for queue in queues:
            after = _j.id > self._aside.get(queue, 0)
            next_ones = sa.select(_j.id, _j.payload).where(_j.queue == queue, _j.waits == ASIDE, after)
            with self._read() as connection:
                found = connection.execute(next_ones.order_by(_j.id).limit(_ASIDE_AT_ONCE)).all()
            is_any |= bool(found) or queue in self._aside
            if len(found) == _ASIDE_AT_ONCE:
                self._aside[queue] = found[-1][0]
            else:
                self._aside.pop(queue, None)
            if known := [row_id for row_id, payload in found if not self._is_left(payload)]:
                with self._translated():
                    self._return(known)
        if not is_any:
            self._heads.until = LAST

    @repeatable
    def _return(self, ids: Sequence[int]) -> None:
        with self._database.write() as connection:
            aside = jobs.update().where(_j.id.in_(ids), _j.waits == ASIDE)
            connection.execute(aside.values(waits=2 * _j.priority))  # as put back: no mark of a process is behind it
            notify(connection, JOBS)

    def _remove_held(self, connection: Connection, process: str, copies: Sequence[Copy]) -> list[Copy]:
        """Removes the copies from the process's list; returns those that were in it."""
        held = {
            (handle, jid)
            for part in parts([copy.handle for copy in copies])
            for handle, jid in connection.execute(
                sa.select(_j.id, _j.jid).where(_j.id.in_(part), _j.process == process).with_for_update()
            )
        }
        moved = [copy for copy in copies if (copy.handle, copy.jid) in held]
        self._table.remove(connection, process, moved)
        return moved

    def withdraw(self, task_id: int, limit: int) -> list[Key]:
        return []  # jobs of Tasks wait in the ledger itself

    # -- queries

    def holds(self, keys: Collection[Key]) -> set[Key]:
        wanted = set(keys)
        held: set[Key] = set()
        with self._read() as connection:
            for part in parts(sorted({jid for jid, _ in wanted})):
                found = sa.select(_j.jid, _j.attempt).where(among(connection, _j.jid, part), _j.held_in.is_(None))
                held.update((jid, attempt) for jid, attempt in fetch(connection, found))
        return held & wanted

    def waiting(self, queues: Collection[str]) -> Mapping[str, Mapping[int, int]]:
        counts: dict[str, dict[int, int]] = {}
        with self._read() as connection:
            for name in queues:
                for waits, count in connection.execute(_WAITING, {"of": name, "most": COUNTED}):
                    found = counts.setdefault(name, {})
                    found[int(waits) // 2] = found.get(int(waits) // 2, 0) + int(count)
        return counts

    def queues(self) -> Mapping[str, int]:
        with self._read() as connection:
            waiting = sa.select(_j.queue, sa.func.count()).where(_j.waits.is_not(None)).group_by(_j.queue)
            return {name: int(count) for name, count in connection.execute(waiting)}

    # -- processes

    def held_by(self, process: str) -> list[Copy]:
        with self._read() as connection:
            held = sa.select(*_COPY).where(_j.process == process).order_by(_j.id)
            return [copy_of(row) for row in connection.execute(held)]

    def holders(self) -> set[str]:
        with self._read() as connection:
            found = connection.execute(sa.select(_j.process).where(_j.process.is_not(None)).distinct())
            return {str(process) for (process,) in found}

    def presence(self, about: About) -> None:
        """None: the ledger shows these processes."""

    def forget(self, keys: Collection[Key]) -> None:
        """Does nothing: no other program takes jobs from this table."""

    def drop(self, process: str, copies: Sequence[Copy]) -> None:
        if copies:
            with self._translated():
                self._drop(process, copies)

    @repeatable
    def _drop(self, process: str, copies: Sequence[Copy]) -> None:
        with self._database.write() as connection:
            self._table.remove(connection, process, copies)

    # -- the sets of untracked jobs

    def hold(self, set_name: str, copies: Sequence[Held], *, process: str | None = None) -> None:
        rows = {held.copy.key: row_of(held.copy, held_in=set_name, run_at=held.at) for held in copies}
        if rows:
            with self._translated():
                self._hold(rows, [held.copy for held in copies], process)

    @repeatable
    def _hold(self, rows: Mapping[Key, Row], copies: Sequence[Copy], process: str | None) -> None:
        with self._database.write() as connection:
            if process is not None:
                copies = self._remove_held(connection, process, copies)
            self._add(connection, [rows[copy.key] for copy in copies])

    def release_due(self, set_name: str, now: int, limit: int) -> int:
        due = sa.select(*_COPY).where(_j.held_in == set_name, _j.run_at <= now).order_by(_j.run_at, _j.id).limit(limit)
        with self._read() as connection:
            if connection.execute(due.limit(1)).first() is None:
                return 0
        with self._translated():
            return self._release(due)

    @repeatable
    def _release(self, due: Any) -> int:
        with self._database.write() as connection:
            copies = [copy_of(row) for row in connection.execute(_skip_locked(connection, due))]
            for part in parts([copy.handle for copy in copies]):
                connection.execute(jobs.delete().where(_j.id.in_(part)))
            if copies:  # as new rows, at the end of their queue
                self._add(connection, [row_of(copy) for copy in copies])
        return len(copies)

    def members(self, set_name: str, limit: int) -> list[Held]:
        statement = sa.select(*_COPY, _j.run_at).where(_j.held_in == set_name).order_by(_j.run_at, _j.id).limit(limit)
        with self._read() as connection:
            return [Held(copy_of(row[:-1]), int(row[-1] or 0)) for row in connection.execute(statement)]

    @property
    def operations(self) -> Operations:
        return self._operations

    # -- waiting

    def wait(self, timeout: float) -> bool:
        """Backs off after wake-ups that found nothing: not a hundred idle processes run for each job."""
        if self._more:  # locked by others for a moment
            self._more = False
            return True
        if self._heads.until == ASIDE:
            timeout = min(timeout, LOOK_ASIDE_S)
        if not self._waker.wait(timeout):
            return False
        # Only a notification counts as a miss, not a look in case one was lost.
        self._notified = self._waker.signalled and not self._woken.is_set()
        rest = self._quiet_until - self._clock.monotonic()
        if self._notified and rest > 0:
            self._woken.wait(rest)
        self._woken.clear()
        return True

    def _back_off(self, found: bool) -> None:
        if found:
            self._misses, self._quiet_until = 0, 0.0
        elif self._notified:
            self._misses += 1
            pause = min(_BACKOFF_S * 2 ** min(self._misses, 8), _MAX_BACKOFF_S)
            self._quiet_until = self._clock.monotonic() + pause
        self._notified = False

    def wake(self) -> None:
        self._woken.set()
        self._waker.wake()

    def close(self) -> None:
        if self._own_signals is not None:
            self._own_signals.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except LedgerUnavailable as error:
            raise BrokerUnavailable(str(error)) from error

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        with self._translated(), self._database.read() as connection:
            yield connection


def _skip_locked(connection: Connection, statement: Any) -> Any:
    """Skips rows locked by others; on SQLite the write transaction excludes other writers."""
    return statement if connection.dialect.name == "sqlite" else statement.with_for_update(skip_locked=True)
