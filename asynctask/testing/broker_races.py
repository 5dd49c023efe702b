"""The part of the suite of brokers that several threads run at once; :mod:`asynctask.testing.broker_suite` is the whole."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial

from asynctask.brokers.base import SCHEDULE, Broker, Copy, Held, Key
from asynctask.clock import SystemClock
from asynctask.testing.broker_base import BrokerSuite, a_copy, at_once, keys_of, waiting_in

__all__ = ["BrokerRaces"]

_MOST_NEWS = 50


class BrokerRaces(BrokerSuite):
    """What a broker promises where several act at the same time."""

    patience_s = 30.0
    """Seconds after which what should happen at once counts as not happening."""

    def test_a_copy_is_fetched_by_one_process_only(self) -> None:
        with self.broker() as broker, self.another(broker) as other:
            broker.push([a_copy(n) for n in range(60)])
            fetched: dict[str, list[Copy]] = {}

            def fetch(process: str, through: Broker) -> None:
                mine: list[Copy] = []
                while copies := through.exchange(process, [], ["default"], 7):
                    mine += copies
                fetched[process] = mine

            at_once(*(partial(fetch, f"p{i}", each) for i, each in enumerate((broker, other, broker))))
            everything = [key for copies in fetched.values() for key in keys_of(copies)]
            assert sorted(everything) == sorted(keys_of([a_copy(n) for n in range(60)]))
            for process, copies in fetched.items():
                assert sorted(keys_of(broker.held_by(process))) == sorted(keys_of(copies))

    def test_pushes_at_the_same_time_make_one_copy_of_each_key_and_keep_their_own_order(self) -> None:
        with self.broker() as broker, self.another(broker) as other:
            shared = [a_copy(n) for n in range(1_000, 1_060)]

            def push(through: Broker, number: int) -> None:
                for turn in range(5):
                    first = number * 100 + turn * 10
                    through.push([a_copy(n, queue=f"q{number}") for n in range(first, first + 10)])
                    through.push(shared if number % 2 else shared[::-1])

            at_once(*(partial(push, each, i) for i, each in enumerate((broker, other, broker))))
            assert dict(broker.queues()) == {"q0": 50, "q1": 50, "q2": 50, "default": 60}
            for number in range(3):
                mine = keys_of(broker.exchange("p", [], [f"q{number}"], 100))
                assert mine == keys_of([a_copy(n) for n in range(number * 100, number * 100 + 50)])

    def test_a_copy_is_either_withdrawn_or_fetched(self) -> None:
        with self.broker() as broker, self.another(broker) as other:
            keys = [a_copy(n).key for n in range(120)]
            broker.push([a_copy(n, task_id=7) for n in range(120)])
            fetched: list[Key] = []
            withdrawn: list[Key] = []

            def fetch() -> None:
                while copies := broker.exchange("p", [], ["default"], 5):
                    fetched.extend(keys_of(copies))

            def withdraw() -> None:
                while found := other.withdraw(7, 5):
                    withdrawn.extend(found)

            at_once(fetch, withdraw)
            while found := broker.withdraw(7, 100):  # what the other looked at when it was withdrawn
                withdrawn.extend(found)
            left = keys_of(broker.exchange("q", [], ["default"], 200))
            assert sorted([*fetched, *withdrawn, *left]) == sorted(keys)
            assert sorted(keys_of(broker.held_by("p"))) == sorted(fetched)

    def test_due_jobs_are_released_once_by_several_that_look_at_the_same_time(self) -> None:
        with self.broker() as broker, self.another(broker) as other:
            copies = [a_copy(n, attempt=0) for n in range(60)]
            broker.hold(SCHEDULE, [Held(copy, 100 + n) for n, copy in enumerate(copies)])

            def look(through: Broker) -> None:
                while through.release_due(SCHEDULE, 1_000, 7):
                    pass

            at_once(*(partial(look, each) for each in (broker, other, broker)))
            look(broker)  # what each passed over, for another had its hand on it
            assert sorted(keys_of(broker.exchange("p", [], ["default"], 200))) == sorted(keys_of(copies))
            assert broker.members(SCHEDULE, 10) == []

    def test_what_a_dead_process_held_is_given_back_once_by_two_that_recover_it(self) -> None:
        with self.broker() as broker, self.another(broker) as other:
            copies = [a_copy(n, attempt=n % 2) for n in range(40)]
            broker.push(copies)
            broker.exchange("dead", [], ["default"], 40)
            seen, found = broker.held_by("dead"), other.held_by("dead")
            at_once(partial(broker.put_back, "dead", seen), partial(other.put_back, "dead", found))
            fetched = keys_of(broker.exchange("q", [], ["default"], 200))
            assert sorted(fetched) == sorted(keys_of(copies))
            other.put_back("dead", found)  # it comes late: they are another's by now
            assert sorted(keys_of(broker.held_by("q"))) == sorted(keys_of(copies))
            assert waiting_in(broker, "default") == {}

    # -- waiting

    def test_a_wait_ends_when_something_is_pushed(self) -> None:
        with self.broker() as broker, self.another(broker) as other:
            self._drained(broker)
            numbers = itertools.count()  # each push is of another job: the same one again would be no news
            assert self._woken_by(broker, lambda: other.push([a_copy(next(numbers))]))

    def test_a_wait_ends_when_its_process_is_woken(self) -> None:
        with self.broker() as broker:
            self._drained(broker)
            assert self._woken_by(broker, broker.wake)

    def test_a_wait_for_nothing_ends_with_its_time(self) -> None:
        with self.broker() as broker:
            assert self._drained(broker) < self.patience_s

    def _drained(self, broker: Broker) -> float:
        """What happened before is told once, and may come late: afterwards a wait is for news. Returns for how many seconds
        the last one waited, which brought none."""
        clock = SystemClock()
        for _ in range(_MOST_NEWS):
            began = clock.monotonic()
            if not broker.wait(0.2):
                return clock.monotonic() - began
        raise AssertionError(f"there was news {_MOST_NEWS} times although nothing happened")

    def _woken_by(self, broker: Broker, act: Callable[[], None]) -> bool:
        """Whether a wait, begun in another thread, ends long before its time; ``act`` is repeated until it does."""
        ended = threading.Event()

        def wait() -> None:
            broker.wait(10 * self.patience_s)
            ended.set()

        threading.Thread(target=wait, daemon=True).start()
        clock = SystemClock()
        until = clock.monotonic() + self.patience_s
        while clock.monotonic() < until:
            act()
            if ended.wait(0.05):
                return True
        broker.wake()
        return False
