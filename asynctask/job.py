"""The running job, as job code and middleware see it on every engine; and calls of application code."""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from types import FunctionType, MethodType, coroutine
from typing import Any, Final, NoReturn, Protocol, TypeVar

from asynctask.errors import InputError, JobExit, JobInterrupted, JobTimeout, NotPerformed, carries
from asynctask.messages import clean

MAX_CHECKPOINT: Final = 65_536
"""Largest size of a checkpoint as JSON, in bytes."""

MAX_CONTEXT: Final = 16_384
"""Largest size of the context of a submission as JSON, in bytes."""


@dataclass(frozen=True, slots=True)
class JobTask:
    """The Task of a job, or the Task whose callback the job is, as it was when the job was lent to this process or arrived
    here. ``worker`` is that of the Task, ``*`` for jobs of several. ``context``: as JSON text, see
    :attr:`CurrentJob.context`."""

    id: int
    title: str = ""
    owner: str = ""
    worker: str = ""
    context: str | None = field(default=None, repr=False)


class CurrentJob:
    """One running attempt of one job.

    Attributes: ``job_id``; ``task_id`` (None without a Task); ``worker`` (its name); ``attempt`` (from 1; rises with every
    retry, requeue and recovery); ``payload`` (the job as it is sent, a dict that middleware may read and extend);
    ``queue``; ``local`` (a dict for middleware and job code of this attempt); ``result``; ``state`` (see
    :meth:`checkpoint`); ``task`` (a :class:`JobTask`, None without a Task; also in a callback, whose ``task_id`` is None);
    ``owner`` (that of the Task, empty without one).
    """

    __slots__ = (
        "_asked",
        "_batch",
        "_checkpoint",
        "_context",
        "_item",
        "_messages",
        "_row",
        "_saved",
        "_stop",
        "attempt",
        "job_id",
        "local",
        "owner",
        "payload",
        "queue",
        "result",
        "task",
        "task_id",
    )

    def __init__(
        self,
        job_id: str,
        *,
        task_id: int | None = None,
        attempt: int = 1,
        queue: str = "default",
        payload: dict[str, Any] | None = None,
        should_stop: Callable[[], bool] | None = None,
        local: dict[str, Any] | None = None,
        task: JobTask | None = None,
        owner: str | None = None,
        row: int | None = None,
        context: Mapping[str, Any] | None = None,
    ) -> None:
        """``owner`` and ``context``: by default those of ``task``. Raises InputError for a ``context`` that no submission
        could have."""
        self._context: str | None = None
        self.belong(task, row)
        if owner is not None:
            self.owner = owner
        if context is not None:
            self._context = context_text(context)
        self.job_id = job_id
        self.task_id = task_id
        self.attempt = attempt
        self.queue = queue
        self.payload: dict[str, Any] = {} if payload is None else payload
        self.local: dict[str, Any] = {} if local is None else local
        self.result: Any = None
        self._checkpoint: Checkpoint | None = None
        self._saved: Checkpoint | None = None
        self._messages: list[tuple[str, int | None]] = []
        self._batch: Batch | None = None
        self._item: tuple[int, int, Any] | None = None
        self._stop = should_stop
        self._asked = False

    # -- the Task, as it was when the job was lent or arrived

    def belong(self, task: JobTask | None, row: int | None) -> None:
        """Sets the job's Task, and the row of its one item in the list; for the tracker."""
        self.task = task
        self.owner = "" if task is None else task.owner
        self._row = row
        self._context = None if task is None else task.context

    @property
    def context(self) -> dict[str, Any]:
        """The constants that the submission gave to all jobs and callbacks of the Task; empty without any. A new dict each
        time, so that no job changes what another one sees."""
        return context_of(self._context)

    # -- the checkpoint, from which the next attempt continues

    @property
    def state(self) -> Any:
        """The newest checkpoint of this or an earlier attempt; None before the first."""
        return None if self._checkpoint is None else self._checkpoint.value()

    def checkpoint(self, value: Any) -> None:
        """Sets the checkpoint: the next attempt finds ``value`` in :attr:`state`, however this one ends.

        Causes no write by itself: the newest value is saved four times a second and when the job stops, so after a kill a
        job repeats the work of the last quarter of a second. ``value``: JSON of at most 64 KB. Raises :class:`InputError`
        for other values.
        """
        if self._item is not None or self._batch is not None:
            raise InputError(
                "the runtime saves the checkpoint of a job of several items; its worker has none", code="bad_checkpoint"
            )
        try:
            text = _dump(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"a checkpoint must be JSON: {error}", code="bad_checkpoint") from None
        if (size := len(text.encode())) > MAX_CHECKPOINT:
            raise InputError(
                f"the checkpoint has {size:,} bytes as JSON, the most is {MAX_CHECKPOINT:,}: keep the data elsewhere"
                " and save where it is",
                code="bad_checkpoint",
            )
        done, total = (None, None) if self._checkpoint is None else (self._checkpoint.done, self._checkpoint.total)
        self._checkpoint = Checkpoint(text, done, total)

    def progress(self, done: float, total: float | None = None) -> None:
        """Sets the progress shown to users: ``done`` of ``total`` (None: unknown), in any unit; saved with the
        checkpoint."""
        for number in (done, total):
            if number is not None and (not isinstance(number, int | float) or not 0 <= number <= _MOST):
                raise InputError(f"progress is counted in numbers from 0 to {_MOST:,}, not {number!r}"[:200])
        self._checkpoint = Checkpoint("null" if self._checkpoint is None else self._checkpoint.text, done, total)

    def resume(self, kept: str | None) -> None:
        """Sets the checkpoint of an earlier attempt; for the tracker."""
        self._checkpoint = self._saved = None if kept is None else Checkpoint.parse(kept)

    def adopt_checkpoint(self, kept: str | None) -> None:
        """Sets a checkpoint that another process reported, to be saved here; for the tracker."""
        if kept is not None:
            self._checkpoint = Checkpoint.parse(kept)

    @property
    def has_news(self) -> bool:
        """Whether the checkpoint is not saved yet; for the tracker."""
        return self._checkpoint is not self._saved

    def take_checkpoint(self) -> str | None:
        """The checkpoint to save; None if it is saved. For the tracker."""
        checkpoint = self._checkpoint
        if checkpoint is None or checkpoint is self._saved:
            return None
        self._saved = checkpoint
        return checkpoint.dump()

    @property
    def worker(self) -> str:
        """The worker's name; empty in a job that was made without its payload."""
        name = self.payload.get("wrapped", self.payload.get("class"))  # of ActiveJob, its job's class
        return name if isinstance(name, str) else ""

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments as they are sent: JSON values by position; for a job of a Task, only the item."""
        return tuple(self.payload.get("args") or ()) if self._item is None else (self._item[2],)

    def message(self, text: str) -> None:
        """Adds a message to the Event, which is written with ``working`` or the outcome, whichever is next. In a slice the
        message has the item's row."""
        self._messages.append((clean(str(text)), None if self._item is None else self._item[1]))

    def take_messages(self) -> list[tuple[str, int | None]]:
        """The messages added since the last call, each with its row or None; for the tracker."""
        taken, self._messages = self._messages, []
        return taken

    # -- items of a slice

    @property
    def index(self) -> int | None:
        """The index of the item in its slice, from 0; None in a job of one item, and in a batch."""
        return None if self._item is None else self._item[0]

    @property
    def row(self) -> int | None:
        """The row of the item in the list, for a slice that of the current item; None in a batch, between the items of a
        slice, and in a job that is no item of a list."""
        if self._item is not None:
            return self._item[1]
        return self._row if self._batch is None else None

    def take_up(self, item: tuple[int, int, Any] | None) -> None:
        """Sets the current item of a slice (index, row and value), or None; for the runtime."""
        self._item = item

    def give_batch(self, batch: Batch | None) -> None:
        """Sets the receiver of :meth:`finish`, :meth:`fail` and :meth:`error`, or None; for the runtime."""
        self._batch = batch

    def finish(self, index: int, result: Any = None) -> None:
        """Reports item ``index`` of the list of a ``batch`` worker as done. Unreported items are done when the worker
        returns."""
        self._reports().finish(index, result)

    def fail(self, index: int, reason: str, *, code: str = "failed") -> None:
        """Reports item ``index`` of the list of a ``batch`` worker as refused by the business; it is not retried."""
        self._reports().fail(index, code, str(reason))

    def error(self, index: int, reason: str | BaseException) -> None:
        """Reports item ``index`` of the list of a ``batch`` worker as failed with an error; the retry policy applies."""
        self._reports().error(index, reason)

    def _reports(self) -> Batch:
        if self._batch is None:
            raise RuntimeError("items are reported by workers that are declared with batch=True, while they run")
        return self._batch

    # -- stopping

    def should_stop(self) -> bool:
        """Whether the job should stop: a user stopped it, its Task was paused or cancelled, the runtime shuts down, or this
        attempt is obsolete. If so, save a checkpoint and call :meth:`stop`. Causes no query."""
        return self._asked or (self._stop is not None and self._stop())

    def stop(self) -> NoReturn:
        """Ends this attempt; call it after :meth:`should_stop` returned True.

        If a user stopped the job, it is stopped; if its Task was cancelled, it is cancelled; otherwise it waits for its
        next attempt, which gets the last :meth:`checkpoint` and uses no retry. Raises :class:`JobInterrupted`, which must
        not be swallowed.
        """
        raise JobInterrupted("the job stopped between two steps")

    def ask_stop(self) -> None:
        """Makes :meth:`should_stop` true; for the tracker."""
        self._asked = True

    def __repr__(self) -> str:
        return f"<job {self.job_id} attempt {self.attempt}>"


