"""What people ask of the ledger beside progress: Events, failures, refused rows, the log. Nothing here writes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.clock import rfc3339
from asynctask.core.states import Status
from asynctask.database.engine import Database
from asynctask.database.tables import events, item_errors, task_errors, task_log, task_rejects, tasks
from asynctask.errors import NotFound
from asynctask.ledger.base import in_range, loads
from asynctask.messages import is_storable

__all__ = ["error_groups", "event", "event_page", "failures_by_row", "log", "rejects", "rows_by_status"]

_t, _e, _x = tasks.c, events.c, task_errors.c


# -- Events -------------------------------------------------------------------------------------------------------


def _event_object(row: dict[str, Any]) -> dict[str, Any]:
    """An Event as Python, the command line and the API give it.

    ``worker_name`` and ``added_messages`` are its names; ``worker`` and ``messages`` say the same and stay for those who
    read them.
    """
    messages = loads(row["added_messages"]) or []
    times = {name: rfc3339(row[name]) for name in ("due_at", "created_at", "started_at", "finished_at")}
    return {
        "id": row["id"],
        "job_id": row["job_id"],
        "task_id": row["task_id"],
        "worker_name": row["worker"],
        "worker": row["worker"],
        "queue": row["in_queue"],
        "status": row["status"],
        "attempt": row["attempt"],
        "retries": row["retries"],
        "row": row["first_row"],
        "params": loads(row["params"]),
        "added_messages": messages,
        "messages": messages,
        "result": loads(row["result"]),
        "problem": row["problem"],
        "process": row["process"],
        **times,
    }


_EVENT = sa.select(
    events,
    sa.func.coalesce(_e.worker_name, _t.worker_name).label("worker"),
    sa.func.coalesce(_e.queue, _t.queue).label("in_queue"),
).select_from(events.outerjoin(tasks, _t.id == _e.task_id))


def event(connection: Connection, job_id: str) -> dict[str, Any]:
    """One Event by its job id. Raises :class:`NotFound`."""
    row = None
    if is_storable(job_id):
        row = connection.execute(_EVENT.where(_e.job_id == job_id)).mappings().one_or_none()
    if row is None:
        raise NotFound(f"there is no job {job_id[:64]!r}")
    return _event_object(dict(row))


def event_page(
    connection: Connection, task_id: int, statuses: Collection[str] = (), *, after: int | None = None, limit: int = 100
) -> list[dict[str, Any]]:
    """Events of a Task in the order of their ids, after ``after``; only of ``statuses`` if any are named."""
    statement = _EVENT.where(_e.task_id == task_id).order_by(_e.id).limit(limit)
    if statuses:
        statement = statement.where(_e.status.in_(list(statuses)))
        if set(statuses) <= {Status.FAILED, Status.ERROR}:
            statement = statement.where(_e.problem.is_not(None))  # the partial index
    if after is not None:
        statement = statement.where(_e.id > in_range(after))
    return [_event_object(dict(row)) for row in connection.execute(statement).mappings()]


def error_groups(connection: Connection, task_id: int, samples: int = 5) -> list[dict[str, Any]]:
    """Failures of a Task grouped by message, the most frequent first, with sample rows."""
    statement = (
        sa.select(
            _x.digest,
            sa.func.max(_x.message),
            sa.func.max(_x.status),
            sa.func.sum(_x["count"]),
            sa.func.max(_x.sample_job_id),
        )
        .where(_x.task_id == task_id)
        .group_by(_x.digest)
        .having(sa.func.sum(_x["count"]) > 0)
        .order_by(sa.func.sum(_x["count"]).desc(), _x.digest)
    )
    groups = []
    for digest, message, status, count, job_id in connection.execute(statement).all():
        c = item_errors.c
        rows = sa.select(c.row).where(c.task_id == task_id, c.digest == digest).order_by(c.row).limit(samples)
        groups.append(
            {
                "message": message,
                "status": status,
                "count": int(count),
                "sample_job_id": job_id,
                "sample_rows": [row for (row,) in connection.execute(rows)],
            }
        )
    return groups


def log(connection: Connection, task_id: int, limit: int = 1_000) -> list[dict[str, Any]]:
    """Who did what to a Task, the latest first."""
    c = task_log.c
    statement = sa.select(task_log).where(c.task_id == task_id).order_by(c.id.desc()).limit(limit)
    return [
        {"at": rfc3339(row["at"]), "who": row["who"], "action": row["action"], "detail": loads(row["detail"])}
        for row in connection.execute(statement).mappings()
    ]


# -- Reports ------------------------------------------------------------------------------------------------------

_PAGE = 2_000
_FIRST_PAGE = 100
_PAGE_BYTES = 2_000_000


def _page_size(page: Sequence[Any]) -> int:
    """How many rows the next page has, going by this one: rows differ a thousandfold, what a page takes must not."""
    size = sum(len(cell) for row in page for cell in row.values() if isinstance(cell, str))
    return max(10, min(_PAGE, _PAGE_BYTES * len(page) // max(size, 1)))


def rows_by_status(
    database: Database, task_id: int, statuses: Collection[str], *, params: bool = True
) -> Iterator[dict[str, Any]]:
    """Events of a Task in row order, with what a report needs: row, status, attempts, result, and with ``params`` these.

    Each page is a read of its own: a reader who takes minutes must not hold a transaction open for as long.
    """
    after, size = -1, _FIRST_PAGE
    columns = [_e.seq, _e.first_row, _e.last_row, _e.status, _e.attempt, _e.retries, _e.result, _e.id, _e.started_at]
    if params:
        columns.append(_e.params)
    while True:
        statement = (
            sa.select(*columns)
            .where(_e.task_id == task_id, _e.seq > after, _e.status.in_(list(statuses)))
            .order_by(_e.seq)
            .limit(size)
        )
        with database.read() as connection:
            page = connection.execute(statement).mappings().all()
        yield from (dict(row) for row in page)
        if len(page) < size:
            return
        after, size = page[-1]["seq"], _page_size(page)


def failures_by_row(connection: Connection, event_ids: Sequence[int]) -> dict[int, str]:
    """event id -> the message it ended with."""
    c = item_errors.c
    found = sa.select(c.event_id, c.message).where(c.event_id.in_(list(event_ids))).order_by(c.id)
    return {int(event_id): str(message) for event_id, message in connection.execute(found)}


def rejects(
    database: Database, task_id: int, *, after: int = 0, limit: int | None = None, cells: bool = True
) -> Iterator[dict[str, Any]]:
    """Rows refused before queueing, in row order: ``row``, ``errors`` ([{column, code, message, value}]), ``cells``.

    Without ``cells`` these are None: they are most of it.
    """
    c = task_rejects.c
    columns = [c.row, c.errors, c.cells if cells else sa.null().label("cells")]
    after = in_range(after)
    left, size = limit, _FIRST_PAGE
    while left is None or left > 0:
        size = size if left is None else min(size, left)
        statement = sa.select(*columns).where(c.task_id == task_id, c.row > after).order_by(c.row).limit(size)
        with database.read() as connection:
            page = connection.execute(statement).mappings().all()
        for row in page:
            yield {"row": row["row"], "errors": loads(row["errors"]), "cells": loads(row["cells"])}
        if len(page) < size:
            return
        after = page[-1]["row"]
        left = None if left is None else left - len(page)
        size = _page_size(page)
