"""The database server is stopped, or killed with -9, in the middle of each write on the way of an item, and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import make_url
from support.databases import Databases
from support.faults import MOMENTS, OF_SPLITS, Restart, borrows_struck, patiently, struck
from support.proxy import Proxy
from support.world import World

from asynctask import AsyncTask
from asynctask.errors import Unavailable
from asynctask.ledger import control
from asynctask.lists import split
from asynctask.testing import wait_for

pytestmark = pytest.mark.databases("postgresql", "mariadb", reason="a file has no server that could end")
ITEMS = 40
WAYS = ("stop", "kill")


@pytest.fixture
def restarted(fragile: Databases, database_kind: str, tmp_path: Path) -> Iterator[World]:
    """A world on a server that no other test works on."""
    store = fragile.fresh(database_kind, tmp_path)
    world = World(tmp_path, store)
    yield world
    world.close()
    store.close()


def items() -> list[dict[str, Any]]:
    return [{"n": n, "refuse": n % 5 == 4, "bug": n % 7 == 6} for n in range(ITEMS)]


def run(app: AsyncTask) -> int:
    def submit() -> Any:
        return app.submit_items("note", items(), idempotency_key="once")

    task_id = int(patiently(submit, "the list is taken").id)
    patiently(lambda: app.task(task_id).progress()["done"], "it is over")
    return task_id


def ways() -> list[Any]:
    """Each moment with both ways over the two databases, and each database with both ways over the moments."""
    names = [*(name for name in MOMENTS if not name.startswith("turn")), "plain borrow"]
    return [pytest.param(name, n % 2, id=name) for n, name in enumerate(names)]


@pytest.mark.one_database(reason="each database has its share of the moments, with both ways")
@pytest.mark.parametrize(("moment", "parity"), ways())
def test_a_server_that_ends_in_the_middle_of_a_write_costs_no_item_and_doubles_none(
    restarted: World, fragile: Databases, moment: str, parity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if moment in OF_SPLITS:
        monkeypatch.setattr(split, "SLICE", ITEMS - 1)
    kind = restarted.store.kind
    server = fragile.templates(kind).server
    restart = Restart(server, WAYS[(parity + (kind == "mariadb")) % 2])
    with Proxy(server.port) as proxy:
        url = make_url(restarted.store.url).set(port=proxy.port).render_as_string(hide_password=False)
        app = restarted.app(database_url=url)
        with restarted.working(app):
            if moment == "plain borrow":
                with borrows_struck(app, proxy, lambda: restart(None)):
                    task_id = run(app)
                assert proxy.fell.is_set()
            else:
                with struck(app, MOMENTS[moment], restart) as fell:
                    task_id = run(app)
                assert fell.is_set()
            restart.wait()
            patiently(lambda: not restarted.sql("SELECT 1 FROM loans"), "nothing is lent any more")
        restarted.check_promises(app, [task_id], ITEMS)
        assert set(restarted.shop.performed()) == set(range(ITEMS))


@pytest.mark.one_database(reason="both ways end both databases' servers in the test above")
@pytest.mark.parametrize(("verb", "way"), [("cancel", "kill"), ("cancel", "stop"), ("retry", "kill"), ("retry", "stop")])
def test_a_server_that_ends_while_rows_are_turned_leaves_the_rest_to_maintenance(
    restarted: World, fragile: Databases, monkeypatch: pytest.MonkeyPatch, verb: str, way: str
) -> None:
    monkeypatch.setattr(control, "SLICE", 30)
    restart = Restart(fragile.templates(restarted.store.kind).server, way)
    app = restarted.app()
    with restarted.working(app):
        task = app.submit("note" if verb == "retry" else "gated", [{"n": n, "bug": True} for n in range(200)])
        if verb == "retry":
            assert task.wait(120)["done"]
        with struck(app, MOMENTS["turn on"], restart, nth=2) as fell:
            with suppress(Unavailable):  # it is wanted by now, and done by whoever can
                getattr(task, verb)()
            restarted.open_gate()
            wait_for(fell.is_set, "the server ended")
        restart.wait()
        patiently(lambda: task.progress()["done"], "it is over")
        progress = task.progress()
    assert progress["state"] == ("cancelled" if verb == "cancel" else "finished")
    generations = 2 if verb == "retry" else 1
    assert progress["generation"] == generations
    restarted.check_promises(app, [task.id], 200, generations=generations)
