"""POST /api/tasks: from a JSON body or a form with a file to a Submission, and what is answered."""

from __future__ import annotations

import re
from typing import Any, Final

from flask import Response
from werkzeug.datastructures import FileStorage

from asynctask.app import AsyncTask
from asynctask.errors import InputError, Problem
from asynctask.submission import Submission
from webapi.caching import retry_after
from webapi.incoming import FileSubmission, JsonSubmission, Options
from webapi.links import task_url, with_links
from webapi.problems import MAX_ERRORS, MalformedBody, did_you_mean
from webapi.reading import FORM, JSON, ApiRequest
from webapi.wire import json_response, parse_json

__all__ = ["KEY_PATTERN", "answer", "submit"]

WAIT_S: Final = 1.0
"""How long an answer waits for the validation of an upload, so that its bad rows are in it."""

KEY_PATTERN: Final = "^[ -~]{1,255}$"
"""What an Idempotency-Key may be."""


def submit(app: AsyncTask, incoming: ApiRequest) -> Submission:
    """Takes the list of the request. Raises :class:`InputError` (4xx) that names the field, row or column."""
    incoming.require(JSON, FORM)
    key = _idempotency_key(incoming)
    if incoming.mimetype == JSON:
        return _submit_json(app, incoming, key)
    return _submit_file(app, incoming, key)


def answer(submission: Submission) -> Response:
    """202 with the progress object and the rows refused so far; 422 with all of them where nothing was accepted."""
    progress = with_links(submission.task.progress())
    problems = list(submission.problems or ())
    url = task_url(submission.task.id)
    if progress["state"] == "rejected":
        # The first answer to this key was an error, and so is this one.
        raise InputError(
            "no row could be accepted; correct the rows and send them again", code="all_rejected", errors=problems
        )
    if problems:
        progress["errors"] = [problem.as_dict() for problem in problems[:MAX_ERRORS]]
    response = json_response(progress, 202)
    response.headers["Location"] = url
    response.headers["Retry-After"] = retry_after(progress)
    response.headers["Cache-Control"] = "no-store"
    if not submission.created:
        response.headers["Idempotency-Replayed"] = "true"
    return response


def _submit_json(app: AsyncTask, incoming: ApiRequest, key: str | None) -> Submission:
    body = incoming.get_json()
    if not isinstance(body, dict):
        raise InputError('the body must be a JSON object: {"worker": ..., "items": [...]}', code="wrong_type")
    options = _given(JsonSubmission.model_validate(body))
    worker, items = options.pop("worker"), options.pop("items")
    return app.submit_items(worker, items, wait_s=WAIT_S, idempotency_key=key, **options)


def _submit_file(app: AsyncTask, incoming: ApiRequest, key: str | None) -> Submission:
    incoming.load_form()
    file = _the_file(incoming)
    options = _form_options(incoming, app.config.max_json_depth)
    worker = options.pop("worker")
    if worker not in app.workers:
        # Before the file is stored: it may be large, and it would be for nothing.
        raise InputError(
            f"no worker is registered as {worker!r}{did_you_mean(worker, app.workers)}",
            code="unknown_worker",
            errors=[Problem(None, "worker", "unknown_worker", "no such worker", worker)],
        )
    stored = app.uploads.store(file.stream, file.filename or "", limit=app.config.max_file_bytes)
    return app.submit_file(worker, stored, wait_s=WAIT_S, idempotency_key=key, **options)


def _the_file(incoming: ApiRequest) -> FileStorage:
    names = [name for name, _ in incoming.files.items(multi=True)]
    if names != ["file"]:
        if "file" in incoming.form:
            found = "a field `file` without a filename"
        else:
            found = ", ".join(repr(name) for name in names) or "none"
        raise InputError(
            f"send exactly one file, in the field `file`; found: {found}",
            code="missing_file",
            errors=[Problem(None, "file", "missing", "send exactly one file in this field")],
        )
    return incoming.files["file"]


def _form_options(incoming: ApiRequest, max_depth: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, values in incoming.form.lists():
        if len(values) > 1:
            fault = Problem(None, name, "duplicate", "is there more than once; send it once")
            raise InputError(f"option {name!r} {fault.message}", code="invalid_option", errors=[fault])
        # An empty field of a form is one that nobody filled in.
        if values[0] != "" or name == "worker":
            fields[name] = values[0]
    if "columns" in fields:
        fields["columns"] = _columns(fields["columns"], max_depth)
    return _given(FileSubmission.model_validate(fields))


def _given(options: Options) -> dict[str, Any]:
    """The options that were sent; null says "the default" for all but ``parallel``, where it says "no limit"."""
    return {k: v for k, v in options.model_dump(exclude_unset=True).items() if v is not None or k == "parallel"}


def _columns(text: str, max_depth: int) -> Any:
    try:
        return parse_json(text.encode(), max_depth=max_depth)
    except InputError as error:
        message = f'is no JSON object such as {{"Artikel-Nr.": "sku"}}: {error}'
        fault = Problem(None, "columns", "invalid_json", message, text[:200])
        raise InputError(f"option 'columns' {message}", code="invalid_option", errors=[fault]) from None


def _idempotency_key(incoming: ApiRequest) -> str | None:
    key = incoming.headers.get("Idempotency-Key")
    if key is None:
        return None
    if not re.fullmatch(KEY_PATTERN, key):
        raise MalformedBody("Idempotency-Key must be 1 to 255 characters of ASCII, a UUID for instance", code="invalid_key")
    return key
