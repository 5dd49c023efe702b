"""The parts of one process of an application: connections, and the objects that use them.

They are created on demand, and again in a forked child, because open connections and locks do not survive a fork.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from asynctask.brokers.base import About, Broker, Copy
from asynctask.clock import Clock, Ids, hostname
from asynctask.config import Config
from asynctask.database import schema
from asynctask.database.engine import Database, read_time
from asynctask.database.notify import Signals
from asynctask.dispatch.control import TaskControls
from asynctask.dispatch.dispatcher import Dispatcher
from asynctask.dispatch.outbox import EngineQueues
from asynctask.errors import ConfigError, Unavailable
from asynctask.exports.files import ExportFiles, store_of
from asynctask.integrations.base import Engine
from asynctask.ledger import processes
from asynctask.ledger.base import Ledger
from asynctask.ledger.doctor import Readiness
from asynctask.ledger.queries import DeadCount
from asynctask.ledger.rates import Rates
from asynctask.ledger.schedules import Schedules, Ticker
from asynctask.lists.cleaning import Cleaning
from asynctask.lists.dry_run import Checker, DryRunTimeout
from asynctask.lists.readers import Limits
from asynctask.lists.split import Splitter
from asynctask.lists.uploads import Uploads
from asynctask.maintenance import Maintenance
from asynctask.messages import Catalogue
from asynctask.middleware.chain import Chain
from asynctask.operations import Operations
from asynctask.runtime.execution import Execution, Hook
from asynctask.runtime.process import AppProcess, Dispatching
from asynctask.sidekiq.copies import Outgoing, PushFilter
from asynctask.submission import Carrier, Submitter
from asynctask.supervisor import LIFELINE
from asynctask.task import Addition, Services
from asynctask.worker import Worker


class Core:
    """The parts of one process of an application."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        ids: Ids,
        *,
        outgoing: Callable[[], PushFilter | None],
        engines: Mapping[str, EngineQueues],
        workers: Callable[[], Mapping[str, Worker]],
        carriers: Sequence[Carrier],
        closed: Callable[[int], None],
        waits_for: Callable[[int], str],
        add: Callable[..., Addition],
    ) -> None:
        self.pid = os.getpid()
        self._config = config
        self.database = Database(config.database_url, pool_size=config.database_connections)
        try:
            schema.ensure(self.database)
        except BaseException:
            self.database.close()
            raise
        self.signals = Signals(self.database)
        name = hostname()
        self.host = processes.Host.local(name)
        identity = f"{name[:40]}:{self.pid}:{ids.nonce()}"
        self.ledger = Ledger(
            self.database, clock, ids, Catalogue(config.locale), identity, closed=closed,
            keeps_tracebacks=config.keep_tracebacks,
        )  # fmt: skip
        with self.database.read() as connection:
            for _ in range(3):  # the fastest answer is the most exact
                self.ledger.time.set(read_time(connection, clock))
        self.broker = self._made_broker(clock, ids)
        self.readiness = Readiness(self.ledger, Path(config.data_dir))
        self.dead = DeadCount(self.ledger)
        self.uploads = Uploads(Path(config.data_dir), config.max_file_bytes, ids)
        self.dispatcher = Dispatcher(
            self.ledger,
            self.broker,
            self.signals.waker(for_jobs=True),
            ahead_s=config.dispatch_ahead_s,
            fair_by_owner=config.fair_by == "owner",
            background_share=config.background_share,
            outgoing=lambda copies: _filtered(outgoing(), copies),
            engines=engines,
        )
        known = {each.name for each in fields(Limits)} & vars(config).keys()
        limits = Limits(**{name: getattr(config, name) for name in known})
        self.services = Services(
            self.ledger, clock, TaskControls(self.ledger, self.broker), self.uploads, limits,
            workers=workers, is_shared=self.broker is not None, waits_for=waits_for,
            add=add,
        )  # fmt: skip
        splitter = Splitter(self.ledger, clock, self.uploads, limits, lease_s=config.lease_s)
        checker = Checker(self.ledger, self.uploads, limits, seconds=config.dry_run_s, elsewhere=self.check_elsewhere)
        self.submitter = Submitter(
            self.services, splitter, lease_s=config.lease_s, split_elsewhere=self.split_elsewhere, checker=checker,
            carriers=carriers,
        )  # fmt: skip

    def _made_broker(self, clock: Clock, ids: Ids) -> Broker | None:
        config = self._config
        if not config.uses_redis:
            return None
        from asynctask.sidekiq.broker import RedisBroker  # not imported without Redis

        return RedisBroker(
            config.broker_url,
            namespace=config.namespace,
            clock=clock,
            ids=ids,
            connections=config.broker_connections,
            dead_max=config.dead_max_jobs,
            dead_timeout_s=config.dead_timeout_s,
        )

    def split_elsewhere(self, task_id: int) -> bool:
        """Starts a child process that splits a Task; False if the application has no name that a child could load."""
        child = self._child("split-task", str(task_id), "--of", self.ledger.identity, stdin=subprocess.DEVNULL)
        if child is None:
            return False
        threading.Thread(target=child.wait, name=f"split-child-{task_id}", daemon=True).start()
        return True

    def check_elsewhere(self, order: bytes, seconds: float) -> bytes | None:
        """Checks a list in a child process. Returns the child's response, empty if it ended without one; None if no child
        can be started. After ``seconds``, kills the child and raises :class:`DryRunTimeout`.
        """
        with tempfile.TemporaryDirectory(prefix="asynctask-check-") as folder:
            answer = Path(folder) / "answer.json"
            child = self._child("check-list", str(answer), stdin=subprocess.PIPE)
            if child is None:
                return None
            with child:
                try:
                    child.communicate(order, timeout=seconds)
                except subprocess.TimeoutExpired:
                    raise DryRunTimeout(seconds) from None
                finally:
                    child.kill()
            return answer.read_bytes() if answer.exists() else b""

    def _child(self, *command: str, stdin: int) -> subprocess.Popen[bytes] | None:
        """Starts a command of the program on this application, in a child process."""
        config = self._config
        if not config.app:
            return None
        environ = {**os.environ, **_as_environment(config)}
        lifeline = environ.get(LIFELINE, "")
        passed = (int(lifeline),) if lifeline.isdecimal() else ()
        argv = [sys.executable, "-m", "asynctask", "-A", config.app, *command]
        try:
            return subprocess.Popen(argv, env=environ, pass_fds=passed, stdin=stdin, start_new_session=True)
        except OSError:
            return None

    def close(self) -> None:
        if self.broker is not None:
            self.broker.close()
        self.signals.close()
        self.database.close()


