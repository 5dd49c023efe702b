"""The world of ``benchmarks.simulation``: a ledger and a broker as values, worker processes, and a virtual clock.

What decides is production's own: each process has a real :class:`Dispatcher`, whose queries and reservations go to the
values here, and a real :class:`Schedule` of the maintenance; the decisions on a reservation, a fetch and a flush are
imported. A Task's waiting items are a number, never objects, so a Task of a million costs as much as one of ten.

Modelled on PostgreSQL and Redis: what the broker does is no statement of the ledger. Jobs last longer than
:data:`~asynctask.runtime.lanes.SPAN_S`, so no lane lends any.
"""

from __future__ import annotations

import heapq
import random
import threading
from bisect import bisect_right, insort
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

from asynctask.clock import SECOND, micros
from asynctask.core.transitions import at_once, interval_of, lead, may_dispatch, next_round, room
from asynctask.dispatch.demand import Capacity, Load, Rate, fetched_ahead
from asynctask.dispatch.dispatcher import LEASE_S, OBSERVE_S, PUSHING_S, Dispatcher
from asynctask.ledger import leases
from asynctask.ledger.base import dumps
from asynctask.ledger.dispatchable import RECHECK_S, settled
from asynctask.ledger.recorder import lingers_s
from asynctask.ledger.reservations import MOST_OF_ROUND, MOST_SMALL, Runnable, page
from asynctask.maintenance import Schedule
from asynctask.runtime.fetcher import MAX_FETCH
from asynctask.runtime.launcher import LONG_S

__all__ = ["QUEUE", "STATEMENTS", "Process", "Task", "World"]

QUEUE: Final = "default"
_QUEUES: Final = dumps([QUEUE])
_PAGE: Final = 100  # Tasks that one query finds, as in production
_HOP_S: Final = 0.001
"""From a push to the fetch of a process that waited for it."""

STATEMENTS: Final = {
    "observe": 3,  # unconfirmed reservations, the processes, what is due
    "runnable": 1,  # once more for each page beyond the first
    "alone": 1,
    "reserve": 5,  # the Task, what is due, the jobs, the counts, the pointer
    "reserve of a limit": 1,  # and what is in flight
    "reserve small": 4,
    "confirm": 3,
    "lease read": 1,
    "lease": 2,
    "begin": 1,
    "record": 3,  # Events, counts, the mark of the commit
    "announce": 1,
    "hint": 2,
    "working": 3,
    "check": 1,
    "knob": 3,
    "heartbeat": 1,
    "maintenance": 1,
    "recover": 6,
}
"""Statements of each operation, without BEGIN and COMMIT."""


class VirtualClock:
    """The time of the world; within one step of a process, later by what its statements took."""

    def __init__(self) -> None:
        self.at = 0.0
        self.spent = 0.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.at + self.spent

    def now(self) -> int:
        """Microseconds."""
        return micros(self.monotonic()) + SECOND

    boottime = now


@dataclass(eq=False)
class Task:
    """A Task: the columns that decide, what was counted, and what was seen of it."""

    id: int
    columns: dict[str, Any]
    submitted: float
    running: int = 0
    starts: int = 0
    ended: int = 0
    most_running: int = 0
    first_start: float | None = None
    last_start: float = 0.0
    begun_of_round: list[float] = field(default_factory=list)
    starts_of: list[tuple[float, int]] | None = None  # time and jobs beside, while a knob is observed
    over_at: float | None = None

    @property
    def flying(self) -> int:
        """Jobs in flight."""
        return int(self.columns["dispatched"] - self.columns["returned"])

    @property
    def left(self) -> int:
        """Jobs before the pointer."""
        return int(self.columns["created_jobs"] - self.columns["next_seq"])

    @property
    def is_small(self) -> bool:
        """Whether it is reserved together with others."""
        c = self.columns
        return c["next_seq"] == 0 and c["created_jobs"] <= MOST_SMALL and c["parallel"] is None and c["interval_s"] <= 0


