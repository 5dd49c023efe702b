"""What befalls the world of the model: deaths and recovery, people's controls, closing. See `bookkeeping_steps`."""

from __future__ import annotations

from bookkeeping_model import Copy, Life, Look, Process, Recovery, Task, World
from bookkeeping_steps import MAX_GENERATIONS, STARTING, step

from asynctask.core import transitions as core
from asynctask.core.states import OPEN, PROBLEM, TERMINAL, Reason, State, Status
from asynctask.core.transitions import Turn

# -- Deaths and recovery -------------------------------------------------------------------------------------------------


@step(lambda w: w.active())
def kill(w: World, process: Process, k: int) -> None:
    """kill -9: everything it knew is gone, its copies stay under its name."""
    process.life = Life.DEAD
    process.batch, process.read, process.pending, process.running = [], [], [], []
    process.buffer, process.settled, process.lanes = [], [], {}


@step(lambda w: [p for p in w.processes if p.life is Life.ALIVE])
def stall(w: World, process: Process, k: int) -> None:
    """Its lease runs out while it lives."""
    process.life = Life.STALLED


@step(lambda w: [p for p in w.processes if p.life is Life.STALLED or (p.life is Life.ALIVE and p.forgotten)])
def beat(w: World, process: Process, k: int) -> None:
    """It renews its lease and goes on, unless it was declared dead and struck off: then it begins nothing more."""
    process.life = Life.LEAVING if process.forgotten else Life.ALIVE


@step(
    lambda w: [
        p for p in w.processes if p.life in (Life.ALIVE, Life.LEAVING) and (p.batch or p.read or p.running or p.pending)
    ]
)
def shut_down(w: World, process: Process, k: int) -> None:
    """In order: what it has not begun goes back to the queue, what runs is interrupted and waits again."""
    process.life = Life.LEAVING
    for copy in [*process.batch, *(copy for copy, _, _ in process.read), *process.pending]:
        if w.broker.held.get(copy) == process.name:
            w.broker.held[copy] = None
    process.buffer += [(copy, "interrupted") for copy in process.running]
    process.buffer += [(copy, "give_back") for followers in process.lanes.values() for copy in followers]
    process.lanes = {}
    process.batch, process.read, process.pending, process.running = [], [], [], []


def lost(w: World) -> list[Process]:
    """Processes to recover: registered with a lease that ended, or not registered though a list or a row names them."""
    named = {row.process for task in w.tasks for row in task.stored} | set(w.broker.held.values())
    return [p for p in w.processes if (p.name in named if p.forgotten else p.life in (Life.DEAD, Life.STALLED))]


@step(lambda w: lost(w) if len(w.recoveries) < 3 else [])
def recover_list(w: World, process: Process, k: int) -> None:
    """A process lists the copies held under the name of a process whose lease ended. Two may do so at once."""
    w.recoveries.append(Recovery(process.name, w.broker.of(process.name)))


@step(lambda w: [r for r in w.recoveries if not r.turned])
def recover_turn(w: World, recovery: Recovery, k: int) -> None:
    """One transaction: rows whose copies it held, and rows it was known to be working on though the broker forgot them."""
    recovery.turned = True
    at_work = [
        (t.id, seq, row)
        for t in w.tasks
        for seq, row in enumerate(t.rows())
        if row.process == recovery.process and row.status is Status.WORKING
    ]
    for task in w.tasks:
        for seq, row in enumerate(task.rows()):
            held = w.copy(task, seq) in recovery.copies and row.process in (None, recovery.process)
            if held or row.process == recovery.process:
                beside = [other for *where, other in at_work if where != [task.id, seq]]
                w.write(task, seq, core.recover(row, task.state, now=w.now, beside=beside))


@step(lambda w: [r for r in w.recoveries if r.turned])
def recover_drop(w: World, recovery: Recovery, k: int) -> None:
    """The dead process's listed copies leave the broker; it is struck off, even if it came back meanwhile."""
    w.broker.remove(recovery.copies, recovery.process)
    w.named(recovery.process).forgotten = True
    w.recoveries.remove(recovery)


@step(lambda w: w.recoveries)
def stop_recovery(w: World, recovery: Recovery, k: int) -> None:
    w.recoveries.remove(recovery)


