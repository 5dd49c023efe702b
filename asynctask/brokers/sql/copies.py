"""A copy as a row of the table ``jobs``, validated, and back; and the heads of the queues, where claims begin.

The databases differ in what they refuse or truncate (SQLite ignores lengths, PostgreSQL has no NUL character), so rows are
validated here, alike for all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from asynctask.brokers.base import BIGINT, INT, MAX_PAYLOAD_BYTES, Copy, refuse_unstorable
from asynctask.errors import Problem

Row = dict[str, Any]

COLUMNS: Final = ("jid", "attempt", "queue", "priority", "task_id", "held_in", "run_at", "deaths", "payload", "waits")
"""The columns of a new row."""

COPY: Final = ("id", "jid", "attempt", "queue", "payload", "priority", "task_id", "deaths")
"""The columns of a copy, in the order of :func:`copy_of`."""


_NAMES: Final = (("jid", 64), ("queue", 255))
_NUMBERS: Final = (("attempt", 0, INT), ("priority", -INT, INT), ("deaths", 0, INT), ("task_id", 0, BIGINT))

T = TypeVar("T")


def ordinary(priority: int) -> int:
    """``waits`` of a pushed copy."""
    return 2 * priority + 1


def put_back(priority: int) -> int:
    """``waits`` of a copy that was put back: before all pushed ones of its priority."""
    return 2 * priority


ASIDE: Final = 2**61
"""``waits`` of a copy that is left to others: behind all of its queue."""


def row_of(copy: Copy, *, held_in: str | None = None, run_at: int | None = None) -> Row:
    """A new row for a copy, waiting or in a set. Raises :class:`InputError` for a copy that cannot be stored unchanged."""
    if not _fits(copy):
        _check(copy)
    return {
        "jid": copy.jid,
        "attempt": copy.attempt,
        "queue": copy.queue,
        "priority": copy.priority,
        "task_id": copy.task_id,
        "held_in": held_in,
        "run_at": run_at,
        "deaths": copy.deaths,
        "payload": copy.payload,
        "waits": ordinary(copy.priority) if held_in is None else None,
    }


def _fits(copy: Copy) -> bool:
    """A fast test that passes nearly every valid copy; :func:`_check` decides on the others."""
    jid, queue, payload = copy.jid, copy.queue, copy.payload
    return (
        0 < len(jid) <= _NAMES[0][1]
        and 0 < len(queue) <= _NAMES[1][1]
        and jid.isascii()
        and queue.isascii()
        and payload.isascii()
        and not ("\0" in payload or "\0" in jid or "\0" in queue)
        and 0 <= copy.attempt <= INT
        and -INT <= copy.priority <= INT
        and 0 <= copy.deaths <= INT
        and (copy.task_id is None or 0 <= copy.task_id <= BIGINT)
        and len(payload) <= MAX_PAYLOAD_BYTES
    )


def _check(copy: Copy) -> None:
    problems = [each for name, limit in _NAMES for each in _name_problems(name, getattr(copy, name), limit)]
    for name, least, most in _NUMBERS:
        value = getattr(copy, name)
        if not (value is None and name == "task_id") and not least <= value <= most:
            problems.append(Problem(None, name, "out_of_range", f"{name} must be from {least} to {most}", value))
    problems += _text_problems("payload", copy.payload)
    refuse_unstorable(copy, problems)


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
        return [Problem(None, name, "bad_text", f"{name} holds half a character (a lone surrogate): fix its decoding")]
    return []


def copy_of(row: Sequence[Any]) -> Copy:
    """The copy in a row of the columns :data:`COPY`."""
    handle, jid, attempt, queue, payload, priority, task_id, deaths = row
    return Copy(jid, attempt, queue, payload, priority, task_id, deaths, handle)


def parts(values: Sequence[T], size: int = 1_000) -> Iterator[Sequence[T]]:
    """Slices of at most ``size``."""
    return (values[i : i + size] for i in range(0, len(values), size))


# -- heads of the queues: where a claim begins
#
# A claimed row leaves its index entry until no snapshot of any session can see it (PostgreSQL, MariaDB). Claims from the
# front would walk over all of them, for seconds during a long report in another session. So a process keeps, for each queue
# and ``waits``, an id up to which everything was gone some time ago, and begins behind it.
#
# With concurrent claimers the first copies are locked at any moment, and skipping them costs each claim more with every
# process. So a process that met locked copies begins at a random one of the first :attr:`Heads.spread` copies of the
# smallest priority; a process alone begins at the first.
#
# Rows can still appear before a mark: a push that took longer to commit, or rows locked by a claim that was rolled back. So
# marks lag behind the claims, and the whole queue is scanned at times, less often the more a scan costs. ``waits`` values
# of copies put back are not marked, so those are seen at once.

FIRST: Final = -(2**62)
LAST: Final = 2**62
"""Before the first and behind the last ``waits``, also of those that are left to others."""

LAG_S: Final = 0.5
"""Time for a push to commit; copies of a slower one may be skipped until the next scan of the whole queue."""

SCAN_S: Final = 5.0
"""Seconds between two scans of a whole queue, at least."""

DRY_SCAN_S: Final = 0.25
"""The same for a queue that ran dry."""

_COST: Final = 400
_MAX_MARKS: Final = 16


class Range(NamedTuple):
    """Rows of a queue behind (``waits``, ``id``) and before ``until``, a value of ``waits``."""

    queue: str
    waits: int
    id: int
    until: int


@dataclass(slots=True)
class _Mark:
    """Everything up to ``id`` was gone; it becomes ``next_id`` :data:`LAG_S` after ``since``."""

    id: int = 0
    next_id: int = 0
    since: float = 0.0


@dataclass(slots=True)
class _QueueMarks:
    places: dict[int, _Mark] = field(default_factory=dict)
    scan_at: float = 0.0


class Heads:
    """The marks of one process. Thread-safe.

    Arguments: ``now``, a monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._spread = 0.0
        self._queues: dict[str, _QueueMarks] = {}
        self.until = LAST  # the ranges end before this ``waits``
        self._lock = threading.Lock()

    def ranges(self, queues: Sequence[str]) -> tuple[list[Range], frozenset[str]]:
        """The ranges to claim from, in order, and the queues that they cover as a whole."""
        now = self._now()
        found: list[Range] = []
        whole = set()
        with self._lock:
            for name in dict.fromkeys(queues):
                queue = self._queues.setdefault(name, _QueueMarks())
                if queue.scan_at <= now:
                    # Other threads use the marks meanwhile; record_claim() sets the time of the next scan.
                    queue.scan_at = now + SCAN_S
                    whole.add(name)
                    found.append(Range(name, FIRST, 0, self.until))
                else:
                    found += _ranges_after(name, queue, now, self.until)
        return found, frozenset(whole)

    def record_claim(
        self, whole: Iterable[str], taken: Sequence[tuple[str, int, int]], *, dry: Iterable[str], cost_s: float
    ) -> None:
        """Notes a claim: (queue, waits, id) of each copy in order, the queues that had no more, and its duration."""
        now = self._now()
        with self._lock:
            for name in whole:
                self._queues.setdefault(name, _QueueMarks()).scan_at = now + max(SCAN_S, _COST * cost_s)
            for (name, waits), last in {(name, waits): last for name, waits, last in taken if waits % 2}.items():
                _advance(self._queues.setdefault(name, _QueueMarks()), waits, last, now)
            for name in dry:
                # An early scan costs nothing: this process is idle.
                queue = self._queues.setdefault(name, _QueueMarks())
                queue.scan_at = min(queue.scan_at, now + max(DRY_SCAN_S, _COST * cost_s))

    @property
    def spread(self) -> int:
        """The number of first copies among which the next claim begins at a random one."""
        return int(self._spread)

    def record_spread(self, spread: int, limit: int) -> None:
        """Notes the spread that a claim of ``limit`` needed; later claims shrink it by a tenth each."""
        near = 0.9 * spread
        self._spread = near if near >= limit else 0.0


def _ranges_after(name: str, queue: _QueueMarks, now: float, until: int) -> list[Range]:
    found = []
    waits, last = FIRST, 0
    for key in sorted(queue.places):
        place = queue.places[key]
        if place.next_id and now - place.since >= LAG_S:
            place.id, place.next_id = place.next_id, 0
        if place.id:
            found.append(Range(name, waits, last, key))
            waits, last = key, place.id
    found.append(Range(name, waits, last, until))
    return found


def _advance(queue: _QueueMarks, waits: int, last: int, now: float) -> None:
    place = queue.places.pop(waits, None) or _Mark()
    queue.places[waits] = place  # keeps them in the order of their last advance
    if last < place.id:  # a row before the mark: there may be more
        place.id, place.next_id = last, 0
    if not place.next_id:
        place.next_id, place.since = last, now
    elif now - place.since >= LAG_S:
        place.id, place.next_id, place.since = place.next_id, last, now
    while len(queue.places) > _MAX_MARKS:
        del queue.places[next(iter(queue.places))]
