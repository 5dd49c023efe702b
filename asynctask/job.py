"""The running job, as job code and middleware see it on every engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol

from asynctask.errors import InputError, JobInterrupted, carries
from asynctask.messages import clean

MAX_CHECKPOINT: Final = 65_536
"""Largest checkpoint as JSON, in bytes."""


class CurrentJob:
    """One running attempt of one job.

    Attributes: ``job_id``; ``task_id`` (None without a Task); ``attempt`` (from 1; rises with every retry, requeue and
    recovery); ``payload`` (the job as it travels, a dict that middleware may read and extend); ``queue``; ``local`` (a dict
    for middleware and job code of this attempt); ``result``; ``state`` (see :meth:`checkpoint`).
    """

    __slots__ = (
        "_asked",
        "_batch",
        "_item",
        "_messages",
        "_place",
        "_saved",
        "_stop",
        "attempt",
        "job_id",
        "local",
        "payload",
        "queue",
        "result",
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
    ) -> None:
        self.job_id = job_id
        self.task_id = task_id
        self.attempt = attempt
        self.queue = queue
        self.payload: dict[str, Any] = {} if payload is None else payload
        self.local: dict[str, Any] = {} if local is None else local
        self.result: Any = None
        self._place: Place | None = None
        self._saved: Place | None = None
        self._messages: list[tuple[str, int | None]] = []
        self._batch: Batch | None = None
        self._item: tuple[int, int, Any] | None = None
        self._stop = should_stop
        self._asked = False

    # -- its checkpoint, from which the next attempt continues

    @property
    def state(self) -> Any:
        """The newest checkpoint of this or an earlier attempt; None before the first."""
        return None if self._place is None else self._place.value()

    def checkpoint(self, value: Any) -> None:
        """Sets the checkpoint: the next attempt finds ``value`` in :attr:`state`, however this one ends.

        Causes no write by itself: the newest value is saved four times a second and when the job stops, so after a kill a
        job repeats what it did in the last quarter of a second. ``value``: JSON of at most 64 KB. Raises
        :class:`InputError` for any other.
        """
        if self._item is not None or self._batch is not None:
            raise InputError("a job of several items saves its own place; its worker has none", code="bad_checkpoint")
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
        done, total = (None, None) if self._place is None else (self._place.done, self._place.total)
        self._place = Place(text, done, total)

    def progress(self, done: float, total: float | None = None) -> None:
        """Sets the progress shown to users: ``done`` of ``total`` (None: unknown), in any unit; saved with the
        checkpoint."""
        for number in (done, total):
            if number is not None and (not isinstance(number, int | float) or not 0 <= number <= _MOST):
                raise InputError(f"progress is counted in numbers from 0 to {_MOST:,}, not {number!r}"[:200])
        self._place = Place("null" if self._place is None else self._place.text, done, total)

    def resume(self, kept: str | None) -> None:
        """Sets the checkpoint of an earlier attempt; for the tracker."""
        self._place = self._saved = None if kept is None else Place.parse(kept)

    def adopt_place(self, kept: str | None) -> None:
        """Sets a checkpoint that another process reported, to be saved here; for the tracker."""
        if kept is not None:
            self._place = Place.parse(kept)

    @property
    def has_news(self) -> bool:
        """Whether the checkpoint is not saved yet; for the tracker."""
        return self._place is not self._saved

    def take_place(self) -> str | None:
        """The checkpoint to save; None if it is saved. For the tracker."""
        place = self._place
        if place is None or place is self._saved:
            return None
        self._saved = place
        return place.dump()

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments as they travel: JSON values by position; for a job of a Task, the item alone."""
        return tuple(self.payload.get("args") or ()) if self._item is None else (self._item[2],)

    def message(self, text: str) -> None:
        """Adds a message to the Event; written with the outcome, or with ``working`` if that comes first. In a slice it has
        the item's row."""
        self._messages.append((clean(str(text)), self.row))

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
        """The item's row in the list; None if :attr:`index` is None."""
        return None if self._item is None else self._item[1]

    def take_up(self, item: tuple[int, int, Any] | None) -> None:
        """Sets the item of a slice that is performed now: its index, row and value; for the runtime."""
        self._item = item

    def give_batch(self, batch: Batch | None) -> None:
        """Sets the receiver of :meth:`finish`, :meth:`fail` and :meth:`error`; for the runtime."""
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
        attempt is obsolete. Then save a checkpoint and call :meth:`stop`. Causes no query."""
        return self._asked or (self._stop is not None and self._stop())

    def stop(self) -> NoReturn:
        """Ends this attempt; call it after :meth:`should_stop` returned True.

        The job is stopped if a user asked for that, cancelled with its Task, and else waits for its next attempt, which has
        the last :meth:`checkpoint` and spends no retry. Raises :class:`JobInterrupted`, which must not be swallowed.
        """
        raise JobInterrupted("the job stopped between two steps")

    def ask_stop(self) -> None:
        """Makes :meth:`should_stop` true; for the tracker."""
        self._asked = True

    def __repr__(self) -> str:
        return f"<job {self.job_id} attempt {self.attempt}>"


class Batch(Protocol):
    """Receives the reports of a batch worker on its items."""

    def finish(self, index: int, result: Any) -> None: ...

    def fail(self, index: int, code: str, reason: str) -> None: ...

    def error(self, index: int, reason: str | BaseException) -> None: ...


_MOST: Final = 10**15


@dataclass(frozen=True, slots=True)
class Place:
    """A checkpoint: its value as JSON, and the progress."""

    text: str
    done: float | None = None
    total: float | None = None

    @classmethod
    def parse(cls, kept: str) -> Place:
        """From the ledger's text."""
        found = json.loads(kept)
        return cls(_dump(found.get("state")), found.get("done"), found.get("total"))

    def value(self) -> Any:
        return json.loads(self.text)

    def dump(self) -> str:
        """As the ledger keeps it."""
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


def set_current_job(job: CurrentJob | None) -> Token[CurrentJob | None]:
    """Makes ``job`` the current one; pass the token to :func:`reset_current_job` afterwards."""
    return _current.set(job)


def reset_current_job(token: Token[CurrentJob | None]) -> None:
    """Undoes :func:`set_current_job`."""
    _current.reset(token)


def interrupted(job: CurrentJob, error: BaseException) -> bool:
    """Whether the runtime interrupted the job, also if the job, or a library, raised another error from that."""
    return isinstance(error, JobInterrupted) or (job.should_stop() and carries(error, JobInterrupted))
