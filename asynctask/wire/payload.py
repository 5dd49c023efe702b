"""A job's payload: one JSON object with Sidekiq's member names.

Whoever writes one calls :func:`build` and :func:`dump`; whoever reads one calls :func:`parse` and keeps every member that
it does not know, in its place: other clients, other versions and other middleware have members of their own.
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
from asynctask.wire.ruby_json import MAX_BYTES, Malformed, check, dump, dump_any, parse

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
_LAST_MICROS: Final = 2**32 * SECOND  # up to here the floats lie dense enough
_HALF_WAY: Final = SECOND // 2
_TOO_NEAR: Final = SECOND // 100  # ten times as far as where the texts differ
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
    """A job, its members in the order in which Ruby's client has them.

    Arguments: the name of the ``worker``; ``created_at`` and ``enqueued_at`` in microseconds (written as float seconds);
    ``members``: whatever else travels with it. Nothing is checked: see :func:`normalise`.
    """
    job = {"retry": retry, "queue": queue, "class": worker, "args": list(args), **members}
    job["jid"] = jid
    job["created_at"] = write_time(created_at)
    if enqueued_at is not None:
        job["enqueued_at"] = write_time(enqueued_at)
    return job


def normalise(item: Mapping[str, Any], *, jid: str, now: int) -> tuple[dict[str, Any], int | None]:
    """What a caller hands in as the job that is stored, and when it is due (microseconds; None: now).

    Checked in Sidekiq's order; then the caller's members win over the defaults, ``jid`` and ``now`` (microseconds) are
    used where it brings none. Raises :class:`InputError`; nothing has been written then.
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
    """A name that every reader can show and that is no private list of another worker."""
    if len(name) > _MAX_QUEUE or any(character in name for character in ',"\\{}') or not name.isprintable():
        raise _refused(f"{name[:80]!r} cannot be a queue: use letters, digits and _ : . - up to {_MAX_QUEUE} characters")
    if name.startswith("sq|"):
        raise _refused(f"{name[:80]!r} cannot be a queue: sq| marks private lists of Sidekiq; choose another name")
    return name


def _refused(text: str) -> InputError:
    return InputError(f"this is no job: {text}", code="bad_job")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# -- times


