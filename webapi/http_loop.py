"""The web server: a non-blocking loop reads requests whole, a pool of threads answers them, slow clients are disconnected.

The loop never waits for a client: a silent connection costs neither a thread nor time, so hundreds of slow or idle clients
do not delay the others.
"""

from __future__ import annotations

import errno
import io
import logging
import queue
import resource
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from email.utils import formatdate
from enum import Enum
from functools import lru_cache
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from waitress.buffers import OverflowableBuffer
from waitress.parser import HTTPRequestParser

from asynctask.clock import SECOND, Clock
from asynctask.runtime.supervisor import Wakeup
from webapi.problems import server_problem

MAX_CONNECTIONS: Final = 2_000
"""Beyond it, the connection that has waited longest for its next request is closed."""

SPARE_DESCRIPTORS: Final = 256
"""Reserved for databases, uploads and reports; a connection may need two: the socket and a temporary file."""

GRACE_S: Final = 20.0
_CHECK_S: Final = 1.0
_log = logging.getLogger(__name__)


class HttpLoop:
    """A server on ``listener``; calls ``application`` in ``threads`` threads.

    ``body_limit``: the longest body by method, path and Content-Type; ``storage``: total bytes buffered for slow clients;
    ``beat``: called at least once a second while it runs; ``most``: open connections, by default as many as the limit of
    open files allows.
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
        self.application = application
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self.clock = clock
        self._listener = listener
        self._beat = beat
        self._wakeup = Wakeup()
        self._connections: dict[int, Connection] = {}
        self._accepts = False  # whether the listener is registered
        self._most = most or _most_connections()
        self._work: queue.SimpleQueue[tuple[Connection, IncomingRequest] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._answer, name="http", daemon=True) for _ in range(threads)]

    def stop(self) -> None:
        """Makes :meth:`run` finish the current requests and return. Safe in a signal handler."""
        self._wakeup.set()

    def run(self) -> None:
        """Serves until :meth:`stop`, then for at most :data:`GRACE_S` more."""
        self._listener.setblocking(False)
        self.poll.register(self._wakeup.fileno(), select.EPOLLIN)
        for thread in self._threads:
            thread.start()
        next_check = 0.0
        stop_at = float("inf")
        while (now := self.now()) < stop_at and not (self.stopping and not self._connections):
            if now >= next_check:
                next_check = now + _CHECK_S
                if not self._accepts and not self.stopping:
                    self.poll.register(self._listener.fileno(), select.EPOLLIN)
                    self._accepts = True
                self._beat()
                self._close_late(now)
            for descriptor, _ in self.poll.poll(0.05 if self.stopping else _CHECK_S, 256):
                self._ready(descriptor)
            if self._wakeup.is_set and not self.stopping:
                stop_at = self.now() + GRACE_S
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
                    if not self._make_room():  # the next check tries again: until then every poll would end at once
                        self._deafen()
                return  # else the client disconnected meanwhile
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections[sock.fileno()] = Connection(self, sock, address[:2])

    def _deafen(self) -> None:
        if self._accepts:
            self.poll.unregister(self._listener.fileno())
            self._accepts = False

    def _make_room(self) -> bool:
        """Closes the connection that has waited longest for its next request, uploads in progress last; whether there was
        one."""
        waiting = [c for c in list(self._connections.values()) if c.phase in (Phase.READING, Phase.LINGERING)]
        if waiting:
            min(waiting, key=lambda c: (c.moved > IN_MEMORY, c.since)).close()
        return bool(waiting)

    def _close_late(self, now: float) -> None:
        for connection in list(self._connections.values()):
            if now > connection.deadline:
                connection.on_late()

    def _begin_stop(self) -> None:
        self.stopping = True
        self._deafen()
        self._listener.close()
        for connection in list(self._connections.values()):
            if connection.idle or connection.phase is Phase.LINGERING:
                connection.close()

    # -- called by connections

    def submit(self, connection: Connection, request: IncomingRequest) -> None:
        """Queues a complete request for the threads."""
        self._work.put((connection, request))

    def forget(self, connection: Connection) -> None:
        """Removes a connection before it is closed."""
        self._connections.pop(connection.socket.fileno(), None)

    # -- threads

    def _answer(self) -> None:
        while (work := self._work.get()) is not None:
            connection, request = work
            try:
                respond(self, connection, request)
            except BaseException:  # the thread must survive, or the pool shrinks
                _log.exception("a connection is given up")
                connection.close()


def _most_connections() -> int:
    """How many connections the limit of open files allows; raises the soft limit as far as needed and permitted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MAX_CONNECTIONS + SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(16, min(MAX_CONNECTIONS, (soft - SPARE_DESCRIPTORS) // 2))


# -- connection
#
# Either the loop or one thread owns a connection. The loop reads a request without blocking and hands it over when it is
# complete. The answering thread sends as much as the socket takes at once, leaves the rest to the loop and is free again.

_RECEIVE: Final = 65_536
_SEND: Final = 262_144

IDLE_S: Final = 60.0
"""A client's time for one request or answer, in addition to that of its bytes by :data:`BYTES_PER_S`."""

BYTES_PER_S: Final = 1_000
"""A client slower than this over its whole request or answer is disconnected."""

LINGER_S: Final = 10.0
LINGER_BYTES: Final = 1_073_741_824
"""Bytes of a refused client's request that are still read and dropped: otherwise it would not read the answer."""


class ClientGone(ConnectionResetError):
    """The connection is closed; the rest of the answer has no recipient."""


class Phase(Enum):
    """The current use of a connection."""

    READING = "reading"
    ANSWERING = "answering"
    LINGERING = "lingering"
    CLOSED = "closed"


class Storage:
    """Total bytes of requests and answers buffered for slow clients."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept = 0
        self._changed = threading.Condition()

    @property
    def full(self) -> bool:
        """Whether the limit is exceeded."""
        return self._kept > self._limit

    def add(self, count: int) -> None:
        """Adds ``count`` bytes, or releases them if negative."""
        with self._changed:
            self._kept += count
            if count < 0:
                self._changed.notify_all()

    def wait(self, given_up: Callable[[], bool]) -> None:
        """Blocks while full, until ``given_up()``: back-pressure on the answering threads."""
        with self._changed:
            while self.full and not given_up():
                self._changed.wait(1.0)


class Connection:
    """One client. The loop calls the methods ``on_...``; the answering thread calls ``write`` and ``answered``."""

    def __init__(self, loop: HttpLoop, sock: socket.socket, address: tuple[str, int]) -> None:
        self.socket, self.address = sock, address
        self.phase = Phase.READING
        self.since = loop.now()
        """Start of this phase."""
        self.moved = 0
        """Bytes received or sent since then."""
        self._loop = loop
        self._lock = threading.RLock()
        self._request: IncomingRequest | None = None
        self._pipelined = b""  # received after the current request
        self._out: OverflowableBuffer | None = None
        self._done = self._close_after = False
        loop.poll.register(sock.fileno(), select.EPOLLIN | select.EPOLLONESHOT)

    @property
    def idle(self) -> bool:
        """Whether no byte of a next request has arrived."""
        return self.phase is Phase.READING and self._request is None

    @property
    def deadline(self) -> float:
        """When the connection is closed unless more bytes move."""
        if self.phase is Phase.ANSWERING and self._out is None:
            return float("inf")
        if self.phase is Phase.LINGERING:
            return self.since + (1.0 if self._loop.stopping else LINGER_S)
        return self.since + IDLE_S + self.moved / BYTES_PER_S

    # -- called by the loop

    def on_ready(self) -> None:
        """The socket is readable or writable."""
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
        """The deadline has passed: refuses an incomplete request, closes any other connection."""
        with self._lock:
            if self.phase is Phase.READING and self._request is not None:
                detail = f"the request took over {IDLE_S:g} s and one second for each {BYTES_PER_S:,} bytes; send it faster"
                self._refuse(Refusal(408, "request_timeout", detail))
            else:
                self.close()

    def close(self) -> None:
        """Closes the connection in any phase; idempotent."""
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
        """Releases the storage of a request's body."""
        self._loop.storage.add(-request.body_bytes_received)
        request.close()

    def _read(self) -> None:
        try:
            data = self.socket.recv(_RECEIVE)
        except BlockingIOError:
            self._wait_for(select.EPOLLIN)
            return
        if data:
            self._parse(data)
            return
        refusal = self._request.cut_off() if self._request is not None else None
        if refusal is None:
            self.close()
        else:
            self._refuse(refusal)

    def _parse(self, data: bytes) -> None:
        """Parses received bytes; hands over the request when it is complete."""
        while data:
            if self._request is None:
                self._request = IncomingRequest(self._loop.body_limit)
                self.since, self.moved = self._loop.now(), 0
            request = self._request
            before = request.body_bytes_received
            data = data[request.received(data) :]
            received = request.body_bytes_received - before
            self.moved += received
            self._loop.storage.add(received)
            if request.completed:
                if request.empty:
                    self._request = None
                    continue
                self._pipelined = data
                self._hand_over(request)
                return
            if received and self._loop.storage.full and request.body_bytes_received > IN_MEMORY:
                self._refuse(Refusal(503, "busy", "too many large bodies are coming in at once; try again in a moment"))
                return
            if request.expect_continue and request.headers_finished:
                request.expect_continue = False
                self.socket.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._wait_for(select.EPOLLIN)

    def _refuse(self, refusal: Refusal) -> None:
        assert self._request is not None
        self._request.refusal = refusal
        self._hand_over(self._request)

    def _hand_over(self, request: IncomingRequest) -> None:
        self._request, self.phase = None, Phase.ANSWERING
        self._done, self._close_after = False, False
        self._loop.submit(self, request)

    def _flush(self) -> None:
        """Sends buffered output as far as the socket takes it."""
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
            self._wait_for(select.EPOLLOUT)
            return
        self._out.close()
        self._out = None
        if self._done:
            self._next_phase()

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
        self._wait_for(select.EPOLLIN)

    def _wait_for(self, events: int) -> None:
        self._loop.poll.modify(self.socket.fileno(), events | select.EPOLLONESHOT)

    # -- called by the answering thread

    def write(self, data: bytes) -> None:
        """Sends what the socket takes at once and buffers the rest. Raises :class:`ClientGone`."""
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
                self._wait_for(select.EPOLLOUT)
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
        """The answer is complete; without ``keep_alive`` the connection ends after it."""
        with self._lock:
            if self.phase is Phase.CLOSED:
                return
            self._done, self._close_after = True, not keep_alive
            try:
                if self._out is None:
                    self._next_phase()
            except OSError:
                self.close()

    def _next_phase(self) -> None:
        self.since, self.moved = self._loop.now(), 0
        if self._close_after:
            self.phase = Phase.LINGERING
            self._pipelined = b""
            self.socket.shutdown(socket.SHUT_WR)
            self._wait_for(select.EPOLLIN)
            return
        self.phase = Phase.READING
        pipelined, self._pipelined = self._pipelined, b""
        if pipelined:
            self._parse(pipelined)
        elif self._loop.stopping:
            self.close()
        else:
            self._wait_for(select.EPOLLIN)


# -- request: parsed by waitress, with this server's limits and refusals

MAX_HEADER_BYTES: Final = 65_536
MAX_LINE_BYTES: Final = 32_768
"""Of the request line, which carries the options of a raw body: ``columns`` alone may have 10,000 characters."""

MAX_CHUNK_LINE: Final = 8_192
"""Of a chunk's size line and of the trailer of a chunked body: the parser keeps them in memory."""

IN_MEMORY: Final = 65_536
"""Bytes of a body kept in memory; a longer one goes to a temporary file."""

_PARSER: Final = SimpleNamespace(
    max_request_header_size=MAX_HEADER_BYTES, max_request_body_size=2**62, inbuf_overflow=IN_MEMORY, url_scheme="http"
)
_CODES: Final = {400: "malformed_request", 431: "headers_too_large", 501: "transfer_encoding_not_supported"}


class Refusal(NamedTuple):
    """An answer of the server itself: status, code and message."""

    status: int
    code: str
    detail: str


class IncomingRequest(HTTPRequestParser):  # type: ignore[misc]
    """A request that arrives in pieces. ``completed``: all of it has arrived, or ``refusal`` is set.

    ``body_limit`` gives the longest body in bytes, by method, path and Content-Type. Of a longer one only the head is kept,
    with the announced or received length: ``cut`` is set, and the application answers from the head.
    """

    def __init__(self, body_limit: Callable[[str, str, str], int]) -> None:
        super().__init__(_PARSER)
        self._body_limit = body_limit
        self._limit: int | None = None
        self.refusal: Refusal | None = None
        self.cut = False

    def received(self, data: bytes) -> int:
        """Parses the next bytes; returns how many belong to this request."""
        if not self.headers_finished:
            begun = self.header_plus + data[: MAX_LINE_BYTES + 1]
            if len(begun) > MAX_LINE_BYTES and b"\r\n" not in begun[: MAX_LINE_BYTES + 1]:
                self._refuse(Refusal(414, "uri_too_long", _TOO_LONG))
                return len(data)
        consumed = int(super().received(data))
        if self.error is not None:
            detail = str(self.error.body)
            if self.error.code == 431:
                detail = f"the headers are over the limit of {MAX_HEADER_BYTES:,} bytes; send fewer or shorter ones"
            self._refuse(Refusal(self.error.code, _CODES.get(self.error.code, "malformed_request"), detail))
        elif self.headers_finished and not self.empty:
            self._check()
        return consumed

    def cut_off(self) -> Refusal | None:
        """The answer to a client that has closed its side; None if no body was incomplete."""
        if not self.headers_finished or self.completed:
            return None
        of = f" of {self.content_length:,}" if self.content_length else ""
        detail = f"the body was cut off after {self.body_bytes_received:,}{of} bytes; send it again, whole"
        return Refusal(400, "malformed_body", detail)

    @property
    def body(self) -> Any:
        """The whole body as a file; empty if it was cut."""
        return io.BytesIO() if self.cut else self.get_body_stream()

    @property
    def keep_alive(self) -> bool:
        """Whether the connection may serve another request."""
        return not (self.connection_close or self.cut or self.refusal is not None)

    def _refuse(self, refusal: Refusal) -> None:
        self.refusal, self.completed, self.headers_finished = refusal, True, True

    def _check(self) -> None:
        if self._limit is None:
            refusal = self._head_refused()
            if refusal is not None:
                self._refuse(refusal)
                return
            self._limit = self._body_limit(self.command, self.path, self.headers.get("CONTENT_TYPE", ""))
        receiver = self.body_rcv
        if self.chunked and max(len(receiver.control_line), len(receiver.trailer)) > MAX_CHUNK_LINE:
            self._refuse(Refusal(400, "malformed_request", "a size line or the trailer of the chunked body is too long"))
        elif max(self.content_length, self.body_bytes_received if self.chunked else 0) > self._limit:
            self.headers["CONTENT_LENGTH"] = str(max(self.content_length, self.body_bytes_received))
            self.cut = self.completed = True
            self.expect_continue = False

    def _head_refused(self) -> Refusal | None:
        if self.version not in ("1.0", "1.1"):
            return Refusal(505, "http_version_not_supported", "HTTP/1.1 and HTTP/1.0 are spoken here")
        if "TRANSFER_ENCODING" in self.headers or (self.chunked and "CONTENT_LENGTH" in self.headers):
            # A server and a proxy that disagree about the length take a body for the next request (request smuggling).
            return Refusal(
                400, "malformed_request", "send either Content-Length, or with HTTP/1.1 Transfer-Encoding: chunked"
            )
        if not self.request_uri.startswith("/") and not self.proxy_netloc:
            return Refusal(400, "malformed_request", "the first line must name a path, /api/tasks for instance")
        host = self.proxy_netloc or self.headers.get("HOST", "")
        if "," in host or (not host and self.version == "1.1"):
            return Refusal(400, "malformed_request", "send exactly one Host")
        self.headers["HOST"] = host
        return None


_TOO_LONG: Final = f"the first line of the request is over the limit of {MAX_LINE_BYTES:,} bytes; ask for less at once"


# -- answer: WSGI on one side, HTTP/1.1 on the other

_BUG: Final = Refusal(500, "internal_error", "something went wrong here, and it is in the server's log")
_UNPREFIXED: Final = {"CONTENT_TYPE", "CONTENT_LENGTH"}


def respond(loop: HttpLoop, connection: Connection, request: IncomingRequest) -> None:
    """Answers ``request`` with what the application says, or with the request's refusal."""
    answer = _Answer(connection, request, loop.clock, last=loop.stopping)
    try:
        if request.refusal is not None:
            answer.refuse(request.refusal)
        else:
            _call(loop.application, _environ(loop, connection, request), answer)
    except ConnectionResetError:
        answer.keep_alive = False  # the application may have seen it first
    except Exception:
        _log.exception("%s %s failed", request.command, request.path)
        answer.fail()
    finally:
        connection.release(request)
    connection.answered(keep_alive=answer.keep_alive)


def _call(application: Any, environ: dict[str, Any], answer: _Answer) -> None:
    chunks: Iterable[bytes] = application(environ, answer.start)
    try:
        for chunk in chunks:
            if chunk:
                answer.write(chunk)
        answer.end()
    finally:
        close = getattr(chunks, "close", None)
        if close is not None:
            close()


def _environ(loop: HttpLoop, connection: Connection, request: IncomingRequest) -> dict[str, Any]:
    environ: dict[str, Any] = {
        "REQUEST_METHOD": request.command,
        "SCRIPT_NAME": "",
        "PATH_INFO": request.path,
        "QUERY_STRING": request.query,
        "REQUEST_URI": request.request_uri,
        "SERVER_NAME": loop.address[0],
        "SERVER_PORT": str(loop.address[1]),
        "SERVER_PROTOCOL": f"HTTP/{request.version}",
        "SERVER_SOFTWARE": "asynctask",
        "REMOTE_ADDR": connection.address[0],
        "REMOTE_PORT": str(connection.address[1]),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": request.body,
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
        "asynctask.socket": connection.socket,
        "asynctask.stopping": lambda: loop.stopping,
    }
    for name, value in request.headers.items():
        environ[name if name in _UNPREFIXED else f"HTTP_{name}"] = value
    return environ


class _Answer:
    def __init__(self, connection: Connection, request: IncomingRequest, clock: Clock, *, last: bool) -> None:
        self._connection = connection
        self._clock = clock
        self._head_only = getattr(request, "command", "") == "HEAD"  # a refused one may have none
        self._modern = request.version == "1.1"
        self.keep_alive = request.keep_alive and not last
        self._status = ""
        self._headers: list[tuple[str, str]] = []
        self._sent_head = self._chunked = False
        self._left: int | None = None

    def start(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], None]:
        if exc_info and self._sent_head:
            raise exc_info[1]
        if self._status and not exc_info:
            raise AssertionError("start_response was called twice")
        if any("\r" in text or "\n" in text for header in (*headers, (status, "")) for text in header):
            raise ValueError("a line break in a header")
        self._status, self._headers = status, list(headers)
        return self.write

    def refuse(self, refusal: Refusal) -> None:
        headers, body = server_problem(refusal.status, refusal.code, refusal.detail)
        self.keep_alive = False
        self.start(f"{refusal.status} {HTTPStatus(refusal.status).phrase}", headers)
        self.write(body)
        self.end()

    def fail(self) -> None:
        """Ends an answer after an exception: with a 500 if nothing was sent, else incomplete."""
        self.keep_alive = False
        if not self._sent_head:
            self._status = ""
            try:
                self.refuse(_BUG)
            except ClientGone:
                pass

    def write(self, data: bytes) -> None:
        if not self._status:
            raise AssertionError("start_response was not called before the body")
        head = b"" if self._sent_head else self._head()
        if self._has_no_body:
            data = b""
        elif self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        elif self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
        if head or data:
            self._connection.write(head + data)

    def end(self) -> None:
        if not self._status:
            raise AssertionError("start_response was not called")
        if not self._sent_head:
            self._connection.write(self._head(empty=True))
        elif self._chunked:
            self._connection.write(b"0\r\n\r\n")
        if self._left and not self._has_no_body:
            self.keep_alive = False  # fewer bytes than announced: only closing the connection shows it

    @property
    def _has_no_body(self) -> bool:
        return self._head_only or self._status[:3] in ("204", "304") or self._status[:1] == "1"

    def _head(self, *, empty: bool = False) -> bytes:
        self._sent_head = True
        names = {name.lower(): value for name, value in self._headers}
        lines = [f"HTTP/1.1 {self._status}", *(f"{name}: {value}" for name, value in self._headers)]
        if "content-length" in names:
            self._left = int(names["content-length"])
        elif not self._has_no_body:
            if empty:
                lines.append("Content-Length: 0")
            elif self._modern:
                self._chunked = True
                lines.append("Transfer-Encoding: chunked")
            else:
                self.keep_alive = False
        if "date" not in names:
            lines.append(f"Date: {_date(self._clock.now() // SECOND)}")
        if not self.keep_alive:
            lines.append("Connection: close")
        elif not self._modern:
            lines.append("Connection: keep-alive")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


@lru_cache(maxsize=2)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)
