"""Interrupting job code: a timeout that fires in a running thread, and the end of the process.

Python delivers an exception raised from another thread between any two bytecodes. Inside ``Condition.__enter__`` that
would leave a lock held for ever, so a thread is interrupted only inside the worker's function. The thread adds an entry to
a dict before the function, and pops it afterwards: one atomic step without a lock. The interrupting thread holds the lock,
sets ``firing``, and then checks the entry. The leaving thread waits until ``firing`` is false, and then clears an exception
that was raised and not delivered; after that no thread can interrupt it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import ctypes
import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from asynctask.clock import Clock
from asynctask.errors import JobInterrupted, JobTimeout, carries
from asynctask.job import awaited_in_this_process
from asynctask.logs import get_logger

GRACE_S = 5.0
"""Seconds after a timeout was raised in a thread from which the thread counts as hung."""

_AFTER_FAULT_S = 0.5
"""Pause of the watchdog, in seconds, after an exception of its own, so that repeated ones do not keep a CPU busy."""

_KINDS = (JobTimeout, JobInterrupted)


@dataclass(slots=True, eq=False)
class Watch:
    """One job inside its function, on the thread ``thread_id``.

    ``seconds`` is its timeout (None: no limit); ``on_hung`` is called, in a new thread, if the thread hangs. ``lost``: the
    thread was given up, and the function's result does not count.
    """

    thread_id: int
    seconds: float | None = None
    on_hung: Callable[[], None] | None = None
    deadline: float | None = None
    raised: tuple[type[BaseException], ...] = ()
    firing: bool = False
    lost: bool = False


class Watchdog:
    """Raises :class:`JobTimeout` in threads whose job exceeds its timeout, :class:`JobInterrupted` when the process ends.

    A long C call gets the exception when it returns. After :data:`GRACE_S` the thread counts as hung, and ``on_hung`` is
    called once; Python cannot end the thread itself.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._inside: dict[int, Watch] = {}
        self._condition = threading.Condition()
        self._stopping = False
        self._ending = False
        self._wakes_at: float | None = None  # None: until notified
        self._thread: threading.Thread | None = None
        self._log = get_logger("asynctask.watchdog")

    def run(self, watch: Watch, function: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
        """Runs ``function(*args)`` in this thread, where it may be interrupted. Returns its result, or raises its
        exception."""
        try:
            if watch.seconds is None:
                self._inside[id(watch)] = watch
            else:
                self._arm(watch, watch.seconds)
            if self._ending:
                raise JobInterrupted("the runtime is shutting down")
            return function(*args)
        finally:
            # Each kind is raised at most once, so two can interrupt this; the third call is safe. The exceptions are
            # dropped: the function has returned, and its result stands.
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
            # Last, under the lock: from here on another thread can raise in this one.
            self._inside[id(watch)] = watch

    def _leave(self, watch: Watch) -> None:
        self._inside.pop(id(watch), None)
        while watch.firing:
            pass  # spins for a few bytecodes of the other thread, because this must not wait for a lock
        if watch.raised:
            _raise_in(watch.thread_id, None)  # clear an undelivered exception, which must not hit later code

    # -- calls from other threads

    def interrupt(self, watch: Watch) -> bool:
        """Raises :class:`JobInterrupted` in the watch's thread if that is inside the function; whether it was."""
        with self._condition:
            return self._fire(watch, JobInterrupted)

    def end(self) -> None:
        """From now on, interrupts every function when it begins."""
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
            except Exception:  # every timeout of the process depends on this thread
                self._log.exception("watchdog_failed")
                pause.wait(_AFTER_FAULT_S)

    def _round(self) -> None:
        with self._condition:
            if self._stopping:
                return
            hung = self._fire_due()
            if not hung:
                self._condition.wait(self._until_wake())
        for watch in hung:
            self._report_hung(watch)

    def _until_wake(self) -> float | None:
        if self._wakes_at is None:
            return None
        return min(max(0.0, self._wakes_at - self._clock.monotonic()), threading.TIMEOUT_MAX)

    def _fire_due(self) -> list[Watch]:
        """Raises due exceptions; returns the hung watches. The caller holds the lock."""
        now = self._clock.monotonic()
        hung = []
        nearest: float | None = None
        for watch in self._inside.copy().values():  # an atomic copy: threads enter and leave meanwhile
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
        """Gives the thread up; False if it has just returned."""
        watch.firing = True
        try:
            watch.lost = self._inside.pop(id(watch), None) is not None
            return watch.lost
        finally:
            watch.firing = False

    def _report_hung(self, watch: Watch) -> None:
        """Calls ``on_hung`` in a new thread, because it runs the job's hooks and calls the broker."""
        if watch.on_hung is None:
            return
        try:
            threading.Thread(target=self._on_hung, args=(watch.on_hung,), name="given-up", daemon=True).start()
        except RuntimeError:  # no thread can be started, so there is no replacement either
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
"""Seconds within which a loop must run a callback, or it counts as blocked."""


class EventLoop:
    """The event loop of a process, in a thread of its own, started with the first coroutine.

    Middleware and recording run in the processor thread, which waits for the coroutine; so ``-c`` limits the number of
    coroutines, too.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._running: set[asyncio.Task[Any]] = set()
        self._interrupted: set[asyncio.Task[Any]] = set()
        self._left: list[tuple[asyncio.AbstractEventLoop, threading.Thread]] = []
        self._log = get_logger("asynctask.loop")

    def run(self, make: Callable[[], Any], timeout: float | None) -> Any:
        """Awaits the awaitable that ``make`` returns, in the caller's context, repeatedly until the result is a plain
        value.

        Raises the awaitable's exceptions; :class:`JobTimeout` after ``timeout`` seconds, even if it swallows its
        cancellation or blocks the loop; :class:`JobInterrupted` if :meth:`interrupt` ended it.
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
        self, make: Callable[[], Any], timeout: float | None, answer: concurrent.futures.Future[Any]
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            async with asyncio.timeout(timeout) as limit:
                result = await awaited_in_this_process(_value_of(make))
        except BaseException as error:
            if isinstance(error, TimeoutError) and limit.expired():
                answer.set_exception(JobTimeout(timeout or 0.0))
            elif task in self._interrupted and carries(error, asyncio.CancelledError):
                answer.set_exception(JobInterrupted("the runtime is shutting down"))
            else:
                # Also if the job's code cancelled itself: retried as interrupted, it would never end.
                answer.set_exception(error)
        else:
            answer.set_result(result)
        finally:
            self._running.discard(task)
            self._interrupted.discard(task)

    def _replace_if_blocked(self, loop: asyncio.AbstractEventLoop) -> None:
        """Gives up a blocked loop; later coroutines get a new one."""
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
                self._thread = threading.Thread(target=self._serve, args=(self._loop,), name="event-loop", daemon=True)
                self._thread.start()
            return self._loop

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs the loop until :meth:`stop`. In asyncio, a SystemExit from a job's own task or callback ends
        ``run_forever``; the loop runs on then, for the coroutines of other jobs."""
        while True:
            try:
                loop.run_forever()
            except BaseException:
                self._log.exception("event_loop_left")
            else:
                return


def is_awaited(result: Any) -> bool:
    """Whether the event loop must await the result of a function."""
    return inspect.isawaitable(result) or isinstance(result, concurrent.futures.Future)


async def _value_of(make: Callable[[], Any]) -> Any:
    result = make()
    while is_awaited(result):
        result = await (asyncio.wrap_future(result) if isinstance(result, concurrent.futures.Future) else result)
    return result
