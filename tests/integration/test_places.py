"""Jobs that save their place: checkpoints, iterables, stopping one job and starting it again."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from support.place_app import add_workers
from support.world import World, numbers

from asynctask import AsyncTask, InputError, NormalException, current_job
from asynctask.errors import ConfigError, Conflict, NotFound
from asynctask.integrations.remote import Reporter
from asynctask.operations import NotNow
from asynctask.runtime.pool import Durations
from asynctask.runtime.recheck import Recheck
from asynctask.task import TaskHandle
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")


def walking(world: World, **settings: Any) -> AsyncTask:
    app = world.app(**settings)
    add_workers(app, world.shop)
    return app


def hooks(world: World) -> list[str]:
    return [line[1] for line in world.shop.lines() if line[0] == "hook"]


def only_job(app: AsyncTask, task_id: int) -> str:
    (event,) = app.task(task_id).events()
    return str(event["job_id"])


def dispatched(world: World, app: AsyncTask, count: int) -> TaskHandle:
    """A Task whose jobs wait: in Redis, for a worker in another language, or in the ledger."""
    task: TaskHandle = app.submit("note", numbers(count))
    if world.broker_url:
        app.start_services()
        app.record_all([], Reporter("sidekiq", "host:7:abc", concurrency=5, queues=["default"]))
        wait_for(lambda: app.dispatcher.run_pass() or len(world.broker.copies()) == count, "they lie in the broker")
        app.stop_services()
    return task


def saved(app: AsyncTask, job_id: str) -> int:
    """How many elements the ledger knows of."""
    place = app.event(job_id)["checkpoint"] or {}
    return int(place.get("items", 0))


# -- an iterable


@pytest.mark.each_database
def test_an_iterable_performs_every_element_and_tells_how_far_it_is(world: World) -> None:
    app = walking(world)
    with world.working(app):
        task = app.submit("walk", [{"count": 40, "gate": 25}])
        job_id = only_job(app, task.id)
        wait_for(lambda: saved(app, job_id) == 25, "what it did is saved while it runs")
        assert app.event(job_id)["progress"] == {"done": 25, "total": 40, "percent": 62.5}
        world.open_gate()
        task.wait(timeout=120)
    event = app.event(job_id)
    assert (event["status"], event["result"], event["attempt"]) == ("finish", {"items": 40}, 1)
    assert event["progress"] == {"done": 40, "total": 40, "percent": 100.0}
    assert world.shop.performed() == dict.fromkeys(range(40), 1)
    assert hooks(world) == ["start", "complete"]


def test_an_iterable_that_raises_goes_on_with_the_element_that_failed(world: World) -> None:
    app = walking(world)
    with world.working(app):
        task = app.submit("walk", [{"count": 10, "bug": 6}])
        task.wait(timeout=120)
    (event,) = task.events()
    assert (event["status"], event["retries"], event["result"]) == ("finish", 1, {"items": 10})
    assert world.shop.performed() == {**dict.fromkeys(range(10), 1), 6: 2}
    assert hooks(world) == ["start", "resume", "complete"]


def test_an_iterable_gives_its_place_up_to_the_next_process_at_a_shutdown(world: World) -> None:
    app = walking(world)
    with world.working(app):
        task = app.submit("walk", [{"count": 400, "pause": 0.005}])
        job_id = only_job(app, task.id)
        wait_for(lambda: saved(app, job_id) > 0, "it is on its way")
    assert (app.event(job_id)["status"], app.event(job_id)["retries"]) == ("enqueue", 0)
    with world.working(app):
        task.wait(timeout=120)
    assert world.shop.performed() == dict.fromkeys(range(400), 1), "a stop between two elements repeats none"
    assert hooks(world) == ["start", "stop", "resume", "complete"]


@pytest.mark.parametrize(("verb", "status"), [("pause", "enqueue"), ("cancel", "cancelled")])
def test_an_iterable_lets_go_when_its_task_is_paused_or_cancelled(world: World, verb: str, status: str) -> None:
    app = walking(world)
    with world.working(app):
        task = app.submit("walk", [{"count": 100_000, "pause": 0.005}])
        job_id = only_job(app, task.id)
        wait_for(lambda: saved(app, job_id) > 0, "it is on its way")
        getattr(task, verb)()
        wait_for(lambda: app.event(job_id)["status"] == status, "it let go")
    assert saved(app, job_id) == len(world.shop.performed()) < 100_000
    assert app.doctor() == []


def test_what_is_no_iterable_is_refused_where_it_is_declared(world: World) -> None:
    app = world.app()
    with pytest.raises(ConfigError, match=r"needs items\(self, cursor, item\) and each"):
        app.worker(name="half")(type("Half", (app.Iterable,), {"items": lambda self, cursor, item: []}))

    async def each(self: Any, item: Any) -> None:
        """Asynchronous."""

    both = {"items": lambda self, cursor, item: [], "each": each}
    with pytest.raises(ConfigError, match="each must be a plain method"):
        app.worker(name="later")(type("Later", (app.Iterable,), both))
    with pytest.raises(ConfigError, match="must be tracked"):
        app.worker(name="loose", use_task_event=False)(
            type("Loose", (app.Iterable,), {**both, "each": lambda self, item: None})
        )


# -- checkpoints of any job


def test_a_checkpoint_reaches_the_next_attempt_and_is_kept_with_the_outcome(world: World) -> None:
    app, seen = world.app(), []

    @app.worker(retry=2, retry_in=lambda count, error, job: 0.02)
    def steps(item: Any) -> None:
        job = current_job()
        seen.append(job.state)
        job.checkpoint({"step": len(seen), "名": "é"})
        if len(seen) < 3:
            raise ValueError("again")

    task = app.submit(steps, [{}])
    with world.working(app):
        task.wait(timeout=120)
    assert seen == [None, {"step": 1, "名": "é"}, {"step": 2, "名": "é"}]


@pytest.mark.parametrize("value", [object(), float("nan"), "x" * 70_000, "\ud800", {1: {2}}])
def test_a_checkpoint_that_cannot_be_kept_is_refused_in_the_job(world: World, value: Any) -> None:
    app, kept = world.app(), []

    @app.worker(retry=0)
    def saves(item: Any) -> None:
        job = current_job()
        job.checkpoint(7)
        try:
            job.checkpoint(value)
        except InputError as error:
            kept.append((error.code, job.state))

    task = app.submit(saves, [{}])
    with world.working(app):
        task.wait(timeout=120)
    assert kept == [("bad_checkpoint", 7)]


def test_a_worker_killed_in_the_middle_goes_on_from_its_last_place_and_is_no_poison(world: World) -> None:
    app = walking(world, lease_s=1.0, heartbeat_s=0.3)
    task = app.submit("walk", [{"count": 300, "pause": 0.01}])
    job_id, places = only_job(app, task.id), [0]
    for _ in range(4):  # one more than the deaths of a poisonous job
        worker = world.cli("place_app", "worker", "-c", "1", ASYNCTASK_LEASE_S="1.0", ASYNCTASK_HEARTBEAT_S="0.3")
        wait_for(lambda: saved(app, job_id) > places[-1], "it got further", 60)
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
        places.append(saved(app, job_id))
    with world.working(app):
        task.wait(timeout=120)
    assert set(world.shop.performed()) == set(range(300))
    attempts: list[list[int]] = []
    for what, number in world.shop.lines():
        if what == "from":
            attempts.append([int(number)])
        elif what == "did":
            attempts[-1].append(int(number))
    # A server may end a transaction that a killed process had begun, so the place can be further than was read.
    for place, (start, *done) in zip(places, attempts, strict=True):
        assert start >= place, "each attempt goes on from the place that the one before saved"
        assert done == list(range(start, start + len(done))), "and performs nothing before it"
    assert app.event(job_id)["result"] == {"items": 300}
    assert app.doctor() == []


# -- stopping one job, and starting it again


def test_a_running_job_is_stopped_at_its_place_and_started_again(world: World) -> None:
    app = walking(world)
    with world.working(app):
        task = app.submit("walk", [{"count": 400, "pause": 0.005}])
        job_id = only_job(app, task.id)
        wait_for(lambda: saved(app, job_id) > 0, "it is on its way")
        told = app.stop_job(job_id, who="ann")
        assert (told["changed"], told["job_id"], told["actions"]) == (True, job_id, [] if told["stopping"] else ["start"])
        wait_for(lambda: app.event(job_id)["status"] == "stopped", "it let go")
        event = app.event(job_id)
        assert [each["message"] for each in event["messages"]] == ["In progress", "Stopped"]
        assert event["checkpoint"]["items"] == len(world.shop.performed()) < 400
        progress = task.progress()
        assert (progress["counts"]["stopped"], progress["state_reason"], progress["done"]) == (1, "stopped_jobs", False)
        again = app.stop_job(job_id)
        assert (again["changed"], again["checkpoint"]) == (False, event["checkpoint"]), "a second stop changes nothing"
        assert [each["job_id"] for each in app.jobs(resumable=True)] == [job_id]
        started = app.start_job(job_id, who="ann")
        assert (started["changed"], started["job_id"], started["attempt"]) == (True, job_id, 3)
        task.wait(timeout=120)
    assert world.shop.performed() == dict.fromkeys(range(400), 1)
    assert app.jobs(resumable=True) == []
    by_ann = [each["action"] for each in task.log() if each["who"] == "ann"]
    assert by_ann == ["jobs started", "jobs stopped"]
    assert app.doctor() == []


@pytest.mark.parametrize("broker_kind", ["sql", "redis"])
def test_a_job_that_waits_is_taken_out_of_its_queue(world: World) -> None:
    app = world.app()
    task = dispatched(world, app, 2)
    first, second = (event["job_id"] for event in task.events())
    told = app.stop_job(first)
    assert (told["status"], told["changed"], told["detail"]) == ("stopped", True, "it is stopped, until it is started")
    assert first not in {jid for jid, _ in world.broker.copies()}
    with world.working(app):
        wait_for(lambda: app.event(second)["status"] == "finish", "the other runs")
        assert app.event(first)["status"] == "stopped"
        app.start_job(first)
        task.wait(timeout=120)
    assert world.shop.performed() == {0: 1, 1: 1}
    assert app.doctor() == []


def test_a_job_that_a_process_has_borrowed_and_not_begun_is_stopped_by_that_process(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Durations, "knows", lambda self, task_id: True)
    monkeypatch.setattr(Durations, "of", lambda self, task_id, unknown: 0.01)
    monkeypatch.setattr(Recheck, "_return_surplus", lambda self, now: None)
    app = world.app()
    with world.working(app, concurrency=1) as launcher:
        task = app.submit("gated", numbers(3))
        wait_for(lambda: len(launcher.pool.jobs) == 2 and world.shop.performed("began"), "one runs, two lie ready")
        job_id = task.events()[1]["job_id"]
        told = app.stop_job(job_id)
        assert (told["status"], told["stopping"], told["changed"]) == ("enqueue", True, True)
        wait_for(lambda: app.event(job_id)["status"] == "stopped", "the process lets it go")
        world.open_gate()
        wait_for(lambda: task.progress()["state_reason"] == "stopped_jobs", "the others ran")
    assert world.shop.performed() == {0: 1, 2: 1}
    assert task.progress()["counts"]["stopped"] == 1
    assert app.doctor() == []


def test_a_stop_is_not_forgotten_when_the_worker_dies(world: World) -> None:
    app = walking(world, lease_s=1.0, heartbeat_s=0.3)
    task = app.submit("walk", [{"count": 3, "gate": 1}])
    job_id = only_job(app, task.id)
    worker = world.cli("place_app", "worker", "-c", "1", ASYNCTASK_LEASE_S="1.0", ASYNCTASK_HEARTBEAT_S="0.3")
    wait_for(lambda: saved(app, job_id) == 1, "it hangs in the second element", 60)
    assert app.stop_job(job_id)["stopping"]
    with pytest.raises(NotNow, match="has not let go") as refused:
        app.start_job(job_id)
    assert refused.value.code == "stopping"
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    with world.working(app):
        wait_for(lambda: app.event(job_id)["status"] == "stopped", "recovered, it is stopped")
        world.open_gate()
        app.start_job(job_id)
        task.wait(timeout=120)
    assert world.shop.performed() == {0: 1, 1: 2, 2: 1}


def test_what_cannot_be_started_says_why(world: World) -> None:
    app = world.app()
    task = app.submit("gated", numbers(1))
    job_id = only_job(app, task.id)
    waiting = app.start_job(job_id)
    assert (waiting["changed"], waiting["status"]) == (False, "enqueue")
    with world.working(app):
        wait_for(lambda: app.event(job_id)["status"] == "working", "it runs")
        with pytest.raises(NotNow) as running:
            app.start_job(job_id)
        world.open_gate()
        task.wait(timeout=120)
    with pytest.raises(NotNow) as finished:
        app.start_job(job_id)
    assert (running.value.code, finished.value.code) == ("running", "finished")
    over = app.stop_job(job_id)
    assert (over["changed"], over["detail"]) == (False, "it ended finish")
    for act in (app.start_job, app.stop_job):
        with pytest.raises(NotFound):
            act("f" * 24)


def test_a_job_for_later_is_started_now_and_a_stopped_one_of_a_cancelled_task_is_cancelled(world: World) -> None:
    app = world.app()
    later = str(app.workers["note"].perform_in(3_600, numbers(1)[0]))
    task = app.submit("note", numbers(2, first=5))
    first, _ = (event["job_id"] for event in task.events())
    app.stop_job(first)
    with world.working(app):
        assert app.start_job(later)["changed"]
        wait_for(lambda: app.event(later)["status"] == "finish", "it started at once")
        wait_for(lambda: task.progress()["state_reason"] == "stopped_jobs", "only the stopped one is left")
        task.cancel()
        task.wait(timeout=120)
    assert (task.progress()["counts"]["finish"], task.progress()["counts"]["cancelled"]) == (1, 1)


def test_checks_of_a_worker_refuse_with_their_reason(world: World) -> None:
    app, asked = world.app(), []

    def check(action: str, event: Any) -> str | None:
        asked.append((action, event["params"]["n"]))
        if action == "start":
            raise NormalException("the shop is shut")
        return None

    @app.worker(checks=[check])
    def careful(item: Any) -> None:
        """Does nothing."""

    task = app.submit(careful, [{"n": 4}])
    job_id = only_job(app, task.id)
    app.stop_job(job_id)
    with pytest.raises(Conflict, match="the shop is shut"):
        app.start_job(job_id)
    assert asked == [("stop", 4), ("start", 4)]
    assert app.event(job_id)["status"] == "stopped"


def test_a_stopped_job_keeps_the_place_in_the_line_of_its_key(world: World) -> None:
    app = world.app()

    @app.worker(key="phone")
    def command(item: Any) -> None:
        world.shop.note("did", item["n"])

    task = app.submit(command, [{"phone": "a", "n": n} for n in range(3)])
    events = task.events()
    app.stop_job(events[0]["job_id"])
    with world.working(app):
        other = app.submit(command, [{"phone": "b", "n": 7}])
        other.wait(timeout=120)
        assert set(world.shop.performed()) == {7}, "the line of the stopped job waits with it"
        app.start_job(events[0]["job_id"])
        task.wait(timeout=120)
    assert [line[1] for line in world.shop.lines() if line[0] == "did"] == ["7", "0", "1", "2"]
    assert app.doctor() == []


def test_a_lone_job_of_an_engine_is_not_stopped_here(world: World) -> None:
    app = world.app()
    job_id = str(app.workers["note"].perform_in(3_600, numbers(1)[0]))
    world.sql("UPDATE events SET queue = 'celery/default' WHERE job_id = ?", job_id)
    for act in (app.stop_job, app.start_job):
        with pytest.raises(Conflict, match="one of celery") as refused:
            act(job_id)
        assert refused.value.code == "other_engine"
    assert app.operations.job(job_id)["actions"] == ["restart", "kill", "delete"]


def test_a_retried_job_that_follows_in_anothers_place_finds_its_checkpoint(world: World) -> None:
    app = world.app()
    seen = list[tuple[int, bool, Any]]()

    @app.worker(retry=1, retry_in=lambda count, error, job: 0.01)
    def steps(item: Any) -> None:
        job = current_job()
        # A job that was given back before it began has another attempt when it is performed first.
        is_again = any(n == item["n"] for n, _, _ in seen)
        seen.append((item["n"], is_again, job.state))
        if not is_again:
            job.checkpoint(item["n"])
            raise ValueError("again")

    task = app.submit(steps, [{"n": n} for n in range(60)], parallel=1)
    with world.working(app):
        task.wait(timeout=120)
    assert sorted(each for each in seen if each[1]) == [(n, True, n) for n in range(60)]
    assert app.doctor() == []
