"""One bad job, one failing part, one pile of upkeep: none of them may keep the others from the broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from support.costs import analyze, plan, scans, statements
from support.world import World, numbers

from asynctask import AsyncTask
from asynctask.brokers.base import DEAD, Copy, Held
from asynctask.dispatch import dispatcher
from asynctask.dispatch.demand import Load
from asynctask.errors import BrokerUnavailable, InputError, UnknownWorker
from asynctask.job import CurrentJob
from asynctask.ledger import leases, lost_copies, reservations
from asynctask.lists.options import check_options
from asynctask.maintenance import POISON_COPIES, Maintenance
from asynctask.testing import wait_for
from asynctask.worker import Priority, Worker

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")


def using(app: AsyncTask, free: int, *queues: str) -> None:
    """This process can use so many jobs, and performs none."""
    app.dispatcher.attach(lambda: Load("a process", queues or ("default",), free, 0.0))


def statuses(world: World, task_id: int) -> dict[str, int]:
    return dict(world.sql("SELECT status, COUNT(*) FROM events WHERE task_id = ? GROUP BY status", task_id))


def queued(world: World) -> dict[int, int]:
    """How many copies wait at each priority."""
    return dict(
        world.sql("SELECT priority, COUNT(*) FROM jobs WHERE process IS NULL AND held_in IS NULL GROUP BY priority")
    )


class Picky:
    """A broker in front of the real one: ``refuses`` says of a push why it fails."""

    def __init__(self, broker: Any, refuses: Callable[[Sequence[Copy]], Exception | None]) -> None:
        self._broker, self._refuses = broker, refuses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    def push(self, copies: Sequence[Copy]) -> None:
        if (error := self._refuses(copies)) is not None:
            raise error
        self._broker.push(copies)


# -- one job that cannot be pushed

WRONG: list[dict[str, Any]] = [
    {"priority": 2**63}, {"priority": -(10**6) - 1}, {"priority": "high"}, {"priority": None}, {"priority": 1.5},
    {"retry": -1}, {"retry": 1_001}, {"retry": "often"}, {"queue": ""}, {"queue": "a b"}, {"queue": "q" * 256},
    {"queue": "a\n"}, {"queue": None},
]  # fmt: skip
RIGHT: list[dict[str, Any]] = [
    {"priority": 10**6},
    {"priority": Priority.ADMIN_HIGH},
    {"retry": True},
    {"retry": 0},
    {"queue": "a:b_c.d-E9"},
]


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_a_job_option_that_no_broker_could_hold_is_refused_where_it_is_said(world: World, options: dict[str, Any]) -> None:
    app = world.app()
    worker = app.workers["note"]
    (name,) = options
    for say in (lambda: worker.set(**options), lambda: app.push(worker, [({"n": 1},)], options=options)):
        with pytest.raises(InputError) as caught:
            say()
        assert [(each.column, each.code) for each in caught.value.errors] == [(name, f"bad_{name}")]
    assert world.sql("SELECT * FROM events") == []


@pytest.mark.parametrize("options", RIGHT, ids=str)
def test_a_job_option_within_the_bounds_of_a_submission_is_taken(world: World, options: dict[str, Any]) -> None:
    app = world.app()
    assert app.workers["note"].set(**options).perform_async({"n": 1})


@pytest.mark.parametrize("options", [o for o in WRONG + RIGHT if not {"retry", None, "a\n"} & {*o, *o.values()}], ids=str)
def test_jobs_and_submissions_have_the_same_bounds(world: World, options: dict[str, Any]) -> None:
    try:
        check_options(options)
    except InputError:
        assert options in WRONG
    else:
        assert options in RIGHT


@pytest.mark.parametrize("priority", [str(2**63), '"high"', "[1]"])
def test_a_job_that_cannot_be_pushed_ends_in_error_and_holds_up_no_other(world: World, priority: str) -> None:
    app = world.app()
    worker = app.workers["note"]
    bad, good = worker.perform_bulk(numbers(2))
    assert "240" in world.one("SELECT options FROM events WHERE job_id = ?", bad)
    world.sql("UPDATE events SET options = REPLACE(options, '240', ?) WHERE job_id = ?", priority, bad)
    using(app, 10)
    app.dispatcher.round()
    task = app.submit("note", numbers(3))
    app.dispatcher.round()
    event = app.event(str(bad))
    assert event["status"] == "error"
    assert "cannot be put on its queue" in event["messages"][-1]["message"]
    assert app.broker.holds([(str(good), 1)]) == {(str(good), 1)}
    assert task.progress()["control"]["in_flight"] == 3
    assert sum(queued(world).values()) == 4


def test_a_job_that_this_process_does_not_know_how_to_push_waits_for_another(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As during a deployment: RQ needs the path of a function, and a process of the earlier release has none."""
    app = world.app()
    task = app.submit("note", numbers(2))
    using(app, 10)

    def push(copies: Sequence[Copy]) -> None:
        raise UnknownWorker("note", ())

    with monkeypatch.context() as patch:
        patch.setattr(app.broker, "push", push)
        app.dispatcher.round()
    for event in task.events():
        assert (event["status"], event["retries"], event["due_at"] is None) == ("enqueue", 0, False)
        assert [m["message"] for m in event["messages"]] == [
            "Waiting for a process that can dispatch it: one of them does not know 'note'"
        ]
    assert task.progress()["control"]["in_flight"] == 0
    assert app.doctor() == []


