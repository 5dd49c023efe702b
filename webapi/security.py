"""What every answer carries against browsers being talked into something, and who may change anything."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from apiflask import APIFlask
from flask import Response, request

from webapi.problems import CrossSite

__all__ = ["register"]

_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_USUAL_PORTS: Final = {"http": ":80", "https": ":443"}
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'self';"
        " frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def register(flask_app: APIFlask) -> None:
    """Refuses changes that come from other sites, and sets the headers of every answer."""
    flask_app.before_request(_refuse_other_sites)
    flask_app.after_request(_set_headers)


def _refuse_other_sites() -> None:
    """A browser says where a request comes from, and no page can make it lie; programs send neither header."""
    if request.method in _SAFE_METHODS:
        return
    site = request.headers.get("Sec-Fetch-Site")
    if site in ("same-origin", "none"):
        return
    origin = request.headers.get("Origin")
    if site == "cross-site" or (origin is not None and not _is_here(origin)):
        raise CrossSite(
            f"a page of {origin or 'another site'} may not change anything here; use this site's own page, or a program"
        )


def _is_here(origin: str) -> bool:
    parts = urlsplit(origin)
    usual = _USUAL_PORTS.get(parts.scheme, "")
    host: str = request.environ.get("HTTP_HOST", request.host)
    return parts.netloc.lower().removesuffix(usual) == host.lower().removesuffix(usual)


def _set_headers(response: Response) -> Response:
    present = {name.lower() for name, _ in response.headers}
    response.headers.extend((name, value) for name, value in _HEADERS.items() if name.lower() not in present)
    return response
