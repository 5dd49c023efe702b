"""The manager: fetches jobs in batches, hands them to its processors, acknowledges what is recorded.

Threads of a process: one fetcher (this module), ``concurrency`` processors and one more from the first suspect on, the
recorder, the watchdog, the event loop if there are ``async`` workers; the launcher adds heartbeat, dispatcher and sweep.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Final

from asynctask.brokers.base import Broker, Copy
from asynctask.clock import Clock
from asynctask.core.transitions import Begin
from asynctask.dispatch.demand import Load
from asynctask.errors import Unavailable
from asynctask.logs import get_logger
from asynctask.middleware.tracker import Tracker
from asynctask.runtime.deferral import Missing, Strangers
from asynctask.runtime.execution import Assignment, Performer
from asynctask.runtime.fetcher import Doubt, Intake, Mine
from asynctask.runtime.isolation import Turns
from asynctask.runtime.lanes import Lanes, Lend
from asynctask.runtime.retry import pause_s
from asynctask.worker import Worker

__all__ = ["LEAST_S", "LOOK_S", "Manager", "QueueOrder", "Rate"]

AHEAD_S = 0.1
"""A process fetches what its idle threads take at once and what they finish in this time, and while a fetch is on its way:
long jobs are not hoarded, and short ones lie ready when the next fetch begins."""

LATENCY_S = 0.5
"""A fetch that takes longer is an exception, and no reason to fetch more ahead."""

HOARD = 10
"""With more jobs ready than so many times what a process would fetch now, it gives back what it cannot begin soon."""

STALE_S = 0.5
"""Seconds after which Begin is asked again before a job starts, so that a knob acts on new starts within a second. What
lies ready mostly starts within :data:`AHEAD_S`; it waits longer where jobs proved to be long, or behind a suspect."""

LINE_S = 5.0
"""Suspects that lie in the line for longer, as many as are more than the threads, go back for other processes."""

MAX_FETCH = 1_000
MAX_UNRECORDED = 5_000
_IDLE_WAIT_S = 5.0  # it is woken by whoever pushes; this is for a signal that was lost
_PACE_S = 0.005
_UNWIND_S = 1.0

QueueOrder = Callable[[], Sequence[str]]


class Manager:
    """The jobs of one process.

    Arguments: ``workers`` by name; ``queue_order`` gives the queues in the order of the next fetch; ``may_start`` is false
    while nothing may begin (the heartbeat is late, the ledger is away); ``on_dry`` is called when the queues gave nothing,
    with whether they gave anything since the last call; ``unrecorded`` says how many outcomes wait for the ledger; ``lend``
    and ``take_back`` are for :class:`~asynctask.runtime.lanes.Lanes`.
    """

    def __init__(
        self,
        *,
        identity: str,
        broker: Broker,
        tracker: Tracker,
        clock: Clock,
        workers: Mapping[str, Worker],
        queues: Sequence[str],
        queue_order: QueueOrder,
        concurrency: int,
        may_start: Callable[[], bool],
        on_dry: Callable[[bool], None],
        unrecorded: Callable[[], int],
        lend: Lend,
        take_back: Callable[[set[int]], int],
    ) -> None:
        self._identity = identity
        self._broker = broker
        self._clock = clock
        self._queues = tuple(queues)
        self._queue_order = queue_order
        self._concurrency = concurrency
        self._may_start = may_start
        self._on_dry = on_dry
        self._unrecorded = unrecorded
        self._buffer: SimpleQueue[Assignment | None] = SimpleQueue()
        self._suspects: SimpleQueue[Assignment | None] = SimpleQueue()  # those wait in a line of their own
        self._lock = threading.Lock()
        self._mine = Mine()
        self._rung = False
        self._doubt = Doubt(clock)
        self._missing = Missing(tracker)
        self._strangers = Strangers(identity, broker, clock)
        self._intake = Intake(
            identity=identity, broker=broker, tracker=tracker, clock=clock, workers=workers, mine=self._mine,
            strangers=self._strangers, stopping=lambda: self._quiet.is_set(), acknowledge=self._acknowledge,
        )  # fmt: skip
        self._turns = Turns(clock, concurrency)
        self._lanes = Lanes(
            clock, lend=lend, take=self._intake.take_lent, release=self._release, take_back=take_back, fresh_s=STALE_S
        )
        self._threads: dict[threading.Thread, SimpleQueue[Assignment | None]] = {}
        self._has_line = False
        self._fetcher: threading.Thread | None = None
        self._quiet = threading.Event()
        self._low = threading.Event()  # so little lies ready that it is time for the next fetch
        self._mark = 0  # how little that is
        self._latency = 0.0  # seconds from asking for jobs until they can begin, smoothed
        self._ended = threading.Event()
        self._log = get_logger("asynctask.manager")
        self._rate = Rate(clock)
        self.performer: Performer | None = None

    # -- life

    def start(self, performer: Performer) -> None:
        """Starts the processors and the fetcher."""
        self.performer = performer
        for _ in range(self._concurrency):
            self._spawn(self._buffer)
        self._fetcher = threading.Thread(target=self._fetch, name="fetcher", daemon=True)
        self._fetcher.start()

    def quiet(self) -> None:
        """Fetches nothing more and starts nothing more; what was fetched and not started is given back."""
        if self._quiet.is_set():
            return
        self._quiet.set()
        self._low.set()
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
        """Ends what still runs: raised in its thread first, then recorded without it. Returns how many jobs that were."""
        assert self.performer is not None
        left = self._assignments()
        self.performer.watchdog.end()
        self.performer.loop.interrupt()
        for assignment in left:
            self.performer.interrupt(assignment)
        self.wait_idle(_UNWIND_S)
        for assignment in self._assignments():
            try:
                self.performer.interrupted(assignment)
            except Exception:  # the rest of the stop must come; recovery finds the job in this process's list
                self._log.exception("interrupt_put_off", job_id=assignment.copy.jid)
        return len(left)

    def stop(self) -> None:
        """Ends the threads that can be ended and acknowledges the last recorded jobs."""
        for queue in list(self._threads.values()):
            queue.put(None)
        self._broker.wake()
        if self._fetcher is not None:
            self._fetcher.join(5)
        for thread in list(self._threads):
            thread.join(0.2)
        try:
            self._broker.drop(self._identity, self._mine.take_done())
        except Unavailable as error:  # recovery drops them: their outcomes are recorded
            self._log.warning("acknowledge_put_off", error=str(error))

    # -- what it says of itself

    @property
    def busy(self) -> int:
        """Jobs that run now."""
        return len(self._turns)

    def busy_for(self) -> float | None:
        """For how many seconds the jobs that lie ready will do; None while no job runs."""
        if not self._turns:
            return None
        if self._turns.closed:  # one that runs alone: all others wait for it, and it for its outcomes
            return 0.0
        rate = self._rate.per_second
        return (self._buffer.qsize() + self._lanes.ready) / rate if rate > 0 else 0.0

    def running(self) -> Sequence[Assignment]:
        """The jobs that run now, as they were fetched."""
        return self._assignments()

    @property
    def is_quiet(self) -> bool:
        """Whether :meth:`quiet` was called."""
        return self._quiet.is_set()

    def load(self) -> Load:
        """What the dispatcher should keep ready for this process."""
        if self._quiet.is_set() or self._turns.closed or not self._may_start():
            return Load(self._identity, self._queues, 0, 0.0)
        free = max(0, self._concurrency - self.busy - self._buffer.qsize())
        return Load(self._identity, self._queues, free, self._rate.per_second)

    # -- fetching

    def _fetch(self) -> None:
        tries = 0
        worked = False
        asked = self._clock.monotonic()
        while not self._quiet.is_set():
            done: list[Copy] = []
            try:
                if self._doubt.is_due():
                    self._find_unarrived()
                self._lanes.look_after()
                limit = self._room()
                if limit <= 0 and self._clock.monotonic() - asked < AHEAD_S and self._mine.waiting < MAX_FETCH // 2:
                    # A round trip for a few acknowledgements alone would cost more than it is worth.
                    self._low.wait(AHEAD_S / 4)
                    continue
                asked = self._clock.monotonic()
                self._rung = False
                done = self._mine.take_done()
                copies = self._broker.exchange(self._identity, done, self._strangers.order(self._queue_order()), limit)
                self._mine.exchanged(done, copies)
                done = []
                if copies:
                    worked = True
                    self._begin(copies)
                    self._latency = 0.7 * self._latency + 0.3 * min(self._clock.monotonic() - asked, LATENCY_S)
                elif limit > 0:
                    self._on_dry(worked)
                    worked = False
                if 0 < limit > len(copies):
                    # Every commit, our own too, ends the wait: a busy process must not answer each with a transaction.
                    self._quiet.wait(_PACE_S if self.busy else 0)
                    self._broker.wait(self._strangers.patience(self._idle_wait()))
                tries = 0
            except Unavailable as error:
                tries += 1
                self._log.warning("fetch_put_off", error=str(error), tries=tries)
                self._mine.keep_done(done)
                self._doubt.rise()
                self._quiet.wait(pause_s(tries))
            except Exception:
                self._log.exception("fetch_failed")
                self._mine.keep_done(done)
                self._doubt.rise()
                self._quiet.wait(1.0)

    def _find_unarrived(self) -> None:
        """Puts back what the broker holds for this process although it never arrived here."""
        unarrived = [copy for copy in self._broker.held_by(self._identity) if copy not in self._mine]
        if unarrived:
            self._log.warning("copies_unarrived", count=len(unarrived))
            self._broker.put_back(self._identity, unarrived)
        self._doubt.looked()

    def _room(self) -> int:
        """How many jobs to fetch now: none while enough lies ready, so that fetches stay few and large."""
        self._low.clear()
        if self._suspects.qsize() > self._concurrency:
            self._shorten_line()
        if self._turns.closed or not self._may_start() or self._unrecorded() > MAX_UNRECORDED:
            return 0
        assert self.performer is not None
        busy, ready = self.busy, self._buffer.qsize()
        rate = self._rate.update(self.performer.performed, self._turns.busy_s, dry=not busy and not ready)
        idle = self._concurrency - busy
        wanted = min(MAX_FETCH, max(0, idle) + int(rate * (AHEAD_S + 2 * self._latency)))
        self._mark = wanted // 2
        if ready > HOARD * wanted + self._concurrency:
            self._give_back_all_but(wanted + self._concurrency)
        return wanted - ready if ready <= self._mark else 0

    def _idle_wait(self) -> float:
        """How long to wait for news, in seconds; not for long while jobs lie ready, for they may prove to be long."""
        return AHEAD_S if self._buffer.qsize() > self._concurrency else _IDLE_WAIT_S

    def _give_back_all_but(self, keep: int) -> None:
        """The jobs became long: what others could begin must not lie here. Raises :class:`Unavailable`."""
        surplus = _drained(self._buffer)
        for assignment in surplus[:keep]:
            self._buffer.put(assignment)
        self._give_back(surplus[keep:])

    def _shorten_line(self) -> None:
        """Suspects run one after the other here; where that takes long, other processes may have a turn for them."""
        line, now = _drained(self._suspects), self._clock.monotonic()
        old = {id(each) for each in line[self._concurrency :] if now - each.asked > LINE_S}
        for assignment in line:
            if id(assignment) not in old:
                self._suspects.put(assignment)
        self._give_back([assignment for assignment in line if id(assignment) in old])

    def _give_back(self, unstarted: Sequence[Assignment]) -> None:
        """To whoever can begin them, in the order in which they came. Raises :class:`Unavailable`."""
        for assignment in unstarted:
            if assignment.ticket is not None:
                self._release(assignment)
        copies = [each.copy for each in unstarted if each.ticket is None]
        self._mine.forget(copies)  # if the broker is away now, they are found and go back when it is there
        self._broker.put_back(self._identity, copies)

    def _begin(self, copies: Sequence[Copy]) -> None:
        """Asks the ledger about a fetched batch and hands it to the processors. Raises :class:`Unavailable`."""
        try:
            assignments = self._intake.take(copies)
        except Unavailable:
            self._mine.forget(copies)  # nothing of these may begin: they go back as soon as the broker answers
            raise
        except Exception:
            self._log.exception("batch_not_begun", count=len(copies))
            if len(copies) > 1:
                self._begin_singly(copies)
            return
        missing, ready = [], []
        for each in assignments:
            if not each.begins:
                self._release(each)
            elif self._missing.takes(each):
                missing.append(each)
            elif each.is_suspect:
                self._line_up(each)
            else:
                ready.append(each)
        for each in ready:
            self._buffer.put(each)
        if missing:
            self._put_off(missing)

    def _put_off(self, missing: Sequence[Assignment]) -> None:
        try:
            self._missing.put_off(missing, self.done)
        except Unavailable:
            self._mine.forget([each.copy for each in missing])
            raise

    def _begin_singly(self, copies: Sequence[Copy]) -> None:
        """One job that cannot be asked about must not keep its neighbours; it stays in this process's list."""
        for position, copy in enumerate(copies, 1):
            try:
                self._begin([copy])
            except Unavailable:
                self._mine.forget(copies[position:])
                raise

    def _acknowledge(self, copy: Copy) -> None:
        self._mine.done(copy)
        self._broker.wake()

    # -- acknowledging

    def done(self, assignment: Assignment) -> None:
        """Its outcome is in the ledger (or it has none): its copy is acknowledged with the next exchange."""
        if assignment.is_lent:
            self._lanes.done(assignment)
            return
        waiting = self._mine.done(assignment.copy)
        if not self._rung and (waiting >= MAX_FETCH // 2 or not self._turns):
            self._rung = True  # once until they are taken: a flush ends hundreds, and being woken for each costs more
            self._broker.wake()

    def gone(self, assignment: Assignment) -> None:
        """Its copy went back, or into a set: it is not this process's any more."""
        self._mine.forget([assignment.copy])

    # -- processors

    def _line_up(self, suspect: Assignment) -> None:
        """Suspects wait for each other, and no processor with them: a thread of their own takes them in turn."""
        if not self._has_line:
            self._has_line = True
            self._spawn(self._suspects)
        self._suspects.put(suspect)

    def _spawn(self, queue: SimpleQueue[Assignment | None]) -> None:
        thread = threading.Thread(target=self._process, args=(queue,), name="processor", daemon=True)
        with self._lock:
            self._threads[thread] = queue
        thread.start()

    def _process(self, queue: SimpleQueue[Assignment | None]) -> None:
        """A processor: takes assignments until it is told to end. One that dies is replaced."""
        me = threading.current_thread()
        ended = False
        try:
            while True:
                assignment = queue.get()
                if not self._low.is_set() and self._buffer.qsize() <= self._mark:
                    self._low.set()
                if assignment is None:
                    ended = True
                    return
                following: Assignment | None = assignment
                while following is not None:
                    self._run(following)
                    if following.abandoned:  # it came back after all, but another thread has its place
                        ended = True
                        return
                    following = following.follower
        except BaseException:
            self._log.exception("processor_died")
        finally:
            with self._lock:
                self._threads.pop(me, None)
            if not ended and not self._quiet.is_set():
                self._spawn(queue)

    def _run(self, assignment: Assignment) -> None:
        assert self.performer is not None
        try:
            if not assignment.is_lent and not self._begins(assignment):
                self._release(assignment)
                return
            self.performer.perform(assignment)
        except BaseException as error:
            self.performer.broke(assignment, error)
            if (follower := assignment.follower) is not None:  # this thread ends, so it cannot begin the next job
                assignment.follower = None
                self._release(follower)
            raise
        finally:
            if assignment.follower is not None:
                self._turns.pass_on(assignment, assignment.follower)
            else:
                self._lanes.close(assignment)
                self._turns.leave(assignment)
                if self._quiet.is_set():
                    self._ended.set()
                elif self._buffer.empty():
                    self._broker.wake()

    def _begins(self, assignment: Assignment) -> bool:
        """Waits for its turn; whether it may begin then. A lent job has had its turn with the end of the one before it."""
        if not self._waited_for_start() or not self._turns.enter(assignment, self._quiet.is_set):
            return False
        return self._still_begins(assignment)

    def follow(self, assignment: Assignment) -> Assignment | None:
        """The job that begins on this thread in the place of one that is over, if any does."""

        def goes_on() -> bool:
            return (
                not assignment.abandoned and not self._quiet.is_set() and not self._turns.closed and self._may_start()
            )  # fmt: skip

        return self._lanes.follow(assignment, goes_on, self._has_room)

    def _has_room(self) -> bool:
        """Whether nothing waits for a thread of this process, as far as it can know: one is idle, or jobs are fetched ahead
        and none waits for one."""
        idle = max(0, self._concurrency - self.busy)
        ahead = idle > 0 or self._rate.per_second * AHEAD_S >= 1
        return ahead and self._buffer.qsize() <= idle and self._suspects.empty()

    def _waited_for_start(self) -> bool:
        """Waits until anything may start; False if nothing will any more."""
        while not self._may_start() and not self._quiet.is_set():
            self._quiet.wait(0.05)
        return not self._quiet.is_set()

    def _still_begins(self, assignment: Assignment) -> bool:
        """Whether a job whose turn it is may begin. An old answer is asked for again; its ticket is the new one then."""
        if self._quiet.is_set():
            return False
        if assignment.ticket is None or self._clock.monotonic() - assignment.asked < STALE_S:
            return True
        if not self._waited_for_start():
            return False
        try:
            self._intake.ask_again(assignment)
        except Exception as error:  # what cannot be asked about does not begin: back to the ledger, when that is there
            self._log.warning("begin_put_off", job_id=assignment.copy.jid, error=str(error)[:500])
            return False
        return assignment.ticket.verdict is Begin.RUN

    def replace(self, assignment: Assignment) -> None:
        """The thread of this job is lost to it: another takes its place."""
        self._turns.leave(assignment)
        if not self._quiet.is_set():
            self._spawn(self._suspects if assignment.is_suspect else self._buffer)

    def _release(self, assignment: Assignment) -> None:
        assert self.performer is not None
        try:
            self.performer.release(assignment)
        except Unavailable as error:  # recovery finds it in this process's list
            self._log.warning("release_put_off", job_id=assignment.copy.jid, error=str(error))

    def _assignments(self) -> list[Assignment]:
        return [each for each in self._turns.running() if not each.abandoned]


def _drained(queue: SimpleQueue[Assignment | None]) -> list[Assignment]:
    """What lay there, taken out."""
    taken: list[Assignment] = []
    ends = 0
    while True:
        try:
            assignment = queue.get_nowait()
        except Empty:
            break
        if assignment is not None:
            taken.append(assignment)
        else:
            ends += 1
    for _ in range(ends):  # each is for a processor, which waits for it
        queue.put(None)
    return taken


# -- How fast a process finishes jobs while it has any.

LOOK_S: Final = 0.05
"""Seconds between two looks, unless the process ran dry meanwhile."""

LEAST_S: Final = LOOK_S / 4
"""However soon a few jobs were finished, they count as if they had taken so long: a handful that took no time at all says
little about the next thousand. At most twenty times what was finished is asked for next."""


class Rate:
    """Jobs finished in a second in which at least one runs, smoothed.

    Not in every second: a process that waits for jobs would ask for ever fewer of them, just as it finishes what it gets at
    once, and a Task would begin as slowly as jobs are asked for. While nothing runs what is known fades.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at = clock.monotonic()
        self._count = 0
        self._busy_s = 0.0
        self.per_second = 0.0

    def update(self, count: int, busy_s: float, *, dry: bool = False) -> float:
        """Takes note that ``count`` jobs are finished in all, and that some job ran for ``busy_s`` seconds in all.

        ``dry``: nothing is left to do, so it is looked at once. Returns how many jobs are finished in a second.
        """
        now = self._clock.monotonic()
        passed, done = now - self._at, count - self._count
        if passed >= LOOK_S or (dry and done):
            fresh = done / max(busy_s - self._busy_s, LEAST_S)
            # Up at once, down slowly: a short pause must not make the next fetch a single job.
            kept = 0.7 ** (passed / LOOK_S)
            self.per_second = fresh if fresh > self.per_second else self.per_second * kept + fresh * (1 - kept)
            self._at, self._count, self._busy_s = now, count, busy_s
        return self.per_second
