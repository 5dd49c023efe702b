"""The loop of the web server: takes connections, reads requests whole, hands them to threads, closes who is too slow.

Nothing here waits for a client. A connection costs nothing while nothing moves on it, so some hundreds that are silent, or
send a byte a second, take no thread and no time of the others'.
"""

from __future__ import annotations

import errno
import logging
import queue
import resource
import select
import socket
import threading
from collections.abc import Callable
from typing import Any, Final

from asynctask.clock import Clock
from asynctask.runtime.lifeline import Wakeup
from webapi.connection import Connection, Phase, Storage
from webapi.http_request import IN_MEMORY, IncomingRequest
from webapi.respond import Site, respond

__all__ = ["HttpLoop"]

MAX_CONNECTIONS: Final = 2_000
"""Beyond it, the one whose request has been awaited longest makes room."""

SPARE_DESCRIPTORS: Final = 256
"""For databases, uploads, reports; each connection may need two: its own and one of a temporary file."""

GRACE_S: Final = 20.0
_LOOK_S: Final = 1.0
_log = logging.getLogger(__name__)


class HttpLoop:
    """A server on ``listener``; ``application`` is called in ``threads`` threads.

    ``body_limit`` gives the longest body by method, path and Content-Type; ``storage`` is how many bytes may be kept for
    slow clients altogether; ``beat`` is called at least once a second while it runs; ``most`` connections are open at once,
    as many as the limit of open files has room for where it is not given.
    """

    def __init__(
        self,
        application: Any,
        listener: socket.socket,
        *,
        threads: int,
        body_limit: Callable[[str, str, str], int],
        storage: int,
        clock: Clock,
        beat: Callable[[], None] = lambda: None,
        most: int | None = None,
    ) -> None:
        self.poll = select.epoll()
        self.storage = Storage(storage)
        self.stopping = False
        self.body_limit = body_limit
        self.now = clock.monotonic
        self._listener = listener
        host, port, *_ = listener.getsockname()
        self._site = Site(application, host, port, clock)
        self._beat = beat
        self._wakeup = Wakeup()
        self._connections: dict[int, Connection] = {}
        self._most = most or _most_connections()
        self._work: queue.SimpleQueue[tuple[Connection, IncomingRequest] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._answer, name="http", daemon=True) for _ in range(threads)]

    def stop(self) -> None:
        """Has :meth:`run` let the requests at hand end and return. A signal handler may call it."""
        self._wakeup.set()

    def run(self) -> None:
        """Serves until :meth:`stop`, and then for 20 s at most."""
        self._listener.setblocking(False)
        self.poll.register(self._listener.fileno(), select.EPOLLIN)
        self.poll.register(self._wakeup.fileno(), select.EPOLLIN)
        for thread in self._threads:
            thread.start()
        look_at = 0.0
        until = float("inf")
        while (now := self.now()) < until and not (self.stopping and not self._connections):
            if now >= look_at:
                look_at = now + _LOOK_S
                self._beat()
                self._close_late(now)
            for descriptor, _ in self.poll.poll(0.05 if self.stopping else _LOOK_S, 256):
                self._ready(descriptor)
            if self._wakeup.is_set and not self.stopping:
                until = self.now() + GRACE_S
                self._begin_stop()
        for connection in list(self._connections.values()):
            connection.close()
        for _ in self._threads:
            self._work.put(None)

    def _ready(self, descriptor: int) -> None:
        connection = self._connections.get(descriptor)
        if connection is not None:
            connection.on_ready()
        elif descriptor == self._wakeup.fileno():
            self._wakeup.clear()
        elif not self.stopping and descriptor == self._listener.fileno():
            self._accept()

    def _accept(self) -> None:
        for _ in range(64):
            if len(self._connections) >= self._most:
                self._make_room()
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    _log.error("no connection can be taken: %s", error)
                    self._make_room()
                return  # or the client has gone already
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections[sock.fileno()] = Connection(self, sock, address[:2])

    def _make_room(self) -> None:
        """Closes the connection whose next request has been awaited longest; uploads that get on are spared."""
        waiting = [c for c in list(self._connections.values()) if c.phase in (Phase.READING, Phase.LINGERING)]
        if waiting:
            min(waiting, key=lambda c: (c.moved > IN_MEMORY, c.since)).close()

    def _close_late(self, now: float) -> None:
        for connection in list(self._connections.values()):
            if now > connection.deadline:
                connection.on_late()

    def _begin_stop(self) -> None:
        self.stopping = True
        self.poll.unregister(self._listener.fileno())
        self._listener.close()
        for connection in list(self._connections.values()):
            if connection.idle or connection.phase is Phase.LINGERING:
                connection.close()

    # -- of connections

    def submit(self, connection: Connection, request: IncomingRequest) -> None:
        """A request is whole: the next free thread answers it."""
        self._work.put((connection, request))

    def forget(self, connection: Connection) -> None:
        """A connection is about to be closed."""
        self._connections.pop(connection.socket.fileno(), None)

    # -- threads

    def _answer(self) -> None:
        while (work := self._work.get()) is not None:
            connection, request = work
            try:
                respond(self._site, connection, request, last=self.stopping)
            except BaseException:  # a thread that ends would answer nobody any more
                _log.exception("a connection is given up")
                connection.close()


def _most_connections() -> int:
    """Raises the limit of open files as far as it is wanted and allowed; how many connections fit into it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MAX_CONNECTIONS + SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(16, min(MAX_CONNECTIONS, (soft - SPARE_DESCRIPTORS) // 2))
