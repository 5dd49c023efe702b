"""asynctask.testing: drain performs all that is due, in the calling thread; running has a worker; inline drains."""

from __future__ import annotations

import contextvars
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from celery import Celery
from dramatiq.brokers.stub import StubBroker
from redis import Redis
from support.world import World, numbers

from asynctask import AsyncTask, NormalException, current_job
from asynctask.errors import ConfigError
from asynctask.integrations import dramatiq as dramatiq_engine
from asynctask.integrations import rq as rq_engine
from asynctask.integrations.celery import attach
from asynctask.runtime.execution import Execution
from asynctask.runtime.pool import STALE_S, StartGate
from asynctask.testing import Undrained, drain, inline, running, wait_for

pytestmark = pytest.mark.one_database(reason="a drain performs what the ledger lends, in another thread than a worker")

OF_THE_TEST: contextvars.ContextVar[str] = contextvars.ContextVar("of_the_test", default="")


class Shop:
    """An application with the workers of these tests; ``done`` has the numbers that were performed, in order."""

    def __init__(self, world: World) -> None:
        self.app = app = world.app()
        self.done: list[Any] = []

        @app.worker(retry=3)
        def enroll(item: dict[str, Any]) -> dict[str, Any]:
            self.done.append(item["n"])
            if item.get("refused"):
                raise NormalException("not qualified")
            if current_job().attempt <= item.get("fails", 0):
                raise ZeroDivisionError("a bug")
            return {"n": item["n"]}

        @app.worker
        def tell(progress: dict[str, Any]) -> None:
            self.done.append(progress["counts"]["finish"])

        @app.worker
        def here(item: dict[str, Any]) -> None:
            self.done.append((threading.current_thread(), OF_THE_TEST.get()))

        @app.worker
        def again(item: dict[str, Any]) -> None:
            again.perform_async(item)

        self.enroll, self.tell, self.here, self.again = enroll, tell, here, again


@pytest.fixture
def shop(world: World) -> Shop:
    return Shop(world)


def divide(item: dict[str, Any]) -> int:
    """RQ imports its functions by their path."""
    return 10 // int(item["n"])


def nothing_is_left(app: AsyncTask) -> None:
    assert (app.processes(), app.doctor()) == ([], [])
    with app.ledger.database.read() as connection:
        for table in ("loans", "places"):
            assert connection.exec_driver_sql(f"SELECT COUNT(*) FROM {table}").scalar_one() == 0


@pytest.mark.each_database(reason="the ledger's times and loans are made in SQL")
def test_a_list_runs_to_its_end_with_retries_and_callbacks_and_nobody_waits(shop: Shop) -> None:
    rows = [{"n": 1}, {"n": 2, "refused": True}, {"n": 3, "fails": 2}, {"n": 4, "fails": 9}]
    task = shop.app.submit(shop.enroll, rows, on_complete="tell")
    assert drain(shop.app) == {"finish": 3, "failed": 1, "retry": 5, "error": 1}
    found = task.progress()
    assert (found["done"], found["counts"]["finish"], found["counts"]["failed"], found["counts"]["error"]) == (
        True,
        2,
        1,
        1,
    )
    assert shop.done.count(4) == 4
    assert shop.done[-1] == 2, "the callback is last"
    assert drain(shop.app) == {}
    nothing_is_left(shop.app)


@pytest.mark.each_database(reason="the ledger's times are made in SQL")
def test_start_times_rounds_and_single_jobs_begin_in_the_order_of_their_times(shop: Shop) -> None:
    soon, later = (datetime.now(UTC) + timedelta(hours=hours) for hours in (2, 9))
    tasks = [
        shop.app.submit(shop.enroll, numbers(2, 90), start_at=later),
        shop.app.submit(shop.enroll, numbers(4, 10), parallel=2, interval=3_600, queue="elsewhere"),
        shop.app.submit(shop.enroll, numbers(1, 50), start_at=soon + timedelta(minutes=30)),
    ]
    shop.enroll.perform_in(5 * 3_600, {"n": 70})
    assert drain(shop.app) == {"finish": 8}
    assert shop.done == [10, 11, 12, 13, 50, 70, 90, 91]
    assert all(task.progress()["done"] for task in tasks)
    assert shop.app.ledger.now() < int(soon.timestamp() * 1_000_000), "the application's own time has not moved"
    nothing_is_left(shop.app)