class Index:
    """Which Tasks are ready, by priority and id."""

    def __init__(self) -> None:
        self._at: dict[int, list[int]] = defaultdict(list)
        self._of: dict[int, int] = {}

    def put(self, task_id: int, priority: int | None) -> None:
        """None: not ready."""
        was = self._of.get(task_id)
        if was == priority:
            return
        if was is not None:
            ids = self._at[was]
            del ids[bisect_right(ids, task_id) - 1]
            if not ids:
                del self._at[was]
            del self._of[task_id]
        if priority is not None:
            self._of[task_id] = priority
            insort(self._at[priority], task_id)

    def beyond(self, priority: int, after: int, free: Callable[[int], bool], count: int) -> list[tuple[int, int]]:
        """Up to ``count`` of one priority, with their priority."""
        ids, found = self._at.get(priority, []), []
        for position in range(bisect_right(ids, after), len(ids)):
            if free(ids[position]):
                found.append((ids[position], priority))
                if len(found) == count:
                    break
        return found

    def newest(self, priority: int) -> tuple[int, int]:
        """The last of one priority, with its priority."""
        return self._at[priority][-1], priority

    def first(self, free: Callable[[int], bool], count: int, above: int | None = None) -> list[tuple[int, int]]:
        """Up to ``count`` by priority and id; only larger priorities than ``above``."""
        found: list[tuple[int, int]] = []
        for priority in sorted(self._at):
            if (above is None or priority > above) and len(found) < count:
                found += self.beyond(priority, -1, free, count - len(found))
        return found


