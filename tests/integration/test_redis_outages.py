"""The whole runtime on a Redis that goes away, comes back empty, is failed over, is full, hangs or holds keys of others.

The work waits, says so, and goes on by itself; no outcome is lost or recorded twice.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
from support.broker_looks import RedisLook
from support.databases import Store
from support.proxy import Proxy
from support.redis_servers import OwnRedis
from support.sharing import fetcher_of, poller_of, presence_of, sharing_of
from support.untracked import broker_of
from support.world import World, numbers

from asynctask import AsyncTask, maintenance
from asynctask.brokers.base import RETRY, SCHEDULE, About, Copy, SetEntry
from asynctask.clock import LONGEST_BACKOFF_S, SystemClock, backoff_s
from asynctask.errors import BrokerUnavailable
from asynctask.runtime.launcher import Launcher
from asynctask.sidekiq import fetcher, sharing
from asynctask.sidekiq.broker import RedisBroker
from asynctask.testing import wait_for

pytestmark = [
    pytest.mark.one_redis("what the broker does on each is proved by the tests of the broker"),
    pytest.mark.databases("sqlite", reason="what fails here is Redis"),
]

Logs = Sequence[MutableMapping[str, Any]]

ITEMS = 300
QUEUES = {"default": 1, "plain": 1}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked for every few seconds is looked for at once."""
    monkeypatch.setitem(maintenance.EVERY_S, "find_lost", 0.3)
    monkeypatch.setitem(maintenance.EVERY_S, "recover_strays", 0.3)
    monkeypatch.setattr(sharing, "JITTER_S", 0.0)


@pytest.fixture
def own(tmp_path: Path, redis_release: str) -> Iterator[OwnRedis]:
    """A server that keeps what it holds in a file."""
    with OwnRedis(tmp_path, "--appendonly", "yes", release=redis_release) as server:
        yield server


@pytest.fixture
def on_redis(tmp_path: Path, store: Store, own: OwnRedis) -> Iterator[World]:
    """A world whose jobs wait in that server."""
    world = World(tmp_path, store, own.url)
    yield world
    world.close()


def heard(logs: Logs, event: str, text: str) -> bool:
    """Whether a line says so of Redis."""
    return any(line["event"] == event and text in line.get("error", "") for line in list(logs))


def loud(logs: Logs) -> list[Any]:
    """What was said to be wrong: an outage is no fault of the program."""
    return [line for line in list(logs) if line["log_level"] == "error"]


def alive(launcher: Launcher) -> dict[str, bool]:
    """The threads of a worker process that talk to Redis, or wait for those that do."""
    threads = {
        "fetcher": fetcher_of(launcher)._thread,
        "dispatcher": launcher.dispatcher._thread,
        "maintenance": launcher.maintenance._thread,
        "poller": poller_of(launcher)._thread,
        "presence": presence_of(launcher)._thread,
        "heartbeat": launcher.heartbeat._thread,
        "recorder": launcher.recorder._thread,
    }
    return {name: thread is not None and thread.is_alive() for name, thread in threads.items()}


def impatient(app: AsyncTask) -> None:
    """A connection waits for an answer no longer than a moment."""
    server: Any = app.broker
    for options in (server._server._options, server._server._pool.connection_kwargs):
        options.update(socket_timeout=0.3, socket_connect_timeout=0.3)


# -- outages in mid-run


@dataclass(frozen=True)
class Outage:
    """What becomes of a server, how it ends, and which lines of the log tell of it. ``keeps``: it has lost nothing then;
    ``answers``: it answered all the while, so that no call was done without being known."""

    begin: Callable[[OwnRedis], Any]
    end: Callable[[OwnRedis], Any]
    said: Mapping[str, str]
    keeps: bool = True
    answers: bool = False


AWAY = "does not answer: start it"


def said(text: str) -> Callable[[OwnRedis], Any]:
    """A command of a person at the server."""

    def tell(server: OwnRedis) -> None:
        with server.client() as client:
            client.execute_command(*text.split())

    return tell


def restart_empty(server: OwnRedis) -> None:
    for path in [*server.folder.glob("appendonlydir/*"), *server.folder.glob("appendonly.aof")]:
        path.unlink()
    server.start()


