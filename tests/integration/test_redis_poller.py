"""What waits in the sets of Redis comes to run: in a worker process that looks for it, beside Ruby's own."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import redis
from support.redis_ruby import Desk
from support.redis_watch import Fixed, Monitor
from support.servers import RedisServer
from support.sharing import poller_of
from support.world import World

from asynctask import AsyncTask
from asynctask.brokers.base import About
from asynctask.clock import SystemClock, SystemIds
from asynctask.sidekiq.broker import RedisBroker
from asynctask.sidekiq.sharing import Poller
from asynctask.testing import wait_for

NOW = 1_763_700_000_123_456

pytestmark = pytest.mark.databases("sqlite", reason="the sets are in Redis")

# Pushed into the sets by Ruby: one that is due in each, and one that is not.
_FILL = """
item = lambda { |n| { "class" => "Plain", "args" => [n], "queue" => "default", "retry" => 3 } }
Sidekiq::Client.push(item.(1).merge("at" => Time.now.to_f - 5))
Sidekiq::Client.push(item.(2).merge("at" => Time.now.to_f + 3600))
retried = Sidekiq.dump_json(item.(3).merge("jid" => "a" * 24, "retry_count" => 0, "failed_at" => Time.now.to_f))
Sidekiq.redis { |connection| connection.zadd("retry", (Time.now.to_f - 1).to_s, retried) }
"""


def test_what_ruby_scheduled_and_what_is_to_be_retried_runs_when_it_is_due(
    world: World, redis_server: RedisServer, raw: redis.Redis, desk: Desk
) -> None:
    app: AsyncTask = world.app(broker_url=redis_server.url, poll_interval_s=0.05)
    ran: list[int] = []

    @app.worker(name="Plain", use_task_event=False)
    def plain(n: int) -> None:
        ran.append(n)

    desk(_FILL)
    with world.working(app) as launcher:
        assert poller_of(launcher)
        wait_for(lambda: len(ran) == 2, "both that are due have run")
    assert sorted(ran) == [1, 3]
    assert (raw.zcard("schedule"), raw.zcard("retry")) == (1, 0)


def test_a_quiet_process_looks_no_more(world: World, redis_server: RedisServer, raw: redis.Redis, desk: Desk) -> None:
    app = world.app(broker_url=redis_server.url)
    with world.working(app) as launcher:
        launcher.quiet()
        desk(_FILL)
        poller_of(launcher).look()
        assert (raw.zcard("schedule"), raw.zcard("retry")) == (2, 1)


def test_many_pollers_move_each_job_once(redis_server: RedisServer, raw: redis.Redis) -> None:
    count = 500
    for n in range(count):
        raw.zadd("schedule", {f'{{"class":"Plain","args":[{n}],"queue":"default","jid":"{n:024x}"}}': 1.0 + n})
    start = threading.Barrier(4)

    def look() -> None:
        broker = RedisBroker(redis_server.url)
        poller = Poller(broker, SystemClock(), SystemIds())
        start.wait()
        poller.look()
        broker.close()

    threads = [threading.Thread(target=look, name="look") for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    moved = Counter(raw.lrange("queue:default", 0, -1))
    assert (len(moved), set(moved.values()), raw.zcard("schedule")) == (count, {1}, 0)


def test_an_idle_process_asks_little(redis_server: RedisServer, raw: redis.Redis) -> None:
    """Beats come 6 times a minute, looks 12 times on the average, idle fetches 12 times."""
    broker = RedisBroker(redis_server.url, clock=Fixed(NOW))
    presence = broker.presence(About("box:1:aa", "box", 1, NOW, 5, {"default": 1}))
    poller = Poller(broker, Fixed(NOW), Fixed(NOW), processes=presence.processes, prune=presence.prune)

    def asked() -> int:
        return len(monitor.commands())

    with Monitor(redis_server) as monitor:
        broker.exchange("box:1:aa", [], ["default"], 5)
        presence.beat((), quiet=False, rss_kib=1)
        poller.look()
        asked()  # what is done once, such as loading scripts
        presence.beat((), quiet=False, rss_kib=1)
        beat = asked()
        poller.look()
        poller.pause()
        look = asked()
        broker.exchange("box:1:aa", [], ["default"], 5)
        broker.wait(0)
        fetch = asked()
    broker.close()
    assert 6 * beat + 12 * look + 12 * fetch <= 60 * 5, (beat, look, fetch)