def test_of_a_whole_batch_only_the_copy_that_the_broker_refuses_ends_in_error(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(50))
    bad = task.events()[31]["job_id"]
    app.dispatcher._router._broker = Picky(
        app.broker, lambda c: ValueError("no\ud800") if any(x.jid == bad for x in c) else None
    )
    using(app, 100)
    app.dispatcher.round()
    assert statuses(world, task.id) == {"enqueue": 49, "error": 1}
    assert sum(queued(world).values()) == 49
    assert task.progress()["control"]["in_flight"] == 49
    assert app.doctor() == []


def test_what_a_broker_that_is_away_did_not_take_is_pushed_by_the_next_round(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(5))
    away: list[Exception | None] = [BrokerUnavailable("away")]
    app.dispatcher._router._broker = Picky(app.broker, lambda copies: away[0])
    using(app, 100)
    with pytest.raises(BrokerUnavailable):
        app.dispatcher.round()
    assert statuses(world, task.id) == {"enqueue": 5}, "that a broker is away is no fault of the jobs"
    away[0] = None
    app.dispatcher.round()
    assert sum(queued(world).values()) == 5


def test_a_task_that_cannot_be_reserved_leaves_the_others_their_turn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    app = world.app()
    broken, good = app.submit("note", numbers(3)), app.submit("note", numbers(3))
    reserve = reservations.reserve

    def failing(ledger: Any, task_id: int, *rest: Any, **more: Any) -> Any:
        if task_id == broken.id:
            raise RuntimeError("a row that cannot be read")
        return reserve(ledger, task_id, *rest, **more)

    def failing_together(ledger: Any, task_ids: Any, *rest: Any, **more: Any) -> Any:
        raise RuntimeError("a row that cannot be read")

    monkeypatch.setattr(reservations, "reserve", failing)
    monkeypatch.setattr(dispatcher, "reserve_small", failing_together)
    using(app, 100)
    app.dispatcher.round()
    assert (broken.progress()["control"]["in_flight"], good.progress()["control"]["in_flight"]) == (0, 3)


# -- a Task that is stopped between its reservation and the push


def stopping(app: AsyncTask, stop: Callable[[], object]) -> Any:
    """A broker to which nothing is pushed before ``stop`` was called, once."""
    stops = [stop]

    def stop_once(copies: Sequence[Copy]) -> None:
        if stops:
            stops.pop()()

    return Picky(app.broker, stop_once)


@pytest.mark.parametrize("broker_kind", ["sql", "redis"])
def test_a_task_that_is_cancelled_between_its_reservation_and_the_push_closes_without_a_worker(world: World) -> None:
    app, user = world.app(), world.app()
    task = user.submit("note", numbers(5))
    using(app, 3)
    app.dispatcher._router._broker = stopping(app, lambda: user.task(task.id).cancel())
    app.dispatcher.round()
    assert app.broker.withdraw(task.id, 10) == []
    assert (task.progress()["state"], task.progress()["done"]) == ("cancelled", True)
    world.check_promises(app, [task.id], 5)


