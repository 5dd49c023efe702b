"""The foreign queue of the model: a dispatcher borrows, pushes and hands over; the engine's workers begin by attempt. The
engine may lose a copy, or give it to two. See `bookkeeping_steps`."""

from __future__ import annotations

from bookkeeping_model import QUEUE, Copy, Life, Look, Process, Role, Task, World
from bookkeeping_steps import STARTING, got, is_picked, lend, step

from asynctask.core import transitions as core
from asynctask.core.states import TERMINAL, State, Status
from asynctask.core.transitions import Begin

# -- Dispatch ------------------------------------------------------------------------------------------------------------


@step(lambda w: [w] if any(t.foreign for t in w.tasks) and len(w.active(Role.DISPATCHER)) < 2 else [])
def start_dispatcher(w: World, _: World, k: int) -> None:
    w.born += 1
    w.processes.append(Process(f"d{w.born}", Role.DISPATCHER))


def dispatchers(w: World) -> list[Process]:
    return [p for p in w.active(Role.DISPATCHER) if p.life in (Life.ALIVE, Life.STALLED)]


@step(
    lambda w: [
        (d, t)
        for d in dispatchers(w)
        if not (d.pushed or d.parts or d.claims or d.answer)
        for t in w.tasks
        if t.foreign and is_picked(w, t) and (t.limit is None or len(flying(w, t)) < t.limit)
    ]
)
def borrow_for_queue(w: World, where: tuple[Process, Task], k: int) -> None:
    """In its own name, as many as the Task's limit leaves."""
    dispatcher, task = where
    loans, claimed = lend(w, task, dispatcher.name, 1 + k % 4)
    if k < 4:
        got(w, dispatcher, task, loans, claimed)


def flying(w: World, task: Task) -> list[int]:
    return [seq for seq, row in enumerate(task.rows()) if core.is_held(row, task.lent(seq))]


def is_read(dispatcher: Process) -> bool:
    return all(part.left is not None for part in dispatcher.parts.values())


@step(lambda w: [d for d in dispatchers(w) if d.line and not d.pushed and is_read(d)])
def push(w: World, dispatcher: Process, k: int) -> None:
    """What it has goes out: it lands, it lands and will land again, or it hangs in the network and lands later or never."""
    dispatcher.pushed = True
    if k != 1:
        w.broker.push(dispatcher.line)
    if k in (1, 2):
        w.network.append(list(dispatcher.line))


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


@step(lambda w: [d for d in w.active(Role.DISPATCHER) if d.pushed])
def hand_over(w: World, dispatcher: Process, k: int) -> None:
    """What it pushed is the queue's, as far as it is its own yet."""
    for task in w.tasks:
        for loan in task.loans:
            if loan.process == dispatcher.name and loan.id in dispatcher.parts:
                loan.process = QUEUE
    for copy in dispatcher.claims:
        task, row = w.tasks[copy.task], w.row(copy)
        if row.process == dispatcher.name and row.status is Status.ENQUEUE:
            task.stored[copy.seq] = task.stored[copy.seq]._replace(process=QUEUE)
    dispatcher.line, dispatcher.pushed = [], False
    dispatcher.parts, dispatcher.claims = {}, set()


@step(lambda w: [t for t in w.tasks if any(each.process == QUEUE for each in t.loans)])
def trim(w: World, task: Task, k: int) -> None:
    """Ends the loans of the queue of which every row has ended, or waits in the ledger; cuts the others."""
    for loan in [each for each in task.loans if each.process == QUEUE]:
        rows = [(seq, task.row(seq)) for seq in range(loan.low, loan.high)]
        left = [seq for seq, row in rows if row.status in (Status.ENQUEUE, Status.WORKING) and row.due_at is None]
        if left:
            loan.low, loan.high = left[0], left[-1] + 1
        else:
            task.loans.remove(loan)


# -- The engine's workers ------------------------------------------------------------------------------------------------


@step(lambda w: [w] if w.broker.held and len(w.active(Role.ENGINE)) < 2 else [])
def start_worker(w: World, _: World, k: int) -> None:
    w.born += 1
    w.processes.append(Process(f"e{w.born}", Role.ENGINE))


@step(
    lambda w: (
        [p for p in w.active(Role.ENGINE) if p.life in (Life.ALIVE, Life.STALLED) and not p.line and not p.read]
        if None in w.broker.held.values()
        else []
    )
)
def fetch(w: World, process: Process, k: int) -> None:
    process.line = w.broker.fetch(process.name, 1 + k)


@step(lambda w: [p for p in w.active(Role.ENGINE) if p.life is Life.ALIVE and p.line])
def begin_read(w: World, process: Process, k: int) -> None:
    """One read for the batch: the rows, and the state of their Tasks."""
    process.read = [(copy, w.row(copy), w.tasks[copy.task].state) for copy in process.line]
    process.line = []


