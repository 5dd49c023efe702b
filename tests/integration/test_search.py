"""The search over all Tasks: a job is found by the values of its item, whichever way it came, by those who may see it."""

from __future__ import annotations

import io
import json
from typing import Any
from urllib.parse import quote

import dramatiq
import pytest
from celery import Celery
from dramatiq.brokers.stub import StubBroker
from huey import MemoryHuey
from pydantic import BaseModel, SecretStr
from redis import Redis
from support.world import World

from asynctask import AsyncTask
from asynctask.access import User
from asynctask.cli.root import run
from asynctask.errors import AsyncTaskError, ConfigError, InputError
from asynctask.integrations import celery as on_celery
from asynctask.integrations import dramatiq as on_dramatiq
from asynctask.integrations import huey as on_huey
from asynctask.integrations import rq as on_rq
from asynctask.ledger import queries
from asynctask.testing import wait_for
from webapi import create_app

pytestmark = pytest.mark.one_database(reason="the statements of a search are those of the tests that run on each")


class Product(BaseModel):
    sku: str
    price: float = 0.0
    tags: list[str] = []


def searched(world: World, **more: Any) -> AsyncTask:
    """An application with workers whose items can be found, one of them without a model."""
    app = world.app(**more)
    plain = app.workers["note"]

    @app.worker(search=["sku", "price", "tags"], retry=0)
    def enroll(item: Product) -> None:
        if item.sku == "BUG":
            raise ValueError("a bug")

    @app.worker(search="sku", retry=0)
    def check(item: dict[str, Any]) -> None:
        """Takes any object."""

    assert plain.search == ()
    return app


def skus(*names: str) -> list[dict[str, Any]]:
    return [{"sku": name} for name in names]


def places(app: AsyncTask, text: str, **more: Any) -> list[tuple[int | None, int | None]]:
    """The Task and the row of each job that is found."""
    return [(each["task_id"], each["row"]) for each in app.search(text, **more).events]


@pytest.mark.each_database(reason="each has a statement of its own for rows, and an order of texts")
def test_an_item_is_found_whichever_way_it_came(world: World) -> None:
    app = searched(world)
    many = app.submit("enroll", skus(*(f"SKU-{n}" for n in range(2_300))), title="All products")
    again = app.submit("check", skus("sku-7", "other", "SKU-7"))
    sheet = app.uploads.store(io.BytesIO(b"Sku,price\nSKU-7,7.50\nx,8\n"), "a.csv")
    file = app.submit_file("enroll", sheet)
    stored = app.submit_items("enroll", skus(*(f"LATE-{n}" for n in range(1_500)), "SKU-7"))
    wait_for(lambda: stored.progress()["split"]["state"] == "sealed", "the list is split")
    mixed = app.submit_jobs([("note", {"n": 1, "sku": "SKU-7"}), ("check", {"sku": "SKU-7"})])
    strict = app.submit("enroll", skus("SKU-7", "s"), strict=True, unique="sku")
    keyed = app.submit("enroll", skus("k", "SKU-7"), key="sku")
    growing = app.submit("enroll", skus("o"), open=True)
    growing.add(skus("p", "SKU-7"))
    slices = app.submit("check", skus("a", "b", "c", "SKU-7", "d"), chunk_size=2)
    alone = app.workers["enroll"].perform_async(Product(sku="SKU-7"))
    bare = app.workers["check"].perform_async({"sku": "SKU-7"})
    found = app.search("SKU-7", limit=100)
    assert found.after is None
    assert [(each["task_id"], each["row"]) for each in found.events if each["task_id"]] == sorted(
        [
            (slices.id, 4), (growing.id, 3), (keyed.id, 2), (strict.id, 1), (mixed.id, 2), (stored.id, 1_501), (file.id, 2),
            (again.id, 3), (again.id, 1), (many.id, 8),
        ],
        key=lambda place: [place[0], place[1]], reverse=True,
    )  # fmt: skip
    assert [each["job_id"] for each in found.events[:2]] == [bare, alone], "newest first"
    oldest = found.events[-1]
    assert (oldest["value"], oldest["field"], oldest["task_title"]) == ("SKU-7", "sku", "All products")
    assert places(app, "7.5") == places(app, "7.5", field="price") == [(file.id, 2)]
    assert places(app, "SKU-7", worker="check", field="sku")[1:] == [
        (slices.id, 4), (mixed.id, 2), (again.id, 3), (again.id, 1)
    ]  # fmt: skip
    assert places(app, "SKU-7", field="price") == []
    begins = [each["value"] for each in app.search("sku-229*").events]
    assert begins == [f"SKU-229{n}" for n in range(9, -1, -1)] + ["SKU-229"], "values from the last to the first"


