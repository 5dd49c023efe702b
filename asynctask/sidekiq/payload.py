"""A job's payload: one JSON object with Sidekiq's member names.

Writers call :func:`build` and :func:`dump`. Readers call :func:`parse` and must keep unknown members in place: other
clients, versions and middleware have their own.
"""

from __future__ import annotations

import base64
import difflib
import json
import math
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, Self

import orjson

from asynctask.clock import SECOND, from_datetime, micros
from asynctask.errors import ConfigError, InputError, Problem

DEFAULT_QUEUE: Final = "default"
DEFAULT_RETRIES: Final = 25
MAX_RETRY_FOR_S: Final = 1_000_000_000
_MAX_BACKTRACE: Final = 1_048_576
_MS_FROM: Final = 100_000_000_000
_FLOAT_BITS: Final = 53
_LAST_MICROS: Final = 2**32 * SECOND  # up to here floats resolve microseconds
_HALF_WAY: Final = SECOND // 2
_TOO_NEAR: Final = SECOND // 100  # ten times the range in which the texts differ
_NEVER_STORED: Final = ("at", "client_class", "pool")
_MAX_QUEUE: Final = 255
_TIMES: Final = ("created_at", "enqueued_at", "failed_at", "retried_at")


def build(
    worker: str,
    args: Sequence[Any],
    *,
    jid: str,
    created_at: int,
    queue: str = DEFAULT_QUEUE,
    retry: bool | int | None = True,
    enqueued_at: int | None = None,
    **members: Any,
) -> dict[str, Any]:
    """A job, its members in the order of Ruby's client.

    Arguments: ``worker``, its name; ``created_at`` and ``enqueued_at`` in microseconds (written as float seconds);
    ``members``, any others. Nothing is validated; see :func:`normalise`.
    """
    job = {"retry": retry, "queue": queue, "class": worker, "args": list(args), **members}
    job["jid"] = jid
    job["created_at"] = write_time(created_at)
    if enqueued_at is not None:
        job["enqueued_at"] = write_time(enqueued_at)
    return job


def normalise(item: Mapping[str, Any], *, jid: str, now: int) -> tuple[dict[str, Any], int | None]:
    """The job to store for a caller's item, and when it is due (microseconds; None: now).

    Validated in Sidekiq's order. The caller's members take precedence over defaults, ``jid`` and ``now`` (microseconds).
    Raises :class:`InputError`.
    """
    _validate(item)
    job: dict[str, Any] = {"retry": True, "queue": DEFAULT_QUEUE, **item}
    queue = job["queue"]
    if queue is None or queue == "":
        raise _refused("it needs the name of a queue: leave 'queue' out for 'default'")
    job["queue"] = _queue_name(str(queue))
    job["args"] = list(item["args"])
    check(job["args"])
    at = item.get("at")
    for name in _NEVER_STORED:
        job.pop(name, None)
    if job.get("retry_for") is not None:
        job["retry_for"] = int(job["retry_for"])
    job["jid"] = str(job.get("jid") or jid)
    if job.get("created_at") is None:
        job["created_at"] = write_time(now)
    return job, None if at is None else micros(at)


def _validate(item: Mapping[str, Any]) -> None:
    if not isinstance(item, Mapping) or "class" not in item or "args" not in item:
        raise _refused("it must be a mapping with 'class' and 'args'")
    if not isinstance(item["args"], list | tuple):
        raise _refused(f"'args' must be a list, not {type(item['args']).__name__}: put a single argument into [ ]")
    if not isinstance(item["class"], str) or not item["class"]:
        raise _refused(f"'class' must be the worker's name as text, not {item['class']!r}")
    at = item.get("at")
    if at is not None and not (_is_number(at) and math.isfinite(at)):
        raise _refused(f"'at' must be a time in seconds since 1970, not {at!r}")
    if item.get("tags") and not isinstance(item["tags"], list):
        raise _refused(f"'tags' must be a list of texts, not {item['tags']!r}")
    retry_for = item.get("retry_for")
    if retry_for is not None and not (_is_number(retry_for) and retry_for <= MAX_RETRY_FOR_S):
        raise _refused(f"'retry_for' must be seconds, at most {MAX_RETRY_FOR_S}, not {retry_for!r}")