def context_text(context: Any) -> str:
    """The context of a submission as JSON text. Raises :class:`InputError` for a value that is no JSON object of at most
    16 KB."""
    code = "invalid_option"
    if not isinstance(context, Mapping):
        raise InputError(f'the context must be a JSON object such as {{"seller": 7}}, not {context!r}'[:200], code=code)
    if wrong := [name for name in context if not isinstance(name, str)]:
        raise InputError(f"the context has a name that is no text: {wrong[0]!r}"[:200], code=code)
    try:
        text = _dump(dict(context))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the context must be JSON: {error}", code=code) from None
    if (size := len(text.encode())) > MAX_CONTEXT:
        raise InputError(
            f"the context has {size:,} bytes as JSON, the most is {MAX_CONTEXT:,}: keep the data elsewhere, and give its"
            " key",
            code=code,
        )
    return text


def context_of(text: str | None) -> dict[str, Any]:
    """The context of this JSON text; empty for None."""
    found: dict[str, Any] = {} if text is None else json.loads(text)
    return found


class Batch(Protocol):
    """Receives the reports of a batch worker on its items."""

    def finish(self, index: int, result: Any) -> None: ...

    def fail(self, index: int, code: str, reason: str) -> None: ...

    def error(self, index: int, reason: str | BaseException) -> None: ...


