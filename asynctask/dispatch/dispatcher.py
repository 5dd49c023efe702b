"""The dispatcher: moves jobs from the ledger to foreign queues, a few at a time, under each Task's knobs.

A foreign queue belongs to an attached engine, or is a queue of Redis for workers in another language. The dispatcher
borrows jobs as a worker process does, pushes them, and hands them over to the queue (:mod:`asynctask.ledger.foreign`). It
pushes only as many as will be used soon. So a knob takes effect within a second, the engine's broker stays small, and
losing the broker loses no job. The application's own worker processes borrow for themselves.

:class:`Dispatcher` decides when a pass runs, and which process leads; :class:`DispatchPass` runs one pass.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final

from asynctask.brokers.base import Broker
from asynctask.clock import SECOND, micros
from asynctask.database.notify import Waker
from asynctask.dispatch.control import TaskControls
from asynctask.dispatch.demand import Credit, Rates, Shares, Threads, WorkSource, wanted
from asynctask.dispatch.outbox import AWAY_S, EngineQueues, Outbox, Router
from asynctask.errors import BrokerUnavailable, Unavailable
from asynctask.ledger import foreign, leases, lending
from asynctask.ledger.base import Ledger, loads
from asynctask.ledger.foreign import engine_of
from asynctask.ledger.lending import Alone, Offer, queue_holder
from asynctask.ledger.processes import is_engine, performing
from asynctask.logs import get_logger
from asynctask.sidekiq.copies import PushFilter

SHORTEST_S: Final = 0.05
"""Shortest time, in seconds, between two passes. Small Tasks submitted meanwhile wait for the next pass."""

ACTIVE_S: Final = 0.2
"""Longest time, in seconds, between two passes of a leader; the jobs of each pass must last longer."""

IDLE_S: Final = 1.0
"""Seconds until the next check whether another process still leads."""

QUIET_S: Final = 10.0
"""Seconds until the next pass when no job is left to dispatch; a notification ends the pause, but one may be lost."""

MOST_BORROWED: Final = 1_000
"""Largest number of jobs in one borrow."""


class Dispatcher:
    """A dispatcher. Any number may run, in any process, and one suffices. In a program without a foreign queue (no engine,
    no Redis) it makes no queries.

    Each process runs a pass when it is notified of ready jobs. If more jobs are ready than the workers can use, one leader
    per engine dispatches the rest, pass after pass until none is left; when the leader dies, another process leads within a
    second.

    Arguments: ``waker`` ends a wait when the ledger has new jobs. ``ahead_s``: seconds of work that wait in a queue.
    ``outgoing`` filters the jobs to push. ``engines``: the attached engines by name; an engine whose broker does not answer
    does not delay others. ``fair_by_owner``: the owners of Tasks of one priority get equal shares, instead of the Tasks.
    ``background_share``: the share of larger priorities among the jobs while smaller ones wait.
    """

    def __init__(
        self,
        ledger: Ledger,
        broker: Broker | None,
        waker: Waker,
        *,
        ahead_s: float = 0.25,
        outgoing: PushFilter | None = None,
        engines: Mapping[str, EngineQueues] = MappingProxyType({}),
        fair_by_owner: bool = False,
        background_share: float = 0.0,
    ) -> None:
        self._ledger = ledger
        self._engines = engines
        self._is_shared = broker is not None
        self.queues = DispatchPass(
            ledger,
            Router(broker, engines, ledger.clock),
            TaskControls(ledger, broker),
            outgoing,
            ahead_s=ahead_s,
            fair_by_owner=fair_by_owner,
            background_share=background_share,
            leads=self._leads,
            expect=self._note_due,
        )
        self._pause_s = min(ACTIVE_S, max(SHORTEST_S, 0.8 * ahead_s))
        self._leaderships: dict[str | None, leases.Leadership] = {}  # by engine; None: the own broker
        self._waker = waker
        self._stopped = threading.Event()
        self._users = 0
        self._users_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._nudged = True
        self._pass_at = -1e9  # when the last pass began
        self._next_at = 0.0  # when the next pass of a leader begins
        self._due: int | None = None
        self.passes = 0
        self.dispatched = 0  # number of jobs pushed
        self._log = get_logger("asynctask.dispatcher")

    # -- the thread

    def start(self) -> None:
        """Runs passes in its own thread until :meth:`stop` was called as often as :meth:`start`. Only in a registered
        process: jobs that an unregistered one borrows and does not push at once are taken back."""
        with self._users_lock:
            self._users += 1
            if self._users > 1:  # a web server and a worker in one process
                return
            self._stopped.clear()
            self._thread = threading.Thread(target=self._run, name="dispatcher", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread, unless another caller has started it too, and gives back the jobs that are not pushed."""
        with self._users_lock:
            self._users = max(0, self._users - 1)
            if self._users:
                return
            self._stopped.set()
            self._waker.wake()
            if self._thread is not None:
                self._thread.join(10)

    def attach(self, ledger: Ledger) -> None:
        """Sets the ledger with the identity of an engine's process, if that is not the application's; called before
        :meth:`start`."""
        self._ledger = ledger
        self.queues.attach(ledger)

    @property
    def serves(self) -> bool:
        """Whether this program may have foreign queues."""
        return self._is_shared or bool(self._engines)

    def nudge(self) -> None:
        """Runs a pass soon, because jobs or knobs have changed."""
        self._nudged = True
        self._waker.wake()

    def ended(self) -> None:
        """Called when a job of this process has ended and no other runs here: if this process leads, and a queue was empty
        at every measurement, its workers may wait for more jobs."""
        if self.queues.rates.is_any_empty() and any(each.held for each in list(self._leaderships.values())):
            self.nudge()

    def is_led_elsewhere(self, engine: str | None) -> bool:
        """Whether another process, as far as this one knows, leads the dispatch to an engine."""
        leadership = self._leaderships.get(engine)
        return leadership is not None and leadership.elsewhere

    def expect(self, at: int) -> None:
        """Schedules a pass for this time (microseconds; if past, now), when a job is due."""
        if self._note_due(at):
            self._waker.wake()

    def _note_due(self, at: int) -> bool:
        """Notes a due time, from the dispatcher's own thread; returns whether it is earlier than any known one."""
        is_news = self._due is None or at < self._due
        if is_news:
            self._due = at
        return is_news

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._wait(self._step())
                continue
            except Unavailable as error:
                self._log.retrying("dispatch_put_off", error=str(error))
            except Exception:
                self._log.exception("dispatch_failed")
            self._nudged = True
            self._stopped.wait(IDLE_S)
        self.queues.leave()
        for leadership in self._leaderships.values():
            leadership.resign()

    def _wait(self, seconds: float) -> None:
        if not self.serves:
            self._stopped.wait(seconds)
        elif self._waker.wait(seconds) and not self._nudged:
            self._nudged = self._waker.signalled or self._is_any_due()

    def _is_any_due(self) -> bool:
        with self._ledger.database.read() as connection:
            at = lending.first_due(connection, self.queues.names)
        return at is not None and at <= self._ledger.now()

    def _step(self) -> float:
        """Runs a pass if one is due. Returns the seconds until the next one, as far as known."""
        if not self.serves:
            return QUIET_S
        now = self._ledger.clock.monotonic()
        due = self._until_due() <= 0
        leads = any(each.held for each in self._leaderships.values()) and now >= self._next_at
        if not (self._nudged or due or leads):
            return min(self._go_on(), self._until_due())
        if now < self._pass_at + SHORTEST_S:  # one pass for all notifications of this time
            return self._pass_at + SHORTEST_S - now
        self._nudged, self._due = False, None
        asked = self._ledger.now()
        pushed = self.run_pass()
        self._expect_next(asked)
        # Counted from start to start, because a slow pass does not make the jobs last longer.
        self._next_at = now + (self._pause_s if pushed else ACTIVE_S)
        return min(self._go_on(), self._until_due())

    def _expect_next(self, now: int) -> None:
        with self._ledger.database.read() as connection:
            at = lending.next_due(connection, now)
        if at is not None:
            self._note_due(at)

    def _go_on(self) -> float:
        """Acquires or renews leadership if jobs are left, else ends it. Returns the seconds until the next pass."""
        wait = QUIET_S
        for engine in self.queues.left | self._leaderships.keys():
            leadership = self._leadership(engine)
            if engine not in self.queues.left:
                if leadership.held:
                    leadership.resign()
                    self._nudged = True  # other processes may have left work to this one meanwhile
                    wait = 0.0
            elif (others_s := leadership.acquire(least_s=ACTIVE_S)) is None:
                wait = min(wait, max(0.0, self._next_at - self._ledger.clock.monotonic()))
            else:
                wait = min(wait, others_s, IDLE_S)
        return wait

    def _leadership(self, engine: str | None) -> leases.Leadership:
        if engine not in self._leaderships:
            self._leaderships[engine] = leases.Leadership(self._ledger, leases.dispatch_to(engine))
        return self._leaderships[engine]

    def _until_due(self) -> float:
        """Seconds until the next scheduled pass."""
        quiet = self._pass_at + QUIET_S - self._ledger.clock.monotonic()
        return max(0.0, quiet if self._due is None else min(quiet, (self._due - self._ledger.now()) / SECOND))

    def run_pass(self) -> int:
        """Runs one pass, in the dispatcher's thread (tests have none). Returns the number of jobs pushed.

        Raises :class:`Unavailable` if the ledger or the broker does not answer; any other error is logged and costs only
        its part of the pass.
        """
        if not self.serves:
            return 0
        self._pass_at = self._ledger.clock.monotonic()
        pushed = self.queues.run()
        self.passes += 1
        self.dispatched += pushed
        return pushed

    def _leads(self, engine: str | None) -> bool:
        """Whether this pass dispatches to queues with more ready jobs than wanted: only the leader does, because a pass
        does not know what other processes have borrowed and not pushed."""
        return self._leadership(engine).acquire(least_s=ACTIVE_S, anew=True) is None


