"""One Redis server: its connections, scripts, keys, and the meaning of its errors.

A call is repeated once, only if that is harmless and the connection broke. The retries of redis-py are off, because it
would repeat any command.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from queue import Empty
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from asynctask.config import without_secrets
from asynctask.errors import BrokerUnavailable, ConfigError

T = TypeVar("T")
Command = tuple[str | int | bytes, ...]

SOCKET_S: Final = 5.0
"""Timeout of a connect and of an answer, in seconds."""

CONNECTIONS: Final = 10
"""The most connections of a process; a call waits for a free one as long as for an answer."""

OLDEST: Final = (6, 2)
_SCHEMES: Final = ("redis", "rediss", "unix")


class Server:
    """A server.

    Arguments: its ``url`` (``redis://``, ``rediss://`` or ``unix://``, with redis-py's options in the query: certificates,
    ``protocol=3``); the ``namespace`` of every key; ``connections``; ``timeout_s`` of a connect or an answer. Connects on
    first use. Raises :class:`ConfigError` for an invalid URL.
    """

    def __init__(
        self, url: str, namespace: str = "", *, connections: int = CONNECTIONS, timeout_s: float = SOCKET_S
    ) -> None:
        self.keys = RedisKeys(namespace)
        self.name = _shown(url)
        self._url = url
        self._options: dict[str, Any] = {
            "decode_responses": False,
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "socket_keepalive": True,
            "health_check_interval": 30,
            "retry": Retry(NoBackoff(), 0),
        }
        if url.startswith("unix"):
            del self._options["socket_keepalive"]
        self._pool: Any = self._make_pool(redis.BlockingConnectionPool, max_connections=connections, timeout=timeout_s)
        self.moves = 0  # how often this server turned out to be a replica
        self.redis: Any = redis.Redis(connection_pool=self._pool)

    def _make_pool(self, kind: type[redis.ConnectionPool], **more: Any) -> redis.ConnectionPool:
        try:
            pool = kind.from_url(self._url, **more)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"broker_url: {without_secrets(str(error), self._url)}; {_FORM}") from None
        pool.connection_kwargs.update(self._options)  # the URL must not override these
        return pool

    def listener(self) -> Any:
        """A new connection in RESP3, which carries notifications; the caller closes it."""
        pool = self._make_pool(redis.ConnectionPool)
        pool.connection_kwargs.update(protocol=3, health_check_interval=0)
        connection: Any = pool.make_connection()
        connection.connect()
        return connection

    def close(self) -> None:
        """Closes every connection."""
        self._pool.disconnect()

    def _drop_idle(self) -> None:
        """Closes the idle connections, so that the next calls resolve the URL again.

        After a failover the name, or the proxy, leads to the new primary, while open connections stay with the old one,
        which refuses every write. Connections in use are closed when they are refused.
        """
        self.moves += 1
        idle: list[Any] = []
        try:
            while True:
                idle.append(self._pool.pool.get_nowait())
        except Empty:
            pass
        for connection in idle:
            if connection is not None:
                connection.disconnect()
        for connection in reversed(idle):
            self._pool.pool.put_nowait(connection)  # reconnects on use

    # -- calls

    def run(self, script: str, keys: Sequence[str], args: Iterable[Any], *, repeat: bool = False) -> Any:
        """Runs a script beside this module.

        ``repeat``: running it twice is harmless. Raises :class:`BrokerUnavailable`.
        """
        text, sha = _script(script)
        rest = (len(keys), *keys, *args)

        def call() -> Any:
            try:
                return self.redis.execute_command("EVALSHA", sha, *rest)
            except redis.exceptions.NoScriptError:  # a new server, or a failover: nothing was done; EVAL loads the script
                return self.redis.execute_command("EVAL", text, *rest)

        return self.guarded(call, keys, repeat=repeat)

    def ask(self, *commands: Command, repeat: bool = True) -> list[Any]:
        """The answers to commands in one round trip, not in a transaction: a full server refuses MULTI, even to read."""
        keys = [str(command[1]) for command in commands if len(command) > 1]

        def call() -> list[Any]:
            pipeline = self.redis.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            return list(pipeline.execute())

        return self.guarded(call, keys, repeat=repeat)

    def guarded(self, call: Callable[[], T], keys: Sequence[str] = (), *, repeat: bool = False) -> T:
        """Runs a call; converts its errors to :class:`BrokerUnavailable` with a remedy."""
        try:
            try:
                return call()
            except redis.exceptions.ConnectionError as error:
                # Subclasses are answers of a live server, which would give the same again.
                if not repeat or type(error) is not redis.exceptions.ConnectionError:
                    raise
                return call()
        except redis.exceptions.RedisError as raised:
            cause = _unwrapped(raised)
            if isinstance(cause, redis.exceptions.ReadOnlyError):
                self._drop_idle()
            raise BrokerUnavailable(self._explanation(cause, keys)) from raised

    # -- the meaning of errors

    def _explanation(self, error: redis.exceptions.RedisError, keys: Sequence[str]) -> str:
        text = " ".join(str(error).split())[:300]
        if "WRONGTYPE" in text:
            return f"Redis at {self.name}: {self._wrong_types(keys)}"
        for kind, mark, meaning in _MEANINGS:
            if isinstance(error, kind) and mark in text:
                return f"Redis at {self.name} {meaning} ({text})"
        return f"Redis at {self.name} refused a command: {text}"

    def _wrong_types(self, keys: Sequence[str]) -> str:
        try:
            for key in dict.fromkeys(keys):
                wanted, found = self.keys.type_of(key), self.redis.execute_command("TYPE", key)
                found = found.decode() if isinstance(found, bytes) else str(found)
                if wanted not in (None, found) and found != "none":
                    return (
                        f"the key {key!r} holds a {found} where a {wanted} belongs; another program uses that name:"
                        f" rename or delete the key (RENAME {key} {key}.old), or choose another namespace or database"
                    )
        except redis.exceptions.RedisError:
            pass
        return "a key holds a value of another type; another program uses its name: choose another namespace or database"

    def health_check(self) -> Mapping[str, Any]:
        """Facts: ``version``, ``used_memory``, ``maxmemory``, ``maxmemory_policy``, ``role``; and ``problems``, texts.

        Raises :class:`BrokerUnavailable`.
        """
        found: dict[str, Any] = self.guarded(self.redis.info, repeat=True)
        version = str(found.get("redis_version", "0"))
        policy = str(found.get("maxmemory_policy", "noeviction"))
        problems = []
        if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < OLDEST:
            problems.append(f"Redis {version} is too old: install {OLDEST[0]}.{OLDEST[1]} or newer")
        if policy != "noeviction":
            problems.append(f"maxmemory-policy is {policy}: a full server would throw jobs away; set it to noeviction")
        if found.get("role") not in (None, "master"):
            problems.append("this server is a replica and takes no writes: point broker_url at the primary")
        if found.get("redis_mode") == "cluster":
            problems.append("this is a Redis Cluster, which is not supported: use a single server, with replicas if wanted")
        if found.get("loading"):
            problems.append("it is still loading its data: wait")
        facts = {name: found.get(name) for name in ("used_memory", "maxmemory", "role")}
        return {"version": version, "maxmemory_policy": policy, **facts, "problems": problems}


_Meaning = tuple[type[redis.exceptions.RedisError], str, str]
_MEANINGS: Final[Sequence[_Meaning]] = (
    (redis.exceptions.BusyLoadingError, "", "is loading its data: wait until it has, it is tried again"),
    (redis.exceptions.AuthenticationError, "", "refuses this user or password: mend broker_url"),
    (
        redis.exceptions.NoPermissionError,
        "",
        "does not allow this user all it needs: grant +@all on the keys used, see ACL",
    ),
    (redis.exceptions.ReadOnlyError, "", "is a replica and takes no writes: point broker_url at the primary"),
    (redis.exceptions.OutOfMemoryError, "", "is full: raise maxmemory, or let workers drain it; nothing was pushed"),
    (redis.exceptions.MovedError, "", "is a Redis Cluster, which is not supported: use a single server"),
    (redis.exceptions.ClusterCrossSlotError, "", "is a Redis Cluster, which is not supported: use a single server"),
    (redis.exceptions.ResponseError, "CROSSSLOT", "is a Redis Cluster, which is not supported: use a single server"),
    (redis.exceptions.ResponseError, "MISCONF", "cannot save its data and takes no writes: look at its disk and log"),
    (redis.exceptions.ResponseError, "NOREPLICAS", "has too few replicas and takes no writes: start them"),
    (redis.exceptions.ResponseError, "OOM", "is full: raise maxmemory, or let workers drain it; nothing was pushed"),
    (redis.exceptions.ResponseError, "BUSY", "is busy with a script of somebody else: wait, or SCRIPT KILL"),
    (redis.exceptions.ResponseError, "unknown command", f"is too old: install {OLDEST[0]}.{OLDEST[1]} or newer"),
    (redis.exceptions.ConnectionError, "max number of clients", "takes no more connections: raise its maxclients"),
    (redis.exceptions.ConnectionError, "No connection available", "is asked by too many threads: raise the connections"),
    (redis.exceptions.TimeoutError, "", "did not answer in time: it is overloaded or unreachable"),
    (redis.exceptions.ConnectionError, "", "does not answer: start it, or mend broker_url"),
)


_FROM_SCRIPT: Final = re.compile(r"Error running script .{1,200}?: -((READONLY|OOM|LOADING) .*)", re.DOTALL)
_NAMED: Final[Mapping[str, type[redis.exceptions.RedisError]]] = {
    "READONLY": redis.exceptions.ReadOnlyError,
    "OOM": redis.exceptions.OutOfMemoryError,
    "LOADING": redis.exceptions.BusyLoadingError,
}


def _unwrapped(error: redis.exceptions.RedisError) -> redis.exceptions.RedisError:
    """The error that Redis before 7.0 wraps in an error of the script; other errors unchanged."""
    found = _FROM_SCRIPT.match(str(error)) if type(error) is redis.exceptions.ResponseError else None
    return error if found is None else _NAMED[found[2]](found[1])


def count_of(raw: bytes | None) -> int:
    """A number that a script wrote; 0 for any other text."""
    return int(raw) if raw is not None and raw.isdigit() and len(raw) < 16 else 0


_FORM: Final = "write redis://[user:password@]host:port/db, with %40 for @, %3A for : and %2F for / in a password"


def _shown(url: str) -> str:
    """Host and port of a URL, without its password. Raises :class:`ConfigError`."""
    try:
        parts = urlsplit(url)
        place = f"{parts.hostname or '127.0.0.1'}:{parts.port or 6379}"
    except ValueError:  # (a bad port) contains parts of the password
        raise ConfigError(f"broker_url is no URL of Redis; {_FORM}") from None
    if parts.scheme not in _SCHEMES:
        raise ConfigError("broker_url: write redis://, rediss:// (with TLS) or unix:// and where Redis is")
    return parts.path if parts.scheme == "unix" else place


@cache
def _script(name: str) -> tuple[str, str]:
    text = resources.files(__package__).joinpath(f"{name}.lua").read_text()
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


# -- the keys, each with the namespace before it
#
# ===========================  ======  ===============================================================================
# key                          type    value
# ===========================  ======  ===============================================================================
# ``queues``                   set     names of queues, for tools; Sidekiq's own, as are the next five
# ``queue:Q``                  list    payloads; the right end is next to run
# ``schedule`` ``retry``       zset    payloads of untracked jobs by the second in which they are due
# ``dead``                     zset    payloads by the second of their death
# ``paused``                   set     names of queues from which nothing is fetched
# ``asynctask:held``           hash    ``jid:attempt`` of each tracked copy -> ``qQUEUE`` or ``pPROCESS LF FIELD``
# ``asynctask:queues``         set     queues that ever held tracked copies: searched for those of a Task
# ``asynctask:fetched:ID``     hash    a process's own list: ``BATCH:N:QUEUE`` -> the payload as in its queue
# ``asynctask:holders``        set     processes that have such a list
# ``asynctask:passed:Q``       string  how many jobs of others stand in a queue, as its latest fetch passed them; expires
#                                      15 s after that
# ``asynctask:deaths``         hash    jid -> ``COUNT SECOND``: how often its process died, and until when that counts;
#                                      expires 72 h after the last
# ===========================  ======  ===============================================================================
#
# Keys of live processes: :mod:`asynctask.sidekiq.presence`.

_TYPES: Final = {
    "queues": "set",
    "schedule": "zset",
    "retry": "zset",
    "dead": "zset",
    "paused": "set",
    "processes": "set",
    "asynctask:held": "hash",
    "asynctask:queues": "set",
    "asynctask:holders": "set",
    "asynctask:deaths": "hash",
}
_MAX_NAMESPACE: Final = 255


class RedisKeys:
    """Keys of one namespace. Raises :class:`ConfigError` for an invalid namespace."""

    def __init__(self, namespace: str = "") -> None:
        if len(namespace) > _MAX_NAMESPACE or not namespace.isprintable() or any(c in namespace for c in " {}*?[]\\"):
            raise ConfigError(f"namespace: {namespace[:80]!r} cannot be a prefix of keys; use letters, digits and _ : . -")
        self.prefix = f"{namespace}:" if namespace else ""
        self.queues = self("queues")
        self.paused = self("paused")
        self.dead = self("dead")
        self.held = self("asynctask:held")
        self.our_queues = self("asynctask:queues")
        self.holders = self("asynctask:holders")
        self.deaths = self("asynctask:deaths")

    def __call__(self, name: str) -> str:
        return self.prefix + name

    def queue(self, name: str) -> str:
        """The list of a queue."""
        return f"{self.prefix}queue:{name}"

    def fetched(self, process: str) -> str:
        """The list of a process."""
        return f"{self.prefix}asynctask:fetched:{process}"

    def passed(self, name: str) -> str:
        """The number of jobs of others in a queue."""
        return f"{self.prefix}asynctask:passed:{name}"

    def type_of(self, key: str) -> str | None:
        """The type that a key must have; None for other keys."""
        name = key.removeprefix(self.prefix)
        if name.startswith("queue:"):
            return "list"
        if name.startswith("asynctask:passed:"):
            return "string"
        return "hash" if name.startswith("asynctask:fetched:") else _TYPES.get(name)
