"""What one process does for all: dispatching what is left, and the upkeep; and how little an idle process asks."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import sqlalchemy as sa
from support.costs import analyze, cost
from support.world import World, numbers

from asynctask import AsyncTask, maintenance
from asynctask.brokers.base import Copy
from asynctask.clock import SECOND, SystemClock
from asynctask.database.notify import LEDGER
from asynctask.database.tables import tasks
from asynctask.dispatch.demand import Load
from asynctask.dispatch.dispatcher import ACTIVE_S
from asynctask.ledger import dispatchable, leases, processes, reservations
from asynctask.ledger.base import Ledger
from asynctask.ledger.control import update
from asynctask.maintenance import Maintenance, Schedule
from asynctask.testing import wait_for
from asynctask.worker import Priority

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
    options = {"every_s": 1.0, "can_split": True, "broker_apart": False, "waker": None, **more}
    return Schedule(ledger, app.host, lambda: None, lambda at: None, options.pop("waker"), **options)


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
def test_what_a_round_reads_does_not_grow_with_the_tasks_that_are_open(world: World) -> None:
    app = world.app()
    reads = {
        "runnable": lambda c: reservations.runnable(c, app.ledger, ["default"], limit=10),
        "unconfirmed": lambda c: reservations.unconfirmed(c, app.clock.now()),
        "due": lambda c: dispatchable.due_tasks(c, app.clock.now()),
        "next due": lambda c: dispatchable.next_due(c, app.clock.now()),
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
    full = [app.submit("note", [{"n": 0}, {"n": 1}], parallel=1, priority=1) for _ in range(12)]
    reserved = [app.submit("note", [{"n": 0}], priority=2) for _ in range(12)]
    paused = app.submit("note", [{"n": 0}], priority=3)
    paused.pause()
    last = app.submit("note", [{"n": 0}], priority=4)
    other = process(app, "another")
    for task in full:
        assert len(reservations.reserve(app.ledger, task.id, 5, lease_s=60)) == 1
        reservations.confirm(app.ledger, [task.id])
    for task in reserved:
        reservations.reserve(other, task.id, 1, lease_s=60)
        world.sql("UPDATE tasks SET ready = priority WHERE id = ?", task.id)
    with app.ledger.database.read() as connection:
        found, _ = reservations.runnable(connection, app.ledger, ["default"], limit=3)
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
    gone = replace(app.ledger, identity="gone")
    assert leases.acquire(gone, leases.DISPATCH, 1.0) is None
    task = app.submit("note", [{"n": n} for n in range(200)])
    with world.working(app):
        assert task.wait(120)["done"]


def ran_dry(app: AsyncTask) -> int:
    """How many jobs a process that ran dry after some work pushed for itself."""
    before = app.broker.queues().get("default", 0)
    app.dispatcher.dry(True)
    app.dispatcher._step()
    return app.broker.queues().get("default", 0) - before


def moved_by_hand(app: AsyncTask) -> Still:
    """The clock of an application's dispatcher, which works 5 jobs at a time."""
    clock = Still()
    app.dispatcher._ledger = replace(app.ledger, clock=clock)
    app.dispatcher._leadership = leases.Leadership(app.dispatcher._ledger, leases.DISPATCH)
    app.dispatcher.attach(lambda: Load("a process", ["default"], 5, 0.0))
    return clock


def test_a_process_that_runs_dry_helps_itself_whatever_the_round_before_was_for(world: World) -> None:
    """Before, it waited half a second after any round: the second of two short lists stood still after five items."""
    app, client = world.app(), world.app()
    moved_by_hand(app)
    app.dispatcher.nudge()
    app.dispatcher._step()
    client.submit("note", [{"n": n} for n in range(50)])
    assert ran_dry(app) == 5


def test_a_process_that_runs_dry_again_and_again_asks_ever_less_often_until_there_is_something(world: World) -> None:
    app, client = world.app(), world.app()
    clock = moved_by_hand(app)
    rounds = []
    with counted(app) as seen:
        for _ in range(100):
            clock.ahead += 0.05
            seen.clear()
            ran_dry(app)
            rounds.append(any("tasks" in each for each in seen))
    assert rounds[0]
    assert 10 <= sum(rounds) <= 14, "two a second, and a few more at first"
    client.submit("note", [{"n": n} for n in range(50)])
    clock.ahead += 0.5
    assert ran_dry(app) == 5


def test_while_another_is_on_duty_a_process_helps_itself_twice_a_second(world: World) -> None:
    app, client = world.app(), world.app()
    clock = moved_by_hand(app)
    client.submit("note", [{"n": n} for n in range(50)])
    other = replace(process(app, "another"), clock=clock)
    assert leases.acquire(other, leases.DISPATCH, 60.0) is None
    for _ in range(2):  # after the first of these it knows of the other
        clock.ahead += 0.1
        assert ran_dry(app) == 5
        assert len(app.broker.exchange("a process", [], ["default"], 5)) == 5
    for _ in range(4):
        clock.ahead += 0.1
        assert ran_dry(app) == 0
    clock.ahead += 0.2
    assert ran_dry(app) == 5
    clock.ahead += 10.0  # its jobs take long; then its threads come free one after the other
    for _ in range(5):
        assert len(app.broker.exchange("a process", [], ["default"], 5)) == 5
        clock.ahead += 0.05
        assert ran_dry(app) == 5, "before, it waited for half a second after each of them"
    app.broker.exchange("a process", [], ["default"], 5)
    assert ran_dry(app) == 0


