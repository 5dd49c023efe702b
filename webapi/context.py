"""Helpers of one request: its AsyncTask, its language, links, ETags, its slot if it takes long, and JSON."""

from __future__ import annotations

import errno
import json
import math
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date, datetime
from decimal import Decimal
from functools import partial
from typing import Any, Final, Literal, NoReturn
from urllib.parse import quote, urlencode

import orjson
from apiflask import APIFlask
from flask import Response, current_app, g, has_request_context, request
from werkzeug.datastructures import LanguageAccept
from werkzeug.exceptions import ClientDisconnected
from werkzeug.http import parse_accept_header

from asynctask.app import AsyncTask
from asynctask.brokers.admin import first_of
from asynctask.errors import InputError, NotFound, Unavailable
from asynctask.lists.readers import Limits
from asynctask.lists.readers.encodings import BOM
from asynctask.lists.readers.json import Piece, check_depth, check_values, cut_lists, values_in
from asynctask.lists.rows import too_many_items
from asynctask.lists.uploads import JsonItems, items_body
from asynctask.messages import CATALOGUE
from asynctask.task import TaskHandle

EXTENSION: Final = "asynctask"
GONE: Final = "asynctask.gone"
"""In the WSGI environment: a function that says whether the client has closed its connection."""

HEAD_ONLY: Final = "asynctask.head_only"
"""In the WSGI environment: the server has received the head alone, and asks whether it should receive the body."""

BODY_LIMIT: Final = "asynctask.body_limit"
"""The answer to that: the longest body, in bytes. Without it the response is a refusal."""

_MAX_ID: Final = 2**63 - 1


def asynctask_app() -> AsyncTask:
    """The AsyncTask of the current Flask application, stored in it: several may live in one process."""
    app = current_app.extensions[EXTENSION]
    assert isinstance(app, AsyncTask)
    return app


def find_task(task_id: int) -> TaskHandle:
    """The Task, or :class:`NotFound` (404)."""
    return asynctask_app().task(_possible(task_id))


def find_progress(task_id: int, include: str | None = None) -> dict[str, Any]:
    """The Task's progress, in one statement; or :class:`NotFound` (404). ``include``: what it has besides, ``errors`` or
    ``context``."""
    app, task_id = asynctask_app(), _possible(task_id)
    if include == "errors":
        return app.progress(task_id, errors=True, take=JsonPage())
    return app.progress(task_id) | ({"context": app.task(task_id).context} if include == "context" else {})


def _possible(task_id: int) -> int:
    if task_id > _MAX_ID:
        raise NotFound(f"there is no Task {task_id}")
    return task_id


def who() -> str:
    """The requester for a Task's log: the name of the user, and the address."""
    where = f"web {request.remote_addr or 'unknown'}"
    return f"{g.user.name} ({where})" if "user" in g else where


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
    said = sorted(parse_accept_header(header[:_MAX_HEADER], LanguageAccept), key=lambda each: -each[1])
    return next(filter(None, (_shipped(name, default) for name, quality in said if quality > 0)), default)


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

_IN_PATH: Final = "/:@!$&'()*+,;=~"
_IN_QUERY: Final = _IN_PATH + "?%"
"""What RFC 3986 has in a path and in a query as it is."""

TASKS: Final = "/api/tasks"
TASK_PAGES: Final = "/tasks"


def task_url(task_id: int) -> str:
    """The URL of a Task's progress object."""
    return f"{request.script_root}{TASKS}/{task_id}"


def progress_links(task_id: int, root: str | None = None) -> dict[str, str]:
    """The links of a progress object. ``root``: their prefix, by default the request's."""
    root = request.script_root if root is None else root
    url = f"{root}{TASKS}/{task_id}"
    return {
        "self": url,
        "events": f"{url}/events",
        "errors": f"{url}/errors",
        "report": f"{url}/report.xlsx",
        "result": f"{url}/result",
        "stream": f"{url}/stream",
        "ui": f"{root}{TASK_PAGES}/{task_id}",
    }


