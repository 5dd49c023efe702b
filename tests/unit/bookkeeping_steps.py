"""The steps of the model: everything that can happen to a `World`, one boundary to the outside at a time.

One step is one ledger transaction, one call to the broker, or one thing that befalls a process. Whoever drives the world
may take them in any order, so anything can die between any two. `choices` lists what a step can be applied to now; `k` is
a small number that picks between variants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bookkeeping_model import Batch, Copy, Dispatcher, Life, Process, Task, World

from asynctask.core import transitions as core
from asynctask.core.states import TERMINAL, Reason, State, Status
from asynctask.core.transitions import Begin, Delta, Row, Turn

LEASE, BACKOFF, INTERVAL = 3, 2, 4
MAX_TASKS, MAX_ROWS, MAX_PROCESSES, MAX_GENERATIONS, MAX_RETRIES = 3, 4, 3, 4, 2
OUTCOMES = ("finish", "retry", "failed", "error", "timeout", "stopped", "discarded")
RUNNABLE = (Status.ENQUEUE, Status.WORKING)
STARTING = (State.SPLITTING, State.RUNNING)


class Step(NamedTuple):
    choices: Callable[[World], Sequence[Any]]
    run: Callable[[World, Any, int], None]


STEPS: dict[str, Step] = {}


def step(choices: Callable[[World], Sequence[Any]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Marks a function as a step that can be applied to each of ``choices`` (none: it cannot be taken now)."""

    def mark(run: Callable[..., None]) -> Callable[..., None]:
        STEPS[run.__name__] = Step(choices, run)
        return run

    return mark


def can(world: World, name: str) -> bool:
    return bool(STEPS[name].choices(world))


def do(world: World, name: str, pick: int = 0, k: int = 0) -> bool:
    """Takes one step on the ``pick``-th of its choices. False where it has none."""
    options = STEPS[name].choices(world)
    if not options:
        return False
    STEPS[name].run(world, options[pick % len(options)], k)
    return True


@step(lambda w: [w])
def tick(w: World, _: World, k: int) -> None:
    """Time goes on: leases end, due rows come up."""
    w.now += 1 + k


# -- Submit --------------------------------------------------------------------------------------------------------------


@step(lambda w: [w] if len(w.tasks) <= MAX_TASKS else [])
def submit(w: World, _: World, k: int) -> None:
    """A list is handed in: the Task is there, its rows follow in slices."""
    w.tasks.append(Task(len(w.tasks), parallel=(2, 1, 3, None)[k % 4], interval=INTERVAL if k >= 4 else 0))


@step(lambda w: [t for t in w.tasks if (t.alone or t.splitting) and len(t.stored) < MAX_ROWS])
def submit_slice(w: World, task: Task, k: int) -> None:
    """One slice of rows; alone: one Event without a Task, due at once or later."""
    for _ in range(min(1 if task.alone else 1 + k, MAX_ROWS - len(task.stored))):
        row = Row(Status.ENQUEUE, due_at=w.now + k if task.alone else None, reserved=task.alone, items=1 + k % 2)
        task.counts.add(core.difference(None, row))
        task.stored.append(row)


@step(lambda w: [t for t in w.open_tasks() if t.splitting])
def seal(w: World, task: Task, k: int) -> None:
    """Every row is in the ledger."""
    task.splitting, task.sealed = False, True
    if not task.stored and task.state in (State.SPLITTING, State.PAUSED):
        task.turn(State.REJECTED, Reason.NOTHING_ACCEPTED)
    elif task.state is State.SPLITTING:
        task.turn(State.RUNNING, Reason.SEALED)


# -- Dispatch ------------------------------------------------------------------------------------------------------------


def held_by_another(w: World, dispatcher: Dispatcher, task: Task) -> bool:
    return task.lease is not None and task.lease[0] != dispatcher.name and task.lease[1] > w.now


def due(w: World, task: Task) -> list[int]:
    return [
        s for s, r in enumerate(task.stored) if r.status is Status.ENQUEUE and r.due_at is not None and r.due_at <= w.now
    ]


