"""Duties: what one process at a time does for all, and any other takes over when that one is gone.

A duty is a row of the table ``duties`` with the identity of its holder. The dispatching of what waits is held for a moment,
until ``held_until``, and renewed while there is something to do. The upkeep is held by a registered process for as long as
its own lease runs, so that holding it costs nothing; on the same machine it shows at once that the holder is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import exc

from asynctask.clock import micros
from asynctask.database.retrying import repeatable
from asynctask.database.tables import as_dict, duties, processes
from asynctask.ledger.base import Ledger
from asynctask.ledger.processes import Host

__all__ = ["DISPATCH", "UPKEEP", "Holder", "give_up", "holder_of", "take", "take_over"]

DISPATCH: Final = "dispatch"
UPKEEP: Final = "upkeep"

_d, _p = duties.c, processes.c


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a duty: ``identity`` is None for nobody, ``process`` its registration, None where it has none."""

    identity: str | None
    process: Mapping[str, Any] | None = None

    def is_gone(self, host: Host, now: int) -> bool:
        """Whether somebody else should take over. Asks this machine, not the database."""
        if self.identity is None or self.process is None:
            return True
        return bool(self.process["lease_until"] <= now) or host.knows_dead(self.process)

    def is_dead(self, host: Host) -> bool:
        """Whether it ran on this machine and is gone, as far as this machine can tell."""
        return self.process is not None and host.knows_dead(self.process)


def take(ledger: Ledger, name: str, for_s: float) -> int | None:
    """Takes a duty for ``for_s`` seconds, or goes on holding it.

    Returns None where this process holds it now, or until when another does (microseconds).
    """
    now = ledger.now()
    with ledger.database.read() as connection:
        found = connection.execute(sa.select(_d.holder, _d.held_until).where(_d.name == name)).one_or_none()
    if found is not None and found.holder not in (None, ledger.identity) and (found.held_until or 0) > now:
        return int(found.held_until)
    until = now + micros(for_s)
    return None if _take(ledger, name, now, until, known=found is not None) else until


@repeatable
def _take(ledger: Ledger, name: str, now: int, until: int, *, known: bool) -> bool:
    free = _d.holder.is_(None) | (_d.holder == ledger.identity) | (_d.held_until <= now)
    try:
        with ledger.database.write() as connection:
            if not known:
                connection.execute(duties.insert().values(name=name, holder=ledger.identity, held_until=until))
                return True
            values = {"holder": ledger.identity, "held_until": until}
            return connection.execute(duties.update().where(_d.name == name, free).values(values)).rowcount == 1
    except exc.IntegrityError:  # another process made the row in the same moment
        return False


@repeatable
def give_up(ledger: Ledger, name: str) -> None:
    """Lets go of a duty, if this process holds it."""
    with ledger.database.write() as connection:
        mine = duties.update().where(_d.name == name, _d.holder == ledger.identity)
        connection.execute(mine.values(holder=None, held_until=None))


def holder_of(ledger: Ledger, name: str) -> Holder:
    """Who holds a duty that goes with the lease of its process."""
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


@repeatable
def take_over(ledger: Ledger, name: str, old: str | None) -> bool:
    """Takes a duty from ``old``, who is gone (None: nobody had it). False where somebody else was faster."""
    try:
        with ledger.database.write() as connection:
            was = _d.holder.is_(None) if old is None else _d.holder == old
            if connection.execute(duties.update().where(_d.name == name, was).values(holder=ledger.identity)).rowcount == 1:
                return True
            if connection.execute(sa.select(_d.name).where(_d.name == name)).first() is not None:
                return False
            connection.execute(duties.insert().values(name=name, holder=ledger.identity))
            return True
    except exc.IntegrityError:
        return False
