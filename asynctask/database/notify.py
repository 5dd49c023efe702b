"""Signals between processes: a commit that creates work wakes the threads that wait for the ledger.

A signal means only that a query is worthwhile. It can be lost (the process dies between commit and signal, or the
connection is being re-established), so waiting threads also poll, at the interval of their wait's timeout.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.engine import Connection

from asynctask.database.engine import Database
from asynctask.logs import get_logger

_CHANGED: Final = "ledger"
"""The payload of a NOTIFY."""

_FIRST_POLL_S: Final = 0.02
_LAST_POLL_S: Final = 1.0
_RECONNECT_S: Final = (0.1, 0.5, 1.0, 2.0, 5.0)
_RETRY_S: Final = 60.0
"""Pause, in seconds, after the probe did not arrive."""


def notify(connection: Connection) -> None:
    """Signals all waiting threads, once the transaction is committed, that the ledger has new work.

    Call it inside the write transaction; repeated calls count once. A rolled-back transaction may signal, too.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SELECT pg_notify(%s, %s)", ("asynctask", _CHANGED))
    else:  # there is no NOTIFY: the signal is sent when the connection returns to its pool, after the commit
        connection.info[TO_SEND] = True


class Waker:
    """Waits for signals, for one thread. Made by :meth:`Signals.waker`.

    A signal between two waits is not lost: the next :meth:`wait` returns at once.
    """

    def __init__(self, signals: Signals, *, for_jobs: bool) -> None:
        self._signals = signals
        self._for_jobs = for_jobs
        self._event = threading.Event()
        self._poll_s = _FIRST_POLL_S
        self.signalled = False
        """Whether a signal, not a poll, ended the last wait."""

    def wait(self, timeout: float) -> bool:
        """Waits for at most ``timeout`` seconds; returns whether to query: on a signal, or to poll.

        While signals may be lost (a pooler that does not pass them on, a connection being re-established, shortly after a
        signal on MariaDB), it polls: after 20 ms, then at intervals that double up to a second.
        """
        self._signals.listen(for_jobs=self._for_jobs)
        poll_s, settled = self._poll_s, self._poll_s >= _LAST_POLL_S
        polls = not self._signals.reliable or not (self._signals.exact or settled)
        signalled = self._event.wait(min(poll_s, timeout) if polls else timeout)
        self._event.clear()
        self.signalled = signalled
        self._poll_s = _FIRST_POLL_S if signalled else min(poll_s * 2, _LAST_POLL_S)
        return signalled or (polls and poll_s < timeout)

    def wake(self) -> None:
        """Ends the current wait, or the next one, from within this process."""
        self._event.set()


