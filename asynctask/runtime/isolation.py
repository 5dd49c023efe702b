"""Isolation of suspects: a job under which a process died runs alone in its process for some seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from asynctask.clock import Clock
from asynctask.runtime.execution import Execution

__all__ = ["ALONE_S", "Isolation"]

ALONE_S: Final = 5.0
"""Seconds for which a suspect may close its process: until the jobs beside it have ended, and while it runs alone. A job
that kills its process mostly does so at once, and no other job waits longer than this."""

_LOOK_S: Final = 0.1
"""Seconds between two checks of a waiting thread whether to give up."""


class Isolation:
    """The jobs that run now, at most ``limit`` of them.

    A crash under a suspect would count against the jobs beside it. So:

    - One suspect at a time has its turn; the others wait until it has ended, however long that takes.
    - Its turn closes the process: nothing else starts, and the suspect starts once nothing runs beside it. After
      :data:`ALONE_S` the process opens again. A suspect that runs by then goes on beside others; one that still waits
      starts in the next free place.
    - The process then stays open for as long as it was closed, before the next suspect has its turn: suspects take at most
      half of its time.

    Jobs enter outside their function only, where no exception of another thread can interrupt them under the lock. Without
    a suspect they enter and leave without the lock: every thread would wait for the one that lost the interpreter while it
    held it. A job enters first and then checks for a turn; a suspect takes its turn first and then checks who runs. So one
    of the two sees the other.
    """

    def __init__(self, clock: Clock, limit: int) -> None:
        self._clock = clock
        self._limit = limit
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._waiting = 0  # threads that wait for the condition
        self._running: dict[int, Execution] = {}
        self._closed_at: float | None = None  # when the current turn began; None: no suspect has one
        self._suspect: int | None = None  # that one, while it runs
        self._kept = 0  # places kept for it while it does not run
        self._stays_open_until = 0.0
        self._since: float | None = None  # when the first of those that run began
        self._busy_s = 0.0  # until then

    def enter(self, execution: Execution, give_up: Callable[[], bool]) -> bool:
        """Waits for its turn; False if ``give_up`` said so first."""
        if not execution.is_suspect:
            self._add(execution)
            if self._closed_at is None:
                return True
            self.leave(execution)
        with self._lock:  # the condition's own, without the detour
            if execution.is_suspect:
                return self._enter_closed(execution, give_up)
            while self._closed_at is not None and (self.closed or len(self._running) + self._kept >= self._limit):
                if give_up():
                    return False
                self._wait(self._closed_for())
            self._add(execution)
        return True

    def _enter_closed(self, execution: Execution, give_up: Callable[[], bool]) -> bool:
        while self._closed_at is not None or (left := self._stays_open_until - self._clock.monotonic()) > 0:
            if give_up():
                return False
            self._wait(_LOOK_S if self._closed_at is not None else left)
        self._closed_at, self._kept = self._clock.monotonic(), 1
        while self._running and (self.closed or len(self._running) >= self._limit):
            if give_up():
                self._open()
                return False
            self._wait(self._closed_for())
        self._suspect, self._kept = id(execution), 0
        self._add(execution)
        return True

    def _wait(self, seconds: float) -> None:
        self._waiting += 1
        try:
            self._condition.wait(max(0.0, min(seconds, _LOOK_S)))
        finally:
            self._waiting -= 1

    def _closed_for(self) -> float:
        """For how many seconds from now the process is closed; where it is not, until somebody looks again."""
        left = 0.0 if self._closed_at is None else self._closed_at + ALONE_S - self._clock.monotonic()
        return left if left > 0 else _LOOK_S

    def _open(self) -> None:
        """The turn of a suspect is over."""
        assert self._closed_at is not None
        closed_s = min(self._clock.monotonic() - self._closed_at, ALONE_S)
        self._stays_open_until = self._closed_at + 2 * closed_s
        self._closed_at, self._suspect, self._kept = None, None, 0
        self._condition.notify_all()

    def _add(self, execution: Execution) -> None:
        self._running[id(execution)] = execution
        if self._since is None:
            self._since = self._clock.monotonic()

    def leave(self, execution: Execution) -> None:
        """It runs no more, or counts as lost. Leaving twice does nothing."""
        if self._running.pop(id(execution), None) is None:
            return
        if not self._running or self._waiting or self._closed_at is not None:
            with self._lock:
                self._left(execution)

    def _left(self, execution: Execution) -> None:
        if not self._running and self._since is not None:
            self._busy_s += self._clock.monotonic() - self._since
            self._since = None
        if self._suspect == id(execution):
            self._open()
        elif self._waiting:
            self._condition.notify_all()

    def pass_on(self, execution: Execution, follower: Execution) -> None:
        """Another job begins on its thread, in its place."""
        self._add(follower)
        self._running.pop(id(execution), None)

    @property
    def closed(self) -> bool:
        """Whether a suspect has the process to itself, or waits for that: nothing else may begin."""
        since = self._closed_at
        return since is not None and self._clock.monotonic() < since + ALONE_S

    def running(self) -> list[Execution]:
        """The jobs that run now."""
        return list(self._running.copy().values())

    @property
    def busy_s(self) -> float:
        """For how many seconds there was a job that ran, in all."""
        with self._lock:
            return self._busy_s + (0.0 if self._since is None else self._clock.monotonic() - self._since)

    def __len__(self) -> int:
        return len(self._running)
