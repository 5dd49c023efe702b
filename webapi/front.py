"""The ASGI application in front of Flask: bodies are read whole before a thread has them, answers are sent as clients take
them, and streams and long polls wait on the event loop.

A thread works only while the application does. A client that sends or reads slowly costs a connection and a temporary file.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import io
import math
import re
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from tempfile import SpooledTemporaryFile
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from urllib.parse import unquote_to_bytes

from asynctask.errors import Unavailable
from asynctask.ledger.progress import Changed
from asynctask.logs import get_logger
from webapi.context import BODY_LIMIT, GONE, HEAD_ONLY, json_text, progress_tag, retry_after, with_links
from webapi.problems import HttpRefusal, server_problem
from webapi.security import keep

if TYPE_CHECKING:
    from webapi.server import Connection

IN_MEMORY: Final = 65_536
"""Bytes of a body, or of an answer that waits for its client, kept in memory; more goes to a temporary file."""

_PIECE: Final = 65_536

_LOGGED_CHARS: Final = 500
"""Of a path, in the log."""

_FILE: Final = re.compile(r"/(result|report\.csv|report\.xlsx)$")
"""Paths of files that are made, or fetched from a bucket, while they are sent."""

_POLL: Final = re.compile(r"/api/tasks/(\d{1,18})$")
"""Paths of progress objects."""

_ASKS_MORE: Final = re.compile(rb"(wait|include)=")
"""Queries with which a request for a progress object is no plain poll."""

_KEPT_AT_MOST: Final = 10_000
"""Of the Tasks that were polled last, and of the clients that polled last."""

_BUG: Final = HttpRefusal(500, "internal_error", "something went wrong here, and it is in the server's log")
_BUSY: Final = HttpRefusal(503, "busy", "too many large bodies are coming in at once; try again in a moment")
_UNPREFIXED: Final = {"content-type": "CONTENT_TYPE", "content-length": "CONTENT_LENGTH"}

_T = TypeVar("_T")
_log: Final = get_logger("asynctask.web")


class ClientGone(ConnectionResetError):
    """The connection is closed before its request was complete."""


@dataclass(slots=True)
class Exchange:
    """A request: its ASGI scope and channels, its connection, and the context in which the application sees it."""

    scope: dict[str, Any]
    receive: Callable[[], Any]
    send: Callable[[Any], Any]
    connection: Connection
    context: contextvars.Context
    unread: bool
    """Whether a part of its body has not been received."""
    environ: dict[str, Any] = field(default_factory=dict)
    """The WSGI environment that the application was called with; it puts in who the client is."""
    status: int | None = None
    """That of its answer, once that has begun."""
    until_close: bool = False
    """Whether its answer ends with the connection."""


class Answer:
    """What a WSGI application answered: status, headers, and the chunks that it makes while they are sent."""

    def __init__(self, status: int, headers: list[tuple[str, str]], chunks: Iterable[bytes]) -> None:
        self.status, self.headers = status, headers
        self._chunks, self._iterator = chunks, iter(chunks)

    def next(self) -> bytes | None:
        """The next chunk that is not empty, or None."""
        return next(filter(None, self._iterator), None)

    def write_to(self, file: IO[bytes]) -> None:
        """Writes all chunks to a file and closes the answer."""
        try:
            for chunk in self._iterator:
                file.write(chunk)
        finally:
            self.close()

    def close(self) -> None:
        """Releases what the application holds for the answer; idempotent."""
        close, self._chunks = getattr(self._chunks, "close", None), ()
        if close is not None:
            close()


class Front:
    """An ASGI application that serves the WSGI ``application`` in ``pool``, which has ``threads`` threads.

    ``storage``: total bytes of the bodies that are received and of the answers that wait for their clients. Half of the
    threads at most do what may take long: large bodies, and files that are made while they are sent. Half at most answer
    long polls. ``notifier``: tells of changes of followed Tasks. ``polls``: reads polled ones. ``now``: the seconds of a
    monotonic clock. ``access_log``: whether each request is logged.
    """

    def __init__(
        self,
        application: Any,
        notifier: Notifier,
        polls: Polls,
        *,
        pool: ThreadPoolExecutor,
        threads: int,
        storage: int,
        now: Callable[[], float],
        access_log: bool,
    ) -> None:
        self._application = application
        self._notifier, self._polls = notifier, polls
        self._pool = pool
        self._long = asyncio.Semaphore(max(1, threads // 2))
        self._long_polls = asyncio.Semaphore(max(1, threads // 2))
        self._storage, self._stored = storage, 0
        self._now, self._access_log = now, access_log

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers a request. Raises nothing."""
        connection = scope["state"]["connection"]
        exchange = Exchange(scope, receive, send, connection, contextvars.Context(), unread=has_body(scope))
        began = self._now()
        try:
            refusal = refusal_of(scope)
            if refusal is None:
                await self._serve(exchange, environ_of(scope, connection))
            else:
                await self._refuse(exchange, refusal)
        except ConnectionResetError:  # of this client, or of the application, which has noticed it first
            connection.abort()
        except Exception as error:
            _log.exception("request_failed", method=scope["method"], path=scope["path"], error=type(error).__name__)
            if exchange.status is not None:
                connection.abort()
            else:
                await self._refuse(exchange, _BUG)
        finally:
            if self._access_log:
                # The connection may have refused the rest of the body meanwhile.
                status = scope["state"].get("refused", exchange.status)
                log_request(scope, connection, exchange.environ, status, self._now() - began)

    async def _serve(self, exchange: Exchange, environ: dict[str, Any]) -> None:
        if not exchange.unread:
            exchange.environ = environ
            return await self._respond(exchange, environ)
        # By its head alone the application refuses a request, or says how long its body may be.
        head = exchange.environ = {**environ, HEAD_ONLY: True}
        with SpooledTemporaryFile(IN_MEMORY) as page:
            answer = await self._run(exchange, False, self._call, exchange, head, page)
            if BODY_LIMIT not in head:
                return await self._send_file(exchange, answer, page)
        with SpooledTemporaryFile(IN_MEMORY) as body, self._storing() as stored:
            received = 0
            async for data in self._body(exchange):
                received += len(data)
                stored(len(data))
                if received > head[BODY_LIMIT]:
                    break  # the application refuses the length
                if received > IN_MEMORY and self._stored > self._storage:
                    return await self._refuse(exchange, _BUSY)
                body.write(data)
            else:
                exchange.unread = False
            body.seek(0)
            environ |= {"CONTENT_LENGTH": str(received), "wsgi.input": body}
            environ.pop("HTTP_TRANSFER_ENCODING", None)
            exchange.environ = environ
            return await self._respond(exchange, environ, long=received > IN_MEMORY)

    async def _body(self, exchange: Exchange) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await exchange.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            yield message["body"]
            more = message["more_body"]

    @contextmanager
    def _storing(self) -> Iterator[Callable[[int], None]]:
        """Counts bytes as stored until the block ends."""
        own = 0

        def add(count: int) -> None:
            nonlocal own
            own += count
            self._stored += count

        try:
            yield add
        finally:
            self._stored -= own

    async def _respond(self, exchange: Exchange, environ: dict[str, Any], *, long: bool = False) -> None:
        if (file := _FILE.search(exchange.scope["path"])) is not None:
            # A report holds processes and connections until it is made; a result is a file already.
            return await self._send_made(exchange, environ, ahead=file[1] != "result")
        query, is_get = exchange.scope["query_string"], exchange.scope["method"] == "GET"
        poll = _POLL.search(exchange.scope["path"]) if is_get and not _ASKS_MORE.search(query) else None
        asks = None if poll is None else credentials_of(exchange.scope)
        if poll is not None and asks in self._polls.admitted:
            environ[POLLED] = await self._polls.read(int(poll[1]), b",".join(values_of(exchange.scope, b"if-none-match")))
        wanted: list[Following] = []
        if not self._notifier.full:
            environ |= {FOLLOW: wanted.append, LATEST: self._notifier.latest}
        # Hundreds of long polls that a change has answered come again at once: others do not queue behind them.
        turn = self._long_polls if b"wait=" in query else nullcontext()
        with SpooledTemporaryFile(IN_MEMORY) as page:
            async with turn:
                answer = await self._run(exchange, long, self._call, exchange, environ, page)
            if asks is not None:
                self._polls.note(asks, answer.status)
            if not wanted:
                return await self._send_file(exchange, answer, page)
        if wanted[0].wait_s is None:
            return await self._stream(exchange, answer, wanted[0])
        return await self._long_poll(exchange, environ, answer, wanted[0])

    def _call(self, exchange: Exchange, environ: dict[str, Any], page: IO[bytes] | None = None) -> Answer:
        """Calls the application, in a thread; writes the whole body of its answer to ``page``, if that is given."""
        if exchange.connection.transport.is_closing():  # while it waited for the thread
            raise ClientGone
        started: list[tuple[str, list[tuple[str, str]]]] = []

        def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
            started[:] = [(status, headers)]

        chunks = self._application(environ, start_response)
        status, headers = started[0]
        answer = Answer(int(status[:3]), headers, chunks)
        if page is not None:
            answer.write_to(page)
        return answer

    async def _run(self, exchange: Exchange, long: bool, function: Callable[..., _T], *arguments: Any) -> _T:
        """Calls a function in a thread, in the context of the request: the next call may be in another thread."""
        async with self._long if long else nullcontext():
            call = partial(exchange.context.run, function, *arguments)
            return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    # -- answers

    async def _send_made(self, exchange: Exchange, environ: dict[str, Any], *, ahead: bool) -> None:
        """Sends an answer while it is made; between two chunks it holds no thread.

        With ``ahead``, what the client has not read waits in a file: the answer is made, and what it holds is released,
        without waiting for the client, unless too much is stored.
        """
        answer, connection = await self._run(exchange, True, self._call, exchange, environ), exchange.connection
        try:
            chunk = await self._run(exchange, True, answer.next)
            await self._start(exchange, answer.status, answer.headers)
            with SpooledTemporaryFile(IN_MEMORY) as file, self._storing() as stored:
                read, made = 0, 0
                while chunk is not None or read < made:
                    if connection.gone:
                        raise ClientGone
                    makes = chunk is not None and ahead and connection.flow.write_paused and self._stored <= self._storage
                    if read < made and not makes:
                        file.seek(read)
                        await self._send(exchange, piece := file.read(_PIECE))
                        read += len(piece)
                        if read == made:
                            file.truncate(0)
                            stored(-made)
                            read, made = 0, 0
                    elif chunk is not None:
                        file.seek(made)
                        made += file.write(chunk)
                        stored(len(chunk))
                        chunk = await self._run(exchange, True, answer.next)
                        if chunk is None:
                            await self._run(exchange, False, answer.close)
            await self._send(exchange, b"", last=True)
        finally:
            await self._run(exchange, False, answer.close)

    async def _send_file(self, exchange: Exchange, answer: Answer, page: IO[bytes]) -> None:
        """Sends an answer whose body is written, as fast as its client reads it."""
        with self._storing() as stored:
            left = page.tell()
            stored(left)
            if left > IN_MEMORY and self._stored > self._storage:
                return await self._refuse(exchange, _BUSY)
            page.seek(0)
            await self._start(exchange, answer.status, answer.headers)
            while left > _PIECE:
                await self._send(exchange, page.read(_PIECE))
                left -= _PIECE
            return await self._send(exchange, page.read(), last=True)

    async def _start(
        self, exchange: Exchange, status: int, headers: Iterable[tuple[str, str]], *, close: bool = False
    ) -> None:
        # uvicorn sends the date.
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers if name.lower() != "date"]
        if exchange.unread or close:
            encoded.append((b"connection", b"close"))
        exchange.status = status
        if exchange.scope["http_version"] == "1.0" and all(name.lower() != b"content-length" for name, _ in encoded):
            exchange.until_close = True
            exchange.connection.until_close()
        await exchange.send({"type": "http.response.start", "status": status, "headers": encoded})
        if exchange.unread:
            exchange.connection.linger()

    async def _send(self, exchange: Exchange, data: bytes, *, last: bool = False) -> None:
        if exchange.connection.transport.is_closing():  # asyncio logs each write to a lost connection
            raise ClientGone
        if last and exchange.until_close:
            exchange.connection.end_with(len(data))
        await exchange.send({"type": "http.response.body", "body": data, "more_body": not last})
        exchange.connection.sent += len(data)

    async def _refuse(self, exchange: Exchange, refusal: HttpRefusal) -> None:
        headers, body = server_problem(*refusal)
        await self._start(exchange, refusal.status, headers, close=True)
        await self._send(exchange, body, last=True)

    # -- streams and long polls

    async def _stream(self, exchange: Exchange, answer: Answer, wanted: Following) -> None:
        progress, tag = wanted.progress, progress_tag(wanted.progress)
        await self._start(exchange, answer.status, answer.headers)
        await self._send(exchange, STREAM_START)
        if tag != wanted.known:
            await self._send(exchange, stream_event(progress, wanted.root))
        until = self._now() + wanted.lasts_s
        with self._notifier.follow(wanted.task_id) as followed:
            while (
                not (progress["done"] or followed.ended or exchange.connection.left) and (left := until - self._now()) > 0
            ):
                if not await followed.after(progress, tag, min(HEARTBEAT_S, left), exchange.connection):
                    await self._send(exchange, STREAM_HEARTBEAT)
                elif not followed.ended and followed.progress is not None:
                    progress, tag = followed.progress, followed.tag
                    await self._send(exchange, followed.made(stream_event, wanted.root))
        await self._send(exchange, b"", last=True)

    async def _long_poll(self, exchange: Exchange, environ: dict[str, Any], answer: Answer, wanted: Following) -> None:
        with self._notifier.follow(wanted.task_id) as followed:
            assert wanted.wait_s is not None
            changed = await followed.after(wanted.progress, wanted.known, wanted.wait_s, exchange.connection)
            if exchange.connection.left:
                raise ClientGone
            progress = followed.progress
            if changed and not followed.ended and progress is not None and not wanted.is_own:
                body = followed.made(_poll_body, wanted.root)
                own = {"content-length": str(len(body)), "etag": f'W/"{followed.tag}"', "retry-after": None}
                own["content-encoding"] = None  # of the object that the client has
                if not progress["done"]:
                    own["retry-after"] = retry_after(progress)
                headers = [(name, value) for name, value in answer.headers if name.lower() not in own]
                headers += [(name, value) for name, value in own.items() if value is not None]
                await self._start(exchange, answer.status, headers)
                await self._send(exchange, body, last=True)
                return
        environ |= {FOLLOW: None, LATEST: lambda _task_id: None}
        with SpooledTemporaryFile(IN_MEMORY) as page:
            answer = await self._run(exchange, False, self._call, exchange, environ, page)
            await self._send_file(exchange, answer, page)


