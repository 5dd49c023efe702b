"""Figures of a process for monitoring."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, Final

DURATIONS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Upper bounds of the histograms of durations, in seconds; a last bucket has larger values."""

SIZES: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Upper bounds of the histograms of sizes."""

MOST_WORKERS: Final = 200
"""Workers with figures of their own; further ones are summed as :data:`OTHERS`."""

OTHERS: Final = "(others)"


class Histogram:
    """Counts of values by upper bound, and their sum."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def as_list(self) -> list[Any]:
        """The sum, and the count of each bucket."""
        return [round(self.total, 6), self.counts.copy()]


class Figures:
    """Totals of one process since its start, for monitoring: they only rise.

    Its heartbeat writes them to its row, for all processes of the application. Each is written by one thread, once per
    batch or round, so nothing is locked.
    """

    def __init__(self) -> None:
        self._outcomes: dict[str, dict[str, int]] = {}
        self._durations: dict[str, Histogram] = {}
        self.flushes = Histogram(SIZES)
        self.claims = Histogram(SIZES)

    def ended(self, worker: str, outcome: str, seconds: float | None) -> None:
        """Counts a committed outcome; ``seconds``: how long the job ran, None if it did not."""
        counts = self._outcomes.get(worker)
        if counts is None:
            worker = worker if len(self._outcomes) < MOST_WORKERS else OTHERS
            counts = self._outcomes.setdefault(worker, {})
        counts[outcome] = counts.get(outcome, 0) + 1
        if seconds is not None:
            durations = self._durations.get(worker)
            if durations is None:
                durations = self._durations.setdefault(worker, Histogram(DURATIONS_S))
            durations.add(seconds)

    def as_dict(self) -> dict[str, Any]:
        """The figures as stored; another thread may call it."""
        return {
            "outcomes": {worker: counts.copy() for worker, counts in self._outcomes.copy().items()},
            "durations": {worker: each.as_list() for worker, each in self._durations.copy().items()},
            "flushes": self.flushes.as_list(),
            "claims": self.claims.as_list(),
        }


Minute = tuple[int, str, str]
"""When a minute began (microseconds), a queue and a worker."""

MOST_ROWS: Final = 1_000
"""Rows of :class:`Minutes` that have not been written yet; further ones are summed as :data:`OTHERS`."""


class Minutes:
    """What has ended in this process and is not in the history yet: the counts of each queue and worker in each minute.

    The recorder adds, and the heartbeat takes and writes (:mod:`asynctask.ledger.history`).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[Minute, Sequence[int]] = {}

    def add(self, rows: Mapping[Minute, Sequence[int]]) -> None:
        """Adds counts; all rows have the same number of them."""
        with self._lock:
            for key, more in rows.items():
                is_known = key in self._rows or len(self._rows) < MOST_ROWS
                kept = key if is_known else (key[0], OTHERS, OTHERS)
                known = self._rows.get(kept)
                self._rows[kept] = more if known is None else [a + b for a, b in zip(known, more, strict=True)]

    def take(self) -> dict[Minute, Sequence[int]]:
        """Returns and clears all rows."""
        with self._lock:
            rows, self._rows = self._rows, {}
        return rows
