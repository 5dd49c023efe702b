"""Jobs of Rails' ActiveJob: the wrapper payload, and the encoding of arguments that JSON lacks.

====================================  ==========================================================================
Ruby                                  Python
====================================  ==========================================================================
nil, booleans, numbers, text, array   the same
hash                                  dict; symbol keys are read as texts, and a :class:`Symbol` key is written as one
keyword arguments                     keyword arguments
symbol, class, record (GlobalID)      :class:`Symbol`, :class:`ModuleName`, :class:`GlobalId`
Date; Time, DateTime, TimeWithZone    date; datetime with its offset from UTC
Duration, BigDecimal, Range           timedelta, Decimal, :class:`RubyRange`
====================================  ==========================================================================

GlobalIDs are not looked up, and classes are not resolved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from asynctask.errors import InputError
from asynctask.sidekiq.payload import MAX_DEPTH

OLD_WRAPPER: Final = "ActiveJob::QueueAdapters::SidekiqAdapter::JobWrapper"
"""The class of such a payload; every version of Sidekiq runs it."""

WRAPPER: Final = "Sidekiq::ActiveJob::Wrapper"
"""The class that Sidekiq 8 and later write; versions before 7.3.3 do not know it."""

_GLOBALID: Final = "_aj_globalid"
_SERIALIZED: Final = "_aj_serialized"
_SYMBOL_KEYS: Final = "_aj_symbol_keys"
_KEYWORDS: Final = "_aj_ruby2_keywords"
_INDIFFERENT: Final = "_aj_hash_with_indifferent_access"
_RESERVED: Final = frozenset({_GLOBALID, _SERIALIZED, _SYMBOL_KEYS, _KEYWORDS, _INDIFFERENT})
_NAMESPACE: Final = "ActiveJob::Serializers::"
_MINUTE: Final = timedelta(minutes=1)
_MOMENT: Final = len("2026-01-02T03:04:05.123456")
_UNIT_S: Final = {
    "seconds": 1, "minutes": 60, "hours": 3_600, "days": 86_400, "weeks": 604_800, "months": 2_629_746, "years": 31_556_952,
}  # fmt: skip


class Symbol(str):
    """A Ruby symbol."""

    __slots__ = ()


class ModuleName(str):
    """The name of a Ruby class or module; it is not resolved."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class GlobalId:
    """A record of the Rails application: ``gid://app/Model/id``."""

    uri: str


@dataclass(frozen=True, slots=True)
class RubyRange:
    """A Ruby range; ``exclude_end``: without its end."""

    begin: Any
    end: Any
    exclude_end: bool = False


@dataclass(frozen=True, slots=True)
class ActiveJob:
    """The content of a wrapper payload; ``data`` is Rails' whole job object."""

    job_class: str
    job_id: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    data: Mapping[str, Any]


# -- the wrapper


def is_wrapped(job: Mapping[str, Any]) -> bool:
    """Whether a payload is a job of ActiveJob."""
    return job.get("class") in (OLD_WRAPPER, WRAPPER)


def worker_name(job: Mapping[str, Any]) -> str:
    """The name of the worker of a decoded job: its class, or that inside ActiveJob's wrapper."""
    if not is_wrapped(job):
        return str(job["class"])
    carried = job.get("wrapped")
    if not isinstance(carried, str):  # old versions wrote no such member
        data = job["args"][0] if job["args"] else None
        carried = data.get("job_class") if isinstance(data, dict) else None
    return carried if isinstance(carried, str) else str(job["class"])


def unwrap(job: Mapping[str, Any]) -> ActiveJob:
    """The job in a wrapper payload. Raises :class:`InputError` if there is none."""
    args = job.get("args")
    data = args[0] if isinstance(args, list) and args else None
    if not isinstance(data, dict) or not isinstance(data.get("job_class"), str):
        raise _bad("the wrapper carries no job: its first argument must be an object with 'job_class' and 'arguments'")
    arguments, keywords = decode_arguments(data.get("arguments", []))
    return ActiveJob(data["job_class"], str(data.get("job_id") or ""), tuple(arguments), keywords, data)