class World:
    """Everything, and the events to come."""

    def __init__(self, seed: int, *, work_s: float, round_trip_s: float, background_share: float, by_owner: bool) -> None:
        self.clock = VirtualClock()
        self.draw = random.Random(seed)
        self.work_s = work_s
        self.background_share = background_share
        self.by_owner = by_owner
        self._round_trip_s = round_trip_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.tasks: dict[int, Task] = {}
        self.ready = Index()
        self.due: list[tuple[int, int]] = []  # (due_next, Task)
        self.unconfirmed: set[int] = set()
        self.queues: dict[int, deque[tuple[Task, int]]] = defaultdict(deque)  # by priority: jobs of Tasks
        self.processes: dict[str, Process] = {}
        self.idle: dict[Process, None] = {}  # processes that wait for a push
        self.lease: tuple[str | None, int] = (None, 0)
        self.maintainer: str | None = None
        self.operations: Counter[str] = Counter()
        self.statements: Counter[int] = Counter()  # by second
        self.rows: Counter[str] = Counter()
        self.transactions = 0
        self.starts: Counter[int] = Counter()  # by tenth of a second
        self.recovered_at: dict[str, float] = {}
        self.most_waiting = 0
        """Jobs in the broker at a time."""

    # -- time

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Does something so many seconds from now, as the step that runs sees it."""
        self._count += 1
        heapq.heappush(self._events, (self.clock.monotonic() + seconds, self._count, act))

    def run(self, until: float) -> None:
        """Lets the time pass."""
        while self._events and self._events[0][0] <= until:
            at, _, act = heapq.heappop(self._events)
            self.clock.at, self.clock.spent = max(self.clock.at, at), 0.0
            act()
        self.clock.at, self.clock.spent = until, 0.0

    def spend(self, operation: str, times: int = 1, *, rows: int = 0) -> None:
        """Statements of the step that runs, which take their time. ``rows``: of processes that they return."""
        count = STATEMENTS[operation] * times
        self.operations[operation] += times
        self.statements[int(self.clock.monotonic())] += count
        self.rows[operation] += rows
        self.clock.spent += count * self._round_trip_s

    # -- Tasks

    def submit(
        self, count: int, *, priority: int, parallel: int | None = None, interval_s: float = 0.0, owner: str = ""
    ) -> Task:
        """A Task of so many items."""
        columns = {
            "state": "running", "priority": priority, "parallel": parallel, "interval_s": interval_s, "owner": owner,
            "session_key": None, "session_holder": None, "next_seq": 0, "created_jobs": count, "ready": None,
            "due_next": None, "round_at": None, "dispatch_by": None, "dispatch_until": None, "dispatched": 0, "returned": 0,
        }  # fmt: skip
        task = Task(len(self.tasks) + 1, columns, self.clock.monotonic())
        self.tasks[task.id] = task
        self.hint(task, {"ready": priority, "due_next": None})
        return task

    def hint(self, task: Task, values: Mapping[str, Any]) -> None:
        """Writes the columns that say when a Task is to be asked."""
        task.columns.update(values)
        self.ready.put(task.id, task.columns["ready"])
        if task.columns["due_next"] is not None:
            heapq.heappush(self.due, (task.columns["due_next"], task.id))

    def turn(self, task: Task, **values: Any) -> None:
        """Turns a knob, and takes back what waits in the broker."""
        self.spend("knob")
        task.columns.update(values)
        running = may_dispatch(task.columns["state"])
        self.hint(task, {"ready": task.columns["priority"] if running and task.left else None, "due_next": None})
        back = 0
        for priority, queue in self.queues.items():
            kept = deque(each for each in queue if each[0] is not task)
            back += sum(count for _, count in queue) - sum(count for _, count in kept)
            self.queues[priority] = kept
        task.columns["returned"] += back
        task.columns["next_seq"] -= back  # they are dispatched again

    def wake_due(self) -> int:
        """Makes the Tasks ready whose time has come; returns how many."""
        now, count = self.clock.now(), 0
        while self.due and self.due[0][0] <= now:
            at, task_id = heapq.heappop(self.due)
            task = self.tasks[task_id]
            if task.columns["due_next"] == at:
                count += 1
                running = may_dispatch(task.columns["state"])
                again = now + micros(RECHECK_S) if task.columns["interval_s"] > 0 and running else None
                self.hint(task, {"ready": task.columns["priority"] if running else None, "due_next": again})
        return count

    def take_back(self, count: int) -> None:
        """The last jobs that wait in the broker go back to the ledger."""
        self.spend("take back")
        for priority in sorted(self.queues, reverse=True):
            while count > 0 and (queue := self.queues[priority]):
                task, waiting = queue.pop()
                back = min(count, waiting)
                if waiting > back:
                    queue.append((task, waiting - back))
                task.columns["returned"] += back
                task.columns["next_seq"] -= back  # they are dispatched again
                count -= back
                if may_dispatch(task.columns["state"]):
                    self.hint(task, {"ready": task.columns["priority"], "due_next": task.columns["due_next"]})

    # -- the broker

    def waiting(self, queues: Collection[str]) -> dict[str, dict[int, int]]:
        """How many jobs wait, by queue and priority."""
        return {QUEUE: {priority: sum(n for _, n in jobs) for priority, jobs in self.queues.items() if jobs}}

    def push(self, batches: Sequence[tuple[Task, int, int]]) -> None:
        """Jobs of Tasks at priorities; processes that wait are told."""
        for task, count, priority in batches:
            self.queues[priority].append((task, count))
        self.most_waiting = max(self.most_waiting, sum(self.waiting([QUEUE])[QUEUE].values()))
        waiting = list(self.idle)
        self.draw.shuffle(waiting)
        for process in waiting:
            self.idle.pop(process, None)
            self.after(_HOP_S, process.fetch)

    def take(self, limit: int) -> list[tuple[Task, int]]:
        """The first jobs by priority."""
        found = []
        for priority in sorted(priority for priority, jobs in self.queues.items() if jobs):
            jobs = self.queues[priority]
            while jobs and limit > 0:
                task, count = jobs.popleft()
                if count > limit:
                    jobs.appendleft((task, count - limit))
                    count = limit
                found.append((task, count))
                limit -= count
        return found

    def in_hand(self, me: str) -> dict[str, int]:
        """The smallest priority of a Task that another dispatcher than ``me`` has in hand, by queue."""
        since = self.clock.now() + micros(LEASE_S - PUSHING_S)
        found = (self.tasks[i].columns for i in self.unconfirmed)
        held = [c["ready"] for c in found if leases.is_taken(c["dispatch_by"], c["dispatch_until"], me, since)]
        return {QUEUE: min(at for at in held if at is not None)} if any(at is not None for at in held) else {}

    # -- the processes

    def rows_of_processes(self) -> list[dict[str, Any]]:
        """What the heartbeats say."""
        now = self.clock.now()
        return [each.row for each in self.processes.values() if each.row["lease_until"] > now]


# -- a worker process


class Process:
    """A worker process: threads, what it fetched ahead, its flushes, its dispatcher and its maintenance."""

    def __init__(self, world: World, number: int, threads: int, *, lease_s: float, beat_s: float) -> None:
        self.identity = f"p{number}"
        self._world = world
        self._threads = threads
        self._lease_s = lease_s
        self._beat_s = beat_s
        self.alive = True
        self._busy = 0
        self._ready: deque[Task] = deque()
        self._held: Counter[Task] = Counter()
        self._rate = Rate(world.clock, threads)
        self._performed = 0
        self._busy_s, self._busy_at = 0.0, 0.0
        self._gave = False
        self._pending: Counter[Task] = Counter()
        self._flushing = False
        self._long: deque[float] = deque()
        self.row: dict[str, Any] = {}
        ledger = SimpleNamespace(
            clock=world.clock, identity=self.identity, now=world.clock.now, held=SimpleNamespace(keeps=False)
        )
        self.dispatcher = _Dispatcher(world, self, ledger)
        self.maintenance = _Maintenance(world, self, ledger)
        self.dispatcher.attach(self.load)

    def start(self) -> None:
        """Begins, at a drawn moment of its rhythm."""
        self._beat()
        self._fetch_later(self._world.draw.uniform(0, 0.1))
        self.dispatcher.schedule(self._world.draw.uniform(0, 1.0))
        self._world.after(self._world.draw.uniform(0, 1.0), self._maintain)

    def kill(self) -> None:
        """Dies, with what it holds."""
        self.alive = False
        self._world.idle.pop(self, None)
        for task, count in self._held.items():
            task.running -= min(task.running, count - sum(1 for each in self._ready if each is task))

    def _beat(self) -> None:
        if not self.alive:
            return
        world = self._world
        self.row = {
            "identity": self.identity, "queues": _QUEUES, "concurrency": self._threads, "busy": self._busy,
            "rate": self._rate.per_second, "quiet": 0, "lease_until": world.clock.now() + micros(self._lease_s),
        }  # fmt: skip
        world.spend("heartbeat")
        world.transactions += 1
        world.after(self._beat_s * world.draw.uniform(0.95, 1.05), self._beat)

    def load(self) -> Load:
        """As :meth:`asynctask.runtime.pool.Pool.load`."""
        free = max(0, self._threads - self._busy - len(self._ready))
        return Load(self.identity, (QUEUE,), free, self._rate.per_second, self._threads)

    # -- fetch, perform

    def _fetch_later(self, seconds: float) -> None:
        self._world.after(seconds, self.fetch)

    def _room(self) -> int:
        self._note_busy()
        idle = self._threads - self._busy
        rate = self._rate.update(self._performed, self._busy_s, dry=not self._busy and not self._ready)
        wanted = min(MAX_FETCH, fetched_ahead(idle, rate, _HOP_S))
        return wanted - len(self._ready) if len(self._ready) <= wanted // 2 else 0

    def fetch(self) -> None:
        """One exchange with the broker, if there is room."""
        if not self.alive:
            return
        limit = self._room()
        if limit <= 0:
            return  # the end of a job calls again
        found = self._world.take(limit)
        if found:
            self._world.spend("begin")
            for task, count in found:
                self._held[task] += count
                self._ready.extend([task] * count)
            self._fill()
        else:
            self.dispatcher.dry(self._gave)
        self._gave = bool(found)
        if sum(count for _, count in found) < limit:
            self._world.idle[self] = None
        else:
            self._fetch_later(_HOP_S)

    def _fill(self) -> None:
        while self._ready and self._busy < self._threads:
            task = self._ready.popleft()
            if not may_dispatch(task.columns["state"]):  # what Begin says, and says again of what waited
                self._give_back(task)
                continue
            self._note_busy()
            self._busy += 1
            opens = task.columns["round_at"] if task.columns["interval_s"] > 0 else None
            if opens is not None and (early := opens - self._world.clock.now()) > 0:  # as the tracker waits
                self._world.after(early / SECOND, partial(self._start, task))
            else:
                self._start(task)

    def _start(self, task: Task) -> None:
        world = self._world
        if not self.alive:
            return
        at = world.clock.monotonic()
        if task.starts_of is not None:
            task.starts_of.append((at, task.running))
        task.running += 1
        task.starts += 1
        task.most_running = max(task.most_running, task.running)
        task.first_start = at if task.first_start is None else task.first_start
        task.last_start = at
        if task.columns["interval_s"] > 0:
            task.begun_of_round.append(at)
        world.starts[int(at * 10)] += 1
        seconds = world.work_s * world.draw.uniform(0.5, 1.5)
        if seconds > 2 * LONG_S:
            if not self._long:
                world.after(2 * LONG_S, self._note_long)
            self._long.append(at)
        world.after(seconds, partial(self._end, task))

    def _note_long(self) -> None:
        """``working`` of what outlasts a tick, together."""
        if not self.alive:
            return
        now = self._world.clock.monotonic()
        self._world.spend("working")
        self._world.transactions += 1
        while self._long and self._long[0] <= now - LONG_S:
            self._long.popleft()
        if self._long:
            self._world.after(LONG_S, self._note_long)

    def _note_busy(self) -> None:
        now = self._world.clock.monotonic()
        if self._busy:
            self._busy_s += now - self._busy_at
        self._busy_at = now

    def _end(self, task: Task) -> None:
        if not self.alive:
            return
        self._note_busy()
        self._busy -= 1
        self._performed += 1
        task.running -= 1
        self._pending[task] += 1
        self._flush_soon()
        self._fill()
        self.fetch()

    def _give_back(self, task: Task) -> None:
        task.columns["returned"] += 1
        task.columns["next_seq"] -= 1
        self._held[task] -= 1

    # -- record

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            per_second = self._rate.per_second
            busy_for = (len(self._ready) / per_second if per_second > 0 else 0.0) if self._busy else None
            self._world.after(lingers_s(busy_for, 0.01), self._flush)

    def _flush(self) -> None:
        if not self.alive:
            return
        self._flushing = False
        pending, self._pending = self._pending, Counter()
        world = self._world
        world.spend("record")
        world.spend("announce")
        world.transactions += 1
        freed = False
        for task, count in pending.items():
            task.columns["returned"] += count
            task.ended += count
            self._held[task] -= count
            freed |= self._announce(task)
        if freed:
            world.transactions += 1
            world.spend("hint")
            self.dispatcher.expect(0)
        for task in pending:
            if task.ended >= task.columns["created_jobs"] and task.over_at is None:
                task.over_at = world.clock.monotonic()

    def _announce(self, task: Task) -> bool:
        c, now = task.columns, self._world.clock.now()
        interval = interval_of(c["interval_s"])
        rests = interval and c["round_at"] is not None and c["due_next"] is not None
        if rests and next_round(c["round_at"], None, 0, interval, now) - lead(interval) > now:
            return False
        limited = c["parallel"] is not None or interval > 0
        if limited and c["ready"] is None and may_dispatch(c["state"]) and task.left:
            self._world.hint(task, {"ready": c["priority"]})
            return True
        return False

    # -- maintenance

    def _maintain(self) -> None:
        if not self.alive:
            return
        if "recover_dead" in self.maintenance.due_steps(("recover_dead", "close", "sample")):
            self._recover()
        self._world.after(1.0, self._maintain)

    def _recover(self) -> None:
        world = self._world
        for process in [each for each in world.processes.values() if each.row["lease_until"] <= world.clock.now()]:
            world.spend("recover")
            for task, count in process._held.items():
                task.columns["returned"] += count
                task.columns["next_seq"] -= count
                if count and may_dispatch(task.columns["state"]):
                    world.hint(task, {"ready": task.columns["priority"]})
            del world.processes[process.identity]
            world.recovered_at[process.identity] = world.clock.monotonic()
            self.dispatcher.nudge()


class _Wake:
    """Stands for the event that wakes the dispatcher's thread."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.set = act