def occupied(key: str) -> Outage:
    """Another program uses the name of a key, and then does so no more."""

    def begin(server: OwnRedis) -> None:
        put_aside = "if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('RENAME', KEYS[1], KEYS[2]) end"
        with server.client() as client:
            client.eval(f"{put_aside} redis.call('SET', KEYS[1], 'x')", 2, key, "kept")

    def end(server: OwnRedis) -> None:
        put_back = "if redis.call('EXISTS', KEYS[2]) == 1 then redis.call('RENAME', KEYS[2], KEYS[1]) end"
        with server.client() as client:
            client.eval(f"redis.call('DEL', KEYS[1]) {put_back}", 2, key, "kept")

    # What the ledger lends needs no names of queues: with a wrong key for them, all goes on.
    said = {} if key == "queues" else {"fetch_put_off": f"the key '{key}' holds a string"}
    return Outage(begin, end, said, answers=True)


OUTAGES = {
    "stopped": Outage(
        OwnRedis.stop,
        OwnRedis.start,
        dict.fromkeys(("fetch_put_off", "sweep_put_off"), AWAY),
    ),
    "emptied": Outage(OwnRedis.stop, restart_empty, {"fetch_put_off": AWAY}, keeps=False),
    "a replica": Outage(
        said("REPLICAOF 127.0.0.1 1"),
        said("REPLICAOF NO ONE"),
        {"fetch_put_off": "is a replica and takes no writes"},
        answers=True,
    ),
    "full": Outage(
        said("CONFIG SET maxmemory 1"),
        said("CONFIG SET maxmemory 0"),
        {"beat_put_off": "is full: raise maxmemory"},
        answers=True,
    ),
    "hanging": Outage(
        OwnRedis.hold,
        OwnRedis.go_on,
        dict.fromkeys(("fetch_put_off", "sweep_put_off"), "did not answer in time"),
    ),
    "a wrong queue": occupied("queue:default"),
    "wrong copies": occupied("asynctask:held"),
    "wrong names of queues": occupied("queues"),
}


@pytest.mark.parametrize("name", OUTAGES)
def test_the_work_waits_says_so_and_goes_on_by_itself(on_redis: World, own: OwnRedis, quick: None, name: str) -> None:
    """Taken out: `Control.withdrawn` (a pause and a cancel were refused while Redis was away); `Maintenance.find_lost`
    (what the emptied server had lost never came back)."""
    outage = OUTAGES[name]
    app = on_redis.app(poll_interval_s=0.2)
    if name == "hanging":
        impatient(app)
    plain = app.workers["plain"].set(queue="plain")
    with structlog.testing.capture_logs() as logs, on_redis.working(app, queues=QUEUES) as launcher:
        task = app.submit("brief", numbers(ITEMS))
        plain.perform_bulk(numbers(ITEMS))
        wait_for(lambda: under_way(on_redis), "it runs")
        outage.begin(own)
        # People are served meanwhile: the ledger is there.
        later, never = (app.submit("note", numbers(20, n), parallel=1, interval=3_600) for n in (1_000, 2_000))
        assert later.pause()
        assert never.cancel()
        assert later.resume()
        later.update(parallel=None, interval=0)
        for event, text in outage.said.items():
            wait_for(partial(heard, logs, event, text), f"{event}: {text}")
        outage.end(own)
        for each in (task, later, never):
            assert each.wait(120)["done"]
        if outage.keeps:
            wait_for(lambda: len(on_redis.shop.performed("plain")) == ITEMS, "all that nobody tracks is performed")
        plain.perform_async({"n": ITEMS})
        wait_for(lambda: on_redis.shop.performed("plain")[ITEMS], "what comes now is performed")
        wait_for(lambda: not on_redis.broker.left(), "nothing is left in the broker")
        assert set(alive(launcher).values()) == {True}, alive(launcher)
        assert loud(logs) == []
        if outage.answers:
            presence_of(launcher).beat()
            assert int(look(on_redis).get("stat:processed")) == launcher.performer.performed
    on_redis.check_promises(app, [task.id, later.id, never.id], ITEMS + 40)
    counts = never.progress()["counts"]  # the ledger lends without Redis: some may have begun before the cancel
    assert counts["cancelled"] + counts["finish"] == 20
    assert set(on_redis.shop.performed("ended")) == set(range(ITEMS))
    if outage.answers:
        assert set(on_redis.shop.performed("plain").values()) == {1}


def under_way(world: World) -> bool:
    """Whether some of both kinds are performed."""
    return min(len(world.shop.performed("ended")), len(world.shop.performed("plain"))) > 5


def look(world: World) -> Any:
    """A connection of the test's own."""
    assert isinstance(world.broker, RedisLook)
    return world.broker.raw


