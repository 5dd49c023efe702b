"""The middleware that leaves the record of a tracked job; the table of what it records is in docs/middleware.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asynctask.job import CurrentJob, interrupted
from asynctask.middleware.tracker import AttemptLost, Ticket, Tracker
from asynctask.worker import Worker

__all__ = ["TICKET", "TaskEventMiddleware"]

TICKET = "asynctask.ticket"
"""Where the runtime leaves the ticket of a tracked job, in the job's ``state``."""


class TaskEventMiddleware:
    """Notes when the job starts and what it came to; a business refusal ends here, anything else is raised on.

    It writes nothing itself: the runtime around it decides first whether a retry follows, and then settles the ticket.
    """

    def __init__(self, tracker: Tracker, max_result_bytes: int = 65_536) -> None:
        self._tracker = tracker
        self._limit = max_result_bytes

    def __call__(self, worker: Worker, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
        ticket: Ticket | None = job.state.get(TICKET)
        if ticket is None:  # not tracked
            return call_next()
        self._tracker.start(ticket)
        try:
            result = call_next()
        except AttemptLost:  # the ticket is not this thread's to write on
            raise
        except BaseException as error:
            if worker.refuses(error) and not interrupted(job, error):
                ticket.fail(error)
                return None
            ticket.raised(error)
            raise
        ticket.finish(result, self._limit)
        return result