def test_a_task_that_is_paused_between_its_reservation_and_the_push_leaves_nothing_in_the_broker(world: World) -> None:
    app, user = world.app(), world.app()
    task = user.submit("note", numbers(5))
    using(app, 3)
    app.dispatcher._router._broker = stopping(app, lambda: user.task(task.id).pause())
    app.dispatcher.round()
    assert queued(world) == {}
    assert task.progress()["control"]["in_flight"] == 0
    task.resume()
    using(app, 5)
    app.dispatcher.round()
    assert sum(queued(world).values()) == 5


def test_copies_of_a_cancelled_task_whose_dispatcher_died_after_the_push_are_taken_back_by_maintenance(
    world: World,
) -> None:
    app, user = world.app(), world.app()
    task = user.submit("note", numbers(5))
    using(app, 3)
    app.dispatcher._router._broker = stopping(app, lambda: user.task(task.id).cancel())
    app.dispatcher._outbox._recall = lambda task_id: None
    app.dispatcher.round()
    assert sum(queued(world).values()) == 3
    Maintenance(user.ledger, user.broker, user.host, user.controls).run_once()
    assert queued(world) == {}
    world.check_promises(app, [task.id], 5)


# -- a dispatcher that dies between its reservation and the push


class Killed(BaseException):
    """Stands for the end of the process: nothing of it runs after that."""


def dies_before_the_push(app: AsyncTask, free: int = 1) -> None:
    """This application's dispatcher reserves up to so many jobs, and ends."""

    def kill(copies: Sequence[Copy]) -> None:
        raise Killed

    using(app, free)
    app.dispatcher._router._broker = Picky(app.broker, kill)
    with pytest.raises(Killed):
        app.dispatcher.round()


def pushes(app: AsyncTask) -> list[str]:
    """The ids of what this application's dispatcher pushes from now on."""
    seen: list[str] = []
    app.dispatcher._router._broker = Picky(app.broker, lambda copies: seen.extend(copy.jid for copy in copies))
    return seen


def due_again(app: AsyncTask, task: Any) -> None:
    """The jobs of this Task that are out wait in the ledger again."""
    app.dispatcher.attach(None)
    task.pause()
    task.resume()
    assert task.progress()["control"]["in_flight"] == 0


@pytest.mark.each_database(reason="what is read and locked is each one's own")
@pytest.mark.parametrize("broker_kind", ["sql", "redis"])
def test_due_jobs_whose_dispatcher_died_are_pushed_with_its_reservation_and_those_held_are_not(world: World) -> None:
    """Taken out: `out_before`. Until a search had missed them twice, a Task with a `parallel` of 1 stood still."""
    dead, app = world.app(), world.app()
    task = dead.submit("note", numbers(3), parallel=2)
    using(dead, 3)
    dead.dispatcher.round()
    due_again(dead, task)
    using(dead, 1)
    dead.dispatcher.round()
    (held,) = dead.broker.exchange("a process", [], ["default"], 5)
    dies_before_the_push(dead)
    assert task.progress()["control"]["in_flight"] == 2
    pushed = pushes(app)
    using(app, 5)
    app.dispatcher.round()
    assert pushed == [], "its lease runs"
    world.sql("UPDATE tasks SET dispatch_until = 1")
    app.dispatcher.round()
    first = [each["job_id"] for each in task.events()[:2]]
    assert sorted([*pushed, held.jid]) == sorted(first), "what a process holds is not pushed a second time"
    assert len(app.broker.exchange("another", [], ["default"], 5)) == 1
    assert world.one("SELECT dispatch_by FROM tasks") is None, "it is confirmed"
    assert app.doctor() == []


