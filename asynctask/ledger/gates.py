"""The gates of a borrow: how many jobs of a Task may start now, and if none, when to ask again.

A borrow asks the gates of a locked Task one after the other, each for what the ones before permit; once it knows what it
lends, each takes that (:class:`asynctask.ledger.lending._Borrow`). The decisions are pure functions of
:mod:`asynctask.core.readiness`; a gate reads what they need. A new limit is a new gate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from asynctask.core import readiness
from asynctask.core.transitions import at_once, interval_of
from asynctask.database.tables import events, loans
from asynctask.ledger import hints, sessions
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import dumps
from asynctask.ledger.events import IN_LOAN, IS_OPEN, UNHELD

MOST_OF_ROUND: Final = 10_000
"""Largest number of jobs of one round of a Task with an interval, which are lent in one transaction."""

SOON: Final = 400_000
"""Microseconds until the next borrow from a Task with keys, while an earlier Task is being split."""

_e, _l = events.c, loans.c


class Lent(NamedTuple):
    """What a borrow lends: the number of jobs, the ranges, and the ids of claimed Events."""

    number: int
    ranges: Sequence[tuple[int, int]]
    claimed: Sequence[int]


class BorrowGate:
    """A gate that permits everything. ``task``: the columns of the Task, whose row the transaction of ``connection`` has
    locked at ``now`` (microseconds); ``name``: of a gate that Tasks share, which decides no hints, since it may open at any
    time.

    ``opens``: when it permits the next start, None if that is not known or it does so now; ``is_locked``: another
    transaction holds its row.
    """

    opens: int | None = None
    is_locked = False

    def __init__(self, connection: Connection, task: dict[str, Any], now: int, name: str | None = None) -> None:
        self.connection, self.task, self.now, self.name = connection, task, now, name

    def permits(self, wanted: int) -> int:
        """How many of ``wanted`` jobs, at least one, may start now."""
        return wanted

    def take(self, lent: Lent) -> dict[str, Any]:
        """Notes what is lent, if the gates permitted any; returns the columns of the Task that change."""
        return {}


class StateGate(BorrowGate):
    """The Task may start jobs in its state, and holds its session."""

    def permits(self, wanted: int) -> int:
        return wanted if readiness.may_start(self.task["state"], hints.in_session(self.task)) else 0

    def take(self, lent: Lent) -> dict[str, Any]:
        return {"started_at": self.now} if lent.number and self.task["started_at"] is None else {}


class OrderGate(BorrowGate):
    """No item of an earlier Task comes before. ``turns``: the gate of the single jobs, None for a Task without keys."""

    turns: sessions.KeysGate | None = None

    def permits(self, wanted: int) -> int:
        if self.task["key_field"] is None:
            return wanted
        self.turns = sessions.gate(self.connection, self.task["id"], self.task["worker_name"])
        self.opens = self.now + SOON if self.turns.waits else None
        return 0 if self.turns.waits else wanted


class RoundGate(BorrowGate):
    """The start time has come, and of a Task with an interval, the next round; that lends no more than its limit."""

    round: dict[str, Any] | None = None

    def permits(self, wanted: int) -> int:
        task, interval = self.task, interval_of(self.task["interval_s"])
        self.opens = hints.opens_at(self.connection, task, self.now)
        if self.opens is not None and self.opens > self.now:
            return 0
        if not interval:
            return wanted
        last, limit = hints.round_of(task), at_once(task["parallel"], interval)
        self.round = {"at": task["round_at"], **last}
        if not last["left"]:
            self.round = {"ranges": [], "again": [], "left": limit, "at": self.now}
        return min(wanted, int(self.round["left"]), limit or 1, MOST_OF_ROUND)

    def take(self, lent: Lent) -> dict[str, Any]:
        if self.round is None:
            return {} if self.task["round_at"] is None else {"round_at": None, "round_jobs": None}
        if not lent.number:
            return {}
        jobs = {
            "ranges": [*self.round["ranges"], *(list(each) for each in lent.ranges)],
            "again": [*self.round["again"], *lent.claimed],
            "left": self.round["left"] - lent.number,
        }
        return {"round_at": self.round["at"], "round_jobs": dumps(jobs)}


class FailureGate(BorrowGate):
    """With all jobs that are lent, no more items can fail than the Task tolerates."""

    def permits(self, wanted: int) -> int:
        """Reads the number of lent jobs before that of failures: writers of outcomes do not lock the Task, and each
        statement sees what is committed by then. A job that fails in between counts twice; in the other order it would not
        count at all."""
        task, room = self.task, wanted
        if task["tolerated_failures"] is None or task["turning"] is not None:  # a retry takes failures back meanwhile
            return wanted
        for exactly in (False, True):
            lent = holders(self.connection, task["id"], exactly=exactly).total()
            room = readiness.tolerated(wanted, task_rows.tolerated_left(self.connection, task), lent)
            if room == wanted:
                break
        return room


# -- the jobs that are lent


def _of_loans(count: Any) -> Any:
    found = sa.select(_l.process, sa.func.sum(count)).where(_l.task_id == sa.bindparam("of"), _l.process.is_not(None))
    return found.group_by(_l.process)


_LENT_AT_MOST: Final = _of_loans(_l.high - _l.low)
# No join: the database might read all Events of the Task for it.
_LENT_OPEN: Final = _of_loans(sa.select(sa.func.count()).where(*IN_LOAN, UNHELD).correlate(loans).scalar_subquery())
# The function keeps the index of ``task_id`` out: by it, every Event of the Task would be read for the few with a process.
_CLAIMED: Final = (
    sa.select(_e.process, sa.func.count())
    .with_hint(events, "FORCE INDEX (ix_events_process)", "mariadb")
    .where(_e.process.is_not(None), sa.func.coalesce(_e.task_id, 0) == sa.bindparam("of"), IS_OPEN)
    .group_by(_e.process)
)


def holders(connection: Connection, task_id: int, *, exactly: bool = False) -> Counter[str]:
    """The processes that hold jobs of a Task by loans and claims, with the largest number that each may hold. ``exactly``:
    without jobs of loans that have ended, so that one long job does not count for its whole loan; reads the ranges."""
    found = Counter[str]()
    for each in (_LENT_OPEN if exactly else _LENT_AT_MOST, _CLAIMED):
        found.update({str(process): int(count) for process, count in connection.execute(each, {"of": task_id})})
    return found
