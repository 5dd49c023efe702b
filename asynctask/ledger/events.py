"""The one function through which every Event changes: compare-and-set, messages and counts in one transaction."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.core.states import PROBLEM, TERMINAL, Reason, Status
from asynctask.core.transitions import Delta, Row, Turn
from asynctask.database import batches
from asynctask.database.retrying import TransactionConflict
from asynctask.database.tables import events, item_errors, task_errors, tasks
from asynctask.ledger import counters
from asynctask.ledger.base import Ledger, chunks, dumps, loads, stamp
from asynctask.ledger.changes import Applied, Change, End, EventRecord, Failure, Note, SeenNoMore, problem_of, untouched
from asynctask.ledger.fast_path import write_unread
from asynctask.messages import append

__all__ = [
    "Applied",
    "Change",
    "End",
    "EventRecord",
    "Failure",
    "Note",
    "SeenNoMore",
    "apply",
    "group_of",
    "lock_events",
    "read_events",
    "read_tasks_events",
    "untouched",
]

MAX_GROUPS = 100
"""Groups of failure messages kept for one Task; the rest are counted under "other"."""

_BATCH = 1_000


_e, _t = events.c, tasks.c
_READ = (
    sa.select(
        _e.id, _e.job_id, _e.task_id, _e.seq, _e.status, _e.attempt, _e.due_at, _e.retries, _e.deaths, _e.watched,
        _e["items"], _e.n_finish, _e.n_failed, _e.n_error, _e.n_cancelled, _e.process, _e.added_messages, _e.first_row,
        _e.started_at, _e.finished_at, sa.func.coalesce(_e.worker_name, _t.worker_name, ""),
        sa.func.coalesce(_e.queue, _t.queue, "default"), _t.state, _t.next_seq, _t.slots, _t.parallel,
    )
    .select_from(events.outerjoin(tasks, _t.id == _e.task_id))
)  # fmt: skip

_WRITTEN = (
    "status", "attempt", "due_at", "retries", "deaths", "watched", "n_finish", "n_failed", "n_error", "n_cancelled",
    "process", "problem", "look_at", "added_messages", "result", "checkpoint", "started_at", "finished_at",
)  # fmt: skip
_KEPT = ("result", "checkpoint")  # left as they are unless the change says otherwise

_WRITTEN_BUT_KEPT = tuple(name for name in _WRITTEN if name not in _KEPT)
_GUARD = ("id", "attempt", "status")

_STATUSES = {str(status): status for status in Status}  # a look-up costs less than a call of the enumeration


def _record(found: Any) -> EventRecord:
    (
        id_, job_id, task_id, seq, status, attempt, due_at, retries, deaths, watched, items, n_finish, n_failed, n_error,
        n_cancelled, process, messages, first_row, started_at, finished_at, worker_name, queue, state, next_seq, slots,
        parallel,
    ) = found  # fmt: skip
    reserved = task_id is None or (seq is not None and next_seq is not None and seq < next_seq)
    row = Row(
        _STATUSES[status], attempt, due_at, retries, deaths, reserved, items, n_finish, n_failed, n_error, n_cancelled,
        process, bool(watched),
    )  # fmt: skip
    return EventRecord(
        id_,
        job_id,
        task_id,
        seq,
        row,
        messages,
        first_row,
        started_at,
        finished_at,
        worker_name,
        queue,
        state,
        slots or 1,
        parallel,
    )


def read_events(connection: Connection, condition: Any, *, lock: bool = False) -> list[EventRecord]:
    """Events by a condition on the table, in the order of their ids; with ``lock`` until the transaction ends."""
    if lock and connection.dialect.name != "sqlite":
        condition = batches.among(connection, _e.id, lock_events(connection, condition))
    return [_record(found) for found in batches.fetch(connection, _READ.where(condition).order_by(_e.id))]


def lock_events(connection: Connection, condition: Any) -> Sequence[int]:
    """Locks the Events of a condition in the order of their ids, and returns these.

    They are read by a statement of its own after this one: what stands beside them (the Task's pointer) may have moved
    while the lock was waited for, and a locking read does not look at that again. Nor is the Task's row locked so.
    """
    return batches.locked(connection, sa.select(_e.id).where(condition).order_by(_e.id))


def read_tasks_events(
    connection: Connection, task_id: int, low: int, high: int, *, limit: int = 10_000
) -> list[EventRecord]:
    """Events of one Task with ``low <= seq < high``, in the order of their ``seq``."""
    statement = _READ.where(_e.task_id == task_id, _e.seq >= low, _e.seq < high).order_by(_e.seq).limit(limit)
    return [_record(found) for found in batches.fetch(connection, statement)]


def apply(connection: Connection, ledger: Ledger, changes: Sequence[Change], ends: Sequence[End] = ()) -> list[Applied]:
    """Takes every change whose decision still holds, and every end, in the caller's write transaction.

    Events, their messages, the Task's counts and its grouped errors move together. The rows are read under the
    transaction's lock, the decision is made by the bookkeeping core on what was read, and the UPDATE compares status and
    attempt once more. Ends are decided, of Events that were seen before: they are compared only, and all of them are taken;
    raises :class:`SeenNoMore` where one was not as it had been. Returns what came of each change, in the order given. An
    Event may stand in one call only once.
    """
    applied: list[Applied] = []
    moved: dict[tuple[int, int], Delta] = {}
    now = ledger.now()
    for batch in chunks(changes, _BATCH):
        applied += _apply_batch(connection, ledger, batch, moved, now)
    if ends:
        write_unread(connection, ledger, ends, moved, now)
    # One order of locks in every transaction: events first, all of them, then what counts them.
    _write_failures(connection, ledger, applied, ends)
    counters.move(connection, moved, now)
    return applied


def _apply_batch(
    connection: Connection, ledger: Ledger, changes: Sequence[Change], moved: dict[tuple[int, int], Delta], now: int
) -> list[Applied]:
    condition = batches.among(connection, _e.id, [change.event_id for change in changes])
    records = {record.id: record for record in read_events(connection, condition, lock=True)}
    results: list[Applied] = []
    won: list[Applied] = []
    for change in changes:
        record = records.get(change.event_id)
        turn = change.decide(record) if record is not None else None
        results.append(Applied(change, record, turn))
        if turn is None or record is None:
            continue
        won.append(results[-1])
        record.row = turn.after
        if record.task_id is not None:
            moved.setdefault((record.task_id, ledger.slot(record.slots)), Delta()).add(turn.delta)
    _write(connection, won, now)
    return results


def _write(connection: Connection, won: Sequence[Applied], now: int) -> None:
    everything: list[dict[str, Any]] = []
    keeping: list[dict[str, Any]] = []
    for each in won:
        values = _values(each, now)
        (keeping if "v_result" not in values and "v_checkpoint" not in values else everything).append(values)
    for values in everything:
        values.setdefault("v_result", None)
        values.setdefault("v_checkpoint", None)
    for written, rows in ((_WRITTEN_BUT_KEPT, keeping), (_WRITTEN, everything)):
        if batches.update(connection, events, _GUARD, written, rows) != len(rows):
            raise TransactionConflict("rows changed under their lock; the transaction is rolled back and tried again")


def _values(each: Applied, now: int) -> dict[str, Any]:
    change, record, turn = each.change, each.record, each.turn
    assert record is not None
    assert turn is not None
    assert turn.before is not None
    before, after = turn.before, turn.after
    if notes := change.said(turn):
        new = [stamp(note.at or now, note.status, note.message, before.attempt) for note in notes]
        record.messages = dumps(append(loads(record.messages) or [], new))
    over = after.status in TERMINAL
    values = {
        "b_id": record.id,
        "b_attempt": before.attempt,
        "b_status": str(before.status),
        "v_status": str(after.status),
        "v_attempt": after.attempt,
        "v_due_at": after.due_at,
        "v_retries": after.retries,
        "v_deaths": after.deaths,
        "v_watched": int(after.watched),
        "v_n_finish": after.n_finish,
        "v_n_failed": after.n_failed,
        "v_n_error": after.n_error,
        "v_n_cancelled": after.n_cancelled,
        "v_process": after.process,
        "v_problem": problem_of(turn, change.failure),
        "v_look_at": None,
        "v_added_messages": record.messages,
        "v_started_at": record.started_at,
        "v_finished_at": now if over else None,
    }
    for name, value in change.values.items():
        values[f"v_{name}"] = value
    return values


def group_of(failure: Failure, status: str) -> str:
    """Failures with a code of their own are one group whatever names their messages carry; others group by message."""
    text = failure.message if failure.code in ("failed", "raised") else failure.code
    return hashlib.blake2b(f"{status}\0{text}".encode(), digest_size=16).hexdigest()


def _write_failures(connection: Connection, ledger: Ledger, applied: Sequence[Applied], ends: Sequence[End]) -> None:
    ended, reopened = [], []
    for each in applied:
        record, turn = each.record, each.turn
        if record is None or turn is None or record.task_id is None:
            continue
        if turn.after.status in PROBLEM:
            ended.append((record, turn, each.change.failure or Failure(str(turn.reason), str(turn.reason))))
        elif turn.reason is Reason.RETRIED:
            reopened.append(record)
    for end in ends:
        turn = end.turn
        if turn.after.status in PROBLEM and end.record.task_id is not None:
            ended.append((end.record, turn, end.failure or Failure(str(turn.reason), str(turn.reason))))
    if ended:
        _count_failures(connection, ledger, ended)
    if reopened:
        _forget_failures(connection, ledger, reopened)


def _count_failures(connection: Connection, ledger: Ledger, ended: Sequence[tuple[EventRecord, Turn, Failure]]) -> None:
    known = _known_groups(connection, {record.task_id for record, _, _ in ended if record.task_id is not None})
    rows: list[dict[str, Any]] = []
    groups: dict[tuple[int, int, str], dict[str, Any]] = {}
    for record, turn, failure in ended:
        assert record.task_id is not None
        status = str(turn.after.status)
        digest = group_of(failure, status)
        groups_of_task = known.setdefault(record.task_id, set())
        if digest not in groups_of_task and len(groups_of_task) >= MAX_GROUPS:
            digest, shown = f"other-{status}", "other"
        else:
            shown = failure.message
        groups_of_task.add(digest)
        rows.append(
            {
                "task_id": record.task_id, "event_id": record.id, "row": record.first_row, "status": status,
                "code": failure.code[:64], "message": failure.message, "digest": digest, "attempt": turn.after.attempt,
            }
        )  # fmt: skip
        key = (record.task_id, ledger.error_slot(record.slots), digest)
        group = groups.setdefault(
            key,
            {
                "task_id": key[0], "slot": key[1], "digest": digest, "status": status, "message": shown, "count": 0,
                "sample_job_id": record.job_id, "sample_row": record.first_row,
            },
        )  # fmt: skip
        group["count"] += 1
    connection.execute(item_errors.insert(), rows)
    _move_groups(connection, [groups[key] for key in sorted(groups)])


def _move_groups(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    statement = counters.insert_or_add(connection, task_errors, ("task_id", "slot", "digest"), ("count",))
    connection.execute(statement, rows)


def _known_groups(connection: Connection, task_ids: set[int]) -> dict[int, set[str]]:
    known: dict[int, set[str]] = {}
    select = sa.select(task_errors.c.task_id, task_errors.c.digest).where(task_errors.c.task_id.in_(task_ids)).distinct()
    for task_id, digest in connection.execute(select):
        known.setdefault(task_id, set()).add(digest)
    return known


def _forget_failures(connection: Connection, ledger: Ledger, reopened: Sequence[EventRecord]) -> None:
    """An explicit retry takes its items' failures out of the groups: they count again if they fail again."""
    slots = {record.task_id: ledger.error_slot(record.slots) for record in reopened}
    ids = [record.id for record in reopened]
    c = item_errors.c
    found = connection.execute(
        sa.select(c.task_id, c.digest, sa.func.min(c.status), sa.func.count())
        .where(c.event_id.in_(ids))
        .group_by(c.task_id, c.digest)
    ).all()
    if not found:
        return
    connection.execute(item_errors.delete().where(c.event_id.in_(ids)))
    _move_groups(
        connection,
        [
            {
                "task_id": task_id, "slot": slots[task_id], "digest": digest, "status": status, "message": "",
                "count": -count, "sample_job_id": None, "sample_row": None,
            }
            for task_id, digest, status, count in sorted(found)
        ],
    )  # fmt: skip
