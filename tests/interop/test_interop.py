"""Ruby's Sidekiq and ours in one Redis: each performs what the other pushed, and each puts right what the other left."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from support.payloads import HARD, UNKNOWN
from support.redis_ruby import Desk, RubyWorker, noted
from support.redis_world import RedisWorld
from support.servers import RedisServer

from asynctask import AsyncTask, current_job
from asynctask.brokers.base import DEAD, RETRY, SCHEDULE, Copy, SetEntry
from asynctask.client import RedisClient
from asynctask.clock import SECOND
from asynctask.errors import NotFound
from asynctask.sidekiq.activejob import GlobalId, ModuleName, Symbol, decode_arguments, wrap
from asynctask.sidekiq.broker import RedisBroker
from asynctask.sidekiq.payload import build, decode_backtrace, dump, parse
from asynctask.testing import wait_for

LATER = 4_000_000_000


@pytest.fixture(scope="module")
def ruby(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RubyWorker]:
    """A process of Ruby's that works the queue ``ruby``; ours work ``python``."""
    with RubyWorker(redis_server, tmp_path_factory.mktemp("ruby"), "ruby") as made:
        yield made


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[RedisClient]:
    with RedisClient(redis_server.url) as made:
        yield made


class Ours:
    """An application of ours with two workers that have Ruby's names: one that fails until it is ``mended``."""

    def __init__(self, world: RedisWorld) -> None:
        self.app: AsyncTask = world.app()
        self.mended = False
        self.ran: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.echo = self.app.worker(name="Shop::Echo", queue="python", use_task_event=False, retry=True)(self._note)
        self.flaky = self.app.worker(name="Shop::Flaky", queue="python", use_task_event=False, retry=3)(self._fail)

    def _note(self, *args: Any) -> None:
        self.ran.append((args, dict(current_job().payload)))

    def _fail(self, *args: Any) -> None:
        if not self.mended:
            raise ValueError("wrong: é")
        self._note(*args)

    def first_args(self) -> list[Any]:
        return sorted(args[0] for args, _ in self.ran)

    def keys(self, list_name: Any) -> dict[str, str]:
        """The entries of a list: job id -> key."""
        return {entry["job_id"]: entry["key"] for entry in self.app.operations.listed(list_name)["entries"]}

    def act(self, list_name: Any, action: Any, *jids: str) -> None:
        """Acts on entries that must be there."""
        found = self.keys(list_name)
        assert self.app.operations.act(list_name, action, [found[jid] for jid in jids]).done == len(jids)


@pytest.fixture
def ours(world: RedisWorld) -> Ours:
    return Ours(world)


# -- each side pushes, the other performs


def test_ruby_performs_what_we_push(world: RedisWorld, client: RedisClient, ruby: RubyWorker) -> None:
    item = {"class": "Shop::Echo", "queue": "ruby"}
    jid = client.push({**item, "args": HARD, **UNKNOWN})
    jids = client.push_bulk(item, [[n, HARD] for n in range(5)])
    due = client.push({**item, "args": [HARD], "at": 5.5})
    found = {each["job"]["jid"]: each["job"] for each in noted(world.raw, 7)}
    assert set(found) == {jid, *jids, due}
    assert repr(found[jid]["args"]) == repr(HARD)
    assert repr({name: found[jid][name] for name in UNKNOWN}) == repr(UNKNOWN)
    assert [repr(found[each]["args"]) for each in jids] == [repr([n, HARD]) for n in range(5)]
    assert repr(found[due]["args"]) == repr([HARD])


def test_we_perform_what_ruby_pushes(world: RedisWorld, ours: Ours, desk: Desk) -> None:
    item = {"class": "Shop::Echo", "args": HARD, "queue": "python", **UNKNOWN}
    jid = desk("Sidekiq::Client.push(words[0])", item)
    bulk = {"class": "Shop::Echo", "args": [[n, HARD] for n in range(5)], "queue": "python"}
    jids = desk("Sidekiq::Client.push_bulk(words[0])", bulk)
    own = desk('Shop::Echo.set(queue: "python").perform_async(*words[0])', HARD)
    with world.working(ours.app, "python"):
        wait_for(lambda: len(ours.ran) == 7, "all are performed")
    found = {payload["jid"]: (list(args), payload) for args, payload in ours.ran}
    assert set(found) == {jid, *jids, own}
    assert repr(found[jid][0]) == repr(found[own][0]) == repr(HARD)
    assert repr({name: found[jid][1][name] for name in UNKNOWN}) == repr(UNKNOWN)
    assert [repr(found[each][0]) for each in jids] == [repr([n, HARD]) for n in range(5)]


