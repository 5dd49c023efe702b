"""How fast a process finishes jobs, as it tells those who decide how many to give it."""

from __future__ import annotations

import pytest
from support.clocks import SettableClock

from asynctask.dispatch.demand import LEAST_S, MEASURE_S, Pace, Performing, QueueRates, Rate, workers_wanted


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


def test_jobs_are_counted_by_the_second_in_which_there_are_any(clock: SettableClock) -> None:
    """Before, one that got five jobs every 20 ms and finished them in one said 250 a second, and was given as many."""
    rate = Rate(clock)
    for turn in range(1, 20):
        clock.seconds += 0.02
        rate.update(5 * turn, 0.001 * turn)
    assert rate.per_second > 4 * 250


def test_one_that_ran_dry_says_at_once_how_fast_it_was(clock: SettableClock) -> None:
    rate = Rate(clock)
    clock.seconds += MEASURE_S / 10
    assert rate.update(5, 0.001) == 0.0, "too soon, and more lies ready"
    assert rate.update(5, 0.001, dry=True) > 0.0
    assert rate.update(5, 0.001, dry=True) == rate.per_second, "nothing new"


@pytest.mark.parametrize("finished", [1, 5, 100])
def test_a_handful_of_quick_jobs_is_no_reason_to_take_thousands(clock: SettableClock, finished: int) -> None:
    rate = Rate(clock)
    clock.seconds += 0.001
    rate.update(finished, 0.000_01, dry=True)
    assert rate.per_second == finished / LEAST_S
    assert finished < rate.per_second * 0.25 <= 20 * finished


def test_long_jobs_that_end_together_are_not_fast(clock: SettableClock) -> None:
    """Before, ten that had taken ten seconds each gave a rate of 800 a second."""
    rate, queue = Rate(clock, 10), QueueRates(clock)
    for turn in range(1, 4):
        pushed = 20 if turn == 1 else 10  # the threads took ten, and ten wait
        queue.note("q", 0, pushed, pushed, 0, 10)
        for tenth in range(101):
            clock.seconds += 0.1
            rate.update(10 * (turn - 1), 0.1 * tenth + 10 * (turn - 1))
            assert queue.rate("q", 10) <= 20.0
            queue.note("q", 10, 0, 0, 0, 10)
        rate.update(10 * turn, 10.0 * turn, dry=True)
        assert rate.per_second <= 3.0 + 1e-6
    for tick in range(1, 4):
        clock.seconds += 0.05
        rate.update(30 + 50 * tick, 30.0 + 0.05 * tick)
    assert rate.per_second == pytest.approx(1_000.0), "but short ones are, from the first moment"


def test_what_is_known_fades_while_nothing_runs(clock: SettableClock) -> None:
    rate = Rate(clock)
    clock.seconds += 1.0
    assert rate.update(1_000, 1.0) == pytest.approx(1_000)
    for _ in range(20):
        clock.seconds += MEASURE_S
        rate.update(1_000, 1.0)
    assert rate.per_second < 1.0


# -- the pace, by which workers are wanted


@pytest.mark.parametrize(("threads", "seconds"), [(1, 60.0), (10, 60.0), (10, 0.01)])
def test_the_pace_is_steady_for_jobs_of_any_length(threads: int, seconds: float) -> None:
    pace = Pace()
    assert pace.update(0, seconds / 2) == 0.0, "no job has ended"
    for beat in range(1, 500):
        busy_s = 5.0 * beat
        found = pace.update(int(busy_s / seconds) * threads, busy_s)
        if busy_s > 2 * seconds:
            assert found == pytest.approx(threads / seconds, rel=0.5)
    assert found == pytest.approx(threads / seconds, rel=0.1)
    assert pace.update(int(busy_s / seconds) * threads, busy_s) == found, "nothing runs, and it is known"


def test_the_pace_follows_the_jobs_of_late() -> None:
    pace = Pace()
    for beat in range(1, 100):
        pace.update(500 * beat, 5.0 * beat)
    for beat in range(100, 220):
        found = pace.update(500 * 99 + (beat - 99) * 5, 5.0 * beat)
    assert found == pytest.approx(1.0, rel=0.1)


# -- how many worker processes are wanted


def busy(count: int, rate: float = 0.0, *, quiet: bool = False, running: int = 1) -> list[Performing]:
    return [Performing(running, 10, rate, quiet)] * count


@pytest.mark.parametrize(
    ("waiting", "processes", "wanted"),
    [
        (0, [], 0),
        (1, [], 1),
        (1_000_000, [], 1),
        (5, busy(3), 3),
        (0, busy(3), 3),
        (0, busy(3, running=0, rate=5.0), 0),
        (100, busy(1, 1.0), 2),
        (60, busy(1, 1.0), 1),
        (61, busy(1, 1.0), 2),
        (61, busy(4, 1.0), 4),
        (600, busy(1, 1.0) + busy(1), 10),
        (600, busy(1, 1.0) + busy(1, 3.0), 5),
        (1, busy(1, quiet=True), 1),
        (0, busy(2, quiet=True), 0),
        (1, busy(2, quiet=True, running=0), 1),
        (30, busy(1, 0.000_001), 4),
        (1, busy(1, 0.000_001), 1),
        (1, busy(1, 0.000_001, running=10), 2),
    ],
)
def test_as_many_workers_are_wanted_as_finish_what_waits_in_a_minute(
    waiting: int, processes: list[Performing], wanted: int
) -> None:
    assert workers_wanted(waiting, processes, 60.0) == wanted


def test_a_limited_task_wants_no_more_workers_than_it_has_places_for() -> None:
    one = busy(1, 1.0)
    assert workers_wanted(6_000, one, 60.0) == 100
    assert workers_wanted(6_000, one, 60.0, [(6_000, 20)]) == 2
    assert workers_wanted(6_600, one, 60.0, [(6_000, 20)]) == 12
    assert workers_wanted(60, one, 60.0, [(60, 1_000)]) == 1
