"""Somebody holds the row of one Task, for as long as he likes: it costs that Task alone."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.world import World, numbers

from asynctask import AsyncTask
from asynctask.database.retrying import LockTimeout
from asynctask.errors import NotFound
from asynctask.ledger import base, doctor, lending, processes
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger
from asynctask.ledger.recorder import Kind, Outcome, Recorder
from asynctask.ledger.tasks import try_close
from asynctask.task import TaskHandle
from asynctask.testing import wait_for

pytestmark = [
    pytest.mark.databases("postgresql", "mariadb", reason="on SQLite the file is locked, not a row"),
    pytest.mark.one_database(reason="how each says that a row is held is proved by those that run on each"),
]


@contextmanager
def holding(world: World, *task_ids: int) -> Iterator[None]:
    """A stranger's transaction that holds these Tasks' rows while the block runs."""
    connection = world.store._connect()
    cursor = connection.cursor()
    try:
        cursor.execute("BEGIN")
        cursor.execute(f"SELECT id FROM tasks WHERE id IN ({', '.join(map(str, task_ids))}) FOR UPDATE")
        cursor.fetchall()
        yield
        cursor.execute("ROLLBACK")
    finally:
        connection.close()


def column(world: World, name: str, task_id: int) -> Any:
    return world.one(f"SELECT {name} FROM tasks WHERE id = ?", task_id)


def borrowed(ledger: Ledger, task_id: int, count: int) -> list[lending.Job]:
    """So many jobs of a Task, lent to the process of this ledger."""
    with ledger.database.read() as connection:
        (offer,) = [each for each in lending.pick(connection, ledger, ["default"]) if each.task_id == task_id]
    return [job for _, jobs in lending.borrow(ledger, offer, count).loans for job in jobs]


def locks(ledger: Ledger, task_id: int) -> bool:
    """Whether a transaction gets the lock of a Task's row."""
    with ledger.database.write() as connection:
        return base.try_lock(connection, ledger, task_id) is not None


def records(ledger: Ledger, jobs: list[lending.Job], kind: Kind = Kind.FINISH, retry_at: int | None = None) -> None:
    Recorder(ledger).flush([Outcome(job.event_id, job.attempt, kind, retry_at=retry_at) for job in jobs])


NOBODY = 2**22 + 1
"""A pid that no process of this machine has: they end at 2**22."""


def dies_with(app: AsyncTask, task_id: int, count: int) -> str:
    """A process that borrowed jobs of a Task, and died."""
    ledger = Ledger(app.ledger.database, identity=f"dead-{task_id}")
    processes.register(ledger, app.host, kind="worker", pid=NOBODY, lease_s=60)
    assert len(borrowed(ledger, task_id, count)) == count
    return ledger.identity


@pytest.mark.each_database(reason="each locks in its own way")
def test_a_row_that_somebody_holds_costs_its_task_alone(world: World) -> None:
    """Everything of B goes on while A is held, by a worker with all its threads; then A goes on, too."""
    app = world.app(lease_s=20.0)
    held = app.submit("note", numbers(30), parallel=2)
    good = app.submit("note", numbers(30), parallel=2)
    dead = [dies_with(app, task.id, 2) for task in (held, good)]
    with holding(world, held.id), world.working(app):
        late = app.submit("note", numbers(5))
        assert good.pause()
        assert good.resume()
        good.update(priority=100)
        for task in (good, late):
            assert task.wait(120)["state"] == "finished"
        assert not world.sql("SELECT 1 FROM processes WHERE identity LIKE 'dead-%'"), "both were recovered"
        assert len(dead) == 2
        assert held.progress()["counts"]["finish"] == 0
    with world.working(app):
        assert held.wait(120)["state"] == "finished"
    world.check_promises(app, [held.id, good.id, late.id], 65)


def test_what_was_on_its_way_when_the_row_was_taken_is_recorded_and_told_when_it_is_let_go(world: World) -> None:
    """The recorder does not wait; the hint and the close come within a second after the row is free."""
    app = world.app()
    task, other = app.submit("gated", numbers(4), parallel=2), app.submit("gated", [{"n": 10}, {"n": 11}])
    with world.working(app):
        wait_for(lambda: len(world.shop.performed("began")) == 4, "jobs of both run")
        with holding(world, task.id):
            world.open_gate()
            assert other.wait(120)["done"]
            wait_for(lambda: task.progress()["counts"]["finish"] == 2, "outcomes of the held one are recorded")
        assert task.wait(120)["done"]
    world.check_promises(app, [task.id, other.id], 6)


def test_who_waited_in_vain_does_not_wait_again_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    app = world.app()
    tasks = [app.submit("note", numbers(2)) for _ in range(2)]
    monkeypatch.setattr(base, "AGAIN_S", 3600.0)
    waits: list[int] = []
    wait = base._wait

    def counting(connection: Any, task_id: int) -> Any:
        waits.append(task_id)
        return wait(connection, task_id)

    monkeypatch.setattr(base, "_wait", counting)
    with holding(world, tasks[0].id):
        for _ in range(3):
            assert not locks(app.ledger, tasks[0].id)
        assert locks(app.ledger, tasks[1].id)
        assert waits == [tasks[0].id]
    assert locks(app.ledger, tasks[0].id)


