"""Chains of middleware, for the client side (push) and the server side (perform).

A middleware is called as ``middleware(worker, job, queue, call_next)`` and returns the result of ``call_next()``, or
another one. On the client side, not calling ``call_next`` stops the push.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from asynctask.job import CurrentJob
from asynctask.worker import Worker, check_hook

Middleware = Callable[[Worker, CurrentJob, str, Callable[[], Any]], Any]


class Chain:
    """An ordered list of middleware. A class is instantiated for each job; a function or object is called as it is.

    Adding an existing entry moves it. An entry whose call would not run its body (``async def``, a generator function)
    raises :class:`~asynctask.errors.ConfigError`.
    """

    def __init__(self) -> None:
        self._entries: tuple[Any, ...] = ()

    def add(self, middleware: Any) -> None:
        """Appends a middleware, nearest to the job."""
        self._entries = (*self._without(_checked(middleware)), middleware)

    def prepend(self, middleware: Any) -> None:
        """Prepends a middleware, farthest from the job."""
        self._entries = (middleware, *self._without(_checked(middleware)))

    def insert_before(self, existing: Any, middleware: Any) -> None:
        """Inserts a middleware before ``existing``; at the front if that is missing."""
        self._insert(existing, middleware, after=False)

    def insert_after(self, existing: Any, middleware: Any) -> None:
        """Inserts a middleware after ``existing``; at the end if that is missing."""
        self._insert(existing, middleware, after=True)

    def remove(self, middleware: Any) -> None:
        """Removes a middleware, if it is in the chain."""
        self._entries = self._without(middleware)

    def exists(self, middleware: Any) -> bool:
        """Whether a middleware, or an instance of it, is in the chain."""
        return any(_is(entry, middleware) for entry in self._entries)

    def clear(self) -> None:
        """Removes all middleware."""
        self._entries = ()

    def names(self) -> list[str]:
        """The names of the middleware, outermost first."""
        return [_name(entry) for entry in self._entries]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def invoke(self, worker: Worker, job: CurrentJob, queue: str, inner: Callable[[], Any]) -> Any:
        """Calls the chain around ``inner``; returns the result of the outermost middleware."""
        call = inner
        for entry in reversed(self._entries):
            middleware: Middleware = entry() if isinstance(entry, type) else entry
            call = partial(middleware, worker, job, queue, call)
        return call()

    def _without(self, middleware: Any) -> tuple[Any, ...]:
        return tuple(entry for entry in self._entries if not _is(entry, middleware))

    def _insert(self, existing: Any, middleware: Any, *, after: bool) -> None:
        rest = list(self._without(_checked(middleware)))
        position = next((i for i, entry in enumerate(rest) if _is(entry, existing)), None)
        if position is None:
            position = len(rest) if after else 0
        elif after:
            position += 1
        rest.insert(position, middleware)
        self._entries = tuple(rest)


def _checked(middleware: Any) -> Any:
    check_hook(
        f"middleware {_name(middleware)}",
        inspect.getattr_static(middleware, "__call__", None) if inspect.isclass(middleware) else middleware,
    )
    return middleware


def _is(entry: Any, wanted: Any) -> bool:
    return entry is wanted or (inspect.isclass(wanted) and type(entry) is wanted)


def _name(entry: Any) -> str:
    return str(getattr(entry, "__qualname__", None) or type(entry).__qualname__)
