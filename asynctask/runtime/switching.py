"""How long a thread of a worker process may keep the interpreter from the others."""

from __future__ import annotations

import sys
from typing import Final

__all__ = ["AS_DELIVERED_S", "OFTEN_S", "QUICK_S", "Switching"]

AS_DELIVERED_S: Final = 0.005
"""CPython's own interval."""

OFTEN_S: Final = 0.00005
"""A job of a millisecond that has waited for something must not wait five more until outcomes are written or the next jobs
are read: the threads that do so keep the interpreter for as long as they may."""

QUICK_S: Final = 0.0003
"""Jobs that are done sooner come by ten thousands a second. Then it costs more to change threads so often than it gives."""


class Switching:
    """The switch interval of a process whose only purpose is to perform jobs, by how long these take.

    Nothing is changed where somebody has set an interval.
    """

    def __init__(self) -> None:
        self._is_ours = sys.getswitchinterval() == AS_DELIVERED_S
        self._now = AS_DELIVERED_S
        self._jobs = 0
        self._quick = 0

    def follow(self, jobs: int, quick: int) -> None:
        """``jobs`` were performed in all, ``quick`` of them within :data:`QUICK_S`.

        What most jobs take decides, not what they take on average: of those that do nothing a few wait for the interpreter,
        the longer the more threads there are.
        """
        done, were_quick = jobs - self._jobs, quick - self._quick
        if done <= 0:
            return
        self._jobs, self._quick = jobs, quick
        self._set(AS_DELIVERED_S if were_quick * 2 > done else OFTEN_S)

    def end(self) -> None:
        """The interval is what it was before."""
        self._set(AS_DELIVERED_S)

    def _set(self, wanted: float) -> None:
        if self._is_ours and wanted != self._now:
            sys.setswitchinterval(wanted)
            self._now = wanted
