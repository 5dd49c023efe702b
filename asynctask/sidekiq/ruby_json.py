"""JSON text as Ruby writes and reads it.

Ruby's tools move an entry of a set by writing again what they parsed: if their text differs from the stored one by a byte,
the old entry stays and the job runs twice. :func:`dump` therefore writes the bytes of Ruby's generator, and :func:`parse`
refuses what Ruby refuses, or reads but cannot write again.

Some floats have two forms: json up to 2.10 writes ``1.0e+15`` and ``1.0e-05``, json from 2.11 on ``1e+15`` and ``0.00001``.
A new float gets the older form. A float that is written again keeps its text (``keep_numbers``) if some version of Ruby can
have written it; ``1.50`` or ``1E5`` is normalised.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

import orjson

from asynctask.errors import InputError, Problem

MAX_DEPTH: Final = 100
"""Levels of nested arrays and objects; Ruby's own limit for reading and writing."""

MAX_BYTES: Final = 16_777_216
"""Of a payload that is read."""

_PLAIN: Final = orjson.OPT_PASSTHROUGH_SUBCLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS
# Where orjson's text differs from Ruby's: exponents, 16 digits before the point, 0.00001, NaN (written as null).
_NOT_AS_RUBY: Final = re.compile(rb"null|[:,\[]-?(?:[\d.]+e|\d{16}\.|0\.0000)")
_LONG_INTEGER: Final = re.compile(rb"[:,\[\s]-?\d{19}")  # orjson reads an integer beyond 64 bits as a float
_AS_ZEROS: Final = bytes.maketrans(b"123456789", b"0" * 9)
_NINETEEN: Final = b"0" * 19
_FIXED_DIGITS: Final = 16
_FLOAT_TO_FIX: Final = re.compile(r"[:,\[]-?(?:[\d.]+e|\d{16}\.0)")
_STRING_OR_NUMBER: Final = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d[\d.]*(?:e[+-]\d+)?')
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
# Floats of Ruby's generators: 0.00001, 1.5, 1.0e-05, and from json 2.11 on 1e+15, 1.5e-7.
_RUBYS_FLOAT: Final = re.compile(
    r"-?(?:(?:0|[1-9]\d*)\.(?:0|\d*[1-9])|[1-9]\.(?:0|\d*[1-9])e[+-]\d{2,3}|[1-9](?:\.\d*[1-9])?e[+-][1-9]\d{0,2})"
)
_MAX_DIGITS: Final = 17  # the most of any generator


class Malformed(InputError, ValueError):
    """Text that is no job: Ruby cannot read it, or cannot write it again."""

    code = "malformed_job"


class Number(float):
    """A float that :func:`dump` writes as its original ``text``."""

    __slots__ = ("text",)

    text: str

    def __new__(cls, text: str) -> Self:
        number = super().__new__(cls, text)
        number.text = text
        return number


def dump(job: Mapping[str, Any]) -> str:
    """A job as Ruby's generator writes it. Raises :class:`Malformed` for values without a form in JSON."""
    return dump_any(job)


