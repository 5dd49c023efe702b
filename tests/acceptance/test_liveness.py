"""No process that lives is taken for dead: whatever is away, whose clock is wrong, whatever holds its interpreter.

The processes of these tests have other host names, so that none sees another's pid: their leases alone tell. A test waits
until each has renewed its lease for longer than the others need to judge it.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
from support.databases import Databases
from support.faults import stop
from support.world import Started, World

from asynctask.clock import micros
from asynctask.task import TaskHandle
from asynctask.testing import wait_for

LEASE_S = 2.0
LONG_S = 10.0
"""The lease where another process renews it, which takes a second or two to start, and more on a busy machine."""


@pytest.fixture
def apart(fragile: Databases, database_kind: str, tmp_path: Path) -> Iterator[World]:
    """A world on a server that no other test works on."""
    store = fragile.fresh(database_kind, tmp_path)
    world = World(tmp_path, store)
    yield world
    world.close()
    store.close()


def worker(world: World, log: str, *words: str, **environ: str) -> Started:
    return world.cli("liveness_app", *words, log=f"{log}.log", **{"LEASE_S": str(LEASE_S), **environ})


def workers(world: World, *, supervised: bool = False, lease_s: float = LEASE_S, **environ: str) -> list[Started]:
    """A worker process on each of two hosts; ``environ`` is the first one's."""
    words = ("worker", "-c", "2", *(("-p", "1") if supervised else ()))
    started = [
        worker(world, host, *words, DYNO=host, LEASE_S=str(lease_s), **(environ if host == "one" else {}))
        for host in ("one", "two")
    ]
    wait_for(lambda: len(identities(world)) == 2, "both have registered")
    return started


def identities(world: World) -> set[str]:
    return {identity for (identity,) in world.sql("SELECT identity FROM processes WHERE kind = 'worker'")}


def beaten_for(world: World, leases: float, lease_s: float = LEASE_S) -> None:
    """Waits until each process has renewed its lease through so many leases."""
    stamps = "SELECT identity, beat_at FROM processes WHERE kind = 'worker'"
    since = dict(world.sql(stamps))
    assert since

    def over() -> bool:
        now = dict(world.sql(stamps))
        return all(now.get(each, 0) - at >= micros(leases * lease_s) for each, at in since.items())

    wait_for(over, "everybody has renewed for long enough, under the same name")


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in children for each in (int(child), *descendants(int(child)))]


def freeze_between_writes(world: World, pid: int) -> None:
    """Stops a process while it holds no lock: one that is stopped within a write keeps the whole file locked."""
    with Path(world.folder, "a.db.lock").open("a") as lock:  # the writers' queue
        fcntl.flock(lock, fcntl.LOCK_EX)
        stop(pid)


@contextmanager
def silent(world: World, fragile: Databases) -> Iterator[None]:
    """The database answers nobody; what it was asked stands there."""
    if world.store.kind == "sqlite":
        with world.store.locked():
            yield
        return
    main = fragile.templates(world.store.kind).server.pid
    with ExitStack() as undo:
        for pid in (main, *descendants(main)):
            os.kill(pid, signal.SIGSTOP)
            undo.callback(os.kill, pid, signal.SIGCONT)
        yield


@contextmanager
def away(world: World, fragile: Databases) -> Iterator[None]:
    """The database has ended."""
    server = fragile.templates(world.store.kind).server
    server.stop()
    try:
        yield
    finally:
        server.start()
        world.store.forget()


def check_undisturbed(world: World, task_id: int, before: set[str], count: int) -> None:
    """Each item was begun once, by a process that still has its name, and no one was taken for dead. A job that was given
    back to an idle process before it began has another attempt."""
    assert identities(world) == before, world.said("one.log")[-5_000:] + world.said("two.log")[-5_000:]
    assert [line[0] for line in world.shop.lines()].count("began") == count
    assert world.sql("SELECT DISTINCT status, deaths FROM events WHERE task_id = ?", task_id) == [("finish", 0)]
    for host in ("one", "two"):
        assert "declared_dead" not in world.said(f"{host}.log")
        assert "process_recovered" not in world.said(f"{host}.log")


@pytest.mark.one_database("what it costs to connect anew is the driver's")
def test_a_database_that_is_silent_for_longer_than_the_lease_condemns_nobody(apart: World, fragile: Databases) -> None:
    check_an_outage(apart, silent(apart, fragile))


@pytest.mark.databases("postgresql", "mariadb", reason="a file has no server that could end")
@pytest.mark.one_database("what it costs to connect anew is the driver's")
def test_a_database_that_ends_and_comes_back_later_than_the_lease_condemns_nobody(apart: World, fragile: Databases) -> None:
    check_an_outage(apart, away(apart, fragile))


def check_an_outage(apart: World, outage: AbstractContextManager[None]) -> None:
    app = apart.app()
    started = workers(apart)
    before = identities(apart)
    beaten_for(apart, 1.5)  # from now on each may judge the other
    task = app.submit("gated", [{"n": n} for n in range(4)])
    wait_for(lambda: len(apart.shop.lines()) == 4, "every thread of both has a job")
    with outage, pytest.raises(subprocess.TimeoutExpired):
        started[0].wait(2.5 * LEASE_S)  # for so long it is away
    beaten_for(apart, 2)
    apart.open_gate()
    assert wait_for(lambda: task.progress()["done"], "it is over")
    check_undisturbed(apart, task.id, before, 4)
    assert [each.poll() for each in started] == [None, None]


