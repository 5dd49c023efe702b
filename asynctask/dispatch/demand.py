"""Demand: how many jobs each foreign queue can use, and from which Task the next ones come.

A queue gets one job for each idle thread of its processes, and as many as its processes end in the next ``ahead_s``
seconds. The rate is measured at the queue itself: jobs that were pushed and have left it.
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
"""Shortest time, in seconds, over which a rate is measured."""

SAMPLE_S: Final = 1.0
"""Seconds after which a rate is measured, however few jobs have left the queue."""

STALE_S: Final = 1.0
"""Seconds after its last measurement from which a queue has no known rate. Above the seconds between two passes of a
leader."""

WHEN_EMPTY: Final = 2
"""Factor for the rate of a queue that is empty now: its processes could use more."""

ALWAYS_EMPTY: Final = 4
"""Factor for the rate of a queue that was empty at each pass of the sample: maybe the beginning of a list."""

_MOST_OWED: Final = 100
"""Largest number of jobs that a queue owes to larger priorities, so that a long unpaid debt is not paid all at once."""


@dataclass(slots=True)
class Threads:
    """The number of threads of the processes that work a queue, and of those not known to run a job."""

    all: int = 0
    idle: int = 0

    def add(self, count: int, busy: int) -> None:
        """Adds the threads of a process."""
        self.all += count
        self.idle += max(0, count - busy)


@dataclass(slots=True)
class _Sample:
    """A sample of a queue since one time (monotonic): its threads, the idle ones at the beginning, the jobs that wait at
    the latest measurement, and the jobs that have left since."""

    since: float
    latest: float
    threads: int
    idle: int
    waiting: int
    left: int = 0
    was_empty: bool = True  # at every measurement


class Rates:
    """The jobs per second that end in each queue.

    Jobs that idle threads took at once do not count: they may take hours. A sample of no more jobs than threads does not
    count before :data:`SAMPLE_S`: they may have ended at the same time, however long they took.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._samples: dict[str, _Sample] = {}
        self._rates: dict[str, float] = {}

    def measure(self, queue: str, waits: int) -> float:
        """The rate of a queue in which ``waits`` jobs wait now, in jobs per second; 0 if it is unknown."""
        now, sample = self._clock.monotonic(), self._samples.get(queue)
        if sample is None or now - sample.latest > STALE_S:
            self._samples.pop(queue, None)
            self._rates.pop(queue, None)
            return 0.0
        sample.left += sample.waiting - waits
        sample.waiting, sample.latest, sample.was_empty = waits, now, sample.was_empty and waits == 0
        ended, passed = max(0, sample.left - sample.idle), now - sample.since
        if passed >= SAMPLE_S or (passed >= LEAST_S and ended > sample.threads):
            seen = ended / passed * (1 if waits else ALWAYS_EMPTY if sample.was_empty else WHEN_EMPTY)
            # Rises at once and falls slowly, because a sample is short.
            self._rates[queue] = max(seen, (seen + self._rates.get(queue, 0.0)) / 2)
            # A thread that takes a job from now on has ended another one, so no thread counts as idle.
            self._samples[queue] = _Sample(now, now, sample.threads, 0, waits, was_empty=waits == 0)
        return self._rates.get(queue, 0.0)

    def known(self, queue: str) -> bool:
        """Whether jobs of a queue are known to end."""
        return self._rates.get(queue, 0.0) > 0

    def is_any_empty(self) -> bool:
        """Whether a queue was empty at every measurement of its sample."""
        return any(sample.was_empty for sample in list(self._samples.values()))

    def note(self, queue: str, waiting: int, has: Threads) -> None:
        """Notes that ``waiting`` jobs wait in a queue after a pass, and the threads that work it."""
        now = self._clock.monotonic()
        sample = self._samples.setdefault(queue, _Sample(now, now, has.all, has.idle, waiting))
        sample.waiting, sample.latest, sample.threads = waiting, now, has.all


def wanted(threads: Mapping[str, Threads], waiting: Mapping[str, int], rates: Rates, ahead_s: float) -> dict[str, int]:
    """How many more jobs each queue can use. A foreign queue has no priorities, so all jobs that wait in it count."""
    found = {}
    for queue, its in threads.items():
        waits = waiting.get(queue, 0)
        found[queue] = max(0, its.idle + int(rates.measure(queue, waits) * ahead_s) - waits)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class WorkSource:
    """The jobs of an offered Task, or (``offer`` None) all single jobs of a queue and priority.

    ``group``: sources of one group share one turn: those of an owner, or each source alone (``key``). ``get`` takes up to
    the given number of jobs, and returns how many it got.
    """

    queue: str
    priority: int
    group: Hashable
    key: Hashable
    get: Callable[..., int]
    offer: Offer | None = None

    @property
    def task_id(self) -> int | None:
        """The Task's id; None for single jobs."""
        return None if self.offer is None else self.offer.task_id


class Shares:
    """The turns of sources that want jobs at the same time: the source that was served longest ago is next.

    A new source starts level with the next one, so it neither waits for all others nor overtakes those that wait.
    ``by_owner``: the owners of Tasks get equal shares, instead of the Tasks.
    """

    def __init__(self, *, by_owner: bool = False) -> None:
        self.by_owner = by_owner
        self._turn = 0
        self._served: dict[Hashable, int] = {}  # the turn in which each key or group was served last
        self.last: dict[tuple[str, int], int] = {}  # (queue, priority) -> the Task that was served last

    def sources(
        self,
        offers: Iterable[Offer],
        alone: Iterable[Alone],
        of_task: Callable[..., int],
        of_single: Callable[..., int],
    ) -> list[WorkSource]:
        """The sources for these offers and single jobs, single jobs first; forgets sources that want no more jobs.
        ``of_task`` gets jobs of an offer, ``of_single`` those of a list of single jobs, from which it removes them."""
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
        """The next source: in the group that was served longest ago, the source that was; of equals, the first."""
        group = self._first(each.group for each in sources)
        by_key = {each.key: each for each in sources if each.group == group}
        return by_key[self._first(by_key)]

    def _first(self, keys: Iterable[Hashable]) -> Hashable:
        keys = list(keys)
        least = min((self._served[key] for key in keys if key in self._served), default=0)
        return min(keys, key=lambda key: self._served.setdefault(key, least))

    def served(self, source: WorkSource) -> None:
        """Notes that a source got jobs."""
        self._turn += 1
        self._served[source.group] = self._served[source.key] = self._turn
        if source.task_id is not None:
            self.last[source.queue, source.priority] = source.task_id


class Credit:
    """How many jobs each queue owes to larger priorities: a ``share`` of its jobs, so that these do not wait for as long as
    there are jobs of smaller priorities."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._owed: dict[str, float] = defaultdict(float)

    def owed(self, queue: str) -> int:
        """How many jobs of larger priorities go next, before those of the smallest."""
        return int(self._owed[queue] + 1e-6)  # the sum of ten tenths is a little less than one

    def note(self, queue: str, sent: int, behind: int) -> None:
        """Counts jobs dispatched while others waited; ``behind`` of them had larger priorities than the smallest."""
        self._owed[queue] = min(_MOST_OWED, max(0.0, self._owed[queue] + self._share * sent - behind))

    def forget(self, queue: str) -> None:
        """Clears the debt, because no jobs wait behind others."""
        self._owed.pop(queue, None)
