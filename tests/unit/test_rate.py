"""How fast jobs end: in a foreign queue, by which jobs are pushed there, and of a process, by which workers are wanted."""

from __future__ import annotations

import pytest
from support.clocks import SettableClock

from asynctask.dispatch.demand import SAMPLE_S, Rates, Threads, wanted
from asynctask.operations import Performing, workers_wanted
from asynctask.runtime.process import LEAST_S, Pace


def lies_in(threads: int, seconds: float, *, every_s: float = 0.2, rounds: int = 60) -> list[tuple[int, float]]:
    """A queue whose threads take so long for a job: what lies there after each round, and the share of time at work."""
    clock, lies, found = SettableClock(), 0, list[tuple[int, float]]()
    rates, ends, now = Rates(clock), [0.0] * threads, 0.0
    for _ in range(rounds):
        has = Threads()
        # Of a job the ledger knows a tenth of a second after it has begun.
        has.add(threads, sum(end - seconds < now - 0.1 and end > now for end in ends))
        lies += wanted({"q": has}, {"q": lies}, rates, 0.25)["q"]
        rates.note("q", lies, has)
        until, idle_s = now + every_s, 0.0
        while min(ends) < until:
            thread = ends.index(min(ends))
            begins = max(ends[thread], now)
            idle_s += (begins if lies else until) - ends[thread]
            ends[thread] = begins + seconds if lies else until
            lies -= lies > 0
        now, clock.seconds = until, clock.seconds + every_s
        found.append((lies, 1 - idle_s / threads / every_s))
    return found


@pytest.mark.parametrize("seconds", [0.001, 0.01, 0.1])
def test_threads_always_have_short_jobs_after_a_moment(seconds: float) -> None:
    at_work = [share for _, share in lies_in(8, seconds)[8:]]
    assert sum(at_work) > 0.97 * len(at_work)


@pytest.mark.parametrize(("seconds", "most"), [(1.0, 16), (2.0, 16), (10.0, 8), (60.0, 8)])
def test_no_more_long_jobs_wait_than_the_threads_take_next(seconds: float, most: int) -> None:
    assert max(lies for lies, _ in lies_in(8, seconds, rounds=200)) <= most


def test_a_rate_is_known_for_a_second() -> None:
    clock = SettableClock()
    rates = Rates(clock)
    rates.note("q", 100, Threads())
    clock.seconds += SAMPLE_S
    assert rates.measure("q", 50) == pytest.approx(50)
    rates.note("q", 50, Threads())
    clock.seconds += 1.1
    assert rates.measure("q", 0) == 0.0


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


@pytest.mark.parametrize("finished", [1, 5, 40])
def test_a_handful_of_quick_jobs_is_no_reason_to_take_thousands(finished: int) -> None:
    assert Pace().update(finished, 0.000_01) == finished / LEAST_S


def test_long_jobs_that_end_together_are_not_fast() -> None:
    pace = Pace()
    for turn in range(1, 4):
        for tenth in range(101):
            pace.update(10 * (turn - 1), 0.1 * tenth + 10 * (turn - 1))
        assert pace.update(10 * turn, 10.0 * turn) <= 3.0 + 1e-6
    for tick in range(1, 5):
        found = pace.update(30 + 50 * tick, 30.0 + 0.05 * tick)
    assert found == pytest.approx(1_000.0, rel=0.1), "but short ones are, after a moment"


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