def test_what_has_become_of_it_is_read_when_it_is_searched(world: World) -> None:
    app = searched(world)
    task = app.submit("enroll", skus("BUG", "fine"))
    before = world.sql("SELECT id, value FROM search_values ORDER BY id")
    with world.working(app):
        task.wait(60)
        (event,) = app.search("bug").events
        assert (event["status"], event["messages"][-1]["message"]) == ("error", "Error: ValueError: a bug")
        assert task.retry() == 1
        task.wait(60)
    (event,) = app.search("bug").events
    assert (event["status"], event["row"], event["attempt"]) == ("error", 1, 2)
    assert world.sql("SELECT id, value FROM search_values ORDER BY id") == before, "a retry changes nothing"


def test_a_corrected_row_is_found_beside_the_one_that_failed(world: World) -> None:
    app = searched(world)
    first = app.submit_file("enroll", app.uploads.store(io.BytesIO(b"sku\nBUG\n"), "a.csv"))
    with world.working(app):
        first.wait(60)
        mended = io.BytesIO(b"row,sku\n2,fine\n")
        second = app.submit_file("enroll", app.uploads.store(mended, "b.csv"), resubmit_of=first.id)
        second.wait(60)
    assert places(app, "bug") == [(first.id, 2)]
    assert places(app, "fine") == [(second.id, 2)]


def test_a_worker_without_fields_to_search_writes_nothing(world: World) -> None:
    app = searched(world)
    app.submit("note", [{"n": 1, "sku": "SKU-7"}])
    app.workers["note"].perform_async({"n": 2, "sku": "SKU-7"})
    assert world.one("SELECT COUNT(*) FROM search_values") == 0
    app.submit("enroll", skus("one", "two"))
    assert world.one("SELECT COUNT(*) FROM search_values") == 4, "a value for each sku and each price"


@pytest.mark.each_database(reason="each has a transaction of its own")
def test_the_values_are_written_with_the_jobs_or_not_at_all(world: World) -> None:
    app = searched(world)
    assert app.submit("check", skus("before")).id == 1
    world.sql("DROP TABLE search_values")
    for submit in (
        lambda: app.submit("check", skus("lost")),
        lambda: app.workers["check"].perform_async({"sku": "lost"}),
    ):
        with pytest.raises(AsyncTaskError):
            submit()
    assert world.sql("SELECT task_id, seq FROM events") == [(1, 0)]
    assert world.one("SELECT COUNT(*) FROM tasks") == 1


HOSTILE = {
    "per cent": "100%_\\",
    "quote": "'; DROP TABLE events; --",
    "emoji": "👩‍👩‍👧 \U0001f1e9\U0001f1ea",
    "right to left": "\u202bשלום عالم\u202c",
    "long": "x" * 50_000,
    "wide": "ＳＫＵ－９",
    "sharp": "STRASSE",
    "last": "\U0010ffff",
    "star": "a*",
    "control": "tab\tand\u0001",
    "places": "12:34",
}


@pytest.mark.each_database(reason="each compares and quotes texts in its own way")
def test_any_text_is_found_and_none_is_a_pattern(world: World) -> None:
    app = searched(world)
    task = app.submit("check", skus(*HOSTILE.values(), "100x_\\", "ordinary"))
    rows = {name: [(task.id, row)] for row, name in enumerate(HOSTILE, 1)}
    assert {name: places(app, text[:1_000] + "*" * (text[-1] == "*")) for name, text in HOSTILE.items()} == rows
    assert places(app, "sku-9") == rows["wide"]
    assert places(app, "  straße ") == rows["sharp"]
    assert places(app, "SHALOM") == places(app, "100%") == places(app, "_") == []
    assert places(app, "100%*") == rows["per cent"]
    assert places(app, "12*") == rows["places"]
    assert places(app, "x" * 100) == rows["long"], "the first hundred characters are compared"
    for wrong in ("", "   ", "*", "\0", "SKU\0-7", "\ud800", "x" * 1_000_000, "\u200b"):
        with pytest.raises(InputError, match="write") as refused:
            app.search(wrong)
        assert refused.value.code == "invalid_search"


