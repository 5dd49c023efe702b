"""A Task that is submitted open takes additions until it is sealed: it neither ends before, nor stays open unnoticed."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openpyxl import load_workbook
from pydantic import BaseModel, Field
from support.adding_worker import add_found
from support.borrowing import borrow
from support.world import SUPPORT, World, numbers

from asynctask import AsyncTask, current_job
from asynctask.core.states import State
from asynctask.errors import Conflict, InputError, NotFound, TooLarge
from asynctask.ledger import additions, tasks
from asynctask.lists.uploads import StoredFile
from asynctask.reports import files
from asynctask.task import Addition, TaskHandle
from asynctask.testing import wait_for
from webapi import create_app

pytestmark = pytest.mark.one_database(reason="which additions are taken is decided above the database")


def json_of(response: Any) -> dict[str, Any]:
    found: dict[str, Any] = response.json
    return found


class Page(BaseModel):
    n: int


@pytest.mark.each_database(reason="the close is made in SQL")
def test_it_ends_once_it_is_sealed_and_its_items_have_ended(world: World) -> None:
    app = world.app()
    with world.working(app):
        task = app.submit("note", numbers(2), open=True, on_complete="told")
        wait_for(lambda: task.counts["finish"] == 2, "its items have ended")
        app.maintenance(app.ledger).close()
        found = task.progress()
        assert (found["state"], found["split"]["state"], found["done"]) == ("splitting", "open", False)
        assert found["progress"]["percent"] == 100.0, "of what it has so far"
        assert found["split"]["open_until"] is not None
        assert task.add(numbers(3, 2)) == Addition(first_row=3, accepted=3, rejected=0)
        wait_for(lambda: task.counts["finish"] == 5, "these have ended")
        assert not world.shop.performed("told"), "no callback before the seal"
        assert (task.seal(who="Ann"), task.seal()) == (True, False)
        found = task.wait(60)
    assert (found["state"], found["counts"]["total"], found["split"]["planned"]) == (State.FINISHED, 5, 5)
    assert [each["row"] for each in task.events()] == [1, 2, 3, 4, 5]
    assert {"split open", "sealed", "split sealed"} <= {each["action"] for each in task.log()}
    assert app.doctor() == []


@pytest.mark.parametrize("by", ["seal", "cancel"])
def test_a_task_that_was_sealed_or_cancelled_takes_nothing(world: World, by: str) -> None:
    app = world.app()
    task = app.submit("note", numbers(1), open=True)
    getattr(task, by)()
    if by == "seal":
        task.pause()
    with pytest.raises(Conflict, match=f"is {by}" if by == "cancel" else "is sealed"):
        task.add(numbers(1))
    assert task.counts["total"] == 1
    if by == "cancel":
        with pytest.raises(Conflict, match="is cancelled"):
            task.seal()


def test_a_retry_of_a_sealed_task_does_not_open_it(world: World) -> None:
    app = world.app()
    with world.working(app):
        task = app.submit("note", numbers(1, bug=True), open=True)
        task.seal()
        task.wait(60)
        assert task.retry()
        with pytest.raises(Conflict, match="takes no more items"):
            task.add(numbers(1))
        assert task.wait(60)["counts"]["total"] == 1


def test_items_that_failed_are_retried_after_the_seal(world: World) -> None:
    app = world.app()
    with world.working(app):
        task = app.submit("note", numbers(1, bug=True), open=True)
        wait_for(lambda: task.counts["error"], "it failed")
        with pytest.raises(Conflict, match="can be retried once it runs"):
            task.retry()
        task.cancel()


def test_any_other_task_takes_nothing(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(1))
    with pytest.raises(Conflict, match="not submitted with open"):
        task.add(numbers(1))
    with pytest.raises(Conflict, match="not submitted with open"):
        task.seal()
    with pytest.raises(NotFound):
        app.add_items(99, numbers(1))


def test_additions_are_validated_and_rejected_rows_are_told(world: World) -> None:
    app = world.app()

    @app.worker
    def page(item: Page) -> None: ...

    task = app.submit(page, [{"n": 1}, {"n": "x"}], open=True, unique="n")
    found = task.add([{"n": 2}, {"n": "y"}, {"n": 2}])
    assert (found.first_row, found.accepted, found.rejected) == (3, 1, 2)
    assert [(each.row, each.code) for each in found.problems][1] == (5, "duplicate_in_upload")
    assert "row 3" in found.problems[1].message, "numbered as in the Task"
    assert [each["row"] for each in task.rejects()] == [2, 4, 5]
    assert task.add([{"n": 2}]).accepted == 1, "unique within one addition"
    assert [row.number for row in task.report("rejected").rows] == [2, 4, 5]
    task.seal()
    assert task.progress()["split"]["planned"] == 6


class Article(BaseModel):
    sku: str = Field(title="Article SKU")
    quantity: int
    note: str = ""


def stored(app: AsyncTask, text: str) -> StoredFile:
    return app.uploads.store(io.BytesIO(text.encode()), "list.csv")


def test_reports_have_the_cells_of_added_rows_whose_columns_the_list_lacks(world: World, tmp_path: Path) -> None:
    app = world.app()

    @app.worker
    def article(item: Article) -> None: ...

    task = app.submit_file("note", stored(app, "n,b\n1,x\n"), open=True, columns={"n": "number"})
    task.add([{"number": 9, "extra": "keep me"}])
    added = app.add_file(task.id, stored(app, "zz\n5\n"), idempotency_key="a")
    assert (added.first_row, task.events()[-1]["row"]) == (5, 5), "the header is a row of the file"
    assert app.add_file(task.id, stored(app, "zz\n5\n"), idempotency_key="a") == replace(added, replayed=True)
    task.cancel()
    report = task.report("all")
    assert report.headers == ["n", "b", "extra", "zz"]
    target = tmp_path / "report.xlsx"
    files.write_xlsx(target, report.headers, report.rows)
    assert [list(row)[:5] for row in load_workbook(target).active.values] == [
        ["n", "b", "extra", "zz", "row"],
        ["1", "x", None, None, 2],
        [9, None, "keep me", None, 3],
        [None, None, None, "5", 5],
    ]
    assert [each["header"] for each in task.columns()] == report.headers
    text = io.StringIO(newline="")
    report = task.report("unprocessed")
    files.write_csv(text, report.headers, report.rows)
    again = app.submit_file("note", stored(app, text.getvalue()), resubmit_of=task.id)
    wait_for(lambda: again.progress()["split"]["state"] == "sealed", "it is read")
    assert [{name: each for name, each in event["params"].items() if each} for event in again.events()] == [
        {"number": "1", "b": "x"}, {"number": 9, "extra": "keep me"}, {"zz": "5"},
    ]  # fmt: skip

    known = app.submit_file(article, stored(app, "Article SKU,Quantity\nA,1\n"), open=True)
    known.add([{"sku": "B", "quantity": 2, "note": "mine"}, {"sku": "C", "quantity": "many", "nope": 1}])
    report = known.report("all")
    assert report.headers == ["Article SKU", "Quantity", "note", "nope"]
    rows = list(report.rows)
    assert [row.values for row in rows[1:]] == [
        {"Article SKU": "B", "Quantity": 2, "note": "mine"}, {"Article SKU": "C", "Quantity": "many", "nope": 1},
    ]  # fmt: skip
    assert list(rows[2].bad_columns) == ["Quantity"], "the cell under the header of the list is marked"
    assert ("note", "note") in [(each["name"], each["header"]) for each in known.columns()]


def test_a_task_that_is_sealed_without_an_item_is_rejected(world: World) -> None:
    app = world.app()
    task = app.submit("note", [], open=True)
    assert (task.state, task.progress()["split"]["state"]) == ("splitting", "open")
    task.seal()
    assert (task.state, task.progress()["state_reason"]) == ("rejected", "no_items")
    said = task.refusal_object()
    assert said is not None
    assert (said["code"], said["message"]) == ("no_items", "the list has no items; submit at least one"), "it is no sheet"


@pytest.mark.each_database(reason="rows are numbered in SQL")
def test_a_longer_list_opens_once_it_is_split(world: World) -> None:
    app = world.app()
    task = app.submit("note", iter(numbers(1_500)), open=True)
    found = task.progress()
    assert (found["split"]["state"], found["state"], found["counts"]["total"]) == ("open", "splitting", 1_500)
    assert task.add(numbers(1, 1_500)).first_row == 1_501
    stored = app.submit_items("note", numbers(1_200), open=True)
    wait_for(lambda: stored.progress()["split"]["state"] == "open", "it is split")
    assert stored.add(numbers(1)).first_row == 1_201


def test_nothing_is_added_while_the_list_of_the_submission_is_read(world: World) -> None:
    app = world.app()
    told: list[str] = []

    def items() -> Any:
        yield from numbers(1_500)
        (task,) = app.tasks()
        for act in (lambda handle: handle.add(numbers(1)), TaskHandle.seal):
            with pytest.raises(Conflict, match="still being read") as refused:
                act(app.task(task["task_id"]))
            told.append(str(refused.value))

    app.submit("note", items(), open=True)
    assert len(told) == 2


@pytest.mark.each_database(reason="keys are unique in SQL")
def test_the_same_key_adds_once(world: World) -> None:
    app = world.app()
    task = app.submit("note", [], open=True)
    first = task.add([{"n": 1}], idempotency_key="a")
    again = task.add([{"n": 1}], idempotency_key="a")
    assert (first.replayed, again.replayed, again.first_row, again.accepted) == (False, True, 1, 1)
    with pytest.raises(InputError, match="another addition") as refused:
        task.add([{"n": 2}], idempotency_key="a")
    assert refused.value.code == "idempotency_key_reused"
    task.seal()
    assert task.add([{"n": 1}], idempotency_key="a").replayed, "a retry of a lost answer gets it after the seal, too"
    assert task.counts["total"] == 1
    other = app.submit("note", [], open=True)
    assert not other.add([{"n": 1}], idempotency_key="a").replayed, "a key belongs to its Task"


def test_limits_count_all_additions(world: World) -> None:
    app = world.app(max_rows=5)
    task = app.submit("note", numbers(3), open=True)
    task.add(numbers(2))
    with pytest.raises(TooLarge, match="max_rows"):
        task.add(numbers(1))
    assert task.counts["total"] == 5


def test_an_addition_is_one_transaction_of_limited_size(world: World) -> None:
    app = world.app()
    task = app.submit("note", [], open=True)
    with pytest.raises(TooLarge, match="10,000 items"):
        task.add(numbers(10_001))
    with pytest.raises(TooLarge, match="in parts"):
        task.add([{"n": n, "pad": "x" * 50_000} for n in range(100)])
    assert task.counts["total"] == 0


@pytest.mark.parametrize(
    "options", [{"strict": True}, {"chunk_size": 5}, {"chunk_size": "auto"}, {"open": None, "open_limit_s": 5.0}], ids=str
)
def test_options_that_need_the_whole_list_are_refused(world: World, options: dict[str, Any]) -> None:
    app = world.app()
    with pytest.raises(InputError) as refused:
        app.submit("note", numbers(1), **{"open": True, **options})
    assert refused.value.code == "invalid_options"
    assert world.one("SELECT COUNT(*) FROM tasks") == 0


def test_a_paused_task_takes_additions_and_resumes_open(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(1), open=True, paused=True)
    task.add(numbers(1, 1))
    assert (task.state, borrow(app.ledger, task.id)) == (State.PAUSED, [])
    task.resume()
    assert task.state == State.SPLITTING
    with world.working(app):
        wait_for(lambda: task.counts["finish"] == 2, "both have ended")
        task.pause()
        task.seal()
        assert task.wait(60)["state"] == State.FINISHED


@pytest.mark.each_database(reason="its time is compared in SQL")
def test_a_task_that_nobody_adds_to_says_so_and_is_sealed(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(1), open=True, open_limit_s=86_400)
    with world.working(app):
        wait_for(lambda: task.counts["finish"] == 1, "its item has ended")
    (reason,) = app.operations.wait_reasons(task.id)
    assert reason.code == "open"
    assert "nobody has added anything for" in reason.message
    assert f"asynctask seal {task.id}" in reason.mend
    additions.seal_overdue(app.ledger)
    assert task.progress()["split"]["state"] == "open", "its time has not come"
    short = app.submit("note", numbers(1), open=True, open_limit_s=1)
    with world.working(app):
        short.wait(60)
    entry = next(each for each in short.log() if each["action"] == "sealed")
    assert entry["detail"] == {"reason": "open_limit", "message": "nobody added anything for 1 s"}
    assert task.progress()["split"]["state"] == "open"


def test_jobs_add_to_their_own_task(world: World) -> None:
    app = world.app()

    @app.worker(retry=0)
    def crawl(item: dict[str, Any]) -> None:
        job = current_job()
        assert job.task is not None
        links = [] if item["depth"] == 4 else [{"depth": item["depth"] + 1}] * 2
        app.task(job.task.id).add(links, idempotency_key=job.job_id)

    with world.working(app, concurrency=4):
        task = app.submit(crawl, [{"depth": 0}], open=True)
        wait_for(lambda: task.counts["finish"] == 31, "everything that was found is done")
        assert not task.progress()["done"]
        task.seal()
        assert task.wait(60)["counts"]["finish"] == 31
    assert app.doctor() == []


@pytest.mark.each_database(reason="lines are made in SQL")
def test_later_tasks_of_a_key_wait_for_the_seal(world: World) -> None:
    app = world.app()
    with world.working(app, concurrency=4):
        first = app.submit("note", numbers(1), key="n", open=True)
        second = app.submit("note", numbers(1), key="n")
        wait_for(lambda: first.counts["finish"] == 1, "the first is through")
        first.add(numbers(1))
        wait_for(lambda: first.counts["finish"] == 2, "what is added goes first")
        assert second.counts["finish"] == 0
        first.seal()
        second.wait(60)
    assert app.doctor() == []


def together(*acts: Callable[[], Any]) -> list[Any]:
    """What each of these returned or raised, all begun at once."""
    start = threading.Barrier(len(acts))
    results: list[Any] = [None] * len(acts)

    def run(number: int, act: Callable[[], Any]) -> None:
        start.wait(60)
        try:
            results[number] = act()
        except Conflict as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(acts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


@pytest.mark.each_database(reason="each locks in its own way")
def test_additions_at_once_have_rows_of_their_own(world: World) -> None:
    app = world.app()
    task = app.submit("note", [], open=True)
    found = together(*(lambda n=n: task.add(numbers(10, n * 10)) for n in range(8)))
    assert sorted(each.first_row for each in found) == [1 + 10 * n for n in range(8)]
    assert [each["row"] for each in task.events(limit=1_000)] == list(range(1, 81))
    assert app.doctor() == []


@pytest.mark.each_database(reason="each locks in its own way")
def test_the_same_key_at_once_adds_once(world: World) -> None:
    app = world.app()
    task = app.submit("note", [], open=True)
    found = together(*(lambda: task.add(numbers(2), idempotency_key="k") for _ in range(6)))
    assert sorted(each.replayed for each in found) == [False, *[True] * 5]
    assert task.counts["total"] == 2


@pytest.mark.each_database(reason="each locks in its own way")
def test_an_addition_against_the_seal_is_whole_or_refused(world: World) -> None:
    app = world.app()
    with world.working(app, concurrency=2):
        for _ in range(10):
            task = app.submit("note", numbers(1), open=True)
            added, sealed = together(lambda: task.add(numbers(3, 1)), task.seal)  # noqa: B023
            assert sealed is True
            expected = 1 if isinstance(added, Conflict) else 4
            assert task.wait(60)["counts"]["finish"] == expected
    assert app.doctor() == []


@pytest.mark.each_database(reason="each locks in its own way")
def test_an_addition_against_the_end_of_the_last_row_is_never_lost(world: World) -> None:
    app = world.app()
    with world.working(app, concurrency=2):
        task = app.submit("note", [], open=True)
        for n in range(20):
            task.add(numbers(1, n))  # while the one before ends
        task.seal()
        assert task.wait(60)["counts"]["finish"] == 20
    assert app.doctor() == []


@pytest.mark.each_database(reason="each commits and rolls back in its own way")
@pytest.mark.parametrize("point", ["before", "after"])
def test_a_job_that_is_killed_while_it_adds_adds_once(world: World, point: str) -> None:
    """A kill -9 of the job's process on either side of the commit of its addition, before its answer. The row of the job
    is open meanwhile, so the Task cannot end; the key of the job's id makes the second attempt add nothing twice."""
    app = world.app()
    add_found(app)
    task = app.submit("found", [{"n": 0}], open=True)
    assert world.run(str(SUPPORT / "adding_worker.py"), KILL=point) == -9, world.said()
    assert task.progress()["done"] is False
    assert task.counts["total"] == (1 if point == "before" else 4)
    other = world.fork(str(SUPPORT / "adding_worker.py"), KILL="never")
    wait_for(lambda: task.counts["finish"] == 4, "the job runs again, and what it added", 120)
    task.seal()
    assert task.wait(60)["counts"]["total"] == 4
    other.terminate()
    assert tasks.read(app.ledger, task.id).split_state == "sealed"
    assert app.doctor() == []


