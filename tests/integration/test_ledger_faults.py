"""Faults at the edges of the ledger that once lost, doubled or held up something."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.databases import Store
from support.hooks import noting

from asynctask import AsyncTask
from asynctask.core.states import Reason
from asynctask.errors import ConfigError, Conflict, InputError
from asynctask.ledger import doctor, processes
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import NewItem
from asynctask.ledger.recorder import Kind, Outcome, Recorder
from asynctask.lists.uploads import items_body
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")


@pytest.fixture
def app(tmp_path: Path, store: Store) -> Iterator[AsyncTask]:
    app = AsyncTask(database_url=store.url, data_dir=str(tmp_path), lease_s=2.0, heartbeat_s=0.5, environ={})

    @app.worker
    def noop(item: Any) -> None: ...

    yield app
    app.close()


def submit(app: AsyncTask, items: Any, **options: Any) -> Any:
    return app.submit("noop", items, **options)


def test_that_a_worker_inside_a_program_ends_does_not_end_the_split_of_what_it_hands_in(app: AsyncTask) -> None:
    def items() -> Iterator[int]:
        for i in range(300):
            if i == 150:
                processes.forget(app.ledger, app.ledger.identity)  # what an embedded worker does when it stops
                with app.ledger.database.read() as connection:
                    assert task_rows.stalled_splits(connection, app.ledger.now()) == []
            yield i

    assert submit(app, items()).progress()["counts"]["total"] == 300


def test_a_program_is_told_when_not_all_of_its_items_were_taken(app: AsyncTask) -> None:
    other = replace(app.ledger, identity="somebody-else")

    def taken_for_dead() -> bool:
        processes.forget(app.ledger, app.ledger.identity, dead=True)
        task_rows.end_split(other, 1, Reason.SPLIT_FAILED, why="taken for dead", anyone=True)
        return bool(app.task(1).progress()["split"]["state"] == "failed")

    def items() -> Iterator[int]:
        for i in range(3_000):
            if i == 1_500:
                wait_for(lambda: app.task(1).progress()["split"]["created"] == 1_100, "no slice is being written")
                wait_for(taken_for_dead, "the split, which renews its lease, is taken for dead between two renewals")
            yield i

    with pytest.raises(Conflict, match="did not take every item"):
        submit(app, items())


def test_a_key_whose_list_broke_off_does_not_answer_as_if_all_were_well(app: AsyncTask) -> None:
    task = submit(app, [1, 2], idempotency_key="k")
    with app.ledger.database.write() as connection:
        connection.exec_driver_sql("UPDATE tasks SET split_state='failed', split_reason='cut off'")
    with pytest.raises(Conflict, match="broke off"):
        submit(app, [1, 2], idempotency_key="k")
    assert task.id == 1


def test_a_key_stands_for_what_the_items_say_and_not_for_how_they_print(app: AsyncTask) -> None:
    @dataclass(repr=False)
    class Thing:  # it prints as its address
        name: str

    first = submit(app, [{"a": Thing("thing")}], idempotency_key="k")
    assert submit(app, [{"a": Thing("thing")}], idempotency_key="k").id == first.id
    with pytest.raises(InputError) as refused:
        submit(app, [{"a": Thing("other")}], idempotency_key="k")
    assert refused.value.code == "idempotency_key_reused"


def test_a_split_that_ends_every_process_that_takes_it_is_given_up(app: AsyncTask) -> None:
    source = {"name": "x", "filename": "x.csv"}
    new = task_rows.NewTask("noop", "default", 240, source=source)
    task_id = task_rows.create(app.ledger, [task_rows.First(new)], lease_s=0.0)[0].task_id
    for n in range(task_rows.MAX_SPLIT_TRIES):
        assert task_rows.claim_split(replace(app.ledger, identity=f"p{n}"), task_id, lease_s=0.0) is not None
    assert task_rows.claim_split(replace(app.ledger, identity="one-more"), task_id, lease_s=0.0) is None
    progress = app.task(task_id).progress()
    assert progress["split"]["state"] == "failed"
    assert "split_gave_up" in progress["split"]["reason"]


def test_a_split_outlives_deaths_that_have_nothing_to_do_with_it(app: AsyncTask) -> None:
    """Under faults every second or two, a slow machine added no slice between six of them, and lists ended incomplete."""
    new = task_rows.NewTask("noop", "default", 240, source={"name": "x", "filename": "x.csv"})
    task_id = task_rows.create(app.ledger, [task_rows.First(new)], lease_s=0.0)[0].task_id
    for n in range(6):
        ledger = replace(app.ledger, identity=f"p{n}")
        assert task_rows.claim_split(ledger, task_id, lease_s=0.0) is not None
    task_rows.add_slice(ledger, task_id, [NewItem("{}", 1)], [], after=0, cursor=1, lease_s=60)
    task_rows.end_split(ledger, task_id, Reason.SEALED)
    assert app.task(task_id).progress()["split"]["state"] == "sealed"


def test_a_process_that_does_not_know_the_worker_leaves_the_split_to_others(app: AsyncTask) -> None:
    new = task_rows.NewTask("unknown_here", "default", 240, source={"name": "x", "filename": "x.csv"})
    task_id = task_rows.create(replace(app.ledger, identity="gone"), [task_rows.First(new)], lease_s=0.0)[0].task_id
    app.resume_split(task_id)
    with app.ledger.database.read() as connection:
        assert task_rows.get(connection, task_id)["split_by"] == "gone"


def test_of_a_process_in_another_container_only_its_lease_tells() -> None:
    here = processes.Host("host", "boot/1")
    there = {"hostname": "host", "boot_id": "boot/2", "pid": os.getpid(), "pid_started": 1}
    assert not here.knows_dead(there)
    assert here.knows_dead({**there, "boot_id": "boot/1", "pid_started": -1})


@pytest.mark.each_database(reason="each locks in its own way")
def test_a_report_holds_no_transaction_while_its_reader_takes_time(app: AsyncTask) -> None:
    task = submit(app, [{"n": i} for i in range(5_000)])
    rows = task.report("all").rows
    assert next(rows).number == 1
    assert app.ledger.database.engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    assert sum(1 for _ in rows) == 4_999


@pytest.mark.each_database(reason="each locks in its own way")
def test_the_doctor_holds_nobody_up_where_nothing_is_wrong(app: AsyncTask) -> None:
    submit(app, [1, 2, 3])
    found: list[Any] = []
    with app.ledger.database.write():
        # The write lock is taken: a doctor that asked for it would wait until this block ends.
        look = threading.Thread(target=lambda: found.append(doctor.examine(app.ledger, repair=True)))
        look.start()
        look.join(120)
        assert found == [[]]


def test_items_handed_in_as_json_are_on_the_disk_before_the_answer(app: AsyncTask, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Any] = []
    monkeypatch.setattr(os, "fsync", noting(synced, os.fsync))
    app.uploads.store_body(items_body([{"a": 1}]))
    assert len(synced) == 2  # the file, and the folder that names it


def test_whoever_waits_for_a_working_status_that_cannot_be_written_is_told(
    app: AsyncTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, told = Recorder(app.ledger), threading.Event()
    monkeypatch.setattr(recorder, "flush", lambda batch: 1 / 0)
    recorder.start()
    recorder.put([Outcome(1, 1, Kind.WORKING, then=lambda won: None if won else told.set())])
    assert told.wait(120)
    monkeypatch.undo()
    assert recorder.stop(5)


def test_a_workers_own_queue_setting_holds_for_its_tasks_too(app: AsyncTask) -> None:
    task = app.submit(app.workers["noop"].set(queue="low", priority=7), [1])
    with app.ledger.database.read() as connection:
        row = task_rows.get(connection, task.id)
    assert (row["queue"], row["priority"]) == ("low", 7)


def test_two_workers_of_one_application_in_one_process_are_refused_with_what_to_do(app: AsyncTask) -> None:
    app.start_services()
    with pytest.raises(ConfigError, match="an AsyncTask of its own"):
        app.launcher().start()


@pytest.mark.parametrize("wrong", [{"queue": "two words"}, {"priority": 2**40}, {"retry": -1}, {"timeout": 0}])
def test_a_worker_with_options_that_no_job_could_have_is_refused_when_it_is_declared(
    app: AsyncTask, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="worker late"):
        app.worker(name="late", **wrong)(lambda item: None)
