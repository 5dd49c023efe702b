"""How fast a process finishes jobs."""

from __future__ import annotations

from asynctask.clock import Clock

__all__ = ["Rate"]


LOOK_S = 0.05
"""Seconds between two looks, at least."""


class Rate:
    """Jobs finished in a second, smoothed; looked at no more often than every 50 ms."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at = clock.monotonic()
        self._count = 0
        self.per_second = 0.0

    def update(self, count: int) -> float:
        """Takes note that ``count`` jobs are finished in all; returns how many are finished in a second."""
        now = self._clock.monotonic()
        passed = now - self._at
        if passed >= LOOK_S:
            fresh = (count - self._count) / passed
            # Up at once, down slowly: a short pause must not make the next fetch a single job.
            kept = 0.7 ** (passed / LOOK_S)
            self.per_second = fresh if fresh > self.per_second else self.per_second * kept + fresh * (1 - kept)
            self._at, self._count = now, count
        return self.per_second
