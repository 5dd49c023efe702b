"""Looking at Tasks and steering them over HTTP."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from support.webshop import Client

from asynctask import AsyncTask
from asynctask.database.tables import task_samples
from asynctask.testing import wait_for

Working = Callable[[], AbstractContextManager[None]]


def test_the_progress_object_has_exactly_what_the_contract_says(client: Client, ended: Callable[..., int]) -> None:
    task_id = ended("A", "B", "NO-1", "BUG-1", title="Spring", parallel=2)
    seen = client.get(f"/api/tasks/{task_id}").json
    assert seen["done"] is True
    assert seen["state"] == "finished"
    assert seen["counts"] == {
        "total": 4,
        "enqueue": 0,
        "working": 0,
        "stopped": 0,
        "finish": 2,
        "failed": 1,
        "error": 1,
        "cancelled": 0,
    }
    assert seen["progress"]["percent"] == 100.0
    assert seen["links"] == {
        "self": f"/api/tasks/{task_id}",
        "events": f"/api/tasks/{task_id}/events",
        "errors": f"/api/tasks/{task_id}/errors",
        "report": f"/api/tasks/{task_id}/report.xlsx",
        "result": f"/api/tasks/{task_id}/result",
        "stream": f"/api/tasks/{task_id}/stream",
        "ui": f"/tasks/{task_id}",
    }
    for each in ("self", "events", "errors", "report", "stream", "ui"):
        assert client.get(seen["links"][each]).status_code == 200


def test_an_etag_saves_the_body_until_something_changes(app: AsyncTask, client: Client) -> None:
    task = app.submit("enroll", [{"sku": "A"}])
    url = f"/api/tasks/{task.id}"
    first = client.get(url)
    assert first.headers["Cache-Control"] == "no-cache"
    assert first.headers["Retry-After"] == "1"
    assert first.headers["ETag"].startswith('W/"')
    again = client.get(url, headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.data) == (304, b"")
    assert again.headers["ETag"] == first.headers["ETag"]
    client.post(f"{url}/pause")
    changed = client.get(url, headers={"If-None-Match": first.headers["ETag"]})
    assert changed.status_code == 200
    assert changed.json["state"] == "paused"
    with_errors = client.get(f"{url}?include=errors", headers={"If-None-Match": changed.headers["ETag"]})
    assert with_errors.status_code == 200, "another representation has another tag"


def test_include_errors_adds_the_first_failures(client: Client, ended: Callable[..., int]) -> None:
    task_id = ended("A", *(f"NO-{n}" for n in range(25)))
    seen = client.get(f"/api/tasks/{task_id}?include=errors").json
    assert len(seen["errors"]) == 20
    assert {e["status"] for e in seen["errors"]} == {"failed"}


def test_tasks_are_listed_newest_first_page_by_page(app: AsyncTask, client: Client) -> None:
    ids = [app.submit("enroll", [{"sku": str(n)}], title=f"T{n}").id for n in range(5)]
    found, url = [], "/api/tasks?limit=2&worker=enroll"
    while url:
        page = client.get(url).json
        found.append([t["task_id"] for t in page["tasks"]])
        url = page["links"]["next"]
    ids.reverse()
    assert found == [ids[:2], ids[2:4], ids[4:]]


def test_tasks_are_found_by_ids_state_worker_and_owner(app: AsyncTask, client: Client) -> None:
    one = app.submit("enroll", [{"sku": "A"}], owner="ann").id
    two = app.submit("anything", [{"x": 1}]).id
    client.post(f"/api/tasks/{two}/pause")

    def ids(query: str) -> list[int]:
        return [t["task_id"] for t in client.get(f"/api/tasks?{query}").json["tasks"]]

    assert ids(f"ids={one},{two},999") == [two, one]
    assert ids("state=paused") == [two]
    assert ids("worker=anything") == [two]
    assert ids("owner=ann") == [one]
    assert ids("owner=ann&state=paused") == []
    assert ids("group=running&owner=ann") == [one]
    assert ids("group=finished") == ids("group=attention") == []
    times = [t["created_at"].replace("+", "%2B") for t in client.get(f"/api/tasks?ids={one},{two}").json["tasks"]]
    assert ids("since=2026-01-01T00:00:00Z") == [two, one]
    assert ids(f"since={times[0]}") == [two] or times[0] == times[1]
    assert ids("since=2999-01-01T00:00:00%2B01:00") == []


@pytest.mark.parametrize(
    ("query", "column"),
    [
        ("limit=0", "limit"),
        ("limit=201", "limit"),
        ("limit=x", "limit"),
        ("ids=a", "ids"),
        ("ids=" + "1," * 200 + "1", "ids"),
        ("state=done", "state"),
        ("group=open", "group"),
        ("since=yesterday", "since"),
        ("since=2026-01-01", "since"),
        ("after=0", "after"),
        ("after=" + "9" * 30, "after"),
        ("wroker=x", "wroker"),
    ],
)
def test_a_query_parameter_that_is_wrong_is_named(client: Client, query: str, column: str) -> None:
    answer = client.get(f"/api/tasks?{query}")
    assert answer.status_code == 422
    assert [e["column"] for e in answer.json["errors"]] == [column]


def test_events_are_paged_and_filtered(client: Client, ended: Callable[..., int]) -> None:
    task_id = ended("A", "NO-1", "B", "BUG-1")
    url = f"/api/tasks/{task_id}/events"
    everything = client.get(url).json
    assert [e["status"] for e in everything["events"]] == ["finish", "failed", "finish", "error"]
    assert everything["links"]["next"] is None
    assert everything["events"][0]["result"] == {"enrolled": "A"}
    bad = client.get(f"{url}?status=failed,error&limit=1").json
    assert [e["row"] for e in bad["events"]] == [2]
    assert "NO-1 is not qualified" in bad["events"][0]["messages"][-1]["message"]
    following = client.get(bad["links"]["next"]).json
    assert [e["status"] for e in following["events"]] == ["error"]
    answer = client.get(f"{url}?status=lost")
    assert answer.status_code == 422
    assert "failed" in answer.json["detail"]


def test_a_page_of_events_has_no_more_than_its_limit_though_a_job_has_more_items(
    client: Client, ended: Callable[..., int]
) -> None:
    url = f"/api/tasks/{ended('NO-1', 'A', 'NO-2', 'B', 'NO-3', chunk_size=3)}/events"
    rows, after = [], f"{url}?limit=2"
    while after is not None:
        page = client.get(after).json
        rows.append([event["row"] for event in page["events"]])
        after = page["links"]["next"]
    assert rows == [[1, 2], [3, 4], [5]]
    first, second = client.get(f"{url}?status=failed&limit=2").json["events"]
    (third,) = client.get(f"{url}?status=failed&after={first['id']}").json["events"]
    assert [event["row"] for event in (first, second, third)] == [1, 3, 5]
    assert second["messages"][-1]["message"] == "NO-2 is not qualified"
    job = client.get(f"/api/jobs/{first['job_id']}").json
    assert (job["items"], job["outcomes"]) == (3, {"finish": 1, "failed": 2, "error": 0, "cancelled": 0})
    assert client.get(f"{url}?after=1.x").status_code == 422


def test_an_event_has_the_names_of_its_record_beside_the_earlier_ones(
    app: AsyncTask, client: Client, ended: Callable[..., int]
) -> None:
    task_id = ended("NO-1")
    (event,) = client.get(f"/api/tasks/{task_id}/events").json["events"]
    assert event["worker_name"] == event["worker"] == "enroll"
    assert event["added_messages"] == event["messages"] != []
    alone = client.get(f"/api/jobs/{event['job_id']}").json
    assert (alone["worker_name"], alone["added_messages"]) == (event["worker_name"], event["added_messages"])
    (own,) = app.task(task_id).events()
    assert (own["worker_name"], own["added_messages"]) == (event["worker_name"], event["added_messages"])
    described = client.get("/openapi.json").json["components"]["schemas"]["Event"]
    assert {"worker_name", "worker", "added_messages", "messages"} <= set(described["required"])


def test_the_time_left_is_not_over_before_the_next_retry_is_due(app: AsyncTask, client: Client, working: Working) -> None:
    @app.worker(retry=3, retry_in=lambda *_: 600.0)
    def flaky(item: dict[str, Any]) -> None:
        if item["n"] < 3:
            raise RuntimeError("not yet")

    task = app.submit(flaky, [{"n": n} for n in range(40)])
    with working():
        wait_for(
            lambda: task.progress()["retrying"] == 3 and task.progress()["progress"]["done"] == 37,
            "three items wait for a retry, the others are done",
        )
    with app.ledger.database.write() as connection:  # one of after the last of these would measure a rate of nothing
        connection.execute(task_samples.delete())
    seen = client.get(f"/api/tasks/{task.id}").json
    assert seen["progress"]["remaining"] == 3
    assert seen["progress"]["rate_per_s"] > 0
    assert 500 < seen["progress"]["eta_s"] < 700


def test_errors_are_grouped_and_every_change_is_logged(client: Client, ended: Callable[..., int]) -> None:
    task_id = ended("NO-1", "NO-2", "BUG-1", note="same reason")
    groups = client.get(f"/api/tasks/{task_id}/errors").json["errors"]
    assert [(g["count"], g["status"]) for g in groups] == [(2, "failed"), (1, "error")]
    assert groups[0]["sample_rows"] == [1, 2]
    client.post(f"/api/tasks/{task_id}/retry")
    log = client.get(f"/api/tasks/{task_id}/log").json["log"]
    assert log[0]["action"] == "retried"
    assert log[0]["who"] == "web 127.0.0.1"


def test_a_job_is_shown_with_its_life(client: Client, ended: Callable[..., int]) -> None:
    event = client.get(f"/api/tasks/{ended('A')}/events").json["events"][0]
    assert client.get(f"/api/jobs/{event['job_id']}").json == {
        **event,
        "actions": [],
        "last_error": None,
        "traceback": None,
        "previous_failed": None,
        "next_failed": None,
    }
    assert client.get("/api/jobs/nope").status_code == 404


def test_jobs_without_a_task_are_listed_newest_first(
    app: AsyncTask, client: Client, ended: Callable[..., int], working: Working
) -> None:
    ended("A")
    ids = [app.workers["enroll"].perform_async({"sku": sku}) for sku in ("B", "NO-1", "C")]
    app.record("of-another", "working")
    first = client.get("/api/jobs?limit=2").json
    assert [job["job_id"] for job in first["jobs"]] == ["of-another", ids[2]]
    rest = client.get(first["links"]["next"]).json
    assert [job["job_id"] for job in rest["jobs"]] == [ids[1], ids[0]]
    assert client.get(rest["links"]["next"]).json == {"jobs": [], "links": {"self": rest["links"]["next"], "next": None}}
    with working():
        wait_for(lambda: len(client.get("/api/jobs?worker=enroll&status=finish").json["jobs"]) == 2, "two are done")
    refused = client.get("/api/jobs?worker=enroll&status=failed,error").json["jobs"]
    assert [job["job_id"] for job in refused] == [ids[1]]
    assert client.get("/api/jobs?status=lost").status_code == 422


def test_a_single_job_is_deleted_given_up_and_restarted(app: AsyncTask, client: Client, working: Working) -> None:
    refused, given_up = (app.workers["enroll"].perform_async({"sku": sku}) for sku in ("NO-1", "A"))
    killed = client.post(f"/api/jobs/{given_up}/kill").json
    assert (killed["status"], killed["actions"]) == ("error", ["restart", "dismiss"])
    answer = client.post(f"/api/jobs/{given_up}/kill")
    assert (answer.status_code, answer.json["code"]) == (409, "conflict")
    assert client.post(f"/api/jobs/{given_up}/restart").json["status"] == "enqueue"
    assert client.post(f"/api/jobs/{given_up}/delete").json["status"] == "cancelled"
    with working():
        wait_for(lambda: client.get(f"/api/jobs/{refused}").json["actions"] == ["restart"], "it is refused")
        client.post(f"/api/jobs/{refused}/restart")
        wait_for(lambda: client.get(f"/api/jobs/{refused}").json["attempt"] == 2, "it runs again")
    assert client.post("/api/jobs/nope/restart").status_code == 404
    assert client.post(f"/api/jobs/{refused}/restart", headers={"Origin": "https://evil.example"}).status_code == 403


def test_a_job_id_is_used_again_after_its_job_has_ended(app: AsyncTask, client: Client, working: Working) -> None:
    def make(sku: str, job_id: str = "nightly:1") -> Any:
        return client.post("/api/jobs", json={"worker": "enroll", "item": {"sku": sku}, "job_id": job_id})

    assert (make("A").status_code, make("A").status_code, make("A").json["code"]) == (202, 409, "id_in_use")
    assert "nightly:1 is in enqueue" in make("A").json["detail"]
    assert [make("A", wrong).status_code for wrong in ("", "a/b", "x" * 65)] == [422] * 3
    with working():
        wait_for(lambda: client.get("/api/jobs/nightly:1").json["status"] == "finish", "it ran")
        again = make("B").json
        assert (again["status"], again["attempt"], again["params"][0]["sku"]) == ("enqueue", 2, "B")
        wait_for(lambda: client.get("/api/jobs/nightly:1").json["status"] == "finish", "it ran again")
    task = app.submit("enroll", [{"sku": "C"}])
    (row,) = wait_for(task.events, "its row")
    assert (make("D", row["job_id"]).status_code, make("D", row["job_id"]).json["code"]) == (409, "id_in_use")


def test_a_single_job_is_made_stopped_and_started(app: AsyncTask, client: Client, working: Working) -> None:
    made = client.post("/api/jobs", json={"worker": "enroll", "item": {"sku": "A"}})
    job_id = made.json["job_id"]
    assert (made.status_code, made.json["status"], made.json["actions"][-1]) == (202, "enqueue", "stop")
    assert made.headers["Location"].endswith(f"/api/jobs/{job_id}")
    stopped = client.post(f"/api/jobs/{job_id}/stop").json
    assert (stopped["status"], stopped["changed"], stopped["actions"]) == ("stopped", True, ["start"])
    again = client.post(f"/api/jobs/{job_id}/stop").json
    assert (again["changed"], again["detail"]) == (False, "it is stopped, until it is started")
    assert [job["job_id"] for job in client.get("/api/jobs?resumable=true").json["jobs"]] == [job_id]
    assert client.get("/api/jobs?resumable=true&status=finish").json["jobs"] == []
    with working():
        assert client.post(f"/api/jobs/{job_id}/start").json["changed"]
        wait_for(lambda: client.get(f"/api/jobs/{job_id}").json["status"] == "finish", "it ran")
    over = client.post(f"/api/jobs/{job_id}/start")
    assert (over.status_code, over.json["code"]) == (409, "finished")
    for verb in ("stop", "start"):
        assert client.post(f"/api/jobs/nope/{verb}").status_code == 404
        assert client.post(f"/api/jobs/{job_id}/{verb}", headers={"Origin": "https://evil.example"}).status_code == 403


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"worker": "enroll"}, 422, "bad_job"),
        ({"worker": "enroll", "item": {"sku": "A"}, "args": []}, 422, "bad_job"),
        ({"worker": "nobody", "item": {}}, 422, "unknown_worker"),
        ({"worker": "enroll", "item": {"sku": ["no text"]}}, 422, "invalid_item"),
        ({"worker": "enroll", "args": [1, 2, 3]}, 422, "bad_arguments"),
    ],
)
def test_a_job_that_cannot_be_made_is_refused(client: Client, body: Any, status: int, code: str) -> None:
    answer = client.post("/api/jobs", json=body)
    assert (answer.status_code, answer.json["code"]) == (status, code), answer.json
    assert client.get("/api/jobs").json["jobs"] == []


def test_control_is_idempotent_and_answers_the_progress(app: AsyncTask, client: Client) -> None:
    task = app.submit("enroll", [{"sku": "A"}])

    def act(verb: str) -> Any:
        return client.post(f"/api/tasks/{task.id}/{verb}")

    for verb, state in (("pause", "paused"), ("pause", "paused"), ("resume", "running"), ("resume", "running")):
        answer = act(verb)
        assert (answer.status_code, answer.json["state"]) == (200, state)
    for _ in range(2):
        answer = act("cancel")
        assert (answer.status_code, answer.json["state"]) == (200, "cancelled")
    answer = act("resume")
    assert (answer.status_code, answer.json["code"]) == (409, "conflict")
    assert "cancelled" in answer.json["detail"]


def test_a_retry_runs_the_chosen_rows_again(
    app: AsyncTask, client: Client, ended: Callable[..., int], working: Working
) -> None:
    task_id = ended("A", "NO-1", "BUG-1")
    answer = client.post(f"/api/tasks/{task_id}/retry?status=error")
    assert (answer.status_code, answer.json["generation"], answer.json["done"]) == (200, 2, False)
    with working():
        assert app.task(task_id).wait(timeout=120)["done"]
    attempts = {e["params"]["sku"]: e["attempt"] for e in client.get(f"/api/tasks/{task_id}/events").json["events"]}
    assert attempts["BUG-1"] > attempts["NO-1"] == attempts["A"]


def test_knobs_turn_while_it_runs(app: AsyncTask, client: Client) -> None:
    task = app.submit("enroll", [{"sku": "A"}], parallel=9)
    url = f"/api/tasks/{task.id}"
    answer = client.patch(url, json={"parallel": 3, "priority": 120, "title": "New"})
    assert answer.status_code == 200, answer.json
    assert (answer.json["control"]["parallel"], answer.json["control"]["priority"], answer.json["title"]) == (3, 120, "New")
    assert client.patch(url, json={"parallel": None}).json["control"]["parallel"] is None
    control = client.patch(url, json={"interval": 2, "tolerated_failures": "2.50%"}).json["control"]
    assert (control["interval"], control["tolerated_failures"]) == (2.0, "2.5%")
    control = client.patch(url, json={"interval": 0, "tolerated_failures": None}).json["control"]
    assert (control["interval"], control["tolerated_failures"]) == (0.0, None)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 422, "invalid_knob"),
        ([], 422, "invalid_knob"),
        ({"parallel": 0}, 422, "invalid_knob"),
        ({"priority": None}, 422, "invalid_knob"),
        ({"paralel": 1}, 422, "invalid_knob"),
        ({"interval": -1}, 422, "invalid_knob"),
        ({"interval": None}, 422, "invalid_knob"),
        ({"tolerated_failures": "many"}, 422, "invalid_knob"),
        ({"tolerated_failures": -1}, 422, "invalid_knob"),
    ],
)
def test_a_knob_that_cannot_be_turned_is_named(app: AsyncTask, client: Client, body: Any, status: int, code: str) -> None:
    task = app.submit("enroll", [{"sku": "A"}], parallel=9)
    answer = client.patch(f"/api/tasks/{task.id}", json=body)
    assert (answer.status_code, answer.json["code"]) == (status, code), answer.json
    assert app.task(task.id).progress()["control"]["parallel"] == 9


def test_knobs_of_a_task_that_is_over_do_nothing_any_more(client: Client, ended: Callable[..., int]) -> None:
    answer = client.patch(f"/api/tasks/{ended('A')}", json={"parallel": 3})
    assert answer.status_code == 409
    assert "finished" in answer.json["detail"]


def test_workers_are_listed_with_what_their_items_must_be(client: Client) -> None:
    anything, enroll = client.get("/api/workers").json["workers"]
    assert (anything["name"], anything["item_schema"], anything["fields"]) == ("anything", None, [])
    assert enroll["doc"] == "Enrol a product in the promotion."
    assert [(f["name"], f["title"], f["required"]) for f in enroll["fields"]] == [
        ("sku", "sku", True),
        ("quantity", "Quantity", False),
        ("note", "note", False),
    ]
    assert "Quantity" in enroll["headers"]
    assert enroll["item_schema"]["required"] == ["sku"]


@pytest.mark.parametrize("path", ["", "/events", "/errors", "/log", "/rejected", "/report.csv", "/report.xlsx"])
def test_a_task_that_is_not_there_is_404_everywhere(client: Client, path: str) -> None:
    for task_id in (1, 2**63 - 1, 2**63, 10**30):
        answer = client.get(f"/api/tasks/{task_id}{path}")
        assert (answer.status_code, answer.json["code"]) == (404, "not_found"), answer.json
    for verb in ("pause", "resume", "cancel", "retry"):
        assert client.post(f"/api/tasks/{10**30}/{verb}").status_code == 404


def test_many_can_ask_at_once(app: AsyncTask, client: Client) -> None:
    task = app.submit("enroll", [{"sku": "A"}])
    answers: list[int] = []

    def ask() -> None:
        mine = client.application.test_client()
        answers.extend(mine.get(f"/api/tasks/{task.id}").status_code for _ in range(5))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 40


def test_links_hold_under_a_prefix(app: AsyncTask, client: Client) -> None:
    task = app.submit("enroll", [{"sku": "A"}])
    under = {"SCRIPT_NAME": "/bulk"}
    seen = client.get(f"/api/tasks/{task.id}", environ_overrides=under).json["links"]
    assert all(link.startswith("/bulk/") for link in seen.values())
    page = client.get("/api/tasks?limit=1", environ_overrides=under).json["links"]
    assert page == {"self": "/bulk/api/tasks?limit=1", "next": f"/bulk/api/tasks?limit=1&after={task.id}"}
    text = client.get("/", environ_overrides=under).get_data(as_text=True)
    assert 'data-api="/bulk/api/tasks"' in text
    assert re.search(r'src="/bulk/static/[0-9a-f]{12}/home\.js"', text)
