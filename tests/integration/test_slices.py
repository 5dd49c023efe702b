"""Slices: several items in a job, each with its own outcome."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter
from typing import Any

import pytest
from pydantic import BaseModel
from support.borrowing import borrow
from support.place_app import add_workers
from support.world import World

from asynctask import AsyncTask, NormalException, current_job
from asynctask.core.transitions import Transition, stepped, working
from asynctask.errors import InputError
from asynctask.integrations.remote import JobRecord, Reporter
from asynctask.iterable import ItemFailure
from asynctask.ledger import processes
from asynctask.ledger.events import Change, EventRecord, apply
from asynctask.task import event_cursor
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")


PAUSE = threading.Event()


class Item(BaseModel):
    n: int


class Seen:
    """A worker of slices, and what it was called with."""

    def __init__(self, app: AsyncTask) -> None:
        self.calls: list[tuple[int, int]] = []

        @app.worker(retry=1, retry_in=lambda count, error, job: 0.1)
        def one(item: dict[str, Any]) -> Any:
            job = current_job()
            n = int(item["n"])
            self.calls.append((n, job.attempt))
            if item.get("wait"):
                while not job.should_stop():
                    PAUSE.wait(0.01)
            if item.get("say"):
                job.message("hello")
            if item.get("refuse"):
                raise NormalException("refused")
            if item.get("bug") == "always" or (item.get("bug") and self.times(n) == 1):
                raise ValueError("bug")
            return {"n": n} if item.get("result") else None

        self.worker = one

    def times(self, n: int) -> int:
        return Counter(each for each, _ in self.calls)[n]


def counts(task: Any) -> dict[str, int]:
    return {name: number for name, number in task.progress()["counts"].items() if number}


@pytest.mark.each_database(reason="the bookkeeping of slices is written by each")
def test_each_item_has_its_own_outcome_and_only_those_that_raised_run_again(world: World) -> None:
    app = world.app()
    seen = Seen(app)
    items: list[dict[str, Any]] = [{"n": n} for n in range(12)]
    items[2] |= {"refuse": True}
    items[3] |= {"bug": "once", "say": True}
    items[7] |= {"bug": "always"}
    items[8] |= {"result": True}
    task = app.submit(seen.worker, items, chunk_size=5)
    assert task.progress()["jobs"] == 3
    with world.working(app):
        task.wait(60)
    assert counts(task) == {"total": 12, "finish": 10, "failed": 1, "error": 1}
    assert [seen.times(n) for n in range(12)] == [1, 1, 1, 2, 1, 1, 1, 2, 1, 1, 1, 1]
    assert [(e["row"], e["status"]) for e in task.events(status=["failed", "error"])] == [(3, "failed"), (8, "error")]
    first, _, _ = {e["job_id"]: app.event(e["job_id"]) for e in task.events()}.values()
    assert first["status"] == "failed"
    assert first["outcomes"] == {"finish": 4, "failed": 1, "error": 0, "cancelled": 0}
    assert [m["row"] for m in first["messages"] if m["message"] == "hello"] == [4, 4]
    assert {e["row"]: e["result"] for e in task.events() if e["result"]} == {9: {"n": 8}}
    assert {group["message"]: group["count"] for group in task.progress()["top_errors"]} == {
        "refused": 1,
        "ValueError: bug": 1,
    }
    assert app.doctor() == []
    assert task.retry(status="error")
    with world.working(app):
        task.wait(60)
    assert [seen.times(2), seen.times(7), seen.times(8)] == [1, 4, 1]
    assert counts(task) == {"total": 12, "finish": 10, "failed": 1, "error": 1}
    assert app.doctor() == []


def test_a_cancel_between_two_items_keeps_the_outcomes_that_there_are(world: World) -> None:
    app = world.app()
    seen = Seen(app)
    items: list[dict[str, Any]] = [{"n": n} for n in range(10)]
    items[1] |= {"refuse": True}
    items[4] |= {"wait": True}
    task = app.submit(seen.worker, items, chunk_size=10)
    with world.working(app):
        while counts(task).get("finish") != 3:  # counts move while the slice runs
            PAUSE.wait(0.02)
        task.cancel()
        task.wait(60)
    assert counts(task) == {"total": 10, "finish": 4, "failed": 1, "cancelled": 5}
    assert app.doctor() == []
    assert task.retry(status=["cancelled"], limit=2)
    with world.working(app):
        task.wait(60)
    assert counts(task) == {"total": 10, "finish": 6, "failed": 1, "cancelled": 3}
    assert [seen.times(n) for n in range(10)] == [1] * 7 + [0] * 3
    assert app.doctor() == []


def test_a_slice_of_which_only_some_cancelled_items_run_again_ends_cancelled(world: World) -> None:
    app = world.app()
    seen = Seen(app)
    task = app.submit(seen.worker, [{"n": n} for n in range(5)], chunk_size=5)
    task.cancel()
    with world.working(app):
        task.wait(60)
        assert task.retry(status=["cancelled"], limit=2)
        task.wait(60)
    assert counts(task) == {"total": 5, "finish": 2, "cancelled": 3}
    assert {app.event(each["job_id"])["status"] for each in task.events()} == {"cancelled"}
    assert app.doctor() == []


def test_a_batch_worker_gets_the_list_and_reports_by_place(world: World) -> None:
    app = world.app()
    given: list[list[int]] = []

    @app.worker(batch=True, retry=1, retry_in=lambda count, error, job: 0.1)
    def many(items: list[dict[str, Any]]) -> list[int]:
        given.append([each["n"] for each in items])
        for place, item in enumerate(items):
            if item["n"] == 2:
                current_job().fail(place, "no")
            if item["n"] == 3 and current_job().attempt == 1:
                current_job().error(place, "bug")
        if items[0]["n"] == 5:
            raise NormalException("none of these")
        return [each["n"] * 10 for each in items]

    task = app.submit("many", [{"n": n} for n in range(9)], chunk_size=4)
    with world.working(app, concurrency=1):
        task.wait(60)
    assert counts(task)["failed"] == 1
    assert sorted(map(tuple, given)) == [(0, 1, 2, 3), (3,), (4, 5, 6, 7), (8,)]
    assert {e["row"]: e["result"] for e in task.events()} == {
        1: 0, 2: 10, 3: None, 4: 30, 5: 40, 6: 50, 7: 60, 8: 70, 9: 80
    }  # fmt: skip
    assert app.doctor() == []


def test_a_batch_worker_that_returns_another_number_of_results_or_reports_an_item_that_is_not_there_errs(
    world: World,
) -> None:
    """Before, the results that it returned were those of other items, all of them finished."""
    app = world.app()

    @app.worker(batch=True, retry=0)
    def odd(items: list[dict[str, Any]]) -> list[int] | None:
        kind = items[0]["kind"]
        if kind == "none there":
            current_job().fail(len(items), "no")
        if kind == "reported":
            for place in range(len(items)):
                current_job().finish(place, object() if place else "kept")
        return None if kind == "none there" else [1] * (len(items) + (1 if kind == "long" else -1))

    tasks = {
        kind: app.submit("odd", [{"kind": kind}] * 4, chunk_size=4) for kind in ("short", "long", "none there", "reported")
    }
    with world.working(app, concurrency=1):
        for task in tasks.values():
            task.wait(60)
    said = {kind: {event["messages"][-1]["message"] for event in task.events()} for kind, task in tasks.items()}
    assert said["short"] == {"ValueError: odd returned 3 values for 4 items: return one for each, or None"}
    assert said["long"] == {"ValueError: odd returned 5 values for 4 items: return one for each, or None"}
    assert said["none there"] == {"IndexError: there is no item 4: the list has 4, from 0 on"}
    assert counts(tasks["reported"])["finish"] == 4, "what it has reported stands"
    assert [event["result"] for event in tasks["reported"].events()] == ["kept", None, None, None]
    assert app.doctor() == []


@pytest.mark.parametrize("options", [{"key": "n"}, {"chunk_size": 0}, {"chunk_size": 1_001}, {"chunk_size": "many"}])
def test_what_no_slice_can_be_is_refused(world: World, options: dict[str, Any]) -> None:
    app = world.app()
    seen = Seen(app)
    with pytest.raises(InputError, match="chunk_size"):
        app.submit(seen.worker, [{"n": 1}], **{"chunk_size": 2, **options})


def test_a_worker_killed_in_a_slice_goes_on_with_the_first_item_that_was_not_recorded(world: World) -> None:
    app = world.app(lease_s=1.0, heartbeat_s=0.3)
    add_workers(app, world.shop)
    items: list[dict[str, Any]] = [{"n": n} for n in range(8)]
    items[1] |= {"refuse": True}
    items[5] |= {"gate": True}
    task = app.submit("sliced", items, chunk_size=8)
    for _ in range(2):
        worker = world.cli("place_app", "worker", "-c", "1", ASYNCTASK_LEASE_S="1.0", ASYNCTASK_HEARTBEAT_S="0.3")
        before = world.shop.performed()[5]
        wait_for(lambda: world.shop.performed()[5] > before and counts(task).get("finish") == 4, "it is at the gate", 60)  # noqa: B023
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
    assert counts(task) | {"enqueue": 0, "working": 0} == {"total": 8, "finish": 4, "failed": 1, "enqueue": 0, "working": 0}
    world.open_gate()
    with world.working(app):
        task.wait(120)
    assert counts(task) == {"total": 8, "finish": 7, "failed": 1}
    assert [world.shop.performed()[n] for n in range(8)] == [1, 1, 1, 1, 1, 3, 1, 1]
    assert [e["row"] for e in task.events(status="failed")] == [2]
    assert app.doctor() == []


def test_refused_rows_leave_gaps_and_reports_show_items(world: World) -> None:
    app = world.app()

    @app.worker(retry=0)
    def typed(item: Item) -> int:
        if item.n % 5 == 0:
            raise NormalException(f"{item.n} is refused")
        return item.n

    task = app.submit(typed, [{"n": "bad" if n == 3 else n} for n in range(1, 11)], chunk_size=4)
    with world.working(app):
        task.wait(60)
    assert counts(task) == {"total": 9, "finish": 7, "failed": 2}
    assert [(e["row"], e["params"]["n"]) for e in task.events(status="failed")] == [(5, 5), (10, 10)]
    rows = [(row.number, row.status, row.error) for row in task.report("failed").rows]
    assert [(number, status) for number, status, _ in rows] == [(3, "rejected"), (5, "failed"), (10, "failed")]
    assert [error for _, _, error in rows[1:]] == ["5 is refused", "10 is refused"]
    assert [row.number for row in task.report("succeeded").rows] == [1, 2, 4, 6, 7, 8, 9]


def test_a_page_of_events_ends_within_a_slice_and_the_next_goes_on_there(world: World) -> None:
    app = world.app()
    seen = Seen(app)
    items: list[dict[str, Any]] = [{"n": n, "refuse": n % 3 == 0, "say": n == 4} for n in range(23)]
    task = app.submit(seen.worker, items, chunk_size=10)
    with world.working(app):
        task.wait(60)

    def pages(limit: int, **options: Any) -> list[list[Any]]:
        found = [task.events(limit=limit, **options)]
        while len(found[-1]) == limit:
            found.append(task.events(limit=limit, after=event_cursor(found[-1][-1]), **options))
        return [[each["row"] for each in page] for page in found]

    assert pages(7) == [[*range(1, 8)], [*range(8, 15)], [*range(15, 22)], [22, 23]]
    assert pages(10) == [[*range(1, 11)], [*range(11, 21)], [21, 22, 23]]
    assert pages(3, status="failed") == [[1, 4, 7], [10, 13, 16], [19, 22]]
    first = task.events(limit=1)[0]
    assert [e["row"] for e in task.events(after=first["id"])] == [*range(11, 24)], "an id alone names the whole job"
    with pytest.raises(InputError, match=r"ID\.ROW"):
        task.events(after="7.")
    assert [m["message"] for m in task.events()[4]["messages"] if "row" in m] == ["hello"]
    failed = task.events(status="failed")
    assert {(e["problem"], e["messages"][-1]["message"]) for e in failed} == {("failed", "refused")}
    assert {e["problem"] for e in task.events(status="finish")} == {None}
    assert [m["row"] for m in failed[1]["messages"] if "row" in m] == [4], "no messages of other rows"


def test_the_doctor_finds_lines_that_no_item_has(world: World) -> None:
    app = world.app()
    seen = Seen(app)
    task = app.submit(seen.worker, [{"n": 0}, {"n": 1, "refuse": True}, {"n": 2}], chunk_size=3)
    with world.working(app):
        task.wait(60)
    world.sql("DELETE FROM item_errors")
    assert [each.code for each in app.doctor(repair=True)] == ["errors"]
    assert app.doctor() == []


@pytest.mark.parametrize("broker_kind", ["redis"])
def test_a_worker_in_another_language_gets_no_slice_and_says_nothing_of_one(world: World) -> None:
    app = world.app()
    seen = Seen(app)
    items = [{"n": n} for n in range(4)]
    task = app.submit(seen.worker, items, chunk_size=2)  # while nobody works its queue
    reporter = Reporter("sidekiq", "host:7:abc", concurrency=5, queues=["default", "low"])
    app.start_services()
    app.record_all([], reporter)
    lies = "SELECT 1 FROM loans WHERE process = 'queue/redis'"
    wait_for(lambda: app.dispatcher.run_pass() or world.sql(lies), "its queue has them")
    app.stop_services()
    app.record_all([], reporter)  # it lives
    jobs = list(dict.fromkeys(event["job_id"] for event in task.events()))
    with pytest.raises(InputError, match=r"option 'chunk_size': sidekiq@host:7:abc works the queue 'default'"):
        app.submit(seen.worker, items, chunk_size=2)
    app.submit(seen.worker, items, chunk_size=2, queue="of-python").cancel()
    said = [JobRecord(jobs[0], "working", attempt=1), JobRecord(jobs[1], "finish", attempt=1)]
    told, _ = app.record_all(said, reporter)
    assert [(each.counted, each.status) for each in told] == [(False, "error")] * 2
    assert counts(task) == {"total": 4, "error": 4}
    (why,) = task.progress()["top_errors"]
    assert "without chunk_size" in why["message"]
    assert why["count"] == 4
    assert app.doctor() == []


# -- what comes in the middle of a slice


def test_an_item_whose_thread_hangs_ends_alone_and_the_others_go_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynctask.runtime.timeouts.GRACE_S", 0.2)
    app = world.app()
    reading, writing = os.pipe()
    done: list[int] = []

    @app.worker(retry=0, timeout=0.1)
    def hangs(item: dict[str, Any]) -> None:
        done.append(item["n"])
        if item["n"] == 2:
            os.read(reading, 1)  # one long call into C: no exception is delivered before it returns

    task = app.submit(hangs, [{"n": n} for n in range(5)], chunk_size=5)
    try:
        with world.working(app, concurrency=1):
            task.wait(60)
            assert counts(task) == {"total": 5, "finish": 4, "error": 1}
    finally:
        os.write(writing, b".")
    wait_for(lambda: not any(t.name == "processor" for t in threading.enumerate()), "the thread ends")
    os.close(reading)
    os.close(writing)
    assert counts(task) == {"total": 5, "finish": 4, "error": 1}, "what the lost thread came to counts no more"
    assert done == [0, 1, 2, 3, 4]
    (event,) = task.events(status="error")
    assert (event["row"], event["problem"]) == (3, "timeout")
    assert app.doctor() == []


@pytest.mark.parametrize("kind", ["stop", "pause"])
def test_a_slice_that_was_stopped_or_paused_goes_on_with_its_next_item(world: World, kind: str) -> None:
    app = world.app()
    seen = Seen(app)
    task = app.submit(seen.worker, [{"n": n, "wait": n == 3, "refuse": n == 1} for n in range(8)], chunk_size=8)
    (job_id,) = {event["job_id"] for event in task.events()}
    with world.working(app):
        wait_for(lambda: counts(task).get("finish") == 2, "three items have ended")
        app.stop_job(job_id) if kind == "stop" else task.pause()
        wait_for(lambda: not counts(task).get("working"), "its worker lets go")
        waits = "stopped" if kind == "stop" else "enqueue"
        assert counts(task) == {"total": 8, "finish": 3, "failed": 1, waits: 4}
        app.start_job(job_id) if kind == "stop" else task.resume()
        task.wait(60)
    assert counts(task) == {"total": 8, "finish": 7, "failed": 1}
    assert [seen.times(n) for n in range(8)] == [1] * 8
    assert app.doctor() == []


def test_parallel_counts_jobs_and_coroutines_perform_slices_in_lanes(world: World) -> None:
    app = world.app()
    inside, most, rows = 0, 0, list[int | None]()

    @app.worker
    async def later(item: dict[str, Any]) -> int:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0)
        rows.append(current_job().row)
        inside -= 1
        if item["n"] == 5:
            raise NormalException("no")
        return int(item["n"])

    task = app.submit(later, [{"n": n} for n in range(40)], chunk_size=4, parallel=2)
    with world.working(app):
        task.wait(60)
    assert counts(task) == {"total": 40, "finish": 39, "failed": 1}
    assert most <= 2, "a job has one item in hand at a time"
    assert Counter(rows) == Counter(range(1, 41))
    assert [e["result"] for e in task.events(limit=4)] == [0, 1, 2, 3]
    assert task.progress()["control"]["in_flight"] == 0
    assert app.doctor() == []


def test_results_beyond_max_result_bytes_are_left_out_and_counted(world: World) -> None:
    app = world.app(max_result_bytes=100)

    @app.worker
    def wordy(item: dict[str, Any]) -> str:
        return "r" * int(item["n"])

    task = app.submit(wordy, [{"n": n} for n in (40, 200, 40, 30)], chunk_size=4)
    with world.working(app):
        task.wait(60)
    assert [e["result"] for e in task.events()] == ["r" * 40, None, "r" * 40, None]
    said = [m["message"] for m in task.events()[0]["messages"]]
    assert any("2 of 4" in message and "max_result_bytes" in message for message in said), said
    assert app.doctor() == []


@pytest.mark.parametrize("how", ["cancel", "recover"])
def test_a_slice_whose_process_died_behind_its_last_item_ends_as_its_items_did(world: World, how: str) -> None:
    app = world.app()
    seen = Seen(app)
    task = app.submit(seen.worker, [{"n": n} for n in range(2)], chunk_size=2)
    other = world.app()
    (job,) = borrow(other.ledger, task.id, 1)

    def recorded(record: EventRecord) -> Transition:
        begun = working(record.row, other.ledger.identity)
        return begun._replace(after=stepped(begun.after, "fx"))

    with app.ledger.database.write() as connection:
        failures = {1: ItemFailure(2, "failed", "refused")}
        apply(connection, app.ledger, [Change(job.event_id, recorded, failures=failures)])
    assert counts(task) == {"total": 2, "finish": 1, "failed": 1}
    if how == "cancel":
        task.cancel()
    processes.recover_events(app.ledger, other.ledger.identity)
    with world.working(app):
        task.wait(60)
    assert counts(task) == {"total": 2, "finish": 1, "failed": 1}
    (event,) = {each["job_id"] for each in task.events()}
    assert app.event(event)["status"] == "failed"
    assert seen.calls == []
    assert app.doctor() == []
