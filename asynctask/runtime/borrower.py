"""The borrower: which jobs of the ledger this process has, how many, and whether they may still begin.

One thread. It borrows about a third of a second of the process's own work, in the order of priorities; Tasks of one
priority share alike. It asks the ledger every :data:`~asynctask.ledger.lending.RECHECK_S` what became of what it has: a
paused or cancelled Task, another priority, a limit, a stopped job; and gives back what will not begin soon, so that others
do not idle beside it. A process needs nobody's permission, and no leader: what it has borrowed, nobody else has.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from asynctask.brokers.base import Copy
from asynctask.clock import SECOND, Clock, Ids, backoff_s
from asynctask.core.states import State
from asynctask.core.transitions import Begin
from asynctask.database.notify import Waker
from asynctask.dispatch.demand import Shares
from asynctask.errors import Unavailable
from asynctask.ledger import lending
from asynctask.ledger.base import Ledger
from asynctask.ledger.lending import Alone, Borrowed, Check, HeldTask, Job, Loan, Offer, OwnClaim, OwnLoan, OwnLoans
from asynctask.ledger.standalone import discard
from asynctask.logs import get_logger
from asynctask.messages import clean
from asynctask.middleware.tracker import Ticket, Tracker
from asynctask.runtime.execution import Execution
from asynctask.runtime.intake import MAX_UNRECORDED, Intake, put_off
from asynctask.runtime.pool import Pool, Rank
from asynctask.sidekiq.copies import PushFilter, tracked_copy

AHEAD_S: Final = 0.33
"""Seconds of work that a process borrows. Below the half second after which a job must not begin by an old word of the
ledger; above the duration of a slow borrow many times over, since more is borrowed when a third is left."""

LEAST: Final = 1 / 3
"""Share of what was borrowed at which more is."""

LONG_S: Final = 0.05
"""Average duration of a Task's jobs from which the supervisor is told of each that begins."""

MOST: Final = 2_000
"""Jobs of one borrow: they are read and made ready in one go."""

MOST_BYTES: Final = 16_000_000
"""Characters of parameters of one borrow, by the average of the Task's jobs so far."""

PART: Final = 200
"""Jobs that are made ready at a time: threads begin the first while the others are made."""

IDLE_S: Final = 10.0
"""Longest wait for a notification, for one may be lost."""

UNSURE_S: Final = 60.0
"""Seconds between two checks of a process without work: a borrow whose answer was lost may be committed minutes later."""

BUSY_S: Final = 0.05
"""Pause while nothing may begin."""

RUSH_S: Final = 0.02
"""Longest random delay of an idle process after a notification of others, so that a hundred do not ask at once."""

VAIN_S: Final = 0.1
"""Seconds until a process with idle threads that found nothing but locked Tasks asks again."""

PUT_OFF_S: Final = 0.001
"""Seconds that a job takes which waits for a process that knows its worker."""

_TASKS: Final = 1_000
"""Tasks whose duration of a job is remembered."""

_SMOOTH: Final = 0.2


_Turn = tuple[int, int]
"""The turn of Tasks in one borrow: the place of their queue in its order, which is drawn by weights, and the priority."""


