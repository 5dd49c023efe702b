"""Tasks that are made with all their items: lists that fit one slice, those that come together in one transaction.

Whoever sees such a Task sees a list that is sealed: there is no split, no lease and nothing to take up.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import exc
from sqlalchemy.engine import Connection

from asynctask.core.states import Reason, State, check_task
from asynctask.core.transitions import Delta
from asynctask.database import batches
from asynctask.database.notify import LEDGER, notify
from asynctask.database.retrying import repeatable
from asynctask.database.tables import events, task_log, tasks
from asynctask.errors import Unavailable
from asynctask.ledger import counters, sessions
from asynctask.ledger.base import Ledger, dumps
from asynctask.ledger.tasks import (
    NEW_EVENT,
    NewItem,
    NewTask,
    Reject,
    described,
    first_answer,
    nothing_taken,
    said_at_submit,
    write_rejects,
)
from asynctask.messages import clean

__all__ = ["GroupSubmit", "NewWhole", "Whole"]

MOST_ROWS: Final = 1_000
"""Rows of one transaction: a list of so many is written alone."""

_t = tasks.c
_INSERT: Final = tasks.insert().returning(_t.id, sort_by_parameter_order=True)
_LOGGED: Final = ("task_id", "at", "who", "action", "detail")


@dataclass(frozen=True, slots=True)
class NewWhole:
    """A Task with all its items.

    ``planned``: how many rows the list has; ``cursor``: the last of them; ``refused``: the list is strict, and its
    ``rejects`` refuse it. Of one with no items nothing was accepted: it is ``rejected``, and keeps no idempotency key, for
    a corrected list may use it. ``tell``: whoever is on duty is woken to dispatch it.
    """

    new: NewTask
    items: Sequence[NewItem]
    rejects: Sequence[Reject]
    planned: int
    cursor: int
    refused: bool = False
    tell: bool = False

    @property
    def rows(self) -> int:
        """How many rows it writes."""
        return len(self.items) + len(self.rejects)


@dataclass(frozen=True, slots=True)
class Whole:
    """A Task that was made with all its items. ``row``: its columns as they were written; None where it was ``created``
    before, under the same idempotency key."""

    task_id: int
    created: bool
    row: dict[str, Any] | None


@dataclass(slots=True)
class _Waiting:
    whole: NewWhole
    made: Whole | None = None
    error: BaseException | None = None


@dataclass
class GroupSubmit:
    """The group commit of submissions: what comes while a transaction is being committed is written with the next one.

    Each caller waits until its own Task stands, and is told what became of that one alone.
    """

    ledger: Ledger
    _waiting: list[_Waiting] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def create(self, whole: NewWhole) -> Whole:
        """Makes a Task with its items.

        Returns the first submission's Task, not ``created``, where the owner's idempotency key was used before with the
        same body. Raises :class:`InputError` (422) where it was used with another body, and LedgerUnavailable.
        """
        mine = _Waiting(whole)
        with self._lock:
            self._waiting.append(mine)
        with self._turn:
            if mine.made is None and mine.error is None:
                self._write(self._take())
        if mine.error is not None:
            raise mine.error
        assert mine.made is not None
        return mine.made

    def _take(self) -> list[_Waiting]:
        """Those that came first, the caller's own at the latest with the last of them: it holds the turn until then."""
        with self._lock:
            taken, self._waiting = self._waiting, []
        return taken

    def _write(self, taken: list[_Waiting]) -> None:
        while taken:
            count = rows = 0
            for each in taken:
                rows += each.whole.rows
                if count and rows > MOST_ROWS:
                    break
                count += 1
            self._write_some(taken[:count])
            del taken[:count]

    def _write_some(self, some: list[_Waiting]) -> None:
        try:
            for each, made in zip(some, _create(self.ledger, [each.whole for each in some]), strict=True):
                each.made = made
        except BaseException as error:
            if len(some) == 1 or isinstance(error, Unavailable):
                for each in some:
                    each.error = error
                return
            for each in some:  # one of them is at fault, and the others must not hear of it
                self._write_some([each])


def _create(ledger: Ledger, wholes: Sequence[NewWhole]) -> list[Whole]:
    try:
        return _insert(ledger, wholes)
    except exc.IntegrityError:
        new = wholes[0].new
        if len(wholes) > 1 or new.idempotency_key is None:
            raise
        return [Whole(first_answer(ledger, new), False, None)]


@repeatable
def _insert(ledger: Ledger, wholes: Sequence[NewWhole]) -> list[Whole]:
    now = ledger.now()
    rows = [_row(each, now) for each in wholes]
    jids = iter(ledger.ids.jids(sum(len(each.items) for each in wholes)))
    with ledger.database.write() as connection:
        ids = [int(i) for (i,) in connection.execute(_INSERT, rows)]
        made = list(zip(ids, wholes, rows, strict=True))
        entries = [entry for task_id, each, _ in made for entry in _logged(each.new, task_id, now)]
        batches.insert(connection, task_log, _LOGGED, entries)
        new_events = [
            (next(jids), task_id, seq, "enqueue", one.params, one.row, one.row, now)
            for task_id, each, _ in made
            for seq, one in enumerate(each.items)
        ]
        batches.insert(connection, events, NEW_EVENT, new_events)
        moved = {
            (task_id, ledger.slot(row["slots"])): Delta(enqueue=len(each.items), jobs=len(each.items))
            for task_id, each, row in made
        }
        counters.move(connection, moved, now)
        for task_id, each, row in made:
            _write_rest(connection, ledger, task_id, each, row)
        if any(each.tell and each.items for each in wholes):
            notify(connection, LEDGER)
    return [Whole(task_id, True, {**row, "id": task_id}) for task_id, _, row in made]


def _row(whole: NewWhole, now: int) -> dict[str, Any]:
    new, count = whole.new, len(whole.items)
    refused = Reason.ROWS_REJECTED if whole.refused else Reason.NOTHING_ACCEPTED
    state, reason = (State.RUNNING, Reason.SEALED) if count else (State.REJECTED, refused)
    # Nobody sees the Task between the two steps, so one statement takes both.
    check_task(None, State.SPLITTING, Reason.SUBMITTED)
    check_task(State.SPLITTING, state, reason)
    row = {
        **described(new, now), "state": state, "split_state": "sealed", "generation_sealed": 1, "created": count,
        "created_jobs": count, "rejected": len(whole.rejects), "planned": whole.planned, "split_cursor": whole.cursor,
        "ready": None, "closed_at": None, "finished_at": None, "state_reason": None,
    }  # fmt: skip
    if not count:
        said = nothing_taken(reason, len(whole.rejects))
        row |= {"state_reason": said, "closed_at": now, "finished_at": now, "session_waits": None}
    elif row["session_key"] is None:
        row["ready"] = new.priority
    return row


def _logged(new: NewTask, task_id: int, now: int) -> list[tuple[Any, ...]]:
    """Rows of the columns :data:`_LOGGED`."""
    submitted = (task_id, now, clean(new.owner)[:255], "submitted", dumps(said_at_submit(new)))
    return [submitted, (task_id, now, "", "split sealed", None)]


def _write_rest(connection: Connection, ledger: Ledger, task_id: int, whole: NewWhole, row: dict[str, Any]) -> None:
    """What few Tasks have."""
    write_rejects(connection, task_id, whole.rejects)
    if not whole.items and whole.new.idempotency_key is not None:  # not before: another Task may have had the key
        connection.execute(tasks.update().where(_t.id == task_id).values(idempotency_key=None))
    if whole.items and row["session_key"] is not None:
        sessions.promote(connection, ledger, row["session_key"])
