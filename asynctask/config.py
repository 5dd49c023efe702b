"""Configuration: one frozen value. Each field is a keyword argument, an environment variable and a command-line flag.

:func:`load` takes the environment as an argument.
"""

from __future__ import annotations

import base64
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any, Final, NamedTuple, get_type_hints
from urllib.parse import unquote

from asynctask.access import RIGHTS, USUAL, User
from asynctask.errors import ConfigError
from asynctask.messages import CATALOGUE

ENV_PREFIX: Final = "ASYNCTASK_"
HOW_TO_MAKE_ONE: Final = 'to make one: python -c "import secrets; print(secrets.token_urlsafe(32))"'
WHSEC_FORM: Final = (
    "whsec_ and 24 to 64 bytes as base64; to make one: python -c"
    " \"import base64, secrets; print('whsec_' + base64.b64encode(secrets.token_bytes(32)).decode())\""
)

LOG_LEVELS: Final = ("debug", "info", "warning", "error")
LOG_FORMATS: Final = ("auto", "console", "json")
_CHOICES: Final[Mapping[str, Sequence[str]]] = {
    "log_level": LOG_LEVELS,
    "log_format": LOG_FORMATS,
    "fair_by": ("task", "owner"),
    "proxy_headers": ("x-forwarded", "forwarded"),
}

_ELSEWHERE: Final = frozenset({"url"})
"""Environment variables with the prefix, in lower case, that are not settings: a Procfile or a container gives the same
environment to all programs, and the middleware for Ruby's Sidekiq reads ``ASYNCTASK_URL``."""

_KUBERNETES: Final = re.compile(r"(\w+?_)??(service_(host|port(_\w+)?)|port(_\d+_(tcp|udp|sctp)(_(proto|port|addr))?)?)")
_ADDRESS: Final = re.compile(r"(tcp|udp|sctp)://")
_REDIS: Final = ("redis://", "rediss://", "unix://")
LEAST_HELD_S: Final = 5.0
"""Smallest ``held_limit_s``: on a busy machine every process stalls for a second or two."""

QUEUE_NAME: Final = re.compile(r"[A-Za-z0-9_:.\-]{1,255}")
_BUCKET: Final = re.compile(r"(?!(?:file|local|https?|s?ftp|ssh)://)[a-z][a-z0-9+.-]*://[^\s?#]+")
_URLS: Final = frozenset({"database_url", "broker_url", "results_url"})
BASE_PATH: Final = re.compile(r"(?=.{2,200}\Z)(?:/(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._~-]+)+")
"""A path before those of the web server, without characters that are special in a URL, a header or HTML."""
WEB_PATHS: Final = frozenset(
    {
        "api", "client", "docs", "failures", "healthz", "jobs", "login", "logout", "metrics", "new", "openapi.json",
        "queues", "readyz", "schedules", "search", "static", "tasks", "workers",
    }
)  # fmt: skip
"""First segments of the web server's own paths."""
_UNIX: Final = "unix:"
_TRUSTED_UNIX: Final = "unix"
_MAX_SOCKET_PATH: Final = 100
"""Largest length of a Unix socket's path, in bytes; systems accept 103 or 107."""
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>]+")
_OPTION: Final = re.compile(r"[\w.%-]+=[^\s&;\"'<>]+")
_SECRET_NAME: Final = re.compile(r"pass|pwd|secret|key|token|credential|signature|\bsig\b", re.IGNORECASE)
_LINK_SECRET: Final = re.compile(r"[!-~]{32,256}")
_ORIGIN: Final = re.compile(r"(https?)://(\[[0-9a-f:.]+\]|[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?)(?::([0-9]{1,5}))?")
_SECRETS: Final = frozenset({"tokens", "link_secret", "webhook_secret", "webhook_url"})
_TOKEN: Final = re.compile(r"([A-Za-z0-9_.-]{1,64})(?::([a-z,]+))?(?:@([^\s=]+))?=([A-Za-z0-9._~-]{16,256})")


