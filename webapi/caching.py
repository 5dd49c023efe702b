"""ETag, 304 and how soon to ask again."""

from __future__ import annotations

import math
from typing import Any

from flask import Response, request

from webapi.json_body import json_response

__all__ = ["progress_response", "retry_after"]


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
