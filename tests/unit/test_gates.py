"""The gates of a Task: when the index shows it, how many jobs may start, how many places a process gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynctask.core.readiness import Gate, Hints, granted, hints, may_start, tolerated
from asynctask.core.states import State

NOW = 1_000
TIMES = st.one_of(st.none(), st.integers(0, 2 * NOW))
GATES = st.builds(Gate, st.sampled_from(State), st.integers(1, 400), st.booleans(), st.booleans(), TIMES, TIMES)
COUNT = st.integers(0, 50)


def first_start(gate: Gate) -> int | None:
    """When the first job of a Task could start, None if none could: said without the gate's own words."""
    if gate.state not in ("splitting", "running") or not gate.in_session:
        return None
    times = [NOW] if gate.waits else []
    times += [] if gate.due is None else [max(gate.due, NOW)]
    return max(min(times), NOW if gate.opens is None else gate.opens) if times else None


@given(GATES)
def test_the_index_shows_a_task_in_time(gate: Gate) -> None:
    ready, due_next = hints(gate, NOW)
    first = first_start(gate)
    if first is not None:
        assert (ready is not None and first == NOW) or (due_next is not None and max(due_next, NOW) == first)
    else:
        assert ready is None, "nobody looks in vain"


@given(GATES)
def test_a_task_that_is_ready_is_found_by_its_priority(gate: Gate) -> None:
    ready = hints(gate, NOW).ready
    assert ready in (None, gate.priority)
    assert (ready is not None) <= (gate.waits and may_start(gate.state, gate.in_session))


@given(GATES.filter(lambda gate: gate.state in (State.FINALIZING, State.FINISHED, State.CANCELLED, State.REJECTED)))
def test_a_task_that_is_over_is_not_in_the_index(gate: Gate) -> None:
    assert hints(gate, NOW) == (None, None)


def test_a_task_outside_its_session_keeps_the_time_of_its_retry() -> None:
    assert hints(Gate("running", 240, False, True, NOW + 5), NOW) == Hints(None, NOW + 5)
    assert hints(Gate("paused", 240, True, True, NOW + 5), NOW) == Hints(None, NOW + 5)


@pytest.mark.parametrize("state", State)
def test_jobs_start_while_a_list_is_split_and_while_it_runs(state: State) -> None:
    assert may_start(state) == (state in ("splitting", "running"))
    assert not may_start(state, False)


@given(COUNT, st.one_of(st.none(), st.integers(-5, 50)), COUNT)
def test_what_is_lent_takes_a_task_over_its_tolerance_by_one_item_at_most(wanted: int, left: int | None, lent: int) -> None:
    count = tolerated(wanted, left, lent)
    assert 0 <= count <= wanted
    if left is None:
        assert count == wanted
    else:
        assert count == 0 or lent + count <= left + 1
        assert count == wanted or lent + count >= left + 1, "the item that goes over it is lent, too"


@given(st.data(), st.integers(1, 12))
def test_places_stay_within_a_limit_that_is_turned(data: st.DataObject, limit: int) -> None:
    """Some processes take places and give them up, jobs begin and end within them, the limit is turned."""
    rows, running = [0] * 3, [0] * 3
    for _ in range(data.draw(st.integers(1, 20))):
        me = data.draw(st.integers(0, 2))
        kind = data.draw(st.sampled_from(("lease", "lease", "begin", "begin", "end", "turn")))
        before = sum(running)
        if kind == "lease":
            want = data.draw(COUNT)
            rows[me] = granted(want, running[me], limit, sum(rows) - rows[me], is_open=True)
            assert running[me] <= rows[me] <= max(want, running[me])
        elif kind == "begin" and running[me] < rows[me]:
            running[me] += 1
        elif kind == "end" and running[me]:
            running[me] -= 1
        elif kind == "turn" and data.draw(st.booleans()):
            limit = data.draw(st.integers(1, 12))
            rows = [granted(n, r, limit, sum(running), is_open=True) for n, r in zip(rows, running, strict=True)]
        if sum(running) > before:
            assert sum(running) <= limit


@given(COUNT, COUNT, COUNT, COUNT)
def test_who_runs_jobs_keeps_their_places_and_nobody_gets_more_beside_one_without_places(
    want: int, running: int, limit: int, others: int
) -> None:
    assert granted(want, running, limit, others, is_open=False) == running
    assert granted(want, running, limit, others, is_open=True) >= running
    assert granted(limit, 0, limit, 0, is_open=True) == limit, "alone, all of them"
