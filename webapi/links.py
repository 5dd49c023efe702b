"""The links of the answers: paths, not whole addresses, so that they hold behind any proxy."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlencode

from flask import request

__all__ = ["TASKS", "TASK_PAGES", "page_links", "progress_links", "task_url", "with_links"]

# Made by hand: Flask's url_for takes longer than the statement that a progress object comes from.
TASKS: Final = "/api/tasks"
TASK_PAGES: Final = "/tasks"


def task_url(task_id: int) -> str:
    """Where a Task's progress object is."""
    return f"{request.script_root}{TASKS}/{task_id}"


def progress_links(task_id: int) -> dict[str, str]:
    """What leads on from a progress object."""
    url = task_url(task_id)
    return {
        "self": url,
        "events": f"{url}/events",
        "errors": f"{url}/errors",
        "report": f"{url}/report.xlsx",
        "ui": f"{request.script_root}{TASK_PAGES}/{task_id}",
    }


def with_links(progress: dict[str, Any]) -> dict[str, Any]:
    """The progress object with its links."""
    return {**progress, "links": progress_links(int(progress["task_id"]))}


def page_links(after: int | None) -> dict[str, str | None]:
    """This page and the next one; ``after`` is the key of the last row here, None where there is no next page."""
    path = request.script_root + request.path
    following = None
    if after is not None:
        following = f"{path}?{urlencode({**request.args.to_dict(), 'after': str(after)})}"
    return {"self": request.script_root + request.full_path.rstrip("?"), "next": following}
