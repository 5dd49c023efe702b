"""The pool: the threads of a process that perform jobs, and the jobs that are ready for them.

``concurrency`` processors take jobs from :class:`ReadyJobs`, the most urgent first; of a Task with a limit, at most as many
as it has places here (:class:`Permits`). Suspects, jobs under which a process died, have a queue and a thread of their own,
see :class:`Isolation`.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from asynctask.clock import Clock
from asynctask.core.transitions import Begin
from asynctask.database.notify import Waker
from asynctask.errors import Unavailable
from asynctask.ledger.lending import Job
from asynctask.logs import get_logger
from asynctask.middleware.tracker import Running, Tracker
from asynctask.runtime.execution import Execution, Hook, Performer

STALE_S: Final = 0.5
"""Seconds after the last check of a job in the ledger from which it must not begin, so that a knob takes effect within a
second. A borrowed job waits for the next check (:data:`~asynctask.ledger.lending.RECHECK_S`); for a fetched one Begin is
repeated."""

LONG_S: Final = 0.1
"""Duration of a job, in seconds, from which its ``working`` status is written separately; and average duration of a Task's
jobs from which each start is reported to the supervisor. Below :data:`STALE_S`: what people see is as fresh as what they
set."""

_UNWIND_S: Final = 1.0
"""Seconds for which interrupted jobs may unwind before their threads are given up."""

_TASKS: Final = 1_000
"""Number of Tasks whose average job duration is kept."""

_SMOOTH: Final = 0.2
"""Weight of the last job in the average duration."""

Rank = tuple[int, int]
"""How urgent a job is: the rank of its queue (0 unless queues are strict) and its priority; the smallest first."""


class Permits:
    """The places of a Task with a limit in this process: ``limit`` of its jobs may run at once.

    Jobs in the queues of :class:`ReadyJobs` have their permit, so a thread may begin whatever it takes; others wait here.
    """

    __slots__ = ("limit", "used", "waiting")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.waiting: deque[Execution] = deque()


class ReadyJobs:
    """The jobs that are ready for a thread: a FIFO queue per :data:`Rank`, and one of suspects, with a thread of their own.

    ``share``: the share of jobs that are taken from the second rank while the first has jobs.
    """

    def __init__(self, share: float = 0.0) -> None:
        self._share = share
        self._owed = 0.0
        self._lock = threading.Lock()
        self._filled = threading.Condition(self._lock)
        self._by_rank: dict[Rank, deque[Execution]] = {}
        self._ranks: list[Rank] = []  # those with jobs, sorted
        self._suspects: deque[Execution] = deque()
        self._has_suspect = threading.Condition(self._lock)
        self._permits: dict[int, Permits] = {}
        self._out: dict[int, Execution] = {}  # thread -> the job that it took last
        self._count = 0
        self._waiting = 0  # of these jobs, those that wait for a permit
        self._sleeping = 0
        self._ends = 0
        self._ends_of_suspects = 0
        self._is_closed = False
        self.taken = 0  # jobs that threads took
        self._taken_before = 0  # the value of ``taken`` at the last :meth:`note_taken`
        self._took = 0  # jobs taken between the last two calls of :meth:`note_taken`

    def __len__(self) -> int:
        """Number of jobs that no thread has taken, including those that wait for a permit, without suspects."""
        return self._count

    @property
    def ready(self) -> int:
        """Number of jobs that threads can take now, so without those that wait for a permit."""
        return self._count - self._waiting

    @property
    def suspects(self) -> int:
        """Number of suspects that no thread has taken."""
        return len(self._suspects)

    # -- jobs

    def put(self, executions: Sequence[Execution]) -> None:
        """Appends jobs to the queues of their ranks."""
        with self._lock:
            for each in executions:
                self._place(each)
                self._count += not each.is_suspect
            self._filled.notify(min(len(executions), self._sleeping))

    def _place(self, execution: Execution) -> None:
        permits = None if execution.task_id is None else self._permits.get(execution.task_id)
        if permits is not None:
            if permits.used >= permits.limit:
                permits.waiting.append(execution)
                self._waiting += not execution.is_suspect
                return
            permits.used += 1
            execution.permits = permits
        self._enter(execution)

    def _enter(self, execution: Execution) -> None:
        if execution.is_suspect:
            self._suspects.append(execution)
            self._has_suspect.notify()
            return
        jobs = self._by_rank.get(execution.rank)
        if jobs is None:
            jobs = self._by_rank[execution.rank] = deque()
            insort(self._ranks, execution.rank)
        jobs.append(execution)

    def take(self) -> Execution | None:
        """The next job for the calling thread; waits for one. None: the thread must end."""
        with self._lock:
            while self._is_closed or not self._ranks:
                if self._ends:
                    self._ends -= 1
                    return None
                self._sleeping += 1
                self._filled.wait()
                self._sleeping -= 1
            rank = self._ranks[self._turn()]
            jobs = self._by_rank[rank]
            execution = jobs.popleft()
            if not jobs:
                del self._by_rank[rank]
                self._ranks.remove(rank)
            self._count -= 1
            self.taken += 1
            self._out[threading.get_ident()] = execution
            if (loan := execution.loan) is not None and execution.seq > loan.top:
                loan.top = execution.seq
            return execution

    def take_suspect(self) -> Execution | None:
        """The next suspect for the calling thread; waits for one. None: the thread must end."""
        with self._lock:
            while self._is_closed or not self._suspects:
                if self._ends_of_suspects:
                    self._ends_of_suspects -= 1
                    return None
                self._has_suspect.wait()
            execution = self._suspects.popleft()
            self._out[threading.get_ident()] = execution
            return execution

    def _turn(self) -> int:
        """Index of the rank to take from: 0, or 1 for a fraction ``share`` of the calls."""
        if not self._share or len(self._ranks) == 1:
            return 0
        self._owed += self._share
        if self._owed < 1:
            return 0
        self._owed -= 1
        return 1

    def close(self) -> None:
        """Threads take no more jobs: each thread would give its job back in a transaction of its own."""
        with self._lock:
            self._is_closed = True

    def end(self, threads: int, of_suspects: int = 0) -> None:
        """Ends so many threads, each once it finds no job."""
        with self._lock:
            self._ends += threads
            self._ends_of_suspects += of_suspects
            self._filled.notify_all()
            self._has_suspect.notify_all()

    def forget_thread(self) -> None:
        """Removes the calling thread, which ends, from the record of who took which job."""
        with self._lock:
            self._out.pop(threading.get_ident(), None)

    def drop(self, wanted: Callable[[Execution], bool]) -> list[Execution]:
        """Removes the jobs that are ``wanted``, frees their permits, and returns them: suspects first, in their order."""
        with self._lock:
            return self._drop(wanted)

    def recall(self, wanted: Callable[[Execution], bool]) -> list[Execution]:
        """As :meth:`drop`; in the same step, keeps the wanted ones that threads have taken from beginning."""
        with self._lock:
            for each in self._taken_unbegun():
                if wanted(each):
                    each.is_recalled = True
            return self._drop(wanted)

    def taken_unbegun(self) -> list[Execution]:
        """The jobs that threads have taken and that have not begun, for example because they wait for a suspect to end."""
        with self._lock:
            return self._taken_unbegun()

    def unbegun(self) -> list[Execution]:
        """The jobs that have not begun, whether a thread has taken them or not."""
        with self._lock:
            return [each for jobs in (*self._all(), self._taken_unbegun()) for each in jobs]

    def _taken_unbegun(self) -> list[Execution]:
        return [each for each in self._out.values() if not each.began and not each.is_over]

    def _drop(self, wanted: Callable[[Execution], bool]) -> list[Execution]:
        dropped: list[Execution] = []
        self._suspects = _without(self._suspects, wanted, dropped)
        for rank in self._ranks.copy():
            self._replace(rank, _without(self._by_rank[rank], wanted, dropped))
        ready = len(dropped)
        for permits in self._permits.values():
            permits.waiting = _without(permits.waiting, wanted, dropped)
        self._waiting -= sum(not each.is_suspect for each in dropped[ready:])
        for each in dropped:
            self._count -= not each.is_suspect
            self._free(each)
        return dropped

    def _replace(self, rank: Rank, jobs: deque[Execution]) -> None:
        if jobs:
            self._by_rank[rank] = jobs
        else:
            del self._by_rank[rank]
            self._ranks.remove(rank)

    def first(self, keep: int) -> Callable[[Execution], bool]:
        """A condition for :meth:`drop`: all jobs but the first ``keep``."""
        left = [keep]

        def is_beyond(execution: Execution) -> bool:
            left[0] -= 1
            return left[0] < 0

        return is_beyond

    def reorder(self, task_id: int, rank: Rank) -> None:
        """Moves the jobs of a Task to another rank after its priority has changed."""
        with self._lock:
            moved: list[Execution] = []
            for old in self._ranks.copy():
                if old != rank:
                    self._replace(old, _without(self._by_rank[old], lambda each: each.task_id == task_id, moved))
            for each in moved:
                each.rank = rank
                self._enter(each)
            if (permits := self._permits.get(task_id)) is not None:
                for each in permits.waiting:
                    each.rank = rank

    def ready_by_task(self) -> dict[int | None, int]:
        """Number of jobs that threads can take now, by Task."""
        found: dict[int | None, int] = {}
        with self._lock:
            for jobs in self._by_rank.values():
                for each in jobs:
                    found[each.task_id] = found.get(each.task_id, 0) + 1
        return found

    def _all(self) -> list[deque[Execution]]:
        return [*self._by_rank.values(), self._suspects, *(permits.waiting for permits in self._permits.values())]

    def rank_of(self, task_id: int) -> Rank | None:
        """The rank in which jobs of a Task wait; None if none wait."""
        with self._lock:
            return next((each.rank for jobs in self._all() for each in jobs if each.task_id == task_id), None)

    def first_rank(self) -> Rank | None:
        """The most urgent rank with a job; None if no job waits."""
        with self._lock:
            return self._ranks[0] if self._ranks else None

    def note_taken(self) -> int:
        """Number of jobs that threads took since the last call."""
        self._took, self._taken_before = self.taken - self._taken_before, self.taken
        return self._took

    @property
    def is_moving(self) -> bool:
        """Whether threads took jobs since the :meth:`note_taken` before the last."""
        return self._took + self.taken > self._taken_before

    # -- permits

    def places(self, task_id: int) -> tuple[int, int, int]:
        """As :meth:`permits`, for a Task that has a limit now; if it had none when its jobs arrived, it gets 0 places."""
        if (found := self.permits(task_id)) is None:
            self.limit(task_id, 0)
            found = self.permits(task_id)
        return found or (0, 0, 0)

    def limit(self, task_id: int, limit: int | None) -> None:
        """Sets the places of a Task here; None: the Task has no limit any more.

        A first limit also counts the jobs that arrived before it: those that threads have taken keep a place to their end.
        """
        with self._lock:
            permits = self._permits.get(task_id)
            if limit is None:
                if permits is not None:
                    del self._permits[task_id]
                    permits.limit = permits.used + len(permits.waiting)
                    self._start_waiting(permits)
                return
            if permits is None:
                permits = self._permits[task_id] = Permits(limit)
                for each in (
                    each for jobs in (*self._by_rank.values(), self._suspects, self._out.values()) for each in jobs
                ):
                    if each.task_id == task_id and not each.is_over:
                        each.permits = permits
                        permits.used += 1
                        if each.is_over:  # its thread released it meanwhile, without the lock
                            self._free(each)
            permits.limit = limit
            self._hold_back(task_id, permits)
            self._start_waiting(permits)

    def lower(self, task_id: int, limit: int) -> int:
        """Lowers the places of a Task here. Returns how many jobs use one: maybe more than ``limit``, because jobs that
        threads have taken keep theirs to their end."""
        with self._lock:
            permits = self._permits[task_id]
            permits.limit = min(permits.limit, limit)
            self._hold_back(task_id, permits)
            return permits.used

    def _hold_back(self, task_id: int, permits: Permits) -> None:
        """While more permits are used than there are, revokes those of jobs that no thread has taken, the last ones
        first."""
        for rank in reversed(self._ranks.copy()):
            if permits.used <= permits.limit:
                return
            self._replace(rank, self._held_back(task_id, permits, self._by_rank[rank]))
        self._suspects = self._held_back(task_id, permits, self._suspects)

    def _held_back(self, task_id: int, permits: Permits, jobs: deque[Execution]) -> deque[Execution]:
        kept = deque[Execution]()
        for each in reversed(jobs):
            if each.task_id == task_id and permits.used > permits.limit:
                each.permits = None
                permits.used -= 1
                permits.waiting.appendleft(each)
                self._waiting += not each.is_suspect
            else:
                kept.appendleft(each)
        return kept

    def permits(self, task_id: int) -> tuple[int, int, int] | None:
        """A Task's places here, how many are used, and how many jobs wait for one; None for a Task without a limit."""
        with self._lock:
            found = self._permits.get(task_id)
            return None if found is None else (found.limit, found.used, len(found.waiting))

    def limited(self) -> list[int]:
        """The Tasks that have places here."""
        with self._lock:
            return list(self._permits)

    def release(self, execution: Execution) -> None:
        """Frees the place of a job that has ended or will not begin, for the next job of its Task. Idempotent."""
        execution.is_over = True  # before ``permits`` is read: see :meth:`limit`
        if execution.permits is not None:
            with self._lock:
                self._free(execution)

    def _free(self, execution: Execution) -> None:
        permits, execution.permits = execution.permits, None
        if permits is not None:
            permits.used -= 1
            self._start_waiting(permits)

    def _start_waiting(self, permits: Permits) -> None:
        started = 0
        while permits.waiting and permits.used < permits.limit:
            execution = permits.waiting.popleft()
            self._waiting -= not execution.is_suspect
            permits.used += 1
            execution.permits = permits
            self._enter(execution)
            started += 1
        if started:
            self._filled.notify(min(started, self._sleeping))


