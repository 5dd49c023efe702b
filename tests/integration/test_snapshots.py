"""A lone job of an engine begins by what its message says of its Event, where a read could tell nothing newer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.clocks import SettableClock
from support.costs import statements
from support.world import World

from asynctask import AsyncTask
from asynctask.clock import SECOND, SystemClock
from asynctask.core.transitions import Begin
from asynctask.database.engine import DatabaseTime
from asynctask.dispatch.outbox import Outbox, tracked_copy
from asynctask.integrations.base import EARLY_S, PUT_OFF_S, EngineProcess, LoneEvents
from asynctask.ledger import doctor, reservations
from asynctask.ledger.base import Ledger
from asynctask.ledger.reservations import Ready
from asynctask.ledger.standalone import Arrival, Fence, Snapshot, enqueue
from asynctask.middleware.tracker import Ticket

EARLY = int(EARLY_S * SECOND)


def job(job_id: str, snapshot: Snapshot | None = None) -> Arrival:
    return Arrival(job_id, None, "note", "celery/default", [1], snapshot=snapshot)


@pytest.fixture
def process(world: World) -> EngineProcess:
    """The process of a worker that the ledger has answered just now, for time stands still; the test flushes what it
    records."""
    clock = SettableClock()
    clock.seconds = SystemClock().now() / SECOND
    made = EngineProcess(world.app(), "celery", concurrency=2)
    made._clock, made.ledger = clock, replace(made.ledger, clock=clock)
    made.tracker._ledger = made.recorder._ledger = made.ledger
    made.begin(job("another"))
    return made


def sent(process: EngineProcess, *job_ids: str) -> dict[str, Snapshot]:
    return enqueue(process.ledger, [job(job_id) for job_id in job_ids])


def begun(process: EngineProcess, arrival: Arrival, **how: Any) -> tuple[Ticket, bool]:
    """Its ticket, and whether its Event was read for it."""
    with statements(process.ledger.database) as seen:
        ticket = process.begin(arrival, **how)
    return ticket, any("added_messages" in said for said, _ in seen)


def ended(process: EngineProcess, *tickets: Ticket) -> None:
    """They are performed, and their outcomes written."""
    for ticket in tickets:
        process.tracker.start(ticket)
        ticket.finish({"n": 1})
    process.recorder.commit([process.tracker.outcome(ticket, None) for ticket in tickets])


def written(world: World, job_id: str) -> tuple[Any, ...]:
    (row,) = world.sql(
        "SELECT status, attempt, retries, deaths, watched, n_finish, n_failed, n_error, n_cancelled, process, problem,"
        " queue, worker_name, look_at, due_at, result, options, params, started_at IS NOT NULL, finished_at IS NOT NULL,"
        " added_messages FROM events WHERE job_id = ?",
        job_id,
    )
    return (*row[:-1], [{**said, "at": None} for said in json.loads(row[-1] or "[]")])


def test_what_is_recorded_by_a_snapshot_is_what_is_recorded_of_an_event_that_was_read(
    world: World, process: EngineProcess
) -> None:
    snapshots = sent(process, "told", "read")
    told, was_read = begun(process, job("told", snapshots["told"]))
    assert (told.verdict, was_read) == (Begin.RUN, False)
    known, was_read = begun(process, job("read"))
    assert was_read
    assert (told.is_lone, told.elsewhere, told.attempt, told.event_id) == (True, True, 1, snapshots["told"].event_id)
    with statements(process.ledger.database) as seen:
        ended(process, told, known)
    assert not any("added_messages" in said and said.lstrip().startswith("SELECT") for said, _ in seen), "it was read"
    assert written(world, "told") == written(world, "read")
    assert written(world, "told")[0] == "finish"


def long_ago(process: EngineProcess, snapshot: Snapshot) -> dict[str, Any]:
    return {"snapshot": snapshot._replace(at=snapshot.at - EARLY - 1)}


def in_the_future(process: EngineProcess, snapshot: Snapshot) -> dict[str, Any]:
    return {"snapshot": snapshot._replace(at=snapshot.at + 60 * EARLY)}


def without_an_answer(process: EngineProcess, snapshot: Snapshot) -> dict[str, Any]:
    process._heard_at -= 2 * EARLY_S
    return {"snapshot": snapshot}


def delivered_again(process: EngineProcess, snapshot: Snapshot) -> dict[str, Any]:
    return {"snapshot": snapshot, "redelivered": True}


@pytest.mark.parametrize("case", [long_ago, in_the_future, without_an_answer, delivered_again])
@pytest.mark.one_database(reason="no statement differs")
def test_where_a_read_may_tell_something_newer_it_is_read(
    process: EngineProcess, case: Callable[[EngineProcess, Snapshot], dict[str, Any]]
) -> None:
    how = case(process, sent(process, "job")["job"])
    ticket, was_read = begun(process, job("job", how.pop("snapshot")), **how)
    assert (ticket.verdict, was_read) == (Begin.RUN, True)


@pytest.mark.one_database(reason="no statement differs")
def test_a_commit_is_an_answer_of_the_ledger_too(process: EngineProcess) -> None:
    ticket = process.begin(job("first"))
    process._heard_at -= 2 * EARLY_S
    assert begun(process, job("second", sent(process, "second")["second"]))[1], "nothing was heard lately"
    process._heard_at -= 2 * EARLY_S
    process.tracker.start(ticket)
    process.recorder._flush_timed([process.tracker.outcome(ticket, None)])
    assert not begun(process, job("third", sent(process, "third")["third"]))[1]


def cancelled(app: AsyncTask) -> None:
    app.record("job", "failed", message="no longer wanted")


def working(app: AsyncTask) -> None:
    app.record("job", "working", message="by hand")


@pytest.mark.parametrize(("meanwhile", "status"), [(cancelled, "failed"), (working, "finish")])
def test_an_outcome_counts_as_if_the_event_had_been_read(
    world: World, process: EngineProcess, meanwhile: Callable[[AsyncTask], None], status: str
) -> None:
    snapshots = sent(process, "job", "other")
    tickets = [begun(process, job(name, snapshots[name]))[0] for name in ("job", "other")]
    meanwhile(world.app())
    ended(process, *tickets)
    assert [written(world, name)[0] for name in ("job", "other")] == [status, "finish"]


@pytest.mark.parametrize("way", ["end", "working", "retry"])
def test_a_snapshot_of_another_jobs_event_changes_nothing_of_it(world: World, process: EngineProcess, way: str) -> None:
    """As from a program with another database, or from someone who writes into the queue."""
    app = world.app()
    task = app.submit("note", [{"n": 1}])
    (event_id,) = world.sql("SELECT id FROM events WHERE task_id = ?", task.id)[0]
    forged = Snapshot(event_id, process.ledger.now())
    ticket, was_read = begun(process, job("forged", forged))
    assert not was_read
    before = world.sql("SELECT * FROM events WHERE id = ?", event_id)
    process.tracker.start(ticket)
    if way == "working":
        outcome = process.tracker._working(ticket)
    else:
        ticket.raised(ValueError("broken"))
        outcome = process.tracker.outcome(ticket, process.ledger.now() if way == "retry" else None)
    with capture_logs() as logs:
        process.recorder.commit([outcome])
    assert world.sql("SELECT * FROM events WHERE id = ?", event_id) == before
    (said,) = [each for each in logs if each["event"] == "event_not_found"]
    assert said["job_id"] == "forged"
    assert "database_url" in said["hint"]
    assert doctor.examine(app.ledger, task_ids=[task.id]) == []


def refused(process: EngineProcess, job_id: str, value: object) -> None:
    """A message of this job arrives that names this in the place of an attempt."""
    arrival = replace(job(job_id), broken=Fence.parse(value).broken)
    process.expect(arrival)
    with capture_logs() as logs:
        assert process.begin(arrival).verdict is Begin.DROP
    assert [each["event"] for each in logs] == ["broken_attempt"]


def test_a_job_that_runs_wins_over_a_message_without_a_valid_attempt(world: World, process: EngineProcess) -> None:
    """Also one of which nothing is written yet."""
    snapshots = sent(process, "short", "read", "long")
    tickets = [begun(process, job(name, snapshots.get(name)))[0] for name in ("short", "long")] + [
        process.begin(job("read"))
    ]
    process.tracker.start(tickets[1])
    process.recorder.commit([process.tracker._working(tickets[1])])
    before = written(world, "long")
    for name in ("short", "read", "long"):
        refused(process, name, True)
    assert [written(world, name)[:2] for name in ("short", "read")] == [("enqueue", 2), ("enqueue", 2)]
    assert written(world, "long") == before
    ended(process, *tickets)
    assert [(written(world, name)[0], written(world, name)[14]) for name in snapshots] == [("finish", None)] * 3
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
    assert written(world, "kept")[14] == process.ledger.now() + PUT_OFF_S * SECOND
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
@pytest.mark.parametrize("place", range(1, 6))
@pytest.mark.parametrize("value", [True, 0, -1, 2**63, 10**30, "1", 1.5, [1]])
def test_a_snapshot_with_another_kind_of_number_is_none(place: int, value: object) -> None:
    header: list[Any] = ["job", 1, 2, 3, 4, 5]
    assert Snapshot.parse(header, "job") == Snapshot(1, 2, 3, 4, 5)
    header[place] = value
    assert Snapshot.parse(header, "job") is None


def jobs_of(app: AsyncTask, count: int, **options: Any) -> list[Ready]:
    """The dispatched jobs of a Task."""
    task = app.submit("note", [{"n": n} for n in range(count)], **options)
    found = reservations.reserve(app.ledger, task.id, count, lease_s=60)
    reservations.confirm(app.ledger, [task.id])
    return found


def test_jobs_of_a_task_begin_by_a_snapshot_too(world: World, process: EngineProcess) -> None:
    rows, app = [], world.app()
    for is_told in (True, False):
        jobs = jobs_of(app, 5)
        snapshots = [tracked_copy(replace(each, queue="celery/default"), process.ledger.now()).snapshot for each in jobs]
        tickets = []
        for each, snapshot in zip(jobs, snapshots, strict=True):
            told = Snapshot.parse(snapshot, each.job_id) if is_told else None
            arrival = Arrival(each.job_id, 1, "note", "celery/default", snapshot=told)
            ticket, was_read = begun(process, arrival)
            assert (ticket.verdict, was_read, ticket.task_id, ticket.row) == (
                Begin.RUN,
                not is_told,
                each.task_id,
                each.row,
            )
            assert not ticket.elsewhere
            tickets.append(ticket)
        for ticket in tickets:
            process.tracker.start(ticket)
        tickets[0].fail(ValueError("no"))
        for ticket in tickets[1:]:
            ticket.finish(None)
        process.recorder.flush([process.tracker.outcome(ticket, None) for ticket in tickets])
        task_id = jobs[0].task_id
        assert task_id is not None
        assert app.task(task_id).progress()["counts"]["finish"] == 4
        assert doctor.examine(app.ledger, task_ids=[task_id]) == []
        rows.append([written(world, each.job_id) for each in jobs])
    assert rows[0] == rows[1]


@pytest.mark.one_database(reason="no statement differs")
def test_only_a_first_attempt_that_nothing_else_holds_back_has_a_snapshot(world: World) -> None:
    app = world.app()
    (job,) = jobs_of(app, 1)
    job = replace(job, queue="celery/default")
    others = [
        *(replace(job, attempt=2), replace(job, retries=1), replace(job, items=2), replace(job, queue="default")),
        *(
            replace(each, queue="celery/default")
            for options in ({"parallel": 1}, {"interval": 3_600}, {"key": "n"})
            for each in jobs_of(app, 1, **options)
        ),
    ]
    assert len(others) == 7
    assert tracked_copy(job, app.ledger.now()).snapshot is not None
    assert [tracked_copy(each, app.ledger.now()).snapshot for each in others] == [None] * 7


def test_a_snapshot_that_is_not_of_its_jobs_task_changes_nothing(world: World, process: EngineProcess) -> None:
    app = world.app()
    (job,), (other,) = jobs_of(app, 1), jobs_of(app, 1)
    arrivals = [
        Arrival(job.job_id, None, "note", "q", snapshot=Snapshot(job.event_id, process.ledger.now())),  # as a lone one
        Arrival(job.job_id, 1, "note", "q", snapshot=Snapshot(job.event_id, process.ledger.now(), other.task_id)),
    ]
    before = world.sql("SELECT * FROM events ORDER BY id")
    for arrival in arrivals:
        ticket, was_read = begun(process, arrival)
        assert not was_read
        ended(process, ticket)
    assert world.sql("SELECT * FROM events ORDER BY id") == before
    assert doctor.examine(app.ledger) == []


@pytest.mark.one_database(reason="no statement differs")
def test_a_snapshot_of_another_attempt_is_no_ticket(world: World, process: EngineProcess) -> None:
    (job,) = jobs_of(world.app(), 1)
    for attempt, task_id in ((2, job.task_id), (None, job.task_id), (1, None)):
        snapshot = Snapshot(job.event_id, process.ledger.now(), task_id)
        assert begun(process, Arrival(job.job_id, attempt, "note", "q", snapshot=snapshot))[1]


def test_only_what_was_created_has_a_snapshot(process: EngineProcess) -> None:
    first = sent(process, "a")
    assert set(first) == {"a"}
    process._clock.seconds += 0.001  # type: ignore[attr-defined]
    assert sent(process, "a") == {}
    both = sent(process, "a", "b", "c")
    assert set(both) == {"b", "c"}
    found = process.tracker.read(["a", "b", "c"])
    assert {name: each.event_id for name, each in {**first, **both}.items()} == {n: r.id for n, r in found.items()}


@pytest.mark.parametrize(
    "value",
    [
        *(None, "12345", {"a": 1}, [], [1, 2], [1, 2, None, 1, None, 5], [1.0, 2, None, 1, None], ["1", 2, None, 1, None]),
        *([0, 5, None, 1, None], [-1, 5, None, 1, None], [1, 0, None, 1, None], [2**70, 5, None, 1, None]),
        *([1, 5, 0, 1, None], [1, 5, -1, 1, None], [1, 5, 2**70, 1, None], [1, 5, 2, 0, 1], [1, 5, 2, 33, 1]),
        *([1, 5, 2, 1, -3], [1, 5, "2", 1, 1], [1, 5, 2, 1, 1]),
    ],
)
def test_what_is_no_snapshot_is_none(value: object) -> None:
    assert Snapshot.parse(value, "job") is None
    assert Snapshot.parse(["other", *value] if isinstance(value, list) else value, "job") is None
    if value != [1, 5, 2, 1, 1]:
        assert Snapshot.parse(["job", *value] if isinstance(value, list) else value, "job") is None


def test_a_snapshot_travels_with_the_id_of_its_job() -> None:
    for snapshot in (Snapshot(7, 1_700_000_000_000_000), Snapshot(7, 1_700_000_000_000_000, 3, 32, 12)):
        header = json.loads(json.dumps(snapshot.header("job")))
        assert Snapshot.parse(header, "job") == snapshot
        assert Snapshot.parse(header, "child") is None, "a program has passed the headers of its job on"


@pytest.mark.one_database(reason="no statement differs")
def test_the_time_of_a_snapshot_is_before_the_reservation(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dispatcher that is stopped behind the reservation must not tell of a Task as it was long ago."""
    app, reserve = world.app(), reservations.reserve
    asked: list[int] = []
    said: list[int] = []

    def noting(ledger: Ledger, *args: Any, **options: Any) -> list[Ready]:
        asked.append(ledger.now())
        return reserve(ledger, *args, **options)

    monkeypatch.setattr(reservations, "reserve", noting)
    monkeypatch.setattr(Outbox, "add", lambda self, found, now, *args, **options: said.append(now))
    task = app.submit("note", [{"n": 1}])
    assert app.dispatcher._reserve_task(task.id, "default", 1, None) == 1
    assert said[0] <= asked[0]


