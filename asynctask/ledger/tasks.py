"""Tasks: creation, items added in slices, the split's lease, closing. Only :func:`change_state` changes a Task's state."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Connection

from asynctask.clock import micros
from asynctask.core import readiness
from asynctask.core.readiness import Gate
from asynctask.core.states import GROWING, OPEN, Reason, State, Status, check_event, check_task
from asynctask.core.transitions import MERGE, Delta, Tolerance, due_callbacks, may_close
from asynctask.database import batches
from asynctask.database.notify import notify
from asynctask.database.retrying import repeatable
from asynctask.database.tables import (
    as_dict,
    events,
    task_ancestors,
    task_callbacks,
    task_log,
    task_rejects,
    task_tallies,
    tasks,
)
from asynctask.errors import Conflict, InputError, NotFound
from asynctask.ledger import children, corrections, search, sessions
from asynctask.ledger.base import MAX_SLOTS, PURGING, SLOTS_FROM, Ledger, NewItem, Reject, dumps, in_range, loads, try_lock
from asynctask.ledger.events import EventRecord, lock_order, move_counts, total_counts
from asynctask.ledger.hints import settle
from asynctask.ledger.progress import progress
from asynctask.messages import clean

_t, _e, _n = tasks.c, events.c, task_tallies.c
_ONE = sa.select(tasks).where(_t.id == sa.bindparam("task_id"))
_LOCKED = _ONE.with_for_update()  # on SQLite the write transaction excludes others

NEW_EVENT = ("job_id", "task_id", "seq", "status", "params", "first_row", "last_row", "created_at")
"""Columns of every new Event; a job of several items also has ``items``."""

MAX_SPLIT_TRIES = 10
"""How many processes in a row may claim a split that makes no progress. The number is large because, on a slow machine, a
slice takes seconds, in which a process may end or the database be unavailable for unrelated reasons."""


class SplitLost(Exception):
    """Another process holds the split, or it has ended: the caller must stop adding items. ``reason`` says which."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class NewCallback:
    """A callback of a submission: its name, a worker and its queue, and JSON-ready arguments. The name is that of its kind
    (``on_complete``, ...), for a second one with a number (``on_complete:2``)."""

    name: str
    worker: str
    queue: str
    args: Sequence[Any] = ()

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Throttle:
    """What limits the starts of a Task's jobs: the columns of these names, and whether it is ``paused`` from the start."""

    parallel: int | None = None
    interval_s: float = 0.0
    tolerated_failures: str | None = None
    start_at: int | None = None
    paused: bool = False
    key_field: str | None = None


@dataclass(frozen=True, slots=True)
class NewTask:
    """A Task to create. ``chunk_size``: items of a job, see :mod:`asynctask.iterable`. ``who``: the requester, for the log.
    ``additions``: of an open Task, as JSON text, see :mod:`asynctask.ledger.additions`.

    ``source`` (JSON-ready): where a split is resumed from; None if it cannot be resumed. ``context``: as JSON text."""

    worker_name: str
    queue: str
    priority: int
    title: str = ""
    owner: str = ""
    throttle: Throttle = Throttle()
    planned: int | None = None
    source: dict[str, Any] | None = None
    origin: str | None = None
    resubmit_of: int | None = None
    parent: int | None = None
    idempotency_key: str | None = None
    body_digest: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    session: str | None = None
    callbacks: Sequence[NewCallback] = ()
    chunk_size: int = 1
    context: str | None = None
    additions: str | None = None
    who: str = ""


@dataclass(frozen=True, slots=True)
class First:
    """A Task to create with its first slice: ``items`` are its jobs, ``rejects`` its rejected rows, ``cursor`` its last
    row.

    ``headers``: as in :class:`~asynctask.lists.rows.Names`. ``more``: False if the slice is the whole list, whose number of
    rows is ``new.planned``. Such a Task without jobs is ``rejected``, and releases its idempotency key for a corrected
    list; ``refused``: a rejected row of a strict list is the reason.
    """

    new: NewTask
    items: Sequence[NewItem] = ()
    rejects: Sequence[Reject] = ()
    cursor: int = 0
    headers: Mapping[str, Any] | None = None
    more: bool = True
    refused: bool = False


@dataclass(frozen=True, slots=True)
class TaskRow:
    """The columns of a Task for callers outside the ledger. ``source``: where its split is resumed from, None if it cannot
    be resumed; ``headers``: as in :class:`~asynctask.lists.rows.Names`, None if unknown."""

    id: int
    worker_name: str
    queue: str
    state: str
    state_reason: str | None
    split_state: str
    split_reason: str | None
    split_cursor: int
    source: dict[str, Any] | None
    created_jobs: int
    rejected: int
    planned: int | None
    created: int
    chunk_size: int
    headers: dict[str, Any] | None
    resubmit_of: int | None


@dataclass(frozen=True, slots=True)
class Made:
    """The result of :func:`create`. ``row``: the columns as written, for
    :func:`~asynctask.ledger.progress.first_progress`; None if the Task existed under the same idempotency key."""

    task_id: int
    created: bool
    row: dict[str, Any] | None = None


def create(ledger: Ledger, firsts: Sequence[First], *, lease_s: float) -> list[Made]:
    """Creates these Tasks with their first slices in one transaction, or none of them.

    A Task without ``more`` rows is sealed when it becomes visible. Any other is in ``splitting``, and this process holds
    the lease of its split for ``lease_s`` seconds. If ``firsts`` is a single Task whose owner has used its idempotency key
    with the same body, returns the existing Task, with ``created`` false. Raises :class:`InputError` (422) if the key was
    used with another body; :class:`NotFound` or :class:`Conflict` for a Task that cannot be corrected; with several Tasks,
    :class:`~sqlalchemy.exc.IntegrityError` if one of their idempotency keys was used.
    """
    try:
        return _insert(ledger, firsts, lease_s)
    except exc.IntegrityError:
        new = firsts[0].new
        if len(firsts) > 1 or new.idempotency_key is None:
            raise
        return [Made(first_answer(ledger, new), False)]


