"""Correct and resubmit: a corrected report takes the rows that failed, each once, and the Task before counts them."""

from __future__ import annotations

import csv
import io
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from pydantic import BaseModel
from support.webshop import as_user
from support.world import World

from asynctask import AsyncTask, NormalException
from asynctask.database.tables import resubmitted_rows, task_ancestors, tasks
from asynctask.errors import Conflict, InputError, LedgerUnavailable
from asynctask.ledger import control, corrections, progress, purge
from asynctask.lists.split import Splitter
from asynctask.reports.files import write_csv, write_xlsx
from asynctask.task import TaskHandle
from asynctask.testing import wait_for
from webapi import User

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")

KINDS = ("ok", "refuse", "bug", "refuse", "ok", "wrong!" * 50)
LIST = "n,kind\n" + "".join(f"{n},{kind}\n" for n, kind in enumerate(KINDS[:5], 1)) + "x,ok\n"


def sheet(app: AsyncTask, text: str, **options: Any) -> TaskHandle:
    stored = app.uploads.store(io.BytesIO(text.encode()), "list.csv")
    return app.submit_file("order", stored, wait_s=60, **options)


def done(world: World, app: AsyncTask, task: TaskHandle) -> dict[str, Any]:
    with world.working(app):
        task.wait(120)
    return task.progress()


def first(world: World, app: AsyncTask, text: str = LIST) -> TaskHandle:
    """Rows 3, 4 and 5 fail, row 7 is refused; 2 and 6 succeed."""
    task = sheet(app, text)
    done(world, app, task)
    return task


def report(
    task: TaskHandle, correct: Mapping[str, Mapping[str, str]], only: Sequence[str] = (), kind: str = "failed"
) -> str:
    """The report of the rows to correct as CSV; ``correct``: by row number, the cells to write."""
    made, text = task.report(kind), io.StringIO()
    write_csv(text, made.headers, made.rows, locale=made.locale)
    rows = list(csv.DictReader(io.StringIO(text.getvalue().removeprefix("\ufeff"))))
    out = io.StringIO()
    writer = csv.DictWriter(out, rows[0].keys())
    writer.writeheader()
    for row in rows:
        if not only or row["row"] in only:
            writer.writerow({**row, **correct.get(row["row"], {})})
    return out.getvalue()


def cancel(app: AsyncTask, task: TaskHandle) -> None:
    """To its end: a request cancels rows for a moment, and leaves the rest to maintenance."""
    task.cancel()
    duty = app.maintenance(app.ledger)

    def is_done() -> Any:
        duty.change_rows()
        duty.close()
        return task.progress()["done"]

    wait_for(is_done, "every row is cancelled")


def codes(made: TaskHandle) -> dict[int | None, str]:
    return {problem.row: problem.code for problem in made.problems}


ALL_OK = {n: {"n": "8", "kind": "ok"} for n in ("3", "4", "5", "7")}


