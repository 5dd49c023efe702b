"""How many jobs may lie in each foreign queue, and whose turn it is.

A queue has one job for each idle thread of its processes, and as many as its processes end in the next moment
(``ahead_s``), measured in the queue itself: what was pushed and has left it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from asynctask.clock import Clock
from asynctask.ledger.lending import Alone, Offer

LEAST_S: Final = 0.05
"""Shortest time over which a rate is measured."""

LOOK_S: Final = 1.0
"""Seconds after which a rate is measured, however few jobs have left the queue."""

STALE_S: Final = 1.0
"""A queue not looked at for this long has no known rate. Above the seconds between two passes of a leader."""

DRY: Final = 2
"""Factor of the rate of a queue that is found empty: its processes could use more."""

ALWAYS_DRY: Final = 4
"""The same, if it was empty whenever it was looked at: it may be a list's beginning."""

_MOST_OWED: Final = 100
"""Largest number of jobs that a queue owes to larger priorities, so that a debt that could not be paid is not paid all at
once."""


@dataclass(slots=True)
class Threads:
    """The threads of the processes that work a queue, and those of them that are not known to run a job."""

    all: int = 0
    idle: int = 0

    def add(self, count: int, busy: int) -> None:
        """Adds those of a process."""
        self.all += count
        self.idle += max(0, count - busy)


@dataclass(slots=True)
class _Look:
    """A queue since a moment: its threads, the idle ones then, what lies there now, and how many jobs have left since."""

    since: float
    latest: float
    threads: int
    idle: int
    lies: int
    left: int = 0
    is_dry: bool = True  # it was empty at each look


