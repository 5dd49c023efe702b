"""What ``benchmarks.chaos`` attacks: a database, perhaps a Redis, worker processes, a web server; and the jobs' book."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import redis

from asynctask import AsyncTask
from asynctask.clock import SystemClock
from asynctask.config import ENV_PREFIX
from asynctask.errors import Unavailable
from asynctask.supervisor import LIFELINE
from asynctask.testing import wait_for
from asynctask.testing.servers import MissingServer, free_port, redis_command
from benchmarks.chaos_jobs import build
from benchmarks.chaos_wire import Wire, wire
from benchmarks.databases import NotHere
from benchmarks.servers import SERVERS, SqlServer

__all__ = ["UNAVAILABLE", "Arena", "Death", "Slot", "arena", "patiently"]

THREADS = 4
WORKERS = 4
UNAVAILABLE = 3
"""The exit code of a command that finds no server when it starts."""

MARK = "CHAOS_FOLDER"
ROOT = Path(__file__).resolve().parents[1]
_START_S = 60.0
_PATIENCE_S = 120.0

T = TypeVar("T")
clock = SystemClock()


def patiently(act: Callable[[], T], reason: str, timeout: float = _PATIENCE_S) -> T:
    """The first true answer of something that may ask a database that is away."""

    def tried() -> T | None:
        with suppress(Unavailable):
            return act()
        return None

    found = wait_for(tried, reason, timeout)
    assert found is not None
    return found


@dataclass(frozen=True)
class Death:
    """The end of a worker process: when it was seen alive last, its exit code, and whose deed it was ("" nobody's)."""

    pid: int
    at: float
    code: int
    by: str


@dataclass
class Slot:
    """A place of one worker process, which is replaced when it ends. ``host``: the name of its machine."""

    number: int
    host: str
    ahead_s: float = 0.0
    process: subprocess.Popen[bytes] | None = None
    seen: float = 0.0
    deed: str = ""
    pids: list[int] = field(default_factory=list)

    @property
    def pid(self) -> int:
        """Of its process of this moment; 0 where there is none."""
        return self.process.pid if self.process is not None and self.process.poll() is None else 0


class _Reader:
    """The book of one process, as far as it was read: the jobs that have begun and not ended, each with its Task."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._rest = path, 0, b""
        self._open: dict[tuple[bytes, bytes], int] = {}

    def read(self) -> dict[tuple[bytes, bytes], int]:
        """What is open now."""
        with suppress(OSError), self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
            self._offset += len(text)
            *lines, self._rest = (self._rest + text).split(b"\n")
            for line in lines:
                words = line.split(b" ")
                if words[0] == b"B":
                    self._open[words[4], words[5]] = int(words[2])
                elif words[0] == b"E":
                    self._open.pop((words[4], words[5]), None)
        return self._open


class Redis:
    """A private Redis behind a wire, which comes back at its port, and empty."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise NotHere("redis-server is not installed here: apt-get install redis-server")
        self.port = free_port()
        self._command = redis_command(program, self.port, folder)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it and waits until it answers."""
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        wait_for(self._answers, "redis-server answers", _START_S)

    def _answers(self) -> bool:
        with self.client() as client, suppress(redis.ConnectionError):
            return bool(client.ping())
        return False

    def client(self) -> redis.Redis:
        """A connection past the wire; the caller closes it."""
        return redis.Redis(port=self.port, decode_responses=True)

    def kill(self) -> None:
        """Ends it with all its data."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Arena:
    """Everything of one run. ``folder``: empty, and its own; ``lease_s``: of its processes, in seconds."""

    def __init__(self, folder: Path, kind: str, work_ms: float, lease_s: float) -> None:
        self.folder, self.kind, self._work_ms, self.lease_s = folder, kind, work_ms, lease_s
        self.book = folder / "book"
        self.book.mkdir()
        self.server: SqlServer | None = None
        self.redis: Redis | None = None
        self.database_wire: Wire | None = None
        self.redis_wire: Wire | None = None
        self.url = self.direct_url = f"sqlite:///{folder / 'ledger.db'}"
        self.broker_url = self.direct_broker_url = ""
        self.slots: list[Slot] = []
        self.deaths: list[Death] = []
        self.web: subprocess.Popen[bytes] | None = None
        self.web_port = free_port()
        self.webs_put_off = 0
        self.poller: subprocess.Popen[bytes] | None = None
        self._readers: dict[int, _Reader] = {}
        self._lifeline = os.pipe()
        self._stop, self._lock = threading.Event(), threading.RLock()
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)

    # -- servers

    def open_servers(self, stack: ExitStack, *, with_redis: bool) -> None:
        """Starts the servers that the run is to have, each behind a wire; they end with the stack. Raises
        :class:`NotHere`."""
        if self.kind != "sqlite":
            try:
                self.server = SERVERS[self.kind](durable=True)
                stack.callback(self.server.remove)
                self.server.start()
            except MissingServer as error:
                raise NotHere(str(error)) from error
            self.direct_url = self.server.create("chaos")
            self.database_wire = stack.enter_context(wire(self.server.port))
            self.url = self.server.url("chaos", port=self.database_wire.port)
        if with_redis:
            self.redis = Redis(self.folder)
            stack.callback(self.redis.kill)
            self.redis.start()
            self.redis_wire = stack.enter_context(wire(self.redis.port))
            self.broker_url = f"redis://127.0.0.1:{self.redis_wire.port}/0"
            self.direct_broker_url = f"redis://127.0.0.1:{self.redis.port}/0"

    def app(self) -> AsyncTask:
        """The application as the attacker sees it, past the wires."""
        return build(self.folder, 0.0, environ={}, **self.settings(direct=True))

    def settings(self, *, direct: bool = False) -> dict[str, Any]:
        """Of every process."""
        return {
            "database_url": self.direct_url if direct else self.url,
            "broker_url": self.direct_broker_url if direct else self.broker_url,
            "data_dir": str(self.folder / "data"),
            "lease_s": self.lease_s,
            "heartbeat_s": self.lease_s / 4,
        }

    # -- processes

    def environ(self, **more: str) -> dict[str, str]:
        """The environment of a child: no setting of ours is inherited."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        settings = {ENV_PREFIX + name.upper(): str(value) for name, value in self.settings().items()}
        own = {MARK: str(self.folder), "CHAOS_WORK_MS": str(self._work_ms), "PYTHONPATH": str(ROOT)}
        return {**kept, **settings, **own, LIFELINE: str(self._lifeline[0]), **more}

    def spawn(self, log: str, *words: str, **environ: str) -> subprocess.Popen[bytes]:
        """A child process that leaves with this one, but for one whose :data:`LIFELINE` is empty."""
        with (self.folder / log).open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", *words],
                cwd=self.folder,
                env=self.environ(**environ),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=self._lifeline[:1],
                start_new_session=True,
            )

    def start_workers(self, ahead_s: float) -> None:
        """Starts all, the last with a clock that is wrong; two are of one machine, the others each of its own."""
        hosts = ["one", "one", *(f"host-{number}" for number in range(2, WORKERS))]
        self.slots = [Slot(number, host) for number, host in enumerate(hosts)]
        self.slots[-1].ahead_s = ahead_s
        self._keeper.start()

    def start_web(self) -> None:
        """Starts a web server, at the same port each time, in the place of the one before."""
        words = ("asynctask", "-A", "benchmarks.chaos_app:app", "web", "--port", str(self.web_port))
        with self._lock:
            if self.web is not None:
                self.web.kill()
                self.web.wait()
            self.web = self.spawn("web.log", *words, **{LIFELINE: ""})

    def start_poller(self) -> None:
        """Starts the process that writes down the progress."""
        self.poller = self.spawn("poller.log", "benchmarks.chaos_app")

    def _keep(self) -> None:
        """Replaces worker processes that end, and notes when they ended; and a web server that found no database."""
        while not self._stop.wait(0.02):
            with self._lock:
                self._keep_web()
                for slot in self.slots:
                    self._keep_one(slot)

    def _keep_web(self) -> None:
        if self.web is not None and self.web.poll() == UNAVAILABLE:
            self.webs_put_off += 1
            self.start_web()

    def _keep_one(self, slot: Slot) -> None:
        if slot.process is not None:
            code = slot.process.poll()
            if code is None:
                slot.seen = clock.monotonic()
                return
            self.deaths.append(Death(slot.process.pid, slot.seen, code, slot.deed))
        slot.deed = ""
        words = ("asynctask", "-A", "benchmarks.chaos_app:app", "worker", "-c", str(THREADS), "-t", "5")
        more = {"DYNO": slot.host, "CHAOS_AHEAD": str(slot.ahead_s)}
        slot.process = self.spawn(f"worker-{slot.number}.log", *words, **more)
        slot.pids.append(slot.process.pid)
        slot.seen = clock.monotonic()

    def processes(self) -> dict[int, str]:
        """Every living process of this run: its pid and its command line."""
        mark = f"{MARK}={self.folder}".encode()
        found: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                with suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    # -- the book

    def performing(self, pid: int, task_id: int = 0) -> int:
        """How many jobs (of one Task, if given) a process has begun and not ended, by its book."""
        found = self._readers.setdefault(pid, _Reader(self.book / str(pid))).read()
        return sum(of_task == task_id for of_task in found.values()) if task_id else len(found)

    def at_work(self, task_id: int = 0) -> int:
        """How many jobs (of one Task, if given) are being performed."""
        return sum(self.performing(slot.pid, task_id) for slot in self.slots if slot.pid)

    def have_registered(self, app: AsyncTask) -> bool:
        """Whether the process of every slot is registered, which it is after its signal handlers are set."""
        found = " ".join(each["identity"] for each in app.processes())
        return all(f":{slot.pid}:" in found for slot in self.slots)

    def said(self, pattern: str) -> list[str]:
        """The lines of the logs of the run whose names look like this."""
        texts = [path.read_text(errors="replace") for path in self.folder.glob(pattern)]
        return [line for text in texts for line in text.splitlines()]

    # -- the end

    def end_workers(self) -> list[str]:
        """Tells every worker process to end, in order; returns what is wrong about how they did."""
        self._stop.set()
        if self._keeper.is_alive():
            self._keeper.join()
        living = [slot.process for slot in self.slots if slot.process is not None and slot.process.poll() is None]
        for process in living:
            process.terminate()
        wrong = []
        for process in living:
            try:
                if code := process.wait(60):
                    wrong.append(f"worker {process.pid} ended with {code}")
            except subprocess.TimeoutExpired:
                wrong.append(f"worker {process.pid} did not end")
        return wrong

    def close(self) -> None:
        """Ends what is left, by its pid."""
        self._stop.set()
        if self._keeper.is_alive():
            self._keeper.join()
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in (self.web, self.poller, *(slot.process for slot in self.slots)):
            if process is not None:
                process.wait()
        for descriptor in self._lifeline:
            os.close(descriptor)


@contextmanager
def arena(folder: Path, kind: str, *, with_redis: bool, work_ms: float, lease_s: float) -> Iterator[Arena]:
    """An arena with its servers; everything of it ends with the block."""
    found = Arena(folder, kind, work_ms, lease_s)
    with ExitStack() as stack:
        stack.callback(found.close)
        found.open_servers(stack, with_redis=with_redis)
        yield found
