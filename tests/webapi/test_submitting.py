"""Handing in a list over HTTP: what is taken, and what is answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.webshop import Client, client_of

from asynctask import AsyncTask
from asynctask.testing import wait_for

Form = Callable[..., dict[str, Any]]


def test_json_items_become_a_task_with_location_and_retry_after(client: Client) -> None:
    answer = client.post("/api/tasks", json={"worker": "enroll", "items": [{"sku": "A"}, {"sku": "B"}], "title": "Spring"})
    assert answer.status_code == 202, answer.json
    assert answer.json["title"] == "Spring"
    assert answer.json["counts"]["total"] == 2
    assert answer.headers["Location"] == answer.json["links"]["self"] == f"/api/tasks/{answer.json['task_id']}"
    assert int(answer.headers["Retry-After"]) >= 1
    assert client.get(answer.headers["Location"]).json["task_id"] == answer.json["task_id"]


def test_a_sheet_becomes_a_task_and_its_options_are_read_from_the_form(client: Client, form: Form) -> None:
    answer = client.post("/api/tasks", **form("sku,Quantity\nA,1\nB,2\n", title="Été", parallel="3", priority="120"))
    assert answer.status_code == 202, answer.json
    assert answer.json["title"] == "Été"
    assert answer.json["control"]["parallel"] == 3
    assert answer.json["control"]["priority"] == 120
    assert answer.json["counts"]["total"] == 2


def test_columns_say_which_header_means_which_field(client: Client, form: Form) -> None:
    answer = client.post("/api/tasks", **form("Artikel-Nr.,x\nA,1\n", columns='{"Artikel-Nr.": "sku"}'))
    assert answer.status_code == 202, answer.json
    events = client.get(answer.json["links"]["events"]).json["events"]
    assert events[0]["params"]["sku"] == "A"


def test_bad_rows_are_in_the_answer_and_hold_up_no_others(client: Client, form: Form) -> None:
    answer = client.post("/api/tasks", **form("sku,Quantity\nA,1\nB,many\n,7\n"))
    assert answer.status_code == 202
    assert answer.json["counts"]["total"] == 1
    assert answer.json["split"]["rejected"] == 2
    assert {(e["row"], e["column"], e["code"]) for e in answer.json["errors"]} == {
        (3, "Quantity", "wrong_type"),
        (4, "sku", "missing"),
    }


def test_where_nothing_can_be_taken_the_answer_is_422_with_every_fault(client: Client, form: Form) -> None:
    answer = client.post("/api/tasks", **form("sku,Quantity\nA,0\nB,many\n"))
    assert answer.status_code == 422
    assert answer.mimetype == "application/problem+json"
    assert [(e["row"], e["column"]) for e in answer.json["errors"]] == [(2, "Quantity"), (3, "Quantity")]
    assert "correct" in answer.json["detail"]


def test_json_items_that_are_refused_are_named_by_their_position(client: Client) -> None:
    answer = client.post("/api/tasks", json={"worker": "enroll", "items": [{"sku": "A"}, {"sku": ["B"]}, 7]})
    assert answer.status_code == 202, answer.json
    assert {e["row"] for e in answer.json["errors"]} == {2, 3}


def test_the_same_key_and_body_again_is_the_first_task_again(client: Client) -> None:
    def send() -> Any:
        body = {"worker": "enroll", "items": [{"sku": "A"}]}
        return client.post("/api/tasks", json=body, headers={"Idempotency-Key": "k-1"})

    first, second = send(), send()
    assert (first.status_code, second.status_code) == (202, 202)
    assert first.json["task_id"] == second.json["task_id"]
    assert "Idempotency-Replayed" not in first.headers
    assert second.headers["Idempotency-Replayed"] == "true"
    assert len(client.get("/api/tasks").json["tasks"]) == 1


def test_the_same_key_with_another_body_is_refused_and_says_so(client: Client, form: Form) -> None:
    headers = {"Idempotency-Key": "k-2"}
    assert client.post("/api/tasks", json={"worker": "enroll", "items": [{"sku": "A"}]}, headers=headers).status_code == 202
    answer = client.post("/api/tasks", json={"worker": "enroll", "items": [{"sku": "B"}]}, headers=headers)
    assert answer.status_code == 422
    assert "another body" in answer.json["detail"]
    assert client.post("/api/tasks", **form("sku\nA\n")).status_code == 202


@pytest.mark.parametrize(
    ("tolerated", "shown"), [(10, 10), ("10", 10), ("5%", "5%"), ("failed:3", "failed:3"), (None, None)]
)
def test_rounds_and_what_may_fail_are_said_at_submission(client: Client, form: Form, tolerated: Any, shown: Any) -> None:
    options = {"interval": 1.5, "tolerated_failures": tolerated}
    answer = client.post("/api/tasks", json={"worker": "enroll", "items": [{"sku": "A"}], **options})
    assert answer.status_code == 202, answer.json
    fields = {name: str(value) for name, value in options.items() if value is not None}
    for found in (answer, client.post("/api/tasks", **form("sku\nA\n", **fields))):
        control = found.json["control"]
        assert (control["interval"], control["tolerated_failures"]) == (1.5, shown)
        assert found.json["progress"]["eta_s"] is None, "no round has begun"


def test_a_key_is_unique_per_owner(client: Client) -> None:
    ids = set()
    for owner in ("ann", "bob"):
        body = {"worker": "enroll", "items": [{"sku": owner}], "owner": owner}
        answer = client.post("/api/tasks", json=body, headers={"Idempotency-Key": "k-3"})
        assert answer.status_code == 202
        ids.add(answer.json["task_id"])
    assert len(ids) == 2
    assert [t["owner"] for t in client.get("/api/tasks?owner=bob").json["tasks"]] == ["bob"]


def test_big_integers_stay_exact_where_the_worker_takes_them_as_text(client: Client) -> None:
    answer = client.post("/api/tasks", json={"worker": "enroll", "items": [{"sku": 9007199254740993}]})
    assert answer.status_code == 202, answer.json
    assert client.get(answer.json["links"]["events"]).json["events"][0]["params"]["sku"] == "9007199254740993"


def test_null_is_the_default_and_for_parallel_no_limit(client: Client) -> None:
    body = {"worker": "enroll", "items": [{"sku": "A"}], "title": None, "parallel": None, "queue": None, "owner": None}
    answer = client.post("/api/tasks", json=body)
    assert answer.status_code == 202, answer.json
    assert answer.json["control"]["parallel"] is None


def test_a_list_whose_validation_goes_on_is_answered_at_once(
    make_app: Callable[..., AsyncTask],
) -> None:
    app = make_app(submit_wait_s=0)
    client = client_of(app)
    items = [{"sku": f"S{n}", "quantity": 0 if n % 50 else 1} for n in range(20_000)]
    answer = client.post("/api/tasks", json={"worker": "enroll", "items": items})
    assert answer.status_code == 202
    assert "errors" not in answer.json
    # The rejects are there once the list has been read.
    task = app.task(answer.json["task_id"])
    wait_for(lambda: task.progress()["split"]["state"] != "splitting", "the list has been read")
    assert task.progress()["split"]["rejected"] == 19_600
    page = client.get(f"/api/tasks/{task.id}/rejected?limit=2").json
    assert [r["row"] for r in page["rejected"]] == [2, 3]
    assert page["rejected"][0]["errors"][0]["column"] == "quantity"
    assert [r["row"] for r in client.get(page["links"]["next"]).json["rejected"]] == [4, 5]


def test_a_session_is_taken_and_shown_and_the_task_that_waits_for_it_says_so(client: Client) -> None:
    body = {"worker": "enroll", "items": [{"sku": "A"}], "session": "user:42"}
    first, second = (client.post("/api/tasks", json=body).json for _ in range(2))
    assert first["control"]["session"] == "user:42"
    assert (first["state_reason"], second["state_reason"]) == (None, "waiting_for_session")
    refused = client.patch(f"/api/tasks/{second['task_id']}", json={"session": "other"})
    assert refused.status_code == 422
