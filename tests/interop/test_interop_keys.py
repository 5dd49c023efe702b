"""What we write is what Ruby's Sidekiq writes: the same keys, in the same forms, and entries that its tools can move."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.payloads import EDGES, HARD, TEXTS, UNKNOWN, VALUES
from support.redis_ruby import Desk
from support.redis_watch import Monitor
from support.redis_world import RedisWorld
from support.sharing import presence_of

from asynctask.brokers.base import DEAD, RETRY, SCHEDULE, Copy, SetEntry
from asynctask.client import RedisClient, RemoteWorker
from asynctask.clock import SECOND, SystemClock
from asynctask.sidekiq.broker import RedisBroker
from asynctask.sidekiq.copies import poisoned
from asynctask.sidekiq.payload import dump, parse
from asynctask.sidekiq.sharing import after_failure
from asynctask.testing import wait_for

NOW = SystemClock().now() - 3_600 * SECOND  # the dead are kept for half a year
LATER = 4_000_000_000


# -- entries of sets

MEMBERS = st.dictionaries(TEXTS.map(lambda text: f"x{text}"), VALUES, max_size=3)
ITEMS = st.lists(st.tuples(st.lists(VALUES, max_size=3), MEMBERS), min_size=1, max_size=6)
SETS = (SCHEDULE, RETRY, DEAD)

# Which entries Ruby would write in another way; then each is moved, as its tools do it, and counted.
_MOVED = """
sets = [Sidekiq::ScheduledSet, Sidekiq::RetrySet, Sidekiq::DeadSet].map(&:new)
members = sets.flat_map { |set| set.map(&:value) }
changed = members.reject { |member| Sidekiq.dump_json(Sidekiq.load_json(member)) == member }
sets.each { |set| set.to_a.each { |job| job.reschedule(job.score + 100) } }
[changed, members.size, sets.sum(&:size)]
"""


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ITEMS, TEXTS)
@example([(HARD, UNKNOWN), (EDGES, {})], "wrong: \x00\x1f\u2028")
def test_ruby_would_write_each_entry_as_we_did(world: RedisWorld, desk: Desk, items: Any, said: str) -> None:
    world.raw.delete(*SETS)
    broker, client = RedisBroker(world.server.url), RedisClient(world.server.url)
    for n, (args, members) in enumerate(items):
        item = {**members, "class": "Shop::Hard", "args": args}
        client.push({**item, "at": LATER + n})
        copy = foreign(n, item)
        broker.hold(SCHEDULE, [SetEntry(copy, (LATER + n) * SECOND)])
        failed = after_failure(copy, ValueError(said), NOW)
        again = after_failure(failed, ValueError(said), NOW)
        broker.hold(RETRY, [SetEntry(failed, NOW + n), SetEntry(again, NOW + n)])
        broker.hold(DEAD, [SetEntry(again, NOW + n), SetEntry(poisoned(copy, NOW), NOW + n)])
    broker.close()
    client.close()
    assert desk(_MOVED) == [[], 6 * len(items), 6 * len(items)]


def foreign(n: int, item: dict[str, Any]) -> Copy:
    """A job as a client wrote it that has another way of writing JSON, but for numbers: those keep their text, and a tool
    finds an entry whose numbers stand in it as its own Ruby writes them."""
    job = {**item, "jid": f"{n:024x}", "queue": "default", "retry": 3, "backtrace": True, "created_at": 1.5e9}
    numbers: list[float] = []
    text = re.sub(r'"@(\d+)@"', lambda found: dump({"n": numbers[int(found[1])]})[5:-1], json.dumps(_named(job, numbers)))
    return Copy(f"{n:024x}", 0, "default", text)


def _named(value: Any, numbers: list[float]) -> Any:
    """The value with each float as a name of its place among ``numbers``."""
    if isinstance(value, float):
        numbers.append(value)
        return f"@{len(numbers) - 1}@"
    if isinstance(value, dict):
        return {key: _named(each, numbers) for key, each in value.items()}
    return [_named(each, numbers) for each in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("seconds", [1e-6, 1.0, 1_763_700_000.000001, 1_763_700_000.999999, 9_999_999_999.5])
def test_ruby_finds_an_entry_by_the_score_that_we_wrote(world: RedisWorld, desk: Desk, seconds: float) -> None:
    broker = RedisBroker(world.server.url)
    broker.hold(RETRY, [SetEntry(foreign(1, {"class": "Shop::Hard", "args": []}), round(seconds * SECOND))])
    broker.close()
    assert desk("Sidekiq::RetrySet.new.fetch(words[0]).map(&:jid)", seconds) == [f"{1:024x}"]


@pytest.mark.parametrize("named", ['"jid":5,"queue":null', '"jid":"","queue":""', '"x":1'])
def test_an_entry_of_a_job_that_names_neither_gets_an_id_and_a_queue(named: str) -> None:
    """Ruby's pages name an entry by the one, those of version 8 show none without the other, and Ruby's poller loses it."""
    copy = Copy("a" * 24, 0, "low", f'{{"class":"Shop::Hard","args":[],{named}}}')
    for after in (after_failure(copy, ValueError(), NOW), poisoned(copy, NOW)):
        job = parse(after.payload)
        assert (job["jid"], job["queue"]) == ("a" * 24, "low")


# -- the same script on both sides: what is written, and what is there afterwards

_RUBYS = """
Shop::Echo.perform_async(1, 0.5)
Sidekiq::Client.push_bulk("class" => "Shop::Echo", "args" => [[2, 0.5], [3, 0.5]])
Shop::Echo.perform_in(3600, 4, 0.5)
Shop::Flaky.set(retry: 5).perform_async(5, 0.5)
Shop::Flaky.set(retry: 0).perform_async(6, 0.5)
5.times { perform("default") }
Shop::Echo.set(queue: "low").perform_async(7, 0.5)
launcher = Sidekiq::Launcher.new(Sidekiq.options.merge(queues: ["default", "low"], concurrency: 2))
raw = Sidekiq.redis { |connection| connection.brpop("queue:low", 2) }.last
Sidekiq::Processor::WORKER_STATE.set("tid", { queue: "low", payload: raw, run_at: Time.now.to_i })
launcher.send(:heartbeat)
launcher.send(:identity)
"""
_LEAVES = 'Sidekiq::Processor::WORKER_STATE.clear; Sidekiq::Launcher.new(queues: ["default"]).send(:clear_heartbeat); true'

WRITES = {
    "SADD", "SREM", "LPUSH", "RPUSH", "LREM", "ZADD", "ZREM", "ZREMRANGEBYSCORE", "ZREMRANGEBYRANK", "ZINCRBY", "INCRBY",
    "HSET", "HDEL", "HINCRBY", "EXPIRE", "UNLINK", "DEL", "SET", "RPOP", "BITFIELD",
}  # fmt: skip
NAMES = {"HMSET": "HSET", "BRPOP": "RPOP"}  # an older word for the same


@dataclass(frozen=True)
class Traces:
    """What a script left: the writing commands by key, and what lay in each key before the process left."""

    commands: set[tuple[str, str]]
    keys: dict[str, Any]


def traces(commands: Sequence[Sequence[str]], identity: str, keys: dict[str, Any]) -> Traces:
    """Of the keys that are Sidekiq's own."""
    found = set()
    for verb, *words in commands:
        verb = NAMES.get(verb.upper(), verb.upper())
        if verb in WRITES:
            named = words if verb in ("UNLINK", "DEL") else words[:1]
            found |= {(verb, plain(key, identity)) for key in named if is_sidekiqs(key)}
    return Traces(found, keys)


