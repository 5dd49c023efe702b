"""Whether anything waits for upkeep: one statement, so that a system in which nothing happens stays quiet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from asynctask.database.tables import duties, events, jobs, processes, tasks
from asynctask.ledger.base import Ledger
from asynctask.ledger.leases import UPKEEP

__all__ = ["Upkeep", "look"]

_d, _t, _e, _p, _j = duties.c, tasks.c, events.c, processes.c, jobs.c


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What one look found.

    ``mine``: this process is still the one whose duty it is; ``dead``: a lease ended; ``open``: there is a Task that is not
    over; ``ready``: there is something to dispatch; ``alone``: jobs without a Task are to be looked at; ``lost``: jobs are
    held by a process that nobody knows; ``newest``: when the last process registered; ``due_at``: when the next job that
    waits in the ledger is due, ``scheduled_at``: the next of the broker's own sets (all three in microseconds, None: there
    is none).
    """

    mine: bool
    dead: bool
    open: bool
    ready: bool
    alone: bool
    lost: bool
    newest: int | None
    due_at: int | None
    scheduled_at: int | None

    @property
    def quiet(self) -> bool:
        """Whether there is nothing to do, now or at a time that is known."""
        return not (self.dead or self.open or self.alone or self.lost)


def _first(column: Any, *where: Any) -> Any:
    return sa.select(column).where(column.is_not(None), *where).order_by(column).limit(1).scalar_subquery()


_STATEMENT = sa.select(
    sa.select(_d.holder).where(_d.name == UPKEEP).scalar_subquery(),
    sa.exists().where(_p.lease_until <= sa.bindparam("now")),
    sa.exists().where(_t.finished_at.is_(None)),
    sa.exists().where(_t.finished_at.is_(None), _t.ready.is_not(None)),
    sa.exists().where(_e.look_at <= sa.bindparam("now")),
    sa.or_(
        sa.exists().where(_e.process.is_not(None), ~sa.exists().where(_p.identity == _e.process)),
        sa.exists().where(_j.process.is_not(None), ~sa.exists().where(_p.identity == _j.process)),
    ),
    sa.select(sa.func.max(_p.started_at)).scalar_subquery(),
    sa.exists().where(_t.due_next <= sa.bindparam("now")),
    sa.exists().where(_e.task_id.is_(None), _e.due_at <= sa.bindparam("now")),
    _first(_t.due_next, _t.due_next > sa.bindparam("now")),
    _first(_e.due_at, _e.task_id.is_(None), _e.due_at > sa.bindparam("now")),
    _first(_j.run_at, _j.held_in == "schedule"),
    _first(_j.run_at, _j.held_in == "retry"),
)


def look(ledger: Ledger) -> Upkeep:
    """Looks once. Raises LedgerUnavailable."""
    with ledger.database.read() as connection:
        found = connection.execute(_STATEMENT, {"now": ledger.now()}).one()
    holder, dead, open_, ready, alone, lost, newest, due_task, due_alone, *times = found
    of_tasks, of_events, scheduled, retry = (None if at is None else int(at) for at in times)
    waits = bool(ready or due_task or due_alone)
    return Upkeep(
        holder == ledger.identity, bool(dead), bool(open_), waits, bool(alone), bool(lost), newest,
        due_at=_earlier(of_tasks, of_events), scheduled_at=_earlier(scheduled, retry),
    )  # fmt: skip


def _earlier(one: int | None, other: int | None) -> int | None:
    return min((at for at in (one, other) if at is not None), default=None)
