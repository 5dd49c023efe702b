"""A Task with an interval: its jobs start in rounds, whatever processes there are."""

from __future__ import annotations

import json
import signal
from datetime import datetime
from typing import Any

import pytest
from support import borrowing
from support.borrowing import Lent
from support.world import World, numbers

from asynctask import AsyncTask
from asynctask.arrivals import ArrivalTracker
from asynctask.clock import SECOND, from_datetime
from asynctask.ledger import control
from asynctask.ledger.base import Ledger
from asynctask.ledger.events import Note
from asynctask.ledger.recorder import Kind, Recorder
from asynctask.middleware.tracker import Attempt
from asynctask.task import TaskHandle
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")

HOUR = 3_600 * SECOND


def starts(world: World) -> list[int]:
    """When each attempt of each job started, in microseconds."""
    found = []
    for started, messages in world.sql("SELECT started_at, added_messages FROM events"):
        began = [each for each in json.loads(messages or "[]") if each["status"] == "working"]
        found += [int(started)] * (started is not None) + [at(each["at"]) for each in began[1:]]
    return sorted(found)


def at(text: str) -> int:
    return from_datetime(datetime.fromisoformat(text)) + 1_000  # whole milliseconds: at most one later


def check_rounds(world: World, interval_s: float, most: int) -> None:
    """In no interval more jobs started than one round has."""
    found = starts(world)
    gaps = [later - first for first, later in zip(found, found[most:], strict=False)]
    assert min(gaps) >= interval_s * SECOND, gaps


# -- one borrow after the other, in the ledger


def borrow(world: World, app: AsyncTask, task: TaskHandle, wanted: int = 1) -> list[Lent]:
    """Borrows as if its time had come by the hint: the Task's own columns decide."""
    world.sql("UPDATE tasks SET due_next = 1 WHERE id = ? AND ready IS NULL", task.id)
    return borrowing.borrow(app.ledger, task.id, wanted)


def end(app: AsyncTask, *jobs: Lent, kind: Kind = Kind.FINISH, started_at: int | None = None, **more: Any) -> None:
    values = {} if started_at is None else {"started_at": started_at}
    borrowing.end(app.ledger, *jobs, kind=kind, values=values, **more)


def next_check(world: World, app: AsyncTask) -> float:
    """In how many seconds the Task is looked at again."""
    ready, due = world.sql("SELECT ready, due_next FROM tasks")[0]
    assert ready is None
    return (int(due) - app.ledger.now()) / SECOND


def an_hour_passes(world: World) -> None:
    world.sql(f"UPDATE tasks SET round_at = round_at - {HOUR}")
    world.sql(f"UPDATE events SET started_at = started_at - {HOUR}")


@pytest.mark.each_database(reason="each has statements of its own for the hints")
def test_a_round_takes_what_parallel_allows_and_the_next_waits_for_its_time(world: World) -> None:
    """Taken out: the jobs that have not begun, in `next_round`; the time of the round, in `_room`."""
    app, other = world.app(), world.app()
    task = app.submit("note", numbers(20), interval=3_600, parallel=3)
    first = borrow(world, app, task, 2)
    first += borrow(world, app, task, 9)
    assert len(first) == 3, "one process has as many as it can use, and others the rest"
    assert borrow(world, other, task, 9) == []
    end(app, *first[:2])
    assert borrow(world, other, task, 9) == []
    assert 3_500 < next_check(world, app) <= 3_600
    an_hour_passes(world)
    assert borrow(world, app, task) == [], "the third has not begun, as far as is known"
    assert next_check(world, app) <= 1
    end(app, first[2], started_at=app.ledger.now())
    assert 3_500 < next_check(world, app) <= 3_600
    assert borrow(world, app, task) == [], "it began just now"
    an_hour_passes(world)
    assert len(borrow(world, other, task, 2)) == 2
    assert len(borrow(world, app, task, 9)) == 1
    control.update(app.ledger, task.id, {"parallel": 5})
    an_hour_passes(world)
    assert borrow(world, app, task) == []
    world.sql("UPDATE events SET started_at = 1, status = 'working' WHERE status = 'enqueue' AND seq < 6")
    assert len(borrow(world, app, task, 9)) == 2, "three of the five still run"


