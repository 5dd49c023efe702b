"""Jobs of a Task with a ``parallel`` follow each other in one place of it: lent to the process that has the place."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.world import World, numbers

from asynctask import AsyncTask
from asynctask.errors import LedgerUnavailable
from asynctask.job import CurrentJob
from asynctask.ledger import reservations
from asynctask.runtime import lanes
from asynctask.testing import wait_for

LENT = "SELECT COUNT(*) FROM events WHERE status = 'enqueue' AND process IS NOT NULL"
pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")


@contextmanager
def counted_pushes(app: AsyncTask) -> Iterator[list[int]]:
    """How many copies of tracked jobs each push had."""
    push, seen = app.broker.push, []

    def counting(copies: Any) -> None:
        seen.append(len(copies))
        push(copies)

    app.broker.push = counting  # type: ignore[method-assign]
    yield seen
    app.broker.push = push  # type: ignore[method-assign]


def most_at_once(world: World) -> int:
    """How many jobs ran at the same time, at most, by their own clock."""
    steps = [
        (float(line[2]), 1 if line[0] == "began" else -1) for line in world.shop.lines() if line[0] in ("began", "ended")
    ]
    return max(itertools.accumulate(step for _, step in sorted(steps)))


@pytest.fixture
def long_span(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, a lane has room for some of its jobs."""
    monkeypatch.setattr(lanes, "SPAN_S", 120.0)


@pytest.mark.usefixtures("long_span")
@pytest.mark.parametrize("parallel", [1, 3])
def test_most_jobs_of_a_limited_task_never_see_the_broker_and_no_more_run_than_it_allows(
    world: World, parallel: int
) -> None:
    app = world.app()
    with counted_pushes(app) as pushes, world.working(app, concurrency=4) as launcher:
        launcher.pool.lanes._fresh_s = 120.0
        task = app.submit("brief", numbers(150), parallel=parallel)
        assert task.wait(120)["counts"]["finish"] == 150
    assert sum(pushes) < 75, "half of them followed another"
    assert most_at_once(world) <= parallel
    world.check_promises(app, [task.id], 150)


@pytest.mark.usefixtures("long_span")
def test_a_place_stays_with_its_process_while_nothing_else_waits_and_ends_are_written_unread(world: World) -> None:
    """Taken out: what fills a lane up before it is empty. Each place came back through the broker every 0.35 s.

    Taken out of the recorder: that it has outcomes of followers read again. One flush in a hundred was written at once."""
    app = world.app()
    with counted_pushes(app) as pushes, world.working(app) as launcher:
        launcher.pool.lanes._fresh_s = 120.0  # however slow this machine is, no loan goes back for its age
        task = app.submit("brief", numbers(600), parallel=2)
        assert task.wait(120)["counts"]["finish"] == 600
        assert launcher.recorder._reads == 0, "no outcome met an Event that was not as it was lent"
    assert sum(pushes) < 20
    assert most_at_once(world) <= 2
    world.check_promises(app, [task.id], 600)


def test_a_limited_task_does_not_keep_the_only_thread_from_others(world: World) -> None:
    app = world.app()
    with world.working(app, concurrency=1):
        first = app.submit("brief", numbers(3_000), parallel=1)
        wait_for(lambda: world.one(LENT), "something is lent")
        second = app.submit("note", numbers(3))
        assert second.wait(120)["counts"]["finish"] == 3
        assert not first.progress()["done"]
        first.cancel()
        assert first.wait(120)["state"] == "cancelled"
    assert app.doctor() == []


def test_the_limit_holds_over_processes_and_through_kills(world: World) -> None:
    app = world.app(lease_s=1.0, heartbeat_s=0.3)
    workers = [world.cli("kill_app", "worker", "-c", "3") for _ in range(2)]
    task = app.submit("brief", numbers(300), parallel=3)
    wait_for(lambda: world.one(LENT), "something is lent")
    workers[0].send_signal(signal.SIGKILL)
    workers[0].wait()
    with world.working(app):
        assert task.wait(120)["counts"]["finish"] == 300
    began = [line for line in world.shop.lines() if line[0] == "began"]
    ended = {line[1] for line in world.shop.lines() if line[0] == "ended"}
    assert ended == {str(n) for n in range(300)}
    assert len(began) <= 300 + 3 + 100, "only what had begun in the killed process, and was not recorded, runs again"
    assert world.one(LENT) == 0
    world.check_promises(app, [task.id], 300)


