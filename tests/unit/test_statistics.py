"""What a process counts until it is sent: no thread and no failed sending loses any of it, and it is bounded."""

from __future__ import annotations

import sys
import threading

import pytest

from asynctask.sidekiq.presence import BOUNDS, MAX_FIGURES, Counters, Metrics, MinuteFigures, Statistics, commands


class Watch:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.second = 1_763_700_000  # 2025-11-21 04:40:00 UTC
        self.ticks = 0.0

    def now(self) -> int:
        return self.second * 1_000_000

    def monotonic(self) -> float:
        return self.ticks

    def boottime(self) -> int:
        return int(self.ticks * 1_000_000)


@pytest.fixture
def switching() -> None:
    """Threads change places as often as they can."""
    sys.setswitchinterval(1e-6)


def test_jobs_that_end_while_it_adds_up_are_counted_once(switching: None) -> None:
    counters = Counters()
    statistics = Statistics(Watch(), counters)
    rest = threading.Event()

    def work() -> None:
        for n in range(2_000):
            statistics.ended("Hard", 0.001, n % 2 == 0)

    def add_up() -> None:
        while not rest.is_set():
            statistics.fold(at_once=True)

    workers = [threading.Thread(target=work, name="work") for _ in range(4)]
    adders = [threading.Thread(target=add_up, name="add") for _ in range(2)]
    for thread in workers + adders:
        thread.start()
    for thread in workers:
        thread.join()
    rest.set()
    for thread in adders:
        thread.join()
    sys.setswitchinterval(0.005)
    statistics.fold(at_once=True)
    taken = counters.take()
    assert (taken["stat:processed", 0], taken["stat:failed", 0]) == (8_000, 4_000)
    (figures,) = statistics.take().values()
    assert (figures.runs, figures.failures, figures.ms) == (8_000, 4_000, 4_000)


def test_it_adds_up_once_a_second_unless_it_must() -> None:
    watch, counters = Watch(), Counters()
    statistics = Statistics(watch, counters)
    for ticks, at_once, counted in ((0.0, False, 1), (0.9, False, 0), (1.0, False, 2), (1.1, True, 1)):
        watch.ticks = ticks
        statistics.ended("Hard", 0.001, False)
        statistics.fold(at_once=at_once)
        assert counters.take().get(("stat:processed", 0), 0) == counted


def test_a_new_day_is_counted_by_itself() -> None:
    watch, counters = Watch(), Counters()
    statistics = Statistics(watch, counters)
    for _ in range(2):
        statistics.ended("Hard", 0.001, False)
        statistics.fold(at_once=True)
        watch.second += 24 * 3600
    days = {name: by for (name, keep_s), by in counters.take().items() if keep_s}
    assert days == {"stat:processed:2025-11-21": 1, "stat:processed:2025-11-22": 1}


def test_what_could_not_be_sent_joins_what_came_since() -> None:
    metrics = Metrics()
    metrics.add(1, [("Hard", 0.01, False)])
    taken = metrics.take()
    metrics.add(1, [("Hard", 0.01, True)])
    metrics.add(2, [("Hard", 0.04, False)])
    metrics.put_back(taken)
    assert metrics.take() == {(1, "Hard"): MinuteFigures(2, 1, 10, {0: 1}), (2, "Hard"): MinuteFigures(1, 0, 40, {2: 1})}


def test_figures_that_are_never_sent_are_bounded_and_the_newest_are_kept() -> None:
    metrics = Metrics()
    for minute in range(MAX_FIGURES + 10):
        metrics.add(minute, [("Hard", 0.01, False)])
    kept = metrics.take()
    assert (len(kept), min(kept)[0]) == (MAX_FIGURES, 10)
    metrics.add(10**6, [("Hard", 0.01, False)])
    metrics.put_back(kept)
    kept = metrics.take()
    assert (len(kept), min(kept)[0], max(kept)[0]) == (MAX_FIGURES, 11, 10**6)


@pytest.mark.parametrize("name", ["", "a|b", "a\nb", "x" * 256])
def test_a_name_that_the_page_cannot_read_is_left_out(name: str) -> None:
    metrics = Metrics()
    metrics.add(1, [(name, 0.01, False)])
    assert metrics.take() == {}


def test_each_bound_begins_the_next_counter() -> None:
    for n, bound in enumerate(BOUNDS):
        figures = MinuteFigures()
        figures.add((bound - 1) / 1000, False)
        figures.add(bound / 1000, False)
        assert figures.histogram == {n: 1, n + 1: 1}
    assert len(BOUNDS) == 25


@pytest.mark.parametrize(
    ("minute", "keys"),
    [
        # 2025-01-02 03:04 and 2025-11-21 14:05
        (
            28_929_784,
            ["j|20250102|3:4", "j|250102|3:04", "j|250102|3:0", "Hard-02-03:4", "h|Hard-2-3:4"],
        ),
        (
            29_395_565,
            ["j|20251121|14:5", "j|251121|14:05", "j|251121|14:0", "Hard-21-14:5", "h|Hard-21-14:5"],
        ),
    ],
)
def test_keys_are_padded_as_each_version_pads_them(minute: int, keys: list[str]) -> None:
    figures = MinuteFigures()
    figures.add(0.01, False)
    written = dict.fromkeys(str(command[1]) for command in commands(minute, {"Hard": figures}))
    assert list(written) == keys