def _field(default: Any, text: str, *, low: float | None = None, high: float | None = None, shown: bool = True) -> Any:
    return field(default=default, repr=shown, metadata={"help": text, "low": low, "high": high})


class Token(NamedTuple):
    """An access token for the web server: who has it, and the secret."""

    user: User
    secret: str


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of one application. Raises :class:`ConfigError` for invalid values."""

    database_url: str = _field("sqlite:///asynctask.db", "URL of the ledger's database, in SQLAlchemy's form.", shown=False)
    broker_url: str = _field(
        "",
        "URL of a Redis for untracked jobs and jobs of other programs: redis://, rediss:// or unix://; empty: all jobs"
        " wait in the database.",
        shown=False,
    )
    namespace: str = _field("", "Prefix of every key in Redis.")
    log_level: str = _field("info", "Least level of the lines that are logged: " + ", ".join(LOG_LEVELS) + ".")
    log_format: str = _field(
        "auto", "Form of these lines: console, json, or auto, which is console on a terminal, else json."
    )
    locale: str = _field("en", "Language of the messages that the middleware records: " + ", ".join(CATALOGUE) + ".")
    data_dir: str = _field("asynctask-data", "Folder for uploads and exports, shared by all processes.")
    results_url: str = _field(
        "", "URL of a bucket for exports, such as s3://bucket/prefix; empty: a folder of data_dir.", shown=False
    )
    app: str = _field("", "module:attribute of the application, for child processes.")

    concurrency: int = _field(5, "Threads of a worker process.", low=1, high=1000)
    processes: int = _field(1, "Worker processes.", low=1, high=256)
    queues: str = _field("default callbacks", "Queues to work on, with weights, separated by spaces: critical,3 default,1.")
    callback_queue: str = _field("callbacks", "Queue of the callbacks of Tasks; a worker process must work it.")
    strict_queues: bool = _field(False, "Take from the queues in the listed order, ignoring weights.")
    shutdown_s: float = _field(25.0, "Seconds that running jobs have to end after a stop.", low=0, high=86_400)
    lease_s: float = _field(20.0, "Seconds after which a silent process counts as dead.", low=0.5, high=3600)
    heartbeat_s: float = _field(5.0, "Seconds between renewals of the lease; at most half of it.", low=0.1, high=1800)
    held_limit_s: float = _field(
        0.0,
        "Seconds that a worker process may be held before its supervisor kills and replaces it, at least 5; 0: for ever.",
        low=0,
        high=86_400,
    )
    dispatch_ahead_s: float = _field(
        0.25, "Seconds of work that the dispatcher keeps in a foreign queue.", low=0.01, high=60
    )
    fair_by: str = _field("task", "What gets an equal share at one priority: task (each Task), or owner (each owner).")
    background_share: float = _field(
        0.05,
        "Share of the started jobs that have a larger priority while jobs of the smallest wait; 0: none.",
        low=0,
        high=0.5,
    )

    broker_connections: int = _field(10, "Largest number of connections from a process to Redis.", low=2, high=1000)
    poll_interval_s: float = _field(
        0.0,
        "Average seconds between two polls of a process for due jobs in Redis; 0: 5 times the number of processes.",
        low=0,
        high=3600,
    )
    dead_max_jobs: int = _field(10_000, "Largest number of dead jobs that Redis keeps.", low=1)
    dead_timeout_s: int = _field(15_552_000, "Seconds that Redis keeps a dead job.", low=60)

    database_connections: int = _field(
        10, "Largest number of connections from a process to the database.", low=4, high=1000
    )

    host: str = _field("127.0.0.1", "Address of the web server, or unix:/path of a Unix socket.")
    port: int = _field(8000, "Port of the web server; 0: a free one.", low=0, high=65_535)
    allowed_hosts: str = _field(
        "", "Host names that the web server accepts, separated by spaces (.a.com: with subdomains; *: any); empty: its own."
    )
    trusted_proxies: str = _field(
        "", "Addresses or networks of trusted proxies, separated by spaces; unix: clients of the Unix socket."
    )
    proxy_headers: str = _field(
        "x-forwarded", "Headers that trusted proxies set: x-forwarded (-For, -Host, -Proto, -Prefix) or forwarded."
    )
    base_path: str = _field("", "Path under which a proxy serves the web server, such as /bulk; empty: at the root.")
    tokens: str = _field(
        "",
        "Users of the web server, separated by spaces: ann=TOKEN, eve:read=TOKEN to read only, shop@OWNER=TOKEN for one"
        " owner's Tasks; empty: everyone.",
        shown=False,
    )
    link_secret: str = _field(
        "", "Signs links to single Tasks: at least 32 characters, the same in all processes; empty: no links.", shown=False
    )
    allowed_origins: str = _field(
        "", "Sites whose pages may use the API, separated by spaces: https://shop.example; empty: only its own pages."
    )
    allow_unprotected: bool = _field(
        False, "Another WSGI server answers other machines without tokens: a proxy with a login is before it."
    )
    web_threads: int = _field(8, "Threads of the web server.", low=1, high=256)
    access_log: bool = _field(False, "Log each request of the web server.")
    webhook_secret: str = _field(
        "",
        "Secret that signs the requests of webhooks: whsec_ and 24 to 64 bytes as base64; empty: none are sent.",
        shown=False,
    )
    webhook_url: str = _field("", "URL that gets a request when any Task has ended; empty: none.", shown=False)
    webhook_private: bool = _field(False, "Send webhooks to private addresses, too.")
    submit_wait_s: float = _field(
        1.0,
        "Seconds that a submission waits for its validation, to return the rejected rows.",
        low=0,
        high=60,
    )
    dry_run_s: float = _field(120.0, "Time limit of a dry run of a stored list, in seconds.", low=0.1, high=3600)

    max_body_bytes: int = _field(16_777_216, "Largest JSON body of a request, in bytes.", low=1024)
    purge_after_days: float = _field(
        0.0,
        "Days after which maintenance removes ended Tasks, with their rows and files; 0: never.",
        low=0,
        high=36_500,
    )
    history_days: float = _field(7.0, "Days for which the history is kept: the counts of each minute.", low=1, high=400)

    split_cpu_s: int = _field(
        300,
        "Processor time to read one workbook, in seconds; above it the list is refused.",
        low=1,
        high=86_400,
    )
    split_memory: int = _field(
        536_870_912, "Memory to read one workbook, in bytes; above it the list is refused.", low=33_554_432
    )
    max_file_bytes: int = _field(209_715_200, "Largest uploaded file, in bytes.", low=1024)
    max_unzipped_bytes: int = _field(1_073_741_824, "Largest unzipped size of a workbook, in bytes.", low=1024)
    max_unzip_ratio: int = _field(200, "Largest ratio of unzipped to zipped size of a workbook.", low=2)
    max_rows: int = _field(1_000_000, "Largest number of rows or items in one submission.", low=1)
    max_columns: int = _field(1_000, "Largest number of columns in a sheet.", low=1)
    max_cell_chars: int = _field(32_767, "Largest number of characters in one cell.", low=1)
    max_item_bytes: int = _field(65_536, "Largest item as JSON, in bytes.", low=16)
    max_json_depth: int = _field(32, "Deepest nesting of JSON.", low=1, high=90)
    max_result_bytes: int = _field(65_536, "Largest result of a job as JSON, in bytes.", low=0)
    keep_tracebacks: bool = _field(True, "Keep the traceback of each job's last error with its record.")

    def __post_init__(self) -> None:
        for each in fields(self):
            _check(each.name, getattr(self, each.name), each.metadata["low"], each.metadata["high"])
        if self.heartbeat_s * 2 > self.lease_s:
            raise ConfigError(
                f"heartbeat_s ({self.heartbeat_s:g}) must be at most half of lease_s ({self.lease_s:g}),"
                " or one late renewal makes a living process count as dead"
            )
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} {getattr(self, name)!r}: write {', '.join(known[:-1])} or {known[-1]}")
        if 0 < self.held_limit_s < LEAST_HELD_S:
            raise ConfigError(
                f"held_limit_s ({self.held_limit_s:g}) must be 0 or at least {LEAST_HELD_S:g}, or a process that a busy"
                " machine holds up is killed"
            )
        if self.locale not in CATALOGUE:
            raise ConfigError(f"locale {self.locale!r} does not ship; choose one of {', '.join(CATALOGUE)}")
        if not (self.uses_redis or self.broker_url in ("", self.database_url)):
            raise ConfigError("broker_url: write redis://, rediss:// or unix://, or leave it empty for the database")
        if self.results_url and not _BUCKET.fullmatch(self.results_url):
            raise ConfigError("results_url: write the URL of a bucket, as s3://bucket/prefix; for a folder, set data_dir")
        if self.namespace and not self.uses_redis:
            raise ConfigError("namespace: without Redis there are no keys to prefix; leave it empty")
        if self.base_path and (not BASE_PATH.fullmatch(self.base_path) or self.base_path.split("/")[1] in WEB_PATHS):
            raise ConfigError(
                f"base_path {self.base_path!r}: write a path such as /bulk or /tools/bulk, of letters, digits, . _ ~ and"
                f" -, without a slash at its end, that begins with none of the server's own: {', '.join(sorted(WEB_PATHS))}"
            )
        if not QUEUE_NAME.fullmatch(self.callback_queue):
            raise ConfigError(
                f"callback_queue: {self.callback_queue!r} is no queue; write 1 to 255 letters, digits or _ : . -"
            )
        socket_path(self.host)
        self.trusted_networks()
        self.access()
        self.origins()
        _check_link_secret(self.link_secret)
        self.queue_weights()
        self.webhook_key()

    @property
    def uses_redis(self) -> bool:
        """Whether jobs wait in Redis."""
        return self.broker_url.startswith(_REDIS)

    def trusted_networks(self) -> list[IPv4Network | IPv6Network]:
        """The networks in ``trusted_proxies``, without ``unix``; an address is a network of one address."""
        found = []
        for each in self.trusted_proxies.split():
            if each == _TRUSTED_UNIX:
                continue
            try:
                found.append(ip_network(each))
            except ValueError as error:
                raise ConfigError(
                    f"trusted_proxies: {error}; write 127.0.0.1, 10.0.0.0/8 or unix, with spaces between"
                ) from None
        return found

    @property
    def trusts_unix(self) -> bool:
        """Whether clients of a Unix socket are trusted proxies."""
        return _TRUSTED_UNIX in self.trusted_proxies.split()

    def access(self) -> list[Token]:
        """The access tokens for the web server; without any, everyone may use it."""
        found: dict[str, Token] = {}
        for number, each in enumerate(self.tokens.split(), start=1):
            token = _token(each)
            # The message must not show a secret. Two names with the same secret could not be distinguished.
            if token is None or token.user.name in found or token.secret in {other.secret for other in found.values()}:
                raise ConfigError(
                    f"tokens: entry {number} is wrong. Write ann=SECRET or ann:read,submit@OWNER=SECRET, with some of the"
                    f" rights {', '.join(RIGHTS)} (operate: without an owner) and the owner of the Tasks, spaces between"
                    f" entries, and each name and each secret once; a secret has 16 to 256 letters, digits or . _ ~ -;"
                    f" {HOW_TO_MAKE_ONE}"
                )
            found[token.user.name] = token
        return list(found.values())

    def origins(self) -> frozenset[str]:
        """The origins in ``allowed_origins``, as browsers send them: without a port that is usual."""
        found = set()
        for each in self.allowed_origins.split():
            if (parts := _ORIGIN.fullmatch(each)) is None:
                raise ConfigError(
                    f"allowed_origins: {each[:200]!r} is no origin; write scheme and host in lower case, and the port if it"
                    " is none of 80 and 443, such as https://shop.example or http://localhost:5173, with spaces between"
                )
            scheme, host, port = parts.groups()
            usual = port is None or port == {"http": "80", "https": "443"}[scheme]
            found.add(f"{scheme}://{host}" if usual else f"{scheme}://{host}:{port}")
        return frozenset(found)

    def webhook_key(self) -> bytes:
        """The bytes that sign webhooks; empty without ``webhook_secret``."""
        try:
            key = base64.b64decode(self.webhook_secret.removeprefix("whsec_"), validate=True)
        except ValueError:
            key = b""
        if not (24 <= len(key) <= 64 and self.webhook_secret.startswith("whsec_")) and (
            self.webhook_secret or self.webhook_url
        ):
            raise ConfigError(f"webhook_secret: write {WHSEC_FORM}")
        return key

    def queue_weights(self) -> dict[str, int]:
        """The queues with their weights, in the listed order."""
        weights: dict[str, int] = {}
        for part in self.queues.split():
            name, _, weight = part.partition(",")
            if not name or (weight and not weight.isdecimal()) or weight == "0":
                raise ConfigError(f"queues: {part!r} is no queue; write name or name,weight, with spaces between")
            weights[name] = int(weight or 1)
        if not weights:
            raise ConfigError("queues: name at least one queue")
        return weights


def _check_link_secret(secret: str) -> None:
    if secret and not _LINK_SECRET.fullmatch(secret):
        raise ConfigError(f"link_secret: write 32 to 256 ASCII characters without spaces; {HOW_TO_MAKE_ONE}")


def _token(text: str) -> Token | None:
    """An entry of ``tokens``: ``NAME[:RIGHTS][@OWNER]=SECRET``. Without rights it has all that the owner permits. None if
    it is wrong."""
    if (parts := _TOKEN.fullmatch(text)) is None:
        return None
    name, rights, owner, secret = parts.groups()
    every = frozenset({"operate"}) if owner is None else USUAL
    try:
        return Token(User(name, owner, every if rights is None else frozenset(rights.split(","))), secret)
    except ConfigError:
        return None


def socket_path(host: str) -> str:
    """The path of a ``host`` that is a Unix socket, ``unix:/path``; empty for an address. Raises :class:`ConfigError`."""
    if not host.startswith(_UNIX):
        return ""
    path = host.removeprefix(_UNIX)
    if not path.startswith("/") or "\0" in path or len(path.encode("utf-8", "replace")) > _MAX_SOCKET_PATH:
        raise ConfigError(
            f"host {host!r}: write unix: and an absolute path of at most {_MAX_SOCKET_PATH} bytes, as in"
            " unix:/run/asynctask.sock"
        )
    return path


def shown(name: str, value: Any) -> Any:
    """The value of a setting with passwords left out."""
    if name == "tokens":
        return " ".join(f"{each.partition('=')[0]}=***" for each in str(value).split())
    if name in _SECRETS:
        return "***" if value else ""
    return masked_url(value) if name in _URLS and isinstance(value, str) else value


def masked_url(url: str) -> str:
    """A URL without its secrets: user and password, and the values of options with a name such as ``?password=``."""
    scheme, mark, rest = url.partition("://")
    place, query_mark, query = rest.partition("?")
    if url and (not mark or "@" in query):  # a password that contains "?", or an option that contains "@"
        return f"{scheme}://***" if mark else "***"
    place = f"***@{place.rpartition('@')[2]}" if "@" in place else place
    return scheme + mark + place + query_mark + "&".join(map(_masked_option, query.split("&")))


def without_secrets(text: str, url: str) -> str:
    """A text, such as a library's message, without the secrets of ``url`` and of all URLs in it."""
    for secret in sorted(_secrets(url), key=len, reverse=True):
        text = text.replace(secret, "***")
    text = _URL.sub(lambda found: masked_url(found[0]), text)
    return _OPTION.sub(lambda found: _masked_option(found[0]), text)


