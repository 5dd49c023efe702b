"""The borrower: the thread that decides which jobs of the ledger this process gets, and how many.

It borrows work for about a third of a second, in the order of priorities; Tasks of one priority get equal shares
(:class:`Picker`). It makes the borrowed jobs ready for the threads (:class:`Arrivals`), and checks them from then on
(:mod:`asynctask.runtime.recheck`).
"""

from __future__ import annotations

import threading
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from asynctask.brokers.base import Copy
from asynctask.clock import SECOND, backoff_s
from asynctask.database.notify import Waker
from asynctask.dispatch.demand import Shares, WorkSource
from asynctask.errors import Unavailable
from asynctask.ledger import lending
from asynctask.ledger.base import Ledger, chunks
from asynctask.ledger.lending import Alone, Borrowed, Job, Offer
from asynctask.ledger.standalone import discard
from asynctask.logs import get_logger
from asynctask.messages import clean
from asynctask.middleware.tracker import Ticket, Tracker
from asynctask.runtime.execution import MAX_UNRECORDED, Execution, Intake, bind, put_off
from asynctask.runtime.loans import OwnClaim, OwnLoan, OwnLoans
from asynctask.runtime.pool import Pool, Rank
from asynctask.runtime.recheck import Recheck, Returns
from asynctask.sidekiq.copies import PushFilter, tracked_copy

AHEAD_S: Final = 0.33
"""Seconds of work that a process borrows. Less than the half second after which a job must not begin without a new check;
many times the duration of a slow borrow, since the next borrow begins when a third is left."""

LEAST: Final = 1 / 3
"""Share of the ready jobs that is left when the process borrows more."""

MOST: Final = 2_000
"""Largest number of jobs in one borrow: they are read and made ready in one step."""

MOST_BYTES: Final = 16_000_000
"""Largest number of characters of parameters in one borrow, by the average of the Task's jobs so far."""

PART: Final = 200
"""Jobs that are made ready at a time: threads begin the first ones while the rest are prepared."""

IDLE_S: Final = 10.0
"""Longest wait for a notification, in seconds, because one may be lost; and seconds between two checks of a process without
work, because a borrow whose answer was lost may be committed minutes later."""

BUSY_S: Final = 0.05
"""Pause, in seconds, while no job may begin, or after a borrow that found only locked Tasks. Below :data:`AHEAD_S`."""

RUSH_S: Final = 0.02
"""Longest random delay, in seconds, of an idle process after a notification, so that a hundred do not query at once."""


