"""What a worker process makes of a copy: the execution of a job, whether the ledger lent it or a broker gave it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from asynctask.brokers.base import Copy
from asynctask.clock import SECOND
from asynctask.job import CurrentJob
from asynctask.logs import get_logger
from asynctask.middleware.tracker import ATTEMPT, NO_TICKET, Attempt, Ticket, Tracker
from asynctask.runtime.execution import Execution
from asynctask.sidekiq.activejob import worker_name
from asynctask.sidekiq.copies import job_of
from asynctask.worker import Worker

DEFER_S: Final = 5
"""Seconds after which a tracked job of a worker that this process does not know is due again, for any process: another
may know it, as during a deploy."""

MAX_UNRECORDED: Final = 5_000
"""Outcomes that wait for the ledger, from which a process takes no more jobs."""


class Intake:
    """Makes executions for the ``workers`` of this process; ``quiet`` is set when the process stops."""

    def __init__(self, workers: Mapping[str, Worker], quiet: threading.Event) -> None:
        self._workers = workers
        self._quiet = quiet

    def borrowed(self, given: Sequence[tuple[Copy, Ticket | None]]) -> list[Execution]:
        """Jobs that the ledger has lent to this process, each with its ticket."""
        found = []
        for copy, ticket in given:
            if ticket is not None:
                found.append(execution := self.execution(copy))
                bind(execution, ticket)
        return found

    def execution(self, copy: Copy) -> Execution:
        """The job of a copy, without a ticket. Raises ValueError for text that is no job."""
        payload = job_of(copy)
        local: dict[str, Any] = {}
        job = CurrentJob(
            copy.jid,
            task_id=copy.task_id,
            attempt=max(1, copy.attempt),
            queue=copy.queue,
            payload=dict(payload),
            should_stop=partial(self._must_stop, local),
            local=local,
        )
        return Execution(NO_TICKET, job=job, copy=copy, payload=payload, worker=self._workers.get(worker_name(payload)))

    def _must_stop(self, local: Mapping[str, Any]) -> bool:
        attempt: Attempt | None = local.get(ATTEMPT)
        return self._quiet.is_set() or (attempt is not None and attempt.is_lost)


def bind(execution: Execution, ticket: Ticket) -> None:
    """Gives a job its ticket."""
    execution.ticket = ticket
    execution.job.task_id = ticket.task_id
    execution.job.attempt = ticket.attempt
    execution.bind(execution.job)


def put_off(tracker: Tracker, deferred: Sequence[Execution]) -> None:
    """Makes tracked jobs of workers that this process does not know wait in the ledger for another process, without
    spending a retry. Raises :class:`Unavailable`."""
    names = sorted({job.name[:100] for job in deferred})
    get_logger("asynctask.missing").warning("worker_missing", workers=names[:10], count=len(deferred))
    until = tracker.now() + DEFER_S * SECOND
    tracker.put_off([(job, _why_put_off(job)) for job in deferred if job.has_event], until)


def _why_put_off(job: Execution) -> str:
    return f"Waiting for a worker: no process that took it knows {job.name[:200]!r}. Start one that registers it"
