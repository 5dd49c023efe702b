"""The pool: the threads of a process that perform jobs, and the jobs that are ready for them.

``concurrency`` processors take jobs from one buffer. Suspects, jobs whose process died, wait in their own line with one
more thread, see :class:`Isolation`; lent jobs follow in the place of the one before them, see
:mod:`asynctask.runtime.lanes`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from asynctask.brokers.base import Broker, Copy
from asynctask.clock import Clock, Ids
from asynctask.core.transitions import Begin
from asynctask.dispatch.demand import AHEAD_S, Load, Rate
from asynctask.errors import Unavailable
from asynctask.logs import get_logger
from asynctask.middleware.chain import Chain
from asynctask.middleware.tracker import Tracker
from asynctask.runtime.execution import Execution, Hook, Observers, Performer
from asynctask.runtime.lanes import Lanes, Lend

if TYPE_CHECKING:
    from asynctask.runtime.fetcher import Intake

STALE_S: Final = 0.5
"""Age of Begin's answer from which Begin is repeated before a job starts, so that a knob takes effect within a second. A
fetched job mostly starts within :data:`AHEAD_S`; it waits longer if jobs turn out to be long, or behind a suspect."""

LINE_S: Final = 5.0
"""Suspects that wait longer in the line go back for other processes, except as many as there are threads."""

_UNWIND_S: Final = 1.0

Queue = SimpleQueue[Execution | None]  # None ends the thread that takes it


class Pool:
    """The processors of one process.

    Arguments: ``chain``, the middleware around each job; ``queues``, which this process works; ``may_start`` is false while
    nothing may begin (the heartbeat is late, the ledger is unavailable); ``quiet`` is set when nothing begins any more;
    ``lend`` and ``take_back`` are for :class:`~asynctask.runtime.lanes.Lanes`.
    """

    def __init__(
        self,
        *,
        identity: str,
        broker: Broker,
        tracker: Tracker,
        chain: Chain,
        clock: Clock,
        ids: Ids,
        queues: Sequence[str],
        concurrency: int,
        held: HeldCopies,
        intake: Intake,
        isolation: Isolation,
        hook: Hook,
        quiet: threading.Event,
        may_start: Callable[[], bool],
        lend: Lend,
        take_back: Callable[[set[int]], int],
        observers: Observers,
        result_limit: int = 65_536,
    ) -> None:
        self.identity = identity
        self.concurrency = concurrency
        self._broker = broker
        self._tracker = tracker
        self._clock = clock
        self.queues = tuple(queues)
        self._held = held
        self._intake = intake
        self._isolation = isolation
        self._quiet = quiet
        self.may_start = may_start
        self.rate = Rate(clock, concurrency)
        self.lanes = Lanes(
            clock, lend=lend, take=intake.take_lent, release=self.release, take_back=take_back, fresh_s=STALE_S
        )
        self.performer = Performer(
            result_limit=result_limit,
            identity=identity,
            broker=broker,
            tracker=tracker,
            chain=chain,
            clock=clock,
            ids=ids,
            place=self,
            hook=hook,
            observers=observers,
        )
        self._buffer: Queue = SimpleQueue()
        self._suspects: Queue = SimpleQueue()
        self._has_line = False
        self._filled_at = 0.0  # when jobs were put there last
        self._paused: frozenset[str] = frozenset()  # queues
        self._threads: dict[threading.Thread, Queue] = {}
        self._lock = threading.Lock()  # over the threads
        self.low = threading.Event()  # set when no more than `mark` jobs lie ready: time for the next fetch
        self.mark = 0
        self._ended = threading.Event()
        self._log = get_logger("asynctask.pool")

    # -- life

    def start(self) -> None:
        """Starts the processors."""
        for _ in range(self.concurrency):
            self._spawn(self._buffer)

    def quiet(self) -> None:
        """Begins nothing more; gives back what was fetched and has not begun."""
        if self._quiet.is_set():
            return
        self._quiet.set()
        self.low.set()
        self._broker.wake()
        try:
            self._give_back([*_drained(self._buffer), *_drained(self._suspects)])
        except Unavailable as error:  # recovery finds them in this process's list
            self._log.warning("release_put_off", error=str(error))

    def wait_idle(self, timeout: float) -> bool:
        """Waits until no job runs; False if one still does after ``timeout`` seconds."""
        until = self._clock.monotonic() + timeout
        while self.busy:
            left = until - self._clock.monotonic()
            if left <= 0:
                return False
            self._ended.wait(min(0.05, left))
            self._ended.clear()
        return True

    def interrupt(self) -> int:
        """Ends running jobs: raises in their threads, then settles them without the threads. Returns their number."""
        left = self.running()
        self.performer.watchdog.end()
        self.performer.loop.interrupt()
        for execution in left:
            self.performer.interrupt(execution)
        self.wait_idle(_UNWIND_S)
        for execution in self.running():
            try:
                self.performer.interrupted(execution)
            except Exception:  # the stop must continue; recovery finds the job in this process's list
                self._log.exception("interrupt_put_off", job_id=execution.copy.jid)
        return len(left)

    def stop(self) -> None:
        """Ends the threads that can be ended."""
        for queue in list(self._threads.values()):
            queue.put(None)
        for thread in list(self._threads):
            thread.join(0.2)

    # -- its state

    @property
    def busy(self) -> int:
        """Jobs that run now."""
        return len(self._isolation)

    @property
    def ready(self) -> int:
        """Number of fetched jobs that wait for a thread, without suspects."""
        return self._buffer.qsize()

    @property
    def is_stale(self) -> bool:
        """Whether the ready jobs were fetched too long ago to begin without repeating Begin."""
        return self._clock.monotonic() - self._filled_at >= STALE_S

    @property
    def closed(self) -> bool:
        """Whether a suspect has the process to itself."""
        return self._isolation.closed

    @property
    def is_quiet(self) -> bool:
        """Whether :meth:`quiet` was called."""
        return self._quiet.is_set()

    def running(self) -> Sequence[Execution]:
        """The jobs that run now, as they were fetched."""
        return [each for each in self._isolation.running() if not each.abandoned]

    def busy_for(self) -> float | None:
        """Seconds for which the ready jobs last; None while no job runs."""
        if not self._isolation:
            return None
        if self._isolation.closed:  # a suspect runs alone: all others wait for it, and it for its outcome
            return 0.0
        rate = self.rate.per_second
        return (self._buffer.qsize() + self.lanes.ready) / rate if rate > 0 else 0.0

    def load(self) -> Load:
        """What the dispatcher should keep ready for this process."""
        if self._quiet.is_set() or self._isolation.closed or not self.may_start():
            return Load(self.identity, self.queues, 0, 0.0, self.concurrency)
        free = max(0, self.concurrency - self.busy - self._buffer.qsize())
        return Load(self.identity, self.queues, free, self.rate.per_second, self.concurrency)

    @property
    def worked(self) -> tuple[int, float]:
        """Number of jobs performed, and of seconds in which at least one ran."""
        return self.performer.performed, self._isolation.busy_s

    def measured(self) -> float:
        """Jobs per second, measured now. For the fetching thread."""
        idle = not self.busy and not self._buffer.qsize()
        return self.rate.update(self.performer.performed, self._isolation.busy_s, dry=idle)

    # -- what lies ready

    def put(self, executions: Sequence[Execution]) -> None:
        """Passes jobs that may begin to the processors. Their queues gave them just now, so these are not paused."""
        self._filled_at = self._clock.monotonic()
        if self._paused:
            self._paused -= {execution.copy.queue for execution in executions}
        for execution in executions:
            if execution.is_suspect:
                self._line_up(execution)
            else:
                self._buffer.put(execution)

    def _line_up(self, suspect: Execution) -> None:
        """Puts a suspect into the line, whose own thread takes them in turn, so that no processor waits."""
        if not self._has_line:
            self._has_line = True
            self._spawn(self._suspects)
        self._suspects.put(suspect)

    def keep(self, count: int) -> None:
        """Gives all but ``count`` ready jobs back, if jobs became long: others can begin them, and more urgent ones now
        come first. Raises Unavailable."""
        surplus = _drained(self._buffer)
        for execution in surplus[:count]:
            self._buffer.put(execution)
        self._give_back(surplus[count:])

    def pause(self, queues: Collection[str]) -> None:
        """These queues, and no others, are paused: none of their jobs begins here, and those that lie ready go back, each
        queue's in their order. Raises Unavailable."""
        new, self._paused = frozenset(queues) - self._paused, frozenset(queues)
        if not new:
            return
        back: list[Execution] = []
        for line in (self._suspects, self._buffer):
            for execution in _drained(line):
                if execution.copy.queue in new:
                    back.append(execution)
                else:
                    line.put(execution)
        self._give_back(back)

    def shorten_line(self) -> None:
        """Gives back suspects that wait long behind others: other processes may begin them. Raises Unavailable."""
        if self._suspects.qsize() <= self.concurrency:
            return
        line, now = _drained(self._suspects), self._clock.monotonic()
        old = {id(each) for each in line[self.concurrency :] if now - each.asked > LINE_S}
        for execution in line:
            if id(execution) not in old:
                self._suspects.put(execution)
        self._give_back([execution for execution in line if id(execution) in old])

    def _give_back(self, unbegun: Sequence[Execution]) -> None:
        """To the ledger or the broker, in the order in which they came. Raises :class:`Unavailable`."""
        for execution in unbegun:
            if execution.ticket is not None:
                self.release(execution)
        copies = [each.copy for each in unbegun if each.ticket is None]
        self._held.forget(copies)  # if the broker is unavailable now, they go back when it is available
        self._broker.put_back(self.identity, copies)

    def release(self, execution: Execution) -> None:
        """Gives back a fetched or lent job that will not run in this process."""
        try:
            self._release(execution)
        except Unavailable as error:  # recovery finds it in this process's list
            self._log.warning("release_put_off", job_id=execution.copy.jid, error=str(error))

    def _release(self, execution: Execution) -> None:
        ticket = execution.ticket
        if ticket is None:
            self._broker.put_back(self.identity, [execution.copy])
            self.gone(execution)
        elif ticket.verdict is Begin.DROP:
            self.done(execution)
        else:
            self._tracker.release(ticket, then=lambda won: self.done(execution))

    # -- processors

    def _spawn(self, queue: Queue) -> None:
        thread = threading.Thread(target=self._process, args=(queue,), name="processor", daemon=True)
        with self._lock:
            self._threads[thread] = queue
        thread.start()

    def _process(self, queue: Queue) -> None:
        """A processor: takes jobs until its end. One that dies is replaced."""
        ended = False
        try:
            while (taken := queue.get()) is not None:
                if not self.low.is_set() and self._buffer.qsize() <= self.mark:
                    self.low.set()
                execution: Execution | None = taken
                while execution is not None:
                    self._run(execution)
                    if execution.abandoned:  # its thread returned after all, and another has its place
                        ended = True
                        return
                    execution = execution.follower
            ended = True
        except BaseException:
            self._log.exception("processor_died")
        finally:
            with self._lock:
                self._threads.pop(threading.current_thread(), None)
            if not ended and not self._quiet.is_set():
                self._spawn(queue)

    def _run(self, execution: Execution) -> None:
        execution.thread = threading.current_thread()
        try:
            if execution.is_lent or self._begins(execution):  # a lent job had its turn with the end of the one before
                self.performer.perform(execution)
            else:
                self.release(execution)
        except BaseException as error:
            self.performer.broke(execution, error)
            if (follower := execution.follower) is not None:  # this thread ends, so it cannot begin the next job
                execution.follower = None
                self.release(follower)
            raise
        finally:
            self._leave(execution)

    def _leave(self, execution: Execution) -> None:
        if execution.follower is not None:
            self._isolation.pass_on(execution, execution.follower)
            return
        self.lanes.close(execution)
        self._isolation.leave(execution)
        if self._quiet.is_set():
            self._ended.set()
        elif self._buffer.empty():
            self._broker.wake()

    def _begins(self, execution: Execution) -> bool:
        """Waits for the turn of a job; returns whether it may begin then. Repeats Begin if its answer is old."""
        if not self._waited_for_start() or not self._isolation.enter(execution, self._quiet.is_set):
            return False
        if not self._takes_from(execution.copy.queue):
            return False
        if execution.ticket is None or self._clock.monotonic() - execution.asked < STALE_S:
            return True
        if not self._waited_for_start() or not self._takes_from(execution.copy.queue):
            return False
        try:
            return self._intake.ask_again(execution)
        except Exception as error:  # Begin failed: back to the ledger, when that is available
            self._log.warning("begin_put_off", job_id=execution.copy.jid, error=str(error)[:500])
            return False

    def _takes_from(self, queue: str) -> bool:
        """Whether this process begins jobs of the queue, whichever way they came."""
        return not self._quiet.is_set() and queue not in self._paused

    def _waited_for_start(self) -> bool:
        """Waits until anything may start; False if nothing will any more."""
        while not self.may_start() and not self._quiet.is_set():
            self._quiet.wait(0.05)
        return not self._quiet.is_set()

    # -- the place of a job that runs

    def done(self, execution: Execution) -> None:
        """The outcome is in the ledger (or there is none): the copy is acknowledged with the next exchange."""
        if execution.is_lent:
            self.lanes.done(execution)
        else:
            self._held.done(execution.copy)

    def gone(self, execution: Execution) -> None:
        """The copy went back, or into a set: it is no longer this process's."""
        self._held.forget([execution.copy])

    def hung(self, execution: Execution) -> None:
        """The thread of this job is lost: another takes its place."""
        self._isolation.leave(execution)
        if not self._quiet.is_set():
            self._spawn(self._suspects if execution.is_suspect else self._buffer)

    def follow(self, execution: Execution) -> Execution | None:
        """The lent job that begins on this thread in the place of one that ended, if any."""

        def goes_on() -> bool:
            closed = execution.abandoned or self._isolation.closed
            return not closed and self._takes_from(execution.copy.queue) and self.may_start()

        return self.lanes.follow(execution, goes_on, self._has_room)

    def _has_room(self) -> bool:
        """Whether nothing waits for a thread of this process, as far as known: one is idle, or jobs are fetched ahead and
        none waits."""
        idle = max(0, self.concurrency - self.busy)
        ahead = idle > 0 or self.rate.per_second * AHEAD_S >= 1
        return ahead and self._buffer.qsize() <= idle and self._suspects.empty()