def test_a_worker_process_starts_and_ends_in_order_while_redis_is_away(on_redis: World, own: OwnRedis) -> None:
    app = on_redis.app()
    own.stop()
    task = app.submit("note", numbers(20))
    worker = on_redis.cli("kill_app", "worker", "-c", "2", "-t", "2")
    wait_for(lambda: "fetch_put_off" in on_redis.said(), "it says that it waits")
    own.start()
    assert task.wait(120)["done"]
    wait_for(lambda: not on_redis.broker.left(), "all is acknowledged")
    own.stop()
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(120) == 0, on_redis.said()
    assert "leave_put_off" in on_redis.said()
    assert "Traceback" not in on_redis.said()
    on_redis.check_promises(app, [task.id], 20)


# -- failed over


@pytest.mark.databases("postgresql", reason="the servers that a site would fail over with")
def test_after_a_failover_the_work_goes_on_at_the_new_primary(
    tmp_path: Path, store: Store, own: OwnRedis, quick: None, redis_release: str
) -> None:
    """Taken out: `Server._drop_idle`. What was connected stayed with the old primary, which took no writes any more."""
    (tmp_path / "new").mkdir()
    with (
        OwnRedis(tmp_path / "new", release=redis_release) as new,
        Proxy(own.port) as proxy,
        new.client() as at_new,
        own.client() as at_old,
        closing(World(tmp_path, store, f"redis://127.0.0.1:{proxy.port}/0")) as world,
    ):
        at_new.execute_command("REPLICAOF", "127.0.0.1", own.port)
        wait_for(lambda: at_new.info("replication")["master_link_status"] == "up", "the replica follows")
        app = world.app(poll_interval_s=0.2)
        with structlog.testing.capture_logs() as logs, world.working(app, queues=QUEUES) as launcher:
            task = app.submit("brief", numbers(ITEMS))
            app.workers["plain"].set(queue="plain").perform_bulk(numbers(ITEMS))
            assert at_old.execute_command("WAIT", 1, 10_000) == 1
            wait_for(lambda: under_way(world), "it runs")
            at_new.execute_command("REPLICAOF", "NO", "ONE")
            at_old.execute_command("REPLICAOF", "127.0.0.1", new.port)
            wait_for(lambda: heard(logs, "fetch_put_off", "is a replica"), "the old one takes no writes")
            proxy.aim(new.port)
            assert task.wait(120)["done"]
            wait_for(lambda: len(world.shop.performed("plain")) == ITEMS, "all that nobody tracks is performed")
            wait_for(lambda: not at_new.exists("queue:default", "queue:plain", "asynctask:holders"), "nothing is left")
            assert set(alive(launcher).values()) == {True}
            assert loud(logs) == []
        world.check_promises(app, [task.id], ITEMS)


def test_a_connection_that_is_in_use_while_the_primary_moves_is_let_go_when_it_is_refused(own: OwnRedis) -> None:
    with Proxy(own.port) as proxy:
        broker = RedisBroker(f"redis://127.0.0.1:{proxy.port}/0")
        pool: Any = broker._server.redis.connection_pool
        used = pool.get_connection()
        said("REPLICAOF 127.0.0.1 1")(own)
        for _ in range(2):
            with pytest.raises(BrokerUnavailable, match="replica"):
                broker.push([a_copy(1)])
        assert used._sock is not None, "somebody waits for its answer"
        pool.release(used)
        with pytest.raises(BrokerUnavailable, match="replica"):
            broker.push([a_copy(1)])
        assert [each._sock for each in pool._connections] == [None] * len(pool._connections)
        said("REPLICAOF NO ONE")(own)
        broker.push([a_copy(1)])
        broker.close()


# -- slow


def test_a_server_that_answers_slowly_slows_the_work_and_nothing_else(
    tmp_path: Path, store: Store, own: OwnRedis, quick: None
) -> None:
    with Proxy(own.port) as proxy, closing(World(tmp_path, store, f"redis://127.0.0.1:{proxy.port}/0")) as world:
        app = world.app(lease_s=1.0, heartbeat_s=0.3)
        proxy.slow_s = 0.05
        with structlog.testing.capture_logs() as logs, world.working(app):
            task = app.submit("note", numbers(100))
            app.workers["plain"].perform_bulk(numbers(100))
            assert task.wait(120)["done"]
            wait_for(lambda: len(world.shop.performed("plain")) == 100, "all that nobody tracks is performed")
            wait_for(lambda: not world.broker.left(), "nothing is left in the broker")
            assert [line["event"] for line in logs if line["log_level"] in ("warning", "error")] == []
        world.check_promises(app, [task.id], 100)
        assert set(world.shop.performed().values()) == set(world.shop.performed("plain").values()) == {1}