def _queue_name(name: str) -> str:
    """A name that every tool can display and that is not another worker's private list."""
    if len(name) > _MAX_QUEUE or any(character in name for character in ',"\\{}') or not name.isprintable():
        raise _refused(f"{name[:80]!r} cannot be a queue: use letters, digits and _ : . - up to {_MAX_QUEUE} characters")
    if name.startswith("sq|"):
        raise _refused(f"{name[:80]!r} cannot be a queue: sq| marks private lists of Sidekiq; choose another name")
    return name


def _refused(text: str) -> InputError:
    return InputError(f"this is no job: {text}", code="bad_job")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_int(value: Any) -> bool:
    """Whether a member is a whole number; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


# -- times


def write_time(at: int) -> float:
    """Microseconds as float seconds, the one form that every version of Sidekiq reads correctly.

    Of about one such float in a thousand, a time half-way between two floats, Ruby's json writes 16 digits up to version
    2.10 and 17 from 2.11 on. Then the neighbouring float is used: it is the same microsecond, with one text in all
    versions.
    """
    seconds = at / SECOND
    if 0 < at < _LAST_MICROS:
        between = (
            at << (_FLOAT_BITS - (at // SECOND).bit_length())
        ) % SECOND  # in millionths of the distance to the next float
        if abs(between - _HALF_WAY) < _TOO_NEAR:
            return math.nextafter(seconds, -math.inf if between >= _HALF_WAY else math.inf)
    return seconds


def read_time(value: Any) -> int | None:
    """A payload's time in microseconds, from float seconds, integer milliseconds or integer seconds; None for others."""
    if not _is_number(value) or not -1e15 < value < 1e15:  # false for NaN too
        return None
    if isinstance(value, int) and value >= _MS_FROM:
        return value * 1_000
    return micros(value)


# -- members that tools can display


def presentable(job: dict[str, Any], *, queue: str) -> bool:
    """Changes members of a job that make Sidekiq's pages fail; returns whether any was changed.

    One such entry breaks the whole list. ``queue``: where the job came from, for a job without one. A text as ``tags``
    becomes a list, a ``cattr`` without names a value named ``value``. Invalid times, counts and backtraces are removed.
    Observed with Sidekiq 7.3.9 and 8.1.7.
    """
    before = dict(job)
    if not (isinstance(job.get("queue"), str) and job["queue"]):
        job["queue"] = queue
    tags = job.get("tags")
    if not (tags is None or tags is False or isinstance(tags, list | dict)):
        job["tags"] = [tags if isinstance(tags, str) else dump_any(tags)]
    cattr = job.get("cattr")
    if not (cattr is None or isinstance(cattr, list | dict)):
        job["cattr"] = {"value": cattr}
    for name in _TIMES:
        if not (job.get(name) is None or _is_number(job[name])):
            del job[name]
    count = job.get("retry_count")
    if not (count is None or is_int(count)):
        del job["retry_count"]
    _present_backtrace(job)
    return job != before


def _present_backtrace(job: dict[str, Any]) -> None:
    packed = job.get("error_backtrace")
    if packed is None:
        return
    lines = decode_backtrace(packed)
    if isinstance(packed, list):  # up to Sidekiq 6.0.0
        job["error_backtrace"] = encode_backtrace(lines)
    elif not lines:
        del job["error_backtrace"]


# -- retries


def retries(value: Any, default: int = DEFAULT_RETRIES) -> int | None:
    """The number of retries of a job with this ``retry``; None: none, and it does not go to the dead either.

    As in Ruby only false and null are false: 0 is one run and then the dead; no integer ("5", 2.5, []) means ``default``.
    """
    if value is None or value is False:
        return None
    if isinstance(value, int) and value is not True:
        return max(0, value)
    return default