@pytest.mark.parametrize("broker_kind", ["sql", "redis"])
def test_a_new_leader_pushes_at_once_what_the_last_one_reserved_before_its_lease_ended(world: World) -> None:
    """Taken out: `late` of `unconfirmed`. The lease of a reservation is five times that of a leader."""
    dead, app = world.app(), world.app()
    assert leases.acquire(dead.ledger, leases.DISPATCH, 60.0) is None
    limited = dead.submit("note", numbers(2), parallel=1)
    dies_before_the_push(dead)
    world.sql("UPDATE tasks SET dispatch_until = dispatch_until + 3600000000")
    app.submit("note", numbers(50))
    using(app, 1)
    pushed = pushes(app)
    app.dispatcher.start()
    try:
        first = limited.events()[0]["job_id"]
        wait_for(lambda: app.dispatcher.rounds > 1, "it makes rounds")
        assert first not in pushed, "another leads"
        world.sql("UPDATE duties SET held_until = 1")
        wait_for(lambda: first in pushed, "it leads now")
    finally:
        app.dispatcher.stop()
    assert pushed.count(first) == 1


# -- a client middleware that leaves no job


def spoil_object(payload: dict[str, Any]) -> None:
    payload["x"] = object()


def spoil_args(payload: dict[str, Any]) -> None:
    del payload["args"]


def spoil_class(payload: dict[str, Any]) -> None:
    payload["class"] = 7


def spoil_text(payload: dict[str, Any]) -> None:
    payload["x"] = "\ud800"


SPOILS = [spoil_object, spoil_args, spoil_class, spoil_text]


