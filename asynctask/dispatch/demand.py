"""How many jobs are wanted in each foreign queue: what its workers can use soon, minus what waits there; whose turn it is;
and how many workers are wanted for what waits."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from asynctask.clock import Clock

_STALE_S: Final = 1.0
"""A queue not watched for this long has no known rate."""

_WINDOW_S: Final = 0.1
"""Shortest time over which a rate is measured."""

MOST_BORROWED: Final = 1_000
"""Jobs of one full borrow."""

_FEW: Final = MOST_BORROWED // 8
"""A smaller remainder is left to the next round after a full borrow: to borrow a few costs nearly as much as many."""


_MOST_OWED: Final = 100
"""Largest number of jobs that a queue owes to larger priorities, so that a debt that could not be paid is not paid all at
once."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one process of a foreign queue can use: its queues, its idle threads, its jobs per second, and all its
    threads."""

    identity: str
    queues: Sequence[str]
    free: int
    rate: float
    threads: int


class Capacity:
    """What the living processes of foreign queues can use, in those that the dispatcher ``reaches``."""

    def __init__(self, loads: Sequence[Load], reaches: Callable[[str], bool] = lambda queue: True) -> None:
        self.free: dict[str, int] = defaultdict(int)
        self.threads: dict[str, int] = defaultdict(int)
        self._rates: dict[str, float] = defaultdict(float)
        for load in loads:
            for queue in filter(reaches, set(load.queues)):
                self.free[queue] += max(0, load.free)
                self.threads[queue] += load.threads
                self._rates[queue] += max(0.0, load.rate)

    @property
    def queues(self) -> set[str]:
        """Every queue that a process works."""
        return set(self.free)

    @property
    def wanting(self) -> set[str]:
        """The queues with an idle thread, or with jobs that end."""
        return {queue for queue in self.free if self.free[queue] or self._rates[queue]}

    def soon(self, waiting: Mapping[str, Mapping[int, int]], pace: QueueRates, ahead_s: float) -> dict[str, int]:
        """How many jobs of each queue its workers can use: one for each idle thread, and ``ahead_s`` seconds of work."""
        rates = {
            queue: max(rate, pace.rate(queue, sum(waiting.get(queue, {}).values()))) for queue, rate in self._rates.items()
        }
        return {queue: self.free[queue] + int(rate * ahead_s) for queue, rate in rates.items()}


class Demand:
    """The number of jobs still wanted. A foreign queue has no priorities, so all that wait in it count.

    After a full borrow, and a job for each of the ``free`` threads, a remainder of fewer than :data:`_FEW` is left to
    the next round.
    """

    def __init__(
        self,
        soon: Mapping[str, int],
        waiting: Mapping[str, Mapping[int, int]],
        free: Mapping[str, int],
    ) -> None:
        self._soon = soon
        self._free = free
        self._taken: dict[str, int] = defaultdict(int)
        self._waiting = {queue: sum(counts.values()) for queue, counts in waiting.items()}

    def left(self, queue: str) -> int:
        """How many more jobs are wanted in a queue."""
        rest = max(0, self._soon.get(queue, 0) - self._waiting.get(queue, 0))
        return self._unless_few(queue, rest)

    def _unless_few(self, queue: str, rest: int) -> int:
        return 0 if rest < _FEW and self._taken[queue] >= max(MOST_BORROWED, self._free.get(queue, 0)) else rest

    def take(self, queue: str, count: int) -> None:
        """Notes that ``count`` jobs were dispatched."""
        self._waiting[queue] = self._waiting.get(queue, 0) + count
        self._taken[queue] += count


class Shares:
    """The turns of those that want jobs at the same time: the one that got the fewest since it came is next.

    A newcomer begins with the count of the one that got the fewest, so it neither waits for the others to catch up nor
    catches up itself.
    """

    def __init__(self) -> None:
        self._got: dict[Hashable, float] = {}

    def keep(self, present: Collection[Hashable]) -> None:
        """Forgets those that want nothing any more."""
        self._got = {key: count for key, count in self._got.items() if key in present}

    def order(self, keys: Iterable[Hashable]) -> list[Hashable]:
        """In the order of their turns; those with the same count in the given order."""
        keys = list(keys)
        least = min((self._got[key] for key in keys if key in self._got), default=0)
        return sorted(keys, key=lambda key: self._got.setdefault(key, least))

    def served(self, key: Hashable, count: float) -> None:
        """Counts jobs that it got; of several that are served together, the jobs of each."""
        self._got[key] = self._got.get(key, 0) + count


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


@dataclass(slots=True)
class _Watched:
    """A queue since a moment: the waiting jobs and idle threads then, and the jobs pushed and wanted since."""

    since: float
    latest: float
    waited: int
    free: int
    threads: int
    pushed: int = 0
    wanted: int = 0


class QueueRates:
    """The rate at which jobs leave each queue, measured in the queue itself.

    The rates that processes report are as old as their last heartbeat. The leader knows more: how much was pushed to a
    queue, and how much of it is left a moment later. If nothing is left, more could have been used.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last: dict[str, _Watched] = {}
        self._rates: dict[str, float] = {}

    def rate(self, queue: str, waits: int) -> float:
        """Jobs per second that leave a queue in which ``waits`` are now; 0 if it was not watched just before."""
        last = self._last.get(queue)
        if last is None:
            return 0.0
        now = self._clock.monotonic()
        if now - last.latest > _STALE_S:
            del self._last[queue]
            self._rates.pop(queue, None)
            return 0.0
        known = self._rates.get(queue, 0.0)
        if now - last.since < _WINDOW_S:
            return known
        left = last.waited + last.pushed - waits
        # Jobs that idle threads took at once say nothing about the rate.
        seen = max(0, left - last.free) / (now - last.since)
        if seen > known and left <= last.threads and now - last.since < _STALE_S:
            return known  # as many may end in one moment, however long they took
        if waits == 0 and last.pushed >= last.wanted > 0:
            seen *= 2
        self._rates[queue] = seen if seen > known else 0.7 * known + 0.3 * seen
        del self._last[queue]
        return self._rates[queue]

    def note(self, queue: str, waits: int, pushed: int, wanted: int, free: int, threads: int) -> None:
        """``waits`` were in the queue when ``pushed`` of ``wanted`` jobs were added, and ``free`` of ``threads`` idle."""
        now = self._clock.monotonic()
        last = self._last.setdefault(queue, _Watched(now, now, waits, free, threads))
        last.latest = now
        last.pushed += pushed
        last.wanted += wanted


