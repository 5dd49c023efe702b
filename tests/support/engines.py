"""Each engine with an application attached, for the conformance suite; run as a module that an engine's command loads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dramatiq
import rq
from celery import Celery
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Retries
from redis import Redis
from support.world import settings

from asynctask import AsyncTask
from asynctask.integrations import celery as on_celery
from asynctask.integrations import dramatiq as on_dramatiq
from asynctask.integrations import rq as on_rq
from asynctask.testing.engine_suite import act

FOLDER, DATABASE, REDIS, ENGINE = "ENGINE_FOLDER", "ENGINE_DATABASE", "ENGINE_REDIS", "ENGINE_KIND"


def own(folder: Path, database_url: str, redis_url: str) -> tuple[None, AsyncTask]:
    """The application's own runtime."""
    app = AsyncTask(**settings(folder, database_url=database_url, app="support.engines:app"))
    app.worker(name="act", retry=0)(partial_of(folder))
    app.worker(name="again", retry=2, retry_in=lambda *_: 0.01)(partial_of(folder))
    return None, app


def celery(folder: Path, database_url: str, redis_url: str) -> tuple[Celery, AsyncTask]:
    """Celery on Redis."""
    made = Celery("shop", broker=redis_url, set_as_current=False)
    made.conf.update(
        task_default_queue=f"{folder.name}-default",
        broker_transport_options={"global_keyprefix": f"{folder.name}:"},
        worker_prefetch_multiplier=1,
        broker_connection_retry_on_startup=True,
        worker_hijack_root_logger=False,
        task_ignore_result=True,
    )
    app = AsyncTask(**settings(folder, database_url=database_url))
    on_celery.attach(made, app)
    made.task(name="act", shared=False)(partial_of(folder))
    retried = {"autoretry_for": (ValueError,), "max_retries": 2, "default_retry_delay": 0, "retry_backoff": False}
    made.task(name="again", shared=False, **retried)(partial_of(folder))
    return made, app


def dramatiq_(folder: Path, database_url: str, redis_url: str) -> tuple[RedisBroker, AsyncTask]:
    """Dramatiq on Redis."""
    broker = RedisBroker(url=redis_url, namespace=folder.name, heartbeat_timeout=2_000, maintenance_chance=1_000_000)
    app = AsyncTask(**settings(folder, database_url=database_url))
    on_dramatiq.attach(broker, app)
    assert any(isinstance(each, Retries) for each in broker.middleware)
    actor: Any = dramatiq.actor
    actor(partial_of(folder), actor_name="act", broker=broker, max_retries=0)
    actor(partial_of(folder), actor_name="again", broker=broker, max_retries=2, min_backoff=1, max_backoff=2)
    return broker, app


def rq_act(item: dict[str, Any], progress: dict[str, Any] | None = None) -> dict[str, Any]:
    """The function of the suite where RQ can import it."""
    return act(Path(os.environ[FOLDER]), item, progress)


def rq_again(item: dict[str, Any], progress: dict[str, Any] | None = None) -> dict[str, Any]:
    """The same, for the worker that is retried."""
    return act(Path(os.environ[FOLDER]), item, progress)


def rq_(folder: Path, database_url: str, redis_url: str) -> tuple[on_rq.RqEngine, AsyncTask]:
    """RQ, on a queue of its own."""
    app = AsyncTask(**settings(folder, database_url=database_url))
    made = on_rq.attach(Redis.from_url(redis_url), app, serializer="json")
    decorated = {
        "rq_act": made.job(f"{folder.name}-default", name="act")(rq_act),
        "rq_again": made.job(f"{folder.name}-default", name="again", retry=rq.Retry(max=2))(rq_again),
    }
    if ENGINE in os.environ:  # in a worker, which imports them by their names
        globals().update(decorated)
    return made, app


def partial_of(folder: Path) -> Any:
    """The function of the suite as an ordinary function of one item."""

    def function(item: dict[str, Any], progress: dict[str, Any] | None = None) -> dict[str, Any]:
        return act(folder, item, progress)

    return function


MADE: Mapping[str, Any] = {"own": own, "celery": celery, "dramatiq": dramatiq_, "rq": rq_}

if ENGINE in os.environ:  # in an engine's worker
    engine, app = MADE[os.environ[ENGINE]](Path(os.environ[FOLDER]), os.environ[DATABASE], os.environ[REDIS])
