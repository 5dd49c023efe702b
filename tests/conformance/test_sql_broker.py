"""The SQL broker against the suite of the contract on every database, and brokers that are broken on purpose against it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.databases import Store

from asynctask.brokers.base import SCHEDULE, Broker, Copy, Held, Key
from asynctask.brokers.sql import SqlBroker
from asynctask.brokers.sql_rows import MAX_PAYLOAD_BYTES
from asynctask.errors import BrokerUnavailable, InputError, TooLarge
from asynctask.ledger import schema
from asynctask.ledger.database import Database
from asynctask.testing.broker_suite import BrokerConformance, a_copy


class OwningBroker(SqlBroker):
    """A SQL broker that closes the database it was made with."""

    def __init__(self, url: str, **options: Any) -> None:
        self.owned = Database(url, **options)
        schema.ensure(self.owned)
        super().__init__(self.owned)

    def close(self) -> None:
        super().close()
        self.owned.close()


class TestSqlBroker(BrokerConformance):
    @pytest.fixture(autouse=True)
    def _database(self, store: Store) -> None:
        self.url = store.url

    def make_broker(self) -> Broker:
        return OwningBroker(self.url)

    def same_server(self, broker: Broker) -> Broker | None:
        return OwningBroker(self.url)

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


def test_ten_thousand_are_pushed_fetched_withdrawn_and_counted(broker: SqlBroker) -> None:
    broker.push([a_copy(n, task_id=n % 100 + 1) for n in range(10_000)])
    assert broker.waiting(["default"]) == {"default": {0: 10_000}}
    assert len(broker.withdraw(1, 1_000)) == 100
    fetched = broker.exchange("p", [], ["default"], 5_000)
    assert [int(c.jid, 16) for c in fetched] == [n for n in range(10_000) if n % 100][:5_000]
    broker.exchange("p", fetched, ["default"], 0)
    assert broker.holders() == set()
    assert broker.queues() == {"default": 4_900}


# -- the suite finds what it is for


class IntoThinAir(OwningBroker):
    """Forgets a copy as soon as it is fetched."""

    def exchange(self, process: str, done: Sequence[Copy], queues: Sequence[str], limit: int) -> list[Copy]:
        fetched = super().exchange(process, done, queues, limit)
        self.drop(process, fetched)
        return fetched


class PushesTwice(OwningBroker):
    """Makes a new copy of what it holds already, under a name of its own."""

    def push(self, copies: Sequence[Copy]) -> None:
        held = self.holds([copy.key for copy in copies])
        super().push(copies)
        super().push(
            [Copy(c.jid, c.attempt + 1_000, c.queue, c.payload, c.priority, c.task_id) for c in copies if c.key in held]
        )


class SaysYes(OwningBroker):
    """Claims to hold whatever it is asked for."""

    def holds(self, keys: Collection[Key]) -> set[Key]:
        return set(keys)


class TakesEverything(OwningBroker):
    """Withdraws what is being performed too."""

    def withdraw(self, task_id: int, limit: int) -> list[Key]:
        taken = list(super().withdraw(task_id, limit))
        for process in self.holders():
            mine = [copy for copy in self.held_by(process) if copy.task_id == task_id]
            self.drop(process, mine)
            taken += [copy.key for copy in mine]
        return taken


class LastInFirstOut(OwningBroker):
    """Gives the newest first."""

    def exchange(self, process: str, done: Sequence[Copy], queues: Sequence[str], limit: int) -> list[Copy]:
        return super().exchange(process, done, queues, limit)[::-1]


def failing(kind: Callable[[str], Broker], folder: Path) -> set[str]:
    """The names of the suite's tests that a broker does not pass."""

    class Suite(BrokerConformance):
        count = 0

        def make_broker(self) -> Broker:
            Suite.count += 1
            return kind(f"sqlite:///{folder}/{Suite.count}.db")

    found = set()
    for name in dir(Suite):
        if name.startswith("test_"):
            test: Any = getattr(Suite(), name)
            try:
                test()
            except (AssertionError, ValueError):
                found.add(name.removeprefix("test_"))
    return found


@pytest.mark.parametrize(
    ("kind", "caught"),
    [
        (IntoThinAir, "a_fetched_copy_is_in_its_process_list_until_it_is_acknowledged"),
        (PushesTwice, "a_copy_is_held_once_however_often_it_is_pushed"),
        (SaysYes, "it_says_honestly_which_copies_it_holds"),
        (TakesEverything, "withdrawing_takes_what_waits_of_a_task_and_leaves_what_is_fetched_and_other_tasks"),
        (LastInFirstOut, "a_queue_is_first_in_first_out"),
    ],
)
def test_a_broker_that_breaks_a_promise_does_not_pass(tmp_path: Path, kind: Callable[[str], Broker], caught: str) -> None:
    assert caught in failing(kind, tmp_path)


def test_a_broker_that_keeps_its_promises_passes_without_pytest(tmp_path: Path) -> None:
    assert failing(OwningBroker, tmp_path) == set()
