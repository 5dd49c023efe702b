"""The conformance suites of brokers and of their operations: inherit one in a test class and override :meth:`make_broker`.

.. code-block:: python

    class TestMyBroker(BrokerConformance):
        def make_broker(self) -> Broker:
            return MyBroker(...)

pytest collects the methods; no fixture is needed. See :class:`BrokerSuite` for further methods to override.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from asynctask.brokers.admin import Entry
from asynctask.brokers.base import DEAD, RETRY, SCHEDULE, About, Broker, Copy, Key, SetEntry
from asynctask.clock import SECOND, SystemClock
from asynctask.errors import InputError

# -- shared tools

LISTED = "a process's list"
QUEUED = "a queue"

_MOST = 1_000
_MOST_STEPS = 500


def a_copy(n: int = 0, *, attempt: int = 1, queue: str = "default", priority: int = 0, task_id: int | None = None) -> Copy:
    """The ``n``-th job, as pushed."""
    jid = f"{n:024x}"
    payload = json.dumps({"class": "w", "args": [{"n": n, "text": "ä\u2028</script>\\"}], "jid": jid}, ensure_ascii=False)
    return Copy(jid, attempt, queue, payload, priority, task_id)


def untracked(n: int, *, queue: str = "default", **members: Any) -> Copy:
    """The ``n``-th untracked job, with further members in its payload."""
    jid = f"{n:024x}"
    job = {"retry": True, "queue": queue, "class": "Hard", "args": [n], "jid": jid, **members}
    return Copy(jid, 0, queue, json.dumps(job, separators=(",", ":"), ensure_ascii=False))


def keys_of(copies: Sequence[Copy]) -> list[Key]:
    """The keys of copies."""
    return [copy.key for copy in copies]


def waiting_in(broker: Broker, *queues: str) -> dict[str, int]:
    """The number of copies in each of these queues, of all priorities."""
    counts = {queue: sum(found.values()) for queue, found in broker.waiting(queues).items()}
    return {queue: count for queue, count in counts.items() if count}


def refused(kind: type[Exception], call: Callable[[], object]) -> str:
    """The message of the error that a call must raise."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was expected")


def at_once(*acts: Callable[[], object]) -> None:
    """Runs these in threads that start at the same moment. Raises the first error of any."""
    start = threading.Barrier(len(acts))
    failed: list[Exception] = []

    def run(act: Callable[[], object]) -> None:
        start.wait()
        try:
            act()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(act,), name="act") for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def where(
    broker: Broker, *, queues: Collection[str] = (), processes: Collection[str] = (), sets: Collection[str] = ()
) -> Mapping[str, list[str]]:
    """The places of each job by its jid, once for each copy: names of the sets, :data:`LISTED` and :data:`QUEUED`.

    Fetches the jobs in the ``queues`` and puts them back.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for name in sets:
        for held in broker.members(name, _MOST):
            found[held.copy.jid].append(name)
    for process in processes:
        for copy in broker.held_by(process):
            found[copy.jid].append(LISTED)
    waiting = broker.exchange("who looks", [], list(queues), _MOST)
    for copy in waiting:
        found[copy.jid].append(QUEUED)
    broker.put_back("who looks", waiting)
    return found


class BrokerSuite:
    """How a suite makes brokers. :meth:`make_broker` must be overridden; each other override adds tests."""

    def make_broker(self) -> Broker:
        """A new, empty broker."""
        raise NotImplementedError("make_broker: return a new, empty broker")

    def same_server(self, broker: Broker) -> Broker | None:
        """A connection to the same server, as of another process; None if unavailable."""
        return None

    def dying(self, broker: Broker, steps: int) -> Broker | None:
        """A connection to the same server, as of a process that is killed after ``steps`` messages: the next one, and any
        after it, raises an error of any kind and does not arrive. None if unavailable."""
        return None

    @contextmanager
    def broker(self) -> Iterator[Broker]:
        """A broker for one test."""
        made = self.make_broker()
        try:
            yield made
        finally:
            made.close()

    @contextmanager
    def another(self, broker: Broker) -> Iterator[Broker]:
        """Another process's connection to the same server, else the same one."""
        made = self.same_server(broker)
        try:
            yield made or broker
        finally:
            if made is not None:
                made.close()

    def killed_at_every_step(
        self,
        fill: Callable[[Broker, int], Any],
        act: Callable[[Broker, int, Any], object],
        check: Callable[[Broker, int, bool], None],
    ) -> None:
        """Runs ``act`` in a process that is killed before its first message, then before its second, and so on, until it
        completes.

        Arguments: ``fill(broker, n)`` prepares round ``n``, with names and numbers of its own; ``act(dying, n, filled)`` is
        what is killed; ``check(broker, n, ended)`` asserts the state it left.
        """
        with self.broker() as broker:
            for n in range(_MOST_STEPS):
                filled = fill(broker, n)
                dying = self.dying(broker, n)
                if dying is None:
                    return
                ended = _comes_to_its_end(dying, partial(act, dying, n, filled))
                check(broker, n, ended)
                if ended:
                    return
        raise AssertionError(f"it was not done after {_MOST_STEPS} messages: does dying() count those of a connection?")