def _poll_body(progress: dict[str, Any], root: str) -> bytes:
    return json_text(with_links(progress, root))


# -- requests


def log_request(
    scope: Mapping[str, Any], connection: Connection, environ: Mapping[str, Any], status: int | None, seconds: float
) -> None:
    """Writes the line of a request to the log. ``scope``: what is known of it; ``status``: None if its client went before
    the answer."""
    _log.info(
        "request",
        method=scope.get("method"),
        path=scope["path"][:_LOGGED_CHARS] if "path" in scope else None,
        status=status,
        seconds=round(seconds, 4),
        address=environ.get("REMOTE_ADDR", connection.address),
        name=environ.get("REMOTE_USER"),
    )


def values_of(scope: dict[str, Any], name: bytes) -> list[bytes]:
    """The values of a header."""
    return [value for each, value in scope["headers"] if each == name]


def credentials_of(scope: dict[str, Any]) -> bytes:
    """A digest of all by which a login may know a client: its address, Authorization, cookies, and link."""
    links = [part for part in scope["query_string"].split(b"&") if part.startswith(b"link=")]
    address, headers = (scope["client"] or ("",))[0], [values_of(scope, name) for name in (b"authorization", b"cookie")]
    return hashlib.sha256(repr((address, headers, links)).encode()).digest()


