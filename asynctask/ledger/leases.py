"""Leases of duties: work that one process, the leader, does for all, until another takes over after its end.

A duty is a row of ``duties`` with its leader's identity. The leader of dispatching holds it until ``held_until``, and
renews it while there is work. The leader of maintenance holds it for as long as its process's own lease runs, so it needs
no renewal; a process on the same machine detects the leader's death at once.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import exc

from asynctask.clock import SECOND, micros
from asynctask.database.retrying import repeatable
from asynctask.database.tables import as_dict, duties, events, loans, places, processes, tasks
from asynctask.errors import Unavailable
from asynctask.ledger.base import Ledger
from asynctask.ledger.lending import AFTER_QUEUE_HOLDERS, QUEUE_HOLDER
from asynctask.ledger.processes import Host
from asynctask.logs import get_logger

DISPATCH: Final = "dispatch"
MAINTENANCE: Final = "upkeep"

LEADER_LEASE_S: Final = 1.0
"""Seconds of the lease for dispatching, which the leader renews after half of it."""

_NAME: Final = 16
"""Largest number of characters of a duty's name."""


def dispatch_to(engine: str | None) -> str:
    """The name of the duty to dispatch to an engine (None: to Redis), with a digest in place of a long name."""
    if engine is None:
        return DISPATCH
    name = f"{DISPATCH}/{engine}"
    return name if len(name) <= _NAME else f"{DISPATCH}/{zlib.crc32(engine.encode()) % 16**7:07x}"


_d, _t, _e, _p, _l, _n = duties.c, tasks.c, events.c, processes.c, loans.c, places.c


@dataclass(frozen=True, slots=True)
class Holder:
    """The leader of a duty. ``identity``: None without a leader; ``process``: its registration, None if there is none."""

    identity: str | None
    process: Mapping[str, Any] | None = None

    def is_gone(self, host: Host, now: int) -> bool:
        """Whether another process should take over. Checks this machine, not the database."""
        if self.identity is None or self.process is None:
            return True
        return bool(self.process["lease_until"] <= now) or host.knows_dead(self.process)

    def is_dead(self, host: Host) -> bool:
        """Whether it ran on this machine and is known to be dead."""
        return self.process is not None and host.knows_dead(self.process)


def acquire(ledger: Ledger, name: str, for_s: float) -> int | None:
    """Acquires or renews a duty for ``for_s`` seconds. Returns None if this process holds it now, else when the lease of
    the holder ends (microseconds). Raises LedgerUnavailable."""
    now = ledger.now()
    taken = sa.select(_d.held_until).where(_d.name == name, _d.holder != ledger.identity, _d.held_until > now)
    with ledger.database.read() as connection:
        if (found := connection.execute(taken).scalar()) is not None:
            return int(found)
    free = _d.holder.is_(None) | (_d.holder == ledger.identity) | (_d.held_until <= now)
    until = now + micros(for_s)
    return None if _take(ledger, name, free, held_until=until) else until


@repeatable
def _take(ledger: Ledger, name: str, may: Any, **values: Any) -> bool:
    """Makes this process the holder of a duty if the row meets the condition ``may`` or does not exist. False if another
    process won."""
    values["holder"] = ledger.identity
    try:
        with ledger.database.write() as connection:
            if connection.execute(duties.update().where(_d.name == name, may).values(values)).rowcount == 1:
                return True
            if connection.execute(sa.select(_d.name).where(_d.name == name)).first() is not None:
                return False
            connection.execute(duties.insert().values(name=name, **values))
            return True
    except exc.IntegrityError:  # another process inserted the row concurrently
        return False


@repeatable
def _give_up(ledger: Ledger, name: str) -> None:
    with ledger.database.write() as connection:
        own = duties.update().where(_d.name == name, _d.holder == ledger.identity)
        connection.execute(own.values(holder=None, held_until=None))


def holder_of(ledger: Ledger, name: str) -> Holder:
    """The leader of a duty that is held for as long as its process's lease runs."""
    statement = (
        sa.select(_d.holder.label("of_duty"), processes)
        .select_from(duties.outerjoin(processes, _p.identity == _d.holder))
        .where(_d.name == name)
    )
    with ledger.database.read() as connection:
        found = connection.execute(statement).one_or_none()
    if found is None:
        return Holder(None)
    row = as_dict(found)
    identity = row.pop("of_duty")
    return Holder(identity, row if row["identity"] is not None else None)


