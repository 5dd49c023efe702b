"""Workers: functions and classes that perform an item, registered by name."""

from __future__ import annotations

import collections.abc as abc
import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import IntEnum
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Literal,
    Protocol,
    TypedDict,
    TypeGuard,
    TypeVar,
    Unpack,
    get_type_hints,
    overload,
)
from urllib.parse import urlsplit

import orjson

from asynctask.config import QUEUE_NAME
from asynctask.errors import ConfigError, InputError, JobExit, NormalException
from asynctask.iterable import Iterable
from asynctask.job import ASYNC, GENERATOR, CurrentJob, work_of
from asynctask.sidekiq.payload import RULES, UNTRACKED, Rule, When, check_names, check_values, due_at

# -- priorities: the smallest runs first; any integer is valid


class Priority(IntEnum):
    """Names of common priorities.

    ``ADMIN_*``: an administrator waits for the result. ``USER_*``: many end users. ``SYSTEM_*``: background work.
    """

    ADMIN_HIGH = 120
    USER_HIGH = 140
    SYSTEM_HIGH = 160
    ADMIN_MID = 220
    USER_MID = 240
    SYSTEM_MID = 260
    ADMIN_LOW = 320
    USER_LOW = 340
    SYSTEM_LOW = 360


# -- workers

if TYPE_CHECKING:
    from pydantic import BaseModel
    from typing_extensions import ParamSpec  # typing's has no default before 3.13
    from typing_extensions import TypeVar as Defaulted

    from asynctask.task import TaskHandle

    P = ParamSpec("P", default=...)
    R_co = Defaulted("R_co", covariant=True, default=Any)
    Model = TypeVar("Model", bound=BaseModel)
else:
    from typing import ParamSpec

    P = ParamSpec("P")
    R_co = TypeVar("R_co", covariant=True)


TRACKED_RETRIES = 3
"""Default number of retries of a tracked job: Sidekiq's 25 would keep a Task open for three weeks."""

DEFAULT_RETRIES = 25
"""Default number of retries of an untracked job, as in Sidekiq."""

MAX_PRIORITY = 1_000_000

RetryIn = Callable[[int, BaseException, CurrentJob], float | str | None]
"""(count of retries so far, exception, job) -> seconds (0: at once), or "kill" or "discard", or None for the default."""


Check = Callable[[str, Mapping[str, Any]], str | None]
"""("stop" or "start", the job's Event) -> a reason to refuse, or None."""


class Shape(Protocol):
    """The fields of a worker's items; created at submission, used by the runtime to convert an item back to its type."""

    @property
    def model(self) -> type[BaseModel] | None: ...

    @property
    def expected(self) -> frozenset[str]: ...

    def revive(self, params: Any) -> Any: ...

    def conceal(self, params: Any) -> Any: ...

    def indexed(self, item: Any) -> Sequence[tuple[str, str, int | None]]: ...


class Pusher(Protocol):
    """The interface of the application that pushes jobs and submits lists for a worker."""

    def push(
        self, worker: Worker, args: abc.Iterable[Sequence[Any]], *, at: When | None = None, options: Mapping[str, Any]
    ) -> list[str | None]: ...

    def submit(self, worker: Any, items: abc.Iterable[Any], **options: Unpack[TaskOptions]) -> Any: ...


T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
Q = ParamSpec("Q")
S_co = TypeVar("S_co", covariant=True)
Items = TypeVar("Items", bound=abc.Iterable[Any])


class Performs(Protocol[Q, S_co]):
    """An instance of a worker class."""

    def perform(self, *args: Q.args, **kwargs: Q.kwargs) -> S_co: ...


class Takes(Protocol[T_contra]):
    """A registered worker whose items have this type: lists may be submitted for it."""

    @property
    def shape(self) -> Shape | None: ...

    def __call__(self, item: T_contra, /) -> Any: ...


