"""Who sweeps when: the duty of upkeep, and which parts of it are wanted, found out with few questions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from asynctask.database.notify import Waker
from asynctask.errors import Unavailable
from asynctask.ledger import leases, processes, upkeep
from asynctask.ledger.base import Ledger
from asynctask.logs import get_logger

__all__ = ["PARTS", "STRAYS_S", "Rota"]

PARTS: Final = (
    "recover_dead", "release_due", "turn_rows", "take_up_splits", "close", "find_lost", "sample", "clear_uploads",
)  # fmt: skip

_QUIET: Final = 3
"""While nothing happens, the one on duty looks after so many pauses; the others look who that is after twice as many."""

STRAYS_S: Final = 10.0
"""Where each process has a list in a server apart from the ledger: seconds between two looks for those of nobody."""

CLEAR_S: Final = 3_600.0
"""Seconds between two looks for stored lists that nobody needs any more; hardly ever is there one."""

_OFTEN: Final = 0.25
"""The one on duty looks no more often than after this part of a pause because of what it hears, but for a few looks."""

_AT_ONCE: Final = 2
"""So many looks come before their time."""


class Rota:
    """What one process knows of the upkeep: whether it is its duty, and what is wanted.

    Between two looks at the database it watches, on its own machine, whether the processes that it knows still live: one
    that died there is recovered at once, and if it was the one on duty, another takes over.
    """

    def __init__(
        self,
        ledger: Ledger,
        host: processes.Host,
        nudge: Callable[[], None],
        expect: Callable[[int], None],
        waker: Waker | None,
        *,
        every_s: float,
        can_split: bool,
        foreign: bool,
        apart: bool = False,
    ) -> None:
        self._ledger = ledger
        self._host = host
        self._nudge = nudge
        self._expect = expect
        self._waker = waker
        self._every_s = every_s
        self._can_split = can_split
        self._foreign = foreign  # the broker is not in the ledger's database: one look does not see it
        self._apart = apart  # so are the lists of processes
        self._strays_at = -1e9
        self._cleared_at = -1e9
        self._mine = False
        self._holder = leases.Holder(None)
        self._known: list[dict[str, object]] = []
        self._looked = -1e9
        self._due_at = -1e9  # when it would look next if it looked at even distances because it hears something
        self._listed = -1e9
        self._newest: int | None = None
        self._active = True
        self._scheduled_at: int | None = None
        self._stop = threading.Event()
        self._log = get_logger("asynctask.sweep")

    # -- waiting

    @property
    def stopped(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Ends the pause and whatever would follow."""
        self._stop.set()
        if self._waker is not None:
            self._waker.wake()

    def pause(self) -> None:
        """Waits for the next look."""
        if self._waker is None or not self._mine:
            self._stop.wait(self._every_s)
        elif not self._stop.is_set() and self._waker.wait(self._every_s):
            # Something was left in the ledger for whoever is on duty. A few looks are made at once, for the ring before may
            # have been about something else; where much happens, one does for all of it.
            distance = self._every_s * _OFTEN
            early = self._due_at - self._ledger.clock.monotonic()
            self._stop.wait(max(0.0, min(early - _AT_ONCE * distance, distance)))
            self._due_at = max(self._due_at, self._ledger.clock.monotonic()) + distance
            self._looked = -1e9

    def leave(self) -> None:
        """Lets go of the duty."""
        if self._mine:
            self._mine = False
            try:
                leases.give_up(self._ledger, leases.UPKEEP)
            except Unavailable as error:  # it ends with the lease of the process
                self._log.warning("duty_not_given_up", error=str(error))

    # -- what is wanted

    def wanted(self) -> Sequence[str]:
        """The parts of the upkeep that this process should do now. Raises LedgerUnavailable."""
        if not self._on_duty():
            return ()
        now = self._ledger.clock.monotonic()
        died = any(self._host.knows_dead(process) for process in self._known)
        scheduled = self._scheduled_at is not None and self._scheduled_at <= self._ledger.now()
        if not (died or scheduled or self._active) and now - self._looked < _QUIET * self._every_s:
            return ()
        found = self._look(now)
        if not found.mine:
            self._mine = False
            return ()
        return [part for part in PARTS if self._wants(part, found, died)]

    def _wants(self, part: str, found: upkeep.Upkeep, died: bool) -> bool:
        if part == "recover_dead":
            return found.dead or found.lost or died or (self._foreign and found.open) or self._is_time_for_strays()
        if part == "release_due":
            return self._foreign or (found.scheduled_at is not None and found.scheduled_at <= self._ledger.now())
        if part == "clear_uploads":
            return self._can_split and self._is_time_to_clear()
        return found.open or (part == "find_lost" and found.alone)

    def _is_time_for_strays(self) -> bool:
        now = self._ledger.clock.monotonic()
        if not self._apart or now - self._strays_at < STRAYS_S:
            return False
        self._strays_at = now
        return True

    def _is_time_to_clear(self) -> bool:
        now = self._ledger.clock.monotonic()
        if now - self._cleared_at < CLEAR_S:
            return False
        self._cleared_at = now
        return True

    def _look(self, now: float) -> upkeep.Upkeep:
        found = upkeep.look(self._ledger)
        self._looked = now
        self._active = self._foreign or not found.quiet
        self._scheduled_at = found.scheduled_at
        if found.ready:
            self._nudge()
        if found.due_at is not None:
            self._expect(found.due_at)
        rests = self._every_s if self._active else _QUIET * 3 * self._every_s
        if found.newest != self._newest or now - self._listed >= rests:
            self._newest = found.newest
            with self._ledger.database.read() as connection:
                self._known = processes.list_processes(connection)
            self._listed = now
        return found

    def _gives_way(self, holder: leases.Holder) -> bool:
        """Whether this process should take over: the holder is gone, or cannot take up splits as this one can."""
        cannot_split = holder.identity is not None and processes.is_engine(holder.identity)
        return holder.is_gone(self._host, self._ledger.now()) or (self._can_split and cannot_split)

    def _on_duty(self) -> bool:
        if self._mine:
            return True
        now = self._ledger.clock.monotonic()
        if now - self._looked < 2 * _QUIET * self._every_s and not self._holder.is_dead(self._host):
            return False
        self._looked = now
        self._holder = leases.holder_of(self._ledger, leases.UPKEEP)
        mine = self._holder.identity == self._ledger.identity
        if mine or self._gives_way(self._holder):
            self._mine = mine or leases.take_over(self._ledger, leases.UPKEEP, self._holder.identity)
            self._active = True
        return self._mine
