"""Queues, retries, the scheduled, the dead and processes over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from support.broker_suite import untracked
from support.servers import RedisServer
from support.untracked import hold as hold_untracked
from support.untracked import push
from support.webshop import Client, build_app, client_of

from asynctask import AsyncTask
from asynctask.brokers.base import DEAD, RETRY, Copy, SetEntry
from asynctask.clock import SECOND, rfc3339
from asynctask.errors import NotFound
from asynctask.ledger import history, processes
from asynctask.testing import wait_for


def hold(app: AsyncTask, set_name: str, count: int) -> None:
    now = app.clock.now()
    hold_untracked(app, set_name, [SetEntry(untracked(n), now + (n + 60) * SECOND) for n in range(count)])


def test_a_list_is_paged_by_its_links(app: AsyncTask, client: Client) -> None:
    hold(app, RETRY, 5)
    seen: list[Any] = []
    link: str | None = "/api/retries?limit=2"
    while link:
        page = client.get(link).json
        assert page["total"] == 5
        seen += [entry["args"] for entry in page["entries"]]
        link = page["links"]["next"]
    assert seen == [[n] for n in range(5)]


@pytest.mark.parametrize("name", ["a b \u00fc", "a%2Fb", "100%", "a?b#c", "a&b=c"])
def test_the_links_of_a_queue_lead_back_to_it_whatever_its_name(app: AsyncTask, client: Client, name: str) -> None:
    push(app, [untracked(n, queue=name) for n in range(3)])
    link: str | None = f"/api/queues/{quote(name, safe='')}/jobs?limit=1"
    seen: list[Any] = []
    while link:
        page = client.get(link).json
        assert client.get(page["links"]["self"]).json == page
        seen += [job["args"] for job in page["jobs"]]
        link = page["links"]["next"]
    assert seen == [[0], [1], [2]]


def test_entries_are_restarted_killed_and_deleted_by_their_keys(app: AsyncTask, client: Client) -> None:
    hold(app, RETRY, 4)
    keys = [entry["key"] for entry in client.get("/api/retries").json["entries"]]
    assert client.post("/api/retries/restart", json={"keys": keys[:1]}).json == {"done": 1, "skipped": []}
    assert client.post("/api/retries/kill", json={"keys": keys[1:2]}).json["done"] == 1
    answer = client.post("/api/retries/delete", json={"keys": [keys[0], keys[2]]}).json
    assert answer["done"] == 1
    assert [each["key"] for each in answer["skipped"]] == [keys[0]]
    assert client.get("/api/retries").json["total"] == 1
    (dead,) = client.get("/api/dead").json["entries"]
    assert dead["args"] == [1]
    (queue,) = client.get("/api/queues").json["queues"]
    assert (queue["name"], queue["length"], queue["unattended"]) == ("default", 1, True)
    assert client.post("/api/retries/delete-all").json["done"] == 1
    assert client.post("/api/dead/restart-all").json["done"] == 1


def test_queues_and_a_waiting_task_say_what_is_left_to_others(app: AsyncTask, client: Client) -> None:
    here = {"concurrency": 1, "queues": ["default"], "info": {"workers": ["enroll"]}}
    processes.register(app.ledger, app.host, kind="worker", pid=1, lease_s=600, **here)  # type: ignore[arg-type]
    push(app, [Copy(f"{n:024x}", 0, "default", '{"class":"Mail","args":[]}') for n in range(6)])
    (queue,) = client.get("/api/queues").json["queues"]
    assert (queue["jobs_of_others"], queue["other_workers"], queue["waiting"]) == (6, ["Mail"], 0)
    task_id = client.post("/api/tasks", json={"worker": "enroll", "items": [{"sku": "A"}]}).json["task_id"]
    (reason,) = client.get(f"/api/tasks/{task_id}/waiting").json["reasons"]
    assert reason["code"] == "jobs_of_others"
    assert "6, for Mail (6)" in reason["message"]


def test_a_dead_tracked_job_runs_again_and_its_outcome_is_not_deleted(
    app: AsyncTask, client: Client, ended: Callable[..., int]
) -> None:
    task_id = ended("A", "BUG-1")
    (dead,) = client.get("/api/dead").json["entries"]
    assert (dead["tracked"], dead["task_id"], dead["args"][0]["sku"]) == (True, task_id, "BUG-1")
    (kept,) = client.post("/api/dead/delete", json={"keys": [dead["key"]]}).json["skipped"]
    assert (kept["code"], "stays recorded" in kept["reason"]) == ("outcome_recorded", True)
    assert client.post("/api/dead/restart", json={"keys": [dead["key"]]}).json["done"] == 1
    assert client.get(f"/api/tasks/{task_id}").json["generation"] == 2
    log = client.get(f"/api/tasks/{task_id}/log").json["log"]
    assert log[0]["action"] == "jobs retried"
    assert log[0]["who"].startswith("web ")


def test_a_search_finds_what_an_entry_holds(app: AsyncTask, client: Client) -> None:
    hold(app, DEAD, 3)
    found = client.get("/api/dead/search", query_string={"text": "[2]"}).json
    assert [entry["args"] for entry in found["entries"]] == [[2]]
    assert found["complete"] is True
    assert client.get("/api/dead/search").status_code == 422


def test_the_jobs_of_a_queue_are_listed_deleted_and_cleared(app: AsyncTask, client: Client) -> None:
    push(app, [untracked(n, queue="a b") for n in range(4)])
    page = client.get("/api/queues/a%20b/jobs?limit=3").json
    assert [job["args"] for job in page["jobs"]] == [[0], [1], [2]]
    rest = client.get(page["links"]["next"]).json
    assert [job["args"] for job in rest["jobs"]] == [[3]]
    newest = client.get("/api/queues/a%20b/jobs?newest=true&limit=1").json["jobs"]
    assert newest[0]["args"] == [3]
    assert client.post("/api/queues/a%20b/delete", json={"keys": [newest[0]["key"]]}).json["done"] == 1
    assert client.post("/api/queues/a%20b/clear").json["done"] == 3
    assert client.get("/api/queues").json["queues"] == []


def test_the_backlog_of_a_queue_is_told_and_an_empty_queue_by_its_name(app: AsyncTask, client: Client) -> None:
    app.submit("enroll", [{"sku": "A"}, {"sku": "B"}], priority=3)
    push(app, [untracked(n, queue="other") for n in range(4)])
    ours, other = client.get("/api/queues").json["queues"]
    assert (ours["name"], ours["length"], ours["waiting"], ours["workers_wanted"]) == ("default", 0, 2, 1)
    (part,) = ours["backlog"]
    assert (part["worker"], part["priority"], part["waiting"]) == ("enroll", 3, 2)
    assert part["oldest_s"] == ours["oldest_s"] >= 0
    assert (other["length"], other["waiting"], other["backlog"][0]["worker"]) == (4, 4, "Hard")
    (empty,) = client.get("/api/queues?queue=nobody&target_s=300").json["queues"]
    assert (empty["waiting"], empty["workers_wanted"], empty["backlog"]) == (0, 0, [])
    for wrong in ("target_s=0", "target_s=1e9", "target_s=x", "queue=", "more=1"):
        assert client.get(f"/api/queues?{wrong}").status_code == 422


def test_what_is_no_job_is_shown_as_text_and_never_as_anything_else(
    make_app: Callable[..., AsyncTask], redis_server: RedisServer
) -> None:
    with redis_server.client() as raw:
        raw.flushall()
    app = make_app(broker_url=redis_server.url)
    client = client_of(app)
    hold_untracked(app, DEAD, [SetEntry(Copy("bad-1", 0, "default", "<script>alert(1)</script>"), app.clock.now())])
    (entry,) = client.get("/api/dead").json["entries"]
    assert entry["raw"] == "<script>alert(1)</script>"
    answer = client.post("/api/dead/restart", json={"keys": [entry["key"]]}).json
    assert (answer["done"], len(answer["skipped"])) == (0, 1)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/api/retries/restart", {}, 422, None),
        ("POST", "/api/retries/restart", {"keys": []}, 422, None),
        ("POST", "/api/retries/restart", {"keys": ["x"], "all": True}, 422, None),
        ("POST", "/api/retries/restart", {"keys": "x"}, 422, None),
        ("POST", "/api/dead/kill", {"keys": ["x"]}, 404, None),
        ("POST", "/api/processes/nobody/quiet", None, 404, "not_found"),
        ("GET", "/api/retries?limit=1001", None, 422, None),
        ("GET", "/api/retries?after=-1", None, 422, None),
        ("GET", "/api/queues/" + "q" * 256 + "/jobs", None, 404, "not_found"),
        ("GET", "/api/queues/a%00b/jobs", None, 404, "not_found"),
    ],
)
def test_what_cannot_be_is_a_problem(
    client: Client, method: str, path: str, body: Any, status: int, code: str | None
) -> None:
    answer = client.open(path, method=method, json=body) if body is not None else client.open(path, method=method)
    assert answer.status_code == status
    assert answer.mimetype == "application/problem+json"
    if code is not None:
        assert answer.json["code"] == code


def test_a_page_of_another_site_changes_nothing(app: AsyncTask, client: Client) -> None:
    hold(app, RETRY, 1)
    answer = client.post("/api/retries/delete-all", headers={"Origin": "https://evil.example"})
    assert answer.status_code == 403
    assert client.get("/api/retries").json["total"] == 1


def test_a_worker_process_is_told_to_take_nothing_more(app: AsyncTask, client: Client, working: Any) -> None:
    with working():
        (process,) = client.get("/api/processes").json["processes"]
        assert (process["kind"], process["alive"], process["concurrency"]) == ("worker", True, 2)
        answer = client.post(f"/api/processes/{process['identity']}/quiet")
        assert answer.json == {"identity": process["identity"], "signal": "quiet"}


def test_a_task_that_does_not_move_says_why(app: AsyncTask, client: Client) -> None:
    task = app.submit("anything", [1])
    (reason,) = client.get(f"/api/tasks/{task.id}/waiting").json["reasons"]
    assert (reason["code"], reason["message"]) == ("no_process", "No process works the queue default")
    assert reason["mend"] == "start a worker: asynctask -A module:app worker"
    task.cancel()
    assert client.get(f"/api/tasks/{task.id}/waiting").json == {"reasons": []}
    assert client.get("/api/tasks/99/waiting").status_code == 404


# -- jobs that nobody performs


def test_what_no_application_performs_is_not_made_to_run_again(tmp_path: Path) -> None:
    """The worker of a Task, of a job, of one that waits and of one that is stopped is gone with the next release."""

    def declared(**options: Any) -> tuple[AsyncTask, Any]:
        made = build_app(tmp_path)

        @made.worker(retry=1, retry_in=lambda count, error, job: 3_600, **options)
        def gone(item: dict[str, Any]) -> None:
            raise RuntimeError("broke")

        return made, gone

    old, gone = declared()
    with closing(old):
        task = old.submit(gone, [{"n": 1}, {"n": 2}])
        lone, waits, stopped = [str(gone.perform_async({"n": n})) for n in range(3, 6)]
        old.stop_job(stopped)
        launcher = old.launcher(concurrency=1)
        launcher.start()
        try:
            wait_for(lambda: old.operations.listed("retries")["total"] == 4, "each has failed once")
        finally:
            launcher.stop()
        jobs = [str(each["job_id"]) for each in task.events()]
        assert old.operations.act("retries", "kill", [*jobs, lone]).done == 3
        assert task.wait(60)["counts"]["error"] == 2
    with closing(build_app(tmp_path)) as new:
        client = client_of(new)
        before = [new.progress(task.id), *map(new.event, (*jobs, lone, waits, stopped))]
        single = [f"jobs/{each}/restart" for each in (*jobs, lone, waits)] + [
            f"jobs/{each}/start" for each in (waits, stopped)
        ]
        for path in (f"tasks/{task.id}/retry", *single):
            answer = client.post(f"/api/{path}")
            assert (answer.status_code, answer.json["code"]) == (409, "nobody_performs"), path
            assert "'gone'" in answer.json["detail"]
        for name, keys in (("dead", [*jobs, lone]), ("retries", [waits])):
            for path, body in ((f"{name}/restart", {"keys": keys}), (f"{name}/restart-all", None)):
                answer = client.post(f"/api/{path}", json=body) if body else client.post(f"/api/{path}")
                assert (answer.status_code, answer.json["done"]) == (200, 0)
                assert answer.json["skipped"]
                assert all("no worker is registered here as 'gone'" in each["reason"] for each in answer.json["skipped"])
        assert [new.progress(task.id), *map(new.event, (*jobs, lone, waits, stopped))] == before
    with closing(AsyncTask(environ={}, database_url=f"sqlite:///{tmp_path / 'ledger.db'}")) as bare:
        bare.start_job(stopped)  # a program without workers cannot tell
    old, _ = declared()
    with closing(old):
        client = client_of(old)
        assert client.post(f"/api/tasks/{task.id}/retry").json["generation"] == 2
        assert client.post("/api/dead/restart", json={"keys": [lone]}).json["done"] == 1
        assert client.post("/api/retries/restart", json={"keys": [waits]}).json["done"] == 1


def test_a_recorded_job_that_this_application_cannot_give_back_to_its_program_is_not_restarted(
    app: AsyncTask, client: Client
) -> None:
    process = {"engine": "golang", "name": "host:1:a", "concurrency": 1, "queues": ["go"]}
    about = {"worker": "Go.Pack", "queue": "go", "args": [1], "status": "error", "message": "x"}
    records = [{**about, "job_id": "fenced", "attempt": 3}, {**about, "job_id": "bare"}]
    assert client.post("/api/records", json={"records": records, "process": process}).status_code == 200
    for job, code in (("fenced", "nobody_performs"), ("bare", "other_engine")):
        answer = client.post(f"/api/jobs/{job}/restart")
        assert (answer.status_code, answer.json["code"]) == (409, code), "nothing takes jobs from the database but us"
        assert client.get(f"/api/jobs/{job}").json["status"] == "error"


@pytest.mark.parametrize("verb", ["pause", "unpause"])
def test_a_queue_that_nobody_knows_is_not_paused(app: AsyncTask, client: Client, verb: str) -> None:
    answer = client.post(f"/api/queues/defualt/{verb}")
    assert (answer.status_code, answer.json["code"]) == (404, "not_found")
    assert "'defualt'" in answer.json["detail"]
    with pytest.raises(NotFound):
        getattr(app.operations, verb)("defualt")
    assert client.post(f"/api/queues/default/{verb}").status_code == 200


def test_a_queue_of_the_database_is_paused_and_goes_on(
    app: AsyncTask, client: Client, working: Callable[[], AbstractContextManager[None]]
) -> None:
    """Jobs of Tasks, single ones, and untracked ones."""
    seen: list[int] = []
    begun = threading.Event()

    @app.worker(use_task_event=False)
    def loose(n: int) -> None:
        seen.append(n)
        begun.set()

    with working():
        assert client.post("/api/queues/default/pause").json == {"queue": "default", "paused": True, "changed": True}
        assert client.post("/api/queues/default/pause").json["changed"] is False
        task = app.submit("enroll", [{"sku": "A"}])
        single = app.workers["enroll"].perform_async({"sku": "B"})
        loose.perform_async(1)
        (queue,) = client.get("/api/queues?queue=default").json["queues"]
        assert queue["paused"]
        assert not begun.wait(1.5)
        assert task.progress()["counts"]["enqueue"] == 1
        assert client.get(f"/api/jobs/{single}").json["status"] == "enqueue"
        assert client.post("/api/queues/default/unpause").json["changed"] is True
        assert task.wait(timeout=60)["done"]
        wait_for(lambda: client.get(f"/api/jobs/{single}").json["status"] == "finish", "the single job is done")
        wait_for(lambda: seen == [1], "the untracked one is done")


def test_the_navigation_counts_the_dead_and_is_shown_without_the_database(
    app: AsyncTask, client: Client, ended: Callable[..., int], tmp_path: Path
) -> None:
    assert ">Failures<" in client.get("/queues").text
    ended("BUG-1", "BUG-2")
    wait_for(lambda: ">Failures (2)<" in client.get("/queues").text, "the dead are counted again")
    assert "<title>Dead" in client.get("/failures").text
    assert "<title>Failing now" in client.get("/failures?list=retries").text
    assert "<title>Dead" in client.get("/failures?list=<script>").text
    with closing(AsyncTask(environ={}, database_url="postgresql://x@127.0.0.1:1/x", data_dir=str(tmp_path))) as away:
        for path in ("/failures", "/queues", "/workers", "/schedules"):
            answer = client_of(away).get(path)
            assert (answer.status_code, ">Failures<" in answer.text) == (200, True)


def test_the_history_is_read_by_those_who_see_all(make_app: Callable[..., AsyncTask]) -> None:
    secrets = {"chief": "chief-has-a-secret-of-its-own", "shop@blue": "shop-has-a-secret-of-its-own"}
    app = make_app(tokens=" ".join(f"{name}={secret}" for name, secret in secrets.items()))
    minute = history.MINUTE
    at = 30_000_000 * minute
    app.ledger.minutes.add({(at, "default", "enroll"): [4, 0, 1, 0, *[0] * 20, 5, *[0] * 14]})
    history.write(app.ledger)
    client = client_of(app)
    chief, shop = ({"headers": {"Authorization": f"Bearer {secret}"}} for secret in secrets.values())
    span = f"since={rfc3339(at)}&until={rfc3339(at + 2 * minute)}"

    found = client.get(f"/api/history?{span}&by=worker&queue=default&step=1m", **chief).json
    (series,) = found["series"]
    assert (found["since"], found["step_s"], found["by"]) == (rfc3339(at), 60, "worker")
    assert (series["name"], series["finish"], series["error"], series["p50_s"]) == ("enroll", [4, 0], [1, 0], [7.9, None])
    assert client.get("/api/history", **chief).json["series"][0]["finish"] == [0] * 60

    for query, field in (
        ("by=owner", "by"),
        ("step=2m", "step"),
        ("since=yesterday", "since"),
        (f"until={rfc3339(at)}&since={rfc3339(at)}", "since"),
        (f"since={rfc3339(at)}&until={rfc3339(at + 600 * minute)}&step=1m", "since"),
        ("queue=", "queue"),
    ):
        answer = client.get(f"/api/history?{query}", **chief)
        assert (answer.status_code, answer.json["errors"][0]["column"]) == (422, field), query
    assert client.get("/api/history", **shop).status_code == 403
    assert client.get("/api/history").status_code == 401
