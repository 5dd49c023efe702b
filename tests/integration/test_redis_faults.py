"""A Redis that is away, slow, full, a replica or somebody else's; processes that are killed; other ways to connect."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from support.proxy import AFTER, BEFORE, Proxy
from support.redis_servers import OwnRedis
from support.servers import RedisServer

from asynctask.brokers.base import DEAD, RETRY, SCHEDULE, Broker, Copy, SetEntry
from asynctask.client import RedisClient
from asynctask.errors import BrokerUnavailable, ConfigError
from asynctask.sidekiq.broker import RedisBroker
from asynctask.testing import wait_for

pytestmark = pytest.mark.redis_releases

ROOT = Path(__file__).resolve().parents[2]


def a_copy(n: int = 0, *, attempt: int = 1, queue: str = "default") -> Copy:
    jid = f"{n:024x}"
    return Copy(jid, attempt, queue, f'{{"class":"w","args":[{n}],"jid":"{jid}"}}')


EVERY_CALL: dict[str, Callable[[Broker], Any]] = {
    "push": lambda broker: broker.push([a_copy(1)]),
    "push untracked": lambda broker: broker.push([a_copy(1, attempt=0)]),
    "exchange": lambda broker: broker.exchange("p", [], ["default"], 1),
    "put_back": lambda broker: broker.put_back("p", [Copy("a", 1, "default", "{}", handle="x:1:default")]),
    "withdraw": lambda broker: broker.withdraw(7, 1),
    "holds": lambda broker: broker.holds([("a", 1)]),
    "waiting": lambda broker: broker.waiting(["default"]),
    "queues": lambda broker: broker.queues(),
    "held_by": lambda broker: broker.held_by("p"),
    "holders": lambda broker: broker.holders(),
    "drop": lambda broker: broker.drop("p", [Copy("a", 1, "default", "{}", handle="x:1:default")]),
    "hold": lambda broker: broker.hold(SCHEDULE, [SetEntry(a_copy(1, attempt=0), 5)]),
    "release_due": lambda broker: broker.release_due(RETRY, 5, 1),
    "members": lambda broker: broker.members(DEAD, 1),
    "wait": lambda broker: broker.wait(0.1),
}


@pytest.fixture
def own(tmp_path: Path, redis_release: str) -> Iterator[OwnRedis]:
    with OwnRedis(tmp_path, release=redis_release) as server:
        yield server


@pytest.fixture
def broker(own: OwnRedis) -> Iterator[RedisBroker]:
    made = RedisBroker(own.url, timeout_s=1.0)
    yield made
    made.close()


# -- away and back


@pytest.mark.parametrize("name", EVERY_CALL)
def test_every_call_says_that_redis_is_away_and_what_to_do(name: str) -> None:
    broker = RedisBroker("redis://:secret@127.0.0.1:1/0", timeout_s=1.0)
    with pytest.raises(BrokerUnavailable) as caught:
        EVERY_CALL[name](broker)
    broker.close()
    assert "Redis at 127.0.0.1:1 does not answer: start it, or mend broker_url" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_server_that_comes_back_is_used_again_without_a_new_broker(own: OwnRedis, broker: RedisBroker) -> None:
    assert broker.wait(0.01) is False
    broker.push([a_copy(1)])
    own.stop()
    for call in (lambda: broker.exchange("p", [], ["default"], 1), lambda: broker.wait(0.1)):
        with pytest.raises(BrokerUnavailable):
            call()
    own.start()  # it kept nothing: scripts are gone too
    assert broker.holds([a_copy(1).key]) == set()
    broker.push([a_copy(1)])
    assert [copy.key for copy in broker.exchange("p", [], ["default"], 1)] == [a_copy(1).key]
    assert broker.wait(0.01) is False


def test_a_server_that_forgot_its_scripts_is_given_them_again(own: OwnRedis, broker: RedisBroker) -> None:
    for n in range(3):
        with own.client() as client:
            client.script_flush()
        broker.push([a_copy(n)])
        with own.client() as client:
            client.script_flush()
        assert len(broker.exchange("p", [], ["default"], 1)) == 1


def test_a_server_that_hangs_is_not_waited_for_longer_than_the_timeout(own: OwnRedis, broker: RedisBroker) -> None:
    broker.push([a_copy(1)])
    own.hold()
    try:
        with pytest.raises(BrokerUnavailable, match="did not answer in time"):
            broker.exchange("p", [], ["default"], 1)
    finally:
        own.go_on()
    # Nobody knows whether it was done: what was fetched is in the list, and nothing is lost or doubled.
    wait_for(lambda: broker.holds([a_copy(1).key]), "it answers again")
    broker.put_back("p", broker.held_by("p"))
    assert broker.queues() == {"default": 1}


def test_a_server_that_loads_its_data_says_so(own: OwnRedis, broker: RedisBroker) -> None:
    def push() -> None:
        broker.push([a_copy(1)])

    with own.client() as client:
        client.execute_command("DEBUG", "POPULATE", "50000", "key", "1000")
        # While it loads it looks up after every two megabytes: so often that a call is answered before it gives up.
        client.execute_command("CONFIG", "SET", "rdbcompression", "no")
        client.execute_command("CONFIG", "SET", "key-load-delay", "100")
        client.execute_command("CONFIG", "SET", "save", "3600 1")
        loading = subprocess.Popen(
            ["redis-cli", "-s", str(own.socket), "DEBUG", "RELOAD"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            # First it saves, and answers nobody.
            wait_for(lambda: "is loading its data: wait until it has" in _refusal(push), "it says that it loads")
        finally:
            own.stop()
            loading.wait()


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except BrokerUnavailable as error:
        return str(error)
    return ""


# -- one that refuses


def test_a_replica_says_that_it_takes_no_writes(own: OwnRedis, broker: RedisBroker) -> None:
    with own.client() as client:
        client.replicaof("127.0.0.1", "1")
    for name in ("push", "push untracked", "hold"):
        with pytest.raises(BrokerUnavailable, match="is a replica and takes no writes: point broker_url at the primary"):
            EVERY_CALL[name](broker)
    assert any("replica" in problem for problem in broker.health_check()["problems"])


def test_a_full_server_takes_no_push_but_can_be_drained(own: OwnRedis, broker: RedisBroker) -> None:
    with own.client() as client:
        broker.push([a_copy(n, attempt=n % 2) for n in range(100)])
        client.config_set("maxmemory", "1")
        for name in ("push", "push untracked", "hold"):
            with pytest.raises(BrokerUnavailable, match="is full: raise maxmemory"):
                EVERY_CALL[name](broker)
        done: list[Copy] = []
        seen = 0
        while done := broker.exchange("p", done, ["default"], 7):
            assert len(broker.held_by("p")) == len(done)
            seen += len(done)
            if seen == 7:
                broker.put_back("p", done[:2])
                done, seen = done[2:], 5
    assert seen == 100
    assert broker.holders() == set()


@pytest.mark.parametrize(
    ("key", "kind", "calls"),
    [
        ("queue:default", "string", ["push", "push untracked", "exchange", "waiting"]),
        ("queues", "string", ["push", "push untracked"]),
        ("asynctask:held", "list", ["push", "exchange", "holds", "hold"]),
        ("asynctask:fetched:p", "list", ["exchange", "held_by", "drop"]),
        ("asynctask:holders", "list", ["exchange", "holders"]),
        ("schedule", "list", ["hold"]),
        ("retry", "list", ["release_due"]),
        ("dead", "list", ["members"]),
        ("paused", "list", ["exchange"]),
    ],
)
def test_a_key_of_another_program_is_named_with_what_to_do(
    own: OwnRedis, broker: RedisBroker, key: str, kind: str, calls: list[str]
) -> None:
    with own.client() as client:
        _ = client.set(key, "x") if kind == "string" else client.lpush(key, "x")
        for name in calls:
            with pytest.raises(BrokerUnavailable) as caught:
                EVERY_CALL[name](broker)
            assert f"the key '{key}' holds a {kind} where a " in str(caught.value), name
            assert "rename or delete the key" in str(caught.value)


@pytest.mark.parametrize("key", ["asynctask:held", "asynctask:fetched:p", "asynctask:holders", "paused", "queue:b"])
def test_nothing_leaves_a_queue_into_thin_air_when_another_key_is_wrong(
    own: OwnRedis, broker: RedisBroker, key: str
) -> None:
    copies = [a_copy(n, attempt=n, queue="a") for n in range(2)]
    broker.push(copies)
    with own.client() as client:
        before = client.dump("asynctask:held") if key == "asynctask:held" else None
        client.delete(key)
        client.set(key, "x")
        with pytest.raises(BrokerUnavailable, match="holds a string"):
            broker.exchange("p", [], ["a", "b"], 10)
        client.delete(key)
        if before is not None:
            client.restore(key, 0, before)
    found = [copy.jid for copy in broker.held_by("p")] or [copy.jid for copy in broker.exchange("p", [], ["a"], 9)]
    assert sorted(found) == sorted(copy.jid for copy in copies)


def test_a_push_into_two_queues_is_all_or_none(own: OwnRedis, broker: RedisBroker) -> None:
    with own.client() as client:
        client.set("queue:b", "x")
        with pytest.raises(BrokerUnavailable):
            broker.push([a_copy(1, queue="a"), a_copy(2, queue="b"), a_copy(3, attempt=0, queue="a")])
        assert set(client.scan_iter()) == {b"queue:b"}


def test_a_user_without_rights_and_a_wrong_password_are_told_as_such(own: OwnRedis) -> None:
    with own.client() as client:
        client.execute_command("ACL", "SETUSER", "reader", "on", ">right", "~*", "+@read", "+@connection")
    for url, said in (
        ("redis://reader:wrong@127.0.0.1:{0}/0", "refuses this user or password"),
        ("redis://reader:right@127.0.0.1:{0}/0", "does not allow this user all it needs"),
    ):
        broker = RedisBroker(url.format(own.port))
        with pytest.raises(BrokerUnavailable, match=said) as caught:
            broker.push([a_copy(1)])
        broker.close()
        assert "right" not in str(caught.value)


def test_a_server_that_takes_no_more_connections_says_so(own: OwnRedis, broker: RedisBroker) -> None:
    with own.client() as client:
        client.config_set("maxclients", "1")
        with pytest.raises(BrokerUnavailable, match="takes no more connections: raise its maxclients"):
            broker.push([a_copy(1)])


def test_more_threads_than_connections_wait_for_one(own: OwnRedis) -> None:
    broker = RedisBroker(own.url, connections=2)
    threads = [threading.Thread(target=broker.push, args=([a_copy(n)],)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert broker.queues() == {"default": 20}
    with own.client() as client:
        clients: Any = client.client_list()
        assert len(clients) <= 3
    broker.close()


def test_the_health_of_a_server_is_told_in_facts_and_problems(own: OwnRedis, broker: RedisBroker) -> None:
    found = broker.health_check()
    assert found["version"].startswith(("6.", "7.", "8."))
    assert found["problems"] == []
    with own.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    assert "set it to noeviction" in broker.health_check()["problems"][0]


# -- answers that are lost


@pytest.mark.parametrize("when", [BEFORE, AFTER])
@pytest.mark.parametrize("name", ["push", "put_back", "drop", "hold", "holds", "queues", "members"])
def test_a_call_that_may_be_repeated_is_when_its_connection_breaks(own: OwnRedis, name: str, when: str) -> None:
    with Proxy(own.port) as proxy:
        broker = RedisBroker(f"redis://127.0.0.1:{proxy.port}/0")
        _load_scripts(own)
        broker.push([a_copy(5), a_copy(6)])
        fetched = broker.exchange("p", [], ["default"], 2)
        _cut(broker, proxy, when)
        calls: dict[str, Callable[[], Any]] = {
            **{each: partial(EVERY_CALL[each], broker) for each in ("push", "holds", "queues", "members")},
            "put_back": lambda: broker.put_back("p", fetched),
            "drop": lambda: broker.drop("p", fetched),
            "hold": lambda: broker.hold(RETRY, [SetEntry(copy, 5) for copy in fetched], process="p"),
        }
        calls[name]()
        assert broker.queues() == {"push": {"default": 1}, "put_back": {"default": 2}}.get(name, {})
        assert len(broker.members(RETRY, 9)) == (2 if name == "hold" else 0)
        assert len(broker.held_by("p")) == (0 if name in ("put_back", "drop", "hold") else 2)
        broker.close()


@pytest.mark.parametrize(("when", "count"), [(BEFORE, 0), (AFTER, 1)])
def test_a_push_of_an_untracked_job_is_not_repeated_and_may_have_been_done(own: OwnRedis, when: str, count: int) -> None:
    with Proxy(own.port) as proxy:
        broker = RedisBroker(f"redis://127.0.0.1:{proxy.port}/0")
        broker.holders()
        _cut(broker, proxy, when)
        with pytest.raises(BrokerUnavailable):
            broker.push([a_copy(1, attempt=0)])
        wait_for(lambda: sum(broker.queues().values()) == count, "the push was done or not")
        broker.close()


@pytest.mark.parametrize("when", [BEFORE, AFTER])
def test_a_fetch_is_not_repeated_and_what_it_carried_is_in_the_list_or_the_queue(own: OwnRedis, when: str) -> None:
    with Proxy(own.port) as proxy:
        broker = RedisBroker(f"redis://127.0.0.1:{proxy.port}/0")
        _load_scripts(own)
        broker.push([a_copy(n) for n in range(3)])
        _cut(broker, proxy, when)
        with pytest.raises(BrokerUnavailable):
            broker.exchange("p", [], ["default"], 2)
        wait_for(lambda: len(broker.held_by("p")) == (2 if when == AFTER else 0), "the fetch was done or not")
        broker.put_back("p", broker.held_by("p"))
        assert [copy.key for copy in broker.exchange("p", [], ["default"], 9)] == [a_copy(n).key for n in range(3)]
        broker.close()


def _load_scripts(server: OwnRedis) -> None:
    """So that what is cut off is a script's answer and not the news that there is no script."""
    with server.client() as client:
        for path in (ROOT / "asynctask/sidekiq").glob("*.lua"):
            client.script_load(path.read_text())


