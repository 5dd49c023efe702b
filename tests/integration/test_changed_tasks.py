"""What many readers of many Tasks ask: which of them have changed, and into what."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.databases import Store

from asynctask import AsyncTask
from asynctask.ledger.progress import Changed


@pytest.fixture
def app(store: Store, tmp_path: Path) -> Iterator[AsyncTask]:
    made = AsyncTask(environ={}, database_url=store.url, data_dir=str(tmp_path / "data"), submit_wait_s=60.0)

    @made.worker(retry=0)
    def enroll(item: dict[str, Any]) -> None: ...

    @made.worker(retry=0)
    def tell(item: dict[str, Any]) -> None: ...

    yield made
    made.close()


def marks(found: dict[int, Changed]) -> dict[int, str | None]:
    return {task_id: each.mark for task_id, each in found.items()}


@pytest.mark.parametrize("at_once", [500, 1])
def test_a_task_is_told_once_for_each_change(app: AsyncTask, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr("asynctask.ledger.progress._MARKS_AT_ONCE", at_once)
    tasks = [app.submit("enroll", [{"sku": "A"}, {"sku": "B"}]) for _ in range(3)]
    known = dict.fromkeys((each.id for each in tasks), None)
    first = app.changed(known)
    assert {task_id: each.progress for task_id, each in first.items()} == {each.id: each.progress() for each in tasks}
    assert app.changed(marks(first)) == {}
    tasks[1].pause()
    then = app.changed(marks(first))
    assert {task_id: each.progress for task_id, each in then.items()} == {tasks[1].id: tasks[1].progress()}
    assert app.changed(marks(first | then)) == {}


@pytest.mark.one_database(reason="the look at the changes is that of the first test")
def test_an_end_of_an_item_and_of_a_callback_is_a_change(app: AsyncTask) -> None:
    task = app.submit("enroll", [{"sku": "A"}], on_complete="tell", on_success="tell")
    found = app.changed({task.id: None})
    for count in (1, 2):
        waiting = task.events()[0]["job_id"] if count == 1 else task.progress()["callbacks"][0]["job_id"]
        app.record(waiting, "finish")
        later = app.changed(marks(found))
        now, read = task.progress(), later[task.id].progress
        assert read is not None
        assert [read[each] for each in ("state", "counts", "callbacks", "version")] == [
            now[each] for each in ("state", "counts", "callbacks", "version")
        ]
        assert later[task.id].mark != found[task.id].mark
        found = later
    assert [each["status"] for each in task.progress()["callbacks"]] == ["finish", "enqueue"], (
        "so only a callback has ended"
    )


@pytest.mark.one_database(reason="the look at the changes is that of the first test")
def test_a_task_that_is_not_there_is_told_each_time(app: AsyncTask) -> None:
    task = app.submit("enroll", [{"sku": "A"}])
    assert app.changed({task.id + 1: None, task.id + 2: "a mark"}) == dict.fromkeys(
        (task.id + 1, task.id + 2), Changed(None, None)
    )
    assert app.changed({}) == {}