_INSERT: Final = tasks.insert().returning(_t.id, sort_by_parameter_order=True)
_LOG_COLUMNS: Final = ("task_id", "at", "who", "action", "detail")


@repeatable
def _insert(ledger: Ledger, firsts: Sequence[First], lease_s: float) -> list[Made]:
    now = ledger.now()
    rows = [_row(ledger, each, now, lease_s) for each in firsts]
    jids = ledger.ids.jids(sum(len(each.items) for each in firsts))
    with ledger.database.write() as connection:
        parents = [each.new.resubmit_of for each in firsts]
        above = [[] if parent is None else corrections.may_be_corrected(connection, parent) for parent in parents]
        if any(row["parent"] is not None for row in rows):
            held = children.adopt(connection, [(row["parent"], row["session_key"]) for row in rows])
            rows = [_row(ledger, each, now, lease_s, held=each.new.parent in held) for each in firsts]
        if any(row["key_field"] is not None for row in rows):  # after the ancestors, whose rows may be locked for long
            lock_order(connection)
        for row, (task_id,) in zip(rows, connection.execute(_INSERT, rows).all(), strict=True):
            row["id"] = int(task_id)
        made = list(zip(rows, firsts, strict=True))
        corrected = [
            {"ancestor_id": i, "task_id": row["id"]} for row, known in zip(rows, above, strict=True) for i in known
        ]
        if corrected:
            connection.execute(task_ancestors.insert(), corrected)
        entries = [entry for row, each in made for entry in _log_rows(each, row["id"], now)]
        batches.insert(connection, task_log, _LOG_COLUMNS, entries)
        if jids:
            add_jobs(connection, ledger, [({**row, "created_jobs": 0}, each.items) for row, each in made], jids, now)
        for row, each in made:
            _write_rest(connection, ledger, each, row)
        if jids:
            notify(connection)
    return [Made(row["id"], True, row) for row in rows]


_AS_GIVEN: Final = (
    "worker_name", "queue", "priority", "owner", "planned", "origin", "resubmit_of", "parent", "idempotency_key",
    "body_digest", "session", "chunk_size", "context", "additions",
)  # fmt: skip


def _row(ledger: Ledger, first: First, now: int, lease_s: float, *, held: bool = False) -> dict[str, Any]:
    """``held``: its parent is paused, and so is this Task."""
    check_task(None, State.SPLITTING, Reason.SUBMITTED)
    new, count = first.new, len(first.items)
    throttle = asdict(new.throttle)
    is_paused = throttle.pop("paused")
    key = sessions.key_of(new.owner, new.session)
    row: dict[str, Any] = {
        **{name: getattr(new, name) for name in _AS_GIVEN}, **throttle, "title": new.title[:255],
        "options": dumps(new.options), "split_source": dumps(new.source) if new.source is not None else None,
        "created_at": now, "updated_at": now,
        "slots": MAX_SLOTS if new.planned is not None and new.planned >= SLOTS_FROM else 1,
        "session_key": key, "session_waits": new.priority if key is not None else None,
        "callbacks": dumps([asdict(each) for each in new.callbacks]) if new.callbacks else None,
        "created": items_of(first.items), "created_jobs": count, "rejected": len(first.rejects),
        "split_cursor": first.cursor, "headers": None if first.headers is None else dumps(first.headers),
        "state": State.SPLITTING, "state_reason": None,
        "split_state": "splitting", "split_by": ledger.identity, "split_until": now + micros(lease_s),
        "generation_sealed": 0, "closed_at": None, "finished_at": None,
    }  # fmt: skip
    if not first.more and new.additions is not None:
        row |= _opened(row, now)
    elif not first.more:  # the Task is invisible between the two transitions, so one statement makes both
        refused = Reason.ROWS_REJECTED if first.refused else Reason.NOTHING_ACCEPTED
        state, reason = (State.RUNNING, Reason.SEALED) if count else (State.REJECTED, refused)
        check_task(State.SPLITTING, state, reason)
        row |= {"state": state, "split_state": "sealed", "split_by": None, "split_until": None, "generation_sealed": 1}
        if not count:
            state_reason = nothing_taken(reason, len(first.rejects))
            row |= {"state_reason": state_reason, "closed_at": now, "finished_at": now, "session_waits": None}
    if (is_paused or held) and row["state"] != State.REJECTED:
        check_task(row["state"], State.PAUSED, Reason.PAUSED)
        row |= {"state": State.PAUSED, "session_waits": None, "state_reason": None if is_paused else children.HELD}
    # A Task of a session gets its hints when it gets the session.
    gate = Gate(row["state"], new.priority, new.session is None, count > 0, opens=new.throttle.start_at)
    return row | readiness.hints(gate, now)._asdict()


def _opened(task: Mapping[str, Any], now: int) -> dict[str, Any]:
    """The columns of a Task whose list is complete, and which takes additions."""
    until = now + micros(loads(task["additions"])["limit_s"])
    return {"split_state": "open", "split_by": None, "split_until": until, "planned": None}


def _log_rows(first: First, task_id: int, now: int) -> list[tuple[Any, ...]]:
    new = first.new  # ``new.owner`` is a text from the client; ``new.who`` is the submitter
    detail = {"title": new.title, "worker": new.worker_name, **({"owner": new.owner} if new.owner else {})}
    who = clean(new.who)[:255]
    acts = [("submitted", dumps(detail), who), *([("paused", None, who)] if new.throttle.paused else [])]
    acts += [] if first.more else [("split sealed" if new.additions is None else "split open", None, "")]
    return [(task_id, now, by, act, told) for act, told, by in acts]


