"""A queue that we share with others: what is theirs is left to them, unchanged, and holds nobody up."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
import structlog
from support.hooks import noting
from support.redis_world import RedisWorld

from asynctask import AsyncTask
from asynctask.brokers.base import About, Copy
from asynctask.clock import SystemClock, SystemIds
from asynctask.database import tables
from asynctask.job import CurrentJob
from asynctask.middleware.tracker import NO_TICKET
from asynctask.runtime.execution import Execution
from asynctask.sidekiq.activejob import OLD_WRAPPER, WRAPPER
from asynctask.sidekiq.broker import PASSED_AT_ONCE, RedisBroker
from asynctask.sidekiq.sharing import Sharing
from asynctask.testing import wait_for

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


@pytest.mark.parametrize("concurrency", [1, 2, 5])
def test_a_list_begins_beside_jobs_of_others_which_keep_their_order(world: RedisWorld, concurrency: int) -> None:
    """Before, six of them were more than a few threads could use soon: the dispatcher left the list in the ledger."""
    app, ran = world.app(), []
    app.worker(name="tracked")(lambda item: ran.append(item["n"]))
    app.worker(name="ours", use_task_event=False)(lambda n: ran.append(n))
    theirs = [world.push("Theirs", n) for n in range(6)]
    with world.working(app, concurrency=concurrency):
        for first in range(0, 9, 3):
            count = len(theirs)
            wait_for(lambda: app.operations.queues()[0]["jobs_of_others"] == count, "passed")  # noqa: B023 - asked at once
            task = app.submit("tracked", [{"n": first}, {"n": first + 1}])
            wait_for(lambda: task.progress()["done"], "the list is done")  # noqa: B023 - asked at once
            theirs += [world.push("Theirs", n) for n in range(6)]
            world.push("ours", first + 2)
            wait_for(lambda: first + 2 in ran, "ours ran")  # noqa: B023 - asked at once
        assert sorted(ran) == list(range(9))
        assert world.waiting() == theirs


def test_what_is_passed_is_not_fetched_again_by_the_process(world: RedisWorld) -> None:
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
        wait_for(lambda: world.waiting("shared") == texts, "theirs wait")
    assert sum(len(copies) for _, copies, _ in deferred) <= 3


def test_only_queues_of_others_leave_the_process_at_rest(world: RedisWorld) -> None:
    app = world.app()
    app.worker(name="ours", use_task_event=False)(lambda n: None)
    texts = [world.push("Theirs")]
    with structlog.testing.capture_logs() as logs, world.working(app) as launcher:
        wait_for(lambda: any(line["event"] == "job_left_to_others" for line in logs), "it was seen")
        wait_for(lambda: world.waiting() == texts, "it lies where it was")
        fetches: list[Any] = []
        broker: Any = app.broker
        broker.exchange = noting(fetches, broker.exchange)
        wait_for(lambda: fetches, "it looks at times")
        began, before = time.monotonic(), len(fetches)
        texts += [world.push("Theirs", n) for n in range(500)]
        ours = world.push("ours", 1)
        wait_for(lambda: ours not in world.waiting(), "it is found behind all of them")
        wait_for(lambda: launcher.pool.busy == 0, "it ended")
        wait_for(lambda: len(fetches) > before + 12, "it looks on")
        assert time.monotonic() - began > 1.0, "what others push does not keep it busy"
        assert world.waiting() == texts
    reports = [line for line in logs if line["event"] == "job_left_to_others"]
    assert [(line["worker"], line["queue"]) for line in reports] == [("Theirs", "default")]


def test_a_job_that_asks_to_be_tracked_ends_in_error_where_nobody_knows_its_worker(world: RedisWorld) -> None:
    app = world.app()
    world.push("unheard", 1, use_task_event=True, retry=0)
    with world.working(app):
        wait_for(lambda: events(app) == ["error"], "its Event says so")
    assert json.dumps(world.waiting()) == "[]"


def test_the_queue_says_what_is_left_to_others(world: RedisWorld) -> None:
    app = world.app()
    for n in range(6):
        world.push("Shop::HardWorker" if n else "Mail", n)
    with world.working(app):
        wait_for(lambda: app.operations.queues()[0]["jobs_of_others"] == 6, "they are passed")
        (queue,) = app.operations.queues()
        assert queue["other_workers"] == ["Shop::HardWorker", "Mail"]
        assert (queue["length"], queue["waiting"], queue["workers_wanted"], queue["unattended"]) == (6, 0, 0, False)


# -- how a fetch passes them


@pytest.fixture
def at_rest(world: RedisWorld) -> Iterator[RedisBroker]:
    """A broker that has left a job of others in its queue."""
    broker = RedisBroker(world.server.url)
    world.push("Theirs", "first")
    broker.defer("p", broker.exchange("p", [], ["default"], 1), ["ours"])
    yield broker
    broker.close()


def fetched(broker: RedisBroker, limit: int = 1_000) -> list[str]:
    """The classes of what a process gets, each of which it acknowledges; until it has looked through its queue."""
    found: list[str] = []
    for _ in range(200):
        copies = broker.exchange("p", [], ["default"], limit)
        broker.drop("p", copies)
        found += [json.loads(copy.payload)["class"] for copy in copies]
        if not copies and not broker._more:
            return found
    raise AssertionError("it goes on")


@pytest.mark.parametrize("theirs", THEIRS)
def test_the_script_decides_as_the_fetcher_does(world: RedisWorld, at_rest: RedisBroker, theirs: str) -> None:
    name, args, members = THEIRS[theirs]
    at_rest._known = ["ours", "tracked", "Ours::Mail"]
    world.push(name, *args, **members)
    before = world.waiting()
    data = {"job_class": "Ours::Mail", "arguments": []}
    ours = [world.push("ours", {"class": "Theirs"}), world.push("ours", bid=None, encrypt=False)]
    ours += [world.push(WRAPPER, data, wrapped="Ours::Mail"), world.push(OLD_WRAPPER, data)]
    ours += [world.push("Theirs", use_task_event=True)]
    assert len(fetched(at_rest)) == len(ours)
    assert world.waiting() == before


def test_what_is_no_job_is_fetched_beside_them_too(world: RedisWorld, at_rest: RedisBroker) -> None:
    before = world.waiting()
    for text in ("no json", "[1]", "7", '{"class":7,"args":[]}', '{"class":"Theirs"}', "[" * 2_000):
        world.push_text(text)
    assert len(at_rest.exchange("p", [], ["default"], 10)) == 6
    assert world.waiting() == before


def test_others_that_take_and_put_back_before_what_was_passed_hide_nothing(world: RedisWorld, at_rest: RedisBroker) -> None:
    for n in range(300):
        world.push("Theirs", n)
    assert fetched(at_rest) == []
    for taken, left in ((50, 251), (0, 251), (240, 11)):
        world.raw.rpop("queue:default", taken) if taken else None
        world.push("ours", 1)
        assert fetched(at_rest) == ["ours"], "its place is found again"
        assert at_rest._passed["default"].count == left
    world.raw.rpush("queue:default", world.push("ours", 2))
    world.raw.lpop("queue:default")
    assert fetched(at_rest) == ["ours"], "it was put back before them"
    world.raw.rpop("queue:default", 11)
    world.push("ours", 3)
    world.push("Theirs", "new")
    assert fetched(at_rest) == ["ours"], "all that was passed is gone"
    assert len(world.waiting()) == 1
    world.raw.delete("queue:default")
    world.push("ours", 4)
    assert fetched(at_rest) == ["ours"]
    assert at_rest._passed == {}, "none of theirs is left: it is a queue like others again"


def test_equal_texts_without_a_jid_are_no_place_to_begin_behind(world: RedisWorld, at_rest: RedisBroker) -> None:
    world.raw.delete("queue:default")
    text = '{"class":"Cron","args":[]}'
    for _ in range(6):
        world.push_text(text)
    assert fetched(at_rest) == []
    world.raw.rpop("queue:default", 2)
    world.push("ours", 1)
    for _ in range(2):
        world.push_text(text)
    assert fetched(at_rest) == ["ours"]
    assert world.waiting() == [text] * 6


def test_any_number_of_jobs_without_a_jid_is_passed(world: RedisWorld, at_rest: RedisBroker) -> None:
    for _ in range(3 * PASSED_AT_ONCE):
        world.push_text('{"class":"Cron","args":[]}')
    world.push("ours", 1)
    assert fetched(at_rest) == ["ours"]
    world.push("ours", 2)
    assert fetched(at_rest) == ["ours"]


def test_a_long_queue_is_looked_through_once_and_in_parts(world: RedisWorld, at_rest: RedisBroker) -> None:
    count = 10 * PASSED_AT_ONCE
    for n in range(count):
        world.push("ours" if n % 2_500 == 2_000 else "Theirs", n)
    assert fetched(at_rest, 3) == ["ours"] * 4
    assert sum(at_rest.waiting(["default"]).get("default", {0: 0}).values()) == 0
    assert at_rest._passed["default"].count == len(world.waiting()) == count - 3
    world.push("ours", "new")
    assert at_rest.waiting(["default"]) == {"default": {0: 1}}
    assert len(at_rest.exchange("p", [], ["default"], 3)) == 1
    assert not at_rest._more, "without a second look at those before it"


def test_a_job_that_the_script_takes_for_ours_makes_a_pause(world: RedisWorld, at_rest: RedisBroker) -> None:
    world.push_text('{"class":"Theirs","args":[],"jid":"c","asynctask":{"jid":"c","attempt":99999999999}}')
    copies = at_rest.exchange("p", [], ["default"], 10)
    at_rest.defer("p", copies, ["ours"])
    assert at_rest.exchange("p", [], ["default"], 10) == []
    assert at_rest._queues == (), "nothing is fetched from it for a second"
    at_rest._passed["default"].rests_until = 0.0
    assert [copy.jid for copy in at_rest.exchange("p", [], ["default"], 10)] == ["c"]


def test_a_full_server_or_a_key_of_another_program_loses_nothing_beside_them(
    world: RedisWorld, at_rest: RedisBroker
) -> None:
    texts = world.waiting()
    texts += [world.push("Theirs", n) for n in range(3)]
    world.push("ours", 1)
    world.raw.lpush("asynctask:passed:default", "another program's")
    assert at_rest.waiting(["default"]) == {"default": {0: 5}}
    world.raw.config_set("maxmemory", 1)
    try:
        (copy,) = at_rest.exchange("p", [], ["default"], 10)
    finally:
        world.raw.config_set("maxmemory", 0)
    assert world.fetched() == 1
    at_rest.drop("p", [copy])
    assert world.waiting() == texts


class Taker:
    """A broker that takes everything, and whose tools show nothing."""

    processes = prune = None

    def defer(self, process: str, copies: Any, known: Any) -> None: ...

    def presence(self, about: About) -> Taker:
        return self


def taken(name: str, queue: str) -> Execution:
    """A fetched job of a worker that nobody knows here."""
    return Execution(
        NO_TICKET, job=CurrentJob("j"), copy=Copy("j", 0, queue, "{}"), payload={"class": name, "args": []}, worker=None
    )


def test_each_class_is_reported_once_for_each_queue_and_never_without_end() -> None:
    taker: Any = Taker()
    about, clock = About("p", "box", 1, 0, 1, {"q": 1}), SystemClock()
    sharing = Sharing(taker, clock, SystemIds(clock), about, {}, running=list, is_quiet=bool, on_signal=print)
    with structlog.testing.capture_logs() as logs:
        for name in ("A", "A", "B", "\x1b[0m\udcff"):
            sharing.leave([taken(name, "q")])
        for n in range(2_000):
            sharing.leave([taken("C", f"q{n}")])
    logs = [line for line in logs if line["event"] == "job_left_to_others"]  # threads of other tests may say something
    assert [line["worker"] for line in logs[:3]] == ["A", "B", "\\x1b[0m?"]
    assert len(logs) == 1_000
