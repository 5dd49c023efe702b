"""Whatever text or number comes through a public door is stored as it may be, or refused in words: no driver's error."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.webshop import Client
from support.world import World

from asynctask import AsyncTask
from asynctask.errors import AsyncTaskError, InputError, NotFound, Unavailable
from asynctask.operations import LISTS, VERBS
from webapi import create_app

HALF = "\ud800"
TEXTS = st.text(
    st.sampled_from(["\0", HALF, "\udfff", "'", '"', "\\", ";", "%", "é", "\U0010ffff", "٣", "a", " "]), min_size=1
)
HUGE = st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, 2**70, -1, -(2**70)])

examples = settings(
    max_examples=3,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def app(world: World) -> AsyncTask:
    found = world.app()
    found.submit("note", [{"n": 1}])
    return found


@pytest.fixture
def client(app: AsyncTask) -> Any:
    found = create_app(app)
    found.config["PROPAGATE_EXCEPTIONS"] = False  # as a server: what is not caught is a 500
    return found.test_client()


def let_in(door: Callable[[], Any]) -> None:
    """Goes through a door; that it is shut is well, that the database is said to be away is not."""
    with suppress(AsyncTaskError):
        try:
            door()
        except Unavailable as error:
            raise AssertionError(f"said to be away: {error}") from error


class Theirs(Exception):
    """What a program's own iterable raises."""


def broken(text: str) -> Iterator[dict[str, int]]:
    yield {"n": 1}
    raise Theirs(text)


def text_doors(app: AsyncTask, text: str) -> Iterator[Callable[[], Any]]:
    task, operations, note = app.task(1), app.operations, app.workers["note"]
    anyhow: Any = app
    yield lambda: app.event(text)
    yield lambda: app.record(text, "finish")
    yield lambda: app.record("job", "working", text)
    yield lambda: app.record("job", text)
    for option in ("title", "owner", "session", "queue", "idempotency_key", "unique"):
        yield partial(anyhow.submit, note, [{"n": 1}], **{option: text})
    yield lambda: app.submit(note, [{"n": text}, {text: 1}, text])
    yield lambda: app.submit(text, [{"n": 1}])
    stored = app.uploads.store(io.BytesIO(b"n\n1\n"), f"{text}.csv")
    yield lambda: app.submit_file(note, stored, sheet=text)
    yield lambda: app.submit_file(note, app.uploads.store(io.BytesIO(b"n\n1\n"), f"{text}.csv"), columns={text: text})
    yield lambda: app.submit(note, [{"n": text}], idempotency_key="key")
    for name in ("owner", "worker", "state"):
        yield partial(anyhow.tasks, **{name: text})
    yield lambda: note.perform_async({"n": text})
    yield lambda: note.set(queue=text).perform_async(1)
    yield lambda: app.worker(name=text, queue=text)(lambda item: None)
    yield lambda: task.update(title=text, who=text)
    yield lambda: task.pause(who=text)
    yield lambda: task.resume(who=text)
    yield lambda: task.events(status=text)
    yield lambda: operations.jobs(text)
    yield lambda: operations.delete_jobs(text, [text, f"1:{text}"], who=text)
    yield lambda: operations.clear_queue(text, who=text)
    yield lambda: operations.pause(text)
    yield lambda: operations.signal(text, "quiet")
    for name in LISTS:
        yield lambda name=name: operations.search(name, text)  # type: ignore[misc]
        for action in VERBS:
            yield lambda name=name, action=action: operations.act(name, action, [text, f"event:{text}"], who=text)  # type: ignore[misc]


def number_doors(app: AsyncTask, number: int) -> Iterator[Callable[[], Any]]:
    task, operations, note = app.task(1), app.operations, app.workers["note"]
    yield lambda: app.task(number)
    yield lambda: app.progress(number)
    yield lambda: app.tasks(ids=[1, number])
    yield lambda: app.tasks(after=number, limit=number)
    yield lambda: task.events(after=number, limit=number)
    yield lambda: task.rejects(after=number, limit=number)
    yield lambda: task.update(parallel=number)
    yield lambda: task.update(priority=number)
    yield lambda: app.submit(note, [{"n": number}], priority=number)
    yield lambda: app.submit(note, [{"n": number}], idempotency_key="key")
    yield lambda: note.perform_async(number)
    yield lambda: note.set(priority=number).perform_async(1)
    yield lambda: operations.jobs("default", after=number, limit=number)
    for name in LISTS:
        yield lambda name=name: operations.listed(name, after=number, limit=number)  # type: ignore[misc]
        yield lambda name=name: operations.act(name, "restart", [f"event:{number}", f"{number}"])  # type: ignore[misc]


