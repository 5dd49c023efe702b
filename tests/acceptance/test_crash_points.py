"""A process kills itself before and after each step of an item's way; whoever comes next makes everything good."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
from support.broker_looks import RedisLook
from support.crash_worker import items
from support.drawn import examples
from support.world import SUPPORT, World

from asynctask import maintenance
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")


def points(*way: str) -> list[str]:
    """Before the first step of a way and after each; in a full run before each, too, where that leaves the same behind as
    after the one before it. A step is the first of its name, or says which."""
    named = [step if ":" in step else f"{step}:1" for step in way]
    after = [f"after:{step}" for step in named]
    return [f"before:{step}" for step in examples(named[:1], named)] + after


POINTS = points("insert", "seal", "borrow", "perform", "commit", "close", "give_back")
LATER = examples(["before:commit:3"], ["after:insert:2", "after:borrow:3", "before:commit:3", "after:perform:9"])
PUSHED = points("fetch", "begin", "perform", "commit", "ack")
"""Of jobs that another program pushed, which the broker hands out."""

SMALL = points(*examples(["create:2", "borrow:2"], ["create:2", "borrow:2", "commit:2", "close"]))
"""What Tasks of one item each pass through together."""

CALLED = [
    "after:queue_callbacks:1",
    "after:close:1",
    "after:told:1",
    "after:finish:1",
    *examples([], ["before:close:1", "before:told:1", "before:finish:1"]),
]
"""From the close to the end of a callback; the first is in the middle of the transaction that closes."""

KEYED = [
    "after:admit:2",
    "after:turn:2",
    "after:free:1",
    *examples([], ["before:admit:1", "before:turn:3", "before:free:1", "after:borrow:2"]),
]
"""Of items with keys; the turn of a job that waits comes after an end, in a transaction of its own."""

UNTRACKED = points("fetch", "perform", "hold", "ack")
ROWS = points("claim_alone", "begin", "perform", "commit")
"""Of untracked jobs without Redis."""


def wanted(item: dict[str, Any]) -> str:
    """How an item ends."""
    return "failed" if item["refuse"] else "error" if item["bug"] else "finish"


def unsaid(world: World) -> list[str]:
    """Jobs that were performed and have no outcome in the ledger, though nobody holds them."""
    performed = world.shop.performed()
    open_ = (
        "SELECT first_row - 1, job_id FROM events e WHERE status IN ('enqueue', 'working') AND due_at IS NULL"
        " AND process IS NULL AND NOT EXISTS (SELECT 1 FROM loans l WHERE l.task_id = e.task_id AND l.process IS NOT NULL"
        " AND l.low <= e.seq AND l.high > e.seq)"
    )
    return [jid for n, jid in world.sql(open_) if n in performed]


@pytest.mark.parametrize("point", POINTS + LATER)
def test_a_process_that_dies_at_this_point_loses_nothing_and_records_nothing_twice(
    world: World, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setitem(maintenance.EVERY_S, "find_lost", 0.3)
    app = world.app(lease_s=1.0, heartbeat_s=0.3)
    assert world.run(str(SUPPORT / "crash_worker.py"), CRASH_AT=point) == -signal.SIGKILL, world.said()
    assert unsaid(world) == [], "given up before its outcome was committed"
    (task_id,) = [progress["task_id"] for progress in app.tasks()]
    over = "SELECT first_row - 1 FROM events WHERE task_id = ? AND status IN ('finish', 'failed', 'error')"
    recorded = {n for (n,) in world.sql(over, task_id)}
    with world.working(app):
        wait_for(lambda: app.task(task_id).progress()["done"], f"the Task is over after {point}")
        wait_for(lambda: len(app.processes()) == 1, "the dead process is struck off")
        wait_for(lambda: not world.sql("SELECT 1 FROM loans"), "no loan is left")
    world.check_promises(app, [task_id], len(items()))
    ended = world.sql("SELECT first_row - 1, status FROM events WHERE task_id = ?", task_id)
    assert dict(ended) == {item["n"]: wanted(item) for item in items()}
    performed = world.shop.performed()
    assert set(performed) == {item["n"] for item in items()}
    assert {n for n in recorded if performed[n] != 1} == set(), "only what was not recorded yet is performed again"


@pytest.mark.parametrize("point", SMALL)
def test_of_small_tasks_those_that_stand_when_the_process_dies_are_whole_and_end(
    world: World, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setitem(maintenance.EVERY_S, "find_lost", 0.3)
    app = world.app(lease_s=1.0, heartbeat_s=0.3)
    assert world.run(str(SUPPORT / "crash_worker.py"), CRASH_AT=point, CRASH_SMALL="1") == -signal.SIGKILL, world.said()
    ids = [progress["task_id"] for progress in app.tasks()]
    assert len(ids) >= (1 if point == "before:create:2" else 2 if "create" in point else 1)
    split = world.sql("SELECT split_state, created, (SELECT COUNT(*) FROM events e WHERE e.task_id = tasks.id) FROM tasks")
    assert set(split) == {("sealed", 1, 1)}
    with world.working(app):
        wait_for(lambda: all(task["done"] for task in app.tasks()), f"the Tasks are over after {point}", 20)
    world.check_promises(app, ids, len(ids))


@pytest.mark.parametrize("point", CALLED)
def test_a_process_that_dies_at_this_point_queues_a_callback_once_and_its_task_ends(
    world: World, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setitem(maintenance.EVERY_S, "find_lost", 0.3)
    app = world.app(lease_s=1.0, heartbeat_s=0.3)
    assert world.run(str(SUPPORT / "crash_worker.py"), CRASH_AT=point, CRASH_CALLBACK="1") == -signal.SIGKILL, world.said()
    (task_id,) = [progress["task_id"] for progress in app.tasks()]
    assert not app.task(task_id).progress()["done"] or point.startswith("after:finish")
    with world.working(app):
        wait_for(lambda: app.task(task_id).progress()["done"], f"the Task is over after {point}")
    progress = app.task(task_id).progress()
    assert (progress["state"], progress["state_reason"]) == ("finished", None)
    assert world.sql("SELECT status, callback_of FROM events WHERE task_id IS NULL") == [("finish", task_id)]
    assert world.shop.performed("told") == ({1: 2} if point == "after:told:1" else {1: 1}), point
    world.check_promises(app, [task_id], len(items()))


@pytest.mark.parametrize("point", KEYED)
def test_a_process_that_dies_at_this_point_leaves_every_key_in_its_order(
    world: World, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Taken out, for the death before ``free``: the repair of lines whose next one waits."""
    monkeypatch.setitem(maintenance.EVERY_S, "find_lost", 0.3)
    app = world.app(lease_s=1.0, heartbeat_s=0.3)
    assert world.run(str(SUPPORT / "crash_worker.py"), CRASH_AT=point, CRASH_KEY="1") == -signal.SIGKILL, world.said()
    (task_id,) = [progress["task_id"] for progress in app.tasks()]
    with world.working(app):
        wait_for(lambda: app.task(task_id).progress()["done"], f"the Task is over after {point}")
        wait_for(lambda: world.one("SELECT COUNT(*) FROM key_positions") == 0, "every line is left")
    world.check_promises(app, [task_id], len(items()))
    for key in range(3):
        began = [int(words[1]) for words in world.shop.lines() if words[0] == "did" and int(words[1]) % 3 == key]
        assert began == sorted(began), "what runs again does so before those behind it"


