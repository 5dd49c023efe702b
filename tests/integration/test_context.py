"""What a job knows of its list: the constants of the submission, its Task, its owner and its row."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.world import World, numbers

from asynctask import NormalException, current_job
from asynctask.errors import InputError
from asynctask.integrations.remote import Reporter
from asynctask.job import MAX_CONTEXT, CurrentJob, JobTask
from asynctask.reports.files import write_csv
from asynctask.task import TaskHandle
from asynctask.testing import wait_for
from webapi import create_app

pytestmark = pytest.mark.one_database(
    reason="a context is a text of the row of its Task, which is read with each job by one join"
)

CONTEXT = {"seller": 7, "language": "de", "rates": [0.5, 10**20], "note": "über\u0000"}

Known = dict[str, Any]


def known() -> Known:
    """What the job that runs knows."""
    job = current_job()
    task = None if job.task is None else (job.task.id, job.task.title, job.task.owner, job.task.worker)
    return {"owner": job.owner, "row": job.row, "context": job.context, "task": task, "task_id": job.task_id}


class Book:
    """Workers that note what their jobs know, and an application with them; the jobs run in this process."""

    def __init__(self, world: World, **more: Any) -> None:
        self.app = world.app(**more)
        self.known: list[Known] = []
        self.seen: list[dict[str, Any]] = []
        self.app.server_middleware.add(self._middleware)
        self.app.worker(self._tell, name="tell", retry=2, retry_in=lambda *_: 0.01)
        self.app.worker(self._batch, name="batch", batch=True)
        self.app.worker(self._told, name="say")
        self.app.worker(self._loose, name="loose", use_task_event=False)

    def _middleware(self, worker: Any, job: CurrentJob, queue: str, call_next: Any) -> Any:
        self.seen.append({"owner": job.owner, "context": job.context})
        return call_next()

    def _tell(self, item: dict[str, Any]) -> None:
        self.known.append({**known(), "attempt": current_job().attempt})
        current_job().context["seller"] = "changed by a job"
        if current_job().attempt <= item.get("breaks", 0):
            raise ValueError("not yet")

    def _batch(self, items: list[dict[str, Any]]) -> None:
        self.known.append(known())

    def _told(self, progress: dict[str, Any]) -> None:
        self.known.append({**known(), "progress": progress})

    def _loose(self, item: dict[str, Any]) -> None:
        self.known.append(known())


def of(task: Any, row: int | None, worker: str = "tell", **more: Any) -> Known:
    """What the job of a row knows."""
    its = (task.id, "Spring", "ann", worker)
    return {"owner": "ann", "row": row, "context": CONTEXT, "task": its, "task_id": task.id, **more}


WITH: dict[str, Any] = {"title": "Spring", "owner": "ann", "context": CONTEXT}


@pytest.mark.each_database(reason="each way of a borrow reads it with statements of its own")
@pytest.mark.parametrize(
    "options", [{}, {"parallel": 1}, {"interval": 0.01}, {"key": "n"}, {"session": "s"}, {"tolerated_failures": 9}], ids=str
)
def test_each_job_has_the_context_of_its_list(world: World, options: dict[str, Any]) -> None:
    book = Book(world)
    task = book.app.submit("tell", numbers(30), **WITH, **options)
    with world.working(book.app):
        task.wait(60)
    assert sorted(book.known, key=lambda each: each["row"]) == [of(task, row, attempt=1) for row in range(1, 31)]
    assert book.seen == [{"owner": "ann", "context": CONTEXT}] * 30
    assert task.context == CONTEXT


@pytest.mark.each_database(reason="a claim reads it with another statement")
def test_a_retried_job_and_one_that_is_run_again_have_it_too(world: World) -> None:
    book = Book(world)
    with world.working(book.app):
        task = book.app.submit("tell", [{"n": 0, "breaks": 4}], **WITH)
        task.wait(60)
        assert task.retry()
        task.wait(60)
    assert book.known == [of(task, 1, attempt=attempt) for attempt in range(1, 6)]


@pytest.mark.each_database(reason="lists that are lent together are read by one statement")
def test_small_lists_that_are_lent_together_keep_apart(world: World) -> None:
    book = Book(world)
    tasks = [book.app.submit("tell", numbers(2), owner=f"o{n}", context={"n": n}) for n in range(5)]
    tasks.append(book.app.submit("tell", numbers(2)))
    with world.working(book.app):
        for task in tasks:
            task.wait(60)
    found = {(each["task_id"], each["owner"], json.dumps(each["context"])) for each in book.known}
    expected = {(task.id, f"o{n}", json.dumps({"n": n})) for n, task in enumerate(tasks[:5])}
    assert found == expected | {(tasks[5].id, "", "{}")}


def test_items_of_a_slice_have_their_rows_and_the_same_context(world: World) -> None:
    book = Book(world)
    task = book.app.submit("tell", numbers(9), chunk_size=3, **WITH)
    with world.working(book.app):
        task.wait(60)
    assert sorted(book.known, key=lambda each: each["row"]) == [of(task, row, attempt=1) for row in range(1, 10)]


@pytest.mark.parametrize("count", [4, 1])
def test_a_batch_has_the_context_and_no_row(world: World, count: int) -> None:
    book = Book(world)
    task = book.app.submit("batch", numbers(count), chunk_size=4, **WITH)
    with world.working(book.app):
        task.wait(60)
    assert book.known == [of(task, None, "batch")]


def test_a_callback_has_the_context_of_its_task(world: World) -> None:
    book = Book(world)
    task = book.app.submit("tell", numbers(1), on_complete="say", **WITH)
    with world.working(book.app):
        task.wait(60)
    told = book.known[-1]
    assert "context" not in told.pop("progress")
    assert told == of(task, None, task_id=None), "it is a callback, no job of the list"


def test_the_shards_of_an_export_and_its_merge_have_it(world: World) -> None:
    book = Book(world)
    app = book.app

    @app.export(columns=["n", "seller"])
    def cells(shard: int) -> Iterator[tuple[int, int]]:
        yield shard, current_job().context["seller"]

    task = app.submit_export(cells, [1, 2], **WITH)
    with world.working(app):
        task.wait(60)
    with app.result(task.id).open() as file:
        assert file.read().decode("utf-8-sig").split() == ["n,seller", "1,7", "2,7"]
    assert book.seen == [{"owner": "ann", "context": CONTEXT}] * 3, "two shards and the merge"
    body = {"worker": "cells", "shards": [1], "context": CONTEXT}
    answer: Any = create_app(app).test_client().post("/api/exports", json=body).json
    assert app.task(answer["task_id"]).context == CONTEXT


@pytest.mark.each_database(reason="a job that arrives through a queue is read with another statement")
@pytest.mark.parametrize("broker_kind", ["redis"])
def test_a_job_that_comes_through_redis_has_it(world: World) -> None:
    book = Book(world)
    app, task = book.app, book.app.submit("tell", numbers(2), **WITH)
    app.start_services()
    app.record_all([], Reporter("sidekiq", "host:7:abc", concurrency=5, queues=["default"]))
    wait_for(lambda: app.dispatcher.run_pass() or len(world.broker.copies()) == 2, "both lie in Redis")
    app.stop_services()
    with world.working(app):
        task.wait(60)
    assert sorted(book.known, key=lambda each: each["row"]) == [of(task, row, attempt=1) for row in (1, 2)]


def test_a_job_without_a_task_has_none(world: World) -> None:
    book = Book(world)
    for name in ("tell", "loose"):
        book.app.workers[name].perform_async({"n": 1})
    with world.working(book.app):
        wait_for(lambda: len(book.known) == 2, "both ran")
    for each in book.known:
        each.pop("attempt", None)
        assert each == {"owner": "", "row": None, "context": {}, "task": None, "task_id": None}


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (["seller"], "option 'context' must be a JSON object"),
        ("seller", "option 'context' must be a JSON object"),
        ({"at": object()}, "option 'context' must be JSON"),
        ({"at": float("nan")}, "option 'context' must be JSON"),
        ({"at": "\ud800"}, "option 'context' must be JSON"),
        ({1: 2}, "option 'context' has a name that is no text: 1"),
        (
            {"at": "x" * MAX_CONTEXT},
            r"option 'context' has 16,393 bytes as JSON, the most is 16,384: keep the data elsewhere",
        ),
    ],
)
def test_a_context_that_is_no_small_object_is_refused(world: World, context: Any, message: str) -> None:
    app = world.app()
    with pytest.raises(InputError, match=message) as refused:
        app.submit("note", numbers(1), context=context)
    assert (refused.value.code, refused.value.errors[0].column) == ("invalid_options", "context")
    assert app.submit("note", numbers(1), context={"at": "x" * (MAX_CONTEXT - 9)}).context["at"]


def test_an_idempotency_key_names_the_context_too(world: World) -> None:
    app = world.app()
    first = app.submit("note", numbers(1), idempotency_key="k", context={"seller": 7})
    assert app.submit("note", numbers(1), idempotency_key="k", context={"seller": 7}).id == first.id
    for other in ({"seller": 8}, None):
        with pytest.raises(InputError, match="with another body"):
            app.submit("note", numbers(1), idempotency_key="k", context=other)


def test_a_corrected_list_has_the_context_of_the_first_one_unless_it_brings_its_own(world: World) -> None:
    app = world.app()
    known: list[Any] = []

    @app.worker(retry=0)
    def refuse(item: dict[str, Any]) -> None:
        known.append((current_job().owner, current_job().context))
        raise NormalException("no")

    def correct(task_id: int, context: dict[str, Any] | None) -> TaskHandle:
        made, text = app.task(task_id).report("failed"), io.StringIO()
        write_csv(text, made.headers, made.rows, locale=made.locale)
        stored = app.uploads.store(io.BytesIO(text.getvalue().encode()), "list.csv")
        return app.submit_file("refuse", stored, wait_s=60, resubmit_of=task_id, context=context)

    with world.working(app):
        stored = app.uploads.store(io.BytesIO(b"n\n1\n"), "list.csv")
        task = app.submit_file("refuse", stored, owner="ann", context=CONTEXT, wait_s=60)
        task.wait(60)
        for context in (None, {"seller": 8}, None, {}, None):
            task = correct(task.id, context)
            task.wait(60)
    assert known == [("ann", each) for each in (CONTEXT, CONTEXT, {"seller": 8}, {"seller": 8}, {}, {})]


# -- over HTTP


def test_a_list_of_json_a_form_and_a_raw_body_have_a_context(world: World) -> None:
    app = world.app()
    client, text = create_app(app).test_client(), json.dumps(CONTEXT)
    answers = [
        client.post("/api/tasks", json={"worker": "note", "items": numbers(1), "context": CONTEXT}),
        client.post("/api/tasks", json={"jobs": [{"worker": "note", "item": {"n": 1}}], "context": CONTEXT}),
        client.post("/api/tasks", data={"worker": "note", "file": (io.BytesIO(b"n\n1\n"), "a.csv"), "context": text}),
        client.post(
            "/api/tasks", query_string={"worker": "note", "context": text}, data=b"n\n1\n", content_type="text/csv"
        ),
    ]
    for answer in answers:
        found: Any = answer.json
        assert answer.status_code == 202, found
        assert "context" not in found
        assert app.task(found["task_id"]).context == CONTEXT
    listed: Any = client.get("/api/tasks").json
    assert all("context" not in each for each in listed["tasks"]), "a list of Tasks has none"


def test_the_object_of_a_task_has_the_context_where_it_is_asked_for(world: World) -> None:
    app = world.app()
    client = create_app(app).test_client()
    task = app.submit("note", numbers(1), context=CONTEXT)
    path = f"/api/tasks/{task.id}"
    plain, full = client.get(path), client.get(f"{path}?include=context")
    found: Any = full.json
    assert "context" not in (plain.json or {})
    assert found["context"] == CONTEXT
    assert full.headers["ETag"] != plain.headers["ETag"]
    assert client.get(f"{path}?include=context", headers={"If-None-Match": full.headers["ETag"]}).status_code == 304
    waited: Any = client.get(f"{path}?include=context&wait=0.1&version={found['version']}").json
    assert waited["context"] == CONTEXT
    without: Any = client.get(f"/api/tasks/{app.submit('note', numbers(1)).id}?include=context").json
    assert without["context"] == {}
    assert client.get(f"{path}?include=contexts").status_code == 422


@pytest.mark.parametrize(("wrong", "shown"), [("{", "no JSON"), ("[1]", "JSON object"), ('{"a":1,"a":2}', "'a'")])
def test_a_field_of_a_form_that_is_no_object_is_refused(world: World, wrong: str, shown: str) -> None:
    client = create_app(world.app()).test_client()
    answer = client.post("/api/tasks", data={"worker": "note", "file": (io.BytesIO(b"n\n1\n"), "a.csv"), "context": wrong})
    found: Any = answer.json
    assert (answer.status_code, found["code"], found["errors"][0]["column"]) == (422, "invalid_option", "context")
    assert shown in found["errors"][0]["message"]


# -- a job of a test


def test_a_job_that_a_test_makes_has_what_it_is_given() -> None:
    job = CurrentJob("j", owner="ann", row=5, context=CONTEXT)
    assert (job.owner, job.row, job.context, job.task) == ("ann", 5, CONTEXT, None)
    job.context["seller"] = 8
    assert job.context["seller"] == 7
    task = JobTask(1, "Spring", "bob", "tell", '{"seller":9}')
    assert (CurrentJob("j", task=task).owner, CurrentJob("j", task=task).context) == ("bob", {"seller": 9})
    assert (CurrentJob("j").owner, CurrentJob("j").row, CurrentJob("j").context) == ("", None, {})
    with pytest.raises(InputError, match="must be JSON"):
        CurrentJob("j", context={"at": object()})