def wrap(
    job_class: str,
    arguments: Sequence[Any] = (),
    keywords: Mapping[str, Any] | None = None,
    *,
    job_id: str,
    enqueued_at: str,
    queue: str = "default",
    wrapper: str = OLD_WRAPPER,
    **data: Any,
) -> dict[str, Any]:
    """The members ``class``, ``wrapped``, ``queue`` and ``args`` of a payload that Rails runs as ``job_class``.

    Arguments: ``job_id``, a UUID as text; ``enqueued_at``, RFC 3339 text; ``data``, further members of Rails' job object,
    such as ``priority``, ``locale``, ``timezone``. Raises :class:`InputError` for arguments without a form there.
    """
    inner = {
        "job_class": job_class, "job_id": job_id, "provider_job_id": None, "queue_name": queue, "priority": None,
        "arguments": encode_arguments(arguments, keywords), "executions": 0, "exception_executions": {}, "locale": "en",
        "timezone": "UTC", "enqueued_at": enqueued_at, **data,
    }  # fmt: skip
    return {"class": wrapper, "wrapped": job_class, "queue": queue, "args": [inner]}


# -- writing


def encode_arguments(arguments: Sequence[Any], keywords: Mapping[str, Any] | None = None) -> list[Any]:
    """Arguments as ActiveJob writes them, keyword arguments last. Raises :class:`InputError`."""
    encoded = [_encode(value, 1) for value in arguments]
    if keywords:
        encoded.append({**_members(keywords, 1), _KEYWORDS: list(keywords)})
    return encoded