@pytest.mark.parametrize("knob", ["pause", "cancel", "parallel"])
def test_a_knob_takes_the_places_back_and_what_was_lent_with_them(world: World, knob: str) -> None:
    app = world.app()
    with world.working(app):
        task = app.submit("brief", numbers(2_000), parallel=3)
        wait_for(lambda: world.one(LENT), "something is lent")
        if knob == "parallel":
            task.update(parallel=1)
            wait_for(lambda: task.progress()["control"]["in_flight"] <= 1, "two places are taken back")
            task.pause()
        else:
            getattr(task, knob)()
        wait_for(lambda: task.progress()["control"]["in_flight"] == 0, "nothing runs any more")
        wait_for(lambda: world.one(LENT) == 0, "what was lent went back")
        if knob == "cancel":
            assert task.wait(120)["state"] == "cancelled"
        else:
            assert task.progress()["counts"]["enqueue"] > 1_000
    assert most_at_once(world) <= 3
    assert app.doctor() == []


@pytest.mark.usefixtures("long_span")
@pytest.mark.parametrize("broker_kind", ["redis"])
@pytest.mark.parametrize("parallel", [1, 3])
def test_what_was_lent_goes_back_when_its_queue_is_paused(world: World, parallel: int) -> None:
    """Taken out: `Pool._takes_from` in `Pool.follow`. The jobs of the Task followed each other to its end."""
    app = world.app()
    with world.working(app) as launcher:
        launcher.pool.lanes._fresh_s = 120.0
        task = app.submit("brief", numbers(1_000), parallel=parallel)
        wait_for(lambda: world.one(LENT), "something is lent")
        app.operations.pause("default")
        wait_for(lambda: not launcher.pool.busy, "none follows")
        wait_for(lambda: world.one(LENT) == 0, "what was lent went back")
        assert task.progress()["counts"]["enqueue"] > 0
        began = len(world.shop.performed("began"))
        other = app.submit("note", numbers(3), queue="callbacks")
        assert other.wait(120)["done"]
        assert len(world.shop.performed("began")) == began
        app.operations.unpause("default")
        wait_for(lambda: len(world.shop.performed("began")) > began + 20, "it goes on")
        task.cancel()
        assert task.wait(120)["state"] == "cancelled"
    assert most_at_once(world) <= parallel
    assert app.doctor() == []


def test_a_process_that_stops_gives_back_what_was_lent_to_it(world: World) -> None:
    app = world.app()
    with world.working(app):
        task = app.submit("brief", numbers(500), parallel=2)
        wait_for(lambda: world.one(LENT), "something is lent")
    assert world.one(LENT) == 0
    assert app.doctor() == []
    with world.working(world.app()):
        assert task.wait(120)["counts"]["finish"] == 500
    world.check_promises(app, [task.id], 500)


