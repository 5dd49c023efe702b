"""Celery with the tracker attached: every tracked task leaves an Event, and Tasks run on its workers.

A task is wrapped at Celery's own entry points: ``run``, which the worker calls, and ``retry``. A second wrapper is inside
``autoretry_for``, because a business refusal must not be retried. Everything is sent by the application's ``send_task``.

A job that a program sends carries no fence (``attempt=None``): Celery keeps, retries and delivers it. A job of a Task
carries its attempt as a header. Celery's rules decide whether and when it is retried; the ledger keeps it until then and
dispatches it again, with Celery's count of retries, so no worker holds it in its memory.

In the prefork pool a process beside the worker records for all children
(:class:`~asynctask.integrations.recording.Recording`). A child opens no connection to the ledger, and continues before
its outcome is committed. The worker, whose requests acknowledge, waits for that process. It starts no thread, because it
may fork at any time, and records only what nobody else knows: that a job was killed over its time limit, or revoked.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from signal import valid_signals
from typing import Any, Final, NoReturn, TypeVar

import orjson

from asynctask.arrivals import NextRun, send_itself
from asynctask.clock import SECOND, micros
from asynctask.core.transitions import pause_s
from asynctask.dispatch.outbox import engine_queue, own_name
from asynctask.errors import (
    BrokerUnavailable,
    ConfigError,
    InputError,
    JobInterrupted,
    JobTimeout,
    NormalException,
    SchemaOutdated,
    Unavailable,
    not_installed,
)
from asynctask.exports.run import MERGER
from asynctask.integrations.base import (
    AT_ONCE,
    AWAY_S,
    BEGUN,
    PUT_OFF_S,
    SENT,
    Attachable,
    Engine,
    EngineCapabilities,
    EngineProcess,
    Fence,
    HeldAcks,
    IdTaken,
    Performed,
    Performer,
    PushedJob,
    RecordingGone,
    Unwanted,
    revived_arguments,
    sent_values,
)
from asynctask.integrations.recording import Recording
from asynctask.ledger.events import Note
from asynctask.ledger.recorder import Kind
from asynctask.ledger.standalone import Arrival, discard, is_job_id, put_off_elsewhere
from asynctask.logs import get_logger
from asynctask.middleware.tracker import Result
from asynctask.worker import Worker

try:
    from billiard.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded, WorkerLostError
    from celery import bootsteps, signals
    from celery._state import get_current_worker_task
    from celery.app.trace import task_has_custom
    from celery.exceptions import Ignore, Reject, Retry, WorkerShutdown, WorkerTerminate
    from celery.states import EXCEPTION_STATES, FAILURE
    from celery.utils import uuid
    from kombu import VERSION as KOMBU
    from kombu import exceptions as kombu_exceptions
    from kombu.exceptions import OperationalError
    from kombu.transport import virtual
    from kombu.transport.virtual.exchange import TopicExchange
except ModuleNotFoundError as error:
    if error.name not in ("billiard", "celery", "kombu"):
        raise
    raise ModuleNotFoundError(not_installed("celery", "celery"), name="celery") from None

NAME: Final = "celery"
"""The name of this engine: the prefix of its queues, in the identities of its processes and in its Events."""

ATTEMPT: Final = "asynctask_attempt"
"""The header of a job of a Task: its attempt."""

AGAIN: Final = "asynctask_again"
"""The header of a task that replaces a job: the job's id, and its attempt if it is one of a Task."""

SEVERAL: Final = "*"
"""The name of the queue of a job that several tasks replace."""

_POOLS: Final = {"celery.concurrency.prefork": False, "celery.concurrency.solo": True, "celery.concurrency.thread": True}
"""Pools that can be recorded, and whether their jobs run in the process that gets a worker's signals."""

BatchPublishError: Any = getattr(kombu_exceptions, "BatchPublishError", OperationalError)  # kombu 5.7

_REPLY_S: Final = 1.0
"""Seconds in which workers answer a revocation."""

_NO_LIMIT_S: Final = 10**8
"""The time limit of a task without one, in seconds. Celery takes 0 for the limit of all tasks."""

T = TypeVar("T")
_Perform = Callable[[Callable[..., Any], Any, Any], Any]


def attach(
    celery_app: Any, app: Attachable, *, tasks: Collection[str] | None = None, late_ack: bool = True
) -> CeleryEngine:
    """Records every tracked task of ``celery_app`` as an Event of ``app``, and makes those tasks workers of ``app``: lists
    can be submitted for them. Call it once, in the module that creates the Celery application.

    Arguments: ``tasks``, the names of the tracked tasks; None tracks all. A task's own option ``use_task_event=True`` or
    ``False`` takes precedence; ``failed_on=(MyError, ...)`` lists exceptions that are business refusals;
    ``export_columns=["sku", ...]`` makes a task that yields rows an export; ``rate``, ``limit`` and ``search`` are those of
    :meth:`asynctask.AsyncTask.worker`. ``late_ack``: tracked tasks get ``acks_late``
    and ``reject_on_worker_lost``, so that none is lost with its process; without it a lone job that dies with its worker
    ends in ``error``. Raises :class:`ConfigError` if it is attached already.
    """
    engine = CeleryEngine(celery_app, app, tasks=tasks, late_ack=late_ack)
    app.attach(engine)
    engine.connect()
    return engine


