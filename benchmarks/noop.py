"""Untracked jobs that do nothing, in Redis: pushed in bulk, then performed by one process.

    python -m benchmarks.noop [-n N] [-c THREADS] [--runs R] [--peers sidekiq,dramatiq | none] [--delay-ms MS] [--json]

The jobs are pushed first, by the thousand, and that is timed by itself. Then one worker process starts; its clock runs from
the first performed job that is seen to the last. Each run has a private Redis, or the one of ``--broker-url``, in whose
database nothing may be. Ours and the peers run in turn; the figures are medians.

Sidekiq performs the very same jobs, pushed by the same client; Dramatiq performs its own form of them, pushed by its own.
Each is one process. Every job is counted where it is performed; at the end nothing may be left in a queue, a set or a list.

With ``--delay-ms`` every answer of Redis comes so much later to our worker process, and the peer is the same without it:
the ratio says what is left of its throughput where Redis is on another machine. Another process is the wire, and takes its
part of the processors.

A quick look takes -n 20000, a figure -n 100000.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from asynctask.client import RedisClient
from asynctask.clock import SystemClock
from benchmarks import common
from benchmarks.common import Place, Result, Unaccounted
from benchmarks.noop_worker import COUNTER, QUEUE
from benchmarks.processes import end_kindly, started
from benchmarks.redis_servers import RedisPlace, redis_server
from benchmarks.slow_wire import round_trip_ms, slow_wire

__all__ = ["main"]

PEERS = ("sidekiq", "dramatiq")
DIRECT = "direct"
"""Ours without the delay."""

PEER_N = 20_000
"""The peers' rates do not depend on how many jobs there are; so many give them."""

SIDEKIQ_THREADS = 10
ROOT = Path(__file__).resolve().parents[1]
MAX_DELAY_MS = 1_000
_SAID = {
    DIRECT: "the same without the delay",
    "sidekiq": f"Sidekiq, one process of {SIDEKIQ_THREADS} threads, the same jobs",
}
_LIMIT_S = 600.0
_END_S = 15.0


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = common.arguments(__doc__, n=20_000)
    parser.add_argument("-c", dest="threads", type=int, default=5, help="threads of our worker process (default 5)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--peers", default="sidekiq,dramatiq", help="those of them that are installed run; or none")
    parser.add_argument("--delay-ms", type=float, default=0.0, metavar="MS", help="more on each round trip (default 0)")
    return common.run(parser, argv, measure)


def measure(options: argparse.Namespace) -> Result:
    """Runs each side ``--runs`` times in turn."""
    if options.runs < 1 or options.threads < 1:
        raise common.Refused("--runs and -c must be at least 1")
    if not 0 <= options.delay_ms <= MAX_DELAY_MS:
        raise common.Refused(f"--delay-ms must be from 0 to {MAX_DELAY_MS:,}")
    if options.broker_url and options.delay_ms:
        raise common.Refused("--delay-ms is measured with a private Redis: leave --broker-url out")
    if options.broker.redis and not options.broker.empty():
        raise common.Refused("--broker-url: the peers' keys have no prefix; name a database with nothing in it, e.g. .../9")
    peers = [DIRECT] if options.delay_ms else _peers(options.peers)
    pushes: list[float] = []
    rates: dict[str, list[float]] = {name: [] for name in ("ours", *peers)}
    facts: dict[str, Any] = {}
    for _ in range(options.runs):
        for name, found in rates.items():
            with common.place(options) as place, _server(place) as url:
                n = options.n if name in ("ours", DIRECT) else min(options.n, PEER_N)
                push_s = _push(name, place, url, n)
                if name == "ours":
                    pushes.append(n / push_s)
                delay_ms = options.delay_ms if name == "ours" else 0.0
                with _wire(url, delay_ms, facts) as through:
                    found.append(_performed(name, place, url, through, n, options.threads))
    return _result(options, pushes, rates, facts)


def _result(
    options: argparse.Namespace, pushes: list[float], rates: dict[str, list[float]], facts: dict[str, Any]
) -> Result:
    settings: dict[str, Any] = {
        **common.setting(options),
        "broker": "Redis",
        **facts,
        "processes": 1,
        "threads": options.threads,
        "runs": options.runs,
        "job": "nothing, untracked",
        "clock": "from the first performed job that is seen to the last",
        "pushed_per_s": round(statistics.median(pushes)),
        **common.spread("push", pushes),
    }
    for name, found in rates.items():
        settings |= {name: round(statistics.median(found)), **common.spread(name, found)}
    middle = statistics.median(rates["ours"])
    peer, said = next(((name, said) for name, said in _SAID.items() if name in rates), (None, "none"))
    beside = statistics.median(rates[peer]) if peer else None
    settings["peer"] = said
    return Result("noop", options.n, middle, beside, middle / beside if beside else None, "jobs/s", settings)