_MOST: Final = 10**15


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint: its value as JSON text, and the progress."""

    text: str
    done: float | None = None
    total: float | None = None

    @classmethod
    def parse(cls, kept: str) -> Checkpoint:
        """A checkpoint from the ledger's text."""
        found = json.loads(kept)
        return cls(_dump(found.get("state")), found.get("done"), found.get("total"))

    def value(self) -> Any:
        return json.loads(self.text)

    def dump(self) -> str:
        """The checkpoint as text for the ledger."""
        return f'{{"state":{self.text},"done":{_dump(self.done)},"total":{_dump(self.total)}}}'


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _dump(value: Any) -> str:
    """JSON text that every database stores. Raises TypeError, ValueError or RecursionError for other values."""
    text = _ENCODER.encode(value)
    text.encode()
    return text


_current: ContextVar[CurrentJob | None] = ContextVar("asynctask_current_job", default=None)


def current_job() -> CurrentJob:
    """The job being performed in this thread or coroutine. Raises RuntimeError outside a job."""
    job = _current.get()
    if job is None:
        raise RuntimeError("no job is being performed here: current_job() works inside a worker only")
    return job


def running_job() -> CurrentJob | None:
    """The job being performed in this thread or coroutine; None outside a job."""
    return _current.get()


def set_current_job(job: CurrentJob | None) -> Token[CurrentJob | None]:
    """Makes ``job`` the current job; pass the returned token to :func:`reset_current_job` afterwards."""
    return _current.set(job)


def reset_current_job(token: Token[CurrentJob | None]) -> None:
    """Undoes :func:`set_current_job`."""
    _current.reset(token)


def interrupted(job: CurrentJob, error: BaseException) -> bool:
    """Whether the runtime interrupted the job, also if the job or a library raised another error from the interruption."""
    return isinstance(error, JobInterrupted) or (job.should_stop() and carries(error, JobInterrupted))


# -- calling code of the application
#
# Three functions, each based on the one before: `in_this_process`, `run`, and `performed`.

T = TypeVar("T")

_STDERR: Final = 2


def in_this_process(function: Callable[..., T], *args: Any) -> T:
    """Calls a function; returns its result or raises its exception.

    If the function forks and the child returns here, the child ends, with the exit code that a script would have: it is a
    copy of the worker with one of its threads, and would record the same job over the same connections.
    """
    pid = os.getpid()
    try:
        result = function(*args)
    except BaseException as error:
        if os.getpid() != pid:
            _leave(error)
        raise
    if os.getpid() != pid:
        _leave(None)
    return result


def steps_in_this_process(elements: Iterable[T]) -> Iterator[T]:
    """The elements; each step of their iterator runs as in :func:`in_this_process`."""
    iterator = iter(elements)
    while (element := in_this_process(next, iterator, _END)) is not _END:
        yield element


_END: Final[Any] = object()