def test_rounds_keep_their_distance_from_beginning_to_beginning(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the time of a round came on top, and after a round of a process that had run dry all of the pause once more:
    on MariaDB a worker stood still for a twentieth of its time."""
    app, client = world.app(), world.app()
    clock = moved_by_hand(app)
    client.submit("note", [{"n": n} for n in range(50)])
    real = app.dispatcher._round

    def takes_its_time(**how: bool) -> int:
        pushed = real(**how)
        clock.ahead += 0.12
        return pushed

    monkeypatch.setattr(app.dispatcher, "_round", takes_its_time)
    app.dispatcher.nudge()
    assert app.dispatcher._step() == pytest.approx(ACTIVE_S - 0.12)
    monkeypatch.setattr(app.dispatcher, "_round", real)
    app.dispatcher.dry(True)
    assert app.broker.queues() == {"default": 5}, "there is no room for more"
    assert app.dispatcher._step() == pytest.approx(ACTIVE_S - 0.12)
    clock.ahead += 0.2
    app.dispatcher.dry(True)
    assert app.dispatcher._step() == ACTIVE_S, "nothing was pushed since"


def test_who_ran_dry_before_a_push_was_over_is_served_by_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    app, client = world.app(), world.app()
    moved_by_hand(app)
    client.submit("note", [{"n": n} for n in range(50)])
    real = app.broker.push

    def push(copies: Sequence[Copy]) -> None:
        app.dispatcher.dry(True)
        real(copies)

    monkeypatch.setattr(app.broker, "push", push)
    app.dispatcher.nudge()
    with counted(app) as seen:
        app.dispatcher._step()
        assert any("tasks" in each for each in seen)
        app.dispatcher._leadership.resign()
        seen.clear()
        app.dispatcher._step()
    assert not any("tasks" in each for each in seen), "a round for nothing"


@pytest.mark.parametrize(
    ("free", "rate", "pushed"),
    [
        (8, 4_000.0, 1_000),  # a reservation for 8 more would cost as much as one for 1,000
        (8, 4_500.0, 1_133),
        (1_008, 0.0, 1_008),  # so many threads wait for them
    ],
)
def test_a_small_rest_is_left_to_the_next_round(
    world: World, monkeypatch: pytest.MonkeyPatch, free: int, rate: float, pushed: int
) -> None:
    """And does not count as what could not be had, by which the queue would never be seen to be faster than that."""
    app, client = world.app(), world.app()
    noted: list[tuple[Any, ...]] = []
    monkeypatch.setattr(app.dispatcher._rates, "note", lambda *words: noted.append(words))
    monkeypatch.setattr("asynctask.dispatch.dispatcher.TURN_S", 600.0)
    app.dispatcher.attach(lambda: Load("a process", ["default"], free, rate))
    client.submit("note", [{"n": n} for n in range(1_200)])
    client.submit("note", [{"n": n} for n in range(10)], priority=Priority.SYSTEM_LOW)
    assert app.dispatcher.round() == pushed
    assert noted == [("default", 0, pushed, pushed, free, 0)]


def at_once(apps: Sequence[AsyncTask], places: int) -> None:
    """The dispatchers of as many worker processes, each of which makes a round while the one before it pushes: none sees
    what the others have reserved."""
    for app in apps:
        processes.register(
            app.ledger, app.host, kind="worker", pid=app._made().pid, lease_s=3600, concurrency=places, queues=["default"]
        )
        app.dispatcher.attach(partial(Load, app.ledger.identity, ("default",), places, 0.0))
        app.dispatcher._thread = threading.current_thread()  # it goes on if it leads
    for app, following in pairwise(apps):
        push = app.dispatcher._outbox._put

        def late(copies: Sequence[Copy], following: AsyncTask = following, push: Any = push) -> None:
            if not following.dispatcher.rounds:
                following.dispatcher.round()
            push(copies)

        app.dispatcher._outbox._put = late


@pytest.mark.each_database(reason="what is read and locked is each one's own")
def test_rounds_at_once_push_for_all_processes_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, each of these pushed for all: a thousand processes that started together, a hundred times what was wanted."""
    monkeypatch.setattr(leases, "LEADER_LEASE_S", 600.0)  # however long the machine takes, one leads
    monkeypatch.setattr("asynctask.dispatch.dispatcher.TURN_S", 600.0)  # and its round is not cut
    client, *apps = (world.app() for _ in range(4))
    for _ in range(30):
        client.submit("note", numbers(21))
    at_once(apps, 3)
    apps[0].dispatcher.round()
    pushed = [app.dispatcher.dispatched for app in apps]
    assert pushed == [9, 3, 3], "the leader pushes for all, and the others for themselves"
    assert sum(client.broker.waiting(["default"])["default"].values()) == sum(pushed)


def test_what_all_processes_can_use_is_pushed_by_whoever_sees_it(world: World) -> None:
    app, client = world.app(), world.app()
    at_once([app], 10)
    other = process(app, "another")
    assert leases.acquire(other, leases.DISPATCH, 60.0) is None
    urgent = client.submit("note", numbers(8), priority=1)
    assert client.dispatcher.dispatched == 8, "it has no threads of its own, but all of these are wanted"
    client.submit("note", numbers(30), priority=2)
    assert client.dispatcher.dispatched == 8, "of more than is wanted, the leader pushes for all"
    assert urgent.progress()["control"]["in_flight"] == 8
    app.dispatcher.round()
    assert app.dispatcher.dispatched == 2


def test_a_leader_that_resigns_looks_once_more_for_what_was_left_to_it(world: World) -> None:
    app, client = world.app(), world.app()
    at_once([app], 10)
    client.submit("note", numbers(30))
    assert app.dispatcher._step() <= ACTIVE_S
    assert app.dispatcher._leadership.held
    client.task(1).pause()
    app.dispatcher._step()
    assert not app.dispatcher._leadership.held
    client.task(1).resume()  # accepted while it still led, so that nobody else pushed it
    app.broker.withdraw(1, 100)
    assert app.dispatcher._nudged
    app.dispatcher._step()
    assert app.dispatcher._leadership.held


@pytest.mark.parametrize("knob", [{"parallel": 3}, {"interval": 0}, {"priority": 9}])
def test_a_knob_notifies_the_dispatchers_for_its_own_process_may_take_all_workers_for_busy(
    world: World, knob: dict[str, Any]
) -> None:
    app = world.app()
    task = app.submit("note", numbers(5), parallel=1, interval=60.0)
    heard = world.app().signals.waker(LEDGER)
    wait_for(lambda: heard.wait(1) and heard.signalled, "the signal with which listening begins")
    update(app.ledger, task.id, knob)  # the ledger's part alone: no round of this process pushes anything
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


def test_a_reservation_that_was_not_confirmed_in_time_wakes_the_dispatcher_of_the_leader(world: World) -> None:
    """Taken out: the look for it. With nothing else to dispatch, no process made a round that would have found it."""
    app = world.app()
    one, two = process(app, "one"), process(app, "two")
    task = app.submit("note", [{"n": 0}], parallel=1)
    nudged: list[bool] = []
    leader = Schedule(
        one, app.host, lambda: nudged.append(True), lambda at: None, None, every_s=1.0, can_split=True, broker_apart=False
    )
    assert len(reservations.reserve(two, task.id, 1, lease_s=60)) == 1
    leader.due_steps(())
    assert nudged == [], "it is on its way"
    world.sql("UPDATE tasks SET dispatch_until = 1")
    leader.due_steps(())
    assert nudged == [True]


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


def test_a_process_that_can_split_takes_the_duty_from_one_of_an_engine_that_cannot(world: World) -> None:
    app = world.app()
    engine, worker = process(app, "dramatiq@h:1:2"), process(app, "two")
    rota(engine, app, can_split=False).due_steps(())
    assert leases.holder_of(worker, leases.MAINTENANCE).identity == "dramatiq@h:1:2"
    rota(worker, app).due_steps(())
    assert leases.holder_of(worker, leases.MAINTENANCE).identity == "two"


@pytest.mark.each_database(reason="each notifies in its own way")
def test_a_process_is_watched_over_from_the_moment_it_registers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken out: the notification of `register`, or the query for the newest. One that died soon after was found only when
    its lease ended, and another engine's process had taken its message over by then.

    Nothing else runs here, so that no other notification can stand in for that of `register`."""
    monkeypatch.setattr(maintenance, "_QUIET", 3_600)
    app = world.app()
    one, steps = process(app, "one"), ["recover_dead"]
    heard, waker = app.signals.waker(LEDGER), app.signals.waker(LEDGER)
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
    assert Maintenance(one, app.broker, app.host, app.controls).recover_dead() == 1
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
    """Its own parts, over a minute of a clock that is moved on: the beats, the fetches and the look after others."""
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
                    app.broker.exchange(ledger.identity, [], ["default"], 5)
        asked.append(len(seen))
    assert max(asked) < 60, asked
    assert min(asked) <= 40, "one that is not on duty asks even less"


def test_an_idle_worker_process_has_no_round_of_its_dispatcher(world: World) -> None:
    app = world.app()
    app.dispatcher.attach(lambda: Load("a process", ["default"], 5, 0.0))
    assert app.dispatcher._step() > 30
    with counted(app) as seen:
        assert app.dispatcher._step() > 30
    assert seen == []
