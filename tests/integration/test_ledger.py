"""The ledger itself: compare-and-set, messages, counts, idempotency keys, the doctor. No worker runs here."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import Any

import pytest
from support import borrowing
from support.borrowing import borrow, count_held
from support.world import World, numbers

from asynctask import AsyncTask
from asynctask.core.states import Reason, Status
from asynctask.core.transitions import POISON_DEATHS, cancel, give_back, outcome, working
from asynctask.errors import Conflict, InputError, TransitionRefused
from asynctask.ledger import doctor, processes
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.events import Change, EventRecord, Failure, Note, apply
from asynctask.ledger.progress import progress
from asynctask.ledger.tasks import try_close
from asynctask.messages import KEEP_FIRST, KEEP_LAST
from asynctask.task import TaskHandle

decided_by_us = pytest.mark.one_database(reason="it is decided in Python, of rows that were read")


def take(app: AsyncTask, *changes: Change) -> list[Change]:
    with app.ledger.database.write() as connection:
        return apply(connection, app.ledger, changes)


def register(app: AsyncTask) -> None:
    """This application is a process in the ledger, so the doctor knows who holds its loans."""
    processes.register(app.ledger, app.host, kind="worker", pid=os.getpid(), lease_s=60.0)


def first_id(task: TaskHandle) -> int:
    return int(task.events()[0]["id"])


def finished(record: EventRecord) -> Any:
    return outcome(record.row, Status.FINISH, Reason.RETURNED)


def only_if(attempt: int, decide: Any) -> Any:
    """A decision with the fence that every writer of an attempt has."""

    def fenced(record: EventRecord) -> Any:
        row = record.row
        return decide(record) if row.attempt == attempt and row.status in (Status.ENQUEUE, Status.WORKING) else None

    return fenced


# -- transitions


def test_a_late_writer_loses_and_changes_neither_row_nor_counts_nor_messages(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(3))
    event_id = first_id(task)
    register(app)
    borrow(app.ledger, task.id)
    take(app, Change(event_id, lambda r: give_back(r.row, None, now=app.clock.now())))  # the attempt is 2 from here on
    before = task.progress()
    (late,) = take(app, Change(event_id, only_if(1, finished), notes=[Note("finish", "Done")]))
    assert late.transition is None
    assert task.progress()["counts"] == before["counts"]
    assert task.progress()["version"] == before["version"]
    assert task.events()[0]["messages"] == []
    (next_one,) = take(app, Change(event_id, only_if(2, finished)))
    assert next_one.transition is not None
    assert task.progress()["counts"]["finish"] == 1
    assert app.doctor() == []


def test_of_writers_that_race_for_one_event_a_single_one_wins(world: World) -> None:
    apps = [world.app() for _ in range(4)]
    task = apps[0].submit("note", numbers(1))
    event_id, start = first_id(task), threading.Barrier(4)
    won: list[Any] = []

    def race(app: AsyncTask) -> None:
        start.wait()
        won.extend(a for a in take(app, Change(event_id, only_if(1, finished))) if a.transition is not None)

    racers = [threading.Thread(target=race, args=(app,)) for app in apps]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert len(won) == 1
    assert task.progress()["counts"]["finish"] == 1
    assert len(world.sql("SELECT * FROM seen_status")) == 1


def test_an_illegal_step_is_refused_and_takes_the_whole_transaction_back(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(2))
    one, two = (int(event["id"]) for event in task.events())
    take(app, Change(one, finished))
    with pytest.raises(TransitionRefused):
        take(app, Change(two, finished), Change(one, lambda r: working(r.row, "somebody")))
    assert task.progress()["counts"]["finish"] == 1
    assert app.doctor() == []


def test_an_event_that_is_gone_and_a_decision_for_nothing_are_no_errors(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(1))
    gone, left = take(app, Change(999_999, finished), Change(first_id(task), lambda record: None))
    assert (gone.record, gone.transition, left.transition) == (None, None, None)


@decided_by_us
def test_messages_keep_the_first_10_and_the_last_90_and_say_how_many_were_dropped(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(1))
    (event,) = task.events()
    for i in range(130):
        app.record(event["job_id"], "enqueue", f"message {i}")
    messages = task.events()[0]["messages"]
    assert [m["message"] for m in messages[:KEEP_FIRST]] == [f"message {i}" for i in range(10)]
    assert messages[KEEP_FIRST] == {"dropped": 30}
    assert [m["message"] for m in messages[KEEP_FIRST + 1 :]] == [f"message {i}" for i in range(40, 130)]
    assert len(messages) == KEEP_FIRST + KEEP_LAST + 1
    stamped = messages[0]
    assert (stamped["status"], stamped["attempt"]) == ("enqueue", 1)
    assert stamped["at"].endswith("Z")


def test_counts_move_with_each_kind_of_turn(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(6))
    ids = [int(event["id"]) for event in task.events()]
    register(app)
    borrow(app.ledger, task.id)
    now = app.clock.now()

    def errors(record: EventRecord) -> Any:
        return outcome(record.row, Status.ERROR, Reason.RAISED)

    def retries(record: EventRecord) -> Any:
        return outcome(record.row, Status.ERROR, Reason.RAISED, retry_at=now + 60_000_000)

    take(
        app,
        Change(ids[0], finished),
        Change(ids[1], errors, failure=Failure("raised", "a bug")),
        Change(ids[2], retries),
        Change(ids[3], lambda r: working(r.row, app.ledger.identity)),
        Change(ids[4], lambda r: cancel(r.row)),
    )
    progress = task.progress()
    assert progress["counts"] == {
        "total": 6,
        "enqueue": 2,
        "working": 1,
        "stopped": 0,
        "finish": 1,
        "failed": 0,
        "error": 1,
        "cancelled": 1,
    }
    assert (progress["retrying"], progress["control"]["in_flight"]) == (1, 2)
    assert [(g["message"], g["count"]) for g in task.error_groups()] == [("a bug", 1)]
    assert app.doctor() == []


@decided_by_us
def test_groups_of_failures_are_bounded_and_the_rest_is_counted_as_other(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(150))

    def errors(record: EventRecord) -> Any:
        return outcome(record.row, Status.ERROR, Reason.RAISED)

    ids = [int(event["id"]) for event in task.events(limit=150)]
    for n, event_id in enumerate(ids):
        take(app, Change(event_id, errors, failure=Failure("raised", f"bug of {'x' * n}")))
    groups = task.error_groups()
    assert len(groups) == 101
    assert groups[0]["message"] == "other"
    assert groups[0]["count"] == 50
    assert app.doctor() == []


# -- idempotency keys


def test_the_same_key_and_list_is_the_first_task_and_another_list_is_refused(world: World) -> None:
    app, other = world.app(), world.app()
    first = app.submit("note", numbers(3), idempotency_key="k")
    assert other.submit("note", numbers(3), idempotency_key="k").id == first.id
    assert first.progress()["counts"]["total"] == 3
    titled: dict[str, Any] = {"title": "another"}
    for worker, items, more in (("note", 4, {}), ("note", 3, titled), ("gated", 3, {})):
        with pytest.raises(InputError) as refused:
            app.submit(worker, numbers(items), idempotency_key="k", **more)
        assert refused.value.code == "idempotency_key_reused"
        assert refused.value.status == 422
    assert app.submit("note", numbers(4), idempotency_key="k", owner="somebody else").id != first.id
    stored = app.submit_items("note", numbers(2), idempotency_key="file")
    again_stored = app.submit_items("note", numbers(2), idempotency_key="file")
    assert (stored.created, again_stored.created) == (True, False)
    assert stored.id == again_stored.id


def test_of_submissions_that_race_with_one_key_a_single_task_is_made(world: World) -> None:
    apps = [world.app() for _ in range(4)]
    start, ids = threading.Barrier(4), []

    def submit(app: AsyncTask) -> None:
        start.wait()
        ids.append(app.submit("note", numbers(5), idempotency_key="once").id)

    racers = [threading.Thread(target=submit, args=(app,)) for app in apps]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert len(ids) == 4
    assert len(set(ids)) == 1
    assert world.one("SELECT COUNT(*) FROM events") == 5


# -- loans


def test_what_is_lent_is_one_processs_until_it_gives_it_back(world: World) -> None:
    one, two = world.app(), world.app()
    task = one.submit("note", numbers(10))
    lent = borrow(one.ledger, task.id, 4)
    assert [job.attempt for job in lent] == [1] * 4
    others = borrow(two.ledger, task.id, 4)
    assert not {job.event_id for job in lent} & {job.event_id for job in others}
    assert not borrowing.give_back(two.ledger, *lent), "it is not its own"
    assert borrowing.give_back(one.ledger, *lent[2:])
    assert task.progress()["control"]["in_flight"] == 6
    again = borrow(two.ledger, task.id)
    assert len(again) == 4
    assert [job.event_id for job in again[:2]] == [job.event_id for job in lent[2:]], "what was given back comes first"
    assert task.progress()["control"]["in_flight"] == 10
    borrowing.end(one.ledger, *lent[:2])
    borrowing.end(two.ledger, *others, *again)
    assert task.progress()["done"]
    assert world.sql("SELECT * FROM loans") == []
    assert one.doctor() == []


def test_parallel_bounds_what_is_lent_to_all_processes_together(world: World) -> None:
    one, two = world.app(), world.app()
    task = one.submit("note", numbers(10), parallel=3)
    lent = borrow(one.ledger, task.id, 2)
    lent += borrow(two.ledger, task.id, 10)
    assert len(lent) == 3
    assert borrow(one.ledger, task.id, 10) == []
    borrowing.end(one.ledger, lent[0])
    assert len(borrow(two.ledger, task.id, 10)) == 1
    assert (count_held(one.ledger, task.id), count_held(two.ledger, task.id)) == (1, 2)


@decided_by_us
def test_a_death_is_counted_only_of_a_job_that_had_begun_and_the_third_is_poison(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(1))
    event_id = first_id(task)
    for deaths in (0, 1, 2):
        assert len(borrow(app.ledger, task.id)) == 1
        if deaths == 0:
            processes.recover_events(app.ledger, app.ledger.identity)
            assert world.sql("SELECT deaths, watched FROM events") == [(0, 1)]
            assert len(borrow(app.ledger, task.id)) == 1
        take(app, Change(event_id, lambda r: working(r.row, "doomed")))
        processes.recover_events(app.ledger, "doomed")
    assert world.sql("SELECT status, problem, deaths FROM events") == [("error", "poison", 3)]
    assert app.doctor() == []


@decided_by_us
def test_a_suspect_takes_the_blame_of_a_death_from_the_jobs_beside_it(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(3))
    world.sql(f"UPDATE events SET watched = 1, deaths = {2 * POISON_DEATHS - 1} WHERE id = {first_id(task)}")
    register(app)
    for job in borrow(app.ledger, task.id):
        take(app, Change(job.event_id, lambda r: working(r.row, "doomed")))
    processes.recover_events(app.ledger, "doomed", [])
    found = world.sql("SELECT deaths, watched, status, problem FROM events ORDER BY id")
    assert found == [(2 * POISON_DEATHS, 1, "error", "poison"), *[(0, 1, "enqueue", None)] * 2]
    assert task.events()[0]["messages"][-1]["message"] == "Worker lost 6 times; given up"
    assert app.doctor() == []


def test_of_processes_that_race_to_close_a_task_a_single_one_does(world: World) -> None:
    """Without the second look under the lock the others went on and were refused by the table of states."""
    apps = [world.app() for _ in range(4)]
    for _ in range(5):
        task = apps[0].submit("note", numbers(1))
        take(apps[0], Change(first_id(task), finished))
        start = threading.Barrier(4)
        won: list[bool] = []

        def race(app: AsyncTask, start: threading.Barrier, won: list[bool], task_id: int) -> None:
            start.wait()
            won.append(try_close(app.ledger, task_id))

        racers = [threading.Thread(target=race, args=(app, start, won, task.id)) for app in apps]
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join()
        assert sorted(won) == [False, False, False, True]
        assert [entry["action"] for entry in task.log()].count("closed") == 1
        world.check_promises(apps[0], [task.id], 1)


# -- the doctor


DRIFTS = {
    "counts": "UPDATE task_tallies SET finish = finish + 1, enqueue = enqueue - 1",
    "retrying": "UPDATE task_tallies SET retrying = 5",
    "lost slot": "DELETE FROM task_tallies",
    "slot too many": "INSERT INTO task_tallies (task_id, slot, finish) VALUES (1, 7, 2)",
    "created_jobs": "UPDATE tasks SET created_jobs = created_jobs + 1",
    "created": "UPDATE tasks SET created = created - 1",
    "a row changed by hand": "UPDATE events SET status = 'finish', n_finish = 1 WHERE seq = 9",
    "a row deleted by hand": "DELETE FROM events WHERE seq = 9",
    "a failure that no row had": "INSERT INTO item_errors (task_id, event_id, status, digest, attempt, message, code)"
    " VALUES (1, 1, 'error', 'd', 1, 'x', 'y')",
    "a failure that is not listed": "DELETE FROM item_errors WHERE id = (SELECT MIN(id) FROM item_errors)",
    "groups that do not add up": 'UPDATE task_errors SET "count" = "count" + 1',
}


@pytest.mark.parametrize("drift", DRIFTS)
def test_the_doctor_finds_and_repairs(world: World, drift: str) -> None:
    app = world.app()
    task = app.submit("note", [{"n": n, "bug": n % 3 == 0} for n in range(10)])
    register(app)
    borrow(app.ledger, task.id, 6)

    def errors(record: EventRecord) -> Any:
        return outcome(record.row, Status.ERROR, Reason.RAISED)

    for event in task.events()[:2]:
        take(app, Change(int(event["id"]), errors, failure=Failure("raised", "a bug")))
    assert app.doctor() == []
    version = task.progress()["version"]
    world.sql(DRIFTS[drift])
    (finding,) = app.doctor()
    assert finding == replace(finding, task_id=task.id, repaired=False)
    (mended,) = app.doctor(repair=True)
    assert mended.repaired, mended
    assert app.doctor() == []
    assert task.progress()["version"] != version, "whoever holds the old counts is told"


def test_the_doctor_names_what_it_cannot_mend(world: World) -> None:
    app = world.app()
    app.submit("note", numbers(2))
    world.sql("UPDATE events SET task_id = 77 WHERE seq = 1")
    world.sql("UPDATE task_tallies SET task_id = 78 WHERE task_id = 1")
    world.sql("UPDATE tasks SET closed_at = 5")
    codes = {finding.code for finding in app.doctor()}
    assert codes == {"counts", "closed_with_open_items", "orphan_events", "orphan_tallies"}
    left = {finding.code for finding in app.doctor(repair=True) if not finding.repaired}
    assert left == {"closed_with_open_items", "orphan_events", "orphan_tallies"}


def test_the_doctor_may_look_while_the_task_runs(world: World) -> None:
    app = world.app()
    with world.working(app):
        task = app.submit("brief", numbers(100))
        looks = 0
        while not task.progress()["done"]:
            assert app.doctor() == []
            looks += 1
    assert looks > 1
    assert doctor.examine(app.ledger, task_ids=[task.id]) == []


# -- knobs


@decided_by_us
def test_knobs_that_are_none_or_have_no_such_value_are_refused(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(1))
    for changes in ({"parallel": 0}, {"parallel": True}, {"parallel": "5"}, {"priority": 1.5}, {"title": "x" * 256}, {}):
        with pytest.raises(InputError):
            task.update(**changes)
    for interval in (-0.1, "1", True, None, float("nan"), float("inf"), 604_801):
        with pytest.raises(InputError, match="interval"):
            task.update(interval=interval)
    with pytest.raises(InputError, match="shade"):
        task.update(shade="red")
    assert task.update(title="new", who="me")["title"] == "new"
    assert task.log()[0]["who"] == "me"
    take(app, Change(first_id(task), finished))
    app.start_services()
    assert task.wait(120)["done"]
    app.stop_services()
    with pytest.raises(Conflict):
        task.update(parallel=3)
    assert task.update(title="renamed all the same")["title"] == "renamed all the same"


@decided_by_us
def test_every_edge_that_a_person_asks_for_names_the_state_when_it_is_refused(world: World) -> None:
    app = world.app()
    with world.working(app):
        task = app.submit("note", numbers(2))
        assert task.wait(120)["done"]
    for verb in (task.pause, task.resume, task.cancel):
        with pytest.raises(Conflict, match="finished"):
            verb()
    assert task.retry() is False, "nothing failed"
    with pytest.raises(InputError, match="finish"):
        task.retry(["finish"])
    with app.ledger.database.read() as connection:
        assert task_rows.get(connection, task.id)["generation"] == 1


def test_a_task_says_the_same_of_itself_alone_and_among_others(world: World) -> None:
    """Two statements ask it: one Task is what is polled, many are a page."""
    app = world.app()
    handles = []
    for reasons in (9, 3, 0):
        task = app.submit("note", numbers(12))
        jobs = borrow(app.ledger, task.id)
        ended = [
            Change(
                job.event_id,
                lambda record: outcome(record.row, Status.FAILED, Reason.REFUSED),
                failure=Failure("failed", f'no "x" {"abcdefghi"[n % reasons]}'),
            )
            for n, job in enumerate(jobs[: 11 if reasons else 0])
        ]
        take(app, *ended)
        handles.append(task.id)
    with app.ledger.database.read() as connection:
        now = app.ledger.now()
        among = progress(connection, handles, now)
        alone = [progress(connection, [task_id], now)[0] for task_id in sorted(handles, reverse=True)]
    assert among == alone
    assert [[each["count"] for each in found["top_errors"]] for found in alone] == [[], [4, 4, 3], [2, 2, 1, 1, 1]]
