"""Borrows and outcomes one step at a time, as a worker process makes them: no worker runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import sqlalchemy as sa

from asynctask.database.tables import events, loans, places, tasks
from asynctask.ledger import foreign, lending
from asynctask.ledger.base import Ledger
from asynctask.ledger.lending import Job, Offer
from asynctask.ledger.recorder import Kind, Outcome, Recorder
from asynctask.middleware.tracker import Attempt, Tracker
from asynctask.runtime.loans import OwnClaim, OwnLoan, OwnLoans

_e, _l, _p, _t = events.c, loans.c, places.c, tasks.c
_OPEN = (_e.status.in_(["enqueue", "working"]), _e.due_at.is_(None))


_OWN: dict[str, OwnLoans] = {}
"""What each process has, by its identity."""


def own_loans(ledger: Ledger) -> OwnLoans:
    """What this process has."""
    return _OWN.setdefault(ledger.identity, OwnLoans())


@dataclass(frozen=True, slots=True)
class Lent(Job):
    """A job, and the loan or claim by which it is held."""

    by: OwnLoan | OwnClaim | None = None


def offers(ledger: Ledger, *queues: str) -> list[Offer]:
    """The Tasks that may start jobs now, in order."""
    with ledger.database.read() as connection:
        return lending.pick(connection, ledger, queues or ["default"])


def offer(ledger: Ledger, task_id: int) -> Offer | None:
    """The Task, if it may start jobs now."""
    with ledger.database.read() as connection:
        queue = connection.execute(sa.select(_t.queue).where(_t.id == task_id)).scalar_one()
    return next((each for each in offers(ledger, queue) if each.task_id == task_id), None)


def borrow(ledger: Ledger, task_id: int, wanted: int = 100) -> list[Lent]:
    """Up to ``wanted`` jobs of a Task for this process, within its places if the Task has a limit."""
    found = offer(ledger, task_id)
    if found is None:
        return []
    if found.limit is not None:
        running = count_held(ledger, task_id)
        wanted = (lending.lease_places(ledger, task_id, running + wanted, running).places or 0) - running
    borrowed, own = lending.borrow(ledger, found, wanted), own_loans(ledger)
    if found.limit is not None:
        _settle_places(ledger, task_id)
    lent: list[tuple[Job, OwnLoan | OwnClaim]] = [(job, own.claim(job.event_id, job.attempt)) for job in borrowed.claimed]
    for loan, jobs in borrowed.loans:
        by = own.add(loan, len(jobs))
        lent += [(job, by) for job in jobs]
    if empty := own.take_empty():
        lending.end_empty(ledger, empty)
    return [_lent(job, by) for job, by in lent]


def borrow_alone(ledger: Ledger, *queues: str, workers: Collection[str] | None = None) -> list[Lent]:
    """The jobs without a Task that are due, claimed for this process; with ``workers``, those of these, untracked ones
    among them."""
    with ledger.database.read() as connection:
        due = lending.alone_due(connection, ledger.now(), queues or ["default"], workers=workers)
    own = own_loans(ledger)
    jobs = lending.claim_alone(ledger, [each.event_id for each in due])
    return [_lent(job, own.claim(job.event_id, job.attempt)) for job in jobs]


def _lent(job: Job, by: OwnLoan | OwnClaim) -> Lent:
    return Lent(**{each.name: getattr(job, each.name) for each in fields(Job)}, by=by)


def outcome(job: Lent, kind: Kind = Kind.FINISH, **more: Any) -> Outcome:
    """The end of a job."""
    return Outcome(job.event_id, job.attempt, kind, loan=job.by, **more)


def end(ledger: Ledger, *jobs: Lent, kind: Kind = Kind.FINISH, **more: Any) -> None:
    """Records these jobs as ended, in one transaction."""
    Recorder(ledger).flush([outcome(job, kind, **more) for job in jobs])
    for task_id in {job.task_id for job in jobs if job.task_id is not None}:
        _settle_places(ledger, task_id)


def give_back(ledger: Ledger, *jobs: Lent) -> bool:
    """Gives back jobs at the end of one loan; returns whether this process had it."""
    loan, first = jobs[0].by, jobs[0].seq
    assert isinstance(loan, OwnLoan)
    assert first is not None
    (had,) = lending.give_back(ledger, [(loan.as_loan(), first)])
    if had:
        own_loans(ledger).cut(loan, first, len(jobs))
    return had


def count_held(ledger: Ledger, task_id: int) -> int:
    """How many jobs of a Task this process holds."""
    in_loan = sa.exists().where(_l.task_id == _e.task_id, _l.process == ledger.identity, _l.low <= _e.seq, _l.high > _e.seq)
    own = sa.or_(_e.process == ledger.identity, _e.process.is_(None) & in_loan)
    with ledger.database.read() as connection:
        return int(
            connection.execute(
                sa.select(sa.func.count()).select_from(events).where(_e.task_id == task_id, own, *_OPEN)
            ).scalar_one()
        )


def _settle_places(ledger: Ledger, task_id: int) -> None:
    with ledger.database.read() as connection:
        own = sa.select(_p.n).where(_p.task_id == task_id, _p.process == ledger.identity)
        had = connection.execute(own).scalar()
    if had is not None:
        held = count_held(ledger, task_id)
        lending.lease_places(ledger, task_id, held, held, holds=held > 0)


def hand_over(ledger: Ledger, task_id: int, wanted: int = 100, engine: str | None = None) -> list[Job]:
    """Jobs of a Task that lie in a foreign queue from now on, as the dispatcher leaves them: in that of an engine, or in
    Redis for workers in other languages."""
    pusher, found = ledger.under(foreign.pusher(ledger.identity)), offer(ledger, task_id)
    if found is None:
        return []
    lent = lending.borrow(pusher, found, wanted)
    by_loan = [job for _, jobs in lent.loans for job in jobs]
    claimed = [job.event_id for job in lent.claimed]
    foreign.hand_over(pusher, lending.queue_holder(engine), [loan.id for loan, _ in lent.loans], claimed, {})
    return [*lent.claimed, *by_loan]


def attempts(tracker: Tracker, jobs: Sequence[Lent]) -> list[Attempt]:
    """The attempts of borrowed jobs, in order, with their tickets as the runtime makes them."""
    made = {job.job_id: tracker.borrowed([job], job.by, 0.0)[0] for job in jobs if isinstance(job.by, OwnLoan)}
    claimed = tracker.begin([(job.job_id, job.attempt) for job in jobs if isinstance(job.by, OwnClaim)])
    made |= {ticket.job_id: ticket for ticket in claimed if ticket is not None}
    return [Attempt(replace(made[job.job_id], loan=job.by)) for job in jobs]
