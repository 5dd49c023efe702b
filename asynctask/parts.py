"""What an application is made of, made when it is first asked for, and anew in a forked child."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod

from asynctask.brokers.base import Broker
from asynctask.clock import Clock, Ids
from asynctask.config import Config
from asynctask.database.engine import Database
from asynctask.database.notify import Signals
from asynctask.dispatch.client_middleware import Outgoing
from asynctask.dispatch.control import Control
from asynctask.dispatch.dispatcher import Dispatcher
from asynctask.dispatch.outbox import PushFilter
from asynctask.ledger import processes
from asynctask.ledger.base import Ledger
from asynctask.lists.readers import Limits
from asynctask.lists.uploads import Uploads
from asynctask.middleware.chain import Chain
from asynctask.wiring import Core, WebServices
from asynctask.worker import Worker

__all__ = ["OnDemand"]


class OnDemand(ABC):
    """The parts of an application with this ``config``, ``clock`` and ``ids``. Nothing connects before it is used."""

    def __init__(self, config: Config, clock: Clock, ids: Ids) -> None:
        self.config = config
        self.clock = clock
        self.ids = ids
        self.client_middleware = Chain()
        self.server_middleware = Chain()
        self._workers: dict[str, Worker] = {}
        self._lock = threading.RLock()
        self._core: Core | None = None
        self._web: WebServices | None = None

    @abstractmethod
    def take_up_split(self, task_id: int) -> None:
        """Takes up a split whose process died."""

    @property
    def ledger(self) -> Ledger:
        """The ledger, as this process."""
        return self._made().ledger

    @property
    def broker(self) -> Broker:
        """The broker."""
        return self._made().broker

    @property
    def host(self) -> processes.Host:
        """This machine."""
        return self._made().host

    @property
    def controls(self) -> Control:
        """Control of Tasks."""
        return self._made().services.control

    @property
    def dispatcher(self) -> Dispatcher:
        """This process's dispatcher."""
        return self._made().dispatcher

    @property
    def signals(self) -> Signals:
        """What this process hears of others."""
        return self._made().signals

    @property
    def uploads(self) -> Uploads:
        """Where uploaded lists are kept."""
        return self._made().uploads

    @property
    def limits(self) -> Limits:
        """How much a reader takes."""
        return self._made().services.limits

    def outgoing(self) -> PushFilter | None:
        """The client middleware as the dispatcher applies it to the jobs of Tasks; None where there is none."""
        if not len(self.client_middleware):
            return None
        return Outgoing(self.ledger, self.client_middleware, self._workers)

    def database(self) -> Database:
        """A database of its own, for looking at the schema; the caller closes it."""
        return Database(self.config.database_url, pool_size=self.config.database_connections)

    def ensure_schema(self) -> None:
        """Sets up an empty SQLite file; raises SchemaOutdated, with the command to run, for any other schema."""
        self._made()

    def _made(self) -> Core:
        core = self._core
        if core is None or core.pid != os.getpid():
            with self._lock:
                if self._core is None or self._core.pid != os.getpid():
                    self._core = Core(self.config, self.clock, self.ids, outgoing=self.outgoing)
                core = self._core
        return core

    def start_services(self, kind: str = "web") -> None:
        """Registers this process and runs dispatcher and sweep in it; for web processes. Again does nothing."""
        with self._lock:
            if self._web is None or self._web.pid != os.getpid():
                self._web = WebServices(self._made(), self.config, self.clock, kind=kind, take_up=self.take_up_split)
                self._web.start()

    def stop_services(self) -> None:
        """Ends what :meth:`start_services` began."""
        with self._lock:
            if self._web is not None and self._web.pid == os.getpid():
                self._web.stop()
            self._web = None

    def close(self) -> None:
        """Stops services and closes connections."""
        self.stop_services()
        with self._lock:
            if self._core is not None and self._core.pid == os.getpid():
                self._core.close()
            self._core = None