def _encode(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise _bad(f"it nests deeper than {MAX_DEPTH} levels")
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        if not math.isfinite(value):
            raise _bad(f"{value} has no form in JSON")
        return value
    if kind in (list, tuple):
        return [_encode(item, depth + 1) for item in value]
    if kind is dict:
        return {**_members(value, depth), _SYMBOL_KEYS: [str(key) for key in value if type(key) is Symbol]}
    if kind is GlobalId:
        return {_GLOBALID: value.uri}
    for own, (name, members) in _WRITERS.items():
        if kind is own:
            return {_SERIALIZED: f"{_NAMESPACE}{name}Serializer", **members(value, depth)}
    raise _bad(f"an argument of the type {kind.__name__} has no form there: send numbers, texts, lists, dicts or times")


def _members(value: Mapping[str, Any], depth: int) -> dict[str, Any]:
    for key in value:
        if type(key) not in (str, Symbol):
            raise _bad(f"the key {key!r} is no text: send str(key)")
        if key in _RESERVED:
            raise _bad(f"the key {key!r} is ActiveJob's own: choose another name")
    return {str(key): _encode(item, depth + 1) for key, item in value.items()}


def _time(value: datetime, depth: int) -> dict[str, Any]:
    offset = value.utcoffset()
    if offset is None:
        raise _bad("a time without a zone is ambiguous: send an aware datetime, e.g. datetime.now(UTC)")
    if offset % _MINUTE:  # some historic zones have seconds, Ruby's form has none
        value = value.astimezone(UTC)
    text = value.isoformat(timespec="microseconds")
    moment, zone = text[:_MOMENT], text[_MOMENT:]
    return {"value": f"{moment}000{'Z' if zone == '+00:00' else zone}"}


def _duration(value: timedelta, depth: int) -> dict[str, Any]:
    seconds: float = value.total_seconds()
    if seconds == int(seconds):
        seconds = int(seconds)
    return {"value": seconds, "parts": [[_encode(Symbol("seconds"), depth), seconds]]}


def _range(value: RubyRange, depth: int) -> dict[str, Any]:
    ends = {"begin": _encode(value.begin, depth + 1), "end": _encode(value.end, depth + 1)}
    return {**ends, "exclude_end": value.exclude_end}


_WRITERS: Final[Mapping[type, tuple[str, Callable[[Any, int], dict[str, Any]]]]] = {
    Symbol: ("Symbol", lambda value, depth: {"value": str(value)}),
    ModuleName: ("Module", lambda value, depth: {"value": str(value)}),
    datetime: ("Time", _time),
    date: ("Date", lambda value, depth: {"value": value.isoformat()}),
    timedelta: ("Duration", _duration),
    Decimal: ("BigDecimal", lambda value, depth: {"value": str(value)}),
    RubyRange: ("Range", _range),
}


# -- reading


def decode_arguments(encoded: Any) -> tuple[list[Any], dict[str, Any]]:
    """The arguments and keyword arguments of ActiveJob's encoding. Raises :class:`InputError` for an unknown form."""
    if not isinstance(encoded, list):
        raise _bad("'arguments' must be an array")
    keywords: dict[str, Any] = {}
    if encoded and isinstance(encoded[-1], dict) and _KEYWORDS in encoded[-1]:
        keywords = _decode(encoded[-1], 1)
        encoded = encoded[:-1]
    return [_decode(value, 1) for value in encoded], keywords


def _decode(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise _bad(f"it nests deeper than {MAX_DEPTH} levels")
    if isinstance(value, list):
        return [_decode(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if _GLOBALID in value:
        if len(value) > 1 or not isinstance(value[_GLOBALID], str):
            raise _bad("a GlobalID must be alone in its object")
        return GlobalId(value[_GLOBALID])
    if _SERIALIZED in value:
        return _decode_serialized(value, depth)
    return {key: _decode(item, depth + 1) for key, item in value.items() if key not in _RESERVED}


def _decode_serialized(value: Mapping[str, Any], depth: int) -> Any:
    name = str(value[_SERIALIZED]).removeprefix(_NAMESPACE).removesuffix("Serializer")
    reader = _READERS.get(name)
    if reader is None:
        raise _bad(f"arguments of {str(value[_SERIALIZED])[:100]!r} cannot be read here: send them in a plainer form")
    try:
        return reader(value, depth)
    except (KeyError, TypeError, ValueError, OverflowError, InvalidOperation) as error:
        raise _bad(f"an argument of {name} is broken: {error!r:.200}") from None


def _read_duration(value: Mapping[str, Any], depth: int) -> timedelta:
    if "parts" not in value:
        return timedelta(seconds=value["value"])
    parts = [(str(_decode(unit, depth + 1)), count) for unit, count in value["parts"]]
    return timedelta(seconds=sum(_UNIT_S[unit] * count for unit, count in parts))


def _read_range(value: Mapping[str, Any], depth: int) -> RubyRange:
    return RubyRange(_decode(value["begin"], depth + 1), _decode(value["end"], depth + 1), bool(value["exclude_end"]))


def _text(value: Mapping[str, Any]) -> str:
    if not isinstance(value["value"], str):
        raise TypeError("its value is no text")
    return value["value"]


def _read_time(value: Mapping[str, Any], depth: int) -> datetime:
    read = datetime.fromisoformat(_text(value))
    if read.tzinfo is None:
        raise ValueError("a time without a zone")
    return read


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any], int], Any]]] = {
    "Symbol": lambda value, depth: Symbol(_text(value)),
    "Module": lambda value, depth: ModuleName(_text(value)),
    "Time": _read_time,
    "DateTime": _read_time,
    "TimeWithZone": _read_time,
    "Date": lambda value, depth: date.fromisoformat(_text(value)),
    "Duration": _read_duration,
    "BigDecimal": lambda value, depth: Decimal(_text(value)),
    "Range": _read_range,
}


def _bad(text: str) -> InputError:
    return InputError(f"this is no job of ActiveJob: {text}", code="bad_active_job")
