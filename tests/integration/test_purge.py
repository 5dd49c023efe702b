"""Purge: what ended long ago goes, whole, and nothing else does."""

from __future__ import annotations

import io
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.world import World, numbers

from asynctask import AsyncTask
from asynctask.cli.root import run
from asynctask.database import tables
from asynctask.errors import InputError, NotFound
from asynctask.ledger import base, purge
from asynctask.ledger.base import Ledger
from asynctask.lists.cleaning import PURGE_S, Cleaning
from asynctask.lists.rows import remove_list
from asynctask.logs import log_to_stderr
from asynctask.task import TaskHandle
from asynctask.testing import wait_for

CSV = "n,kind\n1,ok\n2,refuse\nx,ok\n3,bug\n"
OF_TASKS = [table for table in tables.metadata.sorted_tables if "task_id" in table.c]


def sheet(app: AsyncTask, **options: Any) -> TaskHandle:
    return app.submit_file("order", app.uploads.store(io.BytesIO(CSV.encode()), "a.csv"), **options)


def left(world: World, task_id: int) -> dict[str, int]:
    """The number of rows of a Task by table."""
    found = {t.name: world.one(f"SELECT count(*) FROM {t.name} WHERE task_id = ?", task_id) for t in OF_TASKS}
    found["tasks"] = world.one("SELECT count(*) FROM tasks WHERE id = ?", task_id)
    found["callbacks"] = world.one("SELECT count(*) FROM events WHERE callback_of = ?", task_id)
    return {name: number for name, number in found.items() if number}


def uploads(app: AsyncTask) -> int:
    return sum(1 for _ in (Path(app.config.data_dir) / "uploads").iterdir())


def ended(world: World, app: AsyncTask, tasks: list[TaskHandle]) -> None:
    with world.working(app):
        for task in tasks:
            task.wait(120)


@pytest.mark.each_database(reason="each has statements of its own for slices")
def test_what_ended_goes_with_everything_of_it_and_nothing_else_does(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purge, "SLICE", 2)
    app = world.app()
    gone = [sheet(app, on_complete="told"), sheet(app), app.submit("note", numbers(7), session="s", parallel=2)]
    alone = str(app.workers["note"].perform_async({"n": 50}))
    ended(world, app, gone)
    wait_for(lambda: app.operations.job(alone)["status"] == "finish", "the job without a Task is over")
    stays, waits = app.submit("note", numbers(5)), str(app.workers["note"].perform_in(3_600, {"n": 51}))
    files = uploads(app)
    counted = app.purge(0, dry_run=True)
    removed = app.purge(0)
    assert removed == counted == purge.Purged(tasks=3, events=13, rejects=2, files=2, jobs=1)
    assert [left(world, task.id) for task in gone] == [{}, {}, {}]
    assert uploads(app) == files - 2
    with pytest.raises(NotFound):
        gone[0].progress()
    with pytest.raises(NotFound):
        app.operations.job(alone)
    assert app.operations.job(waits)["status"] == "enqueue"
    assert app.purge(0) == purge.Purged()
    ended(world, app, [stays])
    assert stays.progress()["counts"]["finish"] == 5
    assert app.doctor() == []


@pytest.mark.one_database(reason="the statements that remove are those of the first test")
def test_the_young_stay_and_states_and_owners_choose(world: World) -> None:
    app = world.app()
    finished, cancelled, other = (app.submit("note", numbers(2), owner=owner) for owner in ("a", "a", "b"))
    alone = str(app.workers["note"].perform_async({"n": 50}))
    cancelled.cancel()
    ended(world, app, [finished, cancelled, other])
    wait_for(lambda: app.operations.job(alone)["status"] == "finish", "the job without a Task is over")
    assert app.purge(3_600) == purge.Purged()
    assert app.purge(0, states=["cancelled"], owner="b") == purge.Purged()
    assert app.purge(0, states=["cancelled"]).tasks == 1
    assert app.purge(0, owner="a").tasks == 1
    assert other.progress()["done"]
    assert app.operations.job(alone)["status"] == "finish", "it has no owner and no state of a Task"
    with pytest.raises(InputError, match="running cannot be purged"):
        app.purge(0, states=["running"])


