"""The poller: moves due jobs from the broker's sets to their queues, at intervals that all worker processes share.

It runs where the broker is polled; jobs that wait in the ledger are the dispatcher's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from asynctask.brokers.base import RETRY, SCHEDULE, Broker
from asynctask.clock import Clock, Ids
from asynctask.errors import Unavailable
from asynctask.logs import get_logger

__all__ = ["Poller"]

EACH_S: Final = 5.0
"""Seconds between two polls by any process, on average: each of n processes polls every n times as many."""

FIRST_S: Final = 10.0
"""Seconds before the first poll, for all processes of a roll-out to be counted."""

JITTER_S: Final = 5.0
AT_ONCE: Final = 100
"""Jobs moved in one step; a stop takes effect between two steps."""

PRUNE_S: Final = 60.0
"""Seconds between two prunings of this process."""

MAX_PAUSE_S: Final = 3600.0
"""It polls at least this often, however many names stand in the set of processes."""

_MANY: Final = 10


class Poller:
    """One thread. ``processes`` counts the polling processes; ``prune`` removes the dead among them; ``average_s``: average
    seconds between two polls of this process, 0: by the number of processes."""

    def __init__(
        self,
        broker: Broker,
        clock: Clock,
        ids: Ids,
        *,
        processes: Callable[[], int] = lambda: 1,
        prune: Callable[[], None] = lambda: None,
        average_s: float = 0.0,
    ) -> None:
        self._broker = broker
        self._clock = clock
        self._ids = ids
        self._processes = processes
        self._prune = prune
        self._average_s = average_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._log = get_logger("asynctask.poller")

    def start(self) -> None:
        """Starts polling."""
        self._thread = threading.Thread(target=self._run, name="poller", daemon=True)
        self._thread.start()

    def quiet(self) -> None:
        """Stops polling; returns at once."""
        self._stop.set()

    def stop(self) -> None:
        """Stops polling, and waits for a step that is under way."""
        self.quiet()
        if self._thread is not None:
            self._thread.join(10)

    def first(self) -> float:
        """Seconds before the first poll."""
        return (0.0 if self._average_s else FIRST_S) + JITTER_S * self._ids.random()

    def pause(self) -> float:
        """Seconds before the next poll, drawn so that processes do not keep step. Raises Unavailable."""
        count = max(1, self._processes())
        average = self._average_s or count * EACH_S
        noise = self._ids.random()
        return min(MAX_PAUSE_S, 2 * average * noise if count >= _MANY else average * noise + average / 2)

    def look(self) -> int:
        """Moves due jobs to their queues until none is left or a stop comes; returns how many. Raises Unavailable."""
        moved = 0
        for name in (RETRY, SCHEDULE):
            while not self._stop.is_set():
                found = self._broker.release_due(name, self._clock.now(), AT_ONCE)
                moved += found
                if not found:
                    break
        return moved

    def _run(self) -> None:
        pause = self.first()
        pruned: float | None = None
        while not self._stop.wait(pause):
            pause = self._average_s or EACH_S
            try:
                now = self._clock.monotonic()
                if pruned is None or now - pruned >= PRUNE_S:
                    pruned = now
                    self._prune()
                self.look()
                pause = self.pause()
            except Unavailable as error:
                self._log.warning("look_put_off", error=str(error))
            except Exception:
                self._log.exception("look_failed")
