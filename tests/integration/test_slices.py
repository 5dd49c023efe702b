"""Slices: several items in a job, each with its own outcome."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
from support.world import World

from asynctask import AsyncTask, NormalException, current_job
from asynctask.errors import InputError

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")


PAUSE = threading.Event()


class Seen:
    """A worker of slices, and what it was called with."""

    def __init__(self, app: AsyncTask) -> None:
        self.calls: list[tuple[int, int]] = []

        @app.worker(retry=1, retry_in=lambda count, error, job: 0.1)
        def one(item: dict[str, Any]) -> Any:
            job = current_job()
            n = int(item["n"])
            self.calls.append((n, job.attempt))
            if item.get("wait"):
                while not job.should_stop():
                    PAUSE.wait(0.01)
            if item.get("say"):
                job.message("hello")
            if item.get("refuse"):
                raise NormalException("refused")
            if item.get("bug") == "always" or (item.get("bug") and self.times(n) == 1):
                raise ValueError("bug")
            return {"n": n} if item.get("result") else None

        self.worker = one

    def times(self, n: int) -> int:
        return Counter(each for each, _ in self.calls)[n]


def counts(task: Any) -> dict[str, int]:
    return {name: number for name, number in task.progress()["counts"].items() if number}


@pytest.mark.each_database(reason="the bookkeeping of slices is written by each")
def test_each_item_has_its_own_outcome_and_only_those_that_raised_run_again(world: World) -> None:
    app = world.app()
    seen = Seen(app)
    items: list[dict[str, Any]] = [{"n": n} for n in range(12)]
    items[2] |= {"refuse": True}
    items[3] |= {"bug": "once", "say": True}
    items[7] |= {"bug": "always"}
    items[8] |= {"result": True}
    task = app.submit(seen.worker, items, chunk_size=5)
    assert task.progress()["jobs"] == 3
    with world.working(app):
        task.wait(60)
    assert counts(task) == {"total": 12, "finish": 10, "failed": 1, "error": 1}
    assert [seen.times(n) for n in range(12)] == [1, 1, 1, 2, 1, 1, 1, 2, 1, 1, 1, 1]
    assert [(e["row"], e["status"]) for e in task.events(status=["failed", "error"])] == [(3, "failed"), (8, "error")]
    first, _, _ = {e["job_id"]: app.event(e["job_id"]) for e in task.events()}.values()
    assert first["status"] == "failed" and first["outcomes"] == {"finish": 4, "failed": 1, "error": 0, "cancelled": 0}
    assert [m["row"] for m in first["messages"] if m["message"] == "hello"] == [4, 4]
    assert {e["row"]: e["result"] for e in task.events() if e["result"]} == {9: {"n": 8}}
    assert {group["message"]: group["count"] for group in task.progress()["top_errors"]} == {
        "refused": 1,
        "ValueError: bug": 1,
    }
    assert app.doctor() == []
    assert task.retry(status="error")
    with world.working(app):
        task.wait(60)
    assert [seen.times(2), seen.times(7), seen.times(8)] == [1, 4, 1]
    assert counts(task) == {"total": 12, "finish": 10, "failed": 1, "error": 1}
    assert app.doctor() == []


def test_a_cancel_between_two_items_keeps_the_outcomes_that_there_are(world: World) -> None:
    app = world.app()
    seen = Seen(app)
    items: list[dict[str, Any]] = [{"n": n} for n in range(10)]
    items[1] |= {"refuse": True}
    items[4] |= {"wait": True}
    task = app.submit(seen.worker, items, chunk_size=10)
    with world.working(app):
        while counts(task).get("finish") != 3:  # counts move while the slice runs
            PAUSE.wait(0.02)
        task.cancel()
        task.wait(60)
    assert counts(task) == {"total": 10, "finish": 4, "failed": 1, "cancelled": 5}
    assert app.doctor() == []
    assert task.retry(status=["cancelled"], limit=2)
    with world.working(app):
        task.wait(60)
    assert counts(task) == {"total": 10, "finish": 6, "failed": 1, "cancelled": 3}
    assert [seen.times(n) for n in range(10)] == [1] * 7 + [0] * 3
    assert app.doctor() == []


def test_a_batch_worker_gets_the_list_and_reports_by_place(world: World) -> None:
    app = world.app()
    given: list[list[int]] = []

    @app.worker(batch=True, retry=1, retry_in=lambda count, error, job: 0.1)
    def many(items: list[dict[str, Any]]) -> list[int]:
        given.append([each["n"] for each in items])
        for place, item in enumerate(items):
            if item["n"] == 2:
                current_job().fail(place, "no")
            if item["n"] == 3 and len(given) < 3:
                current_job().error(place, "bug")
        if items[0]["n"] == 5:
            raise NormalException("none of these")
        return [each["n"] * 10 for each in items]

    task = app.submit(many, [{"n": n} for n in range(9)], chunk_size=4)
    with world.working(app, concurrency=1):
        task.wait(60)
    assert counts(task)["failed"] == 1
    assert sorted(map(tuple, given)) == [(0, 1, 2, 3), (3,), (4, 5, 6, 7), (8,)]
    assert {e["row"]: e["result"] for e in task.events()} == {
        1: 0, 2: 10, 3: None, 4: 30, 5: 40, 6: 50, 7: 60, 8: 70, 9: 80
    }  # fmt: skip
    assert app.doctor() == []


@pytest.mark.parametrize("options", [{"key": "n"}, {"chunk_size": 0}, {"chunk_size": 1_001}, {"chunk_size": "many"}])
def test_what_no_slice_can_be_is_refused(world: World, options: dict[str, Any]) -> None:
    app = world.app()
    seen = Seen(app)
    with pytest.raises(InputError, match="chunk_size"):
        app.submit(seen.worker, [{"n": 1}], **{"chunk_size": 2, **options})