def _comes_to_its_end(dying: Broker, act: Callable[[], object]) -> bool:
    try:
        act()
    except Exception:  # of any kind: the process is dead
        return False
    finally:
        with suppress(Exception):
            dying.close()
    return True


# -- crashes: processes killed at every message of each call; needs BrokerSuite.dying, else these tests check nothing

_DUE = 2_000_000_000 * SECOND


def _jobs(n: int, count: int = 3, *, tracked: bool = True) -> list[Copy]:
    """Jobs of round ``n``, alternately in its two queues and tracked."""
    return [a_copy(10 * n + i, attempt=(1 + i) % 2 if tracked else 0, queue=f"q{n}.{i % 2}") for i in range(count)]


def _queues(n: int) -> list[str]:
    return [f"q{n}.0", f"q{n}.1"]


def _places(broker: Broker, n: int, *sets: str) -> Mapping[str, list[str]]:
    return where(broker, queues=_queues(n), processes=[f"p{n}"], sets=sets)


def _fetched(broker: Broker, n: int) -> list[Copy]:
    broker.push(_jobs(n))
    return broker.exchange(f"p{n}", [], _queues(n), 10)


def _each_once(found: Mapping[str, list[str]], n: int, places: Collection[str]) -> None:
    for copy in _jobs(n):
        assert len(found[copy.jid]) == 1, f"killed before message {n + 1}, a job is in {found[copy.jid] or 'thin air'}"
        assert found[copy.jid][0] in places


def _check_holds(broker: Broker, n: int, found: Mapping[str, list[str]]) -> None:
    tracked = [copy.key for copy in _jobs(n) if copy.attempt]
    there = {key for key in tracked if found[key[0]]}
    assert broker.holds(tracked) == there, f"killed before message {n + 1}, it does not know what it holds"