def test_a_tracked_worker_keeps_an_event_of_what_ruby_pushed(world: RedisWorld, desk: Desk) -> None:
    app = world.app()
    app.worker(name="Shop::Tracked")(lambda item: item["n"] + 1)
    jid = desk(
        'Sidekiq::Client.push("class" => "Shop::Tracked", "args" => [{"n" => 1}], "queue" => "python", "retry" => 3)'
    )
    with world.working(app, "python"):
        wait_for(lambda: status_of(app, jid) == "finish", "it is recorded")
    assert app.event(jid)["result"] == 2


def status_of(app: AsyncTask, jid: str) -> str:
    try:
        return str(app.event(jid)["status"])
    except NotFound:
        return ""


def test_processes_of_both_work_one_queue_and_each_job_is_performed_once(
    world: RedisWorld, client: RedisClient, ours: Ours, ruby: RubyWorker
) -> None:
    """What only Ruby knows is left to it; whoever comes first performs the rest."""
    with world.working(ours.app, "ruby"):
        for n in range(0, 300, 3):
            client.push({"class": "Shop::Only", "args": [n], "queue": "ruby"})
            client.push_bulk({"class": "Shop::Echo", "queue": "ruby"}, [[n + 1], [n + 2]])

        def done() -> int:
            return len(ours.ran) + int(world.raw.llen("test:ruby"))

        wait_for(lambda: done() >= 300, "all are performed")
    in_ruby = [each["job"] for each in noted(world.raw)]
    assert sorted([*ours.first_args(), *(job["args"][0] for job in in_ruby)]) == list(range(300))
    assert {job["args"][0] for job in in_ruby if job["class"] == "Shop::Only"} == set(range(0, 300, 3))
    assert (world.waiting("ruby"), world.fetched()) == ([], 0)


def test_a_job_that_fails_on_both_sides_keeps_all_it_had(
    world: RedisWorld, ours: Ours, desk: Desk, ruby: RubyWorker
) -> None:
    more = {"queue": "python", "retry": 5, "retry_queue": "ruby", "backtrace": True, **UNKNOWN}
    jid = desk("Sidekiq::Client.push(words[0])", {"class": "Shop::Flaky", "args": HARD, **more})
    with world.working(ours.app, "python"):
        wait_for(lambda: world.raw.zcard(RETRY) == 1, "it failed here")
    (left,) = [parse(text) for text in world.members(RETRY)]
    assert (left["error_class"], left["queue"], left["retry_count"]) == ("ValueError", "ruby", 0)
    assert "test_interop.py" in decode_backtrace(left["error_backtrace"])[0]
    desk("Sidekiq::RetrySet.new.find_job(words[0]).retry; true", jid)
    wait_for(lambda: "ArgumentError" in str(world.members(RETRY)), "it failed in Ruby")
    (again,) = [parse(text) for text in world.members(RETRY)]
    assert (again["retry_count"], again["failed_at"]) == (0, left["failed_at"])
    assert again["retried_at"] > left["failed_at"]
    assert "jobs.rb" in decode_backtrace(again["error_backtrace"])[0]
    world.raw.set("test:mended", 1)
    ours.act("retries", "restart", jid)
    (found,) = [each["job"] for each in noted(world.raw)]
    assert repr(found["args"]) == repr(HARD)
    assert repr({name: found[name] for name in UNKNOWN}) == repr(UNKNOWN)
    assert (found["jid"], found["created_at"], found["retry_count"]) == (jid, left["created_at"], -1)
    assert (world.raw.zcard(RETRY), world.raw.zcard(DEAD)) == (0, 0)


# -- each side's sets, handled by the other