class _Dispatcher(Dispatcher):
    """The real dispatcher: its loop is events of the world, and it reads and writes the world's values."""

    def __init__(self, world: World, process: Process, ledger: Any) -> None:
        broker = SimpleNamespace(capabilities=SimpleNamespace(priority=True), waiting=world.waiting)
        super().__init__(ledger, broker, fair_by_owner=world.by_owner, background_share=world.background_share)
        self._world, self._process = world, process
        self._outbox = self._outboxes[None] = _Outbox(world, ledger.identity, self._pushed)  # type: ignore[assignment]
        self._leadership = _DispatchLeadership(world, ledger)
        self._next_at, self._number, self._free_at = float("inf"), 0, 0.0
        self._wake = _Wake(partial(self.schedule, 0.0))  # type: ignore[assignment]
        self._thread = threading.current_thread()
        self._control = SimpleNamespace(withdraw_last=lambda queue, count: world.take_back(count))  # type: ignore[assignment]

    def schedule(self, seconds: float) -> None:
        """The next step, unless one comes earlier; none begins before the last one has ended."""
        at = max(self._world.clock.monotonic() + seconds, self._free_at)
        if at < self._next_at:
            self._next_at, self._number = at, self._number + 1
            self._world.after(at - self._world.clock.monotonic(), partial(self._happen, self._number))

    def _happen(self, number: int) -> None:
        if number != self._number or not self._process.alive:
            return
        self._next_at = float("inf")
        self._free_at = float("inf")  # what wakes it during its step counts after it
        pause = self._step()
        self._free_at = self._world.clock.monotonic()
        self._next_at = float("inf")
        self.schedule(0.0 if self._nudged else pause)

    def _observe(self, late: str | None) -> Mapping[int, str]:
        world, now = self._world, self._world.clock.now()
        self._workers = world.rows_of_processes()
        world.spend("observe", rows=len(self._workers))
        self._observed_until = world.clock.monotonic() + OBSERVE_S
        self._is_due = world.wake_due() > 0
        columns = ((i, world.tasks[i].columns) for i in world.unconfirmed)
        return {i: QUEUE for i, c in columns if c["dispatch_until"] <= now or c["dispatch_by"] == late}

    def _is_alone_due(self) -> bool:
        return False

    def _dispatchable(self, used: Capacity) -> tuple[Sequence[Runnable], Sequence[Any]]:
        world, now = self._world, self._world.clock.now()

        def free(task_id: int) -> bool:
            columns = world.tasks[task_id].columns
            return not leases.is_taken(columns["dispatch_by"], columns["dispatch_until"], self._process.identity, now)

        def rows(found: Sequence[tuple[int, int]]) -> list[Any]:
            world.spend("runnable")
            return [(task_id, QUEUE, priority) for task_id, priority in found]

        served = {priority: task_id for (_, priority), task_id in self._last_served.items()}
        found = page(
            _PAGE,
            served,
            first=lambda: rows(world.ready.first(free, _PAGE)),
            beyond=lambda priority, after, count: rows(world.ready.beyond(priority, after, free, count)),
            lower=lambda priority: rows(world.ready.first(free, _PAGE, above=priority)),
            newest=lambda priority: rows([world.ready.newest(priority)]),
            place=self._place,
        )
        world.spend("alone")
        self._up_to = world.in_hand(self._process.identity)
        tasks = [(world.tasks[task_id], priority) for task_id, _, priority in found]
        return [
            Runnable(task.id, QUEUE, at, task.is_small, task.columns["owner"], task.columns["interval_s"] > 0, task.left)
            for task, at in sorted(tasks, key=lambda each: each[1])
        ], []

    def _next_due(self) -> int | None:
        self._world.spend("alone")
        return self._world.due[0][0] if self._world.due else None

    def _reserved(self, task_id: int, queue: str, count: int, at: int | None, expect: Callable[[int], None]) -> int:
        found, next_at = _reserve(self._world, self._world.tasks[task_id], count, self._process.identity)
        if next_at is not None:
            expect(next_at)
        if found:
            self._outbox.put(task_id, found, at)  # type: ignore[attr-defined]
        return found

    def _reserve_task(self, task_id: int, queue: str, count: int, at: int | None) -> int:
        return self._reserved(task_id, queue, count, at, self._expect_later)

    def _reserve_round(self, task_id: int, queue: str, rounds: set[int], count: int, at: int | None) -> int:
        if task_id not in rounds:
            return 0
        rounds.remove(task_id)
        return self._reserved(task_id, queue, count, at, self.expect)

    def _reserve_small(self, task_ids: list[int], queue: str, count: int, at: int | None) -> int:
        self._world.spend("reserve small")
        sent = 0
        while task_ids and sent < count:
            task = self._world.tasks[task_ids.pop(0)]
            if task.left > count - sent:  # not as a whole
                sent += self._reserve_task(task.id, queue, count - sent, at)
                continue
            found, _ = _reserve(self._world, task, task.left, self._process.identity, spends=False)
            if found:
                self._outbox.put(task.id, found, at)  # type: ignore[attr-defined]
            sent += found
        return sent

    def _push_again(self, task_id: int, queue: str, late: str | None) -> int:
        """What a dead dispatcher had reserved and not pushed."""
        self._world.spend("reserve")
        task = self._world.tasks[task_id]
        task.columns.update(dispatch_by=self._process.identity)
        self._outbox.put(task_id, task.columns.pop("unpushed", 0), None)  # type: ignore[attr-defined]
        return self._settle()


