"""Retries of chosen rows: by message, and so many of them."""

from __future__ import annotations

from typing import Any

import pytest
from support.world import World

from asynctask import AsyncTask
from asynctask.errors import Conflict, InputError
from asynctask.ledger import control
from asynctask.task import TaskHandle, event_cursor

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")


def failed(world: World, app: AsyncTask) -> TaskHandle:
    """Twelve rows: three that finished, six refused, three with an error."""
    kinds: list[dict[str, Any]] = [{}, {"refuse": True}, {"refuse": True}, {"bug": True}]
    with world.working(app):
        task = app.submit("note", [{"n": n, **kinds[n % 4]} for n in range(12)])
        task.wait(120)
    return task


def turn_rest(app: AsyncTask, task: TaskHandle) -> None:
    """What a retry on a slow machine leaves to the dispatcher, of which none runs."""
    while control.change_rows(app.ledger, task.id):
        pass


def again(task: TaskHandle) -> list[int]:
    """The rows that wait, from 0."""
    return sorted(int(each["params"]["n"]) for each in task.events(status="enqueue"))


@pytest.mark.each_database(reason="each compares texts in its own way")
def test_only_failures_of_one_message_run_again(world: World) -> None:
    app = world.app()
    task = failed(world, app)
    assert not task.retry(message="refuse")
    assert not task.retry(status="error", message="refused"), "those with the message have another status"
    assert not task.retry(message="a\0b")
    assert task.progress()["generation"] == 1
    assert task.retry(message="refused")
    assert again(task) == [1, 2, 5, 6, 9, 10]
    assert task.progress()["counts"]["error"] == 3
    with world.working(app):
        task.wait(120)
    assert task.progress()["counts"] | {"total": 0} == {
        "total": 0, "enqueue": 0, "working": 0, "stopped": 0, "finish": 3, "failed": 6, "error": 3, "cancelled": 0
    }  # fmt: skip
    assert task.progress()["generation"] == 2
    assert task.log()[0 if task.log()[0]["action"] == "retried" else 1]["detail"]["message"] == "refused"
    assert app.doctor() == []


def test_done_never_falls_within_a_generation_while_a_retry_turns_its_rows(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "SLICE", 2)
    monkeypatch.setattr(control, "_SQLITE_SLICE", 2)
    app = world.app()
    task = failed(world, app)
    seen = [task.progress()]
    assert control.retry(app.ledger, task.id)
    seen.append(task.progress())
    while control.change_rows(app.ledger, task.id):
        seen.append(task.progress())
    seen.append(task.progress())
    with world.working(app):
        seen.append(task.wait(120))
    assert [p["generation"] for p in seen] == [1] + [2] * (len(seen) - 1)
    assert len(seen) > 6
    done = [p["progress"]["done"] for p in seen]
    assert (done[0], done[1:-1], done[-1]) == (12, [3] * (len(seen) - 2), 12)
    assert all(p["progress"]["done"] + p["progress"]["remaining"] == p["counts"]["total"] == 12 for p in seen)


def test_so_many_run_again_in_the_order_of_the_list(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """In slices, each by another process. Taken out: what is left of the limit after a slice."""
    monkeypatch.setattr(control, "SLICE", 2)
    monkeypatch.setattr(control, "_SQLITE_SLICE", 2)
    app = world.app()
    task = failed(world, app)
    assert control.retry(app.ledger, task.id, limit=5)
    steps = 1
    while control.change_rows(world.app().ledger, task.id):
        steps += 1
    assert (again(task), steps) == ([1, 2, 3, 5, 6], 3)
    assert control.change_rows(app.ledger, task.id) is False
    with world.working(app):
        task.wait(120)
    assert task.retry(status=["failed"], limit=100)
    turn_rest(app, task)
    assert again(task) == [1, 2, 5, 6, 9, 10]
    with world.working(app):
        task.wait(120)
    assert task.retry(message="refused", limit=4)
    turn_rest(app, task)
    assert again(task) == [1, 2, 5, 6]
    with world.working(app):
        task.wait(120)
    assert task.retry()
    turn_rest(app, task)
    assert len(again(task)) == 9, "the choice was of that retry alone"
    assert app.doctor() == []


@pytest.mark.each_database(reason="each looks for numbers, and compares texts, in its own way")
@pytest.mark.parametrize("chunk_size", [1, 5])
def test_only_rows_of_these_numbers_run_again_and_rows_are_found_by_their_text(world: World, chunk_size: int) -> None:
    app = world.app()
    kinds: list[dict[str, Any]] = [{}, {"refuse": True}, {"refuse": True}, {"bug": True}]
    with world.working(app):
        items = [{"n": n, "name": f'Straße "{n}"', **kinds[n % 4]} for n in range(12)]
        task = app.submit("note", items, chunk_size=chunk_size)
        task.wait(120)
    rows = {each["params"]["n"]: each["row"] for each in task.events()}
    assert not task.retry(only_rows=[rows[0], rows[4], 10_000]), "none of them failed"
    assert task.retry(only_rows=[rows[2], rows[0], rows[9], rows[3]], limit=2)
    turn_rest(app, task)
    assert again(task) == [2, 3]
    with world.working(app):
        task.wait(120)
    assert task.retry(only_rows=[rows[2], rows[0], rows[9], rows[3]], status="failed")
    turn_rest(app, task)
    assert again(task) == [2, 9]
    retried = next(each for each in task.log() if each["action"] == "retried")
    assert retried["detail"]["rows"] == sorted([rows[2], rows[0], rows[9], rows[3]])
    with world.working(app):
        task.wait(120)
    assert app.doctor() == []

    def found(text: str, **how: Any) -> list[int]:
        return [each["params"]["n"] for each in task.events(text=text, **how)]

    assert found('sTRaße "1') == [1, 10, 11]
    assert found('"1"', status="failed") == [1]
    assert found("no such") == found("%") == []
    first = task.events(text="Straße", limit=2)
    assert found("straße", after=event_cursor(first[-1]), limit=2) == [2, 3]


@pytest.mark.parametrize("rows", [[], [0], [True], ["2"], [2**63], range(1, 202)])
def test_rows_that_are_no_numbers_are_refused(world: World, rows: Any) -> None:
    task = world.app().submit("note", [{"n": 1}])
    for how in (task.retry, task.report):
        with pytest.raises(InputError, match="only_rows"):
            how(only_rows=rows)


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "2"])
def test_a_limit_that_is_no_number_of_rows_is_refused(world: World, limit: Any) -> None:
    task = world.app().submit("note", [{"n": 1}])
    with pytest.raises(InputError, match="limit must be"):
        task.retry(limit=limit)


def test_callbacks_fire_again_for_the_chosen(world: World) -> None:
    app = world.app()
    with world.working(app):
        task = app.submit("note", [{"n": 1, "refuse": True}, {"n": 2, "refuse": True}], on_failure="told")
        task.wait(120)
        assert task.retry(limit=1)
        task.wait(120)
    assert sorted(line[1] for line in world.shop.lines() if line[0] == "told") == ["1", "2"]


def test_a_task_that_cannot_be_opened_says_so(world: World) -> None:
    app = world.app()
    task = app.submit("note", [{"n": 1}])
    task.pause()
    with pytest.raises(Conflict):
        task.retry(message="refused")
