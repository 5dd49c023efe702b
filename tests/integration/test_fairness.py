"""Who gets the next place: Tasks and owners of one priority share alike, and a larger priority is never starved."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
from support.clocks import SettableClock
from support.world import World, numbers

from asynctask import AsyncTask
from asynctask.dispatch import dispatcher
from asynctask.dispatch.demand import Load, Shares, Surplus
from asynctask.dispatch.dispatcher import LEASE_S
from asynctask.errors import ConfigError
from asynctask.ledger import reservations

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")


def using(app: AsyncTask, free: int) -> None:
    """This process can use so many jobs, and performs none."""
    app.dispatcher.attach(lambda: Load("a process", ("default",), free, 0.0))


def begun(app: AsyncTask, rounds: int, places: int = 1) -> Counter[int | None]:
    """How many jobs of each Task a process of so many places begins in so many rounds."""
    found: Counter[int | None] = Counter()
    using(app, places)
    for _ in range(rounds):
        app.dispatcher.round()
        copies = app.broker.exchange("a process", [], ["default"], places)
        app.broker.drop("a process", list(copies))
        found.update(copy.task_id for copy in copies)
    return found


def submitted(app: AsyncTask, count: int, items: int = 30, **options: Any) -> list[int]:
    return [app.submit("note", numbers(items), **options).id for _ in range(count)]


def test_tasks_share_alike_where_there_is_room_for_one(world: World) -> None:
    app = world.app()
    ids = submitted(app, 5)
    assert begun(app, 20) == dict.fromkeys(ids, 4)


def test_a_task_that_comes_later_shares_alike_from_then_on(world: World) -> None:
    app = world.app()
    (large,) = submitted(app, 1, 200)
    assert begun(app, 20) == {large: 20}
    (later,) = submitted(app, 1)
    assert begun(app, 20) == {large: 10, later: 10}


@pytest.mark.each_database(reason="which copies of a queue are its last is each broker's own")
def test_what_no_thread_comes_free_for_goes_back_so_that_a_more_urgent_task_is_next(world: World) -> None:
    """Before, ten jobs lay before those of the urgent Task for as long as they took, in a queue that has no priorities."""
    app = world.app()
    clock = SettableClock()
    app.dispatcher._surplus = Surplus(clock)
    app.dispatcher._thread = threading.current_thread()  # it goes on if it leads
    usual = app.submit("note", numbers(30), priority=200)

    def waiting_after(seconds: float, free: int) -> int:
        clock.seconds += seconds
        using(app, free)
        app.dispatcher.round()
        return sum(app.broker.waiting(["default"])["default"].values())

    assert waiting_after(0.0, free=10) == 10
    assert waiting_after(0.1, free=2) == 10, "the other threads were busy, as a heartbeat says now"
    assert waiting_after(0.3, free=4) == 10
    assert waiting_after(0.3, free=2) == 4, "so many were wanted once in half a second"
    assert usual.progress()["control"]["in_flight"] == 4
    urgent = app.submit("note", numbers(30), priority=100)
    waiting_after(0.0, free=12)
    found = Counter(copy.task_id for copy in app.broker.exchange("a process", [], ["default"], 12))
    assert found[urgent.id] >= 8
    assert found.total() == 12
    app.broker.drop("a process", app.broker.held_by("a process"))


def test_more_tasks_than_a_round_reads_have_their_turns_too(world: World) -> None:
    app = world.app()
    ids = submitted(app, 105, 21)
    assert begun(app, 105) == dict.fromkeys(ids, 1)


@pytest.mark.each_database(reason="which Tasks are read is each one's own")
def test_a_full_page_begins_after_the_last_that_was_served_and_shows_who_waits_behind(world: World) -> None:
    app = world.app()
    first, *ids = submitted(app, 5, priority=100)
    (behind,) = submitted(app, 1, priority=300)
    with app.ledger.database.read() as connection:
        for after, there in ((first, ids[:3]), (ids[1], [ids[2], ids[3], first]), (ids[3], [first, *ids[:2]])):
            found, _ = reservations.runnable(connection, app.ledger, ["default"], 3, after={("default", 100): after})
            assert {each.task_id for each in found} == {*there, behind}
        for place, there in ((0.0, [first, *ids[:2]]), (0.6, [ids[2], ids[3], first]), (0.999, [ids[3], first, ids[0]])):
            found, _ = reservations.runnable(connection, app.ledger, ["default"], 3, place=place)
            assert {each.task_id for each in found} == {*there, behind}, "each dispatcher begins elsewhere"


def test_owners_share_alike_whatever_they_handed_in(world: World) -> None:
    app = world.app(fair_by="owner")
    many = submitted(app, 4, owner="many")
    (one,) = submitted(app, 1, owner="one")
    found = begun(app, 16)
    assert found == {one: 8, **dict.fromkeys(many, 2)}
    with pytest.raises(ConfigError, match="write task or owner"):
        world.app(fair_by="size")


def test_small_tasks_of_an_owner_do_not_hold_up_anothers(world: World) -> None:
    app = world.app(fair_by="owner")
    many = submitted(app, 20, 2, owner="many")
    (one,) = submitted(app, 1, 2, owner="one")
    found = begun(app, 4)
    assert found[one] == 2
    assert sum(found[task_id] for task_id in many) == 2


def test_a_larger_priority_has_its_share_while_a_smaller_one_wants_all(world: World) -> None:
    app = world.app(background_share=0.1)
    (urgent,) = submitted(app, 1, 200, priority=100)
    later = [*submitted(app, 1, priority=300), *submitted(app, 1, priority=400)]
    found = begun(app, 102)
    assert found[urgent] == 92
    assert [found[task_id] for task_id in later] == [5, 5]


def test_without_a_background_share_a_larger_priority_waits(world: World) -> None:
    app = world.app(background_share=0.0)
    (urgent,) = submitted(app, 1, 50, priority=100)
    (later,) = submitted(app, 1, priority=300)
    assert begun(app, 50) == {urgent: 50}
    assert begun(app, 10) == {later: 10}


def test_what_a_priority_gets_anyhow_counts_as_its_share(world: World) -> None:
    app = world.app(background_share=0.1)
    single = app.workers["note"].set(priority=100)
    (later,) = submitted(app, 1, 200, priority=300)
    for n in range(10):
        single.perform_async({"n": n})
        found = begun(app, 1, places=5)
        assert found == {None: 1, later: 4}


def test_single_jobs_of_a_larger_priority_have_their_share_too(world: World) -> None:
    app = world.app(background_share=0.1)
    (urgent,) = submitted(app, 1, 200, priority=100)
    app.workers["note"].set(priority=300).perform_bulk(numbers(20))
    assert begun(app, 51) == {urgent: 46, None: 5}


class TestShares:
    def test_whoever_got_the_fewest_comes_first(self) -> None:
        shares = Shares()
        assert shares.order("abc") == ["a", "b", "c"]
        shares.served("a", 3)
        shares.served("b", 1)
        assert shares.order("abc") == ["c", "b", "a"]

    def test_a_newcomer_begins_where_the_last_stands(self) -> None:
        shares = Shares()
        shares.served("a", 5)
        shares.served("b", 7)
        assert shares.order("abc") == ["a", "c", "b"]
        shares.served("c", 1)
        assert shares.order("abc") == ["a", "c", "b"]

    def test_who_wants_nothing_is_forgotten(self) -> None:
        shares = Shares()
        shares.served("a", 5)
        shares.served("b", 9)
        shares.keep({"b"})
        assert shares.order("ba") == ["b", "a"]


def test_a_task_that_another_dispatcher_has_in_hand_is_not_passed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "PUSHING_S", LEASE_S)  # however long the machine takes
    app, other = world.app(), world.app()
    (urgent,) = submitted(app, 1, 100, priority=100)
    (less,) = submitted(app, 1, 100, priority=200)
    using(app, 10)
    reservations.reserve(other.ledger, urgent, 10, lease_s=LEASE_S)
    assert app.dispatcher.round() == 0
    monkeypatch.setattr(dispatcher, "PUSHING_S", 0.0)  # whoever pushes for longer may be gone
    assert app.dispatcher.round() == 10
    found = app.broker.exchange("a process", [], ["default"], 10)
    assert {copy.task_id for copy in found} == {less}


def test_what_was_reserved_before_its_task_became_less_urgent_is_taken_back(world: World) -> None:
    app, other = world.app(), world.app()
    (task_id,) = submitted(app, 1, 100, priority=100)
    using(other, 10)
    push = other.broker.push
    turned: list[Any] = []

    def late(copies: Any) -> None:
        if not turned:
            turned.append(app.task(task_id).update(priority=300))
        push(copies)

    other.dispatcher._outbox._put = late
    assert other.dispatcher.round() == 10
    assert not app.broker.waiting(["default"]).get("default")


def test_a_task_that_another_dispatcher_took_meanwhile_is_not_passed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "PUSHING_S", LEASE_S)  # however long the machine takes
    app, other = world.app(), world.app()
    (urgent,) = submitted(app, 1, 100, priority=100)
    submitted(app, 1, 100, priority=200)
    using(app, 10)
    reserve = app.dispatcher._reserve_task

    def late(task_id: int, queue: str, count: int, at: int | None) -> int:
        if task_id == urgent:
            reservations.reserve(other.ledger, urgent, 10, lease_s=LEASE_S)
        sent = reserve(task_id, queue, count, at)
        reservations.confirm(other.ledger, [urgent])
        return sent

    app.dispatcher._reserve_task = late  # type: ignore[method-assign]
    assert app.dispatcher.round() == 0


def test_a_task_that_another_dispatcher_pushed_during_the_round_is_not_passed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "PUSHING_S", LEASE_S)  # however long the machine takes
    app, other = world.app(), world.app()
    (urgent,) = submitted(app, 1, 100, priority=100)
    submitted(app, 1, 100, priority=200)
    using(app, 10)
    reservations.reserve(other.ledger, urgent, 10, lease_s=LEASE_S)
    read = app.dispatcher._dispatchable

    def then_confirmed(used: Any) -> Any:
        found = read(used)
        reservations.confirm(other.ledger, [urgent])
        return found

    app.dispatcher._dispatchable = then_confirmed  # type: ignore[method-assign]
    assert app.dispatcher.round() == 0
    app.dispatcher._dispatchable = read  # type: ignore[method-assign]
    assert app.dispatcher.round() == 10


def test_a_round_whose_turn_ends_leaves_the_rest_to_the_next_with_its_own_priorities(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = world.app(background_share=0.0)
    (first,) = submitted(app, 1, 100, priority=100)
    (other,) = submitted(app, 1, 100, priority=200)
    monkeypatch.setattr(dispatcher, "TURN_S", 0.0)
    monkeypatch.setattr(dispatcher, "_MAX_RESERVED", 20)
    using(app, 50)
    assert app.dispatcher._round(anew=True) == 20
    app.task(first).update(priority=300)  # which dispatches, for no process has a thread for that
    found = app.broker.exchange("a process", [], ["default"], 50)
    assert {copy.task_id for copy in found} == {other}
