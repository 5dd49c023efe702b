"""Brokers that each break a promise where several act at the same time, or where one is killed, and which test says so."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import Any

from support.broken_base import Whole

from asynctask.brokers.base import Copy, SetEntry

# -- at the same time


class DeliversTwice(Whole):
    """Gives a copy to whoever asks next as well."""

    caught_by = "a_copy_is_fetched_by_one_process_only"

    def exchange(self, process: str, done: Sequence[Copy], queues: Sequence[str], limit: int) -> list[Copy]:
        last: list[Copy] = self.__dict__.get("last", [])
        fetched = super().exchange(process, done, queues, limit)
        self.__dict__["last"] = fetched
        return [*fetched, *last]


class PushesBackwards(Whole):
    caught_by = "pushes_at_the_same_time_make_one_copy_of_each_key_and_keep_their_own_order"

    def push(self, copies: Sequence[Copy]) -> None:
        super().push(copies[::-1])


class TakesBackFromTheLiving(Whole):
    """Two that recover the same list: the second takes it from who has fetched it since."""

    caught_by = "what_a_dead_process_held_is_given_back_once_by_two_that_recover_it"

    def put_back(self, process: str, copies: Sequence[Copy]) -> None:
        keys = {copy.key for copy in copies}
        for holder in {process, *self.holders()}:
            super().put_back(holder, [copy for copy in self.held_by(holder) if copy.key in keys])


class KeepsListsToItself(Whole):
    """Remembers what a process holds where nobody sees it once that process is dead."""

    caught_by = "what_a_dead_process_held_is_found_and_given_back_by_another"

    def exchange(self, process: str, done: Sequence[Copy], queues: Sequence[str], limit: int) -> list[Copy]:
        mine: list[Copy] = self.__dict__.setdefault(process, [])
        fetched = super().exchange(process, done, queues, limit)
        self.__dict__[process] = [*(copy for copy in mine if copy not in done), *fetched]
        self.drop(process, fetched)
        return fetched

    def held_by(self, process: str) -> list[Copy]:
        return list(self.__dict__.get(process, []))


class DeafToPushes(Whole):
    caught_by = "a_wait_ends_when_something_is_pushed"

    def __init__(self, real: Any) -> None:
        super().__init__(real)
        self._woken = threading.Event()

    def wait(self, timeout: float) -> bool:
        woken = self._woken.wait(timeout)
        self._woken.clear()
        return woken

    def wake(self) -> None:
        self._woken.set()


class WakesNobody(Whole):
    caught_by = "a_wait_ends_when_its_process_is_woken"

    def wake(self) -> None:
        pass


class AlwaysNews(Whole):
    caught_by = "a_wait_for_nothing_ends_with_its_time"

    def wait(self, timeout: float) -> bool:
        return True


# -- killed in the middle


class PushesOneByOne(Whole):
    caught_by = "killed_in_a_push_it_has_pushed_all_of_a_call_or_nothing"

    def push(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            super().push([copy])


class PopsThenNotes(Whole):
    """Takes copies from their queues, and writes down afterwards who has them."""

    caught_by = "killed_in_an_exchange_it_loses_nothing_that_was_not_acknowledged"

    def exchange(self, process: str, done: Sequence[Copy], queues: Sequence[str], limit: int) -> list[Copy]:
        popped = super().exchange(process, done, queues, limit)
        self.drop(process, popped)
        self.push(popped)
        return super().exchange(process, [], queues, len(popped))


class PutsBackThroughThinAir(Whole):
    caught_by = "killed_in_a_give_back_each_copy_is_in_the_list_or_in_its_queue"

    def put_back(self, process: str, copies: Sequence[Copy]) -> None:
        self.drop(process, copies)
        self.push(copies)


class DefersThroughThinAir(Whole):
    caught_by = "killed_while_it_defers_each_copy_is_in_the_list_or_in_its_queue"

    def defer(self, process: str, copies: Sequence[Copy], known: Collection[str]) -> None:
        self.drop(process, copies)
        self.push(copies)


class HoldsThroughThinAir(Whole):
    caught_by = "killed_while_it_puts_into_a_set_each_copy_is_in_the_list_or_in_the_set"

    def hold(self, set_name: str, copies: Sequence[SetEntry], *, process: str | None = None) -> None:
        if process is not None:
            self.drop(process, [held.copy for held in copies])
        super().hold(set_name, copies)


class PopsThenPushes(Whole):
    """Takes what is due out of the set, and pushes it then."""

    caught_by = "killed_while_it_releases_each_due_job_is_in_its_set_or_in_its_queue"

    def release_due(self, set_name: str, now: int, limit: int) -> int:
        due = [entry for entry in self.operations.entries(set_name).entries if (entry.at or 0) <= now][:limit]
        self.operations.delete(set_name, due)
        self.push([entry.copy for entry in due])
        return len(due)


class PushesThenRemoves(Whole):
    """The other way round: killed in between, it has doubled a job."""

    caught_by = "killed_while_it_releases_each_due_job_is_in_its_set_or_in_its_queue"

    def release_due(self, set_name: str, now: int, limit: int) -> int:
        due = [entry for entry in self.operations.entries(set_name).entries if (entry.at or 0) <= now][:limit]
        self.push([entry.copy for entry in due])
        self.operations.delete(set_name, due)
        return len(due)
