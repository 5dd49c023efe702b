"""What jobs, hooks, brokers and processes do wrong costs the job that it happened to, and no other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.databases import Store
from support.servers import RedisServer
from support.sharing import fetcher_of
from support.untracked import broker_of

from asynctask import AsyncTask, NormalException, current_job, maintenance
from asynctask.brokers.base import RETRY, Copy
from asynctask.database.notify import notify
from asynctask.errors import BrokerUnavailable, ConfigError, InputError, JobInterrupted
from asynctask.job import CurrentJob
from asynctask.ledger.base import dumps
from asynctask.middleware import tracker
from asynctask.middleware.tracker import ATTEMPT, Attempt, Phase, Tracker
from asynctask.runtime import borrower, timeouts
from asynctask.runtime.execution import MAX_PAUSE_S, Follow, decide
from asynctask.runtime.launcher import Launcher
from asynctask.sidekiq.fetcher import AHEAD_S, MAX_FETCH
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database(reason="what stands on the ledger is the same on each database")


class Place:
    """A ledger, its applications, and workers in this process."""

    def __init__(self, folder: Path, store: Store) -> None:
        self.folder = folder
        self._store = store
        self._apps: list[AsyncTask] = []

    def app(self, **more: Any) -> AsyncTask:
        settings: dict[str, Any] = {
            "lease_s": 2.0,
            "heartbeat_s": 0.5,
            "data_dir": str(self.folder / "data"),
            "environ": {},
            **more,
        }
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

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        return self._store.sql(statement)

    def died_under(self) -> None:
        """As if a process had died under every job, and been recovered."""
        self.sql("UPDATE events SET watched = 1, deaths = 1, attempt = 2, due_at = 1")
        self.sql("UPDATE tasks SET next_seq = created_jobs, ready = NULL, due_next = 1")

    def close(self) -> None:
        for app in self._apps:
            app.close()


@pytest.fixture
def place(tmp_path: Path, store: Store) -> Iterator[Place]:
    made = Place(tmp_path, store)
    yield made
    made.close()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """An empty Redis."""
    with redis_server.client() as client:
        client.flushall()
    return redis_server.url


# -- jobs beside each other


def test_jobs_that_were_held_by_a_dead_process_run_one_at_a_time(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken out: those that wait for their turn, in `Borrower.step`. The last ones began with the next look of an idle
    process, for none was checked in the ledger before."""
    monkeypatch.setattr(borrower, "IDLE_S", 600.0)
    app, met = place.app(), []
    two = threading.Barrier(2)

    @app.worker(retry=0)
    def meet(item: dict[str, int]) -> None:
        try:
            two.wait(0.15)
        except threading.BrokenBarrierError:  # nobody else runs
            two.reset()
        else:
            met.append(item["n"])

    task = app.submit(meet, [{"n": n} for n in range(4)])
    place.died_under()
    with place.working(app, concurrency=4):
        assert task.wait(timeout=120)["counts"]["finish"] == 4
    assert met == []


# -- workers that this process does not know


def test_an_item_whose_worker_is_not_known_here_waits_without_a_retry(place: Place) -> None:
    app, old = place.app(), place.app()
    worker = app.worker(name="new", retry=0)(lambda item: 1)
    ran: list[int] = []
    plain = app.worker(name="plain", retry=0, use_task_event=False)(lambda: ran.append(1))
    task = app.submit(worker, [{"n": 1}])
    plain.perform_async()
    known = old.worker(name="known")(lambda item: 1)
    with place.working(old):
        assert old.submit(known, [{"n": 2}]).wait(timeout=120)["done"]  # a later one passes it
        (reason,) = (each for each in app.operations.wait_reasons(task.id) if each.code == "unknown_worker")
        assert "registers new" in reason.message
    waits = place.sql("SELECT attempt, process FROM events WHERE items = 0 AND status = 'enqueue' AND due_at > 0")
    assert waits == [(1, None)], "the untracked one waits where it was"
    (event,) = task.events()
    assert (event["status"], event["attempt"], event["retries"]) == ("enqueue", 1, 0)
    with place.working(app):
        assert task.wait(timeout=120)["counts"]["finish"] == 1
        wait_for(lambda: ran, "the other one is performed too")


