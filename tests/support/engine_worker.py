"""An engine for the conformance suite: its application in this process, and a worker that its own command starts."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from support import engines
from support.databases import Store
from support.forked import Program

from asynctask.testing import wait_for

# The commands of workers; a word in capitals stands for what each harness has.
OWN: Final = ("-m", "asynctask", "-A", "support.engines:app", "worker", "-c", "THREADS")
CELERY: Final = (
    "-m", "celery", "-A", "support.engines:engine", "worker", "--without-gossip", "--without-mingle", "-c", "THREADS",
    "-n", "QUEUE@%h",
)  # fmt: skip
DRAMATIQ: Final = ("-m", "dramatiq", "support.engines:engine", "-p", "1", "-t", "THREADS")
RQ: Final = (
    "-m", "rq.cli", "worker-pool", "-u", "BROKER", "-c", "support.engines", "-S", "rq.serializers.JSONSerializer",
    "-n", "THREADS", "QUEUE", "-w",
)  # fmt: skip

HUEY: Final = ("-m", "huey.bin.huey_consumer", "support.engines.engine", "-g", "TERM", "-w", "THREADS")


def words(command: Sequence[str], threads: int, folder: Path, broker_url: str) -> list[str]:
    """A command with what the words in capitals stand for."""
    given = {"THREADS": str(threads), "BROKER": broker_url, "QUEUE": engines.queue_of(folder)}
    given["QUEUE@%h"] = f"{given['QUEUE']}@%h"
    return [given.get(word, word) for word in command]


class Harness:
    """An engine, its application here, and a worker started by a command."""

    def __init__(self, kind: str, command: Sequence[str], folder: Path, store: Store, broker_url: str) -> None:
        self._folder, self._store, self._broker_url = folder, store, broker_url
        self._kind, self._command = kind, command
        self.engine, self.app = engines.MADE[kind](folder, store.url, broker_url)
        self.app.ensure_schema()
        self._worker: Program | None = None
        self._threads = 0

    def start(self, threads: int = 2) -> None:
        known = set(self._performers())
        self.spawn(threads)
        wait_for(lambda: set(self._performers()) - known, f"a worker of {self._kind} registers: {self.said()}")

    def send(self, worker: str, item: Mapping[str, Any]) -> str:
        return engines.send(self._kind, self.engine, self._folder, worker, item)

    def spawn(self, threads: int) -> None:
        """Starts a worker, and does not wait for what becomes of it."""
        self._threads = threads
        environ = {**os.environ, **engines.environ(self._kind, self._folder, self._store.url, self._broker_url)}
        with (self._folder / "worker.log").open("ab") as log:
            command = words(self._command, threads, self._folder, self._broker_url)
            self._worker = Program(command, cwd=self._folder, env=environ, output=log)

    def has_ended(self) -> bool:
        """Whether the worker has ended by itself."""
        return self._worker is not None and self._worker.poll() is not None

    def said(self) -> str:
        """The end of the worker's log."""
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
        engines.close(self._kind, self.engine, self._folder)


def family(pid: int) -> list[int]:
    """A process, and those that it and its children have started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [pid, *(each for child in children for each in family(int(child)))]
