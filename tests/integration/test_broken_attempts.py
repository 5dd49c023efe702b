"""A message whose attempt a program has forged or broken: one error, and no job is lost, performed twice or left open."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

import dramatiq
import pytest
import rq
import sqlalchemy as sa
from support import engines
from support.databases import Databases
from support.engine_suite import performed
from support.engine_worker import CELERY, DRAMATIQ, RQ, Harness
from support.foreign import works
from support.redis_world import RedisWorld
from support.servers import RedisServer

from asynctask import AsyncTask, maintenance
from asynctask.brokers.base import Copy
from asynctask.database.tables import events
from asynctask.errors import InputError, NotFound
from asynctask.integrations.celery import AGAIN, ATTEMPT
from asynctask.integrations.rq import FENCE
from asynctask.ledger.standalone import Arrival, enqueue
from asynctask.task import TaskHandle
from asynctask.testing import wait_for

BROKEN: Final = (0, -1, 2**31, 2**63, 10**30, True, "1", 1.5, None, [1], {"a": 1}, "x" * 100_000)
"""What a message may name in the place of an attempt."""


def taken(app: AsyncTask, broker: Any, queue: str, count: int, patch: pytest.MonkeyPatch) -> tuple[TaskHandle, list[Copy]]:
    """A list, and the copies of its jobs, which are dispatched and lost on their way to the broker."""
    found: list[Copy] = []
    with patch.context() as within:
        within.setattr(broker, "push", found.extend)
        works(app, "celery@here:1:a", [queue], count)
        task = app.submit("act", [{"n": n} for n in range(count)])
        app.dispatcher.run_pass()  # no process of the engine runs yet
        assert len(found) == count
        works(app, "celery@here:1:a", [queue], 0)
    return task, found


class Kind(NamedTuple):
    """An engine and the command of its worker."""

    name: str
    command: tuple[str, ...]


KINDS: Final = {
    "celery threads": Kind("celery", (*CELERY, "-P", "threads")),
    "celery prefork": Kind("celery", (*CELERY, "-P", "prefork")),
    "dramatiq": Kind("dramatiq", DRAMATIQ),
    "rq": Kind("rq", (*RQ, "asynctask.integrations.rq.TrackedWorker")),
    "rq in one process": Kind("rq", (*RQ, "asynctask.integrations.rq.TrackedSimpleWorker")),
}


class Forger:
    """An engine whose messages the test writes, with the fields and serializers of the engine's own."""

    def __init__(self, kind: Kind, folder: Path, harness: Harness) -> None:
        self.kind, self.folder, self.harness, self.app = kind.name, folder, harness, harness.app
        self.queue = engines.queue_of(folder)
        self._numbers = count(100)  # RQ keeps one job of each id

    def event_of_lone(self, job_id: str, item: dict[str, Any] | None) -> None:
        """The Event of a lone job, without its message. Without an ``item``, its arguments are not kept."""
        params = None if item is None else [item]
        job = Arrival(job_id, None, "act", f"{self.kind}/{self.queue}", params)
        enqueue(self.app.ledger, [job], options={"engine": self.kind})

    def forge(self, job_id: str, attempt: Any, item: dict[str, Any]) -> None:
        """Sends a message of this job that names this attempt."""
        getattr(self, f"_forge_{self.kind}")(job_id, attempt, item)

    def _forge_celery(self, job_id: str, attempt: Any, item: dict[str, Any]) -> None:
        is_again = next(self._numbers) % 2 and attempt is not None
        headers = {AGAIN: [job_id, attempt]} if is_again else {ATTEMPT: attempt}
        self.harness.engine.send_task.__wrapped__("act", [item], task_id=job_id, headers=headers)

    def _forge_dramatiq(self, job_id: str, attempt: Any, item: dict[str, Any]) -> None:
        options = {ATTEMPT: attempt}
        self.harness.engine.enqueue(dramatiq.Message(self.queue, "act", (item,), {}, options, message_id=job_id))

    def _forge_rq(self, job_id: str, attempt: Any, item: dict[str, Any]) -> None:
        self.send_rq(f"{job_id}-{next(self._numbers)}", {FENCE: [job_id, attempt]}, item)

    def send_rq(self, rq_id: str, meta: Any, item: dict[str, Any]) -> None:
        engine = self.harness.engine
        queue = rq.Queue(self.queue, connection=engine.connection, serializer=engine.serializer)
        queue.enqueue_call("support.engines.rq_act", (item,), job_id=rq_id, meta=meta, result_ttl=0)

    def errors(self) -> int:
        """How many messages the log names as broken."""
        log = self.folder / "worker.log"
        return log.read_text().count("] broken_attempt ") if log.exists() else 0

    def still_open(self) -> list[str]:
        """The jobs that wait or run."""
        with self.app.ledger.database.read() as connection:
            is_open = events.c.status.in_(["enqueue", "working"])
            return list(connection.execute(sa.select(events.c.job_id).where(is_open)).scalars())


@pytest.fixture(params=[name for name in KINDS if name != "rq in one process"])
def forger(
    request: pytest.FixtureRequest, tmp_path: Path, databases: Databases, redis_server: RedisServer, monkeypatch: Any
) -> Iterator[Forger]:
    kind = KINDS[request.param]
    monkeypatch.setenv(engines.BREAK, engines.eager.__name__)
    harness = Harness(kind.name, kind.command, tmp_path, databases.fresh("sqlite", tmp_path), redis_server.url)
    yield Forger(kind, tmp_path, harness)
    harness.close()


