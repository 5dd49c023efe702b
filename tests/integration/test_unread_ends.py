"""The end of an Event of which nothing was written since it was lent is compared and not read; all else is read first."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from support import borrowing
from support.costs import statements
from support.world import World

from asynctask import AsyncTask
from asynctask.arrivals import ArrivalTracker
from asynctask.core.states import Status
from asynctask.core.transitions import Begin, Transition, recover
from asynctask.database.retrying import TransactionConflict
from asynctask.database.tables import events
from asynctask.ledger import doctor
from asynctask.ledger.events import Change, EventRecord, apply, read_events, untouched
from asynctask.ledger.recorder import Outcome, Recorder, Stage
from asynctask.ledger.standalone import Arrival, reopen
from asynctask.middleware.tracker import Attempt, Tracker
from asynctask.testing import wait_for


class Held(Recorder):
    """A recorder that keeps what it is given, for the test to flush."""

    def __init__(self, app: AsyncTask) -> None:
        super().__init__(app.ledger)
        self.held: list[Outcome] = []

    def put(self, outcomes: Any) -> None:
        self.held.extend(outcomes)

    def flush_all(self) -> None:
        batch, self.held = self.held, []
        self.flush(batch)


def begun(app: AsyncTask, count: int) -> tuple[int, Held, Tracker, list[Attempt]]:
    """A Task of so many jobs, all of them begun here."""
    task = app.submit("note", [{"n": n} for n in range(count)])
    recorder = Held(app)
    tracker = ArrivalTracker(app.ledger, recorder)
    attempts = borrowing.attempts(tracker, borrowing.borrow(app.ledger, task.id, count))
    assert {attempt.ticket.verdict for attempt in attempts} == {Begin.RUN}
    for attempt in attempts:
        tracker.start(attempt)
    return task.id, recorder, tracker, attempts


def rows(world: World, task_id: int) -> list[tuple[Any, ...]]:
    """What is written of each Event, the times left out."""
    found = world.sql(
        "SELECT status, attempt, retries, deaths, watched, n_finish, n_failed, n_error, n_cancelled, process, problem,"
        " due_at, result, started_at IS NOT NULL, finished_at IS NOT NULL, added_messages FROM events"
        " WHERE task_id = ? ORDER BY seq",
        task_id,
    )
    return [(*row[:-1], [{**said, "at": None} for said in json.loads(row[-1] or "[]")]) for row in found]


def ends(tracker: Tracker, attempts: list[Attempt]) -> None:
    """Every way in which an attempt ends for good, in turn, some with a result or an awkward text."""
    ways: list[Callable[[Attempt], None]] = [
        lambda attempt: attempt.finish(None),
        lambda attempt: attempt.finish({"promotion": 17, "name": '季節 "a\\b"'}),
        lambda attempt: attempt.fail(ValueError('refused: "quoted" \\ 100% {0} \x00')),
        lambda attempt: attempt.raised(KeyError("sku")),
    ]
    for n, attempt in enumerate(attempts):
        ways[n % len(ways)](attempt)
        tracker.settle(attempt)


def test_what_is_written_unread_is_what_would_be_written_of_what_was_read(world: World) -> None:
    app = world.app()
    task_id, recorder, tracker, attempts = begun(app, 40)
    assert all(attempt.ticket.is_untouched for attempt in attempts)
    ends(tracker, attempts)
    with statements(app.ledger.database) as seen:
        recorder.flush_all()
    assert not [said for said, _ in seen if said.lstrip().startswith("SELECT") and "added_messages" in said], "it was read"
    unread = rows(world, task_id)

    again, recorder, tracker, attempts = begun(app, 40)
    for attempt in attempts:
        attempt.ticket = replace(attempt.ticket, is_untouched=False)
    ends(tracker, attempts)
    recorder.flush_all()
    assert rows(world, again) == unread
    assert {row[0] for row in unread} == {"finish", "failed", "error"}
    begins = {(row[0], row[-1][0].get("process")) for row in unread}
    assert begins == {("finish", None), ("failed", app.ledger.identity), ("error", app.ledger.identity)}
    counts = app.task(again).progress()["counts"]
    assert counts == {**counts, "finish": 20, "failed": 10, "error": 10, "enqueue": 0}
    assert doctor.examine(app.ledger, task_ids=[again]) == []


def said_by_hand(app: AsyncTask, attempt: Attempt) -> None:
    app.record(attempt.ticket.job_id, "enqueue", message="looked at by hand")


def begun_by_hand(app: AsyncTask, attempt: Attempt) -> None:
    app.record(attempt.ticket.job_id, "working", message="it works")


def ended_by_hand(app: AsyncTask, attempt: Attempt) -> None:
    app.record(attempt.ticket.job_id, "failed", message="no")


def taken_back(app: AsyncTask, attempt: Attempt) -> None:
    """As if its process had been recovered, and this row were the first."""

    def recovered(record: EventRecord) -> Transition | None:
        return recover(record.row, record.task_state, now=app.ledger.now())

    with app.ledger.database.write() as connection:
        apply(connection, app.ledger, [Change(attempt.ticket.event_id, recovered)])


@pytest.mark.parametrize(
    ("meanwhile", "wins"), [(said_by_hand, True), (begun_by_hand, True), (ended_by_hand, False), (taken_back, False)]
)
def test_of_a_batch_in_which_one_has_changed_that_one_is_decided_anew_and_no_other_lost(
    world: World, meanwhile: Callable[[AsyncTask, Attempt], None], wins: bool
) -> None:
    app = world.app()
    task_id, recorder, tracker, attempts = begun(app, 12)
    won: dict[str, bool] = {}
    for attempt in attempts:
        attempt.finish(None)
        tracker.settle(attempt, then=lambda ok, attempt=attempt: won.__setitem__(attempt.ticket.job_id, ok))  # type: ignore[misc]
    meanwhile(app, attempts[5])
    recorder.flush_all()
    assert won == {attempt.ticket.job_id: attempt is not attempts[5] or wins for attempt in attempts}
    found = {row[0]: row[1:] for row in world.sql("SELECT job_id, status, added_messages FROM events")}
    for attempt in attempts:
        if attempt is not attempts[5]:
            assert found[attempt.ticket.job_id][0] == "finish"
    status, messages = found[attempts[5].ticket.job_id]
    assert (status == "finish") is wins
    if meanwhile is not taken_back:
        first = json.loads(messages)[0]["message"]
        assert first in ("looked at by hand", "it works", "no"), "what was said meanwhile is kept"
    assert doctor.examine(app.ledger, task_ids=[task_id]) == []


@pytest.mark.one_database(reason="what is written is proved on each by the others")
def test_after_one_that_had_changed_the_next_flushes_read_first(world: World) -> None:
    app = world.app()
    _, recorder, tracker, attempts = begun(app, 3)
    reads = []
    for n, attempt in enumerate(attempts):
        if n == 0:
            said_by_hand(app, attempt)
        attempt.finish(None)
        tracker.settle(attempt)
        with statements(app.ledger.database) as seen:
            recorder.flush_all()
        reads.append(sum("added_messages" in said and said.lstrip().startswith("SELECT") for said, _ in seen))
    assert reads == [1, 1, 1]


def lone(app: AsyncTask, *job_ids: str) -> tuple[Held, Tracker, list[Attempt]]:
    """Lone jobs that an engine keeps, begun here."""
    recorder = Held(app)
    tracker = ArrivalTracker(app.ledger, recorder)
    attempts = [Attempt(each) for each in tracker.arrive([Arrival(i, None, "note", "default") for i in job_ids])]
    for attempt in attempts:
        tracker.start(attempt)
        attempt.finish({"n": 1})
        tracker.settle(attempt)
    return recorder, tracker, attempts


@pytest.mark.databases("postgresql", "mariadb", reason="SQLite has no round trips")
def test_the_end_of_one_lone_job_is_one_statement(world: World) -> None:
    app = world.app()
    seen: list[str] = []

    def executed(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        seen.append(statement)

    lone(app, "a")[0].flush_all()  # the connection knows then how large a packet may be
    recorder, _, _ = lone(app, "b")
    sa.event.listen(app.ledger.database.engine, "before_cursor_execute", executed)
    recorder.flush_all()
    sa.event.remove(app.ledger.database.engine, "before_cursor_execute", executed)
    assert [said.split()[0] for said in seen] == ["UPDATE"]
    assert (app.event("b")["status"], app.event("b")["result"]) == ("finish", {"n": 1})


def test_the_end_of_a_lone_job_whose_answer_was_lost_stands_once_and_for_its_attempt(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = world.app()
    recorder, _, (attempt,) = lone(app, "a")
    (outcome,) = recorder.held
    told: list[bool] = []
    outcome.then = told.append
    write_alone = app.ledger.database.write_alone

    @contextmanager
    def lost() -> Iterator[Any]:
        with write_alone() as connection:
            yield connection
        monkeypatch.undo()
        reopen(app.ledger, Arrival("a", None, "w", "q"))  # it is under way again when the second try comes
        raise TransactionConflict("the connection was lost")

    attempt.fail(ValueError("no"))
    assert attempt.result is not None
    outcome.kind, outcome.failure = attempt.result.kind, attempt.result.failure
    monkeypatch.setattr(app.ledger.database, "write_alone", lost)
    recorder.flush_all()
    assert told == [False]
    assert (app.event("a")["status"], app.event("a")["attempt"]) == ("enqueue", 2)


def test_an_end_whose_transaction_failed_is_read_before_it_is_written_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commit may stand although its answer was lost: what was seen before that must not decide twice."""
    app = world.app()
    task_id, recorder, tracker, attempts = begun(app, 5)
    for attempt in attempts:
        attempt.finish(None)
        tracker.settle(attempt)
    batch = list(recorder.held)
    recorder.flush(batch)
    assert all(outcome.stage is not Stage.UNREAD for outcome in batch)
    told: list[bool] = []
    for outcome in batch:
        outcome.then = told.append
    recorder.flush(batch)  # as after an answer that was lost
    assert told == [False] * 5
    assert app.task(task_id).progress()["counts"]["finish"] == 5
    assert doctor.examine(app.ledger, task_ids=[task_id]) == []


