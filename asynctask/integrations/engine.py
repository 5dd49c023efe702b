"""The parts that run beside an attached engine in its worker process: recorder, heartbeat, maintenance.

The engine keeps its jobs, retries them and redelivers those of a dead process. AsyncTask only records, so there is no
dispatcher, and the tracker works without a fence (see :class:`~asynctask.middleware.tracker.Tracker`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from asynctask.database.notify import LEDGER
from asynctask.errors import Unavailable
from asynctask.ledger import processes
from asynctask.ledger.recorder import Recorder
from asynctask.logs import get_logger
from asynctask.maintenance import Sweep
from asynctask.middleware.chain import Chain
from asynctask.middleware.tracker import Arrival, TaskEventMiddleware, Ticket, Tracker
from asynctask.runtime.heartbeat import Heartbeat
from asynctask.runtime.launcher import Tracked

__all__ = ["EngineProcess"]

LONG_S = 0.1
"""Seconds after which a running job's ``working`` status is written by itself."""

_FLUSH_S = 5.0
_AWAY_S = 0.5

T = TypeVar("T")


class EngineProcess:
    """The parts of one worker process of an engine. Make it in the performing process, after any fork.

    Arguments: ``engine``, its name of at most 8 characters; ``concurrency`` and ``queues`` are only displayed.
    Raises :class:`~asynctask.errors.SchemaOutdated` and LedgerUnavailable.
    """

    def __init__(self, app: Tracked, engine: str, *, concurrency: int = 0, queues: Sequence[str] = ()) -> None:
        self._app = app
        self._engine = engine
        self._concurrency = concurrency
        self._queues = tuple(queues)
        identity = processes.engine_identity(engine, app.host.name, os.getpid(), app.ids.nonce())
        self.ledger = replace(app.ledger, identity=identity)
        self.recorder = Recorder(self.ledger)
        self.tracker = Tracker(self.ledger, self.recorder, elsewhere=True)
        self.chain = self._chain()
        config = app.config
        self._heartbeat = Heartbeat(
            self.ledger, app.clock, every_s=config.heartbeat_s, lease_s=config.lease_s,
            facts=self._heartbeat_facts, on_signal=self._on_signal,
        )  # fmt: skip
        self._sweep = Sweep(
            self.ledger, app.broker, app.host, app.controls,
            waker=app.signals.waker(LEDGER), every_s=min(1.0, config.lease_s / 4),
        )  # fmt: skip
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="ticker", daemon=True)
        self._log = get_logger("asynctask.engine")

    def _chain(self) -> Chain:
        chain = Chain()
        for middleware in self._app.server_middleware:
            chain.add(middleware)
        chain.add(TaskEventMiddleware(self.tracker, self._app.config.max_result_bytes))
        return chain

    # -- lifecycle

    def start(self) -> None:
        """Registers the process and starts its parts. Raises LedgerUnavailable."""
        self._register()
        self.recorder.start()
        self._heartbeat.start()
        self._sweep.start()
        self._ticker.start()

    def quiet(self) -> None:
        """Makes ``should_stop()`` true in running jobs: the engine is shutting down."""
        self._stopping.set()

    def stop(self) -> None:
        """Commits pending records, stops the parts and removes the process."""
        self.quiet()
        recorded = self.recorder.stop(_FLUSH_S)
        self._ended.set()
        self._ticker.join(_FLUSH_S)
        self._sweep.stop()
        self._heartbeat.stop()
        try:
            if recorded and not self.tracker.running():
                processes.forget(self.ledger, self.ledger.identity)
            else:
                processes.give_up(self.ledger)
        except Unavailable as error:  # recovery finds the process later
            self._log.warning("leave_put_off", error=str(error))

    # -- steps of a job, for engines that perform and acknowledge on the same thread

    def begin(self, arrival: Arrival) -> Ticket:
        """The ticket of a job that arrived. Blocks while the ledger is away: no job begins unrecorded."""
        return self._retry_while_away(lambda: self.tracker.begin([arrival])[0])

    def known(self, job_id: str) -> Ticket | None:
        """The ticket of a job with an Event, None for others. Blocks while the ledger is away."""
        return self._retry_while_away(lambda: self.tracker.known(job_id))

    def _retry_while_away(self, operation: Callable[[], T]) -> T:
        pause = threading.Event()
        while True:
            try:
                return operation()
            except Unavailable as error:
                self._log.warning("ledger_away", error=str(error))
                pause.wait(_AWAY_S)

    def settle(self, ticket: Ticket, *, retry_at: int | None = None, discarded: str | None = None) -> None:
        """Records the outcome and blocks until it is committed; all threads of the process share one commit."""
        if ticket.settled:
            return
        done = threading.Event()
        self.tracker.settle(ticket, retry_at=retry_at, discarded=discarded, then=lambda won: done.set())
        done.wait()

    @property
    def should_stop(self) -> bool:
        """Whether the process is shutting down."""
        return self._stopping.is_set()

    # -- parts

    def _register(self) -> None:
        processes.register(
            self.ledger, self._app.host, kind=self._engine, pid=os.getpid(), lease_s=self._app.config.lease_s,
            concurrency=self._concurrency, queues=self._queues,
        )  # fmt: skip

    def _heartbeat_facts(self) -> dict[str, Any]:
        return {"busy": len(self.tracker.running())}

    def _on_signal(self, name: str) -> None:
        if name == processes.LOST:
            # Its jobs go on: without a fence their outcomes still count, and only their Events waited.
            self._log.warning("declared_dead", identity=self.ledger.identity)
            processes.forget(self.ledger, self.ledger.identity)
            self._register()
        else:
            self._log.warning("signal_not_for_engines", signal=name, hint=f"quiet or stop {self._engine} by its own means")

    def _tick(self) -> None:
        while not self._ended.wait(LONG_S):
            self.tracker.note_long(LONG_S)
