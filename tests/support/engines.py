"""Each engine with an application attached, for the conformance suite; run as a module that an engine's command loads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import dramatiq
import rq
from celery import Celery
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Retries
from huey import RedisHuey
from redis import Redis
from support.engine_suite import COLUMNS, act, cells
from support.export_app import slow_merge
from support.world import SUPPORT, settings

from asynctask import AsyncTask, maintenance
from asynctask.integrations import base
from asynctask.integrations import celery as on_celery
from asynctask.integrations import dramatiq as on_dramatiq
from asynctask.integrations import huey as on_huey
from asynctask.integrations import rq as on_rq
from asynctask.integrations.base import pushed_job
from asynctask.job import CurrentJob

FOLDER, DATABASE, BROKER, ENGINE = "ENGINE_FOLDER", "ENGINE_DATABASE", "ENGINE_BROKER", "ENGINE_KIND"
BREAK = "ENGINE_BREAK"
"""Names one of :data:`BREAKS`."""
SCHEDULE = "ENGINE_SCHEDULE"
"""If set, ``act`` has a schedule of each second."""


LONE_ENDS: dict[str, tuple[dict[str, Any], str, str | None, Any]] = {
    "exits well": ({"do": "exit", "code": 0}, "finish", None, None),
    "exits": ({"do": "exit", "code": 3}, "error", "Error: exit code 3", None),
    "is put off": ({"do": "put_off", "as": "generator"}, "error", "work that nobody performs (generator)", None),
    "is put off as coroutine": (
        {"do": "put_off", "as": "coroutine"},
        "error",
        "work that nobody performs (coroutine)",
        None,
    ),
    "forks": ({"do": "fork", "child": "exit"}, "finish", None, {"child": 5}),
}
"""Ends of a lone job of the actor ``act`` of each engine, which is retried twice: the item, the status, a part of the last
message, and the result."""


def queue_of(folder: Path) -> str:
    """The queue of the jobs of one folder: an engine's server may be that of other tests, too."""
    return f"{folder.name}-default"


def own(folder: Path, database_url: str, broker_url: str) -> tuple[dict[str, Any], AsyncTask]:
    """The application's own runtime."""
    app = hooked(folder, AsyncTask(**settings(folder, database_url=database_url, app="support.engines:app")))
    made = {
        "act": app.worker(name="act", retry=0)(partial_of(folder)),
        "again": app.worker(name="again", retry=2, retry_in=lambda *_: 0.01)(partial_of(folder)),
    }
    app.export(columns=COLUMNS, name="cells", retry=2, retry_in=lambda *_: 0.01)(cells_of(folder))
    return made, app


def celery(folder: Path, database_url: str, broker_url: str) -> tuple[Celery, AsyncTask]:
    """Celery on Redis or RabbitMQ."""
    made = Celery("shop", broker=broker_url, set_as_current=False)
    made.conf.update(
        task_default_queue=queue_of(folder),
        worker_prefetch_multiplier=1,
        broker_connection_retry_on_startup=True,
        worker_hijack_root_logger=False,
        task_ignore_result=True,
    )
    if broker_url.startswith("redis:"):
        made.conf.broker_transport_options = {"global_keyprefix": f"{folder.name}:"}
    app = hooked(folder, AsyncTask(**settings(folder, database_url=database_url)))
    on_celery.attach(made, app)
    made.task(name="act", shared=False)(partial_of(folder))
    retried = {"autoretry_for": (ValueError,), "max_retries": 2, "default_retry_delay": 0, "retry_backoff": False}
    made.task(name="again", shared=False, **retried)(partial_of(folder))
    made.task(name="cells", shared=False, export_columns=COLUMNS, **retried)(cells_of(folder))
    return made, app


def dramatiq_(folder: Path, database_url: str, broker_url: str) -> tuple[dramatiq.Broker, AsyncTask]:
    """Dramatiq on Redis or RabbitMQ."""
    broker: dramatiq.Broker
    if broker_url.startswith("redis:"):
        broker = RedisBroker(url=broker_url, namespace=folder.name, heartbeat_timeout=2_000, maintenance_chance=1_000_000)
    else:
        broker = RabbitmqBroker(url=broker_url)
    app = hooked(folder, AsyncTask(**settings(folder, database_url=database_url)))
    on_dramatiq.attach(broker, app)
    assert any(isinstance(each, Retries) for each in broker.middleware)
    actor: Any = partial(dramatiq.actor, broker=broker, queue_name=queue_of(folder))
    actor(partial_of(folder), actor_name="act", max_retries=0)
    retried = {"max_retries": 2, "min_backoff": 1, "max_backoff": 2}
    actor(partial_of(folder), actor_name="again", **retried)
    actor(cells_of(folder), actor_name="cells", export_columns=COLUMNS, **retried)
    return broker, app


def rq_act(item: dict[str, Any], progress: dict[str, Any] | None = None) -> Any:
    """The function of the suite where RQ can import it."""
    return act(Path(os.environ[FOLDER]), item, progress)


def rq_again(item: dict[str, Any], progress: dict[str, Any] | None = None) -> Any:
    """The same, for the worker that is retried."""
    return act(Path(os.environ[FOLDER]), item, progress)


def rq_cells(shard: dict[str, Any]) -> Iterator[Any]:
    """The export of the suite."""
    return cells(Path(os.environ[FOLDER]), shard)


