"""Files as answers: how many are made at once, what they are called, and that nobody works for a client that has gone."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, Final
from urllib.parse import quote

from apiflask import APIFlask
from flask import Response, current_app, request
from werkzeug.exceptions import ClientDisconnected

from asynctask.errors import Unavailable

__all__ = ["CSV", "XLSX", "Busy", "attachment", "client_check", "content", "no_content", "register", "slot", "until_gone"]

CSV: Final = "text/csv"
XLSX: Final = "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"

_EXTENSION: Final = "asynctask.downloads"
_CHUNK: Final = 65_536
_LONGEST: Final = 80
# What no file system takes, what is a path, and what turns the direction of text so that a name reads as another one.
_UNSAFE: Final = re.compile(r'[\x00-\x1f\x7f-\x9f/\\:*?"<>|\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]')
_NOT_PLAIN: Final = re.compile(r"[^A-Za-z0-9._-]+")


class Busy(Unavailable):
    """As many files as may be made at once are being made."""

    code = "busy"


def register(flask_app: APIFlask, threads: int) -> None:
    """At most half of ``threads`` make files at once: the others stay free for everything that is quick."""
    flask_app.extensions[_EXTENSION] = threading.BoundedSemaphore(max(1, threads // 2))


@contextmanager
def slot() -> Iterator[None]:
    """The right to make a file, held until it has been sent. Raises :class:`Busy` (503) where none is free."""
    free: threading.BoundedSemaphore = current_app.extensions[_EXTENSION]
    if not free.acquire(blocking=False):
        raise Busy("as many reports as the server makes at once are being made; ask again in a moment")
    try:
        yield
    finally:
        free.release()


def client_check() -> Callable[[], None]:
    """What raises ClientDisconnected once the client of the request at hand has closed its connection.

    Where the server does not say what the connection is, the answer is never that it is closed.
    """
    connection = request.environ.get("asynctask.socket") or request.environ.get("gunicorn.socket")

    def check() -> None:
        if connection is not None and _closed(connection):
            raise ClientDisconnected

    return check


def _closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ValueError:  # TLS does not let anybody peek
        return False
    except OSError:
        return True


def until_gone(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The chunks, up to where somebody found that nobody takes them any more: that is no error."""
    try:
        yield from chunks
    except ClientDisconnected:
        return


def content(file: BinaryIO) -> Iterator[bytes]:
    """A file in pieces; closed at its end."""
    with file:
        while chunk := file.read(_CHUNK):
            yield chunk


def no_content(mimetype: str) -> Response:
    """The answer to HEAD: nothing is made for it, so nobody knows how long the file would be."""
    return Response(iter(()), mimetype=mimetype)


def attachment(response: Response, plain: str, title: str = "") -> Response:
    """Makes an answer a file to be saved: its name for every program, and with ``title`` for those that read RFC 8187."""
    name = " ".join(_UNSAFE.sub(" ", title).split())[:_LONGEST].strip(". ")
    full = quote(f"{name} - {plain}" if name else _UNSAFE.sub("_", plain), safe="")
    response.headers["Content-Disposition"] = (
        f"attachment; filename=\"{_NOT_PLAIN.sub('_', plain)}\"; filename*=UTF-8''{full}"
    )
    response.headers["Cache-Control"] = "no-store"
    return response
