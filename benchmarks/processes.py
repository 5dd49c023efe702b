"""Processes of a run: none of them outlives it."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["Unaccounted", "end_kindly", "started"]


class Unaccounted(Exception):
    """An item of the run is missing, a count is wrong or a process failed: there is no figure."""


@contextmanager
def started(
    command: Sequence[str], end: Callable[[subprocess.Popen[Any]], None], **how: Any
) -> Iterator[subprocess.Popen[Any]]:
    """A process that ``end`` ends with the block, for which ``Popen`` takes ``how``.

    A signal to leave that comes while it is being started waits until it can be ended: nobody would know of it otherwise.
    """
    process: subprocess.Popen[Any] | None = None
    try:
        with _leaving_later():
            process = subprocess.Popen(command, **how)
        yield process
    finally:
        if process is not None:
            end(process)


@contextmanager
def _leaving_later() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    came: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for first in came[:1]:
        signal.raise_signal(first)


def end_kindly(process: subprocess.Popen[Any], seconds: float = 15.0) -> None:
    """Tells a process to end, and kills it if it has not after so many seconds."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
