"""Brokers that each break one promise of ``asynctask.brokers.base``, and which test of the suite says so."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from support.broken_base import Whole

from asynctask.brokers.base import Copy, Key, SetEntry

FAR = 1_000
"""So many, where all are meant."""


# -- the way of a job


class RewritesPayloads(Whole):
    """Keeps what a payload means and not its bytes."""

    caught_by = "what_is_pushed_is_fetched_byte_for_byte"

    def push(self, copies: Sequence[Copy]) -> None:
        super().push([replace(copy, payload=json.dumps(json.loads(copy.payload), sort_keys=True)) for copy in copies])


class CutsLongPayloads(Whole):
    """As a column that is too short does."""

    caught_by = "payloads_of_any_text_and_size_come_back_byte_for_byte"

    def exchange(self, process: str, done: Sequence[Copy], queues: Sequence[str], limit: int) -> list[Copy]:
        return [replace(copy, payload=copy.payload[:65_535]) for copy in super().exchange(process, done, queues, limit)]


class TakesNamesForAlike(Whole):
    """As a collation does that folds letters."""

    caught_by = "names_are_told_apart_by_every_byte"

    def push(self, copies: Sequence[Copy]) -> None:
        super().push([replace(copy, queue=copy.queue.lower()) for copy in copies])


class FetchesOneAtLeast(Whole):
    caught_by = "an_empty_push_and_a_fetch_of_nothing_do_nothing"

    def exchange(self, process: str, done: Sequence[Copy], queues: Sequence[str], limit: int) -> list[Copy]:
        return super().exchange(process, done, queues, max(1, limit))


class LastInFirstOut(Whole):
    caught_by = "a_queue_is_first_in_first_out"

    def exchange(self, process: str, done: Sequence[Copy], queues: Sequence[str], limit: int) -> list[Copy]:
        return super().exchange(process, done, queues, limit)[::-1]


class SortsByPriority(Whole):
    """Other programs take jobs in the order of a queue, and expect theirs in it."""

    caught_by = "a_queue_has_no_priorities"

    def push(self, copies: Sequence[Copy]) -> None:
        super().push(sorted(copies, key=lambda copy: copy.priority))


class SortsQueues(Whole):
    """Tries queues in an order of its own."""

    caught_by = "queues_are_tried_in_the_order_given"

    def exchange(self, process: str, done: Sequence[Copy], queues: Sequence[str], limit: int) -> list[Copy]:
        return super().exchange(process, done, sorted(queues, reverse=True), limit)


class PushesTwice(Whole):
    """Makes a new copy of what it holds already, under a name of its own."""

    caught_by = "a_copy_is_held_once_however_often_it_is_pushed"

    def push(self, copies: Sequence[Copy]) -> None:
        held = self.holds([copy.key for copy in copies])
        super().push(copies)
        super().push([replace(copy, attempt=copy.attempt + FAR) for copy in copies if copy.key in held])


class RemembersForEver(Whole):
    """Takes what it once held for what it holds."""

    caught_by = "a_copy_that_was_acknowledged_may_be_pushed_again"

    def push(self, copies: Sequence[Copy]) -> None:
        seen: set[Key] = self.__dict__.setdefault("seen", set())
        super().push([copy for copy in copies if copy.key not in seen])
        seen.update(copy.key for copy in copies)


class AcknowledgesEarly(Whole):
    """Forgets a copy as soon as it is fetched."""

    caught_by = "a_fetched_copy_is_in_its_process_list_until_it_is_acknowledged"

    def exchange(self, process: str, done: Sequence[Copy], queues: Sequence[str], limit: int) -> list[Copy]:
        fetched = super().exchange(process, done, queues, limit)
        self.drop(process, fetched)
        return fetched


class NeverAcknowledges(Whole):
    caught_by = "a_fetched_copy_is_in_its_process_list_until_it_is_acknowledged"

    def exchange(self, process: str, done: Sequence[Copy], queues: Sequence[str], limit: int) -> list[Copy]:
        return super().exchange(process, [], queues, limit)


class AcknowledgesForAnybody(Whole):
    """Does not ask in whose list a copy is."""

    caught_by = "acknowledging_what_is_not_in_the_list_does_nothing"

    def exchange(self, process: str, done: Sequence[Copy], queues: Sequence[str], limit: int) -> list[Copy]:
        for holder in self.holders():
            super().exchange(holder, done, [], 0)
        return super().exchange(process, [], queues, limit)


class PutsBackLast(Whole):
    caught_by = "what_is_put_back_comes_first_again_unchanged"

    def put_back(self, process: str, copies: Sequence[Copy]) -> None:
        self.drop(process, copies)
        self.push(copies)


class PutsBackForAnybody(Whole):
    caught_by = "a_copy_of_another_process_cannot_be_put_back"

    def put_back(self, process: str, copies: Sequence[Copy]) -> None:
        for holder in self.holders():
            super().put_back(holder, copies)


class ForgetsDeaths(Whole):
    caught_by = "a_copy_is_put_back_with_the_deaths_that_were_counted"

    def put_back(self, process: str, copies: Sequence[Copy]) -> None:
        super().put_back(process, [replace(copy, deaths=0) for copy in copies])


class DefersFirst(Whole):
    """Puts what this process cannot perform before it again."""

    caught_by = "what_is_deferred_is_passed_and_left_as_it_was_to_a_process_that_knows_it"

    def defer(self, process: str, copies: Sequence[Copy], known: Collection[str]) -> None:
        self.put_back(process, copies)


class CountsWhatIsDeferred(Whole):
    """Jobs of others keep ours in the ledger."""

    caught_by = "what_is_deferred_is_passed_and_left_as_it_was_to_a_process_that_knows_it"

    def waiting(self, queues: Collection[str]) -> Mapping[str, Mapping[int, int]]:
        return {queue: {0: count} for queue, count in self.queues().items() if queue in queues}


class DeferLoses(Whole):
    caught_by = "what_is_deferred_is_passed_and_left_as_it_was_to_a_process_that_knows_it"

    def defer(self, process: str, copies: Sequence[Copy], known: Collection[str]) -> None:
        self.drop(process, copies)


class DefersForAnybody(Whole):
    """Puts into the queue what it is given, in whose list or in none it may be."""

    caught_by = "a_copy_of_another_process_or_an_acknowledged_one_cannot_be_deferred"

    def defer(self, process: str, copies: Sequence[Copy], known: Collection[str]) -> None:
        for holder in self.holders():
            self.drop(holder, copies)
        self.push(copies)


class WithdrawsWhatIsFetched(Whole):
    """Takes what is being performed too."""

    caught_by = "withdrawing_takes_what_waits_of_a_task_and_leaves_what_is_fetched_and_other_tasks"

    def withdraw(self, task_id: int, limit: int) -> list[Key]:
        taken = list(super().withdraw(task_id, limit))
        for process in self.holders():
            mine = [copy for copy in self.held_by(process) if copy.task_id == task_id]
            self.drop(process, mine)
            taken += [copy.key for copy in mine]
        return taken


class WithdrawsWithoutEnd(Whole):
    """Takes more than it is asked for."""

    caught_by = "withdrawing_takes_what_waits_of_a_task_and_leaves_what_is_fetched_and_other_tasks"

    def withdraw(self, task_id: int, limit: int) -> list[Key]:
        return super().withdraw(task_id, FAR)


class WithdrawsWithoutAWord(Whole):
    """Does not tell of the last copy that it took."""

    caught_by = "a_copy_is_either_withdrawn_or_fetched"

    def withdraw(self, task_id: int, limit: int) -> list[Key]:
        return super().withdraw(task_id, limit)[:-1]


# -- what is where


class SaysYes(Whole):
    """Claims to hold whatever it is asked for."""

    caught_by = "it_says_honestly_which_copies_it_holds"

    def holds(self, keys: Collection[Key]) -> set[Key]:
        return set(keys)


class SaysYesToAnyAttempt(Whole):
    """Knows a copy by its jid alone."""

    caught_by = "it_says_honestly_which_copies_it_holds"

    def holds(self, keys: Collection[Key]) -> set[Key]:
        found = super().holds([(jid, attempt) for jid, _ in keys for attempt in range(5)])
        return {key for key in keys if key[0] in {jid for jid, _ in found}}


class ForgetsWhatIsFetched(Whole):
    """Says no to what is in a process's list."""

    caught_by = "it_says_honestly_which_copies_it_holds"

    def holds(self, keys: Collection[Key]) -> set[Key]:
        return super().holds(keys) - {copy.key for process in self.holders() for copy in self.held_by(process)}


