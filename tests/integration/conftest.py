"""What the tests of this folder share: connections to the run's redis-server, and Ruby beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from support.redis_watch import NOW, Fixed
from support.servers import RedisServer

from asynctask.sidekiq.broker import RedisBroker


@pytest.fixture
def raw(redis_server: RedisServer) -> Iterator[redis.Redis]:
    """A connection to the server, which is empty; a module that needs another has its own."""
    with redis_server.client() as connection:
        connection.flushall()
        yield connection


@pytest.fixture
def broker(redis_server: RedisServer, raw: redis.Redis) -> Iterator[RedisBroker]:
    """A broker on the emptied server for which it is always ``NOW``; a module that needs another has its own."""
    made = RedisBroker(redis_server.url, clock=Fixed(NOW))
    yield made
    made.close()
