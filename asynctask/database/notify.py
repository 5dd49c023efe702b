"""Signals: who waits for something in the database is woken by whoever commits it, in any process.

A signal says only that it is worth looking. One can be lost (a process that dies between its commit and the ring, a
connection that is being made anew), so whoever waits looks now and then by itself; how often, the timeout of the wait says.
"""

from __future__ import annotations

import threading
from typing import Final

from sqlalchemy import event
from sqlalchemy.engine import Connection

from asynctask.database.channels import RUNG, Bell, Channel, Listener, Sleeper
from asynctask.database.engine import Database
from asynctask.logs import get_logger

__all__ = ["JOBS", "LEDGER", "Signals", "Waker", "notify"]

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
