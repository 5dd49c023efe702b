"""Where the heads of the queues are: so that a claim need not walk over what others have taken already.

What is taken leaves its entry in the index for a while: PostgreSQL and MariaDB remove it only when no snapshot of any
session can see it any more, and until then every claim that began at the front would walk over all of it, which a
long report in another session turns into seconds. So a process remembers, for each queue and ``waits``, an id up to which
everything was gone some time ago, and begins behind it.

Where many claim at once, the first copies are in the hands of others at any moment, and to walk over those costs each claim
more the more processes there are, until nothing else is done. So a process that met others begins at any of the first
copies of the smallest priority, out of as many as keep them apart (:attr:`Heads.spread`); one that is alone at the first.

Something may appear before that place all the same: a push that took longer to commit, or what a claim had locked when it
was undone. So the place lags behind what is claimed, and the whole queue is looked at now and then; the dearer that is,
the more seldom. What is put back has ``waits`` values of its own, whose places are not remembered, so it is seen at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

__all__ = ["FIRST", "LAST", "Heads", "Range"]

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
