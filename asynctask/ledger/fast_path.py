"""Events of which nothing was written but that they were dispatched: seen by a few columns, ended without being read again.

Nearly all of a storm of outcomes is such, and nearly all of them alike. What they were seen to be is compared in the UPDATE
itself, so nothing is lost by not reading it; and what is the same in all of them is sent once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.clock import rfc3339
from asynctask.core.states import TERMINAL, Status
from asynctask.core.transitions import Delta, Row, Turn
from asynctask.database import batches
from asynctask.database.tables import events, tasks
from asynctask.ledger.base import Ledger, dumps, stamp, stamps
from asynctask.ledger.changes import End, EventRecord, Note, SeenNoMore, problem_of
from asynctask.messages import KEEP_FIRST, append

__all__ = ["read_untouched", "write_unread"]

# What untouched() says, of the row as it stands. Whatever else an outcome is decided by never changes while this is true.
# As one value: of plain conditions PostgreSQL may think that few rows meet them, and begin with a look at all that do.
_IS_UNTOUCHED = "status = 'enqueue' AND added_messages IS NULL AND due_at IS NULL AND process IS NULL AND watched = 0"
_UNTOUCHED = f"CASE WHEN {_IS_UNTOUCHED} THEN TRUE ELSE FALSE END"
# Of one that is lent. Its attempt, which is compared too, was lent to one process only.
_LENT = _UNTOUCHED.replace("process IS NULL", "process IS NOT NULL")


# The same of one whose attempt alone has ever changed: the rest of its bookkeeping is known without being read.
_NEVER_TOUCHED = (
    f"CASE WHEN {_IS_UNTOUCHED} AND events.started_at IS NULL AND retries = 0 AND deaths = 0 AND items = 1"
    " AND n_finish + n_failed + n_error + n_cancelled = 0 THEN TRUE ELSE FALSE END"
)
_e, _t = events.c, tasks.c


def read_untouched(connection: Connection, job_ids: Sequence[str]) -> list[EventRecord]:
    """Those of these jobs whose Event is untouched, and was never anything else. Nearly all of a storm are, and a third of
    the columns tells it; whatever is not among them is to be read as a whole."""
    if not job_ids:
        return []
    dialect = connection.dialect.name
    found = batches.fetch_small(connection, _never_touched(dialect), {"job_ids": batches.given(dialect, job_ids)})
    return [
        EventRecord(
            id_, job_id, task_id, seq, _untouched_row(attempt), None, first_row, None, None, worker_name, queue, state,
            slots or 1, parallel,
        )
        for id_, job_id, task_id, seq, attempt, first_row, worker_name, queue, state, slots, parallel in found
    ]  # fmt: skip


@cache
def _never_touched(dialect: str) -> Any:
    """Made once: it is asked of every batch that is fetched."""
    is_reserved = _e.task_id.is_(None) | (_e.seq < _t.next_seq)
    return (
        sa.select(
            _e.id, _e.job_id, _e.task_id, _e.seq, _e.attempt, _e.first_row,
            sa.func.coalesce(_e.worker_name, _t.worker_name, ""), sa.func.coalesce(_e.queue, _t.queue, "default"),
            _t.state, _t.slots, _t.parallel,
        )
        .select_from(events.outerjoin(tasks, _t.id == _e.task_id))
        .where(batches.among_given(dialect, _e.job_id, "job_ids"), sa.text(_NEVER_TOUCHED), is_reserved)
    )  # fmt: skip


@lru_cache(maxsize=64)
def _untouched_row(attempt: int) -> Row:
    return Row(Status.ENQUEUE, attempt, reserved=True)


@dataclass(slots=True)
class _Alike:
    """Events that end alike: what is written of all of them, and the rows of what differs."""

    turn: Turn
    problem: str | None
    names: tuple[str, ...]
    rows: list[dict[str, Any]] = field(default_factory=list)


def write_unread(
    connection: Connection, ledger: Ledger, ends: Sequence[End], moved: dict[tuple[int, int], Delta], now: int
) -> None:
    """The ends of Events that were untouched: nearly all of a storm, and nearly all alike, so little is sent of each.

    What they move the counts by is added to ``moved``. Raises :class:`SeenNoMore`.
    """
    alike: dict[tuple[Any, ...], _Alike] = {}
    counted: dict[tuple[int | None, int, int], list[Any]] = {}
    now_text = str(rfc3339(now))
    for record, turn, notes, failure, result, started_at in sorted(ends, key=_event_id):  # as rows are locked everywhere
        problem = problem_of(turn, failure)
        key = (id(turn), problem, result is None, started_at is None)
        group = alike.get(key)
        if group is None:
            names = (*(["result"] if result is not None else []), *(["started_at"] if started_at is not None else []))
            group = alike[key] = _Alike(turn, problem, names)
        attempt = turn.after.attempt
        messages = _first_messages(notes, attempt, now, now_text)
        row = {"b_id": record.id, "b_attempt": attempt, "v_added_messages": messages}
        if result is not None:
            row["v_result"] = result
        if started_at is not None:
            row["v_started_at"] = started_at
        group.rows.append(row)
        count = counted.get(whose := (record.task_id, record.slots, id(turn)))
        if count is None:
            count = counted[whose] = [turn, 0]
        count[1] += 1
    for group in alike.values():
        _write_alike(connection, group, now)
    for (task_id, slots, _), (turn, times) in counted.items():
        if task_id is not None:
            moved.setdefault((task_id, ledger.slot(slots)), Delta()).add(turn.delta, times)


def _event_id(end: End) -> int:
    return end.record.id


def _first_messages(notes: Sequence[Note], attempt: int, now: int, now_text: str) -> str:
    """What ``added_messages`` is of an Event that had none."""
    if len(notes) > KEEP_FIRST:
        return dumps(append((), [stamp(note.at or now, note.status, note.message, attempt) for note in notes]))
    return f"[{','.join(stamps(now_text, notes, attempt))}]"


def _write_alike(connection: Connection, group: _Alike, now: int) -> None:
    before, after = group.turn.before, group.turn.after
    if before is None or after.status not in TERMINAL or before[1:7] != after[1:7] or before[12:] != after[12:]:
        raise SeenNoMore(f"from {before} to {after}: only what ends an untouched Event may be written unread")
    same = {
        "status": str(after.status), "problem": group.problem, "n_finish": after.n_finish, "n_failed": after.n_failed,
        "n_error": after.n_error, "n_cancelled": after.n_cancelled, "look_at": None, "finished_at": now,
    }  # fmt: skip
    if before.process is not None:
        same["process"] = None
    written, where = ("added_messages", *group.names), _UNTOUCHED if before.process is None else _LENT
    found = batches.update(connection, events, ("id", "attempt"), written, group.rows, same=same, where=where)
    if found != len(group.rows):
        raise SeenNoMore("something else was written of an Event meanwhile; it is read and decided again")