class _RefusedError(Ignore):  # type: ignore[misc]
    """Carries a business refusal past ``autoretry_for``, which lets Celery's own exceptions through."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclass(slots=True, kw_only=True, eq=False)
class _Performed(Performed):
    """The job that this thread performs; its ``message`` is its task."""

    retry_error: BaseException | None = None
    is_retrying: bool = False  # Celery's ``retry`` runs
    state: tuple[str, Any] | None = None  # of its own in Celery's backend, with what it says of it


class _Line:
    """The connection over which this process dispatches to Celery's queues and counts them, for one thread at a time."""

    def __init__(self, celery_app: Any) -> None:
        self._celery = celery_app
        self._connection: Any = None
        self._pid = 0
        self._lock = threading.RLock()  # what hooks into sending may dispatch by itself
        self._bound: dict[str, Any] = {}
        self.channel: Any = None
        self.producer: Any = None

    def use(self, call: Callable[[_Line], T]) -> T:
        """The result of ``call``; called once more on a new connection, because a broker closes idle ones. Raises
        BrokerUnavailable."""
        with self._lock:
            if self._pid != os.getpid():  # a forked child: the connection is its parent's
                self._connection, self._pid = None, os.getpid()
            if self._connection is not None:
                try:
                    return call(self)
                except self._errors():
                    self.close()
            try:
                self._open()
                return call(self)
            except self._errors() as error:
                self.close()
                raise BrokerUnavailable(f"the broker of Celery does not answer: {error}") from error

    def _open(self) -> None:
        self._connection = self._celery.connection_for_write()
        self._connection.ensure_connection(max_retries=1, interval_start=0, timeout=1)
        self.channel, self._bound = self._connection.channel(), {}
        self.producer = self._connection.Producer(self.channel)

    def _errors(self) -> tuple[type[BaseException], ...]:
        """Exceptions that mean that the broker is unavailable, or has closed the channel."""
        known = () if self._connection is None else self._connection.connection_errors
        amqp = self._connection.channel_errors if self.is_amqp else ()
        return (OperationalError, OSError, *known, *amqp)

    @property
    def is_amqp(self) -> bool:
        """Whether the broker is an AMQP server; with others kombu emulates one."""
        return self.channel is not None and not hasattr(self.channel, "_size")

    def queue(self, name: str) -> Any:
        """A queue of Celery's, bound to the channel: kombu binds a copy of any other for each message."""
        if name not in self._bound:
            self._bound[name] = self._celery.amqp.router.expand_destination(name)["queue"].bind(self.channel)
        return self._bound[name]

    def count(self, queue: str) -> int:
        """How many messages wait in a queue of the broker."""
        if not self.is_amqp:
            return int(self.channel._size(queue))  # with global_keyprefix, Redis would say that there is no such queue
        channel = self._connection.channel()  # a separate one, because it is closed if there is no such queue
        try:
            return int(channel.queue_declare(queue, passive=True).message_count)
        except self._connection.channel_errors:  # there is no such queue yet
            return 0
        finally:
            channel.close()

    @contextmanager
    def batches(self) -> Iterator[None]:
        """What is published in the block goes to the broker :data:`AT_ONCE` at a time, where kombu can (5.7, Redis): not
        where a program is told of each message that was published."""
        if signals.after_task_publish.receivers or not getattr(self.producer, "supports_batch_publish", False):
            yield
            return
        try:
            with self.producer.batch(AT_ONCE):
                yield
        except BatchPublishError as error:
            raise error.__cause__ or error from None

    def close(self) -> None:
        """Closes the connection, if still possible."""
        connection, self._connection, self.channel, self.producer = self._connection, None, None, None
        if connection is not None:
            with suppress(Exception):
                connection.close()