@pytest.mark.one_database(reason="it is decided in Python, of a row that was read")
@pytest.mark.parametrize("change", ["messages", "due", "process", "watched", "status"])
def test_only_an_event_of_which_nothing_was_written_is_untouched(world: World, change: str) -> None:
    app = world.app()
    begun(app, 1)
    made = {
        "messages": "added_messages = '[]'",
        "due": "due_at = 5",
        "process": "process = 'p'",
        "watched": "watched = 1",
        "status": "status = 'working'",
    }[change]

    def is_untouched() -> bool:
        with app.ledger.database.read() as connection:
            (record,) = read_events(connection, events.c.seq == 0)
        return untouched(record)

    assert is_untouched()
    world.sql(f"UPDATE events SET {made}")
    assert not is_untouched()


@pytest.mark.one_database(reason="what is written is proved on each by the others")
def test_of_a_batch_with_others_in_it_every_job_gets_its_ticket(world: World) -> None:
    app = world.app()
    task_id = app.submit("note", [{"n": n} for n in range(3)]).id
    borrowing.hand_over(app.ledger, task_id, 3)
    tracker = ArrivalTracker(app.ledger, Held(app))
    world.sql("UPDATE events SET deaths = 1 WHERE seq = 1")
    known = [job_id for (job_id,) in world.sql("SELECT job_id FROM events WHERE task_id = ? ORDER BY seq", task_id)]
    arrivals = [*(Arrival(job_id, 1, "note", "default") for job_id in known), Arrival("a-stranger", 0, "note", "default")]
    tickets = tracker.arrive(arrivals)
    assert [ticket.job_id for ticket in tickets] == [arrival.job_id for arrival in arrivals]
    assert [ticket.watched for ticket in tickets] == [False, True, False, False]
    assert [ticket.is_untouched for ticket in tickets] == [True, False, True, True]


