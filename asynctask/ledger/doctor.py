"""The doctor: proves that the counts equal what the rows say, and mends them where they do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.bookkeeping import Delta, in_flight, measure
from asynctask.ledger import tallies
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger
from asynctask.ledger.models import events, item_errors, task_errors, task_tallies, tasks
from asynctask.ledger.transitions import read_tasks_events
from asynctask.states import PROBLEM

__all__ = ["Finding", "examine"]

_e, _t = events.c, tasks.c
_PAGE = 5_000
_COMPARED = ("enqueue", "working", "stopped", "finish", "failed", "error", "cancelled", "retrying", "jobs")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it must be: a stable ``code``, the Task it concerns, what it is, whether it was mended."""

    code: str
    task_id: int | None
    message: str
    repaired: bool = False


def examine(ledger: Ledger, *, repair: bool = False, task_ids: Sequence[int] | None = None) -> list[Finding]:
    """Looks at every Task (or these) and for orphans. With ``repair`` counts are set to what the rows say.

    A Task is looked at in one transaction, so it may run on meanwhile. Raises LedgerUnavailable.
    """
    if task_ids is None:
        with ledger.database.read() as connection:
            task_ids = list(connection.execute(sa.select(_t.id).order_by(_t.id)).scalars())
    findings: list[Finding] = []
    for task_id in task_ids:
        findings += _examine_task(ledger, task_id, repair)
    return findings + _orphans(ledger)


def _examine_task(ledger: Ledger, task_id: int, repair: bool) -> list[Finding]:
    # A repair needs the rows to hold still; looking only needs them to stand together.
    with ledger.database.write() if repair else ledger.database.read() as connection:
        task = task_rows.lock(connection, task_id) if repair else task_rows.get(connection, task_id)
        said, counted = tallies.total(connection, task_id), _count(connection, task_id)
        findings = _compare(connection, ledger, task, said, counted, repair)
        findings += _errors(connection, task_id)
    return findings


def _count(connection: Connection, task_id: int) -> tuple[Delta, int]:
    """What the rows say: their counts, and how many are in flight."""
    counts, flying, after = Delta(), 0, 0
    while True:
        page = read_tasks_events(connection, task_id, after, after + _PAGE, limit=_PAGE)
        for record in page:
            counts.jobs += 1
            flying += in_flight(record.row)
            for name, number in measure(record.row).items():
                setattr(counts, name, getattr(counts, name) + number)
        after += _PAGE
        if not page and connection.execute(_beyond(task_id, after)).first() is None:
            return counts, flying


def _beyond(task_id: int, after: int) -> Any:
    return sa.select(sa.literal(1)).where(_e.task_id == task_id, _e.seq >= after).limit(1)


def _compare(
    connection: Connection, ledger: Ledger, task: dict[str, Any], said: Delta, counted: tuple[Delta, int], repair: bool
) -> list[Finding]:
    truth, flying = counted
    wrong = [
        f"{name} says {getattr(said, name)}, rows say {getattr(truth, name)}"
        for name in _COMPARED
        if getattr(said, name) != getattr(truth, name)
    ]
    if said.dispatched - said.returned != flying:
        wrong.append(f"in_flight says {said.dispatched - said.returned}, rows say {flying}")
    if task["created_jobs"] != truth.jobs:
        wrong.append(f"created says {task['created_jobs']}, rows say {truth.jobs}")
    findings = []
    if wrong:
        if repair:
            _repair(connection, ledger, task, truth, flying)
        findings.append(Finding("counts", task["id"], "; ".join(wrong), repair))
    open_items = truth.enqueue + truth.working + truth.stopped
    if task["closed_at"] is not None and open_items:
        findings.append(Finding("closed_with_open_items", task["id"], f"closed, but {open_items} items are open"))
    return findings


def _repair(connection: Connection, ledger: Ledger, task: dict[str, Any], truth: Delta, flying: int) -> None:
    truth.dispatched, truth.returned = flying, 0
    c = task_tallies.c
    version = connection.execute(sa.select(sa.func.sum(c.version)).where(c.task_id == task["id"])).scalar()
    connection.execute(task_tallies.delete().where(c.task_id == task["id"]))
    tallies.move(connection, {(task["id"], 0): truth}, ledger.now())
    # A version that fell would let a reader keep what it had.
    connection.execute(task_tallies.update().where(c.task_id == task["id"]).values(version=int(version or 0) + 1))
    connection.execute(tasks.update().where(_t.id == task["id"]).values(created_jobs=truth.jobs, version=_t.version + 1))
    task_rows.log(connection, ledger, task["id"], "counts repaired", None, "doctor")


def _errors(connection: Connection, task_id: int) -> list[Finding]:
    """Every item that ended failed or error has its line, every line an item, and the groups add up."""
    statuses = [str(s) for s in PROBLEM]
    ended = connection.execute(
        sa.select(sa.func.count()).where(_e.task_id == task_id, _e.problem.is_not(None), _e.status.in_(statuses))
    ).scalar_one()
    lines = connection.execute(sa.select(sa.func.count()).where(item_errors.c.task_id == task_id)).scalar_one()
    grouped = connection.execute(
        sa.select(sa.func.coalesce(sa.func.sum(task_errors.c["count"]), 0)).where(task_errors.c.task_id == task_id)
    ).scalar_one()
    if ended == lines == grouped:
        return []
    return [Finding("errors", task_id, f"{ended} rows failed, {lines} failures are listed, groups count {grouped}")]


def _orphans(ledger: Ledger) -> list[Finding]:
    with ledger.database.read() as connection:
        lost = connection.execute(
            sa.select(_e.task_id, sa.func.count())
            .where(_e.task_id.is_not(None), ~sa.exists().where(_t.id == _e.task_id))
            .group_by(_e.task_id)
        ).all()
        counted = connection.execute(
            sa.select(task_tallies.c.task_id).where(~sa.exists().where(_t.id == task_tallies.c.task_id)).distinct()
        ).all()
    findings = [Finding("orphan_events", task_id, f"{count} Events of a Task that is not there") for task_id, count in lost]
    return findings + [Finding("orphan_tallies", task_id, "counts of a Task that is not there") for (task_id,) in counted]
