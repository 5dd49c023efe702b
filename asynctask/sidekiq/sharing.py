"""What a worker process does for other programs at its broker: Ruby's workers, and Sidekiq's tools.

The runtime calls one object, :class:`Sharing`. Its parts: the fetcher, the heartbeat that shows the process to tools, the
poller of the sets ``retry`` and ``schedule``, the report of jobs that are left to others, and the retry rules of untracked
jobs and of those that others pushed. Without a broker, only the rules are used.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import orjson

from asynctask.arrivals import ArrivalTracker, fitted
from asynctask.brokers.base import DEAD, RETRY, SCHEDULE, About, Broker, Copy, Presence, RunningJob, SetEntry, why_left
from asynctask.clock import SECOND, Clock, Ids, backoff_s, micros
from asynctask.errors import Unavailable
from asynctask.job import CurrentJob, interrupted
from asynctask.ledger.standalone import Arrival
from asynctask.logs import get_logger
from asynctask.messages import clean, text_of
from asynctask.runtime.execution import Decision, Execution, Follow, Intake, decide
from asynctask.runtime.pool import Pool
from asynctask.runtime.process import memory_bytes
from asynctask.sidekiq.copies import buried, options_of
from asynctask.sidekiq.fetcher import FetchedCopies, Fetcher, HeldCopies
from asynctask.sidekiq.payload import dump, dump_any, encode_backtrace, is_int, parse, read_time, retries, write_time
from asynctask.worker import TRACKED_RETRIES, Worker

MAX_REPORTS: Final = 1_000
"""Pairs of a class and a queue that are logged and remembered; names are untrusted."""


class Sharing:
    """See :class:`asynctask.runtime.execution.Hook`.

    Arguments: ``about``, the process; ``workers``: those that it performs; ``running`` gives the jobs
    that run; ``on_signal`` is called with a signal that a tool left; ``average_s``: seconds between two polls of this
    process, 0: by the number of processes.
    """

    def __init__(
        self,
        broker: Broker | None,
        clock: Clock,
        ids: Ids,
        about: About,
        workers: Mapping[str, Worker],
        *,
        running: Callable[[], Sequence[Execution]],
        is_quiet: Callable[[], bool],
        on_signal: Callable[[str], None],
        average_s: float = 0.0,
    ) -> None:
        self._broker = broker
        self._clock = clock
        self._identity = about.identity
        self._workers = workers
        self._pause = threading.Event()
        self._reported: set[tuple[str, str]] = set()
        self._log = get_logger("asynctask.strangers")
        self.fetcher: Fetcher | None = None
        self.heartbeat: PresenceHeartbeat | None = None
        self.poller: Poller | None = None
        if broker is not None:
            presence = broker.presence(about)
            self.heartbeat = PresenceHeartbeat(presence, clock, running=running, is_quiet=is_quiet, on_signal=on_signal)
            self.poller = Poller(
                broker, clock, ids, processes=presence.processes, prune=presence.prune, average_s=average_s
            )

    # -- life

    def attach(
        self,
        pool: Pool,
        tracker: ArrivalTracker,
        intake: Intake,
        *,
        quiet: threading.Event,
        order: Callable[[], Sequence[str]],
        unrecorded: Callable[[], int],
        on_claimed: Callable[[int], None],
    ) -> None:
        """See :meth:`asynctask.runtime.execution.Hook.attach`."""
        if self._broker is None:
            return
        held = HeldCopies(self._broker, pool)
        arrivals = FetchedCopies(tracker=tracker, clock=self._clock, intake=intake, held=held, others=self)
        self.fetcher = Fetcher(
            identity=self._identity,
            broker=self._broker,
            tracker=tracker,
            clock=self._clock,
            pool=pool,
            held=held,
            arrivals=arrivals,
            quiet=quiet,
            order=order,
            unrecorded=unrecorded,
            on_claimed=on_claimed,
        )

    def start(self) -> None:
        """Fetches, shows the process, and starts polling."""
        if self.fetcher is not None:
            self.fetcher.start()
        if self.heartbeat is not None:
            self.heartbeat.start()
        if self.poller is not None:
            self.poller.start()

    def quiet(self) -> None:
        """Shows that the process is quiet, and stops polling."""
        if self.poller is not None:
            self.poller.quiet()
        if self.heartbeat is not None:
            self.heartbeat.soon()

    def stop(self) -> None:
        """Stops fetching and polling, and removes the process from the tools."""
        if self.fetcher is not None:
            self.fetcher.stop()
        if self.poller is not None:
            self.poller.stop()
        if self.heartbeat is not None:
            self.heartbeat.stop()

    def ended(self, execution: Execution, failed: bool) -> None:
        """Counts a job that ended."""
        if self.heartbeat is not None:
            self.heartbeat.ended(execution, failed)

    # -- fetched copies

    def done(self, copy: Copy) -> None:
        """See :meth:`asynctask.runtime.execution.Hook.done`."""
        if self.fetcher is not None:
            self.fetcher.held.done(copy)

    def put_back(self, copies: Sequence[Copy]) -> None:
        """See :meth:`asynctask.runtime.execution.Hook.put_back`: what is forgotten here is put back by the fetcher."""
        self._forget(copies)
        if self._broker is not None:
            self._broker.put_back(self._identity, copies)

    def _forget(self, copies: Sequence[Copy]) -> None:
        if self.fetcher is not None:
            self.fetcher.held.forget(copies)

    def wake(self) -> None:
        """Wakes the fetcher."""
        if self._broker is not None:
            self._broker.wake()

    def is_paused(self, queue: str) -> bool:
        """Whether the queue is paused at the broker, as far as this process knows."""
        return self.fetcher is not None and queue in self.fetcher.paused

    def ask_again(self, execution: Execution) -> bool:
        """See :meth:`asynctask.runtime.execution.Hook.ask_again`."""
        return self.fetcher is None or self.fetcher.arrivals.ask_again(execution)

    def holds_any(self) -> bool:
        """Whether the list of this process is not empty. Raises BrokerUnavailable."""
        return self._broker is not None and bool(self._broker.held_by(self._identity))

    # -- jobs of others
    #
    # Ruby processes may work the same queue, processes of another version, workers with other middleware. Their jobs go
    # back to where they were, and the broker passes them from then on.

    def leave(self, untracked: Sequence[Execution]) -> Sequence[Execution]:
        """Leaves jobs of others in their queues, and logs each class once for each queue. Raises BrokerUnavailable."""
        reasons = [(each, why_left(each.payload, self._workers)) for each in untracked]
        left = [(each, why) for each, why in reasons if why is not None]
        if left and self._broker is not None:
            self._broker.defer(self._identity, [each.copy for each, _ in left], self._workers.keys())
        for each, why in left:
            self._report(each, why)
        return [each for each, _ in left]

    def _report(self, left: Execution, why: str) -> None:
        name, queue = left.name[:200], left.copy.queue
        if (name, queue) in self._reported or len(self._reported) >= MAX_REPORTS:
            return
        self._reported.add((name, queue))
        self._log.warning("job_left_to_others", worker=clean(name), queue=clean(queue), why=why)

    def arrival(self, execution: Execution) -> tuple[Arrival, str | None]:
        """What the tracker gets of a job that another program pushed, and the part that an Event cannot store."""
        copy, args = execution.copy, execution.conceal(execution.payload["args"])
        came = parse(copy.payload, keep_numbers=True)
        arrival, unfit = fitted(Arrival(copy.jid, 0, execution.name, copy.queue, args, options_of(came)))
        # The original arguments; their values determined what an Event can store.
        params = None if arrival.params is None else orjson.Fragment(dump_any(execution.conceal(came["args"])))
        return replace(arrival, params=params), unfit

    # -- jobs that raised

    def decide(self, execution: Execution, error: BaseException, noise: float) -> Decision:
        """See :meth:`asynctask.runtime.execution.Hook.decide`."""
        now = self._clock.now()
        if not execution.is_untracked:
            return decide_foreign(error, execution.payload, execution.job, execution.worker, now=now, noise=noise)
        job = parse(execution.copy.payload)
        return decide_untracked(error, job, execution.job, execution.worker, now=now, noise=noise)

    def settle(
        self, execution: Execution, error: BaseException | None, decision: Decision, exhausted: Callable[[], object]
    ) -> None:
        """Puts an untracked job into ``retry`` or ``dead``, or one that was interrupted back into its queue."""
        copy, follow, now = execution.copy, decision.follow, self._clock.now()
        if follow is Follow.AGAIN:
            self._move(execution, partial(self._return, copy))
        elif error is not None and follow is Follow.RETRY:
            held = SetEntry(after_failure(copy, error, now), now + decision.delay)
            self._move(execution, partial(self._hold, RETRY, held))
        elif error is not None and follow is not Follow.DROP and self.is_kept(execution, decision, exhausted):
            self._move(execution, partial(self._hold, DEAD, SetEntry(after_failure(copy, error, now), now)))
        else:
            self.done(copy)

    def _return(self, copy: Copy) -> None:
        if self._broker is not None:
            self._broker.put_back(self._identity, [copy])

    def _move(self, execution: Execution, move: Callable[[], None]) -> None:
        """Moves a copy out of this process's list; retries while the broker is unavailable, because nobody else looks for
        the copy while this process lives. For an abandoned thread: one try, which may raise Unavailable."""
        tries = 0
        while True:
            try:
                move()
            except Unavailable as error:
                tries += 1
                self._log.warning("outcome_put_off", job_id=execution.copy.jid, error=str(error), tries=tries)
                if execution.abandoned:
                    raise
                self._pause.wait(backoff_s(tries))
            else:
                self._forget([execution.copy])
                return

    def is_kept(self, execution: Execution, decision: Decision, exhausted: Callable[[], object]) -> bool:
        """Its worker decides whether an untracked job goes to the dead, unless the job never retries."""
        job = parse(execution.copy.payload)
        if decision.follow is Follow.DISCARD or limit_of(job, execution.worker) is None:
            return False
        return exhausted() != "discard" and job.get("dead") is not False

    def backtrace(self, execution: Execution, error: BaseException) -> Sequence[str]:
        """See :meth:`asynctask.runtime.execution.Hook.backtrace`."""
        return _backtrace(error, execution.payload.get("backtrace")) or ()

    def bury(self, copy: Copy, now: int, reason: str | None = None) -> None:
        """Moves a copy to the dead: unchanged, or with the reason why it cannot be recorded. Raises BrokerUnavailable."""
        self._hold(DEAD, SetEntry(copy if reason is None else buried(copy, now, "NotRecordable", reason), now))
        self._forget([copy])

    def _hold(self, set_name: str, held: SetEntry) -> None:
        if self._broker is not None:
            self._broker.hold(set_name, [held], process=self._identity)


# -- the heartbeat, in a thread of its own: neither the lease nor a job waits for it

BEAT_S: Final = 10.0
"""Seconds between two heartbeats. Sidekiq's tools drop a process after a minute without one."""

