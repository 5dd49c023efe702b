"""Why no row of a Task begins: what keeps the next one from its worker, and how to mend it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest
from support.borrowing import borrow, outcome
from support.world import World, numbers

from asynctask import AsyncTask
from asynctask.brokers.base import Copy
from asynctask.clock import SECOND
from asynctask.errors import BrokerUnavailable, Conflict, NotFound
from asynctask.ledger import processes
from asynctask.ledger.base import dumps
from asynctask.ledger.recorder import Kind, Outcome, Recorder
from asynctask.ledger.standalone import put_off_elsewhere
from asynctask.task import TaskHandle
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")


def only(app: AsyncTask, task: TaskHandle) -> tuple[str, str, str]:
    (found,) = app.operations.wait_reasons(task.id)
    return found.code, found.message, found.mend


def codes(app: AsyncTask, task: TaskHandle) -> list[str]:
    return [each.code for each in app.operations.wait_reasons(task.id)]


def attend(app: AsyncTask) -> None:
    """Makes the application known to the ledger as an idle process of the queue ``default`` with one thread."""
    processes.register(app.ledger, app.host, kind="worker", pid=1, lease_s=600, concurrency=1, queues=["default"])


def world_clock_goes_on(world: World) -> None:
    """The counters changed an hour ago."""
    world.sql("UPDATE task_tallies SET updated_at = updated_at - 3600000000")


@pytest.fixture
def app(world: World) -> AsyncTask:
    """An application without a process: the ledger keeps its jobs."""
    return world.app()


@pytest.fixture
def attended(app: AsyncTask) -> AsyncTask:
    attend(app)
    return app


def test_a_task_that_a_worker_takes_soon_has_none(attended: AsyncTask) -> None:
    assert codes(attended, attended.submit("note", numbers(2))) == []
    with pytest.raises(NotFound, match="there is no Task 99"):
        attended.operations.wait_reasons(99)


def test_a_queue_without_a_process_is_named_with_the_command_that_works_it(app: AsyncTask) -> None:
    mend = "start one (asynctask -A module:app worker -q imports), or the program that performs its jobs"
    task = app.submit("note", numbers(2), queue="imports")
    assert only(app, task) == ("no_process", "No process works the queue imports", mend)
    mixed = app.submit_jobs([("note", {"n": 1}), ("brief", {"n": 2})], queue="imports")
    assert codes(app, mixed) == ["no_process"]


def test_processes_that_take_no_more_are_named(attended: AsyncTask) -> None:
    task = attended.submit("note", numbers(1))
    processes.beat(attended.ledger, lease_s=600, quiet=1)
    assert codes(attended, task) == ["quiet"]


def held(world: World, app: AsyncTask) -> None:
    """The application's process beat 40 s ago, and its supervisor says since then that it exists."""
    world.sql("UPDATE processes SET beat_at = beat_at - 40000000")
    processes.renew(app.ledger.database, {app.ledger.identity: []}, lease_s=600)


def test_processes_that_do_not_answer_are_named_with_the_rows_that_they_hold(world: World, attended: AsyncTask) -> None:
    lent, claimed, waiting = (attended.submit("note", numbers(3)) for _ in range(3))
    borrow(attended.ledger, lent.id)
    first = borrow(attended.ledger, claimed.id)[0]
    Recorder(attended.ledger).flush([outcome(first, Kind.WORKING)])
    assert codes(attended, claimed) == [], "one runs"
    held(world, attended)
    identity = attended.ledger.identity
    reason = attended.operations.wait_reasons(lent.id)[0]
    assert re.fullmatch(
        rf"3 rows are held by the process {re.escape(identity)}, which has not answered for \d+ s", reason.message
    )
    assert "kill -9 1 on" in reason.mend
    assert codes(attended, lent) == codes(attended, claimed) == ["held", "held"], "nobody else works the queue"
    assert only(attended, waiting)[:2] == ("held", "The processes that work the queue default do not answer")
    (process,) = attended.operations.processes()
    assert (process["alive"], (process["held_s"] or 0) >= 40) == (True, True)
    processes.beat(attended.ledger, lease_s=600)
    assert codes(attended, lent) == codes(attended, claimed) == []
    (process,) = attended.operations.processes()
    assert process["held_s"] is None


def test_a_paused_task_says_how_it_is_resumed_and_one_that_paused_itself_what_it_tolerates(app: AsyncTask) -> None:
    task = app.submit("note", numbers(2), tolerated_failures=0)
    task.pause()
    assert only(app, task) == ("paused", "It is paused", f"asynctask resume {task.id}")
    task.resume()
    job, *_ = borrow(app.ledger, task.id, 2)
    Recorder(app.ledger).flush([Outcome(job.event_id, job.attempt, Kind.FAILED)])
    assert codes(app, task) == ["too_many_failures"]
    assert "more rows failed than it tolerates (0)" in only(app, task)[1]


