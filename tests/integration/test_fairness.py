"""Who gets the next place: which Tasks a process reads, and whose turn it is."""

from __future__ import annotations

import pytest
from support.world import World, numbers

from asynctask.dispatch.demand import Shares
from asynctask.errors import ConfigError
from asynctask.ledger import lending

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
        for place, there in ((0.0, [first, *ids[:2]]), (0.6, [ids[2], ids[3], first]), (0.999, [ids[3], first, ids[0]])):
            found = lending.pick(connection, app.ledger, ["default"], limit=3, place=place)
            assert {each.task_id for each in found} == {*there, behind}, "each process begins elsewhere"


def test_there_are_two_ways_to_be_fair(world: World) -> None:
    with pytest.raises(ConfigError, match="write task or owner"):
        world.app(fair_by="size")


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
