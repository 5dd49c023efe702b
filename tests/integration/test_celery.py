"""Celery with the tracker attached: its own worker command, on Redis, kills included."""

from __future__ import annotations

import importlib
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import pairwise
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, Task, signals
from kombu import VERSION as KOMBU
from kombu.asynchronous import Hub
from kombu.exceptions import OperationalError
from redis import ConnectionError, Redis
from redis.client import Pipeline
from support.celery_app import build
from support.charges import CHARGED, GIVEN, Charge, check_events, check_lone
from support.engine_worker import family
from support.engines import LONE_ENDS
from support.forked import Program
from support.redis_watch import pipelines
from support.servers import RedisServer
from support.webshop import client_of
from support.world import World, settings

from asynctask import AsyncTask
from asynctask.brokers.base import Copy
from asynctask.dispatch.outbox import Router
from asynctask.errors import BrokerUnavailable, ConfigError, Conflict, IdInUse, InputError, LedgerUnavailable, NotFound
from asynctask.integrations import celery as integration
from asynctask.integrations.base import HeldAcks
from asynctask.task import TaskHandle
from asynctask.testing import wait_for

pytestmark = [
    pytest.mark.needs_redis,
    pytest.mark.one_of("pool", reason="the suite of engines runs on prefork in each run, this file on either"),
    pytest.mark.one_database(reason="what stands on the ledger is the same on each database"),
]

OVER = ("finish", "failed", "error", "cancelled")


class CeleryWorld:
    """The sending side in this process, and workers started by Celery's own command."""

    def __init__(self, world: World, server: RedisServer) -> None:
        self.world, self.server = world, server
        self.namespace = f"test-{world.folder.name}"
        self.celery, self.app = build(server.url, self.namespace, world.folder, database_url=world.store.url)
        self.app.ensure_schema()
        world.watch()

    def worker(self, pool: str = "threads", concurrency: int = 2, *more: str) -> Program:
        """``celery worker -P pool -c concurrency``; returns when it performs."""
        known = {process["pid"] for process in self.app.processes()}
        started = self.start(pool, concurrency, *more)
        wait_for(
            lambda: {p["pid"] for p in self.app.processes() if p["kind"] == "celery"} - known,
            f"a worker of Celery registers: {self.world.said()[-3000:]}",
        )
        return started

    def start(self, pool: str, concurrency: int = 1, *more: str, **environ: str) -> Program:
        """The same command; nobody waits for what becomes of it."""
        return self.world.fork(
            "-m",
            "celery",
            "-A",
            "support.celery_main:celery",
            "worker",
            "-P",
            pool,
            "-c",
            str(concurrency),
            "--without-gossip",
            "--without-mingle",
            "--without-heartbeat",
            *more,
            TEST_REDIS=self.server.url,
            TEST_NAMESPACE=self.namespace,
            **environ,
        )

    def task(self, name: str) -> Any:
        return self.celery.tasks[name]

    def redis(self) -> Redis:
        return self.server.client()

    def event(self, job_id: str) -> dict[str, Any]:
        return self.app.event(job_id)

    def ended(self, job_id: str) -> dict[str, Any]:
        """The Event once it is terminal."""
        wait_for(
            lambda: self.event(job_id)["status"] in OVER, f"{job_id} ends; workers said: {self.world.said()[-3000:]}", 60
        )
        return self.event(job_id)

    def performers(self) -> list[int]:
        return [p["pid"] for p in self.app.processes() if p["kind"] == "celery"]

    def close(self) -> None:
        self.app.close()
        self.celery.close()


@pytest.fixture
def engine(world: World, redis_server: RedisServer) -> Iterator[CeleryWorld]:
    found = CeleryWorld(world, redis_server)
    yield found
    found.close()


def said(event: dict[str, Any]) -> list[tuple[str, str, int]]:
    return [(m["status"], m["message"], m["attempt"]) for m in event["messages"]]


def items(count: int) -> list[dict[str, Any]]:
    return [{"sku": f"A-{n}", "quantity": 1 + n % 3} for n in range(count)]


# -- lone jobs


@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_lone_job_has_its_event_before_any_worker_runs_and_its_whole_life_afterwards(
    engine: CeleryWorld, pool: str
) -> None:
    sent = engine.task("lone").delay("A-1", quantity=3)
    waiting = engine.event(sent.id)
    assert (waiting["status"], waiting["params"], waiting["task_id"]) == (
        "enqueue",
        {"args": ["A-1"], "kwargs": {"quantity": 3}},
        None,
    )
    engine.worker(pool)
    event = engine.ended(sent.id)
    assert (event["status"], event["result"], event["attempt"]) == ("finish", {"enrolled": "A-1"}, 1)
    assert said(event) == [("working", "In progress", 1), ("working", "3 of A-1 in stock", 1), ("finish", "Done", 1)]


@pytest.mark.parametrize(("kind", "text"), [("normal", "seller is not qualified"), ("sold_out", "sold out")])
def test_a_refusal_is_failed_and_celery_does_not_retry_it(engine: CeleryWorld, kind: str, text: str) -> None:
    sent = engine.task("refuse").delay(kind)
    engine.worker()
    event = engine.ended(sent.id)
    assert (event["status"], said(event)[-1]) == ("failed", ("failed", f"Failed: {text}", 1))
    assert engine.world.shop.lines() == [["did", kind]]


HOOKS = {
    "before_start": ("error", "Error: ValueError: at before_start"),
    "before": ("error", "Error: ValueError: at before"),
    "run": ("error", "Error: ValueError: at run"),
    "after": ("error", "Error: ValueError: at after"),
    "before_start_refused": ("failed", "Failed: sold out at before_start"),
    "after_refused": ("failed", "Failed: sold out at after"),
    "run_refused": ("failed", "Failed: sold out at run"),
    "on_success": ("finish", "Done"),
}
"""Where a job fails -> how its Event ends: as Celery says, for which a hook after the record is no failure."""


@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_what_a_hook_of_the_task_raises_is_its_outcome(engine: CeleryWorld, pool: str) -> None:
    """The Event of a lone job waited for ever, that of a list's was dispatched again every 20 seconds, and one that failed
    behind ``super().__call__()`` ended ``finish``; a refusal called ``on_success``."""
    engine.worker(pool)
    lone = {place: engine.task("hooked").delay({"at": place}) for place in HOOKS}
    listed = engine.app.submit("hooked", [{"at": place} for place in HOOKS])
    ends = {place: engine.ended(sent.id) for place, sent in lone.items()}
    assert {place: (event["status"], said(event)[-1][1]) for place, event in ends.items()} == HOOKS
    assert all(said(event)[0][1] == "In progress" and event["attempt"] == 1 for event in ends.values())
    listed.wait(timeout=60)
    ended = {event["params"]["at"]: event for event in listed.events()}
    assert {place: (event["status"], said(event)[-1][1]) for place, event in ended.items()} == HOOKS
    wait_for(lambda: hooks_called(engine, "on_") == 2 * len(HOOKS), "Celery has called all hooks")
    wrong = ("on_success", "on_failure")
    for what, place in (line[:2] for line in engine.world.shop.lines()):
        if what in wrong:
            assert (what == "on_success") == (HOOKS[place][0] == "finish"), (what, place)
    assert all(line[2] for line in engine.world.shop.lines() if line[0] == "before_start"), "a hook has the job"


