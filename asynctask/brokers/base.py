"""The contract of a broker: where jobs wait between the dispatcher and a worker.

A broker is disposable for tracked jobs: the ledger can fill it again. It promises

* **one copy**: it holds at most one copy of the same (jid, attempt); pushing it again does nothing;
* **no thin air**: a fetched copy leaves its queue into the fetching process's own list in the same step, and stays there
  until it is acknowledged, put back or taken by recovery;
* **order**: within a queue smaller priorities come first, then the order of pushing; queues are tried in the order given.
  Of copies of one priority, processes that fetch at the same time may take some a little before earlier ones;
* **an honest answer** to "do you hold this copy?", waiting or in a process's list.

Attempt 0 is a job that nobody tracks: its jid alone is its identity, and its retries live in the broker's own sets.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from asynctask.brokers.admin import Operations

__all__ = ["DEAD", "RETRY", "SCHEDULE", "About", "Broker", "Capabilities", "Copy", "Held", "Key", "Presence", "Running"]

SCHEDULE = "schedule"
RETRY = "retry"
DEAD = "dead"

Key = tuple[str, int]
"""(jid, attempt): what a broker knows a copy by."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What brokers may differ in; a test asks here and never for a class.

    ``priority``: orders within a queue by priority. ``blocking``: a fetch can wait at the server. ``survives_restart``:
    what it holds is still there after its server died. ``polled``: each worker process looks for what is due in its sets,
    at intervals that they share; where not, whoever has the duty of the upkeep does. ``pauses``: a queue can be paused.
    ``in_ledger``: what it holds lies in the ledger's database, where one query sees both.
    """

    priority: bool
    blocking: bool
    survives_restart: bool
    polled: bool = False
    pauses: bool = False
    in_ledger: bool = False


@dataclass(slots=True)
class Copy:
    """One copy of a job on its way.

    ``payload`` is the job as JSON text, kept byte for byte; ``attempt`` is the fence (0: untracked); ``handle`` is the
    broker's own mark of a fetched copy; ``job`` is the payload parsed, where the broker has had to read it.
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

    @property
    def key(self) -> Key:
        """What the broker knows it by."""
        return self.jid, self.attempt


@dataclass(frozen=True, slots=True)
class Held:
    """An entry of one of the sets: ``at`` is when it is due (or died), in microseconds."""

    copy: Copy
    at: int


class Broker(Protocol):
    """Where jobs wait. Every method may raise :class:`~asynctask.errors.BrokerUnavailable`."""

    capabilities: Capabilities

    # -- the way of a job

    def push(self, copies: Sequence[Copy]) -> None:
        """Puts copies at the end of their queues, all or none of one call; those held already are left as they are."""
        ...

    def exchange(self, process: str, done: Sequence[Copy], queues: Sequence[str], limit: int) -> list[Copy]:
        """Acknowledges ``done`` and fetches up to ``limit`` copies into the process's list, in one round trip.

        ``queues`` are tried in the order given. Acknowledging a copy that is not in the list any more does nothing.
        """
        ...

    def put_back(self, process: str, copies: Sequence[Copy]) -> None:
        """Unfinished copies return to the head of their queues (of their priority), with the ``deaths`` they carry now."""
        ...

    def defer(self, process: str, copies: Sequence[Copy]) -> None:
        """Copies that this process cannot perform, but another may, go to where their queue is fetched last, unchanged.

        Out of the process's list and into the queue in one step, in the order given; one that is not in the list any more
        is left where it is.
        """
        ...

    def withdraw(self, task_id: int, limit: int) -> list[Key]:
        """Takes up to ``limit`` waiting copies of a Task out of their queues; those in a process's list stay there."""
        ...

    # -- what is where

    def holds(self, keys: Collection[Key]) -> set[Key]:
        """Which of these copies are held, waiting or in a process's list; what lies in a set is not on its way."""
        ...

    def waiting(self, queues: Collection[str]) -> Mapping[str, Mapping[int, int]]:
        """How many copies wait in each of these queues: queue -> priority -> count, nothing for what is empty.

        It may stop counting at 100,000 of a queue, those of the smallest priorities first.
        One that does not order by priority may count all of a queue under one.
        """
        ...

    def queues(self) -> Mapping[str, int]:
        """Every queue in which something waits, with how many."""
        ...

    # -- processes

    def held_by(self, process: str) -> list[Copy]:
        """The copies in a process's list."""
        ...

    def holders(self) -> set[str]:
        """Processes in whose list anything is."""
        ...

    def drop(self, process: str, copies: Sequence[Copy]) -> None:
        """Takes copies out of a process's list for good; what :meth:`exchange` does with ``done``, without a fetch."""
        ...

    def presence(self, about: About) -> Presence | None:
        """How a worker process is seen by the tools of this broker; None where it has no such tools."""
        ...

    # -- the sets of untracked jobs

    def hold(self, set_name: str, copies: Sequence[Held], *, process: str | None = None) -> None:
        """Puts copies into ``schedule``, ``retry`` or ``dead``; with ``process``, out of its list in the same step, and
        only those that are still in it."""
        ...

    def release_due(self, set_name: str, now: int, limit: int) -> int:
        """Moves members of a set that are due to the ends of their queues.

        Each once, however many processes do so at the same time, and without a moment in which it is in neither. Returns
        how many it met: 0 also where others have their hands on what is left.
        """
        ...

    def members(self, set_name: str, limit: int) -> list[Held]:
        """Members of a set, in the order of ``at``."""
        ...

    # -- what people ask and do

    @property
    def operations(self) -> Operations:
        """Looking into queues and sets, and tidying them up."""
        ...

    # -- waiting

    def wait(self, timeout: float) -> bool:
        """Waits until something may have been pushed, by any process, for at most ``timeout`` seconds."""
        ...

    def wake(self) -> None:
        """Ends every :meth:`wait` of this process."""
        ...

    def close(self) -> None:
        """Gives back connections."""
        ...


# -- What a worker process shows of itself where its broker has tools that look: what it is, what it runs, what it has done.
#
# Nothing of the ledger depends on it: a process that shows nothing works all the same.


@dataclass(frozen=True, slots=True)
class About:
    """What a process is; fixed for its life.

    ``identity`` is the one of the ledger, HOST:PID:NONCE; ``started_at`` is in microseconds; ``weights`` are its queues
    with their weights, ``strict`` if they are taken in that order; ``tag`` names the application.
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
class Running:
    """A job that runs now: on which ``thread``, since when (``began_at``, microseconds), from which queue, as what text."""

    thread: str
    name: str
    jid: str
    queue: str
    payload: str
    began_at: int


class Presence(Protocol):
    """How one process is seen. Every method but :meth:`ended` may raise :class:`~asynctask.errors.BrokerUnavailable`."""

    def ended(self, name: str, seconds: float, failed: bool) -> None:
        """Counts a job that ended: of which worker, after how long. Called for each job: it only notes that."""
        ...

    def beat(self, running: Sequence[Running], *, quiet: bool, rss_kib: int) -> str | None:
        """Shows what runs and sends the counts. Returns a signal that somebody left (``TSTP``, ``TERM``, ``TTIN``), if any.

        Counts that could not be sent go with a later beat.
        """
        ...

    def leave(self) -> None:
        """Sends the last counts and is seen no more."""
        ...

    def processes(self) -> int:
        """How many processes are seen, of whatever language."""
        ...

    def prune(self) -> None:
        """Takes out processes that are seen although they do not live any more; one process at a time does it."""
        ...
