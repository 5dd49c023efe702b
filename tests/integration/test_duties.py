"""What one process does for all: dispatching what is left, and the upkeep; and how little an idle process asks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from support.borrowing import borrow
from support.costs import analyze, cost
from support.foreign import Shop
from support.world import World, numbers

from asynctask import AsyncTask, maintenance
from asynctask.brokers.base import Copy
from asynctask.clock import SECOND, SystemClock
from asynctask.database.tables import tasks
from asynctask.dispatch.dispatcher import ACTIVE_S, QUIET_S
from asynctask.ledger import leases, lending, processes
from asynctask.ledger.base import Ledger
from asynctask.ledger.control import update
from asynctask.maintenance import Schedule
from asynctask.runtime.borrower import IDLE_S
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")


class Still(SystemClock):
    """A clock whose seconds pass only when it is moved on: a stalled machine ends no lease."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self._since, self._began = super().monotonic(), super().now()

    def now(self) -> int:
        return self._began + round(self.ahead * SECOND)

    def monotonic(self) -> float:
        return self._since + self.ahead


@contextmanager
def counted(app: AsyncTask) -> Iterator[list[str]]:
    """Every statement of an application, in all of its threads, but those that begin and end transactions."""
    seen: list[str] = []

    def executed(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if not statement.startswith(("BEGIN", "START", "COMMIT", "ROLLBACK", "PRAGMA")):
            seen.append(statement)

    sa.event.listen(app.ledger.database.engine, "before_cursor_execute", executed)
    try:
        yield seen
    finally:
        sa.event.remove(app.ledger.database.engine, "before_cursor_execute", executed)


def process(app: AsyncTask, name: str, clock: Any = None) -> Ledger:
    """A registered process of this machine that lives as long as this test's own."""
    ledger = replace(app.ledger, identity=name, clock=clock or app.ledger.clock)
    processes.register(ledger, app.host, kind="worker", pid=app._made().pid, lease_s=3600)
    return ledger


def rota(ledger: Ledger, app: AsyncTask, **more: Any) -> Schedule:
    options = {"every_s": 1.0, "waker": Rung(), **more}
    return Schedule(ledger, app.host, options.pop("waker"), **options)


def grown(app: AsyncTask, count: int) -> None:
    """So many open Tasks with something to dispatch, and as many that wait for their session."""
    with app.ledger.database.write() as connection:
        taken = connection.execute(sa.select(sa.func.count()).select_from(tasks)).scalar_one()
        rows = []
        for n in range(taken, taken + count):
            common = {
                "worker_name": "note",
                "queue": "default",
                "state": "running",
                "split_state": "sealed",
                "priority": 240,
                "created_at": 1,
                "updated_at": 1,
                "generation_sealed": 1,
                "created_jobs": 9,
                "session": f"s{n}",
                "session_key": f"{n:032x}",
            }
            rows.append({**common, "session_holder": f"{n:032x}", "session_waits": None, "ready": 240})
            rows.append({**common, "session_holder": None, "session_waits": 240, "ready": None})
        connection.execute(tasks.insert(), rows)


# -- dispatching


@pytest.mark.each_database(reason="what is read and locked is each one's own")
def test_what_a_borrower_reads_does_not_grow_with_the_tasks_that_are_open(world: World) -> None:
    app = world.app()
    now = app.clock.now()
    reads = {
        "pick": lambda c: lending.pick(c, app.ledger, ["default"], workers=["note"], limit=10),
        "single": lambda c: lending.alone_due(c, now, ["default"], workers=["note"]),
        "next due": lambda c: lending.next_due(c, now),
        "check": lambda c: lending.check(app.ledger, [1]),
    }
    grown(app, 50)
    analyze(app.ledger.database)
    before = {name: cost(app.ledger.database, read) for name, read in reads.items()}
    grown(app, 3_000)
    analyze(app.ledger.database)
    for name, read in reads.items():
        assert cost(app.ledger.database, read) <= before[name] * 1.5 + 20, name


@pytest.mark.each_database(reason="what is read and locked is each one's own")
def test_tasks_that_cannot_go_now_hide_no_other(world: World) -> None:
    app = world.app()
    other = process(app, "another")
    for _ in range(12):
        full = app.submit("note", [{"n": 0}, {"n": 1}], parallel=1, priority=1)
        assert len(borrow(other, full.id)) == 1
        lent = app.submit("note", [{"n": 0}], priority=2)
        assert len(borrow(other, lent.id)) == 1
    paused = app.submit("note", [{"n": 0}], priority=3)
    paused.pause()
    last = app.submit("note", [{"n": 0}], priority=4)
    with app.ledger.database.read() as connection:
        found = lending.pick(connection, app.ledger, ["default"], limit=3)
    assert [each.task_id for each in found] == [last.id]


def test_a_process_that_starts_its_dispatcher_twice_has_one_thread_until_the_second_stop(world: World) -> None:
    dispatcher = world.app().dispatcher

    def threads() -> int:
        return sum(each.name == "dispatcher" for each in threading.enumerate())

    before = threads()
    dispatcher.start()
    dispatcher.start()
    assert threads() == before + 1
    dispatcher.stop()
    assert threads() == before + 1
    dispatcher.stop()
    assert threads() == before


def test_one_process_at_a_time_goes_on_dispatching_and_another_takes_over_in_a_second(world: World) -> None:
    app = world.app()
    clock = Still()
    one, two = (replace(app.ledger, identity=name, clock=clock) for name in ("one", "two"))
    assert leases.acquire(one, leases.DISPATCH, 1.0) is None
    until = leases.acquire(two, leases.DISPATCH, 1.0)
    assert until is not None
    assert until - clock.now() <= SECOND
    assert leases.acquire(one, leases.DISPATCH, 1.0) is None, "it goes on"
    clock.ahead += 1.1  # it died
    assert leases.acquire(two, leases.DISPATCH, 1.0) is None
    assert leases.acquire(one, leases.DISPATCH, 1.0) is not None
    leases._give_up(two, leases.DISPATCH)
    assert leases.acquire(one, leases.DISPATCH, 1.0) is None


@pytest.mark.each_database(reason="what is read and locked is each one's own")
def test_of_many_that_want_a_duty_at_once_one_gets_it(world: World) -> None:
    app = world.app()
    for _ in range(3):
        start = threading.Barrier(4)
        got: list[str] = []

        def want(name: str, start: threading.Barrier = start, got: list[str] = got) -> None:
            ledger = replace(app.ledger, identity=name)
            start.wait()
            if leases.acquire(ledger, leases.DISPATCH, 60.0) is None:
                got.append(name)

        threads = [threading.Thread(target=want, args=(f"p{n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 1
        world.sql("UPDATE duties SET held_until = 1")


def test_what_is_left_is_dispatched_by_others_when_the_one_on_duty_is_gone(world: World) -> None:
    app = world.app()
    shop = Shop(app, free=100)
    gone = replace(app.ledger, identity="gone")
    assert leases.acquire(gone, f"{leases.DISPATCH}/shop", 1.0) is None
    app.submit("sold", numbers(200))
    app.dispatcher.start()
    try:
        taken = list[Copy]()

        def are_all_taken() -> bool:
            taken.extend(shop.takes())
            return len(taken) == 200

        wait_for(are_all_taken, "all of it is pushed")
    finally:
        app.dispatcher.stop()


def moved_by_hand(app: AsyncTask) -> tuple[Shop, Still]:
    """The clock of an application's dispatcher, which serves a process that works 5 jobs at a time."""
    shop, clock = Shop(app, free=5), Still()
    app.dispatcher._ledger = replace(app.dispatcher._ledger, clock=clock)
    return shop, clock


def test_rounds_keep_their_distance_from_beginning_to_beginning(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the time of a round came on top: on MariaDB a worker stood still for a twentieth of its time."""
    app, client = world.app(), world.app()
    shop, clock = moved_by_hand(app)
    Shop(client)
    client.submit("sold", [{"n": n} for n in range(50)])
    real = app.dispatcher.run_pass

    def takes_its_time() -> int:
        pushed = real()
        clock.ahead += 0.12
        return pushed

    monkeypatch.setattr(app.dispatcher, "run_pass", takes_its_time)
    app.dispatcher.nudge()
    assert app.dispatcher._step() == pytest.approx(ACTIVE_S - 0.12)
    assert len(shop.takes()) == 5


def test_a_notification_that_was_lost_delays_a_round_for_some_seconds_at_most(world: World) -> None:
    app, client = world.app(), world.app()
    shop, clock = moved_by_hand(app)
    Shop(client)
    assert app.dispatcher._step() == pytest.approx(QUIET_S)
    client.submit("sold", numbers(3))
    clock.ahead += QUIET_S - 0.1
    assert app.dispatcher._step() == pytest.approx(0.1)
    assert shop.pushed == []
    clock.ahead += 0.1
    app.dispatcher._step()
    assert len(shop.pushed) == 3


def test_a_leader_that_resigns_looks_once_more_for_what_was_left_to_it(world: World) -> None:
    app, client = world.app(), world.app()
    shop, clock = moved_by_hand(app)
    Shop(client)
    task = client.submit("sold", numbers(30))
    app.dispatcher.nudge()
    assert app.dispatcher._step() <= ACTIVE_S + 1e-6
    leadership = app.dispatcher._leadership("shop")
    assert leadership.held
    task.pause()
    clock.ahead += 1.0
    app.dispatcher._step()
    assert not leadership.held
    task.resume()  # accepted while it still led, so that nobody else pushed it
    shop.takes()
    assert app.dispatcher._nudged
    clock.ahead += 1.0
    app.dispatcher._step()
    assert leadership.held


@pytest.mark.parametrize("knob", [{"parallel": 3}, {"interval": 0}, {"priority": 9}])
def test_a_knob_notifies_the_dispatchers_for_its_own_process_may_take_all_workers_for_busy(
    world: World, knob: dict[str, Any]
) -> None:
    app = world.app()
    task = app.submit("note", numbers(5), parallel=1, interval=60.0)
    heard = world.app().signals.waker()
    wait_for(lambda: heard.wait(1) and heard.signalled, "the signal with which listening begins")
    update(app.ledger, task.id, knob)  # the ledger's part alone: no round of this process pushes anything
    wait_for(lambda: heard.wait(1) and heard.signalled, "it notifies", timeout=20)


@pytest.mark.parametrize("made_due", ["pushed", "restarted", "recovered"])
def test_a_job_without_a_task_that_is_due_notifies_the_workers(world: World, made_due: str) -> None:
    """They had waited for it up to 10 s. Taken out: the notification of a new one, and of one that is due again."""
    app = world.app()
    job_id = str(app.workers["note"].perform_async({"n": 1}))
    if made_due == "restarted":
        app.record(job_id, "error", message="once")
    elif made_due == "recovered":
        app.record(job_id, "working", message="begun")
        world.sql("UPDATE events SET process = 'gone:1:x'")
    heard = world.app().signals.waker()
    wait_for(lambda: heard.wait(1) and heard.signalled, "the signal with which listening begins")
    if made_due == "pushed":
        app.workers["note"].perform_async({"n": 2})
    elif made_due == "restarted":
        app.operations.act_on_job(job_id, "restart")
    else:
        processes.recover_events(app.ledger, "gone:1:x")
    wait_for(lambda: heard.wait(1) and heard.signalled, "it notifies", timeout=20)


def test_a_task_of_one_place_goes_on_in_whatever_process_its_jobs_end(world: World) -> None:
    app = world.app()
    task = app.submit("note", [{"n": n} for n in range(40)], parallel=1)
    with world.working(world.app(), concurrency=1), world.working(world.app(), concurrency=1):
        assert task.wait(120)["done"]
    world.check_promises(app, [task.id], 40)


def test_a_job_that_is_due_later_is_pushed_by_whoever_is_on_duty_though_its_process_has_ended(world: World) -> None:
    app, brief = world.app(), world.app()
    with world.working(app):
        wait_for(lambda: world.sql("SELECT 1 FROM duties WHERE name = 'upkeep'"), "somebody is on duty")
        brief.workers["note"].perform_in(0.2, {"n": 7})
        brief.close()
        wait_for(lambda: world.shop.performed(), "it ran")


# -- upkeep


def test_one_process_at_a_time_has_the_duty_of_upkeep(world: World) -> None:
    app = world.app()
    one, two = process(app, "one"), process(app, "two")
    first, second = rota(one, app), rota(two, app)
    first.due_steps(())
    second.due_steps(())
    assert leases.holder_of(one, leases.MAINTENANCE).identity == "one"
    first.leave()
    late = rota(two, app)
    late.due_steps(())
    assert leases.holder_of(one, leases.MAINTENANCE).identity == "two"


@pytest.mark.parametrize("how", ["its lease ended", "its process is gone", "it is not registered"])
def test_the_duty_of_upkeep_is_taken_over_from_a_process_that_is_gone(world: World, how: str) -> None:
    app = world.app()
    one, two = process(app, "one"), process(app, "two")
    rota(one, app).due_steps(())
    if how == "its lease ended":
        world.sql("UPDATE processes SET lease_until = 1 WHERE identity = 'one'")
    elif how == "its process is gone":
        world.sql("UPDATE processes SET pid_started = pid_started - 1 WHERE identity = 'one'")
    else:
        world.sql("DELETE FROM processes WHERE identity = 'one'")
    rota(two, app).due_steps(())
    assert leases.holder_of(one, leases.MAINTENANCE).identity == "two"


@pytest.mark.parametrize("other", ["dramatiq@h:3:4", "worker"])
def test_a_process_of_an_engine_keeps_the_duty_of_upkeep_while_it_lives(world: World, other: str) -> None:
    """Before, any other took it, and where only engines run, they took it from each other every few seconds."""
    app, clock = world.app(), Still()
    first = rota(process(app, "dramatiq@h:1:2", clock), app)
    second = rota(process(app, other, clock), app)
    for _ in range(3):
        first.due_steps(())
        second.due_steps(())
        assert leases.holder_of(app.ledger, leases.MAINTENANCE).identity == "dramatiq@h:1:2"
        clock.ahead += 60.0


@pytest.mark.each_database(reason="each notifies in its own way")
def test_a_process_is_watched_over_from_the_moment_it_registers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken out: the notification of `register`, or the query for the newest. One that died soon after was found only when
    its lease ended, and another engine's process had taken its message over by then.

    Nothing else runs here, so that no other notification can stand in for that of `register`."""
    monkeypatch.setattr(maintenance, "_QUIET", 3_600)
    app = world.app()
    one, steps = process(app, "one"), ["recover_dead"]
    heard, waker = app.signals.waker(), app.signals.waker()
    leader = rota(one, app, waker=waker)
    leader.due_steps(steps)
    wait_for(lambda: heard.wait(1) and heard.signalled, "the signal with which listening begins")
    wait_for(lambda: waker.wait(1) and waker.signalled, "the same for the leader")
    child = world.spawn("-c", "import time; time.sleep(600)")
    brief = replace(app.ledger, identity="brief")
    processes.register(brief, app.host, kind="worker", pid=child.pid, lease_s=3600)
    wait_for(lambda: heard.wait(1) and heard.signalled, "it notifies", timeout=20)
    leader.pause()
    assert leader.due_steps(steps) == []
    child.kill()
    child.wait()
    assert leader.due_steps(steps) == steps
    assert app.maintenance(one).recover_dead() == 1
    assert not world.sql("SELECT identity FROM processes WHERE identity = 'brief'")


def test_a_registration_wakes_the_maintenance_of_a_running_process(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken out: the waker that an `AppProcess` gives its maintenance."""
    monkeypatch.setattr(maintenance, "_QUIET", 3_600)
    app = world.app()
    app.start_services()
    assert app._web is not None
    leader = app._web.maintenance._schedule
    wait_for(lambda: leader._known and not leader._active, "it leads, and finds nothing to do")
    child = world.spawn("-c", "import time; time.sleep(600)")
    brief = replace(app.ledger, identity="brief")
    processes.register(brief, app.host, kind="worker", pid=child.pid, lease_s=3600)
    wait_for(lambda: any(each["identity"] == "brief" for each in leader._known), "it is known", timeout=20)
    child.kill()
    child.wait()
    wait_for(lambda: not world.sql("SELECT identity FROM processes WHERE identity = 'brief'"), "it is recovered")


class Rung:
    """A place to wait where something is always heard at once."""

    signalled = True

    def wait(self, timeout: float) -> bool:
        return True

    def wake(self) -> None:
        """Nothing waits."""


def test_the_first_rings_are_answered_at_once_and_those_that_follow_together(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, whoever had looked by itself a moment ago waited a quarter of a second after the first ring too; and a Task
    whose first jobs were told of just after a ring about something else began a quarter of a second late."""
    app, clock = world.app(), Still()
    one = rota(process(app, "one", clock), app, waker=Rung())
    one.due_steps(())
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        clock.ahead += seconds
        return False

    monkeypatch.setattr(one._stop, "wait", wait)
    for _ in range(6):
        one.pause()
        one.due_steps(())
    assert waits[:3] == [0.0] * 3
    assert waits[3:] == [pytest.approx(0.25)] * 3
    clock.ahead += 0.8
    waits.clear()
    for _ in range(4):
        one.pause()
        one.due_steps(())
    assert waits[:3] == [0.0] * 3
    assert waits[3] == pytest.approx(0.25)


@pytest.mark.each_database(reason="what is read and locked is each one's own")
def test_an_idle_process_asks_less_than_one_question_a_second(world: World) -> None:
    """Its own parts, over a minute of a clock that is moved on: the beats and the borrows."""
    app = world.app()
    clock = Still()
    ledgers = [process(app, name, clock) for name in ("one", "two")]
    rotas = [rota(ledger, app) for ledger in ledgers]
    for each in rotas:
        each.due_steps(())
    asked = []
    for each, ledger in zip(rotas, ledgers, strict=True):
        with counted(app) as seen:
            for second in range(60):
                clock.ahead += 1.0
                each.due_steps(())
                if second % 5 == 0:
                    processes.beat(ledger, lease_s=3600)
                if second % int(IDLE_S) == 0:
                    with ledger.database.read() as connection:
                        assert lending.first_due(connection, ["default"]) is None
        asked.append(len(seen))
    assert max(asked) < 60, asked
    assert min(asked) <= 40, "one that is not on duty asks even less"


def test_an_idle_worker_process_has_no_round_of_its_dispatcher(world: World) -> None:
    app = world.app()
    assert app.dispatcher._step() >= QUIET_S
    with counted(app) as seen:
        assert app.dispatcher._step() >= QUIET_S
    assert seen == []
