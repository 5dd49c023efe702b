"""Inspection and cleanup of the queues and sets in the table ``jobs``.

The key of a set's entry is ``ID-JID``: SQLite reuses an id once the table's last row is gone, so the jid is compared, too.
Every action compares both, and the set, in the statement that acts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.brokers.admin import (
    COUNTED_OTHERS,
    LOOKED_THROUGH,
    MOST_NAMES,
    SETS,
    Entry,
    Found,
    Page,
    QueueFacts,
    RemoteProcess,
    Removed,
    cannot_pause,
    checked_text,
    checked_window,
    class_of,
    distinct,
    enqueued_at,
    first_of,
    job_key,
    peeked,
    pushed_again,
)
from asynctask.brokers.base import BIGINT, DEAD, Copy
from asynctask.brokers.sql.copies import ASIDE, COPY, Row, copy_of, parts, row_of
from asynctask.clock import Clock
from asynctask.database.batches import fetch_wide, for_update
from asynctask.database.engine import Database
from asynctask.database.retrying import repeatable
from asynctask.database.tables import jobs
from asynctask.errors import BrokerUnavailable, InputError, LedgerUnavailable

_j = jobs.c
_COPY: Final = tuple(_j[name] for name in COPY)

T = TypeVar("T")


class SqlOperations:
    """Operations on one database.

    Arguments: the ``database``; ``clock``; ``add``, which inserts rows in the caller's transaction and notifies workers.
    """

    def __init__(self, database: Database, clock: Clock, add: Callable[[Connection, Sequence[Row]], None]) -> None:
        self._database = database
        self._clock = clock
        self._add = add

    def _query(self, statement: Any) -> list[Any]:
        return self._translated(lambda: self._rows(statement))

    def _rows(self, statement: Any) -> list[Any]:
        with self._database.read() as connection:
            return list(connection.execute(statement).all())

    def _page(self, statement: Any, limit: int) -> list[Sequence[Any]]:
        """The first rows of a statement that a page holds."""
        ids = self._query(statement.with_only_columns(_j.id).limit(limit))
        return self._rows_of(sa.select(*statement.selected_columns), [int(i) for (i,) in ids], limit)

    def _rows_of(self, statement: Any, ids: Sequence[int], limit: int) -> list[Sequence[Any]]:
        """The rows of these ids, as many as a page holds: payloads may be long."""
        rows = fetch_wide(self._database, statement, _j.id, [_j.payload], ids)
        return self._translated(lambda: first_of(((tuple(row.values()), len(row["payload"])) for row in rows), limit))

    @staticmethod
    def _translated(call: Callable[[], T]) -> T:
        try:
            return call()
        except LedgerUnavailable as error:
            raise BrokerUnavailable(str(error)) from error

    # -- queues

    def queues(self) -> list[QueueFacts]:
        alone = sa.func.sum(sa.case((_j.task_id.is_(None), 1), else_=0))
        waiting = sa.select(_j.queue, _j.waits, sa.func.count(), alone).where(_j.waits.is_not(None))
        lengths: dict[str, int] = {}
        alone_in: dict[str, dict[int, int]] = {}
        aside: dict[str, int] = {}
        for name, waits, count, count_alone in self._query(waiting.group_by(_j.queue, _j.waits).order_by(_j.queue)):
            if name not in lengths and len(lengths) == MOST_NAMES:
                break
            lengths[name] = lengths.get(name, 0) + int(count)
            if int(waits) == ASIDE:
                aside[name] = int(count)
            elif count_alone:
                by_priority, priority = alone_in.setdefault(name, {}), int(waits) // 2
                by_priority[priority] = by_priority.get(priority, 0) + int(count_alone)
        return [self._facts(name, length, alone_in.get(name, {}), aside.get(name, 0)) for name, length in lengths.items()]

    def _facts(self, name: str, length: int, alone: Mapping[int, int], others: int) -> QueueFacts:
        """Finds the oldest at the head, and at the head of the least urgent, which urgent ones may pass for long."""
        waiting = sa.select(_j.payload, _j.waits).where(_j.queue == name, _j.waits.is_not(None))
        head = self._query(waiting.order_by(_j.waits, _j.id).limit(1))
        least = sa.select(sa.func.max(_j.waits)).where(_j.queue == name, _j.waits.is_not(None)).scalar_subquery()
        last = self._query(waiting.where(_j.waits == least).order_by(_j.id).limit(1))
        times = [at for payload, _ in (*head, *last) if (at := enqueued_at(payload)) is not None]
        next_class = class_of(head[0][0]) if head else None
        return QueueFacts(name, length, min(times, default=None), False, next_class, alone, others)

    def others(self, queue: str) -> Mapping[str, int]:
        aside = sa.select(_j.payload).where(_j.queue == queue, _j.waits == ASIDE).order_by(_j.id).limit(COUNTED_OTHERS)
        return Counter(class_of(payload) or "" for (payload,) in self._query(aside))

    def jobs(self, queue: str, *, offset: int = 0, limit: int = 100, newest: bool = False) -> Page:
        checked_window(offset, limit)
        here = (_j.queue == queue) & _j.waits.is_not(None)
        order = (_j.waits.desc(), _j.id.desc()) if newest else (_j.waits, _j.id)
        found = self._page(sa.select(*_COPY).where(here).order_by(*order).offset(offset), limit)
        ((total,),) = self._query(sa.select(sa.func.count()).select_from(jobs).where(here))
        return Page([_job(row) for row in found], int(total))

    def delete_job(self, queue: str, key: str) -> Copy | None:
        if "\0" in key:
            return None
        jid, _, attempt = key.rpartition(":")
        named = [(key, 0)] + ([(jid, int(attempt))] if attempt.isdecimal() and len(attempt) < 10 else [])
        for each in named:
            copy = self._translated(lambda each=each: self._delete_job(queue, *each))  # type: ignore[misc]
            if copy is not None:
                return copy
        return None

    @repeatable
    def _delete_job(self, queue: str, jid: str, attempt: int) -> Copy | None:
        here = (_j.queue == queue) & (_j.jid == jid) & (_j.attempt == attempt) & _j.waits.is_not(None)
        with self._database.write() as connection:
            copies = _locked(connection, sa.select(*_COPY).where(here))
            _remove(connection, copies)
        return copies[0] if copies else None

    def clear_some(self, queue: str, limit: int) -> Removed:
        copies = self._translated(lambda: self._clear_some(queue, max(1, limit)))
        return Removed(len(copies), [copy.key for copy in copies if copy.attempt])

    @repeatable
    def _clear_some(self, queue: str, limit: int) -> list[Copy]:
        first = sa.select(*_COPY).where(_j.queue == queue, _j.waits.is_not(None)).order_by(_j.waits, _j.id).limit(limit)
        with self._database.write() as connection:
            copies = _locked(connection, first, skip=True)
            _remove(connection, copies)
        return copies

    def pause(self, queue: str) -> bool:
        raise cannot_pause()

    def unpause(self, queue: str) -> bool:
        raise cannot_pause()

    def paused(self, queues: Collection[str]) -> set[str]:
        return set()

    # -- sets

    def entries(self, set_name: str, *, offset: int = 0, limit: int = 100, newest: bool = False) -> Page:
        checked_window(offset, limit)
        here = _j.held_in == _checked(set_name)
        order = (_j.run_at.desc(), _j.id.desc()) if newest else (_j.run_at, _j.id)
        found = self._page(sa.select(*_COPY, _j.run_at).where(here).order_by(*order).offset(offset), limit)
        ((total,),) = self._query(sa.select(sa.func.count()).select_from(jobs).where(here))
        return Page([_entry(row) for row in found], int(total))

    def find(self, set_name: str, text: str, *, limit: int = 100) -> Found:
        checked_window(0, limit)
        here = sa.select(_j.id, _j.payload, _j.run_at).where(_j.held_in == _checked(set_name)).order_by(_j.run_at, _j.id)
        first = here.limit(LOOKED_THROUGH).subquery()
        position = sa.func.strpos if self._database.dialect == "postgresql" else sa.func.instr  # no wildcards, unlike LIKE
        holds = position(first.c.payload, checked_text(text)) > 0
        matching = sa.select(first.c.id).where(holds).order_by(first.c.run_at, first.c.id).limit(limit + 1)
        ids = [int(i) for (i,) in self._query(matching)]
        found = self._rows_of(sa.select(*_COPY, _j.run_at), ids, limit)
        more = self._query(sa.select(_j.id).where(_j.held_in == set_name).offset(LOOKED_THROUGH).limit(1))
        return Found([_entry(row) for row in found], len(found) == len(ids) and not more)

    def entry(self, set_name: str, key: str) -> Entry | None:
        here = (_j.held_in == _checked(set_name)) & _key_condition(key)
        return next((_entry(row) for row in self._query(sa.select(*_COPY, _j.run_at).where(here))), None)

    def restart(self, set_name: str, entries: Sequence[Entry]) -> int:
        now = self._clock.now()
        copies = {each.key: pushed_again(set_name, each, now) for each in distinct(entries)}
        rows = {key: row_of(copy) for key, copy in copies.items()}
        return self._translated(lambda: self._restart(_checked(set_name), entries, rows))

    @repeatable
    def _restart(self, set_name: str, entries: Sequence[Entry], rows: dict[str, Row]) -> int:
        with self._database.write() as connection:
            there = self._still_there(connection, set_name, entries)
            _remove(connection, [each.copy for each in there])
            if there:  # as new rows, at the end of their queue
                self._add(connection, [rows[each.key] for each in there])
        return len(there)

    def _still_there(self, connection: Connection, set_name: str, entries: Sequence[Entry]) -> list[Entry]:
        wanted = {each.copy.handle: each for each in distinct(entries)}
        found: list[Entry] = []
        for part in parts(sorted(wanted)):
            here = sa.select(_j.id, _j.jid).where(_j.id.in_(part), _j.held_in == set_name).order_by(_j.id)
            rows = connection.execute(for_update(connection, here)).all()
            found += [wanted[i] for i, jid in rows if wanted[i].copy.jid == jid]
        order = {each.key: n for n, each in enumerate(entries)}
        return sorted(found, key=lambda each: order[each.key])

    def kill(self, set_name: str, entries: Sequence[Entry]) -> int:
        if _checked(set_name) == DEAD:
            raise InputError("dead jobs cannot be killed; delete or restart them", code="bad_action")
        return self._translated(lambda: self._move(set_name, entries, {"held_in": DEAD, "run_at": self._clock.now()}))

    @repeatable
    def _move(self, set_name: str, entries: Sequence[Entry], values: dict[str, Any]) -> int:
        with self._database.write() as connection:
            there = self._still_there(connection, set_name, entries)
            for part in parts([each.copy.handle for each in there]):
                connection.execute(jobs.update().where(_j.id.in_(part)).values(values))
        return len(there)

    def delete(self, set_name: str, entries: Sequence[Entry]) -> int:
        return self._translated(lambda: self._delete(_checked(set_name), entries))

    @repeatable
    def _delete(self, set_name: str, entries: Sequence[Entry]) -> int:
        with self._database.write() as connection:
            there = self._still_there(connection, set_name, entries)
            _remove(connection, [each.copy for each in there])
        return len(there)

    def reschedule(self, set_name: str, entry: Entry, at: int) -> bool:
        if not 0 < at <= BIGINT:
            raise InputError("a time before 1970 is none to wait for", code="bad_time")
        return bool(self._translated(lambda: self._move(_checked(set_name), [entry], {"run_at": at})))

    def clear(self, set_name: str) -> int:
        count = 0
        until = self.entries(set_name, limit=1).total
        while count < until:  # in slices: deleting a million at once would hold the write lock for seconds
            gone = self._translated(lambda: self._clear(_checked(set_name)))
            count += gone
            if not gone:
                break
        return count

    @repeatable
    def _clear(self, set_name: str) -> int:
        first = sa.select(*_COPY).where(_j.held_in == set_name).order_by(_j.run_at, _j.id).limit(1_000)
        with self._database.write() as connection:
            copies = _locked(connection, first)
            _remove(connection, copies)
        return len(copies)

    # -- processes

    def processes(self) -> list[RemoteProcess]:
        """None: the ledger has the processes of this database."""
        return []

    def signal(self, identity: str, name: str) -> bool:
        return False


def _locked(connection: Connection, statement: Any, *, skip: bool = False) -> list[Copy]:
    if connection.dialect.name != "sqlite":
        statement = statement.with_for_update(skip_locked=skip)
    return [copy_of(row) for row in connection.execute(statement)]


def _remove(connection: Connection, copies: Sequence[Copy]) -> None:
    for part in parts([copy.handle for copy in copies]):
        connection.execute(jobs.delete().where(_j.id.in_(part)))


def _checked(set_name: str) -> str:
    if set_name not in SETS:
        raise InputError(f"there is no set {set_name!r}; there are {', '.join(SETS)}")
    return set_name


def _key_condition(key: str) -> Any:
    number, _, jid = key.partition("-")
    if not (number.isascii() and number.isdecimal() and 0 < len(number) < 19 and jid and len(jid) <= 64) or "\0" in jid:
        raise InputError(f"{key[:100]!r} is no entry: write its key as the list shows it", code="bad_key")
    return (_j.id == int(number)) & (_j.jid == jid)


def _entry(row: Sequence[Any]) -> Entry:
    copy = copy_of(row[:-1])
    return Entry(f"{copy.handle}-{copy.jid}", copy, int(row[-1] or 0), copy.payload, bool(peeked(copy.payload)))


def _job(row: Sequence[Any]) -> Entry:
    copy = copy_of(row)
    return Entry(job_key(copy), copy, None, copy.payload, bool(peeked(copy.payload)))