@step(lambda w: [p for p in w.active(Role.ENGINE) if p.life is Life.ALIVE and p.read])
def begin_act(w: World, process: Process, k: int) -> None:
    """Acts on what was read, however much has happened since."""
    copy, row, state = process.read.pop(0)
    decision = core.begin(row, copy.attempt, state)
    if decision is Begin.RUN:
        stale = copy.attempt != row.attempt or row.status in TERMINAL or row.due_at is not None
        assert not stale, f"begin: {copy} was begun for {row}"
        assert state in (None, *STARTING, State.FINALIZING), f"begin: begun while its Task is {state}"
        assert row.status is Status.ENQUEUE or row.process is None, f"begin: {copy}, though {row.process} works on it"
        if row.watched:
            process.pending.append(copy)
        else:
            process.running.append(copy)
            process.began[copy] = w.ghosts.began[copy] = w.now
    elif decision is Begin.DROP:
        w.ghosts.dropped.add(copy)
        process.settled.append(copy)
    else:
        process.buffer.append((copy, decision.value))


@step(lambda w: [p for p in w.active(Role.ENGINE) if p.settled])
def ack(w: World, process: Process, k: int) -> None:
    """The queue forgets what is recorded."""
    for copy in process.settled:
        row = w.row(copy)
        recorded = row.attempt > copy.attempt or row.status in TERMINAL or copy in w.ghosts.dropped
        assert recorded, f"I5: {copy} acknowledged, its row is {row}"
    w.broker.remove(process.settled, process.name)
    process.settled = []


# -- What an engine does wrong, and what is done about it ----------------------------------------------------------------


@step(lambda w: [w] if w.broker.held else [])
def queue_lost(w: World, _: World, k: int) -> None:
    """The engine's broker comes back empty."""
    w.ghosts.doubled |= {copy for copy, holder in w.broker.held.items() if holder is not None}
    w.broker.held.clear()


@step(lambda w: [c for c, h in w.broker.held.items() if h is not None and w.named(h).life is not Life.ALIVE])
def redeliver(w: World, copy: Copy, k: int) -> None:
    """The engine takes a copy from a worker that it has not heard of, dead or not, and gives it to another."""
    worker = w.named(w.broker.held[copy] or "")
    if worker.runs_on:
        w.ghosts.doubled.add(copy)
    elif w.current(copy):
        task = w.tasks[copy.task]
        w.write(task, copy.seq, core.watch(w.row(copy)))
    w.broker.held[copy] = None


@step(lambda w: [w] if w.look.missing is None and any(t.foreign for t in w.tasks) else [])
def look_read(w: World, _: World, k: int) -> None:
    """A look for lost copies begins: what the queue holds, by the ledger."""
    w.look = Look(tuple(c for c in w.held_by(QUEUE) if w.row(c).status is Status.ENQUEUE))


@step(lambda w: [w] if w.look.flying and w.look.missing is None else [])
def look_ask(w: World, _: World, k: int) -> None:
    """... what of it the queue does not hold ..."""
    w.look = w.look._replace(missing=frozenset(c for c in w.look.flying if c not in w.broker.held))


@step(lambda w: [w] if w.look.missing is not None else [])
def look_write(w: World, _: World, k: int) -> None:
    """... and what was missing on the look before as well waits in the ledger again."""
    missing = w.look.missing or frozenset()
    for copy in sorted(missing & w.missed):
        task, row = w.tasks[copy.task], w.row(copy)
        if row.attempt == copy.attempt:
            w.write(task, copy.seq, core.redispatch(row, task.state, now=w.now))
            w.settle(task)
    w.missed, w.look = missing - w.missed, Look(())


@step(lambda w: [t for t in w.open_tasks() if any(h is None and c.task == t.id for c, h in w.broker.held.items())])
def withdraw(w: World, task: Task, k: int) -> None:
    """A knob changed: the Task's waiting copies are taken out of the queue."""
    w.withdrawn.append(w.broker.withdraw(task.id))


@step(lambda w: w.withdrawn)
def give_back_rows(w: World, taken: list[Copy], k: int) -> None:
    """The rows of withdrawn copies wait again, or are cancelled with their Task; one that a worker has goes on."""
    w.withdrawn.remove(taken)
    for copy in taken:
        task, row = w.tasks[copy.task], w.row(copy)
        if row.attempt == copy.attempt and row.status is Status.ENQUEUE and row.due_at is None:
            w.write(task, copy.seq, core.give_back(row, task.state, now=w.now))
            w.settle(task)


@step(lambda w: w.withdrawn)
def withdrawer_dies(w: World, taken: list[Copy], k: int) -> None:
    w.withdrawn.remove(taken)