class BrokerCrashes(BrokerSuite):
    """A process killed in the middle of a call neither loses nor duplicates a job."""

    def test_killed_in_a_push_it_has_pushed_all_of_a_call_or_nothing(self) -> None:
        def check(broker: Broker, n: int, ended: bool) -> None:
            found = _places(broker, n)
            there = [found[copy.jid] for copy in _jobs(n)]
            assert there in ([[QUEUED]] * 3, [[]] * 3), f"killed before message {n + 1}, it pushed a part"
            assert not ended or there[0]
            _check_holds(broker, n, found)

        self.killed_at_every_step(lambda broker, n: _jobs(n), lambda dying, n, jobs: dying.push(jobs), check)

    def test_killed_in_an_exchange_it_loses_nothing_that_was_not_acknowledged(self) -> None:
        def fill(broker: Broker, n: int) -> list[Copy]:
            broker.push(_jobs(n, 4))
            return broker.exchange(f"p{n}", [], _queues(n)[:1], 2)

        def check(broker: Broker, n: int, ended: bool) -> None:
            found = _places(broker, n)
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
            found = _places(broker, n)
            _each_once(found, n, [QUEUED] if ended else [QUEUED, LISTED])
            _check_holds(broker, n, found)

        self.killed_at_every_step(_fetched, lambda dying, n, held: dying.put_back(f"p{n}", held), check)

    def test_killed_while_it_defers_each_copy_is_in_the_list_or_in_its_queue(self) -> None:
        def check(broker: Broker, n: int, ended: bool) -> None:
            found = _places(broker, n)
            _each_once(found, n, [QUEUED] if ended else [QUEUED, LISTED])
            _check_holds(broker, n, found)

        self.killed_at_every_step(_fetched, lambda dying, n, held: dying.defer(f"p{n}", held, ()), check)

    def test_killed_while_it_puts_into_a_set_each_copy_is_in_the_list_or_in_the_set(self) -> None:
        def act(dying: Broker, n: int, held: list[Copy]) -> None:
            dying.hold(RETRY, [SetEntry(copy, _DUE + n) for copy in held], process=f"p{n}")

        def fill(broker: Broker, n: int) -> list[Copy]:
            broker.push(_jobs(n, tracked=False))
            return broker.exchange(f"p{n}", [], _queues(n), 10)

        def check(broker: Broker, n: int, ended: bool) -> None:
            _each_once(_places(broker, n, RETRY), n, [RETRY] if ended else [RETRY, LISTED])

        self.killed_at_every_step(fill, act, check)

    def test_killed_while_it_releases_each_due_job_is_in_its_set_or_in_its_queue(self) -> None:
        def fill(broker: Broker, n: int) -> None:
            broker.hold(SCHEDULE, [SetEntry(copy, 100 + i) for i, copy in enumerate(_jobs(n, tracked=False))])

        def check(broker: Broker, n: int, ended: bool) -> None:
            _each_once(_places(broker, n, SCHEDULE), n, [QUEUED] if ended else [QUEUED, SCHEDULE])

        self.killed_at_every_step(fill, lambda dying, n, _: dying.release_due(SCHEDULE, _DUE, 100), check)

    def test_killed_while_it_withdraws_the_broker_still_knows_what_it_holds(self) -> None:
        def fill(broker: Broker, n: int) -> None:  # the same queues each time: some brokers search all known ones
            broker.push([a_copy(10 * n + i, queue=f"q{i}", task_id=n + 1) for i in range(2)])

        def check(broker: Broker, n: int, ended: bool) -> None:
            found = where(broker, queues=["q0", "q1"])
            keys = [a_copy(10 * n + i).key for i in range(2)]
            assert broker.holds(keys) == {key for key in keys if found[key[0]]}, f"killed before message {n + 1}, it lies"
            assert not ended or not any(found[jid] for jid, _ in keys)

        self.killed_at_every_step(fill, lambda dying, n, _: dying.withdraw(n + 1, 10), check)

    # -- without :meth:`dying`

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
    """A tool killed in the middle of an action has applied it to each member or has not."""

    def _killed(self, act: Any, places: Collection[str], after: Collection[str]) -> None:
        def fill(broker: Broker, n: int) -> Any:
            jobs = [untracked(10 * n + i, queue=f"q{n}.{i % 2}") for i in range(3)]
            broker.hold(RETRY, [SetEntry(copy, _DUE + i) for i, copy in enumerate(jobs)])
            jids = {copy.jid for copy in jobs}
            return [entry for entry in broker.operations.entries(RETRY, limit=1_000).entries if entry.copy.jid in jids]

        def check(broker: Broker, n: int, ended: bool) -> None:
            _each_once(_places(broker, n, RETRY, DEAD), n, after if ended else places)

        self.killed_at_every_step(fill, act, check)

    def test_a_tool_killed_while_it_restarts_leaves_each_in_its_set_or_in_its_queue(self) -> None:
        def act(dying: Broker, n: int, entries: Any) -> None:
            dying.operations.restart(RETRY, entries)

        self._killed(act, [RETRY, QUEUED], [QUEUED])

    def test_a_tool_killed_while_it_kills_leaves_each_in_its_set_or_among_the_dead(self) -> None:
        def act(dying: Broker, n: int, entries: Any) -> None:
            dying.operations.kill(RETRY, entries)

        self._killed(act, [RETRY, DEAD], [DEAD])

    def test_a_tool_killed_while_it_clears_a_queue_leaves_the_broker_honest(self) -> None:
        def act(dying: Broker, n: int, _: Any) -> None:
            for queue in _queues(n):
                dying.operations.clear_some(queue, 10)

        def check(broker: Broker, n: int, ended: bool) -> None:
            found = _places(broker, n)
            _check_holds(broker, n, found)
            assert not ended or not any(found.values())

        self.killed_at_every_step(lambda broker, n: broker.push(_jobs(n)), act, check)


