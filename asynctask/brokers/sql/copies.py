"""A copy as a row of the table ``jobs``, checked before any database sees it, and back.

The three databases differ in what they refuse, cut off or take: SQLite knows no lengths, PostgreSQL no NUL character. So
what a row may hold is decided here, alike for all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from asynctask.brokers.base import Copy
from asynctask.errors import InputError, Problem, TooLarge

__all__ = [
    "COLUMNS",
    "COPY",
    "FIRST",
    "LAST",
    "MAX_PAYLOAD_BYTES",
    "Heads",
    "Range",
    "Row",
    "copy_of",
    "ordinary",
    "parts",
    "put_back",
    "row_of",
]

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


# -- Where the heads of the queues are: so that a claim need not walk over what others have taken already.
#
# What is taken leaves its entry in the index for a while: PostgreSQL and MariaDB remove it only when no snapshot of any
# session can see it any more, and until then every claim that began at the front would walk over all of it, which a
# long report in another session turns into seconds. So a process remembers, for each queue and ``waits``, an id up to which
# everything was gone some time ago, and begins behind it.
#
# Where many claim at once, the first copies are in the hands of others at any moment, and to walk over those costs each
# claim more the more processes there are, until nothing else is done. So a process that met others begins at any of the
# first copies of the smallest priority, out of as many as keep them apart (:attr:`Heads.spread`); one that is alone at
# the first.
#
# Something may appear before that place all the same: a push that took longer to commit, or what a claim had locked when it
# was undone. So the place lags behind what is claimed, and the whole queue is looked at now and then; the dearer that is,
# the more seldom. What is put back has ``waits`` values of its own, whose places are not remembered, so it is seen at once.

FIRST: Final = -(2**62)
LAST: Final = 2**62
"""Before the first and behind the last value of ``waits``."""

LAG_S: Final = 0.5
"""A push has so long to commit before its copies could be passed over until the next look at the whole queue."""

LOOK_S: Final = 5.0
DRY_LOOK_S: Final = 0.25
_COST: Final = 400
_MOST_PLACES: Final = 16


class Range(NamedTuple):
    """Rows of a queue behind (``waits``, ``id``) and before the value ``until`` of ``waits``."""

    queue: str
    waits: int
    id: int
    until: int


@dataclass(slots=True)
class _Place:
    """``id``: up to here everything was gone; ``next_id`` will be that place, ``LAG_S`` after ``since``."""

    id: int = 0
    next_id: int = 0
    since: float = 0.0


@dataclass(slots=True)
class _Queue:
    places: dict[int, _Place] = field(default_factory=dict)
    look_at: float = 0.0


class Heads:
    """The places of one process.

    Arguments: ``now`` is a monotonic clock, in seconds. Threads may share it.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._spread = 0.0
        self._queues: dict[str, _Queue] = {}
        self._lock = threading.Lock()

    def ranges(self, queues: Sequence[str]) -> tuple[list[Range], frozenset[str]]:
        """What to look at, in order, and which of the queues are looked at as a whole."""
        now = self._now()
        found: list[Range] = []
        whole = set()
        with self._lock:
            for name in dict.fromkeys(queues):
                queue = self._queues.setdefault(name, _Queue())
                if queue.look_at <= now:
                    # Others of this process go on behind the places meanwhile; told() says when the next one is due.
                    queue.look_at = now + LOOK_S
                    whole.add(name)
                    found.append(Range(name, FIRST, 0, LAST))
                else:
                    found += _behind(name, queue, now)
        return found, frozenset(whole)

    def told(
        self, whole: Iterable[str], taken: Sequence[tuple[str, int, int]], *, dry: Iterable[str], cost_s: float
    ) -> None:
        """What came of it: (queue, waits, id) of each copy in order, which queues had no more, how long it took."""
        now = self._now()
        with self._lock:
            for name in whole:
                self._queues.setdefault(name, _Queue()).look_at = now + max(LOOK_S, _COST * cost_s)
            for (name, waits), last in {(name, waits): last for name, waits, last in taken if waits % 2}.items():
                _move(self._queues.setdefault(name, _Queue()), waits, last, now)
            for name in dry:
                # Nothing is lost by looking again soon: this process has nothing else to do.
                queue = self._queues.setdefault(name, _Queue())
                queue.look_at = min(queue.look_at, now + max(DRY_LOOK_S, _COST * cost_s))

    @property
    def spread(self) -> int:
        """Out of how many of the first copies the next claim begins at any."""
        return int(self._spread)

    def met(self, spread: int, limit: int) -> None:
        """A claim of ``limit`` had to go ``spread`` apart: the same again, and a little nearer to the head each time."""
        near = 0.9 * spread
        self._spread = near if near >= limit else 0.0


def _behind(name: str, queue: _Queue, now: float) -> list[Range]:
    found = []
    waits, last = FIRST, 0
    for key in sorted(queue.places):
        place = queue.places[key]
        if place.next_id and now - place.since >= LAG_S:
            place.id, place.next_id = place.next_id, 0
        if place.id:
            found.append(Range(name, waits, last, key))
            waits, last = key, place.id
    found.append(Range(name, waits, last, LAST))
    return found


def _move(queue: _Queue, waits: int, last: int, now: float) -> None:
    place = queue.places.pop(waits, None) or _Place()
    queue.places[waits] = place  # the one that was moved last stands last
    if last < place.id:  # something was left behind it: what else may be there is looked at too
        place.id, place.next_id = last, 0
    if not place.next_id:
        place.next_id, place.since = last, now
    elif now - place.since >= LAG_S:
        place.id, place.next_id, place.since = place.next_id, last, now
    while len(queue.places) > _MOST_PLACES:
        del queue.places[next(iter(queue.places))]
