"""The gate of a Task: may it start something, how many jobs, and when next. Pure.

``tasks.ready`` and ``tasks.due_next`` are the answers kept for the index: :func:`hints` alone decides them, and
:mod:`asynctask.ledger.hints` alone writes them, under the lock of the Task's row. ``ready`` is the priority of a
Task with rows that wait beyond its pointer or in a free loan; ``due_next`` is when the first of its other rows is due, or
when its next round may begin. A process reads a Task if one of the two says so.
"""

from __future__ import annotations

from typing import NamedTuple

from asynctask.core.states import State


class Gate(NamedTuple):
    """What decides about a Task.

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
    """Where the index has the Task from now on (``now`` in microseconds).

    A Task that may not start keeps ``due_next``: one that has left its session joins the line again when its retry is due.
    """
    if gate.state not in (State.SPLITTING, State.RUNNING, State.PAUSED):
        return Hints(None, None)
    if gate.opens is not None and gate.opens > now:
        first = gate.opens if gate.waits else None if gate.due is None else max(gate.due, gate.opens)
        return Hints(None, first)
    return Hints(gate.priority if gate.waits and may_start(gate.state, gate.in_session) else None, gate.due)


def tolerated(wanted: int, left: int | None, lent: int) -> int:
    """How many jobs of a Task may be lent now, if ``left`` more of its items may fail (None: any number) and ``lent`` are
    lent: the failure of everything lent takes it over its limit by one item at most."""
    return wanted if left is None else max(0, min(wanted, left + 1 - lent))


def has_turn(event_id: int, place: int, first: int, before: int | None) -> bool:
    """Whether a job with a key may be lent: it is the ``first`` in the line of its key (ids of Events), and nothing can
    come before it any more. ``before``: a list is being split whose items get this ``place``; None if there is none."""
    return event_id == first and (before is None or place <= before)


def granted(want: int, running: int, limit: int, others: int, *, is_open: bool) -> int:
    """How many places of a Task a process has from now on.

    ``want``: as many as it can use; ``running``: its jobs of the Task that hold one, and keep it; ``limit``: the Task's;
    ``others``: places of other processes; ``is_open``: no process performs jobs of the Task that hold no place.
    """
    free = limit - others if is_open else 0
    return max(running, min(want, free))
