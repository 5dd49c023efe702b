"""The turns that dispatchers take: what is left after a round is the duty of one process at a time."""

from __future__ import annotations

from typing import Final

from asynctask.clock import SECOND
from asynctask.errors import Unavailable
from asynctask.ledger import leases
from asynctask.ledger.base import Ledger
from asynctask.logs import get_logger

__all__ = ["ACTIVE_S", "DUTY_S", "Shift"]

DUTY_S: Final = 1.0
"""For how long a process holds the duty of dispatching what is left; it renews it when half of that is over."""

ACTIVE_S: Final = 0.2
"""The pause between two rounds of who is on duty, at most: what each round puts into the queues has to last longer."""


class Shift:
    """The duty to go on dispatching, as one process sees it. Every method but :meth:`end` may raise LedgerUnavailable."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._mine_until = 0.0
        self._others_until = 0.0
        self._log = get_logger("asynctask.dispatcher")

    @property
    def mine(self) -> bool:
        """Whether this process is on duty."""
        return self._mine_until > 0

    @property
    def others(self) -> bool:
        """Whether another process is on duty, as far as this one knows."""
        return self._ledger.clock.monotonic() < self._others_until

    def take(self) -> float | None:
        """Takes or keeps the duty. Returns None where it is this process's, or for how many seconds it is another's."""
        now = self._ledger.clock.monotonic()
        if now < self._mine_until - DUTY_S / 2:
            return None
        if now < self._others_until:
            return self._others_until - now
        other = leases.take(self._ledger, leases.DISPATCH, DUTY_S)
        if other is None:
            self._mine_until = now + DUTY_S
            return None
        self._mine_until = 0.0
        left = max(ACTIVE_S, (other - self._ledger.now()) / SECOND)
        self._others_until = now + left
        return left

    def end(self) -> None:
        """Nothing is left: whoever finds something next need not wait."""
        if not self.mine:
            return
        self._mine_until = 0.0
        try:
            leases.give_up(self._ledger, leases.DISPATCH)
        except Unavailable as error:  # it ends by itself
            self._log.warning("duty_not_given_up", error=str(error))