class Actor(Protocol):
    """An actor of Dramatiq: lists may be submitted for it if its broker is attached."""

    @property
    def actor_name(self) -> str: ...


class EngineTask(Protocol):
    """A task of Celery, or a function that is sent like one: lists may be submitted for it if its engine is attached."""

    def apply_async(self, *args: Any, **options: Any) -> Any: ...


class UntrackedOptions(TypedDict, total=False):
    """Further options of the payload of an untracked worker's job (:mod:`asynctask.sidekiq.payload`)."""

    tags: Sequence[str]
    backtrace: bool | int
    dead: bool
    retry_for: float
    retry_queue: str
    members: Mapping[str, Any]


class JobOptions(UntrackedOptions, total=False):
    """The options of :meth:`Worker.set`."""

    queue: str
    retry: int | bool
    priority: int
    job_id: str
    wait: When | None
    wait_until: When | None


class TaskOptions(TypedDict, total=False):
    """The options of a submission (:meth:`asynctask.AsyncTask.submit`); None is the default."""

    title: str | None
    parallel: int | None
    interval: float | None
    tolerated_failures: int | str | None
    priority: int | None
    start_at: datetime | str | None
    paused: bool | None
    open: bool | None
    open_limit_s: float | None
    queue: str | None
    owner: str | None
    who: str | None
    session: str | None
    key: str | None
    chunk_size: int | Literal["auto"] | None
    context: Mapping[str, Any] | None
    unique: Sequence[str] | str | None
    strict: bool | None
    resubmit_of: int | None
    parent: int | None
    idempotency_key: str | None
    on_complete: CallbackOption | Actor | EngineTask | None
    on_success: CallbackOption | Actor | EngineTask | None
    on_failure: CallbackOption | Actor | EngineTask | None


class WorkerOptions(UntrackedOptions, total=False):
    """The options of :meth:`asynctask.AsyncTask.worker`."""

    name: str | None
    queue: str
    retry: int | bool | None
    priority: int
    timeout: float | None
    failed_on: Sequence[type[BaseException]] | type[BaseException]
    use_task_event: bool
    unique: Sequence[str] | str
    key: str | None
    search: Sequence[str] | str
    checks: Sequence[Check] | Check
    retry_in: RetryIn | None
    retries_exhausted: Callable[[CurrentJob, BaseException], Any] | None
    on_complete: CallbackOption | None
    on_success: CallbackOption | None
    on_failure: CallbackOption | None
    batch: bool
    rate: str | None
    limit: str | None


class Register(Protocol):
    """The decorator that :meth:`asynctask.AsyncTask.worker` returns if it is called with options only."""

    @overload
    def __call__(self, target: type[Performs[Q, S_co]], /) -> Worker[Q, S_co]: ...

    @overload
    def __call__(self, target: Callable[Q, S_co], /) -> Worker[Q, S_co]: ...