_SETS = """
[Sidekiq::ScheduledSet, Sidekiq::RetrySet, Sidekiq::DeadSet].map { |set| set.new.map { |job| [job.jid, job.score] } }
"""


def test_we_restart_kill_and_delete_what_failed_in_ruby(
    world: RedisWorld, ours: Ours, desk: Desk, ruby: RubyWorker
) -> None:
    jids = desk('words[0].map { |n| Shop::Flaky.set(queue: "ruby", retry: 3).perform_async(n) }', [0, 1, 2, 3])
    last = desk('Shop::Flaky.set(queue: "ruby", retry: 0).perform_async(4)')
    wait_for(lambda: (world.raw.zcard(RETRY), world.raw.zcard(DEAD)) == (4, 1), "all have failed")
    ours.act("retries", "kill", jids[1])
    ours.act("retries", "delete", jids[2])
    _, retries, dead = desk(_SETS)
    assert sorted(jid for jid, _ in retries) == sorted([jids[0], jids[3]])
    assert sorted(jid for jid, _ in dead) == sorted([jids[1], last])
    world.raw.set("test:mended", 1)
    ours.act("retries", "restart", jids[0])
    ours.act("dead", "restart", jids[1], last)
    assert sorted(each["job"]["args"][0] for each in noted(world.raw, 3)) == [0, 1, 4]
    assert [[jid for jid, _ in each] for each in desk(_SETS)] == [[], [jids[3]], []]


def test_we_restart_kill_and_delete_what_ruby_scheduled(
    world: RedisWorld, ours: Ours, desk: Desk, ruby: RubyWorker
) -> None:
    jids = desk('words[0].map { |n| Shop::Echo.set(queue: "ruby").perform_in(3600, n) }', [0, 1, 2, 3])
    ours.act("scheduled", "restart", jids[0], jids[3])
    ours.act("scheduled", "delete", jids[1])
    ours.act("scheduled", "kill", jids[2])
    assert sorted(each["job"]["args"][0] for each in noted(world.raw, 2)) == [0, 3]
    assert [[jid for jid, _ in each] for each in desk(_SETS)] == [[], [], [jids[2]]]


def test_ruby_restarts_kills_moves_and_deletes_what_failed_here(
    world: RedisWorld, ours: Ours, desk: Desk, ruby: RubyWorker
) -> None:
    with world.working(ours.app, "python"):
        jids = [str(ours.flaky.perform_async(n, "é", 1e20)) for n in range(4)]
        last = str(ours.flaky.set(retry=0).perform_async(4))
        wait_for(lambda: (world.raw.zcard(RETRY), world.raw.zcard(DEAD)) == (4, 1), "all have failed")
        desk(
            """
            retries = Sidekiq::RetrySet.new
            retries.find_job(words[1]).kill
            retries.find_job(words[2]).delete
            retries.find_job(words[3]).reschedule(words[4])
            """,
            *jids,
            LATER + 0.5,
        )
        assert sorted(ours.keys("retries")) == sorted([jids[0], jids[3]])
        assert sorted(ours.keys("dead")) == sorted([jids[1], last])
        assert ours.keys("retries")[jids[3]] == f"{LATER + 0.5}-{jids[3]}"
        ours.mended = True
        desk("Sidekiq::RetrySet.new.find_job(words[0]).retry", jids[0])
        desk("words.each { |jid| Sidekiq::DeadSet.new.find_job(jid).retry }", jids[1], last)
        wait_for(lambda: len(ours.ran) == 3, "those run again")
    assert ours.first_args() == [0, 1, 4]
    assert [[jid for jid, _ in each] for each in desk(_SETS)] == [[], [jids[3]], []]


def test_ruby_starts_moves_and_deletes_what_we_scheduled(
    world: RedisWorld, ours: Ours, desk: Desk, ruby: RubyWorker
) -> None:
    jids = [str(ours.echo.perform_in(3600, n, 1e20, "é")) for n in range(4)]
    with world.working(ours.app, "python"):
        desk(
            """
            scheduled = Sidekiq::ScheduledSet.new
            scheduled.find_job(words[0]).add_to_queue
            scheduled.find_job(words[1]).delete
            scheduled.find_job(words[2]).reschedule(5)
            """,
            *jids,
        )
        wait_for(lambda: len(ours.ran) == 2, "those that are due run")
    assert ours.first_args() == [0, 2]
    assert list(ours.keys("scheduled")) == [jids[3]]


