"""Records of a program that takes jobs from Redis by itself: they count for what it took, and for nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.redis_world import RedisWorld
from support.untracked import broker_of

from asynctask.errors import Conflict, InputError
from asynctask.integrations.remote import JobRecord, Reporter
from asynctask.task import NobodyPerforms

pytestmark = pytest.mark.one_redis("what the broker does on each is proved by the tests of the broker")


def test_a_record_counts_for_a_job_that_was_taken_and_not_for_one_that_waits_or_is_ours(world: RedisWorld) -> None:
    app = world.app()

    @app.worker(queue="go")
    def enroll(item: dict[str, int]) -> None: ...

    app.record_all([], Reporter("golang", "host:1:a", concurrency=3, queues=["go"]))  # so that jobs are dispatched
    task = app.submit(enroll, [{"n": n} for n in range(3)])
    app.dispatcher.run_pass()
    assert world.raw.llen("queue:go") == 3
    (ours,) = broker_of(app).exchange("host:2:ours", [], ["go"], 1)
    taken, waiting = json.loads(world.raw.rpop("queue:go"))["jid"], json.loads(world.raw.lindex("queue:go", 0))["jid"]

    def said(job_id: str) -> tuple[bool, InputError | Conflict | None]:
        (found,), _ = app.record_all([JobRecord(job_id, "finish", attempt=1)])
        return found.counted, found.refusal()

    for job_id in (waiting, ours.jid):
        counted, error = said(job_id)
        assert (counted, error and (error.status, error.code)) == (False, (409, "held_elsewhere"))
    assert said(taken) == (True, None)
    assert broker_of(app).holds([(taken, 1), (waiting, 1), ours.key]) == {(waiting, 1), ours.key}, (
        "a refusal forgets no copy"
    )
    broker_of(app).exchange("host:2:ours", [ours], [], 0)
    assert json.loads(world.raw.rpop("queue:go"))["jid"] == waiting
    assert [said(job_id)[0] for job_id in (waiting, ours.jid)] == [True, True]
    assert task.progress()["counts"]["finish"] == 3
    assert app.doctor() == []
    assert (world.raw.llen("queue:go"), world.raw.hlen("asynctask:held")) == (0, 0)


def test_a_job_is_restarted_while_a_program_that_may_have_its_worker_works_its_queue(world: RedisWorld) -> None:
    app = world.app()

    @app.worker
    def other(item: dict[str, int]) -> None: ...

    reporter = Reporter("golang", "host:1:a", concurrency=3, queues=["go"])
    failed = [JobRecord("a", "error", "x", attempt=1, worker="Go.Pack", queue="go", args=[1])]
    assert app.record_all(failed, reporter)[0][0].counted
    app.record_all([], replace(reporter, ended=True))
    with pytest.raises(NobodyPerforms, match=r"'Go\.Pack'"):
        app.operations.act_on_job("a", "restart")
    app.record_all([], replace(reporter, name="host:2:b"))
    assert app.operations.act_on_job("a", "restart")["status"] == "enqueue"
    app.dispatcher.run_pass()
    job = json.loads(world.raw.rpop("queue:go"))
    assert (job["class"], job["args"], job["asynctask"]["attempt"]) == ("Go.Pack", [1], 2)
