"""What the Redis broker does beyond the contract: foreign and broken payloads, private lists, pauses, deaths, waiting."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drawn import examples
from support.redis_dead import buried
from support.redis_watch import Fixed, Monitor
from support.servers import RedisServer

from asynctask.brokers.base import DEAD, RETRY, SCHEDULE, Copy, SetEntry
from asynctask.client import RedisClient
from asynctask.clock import SECOND
from asynctask.errors import BrokerUnavailable, ConfigError, InputError, TooLarge
from asynctask.sidekiq.broker import DEATHS_S, LOOKED_THROUGH, RedisBroker
from asynctask.sidekiq.envelope import MALFORMED, key_of, keys_in, opened, sealed
from asynctask.testing import wait_for

pytestmark = pytest.mark.redis_releases

NOW = 1_763_700_000_123_456
PATIENCE_S = 20.0


@pytest.fixture
def make(redis_server: RedisServer, raw: Any) -> Iterator[Callable[..., RedisBroker]]:
    made: list[RedisBroker] = []

    def new(**options: Any) -> RedisBroker:
        made.append(RedisBroker(redis_server.url, **options))
        return made[-1]

    yield new
    for each in made:
        each.close()


@pytest.fixture
def broker(make: Callable[..., RedisBroker]) -> RedisBroker:
    return make(clock=Fixed(NOW))


def a_copy(n: int, *, attempt: int = 1, queue: str = "default", task_id: int | None = None, priority: int = 0) -> Copy:
    jid = f"{n:024x}"
    return Copy(jid, attempt, queue, f'{{"class":"w","args":[{n}],"jid":"{jid}"}}', priority, task_id)


# -- what is no job

BROKEN = [
    b"", b"no json", b"[1]", b"5", b"null", b'"text"', b'{"class":"w"', b"\xff\xfe\x00", b'{"a":"\xff"}', b"\xef\xbb\xbf{}",
    b'{"a":NaN}', b'{"class":"w","args":' + b"[" * 200 + b"]" * 200 + b"}", b'{"a":"\\ud800"}', b"{" * 5_000,
]  # fmt: skip


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_no_job_is_fetched_as_such_and_can_go_to_the_dead(broker: RedisBroker, raw: Any, text: bytes) -> None:
    raw.lpush("queue:default", text)
    (copy,) = broker.exchange("p", [], ["default"], 10)
    assert (copy.jid[:4], copy.attempt, copy.task_id, copy.priority) == (MALFORMED, 0, None, 0)
    assert [held.jid for held in broker.held_by("p")] == [copy.jid]
    broker.hold(DEAD, [SetEntry(copy, NOW)], process="p")
    assert raw.zrange("dead", 0, -1, withscores=True) == [(buried(text), NOW / SECOND)]
    assert broker.held_by("p") == []
    assert [(held.copy.jid[:4], held.at) for held in broker.members(DEAD, 10)] == [(MALFORMED, NOW)]


def test_fifty_megabytes_are_fetched_and_go_to_the_dead_unmodified(make: Callable[..., RedisBroker], raw: Any) -> None:
    broker = make(clock=Fixed(NOW), timeout_s=60.0)  # a busy machine takes longer over them than a broker waits
    text = b'{"class":"w","args":["' + b"x" * 50_000_000 + b'"],"jid":"a"}'
    raw.lpush("queue:default", text)
    (copy,) = broker.exchange("p", [], ["default"], 10)
    assert copy.jid.startswith(MALFORMED)
    broker.hold(DEAD, [SetEntry(copy, NOW)], process="p")
    assert raw.zrange("dead", 0, -1) == [text]


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_no_job_can_be_put_back_as_it_was(broker: RedisBroker, raw: Any, text: bytes) -> None:
    raw.lpush("queue:default", text)
    broker.put_back("p", broker.exchange("p", [], ["default"], 10))
    assert raw.lrange("queue:default", 0, -1) == [text]


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_no_job_and_due_goes_to_the_dead_instead_of_a_queue(broker: RedisBroker, raw: Any, text: bytes) -> None:
    raw.zadd("retry", {text: 5, '{"class":"w","args":[],"jid":"good"}': 6})
    assert broker.release_due(RETRY, NOW, 10) == 2
    assert raw.zrange("dead", 0, -1, withscores=True) == [(buried(text), NOW / SECOND)]
    assert [json.loads(each)["jid"] for each in raw.lrange("queue:default", 0, -1)] == ["good"]
    assert raw.zcard("retry") == 0


def test_jobs_without_an_id_are_different_jobs_and_each_keeps_the_one_it_is_given(
    make: Callable[..., RedisBroker], raw: Any
) -> None:
    text = b'{"class":"w","args":[1]}'
    raw.lpush("queue:default", text, text, b'{"class":"w","args":[1],"jid":5}', b'{"class":"w","args":[1],"jid":""}')
    first, second = make(), make()
    fetched = first.exchange("p", [], ["default"], 10)
    jids = [copy.jid for copy in fetched]
    assert len(set(jids)) == 4
    assert [copy.jid for copy in second.held_by("p")] == jids, "recovery knows them by the same ids"
    second.put_back("p", second.held_by("p"))
    again = first.exchange("q", [], ["default"], 10)
    assert [copy.jid for copy in again] == jids
    assert [json.loads(copy.payload) for copy in again] == [json.loads(copy.payload) for copy in fetched]
    first.hold(RETRY, [SetEntry(copy, NOW) for copy in again], process="q")
    first.release_due(RETRY, NOW, 10)
    assert sorted(copy.jid for copy in first.exchange("q", [], ["default"], 10)) == sorted(jids)


# -- the member that carries the fence


@settings(max_examples=examples(100, 300))
@given(
    jid=st.text(st.characters(categories=["L", "N", "Zs"], include_characters=":-_.|"), min_size=1, max_size=64),
    attempt=st.integers(1, 2**31 - 1),
    task_id=st.none() | st.integers(0, 2**63 - 1),
    priority=st.integers(-(2**31) + 1, 2**31 - 1),
    args=st.lists(
        st.recursive(
            st.none() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(
                        ["asynctask", "jid", "attempt", "{}", '"'],
                    ),
                    inner,
                    max_size=3,
                )
            ),
        ),
        max_size=3,
    ),
)
def test_the_fence_travels_and_the_payload_comes_back_byte_for_byte(
    jid: str, attempt: int, task_id: int | None, priority: int, args: list[Any]
) -> None:
    if not jid.isprintable():
        return
    payload = json.dumps({"class": "w", "jid": jid, "args": args}, ensure_ascii=False)
    text = sealed(Copy(jid, attempt, "q", payload, priority, task_id))
    assert json.loads(text)["asynctask"]["attempt"] == attempt
    found = opened(text.encode(), "q")
    assert (found.key, found.task_id, found.priority, found.payload) == ((jid, attempt), task_id, priority, payload)
    assert [key_of(key) for key in keys_in([text.encode()])] == [(jid, attempt)]
    assert sealed(found) == text


def test_a_member_of_that_name_inside_an_argument_is_an_argument(broker: RedisBroker, raw: Any) -> None:
    inner = {"x": 1, "asynctask": {"jid": a_copy(1).jid, "attempt": 1, "task_id": 7}}
    texts = [
        json.dumps({"jid": "a", "class": "w", "args": [inner]}, separators=(",", ":")),
        json.dumps({"jid": "b", "class": "w", "args": [], "meta": inner}, separators=(",", ":")),
        json.dumps({"jid": "c", "class": "w", "args": [json.dumps(inner)]}, separators=(",", ":")),
    ]
    broker.push([a_copy(1, task_id=8)])
    raw.lpush("queue:default", *texts)
    assert broker.withdraw(7, 10) == []
    fetched = broker.exchange("p", [], ["default"], 10)
    assert [(copy.jid, copy.attempt, copy.task_id) for copy in fetched] == [
        (a_copy(1).jid, 1, 8),
        ("a", 0, None),
        ("b", 0, None),
        ("c", 0, None),
    ]
    assert [copy.payload for copy in fetched[1:]] == texts
    broker.exchange("p", fetched[1:], [], 0)
    assert broker.holds([a_copy(1).key]) == {a_copy(1).key}


@pytest.mark.parametrize(
    "member",
    [
        '{"jid":"x","attempt":"1"}', '{"jid":"x","attempt":-1}', '{"jid":"x","attempt":1e3}', '{"jid":5,"attempt":1}',
        '{"attempt":1}', '{"jid":"x","attempt":99999999999}', '{"jid":"x","attempt":1,"task_id":"7"}', "[]", "5", "{}",
        '{"jid":"","attempt":1}', '{"jid":"x","attempt":true}', '{"jid":"x","attempt":1,"priority":null}',
        '{"queue":5}', '{"jid":"%s","attempt":1}' % ("x" * 65),
    ],
)  # fmt: skip
def test_a_forged_or_broken_member_is_none(broker: RedisBroker, raw: Any, member: str) -> None:
    raw.lpush("queue:default", f'{{"class":"w","args":[],"jid":"own","asynctask":{member}}}')
    (copy,) = broker.exchange("p", [], ["default"], 10)
    assert (copy.jid, copy.attempt, copy.task_id, copy.priority) == ("own", 0, None, 0)
    broker.exchange("p", [copy], [], 0)
    assert broker.held_by("p") == []


@pytest.mark.parametrize(
    "copy",
    [
        Copy("", 1, "q", "{}"),
        Copy("x" * 65, 1, "q", "{}"),
        Copy('a"b', 1, "q", "{}"),
        Copy("a{b}", 1, "q", "{}"),
        Copy("a\nb", 1, "q", "{}"),
        Copy("a", 1, "", "{}"),
        Copy("a", 1, "q\n", "{}"),
        Copy("a", -1, "q", "{}"),
        Copy("a", 2**31, "q", "{}"),
        Copy("a", 1, "q", "{}", 2**31),
        Copy("a", 1, "q", "{}", 0, -1),
        Copy("a", 1, "q", "[1]"),
        Copy("a", 1, "q", '{"a":"\ud800"}'),
    ],
)
def test_a_copy_that_could_not_be_told_apart_or_kept_is_refused_with_its_whole_push(
    broker: RedisBroker, raw: Any, copy: Copy
) -> None:
    with pytest.raises(InputError):
        broker.push([a_copy(1), copy])
    assert raw.dbsize() == 0


def test_a_payload_over_four_megabytes_is_refused(broker: RedisBroker) -> None:
    with pytest.raises(TooLarge):
        broker.push([Copy("a", 1, "q", '{"a":"' + "x" * 4_194_304 + '"}')])


# -- private lists, held copies


def test_a_push_of_untracked_jobs_that_is_repeated_makes_two_copies_and_of_tracked_ones_does_not(
    broker: RedisBroker,
) -> None:
    for _ in range(2):
        broker.push([a_copy(1, attempt=0)])
        broker.push([a_copy(2)])
    assert broker.queues() == {"default": 3}


def test_a_lost_answer_of_a_fetch_leaves_the_copies_in_the_list(broker: RedisBroker, raw: Any) -> None:
    broker.push([a_copy(n) for n in range(3)])
    broker.exchange("p", [], ["default"], 2)  # as if it never arrived
    unarrived = broker.held_by("p")
    assert [copy.key for copy in unarrived] == [a_copy(0).key, a_copy(1).key]
    broker.put_back("p", unarrived)
    assert [copy.key for copy in broker.exchange("p", [], ["default"], 5)] == [a_copy(n).key for n in range(3)]


def test_handles_of_another_life_of_a_process_are_not_its_own(make: Callable[..., RedisBroker], raw: Any) -> None:
    one, two = make(), make()
    one.push([a_copy(0), a_copy(1)])
    (before,) = one.exchange("p", [], ["default"], 1)
    one.put_back("p", [before])
    fetched = two.exchange("p", [], ["default"], 5)
    one.exchange("p", [before], [], 0)
    assert [copy.key for copy in two.held_by("p")] == [copy.key for copy in fetched]
    assert two.holds([before.key]) == {before.key}


def test_a_copy_that_went_back_meanwhile_is_not_put_into_a_set_too(broker: RedisBroker, raw: Any) -> None:
    broker.push([a_copy(1, attempt=0)])
    (copy,) = broker.exchange("p", [], ["default"], 1)
    broker.put_back("p", [copy])
    broker.hold(RETRY, [SetEntry(copy, NOW)], process="p")
    assert broker.members(RETRY, 10) == []
    assert broker.queues() == {"default": 1}


def test_no_bookkeeping_stays_behind_when_all_is_done(broker: RedisBroker, raw: Any) -> None:
    broker.push([a_copy(n, attempt=n % 2, queue=f"q{n % 3}") for n in range(300)])
    done: list[Copy] = []
    while done := broker.exchange("p", done, ["q0", "q1", "q2"], 7):
        pass
    assert {key.decode() for key in raw.scan_iter()} == {"queues", "asynctask:queues"}


def test_ten_thousand_copies_are_fetched_and_acknowledged_at_once(broker: RedisBroker, raw: Any) -> None:
    broker.push([a_copy(n, attempt=n % 2) for n in range(12_000)])
    fetched = broker.exchange("p", [], ["default"], 11_000)
    assert [copy.jid for copy in fetched] == [a_copy(n).jid for n in range(11_000)]
    assert len(broker.exchange("p", fetched, ["default"], 11_000)) == 1_000
    assert raw.hlen("asynctask:held") == 500


def test_what_a_foreign_tool_deletes_is_not_held(broker: RedisBroker, raw: Any) -> None:
    broker.push([a_copy(n, queue=f"q{n % 2}") for n in range(6)])
    fetched = broker.exchange("p", [], ["q0"], 1)
    keys = {a_copy(n).key for n in range(6)}
    assert broker.holds(keys) == keys
    raw.rpop("queue:q1")
    assert broker.holds(keys) == keys - {a_copy(1).key}
    raw.delete("queue:q0")
    assert broker.holds(keys) == {fetched[0].key, a_copy(3).key, a_copy(5).key}
    raw.delete("asynctask:fetched:p")
    assert broker.holds(keys) == {a_copy(3).key, a_copy(5).key}


def test_a_copy_that_was_put_back_is_still_held_once(broker: RedisBroker, raw: Any) -> None:
    broker.push([a_copy(1)])
    broker.put_back("p", broker.exchange("p", [], ["default"], 1))
    assert broker.holds([a_copy(1).key]) == {a_copy(1).key}
    broker.push([a_copy(1)])
    assert broker.queues() == {"default": 1}


def test_what_was_withdrawn_or_is_known_to_be_deleted_may_be_pushed_again(broker: RedisBroker, raw: Any) -> None:
    broker.push([a_copy(1, task_id=7), a_copy(2)])
    assert broker.withdraw(7, 10) == [a_copy(1).key]
    broker.push([a_copy(1, task_id=7)])
    assert broker.queues() == {"default": 2}
    raw.delete("queue:default")
    assert broker.holds([a_copy(1).key, a_copy(2).key]) == set()
    broker.push([a_copy(1, task_id=7), a_copy(2)])
    assert broker.queues() == {"default": 2}


def test_every_second_copy_of_a_long_queue_is_withdrawn(broker: RedisBroker, raw: Any) -> None:
    broker.push([a_copy(n, task_id=7 + n % 2) for n in range(9_000)])
    taken = broker.withdraw(7, 10_000)
    assert sorted(taken) == sorted(a_copy(n).key for n in range(0, 9_000, 2))
    assert broker.queues() == {"default": 4_500}


def test_a_member_that_another_poller_has_moved_is_not_moved_again(
    broker: RedisBroker, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.hold(SCHEDULE, [SetEntry(a_copy(n, attempt=0), n) for n in range(3)])
    run = broker._server.run

    def run_late(script: str, *words: Any, **options: Any) -> Any:
        raw.zremrangebyrank("schedule", 0, 1)
        return run(script, *words, **options)

    monkeypatch.setattr(broker._server, "run", run_late)
    broker.release_due(SCHEDULE, NOW, 10)
    assert [json.loads(text)["jid"] for text in raw.lrange("queue:default", 0, -1)] == [a_copy(2).jid]


def test_in_a_very_long_queue_what_was_pushed_is_believed_to_be_there(broker: RedisBroker, raw: Any) -> None:
    broker.push([a_copy(n) for n in range(LOOKED_THROUGH + 2)])
    gone = a_copy(0)
    raw.rpop("queue:default")
    assert broker.holds([gone.key]) == {gone.key}
    raw.rpop("queue:default")
    assert broker.holds([gone.key, a_copy(5).key]) == {a_copy(5).key}


def test_a_task_is_withdrawn_from_a_long_queue_of_others_and_from_every_queue(broker: RedisBroker, raw: Any) -> None:
    with_task = [a_copy(n, queue=f"q{n % 2}", task_id=7 if n % 500 == 0 else 77, priority=n % 3) for n in range(5_000)]
    broker.push(with_task)
    taken = broker.withdraw(7, 1_000)
    assert sorted(taken) == sorted(copy.key for copy in with_task if copy.task_id == 7)
    assert broker.withdraw(7, 1_000) == []
    assert broker.holds(taken) == set()
    assert sum(broker.queues().values()) == 5_000 - len(taken)
    left = broker.exchange("p", [], ["q0", "q1"], 10_000)
    assert {copy.task_id for copy in left} == {77}


def test_a_paused_queue_gives_nothing_until_it_is_resumed(broker: RedisBroker, raw: Any) -> None:
    broker.push([a_copy(0, queue="a"), a_copy(1, queue="b")])
    raw.sadd("paused", "a")
    assert [copy.queue for copy in broker.exchange("p", [], ["a", "b"], 5)] == ["b"]
    raw.srem("paused", "a")
    assert [copy.queue for copy in broker.exchange("p", [], ["a", "b"], 5)] == ["a"]


def test_statistics_travel_with_the_next_exchange(broker: RedisBroker, raw: Any) -> None:
    broker._counters.add("stat:processed", 3)
    broker._counters.add("stat:processed:2026-11-21", 3, 1_000)
    broker._counters.add("stat:processed", 2)
    broker.push([a_copy(1)])
    fetched = broker.exchange("p", [], ["default"], 1)
    assert raw.get("stat:processed") == b"5"
    assert raw.get("stat:processed:2026-11-21") == b"3"
    assert 0 < raw.ttl("stat:processed:2026-11-21") <= 1_000
    assert raw.ttl("stat:processed") == -1
    raw.set("asynctask:deaths", "text")
    broker._counters.add("stat:failed", 1)
    with pytest.raises(BrokerUnavailable):
        broker.exchange("p", fetched, ["default"], 1)
    raw.delete("asynctask:deaths")
    broker.exchange("p", fetched, ["default"], 1)
    assert (raw.get("stat:failed"), raw.get("stat:processed")) == (b"1", b"5")
    assert broker.held_by("p") == []


def test_a_copy_that_was_never_fetched_is_not_in_the_list(broker: RedisBroker, raw: Any) -> None:
    broker.push([a_copy(1)])
    for call in (broker.drop, broker.put_back):
        call("p", [a_copy(1), a_copy(2, attempt=0)])
    assert broker.queues() == {"default": 1}
    assert broker.holds([a_copy(1).key]) == {a_copy(1).key}


# -- sets and deaths


def test_deaths_are_counted_by_job_for_three_days(make: Callable[..., RedisBroker], raw: Any) -> None:
    clock = Fixed(NOW)
    broker = make(clock=clock)
    broker.push([a_copy(1, attempt=0), a_copy(2, attempt=0)])
    one, two = broker.exchange("p", [], ["default"], 2)
    one.deaths += 1
    broker.put_back("p", [one, two])
    assert [copy.deaths for copy in broker.exchange("p", [], ["default"], 2)] == [1, 0]
    assert [copy.deaths for copy in broker.held_by("p")] == [1, 0], "recovery counts on from there"
    assert 0 < raw.ttl("asynctask:deaths") <= DEATHS_S
    broker.put_back("p", broker.held_by("p"))
    clock.at += (DEATHS_S + 1) * SECOND
    assert [copy.deaths for copy in broker.exchange("p", [], ["default"], 2)] == [0, 0]


def test_deaths_outlive_a_retry(broker: RedisBroker, raw: Any) -> None:
    broker.push([a_copy(1, attempt=0)])
    (copy,) = broker.exchange("p", [], ["default"], 1)
    copy.deaths = 2
    broker.put_back("p", [copy])
    broker.hold(RETRY, [SetEntry(broker.exchange("p", [], ["default"], 1)[0], NOW)], process="p")
    broker.release_due(RETRY, NOW, 1)
    assert [copy.deaths for copy in broker.exchange("p", [], ["default"], 1)] == [2]


def test_the_dead_are_kept_to_a_number_and_an_age_as_in_ruby(make: Callable[..., RedisBroker], raw: Any) -> None:
    broker = make(clock=Fixed(NOW), dead_max=10, dead_timeout_s=100)
    old = NOW - 101 * SECOND
    broker.hold(DEAD, [SetEntry(a_copy(n, attempt=0), old + n) for n in range(3)])
    broker.hold(DEAD, [SetEntry(a_copy(n, attempt=0), NOW + n) for n in range(3, 20)])
    assert [held.copy.jid for held in broker.members(DEAD, 100)] == [a_copy(n).jid for n in range(11, 20)]
    broker.hold(SCHEDULE, [SetEntry(a_copy(n, attempt=0), NOW + n) for n in range(30)])
    assert raw.zcard("schedule") == 30


def test_scores_keep_microseconds(broker: RedisBroker, raw: Any) -> None:
    at = [NOW + n for n in range(50)]
    broker.hold(SCHEDULE, [SetEntry(a_copy(n, attempt=0), each) for n, each in enumerate(at)])
    assert [held.at for held in broker.members(SCHEDULE, 100)] == at
    for each in at:
        assert broker.release_due(SCHEDULE, each - 1, 10) == 0
        assert broker.release_due(SCHEDULE, each, 10) == 1


def test_a_released_job_keeps_all_but_gets_a_new_time_of_queueing(broker: RedisBroker, raw: Any) -> None:
    member = (
        '{"queue":"low","retry":5,"class":"H","args":[1.0e+20,12345678901234567890123,"é/"],"jid":"a",'
        '"created_at":1763600000123,"enqueued_at":5,"retry_count":3,"unknown":{"b":1,"a":[null]}}'
    )
    raw.zadd("retry", {member: 1})
    broker.release_due(RETRY, NOW, 1)
    (text,) = raw.lrange("queue:low", 0, -1)
    assert text.decode() == member.replace('"enqueued_at":5', '"enqueued_at":1763700000.123456')
    assert raw.smembers("queues") == {b"low"}


def test_there_are_three_sets(broker: RedisBroker) -> None:
    for call in (lambda: broker.members("queues", 1), lambda: broker.release_due("x", 1, 1)):
        with pytest.raises(InputError, match="there are schedule, retry, dead"):
            call()
    assert broker.members(DEAD, 0) == []


@pytest.mark.parametrize("namespace", ["a b", "a*", "x" * 300, "a\n", "{a}"])
def test_a_namespace_that_would_be_a_pattern_is_refused(namespace: str) -> None:
    with pytest.raises(ConfigError, match="namespace"):
        RedisBroker("redis://127.0.0.1:1/0", namespace=namespace)


# -- waiting


def waiting_for(broker: RedisBroker, queues: list[str]) -> tuple[threading.Event, list[bool]]:
    """A wait in a thread of its own, after a fetch that found nothing; it has begun when this returns."""
    ended, news = threading.Event(), list[bool]()

    def wait() -> None:
        news.append(broker.wait(PATIENCE_S))
        ended.set()

    broker.exchange("p", [], queues, 1)
    threading.Thread(target=wait, daemon=True).start()
    return ended, news


def listeners(raw: Any) -> int:
    """How many connections are told news now."""
    found: Any = raw.client_list()
    return sum("t" in client["flags"] and "B" in client["flags"] for client in found)


def test_an_idle_process_asks_nothing_and_hears_any_push_to_its_queues(
    make: Callable[..., RedisBroker], raw: Any, redis_server: RedisServer
) -> None:
    broker = make()
    with Monitor(redis_server) as monitor:
        ended, news = waiting_for(broker, ["a", "b", "ab"])
        wait_for(lambda: listeners(raw) == 1, "it listens")
        monitor.commands()
        raw.lpush("queue:other", "x")
        assert not ended.wait(0.3)
        assert [words[0] for words in monitor.commands()] == ["LPUSH"], "nobody asked anything meanwhile"
        raw.lpush("queue:b", '{"class":"w","args":[]}')  # as any client does
        assert ended.wait(PATIENCE_S)
    assert news == [True]
    wait_for(lambda: listeners(raw) == 0, "a busy process is told nothing")


def test_every_idle_process_hears_and_one_has_the_job(make: Callable[..., RedisBroker], raw: Any) -> None:
    brokers = [make() for _ in range(5)]
    waits = [waiting_for(each, ["default"]) for each in brokers]
    wait_for(lambda: listeners(raw) == 5, "all listen")
    raw.lpush("queue:default", '{"class":"w","args":[],"jid":"a"}')
    assert all(ended.wait(PATIENCE_S) for ended, _ in waits)
    fetched = [copy.jid for n, each in enumerate(brokers) for copy in each.exchange(f"p{n}", [], ["default"], 1)]
    assert fetched == ["a"]


def test_what_is_pushed_between_the_fetch_and_the_wait_is_heard(make: Callable[..., RedisBroker], raw: Any) -> None:
    broker = make()
    for _ in range(3):
        assert broker.exchange("p", [], ["default"], 1) == []
        raw.lpush("queue:default", '{"class":"w","args":[]}')
        assert broker.wait(PATIENCE_S)
        assert len(broker.exchange("p", [], ["default"], 5)) == 1
    assert broker.exchange("p", [], ["default"], 1) == []
    assert broker.wait(0.05) is False


def test_a_paused_queue_ends_no_wait_however_full_it_is(make: Callable[..., RedisBroker], raw: Any) -> None:
    broker = make()
    raw.sadd("paused", "default")
    raw.lpush("queue:default", '{"class":"w","args":[]}')
    assert broker.exchange("p", [], ["default"], 1) == []
    assert broker.wait(0.05) is False


def test_a_pause_and_a_resume_of_any_queue_end_a_wait(make: Callable[..., RedisBroker], raw: Any) -> None:
    """Taken out: `paused` among what the connection is told of. A resumed queue was fetched from after the whole wait."""
    broker = make()
    for change in (raw.sadd, raw.srem):
        wait_for(lambda: listeners(raw) == 0, "the wait before has ended")
        ended, news = waiting_for(broker, ["default"])
        wait_for(lambda: listeners(raw) == 1, "it listens")
        change("paused", "default")
        assert ended.wait(PATIENCE_S)
        assert news == [True]


def test_a_wake_before_the_wait_ends_it_once(make: Callable[..., RedisBroker], raw: Any) -> None:
    broker = make()
    broker.wake()
    broker.wake()
    assert broker.wait(PATIENCE_S)
    assert broker.wait(0.05) is False


def test_closing_ends_a_wait_and_a_wake_afterwards_does_nothing(make: Callable[..., RedisBroker], raw: Any) -> None:
    broker = make()
    ended, _ = waiting_for(broker, ["default"])
    wait_for(lambda: listeners(raw) == 1, "it listens")
    broker.close()
    assert ended.wait(PATIENCE_S)
    broker.wake()
    assert broker.wait(PATIENCE_S)


def test_who_may_not_be_told_news_looks_from_time_to_time(
    make: Callable[..., RedisBroker], raw: Any, redis_server: RedisServer
) -> None:
    raw.execute_command("ACL", "SETUSER", "plain", "on", ">secret", "~*", "+@all", "-client", "+client|setname")
    broker = RedisBroker(redis_server.url.replace("redis://", "redis://plain:secret@"))
    try:
        assert broker.exchange("p", [], ["default"], 1) == []
        raw.lpush("queue:default", '{"class":"w","args":[],"jid":"a"}')
        assert broker.wait(PATIENCE_S)
        assert [copy.jid for copy in broker.exchange("p", [], ["default"], 1)] == ["a"]
        ended, _ = waiting_for(broker, ["default"])
        broker.wake()
        assert ended.wait(PATIENCE_S)
    finally:
        broker.close()
        raw.execute_command("ACL", "DELUSER", "plain")


def test_news_does_not_pile_up_for_a_process_that_is_busy(make: Callable[..., RedisBroker], raw: Any) -> None:
    broker = make()
    broker.exchange("p", [], ["default"], 1)
    broker.wait(0.01)
    with RedisClient(f"redis://127.0.0.1:{raw.connection_pool.connection_kwargs['port']}/0") as client:
        for n in range(500):
            client.perform_async("w", n)
    clients: Any = raw.client_list()
    assert all(int(each["omem"]) == 0 for each in clients)
    assert len(broker.exchange("p", [], ["default"], 1_000)) == 500
    assert broker.exchange("p", [], ["default"], 1) == []
    assert broker.wait(0.05) is False, "what was fetched already is no news"
