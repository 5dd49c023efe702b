"""A small world around the bookkeeping core: a ledger that lends, foreign queues, and processes, as plain values.

All decisions are those of `asynctask.core`; the world only does what the code around it does: read, write in one
transaction, borrow, give back, push, fetch, acknowledge, die.

The steps are in `bookkeeping_steps` (what an own process does), `bookkeeping_foreign` and `bookkeeping_fates`, the promises
that hold after each of them in `bookkeeping_invariants`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from asynctask.core import readiness
from asynctask.core import transitions as core
from asynctask.core.readiness import Gate, Hints
from asynctask.core.states import TERMINAL, Reason, State, Status, check_task
from asynctask.core.transitions import BLOCKED, Delta, Row, Transition

TICK = 100_000
"""The least time that passes, in microseconds."""

FRESH = TICK
"""How old the borrow or the answered check may be by which a job begins."""

QUEUE = "queue"
"""The holder of what lies in the foreign queue; no process."""


class Copy(NamedTuple):
    """One attempt of one job: what a process holds, and the key under which a foreign queue does."""

    task: int
    seq: int
    attempt: int


@dataclass
class Loan:
    """A range of a Task's rows; free while it names no process."""

    id: int
    task: int
    low: int
    high: int
    process: str | None
    asked: bool = False

    def covers(self, seq: int) -> bool:
        return self.low <= seq < self.high


@dataclass
class Task:
    """A Task and its rows; ``alone`` is the pseudo Task of the Events that have none. ``keys``: its rows stand in lines."""

    id: int
    alone: bool = False
    foreign: bool = False
    keys: bool = False
    session: bool = False
    state: State | None = State.SPLITTING
    parallel: int | None = None
    interval: int = 0
    start_at: int = 0
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
    hints: Hints = field(default_factory=lambda: Hints(None, None))
    loans: list[Loan] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)
    counts: Delta = field(default_factory=Delta)
    closes: dict[int, int] = field(default_factory=dict)
    stored: list[Row] = field(default_factory=list)
    again: dict[int, int] = field(default_factory=dict)  # the places of rows that run again after their end

    def row(self, seq: int) -> Row:
        """One row as it is read: ``reserved`` is no column, it says that the pointer is past the row."""
        row, reserved = self.stored[seq], self.alone or seq < self.next_seq
        return row if row.reserved == reserved else row._replace(reserved=reserved)

    def rows(self) -> list[Row]:
        return [self.row(seq) for seq in range(len(self.stored))]

    def lent(self, seq: int) -> bool:
        """Whether a row lies in a loan that a process holds; always true without a Task."""
        return self.alone or any(loan.process is not None and loan.covers(seq) for loan in self.loans)

    @property
    def waits(self) -> bool:
        return self.next_seq < len(self.stored) or any(loan.process is None for loan in self.loans)

    @property
    def limit(self) -> int | None:
        return core.at_once(self.parallel, self.interval)

    def change_state(self, target: State, reason: Reason) -> None:
        check_task(self.state, target, reason)
        self.state = target


