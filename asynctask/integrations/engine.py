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

from asynctask.errors import Unavailable
from asynctask.ledger import processes
from asynctask.ledger.recorder import Recorder
from asynctask.logs import get_logger
from asynctask.middleware.tracker import Arrival, Ticket, Tracker
from asynctask.runtime.process import AppProcess, Tracked, recording_chain

__all__ = ["EngineProcess"]

LONG_S = 0.1
"""Seconds after which a running job's ``working`` status is written by itself."""

_FLUSH_S = 5.0
_AWAY_S = 0.5

T = TypeVar("T")


class EngineProcess(AppProcess):
    """The parts of one worker process of an engine. Make it in the performing process, after any fork.

    Arguments: ``engine``, its name of at most 8 characters; ``concurrency`` and ``queues`` are only displayed.
    Raises :class:`~asynctask.errors.SchemaOutdated` and LedgerUnavailable.
    """

    def __init__(self, app: Tracked, engine: str, *, concurrency: int = 0, queues: Sequence[str] = ()) -> None:
        identity = processes.engine_identity(engine, app.host.name, os.getpid(), app.ids.nonce())
        ledger = replace(app.ledger, identity=identity)
        super().__init__(app, kind=engine, concurrency=concurrency, queues=queues, ledger=ledger)
        self._engine = engine
        self.recorder = Recorder(self.ledger)
        self.tracker = Tracker(self.ledger, self.recorder, elsewhere=True)
        self.chain = recording_chain(app, self.tracker)
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="ticker", daemon=True)
        self._log = get_logger("asynctask.engine")

    # -- lifecycle

    def start(self) -> None:
        """Registers the process and starts its parts. Raises LedgerUnavailable."""
        self.register()
        self.recorder.start()
        self.heartbeat.start()
        self.sweep.start()
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
        self.sweep.stop()
        self.heartbeat.stop()
        self.leave(empty=recorded and not self.tracker.running())

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

    def facts(self) -> dict[str, Any]:
        return {"busy": len(self.tracker.running())}

    def obey(self, name: str) -> None:
        if name == processes.LOST:
            super().obey(name)  # its jobs go on: only their Events waited
        else:
            self._log.warning("signal_not_for_engines", signal=name, hint=f"quiet or stop {self._engine} by its own means")

    def _tick(self) -> None:
        while not self._ended.wait(LONG_S):
            self.tracker.note_long(LONG_S)