SIGNALS: Final = frozenset({"TSTP", "TERM", "TTIN"})
"""Signals that tools send: quiet, stop, and write the stacks of all threads."""


class PresenceHeartbeat:
    """Registers the process with the broker's tools every ``every_s`` seconds, with its running jobs and counts.

    ``running`` gives the jobs that run; ``on_signal`` is called with a signal that a tool left.
    """

    def __init__(
        self,
        presence: Presence,
        clock: Clock,
        *,
        running: Callable[[], Sequence[Execution]],
        is_quiet: Callable[[], bool],
        on_signal: Callable[[str], None],
        every_s: float = BEAT_S,
    ) -> None:
        self._presence = presence
        self._clock = clock
        self._running = running
        self._is_quiet = is_quiet
        self._on_signal = on_signal
        self._every_s = every_s
        self._soon = threading.Event()
        self._stopping = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._log = get_logger("asynctask.presence")

    def start(self) -> None:
        """Starts beating, the first time at once."""
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)
        self._thread.start()

    def soon(self) -> None:
        """Beats at once, for a change that a tool waits for."""
        self._soon.set()

    def stop(self) -> None:
        """Sends the last counts and removes the process from the tools. Counts are lost while the broker is unavailable."""
        self._stopping = True
        self._soon.set()
        if self._thread is not None:
            self._thread.join(10)
        if not self._lock.acquire(timeout=1):
            return  # the last beat still waits for an answer
        try:
            self._presence.leave()
        except Unavailable as error:
            self._log.warning("leave_put_off", error=str(error))
        finally:
            self._lock.release()

    def ended(self, execution: Execution, failed: bool) -> None:
        """Counts a job that ended."""
        payload = execution.payload
        wrapped = payload.get("wrapped")
        name = wrapped if isinstance(wrapped, str) else str(payload["class"])
        self._presence.ended(name, self._clock.monotonic() - execution.began, failed)

    def beat(self) -> None:
        """Sends one heartbeat now. Raises Unavailable."""
        with self._lock:
            running = self._now_running()
            signal = self._presence.beat(running, quiet=self._is_quiet(), rss_kib=resident_kib())
        if signal is None:
            return
        if signal in SIGNALS:
            self._log.info("told", signal=signal)
            self._on_signal(signal)
        else:
            self._log.warning("unknown_signal", signal=signal)

    def _now_running(self) -> list[RunningJob]:
        now, ticks = self._clock.now(), self._clock.monotonic()
        return [
            RunningJob(
                thread=f"{each.thread.ident:x}",
                name=str(each.payload["class"]),
                jid=each.copy.jid,
                queue=each.copy.queue,
                payload=each.copy.payload,
                began_at=now - micros(ticks - each.began),
            )
            for each in self._running()
            if each.began and each.thread is not None and not each.abandoned
        ]

    def _run(self) -> None:
        while not self._stopping:
            self._soon.clear()
            try:
                self.beat()
            except Unavailable as error:
                self._log.warning("beat_put_off", error=str(error))
            except Exception:
                self._log.exception("beat_failed")
            if not self._stopping:
                self._soon.wait(self._every_s)


