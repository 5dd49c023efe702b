"""What a worker process of an attached engine runs beside the engine: recorder, heartbeat, sweep.

The engine keeps its jobs, retries them and delivers again what a dead process held. Ours is the record alone, so there is
no dispatcher here, and the tracker works without a fence (see :class:`~asynctask.middleware.tracker.Tracker`).
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
"""A job that runs for longer than this has its ``working`` status written by itself."""

_FLUSH_S = 5.0
_AWAY_S = 0.5

T = TypeVar("T")


class EngineProcess:
    """The parts of one worker process of an engine. Make it in the process that performs, after any fork.

    Arguments: ``engine`` is its name, at most 8 characters; ``concurrency`` and ``queues`` are for those who look on.
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
            tell=self._tell, on_signal=self._obey,
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

    # -- life

    def start(self) -> None:
        """Registers the process and starts its parts. Raises LedgerUnavailable."""
        self._register()
        self.recorder.start()
        self._heartbeat.start()
        self._sweep.start()
        self._ticker.start()

    def quiet(self) -> None:
        """The engine is shutting down: ``should_stop()`` of running jobs says so from now on."""
        self._stopping.set()

    def stop(self) -> None:
        """Commits what is there, ends the parts and signs off."""
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
        except Unavailable as error:  # it is found when this process is gone
            self._log.warning("leave_put_off", error=str(error))

    # -- the steps of a job, for engines that perform and acknowledge on one and the same thread

    def begin(self, arrival: Arrival) -> Ticket:
        """The ticket of a job that came. While the ledger is away this waits: nothing begins unrecorded."""
        return self._when_there(lambda: self.tracker.begin([arrival])[0])

    def known(self, job_id: str) -> Ticket | None:
        """The ticket of a job that has an Event, None for others. While the ledger is away this waits."""
        return self._when_there(lambda: self.tracker.known(job_id))

    def _when_there(self, ask: Callable[[], T]) -> T:
        pause = threading.Event()
        while True:
            try:
                return ask()
            except Unavailable as error:
                self._log.warning("ledger_away", error=str(error))
                pause.wait(_AWAY_S)

    def settle(self, ticket: Ticket, *, retry_at: int | None = None, discarded: str | None = None) -> None:
        """Has the outcome recorded and waits until it is committed; all threads of the process wait for one commit."""
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

    def _tell(self) -> dict[str, Any]:
        return {"busy": len(self.tracker.running())}

    def _obey(self, name: str) -> None:
        if name == processes.LOST:
            # Its jobs go on: they have no fence, so what they come to still counts. Only their Events waited meanwhile.
            self._log.warning("declared_dead", identity=self.ledger.identity)
            processes.forget(self.ledger, self.ledger.identity)
            self._register()
        else:
            self._log.warning("signal_not_for_engines", signal=name, hint=f"quiet or stop {self._engine} by its own means")

    def _tick(self) -> None:
        while not self._ended.wait(LONG_S):
            self.tracker.note_long(LONG_S)