def _drained(queue: Queue) -> list[Execution]:
    """Empties the queue and returns its content."""
    taken: list[Execution] = []
    ends = 0
    while True:
        try:
            execution = queue.get_nowait()
        except Empty:
            break
        if execution is not None:
            taken.append(execution)
        else:
            ends += 1
    for _ in range(ends):  # each is for a processor, which waits for it
        queue.put(None)
    return taken


# -- isolation: a job under which a process died runs alone in its process for some seconds

ALONE_S: Final = 5.0
"""Longest time for which a suspect closes its process: until the jobs beside it have ended, and while it runs alone. A job
that kills its process mostly does so at once, and no other job waits longer than this."""

_CHECK_S: Final = 0.1
"""Seconds between two checks of a waiting thread whether to give up."""


class Isolation:
    """The jobs that run now, at most ``limit`` of them.

    A crash under a suspect would count against the jobs beside it. So:

    - One suspect at a time has its turn; the others wait until it has ended, however long that takes.
    - Its turn closes the process: nothing else starts, and the suspect starts once nothing runs beside it. After
      :data:`ALONE_S` the process opens again. A suspect that runs by then goes on beside others; one that still waits
      starts in the next free place.
    - The process then stays open for as long as it was closed, before the next suspect has its turn: suspects take at most
      half of its time.

    Jobs enter outside their function only, where no exception of another thread can interrupt them under the lock. Without
    a suspect they enter and leave without the lock: every thread would wait for the one that lost the interpreter while it
    held it. A job enters first and then checks for a turn; a suspect takes its turn first and then checks who runs. So one
    of the two sees the other.
    """

    def __init__(self, clock: Clock, limit: int) -> None:
        self._clock = clock
        self._limit = limit
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._waiting = 0  # threads that wait for the condition
        self._running: dict[int, Execution] = {}
        self._closed_at: float | None = None  # when the current turn began; None: no suspect has one
        self._suspect: int | None = None  # that one, while it runs
        self._kept = 0  # places kept for it while it does not run
        self._stays_open_until = 0.0
        self._since: float | None = None  # when the first of those that run began
        self._busy_s = 0.0  # until then

    def enter(self, execution: Execution, give_up: Callable[[], bool]) -> bool:
        """Waits for its turn; False if ``give_up`` said so first."""
        if not execution.is_suspect:
            self._add(execution)
            if self._closed_at is None:
                return True
            self.leave(execution)
        with self._lock:  # the condition's own, without the detour
            if execution.is_suspect:
                return self._enter_closed(execution, give_up)
            while self._closed_at is not None and (self.closed or len(self._running) + self._kept >= self._limit):
                if give_up():
                    return False
                self._wait(self._closed_for())
            self._add(execution)
        return True

    def _enter_closed(self, execution: Execution, give_up: Callable[[], bool]) -> bool:
        while self._closed_at is not None or (left := self._stays_open_until - self._clock.monotonic()) > 0:
            if give_up():
                return False
            self._wait(_CHECK_S if self._closed_at is not None else left)
        self._closed_at, self._kept = self._clock.monotonic(), 1
        while self._running and (self.closed or len(self._running) >= self._limit):
            if give_up():
                self._open()
                return False
            self._wait(self._closed_for())
        self._suspect, self._kept = id(execution), 0
        self._add(execution)
        return True

    def _wait(self, seconds: float) -> None:
        self._waiting += 1
        try:
            self._condition.wait(max(0.0, min(seconds, _CHECK_S)))
        finally:
            self._waiting -= 1

    def _closed_for(self) -> float:
        """Seconds for which the process stays closed; if it is open, until the next check."""
        left = 0.0 if self._closed_at is None else self._closed_at + ALONE_S - self._clock.monotonic()
        return left if left > 0 else _CHECK_S

    def _open(self) -> None:
        """Ends the turn of a suspect."""
        assert self._closed_at is not None
        closed_s = min(self._clock.monotonic() - self._closed_at, ALONE_S)
        self._stays_open_until = self._closed_at + 2 * closed_s
        self._closed_at, self._suspect, self._kept = None, None, 0
        self._condition.notify_all()

    def _add(self, execution: Execution) -> None:
        self._running[id(execution)] = execution
        if self._since is None:
            self._since = self._clock.monotonic()

    def leave(self, execution: Execution) -> None:
        """The job no longer runs, or counts as lost. Idempotent."""
        if self._running.pop(id(execution), None) is None:
            return
        if not self._running or self._waiting or self._closed_at is not None:
            with self._lock:
                self._left(execution)

    def _left(self, execution: Execution) -> None:
        if not self._running and self._since is not None:
            self._busy_s += self._clock.monotonic() - self._since
            self._since = None
        if self._suspect == id(execution):
            self._open()
        elif self._waiting:
            self._condition.notify_all()

    def pass_on(self, execution: Execution, follower: Execution) -> None:
        """The follower begins on its thread, in its place."""
        self._add(follower)
        self._running.pop(id(execution), None)

    @property
    def closed(self) -> bool:
        """Whether a suspect has the process to itself, or waits for that: nothing else may begin."""
        since = self._closed_at
        return since is not None and self._clock.monotonic() < since + ALONE_S

    def running(self) -> list[Execution]:
        """The jobs that run now."""
        return list(self._running.copy().values())

    @property
    def busy_s(self) -> float:
        """Total seconds in which at least one job ran."""
        with self._lock:
            return self._busy_s + (0.0 if self._since is None else self._clock.monotonic() - self._since)

    def __len__(self) -> int:
        return len(self._running)


