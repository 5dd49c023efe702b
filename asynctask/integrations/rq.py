"""RQ with the tracker attached: every tracked function leaves an Event, and Tasks run on its workers.

RQ knows functions by their import path alone, so a decorator marks the tracked ones and wraps them. RQ's worker imports and
calls the wrapper. It calls the function through the middleware if :class:`TrackedWorker` performs it, and refuses to be
performed by other worker classes of RQ, which would leave no record.

RQ's worker forks a child, the work-horse, for each job. It opens no connection to the ledger: its records go to the
worker's recording process, see :mod:`asynctask.integrations.recording`. The horse itself moves its job to RQ's finished or
failed registry, after the response that the outcome is committed.

A lone job carries no fence: RQ keeps it and retries it. A job of a Task carries its attempt in its ``meta``, has no retries
in RQ, and is removed from RQ when its outcome, whatever it is, is committed; the ledger keeps it and dispatches it again.
Its id in RQ ends with the attempt, so that remains of one attempt are never taken for the next.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any, Final, cast

from asynctask.arrivals import NextRun
from asynctask.dispatch.outbox import engine_queue, own_name
from asynctask.errors import (
    ConfigError,
    IdInUse,
    InputError,
    JobInterrupted,
    JobTimeout,
    SchemaOutdated,
    UnknownWorker,
    not_installed,
)  # fmt: skip
from asynctask.exports.run import MERGER
from asynctask.integrations.base import (
    Attachable,
    Engine,
    EngineCapabilities,
    EngineProcess,
    Fence,
    IdTaken,
    Performed,
    Performer,
    PushedJob,
    RecordingGone,
    Unwanted,
    revived_arguments,
)
from asynctask.integrations.recording import ChildPerformer, Recording
from asynctask.ledger.standalone import MAX_JOB_ID, Arrival, is_job_id
from asynctask.runtime.process import collect_seldom
from asynctask.worker import Worker, declared_name

try:
    import rq
    from redis.exceptions import RedisError
    from rq import decorators
    from rq import exceptions as rq_exceptions
    from rq.exceptions import AbandonedJobError, InvalidJobOperation, NoSuchJobError
    from rq.job import JobStatus, Retry, get_current_job
    from rq.serializers import JSONSerializer, resolve_serializer
    from rq.timeouts import JobTimeoutException
    from rq.utils import now, utcformat
except ModuleNotFoundError as error:
    if error.name not in ("redis", "rq"):
        raise
    raise ModuleNotFoundError(not_installed("rq", "rq"), name="rq") from None

NAME: Final = "rq"
"""The name of this engine: the prefix of its queues, in the identities of its processes and in its Events."""

FENCE: Final = "asynctask"
"""The member of ``meta`` of a job of a Task: the job id of its Event, and its attempt."""

_FAILED_S: Final = 3_600
"""Seconds for which RQ keeps a job of a Task whose worker died; the ledger has dispatched it again by then."""

_NO_LIMIT: Final = -1
"""RQ's timeout for a job without limit."""

_HARD_S: Final = 60
"""Seconds over its limit after which RQ's worker kills a work-horse."""

_KEPT: Final = ("timeout", "result_ttl", "failure_ttl", "meta", "on_success", "on_failure", "on_stopped")
"""Options of a function's lone jobs that its other jobs have, too."""

_NO_ID: Final = f"the id of a tracked job has at most {MAX_JOB_ID} characters: send it with a shorter job_id"

_attached: Final[list[RqEngine]] = []


def attach(connection: Any, app: Attachable, *, serializer: Any = None) -> RqEngine:
    """Makes functions tracked jobs of RQ and workers of ``app``: lists can be submitted for them. Call it once, in the
    module of the functions or one that it imports, and decorate them with :meth:`RqEngine.job`.

    Arguments: ``connection`` to the Redis of RQ; ``serializer`` of the jobs, as RQ takes it, which must be that of the
    workers. None is RQ's own default, pickle: whoever can write to that Redis can then run any code in the workers. With
    ``"json"`` (and ``rq worker --serializer json``) arguments are data and nothing else. Raises :class:`ConfigError` if RQ
    is attached to ``app`` already.
    """
    # Before 2.9 RQ takes "json" for the module of that name, which returns no bytes.
    engine = RqEngine(connection, app, JSONSerializer if serializer == "json" else resolve_serializer(serializer))
    app.attach(engine)
    _attached.append(engine)
    return engine


class RetryAsked(Exception):
    """The function returned RQ's ``Retry``: it asks for another try."""


