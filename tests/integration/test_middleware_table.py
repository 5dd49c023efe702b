"""What the middleware records, line by line of the table in docs/reference/middleware.md, on the real runtime."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support.databases import Store

from asynctask import AsyncTask, NormalException, current_job
from asynctask.clock import micros
from asynctask.core.transitions import stop
from asynctask.errors import ConfigError, InputError, NotFound, TransitionRefused
from asynctask.job import CurrentJob
from asynctask.ledger.events import Change, apply
from asynctask.messages import CATALOGUE
from asynctask.runtime import timeouts
from asynctask.runtime.launcher import Launcher
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")

OVER = ("finish", "failed", "error", "cancelled")


class Runtime:
    """Applications on one ledger, and worker processes within this one."""

    def __init__(self, folder: Path, store: Store) -> None:
        self._folder = folder
        self._store = store
        self._apps: list[AsyncTask] = []

    def app(self, **more: Any) -> AsyncTask:
        settings = {"lease_s": 2.0, "heartbeat_s": 0.5, "data_dir": str(self._folder / "data"), "environ": {}, **more}
        self._apps.append(AsyncTask(database_url=self._store.url, **settings))
        return self._apps[-1]

    @contextmanager
    def working(self, app: AsyncTask, *, concurrency: int = 2, shutdown_s: float = 5.0) -> Iterator[Launcher]:
        launcher = app.launcher(concurrency=concurrency, shutdown_s=shutdown_s)
        launcher.start()
        try:
            yield launcher
        finally:
            launcher.stop()

    def close(self) -> None:
        for app in self._apps:
            app.close()


@pytest.fixture
def runtime(tmp_path: Path, store: Store) -> Iterator[Runtime]:
    made = Runtime(tmp_path, store)
    yield made
    made.close()


@pytest.fixture
def app(runtime: Runtime) -> AsyncTask:
    return runtime.app()


def ended(app: AsyncTask, job_id: str | None, timeout: float = 30) -> dict[str, Any]:
    """The Event once it is terminal."""
    assert job_id is not None
    wait_for(lambda: app.event(job_id)["status"] in OVER, f"{job_id} ends", timeout)
    return app.event(job_id)


def said(event: dict[str, Any]) -> list[tuple[str, str]]:
    return [(m["status"], m["message"]) for m in event["messages"]]


def at_once(count: int, error: BaseException, job: CurrentJob) -> float:
    return 0.02


# -- the table


def test_a_job_that_starts_is_working_with_its_true_start_time(runtime: Runtime, app: AsyncTask) -> None:
    gate = threading.Event()
    worker = app.worker(name="wait")(lambda: gate.wait(120))
    before = datetime.now(UTC)
    with runtime.working(app):
        job_id = str(worker.perform_async())
        wait_for(lambda: app.event(job_id)["status"] == "working", "it is seen to run")
        event = app.event(job_id)
        gate.set()
        after = ended(app, job_id)
    assert said(event) == [("working", "In progress")]
    assert before - timedelta(milliseconds=1) <= datetime.fromisoformat(event["messages"][0]["at"]) <= datetime.now(UTC)
    assert said(after) == [("working", "In progress"), ("finish", "Done")]
    assert after["started_at"] == after["messages"][0]["at"]


def test_a_job_that_returns_is_finished_and_its_result_is_kept(runtime: Runtime, app: AsyncTask) -> None:
    worker = app.worker(name="enrol")(lambda sku: {"promotion_id": 17, "sku": sku})
    with runtime.working(app):
        event = ended(app, worker.perform_async("A-1"))
    assert (event["status"], event["result"], event["params"]) == ("finish", {"promotion_id": 17, "sku": "A-1"}, ["A-1"])


class SoldOutError(Exception):
    pass


@pytest.mark.parametrize("error", [NormalException("sold out"), SoldOutError("sold out")], ids=["normal", "failed_on"])
def test_a_refusal_is_failed_swallowed_and_not_retried(runtime: Runtime, app: AsyncTask, error: Exception) -> None:
    attempts, raised = [], []

    @app.worker(retry=5, retry_in=at_once, failed_on=(SoldOutError,))
    def refuse() -> None:
        attempts.append(1)
        raise error

    app.on("error")(lambda found, context: raised.append(found))
    with runtime.working(app):
        event = ended(app, refuse.perform_async())
    assert (event["status"], said(event)[-1]) == ("failed", ("failed", "Failed: sold out"))
    assert (len(attempts), raised) == (1, [])


def test_anything_else_raised_is_an_error_when_no_retry_is_left(runtime: Runtime, app: AsyncTask) -> None:
    heard: list[Any] = []

    @app.worker(retry=0, retries_exhausted=lambda job, error: heard.append(("exhausted", job.job_id, str(error))))
    def bug() -> None:
        raise ValueError("a bug")

    app.on("error")(lambda error, context: heard.append(("error", context["job_id"], context["follow"])))
    app.on("death")(lambda job, error: heard.append(("death", job.job_id, str(error))))
    with runtime.working(app):
        job_id = bug.perform_async()
        event = ended(app, job_id)
        wait_for(lambda: len(heard) == 3, "the hooks are called")
    assert (event["status"], event["problem"], said(event)[-1]) == (
        "error",
        "raised",
        ("error", "Error: ValueError: a bug"),
    )
    assert heard == [("error", job_id, "dead"), ("exhausted", job_id, "a bug"), ("death", job_id, "a bug")]


def test_an_error_that_will_be_retried_is_never_seen_as_error(runtime: Runtime, app: AsyncTask) -> None:
    dead, seen = [], set()

    @app.worker(retry=2, retry_in=lambda count, error, job: 0.3)
    def shaky() -> str:
        if current_job().attempt < 3:
            raise ValueError("not yet")
        return "through"

    app.on("death")(lambda job, error: dead.append(job))
    with runtime.working(app):
        job_id = str(shaky.perform_async())

        def over() -> bool:
            event = app.event(job_id)
            seen.add((event["status"], said(event)[-1] if event["messages"] else None))
            return event["status"] in OVER

        wait_for(over, "it ends", every=0.002)
        event = app.event(job_id)
    assert {status for status, _ in seen} <= {"enqueue", "working", "finish"}
    assert ("enqueue", ("enqueue", "Waiting for retry")) in seen
    assert (event["attempt"], event["retries"], dead) == (3, 2, [])
    failed = [("working", "In progress"), ("error", "Error: ValueError: not yet"), ("enqueue", "Waiting for retry")]
    assert said(event) == [*failed, *failed, ("working", "In progress"), ("finish", "Done")]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_job_under_which_the_runtime_shuts_down_waits_and_is_finished_by_the_next(runtime: Runtime, kind: str) -> None:
    gate = threading.Event()

    def build() -> AsyncTask:
        app = runtime.app()

        @app.worker(retry=0, name="gated")
        def gated() -> str:
            wait_for(gate.is_set, "the gate opens", 60, every=0.01)
            return "through"

        async def gated_async() -> str:
            while not gate.is_set():
                await asyncio.sleep(0.01)
            return "through"

        app.worker(retry=0, name="gated_async")(gated_async)
        return app

    first, second = build(), build()
    with runtime.working(first, shutdown_s=0.0):
        job_id = str(first.workers["gated" if kind == "sync" else "gated_async"].perform_async())
        wait_for(lambda: first.event(job_id)["status"] == "working", "it is seen to run")
    event = second.event(job_id)
    assert (event["status"], event["attempt"], event["retries"]) == ("enqueue", 2, 0)
    assert said(event) == [("working", "In progress"), ("error", "Interrupted"), ("enqueue", "Waiting for retry")]
    gate.set()
    with runtime.working(second):
        assert ended(second, job_id)["result"] == "through"


@pytest.mark.parametrize(
    ("error", "problem", "retries", "message"),
    [
        (SystemExit(3), "exited", 0, "Error: exit code 3"),
        (KeyboardInterrupt(), "raised", 1, "Error: KeyboardInterrupt"),
    ],
    ids=["SystemExit", "KeyboardInterrupt"],
)
def test_a_job_that_wants_to_end_the_process_ends_only_itself(
    runtime: Runtime, app: AsyncTask, error: BaseException, problem: str, retries: int, message: str
) -> None:
    @app.worker(retry=1, retry_in=at_once)
    def leave() -> None:
        raise error

    other = app.worker(name="other")(lambda: "lives")
    with runtime.working(app, concurrency=1):
        event = ended(app, leave.perform_async())
        assert ended(app, other.perform_async())["result"] == "lives"
    assert (event["status"], event["problem"], event["retries"]) == ("error", problem, retries)
    assert [m for m in said(event) if m[0] != "working"] == [
        *[("error", message), ("enqueue", "Waiting for retry")] * retries,
        ("error", message),
    ]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_job_over_its_timeout_is_an_error_and_retried_like_any(runtime: Runtime, app: AsyncTask, kind: str) -> None:
    def slow() -> None:
        wait_for(lambda: False, "never", 60, every=0.005)

    async def slow_async() -> None:
        await asyncio.sleep(60)

    worker = app.worker(retry=1, retry_in=at_once, timeout=0.2)(slow if kind == "sync" else slow_async)
    with runtime.working(app):
        event = ended(app, worker.perform_async())
    assert (event["status"], event["problem"], event["retries"]) == ("error", "timeout", 1)
    assert [m for m in said(event) if m[0] != "working"] == [
        ("error", "Timed out"),
        ("enqueue", "Waiting for retry"),
        ("error", "Timed out"),
    ]


def test_a_thread_that_does_not_come_back_is_replaced_and_does_not_hold_the_process(
    runtime: Runtime, app: AsyncTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "GRACE_S", 0.1)
    reading, writing = os.pipe()

    @app.worker(retry=0, timeout=0.1)
    def hung() -> None:
        os.read(reading, 1)  # one long call into C: no exception is delivered before it returns

    other = app.worker(name="other")(lambda: "performed")
    try:
        with runtime.working(app, concurrency=1, shutdown_s=1.0) as launcher:
            event = ended(app, hung.perform_async())
            assert (event["status"], event["problem"]) == ("error", "timeout")
            assert ended(app, other.perform_async())["result"] == "performed"
            assert launcher.pool.busy == 0
    finally:
        os.write(writing, b".")
    wait_for(lambda: not any(t.name == "processor" for t in threading.enumerate()), "the threads end")
    os.close(reading)
    os.close(writing)
    assert said(app.event(event["job_id"])) == said(event), "what the lost thread came to counts no more"


# -- what a job says of itself


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_messages_of_the_job_stand_in_order_between_start_and_end(runtime: Runtime, app: AsyncTask, kind: str) -> None:
    def talk() -> None:
        current_job().message("one")
        current_job().message("two")

    async def talk_async() -> None:
        talk()

    worker = app.worker(talk if kind == "sync" else talk_async)
    with runtime.working(app):
        event = ended(app, worker.perform_async())
    assert said(event) == [("working", "In progress"), ("working", "one"), ("working", "two"), ("finish", "Done")]


def test_async_workers_run_side_by_side_on_one_loop(runtime: Runtime, app: AsyncTask) -> None:
    loops: set[int] = set()
    inside = []

    @app.worker(retry=0, timeout=120)
    async def meet() -> None:
        loops.add(id(asyncio.get_running_loop()))
        inside.append(1)
        while len(inside) < 3:
            await asyncio.sleep(0.005)

    with runtime.working(app, concurrency=3):
        events = [ended(app, job_id) for job_id in meet.perform_bulk([(), (), ()])]
    assert [event["status"] for event in events] == ["finish"] * 3
    assert len(loops) == 1


@pytest.mark.parametrize(
    ("result", "note"),
    [
        ("x" * 2_000, "The result was not kept: 2002 bytes are over max_result_bytes (1000)"),
        ({1, 2}, "not JSON serializable: set"),
    ],
    ids=["large", "set"],
)
def test_a_result_that_cannot_be_kept_does_not_fail_the_job(runtime: Runtime, result: Any, note: str) -> None:
    app = runtime.app(max_result_bytes=1_000)
    worker = app.worker(name="large")(lambda: result)
    with runtime.working(app):
        event = ended(app, worker.perform_async())
    assert (event["status"], event["result"]) == ("finish", None)
    assert any(note in message for _, message in said(event)), said(event)


def test_a_worker_that_opted_out_is_performed_and_leaves_no_event(runtime: Runtime, app: AsyncTask) -> None:
    done: list[str] = []

    @app.worker(use_task_event=False)
    def quiet(word: str) -> None:
        done.append(word)

    with runtime.working(app):
        job_id = quiet.perform_async("unseen")
        wait_for(lambda: done == ["unseen"], "it is performed")
    assert job_id is not None
    with pytest.raises(NotFound):
        app.event(job_id)


@pytest.mark.parametrize("locale", sorted(CATALOGUE))
def test_the_record_speaks_the_configured_language(runtime: Runtime, locale: str) -> None:
    app, say = runtime.app(locale=locale), CATALOGUE[locale]

    @app.worker(retry=1, retry_in=at_once, timeout=0.2)
    def end(how: str) -> None:
        if how == "refuse":
            raise NormalException("{0} 在庫なし")
        if how == "break":
            raise ValueError("x")
        if how == "slow":
            wait_for(lambda: False, "never", 60, every=0.005)

    with runtime.working(app):
        words = {how: said(ended(app, end.perform_async(how))) for how in ("return", "refuse", "break", "slow")}
    start = ("working", say["working"])
    assert words["return"] == [start, ("finish", say["finish"])]
    assert words["refuse"] == [start, ("failed", say["failed"].replace("{0}", "{0} 在庫なし"))]
    error = ("error", say["error"].replace("{0}", "ValueError: x"))
    assert words["break"] == [start, error, ("enqueue", say["retry"]), start, error]
    assert words["slow"][-1] == ("error", say["timeout"])


# -- the chain around it


def raising_before(error: BaseException) -> Any:
    def middleware(worker: Any, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
        raise error

    return middleware


def raising_after(error: BaseException) -> Any:
    def middleware(worker: Any, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
        call_next()
        raise error

    return middleware


@pytest.mark.parametrize(
    ("make", "performed"), [(raising_before, []), (raising_after, ["did"])], ids=["before the job", "after the job"]
)
@pytest.mark.parametrize(
    ("error", "status", "text"),
    [(RuntimeError("broken"), "error", "Error: RuntimeError: broken"), (NormalException("no"), "failed", "Failed: no")],
    ids=["bug", "refusal"],
)
def test_the_runtime_has_the_final_word_over_an_outer_middleware(
    runtime: Runtime, app: AsyncTask, make: Any, performed: list[str], error: Exception, status: str, text: str
) -> None:
    did: list[str] = []

    @app.worker(retry=0)
    def work() -> str:
        did.append("did")
        return "a result that does not count"

    app.server_middleware.add(make(error))
    with runtime.working(app):
        event = ended(app, work.perform_async())
    assert (event["status"], said(event)[-1], event["result"]) == (status, (status, text), None)
    assert did == performed


def test_middleware_stands_around_the_recording_in_the_order_of_the_chain(runtime: Runtime, app: AsyncTask) -> None:
    order: list[str] = []

    def noting(name: str) -> Any:
        def middleware(worker: Any, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
            order.append(f"{name} in {worker.name} {queue}")
            job.local.setdefault("seen", []).append(name)
            result = call_next()
            order.append(f"{name} out {result}")
            return result

        return middleware

    @app.worker
    def work() -> Any:
        return current_job().local["seen"]

    app.server_middleware.add(noting("inner"))
    app.server_middleware.prepend(noting("outer"))
    with runtime.working(app):
        event = ended(app, work.perform_async())
        wait_for(lambda: len(order) == 4, "the chain is left")
    assert event["result"] == ["outer", "inner"]
    seen = ["outer", "inner"]
    assert order == ["outer in work default", "inner in work default", f"inner out {seen}", f"outer out {seen}"]


def test_a_client_middleware_that_does_not_call_on_stops_a_single_push(runtime: Runtime, app: AsyncTask) -> None:
    performed: list[int] = []
    worker = app.worker(name="work")(performed.append)

    def odd_only(worker: Any, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
        return call_next() if job.payload["args"][0] % 2 else None

    app.client_middleware.add(odd_only)
    with runtime.working(app):
        ids = worker.perform_bulk([1, 2, 3])
        assert [job_id is None for job_id in ids] == [False, True, False]
        for job_id in (ids[0], ids[2]):
            assert ended(app, job_id)["status"] == "finish"
    assert sorted(performed) == [1, 3]


def test_an_item_of_a_task_that_a_client_middleware_stops_ends_in_error_with_the_reason(
    runtime: Runtime, app: AsyncTask
) -> None:
    @app.worker(retry=0)
    def work(item: dict[str, Any]) -> None: ...

    def stopping(worker: Any, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
        return None if job.payload["args"][0]["n"] == 2 else call_next()

    app.client_middleware.add(stopping)
    task = app.submit(work, [{"n": n} for n in (1, 2, 3)])
    with runtime.working(app):
        progress = task.wait(timeout=120)
    assert (progress["done"], progress["counts"]["finish"], progress["counts"]["error"]) == (True, 2, 1)
    (event,) = task.events(status="error")
    assert "stopped by a client middleware" in said(event)[-1][1]


# -- the worker's verbs


def test_a_worker_class_is_made_anew_for_each_job(runtime: Runtime, app: AsyncTask) -> None:
    @app.worker
    class Count:
        """Counts itself."""

        def __init__(self) -> None:
            self.calls = 0

        def perform(self, start: int) -> int:
            self.calls += 1
            return start + self.calls

    @app.worker
    class CountLater:
        async def perform(self, start: int) -> int:
            await asyncio.sleep(0)
            return start + 1

    workers = app.workers
    with runtime.working(app):
        results = [ended(app, job_id)["result"] for job_id in workers["Count"].perform_bulk([10, 20])]
        later = ended(app, workers["CountLater"].perform_async(30))
    assert results == [11, 21]
    assert (later["status"], later["result"]) == ("finish", 31), said(later)


def test_a_job_for_later_waits_in_the_ledger_until_it_is_due(runtime: Runtime, app: AsyncTask) -> None:
    worker = app.worker(name="later")(lambda: None)
    now = app.clock.now()
    when = datetime.now(UTC) + timedelta(seconds=0.4)
    ids = [worker.perform_in(0.4), worker.perform_at(when), worker.perform_at(when.timestamp()), worker.perform_in(3_600)]
    waiting = [app.event(str(job_id)) for job_id in ids]
    assert all(event["status"] == "enqueue" and event["due_at"] for event in waiting)
    with runtime.working(app):
        for job_id in ids[:3]:
            event = ended(app, job_id)
            assert micros(datetime.fromisoformat(event["started_at"]).timestamp()) >= now + 390_000
    assert app.event(str(ids[3]))["status"] == "enqueue"


def test_a_naive_time_is_refused_with_the_way_to_mend_it(app: AsyncTask) -> None:
    worker = app.worker(name="later")(lambda: None)
    with pytest.raises(ValueError, match="give an aware datetime"):
        worker.perform_at(datetime(2030, 1, 1))  # noqa: DTZ001 - the naive time is the case


def test_set_changes_queue_and_retry_of_the_jobs_pushed_through_it_only(runtime: Runtime, app: AsyncTask) -> None:
    @app.worker(retry=0)
    def bug() -> None:
        raise ValueError("a bug")

    other = bug.set(queue="low").set(retry=1)
    with pytest.raises(ConfigError, match="no such job option: colour"):
        bug.set(**{"colour": "red"})  # type: ignore[arg-type]
    launcher = app.launcher(concurrency=1, queues={"default": 1, "low": 1})
    ids = [bug.delay(), other.perform_async()]
    launcher.start()
    try:
        assert ended(app, ids[0])["retries"] == 0
        wait_for(lambda: app.event(str(ids[1]))["retries"] == 1, "its retry waits")
    finally:
        launcher.stop()
    assert [app.event(str(job_id))["queue"] for job_id in ids] == ["default", "low"]


@pytest.mark.parametrize(("answer", "retries"), [("kill", 0), ("discard", 0), (0.02, 2), (0, 2)])
def test_retry_in_may_end_a_job_early(runtime: Runtime, app: AsyncTask, answer: Any, retries: int) -> None:
    dead: list[CurrentJob] = []

    @app.worker(retry=2, retry_in=lambda count, error, job: answer)
    def bug() -> None:
        raise ValueError("a bug")

    app.on("death")(lambda job, error: dead.append(job))
    with runtime.working(app):
        event = ended(app, bug.perform_async())
    assert (event["status"], event["retries"], len(dead)) == ("error", retries, 0 if answer == "discard" else 1)


# -- the seam under the middleware


def test_anybody_may_record_legal_steps_of_a_job(app: AsyncTask) -> None:
    assert app.record("from-elsewhere", "working", "I began")
    assert app.record("from-elsewhere", "working", "and go on")
    assert app.record("from-elsewhere", "enqueue")
    assert app.record("from-elsewhere", "failed", "no stock")
    assert not app.record("from-elsewhere", "finish"), "a terminal Event never changes"
    event = app.event("from-elsewhere")
    assert (event["status"], event["problem"]) == ("failed", "recorded")
    assert said(event) == [
        ("working", "I began"),
        ("working", "and go on"),
        ("enqueue", "Waiting for retry"),
        ("failed", "no stock"),
    ]


def test_steps_that_are_not_legal_are_refused(app: AsyncTask) -> None:
    app.record("job", "working")
    with app.ledger.database.write() as connection:
        apply(connection, app.ledger, [Change(app.event("job")["id"], lambda record: stop(record.row))])
    with pytest.raises(TransitionRefused, match="from stopped to finish"):
        app.record("job", "finish")
    with pytest.raises(InputError, match="no status to record: 'cancelled'"):
        app.record("job", "cancelled")
    with pytest.raises(InputError, match="1 to 64 characters"):
        app.record("x" * 65, "working")
    assert app.event("job")["status"] == "stopped"
