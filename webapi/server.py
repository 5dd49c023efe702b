"""The web server: uvicorn in a child process; its parent keeps the port and replaces a child that died or hangs."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from asynctask.app import AsyncTask
from asynctask.clock import Clock
from asynctask.config import socket_path
from asynctask.errors import Unavailable
from asynctask.ledger.progress import Changed
from asynctask.logs import get_logger
from asynctask.runtime.process import collect_seldom
from asynctask.supervisor import Child, Wakeup, check_socket, listen
from webapi import create_app
from webapi.context import Slots
from webapi.front import IN_MEMORY, Front, Notifier, Polls, log_request
from webapi.problems import HttpRefusal, server_problem
from webapi.reading import longest_upload

GRACE_S: Final = 20.0
"""Seconds that the current requests have at a stop."""

HELD_S: Final = 60.0
"""Seconds without a turn of the child's loop after which it is killed: something holds its interpreter."""

MOST_FILES: Final = 64
"""Results of exports that are sent at a time; each costs an open file or a connection to a bucket, but no thread."""

_STOPS: Final = (signal.SIGTERM, signal.SIGINT)
_log: Final = get_logger("asynctask.web")


def serve(
    app: AsyncTask,
    *,
    host: str,
    port: int,
    threads: int,
    access_log: bool = False,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serves ``app`` until SIGTERM or SIGINT, then finishes current requests (20 s at most).

    ``host`` may be ``unix:/path``; ``port`` is ignored then. ``port`` 0 takes a free one. ``access_log``: whether each
    request is logged. ``ready`` is called with the address (``http://127.0.0.1:8000`` or ``unix:/path``) once connections
    are accepted. A child process answers requests with ``threads`` threads and runs the application's services; it is
    replaced if it dies. Call it in the main thread, before ``app`` is used: open connections do not survive the fork.
    Returns when the server has stopped; raises :class:`Unavailable` if the address is unavailable or the child does not
    start.
    """
    path = socket_path(host)
    listener = _listen_unix(path) if path else _listen(host, port)
    address = host if path else _address(listener, host)
    _Parent(lambda beat: _answer(app, listener, host, threads, access_log, beat), listener, app.clock.monotonic).run(
        lambda: ready(address) if ready else None
    )


def _answer(
    app: AsyncTask, listener: socket.socket, host: str, threads: int, access_log: bool, beat: Callable[[], None]
) -> None:
    slots = Slots({"report": max(1, threads // 2), "file": MOST_FILES, "follow": 0})  # followers hold no thread
    # The command has warned of an address that other machines reach.
    flask_app = create_app(app, host=host, slots=slots, allow_unprotected=True)
    server = HttpServer(
        flask_app.wsgi_app,
        listener,
        threads=threads,
        storage=threads * longest_upload(app.config),
        clock=app.clock,
        access_log=access_log,
        changed=app.changed,
        beat=beat,
    )
    # Ctrl-C in a terminal reaches this process too and has the same effect as the parent's signal. uvicorn handles both
    # while it serves, and raises them again at its end.
    for number in _STOPS:
        signal.signal(number, lambda _number, _frame: server.stop())
    app.start_services()
    collect_seldom()
    try:
        server.run()
    finally:
        app.stop_services()


# -- the server in the child


MAX_CONNECTIONS: Final = 2_000
"""Beyond it, the connection that has waited longest for its next request is closed."""

SPARE_DESCRIPTORS: Final = 256
"""Reserved for databases, uploads and reports; a connection may need two: the socket and a temporary file."""

ACCEPTED_AT_ONCE: Final = 50
"""Connections that are accepted before the loop serves those that are open."""

_BACKLOG: Final = 1024
_CHECK_S: Final = 1.0


class HttpServer(uvicorn.Server):
    """A server on ``listener`` for the WSGI ``application``, behind a :class:`Front` with ``threads`` threads.

    ``storage`` and ``access_log``: as of :class:`Front`; ``changed``: which of the followed Tasks have changed
    (:meth:`asynctask.app.AsyncTask.changed`); ``beat``: called once a second while it runs; ``most``: open connections, by
    default as many as the limit of open files allows.
    """

    def __init__(
        self,
        application: Any,
        listener: socket.socket,
        *,
        threads: int,
        storage: int,
        clock: Clock,
        access_log: bool = False,
        changed: Callable[[Mapping[int, str | None]], Mapping[int, Changed]] = lambda _: {},
        beat: Callable[[], None] = lambda: None,
        most: int | None = None,
    ) -> None:
        self.now = clock.monotonic
        self.access_log = access_log
        self._listener = listener
        self._beat = beat
        self._most = most or _most_connections()
        self._makes_room = False
        self._slowed = deque[Connection]()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="http")
        # One thread for followers and one for polls: neither waits for the other.
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="read")
        self._changed = changed
        self._notifier = Notifier(self._read, most=self._most * 3 // 4)
        front = Front(
            application,
            self._notifier,
            Polls(self._read),
            pool=self._threads,
            threads=threads,
            storage=storage,
            now=self.now,
            access_log=access_log,
        )
        protocol: Any = partial(Connection, self)
        super().__init__(
            uvicorn.Config(
                front,
                http=protocol,
                ws="none",
                loop="asyncio",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                log_level=logging.CRITICAL,  # the front logs what fails; the rest is what strangers send
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=ACCEPTED_AT_ONCE,
                timeout_keep_alive=24 * 3600,  # its connections have time limits of their own
            )
        )

    async def _read(self, known: Mapping[int, str | None]) -> Mapping[int, Changed]:
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._changed, known)

    def stop(self) -> None:
        """Makes :meth:`run` finish the current requests and return. Safe in a signal handler."""
        self.should_exit = True

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until :meth:`stop`, then for at most :data:`GRACE_S` more."""
        try:
            super().run(sockets or [self._listener])
        finally:
            for each in (self._threads, self._readers):
                each.shutdown(wait=False, cancel_futures=True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts connections, and checks each second how long each has waited."""
        self._watch = asyncio.get_running_loop().create_task(self._check())
        await super().startup(sockets)
        self._listener.listen(_BACKLOG)  # asyncio accepts as many in one turn of the loop as wait at most

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends streams and long polls, then waits for the other answers."""
        asyncio.get_running_loop().call_later(GRACE_S, self._give_up)
        await self._notifier.stop()
        await super().shutdown(sockets)
        self._watch.cancel()

    def make_room(self) -> None:
        """Closes those beyond the most that have waited longest for their next request, uploads in progress last."""
        # Once for all that were accepted together: to look at each connection for each of them would hold the loop.
        if len(self.server_state.connections) > self._most and not self._makes_room:
            self._makes_room = True
            asyncio.get_running_loop().call_soon(self._make_room)

    def _make_room(self) -> None:
        self._makes_room = False
        open_ones = [each for each in self._open() if not each.gone]
        waiting = sorted(
            (each for each in open_ones if each.waits), key=lambda each: (each.received > IN_MEMORY, each.since)
        )
        for each in waiting[: max(0, len(open_ones) - self._most)]:
            each.transport.abort()

    def slow_down(self, connection: Connection) -> None:
        """Reads on from a connection that costs much to parse when its turn comes: one of all such each :data:`TURN_S`."""
        connection.transport.pause_reading()
        self._slowed.append(connection)
        if len(self._slowed) == 1:
            asyncio.get_running_loop().call_later(TURN_S, self._next_turn)

    def _next_turn(self) -> None:
        while self._slowed and self._slowed[0].gone:
            self._slowed.popleft()
        if not self._slowed:
            return
        connection = self._slowed.popleft()
        if not connection.flow.read_paused:  # else uvicorn reads on when it can
            connection.transport.resume_reading()
        if self._slowed:
            asyncio.get_running_loop().call_later(TURN_S, self._next_turn)

    def _open(self) -> list[Connection]:
        return [each for each in list(self.server_state.connections) if isinstance(each, Connection)]

    def _give_up(self) -> None:
        for each in self._open():
            each.transport.abort()

    async def _check(self) -> None:
        while True:
            self._beat()
            now = self.now()
            for each in self._open():
                try:
                    each.check(now)
                except Exception as error:  # the others must be checked, and the parent must hear of the loop
                    _log.exception("connection_unchecked", error=type(error).__name__)
                    each.transport.abort()
            await asyncio.sleep(_CHECK_S)


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


# -- one connection
#
# uvicorn parses with llhttp, Node's parser. Neither has limits of size, nor of time but between requests: those are here.

MAX_HEADERS: Final = 100
"""Of a head, and of the trailer. A header of three bytes costs as much to parse as one of a hundred."""

MAX_HEADER_BYTES: Final = 65_536
"""Of a head, and of what comes between two pieces of a body: sizes of chunks, their extensions, the trailer."""

MAX_LINE_BYTES: Final = 32_768
"""Of the request line, which carries the options of a raw body: ``columns`` alone may have 10,000 characters."""

MAX_PIPELINED: Final = 20
"""Requests that a client may send before the first is answered. A short one holds a hundred times its bytes."""

IDLE_S: Final = 60.0
"""A client's time for one request or answer, in addition to that of its bytes by :data:`BYTES_PER_S`."""

BYTES_PER_S: Final = 1_000
"""A client slower than this over its whole request or answer is disconnected."""

LINGER_S: Final = 10.0
LINGER_BYTES: Final = 1_073_741_824
"""Bytes of a refused client's request that are still read and dropped: otherwise it would not read the answer."""

MAX_PIECES: Final = 256
TURN_S: Final = 0.02
"""Connections that send more pieces of a body at once, in tiny chunks, are read one after the other, with this pause: a
chunk costs the same however short it is."""

_RECEIVE: Final = 16_384
_LATE: Final = HttpRefusal(
    408,
    "request_timeout",
    f"the request took over {IDLE_S:g} s and one second for each {BYTES_PER_S:,} bytes; send it faster",
)
_LONG_LINE: Final = HttpRefusal(
    414,
    "uri_too_long",
    f"the first line of the request is over the limit of {MAX_LINE_BYTES:,} bytes; ask for less at once",
)
_LONG_HEAD: Final = HttpRefusal(
    431,
    "headers_too_large",
    f"the headers are over the limit of {MAX_HEADERS} or of {MAX_HEADER_BYTES:,} bytes; send fewer or shorter ones",
)
_LONG_CHUNK: Final = HttpRefusal(400, "malformed_request", "a size line or the trailer of the chunked body is too long")
_PIPELINED: Final = HttpRefusal(
    400, "malformed_request", f"send no more than {MAX_PIPELINED} requests before you have read an answer"
)


class RefusedRequest(Exception):
    """Raised in the parser's callbacks: the request is refused for a reason of its own."""

    def __init__(self, refusal: HttpRefusal) -> None:
        super().__init__(refusal.detail)
        self.refusal = refusal


class Connection(HttpToolsProtocol):
    """One client of uvicorn's, with limits. ``server``: that which it belongs to; the other arguments are uvicorn's.

    Whatever the parser raises is an answer to its connection alone, after those to the requests before it. A refused client
    is read to its end, within limits: it reads the answer only after it has sent its request.
    """

    def __init__(self, server: HttpServer, config: Any, server_state: Any, app_state: Any, _loop: Any = None) -> None:
        super().__init__(config, server_state, {"connection": self}, _loop)
        self.since = server.now()
        """Start of what the connection waits for."""
        self.received = 0
        """Bytes received since then."""
        self.sent = 0
        """Bytes of the bodies of answers."""
        self.when_left: Callable[[], None] = lambda: None
        """Called when the client has closed its side, or the connection is lost."""
        self._server = server
        self._receiving = self._in_head = False  # whether a request has begun and is not complete
        self._headers = self._head_bytes = 0
        self._pieces = 0  # of bodies, in what was received last
        self._unparsed = 0  # bytes received since the last head or piece of a body was complete
        self._unanswered = 0
        self._half_closed = False
        self._refusal: HttpRefusal | None = None  # waits for the answers to the requests before it
        self._lingers_next = self._lingers = False
        self._data = b""  # what is being parsed
        self._framing = b""  # the header that says how long the body of the current request is
        self._resumes = False  # whether the parser is fed a head of our own
        self._slow: tuple[float, int] | None = None  # since when bytes wait for the client, and how many it had got then

    @property
    def gone(self) -> bool:
        """Whether the connection is closed. A client that has closed its side alone still reads. Any thread may ask."""
        return self.transport.is_closing()

    @property
    def left(self) -> bool:
        """Whether the client has closed its side of the connection, so that it follows no Task any more."""
        return self._half_closed or self.gone

    @property
    def is_unix(self) -> bool:
        """Whether it came over a Unix socket: its clients have no address."""
        return self.server is not None and self.server[1] is None

    @property
    def address(self) -> str:
        """The client's address; empty if it has none."""
        return self.client[0] if self.client else ""

    @property
    def waits(self) -> bool:
        """Whether it waits for its client to send something, not for the application."""
        return self._lingers or self._unanswered == (1 if self._receiving and not self._in_head else 0)

    def abort(self) -> None:
        """Closes the connection in the middle of an answer, so that it does not look complete."""
        if not self._lingers:
            self.transport.abort()

    def linger(self) -> None:
        """Makes the answer that has begun the last one, and drops what the client still sends."""
        # uvicorn would close the socket after the answer; a client that still sends would lose the answer then.
        self.cycle.keep_alive = self._lingers_next = True

    def until_close(self) -> None:
        """Makes the answer that begins end with the connection: HTTP/1.0 knows no chunks."""
        self.cycle.chunked_encoding, self.cycle.expected_content_length = False, sys.maxsize

    def end_with(self, count: int) -> None:
        """Says that so many bytes are the last ones of such an answer."""
        self.cycle.expected_content_length = count

    def check(self, now: float) -> None:
        """Refuses or closes the connection if its client is too slow."""
        waiting = self.transport.get_write_buffer_size()
        if not waiting:
            self._slow = None
        elif self._slow is None:
            self._slow = now, self.sent - waiting
        elif now > self._slow[0] + IDLE_S + (self.sent - waiting - self._slow[1]) / BYTES_PER_S:
            self.transport.abort()
        if self._lingers:
            if now > self.since + (1.0 if self._server.should_exit else LINGER_S) or self.received > LINGER_BYTES:
                self.transport.abort()
        elif self.waits and now > self.since + IDLE_S + self.received / BYTES_PER_S:
            if self._receiving:
                self._refuse(_LATE)
            else:
                self.transport.close()

    # -- what the event loop calls

    def connection_made(self, transport: Any) -> None:
        transport.max_size = _RECEIVE  # parsing tiny chunks must not hold the loop for long
        super().connection_made(transport)
        if self.client is None and not self.is_unix:
            transport.abort()  # it is gone, and without its address it would pass for a client of a Unix socket
        self._server.make_room()

    def data_received(self, data: bytes) -> None:
        if self._lingers or self._refusal is not None:
            self.received += len(data)
            return
        self._unparsed += len(data)
        self._pieces, self._data = 0, data
        try:
            super().data_received(data)
        except Exception as error:  # whatever it is, it ends this connection alone
            self._refuse(_refusal_of(error))
        self.received += len(data)
        if self._unparsed > MAX_HEADER_BYTES:
            long_line = self._in_head and len(self.url) > MAX_LINE_BYTES
            self._refuse(_LONG_LINE if long_line else _LONG_HEAD if self._in_head else _LONG_CHUNK)
        if self._pieces > MAX_PIECES:
            self._server.slow_down(self)

    def eof_received(self) -> bool:  # type: ignore[override]
        self._half_closed = True
        self.when_left()
        if self._receiving and not self._in_head and not self._lingers:
            detail = f"the body was cut off after {self.received:,} bytes; send it again, whole"
            self._refuse(HttpRefusal(400, "malformed_body", detail))
            return True
        return self._unanswered > 0  # the client waits for the answers

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves the timer of a broken connection, and the timer keeps all this
        self.when_left()

    # -- what the parser calls

    def on_message_begin(self) -> None:
        if self._resumes:
            return
        super().on_message_begin()
        self._framing = b""
        self._receiving = self._in_head = True
        self._headers = self._head_bytes = 0
        if not self._unanswered:
            self.since, self.received = self._server.now(), 0

    def on_url(self, url: bytes) -> None:
        if not self._resumes:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._resumes:
            return
        self._headers += 1
        self._head_bytes += len(name) + len(value)
        if self._headers > MAX_HEADERS or self._head_bytes > MAX_HEADER_BYTES:
            raise RefusedRequest(_LONG_HEAD if self._in_head else _LONG_CHUNK)
        if self._in_head:  # a trailer of a body is no header: what a proxy removes from those may stand in it
            super().on_header(name, value)
            if name.lower() in (b"content-length", b"transfer-encoding"):
                self._framing = name + b": " + value

    def on_headers_complete(self) -> None:
        if self._resumes:
            return
        if len(self.url) > MAX_LINE_BYTES:
            raise RefusedRequest(_LONG_LINE)
        if len(self.pipeline) >= MAX_PIPELINED:
            raise RefusedRequest(_PIPELINED)
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # its clients know no such answer (RFC 9110, 10.1.1)
        authority = b""
        if not self.url.startswith(b"/"):
            parsed = httptools.parse_url(self.url)
            authority = (parsed.host or b"") + (b":%d" % parsed.port if parsed.port else b"")
        self.scope["state"] |= {"target": self.url, "authority": authority}
        super().on_headers_complete()
        self._in_head = False
        self._headers = 0  # of the trailer, from here on
        self._unanswered += 1
        self._unparsed = 0

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._unparsed = 0
        self._pieces += 1

    def on_message_complete(self) -> None:
        if self._framing and self.parser.should_upgrade():
            return  # the body follows
        super().on_message_complete()
        self._receiving = False
        self._unparsed = 0

    def _unsupported_upgrade_warning(self) -> None:
        """Goes on in this protocol; uvicorn calls it where a client offers another one, as Java's does with each request.

        The parser takes what follows the head for the other protocol. A new one gets the body.
        """
        error = sys.exception()
        assert isinstance(error, httptools.HttpParserUpgrade)
        rest = self._data[error.args[0] :]
        if self._framing:
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._resumes = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + self._framing + b"\r\n\r\n")
            self._resumes = False
        if rest:
            self._data = rest
            super().data_received(rest)

    def send_400_response(self, msg: str) -> None:
        """Refuses what the parser does not take; uvicorn calls it while it handles the parser's error."""
        self._refuse(_refusal_of(sys.exception()))

    # -- answers

    def on_response_complete(self) -> None:
        self._unanswered -= 1
        self.since, self.received = self._server.now(), 0
        if self._lingers_next:
            self._linger()
        elif self._refusal is not None and not self._unanswered:
            self._send_refusal()
        else:
            super().on_response_complete()
            if self._half_closed and not self._unanswered:
                self.transport.close()

    def _refuse(self, refusal: HttpRefusal) -> None:
        if self._refusal is not None or self._lingers or self.transport.is_closing():
            return
        self._refusal = refusal
        if self._receiving and not self._in_head and not self._forget_request():
            self.transport.abort()
        elif not self._unanswered:
            self._send_refusal()

    def _forget_request(self) -> bool:
        """Takes the incomplete request back from the application; False if its answer has begun."""
        if self.cycle.response_started:
            return False
        assert self._refusal is not None
        if self.pipeline and self.pipeline[0][0] is self.cycle:
            self.pipeline.popleft()
        else:
            self.cycle.scope["state"]["refused"] = self._refusal.status  # for the front, which logs it
        self.cycle.disconnected = True
        self.cycle.waiting_for_100_continue = False  # uvicorn would tell it to go on, after the refusal
        self.cycle.message_event.set()
        self._unanswered -= 1
        return True

    def _send_refusal(self) -> None:
        assert self._refusal is not None
        headers, body = server_problem(*self._refusal)
        status = self._refusal.status
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in headers]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        if self._server.access_log:
            scope: Mapping[str, Any] = self.scope if self._receiving else {}
            if "refused" not in scope.get("state", {}):
                log_request(scope, self, {}, status, self._server.now() - self.since)
        self._linger()

    def _linger(self) -> None:
        if self._half_closed:
            self.transport.close()  # it sends no more, and nothing would tell when it has gone
            return
        self._lingers, self.since, self.received = True, self._server.now(), 0
        self.flow.resume_reading()
        self.transport.resume_reading()  # even if it waits for its turn: what comes is dropped, and costs nothing
        try:
            self.transport.write_eof()
        except OSError:  # the client has reset the connection, and the loop has not read it yet
            self.transport.abort()


def _refusal_of(error: BaseException | None) -> HttpRefusal:
    """The answer to what the parser raised; what a callback raised is its context."""
    cause = error.__context__ if error is not None else None
    if isinstance(cause, RefusedRequest):
        return cause.refusal
    return HttpRefusal(400, "malformed_request", f"this is no HTTP request: {error}")


# -- the parent


class _Parent:
    """Keeps one child at work on the listener: replaces it when it dies or hangs, stops it at the end."""

    def __init__(
        self, child: Callable[[Callable[[], None]], None], listener: socket.socket, monotonic: Callable[[], float]
    ) -> None:
        self._perform = child
        self._listener = listener
        self._file = _file_of(listener)
        self._monotonic = monotonic
        self._wakeup = Wakeup()
        self._child = Child()
        self._pid = -1
        self._up = self._hopeless = False

    def run(self, started: Callable[[], None]) -> None:
        """Runs until SIGTERM or SIGINT. ``started`` is called after the first fork."""
        for number in _STOPS:
            signal.signal(number, lambda _number, _frame: self._wakeup.set())
        signal.signal(signal.SIGCHLD, lambda _number, _frame: self._wakeup.notify())
        self._start()
        started()
        while not self._wakeup.is_set:
            self._listen(1.0)
            if self._ended():
                self._replace()
            elif self._monotonic() - self._child.heard > HELD_S:
                _log.error("web_process_blocked", pid=self._pid)
                os.kill(self._pid, signal.SIGKILL)
        self._close()
        self._stop()

    def _start(self) -> None:
        ours, theirs = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        # A signal before the child has its own handlers would be lost in those inherited from the parent.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        pid = os.fork()
        if pid == 0:
            for number in (*_STOPS, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
            os.close(ours)
            self._run_child(theirs)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        os.close(theirs)
        os.set_blocking(ours, False)
        self._pid, self._child.pulse = pid, ours
        self._child.started = self._child.heard = self._monotonic()

    def _run_child(self, pulse: int) -> None:
        """Never returns."""
        self._wakeup.close()
        os.set_blocking(pulse, False)
        parent = os.getppid()

        def beat() -> None:
            try:
                os.write(pulse, b".")
            except (BlockingIOError, BrokenPipeError):
                pass
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)

        self._perform(beat)
        # Do not return into the code after the caller's serve().
        raise SystemExit(0)

    def _listen(self, seconds: float) -> None:
        for child in listen(self._wakeup, [self._child], seconds):
            self._up = bool(child.read(self._monotonic())) or self._up

    def _ended(self) -> bool:
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid:
            # A child that exited by itself before its first turn would do so again; a killed one would not.
            self._hopeless = not self._up and os.waitstatus_to_exitcode(status) >= 0
        return pid != 0

    def _replace(self) -> None:
        pause = self._child.ended(self._monotonic())
        if self._hopeless:
            self._close()
            raise Unavailable("the serving process does not start; its output says why")
        _log.error("web_process_died", pid=self._pid, restart_in_s=pause)
        until = self._monotonic() + pause
        while not self._wakeup.is_set and (left := until - self._monotonic()) > 0:
            self._wakeup.wait(left)
        self._pid = -1
        if not self._wakeup.is_set:
            self._start()

    def _close(self) -> None:
        """Closes the listener, and removes the file of a Unix socket unless it has become another's."""
        if self._file is not None:
            with suppress(OSError):
                if _file_of(self._listener) == self._file:  # while the socket is open, no other file has its number
                    Path(self._listener.getsockname()).unlink()
        self._listener.close()

    def _stop(self) -> None:
        if self._pid < 0:
            return
        until = self._monotonic() + GRACE_S + 10
        ended = self._ended()
        if not ended:
            os.kill(self._pid, signal.SIGTERM)
        while not ended and self._monotonic() < until:
            self._listen(0.5)
            ended = self._ended()
        if not ended:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self._child.hang_up()


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise Unavailable(f"{host!r} is no address of this machine: {error}; give another host") from error
    family, kind, protocol, _, where = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise Unavailable(f"cannot listen on {host}:{port}: {error}; give another port, or 0 for a free one") from error
    return listener


def _listen_unix(path: str) -> socket.socket:
    """Listens on a Unix socket of mode 0660. Replaces the file of a server that has ended.

    Raises :class:`Unavailable` if another server listens there, or the path cannot be had.
    """
    check_socket(path)
    file, listener = Path(path), socket.socket(socket.AF_UNIX)
    try:
        if file.is_socket():
            file.unlink()
        listener.bind(path)
        file.chmod(0o660)  # nobody can connect before listen()
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise Unavailable(f"cannot listen on unix:{path}: {error}; give another path") from error
    return listener


def _file_of(listener: socket.socket) -> tuple[int, int] | None:
    """Device and number of the file of a Unix socket."""
    if listener.family != socket.AF_UNIX:
        return None
    found = Path(listener.getsockname()).lstat()
    return found.st_dev, found.st_ino


def _address(listener: socket.socket, host: str) -> str:
    port = listener.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://{f'[{shown}]' if ':' in shown and not shown.startswith('[') else shown}:{port}"
