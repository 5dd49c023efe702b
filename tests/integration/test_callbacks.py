"""Callbacks of Tasks: queued once with the close of a generation, counted nowhere, and waited for."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from support.untracked import broker_of
from support.world import World, numbers

from asynctask import AsyncTask
from asynctask.brokers.base import Copy
from asynctask.core.transitions import CALLBACKS
from asynctask.errors import ConfigError, Conflict, InputError, UnknownWorker
from asynctask.ledger import queries, recorder, standalone, tasks
from asynctask.ledger.tasks import try_close, try_finish
from asynctask.maintenance import Maintenance
from asynctask.sidekiq.copies import build
from asynctask.sidekiq.payload import dump
from asynctask.task import TaskHandle
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")

ALL: Mapping[str, Any] = {name: {"worker": "told", "args": [name]} for name in CALLBACKS}


def called(world: World) -> list[tuple[int, str]]:
    """The generation and the name of each call of :data:`ALL`, sorted."""
    return sorted((int(line[1]), line[2]) for line in world.shop.lines() if line[0] == "told")


def follow(*names: str, generation: int = 1) -> list[tuple[int, str]]:
    return sorted((generation, name) for name in names)


def states(task: TaskHandle) -> dict[str, str | None]:
    return {each["name"]: each["status"] for each in task.progress()["callbacks"]}


def over(task: TaskHandle) -> Mapping[str, Any]:
    wait_for(lambda: task.progress()["done"], f"Task {task.id} is done: {task.progress()}")
    return task.progress()


def sweep(app: AsyncTask) -> Maintenance:
    return app.maintenance(app.ledger)


@contextmanager
def held(world: World) -> Iterator[None]:
    """Callbacks that have begun do not end meanwhile."""
    hold = world.folder / "hold"
    hold.touch()
    try:
        yield
    finally:
        hold.unlink()


# -- which follow


@pytest.mark.each_database(reason="they are written and found by statements of each one's own")
@pytest.mark.parametrize("broker_kind", ["sql", "redis"])
def test_each_outcome_has_its_callbacks_and_they_are_called_once(world: World) -> None:
    app = world.app()
    cases: Sequence[tuple[dict[str, Any], str]] = (
        ({}, "on_success"),
        ({"refuse": True}, "on_failure"),
        ({"bug": True}, "on_failure"),
    )
    with world.working(app):
        for item, name in cases:
            task = app.submit("note", [{"n": 1}, {"n": 2, **item}], **ALL)
            assert over(task)["state_reason"] is None
            assert states(task) == {**dict.fromkeys(CALLBACKS), "on_complete": "finish", name: "finish"}
            world.check_promises(app, [task.id], 2)
    assert called(world) == sorted(follow("on_complete", "on_success") + 2 * follow("on_complete", "on_failure"))
    assert world.one("SELECT COUNT(*) FROM events WHERE task_id IS NULL") == len(called(world))


def test_a_callback_gets_its_arguments_and_the_progress_object(world: World) -> None:
    app = world.app()
    seen: list[tuple[Any, ...]] = []

    @app.worker
    def listener(*args: Any) -> None:
        seen.append(args)

    with world.working(app):
        task = app.submit(
            "note",
            [{"n": 1}, {"n": 2, "refuse": True}],
            title="T",
            on_complete={"worker": listener, "args": [{"to": 7}, None]},
        )
        progress = over(task)
    ((to, nothing, said),) = seen
    assert (to, nothing) == ({"to": 7}, None)
    assert said.keys() == progress.keys()
    assert (said["state"], said["done"], said["callbacks"][0]["status"]) == ("finalizing", False, "enqueue")
    same = ("task_id", "title", "counts", "split", "top_errors", "generation", "jobs")
    assert {name: said[name] for name in same} == {name: progress[name] for name in same}


@pytest.mark.each_database(reason="the rows of a cancel are turned by statements of each one's own")
def test_a_cancelled_task_calls_back_after_its_last_row(world: World) -> None:
    app = world.app()
    task = app.submit("gated", numbers(3), **ALL)
    other = app.submit("note", numbers(1, 10), session="s", **ALL)
    other.cancel()
    with world.working(app, concurrency=2):
        wait_for(lambda: len(world.shop.performed("began")) == 2, "two have begun")
        task.cancel()
        assert states(task) == dict.fromkeys(CALLBACKS)
        with held(world):
            world.open_gate()
            wait_for(lambda: world.shop.performed("told")[1] >= 2, "they are called")
            assert (task.progress()["state"], task.progress()["done"]) == ("cancelled", False)
            with pytest.raises(Conflict, match="is cancelled"):
                task.retry("cancelled")
        assert over(task)["state"] == over(other)["state"] == "cancelled"
    assert called(world) == sorted(2 * follow("on_complete", "on_failure"))
    world.check_promises(app, [task.id, other.id], 4)


def test_a_list_of_which_nothing_is_accepted_calls_nobody(world: World) -> None:
    app = world.app()
    with world.working(app):
        empty = app.submit("order", [], **ALL)
        refused = app.submit("order", [{"n": "many", "kind": "ok"}], **ALL)
        assert {over(task)["state"] for task in (empty, refused)} == {"rejected"}
        over(app.submit("note", numbers(1)))
    assert called(world) == []
    assert app.doctor() == []


@pytest.mark.parametrize("count", [3, 1_200])
def test_lists_that_are_split_call_back_too(world: World, count: int) -> None:
    app = world.app()
    with world.working(app):
        program = app.submit("note", iter(numbers(count)), **ALL)
        items = app.submit_items("note", numbers(count), **ALL)
        body = "n,kind\n" + "".join(f"{n},ok\n" for n in range(3))
        file = app.submit_file("order", app.uploads.store(io.BytesIO(body.encode()), "a.csv"), **ALL)
        for task in (program, items, file):
            over(task)
    assert called(world) == sorted(3 * follow("on_complete", "on_success"))


# -- what may be said of them


def test_a_worker_has_callbacks_for_its_tasks_and_a_submission_has_the_last_word(world: World) -> None:
    app = world.app()

    @app.worker(on_complete=app.workers["told"], on_failure={"worker": "later", "args": ["own"]})
    def careful(item: dict[str, Any]) -> None: ...

    with pytest.raises(UnknownWorker, match="on_failure"):
        app.submit(careful, numbers(1))

    @app.worker
    def later(word: str, progress: dict[str, Any]) -> None: ...

    with world.working(app):
        task = app.submit(careful, numbers(1), on_complete={"worker": "told", "args": ["given"]})
        over(task)
    assert called(world) == [(1, "given")]
    assert [(each["name"], each["worker"]) for each in task.progress()["callbacks"]] == [
        ("on_complete", "told"),
        ("on_failure", "later"),
    ]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("nobody", "no worker is registered as 'nobody'"),
        ({"worker": "nobody"}, "no worker is registered as 'nobody'"),
        ("plain", "its jobs are not tracked"),
        ("", "must be a worker's name or"),
        ({"args": []}, "must be a worker's name or"),
        ({"worker": "told", "arg": []}, "must be a worker's name or"),
        ({"worker": "told", "args": "x"}, "must be a worker's name or"),
        ({"worker": "told", "args": [{1}]}, "arguments that are no JSON"),
        ({"worker": "told", "args": ["x" * 70_000]}, "the most is 65,536"),
        ('{"worker": ', "is no JSON"),
    ],
)
def test_what_cannot_be_called_back_is_refused_before_anything_is_written(world: World, said: Any, why: str) -> None:
    app = world.app()
    stored = app.uploads.store(io.BytesIO(b"n,kind\n1,ok\n"), "a.csv")
    for submit in (
        lambda: app.submit("note", numbers(1), on_success=said),
        lambda: app.check("note", numbers(1), on_success=said),
        lambda: app.submit_items("note", numbers(1), on_success=said),
        lambda: app.submit_file("order", stored, on_success=said),
    ):
        with pytest.raises(InputError, match=why) as raised:
            submit()
        assert "on_success" in str(raised.value)
    assert world.one("SELECT COUNT(*) FROM tasks") == 0
    assert not stored.path.exists()


def test_a_default_that_cannot_be_is_refused_where_the_worker_is_registered(world: World) -> None:
    with pytest.raises(ConfigError, match="on_complete must be a worker's name or"):
        world.app().worker(on_complete={"worker": 7})(lambda item: None)


def test_the_same_key_with_another_callback_is_another_body(world: World) -> None:
    app = world.app()
    first = app.submit("note", numbers(1), idempotency_key="k", on_complete="told")
    assert app.submit("note", numbers(1), idempotency_key="k", on_complete={"worker": "told"}).id == first.id
    with pytest.raises(InputError, match="another body"):
        app.submit("note", numbers(1), idempotency_key="k", on_complete={"worker": "told", "args": [1]})


# -- exactly once


@pytest.mark.each_database(reason="the compare-and-set is each one's own")
def test_of_racing_closers_one_queues_the_callbacks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    apps = [world.app() for _ in range(4)]
    ids = [apps[0].submit("note", numbers(1), **ALL).id for _ in range(8)]
    monkeypatch.setattr(standalone, "close_after", lambda ledger, record: None)
    for (job_id,) in world.sql("SELECT job_id FROM events"):
        assert apps[0].record(job_id, "finish")
    barrier, won = threading.Barrier(len(apps)), []

    def race(app: AsyncTask) -> None:
        for task_id in ids:
            barrier.wait()
            won.append((task_id, try_close(app.ledger, task_id)))

    threads = [threading.Thread(target=race, args=(app,)) for app in apps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sweep(apps[0]).close()  # what a locked row kept all of them from
    assert len(won) == len(apps) * len(ids)
    assert len([task_id for task_id, closed in won if closed]) <= len(ids)
    queued = world.sql(
        "SELECT callback_of, COUNT(*) FROM events WHERE callback_of IS NOT NULL GROUP BY callback_of ORDER BY 1"
    )
    assert queued == [(task_id, 2) for task_id in ids]
    with world.working(apps[0]):
        for task_id in ids:
            over(apps[0].task(task_id))
    assert called(world) == sorted(len(ids) * follow("on_complete", "on_success"))
    world.check_promises(apps[0], ids, len(ids))


def test_what_closes_small_tasks_together_leaves_one_with_callbacks(world: World) -> None:
    app = world.app()
    ids = [app.submit("note", numbers(1)).id, app.submit("note", numbers(1), on_failure="told").id]
    world.sql("UPDATE events SET status = 'finish', finished_at = 1")
    assert tasks.close_small(app.ledger, ids) == ids[:1]


@pytest.mark.parametrize("broker_kind", ["redis"])
def test_a_callback_that_is_delivered_twice_is_called_once(world: World) -> None:
    app = world.app()
    with world.working(app):
        task = app.submit("note", numbers(1), on_complete=ALL["on_complete"])
        with held(world):
            wait_for(lambda: called(world), "it is called")
            event = app.event(task.progress()["callbacks"][0]["job_id"])
            job = build("told", event["params"], event["job_id"], "callbacks", 4, 0, attempt=1, callback_of=task.id)
            again = Copy(event["job_id"], event["attempt"], "callbacks", dump(job))
            broker_of(app).push([again])
        over(task)
        broker_of(app).push([again])
        wait_for(lambda: not world.broker.left(), "the copies are taken")
    assert called(world) == follow("on_complete")


def test_a_retry_opens_a_generation_with_callbacks_of_its_own(world: World) -> None:
    app = world.app()

    @app.worker(retry=0)
    def fragile(item: dict[str, Any]) -> None:
        if item["n"] and not (world.folder / "gate").exists():
            raise ValueError("broken")

    with world.working(app):
        task = app.submit(fragile, numbers(2), **ALL)
        over(task)
        first = {each["job_id"] for each in task.progress()["callbacks"]}
        world.open_gate()
        assert task.retry()
        over(task)
    assert first & {each["job_id"] for each in task.progress()["callbacks"]} == {None}
    assert called(world) == follow("on_complete", "on_failure") + follow("on_complete", "on_success", generation=2)
    world.check_promises(app, [task.id], 2, generations=2)


def test_of_the_dead_that_are_restarted_the_callbacks_of_an_earlier_generation_are_left(world: World) -> None:
    app = world.app()
    (world.folder / "untold").touch()
    with world.working(app):
        task = app.submit("note", [{"n": 1, "bug": True}], **ALL)
        over(task)
        (world.folder / "untold").unlink()
        result = app.operations.act_on_all("dead", "restart")
        assert result.done == 1
        assert len(result.skipped) == 2
        assert "of an earlier generation" in str(result.skipped)
        wait_for(lambda: task.progress()["generation"] == 2 and task.progress()["done"], "the second generation is over")
    again = [call for call in called(world) if call[0] == 2]
    assert again == follow("on_complete", "on_failure", generation=2)


# -- while they run


def test_a_task_is_finalizing_until_its_callbacks_have_run(world: World) -> None:
    app = world.app()
    with world.working(app):
        with held(world):
            task = app.submit("note", numbers(2), session="s", on_complete=ALL["on_complete"])
            after = app.submit("note", numbers(1, 5), session="s")
            wait_for(lambda: called(world), "it is called")
            progress = task.progress()
            assert (progress["state"], progress["done"], progress["finished_at"]) == ("finalizing", False, None)
            assert progress["progress"]["percent"] == 100.0
            assert over(after)["state"] == "finished", "the session has passed on"
            for refused in (task.pause, task.resume, task.cancel, task.retry):
                with pytest.raises(Conflict, match="is finalizing"):
                    refused()
            assert task.run_callbacks() is False
        assert over(task)["state"] == "finished"
        assert task.progress()["counts"] == {**progress["counts"]}
    with pytest.raises(Conflict, match="no callback of Task"):
        task.run_callbacks()


@pytest.mark.each_database(reason="they are opened again by statements of each one's own")
def test_a_callback_that_fails_five_times_is_told_and_can_be_run_again(world: World) -> None:
    app = world.app()
    (world.folder / "untold").touch()
    with world.working(app):
        task = app.submit("note", numbers(1), **ALL)
        progress = over(task)
        assert (progress["state"], progress["state_reason"]) == ("finished", "callback_failed")
        assert states(task) == {"on_complete": "error", "on_success": "error", "on_failure": None}
        assert called(world) == sorted(5 * follow("on_complete", "on_success"))
        assert progress["counts"] == {**dict.fromkeys(progress["counts"], 0), "total": 1, "finish": 1}
        (world.folder / "untold").unlink()
        with held(world):
            assert task.run_callbacks(who="me") is True
            assert (task.progress()["state"], task.progress()["state_reason"]) == ("finalizing", None)
        progress = over(task)
    assert (progress["state"], progress["state_reason"], progress["generation"]) == ("finished", None, 1)
    assert called(world) == sorted(6 * follow("on_complete", "on_success"))
    assert [(e["action"], e["who"]) for e in task.log()][:3] == [
        ("called_back", ""),
        ("callbacks retried", "me"),
        ("callback_failed", ""),
    ]
    world.check_promises(app, [task.id], 1)


def test_of_a_cancelled_task_they_can_be_run_again_too(world: World) -> None:
    app = world.app()
    (world.folder / "untold").touch()
    task = app.submit("note", numbers(1), **ALL)
    task.cancel()
    with world.working(app):
        assert over(task)["state_reason"] == "callback_failed"
        (world.folder / "untold").unlink()
        assert task.run_callbacks()
        wait_for(lambda: task.progress()["done"] and task.progress()["state_reason"] is None, "they have run")
        assert task.progress()["state"] == "cancelled"
        task.retry("cancelled")
        assert over(task)["counts"]["finish"] == 1
    assert called(world)[-2:] == follow("on_complete", "on_success", generation=2)


def test_a_dead_callback_that_is_restarted_as_a_job_ends_its_task_well(world: World) -> None:
    app = world.app()
    (world.folder / "untold").touch()
    with world.working(app):
        task = app.submit("note", numbers(1), on_complete=ALL["on_complete"])
        over(task)
        (world.folder / "untold").unlink()
        with held(world):
            assert app.operations.act("dead", "restart", [task.progress()["callbacks"][0]["job_id"]]).done == 1
            assert task.progress()["state"] == "finalizing"
        assert over(task)["state_reason"] is None


def test_a_waiting_callback_that_is_cancelled_counts_as_failed(world: World) -> None:
    app = world.app()
    task = app.submit("note", numbers(1), on_complete="told")
    with world.working(app, queues={"default": 1}):
        wait_for(lambda: task.progress()["state"] == "finalizing", "its items are over")
    event = app.event(task.progress()["callbacks"][0]["job_id"])
    assert queries.act_on_waiting(app.ledger, "delete", [event["id"]]) == 1
    assert (task.progress()["state"], task.progress()["state_reason"]) == ("finished", "callback_failed")
    assert app.doctor() == []


# -- what dies in between


@pytest.mark.each_database(reason="the sweep looks for them by a statement of its own")
def test_maintenance_ends_a_task_whose_callbacks_are_over(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    app = world.app()
    task = app.submit("note", numbers(1), **ALL)
    waits = app.submit("note", numbers(1), on_complete="told")
    monkeypatch.setattr(recorder, "try_finish", lambda ledger, task_id: False)
    with monkeypatch.context() as patched:
        patched.setattr("asynctask.maintenance.try_finish", lambda ledger, task_id: False)
        with world.working(app):
            wait_for(lambda: states(task)["on_success"] == states(task)["on_complete"] == "finish", "they have run")
    assert task.progress()["state"] == "finalizing"
    world.sql("UPDATE events SET status = 'enqueue' WHERE callback_of = ?", waits.id)
    sweep(app).close()
    assert (task.progress()["state"], task.progress()["done"]) == ("finished", True)
    assert waits.progress()["state"] == "finalizing"


def test_of_two_processes_that_end_its_callbacks_one_ends_the_task(world: World) -> None:
    apps = [world.app(), world.app()]
    task = apps[0].submit("note", numbers(1), **ALL)
    with world.working(apps[0], concurrency=1), world.working(apps[1], concurrency=1):
        over(task)
    assert [e["action"] for e in task.log()].count("called_back") == 1
    assert try_finish(apps[0].ledger, task.id) is False


def test_the_doctor_finds_callbacks_that_do_not_fit_the_outcome(world: World) -> None:
    app = world.app()
    with world.working(app):
        task = app.submit("note", numbers(1), **ALL)
        over(task)
    assert app.doctor() == []
    world.sql("UPDATE task_callbacks SET name = 'on_failure' WHERE name = 'on_success'")
    world.sql(
        "UPDATE events SET status = 'enqueue' WHERE callback_of = ? AND job_id IN (SELECT job_id FROM task_callbacks"
        " WHERE name = 'on_complete')",
        task.id,
    )
    (found,) = app.doctor()
    assert (found.code, found.task_id) == ("callbacks", task.id)
    for words in ("on_success was not queued", "on_failure was queued and does not follow", "on_complete is enqueue"):
        assert words in found.message
    world.sql("UPDATE task_callbacks SET task_id = 99")
    assert "orphan_callbacks" in {each.code for each in app.doctor()}


# -- around them


def test_they_wait_in_the_queue_that_the_settings_name(world: World) -> None:
    app = world.app(callback_queue="afterwards")
    task = app.submit("note", numbers(1), on_complete=ALL["on_complete"])
    with world.working(app):  # the queues that a worker has by default
        wait_for(lambda: task.progress()["state"] == "finalizing", "its item is over")
    assert app.event(task.progress()["callbacks"][0]["job_id"])["queue"] == "afterwards"
    with world.working(app, queues={"afterwards": 1}):
        over(task)
    with pytest.raises(ConfigError, match="callback_queue"):
        world.app(callback_queue="a b")


def test_callbacks_pass_the_client_middleware(world: World) -> None:
    app = world.app()

    def stop(worker: Any, job: Any, queue: str, call_next: Any) -> Any:
        if worker.name == "told" and job.payload["args"][0] == "on_success":
            return None
        return call_next()

    app.client_middleware.add(stop)
    with world.working(app):
        task = app.submit("note", numbers(1), **ALL)
        assert over(task)["state_reason"] == "callback_failed"
    assert called(world) == follow("on_complete")
    assert "stopped by a client middleware" in str(app.event(task.progress()["callbacks"][1]["job_id"])["messages"])


def test_observers_are_told_once_of_each_generation(world: World) -> None:
    app = world.app()
    seen: list[tuple[int, int, str]] = []

    @app.on("task_finished")
    def breaks(progress: dict[str, Any]) -> None:
        raise ValueError("an observer")

    @app.on("task_finished")
    def note(progress: dict[str, Any]) -> None:
        seen.append((progress["task_id"], progress["generation"], threading.current_thread().name))

    with world.working(app):
        small, large = app.submit("note", numbers(1)), app.submit("note", [*numbers(150), {"n": 1, "bug": True}])
        over(small), over(large)
        large.retry()
        wait_for(lambda: len(seen) == 3, "each close was told")
        over(large)
        cancelled = app.submit("note", numbers(1), queue="nowhere")
        cancelled.cancel()
        wait_for(lambda: len(seen) == 4, "the last was told")
    assert sorted(seen) == [
        (small.id, 1, "observers"),
        (large.id, 1, "observers"),
        (large.id, 2, "observers"),
        (cancelled.id, 1, "observers"),
    ]


def test_a_task_without_callbacks_pays_nothing_for_them(world: World) -> None:
    app = world.app()
    with world.working(app):
        task = app.submit("note", numbers(1))
        over(task)
    assert task.progress()["callbacks"] == []
    assert world.sql("SELECT callbacks FROM tasks") == [(None,)]
    assert world.one("SELECT COUNT(*) FROM task_callbacks") == 0


assert tasks.CALLBACK_RETRIES == 4
