"""Task-tracking middleware: hand a web application a list, and have every item accounted for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asynctask._version import __version__
from asynctask.errors import AsyncTaskError, InputError, NormalException
from asynctask.job import CurrentJob, current_job
from asynctask.priority import Priority

if TYPE_CHECKING:
    from asynctask.app import AsyncTask

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
    # The application pulls in SQLAlchemy; job code that only raises NormalException should not pay for it.
    if name == "AsyncTask":
        from asynctask.app import AsyncTask

        return AsyncTask
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
