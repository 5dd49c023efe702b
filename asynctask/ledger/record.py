"""Events that are made or moved from outside the runtimes: jobs without a Task, and the public seam ``app.record``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.bookkeeping import Turn, outcome, recorded
from asynctask.errors import InputError
from asynctask.ledger import ready
from asynctask.ledger.base import Ledger, chunks, dumps
from asynctask.ledger.batches import among
from asynctask.ledger.closing import try_close
from asynctask.ledger.conflicts import repeatable
from asynctask.ledger.models import events
from asynctask.ledger.signals import LEDGER, notify
from asynctask.ledger.tallies import insert_new
from asynctask.ledger.transitions import Change, EventRecord, Failure, Note, apply
from asynctask.messages import clean, is_storable
from asynctask.states import PROBLEM, TERMINAL, Reason, Status, check_event

__all__ = ["NewJob", "discard", "enqueue", "record"]

_RECORDABLE = (Status.ENQUEUE, Status.WORKING, Status.FINISH, Status.FAILED, Status.ERROR)
_e = events.c


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job without a Task. ``params`` are its arguments, JSON-ready."""

    job_id: str
    worker_name: str
    queue: str
    params: Any = None


def enqueue(
    ledger: Ledger, jobs: Sequence[NewJob], *, due_at: int | None = None, options: Mapping[str, Any] | None = None
) -> None:
    """Makes stand-alone Events; ids that are known already are left as they are.

    ``due_at`` (microseconds): the dispatcher pushes them then; None: they are in somebody's queue already. ``options``
    travel in their payload (``retry``, ``priority``).
    """
    check_event(None, Status.ENQUEUE, Reason.SUBMITTED)
    unique = list({job.job_id: job for job in jobs}.values())
    for part in chunks(unique, 1_000):
        _enqueue(ledger, part, due_at, options)


@repeatable
def _enqueue(ledger: Ledger, part: Sequence[NewJob], due_at: int | None, options: Mapping[str, Any] | None) -> None:
    with ledger.database.write() as connection:
        _insert(connection, part, due_at, options, ledger.now())
        if due_at is not None and due_at > ledger.now():
            notify(connection, LEDGER)  # its pusher may be gone by then


def _insert(
    connection: Connection, jobs: Sequence[NewJob], due_at: int | None, options: Mapping[str, Any] | None, now: int
) -> None:
    asked = among(connection, _e.job_id, [job.job_id for job in jobs])
    known = set(connection.execute(sa.select(_e.job_id).where(asked)).scalars())
    rows = [
        {
            "job_id": job.job_id, "worker_name": job.worker_name, "queue": job.queue, "status": Status.ENQUEUE,
            "params": None if job.params is None else dumps(job.params), "due_at": due_at, "created_at": now,
            "options": dumps(dict(options)) if options else None,
        }
        for job in jobs
        if job.job_id not in known
    ]  # fmt: skip
    if rows:
        connection.execute(insert_new(connection, events, ("job_id",)), rows)


@repeatable
def record(ledger: Ledger, job_id: str, status: str, message: str) -> bool:
    """Notes a status and a message; see ``AsyncTask.record``."""
    if status not in _RECORDABLE:
        raise InputError(f"no status to record: {status!r}; there are {', '.join(_RECORDABLE)}")
    if not job_id or len(job_id) > 64 or not is_storable(job_id):
        raise InputError("a job id has 1 to 64 characters, no NUL and no half of a character (a lone surrogate) among them")
    wanted = Status(status)
    with ledger.database.write() as connection:
        event_id = _find(connection, ledger, job_id)
        change = _change(ledger, event_id, wanted, message)
        applied = apply(connection, ledger, [change])[0]
    ready.announce(ledger, [applied])
    if applied.turn is not None and wanted in TERMINAL and applied.record and applied.record.task_id is not None:
        try_close(ledger, applied.record.task_id)
    return applied.turn is not None


def _find(connection: Connection, ledger: Ledger, job_id: str) -> int:
    found = connection.execute(sa.select(_e.id).where(_e.job_id == job_id)).scalar()
    if found is None:
        _insert(connection, [NewJob(job_id, "", "default")], None, None, ledger.now())
        found = connection.execute(sa.select(_e.id).where(_e.job_id == job_id)).scalar_one()
    return int(found)


def _change(ledger: Ledger, event_id: int, wanted: Status, message: str) -> Change:
    text = clean(message) or ledger.catalogue(_key(wanted), "")

    def decide(seen: EventRecord) -> Turn | None:
        return None if seen.row.status in TERMINAL else recorded(seen.row, wanted)

    failure = Failure("recorded", text) if wanted in PROBLEM else None
    return Change(event_id, decide, notes=[Note(str(wanted), text)], failure=failure)


def _key(status: Status) -> str:
    return "retry" if status is Status.ENQUEUE else str(status)


@repeatable
def discard(ledger: Ledger, reasons: Mapping[tuple[str, int], str]) -> None:
    """(job id, attempt) -> why: jobs that are given up outside the middleware end in ``error`` with that reason."""
    for part in chunks(sorted(reasons), 1_000):
        with ledger.database.write() as connection:
            found = connection.execute(sa.select(_e.id, _e.job_id).where(_e.job_id.in_([jid for jid, _ in part]))).all()
            attempts = dict(part)
            changes = [_discarded(ledger, int(i), attempts[jid], reasons[jid, attempts[jid]]) for i, jid in found]
            applied = apply(connection, ledger, changes)
        ready.announce(ledger, applied)


def _discarded(ledger: Ledger, event_id: int, attempt: int, reason: str) -> Change:
    text = ledger.catalogue("discarded", reason)

    def decide(seen: EventRecord) -> Turn | None:
        if seen.row.attempt != attempt or seen.row.status not in (Status.ENQUEUE, Status.WORKING):
            return None
        return outcome(seen.row, Status.ERROR, Reason.DISCARDED)

    return Change(event_id, decide, notes=[Note("error", text)], failure=Failure("discarded", text))
