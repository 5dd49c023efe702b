"""When the group commit writes what it was given, and when it looks whether Tasks are over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from support.borrowing import attempts, borrow
from support.world import World

from asynctask import AsyncTask
from asynctask.arrivals import ArrivalTracker
from asynctask.ledger import processes
from asynctask.ledger.base import Ledger
from asynctask.ledger.recorder import LINGER_S, Kind, Recorder
from asynctask.ledger.tasks import try_close
from asynctask.middleware.tracker import Attempt
from asynctask.testing import wait_for

pytestmark = pytest.mark.databases("sqlite", reason="what it waits for is no database's matter")


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    recorder.start()
    try:
        yield recorder
    finally:
        recorder.stop(10)


def one_job_each(app: AsyncTask, recorder: Recorder, count: int) -> list[tuple[int, ArrivalTracker, Attempt]]:
    """Tasks of one job each, begun here."""
    tracker = ArrivalTracker(app.ledger, recorder)
    found = []
    for _ in range(count):
        task = app.submit("note", [{"n": 1}])
        (attempt,) = attempts(tracker, borrow(app.ledger, task.id, 1))
        tracker.start(attempt)
        attempt.finish(None)
        found.append((task.id, tracker, attempt))
    return found


def test_a_task_is_closed_in_time_although_no_outcome_comes_after_its_last(world: World) -> None:
    """While jobs of others run, it is looked now and then, and not after every flush: then somebody must remember."""
    app = world.app()
    with recording(Recorder(app.ledger, linger_s=lambda: LINGER_S)) as recorder:
        for task_id, tracker, attempt in one_job_each(app, recorder, 3):
            recorded = threading.Event()
            tracker.settle(attempt, then=lambda won, recorded=recorded: recorded.set())  # type: ignore[misc]
            assert recorded.wait(120), "it is recorded"
            wait_for(lambda task_id=task_id: app.task(task_id).progress()["done"], "it is over")  # type: ignore[misc]


def test_a_task_whose_last_outcome_comes_just_before_the_end_of_the_process_is_closed(world: World) -> None:
    app = world.app()
    recorder = Recorder(app.ledger, linger_s=lambda: LINGER_S)
    jobs = one_job_each(app, recorder, 2)
    with recording(recorder):
        for _, tracker, attempt in jobs:
            tracker.settle(attempt)
        assert recorder.drain(10)
    assert [app.task(task_id).progress()["done"] for task_id, _, _ in jobs] == [True, True]


def test_a_task_that_was_limited_while_its_job_ran_goes_on_after_that(world: World) -> None:
    app, other = world.app(), world.app()
    recorder = Recorder(app.ledger, closes_at_once=False)
    tracker, task = ArrivalTracker(app.ledger, recorder), app.submit("note", [{"n": 1}, {"n": 2}])
    (attempt,) = attempts(tracker, borrow(app.ledger, task.id, 1))
    tracker.start(attempt)
    task.update(parallel=1)
    assert borrow(other.ledger, task.id, 1) == [], "it waits for the end of its job"
    attempt.finish(None)
    with recording(recorder):
        tracker.settle(attempt)
        wait_for(lambda: borrow(other.ledger, task.id, 1), "there is room")


def test_a_large_task_is_closed_beside_the_outcomes_of_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are asked whether they are over, all of them: what ends meanwhile is recorded all the same."""
    app = world.app()
    monkeypatch.setattr("asynctask.ledger.recorder._MAX_INLINE_JOBS", 0)
    monkeypatch.setattr("asynctask.ledger.recorder.close_small", lambda ledger, task_ids: [])
    asked, go_on = threading.Event(), threading.Event()

    def slow(ledger: Ledger, task_id: int) -> bool:
        asked.set()
        assert go_on.wait(120)
        return try_close(ledger, task_id)

    with recording(Recorder(app.ledger)) as recorder:
        (large, tracker, first), (_, _, second) = one_job_each(app, recorder, 2)
        with monkeypatch.context() as patch:
            patch.setattr("asynctask.ledger.recorder.try_close", slow)
            tracker.settle(first)
            assert asked.wait(120)
            recorded = threading.Event()
            tracker.settle(second, then=lambda won: recorded.set())
            assert recorded.wait(120), "while it is asked"
            go_on.set()
            wait_for(lambda: app.task(large).progress()["done"], "it is closed")


def test_a_look_that_fails_ends_no_thread(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    app = world.app()
    failing = threading.Event()

    def broken(*_: object, **__: object) -> list[int]:
        failing.set()
        raise RuntimeError("the look fails")

    with recording(Recorder(app.ledger)) as recorder:
        (_, tracker, first), (last, _, second) = one_job_each(app, recorder, 2)
        with monkeypatch.context() as patch:
            patch.setattr("asynctask.ledger.recorder.candidates", broken)
            tracker.settle(first)
            assert failing.wait(120)
            assert recorder.drain(10)
        tracker.settle(second)
        wait_for(lambda: app.task(last).progress()["done"], "the next Task is closed")


def test_a_job_under_which_a_process_died_does_not_begin_before_it_is_recorded(world: World) -> None:
    """A process died under it: its thread stands still until ``working`` is in the ledger."""
    app = world.app()
    recorder = Recorder(app.ledger)
    tracker = ArrivalTracker(app.ledger, recorder)
    task = app.submit("note", [{"n": 1}])
    borrow(app.ledger, task.id, 1)
    processes.recover_events(app.ledger, app.ledger.identity)
    (attempt,) = attempts(tracker, borrow(app.ledger, task.id, 1))
    assert attempt.ticket.watched
    starting = threading.Thread(target=tracker.start, args=(attempt,), daemon=True)
    starting.start()
    wait_for(lambda: recorder.waiting, "it waits to be recorded")
    assert [each.kind for each in recorder._pending] == [Kind.WORKING]
    with recording(recorder):
        starting.join(120)
        assert not starting.is_alive()
    tracker.note_long(-1.0)
    assert recorder._pending == [], "it is said once"


def test_a_thread_that_waits_for_its_record_does_not_wait_for_the_outcomes_of_others(world: World) -> None:
    """While jobs lie ready an outcome waits longer for others; a watched job would wait as long before it begins."""
    app = world.app()
    recorder = Recorder(app.ledger, linger_s=lambda: 3_600.0)
    tracker = ArrivalTracker(app.ledger, recorder)
    task = app.submit("note", [{"n": 1}, {"n": 2}])
    ended, watched = attempts(tracker, borrow(app.ledger, task.id, 2))
    watched.ticket = replace(watched.ticket, watched=True)
    with recording(recorder):
        tracker.start(ended)
        tracker.settle(ended)
        starting = threading.Thread(target=tracker.start, args=(watched,), daemon=True)
        starting.start()
        starting.join(60)
        assert not starting.is_alive()
    assert sorted(event["status"] for event in task.events()) == ["finish", "working"]