def _cut(broker: RedisBroker, proxy: Proxy, when: str) -> None:
    """The next words of the broker's connection, or their answer, are lost."""
    connections: Any = broker._server.redis.connection_pool._connections
    for connection in connections:
        if connection._sock is not None:
            proxy.cut(connection._sock.getsockname()[1], when)


# -- a process that is killed


@pytest.mark.parametrize(
    ("step", "listed", "queued"),
    [
        ("before the fetch", [], [0, 1, 2, 3, 4, 5]),
        ("after the fetch", [0, 1, 2, 3], [4, 5]),
        ("after an acknowledgement", [1, 2, 3, 4], [5]),
        ("after a give-back", [1, 2, 3], [0, 4, 5]),
        ("after a retry was put off", [1, 2, 3], [4, 5]),
    ],
)
def test_what_a_killed_process_held_is_in_its_list_and_nowhere_else(
    redis_server: RedisServer, step: str, listed: list[int], queued: list[int]
) -> None:
    with redis_server.client() as client:
        client.flushall()
    broker = RedisBroker(redis_server.url)
    copies = [a_copy(n, attempt=n % 2) for n in range(6)]
    broker.push(copies)
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/support/redis_step.py"), redis_server.url, step],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert [copy.key for copy in broker.held_by("dead")] == [copies[n].key for n in listed]
    assert broker.holders() == ({"dead"} if listed else set())
    tracked = {copies[n].key for n in listed + queued if n % 2}
    assert broker.holds([copy.key for copy in copies]) == tracked
    held = broker.held_by("dead")
    broker.drop("dead", [copy for copy in held if copy.attempt])  # as recovery does: these wait in the ledger
    broker.put_back("dead", [copy for copy in held if not copy.attempt])
    left = sorted(int(copy.jid, 16) for copy in broker.exchange("q", [], ["default"], 9))
    assert left == sorted([n for n in listed if n % 2 == 0] + queued)
    broker.close()


