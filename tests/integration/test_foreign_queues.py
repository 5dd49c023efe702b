"""What lies in a foreign queue is lent to it: its loans end with its jobs, and the limits of Tasks hold there, too."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from support.foreign import QUEUE, Shop
from support.world import World, numbers

from asynctask import AsyncTask
from asynctask.brokers.base import Copy
from asynctask.dispatch.dispatcher import Dispatcher
from asynctask.errors import BrokerUnavailable, UnknownWorker
from asynctask.ledger import foreign, hints, leases, lending
from asynctask.ledger.base import Ledger
from asynctask.ledger.lending import queue_holder
from asynctask.testing import wait_for
from asynctask.worker import Priority

HOLDER = queue_holder("shop")


def loans(world: World) -> list[tuple[int, int, str | None]]:
    return [(low, high, process) for low, high, process in world.sql("SELECT low, high, process FROM loans ORDER BY low")]


def places(world: World) -> dict[str, int]:
    return dict(world.sql("SELECT process, n FROM places"))


def statuses(world: World, task_id: int) -> dict[str, int]:
    return dict(world.sql("SELECT status, COUNT(*) FROM events WHERE task_id = ? GROUP BY status", task_id))


def another(app: AsyncTask, shop: Shop, identity: str = "another") -> Dispatcher:
    """The dispatcher of another process that reaches the same queue."""
    waker = app.signals.waker(for_jobs=True)
    return Dispatcher(Ledger(app.ledger.database, identity=identity), app.broker, waker, engines={"shop": shop})


def alone(dispatcher: Dispatcher) -> int:
    """A round after which it does not lead, so that another may push what is more than wanted."""
    pushed = dispatcher.run_pass()
    dispatcher._leadership("shop").resign()
    return pushed


# -- loans of a queue


def test_nothing_is_pushed_before_the_start_time_of_a_task(world: World) -> None:
    app = world.app()
    Shop(app, free=4)
    task = app.submit("sold", numbers(10), start_at="2999-01-01T00:00:00Z")
    assert (app.dispatcher.run_pass(), loans(world)) == (0, [])
    task.update(start_at=None)
    assert app.dispatcher.run_pass() == 4


def test_what_is_pushed_is_lent_to_the_queue_until_it_ends(world: World) -> None:
    app = world.app()
    shop = Shop(app, free=4)
    task = app.submit("sold", numbers(10))
    assert app.dispatcher.run_pass() == 4
    assert loans(world) == [(0, 4, HOLDER)]
    assert app.dispatcher.run_pass() == 0, "so many wait there"
    taken = shop.takes()
    shop.ends(taken[:2])
    assert app.dispatcher.run_pass() == 4
    assert loans(world) == [(2, 4, HOLDER), (4, 8, HOLDER)]
    shop.ends([*taken[2:], *shop.takes()])
    app.dispatcher.run_pass()
    shop.ends(shop.takes())
    assert task.progress()["done"]
    app.dispatcher.run_pass()
    assert loans(world) == []
    assert app.doctor() == []


def test_of_a_limited_task_no_more_lie_in_the_queue_and_with_its_workers_than_may_run(world: World) -> None:
    app = world.app()
    shop = Shop(app, free=100)
    task = app.submit("sold", numbers(20), parallel=3)
    assert (app.dispatcher.run_pass(), alone(app.dispatcher)) == (3, 0)
    assert places(world) == {HOLDER: 3}
    other = another(app, shop)
    running = shop.takes()
    while running:
        shop.ends(running[:1])
        sent = alone(other if len(running) % 2 else app.dispatcher)
        running = [*running[1:], *shop.takes()]
        assert sent == 1 or not task.progress()["counts"]["enqueue"] or len(running) < 3
        assert len(running) <= 3
    assert task.progress()["done"]
    app.dispatcher.run_pass()
    assert (loans(world), places(world)) == ([], {})


def test_a_limited_task_that_is_served_twice_in_a_round_keeps_its_limit(world: World) -> None:
    """What it got first is on its way, and not in the queue yet. Others had a share of the room, and did not need it."""
    app = world.app()
    shop = Shop(app, free=6)
    limited = app.submit("sold", numbers(20), parallel=3)
    others = [app.submit("sold", numbers(1)) for _ in range(2)]
    assert app.dispatcher.run_pass() == 3 + len(others)
    assert dict(world.sql("SELECT process, n FROM places WHERE task_id = ?", limited.id)) == {HOLDER: 3}
    assert len(shop.takes()) == 3 + len(others)
    assert app.doctor() == []


def test_two_dispatchers_between_their_borrow_and_their_push_keep_the_limit(world: World) -> None:
    """Taken out: the places that a dispatcher takes before it borrows."""
    app = world.app()
    shop = Shop(app, free=100)
    app.submit("sold", numbers(20), parallel=3)
    other, meanwhile = another(app, shop), list[int]()

    def in_between(copies: Sequence[Copy]) -> None:
        if not meanwhile:
            meanwhile.append(-1)
            meanwhile.append(other.run_pass())

    shop.refuses = in_between
    assert app.dispatcher.run_pass() == 3
    assert meanwhile == [-1, 0]
    assert len(shop.takes()) == 3


def test_a_claimed_job_that_its_worker_has_begun_still_has_its_place(world: World) -> None:
    app = world.app()
    shop = Shop(app, free=100)
    task = app.submit("sold", numbers(5), parallel=1)
    app.dispatcher.run_pass()
    (copy,) = shop.takes()
    world.sql("UPDATE events SET due_at = 1, attempt = 2 WHERE job_id = ?", copy.jid)
    hints.settle_free(app.ledger, [task.id])
    assert app.dispatcher.run_pass() == 1
    (again,) = shop.takes()
    assert (again.jid, again.attempt) == (copy.jid, 2)
    world.sql("UPDATE events SET status = 'working', process = 'shop@there:2:b' WHERE job_id = ?", copy.jid)
    assert app.dispatcher.run_pass() == 0
    assert places(world) == {HOLDER: 1}


def test_a_limit_that_comes_later_counts_what_lies_in_the_queue(world: World) -> None:
    app = world.app()
    shop = Shop(app, free=5)
    task = app.submit("sold", numbers(20))
    assert app.dispatcher.run_pass() == 5
    task.update(parallel=2)
    shop.takes()
    assert app.dispatcher.run_pass() == 0
    assert places(world) == {HOLDER: 5}


def test_single_jobs_are_claimed_for_the_queue(world: World) -> None:
    app = world.app()
    shop = Shop(app, free=5)
    app.workers["note"].perform_bulk(numbers(2))
    world.sql("UPDATE events SET queue = ?", QUEUE)
    assert app.dispatcher.run_pass() == 2
    assert world.sql("SELECT DISTINCT process, due_at FROM events") == [(HOLDER, None)]
    shop.ends(shop.takes())
    assert world.sql("SELECT DISTINCT status, process FROM events") == [("finish", None)]


def test_a_single_job_behind_busy_workers_is_pushed_when_one_is_free(world: World) -> None:
    """Taken out: that somebody leads meanwhile. Of a worker in another language nothing notifies when its job ends."""
    app = world.app()
    shop = Shop(app, free=1)
    first, _ = app.workers["note"].perform_bulk(numbers(2))
    world.sql("UPDATE events SET queue = ?", QUEUE)
    world.sql("UPDATE events SET status = 'working', process = ?, due_at = NULL WHERE job_id = ?", shop.process, first)
    app.dispatcher.start()
    try:
        wait_for(lambda: app.dispatcher._leadership("shop").held, "it leads")
        assert shop.pushed == []
        world.sql("UPDATE events SET status = 'finish', process = NULL WHERE job_id = ?", first)
        wait_for(lambda: len(shop.pushed) == 1, "it is pushed", timeout=5)
    finally:
        app.dispatcher.stop()


def test_a_program_without_a_foreign_queue_makes_no_query(world: World) -> None:
    app = world.app()
    app.submit("note", numbers(3))
    with queried(app) as said:
        app.dispatcher.start()
        app.dispatcher.nudge()
        app.dispatcher.expect(1)
        assert app.dispatcher.run_pass() == 0
        app.dispatcher.stop()
    assert said == []


@contextmanager
def queried(app: AsyncTask) -> Iterator[list[str]]:
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


# -- what cannot be pushed


@pytest.mark.one_database(reason="what stands on the ledger is the same on each database")
class TestNotPushed:
    def test_what_a_broker_that_is_away_did_not_take_is_back_in_the_ledger(self, world: World) -> None:
        app = world.app()
        shop = Shop(app, free=100)
        task, limited = app.submit("sold", numbers(5)), app.submit("sold", numbers(5), parallel=2)
        app.workers["note"].perform_async({"n": 1})
        world.sql("UPDATE events SET queue = ? WHERE task_id IS NULL", QUEUE)
        shop.refuses = lambda copies: BrokerUnavailable("away")
        alone(app.dispatcher)
        assert statuses(world, task.id) == {"enqueue": 5}, "that a broker is away is no fault of the jobs"
        assert {process for *_, process in loans(world)} == {None}
        assert places(world) == {}
        shop.refuses = lambda copies: None
        assert another(app, shop).run_pass() == 8, "another process reaches it"
        assert Counter(copy.task_id for copy in shop.takes()) == {task.id: 5, limited.id: 2, None: 1}

    def test_of_a_whole_batch_only_the_copy_that_the_broker_refuses_ends_in_error(self, world: World) -> None:
        app = world.app()
        shop = Shop(app, free=100)
        task = app.submit("sold", numbers(50))
        bad = task.events()[31]["job_id"]
        shop.refuses = lambda copies: ValueError("no\ud800") if any(copy.jid == bad for copy in copies) else None
        app.dispatcher.run_pass()
        assert statuses(world, task.id) == {"enqueue": 49, "error": 1}
        assert "cannot be put on its queue" in app.event(bad)["messages"][-1]["message"]
        assert len(shop.takes()) == 49
        assert app.doctor() == []

    def test_a_job_that_this_process_does_not_know_how_to_push_waits_for_another(self, world: World) -> None:
        """As during a deployment: RQ needs the path of a function, and a process of the earlier release has none."""
        app = world.app()
        shop = Shop(app, free=10)
        task = app.submit("sold", numbers(2))
        shop.refuses = lambda copies: UnknownWorker("sold", ())
        app.dispatcher.run_pass()
        for event in task.events():
            assert (event["status"], event["retries"], event["due_at"] is None) == ("enqueue", 0, False)
            assert [m["message"] for m in event["messages"]] == [
                "Waiting for a process that can dispatch it: one of them does not know 'sold'"
            ]
        assert app.doctor() == []

    def test_a_task_that_cannot_be_borrowed_leaves_the_others_their_turn(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        app = world.app()
        shop = Shop(app, free=100)
        broken, good = app.submit("sold", numbers(3)), app.submit("sold", numbers(3))
        borrow = lending.borrow

        def failing(ledger: Any, offer: Any, *rest: Any, **more: Any) -> Any:
            if offer.task_id == broken.id:
                raise RuntimeError("a row that cannot be read")
            return borrow(ledger, offer, *rest, **more)

        monkeypatch.setattr(lending, "borrow", failing)
        app.dispatcher.run_pass()
        assert {copy.task_id for copy in shop.takes()} == {good.id}

    def test_what_a_dispatcher_had_that_died_before_its_push_is_pushed_by_another_under_a_new_attempt(
        self, world: World
    ) -> None:
        class Killed(BaseException):
            """Stands for the end of the process: nothing of it runs after that."""

        dead, app = world.app(), world.app()
        Shop(dead, free=3).refuses = lambda copies: Killed()
        shop = Shop(app)
        task = dead.submit("sold", numbers(5), parallel=4)
        with pytest.raises(Killed):
            dead.dispatcher.run_pass()
        dead.dispatcher._leadership("shop").resign()  # its lease ends
        shop.uses(100)
        assert places(world) == {foreign.pusher(dead.ledger.identity): 3}
        assert app.dispatcher.run_pass() == 1, "the rest has places"
        maintenance = app.maintenance(app.ledger)
        for _ in range(2):
            maintenance.recover_dead()
        assert app.dispatcher.run_pass() == 3
        assert Counter(copy.attempt for copy in shop.pushed) == {1: 1, 2: 3}
        assert app.doctor() == []
        assert task.progress()["counts"]["enqueue"] == 5

    def test_what_a_queue_lost_is_found_by_its_loans_and_claims(self, world: World) -> None:
        app = world.app()
        shop = Shop(app, free=10)
        task = app.submit("sold", numbers(3))
        app.workers["note"].perform_async({"n": 1})
        world.sql("UPDATE events SET queue = ? WHERE task_id IS NULL", QUEUE)
        assert app.dispatcher.run_pass() == 4
        maintenance = app.maintenance(app.ledger)

        assert [maintenance.find_lost(), maintenance.find_lost()] == [0, 0], "its queue holds them"
        taken = shop.takes()
        shop.ends([next(copy for copy in taken if copy.task_id == task.id)])
        assert [maintenance.find_lost(), maintenance.find_lost()] == [0, 3]
        assert app.dispatcher.run_pass() == 3
        assert {copy.attempt for copy in shop.takes()} == {2}
        assert task.progress()["counts"]["enqueue"] == 2


# -- whose turn it is


def begun(app: AsyncTask, shop: Shop, rounds: int, places_: int = 1) -> Counter[int | None]:
    """How many jobs of each Task a process of so many threads begins in so many rounds."""
    shop.uses(places_)
    found: Counter[int | None] = Counter()
    for _ in range(rounds):
        app.dispatcher.run_pass()
        found.update(copy.task_id for copy in shop.takes(places_))
    return found


@pytest.mark.one_database(reason="what stands on the ledger is the same on each database")
class TestTurns:
    def submitted(self, app: AsyncTask, count: int, items: int = 30, **options: Any) -> list[int]:
        return [app.submit("sold", numbers(items), **options).id for _ in range(count)]

    def test_tasks_share_alike_where_there_is_room_for_one(self, world: World) -> None:
        app = world.app()
        shop = Shop(app)
        ids = self.submitted(app, 5)
        assert begun(app, shop, 20) == dict.fromkeys(ids, 4)
        (later,) = self.submitted(app, 1)
        assert begun(app, shop, 12) == dict.fromkeys([*ids, later], 2)

    def test_more_tasks_than_a_round_reads_have_their_turns_too(self, world: World) -> None:
        app = world.app()
        shop = Shop(app)
        ids = self.submitted(app, 105, 3)
        assert begun(app, shop, 105) == dict.fromkeys(ids, 1)

    def test_owners_share_alike_whatever_they_handed_in(self, world: World) -> None:
        app = world.app(fair_by="owner")
        shop = Shop(app)
        many = self.submitted(app, 4, owner="many")
        (one,) = self.submitted(app, 1, owner="one")
        assert begun(app, shop, 16) == {one: 8, **dict.fromkeys(many, 2)}

    def test_a_larger_priority_has_its_share_while_a_smaller_one_wants_all(self, world: World) -> None:
        app = world.app(background_share=0.1)
        shop = Shop(app)
        (urgent,) = self.submitted(app, 1, 200, priority=100)
        later = [*self.submitted(app, 1, priority=300), *self.submitted(app, 1, priority=400)]
        found = begun(app, shop, 102)
        assert found[urgent] == 92
        assert [found[task_id] for task_id in later] == [5, 5]

    def test_without_a_background_share_a_larger_priority_waits(self, world: World) -> None:
        app = world.app(background_share=0.0)
        shop = Shop(app)
        (urgent,) = self.submitted(app, 1, 50, priority=100)
        (later,) = self.submitted(app, 1, priority=300)
        assert begun(app, shop, 50) == {urgent: 50}
        assert begun(app, shop, 10) == {later: 10}

    def test_neither_single_jobs_nor_tasks_of_a_priority_starve_where_there_is_room_for_one(self, world: World) -> None:
        app = world.app()
        shop = Shop(app)
        (task_id,) = self.submitted(app, 1)
        app.workers["note"].set(priority=app.workers["sold"].priority).perform_bulk(numbers(20))
        world.sql("UPDATE events SET queue = ? WHERE task_id IS NULL", QUEUE)
        assert set(begun(app, shop, 4)) == {None, task_id}

    def test_an_urgent_single_job_does_not_wait_behind_more_of_them_than_one_look_reads(self, world: World) -> None:
        app = world.app()
        shop = Shop(app)
        note = app.workers["note"]
        note.set(priority=Priority.SYSTEM_LOW).perform_bulk(numbers(2_500))
        urgent = note.set(priority=Priority.ADMIN_HIGH).perform_async({"n": 0})
        world.sql("UPDATE events SET queue = ?", QUEUE)
        shop.uses(1)
        app.dispatcher.run_pass()
        assert [copy.jid for copy in shop.takes()] == [urgent]

    def test_single_jobs_of_a_queue_that_nobody_works_wait_in_the_ledger_and_keep_no_others(self, world: World) -> None:
        app = world.app()
        shop = Shop(app)
        app.workers["note"].perform_bulk(numbers(3_000))
        world.sql("UPDATE events SET queue = 'shop/nobody'")
        (task_id,) = self.submitted(app, 1, 2)
        assert begun(app, shop, 1, 5) == {task_id: 2}
        shop.uses(5, "shop/nobody")
        assert app.dispatcher.run_pass() == 5

    def test_one_process_leads_what_is_more_than_wanted(self, world: World) -> None:
        app = world.app()
        shop = Shop(app, free=2)
        self.submitted(app, 1, 50)
        other = another(app, shop)
        assert app.dispatcher.run_pass() == 2
        shop.takes()
        assert other.run_pass() == 0, "another leads"
        app.dispatcher._leadership("shop").resign()
        assert other.run_pass() == 2


def test_the_thread_dispatches_until_nothing_is_left(world: World) -> None:
    app = world.app()
    shop = Shop(app, free=10)
    task = app.submit("sold", numbers(60))
    app.dispatcher.start()
    try:

        def done() -> bool:
            shop.ends(shop.takes())
            return bool(task.progress()["done"])

        wait_for(done, "every job was dispatched")
    finally:
        app.dispatcher.stop()
    assert len(shop.pushed) == 60
    foreign.trim(app.ledger, HOLDER)
    assert loans(world) == []


def test_what_a_broker_did_not_take_is_pushed_soon_after_it_answers_again(world: World) -> None:
    """Taken out: the next round of a process whose engine is away. Nothing notifies it when the engine is back."""
    app = world.app()
    shop = Shop(app, free=10)
    refused = list[float]()

    def is_away_at_first(copies: Sequence[Copy]) -> BaseException | None:
        refused.append(time.monotonic())
        return BrokerUnavailable("away") if len(refused) <= 2 else None

    shop.refuses = is_away_at_first
    app.dispatcher.start()
    try:
        app.submit("sold", numbers(3))
        wait_for(lambda: len(shop.pushed) == 3, "they are pushed")
    finally:
        app.dispatcher.stop()
    assert refused[2] - refused[0] < 6.0
    assert app.dispatcher.passes < 30, "it does not ask again and again meanwhile"


@pytest.mark.parametrize("engine", ["dramatiq", "an-engine-with-a-long-name"])
def test_the_dispatch_to_an_engine_has_a_leader_whatever_its_name(world: World, engine: str) -> None:
    """The name of a duty has 16 characters; SQLite takes more."""
    one, two = world.app().ledger, world.app().ledger
    assert leases.acquire(one, leases.dispatch_to(engine), 60.0) is None
    assert leases.acquire(two, leases.dispatch_to(engine), 60.0) is not None
    assert leases.acquire(two, leases.dispatch_to(engine[::-1]), 60.0) is None
