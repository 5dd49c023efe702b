"""Faults of a database server, each at a moment that the test names, and a process that stands still."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from support.proxy import Proxy

from asynctask import AsyncTask
from asynctask.errors import Unavailable
from asynctask.testing import PATIENCE_S, wait_for
from benchmarks.servers import SqlServer

T = TypeVar("T")


@dataclass(frozen=True)
class Moment:
    """A statement of the program: what it begins with, a word in it, and the thread that says it (any, if empty)."""

    begins: str | tuple[str, ...]
    word: str = ""
    thread: str = ""

    def is_now(self, statement: str) -> bool:
        said = " ".join(statement.replace('"', "").replace("`", "").split())
        return (
            said.startswith(self.begins) and self.word in said and threading.current_thread().name.startswith(self.thread)
        )


MOMENTS = {
    "create": Moment("INSERT INTO tasks"),
    "slice": Moment("UPDATE tasks SET", "split_cursor="),
    "seal": Moment("UPDATE tasks SET state=", thread="split-"),
    "borrow": Moment("UPDATE tasks SET next_seq=", thread="borrower"),
    "flush": Moment(("UPDATE events", "UPDATE JSON_TABLE"), thread="recorder"),
    "close": Moment("UPDATE tasks SET", "closed_at="),
    "turn": Moment("UPDATE tasks SET", "turning="),
    "turn on": Moment("UPDATE tasks SET turn_cursor="),
}
"""The writes on the way of an item, each in a transaction of its own. A borrow that does not reach the end of a list is one
statement without COMMIT: see :func:`borrows_struck`."""

OF_SPLITS = ("slice", "seal")
"""Those of lists that do not fit one slice."""

_BORROW = {"postgresql": "WITH t AS MATERIALIZED", "mariadb": "BEGIN NOT ATOMIC"}
"""How a borrow in one statement begins."""


def patiently(act: Callable[[], T], reason: str, timeout: float = PATIENCE_S) -> T:
    """Does it again until it is true, also while the database is away."""

    def tried() -> T | None:
        with suppress(Unavailable):
            return act()
        return None

    found = wait_for(tried, reason, timeout)
    assert found is not None
    return found


@contextmanager
def struck(app: AsyncTask, moment: Moment, blow: Callable[[Any], None], *, nth: int = 1) -> Iterator[threading.Event]:
    """Has a blow fall just before the nth statement of that moment; it is given the driver's connection."""
    left, lock, fell = nth, threading.Lock(), threading.Event()

    def executed(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        nonlocal left
        if not moment.is_now(statement):
            return
        with lock:
            left -= 1
            now = left == 0
        if now:
            blow(connection.connection.driver_connection)
            fell.set()

    engine = app.ledger.database.engine
    sa.event.listen(engine, "before_cursor_execute", executed)
    try:
        yield fell
    finally:
        sa.event.remove(engine, "before_cursor_execute", executed)


class Restart:
    """Ends a server, by ``stop`` or ``kill``, and brings it back while the program goes on."""

    def __init__(self, server: SqlServer, how: str) -> None:
        self._server, self._how = server, how
        self._back = threading.Event()
        self._failed: list[BaseException] = []

    def __call__(self, _connection: Any) -> None:
        getattr(self._server, self._how)()
        threading.Thread(target=self._start, daemon=True).start()

    def _start(self) -> None:
        # The server is tied to the life of the thread that starts it, so this one stays.
        try:
            self._server.start()
        except BaseException as error:
            self._failed.append(error)
        self._back.set()
        threading.Event().wait()

    def wait(self) -> None:
        """Until it is back."""
        assert self._back.wait(120)
        assert not self._failed, self._failed


def port_of(driver_connection: Any) -> int:
    """The client's own port of a connection."""
    pgconn = getattr(driver_connection, "pgconn", None)
    if pgconn is None:
        return int(driver_connection._sock.getsockname()[1])
    with socket.socket(fileno=os.dup(pgconn.socket)) as copy:
        return int(copy.getsockname()[1])


@contextmanager
def borrows_struck(app: AsyncTask, proxy: Proxy, blow: str | Callable[[], None]) -> Iterator[None]:
    """The first borrow in one statement does not arrive (BEFORE), is not answered (AFTER), or something falls on it.

    ``proxy.fell`` tells that it happened.
    """
    begins = _BORROW[app.ledger.database.dialect]

    def executed(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith(begins) and "loans" in statement and not proxy.fell.is_set():
            proxy.watch((b"",), blow, port=port_of(connection.connection.driver_connection))

    sa.event.listen(app.ledger.database.engine, "before_cursor_execute", executed)
    try:
        yield
    finally:
        sa.event.remove(app.ledger.database.engine, "before_cursor_execute", executed)


@contextmanager
def commits_lost(app: AsyncTask, proxy: Proxy, moment: Moment, when: str, *, nth: int = 1) -> Iterator[threading.Event]:
    """Loses the COMMIT, or its answer, of the nth transaction with such a statement."""
    left, lock, fell = nth, threading.Lock(), threading.Event()
    marked: set[int] = set()

    def executed(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        nonlocal left
        me = threading.get_ident()
        if moment.is_now(statement):
            marked.add(me)
        elif statement == "ROLLBACK":
            marked.discard(me)
        elif statement == "COMMIT" and me in marked:
            marked.discard(me)
            with lock:
                left -= 1
                now = left == 0
            if now:
                proxy.cut(port_of(connection.connection.driver_connection), when)
                fell.set()

    engine = app.ledger.database.engine
    sa.event.listen(engine, "before_cursor_execute", executed)
    try:
        yield fell
    finally:
        sa.event.remove(engine, "before_cursor_execute", executed)


def stop(pid: int) -> None:
    """Stops a process and waits until it has stopped: on a busy machine its other threads go on until the one that takes
    the signal has run."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: _all_stopped(pid), "each of its threads has stopped")


def _all_stopped(pid: int) -> bool:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return all((thread / "stat").read_text().rpartition(")")[2].split()[0] == "T" for thread in threads)
