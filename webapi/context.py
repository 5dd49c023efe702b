"""The AsyncTask that a Flask application serves: kept in the application, so that several live in one process."""

from __future__ import annotations

from typing import Any, Final

from flask import current_app, request

from asynctask.app import AsyncTask
from asynctask.errors import NotFound
from asynctask.task import TaskHandle

__all__ = ["EXTENSION", "asynctask_app", "find_progress", "find_task", "who"]

EXTENSION: Final = "asynctask"
_MAX_ID: Final = 2**63 - 1


def asynctask_app() -> AsyncTask:
    """The AsyncTask of the application that answers the request at hand."""
    app = current_app.extensions[EXTENSION]
    assert isinstance(app, AsyncTask)
    return app


def find_task(task_id: int) -> TaskHandle:
    """The Task, or :class:`NotFound` (404)."""
    return asynctask_app().task(_possible(task_id))


def find_progress(task_id: int, *, errors: bool = False) -> dict[str, Any]:
    """How far the Task is, asked in one statement; or :class:`NotFound` (404)."""
    return asynctask_app().progress(_possible(task_id), errors)


def _possible(task_id: int) -> int:
    if task_id > _MAX_ID:
        raise NotFound(f"there is no Task {task_id}")
    return task_id


def who() -> str:
    """Who asks, for a Task's log: this version knows nobody by name, so it is the address."""
    return f"web {request.remote_addr or 'unknown'}"
