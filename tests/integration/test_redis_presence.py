"""A worker process as Sidekiq's tools see and steer it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from support.redis_ruby import Desk
from support.redis_servers import OwnRedis
from support.redis_watch import NOW, Fixed, Monitor
from support.servers import RedisServer
from support.sharing import presence_of
from support.world import World

from asynctask import AsyncTask
from asynctask.brokers.base import About, Copy, RunningJob
from asynctask.clock import SECOND
from asynctask.errors import BrokerUnavailable
from asynctask.job import CurrentJob
from asynctask.middleware.tracker import NO_TICKET
from asynctask.runtime.execution import Execution
from asynctask.sidekiq.broker import RedisBroker
from asynctask.sidekiq.presence import MAX_SHOWN, RedisPresence
from asynctask.testing import wait_for

ME = "box:17:0123456789ab"

pytestmark = [
    pytest.mark.one_redis("what the broker does on each is proved by the tests of the broker"),
    pytest.mark.databases("sqlite", reason="what a process shows in Redis does not depend on its ledger"),
]


def about(**more: Any) -> About:
    return About(ME, "box", 17, NOW, 3, {"default": 2, "low": 1}, version="1.2.3", tag="shop", **more)


def presence(broker: RedisBroker, **more: Any) -> RedisPresence:
    made = broker.presence(about(**more))
    assert isinstance(made, RedisPresence)
    return made


def running(n: int, payload: str = "") -> RunningJob:
    jid = f"{n:024x}"
    text = payload or json.dumps({"class": "Hard", "args": [n], "jid": jid, "queue": "default"})
    return RunningJob(f"t{n}", "Hard", jid, "default", text, NOW)


def beat(made: RedisPresence, *jobs: RunningJob, quiet: bool = False) -> str | None:
    return made.beat(jobs, quiet=quiet, rss_kib=2048)


class Gated:
    """An application with untracked workers, one of which waits for a gate."""

    def __init__(self, world: World, url: str) -> None:
        self.gate, self.began = threading.Event(), threading.Semaphore(0)
        self.app: AsyncTask = world.app(broker_url=url)

        @self.app.worker(name="Plain", use_task_event=False, retry=0)
        def plain(n: int) -> None:
            if n < 0:
                raise ValueError("below zero")

        @self.app.worker(name="Hard", use_task_event=False, retry=0)
        def hard(n: int) -> None:
            self.began.release()
            assert self.gate.wait(120)

        self.plain, self.hard = plain, hard


@pytest.fixture
def gated(world: World, redis_server: RedisServer, raw: Any) -> Iterator[Gated]:
    made = Gated(world, redis_server.url)
    yield made
    made.gate.set()


# -- what it writes


def test_a_beat_writes_every_field_in_the_form_that_each_version_reads(broker: RedisBroker, raw: Any) -> None:
    beat(presence(broker), running(1), quiet=True)
    assert raw.smembers("processes") == {ME.encode()}
    found = {key.decode(): value.decode() for key, value in raw.hgetall(ME).items()}
    info = json.loads(found.pop("info"))
    assert int(found.pop("rtt_us")) >= 0
    assert found == {"busy": "1", "beat": repr(NOW / SECOND), "quiet": "true", "rss": "2048", "concurrency": "3"}
    weights = {"default": 2, "low": 1}
    assert info == {
        "hostname": "box",
        "started_at": NOW / SECOND,
        "pid": 17,
        "tag": "shop",
        "concurrency": 3,
        "identity": ME,
        "queues": ["default", "low"],
        "weights": [weights],
        "labels": [],
        "version": "1.2.3",
        "embedded": False,
        "capsules": {"default": {"concurrency": 3, "mode": "weighted", "weights": weights}},
    }
    assert 0 < raw.ttl(ME) <= 60
    for key in (f"{ME}:work", f"{ME}:workers"):
        ((thread, entry),) = raw.hgetall(key).items()
        assert (thread, json.loads(entry)) == (
            b"t1",
            {"queue": "default", "payload": running(1).payload, "run_at": NOW // SECOND},
        )
        assert 0 < raw.ttl(key) <= 60


@pytest.mark.parametrize(
    ("strict", "weights", "mode", "shown"),
    [
        (True, {"a": 3, "b": 1}, "strict", {"a": 0, "b": 0}),
        (False, {"a": 1, "b": 1}, "random", {"a": 1, "b": 1}),
        (False, {"a": 2}, "weighted", {"a": 2}),
    ],
)
def test_how_it_takes_from_its_queues_is_shown(
    broker: RedisBroker, raw: Any, strict: bool, weights: dict[str, int], mode: str, shown: dict[str, int]
) -> None:
    made = broker.presence(About(ME, "box", 17, NOW, 3, weights, strict=strict))
    made.beat((), quiet=False, rss_kib=1)
    info = json.loads(raw.hget(ME, "info"))
    assert (info["capsules"]["default"]["mode"], info["weights"]) == (mode, [shown])


def test_the_next_beat_forgets_what_has_ended(broker: RedisBroker, raw: Any) -> None:
    made = presence(broker)
    beat(made, running(1), running(2))
    beat(made, running(2))
    assert raw.hkeys(f"{ME}:work") == raw.hkeys(f"{ME}:workers") == [b"t2"]
    beat(made)
    assert raw.exists(f"{ME}:work", f"{ME}:workers") == 0
    assert raw.hget(ME, "quiet") == b"false"


def test_a_payload_too_large_to_show_is_shown_without_its_arguments(broker: RedisBroker, raw: Any) -> None:
    beat(presence(broker), running(1, json.dumps({"class": "Hard", "args": ["x" * MAX_SHOWN]})), running(2, '"\ud800"'))
    entries = {key: json.loads(value) for key, value in raw.hgetall(f"{ME}:work").items()}
    large = json.loads(entries[b"t1"]["payload"])
    assert (large["class"], large["jid"], large["queue"]) == ("Hard", f"{1:024x}", "default")
    assert len(entries[b"t1"]["payload"]) < 300
    assert entries[b"t2"]["payload"] == '"?"'


def test_who_leaves_is_gone_from_every_list_and_its_last_counts_arrive(broker: RedisBroker, raw: Any) -> None:
    made = presence(broker)
    beat(made, running(1))
    made.ended("Hard", 0.01, False)
    made.leave()
    assert raw.exists("processes", f"{ME}:work", f"{ME}:workers") == 0
    assert raw.get("stat:processed") == b"1"


def test_everything_lies_under_the_namespace(redis_server: RedisServer, raw: Any) -> None:
    broker = RedisBroker(redis_server.url, namespace="shop", clock=Fixed(NOW))
    made = presence(broker)
    made.ended("Hard", 0.01, False)
    beat(made, running(1))
    raw.lpush(f"shop:{ME}-signals", "TSTP")
    assert beat(made) == "TSTP"
    made.prune()
    broker.close()
    assert all(key.startswith(b"shop:") for key in raw.scan_iter())


# -- signals


def test_signals_are_taken_in_the_order_in_which_they_were_left_one_a_beat(broker: RedisBroker, raw: Any) -> None:
    made = presence(broker)
    raw.lpush(f"{ME}-signals", "TSTP")
    raw.lpush(f"{ME}-signals", "TERM")
    assert [beat(made) for _ in range(3)] == ["TSTP", "TERM", None]


def test_a_key_that_holds_something_else_hides_neither_the_process_nor_its_signal(broker: RedisBroker, raw: Any) -> None:
    made = presence(broker)
    raw.rpush("processes", "not a set")
    raw.rpush("stat:processed", "not a number")
    raw.lpush(f"{ME}-signals", "TERM")
    made.ended("Hard", 0.01, True)
    assert beat(made) == "TERM"
    assert raw.hget(ME, "busy") == b"0"
    assert raw.get("stat:failed") == b"1"
    beat(made)
    assert raw.get("stat:failed") == b"1"


# -- counts


def test_counts_travel_with_the_next_exchange_and_for_a_day_are_kept_for_five_years(
    broker: RedisBroker, raw: Any, redis_server: RedisServer
) -> None:
    made = presence(broker)
    for n in range(5):
        made.ended("Hard", 0.01, n == 0)
    with Monitor(redis_server) as monitor:
        broker.exchange(ME, [], ["default"], 1)
        assert [words[0] for words in monitor.commands() if words[0].upper().startswith("EVAL")] in (
            ["EVALSHA"],
            ["EVALSHA", "EVAL"],
        )
    assert (raw.get("stat:processed"), raw.get("stat:failed")) == (b"5", b"1")
    assert (raw.get("stat:processed:2025-11-21"), raw.get("stat:failed:2025-11-21")) == (b"5", b"1")
    assert 157_679_000 < raw.ttl("stat:processed:2025-11-21") <= 157_680_000
    assert raw.ttl("stat:processed") == -1
    beat(made)
    assert raw.get("stat:processed") == b"5"


def test_a_counter_that_is_none_stops_no_fetch(broker: RedisBroker, raw: Any) -> None:
    made = presence(broker)
    raw.set("stat:processed", "lots")
    raw.lpush("queue:default", '{"class":"Hard","args":[],"jid":"000000000000000000000001"}')
    made.ended("Hard", 0.01, False)
    assert len(broker.exchange(ME, [], ["default"], 1)) == 1


def test_an_outage_loses_no_counts(redis_server: RedisServer, raw: Any) -> None:
    broker = RedisBroker(redis_server.url, clock=Fixed(NOW))
    made = presence(broker)
    made.ended("Hard", 0.05, False)
    away = RedisBroker("redis://127.0.0.1:1", clock=Fixed(NOW))
    known, made._server = made._server, away._server
    with pytest.raises(BrokerUnavailable):
        beat(made)
    made.ended("Hard", 0.05, True)
    with pytest.raises(BrokerUnavailable):
        made.leave()
    assert raw.get("stat:processed") is None
    made._server = known
    beat(made)
    assert (raw.get("stat:processed"), raw.get("stat:failed")) == (b"2", b"1")
    assert raw.hgetall("j|251121|4:40") == {b"Hard|p": b"2", b"Hard|f": b"1", b"Hard|ms": b"50"}
    broker.close()
    away.close()


def test_an_exchange_that_fails_keeps_the_counts(raw: Any, redis_server: RedisServer) -> None:
    broker = RedisBroker(redis_server.url, clock=Fixed(NOW))
    made = presence(broker)
    made.ended("Hard", 0.05, False)
    raw.set("asynctask:held", "not a hash")
    with pytest.raises(BrokerUnavailable):
        broker.exchange(ME, [], ["default"], 1)
    raw.delete("asynctask:held")
    broker.exchange(ME, [], ["default"], 1)
    assert raw.get("stat:processed") == b"1"
    broker.close()


# -- metrics


def test_metrics_stand_where_both_versions_read_them(broker: RedisBroker, raw: Any) -> None:
    made = presence(broker)
    for ms, failed in ((5, False), (20, False), (25, False), (400_000, False), (7, True)):
        made.ended("Hard::Job", ms / 1000, failed)
    made.ended("a|b", 0.1, False)
    beat(made)
    figures = {b"Hard::Job|p": b"5", b"Hard::Job|f": b"1", b"Hard::Job|ms": b"400050"}
    for key, seconds in (("j|20251121|4:40", 28_800), ("j|251121|4:40", 28_800), ("j|251121|4:4", 259_200)):
        assert raw.hgetall(key) == figures
        assert seconds - 60 < raw.ttl(key) <= seconds
    for key in ("Hard::Job-21-04:40", "h|Hard::Job-21-4:40"):
        words = [word for n in range(26) for word in ("GET", "u16", f"#{n}")]
        counters = raw.execute_command("BITFIELD", key, *words)
        assert {n: count for n, count in enumerate(counters) if count} == {0: 1, 1: 2, 25: 1}
        assert 28_740 < raw.ttl(key) <= 28_800
    assert not raw.keys("*a|b*")


def test_metrics_that_could_not_be_sent_go_with_a_later_beat(
    broker: RedisBroker, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = presence(broker)
    known = made._server.guarded

    def guarded(call: Any, keys: Any = (), **options: Any) -> Any:
        if any(key.startswith("j|") for key in keys):
            raise BrokerUnavailable("it is away")
        return known(call, keys, **options)

    made.ended("Hard", 0.05, False)
    with monkeypatch.context() as patch:
        patch.setattr(made._server, "guarded", guarded)
        raw.lpush(f"{ME}-signals", "TSTP")
        assert beat(made) == "TSTP"
    assert raw.get("stat:processed") == b"1"
    beat(made)
    assert raw.get("stat:processed") == b"1"
    assert raw.hget("j|251121|4:40", "Hard|p") == b"1"


def test_a_metrics_key_that_holds_something_else_costs_its_own_figures_alone(broker: RedisBroker, raw: Any) -> None:
    made = presence(broker)
    raw.rpush("j|20251121|4:40", "not a hash")
    for _ in range(2):
        made.ended("Hard", 0.05, False)
        beat(made)
    assert raw.hget("j|251121|4:40", "Hard|p") == b"2"


# -- the set of processes


def test_the_dead_are_pruned_by_one_process_a_minute(broker: RedisBroker, raw: Any) -> None:
    made = presence(broker)
    beat(made)
    raw.sadd("processes", "gone:1:aa", "list")
    raw.rpush("list", "of somebody else")
    made.prune()
    assert raw.smembers("processes") == {ME.encode(), b"list"}
    assert 0 < raw.ttl("process_cleanup") <= 60
    raw.sadd("processes", "gone:2:bb")
    made.prune()
    assert made.processes() == 3


# -- what Ruby sees of a process, and tells it


def seen(desk: Desk) -> Any:
    return desk(
        """
        stats = Sidekiq::Stats.new
        answer("processes" => Sidekiq::ProcessSet.new.map { |process|
                 [process["identity"], process["concurrency"], process["busy"], process.queues, process.labels,
                  process.stopping?, process["rss"] > 0, process["hostname"].empty?] },
               "work" => Sidekiq::Workers.new.map { |identity, thread, work|
                 [identity, work["queue"], work["payload"]["args"], work["run_at"].class.to_s] },
               "processed" => stats.processed, "failed" => stats.failed, "size" => stats.workers_size,
               "history" => Sidekiq::Stats::History.new(2).processed)
        """,
    )


def test_ruby_sees_the_process_and_its_jobs_and_counts(gated: Gated, world: World, desk: Desk) -> None:
    with world.working(gated.app, concurrency=3, queues={"default": 1}) as launcher:
        me = launcher.ledger.identity
        showing = presence_of(launcher)
        assert showing is not None
        for n in (1, 2, -1):
            gated.plain.perform_async(n)
        gated.hard.perform_async(7)
        assert gated.began.acquire(timeout=120)
        wait_for(lambda: launcher.performer.performed == 3, "three jobs have ended")
        showing.beat()
        found = seen(desk)
        assert found["processes"] == [[me, 3, 1, ["default"], [], False, True, False]]
        assert found["work"] == [[me, "default", [7], "Integer"]]
        assert (found["processed"], found["failed"], found["size"]) == (3, 1, 1)
        assert found["history"][datetime.now(UTC).strftime("%Y-%m-%d")] == 3
        gated.gate.set()
    found = seen(desk)
    assert (found["processes"], found["work"], found["processed"]) == ([], [], 4)


_PAGES = """
require "sidekiq/web"
require "rack/mock"
web = Rack::MockRequest.new(Sidekiq::Web)
session = { "rack.session" => { csrf: "x" * 32, options: {} } }
answer(%w[/ /busy /queues /retries /scheduled /morgue /stats].to_h { |path|
  found = web.get(path, session)
  [path, [found.status, ARGV.map { |text| found.body.include?(text) }]]
})
"""


def test_rubys_page_shows_the_process_and_what_it_runs(gated: Gated, world: World, desk: Desk, raw: Any) -> None:
    with world.working(gated.app, concurrency=3) as launcher:
        gated.plain.perform_async(-1)
        gated.hard.perform_async(7)
        assert gated.began.acquire(timeout=120)
        presence_of(launcher).beat()
        fetched = map(json.loads, raw.hvals(f"asynctask:fetched:{launcher.ledger.identity}"))
        (jid,) = [job["jid"] for job in fetched if job["class"] == "Hard"]
        pages = desk(_PAGES, launcher.ledger.identity, jid)
        gated.gate.set()
    assert {path: status for path, (status, _) in pages.items()} == dict.fromkeys(pages, 200)
    assert pages["/busy"][1] == [True, True]


def tell(desk: Desk, what: str) -> None:
    desk(f"Sidekiq::ProcessSet.new.each(&:{what})")


def test_ruby_quiets_a_process_and_sees_that_it_is(gated: Gated, world: World, desk: Desk, raw: Any) -> None:
    with world.working(gated.app) as launcher:
        presence_of(launcher).beat()
        tell(desk, "quiet!")
        presence_of(launcher).beat()
        assert launcher.pool.is_quiet
        gated.plain.perform_async(1)
        presence_of(launcher).beat()
        assert [process[5] for process in seen(desk)["processes"]] == [True]
        assert raw.llen("queue:default") == 1


def test_ruby_has_a_process_show_its_stacks(
    gated: Gated, world: World, desk: Desk, capfd: pytest.CaptureFixture[str]
) -> None:
    with world.working(gated.app) as launcher:
        presence_of(launcher).beat()
        tell(desk, "dump_threads")
        presence_of(launcher).beat()
        assert not launcher.pool.is_quiet
    said = capfd.readouterr().err
    assert "Current thread 0x" in said
    assert "fetcher.py" in said


def test_ruby_stops_a_process_that_serves_and_its_last_counts_arrive(
    world: World, redis_server: RedisServer, raw: Any, desk: Desk
) -> None:
    child = world.fork("-m", "asynctask", "-A", "support.redis_app:app", "worker", "-c", "2", TEST_BROKER=redis_server.url)
    wait_for(lambda: raw.scard("processes") == 1, "the process is seen")
    tell(desk, "stop!")
    assert wait_for(lambda: child.poll() is not None, "it stops")
    assert child.returncode == 0, world.said()
    assert raw.scard("processes") == 0


def test_a_process_that_waits_for_its_last_jobs_is_seen_as_stopping(gated: Gated, raw: Any) -> None:
    launcher = gated.app.launcher(concurrency=1, shutdown_s=60.0)
    presence_of(launcher)._every_s = 3600.0  # the beat that is waited for is not one that comes anyhow
    launcher.start()
    gated.hard.perform_async(1)
    assert gated.began.acquire(timeout=120)
    stopping = threading.Thread(target=launcher.stop, name="stop")
    stopping.start()
    me = launcher.ledger.identity
    wait_for(lambda: raw.hmget(me, "quiet", "busy") == [b"true", b"1"], "it is seen as stopping")
    assert raw.hlen(f"{me}:work") == 1
    gated.gate.set()
    stopping.join()
    assert raw.exists("processes", f"{me}:work") == 0


def test_an_outage_of_redis_ends_nothing_and_the_process_is_seen_again(world: World, tmp_path: Path) -> None:
    with OwnRedis(tmp_path) as server:
        gated = Gated(world, server.url)
        with world.working(gated.app) as launcher:
            showing = presence_of(launcher)
            assert showing is not None
            gated.hard.perform_async(1)
            assert gated.began.acquire(timeout=120)
            server.stop()
            with pytest.raises(BrokerUnavailable):
                showing.beat()
            gated.gate.set()
            wait_for(lambda: launcher.performer.performed == 1, "the job ends while the server is away")
            server.start()
            showing.beat()
            with server.client() as raw:
                assert raw.get("stat:processed") == b"1"
                assert raw.scard("processes") == 1


@pytest.mark.parametrize(("wrapped", "counted"), [("Real", "Real"), (None, "Wrapper"), (7, "Wrapper")])
def test_a_wrapped_job_counts_under_its_own_name(gated: Gated, raw: Any, wrapped: Any, counted: str) -> None:
    launcher = gated.app.launcher()
    copy = Copy("0" * 24, 0, "default", "{}")
    payload = {"class": "Wrapper", "wrapped": wrapped, "args": []}
    presence_of(launcher).ended(
        Execution(NO_TICKET, job=CurrentJob("0" * 24), copy=copy, payload=payload, worker=None), False
    )
    presence_of(launcher).beat()
    (key,) = raw.keys("j|????????|*")
    assert raw.hget(key, f"{counted}|p") == b"1"


def test_a_signal_that_nobody_knows_does_nothing(gated: Gated, world: World, raw: Any) -> None:
    with world.working(gated.app) as launcher:
        for name in ("KILL", "", "\xff" * 10_000, "LOST"):
            raw.lpush(f"{launcher.ledger.identity}-signals", name)
            presence_of(launcher).beat()
        assert not launcher.pool.is_quiet
        assert not launcher._lost


def test_what_is_cut_off_at_the_end_goes_back_unchanged_and_counts_as_failed(gated: Gated, world: World, raw: Any) -> None:
    with world.working(gated.app, concurrency=1, shutdown_s=0.0) as launcher:
        gated.hard.perform_async(1)
        assert gated.began.acquire(timeout=120)
        (before,) = raw.hvals(f"asynctask:fetched:{launcher.ledger.identity}")
        gated.plain.perform_async(2)
    assert raw.lrange("queue:default", -1, -1) == [before]
    assert raw.llen("queue:default") == 2
    assert (raw.get("stat:processed"), raw.get("stat:failed")) == (b"1", b"1")
    assert raw.zcard("retry") == raw.zcard("dead") == 0
