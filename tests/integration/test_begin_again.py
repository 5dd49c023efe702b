"""What was fetched ahead and starts late starts by what is so then; and whom a recovered job keeps from starting."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from support.world import World, numbers

from asynctask.core.transitions import Turn, redispatch
from asynctask.dispatch.demand import Load
from asynctask.errors import LedgerUnavailable
from asynctask.ledger import dispatchable
from asynctask.ledger.events import Change, EventRecord, apply
from asynctask.middleware.tracker import Tracker
from asynctask.runtime import pool
from asynctask.runtime.fetcher import Fetcher
from asynctask.runtime.launcher import Launcher
from asynctask.runtime.pool import Pool
from asynctask.task import TaskHandle
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")


@pytest.fixture
def fetches_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers fetch whatever there is, as they do of short jobs; each job lies ready for longer than an answer is good."""
    monkeypatch.setattr(Pool, "load", lambda self: Load(self.identity, self.queues, 20, 0.0))
    monkeypatch.setattr(Fetcher, "_room", lambda self: 20)
    monkeypatch.setattr(pool, "STALE_S", 0.0)


def held(app: Any, launcher: Launcher) -> int:
    return len(app.broker.held_by(launcher.pool.identity))


def began(world: World) -> list[str]:
    return [line[1] for line in world.shop.lines() if line[0] in ("began", "did")]


def all_lie_ready_behind_the_first(world: World, app: Any, launcher: Launcher, count: int) -> TaskHandle:
    """A Task whose first job runs while all others are fetched and wait for its thread."""
    task: TaskHandle = app.submit("gated", numbers(count))
    wait_for(lambda: held(app, launcher) == count and began(world), "all are fetched, one runs")
    return task


def forgotten_by_the_broker(app: Any, task: TaskHandle) -> None:
    def again(record: EventRecord) -> Turn | None:
        return redispatch(record.row, record.task_state, held=False, missed_before=True, now=app.clock.now())

    with app.ledger.database.write() as connection:
        applied = apply(connection, app.ledger, [Change(event["id"], again) for event in task.events()])
    dispatchable.announce(app.ledger, applied)


@pytest.mark.parametrize(("verb", "left"), [("pause", "enqueue"), ("cancel", "cancelled")])
@pytest.mark.usefixtures("fetches_ahead")
def test_what_was_fetched_ahead_does_not_start_after_a_knob(world: World, verb: str, left: str) -> None:
    app = world.app()
    with world.working(app, concurrency=1) as launcher:
        task = all_lie_ready_behind_the_first(world, app, launcher, 5)
        getattr(task, verb)()
        world.open_gate()
        wait_for(lambda: task.progress()["control"]["in_flight"] == 0, "nothing lies in the process any more")
        counts = task.progress()["counts"]
        assert (counts["finish"], counts[left]) == (1, 4)
    assert began(world) == ["0", "0"], "the first one began and did"
    assert app.doctor() == []


@pytest.mark.parametrize("broker_kind", ["redis"])
@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.usefixtures("fetches_ahead")
def test_what_was_fetched_ahead_goes_back_when_its_queue_is_paused(world: World, tracked: bool) -> None:
    """Taken out: `Pool.pause`. They lay ready, and started however long ago the queue had been paused."""
    app = world.app()
    bulk = numbers(5, 1)
    with world.working(app, concurrency=1) as launcher:
        first = app.submit("gated", numbers(1))
        wait_for(lambda: began(world), "the only thread is busy")
        task = app.submit("note", bulk) if tracked else None
        if task is None:
            app.workers["plain"].perform_bulk(bulk)
        wait_for(lambda: held(app, launcher) >= 5, "all are fetched")
        app.operations.pause("default")
        wait_for(lambda: app.operations.jobs("default")["total"] == 5, "they are on the queue again")
        world.open_gate()
        assert first.wait(120)["counts"]["finish"] == 1
        assert [line[1] for line in world.shop.lines()] == ["0", "0"]
        app.operations.unpause("default")
        wait_for(lambda: len(world.shop.lines()) == 7, "all of them ran")
        if not tracked:
            assert [line[1] for line in world.shop.lines()[2:]] == list("12345"), "in their order"
    assert app.doctor() == []


@pytest.mark.parametrize("broker_kind", ["redis"])
@pytest.mark.usefixtures("fetches_ahead")
def test_what_a_thread_has_taken_goes_back_when_its_queue_is_paused(world: World) -> None:
    """Taken out: `Pool._takes_from` in `Pool._begins`. Each thread began the job with which it had waited."""
    app = world.app()
    with world.working(app, concurrency=2) as launcher:
        may_start = launcher.pool.may_start
        launcher.pool.may_start = lambda: False
        task = app.submit("note", numbers(2))
        wait_for(lambda: held(app, launcher) == 2 and not launcher.pool.ready, "each thread has one, and waits")
        app.operations.pause("default")
        wait_for(lambda: launcher.pool._paused, "the process knows")
        launcher.pool.may_start = may_start
        wait_for(lambda: app.operations.jobs("default")["total"] == 2, "they are on the queue again")
        assert world.shop.lines() == []
        app.operations.unpause("default")
        assert task.wait(120)["counts"]["finish"] == 2
    assert app.doctor() == []


