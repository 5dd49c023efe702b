"""Reading requests: every body is limited, complete or refused, and files are never held in memory."""

from __future__ import annotations

import io
from collections.abc import Callable
from io import RawIOBase
from typing import IO, Any, Final, cast

from apiflask import APIFlask
from flask import Request, Response, request
from werkzeug.datastructures import FileStorage, Headers, MultiDict
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.formparser import FormDataParser, MultiPartParser
from werkzeug.sansio.multipart import Data, Epilogue, Field, File, MultipartDecoder, NeedData
from werkzeug.utils import cached_property
from werkzeug.wsgi import get_input_stream

from asynctask.app import AsyncTask
from asynctask.clock import Clock
from asynctask.config import Config
from asynctask.errors import InputError, TooLarge
from asynctask.lists.readers import Limits
from asynctask.lists.rows import encoding_option
from webapi.context import BODY_LIMIT, HEAD_ONLY, parse_body
from webapi.problems import MalformedBody

JSON: Final = "application/json"
FORM: Final = "multipart/form-data"
MAX_FORM_PARTS: Final = 100
MAX_FIELD_BYTES: Final = 262_144
FORM_OVERHEAD: Final = 1_048_576
"""Bytes of a form in addition to its file."""

SIGN_IN_BYTES: Final = 65_536
"""The longest form that takes a token, which anybody may send: it stays in memory."""

DISCARD_BYTES: Final = 1_073_741_824
"""Bytes; more than any file sent by mistake. The time a thread is held is limited by :data:`DISCARD_S`."""
DISCARD_S: Final = 10.0


class UnsupportedMediaType(InputError):
    """The route does not read this media type."""

    code = "unsupported_media_type"
    status = 415


class _Decoder(MultipartDecoder):
    """Decodes a form whose file names may be in any encoding: browsers send UTF-8, other programs the bytes of the name."""

    def _parse_headers(self, data: bytes | bytearray) -> Headers:
        return super()._parse_headers(data.decode("utf-8", "replace").encode())


class _FormParser(FormDataParser):
    """werkzeug's parser with :class:`_Decoder`, which it has no place for."""

    def _parse_multipart(
        self, stream: IO[bytes], mimetype: str, content_length: int | None, options: dict[str, str]
    ) -> tuple[IO[bytes], MultiDict[str, str], MultiDict[str, FileStorage]]:
        boundary = options.get("boundary", "").encode("ascii")
        if not boundary:
            raise ValueError("its boundary is missing")
        most = self.max_form_memory_size
        parser = MultiPartParser(self.stream_factory, most)
        decoder = _Decoder(boundary, max_form_memory_size=most, max_parts=self.max_form_parts)
        fields, files = list[tuple[str, str]](), list[tuple[str, FileStorage]]()
        part: Field | File | None = None
        held: IO[bytes] = io.BytesIO()
        while not isinstance(event := decoder.next_event(), Epilogue):
            if isinstance(event, NeedData):
                decoder.receive_data(stream.read(parser.buffer_size) or None)
            elif isinstance(event, Field | File):
                part = event
                held = parser.start_file_streaming(event, content_length) if isinstance(event, File) else io.BytesIO()
            elif isinstance(event, Data) and part is not None:
                held.write(event.data)
                if isinstance(part, Field) and most is not None and held.tell() > most:
                    raise RequestEntityTooLarge
                if not event.more_data and isinstance(part, File):
                    held.seek(0)
                    files.append((part.name, FileStorage(held, part.filename, part.name, headers=part.headers)))
                elif not event.more_data:
                    charset = parser.get_part_charset(part.headers)
                    fields.append((part.name, cast(io.BytesIO, held).getvalue().decode(charset, "replace")))
        return stream, self.cls(fields), self.cls(files)