def _reserve(world: World, task: Task, wanted: int, by: str, *, spends: bool = True) -> tuple[int, int | None]:
    """What :func:`asynctask.ledger.reservations.reserve` does, of counts; also when to ask again."""
    c, now = task.columns, world.clock.now()
    interval = interval_of(c["interval_s"])
    limit = at_once(c["parallel"], interval)
    if spends:
        world.spend("reserve")
        world.spend("reserve of a limit", int(limit is not None))
        world.transactions += 1
    if leases.is_taken(c["dispatch_by"], c["dispatch_until"], by, now):
        return 0, None
    if not may_dispatch(c["state"]):
        world.hint(task, {"ready": None})
        return 0, None
    count = room(c["state"], limit, task.flying, MOST_OF_ROUND if interval else wanted)
    opens = now
    if interval and count > 0:
        began = c["round_at"]
        started = micros(task.last_start) + SECOND if task.starts else None
        opens = next_round(began, started, 0 if began is None else task.flying - task.running, interval, now)
        count = 0 if opens - lead(interval) > now else count
    count = min(count, task.left)
    c["next_seq"] += count
    c["dispatched"] += count
    begins = max(opens, now)
    if interval and count:
        c["round_at"], opens = begins, begins + interval
    waits = next_at if (next_at := opens - lead(interval)) > now else None
    full = limit is not None and task.flying >= limit
    values = settled(c, left=task.left > 0, full=full, due=None, now=now, opens=waits)
    world.hint(task, values)
    if count:
        c.update(dispatch_by=by, dispatch_until=now + micros(LEASE_S))
        world.unconfirmed.add(task.id)
    return count, values["due_next"] if waits is not None else None


