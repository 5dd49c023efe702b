"""The suite that every broker passes: inherit it in a test class and say how to make one.

.. code-block:: python

    class TestMyBroker(BrokerConformance):
        def make_broker(self) -> Broker:
            return MyBroker(...)

The methods are collected by pytest, and need nothing of it. What brokers may differ in is asked of their capabilities.
:class:`~asynctask.testing.broker_base.BrokerSuite` says what else a class can tell of its broker, and what that is for.
"""

from __future__ import annotations

from asynctask.brokers.base import DEAD, RETRY, SCHEDULE, Copy, Held
from asynctask.testing.broker_base import a_copy, keys_of, waiting_in
from asynctask.testing.broker_crashes import BrokerCrashes
from asynctask.testing.broker_races import BrokerRaces

__all__ = ["BrokerConformance", "a_copy"]


class BrokerConformance(BrokerRaces, BrokerCrashes):
    """What the contract in ``asynctask.brokers.base`` promises, a method each."""

    # -- the way of a job

    def test_what_is_pushed_is_fetched_byte_for_byte(self) -> None:
        with self.broker() as broker:
            pushed = [a_copy(n, task_id=n or None) for n in range(3)]
            broker.push(pushed)
            fetched = broker.exchange("p", [], ["default"], 10)
            assert [(c.key, c.payload, c.queue, c.task_id) for c in fetched] == [
                (c.key, c.payload, c.queue, c.task_id) for c in pushed
            ]

    def test_payloads_of_any_text_and_size_come_back_byte_for_byte(self) -> None:
        texts = [
            "\\u0000",
            "😀\U00010348",
            "é\u0301\u200b\ufeff",
            "'; -- \\\\ %s %(x)s :y {}",
            "\t\r\n",
            "x" * 65_536,
            "語" * 65_536,
        ]
        payloads = [f'{{"class":"w","args":["{text}"]}}' for text in texts]
        with self.broker() as broker:
            pushed = [Copy(a_copy(n).jid, 1, "default", payload) for n, payload in enumerate(payloads)]
            broker.push(pushed)
            assert [c.payload for c in broker.exchange("p", [], ["default"], 10)] == payloads
            assert {c.key: c.payload for c in broker.held_by("p")} == {c.key: c.payload for c in pushed}

    def test_names_are_told_apart_by_every_byte(self) -> None:
        with self.broker() as broker:
            queues = ["a", "A", "a ", "á", "a\u0301"]
            broker.push([a_copy(n, queue=queue) for n, queue in enumerate(queues)])
            assert dict(broker.queues()) == dict.fromkeys(queues, 1)
            for n, queue in enumerate(queues):
                assert keys_of(broker.exchange(f"p{n}", [], [queue], 10)) == [a_copy(n).key]
            broker.push([Copy("abc", 1, "q", "{}"), Copy("ABC", 1, "q", "{}"), Copy("abc ", 1, "q", "{}")])
            assert broker.holds([("abc", 1), ("ABC", 1), ("abc ", 1), ("Abc", 1)]) == {("abc", 1), ("ABC", 1), ("abc ", 1)}

    def test_an_empty_push_and_a_fetch_of_nothing_do_nothing(self) -> None:
        with self.broker() as broker:
            broker.push([])
            assert broker.exchange("p", [], ["default"], 10) == []
            broker.push([a_copy()])
            assert broker.exchange("p", [], ["default"], 0) == []
            assert broker.exchange("p", [], ["other"], 10) == []
            assert waiting_in(broker, "default", "other") == {"default": 1}

    def test_a_queue_is_first_in_first_out(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(n) for n in range(5)])
            broker.push([a_copy(n) for n in range(5, 8)])
            fetched = [*broker.exchange("p", [], ["default"], 3), *broker.exchange("p", [], ["default"], 10)]
            assert keys_of(fetched) == keys_of([a_copy(n) for n in range(8)])

    def test_smaller_priorities_come_first_where_there_are_priorities(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(n, priority=priority) for n, priority in enumerate((240, 120, 340, 120, -5))])
            order = [int(c.jid, 16) for c in broker.exchange("p", [], ["default"], 10)]
            assert order == ([4, 1, 3, 0, 2] if broker.capabilities.priority else [0, 1, 2, 3, 4])

    def test_queues_are_tried_in_the_order_given(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(0, queue="low", priority=-9), a_copy(1, queue="high"), a_copy(2, queue="low")])
            assert [c.queue for c in broker.exchange("p", [], ["high", "low"], 2)] == ["high", "low"]
            assert [c.queue for c in broker.exchange("p", [], ["high", "low"], 2)] == ["low"]

    def test_a_copy_is_held_once_however_often_it_is_pushed(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(), a_copy()])
            broker.push([a_copy()])
            assert waiting_in(broker, "default") == {"default": 1}
            fetched = broker.exchange("p", [], ["default"], 10)
            assert len(fetched) == 1
            broker.push([a_copy()])
            assert broker.exchange("q", [], ["default"], 10) == [], "it is in a process's list"
            broker.push([a_copy(attempt=2)])
            assert keys_of(broker.exchange("q", [], ["default"], 10)) == [(a_copy().jid, 2)], (
                "another attempt is another copy"
            )

    def test_a_copy_that_was_acknowledged_may_be_pushed_again(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy()])
            broker.exchange("p", broker.exchange("p", [], ["default"], 1), ["default"], 0)
            assert broker.holds([a_copy().key]) == set()
            broker.push([a_copy()])
            assert len(broker.exchange("p", [], ["default"], 1)) == 1

    def test_a_fetched_copy_is_in_its_process_list_until_it_is_acknowledged(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(n) for n in range(3)])
            one, two = broker.exchange("p", [], ["default"], 2)
            assert keys_of(broker.held_by("p")) == [one.key, two.key]
            assert broker.holders() == {"p"}
            assert waiting_in(broker, "default") == {"default": 1}
            (three,) = broker.exchange("p", [one], ["default"], 5)
            assert keys_of(broker.held_by("p")) == [two.key, three.key]
            broker.exchange("p", [two, three], ["default"], 5)
            assert broker.held_by("p") == []
            assert broker.holders() == set()

    def test_acknowledging_what_is_not_in_the_list_does_nothing(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(0), a_copy(1)])
            (mine,) = broker.exchange("p", [], ["default"], 1)
            broker.exchange("q", [mine], ["default"], 0)
            assert keys_of(broker.held_by("p")) == [mine.key], "another process cannot acknowledge it"
            broker.exchange("p", [mine], ["default"], 0)
            broker.exchange("p", [mine, mine], ["default"], 0)
            assert broker.holds([a_copy(1).key]) == {a_copy(1).key}

    def test_what_is_put_back_comes_first_again_unchanged(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(n) for n in range(4)])
            one, two = broker.exchange("p", [], ["default"], 2)
            broker.put_back("p", [one, two])
            assert broker.held_by("p") == []
            again = broker.exchange("q", [], ["default"], 10)
            assert [(c.key, c.payload) for c in again] == [(a_copy(n).key, a_copy(n).payload) for n in range(4)]

    def test_a_copy_of_another_process_cannot_be_put_back(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy()])
            held = broker.exchange("p", [], ["default"], 1)
            broker.put_back("q", held)
            assert keys_of(broker.held_by("p")) == [a_copy().key]
            assert broker.exchange("q", [], ["default"], 1) == []

    def test_what_is_deferred_is_fetched_last_and_unchanged(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(n, attempt=0, priority=-3) for n in range(3)])
            broker.push([a_copy(3, priority=9), a_copy(4, attempt=2, queue="other")])
            one, two = broker.exchange("p", [], ["default"], 2)
            broker.defer("p", [one, two])
            broker.defer("p", [one, two])
            broker.defer("p", [])
            assert broker.held_by("p") == []
            assert broker.holders() == set()
            again = broker.exchange("q", [], ["default"], 10)
            assert [(c.key, c.payload) for c in again] == [
                (copy.key, copy.payload)
                for copy in (a_copy(2, attempt=0), a_copy(3), a_copy(0, attempt=0), a_copy(1, attempt=0))
            ]
            (other,) = broker.exchange("q", [], ["other"], 1)
            broker.defer("q", [other])
            assert broker.holds([other.key]) == {other.key}
            broker.push([a_copy(4, attempt=2, queue="other")])
            assert keys_of(broker.exchange("q", [], ["other"], 10)) == [other.key]

    def test_a_copy_of_another_process_or_an_acknowledged_one_cannot_be_deferred(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(0, attempt=0), a_copy(1)])
            held = broker.exchange("p", [], ["default"], 2)
            broker.defer("q", held)
            assert keys_of(broker.held_by("p")) == keys_of(held)
            broker.drop("p", held)
            broker.defer("p", held)
            assert broker.exchange("q", [], ["default"], 2) == []

    def test_withdrawing_takes_what_waits_of_a_task_and_leaves_what_is_fetched_and_other_tasks(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(n, task_id=7) for n in range(5)] + [a_copy(9, task_id=8), a_copy(10)])
            (held,) = broker.exchange("p", [], ["default"], 1)
            taken = broker.withdraw(7, 3)
            assert len(taken) == 3
            taken += broker.withdraw(7, 100)
            assert sorted(taken) == sorted(a_copy(n).key for n in range(1, 5))
            assert broker.withdraw(7, 100) == []
            assert keys_of(broker.held_by("p")) == [held.key]
            assert sorted(keys_of(broker.exchange("p", [], ["default"], 10))) == sorted([a_copy(9).key, a_copy(10).key])

    # -- what is where

    def test_it_says_honestly_which_copies_it_holds(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(0), a_copy(1), a_copy(2, attempt=3)])
            broker.exchange("p", [], ["default"], 1)
            asked = [a_copy(0).key, a_copy(1).key, a_copy(2).key, (a_copy(2).jid, 3), a_copy(9).key]
            assert broker.holds(asked) == {a_copy(0).key, a_copy(1).key, (a_copy(2).jid, 3)}
            assert broker.holds([]) == set()

    def test_it_counts_what_waits_in_each_queue(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(0), a_copy(1), a_copy(2, queue="other")])
            assert dict(broker.queues()) == {"default": 2, "other": 1}
            assert waiting_in(broker, "other", "none") == {"other": 1}
            broker.exchange("p", [], ["other"], 1)
            assert dict(broker.queues()) == {"default": 2}
            assert waiting_in(broker, "other") == {}

    def test_it_counts_what_waits_at_each_priority_where_there_are_priorities(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(n, priority=priority) for n, priority in enumerate((120, 360, 360, -5))])
            if broker.capabilities.priority:
                assert broker.waiting(["default"])["default"] == {120: 1, 360: 2, -5: 1}
            assert waiting_in(broker, "default") == {"default": 4}

    def test_a_copy_is_put_back_with_the_deaths_that_were_counted(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(n, attempt=0) for n in range(3)])
            one, two, three = broker.exchange("p", [], ["default"], 3)
            one.deaths, two.deaths = 1, 2
            broker.put_back("p", [one, two, three])
            assert [c.deaths for c in broker.exchange("q", [], ["default"], 3)] == [1, 2, 0]

    def test_dropping_takes_copies_out_of_a_list_for_good(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(0), a_copy(1)])
            one, two = broker.exchange("p", [], ["default"], 2)
            broker.drop("p", [one])
            broker.drop("p", [])
            broker.drop("q", [two])
            assert keys_of(broker.held_by("p")) == [two.key]
            assert broker.holds([one.key, two.key]) == {two.key}

    # -- the sets of untracked jobs

    def test_a_set_gives_up_what_is_due_and_keeps_the_rest(self) -> None:
        with self.broker() as broker:
            broker.hold(SCHEDULE, [Held(a_copy(n, attempt=0), 100 * n) for n in (3, 1, 2)])
            assert [(held.copy.key, held.at) for held in broker.members(SCHEDULE, 10)] == [
                (a_copy(n, attempt=0).key, 100 * n) for n in (1, 2, 3)
            ]
            assert broker.exchange("p", [], ["default"], 10) == []
            assert broker.release_due(SCHEDULE, 99, 10) == 0
            assert broker.release_due(SCHEDULE, 200, 1) == 1
            assert broker.release_due(SCHEDULE, 200, 10) == 1
            assert keys_of(broker.exchange("p", [], ["default"], 10)) == [
                a_copy(1, attempt=0).key,
                a_copy(2, attempt=0).key,
            ]
            assert len(broker.members(SCHEDULE, 10)) == 1

    def test_what_was_in_a_set_comes_to_the_end_of_its_queue(self) -> None:
        with self.broker() as broker:
            broker.hold(SCHEDULE, [Held(a_copy(0, attempt=0), 100)])
            broker.push([a_copy(1)])
            assert broker.release_due(SCHEDULE, 100, 10) == 1
            assert keys_of(broker.exchange("p", [], ["default"], 10)) == [a_copy(1).key, a_copy(0, attempt=0).key]

    def test_a_copy_goes_from_a_list_into_a_set_in_one_step(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(attempt=0)])
            (copy,) = broker.exchange("p", [], ["default"], 1)
            payload = '{"class":"w","args":[],"queue":"default","retry_count":0}'
            changed = Copy(copy.jid, 0, copy.queue, payload, 0, None, 0, copy.handle)
            broker.hold(RETRY, [Held(changed, 5)], process="p")
            assert broker.held_by("p") == []
            assert [held.copy.payload for held in broker.members(RETRY, 10)] == [changed.payload]
            assert broker.holds([copy.key]) == set(), "it is in a set, not on its way"
            assert broker.members(DEAD, 10) == []

    def test_what_is_not_in_the_list_any_more_is_not_put_into_a_set(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(n, attempt=0) for n in range(3)])
            taken, done, mine = broker.exchange("p", [], ["default"], 3)
            broker.put_back("p", [taken])  # by whoever took it for dead
            (again,) = broker.exchange("q", [], ["default"], 3)
            broker.drop("q", [again])
            broker.drop("p", [done])
            broker.hold(RETRY, [Held(copy, 5) for copy in (taken, done, mine)], process="p")
            assert [held.copy.key for held in broker.members(RETRY, 10)] == [mine.key]
            assert broker.queues() == {}