LOOKED_UP = {
    "sqlite": ("EXPLAIN QUERY PLAN", "USING INTEGER PRIMARY KEY"),
    # In a small table it may go through all rows once; never through all that wait for each row that is given.
    "postgresql": ("EXPLAIN", "Index Scan using pk_events on events|Hash Join"),
    "mariadb": ("EXPLAIN", "'eq_ref', '[^']*', 'PRIMARY'"),
}


@pytest.mark.parametrize("known", ["", "ANALYZE"], ids=["never-analyzed", "analyzed"])
def test_the_rows_that_end_are_each_looked_up_however_many_events_wait(world: World, known: str) -> None:
    """Of all conditions that an untouched Event meets, only its key may choose the way to it."""
    app, kind = world.app(), world.store.kind
    _, recorder, tracker, attempts = begun(app, 10_000 if kind == "postgresql" else 1_000)
    if known:
        world.sql({"sqlite": "ANALYZE", "postgresql": "ANALYZE events", "mariadb": "ANALYZE TABLE events"}[kind])
    for attempt in attempts[:100]:
        attempt.finish(None)
        tracker.settle(attempt)
    with statements(app.ledger.database) as seen:
        recorder.flush_all()
    ((said, values),) = [each for each in seen if each[0].startswith("UPDATE") and "added_messages IS NULL" in each[0]]
    explain, words = LOOKED_UP[kind]
    with app.ledger.database.write() as connection:
        plan = connection.exec_driver_sql(f"{explain} {said}", values[0] if isinstance(values, list) else values).all()
    assert re.search(words, str(plan)), plan