def test_pollers_of_both_move_what_both_wrote_once(
    world: RedisWorld, desk: Desk, ruby: RubyWorker, redis_server: RedisServer
) -> None:
    """All become due in one moment, while Ruby's process, Ruby's desk and two of ours look."""
    broker, later = RedisBroker(redis_server.url), float(world.raw.time()[0]) + 3_600
    for name, first in ((SCHEDULE, 0), (RETRY, 200)):
        broker.hold(name, [SetEntry(an_echo(n), round((later + n / 1e6) * SECOND)) for n in range(first, first + 200)])
    broker.close()
    desk(
        """
        jobs = (400...600).map { |n| { "class" => "Shop::Echo", "args" => [n], "queue" => n.odd? ? "ruby" : "python" } }
        jobs.each { |job| Sidekiq::Client.push(job.merge("at" => words[0])) }
        """,
        later,
    )
    assert (world.raw.zcard(SCHEDULE), world.raw.zcard(RETRY)) == (400, 200)
    with world.raw.pipeline() as together:
        for name in (SCHEDULE, RETRY):
            together.zadd(name, {member: score - 3_600 for member, score in world.raw.zrange(name, 0, -1, withscores=True)})
        together.execute()
    done = threading.Event()
    threads = [threading.Thread(target=_poll, args=(done, redis_server), name="look") for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        desk(
            """
            poller = Sidekiq::Scheduled::Enq.new
            set = ->(name) { Sidekiq.redis { |connection| connection.zcard(name) } }
            (poller.enqueue_jobs; sleep 0.01) while set.("schedule") + set.("retry") > 0
            """
        )
        in_ruby = noted(world.raw, 300)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    moved = Counter(each["job"]["args"][0] for each in in_ruby) + Counter(
        parse(t)["args"][0] for t in world.waiting("python")
    )
    assert moved == Counter(range(600))
    assert world.raw.llen("queue:ruby") == 0


def an_echo(n: int) -> Copy:
    jid, queue = f"{n:024x}", "ruby" if n % 2 else "python"
    return Copy(jid, 0, queue, dump(build("Shop::Echo", [n], jid=jid, queue=queue, created_at=5, retry_count=0)))


def _poll(done: threading.Event, server: RedisServer) -> None:
    broker = RedisBroker(server.url)
    while not done.is_set():
        for name in (SCHEDULE, RETRY):
            broker.release_due(name, broker._clock.now(), 7)
    broker.close()


# -- processes


def test_we_quiet_and_stop_a_process_of_rubys_and_perform_what_it_gave_back(
    world: RedisWorld, client: RedisClient, ours: Ours, redis_server: RedisServer, tmp_path: Path
) -> None:
    operations = ours.app.operations
    with RubyWorker(redis_server, tmp_path, "other", "low", threads=1) as process:
        me = wait_for(lambda: process.identity, "it is seen")

        def seen() -> dict[str, Any]:
            return next((dict(each) for each in operations.processes() if each["identity"] == me), {})

        facts = seen()
        assert (facts["kind"], facts["queues"], facts["concurrency"], facts["quiet"]) == (
            "sidekiq",
            ["other", "low"],
            1,
            False,
        )
        jid = client.push({"class": "Shop::Slow", "args": HARD, "queue": "low", **UNKNOWN})
        wait_for(lambda: seen()["busy"] == 1, "it is at work")
        operations.signal(me, "quiet")
        wait_for(lambda: seen()["quiet"], "it is quiet")
        assert process.process.poll() is None
        operations.signal(me, "stop")
        assert wait_for(lambda: process.process.poll() is not None, "it ends")
        assert process.process.returncode == 0
        # Ruby removes its record when it stops; a heartbeat that comes between that and its end writes it once more, and it
        # expires by itself.
        assert not seen() or 0 < world.raw.ttl(me) <= 60
    ours.app.worker(name="Shop::Slow", use_task_event=False)(ours.echo.function)
    with world.working(ours.app, "low"):
        wait_for(lambda: len(ours.ran) == 1, "it is performed here")
    ((args, payload),) = ours.ran
    assert (repr(list(args)), payload["jid"]) == (repr(HARD), jid)
    assert repr({name: payload[name] for name in UNKNOWN}) == repr(UNKNOWN)


# -- odd jobs of a client in a language that writes JSON in another way


@pytest.mark.parametrize("text", ['{"class": "Shop::Flaky", "args": [1E5, "\\u00e9\\/"], "retry": 1}', None])
def test_a_job_without_an_id_and_a_queue_has_both_among_the_retries(
    world: RedisWorld, ours: Ours, desk: Desk, text: str | None
) -> None:
    world.push_text(text or json.dumps({"class": "Shop::Flaky", "args": [], "retry": 0, "jid": 5, "queue": None}), "python")
    with world.working(ours.app, "python"):
        wait_for(lambda: world.raw.zcard(RETRY) + world.raw.zcard(DEAD) == 1, "it failed")
    name = RETRY if text else DEAD
    (left,) = map(parse, world.members(name))
    assert left["queue"] == "python"
    assert isinstance(left["jid"], str)
    page = {RETRY: "retries", DEAD: "morgue"}[name]
    (key,) = ours.keys("retries" if text else "dead").values()
    assert desk("page = get(words[0]); [page.status, page.body.include?(words[1])]", f"/{page}/{key}", left["jid"]) == [
        200,
        True,
    ]


# -- jobs of ActiveJob

BERLIN = timezone(timedelta(hours=1))
FROM_RAILS: list[tuple[str, Any]] = [
    ("nil", None),
    ("true", True),
    ("2**70", 2**70),
    ("1e20", 1e20),
    ('"é"', "é"),
    (":sym", Symbol("sym")),
    ("String", ModuleName("String")),
    ("[1, [:a, nil]]", [1, [Symbol("a"), None]]),
    ('{a: 1, "b" => {c: :d}}', {"a": 1, "b": {"c": Symbol("d")}}),
    ('{"a" => 1}.with_indifferent_access', {"a": 1}),
    ("Date.new(2026, 1, 2)", date(2026, 1, 2)),
    ("Time.utc(2026, 1, 2, 3, 4, 5.123456r)", datetime(2026, 1, 2, 3, 4, 5, 123456, tzinfo=UTC)),
    ('DateTime.new(2026, 1, 2, 3, 4, 5, "+01:00")', datetime(2026, 1, 2, 3, 4, 5, tzinfo=BERLIN)),
    ('Time.utc(2026, 1, 2, 2, 4, 5).in_time_zone("Europe/Berlin")', datetime(2026, 1, 2, 3, 4, 5, tzinfo=BERLIN)),
    ("90.minutes + 1.second", timedelta(minutes=90, seconds=1)),
    ("1.week", timedelta(weeks=1)),
    ("Shop::User.new(7)", GlobalId("gid://shop/Shop::User/7")),
]


@pytest.fixture
def mail(ours: Ours) -> list[tuple[list[Any], dict[str, Any]]]:
    """What the worker ``Shop::Mail`` of ours was called with; it fails until it is mended."""
    called: list[tuple[list[Any], dict[str, Any]]] = []

    @ours.app.worker(name="Shop::Mail", queue="python", use_task_event=False)
    def perform(*args: Any, **options: Any) -> None:
        if not ours.mended:
            raise ValueError("no mail today")
        called.append((list(args), options))

    return called


def test_what_rails_enqueued_is_performed_here_with_its_values(
    world: RedisWorld, ours: Ours, desk: Desk, mail: list[tuple[list[Any], dict[str, Any]]]
) -> None:
    ours.mended = True
    args = ", ".join(text for text, _ in FROM_RAILS)
    desk(f'Shop::Mail.set(queue: "python").perform_later({args}, key: :word, on: Date.new(2026, 1, 2))')
    desk('Shop::Mail.set(queue: "python", wait: 3600).perform_later({a: 1})')
    ours.act("scheduled", "restart", *ours.keys("scheduled"))
    with world.working(ours.app, "python"):
        wait_for(lambda: len(mail) == 2, "both are performed")
    (found, options), (later, none) = sorted(mail, key=lambda each: -len(each[0]))
    assert found == [value for _, value in FROM_RAILS]
    assert [type(value) for value in found] == [type(value) for _, value in FROM_RAILS]
    assert [each.utcoffset() for each in found if isinstance(each, datetime)] == [
        timedelta(0),
        timedelta(hours=1),
        timedelta(hours=1),
    ]
    assert options == {"key": Symbol("word"), "on": date(2026, 1, 2)}
    assert (later, none) == ([{"a": 1}], {})


def test_what_rails_enqueued_and_failed_here_is_performed_there(
    world: RedisWorld, ours: Ours, desk: Desk, ruby: RubyWorker, mail: list[tuple[list[Any], dict[str, Any]]]
) -> None:
    args = ", ".join(text for text, _ in FROM_RAILS)
    job_id = desk(f'Shop::Mail.set(queue: "python").perform_later({args}, key: :word).job_id')
    with world.working(ours.app, "python"):
        wait_for(lambda: world.raw.zcard(RETRY) == 1, "it failed here")
    (text,) = world.members(RETRY)
    before = parse(text)["args"][0]["arguments"][:-1]
    desk(
        """
        job = Sidekiq::RetrySet.new.first
        job.delete
        Sidekiq::Client.push(job.item.merge("queue" => "ruby"))
        """
    )
    (found,) = [each for each in noted(world.raw, 2) if "arguments" in each]
    assert (found["job_id"], mail) == (job_id, [])
    assert decode_arguments(found["arguments"]) == ([value for _, value in FROM_RAILS], {})
    changed = [(was, now) for was, now in zip(before, found["arguments"], strict=True) if was != now]
    assert ["TimeWithZone" in str(was) for was, _ in changed] == [True], "Ruby's own, where no zone is set"
    assert decode_arguments(found["options"])[0] == [{"key": Symbol("word")}]


LONG_AGO = timezone(timedelta(minutes=53, seconds=28))
TO_RAILS: list[tuple[Any, str]] = [
    (None, "NilClass"),
    (2**70, "Integer"),
    (1.5, "Float"),
    ("é\u2028", "String"),
    ([1, [Symbol("a")]], "Array"),
    ({"a": 1, "b": {"c": [None]}}, "Hash"),
    ({Symbol("a"): {Symbol("b"): 1}, "c": 2}, "Hash"),
    (Symbol("sym"), "Symbol"),
    (ModuleName("Shop::Echo"), "Class"),
    (date(987, 1, 2), "Date"),
    (datetime(987, 1, 2, 3, 4, 5, 6, tzinfo=UTC), "Time"),
    (datetime(2026, 1, 2, 3, 4, 5, 123456, tzinfo=timezone(-timedelta(hours=3, minutes=30))), "Time"),
    (datetime(1880, 1, 2, 3, 4, 5, tzinfo=LONG_AGO), "Time"),
    (timedelta(days=1, seconds=1.5), "ActiveSupport::Duration"),
    (GlobalId("gid://shop/Shop::User/7"), "Shop::User"),
]


def test_what_we_enqueue_rails_performs_with_its_values(world: RedisWorld, client: RedisClient, ruby: RubyWorker) -> None:
    values = [value for value, _ in TO_RAILS]
    job = wrap(
        "Shop::Mail",
        values,
        {"key": Symbol("word"), "n": [1]},
        job_id="u-1",
        enqueued_at="2026-01-02T03:04:05Z",
        queue="ruby",
    )
    jid = client.push(job)
    (found,) = [each for each in noted(world.raw, 2) if "arguments" in each]
    assert (found["job_id"], found["provider"]) == ("u-1", jid)
    assert found["classes"] == [name for _, name in TO_RAILS]
    assert decode_arguments(found["arguments"]) == (values, {})
    assert decode_arguments(found["options"])[0] == [{"key": Symbol("word"), "n": [1]}]
    assert [each["_aj_symbol_keys"] for each in found["arguments"] if isinstance(each, dict) and "c" in each] == [["a"]]
