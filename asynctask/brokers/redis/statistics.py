"""What a process counts until it is sent: totals and days with the next exchange, and everything with the next beat."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Final

from asynctask.brokers.redis.metrics import Figures, Metrics, day
from asynctask.clock import SECOND, Clock

__all__ = ["Counters", "Statistics"]

STAT_S: Final = 157_680_000
"""Seconds for which the counts of a day are kept: five years, as Sidekiq does."""

_FOLD_S: Final = 1.0


class Counters:
    """Keys to be counted up, by how much and for how long they are kept. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, int], int] = {}

    def add(self, name: str, by: int, keep_s: int = 0) -> None:
        """Adds to a counter; ``name`` is its key without the namespace, ``keep_s`` seconds, 0 for ever."""
        with self._lock:
            self._counts[name, keep_s] = self._counts.get((name, keep_s), 0) + by

    def take(self) -> dict[tuple[str, int], int]:
        """Everything, for whoever sends it: (name, keep_s) -> by how much."""
        with self._lock:
            taken, self._counts = self._counts, {}
        return taken

    def put_back(self, taken: Mapping[tuple[str, int], int]) -> None:
        """It could not be sent."""
        for (name, keep_s), by in taken.items():
            self.add(name, by, keep_s)


class Statistics:
    """The jobs that ended. ``counters`` takes the totals and the days; the metrics stay here until :meth:`take`."""

    def __init__(self, clock: Clock, counters: Counters) -> None:
        self._clock = clock
        self._counters = counters
        self._ended: deque[tuple[str, float, bool]] = deque()
        self._lock = threading.Lock()
        self._metrics = Metrics()
        self._folded: float | None = None

    def ended(self, name: str, seconds: float, failed: bool) -> None:
        """Notes a job that ended: no lock, for every job of every thread comes here."""
        self._ended.append((name, seconds, failed))

    def fold(self, *, at_once: bool = False) -> None:
        """Adds up what was noted; not more often than once a second, unless ``at_once``."""
        if not self._ended:
            return
        with self._lock:
            now = self._clock.monotonic()
            if not at_once and self._folded is not None and now - self._folded < _FOLD_S:
                return
            self._folded = now
            second = self._clock.now() // SECOND
            take = self._ended.popleft
            ended = [take() for _ in range(len(self._ended))]  # what ends meanwhile comes the next time
            self._metrics.add(second // 60, ended)
        count, failures = len(ended), sum(failed for _, _, failed in ended)
        today = day(second)
        for name, by in (("processed", count), ("failed", failures)):
            if by:
                self._counters.add(f"stat:{name}", by)
                self._counters.add(f"stat:{name}:{today}", by, STAT_S)

    def take(self) -> dict[tuple[int, str], Figures]:
        """The metrics, for whoever sends them."""
        with self._lock:
            return self._metrics.take()

    def put_back(self, taken: Mapping[tuple[int, str], Figures]) -> None:
        """They could not be sent."""
        with self._lock:
            self._metrics.put_back(taken)
