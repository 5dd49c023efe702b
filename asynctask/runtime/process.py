"""The part that all processes of an application share: registration, a lease renewed by heartbeats, and maintenance.

There are three kinds of processes: web processes (:class:`asynctask.wiring.WebProcess`), workers
(:class:`asynctask.runtime.launcher.Launcher`) and workers of an attached engine
(:class:`asynctask.integrations.base.EngineProcess`).
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from asynctask._version import __version__
from asynctask.brokers.base import About, Broker
from asynctask.clock import Clock, Ids, micros
from asynctask.config import Config
from asynctask.database.notify import Signals
from asynctask.dispatch.dispatcher import Dispatcher
from asynctask.dispatch.outbox import EngineQueues
from asynctask.errors import Unavailable
from asynctask.figures import Figures
from asynctask.ledger import history, processes, rates
from asynctask.ledger.base import Ledger, dumps
from asynctask.logs import get_logger
from asynctask.maintenance import Maintenance
from asynctask.middleware.chain import Chain
from asynctask.runtime.execution import Execution, Hook
from asynctask.sidekiq.copies import PushFilter
from asynctask.worker import Worker


class Dispatching(Protocol):
    """The parts of an application that every process needs, because each dispatches and takes part in maintenance."""

    config: Config
    clock: Clock
    ids: Ids
    server_middleware: Chain

    @property
    def ledger(self) -> Ledger: ...

    @property
    def broker(self) -> Broker | None: ...

    @property
    def host(self) -> processes.Host: ...

    @property
    def engines(self) -> Mapping[str, EngineQueues]: ...

    @property
    def dispatcher(self) -> Dispatcher: ...

    @property
    def workers(self) -> Mapping[str, Worker]: ...

    def maintenance(self, ledger: Ledger) -> Maintenance: ...

    def fire(self, event: str, *args: Any) -> None: ...


class Parts(Dispatching, Protocol):
    """The parts that a worker process needs."""

    @property
    def signals(self) -> Signals: ...

    @property
    def own_workers(self) -> Mapping[str, Worker]: ...

    def outgoing(self) -> PushFilter | None: ...

    def sharing(
        self,
        about: About,
        *,
        running: Callable[[], Sequence[Execution]],
        is_quiet: Callable[[], bool],
        on_signal: Callable[[str], None],
    ) -> Hook: ...


ENOUGH: Final = 50
"""Number of jobs over which a :class:`Pace` is measured."""

SHORTEST_S: Final = 0.05
"""Smallest number of busy seconds over which a :class:`Pace` is measured, if more than :data:`ENOUGH` jobs ended."""

LEAST_S: Final = 0.0125
"""Shortest time, in seconds, by which jobs are divided, so that a few fast first jobs do not give an extreme pace."""


class Pace:
    """Jobs per busy second (in which at least one job runs), over the last :data:`ENOUGH` jobs or more.

    The pace is steady for jobs of any length, and unchanged while no job runs.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[int, float]] = deque([(0, 0.0)], maxlen=1_000)  # (ended jobs, busy seconds)

    def update(self, count: int, busy_s: float) -> float:
        """The pace after ``count`` jobs and ``busy_s`` busy seconds in total; 0 if it is unknown."""
        marks = self._marks
        if count != marks[-1][0]:
            marks.append((count, busy_s))
        while len(marks) > 2 and count - marks[1][0] >= ENOUGH and busy_s - marks[1][1] >= SHORTEST_S:
            marks.popleft()
        (first, since), (_, until) = marks[0], marks[-1]
        done = count - first
        return done / max(until - since, busy_s - until, LEAST_S) if done > 0 else 0.0


