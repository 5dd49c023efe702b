"""Jobs in a test: one job alone (:func:`perform`), all that are due (:func:`drain`), and a running worker.

All of them use the parts of a worker process. :func:`perform` has a tracker whose outcomes are returned instead of written.
:func:`drain` has the whole process, with two differences: the calling thread performs the jobs, and the ledger's time, as
this process sees it, moves on to the next due time once nothing else is due.
"""

from __future__ import annotations

import contextvars
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Literal, cast
from unittest.mock import patch

import orjson

from asynctask.app import AsyncTask
from asynctask.arrivals import ArrivalTracker
from asynctask.brokers.base import About
from asynctask.clock import SECOND
from asynctask.core.transitions import Begin
from asynctask.database.engine import DatabaseTime
from asynctask.errors import AsyncTaskError, ConfigError, InputError, Unavailable
from asynctask.iterable import item_statuses, pack
from asynctask.job import Checkpoint, CurrentJob, JobTask, context_text
from asynctask.ledger import lending, queries
from asynctask.ledger.base import Ledger, dumps
from asynctask.ledger.recorder import Kind, Outcome, Recorder
from asynctask.ledger.tasks import called_back, candidates
from asynctask.lists.items import Rejected
from asynctask.lists.readers import RawRow
from asynctask.messages import Catalogue
from asynctask.middleware.chain import Chain
from asynctask.middleware.tracker import Ticket
from asynctask.runtime.execution import Decision, Execution, Follow, Performer, bind
from asynctask.runtime.launcher import Launcher, Queues
from asynctask.sidekiq.copies import job_of, tracked_copy, untracked_options
from asynctask.sidekiq.sharing import Sharing
from asynctask.submission import Submitter
from asynctask.task import TaskHandle
from asynctask.testing import PATIENCE_S
from asynctask.worker import Worker

if TYPE_CHECKING:
    from asynctask.database.engine import Database
    from asynctask.runtime.process import Parts

TASK: Final = 1
"""The id of the Task to which the job of :func:`perform` belongs; no ledger has it."""

_FRESH_S: Final = 0.2
"""Seconds after which borrowed jobs are checked again. Below :data:`~asynctask.runtime.pool.STALE_S`."""

_BORROWED: Final = 100
"""Jobs that :func:`drain` borrows at once: the concurrency of a process, none of whose threads is started."""

_LOOKS: Final = 20
_LOOK_S: Final = 0.02
"""How often, and with which pause in seconds, :func:`drain` looks whether a Task that has ended is closed."""

_SHUTDOWN_S: Final = 2.0
"""Seconds that jobs have to end after the test has left :func:`running`; the test has seen all that it wanted to see."""

JobStatus = Literal["finish", "failed", "error", "retry", "interrupted", "rejected"]


# -- one job alone


@dataclass(frozen=True, slots=True)
class ItemResult:
    """What an item of a batch came to. ``status``: ``finish``, ``failed`` or ``error``, or ``retry`` if the item waits for
    another attempt; ``message`` and ``code`` say why it did not succeed."""

    status: JobStatus
    result: Any = None
    message: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True)
class JobResult:
    """What a job came to.

    ``status``: ``finish``, ``failed`` and ``error`` as in the ledger; ``retry``: it raised, and another attempt follows
    ``retry_in`` seconds later; ``interrupted``: it stopped between two steps, and another attempt follows; ``rejected``: a
    list would not have accepted the item. ``result``: as the Event keeps it, as JSON. ``messages``: those of the Event, in
    order. ``error``: the exception that the job raised, also a refusal; of a rejected item the
    :class:`~asynctask.errors.InputError`, whose ``errors`` are its problems. ``checkpoint``: the last one. ``items``: what
    each item of a batch came to, in order.
    """

    status: JobStatus
    result: Any = None
    messages: tuple[str, ...] = ()
    error: BaseException | None = None
    checkpoint: Any = None
    retry_in: float | None = None
    items: tuple[ItemResult, ...] = ()


