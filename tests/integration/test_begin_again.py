"""What was borrowed or fetched ahead and starts late starts by what is so then; and whom a recovered job keeps from
starting."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from support.world import World, numbers

from asynctask.clock import SECOND
from asynctask.ledger import processes
from asynctask.runtime import borrower, pool
from asynctask.runtime.launcher import Launcher
from asynctask.runtime.pool import Durations
from asynctask.runtime.recheck import Recheck
from asynctask.sidekiq.fetcher import Fetcher
from asynctask.task import TaskHandle
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")


@pytest.fixture
def reads_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers borrow and fetch whatever there is, as they do of short jobs, and keep it, however long a job runs."""
    monkeypatch.setattr(borrower, "AHEAD_S", 600.0)
    monkeypatch.setattr(Durations, "knows", lambda self, task_id: True)
    monkeypatch.setattr(Durations, "of", lambda self, task_id, unknown: 0.01)
    monkeypatch.setattr(Recheck, "_return_surplus", lambda self, now: None)
    monkeypatch.setattr(Fetcher, "_room", lambda self: 20)


def ready(launcher: Launcher) -> int:
    return len(launcher.pool.jobs)


def began(world: World) -> list[str]:
    return [line[1] for line in world.shop.lines() if line[0] in ("began", "did")]


def all_lie_ready_behind_the_first(world: World, app: Any, launcher: Launcher, count: int) -> TaskHandle:
    """A Task whose first job runs while all others are borrowed and wait for its thread."""
    task: TaskHandle = app.submit("gated", numbers(count))
    wait_for(lambda: ready(launcher) == count - 1 and began(world), "all are borrowed, one runs")
    return task


@pytest.mark.parametrize(("verb", "left"), [("pause", "enqueue"), ("cancel", "cancelled")])
@pytest.mark.usefixtures("reads_ahead")
def test_what_was_borrowed_ahead_does_not_start_after_a_knob(world: World, verb: str, left: str) -> None:
    app = world.app()
    with world.working(app, concurrency=1) as launcher:
        task = all_lie_ready_behind_the_first(world, app, launcher, 5)
        getattr(task, verb)()
        wait_for(lambda: not ready(launcher), "nothing lies ready any more")
        world.open_gate()
        wait_for(lambda: task.progress()["control"]["in_flight"] == 0, "nothing is in the process any more")
        wait_for(lambda: task.progress()["counts"][left] == 4, "the others did not run")
        assert task.progress()["counts"]["finish"] == 1
    assert began(world) == ["0", "0"], "the first one began and did"
    assert app.doctor() == []


@pytest.mark.parametrize("broker_kind", ["sql", "redis"])
@pytest.mark.usefixtures("reads_ahead")
def test_what_was_borrowed_ahead_goes_back_when_its_queue_is_paused(world: World) -> None:
    """Taken out: the paused queues of a check."""
    app = world.app()
    with world.working(app, concurrency=1) as launcher:
        first = app.submit("gated", numbers(1))
        wait_for(lambda: began(world), "the only thread is busy")
        task = app.submit("note", numbers(5, 1), priority=1)
        wait_for(lambda: ready(launcher) == 5, "all are borrowed")
        app.operations.pause("default")
        wait_for(lambda: not ready(launcher), "they went back")
        world.open_gate()
        assert first.wait(120)["counts"]["finish"] == 1
        assert [line[1] for line in world.shop.lines()] == ["0", "0"]
        app.operations.unpause("default")
        assert task.wait(120)["counts"]["finish"] == 5
    assert app.doctor() == []


@pytest.mark.parametrize("broker_kind", ["redis"])
@pytest.mark.usefixtures("reads_ahead")
def test_what_was_fetched_ahead_goes_back_when_its_queue_is_paused(world: World) -> None:
    """Taken out: `Pool.pause`. They lay ready, and started however long ago the queue had been paused."""
    app = world.app()
    with world.working(app, concurrency=1) as launcher:
        first = app.submit("gated", numbers(1))
        wait_for(lambda: began(world), "the only thread is busy")
        app.workers["plain"].perform_bulk(numbers(5, 1))
        wait_for(lambda: ready(launcher) == 5, "all are fetched")
        app.operations.pause("default")
        wait_for(lambda: app.operations.jobs("default")["total"] == 5, "they are on the queue again")
        world.open_gate()
        assert first.wait(120)["counts"]["finish"] == 1
        assert [line[1] for line in world.shop.lines()] == ["0", "0"]
        app.operations.unpause("default")
        wait_for(lambda: len(world.shop.lines()) == 7, "all of them ran")
        assert [line[1] for line in world.shop.lines()[2:]] == list("12345"), "in their order"
    assert app.doctor() == []