def resident_kib() -> int:
    """The memory that this process uses now, in KiB; if the system does not report it, the most that it has used."""
    if sys.platform == "linux":
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE") // 1024
        except (OSError, ValueError, IndexError):
            pass
    return memory_bytes() // 1024


# -- the poller: moves due jobs from the broker's sets to their queues, at intervals that all worker processes share
#
# Jobs that wait in the ledger are the dispatcher's.

EACH_S: Final = 5.0
"""Average seconds between two polls by any process: each of n processes polls every n times as many."""

FIRST_S: Final = 10.0
"""Seconds before the first poll, so that all processes of a deploy are counted."""

JITTER_S: Final = 5.0
AT_ONCE: Final = 100
"""Jobs moved in one step; a stop takes effect between two steps."""

PRUNE_S: Final = 60.0
"""Seconds between two prunings of this process."""

MAX_PAUSE_S: Final = 3600.0
"""Longest pause between polls, however many names the set of processes has."""

_MANY: Final = 10


class Poller:
    """One thread. ``processes`` counts the polling processes; ``prune`` removes the dead among them; ``average_s``: average
    seconds between two polls of this process, 0: by the number of processes."""

    def __init__(
        self,
        broker: Broker,
        clock: Clock,
        ids: Ids,
        *,
        processes: Callable[[], int] = lambda: 1,
        prune: Callable[[], None] = lambda: None,
        average_s: float = 0.0,
    ) -> None:
        self._broker = broker
        self._clock = clock
        self._ids = ids
        self._processes = processes
        self._prune = prune
        self._average_s = average_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._log = get_logger("asynctask.poller")

    def start(self) -> None:
        """Starts polling."""
        self._thread = threading.Thread(target=self._run, name="poller", daemon=True)
        self._thread.start()

    def quiet(self) -> None:
        """Stops polling; returns at once."""
        self._stop.set()

    def stop(self) -> None:
        """Stops polling, and waits for a step that is under way."""
        self.quiet()
        if self._thread is not None:
            self._thread.join(10)

    def first(self) -> float:
        """Seconds before the first poll."""
        return (0.0 if self._average_s else FIRST_S) + JITTER_S * self._ids.random()

    def pause(self) -> float:
        """Seconds before the next poll, drawn so that processes do not keep step. Raises Unavailable."""
        count = max(1, self._processes())
        average = self._average_s or count * EACH_S
        noise = self._ids.random()
        return min(MAX_PAUSE_S, 2 * average * noise if count >= _MANY else average * noise + average / 2)

    def look(self) -> int:
        """Moves due jobs to their queues until none is left or a stop comes; returns how many. Raises Unavailable."""
        moved = 0
        for name in (RETRY, SCHEDULE):
            while not self._stop.is_set():
                found = self._broker.release_due(name, self._clock.now(), AT_ONCE)
                moved += found
                if not found:
                    break
        return moved

    def _run(self) -> None:
        pause = self.first()
        pruned: float | None = None
        while not self._stop.wait(pause):
            pause = self._average_s or EACH_S
            try:
                now = self._clock.monotonic()
                if pruned is None or now - pruned >= PRUNE_S:
                    pruned = now
                    self._prune()
                self.look()
                pause = self.pause()
            except Unavailable as error:
                self._log.retrying("look_put_off", error=str(error))
            except Exception:
                self._log.exception("look_failed")


