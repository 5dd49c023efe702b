"""Performing one job: execute it, decide what follows, settle it.

The layers around the worker's function, from the outside in: the context of the job (``current_job()``), the middleware
chain with the recording middleware innermost, the timeout, and the call on this thread or on the event loop.

The retry policy (:func:`decide`) is pure and at the end of the module. The :class:`Hook` applies it to untracked and
foreign jobs.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from asynctask.brokers.base import Copy
from asynctask.clock import Clock, Ids, micros
from asynctask.core.transitions import Begin
from asynctask.errors import AsyncTaskError, FinalError, JobInterrupted, JobTimeout, Unavailable
from asynctask.iterable import Slice
from asynctask.job import CurrentJob, interrupted, performed, refuse_work, run, set_current_job
from asynctask.logs import get_logger
from asynctask.messages import clean, template_of, text_of
from asynctask.middleware.chain import Chain
from asynctask.middleware.tracker import (
    ATTEMPT,
    NO_TICKET,
    Attempt,
    AttemptLost,
    TaskEventMiddleware,
    Ticket,
    Tracker,
    failure_of,
    refusal_of,
    result_text,
)
from asynctask.runtime.loans import OwnLoan
from asynctask.runtime.timeouts import EventLoop, Watch, Watchdog, is_awaited
from asynctask.sidekiq.activejob import worker_name
from asynctask.sidekiq.copies import arguments_of, job_of
from asynctask.worker import TRACKED_RETRIES, RetryIn, Worker

if TYPE_CHECKING:
    from asynctask.arrivals import ArrivalTracker
    from asynctask.runtime.pool import Permits, Pool, Rank

_NOTHING: Mapping[str, Any] = {}

MAX_UNRECORDED: Final = 5_000
"""Number of unrecorded outcomes above which a process takes no more jobs."""


class WorkerMissing(AsyncTaskError):
    """A job that a person pushed into a queue names a worker that this process does not know."""

    code = "worker_missing"


class Settler(Enum):
    """Who settles a job: its own thread, once the function has returned, or another thread that gave its own thread up."""

    NOBODY = "nobody"  # the function runs, or has not begun
    ITS_THREAD = "its thread"
    ANOTHER = "another"


@dataclass(slots=True, kw_only=True, eq=False)
class Execution(Attempt):
    """One job in this process, from its borrow or fetch to its record.

    ``ticket`` is :data:`~asynctask.middleware.tracker.NO_TICKET` for a job that no Event records. ``thread`` performs the
    job; ``watch`` guards it inside the function. ``is_recalled``: the job must not begin. ``rank``: how urgent it is;
    ``permits``: those of its Task, while the job uses one; ``is_over``: the job needs no permit any more.

    The first thread that claims the job settles it, and sets ``settler`` under ``lock``; only the job's own thread may
    withdraw its claim. A thread that finds the job claimed returns without taking the lock, which the claimant may hold:
    so a stop never waits for a thread that settles.
    """

    job: CurrentJob
    copy: Copy
    payload: Mapping[str, Any]
    worker: Worker | None
    thread: threading.Thread | None = None
    watch: Watch | None = None
    settler: Settler = Settler.NOBODY
    is_recalled: bool = False
    rank: Rank = (0, 0)
    permits: Permits | None = None
    is_over: bool = False

    # -- who settles it

    def claim(self) -> bool:
        """Claims the job for its own thread, which calls this before it sets a result; whether it has it. Idempotent."""
        if self.watch is not None and self.watch.lost:
            return False
        if self.settler is Settler.NOBODY:
            with self.lock:
                if self.settler is Settler.NOBODY:
                    self.settler = Settler.ITS_THREAD
        return self.settler is Settler.ITS_THREAD

    def waive(self) -> None:
        """Withdraws the claim of the job's own thread, which enters the function: others may give the thread up now."""
        if self.settler is Settler.ITS_THREAD:
            with self.lock:
                self.settler = Settler.NOBODY

    def give_up_thread(self) -> bool:
        """Claims the job for another thread, which calls this once; whether it has the claim."""
        if self.settler is Settler.NOBODY:
            with self.lock:
                if self.settler is Settler.NOBODY:
                    self.settler = Settler.ANOTHER
                    return True
        return False

    @property
    def abandoned(self) -> bool:
        """Whether its thread was given up; results of that thread do not count any more."""
        return self.settler is Settler.ANOTHER or (self.watch is not None and self.watch.lost)

    # -- what it is

    @property
    def name(self) -> str:
        """The name of its worker."""
        return worker_name(self.payload) if self.worker is None else self.worker.name

    @property
    def begins(self) -> bool:
        """Whether Begin permits it; an untracked job may always run."""
        return self.ticket.verdict is Begin.RUN

    @property
    def has_event(self) -> bool:
        """Whether an Event records it."""
        return self.ticket is not NO_TICKET

    @property
    def is_borrowed(self) -> bool:
        """Whether the ledger lent it, and no broker has it."""
        return self.ticket.loan is not None

    @property
    def loan(self) -> OwnLoan | None:
        """The loan whose range contains it; None if it was claimed alone."""
        return self.ticket.loan if isinstance(self.ticket.loan, OwnLoan) else None

    @property
    def seq(self) -> int:
        """Its number in its Task; -1 without a Task."""
        return -1 if self.ticket.record.seq is None else self.ticket.record.seq

    @property
    def asked(self) -> float:
        """When the query that read it from the ledger was sent, on the monotonic clock."""
        return self.ticket.asked

    @property
    def is_suspect(self) -> bool:
        """Whether a process that held it died: the job may be the cause."""
        return self.ticket.is_suspect

    @property
    def task_id(self) -> int | None:
        """The id of its Task."""
        return self.copy.task_id

    @property
    def is_untracked(self) -> bool:
        """Whether it has no Event: it came through a broker without one, or its row in the ledger has no items."""
        return not self.has_event or not self.ticket.items

    @property
    def is_foreign(self) -> bool:
        """Whether another program pushed it: copies of our own jobs name their attempt in the payload."""
        copy = self.copy
        return copy.attempt == 0 or (copy.task_id is None and self.payload.get("attempt") != copy.attempt)

    @property
    def is_unknown(self) -> bool:
        """Whether this process does not know the worker of a job of the ledger. False for a tracked job that a person
        pushed into a queue: nobody has checked its worker's name, so the job ends in error."""
        return self.worker is None and self.copy.attempt > 0

    @property
    def is_tracked(self) -> bool:
        """Whether an Event records it: it has one, its payload asks for one, or its worker does."""
        if self.copy.attempt > 0:
            return True
        opted = self.payload.get("use_task_event")
        if isinstance(opted, bool):
            return opted
        return self.worker is not None and self.worker.use_task_event

    def conceal(self, args: Any) -> Any:
        """The job's arguments for its Event, with the secrets of its item concealed."""
        shape = None if self.worker is None else self.worker.shape
        if shape is None or not isinstance(args, list) or not args:
            return args
        return [shape.conceal(args[0]), *args[1:]]


