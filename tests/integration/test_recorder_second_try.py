"""What is flushed again after a flush that failed half-way, or whose answer was lost, is not held against itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from support.borrowing import attempts, borrow
from support.world import World

from asynctask import AsyncTask
from asynctask.arrivals import ArrivalTracker
from asynctask.clock import SECOND
from asynctask.database.retrying import OutcomeUnknown, TransactionConflict
from asynctask.errors import LedgerUnavailable
from asynctask.ledger import recorder as closer
from asynctask.ledger.recorder import LINGER_S, Outcome, Recorder
from asynctask.ledger.standalone import Arrival
from asynctask.middleware.tracker import Attempt, Tracker
from asynctask.task import TaskHandle
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database("what is flushed again is the same on each")


@pytest.fixture
def app(world: World) -> AsyncTask:
    return world.app()


@pytest.fixture
def failing(app: AsyncTask, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the next write transactions of the application come to: "" stands, "away" is not begun, and of "unknown"
    the commit stands and nobody knows. Nothing fails once the list is empty."""
    fates: list[str] = []
    real = app.ledger.database.write

    @contextmanager
    def write(**options: Any) -> Iterator[Any]:
        fate = fates.pop(0) if fates else ""
        if fate == "away":
            raise LedgerUnavailable("the database is away")
        with real(**options) as connection:
            yield connection
        if fate == "unknown":
            raise OutcomeUnknown("the answer to a commit was lost")

    monkeypatch.setattr(app.ledger.database, "write", write)
    return fates


def begun(app: AsyncTask, tracker: Tracker, count: int) -> tuple[TaskHandle, list[Attempt]]:
    """A Task of so many jobs, all of them begun here."""
    task = app.submit("note", [{"n": n} for n in range(count)])
    return task, attempts(tracker, borrow(app.ledger, task.id, count))


def flush(recorder: Recorder) -> None:
    recorder.start()
    wait_for(lambda: recorder.waiting == 0, "everything is recorded")
    assert recorder.healthy
    assert recorder.stop(10)


def said(task: TaskHandle, number: int) -> list[str]:
    return [message["status"] for message in list(task.events())[number]["messages"]]


def test_of_a_flush_that_failed_half_way_only_what_was_not_committed_is_flushed_again(
    app: AsyncTask, failing: list[str]
) -> None:
    recorder = Recorder(app.ledger)
    tracker = ArrivalTracker(app.ledger, recorder)
    task, (long, short) = begun(app, tracker, 2)
    told: list[bool] = []
    tracker.start(long)
    tracker.start(short)
    tracker.note_long(0)  # `working` of both is in the first batch, the end of the short one in the second
    short.finish(None)
    tracker.settle(short, then=told.append)
    failing += ["", "away"]
    flush(recorder)
    assert not long.is_lost, "the running job is told that its attempt is another's"
    assert told == [True]
    assert [event["status"] for event in task.events()] == ["working", "finish"]
    assert said(task, 0) == ["working"]
    assert recorder.recorded == 3


def test_a_working_whose_answer_was_lost_is_won_and_said_once(app: AsyncTask, failing: list[str]) -> None:
    recorder = Recorder(app.ledger)
    tracker = ArrivalTracker(app.ledger, recorder)
    task, (attempt,) = begun(app, tracker, 1)
    attempt.ticket = replace(attempt.ticket, watched=True)
    failing += ["unknown"]
    recorder.start()
    tracker.start(attempt)
    assert not attempt.is_lost, "it would be acknowledged unrun, and stay `working` in the name of a living process"
    attempt.finish(None)
    tracker.settle(attempt)
    assert recorder.stop(10)
    (event,) = task.events()
    assert (event["status"], said(task, 0)) == ("finish", ["working", "finish"])


def test_a_retry_whose_answer_was_lost_is_counted_once_and_dispatched_in_time(
    world: World, app: AsyncTask, failing: list[str]
) -> None:
    due: list[int] = []
    recorder = Recorder(app.ledger, on_due=due.append)
    tracker = ArrivalTracker(app.ledger, recorder)
    task, (attempt,) = begun(app, tracker, 1)
    tracker.start(attempt)
    attempt.raised(ValueError("not yet"))
    at = app.ledger.now() + 3_600 * SECOND
    tracker.settle(attempt, retry_at=at)
    failing += ["unknown"]
    flush(recorder)
    (event,) = task.events()
    assert (event["status"], event["attempt"], said(task, 0)) == ("enqueue", 2, ["working", "error", "enqueue"])
    assert world.one("SELECT due_next FROM tasks") == at, "nobody looks for it when it is due"
    assert at in due


def test_a_last_outcome_whose_answer_was_lost_closes_its_task(app: AsyncTask, failing: list[str]) -> None:
    recorder = Recorder(app.ledger)
    tracker = ArrivalTracker(app.ledger, recorder)
    task, (attempt,) = begun(app, tracker, 1)
    tracker.start(attempt)
    attempt.finish({"n": 1})
    tracker.settle(attempt)
    failing += ["unknown"]
    flush(recorder)
    assert task.progress()["done"]
    assert said(task, 0) == ["working", "finish"]


