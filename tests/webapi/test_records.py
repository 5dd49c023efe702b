"""What a worker in another language records over HTTP: the Event of each record, once, and nothing that it must not do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from celery import Celery
from support.servers import RedisServer
from support.serving import Shop, get
from support.untracked import broker_of
from support.webshop import Client, client_of

from asynctask import AsyncTask
from asynctask.errors import InputError
from asynctask.integrations import celery
from asynctask.integrations.remote import JobRecord
from asynctask.ledger import processes
from asynctask.testing import wait_for

BATCH = "/api/records"
BEGAN = "2026-11-21T05:12:31.000Z"
AGAIN = "2026-11-21T05:13:31.000Z"
RUBY = {"engine": "sidekiq", "name": "host:7:abc", "concurrency": 5, "queues": ["default"]}
LATER = "2999-01-01T00:00:00Z"


def record(client: Client, status: str, job_id: str = "j1", **more: Any) -> Any:
    """The answer to one record."""
    answer = client.post(f"/api/jobs/{job_id}/record", json={"status": status, **more})
    assert answer.status_code == 200, answer.json
    return answer.json


def batch(client: Client, *records: dict[str, Any], process: dict[str, Any] | None = RUBY) -> Any:
    answer = client.post(BATCH, json={"records": records, "process": process})
    assert answer.status_code == 200, answer.json
    return [(each["counted"], each["status"], each["attempt"]) for each in answer.json["results"]]


def event(client: Client, job_id: str = "j1") -> Any:
    return client.get(f"/api/jobs/{job_id}").json


def told(client: Client, job_id: str = "j1") -> list[tuple[str, str]]:
    return [(each["status"], each["message"]) for each in event(client, job_id)["added_messages"]]


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """A Redis server that is empty: tracked jobs for workers in another language wait there."""
    with redis_server.client() as client:
        client.flushall()
    return redis_server.url


@pytest.fixture
def app(make_app: Callable[..., AsyncTask], redis_url: str) -> AsyncTask:
    """An application that declares workers which others perform."""
    made = make_app(broker_url=redis_url)
    for name in ("W", "Shop::Enroll"):
        made.worker(_not_here, name=name)
    return made


def _not_here(*args: Any) -> None:
    raise NotImplementedError("another language performs it")


def _rows(shard: Any) -> list[list[int]]:
    return [[1]]


@pytest.fixture
def dispatched(app: AsyncTask, client: Client) -> Callable[..., tuple[Any, list[str]]]:
    """A Task whose jobs are in the queue of a process in another language: its handle and the ids of its jobs."""

    def submit(count: int = 1, **options: Any) -> tuple[Any, list[str]]:
        batch(client)  # without a process that works the queue nothing is dispatched
        task = app.submit("enroll", [{"sku": f"S{n}"} for n in range(count)], **options)
        app.dispatcher.run_pass()
        return task, [each["job_id"] for each in task.events()]

    return submit


# -- the table of the design


@pytest.mark.parametrize(
    ("said", "status", "messages"),
    [
        ({"status": "finish"}, "finish", [("finish", "Done")]),
        ({"status": "failed", "message": "no stock"}, "failed", [("failed", "Failed: no stock")]),
        ({"status": "error", "message": "KeyError: x"}, "error", [("error", "Error: KeyError: x")]),
        (
            {"status": "error", "message": "x", "will_retry": True},
            "enqueue",
            [("error", "Error: x"), ("enqueue", "Waiting for retry")],
        ),
        ({"status": "interrupted"}, "enqueue", [("error", "Interrupted"), ("enqueue", "Waiting for retry")]),
    ],
)
@pytest.mark.parametrize("begins", [False, True], ids=["outcome alone", "after working"])
def test_each_outcome_has_the_event_of_the_table(
    client: Client, said: dict[str, Any], status: str, messages: list[tuple[str, str]], begins: bool
) -> None:
    if begins:
        assert record(client, "working", worker="W", started_at=BEGAN)["status"] == "working"
    answer = client.post("/api/jobs/j1/record", json={**said, "worker": "W", "started_at": BEGAN}).json
    assert (answer["counted"], answer["status"]) == (True, status)
    assert told(client) == [("working", "In progress"), *messages]
    assert event(client)["added_messages"][0]["at"] == event(client)["started_at"] == BEGAN


def test_an_unknown_job_gets_an_event_if_its_worker_is_named(app: AsyncTask, client: Client) -> None:
    assert client.post("/api/jobs/j1/record", json={"status": "finish"}).status_code == 404
    assert batch(client, {"job_id": "j1", "status": "finish"}) == [(False, None, None)]
    record(client, "finish", worker="Shop::Enroll", queue="ruby", args=[{"sku": "A"}], result={"id": 7}, message="one left")
    found = event(client)
    assert (found["worker_name"], found["queue"], found["task_id"]) == ("Shop::Enroll", "ruby", None)
    assert (found["params"], found["result"]) == ([{"sku": "A"}], {"id": 7})
    assert told(client) == [("working", "In progress"), ("working", "one left"), ("finish", "Done")]
    assert [each["job_id"] for each in app.jobs()] == ["j1"]


def test_messages_of_a_job_at_work_are_added_once(client: Client) -> None:
    for message in ("", "half", "half", "most"):
        assert record(client, "working", worker="W", started_at=BEGAN, message=message)["counted"]
    assert told(client) == [("working", text) for text in ("In progress", "half", "most")]


# -- once


@pytest.mark.parametrize("ending", ["finish", "failed", "error"])
def test_a_terminal_event_does_not_change(client: Client, ending: str) -> None:
    record(client, ending, worker="W", message="first")
    before = event(client)
    for status in ("working", "finish", "failed", "error", "interrupted"):
        answer = record(client, status, message="later", will_retry=status == "error", started_at=AGAIN)
        assert (answer["counted"], answer["status"]) == (False, ending)
    assert event(client) == before


def test_the_retry_of_a_lone_job_that_is_recorded_twice_counts_once(client: Client) -> None:
    failed = {"job_id": "j1", "worker": "W", "status": "error", "message": "x", "will_retry": True, "started_at": BEGAN}
    begun = {"job_id": "j1", "worker": "W", "status": "working", "started_at": BEGAN}
    assert batch(client, begun, failed) == [(True, "working", 1), (True, "enqueue", 2)]
    before = event(client)
    assert batch(client, begun, failed) == [(False, "enqueue", 2)] * 2
    assert event(client) == before
    assert batch(client, {**begun, "started_at": AGAIN}) == [(True, "working", 2)]
    assert batch(client, {**failed, "will_retry": False, "started_at": AGAIN}) == [(True, "error", 2)]
    assert [status for status, _ in told(client)] == ["working", "error", "enqueue", "working", "error"]


def test_a_tasks_jobs_count_once_whatever_comes_twice(
    app: AsyncTask, client: Client, dispatched: Callable[..., tuple[Any, list[str]]]
) -> None:
    task, jobs = dispatched(5)
    ends = ["finish", "finish", "failed", "error"]
    begun = [{"job_id": job, "status": "working", "attempt": 1} for job in jobs]
    over = [{"job_id": job, "status": s, "attempt": 1, "message": "m"} for job, s in zip(jobs, ends, strict=False)]
    over.append({"job_id": jobs[4], "status": "error", "attempt": 1, "will_retry": True, "retry_at": LATER})
    for records in (begun, begun, over, over, begun):
        batch(client, *records)
        counts = task.progress()["counts"]
        assert sum(counts.values()) == 2 * counts["total"] == 10
    assert (counts["finish"], counts["failed"], counts["error"], counts["enqueue"]) == (2, 1, 1, 1)
    assert (task.progress()["retrying"], task.progress()["next_retry_at"]) == (1, "2999-01-01T00:00:00.000Z")
    assert not app.doctor()


def test_the_last_record_of_a_task_closes_it(client: Client, dispatched: Callable[..., tuple[Any, list[str]]]) -> None:
    task, jobs = dispatched(3)
    batch(client, *({"job_id": job, "status": "finish", "attempt": 1} for job in jobs))
    assert task.progress()["done"]


# -- the fence


def test_a_copy_of_an_older_attempt_does_not_begin_and_its_outcome_does_not_count(
    app: AsyncTask, client: Client, dispatched: Callable[..., tuple[Any, list[str]]]
) -> None:
    _, (job,) = dispatched()
    assert batch(client, {"job_id": job, "status": "working", "attempt": 1}) == [(True, "working", 1)]
    assert batch(client, {"job_id": job, "status": "interrupted", "attempt": 1}) == [(True, "enqueue", 2)]
    # It waits in the ledger: nobody can have it yet, and nobody has its old copy any more.
    for attempt in (1, 2, 3, None):
        for status in ("working", "finish"):
            said = {"job_id": job, "status": status, "attempt": attempt}
            assert batch(client, said) == [(False, "enqueue", 2)], (attempt, status)
    app.dispatcher.run_pass()
    assert batch(client, {"job_id": job, "status": "working", "attempt": 1}) == [(False, "enqueue", 2)]
    assert batch(client, {"job_id": job, "status": "finish", "attempt": 2}) == [(True, "finish", 2)]


def test_a_job_that_was_never_dispatched_cannot_be_ended(app: AsyncTask, client: Client) -> None:
    task = app.submit("enroll", [{"sku": "A"}])
    (job,) = [each["job_id"] for each in task.events()]
    for status in ("working", "finish", "error"):
        assert batch(client, {"job_id": job, "status": status, "attempt": 1}, process=None) == [(False, "enqueue", 1)]


def test_a_job_at_work_in_one_process_does_not_begin_in_another(
    client: Client, dispatched: Callable[..., tuple[Any, list[str]]]
) -> None:
    _, (job,) = dispatched()
    begun = {"job_id": job, "status": "working", "attempt": 1}
    assert batch(client, begun) == [(True, "working", 1)]
    assert batch(client, begun, process={**RUBY, "name": "other:8:def"}) == [(False, "working", 1)]
    assert batch(client, begun) == [(True, "working", 1)]


@pytest.mark.parametrize(("control", "status"), [("pause", "enqueue"), ("cancel", "cancelled")])
def test_a_fetched_job_of_a_task_that_was_stopped_does_not_begin(
    app: AsyncTask, client: Client, dispatched: Callable[..., tuple[Any, list[str]]], control: str, status: str
) -> None:
    task, jobs = dispatched(2)
    broker_of(app).exchange("somebody", [], ["default"], 2)  # out of the queue: a control cannot take them back
    batch(client, {"job_id": jobs[0], "status": "working", "attempt": 1})
    getattr(task, control)()
    (answer,) = batch(client, {"job_id": jobs[1], "status": "working", "attempt": 1})
    assert answer[:2] == (False, status)
    assert batch(client, {"job_id": jobs[0], "status": "finish", "attempt": 1}) == [(True, "finish", 1)]
    assert not app.doctor()


# -- whose job it is


def refused(client: Client, job: str, status: int, code: str, **more: Any) -> str:
    """A single record is refused, and so is the same one of many, which goes on with the others; the reason."""
    before = event(client, job)
    for said in ({"status": "working"}, {"status": "finish"}, {"status": "error", "message": "x", "will_retry": True}):
        answer = client.post(f"/api/jobs/{job}/record", json={**said, **more})
        assert (answer.status_code, answer.json["code"]) == (status, code), answer.json
        both = [{"job_id": job, **said, **more}, {"job_id": "beside", "worker": "W", **said}]
        found = client.post(BATCH, json={"records": both}).json["results"]
        assert (found[0]["counted"], found[0]["code"]) == (False, code)
        assert found[1]["code"] is None
    assert event(client, job) == before
    return str(answer.json["detail"])


def taken(app: AsyncTask, queue: str = "default") -> None:
    """Another program takes what is in a queue."""
    broker_of(app).exchange("somebody", broker_of(app).exchange("somebody", [], [queue], 100), [], 0)


def test_a_job_of_a_task_needs_its_attempt(
    app: AsyncTask, client: Client, dispatched: Callable[..., tuple[Any, list[str]]]
) -> None:
    task, (job,) = dispatched()
    taken(app)
    assert "`attempt`" in refused(client, job, 422, "no_attempt")
    assert "(the current one: 1)" in refused(client, job, 422, "no_attempt", worker="W", started_at=BEGAN)
    assert record(client, "working", job, attempt=1)["counted"]
    refused(client, job, 422, "no_attempt")
    assert record(client, "finish", job, attempt=1)["counted"]
    refused(client, job, 422, "no_attempt")
    assert task.progress()["counts"]["finish"] == 1


@pytest.mark.parametrize("job_id", [None, "of-my-own"])
def test_a_tracked_job_of_the_application_needs_its_attempt(app: AsyncTask, client: Client, job_id: str | None) -> None:
    worker: Any = app.workers["enroll"].set(job_id=job_id) if job_id else app.workers["enroll"]
    refused(client, worker.perform_async({"sku": "A"}), 422, "no_attempt")


def test_a_record_of_another_attempt_is_told_the_current_one(
    app: AsyncTask, client: Client, dispatched: Callable[..., tuple[Any, list[str]]]
) -> None:
    _, (job,) = dispatched()
    taken(app)
    assert "its attempt is 1 now" in refused(client, job, 409, "other_attempt", attempt=2)
    assert record(client, "error", job, attempt=1, message="x", will_retry=True)["attempt"] == 2
    assert "its attempt is 2 now" in refused(client, job, 409, "other_attempt", attempt=1)
    app.dispatcher.run_pass()
    taken(app)
    assert record(client, "finish", job, attempt=2)["counted"]
    assert not record(client, "finish", job, attempt=2)["counted"], "one that is sent again is no error"
    assert "its attempt is 2 now" in refused(client, job, 409, "other_attempt", attempt=1)


def test_a_job_in_a_queue_is_nobody_elses(
    app: AsyncTask, client: Client, dispatched: Callable[..., tuple[Any, list[str]]]
) -> None:
    waiting = app.submit("enroll", [{"sku": "A"}], queue="nobody-works-it").events()[0]["job_id"]
    assert "waits in the ledger" in refused(client, waiting, 409, "held_elsewhere", attempt=1)
    task, (job,) = dispatched()
    assert "on the queue 'default'" in refused(client, job, 409, "held_elsewhere", attempt=1)
    held = broker_of(app).exchange("a-worker-of-ours", [], ["default"], 1)
    assert "on the queue 'default'" in refused(client, job, 409, "held_elsewhere", attempt=1)
    broker_of(app).exchange("a-worker-of-ours", held, [], 0)
    assert record(client, "finish", job, attempt=1)["counted"]
    assert task.progress()["done"]


def test_a_process_that_shares_a_queue_with_ours_records_what_it_took(
    app: AsyncTask, client: Client, dispatched: Callable[..., tuple[Any, list[str]]]
) -> None:
    _, (first, second) = dispatched(2)
    ours = app.ledger.under("host:1:ours")
    processes.register(ours, app.host, kind="worker", pid=1, lease_s=60.0, concurrency=2, queues=["default"])
    said = [{"job_id": job, "status": "finish", "attempt": 1} for job in (first, second)]
    assert batch(client, *said) == [(False, "enqueue", 1)] * 2
    broker_of(app).exchange("somebody", broker_of(app).exchange("somebody", [], ["default"], 1), [], 0)
    assert batch(client, *said) == [(True, "finish", 1), (False, "enqueue", 1)]


def test_a_job_that_a_worker_of_ours_performs_is_its_alone(app: AsyncTask, client: Client) -> None:
    gate = threading.Event()

    @app.worker(retry=0)
    def slow(item: dict[str, Any]) -> str:
        gate.wait(60)
        return "ours"

    launcher = app.launcher(concurrency=1)
    launcher.start()
    try:
        task = app.submit("slow", [{"n": 1}])
        wait_for(lambda: task.progress()["counts"]["working"] == 1, "it is at work")
        (job,) = [each["job_id"] for each in task.events()]
        assert "has it" in refused(client, job, 409, "held_elsewhere", attempt=1)
        assert batch(client, {"job_id": job, "status": "finish", "attempt": 1}) == [(False, "working", 1)]
        gate.set()
        assert task.wait(60)["done"]
    finally:
        gate.set()
        launcher.stop()
    assert (event(client, job)["status"], event(client, job)["result"]) == ("finish", "ours")
    assert not app.doctor()


def test_a_job_of_an_attached_engine_is_recorded_by_its_workers_alone(app: AsyncTask, client: Client) -> None:
    shop: Any = Celery("shop", broker="memory://")

    pack = shop.task(_not_here, name="shop.pack", shared=False)
    celery.attach(shop, app)
    job = pack.delay({"n": 1}).id
    for attempt in (1, None):
        answer = client.post(f"/api/jobs/{job}/record", json={"status": "finish", "attempt": attempt})
        assert answer.status_code in (409, 422), answer.json
    assert "celery" in refused(client, job, 409, "held_elsewhere", attempt=1)


# -- which workers and queues


@pytest.mark.parametrize(
    ("worker", "code"),
    [("Nobody::Declared", "unknown_worker"), ("loose", "invalid_worker"), ("*", "invalid_worker"),
     ("asynctask.merge", "invalid_worker"), ("shop.pack", "invalid_worker")],
)  # fmt: skip
def test_a_worker_that_no_other_language_performs_is_refused(
    app: AsyncTask, client: Client, worker: str, code: str
) -> None:
    app.worker(_not_here, name="loose", use_task_event=False)
    app.export(columns=["n"])(_rows)  # with it, there is a merge
    shop: Any = Celery("shop", broker="memory://")
    shop.task(_not_here, name="shop.pack", shared=False)
    celery.attach(shop, app)
    said = {"status": "finish", "worker": worker}
    answer = client.post("/api/jobs/a/record", json=said)
    assert (answer.status_code, answer.json["code"]) == (422, code)
    of_process = {
        "records": [{"job_id": "ok", "status": "finish", "worker": "W"}, {"job_id": "a", **said}],
        "process": RUBY,
    }
    answer = client.post(BATCH, json=of_process)
    if code == "unknown_worker":  # a process in another language registers its workers itself
        assert (answer.status_code, event(client, "a")["worker_name"]) == (200, worker)
    else:
        assert (answer.status_code, answer.json["code"]) == (422, code)
        assert client.get("/api/jobs/ok").status_code == client.get("/api/jobs/a").status_code == 404


@pytest.mark.parametrize("queue", ["", "x" * 256, "a\0b", "a\nb", "a b", "\x1b[31m", "celery/default", "\u202ea"])
def test_a_queue_that_is_none_is_refused(app: AsyncTask, client: Client, queue: str) -> None:
    said = {"status": "finish", "worker": "W", "queue": queue}
    assert client.post("/api/jobs/a/record", json=said).status_code == 422
    with pytest.raises(InputError, match="queue"):
        app.record_all([JobRecord("a", "finish", worker="W", queue=queue)])
    assert client.get("/api/jobs/a").status_code == 404


# -- the process that performs


def test_jobs_of_a_process_that_is_silent_are_given_again(make_app: Callable[..., AsyncTask], redis_url: str) -> None:
    app = make_app(lease_s=2.0, heartbeat_s=0.5, broker_url=redis_url)
    client = client_of(app)
    app.start_services()
    batch(client)
    task = app.submit("enroll", [{"sku": "A"}])
    job = task.events()[0]["job_id"]
    wait_for(lambda: batch(client, {"job_id": job, "status": "working", "attempt": 1})[0][0], "it is dispatched")
    wait_for(lambda: event(client, job)["attempt"] > 1, "its process is dead")
    assert ("error", "Worker lost") in told(client, job)
    assert batch(client, {"job_id": job, "status": "finish", "attempt": 1}, process=None)[0][0] is False


def test_a_process_that_was_declared_dead_takes_another_name(app: AsyncTask, client: Client) -> None:
    batch(client)
    processes.give_up(app.ledger.under("sidekiq@host:7:abc"))
    said = {"job_id": "j1", "status": "finish", "worker": "W"}
    records = {"records": [said], "process": {**RUBY, "quiet": True}}
    answer = client.post(BATCH, json=records)
    assert (answer.status_code, answer.json["code"]) == (409, "process_lost")
    assert client.get("/api/jobs/j1").status_code == 404, "nothing was recorded"
    assert batch(client, said, process={**RUBY, "name": "host:7:new"}) == [(True, "finish", 1)]


def test_a_process_is_shown_obeys_and_leaves(app: AsyncTask, client: Client) -> None:
    def shown() -> list[Any]:
        found = client.get("/api/processes").json["processes"]
        return [(each["identity"], each["kind"], each["busy"], each["quiet"], each["queues"]) for each in found]

    batch(client, process={**RUBY, "busy": 3})
    assert shown() == [("sidekiq@host:7:abc", "sidekiq", 3, False, ["default"])]
    assert client.post("/api/processes/sidekiq@host:7:abc/quiet").status_code == 200
    answer = client.post(BATCH, json={"records": [], "process": {**RUBY, "concurrency": 6}})
    assert answer.json == {"results": [], "signal": "quiet"}
    batch(client, process={**RUBY, "quiet": True, "ended": True})
    assert shown() == []


# -- hostile input


@pytest.mark.parametrize(
    "body",
    [
        5, [], {}, {"status": "cancelled"}, {"status": "enqueue"}, {"status": 5}, {"status": "finish", "attempt": 0},
        {"status": "finish", "attempt": 2**31}, {"status": "finish", "attempt": "1"}, {"status": "finish", "attempt": True},
        {"status": "error", "will_retry": "yes"}, {"status": "error", "retry_at": 5}, {"status": "error", "retry_at": "5"},
        {"status": "error", "retry_at": "2026-13-21T05:12:31Z"}, {"status": "error", "started_at": "2026-11-21T05:12:31"},
        {"status": "finish", "worker": ""}, {"status": "finish", "worker": "x" * 256}, {"status": "finish", "worker": "\0"},
        {"status": "finish", "message": "x" * 10_001}, {"status": "finish", "args": {}}, {"status": "finish", "what": 1},
    ],
)  # fmt: skip
def test_a_wrong_record_is_refused(client: Client, body: Any) -> None:
    answer = client.post("/api/jobs/j1/record", json=body)
    assert answer.status_code == 422
    assert answer.mimetype == "application/problem+json"
    assert (
        client.post(BATCH, json={"records": [{"job_id": "a", "status": "finish", "worker": "W"}, body]}).status_code == 422
    )
    assert client.get("/api/jobs/a").status_code == 404, "of a batch with a wrong record nothing is recorded"


@pytest.mark.parametrize("job_id", ["", "x" * 65, "a\0b", 5, None])
def test_a_wrong_job_id_is_refused(client: Client, job_id: Any) -> None:
    said = {"job_id": job_id, "status": "finish", "worker": "W"}
    assert client.post(BATCH, json={"records": [said]}).status_code == 422
    if isinstance(job_id, str) and job_id:
        assert client.post(f"/api/jobs/{job_id}/record", json={"status": "finish", "worker": "W"}).status_code == 404


@pytest.mark.parametrize(
    "process",
    [
        {}, {"engine": "sidekiq"}, {"engine": "Ruby", "name": "a"}, {"engine": "x" * 9, "name": "a"},
        {"engine": "sidekiq", "name": "a b"}, {"engine": "sidekiq", "name": "x" * 56}, {"engine": "a\n", "name": "a"},
        {**RUBY, "concurrency": -1}, {**RUBY, "concurrency": 10_001}, {**RUBY, "queues": ["a b"]},
        {**RUBY, "queues": ["a/b"]}, {**RUBY, "queues": ["a"] * 101}, {**RUBY, "quiet": 1},
        {**RUBY, "engine": "web"}, {**RUBY, "engine": "worker"},
    ],
)  # fmt: skip
def test_a_wrong_process_is_refused(app: AsyncTask, client: Client, process: Any) -> None:
    assert client.post(BATCH, json={"records": [], "process": process}).status_code == 422
    assert app.processes() == []


def test_whole_numbers_may_have_a_point(client: Client) -> None:
    said = {"job_id": "a", "status": "working", "attempt": 3.0, "worker": "W"}
    assert batch(client, said, process={**RUBY, "concurrency": 2.0, "busy": 1.0}) == [(True, "working", 3)]


def test_sizes_are_limited(client: Client) -> None:
    said = {"job_id": "a", "status": "finish", "worker": "W"}
    assert client.post(BATCH, json={"records": [said] * 1_001}).status_code == 422
    assert len(batch(client, *([said] * 1_000))) == 1_000
    kept = record(client, "finish", "b", worker="W", result="x" * 100_000)
    assert kept["counted"]
    assert event(client, "b")["result"] is None
    assert "The result was not kept" in told(client, "b")[1][1]


@pytest.mark.parametrize("text", ["\0", "a\0b", "\U0001f600\u2028", "{0} %s </script>"])
def test_any_text_is_a_message(client: Client, text: str) -> None:
    for job_id, status in (("a", "working"), ("b", "failed"), ("c", "error"), ("d", "finish"), ("e", "interrupted")):
        assert record(client, status, job_id, worker="W", message=text, args=[text, 2**70])["counted"]
        assert any(text.replace("\0", "\ufffd") in said for _, said in told(client, job_id))


def test_half_a_character_is_no_json(client: Client) -> None:
    body = b'{"status": "finish", "worker": "W", "message": "\\ud800"}'
    answer = client.post("/api/jobs/j1/record", data=body, content_type="application/json")
    assert (answer.status_code, answer.json["code"]) == (400, "invalid_json")


def test_a_program_in_python_may_record_too(app: AsyncTask) -> None:
    ((first, second), signal) = app.record_all(
        [JobRecord("a", "working", worker="W"), JobRecord("a", "failed", "half \ud800", worker="W")]
    )
    assert (first.status, second.status, signal) == ("working", "failed", None)
    assert app.event("a")["messages"][-1]["message"] == "Failed: half ?"
    for wrong in (JobRecord("a", "cancelled"), JobRecord("", "finish"), JobRecord("\ud800", "finish")):
        with pytest.raises(InputError):
            app.record_all([wrong])


# -- ids as engines make them

IDS = ["a/b", "/a", "a/", "a//b", "stop", "a/stop", "a/stop/record", "a b?#%2F", "é\n\u2028", "a/../b", "x" * 63 + "/"]


@pytest.mark.parametrize("job_id", IDS)
def test_a_job_is_reached_by_any_id_that_an_engine_may_give_it(client: Client, job_id: str) -> None:
    path = f"/api/jobs/{quote(job_id, safe='')}"
    for status in ("working", "error"):
        answer = client.post(f"{path}/record", json={"status": status, "worker": "W", "args": [1]})
        assert (answer.status_code, answer.json["job_id"], answer.json["status"]) == (200, job_id, status)
    assert (client.get(path).json["job_id"], client.get(path).json["status"]) == (job_id, "error")
    for verb, code in (
        ("restart", "other_engine"),
        ("stop", "other_engine"),
        ("start", "other_engine"),
        ("kill", "conflict"),
    ):
        answer = client.post(f"{path}/{verb}")
        assert (answer.status_code, answer.json["code"]) == (409, code), "it is found, and its own engine keeps it"
    page = client.get(f"/jobs/{quote(job_id, safe='')}")
    assert (page.status_code, f'data-job="{path}"' in page.text) == (200, True), "the page asks for this very job"


def test_a_server_finds_a_job_whose_id_has_a_slash(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    with (
        closing(AsyncTask(environ={}, database_url=shop.environ["ASYNCTASK_DATABASE_URL"])) as app,
        shop.web() as (_, said),
    ):
        app.record("nightly/2026-11", "working")
        url = f"{said['url'].rstrip('/')}/api/jobs"
        for job_id in ("nightly%2F2026-11", "nightly/2026-11"):
            assert get(f"{url}/{job_id}")["job_id"] == "nightly/2026-11"
