"""What a worker process shows of itself where its broker has tools that look: what it is, what it runs, what it has done.

Nothing of the ledger depends on it: a process that shows nothing works all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["About", "Presence", "Running"]


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