def has_body(scope: dict[str, Any]) -> bool:
    """Whether a body follows the head."""
    return bool(values_of(scope, b"transfer-encoding")) or values_of(scope, b"content-length") not in ([], [b"0"])


def refusal_of(scope: dict[str, Any]) -> HttpRefusal | None:
    """Why a head is refused that the parser takes, if it is."""
    if scope["http_version"] not in ("1.0", "1.1"):
        return HttpRefusal(505, "http_version_not_supported", "HTTP/1.1 and HTTP/1.0 are spoken here")
    codings, lengths = values_of(scope, b"transfer-encoding"), values_of(scope, b"content-length")
    chunked = [each.lower() for each in codings] == [b"chunked"] and scope["http_version"] == "1.1"
    if len(lengths) > 1 or (codings and (lengths or not chunked)):
        # A server and a proxy that disagree about the length take a body for the next request (request smuggling).
        return HttpRefusal(
            400, "malformed_request", "send either Content-Length, or with HTTP/1.1 Transfer-Encoding: chunked"
        )
    if not scope["raw_path"].startswith(b"/"):
        return HttpRefusal(400, "malformed_request", "the first line must name a path, /api/tasks for instance")
    hosts = values_of(scope, b"host")
    if len(hosts) > 1 or b"," in b"".join(hosts) or (not any(hosts) and scope["http_version"] == "1.1"):
        return HttpRefusal(400, "malformed_request", "send exactly one Host")
    return None


