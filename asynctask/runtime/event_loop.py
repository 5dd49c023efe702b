"""``async def`` workers: one event loop per process, in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from asynctask.errors import JobInterrupted, JobTimeout, carries
from asynctask.logs import get_logger
from asynctask.runtime import timeouts

__all__ = ["LoopThread"]

_ANSWER_S = 0.5
"""A loop that takes a call no sooner than this counts as blocked."""


class LoopThread:
    """The event loop of a process, started when the first coroutine comes.

    A job's middleware and bookkeeping stay in the processor thread, which waits here for the coroutine; so ``-c`` bounds
    coroutines as it bounds threads.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._running: set[asyncio.Task[Any]] = set()
        self._interrupted: set[asyncio.Task[Any]] = set()
        self._left: list[tuple[asyncio.AbstractEventLoop, threading.Thread]] = []
        self._log = get_logger("asynctask.loop")

    def run(self, make: Callable[[], Coroutine[Any, Any, Any]], timeout: float | None) -> Any:
        """Runs a coroutine in the caller's context and waits for it. Raises what it raises.

        :class:`JobTimeout` where it is over its time, even if it swallows its cancellation or blocks the loop;
        :class:`JobInterrupted` where :meth:`interrupt` ended it.
        """
        loop = self._started()
        context = contextvars.copy_context()
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        guarded = self._guarded
        loop.call_soon_threadsafe(lambda: loop.create_task(guarded(make, timeout, answer), context=context))
        if timeout is None:
            return answer.result()
        if not concurrent.futures.wait([answer], min(timeout + timeouts.GRACE_S, threading.TIMEOUT_MAX)).done:
            self._replace_if_blocked(loop)
            if not answer.done():
                raise JobTimeout(timeout)
        return answer.result()

    async def _guarded(
        self, make: Callable[[], Coroutine[Any, Any, Any]], timeout: float | None, answer: concurrent.futures.Future[Any]
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            async with asyncio.timeout(timeout) as limit:
                result = await make()
        except BaseException as error:
            if isinstance(error, TimeoutError) and limit.expired():
                answer.set_exception(JobTimeout(timeout or 0.0))
            elif task in self._interrupted and carries(error, asyncio.CancelledError):
                answer.set_exception(JobInterrupted("the runtime is shutting down"))
            else:
                # Cancelled by code of its own too: run again without limit it would never end.
                answer.set_exception(error)
        else:
            answer.set_result(result)
        finally:
            self._running.discard(task)
            self._interrupted.discard(task)

    def _replace_if_blocked(self, loop: asyncio.AbstractEventLoop) -> None:
        """A loop that does not answer is left to whatever holds it; coroutines to come get another."""
        answers = threading.Event()
        loop.call_soon_threadsafe(answers.set)
        if answers.wait(_ANSWER_S):
            return
        with self._lock:
            if self._loop is loop and self._thread is not None:
                self._left.append((loop, self._thread))
                self._log.error("event_loop_blocked", hint="call what blocks with asyncio.to_thread, or in a plain worker")
                self._loop = self._thread = None

    def interrupt(self) -> None:
        """Cancels every running coroutine."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        for task in list(self._running):
            self._interrupted.add(task)
            task.cancel()

    def stop(self) -> None:
        """Ends the loop."""
        with self._lock:
            loops, self._left = self._left, []
            if self._loop is not None and self._thread is not None:
                loops.append((self._loop, self._thread))
            for loop, _ in loops:
                loop.call_soon_threadsafe(loop.stop)
            for loop, thread in loops:
                thread.join(5)
                if not thread.is_alive():
                    loop.close()
            self._loop = self._thread = None

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="event-loop", daemon=True)
                self._thread.start()
            return self._loop