@step(lambda w: [(d, t) for t in w.tasks if t.state in (None, *STARTING) for d in w.dispatchers if has_work(w, d, t)])
def reserve(w: World, where: tuple[Dispatcher, Task], k: int) -> None:
    """One transaction: rows that are due, then rows at the pointer, under the Task's room and the dispatcher's lease."""
    dispatcher, task = where
    wanted = MAX_ROWS if task.interval else 1 + k
    limit = core.at_once(task.parallel, task.interval)
    count = wanted if task.alone else core.room(task.state or "", limit, task.flying, wanted)
    copies = []
    for seq in due(w, task)[:count]:
        w.write(task, seq, core.release_due(task.row(seq)))
        copies.append(w.copy(task, seq))
    low, high = task.next_seq, min(len(task.stored), task.next_seq + count - len(copies))
    if not task.alone and (copies or high > low):
        task.next_seq = high
        fresh = w.flying_copies(task, low)
        fresh = [c for c in fresh if c.seq < high]
        task.counts.add(Delta(dispatched=len(fresh)))
        for copy in fresh:
            w.takes_off(copy)
        copies += fresh
        task.reserved_from = low if task.reserved_from is None else min(low, task.reserved_from)
        task.lease = (dispatcher.name, w.now + LEASE)
    if copies:
        dispatcher.batches.append(Batch(task.id, copies))
        if task.interval:
            task.round_at, task.round_rows = w.now, [copy.seq for copy in copies]
            w.ghosts.rounds.setdefault(task.id, []).append(set(copies))


def round_opens(w: World, task: Task) -> int:
    """When the next round may begin, by what is recorded of the last one."""
    rows = [task.row(seq) for seq in task.round_rows]
    unbegun = sum(row.status is Status.ENQUEUE and row.due_at is None for row in rows)
    started = max((task.started[seq] for seq in task.round_rows if seq in task.started), default=None)
    return core.next_round(task.round_at, started, unbegun, task.interval, w.now)


def has_work(w: World, dispatcher: Dispatcher, task: Task) -> bool:
    if due(w, task) or (not task.alone and task.next_seq < len(task.stored)):
        if task.interval and round_opens(w, task) > w.now:
            return False
        flying, limit = 0 if task.alone else task.flying, core.at_once(task.parallel, task.interval)
        return not held_by_another(w, dispatcher, task) and (
            task.alone or core.room(task.state or "", limit, flying, 1) > 0
        )
    return False


@step(lambda w: [b for d in w.dispatchers for b in d.batches if not b.pushed])
def push(w: World, batch: Batch, k: int) -> None:
    """The batch goes out: it lands, it lands and will land again, or it hangs in the network and lands later or never."""
    batch.pushed = True
    if k != 1:
        w.broker.push(batch.copies)
    if k in (1, 2):
        w.network.append(list(batch.copies))


@step(lambda w: w.network)
def deliver(w: World, message: list[Copy], k: int) -> None:
    """A push that hung in the network lands; perhaps not for the last time."""
    w.broker.push(message)
    if k != 1:
        w.network.remove(message)


@step(lambda w: w.network)
def network_loses(w: World, message: list[Copy], k: int) -> None:
    """A push that hung in the network is gone."""
    w.network.remove(message)


@step(lambda w: [(d, b) for d in w.dispatchers for b in d.batches if b.pushed])
def confirm(w: World, where: tuple[Dispatcher, Batch], k: int) -> None:
    """What the dispatcher reserved is in the broker, as far as it knows."""
    dispatcher, batch = where
    task = w.tasks[batch.task]
    dispatcher.batches.remove(batch)
    if task.lease is not None and task.lease[0] == dispatcher.name:
        task.lease = task.reserved_from = None


@step(lambda w: [d for d in w.dispatchers if d.batches])
def dispatcher_dies(w: World, dispatcher: Dispatcher, k: int) -> None:
    """It dies with whatever it reserved and did not push or confirm; another one starts under another name."""
    w.born += 1
    w.dispatchers[w.dispatchers.index(dispatcher)] = Dispatcher(f"d{w.born + 1}")


@step(lambda w: [(d, t) for t in w.tasks if t.lease is not None and t.lease[1] <= w.now for d in w.dispatchers])
def take_again(w: World, where: tuple[Dispatcher, Task], k: int) -> None:
    """The lease of a reservation ended unconfirmed: the open rows of its range are pushed again, by another dispatcher."""
    dispatcher, task = where
    task.lease = (dispatcher.name, w.now + LEASE)
    low = task.next_seq if task.reserved_from is None else task.reserved_from
    dispatcher.batches.append(Batch(task.id, [c for c in w.flying_copies(task, low) if c.seq < task.next_seq]))