class DispatchPass:
    """A pass: settles the jobs on their way, computes how many more each queue can use, borrows and pushes them.

    Arguments as in :class:`Dispatcher`; ``leads`` returns whether this process leads the dispatch to an engine; ``expect``
    is called with the time (microseconds) of the next round of a Task.
    """

    def __init__(
        self,
        ledger: Ledger,
        router: Router,
        control: TaskControls,
        outgoing: PushFilter | None,
        *,
        ahead_s: float,
        fair_by_owner: bool,
        background_share: float,
        leads: Callable[[str | None], bool],
        expect: Callable[[int], object],
    ) -> None:
        self._router = router
        self._control = control
        self._outgoing = outgoing
        self._ahead_s = ahead_s
        self._leads = leads
        self._expect = expect
        self._outboxes: dict[str | None, Outbox] = {}  # by engine
        self._shares = Shares(by_owner=fair_by_owner)
        self._credit = Credit(background_share)
        self._closed: set[str | None] = set()  # the rate limits that permit no more starts in this pass
        self.rates = Rates(ledger.clock)
        self.names: Collection[str] = ()  # queues that processes worked at the last pass
        self.left: set[str | None] = set()  # engines for which the last pass left jobs
        self._log = get_logger("asynctask.dispatcher")
        self.attach(ledger)

    def attach(self, ledger: Ledger) -> None:
        """Sets the ledger, with the identity of the process that dispatches."""
        self._ledger = ledger.under(foreign.pusher(ledger.identity))

    def leave(self) -> None:
        """Gives back the jobs that are not pushed."""
        for outbox in self._outboxes.values():
            outbox.leave()

    def run(self) -> int:
        """Runs one pass; returns the number of jobs pushed. Raises :class:`Unavailable`."""
        pushed = self._settle() + self._part(self._dispatch)
        if self._router.is_any_away():
            self._expect(self._ledger.now() + micros(AWAY_S))
        return pushed

    def _outbox_of(self, queue: str) -> Outbox:
        engine = engine_of(queue)
        if engine not in self._outboxes:
            push = partial(self._router.push, engine)
            self._outboxes[engine] = Outbox(self._ledger, queue_holder(engine), push, self._outgoing, self._control)
        return self._outboxes[engine]

    def _settle(self) -> int:
        """Pushes and hands over the borrowed jobs. Jobs that an engine's broker does not accept now are given back."""
        pushed = 0
        for engine, outbox in self._outboxes.items():
            try:
                pushed += self._part(outbox.settle)
            except BrokerUnavailable:
                if engine is None:
                    raise
        return pushed

    def _part(self, act: Callable[[], int]) -> int:
        try:
            return act()
        except Unavailable:
            raise
        except Exception:
            self._log.exception("dispatch_failed")
            return 0

    def _threads(self) -> dict[str, Threads]:
        """The threads of the queues that this process reaches.

        Processes in other languages report how many are busy. Heartbeats of engines are too rare for that: there the Events
        that name the process are counted, which are the jobs that run for longer than a tenth of a second.
        """
        with self._ledger.database.read() as connection:
            rows = [row for row in performing(connection, self._ledger.now()) if is_engine(str(row["identity"]))]
            named = foreign.working(connection, [str(row["identity"]) for row in rows])
        found: dict[str, Threads] = defaultdict(Threads)
        for row in rows:
            queues = {queue for queue in loads(str(row["queues"])) if self._router.reaches(queue)}
            of_engine = any(engine_of(queue) is not None for queue in queues)
            busy = named.get(str(row["identity"]), 0) if of_engine else int(row["busy"])
            for queue in queues if not row["quiet"] else ():
                found[queue].add(int(row["concurrency"]), busy)
        return found

    def _dispatch(self) -> int:
        self.left = set()
        self._closed.clear()
        threads = self._threads()
        self.names = threads.keys()
        offers, alone = self._offered(threads) if threads else ([], [])
        if not (offers or alone):
            return 0
        waiting = {queue: sum(counts.values()) for queue, counts in self._router.waiting(threads.keys()).items()}
        reached = {queue: its for queue, its in threads.items() if self._router.reaches(queue)}
        room = wanted(reached, waiting, self.rates, self._ahead_s)
        found: dict[str, list[WorkSource]] = defaultdict(list)
        for each in self._shares.sources(offers, alone, self._send_task, self._send_alone):
            found[each.queue].append(each)
        open_ = self._open(room, offers, alone)
        led = {engine: self._leads(engine) for engine in {engine_of(queue) for queue in open_}}
        for queue in open_:
            if not led[engine_of(queue)]:
                del found[queue]
        sent = {
            queue: self._dispatch_queue(room[queue], queue, sources) for queue, sources in found.items() if room.get(queue)
        }
        for queue in room:
            self.rates.note(queue, waiting.get(queue, 0) + sent.get(queue, 0), threads[queue])
        # A Task whose round was borrowed leaves no jobs: the time of its next round is scheduled.
        left = {job.queue for job in alone} | {offer.queue for offer in offers if not offer.has_rounds}
        self.left |= {engine_of(queue) for queue in left}
        return sum(sent.values())

    def _offered(self, threads: Mapping[str, Threads]) -> tuple[Sequence[Offer], Sequence[Alone]]:
        for engine in {engine_of(queue) for queue in threads}:
            foreign.trim(self._ledger, queue_holder(engine))
        with self._ledger.database.read() as connection:
            offers = lending.pick(connection, self._ledger, threads.keys(), after=self._shares.last)
            paused = lending.paused_queues(connection)
            # Jobs for a queue that no process works stay in the ledger, and delay no others.
            using = {queue for queue, its in threads.items() if its.idle or self.rates.known(queue)}
            now, busy = self._ledger.now(), threads.keys() - using - paused
            # No notification arrives when a busy queue can use them, so a leader runs passes.
            self.left = {engine_of(job.queue) for job in lending.alone_due(connection, now, busy, limit=1)}
            return offers, lending.alone_due(connection, now, using - paused)

    def _open(self, room: Mapping[str, int], offers: Sequence[Offer], alone: Sequence[Alone]) -> set[str]:
        """The queues for which more jobs may be ready than are wanted. For the others every job is wanted, and concurrent
        passes push each of these once."""
        ready: dict[tuple[str, int], float] = defaultdict(float)
        read: dict[str, int] = defaultdict(int)
        for job in alone:
            ready[job.queue, job.priority] += 1
        for offer in offers:
            read[offer.queue] += 1
            ready[offer.queue, offer.priority] += (offer.is_plain and offer.left) or math.inf
        full = {queue for queue, count in read.items() if count >= lending.PAGE}
        return full | {queue for (queue, _), count in ready.items() if count > room.get(queue, 0)}

    def _dispatch_queue(self, room: int, queue: str, sources: list[WorkSource]) -> int:
        """Dispatches priorities in order, after the jobs that the queue owes to larger ones; sources of one priority get
        equal shares."""
        sent, smallest = 0, min(each.priority for each in sources)
        share = max(1, room // len({each.group for each in sources if each.priority == smallest}))
        if all(each.priority == smallest for each in sources):
            self._credit.forget(queue)
        while sources and sent < room:
            first = min(each.priority for each in sources)
            later = [each for each in sources if each.priority > first]
            owed = self._credit.owed(queue) if later else 0
            source = self._shares.next(later if owed else [each for each in sources if each.priority == first])
            count = min(share, room - sent, owed or room, MOST_BORROWED)
            got = self._part(partial(source.get, count, first if owed else None))
            if got < count:
                sources.remove(source)
            if got:
                self._shares.served(source)
            if later or source.priority > smallest:
                self._credit.note(queue, got, got if source.priority > smallest else 0)
            sent += got
        self._settle()
        return sent

    def _send_task(self, offer: Offer, count: int, at: int | None) -> int:
        if offer.rate in self._closed:
            return 0
        now, holder, limited = self._ledger.now(), queue_holder(engine_of(offer.queue)), offer.limit is not None
        if limited:
            count = foreign.lease(self._ledger, holder, offer.task_id, count)
        found = lending.borrow(self._ledger, offer, count)
        self._closed |= found.closed
        if found.next_at is not None and found.next_at > now:
            self._expect(found.next_at)
        if found.is_locked:
            self._expect(now + micros(ACTIVE_S))
        if found.count:
            self._outbox_of(offer.queue).add(found, now, offer.task_id, limited=limited, at=at)
            return found.count
        if found.loans:
            lending.end_empty(self._ledger, [loan.id for loan, _ in found.loans])
        if limited and count:
            foreign.lease(self._ledger, holder, offer.task_id, 0)
        return 0

    def _send_alone(self, jobs: list[Alone], count: int, at: int | None) -> int:
        """Claims jobs and removes them from ``jobs``; skips those that another dispatcher has taken meanwhile."""
        sent = 0
        while jobs and sent < count:
            part = jobs[: count - sent]
            del jobs[: len(part)]
            now = self._ledger.now()
            found = lending.Borrowed(claimed=lending.claim_alone(self._ledger, [job.event_id for job in part]))
            self._outbox_of(part[0].queue).add(found, now, at=at)
            sent += found.count
        return sent
