"""For whom the server is meant: the names that it answers to, and what proxies before it may say of a request.

A page of another site can have its own name resolve to this machine's address (DNS rebinding); the visitor's browser then
takes this server for that site. Such a request carries the foreign name in `Host`, so only the server's own names pass.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Final
from urllib.parse import urlsplit

from apiflask import APIFlask
from flask import Response, request

from asynctask.config import Config
from asynctask.errors import InputError
from webapi.problems import CrossSite

__all__ = ["AllowedHosts", "TrustedProxies", "UnknownHost", "is_loopback", "is_wildcard", "name_of", "register"]

_WILDCARDS: Final = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - compared, not bound


class UnknownHost(InputError):
    """The request is for a name that this server is not meant for."""

    code = "unknown_host"
    status = 421


def register_hosts(flask_app: APIFlask, config: Config, bound: str) -> None:
    """Has ``flask_app`` answer to the names of ``config`` alone, and believe its trusted proxies. ``bound`` is the address
    or name that it is served at."""
    hosts = AllowedHosts(config.allowed_hosts, bound)

    def refuse_unknown_hosts() -> None:
        host = request.environ.get("HTTP_HOST", "")
        if host and not hosts.knows(host):  # browsers always send one
            raise UnknownHost(
                f"this server is not meant for the name {host[:255]!r}; if it is one of its names, the operator adds it to"
                " allowed_hosts"
            )

    flask_app.before_request(refuse_unknown_hosts)
    if config.trusted_proxies:
        flask_app.wsgi_app = TrustedProxies(  # type: ignore[method-assign]
            flask_app.wsgi_app, config.trusted_networks(), forwarded=config.proxy_headers == "forwarded"
        )


def is_wildcard(host: str) -> bool:
    """Whether a server that is bound to ``host`` takes connections at every address of its machine."""
    return host in _WILDCARDS


def is_loopback(name: str) -> bool:
    """Whether a name or an address without port means this very machine, wherever it is resolved."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _address_of(name)
    return address is not None and address.is_loopback


def name_of(host: str) -> str | None:
    """The name or address in a `Host`, without port, brackets and the dot at the end; None where it is no such thing."""
    name, _, port = host.partition("]") if host.startswith("[") else host.partition(":")
    if host.startswith("["):
        name, port = name[1:], port.removeprefix(":")
        if _address_of(name) is None:
            return None
    if port and not (port.isascii() and port.isdecimal()):
        return None
    name = name.lower().removesuffix(".")
    return name if name and not set(name) & set("/@?# ") else None


def _address_of(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(name)
    except ValueError:
        return None
    mapped = getattr(found, "ipv4_mapped", None)
    return mapped or found


class AllowedHosts:
    """The names of a server.

    Arguments: ``allowed``, names with spaces between, `.example.com` for all below it too, `*` for any; ``bound``, what the
    server listens on. ``bound`` and this machine's loopback names always pass: no site can make them its own. Without
    ``allowed``, a server that is bound to every address answers to any IP address, for the same reason, and to the
    machine's own name.
    """

    def __init__(self, allowed: str, bound: str) -> None:
        names = [each.lower().removesuffix(".") for each in allowed.split()]
        self._any = "*" in names
        self._names = frozenset(name_of(each) or each for each in names if not each.startswith("."))
        self._below = tuple(each for each in names if each.startswith("."))
        self._addresses = not names and is_wildcard(bound)
        if self._addresses:
            self._names |= {socket.gethostname().lower()}
        elif not is_wildcard(bound):
            self._names |= {bound.lower()}
        self._find = lru_cache(maxsize=64)(self._looked_up)

    def knows(self, host: str) -> bool:
        """Whether the server is meant by a `Host`."""
        return self._any or self._find(host[:300])

    def _looked_up(self, host: str) -> bool:
        name = name_of(host)
        if name is None:
            return False
        if name in self._names or is_loopback(name) or f".{name}".endswith(self._below):
            return True
        return self._addresses and _address_of(name) is not None


class TrustedProxies:
    """WSGI middleware: requests of the proxies in ``networks`` are those of the clients that they name.

    With ``forwarded`` it believes the header `Forwarded` (RFC 7239), else `X-Forwarded-For`, `-Host` and `-Proto`. Of
    several proxies in a row, the first address from the right that is not trusted is the client; host and scheme are the
    last ones given.
    """

    def __init__(
        self, application: Any, networks: Iterable[ipaddress.IPv4Network | ipaddress.IPv6Network], *, forwarded: bool
    ) -> None:
        self._application = application
        self._networks = tuple(networks)
        self._read: Callable[[dict[str, Any]], tuple[list[str], str, str]] = _forwarded if forwarded else _x_forwarded

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        """As WSGI says."""
        if self._trusts(environ.get("REMOTE_ADDR", "")):
            clients, host, scheme = self._read(environ)
            client = self._client(clients)
            if client:
                environ["REMOTE_ADDR"] = client
            if host:
                environ["HTTP_HOST"] = host
            if scheme in ("http", "https"):
                environ["wsgi.url_scheme"] = scheme
        return self._application(environ, start_response)

    def _trusts(self, text: str) -> bool:
        address = _address_of(text)
        return address is not None and any(address in network for network in self._networks)

    def _client(self, clients: list[str]) -> str:
        found = ""
        for each in reversed(clients):
            address = _address_of(each) or _address_of(name_of(each) or "")
            if address is None:
                break
            found = str(address)
            if not self._trusts(found):
                break
        return found


def _x_forwarded(environ: dict[str, Any]) -> tuple[list[str], str, str]:
    clients = _listed(environ.get("HTTP_X_FORWARDED_FOR", ""))
    host = _listed(environ.get("HTTP_X_FORWARDED_HOST", ""))
    scheme = _listed(environ.get("HTTP_X_FORWARDED_PROTO", ""))
    return clients, host[-1] if host else "", scheme[-1].lower() if scheme else ""


def _forwarded(environ: dict[str, Any]) -> tuple[list[str], str, str]:
    elements = []
    for element in _listed(environ.get("HTTP_FORWARDED", "")):
        pairs = (pair.partition("=") for pair in element.split(";"))
        elements.append({name.strip().lower(): value.strip().strip('"') for name, _, value in pairs})
    last = elements[-1] if elements else {}
    return [each.get("for", "") for each in elements], last.get("host", ""), last.get("proto", "").lower()


def _listed(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


# -- What every answer carries against browsers being talked into something, and who may change anything.

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
