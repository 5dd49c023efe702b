"""What people may ask of a broker and do to what waits in it: the contract beside the way of a job.

Each action takes what it acts on in one step, and only what is still there: a second tool, a poller or a worker may have
been quicker, and then nothing happens. What else lies beside it, also under the same time, stays.

An entry of a set is known by its key (:attr:`Entry.key`), a job of a queue by :func:`job_key`. Both are stable for as long
as it lies there. Offsets count from the end that is listed first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import orjson

from asynctask.brokers.base import RETRY, Copy, Key
from asynctask.errors import Conflict, InputError
from asynctask.wire.payload import Malformed, dump, parse, read_time, write_time

__all__ = [
    "ACTED_AT_ONCE",
    "LOOKED_THROUGH",
    "MAX_OFFSET",
    "MAX_PAGE",
    "Entry",
    "Found",
    "Operations",
    "Page",
    "QueueFacts",
    "RemoteProcess",
    "Removed",
    "cannot_pause",
    "checked_text",
    "checked_window",
    "class_of",
    "distinct",
    "enqueued_at",
    "job_key",
    "peeked",
    "pushed_again",
]

MAX_PAGE: Final = 1_000
"""Most entries of one page."""

MAX_OFFSET: Final = 1_000_000
"""No page begins behind so many."""

LOOKED_THROUGH: Final = 100_000
"""So many members of a set, or jobs of a queue, are looked at to find one."""

ACTED_AT_ONCE: Final = 500
"""So many are acted on in one step of an action on all."""

_MAX_SEARCH: Final = 255


@dataclass(frozen=True, slots=True)
class Entry:
    """A job that waits.

    ``key`` names it; ``at`` is when it is due, or died, in microseconds (None in a queue); ``raw`` is its text as it lies
    there; ``sound`` is false for what is no job and can only be looked at and deleted.
    """

    key: str
    copy: Copy
    at: int | None
    raw: str
    sound: bool = True


@dataclass(frozen=True, slots=True)
class Page:
    """Some entries, and how many there are in all. A page of huge texts may be shorter than was asked for."""

    entries: Sequence[Entry]
    total: int


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found; ``complete`` is false where it stopped before the end."""

    entries: Sequence[Entry]
    complete: bool


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """A queue: its ``length``; ``oldest_at``, when the one that waits longest was pushed, in microseconds (None: unknown);
    ``paused``; ``next_class``, the name of the worker of the next job."""

    name: str
    length: int
    oldest_at: int | None
    paused: bool
    next_class: str | None


@dataclass(frozen=True, slots=True)
class Removed:
    """What was taken out of a queue: how many, and the keys of the tracked ones among them."""

    count: int
    tracked: Sequence[Key]


@dataclass(frozen=True, slots=True)
class RemoteProcess:
    """A process that the broker knows of by itself: ``facts`` are its columns as :func:`list_processes` has them."""

    identity: str
    facts: Mapping[str, Any]


class Operations(Protocol):
    """Looking into a broker and tidying up. Every method may raise :class:`~asynctask.errors.BrokerUnavailable`, and
    :class:`~asynctask.errors.InputError` for a set, a limit, a key or a text that cannot be."""

    # -- queues

    def queues(self) -> list[QueueFacts]:
        """Every queue that is known, by name, at most 1,000."""
        ...

    def jobs(self, queue: str, *, offset: int = 0, limit: int = 100, newest: bool = False) -> Page:
        """Jobs that wait in a queue: those next to run first, or the last ones pushed first with ``newest``."""
        ...

    def delete_job(self, queue: str, key: str) -> Copy | None:
        """Takes one job out of a queue; None where it is not there (any more)."""
        ...

    def clear_some(self, queue: str, limit: int) -> Removed:
        """Takes up to ``limit`` jobs out of a queue, those next to run first; an empty queue is forgotten."""
        ...

    def pause(self, queue: str) -> bool:
        """Nobody takes anything from the queue any more. False where it was so. Raises :class:`Conflict` where the broker
        has no word for it (``capabilities.pauses``)."""
        ...

    def unpause(self, queue: str) -> bool:
        """Undoes :meth:`pause`."""
        ...

    # -- sets

    def entries(self, set_name: str, *, offset: int = 0, limit: int = 100, newest: bool = False) -> Page:
        """Members of a set in the order of their times, or the other way round."""
        ...

    def find(self, set_name: str, text: str, *, limit: int = 100) -> Found:
        """Members whose raw text holds ``text``, in the order of their times."""
        ...

    def entry(self, set_name: str, key: str) -> Entry | None:
        """One member."""
        ...

    def restart(self, set_name: str, entries: Sequence[Entry]) -> int:
        """Pushes members to the ends of their queues, those of ``retry`` with one retry less counted. Returns how many
        were still there. Raises :class:`InputError` for what is no job."""
        ...

    def kill(self, set_name: str, entries: Sequence[Entry]) -> int:
        """Moves members to the dead as they are; returns how many were still there."""
        ...

    def delete(self, set_name: str, entries: Sequence[Entry]) -> int:
        """Removes members for good; returns how many were still there."""
        ...

    def reschedule(self, set_name: str, entry: Entry, at: int) -> bool:
        """Moves a member to another time (microseconds); False where it is not there any more."""
        ...

    def clear(self, set_name: str) -> int:
        """Removes every member; returns how many."""
        ...

    # -- processes

    def processes(self) -> list[RemoteProcess]:
        """Live processes of any language that have told the broker of themselves."""
        ...

    def signal(self, identity: str, name: str) -> bool:
        """Leaves a signal (``TSTP`` quiet, ``TERM`` stop) for one of :meth:`processes`; False where there is none."""
        ...