@dataclass(frozen=True)
class Worker(Generic[P, R_co]):
    """A registered worker: the function and its options.

    ``retry``: True for the default count, False or 0 for none, or a number. ``timeout`` in seconds. ``failed_on``:
    exceptions that are business refusals. ``use_task_event``: whether its jobs are tracked. ``unique``: fields in which
    no two rows of a list may be equal, by default. ``key``: a field; items with equal values run one after the other,
    across its Tasks. ``search``: fields by whose values a search over all Tasks finds its jobs. ``checks``: called
    before a user stops or starts one of its jobs. ``options``: further members of the payload of an untracked job
    (:mod:`asynctask.sidekiq.payload`). ``overrides`` and ``wait``: set by :meth:`set`. ``engine``: the attached engine
    that performs it; its ``queue`` has that engine's name as a prefix. ``callbacks``: default callbacks of its Tasks,
    by name. ``batch``: its function takes a list of items, and reports on them with ``current_job().finish``, ``fail``
    and ``error``. ``columns``: those of the rows of an export; ``rows_of``: the function that yields these rows, if it
    is another one. ``rate``: how many jobs of its Tasks may start in a time, such as ``5/s``; ``limit``: the name under
    which workers share that. Calling a worker calls the declared function, in this thread; type checkers see its
    parameters and result.
    """

    name: str
    function: Callable[P, R_co]
    queue: str = "default"
    retry: int | bool = TRACKED_RETRIES
    priority: int = Priority.USER_MID
    timeout: float | None = None
    failed_on: tuple[type[BaseException], ...] = ()
    use_task_event: bool = True
    unique: tuple[str, ...] = ()
    key: str | None = None
    search: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    retry_in: RetryIn | None = None
    retries_exhausted: Callable[[CurrentJob, BaseException], Any] | None = None
    is_async: bool = False
    model: type[BaseModel] | None = None
    shape: Shape | None = None
    pusher: Pusher | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    wait: When | None = None
    engine: str | None = None
    callbacks: Mapping[str, abc.Sequence[Callback]] = field(default_factory=dict)
    batch: bool = False
    is_iterable: bool = False
    columns: tuple[str, ...] = ()
    rows_of: Callable[..., Any] | None = None
    rate: str | None = None
    limit: str | None = None

    def queue_for(self, name: str | None) -> str:
        """The queue ``name`` (None: the worker's own) for a Task, with the prefix of the worker's engine, if it has one."""
        if name is None or self.engine is None:
            return name or self.queue
        return f"{self.engine}/{name}"

    @property
    def doc(self) -> str:
        """The first paragraph of the function's docstring."""
        return (inspect.getdoc(_plain(self.function)) or "").partition("\n\n")[0]

    @property
    def max_retries(self) -> int:
        """The number of retries of its jobs without a number of their own."""
        if self.retry is True:
            return TRACKED_RETRIES if self.use_task_event else DEFAULT_RETRIES
        return int(self.retry)

    def refuses(self, error: BaseException) -> bool:
        """Whether an exception is a business refusal; ``sys.exit()`` is one if ``failed_on`` contains SystemExit."""
        raised = error.__cause__ if isinstance(error, JobExit) else None
        return isinstance(error, (NormalException, *self.failed_on)) or isinstance(raised, self.failed_on)

    def unfit_for(self, count: int) -> str | None:
        """The parameters of its function, as text like ``(item, seller)``, if a job cannot call it with ``count``
        positional arguments; None if it can."""
        function: Any = self.function
        behind = getattr(function, "__wrapped__", None)
        if inspect.iscoroutinefunction(behind) and not inspect.iscoroutinefunction(function):
            function = behind  # the function behind a wrapper that runs the coroutine, as in Dramatiq
        try:
            # The signature of the outermost function, because a decorator may add arguments.
            signature = inspect.signature(function, follow_wrapped=False)
        except (TypeError, ValueError):  # a builtin without a signature
            return None
        try:
            signature.bind(*range(count))
        except TypeError:
            bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
            return str(inspect.Signature(bare))[:200]
        return None

    def json_schema(self) -> dict[str, Any] | None:
        """The JSON Schema of an item; None if any object is accepted."""
        return None if self.model is None else self.model.model_json_schema()

    def as_dict(self) -> dict[str, Any]:
        """Its options, the fields of an item in order, the headers accepted in a sheet, and the JSON Schema. ``retry`` is
        None if the options of an engine decide."""
        schema, headers = self.json_schema(), self.shape.expected if self.shape else frozenset()
        return {
            "name": self.name,
            "doc": self.doc,
            "queue": self.queue,
            "engine": self.engine,
            "retry": self.retry if self.engine is None else None,
            "priority": self.priority,
            "timeout": self.timeout,
            "rate": self.rate,
            "limit": None if self.rate is None else self.limit or self.name,
            "search": list(self.search),
            "fields": [] if schema is None else _fields(schema, headers),
            "headers": sorted(headers),
            "item_schema": schema,
        }

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        declared: Callable[P, R_co] = self.rows_of or self.function
        return declared(*args, **kwargs)

    # -- lists

    @overload
    def submit(
        self: Takes[Model], items: abc.Iterable[Model | Mapping[str, Any]], **options: Unpack[TaskOptions]
    ) -> TaskHandle: ...

    @overload
    def submit(self: Takes[T], items: abc.Iterable[T], **options: Unpack[TaskOptions]) -> TaskHandle: ...

    def submit(self, items: abc.Iterable[Any], **options: Unpack[TaskOptions]) -> TaskHandle:
        """Submits a list for this worker: see :meth:`asynctask.AsyncTask.submit`."""
        handle: TaskHandle = self._application().submit(self, items, **options)
        return handle

    # -- Sidekiq's verbs

    def set(self, **options: Unpack[JobOptions]) -> Worker[P, R_co]:
        """The same worker with other options for the jobs pushed through it.

        ``queue``, ``retry``, ``priority``; ``wait`` and ``wait_until``: as the first argument of :meth:`perform_in`. For
        tracked jobs also ``job_id``: the id of a job that has ended reopens its Event; the id of an open job, or of a job
        of a Task, raises :class:`~asynctask.errors.IdInUse`. For untracked jobs also ``retry_for``, ``retry_queue``,
        ``dead``, ``backtrace``, ``tags`` and ``members`` (types: :mod:`asynctask.sidekiq.payload`). Raises
        :class:`ConfigError` for an option that is unknown or has no effect for this worker, :class:`InputError` for an
        invalid value.
        """
        wait, given = self.wait, dict(options)
        if said := sorted({"wait", "wait_until"} & given.keys()):
            if len(said) > 1:
                raise ConfigError("wait and wait_until say the same: give one of them")
            wait = options.get("wait", options.get("wait_until"))
            if wait is not None:
                due_at(wait, 0)  # raises for an invalid time here, not at the push
            del given[said[0]]
        self.check_options(given)
        return replace(self, overrides={**self.overrides, **given}, wait=wait)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Validates options for pushing its jobs. Raises as :meth:`set`."""
        if self.use_task_event and (untracked := [name for name in UNTRACKED if name in options]):
            raise ConfigError(
                f"worker {self.name!r} is tracked, so {', '.join(untracked)} would mean nothing: its retries and its end"
                " are in the ledger; leave it out, or give the worker use_task_event=False"
            )
        check_names(options, (*JOB_OPTIONS, *(TRACKED if self.use_task_event else UNTRACKED)))
        check_job_options(options)

    def perform_async(self, *args: P.args, **kwargs: P.kwargs) -> str | None:
        """Pushes a job. Returns its job id, or None if a client middleware stopped it.

        Arguments are sent by position; keyword arguments are put in their positions. Raises TypeError if the function has
        no such parameter, or it is keyword-only.
        """
        return self._push([self._by_position(args, kwargs)])[0]

    delay = perform_async

    def perform_in(self, seconds: When, /, *args: P.args, **kwargs: P.kwargs) -> str | None:
        """Pushes a job that starts ``seconds`` (or a timedelta) from now; if that is past, at once. Returns as
        :meth:`perform_async`. A number of a billion or more is an epoch time, as in Sidekiq; an aware datetime is a time.
        """
        return self._push([self._by_position(args, kwargs)], at=seconds)[0]

    def perform_at(self, when: When, /, *args: P.args, **kwargs: P.kwargs) -> str | None:
        """Pushes a job that starts at ``when``: an aware datetime or an epoch time in seconds."""
        return self._push([self._by_position(args, kwargs)], at=when)[0]

    def perform_bulk(self, items: abc.Iterable[Any]) -> list[str | None]:
        """Pushes a job for each item: the job's one argument, or a list of its arguments. Returns the job ids, None for
        jobs that a client middleware stopped.

        Untracked jobs are sent 1,000 per round trip, while ``items`` is consumed; if one is refused, earlier thousands are
        pushed already. Tracked jobs are written in one transaction, all or none.
        """
        args = (tuple(item) if isinstance(item, list | tuple) else (item,) for item in checked_items(items))
        return self._push(args)

    def _by_position(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        if not kwargs:
            return args
        bound = inspect.signature(self.function).bind(*args, **kwargs)
        positional = {name for name, each in bound.signature.parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD}
        if by_name := sorted(kwargs.keys() - positional):
            raise TypeError(f"a job's arguments travel by position: {self.name} has no place for {', '.join(by_name)}")
        bound.apply_defaults()  # for parameters before the last given one
        return bound.args

    def _push(self, args: abc.Iterable[Sequence[Any]], at: When | None = None) -> list[str | None]:
        return self._application().push(self, args, at=self.wait if at is None else at, options=self.overrides)

    def _application(self) -> Pusher:
        if self.pusher is None:
            why = "belongs to no application, so nothing can be pushed or submitted"
            if self.engine is not None:
                why = f"is one of {self.engine}, which sends single jobs itself: submit a list"
            raise ConfigError(f"worker {self.name!r} {why}")
        return self.pusher


# -- callbacks of Tasks

MAX_CALLBACK_BYTES: Final = 65_536
"""Largest size of a callback's arguments as JSON, in bytes."""


