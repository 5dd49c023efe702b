"""Helpers of one request: its AsyncTask, its language, links and ETags."""

from __future__ import annotations

import math
from typing import Any, Final
from urllib.parse import urlencode

from flask import Response, current_app, has_request_context, request

from asynctask.app import AsyncTask
from asynctask.errors import NotFound
from asynctask.messages import CATALOGUE
from asynctask.task import TaskHandle
from webapi.json_body import json_response

__all__ = [
    "EXTENSION",
    "TASKS",
    "TASK_PAGES",
    "asynctask_app",
    "choose",
    "find_progress",
    "find_task",
    "page_links",
    "progress_response",
    "reader_locale",
    "retry_after",
    "set_language",
    "task_url",
    "who",
    "with_links",
]

EXTENSION: Final = "asynctask"
_MAX_ID: Final = 2**63 - 1


def asynctask_app() -> AsyncTask:
    """The AsyncTask of the current Flask application, stored in it: several may live in one process."""
    app = current_app.extensions[EXTENSION]
    assert isinstance(app, AsyncTask)
    return app


def find_task(task_id: int) -> TaskHandle:
    """The Task, or :class:`NotFound` (404)."""
    return asynctask_app().task(_possible(task_id))


def find_progress(task_id: int, *, errors: bool = False) -> dict[str, Any]:
    """The Task's progress, in one statement; or :class:`NotFound` (404)."""
    return asynctask_app().progress(_possible(task_id), errors)


def _possible(task_id: int) -> int:
    if task_id > _MAX_ID:
        raise NotFound(f"there is no Task {task_id}")
    return task_id


def who() -> str:
    """The requester for a Task's log: its address, for there are no user names in this version."""
    return f"web {request.remote_addr or 'unknown'}"


# -- language

_MAX_HEADER: Final = 1_000
"""Characters of Accept-Language that are parsed; browsers send about 50."""
_TAGS: Final = {"zh": "zh_CN"}


def reader_locale() -> str:
    """The request's locale: the best shipped one of its ``Accept-Language``, else the application's."""
    own = asynctask_app().config.locale
    return choose(request.headers.get("Accept-Language", ""), own) if has_request_context() else own


def choose(header: str, default: str) -> str:
    """The locale for an ``Accept-Language`` header (RFC 9110, 12.5.4), by RFC 4647's look-up: zh-Hans-CN, zh-Hans, zh.

    ``default`` if the header names no shipped language, and for ``*``.
    """
    best, weight = default, 0.0
    for part in header[:_MAX_HEADER].split(","):
        name, _, rest = part.partition(";")
        quality = _quality(rest)
        found = _shipped(name.strip(), default)
        if found is not None and quality > weight:
            best, weight = found, quality
    return best


def _quality(text: str) -> float:
    name, _, value = text.strip().partition("=")
    if not name:
        return 1.0
    try:
        quality = float(value)
    except ValueError:
        return 0.0
    return quality if name.strip().lower() == "q" and 0.0 <= quality <= 1.0 else 0.0


def _shipped(name: str, default: str) -> str | None:
    if name == "*":
        return default
    language = name.replace("_", "-").partition("-")[0].lower()
    locale = _TAGS.get(language, language)
    return locale if locale in CATALOGUE else None


def tag(locale: str) -> str:
    """A locale as a language tag of HTTP and HTML."""
    return locale.replace("_", "-")


def set_language(response: Response, locale: str) -> None:
    """Marks an answer's language, and that it depends on the request, for readers and caches."""
    response.headers["Content-Language"] = tag(locale)
    response.vary.add("Accept-Language")


# -- links: paths without a host, valid behind any proxy
#
# Built by hand: Flask's url_for takes longer than the SQL statement of a progress object.

TASKS: Final = "/api/tasks"
TASK_PAGES: Final = "/tasks"


def task_url(task_id: int) -> str:
    """The URL of a Task's progress object."""
    return f"{request.script_root}{TASKS}/{task_id}"


def progress_links(task_id: int) -> dict[str, str]:
    """The links of a progress object."""
    url = task_url(task_id)
    return {
        "self": url,
        "events": f"{url}/events",
        "errors": f"{url}/errors",
        "report": f"{url}/report.xlsx",
        "result": f"{url}/result",
        "ui": f"{request.script_root}{TASK_PAGES}/{task_id}",
    }


def with_links(progress: dict[str, Any]) -> dict[str, Any]:
    """The progress object with its links."""
    return {**progress, "links": progress_links(int(progress["task_id"]))}


def page_links(after: int | None) -> dict[str, str | None]:
    """This page and the next; ``after`` is the key of the last row here, None on the last page."""
    path = request.script_root + request.path
    following = None
    if after is not None:
        following = f"{path}?{urlencode({**request.args.to_dict(), 'after': str(after)})}"
    return {"self": request.script_root + request.full_path.rstrip("?"), "next": following}


# -- ETag, 304 and Retry-After


def progress_response(progress: dict[str, Any], status: int = 200) -> Response:
    """A progress object with a weak ETag of its version, or 304 if the client has that version.

    While the Task is not done, ``Retry-After`` is ``poll_after_ms`` in whole seconds.
    """
    kind = "e" if "errors" in progress else "p"
    response = json_response(progress, status, cache="no-cache")
    called = "".join(each["status"][:2] for each in progress["callbacks"] if each["status"])  # they change no version
    response.set_etag(f"{progress['task_id']}.{progress['generation']}.{progress['version']}{kind}{called}", weak=True)
    if not progress["done"]:
        response.headers["Retry-After"] = retry_after(progress)
    if request.method in ("GET", "HEAD"):
        response.make_conditional(request)
    return response


def retry_after(progress: dict[str, Any]) -> str:
    """``poll_after_ms`` in whole seconds, at least 1."""
    return str(max(1, math.ceil(progress["poll_after_ms"] / 1000)))
