"""An untracked job that raises: what is written of it is what Ruby writes, and its own members stay as they were."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from support.redis_ruby import Desk, RubyJson
from support.redis_world import RedisWorld
from support.untracked import broker_of

from asynctask import AsyncTask, current_job
from asynctask.brokers.base import Copy
from asynctask.clock import SECOND
from asynctask.errors import BrokerUnavailable, JobInterrupted
from asynctask.job import CurrentJob
from asynctask.maintenance import POISON_COPIES
from asynctask.runtime.execution import Decision, Follow
from asynctask.sidekiq.activejob import OLD_WRAPPER, WRAPPER, GlobalId, Symbol, wrap
from asynctask.sidekiq.payload import decode_backtrace, dump, parse
from asynctask.sidekiq.sharing import after_failure, decide_untracked
from asynctask.testing import wait_for
from asynctask.worker import Worker

pytestmark = pytest.mark.one_redis("what the broker does on each is proved by the tests of the broker")

NOW = 1_763_700_000_123_456
STRANGE = (
    '{"b":1.0,"class":"bad","unknown":{"z":1e20,"a":[1.50,-0.0,123456789012345678901234567890]},"args":[1.0,"é\\u2028"],'
    '"jid":"aaaaaaaaaaaaaaaaaaaaaaaa","queue":"default","retry":true,"tags":["t"],"cattr":{"user":1},"created_at":1.25}'
)


def fail(**members: Any) -> dict[str, Any]:
    """A job of ``bad`` after it raised."""
    job = {"class": "bad", "args": [], "jid": "a" * 24, "queue": "default", **members}
    return parse(after_failure(Copy("a" * 24, 0, "default", dump(job)), ValueError("wrong"), NOW).payload)


def follow(worker: Worker | None = None, error: BaseException | None = None, noise: float = 0.0, **job: Any) -> Decision:
    return decide_untracked(error or ValueError(), job, CurrentJob("j"), worker, now=NOW, noise=noise)


def a_worker(**options: Any) -> Worker:
    return Worker("bad", lambda: None, **options)


# -- what is written


def test_members_that_we_do_not_know_keep_their_place_their_types_and_their_digits() -> None:
    after = after_failure(Copy("a" * 24, 0, "default", STRANGE), ValueError("wrong: é"), NOW).payload
    before = json.loads(STRANGE, parse_float=Decimal)
    found = json.loads(after, parse_float=Decimal)
    added = {
        "error_message": "wrong: é",
        "error_class": "ValueError",
        "retry_count": 0,
        "failed_at": Decimal("1763700000.123456"),
    }
    assert found == {**before, **added}
    assert list(found) == [*before, *added]
    assert '"args":[1.0,"é\u2028"]' in after


def test_ruby_reads_what_we_wrote_and_writes_the_same() -> None:
    with RubyJson() as ruby:
        for members in ({}, {"backtrace": True, "retry_count": 3, "failed_at": 1.0}, {"x": [1e20, 1e-7, 2**70, None]}):
            text = dump(fail(**members))
            assert ruby.echo(text) == text
        after = after_failure(
            Copy("a" * 24, 0, "default", STRANGE), ValueError("\udcff\x00\x1b" + "é" * 20_000), NOW
        ).payload
        assert ruby.echo(after) == after
    assert len(parse(after)["error_message"]) == 10_000


@pytest.mark.parametrize(
    ("members", "count", "times"),
    [
        ({}, 0, {"failed_at"}),
        ({"retry_count": None}, 0, {"failed_at"}),
        ({"retry_count": "3"}, 0, {"failed_at"}),
        ({"retry_count": -1, "failed_at": 5.5}, 0, {"retried_at"}),
        ({"retry_count": -1}, 0, {"failed_at", "retried_at"}),
        ({"retry_count": 0, "failed_at": 5.5}, 1, {"retried_at"}),
        ({"retry_count": 7, "failed_at": "yesterday"}, 8, {"failed_at", "retried_at"}),
        ({"retry_count": 10**30, "failed_at": 1}, 10_001, {"retried_at"}),
    ],
)
def test_it_counts_and_dates_as_ruby_does(members: dict[str, Any], count: int, times: set[str]) -> None:
    job = fail(**members)
    assert job["retry_count"] == count
    assert {name for name in ("failed_at", "retried_at") if job.get(name) == NOW / SECOND} == times


@pytest.mark.parametrize(("wanted", "queue"), [(None, "default"), ("slow", "slow"), ("", "default"), (7, "default")])
def test_a_retry_goes_to_its_own_queue(wanted: Any, queue: str) -> None:
    assert fail(retry_queue=wanted)["queue"] == queue


@pytest.mark.parametrize(
    ("wanted", "lines"), [(None, None), (False, None), (0, 0), (1, 1), (-3, 0), (True, 3), ("yes", 3), (10**9, 3)]
)
def test_a_backtrace_is_kept_as_far_as_it_is_wanted(wanted: Any, lines: int | None) -> None:
    def deep(n: int) -> None:
        if n:
            deep(n - 1)
        raise ValueError("deep")

    with pytest.raises(ValueError, match="deep") as raised:
        deep(1)
    copy = Copy("j", 0, "q", dump({"class": "bad", "args": [], "jid": "j", "backtrace": wanted}))
    job = parse(after_failure(copy, raised.value, NOW).payload)
    assert ("error_backtrace" in job) is (lines is not None)
    if lines is not None:
        found = decode_backtrace(job["error_backtrace"])
        assert len(found) == lines
        assert all("test_redis_retry.py:" in line for line in found)
        assert lines == 0 or found[0].endswith(".deep'")


# -- what follows


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ({"retry": True}, Follow.RETRY),
        ({"retry": True, "retry_count": 23}, Follow.RETRY),
        ({"retry": True, "retry_count": 24}, Follow.DEAD),
        ({"retry": "5", "retry_count": 23}, Follow.RETRY),
        ({"retry": ""}, Follow.RETRY),
        ({"retry": []}, Follow.RETRY),
        ({"retry": 0}, Follow.DEAD),
        ({"retry": 1}, Follow.RETRY),
        ({"retry": 1, "retry_count": 0}, Follow.DEAD),
        ({"retry": 0, "retry_count": -1}, Follow.DEAD),
        ({"retry": False}, Follow.DEAD),
        ({"retry": 0, "retry_for": 60}, Follow.RETRY),
        ({"retry": 5, "retry_count": 99, "retry_for": 60, "failed_at": NOW / SECOND - 59}, Follow.RETRY),
        ({"retry": 5, "retry_count": 99, "retry_for": 60, "failed_at": NOW // 1000 - 59_000}, Follow.RETRY),
        ({"retry": 5, "retry_count": 1, "retry_for": 60, "failed_at": NOW / SECOND - 61}, Follow.DEAD),
        ({"retry": 5, "retry_count": 1, "retry_for": "60", "failed_at": NOW / SECOND - 61}, Follow.RETRY),
        ({"retry": False, "retry_for": 60}, Follow.DEAD),
    ],
)
def test_a_job_is_retried_as_often_as_ruby_would(job: dict[str, Any], expected: Follow) -> None:
    assert follow(**job).follow is expected


def test_a_job_that_does_not_say_is_retried_as_its_worker_says() -> None:
    assert follow(a_worker(retry=2), retry_count=0).follow is Follow.RETRY
    assert follow(a_worker(retry=2), retry_count=1).follow is Follow.DEAD
    assert follow(a_worker(retry=False)).follow is Follow.DEAD
    assert follow(None).follow is Follow.DEAD


def test_a_retry_waits_longer_each_time_and_for_a_part_by_chance() -> None:
    for count in range(25):
        job = {"retry": True} if count == 0 else {"retry": True, "retry_count": count - 1}
        least, most = follow(noise=0.0, **job).delay, follow(noise=0.999_999, **job).delay
        assert least == (count**4 + 15) * SECOND
        assert most - least == (10 * (count + 1) - 1) * SECOND


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (7, Decision(Follow.RETRY, (7 + 5) * SECOND)),
        (0, Decision(Follow.RETRY, 0)),
        (False, Decision(Follow.RETRY, (15 + 5) * SECOND)),
        (-1, Decision(Follow.RETRY, (15 + 5) * SECOND)),
        ("soon", Decision(Follow.RETRY, (15 + 5) * SECOND)),
        (float("nan"), Decision(Follow.RETRY, (15 + 5) * SECOND)),
        ("kill", Decision(Follow.DEAD)),
        ("discard", Decision(Follow.DISCARD)),
    ],
)
def test_a_worker_may_say_when_or_that_it_is_over(answer: Any, expected: Decision) -> None:
    assert follow(a_worker(retry_in=lambda count, error, job: answer), noise=0.5, retry=True) == expected


def test_an_error_that_came_of_an_interruption_is_none_of_the_jobs() -> None:
    def fails() -> None:
        try:
            raise JobInterrupted("stop")
        except JobInterrupted as error:
            raise ValueError("of the job's own") from error

    def after(error: BaseException, *, stopping: bool) -> Follow:
        job = CurrentJob("j", should_stop=lambda: stopping)
        return decide_untracked(error, {"retry": True}, job, None, now=NOW, noise=0.0).follow

    with pytest.raises(ValueError, match="own") as raised:
        fails()
    assert after(raised.value, stopping=True) is Follow.AGAIN
    assert after(raised.value, stopping=False) is Follow.RETRY, "the runtime interrupted nothing"
    circle, other = ValueError(), ValueError()
    circle.__cause__, other.__cause__ = other, circle
    assert after(circle, stopping=True) is Follow.RETRY


# -- as a whole


HELD: dict[str, tuple[dict[str, Any], str | None, list[str]]] = {
    "retried": ({"retry": 1}, "retry", []),
    "dead when no retry is left": ({"retry": 0}, "dead", ["exhausted", "death"]),
    "never dead where it must not be": ({"retry": 0, "dead": False}, None, ["exhausted", "death"]),
    "never kept without a retry": ({"retry": False}, None, ["death"]),
    "killed": ({"retry": 5, "answer": "kill"}, "dead", ["exhausted", "death"]),
    "discarded": ({"retry": 5, "answer": "discard"}, None, ["death"]),
    "discarded by the last hook": ({"retry": 0, "last": "discard"}, None, ["exhausted", "death"]),
}


def hooked(app: AsyncTask) -> list[str]:
    """Registers ``bad``; returns what its hooks and those of the application are told."""
    told: list[str] = []

    def exhausted(job: CurrentJob, error: BaseException) -> Any:
        told.append("exhausted")
        return job.payload.get("last")

    @app.worker(
        name="bad",
        use_task_event=False,
        retry_in=lambda count, error, job: job.payload.get("answer"),
        retries_exhausted=exhausted,
    )
    def bad(*_: Any) -> None:
        current_job().payload["args"] = ["changed by the job"]
        raise ValueError("wrong")

    app.on("death")(lambda job, error: told.append("death"))
    return told


@pytest.mark.parametrize("case", HELD)
def test_what_becomes_of_it_and_who_is_told(world: RedisWorld, case: str) -> None:
    members, place, hooks = HELD[case]
    app = world.app()
    told = hooked(app)
    world.push("bad", 1, **members)
    with world.working(app) as launcher:
        wait_for(lambda: launcher.performer.performed == 1, "it ended")
        wait_for(lambda: world.fetched() == 0, "it left this process")
    assert told == hooks
    found = {name: [parse(text) for text in world.members(name)] for name in ("retry", "dead", "schedule")}
    assert {name for name, jobs in found.items() if jobs} == ({place} if place else set())
    if place:
        (job,) = found[place]
        assert (job["args"], job["error_class"], job["error_message"]) == ([1], "ValueError", "wrong")
    assert world.waiting() == []


def test_ruby_sees_our_retry_and_puts_it_off_without_making_a_second_one(world: RedisWorld, desk: Desk) -> None:
    app = world.app()
    hooked(app)
    world.push_text(STRANGE)
    with world.working(app):
        wait_for(lambda: world.members("retry"), "it waits for its retry")
    (text,) = world.members("retry")
    found = desk(
        """
        job = Sidekiq::RetrySet.new.first
        job.reschedule(1_900_000_000.5)
        answer("jid" => job.jid, "error" => job["error_message"], "count" => job["retry_count"])
        """,
    )
    assert found == {"jid": "a" * 24, "error": "wrong", "count": 0}
    assert world.raw.zrange("retry", 0, -1, withscores=True) == [(text, 1_900_000_000.5)]


def test_while_redis_is_away_the_outcome_waits_for_it(world: RedisWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    app = world.app()
    hooked(app)
    broker: Any = app.broker
    hold = broker.hold
    refused: list[int] = []

    def refuses(*args: Any, **more: Any) -> None:
        if len(refused) < 2:
            refused.append(1)
            raise BrokerUnavailable("away")
        hold(*args, **more)

    monkeypatch.setattr(broker, "hold", refuses)
    world.push("bad", retry=1)
    with world.working(app, concurrency=1):
        wait_for(lambda: world.members("retry"), "it is kept")
        wait_for(lambda: world.fetched() == 0, "and left this process")
    assert len(refused) == 2


def test_a_job_that_killed_three_processes_says_so_among_the_dead(world: RedisWorld) -> None:
    app = world.app()
    app.ensure_schema()
    world.push_text(STRANGE)
    maintenance = app.maintenance(app.ledger)
    for count in range(POISON_COPIES):
        assert len(broker_of(app).exchange(f"p{count}", [], ["default"], 1)) == 1
        maintenance.recover(f"p{count}")
    (text,) = world.members("dead")
    job = parse(text)
    assert job["error_class"] == "ProcessDied"
    assert "3 processes died" in job["error_message"]
    assert {name: job[name] for name in parse(STRANGE)} == parse(STRANGE)


# -- ActiveJob


@pytest.mark.parametrize("wrapper", [OLD_WRAPPER, WRAPPER])
@pytest.mark.parametrize("tracked", [False, True], ids=["untracked", "tracked"])
def test_a_job_of_active_job_is_performed_by_the_worker_inside(world: RedisWorld, wrapper: str, tracked: bool) -> None:
    app, ran = world.app(), []

    @app.worker(name="Shop::Mail", use_task_event=tracked, retry=3, retry_in=lambda count, error, job: 0.05)
    def mail(*args: Any, **keywords: Any) -> None:
        ran.append((args, keywords))
        if tracked and len(ran) < 2:
            raise ValueError("once more, from the ledger")

    arguments = [1, "é", GlobalId("gid://shop/Order/1"), Symbol("now"), {"a": [1]}]
    job = wrap("Shop::Mail", arguments, {"late": True}, job_id="u", enqueued_at="2026-01-01T00:00:00Z", wrapper=wrapper)
    world.push_text(dump({"retry": True, **job, "jid": "b" * 24, "created_at": 1.5}))
    with world.working(app):
        wait_for(lambda: len(ran) == 1 + tracked, "it ran")
        wait_for(lambda: world.fetched() == 0, "it was acknowledged")
    assert ran == [(tuple(arguments), {"late": True})] * (1 + tracked)


@pytest.mark.parametrize(
    "args", [[], [1], [{"job_class": "Mail", "arguments": [{"_aj_serialized": "Evil", "value": 1}]}], [{"job_class": 1}]]
)
def test_a_job_of_active_job_that_cannot_be_read_waits_for_its_retry_and_says_why(world: RedisWorld, args: Any) -> None:
    app = world.app()
    app.worker(name="Mail", use_task_event=False)(lambda *args: None)
    world.push(OLD_WRAPPER, *args, wrapped="Mail")
    with world.working(app):
        wait_for(lambda: world.members("retry"), "it waits for its retry")
    job = parse(world.members("retry")[0])
    assert job["error_message"].startswith("this is no job of ActiveJob")
    assert (job["class"], job["args"]) == (OLD_WRAPPER, args)
