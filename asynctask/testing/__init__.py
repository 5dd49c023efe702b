"""Tools for tests of applications: one job alone, all jobs that are due, a running worker, and waiting for facts.

:mod:`asynctask.testing.plugin` has fixtures for pytest, :mod:`asynctask.testing.servers` a private Redis.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from asynctask.clock import Clock, SystemClock

if TYPE_CHECKING:
    from asynctask.testing.jobs import ItemResult, JobResult, Undrained, drain, inline, perform, running

__all__ = ["PATIENCE_S", "ItemResult", "JobResult", "Undrained", "drain", "inline", "perform", "running", "wait_for"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imported on first access: pytest imports this package in every project of an environment, for its plugin.
    from asynctask.testing import jobs

    return getattr(jobs, name)


# -- waiting for facts: a test never sleeps for a fixed time

PATIENCE_S = 120.0
"""Seconds after which a test fails; long, for a busy machine is slow."""

T = TypeVar("T")


def wait_for(
    fact: Callable[[], T], reason: str, timeout: float = PATIENCE_S, every: float | None = None, clock: Clock | None = None
) -> T:
    """Polls ``fact`` every ``every`` seconds until it is true, and returns its value.

    Without ``every`` it pauses for a tenth of the time waited so far, but 0.02 s at least and 0.1 s at most. Raises
    AssertionError with ``reason`` and the last value after ``timeout`` seconds; exceptions of ``fact`` propagate.
    """
    clock = clock or SystemClock()
    since = clock.monotonic()
    pause = threading.Event()
    while True:
        value = fact()
        if value:
            return value
        waited = clock.monotonic() - since
        if waited >= timeout:
            raise AssertionError(f"not within {timeout:g} s: {reason}; last seen: {value!r}")
        pause.wait(min(max(0.02, waited / 10), 0.1) if every is None else every)