@dataclass(frozen=True, slots=True)
class _Tracked:
    """A tracked function. ``path``: where RQ imports it from."""

    worker: Worker
    path: str
    function: Callable[..., Any]
    retry: Retry | None
    options: Mapping[str, Any]


@dataclass(slots=True, kw_only=True, eq=False)
class _Performed(Performed):
    """The job that this process performs; its ``message`` is RQ's job."""

    asked: Retry | None = None
    committed: Callable[[], object] | None = None  # of an outcome that was passed on: blocks until it is committed

    @property
    def is_lone(self) -> bool:
        return self.ticket.is_lone

    @property
    def is_certain(self) -> bool:
        """Whether the function's result is the outcome, whatever RQ does from here on."""
        return self.asked is None and self.message.success_callback is None

    def settle(self, delay_s: float | None = None) -> None:
        """Passes the outcome on to be recorded, the first time. RQ must not record it before :meth:`wait` has returned."""
        if self.committed is not None:
            return
        if self.asked is not None:
            delay_s = _interval(self.asked, (self.message.number_of_retries or 0) if self.is_lone else self.ticket.retries)
        try:
            self.committed = self.performer.hand_over(self, delay_s=delay_s)
        except RecordingGone:
            os._exit(1)  # nothing can be recorded, and RQ must not count its job as done

    def wait(self) -> None:
        """Blocks until the outcome is committed. If that is impossible, ends this process."""
        committed, self.committed = self.committed, None
        try:
            if committed is not None:
                committed()
        except RecordingGone:
            os._exit(1)

    def settle_failure(self) -> None:
        """Records that RQ fails the job now, or retries it. Blocks until the outcome is committed."""
        ends = self.is_refused or self.is_final
        self.settle(None if ends else _next_try(self.message))
        self.wait()
        if ends:
            self.message.retries_left = 0


