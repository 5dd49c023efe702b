"""A queue that we share with others: what is theirs is left to them, unchanged, and holds nobody up."""

from __future__ import annotations

import json
from typing import Any

import pytest
import sqlalchemy as sa
import structlog
from support.hooks import noting
from support.redis_world import RedisWorld

from asynctask import AsyncTask
from asynctask.brokers.base import Copy
from asynctask.database import tables
from asynctask.runtime.fetcher import FIRST_REST_S, LONGEST_PASS, LONGEST_REST_S, DeferredCopy, UntrackedDeferral
from asynctask.testing import wait_for
from asynctask.wire.activejob import OLD_WRAPPER, WRAPPER

THEIRS: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "an unknown class": ("Shop::HardWorker", [1], {"tags": ["a"]}),
    "an unknown class without a retry": ("Shop::HardWorker", [1], {"retry": False}),
    "an unknown class of ActiveJob": (OLD_WRAPPER, [{"job_class": "Mail", "arguments": []}], {"wrapped": "Mail"}),
    "the wrapper itself, empty": (WRAPPER, [], {}),
    "a batch": ("ours", [1], {"bid": "b1"}),
    "an encrypted job": ("ours", ["x"], {"encrypt": True}),
    "a batch of a tracked worker": ("tracked", [{}], {"bid": "b1"}),
    "delayed extensions": ("Sidekiq::Extensions::DelayedClass", ["--- !ruby/object:Kernel {}"], {}),
}


def events(app: AsyncTask) -> list[str]:
    """The status of every Event."""
    with app.ledger.database.read() as connection:
        return [status for (status,) in connection.execute(sa.select(tables.events.c.status))]


@pytest.mark.parametrize("theirs", THEIRS)
def test_a_job_of_others_stays_in_its_queue_as_it_was_and_ours_run(world: RedisWorld, theirs: str) -> None:
    app, ran = world.app(), []
    app.worker(name="ours", use_task_event=False)(lambda n: ran.append(n))
    app.worker(name="tracked")(lambda item: ran.append(item))
    name, args, members = THEIRS[theirs]
    text = world.push(name, *args, **members)
    for n in range(20):
        world.push("ours", n)
    with world.working(app):
        wait_for(lambda: len(ran) == 20, "ours ran")
        wait_for(lambda: world.waiting() == [text], "theirs waits")
    assert sorted(ran) == list(range(20))
    assert (world.fetched(), world.members("retry"), world.members("schedule"), world.members("dead")) == (0, [], [], [])
    assert events(app) == []


def test_a_queue_of_others_jobs_is_passed_round_no_more_than_it_rests(world: RedisWorld) -> None:
    app, ran = world.app(), []
    app.worker(name="ours", use_task_event=False)(lambda n: ran.append(n))
    texts = [world.push("Theirs", n, queue="shared") for n in range(3)]
    broker: Any = app.broker
    deferred: list[Any] = []
    broker.defer = noting(deferred, broker.defer)
    with world.working(app, "shared", "own"):
        for n in range(30):
            world.push("ours", n, queue="own")
            wait_for(lambda: ran[-1:] == [n], "it ran at once", every=0.002)  # noqa: B023 - asked at once
        wait_for(lambda: sorted(world.waiting("shared")) == sorted(texts), "theirs wait")
    assert len(deferred) < 25, "once or twice each while the queue had not rested: not with each fetch"


