"""Signals: who waits for something in the database is woken by whoever commits it, in any process.

A signal says only that it is worth looking. One can be lost (a process that dies between its commit and the ring, a
connection that is being made anew), so whoever waits looks now and then by itself; how often, the timeout of the wait says.
"""

from __future__ import annotations

import os
import select
import struct
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

__all__ = ["JOBS", "LEDGER", "RUNG", "Bell", "Channel", "Listener", "Signals", "Sleeper", "Waker", "notify"]

JOBS: Final = "jobs"
"""Something was pushed on a queue of the SQL broker: whoever fetches should look."""

LEDGER: Final = "ledger"
"""Something waits in the ledger that its writer does not dispatch by itself: whoever is on duty should look."""

TOPICS: Final = (JOBS, LEDGER)

_FIRST_LOOK_S: Final = 0.02
_LAST_LOOK_S: Final = 1.0
_RECONNECT_S: Final = (0.1, 0.5, 1.0, 2.0, 5.0)


def notify(connection: Connection, topic: str) -> None:
    """Rings for everybody who waits for ``topic`` (:data:`JOBS`, :data:`LEDGER`), once the transaction is committed.

    Call it inside the write transaction whose rows it speaks of; twice is once. Where the transaction is rolled back, a
    ring may come all the same.
    """
    if topic not in TOPICS:
        raise ValueError(f"no such topic: {topic!r}; there are {', '.join(TOPICS)}")
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SELECT pg_notify(%s, %s)", ("asynctask", topic))
    else:  # these cannot tell others by themselves: when the connection goes back to its pool, the commit is over
        connection.info.setdefault(RUNG, set()).add(topic)


class Waker:
    """Where one thread waits for one topic. Made by :meth:`Signals.waker`.

    A signal between two waits is not lost: the next :meth:`wait` returns at once.
    """

    def __init__(self, signals: Signals, topic: str) -> None:
        self.topic = topic
        self._signals = signals
        self._event = threading.Event()
        self._look_s = _FIRST_LOOK_S
        self.rung = False
        """Whether the last wait was ended by a signal, not by it being time to look."""

    def wait(self, timeout: float) -> bool:
        """Waits for at most ``timeout`` seconds; True where it is time to look, False where nothing was heard.

        Where signals cannot be relied on (a pooler that does not pass them on, a connection that is being made anew, the
        moments after one on MariaDB) it is time to look again and again: after 20 ms, then twice as long each time, up to
        a second.
        """
        self._signals.listen(self.topic)
        look, settled = self._look_s, self._look_s >= _LAST_LOOK_S
        blind = not self._signals.reliable or not (self._signals.exact or settled)
        heard = self._event.wait(min(look, timeout) if blind else timeout)
        self._event.clear()
        self.rung = heard
        self._look_s = _FIRST_LOOK_S if heard else min(look * 2, _LAST_LOOK_S)
        return heard or (blind and look < timeout)

    def wake(self) -> None:
        """Ends this wait, or the next one: something happened in this very process."""
        self._event.set()