def environ_of(scope: dict[str, Any], connection: Connection) -> dict[str, Any]:
    """The WSGI environment (PEP 3333) of a request without its body."""
    client = scope["client"] or ("", 0)  # over a Unix socket there is none, and the server has no name
    server = ("localhost", 80) if connection.is_unix else scope["server"]
    environ: dict[str, Any] = {
        "REQUEST_METHOD": scope["method"],
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote_to_bytes(scope["raw_path"]).decode("latin-1"),
        "QUERY_STRING": scope["query_string"].decode("latin-1"),
        "REQUEST_URI": scope["state"]["target"].decode("latin-1"),
        "SERVER_NAME": server[0],
        "SERVER_PORT": str(server[1]),
        "SERVER_PROTOCOL": f"HTTP/{scope['http_version']}",
        "SERVER_SOFTWARE": "asynctask",
        "REMOTE_ADDR": client[0],
        "REMOTE_PORT": str(client[1]),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
        GONE: lambda: connection.gone,
    }
    for raw_name, raw_value in scope["headers"]:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        if "_" in name:  # X_Forwarded_For would be taken for X-Forwarded-For
            continue
        key = _UNPREFIXED.get(name) or "HTTP_" + name.upper().replace("-", "_")
        environ[key] = f"{environ[key]}, {value}" if key in environ else value
    if scope["state"]["authority"]:  # of a target with a host, which takes the place of the header (RFC 9112, 3.2.2)
        environ["HTTP_HOST"] = scope["state"]["authority"].decode("latin-1")
    return environ