# -- backtraces


def encode_backtrace(lines: Sequence[str]) -> str:
    """A backtrace as ``error_backtrace``: base64 (one line) of zlib of a JSON array."""
    return base64.b64encode(zlib.compress(dump_any(list(lines)).encode())).decode()


def decode_backtrace(value: Any) -> list[str]:
    """The lines of an ``error_backtrace``, also in the older forms: base64 with line breaks, a plain array.

    Empty if unreadable or over 1 MiB unpacked: it is only displayed, and must not fail the rest.
    """
    if isinstance(value, list):
        return [str(line) for line in value]
    try:
        packed = base64.b64decode("".join(value.split()), validate=True)
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(packed, _MAX_BACKTRACE)
        lines = [] if unpacker.unconsumed_tail else parse(b'{"lines":' + text + b"}")["lines"]
    except (AttributeError, ValueError, KeyError, zlib.error):
        return []
    return [str(line) for line in lines] if isinstance(lines, list) else []


# -- options of a job
#
# queue          the queue it waits in
# retry          True (25 times), False (never, and not kept among the dead), or a number; 0 is one run, then the dead
# retry_for      seconds after the first failure in which it is retried, instead of a number
# retry_queue    the queue its retries wait in
# dead           False: not kept among the dead after its last retry
# backtrace      True, or the number of lines of the backtrace kept with a failure
# tags           texts that tools show and search
# members        further members of the payload, for middleware or for Ruby
# log_level      of a job that Ruby performs: debug, info, warn, error or fatal
# display_class  the name that Sidekiq's pages show

MAX_RETRIES: Final = 1_000
MAX_TAGS: Final = 50
MAX_MEMBERS: Final = 50
_MAX_TEXT: Final = 255
_LEVELS: Final = ("debug", "info", "warn", "error", "fatal")

Rule = tuple[Callable[[Any], bool], str]
"""Predicate, and the message for a value that fails it."""

# Written by the client and the runtime, so no option or member may set them.
_OWN: Final = frozenset(
    {
        "class", "args", "jid", "at", "wrapped", "created_at", "enqueued_at", "retry_count", "failed_at", "retried_at",
        "error_class", "error_message", "error_backtrace", "asynctask", "client_class", "pool", "priority", "wait",
        "wait_until",
    }
)  # fmt: skip


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_TEXT and value.isprintable()


def _is_queue(value: Any) -> bool:
    return _is_text(value) and not any(character in value for character in ',"\\{}') and not value.startswith("sq|")


def _is_span(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value) and 1 <= value <= MAX_RETRY_FOR_S


def _are_tags(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) <= MAX_TAGS and all(_is_text(each) for each in value)


def _are_members(value: Any) -> bool:
    return isinstance(value, Mapping) and len(value) <= MAX_MEMBERS and all(_is_text(name) for name in value)


RULES: Final[Mapping[str, Rule]] = {
    "queue": (_is_queue, f"must be 1 to {_MAX_TEXT} letters, digits or _ : . -"),
    "retry": (
        lambda value: isinstance(value, int) and 0 <= value <= MAX_RETRIES,
        f"must be True, False or a number from 0 to {MAX_RETRIES}",
    ),
    "retry_for": (_is_span, f"must be seconds, from 1 to {MAX_RETRY_FOR_S}"),
    "retry_queue": (_is_queue, f"must be 1 to {_MAX_TEXT} letters, digits or _ : . -"),
    "dead": (lambda value: isinstance(value, bool), "must be True or False"),
    "backtrace": (
        lambda value: isinstance(value, int) and 0 <= value <= 1_000,
        "must be True, False or a number of lines up to 1000",
    ),
    "tags": (_are_tags, f"must be a list of at most {MAX_TAGS} texts of 1 to {_MAX_TEXT} characters"),
    "members": (_are_members, f"must be a dict of at most {MAX_MEMBERS} members with names as text"),
    "log_level": (lambda value: value in _LEVELS, f"must be one of {', '.join(_LEVELS)}"),
    "display_class": (_is_text, f"must be a text of 1 to {_MAX_TEXT} characters"),
}
"""The rule of each option."""

