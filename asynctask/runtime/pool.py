"""The pool: the threads of a process that perform jobs, and the jobs that are ready for them.

``concurrency`` processors take jobs from :class:`ReadyJobs`, the most urgent first, and of a Task with a limit only as many
as it has places here (:class:`Permits`). Suspects, jobs under which a process died, wait apart with one more thread, see
:class:`Isolation`.
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
"""Age of the ledger's last word on a job from which it may not begin, so that a knob takes effect within a second: a
borrowed one waits for the next check (:data:`~asynctask.ledger.lending.RECHECK_S`), for a fetched one Begin is repeated."""

LONG_S: Final = 0.1
"""Duration of a job from which its ``working`` status is written separately, and average duration of a Task's jobs from
which the supervisor is told of each that begins. Below :data:`STALE_S`: what people see is no older than what they set."""

_UNWIND_S: Final = 1.0
"""Seconds for which interrupted jobs may unwind before their threads are given up."""

_TASKS: Final = 1_000
"""Tasks whose duration of a job is remembered."""

_SMOOTH: Final = 0.2
"""Weight of the last job in that duration."""

Rank = tuple[int, int]
"""How urgent a job is: the rank of its queue, 0 unless queues are strict, and its priority; the smaller first."""


class Permits:
    """The places of a Task with a limit in this process: as many of its jobs run at once.

    A job with a rank has its permit already, so whatever a thread takes may begin; the others wait here.
    """

    __slots__ = ("limit", "used", "waiting")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.waiting: deque[Execution] = deque()


class ReadyJobs:
    """The jobs that are ready for a thread: by :data:`Rank`, in the order in which they came; beside them the
    suspects, which have a thread of their own.

    ``share``: the share of the jobs that is of later ranks while the first has jobs.
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
        self._waiting = 0  # of these, those that wait for a permit
        self._sleeping = 0
        self._ends = 0
        self._ends_of_suspects = 0
        self._is_closed = False
        self.taken = 0  # jobs that threads took
        self._taken_before = 0  # until the last :meth:`note_taken`
        self._took = 0  # between the last two

    def __len__(self) -> int:
        """Number of jobs that no thread has taken, those that wait for a permit included, but no suspects."""
        return self._count

    @property
    def ready(self) -> int:
        """Number of jobs that the next free threads take: those that wait for a permit are not among them."""
        return self._count - self._waiting

    @property
    def suspects(self) -> int:
        """Number of suspects that no thread has taken."""
        return len(self._suspects)

    # -- jobs

    def put(self, executions: Sequence[Execution]) -> None:
        """Adds jobs behind those of their rank."""
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
        """The next job for the calling thread; waits for one. None: the thread ends."""
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
        """The next suspect for the calling thread; waits for one. None: the thread ends."""
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
        """Which rank is next: the first, or the second as often as the share says."""
        if not self._share or len(self._ranks) == 1:
            return 0
        self._owed += self._share
        if self._owed < 1:
            return 0
        self._owed -= 1
        return 1

    def close(self) -> None:
        """Threads take no job any more: each would give it back by itself."""
        with self._lock:
            self._is_closed = True

    def end(self, threads: int, of_suspects: int = 0) -> None:
        """Ends so many threads, once they find no job."""
        with self._lock:
            self._ends += threads
            self._ends_of_suspects += of_suspects
            self._filled.notify_all()
            self._has_suspect.notify_all()

    def gone(self) -> None:
        """The calling thread ends."""
        with self._lock:
            self._out.pop(threading.get_ident(), None)

    def drop(self, wanted: Callable[[Execution], bool]) -> list[Execution]:
        """Takes out the jobs that are ``wanted``, suspects first, in their order; their permits are free again."""
        with self._lock:
            return self._drop(wanted)

    def recall(self, wanted: Callable[[Execution], bool]) -> list[Execution]:
        """As :meth:`drop`, in one step with those that threads have taken and that have not begun: these will not begin."""
        with self._lock:
            for each in self._taken_unbegun():
                if wanted(each):
                    each.is_recalled = True
            return self._drop(wanted)

    def taken_unbegun(self) -> list[Execution]:
        """The jobs that threads have taken and that have not begun: they wait for a suspect to end, for example."""
        with self._lock:
            return self._taken_unbegun()

    def unbegun(self) -> list[Execution]:
        """The same, and the jobs that no thread has taken."""
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
        """A condition for :meth:`drop`: all jobs but the next ``keep``."""
        left = [keep]

        def is_beyond(execution: Execution) -> bool:
            left[0] -= 1
            return left[0] < 0

        return is_beyond

    def reorder(self, task_id: int, rank: Rank) -> None:
        """Moves the jobs of a Task to another rank, because its priority was changed."""
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
        """Number of jobs that the next free threads take, by Task."""
        found: dict[int | None, int] = {}
        with self._lock:
            for jobs in self._by_rank.values():
                for each in jobs:
                    found[each.task_id] = found.get(each.task_id, 0) + 1
        return found

    def _all(self) -> list[deque[Execution]]:
        return [*self._by_rank.values(), self._suspects, *(permits.waiting for permits in self._permits.values())]

    def rank_of(self, task_id: int) -> Rank | None:
        """The rank in which jobs of a Task wait; None if none does."""
        with self._lock:
            return next((each.rank for jobs in self._all() for each in jobs if each.task_id == task_id), None)

    def first_rank(self) -> Rank | None:
        """The rank that is next; None if no job waits."""
        with self._lock:
            return self._ranks[0] if self._ranks else None

    def note_taken(self) -> int:
        """The number of jobs that threads took since the last call."""
        self._took, self._taken_before = self.taken - self._taken_before, self.taken
        return self._took

    @property
    def move(self) -> bool:
        """Whether threads took jobs since the last :meth:`note_taken` but one."""
        return self._took + self.taken > self._taken_before

    # -- permits

    def places(self, task_id: int) -> tuple[int, int, int]:
        """As :meth:`permits`, of a Task that has a limit now: one that had none when its jobs came has no places yet."""
        if (found := self.permits(task_id)) is None:
            self.limit(task_id, 0)
            found = self.permits(task_id)
        return found or (0, 0, 0)

    def limit(self, task_id: int, limit: int | None) -> None:
        """Sets the places of a Task here; None: it has no limit any more.

        The first limit counts the jobs that came before it: those that threads have taken keep a place to their end.
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
                        if each.is_over:  # its thread let go meanwhile, without the lock
                            self._free(each)
            permits.limit = limit
            self._hold_back(task_id, permits)
            self._start_waiting(permits)

    def lower(self, task_id: int, limit: int) -> int:
        """Lowers the places of a Task here; returns how many jobs use one, which may be more: those that threads have taken
        keep it to their end."""
        with self._lock:
            permits = self._permits[task_id]
            permits.limit = min(permits.limit, limit)
            self._hold_back(task_id, permits)
            return permits.used

    def _hold_back(self, task_id: int, permits: Permits) -> None:
        """Takes the permits of jobs that no thread has taken, the last ones first, while more are used than there are."""
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
        """The places of a Task here, how many are used, and how many jobs wait for one; None for a Task without."""
        with self._lock:
            found = self._permits.get(task_id)
            return None if found is None else (found.limit, found.used, len(found.waiting))

    def limited(self) -> list[int]:
        """The Tasks that have places here."""
        with self._lock:
            return list(self._permits)

    def release(self, execution: Execution) -> None:
        """The job has ended or will not begin: its place is free for the next job of its Task. Idempotent."""
        execution.is_over = True  # before the look at its permits: see :meth:`limit`
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
    """The jobs without those that are ``wanted``, which are added to ``dropped``."""
    kept = deque[Execution]()
    for each in jobs:
        (dropped if wanted(each) else kept).append(each)
    return kept


class Durations:
    """The seconds that a job of each Task takes, smoothed, and the length of its parameters; a name stands for all jobs of
    a worker, None for jobs without a Task. Written by threads without a lock: a lost update does no harm."""

    def __init__(self) -> None:
        self._seconds: dict[int | str | None, float] = {}
        self._sizes: dict[int | str | None, float] = {}

    def note(self, task_id: int | str | None, seconds: float, worker: str = "") -> None:
        """A job took so long."""
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
        """Until a job of a Task has ended, its jobs take as long as those of their worker, if that is known."""
        if (seconds := self._seconds.get(worker)) is not None and task_id not in self._seconds:
            self.note(task_id, seconds)

    def at_least(self, task_id: int, seconds: float) -> None:
        """A job of a Task of which others have ended runs for so long already."""
        if seconds > self._seconds.get(task_id, seconds):
            self._seconds[task_id] = seconds

    def knows(self, task_id: int | None) -> bool:
        """Whether a job of the Task has ended here."""
        return task_id in self._seconds

    def of(self, task_id: int | str | None, unknown: float) -> float:
        """Seconds of a job; ``unknown`` if none has ended."""
        return max(1e-5, self._seconds.get(task_id, unknown))

    def measure(self, task_id: int | None, jobs: Sequence[Job]) -> None:
        """The lengths of the parameters of some jobs."""
        if jobs:
            self._sizes[task_id] = self._sizes[jobs[0].worker_name] = sum(len(job.params or "") for job in jobs) / len(jobs)

    def size(self, task_id: int | str | None) -> float:
        """Average length of the parameters of a job."""
        return max(1.0, self._sizes.get(task_id, 1.0))


class StartGate:
    """Whether a job that a thread has taken may begin.

    Arguments: ``may_start`` is false while nothing may begin (the heartbeat is late, the ledger is unavailable); ``quiet``
    is set when nothing begins any more.
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
        self._checked_at = -1e9  # when the ledger was asked last about what is borrowed
        self._checked = threading.Condition()
        self.paused: frozenset[str] = frozenset()  # queues, in the ledger
        self._log = get_logger("asynctask.pool")

    def opens(self, execution: Execution) -> bool:
        """Waits for the turn of a job; returns whether it may begin then."""
        if not self._waited_for_start() or not self._isolation.enter(execution, self._quiet.is_set):
            return False
        if execution.is_borrowed:
            return self._is_known(execution) and self._takes_from(execution.copy.queue)
        return self._takes_from(execution.copy.queue) and (not execution.has_event or self._has_begun(execution))

    def _waited_for_start(self) -> bool:
        """Waits until anything may start; False if nothing will any more."""
        while not self.may_start() and not self._quiet.is_set():
            self._quiet.wait(0.05)
        return not self._quiet.is_set()

    def _is_known(self, execution: Execution) -> bool:
        """Waits until the ledger's last word on a borrowed job is fresh; False if it has been taken back, or nothing begins
        any more."""
        while not execution.is_recalled and not self._quiet.is_set():
            known = max(execution.asked, self._checked_at)
            if self._clock.monotonic() - known < STALE_S and self.may_start():
                return True
            with self._checked:
                self._checked.wait(_CHECK_S)
        return False

    def _takes_from(self, queue: str) -> bool:
        """Whether this process begins jobs of the queue, whichever way they came."""
        return not self._quiet.is_set() and queue not in self.paused and not self._hook.is_paused(queue)

    def _has_begun(self, execution: Execution) -> bool:
        """Whether Begin still lets a fetched job run; asks again if it said so too long ago."""
        if self._clock.monotonic() - execution.asked < STALE_S:
            return True
        if not self._waited_for_start() or not self._takes_from(execution.copy.queue):
            return False
        try:
            return self._hook.ask_again(execution)
        except Exception as error:  # Begin failed: back to the ledger, when that is available
            self._log.warning("begin_put_off", job_id=execution.copy.jid, error=str(error)[:500])
            return False

    # -- what changes it

    def checked(self, at: float, paused: frozenset[str]) -> None:
        """The ledger was asked at this time (monotonic) about all that is borrowed; these queues are paused there."""
        self.hold_back(paused)
        with self._checked:
            self._checked_at = at
            self._checked.notify_all()

    def hold_back(self, queues: frozenset[str]) -> None:
        """These queues, and no others, are paused in the ledger: none of their jobs begins here, or is fetched."""
        if queues != self.paused:
            self.paused = queues
            self._hook.wake()

    def wake(self) -> None:
        """Ends the waits, because the process is quiet."""
        with self._checked:
            self._checked.notify_all()


