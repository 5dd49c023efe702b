"""What is declared as an export on an engine, and what is refused there. No engine's server is needed: nothing is sent.

That exports are performed is in the suite of engines, :mod:`support.engine_suite`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import dramatiq
import pytest
import sqlalchemy as sa
from celery import Celery
from dramatiq.brokers.stub import StubBroker
from redis import Redis
from support.databases import migrated_file

from asynctask import AsyncTask
from asynctask.database.tables import tasks
from asynctask.errors import ConfigError, Conflict, InputError, UnknownWorker
from asynctask.exports.run import MERGER, merge
from asynctask.integrations import celery, rq
from asynctask.integrations.dramatiq import attach
from asynctask.job import CurrentJob, reset_current_job, set_current_job
from asynctask.ledger.base import loads


def numbers(shard: int) -> Iterator[Sequence[int]]:
    yield from ([n] for n in range(shard))


async def later(shard: int) -> AsyncIterator[Sequence[int]]:
    yield [shard]


def plain(item: dict[str, Any]) -> None: ...


Declare = Callable[..., Any]
"""Declares a function with the options of a task; returns what stands in its place in a module."""


def on_celery(app: AsyncTask) -> Declare:
    made = Celery("shop", broker="memory://", set_as_current=False)
    celery.attach(made, app)

    def declare(function: Any, **options: Any) -> Any:
        return made.task(name=function.__name__, shared=False, **options)(function)

    return declare


def on_dramatiq(app: AsyncTask) -> Declare:
    broker = StubBroker()
    attach(broker, app)

    def declare(function: Any, **options: Any) -> Any:
        return dramatiq.actor(broker=broker, queue_name="sheets", **options)(function)

    return declare


def on_rq(app: AsyncTask) -> Declare:
    attached = rq.attach(Redis(), app, serializer="json")
    return lambda function, **options: attached.job("sheets", **options)(function)


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncTask]:
    monkeypatch.setattr(rq, "_attached", [])
    migrated_file(tmp_path / "a.db")
    made = AsyncTask(database_url=f"sqlite:///{tmp_path}/a.db", data_dir=str(tmp_path), environ={})
    yield made
    made.close()


ENGINES: Mapping[str, Callable[[AsyncTask], Declare]] = {"celery": on_celery, "dramatiq": on_dramatiq, "rq": on_rq}
each_engine = pytest.mark.parametrize("engine", ENGINES)


@each_engine
def test_an_export_is_handed_in_by_its_task_and_merged_on_the_queue_of_its_shards(app: AsyncTask, engine: str) -> None:
    declare = ENGINES[engine](app)
    target, _ = declare(numbers, export_columns=["n"]), declare(plain)
    assert list(app.exports) == ["numbers"]
    assert [row for call in (target, app.workers["numbers"]) for row in call(2)] == [[0], [1]] * 2, "called by a program"
    own = app.workers["numbers"].queue
    for name, queue in ((None, own), ("soon", f"{engine}/soon")):
        task = app.submit_export(target, [1, 2], queue=name)
        assert (task.progress()["worker"], task.progress()["counts"]["total"]) == ("numbers", 2)
        with app.ledger.database.read() as connection:
            (said,) = loads(connection.execute(sa.select(tasks.c.callbacks).where(tasks.c.id == task.id)).scalar())
        assert (said["worker"], said["queue"]) == (MERGER, queue)


@each_engine
def test_what_is_no_export_of_the_engine_is_refused(app: AsyncTask, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    declare = ENGINES[engine](app)
    declare(numbers, export_columns=["n"])
    declare(plain)
    with pytest.raises(InputError, match=f"'plain' is no export: declare it with the option export_columns of {engine}"):
        app.submit_export("plain", [1])
    with pytest.raises(InputError, match="is an export: use submit_export"):
        app.submit("numbers", [{}])
    for ask in (partial(app.submit, MERGER, [{}]), partial(app.submit, "plain", [{}], on_complete=MERGER)):
        with pytest.raises(UnknownWorker):
            ask()
    attached = app.engines[engine]
    monkeypatch.setattr(attached, "capabilities", replace(attached.capabilities, exports=False))
    with pytest.raises(InputError, match=f"runs on {engine}, which performs no merge"):
        app.submit_export("numbers", [1])


@each_engine
def test_what_cannot_be_an_export_is_refused_where_it_is_declared(app: AsyncTask, engine: str) -> None:
    declare = ENGINES[engine](app)

    with pytest.raises(ConfigError, match="two of one name"):
        app.workers[declare(numbers, export_columns=["n", "n"]).name]  # Celery makes a task when it is asked for


@each_engine
def test_an_async_function_is_no_export(app: AsyncTask, engine: str) -> None:
    declare = ENGINES[engine](app)
    with pytest.raises(ConfigError, match="not an async one"):
        app.workers[declare(later, export_columns=["n"]).name]


@pytest.mark.parametrize("engine", ["celery", "dramatiq"])
def test_an_untracked_task_is_no_export(app: AsyncTask, engine: str) -> None:
    declare = ENGINES[engine](app)
    with pytest.raises(ConfigError, match="must be tracked"):
        app.workers[declare(numbers, export_columns=["n"], use_task_event=False).name]


def test_dramatiq_takes_no_queue_for_the_merge_but_that_of_an_export(app: AsyncTask) -> None:
    broker = StubBroker()
    attach(broker, app)
    dramatiq.actor(broker=broker, queue_name="mails")(plain)
    assert MERGER not in broker.actors
    dramatiq.actor(broker=broker, queue_name="sheets", export_columns=["n"])(numbers)
    assert MERGER in broker.actors
    assert {each.partition(".")[0] for each in broker.get_declared_queues()} == {"mails", "sheets"}


def test_nobody_merges_but_the_last_job_of_an_export(app: AsyncTask) -> None:
    ENGINES["dramatiq"](app)(numbers, export_columns=["n"])
    task = app.submit_export("numbers", [1])
    (shard,) = task.events()
    for job_id in ("0" * 24, shard["job_id"]):
        token = set_current_job(CurrentJob(job_id))
        try:
            with pytest.raises(Conflict, match="by nobody else"):
                merge(app, task.progress())
        finally:
            reset_current_job(token)
