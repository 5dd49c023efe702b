"""The worker processes of ``benchmarks.noop``: jobs that are only counted, and a thread that tells how many were."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import redis

from asynctask import AsyncTask
from asynctask.logs import log_to_stderr

__all__ = ["COUNTER", "QUEUE", "main"]

COUNTER = "benchmark:performed"
"""The key of Redis with how many jobs were performed."""

QUEUE = "default"
_TELL_S = 0.01


class Count:
    """Counts calls, from any thread."""

    def __init__(self) -> None:
        self._calls: list[None] = []

    def __call__(self, n: int) -> None:
        self._calls.append(None)  # one step: a number that is read and then kept may be overtaken by another thread's

    def tell(self, url: str) -> None:
        """Writes the count to Redis from now on."""
        threading.Thread(target=self._tell, args=(redis.Redis.from_url(url),), daemon=True).start()

    def _tell(self, server: redis.Redis) -> None:
        pause = threading.Event()
        while True:
            server.set(COUNTER, len(self._calls))
            pause.wait(_TELL_S)


def _ours(options: argparse.Namespace, count: Count) -> int:
    app = AsyncTask(
        environ={},
        database_url=os.environ["NOOP_DATABASE"],
        broker_url=options.through or options.redis,
        data_dir=str(options.folder / "data"),
    )
    app.worker(count_of(count), name="Noop", use_task_event=False)
    return app.run_worker(concurrency=options.concurrency, shutdown_s=5.0)


def count_of(count: Count) -> Callable[[int], None]:
    """A function, as a worker has to be."""

    def noop(n: int) -> None:
        count(n)

    return noop


def _dramatiq(options: argparse.Namespace, count: Count) -> int:
    import dramatiq
    from dramatiq.brokers.redis import RedisBroker

    broker = RedisBroker(url=options.redis)
    declare: Any = dramatiq.actor
    actor = declare(count_of(count), actor_name="Noop", broker=broker, queue_name=QUEUE, max_retries=0)
    if options.push:
        for n in range(options.push):
            actor.send(n)
        return 0
    dramatiq.Worker(broker, worker_threads=options.concurrency).start()
    threading.Event().wait()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """What the started process does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("ours", "dramatiq"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("redis")
    parser.add_argument("-c", dest="concurrency", type=int, default=5)
    parser.add_argument("--push", type=int, default=0)
    parser.add_argument("--through", default="", help="by which URL the jobs of ours come, the counts go directly")
    options = parser.parse_args(argv)
    log_to_stderr()
    count = Count()
    if not options.push:
        count.tell(options.redis)
    return _ours(options, count) if options.role == "ours" else _dramatiq(options, count)


if __name__ == "__main__":
    sys.exit(main())
