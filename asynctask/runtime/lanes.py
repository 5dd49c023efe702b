"""Jobs of a Task with a ``parallel`` that follow each other in one place of it, without a way through the broker each.

A place that comes free costs a round trip through ledger and broker before the next job has it: a flush, a reservation, a
push, a fetch. Where jobs are short that is longer than the jobs. So the process that has a place is lent the next jobs of
the Task, as many as take :data:`SPAN_S`, and begins one as soon as the one before has returned. The ledger moves the place
on in the transaction that records the end of the first, so it never counts more jobs in flight than ``parallel``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from asynctask.brokers.base import Copy
from asynctask.clock import Clock
from asynctask.errors import Unavailable
from asynctask.logs import get_logger
from asynctask.runtime.assignment import Assignment

__all__ = ["MOST", "SPAN_S", "Lane", "Lanes"]

SPAN_S: Final = 0.4
"""Seconds of work that are lent for one place. What is lent begins within half a second or goes back, as everything that
was fetched ahead: so a knob acts within a second, and an urgent job waits no longer for a thread."""

MOST: Final = 100
"""Jobs that are lent for one place, however short they are."""

_TASKS: Final = 1_000
"""Tasks of which the time of a job is remembered."""

Lend = Callable[[int, int, int], Sequence[Copy]]
"""Is given a Task, how many jobs of it are wanted, and for how many places; see ``ledger.dispatch.lend_jobs``."""


class Lane:
    """What follows in one place: jobs in their order, and until when they may begin, on the monotonic clock."""

    __slots__ = ("_followers", "until")

    def __init__(self, followers: Sequence[Assignment], until: float) -> None:
        self._followers = deque(followers)
        self.until = until

    def next(self) -> Assignment | None:
        """The next job, None where there is none."""
        return self._followers.popleft() if self._followers else None


class Lanes:
    """The lanes of one process.

    Arguments: ``lend`` asks the ledger for jobs; ``take`` makes assignments of their copies; ``release`` gives one back;
    ``fresh_s`` is for how many seconds after they were lent they may begin; ``take_back`` has every loan of this process
    go back but those whose Event ids it is given.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        lend: Lend,
        take: Callable[[Sequence[Copy]], Sequence[Assignment]],
        release: Callable[[Assignment], None],
        take_back: Callable[[set[int]], int],
        fresh_s: float,
    ) -> None:
        self._clock = clock
        self._lend = lend
        self._take = take
        self._release = release
        self._take_back = take_back
        self._fresh_s = fresh_s
        self._seconds: dict[int, float] = {}  # what a job of a Task takes
        self._lent: dict[int, None] = {}  # Event ids, until their outcomes are recorded
        self._doubt = False
        self._lock = threading.Lock()
        self._ready = 0
        self._log = get_logger("asynctask.lanes")

    @property
    def ready(self) -> int:
        """Jobs that are lent and have not begun."""
        return self._ready

    def open(self, heads: Sequence[Assignment]) -> None:
        """Has jobs lent that follow these, which are about to begin. For the fetching thread. Without an answer of the
        ledger nothing follows them."""
        places: dict[int, list[Assignment]] = {}
        for head in heads:
            if head.ticket is not None and head.ticket.task_id is not None:
                places.setdefault(head.ticket.task_id, []).append(head)
        for task_id, there in places.items():
            seconds = self._seconds.get(task_id)
            each = 0 if seconds is None else min(MOST, int(SPAN_S / max(seconds, SPAN_S / MOST)) - 1)
            if each > 0:
                try:
                    self._open(task_id, there, each)
                except Exception as error:
                    self._doubt = True  # what was lent without an answer would be nobody's
                    if not isinstance(error, Unavailable):
                        self._log.exception("not_lent", task_id=task_id)

    def look_after(self) -> None:
        """Has loans go back that never arrived here. For the fetching thread. Raises :class:`Unavailable`."""
        if self._doubt:
            self._take_back(set(self._lent))
            self._doubt = False

    def _open(self, task_id: int, heads: Sequence[Assignment], each: int) -> None:
        self.look_after()
        asked = self._clock.monotonic()
        followers = self._take(self._lend(task_id, each * len(heads), len(heads)))
        for follower in followers:
            assert follower.ticket is not None
            follower.is_lent = True
            self._lent[follower.ticket.event_id] = None
        begin = [follower for follower in followers if follower.begins]
        for follower in followers:
            if not follower.begins:
                self._release(follower)
        share = -(-len(begin) // len(heads))
        for number, head in enumerate(heads):
            part = begin[number * share : (number + 1) * share]
            if part:
                lane = Lane(part, asked + self._fresh_s)
                self._count(len(part))
                for member in (head, *part):
                    member.lane = lane

    def follow(self, assignment: Assignment, goes_on: bool) -> Assignment | None:
        """The job that begins now in the place of one that is over; None where none does, and what was to follow goes back.

        ``goes_on``: whether this process may begin anything, on this thread.
        """
        ticket = assignment.ticket
        if ticket is None or not ticket.awaited or ticket.task_id is None:
            return None
        now = self._clock.monotonic()
        self._note(ticket.task_id, now - assignment.began)
        lane = assignment.lane
        if lane is None:
            return None
        if goes_on and now < lane.until and (follower := lane.next()) is not None:
            self._count(-1)
            assignment.follower = follower
            return follower
        self.close(assignment)
        return None

    def close(self, assignment: Assignment) -> None:
        """Nothing follows this one: what was to goes back."""
        while assignment.lane is not None and (left := assignment.lane.next()) is not None:
            self._count(-1)
            self._release(left)

    def _count(self, more: int) -> None:
        with self._lock:
            self._ready += more

    def done(self, assignment: Assignment) -> None:
        """The outcome of a lent job is recorded."""
        if assignment.ticket is not None:
            self._lent.pop(assignment.ticket.event_id, None)

    def _note(self, task_id: int, seconds: float) -> None:
        known = self._seconds.get(task_id)
        if known is None and len(self._seconds) >= _TASKS:
            self._seconds.clear()
        self._seconds[task_id] = seconds if known is None else 0.7 * known + 0.3 * seconds
