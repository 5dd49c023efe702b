"""The conformance suite of brokers' operations, one method for each promise.

Used like :class:`~asynctask.testing.broker_suite.BrokerConformance`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial

from asynctask.brokers.admin import Entry
from asynctask.brokers.base import DEAD, RETRY, SCHEDULE, About, Broker, Copy, Held
from asynctask.clock import SECOND, SystemClock
from asynctask.errors import Conflict, InputError
from asynctask.testing.broker_suite import OperationsCrashes, a_copy, at_once, keys_of, refused, untracked, waiting_in

__all__ = ["OperationsConformance", "untracked"]

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

    def test_nothing_is_taken_from_a_paused_queue_where_queues_can_be_paused(self) -> None:
        with self.broker() as broker:
            broker.push([a_copy(0), a_copy(1, queue="other")])
            if not broker.capabilities.pauses:
                assert "cannot be paused" in refused(Conflict, lambda: broker.operations.pause("default"))
                assert "cannot be paused" in refused(Conflict, lambda: broker.operations.unpause("default"))
                return
            assert broker.operations.pause("default")
            assert not broker.operations.pause("default")
            assert {facts.name: facts.paused for facts in broker.operations.queues()} == {"default": True, "other": False}
            assert keys_of(broker.exchange("p", [], ["default", "other"], 9)) == [a_copy(1).key]
            assert broker.operations.unpause("default")
            assert not broker.operations.unpause("default")
            assert keys_of(broker.exchange("p", [], ["default"], 9)) == [a_copy(0).key]

    # -- sets

    def _filled(self, broker: Broker, set_name: str, count: int = 4, *, same: bool = False) -> list[Entry]:
        broker.hold(set_name, [Held(untracked(n), _DUE + (0 if same else n) * SECOND) for n in range(count)])
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
            held = [Held(untracked(n, note=text), _DUE + n * SECOND) for n, text in enumerate(texts)]
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
            broker.hold(RETRY, [Held(member, _DUE)])
            broker.hold(SCHEDULE, [Held(untracked(2, queue="low", retry_count=2), _DUE)])
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
            broker.hold(DEAD, [Held(Copy("bad-1", 0, "default", "this is no job"), _DUE), Held(untracked(1), _DUE)])
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

    def test_a_member_is_moved_to_another_time(self) -> None:
        with self.broker() as broker:
            entries = self._filled(broker, SCHEDULE)
            assert broker.operations.reschedule(SCHEDULE, entries[0], _DUE + 9 * SECOND)
            moved = broker.operations.entries(SCHEDULE).entries[-1]
            assert (moved.raw, moved.at) == (entries[0].raw, _DUE + 9 * SECOND)
            assert broker.operations.entries(SCHEDULE).total == 4, "no second one"
            broker.operations.delete(SCHEDULE, [moved])
            assert not broker.operations.reschedule(SCHEDULE, moved, _DUE)
            assert broker.operations.entries(SCHEDULE).total == 3, "what is gone does not come back"
            refused(InputError, lambda: broker.operations.reschedule(SCHEDULE, entries[1], -1))

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
            ((found, facts),) = [(each.identity, each.facts) for each in broker.operations.processes()]
            assert (found, facts["pid"], facts["concurrency"], facts["quiet"]) == (identity, 17, 3, False)
            assert presence.processes() == 1
            assert broker.operations.signal(identity, "TSTP")
            assert not broker.operations.signal("box:18:0123456789ab", "TSTP")
            assert presence.beat((), quiet=False, rss_kib=1_024) == "TSTP"
            assert presence.beat((), quiet=True, rss_kib=1_024) is None
            assert [each.facts["quiet"] for each in broker.operations.processes()] == [True]
            presence.prune()
            assert [each.identity for each in broker.operations.processes()] == [identity], "it lives"
            presence.leave()
            assert broker.operations.processes() == []
