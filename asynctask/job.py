"""The job that is being performed: what job code and middleware see of it, on every engine."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any

from asynctask.errors import JobInterrupted, carries
from asynctask.messages import clean

__all__ = ["CurrentJob", "current_job", "interrupted", "reset_current_job", "set_current_job"]


class CurrentJob:
    """One attempt of one job, from the inside.

    Attributes: ``job_id``; ``task_id`` (None for a job of no Task); ``attempt`` (rises with every retry, requeue and
    recovery, first 1); ``payload`` (the job as it travels, a dict that middleware may read and add to); ``queue``;
    ``state`` (a dict of the job's own, for middleware and job code of this attempt); ``result``.
    """

    __slots__ = (
        "_checkpoint",
        "_messages",
        "_stop",
        "attempt",
        "job_id",
        "payload",
        "queue",
        "result",
        "state",
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
        checkpoint: Any = None,
        should_stop: Callable[[], bool] | None = None,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.job_id = job_id
        self.task_id = task_id
        self.attempt = attempt
        self.queue = queue
        self.payload: dict[str, Any] = {} if payload is None else payload
        self.state: dict[str, Any] = {} if state is None else state
        self.result: Any = None
        self._checkpoint = checkpoint
        self._messages: list[str] = []
        self._stop = should_stop

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of the job as they travel: JSON values by position, an item of a Task as the one and only."""
        return tuple(self.payload.get("args") or ())

    def message(self, text: str) -> None:
        """Adds a message to the Event; it is written with the outcome, or with ``working`` if that comes first."""
        self._messages.append(clean(str(text)))

    def take_messages(self) -> list[str]:
        """The messages added since the last call; for the tracker."""
        taken, self._messages = self._messages, []
        return taken

    def should_stop(self) -> bool:
        """Whether the runtime is shutting down or this attempt counts no more: save what you have and return or raise."""
        return self._stop is not None and self._stop()

    def __repr__(self) -> str:
        return f"<job {self.job_id} attempt {self.attempt}>"


_current: ContextVar[CurrentJob | None] = ContextVar("asynctask_current_job", default=None)


def current_job() -> CurrentJob:
    """The job being performed in this thread or coroutine. Raises RuntimeError outside a job."""
    job = _current.get()
    if job is None:
        raise RuntimeError("no job is being performed here: current_job() works inside a worker only")
    return job


def set_current_job(job: CurrentJob | None) -> Token[CurrentJob | None]:
    """Makes ``job`` the current one; give the token to :func:`reset_current_job` afterwards."""
    return _current.set(job)


def reset_current_job(token: Token[CurrentJob | None]) -> None:
    """Undoes :func:`set_current_job`."""
    _current.reset(token)


def interrupted(job: CurrentJob, error: BaseException) -> bool:
    """Whether the runtime stopped under the job, also where the job, or a library on the way, made another error of it."""
    return isinstance(error, JobInterrupted) or (job.should_stop() and carries(error, JobInterrupted))