def spoiling(app: AsyncTask, name: str, spoil: Callable[[dict[str, Any]], None]) -> None:
    def middleware(worker: Worker, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
        if worker.name == name:
            spoil(job.payload)
        return call_next()

    app.client_middleware.add(middleware)


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_task_whose_payloads_a_middleware_spoils_ends_in_error_and_starves_nobody(
    world: World, spoil: Callable[[dict[str, Any]], None]
) -> None:
    app = world.app()
    spoiling(app, "brief", spoil)
    using(app, 100)
    bad, good = app.submit("brief", numbers(20)), app.submit("note", numbers(5))
    app.dispatcher.round()
    assert statuses(world, bad.id) == {"error": 20}
    assert "client middleware" in bad.events()[0]["messages"][-1]["message"]
    assert good.progress()["control"]["in_flight"] == 5


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("tracked", [True, False], ids=["tracked", "untracked"])
def test_a_single_job_that_a_middleware_spoils_is_refused_and_leaves_nothing(
    world: World, spoil: Callable[[dict[str, Any]], None], tracked: bool
) -> None:
    app = world.app()
    app.worker(lambda item: None, name="single", use_task_event=tracked)
    spoiling(app, "single", spoil)
    with pytest.raises(InputError, match="client middleware"):
        app.workers["single"].perform_async({"n": 1})
    assert world.sql("SELECT 1 FROM events UNION ALL SELECT 1 FROM jobs") == []


def test_a_fault_of_the_dispatch_does_not_look_like_a_refusal(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    app = world.app()

    def broken(self: Any) -> int:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(type(app.dispatcher), "round", broken)
    assert app.submit("note", numbers(2)).progress()["counts"]["total"] == 2
    assert app.workers["note"].perform_async({"n": 1})


# -- priorities


@contextmanager
def queries(app: AsyncTask) -> Iterator[list[str]]:
    """The statements that this application runs meanwhile."""
    said: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        said.append(statement)

    engine = app.ledger.database.engine
    sa.event.listen(engine, "before_cursor_execute", note)
    try:
        yield said
    finally:
        sa.event.remove(engine, "before_cursor_execute", note)


def test_an_urgent_task_does_not_wait_behind_a_pile_of_upkeep(world: World) -> None:
    app = world.app()
    using(app, 4)
    app.workers["note"].set(priority=Priority.SYSTEM_LOW).perform_bulk(numbers(500))
    app.dispatcher.round()
    assert queued(world) == {Priority.SYSTEM_LOW: 4}, "no more than the process can use"
    app.submit("note", numbers(1), priority=Priority.ADMIN_HIGH)
    app.dispatcher.round()
    assert queued(world) == {Priority.ADMIN_HIGH: 1, Priority.SYSTEM_LOW: 4}
    (copy,) = app.broker.exchange("a process", [], ["default"], 1)
    assert copy.priority == Priority.ADMIN_HIGH


def test_an_urgent_single_job_does_not_wait_behind_more_of_them_than_one_look_reads(world: World) -> None:
    app = world.app()
    using(app, 2)
    note = app.workers["note"]
    note.set(priority=Priority.SYSTEM_LOW).perform_bulk(numbers(2_500))
    app.dispatcher.round()
    note.set(priority=Priority.ADMIN_HIGH).perform_async({"n": 0})
    app.dispatcher.round()
    assert queued(world)[Priority.ADMIN_HIGH] == 1


def test_what_is_less_urgent_waits_while_more_urgent_jobs_fill_the_queue(world: World) -> None:
    app = world.app()
    using(app, 4)
    app.submit("note", numbers(10), priority=Priority.ADMIN_HIGH)
    low = app.submit("note", numbers(10), priority=Priority.SYSTEM_LOW)
    app.workers["note"].set(priority=Priority.SYSTEM_MID).perform_async({"n": 1})
    app.dispatcher.round()
    assert queued(world) == {Priority.ADMIN_HIGH: 4}
    assert low.progress()["control"]["in_flight"] == 0


def test_single_jobs_of_a_queue_that_nobody_works_wait_in_the_ledger_and_keep_no_others(world: World) -> None:
    app = world.app()
    note = app.workers["note"]
    idle = note.set(queue="nobody").perform_bulk(numbers(3_000))
    using(app, 5)
    good = note.perform_bulk(numbers(2))
    app.dispatcher.round()
    assert app.broker.holds([(str(jid), 1) for jid in good]) == {(str(jid), 1) for jid in good}
    assert world.one("SELECT COUNT(*) FROM events WHERE queue = 'nobody' AND due_at IS NOT NULL") == len(idle)
    using(app, 5, "nobody")
    app.dispatcher.round()
    assert world.one("SELECT COUNT(*) FROM jobs WHERE queue = 'nobody'") == 5


def test_neither_single_jobs_nor_tasks_of_a_priority_starve_where_there_is_room_for_one(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(20))
    app.workers["note"].perform_bulk(numbers(20))
    using(app, 1)
    kinds = set()
    for _ in range(4):
        app.dispatcher.round()
        (copy,) = app.broker.exchange("a process", [], ["default"], 10)
        app.broker.drop("a process", [copy])
        kinds.add(copy.task_id)
    assert kinds == {None, task.id}


def test_a_round_asks_what_waits_at_every_priority_once_and_by_an_index(world: World) -> None:
    app = world.app()
    for priority in (120, 240, 360):
        app.submit("note", numbers(1), priority=priority)
    using(app, 1)
    with statements(app.ledger.database) as said:
        app.dispatcher.round()
    counting = [each for each in said if "FROM jobs" in each[0] and "count(" in each[0]]
    assert len(counting) == 1
    app.broker.hold(DEAD, [Held(Copy(f"dead-{n}", 0, "default", "{}"), n) for n in range(3_000)])
    analyze(app.ledger.database)
    steps = plan(app.ledger.database, *counting[0])
    assert any("ix_jobs_waiting" in step for step in steps), steps
    assert not scans(steps, "jobs"), steps


def test_a_round_with_nothing_to_do_asks_the_ledger_only(world: World) -> None:
    app = world.app()
    using(app, 4)
    with queries(app) as said:
        app.dispatcher.round()
    assert len([statement for statement in said if statement.startswith("SELECT")]) == 5, said
    assert not any("FROM jobs" in statement for statement in said)


# -- what cannot be decoded, and untracked jobs that kill


def test_a_tracked_copy_that_is_no_job_ends_its_item_in_error(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(2))
    using(app, 10)
    app.dispatcher.round()
    app.dispatcher.attach(None)
    world.sql('UPDATE jobs SET payload = \'{"class": "note"}\' WHERE id = (SELECT MIN(id) FROM jobs)')
    with world.working(app):
        assert task.wait(120)["done"]
        wait_for(lambda: not world.sql("SELECT 1 FROM jobs"), "every copy is acknowledged")
    assert statuses(world, task.id) == {"error": 1, "finish": 1}
    assert "decoded" in task.events("error")[0]["messages"][-1]["message"]
    world.check_promises(app, [task.id], 2)


def test_an_untracked_copy_that_is_no_job_is_kept_among_the_dead(world: World) -> None:
    app = world.app()
    app.broker.push([Copy("0" * 24, 0, "default", "no job")])
    with world.working(app):
        wait_for(lambda: app.broker.members(DEAD, 10), "it is among the dead")
    assert [held.copy.payload for held in app.broker.members(DEAD, 10)] == ["no job"]


def test_a_copy_that_lies_in_a_set_is_not_on_its_way_and_its_event_is_dispatched_again(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(1))
    using(app, 1)
    app.dispatcher.round()
    world.sql("UPDATE jobs SET held_in = 'dead'")
    maintenance = Maintenance(app.ledger, app.broker, app.host, app.controls)
    found = []
    for _ in range(2):
        maintenance._searched_at = 0
        found.append(maintenance.find_lost())
    assert found == [0, 1]
    assert task.progress()["control"]["in_flight"] == 0


def test_an_untracked_job_under_which_three_processes_died_is_put_among_the_dead(world: World) -> None:
    app = world.app()
    app.worker(lambda item: None, name="killer", use_task_event=False)
    jid = app.workers["killer"].perform_async({"n": 1})
    maintenance = Maintenance(app.ledger, app.broker, app.host, app.controls)
    for count in range(1, POISON_COPIES + 1):
        (copy,) = app.broker.exchange(f"process {count}", [], ["default"], 10)
        assert copy.deaths == count - 1
        maintenance.recover(f"process {count}")
    assert app.broker.exchange("another", [], ["default"], 10) == []
    assert [(held.copy.jid, held.copy.deaths) for held in app.broker.members(DEAD, 10)] == [(jid, POISON_COPIES)]


# -- counts and looks


def test_a_row_that_was_recorded_as_working_before_the_pointer_came_counts_as_in_flight(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(3), parallel=2)
    early = task.events()[0]["job_id"]
    assert app.record(early, "working")
    using(app, 10)
    for _ in range(3):
        app.dispatcher.round()
    assert task.progress()["control"]["in_flight"] == 2, "its parallel holds for what was recorded from outside too"
    assert len(world.sql("SELECT 1 FROM jobs")) == 1
    assert app.doctor() == []
    app.record(early, "finish")
    assert task.progress()["control"]["in_flight"] == 1
    assert app.doctor() == []
    app.dispatcher.attach(None)
    with world.working(app):
        assert task.wait(120)["done"]
    world.check_promises(app, [task.id], 3)


def fetched_rows(app: AsyncTask, act: Callable[[Any], Sequence[Any]]) -> tuple[list[Any], list[str]]:
    with queries(app) as said, app.ledger.database.read() as connection:
        found = list(act(connection))
    return found, said


def test_a_look_at_single_jobs_reads_the_oldest_first_and_no_more_than_its_limit(world: World) -> None:
    app = world.app()
    app.workers["note"].perform_bulk(numbers(30))
    world.sql("UPDATE events SET due_at = NULL, look_at = 1000 - id")
    found, said = fetched_rows(app, lambda c: lost_copies.events_to_check(c, app.ledger.now(), 7))
    assert {record.id for record in found} == {i for (i,) in world.sql("SELECT id FROM events ORDER BY id DESC LIMIT 7")}
    assert any("look_at" in each and "LIMIT" in each for each in said)


def test_a_look_at_rows_in_flight_reads_the_first_ones_and_no_more_than_its_limit(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(30))
    using(app, 30)
    app.dispatcher.round()
    found, said = fetched_rows(app, lambda c: lost_copies.rows_in_flight(c, task.id, 7))
    assert sorted(record.seq for record in found if record.seq is not None) == list(range(7))
    assert any("seq" in each and "LIMIT" in each for each in said)


def test_one_round_of_maintenance_checks_more_single_jobs_than_one_query_reads(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = world.app()
    monkeypatch.setattr("asynctask.maintenance._BATCH", 10)
    app.workers["note"].perform_bulk(numbers(35))
    world.sql("UPDATE events SET due_at = NULL, look_at = 1")
    Maintenance(app.ledger, app.broker, app.host, app.controls).find_lost()
    assert world.one("SELECT COUNT(*) FROM events WHERE look_at IS NULL AND due_at IS NOT NULL AND attempt = 2") == 35