def _write_rest(connection: Connection, ledger: Ledger, first: First, row: dict[str, Any]) -> None:
    """Writes the parts that few Tasks have: rejected rows, a released idempotency key, a session."""
    write_rejects(connection, row["id"], first.rejects)
    if row["state"] == State.REJECTED:
        if row["idempotency_key"] is not None:  # after the insert, which checks the key
            connection.execute(tasks.update().where(_t.id == row["id"]).values(idempotency_key=None))
    elif row["session_key"] is not None:
        sessions.promote(connection, ledger, row["session_key"])


def nothing_taken(reason: Reason, rejected: int) -> str:
    """``state_reason`` of a Task without accepted rows, of which ``rejected`` rows were refused."""
    return str(reason) if reason is Reason.ROWS_REJECTED else "all_rejected" if rejected else "no_items"


def first_answer(ledger: Ledger, new: NewTask) -> int:
    """The id of the Task that the owner submitted first under this idempotency key. Raises :class:`InputError` (422) if its
    body was different, :class:`Conflict` if the Task was removed."""
    chosen = (_t.owner == new.owner) & (_t.idempotency_key == new.idempotency_key)
    with ledger.database.read() as connection:
        first = connection.execute(sa.select(_t.id, _t.body_digest).where(chosen)).one_or_none()
    if first is None:
        raise Conflict("a submission with this Idempotency-Key was just removed; send it again with a new key")
    if first.body_digest != new.body_digest:
        raise InputError(
            f"this Idempotency-Key was used for Task {first.id} with another body; use a new key for a new list",
            code="idempotency_key_reused",
        )
    return int(first.id)


def get(connection: Connection, task_id: int) -> dict[str, Any]:
    """One Task's columns. Raises :class:`NotFound`."""
    return _found(connection.execute(_ONE, {"task_id": in_range(task_id)}), task_id)


def read(ledger: Ledger, task_id: int) -> TaskRow:
    """One Task, in a transaction of its own. Raises :class:`NotFound`."""
    with ledger.database.read() as connection:
        return _task_row(get(connection, task_id))


def _task_row(row: dict[str, Any]) -> TaskRow:
    return TaskRow(
        row["id"], row["worker_name"], row["queue"], row["state"], row["state_reason"], row["split_state"],
        row["split_reason"], row["split_cursor"], loads(row["split_source"]), row["created_jobs"], row["rejected"],
        row["planned"], row["created"], row["chunk_size"], loads(row["headers"]), row["resubmit_of"],
    )  # fmt: skip


def lock(connection: Connection, task_id: int) -> dict[str, Any]:
    """Like :func:`get`, with the row locked until the transaction ends. Waits for the lock; background work uses
    :func:`~asynctask.ledger.base.try_lock` instead."""
    return _found(connection.execute(_LOCKED, {"task_id": in_range(task_id)}), task_id)


def _found(result: Any, task_id: int) -> dict[str, Any]:
    if (row := result.first()) is None or row.turning == PURGING:
        raise NotFound(f"there is no Task {task_id}")
    return as_dict(row)


def change_state(
    connection: Connection,
    ledger: Ledger,
    task: dict[str, Any],
    target: State,
    reason: Reason,
    **values: Any,
) -> bool:
    """Changes a Task's state by compare-and-set on state and generation, along a legal edge; no other code does so.

    ``task`` is the row as read; ``values`` are further columns to set. Returns whether the compare-and-set was won.
    """
    check_task(task["state"], target, reason)
    now = ledger.now()
    values = {**sessions.turning_to(task, target, reason, now), **values}
    result = connection.execute(
        tasks.update()
        .where(_t.id == task["id"], _t.state == task["state"], _t.generation == task["generation"])
        .values({"state": target, "version": _t.version + 1, "updated_at": now, **values})
    )
    if result.rowcount != 1:
        return False
    task.update(values, state=target)
    settle(connection, ledger, task)
    sessions.after_turn(connection, ledger, task, target)
    return True


def check_reopenable(task: dict[str, Any]) -> None:
    """Raises :class:`Conflict` unless the Task's items may be retried: it runs, is finished, is cancelled and closed, or
    paused itself because too many items failed."""
    if task["turning"] is not None:
        raise Conflict(f"Task {task['id']} still has rows to update ({task['turning']}); try again in a moment")
    over = task["state"] == State.CANCELLED and task["finished_at"] is not None
    failing = task["state_reason"] == Reason.TOO_MANY_FAILURES and task["split_state"] not in GROWING
    if (
        task["state"] not in (State.RUNNING, State.FINISHED)
        and not over
        and not (task["state"] == State.PAUSED and failing)
    ):
        raise Conflict(f"Task {task['id']} is {task['state']}; its items can be retried once it runs or is finished")


def open_generation(connection: Connection, ledger: Ledger, task: dict[str, Any], **values: Any) -> None:
    """Opens a new generation of a locked Task, whose reopened rows run again; ``values`` are further columns to set.

    Raises :class:`Conflict` as :func:`check_reopenable` does.
    """
    check_reopenable(task)
    opened = {"generation": task["generation"] + 1, "closed_at": None, "finished_at": None}
    change_state(connection, ledger, task, State.RUNNING, Reason.RETRIED, state_reason=None, **opened, **values)


def log(
    connection: Connection, ledger: Ledger, task_id: int, action: str, detail: dict[str, Any] | None, who: str = ""
) -> None:
    """Logs an action on a Task, with its details; ``who``: the requester."""
    row = {"task_id": task_id, "at": ledger.now(), "who": clean(who)[:255], "action": action}
    connection.execute(task_log.insert().values({**row, "detail": dumps(detail) if detail else None}))


