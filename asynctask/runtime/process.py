"""What every process of an application does beside its work: it is registered, renews its lease, and takes part in
maintenance.

There are three kinds: web processes (:class:`asynctask.wiring.WebProcess`), workers
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
from asynctask.ledger import processes
from asynctask.ledger.base import Ledger, dumps
from asynctask.logs import get_logger
from asynctask.maintenance import Maintenance
from asynctask.middleware.chain import Chain
from asynctask.runtime.execution import Execution, Hook
from asynctask.sidekiq.copies import PushFilter
from asynctask.worker import Worker


class Dispatching(Protocol):
    """The parts of an application that every process needs: each dispatches, and takes part in maintenance."""

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

    def fire(self, event: str, *args: Any) -> None: ...


ENOUGH: Final = 50
"""Jobs over which a :class:`Pace` is measured."""

SHORTEST_S: Final = 0.05
"""Busy seconds over which a :class:`Pace` is measured, at least, if more jobs ended."""

LEAST_S: Final = 0.0125
"""Shortest time over which the first few jobs count: they say little about the next thousand."""


class Pace:
    """Jobs per second over the last :data:`ENOUGH` jobs or more, in seconds in which at least one runs.

    Steady for jobs of any length, and kept while nothing runs.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[int, float]] = deque([(0, 0.0)], maxlen=1_000)  # whenever jobs had ended

    def update(self, count: int, busy_s: float) -> float:
        """The pace after ``count`` jobs in all, with some job running for ``busy_s`` seconds in all; 0 if it is unknown."""
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

    Arguments: ``kind``, ``concurrency`` and ``queues`` are displayed (``queues`` of a worker also decide what is dispatched
    for it); ``ledger`` replaces that of the application if the process has an identity of its own.
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
        self._host = app.host
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
        """Writes the row of this process. Raises LedgerUnavailable."""
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
        """Removes the row. If the process may still hold jobs (not ``empty``), ends its lease instead, so that they are
        recovered."""
        try:
            if empty:
                processes.forget(self.ledger, self.ledger.identity)
            else:
                processes.give_up(self.ledger)
        except Unavailable as error:  # recovery finds the process when it is gone
            self._log.warning("leave_put_off", error=str(error))

    def _beat(self) -> dict[str, Any]:
        dispatched = {"rounds": self.dispatcher.passes, "dispatched": self.dispatcher.dispatched}
        figures = self.figures.as_dict() | dispatched
        pace = round(self._pace.update(*self.worked()), 6)
        return {**self.facts(), "info": dumps({**self.info(), "pace": pace, "figures": figures})}

    def worked(self) -> tuple[int, float]:
        """Number of jobs performed, and of seconds in which at least one ran."""
        return 0, 0.0

    def info(self) -> dict[str, Any]:
        """Further members of the row."""
        return {"version": __version__}

    def facts(self) -> dict[str, Any]:
        """The values that each heartbeat writes, such as ``busy``."""
        return {}

    def obey(self, name: str) -> None:
        """Obeys a signal from the ledger. ``LOST``, declared dead by another process: registers again, since without a
        fence its outcomes still count, or it holds no jobs."""
        if name == processes.LOST:
            self._log.warning("declared_dead", identity=self.ledger.identity)
            processes.forget(self.ledger, self.ledger.identity)
            self.register()


# -- heartbeats: the one that renews the lease in the ledger, and the one that the broker's tools see

LATE = 0.75
"""Share of the lease after which a process that could not renew it begins no job."""

RETRY_S = 1.0
"""Seconds until a failed heartbeat is tried again."""


class Heartbeat:
    """Renews the lease every ``every_s`` seconds, in its own thread.

    ``facts`` returns the values to write (``busy``, ``rate``, ...); ``on_signal`` is called with a signal left in the
    ledger (``TSTP``, ``TERM``), or ``LOST`` when another process has declared this one dead.
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
        self._every_s = min(every_s, lease_s / 3)  # two beats in a row may fail
        self._lease_s = lease_s
        self._facts = facts
        self._on_signal = on_signal
        self._last = ledger.clock.boottime()
        self._soon = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._log = get_logger("asynctask.heartbeat")

    def start(self) -> None:
        """Starts beating; the process must be registered already."""
        self._last = self._ledger.clock.boottime()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops beating."""
        self._stopping = True
        self._soon.set()
        if self._thread is not None:
            self._thread.join(10)

    def soon(self) -> None:
        """Beats at once, for a change that other processes wait for."""
        self._soon.set()

    def fresh(self) -> bool:
        """Whether the lease was renewed recently enough to start a job; not after the machine was suspended."""
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
            except Unavailable as error:
                self._log.retrying("heartbeat_failed", error=str(error))
            except Exception:
                self._log.exception("heartbeat_failed")


def memory_bytes() -> int:
    """The most memory this process has used, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# -- the garbage collector

SELDOM: Final = 50_000
"""Allocations between collections. A process holds some thousand jobs at a time, of a few dozen short-lived objects each.
With CPython's own thresholds these alone trigger full collections repeatedly: a tenth of the rate of short jobs."""

UNSET: Final = ((700, 10, 10), (2_000, 10, 10), (2_000, 10, 0))
"""The thresholds with which the releases of CPython start: others are a setting of the application."""


def collect_seldom() -> None:
    """Reduces garbage collections, in a process whose only purpose is to perform jobs, after its start.

    Objects that exist now stay as long as the process and are not examined again. Memory is freed as before: the collector
    handles reference cycles only. Changes nothing if thresholds were set, or the collector was turned off.
    """
    found = gc.get_threshold()
    if gc.isenabled() and found in UNSET:
        gc.collect()
        gc.freeze()
        gc.set_threshold(SELDOM, *found[1:])
