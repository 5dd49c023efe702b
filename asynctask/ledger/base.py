"""What every function of the ledger works with."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import orjson

from asynctask.clock import Clock, Ids, SystemClock, SystemIds, rfc3339
from asynctask.database.engine import Database
from asynctask.database.server_clock import DatabaseTime
from asynctask.ledger.task_locks import Held
from asynctask.messages import Catalogue

__all__ = ["MAX_ID", "MAX_SLOTS", "SLOTS_FROM", "Ledger", "dumps", "in_range", "loads", "stamp", "stamps"]

MAX_SLOTS = 32
"""Slots of ``task_tallies`` that a large Task has: so many processes can count at once without meeting."""

ERROR_SLOTS = 2
"""Slots of ``task_errors``: failures come in few flushes, and a poll sums them all."""

SLOTS_FROM = 1_000
"""Items from which a Task has more than one slot."""


MAX_ID = 2**63 - 1
"""The largest whole number that every database has."""


@dataclass(frozen=True)
class Ledger:
    """The ledger as one process sees it.

    ``identity`` names the process in leases and in ``events.process``; it also chooses the slot of the tallies that this
    process counts in, so that no two processes wait for each other's row. ``time`` is the database's clock, by which
    everything in the ledger is written and judged. ``held`` is what this process knows of Tasks' rows that others hold.
    """

    database: Database
    clock: Clock = field(default_factory=SystemClock)
    ids: Ids = field(default_factory=SystemIds)
    catalogue: Catalogue = field(default_factory=Catalogue)
    identity: str = "local"
    time: DatabaseTime = field(init=False)
    held: Held = field(default_factory=Held)
    _seed: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "time", DatabaseTime(self.clock))
        object.__setattr__(self, "_seed", zlib.crc32(self.identity.encode()))

    def slot(self, slots: int) -> int:
        """The slot of a Task with so many slots that this process counts in."""
        return self._seed % max(1, slots)

    def error_slot(self, slots: int) -> int:
        """The slot in which this process groups the failures of a Task."""
        return self.slot(slots) % ERROR_SLOTS

    def now(self) -> int:
        """The database's clock, in microseconds since 1970-01-01 UTC."""
        return self.time.now()


def in_range(number: int) -> int:
    """The number, or the nearest one that a column of the database can hold: no id lies beyond."""
    return max(-MAX_ID, min(number, MAX_ID))


def dumps(value: Any) -> str:
    """Compact JSON text. Raises TypeError for what JSON cannot say."""
    return orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_SUBCLASS).decode()


def loads(text: str | bytes | None) -> Any:
    """The value of JSON text; None stays None."""
    return None if text is None else orjson.loads(text)


def stamp(at: int, status: str, message: str, attempt: int, row: int | None = None) -> dict[str, Any]:
    """One message as it stands in ``added_messages``."""
    entry: dict[str, Any] = {"at": rfc3339(at), "status": status, "message": message, "attempt": attempt}
    if row is not None:
        entry["row"] = row
    return entry


def stamps(at: str, notes: Iterable[tuple[str, str, int | None]], attempt: int) -> list[str]:
    """Messages as :func:`stamp` makes them, each as JSON text.

    Arguments: ``at``, the time of writing in RFC 3339; ``notes``, each a status, a message, and the microseconds of its own
    time, or None for that of writing.
    """
    return [f'{{"at":"{rfc3339(own) if own else at}",{_rest(status, message, attempt)}' for status, message, own in notes]


@lru_cache(maxsize=256)
def _rest(status: str, message: str, attempt: int) -> str:
    # Messages come in storms of the same text.
    return dumps({"status": status, "message": message, "attempt": attempt})[1:]


def chunks(values: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    """Slices of at most ``size``."""
    return (values[i : i + size] for i in range(0, len(values), size))