@pytest.mark.parametrize("point", ["before:begin:1", "after:begin:1"])
def test_a_process_that_dies_with_a_retry_claimed_leaves_it_to_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setitem(maintenance.EVERY_S, "find_lost", 0.3)
    app = world.app(lease_s=1.0, heartbeat_s=0.3)
    assert world.run(str(SUPPORT / "crash_worker.py"), CRASH_AT=point, CRASH_WORKER="shaky") == -signal.SIGKILL, (
        world.said()
    )
    (task_id,) = [progress["task_id"] for progress in app.tasks()]
    with world.working(app):
        wait_for(lambda: app.task(task_id).progress()["done"], f"the Task is over after {point}")
    world.check_promises(app, [task_id], len(items()))
    assert app.task(task_id).progress()["counts"]["finish"] == len(items())


@pytest.mark.parametrize(("broker_kind", "point"), [("redis", point) for point in PUSHED])
def test_a_process_that_dies_at_this_point_loses_no_job_that_another_program_pushed(world: World, point: str) -> None:
    app = world.app(lease_s=1.0, heartbeat_s=0.3)
    assert world.run(str(SUPPORT / "crash_worker.py"), CRASH_AT=point, CRASH_PUSHED="1") == -signal.SIGKILL, world.said()
    ended = "SELECT job_id, status FROM events WHERE status IN ('finish', 'failed', 'error')"
    recorded = dict(world.sql(ended))
    with world.working(app):
        wait_for(lambda: not world.broker.left(), f"nothing is left in the broker after {point}")
        wait_for(lambda: len(world.sql(ended)) == len(items()), "all are over")
        wait_for(lambda: len(app.processes()) == 1, "the dead process is struck off")
    found = {app.event(jid)["params"][0]["n"]: (jid, status) for jid, status in world.sql(ended)}
    assert {n: status for n, (_, status) in found.items()} == {item["n"]: wanted(item) for item in items()}
    performed = world.shop.performed()
    assert {n for n, (jid, _) in found.items() if jid in recorded and performed[n] != 1} == set()
    assert app.doctor() == []


