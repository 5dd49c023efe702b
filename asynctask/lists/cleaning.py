"""What maintenance removes: stored lists that no split needs any more, and what ended long ago."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final

from asynctask.clock import micros
from asynctask.ledger import queries
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger
from asynctask.ledger.purge import Old, Purge
from asynctask.lists.rows import ListSource, remove_list
from asynctask.lists.uploads import Uploads

PURGE_S: Final = 86_400.0
"""Seconds between two purges, if one is configured."""

_PURGE_FOR_S: Final = 0.05
"""Duration of one part of a purge, in seconds."""

_BATCH: Final = 1_000
"""Tasks of one query."""


class Cleaning:
    """Removes stored lists, and what ended ``purge_after_s`` seconds ago (0: never). ``remove_export`` as of
    :class:`~asynctask.ledger.purge.Purge`."""

    def __init__(
        self,
        ledger: Ledger,
        uploads: Uploads,
        *,
        remove_export: Callable[[str], bool] = lambda export: False,
        purge_after_s: float = 0.0,
    ) -> None:
        self._ledger = ledger
        self._uploads = uploads
        self._remove_export = remove_export
        self._purge_after_s = purge_after_s
        self._purge: Purge | None = None  # the one in progress
        self._purged_at = -math.inf
        self._cleared = 0  # of the Tasks up to this id no stored list can become one that nobody needs

    def clear_uploads(self) -> int:
        """Removes stored JSON items whose split is over. Returns their number.

        Only those that a Task of this ledger names: other applications may use the same folder.
        """
        after, cleared, waits = self._cleared, 0, False
        while True:
            with self._ledger.database.read() as connection:
                found = queries.split_sources(connection, after, _BATCH)
            sources = {i: ListSource.from_json(kept) for i, state, kept in found if state != "splitting"}
            over = {i: source.name for i, source in sources.items() if source.items}
            for name in over.values():
                self._uploads.remove(name)
            if over:
                task_rows.forget_sources(self._ledger, list(over))
            cleared += len(over)
            for task_id, state, _ in found:
                after = task_id
                waits |= state == "splitting"
                if not waits:
                    self._cleared = task_id
            if len(found) < _BATCH:
                return cleared

    def purge(self) -> bool:
        """Purges a part of what ended longer ago than configured, once a day. Returns whether more is left."""
        clock = self._ledger.clock
        if self._purge_after_s <= 0:
            return False
        if self._purge is None:
            if clock.monotonic() - self._purged_at < PURGE_S:
                return False
            self._purged_at = clock.monotonic()
            old = Old(self._ledger.now() - micros(self._purge_after_s))
            self._purge = Purge(self._ledger, old, partial(remove_list, self._uploads), self._remove_export)
        until = clock.monotonic() + _PURGE_FOR_S
        while self._purge.step():
            if clock.monotonic() > until:
                return True
        self._purge = None
        return False