@pytest.mark.one_database(reason="the statements that remove are those of the first test")
def test_a_purge_that_ended_half_way_shows_nothing_and_is_continued(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken out: the mark, and its check where a Task is read."""
    monkeypatch.setattr(purge, "SLICE", 2)
    app = world.app()
    task, kept = app.submit("note", numbers(7)), app.submit("note", numbers(1))
    ended(world, app, [task, kept])
    world.sql("UPDATE tasks SET finished_at = 1 WHERE id = ?", task.id)
    half = purge.Purge(app.ledger, purge.Old(2), lambda source: remove_list(app.uploads, source))
    assert half.step()
    assert half.step()
    assert 0 < left(world, task.id)["events"] < 7
    for call in (task.progress, task.retry, task.cancel, lambda: task.update(title="x")):
        with pytest.raises(NotFound):
            call()
    assert [each["task_id"] for each in app.tasks()] == [kept.id]
    assert app.doctor() == []
    assert app.purge(3_600).tasks == 1
    assert left(world, task.id) == {}
    assert kept.progress()["done"]


def test_a_task_that_is_opened_again_meanwhile_stays(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    app = world.app()
    task = app.submit("note", [{"n": 1, "refuse": True}])
    ended(world, app, [task])
    real = base.each_free

    def opened_first(*args: Any) -> Any:
        assert task.retry()
        return real(*args)

    monkeypatch.setattr("asynctask.ledger.purge.each_free", opened_first)
    assert app.purge(0).tasks == 0
    ended(world, app, [task])
    assert task.progress()["generation"] == 2


@pytest.mark.each_database(reason="versions are summed in SQL, and each locks in its own way")
def test_the_version_of_a_task_never_falls_while_tasks_below_it_are_purged(world: World) -> None:
    """Of ``middle``, which is purged alone, ``low`` stays and leaves the sums; the last two are purged together."""
    app = world.app()
    top = app.submit("note", numbers(1), open=True)
    middle = app.submit("note", numbers(20), parent=top.id, owner="a")
    low = app.submit("note", numbers(20), parent=middle.id, owner="b")
    upper = app.submit("note", numbers(20), parent=top.id, owner="c")
    lower = app.submit("note", numbers(20), parent=upper.id, owner="c")
    ended(world, app, [low, middle, lower, upper])
    assert top.progress()["children"]["count"] == 4
    for owner, removed, left_below in (("a", 1, 2), ("b", 1, 2), ("c", 2, 0)):
        before = top.progress()
        seen, mark = [before["version"]], app.changed({top.id: None})[top.id].mark
        unfinished = purge.Purge(app.ledger, purge.Old(app.ledger.now(), owner=owner), lambda source: False)
        assert unfinished.step()  # as a process that dies during its purge
        seen.append(top.progress()["version"])
        steps = purge.Purge(app.ledger, purge.Old(app.ledger.now(), owner=owner), lambda source: False)
        while steps.step():
            seen.append(top.progress()["version"])
        after = top.progress()
        assert steps.removed.tasks == removed
        assert (after["children"] or {"count": 0})["count"] == left_below
        assert [*seen, after["version"]] == sorted([*seen, after["version"]])
        if after["children"] != before["children"]:
            assert after["version"] > before["version"]
            assert app.changed({top.id: mark})[top.id].progress == after
    top.seal()
    ended(world, app, [top])
    assert app.doctor() == []


@pytest.mark.each_database(reason="each locks in its own way")
def test_two_purges_remove_children_while_others_end(world: World) -> None:
    app = world.app()
    top = app.submit("note", numbers(1), open=True)
    middle = app.submit("note", numbers(1), parent=top.id, open=True)
    seen = [top.progress()["version"]]
    with world.working(app), ThreadPoolExecutor(2) as threads:
        for _ in range(3):
            ending = [app.submit("note", numbers(2), parent=each.id) for each in (top, middle)]
            list(threads.map(app.purge, (0.0, 0.0)))
            seen.append(top.progress()["version"])
            for task in ending:
                with suppress(NotFound):  # it is purged already
                    task.wait(60)
        list(threads.map(app.purge, (0.0, 0.0)))
        seen.append(top.progress()["version"])
        assert seen == sorted(set(seen))
        for task in (middle, top):
            task.seal()
            task.wait(60)
    wait_for(lambda: app.purge(0) == purge.Purged(), "what a purge left goes with the next")
    assert world.one("SELECT count(*) FROM tasks") == 0
    assert app.doctor() == []


@pytest.mark.one_database(reason="the statements that remove are those of the first test")
def test_a_file_that_cannot_be_removed_keeps_no_task(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    app = world.app()
    task = sheet(app)
    ended(world, app, [task])

    def refuse(name: str) -> bool:
        raise PermissionError(13, "not yours")

    monkeypatch.setattr(app.uploads, "remove", refuse)
    assert app.purge(0) == purge.Purged(tasks=1, events=3, rejects=1, files=0)


@pytest.mark.one_database(reason="the statements that remove are those of the first test")
def test_maintenance_purges_once_a_day_where_it_is_asked_to(world: World) -> None:
    app = world.app()
    moved = [0.0]

    class Later(type(app.clock)):  # type: ignore[misc]
        def monotonic(self) -> float:
            return float(super().monotonic()) + moved[0]

    ledger: Ledger = replace(app.ledger, clock=Later())

    def maintenance(after_s: float) -> Cleaning:
        return Cleaning(ledger, app.uploads, purge_after_s=after_s)

    first = sheet(app)
    ended(world, app, [first])
    world.sql("UPDATE tasks SET finished_at = 1")
    never, daily = maintenance(0), maintenance(3_600)
    assert not never.purge()
    assert first.progress()["done"]
    wait_for(lambda: not daily.purge(), "it is through")
    assert left(world, first.id) == {}
    second = sheet(app)
    ended(world, app, [second])
    world.sql("UPDATE tasks SET finished_at = 1")
    assert not daily.purge()
    assert second.progress()["done"], "not twice a day"
    moved[0] = PURGE_S
    wait_for(lambda: not daily.purge(), "it is through")
    assert left(world, second.id) == {}


@pytest.mark.one_database(reason="the statements that remove are those of the first test")
def test_the_command_says_what_it_would_remove_asks_and_removes(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = world.app()
    task = sheet(app)
    ended(world, app, [task])
    monkeypatch.setenv("ASYNCTASK_DATABASE_URL", app.config.database_url)
    monkeypatch.setenv("ASYNCTASK_DATA_DIR", app.config.data_dir)
    command = ["purge", "--older-than"]
    log_to_stderr()
    assert run([*command, "90 days"]) == 2
    assert "write a number with d, h, m or s" in capsys.readouterr().err
    assert run([*command, "90d", "--yes"]) == 0
    assert "Removed: 0 Tasks" in capsys.readouterr().out
    assert run([*command, "0s", "--dry-run"]) == 0
    assert "Would remove: 1 Task (3 items, 1 rejected row, 1 file), 0 jobs without a Task." in capsys.readouterr().out
    assert run([*command, "0s", "--dry-run", "--state", "rejected", "--state", "cancelled"]) == 0
    assert "Would remove: 0 Tasks" in capsys.readouterr().out
    assert run([*command, "0s"]) == 2
    assert "--yes" in capsys.readouterr().err
    assert task.progress()["done"]
    assert run(["--json", *command, "0s", "--yes"]) == 0
    found = {"tasks": 1, "events": 3, "rejects": 1, "files": 1, "jobs": 0, "dry_run": False}
    assert json.loads(capsys.readouterr().out) == found
    assert left(world, task.id) == {}