@pytest.mark.databases("sqlite", reason="jobs that nobody tracks are in Redis alone")
@pytest.mark.parametrize(("broker_kind", "point"), [("redis", point) for point in UNTRACKED])
def test_a_process_that_dies_at_this_point_loses_no_job_that_nobody_tracks(world: World, point: str) -> None:
    """Taken out: what `Maintenance.recover` puts back. The jobs in the dead process's list were never performed."""
    app = world.app(lease_s=1.0, heartbeat_s=0.3)
    assert world.run(str(SUPPORT / "crash_worker.py"), CRASH_AT=point, CRASH_WORKER="plain") == -signal.SIGKILL, (
        world.said()
    )
    assert world.broker.left(), "it died in the middle"
    with world.working(app):
        wait_for(lambda: not world.broker.left(), f"nothing is left in the broker after {point}")
        wait_for(lambda: len(app.processes()) == 1, "the dead process is struck off")
    assert set(world.shop.performed("plain")) == {item["n"] for item in items()}
    assert isinstance(world.broker, RedisLook)
    dead = [job["args"][0]["n"] for job in world.broker.dead()]
    assert set(dead) == {item["n"] for item in items() if item["bug"]}


@pytest.mark.parametrize("point", ROWS)
def test_a_process_that_dies_at_this_point_loses_no_untracked_job_of_the_ledger(world: World, point: str) -> None:
    """Taken out: the recovery of claims. And a row that is deleted with its outcome is not performed again."""
    app = world.app(lease_s=1.0, heartbeat_s=0.3)
    assert world.run(str(SUPPORT / "crash_worker.py"), CRASH_AT=point, CRASH_WORKER="plain") == -signal.SIGKILL, (
        world.said()
    )
    left = world.broker.left()
    assert left, "it died in the middle"
    dead = "SELECT params FROM events WHERE items = 0 AND status = 'error'"
    over = len(items()) - left
    with world.working(app):
        wait_for(lambda: not world.broker.left(), f"nothing is left after {point}")
        wait_for(lambda: len(app.processes()) == 1, "the dead process is struck off")
    performed = world.shop.performed("plain")
    assert set(performed) == {item["n"] for item in items()}
    assert sum(count > 1 for count in performed.values()) <= left
    assert over <= len(items()) - sum(count > 1 for count in performed.values()), "what is recorded does not run again"
    assert {json.loads(params)[0]["n"] for (params,) in world.sql(dead)} == {i["n"] for i in items() if i["bug"]}
    assert app.doctor() == []