# -- other ways to connect


def test_tls_with_a_certificate_of_its_own(tmp_path: Path) -> None:
    with OwnRedis(tmp_path, tls=True) as server:
        url = f"rediss://localhost:{server.tls_port}/0?ssl_ca_certs={server.certificate}"
        own_certificate = f"&ssl_certfile={server.certificate}&ssl_keyfile={tmp_path / 'key.pem'}"
        broker = RedisBroker(url + own_certificate)
        _hears(server, RedisBroker(url + own_certificate))
        assert_works(broker)
        stranger = RedisBroker(f"rediss://localhost:{server.tls_port}/0{own_certificate.replace('&', '?', 1)}")
        with pytest.raises(BrokerUnavailable, match="certificate"):
            stranger.push([a_copy(1)])
        stranger.close()


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_user_with_a_password_and_a_database_of_its_own(tmp_path: Path, protocol: int) -> None:
    with OwnRedis(tmp_path, "--requirepass", "everybody's") as server, server.client(password="everybody's") as client:
        client.execute_command("ACL", "SETUSER", "shop", "on", ">p%w:d", "~shop:*", "+@all")
        assert_works(RedisBroker(f"redis://shop:p%25w%3Ad@127.0.0.1:{server.port}/5?protocol={protocol}", namespace="shop"))
        found: Any = client.info("keyspace")
        assert set(found) == {"db5"}
        assert_works(RedisBroker(f"redis://:everybody%27s@127.0.0.1:{server.port}/1?protocol={protocol}"))