@step(lambda w: [w] if w.broker.held else [])
def redis_lost(w: World, _: World, k: int) -> None:
    """Redis comes back empty."""
    w.ghosts.forgotten |= {copy for copy, holder in w.broker.held.items() if holder is not None}
    w.broker.held.clear()


@step(lambda w: [w] if w.look.missing is None else [])
def look_read(w: World, _: World, k: int) -> None:
    """A look for lost copies begins: what should be in the broker, by the ledger."""
    w.look = Look(tuple(copy for task in w.tasks for copy in w.flying_copies(task)))


@step(lambda w: [w] if w.look.flying and w.look.missing is None else [])
def look_ask(w: World, _: World, k: int) -> None:
    """... what of it the broker does not hold ..."""
    w.look = w.look._replace(missing=frozenset(c for c in w.look.flying if c not in w.broker.held))


@step(lambda w: [w] if w.look.missing is not None else [])
def look_write(w: World, _: World, k: int) -> None:
    """... and what was missing on the look before as well waits in the ledger again."""
    missing = w.look.missing or frozenset()
    for copy in sorted(missing & w.missed):
        row = w.row(copy)
        if row.attempt == copy.attempt:
            turn = core.redispatch(row, w.state(copy), held=False, missed_before=True, now=w.now)
            w.write(w.tasks[copy.task], copy.seq, turn)
    w.missed, w.look = missing - w.missed, Look(())


# -- Control -------------------------------------------------------------------------------------------------------------


@step(lambda w: w.open_tasks(*STARTING))
def pause(w: World, task: Task, k: int) -> None:
    task.turn(State.PAUSED, Reason.PAUSED)


@step(lambda w: w.open_tasks(State.PAUSED))
def resume(w: World, task: Task, k: int) -> None:
    task.turn(State.SPLITTING if task.splitting else State.RUNNING, Reason.RESUMED)


@step(lambda w: w.open_tasks(*STARTING, State.PAUSED))
def set_parallel(w: World, task: Task, k: int) -> None:
    """A person turns the knob; what flies already flies on."""
    task.parallel = (1, 2, 3, None)[k % 4]
    w.ghosts.cap[task.id] = None if task.parallel is None else max(task.parallel, task.flying)


@step(lambda w: w.open_tasks(*STARTING, State.PAUSED))
def cancel(w: World, task: Task, k: int) -> None:
    """The state first, so that nothing new starts; the rows are turned afterwards."""
    task.turn(State.CANCELLED, Reason.CANCELLED)
    task.splitting, task.sealed, task.turning, task.cursor = False, True, "cancel", 0


@step(
    lambda w: [
        t for t in w.open_tasks(State.CANCELLED) if not t.turning and not t.closed and any(map(core.at_rest, t.rows()))
    ]
)
def cancel_again(w: World, task: Task, k: int) -> None:
    """Maintenance finds rows of a cancelled Task that came to rest after the pass went by: another pass."""
    task.turning, task.cursor = "cancel", 0


@step(lambda w: [t for t in w.open_tasks(State.RUNNING, State.FINISHED, State.CANCELLED) if may_retry(t)])
def retry(w: World, task: Task, k: int) -> None:
    """An explicit retry opens a new generation, unsealed until the chosen rows are turned."""
    task.turn(State.RUNNING, Reason.RETRIED)
    task.generation, task.sealed, task.closed = task.generation + 1, False, False
    task.turning, task.cursor = "retry", 0
    task.statuses = PROBLEM if k == 0 else PROBLEM | {Status.CANCELLED}


def may_retry(task: Task) -> bool:
    over = task.state is not State.CANCELLED or task.closed
    return over and task.turning is None and task.generation < MAX_GENERATIONS and len(task.stored) > 0


@step(lambda w: [t for t in w.tasks if t.turning and not t.closed])
def turn_some(w: World, task: Task, k: int) -> None:
    """The next slice of rows of a cancel or a retry; after the last one the retried generation is sealed."""
    end = min(len(task.stored), task.cursor + 1 + k)
    for seq in range(task.cursor, end):
        row = task.row(seq)
        if task.turning == "retry" and row.status in task.statuses:
            w.write(task, seq, core.explicit_retry(row, now=w.now))
        elif task.turning == "cancel" and core.at_rest(row):
            w.write(task, seq, core.cancel(row))
    task.cursor = end
    if end == len(task.stored):
        if task.turning == "cancel":
            task.next_seq, task.reserved_from = end, None
        task.turning, task.sealed = None, True


