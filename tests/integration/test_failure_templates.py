"""The retries and the dead, grouped by the templates of their errors across Tasks, and what is done to all of one."""

from __future__ import annotations

import io
import json
import threading
from typing import Any

import pytest
from support.world import World, numbers

from asynctask import AsyncTask
from asynctask._version import __version__
from asynctask.cli.root import run
from asynctask.errors import InputError, NotFound
from asynctask.ledger import queries
from asynctask.task import TaskHandle
from asynctask.testing import wait_for
from webapi import create_app


class Shop:
    """A worker whose items raise until :attr:`is_up`: most for the same reason. ``later`` is retried in an hour."""

    def __init__(self, app: AsyncTask) -> None:
        self.is_up = False
        self.app = app
        app.worker(self._order, name="buy", retry=0)
        app.worker(self._order, name="later", retry=5, retry_in=lambda *_: 3_600.0)
        app.worker(self._order, name="loose", retry=0, use_task_event=False)

    def _order(self, item: dict[str, Any]) -> None:
        if not self.is_up:
            raise ConnectionError(f"order {item['n']}: the shop is down") if not item.get("bug") else KeyError("sku")

    def ended(self, world: World, tasks: list[TaskHandle]) -> None:
        with world.working(self.app):
            for task in tasks:
                task.wait(120)


DOWN = "ConnectionError: order ‹n›: the shop is down"
BUG = "KeyError: ‹text›"


