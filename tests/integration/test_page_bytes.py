"""A page of a list ends by its bytes: rows of 60 KB do not fill the memory, and links.next leads to each row once."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import BaseModel, Field
from support.databases import Store
from support.webshop import Client, client_of

from asynctask import AsyncTask
from asynctask.brokers.admin import PAGE_BYTES
from asynctask.database.tables import events
from asynctask.ledger import tasks as task_rows

pytestmark = pytest.mark.one_database(reason="where a page ends is decided above the database")

WIDE = 60_000
ROWS = 400
LONGEST = PAGE_BYTES + 1_000_000
HELD = 40_000_000
"""Bytes that one answer may hold: its text twice, and a part of the rows. All rows and their JSON are over 70 MB."""


class Product(BaseModel):
    sku: str = Field(max_length=20)


def make(store: Store, folder: Path, **settings: Any) -> AsyncTask:
    made = AsyncTask(environ={}, database_url=store.url, data_dir=str(folder / "data"), submit_wait_s=60.0, **settings)

    @made.worker(retry=0)
    def anything(item: dict[str, Any]) -> None: ...

    @made.worker(retry=0)
    def enroll(item: Product) -> None: ...

    @made.worker(use_task_event=False)
    def loose(item: dict[str, Any]) -> None: ...

    return made


@pytest.fixture
def app(store: Store, tmp_path: Path) -> Iterator[AsyncTask]:
    made = make(store, tmp_path)
    yield made
    made.close()


@pytest.fixture(params=["sql", "redis"])
def queued(request: pytest.FixtureRequest, store: Store, tmp_path: Path) -> Iterator[AsyncTask]:
    """An application with its queue in the database, and in Redis."""
    settings: dict[str, Any] = {}
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        with server.client() as client:
            client.flushall()
        settings["broker_url"] = server.url
    made = make(store, tmp_path, **settings)
    yield made
    made.close()


def wide(count: int, length: int = WIDE) -> list[dict[str, Any]]:
    return [{"n": n, "x": "y" * length} for n in range(count)]


def held(call: Callable[[], Any]) -> int:
    """The most bytes that Python holds more during a call than before it."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def all_pages(client: Client, url: str, name: str) -> list[Any]:
    """The rows of every page, from link to link; no page is longer than it may be."""
    found: list[Any] = []
    following: str | None = url
    while following is not None:
        answer = client.get(following)
        assert answer.status_code == 200, answer.text
        assert len(answer.data) < LONGEST
        assert answer.json[name], "each page has a row at least"
        found += answer.json[name]
        following = answer.json["links"]["next"]
    return found


@pytest.mark.each_database(reason="how many rows a driver holds is its own")
@pytest.mark.parametrize("chunk_size", [pytest.param(1, marks=pytest.mark.full(reason="short rows of the same")), 10])
def test_events(app: AsyncTask, chunk_size: int) -> None:
    task = app.submit("anything", wide(ROWS), chunk_size=chunk_size)
    client, url = client_of(app), f"/api/tasks/{task.id}/events?limit=1000"
    client.get(f"{url}1")  # what is imported and compiled once
    assert held(lambda: client.get(url)) < HELD
    assert [each["params"]["n"] for each in all_pages(client, url, "events")] == list(range(ROWS))
    assert len(task.events(limit=1_000)) == ROWS, "Python's list has the rows that were asked for"


def test_jobs_without_a_task(app: AsyncTask) -> None:
    for item in wide(ROWS):
        app.workers["anything"].perform_async(item)
    client, url = client_of(app), "/api/jobs?limit=1000"
    client.get("/api/jobs?limit=1")
    assert held(lambda: client.get(url)) < HELD
    assert [each["params"][0]["n"] for each in all_pages(client, url, "jobs")] == list(reversed(range(ROWS)))


def test_rejected_rows(app: AsyncTask) -> None:
    rows = b"".join(orjson.dumps({"sku": "x" * WIDE, "n": n}) + b"\n" for n in range(ROWS))
    client = client_of(app)
    made = client.post("/api/tasks?worker=enroll", data=rows, content_type="application/x-ndjson")
    url = f"/api/tasks/{app.tasks()[0]['task_id']}/rejected?limit=1000"
    assert made.status_code == 422
    client.get(f"{url}1")
    assert held(lambda: client.get(url)) < HELD
    assert [each["row"] for each in all_pages(client, url, "rejected")] == list(range(1, ROWS + 1))


def test_jobs_of_a_queue(queued: AsyncTask) -> None:
    queued.workers["loose"].perform_bulk(wide(1_000))
    client, url = client_of(queued), "/api/queues/default/jobs?limit=1000"
    client.get(url)
    assert held(lambda: client.get(url)) < HELD
    found = all_pages(client, url, "jobs")
    assert len({each["key"] for each in found}) == len(found) == 1_000


def test_scheduled_jobs_of_the_ledger_and_of_the_broker(queued: AsyncTask) -> None:
    # Longer arguments are not shown. Both kinds in turns, so that each page has both.
    count = 1_000
    for n, item in enumerate(wide(count, 16_000)):
        name = "loose" if n % 2 else "anything"
        queued.workers[name].perform_in(3_600 + n, item)
    client, url = client_of(queued), "/api/scheduled?limit=1000"
    client.get("/api/scheduled?limit=1")
    assert held(lambda: client.get(url)) < HELD
    assert [each["args"][0]["n"] for each in all_pages(client, url, "entries")] == list(range(count))
    searched = client.get("/api/scheduled/search?text=yyy&limit=1000")
    assert len(searched.data) < LONGEST
    assert [each["args"][0]["n"] for each in searched.json["entries"]] == list(range(len(searched.json["entries"])))
    assert searched.json["complete"] == (len(searched.json["entries"]) == count)


def test_the_log_and_the_first_failures_of_a_task(app: AsyncTask) -> None:
    task = app.submit("anything", [{"n": n} for n in range(20)])
    for each in task.events():
        app.record(each["job_id"], "error", "a bug")
    message = {"at": None, "status": "working", "message": "z" * 10_000, "attempt": 1}
    with app.ledger.database.write() as connection:
        connection.execute(events.update().values(added_messages=orjson.dumps([message] * 90).decode()))
        for _ in range(900):
            task_rows.log(connection, app.ledger, task.id, "retried", {"message": "z" * 20_000}, "ann")
    client = client_of(app)
    log = client.get(f"/api/tasks/{task.id}/log")
    assert 0 < len(log.json["log"]) < 900
    assert len(log.data) < LONGEST
    failed = client.get(f"/api/tasks/{task.id}?include=errors")
    assert 0 < len(failed.json["errors"]) < 20
    assert len(failed.data) < LONGEST


def test_one_row_beyond_the_bound_is_a_page(app: AsyncTask) -> None:
    task = app.submit("anything", [{"n": n} for n in range(3)])
    message = {"at": None, "status": "working", "message": "\x01" * 10_000, "attempt": 1}
    with app.ledger.database.write() as connection:
        connection.execute(events.update().values(added_messages=orjson.dumps([message] * 90).decode()))
    client, following, sizes = client_of(app), f"/api/tasks/{task.id}/events", list[int]()
    while following is not None:
        page = client.get(following).json
        sizes.append(len(page["events"]))
        following = page["links"]["next"]
    assert sizes == [1, 1, 1]