class Borrower:
    """The thread that borrows for one process.

    Arguments: ``unrecorded`` returns how many outcomes wait for the ledger; ``waker`` ends a wait when the ledger has new
    work, or few jobs are ready.
    """

    def __init__(
        self,
        ledger: Ledger,
        tracker: Tracker,
        pool: Pool,
        *,
        loans: OwnLoans,
        arrivals: Arrivals,
        picker: Picker,
        waker: Waker,
        quiet: threading.Event,
        unrecorded: Callable[[], int],
    ) -> None:
        self._ledger = ledger
        self._pool = pool
        self._loans = loans
        self._arrivals = arrivals
        self._picker = picker
        self._returns = Returns(ledger, tracker, pool, loans)
        self._recheck = Recheck(ledger, tracker, pool, loans, self._returns)
        self._waker = waker
        self._quiet = quiet
        self._unrecorded = unrecorded
        self._is_unsure = False  # a step failed: the ledger may have lent jobs that never arrived here
        self._unbegun: Sequence[Execution] | None = None  # jobs that had not begun when the process went quiet
        self._returned = threading.Event()  # those jobs were given back
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._log = get_logger("asynctask.borrower")

    def start(self) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._run, name="borrower", daemon=True)
        self._thread.start()

    def expect(self, at: int) -> None:
        """Schedules a borrow for this time (microseconds; if it is past, now), when a job is due."""
        if self._picker.expect(at):
            self._waker.wake()

    def _run(self) -> None:
        tries = 0
        while not self._ended.is_set():  # after the end, recovery finds the jobs that could not be given back
            try:
                pause = self.step()
                tries = 0
            except Unavailable as error:
                tries += 1
                self._log.warning("borrow_put_off", error=str(error), tries=tries)
                pause, self._is_unsure = backoff_s(tries), True
            except Exception:
                self._log.exception("borrow_failed")
                pause, self._is_unsure = 1.0, True
            if pause > 0:
                self._wait(pause)

    def _wait(self, seconds: float) -> None:
        was_idle = not self._pool.busy and not len(self._pool.jobs)
        if self._waker.wait(seconds) and self._waker.signalled and was_idle and not self._quiet.is_set():
            self._quiet.wait(self._ledger.ids.random() * RUSH_S)

    def step(self) -> float:
        """Checks the borrowed jobs, borrows what is wanted; returns the seconds until the next step. Raises Unavailable."""
        now, pool = self._ledger.clock.monotonic(), self._pool
        self._returns.send()
        if empty := self._loans.take_empty():
            lending.end_empty(self._ledger, empty)
        self._arrivals.make_ready()
        if (unbegun := self._unbegun) is not None:
            self._unbegun = ()
            self._returns.give_back([*unbegun, *pool.jobs.drop(lambda each: each.is_borrowed)])
            self._returned.set()
        has_any = self._loans.all() or len(pool.jobs) or pool.busy or pool.jobs.limited() or pool.jobs.unbegun()
        next_check = self._recheck.at + (lending.RECHECK_S if has_any or self._is_unsure else IDLE_S)
        if now >= next_check:
            self._recheck.run()
            self._is_unsure = False
            next_check = self._recheck.at + lending.RECHECK_S
        if self._ledger.held.keeps:
            lending.catch_up(self._ledger)
        if self._quiet.is_set():  # checks go on: they free the places of jobs that end here for other processes
            return lending.RECHECK_S
        if pool.closed or not pool.gate.may_start() or self._unrecorded() > MAX_UNRECORDED:
            return BUSY_S
        got = 0 if self._picker.is_idle() else self._picker.borrow()
        has_work = bool(pool.busy or len(pool.jobs) or pool.jobs.unbegun())  # suspects wait for their turn
        until_check = max(0.0, next_check - self._ledger.clock.monotonic()) if has_work or self._is_unsure else IDLE_S
        return min(until_check, AHEAD_S if got else self._picker.pause_s())

    # -- a process that is quiet, or ends

    def quiet(self, unbegun: Sequence[Execution]) -> None:
        """Gives back the jobs that have not begun, in one transaction; the process begins no more jobs. While the ledger is
        unavailable, the thread retries until :meth:`stop`."""
        self._unbegun = unbegun
        self._waker.wake()
        if self._thread not in (None, threading.current_thread()):
            self._returned.wait(5)

    def stop(self, *, is_idle: bool) -> None:
        """Ends the thread. ``is_idle``: every outcome is recorded, so loans and places are freed. Raises Unavailable."""
        self._ended.set()
        self._waker.wake()
        if self._thread is not None:
            self._thread.join(5)
        if is_idle:
            lending.leave(self._ledger)


# -- which jobs, and how many

_Turn = tuple[int, int]
"""The turn of Tasks in one borrow: the position of their queue in the order, which is drawn by weights, and the
priority."""


