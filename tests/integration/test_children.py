"""Tasks that jobs submit: their parent waits for them, sums them, and hands pause, resume, cancel and priority down."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
from support.world import World, numbers

from asynctask import AsyncTask
from asynctask.core.states import State
from asynctask.dispatch.control import TaskControls
from asynctask.errors import Conflict, InputError
from asynctask.ledger import children as child_rows
from asynctask.ledger import control, tasks
from asynctask.task import TaskHandle
from asynctask.testing import wait_for
from webapi import create_app

pytestmark = pytest.mark.one_database(reason="who waits for whom is decided above the database")


def json_of(response: Any) -> dict[str, Any]:
    found: dict[str, Any] = response.json
    return found


def lists(count: int, worker: str = "note", rows: int = 2, **options: Any) -> list[dict[str, Any]]:
    """Items of ``spread``, each of which submits a list."""
    return [{"n": n, "worker": worker, "items": numbers(rows, 100 * (n + 1)), "options": options} for n in range(count)]


def nested(levels: int) -> list[dict[str, Any]]:
    """An item that submits a list of one item, and that one does, and so on."""
    item: dict[str, Any] = {"n": 0, "worker": "note", "items": numbers(1)}
    for level in range(1, levels - 1):
        item = {"n": level, "worker": "spread", "items": [item]}
    return [item]


def children_of(app: AsyncTask, task: TaskHandle) -> list[TaskHandle]:
    """Its children, oldest first."""
    return [app.task(each["task_id"]) for each in reversed(app.tasks(parent=task.id))]


def states(tasks: list[TaskHandle]) -> list[str]:
    return [each.progress()["state"] for each in tasks]


def acts(task: TaskHandle) -> list[str]:
    return [each["action"] for each in task.log()]


def waiting(task: TaskHandle) -> None:
    wait_for(lambda: task.progress()["state_reason"] == "waiting_for_children", "its own rows have ended")


# -- the parent of a Task


@pytest.mark.each_database(reason="the sums and the close are made in SQL")
def test_a_list_that_a_job_submits_is_a_child_for_which_its_parent_waits(world: World) -> None:
    app = world.app()
    with world.working(app, concurrency=4):
        task = app.submit("spread", lists(2, "gated"), owner="anna", on_success={"worker": "told", "args": ["done"]})
        waiting(task)
        shown = task.progress()
        counts = shown["children"]["counts"]
        assert (shown["state"], shown["done"], shown["progress"]["percent"]) == ("running", False, 100)
        assert (shown["parent"], shown["children"]["count"], shown["children"]["open"], counts["total"]) == (None, 2, 2, 4)
        (reason,) = app.operations.wait_reasons(task.id)
        assert (reason.code, "2 Tasks" in reason.message) == ("children", True)
        for child in children_of(app, task):
            progress = child.progress()
            assert (progress["parent"], progress["owner"], progress["children"]) == (task.id, "anna", None)
        assert world.shop.performed("told") == {}
        world.open_gate()
        task.wait(60)
        wait_for(lambda: task.progress()["callbacks"][0]["status"] == "finish", "it is called back")
    below = task.progress()["children"]
    assert (below["count"], below["open"], below["done"], below["counts"]["finish"]) == (2, 0, 2, 4)
    ended = [child.progress()["finished_at"] for child in children_of(app, task)]
    assert max(ended) <= task.progress()["finished_at"]
    assert app.doctor() == []


@pytest.mark.each_database(reason="the levels are summed in SQL")
def test_the_sums_have_all_levels_and_each_level_waits_for_the_next(world: World) -> None:
    app = world.app()
    with world.working(app, concurrency=2):
        task = app.submit("spread", nested(5))
        task.wait(60)
    below = task.progress()["children"]
    assert (below["count"], below["done"], below["counts"]["finish"]) == (4, 4, 4)
    assert len(children_of(app, task)) == 1
    assert {each["state"] for each in app.tasks()} == {"finished"}


def test_a_list_with_parent_0_is_a_task_of_its_own(world: World) -> None:
    app = world.app()
    with world.working(app):
        task = app.submit("spread", lists(1, "gated", parent=0))
        task.wait(60)
        assert task.progress()["children"] is None
        (other,) = [each for each in app.tasks() if each["worker"] == "gated"]
        assert (other["parent"], other["done"]) == (None, False)
        world.open_gate()
        app.task(other["task_id"]).wait(60)


def test_a_parent_can_be_named_and_owns_what_is_submitted(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(1), owner="anna")
    child = app.submit("note", numbers(1), parent=task.id)
    other = app.submit("note", numbers(1), parent=task.id, owner="bob")
    assert [each.progress()["owner"] for each in (child, other)] == ["anna", "bob"]
    assert task.progress()["children"]["count"] == 2
    with world.working(app):
        for each in (child, other, task):
            each.wait(60)
    with pytest.raises(Conflict, match="is finished, and takes no children any more"):
        app.submit("note", numbers(1), parent=task.id)
    with pytest.raises(InputError, match="there is no Task 4711"):
        app.submit("note", numbers(1), parent=4711)


def test_the_job_of_another_application_makes_no_child_here(world: World) -> None:
    app, other = world.app(), AsyncTask(database_url=f"sqlite:///{world.folder}/other.db", data_dir=str(world.folder))
    other.ensure_schema()
    other.worker(name="far")(lambda item: None)

    @app.worker(name="across")
    def across(item: dict[str, Any]) -> None:
        other.submit("far", [item])

    with world.working(app):
        task = app.submit("across", numbers(1))
        task.wait(60)
    assert (other.tasks()[0]["parent"], task.progress()["children"]) == (None, None)
    other.close()


@pytest.mark.each_database(reason="parents are locked and counted in SQL")
def test_levels_numbers_and_sessions_are_limited(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    app = world.app()
    at = root = app.submit("note", numbers(1), session="s", owner="anna")
    for _ in range(child_rows.MOST_LEVELS - 1):
        at = app.submit("note", numbers(1), parent=at.id)
    with pytest.raises(InputError, match=r"level 10 .* parent=0"):
        app.submit("note", numbers(1), parent=at.id)
    with pytest.raises(InputError, match="wait for itself"):
        app.submit("note", numbers(1), parent=root.id, session="s")
    monkeypatch.setattr(child_rows, "MOST_BELOW", child_rows.MOST_LEVELS - 1)
    with pytest.raises(Conflict, match="the most"):
        app.submit("note", numbers(1), parent=root.id)
    assert root.progress()["children"]["count"] == child_rows.MOST_LEVELS - 1, "what was refused is not counted"


@pytest.mark.parametrize("item", [{"bug": True}, {"refuse": True}], ids=["error", "failed"])
def test_the_failure_of_a_child_is_the_failure_of_its_parent(world: World, item: dict[str, Any]) -> None:
    app = world.app()
    with world.working(app):
        bad = [{"n": 0, "worker": "note", "items": numbers(1, 7, **item)}]
        task = app.submit(
            "spread", bad, on_success={"worker": "told", "args": ["good"]}, on_failure={"worker": "told", "args": ["bad"]}
        )
        task.wait(60)
    assert [line[2] for line in world.shop.lines() if line[0] == "told"] == ["bad"]
    assert task.counts["finish"] == 1, "its own rows are counted apart"


def test_a_retry_of_the_parent_leaves_the_children_as_they_are(world: World) -> None:
    app = world.app()
    with world.working(app):
        items = [*lists(1), {"n": 9, "worker": "nobody", "items": []}]
        task = app.submit("spread", items)
        task.wait(60)
        (child,) = children_of(app, task)
        task.retry()
        wait_for(lambda: task.progress()["done"], "it has run again")
        assert (task.progress()["generation"], child.progress()["generation"]) == (2, 1)


# -- what goes down


def family(app: AsyncTask) -> tuple[TaskHandle, list[TaskHandle]]:
    """A Task, a child, a grandchild, and another child; no job of theirs runs."""
    task = app.submit("note", numbers(1))
    child = app.submit("note", numbers(3), parent=task.id)
    return task, [child, app.submit("note", numbers(2), parent=child.id), app.submit("note", numbers(1), parent=task.id)]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller hands acts down itself to the end, on a slow machine, too: no process is there to go on with it."""
    for method in (TaskControls.hand_down, TaskControls.change_rows):
        monkeypatch.setattr(method, "__defaults__", (600.0,))


