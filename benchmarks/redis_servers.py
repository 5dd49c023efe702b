"""Where untracked jobs of a benchmark travel: the database, a Redis that is named, or a private one, gone with the run."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from asynctask.clock import SystemClock, SystemIds
from asynctask.testing.servers import free_port, redis_command
from benchmarks.databases import NotHere, Refused, shown
from benchmarks.processes import Unaccounted, started

__all__ = ["Broker", "RedisPlace", "redis_server", "source"]

_START_S = 20.0
_SCHEMES = ("redis://", "rediss://", "unix://")


@dataclass(frozen=True)
class RedisPlace:
    """A Redis, and the prefix of every key that a run makes there."""

    url: str
    namespace: str = ""

    def keys(self, pattern: str) -> list[str]:
        """The keys that look like this."""
        prefix = f"{self.namespace}:" if self.namespace else ""
        with redis.Redis.from_url(self.url, decode_responses=True) as client:
            return [str(key) for key in client.scan_iter(prefix + pattern, count=1_000)]

    def remove(self, pattern: str = "*") -> None:
        """Removes every key of the run that looks like this."""
        with redis.Redis.from_url(self.url) as client:
            for key in self.keys(pattern):
                client.unlink(key)

    def remove_sidekiq(self) -> None:
        """Removes what a Sidekiq process, which has no prefix, leaves behind for ever."""
        for pattern in ("queue:*", "queues", "processes", "stat:*"):
            RedisPlace(self.url).remove(pattern)


class Broker:
    """Makes places for jobs. ``url``: of a Redis; None with ``private`` for one that is started, else the database."""

    def __init__(self, url: str | None, *, private: bool) -> None:
        self._url = url
        self._private = private
        self._version = ""

    @property
    def redis(self) -> bool:
        """Whether untracked jobs travel through Redis."""
        return self._private or self._url is not None

    @contextmanager
    def fresh(self, folder: Path) -> Iterator[RedisPlace | None]:
        """A place in which nothing is yet, and nothing is left after the block; None: the jobs go through the database.

        Raises :class:`Refused` where nothing answers, :class:`NotHere` where there is no program to start.
        """
        if self._url is not None:
            place = RedisPlace(self._url, f"asynctask_bench_{SystemIds().nonce()}")
            self._ask(place)
            try:
                yield place
            finally:
                place.remove()
        elif self._private:
            with redis_server(folder) as url:
                self._ask(RedisPlace(url))
                yield RedisPlace(url)
        else:
            yield None

    def empty(self) -> bool:
        """Whether a program may make keys without a prefix there."""
        if self._url is None:
            return self._private
        try:
            with redis.Redis.from_url(self._url) as client:
                return bool(client.dbsize() == 0)
        except redis.RedisError as error:
            raise self._refused(self._url, error) from error

    def _ask(self, place: RedisPlace) -> None:
        try:
            with redis.Redis.from_url(place.url) as client:
                self._version = f"Redis {client.info('server')['redis_version']}"
        except redis.RedisError as error:
            raise self._refused(place.url, error) from error

    @staticmethod
    def _refused(url: str, error: Exception) -> Refused:
        return Refused(f"--broker-url {shown(url)}: {error}; does the server answer?")

    def facts(self) -> dict[str, Any]:
        """For ``settings``, once there was a place."""
        return {"broker": "Redis", "broker_version": self._version} if self._version else {"broker": "the database"}


def source(options: argparse.Namespace) -> Broker:
    """What ``--broker-url`` or ``--redis`` asks for. Raises :class:`Refused`."""
    url = None if options.broker_url == options.database_url else options.broker_url
    if url is not None and options.redis:
        raise Refused("give either --broker-url or --redis: the one names a Redis, the other starts one")
    if url is not None and not url.startswith(_SCHEMES):
        raise Refused(f"--broker-url {shown(url)}: write redis://, rediss:// or unix://, or leave it out for the database")
    return Broker(url, private=options.redis)


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """The URL of a server that runs while the block does. Raises :class:`NotHere` where the program is not installed."""
    program = shutil.which("redis-server")
    if program is None:
        raise NotHere("redis-server is not installed here: apt-get install redis-server")
    port = free_port()
    command = redis_command(program, port, folder)
    with started(command, _end, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        _await(port, process)
        yield f"redis://127.0.0.1:{port}/0"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _await(port: int, process: subprocess.Popen[bytes]) -> None:
    clock, pause = SystemClock(), threading.Event()
    until = clock.monotonic() + _START_S
    with redis.Redis(port=port) as client:
        while True:
            try:
                client.ping()
            except redis.ConnectionError:
                if process.poll() is not None or clock.monotonic() > until:
                    raise Unaccounted("redis-server did not come up") from None
                pause.wait(0.02)
            else:
                return
