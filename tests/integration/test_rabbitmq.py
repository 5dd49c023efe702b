"""Celery and Dramatiq on RabbitMQ: what the dispatcher does there, and what becomes of it when connections and servers end.

The suite of engines runs there too: tests/conformance/test_engines.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import pytest
from support import engines
from support.databases import Databases
from support.engine_suite import ended, exact, is_past, performed
from support.engine_worker import CELERY, DRAMATIQ, Harness
from support.proxy import BEFORE, Proxy
from support.rabbit import shared_rabbit
from support.servers import unmet

from asynctask.brokers.base import Copy
from asynctask.dispatch.outbox import engine_queue
from asynctask.errors import BrokerUnavailable
from asynctask.sidekiq.copies import build
from asynctask.sidekiq.payload import dump
from asynctask.testing import wait_for
from asynctask.testing.servers import MissingServer
from benchmarks.servers import RabbitServer

COMMANDS = {"celery": (*CELERY, "-P", "prefork"), "dramatiq": DRAMATIQ}


class Sender:
    """An engine on RabbitMQ without a worker, behind a proxy."""

    def __init__(self, kind: str, folder: Path, databases: Databases, url: str) -> None:
        folder = Path(mkdtemp(dir=folder))  # its name is that of the queue, and the server is shared
        self._kind, self._folder = kind, folder
        port = int(url.rpartition(":")[2].partition("/")[0])
        self.proxy = Proxy(port)
        self.proxy.__enter__()
        self.made, self.app = engines.MADE[kind](
            folder, databases.fresh("sqlite", folder).url, url.replace(f":{port}/", f":{self.proxy.port}/")
        )
        self.name = engines.queue_of(folder)
        self.queue = engine_queue(kind, self.name)
        self.engine = self.app.engines[kind]

    def push(self, *numbers: int) -> None:
        jobs = [(f"{n:024d}", build("act", [{"n": n}], f"{n:024d}", self.queue, 0, created_at=0)) for n in numbers]
        self.engine.push([Copy(jid, 1, self.queue, dump(job), task_id=1) for jid, job in jobs])

    def holds(self, least: int) -> None:
        """Waits until so many messages or more wait: RabbitMQ counts one a moment after it has arrived, and one that may
        have been lost is sent twice."""
        wait_for(lambda: self.waiting() >= least, f"{least} messages wait")

    def waiting(self) -> int:
        return int(self.engine.waiting([self.queue])[self.queue])

    def close(self) -> None:
        self.app.close()
        engines.close(self._kind, self.made, self._folder)
        self.proxy.__exit__()


@pytest.fixture(params=COMMANDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sender(kind: str, tmp_path: Path, databases: Databases, rabbit_url: str) -> Iterator[Sender]:
    made = Sender(kind, tmp_path, databases, rabbit_url)
    yield made
    made.close()


def test_what_waits_is_counted_also_where_there_is_no_queue_yet(sender: Sender) -> None:
    assert sender.waiting() == 0
    sender.push(1, 2, 3)
    sender.holds(3)
    assert sender.engine.waiting([sender.queue, f"{sender.queue}-2"]) == {sender.queue: 3, f"{sender.queue}-2": 0}


def test_a_connection_that_broke_while_idle_is_opened_anew(sender: Sender) -> None:
    sender.push(1)
    for act in (sender.waiting, lambda: sender.push(2)):
        sender.proxy.watch((sender.name.encode(),), BEFORE)
        act()
        assert sender.proxy.fell.is_set()
        sender.proxy.fell.clear()
        sender.proxy.watch((b"nothing more",), BEFORE)
    sender.holds(2)


def test_a_message_that_went_to_a_broken_connection_is_sent_again(sender: Sender) -> None:
    """AMQP answers no message. Without the question behind it this one is lost, and nobody knows."""
    sender.push(1)
    sender.proxy.watch((b"asynctask_attempt",), BEFORE)
    sender.push(2)
    assert sender.proxy.fell.is_set()
    sender.holds(2)


def test_all_threads_dispatch_over_one_connection(sender: Sender) -> None:
    """Dramatiq's broker opens one for each thread, and would close none."""
    connections = set()

    def push(number: int) -> None:
        sender.push(number)
        sender.waiting()

    for number in range(1, 6):
        thread = threading.Thread(target=push, args=(number,))
        thread.start()
        thread.join()
        connections |= {id(each) for each in getattr(sender.made, "connections", ())}
    assert len(connections) <= 1
    sender.holds(5)


