"""The suites find what they are for: each broker that is broken on purpose fails the test that is named beside it, each
test finds one that is broken, and a whole one passes them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import support.broken_brokers
import support.broken_operations
import support.broken_races
from support.broken_base import Whole, WholeOperations, kinds_of
from support.broker_suite import BrokerConformance, OperationsConformance
from support.real_brokers import dying_redis
from support.servers import RedisServer

from asynctask.brokers.base import Broker
from asynctask.sidekiq.broker import RedisBroker

pytestmark = pytest.mark.full(reason="it proves the suites, not the program")

BROKEN = [kind for kind in kinds_of(Whole) if kind.caught_by]


class OnRedis:
    """A server, emptied for each broker that is to be empty."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server

    def empty(self) -> None:
        with self._server.client() as client:
            client.flushall()

    def real(self) -> Broker:
        return RedisBroker(self._server.url)

    def dying(self, steps: int) -> Broker:
        return dying_redis(self._server.url, "", steps)


class Suite(BrokerConformance, OperationsConformance):
    """Both suites for brokers of one kind, without pytest."""

    def __init__(self, kind: Callable[[Broker], Any], place: OnRedis) -> None:
        self._kind = kind
        self._place = place

    def make_broker(self) -> Broker:
        self._place.empty()
        made: Broker = self._kind(self._place.real())
        return made

    def same_server(self, broker: Broker) -> Broker | None:
        made: Broker = self._kind(self._place.real())
        return made

    def dying(self, broker: Broker, steps: int) -> Broker | None:
        made: Broker = self._kind(self._place.dying(steps))
        return made


NAMES = sorted(name.removeprefix("test_") for name in dir(Suite) if name.startswith("test_"))


@pytest.fixture
def place(redis_server: RedisServer) -> OnRedis:
    """Where the brokers of a test are."""
    return OnRedis(redis_server)


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_a_broker_that_breaks_a_promise_is_caught(place: OnRedis, kind: type[Whole]) -> None:
    assert kind.caught_by in NAMES
    suite = Suite(kind, place)
    suite.patience_s = 0.5  # nothing that is waited for comes
    test = getattr(suite, f"test_{kind.caught_by}")
    with pytest.raises((AssertionError, ValueError)):  # or the names of a tuple are more or fewer than its values
        test()


def test_every_test_of_the_suites_catches_a_broken_one() -> None:
    modules = {kind.__module__ for kind in BROKEN}
    kept = (support.broken_brokers, support.broken_operations, support.broken_races)
    assert modules == {module.__name__ for module in kept}
    assert sorted(set(NAMES) - {kind.caught_by for kind in BROKEN}) == []


@pytest.mark.parametrize("name", NAMES)
def test_what_only_hands_on_to_a_whole_broker_passes(place: OnRedis, name: str) -> None:
    getattr(Suite(WholeOperations, place), f"test_{name}")()


class Least(BrokerConformance, OperationsConformance):
    """What can be tested of a broker of which no more is known than how to make one."""

    def __init__(self, place: OnRedis) -> None:
        self._place = place

    def make_broker(self) -> Broker:
        self._place.empty()
        return self._place.real()


def test_a_suite_that_knows_only_how_to_make_a_broker_runs_too(place: OnRedis) -> None:
    suite = Least(place)
    for name in NAMES:
        getattr(suite, f"test_{name}")()
    with suite.broker() as broker, suite.another(broker) as other:
        assert other is broker
        assert suite.dying(broker, 1) is None