# -- from a copy, lent by the ledger or fetched from a broker, to an execution


class Intake:
    """Makes executions for the ``workers`` of this process; ``quiet`` is set when the process stops."""

    def __init__(self, workers: Mapping[str, Worker], quiet: threading.Event) -> None:
        self._workers = workers
        self._quiet = quiet

    def execution(self, copy: Copy) -> Execution:
        """The job of a copy, without a ticket. Raises ValueError if the copy's text is not a job."""
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
    """Attaches a ticket to a job."""
    execution.ticket = ticket
    execution.job.task_id = ticket.task_id
    execution.job.attempt = ticket.attempt
    execution.bind(execution.job)


def put_off(tracker: Tracker, deferred: Sequence[Execution], seconds: float = 0.0) -> None:
    """Defers tracked jobs whose workers this process does not know: they wait in the ledger for ``seconds``, without using
    a retry, for a process that knows their workers (as during a deploy). Raises :class:`Unavailable`."""
    names = sorted({job.name[:100] for job in deferred})
    get_logger("asynctask.missing").warning("worker_missing", workers=names[:10], count=len(deferred))
    until = tracker.now() + micros(seconds)
    tracker.put_off([(job, _why_put_off(job)) for job in deferred if job.has_event], until)


def _why_put_off(job: Execution) -> str:
    return f"Waiting for a worker: no process that took it knows {job.name[:200]!r}. Start one that registers it"