# -- clients that follow a Task: one reader serves every stream and every long poll
#
# A view says what its client waits for (Following), where the server offers FOLLOW; the answer comes from the loop. Other
# servers do not offer it; there the view waits in its own thread.

FOLLOW: Final = "asynctask.follow"
"""In the WSGI environment: a function that takes a :class:`Following`; None if the wait is over. It is not there where no
more clients may follow, nor under other servers: the view then waits in its own thread, if there is a slot for that."""

POLLED: Final = "asynctask.polled"
"""In the WSGI environment: the progress object, or a :class:`Sent`, that the server has read since the request came; None
if it could not. It is not there for a client that the application has not answered before. The application answers a poll
with it, unless that asks for more."""

LATEST: Final = "asynctask.latest"
"""In the WSGI environment: a function that gives the last progress object of a Task that others follow, or None."""

TICK_S: Final = 0.25
"""Seconds between two reads of the Tasks that clients follow."""

HEARTBEAT_S: Final = 15.0
"""Seconds after which a silent stream sends a comment: proxies close connections on which nothing moves."""

RECONNECT_MS: Final = 2_000
"""Milliseconds after which a browser connects again."""

STREAM_START: Final = b"retry: %d\n\n" % RECONNECT_MS
STREAM_HEARTBEAT: Final = b":\n\n"

_WOKEN_AT_ONCE: Final = 50
"""Followers that are woken before the loop serves other connections."""


