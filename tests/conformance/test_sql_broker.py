"""The SQL broker against the suite of the contract, and brokers that are broken on purpose against it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from asynctask.brokers.base import Broker, Copy, Key
from asynctask.brokers.sql import SqlBroker
from asynctask.errors import BrokerUnavailable
from asynctask.ledger import schema
from asynctask.ledger.database import Database
from asynctask.testing.broker_suite import BrokerConformance, a_copy


class OwningBroker(SqlBroker):
    """A SQL broker that closes the database it was made with."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.owned = Database(f"sqlite:///{path}")
        schema.ensure(self.owned)
        super().__init__(self.owned)

    def close(self) -> None:
        super().close()
        self.owned.close()


class TestSqlBroker(BrokerConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_broker(self) -> Broker:
        return OwningBroker(self.folder / "a.db")

    def same_server(self, broker: Broker) -> Broker | None:
        return OwningBroker(self.folder / "a.db")

    def test_it_says_that_it_is_away_as_a_broker(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with self.broker() as broker:
            assert isinstance(broker, OwningBroker)
            broker.owned.close()
            (self.folder / "a.db").unlink()
            (self.folder / "a.db").mkdir()
            for call in (
                lambda: broker.push([a_copy()]),
                lambda: broker.exchange("p", [], ["default"], 1),
                lambda: broker.holds([a_copy().key]),
            ):
                with pytest.raises(BrokerUnavailable):
                    call()

    def test_what_it_holds_is_there_after_a_restart(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(0), a_copy(1)])
            broker.exchange("p", [], ["default"], 1)
        with self.broker() as again:
            assert again.capabilities.survives_restart
            assert again.holds([a_copy(0).key, a_copy(1).key]) == {a_copy(0).key, a_copy(1).key}
            assert [copy.key for copy in again.held_by("p")] == [a_copy(0).key]


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


def failing(kind: Callable[[Path], Broker], folder: Path) -> set[str]:
    """The names of the suite's tests that a broker does not pass."""

    class Suite(BrokerConformance):
        count = 0

        def make_broker(self) -> Broker:
            Suite.count += 1
            return kind(folder / f"{Suite.count}.db")

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
def test_a_broker_that_breaks_a_promise_does_not_pass(tmp_path: Path, kind: Callable[[Path], Broker], caught: str) -> None:
    assert caught in failing(kind, tmp_path)


def test_a_broker_that_keeps_its_promises_passes_without_pytest(tmp_path: Path) -> None:
    assert failing(OwningBroker, tmp_path) == set()