def rq_(folder: Path, database_url: str, broker_url: str) -> tuple[on_rq.RqEngine, AsyncTask]:
    """RQ, on a queue of its own."""
    app = hooked(folder, AsyncTask(**settings(folder, database_url=database_url)))
    made = on_rq.attach(Redis.from_url(broker_url), app, serializer="json")
    decorated = {
        "rq_act": made.job(queue_of(folder), name="act")(rq_act),
        "rq_again": made.job(queue_of(folder), name="again", retry=rq.Retry(max=2))(rq_again),
        "rq_cells": made.job(queue_of(folder), name="cells", retry=rq.Retry(max=2), export_columns=COLUMNS)(rq_cells),
    }
    if ENGINE in os.environ:  # in a worker, which imports them by their names
        globals().update(decorated)
    return made, app


def huey_(folder: Path, database_url: str, broker_url: str) -> tuple[RedisHuey, AsyncTask]:
    """Huey on Redis."""
    made = RedisHuey(queue_of(folder), url=broker_url)
    app = hooked(folder, AsyncTask(**settings(folder, database_url=database_url)))
    on_huey.attach(made, app)
    made.task(name="act")(partial_of(folder))
    made.task(name="again", retries=2)(partial_of(folder))
    made.task(name="cells", retries=2, export_columns=COLUMNS)(cells_of(folder))
    return made, app


def hooked(folder: Path, app: AsyncTask) -> AsyncTask:
    """Notes in the folder which hooks are called."""

    def note(*said: Any) -> None:
        with (folder / "hooks").open("a") as file:
            file.write(json.dumps(said) + "\n")

    @app.on("error")
    def error(raised: BaseException, context: Mapping[str, Any]) -> None:
        note("error", context["job_id"], context["attempt"], context["follow"], f"{type(raised).__name__}: {raised}")

    @app.on("death")
    def death(job: CurrentJob, raised: BaseException) -> None:
        note("death", job.job_id, job.attempt, "", f"{type(raised).__name__}: {raised}")

    return app


def partial_of(folder: Path) -> Any:
    """The function of the suite as an ordinary function of one item."""

    def function(item: dict[str, Any], progress: dict[str, Any] | None = None) -> Any:
        return act(folder, item, progress)

    return function


def cells_of(folder: Path) -> Any:
    """The export of the suite as an ordinary function of one shard."""

    def function(shard: dict[str, Any]) -> Iterator[Any]:
        return cells(folder, shard)

    return function


# -- breaks: what makes a worker of RQ one that the suite has to notice, or slows any one down


def fenceless() -> None:
    """Does not carry the attempt of a job of a Task."""
    base.pushed_job = lambda copy: replace(pushed_job(copy), attempt=None)


def final() -> None:
    """Does not say that a retry follows."""
    on_rq._next_try = lambda job: None


def hasty() -> None:
    """Lets RQ go on without a record."""
    on_rq._Performed.settle = lambda self, delay_s=None: None  # type: ignore[method-assign]


def slow() -> None:
    """Waits in the middle of a merge for a file in the folder."""
    slow_merge(Path(os.environ[FOLDER]))


def eager() -> None:
    """Looks for lost copies all the time, and sends at once what its engine gave up."""
    maintenance.EVERY_S["find_lost"] = base.PUT_OFF_S = 0.2  # type: ignore[misc]


BREAKS: Mapping[str, Callable[[], None]] = {each.__name__: each for each in (fenceless, final, hasty, slow, eager)}

MADE: Mapping[str, Any] = {"own": own, "celery": celery, "dramatiq": dramatiq_, "rq": rq_, "huey": huey_}


def send(kind: str, made: Any, folder: Path, worker: str, item: Mapping[str, Any]) -> str:
    """Sends a lone job of an engine of this module; returns its id."""
    if kind == "celery":
        return str(made.tasks[worker].delay(item).id)
    if kind == "dramatiq":
        return str(made.get_actor(worker).send(item).message_id)
    if kind == "rq":
        retry = rq.Retry(max=2) if worker == "again" else None
        return str(made.queue(queue_of(folder)).enqueue(f"{__name__}.rq_{worker}", item, retry=retry).id)
    if kind == "huey":
        return str(made.enqueue(made._registry.string_to_task(f"{__name__}.{worker}")((item,))).id)
    return str(made[worker].perform_async(item))


def environ(kind: str, folder: Path, database_url: str, broker_url: str) -> dict[str, str]:
    """What a process needs in its environment to find an engine in this module."""
    return {
        ENGINE: kind,
        FOLDER: str(folder),
        DATABASE: database_url,
        BROKER: broker_url,
        "PYTHONPATH": f"{SUPPORT.parent}:{SUPPORT.parent.parent}",
    }


def close(kind: str, made: Any, folder: Path) -> None:
    """Closes an engine of this module, and removes its queue from RabbitMQ."""
    if kind == "celery":
        if made.conf.broker_url.startswith("amqp:"):
            with made.connection_for_write() as connection:
                connection.channel().queue_delete(queue_of(folder))
        made.close()
    elif kind == "dramatiq" and isinstance(made, RabbitmqBroker):
        for name in (queue_of(folder), f"{queue_of(folder)}.DQ", f"{queue_of(folder)}.XQ"):
            made.channel.queue_delete(name)
        made.close()
    elif kind == "dramatiq":
        made.client.close()
        made.client.connection_pool.disconnect()
    elif kind == "rq":
        made.connection.close()
    elif kind == "huey":
        made.storage.conn.close()
        made.storage.pool.disconnect()


if ENGINE in os.environ:  # in an engine's worker
    BREAKS.get(os.environ.get(BREAK, ""), lambda: None)()
    engine, app = MADE[os.environ[ENGINE]](Path(os.environ[FOLDER]), os.environ[DATABASE], os.environ[BROKER])
    if SCHEDULE in os.environ:
        app.every(1, "act", items=lambda tick: [{"n": int(tick.timestamp())}], missed="all", overlap=True)
