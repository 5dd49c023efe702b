"""The faults of ``benchmarks.chaos``: each waits for a moment at which it hits jobs that are being performed."""

from __future__ import annotations

import fcntl
import http.client
import os
import random
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from asynctask import AsyncTask
from asynctask.database.tables import processes, tasks
from asynctask.errors import Conflict, NotFound, Unavailable
from asynctask.testing import wait_for
from benchmarks.chaos_arena import Arena, Slot, clock, patiently
from benchmarks.chaos_corrections import Corrections
from benchmarks.chaos_wire import Wire

__all__ = ["PEOPLE", "Fault", "Faults", "Knob"]

PEOPLE = frozenset({"knob turned", "interval turned", "task cancelled", "task retried", "list corrected"})
"""What people do: it takes no outcome from anybody."""

_MOMENT_S = 5.0
"""So long a fault waits for jobs that it could hit."""


@dataclass(frozen=True)
class Fault:
    """One fault, on the monotonic clock. ``hit``: jobs being performed by what it struck; 0: it was void."""

    kind: str
    at: float
    until: float
    what: str
    hit: int
    pid: int = 0


@dataclass(frozen=True)
class Knob:
    """A value of ``parallel`` that a Task was given: in force from between two moments on."""

    task_id: int
    at: float
    until: float
    parallel: int


class Void(Exception):
    """There was nothing to hit."""