@pytest.mark.each_database(reason="rows are found and changed in SQL")
@pytest.mark.usefixtures("patient")
def test_pause_and_resume_go_down_but_not_to_what_a_person_paused(world: World) -> None:
    app = world.app()
    task, below = family(app)
    below[2].pause()
    task.pause(who="anna")
    assert states(below) == ["paused"] * 3
    assert [each.progress()["state_reason"] for each in below] == ["parent_paused", "parent_paused", None]
    assert below[0].log()[0]["detail"] == {"with_task": task.id}
    (reason,) = app.operations.wait_reasons(below[0].id)
    assert reason.message == f"It is paused with Task {task.id}, whose job submitted it"
    late = app.submit("note", numbers(1), parent=below[0].id)
    assert late.progress()["state_reason"] == "parent_paused", "a child of a paused Task is paused"
    task.resume()
    assert states([*below, late]) == ["running", "running", "paused", "running"]
    below[2].resume()
    with world.working(app):
        task.wait(60)
    assert app.doctor() == []


@pytest.mark.usefixtures("patient")
def test_a_priority_goes_down(world: World) -> None:
    app = world.app()
    task, below = family(app)
    task.update(priority=7, title="urgent")
    assert [each.progress()["control"]["priority"] for each in below] == [7, 7, 7]
    assert {each.progress()["title"] for each in below} == {""}
    assert app.doctor() == []


