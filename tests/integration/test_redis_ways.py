"""Every way to reach a Redis server: an application goes its whole way over each, and says nothing that an older server, or
Valkey, would not understand."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import redis
from support.broker_suite import a_copy, untracked
from support.redis_servers import OwnRedis
from support.redis_watch import Monitor
from support.redis_world import RedisWorld
from support.servers import RedisServer

from asynctask.brokers.base import DEAD, RETRY, SCHEDULE, About, Broker, RunningJob, SetEntry
from asynctask.client import RedisClient
from asynctask.clock import SystemClock, SystemIds
from asynctask.sidekiq.broker import RedisBroker
from asynctask.testing import wait_for

SOURCES = Path(__file__).resolve().parents[2] / "asynctask" / "sidekiq"


# -- the ways


class Way:
    """A server, the URL by which it is reached, and how its connections are told there (of CLIENT LIST)."""

    def __init__(self, server: OwnRedis, url: str, seen: Callable[[Mapping[str, str]], bool]) -> None:
        self.server = server
        self.url = url
        self.seen = seen


@contextmanager
def resp2(folder: Path, release: str) -> Iterator[Way]:
    def seen(told: Mapping[str, str]) -> bool:
        # News comes in the newer protocol alone, whatever others speak. Between two waits its connection has no flag: the
        # last that it did was to turn tracking off. The older server does not tell.
        waits = "t" in told["flags"] or told["cmd"] in ("client|tracking", "hello")
        return release == "redis6" or told["resp"] == ("3" if waits else "2")

    with OwnRedis(folder, release=release) as server:
        yield Way(server, f"{server.url}?protocol=2", seen)


@contextmanager
def resp3(folder: Path, release: str) -> Iterator[Way]:
    with OwnRedis(folder, release=release) as server:
        yield Way(server, f"{server.url}?protocol=3", lambda told: release == "redis6" or told["resp"] == "3")


@contextmanager
def tls(folder: Path, release: str) -> Iterator[Way]:
    with OwnRedis(folder, tls=True, release=release) as server:
        files = {"ca_certs": server.certificate, "certfile": server.certificate, "keyfile": folder / "key.pem"}
        options = "&".join(f"ssl_{name}={path}" for name, path in files.items())
        url = f"rediss://localhost:{server.tls_port}/0?{options}"
        yield Way(server, url, lambda told: told["laddr"].endswith(f":{server.tls_port}"))


@contextmanager
def user(folder: Path, release: str) -> Iterator[Way]:
    with OwnRedis(folder, release=release) as server:
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "shop", "on", ">p%w:d", "~shop:*", "+@all")
        yield Way(server, f"redis://shop:p%25w%3Ad@127.0.0.1:{server.port}/0", lambda told: told["user"] == "shop")


@contextmanager
def unix(folder: Path, release: str) -> Iterator[Way]:
    with OwnRedis(folder, release=release) as server:
        # The server cuts off what is longer than an address of a network would be.
        seen = lambda told: "/" in told["addr"] and f"{server.socket}:0".startswith(told["addr"])  # noqa: E731
        yield Way(server, f"unix://{server.socket}", seen)


WAYS = [
    (resp2, "", "redis7"),
    (resp2, "shop", "redis7"),
    (resp3, "", "redis7"),
    (resp3, "shop", "redis7"),
    (tls, "shop", "redis7"),
    (user, "shop", "redis7"),
    (unix, "shop", "redis7"),
    # All but TLS: the build that there is of the oldest Redis was made without.
    (resp2, "shop", "redis6"),
    (resp3, "shop", "redis6"),
    (user, "shop", "redis6"),
    (unix, "shop", "redis6"),
]


@pytest.mark.parametrize(
    ("way", "namespace", "release"), WAYS, ids=lambda value: getattr(value, "__name__", value or "plain")
)
def test_an_application_goes_its_whole_way(tmp_path: Path, way: Callable[..., Any], namespace: str, release: str) -> None:
    with way(tmp_path, release) as found:
        world = RedisWorld(tmp_path, found.server)
        try:
            goes_its_whole_way(world, found.url, namespace, found.seen)
        finally:
            world.close()


class Even(SystemIds):
    """No spread of the times of retries and looks."""

    def random(self) -> float:
        return 0.0


def goes_its_whole_way(
    world: RedisWorld, url: str, namespace: str = "", seen: Callable[[Mapping[str, str]], bool] | None = None
) -> None:
    """Tracked and untracked jobs, a retry of each, one that is due later, a stop in the middle and another process."""
    app = world.app(broker_url=url, namespace=namespace, poll_interval_s=0.05, ids=Even(SystemClock()))
    tried: Counter[tuple[str, int]] = Counter()
    ran: list[tuple[str, int]] = []
    began, gate = threading.Event(), threading.Event()
    soon = lambda count, error, job: 0.05  # noqa: E731

    def run(name: str, n: int) -> None:
        tried[name, n] += 1
        if n == 1 and tried[name, n] == 1:
            raise ValueError("once more")
        ran.append((name, n))

    app.worker(name="tracked", retry=2, retry_in=soon)(lambda item: run("tracked", item["n"]))
    plain = app.worker(name="plain", retry=2, retry_in=soon, use_task_event=False)(lambda n: run("plain", n))

    @app.worker(name="long", use_task_event=False)
    def long(n: int) -> None:
        began.set()
        while not gate.wait(0.01):
            pass
        ran.append(("long", n))

    task = app.submit("tracked", [{"n": n} for n in range(5)])
    for n in range(4):
        plain.perform_async(n)
    plain.perform_in(0.1, 4)
    with RedisClient(url, namespace=namespace) as client:
        client.perform_async("plain", 5)
    with world.working(app, shutdown_s=0.2):
        assert task.wait(120)["counts"]["finish"] == 5
        wait_for(lambda: len(ran) == 11, "all have run")
        if seen is not None:
            mine = world.raw.client_id()
            told: Any = world.raw.client_list()
            assert [each for each in told if int(each["id"]) != mine and not seen(each)] == []
            assert len(told) > 2
        long.perform_async(0)
        wait_for(began.is_set, "it is stopped in the middle")
    prefix = f"{namespace}:" if namespace else ""
    (left,) = [json.loads(text) for text in world.raw.lrange(f"{prefix}queue:default", 0, -1)]
    assert (left["class"], left["args"]) == ("long", [0])
    gate.set()
    with world.working(app):
        wait_for(lambda: ("long", 0) in ran, "another process performs it")
        wait_for(lambda: not list(world.raw.scan_iter(f"{prefix}asynctask:fetched:*")), "all are acknowledged")
    names = [("tracked", n) for n in range(5)] + [("plain", n) for n in range(6)] + [("long", 0)]
    assert sorted(ran) == sorted(names)
    assert {key for key, count in tried.items() if count > 1} == {("tracked", 1), ("plain", 1)}
    assert [key for key in world.raw.scan_iter() if not key.startswith(prefix.encode())] == []


# -- what is said


# Command -> the version of Redis that introduced it, and of each of its options that we may use: see "Available since" and
# "History" of its page in the documentation of Redis. Valkey began as a copy of 7.2.4 and has all of them.
KNOWN: dict[str, tuple[str, dict[str, str]]] = {
    "AUTH": ("1.0.0", {}), "PING": ("1.0.0", {}), "SELECT": ("1.0.0", {}), "INFO": ("1.0.0", {}), "TYPE": ("1.0.0", {}),
    "MULTI": ("1.2.0", {}), "EXEC": ("1.2.0", {}), "EVAL": ("2.6.0", {}), "EVALSHA": ("2.6.0", {}),
    "HELLO": ("6.0.0", {"AUTH": "6.0.0"}),
    "CLIENT TRACKING": ("6.0.0", {"ON": "6.0.0", "OFF": "6.0.0", "BCAST": "6.0.0", "PREFIX": "6.0.0"}),
    "EXISTS": ("1.0.0", {}), "EXPIRE": ("1.0.0", {}), "UNLINK": ("4.0.0", {}), "INCRBY": ("1.0.0", {}),
    "DEL": ("1.0.0", {}), "GET": ("1.0.0", {}), "MGET": ("1.0.0", {}),
    "LPOS": ("6.0.6", {"RANK": "6.0.6", "MAXLEN": "6.0.6"}),
    "SET": ("1.0.0", {"NX": "2.6.12", "EX": "2.6.12"}),
    "BITFIELD": ("3.2.0", {"OVERFLOW": "3.2.0", "SAT": "3.2.0", "INCRBY": "3.2.0"}),
    "HDEL": ("2.0.0", {}), "HEXISTS": ("2.0.0", {}), "HGET": ("2.0.0", {}), "HGETALL": ("2.0.0", {}),
    "HINCRBY": ("2.0.0", {}), "HLEN": ("2.0.0", {}), "HMGET": ("2.0.0", {}), "HSET": ("2.0.0", {}), "HSETNX": ("2.0.0", {}),
    "LINDEX": ("1.0.0", {}), "LLEN": ("1.0.0", {}), "LPUSH": ("1.0.0", {}), "RPUSH": ("1.0.0", {}), "LRANGE": ("1.0.0", {}),
    "LREM": ("1.0.0", {}), "LSET": ("1.0.0", {}), "RPOP": ("1.0.0", {"count": "6.2.0"}),
    "SADD": ("1.0.0", {}), "SCARD": ("1.0.0", {}), "SISMEMBER": ("1.0.0", {}), "SMEMBERS": ("1.0.0", {}),
    "SMISMEMBER": ("6.2.0", {}), "SREM": ("1.0.0", {}), "SSCAN": ("2.8.0", {"COUNT": "2.8.0"}),
    "ZADD": ("1.2.0", {"XX": "3.0.2"}), "ZCARD": ("1.2.0", {}), "ZREM": ("1.2.0", {}), "ZSCORE": ("1.2.0", {}),
    "ZRANGE": ("1.2.0", {"WITHSCORES": "1.2.0"}), "ZREVRANGE": ("1.2.0", {"WITHSCORES": "1.2.0"}),
    "ZRANGEBYSCORE": ("1.0.5", {"LIMIT": "1.0.5", "WITHSCORES": "2.0.0"}),
    "ZREMRANGEBYRANK": ("2.0.0", {}), "ZREMRANGEBYSCORE": ("1.2.0", {}),
    "ZSCAN": ("2.8.0", {"MATCH": "2.8.0", "COUNT": "2.8.0"}),
}  # fmt: skip

OLDEST = (6, 2)

OF_THE_DRIVER = {
    "CLIENT SETINFO": "redis-py tells its own name so (7.2.0)",
    "CLIENT MAINT_NOTIFICATIONS": "redis-py asks some hosted servers to tell it before they move",
}
"""What redis-py says of its own accord when a connection begins. A server that does not know it says no, and that is all:
these tests pass on one that is older than both."""

OF_TESTS = {"SCAN", "FLUSHALL"}

# How many words come before the options, of the commands that have any in any version.
FIXED = {
    "SET": 3, "EXPIRE": 3, "ZADD": 2, "ZRANGE": 4, "ZREVRANGE": 4, "ZRANGEBYSCORE": 4, "SSCAN": 3, "ZSCAN": 3, "RPOP": 2,
    "HELLO": 2, "BITFIELD": 2, "CLIENT TRACKING": 2, "LPOS": 3,
}  # fmt: skip


def name_of(words: Sequence[str]) -> str:
    """A command by its name, and one that is a family with the word after it."""
    name = words[0].upper()
    return f"{name} {words[1].upper()}" if name in ("CLIENT", "CONFIG", "SCRIPT", "ACL", "FUNCTION", "OBJECT") else name


def options_of(words: Sequence[str]) -> list[str]:
    name = name_of(words)
    if name not in FIXED:
        return []
    rest = list(words[FIXED[name] :])
    if name == "RPOP":
        return ["count"] * bool(rest)
    if name == "ZADD":  # up to the first score
        scores = [at for at, word in enumerate(rest) if not word.isalpha()]
        rest = rest[: scores[0]] if scores else rest
    if name == "CLIENT TRACKING":  # a prefix is a name of keys
        rest = [word for before, word in pairwise(["", *rest]) if before.upper() != "PREFIX"]
    return [word.upper() for word in rest if word.isalpha()]


def too_new(words: Sequence[str]) -> list[str]:
    """What of a command the oldest server does not understand, or is not in the list."""
    name = name_of(words)
    if name not in KNOWN:
        return [name]
    since, options = KNOWN[name]
    used = {name: since, **{f"{name} ... {option}": options.get(option, "9.9.9") for option in options_of(words)}}
    return [what for what, version in used.items() if tuple(map(int, version.split(".")[:2])) > OLDEST]


class Said:
    """Every command that this process sends, also those with which a connection begins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commands: list[list[str]] = []
        kind: Any = redis.connection.AbstractConnection
        real = kind.send_packed_command

        def send(connection: Any, command: Any, check_health: bool = True) -> None:
            chunks = [command] if isinstance(command, str | bytes) else command
            self.commands += commands_in(b"".join(each.encode() if isinstance(each, str) else each for each in chunks))
            real(connection, command, check_health)

        monkeypatch.setattr(kind, "send_packed_command", send)