@pytest.mark.usefixtures("fetches_ahead")
def test_what_was_fetched_ahead_and_dispatched_again_does_not_start_twice(world: World) -> None:
    app = world.app()
    with world.working(app, concurrency=1) as launcher:
        task = all_lie_ready_behind_the_first(world, app, launcher, 3)
        wait_for(lambda: task.progress()["counts"]["working"] == 1, "the first one is known to be at work")
        forgotten_by_the_broker(app, task)
        world.open_gate()
        assert task.wait(120)["counts"]["finish"] == 3
    attempts = sorted((line[1], line[3]) for line in world.shop.lines() if line[0] == "began")
    assert attempts == [("0", "1"), ("1", "2"), ("2", "2")]


@pytest.mark.usefixtures("fetches_ahead")
def test_what_cannot_be_asked_about_again_is_neither_begun_nor_lost(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    app = world.app()
    real = Tracker.begin
    refused: list[Any] = []

    def away(self: Tracker, keys: Any) -> Any:
        if len(refused) < 2 and len(began(world)) > 1:
            refused.append(keys[0][1])
            raise LedgerUnavailable("down")
        return real(self, keys)

    with world.working(app, concurrency=1) as launcher:
        task = all_lie_ready_behind_the_first(world, app, launcher, 3)
        monkeypatch.setattr(Tracker, "begin", away)
        world.open_gate()
        assert task.wait(120)["counts"]["finish"] == 3
    assert refused == [1, 1]
    attempts = sorted((line[1], line[3]) for line in world.shop.lines() if line[0] == "began")
    assert attempts == [("0", "1"), ("1", "2"), ("2", "2")], "they went back to the ledger and came again"


@pytest.mark.usefixtures("fetches_ahead")
def test_a_recovered_job_that_runs_long_keeps_its_process_to_itself_for_a_while_only(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "ALONE_S", 600.0)
    app = world.app()
    suspects = app.submit("gated", numbers(2))
    victim = world.cli("kill_app", "worker", "-c", "2")
    wait_for(lambda: len(began(world)) == 2, "both run")
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    me = str(os.getpid())
    with world.working(app, concurrency=2) as launcher:
        wait_for(lambda: [line[2] for line in world.shop.lines()].count(me) == 1, "one of them runs again")
        paused = app.submit("note", numbers(6, 10))
        others = app.submit("note", numbers(6, 20))
        wait_for(lambda: held(app, launcher) == 14, "everything is fetched")
        assert len(began(world)) == 3, "it runs alone"
        paused.pause()
        monkeypatch.setattr(pool, "ALONE_S", 0.0)
        assert others.wait(120)["counts"]["finish"] == 6
        wait_for(lambda: paused.progress()["control"]["in_flight"] == 0, "the paused ones went back")
        assert paused.progress()["counts"]["enqueue"] == 6
        assert [line[2] for line in world.shop.lines() if line[0] == "began"].count(me) == 1, "suspects run one at a time"
        world.open_gate()
        assert suspects.wait(120)["counts"]["finish"] == 2
    assert not {str(n) for n in range(10, 16)} & set(began(world))
    assert app.doctor() == []


@pytest.mark.parametrize("change", [{"priority": 300}, {"parallel": 3}, {"interval": 60.0}])
@pytest.mark.usefixtures("fetches_ahead")
def test_what_was_fetched_ahead_does_not_start_under_an_old_knob(world: World, change: dict[str, Any]) -> None:
    app = world.app()
    with world.working(app, concurrency=1) as launcher:
        task = all_lie_ready_behind_the_first(world, app, launcher, 3)
        task.update(**change)
        world.open_gate()
        wait_for(lambda: task.progress()["counts"]["finish"], "the first one is over")
        wait_for(lambda: {each["attempt"] for each in task.events()[1:]} == {2}, "the others went back")
    assert app.doctor() == []


def test_what_lies_ready_for_long_is_left_to_what_is_more_urgent_by_now(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, as many as a process has threads stayed, and began before it."""
    room = Fetcher._room
    monkeypatch.setattr(Pool, "load", lambda self: Load(self.identity, self.queues, 20, 0.0))
    monkeypatch.setattr(Fetcher, "_room", lambda self: 20)
    app = world.app()
    with world.working(app, concurrency=1) as launcher:
        less = all_lie_ready_behind_the_first(world, app, launcher, 2)
        monkeypatch.setattr(Fetcher, "_room", room)
        wait_for(lambda: held(app, launcher) == 1, "what lies behind the first one went back")
        urgent = app.submit("note", numbers(1, 10), priority=1)
        wait_for(lambda: 1 in app.broker.waiting(["default"]).get("default", {}), "the urgent one is in the broker")
        world.open_gate()
        assert urgent.wait(120)["counts"]["finish"] == 1
        assert less.wait(120)["counts"]["finish"] == 2
    assert began(world) == ["0", "0", "10", "1", "1"]
    assert app.doctor() == []
