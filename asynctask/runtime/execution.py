"""Performing one job: the layers around the worker's function, from the outside in.

1. the job's own context (``current_job()``)
2. the retry layer: whatever the rest raises is decided on here, once, before anything is recorded
3. the middleware chain, the nearest to the job being the one that notes what it came to
4. the timeout
5. the function itself, on this thread or on the event loop
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
import traceback
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from asynctask.brokers.base import DEAD, RETRY, Broker, Copy, Held
from asynctask.clock import Clock, Ids
from asynctask.core.transitions import Begin
from asynctask.dispatch.outbox import arguments_of, worker_name
from asynctask.errors import AsyncTaskError, JobInterrupted, JobTimeout, Unavailable, carries
from asynctask.job import CurrentJob, interrupted, set_current_job
from asynctask.logs import get_logger
from asynctask.messages import clean
from asynctask.middleware.chain import Chain
from asynctask.middleware.tracker import AttemptLost, TaskEventMiddleware, Ticket, Tracker
from asynctask.runtime import timeouts
from asynctask.runtime.interpreter import QUICK_S
from asynctask.runtime.retry import (
    Decision,
    Follow,
    after_failure,
    decide,
    decide_foreign,
    decide_untracked,
    limit_of,
    pause_s,
    retries_of,
    text_of,
)
from asynctask.runtime.timeouts import Watch, Watchdog
from asynctask.wire.payload import parse
from asynctask.worker import Worker

if TYPE_CHECKING:
    from asynctask.runtime.lanes import Lane

__all__ = ["Assignment", "Hooks", "LoopThread", "Performer", "WorkerMissing"]

MAX_STACK = 20_000
"""Characters logged of the stack of a job that raised; the end of it, where the error is."""


class WorkerMissing(AsyncTaskError):
    """A job that somebody put into a queue by hand came for a worker that this process does not know."""

    code = "worker_missing"


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the performer tells others: ``done`` when a copy may be acknowledged, ``gone`` when it left this process by
    another way, ``hung`` when its thread is lost, ``death`` when no retry is left, ``error`` on every exception, ``ended``
    once when a job ends, however, with whether it raised, ``follow`` just before an outcome is recorded: its answer is the
    lent job that begins in the place of this one."""

    done: Callable[[Assignment], None]
    gone: Callable[[Assignment], None]
    hung: Callable[[Assignment], None]
    death: Callable[[CurrentJob, BaseException], None]
    error: Callable[[BaseException, Mapping[str, Any]], None]
    ended: Callable[[Assignment, bool], None]
    follow: Callable[[Assignment], Assignment | None]


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
        self._untracked_chain = _without_ours(chain)
        self._clock = clock
        self._ids = ids
        self._hooks = hooks
        self._log = get_logger("asynctask.job")
        self.watchdog = Watchdog(clock)
        self.loop = LoopThread()
        self._pause = threading.Event()
        self.performed = 0
        self.quick = 0  # of these, those that took less than QUICK_S
        self.failures = 0

    def perform(self, assignment: Assignment) -> None:
        """Performs it to its end. Raises nothing that a job raised."""
        contextvars.copy_context().run(self._perform, assignment)

    def _perform(self, assignment: Assignment) -> None:
        assignment.began = self._clock.monotonic()
        assignment.thread_id = threading.get_ident()
        set_current_job(assignment.job)
        try:
            self._invoke(assignment)
        except AttemptLost:
            if self._is_its(assignment):
                assert assignment.ticket is not None
                self._tracker.forget(assignment.ticket)
                self._hooks.done(assignment)
        except BaseException as error:
            if self._is_its(assignment):
                self._hooks.ended(assignment, True)
                self.failed(assignment, error)
        else:
            if self._is_its(assignment):
                self._hooks.ended(assignment, False)
                self._succeeded(assignment)
        self.performed += 1
        if self._clock.monotonic() - assignment.began < QUICK_S:
            self.quick += 1

    def _is_its(self, assignment: Assignment) -> bool:
        """Whether the thread that performs it says what it came to; not if it was given up meanwhile."""
        if not assignment.abandoned and not assignment.claim():
            assignment.abandoned = True
        return not assignment.abandoned

    def _invoke(self, assignment: Assignment) -> None:
        worker, job = assignment.worker, assignment.job
        if worker is None:
            raise WorkerMissing(f"no worker is registered as {assignment.name[:200]!r} in this process")
        chain = self._chain if assignment.ticket is not None else self._untracked_chain
        if chain:
            job.result = chain.invoke(worker, job, job.queue, lambda: self._call(worker, assignment))
        else:
            job.result = self._call(worker, assignment)

    def _call(self, worker: Worker, assignment: Assignment) -> Any:
        assignment.waive()  # a middleware may call more than once
        try:
            return self._function(worker, assignment)
        finally:
            # Before a middleware notes on the ticket what came of it: whoever gave the thread up has written there.
            if not self._is_its(assignment):
                raise AttemptLost(f"the thread of {assignment.job.job_id} was given up")

    def _function(self, worker: Worker, assignment: Assignment) -> Any:
        if assignment.ticket is not None and assignment.ticket.lost:
            raise AttemptLost(f"attempt {assignment.job.attempt} of {assignment.job.job_id} is not the one that counts")
        args, keywords = arguments_of(assignment.payload, worker.name)
        if worker.shape is not None and len(args) == 1 and not keywords:
            args = [worker.shape.revive(args[0])]
        function = partial(worker.function, **keywords) if keywords else worker.function
        if worker.is_async:
            return self.loop.run(lambda: function(*args), worker.timeout)
        watch = Watch(assignment.thread_id, worker.timeout)
        if worker.timeout is not None:
            watch.on_hung = lambda: self._hung(assignment)
        assignment.watch = watch
        try:
            return self.watchdog.run(watch, function, args)
        except JobTimeout as error:
            error.seconds = error.seconds or worker.timeout or 0.0
            raise
        finally:
            if watch.lost:
                assignment.abandoned = True
            else:
                assignment.watch = None

    # -- what it came to

    def _succeeded(self, assignment: Assignment) -> None:
        if assignment.ticket is None:
            self._hooks.done(assignment)
        else:
            self._settle(assignment, assignment.ticket)

    def _settle(self, assignment: Assignment, ticket: Ticket, retry_at: int | None = None) -> None:
        """Has recorded what stands on the ticket; what follows in its place under its Task's ``parallel``, with it."""
        if ticket.settled:
            return
        follower = self._hooks.follow(assignment)
        self._tracker.settle(
            ticket, retry_at=retry_at, then=lambda won: self._hooks.done(assignment),
            follower=follower.ticket if follower is not None else None,
        )  # fmt: skip

    def failed(self, assignment: Assignment, error: BaseException) -> None:
        """The retry layer: decides what follows and has it recorded."""
        self.failures += 1
        worker, ticket = assignment.worker, assignment.ticket
        if ticket is None:
            self._keep(assignment, error)
            return
        if worker is not None and worker.refuses(error) and not interrupted(assignment.job, error):
            ticket.fail(error)  # raised by a middleware around the one that records
            self._settle(assignment, ticket)
            return
        noise = self._ids.random()
        if assignment.is_foreign:
            now = self._tracker.now()
            decision = decide_foreign(error, assignment.payload, assignment.job, worker, now=now, noise=noise)
        else:
            limit = retries_of(assignment.payload.get("retry"))
            decision = decide(error, assignment.job, worker, retries=ticket.retries, limit=limit, noise=noise)
        self._report(assignment, error, decision)
        ticket.raised(JobInterrupted() if decision.follow is Follow.AGAIN else error)
        self._settle(assignment, ticket, self._tracker.now() + decision.delay if decision.follow is Follow.RETRY else None)
        if decision.follow is Follow.DEAD:
            self._exhausted(assignment, error)
            self._hooks.death(assignment.job, error)

    def _report(self, assignment: Assignment, error: BaseException, decision: Decision) -> None:
        if decision.follow is Follow.AGAIN:
            return
        context = {
            "job_id": assignment.job.job_id,
            "worker": assignment.name,
            "follow": decision.follow.value,
        }
        if decision.follow is Follow.RETRY:
            self._log.info("job_raised", error=f"{clean(type(error).__name__)}: {text_of(error)}"[:500], **context)
        else:
            # As text of our own: what a console makes of an exception may cost more than the job, and show its arguments.
            self._log.warning("job_raised", stack=_stack(error), **context)
        self._hooks.error(error, context)

    def _keep(self, assignment: Assignment, error: BaseException) -> None:
        """An untracked job that raised: its retry or its death lives in the broker's own sets."""
        copy, now, worker = assignment.copy, self._tracker.now(), assignment.worker
        job = parse(copy.payload)
        decision = decide_untracked(error, job, assignment.job, worker, now=now, noise=self._ids.random())
        self._report(assignment, error, decision)
        if decision.follow is Follow.AGAIN:
            self._patiently(assignment, lambda: self._broker.put_back(self._identity, [copy]))
        elif decision.follow is Follow.RETRY:
            held = Held(after_failure(copy, error, now), now + decision.delay)
            self._patiently(assignment, lambda: self._broker.hold(RETRY, [held], process=self._identity))
        elif self._is_kept(assignment, job, error, decision):
            dead = after_failure(copy, error, now)
            self._patiently(assignment, lambda: self._bury(dead, now))
        else:
            self._hooks.done(assignment)
        if decision.follow in (Follow.DEAD, Follow.DISCARD):
            self._hooks.death(assignment.job, error)

    def _is_kept(self, assignment: Assignment, job: Mapping[str, Any], error: BaseException, decision: Decision) -> bool:
        """Whether a job that is given up goes to the dead. Its worker is asked; for what never retries nobody is."""
        if decision.follow is Follow.DISCARD or limit_of(job, assignment.worker) is None:
            return False
        return self._exhausted(assignment, error) != "discard" and job.get("dead") is not False

    def _patiently(self, assignment: Assignment, move: Callable[[], None]) -> None:
        """Out of this process's list by ``move``; while the broker is away it is tried again: the job is not lost, but
        nobody else would look for it as long as this process lives."""
        tries = 0
        while not assignment.abandoned or tries == 0:
            try:
                move()
            except Unavailable as error:
                tries += 1
                self._log.warning("outcome_put_off", job_id=assignment.copy.jid, error=str(error), tries=tries)
                if assignment.abandoned:  # whoever gave the thread up goes on with the stop
                    raise
                self._pause.wait(pause_s(tries))
            else:
                self._hooks.gone(assignment)
                return

    def _bury(self, copy: Copy, now: int) -> None:
        self._broker.hold(DEAD, [Held(copy, now)], process=self._identity)

    def _exhausted(self, assignment: Assignment, error: BaseException) -> Any:
        """Tells the worker that no retry is left; returns its answer."""
        worker = assignment.worker
        if worker is not None and worker.retries_exhausted is not None:
            try:
                return worker.retries_exhausted(assignment.job, error)
            except Exception:
                self._log.exception("retries_exhausted_failed", worker=worker.name)
        return None

    # -- threads that do not come back

    def _hung(self, assignment: Assignment) -> None:
        """The timeout was raised in the thread and it did not come back: its outcome is recorded without it."""
        worker = assignment.worker
        assert worker is not None
        if assignment.claim():  # else the process ends, and this has been said
            assignment.abandoned = True
            self._without_its_thread(assignment, JobTimeout(worker.timeout or 0.0))
        self._hooks.hung(assignment)

    def interrupt(self, assignment: Assignment) -> None:
        """Raises :class:`JobInterrupted` in its thread, if that is inside the worker's function."""
        watch = assignment.watch
        if watch is not None:
            self.watchdog.interrupt(watch)

    def interrupted(self, assignment: Assignment) -> None:
        """The process must end now: the job waits again, whatever its thread still does. Not if its function has returned:
        what it came to stands, and where that is not recorded before the end, recovery finds the job."""
        if not assignment.claim():
            return
        assignment.abandoned = True
        self._without_its_thread(assignment, JobInterrupted("the runtime is shutting down"))

    def _without_its_thread(self, assignment: Assignment, error: BaseException) -> None:
        self._hooks.ended(assignment, True)
        try:
            self.failed(assignment, error)
        except Exception as failure:
            self._log.exception("outcome_put_off", job_id=assignment.copy.jid)
            self._broke(assignment, failure)

    def broke(self, assignment: Assignment, error: BaseException) -> None:
        """The layers around a job failed themselves: it has an outcome all the same."""
        if self._is_its(assignment):
            self._broke(assignment, error)

    def _broke(self, assignment: Assignment, error: BaseException) -> None:
        ticket = assignment.ticket
        if ticket is None:
            self._broke_untracked(assignment, error)
            return
        if ticket.status is None:
            late = isinstance(error, JobInterrupted)  # it came between two of the runtime's own steps
            ticket.raised(error if late else RuntimeError(f"the runtime failed around the job: {type(error).__name__}"))
        self._settle(assignment, ticket)

    def _broke_untracked(self, assignment: Assignment, error: BaseException) -> None:
        """Into the dead set as it came, where it is seen; while the broker is away it stays in this process's list."""
        if isinstance(error, Unavailable):
            return
        try:
            self._bury(assignment.copy, self._tracker.now())
            self._hooks.gone(assignment)
        except Exception:
            self._log.exception("job_not_buried", job_id=assignment.copy.jid)

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