@repeatable
def add_slice(
    ledger: Ledger,
    task_id: int,
    items: Sequence[NewItem],
    rejects: Sequence[Reject],
    *,
    after: int,
    cursor: int,
    lease_s: float,
    headers: Mapping[str, Any] | None = None,
) -> int:
    """Adds one slice of items, with the split's progress and the counts, in one transaction.

    The slice covers the source's rows after ``after``, up to ``cursor``, from which a process that takes the split over
    continues. The jobs may begin during the split. ``headers``: the columns of all rows up to ``cursor``, None if unknown.
    Returns the number of jobs created so far.

    Raises :class:`SplitLost` if this process no longer holds the split, the Task was cancelled, or another splitter moved
    the cursor meanwhile (after which this process may hold the lease again).
    """
    jids = ledger.ids.jids(len(items))
    corrects = any(each.number is not None for rows in (items, rejects) for each in rows)
    with ledger.database.write() as connection:
        # Ancestors first: they have smaller ids.
        above = corrections.lock_all(connection, corrections.ancestors(connection, task_id)) if corrects else {}
        task = lock(connection, task_id)
        _check_split_held(ledger, task)
        if task["split_cursor"] != after:
            raise SplitLost(
                f"row {task['split_cursor']} was reached by another split, this one continues after row {after}"
            )
        if corrects:
            items, rejects = corrections.take_rows(connection, task, above, items, rejects)
        now = ledger.now()
        grown = {
            **grown_by(task, items, len(rejects)), "split_cursor": cursor, "split_tries": 0,
            "headers": None if headers is None else dumps(headers), "split_until": now + micros(lease_s), "updated_at": now,
        }  # fmt: skip
        settle(connection, ledger, {**task, **grown}, **grown)
        if items:
            add_jobs(connection, ledger, [(task, items)], jids[: len(items)], now)
        write_rejects(connection, task_id, rejects)
        if items:
            notify(connection)
    return int(task["created_jobs"] + len(items))


def grown_by(task: Mapping[str, Any], items: Sequence[NewItem], rejected: int) -> dict[str, Any]:
    """The columns of a Task that these jobs and rejected rows change."""
    created = task["created"] + items_of(items)
    return {
        "created_jobs": task["created_jobs"] + len(items),
        "created": created,
        "rejected": task["rejected"] + rejected,
        "slots": MAX_SLOTS if created >= SLOTS_FROM else task["slots"],
        "version": task["version"] + 1,
    }


def add_jobs(
    connection: Connection,
    ledger: Ledger,
    added: Sequence[tuple[Mapping[str, Any], Sequence[NewItem]]],
    jids: Sequence[str],
    now: int,
) -> None:
    """Inserts the Events of new jobs, what a search finds them by and their positions in the lines of their keys, and
    counts them. ``added``: a Task's columns without these jobs, and its jobs; one Task, or several new ones."""
    numbered = [(task["id"], seq, one) for task, items in added for seq, one in enumerate(items, task["created_jobs"])]
    new = [(jid, *each) for jid, each in zip(jids, numbered, strict=True)]
    _insert_events(connection, new, now, {task["id"]: task["worker_name"] for task, _ in added})
    found = [(value, field, i, seq, row) for _, i, seq, one in new if one.search for field, value, row in one.search]
    search.add(connection, found)
    keyed = [task["id"] for task, _ in added if task["key_field"] is not None]
    sessions.add_positions(connection, keyed, low=added[0][0]["created_jobs"])
    counts = {
        (task["id"], ledger.slot(task["slots"])): Delta(enqueue=items_of(items), jobs=len(items))
        for task, items in added
        if items
    }
    move_counts(connection, counts, now)


def _insert_events(
    connection: Connection, new: Sequence[tuple[str, int, int, NewItem]], now: int, workers: Mapping[int, str]
) -> None:
    """Inserts the Events of items; each of ``new`` is (job id, Task id, number in the Task, item). ``workers``: the
    worker's name of each Task."""
    rows: list[tuple[Any, ...]]
    rows = [
        (jid, task_id, seq, "enqueue", one.params, one.row, one.last_row or one.row, now) for jid, task_id, seq, one in new
    ]
    columns: tuple[str, ...] = NEW_EVENT
    if any(one.items > 1 for *_, one in new):
        columns = (*columns, "items")
        rows = [(*row, one.items) for row, (*_, one) in zip(rows, new, strict=True)]
    if any(one.worker_name for *_, one in new):
        columns = (*columns, "worker_name", "options")
        rows = [(*row, one.worker_name, one.options) for row, (*_, one) in zip(rows, new, strict=True)]
    if any(one.key is not None for *_, one in new):
        columns = (*columns, "line")
        rows = [(*row, _line(one, workers[task_id])) for row, (_, task_id, _, one) in zip(rows, new, strict=True)]
    batches.insert(connection, events, columns, rows)


def items_of(jobs: Sequence[NewItem]) -> int:
    """The number of items of these jobs."""
    return sum([each.items for each in jobs])


def _line(item: NewItem, worker_name: str) -> int | None:
    return None if item.key is None else sessions.line_of(item.worker_name or worker_name, item.key)


def write_rejects(connection: Connection, task_id: int, rejects: Sequence[Reject]) -> None:
    """Stores rejected rows of a Task."""
    if rejects:
        rows = [{"row": each.row, "errors": dumps(list(each.errors)), "cells": dumps(each.cells)} for each in rejects]
        connection.execute(task_rejects.insert().values(task_id=task_id), rows)


def _check_split_held(ledger: Ledger, task: dict[str, Any]) -> None:
    if task["state"] == State.CANCELLED:
        raise SplitLost("cancelled")
    if task["split_state"] != "splitting":
        raise SplitLost(f"the split is {task['split_state']} already")
    if task["split_by"] != ledger.identity:
        raise SplitLost(f"{task['split_by']} took the split over")