# -- the interface to a broker


class Hook(Protocol):
    """All that the runtime knows of a broker, and of the other programs that push jobs, perform jobs, or show processes
    there. :class:`asynctask.sidekiq.sharing.Sharing` is the one implementation. Without a broker nothing is fetched.

    ``quiet``: the process begins no more jobs. ``ended``: a job has ended; ``failed``: it raised.
    """

    def start(self) -> None: ...

    def quiet(self) -> None: ...

    def stop(self) -> None: ...

    def attach(
        self,
        pool: Pool,
        tracker: ArrivalTracker,
        intake: Intake,
        *,
        quiet: threading.Event,
        order: Callable[[], Sequence[str]],
        unrecorded: Callable[[], int],
        on_claimed: Callable[[int], None],
    ) -> None:
        """Passes what the hook needs to fetch jobs for ``pool``; called before :meth:`start`. ``quiet`` is set when no more
        jobs begin; ``order`` returns the queues in the order of the next fetch; ``unrecorded`` returns how many outcomes
        wait for the ledger; ``on_claimed`` receives the number of fetched jobs."""
        ...

    def done(self, copy: Copy) -> None:
        """Acknowledges a copy; the outcome of its job is recorded."""
        ...

    def put_back(self, copies: Sequence[Copy]) -> None:
        """Returns copies to their queues. If the broker is unavailable, raises :class:`Unavailable`, and returns them once
        it is available again."""
        ...

    def wake(self) -> None:
        """Wakes the fetcher: a thread is idle, or the set of queues to fetch from has changed."""
        ...

    def is_paused(self, queue: str) -> bool:
        """Whether the queue is paused at the broker."""
        ...

    def ask_again(self, execution: Execution) -> bool:
        """Repeats Begin for a fetched tracked job that waited long; whether it may begin. Raises :class:`Unavailable`."""
        ...

    def holds_any(self) -> bool:
        """Whether a broker still has copies for this process. Raises :class:`Unavailable`."""
        ...

    def decide(self, execution: Execution, error: BaseException, noise: float) -> Decision:
        """Decides what follows ``error`` in an untracked or foreign job; ``noise`` is a number in [0, 1)."""
        ...

    def settle(
        self, execution: Execution, error: BaseException | None, decision: Decision, exhausted: Callable[[], object]
    ) -> None:
        """Settles a job without an Event that did not return: moves its copy to the retry or dead set, or acknowledges it.
        ``exhausted`` calls the worker's ``retries_exhausted``, and returns its result. Retries until the broker answers;
        but raises :class:`Unavailable` for a job whose thread was given up."""
        ...

    def is_kept(self, execution: Execution, decision: Decision, exhausted: Callable[[], object]) -> bool:
        """Whether an untracked job that has no retry left is kept among the dead. ``exhausted`` as in :meth:`settle`."""
        ...

    def backtrace(self, execution: Execution, error: BaseException) -> Sequence[str]:
        """The lines of the traceback that an untracked job asks to keep, the innermost first."""
        ...

    def bury(self, copy: Copy, now: int, reason: str | None = None) -> None:
        """Moves a copy from this process's list to the dead set, with the reason. Raises :class:`Unavailable`."""
        ...

    def ended(self, execution: Execution, failed: bool) -> None: ...


