"""When the poller looks, at what, and that it stops at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from asynctask.errors import BrokerUnavailable
from asynctask.sidekiq.sharing import AT_ONCE, MAX_PAUSE_S, Poller
from asynctask.testing import wait_for


class Machine:
    """A clock that stands and chance that is told."""

    def __init__(self, noise: float = 0.0) -> None:
        self.noise = noise
        self.ticks = 0.0

    def now(self) -> int:
        return 1_000_000

    def monotonic(self) -> float:
        return self.ticks

    def boottime(self) -> int:
        return int(self.ticks * 1_000_000)

    def random(self) -> float:
        return self.noise


class Sets:
    """A broker of which only the sets are asked."""

    def __init__(self, **due: int) -> None:
        self.due = due
        self.calls: list[str] = []
        self.on_release: Callable[[], Any] = lambda: None

    def release_due(self, name: str, now: int, limit: int) -> int:
        self.calls.append(name)
        self.on_release()
        moved = min(limit, self.due.get(name, 0))
        self.due[name] = self.due.get(name, 0) - moved
        return moved


def poller(sets: Sets, machine: Machine, **options: Any) -> Poller:
    broker: Any = sets
    ids: Any = machine
    return Poller(broker, machine, ids, **options)


@pytest.mark.parametrize(
    ("processes", "average_s", "noise", "seconds"),
    [
        (1, 0.0, 0.0, 2.5),
        (1, 0.0, 0.5, 5.0),
        (4, 0.0, 0.0, 10.0),
        (4, 0.0, 0.5, 20.0),
        (0, 0.0, 0.5, 5.0),
        (9, 0.0, 0.5, 45.0),
        (10, 0.0, 0.0, 0.0),
        (10, 0.0, 0.5, 50.0),
        (10, 0.0, 0.75, 75.0),
        (1, 60.0, 0.5, 60.0),
        (100, 60.0, 0.25, 30.0),
        (10**9, 0.0, 0.5, MAX_PAUSE_S),
    ],
)
def test_the_pause_follows_the_number_of_processes(processes: int, average_s: float, noise: float, seconds: float) -> None:
    made = poller(Sets(), Machine(noise), processes=lambda: processes, average_s=average_s)
    assert made.pause() == pytest.approx(seconds)


@pytest.mark.parametrize(("average_s", "noise", "seconds"), [(0.0, 0.0, 10.0), (0.0, 0.5, 12.5), (3.0, 0.5, 2.5)])
def test_the_first_look_waits_until_every_process_of_a_start_is_counted(
    average_s: float, noise: float, seconds: float
) -> None:
    assert poller(Sets(), Machine(noise), average_s=average_s).first() == pytest.approx(seconds)


def test_a_look_empties_the_retries_and_then_the_schedule() -> None:
    sets = Sets(retry=AT_ONCE + 1, schedule=1)
    assert poller(sets, Machine()).look() == AT_ONCE + 2
    assert sets.calls == ["retry", "retry", "retry", "schedule", "schedule"]


def test_it_stops_in_the_middle_of_many() -> None:
    sets = Sets(retry=10**9, schedule=10**9)
    made = poller(sets, Machine())
    sets.on_release = lambda: made.quiet() if len(sets.calls) == 3 else None
    made.look()
    assert sets.calls == ["retry"] * 3


def test_it_stops_while_it_waits() -> None:
    sets = Sets()
    made = poller(sets, Machine(1.0))
    made.start()
    thread = made._thread
    made.stop()
    assert thread is not None
    assert not thread.is_alive()
    assert sets.calls == []


def test_an_outage_ends_nothing() -> None:
    sets, again = Sets(), threading.Event()

    def away() -> None:
        if len(sets.calls) < 3:
            raise BrokerUnavailable("it is away")
        again.set()

    sets.on_release = away
    made = poller(sets, Machine(), average_s=0.001)
    made.start()
    wait_for(again.is_set, "it looks again")
    made.stop()


def test_a_bug_ends_nothing() -> None:
    sets, again = Sets(), threading.Event()

    def broken() -> None:
        if len(sets.calls) < 3:
            raise ValueError("a bug")
        again.set()

    sets.on_release = broken
    made = poller(sets, Machine(), average_s=0.001)
    made.start()
    wait_for(again.is_set, "it looks again")
    made.stop()


def test_the_dead_are_pruned_before_the_first_look_and_once_a_minute() -> None:
    sets, machine = Sets(), Machine()
    pruned: list[int] = []
    made = poller(sets, machine, average_s=0.001, prune=lambda: pruned.append(len(sets.calls)))
    made.start()
    wait_for(lambda: len(sets.calls) >= 8, "it looks four times")
    assert pruned == [0]
    machine.ticks = 60.0
    wait_for(lambda: len(pruned) == 2, "it prunes again")
    made.stop()
