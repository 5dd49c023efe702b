"""The broker as the parts above it know it: what Redis holds, in Sidekiq's format, for programs that have a ``broker_url``.

These are untracked jobs, what other programs push, and jobs of Tasks for workers in other languages. A program without
Redis has no broker: its ledger is its queue. :class:`asynctask.sidekiq.broker.RedisBroker` is the one implementation; this
module needs no redis-py. The ledger can refill a broker with tracked jobs, so it may lose them. It guarantees

* **one copy**: it holds at most one copy of each (jid, attempt) of a tracked job; pushing it again does nothing;
* **atomic moves**: a fetch moves a copy from its queue into the fetching process's list in one step; it stays there until
  it is acknowledged, put back or recovered;
* **order**: within a queue in the order of pushing, whatever the priorities; queues in the order given. Processes that
  fetch concurrently may take copies slightly out of order;
* **a truthful** :meth:`Broker.holds`, for copies that wait or are in a process's list.

Attempt 0 is an untracked job: its jid alone identifies it, and its retries live in the broker's own sets.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from asynctask.errors import InputError, Problem, TooLarge
from asynctask.job import JobTask
from asynctask.sidekiq.activejob import worker_name

if TYPE_CHECKING:
    from asynctask.brokers.admin import BrokerOperations

SCHEDULE = "schedule"
RETRY = "retry"
DEAD = "dead"

INT: Final = 2**31 - 1
BIGINT: Final = 2**63 - 1
"""The largest integers that a database stores of a copy: attempt and priority; the id of a Task."""

MAX_PAYLOAD_BYTES: Final = 4_194_304
"""Largest payload of a job, in bytes; store larger data elsewhere and pass its location. Escaped, it fits one packet of
MariaDB (16 MB)."""

Key = tuple[str, int]
"""(jid, attempt): identifies a copy."""


@dataclass(slots=True)
class Copy:
    """One copy of a job in transit.

    ``payload``: the job as JSON text, kept byte for byte; ``attempt``: the fence (0: untracked); ``handle``: the broker's
    reference to a fetched copy; ``job``: the parsed payload, if the broker had to parse it; ``task``: the Task of a job
    that comes from the ledger.
    """

    jid: str
    attempt: int
    queue: str
    payload: str
    priority: int = 0
    task_id: int | None = None
    deaths: int = 0
    handle: Any = None
    job: Any = field(default=None, compare=False, repr=False)
    task: JobTask | None = field(default=None, compare=False, repr=False)

    @property
    def key(self) -> Key:
        """Identifies the copy within the broker."""
        return self.jid, self.attempt


@dataclass(frozen=True, slots=True)
class SetEntry:
    """An entry of a set; ``at``: when it is due (or died), in microseconds."""

    copy: Copy
    at: int


class Broker(Protocol):
    """A broker. Every method may raise :class:`~asynctask.errors.BrokerUnavailable`."""

    # -- jobs in transit

    def push(self, copies: Sequence[Copy]) -> None:
        """Appends copies to their queues, all or none of one call; skips those it holds already."""
        ...

    def exchange(self, process: str, done: Sequence[Copy], queues: Sequence[str], limit: int) -> list[Copy]:
        """Acknowledges ``done`` and fetches up to ``limit`` copies into the process's list, in one round trip.

        ``queues`` are tried in the order given. Acknowledging a copy that is not in the list does nothing.
        """
        ...

    def put_back(self, process: str, copies: Sequence[Copy]) -> None:
        """Returns unfinished copies to the head of their queues, with their current ``deaths``."""
        ...

    def defer(self, process: str, copies: Sequence[Copy], known: Collection[str]) -> None:
        """Leaves untracked copies that this process cannot perform in their queues, unchanged, to others.

        From the process's list to the queue in one step, in the order given; skips copies that are not in the list. They
        hold up nothing: :meth:`waiting` does not count them, and :meth:`exchange` passes them in this process, as it may
        all untracked jobs of their queue but those of the workers ``known``.
        """
        ...

    def withdraw(self, task_id: int, limit: int) -> list[Key]:
        """Removes up to ``limit`` waiting copies of a Task from their queues, not from processes' lists; returns them."""
        ...

    # -- queries

    def holds(self, keys: Collection[Key]) -> set[Key]:
        """Which of these copies wait or are in a process's list; entries of the sets do not count."""
        ...

    def waiting(self, queues: Collection[str]) -> Mapping[str, Mapping[int, int]]:
        """The number of waiting copies: queue -> priority -> count, without empty queues, and without what is left to
        others (:meth:`defer`).

        A queue has no priorities: all count under 0.
        """
        ...

    def queues(self) -> Mapping[str, int]:
        """The number of waiting copies of each non-empty queue."""
        ...

    # -- processes

    def held_by(self, process: str) -> list[Copy]:
        """The copies in a process's list."""
        ...

    def holders(self) -> set[str]:
        """Processes with a non-empty list."""
        ...

    def drop(self, process: str, copies: Sequence[Copy]) -> None:
        """Removes copies from a process's list: acknowledges without fetching."""
        ...

    def forget(self, keys: Collection[Key]) -> None:
        """Stops holding these copies: a program without a list of its own took them from their queue."""
        ...

    def presence(self, about: About) -> Presence:
        """Shows a worker process to this broker's tools."""
        ...

    # -- the sets of untracked jobs

    def hold(self, set_name: str, copies: Sequence[SetEntry], *, process: str | None = None) -> None:
        """Puts copies into ``schedule``, ``retry`` or ``dead``; with ``process``, moves in one step those that are still in
        its list."""
        ...

    def release_due(self, set_name: str, now: int, limit: int) -> int:
        """Moves due members of a set to the ends of their queues.

        Atomically, and each once even if processes compete. Returns the number found; 0 also if others hold the rest.
        """
        ...

    def members(self, set_name: str, limit: int) -> list[SetEntry]:
        """Members of a set, by ``at``."""
        ...

    # -- operations

    @property
    def operations(self) -> BrokerOperations:
        """Inspection and cleanup of queues and sets."""
        ...

    # -- waiting

    def wait(self, timeout: float) -> bool:
        """Waits until any process may have pushed something, at most ``timeout`` seconds; returns False on timeout."""
        ...

    def wake(self) -> None:
        """Ends every :meth:`wait` of this process."""
        ...

    def close(self) -> None:
        """Releases the connections."""
        ...