# -- how fast one process is

MEASURE_S: Final = 0.05
"""Seconds between two measurements, unless the process ran out of jobs meanwhile."""

LEAST_S: Final = MEASURE_S / 4
"""Shortest time over which jobs count: a few quick ones say little about the next thousand. So the next fetch asks for at
most twenty times the jobs finished."""


_SPREAD: Final = 3
"""How much more than their rate so far a few jobs may give: jobs do not end in equal distances."""


class Rate:
    """Jobs per second, smoothed, over seconds in which at least one runs.

    Idle seconds would lower the estimate until the process starved itself. The estimate fades while nothing runs. As many
    jobs as there are ``threads`` may end in one moment however long they took: the rate of more jobs limits theirs.
    """

    def __init__(self, clock: Clock, threads: int = 0) -> None:
        self._clock = clock
        self._threads = threads
        self._at = clock.monotonic()
        self._marks: deque[tuple[int, float]] = deque([(0, 0.0)])  # (jobs, busy seconds) whenever some had ended
        self._busy_s = 0.0
        self.per_second = 0.0

    def update(self, count: int, busy_s: float, *, dry: bool = False) -> float:
        """The jobs per second, after ``count`` jobs in all, with some job running for ``busy_s`` seconds in all.

        ``dry``: no jobs are left, so it is measured at once.
        """
        now, marks = self._clock.monotonic(), self._marks
        passed, done = now - self._at, count - marks[-1][0]
        if passed >= MEASURE_S or (dry and done):
            while len(marks) > 1 and count - marks[1][0] > self._threads:
                marks.popleft()
            lasting = (count - marks[0][0]) / max(busy_s - marks[0][1], LEAST_S)
            fresh = min(done / max(busy_s - self._busy_s, LEAST_S), _SPREAD * lasting)
            # Up at once, down slowly: a short pause must not make the next fetch a single job.
            kept = 0.7 ** (passed / MEASURE_S)
            self.per_second = fresh if fresh > self.per_second else self.per_second * kept + fresh * (1 - kept)
            if done:
                marks.append((count, busy_s))
            self._at, self._busy_s = now, busy_s
        return self.per_second


