"""Interrupting job code: a timeout that fires in a running thread, and the end of the process.

Python raises an exception from another thread between any two bytecodes of its victim. Inside ``Condition.__enter__`` that
leaves a lock owned for ever, so a thread may be hit only while it is inside the worker's function. It says so by standing
in a dict, and leaves by popping itself: one step that needs no lock and that no exception can come between. Whoever raises
holds the lock, says ``firing``, and only then looks whether the thread still stands there; a thread that left waits out
``firing`` and then takes back what was raised and not delivered. So after that nothing can hit it any more.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import ctypes
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from asynctask.clock import Clock
from asynctask.errors import JobInterrupted, JobTimeout, carries
from asynctask.logs import get_logger

__all__ = ["EventLoop", "Watch", "Watchdog"]

GRACE_S = 5.0
"""A thread that does not come back so long after its timeout was raised in it counts as hung."""

_AFTER_FAULT_S = 0.5
"""The watchdog goes on so long after a fault of its own: a fault at every look must not take a processor."""

_KINDS = (JobTimeout, JobInterrupted)


@dataclass(slots=True, eq=False)
class Watch:
    """One job inside its function, on the thread ``thread_id``.

    ``seconds`` is its timeout (None: no limit); ``on_hung`` is called, on a thread of its own, if it does not come back.
    ``lost`` is true from the moment its thread counts as lost: what the function still comes to counts no more.
    """

    thread_id: int
    seconds: float | None = None
    on_hung: Callable[[], None] | None = None
    deadline: float | None = None
    raised: tuple[type[BaseException], ...] = ()
    firing: bool = False
    lost: bool = False


class Watchdog:
    """Raises :class:`JobTimeout` in threads whose job is over its time, :class:`JobInterrupted` when the process ends.

    Python delivers the exception between two bytecodes: code that sits in one long call into C sees it when that call
    returns. After a grace the thread counts as hung and ``on_hung`` is called once; the thread itself cannot be ended.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._inside: dict[int, Watch] = {}
        self._condition = threading.Condition()
        self._stopping = False
        self._ending = False
        self._wakes_at: float | None = None  # None: only when told
        self._thread: threading.Thread | None = None
        self._log = get_logger("asynctask.watchdog")

    def run(self, watch: Watch, function: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
        """Runs ``function(*args)`` in this thread, where it may be interrupted. Returns or raises what it does."""
        try:
            if watch.seconds is None:
                self._inside[id(watch)] = watch
            else:
                self._arm(watch, watch.seconds)
            if self._ending:
                raise JobInterrupted("the runtime is shutting down")
            return function(*args)
        finally:
            # Each kind is raised once at most, so two can come while it leaves; the third try is not disturbed. One that
            # comes so late is dropped: the function had returned, and what it came to stands.
            try:
                self._leave(watch)
            except _KINDS:
                try:
                    self._leave(watch)
                except _KINDS:
                    self._leave(watch)

    def _arm(self, watch: Watch, seconds: float) -> None:
        with self._condition:
            watch.deadline = self._clock.monotonic() + seconds
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
                self._thread.start()
            elif self._wakes_at is None or watch.deadline < self._wakes_at:
                self._condition.notify()
            # Last, and under the lock: before this nobody can raise here, and whoever would must wait for the lock.
            self._inside[id(watch)] = watch

    def _leave(self, watch: Watch) -> None:
        self._inside.pop(id(watch), None)
        while watch.firing:
            pass  # the thread that fires is within a few steps; no lock may be waited for here
        if watch.raised:
            _raise_in(watch.thread_id, None)  # raised but not delivered yet: it must not hit what comes next

    # -- what others ask for

    def interrupt(self, watch: Watch) -> bool:
        """Raises :class:`JobInterrupted` in its thread if that is inside the function; returns whether it was."""
        with self._condition:
            return self._fire(watch, JobInterrupted)

    def end(self) -> None:
        """From now on a function that is to begin is interrupted at once."""
        self._ending = True

    def stop(self) -> None:
        """Ends the watching thread."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
            thread = self._thread
        if thread is not None:
            thread.join(5)

    # -- the watching thread

    def _watch(self) -> None:
        pause = threading.Event()
        while not self._stopping:
            try:
                self._round()
            except Exception:  # every timeout of the process hangs on this thread
                self._log.exception("watchdog_failed")
                pause.wait(_AFTER_FAULT_S)

    def _round(self) -> None:
        with self._condition:
            if self._stopping:
                return
            hung = self._look()
            if not hung:
                self._condition.wait(self._until_wake())
        for watch in hung:
            self._report_hung(watch)

    def _until_wake(self) -> float | None:
        if self._wakes_at is None:
            return None
        return min(max(0.0, self._wakes_at - self._clock.monotonic()), threading.TIMEOUT_MAX)

    def _look(self) -> list[Watch]:
        """Raises what is due; returns those that did not come back. The lock is held."""
        now = self._clock.monotonic()
        hung = []
        nearest: float | None = None
        for watch in self._inside.copy().values():  # the copy is one step: threads come and go meanwhile
            if watch.deadline is None:
                continue
            if watch.deadline <= now:
                if JobTimeout in watch.raised:
                    if self._give_up(watch):
                        hung.append(watch)
                    continue
                watch.deadline = now + GRACE_S
                self._fire(watch, JobTimeout)
            nearest = watch.deadline if nearest is None else min(nearest, watch.deadline)
        self._wakes_at = nearest
        return hung

    def _fire(self, watch: Watch, kind: type[BaseException]) -> bool:
        watch.firing = True
        try:
            if kind in watch.raised or id(watch) not in self._inside:
                return False
            watch.raised = (*watch.raised, kind)
            _raise_in(watch.thread_id, kind)
            return True
        finally:
            watch.firing = False

    def _give_up(self, watch: Watch) -> bool:
        """Whether the thread is lost from now on; False if it came back in this moment."""
        watch.firing = True
        try:
            watch.lost = self._inside.pop(id(watch), None) is not None
            return watch.lost
        finally:
            watch.firing = False

    def _report_hung(self, watch: Watch) -> None:
        """What is done about a lost thread asks the job's own hooks and the broker: not on this thread."""
        if watch.on_hung is None:
            return
        try:
            threading.Thread(target=self._on_hung, args=(watch.on_hung,), name="given-up", daemon=True).start()
        except RuntimeError:  # no thread is to be had, so none for a replacement either
            self._log.exception("hung_job_not_replaced")

    def _on_hung(self, on_hung: Callable[[], None]) -> None:
        try:
            on_hung()
        except BaseException:
            self._log.exception("hung_job_not_recorded")


def _raise_in(thread_id: int, kind: type[BaseException] | None) -> None:
    argument = ctypes.py_object(kind) if kind is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), argument)


# -- ``async def`` workers run on one event loop per process

_ANSWER_S = 0.5
"""A loop that takes a call no sooner than this counts as blocked."""


class EventLoop:
    """The event loop of a process, in a thread of its own, started with the first coroutine.

    Middleware and recording stay in the processor thread, which waits here for the coroutine; so ``-c`` bounds coroutines
    as it bounds threads.
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
        if not concurrent.futures.wait([answer], min(timeout + GRACE_S, threading.TIMEOUT_MAX)).done:
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