class Picker:
    """Borrows as much as the process can use soon, from the Tasks whose turn it is.

    Arguments: ``order`` returns the queues in the order of the next borrow; ``is_strict``: that order precedes priorities;
    ``workers`` returns the names that this process performs; ``fair_by_owner``: owners of Tasks of one priority get equal
    shares, instead of the Tasks; ``has_share``: later ranks get a share of the threads; ``on_borrowed`` receives the number
    of borrowed jobs.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        pool: Pool,
        arrivals: Arrivals,
        order: Callable[[], Sequence[str]],
        is_strict: bool,
        workers: Callable[[], Collection[str]],
        fair_by_owner: bool,
        has_share: bool,
        on_borrowed: Callable[[int], None],
    ) -> None:
        self._ledger = ledger
        self._pool = pool
        self._arrivals = arrivals
        self._durations = pool.durations
        self._order = order
        self._is_strict = is_strict
        self._workers = workers
        self._has_share = has_share
        self._on_borrowed = on_borrowed
        self._shares = Shares(by_owner=fair_by_owner)
        self._share = zlib.crc32(ledger.identity.encode()) / 2**32  # in [0, 1): where among many Tasks this process begins
        self._due: int | None = None  # when the next job is due, as far as known (microseconds)
        self._is_locked = False  # the last borrow found Tasks whose rows other transactions had locked
        self._rated: dict[int, str] = {}  # the rate limits of the offered Tasks, and of those with ready jobs
        self._closed: set[str | None] = set()  # the limits that permit no more starts in this borrow

    # -- when

    def expect(self, at: int) -> bool:
        """Notes that a job is due at this time (microseconds); whether that is earlier than any time known before."""
        is_news = self._due is None or at < self._due
        if is_news:
            self._due = at
        return is_news

    def is_idle(self) -> bool:
        """Whether this process performs no job, and the ledger has none to lend to it now."""
        if self._pool.busy or len(self._pool.jobs):
            return False
        with self._ledger.database.read() as connection:
            self._due = lending.first_due(connection, self._order())
            paused = lending.paused_queues(connection)
        self._pool.gate.hold_back(paused)
        self._is_locked = False
        return self._due is None or self._due > self._ledger.now()

    def pause_s(self) -> float:
        """Seconds until the next borrow, after one that found no job."""
        if self._is_locked:
            return BUSY_S
        if self._due is None:
            return IDLE_S
        return min(IDLE_S, max(0.001, (self._due - self._ledger.now()) / SECOND))

    # -- of which Tasks

    def borrow(self) -> int:
        """Borrows as much as this process can use soon; returns the number of jobs."""
        pool = self._pool
        pool.low.clear()
        self._is_locked, self._closed = False, set()
        wanted, first = self._lack(), pool.jobs.first_rank()
        total, turns = 0, sorted(self._query().items())
        for turn, sources in turns:
            rank = turn if self._is_strict else (0, turn[1])
            is_urgent = first is not None and rank < first and pool.frees_threads
            if is_urgent or wanted > 0:
                got, used = self._borrow_rank(rank, sources, max(wanted, AHEAD_S) if is_urgent else wanted, is_urgent)
                total += got
                wanted -= used
                if self._has_share and got and turn == turns[0][0]:
                    wanted = max(wanted, AHEAD_S * LEAST)  # a later rank has a share of the threads
        pool.low.mark = int(len(pool.jobs) * LEAST)
        pool.low.vain_until = 0.0 if total else self._ledger.clock.monotonic() + BUSY_S
        if total:
            self._on_borrowed(total)
        return total

    def _lack(self) -> float:
        """Seconds of work that this process needs in addition; 0 while it has enough."""
        pool = self._pool
        # Jobs that wait for a place keep no thread busy.
        queued = sum(self._seconds(task_id, count) for task_id, count in pool.jobs.ready_by_task().items())
        if not pool.idle and (queued > AHEAD_S * LEAST or not pool.frees_threads):
            return 0.0
        return max(AHEAD_S - queued, 1e-6 if pool.idle else 0.0)

    def _query(self) -> dict[_Turn, list[WorkSource]]:
        names, workers, ledger, last = self._order(), self._workers(), self._ledger, self._shares.last
        now = ledger.now()
        with ledger.database.read() as connection:
            offers = lending.pick(connection, ledger, names, workers=workers, after=last, share=self._share)
            paused = lending.paused_queues(connection)
            alone = lending.alone_due(connection, now, {*names} - paused, workers=workers)
            self._due = lending.next_due(connection, now)
        self._pool.gate.hold_back(paused)  # an untracked job is no reason for a check
        ready, rated = self._pool.jobs.ready_by_task(), {each.task_id: each.rate for each in offers if each.rate}
        self._rated = {i: rate for i, rate in self._rated.items() if i in ready} | rated
        order = {name: number for number, name in enumerate(names)}
        found: dict[_Turn, list[WorkSource]] = defaultdict(list)
        for each in self._shares.sources(offers, alone, self._borrow_of, self._claim):
            found[order.get(each.queue, 0), each.priority].append(each)
        return found

    def _borrow_rank(self, rank: Rank, sources: list[WorkSource], seconds: float, is_urgent: bool) -> tuple[int, float]:
        """Borrows from the Tasks and single jobs of one rank in turn, the same number of seconds from each. Returns how
        many jobs, and how many seconds they take. ``is_urgent``: all threads take them next, not only the idle ones."""
        share = seconds / len({each.group for each in sources})
        total, used = self._borrow_small(rank, sources, seconds)
        while sources and used < seconds:
            source = self._shares.next(sources)
            amount = self._amount(source.task_id, min(share, seconds - used), is_urgent)
            got = source.get(amount, rank, is_urgent)
            if got:
                self._shares.served(source)
            total += got
            used += self._seconds(source.task_id, got)
            if got < amount or not self._durations.knows(source.task_id):
                sources.remove(source)
        return total, used

    def _borrow_small(self, rank: Rank, sources: list[WorkSource], seconds: float) -> tuple[int, float]:
        """The same for small Tasks, many in one transaction; removes from ``sources`` those that were lent."""
        total, used, length, chosen = 0, 0.0, 0.0, dict[int, tuple[WorkSource, Offer]]()
        small = [(each, each.offer) for each in sources if each.offer is not None and lending.is_small(each.offer)]
        if len(small) < 2 or self._shares.by_owner:
            return 0, 0.0
        for source, offer in small:
            takes = offer.left * self._durations.of(offer.worker_name, AHEAD_S) / self._pool.concurrency
            length += offer.left * self._durations.size(offer.worker_name)
            # Leave what would wait here to other processes.
            if used + takes <= seconds * len(small) / len(sources) and length <= MOST_BYTES:
                chosen[offer.task_id] = source, offer
                used += takes
        if not chosen:
            return 0, 0.0
        asked = self._ledger.clock.monotonic()
        for task_id, found in lending.borrow_small(self._ledger, [offer for _, offer in chosen.values()]).items():
            source, offer = chosen[task_id]
            self._durations.assume(task_id, offer.worker_name)
            total += self._arrivals.lent(rank, offer, found, asked)
            self._shares.served(source)
            sources.remove(source)
        return total, used if total else 0.0

    # -- how many

    def _threads(self, is_urgent: bool) -> int:
        """Number of threads that take the borrowed jobs next."""
        return self._pool.concurrency if is_urgent else self._pool.idle

    def _amount(self, task_id: int | None, seconds: float, is_urgent: bool) -> int:
        """How many jobs of a Task take ``seconds``, at least one per thread. If the duration of its jobs is not known,
        exactly one per thread: they may take hours, and other processes could begin them."""
        threads = self._threads(is_urgent)
        if not self._durations.knows(task_id):
            return max(1, threads)
        most = max(1, min(MOST, int(MOST_BYTES / self._durations.size(task_id))))
        return min(max(1, threads, int(seconds / self._seconds(task_id, 1))), most)

    def _seconds(self, task_id: int | None, count: int) -> float:
        """Seconds that this process needs for so many jobs of a Task. A job counts at least ``AHEAD_S / MOST``: threads
        with very short jobs share one interpreter."""
        return count * max(self._durations.of(task_id, AHEAD_S) / self._pool.concurrency, AHEAD_S / MOST)

    def _borrow_of(self, offer: Offer, amount: int, rank: Rank, is_urgent: bool) -> int:
        for permitted in (self._within_rate, self._within_limit):
            amount = permitted(offer, amount, is_urgent) if amount > 0 else 0
        if amount <= 0:
            return 0
        asked = self._ledger.clock.monotonic()
        found = lending.borrow(self._ledger, offer, amount, workers=self._workers())
        self._is_locked |= found.is_locked
        if found.next_at is not None and found.next_at > self._ledger.now():
            self.expect(found.next_at)
        self._closed |= found.closed
        return self._arrivals.lent(rank, offer, found, asked)

    def _within_rate(self, offer: Offer, amount: int, _is_urgent: bool) -> int:
        """How many jobs of a Task to borrow by its rate limit: as many as start at once; one if no thread is idle, but one
        soon is."""
        if (rate := offer.rate) is None or rate in self._closed:
            return amount if rate is None else 0
        waiting = sum(count for i, count in self._pool.jobs.ready_by_task().items() if self._rated.get(i or 0) == rate)
        return min(amount, self._pool.idle or int(self._pool.frees_threads and not waiting))

    def _within_limit(self, offer: Offer, amount: int, is_urgent: bool) -> int:
        """Leases places of a Task with a limit; returns how many jobs of it to borrow."""
        if (limit := offer.limit) is None:
            return amount
        jobs = self._pool.jobs
        places, used, waiting = jobs.places(offer.task_id)
        want = min(limit, max(places, used + max(1, self._threads(is_urgent))))
        if want > places:
            # Until the ledger answers, jobs may begin within the places that the Task has here.
            running, holds = max(places, used), bool(used or waiting)
            lease = lending.lease_places(self._ledger, offer.task_id, want, running, holds=holds)
            self._is_locked |= lease.is_locked
            if lease.places is not None and not lease.is_locked:
                places = min(lease.places, want)
            jobs.limit(offer.task_id, places if places or holds else None)
            if lease.is_locked or lease.places is None:
                return 0
        if offer.begins_at_once or not self._durations.knows(offer.task_id):  # they begin at once
            return max(0, places - used - waiting)
        ahead = max(places, int(AHEAD_S * places / self._durations.of(offer.task_id, AHEAD_S)))
        if used >= places and waiting > ahead * LEAST:
            return 0
        return max(0, min(amount, ahead - waiting - max(0, used - places)))

    def _claim(self, alone: list[Alone], amount: int, rank: Rank, _is_urgent: bool) -> int:
        """Claims single jobs in the order of the query, until there are enough; other processes claim at the same time."""
        total = 0
        while alone and total < amount:
            part = alone[: amount - total]
            del alone[: len(part)]
            asked = self._ledger.clock.monotonic()
            jobs = lending.claim_alone(self._ledger, [job.event_id for job in part])
            self._is_locked |= len(jobs) < len(part)
            total += self._arrivals.claimed(rank, jobs, asked)
        return total


# -- borrowed jobs become ready


class _Part(NamedTuple):
    """Jobs of one loan, or claimed ones, that are not ready yet. ``loan``: None for claimed ones; ``held``: the loan or
    claim by which this process holds each job, by job id."""

    rank: Rank
    jobs: Sequence[Job]
    asked: float
    of_round: bool
    loan: OwnLoan | None
    held: Mapping[str, OwnLoan | OwnClaim]


class Arrivals:
    """Makes borrowed jobs ready for the threads. ``outgoing`` returns the client middleware, None if there is none."""

    def __init__(
        self,
        ledger: Ledger,
        tracker: Tracker,
        pool: Pool,
        loans: OwnLoans,
        intake: Intake,
        outgoing: Callable[[], PushFilter | None],
        waker: Waker,
    ) -> None:
        self._ledger = ledger
        self._tracker = tracker
        self._pool = pool
        self._loans = loans
        self._intake = intake
        self._outgoing = outgoing
        self._waker = waker
        self._parts: deque[_Part] = deque()
        self._log = get_logger("asynctask.borrower")

    def lent(self, rank: Rank, offer: Offer, found: Borrowed, asked: float) -> int:
        """Lines up the jobs of a borrow; returns their number. ``asked``: when the borrow began. Raises Unavailable."""
        if found.limit is not None and found.count:
            self._pool.jobs.places(offer.task_id)  # if the Task got a limit since the query, its jobs wait for places
        for loan, jobs in found.loans:
            own = self._loans.add(loan, len(jobs))
            for part in chunks(jobs, PART):
                held = dict.fromkeys((job.job_id for job in part), own)
                self._parts.append(_Part(rank, part, asked, offer.has_rounds, own, held))
            self._pool.durations.measure(offer.task_id, jobs)
        if found.claimed:
            self.claimed(rank, found.claimed, asked)
        self.make_ready()
        return found.count

    def claimed(self, rank: Rank, jobs: Sequence[Job], asked: float) -> int:
        """The same for jobs that were claimed one by one."""
        for part in chunks(jobs, PART):
            held = {job.job_id: self._loans.claim(job.event_id, job.attempt) for job in part}
            self._parts.append(_Part(rank, part, asked, False, None, held))
        self.make_ready()
        return len(jobs)

    def make_ready(self) -> None:
        """Makes the borrowed jobs ready. If the ledger is unavailable, the rest stays for the next step; a job that cannot
        be made ready for another reason ends, with that reason. Raises Unavailable."""
        while self._parts:
            part = self._parts[0]
            try:
                self._make_ready(part)
            except Unavailable:
                raise
            except Exception as error:
                self._not_made_ready(part, error)
            else:
                self._parts.popleft()

    def _not_made_ready(self, part: _Part, error: Exception) -> None:
        """Ends the job that cannot be made ready; if there are several, each is tried alone first."""
        self._log.exception("jobs_not_ready", count=len(part.jobs))
        alone: list[_Part] = []
        if len(part.jobs) > 1:
            alone = [part._replace(jobs=[job]) for job in part.jobs]
        else:
            (job,) = part.jobs
            why = clean(f"it cannot be performed: {type(error).__name__}: {error}")
            discard(self._ledger, {(job.job_id, job.attempt): why})
            part.held[job.job_id].ended()
        self._parts.popleft()
        self._parts.extendleft(reversed(alone))

    def _make_ready(self, part: _Part) -> None:
        """Makes the jobs of one part ready. Nothing raises once its first job may begin."""
        tickets: Sequence[Ticket | None]
        if part.loan is not None:
            tickets = self._tracker.borrowed(part.jobs, part.loan, part.asked, of_round=part.of_round)
        else:
            begun = self._tracker.begin([(job.job_id, job.attempt) for job in part.jobs])
            tickets = [ticket and replace(ticket, loan=part.held[ticket.job_id], asked=part.asked) for ticket in begun]
        by_id = {job.job_id: ticket for job, ticket in zip(part.jobs, tickets, strict=True)}
        now, outgoing = self._ledger.now(), self._outgoing()
        copies: Sequence[Copy] = [tracked_copy(job, now) for job in part.jobs]
        ready, unknown, others = list[Execution](), list[Execution](), list[Execution]()
        for copy in copies if outgoing is None else outgoing(copies):
            if (ticket := by_id[copy.jid]) is not None:
                del by_id[copy.jid]
                execution = self._intake.execution(copy)
                bind(execution, ticket)
                execution.rank = part.rank
                (others if not execution.begins else unknown if execution.is_unknown else ready).append(execution)
        if unknown:
            put_off(self._tracker, unknown)
            # Jobs behind them may have a known worker: larger borrows reach those, as if these jobs took no time.
            self._waker.wake()
            self._pool.durations.note(part.jobs[0].task_id, 0.0)
        for execution in others:
            self._pool.release(execution)
        for job_id in by_id:  # the client middleware has ended these
            part.held[job_id].ended()
        self._pool.make_ready(ready)
