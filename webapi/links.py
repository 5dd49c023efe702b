"""The links of the answers: paths, not whole addresses, so that they hold behind any proxy."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from flask import request, url_for

__all__ = ["page_links", "progress_links", "task_url", "with_links"]


def task_url(task_id: int) -> str:
    """Where a Task's progress object is."""
    return url_for("tasks.show", task_id=task_id)


def progress_links(task_id: int) -> dict[str, str]:
    """What leads on from a progress object."""
    return {
        "self": task_url(task_id),
        "events": url_for("tasks.events", task_id=task_id),
        "errors": url_for("tasks.errors", task_id=task_id),
        "report": url_for("reports.xlsx", task_id=task_id),
        "ui": url_for("pages.task", task_id=task_id),
    }


def with_links(progress: dict[str, Any]) -> dict[str, Any]:
    """The progress object with its links."""
    return {**progress, "links": progress_links(int(progress["task_id"]))}


def page_links(after: int | None) -> dict[str, str | None]:
    """This page and the next one; ``after`` is the key of the last row here, None where there is no next page."""
    following = None
    if after is not None:
        following = f"{request.path}?{urlencode({**request.args.to_dict(), 'after': str(after)})}"
        following = (request.script_root or "") + following
    return {"self": (request.script_root or "") + request.full_path.rstrip("?"), "next": following}
