"""Every knob and every operation, on a Task with a ``parallel`` and on one without, wherever jobs wait.

A case has the names under which people find it: a knob, a method, a command, a route. All names that exist are collected
from the program, so a new one without a case fails. Each case states what can be observed when it took effect.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click
import pytest
from support.broker_suite import untracked
from support.place_app import add_workers
from support.untracked import hold
from support.world import World, numbers

from asynctask import AsyncTask
from asynctask.brokers.base import DEAD, RETRY, SCHEDULE, SetEntry
from asynctask.cli.root import build
from asynctask.clock import SECOND
from asynctask.errors import Conflict, InputError
from asynctask.lists.options import Knobs
from asynctask.operations import FAILING, Operations
from asynctask.runtime.launcher import Launcher
from asynctask.task import TaskHandle
from asynctask.testing import wait_for
from webapi import create_app

THREADS: Final = 4
LIMIT: Final = 2
MANY: Final = 3_000
"""Jobs of a fiftieth of a second, which last for many times the second in which everything here takes effect."""

LATER: Final = 3_600


class Bench:
    """An application whose jobs run in this process. ``limit``: the ``parallel`` of the Tasks that it submits.

    ``work`` takes a fiftieth of a second, or until :attr:`leave` is set where its item says ``waits``; it fails where that
    says ``bug``, while :attr:`broken` is set. ``again`` is the same and retried in an hour, ``at_once`` retried at once,
    ``loose`` untracked.
    """

    def __init__(self, world: World, limit: int | None) -> None:
        self.world, self.limit = world, limit
        self.leave = threading.Event()
        self.broken = threading.Event()
        self.broken.set()
        self.began: list[int] = []
        self.most = 0
        self._running = 0
        self._lock = threading.Lock()
        self.app = world.app(queues="default other callbacks")
        self.app.worker(self._work, name="work", retry=0)
        self.app.worker(self._work, name="again", retry=3, retry_in=lambda *_: LATER)
        self.app.worker(self._work, name="at_once", retry=1_000, retry_in=lambda *_: 0.001)
        self.app.worker(self._work, name="loose", retry=0, use_task_event=False)
        add_workers(self.app, world.shop)
        self.operations: Operations = self.app.operations

    def _work(self, item: dict[str, Any]) -> None:
        with self._lock:
            self.began.append(item["n"])
            self._running += 1
            self.most = max(self.most, self._running)
        try:
            if item.get("waits"):
                assert self.leave.wait(120)
            else:
                threading.Event().wait(0.02)
            if item.get("bug") and self.broken.is_set():
                raise ValueError("a bug")
        finally:
            with self._lock:
                self._running -= 1

    @property
    def running(self) -> int:
        with self._lock:
            return self._running

    @property
    def places(self) -> int:
        """How many jobs of a Task run at once."""
        return self.limit or THREADS

    @contextmanager
    def working(self) -> Iterator[Launcher]:
        """A worker."""
        with self.world.working(self.app, concurrency=THREADS) as self.launcher:
            yield self.launcher

    def submit(self, count: int, *, worker: str = "work", first: int = 0, **more: Any) -> TaskHandle:
        """A Task of ``count`` items. ``more``: options of the Task, and what each item says."""
        item = {name: more.pop(name) for name in ("waits", "bug", "serial") if name in more}
        options = {"parallel": self.limit, **more}
        task: TaskHandle = self.app.submit(worker, numbers(count, first, **item), **options)
        return task

    def stands_still(self) -> None:
        """Waits until no job runs, and none below :data:`MANY` begins while others do.

        The first by itself: a job that waits for a thread ends what follows in the places of a limited Task.
        """
        wait_for(lambda: not self.launcher.pool.busy, "no job runs")

        def unmoved() -> bool:
            before = len(self.began)
            self.app.submit("work", numbers(3, MANY), queue="other").wait(120)
            return not self.running and min(self.began[before:]) >= MANY

        wait_for(unmoved, "no job begins")

    def goes_on(self, task: TaskHandle) -> None:
        """Waits until more of its rows ended than have until now."""
        before = task.progress()["progress"]["done"]
        wait_for(lambda: task.progress()["progress"]["done"] > before, "it goes on")

    def on_queue(self, count: int) -> list[dict[str, Any]]:
        """Pushes jobs that nobody tracks; returns what lies on the queue."""
        self.app.workers["loose"].perform_bulk(numbers(count, MANY))
        found: list[dict[str, Any]] = self.operations.jobs("default")["jobs"]
        assert len(found) == count
        return found

    def end(self, task: TaskHandle) -> None:
        """Cancels what is left of it, and waits until it is over."""
        task.cancel()
        self.leave.set()
        task.wait(120)


def counts(task: TaskHandle) -> dict[str, int]:
    return {name: n for name, n in task.progress()["counts"].items() if n and name != "total"}


def job_ids(task: TaskHandle) -> list[str]:
    return [str(event["job_id"]) for event in task.events()]


Case = Callable[[Bench], None]
CASES: dict[str, tuple[Case, tuple[str, ...]]] = {}


def case(*names: str) -> Callable[[Case], Case]:
    """A case of what has these names."""

    def register(function: Case) -> Case:
        CASES[function.__name__] = function, names
        return function

    return register


# -- knobs


@case("knob parallel")
def a_raised_parallel(bench: Bench) -> None:
    with bench.working():
        task = bench.submit(20, waits=True)
        wait_for(lambda: bench.running == bench.places, "its places are taken")
        task.update(parallel=3)
        if bench.limit is not None:
            wait_for(lambda: bench.running == 3, "it has one place more")
            assert bench.most == 3
        bench.leave.set()
        assert task.wait(120)["counts"]["finish"] == 20


@case("knob parallel")
def a_lowered_parallel(bench: Bench) -> None:
    with bench.working():
        task = bench.submit(MANY)
        wait_for(lambda: bench.began, "it runs")
        task.update(parallel=1)
        places = "SELECT SUM(n) FROM places WHERE task_id = ?"
        wait_for(lambda: bench.world.one(places, task.id) == 1, "its other places are empty")
        bench.most, began = 0, len(bench.began)
        wait_for(lambda: len(bench.began) >= began + 10, "it goes on")
        assert bench.most == 1
        assert task.progress()["counts"]["enqueue"] > 0
        bench.end(task)


@case("knob parallel")
def a_removed_parallel(bench: Bench) -> None:
    with bench.working():
        task = bench.submit(20, waits=True)
        wait_for(lambda: bench.running == bench.places, "its places are taken")
        task.update(parallel=None)
        wait_for(lambda: bench.running == THREADS, "it has every thread")
        bench.leave.set()
        assert task.wait(120)["counts"]["finish"] == 20


@case("knob interval")
def an_interval_set_and_taken_away(bench: Bench) -> None:
    with bench.working():
        task = bench.submit(MANY)
        wait_for(lambda: bench.began, "it runs")
        task.update(interval=LATER)
        bench.stands_still()
        assert counts(task)["enqueue"] > 0
        reasons = bench.operations.wait_reasons
        wait_for(lambda: [each.code for each in reasons(task.id)] == ["interval"], "it says that its interval is why")
        task.update(interval=0)
        bench.goes_on(task)
        bench.end(task)


@case("knob priority")
def a_smaller_priority(bench: Bench) -> None:
    with bench.working():
        first = bench.submit(MANY, first=1, priority=10)
        wait_for(lambda: bench.began, "it runs")
        second = bench.submit(40, first=MANY + 10, priority=20)
        second.update(priority=5)
        assert second.wait(120)["counts"]["finish"] == 40
        assert first.progress()["counts"]["enqueue"] > 0
        bench.end(first)


@case("knob tolerated_failures")
def tolerated_failures(bench: Bench) -> None:
    with bench.working():
        task = bench.submit(MANY, bug=True)
        wait_for(lambda: bench.began, "it runs")
        task.update(tolerated_failures=1)
        wait_for(lambda: task.progress()["state_reason"] == "too_many_failures", "it paused itself")
        bench.stands_still()
        assert counts(task)["enqueue"] > 0
        task.update(tolerated_failures=None)
        bench.goes_on(task)
        bench.end(task)


@case("knob start_at")
def a_start_time_set_and_taken_away(bench: Bench) -> None:
    with bench.working():
        task = bench.submit(20, start_at=datetime.now(UTC) + timedelta(hours=1))
        bench.stands_still()
        task.update(start_at=(datetime.now(UTC) + timedelta(hours=2)).isoformat())
        bench.stands_still()
        assert counts(task) == {"enqueue": 20}
        task.update(start_at=None)
        bench.goes_on(task)
        with pytest.raises(Conflict, match="has started"):
            task.update(start_at=datetime.now(UTC))
        bench.end(task)


@case("knob title", "TaskHandle.update", "asynctask set", "PATCH /api/tasks/{task_id}")
def a_title(bench: Bench) -> None:
    with bench.working():
        task = bench.submit(8, waits=True)
        wait_for(lambda: bench.running == bench.places, "it runs")
        assert task.update(title="Spring")["title"] == "Spring"
        with pytest.raises(InputError):
            task.update(parallel=0)
        bench.leave.set()
        assert task.wait(120)["counts"]["finish"] == 8


# -- a Task


@case(
    "TaskHandle.pause", "asynctask pause", "POST /api/tasks/{task_id}/pause",
    "TaskHandle.resume", "asynctask resume", "POST /api/tasks/{task_id}/resume",
)  # fmt: skip
def a_paused_task_resumed(bench: Bench) -> None:
    with bench.working():
        task = bench.submit(MANY)
        wait_for(lambda: bench.began, "it runs")
        assert task.pause()
        bench.stands_still()
        assert counts(task)["enqueue"] > 0
        assert task.progress()["control"]["in_flight"] == 0
        assert task.resume()
        bench.goes_on(task)
        bench.end(task)


@case("TaskHandle.cancel", "asynctask cancel", "POST /api/tasks/{task_id}/cancel")
def a_cancelled_task(bench: Bench) -> None:
    with bench.working():
        task = bench.submit(MANY)
        wait_for(lambda: bench.began, "it runs")
        assert task.cancel()
        task.wait(120)
        found = counts(task)
        assert found["cancelled"] > 0
        assert found == {"finish": len(bench.began), "cancelled": MANY - len(bench.began)}


@case("TaskHandle.seal", "asynctask seal", "POST /api/tasks/{task_id}/seal")
def a_sealed_task(bench: Bench) -> None:
    with bench.working():
        task = bench.submit(4, open=True)
        task.add(numbers(4, 4))
        wait_for(lambda: counts(task) == {"finish": 8}, "its items have ended")
        assert not task.progress()["done"]
        assert task.seal()
        task.wait(120)


@case("TaskHandle.retry", "asynctask retry", "POST /api/tasks/{task_id}/retry")
def a_retried_task(bench: Bench) -> None:
    with bench.working():
        task = bench.submit(12, bug=True)
        assert task.wait(120)["counts"]["error"] == 12
        bench.broken.clear()
        assert task.retry()
        assert task.wait(120)["counts"]["finish"] == 12
        assert (task.progress()["generation"], len(bench.began), bench.most <= bench.places) == (2, 24, True)


@case("TaskHandle.run_callbacks", "asynctask callbacks", "POST /api/tasks/{task_id}/callbacks")
def callbacks_run_again(bench: Bench) -> None:
    broken = bench.world.folder / "untold"
    broken.touch()
    with bench.working():
        task = bench.submit(4, on_complete="told")
        assert task.wait(120)["state_reason"] == "callback_failed"
        broken.unlink()
        told = len(bench.world.shop.lines())
        assert task.run_callbacks()
        wait_for(lambda: task.progress()["done"] and task.progress()["state_reason"] is None, "it was told")
        assert len(bench.world.shop.lines()) == told + 1


# -- a queue


@case(
    "Operations.pause", "asynctask queues pause", "POST /api/queues/{name}/pause",
    "Operations.unpause", "asynctask queues unpause", "POST /api/queues/{name}/unpause",
)  # fmt: skip
def a_paused_queue_resumed(bench: Bench) -> None:
    with bench.working():
        task = bench.submit(MANY)
        wait_for(lambda: len(bench.launcher.pool.jobs) and bench.began, "it runs, and more follows")
        assert bench.operations.pause("default")
        bench.stands_still()
        assert counts(task)["enqueue"] > 0
        assert [each.code for each in bench.operations.wait_reasons(task.id)] == ["queue_paused"]
        assert bench.operations.unpause("default")
        bench.goes_on(task)
        bench.end(task)


@case("Operations.delete_jobs", "asynctask queues delete", "POST /api/queues/{name}/delete")
def a_job_deleted_from_its_queue(bench: Bench) -> None:
    """Jobs of Tasks lie in no queue of our own workers."""
    task = bench.submit(12)
    gone = bench.on_queue(4)[0]
    assert bench.operations.delete_jobs("default", [gone["key"]]).done == 1
    with bench.working():
        task.wait(120)
        wait_for(lambda: len(bench.began) == 15, "all others ran")
    assert counts(task) == {"finish": 12}
    assert gone["args"][0]["n"] not in bench.began


@case("Operations.clear_queue", "asynctask queues clear", "POST /api/queues/{name}/clear")
def a_cleared_queue(bench: Bench) -> None:
    """It clears what lies there; what a Task has in the ledger stays."""
    task = bench.submit(12)
    bench.on_queue(4)
    assert bench.operations.clear_queue("default").done == 4
    with bench.working():
        task.wait(120)
    assert counts(task) == {"finish": 12}
    assert sorted(bench.began) == list(range(12))


# -- one job


@case(
    "Operations.stop_job", "asynctask stop", "POST /api/jobs/{job_id}/stop",
    "Operations.start_job", "asynctask start", "POST /api/jobs/{job_id}/start",
)  # fmt: skip
def jobs_stopped_and_started(bench: Bench) -> None:
    """One that runs, and two that wait in the ledger."""
    task = bench.submit(12)
    stopped = [job_ids(task)[0], job_ids(task)[-1]]
    for job_id in stopped:
        assert bench.operations.stop_job(job_id)["status"] == "stopped"
    with bench.working():
        wait_for(lambda: task.progress()["state_reason"] == "stopped_jobs", "only the stopped are left")
        assert counts(task) == {"finish": 10, "stopped": 2}
        for job_id in stopped:
            assert bench.operations.start_job(job_id)["changed"]
        assert task.wait(120)["counts"]["finish"] == 12
        long = bench.app.submit("walk", [{"count": 100_000, "pause": 0.005}], parallel=bench.limit)
        (job_id,) = job_ids(long)
        wait_for(lambda: bench.app.event(job_id)["status"] == "working", "it runs")
        assert bench.operations.stop_job(job_id)["changed"]
        wait_for(lambda: bench.app.event(job_id)["status"] == "stopped", "it let go")
        assert bench.operations.start_job(job_id)["changed"]
        wait_for(lambda: bench.app.event(job_id)["status"] == "working", "it goes on")
        bench.end(long)


@case(
    "Operations.act_on_job", "asynctask restart",
    *(f"POST /api/jobs/{{job_id}}/{action}" for action in ("restart", "kill", "delete")),
)  # fmt: skip
def one_job_acted_on(bench: Bench) -> None:
    """Deleted before it runs; with a retry in an hour: restarted, killed, deleted; dead: restarted."""
    act = bench.operations.act_on_job
    task = bench.submit(6, worker="again", bug=True)
    assert act(job_ids(task)[0], "delete")["status"] == "cancelled"
    with bench.working():
        wait_for(lambda: task.progress()["retrying"] == 5, "all wait for a retry")
        bench.broken.clear()
        restarted, killed, deleted, *_ = (e["job_id"] for e in task.events(status="enqueue"))
        assert act(killed, "kill")["problem"] == "killed"
        assert act(deleted, "delete")["status"] == "cancelled"
        act(restarted, "restart")
        wait_for(lambda: bench.app.event(restarted)["status"] == "finish", "it ran")
        assert counts(task) == {"enqueue": 2, "finish": 1, "error": 1, "cancelled": 2}
        act(killed, "restart")
        wait_for(lambda: bench.app.event(killed)["status"] == "finish", "it ran")
        bench.end(task)


# -- lists of jobs


def _verbs(name: str, *actions: str) -> Iterator[str]:
    """The commands and routes of these actions on a list."""
    for action in actions:
        yield f"asynctask {name} {action}"
        yield f"POST /api/{name}/{action}"
        yield f"POST /api/{name}/{action}-all"
        if name in FAILING:
            yield f"POST /api/{name}/templates/{{template}}/{action}"


def _acted_on(bench: Bench, name: str, keys: Callable[[], list[str]], ended: Callable[[], dict[str, int]]) -> None:
    """Of six entries that wait in a list for later one is restarted, one killed, one deleted, and the rest restarted."""
    act = bench.operations.act
    assert len(keys()) == 6
    for left, action in ((5, "restart"), (4, "kill"), (3, "delete")):
        assert act(name, action, keys()[:1]).done == 1
        wait_for(lambda left=left: len(keys()) == left, "it left the list")  # type: ignore[misc]
    wait_for(lambda: ended() == {"enqueue": 3, "finish": 1, "error": 1, "cancelled": 1}, "the one ran")
    assert bench.operations.act_on_all(name, "restart").done == 3
    wait_for(lambda: ended() == {"finish": 4, "error": 1, "cancelled": 1}, "the rest ran")


@case(
    "Operations.act", "Operations.act_on_all", "Operations.act_on_template", *_verbs("retries", "restart", "kill", "delete")
)
def retries_acted_on(bench: Bench) -> None:
    def listed() -> list[str]:
        return [entry["key"] for entry in bench.operations.listed("retries")["entries"]]

    with bench.working():
        for verb, status in (("kill", "error"), ("delete", "cancelled")):
            task = bench.submit(3, worker="again", bug=True)
            wait_for(lambda task=task: task.progress()["retrying"] == 3, "all wait for a retry")  # type: ignore[misc]
            (template,) = bench.operations.templates("retries")["templates"]
            assert bench.operations.act_on_template("retries", verb, template["id"], first=1).done == 1
            assert bench.operations.act_on_all("retries", verb).done == 2
            assert task.wait(120)["counts"][status] == 3
        task = bench.submit(6, worker="again", bug=True)
        wait_for(lambda: task.progress()["retrying"] == 6, "all wait for a retry")
        bench.broken.clear()
        bench.most = 0
        _acted_on(bench, "retries", listed, lambda: counts(task))
        assert task.wait(120)["done"]
        assert bench.most <= bench.places


@case(*_verbs("scheduled", "restart", "kill", "delete"))
def scheduled_acted_on(bench: Bench) -> None:
    """Jobs for later have no Task: they run beside one that has all of its places."""
    again = bench.app.workers["work"]
    items = numbers(6, MANY)

    def listed() -> list[str]:
        return [entry["key"] for entry in bench.operations.listed("scheduled")["entries"]]

    def ended() -> dict[str, int]:
        found: dict[str, int] = {}
        for job_id in ids:
            status = bench.app.event(job_id)["status"]
            found[status] = found.get(status, 0) + 1
        return found

    with bench.working():
        task = bench.submit(MANY)
        wait_for(lambda: bench.began, "it runs")
        for verb in ("kill", "delete"):
            again.perform_in(LATER, items[0])
            assert bench.operations.act_on_all("scheduled", verb).done == 1
        ids = [str(again.perform_in(LATER, item)) for item in items]
        _acted_on(bench, "scheduled", listed, ended)
        bench.end(task)


@case(*_verbs("dead", "restart", "delete", "dismiss"), "POST /api/jobs/{job_id}/dismiss")
def dead_acted_on(bench: Bench) -> None:
    with bench.working():
        task = bench.submit(6, bug=True)
        assert task.wait(120)["counts"]["error"] == 6
        bench.broken.clear()
        bench.most = 0
        first, second, third, fourth, *_ = (entry["key"] for entry in bench.operations.listed("dead")["entries"])
        refused = bench.operations.act("dead", "delete", [second])
        assert (refused.done, "stays recorded" in str(refused.skipped[second])) == (0, True)
        assert bench.operations.act_on_all("dead", "delete").done == 0
        assert bench.operations.act("dead", "restart", [first]).done == 1
        wait_for(lambda: counts(task) == {"finish": 1, "error": 5}, "the one ran")
        task.wait(120)
        assert bench.operations.act("dead", "dismiss", [third]).done == 1
        assert bench.operations.act_on_job(fourth, "dismiss")["dismissed"]
        (template,) = bench.operations.templates("dead")["templates"]
        assert bench.operations.act_on_template("dead", "restart", template["id"]).done == 3
        wait_for(lambda: counts(task) == {"finish": 4, "error": 2}, "those that are not dismissed ran")
        task.wait(120)
        assert task.retry()
        assert task.wait(120)["counts"]["finish"] == 6
        assert bench.most <= bench.places


@case("Operations.act")
def untracked_entries_acted_on(bench: Bench) -> None:
    """Jobs that nobody tracks, in the ledger or in Redis; they run beside a Task that has all of its places."""
    loose = bench.app.workers["loose"]
    later = bench.app.clock.now() + LATER * SECOND
    for n, name in enumerate((SCHEDULE, RETRY, DEAD)):
        job: dict[str, Any] = {"class": "loose", "args": [{"n": MANY + n}], "retry_count": 0}
        copy = untracked(n, **job)
        hold(bench.app, name, [SetEntry(copy, later)])
    with bench.working():
        task = bench.submit(MANY)
        wait_for(lambda: bench.began, "it runs")
        loose.perform_async({"n": MANY + 9})
        for name in ("scheduled", "retries", "dead"):
            (entry,) = bench.operations.listed(name)["entries"]
            assert bench.operations.act(name, "restart", [entry["key"]]).done == 1
        wait_for(lambda: {MANY, MANY + 1, MANY + 2, MANY + 9} <= set(bench.began), "all of them ran")
        bench.end(task)


# -- a process


@case("asynctask processes quiet", "POST /api/processes/{name}/quiet", "Operations.signal")
def a_quiet_process(bench: Bench) -> None:
    with bench.working() as launcher:
        task = bench.submit(MANY)
        wait_for(lambda: bench.began, "it runs")
        bench.operations.signal(bench.app.ledger.identity, "quiet")
        wait_for(lambda: launcher.pool.is_quiet and not launcher.pool.busy, "it begins nothing")
        began = len(bench.began)
        wait_for(lambda: task.progress()["control"]["in_flight"] == 0, "what it held went back")
    assert len(bench.began) == began < MANY
    assert counts(task) == {"finish": began, "enqueue": MANY - began}


@case("asynctask processes stop", "POST /api/processes/{name}/stop")
def a_stopped_process(bench: Bench) -> None:
    """In a process of its own, for it ends; another goes on with what it leaves."""
    child = bench.world.cli("kill_app", "worker", "-c", str(THREADS))
    task = bench.app.submit("brief", numbers(300), parallel=bench.limit)
    wait_for(lambda: bench.world.shop.performed("began"), "it runs")
    (process,) = (each for each in bench.operations.processes() if each["kind"] == "worker")
    bench.operations.signal(process["identity"], "stop")
    assert child.wait() == 0
    assert 0 < counts(task).get("enqueue", 0) == 300 - len(bench.world.shop.performed("began"))
    with bench.working():
        assert task.wait(120)["counts"]["finish"] == 300
    assert set(bench.world.shop.performed("began").values()) == {1}


# -- a schedule


@case("asynctask schedules run", "POST /api/schedules/{name}/run")
def a_schedule_run_now(bench: Bench) -> None:
    bench.app.every(LATER, "work", name="later", items=lambda tick: numbers(8), parallel=bench.limit)
    with bench.working():
        wait_for(bench.app.schedules.all, "it is registered")
        task = bench.app.schedules.run("later")
        assert task.wait(120)["counts"]["finish"] == 8
        assert bench.app.schedules.find("later")["last_task_id"] == task.id


@case("asynctask schedules off", "asynctask schedules on", "PATCH /api/schedules/{name}")
def a_schedule_switched_off_and_on(bench: Bench) -> None:
    for name in ("switched", "other"):
        bench.app.every(
            1, "work", name=name, items=lambda tick: numbers(2), missed="all", overlap=True, parallel=bench.limit
        )

    def made(name: str) -> int:
        return len(bench.app.tasks(owner=f"schedule:{name}", limit=1_000))

    def ticks_on(name: str) -> None:
        before = made(name)
        wait_for(lambda: made(name) >= before + 2, f"{name} ticks twice")

    with bench.working():
        ticks_on("switched")
        assert bench.app.schedules.switch("switched", False)
        ticks_on("other")  # a tick that was under way is submitted
        before = made("switched")
        ticks_on("other")
        assert made("switched") == before
        assert bench.app.schedules.switch("switched", True)
        ticks_on("switched")
        for each in bench.app.tasks(limit=1_000):
            bench.app.task(each["task_id"]).wait(120)


# -- a rate limit


@case("asynctask rates set", "PATCH /api/rates/{name}")
def a_rate_set_while_its_jobs_wait(bench: Bench) -> None:
    bench.app.worker(lambda item: None, name="seldom", rate="1/h")
    with bench.working():
        task = bench.app.submit("seldom", numbers(4), parallel=bench.limit)
        wait_for(lambda: counts(task).get("finish") == 1, "the first one starts")
        assert [each.code for each in bench.operations.wait_reasons(task.id)] == ["rate"]
        bench.app.rates.set("seldom", "1000/s")
        assert task.wait(120)["counts"]["finish"] == 4


# -- all of them, wherever jobs wait


def run(world: World, name: str, limit: int | None) -> None:
    bench = Bench(world, limit)
    try:
        CASES[name][0](bench)
    finally:
        bench.leave.set()
    assert bench.app.doctor() == []


each_case = pytest.mark.parametrize("name", CASES)
each_limit = pytest.mark.parametrize("limit", [None, LIMIT], ids=["no_limit", "limit"])


def names_in_the_program(app: AsyncTask) -> set[str]:
    """What people find: knobs, methods, commands, routes that change something."""
    document: Any = create_app(app).test_client().get("/openapi.json").json
    routes = {f"{verb.upper()} {path}" for path, verbs in document["paths"].items() for verb in verbs if verb != "get"}
    methods = {f"{of.__name__}.{name}" for of in (Operations, TaskHandle) for name in vars(of) if not name.startswith("_")}
    commands = {f"asynctask {name}" for name, _ in commands_of(build())}
    return routes | methods | commands | {f"knob {name}" for name in Knobs.model_fields}


def commands_of(group: click.Group, above: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands_of(command, f"{above}{name} ")
        elif command is not None:
            yield above + name, command


def _prefixed(prefix: str, names: str) -> set[str]:
    return {prefix + name.strip() for name in names.split(",")}


NO_OPERATION: Final = {
    "reads": (
        _prefixed("POST /api/lists/", "preview, marked.xlsx")
        | _prefixed("Operations.", "dead, job, jobs, listed, monitored, processes, queues, search, templates, wait_reasons")
        | _prefixed(
            "TaskHandle.",
            "columns, context, counts, error_groups, events, log, progress, refusal, refusal_object, rejects, report,"
            " state, wait",
        )
        | _prefixed(
            "asynctask ",
            "history, tasks, show, watch, jobs, job, search, workers, config, doctor, report, result, template, db check",
        )
        | _prefixed(
            "asynctask ",
            "middleware list, processes list, queues list, queues jobs, check-list, schedules list, rates list",
        )
        | _prefixed("asynctask ", "retries list, retries search, scheduled list, scheduled search, dead list, dead search")
        | _prefixed("asynctask ", "retries templates, dead templates")
    ),
    "submits": _prefixed("POST /api/", "tasks, jobs, exports")
    | _prefixed("asynctask ", "submit, add, export, perform, demo, split-task")
    | {"TaskHandle.add", "POST /api/tasks/{task_id}/items"},
    "lets somebody else in": {"POST /api/tasks/{task_id}/links", "asynctask link"},
    "records what another program performed": _prefixed("POST /api/", "records, jobs/{job_id}/record"),
    "is a step of maintenance": {"Operations.keep_history"},
    "starts a process": _prefixed("asynctask ", "up, web, worker"),
    "is for Tasks that ended, or for no Task": _prefixed("asynctask ", "purge, db upgrade, schedules remove"),
}


@pytest.mark.databases("sqlite", reason="it looks at names alone")
def test_every_operation_has_a_case(world: World) -> None:
    named = {name for _, names in CASES.values() for name in names}
    others = set().union(*NO_OPERATION.values())
    found = names_in_the_program(world.app())
    assert found - others - named == set(), "write a case"
    assert (others | named) - found == set(), "it is gone"


@pytest.mark.one_database(reason="a manual action uses the ledger through functions that its own tests prove")
@pytest.mark.parametrize(
    "limit",
    [pytest.param(None, marks=pytest.mark.full(reason="fewer gates of the same")), LIMIT],
    ids=["no_limit", "limit"],
)
@each_case
def test_it_takes_effect_where_jobs_wait_in_the_database(world: World, name: str, limit: int | None) -> None:
    run(world, name, limit)


@pytest.mark.full(reason="own workers borrow from the ledger, whatever lies in Redis")
@pytest.mark.parametrize("broker_kind", ["redis"])
@each_limit
@each_case
def test_it_takes_effect_where_jobs_wait_in_redis(world: World, name: str, limit: int | None) -> None:
    run(world, name, limit)


# -- a paused queue begins nothing, whichever way its jobs come

WAYS: Final[dict[str, Callable[[Bench], Any]]] = {
    "rounds": lambda bench: bench.submit(MANY, interval=0.02),
    "lines of keys": lambda bench: bench.submit(MANY, key="serial", serial=1),
    "a session": lambda bench: bench.submit(MANY, session="s"),
    "slices": lambda bench: bench.submit(MANY, chunk_size=3),
    "due retries": lambda bench: bench.submit(40, worker="at_once", bug=True),
    "jobs without a Task": lambda bench: bench.app.workers["work"].perform_bulk(numbers(MANY)),
    "untracked jobs": lambda bench: bench.app.workers["loose"].perform_bulk(numbers(MANY)),
}


@pytest.mark.one_of("limit", reason="each way and each broker come up, and so does a limit")
@pytest.mark.one_database(reason="what the broker is asked is the same beside each database")
@pytest.mark.parametrize("broker_kind", ["sql", "redis"])
@each_limit
@pytest.mark.parametrize("way", WAYS)
def test_a_paused_queue_begins_no_job_whichever_way_it_comes(world: World, way: str, limit: int | None) -> None:
    bench = Bench(world, limit)
    with bench.working():
        WAYS[way](bench)
        wait_for(lambda: bench.began, "it runs")
        assert bench.operations.pause("default")
        bench.stands_still()
        began = mine(bench)
        assert way == "due retries" or 0 < began < MANY
        bench.stands_still()
        assert mine(bench) == began
        assert bench.operations.unpause("default")
        wait_for(lambda: mine(bench) > began, "it goes on")
        assert bench.operations.pause("default")
        bench.stands_still()
    assert bench.app.doctor() == []


def mine(bench: Bench) -> int:
    return sum(n < MANY for n in bench.began)


@pytest.mark.one_of("limit", reason="each way and each broker come up, and so does a limit")
@pytest.mark.one_database(reason="what the broker is asked is the same beside each database")
@pytest.mark.parametrize("broker_kind", ["redis"])
@each_limit
def test_the_callbacks_of_a_task_wait_while_their_queue_is_paused(world: World, limit: int | None) -> None:
    bench = Bench(world, limit)
    with bench.working():
        bench.operations.pause("callbacks")
        task = bench.submit(8, on_complete="told")
        wait_for(lambda: counts(task) == {"finish": 8}, "its rows have ended")
        bench.stands_still()
        assert not task.progress()["done"]
        assert [each.code for each in bench.operations.wait_reasons(task.id)] == ["queue_paused"]
        bench.operations.unpause("callbacks")
        assert task.wait(120)["done"]
    assert len(world.shop.lines()) == 1
