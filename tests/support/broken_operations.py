"""Brokers whose operations each break one promise of ``asynctask.brokers.admin``, and which test says so."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from support.broken_base import WholeOperations

from asynctask.brokers.admin import MAX_PAGE, Entry, Found, Page, QueueFacts, Removed
from asynctask.brokers.base import DEAD, About, Copy, Key, Presence, RunningJob, SetEntry

FAR = 1_000


class SaysTheAgeOfNone(WholeOperations):
    caught_by = "queues_are_listed_with_length_age_and_the_next_worker"

    def list_queues(self) -> list[QueueFacts]:
        return [replace(facts, oldest_at=None) for facts in super().list_queues()]


class ListsJobsFromOneEnd(WholeOperations):
    caught_by = "jobs_are_listed_from_either_end_page_by_page"

    def jobs(self, queue: str, *, offset: int = 0, limit: int = 100, newest: bool = False) -> Page:
        return super().jobs(queue, offset=offset, limit=limit)


class CutsPages(WholeOperations):
    """Takes a limit that cannot be for the largest that can."""

    caught_by = "a_page_that_is_too_large_or_too_far_is_refused"

    def jobs(self, queue: str, *, offset: int = 0, limit: int = 100, newest: bool = False) -> Page:
        return super().jobs(queue, offset=max(0, offset), limit=min(max(1, limit), MAX_PAGE), newest=newest)


class DeletesInWordsOnly(WholeOperations):
    caught_by = "one_job_is_deleted_and_its_neighbours_stay"

    def delete_job(self, queue: str, key: str) -> Copy | None:
        return next((each.copy for each in self.jobs(queue).entries if each.key == key), None)


class DeletesNeighbours(WholeOperations):
    """Takes the one before it along."""

    caught_by = "one_job_is_deleted_and_its_neighbours_stay"

    def delete_job(self, queue: str, key: str) -> Copy | None:
        keys = [each.key for each in self.jobs(queue).entries]
        if key in keys[1:]:
            super().delete_job(queue, keys[keys.index(key) - 1])
        return super().delete_job(queue, key)


class ClearsInWordsOnly(WholeOperations):
    caught_by = "a_queue_is_cleared_in_slices_and_says_which_tracked_jobs_it_had"

    def clear_some(self, queue: str, limit: int) -> Removed:
        copies = [each.copy for each in self.jobs(queue).entries][:limit]
        return Removed(len(copies), [copy.key for copy in copies if copy.attempt])


class ClearsAll(WholeOperations):
    """Takes more than it is asked for."""

    caught_by = "a_queue_is_cleared_in_slices_and_says_which_tracked_jobs_it_had"

    def clear_some(self, queue: str, limit: int) -> Removed:
        return super().clear_some(queue, FAR)


class ClearsWithoutAWord(WholeOperations):
    """Does not say which tracked jobs it took: nobody cancels their items."""

    caught_by = "a_queue_is_cleared_in_slices_and_says_which_tracked_jobs_it_had"

    def clear_some(self, queue: str, limit: int) -> Removed:
        return replace(super().clear_some(queue, limit), tracked=[])


class ClearsAndStillHolds(WholeOperations):
    """Believes that it holds what it cleared."""

    caught_by = "a_tool_killed_while_it_clears_a_queue_leaves_the_broker_honest"

    def holds(self, keys: Collection[Key]) -> set[Key]:
        return set(keys)


class TakesFromPausedQueues(WholeOperations):
    caught_by = "nothing_is_taken_from_a_paused_queue"

    def exchange(self, process: str, done: Sequence[Copy], queues: Sequence[str], limit: int) -> list[Copy]:
        paused = [queue for queue in queues if self.unpause(queue)]
        fetched = super().exchange(process, done, queues, limit)
        for queue in paused:
            self.pause(queue)
        return fetched


class KnowsNoPause(WholeOperations):
    """Gives nothing of a paused queue, but says that none is paused: what a process has fetched begins there."""

    caught_by = "nothing_is_taken_from_a_paused_queue"

    def paused(self, queues: Collection[str]) -> set[str]:
        return set()


class PausesNothing(WholeOperations):
    """Says that it cannot, by doing nothing."""

    caught_by = "nothing_is_taken_from_a_paused_queue"

    def pause(self, queue: str) -> bool:
        return True


class ListsSetsBackwards(WholeOperations):
    caught_by = "a_set_is_listed_from_either_end_page_by_page"

    def entries(self, set_name: str, *, offset: int = 0, limit: int = 100, newest: bool = False) -> Page:
        return super().entries(set_name, offset=offset, limit=limit, newest=not newest)


class FindsTheFirstOfATime(WholeOperations):
    """Looks for a member by its time alone."""

    caught_by = "a_member_is_found_by_its_key"

    def entry(self, set_name: str, key: str) -> Entry | None:
        found = super().entry(set_name, key)
        alike = [each for each in self.entries(set_name).entries if found is not None and each.at == found.at]
        return alike[0] if alike else found


class SearchesRoughly(WholeOperations):
    """Takes large letters for small ones."""

    caught_by = "a_set_is_searched_to_the_letter"

    def find(self, set_name: str, text: str, *, limit: int = 100) -> Found:
        found = super().find(set_name, text, limit=limit)
        alike = [each for each in self.entries(set_name).entries if text.lower() in each.raw.lower()]
        return replace(found, entries=alike[:limit])


class SearchesInWordsOnly(WholeOperations):
    """Says that it looked through all of a set when it stopped."""

    caught_by = "a_set_is_searched_to_the_letter"

    def find(self, set_name: str, text: str, *, limit: int = 100) -> Found:
        return replace(super().find(set_name, text, limit=limit), complete=True)


class RestartsAndKeeps(WholeOperations):
    """Pushes a job, and leaves it in its set."""

    caught_by = "a_member_is_restarted_once_and_its_neighbours_of_the_same_time_stay"

    def restart(self, set_name: str, entries: Sequence[Entry]) -> int:
        self.push([each.copy for each in entries])
        return len(entries)


class RestartsCostARetry(WholeOperations):
    caught_by = "an_explicit_restart_costs_no_retry_and_keeps_every_other_member"

    def restart(self, set_name: str, entries: Sequence[Entry]) -> int:
        count = self.delete(set_name, entries)
        now = {"enqueued_at": 1_700_000_000.5}
        self.push([replace(each.copy, payload=json.dumps({**json.loads(each.copy.payload), **now})) for each in entries])
        return count


class RestartsWhatIsAJobOnly(WholeOperations):
    """Does a part of what it refuses."""

    caught_by = "what_is_no_job_is_listed_and_deleted_and_never_restarted"

    def restart(self, set_name: str, entries: Sequence[Entry]) -> int:
        super().restart(set_name, [each for each in entries if each.sound])
        return super().restart(set_name, [each for each in entries if not each.sound])


class KillsForGood(WholeOperations):
    """Deletes what should lie among the dead."""

    caught_by = "members_are_killed_as_they_are"

    def kill(self, set_name: str, entries: Sequence[Entry]) -> int:
        return super().delete(set_name, entries) if set_name != DEAD else super().kill(set_name, entries)


class DeletesByTime(WholeOperations):
    """Takes along whatever lies under the same time."""

    caught_by = "members_are_deleted_and_a_set_is_cleared"

    def delete(self, set_name: str, entries: Sequence[Entry]) -> int:
        times = {each.at for each in entries}
        return super().delete(set_name, [each for each in self.entries(set_name).entries if each.at in times])


class DeletesWhereverItIs(WholeOperations):
    """Says that it deleted what was in another set."""

    caught_by = "members_are_deleted_and_a_set_is_cleared"

    def delete(self, set_name: str, entries: Sequence[Entry]) -> int:
        return super().delete(set_name, entries) or len(entries)


class ClearsSetsInWordsOnly(WholeOperations):
    caught_by = "members_are_deleted_and_a_set_is_cleared"

    def clear(self, set_name: str) -> int:
        return self.entries(set_name).total


class CountsWhatOthersDid(WholeOperations):
    """Says that it acted on every member that it was given."""

    caught_by = "of_several_that_act_on_one_member_one_does"

    def kill(self, set_name: str, entries: Sequence[Entry]) -> int:
        super().kill(set_name, entries)
        return len(entries)

    def restart(self, set_name: str, entries: Sequence[Entry]) -> int:
        super().restart(set_name, entries)
        return len(entries)


class SignalsAnybody(WholeOperations):
    caught_by = "a_process_that_is_not_known_takes_no_signal"

    def signal(self, identity: str, name: str) -> bool:
        super().signal(identity, name)
        return True


class SignalsInWordsOnly(WholeOperations):
    caught_by = "a_process_that_shows_itself_is_listed_and_takes_each_signal_once"

    def signal(self, identity: str, name: str) -> bool:
        return any(each["identity"] == identity for each in self.processes())


class Shown:
    """How a process is seen, handed on to the real one, to be broken at one place."""

    def __init__(self, real: Presence) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class NeverLeaves(WholeOperations):
    """Shows a process that has left."""

    caught_by = "a_process_that_shows_itself_is_listed_and_takes_each_signal_once"

    class Seen(Shown):
        def leave(self) -> None:
            pass

    def presence(self, about: About) -> Any:
        found = super().presence(about)
        return found and self.Seen(found)


class RepeatsSignals(NeverLeaves):
    """Gives a signal that was left once to each beat."""

    caught_by = "a_process_that_shows_itself_is_listed_and_takes_each_signal_once"

    class Seen(Shown):
        last: str | None = None

        def beat(self, running: Sequence[RunningJob], *, quiet: bool, rss_kib: int) -> str | None:
            self.last = self.real.beat(running, quiet=quiet, rss_kib=rss_kib) or self.last
            return self.last


class PrunesTheLiving(NeverLeaves):
    caught_by = "a_process_that_shows_itself_is_listed_and_takes_each_signal_once"

    class Seen(Shown):
        def prune(self) -> None:
            self.real.leave()


# -- killed in the middle


class RestartsThroughThinAir(WholeOperations):
    caught_by = "a_tool_killed_while_it_restarts_leaves_each_in_its_set_or_in_its_queue"

    def restart(self, set_name: str, entries: Sequence[Entry]) -> int:
        count = self.delete(set_name, entries)
        self.push([each.copy for each in entries])
        return count


class KillsThroughThinAir(WholeOperations):
    caught_by = "a_tool_killed_while_it_kills_leaves_each_in_its_set_or_among_the_dead"

    def kill(self, set_name: str, entries: Sequence[Entry]) -> int:
        count = self.delete(set_name, entries)
        self.hold(DEAD, [SetEntry(each.copy, FAR) for each in entries])
        return count