def test_what_is_lent_while_the_process_stops_does_not_begin(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    app = world.app()
    with world.working(app, concurrency=1) as launcher:
        lanes = launcher.pool.lanes
        lend, begun = lanes._lend, []

        def stopping(*args: Any) -> Any:
            found = lend(*args)
            launcher.pool.quiet()
            begun.append([line[0] for line in world.shop.lines()].count("began"))
            return found

        monkeypatch.setattr(lanes, "_lend", stopping)
        app.submit("brief", numbers(50), parallel=1)
        wait_for(lambda: launcher.pool.is_quiet and launcher.pool.busy == 0, "the first job is over")
        wait_for(lambda: world.one(LENT) == 0, "what was lent went back")
        assert begun == [[line[0] for line in world.shop.lines()].count("began")]
    assert app.doctor() == []


def test_a_job_that_fails_or_is_retried_hands_its_place_on(world: World) -> None:
    app = world.app()
    with counted_pushes(app) as pushes, world.working(app):
        refused = app.submit("note", numbers(60, refuse=True), parallel=1)
        shaky = app.submit("shaky", [{"n": n, "breaks": n % 2} for n in range(60)], parallel=1)
        assert refused.wait(120)["counts"]["failed"] == 60
        assert shaky.wait(120)["counts"]["finish"] == 60
    rows = [row for (row,) in world.sql("SELECT row FROM item_errors WHERE task_id = ? ORDER BY id", refused.id)]
    assert sorted(rows) == list(range(1, 61))
    assert sum(pushes) < 120, "60 and 60, and 30 that came again"
    world.check_promises(app, [refused.id, shaky.id], 120)


@pytest.mark.parametrize("at", ["lend", "take"])
def test_a_loan_that_never_arrived_goes_back(world: World, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Taken out: `Lanes.return_unknown`. The rows were lent to a process that did not know, for ever."""
    app = world.app()
    with world.working(app) as launcher:
        lanes = launcher.pool.lanes
        broken: list[int] = []
        lend, take = lanes._lend, lanes._take

        def lost(*args: Any) -> Any:
            found = (lend if at == "lend" else take)(*args)
            if found and not broken:
                broken.append(len(found))
                raise LedgerUnavailable("the answer is lost")
            return found

        monkeypatch.setattr(lanes, f"_{at}", lost)
        task = app.submit("brief", numbers(80), parallel=1)
        assert task.wait(120)["counts"]["finish"] == 80
        assert broken
    world.check_promises(app, [task.id], 80)


def test_a_thread_that_dies_before_the_next_job_begins_leaves_it_to_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = world.app()
    with world.working(app) as launcher:
        perform = launcher.performer.perform
        died: list[Any] = []

        def dying(execution: Any) -> None:
            perform(execution)
            if execution.follower is not None and not died:
                died.append(execution.follower.copy.jid)
                raise SystemError("this thread ends")

        monkeypatch.setattr(launcher.performer, "perform", dying)
        task = app.submit("brief", numbers(60), parallel=1)
        assert task.wait(120)["counts"]["finish"] == 60
        assert died
        wait_for(lambda: launcher.pool.busy == 0, "its place in the process is free")
    world.check_promises(app, [task.id], 60)


def test_a_loan_leaves_the_hint_that_a_place_came_free(world: World) -> None:
    """It may have been given between the loan's look at what is in flight and its end; nobody would give it again."""
    app = world.app()
    ledger = app.ledger
    task = app.submit("note", numbers(9), parallel=1)
    assert len(reservations.reserve(ledger, task.id, 5, lease_s=5)) == 1
    assert world.one("SELECT ready FROM tasks") is None, "its only place is taken"
    world.sql("UPDATE tasks SET ready = priority")
    assert len(reservations.lend_jobs(ledger, task.id, 3, 1)) == 3
    assert world.one("SELECT ready FROM tasks") is not None
    assert len(reservations.lend_jobs(ledger, task.id, 9, 1)) == 5
    assert world.one("SELECT ready FROM tasks") is None, "nothing is left to dispatch"


def test_what_is_lent_passes_the_client_middleware(world: World) -> None:
    app = world.app()

    def odd_ones_only(worker: Any, job: CurrentJob, queue: str, call_next: Any) -> Any:
        return call_next() if job.payload["args"][0]["n"] % 2 else None

    app.client_middleware.add(odd_ones_only)
    with counted_pushes(app) as pushes, world.working(app):
        task = app.submit("brief", numbers(100), parallel=1)
        counts = task.wait(120)["counts"]
    assert (counts["finish"], counts["error"]) == (50, 50)
    assert sum(pushes) < 50
    world.check_promises(app, [task.id], 100)


def test_a_task_without_a_limit_is_lent_nothing(world: World) -> None:
    app = world.app()
    with counted_pushes(app) as pushes, world.working(app):
        task = app.submit("brief", numbers(60))
        assert task.wait(120)["counts"]["finish"] == 60
    assert sum(pushes) == 60