def _without_ours(chain: Chain) -> Chain:
    """The chain of a job that nobody tracks: ours would do nothing for it."""
    rest = Chain()
    for middleware in chain:
        if not isinstance(middleware, TaskEventMiddleware):
            rest.add(middleware)
    return rest


def _stack(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error))[-MAX_STACK:].rstrip()
    return text.encode("utf-8", "backslashreplace").decode()


# -- One job in the hands of a process, from its fetch to its acknowledgement, and who says what it came to.


@dataclass(slots=True)
class Assignment:
    """A job that this process holds: its copy, what it is, and the ticket if it is tracked.

    ``abandoned``: its thread is given up, and what that thread still comes to counts no more. ``is_lent``: it never was in
    the broker, see :mod:`asynctask.runtime.lanes`; ``follower`` is the job that has taken its place.
    """

    copy: Copy
    payload: Mapping[str, Any]
    job: CurrentJob
    worker: Worker | None
    ticket: Ticket | None
    thread_id: int = 0
    began: float = 0.0  # on the monotonic clock
    abandoned: bool = False
    watch: Watch | None = None
    asked: float = 0.0  # when Begin was asked what its ticket says, on the monotonic clock
    is_lent: bool = False
    lane: Lane | None = None
    follower: Assignment | None = None
    _claims: dict[str, threading.Thread] = field(default_factory=dict)

    def claim(self) -> bool:
        """Whether this thread says what the job came to. One thread does: the first to claim it, and it may ask again.

        Whoever claims does so before it writes on the ticket. One step that needs no lock.
        """
        me = threading.current_thread()
        return self._claims.setdefault("by", me) is me

    def waive(self) -> None:
        """The thread that performs it goes (back) into the function: until it returns, others may give that thread up."""
        if self._claims.get("by") is threading.current_thread():
            del self._claims["by"]

    @property
    def name(self) -> str:
        """What its worker is called."""
        return worker_name(self.payload) if self.worker is None else self.worker.name

    @property
    def begins(self) -> bool:
        """Whether Begin said that it may run; of an untracked one nobody says otherwise."""
        return self.ticket is None or self.ticket.verdict is Begin.RUN

    @property
    def is_suspect(self) -> bool:
        """Whether a process died that held it: it may be the one that kills."""
        return self.ticket is not None and self.ticket.watched

    @property
    def is_foreign(self) -> bool:
        """Whether another program pushed it: the copies of our own jobs say in their payload which attempt they are for."""
        copy = self.copy
        return copy.attempt == 0 or (copy.task_id is None and self.payload.get("attempt") != copy.attempt)

    @property
    def is_tracked(self) -> bool:
        """Whether an Event is kept of it: it has one, it says so itself, or its worker does."""
        if self.copy.attempt > 0:
            return True
        opted = self.payload.get("use_task_event")
        if isinstance(opted, bool):
            return opted
        return self.worker is not None and self.worker.use_task_event


