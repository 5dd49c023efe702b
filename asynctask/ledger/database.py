"""Connections and transactions: one place that knows how each database wants to be talked to."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.engine.url import URL, make_url

from asynctask.errors import ConfigError, LedgerUnavailable

__all__ = ["Database", "WriteLock"]

_DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "mariadb": "mariadb+pymysql"}


class WriteLock:
    """A blocking lock between all threads of all processes that write one SQLite file.

    SQLite's own ``busy_timeout`` polls with growing pauses: under load a writer can starve for seconds while others
    come and go. A blocking lock on a side file queues writers instead, first come, first served.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = threading.Lock()
        self._fd: int | None = None
        self._pid = 0

    def acquire(self) -> None:
        self._thread.acquire()
        try:
            if self._fd is None or self._pid != os.getpid():  # a forked child needs a lock of its own
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                self._pid = os.getpid()
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        except BaseException:
            self._thread.release()
            raise

    def release(self) -> None:
        assert self._fd is not None
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._thread.release()

    def close(self) -> None:
        if self._fd is not None and self._pid == os.getpid():
            os.close(self._fd)
        self._fd = None


class Database:
    """The database behind a ledger.

    Arguments: ``url`` as SQLAlchemy takes it; ``postgresql://`` and ``mysql://`` mean psycopg 3 and PyMySQL. ``pool_size``
    bounds the connections that one process holds. Raises :class:`ConfigError` for a URL that cannot work.
    """

    def __init__(self, url: str, *, pool_size: int = 5) -> None:
        self.url = _normal(url)
        self.dialect = self.url.get_backend_name()
        self.is_sqlite = self.dialect == "sqlite"
        self._lock: WriteLock | None = None
        self.path: Path | None = None
        if self.is_sqlite:
            self.path = Path(str(self.url.database))
            self._lock = WriteLock(self.path.with_name(self.path.name + ".lock"))
        self.engine = self._engine(pool_size)
        self._writer = self.engine.execution_options(asynctask_write=True)

    def _engine(self, pool_size: int) -> Engine:
        if self.is_sqlite:
            assert self.path is not None
            if not self.path.parent.is_dir():
                raise ConfigError(f"the folder of the SQLite database does not exist: {self.path.parent}")
            engine = sa.create_engine(
                self.url, pool_size=pool_size, max_overflow=50, connect_args={"timeout": 30, "check_same_thread": False}
            )
            event.listen(engine, "connect", self._sqlite_connect)
            event.listen(engine, "begin", _sqlite_begin)
            return engine
        return sa.create_engine(
            self.url, pool_size=pool_size, max_overflow=pool_size, pool_pre_ping=True, isolation_level="READ COMMITTED"
        )

    def _sqlite_connect(self, dbapi_connection: Any, _record: Any) -> None:
        # The driver's own transaction handling is off: BEGIN is emitted below, IMMEDIATE for writers.
        dbapi_connection.isolation_level = None
        cursor = dbapi_connection.cursor()
        cursor.execute("PRAGMA busy_timeout=30000")
        if cursor.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            # The switch does not wait for others: of two that make it at once, one would fail with "locked".
            assert self._lock is not None
            self._lock.acquire()
            try:
                cursor.execute("PRAGMA journal_mode=WAL")
            finally:
                self._lock.release()
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.execute("PRAGMA cache_size=-65536")
        cursor.execute("PRAGMA temp_store=MEMORY")
        cursor.close()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection in a read transaction: what it reads stands together. Raises :class:`LedgerUnavailable`."""
        with _translated(), self.engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A connection in a write transaction, committed at the end. Raises :class:`LedgerUnavailable`.

        Keep it short (50 ms). On SQLite the transaction is IMMEDIATE and behind the blocking
        lock, so what it reads cannot change under it.
        """
        if self._lock is None:
            with _translated(), self.engine.begin() as connection:
                yield connection
            return
        # The connection is taken before the lock: who holds the lock never waits for a connection.
        with _translated(), self._writer.connect() as connection:
            self._lock.acquire()
            try:
                with connection.begin():
                    yield connection
            finally:
                self._lock.release()

    def close(self) -> None:
        """Closes every connection."""
        self.engine.dispose()
        if self._lock is not None:
            self._lock.close()


def _normal(url: str) -> URL:
    try:
        parsed = make_url(url)
    except exc.ArgumentError:
        raise ConfigError(f"database_url is no database URL: {url!r}; e.g. sqlite:///asynctask.db") from None
    if parsed.drivername in _DRIVERS:
        parsed = parsed.set(drivername=_DRIVERS[parsed.drivername])
    if parsed.get_backend_name() == "sqlite" and (not parsed.database or parsed.database == ":memory:"):
        raise ConfigError("an in-memory SQLite database cannot be shared between threads and processes: give a file")
    return parsed


def _sqlite_begin(connection: Connection) -> None:
    write = connection.get_execution_options().get("asynctask_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (exc.OperationalError, exc.InterfaceError, exc.TimeoutError) as error:
        raise LedgerUnavailable(f"the database does not answer: {error.__cause__ or error}") from error
