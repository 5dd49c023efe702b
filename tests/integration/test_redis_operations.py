"""The operations of the Redis broker beside others: the keys of Ruby's tools, its processes, hostile members."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from support.redis_ruby import Desk
from support.servers import RedisServer

from asynctask.brokers.base import DEAD, RETRY, SCHEDULE, Copy, SetEntry
from asynctask.clock import SECOND, rfc3339
from asynctask.sidekiq.broker import RedisBroker

ID = "host:7:0123456789ab"


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Any]:
    with redis_server.client() as made:
        made.flushall()
        yield made


@pytest.fixture
def broker(redis_server: RedisServer) -> Iterator[RedisBroker]:
    made = RedisBroker(redis_server.url, dead_max=3)
    yield made
    made.close()


def job(jid: str, **members: Any) -> str:
    return json.dumps({"class": "W", "args": [], "jid": jid, "queue": "default", **members})


def test_an_entry_is_named_by_score_and_jid_as_rubys_tools_print_it(client: Any, broker: RedisBroker) -> None:
    client.zadd("retry", {job("abc"): 1_700_000_000.123456, job("d-e-f"): 1_700_000_000})
    keys = [entry.key for entry in broker.operations.entries(RETRY).entries]
    assert keys == ["1700000000.0-d-e-f", "1700000000.123456-abc"]
    assert [e and e.copy.jid for e in map(lambda k: broker.operations.entry(RETRY, k), keys)] == ["d-e-f", "abc"]  # noqa: C417
    found = broker.operations.entry(RETRY, "1700000000-d-e-f")
    assert found is None, "a key is what the list shows, letter by letter"


def test_the_dead_stay_within_their_limits_when_something_is_killed(client: Any, broker: RedisBroker) -> None:
    client.zadd("dead", {job("old"): 1.0})
    client.zadd("retry", {job(str(n)): 1_700_000_000 + n for n in range(5)})
    assert broker.operations.kill(RETRY, broker.operations.entries(RETRY).entries) == 5
    assert client.zcard("dead") == 2, "one less than the limit, as Ruby trims it"


@pytest.mark.parametrize("raw", [b"\xff\xfe", b"[1]", b"5", b"{}", b'{"class":1,"args":{}}', b"{" * 5_000, b"null"])
def test_whatever_lies_there_is_listed_found_and_deleted(client: Any, broker: RedisBroker, raw: bytes) -> None:
    client.zadd("dead", {raw: 1_700_000_000.5})
    client.lpush("queue:default", raw)
    client.sadd("queues", "default")
    operations = broker.operations
    (entry,) = operations.entries(DEAD).entries
    assert operations.entry(DEAD, entry.key) == entry
    assert operations.delete(DEAD, [entry]) == 1
    assert [facts.length for facts in operations.queues()] == [1]
    (waiting,) = operations.jobs("default").entries
    assert operations.delete_job("default", waiting.key) is not None
    assert client.llen("queue:default") == 0


@pytest.mark.parametrize("at", ["inf", "-inf", "-5", "5e-07", "1e+300", "253402300800", "1e16"])
def test_a_time_that_is_none_hides_nothing_and_can_be_tidied_up(client: Any, broker: RedisBroker, at: str) -> None:
    client.zadd("retry", {job("abc"): at, job("def"): 1_700_000_000})
    found = {entry.copy.jid: entry for entry in broker.operations.entries(RETRY).entries}
    assert set(found) == {"abc", "def"}
    assert {held.copy.jid for held in broker.members(RETRY, 9)} == {"abc", "def"}
    assert "1970-01-01T00:00:00" <= str(rfc3339(found["abc"].at)) <= "9999-12-31T23:59:59.000Z"
    assert broker.operations.entry(RETRY, found["abc"].key) == found["abc"]
    assert broker.operations.delete(RETRY, [found["abc"]]) == 1
    assert [entry.copy.jid for entry in broker.operations.entries(RETRY).entries] == ["def"]


@pytest.mark.parametrize("when", [999_999_999_999_999.0, -999_999_999_999_999, 10**14])
def test_a_job_that_was_pushed_at_no_time_hides_no_queue(client: Any, broker: RedisBroker, when: float) -> None:
    client.lpush("queue:default", job("abc", enqueued_at=when))
    client.sadd("queues", "default")
    ((length, oldest),) = [(facts.length, facts.oldest_at) for facts in broker.operations.queues()]
    assert (length, len(str(rfc3339(oldest)))) == (1, 24)


def test_a_tracked_copy_that_is_deleted_is_not_held_any_more(client: Any, broker: RedisBroker) -> None:
    broker.push([Copy("a" * 24, 3, "default", job("a" * 24)), Copy("b" * 24, 1, "default", job("b" * 24))])
    assert broker.operations.delete_job("default", f"{'a' * 24}:3") is not None
    assert client.hkeys("asynctask:held") == [b"b" * 24 + b":1"]
    assert broker.operations.clear_some("default", 10).tracked == [("b" * 24, 1)]
    assert client.exists("asynctask:held", "queue:default", "queues") == 0


def test_a_search_takes_the_signs_of_patterns_as_themselves(client: Any, broker: RedisBroker) -> None:
    signs = "*?[]^\\-a"
    broker.hold(
        RETRY,
        [SetEntry(Copy("j1", 0, "default", job("j1", note=signs)), SECOND), SetEntry(Copy("j2", 0, "d", job("j2")), 1)],
    )
    for sign in ("*", "?", "[]^", "\\\\-a"):  # a backslash is two in JSON
        assert [e.copy.jid for e in broker.operations.find(RETRY, sign).entries] == ["j1"], sign


def test_processes_of_other_languages_are_listed_and_signalled(client: Any, broker: RedisBroker) -> None:
    info = {
        "hostname": "host",
        "pid": 7,
        "tag": "shop",
        "queues": ["default", "low"],
        "started_at": 1_700_000_000.5,
        "concurrency": 5,
        "identity": ID,
        "labels": [],
    }
    client.sadd("processes", ID, "gone:1:0")
    client.hset(ID, mapping={"info": json.dumps(info), "busy": 2, "beat": 1_700_000_009.25, "quiet": "true", "rss": 2048})
    (process,) = broker.operations.processes()
    assert process == {
        "identity": ID,
        "hostname": "host",
        "pid": 7,
        "started_at": 1_700_000_000_500_000,
        "beat_at": 1_700_000_009_250_000,
        "concurrency": 5,
        "busy": 2,
        "quiet": True,
        "rss": 2048 * 1024,
        "queues": ["default", "low"],
    }
    assert broker.operations.signal(ID, "TSTP")
    assert client.lrange(f"{ID}-signals", 0, -1) == [b"TSTP"]
    assert 0 < client.ttl(f"{ID}-signals") <= 60
    assert not broker.operations.signal("other:1:0", "TERM")


@pytest.mark.parametrize(
    "info", ["", "[]", "nonsense", '{"pid":"x","queues":5,"started_at":[],"hostname":{},"concurrency":1e999}']
)
def test_a_process_may_say_anything_of_itself(client: Any, broker: RedisBroker, info: str) -> None:
    client.sadd("processes", ID)
    client.hset(ID, mapping={"info": info, "busy": "many", "beat": "nan", "quiet": "True", "rss": "-5"})
    (process,) = broker.operations.processes()
    assert process["busy"] == process["concurrency"] == 0
    assert process["queues"] == []
    assert process["quiet"] is False


def test_ruby_names_an_entry_as_we_do_and_sees_what_we_did(client: Any, broker: RedisBroker, desk: Desk) -> None:
    at = [1_700_000_000 * SECOND + micro for micro in (0, 1, 123_456, 500_000, 999_999)]
    held = [
        SetEntry(Copy(f"{n:024x}", 0, "low", job(f"{n:024x}", queue="low", retry_count=2)), when)
        for n, when in enumerate(at)
    ]
    broker.hold(RETRY, held)
    keys = [entry.key for entry in broker.operations.entries(RETRY).entries]
    script = 'answer(Sidekiq::RetrySet.new.map { |job| "#{job.score}-#{job.jid}" }.sort)'
    assert desk(script) == sorted(keys)
    first, second, *_, last = broker.operations.entries(RETRY).entries
    assert broker.operations.restart(RETRY, [first]) == broker.operations.kill(RETRY, [second]) == 1
    broker.operations.pause("low")
    script = (
        'queue = Sidekiq::Queue.new("low").first; last = Sidekiq::RetrySet.new.to_a.max_by(&:score)\n'
        'answer([queue.jid, queue["retry_count"], Sidekiq::DeadSet.new.map(&:jid), Sidekiq::RetrySet.new.size,\n'
        "        last.jid, last.score])"
    )
    found = desk(script)
    assert found[:2] == [first.copy.jid, 1]
    assert found[2] == [second.copy.jid]
    assert found[3:6] == [3, last.copy.jid, 1_700_000_000.999999]


def test_what_ruby_pushed_and_scheduled_is_listed_found_and_started(client: Any, broker: RedisBroker, desk: Desk) -> None:
    script = (
        'push = ->(more) { Sidekiq::Client.push({"class" => "Hard", "args" => [1, "\u00e9"]}.merge(more)) }\n'
        'answer([push.({}), push.({"at" => Time.now.to_f + 3600})])'
    )
    now_jid, later_jid = desk(script)
    (queue,) = broker.operations.queues()
    assert (queue.name, queue.length, queue.next_class) == ("default", 1, "Hard")
    assert queue.oldest_at is not None
    (entry,) = broker.operations.find(SCHEDULE, "é").entries
    assert entry.copy.jid == later_jid
    assert broker.operations.restart(SCHEDULE, [entry]) == 1
    assert [e.key for e in broker.operations.jobs("default").entries] == [now_jid, later_jid]
    assert broker.operations.delete_job("default", now_jid) is not None
    assert desk("answer(Sidekiq::Queue.new.map(&:jid))") == [later_jid]


def test_a_page_of_huge_texts_ends_early_and_the_next_goes_on(client: Any, broker: RedisBroker) -> None:
    huge = "x" * 1_000_000
    client.lpush("queue:default", *(job(str(n), note=huge) for n in range(60)))
    client.zadd("retry", {job(str(n), note=huge): 1_700_000_000 + n for n in range(60)})
    for listed in (partial(broker.operations.jobs, "default"), partial(broker.operations.entries, RETRY)):
        seen: list[str] = []
        sizes = []
        while len(seen) < 60:
            page = listed(offset=len(seen), limit=1_000)
            assert page.total == 60
            seen += [entry.copy.jid for entry in page.entries]
            sizes.append(len(page.entries))
        assert seen == [str(n) for n in range(60)]
        assert sizes == [7] * 8 + [4], "8 MB at most"
