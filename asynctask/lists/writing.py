"""Writes slices one after the other, each while the next is gathered."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

__all__ = ["Writing"]

T = TypeVar("T")


class Writing(Generic[T]):
    """Calls ``write`` for each thing that is added, in their order; at most one is being written, and none waits.

    The first is written by :meth:`add` itself, for most lists have no second. With ``ahead`` a thread writes the others:
    what ``write`` raises is raised by the next :meth:`add`, or by the end of the block, and nothing is written after it.

    .. code-block:: python

        with Writing(commit, ahead=True) as writing:
            for each in slices:
                writing.add(each)
    """

    def __init__(self, write: Callable[[T], None], *, ahead: bool) -> None:
        self._write = write
        self._ahead = ahead
        self._first = True
        self._pool: ThreadPoolExecutor | None = None
        self._begun: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def add(self, thing: T) -> None:
        """Waits for the one before, then writes this one or has it written."""
        self._wait()
        if self._first or not self._ahead:
            self._first = False
            self._write(thing)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="split-writer")
        self._begun = self._pool.submit(self._write, thing)

    def _wait(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.result()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None) -> None:
        try:
            # What could not be written says more than what ended the gathering, unless that is the end of the program.
            if error is None or isinstance(error, Exception):
                self._wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
