"""The gates of a Task: whether it may start jobs, how many, and when next. Pure.

``tasks.ready`` and ``tasks.due_next`` are the hints, which an index covers: only :func:`hints` decides them, and only
:mod:`asynctask.ledger.hints` writes them, under the lock of the Task's row. ``ready`` is the priority of a Task with rows
that wait beyond its pointer or in a free loan. ``due_next`` is when the first of its other rows is due, or when its next
round may begin. A process reads a Task only if ``ready`` is set or ``due_next`` has passed.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from asynctask.core.states import State
from asynctask.core.transitions import CLOCKS_DIFFER


class Gate(NamedTuple):
    """The values that decide the hints of a Task.

    ``in_session``: it needs no session, or holds it; ``waits``: rows wait beyond its pointer or in a free loan; ``due``:
    when the first row with a ``due_at`` is due; ``opens``: when its next round may begin, None for a Task without an
    interval (both in microseconds).
    """

    state: str
    priority: int
    in_session: bool
    waits: bool
    due: int | None = None
    opens: int | None = None


class Hints(NamedTuple):
    """``tasks.ready`` and ``tasks.due_next``."""

    ready: int | None
    due_next: int | None


def may_start(state: str, in_session: bool = True) -> bool:
    """Whether a Task in this state may start jobs."""
    return in_session and state in (State.SPLITTING, State.RUNNING)


def hints(gate: Gate, now: int) -> Hints:
    """The hints of a Task at ``now`` (microseconds).

    A Task that may not start keeps ``due_next``: if it has left its session, it waits for that again when its retry is due.
    """
    if gate.state not in (State.SPLITTING, State.RUNNING, State.PAUSED):
        return Hints(None, None)
    if gate.opens is not None and gate.opens > now:
        first = gate.opens if gate.waits else None if gate.due is None else max(gate.due, gate.opens)
        return Hints(None, first)
    return Hints(gate.priority if gate.waits and may_start(gate.state, gate.in_session) else None, gate.due)


def tolerated(wanted: int, left: int | None, lent: int) -> int:
    """How many of ``wanted`` jobs of a Task may be lent now. ``left``: how many more of its items may fail, None for any
    number; ``lent``: its jobs that are lent already. Even if all of these fail, the Task exceeds its limit by one item."""
    return wanted if left is None else max(0, min(wanted, left + 1 - lent))


def has_turn(event_id: int, position: int, first: int, before: int | None) -> bool:
    """Whether a job with a key may be lent: it is the ``first`` in the line of its key (ids of Events), and no job can be
    inserted before it. ``before``: the position of items of a list that is being split; None if there is none."""
    return event_id == first and (before is None or position <= before)


def granted(want: int, running: int, limit: int, others: int, *, is_open: bool) -> int:
    """How many places of a Task a process gets.

    ``want``: how many it can use; ``running``: its jobs of the Task that hold a place, and keep it; ``limit``: that of the
    Task; ``others``: places of other processes; ``is_open``: every process with jobs of the Task has a row of places.
    """
    free = limit - others if is_open else 0
    return max(running, min(want, free))


# -- the rate limit of a worker: ``free_at`` is when the starts that were taken so far are over, one each ``every``
# microseconds (GCRA's theoretical arrival time)

RATE_AHEAD: Final = 250_000
"""Microseconds by which a start may be before its time, so that a limit that is used late loses none. In any time T, a
limit permits at most (T + RATE_AHEAD) / every + 1 starts."""


def _taken_until(free_at: int, every: int, now: int) -> int:
    # Further ahead it was set by a clock that was set back since, or at a lower rate.
    return now if free_at > now + RATE_AHEAD + every + CLOCKS_DIFFER else max(free_at, now)


def rate_opens(free_at: int, every: int, now: int) -> int:
    """When a limit permits the next start (microseconds); if it does so now, now."""
    return max(now, _taken_until(free_at, every, now) - RATE_AHEAD)


def permitted(free_at: int, every: int, now: int) -> int:
    """How many starts a limit permits at ``now``."""
    return max(0, (now + RATE_AHEAD - _taken_until(free_at, every, now)) // every + 1)


def taken(free_at: int, every: int, now: int, count: int) -> int:
    """``free_at`` after ``count`` starts."""
    return _taken_until(free_at, every, now) + count * every