class Borrower:
    """Borrows for one process.

    Arguments: ``order`` gives the queues in the order of the next borrow, ``is_strict`` whether that order comes before
    priorities; ``workers`` are the names that this process performs; ``outgoing`` gives the client middleware, None without
    any; ``fair_by_owner``: the owners of Tasks of one priority share alike, not the Tasks; ``unrecorded`` returns how many
    outcomes wait for the ledger; ``waker`` ends a wait when the ledger has something new.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        tracker: Tracker,
        clock: Clock,
        ids: Ids,
        pool: Pool,
        intake: Intake,
        quiet: threading.Event,
        order: Callable[[], Sequence[str]],
        is_strict: bool,
        workers: Callable[[], Collection[str]],
        outgoing: Callable[[], PushFilter | None],
        waker: Waker,
        unrecorded: Callable[[], int],
        fair_by_owner: bool = False,
        has_share: bool = False,
        on_borrowed: Callable[[int], None] = lambda count: None,
        on_begun: Callable[[int], None] = lambda event_id: None,
    ) -> None:
        self._ledger = ledger
        self._tracker = tracker
        self._clock = clock
        self._ids = ids
        self._pool = pool
        self._intake = intake
        self._quiet = quiet
        self._order = order
        self._is_strict = is_strict
        self._workers = workers
        self._outgoing = outgoing
        self._waker = waker
        self._unrecorded = unrecorded
        self._fair_by_owner = fair_by_owner
        self._has_share = has_share
        self._on_borrowed = on_borrowed
        self._on_begun = on_begun
        self._loans = OwnLoans()
        self._shares = Shares()
        self._durations = Durations()
        self._last_served: dict[tuple[str, int], int] = {}
        self._place = zlib.crc32(ledger.identity.encode()) / 2**32  # where among many Tasks this process begins
        self._checked_at = -1e9  # on the monotonic clock
        self._taken = 0  # jobs that threads had taken at the last check
        self._took = 0  # how many of them since the one before
        self._due: int | None = None  # when the next job is due, as far as known (microseconds)
        self._is_unsure = False  # a step failed: the ledger may have lent what never arrived here
        self._arrived: deque[_Arrived] = deque()
        self._is_locked = False  # the last borrow found Tasks whose rows others had locked
        self._vain_until = 0.0  # until when the ledger is not asked again because threads idle (monotonic clock)
        self._going_back: list[tuple[OwnLoan, int, list[Execution]]] = []  # out of the lines, and not given back yet
        self._unbegun: list[Execution] = []  # the same, of a process that is quiet
        self._is_handed = threading.Event()  # those are known
        self._returned = threading.Event()  # those went back, or cannot
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._log = get_logger("asynctask.borrower")
        pool.on_low = waker.wake
        pool.on_empty = self._wake_if_empty
        pool.took = self._durations.note
        pool.begun = self._note_begun

    # -- life

    def start(self) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._run, name="borrower", daemon=True)
        self._thread.start()

    def quiet(self, unbegun: Sequence[Execution]) -> None:
        """Gives back what has not begun, in one transaction; the process begins nothing any more. While the ledger is away,
        the thread tries again until :meth:`stop`."""
        self._unbegun += unbegun
        self._is_handed.set()
        self._waker.wake()
        if self._thread is None:
            self._return_rest()
        elif self._thread is not threading.current_thread():
            self._returned.wait(5)

    def _return_rest(self) -> None:
        self._is_handed.wait()
        tries = 0
        while not self._ended.is_set():
            try:
                self._send_back()
                self._return_arrived()
                unbegun, self._unbegun = self._unbegun, []
                self._give_back([*unbegun, *self._pool.drop(lambda each: each.is_borrowed)])
                return
            except Unavailable as error:  # after the end, recovery finds them with this process
                tries += 1
                self._log.warning("give_back_put_off", error=str(error), tries=tries)
                self._ended.wait(backoff_s(tries))

    def _return_arrived(self) -> None:
        while self._arrived:
            part = self._arrived[-1]
            if part.loan is None:
                lending.unclaim(self._ledger, {job.event_id: job.attempt for job in part.jobs})
            else:
                loan, first = part.loan, part.jobs[0].seq or 0
                if lending.give_back(self._ledger, [(loan.as_loan(), first)]) == [True]:
                    self._loans.cut(loan, first, len(part.jobs))
                else:
                    self._loans.forget(loan)
            self._arrived.pop()

    def stop(self, *, is_idle: bool) -> None:
        """Ends what is left; ``is_idle``: every outcome is recorded, so no loan holds anything. Raises Unavailable."""
        self._ended.set()
        self._is_handed.set()
        self._waker.wake()
        if self._thread is not None:
            self._thread.join(5)
        if is_idle:
            lending.leave(self._ledger)

    def expect(self, at: int) -> None:
        """Borrows at this time (microseconds; the past: now), when something is due."""
        if self._due is None or at < self._due:
            self._due = at
            self._waker.wake()

    def _run(self) -> None:
        tries = 0
        while not self._quiet.is_set():
            try:
                pause = self._step()
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
        self._return_rest()
        self._returned.set()
        self._release_ended()

    def _release_ended(self) -> None:
        """While this process is quiet: ends loans whose jobs have all ended, and returns the places of jobs that have, so
        that others begin what waits for those."""
        while not self._ended.wait(lending.RECHECK_S):
            try:
                if empty := self._loans.take_empty():
                    lending.end_empty(self._ledger, empty)
                if self._is_unsure or self._loans.all() or self._pool.lines.limited():
                    self._check()
                    self._is_unsure = False
            except Unavailable as error:
                self._log.warning("check_put_off", error=str(error))
            except Exception:
                self._log.exception("check_failed")

    def _note_begun(self, execution: Execution) -> None:
        """Tells the supervisor of a job that may hold the interpreter, so that nobody can ask this process what it runs.
        Short jobs are too many, and do not."""
        if execution.is_borrowed and self._durations.of(execution.task_id, LONG_S) >= LONG_S:
            self._on_begun(execution.ticket.event_id)

    def _wait(self, seconds: float) -> None:
        was_idle = not self._pool.busy and not len(self._pool.lines)
        if self._waker.wait(seconds) and self._waker.signalled and was_idle and not self._quiet.is_set():
            self._quiet.wait(self._ids.random() * RUSH_S)

    def _step(self) -> float:
        """Checks what is borrowed, borrows what is wanted; returns the seconds until the next step. Raises Unavailable."""
        now = self._clock.monotonic()
        self._send_back()
        if empty := self._loans.take_empty():
            lending.end_empty(self._ledger, empty)
        self._line_up_arrived()
        has_any = self._loans.all() or len(self._pool.lines) or self._pool.busy or self._pool.lines.limited()
        next_check = self._checked_at + (lending.RECHECK_S if has_any or self._is_unsure else UNSURE_S)
        if now >= next_check:
            self._check()
            self._is_unsure = False
            next_check = self._checked_at + lending.RECHECK_S
        if self._ledger.held.keeps:
            lending.catch_up(self._ledger)
        pool = self._pool
        if pool.closed or not pool.may_start() or self._unrecorded() > MAX_UNRECORDED:
            return BUSY_S
        got = 0 if self._is_idle() else self._borrow()
        has_work = bool(pool.busy or len(pool.lines))
        until_check = max(0.0, next_check - self._clock.monotonic()) if has_work or self._is_unsure else IDLE_S
        if got:
            return min(until_check, AHEAD_S)
        if self._is_locked:
            return min(until_check, VAIN_S)
        return min(until_check, self._until_due())

    # -- borrow

    def _is_idle(self) -> bool:
        """Whether this process performs nothing, and nothing waits for it."""
        if self._pool.busy or len(self._pool.lines):
            return False
        with self._ledger.database.read() as connection:
            self._due = lending.first_due(connection, self._order())
            paused = lending.paused_queues(connection)
        self._pool.hold_back(paused)
        self._is_locked = False
        return self._due is None or self._due > self._ledger.now()

    def _borrow(self) -> int:
        """Borrows as much as this process can use soon; returns the number of jobs."""
        pool = self._pool
        pool.low.clear()
        self._is_locked = False
        wanted = self._lack()
        first = pool.lines.first_rank()
        offers, alone = self._query()
        turns = sorted({*offers, *alone})
        self._shares.keep({key for group in offers.values() for offer in group for key in self._keys(offer)})
        total = 0
        for turn in turns:
            rank = turn if self._is_strict else (0, turn[1])
            is_urgent = first is not None and rank < first and self._frees_threads()
            if not is_urgent and wanted <= 0:
                continue
            seconds = max(wanted, AHEAD_S) if is_urgent else wanted
            threads = pool.concurrency if is_urgent else None
            got, used = self._borrow_rank(rank, offers.get(turn, []), alone.get(turn, []), seconds, threads)
            total += got
            wanted -= used
            if self._has_share and got and turn == turns[0]:
                wanted = max(wanted, AHEAD_S * LEAST)  # a later line has a share of the threads
        pool.mark = int(len(pool.lines) * LEAST)
        self._vain_until = 0.0 if total else self._clock.monotonic() + BUSY_S
        if total:
            self._on_borrowed(total)
        return total

    def _wake_if_empty(self) -> None:
        """A thread finds nothing ready: the ledger may have something, unless it had nothing just now."""
        if self._clock.monotonic() >= self._vain_until:
            self._waker.wake()

    def _frees_threads(self) -> bool:
        """Whether threads took jobs since the last check but one, so that something urgent begins soon. Otherwise it would
        be given back at the next check, and borrowed again."""
        pool = self._pool
        return pool.busy < pool.concurrency or self._took + pool.lines.taken > self._taken

    def _lack(self) -> float:
        """For how many seconds more this process could use work; 0 while it has enough."""
        pool = self._pool
        ready = pool.lines.by_task(ready=True)  # what waits for a place keeps no thread busy
        queued = sum(count * self._durations.of(task_id, AHEAD_S) for task_id, count in ready.items()) / pool.concurrency
        idle = pool.concurrency - pool.busy - pool.ready
        if idle <= 0 and (queued > AHEAD_S * LEAST or not self._frees_threads()):
            return 0.0
        return max(AHEAD_S - queued, 1e-6 if idle > 0 else 0.0)

    def _query(self) -> tuple[dict[_Turn, list[Offer]], dict[_Turn, list[Alone]]]:
        names = list(dict.fromkeys(self._order()))
        workers = self._workers()
        with self._ledger.database.read() as connection:
            found = lending.pick(
                connection, self._ledger, names, workers=workers, after=self._last_served, place=self._place
            )
            now = self._ledger.now()
            paused = lending.paused_queues(connection)
            single = lending.alone_due(connection, now, {*names} - paused, workers=workers)
            self._due = lending.next_due(connection, now)
        self._pool.hold_back(paused)  # an untracked job is no reason for a check
        order = {name: number for number, name in enumerate(names)}
        offers: dict[_Turn, list[Offer]] = {}
        for offer in found:
            offers.setdefault((order.get(offer.queue, 0), offer.priority), []).append(offer)
        alone: dict[_Turn, list[Alone]] = {}
        for job in single:
            alone.setdefault((order.get(job.queue, 0), job.priority), []).append(job)
        return offers, alone

    def _keys(self, offer: Offer) -> set[Hashable]:
        return {offer.task_id, self._group(offer)}

    def _group(self, offer: Offer) -> Hashable:
        return ("owner", offer.owner) if self._fair_by_owner else offer.task_id

    def _borrow_rank(
        self, rank: Rank, offers: list[Offer], alone: list[Alone], seconds: float, threads: int | None
    ) -> tuple[int, float]:
        """Borrows of the Tasks and single jobs of one rank in turn; returns how many jobs, and for how many seconds.
        ``threads``: as of :meth:`_amount`."""
        total, used = 0, 0.0
        if alone:
            got = self._claim(rank, alone, self._amount(None, seconds / (1 + bool(offers)), threads))
            total += got
            used += self._seconds(None, got)
        groups: dict[Hashable, list[Offer]] = {}
        for offer in offers:
            groups.setdefault(self._group(offer), []).append(offer)
        while groups and used < seconds:
            share = (seconds - used) / len(groups)
            for group in self._shares.order(groups):
                if used >= seconds:
                    break
                by_id: dict[Hashable, Offer] = {offer.task_id: offer for offer in groups[group]}
                offer = by_id[self._shares.order(by_id)[0]]
                amount = self._amount(offer.task_id, share, threads)
                got = self._borrow_of(rank, offer, amount, threads) if amount else 0
                for key in self._keys(offer):
                    self._shares.served(key, got)
                if got:
                    self._last_served[offer.queue, offer.priority] = offer.task_id
                total += got
                used += self._seconds(offer.task_id, got)
                if not got or got < amount or not self._durations.knows(offer.task_id):
                    groups[group].remove(offer)
                if not groups[group]:
                    del groups[group]
        return total, used

    def _amount(self, task_id: int | None, seconds: float, threads: int | None = None) -> int:
        """How many jobs of a Task last so long, at least one for each of ``threads``, which take them next; None: for each
        idle one. Of a Task that is not known yet no more, but one: its jobs may take hours, and others could begin them."""
        pool = self._pool
        idle = max(0, pool.concurrency - pool.busy - pool.ready) if threads is None else threads
        if not self._durations.knows(task_id):
            return max(1, idle)
        amount = int(seconds * pool.concurrency / self._durations.of(task_id, AHEAD_S))
        most = max(1, min(MOST, int(MOST_BYTES / self._durations.size(task_id))))
        return min(max(1, amount, idle), most)

    def _seconds(self, task_id: int | None, count: int) -> float:
        return count * self._durations.of(task_id, AHEAD_S) / self._pool.concurrency

    def _borrow_of(self, rank: Rank, offer: Offer, amount: int, threads: int | None) -> int:
        if offer.limit is not None:
            amount = self._within_limit(offer, amount, threads)
        if amount <= 0:
            return 0
        asked = self._clock.monotonic()
        found = lending.borrow(self._ledger, offer, amount, workers=self._workers())
        self._is_locked |= found.is_locked
        if found.next_at is not None:
            self._expect(found.next_at)
        return self._take(rank, offer, found, asked)

    def _expect(self, at: int) -> None:
        """As :meth:`expect`, from the borrowing thread itself, which need not be woken."""
        if at > self._ledger.now() and (self._due is None or at < self._due):
            self._due = at

    def _within_limit(self, offer: Offer, amount: int, threads: int | None) -> int:
        """Leases places of a Task with a limit; returns how many jobs of it to borrow. ``threads``: as of
        :meth:`_amount`."""
        lines, limit = self._pool.lines, offer.limit or 0
        places, used, waiting = self._permits_of(offer.task_id)
        if threads is None:
            threads = max(1, self._pool.concurrency - self._pool.busy - self._pool.ready)
        want = min(limit, max(places, used + threads))
        if want > places:
            # Until the answer, jobs may begin within the places that it has.
            running, holds = max(places, used), bool(used or waiting)
            lease = lending.lease_places(self._ledger, offer.task_id, want, running, holds=holds)
            self._is_locked |= lease.is_locked
            if lease.places is not None and not lease.is_locked:
                places = min(lease.places, want)
            lines.limit(offer.task_id, places if places or holds else None)
            if lease.is_locked or lease.places is None:
                return 0
        if offer.has_rounds:
            return max(0, places - used - waiting)  # of a round every job begins at once
        if not self._durations.knows(offer.task_id):
            return max(0, places - used - waiting)
        ahead = max(places, int(AHEAD_S * places / self._durations.of(offer.task_id, AHEAD_S)))
        if used >= places and waiting > ahead * LEAST:
            return 0
        return max(0, min(amount, ahead - waiting - max(0, used - places)))

    def _permits_of(self, task_id: int) -> tuple[int, int, int]:
        """As :meth:`Lines.permits <asynctask.runtime.pool.Lines.permits>` of a Task that has a limit now: one that had none
        when its jobs came has no places yet."""
        lines = self._pool.lines
        if (found := lines.permits(task_id)) is None:
            lines.limit(task_id, 0)
            found = lines.permits(task_id)
        return found or (0, 0, 0)

    def _claim(self, rank: Rank, alone: list[Alone], amount: int) -> int:
        """Claims single jobs in the order of the query, until it has enough; others claim at the same time."""
        total, ids = 0, [job.event_id for job in alone]
        while ids and total < amount:
            part, ids = ids[: amount - total], ids[amount - total :]
            asked = self._clock.monotonic()
            jobs = lending.claim_alone(self._ledger, part)
            self._is_locked |= len(jobs) < len(part)
            total += self._claimed(rank, jobs, asked)
        return total

    def _take(self, rank: Rank, offer: Offer, found: Borrowed, asked: float) -> int:
        if found.limit is not None and found.count and self._pool.lines.permits(offer.task_id) is None:
            self._pool.lines.limit(offer.task_id, 0)  # it got one since the query: its jobs wait for places
        awaited = offer.has_rounds or not (offer.is_plain or offer.has_keys or offer.limit is not None)
        for loan, jobs in found.loans:
            own = self._loans.add(loan, len(jobs))
            self._arrived.extend(_Arrived(rank, part, asked, awaited, offer.has_rounds, own, {}) for part in _parts(jobs))
            self._durations.measure(offer.task_id, jobs)
        return sum(len(jobs) for _, jobs in found.loans) + self._claimed(rank, found.claimed, asked)

    def _claimed(self, rank: Rank, jobs: Sequence[Job], asked: float) -> int:
        for part in _parts(jobs):
            claims = {job.job_id: self._loans.claim(job.event_id, job.attempt) for job in part}
            self._arrived.append(_Arrived(rank, part, asked, False, False, None, claims))
        self._line_up_arrived()
        return len(jobs)

    def _line_up_arrived(self) -> None:
        """Lines up what was borrowed. What fails while the ledger is away stays for the next step; a job that cannot be
        lined up for another reason ends with it. Raises Unavailable."""
        while self._arrived:
            part = self._arrived[0]
            try:
                self._line_up(part)
            except Unavailable:
                raise
            except Exception as error:
                self._log.exception("jobs_not_lined_up", count=len(part.jobs))
                if len(part.jobs) == 1:
                    (job,) = part.jobs
                    why = clean(f"it cannot be performed: {type(error).__name__}: {error}")
                    discard(self._ledger, {(job.job_id, job.attempt): why})
                    part.ended(job.job_id)
                else:  # those beside the one that fails are performed
                    self._arrived.popleft()
                    self._arrived.extendleft(part._replace(jobs=[job]) for job in reversed(part.jobs))
                    continue
            self._arrived.popleft()

    def _line_up(self, part: _Arrived) -> None:
        """Makes jobs ready for the threads. Nothing raises once the first of them may begin."""
        loan = part.loan
        tickets: Sequence[Ticket | None]
        if loan is not None:
            tickets = self._tracker.borrowed(part.jobs, loan, part.asked, awaited=part.awaited, of_round=part.of_round)
        else:
            begun = self._tracker.begin([(job.job_id, job.attempt) for job in part.jobs])
            tickets = [ticket and replace(ticket, loan=part.claims[ticket.job_id], asked=part.asked) for ticket in begun]
        by_id = {job.job_id: (job, ticket) for job, ticket in zip(part.jobs, tickets, strict=True)}
        copies = self._passing(part.jobs)
        given = [(copy, by_id[copy.jid][1]) for copy in copies]
        executions, ready = self._intake.borrowed(given), list[Execution]()
        unknown: list[Execution] = []
        for each in executions:
            each.rank = part.rank
            if each.begins and each.is_unknown:
                unknown.append(each)
            elif each.begins:
                ready.append(each)
        if unknown:
            put_off(self._tracker, unknown)
            self._waker.wake()  # those behind them may be known: they are reached in larger steps
            self._durations.note(part.jobs[0].task_id, PUT_OFF_S)
        for each in executions:
            if not each.begins:
                self._pool.release(each)
        for job_id in by_id.keys() - {each.copy.jid for each in executions}:  # those have ended, with the reason
            part.ended(job_id)
        self._pool.line_up(ready)

    def _passing(self, jobs: Sequence[Job]) -> Sequence[Copy]:
        """The payloads of jobs, after the client middleware. One that cannot be made, or which a middleware stops, ends in
        ``error`` with the reason."""
        now, copies, refused = self._ledger.now(), list[Copy](), dict[tuple[str, int], str]()
        for job in jobs:
            try:
                copies.append(tracked_copy(job, now))
            except Exception as error:
                self._log.exception("job_not_made", job_id=job.job_id)
                refused[job.job_id, job.attempt] = clean(f"it cannot be made: {type(error).__name__}: {error}")
        if refused:
            discard(self._ledger, refused)
        outgoing = self._outgoing()
        return copies if outgoing is None else outgoing(copies)

    def _until_due(self) -> float:
        if self._due is None:
            return IDLE_S
        return min(IDLE_S, max(0.001, (self._due - self._ledger.now()) / SECOND))

    # -- check

    def _check(self) -> None:
        """Asks the ledger what became of what this process has, and acts on it. Raises Unavailable."""
        pool, own = self._pool, self._loans.all()
        begun_at, claims = self._clock.monotonic(), self._loans.claims()
        ready = pool.lines.by_task()
        limited = pool.lines.limited()
        tasks = {task_id for task_id in ready if task_id is not None}.union(limited)
        tasks |= {each.task_id for each in pool.lines.taken_unbegun() if each.task_id is not None and each.is_borrowed}
        found = lending.check(self._ledger, tasks)
        self._checked_at = begun_at
        held_back = {i for i, task in found.tasks.items() if not _may_begin(task)}
        in_rounds = {i for i, task in found.tasks.items() if task.knobs[2]}
        gone = [loan for loan_id, loan in own.items() if loan_id not in found.loans and loan_id in self._loans.all()]
        for loan in gone:
            self._loans.forget(loan)
        lost = {id(loan) for loan in gone}
        taken_back = claims - found.claims.items() - found.working
        paused = found.paused

        def is_lost(each: Execution) -> bool:
            if each.loan is not None:
                return id(each.loan) in lost
            return (each.ticket.event_id, each.ticket.attempt) in taken_back

        def must_not_begin(each: Execution) -> bool:
            if not each.is_borrowed:
                return False
            if each.task_id in in_rounds and not each.ticket.of_round:
                return True  # it came before the interval, and belongs to no round
            is_stopped = each.loan is None and each.ticket.event_id in found.stopping
            return is_stopped or is_lost(each) or each.task_id in held_back or each.copy.queue in paused

        is_news = held_back or in_rounds or lost or taken_back or found.stopping or paused
        dropped = pool.lines.recall(must_not_begin) if is_news else []
        pool.checked(begun_at, paused)
        self._return(dropped, found.tasks, is_lost)
        self._give_back_unarrived(found, own, claims)
        self._follow_knobs(found.tasks, set(limited))
        if asked := [each for each in found.loans.values() if each.asked is not None]:
            self._stop_asked({each.task_id for each in asked})
            lending.heard(self._ledger, asked)
        self._return_surplus(begun_at)

    def _give_back_unarrived(self, found: Check, own: Mapping[int, OwnLoan], claims: Collection[tuple[int, int]]) -> None:
        """Gives back what the ledger has lent to this process, and this process does not know."""
        unknown = [
            (Loan(held.id, held.task_id, held.low, held.high), held.low)
            for held in found.loans.values()
            if held.id not in own
        ]
        if unknown:  # the answer to their borrow was lost
            self._log.warning("loans_unarrived", count=len(unknown))
            lending.give_back(self._ledger, unknown)
        lost_claims = {i: attempt for i, attempt in found.claims.items() if (i, attempt) not in claims}
        if lost_claims:
            self._log.warning("claims_unarrived", count=len(lost_claims))
            lending.unclaim(self._ledger, lost_claims)

    def _return(
        self, dropped: Sequence[Execution], tasks: Mapping[int, HeldTask], is_lost: Callable[[Execution], bool]
    ) -> None:
        """Gives back what may not begin; rows of a cancelled Task are cancelled by their holder."""
        back: list[Execution] = []
        for each in dropped:
            each.is_recalled = True
            if is_lost(each):
                self._pool.lines.release(each)
                self._tracker.forget(each)  # recovery has raised its attempt
            elif each.task_id is not None and each.task_id in tasks and tasks[each.task_id].state == State.CANCELLED:
                each.ticket = replace(each.ticket, verdict=Begin.CANCEL)
                self._pool.release(each)
            else:
                back.append(each)
        self._give_back(back)

    def _give_back(self, unbegun: Sequence[Execution]) -> None:
        """The jobs at the end of a loan go back with a cut, all loans in one transaction; others one by one."""
        by_loan: dict[OwnLoan, list[Execution]] = {}
        for each in unbegun:
            if (loan := each.loan) is None or each.ticket.of_round:
                self._pool.release(each)
            else:
                by_loan.setdefault(loan, []).append(each)
        parts: list[tuple[OwnLoan, int, list[Execution]]] = []
        for loan, executions in by_loan.items():
            cut = max(loan.top + 1, min(each.seq for each in executions))
            for each in executions:
                if each.seq < cut:
                    self._pool.release(each)
            parts.append((loan, cut, [each for each in executions if each.seq >= cut]))
        self._going_back += parts
        self._send_back()

    def _send_back(self) -> None:
        """If it raises, the next step repeats it, before anything else: an earlier try may be committed."""
        if not self._going_back:
            return
        given = lending.give_back(self._ledger, [(loan.as_loan(), cut) for loan, cut, _ in self._going_back])
        for (loan, cut, executions), had in zip(self._going_back, given, strict=True):
            for each in executions:
                each.is_recalled = True
                self._tracker.forget(each, is_held=False)
            if had:
                self._loans.cut(loan, cut, len(executions))
            else:
                self._loans.forget(loan)
        self._going_back.clear()

    def _follow_knobs(self, tasks: Mapping[int, HeldTask], limited: set[int]) -> None:
        """Follows changed priorities and limits; returns places that nothing here needs."""
        pool = self._pool
        waiting = pool.lines.by_task()
        for task_id, task in tasks.items():
            if waiting.get(task_id):
                rank = pool.lines.rank_of(task_id)
                if rank is not None and rank[1] != task.priority:
                    pool.lines.reorder(task_id, (rank[0], task.priority))
            if task.limit is None:
                # Only once the row of places is gone: with it, a new limit would count too few jobs here.
                if task_id in limited and not lending.lease_places(self._ledger, task_id, 0, 0).is_locked:
                    pool.lines.limit(task_id, None)
                continue
            self._follow_limit(task_id, task, task_id in limited)
        for task_id in limited - tasks.keys():  # it is gone
            pool.lines.limit(task_id, None)

    def _follow_limit(self, task_id: int, task: HeldTask, is_known: bool) -> None:
        pool = self._pool
        places, used, waiting = self._permits_of(task_id)
        needed = min(task.limit or 0, used + waiting)
        if is_known and places == needed == task.places:
            return
        # Fewer places first here, then in the ledger: others get at once what is given up.
        used = pool.lines.lower(task_id, needed)
        lease = lending.lease_places(self._ledger, task_id, needed, used, holds=bool(used or waiting))
        if lease.is_locked:
            return
        if lease.places is None or not (lease.places or used or waiting):
            pool.lines.limit(task_id, None)
        else:
            pool.lines.limit(task_id, min(lease.places, needed))

    def _stop_asked(self, task_ids: Collection[int]) -> None:
        """Stops the jobs that a user stopped and that have not begun."""
        chosen = set(task_ids)
        unbegun = self._pool.drop(lambda each: each.is_borrowed and each.task_id in chosen)
        try:
            asked = lending.stopping(self._ledger, [each.ticket.event_id for each in unbegun])
        except Unavailable:
            self._pool.line_up(unbegun)
            raise
        kept: list[Execution] = []
        for each in unbegun:
            if each.ticket.event_id in asked:
                self._pool.release(each)
            else:
                kept.append(each)
        self._pool.line_up(kept)

    def _return_surplus(self, now: float) -> None:
        """Gives back what cannot begin within half a second, because its jobs, or those before them, turned out to be
        long: other processes may have idle threads."""
        pool = self._pool
        for each in pool.running():
            if each.began and each.task_id is not None:
                self._durations.at_least(each.task_id, now - each.began)
        self._took, self._taken = pool.lines.taken - self._taken, pool.lines.taken
        keep = int(self._took * 1.25)
        if pool.busy < pool.concurrency and not pool.closed:
            return
        if len(pool.lines) <= keep:
            return
        is_beyond, old = pool.lines.first(keep), now - lending.RECHECK_S * 0.9
        self._give_back(pool.drop(lambda each: is_beyond(each) and each.is_borrowed and each.asked <= old))


def _may_begin(task: HeldTask) -> bool:
    return task.state in (State.SPLITTING, State.RUNNING) and task.in_session and not task.is_paused


class _Arrived(NamedTuple):
    """Jobs of one loan (``loan``), or claimed ones (``claims``, by their ids), that are not lined up yet."""

    rank: Rank
    jobs: Sequence[Job]
    asked: float
    awaited: bool
    of_round: bool
    loan: OwnLoan | None
    claims: Mapping[str, OwnClaim]

    def held(self, job_id: str) -> OwnLoan | OwnClaim:
        """By what this process holds a job."""
        return self.claims[job_id] if self.loan is None else self.loan

    def ended(self, job_id: str) -> None:
        """A job has ended before it began."""
        self.held(job_id).ended()


def _parts(jobs: Sequence[Job]) -> Iterator[Sequence[Job]]:
    return (jobs[start : start + PART] for start in range(0, len(jobs), PART))


class Durations:
    """The seconds that a job of each Task takes, smoothed, and the length of its parameters. None stands for jobs without a
    Task. Written by threads without a lock: a lost update does no harm."""

    def __init__(self) -> None:
        self._seconds: dict[int | None, float] = {}
        self._sizes: dict[int | None, float] = {}

    def note(self, task_id: int | None, seconds: float) -> None:
        """A job took so long."""
        known = self._seconds.get(task_id)
        if known is None:
            self._make_room()
            self._seconds[task_id] = seconds
        else:
            self._seconds[task_id] = known + _SMOOTH * (seconds - known)

    def at_least(self, task_id: int, seconds: float) -> None:
        """A job of a Task of which others have ended runs for so long already."""
        if seconds > self._seconds.get(task_id, seconds):
            self._seconds[task_id] = seconds

    def knows(self, task_id: int | None) -> bool:
        """Whether a job of the Task has ended here."""
        return task_id in self._seconds

    def of(self, task_id: int | None, unknown: float) -> float:
        """Seconds of a job; ``unknown`` if none has ended."""
        return max(1e-5, self._seconds.get(task_id, unknown))

    def measure(self, task_id: int | None, jobs: Sequence[Job]) -> None:
        """The lengths of the parameters of some jobs."""
        if jobs:
            self._sizes[task_id] = sum(len(job.params or "") for job in jobs) / len(jobs)

    def size(self, task_id: int | None) -> float:
        """Average length of the parameters of a job."""
        return max(1.0, self._sizes.get(task_id, 1.0))

    def _make_room(self) -> None:
        if len(self._seconds) >= _TASKS:
            self._seconds.clear()
            self._sizes.clear()