def test_a_task_in_line_names_the_one_that_holds_its_session(attended: AsyncTask) -> None:
    first = attended.submit("note", numbers(1), session="import")
    second = attended.submit("note", numbers(1), session="import")
    assert codes(attended, first) == []
    text = f"It waits for its session import, which Task {first.id} has"
    assert only(attended, second) == ("session", text, f"it begins when Task {first.id} has ended")
    first.pause()
    assert only(attended, second) == ("session", f"{text}, which is paused", f"asynctask resume {first.id}")


def test_rows_that_no_process_could_perform_say_why(app: AsyncTask) -> None:
    task = app.submit("note", numbers(2))
    job, *_ = borrow(app.ledger, task.id, 2)
    why = "Waiting for a worker: one that took it has no task 'note' registered"
    put_off_elsewhere(app.ledger, {(job.job_id, 1): why}, app.ledger.now() + 30 * SECOND)
    attend(app)
    assert only(app, task)[:2] == ("put_off", why)


def test_rows_that_wait_for_a_clock_that_was_set_back_say_so_and_how_they_are_started(app: AsyncTask) -> None:
    task = app.submit("note", numbers(1))
    (job,) = borrow(app.ledger, task.id, 1)
    put_off_elsewhere(app.ledger, {(job.job_id, 1): "given back"}, app.ledger.now() + 3_600 * SECOND)
    attend(app)
    assert "due_later" in codes(app, task)
    assert app.operations.act_on_all("scheduled", "restart").done == 1
    assert "due_later" not in codes(app, task)


def test_rounds_retries_and_keys_say_what_the_rows_wait_for(world: World, app: AsyncTask) -> None:
    rounds, again = app.submit("note", numbers(2), interval=3_600, parallel=1), app.submit("note", numbers(1))
    keyed = [app.submit("note", numbers(1), key="n") for _ in range(2)]
    (first,), (second,), (_,), () = (borrow(app.ledger, each.id, 1) for each in (rounds, again, *keyed))
    due = app.ledger.now() + 3_600 * SECOND
    failed = Outcome(second.event_id, second.attempt, Kind.RETRY, retry_at=due)
    Recorder(app.ledger).flush([Outcome(first.event_id, first.attempt, Kind.FINISH), failed])
    attend(app)
    world_clock_goes_on(world)
    assert [codes(app, each) for each in (rounds, again, *keyed)] == [["interval"], ["retry"], [], ["key"]]


def test_a_task_with_keys_names_the_open_one_before_it_which_has_any_key(attended: AsyncTask) -> None:
    first = attended.submit("note", numbers(1), key="n", open=True, owner="Ann")
    later = attended.submit("note", [{"n": 7, "serial": 1}], key="serial", owner="Ben")
    borrow(attended.ledger, first.id)
    assert borrow(attended.ledger, later.id) == []
    code, message, mend = only(attended, later)
    assert (code, f"Task {first.id}, " in message, f"asynctask seal {first.id}" in mend) == ("earlier_list", True, True)
    with pytest.raises(TimeoutError, match="is open"):
        later.wait(0)
    assert codes(attended, attended.submit("note", numbers(1))) == [], "it has no keys"
    first.seal()
    assert codes(attended, later) == []
    said: list[list[str]] = []

    def items() -> Iterator[dict[str, int]]:
        yield from numbers(1_500)
        said.append(codes(attended, attended.submit("note", numbers(1), key="n")))

    attended.submit("note", items(), key="n")
    assert said == [["earlier_list"]]


def test_the_error_of_rows_that_wait_for_a_retry_is_said(world: World, attended: AsyncTask) -> None:
    task = attended.submit("note", numbers(3))
    due = attended.ledger.now() + 3_600 * SECOND
    texts = ["the shop is down", "the shop is down", "a bug"]
    last_errors = [dumps({"code": "raised", "message": text, "process": None}) for text in texts]
    Recorder(attended.ledger).flush(
        [
            Outcome(job.event_id, job.attempt, Kind.RETRY, retry_at=due, values={"last_error": error})
            for job, error in zip(borrow(attended.ledger, task.id), last_errors, strict=True)
        ]
    )
    code, message, _ = only(attended, task)
    assert (code, message.partition(" until ")[0]) == ("retry", "The rows that are left (3) wait for a retry, the first")
    assert message.endswith("; most frequent error: the shop is down")


def test_more_urgent_jobs_and_busy_processes_go_first(world: World, attended: AsyncTask) -> None:
    task = attended.submit("note", numbers(2))
    urgent = attended.submit("note", numbers(7), priority=1)
    assert codes(attended, urgent) == []
    assert only(attended, task)[0] == "priority"
    assert only(attended, task)[1].endswith("go first: 7")
    urgent.cancel()
    processes.beat(attended.ledger, lease_s=600, busy=1)
    assert only(attended, task)[:2] == ("busy", "All threads that work the queue default are busy")


def test_a_broker_that_does_not_answer_is_the_reason(app: AsyncTask, monkeypatch: pytest.MonkeyPatch) -> None:
    task = app.submit("note", numbers(1))

    def away(*_: Any) -> None:
        raise BrokerUnavailable("Redis at 127.0.0.1:6379 does not answer")

    monkeypatch.setattr(type(app.operations), "_registered", away)
    assert only(app, task)[:2] == ("broker_away", "Redis at 127.0.0.1:6379 does not answer")


