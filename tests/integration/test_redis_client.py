"""The client that only pushes: light to import, and on the wire what Sidekiq's own client sends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.redis_ruby import Desk
from support.redis_watch import Fixed, Monitor
from support.servers import RedisServer

from asynctask.client import BATCH, RedisClient, RemoteWorker
from asynctask.errors import BrokerUnavailable, ConfigError, InputError, TooLarge

NOW = 1_763_700_000_123_456
TIMES = '"jid":"000000000000000000000001","created_at":1763700000.123456,"enqueued_at":1763700000.123456}'


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[RedisClient]:
    with redis_server.client() as connection:
        connection.flushall()
    with RedisClient(redis_server.url, clock=Fixed(NOW), ids=Fixed(NOW)) as made:
        yield made


def jobs(server: RedisServer, queue: str) -> list[dict[str, Any]]:
    """What waits in a queue, the oldest first."""
    with server.client() as connection:
        return [json.loads(text) for text in reversed(connection.lrange(f"queue:{queue}", 0, -1))]


def schedule(server: RedisServer) -> list[tuple[dict[str, Any], float]]:
    with server.client() as connection:
        found: Any = connection.zrange("schedule", 0, -1, withscores=True)
        return [(json.loads(text), at) for text, at in found]


def test_importing_it_imports_no_database_and_no_web() -> None:
    script = """if True:
        import sys
        from asynctask.client import RedisClient, RemoteWorker
        RemoteWorker("A", RedisClient("redis://127.0.0.1:1/0"))
        heavy = {"sqlalchemy", "flask", "apiflask", "pydantic", "alembic", "click", "structlog"}
        print(sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_push_is_the_two_commands_that_ruby_sends(client: RedisClient, redis_server: RedisServer, desk: Desk) -> None:
    with Monitor(redis_server) as monitor:
        jid = client.perform_async("HardWorker", 1, "é/</script>", {"a": 1e20})
        ours = monitor.commands()
        script = (
            'Sidekiq::Client.push("class" => "HardWorker", "args" => [1, "é/</script>", {"a" => 1e20}], "jid" => ARGV[0])'
        )
        desk(script, str(jid))
        rubys = [command for command in monitor.commands() if command[0].upper() in ("SADD", "LPUSH")]
    assert ours == [
        ["SADD", "queues", "default"],
        [
            "LPUSH",
            "queue:default",
            '{"retry":true,"queue":"default","class":"HardWorker","args":[1,"é/</script>",{"a":1.0e+20}],' + TIMES,
        ],
    ]
    assert [[command[0].upper(), command[1]] for command in rubys] == [command[:2] for command in ours]
    mine, theirs = json.loads(ours[1][2]), json.loads(rubys[1][2])
    times = ("created_at", "enqueued_at")
    assert [(name, mine[name]) for name in mine if name not in times] == [
        (name, theirs[name]) for name in theirs if name not in times
    ]
    assert list(mine) == list(theirs)
    assert all(type(theirs[name]) is float for name in times)


def test_what_is_due_later_goes_into_the_schedule_without_at_and_enqueued_at(
    client: RedisClient, redis_server: RedisServer
) -> None:
    with Monitor(redis_server) as monitor:
        jid = client.perform_in(60.5, "HardWorker", 1)
        commands = monitor.commands()
    job = f'{{"retry":true,"queue":"default","class":"HardWorker","args":[1],"jid":"{jid}","created_at":1763700000.123456}}'
    assert commands == [["ZADD", "schedule", "1763700060.623456", job]]


@pytest.mark.parametrize(
    ("when", "at"),
    [
        (60, 1_763_700_060.123456),
        (timedelta(minutes=1), 1_763_700_060.123456),
        (1_763_800_000, 1_763_800_000.0),
        (1_763_800_000.5, 1_763_800_000.5),
        (datetime(2025, 11, 22, 10, 0, tzinfo=UTC), 1_763_805_600.0),
        (0, None),
        (-5, None),
        (1_763_600_000, None),
        (timedelta(0), None),
    ],
)
def test_times_are_spans_or_points_and_what_is_over_runs_now(
    client: RedisClient, redis_server: RedisServer, when: Any, at: float | None
) -> None:
    client.perform_at(when, "HardWorker")
    assert [score for _, score in schedule(redis_server)] == ([] if at is None else [at])
    assert len(jobs(redis_server, "default")) == (at is None)


@pytest.mark.parametrize("when", ["soon", True, float("nan"), datetime(2026, 1, 1)])  # noqa: DTZ001
def test_what_is_no_time_is_refused(client: RedisClient, when: Any) -> None:
    with pytest.raises(InputError):
        client.perform_in(when, "HardWorker")


def test_a_remote_worker_carries_its_options_and_can_be_set(client: RedisClient, redis_server: RedisServer) -> None:
    worker = RemoteWorker("Hard", client, queue="low", retry=5, tags=["a"])
    worker.perform_async(1)
    worker.set(queue="high", retry=False).perform_async(2)
    worker.set(wait=60).perform_async(3)
    worker.delay(4)
    assert [(job["args"], job["retry"], job["tags"]) for job in jobs(redis_server, "low")] == [
        ([1], 5, ["a"]),
        ([4], 5, ["a"]),
    ]
    assert [(job["args"], job["retry"]) for job in jobs(redis_server, "high")] == [([2], False)]
    assert [(job["args"], score, "at" in job) for job, score in schedule(redis_server)] == [
        ([3], 1_763_700_060.123456, False)
    ]
    assert repr(worker) == "<RemoteWorker Hard on low>"


def test_many_jobs_go_in_slices_of_a_thousand_each_in_one_round_trip(
    client: RedisClient, redis_server: RedisServer
) -> None:
    with Monitor(redis_server) as monitor:
        jids = RemoteWorker("Hard", client).perform_bulk([n] for n in range(2 * BATCH + 500))
        pushes = [command for command in monitor.commands() if command[0] == "LPUSH"]
    assert [len(command) - 2 for command in pushes] == [BATCH, BATCH, 500]
    found = jobs(redis_server, "default")
    assert [job["args"] for job in found] == [[n] for n in range(2 * BATCH + 500)]
    assert [job["jid"] for job in found] == jids
    assert len(set(jids)) == len(jids)


def test_many_jobs_can_be_due_at_one_time_or_each_at_its_own(client: RedisClient, redis_server: RedisServer) -> None:
    worker = RemoteWorker("Hard", client)
    worker.perform_bulk([[1], [2]], at=1_763_800_000)
    worker.perform_bulk([[3], [4]], at=[1_763_800_001, 1_763_800_002.5])
    assert sorted((score, job["args"]) for job, score in schedule(redis_server)) == [
        (1_763_800_000, [1]),
        (1_763_800_000, [2]),
        (1_763_800_001, [3]),
        (1_763_800_002.5, [4]),
    ]


@pytest.mark.parametrize(
    ("args", "at", "item"),
    [
        ([1, 2], None, {}),
        ([[1], [2]], [1], {}),
        (([n] for n in range(2)), [1_763_800_000], {}),
        ([[object()]], None, {}),
        ([[1]], None, {"jid": "x"}),
    ],
)
def test_a_slice_with_a_wrong_job_is_refused_as_a_whole(
    client: RedisClient, redis_server: RedisServer, args: Any, at: Any, item: Any
) -> None:
    with pytest.raises(InputError):
        client.push_bulk({"class": "Hard", **item}, args, at)
    assert jobs(redis_server, "default") == []
    assert schedule(redis_server) == []


def test_no_jobs_are_no_round_trip(client: RedisClient, redis_server: RedisServer) -> None:
    with Monitor(redis_server) as monitor:
        assert client.perform_bulk("Hard", []) == []
        assert monitor.commands() == []


def test_a_job_that_is_too_large_is_refused(client: RedisClient) -> None:
    with pytest.raises(TooLarge, match="the most is"):
        client.perform_async("Hard", "x" * 4_200_000)


def test_a_namespace_stands_before_every_key(redis_server: RedisServer) -> None:
    with redis_server.client() as connection:
        connection.flushall()
        with RedisClient(redis_server.url, namespace="shop") as client:
            client.perform_async("Hard")
            client.perform_in(60, "Hard")
        assert {key.decode() for key in connection.scan_iter()} == {"shop:queues", "shop:queue:default", "shop:schedule"}


def test_a_server_that_is_not_there_is_told(tmp_path: Any) -> None:
    with RedisClient("redis://user:secret@127.0.0.1:1/0") as client, pytest.raises(BrokerUnavailable) as caught:
        client.perform_async("Hard")
    assert "127.0.0.1:1 does not answer: start it, or mend broker_url" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://x", "redis://x:99999", "redis://x/?socket_timeout=abc", "127.0.0.1"])
def test_a_url_that_means_nothing_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="broker_url"):
        RedisClient(url)


def test_ruby_reads_what_the_client_pushed(client: RedisClient, desk: Desk) -> None:
    jids = [client.perform_async("Hard", n, "é") for n in range(3)]
    later = client.perform_in(60, "Hard", {"a": [1.5]})
    found = desk(
        """
        queue = Sidekiq::Queue.new("default")
        answer("queues" => Sidekiq::Queue.all.map(&:name), "size" => queue.size, "jids" => queue.map(&:jid),
               "args" => queue.map(&:args), "found" => queue.find_job(ARGV[0]).klass, "latency" => queue.latency > 0,
               "scheduled" => Sidekiq::ScheduledSet.new.map { |job| [job.jid, job.at.to_f, job.args] },
               "enqueued" => Sidekiq::Stats.new.enqueued)
        """,
        str(jids[1]),
    )
    assert found == {
        "queues": ["default"],
        "size": 3,
        "jids": jids[::-1],
        "args": [[n, "é"] for n in (2, 1, 0)],
        "found": "Hard",
        "latency": True,
        "scheduled": [[later, 1763700060.123456, [{"a": [1.5]}]]],
        "enqueued": 3,
    }