class Broker:
    """A foreign queue: key to the engine's worker, None while it waits."""

    def __init__(self) -> None:
        self.held: dict[Copy, str | None] = {}

    def push(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            self.held.setdefault(copy, None)

    def fetch(self, process: str, count: int) -> list[Copy]:
        taken = [copy for copy, holder in self.held.items() if holder is None][:count]
        self.held.update(dict.fromkeys(taken, process))
        return taken

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


class Role(Enum):
    OWN = "own"
    DISPATCHER = "dispatcher"
    ENGINE = "engine"


@dataclass
class Part:
    """A loan as its process knows it, borrowed ``at``. ``left``: the rows of it that are not over; None until it has read
    them."""

    task: int
    low: int
    high: int
    at: int
    left: set[int] | None = None


@dataclass
class Answer:
    """What a check read: at what time, the own loans and claims, and of the Tasks state, limit and own places."""

    at: int
    loans: dict[int, Loan]
    claims: list[Copy]
    tasks: dict[int, tuple[State | None, bool, int | None, int | None]]


class Ask(NamedTuple):
    """A request for places that has no answer yet."""

    task: int
    want: int
    running: int


class Return(NamedTuple):
    """What a process is about to give back: of a loan the rows from ``seq`` on."""

    loan: int
    task: int
    seq: int
    low: int
    high: int


@dataclass
class Process:
    """A process: what it knows and the ledger or the queue do not."""

    name: str
    role: Role = Role.OWN
    life: Life = Life.ALIVE
    parts: dict[int, Part] = field(default_factory=dict)
    claims: set[Copy] = field(default_factory=set)
    line: list[Copy] = field(default_factory=list)  # borrowed or claimed, not begun
    since: dict[Copy, int] = field(default_factory=dict)  # when the borrow of each began
    checked: int = -FRESH - 1
    answer: Answer | None = None
    returns: list[Return] = field(default_factory=list)
    limits: dict[int, int | None] = field(default_factory=dict)  # of each Task of which it holds jobs, as it knows
    places: dict[int, int] = field(default_factory=dict)  # its own row of places, at least; no entry: it has none
    ask: Ask | None = None
    pending: list[Copy] = field(default_factory=list)  # watched: to be recorded as working before it is performed
    running: list[Copy] = field(default_factory=list)
    buffer: list[tuple[Copy, str]] = field(default_factory=list)  # outcomes that are not in the ledger yet
    owes: set[int] = field(default_factory=set)  # Tasks whose hints it is about to settle
    frees: set[tuple[int, int]] = field(default_factory=set)  # lines that it is about to let go on
    began: dict[Copy, int] = field(default_factory=dict)
    pushed: bool = False  # of a dispatcher: what stands in its line lies in the queue
    read: list[tuple[Copy, Row, State | None]] = field(
        default_factory=list
    )  # of an engine's worker: fetched, row looked at
    settled: list[Copy] = field(default_factory=list)  # ... recorded or dropped, not acknowledged
    stalled_at: int = 0
    forgotten: bool = False  # recovered and struck off the register

    @property
    def runs_on(self) -> bool:
        return self.life is not Life.DEAD

    @property
    def copies(self) -> list[Copy]:
        """What it has, but for what is over."""
        return self.line + self.pending + self.running

    def knows(self, copy: Copy) -> bool:
        return copy in self.copies or copy in [c for c, _ in self.buffer] or copy in [c for c, _, _ in self.read]

    def running_of(self, task: int) -> int:
        return sum(copy.task == task for copy in self.pending + self.running)

    def part_of(self, copy: Copy) -> Part | None:
        if copy in self.claims:
            return None
        inside = (p for p in self.parts.values() if p.task == copy.task and p.low <= copy.seq < p.high)
        return next(inside, None)

    def drop(self, copies: Iterable[Copy]) -> None:
        """Forgets what it has not begun."""
        for copy in list(copies):
            self.line.remove(copy)
            self.over(copy)

    def over(self, copy: Copy) -> None:
        part = self.part_of(copy)
        if part is not None and part.left is not None:
            part.left.discard(copy.seq)
        self.claims.discard(copy)

    def forget(self) -> None:
        """All that a process knew is gone with it."""
        name, role, born = self.name, self.role, self.stalled_at
        self.__init__(name, role, Life.DEAD, stalled_at=born, forgotten=self.forgotten)  # type: ignore[misc]


class Look(NamedTuple):
    """A look for lost copies: what the queue holds by the ledger, then what of it the queue does not have."""

    flying: tuple[Copy, ...]
    missing: frozenset[Copy] | None = None


class Ghosts:
    """What only the checks know: history that the code under test does not have."""

    def __init__(self) -> None:
        self.recorded: set[Copy] = set()  # attempts whose outcome won
        self.dropped: set[Copy] = set()  # copies that begin decided to acknowledge unrun
        self.doubled: set[Copy] = set()  # copies that the engine lost while a worker had them: it may run another
        self.limits: dict[int, list[tuple[int, int | None]]] = {}  # of each Task: since when which one
        self.barred: dict[int, int] = {}  # since when a Task may start nothing
        self.rounds: dict[int, list[set[Copy]]] = {}  # of each Task with an interval
        self.began: dict[Copy, int] = {}  # when the worker was called, whether or not the ledger knows
        self.was: dict[int, tuple[int, bool, int]] = {}  # generation, sealed, done after the last step


class World:
    """Everything there is, with the steps that can happen to it."""

    def __init__(self) -> None:
        self.now = 0
        self.tasks: list[Task] = [Task(0, alone=True, state=None)]
        self.broker = Broker()
        self.network: list[list[Copy]] = []  # pushes that land later, or never
        self.processes: list[Process] = []
        self.withdrawn: list[list[Copy]] = []  # taken out of the queue, to be given back row by row
        self.closings: list[tuple[int, int]] = []
        self.look = Look(())
        self.missed: frozenset[Copy] = frozenset()
        self.born = 0
        self.loan_id = 0
        self.ghosts = Ghosts()

    # -- the ledger: what one transaction does ------------------------------------------------------------------------

    def row(self, copy: Copy) -> Row:
        return self.tasks[copy.task].row(copy.seq)

    def copy(self, task: Task, seq: int) -> Copy:
        return Copy(task.id, seq, task.stored[seq].attempt)

    def current(self, copy: Copy) -> bool:
        """Whether this attempt would still be recorded."""
        row = self.row(copy)
        return row.attempt == copy.attempt and row.status in (Status.ENQUEUE, Status.WORKING)

    def named(self, name: str) -> Process:
        return next(p for p in self.processes if p.name == name)

    def write(self, task: Task, seq: int, turn: Transition | None) -> None:
        """Writes one turn and moves the counts by it, in one transaction."""
        if turn is None:
            return
        before, after = task.row(seq), turn.after
        assert turn.before == before, "I4: a turn was made from a row that has moved on"
        assert before.status not in TERMINAL or turn.reason is Reason.RETRIED, f"I4: a terminal row changed: {turn}"
        task.stored[seq] = after
        if before.status in TERMINAL:
            task.again[seq] = max(task.again.values(), default=0) + 1
        task.counts.add(turn.delta)

    def insert_loan(self, task: Task, low: int, high: int, process: str | None) -> Loan:
        self.loan_id += 1
        loan = Loan(self.loan_id, task.id, low, high, process)
        task.loans.append(loan)
        return loan

    def in_session(self, task: Task) -> bool:
        """The first open Task with a session holds it."""
        return not task.session or task is next((t for t in self.tasks if t.session and not is_over(t)), None)

    def settle(self, task: Task) -> None:
        """The one writer of the hints."""
        if task.alone:
            return
        dues = [row.due_at for row in task.stored if row.due_at is not None]
        due = min(dues, default=BLOCKED)
        opens = task.start_at or None
        if readiness.may_start(task.state or "", self.in_session(task)):
            opens = self.opens(task)
        gate = Gate(task.state or "", 1, self.in_session(task), task.waits, None if due == BLOCKED else due, opens)
        task.hints = readiness.hints(gate, self.now)

    def opens(self, task: Task) -> int | None:
        """When it may start something, if that is limited."""
        if not task.interval or task.start_at > self.now:
            return task.start_at or None
        return self.round_opens(task)

    def round_opens(self, task: Task) -> int:
        """When the next round may begin, by what is recorded of the last one. What somebody holds of it may begin yet; what
        was given back may not."""
        held = [seq for seq in task.round_rows if core.is_held(task.row(seq), task.lent(seq))]
        unbegun = sum(task.row(seq).status is Status.ENQUEUE or seq not in task.started for seq in held)
        started = max((task.started[seq] for seq in task.round_rows if seq in task.started), default=None)
        return core.next_round(task.round_at, started, unbegun, task.interval, self.now)

    def note_start(self, process: Process, copy: Copy) -> None:
        """What is recorded of an attempt comes with the time of its start."""
        if copy in process.began:
            self.tasks[copy.task].started[copy.seq] = process.began[copy]

    def held_by(self, name: str) -> list[Copy]:
        """The rows that a process or queue holds by the ledger: claimed ones and those of its loans."""
        return [
            self.copy(task, seq)
            for task in self.tasks
            for seq, row in enumerate(task.rows())
            if core.is_held(row, task.lent(seq)) and (row.process or self.borrower(task, seq)) == name
        ]

    @staticmethod
    def borrower(task: Task, seq: int) -> str | None:
        return next((loan.process for loan in task.loans if loan.covers(seq) and loan.process is not None), None)

    def open_tasks(self, *states: State) -> list[Task]:
        return [t for t in self.tasks if not t.alone and (not states or t.state in states)]

    def jobs(self, *statuses: Status) -> list[Copy]:
        return [
            self.copy(task, seq) for task in self.tasks for seq, row in enumerate(task.stored) if row.status in statuses
        ]

    def active(self, *roles: Role) -> list[Process]:
        return [p for p in self.processes if p.runs_on and (not roles or p.role in roles)]


def is_over(task: Task) -> bool:
    return task.closed or task.state in (State.FINALIZING, State.FINISHED, State.REJECTED)
