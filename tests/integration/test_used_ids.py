"""Another run under the id of a job: of one that has ended, of one that runs, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from support.world import World

from asynctask import AsyncTask, current_job
from asynctask.core.transitions import AT_ONCE, pause_s
from asynctask.database.retrying import TransactionConflict
from asynctask.errors import IdInUse, InputError
from asynctask.ledger import standalone
from asynctask.ledger.standalone import Arrival, send
from asynctask.testing import wait_for


def act_of(app: AsyncTask) -> Any:
    """A worker that returns its argument, or raises it."""

    @app.worker(name="act", retry=0)
    def act(value: Any) -> Any:
        if value == "bad":
            raise ValueError(value)
        current_job().message(f"did {value}")
        return value

    return act


def ended(app: AsyncTask, job_id: str, attempt: int) -> dict[str, Any]:
    wait_for(
        lambda: app.event(job_id)["attempt"] == attempt and app.event(job_id)["status"] in ("finish", "error"), "it ends"
    )
    return app.event(job_id)


def test_a_push_under_the_id_of_an_ended_job_is_another_run_of_it(world: World) -> None:
    app = world.app()
    act, runs = act_of(app), ["a", "bad", "c"]
    with world.working(app):
        for attempt, value in enumerate(runs, 1):
            assert act.set(job_id="nightly").perform_async(value) == "nightly"
            event = ended(app, "nightly", attempt)
            assert (event["params"], event["retries"]) == ([value], 0)
            assert (event["status"], event["result"]) == (("error", None) if value == "bad" else ("finish", value))
    texts = [m["message"] for m in event["messages"]]
    assert texts == [
        "In progress", "did a", "Done", "Sent again", "In progress", "Error: ValueError: bad", "Sent again", "In progress",
        "did c", "Done",
    ]  # fmt: skip
    assert event["created_at"] > event["messages"][0]["at"], "it is the job that was sent last"


@pytest.mark.one_database(reason="the next run is written as in the first test")
def test_a_push_under_the_id_of_a_cancelled_job_waits_for_its_time(world: World) -> None:
    app = world.app()
    act = act_of(app)
    act.set(job_id="nightly").perform_in(3_600, "a")
    app.operations.act_on_job("nightly", "delete")
    act.set(job_id="nightly", queue="low").perform_in(7_200, "b")
    event = app.event("nightly")
    assert (event["status"], event["params"], event["queue"], event["attempt"]) == ("enqueue", ["b"], "low", 3)
    assert event["due_at"] is not None


@pytest.mark.one_database(reason="nothing but what is refused")
def test_a_push_under_the_id_of_an_open_job_or_of_a_row_is_refused(world: World) -> None:
    app = world.app()
    act = act_of(app)
    act.set(job_id="nightly").perform_async("a")
    with pytest.raises(IdInUse, match=r"a job with the id nightly is in enqueue .worker 'act', queue 'default'."):
        act.set(job_id="nightly").perform_async("b")
    task = app.submit("act", ["row"])
    (row,) = wait_for(task.events, "its row")
    with pytest.raises(IdInUse, match=f"of a job of Task {task.id}"):
        act.set(job_id=row["job_id"]).perform_async("b")
    with pytest.raises(InputError, match="cannot share one job_id"):
        act.set(job_id="other").perform_bulk(["a", "b"])
    with pytest.raises(InputError, match="job_id must be 1 to 64"):
        act.set(job_id="a/b")
    with world.working(app):
        assert (ended(app, "nightly", 1)["result"], task.wait(timeout=30)["counts"]["finish"]) == ("a", 1)
    with pytest.raises(IdInUse, match=f"of a job of Task {task.id}"):
        act.set(job_id=row["job_id"]).perform_async("b")


@pytest.mark.parametrize("kind", ["lone", "list"])
def test_a_job_that_pushes_itself_again_ends_with_that_run(world: World, kind: str) -> None:
    app = world.app()

    @app.worker(name="poll", retry=0)
    def poll(item: dict[str, Any]) -> int:
        if item["n"] < 3:
            poll.set(job_id=current_job().job_id).perform_async({**item, "n": item["n"] + 1})
            return -1
        return int(item["n"])

    with world.working(app):
        if kind == "lone":
            job_id = poll.perform_async({"n": 1})
        else:
            task = app.submit("poll", [{"n": 1}])
            assert task.wait(timeout=60)["counts"]["finish"] == 1
            job_id = task.events()[0]["job_id"]
        event = ended(app, str(job_id), 3)
    assert (event["status"], event["result"]) == ("finish", 3)
    assert event["params"] == ([{"n": 3}] if kind == "lone" else {"n": 1}), "a row of a list keeps its item"
    texts = [m["message"] for m in event["messages"]]
    assert texts == ["In progress", "Sent again", "In progress", "Sent again", "In progress", "Done"]


@pytest.mark.one_database(reason="the next run is written as in the first test")
def test_a_paused_list_holds_the_next_run_of_a_job_that_pushed_itself_and_a_cancelled_one_ends_it(world: World) -> None:
    app = world.app()

    @app.worker(name="poll", retry=0)
    def poll(item: dict[str, Any]) -> None:
        task.pause()
        poll.set(job_id=current_job().job_id).perform_async(item)

    task = app.submit("poll", [{"n": 1}])
    with world.working(app):
        wait_for(lambda: task.events()[0]["attempt"] == 2, "it has asked for another run")
        assert task.events()[0]["status"] == "enqueue"
        task.cancel()
        wait_for(lambda: task.progress()["done"], "the list ends")
    assert task.events()[0]["status"] == "cancelled"
    assert [m["message"] for m in task.events()[0]["added_messages"]].count("In progress") == 1


def test_a_send_whose_answer_was_lost_is_the_same_send_at_its_second_try(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused, as one under the id of an open job."""
    app = world.app()
    job = Arrival("nightly", None, "act", "celery/default", ["a"])
    standalone_insert = standalone._insert

    def lost(*args: Any) -> Any:
        standalone_insert(*args)
        monkeypatch.undo()
        args[0].commit()
        raise TransactionConflict("the connection was lost")

    monkeypatch.setattr(standalone, "_insert", lost)
    first = send(app.ledger, [job])["nightly"]
    assert isinstance(first, int)
    assert standalone.end_elsewhere(app.ledger, "nightly", "over")
    again = send(app.ledger, [job])["nightly"]
    assert isinstance(again, int)
    assert again > first
    assert isinstance(send(app.ledger, [job])["nightly"], IdInUse)
    assert app.event("nightly")["attempt"] == 2


def test_tries_without_a_delay_pause_after_ten_and_no_longer_than_five_seconds() -> None:
    assert [pause_s(0.0, tries) for tries in (0, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, AT_ONCE + 9, 10_000)] == [
        0.0, 0.0, 0.1, 0.2, 5.0, 5.0,
    ]  # fmt: skip
    assert [pause_s(asked, 10_000) for asked in (-1.0, 0.05, 0.1, 60.0)] == [5.0, 5.0, 0.1, 60.0]