def _without(jobs: deque[Execution], wanted: Callable[[Execution], bool], dropped: list[Execution]) -> deque[Execution]:
    """Returns the jobs without the ``wanted`` ones, and appends those to ``dropped``."""
    kept = deque[Execution]()
    for each in jobs:
        (dropped if wanted(each) else kept).append(each)
    return kept


class Durations:
    """The moving average of a job's seconds and the average length of its parameters, by Task. The key is the Task's id, a
    name for all jobs of a worker, or None for jobs without a Task. Threads write without a lock: a lost update is harmless.
    """

    def __init__(self) -> None:
        self._seconds: dict[int | str | None, float] = {}
        self._sizes: dict[int | str | None, float] = {}

    def note(self, task_id: int | str | None, seconds: float, worker: str = "") -> None:
        """Adds the duration of a job that ended, also to the average of its ``worker``."""
        if task_id is not None and worker:
            self.note(worker, seconds)
        known = self._seconds.get(task_id)
        if known is None:
            if len(self._seconds) >= _TASKS:
                self._seconds.clear()
                self._sizes.clear()
            self._seconds[task_id] = seconds
        else:
            self._seconds[task_id] = known + _SMOOTH * (seconds - known)

    def assume(self, task_id: int, worker: str) -> None:
        """Until a job of a Task has ended, uses the average of its worker, if that is known."""
        if (seconds := self._seconds.get(worker)) is not None and task_id not in self._seconds:
            self.note(task_id, seconds)

    def at_least(self, task_id: int, seconds: float) -> None:
        """Raises the average of a Task to the seconds for which one of its jobs runs already; not if none has ended yet."""
        if seconds > self._seconds.get(task_id, seconds):
            self._seconds[task_id] = seconds

    def knows(self, task_id: int | None) -> bool:
        """Whether the duration of the Task's jobs is known here."""
        return task_id in self._seconds

    def of(self, task_id: int | str | None, unknown: float) -> float:
        """Average seconds of a job; ``unknown`` if that is not known."""
        return max(1e-5, self._seconds.get(task_id, unknown))

    def measure(self, task_id: int | None, jobs: Sequence[Job]) -> None:
        """Stores the average length of the parameters of these jobs, for their Task and their worker."""
        if jobs:
            self._sizes[task_id] = self._sizes[jobs[0].worker_name] = sum(len(job.params or "") for job in jobs) / len(jobs)

    def size(self, task_id: int | str | None) -> float:
        """Average length of the parameters of a job, in characters."""
        return max(1.0, self._sizes.get(task_id, 1.0))


