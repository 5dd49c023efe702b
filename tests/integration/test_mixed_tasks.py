"""A Task of jobs for several workers: each item held against its own worker's model, the counts and knobs the Task's."""

from __future__ import annotations

from typing import Any

import pytest
from support.webshop import client_of
from support.world import World, numbers

from asynctask import AsyncTask
from asynctask.errors import ConfigError, InputError, UnknownWorker
from asynctask.lists.dry_run import DryRun
from asynctask.submission import Submission

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")


def jobs(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Of each third one for another worker; those of ``order`` have rows as a file has."""
    names = "note", "shaky", "order"
    return [(names[n % 3], {"n": n, "kind": "good"} if n % 3 == 2 else {"n": n}) for n in range(count)]


def as_json(listed: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    return [{"worker": name, "item": item} for name, item in listed]


def finished(world: World, task: Any) -> dict[str, int]:
    """How many of each worker are finished."""
    found = world.sql(
        "SELECT worker_name, COUNT(*) FROM events WHERE task_id = ? AND status = 'finish' GROUP BY worker_name", task.id
    )
    return dict(found)


@pytest.mark.each_database(reason="its rows have more columns")
def test_each_worker_performs_its_own_and_retries_as_often_as_it_says(world: World) -> None:
    app = world.app()
    with world.working(app):
        task = app.submit_jobs(jobs(30), title="Everything for Monday", parallel=4)
        assert task.wait(120)["counts"]["finish"] == 30
    assert finished(world, task) == dict.fromkeys(("note", "shaky", "order"), 10)
    assert task.progress()["worker"] == "*"
    # One that is given back or lost on its way has more.
    assert min(event["attempt"] for event in task.events() if event["worker_name"] == "shaky") == 2
    world.check_promises(app, [task.id], 30)


def test_a_long_list_is_split_and_its_first_jobs_run_meanwhile(world: World) -> None:
    app = world.app()
    with world.working(app):
        task = app.submit_jobs(("note", item) if item["n"] % 2 else ("order", item) for item in numbers(1_200, kind="good"))
        assert task.wait(120)["counts"]["finish"] == 1_200
    assert world.one("SELECT COUNT(*) FROM events WHERE worker_name = 'note' AND task_id = ?", task.id) == 600


def test_strict_jobs_of_a_generator_keep_their_workers(world: World) -> None:
    """They wait in a file until all are checked. Taken out: the worker in its lines."""
    app = world.app()
    with world.working(app):
        task = app.submit_jobs((each for each in jobs(6)), strict=True)
        assert task.wait(120)["counts"]["finish"] == 6
    assert finished(world, task) == dict.fromkeys(("note", "shaky", "order"), 2)


def test_an_item_that_its_worker_does_not_take_is_refused_with_its_row(world: World) -> None:
    app = world.app()
    app.worker(name="rated", rate="5/s")(lambda item: None)
    listed = [("note", {"n": 1}), ("order", {"n": "many"}), ("nobody", {"n": 2}), ("plain", {"n": 3}), ("rated", {"n": 4})]
    task = app.submit_jobs(listed)
    refused = {each["row"]: each for each in task.rejects()}
    assert sorted(refused) == [2, 3, 4, 5]
    assert {error["column"] for error in refused[2]["errors"]} == {"n", "kind"}
    assert refused[2]["cells"]["worker"] == "order"
    assert [refused[row]["errors"][0]["code"] for row in (3, 4)] == ["unknown_worker"] * 2
    assert "has a rate" in refused[5]["errors"][0]["message"]
    assert task.progress()["counts"]["total"] == 1


def test_the_first_job_says_where_they_go(world: World) -> None:
    app = world.app()
    app.worker(name="upkeep", queue="low", priority=360)(lambda item: None)
    task = app.submit_jobs([("upkeep", {}), ("note", {"n": 1})])
    assert world.sql("SELECT queue, priority FROM tasks WHERE id = ?", task.id) == [("low", 360)]
    task = app.submit_jobs([("upkeep", {}), ("note", {"n": 1})], queue="default", priority=1)
    assert world.sql("SELECT queue, priority FROM tasks WHERE id = ?", task.id) == [("default", 1)]
    with pytest.raises(UnknownWorker):
        app.submit_jobs([("nobody", {})])
    with pytest.raises(ConfigError, match="cannot be named"):
        app.worker(name="*")(lambda item: None)


def test_its_callbacks_are_the_tasks(world: World) -> None:
    app = world.app()
    told: list[int] = []
    app.worker(name="tell", retry=0)(lambda progress: told.append(progress["counts"]["finish"]))
    with world.working(app):
        task = app.submit_jobs(jobs(6), on_complete="tell")
        assert task.wait(120)["state"] == "finished"
        answer = client_of(app).post("/api/tasks", json={"jobs": as_json(jobs(3)), "on_complete": "tell"})
        assert app.task(answer.json["task_id"]).wait(120)["state"] == "finished"
    assert told == [6, 3]


def test_options_mean_the_whole_list(world: World) -> None:
    app = world.app()
    listed = [("note", {"n": 1}), ("shaky", {"n": 1}), ("order", {"n": 2, "kind": "good"})]
    found = app.submit_jobs(listed, dry_run=True, unique=["n"])
    assert isinstance(found, DryRun)
    assert (found.accepted, found.rejected) == (2, 1)
    first = app.submit_jobs(listed, idempotency_key="k")
    assert app.submit_jobs(listed, idempotency_key="k").id == first.id
    with pytest.raises(InputError, match="another body"):
        app.submit_jobs(listed[:2], idempotency_key="k")
    with pytest.raises(InputError, match="1 of 4 rows is rejected"):
        app.submit_jobs([*listed, ("nobody", {})], strict=True)
    assert app.submit_jobs([]).progress()["state"] == "rejected"


@pytest.mark.parametrize("count", [30, 1_200])
def test_over_http_few_are_written_at_once_and_many_are_stored_until_they_are_split(world: World, count: int) -> None:
    app = world.app()
    client = client_of(app)
    with world.working(app):
        answer = client.post("/api/tasks", json={"jobs": [*as_json(jobs(count)), {"worker": "order", "item": {"n": 1}}, 5]})
        assert answer.status_code == 202, answer.json
        task = app.task(answer.json["task_id"])
        assert task.wait(120)["counts"]["finish"] == count
    assert finished(world, task) == dict.fromkeys(("note", "shaky", "order"), count // 3)
    assert task.progress()["split"]["rejected"] == 2
    codes = {each["row"]: each["errors"][0]["code"] for each in task.rejects()}
    assert codes == {count + 1: "missing", count + 2: "not_a_job"}


def test_another_process_goes_on_with_a_split(world: World) -> None:
    app: AsyncTask = world.app()
    core = app._made()
    core.submitter._start_split = lambda *_: False  # type: ignore[method-assign]  # as if the process had died here
    found = app.hand_in(Submission(None, as_json(jobs(1_200)), app_options(), is_kept=True))
    assert not isinstance(found, DryRun)
    world.end_leases()
    other = world.app()
    other.split_task(found.id, core.ledger.identity)
    with world.working(other):
        assert other.task(found.id).wait(120)["counts"]["finish"] == 1_200


def app_options() -> Any:
    from asynctask.lists.options import check_options

    return check_options({})
