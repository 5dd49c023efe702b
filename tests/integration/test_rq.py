"""RQ with the tracker attached: its own worker command, with and without a work-horse for each job, kills included."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import rq
from rq.command import send_stop_job_command
from rq.exceptions import DuplicateJobError
from rq.suspension import resume, suspend
from support.charges import CHARGED, GIVEN, Charge, check_events, check_lone
from support.drawn import examples
from support.engines import LONE_ENDS
from support.faults import stop
from support.forked import Program
from support.rq_app import NAMESPACE, REDIS, load
from support.servers import RedisServer
from support.world import World

from asynctask.brokers.base import Copy
from asynctask.errors import ConfigError, Conflict, IdInUse, InputError, NotFound, UnknownWorker
from asynctask.testing import wait_for

pytestmark = [
    pytest.mark.needs_redis,
    pytest.mark.one_of("kind", reason="the suite of engines has the one with horses in each run"),
    pytest.mark.one_database(reason="what stands on the ledger is the same on each database"),
]

OVER = ("finish", "failed", "error", "cancelled")
KINDS = ("TrackedWorker", "TrackedSimpleWorker")
redis_knows_no_driver = importlib.util.find_spec("redis.driver_info") is None


class RqWorld:
    """The sending side in this process, and workers started by RQ's own command."""

    def __init__(self, world: World, server: RedisServer, patch: pytest.MonkeyPatch) -> None:
        self.world, self._server = world, server
        self._folder = TemporaryDirectory(prefix="rq-")  # a socket's path must be short
        self.namespace = f"test-{world.folder.name}"
        self.jobs: Any = load(patch, server.url, self.namespace, world.folder, world.store.url)
        self.app = self.jobs.app
        self.engine = self.jobs.engine
        self.app.ensure_schema()
        world.watch()

    def worker(self, kind: str = "TrackedWorker", *more: str, **environ: str) -> Program:
        """``rq worker -w asynctask.integrations.rq.<kind>``; returns when it performs."""
        return self.worker_of(f"asynctask.integrations.rq.{kind}", *more, **environ)

    def worker_of(self, worker_class: str, *more: str, **environ: str) -> Program:
        """The same of any class."""
        known = set(self.recorders())
        started = self.start(worker_class, *more, **environ)
        wait_for(lambda: set(self.recorders()) - known, f"a worker of RQ registers: {self.world.said()[-3000:]}")
        return started

    def start(self, worker_class: str, *more: str, **environ: str) -> Program:
        return self.world.fork(
            "-m",
            "rq.cli",
            "worker",
            "-c",
            "support.rq_main",
            "-w",
            worker_class,
            "-S",
            "json",
            *more,
            **{REDIS: self._server.url, NAMESPACE: self.namespace, "TMPDIR": self._folder.name, **environ},
        )

    def event(self, job_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.app.event(job_id)
        return found

    def ended(self, job_id: str) -> dict[str, Any]:
        """The Event once it is terminal."""
        wait_for(
            lambda: self.event(job_id)["status"] in OVER, f"{job_id} ends; workers said: {self.world.said()[-3000:]}", 60
        )
        return self.event(job_id)

    def recorders(self) -> list[int]:
        """The recording processes of the workers."""
        return [p["pid"] for p in self.app.processes() if p["kind"] == "rq"]

    def horses(self, worker: int) -> list[int]:
        """The work-horses of a worker that perform now: each leads a group of processes of its own."""
        children = map(int, Path(f"/proc/{worker}/task/{worker}/children").read_text().split())
        return [pid for pid in children if os.getpgid(pid) == pid]

    def kill_horse(self, worker: int) -> bool:
        """Whether one performed, and is dead now."""
        try:
            os.kill(self.horses(worker)[0], signal.SIGKILL)
        except (IndexError, ProcessLookupError):
            return False
        return True

    def close(self) -> None:
        self.app.close()
        self.jobs.redis.close()
        self._folder.cleanup()


@pytest.fixture
def engine(world: World, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[RqWorld]:
    found = RqWorld(world, redis_server, monkeypatch)
    yield found
    found.close()


def said(event: dict[str, Any]) -> list[tuple[str, str, int]]:
    return [(m["status"], m["message"], m["attempt"]) for m in event["messages"]]


def items(count: int) -> list[dict[str, Any]]:
    return [{"sku": f"A-{n}", "quantity": 1 + n % 3} for n in range(count)]


# -- lone jobs


@pytest.mark.parametrize("kind", KINDS)
def test_what_rq_does_behind_the_function_decides_the_outcome(engine: RqWorld, kind: str) -> None:
    """RQ fails a job whose on_success raises; a result that it cannot serialize fails none."""
    engine.worker(kind)
    outcomes = {"opaque": ("finish", "Done"), "praised": ("error", "Error: ValueError: in on_success")}
    for name, outcome in outcomes.items():
        sent, listed = getattr(engine.jobs, name).delay(1), engine.app.submit(name, [1])
        listed.wait(timeout=60)
        for event in (engine.ended(sent.id), *listed.events()):
            assert (event["status"], event["messages"][-1]["message"]) == outcome
        assert sent.get_status() == ("finished" if outcome[0] == "finish" else "failed")


def test_a_queue_that_is_not_asynchronous_calls_the_function_and_records_nothing(engine: RqWorld) -> None:
    queue = engine.engine.queue(engine.jobs.queue, is_async=False)
    assert queue.enqueue(engine.jobs.opaque, 1).get_status() == "finished"
    assert engine.world.one("SELECT COUNT(*) FROM events") == 0


def test_a_function_that_is_not_called_with_one_item_takes_no_list(engine: RqWorld) -> None:
    assert "pair" not in engine.app.list_workers()
    with pytest.raises(InputError, match=r"its parameters are \(item, seller\)"):
        engine.app.submit("pair", [1])


def test_a_job_of_another_ledger_is_dropped_unrun(engine: RqWorld) -> None:
    """It was performed and recorded as a lone one."""
    queue = engine.engine.queue(engine.jobs.queue)
    foreign = rq.Queue(queue.name, connection=engine.jobs.redis, serializer=queue.serializer).enqueue(
        "support.rq_app.lone", "foreign", job_id="foreign-2", meta={"asynctask": ["foreign", 2]}
    )
    sent = engine.jobs.lone.delay("own")
    engine.worker("TrackedSimpleWorker")
    engine.ended(sent.id)
    assert [line[1] for line in engine.world.shop.lines()] == ["own"]
    with pytest.raises(NotFound):
        engine.event("foreign")
    assert not rq.job.Job.exists(foreign.id, connection=engine.jobs.redis)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lone_job_has_its_event_before_any_worker_runs_and_its_whole_life_afterwards(engine: RqWorld, kind: str) -> None:
    sent = engine.jobs.lone.delay("A-1", quantity=3)
    waiting = engine.event(sent.id)
    assert (waiting["status"], waiting["params"], waiting["task_id"]) == (
        "enqueue",
        {"args": ["A-1"], "kwargs": {"quantity": 3}},
        None,
    )
    engine.worker(kind)
    event = engine.ended(sent.id)
    assert (event["status"], event["result"], event["attempt"]) == ("finish", {"enrolled": "A-1"}, 1)
    assert said(event) == [("working", "In progress", 1), ("working", "3 of A-1 in stock", 1), ("finish", "Done", 1)]
    wait_for(lambda: sent.get_status() == "finished", "RQ has it, too")
    assert sent.return_value() == {"enrolled": "A-1"}


def test_what_another_queue_of_rq_sends_has_its_event_when_a_worker_takes_it(engine: RqWorld) -> None:
    queue = rq.Queue(engine.jobs.queue, connection=engine.jobs.redis, serializer="json")
    sent = queue.enqueue("support.rq_app.lone", "A-1")
    with pytest.raises(NotFound):
        engine.event(sent.id)
    engine.worker()
    wait_for(engine.world.shop.lines, "it is performed")
    event = engine.ended(sent.id)
    assert (event["status"], event["worker"], event["params"]) == ("finish", "lone", ["A-1"])


def test_the_garbage_collector_leaves_alone_in_a_horse_what_its_worker_had_loaded(engine: RqWorld) -> None:
    """It would write to it, and each page that a forked process writes to is copied."""
    sent = engine.jobs.frozen.delay()
    engine.worker()
    assert engine.ended(sent.id)["result"] > 10_000


@pytest.mark.skipif(redis_knows_no_driver, reason="this redis-py looks up no version for each connection")
def test_the_version_of_the_client_is_looked_up_once_for_all_horses(engine: RqWorld) -> None:
    """It is read from the metadata of the package, 3 of the 20 ms of processor time of a horse."""
    sent = engine.jobs.connected.delay()
    engine.worker()
    assert engine.ended(sent.id)["result"] is True


def test_a_worker_works_again_after_its_end(engine: RqWorld) -> None:
    sent = [engine.jobs.noted.delay(number) for number in (1, 2)]
    worker = engine.worker_of("support.rq_main.Twice", "--max-jobs", "1")
    assert [engine.ended(each.id)["status"] for each in sent] == ["finish", "finish"]
    assert worker.wait(60) == 0, engine.world.said()


def test_a_coroutine_is_performed_and_its_messages_kept(engine: RqWorld) -> None:
    sent = engine.jobs.later.delay("x")
    engine.worker()
    event = engine.ended(sent.id)
    assert (event["status"], event["result"], said(event)[1][1]) == ("finish", "x", "not yet")


@pytest.mark.parametrize(("kind", "text"), [("normal", "seller is not qualified"), ("sold_out", "sold out")])
def test_a_refusal_is_failed_and_rq_does_not_retry_it(engine: RqWorld, kind: str, text: str) -> None:
    sent = engine.jobs.refuse.delay(kind)
    engine.worker()
    event = engine.ended(sent.id)
    assert (event["status"], said(event)[-1]) == ("failed", ("failed", f"Failed: {text}", 1))
    wait_for(lambda: sent.get_status() == "failed", "RQ does not take it for a success")
    assert engine.world.shop.lines() == [["did", kind]]


def test_an_error_says_that_it_waits_for_its_retry_and_the_retry_finishes_it(engine: RqWorld) -> None:
    sent = engine.jobs.shaky.delay(2)
    engine.worker("TrackedSimpleWorker")
    event = engine.ended(sent.id)
    assert (event["status"], event["result"], event["attempt"]) == ("finish", "through", 3)
    assert said(event) == [
        ("working", "In progress", 1),
        ("error", "Error: ValueError: not yet, at 1", 1),
        ("enqueue", "Waiting for retry", 1),
        ("working", "In progress", 2),
        ("error", "Error: ValueError: not yet, at 2", 2),
        ("enqueue", "Waiting for retry", 2),
        ("working", "In progress", 3),
        ("finish", "Done", 3),
    ]


def test_a_function_may_ask_for_another_try(engine: RqWorld) -> None:
    through, over = engine.jobs.asking.delay(1), engine.jobs.asking.delay(9)
    engine.worker()
    event = engine.ended(through.id)
    assert (event["status"], event["result"], event["attempt"]) == ("finish", "through", 2)
    event = engine.ended(over.id)
    assert (event["status"], event["attempt"]) == ("error", 3)


def test_a_job_that_ends_in_another_way_says_so_and_its_only_process_lives(engine: RqWorld) -> None:
    """RQ itself performs a coroutine."""
    ends = {how: end for how, end in LONE_ENDS.items() if "coroutine" not in how}
    sent = {how: engine.jobs.act_lone.delay({"n": n, **item}).id for n, (how, (item, *_)) in enumerate(ends.items())}
    engine.worker("TrackedSimpleWorker")
    for how, (_, status, text, result) in ends.items():
        event = engine.ended(sent[how])
        assert (event["status"], event["result"], event["attempt"]) == (status, result, 1)
        assert (text or "Done") in event["messages"][-1]["message"]


def test_a_failed_job_that_somebody_requeues_in_rq_runs_again(engine: RqWorld) -> None:
    sent = engine.jobs.deadly.delay(1)
    engine.worker()
    engine.ended(sent.id)
    wait_for(lambda: sent.get_status() == "failed", "RQ has it among the failed")
    sent.requeue()
    wait_for(lambda: engine.event(sent.id)["status"] == "finish", f"it runs again: {engine.world.said()[-3000:]}")
    assert [text for _, text, _ in said(engine.event(sent.id))] == [
        "In progress",
        "Worker lost",
        "Sent again",
        "In progress",
        "Done",
    ]


@pytest.mark.parametrize("kept", [True, False])
def test_a_failed_job_that_is_restarted_here_is_requeued_in_rq_or_sent_again(engine: RqWorld, kept: bool) -> None:
    sent = engine.jobs.deadly.delay(1)
    engine.worker()
    engine.ended(sent.id)
    wait_for(lambda: sent.get_status() == "failed", "RQ has it among the failed")
    if not kept:
        sent.delete()
    assert engine.app.operations.act("dead", "restart", [sent.id]).done == 1
    wait_for(lambda: engine.event(sent.id)["status"] == "finish", f"it runs again: {engine.world.said()[-3000:]}")
    assert [text for _, text, _ in said(engine.event(sent.id))][-3:] == ["Retried", "In progress", "Done"]
    wait_for(lambda: sent.get_status(refresh=True) == "finished", "RQ has it, too")
    assert sent.id not in engine.engine.queue(engine.jobs.queue).failed_job_registry


def test_a_job_that_waits_in_rq_is_taken_out_and_one_that_runs_is_not(engine: RqWorld) -> None:
    engine.worker()
    runs = engine.jobs.gated.delay(0)
    wait_for(lambda: engine.event(runs.id)["status"] == "working", "it is known to have begun")
    waits = engine.jobs.noted.delay("never")
    assert engine.app.operations.job(waits.id)["actions"] == ["delete"]
    assert engine.app.operations.act_on_job(waits.id, "delete")["status"] == "cancelled"
    assert not rq.job.Job.exists(waits.id, connection=engine.jobs.redis)
    with pytest.raises(Conflict, match="a worker performs it"):
        engine.app.operations.act_on_job(runs.id, "delete")
    assert engine.engine.revoke(runs.id, "") == "it does not wait in RQ any more"
    (engine.world.folder / "gate").touch()
    last = engine.jobs.noted.delay("last")
    engine.ended(last.id)
    assert ["noted", "never"] not in engine.world.shop.lines()


def test_a_job_that_rq_has_dropped_or_keeps_back_is_deleted(engine: RqWorld) -> None:
    """Before, it was neither on its queue nor could it be restarted, killed or deleted."""
    first = engine.jobs.gated.delay(0)
    cancelled, deleted, deferred = (
        engine.engine.queue(engine.jobs.queue).enqueue(
            engine.jobs.noted, name, depends_on=first if name == "deferred" else None
        )
        for name in ("cancelled", "deleted", "deferred")
    )
    cancelled.cancel()
    deleted.delete()
    engine.worker()
    wait_for(lambda: engine.event(first.id)["status"] == "working", "the first one is performed")
    for each in (cancelled, deleted, deferred):
        with pytest.raises(
            Conflict, match="rq keeps it, on its queue or until its time, and it cannot be started from here"
        ):
            engine.app.operations.act_on_job(each.id, "restart")
        assert engine.app.operations.act_on_job(each.id, "delete")["status"] == "cancelled"
        assert not rq.job.Job.exists(each.id, connection=engine.jobs.redis)
    (engine.world.folder / "gate").touch()
    engine.ended(engine.jobs.noted.delay("last").id)
    assert [line[1] for line in engine.world.shop.lines() if line[0] == "noted"] == ["last"]


def test_callbacks_of_rq_are_called_for_jobs_of_a_task_too(engine: RqWorld) -> None:
    task = engine.app.submit("telling", [1, -1, 2])
    engine.worker()
    assert task.wait(60)["counts"]["finish"] == 2
    assert sorted(engine.world.shop.lines()) == [["failure", "negative"], ["success", "1"], ["success", "2"]]


@pytest.mark.parametrize("with_scheduler", [False, True])
def test_a_worker_says_that_retries_after_an_interval_need_a_scheduler(engine: RqWorld, with_scheduler: bool) -> None:
    engine.worker("TrackedWorker", *(["--with-scheduler"] if with_scheduler else []))
    said = "retries of lone jobs of patient wait for a scheduler of RQ: one worker needs --with-scheduler"
    assert (said in engine.world.said()) is not with_scheduler


def test_a_function_that_opted_out_leaves_no_event(engine: RqWorld) -> None:
    sent = engine.jobs.unseen.delay(1)
    engine.worker()
    wait_for(lambda: sent.get_status() == "finished", "it is performed")
    assert engine.world.shop.lines() == [["unseen", "1"]]
    with pytest.raises(NotFound):
        engine.event(sent.id)


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_over_its_time_limit_ends_as_timed_out(engine: RqWorld, kind: str) -> None:
    sent = engine.jobs.endless.delay()
    engine.worker(kind)
    event = engine.ended(sent.id)
    assert (event["status"], event["problem"]) == ("error", "timeout")
    assert said(event)[-1][1].startswith("Timed out")


def test_a_job_whose_horse_is_killed_is_tried_again_where_rq_retries_it(engine: RqWorld) -> None:
    sent = engine.jobs.gated.delay(7)
    engine.worker()
    ((_, _, pid),) = wait_for(engine.world.shop.lines, "it begins")
    os.kill(int(pid), signal.SIGKILL)
    wait_for(lambda: len(engine.world.shop.lines()) == 2, "it begins again")
    (engine.world.folder / "gate").touch()
    event = engine.ended(sent.id)
    assert (event["status"], event["result"], event["attempt"]) == ("finish", 7, 2)
    assert [text for _, text, _ in said(event)] == [
        "In progress",
        "Worker lost",
        "Waiting for retry",
        "In progress",
        "Done",
    ]


def test_a_job_whose_horse_is_killed_is_over_where_rq_does_not_retry_it(engine: RqWorld) -> None:
    sent = engine.jobs.deadly.delay(1)
    engine.worker()
    event = engine.ended(sent.id)
    assert (event["status"], said(event)[-1]) == ("error", ("error", "Worker lost", 1))
    wait_for(lambda: sent.get_status() == "failed", "RQ has it among the failed")


def test_the_death_of_a_horse_is_recorded_though_a_process_that_it_forked_lives_on(engine: RqWorld) -> None:
    """That has a copy of the horse's connection to the recording process."""
    first, second = engine.jobs.survived.delay(), engine.jobs.noted.delay("x")
    engine.worker()
    event = engine.ended(first.id)
    assert (event["status"], said(event)[-1]) == ("error", ("error", "Worker lost", 1))
    assert engine.ended(second.id)["result"] == "x"
    (engine.world.folder / "gate").touch()


def test_a_job_whose_worker_is_killed_is_finished_by_its_horse(engine: RqWorld) -> None:
    sent = engine.jobs.gated.delay(7)
    worker = engine.worker()
    wait_for(engine.world.shop.lines, "it begins")
    worker.kill()
    worker.wait()
    (engine.world.folder / "gate").touch()
    assert engine.ended(sent.id)["result"] == 7
    wait_for(lambda: not engine.recorders(), "the recording process ends with it")


def test_a_job_whose_worker_and_horse_are_killed_is_tried_again_when_rq_finds_it(engine: RqWorld) -> None:
    sent = engine.jobs.gated.delay(7)
    worker = engine.worker()
    ((_, _, horse),) = wait_for(engine.world.shop.lines, "it begins")
    wait_for(lambda: engine.event(sent.id)["status"] == "working", "it is recorded as begun")
    worker.kill()
    os.kill(int(horse), signal.SIGKILL)
    worker.wait()
    lives = "SELECT COUNT(*) FROM processes WHERE lease_until > ?"
    wait_for(lambda: engine.world.one(lives, engine.app.ledger.now()) == 0, "the recording process ends with them")
    registry = engine.engine.queue(engine.jobs.queue).started_job_registry
    for entry in engine.jobs.redis.zrange(registry.key, 0, -1):
        engine.jobs.redis.zadd(registry.key, {entry: 1})  # RQ takes it for abandoned a minute later
    (engine.world.folder / "gate").touch()
    engine.worker()
    event = engine.ended(sent.id)
    assert (event["status"], event["result"]) == ("finish", 7)
    assert [text for _, text, _ in said(event)].count("Worker lost") == 1


def test_no_job_begins_without_its_recording_process(engine: RqWorld) -> None:
    worker = engine.worker()
    engine.ended(engine.jobs.later.delay("first").id)
    wait_for(lambda: not engine.horses(worker.pid), "the worker waits for the next job")
    (recorder,) = engine.recorders()
    stop(recorder)
    sent = engine.jobs.noted.delay("x")
    wait_for(lambda: engine.horses(worker.pid), "its horse is there")
    assert (engine.world.shop.lines(), engine.event(sent.id)["status"]) == ([], "enqueue")
    os.kill(recorder, signal.SIGKILL)
    assert worker.wait(60) == 1
    assert "its recording process has died, so it stops" in engine.world.said()
    engine.worker()
    assert engine.ended(sent.id)["result"] == "x"
    assert engine.world.shop.lines() == [["noted", "x"]]


def test_a_worker_ends_whose_recording_process_dies_while_it_logs(engine: RqWorld) -> None:
    """RQ stops an idle worker by an exception of a signal handler, and ``logging`` has swallowed it."""
    sent = engine.jobs.noted.delay("x")
    assert engine.start("support.rq_main.Interrupted").wait(60) == 1
    engine.worker()
    assert engine.ended(sent.id)["result"] == "x"


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_under_which_the_recording_process_dies_runs_again_under_the_next_worker(engine: RqWorld, kind: str) -> None:
    task = engine.app.submit("gated", [7])
    worker = engine.worker(kind)
    wait_for(lambda: task.progress()["counts"]["working"] == 1, "it is recorded as begun")
    os.kill(engine.recorders()[0], signal.SIGKILL)
    (engine.world.folder / "gate").touch()
    assert worker.wait(60) == 1
    engine.worker(kind)
    task.wait(timeout=60)
    (event,) = task.events()
    assert (event["status"], event["attempt"]) == ("finish", 2)
    assert [text for _, text, _ in said(event)].count("Worker lost") == 1
    assert engine.app.doctor() == []


@pytest.mark.parametrize("kind", KINDS)
def test_rq_has_no_success_before_it_is_committed_though_it_goes_on_meanwhile(engine: RqWorld, kind: str) -> None:
    sent = engine.jobs.gated.delay(7)
    worker = engine.worker(kind)
    wait_for(lambda: engine.event(sent.id)["status"] == "working", "it is recorded as begun")
    (recorder,) = engine.recorders()
    stop(recorder)
    before = engine.jobs.redis.hget(sent.key, "last_heartbeat")
    (engine.world.folder / "gate").touch()
    wait_for(
        lambda: engine.jobs.redis.hget(sent.key, "last_heartbeat") != before, "RQ goes on after the end of the function"
    )
    assert engine.event(sent.id)["status"] == "working"
    os.kill(recorder, signal.SIGKILL)
    assert worker.wait(60) == 1
    assert (sent.get_status(), sent.return_value()) == ("started", None)
    assert engine.event(sent.id)["status"] == "working"


@pytest.mark.parametrize("of_task", [True, False])
def test_a_job_that_is_stopped_with_the_tools_of_rq_is_over(engine: RqWorld, of_task: bool) -> None:
    sent_id = next(iter(engine.app.submit("gated", [7]).events()))["job_id"] if of_task else engine.jobs.gated.delay(7).id
    engine.worker()
    wait_for(lambda: engine.event(sent_id)["status"] == "working", "it is recorded as begun")
    send_stop_job_command(engine.jobs.redis, f"{sent_id}-1" if of_task else sent_id, serializer=engine.engine.serializer)
    event = engine.ended(sent_id)
    assert (event["status"], said(event)[-1][1]) == ("error", "Given up: it was stopped with the tools of RQ")
    assert engine.app.doctor() == []


def test_what_rq_cannot_import_ends_in_error(engine: RqWorld) -> None:
    sent = engine.jobs.noted.delay("x")
    data = engine.jobs.engine.serializer.dumps(["support.rq_app.gone", None, [], {}])
    engine.jobs.redis.hset(sent.key, "data", data)
    engine.worker()
    event = engine.ended(sent.id)
    assert (event["status"], said(event)[-1][1].startswith("Given up: RQ cannot make it out")) == ("error", True)


@pytest.mark.parametrize(("more", "text"), [(["-S", "pickle"], "set --serializer"), (["-c", "os"], "rq worker -c")])
def test_a_worker_that_could_record_nothing_does_not_start(engine: RqWorld, more: list[str], text: str) -> None:
    worker = engine.start("asynctask.integrations.rq.TrackedWorker", "-u", engine.jobs.os.environ[REDIS], *more)
    assert worker.wait(60) == 1
    assert text in engine.world.said()


def test_a_job_learns_that_its_worker_stops(engine: RqWorld) -> None:
    sent = engine.jobs.stopping.delay()
    worker = engine.worker()
    wait_for(engine.world.shop.lines, "it begins")
    worker.terminate()
    assert engine.ended(sent.id)["result"] is True
    worker.wait(30)
    assert engine.recorders() == []


def test_jobs_that_wait_for_another_run_after_a_success_and_not_after_a_refusal(engine: RqWorld) -> None:
    refused, done = engine.jobs.refuse.delay("normal"), engine.jobs.noted.delay("first")
    never = engine.jobs.noted.delay("never", depends_on=refused)
    second = engine.jobs.noted.delay("second", depends_on=done)
    engine.worker()
    assert engine.ended(second.id)["status"] == "finish"
    last = engine.jobs.noted.delay("last")
    engine.ended(last.id)
    assert [["noted", word] for word in ("first", "second", "last")] == engine.world.shop.lines()[1:]
    assert (engine.event(never.id)["status"], never.get_status()) == ("enqueue", "deferred")


def test_a_worker_of_rq_that_records_nothing_performs_no_tracked_job(engine: RqWorld) -> None:
    sent = engine.jobs.lone.delay("A-1")
    engine.start("rq.worker.Worker")
    wait_for(lambda: sent.get_status() == "failed", "it refuses the job")
    assert engine.world.shop.lines() == []
    assert "--worker-class asynctask.integrations.rq.TrackedWorker" in engine.world.said()


def test_what_cannot_be_tracked_is_refused(engine: RqWorld) -> None:
    with pytest.raises(ConfigError, match="define it in a module"):
        engine.engine.job("default")(lambda: None)
    with pytest.raises(ConfigError, match="another name="):
        engine.engine.job("default", name="lone")(wait_for)
    with pytest.raises(ConfigError, match="do not repeat"):
        engine.engine.queue(engine.jobs.queue).enqueue(engine.jobs.noted, repeat=rq.Repeat(times=2))


# -- another run under the id of a job


@pytest.mark.parametrize("kind", KINDS)
def test_a_send_under_the_id_of_an_ended_job_is_another_run_of_it(engine: RqWorld, kind: str) -> None:
    """RQ failed the second job, and said that another worker class had performed it."""
    queue = engine.engine.queue(engine.jobs.queue)
    engine.worker(kind)
    for attempt, value in ((1, "a"), (2, "b"), (3, "c")):
        sent = queue.enqueue(engine.jobs.noted, value, job_id="nightly")
        event = engine.ended("nightly")
        assert (event["status"], event["attempt"], event["params"], event["result"]) == ("finish", attempt, [value], value)
        wait_for(lambda: sent.get_status(refresh=True) == "finished", "RQ knows it")  # noqa: B023 - called at once
    plain = rq.Queue(engine.jobs.queue, connection=engine.jobs.redis, serializer="json")
    again = plain.enqueue("support.rq_app.noted", "d", job_id="nightly")  # by a program that records nothing
    wait_for(lambda: again.get_status(refresh=True) == "finished", "RQ knows it")
    assert (engine.event("nightly")["attempt"], engine.event("nightly")["params"]) == (4, ["d"])
    assert queue.enqueue_job(again).id == "nightly"
    wait_for(lambda: engine.event("nightly")["attempt"] == 5 and engine.ended("nightly"), "the same object runs again")
    assert [line[1] for line in engine.world.shop.lines()] == ["a", "b", "c", "d", "d"]


def test_a_send_under_the_id_of_an_open_job_is_refused_before_anything_is_queued(engine: RqWorld) -> None:
    queue = engine.engine.queue(engine.jobs.queue)
    queue.enqueue(engine.jobs.noted, "first", job_id="nightly")
    with pytest.raises(IdInUse, match="nightly is in enqueue"):
        queue.enqueue(engine.jobs.noted, "second", job_id="nightly")
    with pytest.raises(DuplicateJobError):
        queue.enqueue(engine.jobs.noted, "third", job_id="nightly", unique=True)
    task = engine.app.submit("noted", ["row"])
    (row,) = wait_for(task.events, "its row")
    with pytest.raises(IdInUse, match=f"of a job of Task {task.id}"):
        queue.enqueue_in(timedelta(hours=1), engine.jobs.noted, "x", job_id=row["job_id"])
    assert queue.scheduled_job_registry.get_job_ids() == []
    engine.worker()
    engine.ended("nightly")
    wait_for(lambda: queue.finished_job_registry.get_job_ids() == ["nightly"], "RQ knows it")
    with pytest.raises(DuplicateJobError):
        queue.enqueue(engine.jobs.noted, "third", job_id="nightly", unique=True)
    assert (engine.event("nightly")["status"], engine.event("nightly")["attempt"]) == ("finish", 1)


@pytest.mark.one_of("of", reason="each way comes up, and so do both")
@pytest.mark.parametrize("of", ["lone", "list"])
@pytest.mark.parametrize("how", ["same", "soon", "now", "plain same", "plain soon", "plain now"])
def test_a_job_that_sends_itself_again_ends_with_that_run(engine: RqWorld, of: str, how: str) -> None:
    """It ended with its first run, and the one that it had sent was not performed."""
    engine.worker("TrackedWorker", "--with-scheduler")
    item = {"n": 1, "how": how}
    if of == "lone":
        event = engine.ended(engine.engine.queue(engine.jobs.queue).enqueue(engine.jobs.polled, item).id)
    else:
        event = row_of(engine, item)
        assert event["params"] == item
    number = 1 if "same" in how else 3
    assert (event["status"], event["result"], event["attempt"]) == ("finish", number, 3)
    assert [text for _, text, _ in said(event)] == [
        "In progress", "Sent again", "In progress", "Sent again", "In progress", "Done",
    ]  # fmt: skip
    assert [line[0] for line in engine.world.shop.lines()] == ["polled"] * 3


def test_runs_that_a_row_asked_for_are_no_retries(engine: RqWorld) -> None:
    """It has one, after the third run."""
    engine.worker("TrackedSimpleWorker")
    event = row_of(engine, {"n": 1, "how": "now", "fails": True})
    assert (event["status"], event["result"], event["attempt"]) == ("finish", 3, 4)


def row_of(engine: RqWorld, item: dict[str, Any]) -> dict[str, Any]:
    """The Event of the one row of a list for ``polled``, once it has ended."""
    task = engine.app.submit("polled", [item])
    wait_for(lambda: task.progress()["done"], f"the list ends; workers said: {engine.world.said()[-3000:]}", 60)
    (row,) = task.events()
    return engine.event(row["job_id"])


# -- Tasks


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_for_a_function_of_rq_is_accounted_for(engine: RqWorld, kind: str) -> None:
    engine.worker(kind)
    task = engine.app.submit(engine.jobs.enroll, [*items(60), {"sku": "bad-1"}, {"sku": "x", "quantity": 0}])
    task.wait(timeout=120)
    progress = task.progress()
    assert (progress["counts"]["finish"], progress["counts"]["failed"], progress["split"]["rejected"]) == (60, 1, 1)
    assert (progress["state"], progress["worker"]) == ("finished", "enroll")
    assert Counter(sku for _, sku, _ in engine.world.shop.lines()) == {f"A-{n}": 1 for n in range(60)} | {"bad-1": 1}
    assert engine.app.doctor() == []


@pytest.mark.parametrize("parallel", [None, 2])
def test_rqs_own_pause_holds_for_a_task(engine: RqWorld, parallel: int | None) -> None:
    for _ in range(2):
        engine.worker()
    task = engine.app.submit(engine.jobs.gated, list(range(8)), parallel=parallel)
    wait_for(lambda: len(engine.world.shop.lines()) == 2, "each worker performs one")
    queue = f"{engine.namespace}-default"
    with pytest.raises(Conflict, match="use its own tools"):
        engine.app.operations.pause(f"rq/{queue}")
    suspend(engine.jobs.redis)
    try:
        (engine.world.folder / "gate").touch()
        there = rq.Queue(queue, connection=engine.jobs.redis)
        wait_for(
            lambda: [each.get_state() for each in rq.Worker.all(queue=there)] == ["suspended"] * 2, "they take no more"
        )
        assert len(engine.world.shop.lines()) == 4, "the two that had begun ended, and no other began"
    finally:
        resume(engine.jobs.redis)
    assert task.wait(120)["counts"]["finish"] == 8
    assert engine.app.doctor() == []


def test_a_job_of_a_task_is_retried_as_its_retry_says_and_leaves_rq_with_its_outcome(engine: RqWorld) -> None:
    engine.worker()
    task = engine.app.submit("shaky", [1, 9])
    task.wait(timeout=60)
    assert [(e["status"], e["attempt"]) for e in task.events()] == [("finish", 2), ("error", 3)]
    assert Counter(attempt for _, attempt in engine.world.shop.lines()) == {"1": 2, "2": 2, "3": 1}
    queue = engine.engine.queue(engine.jobs.queue)
    wait_for(lambda: queue.started_job_registry.get_job_count(cleanup=False) == 0, "none is left in RQ")
    assert (len(queue), len(queue.failed_job_registry), len(queue.finished_job_registry)) == (0, 0, 0)
    assert engine.app.doctor() == []


def test_the_ledger_gives_a_job_again_whose_horse_died_until_it_is_the_cause(engine: RqWorld) -> None:
    engine.worker()
    task = engine.app.submit("deadly", [2, 9])
    task.wait(timeout=60)
    first, second = sorted(task.events(), key=lambda event: str(event["params"]))
    assert (first["status"], first["result"], first["attempt"]) == ("finish", 2, 3)
    assert (second["status"], second["problem"]) == ("error", "poison")
    assert Counter(number for _, number in engine.world.shop.lines()) == {"2": 3, "9": 3}
    assert engine.app.doctor() == []


def test_a_list_is_exact_though_horses_recorder_and_worker_are_killed(engine: RqWorld) -> None:
    worker = engine.worker()
    count = examples(60, 120)
    task = engine.app.submit("enroll", items(count))

    def performed(share: int) -> None:
        wait_for(lambda: task.progress()["progress"]["done"] > share, f"it goes on: {engine.world.said()[-3000:]}", 60)

    performed(count // 6)
    wait_for(lambda: engine.kill_horse(worker.pid), "one performs", every=0.001)
    performed(count * 3 // 8)
    os.kill(engine.recorders()[0], signal.SIGKILL)
    assert worker.wait(60) == 1
    worker = engine.worker()
    performed(count * 5 // 8)
    worker.kill()
    worker.wait()
    engine.worker()
    task.wait(timeout=120)
    assert task.progress()["counts"]["finish"] == count
    assert {sku for _, sku, _ in engine.world.shop.lines()} == {f"A-{n}" for n in range(count)}
    assert engine.app.doctor() == []


def test_a_list_that_nobody_works_waits_in_the_ledger_and_not_in_rq(engine: RqWorld) -> None:
    task = engine.app.submit("enroll", items(5))
    engine.app.dispatcher.run_pass()
    assert task.progress()["control"]["in_flight"] == 0
    with pytest.raises(InputError):
        engine.app.submit("unseen", [1])
    payload = json.dumps({"class": "unseen", "args": [1]})
    with pytest.raises(UnknownWorker):
        engine.engine.push([Copy("job-1", 1, engine.app.workers["enroll"].queue, payload, task_id=1)])


def test_items_reach_the_worker_as_they_were_given(engine: RqWorld) -> None:
    """Without the input kept, of a ``model_dump`` for example: stars for the password, cents times 100."""
    engine.worker()
    task = engine.app.submit("charge", [GIVEN, Charge(**GIVEN)])
    (refused,) = task.rejects()
    assert (refused["row"], refused["errors"][0]["column"]) == (2, "price")
    task.wait(timeout=60)
    check_events(task.events())
    lone = engine.jobs.charged.delay(GIVEN).id
    check_lone(engine.event(lone))


def test_jobs_that_are_sent_together_and_one_of_them_refused_leave_none_waiting(engine: RqWorld) -> None:
    """The first one waited for ever, and its id could not be used again."""
    queue = engine.engine.queue(engine.jobs.queue)
    noted = engine.jobs.noted
    queue.enqueue(noted, "open", job_id="open")
    with pytest.raises(IdInUse):
        queue.enqueue_many([queue.prepare_data(noted, (name,), job_id=name) for name in ("first", "open", "last")])
    assert queue.get_job_ids() == ["open"]
    assert (engine.event("first")["status"], engine.event("open")["status"]) == ("error", "enqueue")
    assert [job.id for job in queue.enqueue_many([queue.prepare_data(noted, ("again",), job_id="first")])] == ["first"]
    engine.worker()
    assert engine.ended("first")["result"] == "again"


def test_a_program_that_records_nothing_sends_an_ended_job_of_rq_again(engine: RqWorld) -> None:
    """RQ failed it, because it had begun before."""
    queue = rq.Queue(engine.jobs.queue, connection=engine.jobs.redis, serializer="json")
    engine.worker()
    sent = engine.jobs.noted.delay("once")
    engine.ended(sent.id)
    wait_for(lambda: sent.get_status() == "finished", "RQ knows it")
    queue.enqueue_job(rq.job.Job.fetch(sent.id, connection=engine.jobs.redis, serializer=queue.serializer))
    wait_for(lambda: engine.event(sent.id)["attempt"] == 2, "it is another run")
    assert engine.ended(sent.id)["status"] == "finish"
    assert [line[1] for line in engine.world.shop.lines()] == ["once", "once"]


def test_people_see_no_secret_of_a_job_that_sends_itself_again(engine: RqWorld) -> None:
    engine.worker()
    event = engine.ended(engine.jobs.recharged.delay(GIVEN).id)
    assert (event["status"], event["result"], event["attempt"]) == ("finish", CHARGED, 3)
    assert GIVEN["password"] not in str(event)


def test_functions_that_no_worker_has_hold_up_no_list(engine: RqWorld) -> None:
    """RQ's worker fails them."""
    queue = rq.Queue("default", connection=engine.jobs.redis, serializer="json")
    for _ in range(12):
        queue.enqueue("theirs.job")
    engine.worker()
    task = engine.app.submit("enroll", [{"sku": "A-1"}])
    task.wait(timeout=60)
    assert task.progress()["counts"]["finish"] == 1