# -- untracked jobs, and those that others pushed: a retry or a death, written as Ruby's workers write it
#
# The payload is parsed again, so that changes by middleware do not last and unknown members are kept. Sources: sidekiq 8,
# job_retry.rb, and for the forms of the members the readers of all versions.

MAX_RETRY_COUNT: Final = 10_000
"""Largest accepted retry count of a payload."""

MAX_BACKTRACE: Final = 1_000
"""Lines kept of a backtrace."""

_MAX_QUEUE: Final = 255


def limit_of(job: Mapping[str, Any], worker: Worker | None) -> int | None:
    """The largest number of retries of a job; None: never retried, and not kept either. By default as its worker says."""
    said = job.get("retry")
    return retries(worker.retry if said is None and worker is not None else said)


def decide_untracked(
    error: BaseException, job: Mapping[str, Any], current: CurrentJob, worker: Worker | None, *, now: int, noise: float
) -> Decision:
    """What follows ``error`` in the parsed ``job``; ``now`` in microseconds, ``noise`` in [0, 1)."""
    if interrupted(current, error):
        return Decision(Follow.AGAIN)
    limit = limit_of(job, worker)
    if limit is None:
        return Decision(Follow.DEAD)
    count = _count(job)
    most = count if _is_over(job, count, limit, now) else count + 1
    return decide(error, current, worker, retries=count, limit=most, noise=noise, always_spread=True)