def _masked_option(option: str) -> str:
    name, mark, value = option.partition("=")
    return f"{name}=***" if mark and (_is_secret(name) or ("=" in value and _is_secret(value))) else option


def _secrets(url: str) -> set[str]:
    """The secrets of a URL, both encoded and decoded. A user's name is a secret only without a password after it."""
    place, _, query = url.partition("://")[2].partition("?")
    info = place.rpartition("@")[0]
    options = (each.partition("=") for each in query.split("&"))
    found = [info, info.partition(":")[2], *(value for name, _, value in options if _is_secret(name))]
    return {form for each in found for form in (each, unquote(each)) if form}


def _is_secret(name: str) -> bool:
    return _SECRET_NAME.search(unquote(name)) is not None


@dataclass(frozen=True, slots=True)
class Setting:
    """One field and its origin: ``default``, ``environment`` or ``argument``."""

    name: str
    value: Any
    origin: str
    help: str
    env: str

    @property
    def shown(self) -> Any:
        """The value with passwords left out."""
        return shown(self.name, self.value)


@cache
def setting_types() -> Mapping[str, type]:
    """The type of each setting; cached, because evaluating the annotations takes a millisecond."""
    return get_type_hints(Config)


def load(arguments: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[Config, dict[str, str]]:
    """The configuration from keyword arguments (which win; None means not given) and an environment, and the origin of each
    field. Raises :class:`ConfigError` for an unknown name, with the nearest known one.
    """
    types = setting_types()
    values: dict[str, Any] = {}
    origins = dict.fromkeys(types, "default")
    for key, text in environ.items():
        if not key.startswith(ENV_PREFIX):
            continue
        name = key.removeprefix(ENV_PREFIX).lower()
        if _is_foreign(name, text):
            continue
        if name not in types:
            raise ConfigError(f"{key} is no setting{_did_you_mean(name, ENV_PREFIX, types)}")
        values[name], origins[name] = _parse(name, text, types[name]), "environment"
    for name, value in arguments.items():
        if name not in types:
            raise ConfigError(f"{name!r} is no setting{_did_you_mean(name, '', types)}")
        if value is not None:
            values[name], origins[name] = value, "argument"
    return Config(**values), origins


def _is_foreign(name: str, text: str) -> bool:
    """Whether an environment variable (without the prefix) belongs to another program. Kubernetes gives each container the
    addresses of all services; for a service named asynctask this includes ``ASYNCTASK_PORT=tcp://10.0.0.1:80``."""
    if name in _ELSEWHERE:
        return True
    found = _KUBERNETES.fullmatch(name)
    return found is not None and (found[2] != "port" or _ADDRESS.match(text) is not None)


def settings(config: Config, origins: Mapping[str, str]) -> list[Setting]:
    """Every field with its value, origin, help and environment variable."""
    return [
        Setting(
            f.name,
            getattr(config, f.name),
            origins.get(f.name, "default"),
            f.metadata["help"],
            ENV_PREFIX + f.name.upper(),
        )
        for f in fields(config)
    ]


def check_setting(name: str, value: Any) -> None:
    """Validates the value of a single field. Raises :class:`ConfigError`."""
    metadata = Config.__dataclass_fields__[name].metadata
    _check(name, value, metadata["low"], metadata["high"])


def _did_you_mean(name: str, prefix: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    if not near:
        return "; `asynctask config` lists them"
    return f"; did you mean {prefix + near[0].upper() if prefix else near[0]}?"


def _parse(name: str, text: str, kind: type) -> Any:
    try:
        if kind is bool:
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}[text.lower()]
        return kind(text)
    except (ValueError, KeyError):
        form = {bool: "1, true or yes, or 0, false or no", int: "a whole number", float: "a number"}[kind]
        raise ConfigError(f"{ENV_PREFIX}{name.upper()}={text!r}: write {form}") from None


def _check(name: str, value: Any, low: float | None, high: float | None) -> None:
    kind = setting_types()[name]
    ok = isinstance(value, int | float) and not isinstance(value, bool) if kind is float else type(value) is kind
    if not ok:
        given = type(value).__name__ if name in _SECRETS or name in _URLS else repr(value)
        raise ConfigError(f"{name} must be {kind.__name__}, not {given}")
    if (low is not None and not value >= low) or (high is not None and not value <= high):  # so that NaN is refused
        raise ConfigError(
            f"{name} must be between {low or 0:g} and {'any' if high is None else f'{high:g}'}, not {value!r}"
        )
