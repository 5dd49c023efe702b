"""The part of the suite of brokers that several threads run at once; :mod:`asynctask.testing.broker_suite` is the whole."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from asynctask.brokers.base import Broker, Copy, Key
from asynctask.clock import SystemClock

__all__ = ["BrokerRaces", "a_copy", "keys_of", "waiting_in"]

_PATIENCE_S = 5.0


def a_copy(n: int = 0, *, attempt: int = 1, queue: str = "default", priority: int = 0, task_id: int | None = None) -> Copy:
    """The ``n``-th job, as it is pushed."""
    jid = f"{n:024x}"
    payload = json.dumps({"class": "w", "args": [{"n": n, "text": "ä\u2028</script>\\"}], "jid": jid}, ensure_ascii=False)
    return Copy(jid, attempt, queue, payload, priority, task_id)


def keys_of(copies: Sequence[Copy]) -> list[Key]:
    """By what a broker knows them."""
    return [copy.key for copy in copies]


def waiting_in(broker: Broker, *queues: str) -> dict[str, int]:
    """How many copies wait in each of these queues, whatever their priority."""
    counts = {queue: sum(found.values()) for queue, found in broker.waiting(queues).items()}
    return {queue: count for queue, count in counts.items() if count}


class BrokerRaces:
    """How to make a broker, and what it promises where several act at the same time."""

    def make_broker(self) -> Broker:
        """A new, empty broker. Override it."""
        raise NotImplementedError("make_broker: return a new, empty broker")

    def same_server(self, broker: Broker) -> Broker | None:
        """Another connection to the same server, as another process has it; None where a test cannot have one."""
        return None

    @contextmanager
    def broker(self) -> Iterator[Broker]:
        """A broker for one test."""
        made = self.make_broker()
        try:
            yield made
        finally:
            made.close()

    # -- at the same time

    def test_a_copy_is_fetched_by_one_process_only(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(n) for n in range(60)])
            other = self.same_server(broker)
            brokers = [broker, other or broker, broker]
            fetched: dict[str, list[Copy]] = {}
            start = threading.Barrier(3)

            def fetch(process: str, through: Broker) -> None:
                start.wait()
                mine: list[Copy] = []
                while copies := through.exchange(process, [], ["default"], 7):
                    mine += copies
                fetched[process] = mine

            threads = [threading.Thread(target=fetch, args=(f"p{i}", b)) for i, b in enumerate(brokers)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            everything = [key for copies in fetched.values() for key in keys_of(copies)]
            assert sorted(everything) == sorted(keys_of([a_copy(n) for n in range(60)]))
            for process, copies in fetched.items():
                assert sorted(keys_of(broker.held_by(process))) == sorted(keys_of(copies))
            if other is not None:
                other.close()

    def test_pushes_at_the_same_time_make_one_copy_of_each_key_and_keep_their_own_order(self) -> None:
        with self.broker() as broker:
            other = self.same_server(broker)
            start = threading.Barrier(3)
            shared = [a_copy(n) for n in range(1_000, 1_060)]
            failed: list[BaseException] = []

            def push(through: Broker, number: int) -> None:
                start.wait()
                try:
                    for turn in range(5):
                        first = number * 100 + turn * 10
                        through.push([a_copy(n, queue=f"q{number}") for n in range(first, first + 10)])
                        through.push(shared if number % 2 else shared[::-1])
                except BaseException as error:
                    failed.append(error)

            self._at_once([partial(push, b, i) for i, b in enumerate((broker, other or broker, broker))])
            assert failed == []
            assert dict(broker.queues()) == {"q0": 50, "q1": 50, "q2": 50, "default": 60}
            for number in range(3):
                mine = keys_of(broker.exchange("p", [], [f"q{number}"], 100))
                assert mine == keys_of([a_copy(n) for n in range(number * 100, number * 100 + 50)])
            if other is not None:
                other.close()

    def test_a_copy_is_either_withdrawn_or_fetched(self) -> None:
        with self.broker() as broker:
            other = self.same_server(broker)
            keys = [a_copy(n).key for n in range(120)]
            broker.push([a_copy(n, task_id=7) for n in range(120)])
            fetched: list[Key] = []
            withdrawn: list[Key] = []
            start = threading.Barrier(2)

            def fetch() -> None:
                start.wait()
                while copies := broker.exchange("p", [], ["default"], 5):
                    fetched.extend(keys_of(copies))

            def withdraw() -> None:
                start.wait()
                while found := (other or broker).withdraw(7, 5):
                    withdrawn.extend(found)

            self._at_once([fetch, withdraw])
            while found := broker.withdraw(7, 100):  # what the other looked at when it was withdrawn
                withdrawn.extend(found)
            left = keys_of(broker.exchange("q", [], ["default"], 200))
            assert sorted([*fetched, *withdrawn, *left]) == sorted(keys)
            assert sorted(keys_of(broker.held_by("p"))) == sorted(fetched)
            if other is not None:
                other.close()

    @staticmethod
    def _at_once(acts: Sequence[Callable[[], None]]) -> None:
        threads = [threading.Thread(target=act) for act in acts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    # -- waiting

    def test_a_wait_ends_when_something_is_pushed(self) -> None:
        with self.broker() as broker:
            self._drained(broker)
            other = self.same_server(broker) or broker
            assert self._woken_by(broker, lambda: other.push([a_copy()]))
            if other is not broker:
                other.close()

    def test_a_wait_ends_when_its_process_is_woken(self) -> None:
        with self.broker() as broker:
            self._drained(broker)
            assert self._woken_by(broker, broker.wake)

    def test_a_wait_for_nothing_ends_with_its_time(self) -> None:
        with self.broker() as broker:
            self._drained(broker)
            clock = SystemClock()
            began = clock.monotonic()
            assert broker.wait(0.2) is False
            assert clock.monotonic() - began < _PATIENCE_S

    def _drained(self, broker: Broker) -> None:
        """What happened before is told once: afterwards a wait is for news."""
        while broker.wait(0.2):
            pass

    def _woken_by(self, broker: Broker, act: Callable[[], None]) -> bool:
        """Whether a wait, begun in another thread, ends long before its time; ``act`` is repeated until it does."""
        ended = threading.Event()

        def wait() -> None:
            broker.wait(10 * _PATIENCE_S)
            ended.set()

        threading.Thread(target=wait, daemon=True).start()
        clock = SystemClock()
        until = clock.monotonic() + _PATIENCE_S
        while clock.monotonic() < until:
            act()
            if ended.wait(0.05):
                return True
        broker.wake()
        return False
