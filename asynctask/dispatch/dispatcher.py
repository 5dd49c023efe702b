"""The dispatcher: moves jobs from the ledger to foreign queues, a few at a time, under each Task's knobs.

A foreign queue is an attached engine's, or one of Redis that workers in another language work. The dispatcher borrows jobs
as a worker process does, pushes them, and hands them over to the queue (:mod:`asynctask.ledger.foreign`). It pushes only as
many as will be used soon. So a knob takes effect within a second, the engine's broker stays small, and losing it loses
nothing. The application's own worker processes borrow for themselves.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from asynctask.brokers.base import Broker
from asynctask.clock import SECOND, micros
from asynctask.dispatch.control import Control
from asynctask.dispatch.demand import MOST_BORROWED, Capacity, Credit, Demand, Load, QueueRates, Shares
from asynctask.dispatch.outbox import EngineQueues, Outbox, Router
from asynctask.errors import BrokerUnavailable, Unavailable
from asynctask.ledger import foreign, leases, lending
from asynctask.ledger.base import Ledger, loads
from asynctask.ledger.foreign import engine_of
from asynctask.ledger.lending import Alone, Offer, queue_holder
from asynctask.ledger.processes import is_engine, performing
from asynctask.logs import get_logger
from asynctask.sidekiq.copies import PushFilter

# Seconds between two rounds

SHORTEST_S = 0.05
"""The minimum, however little work is kept in the queues. Small Tasks submitted meanwhile wait for the next round."""

ACTIVE_S = 0.2
"""Of a leader, at most, and after a round that pushed nothing: the jobs of each round have to last longer."""

IDLE_S = 1.0
"""Until the next check whether another process still leads."""

QUIET_S = 60.0
"""With nothing left to dispatch; new work ends the pause."""

# Other times

OBSERVE_S = 0.4
"""Between two queries of the other processes while rounds go on: a heartbeat comes once a second at most."""

TURN_S = 0.25
"""Time that a round dispatches in one queue before it continues in the next; then the Tasks are read again."""

HELD_S = 0.5
"""Until a Task whose row another transaction had locked is retried, at most."""


_Send = Callable[[int, int | None], int]
"""Dispatches up to this many jobs of one source, at another priority if one is given; returns the number dispatched."""

_Sources = dict[Hashable, dict[Hashable, _Send]]
"""Sources of jobs, grouped by those that share alike: an owner's Tasks together, or each by itself."""