@pytest.mark.databases("postgresql", reason="the others write a row where it stands")
def test_an_outcome_is_written_beside_the_row_that_it_replaces(world: World) -> None:
    """On the same page, the indexes need not be told of it: that costs a third of the flush."""
    app = world.app()
    task_id, recorder, tracker, attempts = begun(app, 300)
    pages = "SELECT id, split_part(ctid::text, ',', 1) FROM events WHERE task_id = ?"
    before = dict(world.sql(pages, task_id))
    for attempt in attempts:
        attempt.finish({"id": attempt.ticket.event_id})
        tracker.settle(attempt)
    recorder.flush_all()
    after = dict(world.sql(pages, task_id))
    stayed = [event_id for event_id, page in after.items() if before[event_id] == page]
    assert len(stayed) > 240, f"{len(stayed)} of 300 outcomes stand on the page of their row"


@pytest.mark.one_database(reason="what is written is proved on each by the others")
def test_a_fetched_job_of_a_cancelled_task_says_so_once(world: World) -> None:
    app = world.app()
    task = app.submit("note", [{"n": 1}])
    (job,) = borrowing.hand_over(app.ledger, task.id, 1)
    task.cancel()
    recorder = Held(app)
    tracker = ArrivalTracker(app.ledger, recorder)
    (ticket,) = tracker.arrive([Arrival(job.job_id, job.attempt, "note", "default")])
    assert ticket.verdict is Begin.CANCEL
    tracker.release(Attempt(ticket))
    recorder.flush_all()
    ((status, messages),) = world.sql("SELECT status, added_messages FROM events")
    assert status == Status.CANCELLED
    assert [said["message"] for said in json.loads(messages)] == ["Cancelled"]
    wait_for(lambda: task.progress()["done"], "it is over")


CIRCLES = """
import gc, json, sys
from pathlib import Path
from types import FunctionType
from support.world import make_app

folder = Path(sys.argv[1])
app = make_app(folder)
gc.collect()
gc.set_debug(gc.DEBUG_SAVEALL)
gc.disable()
launcher = app.launcher(concurrency=4, shutdown_s=5.0)
launcher.start()
done = app.submit("note", [{"n": n, "refuse": n % 5 == 4} for n in range(60)]).wait(120)["done"]
gc.collect()
kinds = {type(each) for each in gc.garbage} | {each for each in gc.garbage if isinstance(each, FunctionType)}
gc.set_debug(0)
ours = sorted({kind.__qualname__ for kind in kinds if (kind.__module__ or "").startswith("asynctask")})
(folder / "circles.json").write_text(json.dumps([done, ours]))
launcher.stop()
app.close()
"""


@pytest.mark.databases("sqlite", reason="what a job is made of does not depend on the database")
def test_a_job_leaves_no_circle_of_objects_to_be_found_by_the_collector(world: World) -> None:
    """Circles live until the collector comes by: thousands of them make it come often, and look at all that is alive.

    In a process of its own: what applications of other tests leave here is none of this one's.
    """
    world.app()
    child = world.spawn("-c", CIRCLES, str(world.folder))
    assert child.wait(120) == 0, world.said()
    assert json.loads((world.folder / "circles.json").read_text()) == [True, []]