class ApiRequest(Request):
    """A request with the configuration's limits; :func:`register` makes the class of an application."""

    limits: Config
    _limit: tuple[str, str, int] | None = None
    max_form_memory_size = MAX_FIELD_BYTES
    max_form_parts = MAX_FORM_PARTS

    def get_json(self, force: bool = False, silent: bool = False, cache: bool = True) -> Any:
        """The body as JSON, a long list of items in it as :class:`JsonItems`. Raises for another media type (415), too long
        or too many values (413), invalid JSON (400), too deep (422)."""
        self.require(JSON)
        self._limit_to("JSON body", "max_body_bytes")
        body, config = self.get_data(cache=False), self.limits
        limits = Limits(
            max_rows=config.max_rows, max_item_bytes=config.max_item_bytes, max_json_depth=config.max_json_depth
        )
        return parse_body(body, limits)

    def load_form(self) -> None:
        """Reads a multipart form into ``form`` and ``files``, files in temporary files on disk.

        Raises for another media type (415), too long (413), truncated or no form (400).
        """
        self.require(FORM)
        self._limit_to("file", "max_file_bytes", FORM_OVERHEAD)
        try:
            self._load_form_data()
        except RequestEntityTooLarge:
            raise TooLarge(
                f"the form has more than {MAX_FORM_PARTS} fields, or a field of more than {MAX_FIELD_BYTES:,} bytes; send"
                " less at once"
            ) from None
        except ValueError as error:
            raise MalformedBody(
                f"the form cannot be read to its end: {error}; was it cut off? Send it again, with its closing boundary"
            ) from None

    def raw_body(self, *accepted: str) -> IO[bytes]:
        """The body as a stream. Raises for another media type (415); reading it raises for a body that is too long (413) or
        truncated (400)."""
        self.require(*accepted)
        self._limit_to("body", "max_file_bytes")
        return self.stream

    def charset(self) -> str | None:
        """The encoding that the media type names. Raises for one that is not read (415)."""
        name = self.mimetype_params.get("charset")
        try:
            return None if name is None else encoding_option(name)
        except InputError as error:
            raise UnsupportedMediaType(f"charset: {error}") from None

    def _limit_to(self, what: str, setting: str, more: int = 0) -> None:
        """Limits the body to so many bytes as a setting says, and ``more``. Reading a longer one raises TooLarge."""
        limit = getattr(self.limits, setting)
        self.max_content_length, self._limit = limit + more, (what, setting, limit)

    def _too_large(self) -> TooLarge:
        what, setting, limit = self._limit or ("body", "max_body_bytes", self.limits.max_body_bytes)
        return TooLarge(
            f"the {what} is over the limit of {limit:,} bytes ({setting}); send less at once, or have the operator raise"
            f" ASYNCTASK_{setting.upper()}"
        )

    def discard(self, clock: Clock) -> None:
        """Reads the rest of the body, within limits: a client reads the answer only after it has sent its request."""
        if "wsgi.input_terminated" not in self.environ:  # without it the stream may have no end
            return
        stream, left, until = self.environ["wsgi.input"], DISCARD_BYTES, clock.monotonic() + DISCARD_S
        try:
            while left > 0 and clock.monotonic() < until and (chunk := stream.read(65_536)):
                left -= len(chunk)
        except Exception:  # a broken connection; the exception depends on the server
            return

    def require(self, *accepted: str) -> None:
        """Raises :class:`UnsupportedMediaType` for a media type that is not ``accepted``."""
        if self.mimetype not in accepted:
            found = repr(self.mimetype) if self.mimetype else "missing"
            raise UnsupportedMediaType(f"Content-Type is {found}; send {' or '.join(accepted)}")
        coding = self.headers.get("Content-Encoding", "identity")
        if coding != "identity":
            raise UnsupportedMediaType(f"Content-Encoding {coding!r} is not read; send the body as it is")

    form_data_parser_class = _FormParser

    def make_form_data_parser(self) -> FormDataParser:
        parser = super().make_form_data_parser()
        parser.silent = False
        return parser

    @cached_property
    def stream(self) -> IO[bytes]:
        """The body; reading it raises before its Content-Length is reached, or beyond the limit."""
        limit = self.max_content_length
        assert limit is not None
        if (self.content_length or 0) > limit:
            raise self._too_large()
        terminated = self.environ.get("wsgi.input_terminated")
        if self.content_length is None and "HTTP_TRANSFER_ENCODING" in self.environ and not terminated:
            # werkzeug would take it for empty: without a length, the stream of such a server may have no end.
            raise MalformedBody("this server does not pass on chunked bodies; send the body with its Content-Length")
        # One more: werkzeug refuses a body that reaches the limit, not only one that exceeds it.
        stream = get_input_stream(self.environ, max_content_length=limit + 1)
        return cast(IO[bytes], _WholeBody(stream, self.content_length, self._too_large))

    def _get_file_stream(self, *args: Any, **kwargs: Any) -> IO[bytes]:
        file = super()._get_file_stream(*args, **kwargs)
        self._spooled.append(file)
        return file

    @cached_property
    def _spooled(self) -> list[IO[bytes]]:
        return []

    def close(self) -> None:
        # Includes the files of a form that failed in the middle, which `files` does not list.
        for file in self._spooled:
            file.close()
        super().close()


