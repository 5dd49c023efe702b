"""What is wanted of an Event, and what came of it: the values that :mod:`asynctask.ledger.events` works with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from asynctask.core.states import PROBLEM, Reason, Status
from asynctask.core.transitions import Row, Turn
from asynctask.database.retrying import TransactionConflict

__all__ = ["Applied", "Change", "End", "EventRecord", "Failure", "Note", "SeenNoMore", "problem_of", "untouched"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an item ended ``failed`` or ``error``: a code for programs, a message for people."""

    code: str
    message: str


class Note(NamedTuple):
    """A message for ``added_messages``; ``at`` (microseconds) only where it is not the time of writing."""

    status: str
    message: str
    at: int | None = None


@dataclass(slots=True)
class EventRecord:
    """One Event as read: its bookkeeping row, and what deciding and recording need beside it."""

    id: int
    job_id: str
    task_id: int | None
    seq: int | None
    row: Row
    messages: str | None
    first_row: int | None
    started_at: int | None
    finished_at: int | None
    worker_name: str
    queue: str
    task_state: str | None
    slots: int
    parallel: int | None = None


def untouched(record: EventRecord) -> bool:
    """Whether nothing at all is written of it but that it was dispatched: no message, no process, no item of it."""
    row = record.row
    return (
        row.status is Status.ENQUEUE and row.reserved and record.messages is None and row.due_at is None
        and row.process is None and not row.watched and row.deaths == 0 and row.items == 1
    )  # fmt: skip


class End(NamedTuple):
    """What ends an Event that was :func:`untouched` when it was read, without a lock, before the transaction, or untouched
    but for the process that it was lent to.

    ``record``: the Event as it was read; instead of being read again it is compared. ``turn``: what ends it. ``notes`` and
    ``failure`` as of a :class:`Change`; ``result`` and ``started_at`` are set where they are not None.
    """

    record: EventRecord
    turn: Turn
    notes: Sequence[Note]
    failure: Failure | None
    result: str | None
    started_at: int | None


def problem_of(turn: Turn, failure: Failure | None) -> str | None:
    """The code of what ended an Event, for a turn that ends it ``failed`` or ``error``."""
    if turn.after.status not in PROBLEM:
        return None
    return (failure.code if failure else str(turn.reason))[:64]


@dataclass(slots=True)
class Change:
    """A change that is wanted of one Event.

    ``decide`` is given the Event as it stands under the transaction and answers with the turn to take, or None to leave
    it (the compare-and-set is lost). It should not hold the change itself: thousands of such circles keep the collector of
    garbage busy. ``notes`` go to ``added_messages``, if it won, and the one that ``told`` has for the turn's reason.
    ``values`` are further columns to set (``result``, ``checkpoint``, ``started_at``); ``failure`` goes with a turn that
    ends ``failed`` or ``error``.
    """

    event_id: int
    decide: Callable[[EventRecord], Turn | None]
    notes: Sequence[Note] = ()
    failure: Failure | None = None
    values: dict[str, Any] = field(default_factory=dict)
    told: Mapping[Reason, Note] | None = None

    def said(self, turn: Turn) -> Sequence[Note]:
        """What goes to ``added_messages`` with this turn."""
        last = self.told.get(turn.reason) if self.told else None
        return self.notes if last is None else (*self.notes, last)


@dataclass(slots=True)
class Applied:
    """What came of a change: ``turn`` is None where the compare-and-set was lost or the Event is gone (``record`` None)."""

    change: Change
    record: EventRecord | None
    turn: Turn | None


class SeenNoMore(TransactionConflict):
    """One of the Events was not any more as an end had seen it; nothing is written, and it must be read first."""

    code = "seen_no_more"
