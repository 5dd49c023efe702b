"""The fetcher: takes jobs from Redis in batches, reads them, and acknowledges what is recorded.

A fetched copy is a job that runs here, a tracked job of a worker that this process does not know, which waits in the
ledger for another, an untracked job of others (:meth:`~asynctask.sidekiq.sharing.Sharing.leave`), or no job at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from asynctask.arrivals import ArrivalTracker
from asynctask.brokers.base import Broker, Copy
from asynctask.clock import Clock, backoff_s
from asynctask.core.transitions import Begin
from asynctask.errors import InputError, Unavailable
from asynctask.ledger.standalone import Arrival, is_job_id
from asynctask.logs import get_logger
from asynctask.messages import clean
from asynctask.middleware.tracker import Attempt, Ticket, Tracker
from asynctask.runtime.execution import MAX_UNRECORDED, Execution, Intake, bind, put_off
from asynctask.runtime.pool import STALE_S, Pool
from asynctask.runtime.process import Pace
from asynctask.sidekiq.copies import pushed_at

AHEAD_S: Final = 0.1
"""Seconds of work that a process fetches ahead, beside jobs for its idle threads and for the duration of a fetch: long jobs
are not hoarded, and short ones are ready when the next fetch begins."""

RECENT_S: Final = 1.0
"""Seconds after which the pace of jobs that have ended says nothing of the next ones."""

LATENCY_S: Final = 0.5
"""A longer fetch is an exception, and no reason to fetch more ahead."""

HOARD: Final = 10
"""With more ready jobs than this multiple of what it would fetch now, a process gives back what it cannot begin soon."""

PAUSES_S: Final = 0.4
"""Seconds between two questions which queues are paused, while jobs run: others may begin without another fetch."""

DEFER_S: Final = 5.0
"""Seconds after which a tracked job of a worker that this process does not know is due again: the dispatcher may push it to
the same queue."""

MAX_FETCH: Final = 1_000
_IDLE_WAIT_S: Final = 5.0  # a push ends the wait; this covers a lost notification
_PACE_S: Final = 0.005


class Fetcher:
    """Fetches for one process, in its own thread.

    Arguments: ``order`` gives the queues in the order of the next fetch; ``unrecorded`` returns how many outcomes wait for
    the ledger.
    """

    def __init__(
        self,
        *,
        identity: str,
        broker: Broker,
        tracker: Tracker,
        clock: Clock,
        pool: Pool,
        held: HeldCopies,
        arrivals: FetchedCopies,
        quiet: threading.Event,
        order: Callable[[], Sequence[str]],
        unrecorded: Callable[[], int],
        on_claimed: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._on_claimed = on_claimed
        self._identity = identity
        self._broker = broker
        self._clock = clock
        self._pool = pool
        self.held = held
        self.arrivals = arrivals
        self._tracker = tracker
        self._quiet = quiet
        self._order = order
        self._unrecorded = unrecorded
        self._pace = Pace()
        self._performed = 0
        self._ended_at = 0.0  # when the last jobs had ended, on the monotonic clock
        self._doubt = Doubt(clock)
        self._asked = 0.0  # time of the last fetch, on the monotonic clock
        self._ask_pauses_at = 0.0  # on the monotonic clock
        self._filled_at = 0.0  # when fetched jobs were made ready last, on the monotonic clock
        self.paused: frozenset[str] = frozenset()  # queues, at the broker
        self._latency = 0.0  # seconds from the request for jobs until they can begin, smoothed
        self._thread: threading.Thread | None = None
        self._log = get_logger("asynctask.fetcher")

    def start(self) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._run, name="fetcher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, once the process is quiet, and acknowledges what is recorded."""
        self._broker.wake()
        if self._thread is not None:
            self._thread.join(5)
        try:
            self._broker.drop(self._identity, self.held.take_done())
        except Unavailable as error:  # recovery drops them: their outcomes are recorded
            self._log.warning("acknowledge_put_off", error=str(error))

    def _run(self) -> None:
        tries = 0
        self._asked = self._clock.monotonic()
        while not self._quiet.is_set():
            try:
                self._fetch()
                tries = 0
            except Unavailable as error:
                tries += 1
                self._log.warning("fetch_put_off", error=str(error), tries=tries)
                self._doubt.rise()
                self._quiet.wait(backoff_s(tries))
            except Exception:
                self._log.exception("fetch_failed")
                self._doubt.rise()
                self._quiet.wait(1.0)

    def _fetch(self) -> None:
        """Runs one round: checks what is in doubt and which queues are paused, exchanges, begins what came, waits for news.
        Raises Unavailable."""
        self._settle_doubt()
        self._follow_pauses()
        limit = self._room()
        if limit <= 0 and self._can_wait():
            self._pool.low.wait(AHEAD_S / 4)
            return
        copies = self._exchange(limit)
        if copies:
            self._begin(copies)
            self._latency = 0.7 * self._latency + 0.3 * min(self._clock.monotonic() - self._asked, LATENCY_S)
        if 0 < limit > len(copies):
            self._wait_for_news()

    def _settle_doubt(self) -> None:
        """Puts back what the broker or the ledger gave this process but never arrived here."""
        if self._doubt.is_due():
            unarrived = [copy for copy in self._broker.held_by(self._identity) if copy not in self.held]
            if unarrived:
                self._log.warning("copies_unarrived", count=len(unarrived))
                self._broker.put_back(self._identity, unarrived)
            self._doubt.checked()

    def _follow_pauses(self) -> None:
        """Asks which queues are paused, unless it is known. Raises Unavailable."""
        now = self._clock.monotonic()
        if now < self._ask_pauses_at:
            return
        paused = frozenset(self._broker.operations.paused(sorted(self._order())))
        new, self.paused = paused - self.paused, paused
        if new:  # what lies ready goes back, each queue's in its order
            self._pool.give_back(self._pool.jobs.drop(lambda each: each.copy.queue in new))
        self._ask_pauses_at = now + PAUSES_S

    def _room(self) -> int:
        """How many jobs to fetch now: none while enough are ready, so that fetches stay few and large."""
        pool = self._pool
        pool.low.clear()
        if pool.closed or not pool.gate.may_start() or self._unrecorded() > MAX_UNRECORDED:
            return 0
        busy, ready = pool.busy, pool.jobs.ready
        ahead = int(self._rate() * (AHEAD_S + 2 * self._latency))
        wanted = min(MAX_FETCH, max(0, pool.concurrency - busy) + ahead)
        pool.low.mark = wanted // 2
        if ready > wanted and self._clock.monotonic() - self._filled_at >= STALE_S:
            self._keep(wanted)
        elif ready > HOARD * wanted + pool.concurrency:
            self._keep(wanted + pool.concurrency)
        ready = pool.jobs.ready
        return wanted - ready if ready <= pool.low.mark else 0

    def _keep(self, count: int) -> None:
        """Gives all but ``count`` fetched jobs back, if jobs became long: others can begin them. Raises Unavailable."""
        jobs = self._pool.jobs
        is_beyond = jobs.first(count)
        self._pool.give_back(jobs.drop(lambda each: not each.is_borrowed and is_beyond(each)))

    def _rate(self) -> float:
        """The jobs that end per second; 0 if none has ended lately, because the next ones may be long."""
        performed, busy_s = self._pool.worked
        now = self._clock.monotonic()
        if performed != self._performed:
            self._performed, self._ended_at = performed, now
        pace = self._pace.update(performed, busy_s)
        return pace if now - self._ended_at < RECENT_S else 0.0

    def _can_wait(self) -> bool:
        """Whether a few acknowledgements alone are not worth a round trip yet."""
        return self._clock.monotonic() - self._asked < AHEAD_S and self.held.waiting < MANY_DONE

    def _exchange(self, limit: int) -> Sequence[Copy]:
        """Acknowledges what is recorded and fetches up to ``limit`` jobs, in one round trip. Raises BrokerUnavailable."""
        self._asked = self._clock.monotonic()
        done = self.held.take_done()
        try:
            queues = [queue for queue in self._order() if queue not in self._pool.gate.paused]
            copies = self._broker.exchange(self._identity, done, queues, limit)
        except Exception:
            self.held.keep_done(done)
            raise
        self.held.exchanged(done, copies)
        if copies:
            self._on_claimed(len(copies))
        return copies

    def _wait_for_news(self) -> None:
        # Every commit, including our own, ends the wait: a busy process must not fetch after each.
        self._quiet.wait(_PACE_S if self._pool.busy else 0)
        # Not for long while jobs are ready, because they may take long.
        ready = self._pool.jobs.ready
        seconds = AHEAD_S if ready > self._pool.concurrency else STALE_S if ready else _IDLE_WAIT_S
        if self._pool.busy:
            seconds = min(seconds, max(0.0, self._ask_pauses_at - self._clock.monotonic()))
        self._broker.wait(seconds)

    def _begin(self, copies: Sequence[Copy]) -> None:
        """Begins a fetched batch in the ledger and passes it to the pool. Raises :class:`Unavailable`."""
        try:
            executions = self.arrivals.take(copies)
        except Unavailable:
            self.held.forget(copies)  # none of these may begin: they go back as soon as the broker answers
            raise
        except Exception:
            self._log.exception("batch_not_begun", count=len(copies))
            if len(copies) > 1:
                self._begin_singly(copies)
            return
        deferred, ready = [], []
        for each in executions:
            if not each.begins:
                self._pool.release(each)
            elif each.is_unknown:
                deferred.append(each)
            else:
                ready.append(each)
        self._filled_at = self._clock.monotonic()
        self.paused -= {each.copy.queue for each in ready}  # they gave these just now
        self._pool.make_ready(ready)
        if deferred:
            self._put_off(deferred)

    def _put_off(self, deferred: Sequence[Execution]) -> None:
        """Makes tracked jobs of workers that this process does not know wait in the ledger, without spending a retry.
        Raises :class:`Unavailable`."""
        try:
            put_off(self._tracker, deferred, DEFER_S)
        except Unavailable:
            self.held.forget([each.copy for each in deferred])
            raise
        for each in deferred:
            self.held.done(each.copy)

    def _begin_singly(self, copies: Sequence[Copy]) -> None:
        """Begins one by one, so that one failing job does not keep its neighbours; it stays in this process's list."""
        for position, copy in enumerate(copies, 1):
            try:
                self._begin([copy])
            except Unavailable:
                self.held.forget(copies[position:])
                raise