# -- ``async def`` workers: one event loop per process, in a thread of its own.

_ANSWER_S = 0.5
"""A loop that takes a call no sooner than this counts as blocked."""


class LoopThread:
    """The event loop of a process, started when the first coroutine comes.

    A job's middleware and bookkeeping stay in the processor thread, which waits here for the coroutine; so ``-c`` bounds
    coroutines as it bounds threads.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._running: set[asyncio.Task[Any]] = set()
        self._interrupted: set[asyncio.Task[Any]] = set()
        self._left: list[tuple[asyncio.AbstractEventLoop, threading.Thread]] = []
        self._log = get_logger("asynctask.loop")

    def run(self, make: Callable[[], Coroutine[Any, Any, Any]], timeout: float | None) -> Any:
        """Runs a coroutine in the caller's context and waits for it. Raises what it raises.

        :class:`JobTimeout` where it is over its time, even if it swallows its cancellation or blocks the loop;
        :class:`JobInterrupted` where :meth:`interrupt` ended it.
        """
        loop = self._started()
        context = contextvars.copy_context()
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        guarded = self._guarded
        loop.call_soon_threadsafe(lambda: loop.create_task(guarded(make, timeout, answer), context=context))
        if timeout is None:
            return answer.result()
        if not concurrent.futures.wait([answer], min(timeout + timeouts.GRACE_S, threading.TIMEOUT_MAX)).done:
            self._replace_if_blocked(loop)
            if not answer.done():
                raise JobTimeout(timeout)
        return answer.result()

    async def _guarded(
        self, make: Callable[[], Coroutine[Any, Any, Any]], timeout: float | None, answer: concurrent.futures.Future[Any]
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            async with asyncio.timeout(timeout) as limit:
                result = await make()
        except BaseException as error:
            if isinstance(error, TimeoutError) and limit.expired():
                answer.set_exception(JobTimeout(timeout or 0.0))
            elif task in self._interrupted and carries(error, asyncio.CancelledError):
                answer.set_exception(JobInterrupted("the runtime is shutting down"))
            else:
                # Cancelled by code of its own too: run again without limit it would never end.
                answer.set_exception(error)
        else:
            answer.set_result(result)
        finally:
            self._running.discard(task)
            self._interrupted.discard(task)

    def _replace_if_blocked(self, loop: asyncio.AbstractEventLoop) -> None:
        """A loop that does not answer is left to whatever holds it; coroutines to come get another."""
        answers = threading.Event()
        loop.call_soon_threadsafe(answers.set)
        if answers.wait(_ANSWER_S):
            return
        with self._lock:
            if self._loop is loop and self._thread is not None:
                self._left.append((loop, self._thread))
                self._log.error("event_loop_blocked", hint="call what blocks with asyncio.to_thread, or in a plain worker")
                self._loop = self._thread = None

    def interrupt(self) -> None:
        """Cancels every running coroutine."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        for task in list(self._running):
            self._interrupted.add(task)
            task.cancel()

    def stop(self) -> None:
        """Ends the loop."""
        with self._lock:
            loops, self._left = self._left, []
            if self._loop is not None and self._thread is not None:
                loops.append((self._loop, self._thread))
            for loop, _ in loops:
                loop.call_soon_threadsafe(loop.stop)
            for loop, thread in loops:
                thread.join(5)
                if not thread.is_alive():
                    loop.close()
            self._loop = self._thread = None

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="event-loop", daemon=True)
                self._thread.start()
            return self._loop
