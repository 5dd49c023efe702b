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
from asynctask.ledger.base import Ledger, chunks, loads
from asynctask.ledger.models import events, item_errors, task_errors, task_tallies, tasks
from asynctask.ledger.transitions import Failure, group_of, read_tasks_events
from asynctask.states import PROBLEM, Status

__all__ = ["Finding", "examine"]

_e, _t, _x = events.c, tasks.c, item_errors.c
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
    """Looks at every Task (or these) and for orphans.

    With ``repair`` counts, and the list and groups of failures, are set to what the rows say.

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
    # Looking only needs the rows to stand together. A repair needs them to hold still, and holds others up: so it is
    # made only of what a look found wrong.
    with ledger.database.read() as connection:
        findings = _look(connection, ledger, task_id, repair=False)
    if findings and repair:
        with ledger.database.write() as connection:
            task_rows.lock(connection, task_id)
            findings = _look(connection, ledger, task_id, repair=True)
    return findings


def _look(connection: Connection, ledger: Ledger, task_id: int, *, repair: bool) -> list[Finding]:
    task = task_rows.get(connection, task_id)
    said, counted = tallies.total(connection, task_id), _count(connection, task_id)
    return [*_compare(connection, ledger, task, said, counted, repair), *_errors(connection, task_id, repair)]


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
        wrong.append(f"created jobs says {task['created_jobs']}, rows say {truth.jobs}")
    items = sum(getattr(truth, str(status)) for status in Status)
    if task["created"] != items:
        wrong.append(f"created items says {task['created']}, rows say {items}")
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
    items = sum(getattr(truth, str(status)) for status in Status)
    values = {"created_jobs": truth.jobs, "created": items, "version": _t.version + 1}
    connection.execute(tasks.update().where(_t.id == task["id"]).values(values))
    task_rows.log(connection, ledger, task["id"], "counts repaired", None, "doctor")


def _errors(connection: Connection, task_id: int, repair: bool) -> list[Finding]:
    """Every item that ended failed or error has its line, every line an item, and the groups add up."""
    ended = connection.execute(sa.select(sa.func.count()).where(_ended(task_id))).scalar_one()
    lines = connection.execute(sa.select(sa.func.count()).where(_x.task_id == task_id)).scalar_one()
    stray = connection.execute(sa.select(sa.func.count()).where(_x.task_id == task_id, _stray(task_id))).scalar_one()
    grouped = connection.execute(
        sa.select(sa.func.coalesce(sa.func.sum(task_errors.c["count"]), 0)).where(task_errors.c.task_id == task_id)
    ).scalar_one()
    if ended == lines == grouped and not stray:
        return []
    if repair:
        _list_again(connection, task_id)
        _group_again(connection, task_id)
        connection.execute(tasks.update().where(_t.id == task_id).values(version=_t.version + 1))
    text = f"{ended} rows failed, {lines} failures are listed ({stray} of no such row), groups count {grouped}"
    return [Finding("errors", task_id, text, repair)]


def _ended(task_id: int) -> Any:
    return sa.and_(_e.task_id == task_id, _e.problem.is_not(None), _e.status.in_([str(s) for s in PROBLEM]))


def _stray(task_id: int) -> Any:
    """Lines whose Event did not end as they say, and all but the last of an Event's lines."""
    last = item_errors.alias("last")
    later = sa.exists().where(last.c.event_id == _x.event_id, last.c.id > _x.id)
    return sa.or_(later, ~sa.exists().where(_e.id == _x.event_id, _e.status == _x.status, _ended(task_id)))


def _list_again(connection: Connection, task_id: int) -> None:
    stray = connection.execute(sa.select(_x.id).where(_x.task_id == task_id, _stray(task_id))).scalars().all()
    for part in chunks(stray, 1_000):
        connection.execute(item_errors.delete().where(_x.id.in_(part)))
    unlisted = connection.execute(
        sa.select(events).where(_ended(task_id), ~sa.exists().where(_x.event_id == _e.id)).order_by(_e.id)
    )
    rows = [_line(row) for row in unlisted.mappings().all()]
    if rows:
        connection.execute(item_errors.insert(), rows)


def _line(event: Any) -> dict[str, Any]:
    said = [m["message"] for m in loads(event["added_messages"]) or [] if m.get("status") == event["status"]]
    failure = Failure(str(event["problem"]), said[-1] if said else str(event["problem"]))
    return {
        "task_id": event["task_id"], "event_id": event["id"], "row": event["first_row"], "status": event["status"],
        "code": failure.code, "message": failure.message, "digest": group_of(failure, event["status"]),
        "attempt": event["attempt"],
    }  # fmt: skip


def _group_again(connection: Connection, task_id: int) -> None:
    c = task_errors.c
    names = sa.select(c.digest, sa.func.max(c.message)).where(c.task_id == task_id).group_by(c.digest)
    shown = {digest: str(message) for digest, message in connection.execute(names).all()}
    connection.execute(task_errors.delete().where(c.task_id == task_id))
    found = connection.execute(
        sa.select(
            _x.digest, sa.func.min(_x.status), sa.func.max(_x.message), sa.func.count(), sa.func.min(_e.job_id),
            sa.func.min(_x.row),
        )
        .join(events, _e.id == _x.event_id)
        .where(_x.task_id == task_id)
        .group_by(_x.digest)
    )  # fmt: skip
    rows = [
        {
            "task_id": task_id, "slot": 0, "digest": digest, "status": status, "message": shown.get(digest) or message,
            "count": count, "sample_job_id": job_id, "sample_row": row,
        }
        for digest, status, message, count, job_id, row in found.all()
    ]  # fmt: skip
    if rows:
        connection.execute(task_errors.insert(), rows)


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
