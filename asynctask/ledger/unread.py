"""The ends of Events that were untouched since they were seen: written without being read again.

Nearly all of a storm of outcomes is such, and nearly all of them alike. What they were seen to be is compared in the UPDATE
itself, so nothing is lost by not reading it; and what is the same in all of them is sent once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.engine import Connection

from asynctask.bookkeeping import Delta, Turn
from asynctask.ledger import batches
from asynctask.ledger.base import Ledger, dumps, stamp, stamps
from asynctask.ledger.changes import Change, Seen, SeenNoMore
from asynctask.ledger.models import events
from asynctask.messages import KEEP_FIRST, append
from asynctask.states import TERMINAL

__all__ = ["write_unread"]

# What untouched() says, of the row as it stands. Whatever else an outcome is decided by never changes while this is true.
# As one value: of plain conditions PostgreSQL may think that few rows meet them, and begin with a look at all that do.
_UNTOUCHED = (
    "CASE WHEN status = 'enqueue' AND added_messages IS NULL AND due_at IS NULL AND process IS NULL AND watched = 0"
    " THEN TRUE ELSE FALSE END"
)


@dataclass(slots=True)
class _Alike:
    """Events that end alike: what is written of all of them, and the rows of what differs."""

    turn: Turn
    problem: str | None
    names: tuple[str, ...]
    rows: list[dict[str, Any]] = field(default_factory=list)


def write_unread(
    connection: Connection,
    ledger: Ledger,
    changes: list[tuple[Change, Seen]],
    moved: dict[tuple[int, int], Delta],
    now: int,
) -> None:
    """The ends of Events that were untouched: nearly all of a storm, and nearly all alike, so little is sent of each."""
    changes.sort(key=_by_event_id)  # the order in which rows are locked everywhere
    alike: dict[tuple[Any, ...], _Alike] = {}
    ends: dict[tuple[int | None, int, int], list[Turn]] = {}
    for change, (record, turn) in changes:
        problem = change.problem(turn)
        key = (id(turn), problem, *change.values)
        group = alike.get(key)
        if group is None:
            group = alike[key] = _Alike(turn, problem, tuple(change.values))
        row = {"b_id": record.id, "b_attempt": turn.after.attempt, "v_added_messages": _first_messages(change, turn, now)}
        for name, value in change.values.items():
            row[f"v_{name}"] = value
        group.rows.append(row)
        ends.setdefault((record.task_id, record.slots, id(turn)), []).append(turn)
    for group in alike.values():
        _write_alike(connection, group, now)
    for (task_id, slots, _), turns in ends.items():
        if task_id is not None:
            moved.setdefault((task_id, ledger.slot(slots)), Delta()).add(turns[0].delta, len(turns))


def _by_event_id(each: tuple[Change, Seen]) -> int:
    return each[1].record.id


def _first_messages(change: Change, turn: Turn, now: int) -> str:
    """What ``added_messages`` is of an Event that had none."""
    notes = change.said(turn)
    if len(notes) > KEEP_FIRST:
        return dumps(append((), [stamp(note.at or now, note.status, note.message, turn.after.attempt) for note in notes]))
    return f"[{','.join(stamps(now, notes, turn.after.attempt))}]"


def _write_alike(connection: Connection, group: _Alike, now: int) -> None:
    before, after = group.turn.before, group.turn.after
    if before is None or after.status not in TERMINAL or before[1:7] != after[1:7] or before[11:] != after[11:]:
        raise SeenNoMore(f"from {before} to {after}: only what ends an untouched Event may be written unread")
    same = {
        "status": str(after.status), "problem": group.problem, "n_finish": after.n_finish, "n_failed": after.n_failed,
        "n_error": after.n_error, "n_cancelled": after.n_cancelled, "look_at": None, "finished_at": now,
    }  # fmt: skip
    written = ("added_messages", *group.names)
    found = batches.update(connection, events, ("id", "attempt"), written, group.rows, same=same, where=_UNTOUCHED)
    if found != len(group.rows):
        raise SeenNoMore("something else was written of an Event meanwhile; it is read and decided again")
