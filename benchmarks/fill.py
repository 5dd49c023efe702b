"""A Task with a life behind it, made with the ledger's own functions, so that the doctor finds nothing wrong with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from asynctask import AsyncTask
from asynctask.clock import SECOND
from asynctask.core.states import Reason
from asynctask.core.transitions import Transition, stop
from asynctask.ledger import lending, progress
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger, NewItem, dumps
from asynctask.ledger.events import Change, EventRecord, Failure, Note, apply, error_columns
from asynctask.ledger.lending import Job
from asynctask.ledger.processes import Host, register
from asynctask.ledger.recorder import Kind, Outcome, Recorder
from asynctask.ledger.tasks import NewTask

__all__ = ["borrowed", "fill"]

PAGE = 1_000
PROCESSES = 32
GROUPS = 100
SAMPLES = 100
LEASE_S = 3_600.0
UNREACHED = 0.01
"""The share of items that no process has borrowed yet."""


def fill(app: AsyncTask, n: int) -> tuple[int, dict[str, int]]:
    """Makes a sealed Task of ``n`` items: most are done, 1 % is in each other way of being. Returns its id and counts."""
    ledger = app.ledger
    task_id = _create(ledger, n)
    ledgers = [replace(ledger, identity=f"benchmark-{task_id}-{i}") for i in range(PROCESSES)]
    for one in ledgers:
        register(one, Host("elsewhere", ""), kind="worker", pid=1, lease_s=LEASE_S)
    counts: Counter[str] = Counter()
    left = n - max(1, int(n * UNREACHED))
    page = 0
    while left > 0:
        one = ledgers[page % PROCESSES]
        lent = borrowed(one, task_id, min(PAGE, left))
        counts += _outcomes(one, lent, page * PAGE)
        left -= len(lent)
        page += 1
    for one in ledgers:
        lending.leave(one)
    counts["enqueue"] += n - counts.total()
    _samples(ledger)
    return task_id, dict(counts)


def _create(ledger: Ledger, n: int) -> int:
    new = NewTask(worker_name="job", queue="default", priority=240, title="benchmark", planned=n, options={"retry": 3})
    task_id = task_rows.create(ledger, [task_rows.First(new)], lease_s=LEASE_S)[0].task_id
    for start in range(0, n, PAGE):
        items = [NewItem(dumps({"n": i}), i + 1) for i in range(start, min(n, start + PAGE))]
        task_rows.add_slice(ledger, task_id, items, [], after=start, cursor=start + len(items), lease_s=LEASE_S)
    task_rows.end_split(ledger, task_id, Reason.SEALED)
    return task_id


def borrowed(ledger: Ledger, task_id: int, wanted: int) -> list[Job]:
    """Jobs of a Task of the queue ``default``, lent to this process; none if it has none left."""
    with ledger.database.read() as connection:
        offers = lending.pick(connection, ledger, ["default"], limit=10_000)
    found = [offer for offer in offers if offer.task_id == task_id]
    return [job for offer in found for _, jobs in lending.borrow(ledger, offer, wanted).loans for job in jobs]


def _outcomes(ledger: Ledger, lent: Sequence[Job], first: int) -> Counter[str]:
    """What a page of jobs came to, recorded by one process; returns how many stand in each status then.

    One in 100 has not begun when its process leaves, and lies in a loan that was given back then.
    """
    stopped = [each.event_id for i, each in enumerate(lent, first) if i % 100 == 4]
    unbegun = sum(i % 100 == 6 for i in range(first, first + len(lent)))
    outcomes = [_outcome(ledger, each, i) for i, each in enumerate(lent, first) if i % 100 not in (4, 6)]
    # Never started: the batches are flushed here, by this thread.
    Recorder(ledger).flush(outcomes)
    if stopped:
        with ledger.database.write() as connection:
            apply(connection, ledger, [Change(i, _stop, notes=[Note("stopped", "Stopped")]) for i in stopped])
    counts = Counter(str(each.kind.status) for each in outcomes)
    return counts + Counter(stopped=len(stopped), enqueue=unbegun)


def _stop(record: EventRecord) -> Transition:
    return stop(record.row)


def _outcome(ledger: Ledger, job: Job, i: int) -> Outcome:
    now = ledger.now()
    begun = [Note("working", "In progress", now)]
    failure = Failure("raised", f"ValueError: reason {'x' * (i // 100 % GROUPS)}")
    match i % 100:
        case 0:
            refusal = Failure("failed", f"the seller is not qualified: {'x' * (i // 100 % (GROUPS // 2))}")
            notes = [*begun, Note("failed", f"Failed: {refusal.message}")]
            return Outcome(
                job.event_id,
                job.attempt,
                Kind.FAILED,
                notes=notes,
                failure=refusal,
                values={"started_at": now},
            )
        case 1:
            notes = [*begun, Note("error", f"Error: {failure.message}")]
            return Outcome(
                job.event_id,
                job.attempt,
                Kind.RAISED,
                notes=notes,
                failure=failure,
                values={"started_at": now},
            )
        case 2:
            notes = [Note("cancelled", "Cancelled")]
            return Outcome(job.event_id, job.attempt, Kind.CANCELLED, notes=notes)
        case 3:
            notes = [*begun, Note("error", f"Error: {failure.message}"), Note("enqueue", "Waiting for retry")]
            at = now + 86_400 * SECOND
            values = error_columns(ledger, failure, None)
            return Outcome(job.event_id, job.attempt, Kind.RETRY, notes=notes, retry_at=at, failure=failure, values=values)
        case 5:
            return Outcome(job.event_id, job.attempt, Kind.WORKING, notes=begun, values={"started_at": now})
        case _:
            notes = [*begun, Note("finish", "Done")]
            return Outcome(job.event_id, job.attempt, Kind.FINISH, notes=notes, values={"started_at": now})


def _samples(ledger: Ledger) -> None:
    """As if maintenance had taken samples every 5 s."""
    now = ledger.now()
    for ago in range(SAMPLES, 0, -1):
        with ledger.database.write() as connection:
            progress.sample(connection, now - ago * 5 * SECOND, 5.0)
