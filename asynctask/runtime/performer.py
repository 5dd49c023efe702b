"""Performing one job: the layers around the worker's function, from the outside in.

1. the job's own context (``current_job()``)
2. the retry layer: whatever the rest raises is decided on here, once, before anything is recorded
3. the middleware chain, the nearest to the job being the one that notes what it came to
4. the timeout
5. the function itself, on this thread or on the event loop
"""

from __future__ import annotations

import contextvars
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from asynctask.bookkeeping import Begin
from asynctask.brokers.base import DEAD, RETRY, Broker, Copy, Held
from asynctask.clock import SECOND, Clock, Ids
from asynctask.errors import AsyncTaskError, JobInterrupted, JobTimeout
from asynctask.job import CurrentJob, set_current_job
from asynctask.ledger.base import dumps
from asynctask.middleware.chain import Chain
from asynctask.middleware.tracker import Ticket, Tracker
from asynctask.runtime.interrupt import Watchdog
from asynctask.runtime.loop import LoopThread
from asynctask.runtime.retry import Decision, Follow, decide, retries_of
from asynctask.worker import Worker

__all__ = ["Assignment", "Hooks", "Performer", "WorkerMissing"]


MAX_STACK = 20_000
"""Characters logged of the stack of a job that raised; the end of it, where the error is."""


class WorkerMissing(AsyncTaskError):
    """A job came for a worker that this process does not know."""

    code = "worker_missing"


