"""A small world around the bookkeeping core: a ledger, a broker, processes and dispatchers as plain values.

All decisions are those of `asynctask.core.transitions`; the world only does what the code around it does: read, write in
one transaction, push, fetch, acknowledge, die.

The steps are in `bookkeeping_steps`, the promises that hold after each of them in `bookkeeping_invariants`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from asynctask.core import transitions as core
from asynctask.core.states import TERMINAL, Reason, State, Status, check_task
from asynctask.core.transitions import Delta, Row, Turn


class Copy(NamedTuple):
    """What the broker holds: one attempt of one job. The key under which it holds it."""

    task: int
    seq: int
    attempt: int


@dataclass
class Task:
    """A Task and its rows; ``alone`` is the pseudo Task of the Events that have none."""

    id: int
    alone: bool = False
    state: State | None = State.SPLITTING
    parallel: int | None = None
    interval: int = 0
    round_at: int | None = None
    round_rows: list[int] = field(default_factory=list)
    started: dict[int, int] = field(default_factory=dict)  # the start of each row's last attempt, as far as is recorded
    splitting: bool = True
    generation: int = 1
    sealed: bool = False
    closed: bool = False
    turning: str | None = None
    statuses: frozenset[Status] = frozenset()
    cursor: int = 0
    next_seq: int = 0
    reserved_from: int | None = None
    lease: tuple[str, int] | None = None
    counts: Delta = field(default_factory=Delta)
    closes: dict[int, int] = field(default_factory=dict)
    stored: list[Row] = field(default_factory=list)

    def row(self, seq: int) -> Row:
        """One row as it is read: ``reserved`` is no column, it says that the pointer is past the row."""
        return self.stored[seq]._replace(reserved=self.alone or seq < self.next_seq)

    def rows(self) -> list[Row]:
        return [self.row(seq) for seq in range(len(self.stored))]

    @property
    def flying(self) -> int:
        return self.counts.dispatched - self.counts.returned

    def turn(self, target: State, reason: Reason) -> None:
        check_task(self.state, target, reason)
        self.state = target


class Broker:
    """Where copies wait: key to holder, None while it waits in its queue."""

    def __init__(self) -> None:
        self.held: dict[Copy, str | None] = {}

    def push(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            self.held.setdefault(copy, None)

    def fetch(self, process: str, count: int) -> list[Copy]:
        taken = [copy for copy, holder in self.held.items() if holder is None][:count]
        self.held.update(dict.fromkeys(taken, process))
        return taken

    def of(self, process: str) -> list[Copy]:
        return [copy for copy, holder in self.held.items() if holder == process]

    def remove(self, copies: Iterable[Copy], process: str | None) -> None:
        """Takes copies out that this process holds (None: that wait)."""
        for copy in copies:
            if copy in self.held and self.held[copy] == process:
                del self.held[copy]

    def withdraw(self, task: int) -> list[Copy]:
        taken = [copy for copy, holder in self.held.items() if holder is None and copy.task == task]
        self.remove(taken, None)
        return taken


class Life(Enum):
    ALIVE = "alive"
    STALLED = "stalled"  # its heartbeat is late: it begins nothing, but what runs goes on
    LEAVING = "leaving"  # it shuts down, or was declared dead: it only records what it has
    DEAD = "dead"


@dataclass
class Process:
    """A worker process: what it knows and the ledger or the broker do not."""

    name: str
    life: Life = Life.ALIVE
    batch: list[Copy] = field(default_factory=list)  # fetched
    read: list[tuple[Copy, Row, State | None]] = field(default_factory=list)  # fetched, and its row looked at
    pending: list[Copy] = field(default_factory=list)  # watched: to be recorded as working before it is performed
    running: list[Copy] = field(default_factory=list)
    lanes: dict[Copy, list[Copy]] = field(default_factory=dict)  # what is lent to follow one that runs
    buffer: list[tuple[Copy, str]] = field(default_factory=list)  # outcomes that are not in the ledger yet
    settled: list[Copy] = field(default_factory=list)  # recorded or dropped, not acknowledged
    began: dict[Copy, int] = field(default_factory=dict)  # when each of them did
    forgotten: bool = False  # recovered and struck off the register

    @property
    def runs_on(self) -> bool:
        return self.life is not Life.DEAD

    def has(self, copy: Copy) -> bool:
        lent = any(copy in followers for followers in self.lanes.values())
        return lent or copy in self.running or copy in self.pending or any(copy == c for c, _ in self.buffer)


@dataclass
class Batch:
    """What a dispatcher reserved of one Task and has to push and confirm."""

    task: int
    copies: list[Copy]
    pushed: bool = False


@dataclass
class Dispatcher:
    name: str
    batches: list[Batch] = field(default_factory=list)


@dataclass
class Recovery:
    """The recovery of one process: listed, then turned, then the copies dropped."""

    process: str
    copies: list[Copy]
    turned: bool = False


class Look(NamedTuple):
    """A look for lost copies: what flies by the ledger, then what of it the broker does not hold."""

    flying: tuple[Copy, ...]
    missing: frozenset[Copy] | None = None


class Ghosts:
    """What only the checks know: history that the code under test does not have."""

    def __init__(self) -> None:
        self.flown: set[Copy] = set()  # attempts that were dispatched
        self.recorded: set[Copy] = set()  # attempts whose outcome won
        self.dropped: set[Copy] = set()  # copies that begin decided to acknowledge unrun
        self.forgotten: set[Copy] = set()  # copies that the broker lost while a process held them
        self.handed: dict[Copy, Copy] = {}  # what began in the place of another -> that one
        self.cap: dict[int, int | None] = {}  # what in_flight may be: parallel, or what it was when parallel was lowered
        self.rounds: dict[int, list[set[Copy]]] = {}  # of each Task with an interval
        self.began: dict[Copy, int] = {}  # when the worker was called, whether or not the ledger knows
        self.was: dict[int, tuple[int, int, bool, int]] = {}  # generation, flying, sealed, done after the last step


class World:
    """Everything there is, with the steps that can happen to it."""

    def __init__(self) -> None:
        self.now = 0
        self.tasks: list[Task] = [Task(0, alone=True, state=None)]
        self.broker = Broker()
        self.network: list[list[Copy]] = []  # pushes that land later, or never
        self.processes: list[Process] = []
        self.dispatchers = [Dispatcher("d0"), Dispatcher("d1")]
        self.recoveries: list[Recovery] = []
        self.withdrawn: list[tuple[int, list[Copy]]] = []
        self.closings: list[tuple[int, int]] = []
        self.look = Look(())
        self.missed: frozenset[Copy] = frozenset()
        self.born = 0
        self.ghosts = Ghosts()

    # -- the ledger: what one transaction does ------------------------------------------------------------------------

    def row(self, copy: Copy) -> Row:
        return self.tasks[copy.task].row(copy.seq)

    def state(self, copy: Copy) -> State | None:
        return self.tasks[copy.task].state

    def copy(self, task: Task, seq: int) -> Copy:
        return Copy(task.id, seq, task.stored[seq].attempt)

    def named(self, name: str) -> Process:
        return next(p for p in self.processes if p.name == name)

    def write(self, task: Task, seq: int, turn: Turn | None) -> None:
        """Writes one turn and moves the counts by it, in one transaction."""
        if turn is None:
            return
        before, after = task.row(seq), turn.after
        assert turn.before == before, "I4: a turn was made from a row that has moved on"
        assert before.status not in TERMINAL or turn.reason is Reason.RETRIED, f"I4: a terminal row changed: {turn}"
        delta = turn.delta
        assert delta.dispatched >= 0, "I3: dispatched only rises"
        assert delta.returned >= 0, "I3: returned only rises"
        task.stored[seq] = after
        task.counts.add(delta)
        assert task.row(seq).reserved == after.reserved, "a turn cannot move the pointer"
        if core.in_flight(after) and not core.in_flight(before):
            self.takes_off(self.copy(task, seq))

    def takes_off(self, copy: Copy) -> None:
        assert copy not in self.ghosts.flown, f"fence: attempt dispatched twice: {copy}"
        self.ghosts.flown.add(copy)

    def note_start(self, process: Process, copy: Copy) -> None:
        """What is recorded of an attempt comes with the time of its start."""
        if copy in process.began:
            self.tasks[copy.task].started[copy.seq] = process.began[copy]

    def flying_copies(self, task: Task, low: int = 0) -> list[Copy]:
        """Rows that should be in the broker or in a process, not known to have begun."""
        return [
            self.copy(task, seq)
            for seq, row in enumerate(task.rows())
            if seq >= low and row.status is Status.ENQUEUE and core.in_flight(row)
        ]

    def open_tasks(self, *states: State) -> list[Task]:
        return [t for t in self.tasks if not t.alone and (not states or t.state in states)]

    def jobs(self, *statuses: Status) -> list[Copy]:
        return [
            self.copy(task, seq) for task in self.tasks for seq, row in enumerate(task.stored) if row.status in statuses
        ]

    def active(self) -> list[Process]:
        return [p for p in self.processes if p.runs_on]