@dataclass(frozen=True, slots=True)
class Callback:
    """A callback of a Task: the name of the worker to call when it closes, and the first arguments (JSON-ready)."""

    worker: str
    args: tuple[Any, ...] = ()


CallbackOption = str | Mapping[str, Any] | Worker[..., Any] | Callback | abc.Sequence[Any]
"""A worker or its name, ``{"worker": ..., "args": [...]}``, ``{"url": ...}``, or a list of these."""

MOST_CALLBACKS: Final = 10
"""The most callbacks of one kind."""

WEBHOOK: Final = "asynctask.webhook"
"""The worker that delivers a callback with a URL, see :mod:`asynctask.webhooks`."""

_URL: Final = re.compile(r"https?://[A-Za-z0-9.\-\[\]:]{1,255}([/?][!-~]*)?")


def as_callbacks(said: Any) -> tuple[Callback, ...]:
    """The callbacks in an option: one, or a list of them; a text that begins with ``[`` or ``{`` is JSON. Raises
    ValueError, with the expected form."""
    if isinstance(said, str) and said.lstrip().startswith(("[", "{")):
        try:
            said = orjson.loads(said)
        except ValueError as error:
            raise ValueError(f"is no JSON ({error}); write {_CALLBACK_FORM}") from None
    several = said if isinstance(said, list | tuple) else [said]
    if len(several) > MOST_CALLBACKS:
        raise ValueError(f"has {len(several)} callbacks, the most is {MOST_CALLBACKS}")
    return tuple(as_callback(each) for each in several)