def is_sidekiqs(key: str) -> bool:
    return not key.startswith(("asynctask:", "test:"))


def plain(key: str, identity: str) -> str:
    """A key without what differs from one run to the next."""
    key = key.replace(identity, "ID").replace(datetime.now(UTC).strftime("%Y-%m-%d"), "DAY")
    key = re.sub(r"^j\|\d{8}\|.*", "j|MINUTE", re.sub(r"^j\|\d{6}\|\d+:\d\d$", "j8|MINUTE", key))
    key = re.sub(r"^j\|\d{6}\|\d+:\d$", "j8|TEN", key)
    return re.sub(r"^(h\|)?(Shop::\w+)-\d+-\d+:\d+$", r"\1\2-MINUTE", key)


def lying(raw: Any, identity: str) -> dict[str, Any]:
    """What lies in each key: its type, how long it is kept, and its form."""
    found: dict[str, Any] = {}
    for key in raw.scan_iter():
        name = key.decode()
        if is_sidekiqs(name):
            kept = raw.ttl(key)
            about = "for ever" if kept < 0 else min((60, 28_800, 259_200, 157_680_000), key=lambda each: abs(each - kept))
            found[plain(name, identity)] = (raw.type(key).decode(), about, form(raw, key, identity))
    return found


def form(raw: Any, key: bytes, identity: str) -> Any:
    kind = raw.type(key)
    if kind == b"set":
        return {plain(each.decode(), identity) for each in raw.smembers(key)}
    if kind == b"zset":
        return {members(each) for each in raw.zrange(key, 0, -1)}
    if kind == b"list":
        return {members(each) for each in raw.lrange(key, 0, -1)}
    if kind == b"hash":
        if key.endswith((b":work", b":workers")):
            return {(members(each), members(json.loads(each)["payload"])) for each in raw.hvals(key)}
        if not key.startswith(b"j|"):
            return {name.decode(): members(value) if name == b"info" else "" for name, value in raw.hgetall(key).items()}
        return {name.decode() for name in raw.hkeys(key)}
    return raw.get(key) if kind == b"string" and key.startswith(b"stat:") else None


