"""Threads that end jobs at the same time: each job is settled once, and no thread waits for another's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from support.borrowing import attempts, borrow
from support.clocks import SettableClock
from support.costs import statements
from support.world import World

from asynctask import AsyncTask
from asynctask.arrivals import ArrivalTracker
from asynctask.core.transitions import Begin
from asynctask.integrations.base import EARLY_S, EngineProcess
from asynctask.ledger.recorder import Kind, Outcome, Recorder
from asynctask.ledger.standalone import Arrival
from asynctask.middleware.tracker import Attempt, Tracker
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database("nothing of it is the database's")

WAIT_S = 120.0


class HeldRecorder(Recorder):
    """Keeps what it is handed, in order. ``held`` keeps whoever hands over an outcome of that kind, until ``go_on``."""

    def __init__(self, app: AsyncTask, held: Kind | None = None) -> None:
        super().__init__(app.ledger)
        self.taken: list[Outcome] = []
        self.came = threading.Event()
        self.go_on = threading.Event()
        self._held = held

    def put(self, outcomes: Sequence[Outcome]) -> None:
        if self._held in [each.kind for each in outcomes] and not self.came.is_set():
            self.came.set()
            self.go_on.wait(WAIT_S)
        self.taken += outcomes


@pytest.fixture
def app(world: World) -> AsyncTask:
    return world.app()


def started(app: AsyncTask, tracker: Tracker, count: int) -> list[Attempt]:
    task = app.submit("note", [{"n": n} for n in range(count)])
    begun = attempts(tracker, borrow(app.ledger, task.id, count))
    for attempt in begun:
        tracker.start(attempt)
    return begun


def in_thread(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_a_job_whose_thread_lost_the_interpreter_while_it_was_settled_keeps_no_other(app: AsyncTask) -> None:
    recorder = HeldRecorder(app, Kind.FAILED)
    tracker = ArrivalTracker(app.ledger, recorder)
    slow, other = started(app, tracker, 2)
    slow.fail(ValueError("no"))
    thread = in_thread(lambda: tracker.settle(slow))
    assert recorder.came.wait(WAIT_S)
    ended = in_thread(lambda: tracker.settle(other))
    ended.join(WAIT_S)
    assert not ended.is_alive()
    assert [each.event_id for each in recorder.taken] == [other.ticket.event_id]
    recorder.go_on.set()
    thread.join(WAIT_S)
    assert [each.event_id for each in recorder.taken] == [other.ticket.event_id, slow.ticket.event_id]


def test_what_ends_while_its_working_is_handed_over_stands_behind_it(app: AsyncTask) -> None:
    recorder = HeldRecorder(app, Kind.WORKING)
    tracker = ArrivalTracker(app.ledger, recorder)
    (attempt,) = started(app, tracker, 1)
    noting = in_thread(lambda: tracker.note_long(-1.0))
    assert recorder.came.wait(WAIT_S)
    ending = in_thread(lambda: tracker.settle(attempt))
    wait_for(lambda: attempt.lock.locked() and ending.is_alive(), "it waits")
    assert recorder.taken == []
    recorder.go_on.set()
    noting.join(WAIT_S)
    ending.join(WAIT_S)
    assert [each.kind for each in recorder.taken] == [Kind.WORKING, Kind.FINISH]
    assert [note.status for each in recorder.taken for note in each.notes] == ["working", "finish"]


def test_a_job_that_many_threads_settle_has_one_outcome(app: AsyncTask) -> None:
    recorder = HeldRecorder(app)
    tracker = ArrivalTracker(app.ledger, recorder)
    begun = started(app, tracker, 20)
    all_there = threading.Barrier(8)

    def settle() -> None:
        all_there.wait(WAIT_S)
        for attempt in begun:
            tracker.settle(attempt)
            tracker.release(attempt)
            tracker.note_long(-1.0)

    threads = [in_thread(settle) for _ in range(8)]
    for thread in threads:
        thread.join(WAIT_S)
    ends = [each.event_id for each in recorder.taken if each.kind is Kind.FINISH]
    given_back = [each for each in recorder.taken if each.kind is Kind.GIVEN_BACK]
    assert sorted(ends) == sorted(attempt.ticket.event_id for attempt in begun)
    assert given_back == []
    assert tracker.running.all() == []


def test_an_event_is_read_once_for_a_job_that_was_announced_unless_that_was_long_ago(world: World) -> None:
    """A worker of RQ does not know the name of a job's worker when it announces the job."""
    app, clock = world.app(), SettableClock()
    process = EngineProcess(app, "rq", concurrency=1)
    process._clock = clock
    arrivals = {name: Arrival(name, None, "note", "rq/default") for name in ("fresh", "old", "unknown")}
    process.tracker.enqueue([each for name, each in arrivals.items() if name != "unknown"])
    reads = {}
    for name, arrival in arrivals.items():
        process.expect(replace(arrival, worker_name=""))
        early = process._early
        assert early is not None
        wait_for(lambda early=early: all(each.done for each in early._early.values()), "it is read")  # type: ignore[misc]
        assert world.sql("SELECT COUNT(*) FROM events WHERE job_id = 'unknown'") == [(0,)]
        clock.seconds += EARLY_S + 0.1 if name == "old" else 0
        with statements(app.ledger.database) as seen:
            ticket = process.begin(arrival)
        assert (ticket.verdict, ticket.attempt) == (Begin.RUN, 1)
        reads[name] = any(text.lstrip().startswith("SELECT") for text, _ in seen)
    assert reads == {"fresh": False, "old": True, "unknown": True}