def commands_in(packed: bytes) -> Iterator[list[str]]:
    """Commands as they are on the wire: ``*2``, then ``$4`` and ``LLEN``, and so on, a line each."""
    at = 0

    def number() -> int:
        nonlocal at
        end = packed.index(b"\r\n", at)
        found, at = int(packed[at + 1 : end]), end + 2
        return found

    while at < len(packed):
        words = []
        for _ in range(number()):
            size = number()
            words.append(packed[at : at + size].decode("utf-8", "replace"))
            at += size + 2
        yield words


def asks_for_everything(broker: RedisBroker) -> None:
    """Every call of a broker, of its operations and of a process that is seen, also those that find nothing."""
    jobs = [untracked(n, note="x") for n in range(9)]
    broker.push([a_copy(n, attempt=n % 2, task_id=n % 2 or None, queue=f"q{n % 3}") for n in range(10, 20)])
    broker.push([a_copy(1, attempt=0)])
    fetched = broker.exchange("p", [], ["q0", "q1"], 4)
    fetched[0].deaths = 1
    broker.put_back("p", fetched[:1])
    fetched += broker.exchange("p", [], ["q0", "q1"], 1)
    broker._counters.add("stat:processed", 1)
    broker.exchange("p", fetched[1:2], ["q2"], 1)
    broker.defer("p", fetched[2:3], ["w"])
    broker.push([a_copy(n, attempt=0, queue=fetched[2].queue) for n in range(20, 24)])
    broker.exchange("p", [], [fetched[2].queue], 1)
    broker.operations.others(fetched[2].queue)
    broker.hold(RETRY, [SetEntry(fetched[3], 5)], process="p")
    broker.drop("p", broker.held_by("p"))
    broker.withdraw(1, 10)
    for name in (SCHEDULE, RETRY, DEAD):
        broker.hold(name, [SetEntry(job, 1_000_000 * (1 + n)) for n, job in enumerate(jobs)])
    broker.release_due(SCHEDULE, 2_000_000, 10)
    broker.members(DEAD, 3)
    broker.holds([copy.key for copy in fetched] + [a_copy(11, attempt=1).key])
    _ = (broker.waiting(["q0"]), broker.queues(), broker.holders(), broker.wait(0.01), broker.health_check())
    operates(broker)
    presence = broker.presence(About("box:1:0123456789ab", "box", 1, 1_763_700_000_000_000, 2, {"q0": 1}))
    presence.ended("w", 0.1, False)
    presence.ended("w", 0.1, True)
    presence.beat([RunningJob("t", "w", "j", "q0", "{}", 1_763_700_000_000_000)], quiet=False, rss_kib=1)
    broker.operations.processes()
    broker.operations.signal("box:1:0123456789ab", "TSTP")
    presence.processes()
    presence.prune()
    presence.leave()
    broker.close()