@pytest.mark.parametrize("broker_kind", ["sql", "redis"])
def test_what_a_thread_has_taken_goes_back_when_its_queue_is_paused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken out: the threads that wait with a job, in a check. Each began the job with which it had waited."""
    app = world.app()
    with world.working(app, concurrency=2) as launcher:
        monkeypatch.setattr(pool, "STALE_S", 0.0)
        task = app.submit("note", numbers(2))
        wait_for(lambda: launcher.pool.jobs.taken == 2, "each thread has one, and waits")
        app.operations.pause("default")
        wait_for(lambda: task.progress()["control"]["in_flight"] == 0, "they went back")
        assert world.shop.lines() == []
        monkeypatch.setattr(pool, "STALE_S", 0.5)
        app.operations.unpause("default")
        assert task.wait(120)["counts"]["finish"] == 2
    assert app.doctor() == []


@pytest.mark.usefixtures("reads_ahead")
def test_what_was_borrowed_ahead_and_recovered_does_not_start_twice(world: World) -> None:
    """Taken out: the loans that are gone, in a check. The other two ran here, and once more elsewhere."""
    app, other = world.app(), world.app()
    with world.working(app, concurrency=1) as launcher:
        task = all_lie_ready_behind_the_first(world, app, launcher, 3)
        wait_for(lambda: task.progress()["counts"]["working"] == 1, "the first one is known to be at work")
        processes.recover_events(other.ledger, app.ledger.identity)
        recovered = app.ledger.now()
        wait_for(lambda: app.ledger.now() > recovered + SECOND, "a second passes")
        world.open_gate()
        assert task.wait(120)["counts"]["finish"] == 3
    attempts = sorted((line[1], line[3]) for line in world.shop.lines() if line[0] == "began")
    assert attempts == [("0", "1"), ("0", "2"), ("1", "2"), ("2", "2")]
    assert app.doctor() == []


@pytest.mark.usefixtures("reads_ahead")
def test_a_recovered_job_that_runs_long_keeps_its_process_to_itself_for_a_while_only(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "ALONE_S", 600.0)
    app = world.app()
    suspects = app.submit("gated", numbers(2))
    victim = world.cli("kill_app", "worker", "-c", "2")
    wait_for(lambda: world.one("SELECT COUNT(*) FROM events WHERE status = 'working'") == 2, "both are known to run")
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    me = str(os.getpid())
    with world.working(app, concurrency=2) as launcher:
        wait_for(lambda: [line[2] for line in world.shop.lines()].count(me) == 1, "one of them runs again")
        others = app.submit("note", numbers(6, 20))
        assert launcher.pool.closed
        assert len(began(world)) == 3, "it runs alone"
        monkeypatch.setattr(pool, "ALONE_S", 0.0)
        assert others.wait(120)["counts"]["finish"] == 6
        assert [line[2] for line in world.shop.lines() if line[0] == "began"].count(me) == 1, "suspects run one at a time"
        world.open_gate()
        assert suspects.wait(120)["counts"]["finish"] == 2
    assert app.doctor() == []


@pytest.mark.parametrize("change", [{"priority": 300}, {"parallel": 1}, {"interval": 60.0}])
@pytest.mark.usefixtures("reads_ahead")
def test_what_was_borrowed_ahead_does_not_start_under_an_old_knob(world: World, change: dict[str, Any]) -> None:
    app = world.app()
    with world.working(app, concurrency=2) as launcher:
        task: TaskHandle = app.submit("gated", numbers(8))
        wait_for(lambda: ready(launcher) == 6 and len(began(world)) == 2, "all are borrowed, two run")
        task.update(**change)
        changed = app.ledger.now()
        wait_for(lambda: app.ledger.now() > changed + SECOND, "a second passes")
        if "priority" in change:
            assert launcher.pool.jobs.rank_of(task.id) == (0, 300)
        world.open_gate()
        if "interval" in change:
            wait_for(lambda: task.progress()["counts"]["finish"] >= 2, "what ran is over")
            wait_for(lambda: task.progress()["control"]["in_flight"] == 0, "the others went back")
            assert task.progress()["counts"]["enqueue"] >= 5, "at most one round of one job began"
            task.update(interval=0)
        assert task.wait(120)["counts"]["finish"] == 8
    assert set(world.shop.performed("did").values()) == {1}
    assert app.doctor() == []


def test_what_lies_ready_for_long_is_left_to_what_is_more_urgent_by_now(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, as many as a process has threads stayed, and began before it."""
    surplus = Recheck._return_surplus
    monkeypatch.setattr(Recheck, "_return_surplus", lambda self, now: None)
    app = world.app()
    with monkeypatch.context() as ahead, world.working(app, concurrency=1) as launcher:
        ahead.setattr(Durations, "knows", lambda self, task_id: True)
        ahead.setattr(Durations, "of", lambda self, task_id, unknown: 0.01)
        less = all_lie_ready_behind_the_first(world, app, launcher, 2)
        monkeypatch.setattr(Recheck, "_return_surplus", surplus)
        ahead.undo()
        wait_for(lambda: not ready(launcher), "what lies behind the first one went back")
        urgent = app.submit("note", numbers(1, 10), priority=1)
        world.open_gate()
        assert urgent.wait(120)["counts"]["finish"] == 1
        assert less.wait(120)["counts"]["finish"] == 2
    assert began(world) == ["0", "0", "10", "1", "1"]
    assert app.doctor() == []
