"""Who may use the server, and protection from other sites: tokens, host names, trusted proxies and their path prefix,
cross-site requests, security headers.

By DNS rebinding a page of another site makes its own name resolve to this machine; the browser then takes this server for
that site. Such a request has the foreign name in `Host`, so only the server's own names are answered.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache, partial
from typing import Any, Final, TypeVar
from urllib.parse import unquote, urlsplit

from apiflask import APIFlask
from flask import Request, Response, g, request
from werkzeug.datastructures import Authorization
from werkzeug.http import dump_cookie

from asynctask.access import Link, User, read_link, read_session, sign_session
from asynctask.clock import SECOND, rfc3339
from asynctask.config import BASE_PATH, WEB_PATHS, Config
from asynctask.errors import InputError
from asynctask.logs import Logger, get_logger
from webapi.context import EXTENSION
from webapi.problems import CrossSite, shows_pages

_Found = TypeVar("_Found")
_WILDCARDS: Final = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - compared, not bound


class UnknownHost(InputError):
    """The request's `Host` is none of this server's names."""

    code = "unknown_host"
    status = 421


class InvalidPrefix(InputError):
    """A trusted proxy names a path prefix that is none."""

    code = "invalid_prefix"
    status = 400


FILES: Final = frozenset({"static", "pages.client"})
"""Endpoints that answer without a token: files that are the same everywhere."""

_PROBES: Final = frozenset({"/healthz", "/readyz"})
"""Paths that answer without a token and to every host name: what starts and watches the process has no token, and calls it
by the address of its pod. They show nothing that another site could use."""


def register_hosts(flask_app: APIFlask, config: Config, bound: str) -> None:
    """Restricts ``flask_app`` to the host names of ``config`` and makes it believe the trusted proxies. ``bound``: the
    address or name that it is served at."""
    hosts = AllowedHosts(config.allowed_hosts, bound)

    def refuse_unknown_hosts() -> None:
        if _REFUSED_PREFIX in request.environ:
            raise InvalidPrefix(
                f"the proxy sends X-Forwarded-Prefix {request.environ[_REFUSED_PREFIX][:200]!r}, which is no path; it must"
                " set the header itself, to /bulk for instance, or remove it"
            )
        host = request.environ.get("HTTP_HOST", "")
        if host and request.path not in _PROBES and not hosts.knows(host):  # a browser always sends it
            raise UnknownHost(
                f"this server does not answer to the name {host[:255]!r}; if it should, the operator adds it to"
                " allowed_hosts"
            )

    flask_app.before_request(refuse_unknown_hosts)
    flask_app.wsgi_app = Prefixed(flask_app.wsgi_app, config.base_path)  # type: ignore[method-assign]
    if config.trusted_proxies:
        flask_app.wsgi_app = TrustedProxies(  # type: ignore[method-assign]
            flask_app.wsgi_app,
            config.trusted_networks(),
            unix=config.trusts_unix,
            forwarded=config.proxy_headers == "forwarded",
        )


def is_wildcard(host: str) -> bool:
    """Whether a server bound to ``host`` listens on every address of the machine."""
    return host in _WILDCARDS


def is_loopback(name: str) -> bool:
    """Whether a name or an address without port always means the local machine."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _address_of(name)
    return address is not None and address.is_loopback


def name_of(host: str) -> str | None:
    """The name or address in a `Host`, without port, brackets and final dot; None if invalid."""
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
    """The host names of a server.

    Arguments: ``allowed``, names separated by spaces, `.example.com` for all subdomains too, `*` for any; ``bound``, the
    address that the server listens on; ``unix:/path`` is no name. ``bound`` and loopback names always pass: no other site
    can own them. Without ``allowed``, a server bound to every address also answers to any IP address, for the same reason,
    and to the machine's own name.
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
        self._find = lru_cache(maxsize=64)(self._matches)

    def knows(self, host: str) -> bool:
        """Whether a `Host` is one of the server's names."""
        return self._any or self._find(host[:300])

    def _matches(self, host: str) -> bool:
        name = name_of(host)
        if name is None:
            return False
        if name in self._names or is_loopback(name) or f".{name}".endswith(self._below):
            return True
        return self._addresses and _address_of(name) is not None