def dump_any(value: Any) -> str:
    """A JSON value as Ruby's generator writes it: no spaces, unescaped UTF-8, floats in Ruby's form."""
    try:
        quick = orjson.dumps(value, option=_PLAIN)
    except TypeError:
        return _checked(_with_own_numbers, value) if _has_own_numbers(value) else _dump_slowly(value)
    # These substring tests are faster than the regular expression and nearly always fail.
    if (b"e+" in quick or b"e-" in quick or b"null" in quick or b".0" in quick) and _NOT_AS_RUBY.search(quick):
        return _dump_slowly(value)
    if quick.count(b"[") + quick.count(b"{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise Malformed(_too_deep())
    return quick.decode()


def _dump_slowly(value: Any) -> str:
    text = _checked(_ENCODER.encode, value)
    return _STRING_OR_NUMBER.sub(_fix_float, text) if _FLOAT_TO_FIX.search(text) else text


def _checked(write: Callable[[Any], str], value: Any) -> str:
    """The result of ``write``. Raises :class:`Malformed` if Ruby could not read it."""
    try:
        text = write(value)
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError:
        raise Malformed("it holds half a character (a lone surrogate): fix its decoding") from None
    except RecursionError:
        raise Malformed(_too_deep()) from None
    except (ValueError, TypeError) as error:
        raise Malformed(f"it cannot be written as JSON: {error}; hand over numbers, texts, lists and dicts") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise Malformed(_too_deep())
    return text


def _with_own_numbers(value: Any) -> str:
    """A parsed value with the original text of its numbers; for the few values that contain a :class:`Number`."""
    if isinstance(value, Number):
        return value.text
    if isinstance(value, dict):
        return "{" + ",".join(f"{_ENCODER.encode(name)}:{_with_own_numbers(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_with_own_numbers, value)) + "]"
    text = _ENCODER.encode(value)
    return _as_ruby(text) if isinstance(value, float) else text


def _has_own_numbers(value: Any) -> bool:
    stack = [value]
    while stack:
        each = stack.pop()
        if isinstance(each, Number):
            return True
        if isinstance(each, dict | list):
            stack += each.values() if isinstance(each, dict) else each
    return False


def parse(text: str | bytes, *, max_bytes: int = MAX_BYTES, keep_numbers: bool = False) -> dict[str, Any]:
    """The job of a payload: members in order, integers exact at any length.

    ``keep_numbers``: for a job that is written again; floats that :func:`dump` would write in another form are
    :class:`Number`, with their text.

    Raises :class:`Malformed` for more than ``max_bytes``, text that is no JSON object, byte order marks, NaN, numbers
    beyond the range of floats, raw control characters, lone surrogates, and nesting deeper than 100.
    """
    if len(text) > max_bytes:
        raise Malformed(
            f"it has {len(text):,} bytes, the most is {max_bytes:,}: store the data elsewhere and send its location"
        )
    try:
        raw = text if isinstance(text, bytes) else text.encode()
        # The search for 19 digits takes a fifth of the regular expression's time and nearly always fails.
        is_long = _NINETEEN in raw.translate(_AS_ZEROS) and _LONG_INTEGER.search(raw) is not None
        if keep_numbers:
            job = _KEEPING_DECODER.decode(raw.decode())
        else:
            job = _DECODER.decode(raw.decode()) if is_long else orjson.loads(raw)
    except RecursionError:
        raise Malformed(_too_deep()) from None
    except ValueError as error:  # includes text that is no UTF-8
        raise Malformed(f"it is no JSON: {error}") from None
    if type(job) is not dict:
        raise Malformed(f"a job is a JSON object, this is {_KINDS.get(type(job), 'something else')}")
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _depth(job) > MAX_DEPTH:
        raise Malformed(_too_deep())
    if b"\\u" in raw and _SURROGATE.search(raw):
        dump_any(job)
    return job


def check(value: Any, where: str = "args") -> None:
    """Checks that a value survives JSON: ints, floats, bools, None, texts, lists, dicts with text keys.

    By exact type, for a subclass would not come back. Raises :class:`InputError` that names each place.
    """
    problems = list(_unsafe(value, where, 1))
    if problems:
        text = "; ".join(problem.message for problem in problems[:5])
        raise InputError(f"job arguments must be native JSON types: {text}", code="not_json", errors=problems)


def _unsafe(value: Any, where: str, depth: int) -> list[Problem]:
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return []
    if kind is float:
        return [] if math.isfinite(value) else [_problem(where, f"{value} has no form in JSON: send None or a text", value)]
    if kind not in (list, dict):
        return [_problem(where, f"{kind.__name__} is no JSON type: send {_INSTEAD.get(kind, 'a text or a number')}", value)]
    if depth > MAX_DEPTH:
        return [_problem(where, _too_deep(), None)]
    if kind is list:
        return [each for n, item in enumerate(value) for each in _unsafe(item, f"{where}[{n}]", depth + 1)]
    keys = [_problem(where, f"the key {key!r} is no text: send str(key)", key) for key in value if type(key) is not str]
    return keys + [each for key, item in value.items() for each in _unsafe(item, f"{where}.{key}", depth + 1)]


def _problem(where: str, message: str, value: Any) -> Problem:
    return Problem(None, where[:255], "not_json", f"{where[:255]}: {message}", repr(value)[:100])


_INSTEAD: Final[Mapping[type, str]] = {tuple: "a list", set: "a list", frozenset: "a list", bytes: "base64 text"}
_KINDS: Final[Mapping[type, str]] = {
    list: "an array", str: "a string", int: "a number", float: "a number", bool: "a boolean", type(None): "null",
}  # fmt: skip


def _too_deep() -> str:
    return f"it nests deeper than {MAX_DEPTH} levels: make it flatter"


def _depth(value: Any) -> int:
    deepest, stack = 0, [(value, 1)]
    while stack:
        each, depth = stack.pop()
        if isinstance(each, dict | list | tuple):
            deepest = max(deepest, depth)
            stack += [(child, depth + 1) for child in (each.values() if isinstance(each, dict) else each)]
        if deepest > MAX_DEPTH:
            break
    return deepest


def _fix_float(match: re.Match[str]) -> str:
    return match[0] if match[0][0] == '"' else _as_ruby(match[0])


def _as_ruby(text: str) -> str:
    """Python's text of a number in Ruby's form: d.dde+XX always with a point, also from 1e15 on if none of its 16 digits
    is behind the point."""
    if "e" in text:
        digits, _, exponent = text.partition("e")
        return text if "." in digits else f"{digits}.0e{exponent}"
    sign, digits = ("-", text[1:]) if text[0] == "-" else ("", text)
    if len(digits) == _FIXED_DIGITS + 2 and digits.endswith(".0"):
        shown = digits[:_FIXED_DIGITS].rstrip("0")
        return f"{sign}{shown[0]}.{shown[1:] or '0'}e+15"
    return text


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text[:40]} is beyond all floats")
    return number


def _parse_float(text: str) -> float:
    """A float, as :class:`Number` if Ruby can have written its text and :func:`dump` would write another."""
    number = _finite(text)
    shown = repr(number)
    if (shown == text and len(text) <= _FIXED_DIGITS + 1 and "e" not in text) or _as_ruby(shown) == text:
        return number
    if _RUBYS_FLOAT.fullmatch(text) is None:
        return number
    digits = text.partition("e")[0].replace(".", "").lstrip("-0").rstrip("0")
    return Number(text) if len(digits) <= _MAX_DIGITS else number


def _constant(name: str) -> Any:
    raise ValueError(f"{name} has no form in JSON")


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), check_circular=False)
_DECODER: Final = json.JSONDecoder(parse_float=_finite, parse_constant=_constant)
_KEEPING_DECODER: Final = json.JSONDecoder(parse_float=_parse_float, parse_constant=_constant)
