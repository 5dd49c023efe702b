"""How much a process fetches at a time: short jobs by the hundred, long ones never more than it can begin soon."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from support.hooks import noting
from support.redis_world import RedisWorld

from asynctask.sidekiq.payload import parse
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_redis("what the broker does on each is proved by the tests of the broker")


@pytest.mark.parametrize("tracked", [False, True], ids=["untracked", "tracked"])
def test_jobs_that_become_long_are_given_back_to_whoever_is_idle(world: RedisWorld, tracked: bool) -> None:
    app, gate, ran = world.app(), threading.Event(), []

    @app.worker(name="ours", use_task_event=False)
    def ours(n: int) -> None:
        if n >= 3_000:
            gate.wait(120)
        ran.append(n)

    app.worker(name="long", use_task_event=True)(lambda n: ran.append(n) if gate.wait(120) else None)
    for n in range(3_500):
        world.push("long" if tracked and n >= 3_000 else "ours", n)
    with world.working(app, concurrency=2) as launcher:
        wait_for(lambda: len(ran) == 3_000, "the short ones ran")
        wait_for(lambda: len(launcher.pool.jobs) <= 6, "the long ones lie where others find them")
        if not tracked:
            wait_for(lambda: len(world.waiting()) >= 490, "in their queue")
            found = [parse(text)["args"][0] for text in world.waiting()]
            assert found == sorted(found), "in their order"
        gate.set()
        wait_for(lambda: len(ran) == 3_500, "all ran", timeout=120)
        wait_for(lambda: world.fetched() == 0, "all are acknowledged", timeout=120)
    assert sorted(ran) == list(range(3_500))


def test_a_process_of_short_jobs_does_not_ask_for_each(world: RedisWorld) -> None:
    app, ran = world.app(), []
    app.worker(name="ours", use_task_event=False)(lambda n: ran.append(n))
    for n in range(5_000):
        world.push("ours", n)
    broker: Any = app.broker
    asked: list[Any] = []
    broker.exchange = noting(asked, broker.exchange)
    with world.working(app, concurrency=2):
        wait_for(lambda: len(ran) == 5_000, "all ran")
        wait_for(lambda: world.fetched() == 0, "all are acknowledged")
        rounds = sum(bool(done) or limit > 0 for _, done, _, limit in asked)
    assert rounds < 1_000