class Dispatcher:
    """One dispatcher; any number may run, in any process, and one suffices. A program without a foreign queue (no engine,
    no Redis) makes no query by it.

    The process that made something ready runs a round for it. What is left then, because there is more than the workers can
    use, is dispatched by one leader for each engine, round after round until nothing is left; when it dies, another process
    leads within a second.

    Arguments: ``ahead_s``: seconds of work that wait in a queue; ``outgoing`` filters what is pushed. ``engines``: the
    attached engines by name; one whose broker does not answer delays nothing else. ``fair_by_owner``: the owners of Tasks
    of one priority share alike, not the Tasks. ``background_share``: the share of the jobs that is of larger priorities
    while smaller ones wait.
    """

    def __init__(
        self,
        ledger: Ledger,
        broker: Broker | None,
        *,
        ahead_s: float = 0.25,
        outgoing: PushFilter | None = None,
        engines: Mapping[str, EngineQueues] = MappingProxyType({}),
        fair_by_owner: bool = False,
        background_share: float = 0.0,
    ) -> None:
        self._ledger = ledger.under(foreign.pusher(ledger.identity))
        self._engines = engines
        self._is_shared = broker is not None
        self._router = Router(broker, engines, ledger.clock)
        self._outgoing = outgoing
        self._ahead_s = ahead_s
        self._pause_s = min(ACTIVE_S, max(SHORTEST_S, 0.8 * ahead_s))
        self._local: Callable[[], Load] | None = None
        self._control = Control(ledger, broker)
        self._outboxes: dict[str | None, Outbox] = {}  # by engine; None: of the own broker
        self._leaderships: dict[str | None, leases.Leadership] = {}
        self._left: set[str | None] = set()  # the engines for which the last round left something
        self._round_lock = threading.Lock()
        self._workers: Sequence[Mapping[str, object]] = []  # the processes that perform jobs, by their last heartbeats
        self._observed_until = 0.0
        self._fair_by_owner = fair_by_owner
        self._shares = Shares()
        self._credit = Credit(background_share)
        self._turn_until = 0.0  # until when this round dispatches in the current queue
        self._is_cut = False  # the last round ended before everything that was wanted was dispatched
        self._last_served: dict[tuple[str, int], int] = {}  # the Task of a queue and priority that got jobs last
        self._place = zlib.crc32(ledger.identity.encode()) / 2**32  # where among many Tasks this process begins
        self._rates = QueueRates(ledger.clock)
        self._wake = threading.Event()
        self._stopping = False
        self._users = 0
        self._users_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._nudged = True
        self._round_at = -1e9  # when the last round began
        self._next_at = 0.0  # when the next round of a leader begins
        self._due: int | None = None
        self._has_held = False  # the row of a Task that had something was locked
        self._held_rounds = 0  # rounds, one after the other, that found rows locked
        self.rounds = 0
        self.dispatched = 0  # jobs pushed by these rounds
        self._log = get_logger("asynctask.dispatcher")

    # -- the thread

    def start(self) -> None:
        """Runs rounds in its own thread until each :meth:`start` has had its :meth:`stop`. Only in a process that is
        registered: what others borrow and do not push at once is taken back."""
        with self._users_lock:
            self._users += 1
            if self._users > 1:  # a web server and a worker in one process
                return
            self._stopping = False
            self._thread = threading.Thread(target=self._run, name="dispatcher", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread, unless another caller started it too, and gives back what is not pushed."""
        with self._users_lock:
            self._users = max(0, self._users - 1)
            if self._users:
                return
            self._stopping = True
            self._wake.set()
            if self._thread is not None:
                self._thread.join(10)

    def attach(self, local: Callable[[], Load] | None, ledger: Ledger | None = None) -> None:
        """Sets what this process of an engine can use; None: it no longer performs jobs. ``ledger``: the one that it is
        registered in, if that is not the application's; before :meth:`start`."""
        self._local = local
        if ledger is not None:
            self._ledger = ledger.under(foreign.pusher(ledger.identity))

    @property
    def serves(self) -> bool:
        """Whether this program may have foreign queues."""
        return self._is_shared or bool(self._engines)

    def nudge(self) -> None:
        """Runs a round soon, because something changed."""
        if self.serves:
            self._nudged = True
            self._wake.set()

    def submitted(self) -> None:
        """Runs a round for what was submitted, in this process's thread if it has one; others are notified by the
        ledger."""
        if self._has_thread:
            self.nudge()

    @property
    def _has_thread(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def expect(self, at: int) -> None:
        """Schedules a round at this time (microseconds; the past: now), when something is due."""
        if not self.serves:
            return
        if at <= self._ledger.now():
            self.nudge()
        elif self._due is None or at < self._due:
            self._due = at
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
        with self._round_lock:
            for outbox in self._outboxes.values():
                outbox.leave()
            for leadership in self._leaderships.values():
                leadership.resign()

    def _step(self) -> float:
        """Runs a round if there is a reason. Returns the seconds until the next, as far as known."""
        if not self.serves:
            return QUIET_S
        now = self._ledger.clock.monotonic()
        due = self._due is not None and self._due <= self._ledger.now()
        leads = any(each.held for each in self._leaderships.values()) and now >= self._next_at
        if not (self._nudged or due or leads):
            return min(self._go_on(), self._until_due())
        if not self._is_cut and now < self._round_at + SHORTEST_S:  # one round for all that come together
            return self._round_at + SHORTEST_S - now
        anew, self._nudged = self._nudged or due, False
        if due:
            self._due = None
        pushed = self._round(anew=anew)
        if due:
            self._expect_next()
        # From start to start, because the jobs last no longer if a round is slow.
        self._next_at = now if self._is_cut else now + (self._pause_s if pushed else ACTIVE_S)
        return min(self._go_on(), self._until_due())

    def _expect_next(self) -> None:
        with self._ledger.database.read() as connection:
            at = lending.next_due(connection, self._ledger.now())
        if at is not None:
            self.expect(at)

    def _go_on(self) -> float:
        """Acquires, renews or ends leadership by what is left. Returns the wait until the next round."""
        wait = QUIET_S
        with self._round_lock:  # a round of another thread may acquire it
            for engine in self._left | self._leaderships.keys():
                leadership = self._leadership(engine)
                if engine not in self._left:
                    if leadership.held:
                        leadership.resign()
                        self._nudged = True  # others may have left work to this process until now
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
        return QUIET_S if self._due is None else max(0.0, (self._due - self._ledger.now()) / SECOND)

    # -- one round

    def round(self) -> int:
        """Runs one round, or as many as needed: observes the workers, settles the outbox, borrows and pushes what is
        wanted. Returns the number of jobs pushed.

        Raises :class:`Unavailable` if the ledger or the broker does not answer; any other error is logged and costs only
        its part of the round.
        """
        pushed = self._round(anew=True)
        while self._is_cut:
            pushed += self._round(anew=False)
        return pushed

    def _round(self, *, anew: bool) -> int:
        if not self.serves:
            return 0
        with self._round_lock:
            self._round_at = self._ledger.clock.monotonic()
            if anew or self._round_at >= self._observed_until:
                self._observe()
            self._has_held = False
            pushed = self._settle()
            pushed += self._part(self._dispatch)
            self.rounds += 1
            self.dispatched += pushed
            self._held_rounds = self._held_rounds + 1 if self._has_held else 0
            if self._has_held:
                again_s = min(HELD_S, SHORTEST_S * 2 ** min(self._held_rounds - 1, 9))
                self.expect(self._ledger.now() + micros(again_s))
            if self._left and threading.current_thread() is not self._thread:
                self._wake.set()  # a leader has to continue
            return pushed

    def _observe(self) -> None:
        """Queries the other processes."""
        until = self._ledger.clock.monotonic() + OBSERVE_S
        with self._ledger.database.read() as connection:
            found = performing(connection, self._ledger.now())
        self._workers = [process for process in found if is_engine(str(process["identity"]))]
        self._observed_until = until

    def _outbox_of(self, queue: str) -> Outbox:
        engine = engine_of(queue)
        if engine not in self._outboxes:
            push = partial(self._router.push, engine)
            self._outboxes[engine] = Outbox(self._ledger, queue_holder(engine), push, self._outgoing, self._control)
        return self._outboxes[engine]

    def _settle(self) -> int:
        """Pushes and hands over what is borrowed. What an engine's broker does not take now went back to the ledger."""
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

    def _reaches(self, queue: str) -> bool:
        return self._router.reaches(queue) and (self._is_shared or engine_of(queue) is not None)

    def _capacity(self) -> Capacity:
        loads_ = [
            Load(
                str(w["identity"]),
                loads(str(w["queues"])),
                int(str(w["concurrency"])) - int(str(w["busy"])),
                float(str(w["rate"])),
                int(str(w["concurrency"])),
            )
            for w in self._workers
            if not w["quiet"]
        ]
        if self._local is not None:
            own = self._local()
            loads_ = [load for load in loads_ if load.identity != own.identity] + [own]
        return Capacity(loads_, self._reaches)

    def _dispatch(self) -> int:
        self._is_cut, self._left = False, set()
        used = self._capacity()
        offers, alone = self._offered(used) if used.queues else ([], [])
        if not (offers or alone):
            return 0
        waiting = self._router.waiting(used.queues)
        soon = {
            queue: count for queue, count in used.soon(waiting, self._rates, self._ahead_s).items() if self._reaches(queue)
        }
        room = Demand(soon, waiting, used.free)
        found = self._sources(offers, alone)
        open_ = self._open(room, offers, alone)
        led = {engine: self._leads(engine) for engine in {engine_of(queue) for queue in open_}}
        for queue in open_:
            if not led[engine_of(queue)]:
                del found[queue]
        sent = {queue: self._dispatch_queue(room, queue, sources) for queue, sources in found.items() if sources}
        for queue in soon:
            waits, went = sum(waiting.get(queue, {}).values()), sent.get(queue, 0)
            # A remainder left on purpose is no longer wanted: the rate depends on whether all wanted jobs went.
            self._rates.note(queue, waits, went, went + room.left(queue), used.free[queue], used.threads[queue])
        # A Task whose round was borrowed is not left over: it set the time of its next one.
        left = {job.queue for job in alone} | {offer.queue for offer in offers if not offer.has_rounds}
        self._left = {engine_of(queue) for queue in left}
        return sum(sent.values())

    def _offered(self, used: Capacity) -> tuple[Sequence[Offer], Sequence[Alone]]:
        for engine in {engine_of(queue) for queue in used.queues}:
            foreign.trim(self._ledger, queue_holder(engine))
        with self._ledger.database.read() as connection:
            offers = lending.pick(connection, self._ledger, used.queues, after=self._last_served, place=self._place)
            paused = lending.paused_queues(connection)
            # Jobs for a queue that nobody works stay in the ledger, and delay nothing else.
            return offers, lending.alone_due(connection, self._ledger.now(), used.wanting - paused)

    def _sources(self, offers: Sequence[Offer], alone: Sequence[Alone]) -> dict[str, dict[int, _Sources]]:
        """The sources of jobs, by queue and priority. All single jobs of a priority count as one Task."""
        found: dict[str, dict[int, _Sources]] = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
        single: dict[tuple[str, int], list[int]] = defaultdict(list)
        for job in alone:
            single[job.queue, job.priority].append(job.event_id)
        for (queue, priority), ids in single.items():
            key = "alone", queue, priority
            found[queue][priority][key][key] = partial(self._send_alone, ids, queue)
        for offer in offers:
            group: Hashable = ("owner", offer.owner) if self._fair_by_owner else offer.task_id
            found[offer.queue][offer.priority][group][offer.task_id] = partial(self._send_task, offer)
        self._shares.keep({key for by in found.values() for at, groups in by.items() for key in _keys(at, groups)})
        return found

    def _open(self, room: Demand, offers: Sequence[Offer], alone: Sequence[Alone]) -> set[str]:
        """The queues of which more may be ready than is wanted. Of the others every job is wanted, and concurrent rounds
        push each of these once."""
        ready: dict[tuple[str, int], float] = defaultdict(float)
        read: dict[str, int] = defaultdict(int)
        for job in alone:
            ready[job.queue, job.priority] += 1
        for offer in offers:
            read[offer.queue] += 1
            ready[offer.queue, offer.priority] += (offer.is_plain and offer.left) or math.inf
        full = {queue for queue, count in read.items() if count >= lending.PAGE}
        return full | {queue for (queue, _), count in ready.items() if count > room.left(queue)}

    def _leads(self, engine: str | None) -> bool:
        """Whether this round dispatches what is more than wanted: one process at a time does, because no round knows what
        others have borrowed and not pushed."""
        leadership = self._leadership(engine)
        if self._has_thread:
            return leadership.acquire(least_s=ACTIVE_S, anew=True) is None
        return not leadership.query_elsewhere()  # the leader has to continue

    def _dispatch_queue(self, room: Demand, queue: str, sources: Mapping[int, _Sources]) -> int:
        """Dispatches priorities in order; first what the queue owes to larger priorities."""
        self._turn_until = self._ledger.clock.monotonic() + TURN_S
        first, *others = sorted(sources)
        if not others:
            self._credit.forget(queue)
            return self._share(room, queue, first, sources[first])
        later: _Sources = {(priority, key): found for priority in others for key, found in sources[priority].items()}
        behind = self._share(room, queue, first, later, self._credit.owed(queue))
        sent = self._share(room, queue, first, sources[first])
        for priority in others:
            if not self._is_over():  # those of a smaller priority had what they can use
                behind += self._share(room, queue, priority, sources[priority])
        self._credit.note(queue, sent + behind, behind)
        return sent + behind

    def _is_over(self) -> bool:
        return self._ledger.clock.monotonic() >= self._turn_until

    def _share(self, room: Demand, queue: str, priority: int, groups: _Sources, owed: int | None = None) -> int:
        """Sources of one priority share alike. ``owed``: they are of larger priorities, and this many of their jobs go
        now."""
        sent_here, at = 0, None if owed is None else priority
        groups = {key: sources for key, sources in groups.items() if sources}
        while groups and (wanted := self._wanted(room, queue, owed, sent_here)) > 0:
            share = max(1, wanted // len(groups))
            for group in self._shares.order(groups):
                if sent_here and self._is_over():
                    self._is_cut = True
                    self._settle()
                    return sent_here
                sources = groups[group]
                source = self._shares.order(sources)[0]
                wanted = self._wanted(room, queue, owed, sent_here)
                count = min(share, wanted, MOST_BORROWED)
                sent = self._part(partial(sources[source], count, at)) if count > 0 else 0
                self._renew(queue)
                self._note_served(room, queue, priority, group, source, sent)
                sent_here += sent
                if sent < count or sent == 0:
                    del sources[source]
                if not sources:
                    del groups[group]
            self._settle()
        return sent_here

    def _renew(self, queue: str) -> None:
        """Renews leadership: a round of many Tasks may last longer than the lease."""
        leadership = self._leadership(engine_of(queue))
        if leadership.held:
            leadership.acquire(least_s=ACTIVE_S)

    def _wanted(self, room: Demand, queue: str, owed: int | None, sent: int) -> int:
        wanted = room.left(queue)
        return wanted if owed is None else min(wanted, owed - sent)

    def _note_served(self, room: Demand, queue: str, priority: int, group: Hashable, source: Hashable, sent: int) -> None:
        room.take(queue, sent)
        for key in {group, source}:
            self._shares.served(key, sent)
        if sent and isinstance(source, int):
            self._last_served[queue, priority] = source

    def _send_task(self, offer: Offer, count: int, at: int | None) -> int:
        now, holder, limited = self._ledger.now(), queue_holder(engine_of(offer.queue)), offer.limit is not None
        if limited:
            count = foreign.lease(self._ledger, holder, offer.task_id, count)
        found = lending.borrow(self._ledger, offer, count)
        if found.next_at is not None and found.next_at > now:
            self.expect(found.next_at)
        self._has_held |= found.is_locked
        if found.count:
            self._outbox_of(offer.queue).add(found, now, offer.task_id, limited=limited, at=at)
            return found.count
        if found.loans:
            lending.end_empty(self._ledger, [loan.id for loan, _ in found.loans])
        if limited and count:
            foreign.lease(self._ledger, holder, offer.task_id, 0)
        return 0

    def _send_alone(self, ids: list[int], queue: str, count: int, at: int | None) -> int:
        """Removes what it claims from ``ids``; skips those that another dispatcher took meanwhile."""
        sent = 0
        while ids and sent < count:
            part = ids[: count - sent]
            del ids[: len(part)]
            now = self._ledger.now()
            found = lending.Borrowed(claimed=lending.claim_alone(self._ledger, part))
            self._outbox_of(queue).add(found, now, at=at)
            sent += found.count
        return sent


def _keys(priority: int, groups: _Sources) -> Iterator[Hashable]:
    for group, sources in groups.items():
        yield from (group, (priority, group))
        yield from sources