def test_a_thread_keeps_the_connection_that_it_had(tmp_path: Path, databases: Databases, rabbit_url: str) -> None:
    sender = Sender("dramatiq", tmp_path, databases, rabbit_url)
    own = sender.made.connection
    sender.push(1)
    assert sender.made.connection is own
    sender.close()


def test_a_server_that_is_away_is_told_of(kind: str, tmp_path: Path, databases: Databases) -> None:
    made, app = engines.MADE[kind](tmp_path, databases.fresh("sqlite", tmp_path).url, "amqp://guest:guest@127.0.0.1:1/%2F")
    queue = engine_queue(kind, engines.queue_of(tmp_path))
    with pytest.raises(BrokerUnavailable, match="does not answer"):
        app.engines[kind].waiting([queue])
    job = build("act", [{"n": 1}], "1", queue, 0, created_at=0)
    with pytest.raises(BrokerUnavailable, match="does not answer"):
        app.engines[kind].push([Copy("1", 1, queue, dump(job), task_id=1)])
    app.close()
    made.close()


# -- whole ways


@pytest.fixture(scope="module")
def own_rabbit() -> Iterator[RabbitServer]:
    """A server of this module's own, which its tests kill."""
    server = RabbitServer()
    try:
        server.start()
    except MissingServer as error:
        unmet(str(error))
    yield server
    server.remove()


@pytest.fixture
def harness(kind: str, tmp_path: Path, databases: Databases, own_rabbit: RabbitServer) -> Iterator[Harness]:
    made = Harness(kind, COMMANDS[kind], tmp_path, databases.fresh("sqlite", tmp_path), own_rabbit.url)
    yield made
    made.close()


heavy = pytest.mark.parametrize(
    "kind", ["celery", pytest.param("dramatiq", marks=pytest.mark.full(reason="as with Celery"))]
)


@heavy
def test_a_list_is_exact_though_rabbitmq_is_killed(harness: Harness, own_rabbit: RabbitServer, tmp_path: Path) -> None:
    harness.start(2)
    task = harness.app.submit("act", [{"n": n} for n in range(100)])
    wait_for(partial(is_past, task, 20), "it goes on")
    own_rabbit.kill()
    own_rabbit.start()
    ended(task)
    assert set(performed(tmp_path, "did")) == set(range(100))
    exact(harness.app, task, finish=100)


@heavy
def test_a_job_that_ends_its_process_at_once_ends_as_poison(harness: Harness, tmp_path: Path) -> None:
    """RabbitMQ gives it to the next process before anybody has seen it begin: so it could go on for ever."""
    harness.spawn(1)
    task = harness.app.submit("act", [{"n": 1, "do": "die"}, {"n": 2}])

    def is_over() -> bool:
        if harness.has_ended():
            harness.spawn(1)  # as whatever supervises it does
        return bool(task.progress()["done"])

    wait_for(is_over, "it is over")
    poison, well = sorted(task.events(), key=lambda event: event["params"]["n"])
    assert (poison["status"], poison["problem"], well["status"]) == ("error", "poison", "finish")
    assert len([n for n in performed(tmp_path) if n == 1]) <= 5
    assert harness.app.doctor() == []


# -- the server itself


def processes_with(words: str) -> list[tuple[str, str]]:
    """Of every process that has these words in its environment: the name of its program, and its home."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                environ = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                program = (entry / "comm").read_text().strip()
            except OSError:
                continue
            if words in environ:
                found.append((program, dict(each.partition("=")[::2] for each in environ)["HOME"]))
    return found


@pytest.mark.full(reason="nothing of the product")
def test_nothing_is_left_of_a_server_that_nobody_uses_any_more(tmp_path: Path) -> None:
    """Neither Erlang's virtual machine nor its port mapper."""
    with shared_rabbit(tmp_path) as url, shared_rabbit(tmp_path) as other:
        assert url == other
        port = url.rpartition(":")[2].partition("/")[0]
        ((_, home), *_) = processes_with(f"RABBITMQ_NODE_PORT={port}")
        assert {"beam.smp", "epmd"} <= {program for program, _ in processes_with(f"HOME={home}")}
    wait_for(lambda: not processes_with(f"HOME={home}") and not Path(home).exists(), "all of it is gone")