class StartGate:
    """Decides whether a job that a thread has taken may begin.

    Arguments: ``may_start`` returns false while no job may begin (the heartbeat is late, or the ledger is unavailable);
    ``quiet`` is set when no job begins any more.
    """

    def __init__(
        self,
        clock: Clock,
        hook: Hook,
        isolation: Isolation,
        quiet: threading.Event,
        may_start: Callable[[], bool],
    ) -> None:
        self._clock = clock
        self._hook = hook
        self._isolation = isolation
        self._quiet = quiet
        self.may_start = may_start
        self._checked_at = -1e9  # when the borrowed jobs were checked last (monotonic)
        self._checked = threading.Condition()
        self.paused: frozenset[str] = frozenset()  # queues, in the ledger
        self._log = get_logger("asynctask.pool")

    def opens(self, execution: Execution) -> bool:
        """Waits until a job may begin; False if it must not begin any more."""
        if not self._waited_for_start() or not self._isolation.enter(execution, self._quiet.is_set):
            return False
        if execution.is_borrowed:
            return self._is_known(execution) and self._takes_from(execution.copy.queue)
        return self._takes_from(execution.copy.queue) and (not execution.has_event or self._has_begun(execution))

    def _waited_for_start(self) -> bool:
        """Waits until jobs may start; False if none may start any more."""
        while not self.may_start() and not self._quiet.is_set():
            self._quiet.wait(0.05)
        return not self._quiet.is_set()

    def _is_known(self, execution: Execution) -> bool:
        """Waits until the last check of a borrowed job is fresh; False if it was recalled, or no job begins any more."""
        while not execution.is_recalled and not self._quiet.is_set():
            known = max(execution.asked, self._checked_at)
            if self._clock.monotonic() - known < STALE_S and self.may_start():
                return True
            with self._checked:
                self._checked.wait(_CHECK_S)
        return False

    def _takes_from(self, queue: str) -> bool:
        """Whether this process begins jobs of the queue, borrowed or fetched."""
        return not self._quiet.is_set() and queue not in self.paused and not self._hook.is_paused(queue)

    def _has_begun(self, execution: Execution) -> bool:
        """Whether Begin permits a fetched job; repeats Begin if the last one is too old."""
        if self._clock.monotonic() - execution.asked < STALE_S:
            return True
        if not self._waited_for_start() or not self._takes_from(execution.copy.queue):
            return False
        try:
            return self._hook.ask_again(execution)
        except Exception as error:  # Begin failed: the job goes back to the ledger, once that is available
            self._log.warning("begin_put_off", job_id=execution.copy.jid, error=str(error)[:500])
            return False

    # -- what opens and closes it

    def checked(self, at: float, paused: frozenset[str]) -> None:
        """Notes that all borrowed jobs were checked in the ledger at this time (monotonic), and the queues paused there."""
        self.hold_back(paused)
        with self._checked:
            self._checked_at = at
            self._checked.notify_all()

    def hold_back(self, queues: frozenset[str]) -> None:
        """Sets the queues that are paused in the ledger: none of their jobs begins here or is fetched."""
        if queues != self.paused:
            self.paused = queues
            self._hook.wake()

    def wake(self) -> None:
        """Wakes the waiting threads, because the process is quiet."""
        with self._checked:
            self._checked.notify_all()


