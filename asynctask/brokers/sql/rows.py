"""A copy as a row of the table ``jobs``, checked before any database sees it, and back.

The three databases differ in what they refuse, cut off or take: SQLite knows no lengths, PostgreSQL no NUL character. So
what a row may hold is decided here, alike for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

from asynctask.brokers.base import Copy
from asynctask.errors import InputError, Problem, TooLarge

__all__ = ["COLUMNS", "COPY", "MAX_PAYLOAD_BYTES", "Row", "copy_of", "ordinary", "parts", "put_back", "row_of"]

Row = dict[str, Any]

COLUMNS: Final = ("jid", "attempt", "queue", "priority", "task_id", "held_in", "run_at", "deaths", "payload", "waits")
"""What a new row is made of."""

COPY: Final = ("id", "jid", "attempt", "queue", "payload", "priority", "task_id", "deaths")
"""What a copy is made of, in the order of :func:`copy_of`."""

MAX_PAYLOAD_BYTES: Final = 4_194_304
"""Of one job: escaped, it fits into one packet of MariaDB as it is delivered (16 MB)."""

_INT: Final = 2**31 - 1
_BIGINT: Final = 2**63 - 1
_NAMES: Final = (("jid", 64), ("queue", 255))
_NUMBERS: Final = (("attempt", 0, _INT), ("priority", -_INT, _INT), ("deaths", 0, _INT), ("task_id", 0, _BIGINT))

T = TypeVar("T")


def ordinary(priority: int) -> int:
    """The value of ``waits`` of a copy that was pushed."""
    return 2 * priority + 1


def put_back(priority: int) -> int:
    """The value of ``waits`` of a copy that was put back: before all that were pushed at its priority."""
    return 2 * priority


def row_of(copy: Copy, *, held_in: str | None = None, run_at: int | None = None) -> Row:
    """A copy as a new row: waiting, or in a set. Raises :class:`InputError` for what cannot be kept as it is."""
    if not _fits(copy):
        _check(copy)
    return {
        "jid": copy.jid, "attempt": copy.attempt, "queue": copy.queue, "priority": copy.priority, "task_id": copy.task_id,
        "held_in": held_in, "run_at": run_at, "deaths": copy.deaths, "payload": copy.payload,
        "waits": ordinary(copy.priority) if held_in is None else None,
    }  # fmt: skip


def _fits(copy: Copy) -> bool:
    """Whether nothing can be wrong with it, as with nearly all; what is no ASCII is looked at again."""
    jid, queue, payload = copy.jid, copy.queue, copy.payload
    return (
        0 < len(jid) <= _NAMES[0][1]
        and 0 < len(queue) <= _NAMES[1][1]
        and jid.isascii()
        and queue.isascii()
        and payload.isascii()
        and not ("\0" in payload or "\0" in jid or "\0" in queue)
        and 0 <= copy.attempt <= _INT
        and -_INT <= copy.priority <= _INT
        and 0 <= copy.deaths <= _INT
        and (copy.task_id is None or 0 <= copy.task_id <= _BIGINT)
        and len(payload) <= MAX_PAYLOAD_BYTES
    )


def _check(copy: Copy) -> None:
    problems = [each for name, limit in _NAMES for each in _name_problems(name, getattr(copy, name), limit)]
    for name, least, most in _NUMBERS:
        value = getattr(copy, name)
        if not (value is None and name == "task_id") and not least <= value <= most:
            problems.append(Problem(None, name, "out_of_range", f"{name} must be from {least} to {most}", value))
    problems += _text_problems("payload", copy.payload)
    if problems:
        said = "; ".join(problem.message for problem in problems)
        raise InputError(f"this job cannot be put on a queue: {said}", code="bad_job", errors=problems)
    if len(copy.payload) * 4 > MAX_PAYLOAD_BYTES and len(copy.payload.encode()) > MAX_PAYLOAD_BYTES:
        raise TooLarge(
            f"the job's payload has {len(copy.payload.encode()):,} bytes, the most is {MAX_PAYLOAD_BYTES:,}: put the data"
            " somewhere and hand over where it is"
        )


def _name_problems(name: str, value: str, limit: int) -> list[Problem]:
    if not value or len(value) > limit:
        message = f"{name} has {len(value)} characters; shorten it to 1 to {limit}"
        return [Problem(None, name, "bad_length", message, value[:limit])]
    return _text_problems(name, value)


def _text_problems(name: str, value: str) -> list[Problem]:
    if "\0" in value:
        return [Problem(None, name, "nul_character", f"{name} holds a NUL character: escape it as \\u0000 or take it out")]
    try:
        value.encode()
    except UnicodeEncodeError:
        return [Problem(None, name, "bad_text", f"{name} holds half a character (a lone surrogate): mend its decoding")]
    return []


def copy_of(row: Sequence[Any]) -> Copy:
    """The copy of a row of the columns :data:`COPY`."""
    handle, jid, attempt, queue, payload, priority, task_id, deaths = row
    return Copy(jid, attempt, queue, payload, priority, task_id, deaths, handle)


def parts(values: Sequence[T], size: int = 1_000) -> Iterator[Sequence[T]]:
    """Slices of at most ``size``."""
    return (values[i : i + size] for i in range(0, len(values), size))
