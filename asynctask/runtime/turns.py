"""Who runs beside whom in one process: a job under which a process died runs alone."""

from __future__ import annotations

import threading
from collections.abc import Callable

from asynctask.clock import Clock
from asynctask.runtime.performer import Assignment

__all__ = ["Turns"]

PATIENCE_S = 60.0
"""A watched job waits so long for the jobs beside it to end. Then it runs beside those still going: one that hangs must not
hold the process for ever."""


class Turns:
    """The jobs that run now.

    A watched job (a process died that held it) may be the one that kills: each of its crashes would count as a death of
    every job beside it, until those end as poison too. So it runs while nothing else does, and what comes later waits.
    Jobs enter here outside their function only, where no exception of another thread can hit them while they hold the lock.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._running: dict[int, Assignment] = {}
        self._watched = 0  # watched jobs that wait or run
        self._alone: int | None = None  # the watched job that runs
        self._since = 0.0  # when the first of those that run began
        self._busy_s = 0.0  # until then

    def enter(self, assignment: Assignment, give_up: Callable[[], bool]) -> bool:
        """Waits for its turn; False if ``give_up`` said so first."""
        ticket = assignment.ticket
        if ticket is not None and ticket.watched:
            return self._enter_alone(assignment, give_up)
        with self._lock:  # the condition's own, without the detour: this is on the way of every job
            while self._watched:
                if give_up():
                    return False
                self._condition.wait(0.1)
            self._add(assignment)
        return True

    def _enter_alone(self, assignment: Assignment, give_up: Callable[[], bool]) -> bool:
        until = self._clock.monotonic() + PATIENCE_S
        with self._condition:
            self._watched += 1
            while self._alone is not None or (self._running and self._clock.monotonic() < until):
                if give_up():
                    self._watched -= 1
                    self._condition.notify_all()
                    return False
                self._condition.wait(0.1)
            self._alone = id(assignment)
            self._add(assignment)
        return True

    def _add(self, assignment: Assignment) -> None:
        if not self._running:
            self._since = self._clock.monotonic()
        self._running[id(assignment)] = assignment

    def leave(self, assignment: Assignment) -> None:
        """It runs no more, or counts as lost. Leaving twice does nothing."""
        with self._lock:
            if self._running.pop(id(assignment), None) is None:
                return
            if not self._running:
                self._busy_s += self._clock.monotonic() - self._since
            alone = self._alone == id(assignment)
            if alone:
                self._alone = None
                self._watched -= 1
            if alone or self._watched:
                self._condition.notify_all()

    @property
    def closed(self) -> bool:
        """Whether a watched job waits or runs: nothing else may begin."""
        return self._watched > 0

    def running(self) -> list[Assignment]:
        """The jobs that run now."""
        with self._condition:
            return list(self._running.values())

    @property
    def busy_s(self) -> float:
        """For how many seconds there was a job that ran, in all."""
        with self._lock:
            return self._busy_s + (self._clock.monotonic() - self._since if self._running else 0.0)

    def __len__(self) -> int:
        return len(self._running)