def _request_class(config: Config) -> type[ApiRequest]:
    """The request class of one application; its limits are class members, so several applications can share a process."""
    return cast(type[ApiRequest], type("ConfiguredRequest", (ApiRequest,), {"limits": config}))


def longest_upload(config: Config) -> int:
    """The longest body that is read, in bytes: a form with a file of the largest size."""
    return max(config.max_body_bytes, config.max_file_bytes + FORM_OVERHEAD)


def register_heads(flask_app: APIFlask) -> None:
    """Makes ``flask_app`` judge a request by its head, for a server that asks before it receives the body
    (:data:`webapi.context.HEAD_ONLY`). Call it after everything else that refuses requests."""

    def admit() -> Response | None:
        incoming = current_request()
        if HEAD_ONLY not in incoming.environ or incoming.routing_exception is not None:
            return None
        incoming.environ[BODY_LIMIT] = limit = _longest_body(incoming)
        if (incoming.content_length or 0) > limit:
            # The view refuses it without reading.
            del incoming.environ[BODY_LIMIT]
            return None
        return Response(status=204)

    flask_app.before_request(admit)


def _longest_body(incoming: ApiRequest) -> int:
    """The longest body that is worth receiving, in bytes."""
    if incoming.endpoint == "pages.sign_in":  # of anybody
        return SIGN_IN_BYTES
    if incoming.endpoint not in ("tasks.create", "tasks.add", "lists.preview", "lists.marked") or incoming.mimetype == JSON:
        return incoming.limits.max_body_bytes
    return longest_upload(incoming.limits)


def register(flask_app: APIFlask, app: AsyncTask) -> None:
    """Makes requests of ``flask_app`` keep the limits of ``app``, and errors wait until the request was read."""
    flask_app.request_class = _request_class(app.config)
    flask_app.config["MAX_CONTENT_LENGTH"] = app.config.max_body_bytes

    def read_on(response: Response) -> Response:
        if response.status_code >= 400:
            current_request().discard(app.clock)
        return response

    flask_app.after_request(read_on)


def current_request() -> ApiRequest:
    """The current request."""
    incoming = request._get_current_object()  # type: ignore[attr-defined]
    assert isinstance(incoming, ApiRequest)
    return incoming


class _WholeBody(RawIOBase):
    """A body that must reach its Content-Length: a server may pass on a truncated one."""

    def __init__(self, stream: IO[bytes], length: int | None, too_large: Callable[[], TooLarge]) -> None:
        self._stream = stream
        self._length = length
        self._too_large = too_large
        self._seen = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        try:
            data = self._stream.read(-1 if size is None else size)
        except RequestEntityTooLarge:
            raise self._too_large() from None
        except Exception as error:  # a broken connection; the exception depends on the server
            raise self._truncated() from error
        self._seen += len(data)
        if self._length is not None and self._seen < self._length and (not data or size is None or size < 0):
            raise self._truncated()
        return data

    def readall(self) -> bytes:
        return self.read()

    def _truncated(self) -> MalformedBody:
        of = f" of {self._length:,}" if self._length is not None else ""
        return MalformedBody(f"the body was cut off after {self._seen:,}{of} bytes; send it again, whole")