class WebProcess(AppProcess):
    """A process that performs no jobs: its heartbeat, dispatcher and maintenance."""

    def __init__(self, app: Dispatching) -> None:
        super().__init__(app, kind="web")
        self.pid = os.getpid()

    def start(self) -> None:
        """Registers the process and starts its parts. Raises LedgerUnavailable."""
        self.register()
        self.heartbeat.start()
        self.dispatcher.start()
        self.maintenance.start()

    def stop(self) -> None:
        """Stops the parts and removes the process."""
        self.dispatcher.stop()
        self.maintenance.stop()
        self.heartbeat.stop()
        self.leave()


def _filtered(outgoing: PushFilter | None, copies: Sequence[Copy]) -> Sequence[Copy]:
    """The copies after the client middleware, which is evaluated for each push, because middleware may be added later."""
    return copies if outgoing is None else outgoing(copies)


def _as_environment(config: Config) -> dict[str, str]:
    """The configuration as environment variables, for a child process."""
    return {
        f"ASYNCTASK_{name.upper()}": str(int(value) if isinstance(value, bool) else value)
        for name, value in vars(config).items()
    }


# -- the parts of an application, made on demand


class OnDemand(ABC):
    """The parts of an application with this ``config``, ``clock`` and ``ids``. No part connects before its first use."""

    def __init__(self, config: Config, clock: Clock, ids: Ids) -> None:
        self.config = config
        self.clock = clock
        self.ids = ids
        self.client_middleware = Chain()
        self.server_middleware = Chain()
        self._carriers: list[Carrier] = []
        self._workers: dict[str, Worker] = {}
        self._internal: dict[str, Worker] = {}  # workers for which no list can be submitted
        self._engines: dict[str, Engine] = {}
        self._lock = threading.RLock()
        self._core: Core | None = None
        self._web: WebProcess | None = None

    @property
    def workers(self) -> Mapping[str, Worker]:
        """The registered workers by name, including those of attached engines."""
        return ChainMap(self._workers, *(engine.workers for engine in self._engines.values()))  # type: ignore[arg-type]

    @property
    def own_workers(self) -> Mapping[str, Worker]:
        """The workers that this application's own worker processes perform, including internal ones."""
        return ChainMap(self._workers, self._internal)

    @property
    def engines(self) -> Mapping[str, Engine]:
        """The attached engines by name."""
        return MappingProxyType(self._engines)

    def attach(self, engine: Engine) -> None:
        """Adds an engine; each ``attach`` of :mod:`asynctask.integrations` calls this. Raises :class:`ConfigError` if
        another engine of the same name is attached."""
        if engine.name in self._engines:
            raise ConfigError(f"{engine.name} is attached to this application already; attach it once")
        self._engines[engine.name] = engine

    @property
    @abstractmethod
    def schedules(self) -> Schedules:
        """The schedules of the application."""

    @abstractmethod
    def resume_split(self, task_id: int) -> None:
        """Resumes a split whose process died."""

    @abstractmethod
    def fire(self, event: str, *args: Any) -> None:
        """Calls the hooks of an event."""

    @abstractmethod
    def add_items(
        self, task_id: int, items: Iterable[Any], *, idempotency_key: str | None = None, who: str = ""
    ) -> Addition:
        """Adds items to an open Task."""

    @abstractmethod
    def task_closed(self, task_id: int) -> None:
        """Notifies the observers that this process has closed a Task."""

    @property
    def ledger(self) -> Ledger:
        """The ledger, with the identity of this process."""
        return self._made().ledger

    @property
    def broker(self) -> Broker | None:
        """The broker; None without Redis, where all jobs wait in the ledger."""
        return self._made().broker

    @property
    def host(self) -> processes.Host:
        """This machine."""
        return self._made().host

    @property
    def controls(self) -> TaskControls:
        """Control of Tasks."""
        return self._made().services.control

    @property
    def dispatcher(self) -> Dispatcher:
        """This process's dispatcher."""
        return self._made().dispatcher

    @property
    def signals(self) -> Signals:
        """The notifications from other processes."""
        return self._made().signals

    @property
    def uploads(self) -> Uploads:
        """The store of uploaded lists."""
        return self._made().uploads

    @property
    def operations(self) -> Operations:
        """Operations on queues, retries, scheduled and dead jobs, and processes."""
        core, named = self._made(), (self.config.callback_queue, *self.config.queue_weights())
        return Operations(core.services, core.broker, core.dead, self.engines, self.workers, named)

    def _waits_for(self, task_id: int) -> str:
        try:
            reasons = self.operations.wait_reasons(task_id)
        except Unavailable as error:
            return f"{error.code}: {error}"
        return f"{reasons[0].code}: {reasons[0].message}" if reasons else ""

    @property
    def rates(self) -> Rates:
        """The rate limits of workers."""
        return Rates(lambda: self.ledger)

    @property
    def export_files(self) -> ExportFiles:
        """The store of exports."""
        return ExportFiles(store_of(self.config, self.ids))

    @property
    def limits(self) -> Limits:
        """The limits of the readers."""
        return self._made().services.limits

    def outgoing(self) -> PushFilter | None:
        """The client middleware as it is applied to the jobs of Tasks; None if there is none."""
        if not len(self.client_middleware):
            return None
        return Outgoing(self.ledger, self.client_middleware, {**self._internal, **self.workers})

    def maintenance(self, ledger: Ledger) -> Maintenance:
        """The maintenance of a process that is registered in this ledger."""
        core, config = self._made(), self.config
        cleaning = Cleaning(
            ledger,
            core.uploads,
            remove_export=self.export_files.remove,
            purge_after_s=config.purge_after_days * 86_400,
        )
        return Maintenance(
            ledger,
            core.broker,
            core.host,
            core.services.control,
            resume_split=self.resume_split,
            keep_history=lambda: self.operations.keep_history(config.history_days * 86_400),
            cleaning=cleaning,
            ticker=Ticker(self.schedules, ledger, self.ids),
            waker=core.signals.waker(),
            every_s=min(1.0, config.lease_s / 4),
            engines=self._engines,
        )

    def database(self) -> Database:
        """A separate database object, to inspect the schema; the caller closes it."""
        return Database(self.config.database_url, pool_size=self.config.database_connections)

    def ensure_schema(self) -> None:
        """Creates the schema in an empty SQLite file. Raises SchemaOutdated, with the command to run, for any other
        database whose schema is not the required one."""
        self._made()

    def _made(self) -> Core:
        core = self._core
        if core is None or core.pid != os.getpid():
            with self._lock:
                if self._core is None or self._core.pid != os.getpid():
                    self._core = Core(
                        self.config,
                        self.clock,
                        self.ids,
                        outgoing=self.outgoing,
                        engines=self._engines,
                        workers=lambda: self.workers,
                        carriers=self._carriers,
                        closed=self.task_closed,
                        waits_for=self._waits_for,
                        add=self.add_items,
                    )
                core = self._core
        return core

    def sharing(
        self,
        about: About,
        *,
        running: Callable[[], Sequence[Execution]],
        is_quiet: Callable[[], bool],
        on_signal: Callable[[str], None],
    ) -> Hook:
        """The hook of a worker process for its broker, other programs there, and untracked jobs."""
        from asynctask.sidekiq.sharing import Sharing  # imported by worker processes only

        return Sharing(
            self.broker,
            self.clock,
            self.ids,
            about,
            self.own_workers,
            running=running,
            is_quiet=is_quiet,
            on_signal=on_signal,
            average_s=self.config.poll_interval_s,
        )

    def start_services(self) -> None:
        """Registers this process and runs dispatcher and maintenance in it; for web processes. Idempotent."""
        with self._lock:
            if self._web is None or self._web.pid != os.getpid():
                self._web = WebProcess(self)
                self._web.start()

    def stop_services(self) -> None:
        """Stops what :meth:`start_services` started."""
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
