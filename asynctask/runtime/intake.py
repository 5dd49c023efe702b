"""What a fetched copy is: a job for a worker of this process, a job of others, or no job at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from asynctask.bookkeeping import Begin
from asynctask.brokers.base import DEAD, Broker, Copy, Held
from asynctask.bulk.payload import job_of, worker_name
from asynctask.clock import Clock
from asynctask.job import CurrentJob
from asynctask.logs import get_logger
from asynctask.middleware.task_event import TICKET
from asynctask.middleware.tracker import Arrival, Ticket, Tracker
from asynctask.runtime.assignment import Assignment
from asynctask.runtime.mine import Mine
from asynctask.runtime.strangers import Stranger, Strangers, why_not_ours
from asynctask.worker import Worker

__all__ = ["Intake"]


class Intake:
    """Makes assignments of fetched copies.

    Arguments: ``mine``, what the broker holds for this process; ``strangers``, who takes what is others'; ``stopping``,
    whether the process is; ``acknowledge``, told of a copy whose outcome is recorded although it never was an assignment.
    """

    def __init__(
        self,
        *,
        identity: str,
        broker: Broker,
        tracker: Tracker,
        clock: Clock,
        workers: Mapping[str, Worker],
        mine: Mine,
        strangers: Strangers,
        stopping: Callable[[], bool],
        acknowledge: Callable[[Copy], None],
    ) -> None:
        self._identity = identity
        self._broker = broker
        self._tracker = tracker
        self._clock = clock
        self._workers = workers
        self._mine = mine
        self._strangers = strangers
        self._stopping = stopping
        self._acknowledge = acknowledge
        self._log = get_logger("asynctask.intake")

    def take(self, copies: Sequence[Copy]) -> list[Assignment]:
        """The jobs among a fetched batch, each with its ticket if it is tracked. Raises Unavailable."""
        found = [self._assign(copy) for copy in copies]
        assignments = [each for each in found if isinstance(each, Assignment)]
        if len(assignments) < len(found):
            strangers = [each for each in found if isinstance(each, Stranger)]
            self._strangers.defer(strangers)
            self._mine.forget([each.copy for each in strangers])
            ours = {each.copy.queue for each in assignments}
            self._strangers.gave(ours, strangers)
        else:
            self._strangers.gave({each.copy.queue for each in assignments}, ())
        tracked = [each for each in assignments if each.is_tracked]
        if tracked:
            self._ask(tracked)
        return assignments

    def ask_again(self, assignment: Assignment) -> None:
        """A ticket that says what is so now, for a job that was not begun since it got its first. Raises Unavailable."""
        self._ask([assignment])

    def _ask(self, tracked: Sequence[Assignment]) -> None:
        asked = self._clock.monotonic()
        arrivals = [
            Arrival(each.copy.jid, each.copy.attempt, each.name, each.copy.queue, each.payload["args"]) for each in tracked
        ]
        for each, ticket in zip(tracked, self._tracker.begin(arrivals), strict=True):
            each.asked = asked
            _bind(each, ticket)

    def _assign(self, copy: Copy) -> Assignment | Stranger | None:
        try:
            payload = job_of(copy)
        except ValueError as error:
            self._log.error("undecodable_job", jid=copy.jid, queue=copy.queue, error=str(error)[:500])
            self._give_up(copy, error)
            return None
        name = worker_name(payload)
        worker = self._workers.get(name)
        if copy.attempt == 0:
            why = why_not_ours(payload, worker)
            if why is not None:
                return Stranger(copy, name, why)

        state: dict[str, Any] = {}
        job = CurrentJob(
            copy.jid,
            task_id=copy.task_id,
            attempt=max(1, copy.attempt),
            queue=copy.queue,
            payload=dict(payload),
            should_stop=partial(self._must_stop, state),
            state=state,
        )
        return Assignment(copy, payload, job, worker, None)

    def _must_stop(self, state: Mapping[str, Any]) -> bool:
        ticket: Ticket | None = state.get(TICKET)
        return self._stopping() or (ticket is not None and ticket.lost)

    def _give_up(self, copy: Copy, error: ValueError) -> None:
        """A copy that is no job: where it is tracked its Event ends so, for nobody would ever look into ``dead`` for it."""
        if copy.attempt == 0:
            self._broker.hold(DEAD, [Held(copy, self._clock.now())], process=self._identity)
            self._mine.forget([copy])
            return
        (ticket,) = self._tracker.begin([Arrival(copy.jid, copy.attempt, "", copy.queue)])
        if ticket.verdict is Begin.DROP:
            self._mine.done(copy)
        elif ticket.verdict is Begin.RUN:
            reason = f"it cannot be decoded: {error}"
            self._tracker.settle(ticket, discarded=reason, then=lambda won: self._acknowledge(copy))
        else:
            self._tracker.release(ticket, lambda won: self._acknowledge(copy))


def _bind(assignment: Assignment, ticket: Ticket) -> None:
    assignment.ticket = ticket
    ticket.job = assignment.job
    assignment.job.task_id = ticket.task_id
    assignment.job.attempt = ticket.attempt
    assignment.job.state[TICKET] = ticket