@repeatable
def end_split(
    ledger: Ledger,
    task_id: int,
    reason: Reason,
    *,
    why: str | None = None,
    planned: int | None = None,
    detail: dict[str, Any] | None = None,
    anyone: bool = False,
) -> None:
    """Ends a split: from then on the generation closes once all its items are terminal. Created jobs continue.

    ``reason``: ``SEALED``, the list is complete; ``ROWS_REJECTED``, rows of a strict list of ``planned`` rows were refused,
    so no row was accepted; ``SPLIT_FAILED``, the split broke off, and the Task shows ``why``. ``detail``: ``text`` and
    ``params`` of ``why``, for translation, and its ``errors``; kept in the Task's log. ``anyone``: the caller is
    maintenance, which found the expired lease of a split that cannot be resumed. Raises :class:`SplitLost`.
    """
    with ledger.database.write() as connection:
        task = try_lock(connection, ledger, task_id) if anyone else lock(connection, task_id)
        if task is None:  # another transaction holds it; a later round of maintenance retries
            return
        if not anyone:
            _check_split_held(ledger, task)
        elif task["split_state"] != "splitting" or (task["split_until"] or 0) > ledger.now():
            return
        end_locked_split(connection, ledger, task, reason, why, planned, detail)


def end_locked_split(
    connection: Connection,
    ledger: Ledger,
    task: dict[str, Any],
    reason: Reason,
    why: str | None = None,
    planned: int | None = None,
    detail: dict[str, Any] | None = None,
) -> None:
    """As :func:`end_split`, of a locked Task."""
    strict, failed = reason is Reason.ROWS_REJECTED, reason is Reason.SPLIT_FAILED
    if reason is Reason.SEALED and task["split_state"] == "splitting" and task["additions"] is not None:
        opened = {**_opened(task, ledger.now()), "updated_at": ledger.now(), "version": _t.version + 1}
        connection.execute(tasks.update().where(_t.id == task["id"]).values(opened))
        log(connection, ledger, task["id"], "split open", None)
        return
    assert not (strict and task["created_jobs"]), "a strict list is taken as a whole or not at all"
    why = None if why is None else why[:1024]
    values: dict[str, Any] = {
        "split_state": "failed" if failed else "sealed", "split_reason": why, "split_by": None, "split_until": None,
        "generation_sealed": 1,
    }  # fmt: skip
    if not failed:
        values["planned"] = task["created"] + task["rejected"] if planned is None else planned
    now = ledger.now()
    if task["created_jobs"] == 0 and task["state"] in (State.SPLITTING, State.PAUSED):
        # No job to run or to wait for: rejected.
        state_reason = why or nothing_taken(reason, task["rejected"])
        values |= {"closed_at": now, "finished_at": now, "state_reason": state_reason[:255]}
        change_state(connection, ledger, task, State.REJECTED, reason if strict else Reason.NOTHING_ACCEPTED, **values)
    elif task["state"] == State.SPLITTING:
        change_state(
            connection, ledger, task, State.RUNNING, reason, state_reason=str(reason) if failed else None, **values
        )
    else:
        connection.execute(
            tasks.update().where(_t.id == task["id"]).values({**values, "version": _t.version + 1, "updated_at": now})
        )
    said = {"reason": why, **(detail or {})} if why else None
    log(connection, ledger, task["id"], f"split {values['split_state']}", said)


@repeatable
def refuse_submission(ledger: Ledger, task_id: int) -> None:
    """Releases the idempotency key of a Task without accepted rows, for a corrected upload."""
    with ledger.database.write() as connection:
        task = lock(connection, task_id)
        if task["created_jobs"] == 0:
            connection.execute(tasks.update().where(_t.id == task_id).values(idempotency_key=None))


@repeatable
def plan(ledger: Ledger, task_id: int, planned: int) -> None:
    """Stores the source's number of rows, for progress during the split."""
    with ledger.database.write() as connection:
        connection.execute(
            tasks.update()
            .where(_t.id == task_id, _t.split_by == ledger.identity)
            .values(planned=planned, slots=MAX_SLOTS if planned >= SLOTS_FROM else _t.slots, version=_t.version + 1)
        )


@repeatable
def claim_split(ledger: Ledger, task_id: int, *, lease_s: float, of: str | None = None) -> TaskRow | None:
    """Claims a split whose lease expired, or (``of``) takes it over from that process.

    Returns the Task (resume after ``split_cursor``), or None if another process holds the split. A split that
    :data:`MAX_SPLIT_TRIES` processes claimed without progress ends as failed, because it probably killed them.
    """
    with ledger.database.write() as connection:
        task = lock(connection, task_id)
        now = ledger.now()
        own = task["split_by"] in (of, ledger.identity)
        if task["split_state"] != "splitting" or not (own or (task["split_until"] or 0) <= now):
            return None
        tries = task["split_tries"] + (not own)
        if tries > MAX_SPLIT_TRIES:
            why = f"split_gave_up: {MAX_SPLIT_TRIES} processes ended at row {task['split_cursor']}; is the file too large?"
            end_locked_split(connection, ledger, task, Reason.SPLIT_FAILED, why)
            return None
        values = {"split_by": ledger.identity, "split_until": now + micros(lease_s), "split_tries": tries}
        connection.execute(tasks.update().where(_t.id == task_id).values(values))
    return _task_row(task)


def stalled_splits(connection: Connection, now: int) -> list[tuple[int, bool]]:
    """Tasks whose split's lease expired: (id, whether it can be resumed)."""
    rows = connection.execute(
        sa.select(_t.id, _t.split_source.is_not(None))
        .where(_t.finished_at.is_(None), _t.split_state == "splitting", _t.split_until <= now)
        .order_by(_t.id)
    )
    return [(int(task_id), bool(resumable)) for task_id, resumable in rows]