def requests(value: str) -> Iterator[tuple[str, str, Any]]:
    """Method, path and JSON of requests with a value in every place."""
    raw = quote(value.encode("utf-8", "surrogatepass"), safe="")
    for path in (
        f"jobs/{raw}",
        f"tasks/{raw}",
        f"tasks/{raw}/events",
        f"tasks?worker={raw}",
        f"tasks?owner={raw}",
        f"tasks?ids=1,{raw}",
        f"tasks?after={raw}",
        f"tasks/1/events?after={raw}",
        f"tasks/1/events?status={raw}",
        f"tasks/1/rejected?after={raw}",
        f"queues/{raw}/jobs",
        f"queues/default/jobs?after={raw}",
        f"workers/{raw}/template.csv",
        *[f"{name}?after={raw}" for name in LISTS],
        *[f"{name}/search?text={raw}" for name in LISTS],
    ):
        yield "GET", path, None
    for path in (f"tasks/{raw}/pause", f"queues/{raw}/clear", f"queues/{raw}/pause", f"processes/{raw}/quiet"):
        yield "POST", path, None
    for option in ("title", "owner", "session", "queue", "worker", "items", "unique", "priority", value):
        yield "POST", "tasks", {"worker": "note", "items": [{"n": 1}], option: value}
    yield "POST", "tasks", {"worker": "note", "items": [{"n": value}, {value: 1}]}
    yield "PATCH", "tasks/1", {"title": value}
    yield "POST", "queues/default/delete", {"keys": [value]}
    for name in LISTS:
        yield "POST", f"{name}/restart", {"keys": [value, f"event:{value}"]}


@examples
@given(text=TEXTS)
@example(text=HALF)
@example(text="a\0b")
@example(text="x" * 70_000)
def test_a_text_is_stored_or_refused(app: AsyncTask, text: str) -> None:
    for door in text_doors(app, text):
        let_in(door)


@examples
@given(number=HUGE)
def test_a_number_is_stored_or_refused(app: AsyncTask, number: int) -> None:
    for door in number_doors(app, number):
        let_in(door)


@settings(parent=examples, max_examples=1)
@given(value=TEXTS)
@example(value=HALF)
@example(value="a\0b")
@example(value=str(2**70))
def test_a_request_is_answered_and_the_fault_is_never_the_servers(client: Client, value: str) -> None:
    for method, path, body in requests(value):
        answer = client.open(f"/api/{path}", method=method, **({} if body is None else {"json": body}))
        assert answer.status_code < 500, (method, path, body, answer.get_data(as_text=True)[:300])


@pytest.mark.parametrize("text", ["row of \udcff", "bad \0 byte"])
def test_what_an_iterable_raises_comes_out_of_submit_whatever_its_text(app: AsyncTask, text: str) -> None:
    with pytest.raises(Theirs):
        app.submit("note", broken(text))
    newest = app.tasks()[0]
    assert newest["split"]["state"] == "failed"
    assert newest["split"]["reason"].startswith("the items ended with Theirs")


@pytest.mark.parametrize("job_id", ["a\0b", HALF])
def test_of_a_job_id_that_no_job_can_have_there_is_no_job(app: AsyncTask, client: Client, job_id: str) -> None:
    with pytest.raises(NotFound):
        app.event(job_id)
    with pytest.raises(InputError, match="64 characters"):
        app.record(job_id, "finish")
    assert client.get("/api/jobs/a%00b").status_code == 404


def test_of_a_task_id_that_no_task_can_have_there_is_no_task(app: AsyncTask) -> None:
    for door in (app.task, app.progress):
        with pytest.raises(NotFound):
            door(2**70)
    assert [task["task_id"] for task in app.tasks(ids=[1, 2**70])] == [1]
    assert [task["task_id"] for task in app.tasks(after=2**70)] == [1]