def test_numbers_lists_and_what_has_no_value(world: World) -> None:
    app = searched(world)
    items = [
        7,
        7.0,
        "7",
        True,
        None,
        "",
        [7, "seven", ["deep"], {"in": "side"}],
        {"x": "object"},
        1e300,
        10**19,
        "2026-11-28",
    ]
    task = app.submit("check", [{"sku": value} for value in items])
    app.submit("check", [{"other": "7"}, ["7"], "7", 7])
    sevens = [(task.id, 7), (task.id, 3), (task.id, 2), (task.id, 1)]
    assert places(app, "7") == sevens
    assert places(app, "seven") == [(task.id, 7)]
    assert places(app, "true") == [(task.id, 4)]
    assert places(app, "2026-11*") == [(task.id, 11)]
    assert places(app, "deep") == places(app, "side") == places(app, "object") == []
    assert places(app, "1" + "0" * 19) == [(task.id, 10)]
    many = app.submit("check", [{"sku": [f"v{n}" for n in range(500)]}])
    assert world.one("SELECT COUNT(*) FROM search_values WHERE task_id = ?", many.id) == 20


@pytest.mark.each_database(reason="each has an order of texts of its own")
def test_pages_have_every_job_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "_READ_AT_ONCE", 2)
    app = searched(world)
    names = [f"a{n % 3}" for n in range(9)] + ["A", "aé", "b", "a\U0001f600"]
    task = app.submit("check", skus(*names), owner="ann")
    app.submit("check", skus(*names), owner="ben")

    def walk(text: str, **more: Any) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        after = None
        while True:
            page = app.search(text, after=after, limit=2, **more)
            found += [(each["value"], each["row"]) for each in page.events]
            if (after := page.after) is None:
                return found

    every = sorted(((name.lower(), row) for row, name in enumerate(names, 1) if name != "b"), reverse=True)
    assert [(value.lower(), row) for value, row in walk("A*", owner="ann")] == every
    assert walk("a1", owner="ann") == [("a1", 8), ("a1", 5), ("a1", 2)]
    assert len(walk("a1")) == 6
    assert {each["task_id"] for each in app.search("a*", owner="ann").events} == {task.id}
    monkeypatch.setattr(queries, "_MOST_READ", 3)
    assert app.search("a1", owner="ann", limit=2).events == [], "three values of others were read"
    assert walk("a1", owner="ann") == [("a1", 8), ("a1", 5), ("a1", 2)]
    for wrong in ("", "x", "5:other", "-1:a1", "5", "9" * 30 + ":a1"):
        with pytest.raises(InputError, match="after: give"):
            app.search("a1", after=wrong)


@pytest.mark.each_database(reason="each has statements of its own for slices")
def test_what_is_purged_is_found_no_more(world: World) -> None:
    app = searched(world)
    gone, stays = app.submit("enroll", skus("SKU-7")), app.submit("check", skus("SKU-7"), paused=True)
    alone = str(app.workers["check"].perform_async({"sku": "SKU-7"}))
    waits = str(app.workers["check"].perform_in(3_600, {"sku": "SKU-7"}))
    with world.working(app):
        gone.wait(60)
        wait_for(lambda: app.operations.job(alone)["status"] == "finish", "the job without a Task is over")
    assert len(places(app, "SKU-7")) == 4
    removed = app.purge(0)
    assert (removed.tasks, removed.jobs) == (1, 1)
    assert [each["job_id"] for each in app.search("SKU-7").events if each["task_id"] is None] == [waits]
    assert places(app, "SKU-7") == [(None, None), (stays.id, 1)]
    assert world.one("SELECT COUNT(*) FROM search_values") == 2


class Account(BaseModel):
    name: str
    token: SecretStr


def test_a_worker_says_which_fields_it_has(world: World) -> None:
    app = world.app()

    def account(item: Account) -> None: ...

    def plain(item: dict[str, Any]) -> None: ...

    for options, words, target in (
        ({"search": "nmae"}, "'nmae' is no field of the item; its fields: name, token", account),
        ({"search": ["token"]}, "'token' holds a secret", account),
        ({"search": list("abcdef")}, "names 6 fields, the most is 5", plain),
        ({"search": ["a" * 101]}, "of at most 100 characters", plain),
        ({"search": [""]}, "must be the name of a field", plain),
        ({"search": [7]}, "must be the name of a field", plain),
        ({"search": "a", "use_task_event": False}, "must be tracked", plain),
    ):
        with pytest.raises(ConfigError, match=words):
            app.worker(**options)(target)
    assert app.worker(search=["name", "name"])(account).search == ("name",)


# -- jobs of attached engines


def sold(item: dict[str, Any]) -> None:
    """A task, where RQ can import it."""


