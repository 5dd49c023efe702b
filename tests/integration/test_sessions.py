"""Sessions with real workers and through the ledger: who holds one, who waits, and who goes next."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from support import borrowing
from support.borrowing import borrow
from support.world import World

from asynctask import AsyncTask
from asynctask.core.states import Reason
from asynctask.errors import InputError
from asynctask.ledger import control, doctor, lending
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.recorder import Kind
from asynctask.ledger.tasks import try_close
from asynctask.task import TaskHandle
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")


def numbers(first: int, count: int) -> list[dict[str, int]]:
    return [{"n": n} for n in range(first, first + count)]


def holder(world: World) -> int | None:
    found = world.sql("SELECT id FROM tasks WHERE session_holder IS NOT NULL")
    return int(found[0][0]) if found else None


def reason(task: TaskHandle) -> Any:
    return task.progress()["state_reason"]


def finish(app: AsyncTask, task: TaskHandle, **more: Any) -> None:
    """All jobs of a Task go out and end."""
    for job in borrow(app.ledger, task.id):
        borrowing.end(app.ledger, job, **more)


def test_tasks_of_a_session_run_one_after_the_other_and_others_meanwhile(world: World) -> None:
    app = world.app()
    first = app.submit("note", numbers(0, 30), session="user:1")
    second = app.submit("note", numbers(100, 30), session="user:1")
    alone = app.submit("note", numbers(200, 30))
    assert reason(second) == "waiting_for_session"
    assert second.progress()["control"]["session"] == "user:1"
    assert reason(first) is None
    with world.working(app), world.working(world.app()):
        for task in (first, second, alone):
            assert task.wait(120)["done"]
    did = [int(words[1]) for words in world.shop.lines() if words[0] == "did" and int(words[1]) < 200]
    assert max(did.index(n) for n in range(30)) < min(did.index(n) for n in range(100, 130))
    world.check_promises(app, [first.id, second.id, alone.id], 90)


@pytest.mark.each_database(reason="each locks and sorts in its own way")
def test_the_smaller_priority_goes_first_then_the_order_submitted(world: World) -> None:
    app = world.app()
    tasks = [app.submit("note", numbers(0, 1), session="s", priority=priority) for priority in (5, 5, 9, 5, 1)]
    order = []
    while (held := holder(world)) is not None:
        order.append(held)
        finish(app, app.task(held))
    assert order == [tasks[0].id, tasks[4].id, tasks[1].id, tasks[3].id, tasks[2].id]


def test_the_same_name_of_another_owner_is_another_session(world: World) -> None:
    app = world.app()
    one = app.submit("note", numbers(0, 1), session="import", owner="ann")
    other = app.submit("note", numbers(0, 1), session="import", owner="bob")
    assert reason(one) is None
    assert reason(other) is None


def test_a_paused_task_holds_its_session_and_one_that_is_paused_in_line_is_passed_over(world: World) -> None:
    app = world.app()
    first, second, third = (app.submit("note", numbers(0, 2), session="s") for _ in range(3))
    first.pause()
    assert holder(world) == first.id
    second.pause()
    first.resume()
    finish(app, first)
    assert holder(world) == third.id
    assert reason(second) is None
    second.resume()
    assert reason(second) == "waiting_for_session"
    finish(app, third)
    assert holder(world) == second.id


def test_a_session_passes_on_when_only_retries_are_left_and_the_retried_one_joins_at_the_end(world: World) -> None:
    app = world.app()
    first, second, third = (app.submit("note", numbers(0, 1), session="s") for _ in range(3))
    due = app.clock.now() + 3_600_000_000
    (job,) = borrow(app.ledger, first.id, 9)
    borrowing.end(app.ledger, job, kind=Kind.RETRY, retry_at=due)
    assert holder(world) == second.id
    assert reason(first) is None
    assert first.progress()["retrying"] == 1
    world.sql("UPDATE events SET due_at = 1 WHERE task_id = ?", first.id)
    world.sql("UPDATE tasks SET due_next = 1 WHERE id = ?", first.id)
    assert lending.rejoin(app.ledger) == 1
    assert reason(first) == "waiting_for_session"
    finish(app, second)
    assert holder(world) == third.id, "it joined at the end"
    finish(app, third)
    assert holder(world) == first.id
    finish(app, first)
    assert holder(world) is None
    assert first.progress()["done"]


def test_an_explicit_retry_joins_the_line_at_the_end(world: World) -> None:
    app = world.app()
    first, second = (app.submit("note", [{"n": 0, "refuse": True}], session="s") for _ in range(2))
    (job,) = borrow(app.ledger, first.id, 9)
    borrowing.end(app.ledger, job, kind=Kind.FAILED)
    assert holder(world) == second.id
    third = app.submit("note", numbers(0, 1), session="s")
    assert first.retry()
    assert reason(first) == "waiting_for_session"
    finish(app, second)
    assert holder(world) == third.id
    finish(app, third)
    assert holder(world) == first.id


def test_cancelled_and_rejected_tasks_pass_on(world: World) -> None:
    app = world.app()
    first, second, third = (app.submit("note", numbers(0, 2), session="s") for _ in range(3))
    second.cancel()
    assert holder(world) == first.id
    first.cancel()
    assert holder(world) == third.id
    empty = task_rows.create(
        app.ledger, [task_rows.First(task_rows.NewTask("note", "default", 1, session="t"))], lease_s=60
    )[0].task_id
    waiting = app.submit("note", numbers(0, 1), session="t")
    assert reason(waiting) == "waiting_for_session", "a Task that is being split holds its session"
    task_rows.end_split(app.ledger, empty, Reason.SEALED)
    assert reason(waiting) is None


def test_a_cancelled_task_passes_on_when_the_last_of_its_jobs_has_ended(world: World) -> None:
    app = world.app()
    first, second = (app.submit("note", numbers(0, 1), session="s") for _ in range(2))
    (job,) = borrow(app.ledger, first.id, 9)
    control.cancel_task(app.ledger, first.id)
    while control.change_rows(app.ledger, first.id):
        pass
    assert not try_close(app.ledger, first.id)
    assert holder(world) == first.id
    borrowing.end(app.ledger, job)
    assert holder(world) == second.id


@pytest.mark.each_database(reason="each locks and sorts in its own way")
def test_of_many_that_give_a_session_away_at_once_one_does(world: World) -> None:
    app = world.app()
    tasks = [app.submit("note", numbers(0, 1), session="s") for _ in range(6)]
    for _ in range(4):
        world.sql("UPDATE tasks SET session_holder = NULL, session_waits = 240")
        world.sql("UPDATE tasks SET ready = NULL")
        start = threading.Barrier(4)

        def give(own: AsyncTask = app, start: threading.Barrier = start) -> None:
            start.wait()
            doctor.mend(own.ledger)

        threads = [threading.Thread(target=give) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert world.sql("SELECT id FROM tasks WHERE session_holder IS NOT NULL") == [(tasks[0].id,)]
        assert world.sql("SELECT id FROM tasks WHERE ready IS NOT NULL") == [(tasks[0].id,)]


@pytest.mark.each_database(reason="each locks and sorts in its own way")
def test_maintenance_finds_a_session_without_a_holder_and_a_task_without_its_hint(world: World) -> None:
    """What is left when a process dies between a commit and what should follow it."""
    app = world.app()
    first, second = (app.submit("note", numbers(0, 2), session="s") for _ in range(2))
    alone = app.submit("note", numbers(0, 2))
    world.sql("UPDATE tasks SET session_holder = NULL, session_waits = NULL WHERE id = ?", first.id)
    world.sql("UPDATE tasks SET ready = NULL")
    app.maintenance(app.ledger).find_lost()
    assert holder(world) == second.id
    with world.working(app):
        wait_for(lambda: all(t.progress()["done"] for t in (first, second, alone)), "everything is done")


@pytest.mark.parametrize("session", ["", " ", "x" * 256])
def test_a_session_has_a_name_of_1_to_255_characters(world: World, session: str) -> None:
    with pytest.raises(InputError, match="session"):
        world.app().submit("note", numbers(0, 1), session=session)


def test_the_session_of_a_task_cannot_be_changed(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(0, 1), session="s")
    with pytest.raises(InputError, match="session"):
        task.update(session="t")
