"""The operations of each broker against their suite, on real servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.databases import Store
from support.servers import RedisServer

from asynctask.brokers.base import Broker
from asynctask.brokers.redis.broker import RedisBroker
from asynctask.brokers.sql import SqlBroker
from asynctask.ledger import schema
from asynctask.ledger.database import Database
from asynctask.testing.operations_suite import OperationsConformance


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


class OwningBroker(SqlBroker):
    """A SQL broker that closes the database it was made with."""

    def __init__(self, url: str) -> None:
        self.owned = Database(url)
        schema.ensure(self.owned)
        super().__init__(self.owned)

    def close(self) -> None:
        super().close()
        self.owned.close()


class TestSqlOperations(OperationsConformance):
    @pytest.fixture(autouse=True)
    def _database(self, store: Store) -> None:
        self.url = store.url

    def make_broker(self) -> Broker:
        return OwningBroker(self.url)


class TestRedisOperations(OperationsConformance):
    namespace = ""
    options = ""

    @pytest.fixture(autouse=True)
    def _emptied(self, redis_server: RedisServer) -> Iterator[None]:
        self.server = redis_server
        with redis_server.client() as client:
            client.flushall()
            yield
            strays = [key for key in client.scan_iter() if not key.startswith(self.namespace.encode())]
        assert strays == [], "every key stands behind the namespace"

    def make_broker(self) -> Broker:
        return RedisBroker(self.server.url + self.options, namespace=self.namespace)


class TestRedisOperationsInANamespaceWithProtocol3(TestRedisOperations):
    namespace = "shop:live"
    options = "?protocol=3"
