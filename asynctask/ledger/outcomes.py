"""What is to be recorded of one attempt of one Event, and the change of its row that this means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from asynctask.core.states import Reason, State, Status
from asynctask.core.transitions import Row, Turn, cancel, ending, give_back, held_elsewhere, outcome, take_over, working
from asynctask.database.retrying import repeatable
from asynctask.ledger.base import Ledger
from asynctask.ledger.events import Applied, Change, End, EventRecord, Failure, Note, apply

__all__ = ["Follower", "Outcome", "forget_seen", "is_mine", "with_followers", "write", "write_once"]


@dataclass(slots=True)
class Outcome:
    """What is to be recorded of one attempt of one Event.

    ``status`` and ``reason`` name the edge; ``retry_at`` (microseconds) turns an error into another attempt.
    ``then`` is called once the transaction is committed, with whether the compare-and-set was won: only then may the
    job's copy be acknowledged. ``elsewhere``: another engine keeps the job's copies. They carry no fence, so whatever
    attempt the open Event is at is the one meant, and a next attempt waits in that engine's queue, not in the ledger.
    ``seen``: the Event as it stood at Begin, if it was untouched: the first try to record the end of it goes by that.
    ``awaited``: something may wait for it to be recorded: the job itself, before it begins, or its Task, which starts no
    more jobs than a number at a time. ``done``: it is committed or given up, and is never flushed again.
    ``doubtful``: the answer to its commit was lost and it may stand, so it counts for the attempt it names alone.
    ``follower``: the job that has begun in this one's place under their Task's ``parallel``.
    """

    event_id: int
    attempt: int
    status: Status
    reason: Reason
    notes: list[Note] = field(default_factory=list)
    retry_at: int | None = None
    failure: Failure | None = None
    result: str | None = None
    started_at: int | None = None
    then: Callable[[bool], None] | None = None
    elsewhere: bool = False
    seen: EventRecord | None = None
    awaited: bool = False
    done: bool = False
    doubtful: bool = False
    follower: Follower | None = None


@dataclass(frozen=True, slots=True)
class Follower:
    """A lent job that took the place of another. It counts in flight from the transaction that ends the other: either it is
    over by then, too, or its ``working`` is recorded there, as ``begun`` says."""

    event_id: int
    begun: Callable[[], Outcome]


def with_followers(batch: Sequence[Outcome]) -> list[Outcome]:
    """These outcomes, and ``working`` of each job that runs in the place of one of them."""
    ids = {each.event_id for each in batch}
    begun = [each.follower.begun() for each in batch if each.follower is not None and each.follower.event_id not in ids]
    for each in batch:
        each.follower = None  # what is flushed again goes with it in the batch
    return [*batch, *begun]


def write_once(ledger: Ledger, wave: Sequence[Outcome]) -> tuple[list[End], list[Applied]]:
    """Commits outcomes of different Events: the ends that were taken as they had been seen, and what came of the others.
    Raises :class:`~asynctask.ledger.changes.SeenNoMore` where an Event is not as it was seen, and LedgerUnavailable."""
    ends = [
        End(seen, ending(seen.row, each.status, each.reason), each.notes, each.failure, each.result, each.started_at)
        for each in wave
        if (seen := each.seen) is not None
    ]
    changes = [_change(ledger, each) for each in wave if each.seen is None] if len(ends) < len(wave) else []
    forget_seen(wave)  # whatever comes of this try, another one reads them: it may have been written and not answered
    with ledger.database.write() as connection:
        return ends, apply(connection, ledger, changes, ends)


write = repeatable(write_once)


def forget_seen(wave: Sequence[Outcome]) -> None:
    """Has the Events of these outcomes read before they are written."""
    for each in wave:
        each.seen = None


def is_mine(ledger: Ledger, each: Outcome, record: EventRecord | None) -> bool:
    """Whether an outcome that changed nothing stands already: the answer to its first commit was lost.

    It matters for ``working`` alone. Every other outcome is the last of its attempt, whose copy is acknowledged anyway.
    """
    if each.status is not Status.WORKING or record is None or record.row.status is not Status.WORKING:
        return False
    return record.row.process == ledger.identity and (each.elsewhere or record.row.attempt == each.attempt)


def _change(ledger: Ledger, each: Outcome) -> Change:
    values: dict[str, Any] = {}
    if each.result is not None:
        values["result"] = each.result
    if each.started_at is not None:
        values["started_at"] = each.started_at
    told = {Reason.CANCELLED: Note("cancelled", ledger.catalogue("cancelled"))} if _may_cancel(each) else None
    is_fenced = each.doubtful or not each.elsewhere

    def decide(record: EventRecord) -> Turn | None:
        row = record.row
        if row.status not in (Status.ENQUEUE, Status.WORKING) or (is_fenced and row.attempt != each.attempt):
            return None
        if record.started_at is not None:
            values.pop("started_at", None)
        turn = _turn(ledger, row, record.task_state, each)
        return held_elsewhere(turn) if turn is not None and each.elsewhere else turn

    return Change(each.event_id, decide, each.notes, each.failure, values, told)


def _may_cancel(each: Outcome) -> bool:
    """Whether its Task's cancel may be what comes of it: of what would run again, or did not run."""
    return (
        each.status in (Status.ENQUEUE, Status.CANCELLED) or each.retry_at is not None or each.reason is Reason.INTERRUPTED
    )


def _turn(ledger: Ledger, row: Row, state: str | None, each: Outcome) -> Turn | None:
    if each.status is Status.WORKING:
        if each.elsewhere and row.status is Status.WORKING and row.process != ledger.identity:
            return take_over(row, ledger.identity)
        if row.status is Status.ENQUEUE:
            return working(row, ledger.identity)
        if row.process == ledger.identity and not each.doubtful and not each.elsewhere:
            return Turn(row, row, Reason.RECORDED)  # it was recorded with the end of the job before it: adds the messages
        return None
    if each.status is Status.CANCELLED:
        return cancel(row)
    if each.reason is Reason.GIVEN_BACK:
        return cancel(row) if state == State.CANCELLED else give_back(row, now=ledger.now())
    waits_again = each.retry_at is not None or each.reason is Reason.INTERRUPTED
    if waits_again and state == State.CANCELLED:
        return cancel(row)  # nothing of a cancelled Task starts again; what happened stands in the messages
    return outcome(row, each.status, each.reason, retry_at=each.retry_at, now=ledger.now())
