"""``async def`` workers: one event loop per process, in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from asynctask.errors import JobInterrupted, JobTimeout

__all__ = ["LoopThread"]


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

    def run(self, make: Callable[[], Coroutine[Any, Any, Any]], timeout: float | None) -> Any:
        """Runs a coroutine in the caller's context and waits for it. Raises what it raises.

        :class:`JobTimeout` where it is over its time, :class:`JobInterrupted` where the runtime ended it.
        """
        loop = self._started()
        context = contextvars.copy_context()
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()

        async def guarded() -> None:
            task = asyncio.current_task()
            assert task is not None
            self._running.add(task)
            try:
                async with asyncio.timeout(timeout) as limit:
                    result = await make()
            except TimeoutError as error:
                answer.set_exception(JobTimeout(timeout or 0.0) if limit.expired() else error)
            except asyncio.CancelledError:
                answer.set_exception(JobInterrupted("the runtime is shutting down"))
            except BaseException as error:
                answer.set_exception(error)
            else:
                answer.set_result(result)
            finally:
                self._running.discard(task)

        loop.call_soon_threadsafe(lambda: loop.create_task(guarded(), context=context))
        return answer.result()

    def interrupt(self) -> None:
        """Cancels every running coroutine."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in list(self._running)])

    def stop(self) -> None:
        """Ends the loop."""
        with self._lock:
            if self._loop is None or self._thread is None:
                return
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)
            if not self._thread.is_alive():
                self._loop.close()
            self._loop = None

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="event-loop", daemon=True)
                self._thread.start()
            return self._loop