# -- races

_MOST_NEWS = 50


class BrokerRaces(BrokerSuite):
    """The broker's guarantees under concurrent calls."""

    patience_s = 30.0
    """Seconds after which an immediate effect counts as missing."""

    def test_a_copy_is_fetched_by_one_process_only(self) -> None:
        with self.broker() as broker, self.another(broker) as other:
            broker.push([a_copy(n) for n in range(60)])
            fetched: dict[str, list[Copy]] = {}

            def fetch(process: str, through: Broker) -> None:
                taken: list[Copy] = []
                while copies := through.exchange(process, [], ["default"], 7):
                    taken += copies
                fetched[process] = taken

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
            fetched = keys_of(broker.exchange("p", [], ["default"], 5))  # each has some, whoever is faster from here on
            withdrawn = list(other.withdraw(7, 5))

            def fetch() -> None:
                while copies := broker.exchange("p", [], ["default"], 5):
                    fetched.extend(keys_of(copies))

            def withdraw() -> None:
                while found := other.withdraw(7, 5):
                    withdrawn.extend(found)

            at_once(fetch, withdraw)
            while found := broker.withdraw(7, 100):  # copies that the other thread had locked
                withdrawn.extend(found)
            left = keys_of(broker.exchange("q", [], ["default"], 200))
            assert sorted([*fetched, *withdrawn, *left]) == sorted(keys)
            assert sorted(keys_of(broker.held_by("p"))) == sorted(fetched)

    def test_due_jobs_are_released_once_by_several_that_look_at_the_same_time(self) -> None:
        with self.broker() as broker, self.another(broker) as other:
            copies = [a_copy(n, attempt=0) for n in range(60)]
            broker.hold(SCHEDULE, [SetEntry(copy, 100 + n) for n, copy in enumerate(copies)])

            def release(through: Broker) -> None:
                while through.release_due(SCHEDULE, 1_000, 7):
                    pass

            at_once(*(partial(release, each) for each in (broker, other, broker)))
            release(broker)  # jobs that each skipped because another had locked them
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
            other.put_back("dead", found)  # too late: another process holds them
            assert sorted(keys_of(broker.held_by("q"))) == sorted(keys_of(copies))
            assert waiting_in(broker, "default") == {}

    # -- waiting

    def test_a_wait_ends_when_something_is_pushed(self) -> None:
        with self.broker() as broker, self.another(broker) as other:
            self._drain(broker)
            numbers = itertools.count()  # a new job each time, for pushing one again is no news
            assert self._woken_by(broker, lambda: other.push([a_copy(next(numbers))]))

    def test_a_wait_ends_when_its_process_is_woken(self) -> None:
        with self.broker() as broker:
            self._drain(broker)
            assert self._woken_by(broker, broker.wake)

    def test_a_wait_for_nothing_ends_with_its_time(self) -> None:
        with self.broker() as broker:
            assert self._drain(broker) < self.patience_s

    def _drain(self, broker: Broker) -> float:
        """Consumes notifications of earlier events, which come once and may be late. Returns the seconds of the last wait,
        which brought none."""
        clock = SystemClock()
        for _ in range(_MOST_NEWS):
            began = clock.monotonic()
            if not broker.wait(0.2):
                return clock.monotonic() - began
        raise AssertionError(f"there was news {_MOST_NEWS} times although nothing happened")

    def _woken_by(self, broker: Broker, act: Callable[[], None]) -> bool:
        """Whether a wait in another thread ends long before its timeout; repeats ``act`` until then."""
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


# -- the whole contract