class Faults:
    """Strikes an arena at random.

    ``submit`` submits so many items for a worker, and ``take`` takes so many numbers of items. ``turned`` and ``timed``:
    the Tasks whose knobs or interval may be turned; ``doomed``: those to cancel; ``retriable``: those with failures.
    """

    def __init__(
        self,
        arena: Arena,
        app: AsyncTask,
        draw: random.Random,
        rows: int,
        submit: Callable[..., int],
        take: Callable[[int], int],
    ) -> None:
        self.arena, self.app, self.draw, self.rows, self.submit, self._take = arena, app, draw, rows, submit, take
        self.log: list[Fault] = []
        self.knobs: list[Knob] = []
        self.turned: list[int] = []
        self.doomed: list[int] = []
        self.uploads: list[tuple[int, int]] = []
        """Each with the number of its first row."""
        self.retriable: list[int] = []
        self.timed: list[int] = []
        self.corrections = Corrections(app, draw)
        kinds: dict[str, Callable[[], tuple[str, int, int]]] = {
            "worker killed": self._kill_worker,
            "worker stopped past its lease": self._stop_worker,
            "worker of this host stopped": self._stop_neighbour,
            "web killed in a split": self._kill_web,
            "database silent": self._silence,
            "knob turned": self._turn,
            "interval turned": self._interval,
            "task cancelled": self._cancel,
            "task retried": self._retry,
            "list corrected": self._correct,
        }
        if arena.server is not None:
            kinds |= {"database killed": self._kill_database, "database stopped": self._stop_database,
                      "connections cut": lambda: self._cut(arena.database_wire)}  # fmt: skip
        if arena.redis is not None:
            kinds |= {
                "redis flushed": self._flush, "redis killed": self._kill_redis, "redis silent": self._silence_redis,
                "connections to redis cut": lambda: self._cut(arena.redis_wire),
            }  # fmt: skip
        self.kinds = kinds

    def strike(self, kind: str) -> Fault:
        """One fault, over when this returns."""
        at = clock.monotonic()
        try:
            what, hit, pid = self.kinds[kind]()
        except Void as reason:
            what, hit, pid = str(reason), 0, 0
        self.log.append(Fault(kind, at, clock.monotonic(), what, hit, pid))
        return self.log[-1]

    # -- workers

    def _busy(self, slots: list[Slot]) -> tuple[Slot, int]:
        """A worker process that performs jobs, stopped, so that it performs them still, and how many."""
        until = clock.monotonic() + _MOMENT_S
        pause = threading.Event()
        while clock.monotonic() < until:
            for slot in self.draw.sample(slots, len(slots)):
                pid = slot.pid
                if pid and self.arena.performing(pid):
                    with self._between_writes():
                        os.kill(pid, signal.SIGSTOP)
                        with suppress(OSError):
                            wait_for(partial(_all_stopped, pid), "each of its threads has stopped")
                    if hit := self.arena.performing(pid):
                        return slot, hit
                    os.kill(pid, signal.SIGCONT)
            pause.wait(0.01)
        raise Void("no worker performed anything")

    @contextmanager
    def _between_writes(self) -> Iterator[None]:
        """On SQLite who is stopped within a write keeps the whole file locked: that is another fault."""
        if self.arena.kind != "sqlite":
            yield
            return
        with (self.arena.folder / "ledger.db.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _kill_worker(self) -> tuple[str, int, int]:
        slot, hit = self._busy(self.arena.slots)
        slot.deed = "worker killed"
        pid = slot.pid
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: slot.pid not in (0, pid), "another took its place")
        return f"worker {slot.number}, pid {pid}", hit, pid

    def _stop_worker(self) -> tuple[str, int, int]:
        """Of another machine than the others, so that its lease alone tells whether it lives."""
        slot, hit = self._busy(self.arena.slots[2:])
        slot.deed = "worker stopped past its lease"
        pid = slot.pid
        try:
            patiently(lambda: self._condemned(pid), "it is taken for dead", 30 * self.arena.lease_s)
        except AssertionError:
            return f"worker {slot.number}, pid {pid}, was not taken for dead", 0, pid
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_for(lambda: slot.pid not in (0, pid), "another took its place")
        return f"worker {slot.number}, pid {pid}, condemned, continued and replaced", hit, pid

    def _condemned(self, pid: int) -> bool:
        _p = processes.c
        mine = sa.select(_p.signal).where(_p.pid == pid, _p.kind == "worker")
        with self.app.ledger.database.read() as connection:
            return all(signal == "LOST" for signal in connection.execute(mine).scalars())

    def _stop_neighbour(self) -> tuple[str, int, int]:
        """Its pid is seen by another process of its machine; those of other machines judge by its lease."""
        slot, hit = self._busy(self.arena.slots[:2])
        slot.deed = "worker of this host stopped"
        pid = slot.pid
        self.pause(0.4 * self.arena.lease_s)
        os.kill(pid, signal.SIGCONT)
        return f"worker {slot.number}, pid {pid}, for less than its lease", hit, pid

    def pause(self, seconds: float) -> None:
        """Lasts so long."""
        threading.Event().wait(seconds)  # the fault itself

    def _at_work(self) -> int:
        try:
            return wait_for(self.arena.at_work, "jobs are performed", _MOMENT_S, every=0.01)
        except AssertionError:
            raise Void("no job was performed") from None

    # -- the database

    def _silence(self) -> tuple[str, int, int]:
        hit, seconds = self._at_work(), self.draw.uniform(1.3, 2.5) * self.arena.lease_s
        with ExitStack() as stack:
            if self.arena.database_wire is None:
                with (self.arena.folder / "ledger.db.lock").open("a") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    connection = stack.enter_context(closing(sqlite3.connect(self.arena.folder / "ledger.db", timeout=60)))
                    connection.execute("BEGIN IMMEDIATE")
                    hit = self.arena.at_work() or hit
                    self.pause(seconds)
                    connection.rollback()
            else:
                self.arena.database_wire.tell("hold")
                stack.callback(self.arena.database_wire.tell, "release")
                self.pause(seconds)
        return f"for {seconds:.1f} s", hit, 0

    def _stop_database(self) -> tuple[str, int, int]:
        assert self.arena.server is not None
        hit, seconds = self._at_work(), self.draw.uniform(1.3, 2.5) * self.arena.lease_s
        main = self.arena.server.pid
        with ExitStack() as undo:
            for pid in (main, *_descendants(main)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
                    undo.callback(_continue, pid)
            self.pause(seconds)
        return f"its processes, for {seconds:.1f} s", hit, 0

    def _kill_database(self) -> tuple[str, int, int]:
        assert self.arena.server is not None
        hit, seconds = self._at_work(), self.draw.choice([0.0, 1.5 * self.arena.lease_s])
        self.arena.server.kill()
        self.pause(seconds)
        self.arena.server.start()
        return f"away for {seconds:.1f} s", hit, 0

    def _cut(self, wire: Wire | None) -> tuple[str, int, int]:
        assert wire is not None
        hit = self._at_work()
        for _ in range(3):
            wire.tell("cut")
            self.pause(0.1)
        return "three times", hit, 0

    # -- Redis

    def _flush(self) -> tuple[str, int, int]:
        assert self.arena.redis is not None
        hit = self._at_work()
        with self.arena.redis.client() as client:
            client.flushall()
        return "all of it", hit, 0

    def _kill_redis(self) -> tuple[str, int, int]:
        assert self.arena.redis is not None
        hit, seconds = self._at_work(), self.draw.choice([0.0, 1.5 * self.arena.lease_s])
        self.arena.redis.kill()
        self.pause(seconds)
        self.arena.redis.start()
        return f"away for {seconds:.1f} s, back without data", hit, 0

    def _silence_redis(self) -> tuple[str, int, int]:
        assert self.arena.redis_wire is not None
        hit, seconds = self._at_work(), self.draw.uniform(1.3, 2.5) * self.arena.lease_s
        self.arena.redis_wire.tell("hold")
        self.pause(seconds)
        self.arena.redis_wire.tell("release")
        return f"for {seconds:.1f} s", hit, 0

    # -- the web server

    def _kill_web(self) -> tuple[str, int, int]:
        """Sends a list and kills whoever splits it, in the middle; another web server takes its place."""
        wait_for(self._web_answers, "the web server answers")
        first = self._take(self.rows)
        title = f"upload-{first}"
        chunk_size = self.draw.choice([1, 20])
        sender = threading.Thread(target=self._send, args=(title, first, chunk_size), daemon=True)
        sender.start()
        try:
            seen = wait_for(lambda: self._splitting(title), "it is split", 30, every=0.001)
        except AssertionError:
            raise Void("no split was seen") from None
        assert seen is not None
        task_id, splitter, created = seen
        self.uploads.append((task_id, first))
        if not splitter:
            sender.join()
            raise Void("the split was over too soon")
        victims = [
            pid for pid, line in self.arena.processes().items() if f" web --port {self.arena.web_port}" in f" {line}"
        ]
        for pid in {splitter, *victims, *self._splitters()}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.arena.start_web()
        sender.join()
        after = self._created(task_id)
        return f"Task {task_id}, {created} to {after} of {self.rows} rows", 1 if after < self.rows else 0, splitter

    def _splitters(self) -> list[int]:
        return [pid for pid, line in self.arena.processes().items() if "split" in line]

    def _web_answers(self) -> bool:
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", self.arena.web_port, timeout=5)
            with closing(connection):
                connection.request("GET", "/healthz")
                return connection.getresponse().status == 200
        return False

    def _send(self, title: str, first: int, chunk_size: int) -> None:
        pad = "x" * 150  # so large that a process of its own splits it
        kinds = ("ok", "ok", "refuse", "ok", "ok", "shaky", "ok")
        lines = "".join(f"{n},{kinds[n % 7]},{pad}\n" for n in range(first, first + self.rows))
        told = '{"worker": "told", "args": ["complete"]}'
        fields = {"worker": "row", "title": title, "on_complete": told, "chunk_size": str(chunk_size)}
        parts = [f'Content-Disposition: form-data; name="{key}"\r\n\r\n{value}' for key, value in fields.items()]
        file = 'Content-Disposition: form-data; name="file"; filename="rows.csv"\r\nContent-Type: text/csv'
        parts.append(f"{file}\r\n\r\nn,kind,pad\n{lines}")
        body = "".join(f"--border\r\n{part}\r\n" for part in parts) + "--border--\r\n"
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", self.arena.web_port, timeout=120)
            with closing(connection):
                headers = {"Content-Type": "multipart/form-data; boundary=border"}
                connection.request("POST", "/api/tasks", body.encode(), headers)
                answer = connection.getresponse()
                (self.arena.folder / "posted.log").open("a").write(f"{answer.status} {answer.read()[:500]!r}\n")

    def _splitting(self, title: str) -> tuple[int, int, int] | None:
        _t = tasks.c
        with suppress(Unavailable), self.app.ledger.database.read() as connection:
            statement = sa.select(_t.id, _t.split_by, _t.created).where(_t.title == title, _t.created > 0)
            found = connection.execute(statement).first()
            if found is not None:
                return int(found[0]), int(found[1].split(":")[-2]) if found[1] else 0, int(found[2])
        return None

    def _created(self, task_id: int) -> int:
        with self.app.ledger.database.read() as connection:
            return int(connection.execute(sa.select(tasks.c.created).where(tasks.c.id == task_id)).scalar_one())

    # -- people

    def _over(self, task_id: int) -> bool:
        return bool(patiently(self.app.task(task_id).progress, "a progress")["done"])

    def _at_work_of(self, task_id: int) -> int:
        try:
            hit = wait_for(
                lambda: self.arena.at_work(task_id) or -self._over(task_id),
                "its jobs are performed",
                6 * _MOMENT_S,
                every=0.005,
            )
        except AssertionError:
            raise Void(f"no job of Task {task_id} was performed") from None
        if hit < 0:
            raise Void(f"Task {task_id} was over too soon")
        return hit

    def _open(self, ids: list[int], **options: Any) -> tuple[int, int]:
        """One of these Tasks that is not over, another if there is none; and how many of its jobs are being performed."""
        if not (living := [each for each in ids if not self._over(each)]):
            living = [self.submit("work", 200, **options)]
            ids += living
        task_id = self.draw.choice(living)
        return task_id, self._at_work_of(task_id)

    def _turn(self) -> tuple[str, int, int]:
        task_id, hit = self._open(self.turned, parallel=8)
        task = self.app.task(task_id)
        how = self.draw.choice(["pause", "parallel", "priority"])
        with suppress(Conflict):  # it may be over by now
            if how == "pause":
                patiently(lambda: task.pause() or True, "paused")
                self.pause(self.draw.uniform(0.3, 1.5))
                patiently(lambda: task.resume() or True, "resumed")
            elif how == "priority":
                patiently(lambda: task.update(priority=self.draw.choice([120, 240, 340])), "priority")
            else:
                value, at = self.draw.choice([2, 4, 8, 12]), clock.monotonic()
                patiently(lambda: task.update(parallel=value), "parallel")
                self.knobs.append(Knob(task_id, at, clock.monotonic(), value))
                how = f"parallel {value}"
        return f"Task {task_id}: {how}", hit, 0

    def _interval(self) -> tuple[str, int, int]:
        task_id, hit = self._open(self.timed, parallel=4)
        with suppress(Conflict):
            value = self.draw.choice([0.0, 0.1, 0.3])
            patiently(lambda: self.app.task(task_id).update(interval=value), "interval")
        return f"Task {task_id}: interval {value:g}", hit, 0

    def _cancel(self) -> tuple[str, int, int]:
        task_id, hit = self._open(self.doomed, parallel=1)
        self.doomed.remove(task_id)
        with suppress(Conflict):
            patiently(lambda: self.app.task(task_id).cancel() or True, "cancelled")
        return f"Task {task_id}", hit, 0

    def _retry(self) -> tuple[str, int, int]:
        uploads = [*(upload for upload, _ in self.uploads), *self.corrections.tasks]
        over = [each for each in (*self.retriable, *uploads) if self._over(each)]
        if not over:
            raise Void("no Task with failures is over")
        task_id, hit = self.draw.choice(over), self._at_work()
        with suppress(Conflict, NotFound):
            patiently(lambda: self.app.task(task_id).retry() or True, "retried")
        return f"Task {task_id}", hit, 0

    def _correct(self) -> tuple[str, int, int]:
        hit = self._at_work()
        made = self.corrections.correct([upload for upload, _ in self.uploads])
        if made is None:
            raise Void("no upload has failed rows")
        return f"Task {made.of_task}, {len(made.numbers)} rows, taken by {' and '.join(map(str, made.tasks))}", hit, 0


def _continue(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _all_stopped(pid: int) -> bool:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return all((thread / "stat").read_text().rpartition(")")[2].split()[0] in "TZX" for thread in threads)


def _descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in children for each in (int(child), *_descendants(int(child)))]


def said(fault: Fault, since: float) -> str:
    """A line of the log."""
    hit: Any = fault.hit or "VOID"
    return f"{fault.at - since:8.2f} s  {fault.kind:32} {fault.until - fault.at:6.2f} s  hit {hit!s:5} {fault.what}"
