"""The part of the suites of brokers in which processes are killed in the middle of each call, at every message that they
send: :mod:`asynctask.testing.broker_suite` and :mod:`asynctask.testing.operations_suite` are the whole.

It needs :meth:`~asynctask.testing.broker_base.BrokerSuite.dying`; without it, these tests see nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from asynctask.brokers.base import DEAD, RETRY, SCHEDULE, Broker, Copy, Held
from asynctask.clock import SECOND
from asynctask.testing.broker_base import LISTED, QUEUED, BrokerSuite, a_copy, keys_of, untracked, where

__all__ = ["BrokerCrashes", "OperationsCrashes"]

_DUE = 2_000_000_000 * SECOND


def _jobs(n: int, count: int = 3, *, tracked: bool = True) -> list[Copy]:
    """Jobs of the ``n``-th time, for the two queues of it in turn, every other one tracked."""
    return [a_copy(10 * n + i, attempt=(1 + i) % 2 if tracked else 0, queue=f"q{n}.{i % 2}") for i in range(count)]


def _queues(n: int) -> list[str]:
    return [f"q{n}.0", f"q{n}.1"]


def _look(broker: Broker, n: int, *sets: str) -> Mapping[str, list[str]]:
    return where(broker, queues=_queues(n), processes=[f"p{n}"], sets=sets)


def _fetched(broker: Broker, n: int) -> list[Copy]:
    broker.push(_jobs(n))
    return broker.exchange(f"p{n}", [], _queues(n), 10)


def _each_once(found: Mapping[str, list[str]], n: int, places: Collection[str], count: int = 3) -> None:
    for copy in _jobs(n, count):
        assert len(found[copy.jid]) == 1, f"killed before message {n + 1}, a job is in {found[copy.jid] or 'thin air'}"
        assert found[copy.jid][0] in places


def _honest(broker: Broker, n: int, found: Mapping[str, list[str]], count: int = 3) -> None:
    tracked = [copy.key for copy in _jobs(n, count) if copy.attempt]
    there = {key for key in tracked if found[key[0]]}
    assert broker.holds(tracked) == there, f"killed before message {n + 1}, it does not know what it holds"


class BrokerCrashes(BrokerSuite):
    """A process that is killed in the middle of a call loses nothing and doubles nothing."""

    def test_killed_in_a_push_it_has_pushed_all_of_a_call_or_nothing(self) -> None:
        def check(broker: Broker, n: int, ended: bool) -> None:
            found = _look(broker, n)
            there = [found[copy.jid] for copy in _jobs(n)]
            assert there in ([[QUEUED]] * 3, [[]] * 3), f"killed before message {n + 1}, it pushed a part"
            assert not ended or there[0]
            _honest(broker, n, found)

        self.killed_at_every_step(lambda broker, n: _jobs(n), lambda dying, n, jobs: dying.push(jobs), check)

    def test_killed_in_an_exchange_it_loses_nothing_that_was_not_acknowledged(self) -> None:
        def fill(broker: Broker, n: int) -> list[Copy]:
            broker.push(_jobs(n, 4))
            return broker.exchange(f"p{n}", [], _queues(n)[:1], 2)

        def check(broker: Broker, n: int, ended: bool) -> None:
            found = _look(broker, n)
            acknowledged, *others = _jobs(n, 4)
            assert found[acknowledged.jid] in ([], [LISTED])
            for copy in others:
                assert found[copy.jid] in ([LISTED], [QUEUED]), f"killed before message {n + 1}: {found[copy.jid]}"
                assert not ended or found[copy.jid] == [LISTED]

        def act(dying: Broker, n: int, held: list[Copy]) -> None:
            dying.exchange(f"p{n}", held[:1], _queues(n), 10)

        self.killed_at_every_step(fill, act, check)

    def test_killed_in_a_give_back_each_copy_is_in_the_list_or_in_its_queue(self) -> None:
        def check(broker: Broker, n: int, ended: bool) -> None:
            found = _look(broker, n)
            _each_once(found, n, [QUEUED] if ended else [QUEUED, LISTED])
            _honest(broker, n, found)

        self.killed_at_every_step(_fetched, lambda dying, n, held: dying.put_back(f"p{n}", held), check)

    def test_killed_while_it_defers_each_copy_is_in_the_list_or_in_its_queue(self) -> None:
        def check(broker: Broker, n: int, ended: bool) -> None:
            found = _look(broker, n)
            _each_once(found, n, [QUEUED] if ended else [QUEUED, LISTED])
            _honest(broker, n, found)

        self.killed_at_every_step(_fetched, lambda dying, n, held: dying.defer(f"p{n}", held), check)

    def test_killed_while_it_puts_into_a_set_each_copy_is_in_the_list_or_in_the_set(self) -> None:
        def act(dying: Broker, n: int, held: list[Copy]) -> None:
            dying.hold(RETRY, [Held(copy, _DUE + n) for copy in held], process=f"p{n}")

        def fill(broker: Broker, n: int) -> list[Copy]:
            broker.push(_jobs(n, tracked=False))
            return broker.exchange(f"p{n}", [], _queues(n), 10)

        def check(broker: Broker, n: int, ended: bool) -> None:
            _each_once(_look(broker, n, RETRY), n, [RETRY] if ended else [RETRY, LISTED])

        self.killed_at_every_step(fill, act, check)

    def test_killed_while_it_releases_each_due_job_is_in_its_set_or_in_its_queue(self) -> None:
        def fill(broker: Broker, n: int) -> None:
            broker.hold(SCHEDULE, [Held(copy, 100 + i) for i, copy in enumerate(_jobs(n, tracked=False))])

        def check(broker: Broker, n: int, ended: bool) -> None:
            _each_once(_look(broker, n, SCHEDULE), n, [QUEUED] if ended else [QUEUED, SCHEDULE])

        self.killed_at_every_step(fill, lambda dying, n, _: dying.release_due(SCHEDULE, _DUE, 100), check)

    def test_killed_while_it_withdraws_the_broker_still_knows_what_it_holds(self) -> None:
        def fill(broker: Broker, n: int) -> None:  # always the same queues: some brokers look through each that they know
            broker.push([a_copy(10 * n + i, queue=f"q{i}", task_id=n + 1) for i in range(2)])

        def check(broker: Broker, n: int, ended: bool) -> None:
            found = where(broker, queues=["q0", "q1"])
            keys = [a_copy(10 * n + i).key for i in range(2)]
            assert broker.holds(keys) == {key for key in keys if found[key[0]]}, f"killed before message {n + 1}, it lies"
            assert not ended or not any(found[jid] for jid, _ in keys)

        self.killed_at_every_step(fill, lambda dying, n, _: dying.withdraw(n + 1, 10), check)

    # -- and without :meth:`dying`

    def test_what_a_dead_process_held_is_found_and_given_back_by_another(self) -> None:
        with self.broker() as broker, self.another(broker) as other:
            copies = [a_copy(n, attempt=n % 2) for n in range(4)]
            broker.push(copies)
            broker.exchange("dead", [], ["default"], 3)
            assert other.holders() == {"dead"}
            found = other.held_by("dead")
            assert [(copy.key, copy.payload) for copy in found] == [(copy.key, copy.payload) for copy in copies[:3]]
            other.put_back("dead", found)
            assert other.holders() == set()
            assert keys_of(other.exchange("q", [], ["default"], 10)) == keys_of(copies)


class OperationsCrashes(BrokerSuite):
    """A tool that is killed in the middle of an action has done it to a member or has not."""

    def _killed(self, act: Any, places: Collection[str], after: Collection[str]) -> None:
        def fill(broker: Broker, n: int) -> Any:
            jobs = [untracked(10 * n + i, queue=f"q{n}.{i % 2}") for i in range(3)]
            broker.hold(RETRY, [Held(copy, _DUE + i) for i, copy in enumerate(jobs)])
            mine = {copy.jid for copy in jobs}
            return [entry for entry in broker.operations.entries(RETRY, limit=1_000).entries if entry.copy.jid in mine]

        def check(broker: Broker, n: int, ended: bool) -> None:
            _each_once(_look(broker, n, RETRY, DEAD), n, after if ended else places)

        self.killed_at_every_step(fill, act, check)

    def test_a_tool_killed_while_it_restarts_leaves_each_in_its_set_or_in_its_queue(self) -> None:
        def act(dying: Broker, n: int, entries: Any) -> None:
            dying.operations.restart(RETRY, entries)

        self._killed(act, [RETRY, QUEUED], [QUEUED])

    def test_a_tool_killed_while_it_kills_leaves_each_in_its_set_or_among_the_dead(self) -> None:
        def act(dying: Broker, n: int, entries: Any) -> None:
            dying.operations.kill(RETRY, entries)

        self._killed(act, [RETRY, DEAD], [DEAD])

    def test_a_tool_killed_while_it_reschedules_loses_and_doubles_nothing(self) -> None:
        def act(dying: Broker, n: int, entries: Any) -> None:
            for entry in entries:
                dying.operations.reschedule(RETRY, entry, _DUE + SECOND)

        self._killed(act, [RETRY], [RETRY])

    def test_a_tool_killed_while_it_clears_a_queue_leaves_the_broker_honest(self) -> None:
        def act(dying: Broker, n: int, _: Any) -> None:
            for queue in _queues(n):
                dying.operations.clear_some(queue, 10)

        def check(broker: Broker, n: int, ended: bool) -> None:
            found = _look(broker, n)
            _honest(broker, n, found)
            assert not ended or not any(found.values())

        self.killed_at_every_step(lambda broker, n: broker.push(_jobs(n)), act, check)
