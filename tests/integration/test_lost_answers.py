"""The connection is lost between a COMMIT and its answer, at every write on the way of an item: nothing is guessed.

What was committed is not done again, and what was not is. So every job is performed once, not only at least once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import make_url
from support.databases import Databases, Store
from support.faults import MOMENTS, OF_SPLITS, borrows_struck, commits_lost, patiently
from support.proxy import AFTER, BEFORE, Proxy
from support.world import World

from asynctask import AsyncTask
from asynctask.lists import split

pytestmark = [
    pytest.mark.databases("postgresql", "mariadb", reason="a file has no connection to lose"),
    pytest.mark.one_database(reason="each tells a lost answer to its claims, and all moments ask the same then"),
]
ITEMS = 40


@pytest.fixture
def proxy(databases: Databases, store: Store) -> Iterator[Proxy]:
    with Proxy(databases.templates(store.kind).server.port) as made:
        yield made


@pytest.fixture
def behind(world: World, proxy: Proxy, tmp_path: Path) -> Callable[[], AsyncTask]:
    """Makes applications that reach their database through the proxy."""
    url = make_url(world.store.url).set(port=proxy.port).render_as_string(hide_password=False)
    return lambda: world.app(database_url=url)


def items() -> list[dict[str, Any]]:
    return [{"n": n, "refuse": n % 5 == 4, "bug": n % 7 == 6} for n in range(ITEMS)]


def run(world: World, app: AsyncTask) -> int:
    """A Task that is handed in under a key, until it is over; its id."""

    def submit() -> Any:
        return app.submit_items("note", items(), idempotency_key="once")

    task_id = int(patiently(submit, "the list is taken").id)
    patiently(lambda: app.task(task_id).progress()["done"], "it is over")
    return task_id


@pytest.mark.parametrize("when", [BEFORE, AFTER])
@pytest.mark.parametrize("moment", [name for name in MOMENTS if not name.startswith("turn")])
def test_a_commit_whose_answer_is_lost_is_looked_up_and_neither_lost_nor_made_twice(
    world: World,
    proxy: Proxy,
    behind: Callable[[], AsyncTask],
    moment: str,
    when: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if moment in OF_SPLITS:
        monkeypatch.setattr(split, "SLICE", ITEMS - 1)
    app = behind()
    with world.working(app), commits_lost(app, proxy, MOMENTS[moment], when) as fell:
        task_id = run(world, app)
        assert fell.is_set()
        assert proxy.fell.is_set()
    assert world.one("SELECT COUNT(*) FROM tasks") == 1
    world.check_promises(app, [task_id], ITEMS)
    assert world.shop.performed() == dict.fromkeys(range(ITEMS), 1)


@pytest.mark.each_database(reason="each has a statement of its own")
@pytest.mark.parametrize("when", [BEFORE, AFTER])
def test_a_borrow_whose_answer_is_lost_is_found_again(
    world: World, proxy: Proxy, behind: Callable[[], AsyncTask], when: str
) -> None:
    """Nobody else borrows what it lent: it is this living process's own."""
    app = behind()
    with world.working(app), borrows_struck(app, proxy, when):
        task_id = run(world, app)
        assert proxy.fell.is_set()
        patiently(lambda: not world.sql("SELECT 1 FROM loans"), "nothing is lent any more")
    world.check_promises(app, [task_id], ITEMS)
    assert world.shop.performed() == dict.fromkeys(range(ITEMS), 1)


@pytest.mark.parametrize("when", [BEFORE, AFTER])
def test_a_cancel_and_a_retry_whose_answers_are_lost_happen_once(
    world: World, proxy: Proxy, behind: Callable[[], AsyncTask], when: str
) -> None:
    app = behind()
    with world.working(app):
        over = app.submit("note", items())
        assert over.wait(120)["done"]
        held = app.submit("gated", [{"n": n} for n in range(100, 140)])
        with commits_lost(app, proxy, MOMENTS["turn"], when) as fell:
            assert patiently(lambda: held.cancel() or held.progress()["state"] == "cancelled", "it is cancelled")
        assert fell.is_set()
        with commits_lost(app, proxy, MOMENTS["turn"], when, nth=2) as fell:  # the first opens the generation
            assert over.retry()
        assert fell.is_set()
        world.open_gate()
        patiently(lambda: over.progress()["done"] and held.progress()["done"], "both are over")
    assert over.progress()["generation"] == 2
    world.check_promises(app, [over.id], ITEMS, generations=2)
    world.check_promises(app, [held.id], 40)
    assert [entry["action"] for entry in held.log()].count("cancelled") <= 1
