"""The launcher: builds the parts of a worker process, starts them, and stops them in the right order.

The parts are heartbeat and maintenance (:class:`~asynctask.runtime.process.AppProcess`), recorder, tracker, pool, borrower,
dispatcher, and the hook that fetches from a broker and serves other programs there
(:class:`~asynctask.runtime.execution.Hook`).
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

from asynctask._version import __version__
from asynctask.arrivals import ArrivalTracker
from asynctask.brokers.base import About
from asynctask.database.notify import Waker
from asynctask.errors import Unavailable
from asynctask.ledger import processes
from asynctask.ledger.base import dumps
from asynctask.ledger.recorder import LINGER_S, LONG_LINGER_S, Recorder
from asynctask.logs import get_logger, open_missing_streams
from asynctask.runtime.borrower import Arrivals, Borrower, Picker
from asynctask.runtime.execution import Hook, Intake, Performer
from asynctask.runtime.loans import OwnLoans
from asynctask.runtime.pool import LONG_S, Isolation, LowMark, Pool, StartGate
from asynctask.runtime.process import AppProcess, Parts, collect_seldom
from asynctask.supervisor import SILENT_S, Pulse, Wakeup

PULSE_S = 1.0
"""Largest number of seconds between two pulses to the supervisor. Below :data:`~asynctask.supervisor.SILENT_S`."""

_FLUSH_S = 5.0
"""Seconds for recording the last outcomes at the end of a process."""

_POLL_S = 0.2
"""Seconds after which a signal is noticed that did not wake the thread. Below :data:`PULSE_S`."""


@dataclass(frozen=True, slots=True)
class Queues:
    """The queues of a process with their weights; ``strict`` takes them in the listed order."""

    weights: Mapping[str, int]
    strict: bool = False

    @property
    def names(self) -> Sequence[str]:
        return tuple(self.weights)

    def order(self) -> Sequence[str]:
        """The order of the queues for one fetch: as listed, or drawn by weight."""
        if self.strict or len(self.weights) == 1:
            return self.names
        drawn = [name for name, weight in self.weights.items() for _ in range(weight)]
        random.shuffle(drawn)
        return tuple(dict.fromkeys(drawn))


class Launcher(AppProcess):
    """One worker process, within the current process. Its ``identity`` is that of the ledger of ``parts``."""

    def __init__(
        self,
        parts: Parts,
        *,
        concurrency: int,
        queues: Queues,
        shutdown_s: float,
        pulse: Pulse | None = None,
    ) -> None:
        super().__init__(parts, kind="worker", concurrency=concurrency, queues=queues.names)
        self._parts = parts
        self._queues = queues
        self._shutdown_s = shutdown_s
        self._log = get_logger("asynctask.launcher")
        self._pulse = pulse or Pulse({})
        self._stopping = False
        self._wakeup: Wakeup | None = None  # only while the launcher runs in the foreground
        self._lost = False
        self._ticker_stop = threading.Event()
        self._ticker: threading.Thread | None = None
        self.recorder = Recorder(self.ledger, linger_s=self._linger_s, on_due=self._expect, figures=self.figures)
        self.tracker = ArrivalTracker(self.ledger, self.recorder)
        self.pool, self.borrower, self.hook = self._made_pool()
        self.performer = self.pool.performer

    def _made_pool(self) -> tuple[Pool, Borrower, Hook]:
        parts, quiet, waker = self._parts, threading.Event(), self._parts.signals.waker(for_jobs=True)
        clock, tracker = parts.clock, self.tracker
        isolation, intake = Isolation(clock, self._concurrency), Intake(parts.own_workers, quiet)
        hook = parts.sharing(self._about(), running=isolation.running, is_quiet=quiet.is_set, on_signal=self.obey)
        pool = Pool(
            tracker=tracker,
            clock=clock,
            concurrency=self._concurrency,
            hook=hook,
            isolation=isolation,
            gate=StartGate(clock, hook, isolation, quiet, self._may_start),
            low=LowMark(clock, waker),
            quiet=quiet,
            performer=partial(
                Performer,
                tracker,
                copy(parts.server_middleware),  # as it is now
                clock,
                parts.ids,
                hook,
                parts.fire,
                parts.config.max_result_bytes,
            ),
            on_begun=self._pulse.began,
            background_share=parts.config.background_share,
        )
        hook.attach(
            pool,
            tracker,
            intake,
            quiet=quiet,
            order=self._queues.order,
            unrecorded=lambda: self.recorder.waiting,
            on_claimed=self.figures.claims.add,
        )
        return pool, self._made_borrower(pool, intake, quiet, waker), hook

    def _made_borrower(self, pool: Pool, intake: Intake, quiet: threading.Event, waker: Waker) -> Borrower:
        parts, ledger, loans = self._parts, self.ledger, OwnLoans()
        arrivals = Arrivals(ledger, self.tracker, pool, loans, intake, parts.outgoing, waker)
        picker = Picker(
            ledger=ledger,
            pool=pool,
            arrivals=arrivals,
            order=self._queues.order,
            is_strict=self._queues.strict,
            workers=parts.own_workers.keys,
            fair_by_owner=parts.config.fair_by == "owner",
            has_share=parts.config.background_share > 0,
            on_borrowed=self.figures.claims.add,
        )
        return Borrower(
            ledger,
            self.tracker,
            pool,
            loans=loans,
            arrivals=arrivals,
            picker=picker,
            waker=waker,
            quiet=quiet,
            unrecorded=lambda: self.recorder.waiting,
        )

    def _about(self) -> About:
        parts, config = self._parts, self._parts.config
        return About(
            self.ledger.identity, parts.host.name, os.getpid(), parts.clock.now(), self._concurrency, self._queues.weights,
            strict=self._queues.strict, version=__version__, tag=config.app.partition(":")[0],
        )  # fmt: skip

    # -- life

    def start(self) -> None:
        """Registers the process and starts its parts. Raises LedgerUnavailable."""
        self.register()
        self._pulse.registered(self.ledger.identity, self.ledger.database.absolute_url, self._parts.config.lease_s)
        self.heartbeat.start()  # before the startup hooks, which may outlast a lease
        self._parts.fire("startup")
        self.recorder.start()
        self.pool.start()
        self.borrower.start()
        self.dispatcher.start()
        self.maintenance.start()
        self.hook.start()
        self._ticker = threading.Thread(target=self._tick, name="ticker", daemon=True)
        self._ticker.start()

    def quiet(self) -> None:
        """Fetches and begins no more jobs; running jobs continue."""
        if not self.pool.is_quiet:
            self._log.info("quiet")
            self.borrower.quiet(self.pool.quiet())
            self.heartbeat.soon()
            self.hook.quiet()
            self._parts.fire("quiet")

    def stop(self) -> bool:
        """Quiets, waits for running jobs within the shutdown time, gives unfinished ones back, and ends the process's
        parts. Returns whether every thread ended."""
        self.quiet()
        self._parts.fire("shutdown")
        idle = self.pool.wait_idle(self._shutdown_s)
        if not idle:
            interrupted = self.pool.interrupt()
            self._log.warning("jobs_interrupted", count=interrupted)
        self.recorder.drain(_FLUSH_S)
        self.dispatcher.stop()
        self.maintenance.stop()
        self.pool.stop()
        self.recorder.stop(_FLUSH_S)
        self.hook.stop()
        self._ticker_stop.set()
        self.heartbeat.stop()
        self.performer.watchdog.stop()
        self.performer.loop.stop()
        self._leave()
        return idle and self.pool.busy == 0

    def _leave(self) -> None:
        try:
            idle = not self.pool.busy and not self.recorder.waiting  # in this order, see Running
            self.borrower.stop(is_idle=idle and not self._lost)
            empty = idle and not self.hook.holds_any()
        except Unavailable as error:  # recovery finds the process after its end
            self._log.warning("leave_put_off", error=str(error))
            return
        if not (empty and self._lost):
            self.leave(empty=empty)

    def run(self) -> int:
        """Runs in the foreground until a signal from the system, the ledger or the broker stops it. Returns the exit code:
        1 if other processes declared this one dead, so that its supervisor replaces it.

        TSTP quiets. TERM and INT stop within the shutdown time; a second INT ends at once. TTIN writes the stacks of all
        threads.
        """
        open_missing_streams()
        interrupts, quiet = 0, False
        self._wakeup = Wakeup()

        # A signal handler takes no lock, because this thread may hold it.
        def on_stop(number: int, _frame: Any) -> None:
            nonlocal interrupts
            interrupts += number == signal.SIGINT
            if interrupts > 1:
                os._exit(130)
            self._stop()

        def on_quiet(_number: int, _frame: Any) -> None:
            nonlocal quiet
            quiet = True

        signal.signal(signal.SIGTERM, on_stop)
        signal.signal(signal.SIGINT, on_stop)
        signal.signal(signal.SIGTSTP, on_quiet)
        if hasattr(signal, "SIGTTIN"):
            faulthandler.register(signal.SIGTTIN, all_threads=True)
        self.start()
        collect_seldom()
        self._log.info("working", identity=self.ledger.identity, concurrency=self._concurrency)
        while not self._stopping:
            self._wakeup.wait(_POLL_S)
            if quiet:
                self.quiet()
        clean = self.stop()
        self._wakeup.close()
        if not clean:
            # A hung thread must not keep the process alive: its job is recorded as interrupted, and waits again.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1 if self._lost else 0)
        return 1 if self._lost else 0

    def obey(self, name: str) -> None:
        """Obeys a signal from the ledger or the broker: ``TSTP`` quiets, ``TERM`` stops, ``TTIN`` writes the stacks of all
        threads to the standard error, ``LOST`` (declared dead) stops."""
        if name == "TSTP":
            self.quiet()
        elif name == "TERM":
            self._stop()
        elif name == "TTIN":
            self._show_stacks()
        elif name == processes.LOST and not self._lost:
            self._lost = True
            self._log.error("declared_dead", identity=self.ledger.identity)
            self._stop()

    def _stop(self) -> None:
        """Ends :meth:`run`."""
        self._stopping = True
        if self._wakeup is not None:
            self._wakeup.set()

    def _show_stacks(self) -> None:
        try:
            faulthandler.dump_traceback(all_threads=True)
        except (AttributeError, OSError, ValueError) as error:  # no standard error, or none that is a file
            self._log.warning("stacks_not_shown", error=str(error))

    # -- callbacks of the parts

    def _may_start(self) -> bool:
        return self.heartbeat.fresh() and self.recorder.healthy and not self._lost

    def _linger_s(self) -> float:
        """Seconds for which an outcome waits: longer while jobs are ready, because then no thread waits for outcomes."""
        return LONG_LINGER_S if self.pool.jobs.ready else LINGER_S if self.pool.busy else 0.0

    def _expect(self, at: int) -> None:
        self.borrower.expect(at)
        self.dispatcher.expect(at)

    def facts(self) -> dict[str, Any]:
        return {"busy": self.pool.busy, "quiet": int(self.pool.is_quiet)}

    def worked(self) -> tuple[int, float]:
        return self.pool.worked

    def info(self) -> dict[str, Any]:
        return {
            **super().info(),
            "workers": sorted(self._parts.own_workers),
            "weights": dumps(dict(self._queues.weights)),
        }

    def _tick(self) -> None:
        ticks, every = 0, max(1, int(min(PULSE_S, self._parts.config.lease_s / 8) / LONG_S))
        before = self._parts.clock.monotonic()
        while not self._ticker_stop.wait(LONG_S):
            now = self._parts.clock.monotonic()
            if now - before > SILENT_S:  # the interpreter was held, and jobs may be taken from here until the next beat
                self.heartbeat.soon()
            before = now
            self.tracker.note_long(LONG_S)
            ticks += 1
            if ticks % every == 0:
                self._pulse.beat()
