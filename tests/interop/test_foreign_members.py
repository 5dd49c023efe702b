"""A job that Ruby pushed and that is tracked here: what it came with is written again, and counts."""

from __future__ import annotations

from typing import Any

import pytest
from support.payloads import HARD, UNKNOWN
from support.redis_ruby import Desk
from support.redis_world import RedisWorld

from asynctask import AsyncTask, current_job
from asynctask.errors import NotFound
from asynctask.sidekiq.activejob import is_wrapped
from asynctask.testing import wait_for

OURS = {"enqueued_at", "retry_count", "failed_at"}
"""Members that say how often and when a job was tried: they change with each run."""


class Failing:
    """A tracked worker of an application that fails as long as it is not ``mended``."""

    def __init__(self, app: AsyncTask, name: str = "Shop::Tracked", **options: Any) -> None:
        self.runs: list[dict[str, Any]] = []
        self.mended = False
        app.worker(name=name, queue="python", retry_in=lambda *_: 0.001, **options)(self._run)

    def _run(self, *args: Any, **more: Any) -> None:
        self.runs.append(dict(current_job().payload))
        if not self.mended:
            raise ValueError("wrong")


def ended(app: AsyncTask, jid: str) -> dict[str, Any]:
    """The Event of a job, once it is over."""

    def event() -> dict[str, Any]:
        try:
            found = app.event(jid)
        except NotFound:  # it was not begun yet
            return {}
        return found if found["status"] in ("finish", "error") else {}

    return wait_for(event, "it is over")


def pushed(desk: Desk, **members: Any) -> str:
    """The id of a job that Ruby's client pushed."""
    args = [each for each in HARD if not (isinstance(each, int) and abs(each) >= 2**63)]  # the ledger keeps 64 bits
    item = {"class": "Shop::Tracked", "args": args, "queue": "python", **members}
    return str(desk("Sidekiq::Client.push(words[0])", item))


def test_a_retry_and_a_persons_retry_have_what_ruby_wrote(world: RedisWorld, desk: Desk) -> None:
    app = world.app()
    worker = Failing(app, retry=3)
    jid = pushed(desk, retry=1, **UNKNOWN)
    with world.working(app, "python"):
        assert ended(app, jid)["status"] == "error"
        worker.mended = True
        assert app.operations.act("dead", "restart", [jid]).done == 1
        assert ended(app, jid)["status"] == "finish"
    first, second, third = worker.runs
    assert first.keys() >= {"retry", "created_at", "jid", *UNKNOWN}
    for again in (second, third):
        assert [name for name in again if name not in OURS] == [name for name in first if name not in OURS]
        assert {repr(again[name]) for name in first if name not in OURS} == {
            repr(first[name]) for name in first if name not in OURS
        }
    assert (second["retry_count"], third.get("retry_count")) == (0, None)
    assert second["failed_at"] >= first["created_at"]


@pytest.mark.parametrize(
    ("own", "members", "runs"),
    [
        (3, {"retry": 1}, 2),
        (3, {"retry": 0}, 1),
        (3, {"retry": False}, 1),
        (1, {"retry": True}, 2),
        (2, {"retry": 25}, 3),
        (3, {"retry": None}, 4),
        (3, {"retry": 3, "retry_count": 1, "failed_at": 1.5}, 2),  # it was retried twice in Ruby
        (3, {"retry": 3, "retry_count": -1, "failed_at": 1.5}, 4),
        (2, {"retry": True, "retry_for": 3600}, 3),
        (3, {"retry": True, "retry_for": 60, "failed_at": 1.5, "retry_count": 0}, 1),
    ],
)
def test_the_smaller_of_what_the_job_and_its_worker_allow_counts(
    world: RedisWorld, own: int, members: dict[str, Any], runs: int
) -> None:
    app = world.app()
    worker = Failing(app, retry=own)
    world.push("Shop::Tracked", 1, queue="python", **members)
    with world.working(app, "python"):
        wait_for(lambda: len(worker.runs) >= 1, "it was performed")
        event = ended(app, worker.runs[0]["jid"])
    assert (event["status"], len(worker.runs)) == ("error", runs)


def test_a_job_of_rails_stays_one(world: RedisWorld, desk: Desk) -> None:
    app = world.app()
    worker = Failing(app, "Shop::Mail", retry=1)
    jid = desk('Shop::Mail.set(queue: "python").perform_later(1, key: :word).provider_job_id')
    with world.working(app, "python"):
        assert ended(app, jid)["status"] == "error"
    first, second = worker.runs
    assert is_wrapped(second)
    assert (second["class"], second["wrapped"], second["args"]) == (first["class"], first["wrapped"], first["args"])


def test_an_option_of_our_own_push_is_no_other_programs(world: RedisWorld) -> None:
    """It may allow more than its worker does."""
    app = world.app()
    runs: list[int] = []

    @app.worker(queue="python", retry=1, retry_in=lambda *_: 0.001)
    def ours(n: int) -> None:
        runs.append(n)
        raise ValueError("wrong")

    jid = str(ours.set(retry=2).perform_async(1))
    with world.working(app, "python"):
        assert ended(app, jid)["status"] == "error"
    assert len(runs) == 3


def test_another_push_under_the_jid_of_an_ended_job_is_another_run_and_a_second_copy_is_not(world: RedisWorld) -> None:
    """A program without the ledger pushes it, which nobody can refuse."""
    app = world.app()
    ran: list[Any] = []

    @app.worker(name="Tracked", retry=0)
    def tracked(value: str) -> str:
        ran.append(value)
        return value

    first = world.push("Tracked", "a", jid="nightly", created_at=1_000.5)
    with world.working(app):
        ended(app, "nightly")
        world.push_text(first)  # it was delivered again
        world.push("Tracked", "b", jid="nightly", created_at=1_001.5)
        wait_for(lambda: len(ran) == 2, "the other push runs")
        wait_for(lambda: app.event("nightly")["status"] == "finish", "and is recorded")
        world.push_text(first.replace('"a"', '"c"').replace("1000.5", "1001.5"))
        last = world.push("Tracked", "last")
        wait_for(lambda: "last" in ran, f"what was pushed after it: {last}")
        wait_for(lambda: world.waiting("default") == [], "nothing is left")
    assert ran == ["a", "b", "last"]
    event = app.event("nightly")
    assert (event["status"], event["result"], event["params"]) == ("finish", "b", ["b"])
    assert [m["message"] for m in event["messages"]].count("Sent again") == 1