def test_a_unix_socket(tmp_path: Path) -> None:
    with OwnRedis(tmp_path) as server:
        assert_works(RedisBroker(f"unix://{server.socket}?db=3"))
        with RedisClient(f"unix://{server.socket}?db=4") as client:
            client.perform_async("w")


def test_options_of_the_url_do_not_change_what_the_broker_relies_on(own: OwnRedis) -> None:
    assert_works(RedisBroker(own.url + "?decode_responses=true&encoding=latin-1&retry_on_timeout=true"))


def assert_works(broker: RedisBroker) -> None:
    """A job with its way through, and a wait that hears."""
    copies = [Copy("é" * 4, n, "default", '{"class":"w","args":["é😀"],"jid":"éééé"}') for n in range(2)]
    broker.push(copies)
    fetched = broker.exchange("p", [], ["default"], 5)
    assert [(copy.key, copy.payload) for copy in fetched] == [(copy.key, copy.payload) for copy in copies]
    broker.put_back("p", fetched)
    fetched = broker.exchange("p", [], ["default"], 5)
    broker.hold(RETRY, [SetEntry(fetched[0], 5_000_000)], process="p")
    assert [held.at for held in broker.members(RETRY, 5)] == [5_000_000]
    assert broker.release_due(RETRY, 5_000_000, 5) == 1
    assert broker.holds([copies[1].key]) == {copies[1].key}
    assert broker.waiting(["default"]) == {"default": {0: 1}}
    assert broker.wait(5.0)
    assert len(broker.exchange("p", [fetched[1]], ["default"], 5)) == 1
    assert broker.wait(0.01) is False
    assert broker.health_check()["problems"] == []
    broker.close()


def _hears(server: OwnRedis, broker: RedisBroker) -> None:
    """News arrives while it waits."""
    broker.exchange("p", [], ["default"], 1)
    ended = threading.Event()
    thread = threading.Thread(target=lambda: ended.set() if broker.wait(120) else None, daemon=True)
    thread.start()
    with server.client() as client:
        wait_for(lambda: any("B" in each["flags"] for each in client.client_list()), "it listens")
        client.lpush("queue:default", "x")
        assert ended.wait(120)
        client.flushall()
    thread.join()
    broker.close()


@pytest.mark.parametrize("url", ["", "redis", "http://x", "redis://h:x/0", "redis://h/0?protocol=9&socket_timeout=x"])
def test_a_url_that_means_nothing_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="broker_url"):
        RedisBroker(url)


def test_another_server_that_answers_is_told_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        broker = RedisBroker(f"redis://127.0.0.1:{other.getsockname()[1]}/0")
        with pytest.raises(BrokerUnavailable):
            broker.queues()
        thread.join()
        broker.close()


def test_redis_py_is_at_hand_with_its_fast_parser() -> None:
    assert redis.utils.HIREDIS_AVAILABLE