def decide_foreign(
    error: BaseException, job: Mapping[str, Any], current: CurrentJob, worker: Worker | None, *, now: int, noise: float
) -> Decision:
    """What follows ``error`` in a tracked job that another program pushed: as many retries as the job and its worker both
    allow, counting those elsewhere. ``now`` in microseconds, ``noise`` in [0, 1)."""
    count, limit = _count(job), limit_of(job, worker)
    own = TRACKED_RETRIES if worker is None else worker.max_retries
    over = limit is None or count >= own or _is_over(job, count, limit, now)
    return decide(error, current, worker, retries=count, limit=count if over else count + 1, noise=noise)


def _is_over(job: Mapping[str, Any], count: int, limit: int, now: int) -> bool:
    """Whether a job that was retried ``count`` times has no retry left."""
    retry_for = job.get("retry_for")
    if isinstance(retry_for, int | float) and not isinstance(retry_for, bool):  # it stands in the place of the count
        failed_at = read_time(job.get("failed_at"))
        return failed_at is not None and failed_at + retry_for * SECOND < now
    return count >= limit


def after_failure(copy: Copy, error: BaseException, now: int) -> Copy:
    """The copy as an entry of a set after ``error``, at ``now`` (microseconds): the same members in the same order, and
    those that a failure adds. Raises :class:`~asynctask.sidekiq.payload.Malformed` for a payload that is no job."""
    job = parse(copy.payload, keep_numbers=True)
    queue = job.get("retry_queue")
    if not (isinstance(queue, str) and 0 < len(queue) <= _MAX_QUEUE):
        queue = copy.queue
    job["queue"] = queue
    if not (isinstance(job.get("jid"), str) and job["jid"]):  # tools name an entry by it
        job["jid"] = copy.jid
    job["error_message"] = text_of(error)
    job["error_class"] = clean(type(error).__name__)
    again = is_int(job.get("retry_count"))
    job["retry_count"] = _count(job)
    if again:
        job["retried_at"] = write_time(now)
    if not again or read_time(job.get("failed_at")) is None:  # tools cannot show an entry without it
        job["failed_at"] = write_time(now)
    lines = _backtrace(error, job.get("backtrace"))
    if lines is not None:
        job["error_backtrace"] = encode_backtrace(lines)
    return Copy(copy.jid, copy.attempt, queue, dump(job), copy.priority, None, 0, copy.handle)


def _count(job: Mapping[str, Any]) -> int:
    """The number of the next retry: 0 is the first. The member may hold any value."""
    count = job.get("retry_count")
    return max(0, min(count, MAX_RETRY_COUNT) + 1) if isinstance(count, int) and is_int(count) else 0


def _backtrace(error: BaseException, wanted: Any) -> list[str] | None:
    """The lines of an error, the innermost first, as many as ``wanted`` says; None if none are wanted."""
    if wanted is None or wanted is False:
        return None
    most = max(0, min(wanted, MAX_BACKTRACE)) if is_int(wanted) else MAX_BACKTRACE
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    lines = (f"{code.co_filename}:{line}:in `{code.co_qualname}'" for code, line in reversed(frames))
    return [line.encode("utf-8", "replace").decode() for line in islice(lines, most)]