# -- exchanges without an answer

CHECKS_S: Final = (0.0, 10.0, 60.0, 180.0)
"""Seconds after an exchange without an answer at which its effect is checked: the network may deliver it minutes later."""


class Doubt:
    """An exchange without an answer: the broker may have given, or may yet give, jobs that never arrive here."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._checks: list[float] = []  # on the monotonic clock, the next one first

    def rise(self) -> None:
        """Notes that an exchange failed just now."""
        now = self._clock.monotonic()
        self._checks = [now + seconds for seconds in CHECKS_S]

    def is_due(self) -> bool:
        """Whether it is time to check the broker."""
        return bool(self._checks) and self._checks[0] <= self._clock.monotonic()

    def checked(self) -> None:
        """Notes that the broker was checked just now."""
        now = self._clock.monotonic()
        self._checks = [at for at in self._checks if at > now]


# -- what a fetched copy is


class Others(Protocol):
    """Which fetched jobs are others' and what they are; see :class:`asynctask.sidekiq.sharing.Sharing`."""

    def leave(self, untracked: Sequence[Execution]) -> Sequence[Execution]: ...

    def arrival(self, execution: Execution) -> tuple[Arrival, str | None]: ...

    def bury(self, copy: Copy, now: int, reason: str | None = None) -> None: ...