class RqEngine(Engine):
    """The queues and the tracked functions of one connection; :func:`attach` returns it."""

    title = "RQ"
    attempts = _Performed

    def __init__(self, connection: Any, app: Attachable, serializer: Any) -> None:
        # A lone job whose worker died is delivered again only if it has `retry=`, when RQ finds it abandoned.
        capabilities = EngineCapabilities(
            late_ack=True, redelivers=False, counts=True, asynchronous=True, hard_limit=True, revokes=True, exports=True
        )
        super().__init__(app, NAME, capabilities)
        self.connection = connection
        self.serializer = serializer
        self.thread = SimpleNamespace(current=None)  # what a thread of the job sends under its id is its next run, too
        self.recording: Recording | None = None
        self.refused = ""  # why the job that RQ is about to fail is not performed
        self.is_ending = False  # RQ has been told to end this process whatever it performs
        self.merge: Callable[..., Any] | None = None  # as soon as one of its functions is an export
        self._functions: dict[str, _Tracked] = {}
        self._by_path: dict[str, _Tracked] = {}

    # -- the port

    def name_of(self, target: object) -> str | None:
        return next((name for name, each in self._functions.items() if each.function is target), None)

    def away(self) -> tuple[type[BaseException], ...]:
        return RedisError, OSError

    def put(self, jobs: Sequence[PushedJob]) -> None:
        by_queue: dict[str, list[Any]] = defaultdict(list)
        for job in jobs:
            if job.attempt is not None or not self._requeue(job):
                by_queue[job.queue].append(self._data(job))
        with self.connection.pipeline() as pipeline:
            for name, datas in by_queue.items():
                self._queue(name).enqueue_many(datas, pipeline=pipeline)
            pipeline.execute()

    def _requeue(self, job: PushedJob) -> bool:
        """Requeues this lone job unchanged if RQ has it among the failed; returns whether it has."""
        try:
            self._queue(job.queue).failed_job_registry.requeue(job.job_id)
        except (InvalidJobOperation, NoSuchJobError):
            return False
        return True

    def _data(self, job: PushedJob) -> Any:
        tracked, job_id = self._functions.get(job.name), job.job_id
        if tracked is None:  # another process may have a newer release; RQ needs the path of the function
            raise UnknownWorker(job.name, self._functions)
        retry, options = tracked.retry, {**tracked.options}
        if job.attempt is not None:
            job_id = f"{job_id}-{job.attempt}"
            left = 0 if retry is None else retry.max - job.retries
            retry = Retry(max=left, interval=retry.intervals) if retry is not None and left > 0 else None
            options |= {"meta": {FENCE: [job.job_id, job.attempt]}, "result_ttl": 0, "failure_ttl": _FAILED_S}
        kept = {key: options[key] for key in _KEPT if key in options}
        return rq.Queue.prepare_data(
            tracked.path, list(job.args), dict(job.kwargs), job_id=job_id, description=job.name, retry=retry, **kept
        )

    def count(self, queues: Sequence[str]) -> Sequence[int]:
        with self.connection.pipeline(transaction=False) as pipeline:
            for queue in queues:
                pipeline.llen(self._queue(queue).key)
            return [*map(int, pipeline.execute())]

    def revoke(self, job_id: str, queue: str) -> str | None:
        """A job that is removed from where it waits cannot begin, nor can one that was cancelled or deleted in RQ."""
        waits = self._queue(own_name(queue))
        registries = waits.scheduled_job_registry, waits.deferred_job_registry
        with self.reached():
            removed = waits.remove(job_id) or any(self.connection.zrem(each.key, job_id) for each in registries)
            try:
                job = rq.job.Job.fetch(job_id, connection=self.connection, serializer=self.serializer)
            except NoSuchJobError:
                return None
            # One on no list may be with a worker that has just taken it.
            if not removed and (job.get_status() != JobStatus.CANCELED or job.get_executions()):
                return "it does not wait in RQ any more"
            job.delete()
        return None

    def ends_process(self, error: SystemExit) -> bool:
        return self.is_ending

    def understood(self, current: Any, error: BaseException) -> BaseException:
        return JobTimeout(float(current.message.timeout or 0)) if isinstance(error, JobTimeoutException) else error

    def _queue(self, name: str) -> Any:
        return rq.Queue(name, connection=self.connection, serializer=self.serializer)

    # -- tracked functions

    def queue(self, name: str = "default", **options: Any) -> TrackedQueue:
        """A queue of RQ on this engine's connection: enqueued jobs have their Event before they are sent."""
        made = TrackedQueue(name, connection=self.connection, serializer=self.serializer, **options)
        made.engine = self
        return made

    def job(
        self,
        queue: str = "default",
        *,
        name: str | None = None,
        failed_on: Collection[type[BaseException]] = (),
        retry: Retry | None = None,
        export_columns: Sequence[str] | None = None,
        rate: str | None = None,
        limit: str | None = None,
        search: Sequence[str] | str = (),
        **options: Any,
    ) -> Callable[[Callable[..., Any]], Any]:
        """A decorator that tracks a function, and gives it ``delay(...)``, as RQ's own ``@job``.

        Arguments: ``queue``, RQ's name of its queue; ``name``, that of the worker (default: the function's own);
        ``failed_on``, exceptions that are business refusals; ``retry``, RQ's ``Retry(max=..., interval=...)``
        (seconds), which applies to jobs of Tasks, too; ``export_columns``: makes a function that yields rows an export
        of these columns; ``rate``, ``limit``, ``search``: as of :meth:`asynctask.AsyncTask.worker`; ``options``: the
        others of RQ's ``@job``, such as ``timeout`` (seconds). Raises :class:`ConfigError` for a function that RQ could
        not import, or a duplicate name.
        """

        def track(function: Callable[..., Any]) -> Any:
            path = f"{function.__module__}.{getattr(function, '__qualname__', f'<{type(function).__name__}>')}"
            chosen = name or declared_name(function)
            if not inspect.isfunction(function) or "<" in path:
                raise ConfigError(f"{path} cannot be a job of RQ, which imports it by that path: define it in a module")
            if chosen in self._functions and self._functions[chosen].path != path:
                other = self._functions[chosen].path
                raise ConfigError(f"{other} is tracked as {chosen!r} already: give {path} another name=")
            worker = self.declared(
                chosen, function, queue, failed_on=failed_on, columns=export_columns, rate=rate, limit=limit, search=search
            )
            tracked = _Tracked(worker, path, self._wrapper(path, worker, function), retry, options)
            self._add(tracked)
            if worker.columns and MERGER not in self._functions:
                self._track_merger(queue)
            decorate: Any = decorators.job(self.queue(queue), connection=self.connection, retry=retry, **options)
            return decorate(tracked.function)

        return track

    def _add(self, tracked: _Tracked) -> None:
        self._functions[tracked.worker.name] = self._by_path[tracked.path] = tracked
        self.tracked.add(tracked.worker)

    def _track_merger(self, queue: str) -> None:
        path, function = f"{__name__}.{merge_parts.__name__}", self.merging()
        worker = self.declared(MERGER, function, queue)
        self.merge = self._wrapper(path, worker, function)
        self._add(_Tracked(worker, path, self.merge, None, {"timeout": _NO_LIMIT}))

    def _wrapper(self, path: str, worker: Worker, function: Callable[..., Any]) -> Callable[..., Any]:
        perform = self.writing(worker, function)

        @functools.wraps(function)
        def tracked_function(*args: Any, **kwargs: Any) -> Any:
            performed: _Performed | None = self.current
            if performed is not None and performed.message.func_name == path and not performed.is_called:
                performed.is_called = True
                return self._perform(performed, perform, args, kwargs)
            if performed is None:
                _refuse(path, self.refused)
            return function(*args, **kwargs)

        return tracked_function

    def find(self, job: Any) -> _Tracked | None:
        """The tracked function of a job of RQ. Raises the errors of its import."""
        path = job.func_name
        if path not in self._by_path and job.instance is None:
            assert job.func is not None  # imports its module, which may declare the function
        return self._by_path.get(path)

    # -- sending

    def enqueue(self, job: Any) -> None:
        """Creates the Event of a job that is about to be sent, if its function is tracked."""
        tracked = self._by_path.get(job.func_name)
        performed: _Performed | None = self.current
        if performed is not None and performed.message.id == job.id:
            if performed.is_performing:  # else RQ sends it, which retries or repeats it
                self._put_back(performed, job, tracked)
            return
        if tracked is None:
            return
        if not is_job_id(job.id):
            raise InputError(_NO_ID, code="not_recordable")
        if getattr(job, "repeats_left", None):
            raise ConfigError(f"{tracked.path} is tracked, and each run has an Event of its own: do not repeat= one job")
        self.announce(job.id, tracked.worker, job.origin, job.args, job.kwargs)

    def own_run(self, job: Any) -> _Performed | None:
        """The job whose function this process runs, if it has this id in RQ."""
        performed: _Performed | None = self.current
        is_own = performed is not None and performed.is_performing and performed.message.id == job.id
        return performed if is_own else None

    def _put_back(self, performed: _Performed, job: Any, tracked: _Tracked | None) -> None:
        """A running job is sent under its own id: its next run."""
        if tracked is None:
            raise IdInUse(
                f"{job.func_name} is not tracked, so its run under the id of this job would not be recorded: send it with"
                " another id, or decorate it"
            )
        self.send_itself(performed, tracked.worker.name, job.origin, job.args, job.kwargs, performed.message.args)
        if performed.is_lone:
            performed.message.data = job.data  # RQ saves the running job at its end, over what was sent
        else:
            job.meta[FENCE] = performed.message.meta[FENCE]  # dropped by its fence: the ledger dispatches the next one

    def scheduled_for(self, job: Any, at: datetime) -> None:
        """Notes when the next run of the running job is to start."""
        performed = self.own_run(job)
        if performed is not None and isinstance(run := performed.next_run, NextRun):
            performed.next_run = run._replace(delay_s=max(0.0, (at - now()).total_seconds()))

    def not_sent(self, job: Any, error: Exception) -> None:
        """Notes that RQ could not send a job that was announced."""
        performed = self.own_run(job)
        if performed is not None:
            performed.next_run = None
        elif job.func_name in self._by_path and is_job_id(job.id):
            why = f"it could not be sent: {type(error).__name__}: {error}"
            self.end(job.id, why, lone_only=True)

    # -- performing

    def arrive(self, job: Any) -> _Performed | str | None:
        """A job to be performed; if it must not be, the reason as text; None for one that RQ performs or fails by itself.
        Blocks while the ledger is unavailable. Raises RecordingGone."""
        is_lone = _fence(job) is None
        try:
            tracked = self.find(job)
            why = "" if tracked is not None or is_lone else "its function is not tracked in this worker"
            args, kwargs = list(job.args), dict(job.kwargs)
        except Exception as error:  # RQ fails a lone job for the same reason
            tracked, why = None, f"RQ cannot make it out: {type(error).__name__}: {error}"
        if tracked is None:
            if why:
                cast(ChildPerformer, self.started()).give_up(_arrival(job), why, delay_s=_next_try(job))
            return None if is_lone else why
        if is_lone and not is_job_id(job.id):
            return _NO_ID
        worker = tracked.worker
        params = self.params(worker, job.id, args, kwargs) if is_lone else None
        search = self.indexed(worker, args) if is_lone else ()
        arrival = replace(_arrival(job, worker.name, params), anew=is_lone and _is_anew(job), search=search)
        payload = {"class": worker.name, "args": args, "kwargs": kwargs, "jid": arrival.job_id, "queue": job.origin}
        try:
            performed: _Performed = self.begin(arrival, worker, job, payload)
        except (Unwanted, IdTaken) as error:
            return str(error)
        return performed

    def made(self) -> Performer:
        """The connection to the recording process, of the worker or of a work-horse."""
        assert self.recording is not None
        return self.recording.join()

    def _perform(
        self, performed: _Performed, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Calls the function, and sets the outcome; RQ's own steps record it."""
        if not performed.is_lone:
            args = (*revived_arguments(performed.worker, args),)

        def called() -> Any:
            result = function(*args, **kwargs)
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
            if isinstance(result, Retry):
                performed.asked = result
                raise RetryAsked("the job asks for another try")
            return result

        result: Any = None
        try:
            with _own_sends(self):
                result = self.call(performed, called)
        except BaseException as error:
            performed.error = error
        if performed.asked is not None:
            return performed.asked if performed.is_lone else None
        if isinstance(performed.error, JobInterrupted) and not performed.is_lone:
            return None  # it stopped between two steps, and the ledger dispatches it again
        if performed.error is not None and (performed.is_lone or not performed.is_refused):
            raise performed.error  # also a refusal, because RQ would treat it as a success and use the result
        return result

    def scheduled(self) -> list[str]:
        """The functions whose lone jobs RQ retries after an interval, which takes its scheduler."""
        return [
            name for name, each in self._functions.items() if each.retry is not None and any(each.retry.intervals or ())
        ]

    def record(self, worker: Any) -> Recording:
        """The recording process of a worker that is about to work. Raises :class:`ConfigError` if it could record
        nothing."""
        self.queue_names = worker.queue_names()
        try:
            self.check_schema()
        except SchemaOutdated as error:
            raise ConfigError(f"the worker could record nothing: {error}") from error

        def make() -> EngineProcess:
            _close_inherited(worker.connection)
            return self.process()

        self.performer = None
        self.recording = Recording(self.app, make, tells_lost=True)
        return self.recording


def merge_parts(said: Mapping[str, Any], progress: Mapping[str, Any]) -> Any:
    """Merges the parts of an export. RQ imports it by its path; the engine that performs the job provides what it needs."""
    merge = next((each.merge for each in _attached if each.current is not None), None)
    if merge is None:
        raise ConfigError("an export is merged by a worker of RQ when its Task closes, and by nobody else")
    return merge(said, progress)


# -- what users name on RQ's command line


class TrackedQueue(rq.Queue):
    """A queue of RQ that creates the Event of a tracked function's job before it sends the job.

    ``engine``: the result of :func:`attach`; without it, the only one attached in this process. A job that another queue
    sends gets its Event when a worker takes it.
    """

    engine: RqEngine | None = None
    _made: list[Any] | None = None  # the jobs of a call of enqueue_many

    def create_job(self, *args: Any, **options: Any) -> Any:
        job: Any = super().create_job(*args, **options)
        if self.is_async:
            _engine_of(self).enqueue(job)
            job.is_announced = True
            if self._made is not None:
                self._made.append(job)
        return job

    def enqueue_call(self, *args: Any, **options: Any) -> Any:
        job_id, kind = options.get("job_id"), getattr(rq_exceptions, "DuplicateJobError", None)  # not in the oldest RQ
        if kind and options.get("unique") and job_id and rq.job.Job.exists(job_id, connection=self.connection):
            raise kind(f"a job with the id {job_id} exists in RQ")  # as RQ does, before its Event is touched
        return super().enqueue_call(*args, **options)

    def enqueue_many(self, *args: Any, **options: Any) -> Any:
        """If one of them is refused, or cannot be sent, none of those that RQ has not sent waits in the ledger."""
        kept, self._made = self._made, []
        try:
            return super().enqueue_many(*args, **options)
        except Exception as error:
            for job in self._made:
                if not _is_sent(job, self.connection):
                    _engine_of(self).not_sent(job, error)
            raise
        finally:
            self._made = kept

    def enqueue_job(self, job: Any, *args: Any, **options: Any) -> Any:
        """Also sends a job that was made elsewhere, again for example."""
        with self._announced(job):
            return super().enqueue_job(job, *args, **options)

    def schedule_job(self, job: Any, datetime: datetime, *args: Any, **options: Any) -> Any:
        with self._announced(job):
            _engine_of(self).scheduled_for(job, datetime)
            return super().schedule_job(job, datetime, *args, **options)

    @contextmanager
    def _announced(self, job: Any) -> Iterator[None]:
        if not self.is_async:
            yield
            return
        engine = _engine_of(self)
        if not getattr(job, "is_announced", False):
            engine.enqueue(job)
        job.is_announced = False  # for this time
        try:
            yield
        except Exception as error:
            engine.not_sent(job, error)
            raise


@contextmanager
def _own_sends(engine: RqEngine) -> Iterator[None]:
    """Within it, what the running job sends under its own id through a plain queue of RQ is noted, too."""
    kept = rq.Queue.create_job, rq.Queue.enqueue_job, rq.Queue.schedule_job
    create, enqueue, schedule = kept

    def create_job(self: Any, *args: Any, **options: Any) -> Any:
        job: Any = create(self, *args, **options)
        if not isinstance(self, TrackedQueue) and engine.own_run(job) is not None:
            engine.enqueue(job)
            job.is_announced = True
        return job

    def enqueue_job(self: Any, job: Any, *args: Any, **options: Any) -> Any:
        is_noted = isinstance(self, TrackedQueue) or getattr(job, "is_announced", False)
        if not is_noted and engine.own_run(job) is not None:
            engine.enqueue(job)
        return enqueue(self, job, *args, **options)

    def schedule_job(self: Any, job: Any, at: datetime, *args: Any, **options: Any) -> Any:
        engine.scheduled_for(job, at)
        return schedule(self, job, at, *args, **options)

    made: tuple[Any, Any, Any] = (create_job, enqueue_job, schedule_job)
    rq.Queue.create_job, rq.Queue.enqueue_job, rq.Queue.schedule_job = made  # type: ignore[method-assign]
    try:
        yield
    finally:
        rq.Queue.create_job, rq.Queue.enqueue_job, rq.Queue.schedule_job = kept  # type: ignore[method-assign]


class _Recording:
    """Makes a worker class of RQ record. The methods are RQ's own, called by RQ; each records before it lets RQ
    continue."""

    engine: RqEngine | None = None
    _recording: Recording
    _horse = 0
    """The last work-horse."""

    _has_lost_it = False
    _is_performing = False

    # -- the worker

    def work(self: Any, *args: Any, **options: Any) -> Any:
        self.engine = engine = _engine_of(self)
        if self.serializer is not engine.serializer:
            ours, theirs = (getattr(each, "__name__", each) for each in (self.serializer, engine.serializer))
            raise ConfigError(f"the worker reads jobs with {ours}, and attach() sends them with {theirs}: set --serializer")
        if not options.get("with_scheduler") and (names := engine.scheduled()):
            text = "worker %s: retries of lone jobs of %s wait for a scheduler of RQ: one worker needs --with-scheduler"
            self.log.warning(text, self.name, ", ".join(names))
        self._recording = engine.record(self)
        self._recording.start()
        self.push_exc_handler(self._note_abandoned)
        try:
            worked = super().work(*args, **options)  # type: ignore[misc]
        finally:
            self._recording.stop()
        if self._has_lost_it:
            raise SystemExit(1)
        return worked

    def _install_signal_handlers(self: Any) -> None:
        super()._install_signal_handlers()  # type: ignore[misc]
        signal.signal(signal.SIGCHLD, self._child_ended)

    def _child_ended(self: Any, number: int, frame: Any) -> None:
        """A worker whose recording process has died ends as on a deploy, to be restarted by its supervisor."""
        if self._recording.has_died() and not self._has_lost_it:
            self._has_lost_it = True
            self.log.error("worker %s: its recording process has died, so it stops; start it again", self.name)
            self._stop_requested = True  # logging swallows what a signal handler raises while it writes
            self.request_stop(number, frame)

    def handle_warm_shutdown_request(self: Any) -> None:
        self._recording.quiet()
        super().handle_warm_shutdown_request()  # type: ignore[misc]

    def request_force_stop(self: Any, *args: Any, **options: Any) -> None:
        self.engine.is_ending = True
        super().request_force_stop(*args, **options)  # type: ignore[misc]

    def maintain_heartbeats(self: Any, job: Any, *args: Any, **options: Any) -> None:
        if self._recording.waiting:
            job.started_at = now()  # RQ kills horses that take far too long; this one waits for the ledger
        super().maintain_heartbeats(job, *args, **options)  # type: ignore[misc]

    def execute_job(self: Any, job: Any, *args: Any, **options: Any) -> Any:
        self._recording.expect(_arrival(job))
        return super().execute_job(job, *args, **options)  # type: ignore[misc]

    # -- performing, in the work-horse or in the only process

    def perform_job(self: Any, job: Any, queue: Any, *args: Any, **options: Any) -> bool:
        engine, execution = self.engine, options.get("execution", args[0] if args else None)
        try:
            performed = engine.arrive(job)
        except RecordingGone:
            self._leave(job, queue, execution, requeue=True)
            self._child_ended(signal.SIGCHLD, None)
            return False
        if isinstance(performed, str):
            self.log.warning("job %s is not performed: %s", job.id, performed)
            if _fence(job) is not None:
                self._leave(job, queue, execution)
                return False
            job.retries_left = 0  # RQ fails a lone one, because the wrapper refuses to be called
            engine.refused, performed = performed, None
        engine.thread.current, self._is_performing = performed, True
        try:
            return bool(super().perform_job(job, queue, *args, **options))  # type: ignore[misc]
        finally:
            engine.thread.current, engine.refused, self._is_performing = None, "", False

    def _performed(self: Any, job: Any) -> _Performed | None:
        performed: _Performed | None = self.engine.current
        return performed if performed is not None and performed.message is job else None

    def _leave(self: Any, job: Any, queue: Any, execution: Any, *, requeue: bool = False) -> None:
        """Removes a job of a Task from RQ; ``requeue``: a job is returned to its queue."""
        with self.connection.pipeline() as pipeline:
            self.cleanup_execution(job, pipeline=pipeline, **({} if execution is None else {"execution": execution}))
            pipeline.lrem(queue.intermediate_queue_key, 1, job.id)
            if requeue:
                queue.push_job_id(job.id, pipeline=pipeline, at_front=True)
            else:
                pipeline.delete(job.key)
            pipeline.execute()

    # -- outcomes: recorded before RQ's own record

    def handle_execution_ended(self: Any, job: Any, *args: Any, **options: Any) -> None:
        """Lets the commit of a success run while RQ prepares its own record."""
        if sys.exception() is None and (performed := self._performed(job)) is not None and performed.is_certain:
            performed.settle()
        super().handle_execution_ended(job, *args, **options)  # type: ignore[misc]

    def handle_job_success(self: Any, job: Any, *args: Any, **options: Any) -> None:
        if (performed := self._performed(job)) is not None:
            performed.settle()
        super().handle_job_success(job, *args, **options)  # type: ignore[misc]

    def cleanup_execution(self: Any, job: Any, *args: Any, **options: Any) -> None:
        """RQ's last step before its own record of an outcome."""
        if (performed := self._performed(job)) is not None:
            performed.wait()
        super().cleanup_execution(job, *args, **options)  # type: ignore[misc]

    def handle_job_retry(self: Any, job: Any, *args: Any, **options: Any) -> None:
        if (performed := self._performed(job)) is not None:
            performed.settle()
            performed.wait()
        super().handle_job_retry(job, *args, **options)  # type: ignore[misc]

    def handle_job_failure(self: Any, job: Any, queue: Any, *args: Any, **options: Any) -> None:
        if (performed := self._performed(job)) is not None:
            if (error := sys.exception()) is not None and not performed.has_failed:
                self.engine.conclude(performed, error)
            performed.settle_failure()
        elif not self._is_performing:
            try:
                self._settle_lost(job)
            except RecordingGone:
                self.log.error("job %s: its end is not recorded; RQ finds it abandoned, the ledger recovers it", job.id)
                return
        if _fence(job) is None:
            super().handle_job_failure(job, queue, *args, **options)  # type: ignore[misc]
        else:
            self._leave(job, queue, options.get("execution"))

    def _settle_lost(self: Any, job: Any) -> None:
        """Records a job whose horse died."""
        why = "it was stopped with the tools of RQ" if self._stopped_job_id == job.id else ""
        delay_s, timeout_s = None if why else _next_try(job), None if why else _limit_passed(job)
        if self.engine.started().lost(self._horse, _arrival(job), why=why, delay_s=delay_s, timeout_s=timeout_s):
            job.retries_left = 0

    def _note_abandoned(self: Any, job: Any, kind: Any, *_: Any) -> None:
        """RQ has found that a job's worker died long ago; it retries the job or fails it now."""
        if kind is AbandonedJobError and _fence(job) is None:
            self.engine.started().lost(0, _arrival(job), delay_s=_next_try(job))


class TrackedWorker(_Recording, rq.Worker):
    """RQ's worker, with the outcome of each tracked job in the ledger before RQ records it. ``engine``: the result of
    :func:`attach`; without it, the only one attached in this process."""

    def work(self: Any, *args: Any, **options: Any) -> Any:
        _look_up_version(self.connection)
        collect_seldom()  # a garbage collection in a work-horse would copy all memory shared with the worker
        return super().work(*args, **options)

    def fork_work_horse(self: Any, *args: Any, **options: Any) -> None:
        super().fork_work_horse(*args, **options)
        self._horse = self._horse_pid  # RQ forgets it when it has waited for it


class TrackedSimpleWorker(_Recording, rq.SimpleWorker):
    """The same for RQ's worker that performs in its own process."""


# -- helpers


def _engine_of(owner: Any) -> RqEngine:
    """The engine named by a queue or a worker, or else the only one."""
    if owner.engine is None and len(_attached) != 1:
        how = "name one in its attribute engine" if _attached else "load the module that calls attach(), with rq worker -c"
        raise ConfigError(f"{type(owner).__name__} belongs to no engine, and {len(_attached)} are attached here: {how}")
    return cast(RqEngine, owner.engine or _attached[0])


def _is_sent(job: Any, connection: Any) -> bool:
    """Whether RQ keeps this very job, and no earlier one of its id; False if Redis does not answer."""
    with suppress(RedisError):
        return bool(connection.hget(job.key, "created_at") == utcformat(job.created_at).encode())
    return False


def _fence(job: Any) -> tuple[str, Fence] | None:
    """The job id and the fence of a job of a Task; None for a job that a program sent, which may have given it the meta of
    another one."""
    if not isinstance(job.meta, dict) or FENCE not in job.meta:
        return None
    match job.meta[FENCE]:
        case [job_id, attempt] if is_job_id(job_id):
            return (job_id, Fence.parse(attempt)) if job.id.startswith(f"{job_id}-") else None
    return job.id, Fence(broken="no pair of a job id and an attempt")


def _arrival(job: Any, name: str = "", params: Any = None) -> Arrival:
    """A job of RQ as the tracker knows it."""
    job_id, (attempt, broken) = _fence(job) or (job.id, Fence())
    return Arrival(job_id, attempt, name, engine_queue(NAME, job.origin), params, broken=broken)


def _is_anew(job: Any) -> bool:
    """Whether a job was sent since RQ has recorded the end of its last try: one that RQ finds abandoned has none."""
    if job.started_at is None:
        return True
    return bool(job.ended_at and job.enqueued_at and job.started_at <= job.ended_at < job.enqueued_at)


def _next_try(job: Any) -> float | None:
    """Seconds before another try by the job's own ``Retry``; None if it has none left. RQ retries lone jobs only."""
    return float(job.get_retry_interval()) if job.retries_left and job.retries_left > 0 else None


def _interval(retry: Retry, retries: int) -> float | None:
    """The same by a ``Retry`` that a function has returned, after this many retries."""
    if retries >= retry.max:
        return None
    return float(retry.intervals[min(len(retry.intervals) - 1, retries)]) if retry.intervals else 0.0


def _limit_passed(job: Any) -> float | None:
    """The time limit of a job that RQ's worker killed over it; None for one that died otherwise."""
    known = job.timeout and job.timeout > 0 and job.started_at and job.ended_at
    return float(job.timeout) if known and (job.ended_at - job.started_at).total_seconds() > job.timeout + _HARD_S else None


def _refuse(path: str, why: str) -> None:
    """Raises if a worker performs a tracked function without recording it, or must not perform this job (``why``)."""
    job = get_current_job()
    if why:
        raise IdInUse(f"job {'' if job is None else job.id} is not performed: {why}")
    if job is not None and job.worker_name not in (None, "", "sync") and job.func_name == path:
        worker = f"{__name__}.{TrackedWorker.__name__}"
        raise ConfigError(f"{path} is tracked: it is called by --worker-class {worker} only, once for each of its jobs")


def _look_up_version(connection: Any) -> None:
    """Makes a worker look up its version of redis-py once, and not each of its work-horses for each of two connections.

    From 7.2 on, a connection that is told neither name nor version of its client reads them from the metadata of the
    installed package, which it parses: 3 of the 20 ms of processor time of a work-horse.
    """
    try:
        from redis.driver_info import DriverInfo
    except ModuleNotFoundError:
        return
    settings = connection.connection_pool.connection_kwargs
    if not settings.keys() & {"driver_info", "lib_name", "lib_version"}:
        settings["driver_info"] = DriverInfo()


def _close_inherited(connection: Any) -> None:
    """Closes a forked process's copies of its parent's connections.

    Redis takes the worker for alive as long as a copy is open, and would hand it a job that it waited for when it died.
    """
    pool = connection.connection_pool
    for each in (*getattr(pool, "_available_connections", ()), *getattr(pool, "_in_use_connections", ())):
        each.disconnect()  # closes the descriptor only, in a process that did not open it
