"""The broker that is a table of the ledger's database: nothing else to install.

The table, ``jobs``:

====================  ==================================================================================================
row                   meaning
====================  ==================================================================================================
process, held_in NULL it waits in its ``queue``; the partial index (queue, priority, id) is the queue
process set           it is in that process's list
held_in set           it is in the set ``schedule``, ``retry`` or ``dead``; ``run_at`` is when it is due (or died)
====================  ==================================================================================================
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.engine import Connection

from asynctask.brokers.base import Capabilities, Copy, Held, Key
from asynctask.errors import BrokerUnavailable, LedgerUnavailable
from asynctask.ledger.database import Database
from asynctask.ledger.models import jobs

__all__ = ["SqlBroker"]

_j = jobs.c
_COPY = (_j.id, _j.jid, _j.attempt, _j.queue, _j.payload, _j.priority, _j.task_id, _j.deaths)
_WAITS = _j.process.is_(None) & _j.held_in.is_(None)
_CHUNK = 1_000
_LOOK_EVERY_S = 0.02


class SqlBroker:
    """Jobs in a table. Arguments: the ``database`` that holds it."""

    capabilities = Capabilities(priority=True, blocking=False, survives_restart=True)

    def __init__(self, database: Database) -> None:
        self._database = database
        self._woken = threading.Event()
        self._watch: sqlite3.Connection | None = None
        self._watch_lock = threading.Lock()
        self._seen = -1

    # -- the way of a job

    def push(self, copies: Sequence[Copy]) -> None:
        if not copies:
            return
        rows = [_row(copy) for copy in copies]
        with self._write() as connection:
            connection.execute(_insert_new(connection), rows)
        self._woken.set()

    def exchange(self, process: str, done: Sequence[Copy], queues: Sequence[str], limit: int) -> list[Copy]:
        if not done and (limit <= 0 or not self._anything_waits(queues)):
            return []  # a write transaction for nothing would make every idle process queue for the write lock
        fetched: list[Copy] = []
        with self._write() as connection:
            _delete(connection, process, done)
            for queue in queues:
                if len(fetched) >= limit:
                    break
                fetched += _claim(connection, process, queue, limit - len(fetched))
        return fetched

    def _anything_waits(self, queues: Sequence[str]) -> bool:
        with self._read() as connection:
            found = sa.select(sa.literal(1)).where(_WAITS, _j.queue.in_(list(queues))).limit(1)
            return connection.execute(found).first() is not None

    def put_back(self, process: str, copies: Sequence[Copy]) -> None:
        by_deaths: dict[int, list[Any]] = {}
        for copy in copies:
            by_deaths.setdefault(copy.deaths, []).append(copy.handle)
        with self._write() as connection:
            for deaths, ids in by_deaths.items():
                for part in _parts(ids):
                    mine = jobs.update().where(_j.id.in_(part), _j.process == process)
                    connection.execute(mine.values(process=None, deaths=deaths))
        self._woken.set()

    def withdraw(self, task_id: int, limit: int) -> list[Key]:
        with self._write() as connection:
            found = connection.execute(
                _locked(connection, sa.select(_j.id, _j.jid, _j.attempt).where(_WAITS, _j.task_id == task_id).limit(limit))
            ).all()
            for part in _parts([row[0] for row in found]):
                connection.execute(jobs.delete().where(_j.id.in_(part)))
        return [(jid, attempt) for _, jid, attempt in found]

    # -- what is where

    def holds(self, keys: Collection[Key]) -> set[Key]:
        wanted = set(keys)
        held: set[Key] = set()
        with self._read() as connection:
            for part in _parts(sorted({jid for jid, _ in wanted})):
                found = sa.select(_j.jid, _j.attempt).where(_j.jid.in_(part), _j.held_in.is_(None))
                held.update((jid, attempt) for jid, attempt in connection.execute(found))
        return held & wanted

    def waiting(self, queues: Collection[str]) -> Mapping[str, Mapping[int, int]]:
        columns = (_j.queue, _j.priority)
        statement = sa.select(*columns, sa.func.count()).where(_WAITS, _j.queue.in_(list(queues))).group_by(*columns)
        counts: dict[str, dict[int, int]] = {}
        with self._read() as connection:
            for name, priority, count in connection.execute(statement):
                counts.setdefault(name, {})[int(priority)] = int(count)
        return counts

    def queues(self) -> Mapping[str, int]:
        with self._read() as connection:
            found = connection.execute(sa.select(_j.queue, sa.func.count()).where(_WAITS).group_by(_j.queue))
            return {name: int(count) for name, count in found}

    # -- processes

    def held_by(self, process: str) -> list[Copy]:
        with self._read() as connection:
            return [
                _copy(row) for row in connection.execute(sa.select(*_COPY).where(_j.process == process).order_by(_j.id))
            ]

    def holders(self) -> set[str]:
        with self._read() as connection:
            found = connection.execute(sa.select(_j.process).where(_j.process.is_not(None)).distinct())
            return {str(process) for (process,) in found}

    def drop(self, process: str, copies: Sequence[Copy]) -> None:
        if copies:
            with self._write() as connection:
                _delete(connection, process, copies)

    # -- the sets of untracked jobs

    def hold(self, set_name: str, copies: Sequence[Held], *, process: str | None = None) -> None:
        rows = [{**_row(held.copy), "held_in": set_name, "run_at": held.at} for held in copies]
        if not rows:
            return
        with self._write() as connection:
            if process is not None:
                _delete(connection, process, [held.copy for held in copies])
            connection.execute(_insert_new(connection), rows)

    def release_due(self, set_name: str, now: int, limit: int) -> int:
        due = sa.select(_j.id).where(_j.held_in == set_name, _j.run_at <= now).order_by(_j.run_at).limit(limit)
        with self._read() as connection:
            if connection.execute(due.limit(1)).first() is None:
                return 0
        with self._write() as connection:
            ids = [row[0] for row in connection.execute(_locked(connection, due))]
            for part in _parts(ids):
                connection.execute(jobs.update().where(_j.id.in_(part)).values(held_in=None, run_at=None))
        self._woken.set()
        return len(ids)

    def members(self, set_name: str, limit: int) -> list[Held]:
        statement = sa.select(*_COPY, _j.run_at).where(_j.held_in == set_name).order_by(_j.run_at, _j.id).limit(limit)
        with self._read() as connection:
            return [Held(_copy(row[:-1]), int(row[-1] or 0)) for row in connection.execute(statement)]

    # -- waiting

    def wait(self, timeout: float) -> bool:
        """On SQLite another process's commit shows in ``PRAGMA data_version``, which costs no lock and no query."""
        self._woken.clear()
        if self._changed():
            return True
        waited = 0.0
        while waited < timeout:
            step = min(_LOOK_EVERY_S, timeout - waited)
            if self._woken.wait(step) or self._changed():
                return True
            waited += step
        return False

    def _changed(self) -> bool:
        if self._database.path is None:
            return False
        with self._watch_lock:
            if self._watch is None:
                self._watch = sqlite3.connect(self._database.path, check_same_thread=False, isolation_level=None)
            try:
                version = int(self._watch.execute("PRAGMA data_version").fetchone()[0])
            except sqlite3.Error:
                return False
            changed, self._seen = version != self._seen, version
            return changed

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        with self._watch_lock:
            if self._watch is not None:
                self._watch.close()
                self._watch = None

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        try:
            with self._database.read() as connection:
                yield connection
        except LedgerUnavailable as error:
            raise BrokerUnavailable(str(error)) from error

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        try:
            with self._database.write() as connection:
                yield connection
        except LedgerUnavailable as error:
            raise BrokerUnavailable(str(error)) from error


