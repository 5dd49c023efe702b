"""Django's tasks on AsyncTask's own workers: a backend for the interface of ``django.tasks`` (Django 6) and of the package
``django-tasks`` (earlier releases).

Each task becomes a worker of the application when its decorator runs, under the path of its function; each ``enqueue`` is a
tracked job, so it leaves an Event. The job's two arguments are the positional and the keyword arguments of the function. A
list may be submitted for the same worker: then an item is the function's one argument.

The application's workers are the only registry. A worker process performs the tasks of the modules that it has imported;
nothing is imported by a name that a job holds.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import import_module
from typing import Any, Final, Protocol, runtime_checkable

from asynctask.clock import SECOND, read_rfc3339
from asynctask.core.states import TERMINAL, Status
from asynctask.errors import ConfigError, InputError, NormalException, NotFound, not_installed
from asynctask.job import CurrentJob, current_job, interrupted
from asynctask.sidekiq.payload import read_time
from asynctask.worker import Priority, Worker

try:
    from django.conf import settings
    from django.db import close_old_connections
    from django.utils import timezone
except ModuleNotFoundError as error:
    if error.name != "django":
        raise
    raise ModuleNotFoundError(not_installed("django", "django"), name="django") from None

try:
    from django.tasks import TaskContext, TaskResult, TaskResultStatus
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import TaskError
    from django.tasks.exceptions import InvalidTask, InvalidTaskBackend, TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished, task_started
    from django.utils.json import normalize_json
except ModuleNotFoundError as missing:
    if missing.name != "django.tasks":
        raise
    try:
        from django_tasks import TaskContext, TaskResult, TaskResultStatus
        from django_tasks.backends.base import BaseTaskBackend
        from django_tasks.base import TaskError
        from django_tasks.exceptions import InvalidTaskBackendError as InvalidTaskBackend
        from django_tasks.exceptions import InvalidTaskError as InvalidTask
        from django_tasks.exceptions import TaskResultDoesNotExist
        from django_tasks.signals import task_enqueued, task_finished, task_started
        from django_tasks.utils import normalize_json
    except ModuleNotFoundError as error:
        if error.name != "django_tasks":
            raise
        what = "Django before 6 has no tasks of its own, and django-tasks"
        raise ModuleNotFoundError(not_installed(what, "django"), name="django_tasks") from None

_STATUS: Final = {
    Status.ENQUEUE: TaskResultStatus.READY,
    Status.STOPPED: TaskResultStatus.READY,
    Status.WORKING: TaskResultStatus.RUNNING,
    Status.FINISH: TaskResultStatus.SUCCESSFUL,
}
"""The status of a result by that of its Event; each other one is a failure."""

_MAX_TRACEBACK: Final = 4_000
"""Largest number of characters of a traceback that an Event keeps; the end of a longer one."""

_RAISED: Final = re.compile(r"Raised ([\w.<>]+)\n(.*)", re.DOTALL)
"""The message of an Event with the class and the traceback of what a task raised."""

_UNKNOWN: Final = "unknown"
"""The process of an attempt whose start names none: that of a task that succeeded at once."""


class RaisedError(TaskError):  # type: ignore[misc]
    """What a task raised. Its class is looked up among those of the modules that this process has imported: the path comes
    from the ledger, and nothing is imported by a name from there."""

    __slots__ = ()

    @property
    def exception_class(self) -> type[BaseException]:
        """Raises ImportError for a class that this process does not know."""
        names = self.exception_class_path.split(".")
        for count in range(len(names) - 1, 0, -1):
            found: Any = sys.modules.get(".".join(names[:count]))
            if found is not None:
                for name in names[count:]:
                    found = getattr(found, name, None)
                if isinstance(found, type) and issubclass(found, BaseException):
                    return found
        raise ImportError(f"no imported module has the exception {self.exception_class_path!r}")


@runtime_checkable
class Application(Protocol):
    """The parts of an :class:`~asynctask.AsyncTask` that the backend needs."""

    @property
    def own_workers(self) -> Mapping[str, Worker]: ...

    def worker(self, target: Any, /, **options: Any) -> Worker: ...

    def event(self, job_id: str) -> dict[str, Any]: ...


class AsyncTaskBackend(BaseTaskBackend):  # type: ignore[misc]
    """The backend of ``TASKS``, by the path ``asynctask.integrations.django.AsyncTaskBackend``.

    ``OPTIONS``: ``app``, the application as ``"module:attribute"``; ``retry``, the number of retries of a task that raises
    (default 0, as a task of Django runs once). Raises InvalidTaskBackend for other options and for no application.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, params)
        given = dict(self.options)
        target, self._retry = given.pop("app", None), given.pop("retry", 0)
        if given:
            raise InvalidTaskBackend(f"TASKS[{alias!r}]: unknown OPTIONS {', '.join(map(str, given))}; known: app, retry")
        if isinstance(self._retry, bool) or not isinstance(self._retry, int) or self._retry < 0:
            raise InvalidTaskBackend(f"TASKS[{alias!r}]: OPTIONS['retry'] is a number of retries, not {self._retry!r}")
        self._app = _application(alias, target)

    def validate_task(self, task: Any) -> None:
        """Makes the task a worker of the application. Raises InvalidTask."""
        super().validate_task(task)
        try:
            self._worker(task)
        except (ConfigError, InputError) as error:
            raise InvalidTask(f"{task.module_path}: {error}") from None

    def _worker(self, task: Any) -> Worker:
        """The worker of a task, with the task's options. Raises ConfigError and InputError."""
        known: Worker | None = self._app.own_workers.get(task.module_path)
        if known is None:
            call = _Call(task)
            known = self._app.worker(
                call,
                name=task.module_path,
                queue=task.queue_name,
                priority=_priority(task),
                retry=self._retry,
                retries_exhausted=call.exhausted,
            )
        elif not isinstance(known.function, _Call) or known.function.task.func is not task.func:
            raise ConfigError("the application has another worker of this name")
        return known.set(queue=task.queue_name, priority=_priority(task), retry=self._retry)

    def enqueue(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Creates the job, and returns its result. Raises InvalidTask; TypeError or ValueError for arguments that are no
        JSON; InputError if a client middleware stopped the job; LedgerUnavailable."""
        self.validate_task(task)
        worker, given = self._worker(task), (normalize_json(list(args)), normalize_json(dict(kwargs)))
        if task.run_after is None:
            job_id = worker.perform_async(*given)
        else:
            at = task.run_after
            job_id = worker.perform_at(at if timezone.is_aware(at) else timezone.make_aware(at), *given)
        if job_id is None:
            raise InputError("a client middleware stopped the job", code="stopped")
        result = _result(task, job_id, *given, backend=self.alias, enqueued_at=timezone.now())
        task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> Any:
        """The result of the job with this id. Raises TaskResultDoesNotExist, also for a job that is none of a task that
        this process has imported."""
        try:
            event = self._app.event(result_id)
        except NotFound as error:
            raise TaskResultDoesNotExist(str(error)) from None
        worker = self._app.own_workers.get(event["worker_name"])
        if worker is None or not isinstance(worker.function, _Call) or event["items"] != 1:
            name = event["worker_name"]
            why = f"the job {result_id} is one of {name!r}, and no module with that task is imported in this process"
            raise TaskResultDoesNotExist(why)
        task, params = worker.function.task, event["params"]
        if not self.queues or event["queue"] in self.queues:
            task = task.using(queue_name=event["queue"])
        lone = event["task_id"] is None and isinstance(params, list) and len(params) == 2
        result = _result(task, result_id, *(params if lone else ([params], {})), backend=self.alias, **_times(event))
        _set(result, **_outcome(event))
        return result


def _application(alias: str, target: Any) -> Application:
    """The application that ``OPTIONS["app"]`` names."""
    module, colon, attribute = target.partition(":") if isinstance(target, str) else ("", "", "")
    if not (module and colon and attribute):
        raise InvalidTaskBackend(f"TASKS[{alias!r}]: OPTIONS['app'] must be 'module:attribute', not {target!r}")
    found = getattr(import_module(module), attribute, None)
    if not isinstance(found, Application):
        hint = "create it there, above the first task and above every import of a module with tasks"
        raise InvalidTaskBackend(f"TASKS[{alias!r}]: OPTIONS['app']: {module!r} has no AsyncTask() {attribute!r}: {hint}")
    return found


def _priority(task: Any) -> int:
    """A priority of Django (-100 to 100, the highest first, 0 by default) as one of ours, the smallest first."""
    return Priority.USER_MID - int(task.priority)


# -- what a worker process calls


class _Call:
    """The function of a task as its worker calls it: within Django's signals, with connections that are still open."""

    def __init__(self, task: Any) -> None:
        self.task = task
        self.__doc__ = task.func.__doc__

    def __call__(self, args: Any, kwargs: dict[str, Any] | None = None) -> Any:
        """``kwargs`` is None for an item of a list, which is the function's one argument."""
        job = current_job()
        result = self._started(job)
        close_old_connections()
        try:
            task_started.send(self._backend, task_result=result)
            own = [TaskContext(task_result=result)] if self.task.takes_context else []
            value = self.task.call(*own, args) if kwargs is None else self.task.call(*own, *args, **kwargs)
        except BaseException as error:
            if not interrupted(job, error):
                raised = _raised(error)
                job.message(f"Raised {raised.exception_class_path}\n{raised.traceback}")
            if isinstance(error, NormalException):
                self._finished(result, status=TaskResultStatus.FAILED, errors=[_raised(error)])
            raise
        finally:
            close_old_connections()
        self._finished(result, status=TaskResultStatus.SUCCESSFUL, _return_value=value)
        return value

    def exhausted(self, job: CurrentJob, error: BaseException) -> None:
        """No retry is left; of a refusal, no worker asks for one."""
        self._finished(self._started(job), status=TaskResultStatus.FAILED, errors=[_raised(error)])

    @property
    def _backend(self) -> type:
        return type(self.task.get_backend())

    def _finished(self, result: Any, **values: Any) -> None:
        _set(result, finished_at=timezone.now(), **values)
        task_finished.send(self._backend, task_result=result)

    def _started(self, job: CurrentJob) -> Any:
        """The result of a job that is performed."""
        args, kwargs = job.args if len(job.args) == 2 else ([*job.args], {})
        created, now = read_time(job.payload.get("created_at")), timezone.now()
        result = _result(
            self.task,
            job.job_id,
            args,
            kwargs,
            backend=self.task.backend,
            enqueued_at=None if created is None else _moment(datetime.fromtimestamp(created / SECOND, UTC)),
            started_at=now,
            last_attempted_at=now,
        )
        attempts = int(job.payload.get("retry_count", -1)) + 2
        _set(result, status=TaskResultStatus.RUNNING, worker_ids=[_UNKNOWN] * attempts)
        return result


def _raised(error: BaseException) -> RaisedError:
    """Without the frames that called the task's function."""
    kind, frames = type(error), error.__traceback__
    if frames is not None and frames.tb_frame.f_code is _Call.__call__.__code__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(kind, error, frames))
    return RaisedError(exception_class_path=f"{kind.__module__}.{kind.__qualname__}", traceback=text[-_MAX_TRACEBACK:])