class FetchedCopies:
    """Reads fetched copies: each is a job for a worker of this process, a job of others, or no job at all.

    Arguments: ``held``, the copies of this process; ``others`` is asked about jobs of others.
    """

    def __init__(self, *, tracker: ArrivalTracker, clock: Clock, intake: Intake, held: HeldCopies, others: Others) -> None:
        self._tracker = tracker
        self._clock = clock
        self._intake = intake
        self._held = held
        self._others = others
        self._log = get_logger("asynctask.intake")

    def take(self, copies: Sequence[Copy]) -> list[Execution]:
        """The jobs among a fetched batch, each with its ticket if it is tracked. Raises Unavailable."""
        executions = [each for copy in copies if (each := self._assign(copy)) is not None]
        gone = self._leave([each for each in executions if each.copy.attempt == 0])
        if gone:
            executions = [each for each in executions if id(each) not in gone]
        refused = self._begin(executions)
        return [each for each in executions if id(each) not in refused] if refused else executions

    def _leave(self, untracked: Sequence[Execution]) -> set[int]:
        """Leaves the jobs of others to them; returns these (by ``id``). Raises BrokerUnavailable."""
        left = self._others.leave(untracked) if untracked else ()
        if left:
            self._held.forget([each.copy for each in left])
        return {id(each) for each in left}

    def _begin(self, executions: Sequence[Execution]) -> set[int]:
        """Gives each tracked one its ticket; returns (by ``id``) those that no Event can store, which have ended with that
        reason."""
        fenced = [each for each in executions if each.copy.attempt > 0]
        others = [each for each in executions if each.copy.attempt == 0 and each.is_tracked]
        tickets = self._tracker.begin_fetched([each.copy.key for each in fenced]) if fenced else ()
        for each, ticket in zip(fenced, tickets, strict=True):
            if ticket is None:
                others.append(each)
            else:
                bind(each, ticket)
        return self._begin_unknown(others) if others else set()

    def _begin_unknown(self, executions: Sequence[Execution]) -> set[int]:
        """:meth:`_begin` for jobs that other programs pushed, and those without an Event here, which are dropped."""
        refused: set[int] = set()
        arrivals: list[tuple[Execution, Arrival, str | None]] = []
        for each in executions:
            if each.copy.attempt == 0 and not is_job_id(each.copy.jid):
                self._bury(each, "it cannot be recorded: its jid is none that a database can keep")
                refused.add(id(each))
            else:
                arrivals.append((each, *self._arrival(each)))
        for (each, arrival, unfit), ticket in zip(arrivals, self._tickets(arrivals), strict=True):
            if ticket is not None:
                self._run_again(each, arrival, ticket)
                bind(each, ticket)
            if ticket is None or (unfit is not None and self._refuse(each.copy, ticket, f"it cannot be recorded: {unfit}")):
                refused.add(id(each))
        return refused

    def _arrival(self, execution: Execution) -> tuple[Arrival, str | None]:
        copy = execution.copy
        if copy.attempt == 0:
            return self._others.arrival(execution)
        args = execution.conceal(execution.payload["args"])
        return Arrival(copy.jid, copy.attempt, execution.name, copy.queue, args), None

    def _run_again(self, execution: Execution, arrival: Arrival, ticket: Ticket) -> None:
        """Opens the Event of a job that has ended, if a program has pushed another one under its jid: the ledger dispatches
        that one, in the place of this copy. A second copy of the same push is dropped."""
        if execution.copy.attempt > 0 or not ticket.has_ended or not ticket.is_lone:
            return
        pushed = pushed_at(arrival.options)
        if not self._tracker.reopen(arrival, lambda options: any(pushed) and pushed_at(options) != pushed):
            self._log.warning(
                "copy_of_ended_job", jid=execution.copy.jid, hint="push another job with a created_at of its own"
            )

    def _tickets(self, arrivals: Sequence[tuple[Execution, Arrival, str | None]]) -> list[Ticket | None]:
        """The tracker's tickets; None for a job whose Event the database rejects: it is buried."""
        try:
            return list(self._tracker.arrive([arrival for _, arrival, _ in arrivals]))
        except InputError as error:
            if len(arrivals) > 1:  # one by one, so that one job does not affect its neighbours
                return [ticket for each in arrivals for ticket in self._tickets([each])]
            ((execution, _, _),) = arrivals
            if execution.copy.attempt > 0:
                raise
            self._bury(execution, str(error))
            return [None]

    def ask_again(self, execution: Execution) -> bool:
        """Requests a current ticket for a job that has not begun since it got its first. Returns whether it may begin: not
        if a knob of its Task was changed meanwhile, under which it is dispatched again. Raises Unavailable."""
        old = execution.ticket
        (ticket,) = self._tracker.begin([execution.copy.key])
        if ticket is None:
            return False
        bind(execution, ticket)
        return ticket.verdict is Begin.RUN and old.record.knobs == ticket.record.knobs

    def _assign(self, copy: Copy) -> Execution | None:
        try:
            return self._intake.execution(copy)
        except ValueError as error:
            self._log.error("undecodable_job", jid=copy.jid, queue=copy.queue, error=str(error)[:500])
            self._give_up(copy, error)
            return None

    def _give_up(self, copy: Copy, error: ValueError) -> None:
        """Ends a copy that is no job: if it is tracked, its Event, because nobody would look into ``dead`` for it."""
        if copy.attempt == 0:
            self._others.bury(copy, self._clock.now())
            self._held.forget([copy])
            return
        (ticket,) = self._tracker.arrive([Arrival(copy.jid, copy.attempt, "", copy.queue)])
        if ticket.verdict is Begin.DROP:
            self._held.acknowledge(copy)
        elif not self._refuse(copy, ticket, f"it cannot be decoded: {error}"):
            self._tracker.release(Attempt(ticket), lambda won: self._held.acknowledge(copy))

    def _refuse(self, copy: Copy, ticket: Ticket, reason: str) -> bool:
        """Ends a job whose Event could run in ``error`` with the reason; False for one that would not run anyway."""
        if ticket.verdict is not Begin.RUN:
            return False
        self._log.error("job_refused", jid=copy.jid, queue=clean(copy.queue), reason=reason[:500])
        self._tracker.settle(Attempt(ticket), discarded=reason, then=lambda won: self._held.acknowledge(copy))
        return True

    def _bury(self, execution: Execution, reason: str) -> None:
        """Moves a job that can have no Event to the broker's dead, where people see it with the reason. Raises
        BrokerUnavailable."""
        copy = execution.copy
        self._log.error("job_refused", jid=clean(copy.jid), queue=clean(copy.queue), reason=reason[:500])
        self._others.bury(copy, self._clock.now(), reason)
        self._held.forget([copy])


# -- which copies are here

MANY_DONE: Final = 500
"""Number of copies to acknowledge from which the fetcher is woken, however busy the process is."""


class HeldCopies:
    """The copies that the broker holds for this process: those that arrived and have not left, and those of them that may
    be acknowledged."""

    def __init__(self, broker: Broker, pool: Pool) -> None:
        self._broker = broker
        self._pool = pool
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
        if not self._woken and (waiting >= MANY_DONE or not self._pool.busy):
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
