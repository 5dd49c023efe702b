"""The pure functions of rounds: when the next one may begin, and what a forecast says of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynctask.core.transitions import MAX_INTERVAL_S, at_once, interval_of, next_round
from asynctask.ledger.progress import are_late, eta_by_rounds

NOW = 1_700_000_000_000_000
SECOND = 1_000_000


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, 0),
        (-1.0, 0),
        (0.1, 100_000),
        (MAX_INTERVAL_S + 1.0, MAX_INTERVAL_S * SECOND),
        (float("inf"), MAX_INTERVAL_S * SECOND),
        (float("nan"), MAX_INTERVAL_S * SECOND),
    ],
)
def test_whatever_stands_in_the_row_is_an_interval(seconds: float, expected: int) -> None:
    assert interval_of(seconds) == expected


def test_with_an_interval_a_task_without_a_limit_starts_one_at_a_time() -> None:
    assert (at_once(None, 0), at_once(None, 1), at_once(7, 0), at_once(7, 1)) == (None, 1, 7, 7)


def test_the_interval_counts_from_the_latest_known_start_of_a_job_of_the_round() -> None:
    began = NOW - 5 * SECOND
    assert next_round(None, None, 0, SECOND, NOW) == NOW, "there was none before"
    assert next_round(began, None, 0, 7 * SECOND, NOW) == NOW + 2 * SECOND
    assert next_round(began, began - SECOND, 0, 7 * SECOND, NOW) == NOW + 2 * SECOND
    assert next_round(began, NOW - SECOND, 0, 7 * SECOND, NOW) == NOW + 6 * SECOND, "one had waited for a worker"
    assert next_round(began, None, 0, SECOND, NOW) < NOW, "it is late"


def test_while_a_job_of_the_round_waits_for_a_worker_the_next_round_waits_too() -> None:
    for interval in (1, SECOND, 3_600 * SECOND):
        at = next_round(NOW - 9_000 * SECOND, None, 1, interval, NOW)
        assert NOW < at <= NOW + SECOND, "and it is asked again soon"


def test_a_time_of_a_clock_that_was_set_back_does_not_count() -> None:
    later = NOW + 3_600 * SECOND
    assert next_round(later, None, 0, SECOND, NOW) == NOW
    assert next_round(NOW, later, 0, SECOND, NOW) == NOW + SECOND
    assert next_round(NOW + 1_000, None, 0, SECOND, NOW) == NOW + SECOND + 1_000, "hosts differ by so much"


@st.composite
def lives(draw: st.DrawFn) -> tuple[int, int, list[list[tuple[int, int, int]]]]:
    """An interval, the most of a round, and for each round of each of its jobs: how long it waits for a worker after it was
    borrowed, until its start is known, and how late the borrow is (all in microseconds)."""
    times = st.sampled_from((0, 1, 700, 15_000, 90_000, 400_000, 3 * SECOND))
    job = st.tuples(times, times, times)
    most = draw(st.integers(1, 4))
    rounds = draw(st.lists(st.lists(job, min_size=1, max_size=most), min_size=2, max_size=12))
    return draw(st.sampled_from((4, 1_000, 50_000, 200_000, SECOND))), most, rounds


@given(lives())
@settings(max_examples=300, derandomize=True, database=None)
def test_in_no_interval_more_jobs_start_than_one_round_has(
    life: tuple[int, int, list[list[tuple[int, int, int]]]],
) -> None:
    """Taken out: the waiting for jobs that have not begun, or the start of a job that began late."""
    interval, most, rounds = life
    now, began = NOW, None
    starts: list[int] = []
    last: list[tuple[int, int]] = []  # of the jobs of the last round: when it starts, and when that is known
    for jobs in rounds:
        while True:
            known = [start for start, at in last if at <= now]
            opens = next_round(began, max(known, default=None), len(last) - len(known), interval, now)
            if opens <= now:
                break
            now = max(opens, now + 1) + jobs[0][2]
        began = now
        last = []
        for waits, unknown, _ in jobs:
            start = now + waits
            last.append((start, start + unknown))
        starts += sorted(start for start, _ in last)
        now += 1
    assert starts == sorted(starts)
    assert all(later - first >= interval for first, later in zip(starts, starts[most:], strict=False))


def test_rounds_that_nothing_holds_up_are_late_by_the_way_of_a_job_alone() -> None:
    interval, now, starts = 100_000, NOW, []
    for _ in range(50):
        starts.append(now + 2_000)  # from the borrow to the thread
        now = next_round(now, starts[-1], 0, interval, now + 50_000)
    assert starts[-1] - starts[0] == 49 * (interval + 2_000)


def test_a_forecast_is_made_of_rounds() -> None:
    assert eta_by_rounds(0, 3, 2.0, 1.0) == 0.0
    assert eta_by_rounds(3, 3, 2.0, 1.0) == 1.0
    assert eta_by_rounds(4, 3, 2.0, 1.0) == 3.0
    assert eta_by_rounds(10, 1, 2.0, 0.5) == 18.5
    assert not are_late(0, 2.9, 1, 1.0), "the first rounds may be under way"
    assert not are_late(4, 6.5, 1, 1.0)
    assert are_late(3, 6.5, 1, 1.0)