class Leadership:
    """This process's view of a duty: whether it leads, as far as it knows, or which other process does."""

    def __init__(self, ledger: Ledger, duty: str) -> None:
        self._ledger = ledger
        self._duty = duty
        self._held_until = 0.0
        self._elsewhere_until = 0.0
        self.holder = Holder(None)
        """The leader that :meth:`take_over` found last."""
        self._log = get_logger("asynctask.leases")

    @property
    def held(self) -> bool:
        """Whether this process leads."""
        return self._held_until > 0

    @property
    def elsewhere(self) -> bool:
        """Whether another process leads, by the last query."""
        return not self.held and self._ledger.clock.monotonic() < self._elsewhere_until

    def acquire(self, *, least_s: float, anew: bool = False) -> float | None:
        """Acquires or renews the duty for :data:`LEADER_LEASE_S`. Raises LedgerUnavailable.

        Returns None if this process leads, else for how many seconds, at least ``least_s``, another does. ``anew``: queries
        even while another's lease runs, because that leader may have resigned.
        """
        now = self._ledger.clock.monotonic()
        if now < self._held_until - LEADER_LEASE_S / 2:
            return None
        if now < self._elsewhere_until and not anew:
            return self._elsewhere_until - now
        other = acquire(self._ledger, self._duty, LEADER_LEASE_S)
        if other is None:
            self._held_until = now + LEADER_LEASE_S
            return None
        self._held_until = 0.0
        left = max(least_s, (other - self._ledger.now()) / SECOND)
        self._elsewhere_until = now + left
        return left

    def take_over(self, host: Host) -> bool:
        """Takes the duty, for as long as this process lives, if the leader is dead. Returns whether this process leads.

        Raises LedgerUnavailable.
        """
        self.holder = holder_of(self._ledger, self._duty)
        own = self.holder.identity == self._ledger.identity
        was = _d.holder.is_(None) if self.holder.identity is None else _d.holder == self.holder.identity
        if own or (self.holder.is_gone(host, self._ledger.now()) and _take(self._ledger, self._duty, was)):
            self._held_until = math.inf
        return self.held

    def lose(self) -> None:
        """Notes that another process has taken over the duty."""
        self._held_until = 0.0

    def resign(self) -> None:
        """Gives up the duty, so that the next leader does not wait for the lease to expire."""
        if not self.held:
            return
        self._held_until = 0.0
        try:
            _give_up(self._ledger, self._duty)
        except Unavailable as error:  # it ends with the lease
            self._log.warning("duty_not_given_up", duty=self._duty, error=str(error))


# -- whether maintenance has work: one statement, so that an idle system stays idle


@dataclass(frozen=True, slots=True)
class Work:
    """The work for maintenance that one query found.

    ``leads``: this process still leads; ``dead``: a lease has expired; ``open``: a Task is open; ``alone``: a foreign queue
    holds claimed jobs; ``lost``: an unregistered process holds jobs or places; ``newest``: when the last process registered
    (microseconds, None for none).
    """

    leads: bool
    dead: bool
    open: bool
    alone: bool
    lost: bool
    newest: int | None

    @property
    def quiet(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.dead or self.open or self.alone or self.lost)


_WORK = sa.select(
    sa.select(_d.holder).where(_d.name == MAINTENANCE).scalar_subquery(),
    sa.exists().where(_p.lease_until <= sa.bindparam("now")),
    sa.exists().where(_t.finished_at.is_(None)),
    sa.exists().where(_e.process >= QUEUE_HOLDER, _e.process < AFTER_QUEUE_HOLDERS),
    sa.or_(
        *(
            sa.exists().where(held.is_not(None), held.not_like(f"{QUEUE_HOLDER}%"), ~sa.exists().where(_p.identity == held))
            for held in (_e.process, _l.process, _n.process)
        )
    ),
    sa.select(sa.func.max(_p.started_at)).scalar_subquery(),
)


def query_work(ledger: Ledger) -> Work:
    """Queries in one statement whether maintenance has work. Raises LedgerUnavailable."""
    with ledger.database.read() as connection:
        found = connection.execute(_WORK, {"now": ledger.now()}).one()
    holder, dead, open_, alone, lost, newest = found
    return Work(holder == ledger.identity, bool(dead), bool(open_), bool(alone), bool(lost), newest)