@dataclass(slots=True)
class Assignment:
    """A job that this process holds: its copy, what it is, and the ticket if it is tracked."""

    copy: Copy
    payload: Mapping[str, Any]
    job: CurrentJob
    worker: Worker | None
    ticket: Ticket | None
    thread_id: int = 0
    abandoned: bool = False


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the performer tells others: ``done`` when a copy may be acknowledged, ``gone`` when it left this process by
    another way, ``hung`` when its thread is lost, ``death`` when no retry is left, ``error`` on every exception."""

    done: Callable[[Assignment], None]
    gone: Callable[[Assignment], None]
    hung: Callable[[Assignment], None]
    death: Callable[[CurrentJob, BaseException], None]
    error: Callable[[BaseException, Mapping[str, Any]], None]


class Performer:
    """Performs assignments, each on the thread that calls :meth:`perform`."""

    def __init__(
        self,
        *,
        identity: str,
        broker: Broker,
        tracker: Tracker,
        chain: Chain,
        clock: Clock,
        ids: Ids,
        hooks: Hooks,
    ) -> None:
        self._identity = identity
        self._broker = broker
        self._tracker = tracker
        self._chain = chain
        self._clock = clock
        self._ids = ids
        self._hooks = hooks
        self._log = structlog.get_logger("asynctask.job")
        self.watchdog = Watchdog(clock)
        self.loop = LoopThread()
        self.performed = 0
        self.failures = 0

    def perform(self, assignment: Assignment) -> None:
        """Performs it to its end. Raises nothing that a job raised."""
        contextvars.copy_context().run(self._perform, assignment)

    def _perform(self, assignment: Assignment) -> None:
        assignment.thread_id = threading.get_ident()
        set_current_job(assignment.job)
        try:
            self._invoke(assignment)
        except BaseException as error:
            if not assignment.abandoned:
                self.failed(assignment, error)
        else:
            if not assignment.abandoned:
                self._succeeded(assignment)
        self.performed += 1

    def _invoke(self, assignment: Assignment) -> None:
        worker, job = assignment.worker, assignment.job
        if worker is None:
            raise WorkerMissing(f"no worker is registered as {assignment.payload['class']!r} in this process")
        job.result = self._chain.invoke(worker, job, job.queue, lambda: self._call(worker, assignment))

    def _call(self, worker: Worker, assignment: Assignment) -> Any:
        args = assignment.payload["args"]
        if worker.shape is not None and len(args) == 1:
            args = [worker.shape.revive(args[0])]
        if worker.is_async:
            return self.loop.run(lambda: worker.function(*args), worker.timeout)
        if worker.timeout is None:
            return worker.function(*args)
        with self.watchdog.limit(worker.timeout, lambda: self._hung(assignment)):
            try:
                return worker.function(*args)
            except JobTimeout as error:
                error.seconds = error.seconds or worker.timeout
                raise

    # -- what it came to

    def _succeeded(self, assignment: Assignment) -> None:
        ticket = assignment.ticket
        if ticket is None:
            self._hooks.done(assignment)
        else:
            self._tracker.settle(ticket, then=lambda won: self._hooks.done(assignment))

    def failed(self, assignment: Assignment, error: BaseException) -> None:
        """The retry layer: decides what follows and has it recorded."""
        self.failures += 1
        worker, ticket = assignment.worker, assignment.ticket
        if ticket is not None and worker is not None and worker.refuses(error):
            ticket.fail(error)  # raised by a middleware around the one that records
            self._tracker.settle(ticket, then=lambda won: self._hooks.done(assignment))
            return
        retries = ticket.retries if ticket is not None else int(assignment.payload.get("retry_count", -1)) + 1
        limit = retries_of(assignment.payload.get("retry"), tracked=ticket is not None)
        decision = decide(error, assignment.job, worker, retries=retries, limit=limit, noise=self._ids.random())
        self._report(assignment, error, decision)
        if ticket is not None:
            self._settle(assignment, ticket, error, decision)
        else:
            self._keep(assignment, error, decision)
        if decision.follow is Follow.DEAD:
            self._exhausted(assignment, error)

    def _report(self, assignment: Assignment, error: BaseException, decision: Decision) -> None:
        if isinstance(error, JobInterrupted):
            return
        context = {
            "job_id": assignment.job.job_id,
            "worker": assignment.payload.get("class"),
            "follow": decision.follow.value,
        }
        if decision.follow is Follow.RETRY:
            self._log.info("job_raised", error=f"{type(error).__name__}: {error}"[:500], **context)
        else:
            # As text of our own: what a console makes of an exception may cost more than the job, and show its arguments.
            self._log.warning("job_raised", stack=_stack(error), **context)
        self._hooks.error(error, context)

    def _settle(self, assignment: Assignment, ticket: Ticket, error: BaseException, decision: Decision) -> None:
        ticket.raised(error)
        retry_at = self._clock.now() + decision.delay if decision.follow is Follow.RETRY else None
        self._tracker.settle(ticket, retry_at=retry_at, then=lambda won: self._hooks.done(assignment))

    def _keep(self, assignment: Assignment, error: BaseException, decision: Decision) -> None:
        """An untracked job: its retry or its death lives in the broker's own sets."""
        copy, now = assignment.copy, self._clock.now()
        if decision.follow is Follow.AGAIN:
            self._broker.put_back(self._identity, [copy])
            self._hooks.gone(assignment)
            return
        retry = assignment.payload.get("retry")
        if decision.follow is Follow.DISCARD or (decision.follow is Follow.DEAD and (retry is False or retry is None)):
            self._hooks.done(assignment)
            return
        failed = _after_failure(assignment.payload, error, now)
        held = Copy(copy.jid, copy.attempt, copy.queue, dumps(failed), copy.priority, None, 0, copy.handle)
        if decision.follow is Follow.RETRY:
            self._broker.hold(RETRY, [Held(held, now + decision.delay)], process=self._identity)
        elif assignment.payload.get("dead", True) is not False:
            self._broker.hold(DEAD, [Held(held, now)], process=self._identity)
        else:
            self._hooks.done(assignment)
            return
        self._hooks.gone(assignment)

    def _exhausted(self, assignment: Assignment, error: BaseException) -> None:
        worker = assignment.worker
        if worker is not None and worker.retries_exhausted is not None:
            try:
                worker.retries_exhausted(assignment.job, error)
            except Exception:
                self._log.exception("retries_exhausted_failed", worker=worker.name)
        self._hooks.death(assignment.job, error)

    # -- threads that do not come back

    def _hung(self, assignment: Assignment) -> None:
        """The timeout was raised in the thread and it did not come back: its outcome is recorded without it."""
        assignment.abandoned = True
        worker = assignment.worker
        assert worker is not None
        self.failed(assignment, JobTimeout(worker.timeout or 0.0))
        self._hooks.hung(assignment)

    def interrupted(self, assignment: Assignment) -> None:
        """The process must end now: the job waits again, whatever its thread still does."""
        assignment.abandoned = True
        self.failed(assignment, JobInterrupted("the runtime is shutting down"))

    def broke(self, assignment: Assignment, error: BaseException) -> None:
        """The layers around a job failed themselves: a tracked job has an outcome all the same, an untracked one stays in
        this process's list until the process ends."""
        ticket = assignment.ticket
        if ticket is None or assignment.abandoned:
            return
        if ticket.status is None:
            late = isinstance(error, JobInterrupted)  # it came between two of the runtime's own steps
            ticket.raised(error if late else RuntimeError(f"the runtime failed around the job: {type(error).__name__}"))
        self._tracker.settle(ticket, then=lambda won: self._hooks.done(assignment))

    def release(self, assignment: Assignment) -> None:
        """A job that was fetched and will not be run by this process."""
        ticket = assignment.ticket
        if ticket is None:
            self._broker.put_back(self._identity, [assignment.copy])
            self._hooks.gone(assignment)
            return
        if ticket.verdict is Begin.DROP:
            self._hooks.done(assignment)
            return
        self._tracker.release(ticket, then=lambda won: self._hooks.done(assignment))


def _stack(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-MAX_STACK:].rstrip()


def _after_failure(payload: Mapping[str, Any], error: BaseException, now: int) -> dict[str, Any]:
    """The members that Sidekiq's retry adds, times as float seconds."""
    job = dict(payload)
    if "retry_count" in job:
        job["retry_count"] = int(job["retry_count"]) + 1
        job["retried_at"] = now / SECOND
    else:
        job["retry_count"] = 0
        job["failed_at"] = now / SECOND
    job["error_class"] = type(error).__name__
    job["error_message"] = str(error)[:10_000]
    return job
