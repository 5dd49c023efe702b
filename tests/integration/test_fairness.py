"""Who gets the next place: which Tasks a process reads, and whose turn it is."""

from __future__ import annotations

import pytest
from support.world import World, numbers

from asynctask.dispatch.demand import Shares, WorkSource
from asynctask.errors import ConfigError
from asynctask.ledger import lending
from asynctask.ledger.lending import Offer

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")


@pytest.mark.each_database(reason="which Tasks are read is each one's own")
def test_a_full_page_begins_after_the_last_that_was_served_and_shows_who_waits_behind(world: World) -> None:
    app = world.app()
    first, *ids = (app.submit("note", numbers(30), priority=100).id for _ in range(5))
    behind = app.submit("note", numbers(30), priority=300).id
    with app.ledger.database.read() as connection:
        for after, there in ((first, ids[:3]), (ids[1], [ids[2], ids[3], first]), (ids[3], [first, *ids[:2]])):
            found = lending.pick(connection, app.ledger, ["default"], limit=3, after={("default", 100): after})
            assert {each.task_id for each in found} == {*there, behind}
        for share, there in ((0.0, [first, *ids[:2]]), (0.6, [ids[2], ids[3], first]), (0.999, [ids[3], first, ids[0]])):
            found = lending.pick(connection, app.ledger, ["default"], limit=3, share=share)
            assert {each.task_id for each in found} == {*there, behind}, "each process begins elsewhere"


def test_there_are_two_ways_to_be_fair(world: World) -> None:
    with pytest.raises(ConfigError, match="write task or owner"):
        world.app(fair_by="size")


def source(task_id: int, owner: str = "") -> WorkSource:
    offer = Offer(task_id, "default", 100, "note", "", owner, None, False, 30, True, False, None, 1)
    return WorkSource("default", 100, owner or task_id, task_id, lambda count: count, offer)


def turns(shares: Shares, sources: list[WorkSource], count: int) -> list[int | None]:
    """The Tasks of the next turns, each of which gets jobs."""
    found = []
    for _ in range(count):
        shares.served(each := shares.next(sources))
        found.append(each.task_id)
    return found


class TestShares:
    def test_whoever_was_served_longest_ago_is_next(self) -> None:
        shares, (a, b, c) = Shares(), [source(n) for n in (1, 2, 3)]
        assert turns(shares, [a, b, c], 5) == [1, 2, 3, 1, 2]
        assert turns(shares, [b, a, c], 3) == [3, 1, 2]
        assert shares.last == {("default", 100): 2}

    def test_who_got_nothing_keeps_its_turn(self) -> None:
        shares, (a, b) = Shares(), [source(n) for n in (1, 2)]
        assert turns(shares, [a, b], 2) == [1, 2]
        assert shares.next([a, b]) is a
        assert turns(shares, [b], 1) == [2]
        assert turns(shares, [b, a], 2) == [1, 2]

    def test_a_newcomer_begins_beside_the_one_that_is_next(self) -> None:
        shares, (a, b, c) = Shares(), [source(n) for n in (1, 2, 3)]
        assert turns(shares, [a, b], 4) == [1, 2, 1, 2]
        assert turns(shares, [a, b, c], 4) == [1, 3, 2, 1]

    def test_groups_share_alike_and_those_of_a_group_too(self) -> None:
        shares, mine = Shares(), [source(1, "ann"), source(2, "ann"), source(3, "ben")]
        assert turns(shares, mine, 8) == [1, 3, 2, 3, 1, 3, 2, 3]

    def test_who_wants_nothing_is_forgotten(self) -> None:
        shares, (a, b) = Shares(), [source(n) for n in (1, 2)]
        assert turns(shares, [a, b], 2) == [1, 2]
        shares.sources([], [], int, int)
        assert turns(shares, [b, a], 2) == [2, 1]