def write_time(at: int) -> float:
    """Microseconds as float seconds: the one form that every version reads right.

    Ruby's json writes about one such float in a thousand with 16 digits up to its version 2.10 and with 17 from 2.11 on:
    where the time lies half-way between two floats. Then the other one of the two stands for the same microsecond, and
    has one text in all versions.
    """
    seconds = at / SECOND
    if 0 < at < _LAST_MICROS:
        between = (
            at << (_FLOAT_BITS - (at // SECOND).bit_length())
        ) % SECOND  # of a millionth of the step to the next float
        if abs(between - _HALF_WAY) < _TOO_NEAR:
            return math.nextafter(seconds, -math.inf if between >= _HALF_WAY else math.inf)
    return seconds


def read_time(value: Any) -> int | None:
    """A time of a payload in microseconds: float seconds, integer milliseconds, integer seconds; None for anything else."""
    if not _is_number(value) or not -1e15 < value < 1e15:  # also NaN
        return None
    if isinstance(value, int) and value >= _MS_FROM:
        return value * 1_000
    return micros(value)


# -- what tools can show


def presentable(job: dict[str, Any], *, queue: str) -> bool:
    """Changes the members of a job with which Sidekiq's pages answer nothing but an error; returns whether any was.

    One such entry breaks the whole list. ``queue`` is where the job came from, for a job that names none. Text for ``tags``
    becomes a list of it, a ``cattr`` that has no names a value of the name ``value``. Times, counts and backtraces that are
    none are left out. Observed with Sidekiq 7.3.9 and 8.1.7.
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
    if not (count is None or (_is_number(count) and isinstance(count, int))):
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
    """How often a job is retried that carries this ``retry``; None: never, and it does not go to the dead either.

    As in Ruby only false and null are false: 0 is one run and then the dead, and what is no integer ("5", 2.5, []) means
    ``default``.
    """
    if value is None or value is False:
        return None
    if isinstance(value, int) and value is not True:
        return max(0, value)
    return default


# -- backtraces


def encode_backtrace(lines: Sequence[str]) -> str:
    """The lines of a backtrace as ``error_backtrace`` has them: base64 (one line) of zlib of a JSON array."""
    return base64.b64encode(zlib.compress(dump_any(list(lines)).encode())).decode()


def decode_backtrace(value: Any) -> list[str]:
    """The lines of an ``error_backtrace``, also with line breaks in its base64 or as a plain array: old forms.

    Nothing for what cannot be read or is over 1 MB unpacked: it is shown to people, and must not stop the rest.
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


# -- What may be said of a job beside its worker and its arguments, and what each of it must be.
#
# =================
# ========================================================================================================= ``queue`` the
# queue that it waits in ``retry`` True (25 times), False (never, and not kept among the dead), or how often; 0 is one
# run, then the dead ``retry_for`` seconds after the first failure for which it is retried, in the place of a count
# ``retry_queue`` the queue that its retries wait in ``dead`` False: it is not kept among the dead when no retry is left
# ``backtrace`` True, or how many lines of the backtrace are kept with a failure ``tags`` texts that tools show and search
# ``members`` further members of the payload, for middleware or for Ruby ``log_level`` of a job that Ruby performs:
# ``debug``, ``info``, ``warn``, ``error`` or ``fatal`` ``display_class`` the name that Sidekiq's pages show for it
# =================
# =========================================================================================================

MAX_RETRIES: Final = 1_000
MAX_TAGS: Final = 50
MAX_MEMBERS: Final = 50
_MAX_TEXT: Final = 255
_LEVELS: Final = ("debug", "info", "warn", "error", "fatal")

Rule = tuple[Callable[[Any], bool], str]
"""Whether a value fits, and what to say of one that does not."""

# What the client and the runtime write themselves: nobody may say it in their place.
_OWN: Final = frozenset(
    {
        "class", "args", "jid", "at", "wrapped", "created_at", "enqueued_at", "retry_count", "failed_at", "retried_at",
        "error_class", "error_message", "error_backtrace", "asynctask", "client_class", "pool", "priority", "wait",
        "wait_until",
    }
)  # fmt: skip


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_TEXT and value.isprintable()


def _is_queue(value: Any) -> bool:
    return _is_text(value) and not any(character in value for character in ',"\\{}') and not value.startswith("sq|")


def _is_span(value: Any) -> bool:
    if not (_is_int(value) or isinstance(value, float)):
        return False
    return math.isfinite(value) and 1 <= value <= MAX_RETRY_FOR_S


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
"""For each option what it must be."""

UNTRACKED: Final = ("tags", "backtrace", "dead", "retry_for", "retry_queue", "members")
"""Options of a job that nobody tracks, beside those that every job has."""

REMOTE: Final = ("queue", "retry", *UNTRACKED, "log_level", "display_class")
"""Options of a job that is pushed for a worker elsewhere."""


def check_names(options: Iterable[str], known: Collection[str]) -> None:
    """Raises :class:`ConfigError` for an option that is none, with the nearest that there is."""
    if unknown := sorted(set(options) - set(known)):
        said = "; ".join(f"{name}{nearest(name, known)}" for name in unknown)
        raise ConfigError(f"no such job option: {said}; there are {', '.join(sorted(known))}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that asks whether one of the known names was meant; empty where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def check_values(options: Mapping[str, Any], rules: Mapping[str, Rule] = RULES) -> None:
    """The values of options, as far as they have a rule. Raises :class:`InputError` that names each wrong one.

    What nobody could hold must be refused here, where somebody can still mend it.
    """
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
    """Options that were checked as the members of a payload."""
    found = {name: list(value) if name == "tags" else value for name, value in options.items() if name != "members"}
    return {**found, **options.get("members", {})}


# -- When a job is due, as callers say it: a span from now, or a point in time.

EPOCH_FROM_S: Final = 1_000_000_000
"""A number of seconds from here on is a time since 1970, a smaller one is a span from now, as in Sidekiq."""

_LAST_S: Final = 253_402_300_800  # the year 10,000: what no clock and no database can say

When = float | timedelta | datetime
"""Seconds (a span, or since 1970), a timedelta, or an aware datetime."""


class BadTime(InputError, ValueError):
    """What somebody gave as a time is none."""

    code = "bad_time"


def due_at(when: When, now: int) -> int:
    """When a job is due that was asked for at ``now``; both in microseconds since 1970.

    Raises :class:`BadTime` for a naive datetime, for what is no number, and for times after the year 9999.
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