_PREFIX: Final = "asynctask.prefix"
_REFUSED_PREFIX: Final = "asynctask.refused_prefix"


class Prefixed:
    """WSGI middleware: puts the path under which a proxy serves the application into `SCRIPT_NAME`, which every link of an
    answer begins with.

    The path is the one that a trusted proxy names, else ``prefix``. A proxy may strip it from the requests or leave it. A
    `SCRIPT_NAME` that begins with it stays: a server or another application has set it already.
    """

    def __init__(self, application: Any, prefix: str) -> None:
        self._application = application
        self._prefix = prefix

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        prefix, mounted = environ.get(_PREFIX, self._prefix), environ.get("SCRIPT_NAME", "")
        if prefix and not f"{mounted}/".startswith(f"{prefix}/"):
            environ["SCRIPT_NAME"] = prefix + mounted
            path = environ.get("PATH_INFO", "")
            # /api/tasks under /api is a path of the application: a proxy that names such a prefix strips it.
            if not mounted and f"{path}/".startswith(f"{prefix}/") and prefix.split("/")[1] not in WEB_PATHS:
                environ["PATH_INFO"] = path.removeprefix(prefix)
        return self._application(environ, start_response)


class TrustedProxies:
    """WSGI middleware: attributes requests of the proxies in ``networks``, and with ``unix`` those that come over a Unix
    socket, which have no address, to the clients that they name.

    With ``forwarded`` it reads the header `Forwarded` (RFC 7239), else `X-Forwarded-For`, `-Host`, `-Proto` and `-Prefix`.
    In a chain of proxies the client is the first untrusted address from the right; host, scheme and prefix are the last
    ones.
    """

    def __init__(
        self,
        application: Any,
        networks: Iterable[ipaddress.IPv4Network | ipaddress.IPv6Network],
        *,
        unix: bool,
        forwarded: bool,
    ) -> None:
        self._application = application
        self._networks = tuple(networks)
        self._unix = unix
        self._forwarded = forwarded
        self._read: Callable[[dict[str, Any]], tuple[list[str], str, str]] = _forwarded if forwarded else _x_forwarded

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        if self._trusts(environ.get("REMOTE_ADDR", "")):
            if not self._forwarded:
                _take_prefix(environ)
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
        if not text:
            return self._unix
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


def _take_prefix(environ: dict[str, Any]) -> None:
    """Takes over the prefix that a proxy names; `/` is the root."""
    given = environ.get("HTTP_X_FORWARDED_PREFIX", "")
    last = given.rpartition(",")[2].strip()
    prefix = last.removesuffix("/")
    if not prefix and last in ("", "/"):
        return
    environ[_PREFIX if BASE_PATH.fullmatch(prefix) else _REFUSED_PREFIX] = prefix


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


# -- tokens


class Unauthorized(InputError):
    """The request has no valid token."""

    code = "unauthorized"
    status = 401
    # A browser asks for name and secret; Chromium takes no header that names two ways.
    headers: tuple[tuple[str, str], ...] = (
        ("WWW-Authenticate", 'Basic realm="AsyncTask", charset="UTF-8"'),
        ("WWW-Authenticate", "Bearer"),
    )


class LoggedOut(Unauthorized):
    """The same to a page, which asks for a token itself: a browser would ask with each poll once a session has ended."""

    headers = Unauthorized.headers[1:]


class InvalidLink(InputError):
    """The link in the query was not made here, or has expired."""

    code = "invalid_link"
    status = 403


class Unprotected(InputError):
    """There is no login, and the request comes from elsewhere."""

    code = "unprotected"
    status = 403


