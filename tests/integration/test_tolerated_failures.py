"""A Task of which more items fail than it tolerates pauses itself, and goes on when that is mended."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import sqlalchemy as sa
from support import borrowing
from support.borrowing import borrow
from support.world import World, numbers

from asynctask import AsyncTask
from asynctask.errors import Conflict, InputError
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.recorder import Kind
from asynctask.task import TaskHandle
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")

REFUSED = Kind.FAILED
BROKEN = Kind.RAISED


def end(app: AsyncTask, task: TaskHandle, count: int, how: Kind = REFUSED) -> None:
    """So many jobs go out, and end."""
    jobs: list[borrowing.Lent] = []
    while len(jobs) < count:  # it lends no more than may fail before it pauses, and one
        more = borrow(app.ledger, task.id, count - len(jobs))
        assert more
        jobs += more
        borrowing.end(app.ledger, *more, kind=how)


def state(task: TaskHandle) -> tuple[Any, Any]:
    progress = task.progress()
    return progress["state"], progress["state_reason"]


RUNS, PAUSED = ("running", None), ("paused", "too_many_failures")


@pytest.mark.each_database(reason="counts, their sums and the compare-and-set are the database's")
@pytest.mark.parametrize(
    ("limit", "steps"),
    [
        (2, [(2, REFUSED, RUNS), (1, BROKEN, PAUSED)]),
        ("0", [(1, BROKEN, PAUSED)]),
        ("10%", [(1, BROKEN, RUNS), (1, REFUSED, RUNS), (1, REFUSED, PAUSED)]),
        ("failed:1", [(3, BROKEN, RUNS), (1, REFUSED, RUNS), (1, REFUSED, PAUSED)]),
        ("error:5%", [(3, REFUSED, RUNS), (1, BROKEN, RUNS), (1, BROKEN, PAUSED)]),
    ],
    ids=str,
)
def test_with_one_more_failure_than_is_tolerated_it_pauses_itself(
    world: World, limit: Any, steps: list[tuple[int, Kind, tuple[Any, Any]]]
) -> None:
    """Taken out: the check after the flush. Maintenance, which does not run here, would pause it a second later."""
    app = world.app()
    task = app.submit("note", numbers(20), tolerated_failures=limit)
    for count, how, expected in steps:
        end(app, task, count, how)
        assert state(task) == expected
    entry = task.log()[0]
    assert (entry["action"], entry["detail"]["reason"]) == ("paused", "too_many_failures")
    assert entry["detail"]["tolerated_failures"] == str(limit)
    assert borrow(app.ledger, task.id, 5) == []


def test_raising_the_limit_or_a_retry_lets_it_go_on_and_a_resume_alone_does_not(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(20), tolerated_failures=1)
    end(app, task, 2)
    with pytest.raises(Conflict, match="tolerated_failures"):
        task.resume()
    assert task.update(tolerated_failures="5%")["state"] == "paused", "one of twenty is too few, too"
    assert task.update(title="Another", parallel=9)["state"] == "paused"
    assert task.update(tolerated_failures=2)["state"] == "running"
    assert [entry["action"] for entry in task.log()[:2]] == ["resumed", "changed"]
    end(app, task, 1)
    assert state(task) == PAUSED
    world.sql("UPDATE tasks SET tolerated_failures = '3'")
    assert task.resume(), "the row was edited, and says nothing against it"
    end(app, task, 1)
    assert state(task) == PAUSED
    assert task.update(tolerated_failures=None)["state"] == "running"
    end(app, task, 1)
    task.update(tolerated_failures=3)
    assert task_rows.pause_failing(app.ledger) == [task.id], "what maintenance does each second"
    assert task.retry()
    progress = task.progress()
    assert (progress["state"], progress["generation"], progress["counts"]["failed"]) == ("running", 2, 0)
    end(app, task, 3)
    assert state(task) == RUNS
    end(app, task, 1)
    assert state(task) == PAUSED
    assert app.doctor() == []


def test_while_the_total_is_not_known_a_share_of_it_is_not_either(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(10), tolerated_failures="10%")
    world.sql("UPDATE tasks SET split_state = 'splitting', planned = NULL")
    end(app, task, 5)
    assert task_rows.pause_failing(app.ledger) == []
    world.sql("UPDATE tasks SET planned = 50")
    assert task_rows.pause_failing(app.ledger) == []
    world.sql("UPDATE tasks SET planned = 49")
    assert task_rows.pause_failing(app.ledger) == [task.id]


def test_while_a_retry_takes_the_failures_back_it_does_not_pause(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(10), tolerated_failures=1)
    world.sql("UPDATE tasks SET turning = 'retry', turn_statuses = 'failed', turn_cursor = -1")
    end(app, task, 5)
    assert task_rows.pause_failing(app.ledger) == []
    assert state(task) == RUNS
    world.sql("UPDATE tasks SET turning = NULL")
    assert task_rows.pause_failing(app.ledger) == [task.id]


def test_what_a_user_wrote_into_the_row_that_is_no_limit_limits_nothing(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(10), tolerated_failures=0)
    world.sql("UPDATE tasks SET tolerated_failures = 'a few'")
    end(app, task, 5)
    assert state(task) == RUNS
    with pytest.raises(InputError, match="5%"):
        task.update(tolerated_failures="a few")


@pytest.mark.each_database(reason="what a transaction sees of others between two of its statements is the database's")
@pytest.mark.parametrize("place", range(6))
def test_what_fails_while_a_borrow_counts_is_not_left_out(world: World, place: int) -> None:
    """Taken out: that what is lent is read before what failed. It then lent ten more. ``place``: after which read."""
    app = world.app()
    task = app.submit("note", numbers(40), tolerated_failures=9)
    jobs = borrow(app.ledger, task.id, 9)
    reads, ending = 0, list[threading.Thread]()

    def count(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        nonlocal reads
        if threading.current_thread() is not borrower or not statement.lstrip().upper().startswith("SELECT"):
            return
        if not any(word in statement for word in ("task_tallies", "sum(loans", "count(*)")):
            return
        reads += 1
        if reads == place + 1:
            how = {"kind": Kind.FAILED}
            ending.append(threading.Thread(target=borrowing.end, args=(app.ledger, *jobs), kwargs=how))
            ending[0].start()
            ending[0].join(1 if app.ledger.database.is_sqlite else 30)  # there it waits for the end of the borrow

    borrower = threading.current_thread()
    sa.event.listen(app.ledger.database.engine, "after_cursor_execute", count)
    try:
        more = borrow(app.ledger, task.id, 20)
    finally:
        sa.event.remove(app.ledger.database.engine, "after_cursor_execute", count)
    for thread in ending:
        thread.join()
    assert len(ending) == 1
    assert len(more) <= 1, "nine had failed, and one more may"


@pytest.mark.parametrize("parallel", [1, 3])
def test_at_most_the_jobs_in_flight_end_beyond_it(world: World, parallel: int) -> None:
    """Taken out: the margin of loans. Up to a hundred lent jobs of each place failed beyond it."""
    app = world.app()
    with world.working(app, concurrency=4):
        task = app.submit("note", numbers(400, refuse=True), parallel=parallel, tolerated_failures=9)
        wait_for(lambda: state(task) == PAUSED, "it paused itself")
        wait_for(lambda: task.progress()["control"]["in_flight"] == 0, "nothing runs")
        assert 10 <= task.progress()["counts"]["failed"] <= 9 + 1 + parallel
        task.update(tolerated_failures=None)
        assert task.wait(120)["counts"]["failed"] == 400
    assert state(task) == ("finished", None)
    world.check_promises(app, [task.id], 400)


def test_a_task_without_a_limit_of_its_jobs_pauses_and_goes_on_to_its_end(world: World) -> None:
    app = world.app()
    with world.working(app):
        task = app.submit("order", numbers(600, kind="bug"), tolerated_failures="5%")
        wait_for(lambda: state(task) == PAUSED, "it paused itself")
        wait_for(lambda: task.progress()["control"]["in_flight"] == 0, "nothing runs")
        assert task.progress()["counts"]["error"] < 600
        task.update(tolerated_failures="error:100%")
        assert task.wait(120)["counts"]["error"] == 600
    assert task.progress()["control"]["tolerated_failures"] == "error:100%"
    world.check_promises(app, [task.id], 600)


def test_one_that_is_over_with_its_last_failures_ends_and_does_not_pause(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(1), tolerated_failures=0)
    end(app, task, 1)
    assert state(task) == ("finished", None)
    other = app.submit("note", numbers(2), tolerated_failures=1)
    jobs = borrow(app.ledger, other.id)
    other.update(tolerated_failures=0)
    for number, job in enumerate(jobs):
        assert state(other) == (RUNS, PAUSED)[number]
        borrowing.end(app.ledger, job, kind=Kind.FAILED)
    assert state(other) == ("finished", None), "its last jobs were in flight when it paused"