def test_a_job_that_runs_again_counts_from_its_last_start(world: World) -> None:
    """Its ``started_at`` stays that of its first attempt. Taken out: the look into its messages."""
    app = world.app()
    task = app.submit("shaky", numbers(3), interval=3_600)
    (job,) = borrow(world, app, task)
    end(app, job, kind=Kind.RETRY, started_at=app.ledger.now(), retry_at=1)
    an_hour_passes(world)
    (again,) = borrow(world, app, task)
    assert again.event_id == job.event_id
    end(app, again, notes=[Note("working", "", app.ledger.now())], started_at=app.ledger.now())
    an_hour_passes(world)
    assert borrow(world, app, task) == [], "it began just now"
    world.sql("UPDATE events SET added_messages = NULL")
    assert len(borrow(world, app, task)) == 1


def test_a_round_without_a_parallel_is_one_job(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(5), interval=3_600)
    assert len(borrow(world, app, task, 9)) == 1


def test_a_pause_and_a_retry_do_not_bring_a_round_nearer(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(2), interval=3_600, parallel=2)
    first = borrow(world, app, task, 2)
    task.pause()
    task.resume()
    assert borrow(world, app, task) == []
    end(app, *first, kind=Kind.RAISED, started_at=app.ledger.now())
    task.wait(120)
    task.retry()
    assert borrow(world, app, task) == []
    an_hour_passes(world)
    assert len(borrow(world, app, task, 2)) == 2


def test_a_round_that_was_given_back_begins_again_at_its_time(world: World) -> None:
    """Taken out: that only a job which somebody holds may be about to begin. The Task stood for ever."""
    app, other = world.app(), world.app()
    task = app.submit("note", numbers(4), interval=3_600, parallel=2)
    first = borrow(world, app, task, 2)
    assert borrowing.give_back(app.ledger, *first)
    world.sql("DELETE FROM places")
    an_hour_passes(world)
    assert [job.event_id for job in borrow(world, other, task, 2)] == [job.event_id for job in first]