pytestmark = [
    pytest.mark.needs_redis,
    pytest.mark.one_database(reason="what stands on the ledger is the same on each database"),
]


def test_a_broken_attempt_is_one_error_and_each_job_is_performed_once(
    forger: Forger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery's children put a message with a number of 100 bits back for ever, and the worker of RQ ended by it. RQ
    performed a job under the id of an older copy, as a lone one; the Event of a lone job waited for ever."""
    app, many = forger.app, len(BROKEN)
    task, copies = taken(app, app.engines[forger.kind], f"{forger.kind}/{forger.queue}", many, monkeypatch)
    for copy, value in zip(copies, BROKEN, strict=True):
        forger.forge(copy.jid, value, json.loads(copy.payload)["args"][0])
    lone = {f"lone-{n}": value for n, value in enumerate((*BROKEN, 7))}  # 7: a valid one, and no lone job has any
    for n, (job_id, value) in enumerate(lone.items(), many):
        forger.event_of_lone(job_id, {"n": n})
        forger.forge(job_id, value, {"n": n})
    forger.event_of_lone("unkept", None)
    refused, last = many + len(lone) + 2, many + len(lone)
    for n, (job_id, value) in enumerate((("unkept", 0), ("unknown", -1)), last):
        forger.forge(job_id, value, {"n": n})

    forger.harness.start(2)
    runs = app.submit("act", [{"n": 99, "do": "wait"}])
    (running,) = wait_for(lambda: [each for each in runs.events() if each["status"] == "working"], "one runs")
    for value in BROKEN:
        forger.forge(running["job_id"], value, {"n": 99})
    wait_for(lambda: forger.errors() > refused, "one for the running job is refused")
    assert app.event(running["job_id"])["status"] == "working"
    (forger.folder / "gate").touch()

    wait_for(lambda: not forger.still_open(), "each job ends", 60)
    wait_for(lambda: forger.errors() == refused + many, "each message is refused")
    assert sorted(performed(forger.folder, "did")) == [*range(last), 99]
    assert task.wait(timeout=60)["counts"]["finish"] == many
    assert app.event(running["job_id"])["attempt"] == 1
    for job_id in lone:
        event = app.event(job_id)
        assert (event["status"], event["attempt"]) == ("finish", 2)
        assert "Its message had no valid attempt" in event["messages"][0]["message"]
    unkept = app.event("unkept")
    assert (unkept["status"], unkept["messages"][-1]["message"]) == (
        "error",
        "Given up: Its message had no valid attempt: 0",
    )
    with pytest.raises(NotFound):
        app.event("unknown")
    assert (forger.errors(), forger.harness.has_ended(), app.doctor()) == (refused + many, False, [])


@pytest.mark.parametrize("forger", ["rq", "rq in one process"], indirect=True)
def test_a_job_of_rq_that_no_event_can_have_is_failed_and_its_worker_works_on(forger: Forger) -> None:
    """A worker without work-horses ended by each, on a database that refuses the id."""
    app, engine, long = forger.app, forger.harness.engine, "x" * 65
    with pytest.raises(InputError, match="at most 64 characters: send it with a shorter job_id"):
        engine.queue(forger.queue).enqueue_call("support.engines.rq_act", ({"n": 1},), job_id=long)
    forger.send_rq(long, {}, {"n": 2})
    forger.send_rq("no-arguments", {}, {"n": 3})
    raw = engine.serializer.dumps(["support.engines.rq_act", None, 5, {}])
    engine.connection.hset("rq:job:no-arguments", "data", zlib.compress(raw))
    for number, meta in enumerate(([1, 2], "xy", {FENCE: 7}, {FENCE: [1, 2, 3]}, {FENCE: ["other", 3]}), 10):
        forger.send_rq(f"meta-{number}", {}, {"n": number})
        engine.connection.hset(f"rq:job:meta-{number}", "meta", engine.serializer.dumps(meta))
    forger.harness.start(1)
    forger.send_rq("last", {}, {"n": 4})
    wait_for(lambda: 4 in performed(forger.folder, "did"), f"the worker works on: {forger.harness.said()}", 60)
    wait_for(lambda: not forger.still_open(), "each job ends")
    failed = rq.Queue(forger.queue, connection=engine.connection).failed_job_registry
    assert sorted(failed.get_job_ids()) == ["no-arguments", long]
    assert sorted(performed(forger.folder, "did")) == [4, 10, 11, 14], "a meta of another job is no fence"
    assert (forger.errors(), forger.harness.has_ended()) == (2, False)
    with pytest.raises(NotFound):
        app.event(long)


def test_a_broken_attempt_in_redis_is_none_and_each_job_is_performed_once(
    tmp_path: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = RedisWorld(tmp_path, redis_server)
    app, done = world.app(), list[int]()

    @app.worker(name="act", retry=0)
    def act(item: dict[str, Any]) -> None:
        done.append(item["n"])

    monkeypatch.setitem(maintenance.EVERY_S, "find_lost", 0.2)
    task, copies = taken(app, app.broker, "default", len(BROKEN), monkeypatch)
    for copy, value in zip(copies, BROKEN, strict=True):
        envelope = {"jid": copy.jid, "attempt": value, "task_id": copy.task_id}
        world.raw.lpush("queue:default", json.dumps({**json.loads(copy.payload), "asynctask": envelope}))
    with world.working(app):
        assert task.wait(timeout=60)["counts"]["finish"] == len(BROKEN)
    assert (sorted(done), app.doctor()) == ([*range(len(BROKEN))], [])
    world.close()
