"""Untracked jobs of an application without Redis: rows of the ledger that are performed, retried and gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.untracked import dead
from support.world import World

from asynctask import AsyncTask, NormalException, current_job
from asynctask.clock import SECOND
from asynctask.errors import InputError, NotFound, TooLarge
from asynctask.job import CurrentJob
from asynctask.testing import wait_for
from asynctask.worker import Worker

ROWS = "SELECT job_id, status, attempt, retries, queue FROM events WHERE items = 0 ORDER BY id"


@pytest.fixture
def app(world: World) -> AsyncTask:
    return world.app()


@contextmanager
def at_once() -> Iterator[Callable[..., float]]:
    """A delay for retries that is none, for the jitter that Sidekiq adds takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asynctask.runtime.execution._jitter", lambda count, noise: 0)
        yield lambda *_: 0.05


def gone(world: World) -> bool:
    return not world.sql("SELECT 1 FROM events WHERE status <> 'error'")


def test_they_are_performed_with_what_they_were_sent_and_leave_no_row(world: World, app: AsyncTask) -> None:
    seen: list[Any] = []

    def middleware(worker: Worker, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
        seen.append((worker.name, queue, job.attempt, job.payload["locale"], job.payload["tags"]))
        return call_next()

    app.server_middleware.add(middleware)

    @app.worker(use_task_event=False, queue="apart", tags=["x"], members={"locale": "ja"})
    def loose(*args: Any) -> None:
        job = current_job()
        seen.append((args, job.job_id, job.payload["class"], job.payload["retry"], job.task_id))

    jid = loose.perform_async(1, {"ä": None})
    assert world.sql(ROWS) == [(jid, "enqueue", 1, 0, "apart")]
    with world.working(app, queues={"apart": 1}):
        wait_for(lambda: gone(world), "it is done")
    assert seen == [("loose", "apart", 1, "ja", ["x"]), ((1, {"ä": None}), jid, "loose", True, None)]
    assert world.sql("SELECT 1 FROM events") == []
    assert app.doctor() == []


@pytest.mark.one_database(reason="the statements are those of every job's row")
def test_smaller_priorities_go_first_and_later_ones_at_their_time(world: World, app: AsyncTask) -> None:
    ran: dict[str, int] = {}
    loose = app.worker(name="loose", use_task_event=False)(lambda name: ran.setdefault(name, app.ledger.now()))
    for name, priority in (("c", 340), ("a", 120), ("b", 240), ("d", 340)):
        loose.set(priority=priority, members={"long": "x" * 400}).perform_async(name)
    sent = app.ledger.now()
    loose.set(priority=400).perform_in(1.0, "later")
    with world.working(app, concurrency=1):
        wait_for(lambda: gone(world), "all are done")
    assert list(ran) == ["a", "b", "c", "d", "later"]
    assert ran["later"] - sent >= SECOND


def test_a_raise_is_retried_in_its_queue_of_retries_and_the_last_one_is_dead(world: World, app: AsyncTask) -> None:
    told: list[Any] = []
    app.on("death")(lambda job, error: told.append(("death", job.job_id, str(error))))
    with at_once() as delay:

        @app.worker(
            use_task_event=False,
            retry=1,
            retry_in=delay,
            retry_queue="slow",
            backtrace=2,
            retries_exhausted=lambda job, error: told.append("exhausted"),
        )
        def loose(item: str) -> None:
            job = current_job()
            told.append((job.queue, job.attempt, job.payload.get("retry_count"), "failed_at" in job.payload))
            raise NormalException("no refusal, for nobody tracks it")

        jid = str(loose.perform_async("x"))
        with world.working(app, queues={"default": 1, "slow": 1}):
            wait_for(lambda: dead(app) == [jid], "it is dead")
    assert told[:2] == [("default", 1, None, False), ("slow", 2, 0, True)]
    assert sorted(map(str, told[2:])) == sorted(["exhausted", str(("death", jid, "no refusal, for nobody tracks it"))])
    (entry,) = app.operations.listed("dead")["entries"]
    assert (entry["queue"], entry["retries"], entry["tracked"]) == ("slow", 1, False)
    first, *lines = entry["error"].splitlines()
    assert "no refusal" in first
    assert len(lines) == 2
    assert "in `" in lines[0]


@pytest.mark.one_database(reason="the statements are those of every retry")
def test_a_retry_at_once_gets_no_pause_by_chance(world: World, app: AsyncTask) -> None:
    ran: list[int] = []

    @app.worker(use_task_event=False, retry=2, retry_in=lambda *_: 0)
    def loose() -> None:
        ran.append(app.ledger.now())
        raise ValueError("again")

    jid = str(loose.perform_async())
    with world.working(app):
        wait_for(lambda: dead(app) == [jid], "it is dead", timeout=15)  # the usual pauses are longer than 15 s
    assert len(ran) == 3


@pytest.mark.parametrize(
    "options", [{"retry": False}, {"retry": 0, "dead": False}, {"retry": 0, "retries_exhausted": lambda *_: "discard"}]
)
def test_what_is_not_kept_goes_and_its_death_is_told(world: World, app: AsyncTask, options: dict[str, Any]) -> None:
    told: list[str] = []
    app.on("death")(lambda job, error: told.append(job.job_id))

    @app.worker(use_task_event=False, **options)
    def loose() -> None:
        raise ValueError("a bug")

    jid = loose.perform_async()
    with world.working(app):
        wait_for(lambda: told == [jid], "it raised")
        wait_for(lambda: not world.sql("SELECT 1 FROM events"), "it is not kept")


@pytest.mark.one_database(reason="the statements are those of every job's row")
def test_a_job_that_records_by_itself_is_tracked_from_then_on(world: World, app: AsyncTask) -> None:
    @app.worker(use_task_event=False)
    def loose() -> None:
        app.record(current_job().job_id, "working", "half way")

    jid = str(loose.perform_async())
    with pytest.raises(NotFound):
        app.event(jid)
    with world.working(app):
        wait_for(lambda: world.sql("SELECT status FROM events") == [("finish",)], "it is done")
    event = app.event(jid)
    assert "half way" in [each["message"] for each in event["messages"]]
    assert event["outcomes"]["finish"] == 1


@pytest.mark.one_database(reason="the statements are those of every job's row")
def test_a_process_without_redis_has_no_fetcher_and_gives_back_what_it_has_not_begun(world: World, app: AsyncTask) -> None:
    began, over = threading.Event(), threading.Event()

    @app.worker(use_task_event=False)
    def loose(n: int) -> None:
        began.set()
        over.wait(60)

    loose.perform_bulk([(n,) for n in range(3)])
    with world.working(app, concurrency=1) as launcher:
        assert "fetcher" not in {thread.name for thread in threading.enumerate()}
        assert began.wait(60)
        launcher.quiet()
        over.set()
    assert [row[1:4] for row in world.sql(ROWS)] == [("enqueue", row[2], 0) for row in world.sql(ROWS)]
    assert world.one("SELECT COUNT(*) FROM events WHERE due_at IS NOT NULL AND process IS NULL") == 2
    with world.working(app):
        wait_for(lambda: gone(world), "another process performs them")


@pytest.mark.one_database(reason="the statements are those of every job's row")
def test_a_pause_of_their_queue_leaves_them_as_they_are(world: World, app: AsyncTask) -> None:
    ran: list[int] = []
    loose = app.worker(name="loose", use_task_event=False)(ran.append)
    app.operations.pause("default")
    with world.working(app):
        loose.perform_bulk([(n,) for n in range(20)])
        threading.Event().wait(1.5)
        assert (ran, {row[1:4] for row in world.sql(ROWS)}) == ([], {("enqueue", 1, 0)}), "nobody claims them meanwhile"
        app.operations.unpause("default")
        wait_for(lambda: sorted(ran) == list(range(20)), "they go on")


@pytest.mark.one_database(reason="the statements are those of every job's row")
def test_what_no_row_can_keep_is_refused_with_all_that_came_with_it(world: World, app: AsyncTask) -> None:
    loose = app.worker(name="loose", use_task_event=False)(lambda *args: None)
    with pytest.raises(TooLarge, match="hand over where it is"):
        loose.perform_bulk([("small",), ("x" * 4_200_000,)])
    with pytest.raises(InputError):
        loose.perform_async("\ud800")
    app.client_middleware.add(lambda worker, job, queue, call_next: (job.payload.update(jid="j" * 65), call_next())[1])
    with pytest.raises(InputError, match="jid must have"):
        loose.perform_async("x")
    assert world.sql("SELECT 1 FROM events") == []
