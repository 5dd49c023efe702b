"""PgBouncer in transaction mode between the program and PostgreSQL: nothing is relied on that a session would keep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from sqlalchemy.engine import make_url
from support.databases import Databases
from support.servers import unmet
from support.world import World, mixed

from asynctask.database import schema
from asynctask.database.engine import Database
from asynctask.testing import wait_for
from asynctask.testing.servers import MissingServer
from benchmarks.servers import PgBouncer, PostgresServer

pytestmark = pytest.mark.databases("postgresql", reason="PgBouncer stands before no other")


@pytest.fixture
def pooler(databases: Databases, database_kind: str) -> Iterator[PgBouncer]:
    server = databases.templates(database_kind).server
    assert isinstance(server, PostgresServer)
    with ExitStack() as stack:
        try:
            made = stack.enter_context(PgBouncer(server, pool_size=4))
        except MissingServer as error:
            unmet(str(error))
        yield made


@pytest.fixture
def pooled(world: World, pooler: PgBouncer) -> World:
    """A world whose processes reach their database through the pooler, four sessions of the server for all of them."""
    world.store.url = pooler.url(str(make_url(world.store.url).database))
    return world


def test_a_pooler_is_noticed_and_nothing_is_prepared_behind_it(pooled: World) -> None:
    database = Database(pooled.store.url)
    assert database.behind_pooler()
    with database.read() as connection:
        driver: Any = connection.connection.driver_connection
        assert driver.prepare_threshold is None
    database.close()


def test_every_promise_holds_through_a_pooler_with_a_process_killed_on_the_way(pooled: World) -> None:
    apps = [pooled.app() for _ in range(2)]
    child = pooled.cli("kill_app", "worker", "-c", "4")
    wait_for(lambda: any(p["kind"] == "worker" for p in apps[0].processes()), "the child is there")
    held = apps[0].submit("gated", [{"n": n} for n in range(10_000, 10_012)])
    wait_for(lambda: len(pooled.shop.performed("began")) == 4, "the child is at work")
    child.kill()
    child.wait()
    pooled.open_gate()
    with ExitStack() as stack:
        for app in apps:
            stack.enter_context(pooled.working(app))
        large = apps[0].submit_items("note", mixed(1_500), idempotency_key="once")
        assert apps[1].submit_items("note", mixed(1_500), idempotency_key="once").id == large.id
        retried = apps[1].submit("shaky", [{"n": n, "breaks": n % 4} for n in range(100)])
        cancelled = apps[1].submit("brief", [{"n": n} for n in range(20_000, 22_000)])
        assert cancelled.cancel()
        for task in (held, large, retried, cancelled):
            assert task.wait(120)["done"]
        assert large.retry()
        assert large.wait(120)["done"]
    pooled.check_promises(apps[0], [held.id, retried.id], 112)
    pooled.check_promises(apps[0], [large.id], 1_500, generations=2)
    pooled.check_promises(apps[0], [cancelled.id], 2_000)


def test_the_schema_is_made_through_a_pooler(databases: Databases, pooler: PgBouncer, tmp_path: Any) -> None:
    empty = databases.empty("postgresql", tmp_path)
    database = Database(pooler.url(str(make_url(empty.url).database)))
    assert schema.upgrade(database) == schema.head()
    schema.check(database)
    database.close()
    empty.close()