def with_links(progress: dict[str, Any], root: str | None = None) -> dict[str, Any]:
    """The progress object with its links; ``root`` as in :func:`progress_links`."""
    return {**progress, "links": progress_links(int(progress["task_id"]), root)}


def page_links(after: int | str | None) -> dict[str, str | None]:
    """This page and the next; ``after`` is the key of the last row here, None on the last page."""
    path = quote(request.script_root + request.path, safe=_IN_PATH)
    given = quote(request.query_string, safe=_IN_QUERY)
    following = None
    if after is not None:
        following = f"{path}?{urlencode({**request.args.to_dict(), 'after': str(after)})}"
    return {"self": f"{path}?{given}" if given else path, "next": following}


# -- pages of rows, bounded by their bytes: one row may have a megabyte


class JsonPage:
    """Takes rows as JSON until there are ``limit`` (None: any number), or until they reach
    :data:`~asynctask.brokers.admin.PAGE_BYTES`; one row is always in it.

    ``after``: the ``cursor`` of the last one, if there may be more behind it; else None. Each row becomes a text at
    once: the objects of a hostile one take twenty times as much memory.
    """

    def __init__(self, limit: int | None = None, cursor: Callable[[dict[str, Any]], int | str] = lambda _row: 0) -> None:
        self._limit, self._cursor = limit, cursor
        self.after: int | str | None = None

    def __call__(self, rows: Iterable[dict[str, Any]]) -> list[orjson.Fragment]:
        cursors: list[int | str] = []

        def texts() -> Iterator[tuple[orjson.Fragment, int]]:
            for row in rows:
                text = bytes(memoryview(json_text(row)))  # a copy: orjson's own reserves eight times as much
                cursors.append(self._cursor(row))
                yield orjson.Fragment(text), len(text)

        taken = first_of(texts(), self._limit)
        if len(taken) < len(cursors) or len(taken) == self._limit:
            self.after = cursors[len(taken) - 1]
        return taken


# -- ETag, 304 and Retry-After


def progress_response(progress: dict[str, Any], *, conditional: bool = True) -> Response:
    """A progress object with a weak ETag of its version, or, if ``conditional``, 304 if the client has that version.

    While the Task is not done, ``Retry-After`` is ``poll_after_ms`` in whole seconds.
    """
    tag, again = progress_tag(progress), None if progress["done"] else retry_after(progress)
    if conditional and request.method in ("GET", "HEAD") and request.if_none_match.contains_weak(tag):
        return unchanged_response(tag, again)
    return _tagged(json_response(progress, cache="no-cache"), tag, again)


def unchanged_response(tag: str, again: str | None) -> Response:
    """304, for a client that has the progress object of this tag. ``again``: the ``Retry-After``."""
    return _tagged(Response(status=304, mimetype="application/json", headers={"Cache-Control": "no-cache"}), tag, again)


def _tagged(response: Response, tag: str, again: str | None) -> Response:
    response.set_etag(tag, weak=True)
    if again is not None:
        response.headers["Retry-After"] = again
    return response


def progress_tag(progress: dict[str, Any]) -> str:
    """The ETag of a progress object: another one for each object that differs."""
    kind = "e" if "errors" in progress else "c" if "context" in progress else "p"
    called = "".join(each["status"][:2] for each in progress["callbacks"] if each["status"])  # they change no version
    return f"{progress['task_id']}.{progress['generation']}.{progress['version']}{kind}{called}"


def retry_after(progress: dict[str, Any]) -> str:
    """``poll_after_ms`` in whole seconds, at least 1."""
    return str(max(1, math.ceil(progress["poll_after_ms"] / 1000)))


# -- answers that take long: limited in number, given up when the client disconnects

Kind = Literal["report", "file", "follow"]
"""A report is made, a file is fetched, while it is sent; a stream or a long poll waits."""

_SLOTS: Final = "asynctask.slots"


class Busy(Unavailable):
    """The limit of simultaneous requests of this kind is reached."""

    code = "busy"


