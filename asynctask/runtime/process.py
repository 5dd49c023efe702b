"""What every process of an application does beside its work: it is registered, renews its lease, and takes part in
maintenance.

There are three kinds: web processes (:class:`asynctask.wiring.WebProcess`), workers
(:class:`asynctask.runtime.launcher.Launcher`) and workers of an attached engine
(:class:`asynctask.integrations.engine.EngineProcess`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from asynctask._version import __version__
from asynctask.brokers.base import Broker
from asynctask.clock import Clock, Ids
from asynctask.config import Config
from asynctask.database.notify import LEDGER, Signals
from asynctask.dispatch.control import Control
from asynctask.dispatch.demand import Pace
from asynctask.dispatch.dispatcher import Dispatcher
from asynctask.dispatch.outbox import EngineQueues
from asynctask.errors import Unavailable
from asynctask.exports.files import ExportFiles
from asynctask.ledger import processes
from asynctask.ledger.base import Ledger, dumps
from asynctask.lists.uploads import Uploads
from asynctask.logs import get_logger
from asynctask.maintenance import Maintenance
from asynctask.middleware.chain import Chain
from asynctask.middleware.tracker import TaskEventMiddleware, Tracker
from asynctask.runtime.heartbeat import Heartbeat
from asynctask.worker import Worker

__all__ = ["AppProcess", "Dispatching", "Parts", "Tracked", "recording_chain"]


class Tracked(Protocol):
    """The parts of an application that every process needs."""

    config: Config
    clock: Clock
    ids: Ids
    server_middleware: Chain

    @property
    def ledger(self) -> Ledger: ...

    @property
    def broker(self) -> Broker: ...

    @property
    def host(self) -> processes.Host: ...

    @property
    def controls(self) -> Control: ...

    @property
    def engines(self) -> Mapping[str, EngineQueues]: ...

    @property
    def signals(self) -> Signals: ...


class Dispatching(Tracked, Protocol):
    """The parts that a process needs which dispatches and resumes splits of dead processes."""

    @property
    def dispatcher(self) -> Dispatcher: ...

    @property
    def uploads(self) -> Uploads: ...

    @property
    def export_files(self) -> ExportFiles: ...

    def resume_split(self, task_id: int) -> None: ...


class Parts(Dispatching, Protocol):
    """The parts that a worker process needs."""

    @property
    def own_workers(self) -> Mapping[str, Worker]: ...

    def fire(self, event: str, *args: Any) -> None: ...


class AppProcess:
    """A process in the ledger: its row, its heartbeat and its share of maintenance.

    Arguments: ``kind``, ``concurrency`` and ``queues`` are displayed (``queues`` of a worker also decide what is dispatched
    for it); ``ledger`` replaces that of the application if the process has an identity of its own; ``dispatching`` is the
    application again if this process dispatches.
    """

    def __init__(
        self,
        app: Tracked,
        *,
        kind: str,
        concurrency: int = 0,
        queues: Sequence[str] = (),
        ledger: Ledger | None = None,
        dispatching: Dispatching | None = None,
    ) -> None:
        config = app.config
        self.ledger = ledger or app.ledger
        self._host = app.host
        self._lease_s = config.lease_s
        self._kind = kind
        self._concurrency = concurrency
        self._queue_names = tuple(queues)
        self._dispatching = dispatching
        self.figures = processes.Figures()
        self._pace = Pace()
        self._log = get_logger("asynctask.process")
        self.heartbeat = Heartbeat(
            self.ledger,
            app.clock,
            every_s=config.heartbeat_s,
            lease_s=config.lease_s,
            facts=self._beat,
            on_signal=self.obey,
        )
        maintenance = partial(
            Maintenance,
            self.ledger,
            app.broker,
            app.host,
            app.controls,
            waker=app.signals.waker(LEDGER),
            every_s=min(1.0, config.lease_s / 4),
            engines=app.engines,
        )
        if dispatching is None:
            self.maintenance = maintenance()
        else:
            dispatcher = dispatching.dispatcher
            self.maintenance = maintenance(
                resume_split=dispatching.resume_split,
                uploads=dispatching.uploads,
                remove_export=dispatching.export_files.remove,
                purge_after_s=config.purge_after_days * 86_400,
                nudge=dispatcher.nudge,
                expect=dispatcher.expect,
            )

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
        figures = self.figures.as_dict()
        if self._dispatching is not None:
            dispatcher = self._dispatching.dispatcher
            figures |= {"rounds": dispatcher.rounds, "dispatched": dispatcher.dispatched}
        pace = round(self._pace.update(*self.worked()), 6)
        return {**self.facts(), "info": dumps({**self.info(), "pace": pace, "figures": figures})}

    def worked(self) -> tuple[int, float]:
        """Jobs performed in all, and for how many seconds there was one that ran, in all."""
        return 0, 0.0

    def info(self) -> dict[str, Any]:
        """Further members of the row."""
        return {"version": __version__}

    def facts(self) -> dict[str, Any]:
        """The values that each heartbeat writes, such as ``busy``."""
        return {}

    def obey(self, name: str) -> None:
        """A signal from the ledger. ``LOST``, declared dead by another process: registers again, since without a fence its
        outcomes still count, or it holds no jobs."""
        if name == processes.LOST:
            self._log.warning("declared_dead", identity=self.ledger.identity)
            processes.forget(self.ledger, self.ledger.identity)
            self.register()


def recording_chain(app: Tracked, tracker: Tracker) -> Chain:
    """The application's server middleware around the one that records, which stands nearest to the job."""
    chain = Chain()
    for middleware in app.server_middleware:
        chain.add(middleware)
    chain.add(TaskEventMiddleware(tracker, app.config.max_result_bytes))
    return chain
