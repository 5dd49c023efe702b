"""Jobs of workers that this process does not know: another may, as while a new version is rolled out. They wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asynctask.brokers.base import SCHEDULE, Broker, Held
from asynctask.clock import SECOND, Clock
from asynctask.logs import get_logger
from asynctask.middleware.tracker import Tracker
from asynctask.runtime.performer import Assignment

__all__ = ["Missing"]

MISSING_S = 5
"""Such a job is offered again after so long, to whoever takes it then."""


class Missing:
    """Puts such jobs off: tracked ones in the ledger, others in the broker's schedule. No retry is spent on it.

    A job that was put into a queue by hand to be tracked is not taken: nobody ever checked its name, and it ends in error.
    """

    def __init__(self, identity: str, broker: Broker, tracker: Tracker, clock: Clock) -> None:
        self._identity = identity
        self._broker = broker
        self._tracker = tracker
        self._clock = clock
        self._log = get_logger("asynctask.missing")

    @staticmethod
    def takes(assignment: Assignment) -> bool:
        """Whether this one is to be put off."""
        return assignment.worker is None and (assignment.copy.attempt > 0 or assignment.ticket is None)

    def put_off(
        self, jobs: Sequence[Assignment], done: Callable[[Assignment], None], gone: Callable[[Assignment], None]
    ) -> None:
        """Has them wait; ``done`` is told of those to acknowledge, ``gone`` of those that left. Raises Unavailable."""
        until = self._clock.now() + MISSING_S * SECOND
        names = sorted({str(job.payload["class"])[:100] for job in jobs})
        self._log.warning("worker_missing", workers=names[:10], count=len(jobs))
        untracked = [job for job in jobs if job.ticket is None]
        if untracked:
            self._broker.hold(SCHEDULE, [Held(job.copy, until) for job in untracked], process=self._identity)
        for job in untracked:
            gone(job)
        tracked = [(job, job.ticket) for job in jobs if job.ticket is not None]
        if tracked:
            self._tracker.put_off([(ticket, _why(job)) for job, ticket in tracked], until)
        for job, _ in tracked:
            done(job)


def _why(job: Assignment) -> str:
    name = str(job.payload["class"])[:200]
    return f"Waiting for a worker: no process that took it knows {name!r}. Start one that registers it"