@contextmanager
def _server(place: Place) -> Iterator[str]:
    """The URL of a Redis in which nothing is, and nothing is left: the one that was asked for, or a private one."""
    if place.redis is None:
        with redis_server(place.folder) as url:
            yield url
        return
    try:
        yield place.redis.url
    finally:
        RedisPlace(place.redis.url).remove()


@contextmanager
def _wire(url: str, delay_ms: float, facts: dict[str, Any]) -> Iterator[str]:
    """The URL by which a worker process reaches the server, and what is to be said of both."""
    facts["broker_version"] = _version(url)
    if not delay_ms:
        yield url
        return
    port = int(url.rpartition(":")[2].partition("/")[0])
    with slow_wire(port, delay_ms) as longer:
        facts |= {
            "delay_ms": delay_ms,
            "round_trip_ms": round_trip_ms(port),
            "delayed_round_trip_ms": round_trip_ms(longer),
        }
        yield url.replace(f":{port}/", f":{longer}/")


def _peers(words: str) -> list[str]:
    wanted = [word for word in words.split(",") if word and word != "none"]
    if unknown := set(wanted) - set(PEERS):
        raise common.Refused(f"--peers: {', '.join(sorted(unknown))} is none of {', '.join(PEERS)}")
    return [name for name in wanted if name != "sidekiq" or shutil.which("sidekiq")]


def _version(url: str) -> str:
    with redis.Redis.from_url(url) as server:
        return f"Redis {server.info('server')['redis_version']}"


# -- pushing


def _push(name: str, place: Place, url: str, n: int) -> float:
    clock = SystemClock()
    begun = clock.monotonic()
    if name == "dramatiq":
        subprocess.run(_command(name, place, url, "--push", str(n)), check=True, env=_environ(place, url))
    else:
        with RedisClient(url) as client:
            client.push_bulk({"class": "Noop", "queue": QUEUE, "retry": False}, ([i] for i in range(n)))
    return clock.monotonic() - begun


def _command(name: str, place: Place, url: str, *more: str) -> list[str]:
    role = "ours" if name == DIRECT else name
    return [sys.executable, "-m", "benchmarks.noop_worker", role, str(place.folder), url, *more]


def _environ(place: Place, url: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "REDIS_URL": url, "NOOP_DATABASE": place.database_url}


# -- performing


def _performed(name: str, place: Place, url: str, through: str, n: int, threads: int) -> float:
    """Jobs a second of a process that reaches the server by the URL ``through``. Raises :class:`Unaccounted`."""
    with redis.Redis.from_url(url) as server, _worker(name, place, url, through, threads) as process:
        rate = _watch(server, process, n)
        _await_nothing_left(server, name)
        if _count(server) != n:
            raise Unaccounted(f"{name} performed {_count(server):,} jobs of {n:,}")
        return rate


@contextmanager
def _worker(name: str, place: Place, url: str, through: str, threads: int) -> Iterator[subprocess.Popen[bytes]]:
    command = _command(name, place, url, "-c", str(threads), "--through", through)
    if name == "sidekiq":
        script = str(ROOT / "benchmarks" / "peers" / "sidekiq_noop.rb")
        command = ["sidekiq", "-r", script, "-c", str(SIDEKIQ_THREADS), "-q", QUEUE]
    with (place.folder / f"{name}.log").open("w+b") as log:
        how = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        with started(command, end_kindly, cwd=place.folder, env=_environ(place, url), **how) as process:
            yield process


def _watch(server: redis.Redis, process: subprocess.Popen[bytes], n: int) -> float:
    clock, pause = SystemClock(), threading.Event()
    limit = clock.monotonic() + _LIMIT_S
    first, begun = 0, 0.0
    while (count := _count(server)) < n:
        now = clock.monotonic()
        if count and not first:
            first, begun = count, now
        if process.poll() is not None or now > limit:
            raise Unaccounted(f"only {count:,} of {n:,} jobs were performed")
        pause.wait(0.005)
    if not first:
        raise Unaccounted("all was over before anything was seen: take more jobs")
    return (n - first) / (clock.monotonic() - begun)


def _count(server: redis.Redis) -> int:
    found: Any = server.get(COUNTER)
    return int(found or 0)


def _await_nothing_left(server: redis.Redis, name: str) -> None:
    """Every job was acknowledged, and none lies elsewhere."""
    clock, pause = SystemClock(), threading.Event()
    until = clock.monotonic() + _END_S
    left = ["retry", "dead", "schedule", f"queue:{QUEUE}", f"dramatiq:{QUEUE}"]
    while True:
        found = [key for key in left if server.exists(key)]
        found += [str(key) for key in server.scan_iter("asynctask:fetched:*")]
        if not found:
            return
        if clock.monotonic() > until:
            raise Unaccounted(f"{name} left jobs in {', '.join(found)}")
        pause.wait(0.02)


if __name__ == "__main__":
    sys.exit(main())
