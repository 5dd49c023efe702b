"""A process kills itself before and after each step of an item's way; whoever comes next makes everything good."""

from __future__ import annotations

import signal

import pytest
from support.crash_worker import items
from support.world import SUPPORT, World

from asynctask.bulk import dispatcher, sweep
from asynctask.testing.waits import wait_for

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")

WAY = ("insert", "seal", "reserve", "push", "confirm", "fetch", "begin", "perform", "commit", "ack", "close")
POINTS = [f"{when}:{point}:1" for point in WAY for when in ("before", "after")]
LATER = ["before:insert:3", "after:insert:2", "after:reserve:3", "before:commit:3", "after:ack:2", "after:perform:9"]


def wanted(item: dict) -> str:
    """How an item ends."""
    return "failed" if item["refuse"] else "error" if item["bug"] else "finish"


def unsaid(world: World) -> list[str]:
    """Jobs that were performed and have no outcome in the ledger, though the broker forgot them."""
    return [
        job_id
        for n in world.shop.performed()
        for (job_id,) in world.sql(
            "SELECT job_id FROM events e WHERE first_row = ? AND status IN ('enqueue', 'working') AND due_at IS NULL"
            " AND NOT EXISTS (SELECT 1 FROM jobs j WHERE j.jid = e.job_id AND j.attempt = e.attempt)",
            n + 1,
        )
    ]


@pytest.mark.parametrize("point", POINTS + LATER)
def test_a_process_that_dies_at_this_point_loses_nothing_and_records_nothing_twice(
    world: World, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setattr(sweep, "LOOK_S", 0.3)
    monkeypatch.setattr(dispatcher, "LEASE_S", 1.0)
    app = world.app(lease_s=1.0, heartbeat_s=0.3)
    child = world.spawn(str(SUPPORT / "crash_worker.py"), CRASH_AT=point)
    assert child.wait(30) == -signal.SIGKILL, world.said()
    assert unsaid(world) == [], "acknowledged before its outcome was committed"
    (task_id,) = [progress["task_id"] for progress in app.tasks()]
    over = "SELECT first_row - 1 FROM events WHERE task_id = ? AND status IN ('finish', 'failed', 'error')"
    recorded = {n for (n,) in world.sql(over, task_id)}
    with world.working(app):
        wait_for(lambda: app.task(task_id).progress()["done"], f"the Task is over after {point}", 20)
        wait_for(lambda: not world.sql("SELECT * FROM jobs"), "nothing is left in the broker", 10)
        wait_for(lambda: len(app.processes()) == 1, "the dead process is struck off", 10)
    world.check_promises(app, [task_id], len(items()))
    ended = world.sql("SELECT first_row - 1, status FROM events WHERE task_id = ?", task_id)
    assert dict(ended) == {item["n"]: wanted(item) for item in items()}
    performed = world.shop.performed()
    assert set(performed) == {item["n"] for item in items()}
    assert {n for n in recorded if performed[n] != 1} == set(), "only what was not recorded yet is performed again"


@pytest.mark.parametrize("point", ["before:push_again:1", "after:push_again:1"])
def test_a_dispatcher_that_dies_with_a_retry_reserved_leaves_it_to_the_search_for_lost_copies(
    world: World, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setattr(sweep, "LOOK_S", 0.3)
    monkeypatch.setattr(dispatcher, "LEASE_S", 1.0)
    app = world.app(lease_s=1.0, heartbeat_s=0.3)
    child = world.spawn(str(SUPPORT / "crash_worker.py"), CRASH_AT=point, CRASH_WORKER="shaky")
    assert child.wait(30) == -signal.SIGKILL, world.said()
    (task_id,) = [progress["task_id"] for progress in app.tasks()]
    with world.working(app):
        wait_for(lambda: app.task(task_id).progress()["done"], f"the Task is over after {point}", 20)
    world.check_promises(app, [task_id], len(items()))
    assert app.task(task_id).progress()["counts"]["finish"] == len(items())
