"""The fetcher: takes jobs from the broker in batches, reads them, and acknowledges what is recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from asynctask.brokers.base import Broker, Copy
from asynctask.clock import Clock
from asynctask.errors import Unavailable
from asynctask.logs import get_logger
from asynctask.middleware.tracker import Tracker
from asynctask.runtime.execution import Execution
from asynctask.runtime.intake import MANY_DONE, HeldCopies, Intake, Missing, Strangers
from asynctask.runtime.pool import AHEAD_S, Pool
from asynctask.runtime.retry import pause_s

__all__ = ["CHECKS_S", "MAX_FETCH", "Doubt", "Fetcher"]

LATENCY_S: Final = 0.5
"""A fetch that takes longer is an exception, and no reason to fetch more ahead."""

HOARD: Final = 10
"""With more jobs ready than so many times what a process would fetch now, it gives back what it cannot begin soon."""

MAX_FETCH: Final = 1_000
MAX_UNRECORDED: Final = 5_000
_IDLE_WAIT_S: Final = 5.0  # a push ends the wait; this is for a notification that was lost
_PACE_S: Final = 0.005


class Fetcher:
    """Fetches for one process, in a thread of its own.

    Arguments: ``order`` gives the queues in the order of the next fetch; ``on_dry`` is called when the queues gave nothing,
    with whether they gave anything since the last call; ``unrecorded`` says how many outcomes wait for the ledger.
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
        intake: Intake,
        strangers: Strangers,
        quiet: threading.Event,
        order: Callable[[], Sequence[str]],
        on_dry: Callable[[bool], None],
        unrecorded: Callable[[], int],
    ) -> None:
        self._identity = identity
        self._broker = broker
        self._clock = clock
        self._pool = pool
        self._held = held
        self._intake = intake
        self._strangers = strangers
        self._missing = Missing(tracker)
        self._quiet = quiet
        self._order = order
        self._on_dry = on_dry
        self._unrecorded = unrecorded
        self._doubt = Doubt(clock)
        self._asked = 0.0  # when the broker was asked last, on the monotonic clock
        self._gave = False  # whether the queues gave anything since they ran dry
        self._latency = 0.0  # seconds from asking for jobs until they can begin, smoothed
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
            self._broker.drop(self._identity, self._held.take_done())
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
                self._quiet.wait(pause_s(tries))
            except Exception:
                self._log.exception("fetch_failed")
                self._doubt.rise()
                self._quiet.wait(1.0)

    def _fetch(self) -> None:
        """One round: checks what is in doubt, exchanges, begins what came, waits for news. Raises Unavailable."""
        self._settle_doubt()
        limit = self._room()
        if limit <= 0 and self._can_wait():
            self._pool.low.wait(AHEAD_S / 4)
            return
        copies = self._exchange(limit)
        if copies:
            self._begin(copies)
            self._latency = 0.7 * self._latency + 0.3 * min(self._clock.monotonic() - self._asked, LATENCY_S)
        elif limit > 0:
            self._on_dry(self._gave)
        self._gave = bool(copies) or (self._gave and limit <= 0)
        if 0 < limit > len(copies):
            self._wait_for_news()

    def _settle_doubt(self) -> None:
        """Puts back what the broker or the ledger gave this process although it never arrived here."""
        if self._doubt.is_due():
            unarrived = [copy for copy in self._broker.held_by(self._identity) if copy not in self._held]
            if unarrived:
                self._log.warning("copies_unarrived", count=len(unarrived))
                self._broker.put_back(self._identity, unarrived)
            self._doubt.checked()
        self._pool.lanes.look_after()

    def _room(self) -> int:
        """How many jobs to fetch now: none while enough lies ready, so that fetches stay few and large."""
        pool = self._pool
        pool.low.clear()
        pool.shorten_line()
        if pool.closed or not pool.may_start() or self._unrecorded() > MAX_UNRECORDED:
            return 0
        busy, ready = pool.busy, pool.ready
        rate = pool.measured()
        idle = pool.concurrency - busy
        wanted = min(MAX_FETCH, max(0, idle) + int(rate * (AHEAD_S + 2 * self._latency)))
        pool.mark = wanted // 2
        if ready > HOARD * wanted + pool.concurrency:
            pool.keep(wanted + pool.concurrency)
        return wanted - ready if ready <= pool.mark else 0

    def _can_wait(self) -> bool:
        """Whether a few acknowledgements alone are not worth a round trip yet."""
        return self._clock.monotonic() - self._asked < AHEAD_S and self._held.waiting < MANY_DONE

    def _exchange(self, limit: int) -> Sequence[Copy]:
        """Acknowledges what is recorded and fetches up to ``limit`` jobs, in one round trip. Raises BrokerUnavailable."""
        self._asked = self._clock.monotonic()
        done = self._held.take_done()
        try:
            copies = self._broker.exchange(self._identity, done, self._strangers.order(self._order()), limit)
        except Exception:
            self._held.keep_done(done)
            raise
        self._held.exchanged(done, copies)
        return copies

    def _wait_for_news(self) -> None:
        # Every commit, our own too, ends the wait: a busy process must not answer each with a transaction.
        self._quiet.wait(_PACE_S if self._pool.busy else 0)
        # Not for long while jobs lie ready, for they may prove to be long.
        seconds = AHEAD_S if self._pool.ready > self._pool.concurrency else _IDLE_WAIT_S
        self._broker.wait(self._strangers.patience(seconds))

    def _begin(self, copies: Sequence[Copy]) -> None:
        """Asks the ledger about a fetched batch and hands it to the pool. Raises :class:`Unavailable`."""
        try:
            executions = self._intake.take(copies)
        except Unavailable:
            self._held.forget(copies)  # nothing of these may begin: they go back as soon as the broker answers
            raise
        except Exception:
            self._log.exception("batch_not_begun", count=len(copies))
            if len(copies) > 1:
                self._begin_singly(copies)
            return
        missing, ready = [], []
        for each in executions:
            if not each.begins:
                self._pool.release(each)
            elif self._missing.takes(each):
                missing.append(each)
            else:
                ready.append(each)
        self._pool.put(ready)
        if missing:
            self._put_off(missing)

    def _put_off(self, missing: Sequence[Execution]) -> None:
        try:
            self._missing.put_off(missing)
        except Unavailable:
            self._held.forget([each.copy for each in missing])
            raise
        for each in missing:
            self._held.done(each.copy)

    def _begin_singly(self, copies: Sequence[Copy]) -> None:
        """One job that cannot be asked about must not keep its neighbours; it stays in this process's list."""
        for position, copy in enumerate(copies, 1):
            try:
                self._begin([copy])
            except Unavailable:
                self._held.forget(copies[position:])
                raise


# -- exchanges without an answer

CHECKS_S: Final = (0.0, 10.0, 60.0, 180.0)
"""Seconds after an exchange without an answer at which its effect is checked: the network may deliver it minutes later."""


class Doubt:
    """An exchange without an answer: the broker may have given, or may yet give, what never arrives here."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._checks: list[float] = []  # on the monotonic clock, the next one first

    def rise(self) -> None:
        """An exchange broke off just now."""
        now = self._clock.monotonic()
        self._checks = [now + seconds for seconds in CHECKS_S]

    def is_due(self) -> bool:
        """Whether it is time to ask the broker."""
        return bool(self._checks) and self._checks[0] <= self._clock.monotonic()

    def checked(self) -> None:
        """The broker was asked just now."""
        now = self._clock.monotonic()
        self._checks = [at for at in self._checks if at > now]