# -- outages that last


class Hasty(threading.Event):
    """An event that nobody waits for."""

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


def test_pauses_grow_to_their_longest_and_never_end_a_thread() -> None:
    """Taken out: the bound of the exponent. After a thousand tries, an hour and a half, the power was too large for a
    float, and the thread that fetches ended."""
    assert [backoff_s(tries) for tries in (1, 2, 3, 4, 5, 6)] == [0.2, 0.4, 0.8, 1.6, 3.2, LONGEST_BACKOFF_S]
    assert backoff_s(10**6) == LONGEST_BACKOFF_S


def test_a_process_fetches_again_after_thousands_of_tries(on_redis: World) -> None:
    """Taken out: the same."""
    app = on_redis.app()
    broker: Any = app.broker
    tried, exchange = [], broker.exchange

    def refuse(*_: Any) -> Any:
        tried.append(1)
        raise BrokerUnavailable("away")

    launcher = app.launcher(concurrency=1)
    fetcher_of(launcher)._quiet = launcher.pool._quiet = Hasty()
    with structlog.testing.capture_logs():
        broker.exchange = refuse
        launcher.start()
        try:
            wait_for(lambda: len(tried) > 1_500, "it tried often")
            broker.exchange = exchange
            app.workers["plain"].perform_async({"n": 0})
            wait_for(lambda: on_redis.shop.performed("plain"), "it fetches again")
        finally:
            launcher.stop()


def test_a_job_that_nobody_tracks_gets_its_outcome_after_thousands_of_tries(on_redis: World) -> None:
    """Taken out: the same, in `Performer._move`. The job stayed in the list of its process while that lived."""
    app = on_redis.app()
    broker: Any = app.broker
    tried, hold = [], broker.hold

    def refuse(*words: Any, **more: Any) -> None:
        tried.append(1)
        if len(tried) < 1_500:
            raise BrokerUnavailable("away")
        hold(*words, **more)

    with structlog.testing.capture_logs(), on_redis.working(app) as launcher:
        sharing_of(launcher)._pause = Hasty()
        broker.hold = refuse
        app.workers["plain"].perform_async({"n": 0, "bug": True})
        wait_for(lambda: look(on_redis).zcard("dead") == 1, "it is among the dead")
        wait_for(lambda: not on_redis.broker.left(), "and left its process")