# -- Perform -------------------------------------------------------------------------------------------------------------


@step(lambda w: [w] if len([p for p in w.active() if p.life is not Life.LEAVING]) < MAX_PROCESSES else [])
def start_process(w: World, _: World, k: int) -> None:
    w.born += 1
    w.processes.append(Process(f"p{w.born}"))


def waiting(w: World) -> bool:
    return None in w.broker.held.values()


@step(
    lambda w: (
        [p for p in w.processes if p.life in (Life.ALIVE, Life.STALLED) and not p.batch and not p.read]
        if waiting(w)
        else []
    )
)
def fetch(w: World, process: Process, k: int) -> None:
    """Copies move to the process's own list. A stalled one sent its fetch before it stalled: the broker obeys late."""
    process.batch = w.broker.fetch(process.name, 1 + k)


@step(lambda w: [p for p in w.processes if p.life is Life.ALIVE and p.batch])
def begin_read(w: World, process: Process, k: int) -> None:
    """One read for the batch: the rows, and the state of their Tasks."""
    process.read = [(copy, w.row(copy), w.state(copy)) for copy in process.batch]
    process.batch = []


@step(lambda w: [p for p in w.processes if p.life is Life.ALIVE and p.read])
def begin_act(w: World, process: Process, k: int) -> None:
    """Acts on what was read, however much has happened since."""
    copy, row, state = process.read.pop(0)
    decision = core.begin(row, copy.attempt, state)
    if decision is Begin.RUN:
        stale = copy.attempt != row.attempt or row.status in TERMINAL or row.due_at is not None
        assert not stale, f"begin: {copy} was begun for {row}"
        assert state in (None, *STARTING, State.FINALIZING), f"begin: begun while its Task is {state}"
        assert row.process is None, f"begin: {copy} was begun though {row.process} is working on it"
        (process.pending if row.watched else process.running).append(copy)
        process.began[copy] = w.ghosts.began[copy] = w.now
    elif decision is Begin.DROP:
        w.ghosts.dropped.add(copy)
        process.settled.append(copy)
    else:
        process.buffer.append((copy, decision.value))


def unrecorded(w: World, process: Process) -> list[Copy]:
    """What it runs or is about to run, and the ledger does not say so."""
    flying = [c for c in process.running if w.row(c).attempt == c.attempt and core.in_flight(w.row(c))]
    return [c for c in process.pending + flying if w.row(c).status is Status.ENQUEUE]


@step(lambda w: [(p, c) for p in w.active() for c in unrecorded(w, p)])
def record_working(w: World, where: tuple[Process, Copy], k: int) -> None:
    """The job outlasts a flush, or is watched: ``working`` is written, by compare-and-set. A watched one runs only then."""
    process, copy = where
    row, wins = w.row(copy), False
    if row.attempt == copy.attempt and core.in_flight(row):
        w.write(w.tasks[copy.task], copy.seq, core.working(row, process.name))
        if copy in process.pending:
            process.began[copy] = w.ghosts.began[copy] = w.now
        w.note_start(process, copy)
        wins = True
    if copy in process.pending:
        process.pending.remove(copy)
        (process.running if wins else process.settled).append(copy)


@step(lambda w: [(p, c) for p in w.active() for c in p.pending if w.row(c).status is not Status.ENQUEUE])
def drop_watched(w: World, where: tuple[Process, Copy], k: int) -> None:
    """The ``working`` of a watched job lost: its row has moved on, the copy is acknowledged unrun."""
    process, copy = where
    process.pending.remove(copy)
    w.ghosts.dropped.add(copy)
    process.settled.append(copy)


def may_lend(w: World, copy: Copy) -> bool:
    task, row = w.tasks[copy.task], w.row(copy)
    if task.alone or task.interval or task.parallel is None or task.state not in STARTING:
        return False
    holds_a_place = row.attempt == copy.attempt and core.in_flight(row)
    left = due(w, task) or task.next_seq < len(task.stored)
    return holds_a_place and task.flying <= task.parallel and bool(left)