# -- results


def _result(task: Any, job_id: str, args: Any, kwargs: Any, *, backend: str, enqueued_at: Any, **times: Any) -> Any:
    return TaskResult(
        task=task,
        id=job_id,
        status=TaskResultStatus.READY,
        enqueued_at=enqueued_at,
        started_at=times.get("started_at"),
        finished_at=times.get("finished_at"),
        last_attempted_at=times.get("last_attempted_at"),
        args=args,
        kwargs=kwargs,
        backend=backend,
        errors=[],
        worker_ids=[],
    )


def _set(result: Any, **values: Any) -> None:
    """A result is frozen; Django's backends write it so."""
    for name, value in values.items():
        object.__setattr__(result, name, value)


def _moment(at: datetime) -> datetime:
    """A time as the project's settings want it."""
    return at if settings.USE_TZ else timezone.make_naive(at)


def _times(event: Mapping[str, Any]) -> dict[str, datetime | None]:
    """The times of an Event. It keeps when its last attempt began; its first message says when the first did."""
    began = [each["at"] for each in event["messages"] if each.get("status") == Status.WORKING]
    ended = event["finished_at"] if event["status"] in TERMINAL else None
    texts = {
        "enqueued_at": event["created_at"],
        "started_at": began[0] if began else event["started_at"],
        "last_attempted_at": event["started_at"],
        "finished_at": ended,
    }
    return {name: None if text is None else _moment(read_rfc3339(text)) for name, text in texts.items()}


def _outcome(event: Mapping[str, Any]) -> dict[str, Any]:
    """The members of a result that change while its job is performed."""
    status = _STATUS.get(event["status"], TaskResultStatus.FAILED)
    messages = [each for each in event["messages"] if "message" in each]
    found = [_RAISED.fullmatch(each["message"]) for each in messages]
    errors = [RaisedError(exception_class_path=each[1], traceback=each[2]) for each in found if each]
    if status == TaskResultStatus.FAILED and not errors:  # its process died, or a person cancelled it
        errors = [RaisedError(exception_class_path="asynctask.errors.AsyncTaskError", traceback=messages[-1]["message"])]
    begun = {each["attempt"]: _UNKNOWN for each in messages if each["status"] == Status.WORKING}
    workers = [*(begun | {each["attempt"]: each["process"] for each in messages if "process" in each}).values()]
    value = event["result"] if status == TaskResultStatus.SUCCESSFUL else None
    return {"status": status, "errors": errors, "worker_ids": workers, "_return_value": value}
