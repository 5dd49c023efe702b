"""The Redis broker against the suites of the contract, with and without a namespace, in both protocols."""

from __future__ import annotations

import pytest
from support.broker_suite import BrokerConformance, OperationsConformance
from support.real_brokers import RedisBrokers

pytestmark = pytest.mark.redis_releases


class TestRedisBroker(RedisBrokers, BrokerConformance):
    options = "?protocol=2"


class TestRedisBrokerInANamespaceWithProtocol3(TestRedisBroker):
    namespace = "shop:live"
    options = "?protocol=3"


class TestRedisOperations(RedisBrokers, OperationsConformance):
    options = "?protocol=2"


class TestRedisOperationsInANamespaceWithProtocol3(TestRedisOperations):
    namespace = "shop:live"
    options = "?protocol=3"
