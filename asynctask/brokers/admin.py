"""Operations on a broker for its users: the contract for inspecting and changing queues and sets.

An action takes its entries in one step and only if they are still there: another tool, a poller or a worker may have been
faster, and then it does nothing. Other entries, also those with the same time, stay.

Entries of a set are identified by :attr:`Entry.key`, jobs of a queue by :func:`job_key`, both stable while they wait.
Offsets count from the end that is listed first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Protocol, TypeVar

import orjson

from asynctask.brokers.base import DEAD, RETRY, SCHEDULE, Copy, Key
from asynctask.errors import InputError
from asynctask.sidekiq.payload import Malformed, dump, parse, read_time, write_time

SETS: Final = (SCHEDULE, RETRY, DEAD)
"""The sets of a broker, in which jobs wait that are on no queue."""

MOST_NAMES: Final = 1_000
"""The most queues, or processes, that are listed."""

MAX_PAGE: Final = 1_000
"""The most entries of a page."""

PAGE_BYTES: Final = 8_000_000
"""Bytes of texts after which a page ends: any program can push more than fits into memory."""

MAX_OFFSET: Final = 1_000_000
"""The largest offset of a page."""

LOOKED_THROUGH: Final = 100_000
"""The most members of a set, or jobs of a queue, that a search looks at."""

COUNTED_OTHERS: Final = 1_000
"""The most jobs left to others whose workers are read."""

ACTED_AT_ONCE: Final = 500
"""Entries per step of an action on all."""

MAX_TEXT: Final = 255
"""The most characters of a key, of a queue's name and of a text to search for."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """A waiting job.

    ``key`` identifies it; ``at``: when it is due, or died, in microseconds (None in a queue); ``raw``: its stored text;
    ``sound``: false for a text that is no job, which can only be shown and deleted.
    """

    key: str
    copy: Copy
    at: int | None
    raw: str
    sound: bool = True


@dataclass(frozen=True, slots=True)
class Page:
    """Some entries, and the total number. Texts of more than :data:`PAGE_BYTES` make a page shorter than requested, down to
    one entry."""

    entries: Sequence[Entry]
    total: int


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search; ``complete`` is false if it stopped before the end."""

    entries: Sequence[Entry]
    complete: bool


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """A queue. ``oldest_at``: when its oldest job was pushed, in microseconds (None: unknown); ``next_class``: the worker
    of the next job; ``others``: how many of its jobs are left to others."""

    name: str
    length: int = 0
    oldest_at: int | None = None
    paused: bool = False
    next_class: str | None = None
    others: int = 0


@dataclass(frozen=True, slots=True)
class Removed:
    """Jobs removed from a queue: their number, and the keys of the tracked ones."""

    count: int
    tracked: Sequence[Key]


