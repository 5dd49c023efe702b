"""Huey with the tracker attached: what the suite of engines does not ask of each engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import pytest
from huey import RedisHuey, SqliteHuey
from huey.api import Huey
from huey.exceptions import TaskException
from support.engines import partial_of
from support.forked import Program
from support.huey_app import KIND, NAME, REDIS, make
from support.servers import RedisServer
from support.world import World

from asynctask import AsyncTask
from asynctask.clock import SECOND
from asynctask.errors import ConfigError, IdInUse, InputError, Unavailable
from asynctask.integrations.huey import ATTEMPT, attach
from asynctask.testing import wait_for

pytestmark = [
    pytest.mark.needs_redis,
    pytest.mark.one_database(reason="what stands on the ledger is the same on each database"),
]

OVER = ("finish", "failed", "error", "cancelled")


class HueyWorld:
    """The sending side in this process, and consumers started by Huey's own command."""

    def __init__(self, world: World, server: RedisServer, kind: str = "redis") -> None:
        self.world = world
        self._environ = {REDIS: server.url, NAME: f"test{world.folder.name}", KIND: kind}
        self.jobs = make(world.folder, {**self._environ, "TEST_DATABASE": world.store.url})
        self.app: AsyncTask = self.jobs.app
        self.huey: Any = self.jobs.huey
        self.app.ensure_schema()

    def start(self, *more: str) -> Program:
        """``huey_consumer``; returns when it performs."""
        known = {p["pid"] for p in self.app.processes()}
        command = ("-m", "huey.bin.huey_consumer", "support.huey_app.huey", "-g", "TERM", "-w", "2", *more)
        started = self.world.fork(*command, **self._environ)
        wait_for(
            lambda: {p["pid"] for p in self.app.processes() if p["kind"] == "huey"} - known,
            f"a consumer registers: {self.world.said()[-3000:]}",
        )
        return started

    def ended(self, job_id: str) -> dict[str, Any]:
        """The Event once it is terminal."""
        wait_for(lambda: self.app.event(job_id)["status"] in OVER, f"{job_id} ends: {self.world.said()[-3000:]}", 60)
        found: dict[str, Any] = self.app.event(job_id)
        return found

    def outcome(self, job_id: str) -> tuple[str, str]:
        """The status of an Event that has ended, and its last message."""
        event = self.ended(job_id)
        return event["status"], event["messages"][-1]["message"]

    def noted(self, verb: str) -> list[list[str]]:
        return [line[1:] for line in self.world.shop.lines() if line[0] == verb]

    def close(self) -> None:
        self.huey.flush()
        self.app.close()
        self.huey.storage.close()


@pytest.fixture
def engine(world: World, redis_server: RedisServer) -> Iterator[HueyWorld]:
    found = HueyWorld(world, redis_server)
    yield found
    found.close()


def statuses(event: Mapping[str, Any]) -> list[str]:
    return [message["status"] for message in event["messages"]]


# -- sending


def test_a_task_is_declared_after_attach_with_a_name_of_its_own(world: World) -> None:
    app, huey = world.app(), Huey("shop", storage_class=SqliteHuey.storage_class, filename=str(world.folder / "h.db"))
    huey.task(name="early")(partial_of(world.folder))
    with pytest.raises(ConfigError, match=r"before the first task of Huey: support\.engines\.early"):
        attach(huey, app)
    huey = SqliteHuey("shop", filename=str(world.folder / "h.db"))
    attach(huey, app)
    huey.task(name="act")(partial_of(world.folder))
    with pytest.raises(ConfigError, match="two tasks of Huey are named 'act'"):
        huey.task(name="act")(partial_of(world.folder))
    with pytest.raises(ConfigError, match="attached to this application already"):
        attach(RedisHuey("other"), app)
    with pytest.raises(ConfigError, match="of the type thread or process, not 'greenlet'"):
        huey.create_consumer(worker_type="greenlet")
    huey.storage.close()


