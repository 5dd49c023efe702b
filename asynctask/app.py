"""The application: registers workers, pushes jobs and submits Tasks.

Connections and threads are created at their first use; only the configuration is read at once, from the environment. After
a fork, the child creates them again.
"""

from __future__ import annotations

import collections.abc as abc
import inspect
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from itertools import chain, islice
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, Unpack, overload

from asynctask.access import LINKABLE, MAX_LINK_S, Link, sign
from asynctask.brokers.admin import MAX_PAGE
from asynctask.clock import SECOND, Clock, Ids, SystemClock, SystemIds, from_datetime, micros, rfc3339
from asynctask.config import HOW_TO_MAKE_ONE, WHSEC_FORM, check_setting, load
from asynctask.core.transitions import CALLBACKS, MERGE
from asynctask.errors import AsyncTaskError, ConfigError, InputError, NoLinks, UnknownWorker
from asynctask.exports.files import ResultFile
from asynctask.exports.run import MERGER, check_columns, check_format, merge, result_of, write_shard
from asynctask.integrations.remote import JobRecord, Recorded, RemoteWorkers, Reporter
from asynctask.iterable import Iterable
from asynctask.job import GENERATOR, CurrentJob, in_this_process, refuse_work, work_of
from asynctask.ledger import doctor as doctors
from asynctask.ledger import history as minutes
from asynctask.ledger import processes as recovery
from asynctask.ledger import progress, queries, standalone
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger
from asynctask.ledger.foreign import engine_of
from asynctask.ledger.history import By, History, Step
from asynctask.ledger.progress import Changed
from asynctask.ledger.purge import Old, Purge, Purged, count_old
from asynctask.ledger.rates import declared as declared_rates
from asynctask.ledger.schedules import MISSED, Missed, Schedule, Schedules, Ticks
from asynctask.ledger.search import Wanted
from asynctask.ledger.tasks import NewCallback, TaskRow
from asynctask.lists.dry_run import DryRun, Marking
from asynctask.lists.items import MIXED, ItemShape, MixedShape
from asynctask.lists.problems import fault
from asynctask.lists.rows import SMALL_FILE, ListSource, remove_list
from asynctask.lists.uploads import StoredFile, list_file
from asynctask.logs import get_logger
from asynctask.maintenance import Maintenance
from asynctask.middleware.contrib import log_jobs
from asynctask.pushing import Pushing
from asynctask.runtime.launcher import Launcher, Queues
from asynctask.sidekiq.payload import UNTRACKED, When, check_names
from asynctask.submission import MOST_ADDED, Submission, check_fields
from asynctask.supervisor import Pulse
from asynctask.task import Addition, TaskHandle, checked_statuses
from asynctask.webhooks import webhook_worker
from asynctask.wiring import OnDemand
from asynctask.worker import (
    TRACKED_RETRIES,
    WEBHOOK,
    Actor,
    Callback,
    CallbackOption,
    Check,
    EngineTask,
    Performs,
    Priority,
    Register,
    RetryIn,
    Takes,
    TaskOptions,
    Worker,
    WorkerOptions,
    as_callbacks,
    check_hook,
    checked_items,
    declared_name,
    describe,
    is_span,
)

if TYPE_CHECKING:
    from pydantic import BaseModel

    from asynctask.lists.options import SubmitOptions
    from asynctask.lists.preview import Preview
    from asynctask.sidekiq.client import RemoteWorker

EVENTS: Mapping[str, tuple[str, ...]] = {
    "startup": (), "quiet": (), "shutdown": (), "error": ("error", "context"), "death": ("job", "error"),
    "task_finished": ("progress",),
}  # fmt: skip
"""What hooks are called at, and with."""

_OPTIONS = (
    "name", "queue", "retry", "priority", "timeout", "failed_on", "use_task_event", "unique", "key", "search",
    "retry_in", "retries_exhausted", "batch", "rate", "limit", *CALLBACKS, *UNTRACKED,
)  # fmt: skip
"""The options of :meth:`AsyncTask.worker`."""

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Model = TypeVar("Model", bound="BaseModel")
Named = str | Actor | EngineTask
AnyWorker = Named | Worker[..., Any]
RowsOf = Callable[[Any], abc.Iterable[Any]]
Target = TypeVar("Target", bound=Callable[..., Any])
Scheduled = TypeVar("Scheduled")

_NOT_SCHEDULED = {"resubmit_of", "idempotency_key", "who", "start_at", "dry_run", "parent"}
"""Options of a submission that a schedule cannot have."""