class Following(NamedTuple):
    """What a client waits for."""

    task_id: int
    root: str
    """The prefix of the links."""
    progress: dict[str, Any]
    """The progress object that was read for it."""
    known: str | None
    """The tag of the one that it has."""
    wait_s: float | None = None
    """Seconds that it waits; None: a stream."""
    is_own: bool = False
    """Whether the answer to a long poll has more than the progress object, so that it is made for this client alone."""
    lasts_s: float = math.inf
    """Seconds after which a stream ends at the latest."""


def stream_event(progress: dict[str, Any], root: str) -> bytes:
    """A progress object as a Server-Sent Event (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""
    return b"id: %b\ndata: %b\n\n" % (progress_tag(progress).encode(), json_text(with_links(progress, root)))


class Sent(NamedTuple):
    """What is known of the progress object that was last read for a poll."""

    mark: str
    tag: str
    retry_after: str | None
    """Of an answer with it; None if the Task is done."""


class Polls:
    """Reads the progress of the Tasks that clients poll, one read at a time: it serves all requests that came during the
    one before. Most polls find nothing new, and of their Tasks only the marks are read. ``read`` as of :class:`Notifier`.

    ``admitted``: the :func:`credentials_of` clients whose last poll had an answer, 10,000 at most. For others nothing is
    read before the application knows who they are.
    """

    def __init__(self, read: Callable[[Mapping[int, str | None]], Awaitable[Mapping[int, Changed]]]) -> None:
        self._read = read
        self.admitted = OrderedDict[bytes, None]()
        self._sent = OrderedDict[int, Sent]()
        self._waiting: dict[int, list[tuple[bytes, asyncio.Future[Any]]]] = {}
        self._reader: asyncio.Task[None] | None = None

    def note(self, credentials: bytes, status: int) -> None:
        """Notes with which status the application answered a poll."""
        if status in (200, 304):
            keep(self.admitted, credentials, None, _KEPT_AT_MOST)
        else:
            self.admitted.pop(credentials, None)

    async def read(self, task_id: int, known: bytes) -> dict[str, Any] | Sent | None:
        """The progress object as of now; a :class:`Sent` if the client has it, by its header If-None-Match (``known``).
        None if there is no such Task, or it cannot be read: the application says so."""
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        self._waiting.setdefault(task_id, []).append((known, answer))
        if self._reader is None or self._reader.done():
            self._reader = loop.create_task(self._run())
        found: dict[str, Any] | Sent | None = await answer
        return found

    async def _run(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, {}
            kept = {task_id: self._kept(task_id, [known for known, _ in each]) for task_id, each in waiting.items()}
            answers: dict[int, dict[str, Any] | Sent | None] = dict(kept)
            try:
                found = await self._read({task_id: sent and sent.mark for task_id, sent in kept.items()})
                answers |= {task_id: self._news(task_id, changed) for task_id, changed in found.items()}
            except Exception as error:  # the application meets it again, and answers with it
                if not isinstance(error, Unavailable):
                    _log.exception("polled_tasks_unread", error=type(error).__name__)
                answers = {}
            for task_id, each in waiting.items():
                for _, answer in each:
                    if not answer.done():
                        answer.set_result(answers.get(task_id))

    def _kept(self, task_id: int, known: list[bytes]) -> Sent | None:
        """The last progress object, if all these clients have it."""
        sent = self._sent.get(task_id)
        if sent is None or not all(f'"{sent.tag}"'.encode() in each for each in known):
            return None
        self._sent.move_to_end(task_id)
        return sent

    def _news(self, task_id: int, changed: Changed) -> dict[str, Any] | None:
        mark, progress = changed
        if mark is None or progress is None:
            self._sent.pop(task_id, None)
            return None
        sent = Sent(mark, progress_tag(progress), None if progress["done"] else retry_after(progress))
        keep(self._sent, task_id, sent, _KEPT_AT_MOST)
        return progress


class Followed:
    """A Task that clients follow: its last progress object, and what was made of it for all of them."""

    def __init__(self) -> None:
        self.mark: str | None = None
        self.followers = 0
        self.ended = False
        """Whether nothing more will come: the Task was removed, or the server stops."""
        self.progress: dict[str, Any] | None = None
        self.tag = ""
        self._waiting = set[asyncio.Future[None]]()
        self._made: dict[tuple[Callable[..., bytes], str], bytes] = {}

    async def after(
        self, progress: Mapping[str, Any], tag: str | None, seconds: float, connection: Connection | None = None
    ) -> bool:
        """Waits for another progress object than the one with this ``tag`` that is no older than ``progress``, or for the
        end. Returns whether it came within so many seconds, and before the client of ``connection`` left."""
        seen = _version(progress)
        try:
            async with asyncio.timeout(seconds):
                while not self.ended and (self.progress is None or self.tag == tag or _version(self.progress) < seen):
                    if connection is not None and connection.left:
                        return False
                    await self._change(connection)
        except TimeoutError:
            return False
        return True

    def made(self, how: Callable[[dict[str, Any], str], bytes], root: str) -> bytes:
        """``how(progress, root)``, called once for each progress object."""
        assert self.progress is not None
        if (how, root) not in self._made:
            self._made[how, root] = how(self.progress, root)
        return self._made[how, root]

    async def publish(self, progress: dict[str, Any] | None) -> None:
        """Tells the followers of a new progress object, or of the end."""
        if progress is None:
            self.ended = True
        else:
            self.progress, self.tag = progress, progress_tag(progress)
            self._made.clear()
        waiting, self._waiting = self._waiting, set()
        for number, future in enumerate(waiting, 1):
            _wake(future)
            if number % _WOKEN_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _change(self, connection: Connection | None) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        if connection is not None:
            connection.when_left = partial(_wake, future)
        try:
            await future
        finally:
            self._waiting.discard(future)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _version(progress: Mapping[str, Any]) -> tuple[int, int]:
    return progress["generation"], progress["version"]


class Notifier:
    """Reads which of the followed Tasks have changed, every :data:`TICK_S` while there is one, and tells their followers.

    ``read``: the Tasks that have another mark than this one (:meth:`asynctask.app.AsyncTask.changed`). ``most``: followers
    at a time; they hold their connections, and others need some.
    """

    def __init__(self, read: Callable[[Mapping[int, str | None]], Awaitable[Mapping[int, Changed]]], most: int) -> None:
        self._read = read
        self.followers, self._most = 0, most
        self._followed: dict[int, Followed] = {}
        self._reader: asyncio.Task[None] | None = None
        self._stopped = False

    @property
    def full(self) -> bool:
        """Whether as many clients follow as may."""
        return self.followers >= self._most

    @contextmanager
    def follow(self, task_id: int) -> Iterator[Followed]:
        """The Task, read until the block ends."""
        followed = self._followed.setdefault(task_id, Followed())
        followed.followers += 1
        self.followers += 1
        followed.ended |= self._stopped
        if self._reader is None and not self._stopped:
            self._reader = asyncio.get_running_loop().create_task(self._run())
        try:
            yield followed
        finally:
            self.followers -= 1
            followed.followers -= 1
            if not followed.followers:
                del self._followed[task_id]

    def latest(self, task_id: int) -> dict[str, Any] | None:
        """The last progress object of a Task that is followed, at most as old as a read takes. Any thread may ask."""
        followed = self._followed.get(task_id)
        return None if followed is None else followed.progress

    async def stop(self) -> None:
        """Ends every wait: each follower is told that nothing more comes."""
        self._stopped = True
        for each in list(self._followed.values()):
            await each.publish(None)

    async def _run(self) -> None:
        while self._followed and not self._stopped:
            try:
                await self._tick()
            except Unavailable:  # the database is away; streams stay open
                pass
            except Exception as error:  # the reader must survive, or no follower hears anything more
                _log.exception("followed_tasks_unread", error=type(error).__name__)
            await asyncio.sleep(TICK_S)
        self._reader = None

    async def _tick(self) -> None:
        found = await self._read({task_id: each.mark for task_id, each in self._followed.items()})
        for task_id, changed in found.items():
            if (followed := self._followed.get(task_id)) is not None:
                followed.mark = changed.mark
                await followed.publish(changed.progress)