@pytest.mark.each_database(reason="rows are found and changed in SQL")
@pytest.mark.usefixtures("patient")
def test_a_cancel_goes_down_without_a_worker(world: World) -> None:
    app = world.app()
    task, below = family(app)
    task.cancel()
    assert states(below) == ["cancelled"] * 3
    assert [each.progress()["done"] for each in (task, *below)] == [True] * 4
    assert task.progress()["children"]["counts"]["cancelled"] == 6
    with pytest.raises(Conflict, match="is cancelled, and takes no children"):
        app.submit("note", numbers(1), parent=below[1].id)
    assert app.doctor() == []


@pytest.mark.usefixtures("patient")
def test_a_parent_whose_rows_have_ended_is_cancelled_with_its_children(world: World) -> None:
    app = world.app()
    with world.working(app, concurrency=4):
        task = app.submit("spread", lists(2, "gated", rows=5), on_failure={"worker": "told", "args": ["bad"]})
        waiting(task)
        task.cancel()
        below = children_of(app, task)
        assert states(below) == ["cancelled"] * 2
        world.open_gate()
        task.wait(60)
    assert acts(task).count("closed") == 1
    assert app.doctor() == []


@pytest.mark.each_database(reason="each locks in its own way")
def test_a_child_ends_while_its_parent_is_cancelled(world: World) -> None:
    """Whichever comes first, all of them are over, and each is closed once."""
    app = world.app()
    with world.working(app, concurrency=4):
        for _ in range(10):
            task = app.submit("spread", lists(3))
            wait_for(lambda: task.progress()["children"], "it has a child")  # noqa: B023 - called at once
            try:
                task.cancel()
            except Conflict:
                assert task.progress()["state"] == "finished"
            task.wait(60)
            below = children_of(app, task)
            assert set(states(below)) <= {"finished", "cancelled"}
            assert [acts(each).count("closed") for each in (task, *below)] == [1] * (len(below) + 1)
    assert app.doctor() == []


@pytest.mark.each_database(reason="each locks in its own way")
def test_children_that_several_threads_submit_to_a_task_that_is_cancelled_are_refused_or_cancelled(world: World) -> None:
    app = world.app()
    task, made, refused = app.submit("note", numbers(1)), list[TaskHandle](), list[Conflict]()

    def submit() -> None:
        while not refused:
            try:
                made.append(app.submit("note", numbers(1), parent=task.id))
            except Conflict as error:
                refused.append(error)

    threads = [threading.Thread(target=submit) for _ in range(3)]
    for each in threads:
        each.start()
    wait_for(lambda: len(made) > 10, "they submit")
    task.cancel()
    for each in threads:
        each.join()
    with world.working(app):  # for those that half a second does not reach
        task.wait(60)
    assert set(states(made)) == {State.CANCELLED}
    assert task.progress()["children"]["count"] == len(made)


