"""Tracked jobs of workers that this process does not know: another may, as while a new version is rolled out. They wait."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from asynctask.brokers.base import Broker, Copy
from asynctask.clock import SECOND, Clock
from asynctask.logs import get_logger
from asynctask.messages import clean
from asynctask.middleware.tracker import Tracker
from asynctask.runtime.execution import Assignment
from asynctask.worker import Worker

__all__ = ["FIRST_REST_S", "LONGEST_REST_S", "Missing", "Stranger", "Strangers", "why_not_ours"]

MISSING_S = 5
"""Such a job is offered again after so many seconds, to whoever takes it then."""


class Missing:
    """Puts such jobs off in the ledger. No retry is spent on it.

    Those that nobody tracks are left to others before, see :mod:`asynctask.runtime.deferral`. A job that was put into a
    queue by hand to be tracked is not taken: nobody ever checked its name, and it ends in error.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._log = get_logger("asynctask.missing")

    @staticmethod
    def takes(assignment: Assignment) -> bool:
        """Whether this one is to be put off."""
        return assignment.worker is None and assignment.copy.attempt > 0

    def put_off(self, jobs: Sequence[Assignment], done: Callable[[Assignment], None]) -> None:
        """Has them wait; ``done`` is told of each, to acknowledge it. Raises Unavailable."""
        until = self._tracker.now() + MISSING_S * SECOND
        names = sorted({job.name[:100] for job in jobs})
        self._log.warning("worker_missing", workers=names[:10], count=len(jobs))
        self._tracker.put_off([(job.ticket, _why(job)) for job in jobs if job.ticket is not None], until)
        for job in jobs:
            done(job)


def _why(job: Assignment) -> str:
    name = job.name[:200]
    return f"Waiting for a worker: no process that took it knows {name!r}. Start one that registers it"


# -- Jobs in a shared queue that are others' to perform: they are left to them.
#
# A queue may be worked by Ruby processes and by ours, by processes of another version, by workers with other middleware.
# What cannot be performed here goes to where its queue is fetched last, so that ours behind it come up. A queue that gave
# nothing else from end to end rests for a while: its jobs would only be passed from hand to hand.

FIRST_REST_S: Final = 1.0
"""Seconds for which a queue is left out that gave only jobs of others; twice as long each time that it does so again."""

LONGEST_REST_S: Final = 30.0
"""Seconds, at most."""

LONGEST_PASS: Final = 1_000
"""Jobs of others that are passed over at a stretch, in a queue that is longer."""

MAX_REPORTS: Final = 1_000
"""Pairs of a class and a queue that are reported and remembered: names come from outside."""


@dataclass(frozen=True, slots=True)
class Stranger:
    """A fetched copy that is not for this process: of the class ``name``, and ``why`` it is not."""

    copy: Copy
    name: str
    why: str


def why_not_ours(payload: Mapping[str, Any], worker: Worker | None) -> str | None:
    """Why an untracked job is left to others; None for one that this process performs.

    A job of a batch would leave that batch open for ever, and an encrypted one has nothing that could be read. A job that
    asks by itself to be tracked is taken though nobody knows its worker: its Event says so.
    """
    if _is_set(payload.get("bid")):
        return "it belongs to a batch of Sidekiq Pro (bid)"
    if _is_set(payload.get("encrypt")):
        return "its arguments are encrypted by Sidekiq Enterprise (encrypt)"
    if worker is None and payload.get("use_task_event") is not True:
        return "no worker of this name is registered here"
    return None


def _is_set(value: Any) -> bool:
    return value is not None and value is not False  # as Ruby asks


class Strangers:
    """Defers such jobs, and says which queues to fetch from meanwhile. For the fetching thread alone."""

    def __init__(self, identity: str, broker: Broker, clock: Clock) -> None:
        self._identity = identity
        self._broker = broker
        self._clock = clock
        self._rests: dict[str, float] = {}  # queue -> how long its next rest is
        self._until: dict[str, float] = {}  # queue -> when it is fetched from again
        self._passes: dict[str, tuple[str, int]] = {}  # queue -> jid of the first that was passed over, and how many were
        self._reported: set[tuple[str, str]] = set()
        self._log = get_logger("asynctask.strangers")

    def order(self, queues: Sequence[str]) -> Sequence[str]:
        """Those of the queues that are fetched from now, in their order."""
        if not self._until:
            return queues
        now = self._clock.monotonic()
        self._until = {queue: until for queue, until in self._until.items() if until > now}
        return [queue for queue in queues if queue not in self._until]

    def patience(self, seconds: float) -> float:
        """How long to wait for news: ``seconds``, or until a queue is fetched from again."""
        if not self._until:
            return seconds
        return max(0.0, min(seconds, min(self._until.values()) - self._clock.monotonic()))

    def defer(self, strangers: Sequence[Stranger]) -> None:
        """Leaves these to others. Raises BrokerUnavailable."""
        if strangers:
            self._broker.defer(self._identity, [each.copy for each in strangers])
            for each in strangers:
                self._report(each)

    def gave(self, ours: Collection[str], strangers: Sequence[Stranger]) -> None:
        """Takes note of the queues of one fetch that gave jobs of ours, and of the jobs of others that it brought."""
        for queue in ours:
            self._rests.pop(queue, None)
            self._passes.pop(queue, None)
        for copy in (each.copy for each in strangers if each.copy.queue not in ours):
            first, passed = self._passes.get(copy.queue, (copy.jid, 0))
            if (passed and copy.jid == first) or passed >= LONGEST_PASS:
                self._rest(copy.queue)
            elif copy.queue not in self._until:
                self._passes[copy.queue] = first, passed + 1

    def _rest(self, queue: str) -> None:
        seconds = self._rests.get(queue, FIRST_REST_S)
        self._until[queue] = self._clock.monotonic() + seconds
        self._rests[queue] = min(2 * seconds, LONGEST_REST_S)
        del self._passes[queue]

    def _report(self, stranger: Stranger) -> None:
        name, queue = stranger.name[:200], stranger.copy.queue
        if (name, queue) in self._reported or len(self._reported) >= MAX_REPORTS:
            return
        self._reported.add((name, queue))
        self._log.warning("job_left_to_others", worker=clean(name), queue=clean(queue), why=stranger.why)
