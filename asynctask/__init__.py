"""Runs lists of items as background jobs, and records the outcome of every item."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asynctask._version import __version__

if TYPE_CHECKING:
    from asynctask.app import AsyncTask
    from asynctask.errors import AsyncTaskError, InputError, NormalException
    from asynctask.job import CurrentJob, current_job
    from asynctask.worker import Priority

__all__ = [
    "AsyncTask",
    "AsyncTaskError",
    "CurrentJob",
    "InputError",
    "NormalException",
    "Priority",
    "__version__",
    "current_job",
]


def __getattr__(name: str) -> Any:
    # Imported on first access: the application imports SQLAlchemy, which job code that only raises
    # NormalException should not pay for; and a supervisor, which stays beside every worker, needs none of them.
    match name:
        case "AsyncTask":
            from asynctask import app

            return getattr(app, name)
        case "AsyncTaskError" | "InputError" | "NormalException":
            from asynctask import errors

            return getattr(errors, name)
        case "CurrentJob" | "current_job":
            from asynctask import job

            return getattr(job, name)
        case "Priority":
            from asynctask import worker

            return getattr(worker, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
