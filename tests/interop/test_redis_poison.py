"""What lies in a queue and is no job: it stops no worker, it is not lost, and it is told once."""

from __future__ import annotations

import pytest
import structlog
from support.redis_dead import buried
from support.redis_world import RedisWorld
from support.untracked import broker_of

from asynctask.testing import wait_for

pytestmark = pytest.mark.one_redis("what the broker does on each is proved by the tests of the broker")

NO_JOBS: dict[str, bytes] = {
    "no JSON": b"no job",
    "nothing": b"",
    "half a job": b'{"class":"ours","args":[',
    "an array": b"[1]",
    "a number": b"5",
    "null": b"null",
    "no UTF-8": b'{"class":"ours","args":["\xff\xfe"]}',
    "a byte order mark": b'\xef\xbb\xbf{"class":"ours","args":[]}',
    "NaN": b'{"class":"ours","args":[NaN],"jid":"a"}',
    "half a character": b'{"class":"ours","args":["\\ud800"],"jid":"a"}',
    "nesting": b'{"class":"ours","args":' + b"[" * 200 + b"]" * 200 + b"}",
    "nesting without an end": b'{"class":"ours","args":' + b"[" * 100_000,
    "no class": b'{"args":[],"jid":"a","queue":"default"}',
    "a class that is a number": b'{"class":7,"args":[]}',
    "no args": b'{"class":"ours","jid":"a","queue":"default"}',
    "no args, jid and queue": b'{"class":"ours"}',
    "args that are an object": b'{"class":"ours","args":{"a":1}}',
    "an envelope of ours that is wrong": b'{"class":"ours","asynctask":{"jid":"a","attempt":-1}}',
    "a NUL": b'{"class":"ours","args":["\x00"]}',
}


def assert_buried(world: RedisWorld, texts: list[bytes]) -> None:
    """These lie between jobs: every job runs, and they are among the dead as they were, each told of once."""
    app, ran = world.app(), []
    app.worker(name="ours", use_task_event=False)(lambda *args: ran.append(args))
    world.push("ours", 0)
    for n, text in enumerate(texts, 1):
        world.push_text(text)
        world.push("ours", n)
    with structlog.testing.capture_logs() as logs, world.working(app):
        wait_for(lambda: len(ran) == len(texts) + 1, "every job ran")
        wait_for(lambda: world.raw.zcard("dead") == len(texts), "the rest is among the dead")
        wait_for(lambda: world.fetched() == 0, "nothing is left in this process")
    assert sorted(world.members("dead")) == sorted(map(buried, texts))
    assert sorted(ran) == [(n,) for n in range(len(texts) + 1)]
    assert world.waiting() == []
    assert [line["event"] for line in logs if line["log_level"] == "error"] == ["undecodable_job"] * len(texts)


@pytest.mark.parametrize("what", NO_JOBS)
def test_what_is_no_job_goes_to_the_dead_as_it_was(world: RedisWorld, what: str) -> None:
    assert_buried(world, [NO_JOBS[what]])


def test_a_queue_full_of_it_is_worked_off(world: RedisWorld) -> None:
    assert_buried(world, [text + b" " * n for n in range(20) for text in NO_JOBS.values()])


def test_a_text_of_50_mb_goes_to_the_dead_as_it_was(world: RedisWorld) -> None:
    assert_buried(world, [b'{"class":"ours","args":["' + b"x" * 50_000_000 + b'"]}'])


def test_a_job_without_id_and_queue_runs(world: RedisWorld) -> None:
    app, ran = world.app(), []
    app.worker(name="ours", use_task_event=False)(lambda n: ran.append(n))
    for n in range(3):
        world.push_text(b'{"class":"ours","args":[%d]}' % (n // 2))
    with world.working(app):
        wait_for(lambda: sorted(ran) == [0, 0, 1], "each ran")
        wait_for(lambda: world.fetched() == 0, "and was acknowledged")
    assert world.members("dead") == []


@pytest.mark.parametrize("name", ["retry", "schedule"])
def test_what_is_no_job_and_lies_in_a_set_goes_to_the_dead_as_it_was(world: RedisWorld, name: str) -> None:
    app = world.app()
    texts = [text for text in NO_JOBS.values() if len(text) < 1_000]
    world.raw.zadd(name, {text: n for n, text in enumerate(texts)})
    now = app.clock.now()
    app.ensure_schema()
    app.worker(name="ours", use_task_event=False)(lambda *args: None)
    while broker_of(app).release_due(name, now, 7):
        pass
    with world.working(app):
        wait_for(lambda: world.raw.zcard("dead") == len(texts), "all are among the dead")
    assert sorted(world.members("dead")) == sorted(map(buried, texts))
