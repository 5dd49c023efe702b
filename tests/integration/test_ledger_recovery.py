"""Processes and their leases, lost copies, poison, a ledger that is away, and the bound on what runs at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from support.borrowing import borrow
from support.clocks import SettableClock
from support.foreign import Shop
from support.world import World, numbers

from asynctask import AsyncTask, maintenance
from asynctask.database.engine import Database, database_now
from asynctask.errors import LedgerUnavailable
from asynctask.ledger import control, lending, processes
from asynctask.maintenance import Maintenance
from asynctask.middleware.tracker import Tracker
from asynctask.runtime.pool import Pool
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")


def read_now(database: Database) -> int:
    """The database's time in microseconds."""
    with database.read() as connection:
        return int(connection.execute(sa.select(database_now(database.dialect))).scalar_one())


def maintenance_of(app: AsyncTask) -> Maintenance:
    return app.maintenance(app.ledger)


def registered(app: Any, **values: Any) -> None:
    """A process of this name, that runs (its pid is this test's)."""
    processes.register(app.ledger, app.host, kind="worker", pid=os.getpid(), **{"lease_s": 60.0, **values})


def holding(world: World, app: Any, count: int) -> Any:
    """A Task of which this application, as a process, holds every job and has begun none."""
    task = app.submit("note", numbers(count))
    registered(app, concurrency=count, queues=("default",))
    assert len(borrow(app.ledger, task.id)) == count
    return task


def pushed(app: Any, count: int) -> tuple[Shop, Any]:
    """A foreign queue that holds a Task of so many jobs."""
    shop = Shop(app, free=count)
    task = app.submit("sold", numbers(count))
    assert app.dispatcher.run_pass() == count
    return shop, task


# -- processes and leases


@pytest.mark.each_database(reason="each locks and compares in its own way")
def test_what_a_process_held_waits_again_when_its_lease_has_ended_and_not_before(world: World) -> None:
    app, late = world.judging(world.app()), world.app()
    task, look = holding(world, late, 3), maintenance_of(app)
    world.sql("UPDATE processes SET hostname = 'elsewhere'")
    assert world.watched(look).recover_dead() == 0
    assert task.progress()["control"]["in_flight"] == 3
    world.end_leases()
    assert look.recover_dead() == 0, "it may have been renewed after that, in a transaction that waits for its commit"
    assert world.watched(look).recover_dead() == 1
    assert task.progress()["control"]["in_flight"] == 0
    assert world.sql("SELECT DISTINCT status, attempt, deaths, watched FROM events") == [("enqueue", 2, 0, 1)]
    assert world.sql("SELECT * FROM loans") == []
    assert app.processes() == []
    assert processes.beat(late.ledger, lease_s=60) == "LOST"
    with world.working(app):
        assert task.wait(120)["done"]
    world.check_promises(app, [task.id], 3)


def test_a_process_of_this_machine_that_is_gone_is_recovered_at_once(world: World) -> None:
    app, dead = world.app(), world.app()
    task = holding(world, dead, 2)
    child = world.spawn("-c", "pass")
    child.wait()
    world.sql("UPDATE processes SET pid = ?, lease_until = ?", child.pid, app.clock.now() + 10**9)
    assert maintenance_of(app).recover_dead() == 1
    assert task.progress()["control"]["in_flight"] == 0


def test_a_pid_that_was_given_to_another_program_is_not_the_process(world: World) -> None:
    app, dead = world.app(), world.app()
    holding(world, dead, 1)
    world.sql("UPDATE processes SET pid_started = pid_started - 1")
    assert maintenance_of(app).recover_dead() == 1


def test_a_process_of_another_machine_is_judged_by_its_lease_alone(world: World) -> None:
    app, far = world.app(), world.app()
    holding(world, far, 1)
    world.sql("UPDATE processes SET hostname = 'elsewhere', pid = 1, pid_started = 1")
    assert maintenance_of(app).recover_dead() == 0


