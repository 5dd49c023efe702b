"""Pause, resume, cancel, retry and knobs: applied to the ledger, then to copies in Redis for workers in other languages."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from asynctask.brokers.base import Broker
from asynctask.core.states import State
from asynctask.errors import BrokerUnavailable
from asynctask.ledger import control, foreign
from asynctask.ledger.base import BATCH, Ledger
from asynctask.ledger.lending import queue_holder
from asynctask.ledger.tasks import try_close
from asynctask.logs import get_logger

_CHANGE_FOR_S = 0.5
"""Seconds for which the caller of a cancel or a retry updates rows itself."""


class TaskControls:
    """Pause, resume, cancel, retry and knobs; accepted without living workers, and while the broker is unavailable.

    Worker processes apply them when they check their borrowed jobs, and engines at Begin. Jobs of the Task in Redis, for
    workers in other languages, are withdrawn.
    """

    def __init__(self, ledger: Ledger, broker: Broker | None) -> None:
        self._ledger = ledger
        self._broker = broker
        self._log = get_logger("asynctask.control")

    def pause(self, task_id: int, who: str = "") -> bool:
        """Pauses a Task, which starts no more jobs. Raises :class:`Conflict` if it has ended."""
        changed = control.pause(self._ledger, task_id, who=who)
        self.withdrawn(task_id)
        self.hand_down(task_id)
        return changed

    def resume(self, task_id: int, who: str = "") -> bool:
        """Resumes a Task, which starts jobs again. Raises :class:`Conflict` as :func:`asynctask.ledger.control.resume`."""
        changed = control.resume(self._ledger, task_id, who=who)
        self.hand_down(task_id)
        return changed

    def cancel(self, task_id: int, who: str = "") -> bool:
        """Cancels a Task, which starts no more jobs. Cancels its open rows for half a second; the maintenance of any
        process cancels the rest."""
        changed = control.cancel_task(self._ledger, task_id, who=who)
        self.hand_down(task_id)
        self._cancel_rows(task_id)
        return changed

    def retry(self, task_id: int, statuses: Collection[str] = (), who: str = "", **only: Any) -> bool:
        """Opens a new generation with the chosen rows, as :func:`asynctask.ledger.control.retry` does."""
        changed = control.retry(self._ledger, task_id, statuses, who=who, **only)
        self.change_rows(task_id)
        return changed

    def update(self, task_id: int, changes: dict[str, Any], who: str = "") -> None:
        """Sets knobs. Copies in the broker are withdrawn, and dispatched again under the new knobs."""
        control.update(self._ledger, task_id, changes, who=who)
        if set(changes) & {"parallel", "interval", "priority"}:
            self.withdrawn(task_id)
        self.hand_down(task_id)

    def hand_down(self, task_id: int, seconds: float = _CHANGE_FOR_S) -> None:
        """Hands pause, resume, cancel and priority of a Task down to the Tasks below it, for about ``seconds``; maintenance
        goes on."""
        until, waiting = self._ledger.clock.monotonic() + seconds, [task_id]
        while waiting and self._ledger.clock.monotonic() <= until:
            reached = control.hand_down(self._ledger, waiting[0])
            if reached is None:
                del waiting[0]
            for child in reached or ():
                if child["state"] == State.CANCELLED and self._ledger.clock.monotonic() <= until:
                    self._cancel_rows(child["id"])
                else:
                    self.withdrawn(child["id"])
                waiting += [child["id"]] if child["children"] and child["id"] not in waiting else []

    def _cancel_rows(self, task_id: int) -> None:
        # If the broker is unavailable, maintenance does all: otherwise copies of cancelled rows would never be withdrawn.
        if self.withdrawn(task_id) and self.change_rows(task_id):
            try_close(self._ledger, task_id)  # without a living worker or web process, no other process would

    def withdrawn(self, task_id: int) -> bool:
        """Removes the Task's waiting copies from Redis; False if Redis does not answer now."""
        try:
            while self._broker is not None and (keys := self._broker.withdraw(task_id, BATCH)):
                control.give_back_copies(self._ledger, keys)
                foreign.trim(self._ledger, queue_holder(None))
        except BrokerUnavailable as error:
            self._log.warning("withdraw_put_off", task_id=task_id, error=str(error))
            return False
        return True

    def change_rows(self, task_id: int, seconds: float = _CHANGE_FOR_S) -> bool:
        """Updates rows of a cancel or retry for at most ``seconds``; returns whether none is left."""
        until = self._ledger.clock.monotonic() + seconds
        while more := control.change_rows(self._ledger, task_id):
            if self._ledger.clock.monotonic() > until:
                return False
        return more is False
