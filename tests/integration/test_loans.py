"""Loans beside everything else: recovery, a stalled process, cancel, single jobs, the doctor, sessions, paused queues."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from support.world import World, numbers

from asynctask import AsyncTask
from asynctask.database.tables import events, loans, places, tasks
from asynctask.errors import Conflict
from asynctask.ledger import control, doctor, lending, processes, sessions
from asynctask.ledger.base import Ledger
from asynctask.ledger.recorder import Kind, Outcome, Recorder
from asynctask.task import TaskHandle

pytestmark = pytest.mark.each_database(reason="each locks in its own way")


def offers(ledger: Ledger) -> dict[int, lending.Offer]:
    with ledger.database.read() as connection:
        return {each.task_id: each for each in lending.pick(connection, ledger, ["default"])}


def borrow(ledger: Ledger, task: TaskHandle, count: int) -> lending.Borrowed:
    return lending.borrow(ledger, offers(ledger)[task.id], count)


def rows(world: World, task: TaskHandle) -> list[tuple[Any, ...]]:
    wanted = "SELECT status, attempt, due_at IS NOT NULL, process FROM events WHERE task_id = ? ORDER BY seq"
    return [tuple(row) for row in world.sql(wanted, task.id)]


def table(app: AsyncTask, which: sa.Table) -> list[Any]:
    with app.ledger.database.read() as connection:
        return list(connection.execute(sa.select(which)).mappings())


def test_the_rows_of_a_dead_process_wait_again_and_its_loans_and_places_go(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(10), parallel=5)
    dead = app.ledger.under("dead")
    assert lending.lease_places(dead, task.id, 3, 0).places == 3
    assert borrow(dead, task, 4).count == 4
    with app.ledger.database.read() as connection:
        assert processes.unknown_workers(connection) == {"dead"}
    assert len(processes.recover_events(app.ledger, "dead")) == 4
    assert processes.recover_events(app.ledger, "dead") == []
    assert table(app, loans) == []
    assert table(app, places) == []
    assert [row[:3] for row in rows(world, task)] == [("enqueue", 2, 1)] * 4 + [("enqueue", 1, 0)] * 6
    again = borrow(app.ledger, task, 10)
    assert len(again.claimed) == 4
    assert again.count == 10


def test_a_retry_that_another_process_runs_is_not_recovered_with_the_loan_that_it_was_in(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(3))
    dead, other = app.ledger.under("dead"), app.ledger.under("other")
    borrow(dead, task, 3)
    event_id = world.sql("SELECT MIN(id) FROM events WHERE task_id = ?", task.id)[0][0]
    with app.ledger.database.write() as connection:  # recorded by the first process as to be retried
        connection.execute(events.update().where(events.c.id == event_id).values(attempt=2, due_at=1, retries=1))
        connection.execute(tasks.update().where(tasks.c.id == task.id).values(due_next=1))
    assert [job.event_id for job in borrow(other, task, 1).claimed] == [event_id]
    assert len(processes.recover_events(app.ledger, "dead")) == 2
    assert rows(world, task)[0] == ("enqueue", 2, 0, "other")


def test_a_stalled_process_loses_what_it_has_not_begun_and_keeps_what_runs(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(6), parallel=4)
    stalled = app.ledger.under("stalled")
    lending.lease_places(stalled, task.id, 4, 0)
    lent = borrow(stalled, task, 4)
    first = lent.loans[0][1][0]
    with app.ledger.database.write() as connection:
        connection.execute(events.update().where(events.c.id == first.event_id).values(status="working", process="stalled"))
    assert len(processes.take_unbegun(app.ledger, "stalled")) == 3
    assert [row[:3] for row in rows(world, task)] == [("working", 1, 0), *[("enqueue", 2, 1)] * 3, *[("enqueue", 1, 0)] * 2]
    assert [(each["process"], each["n"]) for each in table(app, places)] == [("stalled", 1)]
    assert world.sql("SELECT watched, deaths FROM events ORDER BY seq") == [(0, 0), *[(1, 0)] * 3, *[(0, 0)] * 2]


def test_a_process_is_stalled_when_its_supervisor_says_so_and_until_it_beats(world: World) -> None:
    """An old heartbeat says nothing: after an outage of the database everybody's is old."""
    app = world.app()
    held = app.ledger.under("held")
    processes.register(held, app.host, kind="worker", pid=1, lease_s=60, concurrency=2)

    def stalled() -> list[str]:
        with app.ledger.database.read() as connection:
            return processes.stalled(connection)

    processes.renew(app.ledger.database, {"held": []}, lease_s=60)
    assert stalled() == [], "it has beaten since its supervisor last heard of it"
    world.sql("UPDATE processes SET beat_at = 1")
    assert stalled() == []
    processes.renew(app.ledger.database, {"held": []}, lease_s=60)
    assert stalled() == ["held"]
    task = app.submit("note", numbers(4))
    borrow(held, task, 2)
    app.maintenance(app.ledger).take_stalled()
    assert [row[:3] for row in rows(world, task)] == [("enqueue", 2, 1)] * 2 + [("enqueue", 1, 0)] * 2
    assert processes.beat(held, lease_s=60) is None
    assert stalled() == []