@pytest.mark.each_database(reason="each locks in its own way")
def test_who_holds_a_row_for_a_moment_is_waited_for(world: World) -> None:
    """As transactions of this program do: the one behind stands in the line, and loses nothing by it."""
    app = world.app()
    task = app.submit("note", numbers(2))
    locked, asked = threading.Event(), threading.Event()

    def briefly() -> None:
        with app.ledger.database.write() as connection:
            task_rows.lock(connection, task.id)
            locked.set()
            assert asked.wait(120)

    thread = threading.Thread(target=briefly)
    thread.start()
    assert locked.wait(120)
    wait = base._wait

    def waiting(*args: Any) -> Any:
        asked.set()
        return wait(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "PATIENCE_S", 20.0)
        patch.setattr(base, "_wait", waiting)
        patch.setattr(base, "_LOCK_MARIADB", base._ONE.with_for_update())
        assert locks(app.ledger, task.id)
    thread.join(120)


def test_hints_of_held_tasks_are_kept_and_given_by_the_next_round(world: World) -> None:
    app = world.app()
    ledger = app.ledger
    retried = app.submit("note", numbers(1))
    jobs = borrowed(ledger, retried.id, 1)
    with holding(world, retried.id):
        records(ledger, jobs, Kind.RETRY, retry_at=ledger.now() + 3_600_000_000)
        assert ledger.held.keeps
        lending.catch_up(ledger)
        assert ledger.held.keeps, "nobody has let go"
    lending.catch_up(ledger)
    assert column(world, "due_next", retried.id) is not None
    assert not ledger.held.keeps


@pytest.mark.each_database(reason="each locks in its own way")
def test_of_hints_that_are_mended_a_held_one_keeps_no_other(world: World) -> None:
    app = world.app()
    tasks = [app.submit("note", numbers(1)) for _ in range(3)]
    world.sql("UPDATE tasks SET ready = NULL, due_next = NULL")
    with holding(world, tasks[1].id):
        doctor.mend(app.ledger)
        assert [column(world, "ready", task.id) is None for task in tasks] == [False, True, False]
    doctor.mend(app.ledger)
    assert column(world, "ready", tasks[1].id) is not None


def test_a_session_goes_on_when_the_first_in_its_line_is_let_go_and_nobody_overtakes_it(world: World) -> None:
    app = world.app()
    first, second, third = (app.submit("note", numbers(1), session="s") for _ in range(3))
    jobs = borrowed(app.ledger, first.id, 1)
    with holding(world, second.id):
        records(app.ledger, jobs)
        assert first.progress()["state"] == "finished", "that it is over does not wait for the next one"
        lending.catch_up(app.ledger)
        assert column(world, "session_holder", third.id) is None
    lending.catch_up(app.ledger)
    assert column(world, "session_holder", second.id) is not None


def test_maintenance_leaves_held_tasks_and_does_the_others(world: World) -> None:
    app = world.app()
    both = [app.submit("note", numbers(1)) for _ in range(2)]
    for task in both:
        jobs = borrowed(app.ledger, task.id, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("asynctask.ledger.recorder.try_close", lambda *args: False)
            patch.setattr("asynctask.ledger.recorder.close_small", lambda *args: [])
            records(app.ledger, jobs)
    maintenance = app.maintenance(app.ledger)
    with holding(world, both[0].id):
        maintenance.close()
        assert [task.progress()["done"] for task in both] == [False, True]
        assert not try_close(app.ledger, both[0].id)
    maintenance.close()
    assert both[0].progress()["done"]


@pytest.mark.each_database(reason="each locks in its own way")
def test_a_purge_leaves_what_a_held_task_sums_and_removes_the_others(world: World) -> None:
    app = world.app()

    def sheet(text: str, **options: Any) -> TaskHandle:
        return app.submit_file("order", app.uploads.store(io.BytesIO(text.encode()), "list.csv"), **options)

    top, corrected = app.submit("note", numbers(1), open=True), sheet("n,kind\n1,refuse\n")
    child, other = app.submit("note", numbers(1), parent=top.id), app.submit("note", numbers(1))
    with world.working(app):
        corrected.wait(60)
        correction = sheet("n,kind,row\n1,ok,2\n", resubmit_of=corrected.id)
        for task in (child, other, correction):
            task.wait(60)
    with holding(world, top.id), holding(world, corrected.id):
        assert app.purge(0).tasks == 1
        with pytest.raises(NotFound):
            other.progress()
    assert app.purge(0).tasks == 3
    assert [each["task_id"] for each in app.tasks()] == [top.id]


def test_a_split_whose_task_is_held_is_not_taken_up_again_and_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    app = world.app()
    both = [app.submit("note", numbers(1)) for _ in range(2)]
    world.sql("UPDATE tasks SET split_state = 'splitting', state = 'splitting', split_until = 1, split_source = '{}'")
    taken: list[int] = []
    monkeypatch.setattr(app, "resume_split", taken.append)
    maintenance = app.maintenance(app.ledger)
    with holding(world, both[0].id):
        maintenance.resume_splits()
        assert taken == [both[1].id]
        world.sql("UPDATE tasks SET split_source = NULL WHERE id = ?", both[1].id)
    maintenance.resume_splits()
    assert taken == [both[1].id, both[0].id]
    assert column(world, "split_state", both[1].id) == "failed"


@pytest.mark.each_database(reason="each locks in its own way")
def test_a_user_who_acts_on_a_held_task_is_told_why_it_failed_and_waits_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = world.app()
    task = app.submit("note", numbers(1))
    begin = type(app.ledger.database)._begin
    begun: list[int] = []

    def short(database: Any, connection: Any) -> Any:
        mark = begin(database, connection)
        begun.append(1)
        words = {"postgresql": "SET LOCAL lock_timeout = '50ms'", "mariadb": "SET innodb_lock_wait_timeout = 1"}
        connection.exec_driver_sql(words[world.store.kind])
        return mark

    monkeypatch.setattr(type(app.ledger.database), "_begin", short)
    with holding(world, task.id), pytest.raises(LockTimeout, match="somebody else holds a row"):
        task.pause()
    assert begun == [1]