@step(lambda w: [t for t in w.open_tasks() if any(h is None and c.task == t.id for c, h in w.broker.held.items())])
def withdraw(w: World, task: Task, k: int) -> None:
    """A knob changed: the Task's waiting copies are taken out of the broker."""
    w.withdrawn.append((task.id, w.broker.withdraw(task.id)))


@step(lambda w: w.withdrawn)
def give_back(w: World, taken: tuple[int, list[Copy]], k: int) -> None:
    """The rows of withdrawn copies wait again, or are cancelled with their Task; one that a process works on goes on."""
    w.withdrawn.remove(taken)
    for copy in taken[1]:
        task, row = w.tasks[copy.task], w.row(copy)
        if row.attempt == copy.attempt and row.status is Status.ENQUEUE and core.in_flight(row):
            cancelled = task.state is State.CANCELLED
            w.write(task, copy.seq, core.cancel(row) if cancelled else core.give_back(row, now=w.now))


@step(lambda w: w.withdrawn)
def withdrawer_dies(w: World, taken: tuple[int, list[Copy]], k: int) -> None:
    w.withdrawn.remove(taken)


def by_person(w: World, copy: Copy, turn: Turn) -> None:
    w.write(w.tasks[copy.task], copy.seq, turn)


@step(lambda w: w.jobs(Status.ENQUEUE, Status.WORKING))
def stop_job(w: World, copy: Copy, k: int) -> None:
    """Where it is at rest; else whoever has it lets go of it later, or dies; or it was taken out of its queue."""
    row = w.row(copy)
    turn = core.stop(row) if k % 2 else core.ask_stop(row)
    if turn is not None:
        by_person(w, copy, turn)


@step(lambda w: w.jobs(Status.STOPPED))
def start_job(w: World, copy: Copy, k: int) -> None:
    by_person(w, copy, core.start(w.row(copy), now=w.now))


@step(lambda w: w.jobs(Status.ENQUEUE, Status.STOPPED))
def cancel_job(w: World, copy: Copy, k: int) -> None:
    """A person deletes one job that has not begun, as far as the ledger knows."""
    by_person(w, copy, core.cancel(w.row(copy)))


@step(
    lambda w: [c for c in w.jobs(*PROBLEM, Status.CANCELLED) if w.tasks[c.task].alone and c.attempt < 4 * MAX_GENERATIONS]
)
def retry_job(w: World, copy: Copy, k: int) -> None:
    """A person restarts a job without a Task."""
    by_person(w, copy, core.explicit_retry(w.row(copy), now=w.now))


# -- Close ---------------------------------------------------------------------------------------------------------------


def ready(task: Task) -> bool:
    return not task.closed and core.may_close(task.state or "", task.sealed, task.turning is not None, task.counts)


@step(lambda w: [t for t in w.open_tasks() if ready(t) and len(w.closings) < 3])
def close_look(w: World, task: Task, k: int) -> None:
    """The counts say that nothing is open, and so do the rows. Two processes may find that out at once."""
    if not any(row.status in OPEN for row in task.stored):
        w.closings.append((task.id, task.generation))


@step(lambda w: w.closings)
def close(w: World, closing: tuple[int, int], k: int) -> None:
    """A compare-and-set on the generation closes it."""
    w.closings.remove(closing)
    task, generation = w.tasks[closing[0]], closing[1]
    if task.generation != generation or not ready(task):
        return
    assert all(row.status in TERMINAL for row in task.stored), "I4: closed with an open row"
    task.closed = True
    task.closes[generation] = task.closes.get(generation, 0) + 1
    if task.state is not State.CANCELLED:
        task.turn(State.FINALIZING, Reason.CLOSED)


@step(lambda w: w.open_tasks(State.FINALIZING))
def call_back(w: World, task: Task, k: int) -> None:
    task.turn(State.FINISHED, Reason.CALLED_BACK)