def test_nothing_is_sent_that_cannot_be_recorded(engine: HueyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="1 to 64 characters"):
        engine.jobs.double(1, id="x" * 65)
    sent = engine.jobs.double(1)
    with pytest.raises(IdInUse):
        engine.jobs.double(2, id=sent.id)

    def away(*_: Any, **__: Any) -> None:
        raise Unavailable("the ledger is away")

    with monkeypatch.context() as patch:
        patch.setattr("asynctask.integrations.base.send", away)
        with pytest.raises(Unavailable):
            engine.jobs.double(3)
    assert engine.huey.pending_count() == 1
    with monkeypatch.context() as patch:
        patch.setattr(engine.huey.storage, "enqueue", away)
        with pytest.raises(Unavailable):
            engine.jobs.double(4, id="four")
    assert engine.outcome("four") == ("error", "Given up: it could not be sent: Unavailable: the ledger is away")


def test_a_task_called_as_a_function_and_one_in_immediate_mode_leave_no_event(engine: HueyWorld) -> None:
    assert engine.jobs.double.call_local(4) == 8
    engine.huey.immediate = True
    assert engine.jobs.double(5).get() == 10
    engine.huey.immediate = False
    assert engine.jobs.untracked(1).id
    engine.start()
    wait_for(lambda: engine.noted("untracked"), "it is performed")
    assert engine.world.one("SELECT COUNT(*) FROM events") == 0


# -- lists


def test_a_list_of_a_task_with_a_rate_starts_at_that_rate(engine: HueyWorld) -> None:
    engine.start()
    began = engine.app.ledger.now()
    task = engine.app.submit("call", [{"n": n} for n in range(20)])
    assert task.wait(60)["counts"]["finish"] == 20
    took = (engine.app.ledger.now() - began) / SECOND
    assert 10 * (took + 0.25) + 1 >= 20
    (limit,) = engine.app.rates.all()
    assert (limit["name"], limit["rate"], limit["workers"]) == ("shop-api", "10/s", ["call"])


# -- lone jobs


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_results_pipelines_and_contexts_are_hueys(engine: HueyWorld, workers: str) -> None:
    engine.start("-k", workers)
    assert engine.jobs.double(4).get(blocking=True, timeout=60) == 8
    both = [*engine.huey.enqueue(engine.jobs.double.s(1).then(engine.jobs.double).then(engine.jobs.own_id))]
    assert [each.get(blocking=True, timeout=60) for each in both] == [2, 4, both[2].id]
    assert [engine.ended(each.id)["result"] for each in both] == [2, 4, both[2].id]
    assert [engine.ended(each.id)["params"] for each in both] == [[1], [2], [4]]
    told = engine.jobs.pair(sku="A", count=2)
    assert (engine.ended(told.id)["result"], engine.ended(told.id)["params"]) == (
        "A2",
        {"args": [], "kwargs": {"sku": "A", "count": 2}},
    )


def test_a_refusal_ends_its_pipeline_and_an_error_is_hueys(engine: HueyWorld) -> None:
    engine.start()
    sent = [*engine.huey.enqueue(engine.jobs.refuse.s("normal").then(engine.jobs.note))]
    assert engine.outcome(sent[0].id) == ("failed", "Failed: seller is not qualified")
    with pytest.raises(TaskException):
        sent[0].get(blocking=True, timeout=60)
    assert engine.outcome(engine.jobs.refuse("sold out").id) == ("failed", "Failed: sold out"), "by failed_on"
    gone = engine.jobs.shaky(9)
    event = engine.ended(gone.id)
    assert (event["status"], event["attempt"], event["retries"]) == ("error", 3, 2)
    engine.ended(engine.jobs.double(1).id)
    assert engine.noted("note") == []


def test_a_retry_waits_as_long_as_huey_says(engine: HueyWorld) -> None:
    engine.start()
    asked = engine.ended(engine.jobs.asking(1.5).id)
    assert (asked["status"], asked["attempt"]) == ("finish", 2)
    first, second = (m["at"] for m in asked["messages"] if m["status"] == "working")
    assert second > first
    task = engine.app.submit("asking", [1.5])
    task.wait(60)
    (event,) = task.events()
    assert (event["status"], event["attempt"], statuses(event)) == (
        "finish",
        2,
        ["working", "error", "enqueue", "working", "finish"],
    )


