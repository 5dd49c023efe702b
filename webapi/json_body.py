"""JSON bodies: responses by orjson with integers of any size, requests parsed strictly and limited in depth."""

from __future__ import annotations

import json
import re
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final, NoReturn

import orjson
from flask import Response

from asynctask.errors import InputError
from asynctask.lists.readers.json import check_depth

__all__ = ["InvalidJson", "json_response", "json_text", "parse_json"]

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


def json_response(value: Any, status: int = 200) -> Response:
    """An ``application/json`` response."""
    return Response(json_text(value), status=status, mimetype="application/json")


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    return str(value)


def parse_json(body: bytes, *, max_depth: int) -> Any:
    """Parses ``body``, after a check of its depth, so that no nesting can exhaust the stack.

    Integers of any size stay exact. Raises :class:`InvalidJson` (400) with line and column, also for duplicate keys, NaN,
    Infinity, numbers that overflow and lone surrogates; :class:`InputError` ``too_deep`` beyond ``max_depth``.
    """
    check_depth(body, max_depth)
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidJson(f"the JSON is not UTF-8: byte {error.start + 1} cannot be read; send it as UTF-8") from None
    finite = _finite if _MAY_OVERFLOW.search(body) else None
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=finite, object_pairs_hook=_each_once)
        if b"\\u" in body:
            text = json.dumps(value, ensure_ascii=False)
            text.encode()
    except json.JSONDecodeError as error:
        cut = "; the body ends there: was it cut off?" if error.pos >= len(text.rstrip()) else ""
        raise InvalidJson(f"no JSON at line {error.lineno}, column {error.colno}: {error.msg}{cut}") from None
    except UnicodeEncodeError:
        raise InvalidJson(r"the JSON holds half of a surrogate pair (\ud800 to \udfff), which is no character") from None
    except ValueError as error:
        # int() refuses numbers of more than 4,300 digits, which take quadratic time.
        raise InvalidJson(f"the JSON holds a number that cannot be taken: {error}") from None
    return value


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