@coroutine
def awaited_in_this_process(work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    """Awaits a coroutine, each step of which runs as in :func:`in_this_process`: between two steps, a forked copy of the
    event loop would continue with the other jobs."""
    pid, step, value = os.getpid(), work.send, None
    while True:
        try:
            yielded = step(value)
        except StopIteration as end:
            if os.getpid() != pid:
                _leave(None)
            result: T = end.value
            return result
        except BaseException as error:
            if os.getpid() != pid:
                _leave(error)
            raise
        if os.getpid() != pid:
            _leave(RuntimeError("a forked process cannot wait in the event loop of its parent"))
        try:
            step, value = work.send, (yield yielded)
        except BaseException as error:
            step, value = work.throw, error


def _leave(error: BaseException | None) -> NoReturn:
    """Ends a forked process without flushing buffers or closing connections, which the parent uses, too."""
    code, text = 0, ""
    try:
        if isinstance(error, SystemExit):
            code, text = _exit_code(error)
        elif error is not None:
            code, text = 1, "".join(traceback.format_exception(error))
        if text and sys.__stderr__ is not None:  # otherwise the descriptor may be that of a file
            os.write(_STDERR, text.rstrip().encode("utf-8", "backslashreplace") + b"\n")
    finally:
        os._exit(code)


def _exit_code(error: SystemExit) -> tuple[int, str]:
    """The exit code that Python would give the process, and the text that it would write."""
    if error.code is None:
        return 0, ""
    if isinstance(error.code, int):
        return error.code & 0xFF, ""
    try:
        return 1, str(error.code)
    except Exception as unsaid:
        return 1, f"an object of {type(error.code).__name__}, which raises {type(unsaid).__name__} for its text"


def run(function: Callable[..., T], *args: Any, is_engines: Callable[[SystemExit], bool] = lambda _: False) -> T | None:
    """As :func:`in_this_process`, but ``sys.exit()`` ends the job, not the process: with the code 0 or None this returns
    None, with another code it raises :class:`~asynctask.errors.JobExit`.

    ``is_engines``: whether the engine around the job raised the SystemExit, which is then raised unchanged.
    """
    try:
        return in_this_process(function, *args)
    except SystemExit as error:
        if is_engines(error):
            raise
        code, text = _exit_code(error)
        if not code and error.code:  # a shell sees 0 for 256, but it was no success
            code = int(error.code)
        if carries(error, JobInterrupted) or carries(error, JobTimeout):  # the runtime ended the job
            text = text or "the runtime had ended it"
        elif not code:
            return None
        raise JobExit(code, clean(text)) from error


def performed(
    function: Callable[..., T], *args: Any, is_engines: Callable[[SystemExit], bool] = lambda _: False
) -> T | None:
    """As :func:`run`, for a function whose work is done when it has returned. Raises
    :class:`~asynctask.errors.NotPerformed` if it returned work that is still to be performed, see :func:`refuse_work`.
    """
    return refuse_work(run(function, *args, is_engines=is_engines))


_DONE: Final = frozenset({type(None), bool, int, float, str, dict, list, tuple})
_LAZY: Final = (
    Generator, AsyncGenerator, map, filter, zip, enumerate, FunctionType, MethodType, functools.partial,
)  # fmt: skip
_LAZY_MODULES: Final = frozenset({"itertools", "concurrent.futures._base", "contextlib"})


def refuse_work(result: T) -> T:
    """A function's result, if it is a value. Raises :class:`~asynctask.errors.NotPerformed` for work that is still to be
    performed: awaitables, lazy iterators that call functions, context managers from a generator function, and functions
    (the result of a decorator that was written without its parentheses)."""
    if type(result) not in _DONE and is_work(result):
        if isinstance(result, Coroutine | Generator):
            result.close()  # the error reports it; otherwise the garbage collector would warn at some later time
        raise NotPerformed(
            f"it returned work that nobody performs ({type(result).__name__}): await it, or go through it, before you"
            " return"
        )
    return result


def is_work(value: object) -> bool:
    """Whether a value is work that is still to be performed, see :func:`refuse_work`."""
    return inspect.isawaitable(value) or isinstance(value, _LAZY) or type(value).__module__ in _LAZY_MODULES


ASYNC: Final = "an async function"
GENERATOR: Final = "a generator function"
_ASYNC_GENERATOR: Final = "an async generator function"


def work_of(function: Any) -> str | None:
    """The kind of a function whose call returns work instead of running its body, by its declaration: :data:`ASYNC`,
    :data:`GENERATOR` or an async generator function; None for an ordinary function."""
    while isinstance(function, functools.partial):
        function = function.func
    for each in (function, getattr(type(function), "__call__", None)):  # noqa: B004 - it is inspected, not called
        if inspect.iscoroutinefunction(each):
            return ASYNC
        if inspect.isasyncgenfunction(each):
            return _ASYNC_GENERATOR
        if inspect.isgeneratorfunction(each):
            return GENERATOR
    return None