def hooks_called(engine: CeleryWorld, prefix: str) -> int:
    return sum(line[0].startswith(prefix) for line in engine.world.shop.lines())


@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_result_that_celery_cannot_encode_fails_the_job_here_too(engine: CeleryWorld, pool: str) -> None:
    """It ended ``finish``."""
    engine.worker(pool)
    sent, listed = engine.task("opaque").delay({}), engine.app.submit("opaque", [{}])
    listed.wait(timeout=60)
    for event in (engine.ended(sent.id), *listed.events()):
        assert (event["status"], "EncodeError" in said(event)[-1][1]) == ("error", True)
    assert sent.get(timeout=30, propagate=False).__class__.__name__ == "EncodeError"
    assert len(engine.world.shop.lines()) == 2, "each ran once"


@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_job_whose_content_a_worker_does_not_accept_ends_with_that_reason(engine: CeleryWorld, pool: str) -> None:
    """Its Event waited for ever."""
    engine.celery.conf.accept_content = ["json", "yaml"]
    sent = engine.task("noted").apply_async(("x",), serializer="yaml")
    engine.worker(pool)
    event = engine.ended(sent.id)
    assert (event["status"], "ContentDisallowed" in said(event)[-1][1]) == ("error", True)


@pytest.mark.parametrize("name", ["pair", "named"])
def test_a_task_that_is_not_called_with_one_item_takes_no_list_and_no_callback(engine: CeleryWorld, name: str) -> None:
    """It was offered, and each of its jobs ended in ``error`` when it was dispatched."""
    assert name not in engine.app.list_workers()
    with pytest.raises(InputError, match=r"its parameters are \(item, .*seller\)"):
        engine.app.submit(name, [{}])
    with pytest.raises(InputError, match=r"on_complete.*cannot be called back.*parameters are"):
        engine.app.submit("noted", [1], on_complete=name)
    mixed = engine.app.submit_jobs([("noted", 1), (name, 2)], dry_run=True)
    assert [(each.code, "seller" in each.message) for each in mixed.problems] == [("invalid_worker", True)]
    client = client_of(engine.app)
    answer = client.post("/api/tasks", json={"worker": name, "items": [1]})
    assert (answer.status_code, answer.json["code"]) == (422, "invalid_worker")
    engine.app.submit("noted", [1], on_complete={"worker": "pair", "args": ["first"]})