class CeleryEngine(Engine):
    """The Celery application as an engine; :func:`attach` adds it."""

    title = "Celery"
    attempts = _Performed

    def __init__(self, celery_app: Any, app: Attachable, *, tasks: Collection[str] | None, late_ack: bool) -> None:
        capabilities = EngineCapabilities(
            late_ack=late_ack,
            redelivers=late_ack,
            counts=True,
            asynchronous=False,
            hard_limit=True,
            revokes=True,
            exports=True,
        )
        super().__init__(app, NAME, capabilities)
        self._celery = celery_app
        self._chosen = None if tasks is None else frozenset(tasks)
        self._late_ack = late_ack
        self._untracked: dict[str, Worker] = {}  # tasks that leave no Events, for jobs that they replace
        self._seen: set[str] = set()  # the names of those that were wrapped
        self.acks = HeldAcks(_acknowledge)
        self._request: type | None = None  # of Celery's requests, where their acknowledgements can be held back
        self._recording: Recording | None = None
        self._loop = _Loop()
        self._lock = threading.Lock()
        self._importing = threading.RLock()
        self._has_imported = False
        self._line = _Line(celery_app)

    def connect(self) -> None:
        """Connects the signals. The tasks are wrapped when the application knows all of them."""
        if self._celery.finalized:
            self._track_all()
        for name in ("_task_from_fun", "register_task"):
            setattr(self._celery, name, self._making(getattr(self._celery, name)))
        self._celery.send_task = self._sending(self._celery.send_task)
        self._celery.on_after_finalize.connect(lambda **_: self._track_all(), weak=False)
        for signal, handler in (
            (signals.celeryd_after_setup, self._worker_made),
            (signals.worker_process_init, self._child_made),
            (signals.worker_process_shutdown, lambda **_: self.stop()),
            (signals.worker_shutting_down, lambda **_: self._quiet()),
            (signals.worker_shutdown, lambda **_: self._stop_worker()),
            (signals.task_failure, self._task_failed),
            (signals.task_internal_error, self._task_broken),
            (signals.task_rejected, self._task_rejected),
            (signals.task_postrun, self._task_ended),
            (signals.task_revoked, self._task_revoked),
            (signals.task_unknown, self._task_unknown),
        ):
            signal.connect(handler, weak=False)
        self._celery.steps["consumer"].add(_step(self))

    # -- the port

    @property
    def workers(self) -> Mapping[str, Worker]:
        """The tracked tasks as workers, by name. Finalizes the Celery application, and imports its modules. Raises
        :class:`ConfigError` if one cannot be imported."""
        self._import_modules()
        self._celery.finalize()
        return super().workers

    def _import_modules(self) -> None:
        """Imports what Celery's own commands import: the modules of ``include`` and ``imports``, those that
        ``autodiscover_tasks`` finds, and, of a Django project, its applications. Once; a module that asks for the workers
        while it is imported gets those that are known by then."""
        loader = self._celery.loader
        with self._importing:
            if self._has_imported or loader.worker_initialized:
                return
            self._has_imported = True
            try:
                loader.import_default_modules()
            except Exception as error:
                self._has_imported = False
                raise ConfigError(
                    f"a module of the Celery application {self._celery.main!r} cannot be imported: {type(error).__name__}:"
                    f" {error}; it is named by include, imports or autodiscover_tasks(), and `celery worker` needs it too"
                ) from error

    def name_of(self, target: object) -> str | None:
        name = getattr(target, "name", None)
        if not isinstance(name, str):
            return None
        # @task returns a proxy of the task, which is created when the application is finalized.
        task = getattr(target, "_get_current_object", lambda: target)()
        return name if self._celery.tasks.get(name) is task else None

    def away(self) -> tuple[type[BaseException], ...]:
        return OperationalError, OSError

    def put(self, jobs: Sequence[PushedJob]) -> None:
        self._refuse_eager()
        self._line.use(lambda line: self._put_all(line, jobs))

    def _put_all(self, line: _Line, jobs: Sequence[PushedJob]) -> None:
        with line.batches():
            for job in jobs:
                self._put(line, job)
        if line.is_amqp:  # it answers no message, but it answers this after all of them
            for queue in {job.queue for job in jobs}:
                line.channel.queue_declare(queue, passive=True)

    def _put(self, line: _Line, job: PushedJob) -> None:
        headers: dict[str, Any] = {} if job.attempt is None else {ATTEMPT: job.attempt}
        if job.sent is not None:
            headers[SENT] = job.sent
        if job.signature is not None:  # several tasks, of which one has the job's id and carries its fence
            signature = self._celery.signature(job.signature)
            step = _step_of(signature, job.job_id)
            _mark(step, job.job_id, job.attempt)
            step.options["retries"] = job.retries
            signature.apply_async(add_to_parent=False)
            return
        if job.name not in self.tracked and (job.replaces or job.attempt is None):
            headers[AGAIN] = [job.job_id, job.attempt]
        known = self._celery.tasks.get(job.name)  # a worker may have a newer release than this process
        send = functools.partial(self._celery.send_task, job.name) if known is None else known.apply_async
        send(
            list(job.args),
            dict(job.kwargs),
            task_id=job.job_id,
            producer=line.producer,
            queue=line.queue(job.queue),
            retries=job.retries,
            headers=headers,
            add_to_parent=False,
            retry=False,
        )

    def _refuse_eager(self) -> None:
        """Raises BrokerUnavailable in Celery's eager mode, in which it would call what is pushed here, unrecorded."""
        if self._celery.conf.task_always_eager:
            raise BrokerUnavailable(
                "Celery is in eager mode (task_always_eager) and has no queues: in a test, asynctask.testing.drain(app)"
                " performs what waits"
            )

    def count(self, queues: Sequence[str]) -> Sequence[int]:
        self._refuse_eager()
        return self._line.use(lambda line: [line.count(queue) for queue in queues])

    def may_hold(self, queue: str, worker: str) -> bool:
        """An idle worker may hold jobs of a task with a rate limit in its memory, and of what replaces a job the step with
        its id is sent by the steps before it."""
        return own_name(queue) == SEVERAL or bool(getattr(self._celery.tasks.get(worker), "rate_limit", None))

    def revoke(self, job_id: str, queue: str) -> str | None:
        """Workers that know the id as revoked drop the job when they reach it. One that has begun is found afterwards."""
        control = self._celery.control
        with self.reached():
            flagged = control.revoke(job_id, reply=True, timeout=_REPLY_S)
            states = control.inspect(timeout=_REPLY_S).query_task(job_id) or {}
        if not flagged:
            return "no worker of Celery has answered that it knows of the revocation"
        if any(found.get(job_id, ("",))[0] == "active" for found in states.values()):
            return BEGUN
        return None

    # -- tracked tasks

    def tracks(self, task: Any) -> bool:
        """Whether jobs of this task leave Events."""
        chosen = getattr(task, "use_task_event", None)
        if chosen is not None:
            return bool(chosen)
        return not task.name.startswith("celery.") and (self._chosen is None or task.name in self._chosen)

    def _track_all(self) -> None:
        for task in list(self._celery.tasks.values()):
            self._track(task)

    def _making(self, make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def made(*args: Any, **options: Any) -> Any:
            task = make(*args, **options)
            if self._celery.finalized:  # later declarations send no signal
                self._track(task)
            return task

        return made

    def _track(self, task: Any) -> None:
        with self._lock:
            if task.name in self.tracked:
                return
            if not self.tracks(task):
                if getattr(task, "export_columns", None) is not None:
                    raise ConfigError(f"task {task.name}: a shard is an item of a Task, so an export must be tracked")
                if task.name not in self._seen:
                    self._seen.add(task.name)
                    self._wrap(task, None)
                return
            worker = self._worker(task)
            self.tracked.add(worker)
            self._wrap(task, worker)
        if worker.columns and MERGER not in self.tracked:
            own = {"use_task_event": True, "max_retries": 0, "ignore_result": True}
            limits = {"time_limit": _NO_LIMIT_S, "soft_time_limit": _NO_LIMIT_S}
            self._track(self._celery.task(name=MERGER, shared=False, **own, **limits)(self.merging()))

    def _queue_to(self, options: Mapping[str, Any], own: str) -> str:
        """The queue of a job that is sent with these options; ``own``: that of its task."""
        queue = options.get("queue")
        if queue is not None:
            return str(getattr(queue, "name", queue))
        if options.get("exchange") is None and options.get("routing_key") is None:
            return own
        known = self._celery.amqp.queues.get(own)
        exchange = options.get("exchange") or (known.exchange if known is not None else "")
        return self._queue_of({**options, "exchange": exchange}, own)

    def _queue_of(self, delivery: Mapping[str, Any], own: str) -> str:
        """The queue of a message with this exchange and routing key, by the bindings that Celery knows; ``own``, that of
        its task, if several or none are bound so."""
        exchange, key = delivery.get("exchange"), str(delivery.get("routing_key") or "")
        exchange = str(getattr(exchange, "name", exchange) or "")
        if not exchange:  # the default one, where the routing key is the name of the queue
            return key or own
        queues = self._celery.amqp.queues
        if own in queues and _is_bound(queues[own], exchange, key):
            return own
        bound = [name for name, queue in queues.items() if _is_bound(queue, exchange, key)]
        return bound[0] if len(bound) == 1 else own

    def _worker(self, task: Any) -> Worker:
        function = getattr(task, "_orig_run", task.run)
        route = self._celery.amqp.router.route({}, task.name)
        search = getattr(task, "search", None)  # a class of tasks may have a method of this name
        return self.declared(
            task.name,
            function,
            self._queue_to(route, self._celery.conf.task_default_queue),
            failed_on=getattr(task, "failed_on", ()),
            columns=getattr(task, "export_columns", None),
            rate=getattr(task, "rate", None),
            limit=getattr(task, "limit", None),
            search=None if callable(search) else search,
        )

    def _wrap(self, task: Any, worker: Worker | None) -> None:
        """Wraps a task; one that leaves no Events (None) is recorded only where it replaces a job that does."""
        if worker is not None and worker.columns:
            inner = "_orig_run" if hasattr(task, "_orig_run") else "run"
            setattr(task, inner, self._writing_in_jobs(task, worker, getattr(task, inner)))
        if worker is not None and hasattr(task, "_orig_run"):
            task._orig_run = self._letting_refusals_through(worker, task._orig_run)
        self._wrap_calls(task, worker)
        self._wrap_asking(task)
        if worker is None:
            return
        task.throws = (*(task.throws or ()), NormalException, *worker.failed_on)  # Celery logs them without a traceback
        if self._late_ack:
            task.acks_late = task.reject_on_worker_lost = True
        if self._request is not None:
            task.Request = self._request

    def _replacing(self, task: Any) -> Worker:
        """The worker of a task that leaves no Events, for a job that it replaces."""
        with self._lock:
            if (worker := self._untracked.get(task.name)) is None:
                worker = self._untracked[task.name] = self._worker(task)
            return worker

    def _replace(self, current: _Performed, sig: Any, on_replace: Callable[[Any], Any]) -> Any:
        """Replaces the running job: the step of ``sig`` that has the job's id ends its Event."""
        ticket, step = current.ticket, _step_of(sig, current.job.job_id)
        known = self._celery.tasks.get(step.task)
        if known is None:
            raise InputError(f"{step.task} is no task of this worker, which would not record its end: register it here")
        _mark(step, ticket.job_id, None)
        queue = engine_queue(NAME, self._queue_to(step.options, self._own_queue(known)))
        delay_s = self._delay_of(sig.options)
        if ticket.elsewhere and step is not sig:
            run = NextRun(step.task, queue, delay_s=delay_s, signature=[])
        elif ticket.elsewhere:
            args = sent_values(self.tracked.get(step.task), sig.args, sig.kwargs, own=(), is_lone=True)
            run = NextRun(step.task, queue, *args, delay_s)
        else:
            where = queue if step is sig else engine_queue(NAME, SEVERAL)
            run = NextRun(step.task, where, delay_s=delay_s, signature=_as_json(sig))
        send_itself(current, run)
        if not ticket.elsewhere:
            raise Ignore("replaced; the ledger dispatches what replaces it")
        try:
            return on_replace(sig)
        except Ignore:
            raise
        except BaseException:  # nothing was sent
            current.next_run = None
            raise

    def _wrap_asking(self, task: Any) -> None:
        """Wraps what a running job says of itself to Celery."""
        retry, on_replace, update_state = task.retry, task.on_replace, task.update_state

        @functools.wraps(retry)
        def tracked_retry(args: Any = None, kwargs: Any = None, exc: Any = None, **options: Any) -> Any:
            if (current := self.performs(task.request.id)) is None:
                return retry(args, kwargs, exc, **options)
            current.retry_error = exc if isinstance(exc, BaseException) else sys.exception()
            current.is_retrying = True
            try:
                return retry(args, kwargs, exc, **options)
            finally:
                current.is_retrying = False

        @functools.wraps(on_replace)
        def tracked_on_replace(sig: Any) -> Any:
            if (current := self.performs(task.request.id)) is None:
                return on_replace(sig)
            return self._replace(current, sig, on_replace)

        @functools.wraps(update_state)
        def tracked_update_state(task_id: str | None = None, state: Any = None, meta: Any = None, **options: Any) -> Any:
            if (current := self.performs(task_id or task.request.id)) is not None:
                current.state = (str(state), meta)
            return update_state(task_id, state, meta, **options)

        task.retry, task.on_replace, task.update_state = tracked_retry, tracked_on_replace, tracked_update_state

    def _wrap_calls(self, task: Any, worker: Worker | None) -> None:
        """Records all that Celery calls for a job: ``run``, and ``before_start`` and ``__call__`` if the task or its base
        class has its own. The first of them begins the job, so what any of them raises is its outcome, as for Celery."""
        run, before_start = task.run, task.before_start
        has_start = task_has_custom(task, "before_start")

        def perform(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            request = task.request
            if not self._is_recorded(request, worker) or self.performs(request.id) is not None:
                return function(*args, **kwargs)

            def start_and_call() -> Any:
                if has_start:
                    before_start(request.id, args, kwargs)
                return function(*args, **kwargs)

            return self._perform(task, worker or self._replacing(task), start_and_call, args, kwargs)

        task.run = self._tracked_run(task, run, perform)

        def start_later(task_id: str, args: Any, kwargs: Any) -> None:
            if not self._is_recorded(task.request, worker):
                before_start(task_id, args, kwargs)

        if has_start:
            task.before_start = start_later
        if task_has_custom(task, "__call__"):
            task.__class__ = _calling_through(type(task), perform)

    def _tracked_run(self, task: Any, run: Callable[..., Any], perform: _Perform) -> Callable[..., Any]:
        def call_run(*args: Any, **kwargs: Any) -> Any:
            current = self.performs(task.request.id)
            if current is None or current.is_called:
                return run(*args, **kwargs)
            current.is_called = True
            try:
                return run(*_revived(current, args), **kwargs)
            except _RefusedError as error:
                raise error.cause from None

        @functools.wraps(run)
        def tracked_run(*args: Any, **kwargs: Any) -> Any:
            return perform(call_run, args, kwargs)

        return tracked_run

    @staticmethod
    def _is_recorded(request: Any, worker: Worker | None) -> bool:
        """Whether a call is a job of a worker, and not one by a program or in Celery's eager mode. A task that leaves no
        Events (None) is recorded where it replaces a job."""
        if request.called_directly or request.is_eager or not is_job_id(request.id or ""):
            return False
        return worker is not None or bool(_resent_id(getattr(request, AGAIN, None)) == request.id)

    def _writing_in_jobs(self, task: Any, worker: Worker, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that writes a shard in a job of the task, and yields its rows if a program calls it."""
        write = self.writing(worker, function)

        @functools.wraps(function)
        def writing(*args: Any, **kwargs: Any) -> Any:
            performs = self.performs(task.request.id) is not None
            return (write if performs else function)(*args, **kwargs)

        return writing

    def _letting_refusals_through(self, worker: Worker, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def refusing(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if self.current is not None and worker.refuses(error):
                    raise _RefusedError(error) from error
                raise

        return refusing

    # -- sending

    def _sending(self, send_task: Callable[..., Any]) -> Callable[..., Any]:
        """Celery's ``send_task``, through which everything is sent."""

        @functools.wraps(send_task)
        def sent(name: str, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
            if not self._celery.finalized:  # a program that only sends does not finalize the application
                self._celery.finalize()
            task_id = str(options.pop("task_id", None) or uuid())  # Celery takes a UUID, too
            send = functools.partial(send_task, name, task_id=task_id)
            # By its name alone, and outside of a job, only a dispatcher sends something with a fence.
            is_copy = ATTEMPT in (options.get("headers") or {}) and self.current is None and "task_type" not in options
            if more or is_copy or self.is_pushing:
                return send(args, kwargs, *more, **options)
            current = self.performs(task_id)
            if current is not None and name in self._celery.tasks:
                return self._send_itself(current, self._celery.tasks[name], send, args, kwargs, options)
            if name not in self.tracked or not is_job_id(task_id):
                return send(args, kwargs, **options)
            return self._send(self.tracked[name], send, args, kwargs, task_id, options)

        return sent

    def _send(
        self, worker: Worker, send: Callable[..., Any], args: Any, kwargs: Any, task_id: str, options: dict[str, Any]
    ) -> Any:
        # Between the functions of jobs Celery sends by itself: the next step of a chain, the body of a chord.
        by_celery = self.current is None and get_current_worker_task() is not None
        headers = options.get("headers") or {}
        if by_celery and _resent_id(headers.get(AGAIN)) == task_id:
            return send(args, kwargs, **options)
        queue = self._queue_to(options, own_name(worker.queue))
        sent = self.announce(task_id, worker, queue, args or (), kwargs or {}, by_engine=by_celery)
        options["headers"] = {**{name: headers[name] for name in headers if name != ATTEMPT}, SENT: sent}
        try:
            return send(args, kwargs, **options)
        except Exception as error:
            self.end(task_id, f"it could not be sent: {type(error).__name__}: {error}")
            raise

    def _send_itself(
        self,
        current: _Performed,
        task: Any,
        send: Callable[..., Any],
        args: Any,
        kwargs: Any,
        options: dict[str, Any],
    ) -> Any:
        """Sends the job that runs here once more: a retry, which Celery asks for at its end, or a send under its own id,
        after which it continues."""
        ticket, request, delay_s = current.ticket, current.message.request, self._delay_of(options)
        here = self._queue_of(request.delivery_info or {}, self._own_queue(current.message))
        queue = self._queue_to(options, here if task is current.message else self._own_queue(task))
        is_same = (
            current.is_retrying and task is current.message and queue == here and getattr(request, AGAIN, None) is None
        )
        if not is_same or (list(args or ()), dict(kwargs or {})) != (list(request.args or ()), dict(request.kwargs or {})):
            own, retries = request.args or (), int(options.get("retries") or 0)
            self.send_itself(current, task.name, queue, args or (), kwargs or {}, own, delay_s=delay_s, retries=retries)
        elif (pause := pause_s(delay_s, ticket.retries)) > delay_s and ticket.elsewhere:
            options["countdown"], options["eta"] = pause, None
        if current.is_retrying:
            # Recorded before the job is sent: otherwise its next attempt could begin before this one has ended.
            why = current.retry_error or RuntimeError("the task asks for another try")
            current.raised(why, why)
            self._settle(current, delay_s)
        if not ticket.elsewhere:  # the ledger dispatches it again when it is due
            return task.AsyncResult(ticket.job_id)
        if task.name not in self.tracked:
            options["headers"] = {**(options.get("headers") or {}), AGAIN: [ticket.job_id, None]}
        try:
            return send(args, kwargs, **options)
        except Exception as error:
            current.next_run = None
            if current.is_settled:
                self.end(ticket.job_id, f"it could not be sent again: {type(error).__name__}: {error}")
            raise

    def _delay_of(self, options: Mapping[str, Any]) -> float:
        """Seconds until the time for which something is sent."""
        eta = options.get("eta")
        if isinstance(eta, datetime):
            return float(eta.timestamp() - self.app.clock.now() / SECOND)
        return float(options.get("countdown") or 0)

    def _own_queue(self, task: Any) -> str:
        """The queue of a task's jobs that name none."""
        if (worker := self.tracked.get(task.name)) is not None:
            return own_name(worker.queue)
        return self._queue_to(self._celery.amqp.router.route({}, task.name), self._celery.conf.task_default_queue)

    # -- performing

    def _perform(self, task: Any, worker: Worker, function: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        request = task.request
        delivery = request.delivery_info or {}
        arrival = self._arrival(worker, request.id, vars(request), delivery, args, kwargs)
        payload = {"class": task.name, "args": list(args), "kwargs": dict(kwargs), "jid": request.id}
        payload["queue"] = own_name(arrival.queue)
        try:
            current: _Performed = self.begin(arrival, worker, task, payload, redelivered=bool(delivery.get("redelivered")))
        except Unwanted as error:
            raise Ignore(str(error)) from error
        except IdTaken:
            raise
        except Exception as error:  # it could not be recorded
            self.log.exception("not_begun", job_id=arrival.job_id)
            threading.Event().wait(AWAY_S)
            raise Reject(error, requeue=True) from error
        self.thread.begun = request.id
        return self._call(current, function)

    def _arrival(
        self, worker: Worker, job_id: str, headers: Mapping[str, Any], delivery: Mapping[str, Any], args: Any, kwargs: Any
    ) -> Arrival:
        queue = self._queue_of(delivery, own_name(worker.queue))
        # A program that records nothing sent it: if its id was used before, this is another run.
        anew = not (delivery.get("redelivered") or headers.get("retries") or headers.keys() & {SENT, AGAIN})
        fence, sent = _fence(headers, job_id), headers.get(SENT)
        return self.arrival(worker, job_id, fence, queue, args, kwargs, sent=sent, anew=anew)

    def _call(self, current: _Performed, function: Callable[[], Any]) -> Any:
        """Calls the task, and records its outcome before Celery acknowledges the job."""
        result: Any = None
        self.thread.current = current
        try:
            result = self.call(current, function)
        except BaseException as error:
            if isinstance(error, JobInterrupted):
                self._let_go(current, error)
            if isinstance(error, Reject) and error.requeue and not current.is_settled:
                self._put_back(current, error)
            if not current.is_refused:
                self._settle(current)
                raise
        finally:
            self.thread.current = None
        task, is_refused = current.message, current.is_refused
        if not is_refused and _is_answered(task):
            self.thread.returned = current  # Celery may still fail it: see _task_ended
        else:
            # After a task has sent itself again, the outcome is recorded already.
            waits = self._request is None or current.performer.should_stop or not task.acks_on_failure_or_timeout
            self._settle(current, is_later=not waits)
        if is_refused and current.error is not None:
            raise current.error  # Celery would treat it as a success, and call hooks and callbacks of one
        return None if is_refused else result

    def _task_ended(self, task_id: str = "", state: str = "", retval: Any = None, **_: Any) -> None:
        """Records a job whose result Celery uses, when that is done: if the result cannot be encoded or stored, or what
        follows cannot be sent, Celery fails the job."""
        current: _Performed | None = getattr(self.thread, "returned", None)
        self.thread.returned = None
        if current is None or current.job.job_id != task_id:
            return
        error = sys.exception() or (retval if state == FAILURE else None)
        if isinstance(error, BaseException) and not isinstance(error, Ignore | Reject):
            self.conclude(current, error)
        self._settle(current)

    def _settle(self, current: _Performed, delay_s: float | None = None, *, is_later: bool = False) -> None:
        """Records the outcome; committed on return, unless ``is_later``: then the acknowledgement waits for the commit, and
        this thread or child does not. ``delay_s``: another try follows in this many seconds."""
        if current.is_settled:
            return
        try:
            if not is_later:
                current.performer.settle(current, delay_s=delay_s)
            elif self._recording is not None:
                current.performer.settle_later(current)
            else:
                self.settle_later(current)
        except RecordingGone as error:  # Celery keeps the job
            raise Reject(error, requeue=True) from error

    def _let_go(self, current: _Performed, error: JobInterrupted) -> NoReturn:
        """Ends a job that stopped between two steps: the ledger, or for a lone job Celery, delivers it again."""
        if not current.ticket.elsewhere:
            self._settle(current)
            raise Ignore(str(error)) from error
        self._settle(current, 0.0)
        raise Reject(error, requeue=True) from error

    def _put_back(self, current: _Performed, error: Reject) -> NoReturn:
        """Ends a try of a job that its task puts back into the queue: the ledger, or for a lone job Celery, delivers it
        again."""
        ticket = current.ticket
        current.raised(RuntimeError(f"put back into the queue: {error.reason or 'the task raised Reject'}"))
        if not ticket.elsewhere:
            self._settle(current, 0.0)
            raise Ignore(str(error)) from error
        if current.message.acks_late:
            threading.Event().wait(pause_s(0.0, ticket.retries))  # Celery delivers it again at once, however often
            self._settle(current, 0.0)
        else:
            current.raised(
                RuntimeError("the task raised Reject(requeue=True), but Celery has acknowledged it: set acks_late")
            )
            self._settle(current)
        raise error

    def conclude(self, current: Any, error: BaseException) -> None:
        """Unless a retry has been recorded."""
        if current.is_settled or isinstance(error, Retry):
            return
        if not isinstance(error, Ignore) or isinstance(error, _RefusedError):
            super().conclude(current, error)
        elif current.next_run is not None:
            current.finish(None)
        elif current.state is not None and current.state[0] in EXCEPTION_STATES:
            current.raised(RuntimeError(f"the task set its state to {current.state[0]}: {current.state[1]}"))
        else:
            why = self.app.ledger.catalogue("ignored", str(error) or "the task raised Ignore")
            current.result = Result(Kind.FINISH, notes=[Note("working", why)])

    def understood(self, current: Any, error: BaseException) -> BaseException:
        task = current.message
        soft = (task.request.timelimit or (None, None))[1] or task.soft_time_limit or 0
        return JobTimeout(float(soft)) if isinstance(error, SoftTimeLimitExceeded) else error

    def ends_process(self, error: SystemExit) -> bool:
        """Celery asks a child of the prefork pool to end by a signal, whose handler exits with a code of its own."""
        is_signal = isinstance(error.code, int) and 256 + error.code in valid_signals()
        return isinstance(error, WorkerShutdown | WorkerTerminate) or is_signal

    # -- what only the process above the performing ones knows

    def _task_failed(self, sender: Any = None, task_id: str = "", exception: Any = None, **_: Any) -> None:
        if sender is None:
            return
        for step in _steps_after(sender.request):  # of what replaces a job: they are never sent
            if (job_id := _resent_id((step["options"].get("headers") or {}).get(AGAIN))) is not None:
                self.end(job_id, f"{sender.name}, a task before it, failed: {type(exception).__name__}: {exception}")
        if sender.name not in self.tracked:
            return
        if isinstance(exception, TimeLimitExceeded):
            self.end(
                task_id,
                timeout_s=float(sender.request.timelimit[0] if sender.request.timelimit else sender.time_limit or 0),
            )
        elif isinstance(exception, WorkerLostError):
            self.end(task_id, "its process died, and Celery does not deliver it again", lone_only=True)
        else:
            self._fail_unbegun(task_id, exception, vars(sender.request))

    def _task_broken(
        self, sender: Any = None, task_id: str = "", exception: Any = None, request: Any = None, **_: Any
    ) -> None:
        if sender is not None and sender.name in self.tracked:
            self._fail_unbegun(task_id, exception, request or {})

    def _task_rejected(self, message: Any = None, exc: Any = None, **_: Any) -> None:
        """A worker has dropped a message whose content it does not accept."""
        headers = message.headers or {}
        if headers.get("task") in self.tracked:
            self._fail_unbegun(str(headers.get("id")), exc, headers)

    def _fail_unbegun(self, job_id: str, error: Any, headers: Mapping[str, Any]) -> None:
        """Ends a job that Celery has failed before any code of its task was called: its content cannot be read, or its
        start cannot be stored."""
        if getattr(self.thread, "begun", None) == job_id or isinstance(error, IdTaken) or not is_job_id(job_id):
            return
        why, attempt = f"Celery failed it before it began: {type(error).__name__}: {error}", _fence(headers, job_id).attempt
        if attempt is None:
            self.end(job_id, why, lone_only=bool(headers))
            return
        try:
            discard(self.app.ledger, {(job_id, attempt): why})
        except Unavailable as away:
            self.log.error("end_not_recorded", job_id=job_id, error=str(away))

    def _task_revoked(self, sender: Any = None, request: Any = None, expired: bool = False, **_: Any) -> None:
        if sender is not None and request is not None and sender.name in self.tracked:
            self.end(request.id, "it is over its expiry time" if expired else "it was revoked")

    def _task_unknown(self, message: Any = None, name: str = "", id: str = "", **_: Any) -> None:  # noqa: A002
        """Celery has dropped the message of a task that this worker has not registered."""
        if not is_job_id(id):
            return
        if (attempt := _fence(message.headers or {}, id).attempt) is None:
            self.end(id, f"no task is registered as {name!r}", lone_only=True)
            return
        why = f"Waiting for a worker: one that took it has no task {name!r} registered"
        ledger = self.app.ledger
        try:
            put_off_elsewhere(ledger, {(id, attempt): why}, ledger.now() + micros(PUT_OFF_S))
        except Unavailable as error:  # it is found lost, and dispatched again
            self.log.error("unknown_task_not_recorded", job_id=id, error=str(error))

    # -- the worker process

    def _worker_made(self, instance: Any = None, **_: Any) -> None:
        self._track_all()
        pool = instance.pool_cls.__module__
        if pool not in _POOLS:
            names = ", ".join(name.rpartition(".")[2] for name in _POOLS)
            raise SystemExit(f"asynctask records jobs in the pools {names}, not in {pool}: give the worker another -P")
        self.queue_names = sorted(self._celery.amqp.queues.consume_from)
        try:
            self.check_schema()
        except (SchemaOutdated, ConfigError) as error:
            raise SystemExit(str(error)) from error
        self.concurrency = max(instance.concurrency, getattr(instance, "max_concurrency", None) or 0)
        if not _POOLS[pool]:
            self._record_for_children()
            return
        if not pool.endswith("thread"):
            self.concurrency = 1
        elif self._late_ack:  # threads acknowledge, and need not wait for the commit
            self._take_requests(_request_of_threads(self.acks, self._loop.wake))
            self._loop.is_woken = True
            self.acks.start()
        self.start()

    def _record_for_children(self) -> None:
        """In the prefork pool, children perform jobs and another process records them."""
        self._recording = Recording(self.app, self.process, acknowledge=_acknowledge, redelivers=self._late_ack)
        self._recording.start()
        self._loop.recording = self._recording
        if self._late_ack:
            self._take_requests(_request_of_children(self._recording, self._loop))

    def _take_requests(self, kind: type) -> None:
        """Makes Celery use this class of requests for tracked tasks."""
        self._request = kind
        for name in self.tracked:
            self._celery.tasks[name].Request = kind
        signals.task_received.connect(self._task_received, weak=False)

    def _task_received(self, request: Any = None, **_: Any) -> None:
        """Notes that Celery has a job for a thread or a child that is free soon."""
        beside, worker = self._recording or self.performer, self.tracked.get(request.name)
        if not isinstance(beside, Recording | EngineProcess) or worker is None:
            return
        if request.eta is None and is_job_id(request.id):
            delivery, payload = request.delivery_info or {}, request.message.payload
            beside.expect(self._arrival(worker, request.id, request.request_dict, delivery, *payload[:2]))

    def _child_made(self, **_: Any) -> None:
        if self._recording is None:  # the pool solo says so of the worker itself, which is set up later
            return
        with suppress(RecordingGone):  # the worker is about to end; meanwhile its jobs go back
            self.start()

    def made(self) -> Performer:
        return super().made() if self._recording is None else self._recording.join()

    def _quiet(self) -> None:
        beside = self._recording or self.performer
        if isinstance(beside, Recording | EngineProcess):
            beside.quiet()

    def _stop_worker(self) -> None:
        self.stop()
        if self._recording is not None:
            self._recording.stop()


# -- where Celery's own objects are of another kind


class _Loop:
    """The integration's part of a worker's event loop.

    The loop of the prefork pool runs in the parent of the children; ``recording`` tells it which jobs may be acknowledged.
    In the thread pool (``is_woken``) acknowledging threads leave that to the loop, which before kombu 5.7 sleeps for up to
    a second, so it is woken.
    """

    def __init__(self) -> None:
        self.recording: Recording | None = None
        self.is_woken = False
        self.runs = False
        self._hub: Any = None
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._log = get_logger("asynctask.celery")

    def enter(self, hub: Any) -> None:
        """Called when the loop begins: at the start, and on each new connection to the broker."""
        self._hub, self.runs = hub, True
        if self.recording is not None:
            hub.add_reader(self.recording.fileno(), self._hear)
        elif self.is_woken and KOMBU[:2] < (5, 7):
            if self._sockets is None:
                self._sockets = socket.socketpair()
                for each in self._sockets:
                    each.setblocking(False)
            hub.add_reader(self._sockets[0].fileno(), self._drain)

    def leave(self) -> None:
        """Called when it ends; if the worker does, it can still acknowledge now."""
        self.runs = False
        if self.recording is not None and self.recording.stopping:
            self.recording.hear_all()

    def wake(self) -> None:
        """Makes the loop do at once what threads have left to it."""
        if self._sockets is not None:
            with suppress(BlockingIOError):  # it is about to wake
                self._sockets[1].send(b".")

    def _drain(self) -> None:
        assert self._sockets is not None
        with suppress(BlockingIOError):
            self._sockets[0].recv(4_096)

    def _hear(self) -> None:
        from celery.worker import state

        assert self.recording is not None
        try:
            self.recording.hear()
        except RecordingGone:
            self._hub.remove_reader(self.recording.fileno())
            if not self.recording.stopping:
                self._log.error("recording_process_died", hint="the worker ends: have a supervisor start it again")
                state.should_stop = 1  # as on a deploy, with this exit code


def _step(engine: CeleryEngine) -> type:
    """Celery's step for the event loop of a worker."""

    class AsyncTaskLoop(bootsteps.StartStopStep):  # type: ignore[misc]
        requires = ("celery.worker.consumer.tasks:Tasks",)

        def register_with_event_loop(self, consumer: Any, hub: Any) -> None:
            engine._loop.enter(hub)

        def stop(self, consumer: Any) -> None:
            engine._loop.leave()

    return AsyncTaskLoop


def _request_of_threads(acks: HeldAcks, wake: Callable[[], None]) -> type:
    """A class of Celery's requests whose acknowledgement waits for the commit while the thread continues."""
    from celery.worker.request import Request

    class TrackedRequest(Request):  # type: ignore[misc]
        def acknowledge(self) -> None:
            if not acks.hold(self.id, self):
                self.acknowledge_now()

        def acknowledge_now(self) -> None:
            super().acknowledge()
            wake()

        def reject(self, requeue: bool = False) -> None:
            super().reject(requeue)
            wake()

    return TrackedRequest


def _request_of_children(recording: Recording, loop: _Loop) -> type:
    """The same for children of the prefork pool."""
    from celery.worker.request import Request

    class TrackedRequest(Request):  # type: ignore[misc]
        is_held = False

        def acknowledge(self) -> None:
            if self.acknowledged or not self.task.acks_late:
                super().acknowledge()
            elif not self.is_held:
                self.is_held = True
                recording.when_recorded(self.id, self)
                if not loop.runs:
                    recording.hear_all()

        def acknowledge_now(self) -> None:
            super().acknowledge()

        def reject(self, requeue: bool = False) -> None:
            if not self.is_held:
                super().reject(requeue)

    return TrackedRequest


def _acknowledge(requests: Sequence[Any]) -> None:
    """Acknowledges jobs whose outcomes are committed, on Redis in one round trip.

    kombu emulates acknowledgements there: for each it makes a client object and a round trip, a third of the processor time
    of a worker with threads."""
    kept: dict[Any, list[Any]] = {}
    for request in requests:
        qos = getattr(request.message.channel, "qos", None)
        if hasattr(qos, "_remove_from_indices"):
            kept.setdefault(qos, []).append(request.message)
    for qos, messages in kept.items():
        with suppress(Exception):  # Celery logs what is wrong, since each is then acknowledged alone
            with qos.pipe_or_acquire() as pipe:
                for message in messages:
                    qos._remove_from_indices(message.delivery_tag, pipe)
                pipe.execute()
            for message in messages:
                message._state, message.ack = "ACK", functools.partial(_note_acknowledged, qos, message.delivery_tag)
    with ExitStack() as stack:  # one after the other, whatever the others raise
        for request in requests:
            stack.callback(request.acknowledge_now)


def _note_acknowledged(qos: Any, delivery_tag: str, multiple: bool = False) -> None:
    """What is left to do for a message that Redis keeps no more."""
    ack: Any = virtual.QoS.ack
    ack(qos, delivery_tag)


def _fence(headers: Mapping[str, Any], job_id: str) -> Fence:
    """The fence in a message."""
    again: Any = headers.get(AGAIN)
    if _resent_id(again) == job_id:
        return Fence() if again[1] is None else Fence.parse(again[1])
    return Fence.parse(headers[ATTEMPT]) if ATTEMPT in headers else Fence()


def _resent_id(header: Any) -> str | None:
    """The job id in a header :data:`AGAIN`; None for anything else."""
    match header:
        case [job_id, _] if is_job_id(job_id):
            return job_id
    return None


def _mark(step: Any, job_id: str, attempt: int | None) -> None:
    """Makes a step of a signature carry the id of the job that it replaces."""
    step.options["headers"] = {**(step.options.get("headers") or {}), AGAIN: [job_id, attempt]}


def _step_of(signature: Any, job_id: str) -> Any:
    """The step of a frozen signature that has this id. Raises :class:`InputError` if none has."""
    left = [signature]
    while left:
        step = left.pop()
        if step.subtask_type == "chord":
            left.append(step.body)
        elif "tasks" in step.kwargs:  # a chain; a group has no id of a task
            left += step.tasks
        elif step.options.get("task_id") == job_id:
            return step
    raise InputError(
        f"what replaces {job_id} has no step with its id: replace a job by a task, a chain, a group or a chord"
    )


def _steps_after(request: Any) -> Sequence[Any]:
    """The steps that Celery sends after this task: the rest of its chain, and the body of its chord."""
    return [*(request.chain or ()), *([request.chord] if isinstance(request.chord, dict) else [])]


def _as_json(signature: Any) -> Any:
    """A signature as JSON values. Raises :class:`InputError` for one with other arguments."""
    try:
        return orjson.loads(orjson.dumps(signature))
    except TypeError as error:
        raise InputError(f"the ledger cannot keep what replaces a job of a list ({error}): give it JSON values") from None


def _is_bound(queue: Any, exchange: str, key: str) -> bool:
    """Whether an exchange puts messages with this routing key into a queue."""
    bindings = [(each.exchange, each.routing_key) for each in queue.bindings or ()] or [(queue.exchange, queue.routing_key)]
    for source, pattern in bindings:
        if source.name != exchange:
            continue
        if source.type == "topic":
            topics: Any = TopicExchange
            if re.fullmatch(topics(None).key_to_pattern(pattern or ""), key):
                return True
        elif source.type != "direct" or pattern == key:
            return True
    return False


def _calling_through(kind: Any, perform: _Perform) -> type:
    """The class of a task whose own ``__call__`` is performed by ``perform``: Celery calls that of the class."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return perform(functools.partial(kind.__call__, self), args, kwargs)

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {**names, "__call__": call})


def _is_answered(task: Any) -> bool:
    """Whether Celery uses the result of the running job: it is kept, or other tasks wait for it."""
    request = task.request
    kept = not task.ignore_result and task.app.conf.result_backend
    return bool(kept or request.callbacks or request.errbacks or request.chain or request.chord or request.group)


def _revived(current: _Performed, args: tuple[Any, ...]) -> Sequence[Any]:
    """The arguments of the task; an item of a Task is converted to its model."""
    is_item = current.ticket.task_id is not None and getattr(current.message.request, AGAIN, None) is None
    return revived_arguments(current.worker, args) if is_item else args
