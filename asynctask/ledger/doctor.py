"""The doctor, which compares counts with rows and repairs them, and the readiness check of a process."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.clock import SECOND
from asynctask.core.states import OPEN, PROBLEM, State, Status
from asynctask.core.transitions import BLOCKED, MERGE, Delta, difference, due_callbacks, marked, marks_of
from asynctask.database import batches
from asynctask.database.retrying import repeatable
from asynctask.database.tables import (
    events,
    item_errors,
    loans,
    places,
    resubmitted_rows,
    task_ancestors,
    task_callbacks,
    task_errors,
    task_log,
    task_tallies,
    tasks,
    write_marks,
)
from asynctask.errors import LedgerUnavailable, NotFound, Unavailable
from asynctask.iterable import item_statuses
from asynctask.ledger import hints, lending, processes, sessions
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import MAX_ID, PURGING, Ledger, chunks, loads, try_lock
from asynctask.ledger.events import (
    COUNTS,
    IN_LOAN,
    UNHELD,
    Change,
    EventRecord,
    Failure,
    group_of,
    move_counts,
    read_events,
    rows_of,
    total_counts,
)
from asynctask.logs import get_logger

_e, _t, _x, _o, _l, _n = events.c, tasks.c, item_errors.c, resubmitted_rows.c, loans.c, places.c
_y = task_tallies.c
_KEPT = sa.select(_t.id).where(sa.func.coalesce(_t.turning, "") != PURGING).order_by(_t.id)
_PAGE = 5_000
_REPAIRED = "counts repaired"
_REPAIRABLE = ("counts", "errors", "corrections")


@dataclass(frozen=True, slots=True)
class Finding:
    """A deviation: a stable ``code``, the Task that it concerns, a description, and whether it was repaired."""

    code: str
    task_id: int | None
    message: str
    repaired: bool = False


def examine(ledger: Ledger, *, repair: bool = False, task_ids: Sequence[int] | None = None, who: str = "") -> list[Finding]:
    """Examines these Tasks, or without ``task_ids`` every Task, and searches for orphans.

    ``repair``: corrects the counts, the list and groups of failures, and the records of corrected lists by the rows, and
    repairs loans and places. A Task may run meanwhile: it is read in one snapshot, and the differences found are added.
    ``who``: the author in the logs of the repaired Tasks. Raises LedgerUnavailable.
    """
    named = task_ids is not None
    if task_ids is None:
        with ledger.database.read() as connection:
            task_ids = list(connection.execute(_KEPT).scalars())
    findings: list[Finding] = []
    for task_id in task_ids:
        try:
            findings += _examine_task(ledger, task_id, repair, who)
        except NotFound:
            if named:
                raise  # otherwise the Task was purged meanwhile
    return findings + _loans(ledger, repair, task_ids if named else None) + _orphans(ledger)


@dataclass(frozen=True, slots=True)
class _Examined:
    """The result for one Task: what is ``missing`` from its counts, and from its numbers of ``created`` jobs and items.

    Concurrent changes move rows and counts alike, so the differences stay the same until another doctor repairs them; that
    changes ``repairs``.
    """

    findings: list[Finding]
    missing: Delta
    created: tuple[int, int]
    repairs: int


def _examine_task(ledger: Ledger, task_id: int, repair: bool, who: str) -> list[Finding]:
    while True:
        with ledger.database.snapshot() as connection:
            examined = _inspect(connection, task_id)
        if not examined.findings or not repair:
            return examined.findings
        if _repair_task(ledger, task_id, examined, who):
            return [replace(found, repaired=found.code in _REPAIRABLE) for found in examined.findings]


@repeatable
def _repair_task(ledger: Ledger, task_id: int, examined: _Examined, who: str) -> bool:
    """Adds the missing counts. False if another doctor has repaired the Task since the read."""
    with ledger.database.write() as connection:
        task = task_rows.lock(connection, task_id)
        if _repairs(connection, task_id) != examined.repairs:
            return False
        codes = {found.code for found in examined.findings}
        if "counts" in codes:
            _repair(connection, ledger, task, examined, who)
        if "errors" in codes:
            _rebuild_list(connection, task_id)
            _rebuild_groups(connection, task_id)
            connection.execute(tasks.update().where(_t.id == task_id).values(version=_t.version + 1))
        if "corrections" in codes:
            _repair_corrections(connection, task)
    return True


def _repairs(connection: Connection, task_id: int) -> int:
    c = task_log.c
    counted = sa.select(sa.func.count()).where(c.task_id == task_id, c.action == _REPAIRED)
    return int(connection.execute(counted).scalar_one())


def _inspect(connection: Connection, task_id: int) -> _Examined:
    task = task_rows.get(connection, task_id)
    stored, (truth, untold) = total_counts(connection, task_id), _count(connection, task_id)
    missing = Delta(*(getattr(truth, name) - getattr(stored, name) for name in COUNTS))
    items = sum(getattr(truth, str(status)) for status in Status)
    created = (truth.jobs - task["created_jobs"], items - task["created"])
    findings = [*_compare(task, stored, truth), *_errors(connection, task_id), *_callbacks(connection, task, truth)]
    if task["resubmit_of"] is not None:
        findings += _corrections(connection, task, items)
    if untold:
        findings.append(Finding("slice_marks", task_id, f"{untold} slices whose counts differ from their marks"))
    return _Examined(findings, missing, created, _repairs(connection, task_id))


def _count(connection: Connection, task_id: int) -> tuple[Delta, int]:
    """The counts according to the rows, and the number of slices that disagree with their marks."""
    counts, after, untold = Delta(), 0, 0
    while True:
        page = read_events(connection, (_e.task_id == task_id) & (_e.seq >= after) & (_e.seq < after + _PAGE))
        for record in page:
            untold += record.row.items > 1 and not _agrees(record)
            counts.add(difference(None, record.row))
        after += _PAGE
        beyond = sa.select(sa.literal(1)).where(_e.task_id == task_id, _e.seq >= after).limit(1)
        if not page and connection.execute(beyond).first() is None:
            return counts, untold


def _agrees(record: EventRecord) -> bool:
    """Whether the numbers of a slice agree with its marks."""
    row = record.row
    return len(marks_of(row)) == row.items and row._replace(**marked(marks_of(row))) == row._replace(marks=marks_of(row))


def _compare(task: dict[str, Any], stored: Delta, truth: Delta) -> list[Finding]:
    wrong = [
        f"{name} says {getattr(stored, name)}, rows say {getattr(truth, name)}"
        for name in COUNTS
        if getattr(stored, name) != getattr(truth, name)
    ]
    if task["created_jobs"] != truth.jobs:
        wrong.append(f"created jobs says {task['created_jobs']}, rows say {truth.jobs}")
    items = sum(getattr(truth, str(status)) for status in Status)
    if task["created"] != items:
        wrong.append(f"created items says {task['created']}, rows say {items}")
    findings = [Finding("counts", task["id"], "; ".join(wrong))] if wrong else []
    open_items = truth.enqueue + truth.working + truth.stopped
    if task["closed_at"] is not None and open_items:
        findings.append(Finding("closed_with_open_items", task["id"], f"closed, with open items: {open_items}"))
    return findings


def _callbacks(connection: Connection, task: dict[str, Any], truth: Delta) -> list[Finding]:
    """Compares the callbacks that were queued when the generation closed with those that its outcome requires."""
    c = task_callbacks.c
    found = connection.execute(
        sa.select(c.name, _e.status)
        .select_from(task_callbacks.outerjoin(events, (_e.job_id == c.job_id) & (_e.callback_of == c.task_id)))
        .where(c.task_id == task["id"], c.generation == task["generation"])
    )
    queued = {str(name): status for name, status in found}
    closed = task["closed_at"] is not None and task["state"] != State.REJECTED
    due = due_callbacks(task["state"], truth) if closed else ()
    said = {each["name"] for each in loads(task["callbacks"]) or ()}
    wanted = {name for name in said if name.partition(":")[0] in due}
    if MERGE in said and closed:  # the others are queued after it, by its outcome
        followed = task["finished_at"] is not None or len(queued) > 1
        kinds = {name.partition(":")[0] for name in queued}
        follow = {"on_complete", *({"on_success", "on_failure"} & kinds)}  # a failed merge may succeed later
        wanted = {MERGE, *(name for name in said if name.partition(":")[0] in follow)} if followed else {MERGE}
    wrong = [f"{name} was not queued" for name in sorted(wanted - set(queued))]
    wrong += [f"{name} was queued and does not follow" for name in sorted(set(queued) - wanted)]
    wrong += [f"the Event of {name} is gone" for name, status in sorted(queued.items()) if status is None]
    if task["finished_at"] is not None:
        wrong += [f"{name} is {status}, and the Task is done" for name, status in sorted(queued.items()) if status in OPEN]
    return [Finding("callbacks", task["id"], "; ".join(wrong))] if wrong else []


def _repair(connection: Connection, ledger: Ledger, task: dict[str, Any], examined: _Examined, who: str) -> None:
    # Added, not set, because outcomes committed since the read have moved the counts.
    move_counts(connection, {(task["id"], 0): examined.missing}, ledger.now())
    jobs, items = examined.created
    values = {"created_jobs": _t.created_jobs + jobs, "created": _t.created + items, "version": _t.version + 1}
    connection.execute(tasks.update().where(_t.id == task["id"]).values(values))
    task_rows.log(connection, ledger, task["id"], _REPAIRED, None, who)


def _errors(connection: Connection, task_id: int) -> list[Finding]:
    """Compares items that ended ``failed`` or ``error`` with the entries of ``item_errors``, and the entries with the
    groups."""
    failed = sa.select(sa.func.coalesce(sa.func.sum(_e.n_failed + _e.n_error), 0)).where(_e.task_id == task_id)
    ended = int(connection.execute(failed).scalar_one())
    entries = connection.execute(sa.select(sa.func.count()).where(_x.task_id == task_id)).scalar_one()
    stray = connection.execute(sa.select(sa.func.count()).where(_x.task_id == task_id, _stray(task_id))).scalar_one()
    grouped = connection.execute(
        sa.select(sa.func.coalesce(sa.func.sum(task_errors.c["count"]), 0)).where(task_errors.c.task_id == task_id)
    ).scalar_one()
    wrong = _wrong_slices(connection, task_id)
    if ended == entries == grouped and not stray and not wrong:
        return []
    text = f"{ended} rows failed, {entries} failures are listed ({stray} of no such row), groups count {grouped}"
    return [Finding("errors", task_id, text)]


def _ended(task_id: int) -> Any:
    return sa.and_(_e.task_id == task_id, _e.problem.is_not(None), _e.status.in_([str(s) for s in PROBLEM]))


def _stray(task_id: int) -> Any:
    """Entries that disagree with the end of their Event, and all but the last entry of an Event; without slices."""
    last = item_errors.alias("last")
    later = sa.exists().where(last.c.event_id == _x.event_id, last.c.id > _x.id)
    wrong = sa.or_(later, ~sa.exists().where(_e.id == _x.event_id, _e.status == _x.status, _ended(task_id)))
    return sa.and_(wrong, ~sa.exists().where(_e.id == _x.event_id, _e["items"] > 1))


def _wrong_slices(connection: Connection, task_id: int) -> dict[int, list[dict[str, Any]]]:
    """For each slice whose entries disagree with its items: all entries that it must have."""
    of_slice = (_e.task_id == task_id) & (_e["items"] > 1)
    c = item_errors.c
    entries: dict[int, list[tuple[int, str]]] = {}
    listed = sa.select(_x.event_id, _x.row, _x.status).select_from(item_errors.join(events, _e.id == c.event_id))
    for event_id, row, status in connection.execute(listed.where(of_slice)):
        entries.setdefault(int(event_id), []).append((row, status))
    wrong: dict[int, list[dict[str, Any]]] = {}
    for record in read_events(connection, of_slice & (_e.n_failed + _e.n_error > 0) | _e.id.in_(list(entries))):
        wanted = _failed_rows(connection, record)
        if sorted(entries.get(record.id, ())) != sorted(wanted):
            wrong[record.id] = [_slice_entry(record, row, status) for row, status in wanted]
    return wrong


def _failed_rows(connection: Connection, record: EventRecord) -> list[tuple[int, str]]:
    statuses = item_statuses(record.row.marks, record.row.items, str(record.row.status))
    marks = zip(rows_of(connection, record), statuses, marks_of(record.row), strict=True)
    return [(row or 0, status) for row, status, mark in marks if mark in "xe"]


def _slice_entry(record: EventRecord, row: int, status: str) -> dict[str, Any]:
    failure = Failure("unknown", "unknown")
    return {
        "task_id": record.task_id, "event_id": record.id, "row": row, "status": status, "code": failure.code,
        "message": failure.message, "digest": group_of(failure, status), "attempt": record.row.attempt,
    }  # fmt: skip


def _rebuild_list(connection: Connection, task_id: int) -> None:
    stray = connection.execute(sa.select(_x.id).where(_x.task_id == task_id, _stray(task_id))).scalars().all()
    for part in chunks(stray):
        connection.execute(item_errors.delete().where(_x.id.in_(part)))
    _rebuild_slices(connection, task_id)
    unlisted = connection.execute(
        sa.select(events).where(_ended(task_id), _e["items"] == 1, ~sa.exists().where(_x.event_id == _e.id)).order_by(_e.id)
    )
    rows = [_entry(row) for row in unlisted.mappings().all()]
    if rows:
        connection.execute(item_errors.insert(), rows)


def _rebuild_slices(connection: Connection, task_id: int) -> None:
    """Keeps correct entries, removes the others, and adds missing ones, whose message is lost."""
    for event_id, wanted in _wrong_slices(connection, task_id).items():
        missing = {(entry["row"], entry["status"]): entry for entry in wanted}
        extra = []
        for i, row, status in connection.execute(
            sa.select(_x.id, _x.row, _x.status).where(_x.event_id == event_id).order_by(_x.id.desc())
        ).all():
            if missing.pop((row, status), None) is None:
                extra.append(i)
        if extra:
            connection.execute(item_errors.delete().where(_x.id.in_(extra)))
        if missing:
            connection.execute(item_errors.insert(), list(missing.values()))


def _entry(event: Any) -> dict[str, Any]:
    messages = [m["message"] for m in loads(event["added_messages"]) or [] if m.get("status") == event["status"]]
    failure = Failure(str(event["problem"]), messages[-1] if messages else str(event["problem"]))
    return {
        "task_id": event["task_id"],
        "event_id": event["id"],
        "row": event["first_row"],
        "status": event["status"],
        "code": failure.code,
        "message": failure.message,
        "digest": group_of(failure, event["status"]),
        "attempt": event["attempt"],
    }


def _rebuild_groups(connection: Connection, task_id: int) -> None:
    """Adds the difference between entries and groups, in one statement because other processes write entries meanwhile."""
    c = task_errors.c
    entries = (
        sa.select(_x.digest.label("digest"), sa.func.count().label("n")).where(_x.task_id == task_id).group_by(_x.digest)
    )
    groups = sa.select(c.digest, -sa.func.sum(c["count"])).where(c.task_id == task_id).group_by(c.digest)
    both = sa.union_all(entries, groups).subquery()
    lacks = sa.func.sum(both.c.n)
    missing = connection.execute(sa.select(both.c.digest, lacks).group_by(both.c.digest).having(lacks != 0)).all()
    rows = [_group(connection, task_id, str(digest), int(count)) for digest, count in sorted(missing)]
    if rows:
        keys = ("task_id", "slot", "digest")
        connection.execute(batches.insert_or_add(connection.dialect.name, task_errors, keys, ("count",)), rows)


def _group(connection: Connection, task_id: int, digest: str, count: int) -> dict[str, Any]:
    c = task_errors.c
    shown = connection.execute(sa.select(sa.func.max(c.message)).where(c.task_id == task_id, c.digest == digest)).scalar()
    status, message, job_id, row = connection.execute(
        sa.select(sa.func.min(_x.status), sa.func.max(_x.message), sa.func.min(_e.job_id), sa.func.min(_x.row))
        .select_from(item_errors.join(events, _e.id == _x.event_id))
        .where(_x.task_id == task_id, _x.digest == digest)
    ).one()
    return {
        "task_id": task_id,
        "slot": 0,
        "digest": digest,
        "status": status or str(Status.ERROR),
        "message": shown or message or "",
        "count": count,
        "sample_job_id": job_id,
        "sample_row": row,
    }


# -- corrected lists


def _ancestry(connection: Connection, task: dict[str, Any]) -> tuple[set[int], set[int]]:
    """The ancestors of a corrected Task that are not recorded, and the recorded ones that are not ancestors."""
    c, above, at = task_ancestors.c, set[int](), task["resubmit_of"]
    while at is not None and at not in above:
        found = connection.execute(sa.select(_t.resubmit_of).where(_t.id == at)).one_or_none()
        if found is None:  # it was purged: records of its ancestors cannot be verified
            break
        above.add(int(at))
        at = found[0]
    kept = set(connection.execute(sa.select(c.ancestor_id).where(c.task_id == task["id"])).scalars())
    return above - kept, kept - above if at is None else set()


def _no_item(connection: Connection, task_id: int) -> list[int]:
    """The ids of rows that a corrected list took without an item of its own; both ascend, so they are read in step."""
    found: list[int] = []
    after, low = -1, 0
    while True:
        its = (_e.task_id == task_id) & (_e.seq > after)
        page = connection.execute(
            sa.select(_e.seq, _e.first_row, _e.last_row).where(its).order_by(_e.seq).limit(_PAGE)
        ).all()
        high = page[-1].last_row if page else MAX_ID
        between = (_o.task_id == task_id) & (_o.taken == 1) & (_o.row > low) & (_o.row <= high)
        rows = {row for each in page for row in range(each.first_row, each.last_row + 1)}
        taken = connection.execute(sa.select(_o.id, _o.row).where(between)).all()
        found += [int(row_id) for row_id, row in taken if row not in rows]
        if not page:
            return found
        after, low = page[-1].seq, high


def _corrections(connection: Connection, task: dict[str, Any], items: int) -> list[Finding]:
    """Compares the rows that a corrected list took with its items, and its recorded ancestors, whose ``mended`` it raises,
    with the actual ones."""
    task_id = task["id"]
    taken = (_o.task_id == task_id) & (_o.taken == 1)
    count = connection.execute(sa.select(sa.func.count()).where(taken)).scalar_one()
    idle = len(_no_item(connection, task_id))
    missing, stray = _ancestry(connection, task)
    wrong = [f"took {count} rows and has {items} items"] if count - idle != items else []
    wrong += [f"took {idle} rows of which it has no item"] if idle else []
    wrong += [f"Task {each} does not count it" for each in sorted(missing)]
    wrong += [f"Task {each} counts it, which it does not correct" for each in sorted(stray)]
    return [Finding("corrections", task_id, "; ".join(wrong))] if wrong else []


def _repair_corrections(connection: Connection, task: dict[str, Any]) -> None:
    c, task_id = task_ancestors.c, task["id"]
    for part in chunks(_no_item(connection, task_id)):
        connection.execute(resubmitted_rows.update().where(_o.id.in_(part)).values(taken=None))
    missing, stray = _ancestry(connection, task)
    if stray:
        connection.execute(task_ancestors.delete().where(c.task_id == task_id, c.ancestor_id.in_(stray)))
    if missing:
        rows = [{"ancestor_id": each, "task_id": task_id} for each in sorted(missing)]
        connection.execute(task_ancestors.insert(), rows)


# -- loans and places

_OTHER: Final = loans.alias("other")
_OVERLAPS: Final = (
    sa.select(_l.task_id, _l.id, _l.process, _OTHER.c.id, _OTHER.c.process)
    .join(_OTHER, (_OTHER.c.task_id == _l.task_id) & (_OTHER.c.id > _l.id))
    .where(_OTHER.c.low < _l.high, _OTHER.c.high > _l.low)
    .order_by(_l.task_id, _l.id, _OTHER.c.id)
)
_UNREACHED: Final = (
    sa.select(_e.id, _e.task_id)
    .join(tasks, _t.id == _e.task_id)
    .where(_t.finished_at.is_(None), _t.state != str(State.CANCELLED), _e.seq < _t.next_seq)
    .where(_e.status == str(Status.ENQUEUE), _e.due_at.is_(None), _e.process.is_(None))
    .where(~sa.exists().where(*IN_LOAN))
    .order_by(_e.task_id, _e.id)
)
_FEW_PLACES: Final = (
    sa.select(_n.task_id, _n.process, _n.n, sa.func.count())
    .join(events, (_e.process == _n.process) & (_e.task_id == _n.task_id))
    .where(_e.status == str(Status.WORKING))
    .group_by(_n.task_id, _n.process, _n.n)
    .having(sa.func.count() > _n.n)
)


def _loans(ledger: Ledger, repair: bool, task_ids: Sequence[int] | None) -> list[Finding]:
    """Finds loans of one Task that overlap, rows that no borrow reaches, holders that are not registered, and processes
    that run more jobs of a Task than they have places.

    ``repair``: makes such rows due under a new attempt, so that their holder cannot end them, and sets the places to the
    number of running jobs.
    """
    with ledger.database.snapshot() as connection:
        overlaps = connection.execute(_OVERLAPS).all()
        unreached = connection.execute(_UNREACHED).all()
        few = connection.execute(_FEW_PLACES).all()
        strangers = processes.unknown_workers(connection) if task_ids is None else set()
    findings: dict[tuple[str, int | None], Finding] = {}

    def add(code: str, task_id: int | None, message: str) -> None:
        findings.setdefault((code, task_id), Finding(code, task_id, message, repaired=repair))

    for task_id, one, process, other, of_other in overlaps:
        add("loans", task_id, f"the loans {one} ({process or 'free'}) and {other} ({of_other or 'free'}) overlap")
    for task_id, count in Counter(int(task_id) for _, task_id in unreached).items():
        add("unreachable", task_id, f"rows that are open, and that no borrow reaches: {count}")
    for task_id, process, n, runs in few:
        add("places", task_id, f"{process} has {n} places, and runs {runs} jobs")
    for name in sorted(strangers):
        add("holders", None, f"{name} holds jobs or places, and is not registered")
    chosen = [each for each in findings.values() if task_ids is None or each.task_id in task_ids]
    if not repair or not chosen:
        return chosen
    for task_id, one, process, other, _ in overlaps:
        if task_ids is None or task_id in task_ids:
            _take_loan(ledger, int(one) if process is None else int(other))
    for part in chunks([int(i) for i, task_id in unreached if task_ids is None or task_id in task_ids]):
        lending.change(ledger, partial(_unreached, ledger=ledger, event_ids=part))
    _add_places(ledger, [(int(i), str(process)) for i, process, *_ in few if task_ids is None or i in task_ids])
    for name in sorted(strangers):
        processes.recover_events(ledger, name)
    return chosen


def _take_loan(ledger: Ledger, loan_id: int) -> None:
    """Takes a loan from its holder, and makes its rows due under a new attempt."""
    with ledger.database.read() as connection:
        found = connection.execute(sa.select(_l.process).where(_l.id == loan_id)).one_or_none()
    if found is not None:
        processes.end_whole(ledger, found[0], loan_id, partial(processes.take, ledger, process=None))


def _unreached(connection: Connection, ledger: Ledger, event_ids: Sequence[int]) -> list[Change]:
    """Makes rows due that no hint or loan reaches, after reading them again under the locks of their Tasks."""
    named = batches.among(connection, _e.id, list(event_ids))
    for task_id in sorted(connection.execute(sa.select(_e.task_id).where(named).distinct()).scalars()):
        task_rows.lock(connection, int(task_id))
    still = connection.execute(_UNREACHED.where(named)).all()
    return [processes.take(ledger, int(event_id), process=None) for event_id, _ in still]


@repeatable
def _add_places(ledger: Ledger, whose: Sequence[tuple[int, str]]) -> None:
    with ledger.database.write() as connection:
        for task_id, process in sorted(whose):
            task_rows.lock(connection, task_id)
            its = (_n.task_id == task_id) & (_n.process == process)
            for *_, runs in connection.execute(_FEW_PLACES.where(its)).all():
                connection.execute(places.update().where(its).values(n=int(runs)))


# -- repairs by maintenance, after a process has ended between two transactions

_OTHERS: Final = tasks.alias("others")
_FREE_LOAN: Final = sa.exists().where(_l.task_id == _t.id, _l.process.is_(None))
_STARTS: Final = (_t.finished_at.is_(None), _t.state.in_([str(State.SPLITTING), str(State.RUNNING)]))

_UNSETTLED: Final = (
    sa.select(_t.id)
    .where(*_STARTS, _t.session_waits.is_(None))
    .where(
        sa.or_(
            _t.ready.is_(None)
            & ((_t.created_jobs > _t.next_seq) | _FREE_LOAN)
            # With a round: its jobs began later, or a user changed the interval in the row.
            & (_t.due_next.is_(None) | (_t.interval_s <= 0) | (_t.due_next > _t.round_at + _t.interval_s * SECOND))
            & (_t.start_at.is_(None) | _t.due_next.is_(None) | (_t.due_next > _t.start_at)),
            sa.exists().where(_e.task_id == _t.id, _e.due_at < sa.func.coalesce(_t.due_next, BLOCKED)),
        )
    )
)
"""Tasks whose hints hide jobs that may start."""

_FREE_SESSIONS: Final = (
    sa.select(_t.session_key)
    .where(_t.session_waits.is_not(None), ~sa.exists().where(_OTHERS.c.session_holder == _t.session_key))
    .distinct()
)

_STALLED_HOLDERS: Final = (
    sa.select(_t.id)
    .join(task_tallies, _y.task_id == _t.id)
    .where(_t.session_holder.is_not(None), _t.state == State.RUNNING, _t.created_jobs <= _t.next_seq)
    .where(sa.exists().where(_OTHERS.c.session_key == _t.session_holder, _OTHERS.c.session_waits.is_not(None)))
    .group_by(_t.id)
    .having(
        sa.func.sum(_y.enqueue) == sa.func.sum(_y.retrying),
        sa.func.sum(_y.enqueue) > 0,
        sa.func.sum(_y.working + _y.stopped) == 0,
    )
)
"""Holders of a session whose jobs all wait for retries, by their counts, while other Tasks wait for the session."""

_STANDING_LINES: Final = (
    sa.select(_e.line)
    .distinct()
    .select_from(tasks.join(events, _e.task_id == _t.id))
    .where(_t.finished_at.is_(None), _t.key_field.is_not(None), _e.due_at == BLOCKED, sessions.ASKING[-1] == _e.id)
)
"""Lines of keys in which an Event is blocked although its turn has come."""

_UNREACHABLE: Final = (
    sa.select(_t.id)
    .join(task_tallies, _y.task_id == _t.id)
    .where(*_STARTS, _t.closed_at.is_(None), _t.turning.is_(None), _t.next_seq > 0)
    .where(_t.ready.is_(None), _t.due_next.is_(None), ~sa.exists().where(_l.task_id == _t.id))
    .group_by(_t.id)
    .having(sa.func.sum(_y.enqueue) > 0)
)
"""Tasks with open items without a hint or a loan that leads to them; a claim may hold them."""

_HAS_UNHELD: Final = sa.exists().where(_e.task_id == sa.bindparam("of"), _e.seq < sa.bindparam("high"), UNHELD)


def mend(ledger: Ledger, limit: int = 1_000) -> int:
    """Repairs hints, sessions, lines and loans after a process has ended between two transactions: at most ``limit`` of
    each kind, the rest at a later call. Returns how many it found. Raises LedgerUnavailable."""
    return sum(_mend(ledger, statement.limit(limit), act) for statement, act in _MENDED)


def _mend(ledger: Ledger, statement: Any, act: Callable[[Ledger, list[Any]], object]) -> int:
    with ledger.database.read() as connection:
        found = list(connection.execute(statement).scalars())
    act(ledger, found)
    return len(found)


def _each(act: Callable[[Ledger, Any], object]) -> Callable[[Ledger, list[Any]], object]:
    return lambda ledger, found: [act(ledger, each) for each in found]


@repeatable
def _free_unreachable(ledger: Ledger, task_id: int) -> None:
    """Makes the whole range that a Task's pointer has passed a free loan; a borrow skips rows that have ended or are
    held."""
    with ledger.database.write() as connection:
        task = try_lock(connection, ledger, task_id)
        if task is None or connection.execute(_UNREACHABLE.where(_t.id == task_id)).first() is None:
            return
        if not connection.scalar(sa.select(_HAS_UNHELD), {"of": task_id, "high": task["next_seq"]}):
            return
        values = {"task_id": task_id, "low": 0, "high": task["next_seq"], "process": None, "at": ledger.now()}
        connection.execute(loans.insert(), values)
        get_logger("asynctask.doctor").error("unreachable_rows", task_id=task_id)
        hints.settle(connection, ledger, task)


_MENDED: Final[tuple[tuple[Any, Callable[[Ledger, list[Any]], object]], ...]] = (
    (_UNSETTLED, hints.settle_free),
    (_FREE_SESSIONS, _each(sessions.promote_alone)),
    (_STALLED_HOLDERS, _each(sessions.step_aside)),
    (_STANDING_LINES, lambda ledger, lines: hints.settle_free(ledger, sessions.free(ledger, lines))),
    (_UNREACHABLE, _each(_free_unreachable)),
)


def _orphans(ledger: Ledger) -> list[Finding]:
    with ledger.database.snapshot() as connection:
        lost = connection.execute(
            sa.select(_e.task_id, sa.func.count())
            .where(_e.task_id.is_not(None), ~sa.exists().where(_t.id == _e.task_id))
            .group_by(_e.task_id)
        ).all()
        counted = connection.execute(
            sa.select(task_tallies.c.task_id).where(~sa.exists().where(_t.id == task_tallies.c.task_id)).distinct()
        ).all()
        c = task_callbacks.c
        called = connection.execute(sa.select(c.task_id).where(~sa.exists().where(_t.id == c.task_id)).distinct()).all()
    findings = [Finding("orphan_events", task_id, f"{count} Events of a Task that is not there") for task_id, count in lost]
    findings += [Finding("orphan_tallies", task_id, "counts of a Task that is not there") for (task_id,) in counted]
    return findings + [
        Finding("orphan_callbacks", task_id, "callbacks of a Task that is not there") for (task_id,) in called
    ]


# -- readiness: whether this process can store submissions

RESERVE_BYTES: Final = 16 * 1024 * 1024
"""Free bytes below which a file system counts as full: room for a list, and for SQLite's log between two checkpoints."""

