"""The Redis broker against the suites of the contract, on a real server, with a namespace and without one."""

from __future__ import annotations

import pytest
from support.real_brokers import RedisBrokers

from asynctask.testing.broker_suite import BrokerConformance
from asynctask.testing.operations_suite import OperationsConformance

pytestmark = pytest.mark.redis_releases


class TestRedisBroker(RedisBrokers, BrokerConformance):
    pass


class TestRedisBrokerInANamespace(TestRedisBroker):
    namespace = "shop:live"


class TestRedisBrokerWithProtocol2(TestRedisBroker):
    options = "?protocol=2"


class TestRedisBrokerWithProtocol3(TestRedisBroker):
    options = "?protocol=3"


class TestRedisOperations(RedisBrokers, OperationsConformance):
    pass


class TestRedisOperationsInANamespaceWithProtocol3(TestRedisOperations):
    namespace = "shop:live"
    options = "?protocol=3"