AHEAD_S: Final = 0.1
"""Seconds of work that a process fetches ahead, beside jobs for its idle threads and for the duration of a fetch: long jobs
are not hoarded, and short ones are ready when the next fetch begins."""


def fetched_ahead(idle: int, rate: float, latency_s: float) -> int:
    """How many jobs one process should have that have not begun: ``rate`` of them end per second, and a fetch takes
    ``latency_s``."""
    return max(0, idle) + int(rate * (AHEAD_S + 2 * latency_s))


# -- how many worker processes are wanted


ENOUGH: Final = 50
"""Jobs over which a :class:`Pace` is measured, unless they take too long."""

LONGEST_S: Final = 3_600.0
"""Largest number of busy seconds over which a :class:`Pace` is measured."""


class Pace:
    """Jobs per second over the last :data:`ENOUGH` jobs, in seconds in which at least one runs.

    Steady for jobs of any length, while :class:`Rate` follows the last twentieth of a second; kept while nothing runs.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[int, float]] = deque([(0, 0.0)], maxlen=1_000)

    def update(self, count: int, busy_s: float) -> float:
        """The pace after ``count`` jobs in all, with some job running for ``busy_s`` seconds in all; 0 if it is unknown."""
        marks = self._marks
        if (count, busy_s) != marks[-1]:
            marks.append((count, busy_s))
        while len(marks) > 2 and (count - marks[1][0] >= ENOUGH or busy_s - marks[0][1] > LONGEST_S):
            marks.popleft()
        done = count - marks[0][0]
        return done / max(busy_s - marks[0][1], LEAST_S) if done > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Performing:
    """A live worker process by its last heartbeat: running jobs, threads, jobs per second (0: unknown), and whether it is
    quiet."""

    busy: int
    concurrency: int
    rate: float
    is_quiet: bool = False


def workers_wanted(
    waiting: int, processes: Sequence[Performing], target_s: float, limited: Sequence[tuple[int, int]] = ()
) -> int:
    """How many worker processes would finish within ``target_s`` seconds what waits in a queue.

    ``waiting``: jobs of that queue; ``limited``: for each Task with a ``parallel``, its part of ``waiting``, and
    ``parallel``: it counts for no more threads than it may use. A process without a measured rate counts with the average
    of the others; if none is measured, one process is wanted if anything waits. The result is at most a thread per job, and
    at least the number of processes with running jobs. Quiet processes do not count: they are about to end.
    """
    staying = [each for each in processes if not each.is_quiet]
    busy = sum(1 for each in staying if each.busy)
    if waiting <= 0:
        return busy
    rates = [each.rate for each in staying if each.rate > 0]
    if not rates:
        return max(1, busy)
    jobs_each = sum(rates) / len(rates) * target_s
    threads_each = sum(max(1, each.concurrency) for each in staying) / len(staying)
    needed = (waiting - sum(jobs for jobs, _ in limited)) / jobs_each
    needed += sum(min(jobs / jobs_each, parallel / threads_each) for jobs, parallel in limited)
    most = (waiting + sum(each.busy for each in staying)) / threads_each
    return max(1, busy, math.ceil(min(needed, most)))
