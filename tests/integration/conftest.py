"""Servers for the tests of this folder, one of each for the whole run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.servers import RedisServer


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A private redis-server; whoever uses it takes a namespace of its own."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()
