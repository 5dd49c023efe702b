"""The Redis broker against the suite of the contract, on a real server, with a namespace and without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.servers import RedisServer

from asynctask.brokers.base import Broker
from asynctask.brokers.redis.broker import RedisBroker
from asynctask.testing.broker_suite import BrokerConformance


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


class TestRedisBroker(BrokerConformance):
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

    def same_server(self, broker: Broker) -> Broker | None:
        return self.make_broker()


class TestRedisBrokerInANamespace(TestRedisBroker):
    namespace = "shop:live"


class TestRedisBrokerWithProtocol2(TestRedisBroker):
    options = "?protocol=2"


class TestRedisBrokerWithProtocol3(TestRedisBroker):
    options = "?protocol=3"