class BrokerOperations(Protocol):
    """Inspection and cleanup of a broker. Every method may raise :class:`~asynctask.errors.BrokerUnavailable`, and
    :class:`~asynctask.errors.InputError` for an invalid set, limit, key or text."""

    # -- queues

    def queues(self) -> list[QueueFacts]:
        """The known queues by name, at most 1,000."""
        ...

    def others(self, queue: str) -> Mapping[str, int]:
        """The workers of the first 1,000 jobs of a queue that are left to others, and how many of these are for each."""
        ...

    def jobs(self, queue: str, *, offset: int = 0, limit: int = 100, newest: bool = False) -> Page:
        """Waiting jobs of a queue: the next to run first; with ``newest``, the last pushed first."""
        ...

    def delete_job(self, queue: str, key: str) -> Copy | None:
        """Removes one job from a queue; None if it is not there."""
        ...

    def clear_some(self, queue: str, limit: int) -> Removed:
        """Removes up to ``limit`` jobs from a queue, the next to run first; an empty queue is forgotten."""
        ...

    def pause(self, queue: str) -> bool:
        """Stops fetches from the queue. Returns False if it was paused."""
        ...

    def unpause(self, queue: str) -> bool:
        """Undoes :meth:`pause`."""
        ...

    def paused(self, queues: Collection[str]) -> set[str]:
        """Which of these queues are paused. Every worker process asks it twice a second."""
        ...

    # -- sets

    def entries(self, set_name: str, *, offset: int = 0, limit: int = 100, newest: bool = False) -> Page:
        """Members of a set by time, ascending or (``newest``) descending."""
        ...

    def find(self, set_name: str, text: str, *, limit: int = 100) -> Found:
        """Members whose raw text contains ``text``, by time."""
        ...

    def entry(self, set_name: str, key: str) -> Entry | None:
        """One member."""
        ...

    def restart(self, set_name: str, entries: Sequence[Entry]) -> int:
        """Pushes members to the ends of their queues, those of ``retry`` with one retry less counted. Returns how many were
        still there. Raises :class:`InputError` for a text that is no job."""
        ...

    def kill(self, set_name: str, entries: Sequence[Entry]) -> int:
        """Moves members to the dead set unchanged; returns how many were still there."""
        ...

    def delete(self, set_name: str, entries: Sequence[Entry]) -> int:
        """Deletes members; returns how many were still there."""
        ...

    def clear(self, set_name: str) -> int:
        """Deletes every member; returns how many."""
        ...

    # -- processes

    def processes(self) -> list[dict[str, Any]]:
        """Live processes of any language that registered with the broker: of each the columns as of
        :func:`~asynctask.ledger.processes.list_processes`, ``queues`` as a list."""
        ...

    def signal(self, identity: str, name: str) -> bool:
        """Leaves a signal (``TSTP`` quiet, ``TERM`` stop) for one of :meth:`processes`; False if unknown."""
        ...


def first_of(texts: Iterable[tuple[T, int]], limit: int | None) -> list[T]:
    """The first ``limit`` things (None: any number), each given with the length of its text, that :data:`PAGE_BYTES` hold;
    at least one. The first that is too much is read, too."""
    found: list[T] = []
    total = 0
    for each, size in islice(texts, limit):
        total += size
        if found and total > PAGE_BYTES:
            break
        found.append(each)
    return found


def job_key(copy: Copy) -> str:
    """Identifies a job of a queue: its jid, or ``jid:attempt`` of a tracked one."""
    return f"{copy.jid}:{copy.attempt}" if copy.attempt else copy.jid


def checked_window(offset: int, limit: int) -> None:
    """Raises :class:`InputError` for an invalid limit or offset."""
    if not 1 <= limit <= MAX_PAGE:
        raise InputError(f"limit must be from 1 to {MAX_PAGE:,}, not {limit}", code="out_of_range")
    if not 0 <= offset <= MAX_OFFSET:
        raise InputError(f"a page begins at 0 to {MAX_OFFSET:,}, not {offset}: search instead", code="out_of_range")


def checked_text(text: str, what: str = "search for", code: str = "bad_search", *, nul: bool = False) -> str:
    """A text that a server can look up. Raises :class:`InputError` for another; ``nul``: it may hold a NUL character."""
    if not 1 <= len(text) <= MAX_TEXT or ("\0" in text and not nul):
        raise InputError(f"{what} 1 to {MAX_TEXT} characters{'' if nul else ' without NUL'}", code=code)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{text[:100]!r} holds half a character (a lone surrogate): fix its decoding", code=code) from None
    return text


def peeked(payload: str) -> Mapping[str, Any]:
    """The members of a payload, for display; empty for a text that is no JSON object."""
    try:
        job = orjson.loads(payload)
    except ValueError:
        return {}
    return job if isinstance(job, dict) else {}


def enqueued_at(payload: str) -> int | None:
    """When a job was enqueued, else created, in microseconds; None if its payload has neither."""
    job = peeked(payload)
    at = read_time(job.get("enqueued_at"))
    return read_time(job.get("created_at")) if at is None else at


def class_of(payload: str) -> str | None:
    """The worker's name in a payload; of a wrapped job, that of ActiveJob."""
    job = peeked(payload)
    name = job.get("wrapped") if isinstance(job.get("wrapped"), str) else job.get("class")
    return name[:255] if isinstance(name, str) else None


def pushed_again(set_name: str, entry: Entry, now: int) -> Copy:
    """The copy to push for a member of a set. Raises :class:`InputError` for a text that is no job."""
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
    """The entries without duplicates."""
    return list({entry.key: entry for entry in entries}.values())
