"""Huey with the tracker attached: every tracked task leaves an Event, and Tasks run on its consumer.

Huey's worker takes a task off the queue before it performs it, and acknowledges nothing: a task whose consumer dies is lost
to Huey. A job of a Task carries its attempt among the keyword arguments of its message, from where it is taken before the
function is called; the ledger dispatches it again. A lone job carries nothing.

:func:`attach` replaces four methods of one Huey instance: those that enqueue a task, execute it and requeue it for a retry,
and the one that reads what was scheduled, which Huey enqueues once more. A worker process of Huey's (``-k process``) has a
recording :class:`~asynctask.integrations.base.EngineProcess` of its own.
"""

from __future__ import annotations

import functools
import inspect
import sqlite3
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from asynctask.errors import (
    ConfigError,
    InputError,
    JobInterrupted,
    JobTimeout,
    SchemaOutdated,
    UnknownWorker,
    not_installed,
)
from asynctask.exports.run import MERGER
from asynctask.integrations.base import (
    PUT_OFF_S,
    Attachable,
    Engine,
    EngineCapabilities,
    EngineProcess,
    Fence,
    IdTaken,
    Performed,
    PushedJob,
    Unwanted,
    revived_arguments,
)
from asynctask.ledger.standalone import Arrival, is_job_id

try:
    from huey import Huey
    from huey.api import Task, TaskWrapper
    from huey.exceptions import CancelExecution, TaskTimeout
    from huey.signals import SIGNAL_EXPIRED, SIGNAL_REVOKED
except ModuleNotFoundError as error:
    if error.name != "huey":
        raise
    raise ModuleNotFoundError(not_installed("huey", "huey"), name="huey") from None

NAME: Final = "huey"
"""The name of this engine: the prefix of its queues, in the identities of its processes and in its Events."""

ATTEMPT: Final = "asynctask_attempt"
"""The keyword argument in the message of a job of a Task: its attempt."""

_ANNOUNCED: Final = "asynctask_announced"
"""The attribute of a task, not in its message, that Huey or the dispatcher sends: it has an Event."""


def attach(huey: Huey, app: Attachable) -> HueyEngine:
    """Records every task of ``huey`` as an Event of ``app``, and makes those tasks workers of ``app``: lists can be
    submitted for them. Call it once, right below the Huey instance: tasks that are declared before are refused.

    From then on a task has the options ``failed_on=(MyError, ...)``, exceptions that are business refusals;
    ``use_task_event=False``: its jobs are not tracked; ``export_columns=["sku", ...]`` makes a task that yields rows an
    export; ``rate``, ``limit`` and ``search`` are those of :meth:`asynctask.AsyncTask.worker`. Raises :class:`ConfigError`.
    """
    if huey._registry._registry:
        raise ConfigError(f"attach() comes before the first task of Huey: {', '.join(sorted(huey._registry._registry))}")
    engine = HueyEngine(app, huey)
    app.attach(engine)
    engine.wrap()
    return engine