def test_cancel_leaves_what_is_lent_and_turns_it_once_it_is_given_back(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(10))
    lent = borrow(app.ledger, task, 4)
    assert control.cancel_task(app.ledger, task.id)
    while control.change_rows(app.ledger, task.id):
        pass
    assert [row[0] for row in rows(world, task)] == ["enqueue"] * 4 + ["cancelled"] * 6
    assert task.progress()["control"]["in_flight"] == 4
    lending.give_back(app.ledger, [(lent.loans[0][0], 0)])
    with app.ledger.database.read() as connection:
        assert control.changing_tasks(connection) == [(task.id, "cancel")]
    while control.change_rows(app.ledger, task.id):
        pass
    assert task.progress()["counts"]["cancelled"] == 10
    assert table(app, loans) == []
    with app.ledger.database.read() as connection:
        assert control.changing_tasks(connection) == []


def test_a_single_job_is_cancelled_or_stopped_where_it_waits_and_its_holder_is_asked(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(4))
    ids = [str(job_id) for (job_id,) in world.sql("SELECT job_id FROM events WHERE task_id = ? ORDER BY seq", task.id)]
    borrow(app.ledger, task, 2)
    with pytest.raises(Conflict):
        app.operations.act_on_job(ids[0], "delete")
    assert app.operations.act_on_job(ids[2], "delete")["status"] == "cancelled"
    assert app.operations.stop_job(ids[1])["stopping"]
    assert [each["asked"] is not None for each in table(app, loans)] == [True]
    assert app.operations.stop_job(ids[3])["status"] == "stopped"
    assert app.operations.start_job(ids[3])["status"] == "enqueue"


def test_the_doctor_finds_and_mends_loans(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(10))
    other = app.ledger.under("nobody")
    borrow(other, task, 4)
    with app.ledger.database.write() as connection:
        at = app.ledger.now()
        connection.execute(loans.insert(), {"task_id": task.id, "low": 2, "high": 4, "process": None, "at": at})
        connection.execute(tasks.update().where(tasks.c.id == task.id).values(next_seq=6))
    found = {each.code for each in doctor.examine(app.ledger)}
    assert found == {"loans", "unreachable", "holders"}
    doctor.examine(app.ledger, repair=True)
    assert doctor.examine(app.ledger) == []
    assert borrow(app.ledger, task, 20).count == 10


def test_a_session_passes_on_only_when_nothing_is_lent(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(2), session="s")
    second = app.submit("note", numbers(1), session="s")
    lent = borrow(app.ledger, task, 2)
    later = app.ledger.now() + 86_400_000_000
    recorder = Recorder(app.ledger)
    jobs = lent.loans[0][1]
    recorder.flush([Outcome(jobs[0].event_id, 1, Kind.RETRY, retry_at=later)])
    assert not sessions.step_aside(app.ledger, task.id)
    recorder.flush([Outcome(jobs[1].event_id, 1, Kind.RETRY, retry_at=later)])
    with app.ledger.database.write() as connection:
        connection.execute(loans.delete())
    sessions.step_aside(app.ledger, task.id)
    assert second.id in offers(app.ledger)
    assert task.id not in offers(app.ledger)


def test_a_paused_queue_offers_no_task_limited_or_not(world: World) -> None:
    app = world.app()
    one, other = app.submit("note", numbers(2)), app.submit("note", numbers(2), parallel=1)
    assert app.operations.pause("default")
    assert not app.operations.pause("default")
    assert offers(app.ledger) == {}
    assert [each["paused"] for each in app.operations.queues() if each["name"] == "default"] == [True]
    assert app.operations.unpause("default")
    assert offers(app.ledger).keys() == {one.id, other.id}


def test_a_knob_settles_the_hints_and_moves_the_priority(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(2))
    control.update(app.ledger, task.id, {"priority": 7})
    assert world.sql("SELECT ready FROM tasks WHERE id = ?", task.id) == [(7,)]
    control.pause(app.ledger, task.id)
    assert offers(app.ledger) == {}
    control.resume(app.ledger, task.id)
    assert offers(app.ledger)[task.id].priority == 7
