"""Calls the application for one request, as WSGI says, and writes its answer as HTTP/1.1 says."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from asynctask.clock import SECOND, Clock
from webapi.connection import ClientGone, Connection
from webapi.http_request import IncomingRequest, Refusal
from webapi.problems import server_problem

__all__ = ["Site", "respond"]

_log = logging.getLogger(__name__)
_BUG: Final = Refusal(500, "internal_error", "something went wrong here, and it is in the server's log")
_OF_ITS_OWN: Final = {"CONTENT_TYPE", "CONTENT_LENGTH"}


class Site(NamedTuple):
    """What answers: a WSGI application, and where it listens."""

    application: Any
    host: str
    port: int
    clock: Clock


def respond(site: Site, connection: Connection, request: IncomingRequest, *, last: bool) -> None:
    """Answers ``request``; ``last`` says that the connection is to end after it."""
    answer = _Answer(connection, request, site.clock, last=last)
    try:
        if request.refusal is not None:
            answer.refuse(request.refusal)
        else:
            _call(site.application, _environ(connection, request, site), answer)
    except ClientGone:
        pass
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


def _environ(connection: Connection, request: IncomingRequest, site: Site) -> dict[str, Any]:
    environ: dict[str, Any] = {
        "REQUEST_METHOD": request.command,
        "SCRIPT_NAME": "",
        "PATH_INFO": request.path,
        "QUERY_STRING": request.query,
        "REQUEST_URI": request.request_uri,
        "SERVER_NAME": site.host,
        "SERVER_PORT": str(site.port),
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
    }
    for name, value in request.headers.items():
        environ[name if name in _OF_ITS_OWN else f"HTTP_{name}"] = value
    return environ


class _Answer:
    """The status, the headers and the body of one answer, on their way to the client."""

    def __init__(self, connection: Connection, request: IncomingRequest, clock: Clock, *, last: bool) -> None:
        self._connection = connection
        self._clock = clock
        self._head_only = getattr(request, "command", "") == "HEAD"
        self._modern = request.version == "1.1"
        self.keep_alive = request.keep_alive and not last
        self._status = ""
        self._headers: list[tuple[str, str]] = []
        self._sent_head = self._chunked = False
        self._left: int | None = None

    def start(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], None]:
        """WSGI's ``start_response``."""
        if exc_info and self._sent_head:
            raise exc_info[1]
        if self._status and not exc_info:
            raise AssertionError("start_response was called twice")
        if any("\r" in text or "\n" in text for header in (*headers, (status, "")) for text in header):
            raise ValueError("a line break in a header")
        self._status, self._headers = status, list(headers)
        return self.write

    def refuse(self, refusal: Refusal) -> None:
        """The server's own answer."""
        headers, body = server_problem(refusal.status, refusal.code, refusal.detail)
        self.keep_alive = False
        self.start(f"{refusal.status} {HTTPStatus(refusal.status).phrase}", headers)
        self.write(body)
        self.end()

    def fail(self) -> None:
        """After a bug: the rest of the answer is not there, or none of it."""
        self.keep_alive = False
        if not self._sent_head:
            self._status = ""
            try:
                self.refuse(_BUG)
            except ClientGone:
                pass

    def write(self, data: bytes) -> None:
        """A piece of the body."""
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
        """The body is complete."""
        if not self._status:
            raise AssertionError("start_response was not called")
        if not self._sent_head:
            self._connection.write(self._head(empty=True))
        elif self._chunked:
            self._connection.write(b"0\r\n\r\n")
        if self._left and not self._has_no_body:
            self.keep_alive = False  # fewer bytes than were announced: only the end of the connection says so

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