def perform(
    worker: Worker[..., Any],
    item: Any,
    *,
    owner: str = "",
    context: Mapping[str, Any] | None = None,
    state: Any = None,
    row: int | None = None,
    attempt: int = 1,
) -> JobResult:
    """Performs one job of a worker in this thread, without a ledger: the item is validated as one of a list, then the job
    runs through the application's server middleware, and the retry policy decides what would follow.

    ``item``: for a ``batch`` worker a list of items. ``owner``, ``context``, ``row`` (of a batch: that of its first item)
    and ``attempt`` are what ``current_job()`` says; ``state`` is the checkpoint of an earlier attempt. Timeouts are off;
    ``retries_exhausted`` and the hooks ``error`` and ``death`` are called. Raises :class:`ConfigError` for what is no
    worker of an application, :class:`InputError` for a batch that is no list.
    """
    app = getattr(worker, "pusher", None)
    if not isinstance(worker, Worker) or not isinstance(app, AsyncTask):
        raise ConfigError(
            f"perform() takes what @app.worker returns, or app.workers[name], not {worker!r:.200}; a task or actor of an"
            " engine is a function: call it"
        )
    if worker.columns:
        raise ConfigError(
            f"{worker.name} is an export: call it with a shard for its rows, or test the file with drain(app)"
        )
    worker = replace(worker, timeout=None)
    items = item if worker.batch else [item]
    if not isinstance(items, list | tuple) or not items:
        raise InputError(f"{worker.name} takes a batch: give a list of items, not {item!r:.100}", code="invalid_item")
    first = 1 if row is None else row
    rows, params = list(range(first, first + len(items))), []
    for number, each in zip(rows, items, strict=True):
        found = _validated(worker, each, number)
        if isinstance(found, InputError):
            return JobResult("rejected", None, (str(found),), found)
        params.append(found)
    execution = _execution(app, worker, rows, params, owner=owner, context=context, row=row, state=state, attempt=attempt)
    return _Alone(app, worker).perform(execution)


def _validated(worker: Worker, item: Any, row: int) -> str | InputError:
    """The item as JSON text, or why a list would reject it."""
    assert worker.shape is not None
    found = worker.shape.validate(RawRow(row, item), None)  # type: ignore[attr-defined]
    if isinstance(found, Rejected):
        return found.error(f"a list for {worker.name!r} would reject the item")
    text: str = found.params
    return text


@dataclass(kw_only=True, eq=False)
class _Kept(Execution):
    """Keeps the exception of a job, also of one that was refused, or of a batch, which are not raised; and what follows."""

    error: BaseException | None = None
    decision: Decision = field(default=Decision(Follow.FINISH))

    def fail(self, error: BaseException) -> None:
        self.error = error
        Execution.fail(self, error)


def _execution(
    app: AsyncTask,
    worker: Worker,
    rows: Sequence[int],
    params: Sequence[str],
    *,
    owner: str,
    context: Mapping[str, Any] | None,
    row: int | None,
    state: Any,
    attempt: int,
) -> _Kept:
    """The job as a borrow would have made it."""
    now, is_tracked = app.clock.now(), worker.use_task_event
    count, options = len(rows), dumps({"retry": worker.max_retries})
    item = pack(rows, params) if count > 1 else params[0]
    if not is_tracked:
        count, item = 0, f"[{item}]"
        options = untracked_options({"retry": worker.max_retries, **worker.options}, worker.priority)
    ready = lending.Job(
        1, app.ids.jid(), TASK if is_tracked else None, attempt, attempt - 1, worker.name, worker.queue, worker.priority,
        item, options, now, rows[0], count, 1, 0,
    )  # fmt: skip
    made = tracked_copy(ready, now)
    payload = job_of(made)
    job = CurrentJob(made.jid, task_id=ready.task_id, attempt=attempt, queue=worker.queue, payload=dict(payload))
    task = JobTask(TASK, "", owner, worker.name, None if context is None else context_text(context)) if is_tracked else None
    kept = None if state is None else Checkpoint(orjson.dumps(state).decode()).dump()
    ticket = Ticket.made(
        Begin.RUN, made.jid, event_id=1, task_id=ready.task_id, attempt=attempt, retries=attempt - 1, checkpoint=kept,
        row=rows[0] if worker.batch else row, task=task,
    )  # fmt: skip
    record = ticket.record
    record.row, record.worker_name = record.row._replace(items=count), worker.name
    execution = _Kept(ticket=ticket, job=job, copy=made, payload=payload, worker=worker)
    bind(execution, ticket)
    return execution


class _NoDatabase:
    """Stands for the database of a ledger that is not there."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("asynctask.testing.perform has no ledger: test this with drain(app)")


class _Outcomes(Recorder):
    """A recorder that keeps the outcomes."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self.put_here: list[Outcome] = []

    def put(self, outcomes: Sequence[Outcome]) -> None:
        """Keeps them."""
        self.put_here.extend(outcomes)


