"""Tracked jobs of workers that this process does not know: another may, as while a new version is rolled out. They wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asynctask.clock import SECOND
from asynctask.logs import get_logger
from asynctask.middleware.tracker import Tracker
from asynctask.runtime.assignment import Assignment

__all__ = ["Missing"]

MISSING_S = 5
"""Such a job is offered again after so many seconds, to whoever takes it then."""


class Missing:
    """Puts such jobs off in the ledger. No retry is spent on it.

    Those that nobody tracks are left to others before, see :mod:`asynctask.runtime.strangers`. A job that was put into a
    queue by hand to be tracked is not taken: nobody ever checked its name, and it ends in error.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._log = get_logger("asynctask.missing")

    @staticmethod
    def takes(assignment: Assignment) -> bool:
        """Whether this one is to be put off."""
        return assignment.worker is None and assignment.copy.attempt > 0

    def put_off(self, jobs: Sequence[Assignment], done: Callable[[Assignment], None]) -> None:
        """Has them wait; ``done`` is told of each, to acknowledge it. Raises Unavailable."""
        until = self._tracker.now() + MISSING_S * SECOND
        names = sorted({job.name[:100] for job in jobs})
        self._log.warning("worker_missing", workers=names[:10], count=len(jobs))
        self._tracker.put_off([(job.ticket, _why(job)) for job in jobs if job.ticket is not None], until)
        for job in jobs:
            done(job)


def _why(job: Assignment) -> str:
    name = job.name[:200]
    return f"Waiting for a worker: no process that took it knows {name!r}. Start one that registers it"
