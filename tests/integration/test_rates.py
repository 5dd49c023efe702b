"""Rate limits of workers: starts of all Tasks and processes together, measured by the Events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from support.borrowing import borrow, offers
from support.foreign import Shop
from support.rate_app import make_rated
from support.world import World, numbers

from asynctask import AsyncTask
from asynctask.cli.root import run as run_cli
from asynctask.clock import SECOND
from asynctask.errors import ConfigError, InputError, NotFound
from asynctask.ledger import lending, rates
from asynctask.runtime.borrower import IDLE_S
from asynctask.testing import drain, wait_for
from webapi import create_app

BEFORE = 0.25
"""Seconds by which a start may be before its time."""

LATE = 0.75
"""Seconds within which a lent job starts on a machine with other work."""


pytestmark = pytest.mark.one_database(reason="what a limit permits is decided above the database")


def starts(world: World) -> list[float]:
    """When the jobs started, in seconds, in order."""
    found = world.sql("SELECT started_at FROM events WHERE started_at IS NOT NULL ORDER BY started_at")
    return [at / SECOND for (at,) in found]


def most_beyond(times: Sequence[float], rate: float) -> float:
    """By how many starts the busiest window is beyond the rate."""
    return max(
        (last - first + 1) - rate * (times[last] - times[first])
        for first in range(len(times))
        for last in range(first, len(times))
    )


def assert_within(times: Sequence[float], rate: float) -> None:
    """No window has more starts than the rate, and the burst, permit; a lent job may start late."""
    assert most_beyond(times, rate) <= 1 + rate * (BEFORE + LATE)
    took = times[-1] - times[0]
    assert len(times) <= rate * (took + BEFORE) + 1 + rate * LATE


def rated(world: World, rate: str = "20/s", **more: Any) -> AsyncTask:
    app = make_rated(world.app(**more), rate)
    rates.declare(app.ledger, app.workers)
    return app


# -- in processes


@pytest.mark.each_database(reason="each locks the row of a limit in its own way")
def test_two_processes_start_jobs_of_several_tasks_at_the_rate_of_their_limit(world: World) -> None:
    app = rated(world)
    tasks = [app.submit(name, numbers(20)) for name in ("call", "ask", "call")]
    others = app.submit("note", numbers(200))
    children = [world.cli("rate_app", "worker", "-c", "8") for _ in range(2)]
    assert others.wait(120)["counts"]["finish"] == 200
    for task in tasks:
        assert task.wait(120)["counts"]["finish"] == 20, world.said()
    found = world.sql(
        "SELECT started_at FROM events WHERE task_id IN (?, ?, ?) ORDER BY started_at", *(task.id for task in tasks)
    )
    times = [at / SECOND for (at,) in found]
    assert_within(times, 20)
    assert times[-1] - times[0] > (60 - 1) / 20 - BEFORE - LATE, "they take as long as the rate says"
    assert max(later - at for at, later in pairwise(times)) < IDLE_S / 2, "a process looks when the limit opens"
    assert app.doctor() == []
    for child in children:
        child.terminate()


def test_after_a_kill_of_a_process_the_others_go_on_at_the_rate(world: World) -> None:
    app = rated(world)
    tasks = [app.submit("call", numbers(60)), app.submit("ask", numbers(40))]
    children = [world.cli("rate_app", "worker", "-c", "4") for _ in range(2)]
    wait_for(lambda: len(starts(world)) > 10, f"they run: {world.said()}")
    children[0].kill()
    for task in tasks:
        progress = task.wait(120)
        assert progress["done"], world.said()
    assert_within(starts(world), 20)
    assert app.doctor() == []
    children[1].terminate()


@pytest.mark.each_database(reason="each reads the row of a limit under its own lock")
def test_a_rate_that_is_changed_holds_at_once_in_a_process_that_runs(world: World) -> None:
    app = rated(world, "1/min")
    with world.working(app):
        task = app.submit("call", numbers(30))
        wait_for(lambda: task.counts["finish"] == 1, "the first one starts")
        (reason,) = app.operations.wait_reasons(task.id)
        assert reason.code == "rate"
        assert reason.message.startswith("The limit shop-api permits 1/min; next start in ")
        assert app.rates.set("shop-api", "100/s")["rate"] == "100/s"
        task.wait(60)
    assert app.doctor() == []


def test_a_retry_counts_as_a_start(world: World) -> None:
    app = rated(world, "10/s")
    with world.working(app):
        task = app.submit("ask", numbers(8, breaks=True))
        began = app.ledger.now()
        assert task.wait(60)["counts"]["error"] == 8
    assert (app.ledger.now() - began) / SECOND > (16 - 1) / 10 - BEFORE


@pytest.mark.parametrize("options", [{"parallel": 2}, {"interval": 0.05}, {"session": "s"}, {"key": "n"}], ids=str)
def test_a_rate_holds_beside_the_other_limits_of_a_task(world: World, options: dict[str, Any]) -> None:
    app = rated(world)
    with world.working(app):
        for task in [app.submit("call", numbers(10), **options) for _ in range(2)]:
            assert task.wait(60)["counts"]["finish"] == 10
    assert_within(starts(world), 20)
    assert app.doctor() == []


def test_a_drain_moves_the_time_on_to_the_next_start(world: World) -> None:
    app = rated(world)
    task = app.submit("seldom", numbers(5))
    assert drain(app)["finish"] == 5
    assert task.progress()["done"]


# -- one step at a time


@pytest.mark.each_database(reason="closed limits are found in SQL")
def test_a_borrow_gets_what_the_limit_permits_and_then_no_task_of_it_is_offered(world: World) -> None:
    app = rated(world, "2/min")
    tasks = [app.submit(name, numbers(9)) for name in ("call", "ask", "call", "seldom", "note")]
    assert len(borrow(app.ledger, tasks[0].id)) == 1, "the next may start in half a minute"
    offered = [each.task_id for each in offers(app.ledger)]
    assert offered == [tasks[3].id, tasks[4].id], "a thousand Tasks of the limit cost one look"
    with app.ledger.database.read() as connection:
        opening = lending.next_due(connection, app.ledger.now())
    assert opening is not None
    assert 0 < opening - app.ledger.now() <= 30 * SECOND, "a process looks again then"
    assert len(borrow(app.ledger, tasks[4].id)) == 9
    app.rates.set("shop-api", "8/s")
    wait_for(lambda: tasks[1].id in [each.task_id for each in offers(app.ledger)], "it permits more")
    assert len(borrow(app.ledger, tasks[1].id)) >= 1


@pytest.mark.each_database(reason="each skips a locked row in its own way")
@pytest.mark.databases("postgresql", "mariadb", reason="on SQLite a transaction that writes excludes all others")
def test_a_borrow_that_finds_the_limit_locked_leaves_it(world: World) -> None:
    app = rated(world)
    task = app.submit("call", numbers(3))
    (offer,) = offers(app.ledger)
    with app.ledger.database.write() as connection:
        assert rates.RateGate(connection, {}, 0, "shop-api").permits(1) == 1
        found = lending.borrow(app.ledger, offer, 3)
        assert (found.count, found.is_locked) == (0, True)
    assert len(borrow(app.ledger, task.id)) == 3


def test_of_a_limit_no_more_are_pushed_to_an_engine_than_may_start(world: World) -> None:
    app = world.app()
    shop = Shop(app, free=100)
    shop.workers = {name: replace(worker, rate="8/s", limit="both") for name, worker in shop.workers.items()}
    rates.declare(app.ledger, app.workers)
    tasks = [app.submit("sold", numbers(20), parallel=10), app.submit("sent", numbers(20))]
    assert app.dispatcher.run_pass() == 3
    began = app.ledger.now()
    wait_for(lambda: app.dispatcher.run_pass() is not None and len(shop.pushed) >= 12, "the rest follows")
    assert len(shop.pushed) <= 3 + 8 * (app.ledger.now() - began) / SECOND + 1
    app.rates.set("both", "10000/s")
    wait_for(lambda: app.dispatcher.run_pass() is not None and len(shop.pushed) == 30, "all but those beyond parallel")
    shop.ends(shop.takes())
    wait_for(lambda: app.dispatcher.run_pass() is not None and len(shop.pushed) == 40, "and these")
    shop.ends(shop.takes())
    assert [task.progress()["done"] for task in tasks] == [True, True]
    assert app.doctor() == []


# -- what the code declares, and what people set


def test_a_rate_that_people_set_stays_until_the_code_declares_another(world: World) -> None:
    app = rated(world)
    app.rates.set("shop-api", "5/s")
    rates.declare(app.ledger, app.workers)
    assert app.rates.find("shop-api")["rate"] == "5/s"
    other = rated(world, "30/s")
    (seldom, shop) = other.rates.all()
    assert (shop["rate"], shop["declared"], shop["workers"]) == ("30/s", "30/s", ["ask", "call"])
    assert (seldom["name"], seldom["workers"], seldom["next_at"]) == ("seldom", ["seldom"], None)


def test_a_limit_that_the_code_gives_up_is_gone(world: World) -> None:
    rated(world)
    app = world.app()
    app.worker(rate="7/s", name="seldom")(lambda item: None)
    for name in ("call", "ask"):
        app.worker(name=name)(lambda item: None)
    rates.declare(app.ledger, app.workers)
    assert [(each["name"], each["rate"]) for each in app.rates.all()] == [("seldom", "7/s")]
    task = app.submit("call", numbers(50))
    assert len(borrow(app.ledger, task.id)) == 50


def test_what_cannot_be_declared(world: World) -> None:
    app = rated(world)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rate": "5 per second"}, "write a rate as 5/s"),
        ({"rate": 5}, "write a rate as 5/s"),
        ({"rate": "0/s"}, "write a rate as 5/s"),
        ({"rate": "5/day"}, "write a rate as 5/s"),
        ({"rate": "999999/s"}, "at most 100000/s"),
        ({"rate": "0.001/h"}, "at least one start in a week"),
        ({"limit": "shop-api"}, "needs a rate"),
        ({"rate": "5/s", "limit": "shop-api"}, "share the limit 'shop-api'"),
        ({"rate": "20/s", "limit": ""}, "1 to 128 characters"),
        ({"rate": "20/s", "limit": "a/b"}, "1 to 128 characters"),
        ({"rate": "20/s", "use_task_event": False}, "must be tracked"),
    ]
    for options, text in cases:
        with pytest.raises(ConfigError, match=text):
            app.worker(name="wrong", **options)(lambda item: None)
        assert "wrong" not in app.workers
    for rate in ("5", "", "5/s;", "1" * 40 + "/s"):
        with pytest.raises(InputError, match="write a rate as"):
            app.rates.set("shop-api", rate)
    with pytest.raises(NotFound):
        app.rates.set("nobody", "5/s")


def test_the_api_and_the_command_line_show_and_set_rates(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    app = rated(world)
    client: Any = create_app(app).test_client()
    assert [each["name"] for each in client.get("/api/rates").json["rates"]] == ["seldom", "shop-api"]
    changed = client.patch("/api/rates/shop-api", json={"rate": "300/min"})
    assert (changed.status_code, changed.json["rate"], changed.json["declared"]) == (200, "300/min", "20/s")
    refused = client.patch("/api/rates/shop-api", json={"rate": "quick"})
    assert (refused.status_code, refused.json["code"]) == (422, "invalid_rate")
    assert client.patch("/api/rates/nobody", json={"rate": "5/s"}).status_code == 404
    (worker,) = (each for each in client.get("/api/workers").json["workers"] if each["name"] == "call")
    assert (worker["rate"], worker["limit"]) == ("20/s", "shop-api")

    url = f"--database-url={app.config.database_url}"
    assert run_cli([url, "rates", "set", "shop-api", "2/s"]) == 0
    assert run_cli([url, "rates"]) == 0
    assert "2/s" in capsys.readouterr().out
    assert run_cli([url, "rates", "set", "shop-api", "quick"]) == 2
    assert app.rates.find("shop-api")["rate"] == "2/s"
