"""Raising in running threads: at whatever step it comes, no lock stays owned and nothing hits what runs afterwards."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asynctask.clock import SystemClock
from asynctask.errors import JobInterrupted, JobTimeout
from asynctask.runtime import timeouts
from asynctask.runtime.timeouts import Watch, Watchdog
from asynctask.testing import wait_for


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    made = Watchdog(SystemClock())
    yield made
    made.stop()


def in_thread(body: Callable[[], Any]) -> list[Any]:
    """What a thread of its own returned or raised; fails if it does not end."""
    came: list[Any] = []

    def run() -> None:
        try:
            came.append(body())
        except BaseException as error:
            came.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive(), "the thread is locked up"
    return came


class Struck(Watchdog):
    """Has an exception raised in a thread that leaves, from another thread, ``before`` or ``after`` it took itself out."""

    def __init__(self, where: str, kind: type[BaseException]) -> None:
        super().__init__(SystemClock())
        self.where, self.kind, self.strikes = where, kind, 0

    def _leave(self, watch: Watch) -> None:
        if self.where == "before":
            self.strike(watch)
        super()._leave(watch)
        if self.where == "after":
            self.strike(watch)

    def strike(self, watch: Watch) -> None:
        done = _thread.allocate_lock()
        done.acquire()
        _thread.start_new_thread(self.fire, (watch, done))
        done.acquire()  # what was raised is delivered after this call

    def fire(self, watch: Watch, done: _thread.LockType) -> None:
        with self._condition:
            self.strikes += self._fire(watch, self.kind)
        done.release()


@pytest.mark.parametrize("kind", [JobTimeout, JobInterrupted])
@pytest.mark.parametrize("where", ["before", "after"])
def test_an_exception_while_a_thread_leaves_owns_no_lock_and_hits_nothing_later(
    where: str, kind: type[BaseException]
) -> None:
    watchdog = Struck(where, kind)

    def job() -> tuple[Any, Any]:
        first = watchdog.run(Watch(threading.get_ident()), lambda: "first")
        return first, sum(range(100_000))

    assert in_thread(job) == [("first", 4_999_950_000)]
    assert watchdog.strikes == (1 if where == "before" else 0), "once it left, nothing is raised in it"
    assert in_thread(lambda: watchdog.interrupt(Watch(0))) == [False], "the lock is owned"
    assert not watchdog._inside


def test_a_thread_that_leaves_waits_for_whoever_is_about_to_raise_and_takes_it_back(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_back: list[int] = []
    monkeypatch.setattr(
        timeouts, "_raise_in", lambda thread_id, kind: taken_back.append(thread_id) if kind is None else None
    )
    watch, came = Watch(0), []

    def job() -> None:
        watch.thread_id = threading.get_ident()
        came.append(watchdog.run(watch, begin_to_raise))

    def begin_to_raise() -> str:
        watch.firing = True
        return "first"

    thread = threading.Thread(target=job, daemon=True)
    thread.start()
    wait_for(lambda: watch.firing and not watchdog._inside, "it took itself out")
    thread.join(0.05)
    waited = thread.is_alive()
    watch.raised = (JobTimeout,)
    watch.firing = False
    thread.join(120)
    assert (waited, came, taken_back) == (True, ["first"], [watch.thread_id])


def test_threads_that_end_at_their_very_timeout_go_on_and_none_counts_as_hung(watchdog: Watchdog) -> None:
    hung: list[Watch] = []

    def rounds() -> int:
        done = 0
        for _ in range(60):
            watch = Watch(threading.get_ident(), 0.0005)
            watch.on_hung = lambda watch=watch: hung.append(watch)
            try:
                # It goes on until it sees the exception on its way, which then comes while it leaves or just before.
                watchdog.run(watch, lambda watch=watch: [None for _ in iter(lambda: bool(watch.raised), True)])
            except JobTimeout:
                pass
            done += 1
        return done

    came: list[int] = []
    threads = [threading.Thread(target=lambda: came.append(rounds()), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert came == [60, 60, 60]
    assert not watchdog._inside
    assert hung == []


def test_a_thread_outside_a_function_is_not_raised_in(watchdog: Watchdog) -> None:
    watch = Watch(threading.get_ident())
    watchdog.run(watch, lambda: None)
    assert not watchdog.interrupt(watch)
    assert not watchdog.interrupt(Watch(threading.get_ident()))


def test_one_inside_its_function_is_interrupted_and_one_that_is_to_begin_too(watchdog: Watchdog) -> None:
    inside = threading.Event()
    watches: list[Watch] = []

    def forever() -> None:
        inside.set()
        wait_for(lambda: False, "never", 60, every=0.005)

    def job() -> None:
        watches.append(Watch(threading.get_ident()))
        watchdog.run(watches[0], forever)

    def interrupts() -> bool:
        assert inside.wait(120)
        return watchdog.interrupt(watches[0])

    came: list[Any] = []
    thread = threading.Thread(target=lambda: came.extend(in_thread(job)))
    thread.start()
    assert interrupts()
    thread.join(120)
    assert isinstance(came[0], JobInterrupted)
    watchdog.end()
    assert isinstance(in_thread(lambda: watchdog.run(Watch(threading.get_ident()), lambda: "begun"))[0], JobInterrupted)


def test_a_watchdog_goes_on_after_what_is_done_about_a_hung_thread_failed(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "GRACE_S", 0.02)
    gate, told = threading.Event(), threading.Event()

    def deaf() -> str:
        while not gate.is_set():
            try:
                gate.wait(120)
            except JobTimeout:
                continue
        return "came back"

    def broken() -> None:
        told.set()
        raise OSError("the broker is down")

    lost = Watch(0, 0.01, broken)

    def job() -> Any:
        lost.thread_id = threading.get_ident()
        return watchdog.run(lost, deaf)

    thread = threading.Thread(target=job, daemon=True)
    thread.start()
    assert told.wait(120)
    assert lost.lost
    again = in_thread(
        lambda: watchdog.run(Watch(threading.get_ident(), 0.01), lambda: wait_for(lambda: False, "never", 30))
    )
    assert isinstance(again[0], JobTimeout)
    gate.set()
    thread.join(120)
    assert not thread.is_alive()


def until_told() -> Any:
    return wait_for(lambda: False, "never")


def test_a_timeout_beyond_what_a_thread_can_wait_for_leaves_the_others_theirs(watchdog: Watchdog) -> None:
    """``Condition.wait`` raises OverflowError for more than ``threading.TIMEOUT_MAX`` seconds."""
    over, came = threading.Event(), []
    patient = threading.Thread(
        target=lambda: came.append(watchdog.run(Watch(threading.get_ident(), 1e300), lambda: over.wait(120))), daemon=True
    )
    patient.start()
    wait_for(lambda: watchdog._wakes_at is not None or watchdog._inside, "it is watched")
    (raised,) = in_thread(lambda: watchdog.run(Watch(threading.get_ident(), 0.01), until_told))
    assert isinstance(raised, JobTimeout)
    over.set()
    patient.join(120)
    assert came == [True]


def test_a_fault_of_the_watchdog_does_not_end_it(watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "_AFTER_FAULT_S", 0.01)
    look, faults = watchdog._fire_due, iter([OSError("a fault"), MemoryError()])

    def sometimes() -> list[Watch]:
        if fault := next(faults, None):
            raise fault
        return look()

    monkeypatch.setattr(watchdog, "_fire_due", sometimes)
    (raised,) = in_thread(lambda: watchdog.run(Watch(threading.get_ident(), 0.01), until_told))
    assert isinstance(raised, JobTimeout)