@pytest.mark.each_database(reason="the groups are statements of each")
def test_a_task_needs_attention_until_its_rows_are_mended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken out: what correcting Tasks mended; the older Tasks that are not done."""
    app = world.app()
    fine, paused = sheet(app, "n,kind\n1,ok\n"), sheet(app, "n,kind\n1,bug\n2,ok\n", tolerated_failures=0, parallel=1)
    with pytest.raises(InputError):
        sheet(app, "colour\nred\n")
    unread = app.task(app.tasks(limit=1)[0]["task_id"])
    parent = first(world, app)
    wait_for(lambda: paused.progress()["state"] == "paused", "it has paused itself")

    def ids(group: str) -> list[int]:
        found: list[int] = [each["task_id"] for each in app.tasks(group=group)]
        assert [t["task_id"] for t in as_user(app, User("chief")).get(f"/api/tasks?group={group}").json["tasks"]] == found
        return found

    assert ids("attention") == [parent.id, unread.id, paused.id]
    assert ids("running") == [paused.id]
    assert ids("finished") == [parent.id, unread.id, fine.id]
    some = sheet(app, report(parent, {**ALL_OK, "4": {"kind": "refuse"}}, only=("3", "4")), resubmit_of=parent.id)
    done(world, app, some)
    assert ids("attention") == [some.id, parent.id, unread.id, paused.id], (
        "a row of the one, and three of the other are left"
    )
    again = sheet(app, report(some, {"4": {"kind": "ok"}}), resubmit_of=some.id)
    done(world, app, again)
    assert ids("attention") == [parent.id, unread.id, paused.id], "two rows of the first are left"
    rest = sheet(
        app, report(parent, {**ALL_OK, "7": {"n": "9", "kind": "ok"}}, only=("5", "7"), kind="all"), resubmit_of=parent.id
    )
    done(world, app, rest)
    assert (parent.progress()["mended"], ids("attention")) == (4, [unread.id, paused.id])
    monkeypatch.setattr(progress, "_ATTENTION_AMONG", 1)
    assert ids("attention") == [paused.id], "of the older ones only those that are not done"


@pytest.mark.each_database(reason="claims, the sums of progress and the locks are statements of each")
def test_a_corrected_report_takes_its_rows_and_mends_them(world: World) -> None:
    """And again: what fails once more keeps its number, and counts for both Tasks before it."""
    app = world.app()
    parent = first(world, app)
    seen = parent.progress()
    assert (seen["resubmitted_by"], seen["mended"], seen["split"]["rejected"]) == ([], 0, 1)
    child = sheet(app, report(parent, {**ALL_OK, "4": {"kind": "refuse"}}), resubmit_of=parent.id)
    assert codes(child) == {}
    waiting = parent.progress()
    assert waiting["resubmitted_by"] == [child.id]
    assert waiting["version"] > seen["version"]
    counts = done(world, app, child)
    assert (counts["resubmit_of"], counts["counts"]["finish"], counts["counts"]["failed"]) == (parent.id, 3, 1)
    after = parent.progress()
    assert (after["resubmitted"], after["mended"], after["counts"]) == (4, 3, seen["counts"])
    assert after["version"] > waiting["version"]
    (row,) = child.report().rows
    assert (row.number, row.values["n"]) == (4, "3"), "the number is that of the first list"
    # Of the parent it cannot be taken any more, of the child it can.
    again = report(child, {"4": {"kind": "ok"}})
    with pytest.raises(InputError) as refused:
        sheet(app, again, resubmit_of=parent.id)
    assert [(p.code, f"Task {child.id} " in p.message) for p in refused.value.errors] == [("already_resubmitted", True)]
    grandchild = sheet(app, again, resubmit_of=child.id)
    done(world, app, grandchild)
    found = [task.progress() for task in (parent, child, grandchild)]
    assert [(each["resubmitted_by"], each["resubmitted"], each["mended"]) for each in found] == [
        ([child.id], 4, 4), ([grandchild.id], 1, 1), ([], 0, 0)
    ]  # fmt: skip
    listed = {each["task_id"]: each["mended"] for each in app.tasks()}
    assert [listed[each["task_id"]] for each in found] == [4, 1, 0], "many at once are read by another statement"
    with pytest.raises(InputError) as nothing:
        sheet(app, again, resubmit_of=child.id)
    assert [p.code for p in nothing.value.errors] == ["already_resubmitted"]
    assert app.doctor() == []


def test_rows_are_refused_by_name(world: World) -> None:
    app = world.app()
    parent = first(world, app)
    header = "n,kind,row,status,error,attempts,result\n"
    rows = ("1,ok,3", "1,ok,2", "1,ok,99", "1,ok,=1+1", "1,ok,", "1,ok,3", "1,ok,4.0", "x,ok,5", "1,ok,-4", "1,ok,2e9")
    text = header + "".join(f"{row},,,,\n" for row in rows)
    stored = app.uploads.store(io.BytesIO(text.encode()), "list.csv")
    dry = app.check_file("order", stored, resubmit_of=parent.id)
    assert (dry.accepted, dry.rejected) == (2 - 1, 9)
    made = sheet(app, text, resubmit_of=parent.id)
    expected = {
        3: "not_failed", 4: "not_failed", 5: "bad_row_number", 6: "bad_row_number", 7: "duplicate_row",
        8: "bad_row_number", 9: "wrong_type", 10: "bad_row_number", 11: "bad_row_number",
    }  # fmt: skip
    assert codes(made) == expected == {p.row: p.code for p in dry.problems}
    assert made.progress()["counts"]["total"] == 1
    said = {problem.row: problem.message for problem in made.problems}
    assert said[3].startswith(f"row 2 is not among the failed rows of Task {parent.id}: it succeeded, has not ended, or is")
    assert said[7] == "row 3 is in this list twice, first in row 2; delete one of the two"
    # A row that the model refused has its number in the report of the new Task, and can be corrected there or before.
    assert [(row.status, row.number) for row in made.report("rejected").rows if row.number] == [("rejected", 5)]
    assert codes(sheet(app, f"{header}1,ok,5,,,,\n", resubmit_of=made.id)) == {}
    with pytest.raises(InputError) as refused:
        sheet(app, f"{header}1,ok,5,,,,\n", resubmit_of=parent.id)
    assert [p.code for p in refused.value.errors] == ["already_resubmitted"]
    assert app.doctor() == []


def test_a_row_that_another_list_took_keeps_its_number_and_is_refused_for_the_same_again(world: World) -> None:
    app = world.app()
    parent = first(world, app)
    taker = sheet(app, report(parent, ALL_OK, only=["3"]), resubmit_of=parent.id)
    late = sheet(app, report(parent, {}, only=["4"]) + report(parent, ALL_OK).splitlines()[1] + "\n", resubmit_of=parent.id)
    assert codes(late) == {3: "already_resubmitted"}
    assert [row.number for row in late.report("rejected").rows] == [3]
    with pytest.raises(InputError) as refused:
        sheet(app, report(late, ALL_OK, only=["3"]), resubmit_of=late.id)
    assert [(p.code, f"Task {taker.id} " in p.message) for p in refused.value.errors] == [("already_resubmitted", True)]
    done(world, app, taker)
    assert done(world, app, late)["counts"]["total"] == 1
    assert app.doctor() == []


def test_what_a_child_refused_whole_can_be_sent_again_of_both(world: World) -> None:
    app = world.app()
    parent = first(world, app)
    with pytest.raises(InputError) as refused:
        sheet(app, report(parent, {"3": {"n": "x"}}, only=["3"]), resubmit_of=parent.id)
    assert refused.value.code == "all_rejected"
    rejected = max(each["task_id"] for each in app.tasks())
    assert app.progress(rejected)["resubmit_of"] == parent.id
    assert parent.progress()["resubmitted_by"] == [], "it took nothing"
    of_it = sheet(app, report(parent, ALL_OK, only=["3"]), resubmit_of=rejected)
    assert done(world, app, of_it)["counts"]["finish"] == 1
    assert parent.progress()["mended"] == 1


def test_options_go_together(world: World) -> None:
    app = world.app()
    parent = first(world, app)
    good = report(parent, ALL_OK)

    def refused(send: Callable[[], object]) -> tuple[str, str | None]:
        with pytest.raises(InputError) as error:
            send()
        assert error.value.status == 422
        return error.value.code, error.value.errors[0].text if error.value.errors else None

    assert refused(lambda: sheet(app, good, resubmit_of=4711)) == ("invalid_options", "option.resubmit_task")
    assert refused(lambda: sheet(app, good, resubmit_of=parent.id, owner="x"))[1] == "option.resubmit_owner"
    stored = app.uploads.store(io.BytesIO(good.encode()), "list.csv")
    assert refused(lambda: app.submit_file("note", stored, resubmit_of=parent.id))[1] == "option.resubmit_worker"
    items: Any = [{"n": 1, "kind": "ok"}]
    assert refused(lambda: app.submit("order", items, resubmit_of=parent.id))[1] == "option.resubmit_items"
    assert refused(lambda: app.submit_items("order", items, resubmit_of=parent.id))[1] == "option.resubmit_items"
    assert refused(lambda: sheet(app, "n,kind\n1,ok\n", resubmit_of=parent.id))[0] == "no_row_column"
    # strict: as a whole or not at all; the rows stay free.
    assert refused(lambda: sheet(app, report(parent, {"3": {"n": "x"}}), resubmit_of=parent.id, strict=True))[0] == (
        "rows_rejected"
    )
    strict = max(each["task_id"] for each in app.tasks())
    assert refused(lambda: sheet(app, good, resubmit_of=strict))[1] == "option.resubmit_strict"
    twice = good + good.splitlines()[1] + "\n"
    assert refused(lambda: sheet(app, twice, resubmit_of=parent.id, strict=True))[0] == "rows_rejected"
    # unique is held against the new list alone; the same key is the same list.
    made = sheet(app, good, resubmit_of=parent.id, unique="n", idempotency_key="k")
    assert set(codes(made).values()) == {"duplicate_in_upload"}
    assert sheet(app, good, resubmit_of=parent.id, unique="n", idempotency_key="k").created is False
    assert made.progress()["counts"]["total"] == 1
    strict_child = sheet(app, report(made, ALL_OK), resubmit_of=made.id, strict=True)
    assert done(world, app, strict_child)["counts"]["total"] == 3
    assert app.doctor() == []


def test_a_sorted_workbook_its_owner_and_its_columns(world: World) -> None:
    app = world.app()
    parent = sheet(app, LIST.replace("kind", "Art"), owner="ann", columns={"Art": "kind"})
    done(world, app, parent)
    made = parent.report(locale="ja")
    rows = sorted(made.rows, key=lambda row: -(row.number or 0))
    path = world.folder / "failed.xlsx"
    write_xlsx(
        path, made.headers, [replace(row, values={**row.values, "n": "9", "Art": "ok"}) for row in rows], locale="ja"
    )
    stored = app.uploads.store(io.BytesIO(path.read_bytes()), "failed.xlsx")
    child = app.submit_file("order", stored, resubmit_of=parent.id, wait_s=60)
    counts = done(world, app, child)
    assert (counts["counts"]["finish"], counts["owner"]) == (4, "ann")
    assert [row.number for row in child.report("succeeded").rows] == [7, 5, 4, 3]
    assert parent.progress()["mended"] == 4


def test_a_row_that_was_sent_again_is_not_retried(world: World) -> None:
    """Neither by its Task nor alone. Taken out of control: ``but_taken``; the row runs twice."""
    app = world.app()
    parent = first(world, app)
    child = sheet(app, report(parent, ALL_OK, only=["3", "5"]), resubmit_of=parent.id)
    assert parent.retry()
    assert [event["row"] for event in parent.events(status="enqueue")] == [4]
    (entry,) = [entry for entry in parent.log() if entry["action"] == "retried"]
    assert entry["detail"]["sent_again"] == 2
    done(world, app, parent)
    child.wait(60)
    sheet(app, report(parent, ALL_OK, only=["4"]), resubmit_of=parent.id)
    with pytest.raises(Conflict, match="sent again"):
        parent.retry()
    assert app.doctor() == []


def test_a_single_job_whose_row_was_sent_again_is_not_restarted(world: World) -> None:
    app = world.app()
    parent = first(world, app)
    (broken,) = parent.events(status="error")
    sheet(app, report(parent, ALL_OK, only=[str(broken["row"])]), resubmit_of=parent.id)
    with pytest.raises(Conflict, match="another Task"):
        app.operations.act_on_job(broken["job_id"], "restart")


def test_of_a_running_and_of_a_cancelled_task(world: World) -> None:
    """What has ended can be corrected; cancelled rows are found in the order of the list, without an index."""
    app = world.app()
    parent = sheet(app, "n,kind\n" + "".join(f"{n},ok\n" for n in range(40)))
    text = "row,n,kind\n" + "".join(f"{n},1,ok\n" for n in range(41, 1, -1))
    with pytest.raises(InputError) as refused:
        sheet(app, text, resubmit_of=parent.id)
    assert {p.code for p in refused.value.errors} == {"not_failed"}
    cancel(app, parent)
    child = sheet(app, text, resubmit_of=parent.id)
    assert child.progress()["counts"]["total"] == 40
    cancel(app, child)
    grandchild = sheet(app, "row,n,kind\n30,1,ok\n", resubmit_of=child.id)
    assert done(world, app, grandchild)["counts"]["finish"] == 1
    assert [parent.progress()["mended"], child.progress()["mended"]] == [1, 1]
    with pytest.raises(Conflict, match="sent again"):
        parent.retry(status="cancelled")
    assert app.doctor() == []


@pytest.mark.each_database(reason="it updates and deletes by conditions of each")
def test_purged_tasks_leave_their_rows_taken_and_what_they_mended_counted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purge, "SLICE", 2)
    app = world.app()
    parent = first(world, app)
    child = sheet(app, report(parent, {**ALL_OK, "4": {"kind": "bug"}}), resubmit_of=parent.id)
    done(world, app, child)
    before = parent.progress()
    rest = report(child, ALL_OK)
    world.sql("UPDATE tasks SET owner = 'gone' WHERE id = ?", child.id)
    assert app.purge(0, owner="gone").tasks == 1
    after = parent.progress()
    assert (after["mended"], after["resubmitted"], after["resubmitted_by"]) == (3, 3, [])
    assert after["version"] > before["version"]
    with pytest.raises(InputError) as refused:
        sheet(app, rest, resubmit_of=parent.id)
    assert [p.code for p in refused.value.errors] == ["already_resubmitted"], "its row was performed elsewhere"
    app.purge(0)
    assert [world.one(f"SELECT count(*) FROM {each}") for each in ("resubmitted_rows", "task_ancestors", "tasks")] == [
        0
    ] * 3


def test_a_purged_parent_leaves_the_child_its_numbers(world: World) -> None:
    app = world.app()
    parent = first(world, app)
    child = sheet(app, report(parent, {**ALL_OK, "4": {"kind": "bug"}, "5": {"n": "x"}}), resubmit_of=parent.id)
    done(world, app, child)
    world.sql("UPDATE tasks SET owner = 'gone' WHERE id = ?", parent.id)
    assert app.purge(0, owner="gone").tasks == 1
    assert child.progress()["resubmit_of"] == parent.id
    assert [row.number for row in child.report().rows] == [4, 5]
    last = sheet(app, report(child, ALL_OK), resubmit_of=child.id)
    assert done(world, app, last)["counts"]["finish"] == 2
    assert child.progress()["mended"] == 2
    assert app.doctor() == []


@pytest.mark.each_database(reason="the doctor's statements run on each")
def test_the_doctor_finds_what_is_wrong_and_repairs_it(world: World) -> None:
    app = world.app()
    parent = first(world, app)
    child = sheet(app, report(parent, ALL_OK, only=["3"]), resubmit_of=parent.id)
    done(world, app, child)
    with app.ledger.database.write() as connection:
        connection.execute(task_ancestors.delete())
        connection.execute(task_ancestors.insert().values(ancestor_id=child.id + 7, task_id=child.id))
        row = {"task_id": child.id, "number": 4, "row": 99, "of_task": parent.id, "of_row": 4, "taken": 1}
        connection.execute(resubmitted_rows.insert().values(row))
    assert parent.progress()["mended"] == 0
    found = app.doctor(repair=True)
    assert [(each.code, each.task_id, each.repaired) for each in found] == [("corrections", child.id, True)]
    assert found[0].message == (
        f"took 1 rows of which it has no item; Task {parent.id} does not count it;"
        f" Task {child.id + 7} counts it, which it does not correct"
    )
    assert app.doctor() == []
    assert parent.progress()["mended"] == 1
    assert codes(sheet(app, report(parent, ALL_OK, only=["4"]), resubmit_of=parent.id)) == {}
    with app.ledger.database.write() as connection:
        connection.execute(resubmitted_rows.delete().where(resubmitted_rows.c.task_id == child.id))
    assert [(each.code, each.message) for each in app.doctor()] == [("corrections", "took 0 rows and has 1 items")]


def test_the_number_of_corrections_is_limited(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynctask.ledger.corrections.MOST_CORRECTIONS", 1)
    app = world.app()
    parent = first(world, app)
    child = sheet(app, report(parent, {"3": {"kind": "bug"}}, only=["3"]), resubmit_of=parent.id)
    done(world, app, child)
    for task in (parent, child):
        with pytest.raises(Conflict, match="1 lists correct Task"):
            sheet(app, report(task, ALL_OK), resubmit_of=parent.id)


def test_a_split_that_is_resumed_takes_no_row_twice(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger was away after the first slice; what that took is known by its rows."""
    monkeypatch.setattr("asynctask.lists.split.FIRST_SLICE", 2)
    app = world.app()
    parent = first(world, app)
    text = report(parent, ALL_OK)
    text += text.splitlines()[1] + "\n"
    commit, calls = Splitter._commit, list[int]()

    def once(self: Splitter, task_id: int, *rest: Any) -> None:
        calls.append(task_id)
        if len(calls) == 2:
            raise LedgerUnavailable("away")
        commit(self, task_id, *rest)

    monkeypatch.setattr(Splitter, "_commit", once)
    child = sheet(app, text, resubmit_of=parent.id)
    assert (child.progress()["split"]["state"], child.progress()["counts"]["total"]) == ("splitting", 2)
    app.split_task(child.id)
    seen = child.progress()
    assert (seen["split"]["state"], seen["counts"]["total"], seen["split"]["rejected"]) == ("sealed", 4, 1)
    (twice,) = child.rejects()
    assert (twice["row"], twice["errors"][0]["code"]) == (6, "duplicate_row")
    assert app.doctor() == []


