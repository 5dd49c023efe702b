"""The thread that shows a process: when it beats, what it passes on, and that nothing ends it before its time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from asynctask.brokers.base import Copy, RunningJob
from asynctask.clock import SystemClock
from asynctask.errors import BrokerUnavailable
from asynctask.job import CurrentJob
from asynctask.middleware.tracker import NO_TICKET
from asynctask.runtime.execution import Execution
from asynctask.sidekiq.sharing import PresenceHeartbeat, resident_kib
from asynctask.testing import wait_for


class Seen:
    """A presence that notes what it is told."""

    def __init__(self) -> None:
        self.beats: list[list[RunningJob]] = []
        self.signals: list[str] = []
        self.left = 0
        self.on_beat: Callable[[], Any] = lambda: None

    def beat(self, running: list[RunningJob], *, quiet: bool, rss_kib: int) -> str | None:
        self.beats.append(running)
        self.on_beat()
        return self.signals.pop() if self.signals else None

    def leave(self) -> None:
        self.left += 1


@contextmanager
def showing(seen: Seen, every_s: float = 3600.0, **options: Any) -> Iterator[PresenceHeartbeat]:
    presence: Any = seen
    parts = {"running": list, "is_quiet": lambda: False, "on_signal": lambda name: None, **options}
    made = PresenceHeartbeat(presence, SystemClock(), every_s=every_s, **parts)
    made.start()
    try:
        yield made
    finally:
        made.stop()


def test_it_beats_at_once_and_when_something_changed() -> None:
    seen = Seen()
    with showing(seen) as made:
        wait_for(lambda: len(seen.beats) == 1, "the first beat")
        made.soon()
        wait_for(lambda: len(seen.beats) == 2, "the second beat")
    assert seen.left == 1


@pytest.mark.parametrize("error", [BrokerUnavailable("it is away"), ValueError("a bug")])
def test_a_beat_that_fails_is_followed_by_the_next(error: Exception) -> None:
    seen = Seen()

    def away() -> None:
        if len(seen.beats) < 3:
            raise error

    seen.on_beat = away
    with showing(seen, every_s=0.001):
        wait_for(lambda: len(seen.beats) > 3, "it goes on")


def test_what_a_signal_does_may_beat_itself() -> None:
    seen, told = Seen(), list[str]()
    seen.signals = ["TERM", "HUP", "TSTP"]

    def obey(name: str) -> None:
        told.append(name)
        made.soon()

    with showing(seen, every_s=0.001, on_signal=obey) as made:
        wait_for(lambda: len(told) == 2, "both are obeyed")
    assert told == ["TSTP", "TERM"]


def untracked(copy: Copy, payload: dict[str, Any]) -> Execution:
    return Execution(NO_TICKET, job=CurrentJob(copy.jid), copy=copy, payload=payload, worker=None)


def test_what_runs_is_shown_with_when_it_began() -> None:
    clock = SystemClock()
    payload = {"class": "Hard", "args": [1]}
    begun = untracked(Copy("a", 0, "low", '{"class":"Hard"}'), payload)
    begun.thread, begun.began = threading.current_thread(), clock.monotonic() - 100
    fetched = untracked(Copy("b", 0, "low", "{}"), payload)
    seen = Seen()
    with showing(seen, running=lambda: [begun, fetched]):
        wait_for(lambda: seen.beats, "the first beat")
    (shown,) = seen.beats[0]
    assert (shown.thread, shown.name, shown.jid, shown.queue, shown.payload) == (
        f"{threading.get_ident():x}",
        "Hard",
        "a",
        "low",
        '{"class":"Hard"}',
    )
    assert clock.now() - 160_000_000 < shown.began_at <= clock.now() - 100_000_000


def test_memory_is_told_in_kib() -> None:
    assert 1_000 < resident_kib() < 100_000_000