class BrokerConformance(BrokerRaces, BrokerCrashes):
    """The contract of ``asynctask.brokers.base``, one method for each promise."""

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

    def test_a_queue_has_no_priorities(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(n, priority=priority) for n, priority in enumerate((240, 120, 340, 120, -5))])
            order = [int(c.jid, 16) for c in broker.exchange("p", [], ["default"], 10)]
            assert order == [0, 1, 2, 3, 4]

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

    def test_what_is_deferred_is_passed_and_left_as_it_was_to_a_process_that_knows_it(self) -> None:
        with self.broker() as broker, self.another(broker) as other:
            theirs = [untracked(n, use_task_event=False) for n in range(3)]
            broker.push(theirs)
            held = broker.exchange("p", [], ["default"], 2)
            for copies in (held, held, []):
                broker.defer("p", copies, {"w"})
            assert (broker.held_by("p"), broker.holders()) == ([], set())
            broker.defer("p", broker.exchange("p", [], ["default"], 10), {"w"})
            ours = [a_copy(3, priority=9), a_copy(4, attempt=0), a_copy(5, attempt=2, priority=-3)]
            broker.push(ours)
            assert waiting_in(broker, "default") == {"default": 3}, "it is no work ahead of ours"
            (facts,) = broker.operations.queues()
            assert (facts.length, facts.others, dict(broker.operations.others("default"))) == (6, 3, {"Hard": 3})
            found = broker.exchange("p", [], ["default"], 10)
            assert sorted(keys_of(found)) == sorted(keys_of(ours)), "each behind theirs, and none of theirs"
            if other is not broker:
                again = other.exchange("q", [], ["default"], 10)
                assert [(copy.key, copy.payload) for copy in again] == [(copy.key, copy.payload) for copy in theirs]

    def test_a_copy_of_another_process_or_an_acknowledged_one_cannot_be_deferred(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(0, attempt=0), a_copy(1)])
            held = broker.exchange("p", [], ["default"], 2)
            broker.defer("q", held, ())
            assert keys_of(broker.held_by("p")) == keys_of(held)
            broker.drop("p", held)
            broker.defer("p", held, ())
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

    def test_it_counts_what_waits_at_any_priority(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(n, priority=priority) for n, priority in enumerate((120, 360, 360, -5))])
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
            broker.hold(SCHEDULE, [SetEntry(a_copy(n, attempt=0), 100 * n) for n in (3, 1, 2)])
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
            broker.hold(SCHEDULE, [SetEntry(a_copy(0, attempt=0), 100)])
            broker.push([a_copy(1)])
            assert broker.release_due(SCHEDULE, 100, 10) == 1
            assert keys_of(broker.exchange("p", [], ["default"], 10)) == [a_copy(1).key, a_copy(0, attempt=0).key]

    def test_a_copy_goes_from_a_list_into_a_set_in_one_step(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(attempt=0)])
            (copy,) = broker.exchange("p", [], ["default"], 1)
            payload = '{"class":"w","args":[],"queue":"default","retry_count":0}'
            changed = Copy(copy.jid, 0, copy.queue, payload, 0, None, 0, copy.handle)
            broker.hold(RETRY, [SetEntry(changed, 5)], process="p")
            assert broker.held_by("p") == []
            assert [held.copy.payload for held in broker.members(RETRY, 10)] == [changed.payload]
            assert broker.holds([copy.key]) == set(), "it is in a set, not on its way"
            assert broker.members(DEAD, 10) == []

    def test_what_is_not_in_the_list_any_more_is_not_put_into_a_set(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(n, attempt=0) for n in range(3)])
            taken, done, mine = broker.exchange("p", [], ["default"], 3)
            broker.put_back("p", [taken])  # by a process that declared p dead
            (again,) = broker.exchange("q", [], ["default"], 3)
            broker.drop("q", [again])
            broker.drop("p", [done])
            broker.hold(RETRY, [SetEntry(copy, 5) for copy in (taken, done, mine)], process="p")
            assert [held.copy.key for held in broker.members(RETRY, 10)] == [mine.key]
            assert broker.queues() == {}


# -- operations

_DUE = 2_000_000_000 * SECOND


