"""Worker processes and their supervisor: signals, hung threads, children that die, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.world import World, numbers

from asynctask.runtime.execution import Decision, Execution, Performer
from asynctask.testing import wait_for

pytestmark = pytest.mark.databases("sqlite", reason="about processes, signals and threads")


def pids(world: World, verb: str) -> set[int]:
    """The processes that wrote such a line."""
    return {int(line[2]) for line in world.shop.lines() if line[0] == verb}


def said(event: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["status"], message["message"]) for message in event["messages"]]


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_tstp_makes_a_worker_quiet_it_ends_what_runs_and_takes_nothing_new(world: World) -> None:
    app = world.app()
    task = app.submit("gated", numbers(12))
    first = world.cli("kill_app", "worker", "-c", "2")
    wait_for(lambda: len(world.shop.performed("began")) == 2, "two jobs run")
    first.send_signal(signal.SIGTSTP)
    wait_for(lambda: any(p["quiet"] for p in app.processes()), "it is quiet")
    world.open_gate()
    wait_for(lambda: len(world.shop.performed()) == 2, "what ran came to its end")
    second = world.cli("kill_app", "worker", "-c", "2")
    assert task.wait(120)["done"]
    assert first.poll() is None, "quiet is not stopped"
    assert len([line for line in world.shop.lines() if line[0] == "began" and line[2] == str(first.pid)]) == 2
    assert pids(world, "did") == {first.pid, second.pid}
    for worker in (first, second):
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(120) == 0
    assert app.processes() == []
    world.check_promises(app, [task.id], 12)


def test_term_stops_within_its_time_and_what_was_not_finished_says_interrupted_and_waits(world: World) -> None:
    app = world.app()
    task = app.submit("gated", numbers(5))
    worker = world.cli("kill_app", "worker", "-c", "2", "-t", "0.5")
    wait_for(lambda: len(world.shop.performed("began")) == 2, "two jobs run")
    began = time.monotonic()
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(120) == 0
    assert time.monotonic() - began < 20, "it was given half a second; 25 where nothing is said"
    interrupted = [event for event in task.events() if event["started_at"]]
    assert len(interrupted) == 2
    for event in interrupted:
        assert (event["status"], event["attempt"]) == ("enqueue", 2)
        assert said(event)[-2:] == [("error", "Interrupted"), ("enqueue", "Waiting for retry")]
    assert task.progress()["counts"]["enqueue"] == 5
    assert app.processes() == []
    assert world.sql("SELECT 1 FROM events WHERE process IS NOT NULL") == []
    world.open_gate()
    with world.working(app):
        assert task.wait(120)["done"]
    assert task.progress()["counts"]["finish"] == 5
    world.check_promises(app, [task.id], 5)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_second_int_ends_at_once_and_the_jobs_are_taken_back(world: World, processes: str) -> None:
    app = world.app()
    task = app.submit("gated", numbers(4))
    worker = world.cli("kill_app", "worker", "-c", "2", "-t", "60", "-p", processes)
    wait_for(lambda: len(world.shop.performed("began")) >= 2, "jobs run")
    worker.send_signal(signal.SIGINT)
    wait_for(lambda: any(p["quiet"] for p in app.processes()), "it waits for its jobs")
    worker.send_signal(signal.SIGINT)
    assert worker.wait(120) == 130
    wait_for(lambda: not world.processes(), "nobody is left")
    world.open_gate()
    with world.working(app):
        assert task.wait(120)["done"]
    world.check_promises(app, [task.id], 4)


def test_a_thread_that_hangs_does_not_hold_the_process(world: World) -> None:
    app = world.app()
    task = app.submit("hung", numbers(1))
    worker = world.cli("kill_app", "worker", "-c", "2", "-t", "0.2")
    wait_for(lambda: world.shop.performed("began"), "it hangs")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(120) == 0
    (event,) = task.events()
    assert (event["status"], event["attempt"]) == ("enqueue", 2)
    assert said(event)[-2:] == [("error", "Interrupted"), ("enqueue", "Waiting for retry")]
    assert not world.processes()


def test_a_killed_child_is_replaced_and_term_ends_supervisor_and_children(world: World) -> None:
    app = world.app()
    supervisor = world.cli("kill_app", "worker", "-p", "2", "-c", "1", "-t", "1")
    wait_for(lambda: len(app.processes()) == 2, "two workers")
    before = {p["pid"] for p in app.processes()}
    victim = min(before)
    os.kill(victim, signal.SIGKILL)

    def replaced() -> set[int]:
        now = {p["pid"] for p in app.processes()}
        return now if now - before and victim not in now else set()

    after = wait_for(replaced, "another in its place")
    assert len(after) == 2
    assert len(after & before) == 1
    task = app.submit("note", numbers(20))
    assert task.wait(120)["done"]
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(120) == 0
    assert not world.processes()
    assert app.processes() == []


def test_killing_the_supervisor_leaves_no_child_behind(world: World) -> None:
    app = world.app()
    supervisor = world.cli("kill_app", "worker", "-p", "2", "-c", "1", "-t", "0.5")
    wait_for(lambda: len(app.processes()) == 2, "two workers")
    app.submit("gated", numbers(2))
    wait_for(lambda: len(world.shop.performed("began")) == 2, "both are at work")
    supervisor.kill()
    supervisor.wait()
    wait_for(lambda: not world.processes(), "the children end too")
    assert app.processes() == [], "in order: each gave its job back and took its name off the list"
    assert world.sql("SELECT status, attempt FROM events") == [("enqueue", 2)] * 2


def test_a_processor_thread_that_dies_is_replaced_and_its_job_has_an_outcome(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, broken = Performer.decide, threading.Event()

    def decide(self: Performer, execution: Execution, error: BaseException | None) -> Decision:
        if error is not None and not broken.is_set():
            broken.set()
            raise RuntimeError("the retry layer itself is broken")
        return real(self, execution, error)

    monkeypatch.setattr(Performer, "decide", decide)
    app = world.app()
    with world.working(app, concurrency=1) as launcher:
        task = app.submit("note", [{"n": 0, "bug": True}, *numbers(30)[1:]])
        assert task.wait(120)["done"]
        assert len([t for t in threading.enumerate() if t.name == "processor"]) == 1
        assert launcher.pool.busy == 0
    assert broken.is_set()
    counts = task.progress()["counts"]
    assert (counts["finish"], counts["error"]) == (29, 1)
    world.check_promises(app, [task.id], 30)