class TooManyAttempts(InputError):
    """Too many logins from this address failed just now."""

    code = "too_many_attempts"
    status = 429

    def __init__(self, wait_s: float) -> None:
        super().__init__("too many logins from this address failed: send a valid token after the seconds of Retry-After")
        self.headers = (("Retry-After", str(max(1, math.ceil(wait_s)))),)


OPEN: Final = FILES | {"pages.login", "pages.sign_in", "pages.sign_out"}
"""Endpoints that answer a request without a login."""

Authorize = Callable[[Request], User | None]
"""Names the user of a request, or nobody."""


def register_users(flask_app: APIFlask, config: Config, authorize: Authorize | None, *, allow_unprotected: bool) -> None:
    """Answers only to the users whom ``authorize`` names, and to those of ``config.tokens``: with the secret as a bearer
    token (RFC 6750), with name and secret as user and password (RFC 7617), or with the session of a browser that sent the
    secret before. Slows down those who guess. Without either, to this machine alone, unless ``allow_unprotected``. Whoever
    has a link is its user, without a login."""
    known = [(token.user, _digest(token.secret)) for token in config.access()]
    clock = flask_app.extensions[EXTENSION].clock
    logins = Logins(known, clock.monotonic, get_logger("asynctask.web"))
    flask_app.extensions[LOGINS] = logins

    def recognise() -> None:
        g.is_known = False
        if request.path in _PROBES or request.endpoint in OPEN:
            return
        if _LINK in request.environ:
            user: User | None = _by_link(logins, config.link_secret, clock.now() // SECOND)
        elif authorize is None and not known:
            if not allow_unprotected:
                _refuse_elsewhere()
            g.is_known = True
            return
        else:
            user = None if authorize is None else _named_by(authorize)
            if user is None and known:
                by_session = SESSION in request.cookies and "Authorization" not in request.headers
                user = _by_session(logins, clock.now() // SECOND) if by_session else _by_token(logins)
        if user is None:
            raise LoggedOut("you are not logged in: log in to the application that this page belongs to, and try again")
        g.user, g.is_known = user, True
        request.environ["REMOTE_USER"] = user.name

    flask_app.before_request(recognise)
    flask_app.wsgi_app = Linked(flask_app.wsgi_app)  # type: ignore[method-assign]


def _named_by(authorize: Authorize) -> User | None:
    user = authorize(request._get_current_object())  # type: ignore[attr-defined]
    if user is None or isinstance(user, User):
        return user
    raise TypeError(f"authorize must return a webapi.User, or None for nobody, not {type(user).__name__}")


def _by_token(logins: Logins) -> User:
    """The user of the token in the request. Raises :class:`Unauthorized`, :class:`TooManyAttempts`."""
    try:
        given = request.authorization
    except ValueError:  # werkzeug raises it for base64 with other characters than ASCII
        given = None
    user = logins.user_of(given, request.remote_addr or "", request.path)
    if user is None:
        of_page = request.headers.get("Sec-Fetch-Dest") == "empty" or shows_pages()
        wrong = "a token is needed: send it" if given is None else "this token is not known: send another"
        raise (LoggedOut if of_page else Unauthorized)(
            f"{wrong} as `Authorization: Bearer SECRET`, or log in with name and secret"
        )
    return user


SESSION: Final = "asynctask_session"
"""The cookie of a browser whose user has signed in with a token."""

SESSION_S: Final = 43_200
"""Seconds that a session lasts."""

LOGINS: Final = "asynctask.logins"
"""The :class:`Logins` of a Flask application, among its extensions."""


def _by_session(logins: Logins, now_s: int) -> User:
    """The user of the session in the request's cookie. Raises :class:`LoggedOut`, :class:`TooManyAttempts`."""
    user = logins.session_of(request.cookies[SESSION], now_s, request.remote_addr or "", request.path)
    if user is None:
        ended = LoggedOut("your session has ended: sign in again")
        # Otherwise each poll of a page that is open counts as a guess.
        ended.headers += (("Set-Cookie", session_cookie("", 0)),)
        raise ended
    g.has_session = True
    return user


def session_cookie(text: str, lasts_s: int) -> str:
    """The header Set-Cookie of a session; of an empty one that lasts no time, to end it. A page of another site opens this
    one's with it (Lax), and changes nothing (:func:`register`)."""
    path, secure = request.script_root or "/", request.is_secure
    return dump_cookie(SESSION, text, max_age=lasts_s, path=path, secure=secure, httponly=True, samesite="Lax")


_LINK: Final = "asynctask.link"


class Linked:
    """WSGI middleware: takes the parameter `link` out of the query, so that no route, no answer and no log has it."""

    def __init__(self, application: Any) -> None:
        self._application = application

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        parts = environ.get("QUERY_STRING", "").split("&")
        links = [part for part in parts if part.startswith("link=")]
        if links:
            environ[_LINK] = unquote(links[0].removeprefix("link=")) if len(links) == 1 else ""
            environ["QUERY_STRING"] = "&".join(part for part in parts if part not in links)
        return self._application(environ, start_response)


def _by_link(logins: Logins, secret: str, now_s: int) -> User:
    """The holder of the link in the query. Raises :class:`InvalidLink`, :class:`TooManyAttempts`."""
    link = logins.link_of(request.environ[_LINK], secret, request.remote_addr or "", request.path)
    if link is None or link.expires_at <= now_s:
        raise InvalidLink("this link is not valid, or has expired: ask for a new one")
    g.link_ends_at = link.expires_at
    until = rfc3339(link.expires_at * SECOND)
    return User(f"link until {until}", rights=link.rights, task_id=link.task_id)


_OF_PROXIES: Final = (
    *(f"HTTP_X_FORWARDED_{name}" for name in ("FOR", "HOST", "PROTO")),
    "HTTP_FORWARDED",
    "HTTP_X_REAL_IP",
    "HTTP_VIA",
)


def _refuse_elsewhere() -> None:
    """Refuses what does not come from a program or a browser of this machine. A proxy may have an address of this machine;
    it is known by its headers, and by the name that its clients use."""
    host = request.environ.get("HTTP_HOST", "")
    is_here = is_loopback(request.remote_addr or "") and (not host or is_loopback(name_of(host) or ""))
    if is_here and not any(name in request.environ for name in _OF_PROXIES):
        return
    raise Unprotected(
        "this server has no login, so it answers only to this machine. The operator gives create_app authorize=, or sets"
        " tokens; or, if a proxy with a login is before it, allow_unprotected"
    )


class Allowance:
    """A token bucket: ``most`` uses at once, then one each ``period_s`` seconds. Not thread-safe."""

    def __init__(self, most: int, period_s: float) -> None:
        self._most = most
        self._period_s = period_s
        self._used = 0.0
        self._at = -math.inf

    def wait_s(self, now: float) -> float:
        """Seconds until the next one is allowed; 0: it is."""
        return max(0.0, (self._used_at(now) + 1 - self._most) * self._period_s)

    def use(self, now: float) -> None:
        """Counts a use, allowed or not."""
        self._used, self._at = min(self._used_at(now) + 1, self._most), now

    def _used_at(self, now: float) -> float:
        return max(0.0, self._used - (now - self._at) / self._period_s)


class _Failures:
    """The failed logins of one address."""

    def __init__(self) -> None:
        self.allowed = Allowance(Logins.MOST, Logins.PERIOD_S)
        self.lines = Allowance(1, Logins.LINE_S)
        self.untold = 0


class Logins:
    """Looks at the secrets of requests, tokens and links, and limits guessing for each address (IPv6: each /64).

    An address may fail ten times at once, and then once a second. Beyond that its secrets are refused without a look, so
    that a guess that is right tells nothing, except those that were valid from there before: who is logged in goes on. No
    other address is affected. Of addresses, the 10,000 that failed last are kept. Thread-safe.

    Arguments: the ``known`` users with the digests of their secrets; a ``monotonic`` clock in seconds; the ``log``, which
    gets one line for an address in 10 s, with the number of failures since the last one, and one a second in all.
    """

    MOST: Final = 10
    PERIOD_S: Final = 1.0
    LINE_S: Final = 10.0
    ADDRESSES: Final = 10_000

    def __init__(self, known: Iterable[tuple[User, bytes]], monotonic: Callable[[], float], log: Logger) -> None:
        self._known = tuple(known)
        self._monotonic = monotonic
        self._log = log
        self._lock = threading.Lock()
        self._failed: OrderedDict[str, _Failures] = OrderedDict()
        self._valid: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        self._lines = Allowance(self.MOST, 1.0)

    def user_of(self, given: Authorization | None, address: str, path: str) -> User | None:
        """The user whose secret is given, if any is. ``address`` and ``path`` of the request, for the log.

        Raises :class:`TooManyAttempts`.
        """
        if given is None or given.type not in ("bearer", "basic"):
            return None
        name = (given.username or "") if given.type == "basic" else None
        secret = (given.token if given.type == "bearer" else given.password) or ""
        if not secret:
            return None
        # A secret that was typed into the field of the name is not for the log.
        is_secret = name is not None and self._compare(_digest(name), None) is not None
        shown = "***" if is_secret else name and name[:64]
        digest = _digest(secret)
        return self._looked_at(digest, lambda: self._compare(digest, name), address, name=shown, path=path)

    def link_of(self, text: str, secret: str, address: str, path: str) -> Link | None:
        """What a link permits, also one that has expired, if it was signed with ``secret``. Raises as :meth:`user_of`."""
        return self._looked_at(_digest(text), lambda: read_link(text, secret), address, name="link", path=path)

    @property
    def takes_tokens(self) -> bool:
        """Whether there are tokens to sign in with."""
        return bool(self._known)

    def session(self, secret: str, expires_at: int) -> str:
        """The text of a session of the user with this secret."""
        text = sign_session(expires_at, _digest(secret))
        with self._lock:
            self._ended.pop(_digest(text), None)  # of this second, that ended within it
        return text

    def end_session(self, text: str) -> None:
        """Ends a session for every copy of it, as far as this process is asked."""
        if read_session(text, [digest for _, digest in self._known]) is not None:
            with self._lock:
                keep(self._ended, _digest(text), None, self.ADDRESSES)

    def session_of(self, text: str, now_s: int, address: str, path: str) -> User | None:
        """The user of a session that has not ended. Raises as :meth:`user_of`."""
        users = {digest: user for user, digest in self._known}
        found = self._looked_at(_digest(text), lambda: read_session(text, users), address, name="session", path=path)
        return None if found is None or found[0] <= now_s or _digest(text) in self._ended else users[found[1]]

    def _looked_at(
        self, secret: bytes, look: Callable[[], _Found | None], address: str, *, name: str | None, path: str
    ) -> _Found | None:
        with self._lock:
            found, wait_s, attempts = self._judge(secret, look, network_of(address))
        if attempts:
            self._log.warning("login_failed", address=address[:64], name=name, path=path[:200], attempts=attempts)
        if wait_s:
            raise TooManyAttempts(wait_s)
        return found

    def _judge(self, secret: bytes, look: Callable[[], _Found | None], network: str) -> tuple[_Found | None, float, int]:
        """What ``look`` finds for a secret, the seconds to wait before one is looked at again, and the failures to log."""
        now, failures = self._monotonic(), self._failed.get(network)
        wait_s = 0.0 if failures is None or (network, secret) in self._valid else failures.allowed.wait_s(now)
        if not wait_s:
            found = look()
            if found is not None:
                keep(self._valid, (network, secret), None, self.ADDRESSES)
                return found, 0.0, 0
        if failures is None:
            failures = _Failures()
        keep(self._failed, network, failures, self.ADDRESSES)
        if not wait_s:
            failures.allowed.use(now)
        failures.untold += 1
        if failures.lines.wait_s(now) or self._lines.wait_s(now):
            return None, wait_s, 0
        failures.lines.use(now)
        self._lines.use(now)
        told, failures.untold = failures.untold, 0
        return None, wait_s, told

    def _compare(self, secret: bytes, name: str | None) -> User | None:
        """Compares all of them in constant time."""
        found = [user for user, digest in self._known if hmac.compare_digest(digest, secret)]
        return next((each for each in found if name is None or each.name == name), None)


def network_of(address: str) -> str:
    """What one client has for itself: an IPv4 address, the /64 of an IPv6 address; else the text."""
    found = _address_of(address)
    return str(int(found) >> 64) if isinstance(found, ipaddress.IPv6Address) else str(found or address)


def keep(kept: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Puts an entry at the end, and drops the first beyond the ``most``."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "replace")).digest()


# -- cross-site requests and security headers

_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_PREFLIGHT: Final = {
    "Access-Control-Allow-Methods": "GET, HEAD, POST, PATCH",
    "Access-Control-Allow-Headers": "Authorization, Content-Type, Idempotency-Key, If-None-Match, Last-Event-ID, Range",
    "Access-Control-Max-Age": "600",
}
_EXPOSED: Final = "Asynctask-Held, Content-Disposition, Content-Language, ETag, Idempotency-Replayed, Location, Retry-After"
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


def register_origins(flask_app: APIFlask, allowed: Collection[str]) -> None:
    """Lets the pages of the ``allowed`` origins use the API, by CORS: their preflights are answered before anybody is asked
    who they are, for a browser sends none of that with them."""

    def answer_preflight() -> Response | None:
        if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
            return None
        return Response(status=204, headers=_PREFLIGHT) if request.headers.get("Origin") in allowed else None

    def name_origin(response: Response) -> Response:
        response.vary.add("Origin")
        if (origin := request.headers.get("Origin")) in allowed:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Allow-Credentials"] = "true"
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED
        return response

    if allowed:
        flask_app.before_request(answer_preflight)
        flask_app.after_request(name_origin)


def register(flask_app: APIFlask, allowed: Collection[str]) -> None:
    """Refuses changes requested by other sites than the ``allowed`` origins, and sets the headers of every answer."""
    flask_app.before_request(partial(_refuse_other_sites, allowed))
    flask_app.after_request(_set_headers)


def _refuse_other_sites(allowed: Collection[str]) -> None:
    """Checks Sec-Fetch-Site and Origin, which a page cannot forge; programs send neither. A page that is not of
    this origin is another's, whether or not the two are one site."""
    if request.method in _SAFE_METHODS:
        return
    site = request.headers.get("Sec-Fetch-Site")
    origin = request.headers.get("Origin")
    if site in ("same-origin", "none") or origin in allowed:
        return
    is_another = site is not None if origin is None else not _is_here(origin)
    if site == "cross-site" or is_another:
        raise CrossSite(
            f"a page of {origin or 'another site'} may not change anything here; use this site's own page, or a program. If"
            " it is this site's own page behind a proxy, the operator has the proxy send X-Forwarded-Host and"
            " X-Forwarded-Proto, and adds its address to trusted_proxies"
        )


def _is_here(origin: str) -> bool:
    try:
        parts = urlsplit(origin)
    except ValueError:  # no browser sends such a one
        return False
    usual = _USUAL_PORTS.get(parts.scheme, "")
    host: str = request.environ.get("HTTP_HOST", request.host)
    return parts.netloc.lower().removesuffix(usual) == host.lower().removesuffix(usual)


def _set_headers(response: Response) -> Response:
    # Who asks decides on nearly every answer, by a cookie too, which a shared cache does not look at.
    response.headers.setdefault("Cache-Control", "private, no-cache")
    present = {name.lower() for name, _ in response.headers}
    response.headers.extend((name, value) for name, value in _HEADERS.items() if name.lower() not in present)
    return response