class AppProcess:
    """A process in the ledger: its row, its heartbeat and its share of maintenance.

    Arguments: ``kind``, ``concurrency`` and ``queues`` are displayed (a worker's ``queues`` also determine which jobs are
    dispatched for it); ``ledger`` replaces that of the application if the process has an identity of its own.
    """

    def __init__(
        self,
        app: Dispatching,
        *,
        kind: str,
        concurrency: int = 0,
        queues: Sequence[str] = (),
        ledger: Ledger | None = None,
    ) -> None:
        config = app.config
        self.ledger = ledger or app.ledger
        self._host, self._workers = app.host, app.workers
        self._lease_s = config.lease_s
        self._kind = kind
        self._concurrency = concurrency
        self._queue_names = tuple(queues)
        self.dispatcher = app.dispatcher
        self.figures = Figures()
        self._pace = Pace()
        self._log = get_logger("asynctask.process")
        self.heartbeat = Heartbeat(
            self.ledger,
            every_s=config.heartbeat_s,
            lease_s=config.lease_s,
            facts=self._beat,
            on_signal=self.obey,
        )
        self.maintenance = app.maintenance(self.ledger)

    def register(self) -> None:
        """Writes the rate limits of the application's workers, and the row of this process. Raises LedgerUnavailable."""
        rates.declare(self.ledger, self._workers)
        processes.register(
            self.ledger,
            self._host,
            kind=self._kind,
            pid=os.getpid(),
            lease_s=self._lease_s,
            concurrency=self._concurrency,
            queues=self._queue_names,
            info=self.info(),
        )

    def leave(self, *, empty: bool = True) -> None:
        """Writes the rest of its history, and removes the row. If the process may still hold jobs (not ``empty``), ends its
        lease instead, so that they are recovered."""
        try:
            history.write(self.ledger)
            if empty:
                processes.forget(self.ledger, self.ledger.identity)
            else:
                processes.give_up(self.ledger)
        except Unavailable as error:  # recovery finds the process after its end
            self._log.warning("leave_put_off", error=str(error))

    def _beat(self) -> dict[str, Any]:
        figures = self.figures.as_dict() | {"rounds": self.dispatcher.passes, "dispatched": self.dispatcher.dispatched}
        pace = round(self._pace.update(*self.worked()), 6)
        return {**self.facts(), "info": dumps({**self.info(), "pace": pace, "figures": figures})}

    def worked(self) -> tuple[int, float]:
        """Number of jobs performed, and total seconds in which at least one ran."""
        return 0, 0.0

    def info(self) -> dict[str, Any]:
        """Further columns of the row, written at registration."""
        return {"version": __version__}

    def facts(self) -> dict[str, Any]:
        """The values that each heartbeat writes, such as ``busy``."""
        return {}

    def obey(self, name: str) -> None:
        """Obeys a signal from the ledger. On ``LOST`` (declared dead by another process) it registers again: its outcomes
        have no fence and still count, or it holds no jobs."""
        if name == processes.LOST:
            self._log.warning("declared_dead", identity=self.ledger.identity)
            processes.forget(self.ledger, self.ledger.identity)
            self.register()


# -- the heartbeat, which renews the lease in the ledger

LATE = 0.75
"""Share of the lease after which a process that could not renew it begins no jobs."""

RETRY_S = 1.0
"""Seconds until a failed heartbeat is tried again."""


class Heartbeat:
    """Renews the lease every ``every_s`` seconds, in its own thread; then writes what has ended to the history.

    ``facts`` returns the values to write (``busy``, ``rate``, ...); ``on_signal`` is called with a signal stored in the
    ledger (``TSTP``, ``TERM``), or with ``LOST`` if another process has declared this one dead.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        every_s: float,
        lease_s: float,
        facts: Callable[[], dict[str, Any]] = dict,
        on_signal: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._ledger = ledger
        self._every_s = min(every_s, lease_s / 3)  # so that two beats in a row may fail
        self._lease_s = lease_s
        self._facts = facts
        self._on_signal = on_signal
        self._last = ledger.clock.boottime()
        self._soon = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._log = get_logger("asynctask.heartbeat")

    def start(self) -> None:
        """Starts the thread; the process must be registered already."""
        self._last = self._ledger.clock.boottime()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopping = True
        self._soon.set()
        if self._thread is not None:
            self._thread.join(10)

    def soon(self) -> None:
        """Sends the next heartbeat at once, for a change that other processes wait for."""
        self._soon.set()

    def fresh(self) -> bool:
        """Whether the lease was renewed recently enough to begin a job; false after the machine was suspended."""
        return self._ledger.clock.boottime() - self._last < micros(self._lease_s * LATE)

    def beat(self) -> None:
        """Sends one heartbeat now. Raises LedgerUnavailable."""
        before = self._ledger.clock.boottime()
        left = processes.beat(self._ledger, lease_s=self._lease_s, rss=memory_bytes(), **self._facts())
        if left != processes.LOST:
            self._last = before
        if left is not None:
            self._on_signal(left)

    def _run(self) -> None:
        pause_s = self._every_s
        while True:
            self._soon.wait(pause_s)
            self._soon.clear()
            if self._stopping:
                return
            pause_s = min(self._every_s, RETRY_S)
            try:
                self.beat()
                pause_s = self._every_s
                history.write(self._ledger)
            except Unavailable as error:
                self._log.retrying("heartbeat_failed", error=str(error))
            except Exception:
                self._log.exception("heartbeat_failed")


def memory_bytes() -> int:
    """The peak memory of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# -- the garbage collector

SELDOM: Final = 50_000
"""Allocations between two collections. A process holds some thousand jobs at a time, each of a few dozen short-lived
objects. With CPython's own thresholds these alone trigger full collections, at a tenth of the throughput of short jobs.
Those of a web server with 1,000 streams took 0.2 s every 10 s, in which nothing was answered."""

UNSET: Final = ((700, 10, 10), (2_000, 10, 10), (2_000, 10, 0))
"""The default thresholds of the CPython releases; any others were set by the application."""


def collect_seldom() -> None:
    """Makes garbage collections rarer in a process that only performs jobs or answers requests; call it after the start.

    Objects that exist now are never examined again. Reference counting still frees memory: the collector handles only
    reference cycles. Changes nothing if thresholds were set, or the collector was turned off.
    """
    found = gc.get_threshold()
    if gc.isenabled() and found in UNSET:
        gc.collect()
        gc.freeze()
        gc.set_threshold(SELDOM, *found[1:])