class _Alone:
    """Performs one job, without a process around it."""

    def __init__(self, app: AsyncTask, worker: Worker) -> None:
        self._ledger = Ledger(cast("Database", _NoDatabase()), app.clock, app.ids, Catalogue(app.config.locale))
        self._recorder = _Outcomes(self._ledger)
        about = About("test", "", 0, 0, 1, {})
        rules = Sharing(
            None, app.clock, app.ids, about, {worker.name: worker}, running=list, is_quiet=bool, on_signal=lambda name: None
        )
        self._chain = copy(app.server_middleware)
        self._performer = Performer(
            ArrivalTracker(self._ledger, self._recorder), self._chain, app.clock, app.ids, rules, app.fire,
            app.config.max_result_bytes, on_hung=lambda execution: None,
        )  # fmt: skip

    def perform(self, execution: _Kept) -> JobResult:
        """Performs it, as a thread of a worker does."""
        performer = self._performer

        def witness(worker: Worker, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
            try:
                return call_next()
            except BaseException as error:
                execution.error = error
                raise

        def run() -> None:
            error = performer.execute(execution)
            execution.error = error or execution.error
            if isinstance(error, KeyboardInterrupt):  # the person who runs the tests
                raise error
            execution.claim()
            execution.decision = performer.decide(execution, error)
            performer.settle(execution, execution.decision, error)

        self._chain.add(witness)
        try:
            contextvars.copy_context().run(run)
        finally:
            performer.watchdog.stop()
            performer.loop.stop()
        return self._result(execution)

    def _result(self, execution: _Kept) -> JobResult:
        outcome, job = self._recorder.put_here[-1], execution.job
        waits = None if outcome.kind is not Kind.RETRY else execution.decision.delay / SECOND
        text = outcome.values.get("result")
        kept = job.result if execution.is_untracked else None if text is None else orjson.loads(text)
        status, items = _STATUSES.get(outcome.kind, "error"), _items(execution, outcome, kept)
        return JobResult(
            status,
            [each.result for each in items] if items else kept,
            tuple(note.message for note in outcome.notes),
            None if status == "finish" else execution.error,  # a middleware may have caught it
            job.state,
            waits,
            items,
        )


_STATUSES: Final[Mapping[Kind, JobStatus]] = {
    Kind.FINISH: "finish",
    Kind.FAILED: "failed",
    Kind.RETRY: "retry",
    Kind.INTERRUPTED: "interrupted",
}


def _items(execution: Execution, outcome: Outcome, kept: Any) -> tuple[ItemResult, ...]:
    """What each item of a batch came to; empty for a job of one item."""
    part = execution.slice
    if part is None:
        return ()
    found = list[ItemResult]()
    results = {} if kept is None else kept if len(part.rows) > 1 else {str(part.rows[0]): kept}
    for index, status in enumerate(item_statuses(outcome.marks, len(part.rows), "retry")):
        why = outcome.failures.get(index)
        result = results.get(str(part.rows[index]))
        message, code = ("", "") if why is None else (why.message, why.code)
        found.append(ItemResult(cast("JobStatus", status), result, message, code))
    return tuple(found)


# -- a running worker


@contextmanager
def running(app: AsyncTask, **options: Any) -> Iterator[Launcher]:
    """A worker in threads of this process, while the block runs. Yields its launcher.

    ``options`` as in :meth:`~asynctask.AsyncTask.launcher`; by default two threads for the queues of the settings and of
    all workers. Jobs that still run at the end of the block have two seconds (``shutdown_s``), then they are interrupted,
    and wait in the ledger.
    """
    given = {"concurrency": 2, "queues": _queues(app), "shutdown_s": _SHUTDOWN_S, **options}
    launcher = app.launcher(**given)
    launcher.start()
    try:
        yield launcher
    finally:
        launcher.stop()


def _queues(app: AsyncTask) -> dict[str, int]:
    """The queues of the settings and of the application's own workers, each once."""
    config = app.config
    own = [each.queue for each in app.own_workers.values()]
    return dict.fromkeys([*config.queue_weights(), config.callback_queue, *own], 1)


# -- all jobs that are due


class Undrained(AsyncTaskError, AssertionError):
    """:func:`drain` has reached its limit."""

    code = "undrained"


def drain(app: AsyncTask, *, limit: int = 10_000) -> dict[str, int]:
    """Performs every job of the ledger in this thread, until none is left that could start; returns how many attempts came
    to which outcome (``finish``, ``failed``, ``error``, ``retry``, ...).

    This thread is a worker process for that time, with its hooks from ``startup`` to ``shutdown``. Nothing is waited for: a
    retry, a start time, a round of an ``interval`` and ``perform_in`` begin at once, in the order of their due times.
    Callbacks run, and Tasks close. Lists for workers of an attached engine (Celery, Dramatiq, RQ) are performed here, too:
    the function is called, and the engine's own hooks and retries have no part in it. What a person holds back stays: a
    paused Task, a paused queue, a stopped job.

    Raises :class:`Undrained`, which says what is left, after ``limit`` attempts: a job that sends itself again has no end.
    Raises :class:`ConfigError` with Redis, where untracked jobs wait.
    """
    if app.config.uses_redis:
        raise ConfigError(
            "drain() performs the jobs of the ledger, and with a broker_url some wait in Redis: leave it empty in tests,"
            " or use asynctask.testing.running(app)"
        )
    return _Drain(app, limit).run()


class _MovedTime(DatabaseTime):
    """The database's time, and ``ahead`` microseconds more."""

    ahead = 0

    def now(self) -> int:
        return super().now() + self.ahead


class _Apart:
    """The parts of an application for another process in this one, with the identity ``NAME:PID:NONCE`` and a time of its
    own. It performs the workers of attached engines, too."""

    def __init__(self, app: AsyncTask) -> None:
        self._app = app
        host, _, rest = app.ledger.identity.partition(":")
        self.closed = SimpleQueue[int]()
        self.ledger = replace(
            app.ledger, identity=f"{host}:{rest.partition(':')[0]}:{app.ids.nonce()}", closed=self.closed.put
        )
        self.time = _MovedTime(app.clock)
        self.time.set(app.ledger.now())
        object.__setattr__(self.ledger, "time", self.time)
        self.interrupted = threading.Event()
        self.server_middleware: Chain = copy(app.server_middleware)
        self.server_middleware.prepend(self._witness)

    @property
    def own_workers(self) -> Mapping[str, Worker]:
        engines = {name: _without_loop(worker) for name, worker in self._app.workers.items() if worker.engine is not None}
        return {**engines, **self._app.own_workers}

    def _witness(self, worker: Worker, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
        try:
            return call_next()
        except KeyboardInterrupt:
            self.interrupted.set()
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._app, name)


def _without_loop(worker: Worker) -> Worker:
    """A worker of an engine, whose coroutine function runs on the event loop here, and not on that of the engine."""
    behind = getattr(worker.function, "__wrapped__", None)
    if inspect.iscoroutinefunction(behind) and not worker.is_async:
        return replace(worker, function=behind, is_async=True)
    return worker


@dataclass(slots=True)
class _Drain:
    """One call of :func:`drain`."""

    app: AsyncTask
    limit: int
    performed: int = 0
    jumps: int = 0  # since the last job
    turn: threading.Lock = field(default_factory=threading.Lock)  # of the thread that does what is not a job
    ended: threading.Event = field(default_factory=threading.Event)
    parts: _Apart = field(init=False)
    queues: dict[str, int] = field(init=False)
    launcher: Launcher = field(init=False)

    def __post_init__(self) -> None:
        self.parts, self.queues = _Apart(self.app), {}
        self.look_for_queues()
        self.launcher = Launcher(
            cast("Parts", self.parts), concurrency=_BORROWED, queues=Queues(self.queues, strict=True), shutdown_s=0.0
        )

    def run(self) -> dict[str, int]:
        """Runs until nothing is left; returns the counts."""
        launcher = self.launcher
        launcher.register()
        launcher.heartbeat.start()
        self.app.fire("startup")
        launcher.recorder.start()
        checks = threading.Thread(target=self.check, name="drain-checks", daemon=True)
        checks.start()
        try:
            with self.turn:
                while self.step() or self.settle() or self.step() or self.jump():
                    pass
        finally:
            self.ended.set()
            checks.join()
            self.end()
        counts = Counter[str]()
        for outcomes in launcher.figures.as_dict()["outcomes"].values():
            counts.update(outcomes)
        return dict(counts)

    def step(self) -> bool:
        """Borrows, and performs what was borrowed; whether anything was performed."""
        pool, before = self.launcher.pool, self.performed
        self.launcher.borrower.step()
        pool.jobs.end(1)  # so that `take` returns None once it finds no job
        while (execution := pool.jobs.take()) is not None:
            if self.performed >= self.limit:
                pool.release(execution)
                raise Undrained(f"drain() has performed {self.limit:,} jobs, and more are due: {self.left()}")
            self.turn.release()
            try:
                pool.run(execution)
            finally:
                self.turn.acquire()
            self.performed, self.jumps = self.performed + 1, 0
            if self.parts.interrupted.is_set():
                raise KeyboardInterrupt
        return self.performed > before

    def check(self) -> None:
        """While a job runs or is about to, checks what is borrowed: a job begins only if its last check is fresh."""
        while not self.ended.wait(_FRESH_S):
            with self.turn, suppress(Unavailable):
                self.launcher.borrower.step()

    def settle(self) -> bool:
        """Waits until all outcomes are recorded and lists are split, does what maintenance does for Tasks, and calls the
        hooks of those that have closed; whether lists were split meanwhile, or a queue was found."""
        if not self.launcher.recorder.drain(PATIENCE_S):
            raise Undrained("the ledger does not accept the outcomes")
        splits = [each for each in threading.enumerate() if each.name.startswith("split-")]
        for thread in splits:
            thread.join(PATIENCE_S)
        maintenance = self.launcher.maintenance
        maintenance.change_rows()
        maintenance.pause_failing()
        self.close_tasks()
        lending.rejoin(self.launcher.ledger)
        self.call_hooks()
        return self.look_for_queues() or bool(splits)

    def close_tasks(self) -> None:
        """Closes the Tasks that have ended. The recorder does so, too: waits while it has the row of one."""
        pause = threading.Event()
        for _ in range(_LOOKS):
            self.launcher.maintenance.close()
            with self.parts.ledger.database.read() as connection:
                if not candidates(connection) and not called_back(connection):
                    return
            pause.wait(_LOOK_S)

    def call_hooks(self) -> None:
        """Calls the hooks of closed Tasks, in this thread, so that the test finds what they have done."""
        while not self.parts.closed.empty():
            self.app.fire("task_finished", self.app.progress(self.parts.closed.get()))

    def look_for_queues(self) -> bool:
        """Adds the queues in which jobs wait by now; whether there are new ones."""
        known = len(self.queues)
        self.queues.update(dict.fromkeys([*_queues(self.app), *(each.queue for each in self.backlog())], 1))
        return len(self.queues) > known

    def backlog(self) -> list[queries.Backlog]:
        """The jobs that could start now."""
        ledger = self.parts.ledger
        with ledger.database.read() as connection:
            return queries.backlog(connection, ledger.now())

    def jump(self) -> bool:
        """Moves the time on to when the next job is due; False if none is."""
        ledger = self.launcher.ledger
        with ledger.database.read() as connection:
            due = lending.next_due(connection, ledger.now())
        if due is None:
            return False
        if self.jumps >= self.limit:
            raise Undrained(f"jobs are due again and again, and none begins: {self.left()}")
        self.jumps += 1
        self.parts.time.ahead += max(1, due - ledger.now())
        self.launcher.borrower.expect(0)
        return True

    def end(self) -> None:
        """Ends the parts of the process, and removes it."""
        launcher = self.launcher
        launcher.quiet()
        launcher.borrower.step()  # gives back what has not begun
        launcher.recorder.stop(PATIENCE_S)
        self.call_hooks()
        self.app.fire("shutdown")
        launcher.pool.stop()
        launcher.heartbeat.stop()
        launcher.performer.watchdog.stop()
        launcher.performer.loop.stop()
        launcher.borrower.stop(is_idle=True)
        launcher.leave()

    def left(self) -> str:
        """How many jobs of which worker wait."""
        self.launcher.recorder.drain(PATIENCE_S)
        return ", ".join(f"{each.waiting:,} of {each.worker} in {each.queue}" for each in self.backlog()) or "later ones"


@contextmanager
def inline(app: AsyncTask, *, limit: int = 10_000) -> Iterator[None]:
    """While the block runs, each submission of a list, each sent job, each addition to an open Task and each ``resume``,
    ``retry`` and ``seal`` of one is followed by :func:`drain`. What a job submits runs in the drain that performs the
    job."""
    busy = False

    def draining(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            nonlocal busy
            done = call(*args, **options)
            if not busy:
                busy = True
                try:
                    drain(app, limit=limit)
                finally:
                    busy = False
            return done

        return called

    starting: list[tuple[Any, str]] = [(app, "hand_in"), (app, "push"), (Submitter, "add")]
    starting += [(TaskHandle, name) for name in ("resume", "retry", "seal")]
    with ExitStack() as patches:
        for owner, name in starting:
            patches.enter_context(patch.object(owner, name, draining(getattr(owner, name))))
        yield