def test_a_job_that_is_sent_with_a_routing_key_is_in_the_queue_that_this_is_bound_to(
    world: World, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The routing key was taken for the name of the queue, so a restart went to a queue that nobody works."""
    monkeypatch.setenv("TEST_TOPICS", "1")
    engine = CeleryWorld(world, redis_server)
    own, orders = (f"{engine.namespace}-{name}" for name in ("default", "orders"))
    try:
        sent = engine.task("noted").apply_async((1,), routing_key="orders.eu")
        assert engine.event(sent.id)["queue"] == f"celery/{orders}"
        on_celery: Any = engine.app.engines["celery"]
        arrived = {"": own, "orders.eu": orders, "default": own, "elsewhere": own}
        topics = {"exchange": f"{engine.namespace}-topics"}
        assert {key: on_celery._queue_of({**topics, "routing_key": key}, own) for key in arrived} == arrived
        assert on_celery._queue_of({"exchange": "", "routing_key": orders}, own) == orders
    finally:
        engine.close()


def test_in_eager_mode_a_task_is_called_with_its_hooks_and_nothing_is_recorded(engine: CeleryWorld) -> None:
    engine.celery.conf.update(task_always_eager=True, task_eager_propagates=True)
    noted, hooked = engine.task("noted"), engine.task("hooked")
    assert [noted.delay(1).get(), noted.apply((2,)).get(), noted(3)] == [1, 2, 3]
    with pytest.raises(ValueError, match="at after"):
        hooked.delay({"at": "after"})
    assert hooked.apply(({"at": "before"},), throw=False).state == "FAILURE"
    assert engine.world.one("SELECT COUNT(*) FROM events") == 0


def test_only_jobs_of_a_task_with_a_rate_limit_may_be_held_by_an_idle_worker(engine: CeleryWorld) -> None:
    """One such task kept lost copies of all tasks from being searched for, in every queue."""
    queue = f"celery/{engine.namespace}-default"
    router = Router(engine.app.broker, engine.app.engines, engine.app.clock)
    engine.app.list_workers()
    keys = {("a" * 24, 1): (queue, "noted"), ("b" * 24, 1): (queue, "limited")}
    assert router.held(keys, ()) == {("b" * 24, 1)}


@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_job_of_another_ledger_is_dropped_unrun(engine: CeleryWorld, pool: str) -> None:
    """It was performed and recorded as a lone one."""
    engine.celery.send_task("noted", ("foreign",), task_id="foreign", headers={"asynctask_attempt": 2})
    engine.worker(pool)
    engine.ended(engine.task("noted").delay("own").id)
    wait_for(lambda: "copy_of_no_event" in engine.world.said(), "the log says why")
    assert engine.world.shop.lines() == [["noted", "own"]]
    with pytest.raises(NotFound):
        engine.event("foreign")


@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_task_without_events_does_not_replace_a_job_by_a_broken_attempt(engine: CeleryWorld, pool: str) -> None:
    """It ran, and nobody recorded it."""
    engine.celery.send_task("quiet", (7,), task_id="job", headers={integration.AGAIN: ["job", "1"]})
    engine.worker(pool)
    engine.ended(engine.task("noted").delay("own").id)
    wait_for(lambda: "broken_attempt" in engine.world.said(), "the log says why")
    assert engine.world.shop.lines() == [["noted", "own"]]


@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_job_of_a_list_sends_another_one_with_the_headers_of_its_own(engine: CeleryWorld, pool: str) -> None:
    """It got no Event, and was dropped as a copy that another ledger had dispatched."""
    engine.worker(pool)
    assert engine.app.submit("parent", ["child"]).wait(timeout=60)["counts"]["finish"] == 1
    assert engine.ended("child")["status"] == "finish"
    assert engine.world.shop.lines() == [["did", "child", "1"]]


def retried(event: dict[str, Any]) -> bool:
    """Whether these are the messages of a job that ended with its third attempt."""
    assert (event["status"], event["result"], event["attempt"]) == ("finish", "through", 3)
    return said(event) == [
        ("working", "In progress", 1),
        ("error", "Error: ValueError: not yet, at 1", 1),
        ("enqueue", "Waiting for retry", 1),
        ("working", "In progress", 2),
        ("error", "Error: ValueError: not yet, at 2", 2),
        ("enqueue", "Waiting for retry", 2),
        ("working", "In progress", 3),
        ("finish", "Done", 3),
    ]


@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_job_that_begins_as_soon_as_it_is_sent_has_the_same_life(engine: CeleryWorld, pool: str) -> None:
    engine.worker(pool)
    engine.ended(engine.task("lone").delay("A-0").id)  # the ledger has answered the worker
    sent = [engine.task(name).delay(*args) for name, args in (("shaky", [2]), ("refuse", ["normal"]), ("lone", ["A-1"]))]
    assert retried(engine.ended(sent[0].id))
    assert [engine.ended(each.id)["status"] for each in sent[1:]] == ["failed", "finish"]
    assert said(engine.event(sent[2].id))[1] == ("working", "1 of A-1 in stock", 1)


@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_child_that_gets_the_headers_of_its_parent_has_its_own_event(engine: CeleryWorld, pool: str) -> None:
    engine.worker(pool)
    engine.ended(engine.task("lone").delay("A-0").id)  # the ledger has answered the worker
    children = [f"child-{n}" for n in range(3)]
    for child in children:
        engine.ended(engine.task("parent").delay(child).id)
    wait_for(lambda: len(engine.world.shop.lines()) == 4, "all are performed")
    wait_for(lambda: engine.world.one("SELECT COUNT(*) FROM events WHERE status = 'finish'") == 7, "each has its Event")
    assert [engine.event(child)["result"] for child in children] == [{"enrolled": child} for child in children]


@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_jobs_that_ask_for_a_retry_and_go_on_do_not_occupy_the_worker(engine: CeleryWorld, pool: str) -> None:
    """More of them than the worker fetches ahead."""
    engine.worker(pool)
    sent = [engine.task("silent").delay(n) for n in range(8)]
    for each in sent:
        event = engine.ended(each.id)
        assert (event["status"], event["result"], event["attempt"]) == ("finish", "through", 2)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_lone_job_that_ends_in_another_way_says_so_and_its_thread_lives(engine: CeleryWorld) -> None:
    engine.worker("threads", 1)
    sent = {how: engine.task("act").delay({"n": n, **item}).id for n, (how, (item, *_)) in enumerate(LONE_ENDS.items())}
    for how, (_, status, text, result) in LONE_ENDS.items():
        event = engine.ended(sent[how])
        assert (event["status"], event["result"], event["attempt"]) == (status, result, 1)
        assert (text or "Done") in event["messages"][-1]["message"]
    event = engine.ended(engine.task("later").delay(1).id)
    assert (event["status"], event["problem"]) == ("error", "not_performed")
    assert engine.ended(engine.task("lone").delay("A-1").id)["status"] == "finish"


def test_a_task_that_opted_out_leaves_no_event(engine: CeleryWorld) -> None:
    sent = engine.task("unseen").delay(1)
    engine.worker()
    wait_for(engine.world.shop.lines, "it is performed")
    with pytest.raises(NotFound):
        engine.event(sent.id)


@pytest.mark.parametrize("name", ["soft", "endless"])
def test_a_job_over_its_time_limit_ends_as_timed_out(engine: CeleryWorld, name: str) -> None:
    sent = engine.task(name).delay()
    engine.worker("prefork", 1)
    event = engine.ended(sent.id)
    assert (event["status"], event["problem"]) == ("error", "timeout")
    assert said(event)[-1][1].startswith("Timed out")


def test_a_job_whose_process_is_killed_is_delivered_again_and_finished(engine: CeleryWorld) -> None:
    sent = engine.task("gated").delay(7)
    engine.worker("prefork", 1)
    ((_, _, pid),) = wait_for(engine.world.shop.lines, "it begins")
    wait_for(lambda: engine.event(sent.id)["status"] == "working", "it is recorded as begun")
    os.kill(int(pid), signal.SIGKILL)
    wait_for(lambda: len(engine.world.shop.lines()) == 2, "it begins again")
    (engine.world.folder / "gate").touch()
    event = engine.ended(sent.id)
    assert (event["status"], event["result"]) == ("finish", 7)
    assert "Worker lost" in [message for _, message, _ in said(event)]


def test_a_job_that_celery_does_not_deliver_again_ends_with_its_child(engine: CeleryWorld) -> None:
    """With early acknowledgements: nothing waits for a retry then, and nothing says so."""
    sent = engine.task("gated").delay(7)
    engine.start("prefork", 1, TEST_EARLY_ACK="1")
    ((_, _, pid),) = wait_for(engine.world.shop.lines, "it begins")
    wait_for(lambda: engine.event(sent.id)["status"] == "working", "it is recorded as begun")
    os.kill(int(pid), signal.SIGKILL)
    event = engine.ended(sent.id)
    assert [text for _, text, _ in said(event)] == [
        "In progress",
        "Given up: its process died, and Celery does not deliver it again",
    ]


def test_a_revoked_job_ends_in_error_with_the_reason(engine: CeleryWorld) -> None:
    sent = engine.task("noted").apply_async(("x",), expires=-1)
    engine.worker()
    event = engine.ended(sent.id)
    assert (event["status"], said(event)[-1][1]) == ("error", "Given up: it is over its expiry time")
    assert engine.world.shop.lines() == []


def test_a_job_that_is_terminated_by_celery_has_not_exited_by_itself(engine: CeleryWorld) -> None:
    engine.worker("prefork", 1)
    sent = engine.task("gated").delay(1)
    wait_for(lambda: engine.event(sent.id)["status"] == "working", "it runs")
    engine.celery.control.revoke(sent.id, terminate=True)
    event = engine.ended(sent.id)
    assert (event["status"], event["problem"], event["messages"][-1]["message"]) == ("error", "interrupted", "Interrupted")
    assert engine.ended(engine.task("lone").delay("A-1").id)["status"] == "finish"


def test_a_chain_goes_on_after_a_success_and_not_after_a_refusal(engine: CeleryWorld) -> None:
    noted, refuse = engine.task("noted"), engine.task("refuse")
    (noted.s("first") | noted.s()).apply_async()
    broken = refuse.s("normal") | noted.si("never")
    broken.apply_async()
    last = noted.delay("last")
    engine.worker("threads", 1)
    wait_for(lambda: ["noted", "last"] in engine.world.shop.lines(), "the jobs before it are over")
    engine.ended(last.id)
    wait_for(lambda: engine.world.shop.lines().count(["noted", "first"]) == 2, "the second step of the first chain")
    assert ["noted", "never"] not in engine.world.shop.lines()


# -- another run under the id of a job


def run(engine: CeleryWorld, kind: str, name: str, item: dict[str, Any]) -> dict[str, Any]:
    """The Event of a job, once it has ended: of a lone one, or of the one row of a list."""
    if kind == "lone":
        return engine.ended(engine.task(name).delay(item).id)
    (row,) = finished(engine, engine.app.submit(name, [item])).events()
    return engine.event(row["job_id"])


def finished(engine: CeleryWorld, task: TaskHandle) -> TaskHandle:
    wait_for(lambda: task.progress()["done"], f"the list ends; workers said: {engine.world.said()[-3000:]}", 60)
    return task


def texts(event: dict[str, Any]) -> list[str]:
    return [message for _, message, _ in said(event)]


KIND = pytest.mark.parametrize("kind", ["lone", "list"])


def test_a_send_under_the_id_of_an_ended_job_is_another_run_of_it(engine: CeleryWorld) -> None:
    """The first run alone was performed without :func:`asynctask.ledger.standalone.send`."""
    engine.worker("prefork")
    for attempt, name, args in (
        (1, "noted", ("a",)),
        (2, "noted", ("b",)),
        (3, "refuse", ("normal",)),
        (4, "noted", ("c",)),
    ):
        assert engine.task(name).apply_async(args, task_id="nightly").id == "nightly"
        event = engine.ended("nightly")
        assert (event["attempt"], event["worker"], event["params"]) == (attempt, name, list(args))
    assert (event["status"], event["result"]) == ("finish", "c")
    engine.celery.send_task("noted", ("d",), task_id="nightly")  # by a name alone
    assert (engine.ended("nightly")["result"], engine.event("nightly")["attempt"]) == ("d", 5)
    assert texts(engine.event("nightly")).count("Sent again") == 4
    assert [line[1] for line in engine.world.shop.lines()] == ["a", "b", "normal", "c", "d"]


def test_a_program_that_records_nothing_sends_another_run_under_the_id_of_an_ended_job(engine: CeleryWorld) -> None:
    plain = Celery("plain", broker=engine.celery.conf.broker_url, set_as_current=False)
    plain.conf.broker_transport_options = engine.celery.conf.broker_transport_options
    plain.conf.task_default_queue = engine.celery.conf.task_default_queue
    engine.worker()
    for attempt in (1, 2):
        plain.send_task("noted", (attempt,), task_id="nightly")
        wait_for(lambda: len(engine.world.shop.lines()) == attempt, "it is performed")  # noqa: B023 - called at once
        event = engine.ended("nightly")
        assert (event["attempt"], event["params"], event["result"]) == (attempt, [attempt], attempt)
    plain.close()


def test_a_send_under_the_id_of_an_open_job_is_refused_before_anything_is_queued(engine: CeleryWorld) -> None:
    noted = engine.task("noted")
    noted.apply_async(("first",), task_id="nightly")
    with pytest.raises(IdInUse, match=r"nightly is in enqueue.*wait for its end, cancel it, or send with another id"):
        noted.apply_async(("second",), task_id="nightly")
    task = engine.app.submit("noted", ["row"])
    (row,) = wait_for(task.events, "its row")
    with pytest.raises(IdInUse, match=f"of a job of Task {task.id}"):
        noted.apply_async(("third",), task_id=row["job_id"])
    engine.worker()
    finished(engine, task)
    with pytest.raises(IdInUse, match=f"of a job of Task {task.id}"):
        noted.apply_async(("third",), task_id=row["job_id"])
    engine.ended("nightly")
    assert sorted(line[1] for line in engine.world.shop.lines()) == ["first", "row"]


def test_a_late_copy_of_an_earlier_run_does_not_run_as_the_next_one(engine: CeleryWorld) -> None:
    """It was performed as the second run without the comparison in ``Tracker.arrive``."""
    queue, redis = engine.celery.conf.task_default_queue, engine.redis()
    key = f"{engine.namespace}:{queue}"
    noted = engine.task("noted")
    noted.apply_async(("old",), task_id="nightly")
    (copy,) = redis.lrange(key, 0, -1)
    worker = engine.worker()
    engine.ended("nightly")
    worker.terminate()
    assert worker.wait(60) == 0
    noted.apply_async(("new",), task_id="nightly")
    redis.rpush(key, copy)  # it is taken first
    engine.worker("threads", 1)
    assert engine.ended("nightly")["result"] == "new"
    assert engine.world.shop.lines() == [["noted", "old"], ["noted", "new"]]


@KIND
@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_job_that_sends_itself_again_ends_with_that_run(engine: CeleryWorld, kind: str, pool: str) -> None:
    engine.worker(pool)
    event = run(engine, kind, "resent", {"n": 1})
    assert (event["status"], event["result"], event["attempt"]) == ("finish", 3, 3)
    assert texts(event) == ["In progress", "Sent again", "In progress", "Sent again", "In progress", "Done"]
    assert event["params"] == ([{"n": 3}] if kind == "lone" else {"n": 1})
    assert engine.world.shop.lines() == [["resent", "1"], ["resent", "2"]]


def test_a_person_s_retry_of_a_row_that_sent_itself_again_begins_with_its_item(engine: CeleryWorld) -> None:
    engine.worker()
    task = finished(engine, engine.app.submit("replaced", [{"by": "broken chain"}]))
    assert task.progress()["counts"]["error"] == 1
    task.retry()
    wait_for(
        lambda: engine.world.shop.lines().count(["replaced"]) == 2, f"its item runs again: {engine.world.said()[-3000:]}"
    )


@pytest.mark.one_of("kind", reason="each step is sent in the same way")
@KIND
@pytest.mark.parametrize("by", ["task", "untracked", "chain", "untracked chain"])
def test_a_job_that_is_replaced_ends_with_the_step_that_has_its_id(engine: CeleryWorld, kind: str, by: str) -> None:
    """In a list the item itself ran again and again; a lone one ended in error with the next step."""
    engine.worker("prefork")
    event = run(engine, kind, "replaced", {"by": by})
    assert (event["status"], event["result"], event["attempt"]) == ("finish", 7, 2)
    assert texts(event) == ["In progress", "Sent again", "In progress", "Done"]
    notes = 2 if "chain" in by else 1
    assert engine.world.shop.lines() == [["replaced"], *[["noted", "7"]] * notes]


@KIND
def test_a_job_that_is_replaced_by_a_group_ends_with_all_its_results(
    engine: CeleryWorld, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_BACKEND", engine.server.url)
    engine.celery.conf.result_backend = engine.server.url
    engine.worker()
    event = run(engine, kind, "replaced", {"by": "group"})
    assert (event["status"], event["result"]) == ("finish", [7, 8])
    assert sorted(engine.world.shop.lines()) == [["noted", "7"], ["noted", "8"], ["replaced"]]


@KIND
@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_job_whose_replacement_fails_before_the_step_with_its_id_ends_in_error(
    engine: CeleryWorld, kind: str, pool: str
) -> None:
    engine.worker(pool)
    event = run(engine, kind, "replaced", {"by": "broken chain"})
    assert (event["status"], texts(event)[-1]) == ("error", "Given up: breaks, a task before it, failed: ValueError: no")


@KIND
def test_a_retry_with_other_arguments_runs_with_those(engine: CeleryWorld, kind: str) -> None:
    """In a list the item ran again as it was, until no retry was left."""
    engine.worker("prefork")
    event = run(engine, kind, "paged", {"n": 0})
    assert (event["status"], event["result"], event["attempt"], event["retries"]) == ("finish", [2, 20], 3, 2)
    assert engine.world.shop.lines() == [["page", "0", "0"], ["page", "1", "10"], ["page", "2", "20"]]


@KIND
def test_a_retry_in_another_queue_runs_there(engine: CeleryWorld, kind: str) -> None:
    other = f"{engine.namespace}-other"
    engine.worker("threads", 1, "-Q", f"{engine.celery.conf.task_default_queue},{other}")
    assert run(engine, kind, "moved", {"to": other})["result"] == other


@KIND
@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_job_that_is_put_back_into_the_queue_is_tried_again(engine: CeleryWorld, kind: str, pool: str) -> None:
    engine.worker(pool)
    event = run(engine, kind, "put_back", {"n": 1})
    assert (event["status"], event["result"], event["attempt"]) == ("finish", "done", 3)
    assert texts(event)[1:3] == ["Error: RuntimeError: put back into the queue: not yet", "Waiting for retry"]


@pytest.mark.one_of("kind", reason="the state is read in the same way")
@KIND
@pytest.mark.parametrize(
    ("state", "status", "text"),
    [
        (None, "finish", "Done"),
        ("STARTED", "finish", "Done"),
        ("FAILURE", "error", "Error: RuntimeError: the task set its state to FAILURE"),
    ],
)
def test_a_job_that_wants_to_be_ignored_ends_as_it_says_itself(
    engine: CeleryWorld, kind: str, state: str | None, status: str, text: str
) -> None:
    engine.worker()
    event = run(engine, kind, "ignored", {"state": state} if state else {})
    assert (event["status"], event["attempt"]) == (status, 1)
    assert texts(event)[-1].startswith(text)
    assert ("Ignored: the task raised Ignore" in texts(event)) is (status == "finish")


@KIND
def test_a_job_that_sends_itself_again_at_once_pauses_after_ten_times(engine: CeleryWorld, kind: str) -> None:
    engine.worker("threads", 1)
    event = run(engine, kind, "hot", {"n": 1})
    assert (event["status"], event["result"], event["attempt"]) == ("finish", 13, 13)
    began = [m["at"] for m in event["messages"] if m["message"] == "In progress"]
    seconds = [(datetime.fromisoformat(b) - datetime.fromisoformat(a)).total_seconds() for a, b in pairwise(began)]
    assert all(gap >= pause for gap, pause in zip(seconds[-2:], (0.1, 0.2), strict=True)), seconds


def test_a_job_cannot_send_another_under_an_id_that_is_in_use(engine: CeleryWorld) -> None:
    engine.worker("threads", 1)
    engine.task("noted").apply_async(("waits",), task_id="other", countdown=3_600)
    said_by = run(engine, "lone", "borrower", {"id": "other"})["result"]
    assert said_by.startswith("a job with the id other is in enqueue")
    assert engine.world.shop.lines() == []


# -- what people do


def test_a_dead_job_is_sent_again_by_celery_under_its_id(engine: CeleryWorld) -> None:
    sent = engine.task("auto").apply_async(kwargs={"breaks": 3})
    engine.worker()
    assert (engine.ended(sent.id)["status"], engine.event(sent.id)["attempt"]) == ("error", 3)
    assert engine.app.operations.job(sent.id)["actions"] == ["restart", "dismiss"]
    assert engine.app.operations.act("dead", "restart", [sent.id]).done == 1
    wait_for(lambda: engine.event(sent.id)["status"] == "finish", f"it runs again: {engine.world.said()[-3000:]}")
    event = engine.event(sent.id)
    assert (event["attempt"], event["params"], event["result"]) == (4, {"args": [], "kwargs": {"breaks": 3}}, "through")
    assert [text for _, text, _ in said(event)][-3:] == ["Retried", "In progress", "Done"]


def test_a_dead_job_that_nobody_can_run_now_waits_in_the_ledger_and_can_be_cancelled(engine: CeleryWorld) -> None:
    sent = engine.task("auto").delay(9)
    worker = engine.worker()
    engine.ended(sent.id)
    worker.terminate()
    assert worker.wait(60) == 0
    restarted = engine.app.operations.act_on_job(sent.id, "restart")
    assert (restarted["status"], restarted["actions"]) == ("enqueue", ["restart", "kill", "delete"])
    assert engine.app.engines["celery"].waiting([restarted["queue"]]) == {restarted["queue"]: 0}
    assert engine.app.operations.act_on_job(sent.id, "delete")["status"] == "cancelled"


def test_a_job_that_waits_in_celery_is_revoked_and_one_that_runs_is_not(engine: CeleryWorld) -> None:
    engine.worker("prefork", 1)
    runs = engine.task("gated").delay(0)
    wait_for(lambda: engine.event(runs.id)["status"] == "working", "it is known to have begun")
    waits = [engine.task("noted").delay(n) for n in range(3)]
    for sent in waits:
        assert engine.app.operations.act_on_job(sent.id, "delete")["status"] == "cancelled"
    with pytest.raises(Conflict, match="a worker performs it"):
        engine.app.operations.act_on_job(runs.id, "delete")
    assert engine.app.engines["celery"].revoke(runs.id, "") == "a worker has begun it"
    last = engine.task("noted").delay("last")
    (engine.world.folder / "gate").touch()
    engine.ended(last.id)
    assert [line for line in engine.world.shop.lines() if line[0] == "noted"] == [["noted", "last"]]
    assert engine.ended(runs.id)["status"] == "finish"


def test_a_job_that_was_cancelled_before_any_worker_ran_is_dropped_when_one_takes_it(engine: CeleryWorld) -> None:
    sent = engine.task("noted").delay("never")
    assert engine.app.operations.act_on_job(sent.id, "delete")["status"] == "cancelled"
    last = engine.task("noted").delay("last")
    engine.worker("threads", 1)
    engine.ended(last.id)
    assert engine.world.shop.lines() == [["noted", "last"]]
    assert engine.event(sent.id)["status"] == "cancelled"


def test_what_waits_for_a_retry_of_a_task_is_killed_or_deleted_in_the_ledger(engine: CeleryWorld) -> None:
    engine.worker()
    task = engine.app.submit("patient", [1, 2])
    wait_for(lambda: task.progress()["retrying"] == 2, "both wait for their retry")
    first, second = (event["job_id"] for event in task.events())
    assert engine.app.operations.act("retries", "kill", [first]).done == 1
    assert engine.app.operations.act("retries", "delete", [second]).done == 1
    assert task.wait(timeout=60)["counts"]["cancelled"] == 1
    assert sorted(event["status"] for event in task.events()) == ["cancelled", "error"]
    assert engine.app.doctor() == []


# -- what is declared and started


def test_a_task_that_is_declared_late_is_tracked_too(engine: CeleryWorld) -> None:
    assert "late" not in engine.app.workers

    def late(item: dict[str, Any]) -> None: ...

    task: Any = engine.celery.task(name="late", shared=False)(late)
    assert engine.event(task.delay(1).id)["status"] == "enqueue"
    assert engine.app.workers["late"].engine == "celery"


def test_the_first_job_of_a_program_that_only_sends_has_its_event(engine: CeleryWorld) -> None:
    """Nothing has finalized its Celery application before."""
    celery, app = build(engine.server.url, engine.namespace, engine.world.folder, database_url=engine.world.store.url)

    def early(item: dict[str, Any]) -> None: ...

    task: Any = celery.task(name="early", shared=False)(early)
    try:
        assert not celery.finalized
        assert app.event(task.delay(1).id)["status"] == "enqueue"
    finally:
        app.close()


def test_the_first_job_of_a_task_that_was_declared_before_attaching_has_its_event(engine: CeleryWorld) -> None:
    """As in a project that attaches in a module beside its own: nothing else has finalized its Celery application."""
    celery = Celery("before", broker=engine.server.url, set_as_current=False)
    celery.conf.broker_transport_options = engine.celery.conf.broker_transport_options
    app = AsyncTask(**settings(engine.world.folder, database_url=engine.world.store.url))

    def before(item: dict[str, Any]) -> None: ...

    task: Any = celery.task(name="before", shared=False)(before)
    integration.attach(celery, app)
    try:
        assert not celery.finalized
        assert app.event(task.delay(1).id)["status"] == "enqueue"
    finally:
        app.close()


@pytest.mark.parametrize("how", ["include", "imports", "autodiscover"])
def test_the_tasks_of_a_project_in_modules_are_known_to_programs_that_import_none_of_them(
    engine: CeleryWorld, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were unknown outside of a worker, so no list could be handed in."""
    package = f"shop_by_{how}_on_{engine.world.store.url.partition(':')[0].partition('+')[0]}"  # imported once in a process
    (engine.world.folder / package).mkdir()
    (engine.world.folder / package / "__init__.py").touch()
    module = engine.world.folder / package / "tasks.py"
    module.write_text("raise RuntimeError('no such library')")
    monkeypatch.syspath_prepend(str(engine.world.folder))
    celery = Celery("shop", broker=engine.server.url, set_as_current=False)
    if how == "autodiscover":
        celery.autodiscover_tasks([package])
    else:
        setattr(celery.conf, how, [f"{package}.tasks"])
    app = AsyncTask(**settings(engine.world.folder, database_url=engine.world.store.url))
    integration.attach(celery, app)
    try:
        with pytest.raises(
            ConfigError, match=r"a module of the Celery application 'shop' cannot be imported: .*no such lib"
        ):
            app.list_workers()
        module.write_text("from celery import shared_task\n\n\n@shared_task\ndef enrol_all(item: dict) -> None: ...\n")
        importlib.invalidate_caches()
        name = f"{package}.tasks.enrol_all"
        assert name in app.list_workers()
        assert app.submit(name, [{"n": 1}]).progress()["counts"]["total"] == 1
    finally:
        app.close()


def test_a_task_that_is_a_class_is_tracked_too(engine: CeleryWorld) -> None:
    class Classy(Task):  # type: ignore[misc]
        name = "classy"

        def run(self, item: dict[str, Any]) -> None: ...

    task: Any = engine.celery.register_task(Classy())
    assert engine.event(task.delay(1).id)["status"] == "enqueue"


def test_a_solo_worker_performs_lists(engine: CeleryWorld) -> None:
    """The pool sends the signal of a child before the worker has its queues: it registered none, and got no jobs."""
    engine.worker("solo", 1)
    task = engine.app.submit("noted", items(3))
    assert task.wait(60)["counts"]["finish"] == 3


def test_a_pool_in_which_nothing_can_be_recorded_is_refused(engine: CeleryWorld) -> None:
    started = engine.start("solo", TEST_POOL="refused")
    assert started.wait(60) != 0
    assert "give the worker another -P" in engine.world.said()


def test_a_worker_whose_schema_is_old_does_not_start(engine: CeleryWorld) -> None:
    engine.world.sql("UPDATE alembic_version SET version_num = '0001'")
    started = engine.start("solo")
    assert started.wait(60) != 0
    assert "asynctask db upgrade" in engine.world.said()


def test_a_job_that_is_sent_without_the_ledger_raises_and_is_not_sent(
    engine: CeleryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any, **__: Any) -> None:
        raise LedgerUnavailable("the database does not answer")

    monkeypatch.setattr("asynctask.integrations.base.send", away)
    with pytest.raises(LedgerUnavailable):
        engine.task("noted").delay("x")
    assert engine.app.engines["celery"].waiting([f"celery/{engine.namespace}-default"]) == {
        f"celery/{engine.namespace}-default": 0
    }


def test_a_job_that_could_not_be_sent_does_not_wait_for_ever(engine: CeleryWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OperationalError("no broker")

    monkeypatch.setattr(engine.celery.amqp, "send_task_message", refused)
    with pytest.raises(OperationalError):
        engine.task("noted").delay("x")
    (job,) = engine.app.jobs()
    assert (job["status"], said(job)[-1][1]) == ("error", "Given up: it could not be sent: OperationalError: no broker")


# -- Tasks


@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_list_for_a_task_of_celery_is_accounted_for(engine: CeleryWorld, pool: str) -> None:
    engine.worker(pool)
    task = engine.app.submit(engine.task("enroll"), [*items(60), {"sku": "bad-1"}, {"sku": "x", "quantity": 0}])
    task.wait(timeout=120)
    progress = task.progress()
    assert (progress["counts"]["finish"], progress["counts"]["failed"], progress["split"]["rejected"]) == (60, 1, 1)
    assert (progress["state"], progress["worker"]) == ("finished", "enroll")
    assert Counter(sku for _, sku, _ in engine.world.shop.lines()) == {f"A-{n}": 1 for n in range(60)} | {"bad-1": 1}
    assert engine.app.doctor() == []


@pytest.mark.parametrize("pool", ["threads", "prefork"])
@pytest.mark.parametrize("parallel", [None, 2])
def test_celerys_own_pause_of_a_queue_holds_for_a_task(engine: CeleryWorld, pool: str, parallel: int | None) -> None:
    """What a worker has in its memory is performed, which is Celery's own way; nothing follows it."""
    engine.worker(pool)
    task = engine.app.submit(engine.task("gated"), list(range(40)), parallel=parallel)
    wait_for(lambda: len(engine.world.shop.lines()) == 2, "each thread performs one")
    queue = f"{engine.namespace}-default"
    with pytest.raises(Conflict, match="use its own tools"):
        engine.app.operations.pause(f"celery/{queue}")
    control = engine.celery.control
    assert control.cancel_consumer(queue, reply=True, timeout=60, limit=1)
    (engine.world.folder / "gate").touch()

    def left() -> int:
        inspect = control.inspect(timeout=60, limit=1)
        answers = [inspect.active(), inspect.reserved()]
        return sum(len(jobs) for answer in answers for jobs in answer.values())

    wait_for(lambda: left() == 0, "it has nothing in its memory")
    began = len(engine.world.shop.lines())
    assert 4 <= began < 40, "two lines for each job"
    assert control.add_consumer(queue, reply=True, timeout=60, limit=1)
    assert task.wait(120)["counts"]["finish"] == 40
    assert engine.app.doctor() == []


def test_its_tasks_processes_and_queues_are_shown(engine: CeleryWorld) -> None:
    client = client_of(engine.app)
    shown = {worker["name"]: worker for worker in client.get("/api/workers").json["workers"]}
    queue = f"celery/{engine.namespace}-default"
    assert (shown["enroll"]["engine"], shown["enroll"]["queue"]) == ("celery", queue)
    assert [field["name"] for field in shown["enroll"]["fields"]] == ["sku", "quantity"]
    engine.task("gated").delay(0)
    engine.worker("threads", 1)
    wait_for(engine.world.shop.lines, "it begins")
    engine.task("gated").delay(1)
    engine.task("gated").delay(2)
    (listed,) = client.get("/api/queues").json["queues"]
    assert (listed["name"], listed["processes"], listed["unattended"]) == (queue, 1, False)
    assert listed["length"] >= 1, "one or none of the two is in the worker's memory"
    (process,) = [each for each in client.get("/api/processes").json["processes"] if each["kind"] == "celery"]
    assert (process["queues"], process["concurrency"]) == ([queue], 1)
    assert [job["worker_name"] for job in client.get("/api/jobs").json["jobs"]] == ["gated"] * 3
    (engine.world.folder / "gate").touch()


def test_a_job_of_a_task_is_retried_as_celery_says_and_waits_in_the_ledger(engine: CeleryWorld) -> None:
    engine.worker()
    task = engine.app.submit("shaky", [1, 9])
    task.wait(timeout=60)
    assert [(e["status"], e["attempt"]) for e in task.events()] == [("finish", 2), ("error", 3)]
    tried = Counter((attempt, retries) for _, attempt, retries in engine.world.shop.lines())
    assert tried == {("1", "0"): 2, ("2", "1"): 2, ("3", "2"): 1}
    assert engine.app.doctor() == []


def children(engine: CeleryWorld, worker: Program) -> list[int]:
    """The children of a prefork pool, without the process that records for them."""
    return [pid for pid in family(worker.pid)[1:] if pid not in engine.performers()]


def test_a_job_of_a_task_that_ends_its_process_at_once_ends_as_poison(engine: CeleryWorld) -> None:
    """Celery gives it to the next process before anybody has seen it begin: so it could go on for ever."""
    engine.worker("prefork", 1)
    task = engine.app.submit("deadly", [1])
    task.wait(timeout=120)
    (event,) = task.events()
    assert (event["status"], event["problem"]) == ("error", "poison")
    assert len(engine.world.shop.lines()) <= 5
    assert engine.app.doctor() == []


def test_a_job_whose_task_its_worker_has_not_registered_waits_in_the_ledger_and_says_so(engine: CeleryWorld) -> None:
    """As in a deployment in which the web process has a newer release than the workers, or after a task was renamed."""

    def newer(item: dict[str, Any]) -> None: ...

    engine.celery.task(name="newer", shared=False)(newer)
    task = engine.app.submit("newer", items(1))
    engine.worker()
    (event,) = task.events()
    said_of_it = wait_for(lambda: said(engine.event(event["job_id"])), "its worker dropped it")
    assert said_of_it == [("enqueue", "Waiting for a worker: one that took it has no task 'newer' registered", 1)]
    wait_for(lambda: task.progress()["control"]["in_flight"] == 0, "the queue's loan of it ends")


def test_a_job_whose_task_the_dispatching_process_has_not_registered_is_sent_to_its_queue(engine: CeleryWorld) -> None:
    """As in a deployment in which a worker has a newer release than the web process; the jobs beside it are sent once."""
    pushed = copies(engine, 2)
    engine.celery.tasks.pop("lone")
    engine.app.engines["celery"].push(pushed)
    assert engine.redis().llen(f"{engine.namespace}:{engine.namespace}-default") == 2


def copies(engine: CeleryWorld, count: int) -> list[Copy]:
    queue = engine.app.workers["lone"].queue
    payload = json.dumps({"class": "lone", "args": ["A"]})
    return [Copy(f"job-{n}", 1, queue, payload, task_id=1) for n in range(count)]


@pytest.mark.skipif(KOMBU[:2] < (5, 7), reason="kombu has no batches before 5.7")
def test_jobs_of_a_list_go_to_redis_ten_in_a_round_trip(engine: CeleryWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    trips = pipelines(monkeypatch)
    pushed = copies(engine, 25)
    engine.app.engines["celery"].push(pushed)
    assert trips[-3:] == [10, 10, 5]  # before them, those of a new connection
    assert engine.app.engines["celery"].waiting([pushed[0].queue]) == {pushed[0].queue: 25}


def test_who_is_told_of_a_published_job_finds_it_on_its_queue(engine: CeleryWorld) -> None:
    celery, pushed, found = engine.app.engines["celery"], copies(engine, 3), []

    def told(**_: object) -> None:
        found.append(celery.waiting([pushed[0].queue])[pushed[0].queue])

    signals.after_task_publish.connect(told)
    try:
        celery.push(pushed)
    finally:
        signals.after_task_publish.disconnect(told)
    assert found == [1, 2, 3]


def test_a_broker_that_breaks_off_during_a_push_is_away(engine: CeleryWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(self: Pipeline, *_: object, **__: object) -> None:
        raise ConnectionError("broken")

    monkeypatch.setattr(Pipeline, "execute", execute)
    with pytest.raises(BrokerUnavailable):
        engine.app.engines["celery"].push(copies(engine, 3))


@pytest.mark.databases("postgresql", "mariadb", reason="no worker registers while a file is locked")
@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_thread_or_a_child_goes_on_before_the_commit_and_the_acknowledgement_does_not(
    engine: CeleryWorld, pool: str
) -> None:
    """With one of them, and no Event to be written: both jobs are performed, and the broker still holds both."""
    sent = [engine.task("lone").delay(f"A-{n}") for n in range(2)]
    with engine.world.store.locked(), engine.redis() as redis:
        engine.worker(pool, 1, "--prefetch-multiplier", "4")
        wait_for(lambda: len(engine.world.shop.lines()) == 2, "both are performed")
        assert redis.hlen(f"{engine.namespace}:unacked") == 2
    for each in sent:
        assert engine.ended(each.id)["status"] == "finish"
    with engine.redis() as redis:
        wait_for(lambda: not redis.hlen(f"{engine.namespace}:unacked"), "both are acknowledged")


class _Performed:
    """What an acknowledgement needs of a request of Celery's."""

    def __init__(self, message: Any) -> None:
        self.message = message

    def acknowledge_now(self) -> None:
        self.message.ack()


@contextmanager
def received(engine: CeleryWorld, count: int) -> Iterator[list[Any]]:
    """As many messages as the prefetch of their channel allows."""
    for n in range(count):
        engine.task("lone").delay(f"A-{n}")
    messages: list[Any] = []
    queue = engine.celery.amqp.queues[engine.celery.conf.task_default_queue]
    with (
        engine.celery.connection_for_read() as connection,
        connection.Consumer([queue], on_message=messages.append, prefetch_count=count),
    ):
        while len(messages) < count:
            connection.drain_events(timeout=10)
        yield messages


@pytest.mark.parametrize("breaks", [False, True], ids=["", "the round trip breaks"])
def test_what_waited_for_one_commit_is_acknowledged_in_one_round_trip(
    engine: CeleryWorld, monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    """If that breaks, each is acknowledged alone, as Celery does it."""
    execute, trips = Pipeline.execute, []

    def counted(self: Pipeline, *args: Any, **options: Any) -> Any:
        trips.append(len(self.command_stack))
        if breaks and len(trips) == 1:
            raise ConnectionError("broken")
        return execute(self, *args, **options)

    with received(engine, 4) as messages, engine.redis() as redis:
        monkeypatch.setattr(Pipeline, "execute", counted)
        integration._acknowledge([_Performed(message) for message in messages[:3]])
        monkeypatch.undo()
        assert trips == ([6, 2, 2, 2] if breaks else [6])
        assert [message.acknowledged for message in messages] == [True, True, True, False]
        assert redis.hkeys(f"{engine.namespace}:unacked") == [messages[3].delivery_tag.encode()]
        assert messages[3].channel.qos.can_consume()
        messages[3].ack()


class _Failing(_Performed):
    """Celery's raises, where it restores the prefetch, if the connection has broken a second time."""

    def acknowledge_now(self) -> None:
        raise ConnectionError("broken")


def test_an_acknowledgement_that_fails_leaves_the_places_of_the_others_to_new_jobs(engine: CeleryWorld) -> None:
    with received(engine, 3) as messages:
        acks = HeldAcks(integration._acknowledge)
        for each in (_Performed(messages[0]), _Failing(messages[1]), _Performed(messages[2])):
            acks.when_committed("", each)
        acks.start()
        qos = messages[0].channel.qos
        wait_for(lambda: qos.can_consume_max_estimate() == 2, "there is a place for two jobs")
        acks.stop()


def test_a_worker_that_is_stopped_acknowledges_what_its_children_have_performed(engine: CeleryWorld) -> None:
    """It has no event loop any more then: the acknowledgements wait for the commits without one."""
    worker = engine.worker("prefork", 2)
    sent = [engine.task("gated").delay(n) for n in range(2)]
    wait_for(lambda: len(engine.world.shop.lines()) == 2, "both children have a job")
    worker.terminate()
    wait_for(lambda: "Warm shutdown" in engine.world.said(), "it waits for them")
    (engine.world.folder / "gate").touch()
    assert worker.wait(60) == 0
    assert [engine.event(each.id)["status"] for each in sent] == ["finish"] * 2
    with engine.redis() as redis:
        assert not redis.hlen(f"{engine.namespace}:unacked")
        assert not redis.llen(f"{engine.namespace}:{engine.namespace}-default")
    assert engine.performers() == []


def test_a_worker_whose_recording_process_is_killed_ends_and_loses_nothing(engine: CeleryWorld) -> None:
    worker = engine.worker("prefork", 2)
    sent = [engine.task("gated").delay(n) for n in range(4)]
    wait_for(lambda: len(engine.world.shop.lines()) == 2, "both children have a job")
    os.kill(engine.performers()[0], signal.SIGKILL)
    (engine.world.folder / "gate").touch()
    assert worker.wait(60) == 1
    assert "recording_process_died" in engine.world.said()
    engine.worker("prefork", 2)
    assert [engine.ended(each.id)["status"] for each in sent] == ["finish"] * 4
    with engine.redis() as redis:
        wait_for(lambda: not redis.hlen(f"{engine.namespace}:unacked"), "all are acknowledged")


def test_a_child_that_dies_takes_no_other_job_with_it(engine: CeleryWorld) -> None:
    """The process that records for both holds both Events: the other is not given to a second process."""
    engine.worker("prefork", 2)
    task = engine.app.submit("gated", [1, 2])
    begun = wait_for(lambda: (lines := engine.world.shop.lines())[1:] and lines, "both begin")
    wait_for(lambda: task.progress()["counts"]["working"] == 2, "both are known to have begun")
    (_, killed, pid), (_, other, _) = begun
    os.kill(int(pid), signal.SIGKILL)
    wait_for(lambda: len(engine.world.shop.lines()) == 3, "one begins again")
    (engine.world.folder / "gate").touch()
    task.wait(timeout=60)
    attempts = {str(event["result"]): event["attempt"] for event in task.events()}
    assert attempts == {killed: 2, other: 1}
    assert engine.app.doctor() == []


# -- the event loop


def test_a_thread_that_acknowledges_wakes_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before kombu 5.7 it sleeps on, up to a second, and nothing is acknowledged or fetched meanwhile."""
    monkeypatch.setattr(integration, "KOMBU", (5, 6, 0))
    made: Any = Hub
    hub, loop = made(), integration._Loop()
    loop.is_woken = True
    try:
        loop.enter(hub)
        assert loop._sockets is not None
        loop.wake()
        next(hub.create_loop())
        with pytest.raises(BlockingIOError):
            loop._sockets[0].recv(1)
    finally:
        hub.close()
        for each in loop._sockets or ():
            each.close()


def test_items_reach_the_worker_as_they_were_given(engine: CeleryWorld) -> None:
    """Without the input kept, of a ``model_dump`` for example: stars for the password, cents times 100."""
    engine.worker("threads")
    task = engine.app.submit("charge", [GIVEN, Charge(**GIVEN)])
    (refused,) = task.rejects()
    assert (refused["row"], refused["errors"][0]["column"]) == (2, "price")
    task.wait(timeout=60)
    check_events(task.events())
    lone = engine.task("charge").delay(GIVEN).id
    check_lone(engine.event(lone))


@KIND
def test_an_item_that_its_job_sends_again_is_as_it_was_given(engine: CeleryWorld, kind: str) -> None:
    """In a list, stars for the password and cents times 100, in a dict; of a lone one people saw the password."""
    engine.worker("prefork")
    event = run(engine, kind, "recharged", GIVEN)
    assert (event["status"], event["result"], event["attempt"]) == ("finish", CHARGED, 3)
    assert GIVEN["password"] not in str(event)


def test_an_item_for_a_task_that_the_dispatching_process_does_not_know_is_sent_as_an_item(engine: CeleryWorld) -> None:
    """Marked as what replaces a job, it reached the function as a dict, with the mark of its secret."""
    pushed = copies(engine, 1)
    engine.celery.tasks.pop("lone")
    engine.app.engines["celery"].tracked.pop("lone")
    engine.app.engines["celery"].push(pushed)
    (message,) = engine.redis().lrange(f"{engine.namespace}:{engine.namespace}-default", 0, -1)
    headers = json.loads(message)["headers"]
    assert (headers[integration.ATTEMPT], headers.get(integration.AGAIN)) == (1, None)


def test_what_is_sent_by_the_name_of_its_task_has_its_event_before_any_worker_runs(engine: CeleryWorld) -> None:
    assert engine.event(engine.celery.send_task("noted", ("a",)).id)["status"] == "enqueue"


def test_a_call_that_its_task_refuses_leaves_no_event(engine: CeleryWorld) -> None:
    with pytest.raises(TypeError):
        engine.task("noted").delay("x", "y", "z", "and more")
    assert engine.app.jobs() == []


def test_an_id_may_be_a_uuid(engine: CeleryWorld) -> None:
    """As for Celery alone; it was a TypeError."""
    order = uuid4()
    engine.task("noted").apply_async(("a",), task_id=order)
    with pytest.raises(IdInUse):
        engine.celery.send_task("noted", ("b",), task_id=order)
    engine.worker()
    assert engine.ended(str(order))["result"] == "a"


def test_a_person_cannot_have_the_last_step_run_again_with_the_arguments_of_the_first(engine: CeleryWorld) -> None:
    engine.worker("prefork")
    job_id = engine.task("replaced").delay({"by": "late broken chain"}).id
    wait_for(lambda: engine.event(job_id)["params"] is None, "what replaces it is recorded before that fails")
    engine.world.open_gate()
    event = engine.ended(job_id)
    assert event["params"] is None
    with pytest.raises(Conflict, match="its arguments were not kept"):
        engine.app.operations.act_on_job(event["job_id"], "restart")


def test_a_dead_run_of_a_task_that_leaves_no_events_is_recorded_when_a_person_has_it_run_again(engine: CeleryWorld) -> None:
    """It ran unrecorded, and the Event waited for ever."""
    engine.worker()
    event = run(engine, "lone", "replaced", {"by": "broken"})
    assert (event["status"], event["worker"], event["params"]) == ("error", "breaks", [7])
    engine.app.operations.act_on_job(event["job_id"], "restart")
    wait_for(lambda: engine.event(event["job_id"])["attempt"] == 3, "it is sent again")
    assert engine.ended(event["job_id"])["status"] == "error"


def test_tasks_that_no_worker_has_hold_up_no_list(engine: CeleryWorld) -> None:
    """Celery's worker drops them, and says so."""
    for n in range(40):
        engine.celery.send_task("theirs", args=[n])
    engine.worker(concurrency=2)
    task = engine.app.submit("enroll", [{"sku": "A-1"}])
    task.wait(timeout=60)
    assert task.progress()["counts"]["finish"] == 1
