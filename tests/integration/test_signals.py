"""Signals: whoever waits is woken by whoever commits, on each kind of database, and looks by itself where it cannot be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from sqlalchemy.engine import make_url
from structlog.testing import capture_logs
from support.databases import Databases
from support.servers import unmet
from support.world import World

from asynctask.database.engine import Database
from asynctask.database.notify import Signals, Waker, notify
from asynctask.lists.split import FIRST_SLICE
from asynctask.testing import wait_for
from asynctask.testing.servers import MissingServer
from benchmarks.servers import PgBouncer, PostgresServer

LONG_S = 60.0
"""Nothing in these tests takes so long: a wait that ends before has been ended by a signal."""


@contextmanager
def listening(url: str) -> Iterator[tuple[Database, Signals]]:
    database = Database(url)
    signals = Signals(database)
    try:
        yield database, signals
    finally:
        signals.close()
        database.close()


def settled(signals: Signals, waker: Waker) -> None:
    """The waker has heard what there was to hear before the test began, and would wait for long now."""
    wait_for(lambda: waker.wait(0.01) is not None and signals.reliable, "signals arrive")
    while waker.wait(1.5):
        pass


def test_a_commit_wakes_whoever_waits_in_another_process_and_in_its_own(world: World) -> None:
    world.app()
    with listening(world.store.url) as (_, heard), listening(world.store.url) as (database, own):
        wakers = [heard.waker(), heard.waker(for_jobs=True), own.waker()]
        for signals, waker in zip((heard, heard, own), wakers, strict=True):
            settled(signals, waker)
        for _ in range(3):
            with database.write() as connection:
                notify(connection)
                notify(connection)
            for waker in wakers:
                assert waker.wait(LONG_S)


def test_a_signal_between_two_waits_is_not_lost(world: World) -> None:
    world.app()
    with listening(world.store.url) as (database, heard):
        waker = heard.waker()
        settled(heard, waker)
        with database.write() as connection:
            notify(connection)
        assert waker.wait(LONG_S)
        waker.wake()
        assert waker.wait(LONG_S)


def test_the_first_slice_of_a_long_list_wakes_whoever_is_on_duty_while_the_rest_is_made(world: World) -> None:
    """Before, a program that submitted a long list told nobody of it until its end: its first jobs waited for the look that
    comes once a second. A short one wakes them, too: whoever idles borrows it."""
    app = world.app()
    heard_of_it: list[bool] = []
    with listening(world.store.url) as (_, heard):
        waker = heard.waker()

        def items() -> Iterator[dict[str, int]]:
            yield from ({"n": n} for n in range(FIRST_SLICE))
            wait_for(lambda: waker.wait(0.1) and waker.signalled, "it is told", LONG_S)
            heard_of_it.append(True)
            yield {"n": FIRST_SLICE}

        settled(heard, waker)
        app.submit("note", ({"n": n} for n in range(FIRST_SLICE - 1)))
        assert waker.wait(LONG_S)
        settled(heard, waker)
        app.submit("note", items())
    assert heard_of_it == [True]


def test_nobody_is_woken_before_the_commit(world: World) -> None:
    world.app()
    with listening(world.store.url) as (_, heard), listening(world.store.url) as (database, _):
        waker = heard.waker()
        settled(heard, waker)
        with database.write() as connection:
            notify(connection)
            assert not waker.wait(0.2)
        assert waker.wait(LONG_S)


def test_the_end_wakes_whoever_waits(world: World) -> None:
    world.app()
    with listening(world.store.url) as (_, heard):
        waker = heard.waker()
        settled(heard, waker)
        ended = threading.Event()

        def wait() -> None:
            waker.wait(LONG_S)
            ended.set()

        thread = threading.Thread(target=wait)
        thread.start()
        heard.close()
        assert ended.wait(120)
        thread.join()


def waiting_on_mariadb(world: World) -> list[tuple[Any, ...]]:
    """The connections of processes that wait for a signal, and how the server says that they wait."""
    return world.sql(
        "SELECT ID, STATE FROM information_schema.PROCESSLIST"
        " WHERE DB = DATABASE() AND INFO LIKE '%SLEEP(20)%' AND ID <> CONNECTION_ID()"
    )


@pytest.mark.databases("mariadb", reason="the others notify in another way")
def test_of_the_processes_that_wait_on_mariadb_one_sleeps_and_all_are_woken(world: World) -> None:
    """Taken out: the lock. Where ten processes sleep and some send at once, KILL QUERY takes seconds at the server."""
    world.app()
    with ExitStack() as stack:
        heard = [stack.enter_context(listening(world.store.url))[1] for _ in range(5)]
        database, _ = stack.enter_context(listening(world.store.url))
        wakers = [signals.waker() for signals in heard]
        for signals, waker in zip(heard, wakers, strict=True):
            settled(signals, waker)
        waits = ["User lock"] * 4 + ["User sleep"]
        wait_for(lambda: sorted(str(state) for _, state in waiting_on_mariadb(world)) == waits, "one sleeps")
        with database.write() as connection:
            notify(connection)
        for waker in wakers:
            assert waker.wait(LONG_S)
            assert waker.signalled
        heard[0].close()
        heard[1].close()
        wait_for(lambda: sorted(str(state) for _, state in waiting_on_mariadb(world)) == waits[2:], "another one sleeps")


@pytest.mark.databases("postgresql", "mariadb", reason="SQLite has no server")
def test_signals_arrive_again_after_the_server_cut_every_connection(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """And no traceback is left in the log: the connection that broke is not used again, and needs no reset."""
    world.app()
    with listening(world.store.url) as (_, heard), listening(world.store.url) as (database, _):
        waker = heard.waker()
        settled(heard, waker)
        if world.store.kind == "postgresql":
            world.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'")
        else:
            for number, _ in waiting_on_mariadb(world):
                world.sql(f"KILL {number}")
        wait_for(lambda: waker.wait(0.05) is not None and heard.reliable, "signals arrive again")
        settled(heard, waker)
        with database.write() as connection:
            notify(connection)
        assert waker.wait(LONG_S)
    assert not [record.getMessage() for record in caplog.records if record.exc_info]


class Pauses(threading.Event):
    """In the place of the event that ends the thread: notes its pauses, and makes them short."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.noted.append(timeout)
        return super().wait(0.01)


@pytest.mark.databases("postgresql", reason="no other has a probe")
def test_signals_that_do_not_arrive_are_tried_again_each_minute_and_the_log_says_so_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, one probe that was late, after a restart of the server, was the last."""
    answers = iter([True, True, True, False])
    with capture_logs() as lines, listening(world.store.url) as (database, heard):
        monkeypatch.setattr(database, "behind_pooler", lambda: next(answers))
        pauses = heard._closed = Pauses()
        heard.waker().wait(0.0)
        wait_for(lambda: heard.reliable, "a probe arrives")
        assert pauses.noted == [60.0] * 3
    assert [line["event"] for line in lines if line["log_level"] == "warning"] == ["signals_do_not_arrive"]


@pytest.mark.databases("postgresql", reason="PgBouncer stands before no other")
def test_behind_a_pooler_it_is_time_to_look_every_second(world: World, databases: Databases) -> None:
    world.app()
    server = databases.templates("postgresql").server
    assert isinstance(server, PostgresServer)
    try:
        with PgBouncer(server, pool_size=3) as pooler:
            url = pooler.url(str(make_url(world.store.url).database))
            with listening(url) as (_, heard):
                waker = heard.waker()
                for _ in range(9):
                    assert waker.wait(LONG_S), "it looks by itself"
                assert not heard.reliable
    except MissingServer as error:
        unmet(str(error))
