"""Splits: taken up where they were left, by one process at a time, and ended honestly when they cannot go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.world import World, numbers

from asynctask import AsyncTask
from asynctask.core.states import Reason
from asynctask.errors import Conflict, InputError, LedgerUnavailable
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import NewItem
from asynctask.ledger.tasks import NewTask, SplitLost
from asynctask.lists import split
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")


def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "FIRST_SLICE", 10)
    monkeypatch.setattr(split, "SLICE", 10)


def fail_at(monkeypatch: pytest.MonkeyPatch, slice_number: int) -> None:
    """The ledger is away from the n-th slice on, once."""
    real, count = task_rows.add_slice, 0

    def add_slice(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == slice_number:
            raise LedgerUnavailable("away for a moment")
        return real(*args, **kwargs)

    monkeypatch.setattr(task_rows, "add_slice", add_slice)


def rows_of(world: World, task_id: int) -> list[int]:
    return [row for (row,) in world.sql("SELECT first_row FROM events WHERE task_id = ? ORDER BY seq", task_id)]


def test_a_split_that_stopped_is_taken_up_after_its_last_slice_when_its_lease_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_slices(monkeypatch)
    fail_at(monkeypatch, 3)
    first, second = world.app(), world.app()
    task = first.submit_items("note", numbers(35), wait_s=20)  # until the split was put off
    assert task.progress()["split"] == {**task.progress()["split"], "state": "splitting", "created": 20}
    assert task.progress()["progress"]["percent"] is None
    second.split_task(task.id)
    assert task.progress()["split"]["created"] == 20, "the lease still runs"
    world.sql("UPDATE tasks SET split_until = 1")
    with world.working(second):
        assert task.wait(120)["done"]
    assert rows_of(world, task.id) == list(range(1, 36))
    assert task.progress()["split"]["planned"] == 35
    world.check_promises(second, [task.id], 35)


@pytest.mark.each_database(reason="each locks in its own way")
def test_of_two_processes_that_fight_for_a_split_the_loser_adds_nothing(world: World) -> None:
    one, two = world.app(), world.app()
    task_id = task_rows.create(one.ledger, [task_rows.First(NewTask("note", "default", 240))], lease_s=60)[0].task_id
    items = [NewItem('{"n":1}', 1)]
    assert task_rows.add_slice(one.ledger, task_id, items, [], after=0, cursor=1, lease_s=60) == 1
    with pytest.raises(SplitLost, match="took the split over"):
        task_rows.add_slice(two.ledger, task_id, items, [], after=0, cursor=1, lease_s=60)
    assert task_rows.claim_split(two.ledger, task_id, lease_s=60) is None
    assert task_rows.claim_split(two.ledger, task_id, lease_s=60, of=one.ledger.identity) is not None
    for late in (
        lambda: task_rows.add_slice(one.ledger, task_id, items, [], after=1, cursor=2, lease_s=60),
        lambda: task_rows.end_split(one.ledger, task_id, Reason.SEALED),
        lambda: task_rows.end_split(one.ledger, task_id, Reason.SPLIT_FAILED, why="no"),
    ):
        with pytest.raises(SplitLost):
            late()
    task_rows.add_slice(two.ledger, task_id, [NewItem('{"n":2}', 2)], [], after=1, cursor=2, lease_s=60)
    task_rows.end_split(two.ledger, task_id, Reason.SEALED)
    with pytest.raises(SplitLost, match="sealed already"):
        task_rows.end_split(two.ledger, task_id, Reason.SEALED)
    assert rows_of(world, task_id) == [1, 2]
    assert one.doctor() == []


@pytest.mark.each_database(reason="each locks in its own way")
def test_a_splitter_that_was_passed_while_it_slept_adds_no_row_again_though_it_holds_the_lease_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fell asleep between two slices, another process went on from its cursor and fell silent in its turn, and the
    sleeper's own renewal gave it the lease back."""
    small_slices(monkeypatch)
    sleeper, other = world.app(), world.app()
    asleep, wake = threading.Event(), threading.Event()
    real = task_rows.add_slice
    slices = 0

    def add_slice(ledger: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal slices
        if ledger is sleeper.ledger:
            slices += 1
            if slices == 2:
                asleep.set()
                wake.wait(120)
        return real(ledger, *args, **kwargs)

    monkeypatch.setattr(task_rows, "add_slice", add_slice)
    task = sleeper.submit_items("note", numbers(45), wait_s=0.0)
    assert asleep.wait(120)
    fail_at(monkeypatch, 3)  # the other adds two slices and falls silent

    def is_passed() -> bool:
        world.sql("UPDATE tasks SET split_until = 1")  # the sleeper's renewal may undo it at once
        other.split_task(task.id)
        return bool(task.progress()["split"]["created"] > 10)

    wait_for(is_passed, "the other goes on from the sleeper's cursor")
    world.sql("UPDATE tasks SET split_until = 1")
    wait_for(
        lambda: (
            world.one("SELECT split_by FROM tasks") == sleeper.ledger.identity
            or task_rows.claim_split(sleeper.ledger, task.id, lease_s=2) is not None
        ),
        "the sleeper holds the lease again",
    )
    wake.set()
    wait_for(lambda: not [t for t in threading.enumerate() if t.name == f"split-{task.id}"], "the sleeper gave up")
    world.sql("UPDATE tasks SET split_until = 1 WHERE split_state = 'splitting'")
    with world.working(other):
        assert task.wait(120)["done"]
    assert rows_of(world, task.id) == list(range(1, 46)), "every row once"
    world.check_promises(other, [task.id], 45)


def test_an_iterable_that_breaks_ends_the_split_and_what_was_created_runs_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_slices(monkeypatch)
    app = world.app()

    def items() -> Iterator[dict[str, int]]:
        yield from numbers(25)
        raise RuntimeError("the cursor was closed")

    with world.working(app):
        with pytest.raises(RuntimeError, match="cursor was closed"):
            app.submit("note", items())
        (progress,) = app.tasks()
        task = app.task(progress["task_id"])
        assert task.wait(120)["done"]
    progress = task.progress()
    assert progress["split"]["state"] == "failed"
    assert "RuntimeError: the cursor was closed" in progress["split"]["reason"]
    assert (progress["state"], progress["state_reason"]) == ("finished", "split_failed")
    assert progress["counts"]["finish"] == progress["split"]["created"] == 20, "whole slices"
    world.check_promises(app, [task.id], 20)


def test_an_iterable_is_consumed_lazily_and_its_first_jobs_run_before_the_last_is_made(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_slices(monkeypatch)
    app = world.app()

    def items() -> Iterator[dict[str, int]]:
        yield from numbers(20)
        wait_for(lambda: len(world.shop.performed()) >= 10, "the first jobs ran")
        yield {"n": 20}

    with world.working(app):
        task = app.submit("note", items())
        assert task.wait(120)["done"]
    world.check_promises(app, [task.id], 21)


def test_the_split_of_a_program_that_died_is_ended_as_broken_and_not_taken_up(world: World) -> None:
    app, dead = world.app(), world.app()
    task_id = task_rows.create(dead.ledger, [task_rows.First(NewTask("note", "default", 240))], lease_s=60)[0].task_id
    task_rows.add_slice(dead.ledger, task_id, [NewItem('{"n":0}', 1)], [], after=0, cursor=1, lease_s=60)
    empty = task_rows.create(dead.ledger, [task_rows.First(NewTask("note", "default", 240))], lease_s=60)[0].task_id
    world.sql("UPDATE tasks SET split_until = 1")
    with world.working(app):
        assert app.task(task_id).wait(120)["done"]
        assert app.task(empty).wait(120)["done"]
    progress = app.task(task_id).progress()
    assert (progress["split"]["state"], progress["counts"]["finish"]) == ("failed", 1)
    assert "ended before it had handed in all" in progress["split"]["reason"]
    assert app.task(empty).progress()["state"] == "rejected"


def test_a_source_that_is_gone_ends_the_split_with_the_reason(world: World) -> None:
    app = world.app()
    source: dict[str, Any] = {"name": "abc123", "filename": "x.csv", "sheet": None, "columns": {}}
    task_id = task_rows.create(app.ledger, [task_rows.First(NewTask("note", "default", 240, source=source))], lease_s=60)[
        0
    ].task_id
    app.split_task(task_id)
    progress = app.task(task_id).progress()
    assert progress["split"]["state"] == "failed"
    assert "upload_missing" in progress["split"]["reason"]
    assert progress["done"]


def test_pause_resume_and_cancel_are_taken_while_the_list_is_split(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    small_slices(monkeypatch)
    app = world.app()
    gate, slow = threading.Event(), threading.Event()

    def items() -> Iterator[dict[str, int]]:
        yield from numbers(20)
        slow.set()
        gate.wait(120)
        yield from numbers(20)

    submitted: list[Any] = []
    with world.working(app):
        submitter = threading.Thread(target=lambda: submitted.append(app.submit("note", items())))
        submitter.start()
        assert slow.wait(120)
        task = app.task(app.tasks()[0]["task_id"])
        with pytest.raises(Conflict, match="splitting"):
            task.retry()
        assert task.pause()
        assert task.progress()["state"] == "paused"
        assert task.resume()
        assert task.progress()["state"] == "splitting"
        wait_for(lambda: task.progress()["counts"]["finish"] == 20, "what is there runs")
        assert task.cancel()
        gate.set()
        submitter.join(120)
        progress = task.wait(120)
    assert progress["state"] == "cancelled"
    assert progress["done"]
    assert progress["split"] == {**progress["split"], "state": "cancelled", "created": 20}
    assert [handle.id for handle in submitted] == [task.id]
    world.check_promises(app, [task.id], 20)


def test_a_task_cancelled_before_its_first_slice_is_over(world: World) -> None:
    app = world.app()
    task_id = task_rows.create(app.ledger, [task_rows.First(NewTask("note", "default", 240))], lease_s=60)[0].task_id
    task = app.task(task_id)
    assert task.cancel()
    app.start_services()
    assert task.wait(120)["done"]
    app.stop_services()
    assert task.progress()["state"] == "cancelled"


def test_a_list_without_an_item_is_refused_and_its_key_is_free_again(world: World) -> None:
    app: AsyncTask = world.app()
    with pytest.raises(InputError) as refused:
        app.submit_items("note", [], idempotency_key="k", wait_s=10)
    assert refused.value.code == "no_items"
    corrected = app.submit_items("note", numbers(1), idempotency_key="k", wait_s=10)
    assert corrected.created
