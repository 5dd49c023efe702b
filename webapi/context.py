"""The AsyncTask that a Flask application serves: kept in the application, so that several live in one process."""

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
    "progress_links",
    "progress_response",
    "reader_locale",
    "retry_after",
    "say_language",
    "tag",
    "task_url",
    "who",
    "with_links",
]

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


# -- The language of an answer: what the reader asks for, of those that ship; else the application's own.

_MAX_HEADER: Final = 1_000
"""Characters of Accept-Language that are looked at; browsers send some fifty."""
_TAGS: Final = {"zh": "zh_CN"}


def reader_locale() -> str:
    """The locale for the request at hand: the best of its ``Accept-Language`` that ships, else the application's."""
    own = asynctask_app().config.locale
    return choose(request.headers.get("Accept-Language", ""), own) if has_request_context() else own


def choose(header: str, default: str) -> str:
    """The locale for an ``Accept-Language`` header (RFC 9110, 12.5.4), by RFC 4647's look-up: zh-Hans-CN, zh-Hans, zh.

    ``default`` is for a header that names no language that ships, and for ``*``.
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
    """A locale as HTTP and HTML name it."""
    return locale.replace("_", "-")


def say_language(response: Response, locale: str) -> None:
    """Tells readers and caches in which language an answer is, and that it depends on the request."""
    response.headers["Content-Language"] = tag(locale)
    response.vary.add("Accept-Language")


# -- The links of the answers: paths, not whole addresses, so that they hold behind any proxy.

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


# -- ETag, 304 and how soon to ask again.


def progress_response(progress: dict[str, Any], status: int = 200) -> Response:
    """A progress object with a weak ETag made of its version, or 304 where the client has that version already.

    While the Task goes on, ``Retry-After`` says in whole seconds what ``poll_after_ms`` says in the body.
    """
    kind = "e" if "errors" in progress else "p"
    response = json_response(progress, status)
    response.set_etag(f"{progress['task_id']}.{progress['generation']}.{progress['version']}{kind}", weak=True)
    response.headers["Cache-Control"] = "no-cache"
    if not progress["done"]:
        response.headers["Retry-After"] = retry_after(progress)
    if request.method in ("GET", "HEAD"):
        response.make_conditional(request)
    return response


def retry_after(progress: dict[str, Any]) -> str:
    """``poll_after_ms`` as the header has it: whole seconds, at least 1."""
    return str(max(1, math.ceil(progress["poll_after_ms"] / 1000)))
