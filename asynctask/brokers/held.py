"""Which copies the broker holds for this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from asynctask.brokers.base import Broker, Copy

MANY_DONE: Final = 500
"""Number of copies to acknowledge from which the fetcher is woken, however busy the process is."""


class HeldCopies:
    """The copies that the broker holds for the process ``identity``: those that arrived and have not left, and those of
    them that may be acknowledged. Without a broker there are none. ``is_idle``: whether no job runs."""

    def __init__(self, identity: str, broker: Broker | None, is_idle: Callable[[], bool]) -> None:
        self._identity = identity
        self._broker = broker
        self._is_idle = is_idle
        self._lock = threading.Lock()
        self._done: list[Copy] = []
        self._handles: set[Any] = set()  # of whatever kind the broker's are
        self._woken = False  # whether the fetcher was woken for these: once until it takes them

    def __contains__(self, copy: Copy) -> bool:
        with self._lock:
            return copy.handle in self._handles

    @property
    def waiting(self) -> int:
        """How many may be acknowledged."""
        return len(self._done)

    def done(self, copy: Copy) -> None:
        """The copy may be acknowledged, with the next exchange. An idle process makes one at once."""
        waiting = self._add(copy)
        # A flush ends hundreds of jobs; waking the fetcher for each would cost more.
        if not self._woken and (waiting >= MANY_DONE or self._is_idle()):
            self._woken = True
            self.wake()

    def acknowledge(self, copy: Copy) -> None:
        """The copy may be acknowledged at once: it never became an execution."""
        self._add(copy)
        self.wake()

    def wake(self) -> None:
        """Wakes the fetcher."""
        if self._broker is not None:
            self._broker.wake()

    def put_back(self, copies: Sequence[Copy]) -> None:
        """Returns copies to their queues. Raises BrokerUnavailable."""
        if self._broker is not None:
            self._broker.put_back(self._identity, copies)

    def _add(self, copy: Copy) -> int:
        with self._lock:
            self._done.append(copy)
            return len(self._done)

    def take_done(self) -> list[Copy]:
        """Takes the copies that the caller acknowledges now."""
        self._woken = False
        with self._lock:
            taken, self._done = self._done, []
            return taken

    def keep_done(self, copies: Sequence[Copy]) -> None:
        """Returns copies that could not be acknowledged; they come first the next time."""
        with self._lock:
            self._done[:0] = copies

    def exchanged(self, done: Sequence[Copy], copies: Sequence[Copy]) -> None:
        """``done`` were acknowledged and ``copies`` arrived."""
        with self._lock:
            self._handles.difference_update(copy.handle for copy in done)
            self._handles.update(copy.handle for copy in copies)

    def forget(self, copies: Sequence[Copy]) -> None:
        """The copies went back or into a set, or count as never arrived."""
        with self._lock:
            self._handles.difference_update(copy.handle for copy in copies)
