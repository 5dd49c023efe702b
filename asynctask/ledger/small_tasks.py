"""Small Tasks, many at a time: reserved in one transaction, and closed in one.

One by one each of them would cost as many statements and commits as a large one. Only Tasks of which nothing has happened
yet are reserved so: no limit, no session, nothing due again, the pointer at the first row. All others, and those of which
somebody holds the row, go the way of :mod:`asynctask.ledger.reservations` and :mod:`asynctask.ledger.closing`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.clock import micros
from asynctask.core.states import OPEN, Reason, State, Status, check_task
from asynctask.core.transitions import Delta, may_dispatch
from asynctask.database import batches
from asynctask.database.retrying import repeatable
from asynctask.database.tables import events, task_log, tasks
from asynctask.ledger import counters
from asynctask.ledger.base import Ledger, dumps
from asynctask.ledger.reservations import MOST_SMALL, Ready

__all__ = ["close_small", "reserve_small"]

MOST_CLOSED: Final = 100
"""Tasks of more jobs are closed one by one, and so are the last of very many: no transaction may take long."""
AT_ONCE: Final = 200

_t, _e = tasks.c, events.c
_RESERVED: Final = (
    "id", "state", "parallel", "session_key", "next_seq", "created_jobs", "reserved_from", "dispatch_by", "due_next",
    "worker_name", "queue", "priority", "options", "slots",
)  # fmt: skip
_CLOSED: Final = ("id", "state", "generation", "generation_sealed", "closed_at", "turning", "session_key", "created_jobs")


@repeatable
def reserve_small(ledger: Ledger, task_ids: Collection[int], wanted: int, *, lease_s: float) -> dict[int, list[Ready]]:
    """Reserves every job of some of these Tasks, in the order of their ids, up to ``wanted`` jobs; by Task.

    Left out are those that are not small, not untouched, or held by somebody: :func:`asynctask.ledger.reservations.reserve`
    knows what to do with each.
    """
    with ledger.database.write() as connection:
        chosen: dict[int, Any] = {}
        for row in _locked(connection, _RESERVED, task_ids):
            if _is_untouched(row) and row.created_jobs <= wanted:
                chosen[int(row.id)] = row
                wanted -= row.created_jobs
        found = _events_of(connection, list(chosen))
        by_task: dict[int, list[Any]] = defaultdict(list)
        for each in found:
            by_task[int(each[1])].append(each)
        # A row that was recorded as more than waiting before its Task was dispatched: the ordinary way knows which run.
        whole = {i: by_task[i] for i, row in chosen.items() if _all_wait(row, by_task[i])}
        if not whole:
            return {}
        now = ledger.now()
        connection.execute(
            _advance(connection.dialect.name),
            {
                "ids": batches.given(connection.dialect.name, list(whole)), "me": ledger.identity, "now": now,
                "until": now + micros(lease_s),
            },
        )  # fmt: skip
        moved = {(i, ledger.slot(chosen[i].slots)): Delta(dispatched=len(jobs)) for i, jobs in whole.items()}
        counters.move(connection, moved, now)
    return {i: [_ready(chosen[i], job) for job in jobs] for i, jobs in whole.items()}


def _is_untouched(task: Any) -> bool:
    return bool(
        may_dispatch(task.state)
        and task.parallel is None
        and task.session_key is None
        and task.next_seq == 0
        and 0 < task.created_jobs <= MOST_SMALL
        and task.reserved_from is None
        and task.dispatch_by is None
        and task.due_next is None
    )


def _all_wait(task: Any, found: Sequence[Any]) -> bool:
    return len(found) == task.created_jobs and all(each[-1] == Status.ENQUEUE for each in found)


def _ready(task: Any, job: Any) -> Ready:
    id_, _, _, job_id, attempt, retries, worker, queue, params, options, created_at, row, _ = job
    return Ready(
        id_, job_id, int(task.id), attempt, retries, worker or task.worker_name, queue or task.queue or "default",
        task.priority, params, task.options if options is None else options, created_at, row, task.slots,
    )  # fmt: skip


def _events_of(connection: Connection, task_ids: list[int]) -> list[Any]:
    if not task_ids:
        return []
    dialect = connection.dialect.name
    found = batches.fetch_small(connection, _waiting(dialect), {"ids": batches.given(dialect, task_ids)}, lock=True)
    return sorted(found, key=lambda each: (each[1], each[2]))


@cache
def _waiting(dialect: str) -> Any:
    return (
        sa.select(
            _e.id, _e.task_id, _e.seq, _e.job_id, _e.attempt, _e.retries, _e.worker_name, _e.queue, _e.params, _e.options,
            _e.created_at, _e.first_row, _e.status,
        )
        .where(batches.among_given(dialect, _e.task_id, "ids"), _e.due_at.is_(None))
        .order_by(_e.id)
    )  # fmt: skip


@cache
def _advance(dialect: str) -> Any:
    return (
        tasks.update()
        .where(batches.among_given(dialect, _t.id, "ids"))
        .values(
            next_seq=_t.created_jobs,
            reserved_from=0,
            dispatch_by=sa.bindparam("me"),
            dispatch_until=sa.bindparam("until"),
            started_at=sa.func.coalesce(_t.started_at, sa.bindparam("now")),
            ready=None,
        )
    )


def _locked(connection: Connection, names: tuple[str, ...], task_ids: Collection[int]) -> Sequence[Any]:
    """These columns of the Tasks whose rows are free, locked until the transaction ends."""
    if not task_ids:
        return []
    dialect = connection.dialect.name
    return connection.execute(_free(dialect, names), {"ids": batches.given(dialect, sorted(task_ids))}).all()


@cache
def _free(dialect: str, names: tuple[str, ...]) -> Any:
    found = sa.select(*(_t[name] for name in names)).where(batches.among_given(dialect, _t.id, "ids")).order_by(_t.id)
    return found if dialect == "sqlite" else found.with_for_update(skip_locked=True)


@repeatable
def close_small(ledger: Ledger, task_ids: Collection[int]) -> list[int]:
    """Closes those of these Tasks that run, have no session, few jobs, and no open row. Returns which.

    ``task_ids``: what :func:`asynctask.ledger.closing.candidates` found, so their counts say that nothing is open. Once a
    Task's row is locked nothing of it can be opened again before the transaction ends, so its rows are asked in it. What is
    left out is left to :func:`asynctask.ledger.closing.try_close`.
    """
    with ledger.database.write() as connection:
        found = {int(row.id): row for row in _locked(connection, _CLOSED, sorted(task_ids)[:AT_ONCE]) if _may_be_over(row)}
        if not found:
            return []
        dialect = connection.dialect.name
        open_ = connection.execute(_still_open(dialect), {"ids": batches.given(dialect, list(found))})
        for (task_id,) in open_.all():
            del found[int(task_id)]
        if not found:
            return []
        # No callback is queued with it, so the step through finalizing ends in the same statement.
        check_task(State.RUNNING, State.FINALIZING, Reason.CLOSED)
        check_task(State.FINALIZING, State.FINISHED, Reason.CALLED_BACK)
        now = ledger.now()
        connection.execute(_close(dialect), {"ids": batches.given(dialect, list(found)), "now": now})
        said = {"at": now, "who": "", "action": "closed"}
        logged = [{**said, "task_id": i, "detail": dumps({"generation": row.generation})} for i, row in found.items()]
        connection.execute(_LOG, logged)
    return list(found)


def _may_be_over(task: Any) -> bool:
    return bool(
        task.state == State.RUNNING
        and task.generation_sealed
        and task.closed_at is None
        and task.turning is None
        and task.session_key is None
        and task.created_jobs <= MOST_CLOSED
    )


@cache
def _still_open(dialect: str) -> Any:
    statuses = [str(status) for status in sorted(OPEN)]
    found = sa.select(_e.task_id).where(batches.among_given(dialect, _e.task_id, "ids"), _e.status.in_(statuses))
    return found.distinct()


@cache
def _close(dialect: str) -> Any:
    at: Any = sa.bindparam("now")
    return (
        tasks.update()
        .where(batches.among_given(dialect, _t.id, "ids"), _t.state == State.RUNNING)
        .values(
            state=State.FINISHED, version=_t.version + 2, updated_at=at, closed_at=at, finished_at=at, ready=None,
            due_next=None,
        )
    )  # fmt: skip


_LOG: Final = task_log.insert()