# -- presence: how broker tools such as Sidekiq's see a worker process; the ledger does not depend on it


@dataclass(frozen=True, slots=True)
class About:
    """The constant description of a process.

    ``identity``: as in the ledger, HOST:PID:NONCE; ``started_at``: microseconds; ``weights``: its queues with their
    weights; ``strict``: queues are taken in that order; ``tag``: names the application.
    """

    identity: str
    hostname: str
    pid: int
    started_at: int
    concurrency: int
    weights: Mapping[str, int]
    strict: bool = False
    version: str = ""
    tag: str = ""


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job in progress; ``began_at`` in microseconds."""

    thread: str
    name: str
    jid: str
    queue: str
    payload: str
    began_at: int


class Presence(Protocol):
    """One process as shown. All methods but :meth:`ended` may raise :class:`~asynctask.errors.BrokerUnavailable`."""

    def ended(self, name: str, seconds: float, failed: bool) -> None:
        """Counts an ended job of the worker ``name``. Called for each job, so it only counts in memory."""
        ...

    def beat(self, running: Sequence[RunningJob], *, quiet: bool, rss_kib: int) -> str | None:
        """Shows the running jobs and sends the counts. Returns a signal left for it (``TSTP``, ``TERM``, ``TTIN``), if any.

        Counts that could not be sent go with a later beat.
        """
        ...

    def leave(self) -> None:
        """Sends the last counts and removes the process."""
        ...

    def processes(self) -> int:
        """The number of visible processes, of any language."""
        ...

    def prune(self) -> None:
        """Removes visible processes that are dead; one process at a time does it."""
        ...


def why_left(job: Mapping[str, Any], known: Container[str]) -> str | None:
    """Why the untracked job of a payload is left to others than a process with the workers ``known``; None for one that it
    performs.

    A job of a batch would leave that batch open for ever, and an encrypted one cannot be read. A job that asks to be
    tracked is taken though nobody knows its worker: its Event says so. ``sidekiq/exchange.lua`` decides the same.
    """
    if _is_set(job.get("bid")):
        return "it belongs to a batch of Sidekiq Pro (bid)"
    if _is_set(job.get("encrypt")):
        return "its arguments are encrypted by Sidekiq Enterprise (encrypt)"
    if worker_name(job) not in known and job.get("use_task_event") is not True:
        return "no worker of this name is registered here"
    return None


def _is_set(value: Any) -> bool:
    return value is not None and value is not False  # truth as in Ruby


def refuse_unstorable(copy: Copy, problems: Sequence[Problem]) -> None:
    """Raises :class:`InputError` for the problems of a copy, :class:`TooLarge` for a payload over the limit."""
    if problems:
        messages = "; ".join(problem.message for problem in problems)
        raise InputError(f"this job cannot be put on a queue: {messages}", code="bad_job", errors=list(problems))
    # Four bytes at most for a character: nearly every payload is known to be short enough without being encoded.
    if len(copy.payload) * 4 > MAX_PAYLOAD_BYTES and len(copy.payload.encode()) > MAX_PAYLOAD_BYTES:
        raise TooLarge(
            f"the job's payload has {len(copy.payload.encode()):,} bytes, the most is {MAX_PAYLOAD_BYTES:,}: put the data"
            " somewhere and hand over where it is"
        )
