"""The dispatcher: moves jobs from the ledger to the broker, a few at a time, under each Task's knobs.

It pushes only as many jobs as will be used soon. So a knob takes effect within a second, the broker stays small, and losing
the broker loses nothing.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from asynctask.brokers.base import Broker, Copy
from asynctask.clock import SECOND, micros
from asynctask.dispatch.control import Control
from asynctask.dispatch.demand import Capacity, Credit, Demand, Load, QueueRates, Shares, Surplus
from asynctask.dispatch.outbox import EngineQueues, Outbox, PushFilter, Router, engine_of
from asynctask.errors import BrokerUnavailable, Unavailable
from asynctask.ledger import dispatchable, leases, reservations
from asynctask.ledger.base import Ledger, loads
from asynctask.ledger.processes import only_records, performing
from asynctask.ledger.reservations import Alone, Ready, Runnable, reserve_small
from asynctask.logs import get_logger

# Seconds between two rounds

SHORTEST_S = 0.05
"""The minimum, however little work is kept in the queues. Small Tasks submitted meanwhile wait for the next round."""

ACTIVE_S = 0.2
"""Of the leader, at most, and after a round that pushed nothing: the jobs of each round have to last longer."""

HELP_S = 0.5
"""Of a process whose queues ran empty, while another leads, on average: it may be :data:`_HELPS` rounds ahead. With no
leader, retry sooner; double the pause after each round that pushed nothing, up to this: consecutive short lists begin at
once, and untracked jobs do not cost a round each."""

_HELPS = 5
"""The threads of a process whose jobs take seconds come free one after the other: none of them waits for half a second."""

ALONE_S = 0.1
"""Of a process without a dispatching thread that submits small Tasks."""

IDLE_S = 1.0
"""Until the next check whether another process still leads."""

QUIET_S = 60.0
"""With nothing left to dispatch; new work ends the pause."""

# Other times

LEASE_S = 5.0
"""Lease of a reservation during its push. Longer than any push that works; after a crash another process takes it over."""

LOOK_AGAIN_S = 15.0
"""A stand-alone job that was dispatched this long ago and is not known to have begun may be lost: the broker is queried."""

OBSERVE_S = 0.4
"""Between two queries of the other processes while rounds go on: a heartbeat comes once a second at most."""

PUSHING_S = 0.5
"""Longest time for which larger priorities wait while another dispatcher pushes jobs of a Task that has more."""

TURN_S = 0.25
"""Time that a round dispatches in one queue before it continues in the next; then the Tasks are read again."""

HELD_S = 0.5
"""Until a Task whose row another session had locked is retried."""

_MAX_RESERVED = 1_000
"""Jobs of one reservation."""


_Send = Callable[[int, int | None], int]
"""Dispatches up to this many jobs of one source, at another priority if one is given; returns the number dispatched."""

_Sources = dict[Hashable, dict[Hashable, _Send]]
"""Sources of jobs, grouped by those that share alike: an owner's Tasks together, or each by itself."""