class HueyEngine(Engine):
    """The queue and the tasks of one Huey instance; :func:`attach` returns it."""

    title = "Huey"

    def __init__(self, app: Attachable, huey: Huey) -> None:
        capabilities = EngineCapabilities(
            late_ack=False, redelivers=False, counts=True, asynchronous=False, hard_limit=False, revokes=False, exports=True
        )
        super().__init__(app, NAME, capabilities)
        self.huey = huey
        self.queue_names = (huey.name,)
        self._classes: dict[str, type[Task]] = {}
        self._enqueue, self._execute, self._requeue = huey.enqueue, huey._execute, huey._requeue_task
        self._read_schedule, self._create_consumer = huey.read_schedule, huey.create_consumer
        self._workers = 0
        self._lock = threading.Lock()

    def wrap(self) -> None:
        """Puts this engine around the methods of the Huey instance."""
        huey, engine = self.huey, self

        class Tracked(TaskWrapper):  # type: ignore[misc]
            def create_task(self, function: Any, context: bool = False, name: str | None = None, **settings: Any) -> Any:
                return engine.create_task(super().create_task, function, context=context, name=name, **settings)

        huey.task_wrapper_class = Tracked
        huey.enqueue, huey._execute, huey._requeue_task = self.enqueue, self.execute, self.requeue
        huey.read_schedule, huey.create_consumer = self.read_schedule, self.create_consumer
        huey.on_startup("asynctask")(self._began)
        huey.on_shutdown("asynctask")(self._ended)
        huey.signal(SIGNAL_REVOKED, SIGNAL_EXPIRED)(self._not_executed)

    # -- the port

    def name_of(self, target: object) -> str | None:
        task = getattr(target, "task_class", None)
        return next((name for name, each in self._classes.items() if each is task), None)

    def put(self, jobs: Sequence[PushedJob]) -> None:
        for job in jobs:
            if (kind := self._classes.get(job.name)) is None:  # another process may have a newer release
                raise UnknownWorker(job.name, self._classes)
            fence = {} if job.attempt is None else {ATTEMPT: job.attempt}
            task = kind(
                tuple(job.args),
                {**job.kwargs, **fence},
                id=job.job_id,
                retries=max(0, kind.default_retries - job.retries),
                retry_delay=kind.default_retry_delay * (kind.default_retry_backoff or 1) ** job.retries,
            )
            setattr(task, _ANNOUNCED, True)
            self.huey.enqueue(task)

    def count(self, queues: Sequence[str]) -> Sequence[int]:
        return [int(self.huey.pending_count()) if queue == self.huey.name else 0 for queue in queues]

    def away(self) -> tuple[type[BaseException], ...]:
        redis = sys.modules.get("redis")  # Huey imports it, if it is there
        return (OSError, sqlite3.OperationalError, *([] if redis is None else [redis.RedisError]))

    def understood(self, current: Any, error: BaseException) -> BaseException:
        if isinstance(error, TaskTimeout):
            return JobTimeout(float(current.message.timeout or 0))
        return JobInterrupted() if isinstance(error, KeyboardInterrupt) else error

    # -- tasks

    def create_task(
        self, create: Callable[..., Any], function: Callable[..., Any], *, name: str | None, **settings: Any
    ) -> Any:
        """The class of a task as Huey makes it, of the function within the middleware."""
        failed_on, columns = settings.pop("failed_on", ()), settings.pop("export_columns", None)
        rate, limit, search = (settings.pop(name, None) for name in ("rate", "limit", "search"))
        if not settings.pop("use_task_event", True) or inspect.iscoroutinefunction(function):  # Huey refuses the latter
            return create(function, name=name, **settings)
        chosen = name or function.__name__
        if chosen in self._classes:
            raise ConfigError(f"two tasks of Huey are named {chosen!r}; give one of them another name=")
        called = functools.partial(function, task=None) if settings.get("context") else function  # Huey gives it the task
        worker = self.declared(
            chosen, called, self.huey.name, failed_on=failed_on, columns=columns, rate=rate, limit=limit, search=search
        )
        written = self.writing(worker, function)

        @functools.wraps(function)
        def tracked(*args: Any, **kwargs: Any) -> Any:
            current: Performed | None = self.current
            if current is None or current.is_called or current.worker is not worker:
                return function(*args, **kwargs)  # a plain call, by a program or another job
            own = args if current.ticket.is_lone else revived_arguments(worker, args)
            return self._perform(current, lambda: written(*own, **kwargs))

        kind = create(tracked, name=name, **settings)
        self._classes[chosen] = kind
        self.tracked.add(worker)
        if worker.columns and MERGER not in self._classes:
            self.huey.task(name=MERGER)(self.merging())
        return kind

    def _worker_of(self, task: Task) -> Any:
        name = type(task).__name__
        return self.tracked[name] if self._classes.get(name) is type(task) else None

    # -- sending

    def enqueue(self, task: Any) -> Any:
        """Enqueues a task; the Event of a lone job is made first. A group and a chord come with each of their tasks."""
        worker = self._worker_of(task) if isinstance(task, Task) and not self.huey.immediate else None
        if worker is None or getattr(task, _ANNOUNCED, False):
            return self._enqueue(task)
        if not is_job_id(task.id):
            raise InputError(
                "the id of a tracked job has 1 to 64 characters: send it with another id", code="not_recordable"
            )
        if ATTEMPT in task.kwargs:  # of the job that sends this one, with its arguments
            task.kwargs = {name: value for name, value in task.kwargs.items() if name != ATTEMPT}
        by_engine = self.current is not None and not self.current.is_performing  # the next step of a pipeline
        self.announce(task.id, worker, self.huey.name, task.args, task.kwargs, by_engine=by_engine)
        try:
            return self._enqueue(task)
        except Exception as error:
            self.end(task.id, f"it could not be sent: {type(error).__name__}: {error}", lone_only=True)
            raise

    def read_schedule(self, timestamp: Any = None) -> Any:
        """The tasks whose time has come, which Huey enqueues once more."""
        return [_announced(task) for task in self._read_schedule(timestamp)]

    # -- performing

    def execute(self, task: Any, timestamp: Any) -> Any:
        """Executes a task whose time has come. Blocks while the ledger is unavailable."""
        worker = self._worker_of(task)
        if worker is None or not self._workers or not is_job_id(task.id):
            return self._execute(task, timestamp)
        arrival = self._arrival(task, worker.name)
        task.kwargs = {name: value for name, value in task.kwargs.items() if name != ATTEMPT}
        payload = {"class": worker.name, "args": [*task.args], "kwargs": task.kwargs, "jid": task.id}
        try:
            current: Performed = self.begin(arrival, worker, task, payload)
        except (Unwanted, IdTaken) as error:
            self.log.warning("not_performed", job_id=task.id, why=str(error))
            return None
        self.thread.current = current
        try:
            return self._execute(task, timestamp)
        finally:
            self.thread.current = None
            self._settle(current)

    def _settle(self, current: Performed) -> None:
        """Records what was not recorded before a retry. Huey has nothing to acknowledge, so no thread waits for that."""
        if current.is_settled:
            return
        if not current.is_called:
            current.performer.settle(current, discarded="a hook of Huey cancelled it before it began")
            return
        if current.has_failed and not current.ticket.is_lone:
            with suppress(*self.away()):
                self.huey.delete(current.message.id)  # its error in Huey's store of results, which nobody reads
        current.performer.settle_later(current)

    def _perform(self, current: Performed, function: Callable[[], Any]) -> Any:
        """Calls a task's function. Of a job of a Task, Huey keeps no result, and gets an error only to decide on a
        retry."""
        current.is_called, is_lone = True, current.ticket.is_lone
        result: Any = None
        raised: BaseException | None = None
        try:
            result = self.call(current, function)  # a refusal is set as the outcome, and need not be raised
        except BaseException as error:
            raised = error
        if current.is_refused or current.is_final:
            current.message.retries = 0
        if current.is_refused and is_lone:  # what follows it in a pipeline does not run
            raise CancelExecution(str(current.error), retry=False) from current.error
        if raised is None or (not is_lone and (current.is_refused or isinstance(raised, JobInterrupted))):
            return result if is_lone else None
        raise raised

    def requeue(self, task: Any, timestamp: Any, retry_eta: Any = None) -> None:
        """Records the retry that Huey has decided on, and leaves one of a Task to the ledger."""
        current: Performed | None = self.performs(task.id)
        if current is not None:
            delay_s = float(task.retry_delay or 0) if retry_eta is None else (retry_eta - timestamp).total_seconds()
            current.performer.settle(current, delay_s=max(0.0, delay_s))
            if not current.ticket.is_lone:
                return
        self._requeue(_announced(task), timestamp, retry_eta)

    def _not_executed(self, signal: str, task: Any) -> None:
        """Huey drops a task that was revoked, or has expired."""
        worker = self._worker_of(task)
        if worker is None or not self._workers or not is_job_id(task.id):
            return
        arrival, why = self._arrival(task, worker.name), f"{signal} in Huey"
        if arrival.attempt is None:
            self.end(task.id, why, lone_only=True)
        elif isinstance(process := self.started(), EngineProcess):
            process.put_off(arrival, why, PUT_OFF_S)

    def _arrival(self, task: Any, name: str) -> Arrival:
        fence = Fence.parse(task.kwargs[ATTEMPT]) if ATTEMPT in task.kwargs else Fence()
        args = {key: value for key, value in task.kwargs.items() if key != ATTEMPT}
        return self.arrival(self.tracked[name], task.id, fence, self.huey.name, task.args, args)

    # -- the consumer

    def create_consumer(self, **options: Any) -> Any:
        """Huey's consumer. Raises :class:`ConfigError` for one that could record nothing."""
        kind, workers = options.get("worker_type", "thread"), int(options.get("workers", 1))
        if kind not in ("thread", "process"):
            raise ConfigError(f"a tracked consumer has workers of the type thread or process, not {kind!r}")
        try:
            self.check_schema()
        except SchemaOutdated as error:
            raise ConfigError(f"the consumer could record nothing: {error}") from error
        self.concurrency = workers if kind == "thread" else 1
        consumer = self._create_consumer(**options)
        stop = consumer.stop

        def stop_after_quiet(*args: Any, **more: Any) -> None:
            if isinstance(self.performer, EngineProcess):
                self.performer.quiet()
            stop(*args, **more)

        consumer.stop = stop_after_quiet
        return consumer

    def _began(self) -> None:
        """A worker of this process begins."""
        with self._lock:
            self._workers += 1
        self.start()

    def _ended(self) -> None:
        with self._lock:
            self._workers -= 1
            if not self._workers:
                self.stop()


def _announced(task: Any) -> Any:
    setattr(task, _ANNOUNCED, True)
    return task
