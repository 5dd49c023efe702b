"""The backlog as a number to scale by: what waits in the ledger and in the broker, how old it is, and how many workers it
wants."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import sqlalchemy as sa
from support.broker_suite import untracked
from support.costs import analyze, cost
from support.untracked import push
from support.world import World, numbers

from asynctask import AsyncTask, current_job
from asynctask.clock import SECOND
from asynctask.database.tables import task_tallies, tasks
from asynctask.errors import InputError
from asynctask.ledger import lending, processes, queries
from asynctask.operations import BacklogPart, QueueInfo
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")


def rows(app: AsyncTask, queue: str = "default") -> list[tuple[str | None, int | None, int]]:
    (found,) = app.operations.queues(only=queue)
    assert found["waiting"] == sum(each["waiting"] for each in found["backlog"])
    return [(each["worker"], each["priority"], each["waiting"]) for each in found["backlog"]]


def dispatched(app: AsyncTask, free: int, queue: str = "default") -> int:
    """Borrows as many jobs as a process with so many idle threads."""
    borrowed = 0
    with app.ledger.database.read() as connection:
        offers = lending.pick(connection, app.ledger, [queue])
    for offer in offers:
        borrowed += lending.borrow(app.ledger, offer, free - borrowed).count
    return borrowed


def opened(app: AsyncTask, count: int, *, finished: bool = False) -> None:
    """So many Tasks of nine jobs, of which none is dispatched; their ids are beyond those that the database gives."""
    with app.ledger.database.write() as connection:
        last = connection.execute(sa.select(sa.func.max(tasks.c.id)).where(tasks.c.id > 10**6)).scalar() or 10**6
        common = {
            "worker_name": "note", "queue": "default", "split_state": "sealed", "priority": 240, "created_at": 1,
            "updated_at": 1, "generation_sealed": 1, "created_jobs": 9, "state": "finished" if finished else "running",
            "finished_at": 1 if finished else None, "ready": None if finished else 240,
        }  # fmt: skip
        ids = range(last + 1, last + count + 1)
        connection.execute(tasks.insert(), [{**common, "id": i} for i in ids])
        connection.execute(task_tallies.insert(), [{"task_id": i, "slot": 0, "enqueue": 9, "jobs": 9} for i in ids])


# -- what waits


def oldest_s(found: QueueInfo | BacklogPart) -> float:
    assert found["oldest_s"] is not None
    return found["oldest_s"]


@pytest.mark.each_database(reason="the look-ups are planned by each one")
def test_what_waits_is_counted_without_a_look_at_its_events(world: World) -> None:
    app = world.app()

    def read(connection: Any) -> list[queries.Backlog]:
        return queries.backlog(connection, app.clock.now())

    app.submit("note", numbers(50))
    opened(app, 200)
    analyze(app.ledger.database)
    before = cost(app.ledger.database, read)
    app.submit("note", numbers(4_000))
    opened(app, 3_000, finished=True)
    analyze(app.ledger.database)
    assert cost(app.ledger.database, read) <= before * 1.1 + 20
    with app.ledger.database.read() as connection:
        assert [(each.worker, each.waiting) for each in read(connection)] == [("note", 50 + 4_000 + 200 * 9)]


@pytest.mark.each_database(reason="the look-ups are planned by each one")
def test_ten_thousand_open_tasks_are_counted_and_no_more(world: World) -> None:
    app = world.app()
    opened(app, queries.MOST_TASKS)
    with app.ledger.database.read() as connection:
        (found,) = queries.backlog(connection, app.clock.now())
    assert found.waiting == 9 * queries.MOST_TASKS
    opened(app, 50)
    with app.ledger.database.read() as connection:
        (found,) = queries.backlog(connection, app.clock.now())
    assert found.waiting == 9 * queries.MOST_TASKS


@pytest.mark.each_database(reason="the sums are each one's own")
def test_only_what_could_start_waits_in_the_ledger_or_dispatched(world: World) -> None:
    app = world.app()
    app.submit("note", numbers(30), priority=7)
    assert rows(app) == [("note", 7, 30)]
    assert dispatched(app, 10) == 10
    assert rows(app) == [("note", 7, 30)], "a job that is lent is not counted twice"
    paused = app.submit("brief", numbers(20))
    paused.pause()
    first = app.submit("note", numbers(3), session="s", priority=9)
    second = app.submit("note", numbers(5), session="s", priority=9)
    assert rows(app) == [("note", 7, 30), ("note", 9, 3)]
    first.cancel()
    wait_for(lambda: ("note", 9, 5) in rows(app), "the session has passed on")
    assert second.progress()["state"] == "running"


@pytest.mark.each_database(reason="the sums are each one's own")
def test_retries_wait_once_they_are_due_and_are_as_old_as_that(world: World) -> None:
    app = world.app()
    task = app.submit("shaky", numbers(4, breaks=1))
    with world.working(app):
        task.wait(timeout=60)
    later = app.submit("shaky", numbers(6))
    now = app.clock.now()
    world.sql("UPDATE tasks SET next_seq = 6 WHERE id = ?", later.id)
    world.sql("UPDATE events SET due_at = ?, retries = 1 WHERE task_id = ? AND seq < 4", now + 3_600 * SECOND, later.id)
    world.sql("UPDATE events SET due_at = ?, retries = 1 WHERE task_id = ? AND seq = 4", now - 50 * SECOND, later.id)
    world.sql("UPDATE task_tallies SET retrying = 5 WHERE task_id = ?", later.id)
    (found,) = app.operations.queues()
    assert found["waiting"] == 2, "one never ran, one is due"
    assert 50 <= oldest_s(found) < 3_000


def test_the_age_is_that_of_the_job_at_the_pointer(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(10))
    world.sql("UPDATE events SET created_at = created_at - ? WHERE task_id = ? AND seq = 0", 900 * SECOND, task.id)
    world.sql("UPDATE events SET created_at = created_at - ? WHERE task_id = ? AND seq = 4", 90 * SECOND, task.id)
    assert oldest_s(app.operations.queues()[0]) >= 900
    dispatched(app, 4)
    (part,) = app.operations.queues()[0]["backlog"]
    assert 90 <= oldest_s(part) < 900
    again = app.submit("note", [{"n": 1, "bug": True}], priority=1)
    with world.working(app):
        again.wait(timeout=60)
        task.wait(timeout=60)
    world.sql("UPDATE events SET created_at = created_at - ? WHERE task_id = ?", 900 * SECOND, again.id)
    again.retry()
    (found,) = app.operations.queues()
    assert (found["waiting"], oldest_s(found) < 900) == (1, True), "it waits since it was retried"


@pytest.mark.each_database(reason="the sums are each one's own")
def test_jobs_without_a_task_wait_once_they_are_due(world: World) -> None:
    app = world.app()
    note = app.workers["note"]
    note.perform_in(3_600, {"n": 0})
    assert app.operations.queues() == []
    for n in range(3):
        note.perform_async({"n": n})
    note.set(queue="apart").perform_async({"n": 9})
    assert sum(count for *_, count in rows(app)) == 3
    assert sum(count for *_, count in rows(app, "apart")) == 1
    world.sql("UPDATE events SET due_at = due_at - ? WHERE queue = 'apart'", 70 * SECOND)
    (apart,) = app.operations.queues(only="apart")
    assert (apart["length"], apart["unattended"], apart["workers_wanted"]) == (0, True, 1)
    assert oldest_s(apart) >= 70
    assert [each["name"] for each in app.operations.queues()] == ["apart", "default"]


# -- untracked jobs


@pytest.mark.parametrize("kind", ["sql", "redis"])
def test_untracked_jobs_count_once_beside_those_of_tasks(request: pytest.FixtureRequest, world: World, kind: str) -> None:
    if kind == "redis":
        server = request.getfixturevalue("redis_server")
        with server.client() as client:
            client.flushall()
        world.broker_url = server.url
    app = world.app()
    push(app, [untracked(n) for n in range(7)])
    app.submit("note", numbers(20))
    assert dispatched(app, 12) > 0
    found = rows(app)
    assert ("note", app.workers["note"].priority, 20) in found or ("note", 240, 20) in found
    assert sum(count for *_, count in found) == 27
    (queue,) = app.operations.queues()
    assert queue["waiting"] == 27 > queue["length"]


@pytest.mark.each_database(reason="the sums are each one's own")
def test_slices_wait_as_jobs_whatever_their_items_came_to(world: World) -> None:
    app = world.app()
    ready, pause = threading.Semaphore(0), threading.Event()

    @app.worker
    def first_goes(item: dict[str, Any]) -> None:
        if item["n"] % 10 == 3:  # it ends with the process, as the fourth of its slice
            ready.release()
            while not current_job().should_stop():
                pause.wait(0.01)

    task = app.submit(first_goes, numbers(95), chunk_size=10)
    priority = first_goes.priority
    assert rows(app) == [("first_goes", priority, 10)]
    assert dispatched(app, 3) == 3
    assert rows(app) == [("first_goes", priority, 10)], "three of them are lent"
    with world.working(app, concurrency=2):
        assert all(ready.acquire(timeout=60) for _ in range(2))
        wait_for(lambda: rows(app) == [("first_goes", priority, 8)], "two are at work")
    assert task.progress()["counts"]["finish"] == 8
    assert rows(app) == [("first_goes", priority, 10)], "both wait again, each with its last items"
    assert app.doctor() == []


# -- how many workers


def test_workers_are_wanted_by_the_rate_that_the_heartbeats_say(world: World) -> None:
    app = world.app()
    assert app.operations.queues() == []
    (empty,) = app.operations.queues(only="default")
    assert (empty["waiting"], empty["oldest_s"], empty["rate_per_s"], empty["workers_wanted"]) == (0, None, 0.0, 0)
    app.submit("note", numbers(100))
    (found,) = app.operations.queues()
    assert found["workers_wanted"] == 1, "nobody knows how fast they are"
    processes.register(app.ledger, app.host, kind="worker", pid=1, lease_s=60, concurrency=4, queues=["default"])
    processes.beat(app.ledger, lease_s=60, busy=4, info='{"pace": 0.5}')
    (found,) = app.operations.queues(target_s=50)
    assert (found["rate_per_s"], found["workers_wanted"], found["processes"]) == (0.5, 4, 1)
    for wrong in (0, 0.5, 86_401, float("nan")):
        with pytest.raises(InputError, match="target_s"):
            app.operations.queues(target_s=wrong)
    app.submit("brief", numbers(1_000), parallel=2, queue="default")
    (found,) = app.operations.queues(target_s=50)
    assert (found["waiting"], found["limited"]) == (1_100, 1_000)
    assert found["workers_wanted"] == 5, "no more threads than its Task may use"
