"""The operations on a whole application: on tracked jobs, and on untracked ones in the ledger and in Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from support.borrowing import borrow_alone, offers
from support.broker_suite import untracked
from support.databases import Store
from support.untracked import dead as dead_jobs
from support.untracked import hold

from asynctask import AsyncTask
from asynctask.brokers.base import DEAD, RETRY, Copy, SetEntry
from asynctask.clock import SECOND
from asynctask.database.tables import processes, tasks
from asynctask.errors import Conflict, InputError, NotFound
from asynctask.integrations.remote import Reporter
from asynctask.ledger import processes as recovery
from asynctask.testing import wait_for

LATER = 3_600


pytestmark = [
    pytest.mark.one_database(reason="what stands on the ledger and on a broker is the same on each database"),
    pytest.mark.parametrize("broker_kind", ["sql", "redis"]),
]


@pytest.fixture
def app(request: pytest.FixtureRequest, store: Store, broker_kind: str, tmp_path: Path) -> Iterator[AsyncTask]:
    """An application whose untracked jobs wait in its ledger, and one with Redis as the broker."""
    settings: dict[str, Any] = {"heartbeat_s": 0.5}
    if broker_kind == "redis":
        server = request.getfixturevalue("redis_server")
        with server.client() as client:
            client.flushall()
        settings["broker_url"] = server.url
    made = AsyncTask(environ={}, database_url=store.url, data_dir=str(tmp_path / "data"), **settings)
    fails = tmp_path / "fails"
    fails.touch()

    @made.worker(retry=0)
    def once(item: dict[str, Any]) -> None:
        if fails.exists():
            raise ValueError("a bug")

    @made.worker(retry=3, retry_in=lambda *_: LATER)
    def again(item: dict[str, Any]) -> None:
        if fails.exists():
            raise ValueError("for now")

    @made.worker(use_task_event=False, retry=0)
    def loose(item: dict[str, Any]) -> None:
        pass

    yield made
    made.close()


@pytest.fixture
def run(app: AsyncTask) -> Callable[[Callable[[], bool]], None]:
    """Runs a worker within this process until something holds."""

    def until(holds: Callable[[], bool]) -> None:
        launcher = app.launcher(concurrency=2, shutdown_s=5)
        launcher.start()
        try:
            wait_for(holds, "the jobs have come to something")
        finally:
            launcher.stop()

    return until


def counts(app: AsyncTask, task_id: int) -> dict[str, int]:
    return {name: n for name, n in app.progress(task_id)["counts"].items() if n and name != "total"}


def keys(listed: dict[str, Any]) -> list[str]:
    return [entry["key"] for entry in listed["entries"]]


def sound(app: AsyncTask) -> None:
    assert app.doctor() == []


def mend(app: AsyncTask) -> None:
    (Path(app.config.data_dir).parent / "fails").unlink()


@pytest.fixture
def retrying(app: AsyncTask, run: Callable[[Callable[[], bool]], None]) -> int:
    """A Task of three jobs that wait for a retry in an hour."""
    task = app.submit("again", [{"n": n} for n in range(3)])
    run(lambda: task.progress()["retrying"] == 3)
    return task.id


@pytest.fixture
def dead(app: AsyncTask, run: Callable[[Callable[[], bool]], None]) -> int:
    """A Task of three jobs that ended in an error."""
    task = app.submit("once", [{"n": n} for n in range(3)])
    run(lambda: bool(task.progress()["done"]))
    return task.id


# -- retries


def test_tracked_and_untracked_retries_are_one_list_those_due_first(app: AsyncTask, retrying: int) -> None:
    now = app.clock.now()
    hold(
        app,
        RETRY,
        [
            SetEntry(untracked(1, retry_count=1, error_message="boom", error_class="E"), now + SECOND),
            SetEntry(untracked(2), now + 2 * LATER * SECOND),
        ],
    )
    found = app.operations.listed("retries")
    assert [entry["tracked"] for entry in found["entries"]] == [False, True, True, True, False]
    assert (found["total"], found["next"]) == (5, None)
    first, second = found["entries"][:2]
    said = (first["worker"], first["retries"], first["error"], first["args"])
    assert said == ("Hard", 2, "boom", [1])
    assert first["error_class"] == ("E" if app.broker is not None else None), "in the ledger the message names it"
    assert (second["worker"], second["retries"], second["task_id"]) == ("again", 1, retrying)
    assert sorted(entry["args"][0]["n"] for entry in found["entries"][1:4]) == [0, 1, 2]
    assert "for now" in second["error"]
    pages = [app.operations.listed("retries", after=after, limit=2) for after in (0, 2, 4)]
    assert [key for page in pages for key in keys(page)] == keys(found)
    assert [page["next"] for page in pages] == [2, 4, None]


def test_deleting_a_tracked_retry_cancels_its_item_and_the_last_one_ends_the_task(app: AsyncTask, retrying: int) -> None:
    first, *rest = keys(app.operations.listed("retries"))
    assert app.operations.act("retries", "delete", [first], who="me").done == 1
    assert counts(app, retrying) == {"enqueue": 2, "cancelled": 1}
    assert app.event(first)["status"] == "cancelled"
    assert app.operations.act("retries", "delete", [first]).skipped, "it does not wait any more"
    assert app.operations.act("retries", "kill", rest, who="me").done == 2
    assert counts(app, retrying) == {"cancelled": 1, "error": 2}
    assert app.progress(retrying)["done"]
    assert app.event(rest[0])["problem"] == "killed"
    log = [(each["who"], each["action"]) for each in app.task(retrying).log()]
    assert ("me", "jobs cancelled") in log
    assert ("me", "jobs killed") in log
    sound(app)


def test_restarting_a_tracked_retry_runs_it_now_and_the_others_wait_on(
    app: AsyncTask, retrying: int, run: Callable[[Callable[[], bool]], None]
) -> None:
    mend(app)
    first = keys(app.operations.listed("retries"))[0]
    assert app.operations.act("retries", "restart", [first]).done == 1
    with app.ledger.database.read() as connection:
        hints = connection.execute(sa.select(tasks.c.ready, tasks.c.due_next).where(tasks.c.id == retrying)).one()
    assert hints.ready is not None or hints.due_next <= app.clock.now(), "the dispatcher is told, nobody has to find it"
    run(lambda: counts(app, retrying) == {"enqueue": 2, "finish": 1})
    assert app.event(first)["status"] == "finish"
    assert app.operations.act_on_all("retries", "restart").done == 2
    run(lambda: bool(app.progress(retrying)["done"]))
    assert counts(app, retrying) == {"finish": 3}
    sound(app)


@pytest.mark.parametrize(("action", "ends"), [("delete", "cancelled"), ("kill", "error")])
def test_an_action_on_all_takes_tracked_and_untracked_ones(app: AsyncTask, retrying: int, action: str, ends: str) -> None:
    hold(app, RETRY, [SetEntry(untracked(n), app.clock.now() + LATER * SECOND) for n in range(4)])
    assert app.operations.act_on_all("retries", action).done == 7
    assert app.operations.listed("retries")["total"] == 0
    assert counts(app, retrying) == {ends: 3}
    assert len(dead_jobs(app)) == (4 if action == "kill" else 0)
    sound(app)


def test_restarting_all_leaves_what_is_no_job_and_says_so(app: AsyncTask) -> None:
    """In Redis, where any program can put it."""
    if app.broker is None:
        return
    now = app.clock.now()
    held = [SetEntry(Copy(f"bad-{n}", 0, "default", f"no job {n}"), now + n) for n in range(3)]
    app.broker.hold(RETRY, [*held, *(SetEntry(untracked(n), now + 10 + n) for n in range(5))])
    result = app.operations.act_on_all("retries", "restart")
    assert result.done == 5
    assert len(result.skipped) == 3
    left = app.operations.listed("retries")["entries"]
    assert [entry["raw"] for entry in left] == ["no job 0", "no job 1", "no job 2"]
    assert app.operations.act("retries", "delete", [entry["key"] for entry in left]).done == 3


# -- scheduled


def test_a_scheduled_job_is_listed_started_early_or_cancelled(app: AsyncTask) -> None:
    again, loose = app.workers["again"], app.workers["loose"]
    tracked = [again.perform_in(LATER, {"n": n}) for n in range(2)]
    loose.perform_in(LATER, {"n": 9})
    found = app.operations.listed("scheduled")
    assert [entry["tracked"] for entry in found["entries"]].count(True) == 2
    assert found["total"] == 3
    assert app.operations.act("scheduled", "delete", [str(tracked[0])]).done == 1
    assert app.event(str(tracked[0]))["status"] == "cancelled"
    first, last = app.operations.listed("scheduled")["entries"]
    assert (first["key"], last["tracked"]) == (tracked[1], False)
    assert app.operations.act_on_all("scheduled", "restart").done == 2
    assert app.operations.listed("scheduled")["total"] == 0


# -- the dead


def test_restarting_one_dead_job_opens_a_generation_for_it_alone(
    app: AsyncTask, dead: int, run: Callable[[Callable[[], bool]], None]
) -> None:
    mend(app)
    before = app.progress(dead)["generation"]
    first = keys(app.operations.listed("dead"))[0]
    assert app.operations.act("dead", "restart", [first], who="me").done == 1
    assert app.progress(dead)["generation"] == before + 1
    assert not app.progress(dead)["done"]
    assert counts(app, dead) == {"enqueue": 1, "error": 2}
    run(lambda: bool(app.progress(dead)["done"]))
    assert counts(app, dead) == {"finish": 1, "error": 2}
    assert app.operations.act("dead", "restart", [first]).done == 0
    assert app.operations.act_on_all("dead", "restart").done == 2
    run(lambda: bool(app.progress(dead)["done"]))
    assert counts(app, dead) == {"finish": 3}
    sound(app)


def test_the_outcome_of_a_dead_tracked_job_is_not_deleted_and_the_reason_is_said(app: AsyncTask, dead: int) -> None:
    hold(app, DEAD, [SetEntry(untracked(n), app.clock.now()) for n in range(2)])
    first = next(entry["key"] for entry in app.operations.listed("dead")["entries"] if entry["tracked"])
    result = app.operations.act("dead", "delete", [first])
    assert result.done == 0
    assert "stays recorded" in str(result.skipped[first])
    assert app.operations.act_on_all("dead", "delete").done == 2
    assert app.operations.listed("dead")["total"] == 3
    assert counts(app, dead) == {"error": 3}
    with pytest.raises(InputError, match="cannot be killed"):
        app.operations.act("dead", "kill", [first])


def test_what_is_dismissed_leaves_the_dead_keeps_its_record_and_comes_back_with_its_next_error(
    app: AsyncTask, dead: int, run: Callable[[Callable[[], bool]], None]
) -> None:
    lone = str(app.workers["once"].perform_async({"n": 9}))
    run(lambda: app.event(lone)["status"] == "error")
    hold(app, DEAD, [SetEntry(untracked(1), app.clock.now())])
    first, second, third = (event["job_id"] for event in app.task(dead).events())
    loose = next(entry["key"] for entry in app.operations.listed("dead")["entries"] if not entry["tracked"])

    result = app.operations.act("dead", "dismiss", [first, lone, loose, "nobody"], who="me")
    assert (result.done, set(result.skipped)) == (2, {loose, "nobody"})
    assert [entry["key"] for entry in app.operations.listed("dead")["entries"]].count(first) == 0
    assert (app.operations.listed("dead")["total"], counts(app, dead)) == (3, {"error": 3}), "its outcome stays"
    assert app.operations.search("dead", "once")["entries"]
    assert first not in {entry["key"] for entry in app.operations.search("dead", "once")["entries"]}
    assert (app.operations.job(first)["dismissed"], app.operations.job(second)["dismissed"]) == (True, False)
    assert app.operations.job(first)["actions"] == ["restart"]
    assert app.operations.job(second)["actions"] == ["restart", "dismiss"]
    with pytest.raises(Conflict, match="dismissed already"):
        app.operations.act_on_job(first, "dismiss")
    with pytest.raises(InputError, match="only dead jobs"):
        app.operations.act("retries", "dismiss", [first])
    log = [each for each in app.task(dead).log() if each["action"] == "jobs dismissed"]
    assert [(each["who"], each["detail"]) for each in log] == [("me", {"jobs": 1, "first": first})]

    assert app.operations.act_on_all("dead", "dismiss").done == 2
    assert app.operations.listed("dead")["total"] == 1, "the untracked one has no record"
    assert app.operations.act_on_all("dead", "restart").done == 1
    for job_id in (first, lone):
        assert app.operations.act_on_job(job_id, "restart")["status"] == "enqueue"
    run(lambda: {first, lone} <= set(keys(app.operations.listed("dead"))))
    assert counts(app, dead) == {"error": 3}
    assert not app.operations.job(first)["dismissed"], "an error of its next attempt is another one"
    assert app.operations.job(third)["dismissed"]
    sound(app)


def test_a_restart_of_all_the_dead_leaves_what_is_dismissed(
    app: AsyncTask, dead: int, run: Callable[[Callable[[], bool]], None]
) -> None:
    mend(app)
    first = app.task(dead).events()[0]["job_id"]
    assert app.operations.act_on_job(first, "dismiss")["dismissed"]
    assert app.operations.act_on_all("dead", "restart").done == 2
    run(lambda: bool(app.progress(dead)["done"]))
    assert counts(app, dead) == {"finish": 2, "error": 1}
    assert app.event(first)["status"] == "error"


def test_a_single_dead_job_without_a_task_runs_again(app: AsyncTask, run: Callable[[Callable[[], bool]], None]) -> None:
    jid = str(app.workers["once"].perform_async({"n": 1}))
    run(lambda: app.event(jid)["status"] == "error")
    mend(app)
    assert app.operations.act("dead", "restart", [jid]).done == 1
    run(lambda: app.event(jid)["status"] == "finish")


def test_a_dead_job_of_a_paused_task_is_not_restarted(app: AsyncTask) -> None:
    task = app.submit("once", [{"n": 0}, {"n": 1}])
    jid = task.events()[0]["job_id"]
    app.record(jid, "error")
    task.pause()
    result = app.operations.act("dead", "restart", [jid])
    assert result.done == 0
    assert "paused" in str(result.skipped[jid])


# -- search


def test_a_search_finds_tracked_and_untracked_ones_by_what_they_hold(app: AsyncTask, retrying: int) -> None:
    now = app.clock.now()
    hold(app, RETRY, [SetEntry(untracked(n, note=f"say {n}"), now + (n + 1) * SECOND) for n in range(3)])
    assert [entry["args"] for entry in app.operations.search("retries", '"n":1')["entries"]] == [[{"n": 1}]]
    assert [entry["args"] for entry in app.operations.search("retries", "say 2")["entries"]] == [[2]]
    assert len(app.operations.search("retries", "again")["entries"]) == 3
    some = app.operations.search("retries", "a", limit=2)
    assert len(some["entries"]) == 2
    assert not some["complete"]
    assert app.operations.search("retries", "nothing of this")["entries"] == []


# -- queues


def test_queues_show_what_waits_and_whether_anybody_works_them(app: AsyncTask) -> None:
    app.workers["loose"].set(queue="lonely").perform_async({"n": 1})
    (queue,) = app.operations.queues()
    assert (queue["name"], queue["length"], queue["next_worker"]) == ("lonely", 1, "loose")
    assert queue["unattended"]
    launcher = app.launcher(concurrency=1, queues={"other": 1, "busy": 1}, shutdown_s=5)
    launcher.start()
    try:
        found = {each["name"]: (each["processes"], each["unattended"]) for each in app.operations.queues()}
        assert found == {"busy": (1, False), "lonely": (0, True), "other": (1, False)}, "idle ones can be paused"
        app.workers["loose"].set(queue="other").perform_async({"n": 1})
        (process,) = [each for each in app.operations.processes() if each["kind"] == "worker"]
        assert (process["alive"], sorted(process["queues"])) == (True, ["busy", "other"])
    finally:
        launcher.stop()


def works_in_ruby(app: AsyncTask) -> None:
    """A process in another language works the queue ``default``: what waits is pushed to it."""
    app.record_all([], Reporter("sidekiq", "host:7:abc", concurrency=100, queues=["default"]))
    app.dispatcher.run_pass()


def test_deleting_a_tracked_job_from_its_queue_cancels_its_item(app: AsyncTask) -> None:
    task = app.submit("once", [{"n": n} for n in range(5)])
    assert app.operations.jobs("default")["jobs"] == [], "it is a list of untracked ones"
    if app.broker is None:
        return
    works_in_ruby(app)
    waiting = app.operations.jobs("default")["jobs"]
    assert [job["args"] for job in waiting] == [[{"n": n}] for n in range(5)]
    result = app.operations.delete_jobs("default", [waiting[0]["key"], "nobody"])
    assert (result.done, list(result.skipped)) == (1, ["nobody"])
    assert counts(app, task.id) == {"enqueue": 4, "cancelled": 1}
    app.workers["loose"].perform_async({"n": 9})
    page = app.operations.jobs("default", limit=2)
    assert (page["total"], page["next"]) == (5, 2)
    assert app.operations.clear_queue("default").done == 5
    assert counts(app, task.id) == {"cancelled": 5}
    assert app.progress(task.id)["done"]
    assert app.operations.jobs("default")["total"] == 0
    sound(app)


def test_a_single_job_is_acted_on_wherever_it_waits(app: AsyncTask, run: Callable[[Callable[[], bool]], None]) -> None:
    operations = app.operations
    once = app.workers["once"]
    killed, due, queued = (str(once.perform_async({"n": n})) for n in range(3))
    assert operations.job(killed)["actions"] == ["restart", "kill", "delete", "stop"], (
        "nobody works its queue: the ledger has it"
    )
    assert operations.act_on_job(killed, "kill")["problem"] == "killed"
    assert operations.act_on_job(due, "delete")["status"] == "cancelled"
    with pytest.raises(Conflict, match="stays recorded"):
        operations.act_on_job(due, "delete")
    with pytest.raises(Conflict, match="it ended cancelled"):
        operations.act_on_job(due, "restart")
    another = app.ledger.under("another")
    if app.broker is None:
        assert [job.job_id for job in borrow_alone(another)] == [queued]
    else:
        works_in_ruby(app)
    assert operations.job(queued)["actions"] == ["delete", "stop"], "somebody has it"
    with pytest.raises(Conflict, match="when its turn comes"):
        operations.act_on_job(queued, "restart")
    with pytest.raises(Conflict, match="delete it"):
        operations.act_on_job(queued, "kill")
    if app.broker is None:
        with pytest.raises(Conflict):
            operations.act_on_job(queued, "delete")
        recovery.recover_events(app.ledger, "another")
    assert operations.act_on_job(queued, "delete")["status"] == "cancelled"
    assert operations.jobs("default")["total"] == 0
    with app.ledger.database.write() as connection:
        connection.execute(sa.delete(processes))  # nobody works in another language any more
    mend(app)
    assert operations.act_on_job(killed, "restart")["status"] == "enqueue"
    run(lambda: app.event(killed)["status"] == "finish")
    for unknown in ("nobody", "x" * 65, "a\0b"):
        with pytest.raises(NotFound):
            operations.act_on_job(unknown, "delete")
    with pytest.raises(InputError):
        operations.act_on_job(killed, "eat")


def test_a_queue_is_paused_with_redis_and_without(app: AsyncTask, run: Callable[[Callable[[], bool]], None]) -> None:
    mend(app)
    assert app.operations.pause("default")
    assert [queue["paused"] for queue in app.operations.queues() if queue["name"] == "default"] == [True]
    task = app.submit("once", [{"n": n} for n in range(5)])
    assert offers(app.ledger) == []
    assert app.operations.unpause("default")
    run(lambda: bool(task.progress()["done"]))


# -- untracked jobs


def test_tracked_jobs_without_a_task_are_listed_and_cleared_with_their_queue(app: AsyncTask) -> None:
    mend(app)
    loose, once = app.workers["loose"], app.workers["once"]
    jid, *ids = [str(worker.set(queue="stuck").perform_async({"n": 1})) for worker in (loose, once, once, once)]
    task = app.submit("once", [{"n": 2}], queue="stuck")
    (queue,) = app.operations.queues()
    assert (queue["waiting"], queue["length"], queue["tracked"]) == (5, 1, 3)
    first = app.operations.jobs("stuck", limit=2)
    rest = app.operations.jobs("stuck", after=first["next"])
    jobs = [*first["jobs"], *rest["jobs"]]
    assert (first["total"], rest["next"]) == (4, None)
    assert {job["job_id"]: job["tracked"] for job in jobs} == {jid: False, **dict.fromkeys(ids, True)}
    assert app.operations.delete_jobs("stuck", [ids[0]]).done == 1
    assert app.operations.clear_queue("stuck").done == 3
    assert [app.event(each)["status"] for each in ids] == ["cancelled"] * 3
    assert [each["waiting"] for each in app.operations.queues()] == [1], "the job of the Task stays"
    assert not task.progress()["done"]


def test_untracked_jobs_of_a_queue_are_listed_deleted_and_cleared_by_priority(app: AsyncTask) -> None:
    loose = app.workers["loose"]
    jids = [str(loose.set(priority=p).perform_async({"n": n})) for n, p in enumerate((240, 120, 340))]
    ordered = [0, 1, 2] if app.broker is not None else [1, 0, 2]  # a queue in Redis has no priorities
    page = app.operations.jobs("default", limit=2)
    assert [(job["args"], job["tracked"]) for job in page["jobs"]] == [([{"n": n}], False) for n in ordered[:2]]
    assert (page["total"], page["next"]) == (3, 2)
    newest = app.operations.jobs("default", newest=True)["jobs"]
    assert [job["key"] for job in newest] == [jids[n] for n in reversed(ordered)]
    result = app.operations.delete_jobs("default", [jids[0], "nobody"])
    assert (result.done, list(result.skipped)) == (1, ["nobody"])
    assert app.operations.clear_queue("default").done == 2
    assert app.operations.jobs("default")["total"] == 0
    assert app.operations.queues() == []


def test_an_untracked_job_is_no_event_and_in_no_list_of_events(
    app: AsyncTask, run: Callable[[Callable[[], bool]], None], tmp_path: Path
) -> None:
    """Not while it waits, and not among the dead."""

    @app.worker(use_task_event=False, retry=0)
    def wild(item: dict[str, Any]) -> None:
        raise ValueError("a bug")

    later, broken = str(app.workers["loose"].perform_in(LATER, {"n": 1})), str(wild.perform_async({"n": 2}))
    run(lambda: dead_jobs(app) == [broken])
    for jid in (later, broken):
        with pytest.raises(NotFound):
            app.event(jid)
        with pytest.raises(NotFound):
            app.operations.stop_job(jid)
    assert app.jobs() == []
    (entry,) = app.operations.listed("dead")["entries"]
    assert (entry["tracked"], entry["job_id"], entry["worker"], entry["args"]) == (False, broken, "wild", [{"n": 2}])
    assert "a bug" in entry["error"]
    assert app.operations.act("dead", "restart", [entry["key"]]).done == 1
    run(lambda: dead_jobs(app) == [broken])
    (entry,) = app.operations.listed("dead")["entries"]
    assert app.operations.act("dead", "delete", [entry["key"]]).done == 1
    assert app.operations.listed("dead")["total"] == 0
    sound(app)


# -- processes


def test_a_worker_process_is_quieted_and_stopped_and_others_are_refused(app: AsyncTask) -> None:
    launcher = app.launcher(concurrency=1, shutdown_s=5)
    launcher.start()
    try:
        identity = app.ledger.identity
        (process,) = app.operations.processes()
        assert (process["identity"], process["kind"], process["quiet"]) == (identity, "worker", False)
        app.operations.signal(identity, "quiet")
        wait_for(lambda: app.operations.processes()[0]["quiet"], "it is quiet")
        with pytest.raises(NotFound):
            app.operations.signal("nobody:1:0", "stop")
        with pytest.raises(InputError):
            app.operations.signal(identity, "restart")
    finally:
        launcher.stop()
    app.start_services()
    with pytest.raises(Conflict, match="web process"):
        app.operations.signal(identity, "quiet")


def test_a_process_that_was_declared_dead_is_still_told_so(app: AsyncTask) -> None:
    recovery.register(app.ledger, app.host, kind="worker", pid=1, lease_s=60)
    with app.ledger.database.write() as connection:
        connection.execute(processes.update().values(signal=recovery.LOST))
    assert not recovery.signal(app.ledger, app.ledger.identity, "TSTP")
    assert recovery.beat(app.ledger, lease_s=60) == "LOST"


# -- what cannot be


@pytest.mark.parametrize(
    "call",
    [
        lambda o: o.listed("queues"),
        lambda o: o.listed("dead", limit=0),
        lambda o: o.listed("dead", after=9_999, limit=2),
        lambda o: o.act("dead", "explode", ["1-2"]),
        lambda o: o.act("dead", "restart", []),
        lambda o: o.act("dead", "restart", ["x"] * 1 + [f"{n}" for n in range(1_001)]),
        lambda o: o.act("dead", "restart", ["\ud800"]),
        lambda o: o.act("dead", "restart", ["x" * 256]),
        lambda o: o.search("dead", ""),
        lambda o: o.jobs("a\0b"),
        lambda o: o.jobs(""),
    ],
)
def test_what_cannot_be_is_refused(app: AsyncTask, call: Callable[[Any], Any]) -> None:
    with pytest.raises(InputError):
        call(app.operations)


def test_keys_that_name_nothing_are_skipped_each_with_a_reason(app: AsyncTask) -> None:
    wanted = ["nonsense", "1.5-abc", "7-abc", "a\0b", "-", "1e999-x", "nan-x"]
    for name in ("retries", "scheduled", "dead"):
        result = app.operations.act(name, "delete", wanted)
        assert result.done == 0
        assert sorted(result.skipped) == sorted(wanted)
    assert app.operations.listed("scheduled")["total"] == 0
