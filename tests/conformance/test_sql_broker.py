"""The SQL broker against the suites of the contract on every database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.broker_suite import BrokerConformance, OperationsConformance, a_copy
from support.databases import Store
from support.real_brokers import OwningBroker, SqlBrokers

from asynctask.brokers.base import MAX_PAYLOAD_BYTES, SCHEDULE, Copy, Held
from asynctask.brokers.sql.broker import SqlBroker
from asynctask.errors import BrokerUnavailable, InputError, TooLarge


class TestSqlOperations(SqlBrokers, OperationsConformance):
    pass


class TestSqlBroker(SqlBrokers, BrokerConformance):
    def test_what_it_holds_is_there_after_a_restart(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(0), a_copy(1)])
            broker.exchange("p", [], ["default"], 1)
        with self.broker() as again:
            assert again.capabilities.survives_restart
            assert again.holds([a_copy(0).key, a_copy(1).key]) == {a_copy(0).key, a_copy(1).key}
            assert [copy.key for copy in again.held_by("p")] == [a_copy(0).key]


def test_it_says_that_it_is_away_as_a_broker(tmp_path: Path) -> None:
    broker = OwningBroker(f"sqlite:///{tmp_path}/a.db")
    broker.owned.close()
    (tmp_path / "a.db").unlink()
    (tmp_path / "a.db").mkdir()
    for call in (
        lambda: broker.push([a_copy()]),
        lambda: broker.exchange("p", [], ["default"], 1),
        lambda: broker.holds([a_copy().key]),
    ):
        with pytest.raises(BrokerUnavailable):
            call()
    broker.close()


# -- what no database may cut off or take in its own way


@pytest.fixture
def broker(store: Store) -> Iterator[SqlBroker]:
    made = OwningBroker(store.url)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (Copy("j" * 65, 1, "q", "{}"), "jid has 65 characters"),
        (Copy("", 1, "q", "{}"), "jid has 0 characters"),
        (Copy("j", 1, "q" * 256, "{}"), "queue has 256 characters"),
        (Copy("j", 1, "", "{}"), "queue has 0 characters"),
        (Copy("j\0", 1, "q", "{}"), "jid holds a NUL"),
        (Copy("j", 1, "q", '{"x":"\0"}'), "payload holds a NUL"),
        (Copy("j", 1, "q", '{"x":"\ud800"}'), "payload holds half a character"),
        (Copy("j", 1, "q", "{}", priority=2**31), "priority must be from"),
        (Copy("j", -1, "q", "{}"), "attempt must be from"),
        (Copy("j", 1, "q", "{}", task_id=2**63), "task_id must be from"),
    ],
)
def test_a_job_that_cannot_be_kept_as_it_is_is_refused_with_the_whole_push(broker: SqlBroker, bad: Copy, says: str) -> None:
    with pytest.raises(InputError, match=says) as refused:
        broker.push([a_copy(0), bad, a_copy(1)])
    assert refused.value.code == "bad_job"
    assert [problem.message for problem in refused.value.errors]
    with pytest.raises(InputError, match=says):
        broker.hold(SCHEDULE, [Held(bad, 1)])
    assert broker.queues() == {}
    assert broker.members(SCHEDULE, 10) == []


def test_names_and_payloads_of_the_greatest_length_are_taken(broker: SqlBroker) -> None:
    longest = Copy("語" * 64, 1, "語" * 255, "'" * MAX_PAYLOAD_BYTES, priority=2**31 - 1, task_id=2**63 - 1)
    broker.push([longest, Copy("least", 1, longest.queue, "{}", priority=-(2**31) + 1)])
    first, second = broker.exchange("p" * 64, [], [longest.queue], 10)
    assert (first.jid, second.payload, second.task_id) == ("least", longest.payload, longest.task_id)
    with pytest.raises(TooLarge, match="hand over where it is"):
        broker.push([Copy("j", 1, "q", "'" * (MAX_PAYLOAD_BYTES + 1))])


def test_ten_thousand_are_pushed_fetched_and_counted(broker: SqlBroker) -> None:
    broker.push([a_copy(n) for n in range(10_000)])
    assert broker.waiting(["default"]) == {"default": {0: 10_000}}
    fetched = broker.exchange("p", [], ["default"], 5_000)
    assert [int(c.jid, 16) for c in fetched] == list(range(5_000))
    broker.exchange("p", fetched, ["default"], 0)
    assert broker.holders() == set()
    assert broker.queues() == {"default": 5_000}
