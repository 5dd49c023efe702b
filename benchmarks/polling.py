"""Clients that poll beside a load, and how long they wait: every poll on a connection of its own, as a new client does."""

from __future__ import annotations

import asyncio
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

__all__ = ["AT_ONCE", "MOST_CLIENTS", "POLLERS", "ask", "figures", "many_connections", "polled"]

POLLERS = 8
MOST_CLIENTS = 1_500
"""Three quarters of the 2,000 connections that a server takes."""

AT_ONCE = 50
"""Connections that are being made at a time: a server's backlog is finite."""

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


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, etag: bytes = b""
) -> tuple[bytes, dict[bytes, bytes]]:
    """A GET on a connection that is kept: the status and the headers of its answer; the body is left to be read.

    Raises :class:`Unaccounted` for another status than 200 and 304.
    """
    host = str(writer.get_extra_info("peername")[0]).encode()
    known = b"If-None-Match: %b\r\n" % etag if etag else b""
    writer.write(b"GET %b HTTP/1.1\r\nHost: %b\r\n%b\r\n" % (path.encode(), host, known))
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    status = first.split()[1]
    if status not in (b"200", b"304"):
        raise Unaccounted(f"{path} was answered {first.decode()}")
    return status, {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines)}


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
