"""For tests of applications and of implementations: waiting for facts, and the suites that a broker must pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from asynctask.clock import Clock, SystemClock

__all__ = ["PATIENCE_S", "wait_for"]


# -- Waiting for facts: a test never sleeps for a time and hopes.

PATIENCE_S = 120.0
"""Seconds after which a test gives a fact up. A fact that comes late on a busy machine is a fact all the same."""

T = TypeVar("T")


def wait_for(
    fact: Callable[[], T], reason: str, timeout: float = PATIENCE_S, every: float = 0.02, clock: Clock | None = None
) -> T:
    """Returns what ``fact`` returns as soon as that is true.

    Arguments: ``fact`` is called again and again, every ``every`` seconds; ``reason`` says what is waited for. Raises
    AssertionError, with the reason and the last value, when it is not true within ``timeout`` seconds. What ``fact``
    raises is raised on.
    """
    clock = clock or SystemClock()
    until = clock.monotonic() + timeout
    pause = threading.Event()
    while True:
        value = fact()
        if value:
            return value
        if clock.monotonic() >= until:
            raise AssertionError(f"not within {timeout:g} s: {reason}; last seen: {value!r}")
        pause.wait(every)
