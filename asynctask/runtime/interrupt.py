"""Interrupting job code: a timeout that fires in a running thread, and the end of the process."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from asynctask.clock import Clock
from asynctask.errors import JobInterrupted, JobTimeout

__all__ = ["Watch", "Watchdog"]

GRACE_S = 5.0
"""A thread that does not come back so long after its timeout was raised in it counts as hung."""


@dataclass(slots=True)
class Watch:
    """One running job under a timeout."""

    thread_id: int
    seconds: float
    deadline: float
    on_hung: Callable[[], None]
    fired: bool = False


class Watchdog:
    """Raises :class:`JobTimeout` in threads whose job is over its time.

    Python delivers the exception between two bytecodes: code that sits in one long call into C sees it when that call
    returns. After a grace the thread counts as hung and ``on_hung`` is called once; the thread itself cannot be ended.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._watches: dict[int, Watch] = {}
        self._condition = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def limit(self, seconds: float | None, on_hung: Callable[[], None]) -> Iterator[None]:
        """Runs the block in this thread under a timeout of ``seconds`` (None: no limit)."""
        if seconds is None:
            yield
            return
        watch = Watch(threading.get_ident(), seconds, self._clock.monotonic() + seconds, on_hung)
        self._add(watch)
        try:
            yield
        finally:
            self._remove(watch)

    def _add(self, watch: Watch) -> None:
        with self._condition:
            self._watches[watch.thread_id] = watch
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
                self._thread.start()
            self._condition.notify()

    def _remove(self, watch: Watch) -> None:
        with self._condition:
            self._watches.pop(watch.thread_id, None)
            if watch.fired:  # raised but not delivered yet: it must not hit the next job of this thread
                _raise_in(watch.thread_id, None)

    def stop(self) -> None:
        """Ends the watching thread."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
            thread = self._thread
        if thread is not None:
            thread.join(5)

    def _run(self) -> None:
        while True:
            hung: list[Watch] = []
            with self._condition:
                if self._stopping:
                    return
                now = self._clock.monotonic()
                for watch in list(self._watches.values()):
                    if watch.deadline > now:
                        continue
                    if watch.fired:
                        del self._watches[watch.thread_id]
                        hung.append(watch)
                    else:
                        watch.fired, watch.deadline = True, now + GRACE_S
                        _raise_in(watch.thread_id, JobTimeout)
                if not hung:
                    nearest = min((w.deadline for w in self._watches.values()), default=None)
                    self._condition.wait(None if nearest is None else max(0.0, nearest - now))
            for watch in hung:
                watch.on_hung()


def interrupt_thread(thread_id: int) -> None:
    """Raises :class:`JobInterrupted` in a thread."""
    _raise_in(thread_id, JobInterrupted)


def _raise_in(thread_id: int, kind: type[BaseException] | None) -> None:
    argument = ctypes.py_object(kind) if kind is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), argument)
