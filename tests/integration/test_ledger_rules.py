"""``unique`` and ``strict``: which rows of a list are taken, whoever splits it and whatever dies on the way."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.world import SUPPORT, World

from asynctask import AsyncTask
from asynctask.core.states import Reason
from asynctask.errors import ConfigError, InputError
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import NewItem
from asynctask.ledger.tasks import SplitLost
from asynctask.lists import split
from asynctask.lists.dry_run import DryRun
from asynctask.lists.uploads import items_body
from asynctask.testing import wait_for

pytestmark = pytest.mark.databases("sqlite", reason="what is looked at is which rows are taken")


def numbers(count: int, *, twice: int = 0) -> list[dict[str, int]]:
    """Items 0, 1, 2...; the last ``twice`` are the first ones again."""
    return [{"n": n} for n in range(count - twice)] + [{"n": n} for n in range(twice)]


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "FIRST_SLICE", 10)
    monkeypatch.setattr(split, "SLICE", 10)


def rows_of(world: World, task_id: int) -> list[int]:
    return [row for (row,) in world.sql("SELECT first_row FROM events WHERE task_id = ? ORDER BY seq", task_id)]


def rejected_rows(app: AsyncTask, task_id: int) -> dict[int, str]:
    return {row["row"]: row["errors"][0]["code"] for row in app.task(task_id).rejects(limit=1_000)}


def killed_in_its_split(world: World, app: AsyncTask, point: str, items: list[Any], options: dict[str, Any]) -> int:
    """The Task of a list whose process killed itself at a point of the split."""
    script, told = str(SUPPORT / "crash_split.py"), json.dumps(options)
    ended = world.run(script, CRASH_AT=point, CRASH_LIST=json.dumps(items), CRASH_OPTIONS=told)
    assert ended == -signal.SIGKILL, world.said()
    return the_task(app)


def the_task(app: AsyncTask) -> int:
    (progress,) = app.tasks()
    return int(progress["task_id"])


# -- unique


def test_rows_that_repeat_an_earlier_one_are_rejected_and_the_others_run(world: World) -> None:
    app = world.app()
    with world.working(app):
        task = app.submit("note", numbers(30, twice=5), unique="n")
        assert task.wait(120)["done"]
    assert rows_of(world, task.id) == list(range(1, 26))
    assert rejected_rows(app, task.id) == dict.fromkeys(range(26, 31), "duplicate_in_upload")
    (fault,) = task.rejects()[4]["errors"]
    assert fault["message"] == "is the same as in row 5; change it, or delete one of the two rows"
    world.check_promises(app, [task.id], 25)


@pytest.mark.parametrize(
    ("point", "chunk_size"), [("before:add_slice:1", 1), ("after:add_slice:2", 4), ("before:end_split:1", 1)]
)
def test_whoever_takes_a_split_over_knows_the_rows_before_it(world: World, point: str, chunk_size: int) -> None:
    """The process is killed; rows 31 to 45 repeat rows that it split, and rows that nobody split yet."""
    app = world.app(lease_s=1.0, heartbeat_s=0.3)
    items = numbers(45, twice=15)
    task_id = killed_in_its_split(world, app, point, items, {"unique": ["n"], "chunk_size": chunk_size})
    with world.working(app):
        wait_for(lambda: app.task(task_id).progress()["done"], f"the Task is over after {point}")
    rows = [event["row"] for event in app.task(task_id).events()]
    assert rows == list(range(1, 31)), "no false accept, no false refusal, no row twice"
    jobs = int(app.task(task_id).progress()["jobs"])
    assert jobs == 30 if chunk_size == 1 else 8 <= jobs <= 10
    assert rejected_rows(app, task_id) == dict.fromkeys(range(31, 46), "duplicate_in_upload")
    assert app.task(task_id).progress()["split"] == {
        "state": "sealed",
        "reason": None,
        "planned": 45,
        "created": 30,
        "rejected": 15,
        "open_until": None,
    }
    world.check_promises(app, [task_id], jobs)


def test_a_worker_may_say_what_is_unique_and_a_submission_may_say_otherwise(world: World) -> None:
    app = world.app()

    @app.worker(retry=0, unique=["n"])
    def once(item: dict[str, Any]) -> None:
        """Nothing."""

    assert app.check("once", numbers(4, twice=1)).rejected == 1
    assert app.check("once", numbers(4, twice=1), unique=[]).rejected == 0
    with pytest.raises(ConfigError, match="'m' is no field of the item; its fields: n, kind, pad"):
        app.worker(name="odd", unique=["m"])(app.workers["order"].function)


def test_unique_that_names_no_field_is_refused_before_anything_is_written(world: World) -> None:
    app = world.app()
    for submit in (app.submit, app.submit_items):
        with pytest.raises(InputError, match="'m' is no field of the item; its fields: n, kind, pad") as caught:
            submit("order", [{"n": 1, "kind": "x"}], unique=["m"])
        assert (caught.value.code, caught.value.errors[0].column) == ("invalid_options", "unique")
    for wrong in ([""], [1], ["n"] * 21, 7):
        with pytest.raises(InputError) as caught:
            app.submit("order", [], unique=wrong)  # type: ignore[arg-type]
        assert caught.value.code == "invalid_options"
    assert app.tasks() == []
    assert list(app.uploads.store_body(items_body([])).path.parent.iterdir())[1:] == []


# -- strict


def bad_at(count: int, *rows: int) -> list[dict[str, Any]]:
    """Orders of which those in ``rows`` (from 1) are refused."""
    return [{"n": n if n not in rows else "many", "kind": "ok"} for n in range(1, count + 1)]


def test_a_strict_list_with_one_bad_row_makes_no_event_and_says_every_fault(world: World) -> None:
    app = world.app()
    with pytest.raises(InputError) as caught:
        app.submit_items("order", bad_at(45, 40, 44), strict=True, wait_s=20, idempotency_key="k")
    error = caught.value
    assert (error.code, error.status) == ("rows_rejected", 422)
    assert [problem.row for problem in error.errors] == [40, 44]
    assert str(error).startswith("2 of 45 rows are rejected, so none was accepted (strict)")
    task_id = the_task(app)
    progress = app.task(task_id).progress()
    assert (progress["state"], progress["state_reason"], progress["done"]) == ("rejected", "rows_rejected", True)
    assert progress["split"] == {
        "state": "sealed",
        "reason": None,
        "planned": 45,
        "created": 0,
        "rejected": 2,
        "open_until": None,
    }
    assert rows_of(world, task_id) == []
    assert rejected_rows(app, task_id) == {40: "wrong_type", 44: "wrong_type"}
    again = app.submit_items("order", bad_at(45), strict=True, wait_s=20, idempotency_key="k")
    assert again.created, "the key is free for the corrected list"
    assert app.doctor() == []


def test_a_strict_list_without_a_bad_row_runs_like_any_other(world: World) -> None:
    app = world.app()
    with world.working(app):
        found = app.submit_items("order", bad_at(45), strict=True, unique=["n"], wait_s=20)
        assert found.problems == ()
        assert found.wait(120)["done"]
    assert rows_of(world, found.id) == list(range(1, 46))
    world.check_promises(app, [found.id], 45)


def test_nothing_of_a_strict_list_is_written_before_its_last_row_was_found_good(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = world.app()
    made: list[int] = []
    real = task_rows.add_slice

    def add_slice(ledger: Any, task_id: int, items: Any, rejects: Any, **where: Any) -> int:
        made.append(len(items))
        return real(ledger, task_id, items, rejects, **where)

    monkeypatch.setattr(task_rows, "add_slice", add_slice)
    with pytest.raises(InputError):
        app.submit_items("order", bad_at(95, 3, *range(20, 40), 95), strict=True, wait_s=20)
    assert len(made) == 3, "refused rows go in slices too"
    assert sum(made) == 0


@pytest.mark.parametrize("point", ["before:add_slice:1", "after:add_slice:1", "after:add_slice:2", "before:end_split:1"])
def test_a_strict_list_is_refused_as_a_whole_whoever_ends_its_validation(world: World, point: str) -> None:
    app = world.app(lease_s=1.0, heartbeat_s=0.3)
    items = [{"n": n // 2 if n > 20 else n} for n in range(60)]
    expected = {n + 1 for n in range(21, 60) if n // 2 <= 20 or n % 2}
    task_id = killed_in_its_split(world, app, point, items, {"unique": ["n"], "strict": True})
    with world.working(app):
        wait_for(lambda: app.task(task_id).progress()["done"], f"the Task is over after {point}")
    progress = app.task(task_id).progress()
    assert (progress["state"], progress["state_reason"]) == ("rejected", "rows_rejected")
    assert rows_of(world, task_id) == []
    assert set(rejected_rows(app, task_id)) == expected
    assert (progress["split"]["rejected"], progress["split"]["planned"]) == (len(expected), 60)
    assert app.doctor() == []


@pytest.mark.parametrize("point", ["before:add_slice:1", "after:add_slice:2", "before:end_split:1"])
def test_a_good_strict_list_is_taken_whole_whoever_ends_its_split(world: World, point: str) -> None:
    app = world.app(lease_s=1.0, heartbeat_s=0.3)
    task_id = killed_in_its_split(world, app, point, numbers(45), {"unique": ["n"], "strict": True})
    with world.working(app):
        wait_for(lambda: app.task(task_id).progress()["done"], f"the Task is over after {point}")
    assert rows_of(world, task_id) == list(range(1, 46))
    world.check_promises(app, [task_id], 45)


def test_a_paused_strict_list_is_refused_and_a_cancelled_one_is_cancelled(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = world.app()
    for verb, state in (("pause", "rejected"), ("cancel", "cancelled")):
        asleep, wake = threading.Event(), threading.Event()
        real = task_rows.end_split

        def end_split(*args: Any, asleep: Any = asleep, wake: Any = wake, real: Any = real, **more: Any) -> None:
            asleep.set()
            wake.wait(120)
            real(*args, **more)

        monkeypatch.setattr(task_rows, "end_split", end_split)
        task = app.submit_items("order", bad_at(25, 7), strict=True, wait_s=0.0)
        assert asleep.wait(120)
        assert getattr(task, verb)()
        wake.set()
        wait_for(lambda: not [t for t in threading.enumerate() if t.name.startswith("split-")], "the split ended")
        monkeypatch.setattr(task_rows, "end_split", real)
        assert task.progress()["state"] == state
        assert rows_of(world, task.id) == []


def test_a_strict_list_that_breaks_off_takes_nothing(world: World) -> None:
    small = world.app(max_rows=30)
    with pytest.raises(InputError) as caught:
        small.submit_items("order", bad_at(31), strict=True, wait_s=20)
    assert caught.value.status == 413
    assert world.sql("SELECT * FROM events") == []


def test_items_of_a_program_are_all_checked_before_a_strict_list_becomes_a_task(world: World) -> None:
    app = world.app()
    given: list[int] = []

    def items(*bad: int) -> Iterator[dict[str, Any]]:
        for item in bad_at(45, *bad):
            given.append(1)
            yield item

    with pytest.raises(InputError) as caught:
        app.submit("order", items(44), strict=True)
    assert (caught.value.code, len(given)) == ("rows_rejected", 45)
    assert [(p.row, p.column) for p in caught.value.errors] == [(44, "n")]
    assert app.tasks() == []
    with world.working(app):
        task = app.submit("order", items(), strict=True)
        assert task.wait(120)["done"]
    assert rows_of(world, task.id) == list(range(1, 46))
    with pytest.raises(InputError, match="max_rows"):
        world.app(max_rows=44).submit("order", items(), strict=True)


def test_a_model_that_changes_its_mind_between_the_two_passes_ends_the_split_as_broken(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = world.app()
    shape: Any = app.workers["order"].shape
    real = shape.validate
    seen: list[int] = []

    def validate(row: Any, *more: Any) -> Any:
        seen.append(row.number)
        if len(seen) > 40:
            row = type(row)(row.number, {"n": "many"})
        return real(row, *more)

    monkeypatch.setattr(type(shape), "validate", lambda self, *given: validate(*given))
    found = app.submit_items("order", bad_at(25), strict=True, wait_s=20)
    progress = found.progress()
    assert progress["split"]["state"] == "failed"
    assert "was accepted when the list was checked" in progress["split"]["reason"]


def test_a_splitter_that_was_passed_refuses_no_list(world: World) -> None:
    one, two = world.app(), world.app()
    new = task_rows.NewTask("note", "default", 240, source={"strict": True})
    task_id = task_rows.create(one.ledger, [task_rows.First(new)], lease_s=60)[0].task_id
    assert task_rows.claim_split(two.ledger, task_id, lease_s=60, of=one.ledger.identity) is not None
    with pytest.raises(SplitLost):
        task_rows.end_split(one.ledger, task_id, Reason.ROWS_REJECTED, planned=5)
    task_rows.add_slice(two.ledger, task_id, [NewItem('{"n":1}', 1)], [], after=0, cursor=1, lease_s=60)
    with pytest.raises(AssertionError):
        task_rows.end_split(two.ledger, task_id, Reason.ROWS_REJECTED, planned=5)


# -- dry runs


def test_a_dry_run_in_python_says_what_the_list_would_come_to_and_writes_nothing(world: World) -> None:
    app = world.app()
    found = app.submit("order", bad_at(20, 7), dry_run=True, unique=["n"], idempotency_key="k")
    assert isinstance(found, DryRun)
    assert (found.accepted, found.rejected, found.truncated) == (19, 1, False)
    assert [(p.row, p.column, p.code) for p in found.problems] == [(7, "n", "wrong_type")]
    assert found.first_items == [{"n": n, "kind": "ok", "pad": ""} for n in range(1, 6)]
    assert app.check("order", bad_at(20, 7)).as_dict("zh_CN")["errors"][0]["message"] == "必须是数字，例如 1200 或 12.5"
    assert app.tasks() == []
    with pytest.raises(InputError, match="no items"):
        app.check("order", [])
    with pytest.raises(InputError, match="check_file"):
        app.submit_items("order", bad_at(3), dry_run=True)  # type: ignore[call-arg]
    assert world.sql("SELECT * FROM tasks") == []


def test_a_program_that_reuses_a_key_of_a_strict_list_gets_the_first_task(world: World) -> None:
    app = world.app()
    first = app.submit("order", bad_at(5), strict=True, idempotency_key="k")
    assert app.submit("order", bad_at(5), strict=True, idempotency_key="k").id == first.id
    with pytest.raises(InputError, match="another body"):
        app.submit("order", bad_at(5), idempotency_key="k")