def test_an_item_whose_worker_a_process_does_not_know_is_put_off_there_once_and_says_so(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a Task with several workers, which a process borrows that performs some. It is due again at once, and that
    process borrows it no more; one that knows its worker does, without a search of maintenance. It is notified, though the
    hints of the Task may be no news, because another row is due already."""
    monkeypatch.setitem(maintenance.EVERY_S, "find_lost", 3_600.0)
    notified: list[Any] = []

    def notified_by(connection: Any) -> None:
        notified.append(connection)
        notify(connection)

    monkeypatch.setattr(tracker, "notify", notified_by)
    app, old = place.app(), place.app()
    app.worker(name="new", retry=0)(lambda item: 1)
    for each in (app, old):
        each.worker(name="known", retry=0)(lambda item: 1)
    task = app.submit_jobs([("new", {"n": 1}), ("known", {"n": 2})])
    with place.working(old, concurrency=1):
        wait_for(lambda: task.progress()["counts"]["finish"] == 1, "the known one is performed")
        for n in range(3):  # each is borrowed after a query that finds the item due
            assert old.submit("known", [{"n": n}]).wait(timeout=120)["done"]
    event, _ = task.events()
    assert (event["status"], event["attempt"], event["retries"]) == ("enqueue", 2, 0)
    (message,) = event["messages"]
    assert "no process that took it knows 'new'" in message["message"]
    assert place.sql(f"SELECT COUNT(*) FROM events WHERE due_at > {app.ledger.now()}") == [(0,)]
    assert len(notified) == 1
    with place.working(app):
        assert task.wait(timeout=120)["counts"]["finish"] == 2


# -- coroutines


def test_a_coroutine_that_is_cancelled_by_itself_ends_in_error(place: Place) -> None:
    app, runs = place.app(), []

    @app.worker(retry=0)
    async def cancels(item: Any) -> None:
        runs.append(1)
        raise asyncio.CancelledError

    task = app.submit(cancels, [{}])
    with place.working(app):
        assert task.wait(timeout=120)["counts"]["error"] == 1
    assert runs == [1]


def test_a_coroutine_that_swallows_its_timeout_or_blocks_the_loop_ends_by_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "GRACE_S", 0.1)
    app, over, gate = place.app(), threading.Event(), threading.Event()

    @app.worker(retry=0, timeout=0.1)
    async def deaf(item: Any) -> None:
        while not over.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    @app.worker(retry=0, timeout=0.1)
    async def blocks(item: Any) -> None:
        gate.wait(120)

    @app.worker(retry=0)
    async def good(item: Any) -> None: ...

    try:
        with place.working(app):
            for worker in (deaf, blocks):
                task = app.submit(worker, [{}])
                assert task.wait(timeout=120)["counts"]["error"] == 1
                assert task.events()[0]["problem"] == "timeout"
            over.set()
            assert app.submit(good, [{}]).wait(timeout=120)["counts"]["finish"] == 1
            gate.set()
    finally:
        over.set()
        gate.set()


# -- failures that fail themselves


@pytest.mark.parametrize("count", ["many", "x" * 300, None, -7, 10**15, [1]])
def test_an_untracked_job_in_redis_that_fails_with_an_unreadable_error_is_kept(
    place: Place, redis_url: str, count: Any
) -> None:
    app = place.app(broker_url=redis_url)
    broker = broker_of(app)

    @app.worker(name="bad", use_task_event=False)
    def bad() -> None:
        raise ValueError("bad \udcff name")

    jid = app.ids.jid()
    payload = {"class": "bad", "args": [], "jid": jid, "retry": 10**6, "retry_count": count}
    app.ensure_schema()
    with place.working(app):
        broker.push([Copy(jid, 0, "default", dumps(payload))])
        wait_for(lambda: broker.members(RETRY, 10), "it is kept")
        assert broker.holders() == set()


def test_an_untracked_job_of_the_ledger_that_fails_with_an_unreadable_error_is_kept(place: Place) -> None:
    app = place.app()

    @app.worker(name="bad", use_task_event=False)
    def bad() -> None:
        raise ValueError("bad \udcff name")

    with place.working(app):
        bad.perform_async()
        wait_for(lambda: app.operations.listed("retries")["entries"], "it is kept")
    (entry,) = app.operations.listed("retries")["entries"]
    assert (entry["worker"], entry["tracked"], entry["retries"]) == ("bad", False, 1)


def test_an_untracked_job_around_which_the_runtime_fails_is_among_the_dead(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = place.app()
    worker = app.worker(name="bad", use_task_event=False)(lambda: 1 / 0)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a fault of the runtime")

    monkeypatch.setattr("asynctask.sidekiq.sharing.decide_untracked", broken)
    worker.perform_async()
    with place.working(app):
        wait_for(lambda: place.sql("SELECT 1 FROM events WHERE status = 'error' AND items = 0"), "it lies there")


@pytest.mark.parametrize("answer", [float("inf"), float("nan"), 1e300, 10**400, -1, MAX_PAUSE_S + 1, "soon", True])
def test_a_pause_that_is_no_usable_number_is_the_usual_one_and_logged(place: Place, answer: Any) -> None:
    worker = place.app().worker(name="w", retry_in=lambda count, error, job: answer)(lambda: None)
    with capture_logs() as logs:
        decision = decide(ValueError(), CurrentJob("j"), worker, retries=0, limit=3, noise=0.0)
    assert (decision.follow, decision.delay) == (Follow.RETRY, 15_000_000)
    assert [(line["event"], line["log_level"], line["worker"]) for line in logs] == [("retry_in_refused", "warning", "w")]


@pytest.mark.parametrize(
    ("answer", "delay"), [(None, 15_000_000), (0, 0), (0.5, 500_000), (MAX_PAUSE_S, MAX_PAUSE_S * 1_000_000)]
)
def test_a_usable_pause_or_none_is_not_logged(place: Place, answer: Any, delay: int) -> None:
    worker = place.app().worker(name="w", retry_in=lambda count, error, job: answer)(lambda: None)
    with capture_logs() as logs:
        decision = decide(ValueError(), CurrentJob("j"), worker, retries=0, limit=3, noise=0.0)
    assert (decision.follow, decision.delay, logs) == (Follow.RETRY, delay, [])


# -- attempts that count no more


def test_a_watched_job_that_is_anothers_when_it_begins_is_not_performed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, performed = place.app(), []
    worker = app.worker(retry=0, name="w")(lambda item: performed.append(1))
    task = app.submit(worker, [{}])
    place.died_under()
    start, begun = Tracker.start, threading.Event()

    def too_late(tracker: Tracker, attempt: Attempt) -> None:
        place.sql("UPDATE events SET attempt = 3, process = NULL, due_at = 9000000000000000")
        start(tracker, attempt)
        begun.set()

    monkeypatch.setattr(Tracker, "start", too_late)
    with place.working(app) as launcher:
        assert begun.wait(120)
        wait_for(lambda: not launcher.pool.busy, "its thread let it go")
    assert (performed, task.events()[0]["status"]) == ([], "enqueue")


def test_should_stop_says_that_the_attempt_counts_no_more(place: Place) -> None:
    app, said = place.app(), []

    @app.worker(retry=0)
    def asks(item: Any) -> None:
        job = current_job()
        said.append(job.should_stop())
        job.local[ATTEMPT].phase = Phase.LOST
        said.append(job.should_stop())

    task = app.submit(asks, [{}])
    with place.working(app):
        task.wait(timeout=120)
    assert said == [False, True]


# -- who says what a job came to


def test_a_job_that_has_returned_is_not_recorded_as_interrupted(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    app, outcome = place.app(), Tracker.outcome
    inside, go = threading.Event(), threading.Event()

    def held_up(*args: Any) -> Any:
        inside.set()
        assert go.wait(120)
        return outcome(*args)

    monkeypatch.setattr(Tracker, "outcome", held_up)
    task = app.submit(app.worker(retry=0, name="w")(lambda item: "through"), [{}])
    with place.working(app) as launcher:
        assert inside.wait(120)
        (execution,) = launcher.pool.running()
        launcher.performer.interrupted(execution)  # as a stop does with what still runs
        go.set()
        assert task.wait(timeout=120)["counts"]["finish"] == 1
    (event,) = task.events()
    assert (event["attempt"], event["result"]) == (1, "through")
    assert [message["status"] for message in event["messages"]] == ["working", "finish"]


@pytest.mark.parametrize("raises", [False, True])
def test_what_a_thread_comes_to_after_it_was_given_up_changes_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    app, outcome = place.app(), Tracker.outcome
    began, gate = threading.Event(), threading.Event()
    inside, go = threading.Event(), threading.Event()

    def held_up(*args: Any) -> Any:
        inside.set()
        assert go.wait(120)
        return outcome(*args)

    @app.worker(retry=0)
    def late(item: Any) -> int:
        began.set()
        assert gate.wait(120)
        if raises and current_job().attempt == 1:
            raise ValueError("late")
        return current_job().attempt

    task = app.submit(late, [{}])
    with place.working(app) as launcher:
        assert began.wait(120)
        (execution,) = launcher.pool.running()
        monkeypatch.setattr(Tracker, "outcome", held_up)
        stop = threading.Thread(target=launcher.performer.interrupted, args=(execution,), daemon=True)
        stop.start()
        assert inside.wait(120)
        gate.set()
        wait_for(lambda: not launcher.pool.busy, "its thread came back")
        go.set()
        assert task.wait(timeout=120)["counts"]["finish"] == 1
        stop.join(120)
    (event,) = task.events()
    assert (event["result"], event["problem"]) == (2, None)
    said = [(message["attempt"], message["message"]) for message in event["messages"]]
    assert said[:3] == [(1, "In progress"), (1, "Interrupted"), (1, "Waiting for retry")]
    assert said[-1] == (2, "Done")


# -- what a job makes of its interruption


def and_from(error: BaseException) -> None:
    raise RuntimeError("the upload broke off") from error


def and_while(error: BaseException) -> None:
    raise RuntimeError("the upload broke off")


def and_from_another(error: BaseException) -> None:
    raise RuntimeError("the upload broke off") from OSError("closed")


def and_refuses(error: BaseException) -> None:
    raise NormalException("the upload broke off")


def and_in_a_group(error: BaseException) -> None:
    raise BaseExceptionGroup("of the upload", [ValueError(), error])


@pytest.mark.parametrize("kind", ["tracked", "untracked", "async"])
@pytest.mark.parametrize("raises", [and_from, and_while, and_from_another, and_refuses, and_in_a_group])
def test_an_interruption_that_the_job_makes_another_error_of_is_one(
    place: Place, kind: str, raises: Callable[[BaseException], None]
) -> None:
    app, began, over = place.app(), threading.Event(), threading.Event()

    def body() -> None:
        began.set()
        try:
            while not over.wait(0.01):
                pass
        except BaseException as error:
            raises(error)

    async def coroutine() -> None:
        began.set()
        try:
            await asyncio.sleep(30)
        except BaseException as error:
            raises(error)

    with place.working(app, shutdown_s=0.0):
        if kind == "untracked":
            app.worker(name="w", retry=0, use_task_event=False)(body).perform_async()
        elif kind == "async":

            @app.worker(name="w", retry=0)
            async def awaits(item: Any) -> None:
                await coroutine()

            app.submit("w", [{}])
        else:
            app.submit(app.worker(name="w", retry=0)(lambda item: body()), [{}])
        assert began.wait(120)
    over.set()
    assert place.sql("SELECT status, attempt, retries, problem FROM events") == [("enqueue", 2, 0, None)]


def test_an_interruption_that_the_job_invents_is_an_error_of_its_own(place: Place) -> None:
    app = place.app()

    @app.worker(retry=0)
    def invents(item: Any) -> None:
        try:
            raise JobInterrupted
        except JobInterrupted as error:
            raise ValueError("of its own") from error

    task = app.submit(invents, [{}])
    with place.working(app):
        assert task.wait(timeout=120)["counts"]["error"] == 1


# -- seconds that no clock can reach


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), 0, -1, 10**400, True, "5"])
def test_a_timeout_that_is_no_time_is_refused_where_the_worker_is_registered(place: Place, timeout: Any) -> None:
    with pytest.raises(ConfigError, match="timeout must be a number of seconds"):
        place.app().worker(name="w", timeout=timeout)(lambda item: None)


def test_a_timeout_of_centuries_is_none(place: Place) -> None:
    app = place.app()

    @app.worker(retry=0, timeout=1e10)
    async def awaits(item: Any) -> str:
        await asyncio.sleep(0)
        return "through"

    threaded = app.worker(name="threaded", retry=0, timeout=1e10)(lambda item: "through")
    with place.working(app):
        for worker in (awaits, threaded):
            assert app.submit(worker, [{}]).wait(timeout=120)["counts"]["finish"] == 1


def test_a_wait_for_a_task_takes_any_number_of_seconds(place: Place) -> None:
    app = place.app()
    task = app.submit(app.worker(name="w")(lambda item: None), [{}])
    with pytest.raises(TimeoutError):
        task.wait(timeout=0.2, poll_s=float("inf"))
    for wrong in ({"timeout": float("nan")}, {"timeout": 1, "poll_s": float("nan")}):
        with pytest.raises(InputError, match="NaN"):
            task.wait(**wrong)
    with place.working(app):
        assert task.wait(timeout=float("inf"), poll_s=0.01)["done"]


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), -1.0])
def test_a_setting_that_is_no_time_is_refused(place: Place, seconds: float) -> None:
    with pytest.raises(ConfigError, match="shutdown_s must be between"):
        place.app(shutdown_s=seconds)
    with pytest.raises(ConfigError, match="shutdown_s must be between"):
        place.app().launcher(shutdown_s=seconds)


# -- the end


def test_a_broker_that_is_away_at_the_end_does_not_keep_the_process_from_stopping(
    place: Place, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, began, gate = place.app(broker_url=redis_url), threading.Event(), threading.Event()

    @app.worker(use_task_event=False)
    def deaf() -> None:
        began.set()
        while not gate.is_set():
            try:
                gate.wait(120)
            except BaseException:
                continue

    launcher = app.launcher(concurrency=1, shutdown_s=0.1)
    launcher.start()
    deaf.perform_async()
    assert began.wait(120)

    def away(*_: Any, **__: Any) -> None:
        raise BrokerUnavailable("down")

    monkeypatch.setattr(app.broker, "put_back", away)
    launcher.stop()
    thread = launcher.heartbeat._thread
    assert thread is not None
    assert not thread.is_alive(), "the rest of the stop came"
    gate.set()


def test_a_process_shows_that_it_is_quiet_without_waiting_for_its_next_heartbeat(place: Place) -> None:
    app = place.app(lease_s=3_600.0, heartbeat_s=1_800.0)
    with place.working(app) as launcher:
        assert [process["quiet"] for process in app.processes()] == [False]
        launcher.quiet()
        wait_for(lambda: app.processes()[0]["quiet"], "it shows that it is quiet")


# -- how jobs are fetched


def test_acknowledgements_alone_are_no_round_trip_each_while_jobs_lie_ready(
    place: Place, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = place.app(broker_url=redis_url)
    clock = app.clock
    real = broker_of(app).exchange
    asked: list[tuple[float, int, int]] = []

    def exchange(process: str, done: Any, queues: Any, limit: int) -> Any:
        asked.append((clock.monotonic(), len(done), limit))
        return real(process, done, queues, limit)

    monkeypatch.setattr(app.broker, "exchange", exchange)
    ran: list[int] = []
    short = app.worker(name="short", use_task_event=False)(lambda n: ran.append(n))
    short.perform_bulk(range(3_000))
    with place.working(app, concurrency=1):
        wait_for(lambda: len(ran) == 3_000, "all ran")
        wait_for(lambda: sum(done for _, done, _ in asked) == 3_000, "all are acknowledged")
    pairs = pairwise(asked)
    alone = [at - before for (before, _, _), (at, done, limit) in pairs if limit <= 0 < done < MAX_FETCH // 2]
    assert [gap for gap in alone if gap < AHEAD_S / 2] == []  # a thread may be held up between two looks at the clock


def test_the_longer_a_fetch_takes_the_more_jobs_lie_ready_when_it_begins(
    place: Place, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = place.app(broker_url=redis_url)
    launcher = app.launcher(concurrency=2, shutdown_s=1.0)
    fetcher, pause = fetcher_of(launcher), threading.Event()
    real = broker_of(app).exchange

    def slow(*args: Any) -> Any:
        pause.wait(0.05)  # the fetch itself, as over a long wire
        return real(*args)

    monkeypatch.setattr(app.broker, "exchange", slow)
    ran: list[int] = []
    short = app.worker(name="short", use_task_event=False)(lambda n: ran.append(n))
    short.perform_bulk(range(100))
    launcher.start()
    try:
        wait_for(lambda: len(ran) == 100, "all ran")
        assert fetcher._latency > 0.01
    finally:
        launcher.stop()
    monkeypatch.setattr(fetcher, "_rate", lambda: 1_000.0)
    monkeypatch.setattr(launcher.pool.gate, "may_start", lambda: True)
    fetcher._latency = 0.0
    assert fetcher._room() == 2 + 100
    fetcher._latency = 0.2
    assert fetcher._room() == 2 + 100 + 400