class AsyncTask(OnDemand):
    """One application. A process can have several.

    Arguments: fields of :class:`~asynctask.config.Config`; missing ones are read from ``environ`` (default: the process's
    environment), then from the defaults. ``clock`` and ``ids`` are for tests. Raises
    :class:`~asynctask.errors.ConfigError`.
    """

    Iterable = Iterable
    """Base of worker classes that process many elements in one job: see :class:`asynctask.iterable.Iterable`."""

    def __init__(
        self,
        *,
        environ: Mapping[str, str] | None = None,
        clock: Clock | None = None,
        ids: Ids | None = None,
        **settings: Any,
    ) -> None:
        config, self.origins = load(settings, os.environ if environ is None else environ)
        own_clock = clock or SystemClock()
        super().__init__(config, own_clock, ids or SystemIds(own_clock))
        self._hooks: dict[str, list[Callable[..., Any]]] = {name: [] for name in EVENTS}
        self._observers = _Observers(self._fire_finished)
        self._log = get_logger("asynctask")
        self._remote = RemoteWorkers(self)
        self._internal[WEBHOOK] = webhook_worker(self)
        if config.log_level == "debug":
            self.server_middleware.add(log_jobs(self.clock))
        self._pushing = Pushing(config, self.clock, self.ids, self.client_middleware, self._made)
        self._schedules = Schedules(lambda: self.ledger, self.ids, self.submit_items)
        self._unregistered: list[tuple[Any, Callable[[Any], Any]]] = []  # what app.every has, and is no worker yet

    def close(self) -> None:
        """Stops services and closes connections; later use creates them again."""
        self._pushing.close()
        super().close()

    # -- workers and hooks

    @overload
    def worker(self, target: None = None, /, **options: Unpack[WorkerOptions]) -> Register: ...

    @overload
    def worker(self, target: type[Performs[P, R]], /, **options: Unpack[WorkerOptions]) -> Worker[P, R]: ...

    @overload
    def worker(self, target: Callable[P, R], /, **options: Unpack[WorkerOptions]) -> Worker[P, R]: ...

    def worker(
        self,
        target: Any = None,
        /,
        *,
        name: str | None = None,
        queue: str = "default",
        retry: int | bool | None = None,
        priority: int = Priority.USER_MID,
        timeout: float | None = None,
        failed_on: Sequence[type[BaseException]] | type[BaseException] = (),
        use_task_event: bool = True,
        unique: Sequence[str] | str = (),
        key: str | None = None,
        search: Sequence[str] | str = (),
        checks: Sequence[Check] | Check = (),
        retry_in: RetryIn | None = None,
        retries_exhausted: Callable[[CurrentJob, BaseException], Any] | None = None,
        on_complete: CallbackOption | None = None,
        on_success: CallbackOption | None = None,
        on_failure: CallbackOption | None = None,
        batch: bool = False,
        rate: str | None = None,
        limit: str | None = None,
        **options: Any,
    ) -> Any:
        """Registers a function or class as a worker; a decorator, with or without options.

        Arguments: ``name`` (default: the function's); ``retry``, a number of retries, True or False (default: 3 for tracked
        jobs, 25 for others); ``timeout`` in seconds; ``failed_on``, exceptions that are business refusals;
        ``use_task_event=False``: its jobs are not tracked; ``unique``, ``key``, ``on_complete``, ``on_success`` and
        ``on_failure``: defaults for these options of :meth:`submit`; ``search``: up to five fields by whose values
        :meth:`search` finds its jobs; ``checks``: each is called as ``check(action, event)``
        before a user's ``"stop"`` or ``"start"`` of one of its jobs, and refuses with a reason, returned or raised as
        :class:`NormalException`; ``retry_in(count, error, job)`` returns the seconds before a retry, ``"kill"`` or
        ``"discard"``; ``retries_exhausted(job, error)`` is called when no retry is left; ``batch``: the function takes a
        list of items and reports on them with ``current_job().fail(i, reason)``, ``error`` and ``finish``; ``rate``: how
        many jobs of its Tasks may start in a time, in all processes, such as ``5/s``, ``300/min`` or ``1000/h``; ``limit``:
        a name under which several workers share one rate (default: the worker's own). ``options`` of an untracked worker:
        ``tags``, ``backtrace``, ``dead``, ``retry_for``, ``retry_queue``, ``members`` (:mod:`asynctask.sidekiq.payload`).
        Raises :class:`ConfigError`.
        """
        if retry is None:
            retry = TRACKED_RETRIES if use_task_event else True
        callbacks = self._default_callbacks(on_complete=on_complete, on_success=on_success, on_failure=on_failure)

        def register(found: Any) -> Worker:
            given, function, is_async, model = describe(found)
            names = (search,) if isinstance(search, str) else tuple(search)
            shape = ItemShape(model, max_item_bytes=self.config.max_item_bytes, search=names)
            worker = Worker(
                name=name or given,
                function=function,
                queue=queue,
                retry=retry,
                priority=int(priority),
                timeout=timeout,
                failed_on=(failed_on,) if isinstance(failed_on, type) else tuple(failed_on),
                use_task_event=use_task_event,
                unique=(unique,) if isinstance(unique, str) else tuple(unique),
                key=key,
                search=shape.search,
                checks=(checks,) if callable(checks) else tuple(checks),
                retry_in=retry_in,
                retries_exhausted=retries_exhausted,
                is_async=is_async,
                model=model,
                shape=shape,
                pusher=self,
                options=options,
                callbacks=callbacks,
                batch=batch,
                rate=rate,
                limit=limit,
                is_iterable=inspect.isclass(found) and issubclass(found, Iterable),
            )
            _check_worker(worker, found)
            if worker.name in self._workers or worker.name in self._internal:
                raise ConfigError(f"two workers are named {worker.name!r}; give one of them another name=")
            declared_rates({**self.workers, worker.name: worker})
            self._workers[worker.name] = worker
            waiting, self._unregistered = self._unregistered, []
            for of, schedule in waiting:
                if of is found or of == worker.name:
                    schedule(worker)
                else:
                    self._unregistered.append((of, schedule))
            return self._workers[worker.name]

        return register if target is None else register(target)

    def export(self, *, columns: Sequence[str], **options: Unpack[WorkerOptions]) -> Callable[[RowsOf], Worker[..., Any]]:
        """Registers a function as an export. The function gets one shard (any JSON value) and yields rows: dicts with these
        ``columns``, or sequences in their order.

        ``options`` as in :meth:`worker`; :meth:`submit_export` submits shards. A task of an attached engine has the option
        ``export_columns`` instead. Raises :class:`ConfigError`.
        """

        def register(function: RowsOf) -> Worker[..., Any]:
            names = check_columns(columns, function)

            def perform(shard: Any) -> dict[str, int]:
                return write_shard(self, names, lambda: function(shard))

            perform.__name__, perform.__doc__ = declared_name(function), function.__doc__
            worker: Worker[..., Any] = self.worker(**options)(perform)
            if not worker.use_task_event:
                raise ConfigError(f"worker {worker.name}: a shard is an item of a Task, so an export must be tracked")
            self._workers[worker.name] = worker = replace(worker, columns=names, rows_of=function)
            return worker

        if MERGER not in self._internal:

            def merge_parts(said: dict[str, Any], progress: dict[str, Any]) -> dict[str, Any]:
                """Merges the parts of an export."""
                return merge(self, progress)

            self.worker(merge_parts, name=MERGER, queue=self.config.callback_queue)
            self._internal[MERGER] = self._workers.pop(MERGER)  # only the close of an export calls it
        return register

    @property
    def exports(self) -> Mapping[str, Worker]:
        """The workers that are exports, by name, including those of attached engines."""
        return {name: worker for name, worker in self.workers.items() if worker.columns}

    @overload
    def submit_export(
        self,
        worker: AnyWorker,
        shards: abc.Iterable[Any],
        *,
        format: str = "csv",
        dry_run: Literal[True],
        **options: Unpack[TaskOptions],
    ) -> DryRun: ...

    @overload
    def submit_export(
        self,
        worker: AnyWorker,
        shards: abc.Iterable[Any],
        *,
        format: str = "csv",
        dry_run: Literal[False] = False,
        **options: Unpack[TaskOptions],
    ) -> TaskHandle: ...

    def submit_export(
        self,
        worker: Any,
        shards: abc.Iterable[Any],
        *,
        format: str = "csv",  # noqa: A002
        **options: Any,
    ) -> TaskHandle | DryRun:
        """Creates a Task of ``shards``, whose rows are merged into one file of the ``format`` ``csv``, ``csv.gz``,
        ``ndjson``, ``xlsx`` or ``parquet``.

        The Task is ``finalizing`` until the file is complete; :meth:`result` returns the file. Options as in
        :meth:`submit`. Raises :class:`InputError`, :class:`UnknownWorker`; :class:`Unavailable` if the library for
        ``results_url`` is not installed.
        """
        shards = list(checked_items(shards))
        return self.hand_in(Submission(worker, shards, self._checked(options), form=format, is_kept=True))

    @overload
    def every(
        self,
        schedule: float | timedelta | str,
        worker: None = None,
        /,
        *,
        timezone: str = "UTC",
        missed: Missed = "skip",
        overlap: bool = False,
        name: str | None = None,
        items: Callable[[datetime], abc.Iterable[Any]] | None = None,
        **options: Unpack[TaskOptions],
    ) -> Callable[[Scheduled], Scheduled]: ...

    @overload
    def every(
        self,
        schedule: float | timedelta | str,
        worker: Scheduled,
        /,
        *,
        timezone: str = "UTC",
        missed: Missed = "skip",
        overlap: bool = False,
        name: str | None = None,
        items: Callable[[datetime], abc.Iterable[Any]] | None = None,
        **options: Unpack[TaskOptions],
    ) -> Scheduled: ...

    def every(
        self,
        schedule: float | timedelta | str,
        worker: Any = None,
        /,
        *,
        timezone: str = "UTC",
        missed: Missed = "skip",
        overlap: bool = False,
        name: str | None = None,
        items: Callable[[datetime], abc.Iterable[Any]] | None = None,
        **options: Any,
    ) -> Any:
        """Submits a Task for a worker periodically, once for each tick, whatever number of processes run. A decorator of a
        worker, above or below :meth:`worker`, or called with one: a worker, its name, or a task of an attached engine.

        ``schedule``: an interval in seconds, or a cron expression of five fields (``"@daily"`` and its like, too) in the
        local time of ``timezone``. ``items(tick)`` returns the items of the Task, from the time of the tick, an aware
        datetime; without it the Task is one job, whose item is ``{"tick": time}`` unless the worker takes none.
        ``missed``: of the ticks at which no process ran, ``"skip"`` makes up for none, ``"once"`` for the last, ``"all"``
        for the last 1,000.
        ``overlap``: a tick submits its Task although the one before is open; without it such a tick is skipped, or with
        ``missed="all"`` waits its turn. ``name`` (default: the worker's) is unique. ``options`` as in :meth:`submit`.
        Raises :class:`ConfigError`.
        """
        ticks = Ticks(schedule, timezone)
        if missed not in MISSED:
            raise ConfigError(f"schedule {schedule!r}: missed is one of {', '.join(MISSED)}, not {missed!r:.80}")
        if items is not None:
            _check_items(items)
        if refused := sorted(_NOT_SCHEDULED & options.keys()):
            raise ConfigError(f"schedule {schedule!r}: leave out {', '.join(refused)}, which holds for one list")
        try:
            self._checked(options)
        except InputError as error:
            raise ConfigError(f"schedule {schedule!r}: {error}") from None

        def declare(target: Any) -> Any:
            of = self._name_of(target)
            if of is None or (found := self.workers.get(of)) is None:
                # @app.worker follows, or the engine is attached later.
                self._unregistered.append((target, declare))
                return target
            fit = _taking_a_tick(found, items is not None)
            if found.engine is None:
                self._workers[of] = fit
                target = fit if isinstance(target, Worker) else target
            self._schedules.add(Schedule(name or of, of, ticks, missed, overlap, items, options))
            return target

        return declare if worker is None else declare(worker)

    @property
    def schedules(self) -> Schedules:
        """The schedules that :meth:`every` declares, and those of other programs in the same database."""
        waiting, self._unregistered = self._unregistered, []
        for target, declare in waiting:
            declare(target)
        return self._schedules

    def maintenance(self, ledger: Ledger) -> Maintenance:
        """As of :class:`~asynctask.wiring.OnDemand`. Raises :class:`ConfigError` for a schedule of what is no worker."""
        made = super().maintenance(ledger)
        for target, _ in self._unregistered:
            if isinstance(target, str):
                raise ConfigError(f"app.every: {UnknownWorker(target, self.workers)}")
            raise ConfigError(f"app.every has {target!r:.200}, which is no worker: put @app.worker above or below it")
        return made

    def result(self, task_id: int) -> ResultFile:
        """The file of an export, with its manifest. Raises :class:`NotFound`; :class:`Conflict` if there is no file yet."""
        return result_of(self, task_id, self.progress(task_id))

    def on(self, event: str) -> Callable[[Target], Target]:
        """Decorator: calls the function at ``startup``, ``quiet``, ``shutdown`` (without arguments), ``error`` (error,
        context) or ``death`` (job, error) of a worker process, or at ``task_finished`` (the progress object) in the process
        that closed the Task.

        ``context``: a dict with ``job_id``, ``task_id``, ``worker``, ``attempt``, ``args``, and ``follow``: ``retry``,
        ``dead`` or ``discard``. ``job``: what :func:`~asynctask.current_job` gives.

        A Task closes when its last item has ended, before its callbacks run. ``task_finished`` is called at most once for
        each generation, and not at all if that process dies: use ``on_complete`` for actions that must not be lost. Raises
        :class:`ConfigError` for another event, and a function that does not take these arguments.
        """
        if event not in self._hooks:
            raise ConfigError(f"no such event: {event!r}; there are {', '.join(EVENTS)}")

        def register(function: Target) -> Target:
            check_hook(f"a hook of {event}", function)
            _check_takes(f"a hook of {event}", function, EVENTS[event])
            self._hooks[event].append(function)
            return function

        return register

    def carry(self, function: Callable[[], Mapping[str, Any]]) -> Callable[[], Mapping[str, Any]]:
        """Decorator: adds the members that the function returns to the ``context`` of every list that is submitted, in
        Python, over HTTP and on the command line: the user's language, or the trace of the request.

        It is called in the thread that submits. A member that the submission itself gives wins. What is added is no part of
        what an ``Idempotency-Key`` identifies. Raises :class:`ConfigError` for a function that is no plain one.
        """
        check_hook("a carrier", function)
        self._carriers.append(function)
        return function

    def fire(self, event: str, *args: Any) -> None:
        """Calls the hooks of an event (for ``shutdown`` in reverse order); logs their exceptions."""
        hooks = self._hooks[event]
        for hook in reversed(hooks) if event in ("quiet", "shutdown") else list(hooks):
            try:
                refuse_work(in_this_process(hook, *args))
            except Exception:
                self._log.exception("hook_failed", hook=getattr(hook, "__qualname__", repr(hook)), of=event)

    # -- pushing single jobs (worker.perform_async and its like)

    def push(
        self, worker: Worker, args: abc.Iterable[Sequence[Any]], *, at: When | None = None, options: Mapping[str, Any]
    ) -> list[str | None]:
        """Pushes a job for each element of ``args``; see :class:`~asynctask.worker.Worker`. Raises :class:`InputError`."""
        return self._pushing.push(worker, args, at=at, options=options)

    def perform(self, name: str, *args: Any, job_id: str | None = None) -> str:
        """Creates one tracked job of a registered worker and returns its job id. The arguments may be untrusted: the
        worker's model validates the first one. ``job_id`` as in :meth:`asynctask.worker.Worker.set`.

        Raises :class:`UnknownWorker`; :class:`InputError` for arguments that the worker does not accept, or if a client
        middleware stops the job; :class:`~asynctask.errors.IdInUse`; LedgerUnavailable.
        """
        worker = self._find(name)
        if worker.engine is not None or not worker.use_task_event:
            why = f"{worker.engine} performs it" if worker.engine is not None else "its jobs are not tracked"
            raise InputError(f"no tracked job can be made of worker {name[:200]!r}: {why}", code="invalid_worker")
        _check_arguments(worker, args)
        options = {} if job_id is None else {"job_id": job_id}
        (made,) = self.push(worker, [args], options=options)
        if made is None:
            raise InputError("a client middleware stopped the job", code="stopped")
        return made

    def remote_worker(
        self, name: str, *, queue: str = "default", retry: bool | int = True, active_job: bool = False, **options: Any
    ) -> RemoteWorker:
        """A worker, by its name, that another program runs, in Ruby or in Python: its methods push into the same Redis.

        Its jobs are not tracked here. The client middleware runs. ``active_job``: it is a job of Rails' ActiveJob.
        ``options`` as in :class:`~asynctask.client.RemoteWorker`. Raises :class:`ConfigError` without Redis.
        """
        return self._pushing.client().remote_worker(name, queue=queue, retry=retry, active_job=active_job, **options)

    # -- Tasks

    # A worker's items have the type that its function takes; a model may also be given as a mapping.

    @overload
    def submit(
        self,
        worker: Takes[Model],
        items: abc.Iterable[Model | Mapping[str, Any]],
        *,
        dry_run: Literal[True],
        **options: Unpack[TaskOptions],
    ) -> DryRun: ...

    @overload
    def submit(
        self,
        worker: Takes[Model],
        items: abc.Iterable[Model | Mapping[str, Any]],
        *,
        dry_run: Literal[False] = False,
        **options: Unpack[TaskOptions],
    ) -> TaskHandle: ...

    @overload
    def submit(
        self, worker: Takes[T], items: abc.Iterable[T], *, dry_run: Literal[True], **options: Unpack[TaskOptions]
    ) -> DryRun: ...

    @overload
    def submit(
        self, worker: Takes[T], items: abc.Iterable[T], *, dry_run: Literal[False] = False, **options: Unpack[TaskOptions]
    ) -> TaskHandle: ...

    @overload
    def submit(
        self, worker: Named, items: abc.Iterable[Any], *, dry_run: Literal[True], **options: Unpack[TaskOptions]
    ) -> DryRun: ...

    @overload
    def submit(
        self, worker: Named, items: abc.Iterable[Any], *, dry_run: Literal[False] = False, **options: Unpack[TaskOptions]
    ) -> TaskHandle: ...

    def submit(self, worker: Any, items: abc.Iterable[Any], **options: Any) -> TaskHandle | DryRun:
        """Submits a list as a Task: creates an Event for each item, to be performed by ``worker``, which may be a task or
        an actor of an attached engine. Returns the Task's handle.

        ``items`` is any iterable, consumed while it is split; jobs of the first items run meanwhile. Items that the
        worker's model refuses are counted as rejected and listed in the report. Options: ``title``; ``parallel``, the most
        jobs that run at once; ``interval``, seconds between rounds of ``parallel`` jobs; ``tolerated_failures`` (10, "5%",
        "failed:10"), with one more the Task pauses itself; ``priority``; ``queue``; ``owner``; ``session``, whose Tasks run
        one after the other; ``key``, a field: items with equal values run one after the other, across all Tasks of the
        worker; ``idempotency_key``; ``context``, constants for all its jobs and callbacks; ``chunk_size``, items per job,
        or ``"auto"`` (docs/how-to/slices.md); ``unique``, fields that no two items may share; ``strict``: one rejected item
        rejects the list, so all are validated before any is written (they wait in a temporary file, at most ``max_rows``);
        ``open``: :meth:`TaskHandle.add` adds more, and the Task does not end before :meth:`TaskHandle.seal`, or
        ``open_limit_s`` seconds without an addition;
        ``dry_run``: only validates, as :meth:`check`;
        ``who``: the submitter, for the Task's log; ``on_complete``, ``on_success`` (no item failed or was cancelled) and
        ``on_failure`` (any did): a worker or its name, or ``{"worker": ..., "args": [...]}``, called with the arguments and
        the progress object when the last item has ended. Raises :class:`InputError`, :class:`UnknownWorker`.
        """
        return self.hand_in(Submission(worker, checked_items(items), self._checked(options)))

    @overload
    def submit_jobs(
        self, jobs: abc.Iterable[tuple[AnyWorker, Any]], *, dry_run: Literal[True], **options: Unpack[TaskOptions]
    ) -> DryRun: ...

    @overload
    def submit_jobs(
        self, jobs: abc.Iterable[tuple[AnyWorker, Any]], *, dry_run: Literal[False] = False, **options: Unpack[TaskOptions]
    ) -> TaskHandle: ...

    def submit_jobs(self, jobs: abc.Iterable[tuple[Any, Any]], **options: Any) -> TaskHandle | DryRun:
        """Submits jobs of several workers, ``[(worker, item), ...]``, as one Task.

        Each item is validated and retried by the rules of its own worker. Priority and queue are by default those of the
        first job's worker, and all jobs get that queue. Workers on an attached engine must all be on the same engine. The
        Task's ``worker`` is ``*``. Options and errors as in :meth:`submit`.
        """
        rest = iter(checked_items(jobs))
        first = list(islice(rest, 1))
        like = self._find(first[0][0]) if first else None
        items: abc.Iterable[Any] = (self._job_of(worker, item) for worker, item in chain(first, rest))
        if isinstance(jobs, Collection):
            items = list(items)
        return self.hand_in(Submission(self._mixed(like), items, self._checked(options)))

    def _job_of(self, worker: Any, item: Any) -> dict[str, Any]:
        return {"worker": self._name_of(worker) or repr(worker)[:200], "item": item}

    def _mixed(self, like: Worker | None, queue: str | None = None) -> Worker:
        """The worker of a Task of mixed jobs, on the engine and queue of ``like``."""
        engine = engine_of(queue) if queue is not None else None if like is None else like.engine

        def find(name: str) -> Worker | None:
            found = self.workers.get(name)
            return found if found is not None and found.use_task_event and found.engine == engine else None

        return Worker(
            MIXED,
            _performed_by_others,
            queue=queue or ("default" if like is None else like.queue),
            priority=Priority.USER_MID if like is None else like.priority,
            shape=MixedShape(find, self.config.max_item_bytes),
            engine=engine,
            key=MIXED if any(each.key is not None for each in self.workers.values()) else None,
        )

    @overload
    def check(
        self, worker: Takes[Model], items: abc.Iterable[Model | Mapping[str, Any]], **options: Unpack[TaskOptions]
    ) -> DryRun: ...

    @overload
    def check(self, worker: Takes[T], items: abc.Iterable[T], **options: Unpack[TaskOptions]) -> DryRun: ...

    @overload
    def check(self, worker: Named, items: abc.Iterable[Any], **options: Unpack[TaskOptions]) -> DryRun: ...

    def check(self, worker: Any, items: abc.Iterable[Any], **options: Unpack[TaskOptions]) -> DryRun:
        """The result that :meth:`submit` would have for these items; creates no Task, and validates all of them in this
        thread. Opens the database."""
        return self.submit(worker, items, dry_run=True, **options)

    def submit_file(
        self,
        worker: Worker | str,
        stored: StoredFile,
        *,
        sheet: str | None = None,
        columns: Mapping[str, str] | None = None,
        encoding: str | None = None,
        header_row: int | None = None,
        wait_s: float = 1.0,
        **options: Unpack[TaskOptions],
    ) -> TaskHandle:
        """Submits a stored file (``app.uploads.store``); waits up to ``wait_s`` seconds for its validation.

        ``sheet`` selects a sheet of a workbook; ``columns`` maps headers to fields, and to "" those that are not used;
        ``encoding`` is that of a text file, ``header_row`` the row with the headers (default: detected).
        With the option ``resubmit_of`` the file is the corrected report of that Task: its rows replace those that failed
        there.

        Raises :class:`InputError` (with ``status``, ``code`` and every problem) if no row can be accepted.
        """
        with self.uploads.removing_refused(stored):
            source = ListSource.checked(sheet, columns, encoding, header_row)
            checked = self._checked(options, may_be_dry=False)
        return self._task_of(Submission(worker, stored, checked, source, wait_s=wait_s))

    def submit_items(
        self, worker: Worker | str, items: Sequence[Any], *, wait_s: float = 1.0, **options: Unpack[TaskOptions]
    ) -> TaskHandle:
        """Submits JSON items. A short list is written with its Task; a long one is stored like an upload, so that its split
        survives this process. ``wait_s`` and errors as in :meth:`submit_file`."""
        checked = self._checked(options, may_be_dry=False)
        return self._task_of(Submission(worker, checked_items(items), checked, is_kept=True, wait_s=wait_s))

    def add_items(
        self, task_id: int, items: abc.Iterable[Any], *, idempotency_key: str | None = None, who: str = ""
    ) -> Addition:
        """Adds items to an open Task: see :meth:`TaskHandle.add`."""
        worker = self._adding_to(task_id)
        listed = list(islice(checked_items(items), MOST_ADDED + 1))
        if worker.name == MIXED:
            listed = [self._job_of(*each) if isinstance(each, tuple) and len(each) == 2 else each for each in listed]
        return self._made().submitter.add(worker, task_id, listed, ListSource(), _added_once(idempotency_key), who)

    def add_file(
        self,
        task_id: int,
        stored: StoredFile,
        *,
        sheet: str | None = None,
        columns: Mapping[str, str] | None = None,
        encoding: str | None = None,
        header_row: int | None = None,
        idempotency_key: str | None = None,
        who: str = "",
    ) -> Addition:
        """Adds the rows of a stored file (``app.uploads.store``) to an open Task, and removes the file; otherwise as
        :meth:`TaskHandle.add`. ``sheet``, ``columns``, ``encoding`` and ``header_row`` as in :meth:`submit_file`."""
        try:
            worker, source = self._adding_to(task_id), ListSource.checked(sheet, columns, encoding, header_row)
            return self._made().submitter.add(worker, task_id, stored, source, _added_once(idempotency_key), who)
        finally:
            self.uploads.remove(stored.name)

    def _adding_to(self, task_id: int) -> Worker:
        """The worker of a Task to which rows are added. Raises :class:`NotFound`, :class:`UnknownWorker`."""
        task = task_rows.read(self._made().ledger, task_id)
        if (worker := self._worker_of(task)) is None:
            raise UnknownWorker(task.worker_name, self.workers)
        return worker

    def check_file(
        self,
        worker: Worker | str,
        stored: StoredFile,
        *,
        sheet: str | None = None,
        columns: Mapping[str, str] | None = None,
        encoding: str | None = None,
        header_row: int | None = None,
        marked: Path | str | None = None,
        **options: Unpack[TaskOptions],
    ) -> DryRun:
        """The result that :meth:`submit_file` would have for a stored file; writes nothing and removes the file.

        ``marked``: a path at which it writes the list as a workbook (.xlsx), with the cells that would be rejected marked.
        Raises :class:`InputError` as :meth:`submit_file`, :class:`Unavailable` if it takes longer than ``dry_run_s``.
        """
        with self.uploads.removing_refused(stored):
            source = ListSource.checked(sheet, columns, encoding, header_row)
            checked = self._checked({**options, "dry_run": True})
        marking = None if marked is None else Marking(str(Path(marked).absolute()), self.config.locale)
        found = self.hand_in(Submission(worker, stored, checked, source, marking=marking))
        assert isinstance(found, DryRun)
        return found

    def preview_file(
        self,
        stored: StoredFile,
        *,
        sheet: str | None = None,
        columns: Mapping[str, str] | None = None,
        encoding: str | None = None,
        header_row: int | None = None,
        owner: str = "",
        alive: Callable[[], None] = lambda: None,
    ) -> Preview:
        """What the beginning of a stored file shows: sheets, header, columns, and the workers they fit, with the mapping of
        the last list of ``owner`` that had these columns. Writes nothing and removes the file. Sheet and header are found
        by the names of the workers' fields, of earlier lists, and of ``columns``, a mapping that is to be used. ``alive``
        is called while a workbook is read, and an exception that it raises ends that.

        Raises :class:`InputError` for a file or a sheet that cannot be read.
        """
        from asynctask.lists.preview import preview  # loads every reader

        try:
            said = ListSource.checked(sheet, columns, encoding, header_row)
            workers = [self.workers[name] for name in self.list_workers()]
            with self._made().ledger.database.read() as connection:
                before = queries.read_lists(connection, owner)
            with list_file(stored.path, stored.filename, self.limits, encoding=said.encoding, alive=alive) as file:
                return preview(
                    file,
                    self.limits,
                    workers,
                    before,
                    sheet=sheet,
                    header_row=header_row,
                    columns=said.columns,
                    search=stored.size <= SMALL_FILE,
                )
        finally:
            self.uploads.remove(stored.name)

    def hand_in(self, given: Submission) -> TaskHandle | DryRun:
        """Creates a Task from a submission, whether it came from Python, the command line or HTTP; with the option
        ``dry_run``, only validates it.

        Raises as :meth:`submit` for items, as :meth:`submit_file` and :meth:`check_file` for JSON items and files.
        """
        with self.uploads.removing_refused(given.listed):
            worker = self._worker_for(given)
            callbacks = self._callbacks(worker, given)
        return self._made().submitter.submit(worker, given, callbacks)

    def _task_of(self, given: Submission) -> TaskHandle:
        handle = self.hand_in(given)
        assert isinstance(handle, TaskHandle)
        return handle

    def _worker_for(self, given: Submission) -> Worker:
        """The worker of a submission. Raises :class:`InputError`, :class:`UnknownWorker`."""
        if given.worker is None:  # the first job with a known worker determines priority and queue
            named = (each.get("worker") for each in given.listed if isinstance(each, Mapping))  # type: ignore[union-attr]
            first = next((name for name in named if isinstance(name, str) and name in self.workers), None)
            return self._mixed(None if first is None else self._find(first))
        if isinstance(given.worker, Worker) and given.worker.name == MIXED:
            return given.worker
        found = self._find(given.worker)
        if given.form is not None:
            self._check_export(found, given.options)
        if not isinstance(given.worker, Worker):
            return found
        if given.worker.wait is not None:
            raise InputError("a Task cannot be scheduled: submit it at that time, or leave wait out of set()")
        return replace(found, **given.worker.overrides)  # worker.set(queue=...) applies to Tasks, too

    def check_for_parent(self, order: Mapping[str, Any]) -> bytes:
        """The response of a child process that checks a large list, see :mod:`asynctask.lists.dry_run`."""
        worker = self._find(str(order["worker"]))
        return self._made().submitter.check_for_parent(worker, order["source"], order["marking"])

    def _name_of(self, worker: Any) -> str | None:
        """The name of a worker, which may be an actor or a task of an engine."""
        if isinstance(worker, str | Worker):
            return worker if isinstance(worker, str) else worker.name
        named = (engine.name_of(worker) for engine in self._engines.values())
        return next((name for name in named if name is not None), None)

    def _find(self, worker: Any) -> Worker:
        name = self._name_of(worker) or repr(worker)[:200]
        workers = self.workers
        found = workers.get(name)
        if found is None:
            raise UnknownWorker(name, workers)
        engine = None if found.engine is None else self._engines[found.engine]
        if engine is not None and not engine.capabilities.counts:
            raise InputError(
                f"{name} runs on {engine.name}, whose broker cannot count waiting jobs: lists cannot be submitted for it"
            )
        if isinstance(found.shape, ItemShape) and found.shape.unfit is not None:
            raise InputError(f"lists cannot be submitted for {name!r}: {found.shape.unfit}", code="invalid_worker")
        if not found.use_task_event:
            raise InputError(
                f"worker {name!r} has use_task_event=False: its jobs are not tracked, so no Task can hold them"
            )
        if (takes := found.unfit_for(1)) is not None:
            problem = fault(None, "worker", "invalid_worker", "option.worker_arguments", {"takes": takes}, name)
            raise InputError(
                f"no list can be submitted for worker {name!r}: {problem.message}", code="invalid_worker", errors=[problem]
            )
        return found

    def list_workers(self) -> list[str]:
        """The names of the workers for which lists can be submitted: tracked ones that are called with one item, without
        exports, and without engines that cannot count."""
        return [name for name in sorted(self.workers) if self._takes_lists(name)]

    def _takes_lists(self, name: str) -> bool:
        try:
            return not self._find(name).columns
        except InputError:
            return False

    def _check_export(self, found: Worker, options: SubmitOptions) -> None:
        engine = None if found.engine is None else self._engines[found.engine]
        if engine is not None and not engine.capabilities.exports:
            raise InputError(
                f"{found.name} runs on {engine.name}, which performs no merge of the parts of an export: declare it with"
                " @app.export, for AsyncTask's own workers",
                code="invalid_worker",
            )
        if not found.columns:
            how = "with @app.export" if engine is None else f"with the option export_columns of {engine.name}'s task"
            raise InputError(f"worker {found.name!r} is no export: declare it {how}", code="invalid_worker")
        if options.resubmit_of is not None:
            raise InputError("an export has no rows to correct: leave out resubmit_of", code="invalid_options")
        if options.chunk_size not in (None, 1):
            raise InputError("each shard of an export is a job: leave out chunk_size", code="invalid_options")
        if options.open:
            raise InputError("the shards of an export are one list: leave out open", code="invalid_options")
        self.export_files.check()

    # -- callbacks

    def _checked(self, given: Mapping[str, Any], *, may_be_dry: bool = True) -> SubmitOptions:
        from asynctask.lists.options import check_options  # imports pydantic, which a worker process may not need

        named = {name: self._named(given[name]) for name in CALLBACKS if given.get(name) is not None}
        options = check_options({**given, **named})
        if options.dry_run and not may_be_dry:
            raise InputError("use check_file, or check, for a dry run")
        return options

    def _named(self, callback: Any) -> Any:
        """A callback option with each worker replaced by its name."""
        if isinstance(callback, list | tuple):
            return [self._named(each) for each in callback]
        if isinstance(callback, Mapping):
            worker = callback.get("worker")
            return {**callback, "worker": self._name_of(worker) or worker} if worker is not None else callback
        return self._name_of(callback) or callback

    def _default_callbacks(self, **said: Any) -> Mapping[str, Sequence[Callback]]:
        found = {}
        for name, callback in said.items():
            if callback is not None:
                try:
                    found[name] = as_callbacks(self._named(callback))
                except ValueError as error:
                    raise ConfigError(f"{name} {error}") from None
        return found

    def _callbacks(self, worker: Worker, given: Submission) -> Sequence[NewCallback]:
        """The callbacks of a submission: those of its options, else those of the worker, after the merge of an export.
        Raises :class:`UnknownWorker`, and :class:`InputError` for a worker whose jobs are not tracked."""
        options, merge = given.options, list[NewCallback]()
        if given.form is not None:
            columns = list(worker.columns)
            said = {"export": self.ids.jid(), "format": check_format(given.form, columns), "columns": columns}
            # The workers of an engine need only take the queue of the shards.
            queue = self.config.callback_queue if worker.engine is None else worker.queue_for(options.queue)
            merge = [NewCallback(MERGE, MERGER, queue, [said])]
        elif worker.columns:
            raise InputError(f"worker {worker.name!r} is an export: use submit_export", code="invalid_worker")
        named = {kind: [*(getattr(options, kind) or worker.callbacks.get(kind, ()))] for kind in CALLBACKS}
        if self.config.webhook_url:
            named["on_complete"].append(Callback(WEBHOOK, ("",)))
        return merge + [self._callback(kind, n, each) for kind, those in named.items() for n, each in enumerate(those, 1)]

    def _callback(self, kind: str, number: int, callback: Callback) -> NewCallback:
        """``number``: which one of its kind, from 1."""
        name = kind if number == 1 else f"{kind}:{number}"
        if callback.worker == WEBHOOK:
            if not self.config.webhook_secret:
                missing = f"set webhook_secret, which signs webhooks, to {WHSEC_FORM}"
                raise InputError(f"option {kind!r}: {missing}", code="invalid_option")
            return NewCallback(name, WEBHOOK, self.config.callback_queue, callback.args)
        found = self.workers.get(callback.worker)
        if found is None:
            raise UnknownWorker(callback.worker, self.workers, option=kind)
        if (why := self._why_not_called_back(found, len(callback.args) + 1)) is not None:
            raise InputError(f"option {kind!r}: {callback.worker!r} cannot be called back: {why}", code="invalid_option")
        queue = self.config.callback_queue if found.engine is None else found.queue
        return NewCallback(name, found.name, queue, callback.args)

    def _why_not_called_back(self, worker: Worker, count: int) -> str | None:
        if not worker.use_task_event:
            return "its jobs are not tracked"
        if worker.engine is not None and not self._engines[worker.engine].capabilities.counts:
            return f"the queues of {worker.engine} cannot be counted"
        takes = worker.unfit_for(count)
        if takes is None:
            return None
        called = "the Task's progress" if count == 1 else f"its {count - 1} args and the Task's progress"
        return f"it is called with {called}, by position, and its parameters are {takes}"

    def callback_workers(self) -> list[str]:
        """The names of the workers that can be called back with the Task's progress alone."""
        return [name for name, each in sorted(self.workers.items()) if self._why_not_called_back(each, 1) is None]

    def task_closed(self, task_id: int) -> None:
        if self._hooks["task_finished"]:
            self._observers.put(task_id)

    def _fire_finished(self, task_id: int) -> None:
        try:
            found = self.progress(task_id)
        except AsyncTaskError as error:
            self._log.warning("task_finished_lost", task_id=task_id, error=str(error))
        else:
            self.fire("task_finished", found)

    def task(self, task_id: int) -> TaskHandle:
        """The handle of a Task. Raises :class:`NotFound`."""
        core = self._made()
        worker = self._worker_of(task_rows.read(core.ledger, task_id))
        return TaskHandle(core.services, task_id, worker.shape if worker and isinstance(worker.shape, ItemShape) else None)

    def progress(self, task_id: int, errors: bool = False, *, take: queries.Take = list) -> dict[str, Any]:
        """The progress object of a Task, read by one statement; see :meth:`TaskHandle.progress`. Raises
        :class:`NotFound`."""
        return TaskHandle(self._made().services, task_id).progress(errors, take=take)

    def link(self, task_id: int, rights: Collection[str] = ("read",), expires_in: float = 86_400, *, who: str = "") -> str:
        """A signed link to one Task: give it as the parameter ``link`` of its page and of its URLs in the API.

        ``rights``: ``read``, or ``read`` and ``control``; ``expires_in``: seconds, at most 366 days; ``who``: the author,
        for the Task's log. Raises :class:`NotFound`, :class:`InputError`; :class:`~asynctask.errors.NoLinks` without the
        setting ``link_secret``.
        """
        if not self.config.link_secret:
            raise NoLinks(f"links are signed with the setting link_secret, and it is not set; {HOW_TO_MAKE_ONE}")
        chosen = frozenset({rights} if isinstance(rights, str) else rights)
        if not (chosen <= LINKABLE and "read" in chosen):
            raise InputError("the rights of a link are read, or read and control", code="invalid_link")
        if not 1 <= expires_in <= MAX_LINK_S:
            raise InputError(f"expires_in: write 1 to {MAX_LINK_S:,} seconds", code="invalid_link")
        core = self._made()
        link = Link(task_id, chosen, core.ledger.now() // SECOND + round(expires_in))
        detail = {"rights": sorted(chosen), "expires_at": rfc3339(link.expires_at * SECOND)}
        queries.log_link(core.ledger, task_id, detail, who=who)
        return sign(link, self.config.link_secret)

    def tasks(
        self,
        *,
        ids: Collection[int] | None = None,
        group: str | None = None,
        since: datetime | None = None,
        state: str | None = None,
        worker: str | None = None,
        owner: str | None = None,
        parent: int | None = None,
        after: int | None = None,
        limit: int = 50,
        take: queries.Take = list,
    ) -> list[Any]:
        """Progress objects, newest first, of the Tasks that match. ``group``: ``running`` (not done), ``finished``, or
        ``attention``: with rows that failed or were not accepted and have not succeeded since in a correction, or with a
        list, a callback or a limit of failures that needs a person; of the last 10,000 Tasks, and of older ones that are
        not done. ``since``: submitted at this time or later; ``parent``: only children of this Task; ``after``: the last id
        of the previous page; ``take`` as in :class:`TaskHandle`. Raises :class:`InputError` for an unknown group."""
        if group not in (None, *progress.GROUPS):
            raise InputError(f"group must be {', '.join(progress.GROUPS)}, not {str(group)[:80]!r}", code="invalid_option")
        core = self._made()
        return take(
            progress.progress_page(
                core.ledger.database,
                core.ledger.now(),
                ids=ids,
                group=group,
                since=None if since is None else from_datetime(since),
                state=state,
                worker=worker,
                owner=owner,
                parent=parent,
                after=after,
                limit=max(1, min(limit, 1_000)),
            )
        )

    def changed(self, known: Mapping[int, str | None]) -> dict[int, Changed]:
        """The Tasks whose mark differs from that in ``known`` (id -> mark, None for none), with their new mark and progress
        object, by id.

        Poll this for many readers of many Tasks: a Task that has not changed costs a part of one statement. Raises
        LedgerUnavailable.
        """
        core = self._made()
        with core.ledger.database.read() as connection:
            return progress.changed(connection, known, core.ledger.now())

    def event(self, job_id: str) -> dict[str, Any]:
        """One job: its Event as a dict. Raises :class:`NotFound`."""
        with self._made().ledger.database.read() as connection:
            return queries.event(connection, job_id)

    def jobs(
        self,
        *,
        worker: str | None = None,
        status: str | Collection[str] = (),
        resumable: bool = False,
        after: int | None = None,
        limit: int = 100,
        take: queries.Take = list,
    ) -> list[Any]:
        """Jobs without a Task, newest first: their Events as dicts. ``resumable``: stopped jobs instead, including those of
        Tasks.

        ``worker`` and ``status`` filter; ``after`` is the last id of the previous page; ``limit`` is at most 1,000;
        ``take`` as in :class:`TaskHandle`. Raises :class:`InputError` for an unknown status.
        """
        statuses, limit = checked_statuses(status), max(1, min(limit, MAX_PAGE))
        found = queries.jobs_page(
            self._made().ledger.database, resumable=resumable, worker=worker, statuses=statuses, after=after, limit=limit
        )
        return take(found)

    def search(
        self,
        text: str,
        *,
        field: str | None = None,
        worker: str | None = None,
        owner: str | None = None,
        after: str | None = None,
        limit: int = 50,
        take: queries.Take = list,
    ) -> queries.Found:
        """The jobs of all Tasks, and those without one, that have this value in a field that their worker names in
        ``search``, newest first: a page of their Events, each with ``field``, ``value``, ``task_title`` and ``place``.

        Case, width and surrounding blanks do not count. A ``*`` at the end of ``text`` stands for any rest; then values
        come from the last to the first. ``field``, ``worker`` and ``owner`` filter; ``after``: that of the page before;
        ``limit`` is at most 1,000; ``take`` as in :class:`TaskHandle`. Raises :class:`InputError` for a text that no field
        has.
        """
        return queries.search_page(
            self._made().ledger.database,
            Wanted.read(text),
            field=field,
            worker=worker,
            owner=owner,
            after=after,
            limit=max(1, min(limit, MAX_PAGE)),
            take=take,
        )

    def record(self, job_id: str, status: str, message: str = "") -> bool:
        """Records the status of a job, from any program, as the middleware does.

        ``status``: ``enqueue``, ``working``, ``finish``, ``failed`` or ``error``; an unchanged status adds the message. For
        an unknown job id, creates a stand-alone Event. Returns False if the Event is terminal already. Raises
        :class:`InputError` for an unknown status, TransitionRefused for an illegal transition.
        """
        return standalone.record(self._made().ledger, job_id, status, message)

    def record_all(
        self, records: Sequence[JobRecord], reporter: Reporter | None = None
    ) -> tuple[list[Recorded], str | None]:
        """Records outcomes from a worker in another language; ``POST /api/records`` calls this.

        Returns the result of each record, and a request to the process ``reporter``: ``quiet``, ``stop`` or None. Raises as
        :meth:`asynctask.integrations.remote.RemoteWorkers.record`.
        """
        return self._remote.record(records, reporter)

    def processes(self) -> list[dict[str, Any]]:
        """Every registered process, as a dict of its columns."""
        with self._made().ledger.database.read() as connection:
            return recovery.list_processes(connection)

    def history(
        self,
        since: datetime | None = None,
        until: datetime | None = None,
        *,
        step: Step | None = None,
        queue: str | None = None,
        worker: str | None = None,
        by: By | None = None,
    ) -> History:
        """What ended in each step of a span, with the run times, and what waited.

        ``since``: an hour ago by default; ``step``: by default the shortest with at most 500 points; ``queue`` and
        ``worker`` choose; ``by``: a series for each ``queue`` or ``worker``, instead of one for all. Raises
        :class:`InputError`, LedgerUnavailable.
        """
        begin, end = minutes.moment("since", since), minutes.moment("until", until)
        ledger = self._made().ledger
        return minutes.read(ledger, since=begin, until=end, step=step, queue=queue, worker=worker, by=by)

    def check_ready(self) -> None:
        """Raises :class:`Unavailable` if a submission could not be stored: the database accepts no write, or the file
        system of ``data_dir`` or of an SQLite database is full. The result is cached for 3 s."""
        self._made().readiness.check()

    def doctor(self, repair: bool = False, who: str = "") -> list[doctors.Finding]:
        """Checks that counts equal rows; ``repair``: repairs differences. ``who``: the author, for the logs of repaired
        Tasks. Returns the findings."""
        return doctors.examine(self._made().ledger, repair=repair, who=who)

    def purge(
        self,
        older_than_s: float,
        *,
        states: Collection[str] = (),
        owner: str | None = None,
        dry_run: bool = False,
        on_slice: Callable[[Purged], None] = lambda removed: None,
    ) -> Purged:
        """Removes Tasks that ended more than ``older_than_s`` seconds ago, with their rows, uploads and log.

        ``states`` (``finished``, ``cancelled``, ``rejected``) and ``owner`` filter; without either, jobs without a Task of
        that age are removed, too. ``dry_run``: only counts. ``on_slice`` is called after each slice of rows with the totals
        so far; pauses between slices keep workers from waiting. Files are removed from this machine's ``data_dir``.

        Raises :class:`InputError` for a state in which a Task has not ended; LedgerUnavailable, after which the next purge
        continues.
        """
        core = self._made()
        old = Old(core.ledger.now() - micros(older_than_s), tuple(states), owner)
        if dry_run:
            with core.ledger.database.read() as connection:
                return count_old(connection, old)
        found = Purge(core.ledger, old, partial(remove_list, self.uploads), self.export_files.remove)
        while found.rested_step():
            on_slice(found.removed)
        return found.removed

    def stop_job(self, job_id: str, *, who: str = "") -> dict[str, Any]:
        """Stops one job, until it is started again: see :meth:`~asynctask.operations.Operations.stop_job`."""
        return self.operations.stop_job(job_id, who=who)

    def start_job(self, job_id: str, *, who: str = "") -> dict[str, Any]:
        """Starts a stopped job again: see :meth:`~asynctask.operations.Operations.start_job`."""
        return self.operations.start_job(job_id, who=who)

    # -- processes

    def launcher(
        self,
        *,
        concurrency: int | None = None,
        queues: Mapping[str, int] | None = None,
        strict: bool | None = None,
        shutdown_s: float | None = None,
        pulse: Pulse | None = None,
    ) -> Launcher:
        """A worker process within this process; ``start()`` and ``stop()`` it, or ``run()`` it in the foreground.

        ``concurrency``: its threads; ``queues``: their weights; ``strict``: in the listed order; ``shutdown_s``: seconds
        that running jobs have at the end.
        ``pulse``: shows the supervisor, if there is one, that this process lives.
        """
        self._made()
        config = self.config
        if shutdown_s is not None:
            check_setting("shutdown_s", shutdown_s)
        return Launcher(
            self,
            concurrency=config.concurrency if concurrency is None else concurrency,
            queues=Queues(queues or config.queue_weights(), config.strict_queues if strict is None else strict),
            shutdown_s=config.shutdown_s if shutdown_s is None else shutdown_s,
            pulse=pulse,
        )

    def run_worker(self, **options: Any) -> int:
        """Runs one worker process in the foreground until it is stopped; options as in :meth:`launcher`. Returns the exit
        code."""
        return self.launcher(**options).run()

    def resume_split(self, task_id: int) -> None:
        """Resumes a split whose process died: in a child process if the application has a name, else in a thread."""
        core = self._made()
        if self._worker_of(task_rows.read(core.ledger, task_id)) is None:
            return  # left to a process that knows the worker
        if task_rows.claim_split(core.ledger, task_id, lease_s=self.config.lease_s) is None:
            return
        if not core.split_elsewhere(task_id):
            threading.Thread(target=self.split_task, args=(task_id,), name=f"split-{task_id}", daemon=True).start()

    def split_task(self, task_id: int, of: str | None = None) -> None:
        """Splits a Task in this process, which must hold the split, or may take it because it is free, or because the
        process ``of`` hands it over."""
        core = self._made()
        task = task_rows.read(core.ledger, task_id)
        worker = self._worker_of(task)
        if worker is None:
            self._log.error("split_without_worker", task_id=task_id, worker=task.worker_name)
            return
        core.submitter.run_split(worker, task_id, of)

    def _worker_of(self, task: TaskRow) -> Worker | None:
        return self._mixed(None, task.queue) if task.worker_name == MIXED else self.workers.get(task.worker_name)


class _Observers:
    """Calls ``act`` with each value put, in a thread of its own, which the first value starts: so an observer does not
    delay the code that it observes."""

    def __init__(self, act: Callable[[int], None]) -> None:
        self._act = act
        self._lock = threading.Lock()
        self._pid: int | None = None
        self._queue: SimpleQueue[int] = SimpleQueue()

    def put(self, task_id: int) -> None:
        with self._lock:
            if self._pid != os.getpid():  # after a fork: the thread exists in the parent only
                self._pid, self._queue = os.getpid(), SimpleQueue()
                threading.Thread(target=self._run, args=(self._queue,), name="observers", daemon=True).start()
        self._queue.put(task_id)

    def _run(self, queue: SimpleQueue[int]) -> None:
        while True:
            self._act(queue.get())


def _check_arguments(worker: Worker, args: Sequence[Any]) -> None:
    """Validates the arguments of a job from outside. Raises :class:`InputError`."""
    try:
        inspect.signature(worker.function).bind(*args)
    except TypeError as error:
        raise InputError(f"worker {worker.name!r}: {error}", code="bad_arguments") from None


def _check_takes(what: str, function: Any, names: Sequence[str]) -> None:
    """Raises :class:`ConfigError` for a function that cannot be called with such arguments."""
    try:
        inspect.signature(function).bind(*names)
    except TypeError:
        raise ConfigError(f"{what} is called with ({', '.join(names)}), which {function!r:.200} does not take") from None
    except ValueError:  # of some functions in C, whose arguments are not known
        return


def _check_items(items: Callable[..., Any]) -> None:
    """Raises :class:`ConfigError` for a function that does not return the items of a tick."""
    try:
        inspect.signature(items).bind(None)
        fits = work_of(items) in (None, GENERATOR)
    except TypeError:
        fits = False
    if not fits:
        raise ConfigError(f"items is a function of the tick, such as items=lambda tick: [...], not {items!r:.200}")


def _taking_a_tick(worker: Worker, has_items: bool) -> Worker:
    """The worker as a schedule needs it: called with one item. One without parameters then ignores that item. Raises
    :class:`ConfigError`."""
    if not worker.use_task_event or worker.columns:
        why = "is an export" if worker.columns else "has use_task_event=False: its jobs are not tracked"
        raise ConfigError(f"worker {worker.name!r} cannot have a schedule: it {why}")
    takes, function = worker.unfit_for(1), worker.function
    if takes is None:
        return worker
    if worker.engine is not None or worker.unfit_for(0) is not None or has_items:
        raise ConfigError(f"worker {worker.name!r} of a schedule is called with one item, and its parameters are {takes}")

    def perform(*_item: Any) -> Any:
        return function()

    perform.__name__, perform.__doc__ = declared_name(function), inspect.getdoc(function)
    return replace(worker, function=perform)


def _added_once(idempotency_key: str | None) -> str | None:
    """Raises :class:`InputError` for an idempotency key that no submission may have either."""
    from asynctask.lists.options import check_options  # imports pydantic, which a worker process may not need

    return check_options({"idempotency_key": idempotency_key}).idempotency_key


def _performed_by_others(item: Any) -> None:
    raise TypeError("a Task of mixed jobs has no worker of its own")


def _check_worker(worker: Worker, target: Any = None) -> None:
    if worker.name == MIXED:
        raise ConfigError(f"a worker cannot be named {MIXED}, which stands for the workers of a Task of mixed jobs")
    if not worker.name:
        raise ConfigError(f"{worker.function!r} has no name of its own: give the worker one with name=")
    if len(worker.name) > 255 or "|" in worker.name or "/" in worker.name:
        raise ConfigError(f"a worker's name has 1 to 255 characters, without | and /: {worker.name!r}")
    if not worker.use_task_event and inspect.isclass(target) and issubclass(target, Iterable):
        raise ConfigError(f"worker {worker.name}: an iterable saves its place in its Event, so it must be tracked")
    if not worker.use_task_event and worker.rate is not None:
        raise ConfigError(f"worker {worker.name}: a rate counts the jobs of Tasks, so the worker must be tracked")
    if not worker.use_task_event and worker.search:
        raise ConfigError(f"worker {worker.name}: a search finds records, so the worker must be tracked")
    if worker.timeout is not None and not is_span(worker.timeout):
        raise ConfigError(
            f"worker {worker.name}: timeout must be a number of seconds, more than 0 and with an end, or None for no"
            f" limit, not {worker.timeout!r}"
        )
    for what, hook in (("retry_in", worker.retry_in), ("retries_exhausted", worker.retries_exhausted)):
        check_hook(f"worker {worker.name}: {what}", hook)
    for check in worker.checks:
        check_hook(f"worker {worker.name}: a check", check)
    try:
        check_names(worker.options, _OPTIONS)
        worker.check_options({"queue": worker.queue, "retry": worker.retry, "priority": worker.priority, **worker.options})
        check_fields(worker)
    except InputError as error:
        raise ConfigError(f"worker {worker.name}: {error}") from None