def cli(app: AsyncTask, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    out = io.StringIO()
    monkeypatch.setenv("ASYNCTASK_DATABASE_URL", app.config.database_url)
    monkeypatch.setenv("ASYNCTASK_DATA_DIR", app.config.data_dir)
    return run(words, stdout=out), out.getvalue()


@pytest.mark.each_database(reason="each orders the rows of an index, and reads a limited part of it, in its own way")
def test_the_dead_of_several_tasks_are_grouped_and_run_again_by_template(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = world.app()
    shop = Shop(app)
    first, second = app.submit("buy", numbers(12)), app.submit("buy", [*numbers(3), *numbers(2, 50, bug=True)])
    lone = str(app.workers["buy"].perform_async(*numbers(1, 99)))
    app.workers["loose"].perform_async(*numbers(1, 100))
    with world.working(app):
        for task in (first, second):
            task.wait(120)
        wait_for(lambda: app.operations.listed("dead")["total"] == 19, "all are dead")
    found = app.operations.templates("dead")
    assert (found["jobs"], found["complete"]) == (19, True)
    down, bug = found["templates"]
    assert {name: down[name] for name in ("template", "code", "count", "task_count", "tasks")} == {
        "template": DOWN, "code": "raised", "count": 17, "task_count": 2, "tasks": [second.id, first.id]
    }  # fmt: skip
    assert (bug["template"], bug["count"], bug["tasks"], bug["workers"]) == (BUG, 2, [second.id], ["buy"])
    assert set(down["workers"]) == {"buy", "loose"}
    assert (sum(down["hours"]), down["hours"][-1]) == (17, 17)
    assert str(down["first_at"]) <= str(down["last_at"])
    assert app.event(str(bug["sample_job_id"]))["params"]["bug"]

    client: Any = create_app(app).test_client()
    assert client.get("/api/dead/templates").json == json.loads(json.dumps(found))
    assert client.get("/api/retries/templates").json == {"templates": [], "jobs": 0, "complete": True}
    assert client.get("/api/scheduled/templates").status_code == 404

    shop.is_up = True
    code, said = cli(app, monkeypatch, "dead", "templates")
    assert (code, DOWN in said, "19 jobs of 2 templates." in said) == (0, True, True)
    code, said = cli(app, monkeypatch, "dead", "restart", "--template", down["id"], "--first", "2")
    assert (code, said.strip()) == (0, "2 jobs started again.")
    shop.ended(world, [first, second])
    assert app.operations.templates("dead")["jobs"] == 17
    assert app.operations.act("dead", "dismiss", [str(bug["sample_job_id"])]).done == 1
    answer = client.post(f"/api/dead/templates/{down['id']}/restart").json
    assert answer == {"done": 15, "skipped": []}
    shop.ended(world, [first, second])
    with world.working(app):
        wait_for(lambda: app.event(lone)["status"] == "finish", "the lone job ran")
        wait_for(lambda: app.operations.templates("dead")["jobs"] == 1, "the untracked job ran")
    assert (first.counts["finish"], second.counts) == (12, {**second.counts, "finish": 3, "error": 2})
    assert first.progress()["generation"] <= 3, "jobs of one Task are retried together"
    assert app.operations.act_on_template("dead", "dismiss", bug["id"]).done == 1
    assert app.operations.templates("dead") == {"templates": [], "jobs": 0, "complete": True}
    with pytest.raises(NotFound, match="no job of the template"):
        app.operations.act_on_template("dead", "restart", bug["id"])
    assert client.post(f"/api/dead/templates/{bug['id']}/restart").status_code == 404
    assert client.post(f"/api/dead/templates/{bug['id']}/kill").status_code == 404
    assert app.doctor() == []


@pytest.mark.each_database(reason="each orders the rows of an index, and reads a limited part of it, in its own way")
def test_retries_are_grouped_and_run_at_once_or_given_up_by_template(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    app = world.app()
    shop = Shop(app)
    task = app.submit("later", [*numbers(4), *numbers(3, 50, bug=True)], key="n")
    with world.working(app):
        wait_for(lambda: task.progress()["retrying"] == 7, "all wait for a retry")
    down, bug = app.operations.templates("retries")["templates"]
    assert [(each["template"], each["count"], each["tasks"]) for each in (down, bug)] == [
        (DOWN, 4, [task.id]), (BUG, 3, [task.id])
    ]  # fmt: skip
    with pytest.raises(InputError, match="only dead jobs can be dismissed"):
        app.operations.act_on_template("retries", "dismiss", bug["id"])
    with pytest.raises(InputError, match="there is no list"):
        app.operations.templates("scheduled")
    with pytest.raises(InputError, match="first must be from 1"):
        app.operations.act_on_template("retries", "restart", bug["id"], first=0)
    assert cli(app, monkeypatch, "retries", "kill", "--template", bug["id"])[0] == 2, "it asks, and nobody can answer"
    assert cli(app, monkeypatch, "retries", "restart", "--first", "1", "--all")[0] == 2
    assert cli(app, monkeypatch, "retries", "kill", "--template", bug["id"], "--yes")[0] == 0
    assert app.operations.act_on_template("retries", "restart", down["id"], first=3).done == 3
    shop.is_up = True
    with world.working(app):
        wait_for(lambda: task.counts["finish"] == 3, "three ran")
    (left,) = app.operations.templates("retries")["templates"]
    assert left["count"] == 1
    (killed,) = app.operations.templates("dead")["templates"]
    assert (killed["code"], killed["count"]) == ("killed", 3)


@pytest.mark.each_database(reason="each reads a limited part of the index in its own way")
def test_a_part_of_a_long_list_is_grouped_and_said_to_be_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    app = world.app()
    shop = Shop(app)
    tasks = [app.submit("buy", numbers(4)), app.submit("buy", numbers(4, bug=True))]
    shop.ended(world, tasks)
    monkeypatch.setattr(queries, "SCANNED", 3)
    found = app.operations.templates("dead")
    assert [(each["count"], each["tasks"]) for each in found["templates"]] == [(3, [tasks[1].id])], "the newest first"
    assert (found["jobs"], found["complete"]) == (3, False)


@pytest.mark.parametrize("broker_kind", ["redis"])
@pytest.mark.one_database(reason="it is about the broker")
def test_untracked_jobs_in_redis_are_grouped_and_run_again_by_template(world: World) -> None:
    app = world.app()
    shop = Shop(app)
    app.workers["loose"].perform_bulk([(each,) for each in numbers(5)])
    with world.working(app):
        wait_for(lambda: app.operations.listed("dead")["total"] == 5, "all are dead")
    (down,) = app.operations.templates("dead")["templates"]
    assert (down["template"], down["count"], down["workers"], down["sample_job_id"]) == (DOWN, 5, ["loose"], None)
    shop.is_up = True
    assert app.operations.act_on_template("dead", "restart", down["id"], first=2).done == 2
    assert app.operations.templates("dead")["jobs"] == 3
    skipped = app.operations.act_on_template("dead", "dismiss", down["id"])
    assert (skipped.done, len(skipped.skipped)) == (0, 3)
    assert app.operations.act_on_template("dead", "delete", down["id"]).done == 3
    with world.working(app):
        wait_for(lambda: not any(each["waiting"] for each in app.operations.queues()), "they ran")
    assert app.operations.templates("dead")["jobs"] == 0


@pytest.mark.each_database(reason="each reads the jobs that run by an index of its own")
def test_a_process_names_the_tracked_jobs_that_it_runs(world: World) -> None:
    app = world.app()
    leave = threading.Event()
    for name, tracked in (("held", True), ("loose", False)):
        app.worker(lambda item: leave.wait(60) and None, name=name, retry=0, use_task_event=tracked)
    task = app.submit("held", numbers(2))
    lone = str(app.workers["held"].perform_async(*numbers(1, 9)))
    app.workers["loose"].perform_async(*numbers(1, 10))
    with world.working(app):
        try:

            def jobs() -> list[dict[str, Any]]:
                return [dict(job) for each in app.operations.processes() for job in each["jobs"]]

            wait_for(lambda: len(jobs()) == 3, "all tracked ones are known to run")
            assert {(job["job_id"], job["task_id"], job["worker"]) for job in jobs()} == {
                *((event["job_id"], task.id, "held") for event in task.events()),
                (lone, None, "held"),
            }
            (process,) = (each for each in app.operations.processes() if each["kind"] == "worker")
            assert (process["version"], len(process["jobs"])) == (__version__, 3)
            client: Any = create_app(app).test_client()
            (served,) = (each for each in client.get("/api/processes").json["processes"] if each["jobs"])
            assert {job["job_id"] for job in served["jobs"]} == {job["job_id"] for job in jobs()}
        finally:
            leave.set()
        task.wait(60)
        wait_for(lambda: not jobs(), "none runs")