@pytest.mark.one_database(reason="no statement differs")
def test_a_second_copy_in_the_same_process_is_read(process: EngineProcess) -> None:
    arrival = job("job", sent(process, "job")["job"])
    ticket, was_read = begun(process, arrival)
    assert not was_read
    ended(process, ticket)
    process.forget("job", None)
    assert (begun(process, arrival)[0].verdict, begun(process, arrival)[1]) == (Begin.DROP, True)
    process._clock.seconds += 2 * EARLY_S  # type: ignore[attr-defined]
    process.forget("other", None)
    assert list(process._lately) == [("other", None)], "it is too old by itself now"


@pytest.mark.one_database(reason="no statement differs")
def test_a_program_that_only_sends_reads_the_databases_time_now_and_then(world: World) -> None:
    app = world.app()
    events = LoneEvents(app, "celery")
    clock = SettableClock()
    clock.seconds = SystemClock().now() / SECOND
    object.__setattr__(app.ledger, "clock", clock)
    object.__setattr__(app.ledger, "time", DatabaseTime(clock))
    app.ledger.time.set(app.ledger.now() - 3_600 * SECOND)  # the database was behind by an hour
    clock.seconds += 60
    snapshot = events.announce(job("job"))
    assert snapshot is not None
    assert abs(snapshot.at - app.ledger.now()) < SECOND
    assert abs(snapshot.at - SystemClock().now()) < 60 * SECOND
