"""Clients that poll beside a load, and how long they wait: every poll on a connection of its own, as a new client does."""

from __future__ import annotations

import http.client
import itertools
import resource
import statistics
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

from asynctask.clock import SystemClock
from benchmarks.processes import Unaccounted

__all__ = ["POLLERS", "figures", "many_connections", "polled"]

POLLERS = 8
_PAUSE_S = 0.05
_PATIENCE_S = 120.0


@contextmanager
def polled(address: str, paths: Sequence[str]) -> Iterator[list[float]]:
    """Polls ``paths`` in turn while the block runs; the list has the milliseconds of each poll.

    :data:`POLLERS` clients wait 50 ms between two polls. Raises :class:`Unaccounted` after the block if one was not
    answered with 200.
    """
    clock, over, where = SystemClock(), threading.Event(), urlsplit(address)
    turns = itertools.cycle(paths)
    found: list[float] = []
    failures: list[str] = []

    def poll() -> None:
        while not failures and not over.wait(_PAUSE_S):
            path = next(turns)
            connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=_PATIENCE_S)
            begun = clock.monotonic()
            try:
                with closing(connection):
                    connection.request("GET", path)
                    answer = connection.getresponse()
                    answer.read()
            except (OSError, http.client.HTTPException) as error:
                failures.append(f"{path}: {error!r}")
                return
            if answer.status != http.client.OK:
                failures.append(f"{path}: {answer.status}")
            found.append((clock.monotonic() - begun) * 1e3)

    threads = [threading.Thread(target=poll, name="poller") for _ in range(POLLERS)]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        over.set()
        for thread in threads:
            thread.join()
    if failures:
        raise Unaccounted(f"a poll failed: {failures[0]}")
    if not found:
        raise Unaccounted("there was no time for a poll")


def figures(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and most of some milliseconds, for ``settings``."""
    p99 = statistics.quantiles(values, n=100, method="inclusive")[-1] if len(values) > 1 else values[0]
    named = {"p50": statistics.median(values), "p99": p99, "max": max(values)}
    return {f"{name}_{which}_ms": round(value, 2) for which, value in named.items()}


def many_connections(count: int) -> None:
    """Raises the limit of open files for so many connections of this process, as far as is permitted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