def test_who_has_had_no_answers_for_a_lease_takes_nobody_for_dead(world: World) -> None:
    app, far = world.app(), world.app()
    task = holding(world, far, 1)
    world.end_leases()
    registered(app)
    look = world.watched(maintenance_of(app))
    assert look.recover_dead() == 0, "it may be the database that kept the other from renewing"
    look.recover(far.ledger.identity)
    assert task.progress()["control"]["in_flight"] == 1
    world.judging(app)
    assert look.recover_dead() == 1


def test_a_process_of_this_machine_that_lives_is_never_dead_whatever_its_lease_says(world: World) -> None:
    app, late = world.judging(world.app()), world.app()
    task = holding(world, late, 1)
    world.sql("UPDATE processes SET lease_until = 1")
    look = world.watched(maintenance_of(app))
    assert look.recover_dead() == 0
    look.recover(late.ledger.identity)
    assert task.progress()["control"]["in_flight"] == 1


@contextmanager
def committed_late(app: Any) -> Any:
    """Each write of this application is committed when the lease that it wrote, of 10 ms, is over."""
    write, elsewhere = app.ledger.database.write, Database(app.ledger.database.absolute_url)

    @contextmanager
    def late(**how: Any) -> Any:
        with write(**how) as connection:
            yield connection
            written = read_now(elsewhere)
            wait_for(lambda: read_now(elsewhere) > written + 20_000, "the lease is over")

    with pytest.MonkeyPatch.context() as patch, closing(elsewhere):
        patch.setattr(app.ledger.database, "write", late)
        yield


@pytest.mark.each_database(reason="each locks and compares in its own way")
def test_who_registered_in_a_transaction_that_lasted_longer_than_its_lease_lives(world: World) -> None:
    """It was taken for dead before its first heartbeat: its lease was over when others saw it first."""
    app, new = world.judging(world.app()), world.app()
    look = maintenance_of(app)
    assert look.recover_dead() == 0
    with committed_late(new):
        registered(new, lease_s=0.01)
    world.sql("UPDATE processes SET hostname = 'elsewhere'")
    assert world.one("SELECT lease_until FROM processes") < read_now(app.ledger.database)
    assert look.recover_dead() == 0
    assert processes.beat(new.ledger, lease_s=60) is None, "it lives"
    world.end_leases()
    assert world.watched(look).recover_dead() == 1, "until it renews no more for as long as a lease"


@pytest.mark.databases("mariadb", reason="elsewhere transactions leave no marks")
def test_a_registration_does_not_wait_for_the_transactions_of_others(world: World) -> None:
    """It looked for old marks, and so waited, its lease running, for one that was stopped between mark and commit."""
    app, stopped = world.app(), world.app()
    world.sql("INSERT INTO write_marks (owner, number, at) VALUES ('stopped', 1, UNIX_TIMESTAMP())")
    with stopped.ledger.database.write() as connection:
        connection.exec_driver_sql("UPDATE write_marks SET at = at + 1")
        registering = threading.Thread(target=registered, args=(app,))
        registering.start()
        wait_for(lambda: world.sql("SELECT 1 FROM processes"), "it has registered meanwhile")
    registering.join(120)


@pytest.mark.databases("mariadb", reason="elsewhere transactions leave no marks")
def test_a_registration_forgets_the_marks_of_two_days_ago(world: World) -> None:
    app = world.app()
    world.sql("INSERT INTO write_marks (owner, number, at) VALUES ('old', 1, 1000), ('new', 1, UNIX_TIMESTAMP())")
    registered(app)
    assert world.sql("SELECT owner FROM write_marks WHERE owner IN ('old', 'new')") == [("new",)]