def test_only_queues_of_others_leave_the_process_at_rest(world: RedisWorld) -> None:
    app = world.app()
    app.worker(name="ours", use_task_event=False)(lambda n: None)
    text = world.push("Theirs")
    with structlog.testing.capture_logs() as logs, world.working(app) as launcher:
        wait_for(lambda: any(line["event"] == "job_left_to_others" for line in logs), "it was seen")
        wait_for(lambda: world.waiting() == [text], "it lies where it was")
        asked: list[Any] = []
        broker: Any = app.broker
        broker.wait = noting(asked, broker.wait)
        wait_for(lambda: asked and 0.2 < asked[-1][0] <= LONGEST_REST_S, "the queue rests")
        before = len(asked)
        for n in range(50):
            world.push("Theirs", n)
        assert len(asked) <= before + 3, "what others push wakes nobody"
        ours = world.push("ours", 1)
        wait_for(lambda: ours not in world.waiting(), "it is found behind all of them when the queue has rested")
        wait_for(lambda: launcher.pool.busy == 0, "it ended")
    reports = [line for line in logs if line["event"] == "job_left_to_others"]
    assert [(line["worker"], line["queue"]) for line in reports] == [("Theirs", "default")]


def test_a_job_that_asks_to_be_tracked_ends_in_error_where_nobody_knows_its_worker(world: RedisWorld) -> None:
    app = world.app()
    world.push("unheard", 1, use_task_event=True, retry=0)
    with world.working(app):
        wait_for(lambda: events(app) == ["error"], "its Event says so")
    assert json.dumps(world.waiting()) == "[]"


# -- how long a queue rests


class Hands:
    """A clock that is set by hand, and a broker that takes everything."""

    def __init__(self) -> None:
        self.at = 100.0

    def monotonic(self) -> float:
        return self.at

    def defer(self, process: str, copies: Any) -> None: ...


def a_deferred(queue: str, n: int = 0, name: str = "C") -> DeferredCopy:
    return DeferredCopy(Copy(f"j{n}", 0, queue, "{}"), name, "why")


def test_a_queue_rests_twice_as_long_each_time_until_it_gives_ours() -> None:
    hands: Any = Hands()
    deferral = UntrackedDeferral("p", hands, hands)
    rests = []
    theirs, other = a_deferred("a"), a_deferred("b")
    for _ in range(7):
        deferral.record_fetch((), [theirs])
        assert list(deferral.order(["a", "b"])) == ["a", "b"], "there may be ours behind it"
        deferral.record_fetch((), [theirs])
        assert deferral.order(["a", "b"]) == ["b"]
        rests.append(deferral.limit_wait(1_000.0))
        hands.at += rests[-1]
        assert list(deferral.order(["a", "b"])) == ["a", "b"]
    assert rests == [FIRST_REST_S, 2.0, 4.0, 8.0, 16.0, LONGEST_REST_S, LONGEST_REST_S]
    deferral.record_fetch({"a"}, [theirs, theirs, other, other])
    assert deferral.order(["a", "b"]) == ["a"], "one of ours was among them"
    deferral.record_fetch((), [theirs, theirs, theirs])
    assert (deferral.order(["a", "b"]), deferral.limit_wait(1_000.0)) == ([], FIRST_REST_S)
    assert deferral.limit_wait(0.5) == 0.5


def test_a_long_queue_of_others_is_not_turned_over_as_a_whole() -> None:
    hands: Any = Hands()
    deferral = UntrackedDeferral("p", hands, hands)
    deferral.record_fetch((), [a_deferred("a", n) for n in range(LONGEST_PASS)])
    assert list(deferral.order(["a"])) == ["a"]
    deferral.record_fetch((), [a_deferred("a", LONGEST_PASS)])
    assert list(deferral.order(["a"])) == []


def test_each_class_is_reported_once_for_each_queue_and_never_without_end() -> None:
    hands: Any = Hands()
    deferral = UntrackedDeferral("p", hands, hands)
    with structlog.testing.capture_logs() as logs:
        for name in ("A", "A", "B", "\x1b[0m\udcff"):
            deferral.defer([a_deferred("q", name=name)])
        for n in range(2_000):
            deferral.defer([a_deferred(f"q{n}")])
    logs = [line for line in logs if line["event"] == "job_left_to_others"]  # threads of other tests may say something
    assert [line["worker"] for line in logs[:3]] == ["A", "B", "\x1b[0m?"]
    assert len(logs) == 1_000