class HoldsWhatLiesInASet(Whole):
    caught_by = "a_copy_goes_from_a_list_into_a_set_in_one_step"

    def holds(self, keys: Collection[Key]) -> set[Key]:
        lies = {held.copy.key for name in ("retry", "schedule", "dead") for held in self.members(name, FAR)}
        return super().holds(keys) | (lies & set(keys))


class HoldsWhatItGaveUp(Whole):
    """Believes that what it was once given is there until it was acknowledged."""

    caught_by = "killed_while_it_withdraws_the_broker_still_knows_what_it_holds"

    def push(self, copies: Sequence[Copy]) -> None:
        self.__dict__.setdefault("pushed", set()).update(copy.key for copy in copies)
        super().push(copies)

    def holds(self, keys: Collection[Key]) -> set[Key]:
        return super().holds(keys) | set(self.__dict__.get("pushed", ())) & set(keys)


class CountsWhatIsFetched(Whole):
    caught_by = "it_counts_what_waits_in_each_queue"

    def waiting(self, queues: Collection[str]) -> Mapping[str, Mapping[int, int]]:
        counts = {name: dict(found) for name, found in super().waiting(queues).items()}
        for process in self.holders():
            for copy in self.held_by(process):
                if copy.queue in queues:
                    found = counts.setdefault(copy.queue, {})
                    found[copy.priority] = found.get(copy.priority, 0) + 1
        return counts