def test_a_task_of_an_attached_engine_has_the_same_option(world: World) -> None:
    """No Redis answers: the lists wait in the ledger, and the single jobs in memory."""
    app, celery, broker, huey = (
        world.app(),
        Celery("shop", broker="redis://localhost:1/0"),
        StubBroker(),
        MemoryHuey("shop"),
    )
    on_celery.attach(celery, app)
    on_dramatiq.attach(broker, app)
    on_huey.attach(huey, app)
    rq = on_rq.attach(Redis(port=1), app, serializer="json")
    celery.task(name="by_celery", shared=False, search="sku")(sold)
    actor = dramatiq.actor(broker=broker, actor_name="by_dramatiq", search=["sku"])(sold)
    task = huey.task(name="by_huey", search=["sku"])(sold)
    rq.job("default", name="by_rq", search=["sku"])(sold)
    names = ["by_celery", "by_dramatiq", "by_huey", "by_rq"]
    tasks = [app.submit(name, skus("other", "SKU-7")) for name in names]
    assert places(app, "sku-7") == [(each.id, 2) for each in reversed(tasks)]
    actor.send({"sku": "SKU-7"})
    task({"sku": "SKU-7"})
    alone = [each for each in app.search("sku-7").events if each["task_id"] is None]
    assert [(each["worker"], each["value"]) for each in alone] == [("by_huey", "SKU-7"), ("by_dramatiq", "SKU-7")]

    class Searching(celery.Task):  # type: ignore[misc,name-defined]
        def search(self) -> None: ...

    celery.task(name="of_a_class", shared=False, base=Searching)(sold)
    assert app.workers["of_a_class"].search == ()
    with pytest.raises(on_dramatiq.ActorRefused, match="names 6 fields"):
        dramatiq.actor(broker=broker, actor_name="many", search=list("abcdef"))(sold)


# -- over HTTP, and the command line


def json_of(response: Any) -> dict[str, Any]:
    found: dict[str, Any] = response.json
    return found


def test_over_http_people_find_what_they_may_see(world: World) -> None:
    app = searched(world)
    mine = app.submit("check", skus("SKU-7", "SKU-7", "SKU-7"), owner="ann", title="<b>Mine</b>")
    theirs = app.submit("enroll", skus("SKU-7"), owner="ben")
    app.workers["check"].perform_async({"sku": "SKU-7"})
    users = {"root": User("root"), "ann": User("ann", owner="ann", rights={"read"})}
    client = create_app(app, authorize=lambda request: users[request.headers["X-User"]]).test_client()

    def get(path: str, who: str = "root") -> Any:
        return client.get(path, headers={"X-User": who})

    found = json_of(get("/api/search?q=sku-7"))
    assert [each["task_id"] for each in found["events"]] == [None, theirs.id, *[mine.id] * 3]
    assert found["links"]["next"] is None
    page = json_of(get("/api/search?q=sku-7&limit=2&worker=check&field=sku", "ann"))
    assert [(each["row"], each["task_title"]) for each in page["events"]] == [(3, "<b>Mine</b>"), (2, "<b>Mine</b>")]
    rest = json_of(get(page["links"]["next"], "ann"))
    assert ([each["row"] for each in rest["events"]], rest["links"]["next"]) == ([1], None)
    assert json_of(get("/api/search?q=sku-7&owner=ben", "ann"))["events"] == []
    assert [each["task_id"] for each in json_of(get("/api/search?q=sku-7&owner=ben"))["events"]] == [theirs.id]
    for wrong in ("", "q=", "q=%00", "q=*", f"q={'x' * 2_000}", "q=a&limit=0", "q=a&after=x", "q=a&what=1"):
        refused = get(f"/api/search?{wrong}")
        assert refused.status_code == 422, wrong
        assert json_of(refused)["code"] in ("invalid_query_parameter", "invalid_search")
    assert [each["search"] for each in json_of(get("/api/workers"))["workers"] if each["name"] == "check"] == [["sku"]]
    shown = get(f"/search?q={quote('<script>alert(1)</script>')}", "ann")
    assert shown.status_code == 200
    assert b"<script>alert" not in shown.data


def test_the_command_line_shows_what_happened(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    app = searched(world)
    task = app.submit("check", skus("SKU-7", "SKU-7", "SKU-70"), title="Products")
    flags = ("--database-url", world.store.url)

    def asked(*words: str) -> str:
        assert run(["search", *words, *flags]) == 0
        return capsys.readouterr().out

    found = json.loads(asked("sku-7", "--json"))
    assert [(each["task_id"], each["row"]) for each in found["events"]] == [(task.id, 2), (task.id, 1)]
    assert found["after"] is None
    text = asked("sku-7*", "--limit", "1", "--field", "sku")
    assert "SKU-70" in text
    assert "Products" in text
    (command,) = (line for line in text.splitlines() if line.startswith("The next: "))
    assert "--after 3:sku-70" in command
    assert "Nothing found." in asked("nothing")
    assert run(["search", "*", *flags]) == 2
    assert "write the value" in capsys.readouterr().err