# -- a process that dies in between


@pytest.mark.each_database(reason="maintenance finds it in SQL")
def test_a_process_that_dies_between_the_end_of_a_child_and_the_close_of_its_parent_is_made_good(world: World) -> None:
    app = world.app(lease_s=1.0, heartbeat_s=0.3)
    task = app.submit("spread", lists(1), on_complete={"worker": "told", "args": ["done"]})
    child = world.cli("child_app", "worker", "-c", "2", CRASH_AT="before:above:1")
    assert child.wait(120) == -signal.SIGKILL, world.said()
    assert (states(children_of(app, task)), task.progress()["done"]) == (["finished"], False)
    with world.working(app):
        task.wait(60)
    assert (acts(task).count("closed"), len([1 for line in world.shop.lines() if line[0] == "told"])) == (1, 1)
    assert app.doctor() == []


@pytest.mark.each_database(reason="each commits and rolls back in its own way")
@pytest.mark.parametrize("act", ["cancel", "pause"])
@pytest.mark.parametrize("point", ["before:down:1", "after:down:1", "after:down:2"])
def test_what_goes_down_arrives_if_the_process_dies(world: World, act: str, point: str) -> None:
    app = world.app()
    task, below = family(app)
    command = world.cli("child_app", act, str(task.id), CRASH_AT=point)
    assert command.wait(120) == -signal.SIGKILL, world.said()
    wanted = {"cancel": "cancelled", "pause": "paused"}[act]
    assert states([task, *below]).count(wanted) < 4, "it died before the end"
    with world.working(app, queues={"other": 1}):  # so that no job of theirs ends before
        wait_for(lambda: states([task, *below]) == [wanted] * 4, "maintenance goes on")
    if act == "pause":
        task.resume()
    with world.working(app):
        task.wait(60)
    assert app.doctor() == []


def test_an_act_that_a_later_one_replaced_does_not_go_down(world: World) -> None:
    app = world.app()
    task, below = family(app)
    control.pause(app.ledger, task.id)
    assert control.hand_down(app.ledger, task.id)
    control.resume(app.ledger, task.id)
    while control.hand_down(app.ledger, task.id):
        pass
    for child in below[:1]:
        while control.hand_down(app.ledger, child.id):
            pass
    assert states(below) == ["running"] * 3


def test_a_close_that_sees_a_child_open_leaves_the_parent_to_the_child(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(1))
    child = app.submit("note", numbers(1), parent=task.id, queue="later")
    with world.working(app):
        waiting(task)
        assert not tasks.try_close(app.ledger, task.id)
    with app.ledger.database.read() as connection:
        assert task.id not in tasks.candidates(connection), "maintenance does not try in vain"
    with world.working(app, queues={"later": 1}):
        child.wait(60)
        task.wait(60)


# -- HTTP


def test_over_http_a_parent_is_given_listed_and_hidden_from_others(world: World) -> None:
    app = world.app()
    client = create_app(app).test_client()
    task = app.submit("note", numbers(1), owner="anna")
    body = {"worker": "note", "items": numbers(1), "parent": task.id}
    made = json_of(client.post("/api/tasks", json=body))
    assert (made["parent"], made["owner"]) == (task.id, "anna")
    listed = json_of(client.get(f"/api/tasks?parent={task.id}"))["tasks"]
    assert [each["task_id"] for each in listed] == [made["task_id"]]
    assert json_of(client.get(f"/api/tasks/{task.id}"))["children"]["count"] == 1
    refused = json_of(client.post("/api/tasks", json={**body, "parent": 4711}))
    assert (refused["code"], refused["errors"][0]["column"]) == ("invalid_options", "parent")
    assert client.post(f"/api/tasks/{task.id}/cancel").status_code == 200
    assert client.post("/api/tasks", json=body).status_code == 409


@pytest.mark.each_database(reason="versions are summed in SQL")
def test_the_version_and_the_mark_of_a_parent_change_with_its_children(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(1))
    child = app.submit("note", numbers(1), parent=task.id)
    version, known = task.progress()["version"], {task.id: app.changed({task.id: None})[task.id].mark}
    assert app.changed(known) == {}
    child.pause()
    assert task.progress()["version"] > version
    assert task.id in app.changed(known)
