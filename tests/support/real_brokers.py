"""Brokers on a real server for the suites: how each is made, joined by another process, and killed at a given message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from support.servers import RedisServer

from asynctask.brokers.base import Broker
from asynctask.sidekiq.broker import RedisBroker


class Killed(Exception):
    """What a process that is dead would have done."""


class Life:
    """So many messages may still be sent."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def take(self) -> None:
        """For each message, before it is sent."""
        if self._steps <= 0:
            raise Killed
        self._steps -= 1


def dying_redis(url: str, namespace: str, steps: int) -> RedisBroker:
    """A Redis broker whose process is killed after so many messages, those with which a connection begins among them."""
    made = RedisBroker(url, namespace=namespace)
    pool = made._server._pool
    kind: Any = pool.connection_class
    life = Life(steps)

    class Dying(kind):  # type: ignore[misc]
        def send_packed_command(self, command: Any, check_health: bool = True) -> None:
            life.take()
            super().send_packed_command(command, check_health)

    pool.connection_class = Dying
    return made


class RedisBrokers:
    """Mixed into a suite: Redis brokers, with a ``namespace`` and with ``options`` of the URL."""

    namespace = ""
    options = ""
    url: str

    @pytest.fixture(autouse=True)
    def _emptied(self, redis_server: RedisServer) -> Iterator[None]:
        self.url = redis_server.url + self.options
        with redis_server.client() as client:
            client.flushall()
            yield
            strays = strays_of(client, self.namespace)
        assert strays == [], "every key stands behind the namespace"

    def make_broker(self) -> Broker:
        return RedisBroker(self.url, namespace=self.namespace)

    def same_server(self, broker: Broker) -> Broker | None:
        return self.make_broker()

    def dying(self, broker: Broker, steps: int) -> Broker | None:
        return dying_redis(self.url, self.namespace, steps)


def strays_of(client: redis.Redis, namespace: str) -> list[bytes]:
    """The keys that do not stand behind the namespace."""
    return [key for key in client.scan_iter() if not key.startswith(namespace.encode())]
