"""What one process of an application works with: connections and everything that stands on them.

Made on demand, and anew in a forked child: open connections and locks do not survive a fork.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from asynctask._version import __version__
from asynctask.brokers.base import Broker, Copy
from asynctask.brokers.sql.broker import SqlBroker
from asynctask.clock import Clock, Ids, hostname
from asynctask.config import Config
from asynctask.database import schema
from asynctask.database.engine import Database
from asynctask.database.notify import LEDGER, Signals
from asynctask.database.server_clock import read_now
from asynctask.dispatch.control import Control
from asynctask.dispatch.dispatcher import Dispatcher
from asynctask.dispatch.outbox import PushFilter
from asynctask.ledger import processes
from asynctask.ledger.base import Ledger
from asynctask.ledger.readiness import Readiness
from asynctask.lists.dry_run import Checker, DryRunTimeout
from asynctask.lists.readers import Limits
from asynctask.lists.split import Splitter
from asynctask.lists.uploads import Uploads
from asynctask.maintenance.sweep import Sweep
from asynctask.messages import Catalogue
from asynctask.runtime.heartbeat import Heartbeat
from asynctask.runtime.lifeline import LIFELINE
from asynctask.submission import Submitter
from asynctask.task import Services

__all__ = ["Core", "WebServices"]


class Core:
    """What one process of an application works with: connections and everything that stands on them."""

    def __init__(self, config: Config, clock: Clock, ids: Ids, *, outgoing: Callable[[], PushFilter | None]) -> None:
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
        self.ledger = Ledger(self.database, clock, ids, Catalogue(config.locale), identity)
        self.ledger.time.set(read_now(self.database))
        self.broker: Broker = self._made_broker(clock, ids)
        self.readiness = Readiness(self.ledger, Path(config.data_dir))
        self.uploads = Uploads(Path(config.data_dir), config.max_file_bytes, ids)
        self.dispatcher = Dispatcher(
            self.ledger, self.broker, ahead_s=config.dispatch_ahead_s, outgoing=lambda copies: _filtered(outgoing(), copies)
        )
        limits = _limits(config)
        self.services = Services(
            self.ledger, clock, Control(self.ledger, self.broker, clock), self.dispatcher, self.uploads, limits
        )
        splitter = Splitter(
            self.ledger, clock, self.uploads, limits, lease_s=config.lease_s, on_slice=self.dispatcher.nudge
        )
        checker = Checker(self.uploads, limits, clock, seconds=config.dry_run_s, elsewhere=self.check_elsewhere)
        self.submitter = Submitter(
            self.services, splitter, lease_s=config.lease_s, split_elsewhere=self.split_elsewhere, checker=checker
        )

    def _made_broker(self, clock: Clock, ids: Ids) -> Broker:
        config = self._config
        if not config.uses_redis:
            return SqlBroker(self.database, signals=self.signals)
        from asynctask.brokers.redis.broker import RedisBroker  # whoever stays with SQL need not load it

        return RedisBroker(
            config.broker_url, namespace=config.namespace, clock=clock, ids=ids, connections=config.broker_connections,
            dead_max=config.dead_max_jobs, dead_timeout_s=config.dead_timeout_s,
        )  # fmt: skip

    def split_elsewhere(self, task_id: int) -> bool:
        """Starts a child process that splits; False where the application has no name that a child could load."""
        child = self._child("split-task", str(task_id), "--of", self.ledger.identity, stdin=subprocess.DEVNULL)
        if child is None:
            return False
        threading.Thread(target=child.wait, name=f"split-child-{task_id}", daemon=True).start()
        return True

    def check_elsewhere(self, order: bytes, seconds: float) -> bytes | None:
        """Has a child process check a list; its answer, empty where it ended without one. None where no child can be had.

        Raises :class:`DryRunTimeout` when it takes longer than ``seconds``; the child is killed then.
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
        """A command of the program on this application, in a process of its own."""
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
        self.broker.close()
        self.signals.close()
        self.database.close()


class WebServices:
    """Dispatcher, sweep and heartbeat of a process that performs no jobs."""

    def __init__(self, core: Core, config: Config, clock: Clock, *, kind: str, take_up: Callable[[int], None]) -> None:
        self.pid = core.pid
        self._core, self._kind, self._lease_s = core, kind, config.lease_s
        self._sweep = Sweep(
            core.ledger, core.broker, core.host, core.services.control,
            take_up=take_up, uploads=core.uploads, nudge=core.dispatcher.nudge, expect=core.dispatcher.expect,
            waker=core.signals.waker(LEDGER), every_s=min(1.0, config.lease_s / 4),
        )  # fmt: skip
        self._heartbeat = Heartbeat(
            core.ledger, clock, every_s=config.heartbeat_s, lease_s=config.lease_s, on_signal=self._obey
        )

    def start(self) -> None:
        self._register()
        self._heartbeat.start()
        self._core.dispatcher.start()
        self._sweep.start()

    def stop(self) -> None:
        self._core.dispatcher.stop()
        self._sweep.stop()
        self._heartbeat.stop()
        processes.forget(self._core.ledger, self._core.ledger.identity)

    def _register(self) -> None:
        processes.register(
            self._core.ledger, self._core.host, kind=self._kind, pid=self.pid, lease_s=self._lease_s,
            info={"version": __version__},
        )  # fmt: skip

    def _obey(self, name: str) -> None:
        if name == "LOST":  # it holds no jobs, so being declared dead costs it nothing
            processes.forget(self._core.ledger, self._core.ledger.identity)
            self._register()


def _filtered(outgoing: PushFilter | None, copies: Sequence[Copy]) -> Sequence[Copy]:
    """Asked anew for each push: middleware may be added after the dispatcher was made."""
    return copies if outgoing is None else outgoing(copies)


def _limits(config: Config) -> Limits:
    return Limits(
        max_file_bytes=config.max_file_bytes,
        max_unzipped_bytes=config.max_unzipped_bytes,
        max_unzip_ratio=config.max_unzip_ratio,
        max_rows=config.max_rows,
        max_columns=config.max_columns,
        max_cell_chars=config.max_cell_chars,
        max_item_bytes=config.max_item_bytes,
        max_json_depth=config.max_json_depth,
        split_cpu_s=config.split_cpu_s,
        split_memory=config.split_memory,
    )


def _as_environment(config: Config) -> dict[str, str]:
    """The configuration as environment variables, for a child process."""
    return {
        f"ASYNCTASK_{name.upper()}": str(int(value) if isinstance(value, bool) else value)
        for name, value in vars(config).items()
    }