def job_key(copy: Copy) -> str:
    """What a job of a queue is named by: its jid, and for a tracked one ``jid:attempt``."""
    return f"{copy.jid}:{copy.attempt}" if copy.attempt else copy.jid


def checked_window(offset: int, limit: int) -> None:
    """Raises :class:`InputError` for a page that is too large or too far away."""
    if not 1 <= limit <= MAX_PAGE:
        raise InputError(f"limit must be from 1 to {MAX_PAGE:,}, not {limit}", code="out_of_range")
    if not 0 <= offset <= MAX_OFFSET:
        raise InputError(f"a page begins at 0 to {MAX_OFFSET:,}, not {offset}: search instead", code="out_of_range")


def checked_text(text: str) -> str:
    """What may be searched for. Raises :class:`InputError`."""
    if not 1 <= len(text) <= _MAX_SEARCH or "\0" in text:
        raise InputError(f"search for 1 to {_MAX_SEARCH} characters without NUL", code="bad_search")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError("what to search for holds half a character: mend its decoding", code="bad_search") from None
    return text


def cannot_pause() -> Conflict:
    """The error of a broker without :attr:`Capabilities.pauses`."""
    return Conflict(
        "queues in the database cannot be paused: pause the Tasks (asynctask pause ID), or quiet the processes that work"
        " the queue (asynctask processes quiet ID)"
    )


def peeked(payload: str) -> Mapping[str, Any]:
    """The members of a payload for a look at them; none for what is no job."""
    try:
        job = orjson.loads(payload)
    except ValueError:
        return {}
    return job if isinstance(job, dict) else {}


def enqueued_at(payload: str) -> int | None:
    """When a job was put into its queue, in microseconds, or else made; None where it does not say."""
    job = peeked(payload)
    at = read_time(job.get("enqueued_at"))
    return read_time(job.get("created_at")) if at is None else at


def class_of(payload: str) -> str | None:
    """The name of the worker of a payload, that of ActiveJob where one is wrapped."""
    job = peeked(payload)
    name = job.get("wrapped") if isinstance(job.get("wrapped"), str) else job.get("class")
    return name[:255] if isinstance(name, str) else None


def pushed_again(set_name: str, entry: Entry, now: int) -> Copy:
    """The copy that is pushed for a member of a set. Raises :class:`InputError` for what is no job."""
    try:
        if not entry.sound:
            raise Malformed("it is no JSON object")
        job = parse(entry.copy.payload, keep_numbers=True)
        if not isinstance(job.get("class"), str) or not isinstance(job.get("args"), list):
            raise Malformed('it has no "class" and "args"')
    except Malformed as error:
        raise InputError(
            f"{entry.key[:100]} is no job and cannot be started again: {error}; delete it", code="bad_job"
        ) from None
    count = job.get("retry_count")
    if set_name == RETRY and isinstance(count, int) and not isinstance(count, bool):
        job["retry_count"] = count - 1
    job["enqueued_at"] = write_time(now)
    copy = entry.copy
    return Copy(copy.jid, copy.attempt, copy.queue, dump(job), copy.priority, copy.task_id)


def distinct(entries: Sequence[Entry]) -> list[Entry]:
    """Each member once, however often it was named."""
    return list({entry.key: entry for entry in entries}.values())