def _row(copy: Copy) -> dict[str, Any]:
    return {
        "jid": copy.jid, "attempt": copy.attempt, "queue": copy.queue, "priority": copy.priority, "task_id": copy.task_id,
        "payload": copy.payload, "deaths": copy.deaths,
    }  # fmt: skip


def _copy(row: Any) -> Copy:
    handle, jid, attempt, queue, payload, priority, task_id, deaths = row
    return Copy(jid, attempt, queue, payload, priority, task_id, deaths, handle)


def _insert_new(connection: Connection) -> Any:
    name = connection.dialect.name
    if name in ("mysql", "mariadb"):
        return mysql.insert(jobs).prefix_with("IGNORE")
    make: Any = sqlite.insert if name == "sqlite" else postgresql.insert
    return make(jobs).on_conflict_do_nothing(index_elements=["jid", "attempt"])


def _locked(connection: Connection, statement: Any) -> Any:
    """Others' rows are passed over, not waited for; on SQLite the write transaction excludes other writers anyway."""
    return statement if connection.dialect.name == "sqlite" else statement.with_for_update(skip_locked=True)


def _claim(connection: Connection, process: str, queue: str, limit: int) -> list[Copy]:
    statement = sa.select(*_COPY).where(_WAITS, _j.queue == queue).order_by(_j.priority, _j.id).limit(limit)
    copies = [_copy(row) for row in connection.execute(_locked(connection, statement)).all()]
    for part in _parts([copy.handle for copy in copies]):
        connection.execute(jobs.update().where(_j.id.in_(part)).values(process=process))
    return copies


def _delete(connection: Connection, process: str, copies: Sequence[Copy]) -> None:
    for part in _parts([copy.handle for copy in copies]):
        connection.execute(jobs.delete().where(_j.id.in_(part), _j.process == process))


def _parts(values: Sequence[Any]) -> Iterable[Sequence[Any]]:
    return (values[i : i + _CHUNK] for i in range(0, len(values), _CHUNK))
