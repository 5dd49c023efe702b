"""Open Tasks: additions after the submission, and the seal that ends them.

The ``split_state`` of an open Task is ``open``: its own list is complete, and no process holds its split. The Task stays in
``splitting``, and such a Task never closes. Its column ``additions`` has as JSON ``limit_s``, the seconds without an
addition after which maintenance seals it, at ``split_until``, and ``unique``, the fields in which no two rows of one
addition may be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.clock import micros
from asynctask.core.states import Reason, State
from asynctask.database.notify import notify
from asynctask.database.retrying import repeatable
from asynctask.database.tables import task_additions, tasks
from asynctask.errors import Conflict, InputError, TooLarge
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger, NewItem, Reject, dumps, loads, try_lock
from asynctask.ledger.hints import settle

_t, _a = tasks.c, task_additions.c

DEFAULT_LIMIT_S: Final = 86_400.0
"""Seconds without an addition after which an open Task is sealed, if its submission does not say."""


@dataclass(frozen=True, slots=True)
class NewRows:
    """The rows of an addition. ``numbered`` returns its items and its rejected rows, numbered after a row of the Task;
    ``headers`` the columns of the Task with those of these rows. ``count``: how many rows. ``digest``: of the body, for
    ``key``, the idempotency key."""

    count: int
    numbered: Callable[[int], tuple[Sequence[NewItem], Sequence[Reject]]]
    headers: Callable[[Mapping[str, Any] | None], Mapping[str, Any] | None]
    key: str | None = None
    digest: str = ""
    who: str = ""


@dataclass(frozen=True, slots=True)
class Added:
    """An addition as written. ``first_row``: of its rows, or the next one of the Task if it has none; ``replayed``: it was
    written before, under the same idempotency key."""

    first_row: int
    accepted: int
    rejected: int
    replayed: bool = False


@repeatable
def add(ledger: Ledger, task_id: int, new: NewRows, *, max_rows: int) -> Added:
    """Adds rows to an open Task in one transaction.

    Raises :class:`Conflict` if the Task takes none, :class:`TooLarge` if it would have more than ``max_rows``,
    :class:`InputError` (422) if the idempotency key was used with another body.
    """
    jids = ledger.ids.jids(new.count)
    with ledger.database.write() as connection:
        task = task_rows.lock(connection, task_id)
        if (replayed := _first_answer(connection, task_id, new)) is not None:
            return replayed
        _check_open(task)
        if task["created"] + task["rejected"] + new.count > max_rows:
            raise TooLarge(
                f"Task {task_id} has {task['created'] + task['rejected']:,} rows, and with these it would have more than"
                f" max_rows ({max_rows:,}); submit the rest as another Task",
                code="too_many_rows",
            )
        after, now = int(task["split_cursor"]), ledger.now()
        items, rejects = new.numbered(after)
        numbers = [*(each.row for each in items), *(each.row for each in rejects)]
        first, last = min(numbers, default=after + 1), max(numbers, default=after)
        added = Added(first, len(items), len(rejects))
        headers = new.headers(loads(task["headers"]))
        grown = {
            **task_rows.grown_by(task, items, len(rejects)), "split_cursor": last, "updated_at": now,
            "split_until": now + micros(_limit_s(task)), "headers": None if headers is None else dumps(headers),
        }  # fmt: skip
        settle(connection, ledger, {**task, **grown}, **grown)
        if items:
            task_rows.add_jobs(connection, ledger, [(task, items)], jids[: len(items)], now)
            notify(connection)
        task_rows.write_rejects(connection, task_id, rejects)
        if new.key is not None:
            kept = {"first_row": first, "accepted": added.accepted, "rejected": added.rejected}
            connection.execute(
                task_additions.insert().values(task_id=task_id, idempotency_key=new.key, body_digest=new.digest, **kept)
            )
        if new.who:  # a job that adds has no name, and the Events of its rows tell as much
            said = {"accepted": added.accepted, "rejected": added.rejected, "after_row": after}
            task_rows.log(connection, ledger, task_id, "added", said, new.who)
    return added


def _first_answer(connection: Connection, task_id: int, new: NewRows) -> Added | None:
    """The addition that was written first under this idempotency key. Raises :class:`InputError` for another body."""
    if new.key is None:
        return None
    chosen = sa.select(task_additions).where(_a.task_id == task_id, _a.idempotency_key == new.key)
    if (row := connection.execute(chosen).one_or_none()) is None:
        return None
    if row.body_digest != new.digest:
        raise InputError(
            f"this Idempotency-Key was used for another addition to Task {task_id}; use a new key for new items",
            code="idempotency_key_reused",
        )
    return Added(int(row.first_row), int(row.accepted), int(row.rejected), replayed=True)


def _check_open(task: Mapping[str, Any]) -> None:
    if task["split_state"] == "open":  # a cancel ends it
        return
    name = f"Task {task['id']}"
    if task["split_state"] == "splitting" and task["additions"] is not None:
        raise Conflict(f"the list with which {name} was submitted is still being read; add to it in a moment")
    if task["additions"] is None:
        raise Conflict(f"{name} was not submitted with open, so it takes no more items; submit them as another Task")
    how = task["split_state"] if task["state"] in (State.RUNNING, State.PAUSED) else task["state"]
    raise Conflict(f"{name} is {how}, so it takes no more items; submit them as another Task")


@repeatable
def seal(ledger: Ledger, task_id: int, *, who: str = "") -> bool:
    """Ends the additions to a Task, which closes once its items have ended. Returns whether it was open.

    Raises :class:`Conflict` for a Task that was never open, was cancelled, or whose own list is still being read.
    """
    with ledger.database.write() as connection:
        task = task_rows.lock(connection, task_id)
        if task["additions"] is None:
            raise Conflict(f"Task {task_id} was not submitted with open, so there is nothing to seal")
        if task["split_state"] == "splitting":
            raise Conflict(f"the list with which Task {task_id} was submitted is still being read; seal it in a moment")
        if task["split_state"] == "cancelled":
            raise Conflict(f"Task {task_id} is cancelled; there is nothing to seal")
        if task["split_state"] != "open":
            return False
        _seal(connection, ledger, task, None, who)
    task_rows.try_close(ledger, task_id)
    return True


def seal_overdue(ledger: Ledger) -> None:
    """Seals the open Tasks to which nobody has added for their limit."""
    overdue = sa.select(_t.id).where(_t.split_state == "open", _t.split_until <= ledger.now(), _t.finished_at.is_(None))
    with ledger.database.read() as connection:
        found = [int(task_id) for (task_id,) in connection.execute(overdue.order_by(_t.id))]
    for task_id in found:
        _seal_overdue(ledger, task_id)


@repeatable
def _seal_overdue(ledger: Ledger, task_id: int) -> None:
    with ledger.database.write() as connection:
        task = try_lock(connection, ledger, task_id)
        if task is None or task["split_state"] != "open" or task["split_until"] > ledger.now():
            return
        why = f"nobody added anything for {_limit_s(task):g} s"
        _seal(connection, ledger, task, {"reason": "open_limit", "message": why}, "")


def _seal(connection: Connection, ledger: Ledger, task: dict[str, Any], detail: dict[str, Any] | None, who: str) -> None:
    task_rows.log(connection, ledger, task["id"], "sealed", detail, who)
    task_rows.end_locked_split(connection, ledger, task, Reason.SEALED)


def _limit_s(task: Mapping[str, Any]) -> float:
    return float(loads(task["additions"])["limit_s"])


def last_added(task: Mapping[str, Any]) -> int:
    """When somebody last added to an open Task (its columns), or when it became open (microseconds)."""
    return int(task["split_until"] - micros(_limit_s(task)))