UNTRACKED: Final = ("tags", "backtrace", "dead", "retry_for", "retry_queue", "members")
"""Options of untracked jobs, beside those of every job."""

REMOTE: Final = ("queue", "retry", *UNTRACKED, "log_level", "display_class")
"""Options of a job pushed for a worker elsewhere."""


def check_names(options: Iterable[str], known: Collection[str]) -> None:
    """Raises :class:`ConfigError` for an unknown option, with the nearest known one."""
    if unknown := sorted(set(options) - set(known)):
        text = "; ".join(f"{name}{nearest(name, known)}" for name in unknown)
        raise ConfigError(f"no such job option: {text}; there are {', '.join(sorted(known))}")


def nearest(name: str, known: Iterable[str]) -> str:
    """ " (did you mean ...?)" with the nearest known name; empty if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def check_values(options: Mapping[str, Any], rules: Mapping[str, Rule] = RULES) -> None:
    """Validates the options that have a rule, at the caller, who can correct them. Raises :class:`InputError` that names
    each wrong one."""
    wrong = [
        Problem(None, name, f"bad_{name}", f"{name} {rule}", repr(options[name])[:100])
        for name, (fits, rule) in rules.items()
        if name in options and not fits(options[name])
    ]
    if wrong:
        raise InputError("; ".join(f"{each.message}, not {each.value}" for each in wrong), code=wrong[0].code, errors=wrong)
    members = options.get("members", {})
    if own := sorted(set(members) & (_OWN | set(RULES))):
        names = ", ".join(own)
        raise InputError(f"members may not hold {names}: an option or the client itself says that", code="bad_members")
    check(dict(members), "members")


def flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """Validated options as members of a payload."""
    found = {name: list(value) if name == "tags" else value for name, value in options.items() if name != "members"}
    return {**found, **options.get("members", {})}


# -- due times

EPOCH_FROM_S: Final = 1_000_000_000
"""Seconds from here on are since 1970, smaller ones from now, as in Sidekiq."""

_LAST_S: Final = 253_402_300_800  # the year 10,000, beyond the range of datetime and databases

When = float | timedelta | datetime
"""Seconds (a span, or since 1970), a timedelta, or an aware datetime."""


class BadTime(InputError, ValueError):
    """An invalid time."""

    code = "bad_time"


def due_at(when: When, now: int) -> int:
    """When a job is due that was requested at ``now``; both in microseconds since 1970.

    Raises :class:`BadTime` for a naive datetime, for other types, and for times after the year 9999.
    """
    at = _moment(when, now)
    if abs(at) >= _LAST_S * SECOND:
        raise BadTime(f"{when!r} is too far away: give a time before the year 10,000, in seconds")
    return at


def _moment(when: Any, now: int) -> int:
    if isinstance(when, timedelta):
        return now + when // timedelta(microseconds=1)
    if isinstance(when, datetime):
        try:
            return from_datetime(when)
        except ValueError as error:
            raise BadTime(str(error)) from None
    if isinstance(when, bool) or not isinstance(when, int | float) or not math.isfinite(when):
        raise BadTime(f"{when!r} is no time: give seconds, a timedelta or an aware datetime")
    return micros(when) + (now if when < EPOCH_FROM_S else 0)


# -- JSON text as Ruby writes and reads it
#
# Ruby's tools move an entry of a set by writing again what they parsed: if their text differs from the stored one by a
# byte, the old entry stays and the job runs twice. So `dump` writes the bytes of Ruby's generator, and `parse` refuses
# what Ruby refuses, or reads but cannot write again.
#
# Some floats have two forms: json up to 2.10 writes `1.0e+15` and `1.0e-05`, json from 2.11 on `1e+15` and `0.00001`.
# A new float gets the older form. A float that is written again keeps its text (`keep_numbers`) if some version of Ruby can
# have written it; `1.50` or `1E5` is normalised.

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
