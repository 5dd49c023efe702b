"""The periodic check of the jobs that this process has borrowed, and the return of jobs that have not begun.

Borrowed jobs belong to this process alone, so it needs no leader's permission to run them. Every
:data:`~asynctask.ledger.lending.RECHECK_S` it queries the ledger for changes (:class:`Recheck`): a paused or cancelled
Task, another priority, a limit, a stopped job. It gives back jobs that will not begin soon (:class:`Returns`), so that
other processes do not idle.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from asynctask.core.states import State
from asynctask.core.transitions import Begin
from asynctask.ledger import lending
from asynctask.ledger.base import Ledger
from asynctask.ledger.lending import Check, HeldTask, Loan
from asynctask.logs import get_logger
from asynctask.middleware.tracker import Tracker
from asynctask.runtime.execution import Execution
from asynctask.runtime.loans import OwnLoan, OwnLoans
from asynctask.runtime.pool import Pool


class Returns:
    """Gives back jobs that have not begun: the end of each loan by a cut, all loans in one transaction; other jobs one by
    one."""

    def __init__(self, ledger: Ledger, tracker: Tracker, pool: Pool, loans: OwnLoans) -> None:
        self._ledger = ledger
        self._tracker = tracker
        self._pool = pool
        self._loans = loans
        self._left: list[tuple[OwnLoan, int, list[Execution]]] = []  # cuts that are not committed yet

    def give_back(self, unbegun: Sequence[Execution]) -> None:
        """Gives back jobs that are no longer ready here. Raises Unavailable."""
        by_loan: dict[OwnLoan, list[Execution]] = {}
        for each in unbegun:
            if (loan := each.loan) is None or each.ticket.of_round:
                self._pool.release(each)
            else:
                by_loan.setdefault(loan, []).append(each)
        for loan, executions in by_loan.items():
            cut = max(loan.top + 1, min(each.seq for each in executions))
            for each in executions:
                if each.seq < cut:
                    self._pool.release(each)
            self._left.append((loan, cut, [each for each in executions if each.seq >= cut]))
        self.send()

    def send(self) -> None:
        """Cuts the loans. If it raises Unavailable, call it again before any other borrow or check, because the cuts may be
        committed."""
        if not self._left:
            return
        given = lending.give_back(self._ledger, [(loan.as_loan(), cut) for loan, cut, _ in self._left])
        for (loan, cut, executions), had in zip(self._left, given, strict=True):
            for each in executions:
                each.is_recalled = True
                self._tracker.forget(each, is_held=False)
            if had:
                self._loans.cut(loan, cut, len(executions))
            else:
                self._loans.forget(loan)
        self._left.clear()


class Recheck:
    """Compares the jobs that this process holds with the ledger, and acts on the differences."""

    def __init__(self, ledger: Ledger, tracker: Tracker, pool: Pool, loans: OwnLoans, returns: Returns) -> None:
        self._ledger = ledger
        self._tracker = tracker
        self._pool = pool
        self._loans = loans
        self._returns = returns
        self.at = -1e9  # when the last check began, on the monotonic clock
        self._log = get_logger("asynctask.borrower")

    def run(self) -> None:
        """Checks once. Raises Unavailable."""
        pool, jobs, own = self._pool, self._pool.jobs, self._loans.all()
        begun_at, claims = self._ledger.clock.monotonic(), self._loans.claims()
        unbegun, limited = jobs.unbegun(), set(jobs.limited())
        found = lending.check(self._ledger, {each.task_id for each in unbegun if each.task_id is not None} | limited)
        self.at = begun_at
        asked = [each for each in found.loans.values() if each.asked is not None]
        stopping = found.stopping | self._stopped(asked, unbegun)
        held_back = {i for i, task in found.tasks.items() if not _may_begin(task)}
        in_rounds = {i for i, task in found.tasks.items() if task.knobs[2]}
        gone = [loan for loan_id, loan in own.items() if loan_id not in found.loans and loan_id in self._loans.all()]
        for loan in gone:
            self._loans.forget(loan)
        taken_back = claims - found.claims.items() - found.working

        def is_lost(each: Execution) -> bool:
            if each.loan is not None:
                return each.loan in gone
            return (each.ticket.event_id, each.ticket.attempt) in taken_back

        def must_not_begin(each: Execution) -> bool:
            if not each.is_borrowed:
                return False
            if each.task_id in in_rounds and not each.ticket.of_round:
                return True  # it was borrowed before the interval was set, and belongs to no round
            is_held_back = each.task_id in held_back or each.copy.queue in found.paused
            return is_held_back or each.ticket.event_id in stopping or is_lost(each)

        is_news = held_back or in_rounds or gone or taken_back or stopping or found.paused
        dropped = jobs.recall(must_not_begin) if is_news else []
        pool.gate.checked(begun_at, found.paused)
        cancelled = {i for i, task in found.tasks.items() if task.state == State.CANCELLED}
        back = [each for each in dropped if not self._is_settled(each, is_lost(each), cancelled, stopping)]
        if asked:  # not before: if an answer is lost, the next check stops the jobs
            lending.acknowledge_stops(self._ledger, asked)
        self._returns.give_back(back)
        self._give_back_unarrived(found, own, claims)
        self._follow_knobs(found.tasks, limited)
        self._return_surplus(begun_at)
        self._tracker.ask_stops()

    def _is_settled(
        self, dropped: Execution, is_lost: bool, cancelled: Collection[int | None], stopping: Collection[int]
    ) -> bool:
        """Settles a job that may not begin if this process lost it, its Task was cancelled, or a user stopped it; false if
        it must be given back."""
        dropped.is_recalled = True
        if is_lost:
            self._pool.jobs.release(dropped)
            self._tracker.forget(dropped)  # recovery has raised its attempt
            return True
        is_cancelled = dropped.task_id in cancelled
        if is_cancelled:
            dropped.ticket = replace(dropped.ticket, verdict=Begin.CANCEL)
        if is_cancelled or dropped.ticket.event_id in stopping:
            self._pool.release(dropped)
            return True
        return False

    def _stopped(self, asked: Sequence[Loan], unbegun: Sequence[Execution]) -> set[int]:
        """The Events of these loans that a user stopped and that have not begun."""
        task_ids = {each.task_id for each in asked}
        event_ids = [each.ticket.event_id for each in unbegun if each.is_borrowed and each.task_id in task_ids]
        return lending.stopping(self._ledger, event_ids) if event_ids else set()

    def _give_back_unarrived(self, found: Check, own: Mapping[int, OwnLoan], claims: Collection[tuple[int, int]]) -> None:
        """Gives back loans and claims that this process holds by the ledger and does not know, because the answer to its
        borrow was lost."""
        loans = [Loan(each.id, each.task_id, each.low, each.high) for each in found.loans.values() if each.id not in own]
        if loans:
            self._log.warning("loans_unarrived", count=len(loans))
            lending.give_back(self._ledger, [(loan, loan.low) for loan in loans])
        lost_claims = {i: attempt for i, attempt in found.claims.items() if (i, attempt) not in claims}
        if lost_claims:
            self._log.warning("claims_unarrived", count=len(lost_claims))
            lending.unclaim(self._ledger, lost_claims)

    def _follow_knobs(self, tasks: Mapping[int, HeldTask], limited: set[int]) -> None:
        """Applies changed priorities and limits; returns places that no job here needs."""
        jobs = self._pool.jobs
        for task_id, task in tasks.items():
            rank = jobs.rank_of(task_id)
            if rank is not None and rank[1] != task.priority:
                jobs.reorder(task_id, (rank[0], task.priority))
            if task.limit is not None:
                self._follow_limit(task_id, task, task_id in limited)
            # Only once the row of places is deleted: with it, a new limit would count too few jobs here.
            elif task_id in limited and not lending.lease_places(self._ledger, task_id, 0, 0).is_locked:
                jobs.limit(task_id, None)
        for task_id in limited - tasks.keys():  # the Task no longer exists
            jobs.limit(task_id, None)

    def _follow_limit(self, task_id: int, task: HeldTask, is_known: bool) -> None:
        jobs = self._pool.jobs
        places, used, waiting = jobs.places(task_id)
        needed = min(task.limit or 0, used + waiting)
        if is_known and places == needed == task.places:
            return
        # Lower the places here first, then in the ledger, where other processes get them at once.
        used = jobs.lower(task_id, needed)
        lease = lending.lease_places(self._ledger, task_id, needed, used, holds=bool(used or waiting))
        if lease.is_locked:
            return
        if lease.places is None or not (lease.places or used or waiting):
            jobs.limit(task_id, None)
        else:
            jobs.limit(task_id, min(lease.places, needed))

    def _return_surplus(self, now: float) -> None:
        """Gives back jobs that will not begin within half a second, because they or the jobs before them turned out to be
        long: other processes may have idle threads."""
        pool, jobs = self._pool, self._pool.jobs
        for each in pool.running():
            if each.began and each.task_id is not None:
                pool.durations.at_least(each.task_id, now - each.began)
        pool.return_suspects()
        keep = int(jobs.note_taken() * 1.25)
        if len(jobs) <= keep or (pool.busy < pool.concurrency and not pool.closed):
            return
        is_beyond, old = jobs.first(keep), now - lending.RECHECK_S * 0.9
        self._returns.give_back(jobs.drop(lambda each: is_beyond(each) and each.is_borrowed and each.asked <= old))


def _may_begin(task: HeldTask) -> bool:
    return task.state in (State.SPLITTING, State.RUNNING) and task.in_session and not task.is_paused
