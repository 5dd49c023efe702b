"""A real Sidekiq of Ruby with the middleware of the examples: what becomes of its jobs is recorded here, once."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.redis_ruby import Desk, RubyWorker
from support.redis_world import RedisWorld
from support.ruby_app import declare
from support.serving import Shop, answers

from asynctask import AsyncTask
from asynctask.brokers.base import DEAD, RETRY
from asynctask.errors import InputError
from asynctask.testing import wait_for
from asynctask.testing.servers import free_port

pytestmark = pytest.mark.one_redis("what the broker does on each is proved by the tests of the broker")

LEASE_S = 20.0


SECRET = "only-ruby-knows-it"


class Site:
    """A web process on a port of its own, workers of Ruby that record there, and this process beside them."""

    def __init__(self, folder: Path, world: RedisWorld, lease_s: float) -> None:
        self.folder, self.world, self.port = folder, world, free_port()
        pace = {"lease_s": lease_s, "heartbeat_s": min(5.0, lease_s / 4)}
        settings = {"broker_url": world.server.url, "tokens": f"ruby={SECRET}", **pace}
        self.shop = Shop(folder, "ruby_app.py", **settings)
        self.app: AsyncTask = declare(world.app(database_url=self.shop.environ["ASYNCTASK_DATABASE_URL"]))
        self._rubies = 0

    @contextmanager
    def web(self) -> Iterator[int]:
        """``asynctask web``, once it answers: its process id."""
        with self.shop.web(self.port) as (process, _):
            wait_for(lambda: answers(f"http://127.0.0.1:{self.port}/readyz"), "the server is ready")
            yield process.pid

    @contextmanager
    def ruby(self, threads: int = 5) -> Iterator[RubyWorker]:
        """A worker process, which is stopped in order at the end."""
        self._rubies += 1
        folder = self.folder / f"ruby{self._rubies}"
        folder.mkdir()
        environ = {"ASYNCTASK_URL": f"http://ruby:{SECRET}@127.0.0.1:{self.port}"}
        with RubyWorker(
            self.world.server, folder, "ruby", threads=threads, program="recorded.rb", environ=environ
        ) as worker:
            yield worker
            worker.process.send_signal(signal.SIGTERM)
            worker.process.wait(60)

    def submit(self, *skus: str) -> Any:
        return self.app.submit("Shop::Enroll", [{"sku": sku} for sku in skus])

    def performed(self) -> Counter[str]:
        """How often each item began in Ruby."""
        return Counter(text.decode() for text in self.world.raw.lrange("test:performed", 0, -1))

    def restart(self, list_name: str, job_id: str) -> None:
        """Has a waiting job run now."""
        found = self.app.operations.listed(list_name)["entries"]
        (key,) = [entry["key"] for entry in found if entry["job_id"] == job_id]
        assert self.app.operations.act(list_name, "restart", [key]).done == 1

    def nothing_left(self) -> None:
        """Counts equal rows, and Redis holds nothing of ours."""
        assert self.app.doctor() == []
        raw = self.world.raw
        assert (raw.llen("queue:ruby"), raw.hlen("asynctask:held"), raw.zcard(RETRY)) == (0, 0, 0)


@pytest.fixture
def site(tmp_path: Path, world: RedisWorld, request: pytest.FixtureRequest) -> Site:
    return Site(tmp_path, world, getattr(request, "param", LEASE_S))


def told(event: dict[str, Any]) -> list[tuple[str, str, int]]:
    return [(each["status"], each["message"], each["attempt"]) for each in event["added_messages"]]


def test_the_items_of_a_task_are_performed_in_ruby_and_counted_exactly(site: Site) -> None:
    skus = [f"{kind}-{n}" for n in range(40) for kind in ("OK", "NO")]
    two = [{"sku": "OK-IN"}, {"sku": "OK-SLICE"}]
    several = site.app.submit("Shop::Enroll", two, chunk_size=2)  # before anything says that Ruby performs them
    with site.web(), site.ruby():
        task = site.submit(*skus)
        assert task.wait(timeout=120)["counts"] == {**_none(80), "finish": 40, "failed": 40}
        assert several.wait(timeout=120)["counts"] == {**_none(2), "error": 2}
        with pytest.raises(InputError, match="another language"):
            site.app.submit("Shop::Enroll", two, chunk_size=2)
    assert site.performed() == Counter(skus)
    first, second = task.events()[:2]
    assert told(first) == [("working", "In progress", 1), ("finish", "Done", 1)]
    assert told(second) == [("working", "In progress", 1), ("failed", "Failed: seller is not qualified: é", 1)]
    assert (task.progress()["control"]["in_flight"], site.app.processes()) == (0, []), "both have left in order"
    site.nothing_left()


def test_an_error_waits_in_the_ledger_and_is_retried_in_ruby_until_none_is_left(site: Site) -> None:
    raw = site.world.raw
    raw.set("test:gate", "fail")
    with site.web(), site.ruby():
        task = site.submit("GATE-1", "BUG-1")
        wait_for(lambda: task.progress()["retrying"] == 2, "both have failed")
        assert (raw.zcard(RETRY), task.progress()["counts"]["enqueue"]) == (0, 2)
        raw.set("test:gate", "open")
        gated, broken = [event["job_id"] for event in task.events()]
        for job_id in (gated, broken):
            site.restart("retries", job_id)
        assert task.wait(timeout=120)["counts"] == {**_none(2), "finish": 1, "error": 1}
    assert site.performed() == {"GATE-1": 2, "BUG-1": 2}
    waits = [
        ("working", "In progress", 1),
        ("error", "Error: ArgumentError: not yet", 1),
        ("enqueue", "Waiting for retry", 1),
    ]
    assert told(site.app.event(gated)) == [*waits, ("working", "In progress", 2), ("finish", "Done", 2)]
    assert told(site.app.event(broken))[-1] == ("error", "Error: ArgumentError: cannot read BUG-1", 2)
    assert raw.lrange("test:exhausted", 0, -1) == [broken.encode()], "Ruby's own hook was called"
    assert raw.zcard(DEAD) == 1
    site.nothing_left()


def test_a_lone_job_of_rubys_is_retried_by_sidekiq(site: Site, desk: Desk) -> None:
    raw = site.world.raw
    raw.set("test:gate", "fail")
    with site.web(), site.ruby():
        push = 'words[0].map { |sku| Sidekiq::Client.push(words[1].merge("args" => [{ "sku" => sku }])) }'
        job = {"class": "Shop::Enroll", "queue": "ruby", "retry": 3, "use_task_event": True}
        again, refused = desk(push, ["GATE-1", "NO-1"], job)
        wait_for(lambda: raw.zcard(RETRY) == 1, "Sidekiq keeps the one that failed")
        assert site.app.event(again)["status"] == "enqueue"
        raw.set("test:gate", "open")
        site.restart("retries", again)
        wait_for(lambda: site.app.event(again)["status"] == "finish", "it is retried")
        wait_for(lambda: site.app.event(refused)["status"] == "failed", "the other is refused")
    assert [status for status, _, _ in told(site.app.event(again))] == ["working", "error", "enqueue", "working", "finish"]
    found = site.app.event(again)
    assert (found["worker_name"], found["params"], found["task_id"]) == ("Shop::Enroll", [{"sku": "GATE-1"}], None)
    assert site.performed() == {"GATE-1": 2, "NO-1": 1}
    site.nothing_left()


def test_a_job_that_python_sends_alone_is_performed_in_ruby(site: Site) -> None:
    with site.web(), site.ruby():
        worker: Any = site.app.workers["Shop::Enroll"]
        jobs = [worker.perform_async({"sku": sku}) for sku in ("OK-1", "NO-1", "BUG-1")]
        wait_for(lambda: site.app.event(jobs[2])["retries"] == 1, "it waits for its retry")
        site.restart("retries", jobs[2])
        ends = ["finish", "failed", "error"]
        wait_for(lambda: [site.app.event(job)["status"] for job in jobs] == ends, "all are over")
    assert site.performed() == {"OK-1": 1, "NO-1": 1, "BUG-1": 2}
    site.nothing_left()


def test_no_outcome_is_lost_while_the_web_process_is_away(site: Site) -> None:
    skus = [f"OK-{n}" for n in range(200)] + [f"GATE-{n}" for n in range(5)]
    with site.ruby(threads=10):  # before there is anybody to whom it could report
        with site.web() as pid:
            task = site.submit(*skus)
            wait_for(lambda: site.performed()["GATE-4"] or len(site.performed()) > 60, "some have begun")
            os.killpg(pid, signal.SIGKILL)
        before = task.progress()["counts"]["finish"]
        site.world.raw.set("test:gate", "open")  # those at work end while nobody listens
        wait_for(lambda: site.world.raw.llen("queue:ruby") < 10 or len(site.performed()) > before, "Ruby waits")
        with site.web():
            assert task.wait(timeout=120)["counts"] == {**_none(205), "finish": 205}
    assert site.performed() == Counter(skus), "a record that is sent again is no reason to perform a job again"
    site.nothing_left()


def test_a_job_under_which_its_process_stops_is_performed_again_once(site: Site) -> None:
    with site.web():
        with site.ruby(threads=1) as ruby:
            task = site.submit("GATE-1")
            wait_for(lambda: site.performed()["GATE-1"] == 1, "it is at work")
            ruby.process.send_signal(signal.SIGTERM)
            ruby.process.wait(60)
        (event,) = task.events()
        assert told(event)[:3] == [
            ("working", "In progress", 1), ("error", "Interrupted", 1), ("enqueue", "Waiting for retry", 1)
        ]  # fmt: skip
        assert site.world.raw.llen("queue:ruby") == 1, "Sidekiq gave its copy back, which counts no more"
        site.world.raw.set("test:gate", "open")
        with site.ruby():
            assert task.wait(timeout=120)["counts"]["finish"] == 1
            wait_for(lambda: site.world.raw.llen("queue:ruby") == 0, "the old copy is taken")
    assert site.performed() == {"GATE-1": 2}
    site.nothing_left()


@pytest.mark.parametrize("site", [3.0], indirect=True)
def test_a_job_whose_process_is_killed_is_given_to_another(site: Site) -> None:
    with site.web():
        with site.ruby() as ruby:
            task = site.submit("GATE-1")
            wait_for(lambda: task.progress()["counts"]["working"], "it is at work")
            ruby.process.kill()
        site.world.raw.set("test:gate", "open")
        with site.ruby():
            assert task.wait(timeout=120)["counts"]["finish"] == 1
    (event,) = task.events()
    assert ("error", "Worker lost", 1) in told(event)
    site.nothing_left()


def _none(total: int) -> dict[str, int]:
    return {"total": total, **dict.fromkeys(("enqueue", "working", "stopped", "finish", "failed", "error", "cancelled"), 0)}
