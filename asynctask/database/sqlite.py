"""What a connection to SQLite needs, and the lock that its writers queue at."""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from pathlib import Path
from typing import Any

__all__ = ["WriteLock", "connect_sqlite"]


class WriteLock:
    """A blocking lock between all threads of all processes that write one SQLite file.

    SQLite's own ``busy_timeout`` polls with growing pauses: under load a writer can starve for seconds while others
    come and go. A blocking lock on a side file queues writers instead, first come, first served.

    The lock belongs to the open file, of which a forked child has a descriptor too: it would outlive a process that is
    killed while it writes. So a child closes its descriptor as soon as it is forked, and opens the file anew if it writes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = threading.Lock()
        self._fd: int | None = None
        me = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _leave_to_parent(me()))

    def acquire(self) -> None:
        self._thread.acquire()
        try:
            if self._fd is None:
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        except BaseException:
            self._thread.release()
            raise

    def release(self) -> None:
        assert self._fd is not None
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._thread.release()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None

    def leave_to_parent(self) -> None:
        """In a forked child: the lock stays the parent's alone, whichever of its threads holds it."""
        self._thread = threading.Lock()
        self.close()


def _leave_to_parent(lock: WriteLock | None) -> None:
    if lock is not None:
        lock.leave_to_parent()


def connect_sqlite(lock: WriteLock, dbapi_connection: Any) -> None:
    """Sets up a new connection of the driver; ``lock`` is the one of its file."""
    # The driver's own transaction handling is off: BEGIN is emitted below, IMMEDIATE for writers.
    dbapi_connection.isolation_level = None
    cursor = dbapi_connection.cursor()
    cursor.execute("PRAGMA busy_timeout=30000")
    if cursor.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        # The switch does not wait for others: of two that make it at once, one would fail with "locked".
        lock.acquire()
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        finally:
            lock.release()
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA cache_size=-65536")
    cursor.execute("PRAGMA temp_store=MEMORY")
    cursor.close()