class _Outbox:
    """What is reserved on its way to the broker, as counts. No row is locked here for longer than a step."""

    is_settled = True

    def __init__(self, world: World, identity: str, pushed: Callable[[], None]) -> None:
        self._world, self._identity, self._pushed = world, identity, pushed
        self._batches: list[tuple[Task, int, int]] = []

    def put(self, task_id: int, count: int, at: int | None) -> None:
        """So many jobs of a Task, at another priority if one is given."""
        task = self._world.tasks[task_id]
        self._batches.append((task, count, task.columns["priority"] if at is None else at))

    def settle(self) -> int:
        """Pushes and confirms."""
        batches, self._batches = self._batches, []
        if not batches:
            return 0
        world = self._world
        world.after(0.0, partial(world.push, batches))
        world.spend("confirm")
        world.transactions += 1
        for task, _, _ in batches:
            task.columns.update(dispatch_by=None, dispatch_until=None)
            world.unconfirmed.discard(task.id)
        self._pushed()
        return sum(count for _, count, _ in batches)


class _DispatchLeadership(leases.Leadership):
    def __init__(self, world: World, ledger: Any) -> None:
        super().__init__(ledger, leases.DISPATCH)
        self._world = world

    def _acquire(self) -> int | None:
        world, now = self._world, self._world.clock.now()
        holder, until = world.lease
        if leases.is_taken(holder, until, self._ledger.identity, now):
            world.spend("lease read")
            return until
        world.spend("lease")
        world.transactions += 1
        if holder not in (None, self._ledger.identity):
            self._note_late(str(holder))
        world.lease = self._ledger.identity, now + micros(leases.LEADER_LEASE_S)
        return None

    def _give_up(self) -> None:
        self._world.spend("lease read")
        if self._world.lease[0] == self._ledger.identity:
            self._world.lease = None, 0


