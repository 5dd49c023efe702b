"""One way of submitting: each verb takes the same options and returns the handle of a Task."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.world import World, numbers

from asynctask import AsyncTask
from asynctask.errors import ConfigError, InputError
from asynctask.lists.options import SubmitOptions
from asynctask.lists.split import FIRST_SLICE
from asynctask.task import TaskHandle
from asynctask.testing import wait_for
from asynctask.worker import TaskOptions, Worker

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")

GOOD, BAD = {"n": 1, "kind": "ok"}, {"n": "many", "kind": "ok"}


def stored(app: AsyncTask) -> Any:
    return app.uploads.store(io.BytesIO(b"n,kind\n1,ok\nmany,ok\n"), "a.csv")


def ways(app: AsyncTask) -> dict[str, Callable[..., TaskHandle]]:
    """Each verb, with a list whose second row is refused."""
    return {
        "submit": lambda **options: app.submit("order", [GOOD, BAD], **options),
        "a generator": lambda **options: app.submit("order", iter([GOOD, BAD]), **options),
        "the worker's": lambda **options: app.workers["order"].submit([GOOD, BAD], **options),
        "submit_jobs": lambda **options: app.submit_jobs([("order", GOOD), ("order", BAD)], **options),
        "submit_items": lambda **options: app.submit_items("order", [GOOD, BAD], **options),
        "submit_file": lambda **options: app.submit_file("order", stored(app), **options),
    }


def test_each_verb_returns_a_handle_that_says_whether_it_is_new_and_what_was_refused(world: World) -> None:
    app = world.app()
    for name, submit in ways(app).items():
        key = name.replace(" ", "-")
        task = submit(title="Spring", idempotency_key=key)
        assert isinstance(task, TaskHandle), name
        assert task.created, name
        assert [(problem.column, problem.code) for problem in task.problems] == [("n", "wrong_type")], name
        assert (task.state, task.counts["total"], task.counts["enqueue"]) == ("running", 1, 1), name
        again = submit(title="Spring", idempotency_key=key)
        assert (again.id, again.created) == (task.id, False), name
        assert again.problems == task.problems, name
    known = app.task(task.id)
    assert (known.created, known.problems) == (False, ())


def test_a_list_without_a_refused_row_has_no_problems_nor_has_one_that_is_still_validated(world: World) -> None:
    app = world.app()
    assert app.submit("order", [GOOD]).problems == ()
    late = app.submit_file("order", app.uploads.store(io.BytesIO(b"n,kind\n" + b"x,ok\n" * 20_000), "a.csv"), wait_s=0.0)
    assert (late.created, late.problems) == (True, ())
    wait_for(lambda: late.state == "rejected", "the list has been read")


def test_an_export_returns_the_same(world: World) -> None:
    app = world.app()

    @app.export(columns=["n"])
    def counted(shard: int) -> Iterator[list[int]]:
        yield [shard]

    task = app.submit_export(counted, [1, 2], idempotency_key="k")
    assert (task.created, task.problems, task.counts["total"]) == (True, (), 2)
    assert not app.submit_export(counted, [1, 2], idempotency_key="k").created


def test_a_worker_submits_lists_of_its_own_with_the_options_that_were_set(world: World) -> None:
    app = world.app()
    order = app.workers["order"]
    assert order.set(queue="night", priority=7).submit([GOOD]).progress()["control"]["priority"] == 7
    with world.working(app):
        assert order.submit(iter([GOOD]), title="One").wait(60)["title"] == "One"
    with pytest.raises(InputError, match="cannot be scheduled"):
        order.set(wait=60).submit([GOOD])
    with pytest.raises(ConfigError, match="belongs to no application"):
        Worker("alone", print).submit([GOOD])
    with pytest.raises(ConfigError, match="is one of huey, which sends single jobs itself: submit a list"):
        Worker("sent", print, engine="huey").perform_async(GOOD)


def test_an_option_that_is_misspelt_is_refused_by_each_verb_before_anything_is_written(world: World) -> None:
    app = world.app()
    app.export(columns=["n"], name="rows")(lambda shard: [])
    misspelt: dict[str, Any] = {"paralel": 3}
    verbs: list[Callable[..., Any]] = [
        *ways(app).values(),
        lambda **options: app.submit_export("rows", [1], **options),
        lambda **options: app.check("order", [GOOD], **options),
        lambda **options: app.check_file("order", stored(app), **options),
    ]
    for submit in verbs:
        with pytest.raises(InputError, match=r"'paralel' .*'parallel'") as refused:
            submit(**misspelt)
        assert (refused.value.code, refused.value.errors[0].column) == ("invalid_options", "paralel")
    assert app.tasks() == []


def test_type_checkers_know_every_option() -> None:
    assert TaskOptions.__annotations__.keys() | {"dry_run"} == SubmitOptions.model_fields.keys()


def test_waiting_too_long_raises_what_python_raises_with_the_state_the_counts_and_the_reason(world: World) -> None:
    task = world.app().submit("note", numbers(3))
    why = "no_process: No process works the queue default"
    with pytest.raises(TimeoutError, match=rf"^Task {task.id} is running after 0\.1 s: total 3, enqueue 3; {why}$"):
        task.wait(timeout=0.1)
    empty = world.app().submit("note", [])
    assert empty.wait(timeout=0)["state"] == empty.state == "rejected", "it is done"


def test_a_task_is_written_with_its_first_slice_whatever_the_length_of_the_list(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = world.app()
    from asynctask.ledger import tasks

    real, seen = tasks._insert, []

    def insert(ledger: Any, new: Any, lease_s: float) -> Any:
        made = real(ledger, new, lease_s)
        seen.append((app.task(made[0].task_id).counts["total"], new[0].more))
        return made

    monkeypatch.setattr(tasks, "_insert", insert)
    for items, first, more in (
        (numbers(3), 3, False),
        (iter(numbers(3)), 3, False),
        (numbers(1_000), 1_000, False),
        (numbers(1_001), FIRST_SLICE, True),
        (iter(numbers(250)), FIRST_SLICE, True),
        (iter(numbers(FIRST_SLICE)), FIRST_SLICE, True),  # nothing says that it was the last
    ):
        app.submit("note", items)
        assert seen.pop() == (first, more)
    splits = [each["split"] for each in reversed(app.tasks())]
    assert [each["created"] for each in splits] == [3, 3, 1_000, 1_001, 250, FIRST_SLICE]
    assert {each["state"] for each in splits} == {"sealed"}
    assert app.doctor() == []


def test_a_program_that_breaks_in_the_first_slice_has_a_task_that_says_so(world: World) -> None:
    app = world.app()

    def items() -> Iterator[dict[str, int]]:
        yield from numbers(3)
        raise RuntimeError("the cursor was closed")

    with pytest.raises(RuntimeError, match="cursor was closed"):
        app.submit("note", items())
    (progress,) = app.tasks()
    assert (progress["state"], progress["split"]["state"], progress["counts"]["total"]) == ("rejected", "failed", 0)
    assert "RuntimeError: the cursor was closed" in progress["split"]["reason"]
