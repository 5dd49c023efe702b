"""A folder with a ledger of its own, a shop that jobs write to, and processes that leave with the test.

The ledger lies in a database that watches it from inside: see :mod:`support.databases`. Jobs wait there too, or in Redis.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from support.broker_looks import BrokerLook, LedgerLook, RedisLook
from support.databases import Store
from support.forked import Program, run_program

from asynctask import AsyncTask, NormalException, current_job
from asynctask.ledger.processes import list_processes
from asynctask.runtime.launcher import Launcher
from asynctask.supervisor import LIFELINE
from asynctask.testing import wait_for

SUPPORT = Path(__file__).parent
MARK = "TEST_WORLD"
"""Environment variable with the folder: what every process of a test carries."""

DATABASE = "TEST_DATABASE"
"""Environment variable with the URL of its database."""

BROKER = "TEST_BROKER"
"""Environment variable with the URL of the Redis server where its jobs wait, if they do."""

Started = subprocess.Popen[bytes] | Program
"""A child process: started as users start it, or forked."""

TERMINAL = ("finish", "failed", "error", "cancelled")
_TERMINAL = ", ".join(f"'{status}'" for status in TERMINAL)


def _pids() -> set[int]:
    with os.scandir("/proc") as entries:
        return {int(entry.name) for entry in entries if entry.name.isdecimal()}


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    """The configuration of a world: short leases, everything in the folder; in a child, the servers of its parent."""
    return {
        "database_url": os.environ.get(DATABASE, f"sqlite:///{folder}/a.db"),
        "broker_url": os.environ.get(BROKER, ""),
        "data_dir": str(folder / "data"),
        "lease_s": 2.0,
        "heartbeat_s": 0.5,
        "environ": {},
        **more,
    }


class Order(BaseModel):
    """A row of a file."""

    n: int
    kind: str
    pad: str = ""


def numbers(count: int, first: int = 0, **more: Any) -> list[dict[str, Any]]:
    """Items from ``first`` on, each with the members ``more``."""
    return [{"n": n, **more} for n in range(first, first + count)]


def mixed(count: int) -> list[dict[str, Any]]:
    """Items of which every fifth is refused and every seventh breaks."""
    return [{"n": n, "refuse": n % 5 == 4, "bug": n % 7 == 6} for n in range(count)]


class Shop:
    """What jobs did, as lines of a file: one write each, so that a kill can neither tear nor lose one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._book = folder / "book.txt"

    def note(self, *words: Any) -> None:
        """Writes a line of words."""
        line = " ".join(str(word) for word in words) + "\n"
        book = os.open(self._book, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(book, line.encode())
        finally:
            os.close(book)

    def lines(self) -> list[list[str]]:
        """Every line, as its words."""
        if not self._book.exists():
            return []
        return [line.split() for line in self._book.read_text().splitlines()]

    def performed(self, verb: str = "did") -> Counter[int]:
        """How often each item was performed."""
        return Counter(int(line[1]) for line in self.lines() if line[0] == verb)


def make_app(folder: Path, **more: Any) -> AsyncTask:
    """An application with the workers that the tests need. An item is ``{"n": number, ...}``."""
    app = AsyncTask(**settings(folder, **more))
    shop = Shop(folder)

    @app.worker(retry=0)
    def note(item: dict[str, Any]) -> dict[str, Any]:
        """Does at once; refuses where the item says ``refuse``, breaks where it says ``bug``."""
        shop.note("did", item["n"], os.getpid(), current_job().attempt)
        if item.get("refuse"):
            raise NormalException("refused")
        if item.get("bug"):
            raise ValueError("a bug")
        return {"n": item["n"]}

    @app.worker(retry=0, use_task_event=False)
    def plain(item: dict[str, Any]) -> None:
        """Nobody tracks it: takes a moment, says that it did, and breaks where the item says ``bug``."""
        threading.Event().wait(0.005)
        shop.note("plain", item["n"], os.getpid())
        if item.get("bug"):
            raise ValueError("a bug")

    @app.worker(retry=0)
    def gated(item: dict[str, Any]) -> dict[str, Any]:
        """Says that it began and waits for a file ``gate``."""
        shop.note("began", item["n"], os.getpid(), current_job().attempt)
        wait_for((folder / "gate").exists, "the gate opens", 120, every=0.01)
        shop.note("did", item["n"], os.getpid(), current_job().attempt)
        return {"n": item["n"]}

    @app.worker(retry=0)
    def brief(item: dict[str, Any]) -> None:
        """Says when it began and ended, on the machine's clock, and takes a fiftieth of a second."""
        shop.note("began", item["n"], time.monotonic())
        threading.Event().wait(0.02)
        shop.note("ended", item["n"], time.monotonic())

    @app.worker(retry=0)
    def hung(item: dict[str, Any]) -> None:
        """Sits in one call that nothing can interrupt."""
        shop.note("began", item["n"], os.getpid())
        threading.Event().wait()

    @app.worker(retry=0)
    def deadly(item: dict[str, Any]) -> dict[str, Any]:
        """Says that it began, and ends its process at once, as often as the item's ``deaths`` says."""
        shop.note("began", item["n"], os.getpid(), current_job().attempt)
        if shop.performed("began")[item["n"]] <= item["deaths"]:
            os._exit(9)
        return {"n": item["n"]}

    @app.worker(retry=0)
    def order(item: Order) -> dict[str, Any]:
        """A row of a file: says that it began, takes a moment, does, and ends as its ``kind`` says."""
        shop.note("began", item.n, os.getpid())
        threading.Event().wait(0.006)
        shop.note("did", item.n, os.getpid())
        if item.kind == "refuse":
            raise NormalException("refused")
        if item.kind == "bug":
            raise ValueError("a bug")
        return {"n": item.n}

    @app.worker(retry=2, retry_in=lambda count, error, job: 0.05)
    def shaky(item: dict[str, Any]) -> dict[str, Any]:
        """Breaks in its first attempts, as often as the item's ``breaks`` says."""
        shop.note("did", item["n"], os.getpid(), current_job().attempt)
        if current_job().payload.get("retry_count", -1) + 1 < item.get("breaks", 1):
            raise ValueError("not yet")
        return {"n": item["n"]}

    @app.worker(retry=0)
    def spread(item: dict[str, Any]) -> dict[str, Any]:
        """Submits a list of its own: ``items`` for ``worker``, with ``options``."""
        task = app.submit(item["worker"], item["items"], **item.get("options", {}))
        shop.note("did", item["n"], task.id)
        return {"task": task.id}

    @app.worker(retry_in=lambda count, error, job: 0.01)
    def told(*args: Any) -> None:
        """A callback: says its arguments and the generation. Waits while there is a file ``hold``, breaks where there is
        one ``untold``."""
        *words, progress = args
        shop.note("told", progress["generation"], *words)
        wait_for(lambda: not (folder / "hold").exists(), "nobody holds it", 120, every=0.01)
        if (folder / "untold").exists():
            raise ValueError("nobody listens")

    return app


class World:
    """Arguments: ``folder``, empty and the test's own; ``store``, its database; ``broker_url``, the Redis server where jobs
    wait, empty for that database."""

    def __init__(self, folder: Path, store: Store, broker_url: str = "") -> None:
        self.folder = folder
        self.store = store
        self.broker_url = broker_url
        self.broker: BrokerLook = RedisLook(broker_url) if broker_url else LedgerLook(store)
        self.shop = Shop(folder)
        self._apps: list[AsyncTask] = []
        self._children: list[Started] = []
        self._lifeline = os.pipe()
        self._others = _pids()

    # -- applications

    def app(self, **more: Any) -> AsyncTask:
        """An application of this world: each is a process of its own to the ledger."""
        app = make_app(self.folder, **{"database_url": self.store.url, "broker_url": self.broker_url, **more})
        self._apps.append(app)
        app.ensure_schema()
        self.watch()
        return app

    @contextmanager
    def working(self, app: AsyncTask, **options: Any) -> Iterator[Launcher]:
        """A worker in this process."""
        launcher = app.launcher(**{"concurrency": 4, "shutdown_s": 5.0, **options})
        launcher.start()
        try:
            yield launcher
        finally:
            launcher.stop()

    def judging(self, app: AsyncTask) -> AsyncTask:
        """The application as a process that has had answers of the database for long enough to take others for dead."""
        app.ledger.time.answered(app.ledger.now(), lease_s=3_600)
        app.ledger.time._steady_since -= 3_600 * 1_000_000
        return app

    def watched(self, maintenance: Any) -> Any:
        """The maintenance, having seen the leases of the others as they are for longer than each lasts."""
        with maintenance._ledger.database.read() as connection:
            maintenance._schedule.sightings.note(list_processes(connection))
        seen = maintenance._schedule.sightings._seen
        maintenance._schedule.sightings._seen = {
            i: (until, since - 3_600 * 1_000_000) for i, (until, since) in seen.items()
        }
        return maintenance

    def end_leases(self) -> None:
        """Every process is on another machine, and its lease has ended."""
        self.sql("UPDATE processes SET lease_until = 1, hostname = 'elsewhere'")

    def open_gate(self) -> None:
        """Lets the gated jobs go on."""
        (self.folder / "gate").touch()

    # -- the ledger, from outside

    def watch(self) -> None:
        """Has the database note every change of a status that ends or reopens an Event, and every close."""
        self.store.watch()

    def sql(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Rows of a statement, on a connection that is not the program's; ``?`` stands for each of the values."""
        return self.store.sql(statement, values)

    def held(self) -> dict[str, int]:
        """How many open jobs each process holds, by its loans and claims."""
        held = (
            "SELECT COALESCE(e.process, l.process), COUNT(*) FROM events e LEFT JOIN loans l ON l.task_id = e.task_id"
            " AND l.process IS NOT NULL AND l.low <= e.seq AND l.high > e.seq"
            " WHERE e.status IN ('enqueue', 'working') AND e.due_at IS NULL"
            " AND (e.process IS NOT NULL OR l.process IS NOT NULL) GROUP BY 1"
        )
        return {str(process): int(count) for process, count in self.sql(held)}

    def one(self, statement: str, *values: Any) -> Any:
        """The only value of a statement."""
        return self.sql(statement, *values)[0][0]

    # -- processes

    def environ(self, **more: str) -> dict[str, str]:
        """The environment of a child: nothing of ours is inherited."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("ASYNCTASK_")}
        return {
            **kept,
            MARK: str(self.folder),
            DATABASE: self.store.url,
            BROKER: self.broker_url,
            "PYTHONPATH": f"{SUPPORT.parent}:{SUPPORT.parent.parent}",
            **more,
        }

    def spawn(
        self, *argv: str, log: str = "child.log", python: str = sys.executable, **environ: str
    ) -> subprocess.Popen[bytes]:
        """A child process that is killed when the test ends; what it says goes to a file in the folder."""
        with (self.folder / log).open("ab") as out:
            child = subprocess.Popen(
                [python, *argv],
                cwd=self.folder,
                env=self.environ(**environ),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=self._lifeline[:1],
            )
        self._children.append(child)
        return child

    def fork(self, *argv: str, log: str = "child.log", **environ: str) -> Program:
        """The same, for a module: forked from a process that has the imports behind it."""
        with (self.folder / log).open("ab") as out:
            child = Program(argv, cwd=self.folder, env=self.environ(**environ), output=out, pass_fds=self._lifeline[:1])
        self._children.append(child)
        return child

    def run(self, *words: str, timeout: float = 120, **environ: str) -> int:
        """The exit code of a script that runs to its end; what it says goes where that of a child does."""
        done = run_program(words, cwd=self.folder, env=self.environ(**environ), timeout=timeout)
        with (self.folder / "child.log").open("a") as log:
            log.write(done.stdout + done.stderr)
        return done.returncode

    def cli(self, module: str, *words: str, **environ: str) -> Started:
        """A command of the command line, on the application in a module of ``support``.

        It is forked, but for a web server and a supervisor (``-p``), which are started as users start them. A ``worker``
        without ``-p`` is the worker process itself, as if the test were its supervisor.
        """
        command = ("-m", "asynctask", "-A", f"support.{module}:app", *words)
        if words[0] == "web" or "-p" in words:
            return self.spawn(*command, **environ)
        lifeline = {LIFELINE: str(self._lifeline[0])} if words[0] == "worker" else {}
        return self.fork(*command, **lifeline, **environ)

    def said(self, log: str = "child.log") -> str:
        """What the children said."""
        path = self.folder / log
        return path.read_text(errors="replace") if path.exists() else ""

    def processes(self) -> dict[int, str]:
        """Every living process of this world but this one: pid -> command line. None is older than the world."""
        mark = f"{MARK}={self.folder}".encode()
        found: dict[int, str] = {}
        for pid in _pids() - self._others:
            entry = Path("/proc") / str(pid)
            try:
                # What was forked shows another's environment.
                if (entry / "cwd").readlink() == self.folder or mark in (entry / "environ").read_bytes().split(b"\0"):
                    found[pid] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # it ended just now, or is somebody else's
        return found

    def close(self) -> None:
        """Ends every process that is left, by its pid, and closes every application."""
        for child in self._children:
            child.kill()
            child.wait()
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for app in self._apps:
            app.close()
        self.broker.close()
        for descriptor in self._lifeline:
            os.close(descriptor)

    # -- the promises

    def check_promises(self, app: AsyncTask, task_ids: Sequence[int], items: int, *, generations: int = 1) -> None:
        """Promises 1 to 4 of Tasks that are over, with ``items`` accepted items in all."""
        marks = ", ".join("?" * len(task_ids))
        statuses = self.sql(f"SELECT status FROM events WHERE task_id IN ({marks})", *task_ids)
        assert len(statuses) == items
        assert {status for (status,) in statuses} <= set(TERMINAL), Counter(statuses)
        for task_id in task_ids:
            progress = app.task(task_id).progress()
            assert progress["done"], progress
            counts = progress["counts"]
            assert sum(counts.values()) == 2 * counts["total"] == 2 * progress["split"]["created"]
            assert progress["progress"]["done"] == counts["total"]
            assert progress["progress"]["percent"] == 100
            assert progress["control"]["in_flight"] == 0
            closed = [entry["detail"]["generation"] for entry in app.task(task_id).log() if entry["action"] == "closed"]
            assert sorted(closed) == list(range(1, generations + 1)), closed
        assert app.doctor() == []
        self.check_recorded_once(task_ids)

    def check_recorded_once(self, task_ids: Sequence[int]) -> None:
        """Promise 3: each Event became terminal once, and a close came once per generation."""
        marks = ", ".join("?" * len(task_ids))
        ended = self.sql(
            f"SELECT event_id, COUNT(*) FROM seen_status WHERE task_id IN ({marks}) AND became IN ({_TERMINAL})"
            " AND was NOT IN ('finish', 'failed', 'error', 'cancelled') GROUP BY event_id",
            *task_ids,
        )
        again = self.sql(f"SELECT * FROM seen_status WHERE task_id IN ({marks}) AND was IN ({_TERMINAL})", *task_ids)
        assert len(ended) == self.one(f"SELECT COUNT(*) FROM events WHERE task_id IN ({marks})", *task_ids)
        if not again:
            assert {count for _, count in ended} == {1}
        closes = self.sql(f"SELECT task_id, generation FROM seen_close WHERE task_id IN ({marks})", *task_ids)
        assert len(closes) == len(set(closes))