FRESH_S: Final = 3.0
"""Seconds for which a result is cached, so that frequent checks do not write each time."""


class NotWritable(Unavailable):
    """Submissions cannot be stored. The message names a setting, not an address or a path."""

    code = "not_writable"


class Readiness:
    """The readiness check. Arguments: ``data_dir``, the folder of uploads, created at the first upload."""

    def __init__(self, ledger: Ledger, data_dir: Path) -> None:
        self._ledger = ledger
        self._folders = {"data_dir": data_dir}
        if ledger.database.path is not None:
            self._folders["database_url"] = ledger.database.path.parent
        self._lock = threading.Lock()
        self._fresh_until = 0.0
        self._found: NotWritable | None = None
        self._log = get_logger("asynctask.readiness")

    def check(self) -> None:
        """Raises :class:`NotWritable` if the database accepts no write, or a file system to which this process writes is
        full. A database server's disk is not visible here; a committed transaction proves that it is writable.
        """
        with self._lock:
            if self._ledger.clock.monotonic() >= self._fresh_until:
                self._found = self._inspect()
                self._fresh_until = self._ledger.clock.monotonic() + FRESH_S
            found = self._found
        if found is not None:
            raise NotWritable(str(found))

    def _inspect(self) -> NotWritable | None:
        for setting, folder in self._folders.items():
            free = _free_bytes(folder)
            if free is not None and free < RESERVE_BYTES:
                has = f"{free / 2**20:.1f} MB left, less than {RESERVE_BYTES >> 20} MB"
                return NotWritable(f"the file system of {setting} has {has}")
        try:
            self._write()
        except LedgerUnavailable as error:
            self._log.warning("ledger_not_writable", error=str(error))
            return NotWritable("the database takes no write; the log says why")
        return None

    @repeatable
    def _write(self) -> None:
        """Inserts and deletes a row in one transaction, which writes pages and leaves no row."""
        owner = self._ledger.ids.jids(1)[0]
        with self._ledger.database.write(marked=False) as connection:
            at = self._ledger.now() // 1_000_000
            connection.execute(write_marks.insert().values(owner=owner, number=0, at=at))
            connection.execute(write_marks.delete().where(write_marks.c.owner == owner))


def _free_bytes(folder: Path) -> int | None:
    """Bytes that this user may still write in ``folder``; None if unknown."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize if found.f_blocks else None