class LowMark:
    """Wakes the borrower when few jobs are ready. ``mark``: at how many jobs; ``vain_until`` (monotonic): until then idle
    threads do not wake it, because the last borrow found nothing."""

    def __init__(self, clock: Clock, waker: Waker) -> None:
        self.mark = 0
        self.vain_until = 0.0
        self._clock = clock
        self._waker = waker
        self._is_low = threading.Event()

    def taken(self, left: int) -> None:
        """Called after a thread has taken a job; ``left`` jobs are left."""
        if left <= self.mark and not self._is_low.is_set():
            self._is_low.set()
            self._waker.wake()

    def empty(self) -> None:
        """Called when a thread finds no job."""
        if self._clock.monotonic() >= self.vain_until:
            self._waker.wake()

    def set(self) -> None:
        """Ends a :meth:`wait`."""
        self._is_low.set()

    def clear(self) -> None:
        """Called before a borrow."""
        self._is_low.clear()

    def wait(self, seconds: float) -> None:
        """Waits until few jobs are left, or for this long."""
        self._is_low.wait(seconds)


class Pool:
    """The processors of one process.

    Arguments: ``performer`` makes the pool's performer, from its callback for a hung job; ``on_begun`` is called with the
    Event's id of each borrowed job that may last long; ``background_share``: the ``share`` of :class:`ReadyJobs`.
    """

    def __init__(
        self,
        *,
        tracker: Tracker,
        clock: Clock,
        concurrency: int,
        hook: Hook,
        isolation: Isolation,
        gate: StartGate,
        low: LowMark,
        quiet: threading.Event,
        performer: Callable[[Callable[[Execution], None]], Performer],
        on_begun: Callable[[int], None],
        background_share: float = 0.0,
    ) -> None:
        self.concurrency = concurrency
        self._tracker = tracker
        self._clock = clock
        self._hook = hook
        self._isolation = isolation
        self.gate = gate
        self.low = low
        self._quiet = quiet
        self._on_begun = on_begun
        self.performer = performer(self._replace)
        self.durations = Durations()
        self.jobs = ReadyJobs(background_share)
        self._threads: dict[threading.Thread, bool] = {}  # False: it takes suspects
        self._ended = threading.Event()
        self._log = get_logger("asynctask.pool")

    # -- life

    def start(self) -> None:
        """Starts the processors."""
        for _ in range(self.concurrency):
            self._spawn(in_order=True)

    def quiet(self) -> list[Execution]:
        """Begins no more jobs. Gives back the fetched jobs that have not begun, and returns the borrowed ones."""
        if self._quiet.is_set():
            return []
        self._quiet.set()
        self.jobs.close()
        unbegun = self.jobs.drop(lambda each: True)
        self.low.set()
        self._hook.wake()
        self.gate.wake()
        try:
            self.give_back([each for each in unbegun if not each.is_borrowed])
        except Unavailable as error:  # recovery finds them in this process's list
            self._log.warning("release_put_off", error=str(error))
        return [each for each in unbegun if each.is_borrowed]

    def wait_idle(self, timeout: float) -> bool:
        """Waits until no job runs; False if one still runs after ``timeout`` seconds."""
        until = self._clock.monotonic() + timeout
        while self.busy:
            left = until - self._clock.monotonic()
            if left <= 0:
                return False
            self._ended.wait(min(0.05, left))
            self._ended.clear()
        return True

    def interrupt(self) -> int:
        """Ends running jobs: raises in their threads, then settles those left without their threads. Returns how many
        ran."""
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
        threads = list(self._threads.values())
        self.jobs.end(sum(threads), of_suspects=len(threads) - sum(threads))
        for thread in list(self._threads):
            thread.join(0.2)

    # -- its state

    @property
    def busy(self) -> int:
        """Number of jobs that run now."""
        return len(self._isolation)

    @property
    def idle(self) -> int:
        """Number of threads for which no job runs or is ready."""
        return max(0, self.concurrency - self.busy - self.jobs.ready)

    @property
    def frees_threads(self) -> bool:
        """Whether threads are idle or took jobs lately, so that an urgent job begins soon. Otherwise it would be given back
        at the next check, and borrowed again."""
        return self.busy < self.concurrency or self.jobs.is_moving

    @property
    def closed(self) -> bool:
        """Whether a suspect has the process to itself, or waits for that."""
        return self._isolation.closed

    @property
    def is_quiet(self) -> bool:
        """Whether :meth:`quiet` was called."""
        return self._quiet.is_set()

    def running(self) -> Sequence[Execution]:
        """The jobs that run now, without those whose thread was given up."""
        return [each for each in self._isolation.running() if not each.abandoned]

    @property
    def worked(self) -> tuple[int, float]:
        """Number of jobs performed, and total seconds in which at least one ran."""
        return self.performer.performed, self._isolation.busy_s

    # -- ready jobs

    def make_ready(self, executions: Sequence[Execution]) -> None:
        """Passes jobs to the processors, and suspects to their own thread, so that no processor waits for their turn."""
        if any(each.is_suspect for each in executions) and all(self._threads.values()):
            self._spawn(in_order=False)
        self.jobs.put(executions)
        if self._quiet.is_set():
            self.give_back(self.jobs.drop(lambda each: not each.is_borrowed))

    def return_suspects(self) -> None:
        """Gives back suspects that have waited long behind others, for other processes. Raises Unavailable."""
        if self.jobs.suspects <= self.concurrency:
            return
        is_beyond, now = self.jobs.first(self.concurrency), self._clock.monotonic()
        old = self.jobs.drop(lambda each: each.is_suspect and is_beyond(each) and now - each.asked > ALONE_S)
        self.give_back(old)

    def give_back(self, unbegun: Sequence[Execution]) -> None:
        """Gives back jobs that have not begun, to the ledger or the broker, in their order. Raises :class:`Unavailable`."""
        for execution in unbegun:
            if execution.has_event:
                self.release(execution)
        copies = [each.copy for each in unbegun if not each.has_event]
        if copies:
            self._hook.put_back(copies)

    def release(self, execution: Execution) -> None:
        """Gives back a fetched or borrowed job that will not run in this process."""
        self.jobs.release(execution)
        try:
            self._release(execution)
        except Unavailable as error:  # recovery finds it in this process's list
            self._log.warning("release_put_off", job_id=execution.copy.jid, error=str(error))

    def _release(self, execution: Execution) -> None:
        if not execution.has_event:
            self._hook.put_back([execution.copy])
        elif execution.ticket.verdict is Begin.DROP:
            self._tracker.forget(execution)
            self._done(execution)
        else:
            self._tracker.release(execution, then=lambda won: self._done(execution))

    def _done(self, execution: Execution) -> None:
        if not execution.is_borrowed:
            self._hook.done(execution.copy)

    # -- processors

    def _spawn(self, *, in_order: bool) -> None:
        thread = threading.Thread(target=self._process, args=(in_order,), name="processor", daemon=True)
        self._threads[thread] = in_order
        thread.start()

    def _process(self, in_order: bool) -> None:
        """The main function of a processor: takes jobs until its end. A processor that dies is replaced."""
        ended, take = False, self.jobs.take if in_order else self.jobs.take_suspect
        try:
            while (execution := take()) is not None:
                self.low.taken(len(self.jobs))
                self.run(execution)
                if execution.abandoned:  # this thread returned after all, and another has replaced it
                    break
            ended = True
        except BaseException:
            self._log.exception("processor_died")
        finally:
            self.jobs.forget_thread()
            self._threads.pop(threading.current_thread(), None)
            if not ended and not self._quiet.is_set():
                self._spawn(in_order=in_order)

    def run(self, execution: Execution) -> None:
        """Performs a job on this thread, if it may begin; else gives it back."""
        execution.thread = threading.current_thread()
        try:
            if self.gate.opens(execution):
                self._note_begun(execution)
                self.performer.perform(execution)
                self.durations.note(execution.task_id, self._clock.monotonic() - execution.began, execution.name)
            else:
                self.release(execution)
        except BaseException as error:
            self.performer.broke(execution, error)
            raise
        finally:
            self._leave(execution)

    def _note_begun(self, execution: Execution) -> None:
        """Tells the supervisor of a job that may hold the interpreter, before it does; short ones do not, and are many."""
        if execution.is_borrowed and self.durations.of(execution.task_id, LONG_S) >= LONG_S:
            self._on_begun(execution.ticket.event_id)

    def _leave(self, execution: Execution) -> None:
        self.jobs.release(execution)
        self._isolation.leave(execution)
        if self._quiet.is_set():
            self._ended.set()
        elif not self.jobs.ready:
            self._hook.wake()
            self.low.empty()

    def _replace(self, execution: Execution) -> None:
        """Starts a thread in place of this job's, which is lost."""
        self.jobs.release(execution)
        self._isolation.leave(execution)
        if not self._quiet.is_set():
            self._spawn(in_order=not execution.is_suspect)


