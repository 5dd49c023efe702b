"""Servers for the suites, one of each for the whole run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.servers import RedisServer


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A private redis-server, emptied by each test that uses it."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()