class Signals:
    """The signals of one process on one database: at most one connection and one thread, from the first wait on.

    =============  ====================================================================================================
    database       how a signal travels
    =============  ====================================================================================================
    SQLite         a few bytes of a file beside the database, ``NAME.bell``, written after the commit and looked at by
                   each process every 10 to 20 ms where jobs wait for it, else every 50: no query, no lock
    PostgreSQL     LISTEN and NOTIFY; behind a pooler they do not arrive, which is found out and said once in the log
    MariaDB        a statement that sleeps at the server; whoever rings ends it after the commit with KILL QUERY
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
        if self._channel.ring is not None:
            event.listen(database.engine, "checkin", self._checked_in)

    @property
    def reliable(self) -> bool:
        """Whether what others ring arrives here now."""
        return self._channel.proven

    def waker(self, topic: str) -> Waker:
        """A place to wait for a topic; each waiting thread needs one of its own."""
        if topic not in TOPICS:
            raise ValueError(f"no such topic: {topic!r}; there are {', '.join(TOPICS)}")
        waker = Waker(self, topic)
        with self._lock:
            self._wakers.append(waker)
        return waker

    def wake(self) -> None:
        """Ends every wait of this process."""
        self._deliver(TOPICS)

    def close(self) -> None:
        """Ends every wait and the thread that listens, and gives back its connection."""
        self._closed.set()
        self._channel.end()
        self.wake()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(10)
        self._channel.close()

    def listen(self, topic: str) -> None:
        """Starts the thread that hears the others, if it does not run yet: somebody waits for ``topic``."""
        if topic == JOBS:
            self._channel.hurry()
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="signals", daemon=True)
                self._thread.start()

    # -- hearing

    def _deliver(self, topics: tuple[str, ...]) -> None:
        with self._lock:
            wakers = [waker for waker in self._wakers if waker.topic in topics]
        for waker in wakers:
            waker.wake()

    def _run(self) -> None:
        tries = 0
        while not self._closed.is_set():
            try:
                for topics in self._channel.heard():
                    tries = 0
                    self._deliver(topics)
                if not self._closed.is_set():
                    self._log.warning("signals_do_not_arrive", then="looking every second; is a pooler between?")
                return
            except Exception as error:
                self._channel.proven = False
                self._log.warning("signals_interrupted", error=str(error), tries=tries + 1)
                self._closed.wait(_RECONNECT_S[min(tries, len(_RECONNECT_S) - 1)])
                tries += 1

    # -- ringing

    def _checked_in(self, driver_connection: object, record: object) -> None:
        topics = getattr(record, "info", {}).pop(RUNG, None)
        if not topics or driver_connection is None or self._channel.ring is None:
            return
        try:
            self._channel.ring(driver_connection, tuple(topics))
        except Exception as error:  # the transaction is committed; whoever waits looks by itself a little later
            self._log.warning("ring_failed", error=str(error))
        self._deliver(tuple(topics))


def _channel(database: Database) -> Channel:
    if database.is_sqlite:
        assert database.path is not None
        return Bell(database.path.with_name(database.path.name + ".bell"), TOPICS)
    return Listener(database, TOPICS) if database.dialect == "postgresql" else Sleeper(database, TOPICS)


# -- How a signal travels from process to process: one way for each database. See :mod:`asynctask.database.notify`.

RUNG: Final = "asynctask_rung"
"""Under this name a connection keeps what it has to ring when it goes back to its pool."""

# How often a bell is looked at: where jobs wait for it; the same after a second of silence; where only upkeep waits for it.
_SOON_S: Final = 0.01
_CALM_S: Final = 0.02
_LATER_S: Final = 0.05
_CALM_AFTER: Final = 100
_PROBE_S: Final = 2.0
_ALIVE_S: Final = 30.0
_SLEEP_S: Final = 20.0


class Channel(Protocol):
    """One way. ``ring`` is None where the database itself tells the others; ``exact``: whatever is rung while it is proven
    arrives, also in the moments after another ring; ``proven``: what is rung arrives, as far as is known."""

    exact: bool
    proven: bool
    ring: Callable[[Any, tuple[str, ...]], None] | None

    def hurry(self) -> None:
        """From now on somebody waits for jobs here: a ring should arrive within 20 ms, not only within 50."""
        ...

    def heard(self) -> Iterator[tuple[str, ...]]:
        """Waits for rings and gives the topics of each, until :meth:`end`; ends by itself where none can arrive."""
        ...

    def end(self) -> None:
        """Ends :meth:`heard`, from another thread."""
        ...

    def close(self) -> None:
        """Gives back what it holds."""
        ...


class Bell:
    """A file with eight bytes for each topic: they are others after each ring.

    Looking costs next to nothing but waking up does, so it is looked at as seldom as those who wait can bear.
    """

    exact = True

    def __init__(self, path: Path, topics: tuple[str, ...]) -> None:
        self._path = path
        self._topics = topics
        self._size = 8 * len(topics)
        self._fd: int | None = None
        self._lock = threading.Lock()
        self._count = 0
        self._ended = threading.Event()
        self._hurried = False
        self.proven = True
        self.ring: Callable[[Any, tuple[str, ...]], None] | None = self._ring

    def _open(self) -> int:
        with self._lock:
            if self._fd is None:
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            return self._fd

    def _ring(self, _connection: Any, topics: tuple[str, ...]) -> None:
        descriptor = self._open()
        with self._lock:
            self._count += 1
            mark = struct.pack("<II", os.getpid() & 0xFFFFFFFF, self._count & 0xFFFFFFFF)
            for topic in topics:
                os.pwrite(descriptor, mark, 8 * self._topics.index(topic))

    def hurry(self) -> None:
        self._hurried = True

    def _every_s(self, silent: int) -> float:
        if not self._hurried:
            return _LATER_S
        return _CALM_S if silent >= _CALM_AFTER else _SOON_S

    def heard(self) -> Iterator[tuple[str, ...]]:
        descriptor = self._open()
        seen = os.pread(descriptor, self._size, 0)
        yield self._topics  # what was rung before it was looked at is not known
        silent = 0
        while not self._ended.wait(self._every_s(silent)):
            now = os.pread(descriptor, self._size, 0)
            silent += 1
            if now != seen:
                silent = 0
                at = [8 * i for i in range(len(self._topics))]
                yield tuple(t for t, i in zip(self._topics, at, strict=True) if now[i : i + 8] != seen[i : i + 8])
                seen = now

    def end(self) -> None:
        self._ended.set()

    def close(self) -> None:
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None


class _OwnConnection:
    """A connection beside the pool, outside any transaction, and a pipe that ends the wait for it."""

    def __init__(self, database: Database, topics: tuple[str, ...]) -> None:
        self._database = database
        self._topics = topics
        self._ended = threading.Event()
        self._read, self._write = os.pipe()
        self.proven = False

    def hurry(self) -> None:
        """It is told of a ring as soon as can be anyway."""

    def _connect(self) -> Connection:
        engine = self._database.engine
        # The pool's own way to connect, without its bound: this connection is the process's one more. Closed after use, it
        # needs no reset, which fails on a connection that broke, with a traceback in the log.
        own = sa.create_engine(
            self._database.url, creator=engine.pool._creator, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT",
            skip_autocommit_rollback=True, pool_reset_on_return=None,
        )  # fmt: skip
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
        """Waits for the connection's socket or the end; True where the socket has something."""
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.register(self._read, select.POLLIN)
        return any(found == descriptor for found, _ in poll.poll(timeout * 1_000))


