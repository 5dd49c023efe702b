"""The heartbeat: renews the lease of a process and tells what it does; without it, others take its jobs."""

from __future__ import annotations

import resource
import sys
import threading
from collections.abc import Callable
from typing import Any

from asynctask.clock import Clock, micros
from asynctask.errors import Unavailable
from asynctask.ledger import processes
from asynctask.ledger.base import Ledger
from asynctask.logs import get_logger

__all__ = ["Heartbeat"]

LATE = 0.75
"""Share of the lease after which a process that could not renew it starts nothing more."""

RETRY_S = 1.0
"""Seconds after which a heartbeat is tried again that the database did not take."""


class Heartbeat:
    """Beats every ``every_s`` seconds in a thread of its own.

    ``tell`` gives the values to write (``busy``, ``rate``, ...); ``on_signal`` is called with a signal that somebody left
    (``TSTP``, ``TERM``), or ``LOST`` when another process has declared this one dead.
    """

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        *,
        every_s: float,
        lease_s: float,
        tell: Callable[[], dict[str, Any]] = dict,
        on_signal: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._ledger = ledger
        self._clock = clock
        self._every_s = min(every_s, lease_s / 3)  # two in a row may be late without an interruption
        self._lease_s = lease_s
        self._tell = tell
        self._on_signal = on_signal
        self._last = clock.boottime()
        self._soon = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._log = get_logger("asynctask.heartbeat")

    def start(self) -> None:
        """Starts beating; the process must be registered already."""
        self._last = self._clock.boottime()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops beating."""
        self._stopping = True
        self._soon.set()
        if self._thread is not None:
            self._thread.join(10)

    def soon(self) -> None:
        """Something changed that somebody is waiting to see: the next beat comes at once."""
        self._soon.set()

    def fresh(self) -> bool:
        """Whether the lease was renewed recently enough to start a job; not after the machine was suspended."""
        return self._clock.boottime() - self._last < micros(self._lease_s * LATE)

    def beat(self) -> None:
        """One beat now. Raises LedgerUnavailable."""
        before = self._clock.boottime()
        left = processes.beat(self._ledger, lease_s=self._lease_s, rss=memory_bytes(), **self._tell())
        if left != "LOST":
            self._last = before
        if left is not None:
            self._on_signal(left)

    def _run(self) -> None:
        pause_s = self._every_s
        while True:
            self._soon.wait(pause_s)
            self._soon.clear()
            if self._stopping:
                return
            pause_s = min(self._every_s, RETRY_S)
            try:
                self.beat()
                pause_s = self._every_s
            except Unavailable as error:
                self._log.warning("heartbeat_failed", error=str(error))
            except Exception:
                self._log.exception("heartbeat_failed")


def memory_bytes() -> int:
    """The most memory this process has used, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