class ListsEmptyQueues(Whole):
    caught_by = "it_counts_what_waits_in_each_queue"

    def push(self, copies: Sequence[Copy]) -> None:
        self.__dict__.setdefault("names", set()).update(copy.queue for copy in copies)
        super().push(copies)

    def queues(self) -> Mapping[str, int]:
        return {**dict.fromkeys(self.__dict__["names"], 0), **super().queues()}


class CountsOneOfEach(Whole):
    """Counts the priorities instead of the copies."""

    caught_by = "it_counts_what_waits_at_any_priority"

    def waiting(self, queues: Collection[str]) -> Mapping[str, Mapping[int, int]]:
        return {name: dict.fromkeys(found, 1) for name, found in super().waiting(queues).items()}


class DropsForAnybody(Whole):
    caught_by = "dropping_takes_copies_out_of_a_list_for_good"

    def drop(self, process: str, copies: Sequence[Copy]) -> None:
        for holder in self.holders():
            super().drop(holder, copies)


class KeepsHolders(Whole):
    """Names a process although nothing is in its list any more."""

    caught_by = "a_fetched_copy_is_in_its_process_list_until_it_is_acknowledged"

    def exchange(self, process: str, done: Sequence[Copy], queues: Sequence[str], limit: int) -> list[Copy]:
        self.__dict__.setdefault("ever", set()).add(process)
        return super().exchange(process, done, queues, limit)

    def holders(self) -> set[str]:
        return super().holders() | set(self.__dict__.get("ever", ()))


# -- sets


class ReleasesBeforeTime(Whole):
    caught_by = "a_set_gives_up_what_is_due_and_keeps_the_rest"

    def release_due(self, set_name: str, now: int, limit: int) -> int:
        return super().release_due(set_name, now + FAR, limit)


class ReleasesToTheHead(Whole):
    caught_by = "what_was_in_a_set_comes_to_the_end_of_its_queue"

    def release_due(self, set_name: str, now: int, limit: int) -> int:
        queues = {held.copy.queue for held in self.members(set_name, FAR)}
        before = self.exchange("me", [], sorted(queues), FAR)
        found = super().release_due(set_name, now, limit)
        self.drop("me", before)
        self.push(before)
        return found


class ReleasesTwice(Whole):
    """Pushes what is due, and then moves it."""

    caught_by = "due_jobs_are_released_once_by_several_that_look_at_the_same_time"

    def release_due(self, set_name: str, now: int, limit: int) -> int:
        self.push([held.copy for held in self.members(set_name, limit) if held.at <= now])
        return super().release_due(set_name, now, limit)


class KeepsInTheListToo(Whole):
    """Puts a copy into a set, and leaves it in the process's list."""

    caught_by = "a_copy_goes_from_a_list_into_a_set_in_one_step"

    def hold(self, set_name: str, copies: Sequence[SetEntry], *, process: str | None = None) -> None:
        super().hold(set_name, copies)


class HoldsWhatIsGone(Whole):
    """Does not ask whether a copy is in the list still."""

    caught_by = "what_is_not_in_the_list_any_more_is_not_put_into_a_set"

    def hold(self, set_name: str, copies: Sequence[SetEntry], *, process: str | None = None) -> None:
        if process is not None:
            self.drop(process, [held.copy for held in copies])
        super().hold(set_name, copies)
