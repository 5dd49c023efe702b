"""One request as it comes over a connection: parsed by waitress, with limits and refusals of our own."""

from __future__ import annotations

import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from waitress.parser import HTTPRequestParser

__all__ = ["IncomingRequest", "Refusal"]

MAX_HEADER_BYTES: Final = 65_536
MAX_LINE_BYTES: Final = 32_768
"""Of the first line. The options of a raw body stand there: ``columns`` alone may have 10,000 characters."""

MAX_CHUNK_LINE: Final = 8_192
"""Of the size line of a chunk, and of the trailer of a chunked body: the parser keeps them in memory."""

IN_MEMORY: Final = 65_536
"""Bytes of a body that are kept in memory; a longer one is in a temporary file."""

_PARSER: Final = SimpleNamespace(
    max_request_header_size=MAX_HEADER_BYTES, max_request_body_size=2**62, inbuf_overflow=IN_MEMORY, url_scheme="http"
)
_CODES: Final = {400: "malformed_request", 431: "headers_too_large", 501: "transfer_encoding_not_supported"}


class Refusal(NamedTuple):
    """Why the server itself answers, and what: a status, a code for programs, a sentence for people."""

    status: int
    code: str
    detail: str


class IncomingRequest(HTTPRequestParser):  # type: ignore[misc]
    """A request that comes in pieces. It is ``completed`` when all of it is there, or when ``refusal`` says why not.

    ``body_limit`` gives the longest body of a request, in bytes, by its method, path and Content-Type. Of a longer one only
    the head is kept, with the length that was announced or came: ``cut`` is set, and the application answers from the head.
    """

    def __init__(self, body_limit: Callable[[str, str, str], int]) -> None:
        super().__init__(_PARSER)
        self._body_limit = body_limit
        self._limit: int | None = None
        self.refusal: Refusal | None = None
        self.cut = False

    def received(self, data: bytes) -> int:
        """Takes the next bytes; returns how many of them belong to this request."""
        if not self.headers_finished:
            begun = self.header_plus + data[: MAX_LINE_BYTES + 1]
            if len(begun) > MAX_LINE_BYTES and b"\r\n" not in begun[: MAX_LINE_BYTES + 1]:
                self._refuse(Refusal(414, "uri_too_long", _TOO_LONG))
                return len(data)
        consumed = int(super().received(data))
        if self.error is not None:
            said = str(self.error.body)
            if self.error.code == 431:
                said = f"the headers are over the limit of {MAX_HEADER_BYTES:,} bytes; send fewer or shorter ones"
            self._refuse(Refusal(self.error.code, _CODES.get(self.error.code, "malformed_request"), said))
        elif self.headers_finished and not self.empty:
            self._check()
        return consumed

    def cut_off(self) -> Refusal | None:
        """What to answer to a client that ended its side now; None where no body was under way."""
        if not self.headers_finished or self.completed:
            return None
        of = f" of {self.content_length:,}" if self.content_length else ""
        said = f"the body was cut off after {self.body_bytes_received:,}{of} bytes; send it again, whole"
        return Refusal(400, "malformed_body", said)

    @property
    def body(self) -> Any:
        """The whole body, a file at its beginning; empty where it was too long to be kept."""
        return io.BytesIO() if self.cut else self.get_body_stream()

    @property
    def keep_alive(self) -> bool:
        """Whether the connection may serve another request after this one."""
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
            # Whoever reads the length in another way than a proxy before him takes a body for the next request.
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