class Listener(_OwnConnection):
    """PostgreSQL: LISTEN on a connection of its own. NOTIFY is part of the transaction, so nothing has to be rung after."""

    exact = True
    ring: Callable[[Any, tuple[str, ...]], None] | None = None

    def heard(self) -> Iterator[tuple[str, ...]]:
        if self._database.behind_pooler():
            return
        with self._connect() as connection:
            driver: Any = connection.connection.driver_connection
            driver.execute("LISTEN asynctask", prepare=False)
            if not self._hears_itself(driver):
                return
            self.proven = True
            yield self._topics  # what was rung before is not known
            while not self._ended.is_set():
                if self._ready(driver.pgconn.socket, _ALIVE_S):
                    driver.pgconn.consume_input()
                elif not self._ended.is_set():
                    driver.execute("SELECT 1", prepare=False)  # is it still there?
                if topics := tuple({t for t in self._notices(driver) if t in self._topics}):
                    yield topics

    def _hears_itself(self, driver: Any) -> bool:
        """Whether what another connection rings arrives here: a pooler would have LISTEN end with its statement."""
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
_SLEEPERS: Final = (
    "SELECT ID FROM information_schema.PROCESSLIST WHERE DB = DATABASE() AND COMMAND = 'Query' AND INFO LIKE %s"
)


class Sleeper(_OwnConnection):
    """MariaDB: a statement that sleeps at the server until whoever rings kills it (the statement, not the connection).

    Killing what runs under one's own user name needs no privilege. A ring between two sleeps is lost, so it is not exact.
    A kill does not say what for: whoever sleeps wakes everybody in its process. The one who rings knows, and leaves its own
    sleeper alone.
    """

    exact = False

    def __init__(self, database: Database, topics: tuple[str, ...]) -> None:
        super().__init__(database, topics)
        self.ring: Callable[[Any, tuple[str, ...]], None] | None = self._ring
        self._id = 0

    def heard(self) -> Iterator[tuple[str, ...]]:
        with self._connect() as connection:
            driver: Any = connection.connection.driver_connection
            driver._read_timeout = _SLEEP_S + _ALIVE_S  # it was told to wait for a greeting only
            self._id = int(connection.exec_driver_sql("SELECT CONNECTION_ID()").scalar_one())
            yield self._topics
            while not self._ended.is_set():
                self.proven = True
                if self._sleep(connection):
                    yield self._topics

    def _sleep(self, connection: Connection) -> bool:
        """Whether it was ended by a ring."""
        try:
            return bool(connection.exec_driver_sql(f"SELECT {_MARK} SLEEP({_SLEEP_S:g})").scalar())
        except exc.OperationalError as error:
            if error.connection_invalidated or getattr(error.orig, "args", (0,))[0] not in (1317, 1969):
                raise
            return True

    def _ring(self, driver: Any, _topics: tuple[str, ...]) -> None:
        ring_sleepers(driver, but=self._id)

    def end(self) -> None:
        super().end()
        with suppress(Exception), self._database.read() as connection:
            connection.exec_driver_sql(f"KILL QUERY {self._id:d}")


def ring_sleepers(driver: Any, *, but: int = 0) -> None:
    """Ends the sleep of every process that waits on the same database, on a connection whose transaction is over.

    ``but``: the connection of one that needs no ring.
    """
    with driver.cursor() as cursor:
        cursor.execute(_SLEEPERS, (f"SELECT {_MARK} SLEEP%",))
        for (each,) in cursor.fetchall():
            if int(each) == but:
                continue
            with suppress(Exception):  # it has just ended by itself
                cursor.execute(f"KILL QUERY {int(each):d}")
