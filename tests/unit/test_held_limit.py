"""For how long a child may be held: the time counts in which its supervisor itself ran."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from asynctask.config import Config
from asynctask.errors import ConfigError
from asynctask.supervisor import ChildSpec, Lease, Supervisor

PAUSED = [sys.executable, "-c", "import signal; signal.pause()"]


class Log:
    """What a supervisor logs."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def warning(self, event: str, **_: Any) -> None:
        self.events.append(event)

    error = warning


class Time:
    """The monotonic clock of a supervisor."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def test_a_supervisor_that_was_stopped_with_its_child_does_not_count_that_time(tmp_path: Path) -> None:
    """Without the bound of one look (``_LOOK_S``) the child is killed as soon as both go on."""
    time, log = Time(), Log()
    supervisor = Supervisor(
        [ChildSpec("worker-1", PAUSED)],
        environ=dict(os.environ),
        shutdown_s=0,
        held_limit_s=5,
        logger=lambda: cast("Any", log),
        monotonic=time,
    )
    supervisor.look()
    (child,) = supervisor._children
    assert child.process is not None
    child.lease, child.heard = Lease("me", f"sqlite:///{tmp_path}/a.db", 20.0), time.now

    def look(after_s: float) -> None:
        time.now += after_s
        supervisor.look()

    try:
        look(100)
        assert log.events == ["interpreter_held"]
        for _ in range(8):
            look(0.5)
        assert "held_killed" not in log.events
        look(0.5)
        assert "held_killed" in log.events
        assert child.process.wait(60) == -9
        look(0.0)
        assert "child_died" in log.events
    finally:
        supervisor.shut_down()


def test_a_limit_within_which_a_busy_machine_stalls_is_refused() -> None:
    assert Config(held_limit_s=5).held_limit_s == 5
    with pytest.raises(ConfigError, match=r"held_limit_s \(4.9\) must be 0 or at least 5"):
        Config(held_limit_s=4.9)