class _Maintenance(Schedule):
    def __init__(self, world: World, process: Process, ledger: Any) -> None:
        host: Any = SimpleNamespace(knows_dead=lambda row: False)  # every process has a machine of its own
        super().__init__(
            ledger, host, process.dispatcher.nudge, process.dispatcher.expect, None,
            every_s=1.0, can_split=True, broker_apart=True, apart=True,
        )  # fmt: skip
        self._world = world
        self._leadership = _MaintenanceLeadership(world, ledger)

    def _query_work(self) -> leases.Work:
        world, now = self._world, self._world.clock.now()
        world.spend("maintenance")
        dead = any(each.row["lease_until"] <= now for each in world.processes.values())
        ready = bool(world.ready.first(lambda task_id: True, 1))
        due = world.due[0][0] if world.due else None
        leads = world.maintainer == self._ledger.identity
        return leases.Work(leads, dead, True, ready, False, False, None, due_at=due, scheduled_at=None)

    def _list_processes(self) -> list[dict[str, object]]:
        self._world.spend("maintenance", rows=len(self._world.processes))
        return []


class _MaintenanceLeadership(leases.Leadership):
    def __init__(self, world: World, ledger: Any) -> None:
        super().__init__(ledger, leases.MAINTENANCE)
        self._world = world

    def _query_holder(self) -> leases.Holder:
        self._world.spend("maintenance")
        holder = self._world.maintainer
        process = self._world.processes.get(holder) if holder is not None else None
        return leases.Holder(holder, None if process is None else process.row)

    def _take_over(self, old: str | None) -> bool:
        self._world.spend("maintenance")
        if self._world.maintainer != old:
            return False
        self._world.maintainer = self._ledger.identity
        return True
