"""Lanes: jobs of a Task with a ``parallel`` follow each other in one of its places, without the broker between them.

Through the broker, a free place gets its next job after a flush, a reservation, a push and a fetch, which take longer than
a short job. So the ledger lends a process that has a place the next jobs of the Task, :data:`SPAN_S` of work, and it begins
each when the one before has returned. The transaction that records the end of one job passes the place on to the next: no
more jobs are in flight than ``parallel``.

The thread whose lane runs low borrows more, for all low lanes of its Task, before it begins its next job. While other jobs
wait for a thread of the process it borrows nothing, and the place is released when its lane is empty.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from asynctask.brokers.base import Copy
from asynctask.clock import Clock
from asynctask.errors import Unavailable
from asynctask.ledger.reservations import MOST_LENT, Ready
from asynctask.logs import get_logger
from asynctask.runtime.execution import Execution

SPAN_S: Final = 0.35
"""Seconds of work lent for one place. A lent job begins within half a second or goes back, like every job fetched ahead: a
knob acts within a second, and an urgent job waits no longer for a thread."""

LOW: Final = 0.6
"""Share of a lane at which its thread borrows more: the rest lasts while the ledger answers."""

WORN: Final = 0.9
"""Share of a lane up to which it is refilled when another lane of its Task borrows: one query serves many lanes."""

MOST: Final = MOST_LENT
"""Largest number of jobs lent for one place."""

IN_VAIN_S: Final = 0.1
"""Seconds until a Task that had nothing to lend is queried again; otherwise, at its end every job would query it."""

_TASKS: Final = 1_000
"""Tasks whose time per job is remembered."""

Lend = Callable[[int, int, int], Sequence[tuple[Copy, Ready]]]
"""Gets a Task, the number of jobs wanted and for how many places; see :func:`asynctask.ledger.reservations.lend_jobs`."""


class Lane:
    """The jobs that follow in one place, in their order; ``since``: when the last one began, on the monotonic clock."""

    __slots__ = ("closed", "followers", "limited", "since")

    def __init__(self, limited: _Limited) -> None:
        self.limited = limited
        self.followers: deque[Execution] = deque()
        self.closed = False
        self.since = 0.0


class _Limited:
    """A Task with lanes here: its seconds from job to job, its lanes, and when to query it again (monotonic clock)."""

    __slots__ = ("ask_at", "lanes", "seconds", "task_id")

    def __init__(self, task_id: int, seconds: float) -> None:
        self.task_id = task_id
        self.seconds = seconds
        self.ask_at = 0.0
        self.lanes: set[Lane] = set()


class Lanes:
    """The lanes of one process.

    Arguments: ``lend`` requests jobs from the ledger; ``take`` makes executions of them, with the time of the request (on
    the monotonic clock); ``release`` gives one back; ``fresh_s``: seconds after the request within which they may begin;
    ``take_back`` returns every loan of this process except those with the given Event ids.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        lend: Lend,
        take: Callable[[Sequence[tuple[Copy, Ready]], float], Sequence[Execution]],
        release: Callable[[Execution], None],
        take_back: Callable[[set[int]], int],
        fresh_s: float,
    ) -> None:
        self._clock = clock
        self._lend = lend
        self._take = take
        self._release = release
        self._take_back = take_back
        self._fresh_s = fresh_s
        self._tasks: dict[int, _Limited] = {}
        self._lent: dict[int, None] = {}  # Event ids, until their outcomes are recorded
        self._doubt = False
        self._lock = threading.Lock()  # over the lanes
        self._asking = threading.Lock()  # one query at a time, because two would wait for the Task's row
        self._ready = 0
        self._log = get_logger("asynctask.lanes")

    @property
    def ready(self) -> int:
        """Number of lent jobs that have not begun."""
        return self._ready

    def return_unknown(self) -> None:
        """Returns loans that never arrived here. Raises :class:`Unavailable`."""
        if self._doubt:
            with self._asking:
                self._give_back_unknown()

    def _give_back_unknown(self) -> None:
        if self._doubt:
            self._take_back(set(self._lent))
            self._doubt = False

    def follow(self, execution: Execution, goes_on: Callable[[], bool], may_ask: Callable[[], bool]) -> Execution | None:
        """The job that begins now in the place of one that ended. None if none does; then the rest of the lane goes back.

        ``goes_on``: whether this process may begin anything, on this thread; ``may_ask``: whether it may be lent more.
        """
        ticket = execution.ticket
        if ticket is None or not ticket.awaited or ticket.not_before is not None or ticket.task_id is None:
            return None
        lane = execution.lane
        # From begin to begin: includes the work of the process between two jobs.
        since = execution.began if lane is None else lane.since
        limited = self._noted(ticket.task_id, self._clock.monotonic() - since)
        if goes_on():
            if lane is None:
                lane = self._open(execution, limited)
            each = min(MOST, int(SPAN_S / max(limited.seconds, SPAN_S / MOST)))
            if len(lane.followers) <= LOW * each and each > 0 and may_ask():
                self._refill(lane, each)
            if goes_on() and (follower := self._next(lane)) is not None:  # the query may have been slow
                lane.since = self._clock.monotonic()
                follower.lane = lane
                execution.follower = follower
                return follower
        self.close(execution)
        return None

    def close(self, execution: Execution) -> None:
        """Closes the lane: no job follows, and its rest goes back."""
        lane = execution.lane
        if lane is None:
            return
        with self._lock:
            lane.closed = True
            left = list(lane.followers)
            lane.followers.clear()
            self._ready -= len(left)
            lane.limited.lanes.discard(lane)
        for follower in left:
            self._release(follower)

    def done(self, execution: Execution) -> None:
        """The outcome of a lent job is recorded."""
        if execution.ticket is not None:
            self._lent.pop(execution.ticket.event_id, None)

    def _open(self, execution: Execution, limited: _Limited) -> Lane:
        lane = execution.lane = Lane(limited)
        with self._lock:
            limited.lanes.add(lane)
        return lane

    def _next(self, lane: Lane) -> Execution | None:
        """The first fresh job of the lane; stale ones go back."""
        now = self._clock.monotonic()
        while True:
            with self._lock:
                if not lane.followers:
                    return None
                follower = lane.followers.popleft()
                self._ready -= 1
            if now - follower.asked < self._fresh_s:
                return follower
            self._release(follower)

    def _refill(self, lane: Lane, each: int) -> None:
        """Borrows jobs for the low lanes of this Task; none if the ledger does not answer."""
        if not self._asking.acquire(blocking=not lane.followers):
            return  # another thread borrows, and this one still has jobs
        try:
            back = self._ask(lane.limited, lane, each)
        finally:
            self._asking.release()
        for follower in back:
            self._release(follower)

    def _ask(self, limited: _Limited, lane: Lane, each: int) -> list[Execution]:
        """Borrows and shares out; returns the jobs that cannot begin here."""
        with self._lock:
            if len(lane.followers) > LOW * each or self._clock.monotonic() < limited.ask_at:
                return []  # another thread has borrowed for this lane meanwhile
            wanted = {other: each - len(other.followers) for other in limited.lanes if len(other.followers) <= WORN * each}
        try:
            self._give_back_unknown()
            asked = self._clock.monotonic()
            followers = self._take(self._lend(limited.task_id, sum(wanted.values()), len(wanted)), asked)
        except Exception as error:
            self._doubt = True  # the ledger may have lent jobs although its answer was lost
            if not isinstance(error, Unavailable):
                self._log.exception("not_lent", task_id=limited.task_id)
            return []
        if not followers:
            limited.ask_at = self._clock.monotonic() + IN_VAIN_S
        for follower in followers:
            assert follower.ticket is not None
            follower.is_lent = True
            self._lent[follower.ticket.event_id] = None
        # Jobs without a worker here go back; a process that fetches them defers them.
        unknown = [follower for follower in followers if follower.worker is None]
        return unknown + self._share([follower for follower in followers if follower.worker is not None], wanted)

    def _share(self, followers: list[Execution], wanted: Mapping[Lane, int]) -> list[Execution]:
        """Gives each lane what it wants, or its share; returns the jobs of lanes that closed meanwhile."""
        back: list[Execution] = []
        left = len(wanted)
        with self._lock:
            for lane, most in sorted(wanted.items(), key=lambda item: -item[1]):
                count = min(most, -(-len(followers) // left))
                part, followers, left = followers[:count], followers[count:], left - 1
                if lane.closed:
                    back += part
                else:
                    lane.followers.extend(part)
                    self._ready += len(part)
        return back + followers

    def _noted(self, task_id: int, seconds: float) -> _Limited:
        with self._lock:
            limited = self._tasks.get(task_id)
            if limited is None:
                if len(self._tasks) >= _TASKS:
                    self._tasks = {key: each for key, each in self._tasks.items() if each.lanes}
                limited = self._tasks[task_id] = _Limited(task_id, seconds)
            limited.seconds = 0.7 * limited.seconds + 0.3 * seconds
            return limited
