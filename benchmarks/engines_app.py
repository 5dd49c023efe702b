"""The application of ``benchmarks.engines``, as the engine's own worker command loads it: one job, tracked or not.

The environment says on which engine, where, and what a job is, for such a command takes no arguments of ours. Untracked, it
loads nothing of ours: a worker that forks pays for each module that it has loaded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asynctask import AsyncTask

__all__ = ["BOOK", "DATABASE", "ENGINE", "REDIS", "TRACKED", "WORK_MS", "build", "environ"]

ENGINE = "BENCHMARK_ENGINE"
REDIS = "BENCHMARK_REDIS"
DATABASE = "BENCHMARK_DATABASE"
BOOK = "BENCHMARK_BOOK"
"""The file that each performed job adds a byte to."""

TRACKED = "BENCHMARK_TRACKED"
WORK_MS = "BENCHMARK_WORK_MS"
NAME = "perform"


def environ(engine: str, redis_url: str, database_url: str, book: Path, *, tracked: bool, work_ms: float) -> dict[str, str]:
    """What a process is told."""
    words = {ENGINE: engine, REDIS: redis_url, DATABASE: database_url, BOOK: str(book), WORK_MS: str(work_ms)}
    return {**words, TRACKED: "1"} if tracked else words


@cache
def _book() -> int:
    return os.open(os.environ[BOOK], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def perform(n: int) -> None:
    """The job: waits and writes its byte. What it waits for is no processor, as with most jobs."""
    if seconds := float(os.environ[WORK_MS]) / 1_000:
        time.sleep(seconds)
    os.write(_book(), b".")


def build() -> tuple[Any, AsyncTask | None, Callable[[Sequence[int]], None]]:
    """The engine's application, ours where the jobs are tracked, and what sends lone jobs one by one."""
    app = None
    if TRACKED in os.environ:
        from asynctask import AsyncTask

        app = AsyncTask(environ={}, database_url=os.environ[DATABASE], data_dir=os.environ[BOOK] + "-data")
    return {"celery": _celery, "dramatiq": _dramatiq, "rq": _rq}[os.environ[ENGINE]](app)


def _celery(app: AsyncTask | None) -> tuple[Any, AsyncTask | None, Callable[[Sequence[int]], None]]:
    from celery import Celery

    celery = Celery("benchmark", broker=os.environ[REDIS], set_as_current=False)
    celery.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=True, task_acks_late=True)
    if app is not None:
        from asynctask.integrations.celery import attach

        attach(celery, app)
    declare: Any = celery.task
    task = declare(name=NAME, shared=False)(perform)

    def send(numbers: Sequence[int]) -> None:
        for n in numbers:
            task.delay(n)

    return celery, app, send


def _dramatiq(app: AsyncTask | None) -> tuple[Any, AsyncTask | None, Callable[[Sequence[int]], None]]:
    import dramatiq
    from dramatiq.brokers.redis import RedisBroker

    broker = RedisBroker(url=os.environ[REDIS])
    if app is not None:
        from asynctask.integrations.dramatiq import attach

        attach(broker, app)
    dramatiq.set_broker(broker)
    declare: Any = dramatiq.actor
    actor = declare(perform, actor_name=NAME, broker=broker, max_retries=0)

    def send(numbers: Sequence[int]) -> None:
        for n in numbers:
            actor.send(n)

    return broker, app, send


def _rq(app: AsyncTask | None) -> tuple[Any, AsyncTask | None, Callable[[Sequence[int]], None]]:
    from redis import Redis
    from rq import Queue, decorators
    from rq.serializers import JSONSerializer

    connection = Redis.from_url(os.environ[REDIS])
    queue = Queue("default", connection=connection, serializer=JSONSerializer)
    decorate: Any = decorators.job(queue, connection=connection, result_ttl=0)
    if app is not None:
        from asynctask.integrations.rq import attach

        decorate = attach(connection, app, serializer="json").job("default", result_ttl=0)
    # RQ imports the function by its path, so what stands there has to be the decorated one.
    job = globals()["perform"] = decorate(perform)

    def send(numbers: Sequence[int]) -> None:
        for n in numbers:
            job.delay(n)

    return connection, app, send


REDIS_URL = os.environ.get(REDIS)
"""Where RQ's worker command reads its jobs, by a name that it looks for."""

if ENGINE in os.environ:
    target, app, send = build()
