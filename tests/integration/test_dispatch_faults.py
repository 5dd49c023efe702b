"""One bad job, one failing part: none of them may keep the others from their queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support.borrowing import borrow_alone
from support.foreign import Shop, works
from support.untracked import broker_of
from support.world import World, numbers

from asynctask import AsyncTask
from asynctask.brokers.base import DEAD, Copy
from asynctask.core.transitions import POISON_DEATHS
from asynctask.errors import InputError
from asynctask.job import CurrentJob
from asynctask.ledger import processes as recovery
from asynctask.lists.options import check_options
from asynctask.maintenance import POISON_COPIES
from asynctask.testing import wait_for
from asynctask.worker import Priority, Worker

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")


def using(app: AsyncTask, free: int) -> None:
    """A process in another language can use so many jobs."""
    works(app, "ruby@here:1:a", ("default",), free)


def statuses(world: World, task_id: int) -> dict[str, int]:
    return dict(world.sql("SELECT status, COUNT(*) FROM events WHERE task_id = ? GROUP BY status", task_id))


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


# -- a Task that is stopped between the borrow and the push, for workers in other languages


def stopping(app: AsyncTask, stop: Callable[[], object]) -> Any:
    """A broker to which nothing is pushed before ``stop`` was called, once."""
    stops = [stop]

    def stop_once(copies: Sequence[Copy]) -> None:
        if stops:
            stops.pop()()

    return Picky(app.broker, stop_once)


@pytest.mark.parametrize("broker_kind", ["redis"])
def test_a_task_that_is_cancelled_between_the_borrow_and_the_push_closes_without_a_worker(world: World) -> None:
    app, user = world.app(), world.app()
    task = user.submit("note", numbers(5))
    using(app, 3)
    app.dispatcher.queues._router._broker = stopping(app, lambda: user.task(task.id).cancel())
    app.dispatcher.run_pass()
    assert broker_of(app).withdraw(task.id, 10) == []
    assert (task.progress()["state"], task.progress()["done"]) == ("cancelled", True)
    world.check_promises(app, [task.id], 5)


@pytest.mark.parametrize("broker_kind", ["redis"])
@pytest.mark.parametrize("knob", ["pause", "priority"])
def test_a_task_that_is_changed_between_the_borrow_and_the_push_leaves_nothing_in_the_broker(
    world: World, knob: str
) -> None:
    app, user = world.app(), world.app()
    task = user.submit("note", numbers(5))
    using(app, 3)
    change = user.task(task.id).pause if knob == "pause" else lambda: user.task(task.id).update(priority=300)
    app.dispatcher.queues._router._broker = stopping(app, change)
    app.dispatcher.run_pass()
    assert broker_of(app).waiting(["default"]) == {}
    assert task.progress()["control"]["in_flight"] == 0
    task.resume()
    using(app, 5)
    app.dispatcher.run_pass()
    assert sum(broker_of(app).waiting(["default"])["default"].values()) == 5


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
    shop = Shop(app, free=100)
    spoiling(app, "sold", spoil)
    bad, good = app.submit("sold", numbers(20)), app.submit("sent", numbers(5))
    app.dispatcher.run_pass()
    assert statuses(world, bad.id) == {"error": 20}
    assert "client middleware" in bad.events()[0]["messages"][-1]["message"]
    assert [copy.task_id for copy in shop.takes()] == [good.id] * 5


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
    assert world.sql("SELECT 1 FROM events") == []


def test_a_fault_of_the_dispatch_does_not_look_like_a_refusal(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    app = world.app()

    def broken(self: Any) -> int:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(type(app.dispatcher), "run_pass", broken)
    assert app.submit("note", numbers(2)).progress()["counts"]["total"] == 2
    assert app.workers["note"].perform_async({"n": 1})


# -- what cannot be decoded, and untracked jobs that kill


@pytest.mark.parametrize("broker_kind", ["redis"])
def test_an_untracked_copy_that_is_no_job_is_kept_among_the_dead(world: World) -> None:
    app = world.app()
    broker = broker_of(app)
    broker.push([Copy("0" * 24, 0, "default", "no job")])
    with world.working(app):
        wait_for(lambda: broker.members(DEAD, 10), "it is among the dead")
    assert [held.copy.payload for held in broker.members(DEAD, 10)] == ["no job"]


@pytest.mark.parametrize("broker_kind", ["redis"])
def test_an_untracked_job_under_which_three_processes_died_is_put_among_the_dead(world: World) -> None:
    app = world.app()
    broker = broker_of(app)
    app.worker(lambda item: None, name="killer", use_task_event=False)
    jid = app.workers["killer"].perform_async({"n": 1})
    maintenance = app.maintenance(app.ledger)
    for count in range(1, POISON_COPIES + 1):
        (copy,) = broker.exchange(f"process {count}", [], ["default"], 10)
        assert copy.deaths == count - 1
        maintenance.recover(f"process {count}")
    assert broker.exchange("another", [], ["default"], 10) == []
    assert [held.copy.jid for held in broker.members(DEAD, 10)] == [jid]


def test_an_untracked_job_of_the_ledger_that_kills_its_process_is_put_among_the_dead_as_poison(world: World) -> None:
    """Each time it had begun, by what the ledger knows. One that a dead process only held counts no death."""
    app = world.app()
    app.worker(lambda item: None, name="killer", use_task_event=False)
    jid = str(app.workers["killer"].perform_async({"n": 1}))
    for count in range(POISON_DEATHS + 1):
        holder = app.ledger.under(f"process {count}")
        (job,) = borrow_alone(holder, workers=["killer"])
        assert (job.job_id, job.items) == (jid, 0)
        if count:  # the first of them dies before it begins
            world.sql("UPDATE events SET status = 'working'")
        recovery.recover_events(app.ledger, holder.identity)
    assert borrow_alone(app.ledger.under("another"), workers=["killer"]) == []
    assert world.sql("SELECT status, problem, deaths FROM events") == [("error", "poison", POISON_DEATHS)]
    (entry,) = app.operations.listed("dead")["entries"]
    assert (entry["key"], entry["tracked"], entry["error_class"]) == (jid, False, "poison")
