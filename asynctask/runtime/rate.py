"""How fast a process finishes jobs while it has any."""

from __future__ import annotations

from typing import Final

from asynctask.clock import Clock

__all__ = ["LEAST_S", "LOOK_S", "Rate"]

LOOK_S: Final = 0.05
"""Seconds between two looks, unless the process ran dry meanwhile."""

LEAST_S: Final = LOOK_S / 4
"""However soon a few jobs were finished, they count as if they had taken so long: a handful that took no time at all says
little about the next thousand. At most twenty times what was finished is asked for next."""


class Rate:
    """Jobs finished in a second in which at least one runs, smoothed.

    Not in every second: a process that waits for jobs would ask for ever fewer of them, just as it finishes what it gets at
    once, and a Task would begin as slowly as jobs are asked for. While nothing runs what is known fades.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at = clock.monotonic()
        self._count = 0
        self._busy_s = 0.0
        self.per_second = 0.0

    def update(self, count: int, busy_s: float, *, dry: bool = False) -> float:
        """Takes note that ``count`` jobs are finished in all, and that some job ran for ``busy_s`` seconds in all.

        ``dry``: nothing is left to do, so it is looked at once. Returns how many jobs are finished in a second.
        """
        now = self._clock.monotonic()
        passed, done = now - self._at, count - self._count
        if passed >= LOOK_S or (dry and done):
            fresh = done / max(busy_s - self._busy_s, LEAST_S)
            # Up at once, down slowly: a short pause must not make the next fetch a single job.
            kept = 0.7 ** (passed / LOOK_S)
            self.per_second = fresh if fresh > self.per_second else self.per_second * kept + fresh * (1 - kept)
            self._at, self._count, self._busy_s = now, count, busy_s
        return self.per_second
