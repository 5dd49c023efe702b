"""Every error as ``application/problem+json`` (RFC 9457), or as a page: the fault, its place and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from apiflask import APIFlask
from apiflask.exceptions import HTTPError
from flask import Response, render_template, request
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound, RequestEntityTooLarge

from asynctask.errors import (
    AsyncTaskError,
    BrokerUnavailable,
    InputError,
    LedgerUnavailable,
    Problem,
    SchemaOutdated,
    StorageUnavailable,
)
from asynctask.lists.problems import render, render_whole
from asynctask.logs import get_logger
from webapi import texts
from webapi.context import json_text, reader_locale, set_language, tag

JSON: Final = "application/json"
MEDIA_TYPE: Final = "application/problem+json"
MAX_ERRORS: Final = 10_000
"""Single faults in one answer; ``errors_total`` is their number if there are more."""

_log: Final = get_logger("asynctask.web")


class MalformedBody(InputError):
    """The body of a request is unreadable: truncated, no JSON or no form."""

    code = "malformed_body"
    status = 400


class CrossSite(InputError):
    """A page of another site tried to change something through the visitor's browser."""

    code = "cross_site"
    status = 403


# -- answers


def problem_response(
    status: int, detail: str, *, code: str, errors: Iterable[Problem] = (), headers: Any = None, **members: Any
) -> Response:
    """A problem+json answer; a page for a browser that opens an address. ``errors``, the single faults, are translated for
    the reader; ``members`` are extension members."""
    faults, locale = list(errors), reader_locale()
    if len(faults) > MAX_ERRORS:
        members["errors_total"] = len(faults)
    instance = request.script_root + request.full_path.rstrip("?")
    if shows_pages():
        page, after = _PAGES.get(code, "error.html"), instance if request.method == "GET" else ""
        said, translated = texts.problem(code, tag(locale)), texts.is_translated(code)
        values = {"title": _title(status), "detail": detail, "code": code, "after": after}
        text = render_template(page, **values, said=said, translated=translated)
        return _unkept(Response(text, status), locale, headers)
    shown = problem_objects(faults[:MAX_ERRORS], locale)
    body = _problem(status, code, detail, instance, shown)
    return _unkept(Response(json_text({**body, **members}), status=status, mimetype=MEDIA_TYPE), locale, headers)


_PAGES: Final = {"unauthorized": "login.html"}
"""The pages of problems that say more than what is wrong, by code."""


def shows_pages() -> bool:
    """Whether the client prefers HTML, by name, as a browser does that opens an address."""
    accepted = request.accept_mimetypes
    html = accepted["text/html"] if "text/html" in accepted.values() else 0
    return html > max(accepted[JSON], accepted[MEDIA_TYPE])


def _unkept(response: Response, locale: str, headers: Any) -> Response:
    response.headers["Cache-Control"] = "no-store"
    set_language(response, locale)
    if headers is not None:
        response.headers.extend(headers)
    return response


def _problem(status: int, code: str, detail: str, instance: str, errors: list[dict[str, Any]]) -> dict[str, Any]:
    kind = {"type": f"urn:asynctask:problem:{code}", "title": _title(status), "status": status}
    return {**kind, "detail": detail, "instance": instance, "code": code, "errors": errors}


class HttpRefusal(NamedTuple):
    """An answer of the server itself: status, code and message."""

    status: int
    code: str
    detail: str


def server_problem(status: int, code: str, detail: str) -> tuple[list[tuple[str, str]], bytes]:
    """Headers and body of an answer by the server without the application, in English."""
    body = json_text(_problem(status, code, detail, "", []))
    headers = {
        "Content-Type": MEDIA_TYPE,
        "Content-Length": str(len(body)),
        "Content-Language": "en",
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
    }
    if status == 503:
        headers["Retry-After"] = "2"
    return list(headers.items()), body


def problem_objects(problems: Iterable[Problem], locale: str) -> list[dict[str, Any]]:
    """Problems as JSON, their messages in a language."""
    return [{**problem.as_dict(), "message": render(problem, locale)} for problem in problems]


def register(flask_app: APIFlask) -> None:
    """Makes every error of ``flask_app`` a problem+json answer."""
    flask_app.register_error_handler(AsyncTaskError, _from_asynctask)
    flask_app.register_error_handler(HTTPException, _from_http)
    flask_app.register_error_handler(HTTPError, _from_apiflask)
    flask_app.register_error_handler(Exception, _from_bug)


def _from_asynctask(error: Exception) -> Response:
    assert isinstance(error, AsyncTaskError)
    status = 503 if isinstance(error, SchemaOutdated) else int(getattr(error, "status", 500))
    errors: Sequence[Problem] = getattr(error, "errors", ())
    if status >= 500:
        _log.error("request_failed", method=request.method, path=request.path, error=str(error))
    headers = {"Retry-After": "2"} if status == 503 else getattr(error, "headers", None)
    detail = render_whole(error, reader_locale()) if isinstance(error, InputError) else public_message(error)
    members = {name: found for name in ("suggestions", "sheets") if (found := getattr(error, name, ()))}
    return problem_response(status, detail, code=error.code, errors=errors, headers=headers, **members)


def public_message(error: AsyncTaskError) -> str:
    """An error's message without internal addresses, roles and paths, which only the log has."""
    kinds = (LedgerUnavailable, "database"), (BrokerUnavailable, "broker"), (StorageUnavailable, "storage of exports")
    for kind, what in kinds:
        if isinstance(error, kind):
            return f"the {what} does not answer; try again"
    return str(error)


def _from_http(error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.code or 500
    if 300 <= status < 400:
        response = error.get_response()
        assert isinstance(response, Response)
        return response
    headers = [(k, v) for k, v in error.get_headers() if k.lower() not in ("content-type", "content-length")]
    return problem_response(status, _http_detail(error), code=_code(status), headers=headers)


def _http_detail(error: HTTPException) -> str:
    if isinstance(error, NotFound):
        return f"there is nothing at {_path()}; see {request.script_root}/docs for what there is"
    if isinstance(error, MethodNotAllowed):
        allowed = ", ".join(sorted(error.valid_methods or ()))
        return f"{request.method} is not possible at {_path()}; possible: {allowed}"
    if isinstance(error, RequestEntityTooLarge):
        return f"the body is over the limit of {request.max_content_length or 0:,} bytes; send less at once"
    return error.description or _title(error.code or 500)


def _path() -> str:
    """The path as the client sees it."""
    return request.script_root + request.path


def _from_apiflask(error: Exception) -> Response:
    assert isinstance(error, HTTPError)
    return problem_response(error.status_code, error.message or _title(error.status_code), code=_code(error.status_code))


def _from_bug(error: Exception) -> Response:
    # Details of a bug go to the log only.
    _log.exception("request_failed", method=request.method, path=request.path, error=type(error).__name__)
    detail = "something went wrong here, and it is in the server's log; nothing needs to be changed in the request"
    return problem_response(500, detail, code="internal_error")


def _title(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def _code(status: int) -> str:
    known = {404: "not_found", 405: "method_not_allowed", 413: "too_large", 415: "unsupported_media_type"}
    return known.get(status) or _title(status).lower().replace(" ", "_").replace("'", "")


def did_you_mean(name: str, known: Collection[str]) -> str:
    """``; did you mean X?`` with the nearest of ``known``, else the list of them."""
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; there are {', '.join(sorted(known))}" if known else ""