class Rates:
    """The jobs per second that end in each queue.

    Jobs that idle threads took at once say nothing: they may take hours. Nor do as many as there are threads: they may have
    ended in one moment, however long they took.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._looks: dict[str, _Look] = {}
        self._rates: dict[str, float] = {}

    def measure(self, queue: str, waits: int) -> float:
        """The rate of a queue in which ``waits`` jobs are now; 0 if it is unknown."""
        now, look = self._clock.monotonic(), self._looks.get(queue)
        if look is None or now - look.latest > STALE_S:
            self._looks.pop(queue, None)
            self._rates.pop(queue, None)
            return 0.0
        look.left += look.lies - waits
        look.lies, look.latest, look.is_dry = waits, now, look.is_dry and waits == 0
        ended, passed = max(0, look.left - look.idle), now - look.since
        if passed >= LOOK_S or (passed >= LEAST_S and ended > look.threads):
            seen = ended / passed * (1 if waits else ALWAYS_DRY if look.is_dry else DRY)
            # Up at once, down slowly: a look is short.
            self._rates[queue] = max(seen, (seen + self._rates.get(queue, 0.0)) / 2)
            # Who takes a job from now on has ended another: no idle thread.
            self._looks[queue] = _Look(now, now, look.threads, 0, waits, is_dry=waits == 0)
        return self._rates.get(queue, 0.0)

    def known(self, queue: str) -> bool:
        """Whether jobs of a queue end."""
        return self._rates.get(queue, 0.0) > 0

    def is_any_dry(self) -> bool:
        """Whether a queue was empty at each look."""
        return any(look.is_dry for look in list(self._looks.values()))

    def note(self, queue: str, lies: int, has: Threads) -> None:
        """So many jobs lie in a queue after a pass."""
        now = self._clock.monotonic()
        look = self._looks.setdefault(queue, _Look(now, now, has.all, has.idle, lies))
        look.lies, look.latest, look.threads = lies, now, has.all


def wanted(threads: Mapping[str, Threads], waiting: Mapping[str, int], rates: Rates, ahead_s: float) -> dict[str, int]:
    """How many more jobs each queue can use. A foreign queue has no priorities, so all that wait in it count."""
    found = {}
    for queue, its in threads.items():
        waits = waiting.get(queue, 0)
        found[queue] = max(0, its.idle + int(rates.measure(queue, waits) * ahead_s) - waits)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class WorkSource:
    """Jobs of a Task, as it was offered, or (``offer`` None) all single jobs of a queue and priority.

    ``group``: those that share alike, an owner's Tasks together, or each by itself (``key``). ``get`` takes up to so many
    jobs, and returns how many it got.
    """

    queue: str
    priority: int
    group: Hashable
    key: Hashable
    get: Callable[..., int]
    offer: Offer | None = None

    @property
    def task_id(self) -> int | None:
        """The Task; None of single jobs."""
        return None if self.offer is None else self.offer.task_id


class Shares:
    """The turns of those that want jobs at the same time: the one that was served longest ago is next.

    A newcomer begins beside the one that is next, so it neither waits for all others nor goes before those that wait.
    ``by_owner``: the owners of Tasks share alike, not the Tasks.
    """

    def __init__(self, *, by_owner: bool = False) -> None:
        self.by_owner = by_owner
        self._turn = 0
        self._served: dict[Hashable, int] = {}  # the turn in which each was served last
        self.last: dict[tuple[str, int], int] = {}  # the Task of a queue and priority that was served last

    def sources(
        self,
        offers: Iterable[Offer],
        alone: Iterable[Alone],
        of_task: Callable[..., int],
        of_single: Callable[..., int],
    ) -> list[WorkSource]:
        """The sources of what was found, single jobs first; forgets those that want nothing any more. ``of_task`` gets jobs
        of an offer, ``of_single`` of a list of single jobs, from which it removes them."""
        single: dict[tuple[str, int], list[Alone]] = defaultdict(list)
        for job in alone:
            single[job.queue, job.priority].append(job)
        found = [
            WorkSource(queue, priority, key := ("alone", queue, priority), key, partial(of_single, jobs))
            for (queue, priority), jobs in single.items()
        ]
        for offer in offers:
            group: Hashable = ("owner", offer.owner) if self.by_owner else offer.task_id
            get = partial(of_task, offer)
            found.append(WorkSource(offer.queue, offer.priority, group, offer.task_id, get, offer))
        present = {key for each in found for key in (each.group, each.key)}
        self._served = {key: turn for key, turn in self._served.items() if key in present}
        return found

    def next(self, sources: Sequence[WorkSource]) -> WorkSource:
        """The source whose turn it is: of the group that was served longest ago, the one that was. Of equals the first."""
        group = self._first(each.group for each in sources)
        by_key = {each.key: each for each in sources if each.group == group}
        return by_key[self._first(by_key)]

    def _first(self, keys: Iterable[Hashable]) -> Hashable:
        keys = list(keys)
        least = min((self._served[key] for key in keys if key in self._served), default=0)
        return min(keys, key=lambda key: self._served.setdefault(key, least))

    def served(self, source: WorkSource) -> None:
        """It got jobs."""
        self._turn += 1
        self._served[source.group] = self._served[source.key] = self._turn
        if source.task_id is not None:
            self.last[source.queue, source.priority] = source.task_id


class Credit:
    """What each queue owes to jobs of larger priorities, a ``share`` of its jobs; without it they would wait as long as
    there are smaller priorities."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._owed: dict[str, float] = defaultdict(float)

    def owed(self, queue: str) -> int:
        """How many jobs of larger priorities go next, whatever waits at the smallest."""
        return int(self._owed[queue] + 1e-6)  # the sum of ten tenths is a little less than one

    def note(self, queue: str, sent: int, behind: int) -> None:
        """Counts jobs dispatched while others waited; ``behind`` of these were not of the smallest priority."""
        self._owed[queue] = min(_MOST_OWED, max(0.0, self._owed[queue] + self._share * sent - behind))

    def forget(self, queue: str) -> None:
        """Clears the debt: nobody waits behind others."""
        self._owed.pop(queue, None)