def operates(broker: Broker) -> None:
    operations = broker.operations
    broker.push([a_copy(30, attempt=1, queue="q0")])
    for newest in (False, True):
        operations.jobs("q0", newest=newest)
        entries = operations.entries(RETRY, newest=newest).entries
    operations.find(RETRY, "x")
    operations.entry(RETRY, entries[0].key)
    operations.restart(RETRY, entries[:1])
    operations.kill(RETRY, entries[1:2])
    operations.delete(RETRY, entries[2:3])
    operations.clear(RETRY)
    operations.pause("q0")
    operations.queues()
    operations.unpause("q0")
    operations.delete_job("q0", operations.jobs("q0").entries[0].key)
    operations.clear_some("q0", 10)


@pytest.mark.parametrize("protocol", [2, 3])
def test_nothing_is_said_that_an_older_server_does_not_understand(
    tmp_path: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, protocol: int
) -> None:
    url = f"{redis_server.url}?protocol={protocol}"
    said = Said(monkeypatch)
    world = RedisWorld(tmp_path, redis_server)
    try:
        asks_for_everything(RedisBroker(url, namespace="shop"))
        with RedisClient(url, namespace="shop") as client:
            client.perform_in(60, "w", 1)
            client.perform_bulk("w", [[1], [2]])
            client.health_check()
        goes_its_whole_way(world, url)
    finally:
        world.close()
    seen = checked(said.commands)
    assert seen >= {"EVALSHA", "CLIENT TRACKING", "SMISMEMBER", "BITFIELD", "MULTI", "ZRANGEBYSCORE", "SSCAN", "ZSCAN"}


