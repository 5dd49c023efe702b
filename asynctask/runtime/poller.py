"""The poller: looks in the broker's sets for what is due, at intervals that all worker processes share.

Only where the broker is polled: what waits in the ledger is the dispatcher's.
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
"""Seconds between two looks of any process, on the average: each of n processes looks every n times as many."""

FIRST_S: Final = 10.0
"""Seconds before the first look, in which all processes of a start have come to be counted."""

JITTER_S: Final = 5.0
AT_ONCE: Final = 100
"""Jobs of one step; between two it may be told to stop."""

PRUNE_S: Final = 60.0
"""Seconds between two prunings of this process."""

MAX_PAUSE_S: Final = 3600.0
"""However many names somebody wrote into the set of processes, it looks this often."""

_MANY: Final = 10


class Poller:
    """One thread. Its arguments: ``processes`` counts the processes that look; ``prune`` forgets the dead among them;
    ``average_s``, the average seconds between two looks of this process, 0: by their number."""

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
        """Starts looking."""
        self._thread = threading.Thread(target=self._run, name="poller", daemon=True)
        self._thread.start()

    def quiet(self) -> None:
        """Looks no more; returns at once."""
        self._stop.set()

    def stop(self) -> None:
        """Looks no more, and waits for a step that is under way."""
        self.quiet()
        if self._thread is not None:
            self._thread.join(10)

    def first(self) -> float:
        """Seconds before the first look."""
        return (0.0 if self._average_s else FIRST_S) + JITTER_S * self._ids.random()

    def pause(self) -> float:
        """Seconds before the next look, drawn so that processes do not keep step. Raises Unavailable."""
        count = max(1, self._processes())
        average = self._average_s or count * EACH_S
        noise = self._ids.random()
        return min(MAX_PAUSE_S, 2 * average * noise if count >= _MANY else average * noise + average / 2)

    def look(self) -> int:
        """Moves what is due to its queues, until nothing is or it is told to stop; returns how much. Raises Unavailable."""
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