def test_it_over_http(world: World) -> None:
    app = world.app()
    client = create_app(app).test_client()
    made = client.post("/api/tasks", json={"worker": "note", "items": numbers(1), "open": True, "open_limit_s": 600})
    assert made.status_code == 202
    path = made.headers["Location"]
    assert json_of(client.get(path))["split"]["state"] == "open"
    added = client.post(f"{path}/items", json={"items": numbers(2)}, headers={"Idempotency-Key": "x"})
    assert (added.status_code, json_of(added)) == (200, {"first_row": 2, "accepted": 2, "rejected": 0, "errors": []})
    again = client.post(f"{path}/items", json={"items": numbers(2)}, headers={"Idempotency-Key": "x"})
    assert (again.headers["Idempotency-Replayed"], json_of(again)) == ("true", json_of(added))
    other = client.post(f"{path}/items", json={"items": numbers(1)}, headers={"Idempotency-Key": "x"})
    assert (other.status_code, json_of(other)["code"]) == (422, "idempotency_key_reused")
    assert client.post(f"{path}/items", json={"items": []}).status_code == 422
    assert client.post(f"{path}/items", json={}).status_code == 422
    for text in ("[]", '"text"', "null"):
        assert client.post(f"{path}/items", data=text, content_type="application/json").status_code == 422
    assert client.post("/api/tasks/99/items", json={"items": numbers(1)}).status_code == 404
    form = {"file": (io.BytesIO(b"m\n9\n"), "more.csv"), "columns": '{"m": "n"}'}
    filed = client.post(f"{path}/items", data=form, content_type="multipart/form-data")
    assert (filed.status_code, json_of(filed)) == (200, {"first_row": 5, "accepted": 1, "rejected": 0, "errors": []})
    assert app.task(json_of(made)["task_id"]).events()[-1]["params"] == {"n": "9"}
    assert client.post(f"{path}/items", data={}, content_type="multipart/form-data").status_code == 422
    assert client.post(f"{path}/items", data="m\n9\n", content_type="text/csv").status_code == 415
    sealed = client.post(f"{path}/seal")
    assert (sealed.status_code, json_of(sealed)["state"]) == (200, "running")
    assert json_of(client.post(f"{path}/seal"))["version"] == json_of(sealed)["version"]
    refused = client.post(f"{path}/items", json={"items": numbers(1)})
    assert (refused.status_code, json_of(refused)["code"]) == (409, "conflict")
    assert json_of(client.get(path))["counts"]["total"] == 4
    nothing: list[dict[str, Any]] = [{"worker": "note", "items": []}, {"jobs": []}]
    for first in nothing:
        empty = client.post("/api/tasks", json={**first, "open": True})
        assert (empty.status_code, json_of(empty)["split"]["state"]) == (202, "open")
        assert client.post("/api/tasks", json=first).status_code == 422
    strict = {"worker": "note", "items": numbers(1), "open": True, "strict": True}
    assert client.post("/api/tasks", json=strict).status_code == 422


@pytest.mark.each_database(reason="rows are deleted by statements of their own")
def test_additions_go_with_their_task(world: World) -> None:
    app = world.app()
    task = app.submit("note", [], open=True)
    for key in ("a", "b"):
        task.add([{"n": 1}], idempotency_key=key)
    task.seal()
    with world.working(app):
        task.wait(60)
    assert app.purge(0).tasks == 1
    assert world.one("SELECT COUNT(*) FROM task_additions") == 0