def members(text: str | bytes) -> frozenset[tuple[str, str]]:
    """The names of a JSON object's members and the types of their values; the elements of its arguments too."""
    job = json.loads(text)
    found = {(name, type(value).__name__) for name, value in job.items()}
    args = job.get("args")
    return frozenset(found | ({("args", str([type(each).__name__ for each in args]))} if isinstance(args, list) else set()))


@pytest.fixture
def rubys(world: RedisWorld, desk: Desk) -> Traces:
    with Monitor(world.server) as monitor:
        identity = desk(_RUBYS)
        keys = lying(world.raw, identity)
        desk(_LEAVES)
        commands = monitor.commands()
    assert world.raw.exists("processes") == 0
    world.raw.flushall()
    return traces(commands, identity, keys)


@pytest.fixture(params=["by a client alone", "by the verbs of an application"])
def ours(world: RedisWorld, rubys: Traces, request: pytest.FixtureRequest) -> Traces:
    """The same by ours, in the same order, after Ruby's."""
    app, gate, began = world.app(), threading.Event(), threading.Event()

    @app.worker(name="Shop::Echo", use_task_event=False, retry=True)
    def echo(n: int, *_: Any) -> None:
        if n == 7:
            began.set()
            assert gate.wait(120)

    @app.worker(name="Shop::Flaky", use_task_event=False)
    def flaky(*_: Any) -> None:
        raise ValueError("wrong: é")

    with Monitor(world.server) as monitor, RedisClient(world.server.url) as client:
        alone = request.param == "by a client alone"
        hard: Any = RemoteWorker("Shop::Echo", client) if alone else echo
        weak: Any = RemoteWorker("Shop::Flaky", client) if alone else flaky
        hard.perform_async(1, 0.5)
        hard.perform_bulk([[2, 0.5], [3, 0.5]])
        hard.perform_in(3600, 4, 0.5)
        weak.set(retry=5, backtrace=True).perform_async(5, 0.5)
        weak.set(retry=0, backtrace=True).perform_async(6, 0.5)
        with world.working(app, "default", "low") as launcher:
            showing, identity = presence_of(launcher), launcher.ledger.identity
            assert showing is not None
            wait_for(lambda: launcher.performer.performed == 5, "five are performed")
            hard.set(queue="low").perform_async(7, 0.5)
            assert began.wait(120)
            showing.beat()
            keys = lying(world.raw, identity)
            gate.set()
        commands = monitor.commands()
    return traces(commands, identity, keys)


# What we write beside it: what an older Sidekiq (6.4.1, Debian's) has not got yet, and versions 7 and 8 read.
_METRICS = {
    "j|MINUTE": 28_800,
    "j8|MINUTE": 28_800,
    "j8|TEN": 259_200,
    "Shop::Echo-MINUTE": 28_800,
    "h|Shop::Echo-MINUTE": 28_800,
}
_NEWER = {*_METRICS, "ID:work"}
_NEWER_INFO = {("weights", "list"), ("capsules", "dict"), ("version", "str"), ("embedded", "bool")}


def test_the_same_commands_change_the_same_keys(rubys: Traces, ours: Traces) -> None:
    assert rubys.commands - ours.commands == set()
    more = {(verb, key) for verb, key in ours.commands if key not in _NEWER}
    assert more - rubys.commands == set()
    assert {key for _, key in ours.commands - more} == _NEWER


def test_the_same_lies_in_the_same_keys(rubys: Traces, ours: Traces) -> None:
    kind, kept, fields = rubys.keys.pop("ID")
    our_kind, our_kept, our_fields = ours.keys.pop("ID")
    assert (our_kind, our_kept) == (kind, kept) == ("hash", 60)
    assert set(our_fields) - set(fields) == {"concurrency"}
    assert our_fields["info"] - fields["info"] == _NEWER_INFO
    assert (set(fields) - set(our_fields), fields["info"] - our_fields["info"]) == (set(), set())
    assert ours.keys.pop("ID:work") == ours.keys["ID:workers"]
    assert {key: ours.keys.pop(key)[1] for key in _METRICS} == _METRICS
    assert ours.keys == rubys.keys