def test_jobs_run_in_the_thread_and_the_context_of_the_test(shop: Shop) -> None:
    OF_THE_TEST.set("this one")
    shop.app.submit(shop.here, [{}])
    drain(shop.app)
    assert shop.done == [(threading.current_thread(), "this one")]


def test_the_hooks_of_a_worker_process_have_been_called_when_it_returns(shop: Shop) -> None:
    for name in ("startup", "error", "death", "task_finished", "quiet", "shutdown"):
        shop.app.on(name)(lambda *args, name=name: shop.done.append(name))
    shop.app.submit(shop.enroll, [{"n": 1, "fails": 9}])
    drain(shop.app)
    assert shop.done[:-3] == ["startup", *[1, "error"] * 4, "death"]
    assert set(shop.done[-3:]) == {"task_finished", "quiet", "shutdown"}


@pytest.mark.each_database(reason="lines and sessions are made in SQL")
def test_slices_sessions_and_keys(shop: Shop) -> None:
    first = shop.app.submit(shop.enroll, [{"n": n, "fails": int(n == 2)} for n in range(5)], chunk_size=3, session="ann")
    second = shop.app.submit(shop.enroll, [{"n": n, "of": "b"} for n in (7, 8)], key="of", session="ann")
    drain(shop.app)
    assert (first.progress()["counts"]["finish"], second.progress()["counts"]["finish"]) == (5, 2)
    assert shop.done.index(7) > shop.done.index(4)
    nothing_is_left(shop.app)