@pytest.mark.one_database("a lease is renewed by the same statement on each")
def test_a_job_that_holds_the_interpreter_for_three_leases_keeps_its_process(world: World) -> None:
    app = world.app()
    app.worker(name="held")(lambda item: None)
    workers(world, supervised=True, lease_s=LONG_S)
    before = identities(world)
    beaten_for(world, 1.5, LONG_S)
    task = app.submit("held", [{"n": 0}])
    assert wait_for(lambda: task.progress()["done"], "it is over", 120)
    check_undisturbed(world, task.id, before, 1)
    said = world.said("one.log") + world.said("two.log")
    assert "interpreter_held" in said


@pytest.mark.one_database("each has a clock, and is asked in the same way")
@pytest.mark.parametrize("seconds", ["60", "-60"])
def test_a_clock_a_minute_off_condemns_nobody_and_holds_up_nothing(world: World, seconds: str) -> None:
    app = world.app()
    workers(world, CLOCK_AHEAD=seconds)
    before = identities(world)
    task = app.submit("gated", [{"n": n} for n in range(4)])
    wait_for(lambda: len(world.shop.lines()) == 4, "every thread of both has a job")
    beaten_for(world, 2.5)
    world.open_gate()
    assert wait_for(lambda: task.progress()["done"], "it is over")
    check_undisturbed(world, task.id, before, 4)


@pytest.mark.databases("sqlite", reason="one machine")
def test_a_process_of_this_machine_that_is_stopped_is_not_dead_and_one_that_is_killed_is_at_once(world: World) -> None:
    app = world.app()
    stopped, judge = (worker(world, name, "worker", "-c", "1") for name in ("one", "two"))
    wait_for(lambda: len(identities(world)) == 2, "both have registered")
    task = app.submit("gated", [{"n": 0}, {"n": 1}])
    wait_for(lambda: len(world.shop.lines()) == 2, "both have a job")
    mine = world.one("SELECT identity FROM processes WHERE pid = ?", judge.pid)
    freeze_between_writes(world, stopped.pid)
    world.sql("UPDATE processes SET lease_until = 1 WHERE pid = ?", stopped.pid)
    beat = "SELECT beat_at FROM processes WHERE identity = ?"
    since = world.one(beat, mine)
    wait_for(lambda: world.one(beat, mine) - since > micros(2 * LEASE_S), "the other had time to judge")
    assert len(identities(world)) == 2
    stopped.kill()
    wait_for(lambda: identities(world) == {mine}, "it is gone, whatever its lease says")
    world.open_gate()
    assert wait_for(lambda: task.progress()["done"], "it is over")


def stopped_at_work(world: World, **environ: str) -> tuple[TaskHandle, int]:
    """A Task whose one job runs in a supervised process, which is stopped then; and the pid of that process."""
    worker(world, "one", "worker", "-p", "1", "-c", "1", LEASE_S=str(LONG_S), **environ)
    wait_for(lambda: len(identities(world)) == 1, "it has registered")
    task = world.app().submit("gated", [{"n": 0}])
    wait_for(lambda: task.progress()["counts"]["working"] == 1, "it is known to run")
    pid = int(world.one("SELECT pid FROM processes WHERE kind = 'worker'"))
    freeze_between_writes(world, pid) if world.store.kind == "sqlite" else stop(pid)
    return task, pid


@pytest.mark.one_database("each reads the same columns; the sums of its rows are in the tests of reasons")
def test_a_process_that_is_stopped_is_held_until_it_goes_on(world: World) -> None:
    task, pid = stopped_at_work(world)
    app = world.app()

    def standing() -> float | None:
        (process,) = app.operations.processes()
        assert process["alive"]
        return process["held_s"]

    wait_for(lambda: standing() is not None, "its supervisor says so")
    (reason,) = app.operations.wait_reasons(task.id)
    assert reason.code == "held"
    assert reason.message.startswith("1 row is held by the process ")
    assert f"kill -9 {pid} on" in reason.mend
    (monitored,) = app.operations.monitored()["processes"]
    assert monitored["held_s"] > 0
    checked = world.cli("liveness_app", "processes", "--check", log="held.log", LEASE_S=str(LONG_S))
    assert checked.wait() == 1
    assert "held: no answer for" in world.said("held.log")
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: standing() is None, "it answers")
    assert app.operations.wait_reasons(task.id) == []
    assert world.cli("liveness_app", "processes", "--check", log="well.log", LEASE_S=str(LONG_S)).wait() == 0
    world.open_gate()
    assert task.wait(120)["counts"]["finish"] == 1
    assert world.sql("SELECT deaths FROM events WHERE task_id = ?", task.id) == [(0,)]


@pytest.mark.one_database("a kill is recovered as any other")
def test_a_process_that_is_held_for_longer_than_the_limit_is_killed_and_replaced(world: World) -> None:
    task, pid = stopped_at_work(world, HELD_LIMIT_S="5")
    world.open_gate()
    assert task.wait(60)["counts"]["finish"] == 1
    assert [line[0] for line in world.shop.lines()].count("began") == 2, "it is recovered as after any death"
    assert world.one("SELECT pid FROM processes WHERE kind = 'worker'") != pid
    assert "held_killed" in world.said("one.log")
    assert world.app().doctor() == []


@pytest.mark.databases("sqlite", reason="a supervisor does the same on every database")
def test_a_process_that_was_declared_dead_starts_anew(world: World) -> None:
    app = world.app()
    supervisor = worker(world, "one", "worker", "-p", "1", "-c", "1")
    wait_for(lambda: len(identities(world)) == 1, "it has registered")
    before = identities(world)
    world.sql("UPDATE processes SET signal = 'LOST'")
    wait_for(lambda: identities(world) and identities(world).isdisjoint(before), "another has taken its place")
    task = app.submit("note", [{"n": 0}])
    assert wait_for(lambda: task.progress()["done"], "it works")
    assert supervisor.poll() is None
