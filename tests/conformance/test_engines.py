"""The suite of engines: the own runtime, Celery, Dramatiq and RQ pass it, with their own worker commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import pytest
from support import engines
from support.databases import Databases, Store
from support.servers import RedisServer
from support.world import SUPPORT

from asynctask.testing import wait_for
from asynctask.testing.engine_suite import EngineConformance, EngineHarness

pytestmark = pytest.mark.needs_redis


class Harness:
    """An engine, its application here, and a worker started by a command."""

    def __init__(self, kind: str, command: Sequence[str], folder: Path, store: Store, server: RedisServer) -> None:
        self._folder, self._store, self._server = folder, store, server
        self._kind, self._command = kind, command
        self.engine, self.app = engines.MADE[kind](folder, store.url, server.url)
        self.app.ensure_schema()
        self._worker: subprocess.Popen[bytes] | None = None
        self._threads = 0

    def start(self, threads: int = 2) -> None:
        known, self._threads = set(self._performers()), threads
        environ = {
            **os.environ,
            engines.ENGINE: self._kind,
            engines.FOLDER: str(self._folder),
            engines.DATABASE: self._store.url,
            engines.REDIS: self._server.url,
            "PYTHONPATH": f"{SUPPORT.parent}:{SUPPORT.parent.parent}",
        }
        given = {"THREADS": str(threads), "REDIS": self._server.url, "QUEUE": f"{self._folder.name}-default"}
        words = [given.get(word, word) for word in self._command]
        with (self._folder / "worker.log").open("ab") as log:
            self._worker = subprocess.Popen(
                [sys.executable, *words], cwd=self._folder, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        wait_for(lambda: set(self._performers()) - known, f"a worker of {self._kind} registers: {self._said()}")

    def _said(self) -> str:
        log = self._folder / "worker.log"
        return log.read_text(errors="replace")[-3_000:] if log.exists() else ""

    def _performers(self) -> list[int]:
        return [each["pid"] for each in self.app.processes() if each["kind"] in (self._kind, "worker")]

    def stop(self) -> None:
        assert self._worker is not None
        self._worker.terminate()
        self._worker.wait(60)

    def kill(self) -> None:
        self._end()
        self.start(self._threads)

    def _end(self) -> None:
        if self._worker is None:
            return
        for pid in {*self._performers(), *family(self._worker.pid)}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._worker.wait()

    def close(self) -> None:
        self._end()
        self.app.close()
        if self._kind == "celery":
            self.engine.close()
        elif self._kind == "dramatiq":
            self.engine.client.close()
            self.engine.client.connection_pool.disconnect()
        elif self._kind == "rq":
            self.engine.connection.close()


def family(pid: int) -> list[int]:
    """A process, and those that it and its children have started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [pid, *(each for child in children for each in family(int(child)))]


class OnSqlite(EngineConformance):
    """On a database of its own for each harness."""

    kind: ClassVar[str]
    command: ClassVar[Sequence[str]]

    @pytest.fixture(autouse=True)
    def _servers(self, databases: Databases, redis_server: RedisServer) -> None:
        self._databases, self._server = databases, redis_server

    def make_harness(self, folder: Path) -> EngineHarness:
        return Harness(self.kind, self.command, folder, self._databases.fresh("sqlite", folder), self._server)


@pytest.mark.full(reason="the own runtime has tests of its own of each of these")
class TestOwnRuntime(OnSqlite):
    kind = "own"
    command = ("-m", "asynctask", "-A", "support.engines:app", "worker", "-c", "THREADS")


CELERY = ("-m", "celery", "-A", "support.engines:engine", "worker", "--without-gossip", "--without-mingle", "-c", "THREADS")


@pytest.mark.full(reason="tests/integration/test_celery.py has threads; here is the pool that Celery takes by default")
class TestCeleryInThreads(OnSqlite):
    kind = "celery"
    command = (*CELERY, "-P", "threads")


class TestCeleryInProcesses(OnSqlite):
    kind = "celery"
    command = (*CELERY, "-P", "prefork")


class TestDramatiq(OnSqlite):
    kind = "dramatiq"
    command = ("-m", "dramatiq", "support.engines:engine", "-p", "1", "-t", "THREADS")


RQ = ("-m", "rq.cli", "worker-pool", "-u", "REDIS", "-c", "support.engines", "-S", "json", "-n", "THREADS", "QUEUE", "-w")


class TestRq(OnSqlite):
    kind = "rq"
    command = (*RQ, "asynctask.integrations.rq.TrackedWorker")


@pytest.mark.full(reason="tests/integration/test_rq.py has it; here is the worker that RQ takes by default")
class TestRqWithoutWorkHorse(OnSqlite):
    kind = "rq"
    command = (*RQ, "asynctask.integrations.rq.TrackedSimpleWorker")