def test_no_script_says_what_an_older_server_does_not_understand(redis_server: RedisServer, raw: redis.Redis) -> None:
    with Monitor(redis_server) as monitor:
        asks_for_everything(RedisBroker(redis_server.url))
        said = monitor.commands()
    assert checked(said) >= {"HSETNX", "SMISMEMBER", "RPOP", "LREM", "LSET", "ZREMRANGEBYRANK", "EXPIRE"}


def checked(commands: Sequence[Sequence[str]]) -> set[str]:
    """The names of commands, of which none is too new; those of the driver and of the tests themselves are passed over."""
    ours = [words for words in commands if name_of(words) not in OF_THE_DRIVER.keys() | OF_TESTS]
    assert {each for words in ours for each in too_new(words)} == set()
    return {name_of(words) for words in ours}


def test_every_command_of_a_script_is_in_the_list() -> None:
    called = {
        (path.name, name)
        for path in SOURCES.glob("*.lua")
        for name in re.findall(r"redis\.p?call\('(\w+)'", path.read_text())
    }
    assert len({script for script, _ in called}) == len(list(SOURCES.glob("*.lua")))
    assert sorted((script, name) for script, name in called if name not in KNOWN) == []
    calls = [line for path in SOURCES.glob("*.lua") for line in path.read_text().splitlines() if "call(" in line]
    others = {line.strip() for line in calls if not re.search(r"call\('\w+'", line)}
    assert others == {"local is_json, job = pcall(cjson.decode, text)"}, "no command"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["expire", "k", "60", "NX"], ["EXPIRE ... NX"]),
        (["SET", "k", "v", "NX", "EX", "60"], []),
        (["SET", "k", "v", "GET"], ["SET ... GET"]),
        (["ZADD", "k", "XX", "1.5", "GT"], []),
        (["ZADD", "k", "GT", "1.5", "member"], ["ZADD ... GT"]),
        (["RPOP", "k", "5"], []),
        (["LMPOP", "1", "k", "RIGHT"], ["LMPOP"]),
        (["CLIENT", "NO-TOUCH", "ON"], ["CLIENT NO-TOUCH"]),
        (["CLIENT", "TRACKING", "ON", "BCAST", "PREFIX", "queue:a", "PREFIX", "paused"], []),
        (["CLIENT", "TRACKING", "ON", "BCAST", "FOO", "PREFIX", "paused"], ["CLIENT TRACKING ... FOO"]),
        (["ZRANGE", "k", "0", "1", "REV", "WITHSCORES"], ["ZRANGE ... REV"]),
    ],
)
def test_what_is_too_new_would_be_seen(words: list[str], found: list[str]) -> None:
    assert too_new(words) == found
