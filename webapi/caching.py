"""What a client keeps of the answers, and how they travel: files under a name that their content gives, ETags, gzip."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path
from typing import Any, Final

from apiflask import APIFlask
from flask import Response, request, send_from_directory

from webapi.security import FILES

_FOLDER: Final = Path(__file__).parent / "static"
FOREVER: Final = "public, max-age=31536000, immutable"
"""Of an address whose answer never changes: a year is what caches take for that."""

_LEAST_BYTES: Final = 1_024
_TEXTS: Final = frozenset(
    {
        "application/javascript", "application/json", "application/problem+json", "image/svg+xml", "text/css", "text/html",
        "text/javascript", "text/plain",
    }
)  # fmt: skip


def register(flask_app: APIFlask) -> None:
    """Serves the files of the pages by ``flask_app``, gives lists ETags, and compresses texts. Call it first: what is
    declared first is done last with an answer."""
    flask_app.after_request(_compress)
    flask_app.after_request(_tag)
    current = fingerprint_of(_FOLDER)

    def serve(filename: str, fingerprint: str = "") -> Response:
        """A file. With another fingerprint, for a page that a process of another version has sent, it is not kept."""
        response = send_from_directory(_FOLDER, filename)
        response.headers["Cache-Control"] = FOREVER if fingerprint == current else "no-cache"
        return response

    def add_fingerprint(endpoint: str, values: dict[str, Any]) -> None:
        if endpoint == "static":
            values.setdefault("fingerprint", current)

    # It is a folder, so that what the files import by relative names has the same one.
    flask_app.add_url_rule("/static/<string(length=12):fingerprint>/<path:filename>", "static", serve)
    flask_app.add_url_rule("/static/<path:filename>", "static", serve)
    flask_app.url_defaults(add_fingerprint)


def fingerprint_of(folder: Path) -> str:
    """12 characters that differ where the files of a folder, or their names, do."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            digest.update(f"{name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _is_read() -> bool:
    return request.method in ("GET", "HEAD")


def _tag(response: Response) -> Response:
    """Gives JSON that has no ETag one of its content; 304 where the client has the same."""
    is_list = response.status_code == 200 and response.mimetype == "application/json" and not response.is_streamed
    if _is_read() and is_list and response.get_etag()[0] is None and not response.cache_control.no_store:
        response.set_etag(hashlib.sha256(response.get_data()).hexdigest()[:24], weak=True)
        response.make_conditional(request)
    return response


def _compress(response: Response) -> Response:
    """Compresses a text, unless a page of another site has the browser ask for it: it could choose a part of the text by
    the address, and learn the rest from the length (BREACH). A stream is sent as it comes."""
    if not _is_read() or response.status_code not in (200, 304) or response.mimetype not in _TEXTS:
        return response
    response.vary.add("Accept-Encoding")
    is_file = request.endpoint in FILES
    is_ours = is_file or request.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")
    if not is_ours or not request.accept_encodings["gzip"] or (response.is_streamed and not is_file):
        return response
    response.direct_passthrough = False  # of a file
    if response.status_code == 200 and len(data := response.get_data()) >= _LEAST_BYTES:
        response.set_data(gzip.compress(data, 6, mtime=0))
        response.headers["Content-Encoding"] = "gzip"
        response.headers.pop("Accept-Ranges", None)
        tag, is_weak = response.get_etag()
        if tag is not None and not is_weak:  # it is of the bytes before
            response.set_etag(tag, weak=True)
    return response