# -- isolation: a job under which a process died runs alone in its process for some seconds

ALONE_S: Final = 5.0
"""Longest time, in seconds, for which a suspect closes its process: while it waits for the jobs beside it to end, and while
it runs alone. A job that kills its process mostly does so at once, and no other job waits longer than this. Suspects that
wait longer are given back for other processes, except as many as there are threads."""

_CHECK_S: Final = 0.1
"""Seconds between two checks whether a waiting thread must give up."""


class Isolation:
    """Which jobs may run beside each other; at most ``limit`` run at once (:class:`Running`).

    A crash under a suspect would count against the jobs beside it. So:

    - One suspect at a time has its turn; the others wait until it has ended, however long that takes.
    - Its turn closes the process: no other job starts, and the suspect starts once no job runs beside it. After
      :data:`ALONE_S` the process opens again. A suspect that runs by then continues beside others; one that still waits
      starts in the next free place.
    - Before the next suspect's turn, the process stays open for as long as it was closed: suspects take at most half of
      its time.

    Threads enter outside the job's function only, where no other thread can raise an exception in them while they hold the
    lock. Without a suspect, jobs enter and leave without the lock: all threads would wait for a holder that lost the
    interpreter. A job and a suspect never miss each other, by the first rule of :class:`Running`: a job is added and then
    checks for a turn; a suspect takes its turn and then checks which jobs run.
    """

    def __init__(self, clock: Clock, limit: int) -> None:
        self._clock = clock
        self._limit = limit
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._waiting = 0  # threads that wait for the condition
        self._running: Running[Execution] = Running(clock.monotonic)
        self._closed_at: float | None = None  # when the current turn began; None: no suspect has one
        self._suspect: Execution | None = None  # the suspect with the turn, while it runs
        self._kept = 0  # places kept for that suspect while it does not run
        self._stays_open_until = 0.0

    def enter(self, execution: Execution, give_up: Callable[[], bool]) -> bool:
        """Waits until the job may run; False if ``give_up`` returned true before."""
        if not execution.is_suspect:
            self._running.add(execution)
            if self._closed_at is None:
                return True
            self.leave(execution)
        with self._lock:  # the condition's own lock; taking it directly is faster
            if execution.is_suspect:
                return self._enter_closed(execution, give_up)
            while self._closed_at is not None and (self.closed or len(self._running) + self._kept >= self._limit):
                if give_up():
                    return False
                self._wait(self._closed_for())
            self._running.add(execution)
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
        self._suspect, self._kept = execution, 0
        self._running.add(execution)
        return True

    def _wait(self, seconds: float) -> None:
        self._waiting += 1
        try:
            self._condition.wait(max(0.0, min(seconds, _CHECK_S)))
        finally:
            self._waiting -= 1

    def _closed_for(self) -> float:
        """Seconds for which the process stays closed; if it is open, seconds until the next check."""
        left = 0.0 if self._closed_at is None else self._closed_at + ALONE_S - self._clock.monotonic()
        return left if left > 0 else _CHECK_S

    def _open(self) -> None:
        """Ends the turn of a suspect."""
        assert self._closed_at is not None
        closed_s = min(self._clock.monotonic() - self._closed_at, ALONE_S)
        self._stays_open_until = self._closed_at + 2 * closed_s
        self._closed_at, self._suspect, self._kept = None, None, 0
        self._condition.notify_all()

    def leave(self, execution: Execution) -> None:
        """Removes a job that has ended, or whose thread is lost. Idempotent."""
        if self._running.remove(execution) and (self._waiting or self._closed_at is not None):
            with self._lock:
                if self._suspect is execution:
                    self._open()
                elif self._waiting:
                    self._condition.notify_all()

    @property
    def closed(self) -> bool:
        """Whether a suspect has the process to itself, or waits for that: no other job may begin."""
        since = self._closed_at
        return since is not None and self._clock.monotonic() < since + ALONE_S

    def running(self) -> list[Execution]:
        """The jobs that run now."""
        return self._running.all()

    @property
    def busy_s(self) -> float:
        """Total seconds in which at least one job ran."""
        return self._running.busy_s

    def __len__(self) -> int:
        return len(self._running)
