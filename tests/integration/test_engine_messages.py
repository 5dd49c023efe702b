"""What an engine's process takes from the messages of lone jobs, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.clocks import SettableClock
from support.world import World

from asynctask import AsyncTask
from asynctask.clock import SECOND, SystemClock
from asynctask.core.transitions import Begin
from asynctask.integrations.base import PUT_OFF_S, EngineProcess, Fence, sent_at
from asynctask.ledger import doctor
from asynctask.ledger.standalone import Arrival, enqueue, send
from asynctask.middleware.tracker import Attempt


def job(job_id: str, sent_at: int | None = None) -> Arrival:
    return Arrival(job_id, None, "note", "celery/default", [1], sent_at=sent_at)


@pytest.fixture
def process(world: World) -> EngineProcess:
    """The process of a worker, for which time stands still; the test flushes what it records."""
    clock = SettableClock()
    clock.seconds = SystemClock().now() / SECOND
    made = EngineProcess(world.app(), "celery", concurrency=2)
    made._clock, made.ledger = clock, replace(made.ledger, clock=clock)
    made.tracker._ledger = made.recorder._ledger = made.ledger
    return made


def sent(process: EngineProcess, *job_ids: str) -> dict[str, int]:
    return enqueue(process.ledger, [job(job_id) for job_id in job_ids])


def ended(process: EngineProcess, *attempts: Attempt) -> None:
    """They are performed, and their outcomes written."""
    for attempt in attempts:
        process.tracker.start(attempt)
        attempt.finish({"n": 1})
    process.recorder.commit([process.tracker.outcome(attempt, None) for attempt in attempts])


def written(world: World, job_id: str) -> tuple[Any, ...]:
    (row,) = world.sql(
        "SELECT status, attempt, retries, deaths, watched, n_finish, n_failed, n_error, n_cancelled, process, problem,"
        " queue, worker_name, due_at, result, options, params, started_at IS NOT NULL, finished_at IS NOT NULL,"
        " added_messages FROM events WHERE job_id = ?",
        job_id,
    )
    return (*row[:-1], [{**said, "at": None} for said in json.loads(row[-1] or "[]")])


def cancelled(app: AsyncTask) -> None:
    app.record("job", "failed", message="no longer wanted")


def working(app: AsyncTask) -> None:
    app.record("job", "working", message="by hand")


@pytest.mark.parametrize(("meanwhile", "status"), [(cancelled, "failed"), (working, "finish")])
def test_an_outcome_counts_by_the_event_as_it_is_then(
    world: World, process: EngineProcess, meanwhile: Callable[[AsyncTask], None], status: str
) -> None:
    sent(process, "job", "other")
    attempts = [Attempt(process.begin(job(name))) for name in ("job", "other")]
    meanwhile(world.app())
    ended(process, *attempts)
    assert [written(world, name)[0] for name in ("job", "other")] == [status, "finish"]


@pytest.mark.one_database(reason="no statement differs")
def test_a_late_copy_of_an_earlier_run_is_dropped(process: EngineProcess) -> None:
    first = sent(process, "job")["job"]
    ended(process, Attempt(process.begin(job("job", first))))
    process._clock.seconds += 1  # type: ignore[attr-defined]
    second = send(process.ledger, [job("job")])["job"]
    assert isinstance(second, int)
    assert process.begin(job("job", first)).verdict is Begin.DROP
    assert [process.begin(job("job", at)).verdict for at in (second, None)] == [Begin.RUN] * 2


def refused(process: EngineProcess, job_id: str, value: object) -> None:
    """A message of this job arrives that names this in the place of an attempt."""
    arrival = replace(job(job_id), broken=Fence.parse(value).broken)
    process.expect(arrival)
    with capture_logs() as logs:
        assert process.begin(arrival).verdict is Begin.DROP
    assert [each["event"] for each in logs] == ["broken_attempt"]


@pytest.mark.one_database(reason="no statement differs")
def test_a_job_that_runs_wins_over_a_message_without_a_valid_attempt(world: World, process: EngineProcess) -> None:
    """Also one of which nothing is written yet."""
    sent(process, "short", "long")
    attempts = [Attempt(process.begin(job(name))) for name in ("short", "long")]
    process.tracker.start(attempts[1])
    process.recorder.commit([process.tracker._working(attempts[1])])
    before = written(world, "long")
    for name in ("short", "long"):
        refused(process, name, True)
    assert written(world, "short")[:2] == ("enqueue", 2)
    assert written(world, "long") == before
    ended(process, *attempts)
    assert [(written(world, name)[0], written(world, name)[13]) for name in ("short", "long")] == [("finish", None)] * 2
    assert process.begin(job("short")).verdict is Begin.DROP
    assert doctor.examine(world.app().ledger) == []


def test_a_message_without_a_valid_attempt_has_a_lone_job_sent_by_the_ledger_once(
    world: World, process: EngineProcess
) -> None:
    sent(process, "kept")
    enqueue(process.ledger, [replace(job("unkept"), params=None)])
    for name in ("kept", "unkept", "unknown"):
        refused(process, name, 0)
        refused(process, name, 10**5_000)
    assert written(world, "kept")[:2] == ("enqueue", 2)
    assert written(world, "kept")[13] == process.ledger.now() + PUT_OFF_S * SECOND
    assert [said["message"] for said in written(world, "kept")[-1]] == ["Its message had no valid attempt: 0"]
    assert written(world, "unkept")[:2] == ("error", 1)
    assert world.sql("SELECT 1 FROM events WHERE job_id = ?", "unknown") == []


@pytest.mark.one_database(reason="no statement differs")
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1, None), (2**31 - 1, None), (0, "0"), (2**31, "2147483648"),
        pytest.param(10**5_000, "a number of 16,610 bits", id="huge"),
        (True, "True"), ("1", "'1'"), ("x" * 10**6, repr("x" * 50)), (1.5, "1.5"), (None, "None"), ([[1]], "a list"),
        ({}, "a dict"), (b"1", "a bytes"), ("a\x00\ud800", "'a\\x00\\ud800'"),
    ],
)  # fmt: skip
def test_an_attempt_is_a_whole_number_that_the_ledger_stores(value: object, shown: str | None) -> None:
    assert Fence.parse(value) == (Fence(value) if shown is None else Fence(None, shown))  # type: ignore[arg-type]


@pytest.mark.one_database(reason="no statement differs")
def test_only_what_was_created_is_told(process: EngineProcess) -> None:
    assert set(sent(process, "a")) == {"a"}
    process._clock.seconds += 0.001  # type: ignore[attr-defined]
    assert sent(process, "a") == {}
    assert set(sent(process, "a", "b", "c")) == {"b", "c"}


@pytest.mark.parametrize(
    "header",
    [
        None,
        "job",
        {"job": 1},
        [],
        ["job"],
        ["job", 0],
        ["job", -1],
        ["job", 2**63],
        ["job", "1"],
        ["job", 1, 2],
        ["other", 1],
    ],
)
def test_another_header_says_no_time(header: object) -> None:
    assert sent_at(json.loads(json.dumps(["job", 1_700_000_000_000_000])), "job") == 1_700_000_000_000_000
    assert sent_at(header, "job") is None