def as_callback(said: Any) -> Callback:
    """The callback that is said. Raises ValueError, with the expected form."""
    if isinstance(said, Callback):
        return said
    given = dict(said) if isinstance(said, Mapping) else {"worker": said}
    if given.keys() == {"url"}:
        return Callback(WEBHOOK, (checked_url(given["url"]),))
    worker, args = given.pop("worker", None), given.pop("args", None) or []
    name = worker.name if isinstance(worker, Worker) else worker
    if not isinstance(name, str) or not name.strip() or len(name) > 255 or not isinstance(args, list | tuple) or given:
        raise ValueError(f"must be a worker's name or {_CALLBACK_FORM}")
    if name.strip() == WEBHOOK:  # by its name it would get arguments that nobody has checked
        raise ValueError(f"names {WEBHOOK}, which is called by a URL; write {_CALLBACK_FORM}")
    try:
        size = len(orjson.dumps(list(args)))
    except TypeError as error:
        raise ValueError(f"has arguments that are no JSON: {error}") from None
    if size > MAX_CALLBACK_BYTES:
        raise ValueError(f"has arguments of {size:,} bytes, the most is {MAX_CALLBACK_BYTES:,}")
    return Callback(name.strip(), tuple(args))


_CALLBACK_FORM: Final = '{"worker": name, "args": [...]} or {"url": "https://..."}'