@pytest.mark.each_database(reason="each locks and compares in its own way")
def test_a_renewal_is_stamped_when_it_has_its_locks_and_not_before_it_waits(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, other = world.app(), world.app()
    registered(app)
    waits, real = threading.Event(), app.ledger.database.write

    def write(**how: Any) -> Any:
        waits.set()
        return real(**how)

    monkeypatch.setattr(app.ledger.database, "write", write)
    beating = threading.Thread(target=processes.beat, args=(app.ledger,), kwargs={"lease_s": 60})
    with other.ledger.database.write() as connection:
        connection.exec_driver_sql("UPDATE processes SET busy = busy + 1")
        began = read_now(other.ledger.database)
        beating.start()
        assert waits.wait(120)
        wait_for(lambda: read_now(other.ledger.database) > began + 50_000, "it waits for a moment")
        released = read_now(other.ledger.database)
    beating.join(120)
    (process,) = app.processes()
    assert process["beat_at"] >= released
    assert process["lease_until"] >= process["beat_at"] + 60_000_000


def test_a_process_renews_its_lease_while_its_startup_hooks_run(world: World) -> None:
    """One that loads a model for longer than a lease was taken for dead before it began."""
    app = world.app(heartbeat_s=0.1)
    beaten = []

    @app.on("startup")
    def load() -> None:
        (registered,) = app.processes()
        wait_for(lambda: app.processes()[0]["beat_at"] > registered["beat_at"], "a heartbeat")
        beaten.append(True)

    with world.working(app):
        assert beaten


def test_lost_copies_are_looked_for_after_the_clock_was_put_back(world: World) -> None:
    app = world.app()
    shop, task = pushed(app, 1)
    shop.takes()
    clock = SettableClock()
    look = app.maintenance(replace(app.ledger, clock=clock))
    look._do(["find_lost"])
    look._do(["find_lost"])
    assert task.progress()["control"]["in_flight"] == 1, "it was not searched twice"
    clock.seconds += maintenance.EVERY_S["find_lost"]
    look._ledger.time.set(clock.now() - 3_600 * 1_000_000)
    look._do(["find_lost"])
    assert task.progress()["control"]["in_flight"] == 0


@pytest.mark.parametrize(("step", "rest_s"), [("close", 20 * 4.0), ("recover_dead", 1.0)], ids=["any", "recovery"])
def test_a_step_rests_for_what_it_takes_each_time_and_not_for_one_wait(world: World, step: str, rest_s: float) -> None:
    """A database that was silent for 4 s once kept the dead unrecovered for 80 s."""
    app, clock, done = world.app(), SettableClock(), []
    look = app.maintenance(replace(app.ledger, clock=clock))
    takes = iter((0.01, 4.0, 0.01, 4.0, 4.0, 0.01))

    def act() -> None:
        done.append(clock.seconds)
        clock.seconds += next(takes)

    def count_after(rest: float) -> int:
        clock.seconds += rest
        look._do([step])
        return len(done)

    look._steps = {step: act}
    assert [count_after(0.0), count_after(0.0), count_after(0.21)] == [1, 2, 3], "after a wait it is done soon"
    assert [count_after(0.21), count_after(0.21)] == [4, 5]
    assert [count_after(rest_s - 0.01), count_after(0.02)] == [5, 6], "what takes long each time rests"


@pytest.mark.each_database(reason="each locks and compares in its own way")
def test_a_process_that_renewed_between_the_look_and_the_verdict_lives(world: World) -> None:
    app, late = world.app(), world.app()
    task = holding(world, late, 2)
    maintenance_of(app).recover(late.ledger.identity)  # somebody saw it late, and it beat since
    assert task.progress()["control"]["in_flight"] == 2
    assert processes.beat(late.ledger, lease_s=60) is None


def test_what_a_process_held_that_is_registered_nowhere_is_taken_on_the_second_look(world: World) -> None:
    app, dead = world.app(), world.app()
    task = holding(world, dead, 2)
    world.sql("DELETE FROM processes")
    look = maintenance_of(app)
    look.recover_dead()
    assert task.progress()["control"]["in_flight"] == 2, "it may be about to register"
    look.recover_dead()
    assert task.progress()["control"]["in_flight"] == 0


@pytest.mark.each_database(reason="each locks and compares in its own way")
def test_recovering_twice_changes_nothing_the_second_time(world: World) -> None:
    app, dead = world.app(), world.app()
    task = holding(world, dead, 2)
    first = processes.recover_events(app.ledger, dead.ledger.identity)
    second = processes.recover_events(app.ledger, dead.ledger.identity)
    assert [each.transition is not None for each in (*first, *second)] == [True, True]
    assert task.progress()["control"]["in_flight"] == 0
    assert app.doctor() == []


def has_begun(world: World, pid: int) -> bool:
    return any(line[0] == "began" and line[2] == str(pid) for line in world.shop.lines())


def test_a_job_under_which_three_processes_died_ends_as_poison_and_its_neighbours_do_not(world: World) -> None:
    app = world.app()
    task = app.submit("gated", numbers(1))
    victims: list[int] = []
    at_work = "SELECT 1 FROM events WHERE status = 'working' AND process LIKE ?"
    for _ in range(3):
        worker = world.cli("kill_app", "worker", "-c", "1")
        wait_for(partial(world.sql, at_work, f"%:{worker.pid}:%"), "it is known to be at work")
        # a watched job is recorded as at work before its first line
        wait_for(partial(has_begun, world, worker.pid), "it is at work")
        victims.append(worker.pid)
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    neighbours = app.submit("note", numbers(5))
    with world.working(app):
        assert task.wait(120)["done"]
        assert neighbours.wait(120)["done"]
    (event,) = task.events()
    assert (event["status"], event["problem"]) == ("error", "poison")
    assert [m["message"] for m in event["messages"]].count("Worker lost") == 3
    assert event["messages"][-1]["message"] == "Worker lost 3 times; given up"
    assert {int(line[2]) for line in world.shop.lines() if line[0] == "began"} == set(victims)
    world.check_promises(app, [task.id, neighbours.id], 6)


# -- lost copies


@pytest.mark.each_database(reason="each locks and compares in its own way")
def test_a_copy_that_its_queue_lost_is_dispatched_again_after_two_looks(world: World) -> None:
    app = world.app()
    shop, task = pushed(app, 4)
    look = app.maintenance(app.ledger)
    assert [look.find_lost(), look.find_lost()] == [0, 0], "they are in their queue"
    shop.ends(shop.takes()[:1])
    assert look.find_lost() == 0
    assert task.progress()["control"]["in_flight"] == 3
    assert look.find_lost() == 3
    assert task.progress()["control"]["in_flight"] == 0
    done, *lost = task.events()
    assert (done["status"], done["attempt"]) == ("finish", 1)
    assert [event["attempt"] for event in lost] == [2, 2, 2]
    assert {event["messages"][-1]["message"] for event in lost} == {"Lost by the queue; dispatched again"}
    assert look.find_lost() == 0
    assert app.doctor() == []


# -- the ledger is away


@contextmanager
def away(monkeypatch: pytest.MonkeyPatch, *databases: Database) -> Any:
    """Nothing can be read of or written to the ledger."""

    @contextmanager
    def no(self: Database, **_: Any) -> Any:
        raise LedgerUnavailable("away")
        yield

    with monkeypatch.context() as patched:
        patched.setattr(Database, "write", no)
        patched.setattr(Database, "read", no)
        yield


def test_while_the_ledger_is_away_nothing_begins_and_outcomes_are_kept_and_recorded_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = world.app(lease_s=20.0, heartbeat_s=5.0)
    with world.working(app) as launcher:
        task = app.submit("gated", numbers(12))
        wait_for(lambda: len(world.shop.performed("began")) == 4, "four run")
        with away(monkeypatch):
            world.open_gate()
            wait_for(lambda: len(world.shop.performed()) >= 4, "they come to their end")
            wait_for(lambda: not launcher.recorder.healthy, "the process knows that the ledger is away")
            kept = launcher.recorder
            wait_for(lambda: not launcher.pool.busy, "all have ended")
            assert kept.waiting >= len(world.shop.performed("began")), "all outcomes are kept; and some that a job began"
            assert len(world.shop.performed("began")) < 12, "of what was borrowed nothing begins any more"
            held = world.one("SELECT SUM(high - low) FROM loans WHERE process = ?", app.ledger.identity)
            assert held >= 4, "nothing was given up"
        assert task.wait(120)["done"]
        assert launcher.recorder.healthy
    assert sum(world.shop.performed().values()) == 12
    world.check_promises(app, [task.id], 12)


@pytest.mark.parametrize("kind", [LedgerUnavailable, RuntimeError])
@pytest.mark.parametrize(
    "step",
    [(lending, "_read_range"), (lending, "read_jobs"), (Tracker, "borrowed"), (Tracker, "begin"), (Pool, "make_ready")],
    ids=lambda step: f"{step[0].__name__.rpartition('.')[2]}.{step[1]}",
)
def test_what_was_borrowed_when_the_ledger_went_away_begins_when_it_is_back(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: type[Exception], step: tuple[Any, str]
) -> None:
    """Whatever fails between the commit of a borrow and the line of the pool, the process has what it borrowed, or gives
    it back."""
    real, times = getattr(*step), 0

    def fails(*args: Any, **more: Any) -> Any:
        nonlocal times
        times += 1
        if times <= 2 and (kind is LedgerUnavailable or step[0] is lending or len(args[1]) > 1):
            raise kind("away")
        return real(*args, **more)

    monkeypatch.setattr(*step, fails)
    app = world.app()
    with world.working(app):
        task = app.submit("note", numbers(20))
        alone = app.workers["note"].perform_bulk(numbers(4, first=100))
        assert task.wait(60)["done"]
        wait_for(lambda: all(app.event(str(jid))["status"] == "finish" for jid in alone), "those without a Task, too", 60)
        wait_for(lambda: times > 2 or not world.sql("SELECT 1 FROM loans"), "nothing is left")
    assert times > 2
    assert set(world.shop.performed().values()) == {1}
    world.check_promises(app, [task.id], 20)


@pytest.mark.each_database(reason="each locks and compares in its own way")
def test_another_programs_lock_delays_outcomes_and_loses_none(world: World) -> None:
    app = world.app()
    with world.working(app):
        task = app.submit("gated", numbers(8))
        wait_for(lambda: len(world.shop.performed("began")) == 4, "four run")
        with world.store.locked() as ask:
            world.open_gate()
            wait_for(lambda: len(world.shop.performed()) >= 4, "they come to their end")
            assert ask("SELECT COUNT(*) FROM events WHERE status = 'finish'") == [(0,)]
        assert task.wait(120)["done"]
    world.check_promises(app, [task.id], 8)


# -- how many run at once


def most_at_once(world: World, low: int, high: int) -> int:
    moves = [
        (float(line[2]), 1 if line[0] == "began" else -1)
        for line in world.shop.lines()
        if line[0] in ("began", "ended") and low <= int(line[1]) < high
    ]
    running = most = 0
    for _, move in sorted(moves):
        running += move
        most = max(most, running)
    return most


def test_parallel_bounds_what_runs_in_all_processes_together(world: World) -> None:
    app = world.app()
    workers = [world.cli("kill_app", "worker", "-c", "4") for _ in range(2)]
    wait_for(lambda: len(app.processes()) == 2, "two workers")
    bound = app.submit("brief", numbers(60), parallel=3)
    free = app.submit("brief", [{"n": n} for n in range(1_000, 1_100)])
    assert bound.wait(120)["done"]
    assert free.wait(120)["done"]
    assert 1 < most_at_once(world, 0, 60) <= 3
    assert most_at_once(world, 1_000, 1_100) > 3
    for worker in workers:
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(120) == 0
    world.check_promises(app, [bound.id, free.id], 160)


# -- control of what runs


def test_a_retry_that_is_due_later_waits_through_pause_and_is_cancelled_with_its_task(world: World) -> None:
    app = world.app()

    @app.worker(retry=3, retry_in=lambda count, error, job: 3600.0)
    def later(item: dict[str, Any]) -> None:
        """Breaks, and is tried again in an hour."""
        raise ValueError("not now")

    with world.working(app):
        task = app.submit("later", numbers(3))
        wait_for(lambda: task.progress()["retrying"] == 3, "all wait for their retry")
        assert task.progress()["next_retry_at"] is not None
        assert task.pause()
        assert task.resume()
        assert task.progress()["retrying"] == 3
        assert task.progress()["control"]["in_flight"] == 0
        assert task.cancel()
        assert task.wait(120)["done"]
    assert task.progress()["counts"]["cancelled"] == 3
    world.check_promises(app, [task.id], 3)


def test_retrying_opens_generations_that_close_once_each_also_after_a_cancel(world: World) -> None:
    app = world.app()
    with world.working(app):
        task = app.submit("gated", numbers(30))
        wait_for(lambda: len(world.shop.performed("began")) == 4, "four run")
        assert task.cancel()
        world.open_gate()
        assert task.wait(120)["done"]
        first = task.progress()
        assert first["counts"]["finish"] + first["counts"]["cancelled"] == 30
        assert first["counts"]["cancelled"] >= 20
        assert task.retry(["cancelled"])
        assert task.wait(120)["done"]
    last = task.progress()
    assert (last["generation"], last["state"], last["counts"]["finish"]) == (2, "finished", 30)
    world.check_promises(app, [task.id], 30, generations=2)


def test_a_smaller_priority_goes_first_and_changing_it_acts_on_jobs_that_wait(world: World) -> None:
    app = world.app(background_share=0.0)  # with it, one row of the larger priorities may go before
    with world.working(app, concurrency=1) as launcher:
        block = app.submit("gated", [{"n": 9_999}])
        wait_for(lambda: world.shop.performed("began"), "the only thread is taken")
        slow = app.submit("note", numbers(20), priority=300)
        fast = app.submit("note", [{"n": n} for n in range(100, 120)], priority=100)
        raised = app.submit("note", [{"n": n} for n in range(200, 220)], priority=400)
        raised.update(priority=50)
        time.sleep(1)  # in which it takes effect
        wait_for(lambda: not len(launcher.pool.jobs), "what was borrowed ahead went back")
        world.open_gate()
        for task in (block, slow, fast, raised):
            assert task.wait(120)["done"]
    order = [int(line[1]) // 100 for line in world.shop.lines() if line[0] == "did"][1:]
    groups = [group for i, group in enumerate(order) if i == 0 or order[i - 1] != group]
    assert groups == [2, 1, 0]
    world.check_promises(app, [block.id, slow.id, fast.id, raised.id], 61)


def test_a_cancel_that_stops_halfway_is_ended_by_the_next_maintenance(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "SLICE", 500)
    app, other = world.app(), world.app()
    task = app.submit("note", numbers(1_600))
    turn: Callable[..., bool] = app.controls.change_rows
    monkeypatch.setattr(app.controls, "change_rows", lambda task_id, seconds=0.5: turn(task_id, seconds=-1.0))
    assert task.cancel()
    counts = task.progress()["counts"]
    assert 0 < counts["cancelled"] < 1_600
    other.start_services()
    assert task.wait(120)["done"]
    other.stop_services()
    world.check_promises(app, [task.id], 1_600)


def test_a_cancel_that_takes_many_turns_does_not_rest_between_them(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken out: what leaves the turning of rows out of the rests. After each half second of it came ten of rest."""
    monkeypatch.setattr(control, "SLICE", 100)
    app = world.app()
    task = app.submit("note", numbers(1_000))
    turn: Callable[..., bool] = app.controls.change_rows
    monkeypatch.setattr(app.controls, "change_rows", lambda task_id, seconds=0.5: turn(task_id, seconds=-1.0))
    assert task.cancel()
    made = maintenance_of(app)
    for _ in range(12):
        made._do(["change_rows"])
    assert task.progress()["counts"]["cancelled"] == 1_000


@pytest.mark.each_database(reason="each locks and compares in its own way")
def test_processes_that_borrow_at_once_get_no_job_twice(world: World) -> None:
    apps = [world.app() for _ in range(3)]
    task = apps[0].submit("note", numbers(200))
    start, got = threading.Barrier(3), list[list[int]]()

    def borrows(app: Any) -> None:
        start.wait()
        got.append([job.event_id for _ in range(200) for job in borrow(app.ledger, task.id, 3)])

    racers = [threading.Thread(target=borrows, args=(app,)) for app in apps]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert sorted(event_id for each in got for event_id in each) == sorted(int(e["id"]) for e in task.events(limit=200))
    assert task.progress()["control"]["in_flight"] == 200
    found = {finding.code for finding in apps[0].doctor()}
    assert found == {"holders"}, "its processes are registered nowhere, and nothing else is wrong"