class Performer:
    """Performs jobs, each on the thread that calls :meth:`perform`.

    Arguments: ``chain`` is the application's server middleware; ``fire`` calls the application's hooks: ``death`` when no
    retry is left, ``error`` for every exception; ``on_hung`` is called for a job whose thread does not return.
    """

    def __init__(
        self,
        tracker: Tracker,
        chain: Chain,
        clock: Clock,
        ids: Ids,
        hook: Hook,
        fire: Callable[..., None],
        result_limit: int,
        on_hung: Callable[[Execution], None],
    ) -> None:
        self._tracker = tracker
        self._chain = chain
        self._recording = TaskEventMiddleware(tracker, result_limit)
        self._clock = clock
        self._ids = ids
        self._on_hung = on_hung
        self._hook = hook
        self._fire = fire
        self._result_limit = result_limit
        self._log = get_logger("asynctask.job")
        self.watchdog = Watchdog(clock)
        self.loop = EventLoop()
        self.performed = 0

    def perform(self, execution: Execution) -> None:
        """Performs a job to its end. Raises nothing that the job raised."""
        # The error must not be in a variable of a frame of its traceback: that reference cycle would keep the job's objects
        # alive until the garbage collector runs.
        contextvars.copy_context().run(lambda: self._end(execution, self.execute(execution)))

    def _end(self, execution: Execution, error: BaseException | None) -> None:
        if execution.claim():
            self.settle(execution, self.decide(execution, error), error)
        self.performed += 1

    # -- execute: context > middleware > timeout > function

    def execute(self, execution: Execution) -> BaseException | None:
        """Runs the job, and puts its result into ``job.result``. Returns the exception that it raised."""
        execution.began = self._clock.monotonic()
        set_current_job(execution.job)
        try:
            self._run_chain(execution)
        except BaseException as error:
            return error
        return None

    def _run_chain(self, execution: Execution) -> None:
        worker, job = execution.worker, execution.job
        if worker is None:
            raise WorkerMissing(f"no worker is registered as {execution.name[:200]!r} in this process")
        ticket = execution.ticket
        if ticket.items > 1 or (worker.batch and ticket.task_id is not None):
            self._run_slice(worker, execution)
            return
        if execution.has_event and execution.is_untracked:
            self._tracker.start(execution)  # as for a slice: no middleware does so
        call: Callable[[], Any] = partial(
            self._owned, execution, lambda: self._invoke(worker, execution, *arguments_of(execution.payload, worker.name))
        )
        if not execution.is_untracked:
            call = partial(self._recording, worker, job, job.queue, call)
        job.result = performed(self._chain.invoke, worker, job, job.queue, call)

    def _owned(self, execution: Execution, call: Callable[[], Any]) -> Any:
        """Calls ``call`` if this attempt counts and this thread has the job. A middleware may do so more than once."""
        _check_counts(execution)
        execution.waive()
        try:
            return call()
        finally:
            # Claim before a middleware sets a result: a thread that gave this one up has already set it.
            if not execution.claim():
                raise AttemptLost(f"the thread of {execution.job.job_id} was given up")

    def _invoke(
        self, worker: Worker, execution: Execution, args: Sequence[Any], keywords: Mapping[str, Any] = _NOTHING
    ) -> Any:
        """Calls the function under its timeout: a coroutine function on the event loop, another on this thread. If the
        latter returns an awaitable, the event loop awaits it for the rest of the timeout."""
        if worker.shape is not None and args:
            args = [worker.shape.revive(args[0]), *args[1:]]
        function = partial(worker.function, **keywords) if keywords else worker.function
        try:
            if worker.is_async:
                return refuse_work(run(self.loop.run, lambda: function(*args), worker.timeout))
            began = self._clock.monotonic()
            result = self._call_here(worker, execution, function, args)
            if result is None or not is_awaited(result):
                return refuse_work(result)
            left = None if worker.timeout is None else max(0.0, worker.timeout - (self._clock.monotonic() - began))
            return refuse_work(run(self.loop.run, lambda: result, left))
        except JobTimeout as error:
            error.seconds = worker.timeout or error.seconds
            raise

    def _call_here(self, worker: Worker, execution: Execution, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Calls the function on this thread, where it may be interrupted."""
        execution.watch = watch = Watch(threading.get_ident(), worker.timeout, lambda: self._hung(execution))
        try:
            return self.watchdog.run(watch, run, (function, *args))
        finally:
            if not watch.lost:  # a lost one stays, because it marks the thread as abandoned
                execution.watch = None

    # -- slices: the function is called for each item, or once for all that are left

    def _run_slice(self, worker: Worker, execution: Execution) -> None:
        """Performs the remaining items. Their outcomes are in ``slice``; raises only the exceptions that end the
        attempt."""
        given, ticket = execution.payload["args"][0], execution.ticket
        if ticket.items == 1:
            given = {"rows": [[ticket.record.first_row or 1, 1]], "items": [given]}
        self._tracker.start(execution)
        _check_counts(execution)
        part = execution.slice = Slice(given, ticket.saved.marks, ticket.saved.results, self._result_limit)
        left = part.left
        for indexes in [left] if worker.batch else [[index] for index in left]:
            if execution.job.should_stop():
                raise JobInterrupted("the job stopped between two items")
            self._run_items(worker, execution, part, indexes)
            if ticket.watched and not worker.batch:
                self._tracker.save(execution)

    def _run_items(self, worker: Worker, execution: Execution, part: Slice, indexes: list[int]) -> None:
        job = execution.job
        part.hand = indexes
        call = partial(self._call_batch if worker.batch else self._call_item, worker, execution, part, indexes)
        try:
            result = performed(self._chain.invoke, worker, job, job.queue, call)
            results = [
                result_text(each, part.limit)
                for each in _results(worker, result, len(indexes), any(map(part.is_left, indexes)))
            ]
        except AttemptLost:
            raise
        except BaseException as error:
            if not execution.claim():
                raise AttemptLost(f"the thread of {job.job_id} was given up") from error
            if interrupted(job, error):
                raise
            self._items_raised(execution, part, error)
        else:
            for index, (text, why_not) in zip(indexes, results, strict=True):
                part.finish(index, text, is_lost=why_not is not None)
        part.hand = ()

    def _call_item(self, worker: Worker, execution: Execution, part: Slice, indexes: list[int]) -> Any:
        (index,) = indexes
        item = part.items[index]
        execution.job.take_up((index, part.rows[index], item))
        try:
            return self._owned(execution, lambda: self._invoke(worker, execution, [item]))
        finally:
            execution.job.take_up(None)

    def _call_batch(self, worker: Worker, execution: Execution, part: Slice, indexes: list[int]) -> Any:
        items = [part.items[index] for index in indexes]
        if worker.shape is not None:
            items = [worker.shape.revive(item) for item in items]
        execution.job.give_batch(_BatchReports(self, execution, part, indexes))
        try:
            return self._owned(execution, lambda: self._invoke(replace(worker, shape=None), execution, [items]))
        finally:
            execution.job.give_batch(None)

    def _items_raised(self, execution: Execution, part: Slice, error: BaseException) -> None:
        """Sets the outcome of the items that the function received and has not reported; calls the retry policy once."""
        indexes = [index for index in part.hand if part.is_left(index)]
        part.hand = ()
        if execution.worker is not None and execution.worker.refuses(error):
            for index in indexes:
                part.fail(index, *_pair(refusal_of(error)))
            return
        if indexes:
            delay, traced = self.apply_policy(execution, error), execution.traced(error)
            for index in indexes:
                part.error(index, *_pair(failure_of(error)), delay, traced)

    def apply_policy(self, execution: Execution, error: BaseException) -> int | None:
        """Microseconds until the retry of an item that raised ``error``; None for no retry: the hooks of a dead job are
        called then."""
        decision = self._policy(execution, error)
        self._report(execution, error, decision)
        if decision.follow is Follow.RETRY:
            return decision.delay
        if decision.follow is Follow.DEAD:
            self._exhausted(execution, error)
            self._fire("death", execution.job, error)
        return None

    def _decide_slice(self, execution: Execution, part: Slice, error: BaseException | None) -> Decision:
        if error is not None and not interrupted(execution.job, error):
            self._items_raised(execution, part, error)
        if part.left:
            return Decision(Follow.AGAIN)
        return Decision(Follow.RETRY, part.delay) if part.waits else _FINISH

    # -- decide: finish, failed, retry, dead, discard, again, or drop

    def decide(self, execution: Execution, error: BaseException | None) -> Decision:
        """Decides what follows an execution that raised ``error``. Calls the worker's policy; records nothing."""
        worker, job = execution.worker, execution.job
        if isinstance(error, AttemptLost):
            return Decision(Follow.DROP)
        if execution.slice is not None:
            return self._decide_slice(execution, execution.slice, error)
        if error is None:
            return _FINISH
        is_refusal = worker is not None and worker.refuses(error) and not interrupted(job, error)
        if is_refusal and not execution.is_untracked:
            return Decision(Follow.FAILED)  # raised by a middleware around the one that records
        return self._policy(execution, error)

    def _policy(self, execution: Execution, error: BaseException) -> Decision:
        noise = self._ids.random()
        if execution.is_untracked or execution.is_foreign:
            return self._hook.decide(execution, error, noise)
        limit = retries_of(execution.payload.get("retry"))
        return decide(error, execution.job, execution.worker, retries=execution.ticket.retries, limit=limit, noise=noise)

    # -- settle: the only exit

    def settle(self, execution: Execution, decision: Decision, error: BaseException | None) -> None:
        """Records the outcome; the copy of a fetched job is acknowledged after that."""
        if decision is _FINISH:
            self._hook.ended(execution, False)
            if execution.has_event:
                self._record(execution)
            else:
                self._hook.done(execution.copy)
        else:
            self._settle_other(execution, decision, error)

    def _record(self, execution: Execution, retry_at: int | None = None) -> None:
        then = None if execution.is_borrowed else lambda won: self._hook.done(execution.copy)
        self._tracker.settle(execution, retry_at=retry_at, then=then)

    def _settle_other(self, execution: Execution, decision: Decision, error: BaseException | None) -> None:
        """:meth:`settle` for a job that did not return."""
        follow = decision.follow
        if follow is not Follow.DROP:
            self._hook.ended(execution, True)
        if execution.slice is not None:
            error = None  # each item has its own outcome by now
        elif error is not None and follow in _REPORTED:
            self._report(execution, error, decision)
        if not execution.has_event:
            self._hook.settle(execution, error, decision, lambda: error and self._exhausted(execution, error))
        elif follow is Follow.DROP:
            self._tracker.forget(execution)
            if not execution.is_borrowed:
                self._hook.done(execution.copy)
        elif error is not None and execution.is_untracked and follow in _REPORTED:
            self._settle_row(execution, error, decision)
        else:
            if follow is Follow.AGAIN:
                execution.raised(JobInterrupted())
            elif error is not None:
                execution.fail(error) if follow is Follow.FAILED else execution.raised(error)
            self._record(execution, self._tracker.now() + decision.delay if follow is Follow.RETRY else None)
            if error is not None and follow is Follow.DEAD:
                self._exhausted(execution, error)
        if error is not None and (follow is Follow.DEAD or (follow is Follow.DISCARD and execution.is_untracked)):
            self._fire("death", execution.job, error)

    def _settle_row(self, execution: Execution, error: BaseException, decision: Decision) -> None:
        """Records an untracked job of the ledger that raised: its row waits for the retry, stays among the dead, or is
        deleted."""
        execution.raised(error)
        if lines := self._hook.backtrace(execution, error):
            execution.add_lines(lines)
        if decision.follow is Follow.RETRY:
            queue, at = execution.payload.get("retry_queue"), self._tracker.now() + decision.delay
            self._tracker.settle(execution, retry_at=at, queue=queue if isinstance(queue, str) else None)
        elif self._hook.is_kept(execution, decision, partial(self._exhausted, execution, error)):
            self._record(execution)
        else:
            self._tracker.release(execution, is_cancelled=True)

    def _exhausted(self, execution: Execution, error: BaseException) -> Any:
        """Calls the worker's ``retries_exhausted``; returns its result."""
        worker = execution.worker
        if worker is not None and worker.retries_exhausted is not None:
            try:
                return performed(worker.retries_exhausted, execution.job, error)
            except Exception:
                self._log.exception("retries_exhausted_failed", worker=worker.name)
        return None

    def _report(self, execution: Execution, error: BaseException, decision: Decision) -> None:
        job = execution.job
        context = {"job_id": job.job_id, "worker": execution.name, "follow": decision.follow.value}
        said = f"{clean(type(error).__name__)}: {text_of(error)}"
        kind = execution.name, template_of(said)
        self._log.raised("job_raised", error, kind, is_retried=decision.follow is Follow.RETRY, error=said[:500], **context)
        self._fire("error", error, {**context, "task_id": job.task_id, "attempt": job.attempt, "args": job.args})

    # -- threads that do not return

    def _hung(self, execution: Execution) -> None:
        """Settles a job whose thread has not returned although the timeout was raised in it."""
        worker = execution.worker
        seconds = worker.timeout if worker is not None else None
        if execution.give_up_thread():  # otherwise the process is ending, and has settled the job
            self._settle_without_thread(execution, JobTimeout(seconds or 0.0))
        self._on_hung(execution)

    def interrupt(self, execution: Execution) -> None:
        """Raises :class:`JobInterrupted` in the job's thread, if that is inside the worker's function."""
        watch = execution.watch
        if watch is not None:
            self.watchdog.interrupt(watch)

    def interrupted(self, execution: Execution) -> None:
        """Makes the job wait again, because the process must end now, even if its thread still runs. If its function has
        returned, that outcome stands; if it is not recorded before the process ends, recovery finds the job."""
        if execution.give_up_thread():
            self._settle_without_thread(execution, JobInterrupted("the runtime is shutting down"))

    def _settle_without_thread(self, execution: Execution, error: BaseException) -> None:
        try:
            self.settle(execution, self.decide(execution, error), error)
        except Exception as failure:
            self._log.exception("outcome_put_off", job_id=execution.copy.jid)
            self._settle_broken(execution, failure)

    def broke(self, execution: Execution, error: BaseException) -> None:
        """Settles the job after an error in the runtime itself."""
        if execution.claim():
            self._settle_broken(execution, error)

    def _settle_broken(self, execution: Execution, error: BaseException) -> None:
        if not execution.has_event:
            self._bury_broken(execution, error)
            return
        if execution.result is None:
            late = isinstance(error, JobInterrupted)  # raised between two of the runtime's own steps
            execution.raised(error if late else RuntimeError(f"the runtime failed around the job: {type(error).__name__}"))
        self._record(execution)

    def _bury_broken(self, execution: Execution, error: BaseException) -> None:
        """Moves the copy unchanged to the dead set, where people see it. While the broker is unavailable, the copy stays in
        this process's list."""
        if isinstance(error, Unavailable):
            return
        try:
            self._hook.bury(execution.copy, self._tracker.now())
        except Exception:
            self._log.exception("job_not_buried", job_id=execution.copy.jid)


class _BatchReports:
    """Receives a batch worker's reports on its items, each by its index in the list that the worker received."""

    def __init__(self, performer: Performer, execution: Execution, part: Slice, indexes: list[int]) -> None:
        self._performer, self._execution, self._part, self._indexes = performer, execution, part, indexes

    def finish(self, index: int, result: Any) -> None:
        index = self._slice_index(index)
        text, why_not = result_text(result, self._part.limit)
        self._part.finish(index, text, is_lost=why_not is not None)

    def fail(self, index: int, code: str, reason: str) -> None:
        self._part.fail(self._slice_index(index), code, reason)

    def _slice_index(self, index: int) -> int:
        if not 0 <= index < len(self._indexes):
            raise IndexError(f"there is no item {index}: the list has {len(self._indexes)}, from 0 on")
        return self._indexes[index]

    def error(self, index: int, reason: str | BaseException) -> None:
        index = self._slice_index(index)
        if self._part.is_left(index):
            error = reason if isinstance(reason, BaseException) else RuntimeError(str(reason))
            why = failure_of(error)
            text = why.message if isinstance(reason, BaseException) else str(reason)
            delay = self._performer.apply_policy(self._execution, error)
            self._part.error(index, why.code, text, delay, self._execution.traced(error))


def _results(worker: Worker, result: Any, count: int, is_used: bool) -> Sequence[Any]:
    """The result of each of ``count`` items, from what the function returned. ``is_used``: the function has not reported
    all items by itself. Raises ValueError for a list of another length, whose results match no items.
    """
    if not worker.batch:
        return [result]
    if not isinstance(result, list | tuple):
        return [None] * count
    if len(result) != count and is_used:
        raise ValueError(f"{worker.name} returned {len(result)} values for {count} items: return one for each, or None")
    return result if len(result) == count else [None] * count


def _pair(failure: Any) -> tuple[str, str]:
    return failure.code, failure.message


def _check_counts(execution: Execution) -> None:
    if execution.is_lost:
        raise AttemptLost(f"attempt {execution.job.attempt} of {execution.job.job_id} is not the one that counts")


# -- the retry policy: what follows a job that raised. Pure; called once, before anything is recorded

MAX_PAUSE_S = 366 * 24 * 3600
"""Longest delay before a retry, from any source, so that the due time fits its column."""


class Follow(Enum):
    """What follows an attempt."""

    FINISH = "finish"  # it returned
    FAILED = "failed"  # a business refusal: recorded, and not retried
    DROP = "drop"  # an obsolete attempt: nothing is recorded
    RETRY = "retry"
    DEAD = "dead"  # no retry is left, or the policy says so: kept in the dead set, and the hooks run
    DISCARD = "discard"  # dropped, without calling the worker's hooks
    AGAIN = "again"  # the runtime stopped while it ran


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows, and for a retry the delay in microseconds."""

    follow: Follow
    delay: int = 0


_FINISH = Decision(Follow.FINISH)  # shared, because most jobs return
_REPORTED = (Follow.RETRY, Follow.DEAD, Follow.DISCARD)


def backoff(count: int, noise: float) -> float:
    """Sidekiq's delay before retry number ``count`` (0 is the first), in seconds: count^4 + 15, plus jitter.

    ``noise`` is a number in [0, 1). Source: sidekiq 8, job_retry.rb.
    """
    return float(count**4 + 15 + _jitter(count, noise))


def _jitter(count: int, noise: float) -> int:
    return int(noise * 10 * (count + 1))


def retries_of(retry: object) -> int:
    """The number of retries of a tracked job, from the payload member ``retry``; as in Ruby, only false and null are
    false."""
    if retry is None or retry is False:
        return 0
    if isinstance(retry, int) and not isinstance(retry, bool):
        return retry
    return TRACKED_RETRIES


def decide(
    error: BaseException,
    job: CurrentJob,
    worker: Worker | None,
    *,
    retries: int,
    limit: int,
    noise: float,
    always_spread: bool = False,
) -> Decision:
    """Decides what follows ``error``, after ``retries`` retries of at most ``limit``. ``noise``: a number in [0, 1).

    ``always_spread``: jitter is also added to a delay that the worker chose, as in Sidekiq.
    """
    if interrupted(job, error):
        return Decision(Follow.AGAIN)
    if retries >= limit or isinstance(error, FinalError):
        return Decision(Follow.DEAD)
    answer = None if worker is None or worker.retry_in is None else _ask(worker.retry_in, worker.name, retries, error, job)
    if isinstance(answer, str):
        return Decision(Follow.DEAD if answer == "kill" else Follow.DISCARD)
    spread = _jitter(retries, noise) if always_spread and answer else 0  # 0 means at once
    seconds = backoff(retries, noise) if answer is None else answer + spread
    return Decision(Follow.RETRY, micros(min(seconds, MAX_PAUSE_S)))


def _ask(policy: RetryIn, worker: str, retries: int, error: BaseException, job: CurrentJob) -> float | str | None:
    """The answer of a worker's policy: seconds, "kill" or "discard"; None, for the default, in place of any other."""
    try:
        answer = performed(policy, retries, error, job)
        in_range = isinstance(answer, int | float) and not isinstance(answer, bool) and 0 <= answer <= MAX_PAUSE_S
        if in_range or answer in (None, "kill", "discard"):  # NaN is in no range
            return answer
        get_logger("asynctask.retry").warning("retry_in_refused", worker=worker, answer=repr(answer)[:200])
    except Exception:  # a broken policy must not lose the retry
        get_logger("asynctask.retry").exception("retry_in_failed", worker=worker)
    return None