@repeatable
def forget_sources(ledger: Ledger, task_ids: Sequence[int]) -> None:
    """Removes the source of these Tasks, whose split has ended and whose list is no longer stored."""
    with ledger.database.write() as connection:
        over = _t.id.in_(task_ids) & (_t.split_state != "splitting")
        connection.execute(tasks.update().where(over).values(split_source=None))


# -- a Task that pauses itself because too many items failed


_OPEN_ITEMS = _n.enqueue + _n.working + _n.stopped


def tolerance_of(task: Mapping[str, Any]) -> Tolerance | None:
    """The tolerance of a Task (its columns); None: no limit, or an invalid value that a user wrote into the row."""
    if task["tolerated_failures"] is None:
        return None
    try:
        return Tolerance.parse(task["tolerated_failures"])
    except ValueError:
        return None


def tolerated_left(connection: Connection, task: Mapping[str, Any]) -> int | None:
    """How many more items of a Task (its columns) may fail before it pauses itself; negative: it is over its limit; None:
    it has no limit, or the limit is not known while the list is split."""
    if (tolerance := tolerance_of(task)) is None:
        return None
    counts = total_counts(connection, task["id"])
    return tolerance.left(counts.failed, counts.error, _known_total(task))


def _known_total(task: Mapping[str, Any]) -> int | None:
    total: int | None = task["planned"] if task["split_state"] in GROWING else task["created"]
    return total


def pause_failing(ledger: Ledger, task_ids: Iterable[int] | None = None) -> list[int]:
    """Pauses those Tasks, of ``task_ids`` or of all, with more failed items than they tolerate; returns their ids.

    A Task with rows left to update is left to maintenance, because a retry removes failures.
    """
    given = {} if task_ids is None else {"ids": list(task_ids)}
    with ledger.database.read() as connection:
        found = [as_dict(row) for row in connection.execute(_failing(bool(given)), given)]
    return [int(task["id"]) for task in found if _is_failing(task) and _pause_failing(ledger, int(task["id"]))]


@cache
def _failing(some: bool) -> Any:
    """Cached: it runs after the flushes of every Task that has a limit, and once a second."""
    statement = (
        sa.select(
            _t.id, _t.tolerated_failures, _t.split_state, _t.planned, _t.created,
            sa.func.sum(_n.failed).label("failed"), sa.func.sum(_n.error).label("error"),
            sa.func.sum(_OPEN_ITEMS).label("open"),
        )
        .join(task_tallies, _n.task_id == _t.id)
        .where(_t.finished_at.is_(None), _t.tolerated_failures.is_not(None), _t.turning.is_(None))
        .where(_t.state.in_((str(State.SPLITTING), str(State.RUNNING))))
        .group_by(_t.id, _t.tolerated_failures, _t.split_state, _t.planned, _t.created)
    )  # fmt: skip
    return statement.where(_t.id.in_(sa.bindparam("ids", expanding=True))) if some else statement


def _is_failing(task: Mapping[str, Any]) -> bool:
    tolerance = tolerance_of(task)
    left = None if tolerance is None else tolerance.left(int(task["failed"]), int(task["error"]), _known_total(task))
    # Without jobs left to start, it ends instead of waiting for a person.
    return left is not None and left < 0 and (int(task["open"]) > 0 or task["split_state"] in GROWING)


@repeatable
def _pause_failing(ledger: Ledger, task_id: int) -> bool:
    with ledger.database.write() as connection:
        task = try_lock(connection, ledger, task_id)
        if task is None or task["state"] not in (State.SPLITTING, State.RUNNING) or task["turning"] is not None:
            return False
        counts = total_counts(connection, task_id)
        open_ = counts.enqueue + counts.working + counts.stopped
        if not _is_failing({**task, "failed": counts.failed, "error": counts.error, "open": open_}):
            return False
        reason = Reason.TOO_MANY_FAILURES
        change_state(connection, ledger, task, State.PAUSED, reason, state_reason=str(reason))
        detail = {"failed": counts.failed, "error": counts.error, "tolerated_failures": task["tolerated_failures"]}
        log(connection, ledger, task_id, "paused", {"reason": str(reason), **detail})
    return True


# -- closing: once per generation, after a flush or by maintenance
#
# Checked in a transaction after the one that commits outcomes (also those of callbacks): inside that one, concurrent
# processes would each see the other's job open, and none would close the Task. Maintenance closes Tasks with locked rows.


def candidates(connection: Connection, task_ids: Iterable[int] | None = None) -> dict[int, int]:
    """Sealed, unclosed Tasks without an open item by their counts, of ``task_ids`` or of all, as id -> number of jobs."""
    given = {} if task_ids is None else {"ids": list(task_ids)}
    return {int(i): int(jobs) for i, jobs in connection.execute(_candidates(bool(given)), given)}


@cache
def _candidates(some: bool) -> Any:
    """Cached: it runs after every flush."""
    # Outer join: a Task cancelled before its first slice has no counts.
    open_items = sa.func.coalesce(sa.func.sum(_OPEN_ITEMS), 0)
    statement = (
        sa.select(_t.id, _t.created_jobs)
        .outerjoin(task_tallies, _n.task_id == _t.id)
        .where(_t.finished_at.is_(None), _t.closed_at.is_(None), _t.generation_sealed == 1, _t.turning.is_(None))
        .where((_t.children == 0) | ~children.open_of(_t.id))
        .group_by(_t.id, _t.created_jobs)
        .having(open_items == 0)
    )
    return statement.where(_t.id.in_(sa.bindparam("ids", expanding=True))) if some else statement


