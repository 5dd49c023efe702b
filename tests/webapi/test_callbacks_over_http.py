"""Callbacks over HTTP: given with a list in each form, shown with its Task, run again."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import urlencode

import pytest
from support.webshop import Client

from asynctask import AsyncTask
from asynctask.testing import wait_for

Working = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def told(app: AsyncTask) -> list[tuple[Any, ...]]:
    """What the worker ``tell`` was called with; with the argument ``break`` it breaks the first five times."""
    seen: list[tuple[Any, ...]] = []

    @app.worker(retry_in=lambda *_: 0.01)
    def tell(*args: Any) -> None:
        seen.append(args)
        if args[0] == "break" and len(seen) <= 5:
            raise ValueError("nobody listens")

    return seen


def as_json(client: Client, **options: Any) -> Any:
    return client.post("/api/tasks", json={"worker": "enroll", "items": [{"sku": "A"}], **options})


def as_form(client: Client, **options: Any) -> Any:
    fields = {name: value if isinstance(value, str) else json.dumps(value) for name, value in options.items()}
    return client.post("/api/tasks", data={"worker": "enroll", "file": (io.BytesIO(b"sku\nA\n"), "a.csv"), **fields})


def as_raw(client: Client, **options: Any) -> Any:
    fields = {name: value if isinstance(value, str) else json.dumps(value) for name, value in options.items()}
    query = urlencode({"worker": "enroll", **fields})
    return client.post(f"/api/tasks?{query}", data=b"sku\nA\n", content_type="text/csv")


@pytest.mark.parametrize("submit", [as_json, as_form, as_raw])
def test_they_are_given_in_each_form_of_a_list_and_shown_with_its_task(
    client: Client, told: list[tuple[Any, ...]], working: Working, submit: Callable[..., Any]
) -> None:
    answer = submit(client, on_complete="tell", on_success={"worker": "tell", "args": ["well", 7]}, on_failure="tell")
    assert answer.status_code == 202, answer.json
    assert answer.json["callbacks"] == [
        {"name": name, "worker": "tell", "status": None, "job_id": None}
        for name in ("on_complete", "on_success", "on_failure")
    ]
    url = f"/api/tasks/{answer.json['task_id']}"
    with working():
        wait_for(lambda: client.get(url).json["done"], "the Task is done")
    seen = {each["name"]: each for each in client.get(url).json["callbacks"]}
    assert {name: each["status"] for name, each in seen.items()} == {
        "on_complete": "finish", "on_success": "finish", "on_failure": None,
    }  # fmt: skip
    event = client.get(f"/api/jobs/{seen['on_success']['job_id']}").json
    assert (event["callback_of"], event["params"][:2]) == (answer.json["task_id"], ["well", 7])
    assert sorted(len(args) for args in told) == [1, 3]
    assert {args[-1]["task_id"] for args in told} == {answer.json["task_id"]}


@pytest.mark.parametrize("submit", [as_json, as_form, as_raw])
@pytest.mark.parametrize("said", ["nobody", {"worker": "nobody"}, {"args": [1]}, {"worker": "tell", "more": 1}])
def test_one_that_cannot_be_is_refused_by_its_name(
    client: Client, told: list[tuple[Any, ...]], submit: Callable[..., Any], said: Any
) -> None:
    answer = submit(client, on_failure=said)
    assert answer.status_code == 422, answer.json
    assert answer.json["errors"][0]["column"] == "on_failure"
    assert client.get("/api/tasks").json["tasks"] == []


def test_those_that_failed_are_run_again(client: Client, told: list[tuple[Any, ...]], working: Working) -> None:
    url = f"/api/tasks/{as_json(client, on_complete={'worker': 'tell', 'args': ['break']}).json['task_id']}"
    assert client.post(f"{url}/callbacks").status_code == 409
    with working():
        wait_for(lambda: client.get(url).json["done"], "the Task is done")
        failed = client.get(url)
        assert (failed.json["state"], failed.json["state_reason"]) == ("finished", "callback_failed")
    answer = client.post(f"{url}/callbacks")
    assert (answer.status_code, answer.json["state"], answer.json["done"]) == (200, "finalizing", False)
    assert answer.headers["ETag"] != failed.headers["ETag"]
    again = client.post(f"{url}/callbacks")
    assert (again.status_code, again.json["version"]) == (200, answer.json["version"])
    with working():
        wait_for(lambda: client.get(url).json["done"], "it is done again")
    assert client.get(url).json["state_reason"] is None
    assert client.post(f"{url}/callbacks").status_code == 409
    assert len(told) == 6


def test_the_etag_tells_a_step_of_a_callback(
    app: AsyncTask, client: Client, told: list[tuple[Any, ...]], working: Working
) -> None:
    task = app.submit("enroll", [{"sku": "A"}], on_complete="tell", on_success={"worker": "tell", "args": ["break"]})
    url = f"/api/tasks/{task.id}"
    launcher = app.launcher(concurrency=1, queues={"default": 1})
    launcher.start()
    wait_for(lambda: task.progress()["state"] == "finalizing", "its item is over")
    launcher.stop()
    first = client.get(url)
    assert app.record(first.json["callbacks"][0]["job_id"], "finish")
    second = client.get(url, headers={"If-None-Match": first.headers["ETag"]})
    assert (second.status_code, second.json["done"]) == (200, False)