class Signals:
    """The signals of one process on one database; uses one thread and at most one connection from the first wait on.

    =============  ====================================================================================================
    database       transport
    =============  ====================================================================================================
    SQLite         random bytes in a file beside the database, ``NAME.bell``, written after the commit; each process
                   reads them every 10 to 20 ms while it waits for jobs, else every 50: no query, no lock
    PostgreSQL     LISTEN and NOTIFY; a probe finds out whether they pass a pooler. If not, the log says so once, and it
                   is retried every minute
    MariaDB        a statement that waits at the server; the sender ends it after the commit with KILL QUERY
    =============  ====================================================================================================
    """

    notify = staticmethod(notify)

    def __init__(self, database: Database) -> None:
        self._database = database
        self._wakers: list[Waker] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._log = get_logger("asynctask.signals")
        self._channel: Channel = _channel(database)
        self.exact = self._channel.exact
        if self._channel.send is not None:
            event.listen(database.engine, "checkin", self._checked_in)

    @property
    def reliable(self) -> bool:
        """Whether signals of other processes arrive now."""
        return self._channel.proven

    def waker(self, *, for_jobs: bool = False) -> Waker:
        """A new :class:`Waker`; each waiting thread needs its own. ``for_jobs``: it waits for jobs to begin, so signals
        should arrive within 20 ms."""
        waker = Waker(self, for_jobs=for_jobs)
        with self._lock:
            self._wakers.append(waker)
        return waker

    def wake(self) -> None:
        """Ends every wait of this process."""
        self._deliver()

    def close(self) -> None:
        """Ends every wait and the listening thread, and closes its connection."""
        self._closed.set()
        self._channel.end()
        self.wake()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(10)
        self._channel.close()

    def listen(self, *, for_jobs: bool) -> None:
        """Starts the listening thread if needed, because a thread waits; ``for_jobs`` as in :meth:`waker`. While the system
        refuses more threads, the waiting threads poll, and each wait tries again."""
        if for_jobs:
            self._channel.expect_jobs()
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is not None or self._closed.is_set():
                return
            thread = threading.Thread(target=self._run, name="signals", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self._channel.proven = False
                self._log.retrying("signals_not_started", error=str(error))
            else:
                self._thread = thread

    # -- receiving

    def _deliver(self) -> None:
        with self._lock:
            wakers = list(self._wakers)
        for waker in wakers:
            waker.wake()

    def _run(self) -> None:
        tries, is_logged = 0, False
        while not self._closed.is_set():
            try:
                for _ in self._channel.receive():
                    tries, is_logged = 0, False
                    self._deliver()
                if not (is_logged or self._closed.is_set()):
                    self._log.warning("signals_do_not_arrive", then="looking every second; is a pooler between?")
                    is_logged = True
                self._closed.wait(_RETRY_S)
            except Exception as error:
                self._channel.proven = False
                self._log.warning("signals_interrupted", error=str(error), tries=tries + 1)
                self._closed.wait(_RECONNECT_S[min(tries, len(_RECONNECT_S) - 1)])
                tries += 1

    # -- sending

    def _checked_in(self, driver_connection: object, record: object) -> None:
        is_due = getattr(record, "info", {}).pop(TO_SEND, False)
        if not is_due or driver_connection is None or self._channel.send is None:
            return
        try:
            self._channel.send(driver_connection)
        except Exception as error:  # the transaction is committed; waiting threads poll later
            self._log.warning("ring_failed", error=str(error))
        self._deliver()


# -- transports, one for each database

TO_SEND: Final = "asynctask_rung"
"""Key in a connection's ``info``: it must signal when it returns to its pool."""

# Poll intervals on SQLite: while a thread waits for jobs; the same after a second without a signal; while none does.
_POLL_S: Final = 0.01
_QUIET_POLL_S: Final = 0.02
_SLOW_POLL_S: Final = 0.05
_QUIET_AFTER: Final = 100
_PROBE_S: Final = 2.0
_ALIVE_S: Final = 30.0
_SLEEP_S: Final = 20.0


class Channel(Protocol):
    """A transport. ``send`` is None if the database itself notifies; ``proven``: signals are known to arrive; ``exact``:
    while ``proven``, every signal arrives, also shortly after another one."""

    exact: bool
    proven: bool
    send: Callable[[Any], None] | None

    def expect_jobs(self) -> None:
        """From now on a thread waits for jobs, so signals should arrive within 20 ms instead of 50."""
        ...

    def receive(self) -> Iterator[None]:
        """Yields for each signal until :meth:`end`, and once before the first; returns early if none can arrive."""
        ...

    def end(self) -> None:
        """Ends :meth:`receive`, from another thread."""
        ...

    def close(self) -> None:
        """Releases its resources."""
        ...


class SqliteChannel:
    """SQLite: a file with 8 random bytes, which change with every signal: counters of several processes could be equal.

    Reading it is cheap, but waking up is not, so the interval is as long as the waiting threads allow.
    """

    exact = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._jobs_expected = False
        self.proven = True
        self.send: Callable[[Any], None] | None = self._send

    def _open(self) -> int:
        """The descriptor of the file; the caller holds the lock."""
        if self._fd is None:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return self._fd

    def _send(self, _connection: Any) -> None:
        with self._lock:  # until it is written: after close(), the descriptor may be that of another file
            if not self._closed:
                os.pwrite(self._open(), os.urandom(8), 0)

    def expect_jobs(self) -> None:
        self._jobs_expected = True

    def _interval_s(self, unchanged: int) -> float:
        if not self._jobs_expected:
            return _SLOW_POLL_S
        return _QUIET_POLL_S if unchanged >= _QUIET_AFTER else _POLL_S

    def receive(self) -> Iterator[None]:
        with self._lock:
            descriptor = self._open()
        seen = os.pread(descriptor, 8, 0)
        self.proven = True  # again, after an error
        yield  # signals before the first read may have been missed
        unchanged = 0
        while not self._ended.wait(self._interval_s(unchanged)):
            now = os.pread(descriptor, 8, 0)
            unchanged += 1
            if now != seen:
                unchanged, seen = 0, now
                yield

    def end(self) -> None:
        self._ended.set()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None


class _OwnConnection:
    """A connection outside the pool and any transaction, and a pipe that ends a wait on it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._ended = threading.Event()
        self._read, self._write = os.pipe()
        self.proven = False

    def expect_jobs(self) -> None:
        """No-op: signals arrive at once."""

    def _connect(self) -> Connection:
        engine = self._database.engine
        # Connects as the pool does, without the pool's limit. Closed after use, so it needs no reset, which would fail on a
        # broken connection with a traceback in the log.
        own = sa.create_engine(
            self._database.url,
            creator=engine.pool._creator,
            poolclass=sa.NullPool,
            isolation_level="AUTOCOMMIT",
            skip_autocommit_rollback=True,
            pool_reset_on_return=None,
        )
        return own.connect()

    def end(self) -> None:
        self._ended.set()
        with suppress(OSError):
            os.write(self._write, b"x")

    def close(self) -> None:
        for descriptor in (self._read, self._write):
            with suppress(OSError):
                os.close(descriptor)
        self._read = self._write = -1

    def _ready(self, descriptor: int, timeout: float) -> bool:
        """Waits for the connection's socket or :meth:`end`; True if the socket is readable."""
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.register(self._read, select.POLLIN)
        return any(found == descriptor for found, _ in poll.poll(timeout * 1_000))


class PostgresqlChannel(_OwnConnection):
    """PostgreSQL: LISTEN on its own connection. NOTIFY is part of the transaction, so there is nothing to send after it."""

    exact = True
    send: Callable[[Any], None] | None = None

    def receive(self) -> Iterator[None]:
        if self._database.behind_pooler():
            return
        with self._connect() as connection:
            driver: Any = connection.connection.driver_connection
            driver.execute("LISTEN asynctask", prepare=False)
            if not self._receives_probe(driver):
                return
            self.proven = True
            yield  # earlier signals may have been missed
            while not self._ended.is_set():
                if self._ready(driver.pgconn.socket, _ALIVE_S):
                    driver.pgconn.consume_input()
                elif not self._ended.is_set():
                    driver.execute("SELECT 1", prepare=False)  # keepalive
                if _CHANGED in self._notices(driver):
                    yield

    def _receives_probe(self, driver: Any) -> bool:
        """Whether another connection's NOTIFY arrives; behind a pooler LISTEN ends with its statement."""
        mark = f"probe {driver.pgconn.backend_pid}"
        with self._database.read() as connection:
            connection.exec_driver_sql("SELECT pg_notify(%s, %s)", ("asynctask", mark))
        while not self._ended.is_set() and self._ready(driver.pgconn.socket, _PROBE_S):
            driver.pgconn.consume_input()
            if mark in self._notices(driver):
                return True
        return False

    def _notices(self, driver: Any) -> list[str]:
        found: list[str] = []
        while (notice := driver.pgconn.notifies()) is not None:
            found.append(notice.extra.decode(errors="replace"))
        return found


_MARK: Final = "/* asynctask waits */"
# Result 0: no signal. A killed GET_LOCK returns NULL, a killed SLEEP 1.
_WAIT: Final = (
    f"SELECT {_MARK} CASE GET_LOCK(CONCAT('asynctask waits ', MD5(DATABASE())), {_SLEEP_S:g})"
    f" WHEN 1 THEN SLEEP({_SLEEP_S:g}) WHEN 0 THEN 0 ELSE 1 END"
)
_SLEEPERS: Final = (
    "SELECT ID FROM information_schema.PROCESSLIST WHERE DB = DATABASE() AND COMMAND = 'Query' AND INFO LIKE %s"
)


class MariadbChannel(_OwnConnection):
    """MariaDB: a statement that waits at the server until a sender kills it (the statement, not the connection).

    A user may kill statements of its own connections without a privilege. A signal between two waits is lost, so the
    channel is not exact. A sender skips its own wait.

    One connection holds the lock and sleeps; the others wait for the lock. All sleeps of a server share a mutex: with ten
    sleepers and four senders, every second ``KILL QUERY`` took 2 s or a multiple; with one sleeper, at most 20 ms.
    """

    exact = False

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.send: Callable[[Any], None] | None = self._send
        self._id = 0

    def receive(self) -> Iterator[None]:
        with self._connect() as connection:
            driver: Any = connection.connection.driver_connection
            driver._read_timeout = _SLEEP_S + _ALIVE_S  # replaces the timeout of the handshake
            self._id = int(connection.exec_driver_sql("SELECT CONNECTION_ID()").scalar_one())
            yield
            while not self._ended.is_set():
                self.proven = True
                if self._wait(connection):
                    yield

    def _wait(self, connection: Connection) -> bool:
        """Whether a signal ended the wait."""
        try:
            return bool(connection.exec_driver_sql(_WAIT).scalar())
        except exc.OperationalError as error:
            if error.connection_invalidated or getattr(error.orig, "args", (0,))[0] not in (1317, 1969):
                raise
            return True

    def _send(self, driver: Any) -> None:
        _end_waits(driver, except_id=self._id)

    def end(self) -> None:
        super().end()
        with suppress(Exception), self._database.read() as connection:
            connection.exec_driver_sql(f"KILL QUERY {self._id:d}")


def _end_waits(driver: Any, *, except_id: int = 0) -> None:
    """Ends the wait of every process on the same database, except that of connection ``except_id``; ``driver``: a
    connection without a transaction."""
    with driver.cursor() as cursor:
        cursor.execute(_SLEEPERS, (f"SELECT {_MARK} %",))
        for (each,) in cursor.fetchall():
            if int(each) == except_id:
                continue
            with suppress(Exception):  # the statement has ended by itself
                cursor.execute(f"KILL QUERY {int(each):d}")


def _channel(database: Database) -> Channel:
    if database.is_sqlite:
        assert database.path is not None
        return SqliteChannel(database.path.with_name(database.path.name + ".bell"))
    return PostgresqlChannel(database) if database.dialect == "postgresql" else MariadbChannel(database)