@step(
    lambda w: [
        (p, c) for p in w.processes if p.life is Life.ALIVE for c in p.running if c not in p.lanes and may_lend(w, c)
    ]
)
def lend(w: World, where: tuple[Process, Copy], k: int) -> None:
    """One transaction: rows that are due, then rows at the pointer, wait in this process behind one that runs."""
    process, head = where
    task = w.tasks[head.task]
    again = due(w, task)[: 1 + k]
    low, high = task.next_seq, min(len(task.stored), task.next_seq + 1 + k - len(again))
    process.lanes[head] = []
    for seq in [*again, *range(low, high)]:
        row = task.row(seq)
        if row.status is Status.ENQUEUE and not (row.reserved and core.is_suspect(row)):
            turn = core.lend(row, process.name)
            task.stored[seq] = turn.after
            task.counts.add(turn.delta)
            process.lanes[head].append(w.copy(task, seq))
    task.next_seq = high


@step(lambda w: [(p, c) for p in w.active() for c in p.running])
def finish(w: World, where: tuple[Process, Copy], k: int) -> None:
    """An attempt ends; its outcome waits in the process's memory for the next flush. What was to follow goes back."""
    process, copy = where
    process.running.remove(copy)
    process.buffer.append((copy, OUTCOMES[k % len(OUTCOMES)]))
    process.buffer += [(follower, "give_back") for follower in process.lanes.pop(copy, [])]


@step(lambda w: [(p, c) for p in w.processes if p.life is Life.ALIVE for c in p.running if p.lanes.get(c)])
def hand_on(w: World, where: tuple[Process, Copy], k: int) -> None:
    """An attempt ends, and the next that was lent begins in its place, though the ledger does not know yet."""
    process, copy = where
    follower, *rest = process.lanes.pop(copy)
    process.running[process.running.index(copy)] = follower
    process.buffer.append((copy, OUTCOMES[k % len(OUTCOMES)]))
    process.lanes[follower] = rest
    w.ghosts.handed[follower] = copy


@step(lambda w: [p for p in w.active() if p.buffer])
def flush(w: World, process: Process, k: int) -> None:
    """A group commit: every outcome whose attempt is still its row's, with the counts; the losers are dropped. What began
    in the place of one of them is recorded with them."""
    for copy, kind in process.buffer:
        row = w.row(copy)
        if (
            row.attempt == copy.attempt
            and row.status in RUNNABLE
            and not (kind == "give_back" and row.status is Status.WORKING)
        ):
            assert copy not in w.ghosts.recorded, f"I5: a second outcome of {copy}"
            w.ghosts.recorded.add(copy)
            w.write(w.tasks[copy.task], copy.seq, turn_of(row, kind, w.now))
            w.note_start(process, copy)
        process.settled.append(copy)
    process.buffer = []
    for copy in process.running:
        row = w.row(copy)
        if row.attempt == copy.attempt and core.is_lent(row):
            w.write(w.tasks[copy.task], copy.seq, core.working(row, process.name))


@step(lambda w: [p for p in w.active() if p.settled])
def ack(w: World, process: Process, k: int) -> None:
    """The broker forgets what is recorded."""
    for copy in process.settled:
        row = w.row(copy)
        recorded = row.attempt > copy.attempt or row.status in TERMINAL or copy in w.ghosts.dropped
        assert recorded, f"I5: {copy} acknowledged, its row is {row}"
    w.broker.remove(process.settled, process.name)
    process.settled = []


def turn_of(row: Row, kind: str, now: int) -> Turn:
    """The turn of a buffered outcome, made from the row as it stands at the flush."""
    if kind == "give_back":
        return core.give_back(row, now=now)
    if kind == "cancel":
        return core.cancel(row)
    if kind == "stopped":
        return core.stop(row)
    if kind == "interrupted":
        return core.outcome(row, Status.ENQUEUE, Reason.INTERRUPTED, now=now)
    if kind == "retry" and row.retries < MAX_RETRIES:
        return core.outcome(row, Status.ERROR, Reason.RAISED, retry_at=now + BACKOFF)
    status, reason = {
        "finish": (Status.FINISH, Reason.RETURNED),
        "failed": (Status.FAILED, Reason.REFUSED),
        "retry": (Status.ERROR, Reason.RAISED),
        "error": (Status.ERROR, Reason.RAISED),
        "timeout": (Status.ERROR, Reason.TIMEOUT),
        "discarded": (Status.ERROR, Reason.DISCARDED),
    }[kind]
    return core.outcome(row, status, reason)
