"""Which queues of Redis can be paused: those that something names, so that a misspelt one is not taken for paused."""

from __future__ import annotations

import pytest
from support.redis_world import RedisWorld

from asynctask.errors import NotFound

pytestmark = pytest.mark.one_redis("what the broker does on each is proved by the tests of the broker")


def test_only_a_queue_that_something_names_is_paused(world: RedisWorld) -> None:
    app = world.app(queues="default of-a-setting")

    @app.worker(queue="of-a-worker")
    def tracked(item: dict[str, int]) -> None: ...

    app.worker(lambda item: None, name="loose", queue="low", use_task_event=False, retry_queue="of-retries")
    app.submit(tracked, [{"n": 1}], queue="of-a-task")
    tracked.set(queue="of-a-job").perform_in(3_600, {"n": 2})
    world.push("Shop::Mail", 1, queue="of-another-program")
    there = ["default", "callbacks", "of-a-setting", "of-a-worker", "low", "of-retries", "of-a-task", "of-a-job"]
    there += ["of-another-program", "of-a-process"]
    with world.working(app, "of-a-process"):
        for name in there:
            assert app.operations.pause(name), name
    for name in there:
        assert app.operations.unpause(name), "what is paused is known by that"
    for verb in (app.operations.pause, app.operations.unpause):
        for name in ("nobodys", "of-a-process"):
            with pytest.raises(NotFound, match=name):
                verb(name)
    assert not world.raw.exists("paused")