class OperationsConformance(OperationsCrashes):
    """The contract of ``asynctask.brokers.admin``."""

    # -- queues

    def test_queues_are_listed_with_length_age_and_the_next_worker(self) -> None:
        with self.broker() as broker:
            now = SystemClock().now()
            broker.push([untracked(1, queue="b", enqueued_at=(now - 9 * SECOND) / SECOND), untracked(2, queue="a")])
            broker.push([untracked(3, queue="b", enqueued_at=now / SECOND, **{"class": "Other"})])
            first, second = broker.operations.queues()
            assert (first.name, first.length, first.paused, first.next_class) == ("a", 1, False, "Hard")
            assert (second.name, second.length, second.next_class) == ("b", 2, "Hard")
            assert second.oldest_at == now - 9 * SECOND
            assert first.oldest_at is None, "it does not say when it was pushed"

    def test_jobs_are_listed_from_either_end_page_by_page(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(n) for n in range(5)])
            jobs = broker.operations.jobs
            assert [int(e.copy.jid, 16) for e in jobs("default", limit=2).entries] == [0, 1]
            assert [int(e.copy.jid, 16) for e in jobs("default", offset=2, limit=2).entries] == [2, 3]
            assert [int(e.copy.jid, 16) for e in jobs("default", offset=4, limit=2).entries] == [4]
            assert [int(e.copy.jid, 16) for e in jobs("default", offset=6, limit=2).entries] == []
            assert [int(e.copy.jid, 16) for e in jobs("default", limit=2, newest=True).entries] == [4, 3]
            assert [int(e.copy.jid, 16) for e in jobs("default", offset=3, limit=9, newest=True).entries] == [1, 0]
            assert jobs("default", limit=1).total == 5
            assert jobs("other").total == 0

    def test_a_page_that_is_too_large_or_too_far_is_refused(self) -> None:
        with self.broker() as broker:
            operations = broker.operations
            for limit, offset in ((0, 0), (1_001, 0), (1, -1), (1, 1_000_001)):
                refused(InputError, partial(operations.jobs, "q", limit=limit, offset=offset))
                refused(InputError, partial(operations.entries, DEAD, limit=limit, offset=offset))

    def test_one_job_is_deleted_and_its_neighbours_stay(self) -> None:
        with self.broker() as broker:
            broker.push([*(a_copy(n) for n in range(3)), untracked(9)])
            keys = [entry.key for entry in broker.operations.jobs("default").entries]
            assert len(set(keys)) == 4
            gone = broker.operations.delete_job("default", keys[1])
            assert gone is not None
            assert gone.key == a_copy(1).key
            assert broker.holds([a_copy(n).key for n in range(3)]) == {a_copy(0).key, a_copy(2).key}
            assert broker.operations.delete_job("default", keys[3]) is not None
            assert broker.operations.delete_job("default", keys[3]) is None, "it is gone"
            assert broker.operations.delete_job("default", "no such key") is None
            assert keys_of(broker.exchange("p", [], ["default"], 9)) == [a_copy(0).key, a_copy(2).key]
            assert broker.operations.delete_job("default", keys[0]) is None, "it is in a process's list"
            assert len(broker.held_by("p")) == 2
            broker.push([a_copy(1)])
            assert waiting_in(broker, "default") == {"default": 1}, "a deleted copy may be pushed again"

    def test_a_queue_is_cleared_in_slices_and_says_which_tracked_jobs_it_had(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(0), untracked(7), a_copy(1, attempt=3), a_copy(2), a_copy(5, queue="other")])
            first = broker.operations.clear_some("default", 3)
            assert (first.count, sorted(first.tracked)) == (3, [a_copy(0).key, a_copy(1, attempt=3).key])
            rest = broker.operations.clear_some("default", 3)
            assert (rest.count, list(rest.tracked)) == (1, [a_copy(2).key])
            assert broker.operations.clear_some("default", 3).count == 0
            assert [facts.name for facts in broker.operations.queues()] == ["other"]
            broker.push([a_copy(2)])
            assert waiting_in(broker, "default") == {"default": 1}, "what was cleared may be pushed again"
            assert broker.holds([a_copy(0).key, a_copy(1, attempt=3).key]) == set()

    def test_nothing_is_taken_from_a_paused_queue(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(0), a_copy(1, queue="other")])
            assert broker.operations.pause("default")
            assert not broker.operations.pause("default")
            assert {facts.name: facts.paused for facts in broker.operations.queues()} == {"default": True, "other": False}
            assert broker.operations.paused(["other", "default", "third"]) == {"default"}
            assert broker.operations.paused([]) == set()
            assert keys_of(broker.exchange("p", [], ["default", "other"], 9)) == [a_copy(1).key]
            assert broker.operations.unpause("default")
            assert not broker.operations.unpause("default")
            assert broker.operations.paused(["default"]) == set()
            assert keys_of(broker.exchange("p", [], ["default"], 9)) == [a_copy(0).key]

    # -- sets

    def _filled(self, broker: Broker, set_name: str, count: int = 4, *, same: bool = False) -> list[Entry]:
        broker.hold(set_name, [SetEntry(untracked(n), _DUE + (0 if same else n) * SECOND) for n in range(count)])
        return list(broker.operations.entries(set_name).entries)

    def test_a_set_is_listed_from_either_end_page_by_page(self) -> None:
        with self.broker() as broker:
            self._filled(broker, DEAD)
            for newest, order in ((False, [0, 1, 2, 3]), (True, [3, 2, 1, 0])):
                for offset in (0, 2, 3, 4):
                    page = broker.operations.entries(DEAD, offset=offset, limit=2, newest=newest)
                    assert [int(e.copy.jid, 16) for e in page.entries] == order[offset : offset + 2]
                    assert page.total == 4
            assert [e.at for e in broker.operations.entries(DEAD).entries] == [_DUE + n * SECOND for n in range(4)]

    def test_a_member_is_found_by_its_key(self) -> None:
        with self.broker() as broker:
            for entry in self._filled(broker, RETRY, same=True):
                found = broker.operations.entry(RETRY, entry.key)
                assert found is not None
                assert (found.copy.key, found.raw, found.at) == (entry.copy.key, entry.raw, entry.at)
                assert broker.operations.entry(DEAD, entry.key) is None
            refused(InputError, lambda: broker.operations.entry(RETRY, "nonsense"))
            refused(InputError, lambda: broker.operations.entry("queues", "1-2"))

    def test_a_set_is_searched_to_the_letter(self) -> None:
        with self.broker() as broker:
            texts = ["Größe", "100%", "a_b*c", "[x]?", "grosse", "x" * 300]
            held = [SetEntry(untracked(n, note=text), _DUE + n * SECOND) for n, text in enumerate(texts)]
            broker.hold(SCHEDULE, held)
            for text, found in (("Größe", [0]), ("größe", []), ("0%", [1]), ("_b*c", [2]), ("[x]?", [3]), ("g*e", [])):
                result = broker.operations.find(SCHEDULE, text)
                assert [int(e.copy.jid, 16) for e in result.entries] == found, text
                assert result.complete
            first = broker.operations.find(SCHEDULE, "Hard", limit=2)
            assert len(first.entries) == 2
            assert not first.complete
            for bad in ("", "x" * 256, "\0", "\ud800"):
                refused(InputError, partial(broker.operations.find, SCHEDULE, bad))

    def test_a_member_is_restarted_once_and_its_neighbours_of_the_same_time_stay(self) -> None:
        with self.broker() as broker:
            entries = self._filled(broker, RETRY, same=True)
            assert broker.operations.restart(RETRY, entries[1:2]) == 1
            assert broker.operations.restart(RETRY, entries[1:2]) == 0, "it is not there any more"
            left = broker.operations.entries(RETRY).entries
            assert [e.raw for e in left] == [e.raw for e in entries if e is not entries[1]]
            (fetched,) = broker.exchange("p", [], ["default"], 9)
            assert fetched.key == entries[1].copy.key

    def test_an_explicit_restart_costs_no_retry_and_keeps_every_other_member(self) -> None:
        with self.broker() as broker:
            member = untracked(1, queue="low", retry_count=2, tags=["a"], unknown={"x": 1.5})
            broker.hold(RETRY, [SetEntry(member, _DUE)])
            broker.hold(SCHEDULE, [SetEntry(untracked(2, queue="low", retry_count=2), _DUE)])
            for set_name in (RETRY, SCHEDULE):
                entries = broker.operations.entries(set_name).entries
                assert broker.operations.restart(set_name, entries) == 1
            first, second = broker.exchange("p", [], ["low"], 9)
            job = json.loads(first.payload)
            assert job.pop("enqueued_at") > 1_600_000_000
            assert job == {**json.loads(member.payload), "retry_count": 1}
            assert json.loads(second.payload)["retry_count"] == 2, "only a retry gives one back"

    def test_what_is_no_job_is_listed_and_deleted_and_never_restarted(self) -> None:
        with self.broker() as broker:
            broker.hold(DEAD, [SetEntry(Copy("bad-1", 0, "default", "this is no job"), _DUE), SetEntry(untracked(1), _DUE)])
            entries = broker.operations.entries(DEAD).entries
            (bad,) = [each for each in entries if not each.sound]
            assert bad.raw == "this is no job"
            assert "is no job" in refused(InputError, lambda: broker.operations.restart(DEAD, entries))
            assert broker.operations.entries(DEAD).total == 2, "all or none of one call"
            assert broker.operations.delete(DEAD, [bad]) == 1
            assert broker.operations.entries(DEAD).total == 1

    def test_members_are_killed_as_they_are(self) -> None:
        with self.broker() as broker:
            entries = self._filled(broker, RETRY, same=True)
            before = SystemClock().now()
            assert broker.operations.kill(RETRY, entries[:2]) == 2
            assert broker.operations.kill(RETRY, entries[:2]) == 0
            dead = broker.operations.entries(DEAD).entries
            assert sorted(e.raw for e in dead) == sorted(e.raw for e in entries[:2])
            assert all(e.at is not None and e.at >= before - SECOND for e in dead)
            assert broker.operations.entries(RETRY).total == 2
            refused(InputError, lambda: broker.operations.kill(DEAD, dead))

    def test_members_are_deleted_and_a_set_is_cleared(self) -> None:
        with self.broker() as broker:
            entries = self._filled(broker, SCHEDULE, same=True)
            assert broker.operations.delete(SCHEDULE, [entries[0], entries[0], entries[2]]) == 2
            assert [e.raw for e in broker.operations.entries(SCHEDULE).entries] == [entries[1].raw, entries[3].raw]
            assert broker.operations.delete(RETRY, entries) == 0, "they are in another set"
            assert broker.operations.clear(SCHEDULE) == 2
            assert broker.operations.clear(SCHEDULE) == 0
            assert broker.operations.delete(SCHEDULE, []) == broker.operations.restart(SCHEDULE, []) == 0

    def test_of_several_that_act_on_one_member_one_does(self) -> None:
        with self.broker() as broker:
            entries = self._filled(broker, RETRY, 6, same=True)
            counts: dict[str, int] = {}

            def act(name: str, action: Callable[[str, Sequence[Entry]], int]) -> None:
                counts[name] = sum(action(RETRY, [each]) for each in entries)

            operations = broker.operations
            actions = {"restart": operations.restart, "kill": operations.kill, "delete": operations.delete}
            at_once(*(partial(act, name, action) for name, action in actions.items()))
            waiting = sum(waiting_in(broker, "default").values())
            dead = broker.operations.entries(DEAD).total
            assert sum(counts.values()) == 6, "each was acted on once"
            assert counts == {"restart": waiting, "kill": dead, "delete": 6 - waiting - dead}
            assert broker.operations.entries(RETRY).total == 0

    # -- processes

    def test_a_process_that_is_not_known_takes_no_signal(self) -> None:
        with self.broker() as broker:
            assert broker.operations.processes() == []
            assert not broker.operations.signal("host:1:abc", "TSTP")

    def test_a_process_that_shows_itself_is_listed_and_takes_each_signal_once(self) -> None:
        with self.broker() as broker:
            identity = "box:17:0123456789ab"
            about = About(identity, "box", 17, SystemClock().now(), 3, {"default": 1}, version="1.0", tag="shop")
            presence = broker.presence(about)
            if presence is None:
                return
            assert presence.beat((), quiet=False, rss_kib=1_024) is None
            (facts,) = broker.operations.processes()
            assert (facts["identity"], facts["pid"], facts["concurrency"], facts["quiet"]) == (identity, 17, 3, False)
            assert presence.processes() == 1
            assert broker.operations.signal(identity, "TSTP")
            assert not broker.operations.signal("box:18:0123456789ab", "TSTP")
            assert presence.beat((), quiet=False, rss_kib=1_024) == "TSTP"
            assert presence.beat((), quiet=True, rss_kib=1_024) is None
            assert [each["quiet"] for each in broker.operations.processes()] == [True]
            presence.prune()
            assert [each["identity"] for each in broker.operations.processes()] == [identity], "it lives"
            presence.leave()
            assert broker.operations.processes() == []