# -- races


def together(*acts: Callable[[], object]) -> list[object]:
    """Runs these at once, each in a thread, and returns what they returned or raised."""
    found: list[object] = [None] * len(acts)
    start = threading.Barrier(len(acts))

    def run(number: int, act: Callable[[], object]) -> None:
        start.wait(60)
        try:
            found[number] = act()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(acts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return found


def waiting(app: AsyncTask, column: Any) -> Counter[int]:
    """How often each number waits to be performed, of items that were taken."""
    with app.ledger.database.read() as connection:
        found = sa.select(column).where(resubmitted_rows.c.taken == 1)
        return Counter(connection.execute(found).scalars())


@pytest.mark.each_database(reason="each has locks of its own")
def test_two_lists_at_once_take_each_row_once(world: World) -> None:
    """Taken out of ``add_slice``: the locks on the Tasks above; the unique index then breaks one of the lists."""
    apps = [world.app() for _ in range(3)]
    parent = sheet(apps[0], "n,kind\n" + "".join(f"{n},ok\n" for n in range(400)))
    cancel(apps[0], parent)
    up, down = ("row,n,kind\n" + "".join(f"{n},1,ok\n" for n in order) for order in (range(2, 402), range(401, 1, -1)))
    found = together(*(lambda app=app, text=text: sheet(app, text, resubmit_of=parent.id)
                       for app, text in zip(apps[1:], (up, down), strict=True)))  # fmt: skip
    made = [each for each in found if isinstance(each, TaskHandle)]
    refused = [each for each in found if isinstance(each, InputError)]
    assert len(made) + len(refused) == 2
    assert all(error.code == "all_rejected" for error in refused)
    assert waiting(apps[0], resubmitted_rows.c.number) == Counter(dict.fromkeys(range(2, 402), 1))
    progress = [each.progress() for each in made]
    assert [each["split"]["state"] for each in progress] == ["sealed"] * len(made)
    assert sum(each["counts"]["total"] for each in progress) == 400
    assert apps[0].doctor() == []


@pytest.mark.each_database(reason="each has locks of its own")
def test_a_list_beside_a_retry_runs_each_row_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "SLICE", 20)
    monkeypatch.setattr(control, "_SQLITE_SLICE", 20)
    apps = [world.app() for _ in range(3)]
    parent = sheet(apps[0], "n,kind\n" + "".join(f"{n},ok\n" for n in range(400)))
    cancel(apps[0], parent)
    text = "row,n,kind\n" + "".join(f"{n},1,ok\n" for n in range(401, 1, -1))

    def retry() -> None:
        control.retry(apps[2].ledger, parent.id, ["cancelled"])
        while control.change_rows(apps[2].ledger, parent.id) is not False:
            pass

    made, raised = together(lambda: sheet(apps[1], text, resubmit_of=parent.id), retry)
    assert raised is None or isinstance(raised, Conflict)
    taken = set(waiting(apps[0], resubmitted_rows.c.of_row))
    with apps[0].ledger.database.read() as connection:
        waits = sa.text("SELECT first_row FROM events WHERE task_id = :id AND status <> 'cancelled'")
        reopened = set(connection.execute(waits, {"id": parent.id}).scalars())
        assert connection.execute(sa.select(sa.func.count()).select_from(tasks)).scalar_one() == 2
    assert isinstance(made, TaskHandle | InputError)
    assert taken | reopened == set(range(2, 402))
    assert not taken & reopened, "these would run twice"
    assert apps[0].doctor() == []


