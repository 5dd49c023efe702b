"""Whether this process can do its work: not only answer, but write what it is given."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Final

from asynctask.database.retrying import repeatable
from asynctask.database.tables import write_marks
from asynctask.errors import LedgerUnavailable, Unavailable
from asynctask.ledger.base import Ledger
from asynctask.logs import get_logger

__all__ = ["RESERVE_BYTES", "NotWritable", "Readiness"]

RESERVE_BYTES: Final = 16 * 1024 * 1024
"""Free space below which a file system counts as full: room for a list, and for SQLite's log between two checkpoints."""

FRESH_S: Final = 3.0
"""An answer serves this long: whoever asks all the time must not write all the time."""


class NotWritable(Unavailable):
    """What is handed in could not be kept. The message names a setting, no address and no path."""

    code = "not_writable"


class Readiness:
    """Arguments: ``data_dir`` is where uploads go; it is made with the first of them."""

    def __init__(self, ledger: Ledger, data_dir: Path) -> None:
        self._ledger = ledger
        self._folders = {"data_dir": data_dir}
        if ledger.database.path is not None:
            self._folders["database_url"] = ledger.database.path.parent
        self._lock = threading.Lock()
        self._fresh_until = 0.0
        self._found: NotWritable | None = None
        self._log = get_logger("asynctask.readiness")

    def check(self) -> None:
        """Raises :class:`NotWritable` where the database takes no write, or a file system that is written to is full.

        A server's own disk is not seen from here: a transaction that is committed proves that it can be written.
        """
        with self._lock:
            if self._ledger.clock.monotonic() >= self._fresh_until:
                self._found = self._look()
                self._fresh_until = self._ledger.clock.monotonic() + FRESH_S
            found = self._found
        if found is not None:
            raise NotWritable(str(found))

    def _look(self) -> NotWritable | None:
        for setting, folder in self._folders.items():
            free = _free_bytes(folder)
            if free is not None and free < RESERVE_BYTES:
                has = f"{free / 2**20:.1f} MB left, less than {RESERVE_BYTES >> 20} MB"
                return NotWritable(f"the file system of {setting} has {has}")
        try:
            self._write()
        except LedgerUnavailable as error:
            self._log.warning("ledger_not_writable", error=str(error))
            return NotWritable("the database takes no write; the log says why")
        return None

    @repeatable
    def _write(self) -> None:
        """A row that comes and goes in one transaction: its pages are written all the same, and nothing is left of it."""
        owner = self._ledger.ids.jids(1)[0]
        with self._ledger.database.write(marked=False) as connection:
            at = self._ledger.now() // 1_000_000
            connection.execute(write_marks.insert().values(owner=owner, number=0, at=at))
            connection.execute(write_marks.delete().where(write_marks.c.owner == owner))


def _free_bytes(folder: Path) -> int | None:
    """What this user may still write there; None where the file system does not say."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize if found.f_blocks else None