class Dispatcher:
    """One dispatcher; any number may run, in any process, and one suffices.

    The process that made something ready runs a round for it. What is left then, because there is more than the workers can
    use, is dispatched by one leader at a time, round after round until nothing is left; when it dies, another process leads
    within a second. Meanwhile, the rounds of others push what their own process can use: no round knows what others have
    reserved and not pushed yet, so a hundred rounds for all workers would push a hundred times what is wanted.

    Arguments: ``ahead_s``: seconds of work that wait in the queue; ``outgoing`` filters what is pushed. :meth:`attach` sets
    what this process can use; for others their last heartbeat counts. ``engines``: the attached engines by name, into whose
    queues the jobs of their workers go; one whose broker does not answer delays nothing else. ``fair_by_owner``: the owners
    of Tasks of one priority share alike, not the Tasks. ``background_share``: the share of the jobs that is of larger
    priorities while smaller ones wait.
    """

    def __init__(
        self,
        ledger: Ledger,
        broker: Broker,
        *,
        ahead_s: float = 0.25,
        outgoing: PushFilter | None = None,
        engines: Mapping[str, EngineQueues] = MappingProxyType({}),
        fair_by_owner: bool = False,
        background_share: float = 0.0,
    ) -> None:
        self._ledger = ledger
        self._engines = engines
        self._router = Router(broker, engines, ledger.clock)
        self._outgoing = outgoing
        self._ahead_s = ahead_s
        self._pause_s = min(ACTIVE_S, max(SHORTEST_S, 0.8 * ahead_s))
        self._local: Callable[[], Load] | None = None
        self._control = Control(ledger, broker)
        push = partial(self._router.push, None)
        self._outbox = Outbox(ledger, push, outgoing, self._pushed, self._control.recall)
        self._outboxes: dict[str | None, Outbox] = {None: self._outbox}  # by engine; None: of the own broker
        self._lent = Outbox(ledger, push, outgoing)
        self._round_lock = threading.Lock()
        self._workers: Sequence[Mapping[str, object]] = []  # the worker processes, by their last heartbeats
        self._observed_until = 0.0
        self._fair_by_owner = fair_by_owner
        self._shares = Shares()
        self._many: dict[Hashable, int] = {}  # how many small Tasks are served together
        self._credit = Credit(background_share)
        self._up_to: dict[str, int] = {}  # larger priorities of a queue are left to the next round
        self._turn_until = 0.0  # until when this round dispatches in the current queue
        self._is_cut = False  # the last round ended before everything that was wanted was dispatched
        self._last_served: dict[tuple[str, int], int] = {}  # the Task of a queue and priority that got jobs last
        self._place = zlib.crc32(ledger.identity.encode()) / 2**32  # where among many Tasks this process begins
        self._rates = QueueRates(ledger.clock)
        self._surplus = Surplus(ledger.clock)
        self._wake = threading.Event()
        self._stopping = False
        self._users = 0
        self._users_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_left = True
        self._nudged = True
        self._submitted = False
        self._round_at = -1e9  # when the last round began
        self._ran_dry = False
        self._own_round_at = 0.0  # earliest next round of this process for its own empty queues
        self._used_up_at = 0.0  # when what the last round pushed will be nearly used up
        self._empty_rounds = 0  # consecutive rounds of its own that pushed nothing
        self._due: int | None = None
        self._is_due = self._has_held = False  # something was due in the last round; the row of a Task that was, was locked
        self._unsettled_rounds = 0  # rounds, one after the other, that found rows locked
        self._leadership = leases.Leadership(ledger, leases.DISPATCH)
        self.rounds = 0
        self.dispatched = 0  # jobs pushed by these rounds
        self._log = get_logger("asynctask.dispatcher")

    # -- the thread

    def start(self) -> None:
        """Runs rounds in its own thread until each :meth:`start` has had its :meth:`stop`."""
        with self._users_lock:
            self._users += 1
            if self._users > 1:  # a web server and a worker in one process
                return
            self._stopping = False
            self._thread = threading.Thread(target=self._run, name="dispatcher", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread, unless another caller started it too."""
        with self._users_lock:
            self._users = max(0, self._users - 1)
            if self._users:
                return
            self._stopping = True
            self._wake.set()
            if self._thread is not None:
                self._thread.join(10)

    def attach(self, local: Callable[[], Load] | None) -> None:
        """Sets what this process can use, if it performs jobs; None: it no longer does."""
        self._local = local

    def nudge(self) -> None:
        """Runs a round at once, because something changed."""
        self._nudged = True
        self._wake.set()

    @property
    def soon(self) -> bool:
        """Whether this process should dispatch a small Task that is submitted now: its thread does it, with all that come
        together, or its last round is a while ago. Otherwise the leader is notified of the Task, which costs less."""
        return self._has_thread or self._ledger.clock.monotonic() - self._round_at >= ALONE_S

    def submitted(self) -> None:
        """Runs a round for a small Task: soon, by this process's thread, or here if it has none."""
        if not self._has_thread:
            self._round(anew=False)
            return
        self._submitted = True
        self._wake.set()

    @property
    def _has_thread(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def expect(self, at: int) -> None:
        """Schedules a round at this time (microseconds; the past: now), when something is due."""
        if at <= self._ledger.now():
            self.nudge()
        elif self._due is None or at < self._due:
            self._due = at
            self._wake.set()

    def _expect_later(self, at: int) -> None:
        """:meth:`expect` for a Task that a round has queried: what is due now is left for the next round."""
        if at > self._ledger.now():
            self.expect(at)

    def dry(self, worked: bool) -> None:
        """Notes that this process found less in its queues than it could use; ``worked``: it had jobs since the last call.

        Runs a round at once if there may be more; an idle process that polls costs nothing.
        """
        if worked or self._is_left:
            self._ran_dry = True
            self._wake.set()

    def _run(self) -> None:
        while not self._stopping:
            pause = IDLE_S
            try:
                pause = self._step()
            except Unavailable as error:
                self._nudged = True
                self._log.retrying("dispatch_put_off", error=str(error))
            except Exception:
                self._nudged = True
                self._log.exception("dispatch_failed")
            self._wake.wait(pause)
            self._wake.clear()
        self._leadership.resign()

    def _step(self) -> float:
        """Runs a round if there is a reason. Returns the seconds until the next, as far as known."""
        now = self._ledger.clock.monotonic()
        due = self._due is not None and self._due <= self._ledger.now()
        nudged, self._nudged = self._nudged, False
        own = self._ran_dry and now >= self._own_round_at
        submitted = self._submitted and now >= self._round_at + SHORTEST_S
        if nudged or submitted or due or own or self._leadership.held:
            only_due = not (nudged or submitted or own or self._leadership.held)
            pause = self._reasoned_round(anew=nudged or due, due=due, own=own, only_due=only_due)
        else:
            pause = max(0.0, self._own_round_at - now) if self._ran_dry else IDLE_S
        together = self._round_at + SHORTEST_S - self._ledger.clock.monotonic()
        waits = max(0.0, together) if self._submitted else QUIET_S
        return min(self._go_on(pause), self._until_due(), waits)

    def _reasoned_round(self, *, anew: bool, due: bool, own: bool, only_due: bool = False) -> float:
        """Runs one round; returns the pause after which its jobs are nearly used up. ``only_due``: for no reason but
        ``due``."""
        clock = self._ledger.clock
        self._submitted = self._ran_dry = False
        if due:
            self._due = None
        began = clock.monotonic()
        if own:  # only a round of its own delays the next one: others do not serve this process first
            self._own_round_at = max(self._own_round_at, began - (_HELPS - 1) * HELP_S) + HELP_S
        alone = own and not anew and self._leadership.elsewhere
        pushed = self._round(anew=anew, own=alone, only_due=only_due)
        if own and not self._leadership.elsewhere:
            self._empty_rounds = 0 if pushed else self._empty_rounds + 1
            self._own_round_at = clock.monotonic() + min(HELP_S, SHORTEST_S * 2 ** min(self._empty_rounds, 9))
        if due and (next_due := self._next_due()) is not None:
            self.expect(next_due)
        if self._is_cut:
            return 0.0
        if pushed:  # from start to start, because the jobs last no longer if a round is slow
            self._used_up_at = began + self._pause_s
        rest = self._used_up_at - clock.monotonic()
        return max(SHORTEST_S, rest) if pushed or rest > 0 else ACTIVE_S

    def _next_due(self) -> int | None:
        with self._ledger.database.read() as connection:
            return dispatchable.next_due(connection, self._ledger.now())

    def _go_on(self, pause: float) -> float:
        """Acquires, renews or ends leadership by what is left. Returns the wait until the next round."""
        with self._round_lock:  # a round of another thread may acquire it
            if not self._is_left:
                if self._leadership.held:
                    self._leadership.resign()
                    self.nudge()  # others may have left work to this process until now
                return pause if self._ran_dry else QUIET_S
            others_s = self._leadership.acquire(least_s=ACTIVE_S)
        if others_s is None:
            return 0.0 if self._leadership.took_over else pause
        return min(others_s, pause if self._ran_dry else IDLE_S)

    def _until_due(self) -> float:
        return QUIET_S if self._due is None else max(0.0, (self._due - self._ledger.now()) / SECOND)

    # -- loans

    def lend(self, task_id: int, count: int, places: int) -> Sequence[tuple[Copy, Ready]]:
        """Lends up to ``count`` jobs of a Task to this process, to follow its jobs in ``places`` of the Task's
        ``parallel``.

        Each comes with its ledger record; see :func:`asynctask.ledger.reservations.lend_jobs`. Raises :class:`Unavailable`.
        """
        jobs = reservations.lend_jobs(self._ledger, task_id, count, places)
        by_id = {job.job_id: job for job in jobs}
        return [(copy, by_id[copy.jid]) for copy in self._lent.taken(jobs)]

    # -- one round

    def round(self) -> int:
        """Runs one round, or as many as needed: observes the workers, settles the outbox, reserves and pushes what is
        wanted. Returns the number of jobs pushed.

        Raises :class:`Unavailable` if the ledger or the broker does not answer; any other error is logged and costs only
        its part of the round.
        """
        pushed = self._round(anew=True)
        while self._is_cut:
            pushed += self._round(anew=False)
        return pushed

    def _round(self, *, anew: bool, own: bool = False, only_due: bool = False) -> int:
        """``own``: for this process alone; it does not observe others, because each of a thousand processes would read a
        thousand rows. ``only_due``: it dispatches only if something is due: all processes come at that time, and the first
        of them dispatches. But one with engines always does: who was first may not reach their queues."""
        with self._round_lock:
            self._round_at = self._ledger.clock.monotonic()
            late = self._leadership.take_late()
            observes = anew or late is not None or (not own and self._round_at >= self._observed_until)
            again = self._observe(late) if observes else {}
            pushed = self._settle()
            for task_id, queue in again.items():
                if self._router.reaches(queue):
                    pushed += self._part(partial(self._push_again, task_id, queue, late))
            if not only_due or self._engines or self._is_due or self._is_alone_due():
                pushed += self._part(partial(self._dispatch, self._loads(() if own else self._workers)))
            self.rounds += 1
            self.dispatched += pushed
            self._expect_unsettled()
            if (self._is_left or self._leadership.held) and threading.current_thread() is not self._thread:
                self._wake.set()  # a leader has to continue
            return pushed

    def _observe(self, late: str | None) -> Mapping[int, str]:
        """Queries the other processes and what is due. Returns the Tasks, with their queues, whose reservation a process,
        or ``late``, left unconfirmed."""
        now, until = self._ledger.now(), self._ledger.clock.monotonic() + OBSERVE_S
        if self._ledger.held.keeps:
            dispatchable.catch_up(self._ledger)
        with self._ledger.database.read() as connection:
            again = reservations.unconfirmed(connection, now, late)
            self._workers = performing(connection, now)
            due = dispatchable.due_tasks(connection, now)
        self._observed_until = until
        woken = dispatchable.wake_due(self._ledger, due)
        self._is_due = woken.due > 0
        self._has_held = bool(woken.held)
        return again

    def _is_alone_due(self) -> bool:
        with self._ledger.database.read() as connection:
            return dispatchable.is_alone_due(connection, self._ledger.now())

    def _outbox_of(self, queue: str) -> Outbox:
        engine = engine_of(queue)
        if engine not in self._outboxes:
            push = partial(self._router.push, engine)
            self._outboxes[engine] = Outbox(self._ledger, push, self._outgoing, self._pushed, self._control.recall)
        return self._outboxes[engine]

    def _settle(self) -> int:
        """Pushes and confirms what is reserved. What an engine's broker does not take now goes with a later round, of this
        process or, when the lease of the reservation has expired, of another."""
        pushed = 0
        for engine, outbox in self._outboxes.items():
            try:
                pushed += self._part(outbox.settle)
            except BrokerUnavailable:
                if engine is None:
                    raise
        return pushed

    def _expect_unsettled(self) -> None:
        """What a locked row of a Task kept back goes with a round soon: until its reservation is confirmed, no other
        dispatcher can serve the Task."""
        is_settled = all(outbox.is_settled for outbox in self._outboxes.values()) and not self._has_held
        self._unsettled_rounds = 0 if is_settled else self._unsettled_rounds + 1
        if not is_settled:
            self.expect(self._ledger.now() + micros(min(HELD_S, SHORTEST_S * 2 ** min(self._unsettled_rounds - 1, 9))))
        elif self._ledger.held.keeps:
            self.expect(self._ledger.now() + micros(HELD_S))

    def _part(self, act: Callable[[], int]) -> int:
        try:
            return act()
        except Unavailable:
            raise
        except Exception:
            self._log.exception("dispatch_failed")
            return 0

    def _loads(self, workers: Iterable[Mapping[str, object]]) -> list[Load]:
        loads_ = [
            Load(
                str(w["identity"]),
                loads(str(w["queues"])),
                int(str(w["concurrency"])) - int(str(w["busy"])),
                float(str(w["rate"])),
                int(str(w["concurrency"])),
            )
            for w in workers
            if not w["quiet"]
        ]
        if self._local is not None:
            own = self._local()
            loads_ = [load for load in loads_ if load.identity != own.identity] + [replace(own, is_local=True)]
        return loads_

    def _dispatch(self, loads_: Sequence[Load]) -> int:
        self._is_cut = False
        used = Capacity(loads_, self._router.reaches)
        tasks, alone = self._dispatchable(used)
        self._is_left = bool(tasks or alone)
        if not self._is_left:
            return 0
        rounds = {task.task_id for task in tasks if task.has_rounds}
        waiting = self._router.waiting(used.queues)
        soon = {
            queue: count
            for queue, count in used.soon(waiting, self._rates, self._ahead_s).items()
            if self._router.reaches(queue)
        }
        room = Demand(soon, waiting, used.free, is_ordered=self._router.is_ordered)
        found = self._sources(tasks, alone, rounds)
        if (open_ := self._open(room, tasks, alone)) and not self._is_for_all():
            self._limit(found, open_, rounds, loads_, waiting)
        sent = {queue: self._dispatch_queue(room, queue, sources) for queue, sources in found.items()}
        for queue in soon:
            waits, went = sum(waiting.get(queue, {}).values()), sent.get(queue, 0)
            # A remainder left on purpose is no longer wanted: the rate depends on whether all wanted jobs went.
            self._rates.note(queue, waits, went, went + room.left(queue), used.free[queue], used.threads[queue])
        if self._leadership.held:
            self._take_back(soon, waiting)
        # A Task whose round was reserved is not left over: it set the time of its next one.
        self._is_left = bool(alone or rounds or not all(task.has_rounds for task in tasks))
        return sum(sent.values())

    def _take_back(self, soon: Mapping[str, int], waiting: Mapping[str, Mapping[int, int]]) -> None:
        """What waits too long in the broker goes back to the ledger, and is dispatched by the knobs of a later moment."""
        for queue, count in soon.items():
            waits = sum(waiting.get(queue, {}).values())
            if engine_of(queue) is None and (over := self._surplus.note(queue, waits, count)):
                self._control.withdraw_last(queue, over)

    def _dispatchable(self, used: Capacity) -> tuple[Sequence[Runnable], Sequence[Alone]]:
        with self._ledger.database.read() as connection:
            since = self._ledger.now() + micros(LEASE_S - PUSHING_S)
            tasks, self._up_to = reservations.runnable(
                connection, self._ledger, used.queues, after=self._last_served, since=since, place=self._place
            )
            # Jobs for a queue that nobody works stay in the ledger, and delay nothing else.
            return tasks, reservations.alone_due(connection, self._ledger.now(), used.wanting)

    def _sources(
        self, tasks: Sequence[Runnable], alone: Sequence[Alone], rounds: set[int]
    ) -> dict[str, dict[int, _Sources]]:
        """The sources of jobs, by queue and priority. All single jobs of a priority count as one Task. All small Tasks (of
        an owner) are served together, and count as that many Tasks."""
        found: dict[str, dict[int, _Sources]] = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
        small: dict[Hashable, list[int]] = {}
        single: dict[tuple[str, int], list[int]] = defaultdict(list)
        for job in alone:
            single[job.queue, job.priority].append(job.event_id)
        for (queue, priority), ids in single.items():
            key = "alone", queue, priority
            found[queue][priority][key][key] = partial(self._reserve_alone, ids, queue)
        for task in tasks:
            owner = ("owner", task.owner) if self._fair_by_owner else None
            name: Hashable = ("small", task.queue, task.priority, owner) if task.small else task.task_id
            sources = found[task.queue][task.priority][owner or name]
            if task.has_rounds:
                sources[name] = partial(self._reserve_round, task.task_id, task.queue, rounds)
            elif not task.small:
                sources[name] = partial(self._reserve_task, task.task_id, task.queue)
            elif name in sources:
                small[name].append(task.task_id)
            else:
                small[name] = [task.task_id]
                sources[name] = partial(self._reserve_small, small[name], task.queue)
        self._many = {name: len(ids) for name, ids in small.items()}
        self._shares.keep({key for by in found.values() for at, groups in by.items() for key in _keys(at, groups)})
        return found

    def _open(self, room: Demand, tasks: Sequence[Runnable], alone: Sequence[Alone]) -> set[tuple[str, int]]:
        """The queues and priorities of which more may be ready than is wanted. Of the others every job is wanted, and
        concurrent rounds push each of these once."""
        ready: dict[tuple[str, int], float] = defaultdict(float)
        read: dict[str, int] = defaultdict(int)
        for job in alone:
            ready[job.queue, job.priority] += 1
        for task in tasks:
            read[task.queue] += 1
            if not task.has_rounds:
                ready[task.queue, task.priority] += task.left or math.inf  # the number of jobs due again is unknown
        full = {queue for queue, count in read.items() if count >= reservations.PAGE}
        return {
            (queue, priority)
            for (queue, priority), count in ready.items()
            if (wanted := room.at(queue, priority)) > 0 and (count > wanted or queue in full)
        }

    def _is_for_all(self) -> bool:
        """Whether this round pushes for all processes: one process at a time does, because no round knows what others have
        reserved and not pushed."""
        if self._has_thread:
            return self._leadership.acquire(least_s=ACTIVE_S, anew=True) is None
        return not self._leadership.query_elsewhere()  # the leader has to continue

    def _limit(
        self,
        found: Mapping[str, dict[int, _Sources]],
        open_: set[tuple[str, int]],
        rounds: set[int],
        loads_: Iterable[Load],
        waiting: Mapping[str, Mapping[int, int]],
    ) -> None:
        """Limits open queues to what this process can use. A Task with an interval limits itself; and the leader may not
        reach the queues of an engine to which this process only submits.

        Each process begins with a different Task; otherwise all would serve the first of those with equal shares.
        """
        own = Capacity([load for load in loads_ if load.is_local])
        soon = own.soon({}, self._rates, self._ahead_s)
        room = Demand(soon, waiting, own.free, is_ordered=self._router.is_ordered)
        for queue, priority in open_:
            if engine_of(queue) is not None and queue not in soon:
                continue
            groups = list(found[queue][priority].items())
            turned = int(self._place * len(groups))
            found[queue][priority] = dict(groups[turned:] + groups[:turned])
            for _, sources in groups:
                for name in sources.keys() - rounds:
                    sources[name] = partial(_send_within, room, queue, priority, sources[name])

    def _dispatch_queue(self, room: Demand, queue: str, sources: Mapping[int, _Sources]) -> int:
        """Dispatches priorities in order; first what the queue owes to larger priorities."""
        self._turn_until = self._ledger.clock.monotonic() + TURN_S
        first, *others = sorted(sources)
        if not others:
            self._credit.forget(queue)
            return self._share_next(room, queue, first, sources)
        later: _Sources = {(priority, key): found for priority in others for key, found in sources[priority].items()}
        behind = self._share(room, queue, first, later, self._credit.owed(queue))
        sent = self._share_next(room, queue, first, sources)
        for priority in others:
            behind += self._share_next(room, queue, priority, sources)
        self._credit.note(queue, sent + behind, behind)
        return sent + behind

    def _share_next(self, room: Demand, queue: str, priority: int, sources: Mapping[int, _Sources]) -> int:
        """Dispatches a priority, unless another dispatcher holds a Task of a smaller one, or the turn ended before those of
        a smaller one had what they can use."""
        if room.at(queue, priority) <= 0 or self._up_to.get(queue, priority) < priority:
            return 0
        return self._share(room, queue, priority, sources[priority])

    def _note_in_hand(self, queue: str, priority: int, until: int) -> None:
        if until > self._ledger.now() + micros(LEASE_S - PUSHING_S):
            self._leave_above(queue, priority)

    def _leave_above(self, queue: str, priority: int) -> None:
        self._up_to[queue] = min(priority, self._up_to.get(queue, priority))

    def _share(self, room: Demand, queue: str, priority: int, groups: _Sources, owed: int | None = None) -> int:
        """Sources of one priority share alike. ``owed``: they are of larger priorities, and this many of their jobs go
        now."""
        reserved, at = 0, None if owed is None else priority
        groups = {key: sources for key, sources in groups.items() if sources}
        while groups and (wanted := self._wanted(room, queue, priority, owed, reserved)) > 0:
            share = wanted / sum(self._many.get(group, 1) for group in groups)
            for group in self._shares.order(groups):
                if reserved and self._ledger.clock.monotonic() >= self._turn_until:
                    self._is_cut = True
                    self._leave_above(queue, priority)
                    self._settle()
                    return reserved
                sources = groups[group]
                source = self._shares.order(sources)[0]
                wanted = self._wanted(room, queue, priority, owed, reserved)
                asked = max(1, int(share * self._many.get(group, 1)))
                count = min(asked, wanted, _MAX_RESERVED)
                sent = self._part(partial(sources[source], count, at)) if count > 0 else 0
                self._renew()
                self._note_served(room, queue, priority, group, source, sent)
                reserved += sent
                if sent < count or sent == 0:
                    del sources[source]
                if not sources:
                    del groups[group]
            self._settle()
        return reserved

    def _renew(self) -> None:
        """Renews leadership: a round of many Tasks may last longer than the lease."""
        if self._leadership.held:
            self._leadership.acquire(least_s=ACTIVE_S)

    def _wanted(self, room: Demand, queue: str, priority: int, owed: int | None, reserved: int) -> int:
        wanted = room.at(queue, priority)
        return wanted if owed is None else min(wanted, owed - reserved)

    def _note_served(self, room: Demand, queue: str, priority: int, group: Hashable, source: Hashable, sent: int) -> None:
        room.take(queue, priority, sent)
        for key in {group, source}:
            self._shares.served(key, sent / self._many.get(key, 1))
        if sent and isinstance(source, int):
            self._last_served[queue, priority] = source

    def _reserve_task(self, task_id: int, queue: str, count: int, at: int | None) -> int:
        note, now = partial(self._note_in_hand, queue), self._ledger.now()
        found = reservations.reserve(self._ledger, task_id, count, lease_s=LEASE_S, expect=self._expect_later, in_hand=note)
        if found:
            self._outbox_of(queue).add(found, now, task_id, at=at)
        return len(found)

    def _reserve_round(self, task_id: int, queue: str, rounds: set[int], count: int, at: int | None) -> int:
        """Removes the Task from ``rounds``, those that were not reserved yet, so that none begins two rounds in one."""
        if task_id not in rounds:
            return 0
        rounds.remove(task_id)
        early = not any(
            only_records(process, queue) for process in self._workers
        )  # for no process there waits for the time
        now = self._ledger.now()
        found = reservations.reserve(self._ledger, task_id, count, lease_s=LEASE_S, early=early, expect=self.expect)
        if found:
            self._outbox_of(queue).add(found, now, task_id, at=at)
        return len(found)

    def _reserve_small(self, task_ids: list[int], queue: str, count: int, at: int | None) -> int:
        """Removes the queried Tasks from ``task_ids``."""
        sent = 0
        while task_ids and sent < count:
            some = task_ids[: count - sent]
            del task_ids[: len(some)]
            now = self._ledger.now()
            found = self._reserve_together(some, count - sent)
            for task_id, jobs in found.items():
                self._outbox_of(queue).add(jobs, now, task_id, at=at)
                sent += len(jobs)
            for task_id in some:
                if task_id not in found and sent < count:
                    sent += self._part(partial(self._reserve_task, task_id, queue, count - sent, at))
        return sent

    def _reserve_together(self, task_ids: list[int], count: int) -> dict[int, list[Ready]]:
        try:
            return reserve_small(self._ledger, task_ids, count, lease_s=LEASE_S)
        except Unavailable:
            raise
        except Exception:  # one of them cannot be reserved: reserves each by itself
            self._log.exception("dispatch_failed", tasks=len(task_ids))
            return {}

    def _reserve_alone(self, ids: list[int], queue: str, count: int, at: int | None) -> int:
        """Removes what it reserves from ``ids``; skips those that another dispatcher took meanwhile."""
        sent = 0
        while ids and sent < count:
            part = ids[: count - sent]
            del ids[: len(part)]
            now = self._ledger.now()
            found = reservations.reserve_alone(self._ledger, part, look_again_s=LOOK_AGAIN_S)
            self._outbox_of(queue).add(found, now, at=at)
            sent += len(found)
        return sent

    def _push_again(self, task_id: int, queue: str, late: str | None) -> int:
        """Takes over a Task's reservation that a dispatcher, ``late`` or one whose lease has expired, did not confirm:
        pushes its whole range, and due jobs that the broker does not hold. An engine has no fence and does not report what
        it holds: only the range, and not before the lease has expired."""
        own, now = engine_of(queue) is None, self._ledger.now()
        found = reservations.take_again(self._ledger, task_id, lease_s=LEASE_S, late=late if own else None)
        if found is None:
            return 0
        out = reservations.out_before(self._ledger, task_id) if own else []
        held = self._router.held({(each.job_id, each.attempt): (each.queue, each.worker_name) for each in out}, ())
        found += [each for each in out if (each.job_id, each.attempt) not in held]
        self._outbox_of(queue).add(found, now, task_id)
        return self._settle()

    def _pushed(self) -> None:
        self._ran_dry = False  # the next fetch finds what was pushed


def _send_within(room: Demand, queue: str, priority: int, send: _Send, count: int, at: int | None) -> int:
    count = min(count, room.at(queue, priority))
    sent = send(count, at) if count > 0 else 0
    room.take(queue, priority, sent)
    return sent


def _keys(priority: int, groups: _Sources) -> Iterator[Hashable]:
    for group, sources in groups.items():
        yield from (group, (priority, group))
        yield from sources