def test_a_machine_that_stands_still_before_a_job_begins_only_delays_it(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens, stand = StartGate.opens, threading.Event()

    def slow(self: StartGate, execution: Execution) -> bool:
        stand.wait(STALE_S * 1.2)
        return opens(self, execution)

    monkeypatch.setattr(StartGate, "opens", slow)
    shop.app.submit("enroll", numbers(2))
    assert drain(shop.app)["finish"] == 2


@pytest.mark.each_database(reason="what is held back is chosen in SQL")
def test_what_a_person_holds_back_stays(shop: Shop) -> None:
    paused = shop.app.submit(shop.enroll, numbers(3), paused=True)
    assert drain(shop.app) == {}
    paused.resume()
    shop.app.operations.pause("default")
    assert drain(shop.app) == {}
    shop.app.operations.unpause("default")
    paused.cancel()
    drain(shop.app)
    assert paused.progress()["counts"]["cancelled"] == 3
    assert paused.progress()["done"]


def test_a_limit_says_what_is_left_and_the_next_drain_performs_it(shop: Shop) -> None:
    task = shop.app.submit(shop.enroll, numbers(300))
    with pytest.raises(Undrained, match="has performed 100 jobs, and more are due: 200 of enroll in default"):
        drain(shop.app, limit=100)
    assert task.progress()["counts"]["finish"] == 100
    assert drain(shop.app) == {"finish": 200}
    assert sorted(shop.done) == list(range(300)), "each once"
    nothing_is_left(shop.app)


def test_a_job_that_sends_itself_again_has_no_end(shop: Shop) -> None:
    shop.again.perform_async({})
    with pytest.raises(Undrained, match="1 of again in default"):
        drain(shop.app, limit=5)


def test_the_person_who_runs_the_tests_may_end_a_drain(shop: Shop) -> None:
    @shop.app.worker
    def slow(item: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    shop.app.submit(slow, [{}, {}])
    with pytest.raises(KeyboardInterrupt):
        drain(shop.app)
    nothing_runs = [each.name for each in threading.enumerate() if each.name in ("recorder", "heartbeat", "borrower")]
    assert (nothing_runs, shop.app.processes()) == ([], [])


def test_inline_a_list_and_a_job_are_over_when_they_are_submitted(shop: Shop) -> None:
    @shop.app.worker
    def parent(item: dict[str, Any]) -> None:
        shop.app.submit(shop.enroll, numbers(2, 20))
        shop.done.append("parent")

    with inline(shop.app):
        assert shop.app.submit(shop.enroll, numbers(2)).progress()["done"]
        job_id = shop.enroll.perform_async({"n": 7, "fails": 1})
        assert shop.app.event(str(job_id))["status"] == "finish"
        assert shop.enroll.submit([{"n": 8}]).progress()["done"]
        shop.app.submit(parent, [{}])
    assert shop.done == [0, 1, 7, 7, 8, "parent", 20, 21]
    assert not shop.app.submit(shop.enroll, numbers(1)).progress()["done"]


def test_inline_a_task_goes_on_with_what_is_added_and_once_it_may(shop: Shop) -> None:
    with inline(shop.app):
        task = shop.app.submit(shop.enroll, numbers(1), open=True, paused=True)
        assert task.resume()
        assert task.counts["finish"] == 1
        task.add(numbers(1, 1))
        assert task.counts["finish"] == 2
        task.add([{"n": 2, "refused": True}])
        assert task.seal()
        assert task.progress()["done"]
        shop.done.clear()
        assert task.retry()
        assert shop.done == [2]


def test_a_running_worker_leaves_nothing_behind_even_if_the_test_fails(shop: Shop) -> None:
    held = threading.Event()

    @shop.app.worker(queue="low")
    def waits(item: dict[str, Any]) -> None:
        while not held.wait(0.01):
            current_job().should_stop()

    with running(shop.app) as launcher:
        assert shop.app.submit(shop.enroll, numbers(3)).wait(timeout=60)["counts"]["finish"] == 3
        assert launcher.pool.concurrency == 2
    task = shop.app.submit(waits, [{}])

    def fails() -> None:
        with running(shop.app, concurrency=1, shutdown_s=0.1):
            wait_for(lambda: task.progress()["counts"]["working"] == 1, "the job runs")
            raise LookupError

    with pytest.raises(LookupError):
        fails()
    assert task.progress()["counts"]["enqueue"] == 1
    assert [each.name for each in threading.enumerate() if each.name == "processor"] == []
    held.set()
    assert drain(shop.app) == {"finish": 1}
    nothing_is_left(shop.app)


def test_drain_beside_a_running_worker_is_another_process(shop: Shop) -> None:
    with running(shop.app):
        task = shop.app.submit(shop.enroll, numbers(50))
        drain(shop.app)
        task.wait(timeout=60)
    assert sorted(shop.done) == list(range(50))
    nothing_is_left(shop.app)


def test_with_redis_untracked_jobs_would_stay(tmp_path: Path) -> None:
    app = AsyncTask(environ={}, broker_url="redis://localhost:1/0", data_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="leave it empty in tests"):
        drain(app)


def test_a_list_for_celery_in_eager_mode_says_what_performs_it_and_drain_does(world: World) -> None:
    app, celery = world.app(), Celery("eager", broker="redis://localhost:1/0")
    celery.conf.task_always_eager = True
    attach(celery, app)

    @celery.task(bind=True, name="eager.note", shared=False)  # type: ignore[untyped-decorator]
    def note(self: Any, item: dict[str, Any]) -> dict[str, Any]:
        if item["n"] == 1:
            raise NormalException("not qualified")
        if item["n"] == 2:
            raise ZeroDivisionError("a bug")
        return {"name": self.name, "row": item["n"]}

    task = app.submit(note, numbers(4))
    app.start_services()  # its dispatcher would have Celery call the tasks, unrecorded, again and again
    try:
        with pytest.raises(TimeoutError, match=r"eager mode .* asynctask\.testing\.drain\(app\) performs what waits"):
            task.wait(timeout=0.5)
    finally:
        app.stop_services()
    assert drain(app) == {"finish": 2, "failed": 1, "error": 1}
    assert task.events(status="finish")[0]["result"] == {"name": "eager.note", "row": 0}
    assert task.progress()["done"]


def test_lists_for_dramatiq_and_rq_are_performed_without_their_brokers(world: World) -> None:
    """No Redis answers, and of Dramatiq's asynchronous actors no event loop runs."""
    app, broker = world.app(), StubBroker()
    dramatiq_engine.attach(broker, app)
    rq = rq_engine.attach(Redis(port=1), app, serializer="json")

    @dramatiq.actor(broker=broker)
    async def act(item: dict[str, Any]) -> Any:
        if item["n"] == 1:
            raise NormalException("not qualified")
        current_job().message("hello")
        return item["n"]

    work = rq.job("default")(divide)
    acted, worked = app.submit(act, numbers(3)), app.submit(work, numbers(3))
    assert drain(app) == {"finish": 4, "failed": 1, "error": 1}
    assert [each["result"] for each in acted.events(status="finish")] == [0, 2]
    assert [each["result"] for each in worked.events(status="finish")] == [10, 5]
    assert acted.progress()["done"]
    assert worked.progress()["done"]