@pytest.mark.databases("postgresql", "mariadb", reason="on SQLite a write transaction excludes all others")
def test_a_retry_leaves_a_task_alone_while_a_list_takes_its_rows(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken out of ``add_slice``: the locks; the retry opens the rows that the list has found to be free."""
    apps = [world.app() for _ in range(2)]
    parent = sheet(apps[0], "n,kind\n1,ok\n2,ok\n")
    cancel(apps[0], parent)
    control.retry(apps[1].ledger, parent.id, ["cancelled"])
    real, turned = corrections.find_corrected, list[bool | None]()

    def meanwhile(*given: Any) -> Any:
        found = real(*given)
        turned.append(control.change_rows(apps[1].ledger, parent.id))
        return found

    monkeypatch.setattr(corrections, "find_corrected", meanwhile)
    child = sheet(apps[0], "row,n,kind\n2,1,ok\n3,1,ok\n", resubmit_of=parent.id)
    assert turned == [None]
    assert child.progress()["counts"]["total"] == 2
    assert control.change_rows(apps[1].ledger, parent.id) is False
    assert parent.progress()["counts"]["cancelled"] == 2, "none of them runs twice"


def test_items_of_a_slice_are_corrected_one_by_one_and_its_retry_leaves_them_out(world: World) -> None:
    app = world.app()
    task = sheet(app, LIST.replace("bug", "refuse"), chunk_size=5)
    assert task.progress()["jobs"] == 1
    done(world, app, task)
    child = sheet(app, report(task, ALL_OK, only=["4"]), resubmit_of=task.id)
    assert codes(child) == {}
    assert task.retry(status="failed")
    seen = done(world, app, task)
    assert (seen["counts"]["finish"], seen["counts"]["failed"]) == (2, 3)
    attempts = Counter(row.number for row in task.report("failed").rows if row.status == "failed")
    assert attempts == {3: 1, 4: 1, 5: 1}
    assert done(world, app, child)["counts"]["finish"] == 1
    assert task.progress()["mended"] == 1
    with pytest.raises(InputError, match="one by one"):
        sheet(app, report(task, ALL_OK, only=["5"]), resubmit_of=task.id, chunk_size=2)
    assert app.doctor() == []


def test_cancelled_items_of_a_slice_can_be_sent_again(world: World) -> None:
    app = world.app()
    task = sheet(app, LIST, chunk_size=2)
    task.cancel()
    done(world, app, task)
    header = "n,kind,row,status,error,attempts,result\n"
    child = sheet(app, header + "1,ok,3,,,,\n1,ok,6,,,,\n1,ok,7,,,,\n", resubmit_of=task.id)
    assert codes(child) == {}
    assert task.retry(status="cancelled")
    assert done(world, app, task)["counts"]["cancelled"] == 2
    assert done(world, app, child)["counts"]["finish"] == 3
    assert task.progress()["mended"] == 3
    assert app.doctor() == []


class Nested(BaseModel):
    sku: str
    tags: list[str]
    extra: dict[str, Any] = {}


@pytest.mark.parametrize("chunk_size", [1, 3])
def test_values_of_a_json_list_keep_their_types_on_the_way_through_a_report(world: World, chunk_size: int) -> None:
    """Before, a list in a cell was refused by the model, and without one each value came back as text."""
    app = world.app()
    taken: list[Any] = []

    @app.worker(retry=0)
    def nested(item: Nested) -> None:
        if item.sku == "bad":
            raise NormalException("no")
        taken.append(item.model_dump())

    @app.worker(retry=0)
    def anything(item: Any) -> None:
        if item != "left" and (not isinstance(item, dict) or item.get("sku") == "bad"):
            raise NormalException("no")
        taken.append(item)

    def sent_back(worker: str, items: Sequence[Any], correct: dict[str, dict[str, str]]) -> dict[str, Any]:
        task = app.submit(worker, items, chunk_size=chunk_size)
        done(world, app, task)
        stored = app.uploads.store(io.BytesIO(report(task, correct).encode()), "list.csv")
        again = app.submit_file(worker, stored, resubmit_of=task.id, wait_s=60)
        assert codes(again) == {}
        return done(world, app, again)

    plain = {"n": 5, "share": 1.5, "flag": True, "tags": ["a", 1], "text": "007", "none": None, "sku": "bad"}
    assert (
        sent_back("nested", [{"sku": "bad", "tags": ["a"], "extra": {"b": [1]}}], {"1": {"sku": "ok"}})["counts"]["finish"]
        == 1
    )
    assert sent_back("anything", [plain, {**plain, "n": 2**53 + 1}], {"1": {"sku": "A", "n": "6"}, "2": {"sku": "B"}})[
        "done"
    ]
    assert taken == [
        {"sku": "ok", "tags": ["a"], "extra": {"b": [1]}},
        {**plain, "sku": "A", "n": 6},
        {**plain, "sku": "B", "n": 2**53 + 1},
    ]


def test_a_cell_that_is_no_value_of_the_type_that_it_had_is_kept_as_it_is(world: World) -> None:
    app = world.app()
    taken: list[Any] = []

    @app.worker(retry=0)
    def anything(item: dict[str, Any]) -> None:
        if item["sku"] == "bad":
            raise NormalException("no")
        taken.append(item)

    task = app.submit("anything", [{"sku": "bad", "n": 1}, {"sku": "bad", "n": 2}])
    task.cancel()
    correct = {"1": {"sku": "A", "n": "many"}, "2": {"sku": "B"}}
    again = app.submit_file(
        "anything",
        app.uploads.store(io.BytesIO(report(task, correct, kind="unprocessed").encode()), "x.csv"),
        resubmit_of=task.id,
    )
    done(world, app, again)
    assert sorted(taken, key=str) == [{"sku": "A", "n": "many"}, {"sku": "B", "n": 2}]