class Engine:
    """The queues of an engine, by what it knows."""

    def __init__(self, *known: str) -> None:
        self.name = "celery"
        self.workers: dict[str, Any] = dict.fromkeys(known)
        self.is_away = False

    def push(self, copies: Sequence[Copy]) -> None:
        raise AssertionError("nothing is to be pushed")

    def waiting(self, queues: Collection[str]) -> dict[str, int]:
        if self.is_away:
            raise BrokerUnavailable("the broker of Celery does not answer")
        return dict.fromkeys(queues, 0)

    def may_hold(self, queue: str, worker: str) -> bool:
        return False


def test_a_process_whose_engine_has_no_such_function_says_so(world: World) -> None:
    old, new = world.app(), world.app()
    task = new.submit("note", numbers(2))
    world.sql("UPDATE tasks SET queue = 'celery/default'")
    for app, engine in ((old, Engine()), (new, Engine("note"))):
        app._engines["celery"] = engine  # type: ignore[assignment]
    processes.register(new.ledger, new.host, kind="celery", pid=1, lease_s=600, concurrency=2, queues=["celery/default"])
    assert only(old, task)[:2] == ("unknown_worker", "celery has no note here")
    assert codes(new, task) == []


def test_the_broker_of_an_engine_that_does_not_answer_is_the_reason(world: World) -> None:
    app, engine = world.app(), Engine("note")
    task = app.submit("note", numbers(1))
    world.sql("UPDATE tasks SET queue = 'celery/default'")
    app._engines["celery"] = engine  # type: ignore[assignment]
    engine.is_away = True
    assert codes(app, task) == ["broker_away", "no_process"]
    for act in (app.operations.jobs, app.operations.clear_queue, app.operations.pause):
        with pytest.raises(Conflict, match="celery keeps the queue celery/default: use its own tools"):
            act("celery/default")


def test_callbacks_that_nobody_performs_are_the_reason_of_a_finalizing_task(world: World) -> None:
    app = world.app(callback_queue="later")
    with world.working(app, queues={"default": 1}):
        task = app.submit("note", numbers(1), on_complete="told")
        wait_for(lambda: task.progress()["state"] == "finalizing", "its row has ended")
        wait_for(lambda: codes(app, task), "its callback waits")
        assert only(app, task)[1] == "No process works the queue later; those that run work only default"
        assert codes(app, app.submit("note", numbers(1), queue="later")) == ["no_process"]
    assert codes(app, task) == ["no_process"]


def test_callbacks_of_a_cancelled_task_and_those_that_wait_for_a_retry_are_reasons_too(world: World) -> None:
    """Before, ``watch`` stood there without a word: the Task is not done while its callback waits."""
    app = world.app(callback_queue="later")
    task = app.submit("note", numbers(1), on_complete="told")
    task.cancel()
    assert not task.progress()["done"]
    assert only(app, task)[1] == "No process works the queue later"
    due = app.ledger.now() + 600 * SECOND
    world.sql("UPDATE events SET due_at = ?, retries = 1 WHERE callback_of IS NOT NULL", due)
    code, message, mend = only(app, task)
    assert (code, message.partition(" until ")[0]) == ("retry", "Its callback told waits for a retry")
    assert mend.startswith("asynctask retries restart ")


def test_stopped_jobs_that_are_left_are_the_reason(attended: AsyncTask) -> None:
    task = attended.submit("note", numbers(1))
    attended.stop_job(task.events()[0]["job_id"])
    assert codes(attended, task) == ["stopped_jobs"]


def test_short_jobs_of_the_only_task_are_not_said_to_wait_for_others(world: World) -> None:
    """The start of a short job is not recorded, so nothing seems to run: ``busy`` was said of a healthy Task."""
    app = world.app()
    task = app.submit("brief", numbers(200))
    seen: set[str] = set()
    with world.working(app, concurrency=2):
        wait_for(lambda: task.progress()["counts"]["finish"] > 0, "it runs")
        while not task.progress()["done"]:
            seen |= set(codes(app, task))
    assert seen == set()


def test_rows_that_ended_before_a_knob_was_set_count_as_movement(world: World, attended: AsyncTask) -> None:
    """A knob restarts the measurement of the rate, which is 0 until the next row ends: ``busy`` was said of a Task whose
    rows had ended a moment before."""
    task = attended.submit("note", numbers(3))
    processes.beat(attended.ledger, lease_s=600, busy=1)
    (job,) = borrow(attended.ledger, task.id, 1)
    Recorder(attended.ledger).flush([Outcome(job.event_id, job.attempt, Kind.FINISH)])
    task.update(parallel=2)
    assert task.progress()["progress"]["rate_per_s"] == 0
    assert codes(attended, task) == []
    world_clock_goes_on(world)
    assert codes(attended, task) == ["busy"]