# -- which copies are here

MANY_DONE: Final = 500
"""Number of copies to acknowledge from which the fetcher is woken, however busy the process is."""


class HeldCopies:
    """The copies that the broker holds for this process: those that arrived and have not left, and those of them that may
    be acknowledged."""

    def __init__(self, broker: Broker, isolation: Isolation) -> None:
        self._broker = broker
        self._isolation = isolation
        self._lock = threading.Lock()
        self._done: list[Copy] = []
        self._handles: set[Any] = set()  # of whatever kind the broker's are
        self._woken = False  # whether the fetcher was woken for these: once until it takes them

    def __contains__(self, copy: Copy) -> bool:
        with self._lock:
            return copy.handle in self._handles

    @property
    def waiting(self) -> int:
        """How many may be acknowledged."""
        return len(self._done)

    def done(self, copy: Copy) -> None:
        """The copy may be acknowledged, with the next exchange. An idle process makes one at once."""
        waiting = self._add(copy)
        # A flush ends hundreds of jobs; waking the fetcher for each would cost more.
        if not self._woken and (waiting >= MANY_DONE or not self._isolation):
            self._woken = True
            self._broker.wake()

    def acknowledge(self, copy: Copy) -> None:
        """The copy may be acknowledged at once: it never became an execution."""
        self._add(copy)
        self._broker.wake()

    def _add(self, copy: Copy) -> int:
        with self._lock:
            self._done.append(copy)
            return len(self._done)

    def take_done(self) -> list[Copy]:
        """Takes the copies that the caller acknowledges now."""
        self._woken = False
        with self._lock:
            taken, self._done = self._done, []
            return taken

    def keep_done(self, copies: Sequence[Copy]) -> None:
        """Returns copies that could not be acknowledged; they come first the next time."""
        with self._lock:
            self._done[:0] = copies

    def exchanged(self, done: Sequence[Copy], copies: Sequence[Copy]) -> None:
        """``done`` were acknowledged and ``copies`` arrived."""
        with self._lock:
            self._handles.difference_update(copy.handle for copy in done)
            self._handles.update(copy.handle for copy in copies)

    def forget(self, copies: Sequence[Copy]) -> None:
        """The copies went back or into a set, or count as never arrived."""
        with self._lock:
            self._handles.difference_update(copy.handle for copy in copies)