def test_what_is_scheduled_has_its_event_and_runs_once(engine: HueyWorld) -> None:
    engine.start()
    sent = engine.jobs.double.schedule((3,), delay=timedelta(seconds=1))
    event = engine.app.event(sent.id)
    assert (event["status"], event["params"]) == ("enqueue", [3])
    assert (engine.ended(sent.id)["result"], engine.ended(sent.id)["attempt"]) == (6, 1)


def test_what_is_revoked_or_expired_ends(engine: HueyWorld) -> None:
    revoked, expired = engine.jobs.double(1), engine.jobs.double(2, expires=0.001)
    revoked.revoke()
    engine.start()
    assert engine.outcome(revoked.id) == ("error", "Given up: revoked in Huey")
    assert engine.outcome(expired.id) == ("error", "Given up: expired in Huey")


def test_a_hook_that_cancels_a_task_ends_it(engine: HueyWorld) -> None:
    engine.start()
    why = ("error", "Given up: a hook of Huey cancelled it before it began")
    assert engine.outcome(engine.jobs.double(13).id) == why
    task = engine.app.submit("double", [13])
    task.wait(60)
    assert task.counts["error"] == 1


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_a_lone_job_of_a_killed_consumer_is_sent_again_by_the_ledger(engine: HueyWorld, workers: str) -> None:
    """Huey has forgotten it."""
    engine.start("-k", workers)
    sent = engine.jobs.deadly(1)
    wait_for(lambda: engine.noted("began"), "it begins")
    wait_for(lambda: engine.app.event(sent.id)["status"] == "working", "the ledger knows that it has begun")
    for pid in {p["pid"] for p in engine.app.processes() if p["kind"] == "huey"}:
        os.kill(pid, signal.SIGKILL)
    engine.start("-k", workers)
    (engine.world.folder / "gate").touch()
    event = engine.ended(sent.id)
    assert (event["status"], event["result"], event["attempt"]) == ("finish", 1, 2)
    assert "Worker lost" in [message["message"] for message in event["messages"]]
    assert engine.app.doctor() == []


def test_a_time_limit_is_one_in_worker_processes(engine: HueyWorld) -> None:
    engine.start("-k", "process")
    event = engine.ended(engine.jobs.endless().id)
    assert (event["status"], event["problem"]) == ("error", "timeout")


# -- lists


@pytest.mark.parametrize("kind", ["redis", "sqlite", "priority"])
def test_a_list_is_exact_on_each_storage(world: World, redis_server: RedisServer, kind: str) -> None:
    engine = HueyWorld(world, redis_server, kind)
    try:
        consumer = engine.start()
        task = engine.app.submit("enroll", [{"sku": f"A-{n}" if n % 4 else "bad"} for n in range(40)])
        task.wait(120)
        assert (task.counts["finish"], task.counts["failed"]) == (30, 10)
        assert engine.app.submit("enroll", [{"quantity": 1}]).progress()["state"] == "rejected", "by the model"
        assert engine.huey.result_count() == 0, "Huey keeps nothing of a job of a Task"
        consumer.terminate()
        assert consumer.wait(60) == 0
        assert [p for p in engine.app.processes() if p["kind"] == "huey"] == []
        assert engine.app.doctor() == []
    finally:
        engine.close()


def test_a_message_with_a_broken_attempt_is_dropped_and_its_job_runs(engine: HueyWorld) -> None:
    broken = (0, -1, 2**31, True, "1", None, [1])
    jobs = [engine.jobs.double(n).id for n in range(len(broken))]
    engine.huey.storage.flush_queue()
    for n, (job_id, attempt) in enumerate(zip(jobs, broken, strict=True)):
        task = engine.jobs.double.task_class((n,), {ATTEMPT: attempt}, id=job_id)
        engine.huey.storage.enqueue(engine.huey.serialize_task(task))
    engine.start()
    for n, job_id in enumerate(jobs):
        event = engine.ended(job_id)
        assert (event["status"], event["result"]) == ("finish", 2 * n), broken[n]
    assert engine.world.said().count("broken_attempt") == len(broken)


def test_a_job_does_not_pass_its_attempt_on(engine: HueyWorld) -> None:
    engine.start()
    task = engine.app.submit("passing", [{"n": 1}])
    task.wait(60)
    event = engine.ended(str(task.events()[0]["result"]))
    assert (event["status"], event["task_id"], event["result"]) == ("finish", None, 4)
