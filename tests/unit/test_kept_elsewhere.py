"""Jobs whose copies another engine keeps: nothing of them waits in the ledger, and their outcomes need no fence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.databases import migrated_file

from asynctask import AsyncTask
from asynctask.arrivals import ArrivalTracker
from asynctask.core.states import Reason, Status
from asynctask.core.transitions import (
    Begin,
    Row,
    give_back,
    held_elsewhere,
    is_held,
    outcome,
    recover,
    take_over,
    working,
)
from asynctask.errors import JobInterrupted
from asynctask.ledger.processes import engine_identity, is_engine, recover_events
from asynctask.ledger.recorder import Recorder
from asynctask.ledger.standalone import Arrival
from asynctask.middleware.tracker import Attempt

RUNNING = Row(Status.WORKING, reserved=True, process="dramatiq@host:1:ab")


class Engine:
    """The tracker as an engine that keeps its own jobs uses it; each flush is made by hand."""

    def __init__(self, folder: Path) -> None:
        migrated_file(folder / "a.db")
        self.app = AsyncTask(database_url=f"sqlite:///{folder}/a.db", data_dir=str(folder), environ={})
        self._recorder = Recorder(self.app.ledger)
        self.tracker = ArrivalTracker(self.app.ledger, self._recorder)

    def begin(self) -> Attempt:
        return Attempt(self.tracker.arrive([Arrival("job", None, "enrol", "default")])[0])

    def settle(self, attempt: Attempt, **how: Any) -> bool:
        won: list[bool] = []
        self.tracker.settle(attempt, then=won.append, **how)
        self.flush()
        return won[0]

    def flush(self) -> None:
        self._recorder.start()
        assert self._recorder.stop(30)
        self._recorder = Recorder(self.app.ledger)
        self.tracker._recorder = self._recorder

    def event(self) -> dict[str, Any]:
        return self.app.event("job")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    yield made
    made.app.close()


@pytest.mark.parametrize(
    "turn",
    [
        outcome(RUNNING, Status.ERROR, Reason.RAISED, retry_at=5),
        outcome(RUNNING, Status.ERROR, Reason.INTERRUPTED, now=5),
        give_back(RUNNING, None, now=5),
        recover(RUNNING, None, now=5),
    ],
    ids=["retry", "interrupted", "given back", "recovered"],
)
def test_what_runs_again_stays_its_engines_instead_of_waiting_in_the_ledger(turn: Any) -> None:
    held = held_elsewhere(turn)
    assert turn.after.due_at == 5
    assert (held.after.due_at, is_held(held.after, True), held.after.attempt) == (None, True, 2)


def test_a_job_that_runs_elsewhere_again_changes_its_process_and_no_count() -> None:
    turn = take_over(RUNNING, "dramatiq@host:2:cd")
    assert (turn.after.process, turn.after.attempt, bool(turn.delta)) == ("dramatiq@host:2:cd", 1, False)
    assert working(Row(Status.ENQUEUE, reserved=True), "x").after.status is Status.WORKING


def test_an_engines_process_is_known_by_its_name() -> None:
    identity = engine_identity("dramatiq", "a" * 200 + "@b", 4_194_304, "0" * 12)
    assert is_engine(identity)
    assert len(identity) <= 64
    assert not is_engine("host:12:0123456789ab")


def test_a_retry_is_the_engines_and_no_dispatcher_finds_it(engine: Engine) -> None:
    attempt = engine.begin()
    engine.tracker.start(attempt)
    attempt.raised(ValueError("x"))
    assert engine.settle(attempt, retry_at=0)
    event = engine.event()
    assert (event["status"], event["attempt"], event["retries"], event["due_at"]) == ("enqueue", 2, 1, None)
    assert engine.app.dispatcher.run_pass() == 0


def test_the_outcome_of_a_copy_counts_at_whatever_attempt_the_open_event_is(engine: Engine) -> None:
    first, second = engine.begin(), engine.begin()
    first.raised(ValueError("x"))
    assert engine.settle(first, retry_at=0)
    second.finish("through")
    assert engine.settle(second)
    assert (engine.event()["status"], engine.event()["result"]) == ("finish", "through")
    assert engine.begin().ticket.verdict is Begin.DROP


def test_a_terminal_event_is_not_moved_by_a_late_copy(engine: Engine) -> None:
    first, second = engine.begin(), engine.begin()
    first.finish(1)
    assert engine.settle(first)
    second.raised(ValueError("late"))
    assert not engine.settle(second)
    assert [m["status"] for m in engine.event()["messages"]] == ["finish"]


@pytest.mark.parametrize(("retry_at", "status"), [(0, "enqueue"), (None, "error")])
def test_only_the_engine_says_whether_an_interrupted_job_runs_again(
    engine: Engine, retry_at: int | None, status: str
) -> None:
    attempt = engine.begin()
    attempt.raised(JobInterrupted())
    engine.settle(attempt, retry_at=retry_at)
    event = engine.event()
    assert event["status"] == status
    assert ("error", "Interrupted") in [(m["status"], m["message"]) for m in event["messages"]]


def test_a_late_note_of_working_cannot_reopen_what_was_settled(engine: Engine) -> None:
    attempt = engine.begin()
    engine.tracker.start(attempt)
    engine.tracker.note_long(0.0)
    attempt.raised(ValueError("x"))
    engine.settle(attempt, retry_at=0)
    engine.tracker.note_long(0.0)
    engine.flush()
    assert engine.event()["status"] == "enqueue"


def test_a_job_delivered_again_before_its_dead_process_was_noticed_is_the_new_processes(engine: Engine) -> None:
    attempt = engine.begin()
    engine.tracker.start(attempt)
    engine.tracker.note_long(0.0)
    engine.flush()
    with engine.app.ledger.database.write() as connection:
        connection.exec_driver_sql("UPDATE events SET process = 'dramatiq@gone:1:ab'")
    again = engine.begin()
    assert again.ticket.verdict is Begin.RUN
    engine.tracker.start(again)
    engine.tracker.note_long(0.0)
    engine.flush()
    assert engine.event()["process"] == engine.app.ledger.identity
    recover_events(engine.app.ledger, "dramatiq@gone:1:ab", [])
    assert engine.event()["status"] == "working"
