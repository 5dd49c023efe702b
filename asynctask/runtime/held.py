"""What a process knows of the copies that the broker holds for it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

from asynctask.brokers.base import Copy
from asynctask.clock import Clock

__all__ = ["LOOKS_S", "Doubt", "Mine"]

LOOKS_S: Final = (0.0, 10.0, 60.0, 180.0)
"""Seconds after a fetch broke off at which it is looked what it moved: the network may deliver it minutes later."""


class Doubt:
    """A fetch broke off: the broker may have given, or may yet give, what never arrives here. For the fetching thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._looks: list[float] = []  # when, the next one first

    def rise(self) -> None:
        """A fetch broke off just now."""
        now = self._clock.monotonic()
        self._looks = [now + seconds for seconds in LOOKS_S]

    def is_due(self) -> bool:
        """Whether it is time to look."""
        return bool(self._looks) and self._looks[0] <= self._clock.monotonic()

    def looked(self) -> None:
        """The broker was asked just now."""
        now = self._clock.monotonic()
        self._looks = [at for at in self._looks if at > now]


class Mine:
    """The copies that arrived here and are not given back, and those of them that may be acknowledged."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: list[Copy] = []
        self._handles: set[Any] = set()  # of whatever kind the broker's are

    def __contains__(self, copy: Copy) -> bool:
        with self._lock:
            return copy.handle in self._handles

    @property
    def waiting(self) -> int:
        """How many may be acknowledged."""
        return len(self._done)

    def done(self, copy: Copy) -> int:
        """It may be acknowledged; returns how many wait for that."""
        with self._lock:
            self._done.append(copy)
            return len(self._done)

    def take_done(self) -> list[Copy]:
        """What may be acknowledged, for whoever does it now."""
        with self._lock:
            taken, self._done = self._done, []
            return taken

    def keep_done(self, copies: Sequence[Copy]) -> None:
        """They could not be acknowledged; they come first the next time."""
        with self._lock:
            self._done[:0] = copies

    def exchanged(self, done: Sequence[Copy], copies: Sequence[Copy]) -> None:
        """``done`` were acknowledged and ``copies`` arrived."""
        with self._lock:
            self._handles.difference_update(copy.handle for copy in done)
            self._handles.update(copy.handle for copy in copies)

    def forget(self, copies: Sequence[Copy]) -> None:
        """They went back or into a set, or count as never arrived."""
        with self._lock:
            self._handles.difference_update(copy.handle for copy in copies)