@pytest.mark.parametrize("again", [False, True])
def test_a_suspect_has_begun_when_it_is_performed_though_a_process_holds_it_before(
    world: World, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Its first commit may take longer than the interval. Taken out: the time after the commit, ``has_begun``, or the
    condition on ``started_at`` in ``_ROUND``."""
    app = world.app()
    now = [app.ledger.now()]
    monkeypatch.setattr(Ledger, "now", lambda self: now[0])
    task = app.submit("shaky", numbers(4), interval=3_600, parallel=2)
    job, other = borrow(world, app, task, 2)
    end(app, other, started_at=now[0])
    if again:
        end(app, job, kind=Kind.RETRY, started_at=now[0], retry_at=1)
        now[0] += HOUR
        job, other = sorted(borrow(world, app, task, 2), key=lambda each: each.event_id)
        end(app, other, started_at=now[0])
    world.sql("UPDATE events SET watched = 1 WHERE id = ?", job.event_id)
    recorder, rounds = Recorder(app.ledger), list[int]()

    def put(outcomes: Any) -> None:
        recorder.flush(outcomes)
        now[0] += HOUR + 1_000  # messages have whole milliseconds
        rounds.append(len(borrow(world, app, task)))

    monkeypatch.setattr(recorder, "put", put)
    tracker = ArrivalTracker(app.ledger, recorder)
    (ticket,) = tracker.begin([(job.job_id, job.attempt)])
    assert ticket is not None
    assert ticket.watched
    tracker.start(Attempt(ticket))
    assert rounds == [0, 1]


# -- with workers


def test_the_interval_holds_over_processes_and_kills(world: World) -> None:
    app = world.app(lease_s=1.0, heartbeat_s=0.3)
    workers = [world.cli("kill_app", "worker", "-c", "2") for _ in range(3)]
    task = app.submit("brief", numbers(30), interval=0.15, parallel=2)
    wait_for(lambda: len(world.shop.performed("ended")) >= 6, "some rounds are over")
    workers[0].send_signal(signal.SIGKILL)
    workers[0].wait()
    assert task.wait(120)["counts"]["finish"] == 30
    check_rounds(world, 0.15, 2)
    world.check_promises(app, [task.id], 30)


@pytest.mark.needs_redis
@pytest.mark.parametrize("broker_kind", ["redis"])
def test_the_interval_holds_where_the_jobs_wait_in_redis(world: World) -> None:
    app = world.app()
    with world.working(app, concurrency=2), world.working(world.app(), concurrency=2):
        task = app.submit("brief", numbers(12), interval=0.1, parallel=2)
        assert task.wait(120)["counts"]["finish"] == 12
    check_rounds(world, 0.1, 2)
    world.check_promises(app, [task.id], 12)


def test_a_job_that_waited_for_its_worker_keeps_the_next_round_waiting(world: World) -> None:
    """Two jobs a round and one thread: of each round the second job starts when the first has ended."""
    app = world.app()
    with world.working(app, concurrency=1):
        task = app.submit("brief", numbers(8), interval=0.1, parallel=2)
        assert task.wait(120)["counts"]["finish"] == 8
    check_rounds(world, 0.1, 2)


@pytest.mark.parametrize("how", ["knob", "sql", "no interval", "no interval by sql"])
def test_a_shorter_interval_acts_at_once(world: World, how: str) -> None:
    app = world.app()
    with world.working(app):
        task = app.submit("note", numbers(4), interval=86_400)
        wait_for(lambda: world.shop.performed(), "the first round is over")
        if how == "knob":
            assert task.update(interval=0.02)["control"]["interval"] == 0.02
        elif how == "sql":
            world.sql("UPDATE tasks SET interval_s = 0.02")
        elif how == "no interval":
            task.update(interval=0)
        else:
            world.sql("UPDATE tasks SET interval_s = 0")
        assert task.wait(120)["counts"]["finish"] == 4
    world.check_promises(app, [task.id], 4)


def test_an_interval_that_is_set_takes_back_what_was_borrowed(world: World) -> None:
    app = world.app()
    task = app.submit("gated", numbers(50))
    with world.working(app, concurrency=2) as launcher:
        wait_for(lambda: len(world.shop.performed("began")) == 2, "both threads are busy")
        task.update(interval=86_400, parallel=4)
        wait_for(lambda: task.id in launcher.pool.jobs.limited(), "the process knows of it")
        wait_for(lambda: task.progress()["control"]["in_flight"] <= 4, "what had not begun is back")
        began = len(world.shop.performed("began"))
        world.open_gate()
        wait_for(lambda: task.progress()["control"]["in_flight"] == 0, "nothing runs")
        assert len(world.shop.performed("began")) <= began + 4, "at most a round more"
        assert task.log()[0]["detail"] == {"interval": [0.0, 86_400], "parallel": [None, 4]}
        task.update(interval=0, parallel=None)
        assert task.wait(120)["counts"]["finish"] == 50


# -- the forecast


def test_the_forecast_is_made_of_the_knobs_and_comes_true(world: World) -> None:
    app = world.app()
    with world.working(app):
        task = app.submit("note", numbers(24), interval=10, parallel=2)
        wait_for(lambda: len(world.shop.performed()) == 2, "the first round is over")
        eta = task.progress()["progress"]["eta_s"]
        assert 100 <= eta <= 110, "eleven rounds to come, one of them within an interval"
        task.update(interval=5)
        forecast = task.progress()["progress"]["eta_s"]
        assert 45 <= forecast <= 55
        begun = app.clock.monotonic()
        task.update(interval=0.2)
        task.wait(120)
        took = app.clock.monotonic() - begun
    assert took >= 0.9 * (forecast - 5) * 0.2 / 5, "the rounds are not early; a busy machine may be late"
    assert task.progress()["progress"]["eta_s"] is None


def test_the_forecast_goes_by_the_rate_where_jobs_take_longer_than_the_rounds(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(100), interval=1.0)
    (job,) = borrow(world, app, task)
    end(app, job, started_at=app.ledger.now())
    minute = 60 * SECOND
    world.sql(f"UPDATE tasks SET started_at = started_at - {minute}, round_at = round_at - {minute}")
    assert task.progress()["progress"]["eta_s"] == pytest.approx(99 * 60, rel=0.05)