class Slots:
    """How many requests of each kind may take long at a time, and how many of all kinds together."""

    def __init__(self, free: Mapping[Kind, int], together: int | None = None) -> None:
        self._free = dict(free)
        self._left = sum(free.values()) if together is None else together
        self._lock = threading.Lock()

    @classmethod
    def of_threads(cls, threads: int) -> Slots:
        """Those of a server that holds a thread for each: half for a kind, three quarters for all. The others stay free for
        quick requests."""
        half = max(1, threads // 2)
        return cls({"report": half, "file": half, "follow": threads // 2}, max(1, threads * 3 // 4))

    def take(self, kind: Kind) -> bool:
        """Takes one, if one is free."""
        with self._lock:
            if not (self._free[kind] and self._left):
                return False
            self._free[kind] -= 1
            self._left -= 1
            return True

    def give_back(self, kind: Kind) -> None:
        """Gives one back."""
        with self._lock:
            self._free[kind] += 1
            self._left += 1


def register_slots(flask_app: APIFlask, slots: Slots) -> None:
    """Gives the application its slots."""
    flask_app.extensions[_SLOTS] = slots


@contextmanager
def slot(kind: Kind) -> Iterator[None]:
    """A slot, held until the answer is sent. Raises :class:`Busy` (503) if none is free."""
    slots: Slots = current_app.extensions[_SLOTS]
    if not slots.take(kind):
        doing = {"report": "reports are being made", "file": "files are being sent", "follow": "clients follow Tasks"}[kind]
        raise Busy(f"as many {doing} as the server can serve at once; ask again in a moment")
    try:
        yield
    finally:
        slots.give_back(kind)


def client_check() -> Callable[[], None]:
    """A function that raises ClientDisconnected once the current request's client has closed its connection.

    If the server does not expose the connection, it never raises.
    """
    gone: Callable[[], bool] | None = request.environ.get(GONE)
    if gone is None and (connection := request.environ.get("gunicorn.socket")) is not None:
        gone = partial(_closed, connection)

    def check() -> None:
        if gone is not None and gone():
            raise ClientDisconnected

    return check


def _closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ValueError:  # TLS cannot peek
        return False
    except OSError:
        return True


def until_gone(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The chunks; a client that has gone ends them as a broken connection, so that they never look complete."""
    try:
        yield from chunks
    except ClientDisconnected:
        raise ConnectionResetError(errno.ECONNRESET, "the client has closed its connection") from None


# -- JSON: answers by orjson with integers of any size, bodies parsed strictly and limited in depth

_MAY_OVERFLOW: Final = re.compile(rb"[eE]\+?[0-9]{3}|[0-9]{300}")


class InvalidJson(InputError):
    """The text is no JSON; the message has line and column."""

    code = "invalid_json"
    status = 400


def json_text(value: Any) -> bytes:
    """``value`` as JSON in UTF-8. Integers beyond 64 bits stay exact; NaN becomes null."""
    try:
        return orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        # orjson refuses integers beyond 64 bits and lone surrogates; the standard library writes and escapes them.
        return json.dumps(value, default=_plain).encode()


def json_response(value: Any, status: int = 200, *, cache: str | None = None) -> Response:
    """An ``application/json`` response. ``cache``: its Cache-Control."""
    headers = {"Cache-Control": cache} if cache is not None else None
    return Response(json_text(value), status=status, mimetype="application/json", headers=headers)


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    return str(value)


_LISTS: Final = ("items", "jobs", "shards")
"""The members of a body that may have as many values as fit in it."""

_FEW_VALUES: Final = 100_000
_BATCH: Final = 5_000
_BATCH_BYTES: Final = 262_144


def parse_body(body: bytes, limits: Limits) -> Any:
    """:func:`parse_json` for the body of a request. A long list of items becomes :class:`JsonItems`: parsed and checked
    in small parts, because as objects it would take up to 24 times the memory of the body.

    Raises also :class:`TooLarge` for more than ``max_rows`` items.
    """
    kept: dict[str, JsonItems] = {}
    if values_in(body) > _FEW_VALUES:
        _decoded(body)
        try:
            body, kept = cut_lists(body.removeprefix(BOM), _LISTS, limits, lambda pieces: _items(pieces, limits))
        except InputError as error:
            if error.code == InvalidJson.code:
                raise InvalidJson(str(error)) from None
            raise
    value = parse_json(body, max_depth=limits.max_json_depth)
    return {**value, **{name: items for name, items in kept.items() if len(items)}} if kept else value


def _items(pieces: Iterable[Piece], limits: Limits) -> JsonItems:
    written: list[bytes] = []
    count = 0
    for some in _batches(pieces):
        count += len(some)
        if count > limits.max_rows:
            raise too_many_items(limits.max_rows)
        if some[0].size > max(_BATCH_BYTES, 16 * limits.max_item_bytes):
            written.append(some[0].raw or b"")  # alone, and refused as it is: no reader parses so large an item
        else:
            written.append(items_body(_parsed(some, limits.max_json_depth))[1:-1])
    return JsonItems(b"[" + b",".join(written) + b"]", count, limits)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """The pieces in lists of at most :data:`_BATCH`, and of :data:`_BATCH_BYTES` or one piece."""
    some: list[Piece] = []
    size = 0
    for piece in pieces:
        if some and (size + piece.size > _BATCH_BYTES or len(some) == _BATCH):
            yield some
            some, size = [], 0
        some.append(piece)
        size += piece.size
    if some:
        yield some


def _parsed(pieces: list[Piece], max_depth: int) -> Any:
    texts = [piece.raw or b"" for piece in pieces]
    try:
        return parse_json(b"[" + b",".join(texts) + b"]", max_depth=max_depth)
    except InputError:
        for piece, text in zip(pieces, texts, strict=True):  # once more, for the place in the body
            parse_json(text, max_depth=max_depth, line=piece.line, column=piece.column)
        raise


def parse_json(body: bytes, *, max_depth: int, line: int = 1, column: int = 1) -> Any:
    """Parses ``body``, after checks of its depth and of how many values it has: no nesting can exhaust the stack, and no
    short text the memory. It begins at this ``line`` and ``column``.

    Integers of any size stay exact. Raises :class:`InvalidJson` (400) with line and column, also for duplicate keys, NaN,
    Infinity, numbers that overflow and lone surrogates; :class:`InputError` ``too_deep`` beyond ``max_depth``;
    :class:`TooLarge` beyond 500,000 values.
    """
    check_depth(body, max_depth)
    check_values(body)
    text = _decoded(body)
    finite = _finite if _MAY_OVERFLOW.search(body) else None
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=finite, object_pairs_hook=_each_once)
        if b"\\u" in body:
            text = json.dumps(value, ensure_ascii=False)
            text.encode()
    except json.JSONDecodeError as error:
        cut = "; the body ends there: was it cut off?" if error.pos >= len(text.rstrip()) else ""
        place = f"line {line + error.lineno - 1}, column {error.colno + (column - 1 if error.lineno == 1 else 0)}"
        raise InvalidJson(f"no JSON at {place}: {error.msg}{cut}") from None
    except UnicodeEncodeError:
        raise InvalidJson(r"the JSON holds half of a surrogate pair (\ud800 to \udfff), which is no character") from None
    except ValueError as error:
        # int() refuses numbers of more than 4,300 digits, which take quadratic time.
        raise InvalidJson(f"the JSON holds a number that cannot be taken: {error}") from None
    return value


def _decoded(body: bytes) -> str:
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidJson(f"the JSON is not UTF-8: byte {error.start + 1} cannot be read; send it as UTF-8") from None


def _no_constant(name: str) -> NoReturn:
    raise InvalidJson(f"{name} is no JSON; leave the value out, or send null")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    seen: set[str] = set()
    twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
    shown = twice.encode("utf-8", "replace").decode()[:80]
    raise InvalidJson(f"the key {shown!r} is given twice in one object; send it once", code="duplicate_key")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise InvalidJson(f"{digits[:40]} is too large for a number; send it as text")
    return value
