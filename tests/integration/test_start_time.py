"""A Task that starts at a time, and one that is submitted paused: nothing of it begins before."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.borrowing import borrow, offers
from support.world import World, numbers

from asynctask.clock import SECOND, from_datetime, read_rfc3339
from asynctask.core.states import State
from asynctask.errors import Conflict, InputError
from asynctask.testing import wait_for
from webapi import create_app

pytestmark = pytest.mark.one_database(reason="when a Task may start is decided above the database")


def json_of(response: Any) -> dict[str, Any]:
    found: dict[str, Any] = response.json
    return found


def soon(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


@pytest.mark.each_database(reason="hints are compared in SQL")
@pytest.mark.parametrize("options", [{}, {"parallel": 2}, {"interval": 0.1}, {"session": "s"}, {"key": "n"}], ids=str)
def test_jobs_begin_at_the_start_time_and_not_before(world: World, options: dict[str, Any]) -> None:
    app = world.app()
    with world.working(app, concurrency=2):
        at = soon(1.5)
        task = app.submit("note", numbers(3), start_at=at, **options)
        assert task.progress()["control"]["start_at"] is not None
        task.wait(60)
    starts = [from_datetime(read_rfc3339(str(each["started_at"]))) for each in task.events()]
    assert min(starts) >= int(at.timestamp() * SECOND)
    assert app.doctor() == []


@pytest.mark.each_database(reason="lines are made in SQL")
def test_rows_of_a_key_keep_their_order_behind_a_task_that_starts_later(world: World) -> None:
    app = world.app()
    with world.working(app, concurrency=2):
        first = app.submit("note", numbers(2), key="n", start_at=soon(1.5))
        second = app.submit("note", numbers(2), key="n")
        wait_for(lambda: [each.code for each in app.operations.wait_reasons(second.id)] == ["key"], "it waits")
        second.wait(60)
        assert first.counts["finish"] == 2, "those of the first went before"
    assert app.doctor() == []


@pytest.mark.each_database(reason="hints are compared in SQL")
def test_a_task_that_waits_for_its_time_is_offered_to_nobody_and_says_why(world: World) -> None:
    app = world.app()
    with world.working(app, queues={"other": 1}):
        task = app.submit("note", numbers(3), queue="other", start_at="2999-01-01T00:00:00+01:00")
        wait_for(lambda: app.submit("note", numbers(1), queue="other").wait(60), "another one of the queue ends")
        (reason,) = app.operations.wait_reasons(task.id)
        assert (reason.code, reason.message) == ("start_at", "It starts at 2998-12-31T23:00:00.000Z")
        assert (offers(app.ledger, "other"), borrow(app.ledger, task.id)) == ([], [])
        assert app.doctor() == [], "its hints say what there is to start"
        task.update(start_at=None)
        task.wait(60)


@pytest.mark.each_database(reason="the backlog is summed in SQL")
def test_before_its_start_time_a_task_is_no_backlog_and_then_it_waits_since_that_time(world: World) -> None:
    """Failed without the start time in ``queries._COULD_START``, and without it in the age in ``queries.backlog``."""
    app = world.app()
    task = app.submit("note", numbers(3), queue="other", start_at="2999-01-01T00:00:00Z")
    assert app.operations.queues() == []
    at = soon(1.5)
    task.update(start_at=at)
    (queue,) = wait_for(app.operations.queues, "it may start")
    assert (queue["name"], queue["waiting"]) == ("other", 3)
    age, since_start = queue["oldest_s"], (datetime.now(UTC) - at).total_seconds()
    assert age is not None
    assert age <= since_start + 0.01


def test_a_start_time_in_the_past_is_now(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(3), start_at=soon(-60))
    assert len(borrow(app.ledger, task.id)) == 3


@pytest.mark.parametrize("value", ["tomorrow", "2026-12-01", "2026-12-01T08:00:00", 1_800_000_000, True])
def test_a_time_without_a_zone_is_refused(world: World, value: Any) -> None:
    app = world.app()
    with pytest.raises(InputError, match="start_at"):
        app.submit("note", numbers(1), start_at=value)
    assert world.one("SELECT COUNT(*) FROM tasks") == 0


@pytest.mark.parametrize("count", [0, 3])
def test_a_task_is_submitted_paused(world: World, count: int) -> None:
    app = world.app()
    task = app.submit("note", numbers(count), paused=True)
    if not count:
        assert task.state == State.REJECTED
        return
    assert (task.state, borrow(app.ledger, task.id)) == (State.PAUSED, [])
    assert {"submitted", "paused"} <= {each["action"] for each in task.log()}
    task.resume()
    with world.working(app):
        task.wait(60)
    assert app.doctor() == []


@pytest.mark.each_database(reason="sessions are made in SQL")
def test_a_paused_task_leaves_its_session_to_others(world: World) -> None:
    app = world.app()
    first = app.submit("note", numbers(1), session="s", paused=True)
    second = app.submit("note", numbers(1), session="s")
    with world.working(app):
        second.wait(60)
        first.resume()
        first.wait(60)


def test_a_long_list_is_split_while_it_is_paused(world: World) -> None:
    app = world.app()
    task = app.submit("note", iter(numbers(3_000)), paused=True)
    wait_for(lambda: task.progress()["split"]["state"] == "sealed", "all rows are there")
    assert (task.state, task.counts["enqueue"]) == (State.PAUSED, 3_000)
    task.cancel()


def test_both_over_http(world: World) -> None:
    app = world.app()
    client = create_app(app).test_client()
    body = {"worker": "note", "items": numbers(2), "start_at": "2999-01-01T00:00:00Z", "paused": True}
    made = client.post("/api/tasks", json=body)
    assert made.status_code == 202
    path = made.headers["Location"]
    assert json_of(client.get(path))["state"] == State.PAUSED
    assert json_of(client.get(path))["control"]["start_at"] == "2999-01-01T00:00:00.000Z"
    moved = client.patch(path, json={"start_at": "2999-01-02T00:00:00Z"})
    assert json_of(moved)["control"]["start_at"] == "2999-01-02T00:00:00.000Z"
    assert json_of(client.patch(path, json={"start_at": None}))["control"]["start_at"] is None
    for wrong in ("2999-01-01", 5, "x" * 50):
        assert client.patch(path, json={"start_at": wrong}).status_code == 422


def test_the_start_of_a_task_that_has_started_stays(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(2))
    borrow(app.ledger, task.id, 1)
    with pytest.raises(Conflict, match="to hold the rest of it, pause it"):
        task.update(start_at=soon(60))