def test_what_was_put_off_and_is_put_off_again_for_want_of_an_answer_waits_once_and_is_looked_for(
    world: World, app: AsyncTask, failing: list[str]
) -> None:
    tracker = ArrivalTracker(app.ledger, Recorder(app.ledger))
    task, (attempt,) = begun(app, tracker, 1)
    until = app.ledger.now() + 3_600 * SECOND
    failing += ["unknown"]
    with pytest.raises(LedgerUnavailable):
        tracker.put_off([(attempt, "nobody knows it")], until)
    tracker.put_off([(attempt, "nobody knows it")], until)
    (event,) = task.events()
    assert (event["attempt"], said(task, 0)) == (2, ["enqueue"])
    assert world.one("SELECT due_next FROM tasks") == until


def test_a_retry_of_another_engines_job_whose_answer_was_lost_is_counted_once(app: AsyncTask, failing: list[str]) -> None:
    """Its copies carry no fence: what is flushed again must not count for the attempt that it has made itself."""
    recorder = Recorder(app.ledger)
    tracker = ArrivalTracker(app.ledger, recorder)
    (ticket,) = tracker.arrive([Arrival("job", None, "note", "default")])
    attempt = Attempt(ticket)
    tracker.start(attempt)
    tracker.note_long(0)
    attempt.raised(ValueError("not yet"))
    tracker.settle(attempt, retry_at=app.ledger.now())
    failing += ["unknown", "", "unknown"]
    flush(recorder)
    event = app.event("job")
    assert event["attempt"] == 2
    assert [message["status"] for message in event["messages"]] == ["working", "error", "enqueue"]


# -- the thread


def test_a_task_whose_thread_cannot_be_started_is_left_to_maintenance(
    app: AsyncTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused:
        def __init__(self, **_: Any) -> None: ...

        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    recorder = Recorder(app.ledger, linger_s=lambda: LINGER_S)  # so it looks between flushes, where nothing else catches it
    tracker = ArrivalTracker(app.ledger, recorder)
    recorder.start()
    monkeypatch.setattr(closer, "_MAX_INLINE_JOBS", 0)
    monkeypatch.setattr(closer, "close_small", lambda ledger, task_ids: [])
    monkeypatch.setattr(closer, "Thread", Refused)
    told: list[bool] = []
    for number in (1, 2, 3):
        task, (attempt,) = begun(app, tracker, 1)
        tracker.start(attempt)
        attempt.finish(None)
        tracker.settle(attempt, then=told.append)
        wait_for(lambda number=number: len(told) == number, "it is recorded")  # type: ignore[misc]
        wait_for(lambda: recorder._closer.until_check() is None, "it was looked at")
        assert recorder.healthy
        assert not task.progress()["done"]
    assert recorder.stop(10)
    assert told == [True, True, True]


def test_the_recorder_survives_whatever_is_raised_and_is_not_healthy_while_it_cannot_record(app: AsyncTask) -> None:
    broken = True

    def linger_s() -> float:
        if broken:
            raise KeyError("a bug of ours")
        return 0.0

    def refuses(won: bool) -> None:
        raise ValueError("whoever was to be told has a bug")

    recorder = Recorder(app.ledger, linger_s=linger_s)
    tracker = ArrivalTracker(app.ledger, recorder)
    _, both = begun(app, tracker, 2)
    recorder.start()
    told: list[bool] = []
    for attempt, then in zip(both, (refuses, told.append), strict=True):
        tracker.start(attempt)
        attempt.finish(None)
        tracker.settle(attempt, then=then)
    wait_for(lambda: not recorder.healthy, "it says that nothing is recorded")
    broken = False
    wait_for(lambda: told, "what waited is recorded")
    wait_for(lambda: recorder.waiting == 0 and recorder.healthy, "it is well again")
    assert recorder.stop(10)


def test_a_process_whose_recorder_ended_is_not_healthy(app: AsyncTask) -> None:
    recorder = Recorder(app.ledger)
    assert recorder.healthy
    recorder.start()
    assert recorder.healthy
    assert recorder.stop(10)
    assert not recorder.healthy


def test_outcomes_that_no_large_transaction_gets_through_are_committed_by_smaller_ones(
    app: AsyncTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where others hold one of so many rows all the time, the same batch was undone again and again, and grew."""
    recorder = Recorder(app.ledger)
    tracker = Tracker(app.ledger, recorder)
    task, performed = begun(app, tracker, 8)
    real, sizes = Recorder.flush, list[int]()

    def flush_few(self: Recorder, batch: Sequence[Outcome]) -> None:
        sizes.append(len(batch))
        if len(batch) > 2:
            raise TransactionConflict("the transaction was undone")
        real(self, batch)

    monkeypatch.setattr(Recorder, "flush", flush_few)
    for attempt in performed:
        attempt.finish(None)
        tracker.settle(attempt)
    flush(recorder)
    assert task.counts["finish"] == 8
    assert sizes == [8, 4, 2, 2, 4, 2, 2]
