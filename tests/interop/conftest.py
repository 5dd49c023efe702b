"""What the tests of this folder share: a Redis server for each module, where Ruby may stay, and applications on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.redis_watch import NOW, Fixed
from support.redis_world import RedisWorld
from support.servers import RedisServer

from asynctask.sidekiq.broker import RedisBroker


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server of the module's own: Ruby's processes stay between two tests."""
    server = RedisServer(tmp_path_factory.mktemp("redis"), getattr(request, "param", "redis7"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def world(tmp_path: Path, redis_server: RedisServer) -> Iterator[RedisWorld]:
    made = RedisWorld(tmp_path, redis_server)
    yield made
    made.close()


@pytest.fixture
def raw(world: RedisWorld) -> Any:
    """A connection to the server, which is empty."""
    return world.raw


@pytest.fixture
def broker(world: RedisWorld) -> Iterator[RedisBroker]:
    """A broker on the emptied server for which it is always ``NOW``; a module that needs another has its own."""
    made = RedisBroker(world.server.url, clock=Fixed(NOW))
    yield made
    made.close()
