"""The database's clock: the one clock that all processes of a ledger share."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa

from asynctask.clock import SECOND, Clock, micros
from asynctask.database.engine import Database

__all__ = ["DatabaseTime", "database_now", "read_now"]

_JUMP: Final = SECOND
"""Microseconds by which the database's clock and ours may come apart between two answers before that counts as a step."""

_ASK: Final = 15 * SECOND
"""Microseconds between two questions for the time: good clocks come apart by less than a millisecond in them."""

_NOW: Final = {
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)",
    # Not now(): that is when the transaction began, however long it has waited for a lock since.
    "postgresql": "CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)",
    # Not NOW(6), for the same reason. Each connection is in UTC: another time zone may have an hour twice.
    "mariadb": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', SYSDATE(6))",
}


def database_now(dialect: str) -> sa.ColumnElement[Any]:
    """The database's clock as an expression of SQL: microseconds since 1970-01-01 UTC, once its statement has its locks."""
    return sa.literal_column(_NOW[dialect], sa.BigInteger())


def read_now(database: Database) -> int:
    """What time the database has it: microseconds since 1970-01-01 UTC. Raises LedgerUnavailable."""
    with database.read() as connection:
        return int(connection.execute(sa.select(database_now(database.dialect))).scalar_one())


class DatabaseTime:
    """The database's clock as one process reads it.

    Leases and due times are written by one host and judged by another, and hosts disagree about the time. So the database
    is asked with each heartbeat; between two answers the machine's boot clock carries the time on, which neither a step of
    the wall clock nor a suspension stops. Before the first answer it is the machine's wall clock.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset: int | None = None
        self._asked_at = -_ASK
        self._answered_at: int | None = None  # the last heartbeat, on the boot clock
        self._steady_since = 0
        self._lease = 0

    def now(self) -> int:
        """Microseconds since 1970-01-01 UTC."""
        return self._clock.now() if self._offset is None else self._offset + self._clock.boottime()

    def set(self, now: int) -> None:
        """The database says that it is ``now`` (microseconds)."""
        self._asked_at = self._clock.boottime()
        self._offset = now - self._asked_at

    def is_old(self) -> bool:
        """Whether it is time to ask the database again."""
        return self._clock.boottime() - self._asked_at >= _ASK

    def answered(self, now: int | None, *, lease_s: float) -> None:
        """The database took a heartbeat of this process, for a lease of ``lease_s`` seconds; ``now`` (microseconds): and
        said what time it is.

        A gap of more than half a lease since the heartbeat before, or a step of the database's clock, is an interruption.
        """
        at = self._clock.boottime()
        before = self._offset
        if now is not None:
            self.set(now)
        stepped = before is not None and self._offset is not None and abs(self._offset - before) > _JUMP
        if self._answered_at is None or at - self._answered_at > micros(lease_s / 2) or stepped:
            self._steady_since = at
        self._answered_at, self._lease = at, micros(lease_s)

    def may_judge(self) -> bool:
        """Whether this process may take the end of another's lease for its death.

        Only if it has itself had answers for a full lease without an interruption: a database that was away, or a machine
        that was suspended, kept the others from renewing theirs as well.
        """
        at = self._clock.boottime()
        if self._answered_at is None or at - self._answered_at > self._lease // 2:
            return False
        return at - self._steady_since >= self._lease