def checked_url(url: object) -> str:
    """A URL that a webhook is sent to. Raises ValueError."""
    if not isinstance(url, str) or len(url) > 2_000 or not _URL.fullmatch(url):
        raise ValueError(
            "must have a URL of http:// or https:// with a host, without name and password, in ASCII, of at most 2,000"
            " characters"
        )
    try:
        port = urlsplit(url).port
    except ValueError as error:
        raise ValueError(f"must have a URL: {error}") from None
    if port == 0:
        raise ValueError("must have a URL: no server is at port 0")
    return url


def check_job_options(options: Mapping[str, Any]) -> None:
    """Validates the given options; ``queue``, ``retry`` and ``priority`` as in a submission.

    Also refuses values that a database or a broker cannot store. Raises :class:`InputError` that names each wrong option.
    """
    check_values(options, _RULES)


def _is_queue(value: Any) -> bool:
    return isinstance(value, str) and QUEUE_NAME.fullmatch(value) is not None


def _is_job_id(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(JOB_ID, value) is not None


def is_priority(value: Any) -> bool:
    """Whether a value can be the priority of a job or a Task."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_PRIORITY


JOB_OPTIONS: Final = ("queue", "retry", "priority")
"""Options of every job."""

TRACKED: Final = ("job_id",)
"""Options of tracked jobs."""

JOB_ID: Final = r"[A-Za-z0-9_.:@=+-]{1,64}"
"""A regular expression for the ids that a program may give to jobs."""

_QUEUE_RULE: Final[Rule] = (_is_queue, "must be 1 to 255 letters, digits or _ : . -")
_RULES: Final[Mapping[str, Rule]] = {
    **RULES,
    "queue": _QUEUE_RULE,
    "retry_queue": _QUEUE_RULE,
    "job_id": (_is_job_id, "must be 1 to 64 letters, digits or _ . : @ = + -"),
    "priority": (is_priority, f"must be a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}"),
}


def is_span(seconds: Any) -> bool:
    """Whether a value is a valid duration: a finite number of seconds, more than 0."""
    try:
        return isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < float(seconds) < math.inf
    except OverflowError:  # an integer too large for a float
        return False


def describe(target: Any) -> tuple[str, Callable[..., Any], bool, type[BaseModel] | None]:
    """For a function or class to register: its name, the callable, whether it is ``async``, and its item's model.

    A class is instantiated for each job, and its ``perform`` called. The name is empty if the target has none, such as an
    object with ``__call__``. Raises :class:`ConfigError` for a target that cannot be called, or has no signature.
    """
    if inspect.isclass(target):
        if issubclass(target, Iterable):
            _check_iterable(target)
        perform = getattr(target, "perform", None)
        if not callable(perform):
            raise ConfigError(f"worker class {target.__name__} needs a method perform(self, item)")

        def call(*args: Any, **kwargs: Any) -> Any:
            instance: Any = target()
            return instance.perform(*args, **kwargs)

        call.__doc__ = inspect.getdoc(target)
        # In ``items``, the arguments follow the cursor.
        name, takes, skipped = ("items", target.items, 1) if issubclass(target, Iterable) else ("perform", perform, 0)
        skipped += _has_self(target, name)
        given = _signature(takes)
        call.__signature__ = given.replace(parameters=list(given.parameters.values())[skipped:])  # type: ignore[attr-defined]
        return target.__name__, call, work_of(perform) == ASYNC, _model_of(takes, skip=skipped)
    if not callable(target):
        raise ConfigError(f"a worker is a function or a class, not {target!r}")
    return declared_name(target), target, work_of(target) == ASYNC, _model_of(target)


def check_hook(what: str, function: Any) -> None:
    """Raises :class:`ConfigError` for a hook whose call would not run its body (``async def``, a generator function)."""
    if (work := work_of(function)) is not None:
        raise ConfigError(f"{what} is called in a plain thread, so it must be a plain function, not {work}")


def declared_name(target: Any) -> str:
    """The name of a function, or of the function that a ``functools.partial`` calls; empty if it has none."""
    name = getattr(_plain(target), "__name__", None)
    return name if isinstance(name, str) else ""


def _plain(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _has_self(target: type, method: str) -> bool:
    """Whether a method of the class takes the instance: it is no static method, class method, or callable object."""
    found = inspect.getattr_static(target, method)
    return not isinstance(found, staticmethod | classmethod) and hasattr(found, "__get__")


_HOOKS: Final = ("total", "on_start", "on_resume", "on_stop", "on_complete")


def _check_iterable(target: type[Iterable]) -> None:
    """Raises :class:`ConfigError` for a class that does not define its elements correctly."""
    for name in Iterable.NAMES:
        if getattr(target, name) is getattr(Iterable, name):
            raise ConfigError(f"worker class {target.__name__} needs items(self, cursor, item) and each(self, item)")
    for name in (*Iterable.NAMES, *_HOOKS):
        work = work_of(getattr(target, name))
        if work is not None and (name, work) != ("items", GENERATOR):
            raise ConfigError(
                f"worker class {target.__name__}: {name} must be a plain method, not {work}, of which a call performs"
                " nothing"
            )
    if len(_signature(target.items).parameters) < 2:
        raise ConfigError(f"worker class {target.__name__}: items(self, cursor, item) takes the cursor first")


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:  # of some functions in C
        raise ConfigError(f"{error}: a worker's arguments must be known, so call it in a function of your own") from None


def _model_of(function: Callable[..., Any], *, skip: int = 0) -> type[BaseModel] | None:
    parameters = list(_signature(function).parameters.values())[skip:]
    if not parameters:
        return None
    plain = _plain(function)
    if not hasattr(plain, "__annotations__"):
        plain = type(plain).__call__  # the target is a callable object
    try:
        hint = get_type_hints(plain).get(parameters[0].name)
    except (NameError, TypeError):  # an annotation is for type checkers only, or cannot be read
        return None
    return hint if is_model(hint) else None


def is_model(kind: Any) -> TypeGuard[type[BaseModel]]:
    """Whether a value is a pydantic model class. False unless pydantic is imported already: this function does not import
    it, which saves 8 MB in a process whose workers take plain dicts."""
    if "pydantic" not in sys.modules or not inspect.isclass(kind):
        return False
    from pydantic import BaseModel

    return issubclass(kind, BaseModel)


def checked_items(items: Items) -> Items:
    """The items of a program. Raises :class:`InputError` for a value that is not a list of items: a text, a mapping or a
    model would be iterated by its parts, and the split would fail on a non-iterable only after the Task's creation."""
    is_one = isinstance(items, str | bytes | bytearray | Mapping) or is_model(type(items))
    if is_one or (not isinstance(items, abc.Iterable) and not hasattr(items, "__getitem__")):
        hint = ", so put a single one in a list: [item]" if is_one else ""
        shown = type(items).__name__ if is_one else f"{items!r:.100}"
        raise InputError(f"a list of items is needed, or another iterable of them, not {shown}{hint}", code="wrong_type")
    return items


def _fields(schema: Mapping[str, Any], headers: Collection[str]) -> list[dict[str, Any]]:
    """The fields of an item. A title that pydantic derives from the name is not accepted as a header."""
    required = set(schema.get("required", ()))
    return [
        {
            "name": name,
            "title": field["title"] if field.get("title") in headers else name,
            "required": name in required,
            "description": field.get("description"),
        }
        for name, field in schema.get("properties", {}).items()
    ]
