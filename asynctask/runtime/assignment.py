"""One job in the hands of a process, from its fetch to its acknowledgement, and who says what it came to."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asynctask.brokers.base import Copy
from asynctask.core.transitions import Begin
from asynctask.dispatch.payload import worker_name
from asynctask.job import CurrentJob
from asynctask.middleware.tracker import Ticket
from asynctask.runtime.timeouts import Watch
from asynctask.worker import Worker

if TYPE_CHECKING:
    from asynctask.runtime.lanes import Lane

__all__ = ["Assignment"]


@dataclass(slots=True)
class Assignment:
    """A job that this process holds: its copy, what it is, and the ticket if it is tracked.

    ``abandoned``: its thread is given up, and what that thread still comes to counts no more. ``is_lent``: it never was in
    the broker, see :mod:`asynctask.runtime.lanes`; ``follower`` is the job that has taken its place.
    """

    copy: Copy
    payload: Mapping[str, Any]
    job: CurrentJob
    worker: Worker | None
    ticket: Ticket | None
    thread_id: int = 0
    began: float = 0.0  # on the monotonic clock
    abandoned: bool = False
    watch: Watch | None = None
    asked: float = 0.0  # when Begin was asked what its ticket says, on the monotonic clock
    is_lent: bool = False
    lane: Lane | None = None
    follower: Assignment | None = None
    _claims: dict[str, threading.Thread] = field(default_factory=dict)

    def claim(self) -> bool:
        """Whether this thread says what the job came to. One thread does: the first to claim it, and it may ask again.

        Whoever claims does so before it writes on the ticket. One step that needs no lock.
        """
        me = threading.current_thread()
        return self._claims.setdefault("by", me) is me

    def waive(self) -> None:
        """The thread that performs it goes (back) into the function: until it returns, others may give that thread up."""
        if self._claims.get("by") is threading.current_thread():
            del self._claims["by"]

    @property
    def name(self) -> str:
        """What its worker is called."""
        return worker_name(self.payload) if self.worker is None else self.worker.name

    @property
    def begins(self) -> bool:
        """Whether Begin said that it may run; of an untracked one nobody says otherwise."""
        return self.ticket is None or self.ticket.verdict is Begin.RUN

    @property
    def is_suspect(self) -> bool:
        """Whether a process died that held it: it may be the one that kills."""
        return self.ticket is not None and self.ticket.watched

    @property
    def is_foreign(self) -> bool:
        """Whether another program pushed it: the copies of our own jobs say in their payload which attempt they are for."""
        copy = self.copy
        return copy.attempt == 0 or (copy.task_id is None and self.payload.get("attempt") != copy.attempt)

    @property
    def is_tracked(self) -> bool:
        """Whether an Event is kept of it: it has one, it says so itself, or its worker does."""
        if self.copy.attempt > 0:
            return True
        opted = self.payload.get("use_task_event")
        if isinstance(opted, bool):
            return opted
        return self.worker is not None and self.worker.use_task_event
