"""One connection of a client: its requests are read whole, its answers are sent as fast as it takes them.

At each moment either the loop or one thread has the connection. The loop has it while a request comes in; it reads
without ever waiting, and hands over a request when all of it is there. The thread that answers sends what the client
takes at once, leaves the rest to the loop, and is free again.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from enum import Enum
from typing import Final, Protocol

from waitress.buffers import OverflowableBuffer

from webapi.http_request import IN_MEMORY, IncomingRequest, Refusal

__all__ = ["ClientGone", "Connection", "Loop", "Phase", "Storage"]

_RECEIVE: Final = 65_536
_SEND: Final = 262_144

IDLE_S: Final = 60.0
"""What a client gets for one request or one answer, beside the time that :data:`BYTES_PER_S` gives for its bytes."""

BYTES_PER_S: Final = 1_000
"""A client slower than that over its whole request, or answer, loses its connection."""

LINGER_S: Final = 10.0
LINGER_BYTES: Final = 1_073_741_824
"""So much that a refused client still sends is read and dropped, or it would not get to read the answer."""


class ClientGone(OSError):
    """The connection is closed: nobody takes the rest of the answer."""


class Phase(Enum):
    """What a connection is for at the moment."""

    READING = "reading"
    ANSWERING = "answering"
    LINGERING = "lingering"
    CLOSED = "closed"


class Storage:
    """Bytes of requests and answers that are kept for slow clients, of all connections together."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept = 0
        self._changed = threading.Condition()

    @property
    def full(self) -> bool:
        """Whether no more should be kept."""
        return self._kept > self._limit

    def add(self, count: int) -> None:
        """So many bytes more, or fewer."""
        with self._changed:
            self._kept += count
            if count < 0:
                self._changed.notify_all()

    def wait(self, given_up: Callable[[], bool]) -> None:
        """Waits while it is full, and until ``given_up()``."""
        with self._changed:
            while self.full and not given_up():
                self._changed.wait(1.0)


class Loop(Protocol):
    """What a connection needs of the loop."""

    poll: select.epoll
    storage: Storage
    stopping: bool

    def now(self) -> float: ...
    def body_limit(self, method: str, path: str, content_type: str) -> int: ...
    def submit(self, connection: Connection, request: IncomingRequest) -> None: ...
    def forget(self, connection: Connection) -> None: ...


