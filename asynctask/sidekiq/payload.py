"""A job's payload: one JSON object with Sidekiq's member names.

Writers call :func:`build` and :func:`dump`. Readers call :func:`parse` and must keep unknown members in place: other
clients, versions and middleware have their own.
"""

from __future__ import annotations

import base64
import difflib
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from asynctask.clock import SECOND, from_datetime, micros
from asynctask.errors import ConfigError, InputError, Problem
from asynctask.sidekiq.ruby_json import MAX_BYTES, Malformed, check, dump, dump_any, parse

__all__ = [
    "DEFAULT_QUEUE",
    "DEFAULT_RETRIES",
    "EPOCH_FROM_S",
    "MAX_BYTES",
    "MAX_ERROR_MESSAGE",
    "MAX_RETRIES",
    "MAX_RETRY_FOR_S",
    "REMOTE",
    "RULES",
    "UNTRACKED",
    "BadTime",
    "Malformed",
    "Rule",
    "When",
    "build",
    "check",
    "check_names",
    "check_values",
    "decode_backtrace",
    "due_at",
    "dump",
    "encode_backtrace",
    "flat",
    "nearest",
    "normalise",
    "parse",
    "presentable",
    "read_time",
    "retries",
    "write_time",
]

DEFAULT_QUEUE: Final = "default"
DEFAULT_RETRIES: Final = 25
MAX_RETRY_FOR_S: Final = 1_000_000_000
MAX_ERROR_MESSAGE: Final = 10_000
"""Characters of ``error_message`` that are kept."""

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


def _is_int(value: Any) -> bool:
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
    if not (count is None or _is_int(count)):
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