@repeatable
def try_close(ledger: Ledger, task_id: int) -> bool:
    """Closes the Task's generation if no item is open by the counts and no row is. Returns whether this caller did."""
    with ledger.database.read() as connection:
        task = get(connection, task_id)
        if task["closed_at"] is not None or not _may_close(connection, task) or _open_rows(connection, task_id):
            return False
    # Until the compare-and-set only an explicit retry can open a row, and it raises the generation.
    with ledger.database.write() as connection:
        current = try_lock(connection, ledger, task_id)
        if current is None or current["generation"] != task["generation"] or current["closed_at"] is not None:
            return False
        if not _may_close(connection, current):
            return False
        _close(connection, ledger, current)
    ledger.closed(task_id)
    _close_above(ledger, [task])
    return True


def _close_above(ledger: Ledger, ended: Iterable[Any]) -> None:
    """Closes the parents of these Tasks (their columns, or rows of them) that waited for them alone."""
    for parent in sorted({each["parent"] for each in ended if each["parent"] is not None}):
        with suppress(NotFound):  # it was purged
            try_close(ledger, parent)


def _close(connection: Connection, ledger: Ledger, task: dict[str, Any]) -> None:
    """Closes the generation of a locked Task and queues its callbacks; without any, the Task is done."""
    callbacks = _due_callbacks(connection, task)
    now = ledger.now()
    if task["state"] == State.CANCELLED:
        over = {"closed_at": now, "finished_at": None if callbacks else now, "updated_at": now}
        connection.execute(tasks.update().where(_t.id == task["id"]).values(**over, version=_t.version + 1))
        sessions.release(connection, ledger, task)
    else:
        # The Task paused itself while its last rows were in flight.
        paused: dict[str, Any] = {"state_reason": None} if task["state_reason"] == Reason.TOO_MANY_FAILURES else {}
        change_state(connection, ledger, task, State.FINALIZING, Reason.CLOSED, closed_at=now, **paused)
        if not callbacks:
            change_state(connection, ledger, task, State.FINISHED, Reason.CALLED_BACK, finished_at=now)
    if callbacks:
        _queue_callbacks(connection, ledger, task, callbacks)
    log(connection, ledger, task["id"], "closed", {"generation": task["generation"]})


def close_after(ledger: Ledger, record: EventRecord) -> None:
    """Closes the Task of this ended Event, or ends its ``finalizing``, if it waits for no other Event."""
    if record.task_id is not None:
        try_close(ledger, record.task_id)
    elif record.callback_of is not None:
        try_finish(ledger, record.callback_of)


def _may_close(connection: Connection, task: dict[str, object]) -> bool:
    counts = total_counts(connection, int(str(task["id"])))
    if not may_close(str(task["state"]), bool(task["generation_sealed"]), task["turning"] is not None, counts):
        return False
    return not task["children"] or not children.any_open(connection, int(str(task["id"])))


def _open_rows(connection: Connection, task_id: int) -> bool:
    statuses = [str(status) for status in OPEN]
    found = sa.select(sa.literal(1)).where(events.c.task_id == task_id, events.c.status.in_(statuses)).limit(1)
    return connection.execute(found).first() is not None


# -- small Tasks, many per transaction: alone, each would cost as many statements and commits as a large one

MOST_CLOSED: Final = 100
"""Most jobs of a small Task; larger ones are closed one by one, to keep transactions short."""

_CLOSED_AT_ONCE: Final = 200
"""Largest number of small Tasks in one transaction."""

_TO_CLOSE: Final = (
    _t.id, _t.state, _t.generation, _t.generation_sealed, _t.closed_at, _t.turning, _t.session_key, _t.callbacks,
    _t.created_jobs, _t.parent, _t.children,
)  # fmt: skip
_LOG: Final = task_log.insert()


@repeatable
def close_small(ledger: Ledger, task_ids: Collection[int]) -> list[int]:
    """Closes those of these Tasks that run, have no session, no callbacks, few jobs, and no open row; returns their ids.

    ``task_ids``: from :func:`candidates`, so no item is open by the counts. No row of a locked Task can be reopened, so
    this transaction checks the rows itself. :func:`try_close` handles the other Tasks.
    """
    with ledger.database.write() as connection:
        chosen = sorted(task_ids)[:_CLOSED_AT_ONCE]
        free = _FREE.execute(connection, chosen) if chosen else ()
        found = {int(row.id): row for row in free if _is_small(row)}
        if not found:
            return []
        for (task_id,) in _WITH_OPEN.execute(connection, list(found)).all():
            del found[int(task_id)]
        if not found:
            return []
        # They have no callbacks, so one statement passes through finalizing.
        check_task(State.RUNNING, State.FINALIZING, Reason.CLOSED)
        check_task(State.FINALIZING, State.FINISHED, Reason.CALLED_BACK)
        now = ledger.now()
        _CLOSE.execute(connection, list(found), now=now)
        entry = {"at": now, "who": "", "action": "closed"}
        logged = [{**entry, "task_id": i, "detail": dumps({"generation": row.generation})} for i, row in found.items()]
        connection.execute(_LOG, logged)
    for task_id in found:
        ledger.closed(task_id)
    _close_above(ledger, [row._mapping for row in found.values()])
    return list(found)


def _is_small(task: Any) -> bool:
    return bool(
        task.state == State.RUNNING
        and task.generation_sealed
        and task.closed_at is None
        and task.turning is None
        and task.session_key is None
        and task.callbacks is None
        and not task.children
        and task.created_jobs <= MOST_CLOSED
    )


_FREE: Final = batches.ByValues(_t.id, lambda its: sa.select(*_TO_CLOSE).where(its).order_by(_t.id), skip_locked=True)
_WITH_OPEN: Final = batches.ByValues(
    _e.task_id, lambda its: sa.select(_e.task_id).where(its, _e.status.in_(sorted(map(str, OPEN)))).distinct()
)


def _closed(its: Any) -> Any:
    at: Any = sa.bindparam("now")
    over = {"state": State.FINISHED, "closed_at": at, "finished_at": at, "updated_at": at, "ready": None, "due_next": None}
    return tasks.update().where(its, _t.state == State.RUNNING).values(**over, version=_t.version + 2)


