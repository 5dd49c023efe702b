"""Who runs beside whom in one process, and for how long a suspect keeps it from the others."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import pytest
from support.clocks import SettableClock

from asynctask.brokers.base import Copy
from asynctask.core.transitions import Begin
from asynctask.job import CurrentJob
from asynctask.middleware.tracker import Ticket
from asynctask.runtime.execution import Execution
from asynctask.runtime.pool import ALONE_S, Isolation
from asynctask.testing import wait_for


def fresh(*, is_suspect: bool = False) -> Execution:
    ticket = Ticket.made(Begin.RUN, "j", event_id=1, deaths=int(is_suspect))
    return Execution(ticket, job=CurrentJob("j"), copy=Copy("j", 1, "default", "{}"), payload={}, worker=None)


def suspect() -> Execution:
    return fresh(is_suspect=True)


class CountedIsolation(Isolation):
    """Counts for each thread how often it looked and waits on."""

    def __init__(self, clock: SettableClock, limit: int) -> None:
        super().__init__(clock, limit)
        self.looks: Counter[threading.Thread] = Counter()

    def _wait(self, seconds: float) -> None:
        self.looks[threading.current_thread()] += 1
        super()._wait(seconds)


class Process:
    """Isolation with places for three, on a clock that stands still, and the threads that ask for one."""

    def __init__(self) -> None:
        self.clock = SettableClock()
        self.turns = CountedIsolation(self.clock, 3)
        self.quiet = threading.Event()
        self.came: dict[int, bool] = {}
        self.threads: dict[int, threading.Thread] = {}

    def asks(self, job: Execution) -> Execution:
        """In a thread of its own; returns when that runs, or waits."""
        thread = self.threads[id(job)] = threading.Thread(target=self._enter, args=(job,), daemon=True)
        thread.start()
        wait_for(lambda: id(job) in self.came or self.turns.looks[thread], "it runs or waits")
        return job

    def _enter(self, job: Execution) -> None:
        self.came[id(job)] = self.turns.enter(job, self.quiet.is_set)

    def runs(self, job: Execution) -> bool:
        return any(each is job for each in self.turns.running())

    def soon(self, job: Execution) -> None:
        wait_for(lambda: self.runs(job), "it runs")

    def still_waits(self, job: Execution) -> None:
        """Not even after it looked once more."""
        thread = self.threads[id(job)]
        looks = self.turns.looks[thread]
        wait_for(lambda: self.runs(job) or self.turns.looks[thread] > looks, "it has looked")
        assert not self.runs(job)


@pytest.fixture
def process() -> Iterator[Process]:
    made = Process()
    yield made
    made.quiet.set()
    for thread in made.threads.values():
        thread.join(120)
        assert not thread.is_alive()


def test_a_suspect_waits_for_those_beside_it_and_later_ones_wait_for_it(process: Process) -> None:
    before = process.asks(fresh())
    one = process.asks(suspect())
    assert process.turns.closed
    after = process.asks(fresh())
    process.still_waits(one)
    process.turns.leave(before)
    process.soon(one)
    process.still_waits(after)
    process.turns.leave(one)
    process.soon(after)
    assert not process.turns.closed


def test_a_suspect_that_runs_long_has_others_beside_it_after_a_while(process: Process) -> None:
    one = process.asks(suspect())
    other = process.asks(fresh())
    process.clock.seconds += ALONE_S - 0.1
    process.still_waits(other)
    process.clock.seconds += 0.2
    process.soon(other)
    assert process.runs(one)
    assert not process.turns.closed
    third, fourth = process.asks(fresh()), process.asks(fresh())
    process.soon(third)
    process.still_waits(fourth)  # there are places for three
    process.turns.leave(other)
    process.soon(fourth)


def test_a_suspect_starts_beside_those_that_do_not_end_in_the_next_free_place(process: Process) -> None:
    hung = [process.asks(fresh()) for _ in range(3)]
    one = process.asks(suspect())
    process.clock.seconds += ALONE_S + 0.1
    late = process.asks(fresh())
    process.still_waits(one)
    process.turns.leave(hung[0])
    process.soon(one)
    process.still_waits(late)
    process.turns.leave(hung[1])
    process.soon(late)


def test_one_suspect_runs_at_a_time_however_long_it_takes(process: Process) -> None:
    one = process.asks(suspect())
    other = process.asks(suspect())
    process.clock.seconds += 10 * ALONE_S
    process.still_waits(other)
    assert not process.turns.closed, "who waits for another suspect keeps nobody from anything"
    process.turns.leave(one)
    process.soon(other)
    assert process.turns.closed


def test_after_a_suspect_the_process_is_open_for_as_long_as_it_was_closed(process: Process) -> None:
    one = process.asks(suspect())
    other = process.asks(suspect())
    process.clock.seconds += 2.0
    process.turns.leave(one)
    process.still_waits(other)
    assert not process.turns.closed
    beside = process.asks(fresh())
    process.soon(beside)
    process.clock.seconds += 1.9
    process.still_waits(other)
    assert not process.turns.closed
    process.clock.seconds += 0.2
    wait_for(lambda: process.turns.closed, "it has its turn")
    process.still_waits(other)
    process.turns.leave(beside)
    process.soon(other)


def test_suspects_that_give_up_keep_no_place(process: Process) -> None:
    running = process.asks(fresh())
    waiting = [process.asks(suspect()), process.asks(suspect())]
    process.quiet.set()
    wait_for(lambda: [process.came.get(id(job)) for job in waiting] == [False, False], "both gave up")
    assert (process.turns.running(), process.turns.closed, process.turns._kept) == ([running], False, 0)


def test_whoever_waits_for_a_suspect_may_give_up(process: Process) -> None:
    one = process.asks(suspect())
    waiting = [process.asks(suspect()), process.asks(fresh())]
    process.quiet.set()
    wait_for(lambda: [process.came.get(id(job)) for job in waiting] == [False, False], "both gave up")
    process.turns.leave(one)
    assert (len(process.turns), process.turns.closed) == (0, False)


def test_a_second_in_which_any_number_of_jobs_run_is_one_busy_second() -> None:
    clock = SettableClock()
    turns, one, two = Isolation(clock, 3), fresh(), suspect()
    clock.seconds += 10
    assert turns.busy_s == 0
    turns.enter(one, lambda: False)
    clock.seconds += 1
    assert turns.busy_s == 1
    other = fresh()
    turns.enter(other, lambda: False)
    clock.seconds += 1
    turns.leave(one)
    clock.seconds += 1
    turns.leave(other)
    clock.seconds += 10
    turns.enter(two, lambda: False)
    clock.seconds += 1
    assert turns.busy_s == 4
    turns.leave(two)
    turns.leave(two)
    assert turns.busy_s == 4


def test_jobs_come_and_go_while_another_thread_holds_the_lock(process: Process) -> None:
    with process.turns._lock:
        one, other = process.asks(fresh()), process.asks(fresh())
        process.soon(one)
        process.soon(other)
        process.turns.leave(one)
        assert not process.runs(one)
    process.turns.leave(other)
    assert len(process.turns) == 0


def test_a_suspect_whose_turn_it_is_has_the_process_to_itself_whoever_comes_at_the_same_time() -> None:
    turns = Isolation(SettableClock(), 4)  # a clock that stands still: the process stays closed until the suspect has ended
    alone, beside, overlaps = set[int](), set[int](), list[str]()
    stop = threading.Event()

    def perform(job: Execution, here: set[int], there: set[int]) -> None:
        if not turns.enter(job, stop.is_set):
            return
        here.add(id(job))
        if there:
            overlaps.append("a suspect ran beside others")
        here.discard(id(job))
        turns.leave(job)

    def ordinary() -> None:
        while not stop.is_set():
            perform(fresh(), beside, alone)

    def suspects() -> None:
        for _ in range(200):
            perform(suspect(), alone, beside)
        stop.set()

    threads = [threading.Thread(target=ordinary, daemon=True) for _ in range(3)]
    threads.append(threading.Thread(target=suspects, daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert overlaps == []
    assert len(turns) == 0