def test_a_fetch_that_the_network_delivers_late_is_found_too(on_redis: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken out: the later looks. The jobs lay in the list of a living process that did not know of them."""
    monkeypatch.setattr(fetcher, "CHECKS_S", (0.0, 0.5, 2.0, 10.0, 40.0))  # one falls after the first look, however slow
    monkeypatch.setattr(fetcher, "_IDLE_WAIT_S", 0.1)
    app = on_redis.app()
    broker: Any = app.broker
    exchange, held_by = broker.exchange, broker.held_by
    broke: list[Any] = []
    looked: list[Any] = []

    def break_off(*words: Any) -> Any:
        if not broke:
            broke.append(words)
            raise BrokerUnavailable("it did not answer in time")
        return exchange(*words)

    def look_once(process: str) -> Any:
        found = held_by(process)
        if not looked:
            looked.append(found)
            app.workers["plain"].perform_bulk(numbers(3))
            exchange(*broke[0])  # only now the server hears it
        return found

    broker.exchange, broker.held_by = break_off, look_once
    with structlog.testing.capture_logs(), on_redis.working(app):
        wait_for(lambda: len(on_redis.shop.performed("plain")) == 3, "all are performed")
        wait_for(lambda: not on_redis.broker.left(), "nothing is left in the broker")
    assert looked == [[]]


class Waits:
    """A clock that a server's silence moves on."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self.passed = 0.0

    def now(self) -> int:
        return self._clock.now()

    def monotonic(self) -> float:
        return self._clock.monotonic() + self.passed

    def boottime(self) -> int:
        return self._clock.boottime()


def test_a_silence_is_no_work_that_a_look_has_to_rest_from(on_redis: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken out: the bound of that rest. After a look that had waited 5 s in vain there was none for 100 s."""
    clock = Waits()
    app = on_redis.app(clock=clock)
    looked = []
    made = app.maintenance(app.ledger)

    def wait_in_vain() -> None:
        looked.append(1)
        clock.passed += 5.0
        raise BrokerUnavailable("it did not answer in time")

    monkeypatch.setitem(made._steps, "find_lost", wait_in_vain)
    with structlog.testing.capture_logs():
        made._do(["find_lost"])
        made._do(["find_lost"])
        assert len(looked) == 1, "it is not asked without a pause"
        clock.passed += maintenance._AWAY_RESTS_S + 0.1
        made._do(["find_lost"])
    assert len(looked) == 2


def test_what_redis_lost_is_dispatched_again_within_half_a_minute() -> None:
    """After two looks, which have a pause between them."""
    assert 2 * maintenance.EVERY_S["find_lost"] + 2 <= 30


# -- keys of others, and what must not fall between two keys


def a_copy(n: int = 0, *, attempt: int = 1, queue: str = "default") -> Copy:
    jid = f"{n:024x}"
    return Copy(jid, attempt, queue, f'{{"class":"w","args":[{n}],"jid":"{jid}","queue":"{queue}"}}')


MOVES: dict[str, Callable[[RedisBroker, Sequence[Copy]], Any]] = {
    "push": lambda broker, held: broker.push([a_copy(8), a_copy(9, attempt=0)]),
    "put_back": lambda broker, held: broker.put_back("p", held),
    "defer": lambda broker, held: broker.defer("p", held, ()),
    "hold": lambda broker, held: broker.hold(RETRY, [SetEntry(copy, 5) for copy in held], process="p"),
    "release_due": lambda broker, held: broker.release_due(SCHEDULE, 10_000_000, 10),
}


KEYS_OF_OTHERS = ("queues", "asynctask:queues", "asynctask:holders", "asynctask:deaths", "paused")


@pytest.mark.parametrize("move", MOVES)
def test_a_move_that_meets_a_key_of_another_program_moves_all_or_nothing(own: OwnRedis, move: str) -> None:
    """Taken out: the look at `queues` before anything leaves a process's list, or the schedule. The jobs were nowhere."""
    for key in KEYS_OF_OTHERS:
        with own.client() as client:
            client.flushall()
        meet(own, move, key)


def meet(own: OwnRedis, move: str, key: str) -> None:
    """On an empty server: the move fails while the key holds a string, moves nothing or all, and goes on afterwards."""
    broker = RedisBroker(own.url)
    broker.push([a_copy(n, attempt=n % 2) for n in range(4)])
    held = broker.exchange("p", [], ["default"], 2)
    broker.hold(SCHEDULE, [SetEntry(a_copy(7, attempt=0), 5)])
    with own.client() as client:
        before = places(client)
        assert sum(before.values()) == 5
        client.rename(key, "kept") if client.exists(key) else None
        client.set(key, "x")
        refused = ""
        try:
            MOVES[move](broker, held)
        except BrokerUnavailable as error:
            refused = str(error)
        assert not refused or f"the key '{key}' holds a string" in refused
        assert not refused or places(client) == before
        client.delete(key)
        client.rename("kept", key) if client.exists("kept") else None
        if refused:
            MOVES[move](broker, held)
        assert sum(places(client).values()) == (7 if move == "push" else 5)
        found = broker.holds([a_copy(n).key for n in (1, 3, 8)])
        assert found >= {a_copy(3).key} | ({a_copy(8).key} if move == "push" else set())
    broker.close()


def test_counts_outlast_a_full_server_and_count_once_when_a_fetch_fails(own: OwnRedis) -> None:
    """Taken out: their place at the end of the fetch. A full server forgot them, and a fetch that failed had counted."""
    broker = RedisBroker(own.url)
    broker.push([a_copy(n, attempt=0) for n in range(2)])
    done = broker.exchange("p", [], ["default"], 1)
    with own.client() as client:
        client.config_set("maxmemory", "1")
        broker._counters.add("stat:processed", 3)
        broker.exchange("p", done, ["default"], 1)
        assert client.get("stat:processed") == b"3"
        client.config_set("maxmemory", "0")
        client.set("queue:wrong", "x")
        broker._counters.add("stat:processed", 4)
        with pytest.raises(BrokerUnavailable, match="holds a string"):
            broker.exchange("p", [], ["wrong"], 1)
        broker.exchange("p", [], ["default"], 1)
        assert client.get("stat:processed") == b"7"
    broker.close()


def places(client: Any) -> dict[str, int]:
    """How many jobs lie where."""
    return {
        "queue": client.llen("queue:default"),
        "list": client.hlen("asynctask:fetched:p"),
        "schedule": client.zcard("schedule"),
        "retry": client.zcard("retry"),
    }


def test_what_a_quiet_process_gives_back_stands_in_its_queue_as_it_stood(on_redis: World) -> None:
    """Taken out: the one step for all of it. They stood the other way round."""
    app = on_redis.app()
    plain = app.workers["plain"]
    with on_redis.working(app, concurrency=4) as launcher:
        app.workers["gated"].perform_bulk(numbers(4))
        wait_for(lambda: len(on_redis.shop.performed("began")) == 4, "every thread is taken")
        plain.perform_bulk(numbers(4))
        fetched = broker_of(app).exchange(app.ledger.identity, [], ["default"], 4)
        fetcher_of(launcher).held.exchanged([], fetched)
        fetcher_of(launcher)._begin(fetched)
        launcher.quiet()
        texts = look(on_redis).lrange("queue:default", 0, -1)
        on_redis.open_gate()
    assert [json.loads(text)["args"][0]["n"] for text in reversed(texts)] == [0, 1, 2, 3]
    assert len(fetched) == 4


def test_a_process_that_is_told_to_end_while_redis_hangs_asks_once_for_all_that_it_gives_back(on_redis: World) -> None:
    """Taken out: the same. It asked for each job, and each question took as long as an answer may."""
    app = on_redis.app()
    broker: Any = app.broker
    asked: list[int] = []

    def hang(process: str, copies: Sequence[Copy]) -> None:
        asked.append(len(copies))
        raise BrokerUnavailable("did not answer in time")

    with structlog.testing.capture_logs(), on_redis.working(app, concurrency=4) as launcher:
        app.workers["gated"].perform_bulk(numbers(4))
        wait_for(lambda: len(on_redis.shop.performed("began")) == 4, "every thread is taken")
        app.workers["plain"].perform_bulk(numbers(4))
        fetched = broker.exchange(app.ledger.identity, [], ["default"], 4)
        fetcher_of(launcher).held.exchanged([], fetched)
        fetcher_of(launcher)._begin(fetched)
        broker.put_back = hang
        launcher.quiet()
        assert asked == [4]
        del broker.put_back
        on_redis.open_gate()
    with on_redis.working(on_redis.app()):
        wait_for(lambda: len(on_redis.shop.performed("plain")) == 4, "they are found in its list")


# -- lists of processes that nobody knows


def test_the_list_of_a_process_that_nobody_knows_is_taken_back(
    on_redis: World, own: OwnRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken out: the step `recover_strays`. As long as no process died, nobody looked.

    So it is after a server was put back to what it held a while ago, when a process lived that has long ended.
    """
    monkeypatch.setitem(maintenance.EVERY_S, "recover_strays", 0.2)
    app = on_redis.app()
    app.workers["plain"].perform_bulk(numbers(5))
    ghost = RedisBroker(own.url)
    assert len(ghost.exchange("gone:1:aa", [], ["default"], 9)) == 5
    ghost.close()
    with on_redis.working(app):
        wait_for(lambda: len(on_redis.shop.performed("plain")) == 5, "all are performed")
        wait_for(lambda: not on_redis.broker.left(), "nothing is left in the broker")


def test_the_list_of_a_process_that_sidekiqs_tools_see_is_left_alone(on_redis: World, own: OwnRedis) -> None:
    """Taken out: the question who is seen. Two applications with a ledger each, on one server, took each other's jobs."""
    app = on_redis.app()
    other = RedisBroker(own.url)
    other.push([a_copy(1, attempt=0)])
    other.exchange("other:1:aa", [], ["default"], 9)
    shown: Any = other.presence(About("other:1:aa", "other", 1, app.clock.now(), 5, {"default": 1}))
    shown.beat((), quiet=False, rss_kib=1)
    recover_strays = app.maintenance(app.ledger)._steps["recover_strays"]
    with structlog.testing.capture_logs():
        for _ in range(3):
            recover_strays()
        assert len(other.held_by("other:1:aa")) == 1
        look(on_redis).delete("other:1:aa")
        for _ in range(2):
            recover_strays()
    assert other.held_by("other:1:aa") == []
    assert other.queues() == {"default": 1}
    other.close()