_CLOSE: Final = batches.ByValues(_t.id, _closed)


# -- callbacks: stand-alone Events, queued in the transaction that closes their generation
#
# The Task waits for its callbacks in ``finalizing``, or in ``cancelled`` without ``finished_at``.

CALLBACK_RETRIES: Final = 4
"""Retries of a callback, which is so performed at most five times."""

_c = task_callbacks.c
_CALLBACKS: Final = (
    sa.select(_c.name, _e.id, _e.status)
    .select_from(task_callbacks.outerjoin(events, _e.job_id == _c.job_id))
    .where(_c.task_id == sa.bindparam("task_id"), _c.generation == sa.bindparam("generation"))
    .order_by(_c.name)
)
_CALLED_BACK: Final = (
    sa.select(_t.id)
    .where(_t.finished_at.is_(None), _t.closed_at.is_not(None))
    .where(
        ~sa.exists().where(
            _c.task_id == _t.id,
            _c.generation == _t.generation,
            _e.job_id == _c.job_id,
            _e.status.in_([str(status) for status in sorted(OPEN)]),
        )
    )
    .order_by(_t.id)
)


def _queue_callbacks(
    connection: Connection, ledger: Ledger, task: dict[str, Any], callbacks: Sequence[NewCallback]
) -> None:
    """Inserts an Event for each of these callbacks, due now. A callback gets its arguments and the progress object."""
    check_event(None, Status.ENQUEUE, Reason.SUBMITTED)
    now, task_id = ledger.now(), int(task["id"])
    queued = list(zip(ledger.ids.jids(len(callbacks)), callbacks, strict=True))
    job_ids = {callback.name: jid for jid, callback in queued}
    (said,) = progress(connection, [task_id], now)
    for each in said["callbacks"]:
        if (jid := job_ids.get(each["name"])) is not None:
            each |= {"status": str(Status.ENQUEUE), "job_id": jid}
    options = dumps({"retry": CALLBACK_RETRIES, "priority": task["priority"], "callback_of": task_id})
    shared = {"status": Status.ENQUEUE, "options": options, "due_at": now, "created_at": now, "callback_of": task_id}
    rows = [
        {
            "job_id": jid,
            "worker_name": callback.worker,
            "queue": callback.queue,
            "params": dumps([*callback.args, said]),
            **shared,
        }
        for jid, callback in queued
    ]
    connection.execute(events.insert(), rows)
    names = [
        {
            "task_id": task_id,
            "generation": task["generation"],
            "name": callback.name,
            "worker_name": callback.worker,
            "job_id": jid,
        }
        for jid, callback in queued
    ]
    connection.execute(task_callbacks.insert(), names)
    notify(connection)


def called_back(connection: Connection) -> list[int]:
    """The ids of Tasks that are closed and not finished, without an open callback."""
    return [int(i) for (i,) in connection.execute(_CALLED_BACK)]


def callbacks_of(connection: Connection, task: dict[str, Any]) -> list[tuple[str, int | None, str | None]]:
    """The queued callbacks of the Task's generation: name, and the Event's id and status (None: it no longer exists)."""
    found = connection.execute(_CALLBACKS, {"task_id": task["id"], "generation": task["generation"]})
    return [(name, event_id, status) for name, event_id, status in found]


def _due_callbacks(connection: Connection, task: dict[str, Any], *, merge_failed: bool | None = None) -> list[NewCallback]:
    """The callbacks that a closed generation queues: of an export first its merge (``merge_failed`` None), on whose failure
    the others depend."""
    known = [NewCallback(**each) for each in loads(task["callbacks"]) or ()]
    if merge_failed is None and (merge := [each for each in known if each.name == MERGE]):
        return merge
    counts = total_counts(connection, task["id"])
    if task["children"]:
        counts.add(children.ends(connection, task["id"]))
    due = due_callbacks(task["state"], counts)
    return [each for each in known if each.kind in (("on_complete", "on_failure") if merge_failed else due)]


def change_state_unless_cancelled(
    connection: Connection, ledger: Ledger, task: dict[str, Any], target: State, reason: Reason, **values: Any
) -> None:
    """As :func:`change_state`; but a cancelled Task stays cancelled, and only gets ``values``."""
    if task["state"] == State.CANCELLED:
        columns = {**values, "updated_at": ledger.now(), "version": _t.version + 1}
        connection.execute(tasks.update().where(_t.id == task["id"]).values(columns))
    else:
        change_state(connection, ledger, task, target, reason, **values)


@repeatable
def try_finish(ledger: Ledger, task_id: int) -> bool:
    """Finishes a closed Task if all its callbacks have ended. Returns whether this caller did.

    If a callback did not end in ``finish``, the Task's reason is ``callback_failed``.
    """
    with ledger.database.write() as connection:
        task = try_lock(connection, ledger, task_id)
        if task is None or task["closed_at"] is None or task["finished_at"] is not None:
            return False
        found = callbacks_of(connection, task)
        if any(status in OPEN for _, _, status in found):
            return False
        failed = sorted(name for name, _, status in found if status != Status.FINISH)
        if [name for name, _, _ in found] == [MERGE] and (
            callbacks := _due_callbacks(connection, task, merge_failed=bool(failed))
        ):
            _queue_callbacks(connection, ledger, task, callbacks)
            return False
        reason = Reason.CALLBACK_FAILED if failed else Reason.CALLED_BACK
        values = {"finished_at": ledger.now(), "state_reason": str(reason) if failed else task["state_reason"]}
        change_state_unless_cancelled(connection, ledger, task, State.FINISHED, reason, **values)
        log(connection, ledger, task_id, str(reason), {"generation": task["generation"], "failed": failed})
    _close_above(ledger, [task])
    return True