class Low:
    """Tells when few jobs lie ready, and wakes the borrower then. ``mark``: how many these are; ``vain_until`` (monotonic):
    a borrow has found nothing, so until then idle threads are no reason for another."""

    def __init__(self, clock: Clock, waker: Waker) -> None:
        self.mark = 0
        self.vain_until = 0.0
        self._clock = clock
        self._waker = waker
        self._is_low = threading.Event()

    def taken(self, left: int) -> None:
        """A thread has taken a job, and ``left`` are left."""
        if left <= self.mark and not self._is_low.is_set():
            self._is_low.set()
            self._waker.wake()

    def empty(self) -> None:
        """A thread finds no job."""
        if self._clock.monotonic() >= self.vain_until:
            self._waker.wake()

    def set(self) -> None:
        """Ends a wait."""
        self._is_low.set()

    def clear(self) -> None:
        """More are about to be got."""
        self._is_low.clear()

    def wait(self, seconds: float) -> None:
        """Waits until few are left, for so many seconds at most."""
        self._is_low.wait(seconds)


class Pool:
    """The processors of one process.

    Arguments: ``performer`` makes that of this pool; ``on_begun`` is called with the
    Event of each borrowed job that may last; ``background_share`` as of :class:`ReadyJobs`.
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
        low: Low,
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
        self._threads: dict[threading.Thread, bool] = {}  # whether it takes ready jobs, not suspects
        self._ended = threading.Event()
        self._log = get_logger("asynctask.pool")

    # -- life

    def start(self) -> None:
        """Starts the processors."""
        for _ in range(self.concurrency):
            self._spawn(in_line=True)

    def quiet(self) -> list[Execution]:
        """Begins nothing more; gives back what was fetched and has not begun. Returns what was borrowed and has not."""
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
        threads = list(self._threads.values())
        self.jobs.end(sum(threads), of_suspects=len(threads) - sum(threads))
        for thread in list(self._threads):
            thread.join(0.2)

    # -- its state

    @property
    def busy(self) -> int:
        """Jobs that run now."""
        return len(self._isolation)

    @property
    def idle(self) -> int:
        """Threads without a job that runs or lies ready."""
        return max(0, self.concurrency - self.busy - self.jobs.ready)

    @property
    def frees_threads(self) -> bool:
        """Whether threads are idle, or took jobs lately, so that something urgent begins soon. Otherwise it would be given
        back at the next check, and borrowed again."""
        return self.busy < self.concurrency or self.jobs.move

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

    @property
    def worked(self) -> tuple[int, float]:
        """Number of jobs performed, and of seconds in which at least one ran."""
        return self.performer.performed, self._isolation.busy_s

    # -- what lies ready

    def line_up(self, executions: Sequence[Execution]) -> None:
        """Passes jobs to the processors: suspects to their own thread, so that no processor waits."""
        if any(each.is_suspect for each in executions) and all(self._threads.values()):
            self._spawn(in_line=False)
        self.jobs.put(executions)
        if self._quiet.is_set():
            self.give_back(self.jobs.drop(lambda each: not each.is_borrowed))

    def shorten_line(self) -> None:
        """Gives back suspects that wait long behind others: other processes may begin them. Raises Unavailable."""
        if self.jobs.suspects <= self.concurrency:
            return
        is_beyond, now = self.jobs.first(self.concurrency), self._clock.monotonic()
        old = self.jobs.drop(lambda each: each.is_suspect and is_beyond(each) and now - each.asked > ALONE_S)
        self.give_back(old)

    def give_back(self, unbegun: Sequence[Execution]) -> None:
        """Gives back jobs that are no longer ready here, to the ledger or the broker, in the order in which they came.
        Raises :class:`Unavailable`."""
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

    def _spawn(self, *, in_line: bool) -> None:
        thread = threading.Thread(target=self._process, args=(in_line,), name="processor", daemon=True)
        self._threads[thread] = in_line
        thread.start()

    def _process(self, in_line: bool) -> None:
        """A processor: takes jobs until its end. One that dies is replaced."""
        ended, take = False, self.jobs.take if in_line else self.jobs.take_suspect
        try:
            while (execution := take()) is not None:
                self.low.taken(len(self.jobs))
                self._run(execution)
                if execution.abandoned:  # its thread returned after all, and another has its place
                    break
            ended = True
        except BaseException:
            self._log.exception("processor_died")
        finally:
            self.jobs.gone()
            self._threads.pop(threading.current_thread(), None)
            if not ended and not self._quiet.is_set():
                self._spawn(in_line=in_line)

    def _run(self, execution: Execution) -> None:
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
        """Tells the supervisor of a job that may hold the interpreter, so that nobody can ask this process what it runs.
        Short jobs are too many, and do not."""
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
        """The thread of this job is lost: another takes its place."""
        self.jobs.release(execution)
        self._isolation.leave(execution)
        if not self._quiet.is_set():
            self._spawn(in_line=not execution.is_suspect)


# -- isolation: a job under which a process died runs alone in its process for some seconds

ALONE_S: Final = 5.0
"""Longest time for which a suspect closes its process: until the jobs beside it have ended, and while it runs alone. A job
that kills its process mostly does so at once, and no other job waits longer than this. Suspects that wait longer
go back for other processes, except as many as there are threads."""

_CHECK_S: Final = 0.1
"""Seconds between two checks of a waiting thread whether to give up."""


class Isolation:
    """Which jobs may be at work beside each other: at most ``limit`` of those in :class:`Running`.

    A crash under a suspect would count against the jobs beside it. So:

    - One suspect at a time has its turn; the others wait until it has ended, however long that takes.
    - Its turn closes the process: nothing else starts, and the suspect starts once nothing runs beside it. After
      :data:`ALONE_S` the process opens again. A suspect that runs by then goes on beside others; one that still waits
      starts in the next free place.
    - The process then stays open for as long as it was closed, before the next suspect has its turn: suspects take at most
      half of its time.

    Jobs enter outside their function only, where no exception of another thread can interrupt them under the lock. Without
    a suspect they enter and leave without the lock of the turns: every thread would wait for the one that lost the
    interpreter while it held it. That no job and no suspect miss each other is the first rule of :class:`Running`: a job is
    added and then checks for a turn, a suspect takes its turn and then checks who runs.
    """

    def __init__(self, clock: Clock, limit: int) -> None:
        self._clock = clock
        self._limit = limit
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._waiting = 0  # threads that wait for the condition
        self._running: Running[Execution] = Running(clock.monotonic)
        self._closed_at: float | None = None  # when the current turn began; None: no suspect has one
        self._suspect: Execution | None = None  # that one, while it runs
        self._kept = 0  # places kept for it while it does not run
        self._stays_open_until = 0.0

    def enter(self, execution: Execution, give_up: Callable[[], bool]) -> bool:
        """Waits for its turn; False if ``give_up`` said so first."""
        if not execution.is_suspect:
            self._running.add(execution)
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

    def leave(self, execution: Execution) -> None:
        """The job no longer runs, or counts as lost. Idempotent."""
        if self._running.remove(execution) and (self._waiting or self._closed_at is not None):
            with self._lock:
                if self._suspect is execution:
                    self._open()
                elif self._waiting:
                    self._condition.notify_all()

    @property
    def closed(self) -> bool:
        """Whether a suspect has the process to itself, or waits for that: nothing else may begin."""
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