class Connection:
    """One client. Methods that begin with ``on_`` are the loop's; ``write`` and ``answered`` are the thread's."""

    def __init__(self, loop: Loop, sock: socket.socket, address: tuple[str, int]) -> None:
        self.socket, self.address = sock, address
        self.phase = Phase.READING
        self.since = loop.now()
        """When this phase began."""
        self.moved = 0
        """Bytes that came or went since then."""
        self._loop = loop
        self._lock = threading.RLock()
        self._request: IncomingRequest | None = None
        self._early = b""  # what came after the request at hand
        self._out: OverflowableBuffer | None = None
        self._done = self._close_after = False
        loop.poll.register(sock.fileno(), select.EPOLLIN | select.EPOLLONESHOT)

    @property
    def idle(self) -> bool:
        """Whether nothing has come of a next request."""
        return self.phase is Phase.READING and self._request is None

    @property
    def deadline(self) -> float:
        """When the client loses its connection unless something moves."""
        if self.phase is Phase.ANSWERING and self._out is None:
            return float("inf")
        if self.phase is Phase.LINGERING:
            return self.since + (1.0 if self._loop.stopping else LINGER_S)
        return self.since + IDLE_S + self.moved / BYTES_PER_S

    # -- the loop's

    def on_ready(self) -> None:
        """The client sent something, or takes something."""
        with self._lock:
            try:
                if self.phase is Phase.READING:
                    self._read()
                elif self.phase is Phase.ANSWERING:
                    self._flush()
                elif self.phase is Phase.LINGERING:
                    self._drop()
            except OSError:
                self.close()

    def on_late(self) -> None:
        """The deadline has passed: a request under way is refused, anything else is closed."""
        with self._lock:
            if self.phase is Phase.READING and self._request is not None:
                said = f"the request took over {IDLE_S:g} s and one second for each {BYTES_PER_S:,} bytes; send it faster"
                self._refuse(Refusal(408, "request_timeout", said))
            else:
                self.close()

    def close(self) -> None:
        """Closes the connection, whatever is under way. May be called again."""
        with self._lock:
            if self.phase is Phase.CLOSED:
                return
            self.phase = Phase.CLOSED
            if self._request is not None:
                self.release(self._request)
                self._request = None
            if self._out is not None:
                self._loop.storage.add(-len(self._out))
                self._out.close()
                self._out = None
            self._loop.forget(self)
            self.socket.close()

    def release(self, request: IncomingRequest) -> None:
        """Gives back what the body of a request takes."""
        self._loop.storage.add(-request.body_bytes_received)
        request.close()

    def _read(self) -> None:
        try:
            data = self.socket.recv(_RECEIVE)
        except BlockingIOError:
            self._arm(select.EPOLLIN)
            return
        if data:
            self._take(data)
            return
        refusal = self._request.cut_off() if self._request is not None else None
        if refusal is None:
            self.close()
        else:
            self._refuse(refusal)

    def _take(self, data: bytes) -> None:
        """Gives the bytes to the request that they belong to; hands it over when it is whole."""
        while data:
            if self._request is None:
                self._request = IncomingRequest(self._loop.body_limit)
                self.since, self.moved = self._loop.now(), 0
            request = self._request
            before = request.body_bytes_received
            data = data[request.received(data) :]
            came = request.body_bytes_received - before
            self.moved += came
            self._loop.storage.add(came)
            if request.completed:
                if request.empty:
                    self._request = None
                    continue
                self._early = data
                self._hand_over(request)
                return
            if came and self._loop.storage.full and request.body_bytes_received > IN_MEMORY:
                self._refuse(Refusal(503, "busy", "too many large bodies are coming in at once; try again in a moment"))
                return
            if request.expect_continue and request.headers_finished:
                request.expect_continue = False
                self.socket.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._arm(select.EPOLLIN)

    def _refuse(self, refusal: Refusal) -> None:
        assert self._request is not None
        self._request.refusal = refusal
        self._hand_over(self._request)

    def _hand_over(self, request: IncomingRequest) -> None:
        self._request, self.phase = None, Phase.ANSWERING
        self._done, self._close_after = False, False
        self._loop.submit(self, request)

    def _flush(self) -> None:
        """Sends what the client takes of what waits."""
        if self._out is None:
            return
        try:
            while self._out:
                piece = self._out.get(_SEND)
                sent = self.socket.send(piece)
                self._out.skip(sent, True)
                self.moved += sent
                self._loop.storage.add(-sent)
        except BlockingIOError:
            self._arm(select.EPOLLOUT)
            return
        self._out.close()
        self._out = None
        if self._done:
            self._go_on()

    def _drop(self) -> None:
        for _ in range(8):
            try:
                data = self.socket.recv(_RECEIVE)
            except BlockingIOError:
                break
            self.moved += len(data)
            if not data or self.moved > LINGER_BYTES:
                self.close()
                return
        self._arm(select.EPOLLIN)

    def _arm(self, events: int) -> None:
        self._loop.poll.modify(self.socket.fileno(), events | select.EPOLLONESHOT)

    # -- the thread's

    def write(self, data: bytes) -> None:
        """Sends what the client takes at once; the rest is kept for it. Raises :class:`ClientGone`."""
        with self._lock:
            if self.phase is Phase.CLOSED:
                raise ClientGone
            if self._out is None:
                sent = self._send(data)
                if sent == len(data):
                    return
                data = data[sent:]
                self._out = OverflowableBuffer(IN_MEMORY)
                self.since, self.moved = self._loop.now(), 0
                self._arm(select.EPOLLOUT)
            self._out.append(data)
            self._loop.storage.add(len(data))
        if self._loop.storage.full:
            self._loop.storage.wait(lambda: self.phase is Phase.CLOSED or self._out is None)

    def _send(self, data: bytes) -> int:
        try:
            return self.socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self.close()
            raise ClientGone from error

    def answered(self, *, keep_alive: bool) -> None:
        """The whole answer was written; without ``keep_alive`` it was the last one."""
        with self._lock:
            if self.phase is Phase.CLOSED:
                return
            self._done, self._close_after = True, not keep_alive
            try:
                if self._out is None:
                    self._go_on()
            except OSError:
                self.close()

    def _go_on(self) -> None:
        self.since, self.moved = self._loop.now(), 0
        if self._close_after:
            self.phase = Phase.LINGERING
            self._early = b""
            self.socket.shutdown(socket.SHUT_WR)
            self._arm(select.EPOLLIN)
            return
        self.phase = Phase.READING
        early, self._early = self._early, b""
        if early:
            self._take(early)
        elif self._loop.stopping:
            self.close()
        else:
            self._arm(select.EPOLLIN)
